"""A small HTTP/1.1 server on asyncio and httptools. One handler gets whole requests and returns whole answers.

Why not a library: most requests are creates, and a create that is only echoed costs about 14 µs of processor time here,
30 in uvicorn and 45 in Granian (both over ASGI; benchmarks/http_servers.py measures them in one run).

Guarantees:
- answers are sent in the order of their requests; one request of a connection is handled at a time;
- everything has a limit: connections, the head of a request, its body, the time in which it must arrive, and the bytes
  of all bodies and of all answers that are held in memory;
- a body is held only after its head was admitted: whoever has no valid token cannot make the server hold one;
- when there are too many connections, those that nobody uses are closed; health is answered in any case;
- a client that disconnects does not stop its request: a write that has started is finished, its answer is dropped;
- a refusal reaches the client: the connection is closed only after the client had time to read the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Sequence
from email.utils import formatdate
from typing import Final, Protocol

from duetime.clock import SystemClock
from duetime.http.body_budget import BodyBudget
from duetime.http.connection_limits import ConnectionLimits
from duetime.http.listeners import TlsFiles, bind_sockets
from duetime.http.messages import Admit, Handler
from duetime.http.server_connection import Connection
from duetime.http.unread_answers import UnreadAnswers

__all__ = ["HttpServer", "Listener", "serve_http"]

log = logging.getLogger("duetime.http")

SWEEP_SECONDS = 1.0
BUFFERED_BYTES_MAX = 64 * 1024 * 1024
TLS_HANDSHAKE_SECONDS = 10.0
TLS_HANDSHAKES_MAX: Final = 512
BACKLOG: Final = 1_024
TLS_CHECK_SWEEPS = 10


async def serve_http(
    handler: Handler,
    host: str = "",
    port: int = 0,
    *,
    sockets: Sequence[socket.socket] | None = None,
    body_bytes_max: int,
    connections_max: int,
    idle_timeout_ms: int,
    admit: Admit | None = None,
    connections_per_address_max: int = 0,
    buffered_bytes_max: int = BUFFERED_BYTES_MAX,
    tls: TlsFiles | None = None,
    backlog: int = BACKLOG,
    handshakes_max: int = TLS_HANDSHAKES_MAX,
) -> HttpServer:
    """Start to listen. Port 0: any free port, see `.port`. `sockets`: bound sockets, instead of host and port.

    `backlog` connections may be accepted at once, before those that are too many are closed."""
    server = HttpServer(handler, body_bytes_max, connections_max, idle_timeout_ms)
    server.admit = admit
    server.limits.per_address_max = connections_per_address_max
    server.bodies.bytes_max = server.unread.bytes_max = buffered_bytes_max
    server.tls = tls
    server.backlog, server.handshakes_max = backlog, handshakes_max
    await server.listen_on(bind_sockets(host, port) if sockets is None else sockets)
    return server


class Listener(Protocol):
    def close(self) -> None: ...


class _TlsListener:
    def __init__(self, sock: socket.socket, accepting: asyncio.Task[None]) -> None:
        self._sock = sock
        self._accepting = accepting

    def close(self) -> None:
        self._accepting.cancel()
        # After the task has stopped to wait for the socket.
        self._accepting.add_done_callback(lambda _: self._sock.close())


class HttpServer:
    """A listening server and its connections."""

    def __init__(self, handler: Handler, body_bytes_max: int, connections_max: int, idle_timeout_ms: int) -> None:
        self.port = 0
        self.handler = handler
        self.admit: Admit | None = None
        self.tls: TlsFiles | None = None
        self.handshakes: dict[asyncio.Task[None], None] = {}  # those that are not completed, the oldest first
        self.backlog = BACKLOG
        self.handshakes_max = TLS_HANDSHAKES_MAX
        self.body_bytes_max = body_bytes_max
        self.idle_sweeps_max = max(1, round(idle_timeout_ms / 1_000 / SWEEP_SECONDS))
        self.stopping = False
        self.sweeps = 0  # timeouts are measured in sweeps: counting is cheaper than reading the clock
        self.dropped_bytes = 0  # what refused clients have sent since the last sweep
        self.limits = ConnectionLimits(connections_max)
        self.bodies = BodyBudget(BUFFERED_BYTES_MAX)
        self.unread = UnreadAnswers(BUFFERED_BYTES_MAX)
        self.busy: set[Connection] = set()  # connections with a request that is not answered yet
        self.date_header = b""
        self._clock = SystemClock()
        self._idle = asyncio.Event()
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._listeners: list[Listener] = []

    @property
    def connections(self) -> set[Connection]:
        return self.limits.connections

    async def listen_on(self, sockets: Sequence[socket.socket]) -> list[Listener]:
        """Accept connections on these sockets too. They belong to the server now; a listener may be closed earlier."""
        loop = asyncio.get_running_loop()
        listeners: list[Listener] = []
        for sock in sockets:
            listener: Listener
            if self.tls is None:
                listener = await loop.create_server(lambda: Connection(self, loop), sock=sock, backlog=self.backlog)
            else:
                sock.setblocking(False)
                sock.listen(self.backlog)
                listener = _TlsListener(sock, loop.create_task(self._accept_tls(loop, sock, self.tls)))
            listeners.append(listener)
            self._listeners.append(listener)
        if self._sweep_handle is None:
            self.port = sockets[0].getsockname()[1]
            self._sweep(loop)
        return listeners

    async def _accept_tls(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: TlsFiles) -> None:
        """Not `create_server`: with it, connections would be without any limit until the end of their handshake."""
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:  # the client has closed it, or there are too many open files
                log.debug("cannot accept a connection: %s", error)
                await asyncio.sleep(0.05)
                continue
            if len(self.handshakes) >= self.handshakes_max:
                next(iter(self.handshakes)).cancel()
            handshake = loop.create_task(self._handshake(loop, accepted, tls.context))
            self.handshakes[handshake] = None
            handshake.add_done_callback(self.handshakes.pop)

    async def _handshake(
        self, loop: asyncio.AbstractEventLoop, accepted: socket.socket, context: ssl.SSLContext
    ) -> None:
        try:
            await loop.connect_accepted_socket(
                lambda: Connection(self, loop),
                accepted,
                ssl=context,
                ssl_handshake_timeout=TLS_HANDSHAKE_SECONDS,
                ssl_shutdown_timeout=1.0,
            )
        except OSError as error:  # also an SSLError, and a timeout
            log.debug("a TLS handshake failed: %s", error)

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sweeps += 1
        self.dropped_bytes = 0
        self.date_header = f"date: {formatdate(self._clock.wall_ms() // 1_000, usegmt=True)}\r\n".encode()
        for connection in list(self.connections):
            connection.sweep()
        if self.tls is not None and self.sweeps % TLS_CHECK_SWEEPS == 0:
            self.tls.reload_if_changed()
        self._sweep_handle = loop.call_later(SWEEP_SECONDS, self._sweep, loop)

    def connection_idle(self) -> None:
        """Called when a connection has closed, or has no request left to answer."""
        if self.stopping and not self.connections and not self.busy:
            self._idle.set()

    async def close(self, drain_ms: int = 0) -> None:
        """Accept no new connections, wait up to `drain_ms` for running requests, then abort the rest."""
        self.stopping = True
        for listener in self._listeners:
            listener.close()
        for handshake in self.handshakes:
            handshake.cancel()
        for connection in list(self.connections):
            connection.stop()
        self.connection_idle()
        await self._wait_until_idle(drain_ms / 1_000)
        for connection in list(self.connections):
            connection.abort()
        for connection in list(self.busy):
            connection.cancel()
        self.connection_idle()
        await self._wait_until_idle(1.0)
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()

    async def _wait_until_idle(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
