"""The composition root: the only file that builds everything; signals and drain."""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable

from duetime.api.app import Api
from duetime.api.auth import check_binding, is_loopback
from duetime.clock import Clock, SystemClock
from duetime.config import Config
from duetime.deliveries.webhook import Webhook
from duetime.delivery import Deliverer, Router
from duetime.engine import Engine
from duetime.errors import SetupError
from duetime.http_server import HttpServer, serve_http
from duetime.peer_calls import HttpPeers
from duetime.peers import Peers
from duetime.service import Service
from duetime.store import Store, open_store
from duetime.telemetry import Telemetry, log, set_up_logging

__all__ = ["App", "run"]


class App:
    """One instance: `start` it, use `address`, `stop` it."""

    def __init__(self, config: Config, *, clock: Clock | None = None) -> None:
        check_binding(config)
        self.config = config
        self.telemetry = Telemetry()
        self._clock = clock or SystemClock()
        self._store: Store | None = None
        self._deliverer: Deliverer | None = None
        self._peers: Peers | None = None
        self._engine: Engine | None = None
        self._server: HttpServer | None = None

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None, "not started"
        return self.config.server.listen.rpartition(":")[0], self._server.port

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        store = self._store = open_store(config.store.url)  # from here on `stop` closes it, also half open
        await store.migrate()
        await store.open()
        webhook = Webhook(config, self._clock, loopback_allowed=is_loopback(config.server.listen))
        self._deliverer = Router({"http": webhook, "https": webhook})
        engine = Engine(config, store, self._deliverer, self._clock, self.telemetry, address=config.server.listen)
        self._peers = HttpPeers(lambda: engine.membership.instance_id)
        service = Service(config, engine, store, self._deliverer, self._peers)
        await service.create_default_namespace()
        self._engine = engine
        await engine.start()
        api = Api(service, config, self.telemetry)
        host, _, port = config.server.listen.rpartition(":")
        try:
            self._server = await serve_http(
                api.handle,
                host.strip("[]"),
                int(port),
                body_bytes_max=config.server.request_bytes_max,
                connections_max=config.server.connections_max,
                idle_timeout_ms=config.server.idle_timeout.ms,
            )
        except OSError as error:
            raise SetupError(f"cannot listen on {config.server.listen}: {error.strerror or error}") from None

    async def stop(self) -> None:
        """Stop intake, let what is in flight land, settle, commit, release, sign off."""
        if self._engine is not None:
            self._engine.stopping = True
        if self._server is not None:
            await self._server.close(self.config.server.drain_timeout.ms)
        if self._engine is not None:
            await self._engine.stop()
        if self._peers is not None:
            await self._peers.close()
        if self._deliverer is not None:
            await self._deliverer.close()
        if self._store is not None:
            await self._store.close()
        self._server = self._engine = self._peers = self._deliverer = self._store = None


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once. Answers the exit code."""
    set_up_logging(config.log.level, config.log.format)
    # The writer thread must not wait 5 ms for the event loop to hand it the interpreter after each statement.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config))


async def _serve(config: Config) -> int:
    app = App(config)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_or_die, stop)
    await app.start()
    # What is here now stays: the collector need not look at it again and again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    host, port = app.address
    log.info("serving on http://%s:%d, store %s", host, port, config.store.url.partition("?")[0].rpartition("@")[2])
    await stop.wait()
    log.info("stopping: letting what is in flight land")
    await app.stop()
    log.info("stopped")
    return 0


def _stop_or_die(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("asked twice: ending at once")
        raise SystemExit(1)
    stop.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
