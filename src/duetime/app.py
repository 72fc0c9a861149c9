"""The composition root: the only module that builds all parts of an instance, and the order in which they begin."""

from __future__ import annotations

import asyncio
from typing import Final

from duetime.addresses import is_loopback, own_address
from duetime.api.auth import check_binding
from duetime.api.dispatch import Api
from duetime.clock import Clock, SystemClock
from duetime.cluster.peer_client import PeerClient
from duetime.component import Components, Part
from duetime.config import Config
from duetime.deliveries.webhook import Webhook
from duetime.delivery import Router
from duetime.descriptors import Sizes, size
from duetime.engine.engine import Engine
from duetime.listener import InstanceListener
from duetime.message_brokers import MessageBrokers
from duetime.service.service import Service
from duetime.store import Store, open_store
from duetime.telemetry import Telemetry

__all__ = ["App"]

_SECONDS_TO_END: Final = 60.0  # of a part, in addition to the drain timeout


class App:
    """One instance: call `start`, use `address`, call `stop`.

    `worker`: the number of this instance, from 1, if several share `server.listen`. It then also has its own listener.
    `sizes`: how the file descriptors are divided; by default as if there were no limit.
    """

    def __init__(
        self, config: Config, *, clock: Clock | None = None, worker: int | None = None, sizes: Sizes | None = None
    ) -> None:
        check_binding(config)
        self.config = config
        self.telemetry = Telemetry()
        self.parts = Components(seconds_to_end=config.server.drain_timeout.seconds + _SECONDS_TO_END)
        self.advertised = ""  # the address at which other instances reach this one
        self.is_shared = False  # can other instances use the same store?
        self._sizes = sizes or size(None, config)
        self._worker = worker
        self._clock = clock or SystemClock()
        self._listener = InstanceListener(config, self._sizes, worker)

    @property
    def address(self) -> tuple[str, int]:
        return self._listener.address

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config, clock, parts = self.config, self._clock, self.parts
        # The listener first: its port is part of the address in the member row, and if the port is in use, the start
        # must fail before anything is changed. Until the engine has started, requests are answered with 503.
        listener = self._listener
        await parts.begin(listener)
        self.advertised = own_address(
            config.server.listen, config.cluster.advertise, listener.port, worker=self._worker
        )

        store = open_store(config.store.url)
        self.is_shared = not store.capabilities.exclusive
        await parts.begin(Part("the store", start=lambda: _open(store), stop=store.close))

        brokers = MessageBrokers(config, clock, self.telemetry)
        await parts.begin(Part("message brokers", start=brokers.start, stop=brokers.close))
        webhook = Webhook(
            config,
            clock,
            loopback_allowed=is_loopback(config.server.listen),
            sockets_max=self._sizes.callback_sockets_max,
            lookups_max=self._sizes.lookups_max,
        )
        deliverer = Router({"http": webhook, "https": webhook, **brokers.deliverers})
        await parts.begin(Part("deliveries", stop=deliverer.close))

        engine = Engine(config, store, deliverer, clock, self.telemetry, address=self.advertised)
        peers = PeerClient(lambda: engine.membership.instance_id, ca_file=config.cluster.ca_file)
        await parts.begin(Part("connections to other instances", stop=peers.close))
        service = Service(config, engine, store, deliverer, peers)
        await service.namespaces.create_default()
        await parts.begin(
            Part("commands of brokers", start=lambda: brokers.open_intakes(service), stop=brokers.stop_intakes)
        )
        await parts.begin(
            Part(
                "the engine",
                start=engine.start,
                drain=lambda: self._drain(engine),
                not_ready=engine.readiness,
                failed=engine.failed,
            )
        )

        api = Api(service, config, self.telemetry, not_ready=parts.not_ready)
        listener.server.handler, listener.server.admit = api.handle, api.admit
        await parts.begin(Part("intake of commands", start=brokers.start_intakes, drain=brokers.stop_intakes))
        await parts.begin(Part("admission", start=listener.listen_on_shared, drain=lambda: self._refuse_work(engine)))

    async def _refuse_work(self, engine: Engine) -> None:
        """From now on commands are refused as not applied, and the workers that share the address get the new
        connections."""
        engine.stopping = True
        self._listener.close_shared()

    async def _drain(self, engine: Engine) -> None:
        has_others = engine.started and len(engine.membership.alive) > 1
        await engine.stop()
        if has_others:
            # The other instances read at their next heartbeat who owns the shards now. Until then this instance keeps
            # listening and refuses their commands as not applied. Without a listener, or with a closed connection, the
            # outcome of such a command would be unknown to its sender.
            await asyncio.sleep(2 * self.config.engine.heartbeat_interval.seconds)

    async def stop(self) -> bool:
        """Stops accepting timers, drains, settles and commits, releases the shards and leaves the cluster. False: a
        part could not, and the log says why."""
        return await self.parts.end()

    def reload_certificate(self) -> None:
        """Use the files of the TLS certificate as they are now, for new connections."""
        self._listener.reload_certificate()


async def _open(store: Store) -> None:
    await store.migrate()
    await store.open()
