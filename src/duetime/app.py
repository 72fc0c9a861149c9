"""The composition root: the only module that builds all parts. Also the addresses, signals and drain of the process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from duetime.api.auth import check_binding, is_loopback, split_listen
from duetime.api.dispatch import TEXT, Api
from duetime.clock import Clock, SystemClock
from duetime.cluster.forwarding import Peers
from duetime.cluster.peer_client import PeerClient
from duetime.cluster.peer_protocol import REFUSED
from duetime.config import Config, split_advertise
from duetime.deliveries.webhook import Webhook
from duetime.delivery import Deliverer, Router
from duetime.descriptors import Sizes, fitted, lowered_text, raised_limit, size
from duetime.engine.engine import Engine
from duetime.engine.namespaces import Namespaces
from duetime.errors import NotReady, SetupError
from duetime.http.listeners import TlsFiles, bind_sockets
from duetime.http.messages import Request, Response, problem_response
from duetime.http.server import HttpServer, Listener, serve_http
from duetime.message_brokers import MessageBrokers
from duetime.printable import redacted_url
from duetime.service.namespaces import pause_all
from duetime.service.service import Service
from duetime.store import Store, open_store
from duetime.telemetry import Telemetry, log, set_up_logging

__all__ = ["READY", "App", "Worker", "bind_listener", "log_warnings", "own_address", "pause_namespaces", "run"]

READY: Final = b"R"  # what a worker sends to its parent process when it serves


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
        self._sizes = sizes or size(None, config)
        self.telemetry = Telemetry()
        self.advertised = ""  # the address at which other instances reach this one
        self._worker = worker
        self._clock = clock or SystemClock()
        # The address shared with other workers. This instance listens on it only while it can serve.
        self._shared: list[socket.socket] | list[Listener] = []
        self._store: Store | None = None
        self._deliverer: Deliverer | None = None
        self._brokers: MessageBrokers | None = None
        self._peers: Peers | None = None
        self._engine: Engine | None = None
        self._server: HttpServer | None = None

    @property
    def failed(self) -> asyncio.Event:
        """Set when an internal error has ended the engine."""
        assert self._engine is not None, "not started"
        return self._engine.failed

    @property
    def address(self) -> tuple[str, int]:
        assert self._server is not None, "not started"
        host, _, port = self.config.server.listen.rpartition(":")
        return host, int(port) if self._worker is not None else self._server.port

    async def start(self) -> None:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        config = self.config
        # The listener first: its port is part of the address in the member row, and if the port is in use, the start
        # must fail before anything is changed. Until the engine has started, requests are answered with 503.
        shared = self._shared = self._bind_shared()
        server = self._server = await self._listen()
        self.advertised = own_address(config, server.port, worker=self._worker)
        # From here on `stop` closes it, even if it was not opened completely.
        store = self._store = open_store(config.store.url)
        await store.migrate()
        await store.open()
        webhook = Webhook(
            config,
            self._clock,
            loopback_allowed=is_loopback(config.server.listen),
            sockets_max=self._sizes.callback_sockets_max,
            lookups_max=self._sizes.lookups_max,
        )
        brokers = self._brokers = MessageBrokers(config, self._clock, self.telemetry)
        self._deliverer = Router({"http": webhook, "https": webhook, **brokers.deliverers})
        await brokers.start()
        engine = Engine(config, store, self._deliverer, self._clock, self.telemetry, address=self.advertised)
        self._peers = PeerClient(lambda: engine.membership.instance_id, ca_file=config.cluster.ca_file)
        service = Service(config, engine, store, self._deliverer, self._peers)
        await service.namespaces.create_default()
        self._engine = engine
        await brokers.open_intakes(service)
        await engine.start()
        api = Api(service, config, self.telemetry)
        server.handler, server.admit = api.handle, api.admit
        brokers.start_intakes()
        self._shared = await server.listen_on(shared)

    def _bind_shared(self) -> list[socket.socket]:
        return [] if self._worker is None else bind_listener(self.config.server.listen, reuse_port=True)

    async def _listen(self) -> HttpServer:
        config = self.config.server
        tls = TlsFiles(config.tls_certificate, config.tls_key) if config.tls_certificate else None
        sockets = bind_listener(config.listen if self._worker is None else worker_listen(self.config, self._worker))
        try:
            return await serve_http(
                _unreachable,
                admit=_not_ready,
                sockets=sockets,
                body_bytes_max=config.request_bytes_max,
                connections_max=config.connections_max,
                connections_per_address_max=config.connections_per_address_max,
                buffered_bytes_max=config.buffered_bytes_max,
                tls=tls,
                idle_timeout_ms=config.idle_timeout.ms,
                backlog=self._sizes.backlog,
                handshakes_max=self._sizes.handshakes_max,
            )
        except OSError as error:  # another process bound it at the same time and listened first
            for sock in sockets:
                sock.close()
            raise _cannot_listen(config.listen, error) from None

    def reload_certificate(self) -> None:
        """Use the files of the TLS certificate as they are now, for new connections."""
        if self._server is not None and self._server.tls is not None:
            self._server.tls.reload()

    async def stop(self) -> None:
        """Stops accepting timers, drains, settles and commits, releases the shards and leaves the cluster."""
        if self._engine is not None:
            self._engine.stopping = True
        while self._shared:
            self._shared.pop().close()  # the other workers still listen on it
        if self._brokers is not None:
            await self._brokers.stop_intakes()
        if self._engine is not None:
            has_others = self._engine.started and len(self._engine.membership.alive) > 1
            await self._engine.stop()
            if has_others:
                # The other instances read at their next heartbeat who owns the shards now. Until then this instance
                # keeps listening and refuses their commands as not applied. Without a listener, or with a closed
                # connection, the outcome of such a command would be unknown to its sender.
                await asyncio.sleep(2 * self.config.engine.heartbeat_interval.seconds)
        if self._server is not None:
            await self._server.close(self.config.server.drain_timeout.ms)
        if self._peers is not None:
            await self._peers.close()
        if self._deliverer is not None:
            await self._deliverer.close()
        if self._brokers is not None:
            await self._brokers.close()
        if self._store is not None:
            await self._store.close()
        self._server = self._engine = self._peers = self._deliverer = self._brokers = self._store = None


async def _unreachable(request: Request) -> Response:
    raise AssertionError("every request is answered by _not_ready")


def _not_ready(request: Request) -> Response:
    """Answers requests until the engine has started, without their bodies."""
    if request.path == "/healthz":
        return Response(200, b"alive\n", TEXT)
    later = (("retry-after", str(NotReady.retry_after_seconds)),)
    if request.path == "/readyz":
        return Response(503, b"not ready: starting\n", TEXT, later)
    refused = (*later, (REFUSED, "not carried out"))
    return problem_response(503, NotReady.code, "this instance is starting; nothing was applied", refused)


# --- addresses -----------------------------------------------------------------------------------


def bind_listener(listen: str, *, reuse_port: bool = False) -> list[socket.socket]:
    """Binds the sockets of a "host:port"."""
    try:
        return bind_sockets(*split_listen(listen), reuse_port=reuse_port)
    except OSError as error:
        raise _cannot_listen(listen, error) from None


def worker_listen(config: Config, worker: int) -> str:
    """The "host:port" of the own listener of a worker, whose number is from 1."""
    first = config.cluster.worker_ports
    return f"{config.server.listen.rpartition(':')[0]}:{first and first + worker - 1}"


def _cannot_listen(listen: str, error: OSError) -> SetupError:
    return SetupError(f"cannot listen on {listen}: {error.strerror or error}")


AddressSource = Callable[[socket.AddressFamily], str]  # finds an address of this machine; may raise OSError


def own_address(
    config: Config, port: int, *, worker: int | None = None, sources: Sequence[AddressSource] | None = None
) -> str:
    """The address at which other instances reach the listener with this port: cluster.advertise, or the host of
    server.listen. If the server listens on all addresses, it is the first usable address that `sources` find.
    """
    host, _ = split_listen(config.server.listen)
    if config.cluster.advertise:
        host, first = split_advertise(config.cluster.advertise)
        port = port if first is None else first + (worker or 1) - 1
    elif host in ("0.0.0.0", "::"):
        family = socket.AF_INET if host == "0.0.0.0" else socket.AF_INET6
        host = _machine_address(family, (_address_by_route, _address_by_host_name) if sources is None else sources)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _machine_address(family: socket.AddressFamily, sources: Sequence[AddressSource]) -> str:
    for source in sources:
        try:
            found = ipaddress.ip_address(source(family))
        except (OSError, ValueError):
            continue
        if not (found.is_loopback or found.is_unspecified or found.is_link_local):
            return str(found)
    log.warning("found no address at which other machines can reach this instance; set cluster.advertise")
    return "127.0.0.1" if family == socket.AF_INET else "::1"


def _address_by_route(family: socket.AddressFamily) -> str:
    """The address from which this machine would send to an address that is reserved for documentation. Nothing is
    sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1" if family == socket.AF_INET else "2001:db8::1", 9))
        return str(probe.getsockname()[0])


def _address_by_host_name(family: socket.AddressFamily) -> str:
    return str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])


# --- a start with everything paused --------------------------------------------------------------


async def pause_namespaces(config: Config) -> None:
    """Pause all namespaces in the database, before any instance that starts after this fires a timer. The pause is
    stored: it holds for instances that are started later, without this, and a worker that is started again does not
    undo what was resumed meanwhile (docs/adr/0032)."""
    store = open_store(config.store.url)
    try:
        if not store.capabilities.durable:
            raise SetupError(
                "--paused pauses the namespaces in the database; store.url is memory://, which starts empty"
            )
        set_up_logging(config.log.level, config.log.format)
        await store.migrate()
        await store.open()
        clock = SystemClock()
        names = await pause_all(Namespaces(store, clock), clock, config.namespaces.default_num_shards)
    finally:
        await store.close()
    log.warning("--paused: no timer of %s fires until `duetime namespace resume`", _some(names))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} namespace{'s' * (len(names) != 1)} ({', '.join(map(repr, names[:10]))}{more})"


# --- the process ---------------------------------------------------------------------------------


class Worker(Struct, frozen=True):
    """A process of the supervisor: its number, from 1, and its end of the socket pair to the parent process."""

    number: int
    channel: socket.socket


def run(config: Config, worker: Worker | None = None) -> int:
    """Serves until it has to stop, then drains. Returns the exit code.

    A process without workers stops at SIGTERM or SIGINT; a second signal ends it at once. A worker stops at SIGTERM or
    when its channel is closed.
    """
    set_up_logging(config.log.level, config.log.format, worker=None if worker is None else worker.number)
    sizes = size(raised_limit(), config)
    if worker is None:  # otherwise the parent process has logged them, once for all workers
        log_warnings(config, sizes)
    config = fitted(config, sizes)
    # The default is 5 ms: so long the writer thread would wait for the event loop to release the interpreter lock
    # after each statement.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, sizes, worker))


def log_warnings(config: Config, sizes: Sizes) -> None:
    """Log the warnings that were found while the configuration was loaded, before logging was set up; and the limits
    that had to be lowered."""
    for warning in config.warnings:
        log.warning("%s", warning)
    if sizes.lowered:
        log.warning("%s", lowered_text(config, sizes))


async def _serve(config: Config, sizes: Sizes, worker: Worker | None) -> int:
    app = App(config, worker=None if worker is None else worker.number, sizes=sizes)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if worker is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop_or_exit, stop)
    else:
        # Only the parent counts signals: a worker may get the same one several times, which must not end it at once.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        worker.channel.setblocking(False)
        loop.add_reader(worker.channel, _parent_closed, loop, worker.channel, stop)
    await app.start()
    if config.server.tls_certificate:
        loop.add_signal_handler(signal.SIGHUP, app.reload_certificate)
    # These objects live until the end: the garbage collector need not visit them in each run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    if worker is not None:
        with contextlib.suppress(OSError):  # the parent has ended: the closed channel stops this worker too
            worker.channel.send(READY)
    scheme = "https" if config.server.tls_certificate else "http"
    log.info("serving on %s://%s:%d%s", scheme, *app.address, _serving_details(app))
    code = await _until_stop(app, stop)
    await app.stop()
    log.info("stopped")
    return code


async def _until_stop(app: App, stop: asyncio.Event) -> int:
    """Waits until the process has to stop or an internal error ends the engine, because a process that fires nothing
    must not keep running. Returns the exit code."""
    stopped, failed = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(app.failed.wait())
    await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    failed.cancel()
    if app.failed.is_set():
        log.critical("stopping after an internal error")
        return 1
    log.info("stopping: waiting for deliveries in flight")
    return 0


def _serving_details(app: App) -> str:
    """The store, and the advertised address if it is a different one, for the log line."""
    assert app._store is not None
    no_other_address = app._store.capabilities.exclusive or app.advertised == "{}:{}".format(*app.address)
    elsewhere = "" if no_other_address else f"; other instances reach it at {app.advertised}"
    return f", store {store_name(app.config)}{elsewhere}"


def store_name(config: Config) -> str:
    """The URL of the store without user, password and options."""
    return redacted_url(config.store.url).partition("?")[0].rpartition("@")[2]


def _stop_or_exit(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: ending at once")
        raise SystemExit(1)
    stop.set()


def _parent_closed(loop: asyncio.AbstractEventLoop, channel: socket.socket, stop: asyncio.Event) -> None:
    """The parent closed the channel: it has ended, or this worker has to stop."""
    loop.remove_reader(channel)
    stop.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop
