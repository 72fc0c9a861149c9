"""A small HTTP/1.1 server on asyncio and httptools. One handler gets whole requests and returns whole answers.

Why not a library: most requests are creates, and a create that is only echoed costs about 14 µs of processor time here,
30 in uvicorn and 45 in Granian (both over ASGI; benchmarks/http_servers.py measures them in one run).

Guarantees:
- answers are sent in the order of their requests; one request of a connection is handled at a time;
- everything has a limit: connections, the head of a request, its body, the time in which it must arrive;
- a client that disconnects does not stop its request: a write that has started is finished, its answer is dropped;
- a refusal reaches the client: the connection is closed only after the client had time to read the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import cast

import httptools

from duetime.clock import SystemClock
from duetime.errors import DuetimeError
from duetime.http.listeners import bind_sockets
from duetime.wire import encode_problem, problem_of

__all__ = ["Handler", "HttpServer", "Request", "Response", "problem_response", "serve_http"]

log = logging.getLogger("duetime.http")

HEAD_BYTES_MAX = 16_384
SWEEP_SECONDS = 1.0
# What a refused client still sends is read and dropped, for this many sweeps and up to this many bytes.
LINGER_SWEEPS = 2
LINGER_BYTES_MAX = 64 * 1024 * 1024

JSON = b"application/json"
PROBLEM_JSON = b"application/problem+json"


class Request:
    """One request. `path` is as it was sent, not percent-decoded; the query is dropped."""

    __slots__ = ("_headers", "body", "keep_alive", "method", "path")

    def __init__(
        self,
        method: str,
        path: str,
        *,
        headers: dict[bytes, bytes] | None = None,
        body: bytes = b"",
        keep_alive: bool = True,
    ) -> None:
        self.method = method
        self.path = path
        self.body = body
        self.keep_alive = keep_alive
        self._headers = {} if headers is None else headers

    def header(self, name: bytes) -> str | None:
        """A header by its name in lower case. The values of a repeated header are joined with ", "."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self._headers.items()}


class Response:
    """One answer. `headers` is not checked: it must not contain text from a request."""

    __slots__ = ("body", "content_type", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        content_type: bytes = JSON,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.status = status
        self.body = body
        self.content_type = content_type
        self.headers = headers


Handler = Callable[[Request], Awaitable[Response]]


async def serve_http(
    handler: Handler,
    host: str = "",
    port: int = 0,
    *,
    sockets: Sequence[socket.socket] | None = None,
    body_bytes_max: int,
    connections_max: int,
    idle_timeout_ms: int,
) -> HttpServer:
    """Start to listen. Port 0: any free port, see `.port`. `sockets`: bound sockets, instead of host and port."""
    server = HttpServer(handler, body_bytes_max, connections_max, idle_timeout_ms)
    await server.listen_on(bind_sockets(host, port) if sockets is None else sockets)
    return server


class HttpServer:
    """A listening server and its connections."""

    def __init__(self, handler: Handler, body_bytes_max: int, connections_max: int, idle_timeout_ms: int) -> None:
        self.port = 0
        self.handler = handler
        self.body_bytes_max = body_bytes_max
        self.connections_max = connections_max
        self.idle_sweeps_max = max(1, round(idle_timeout_ms / 1_000 / SWEEP_SECONDS))
        self.stopping = False
        self.sweeps = 0  # timeouts are measured in sweeps: counting is cheaper than reading the clock
        self.connections: set[_Connection] = set()
        self.busy: set[_Connection] = set()  # connections with a request that is not answered yet
        self.date_header = b""
        self._clock = SystemClock()
        self._idle = asyncio.Event()
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._listeners: list[asyncio.Server] = []

    async def listen_on(self, sockets: Sequence[socket.socket]) -> list[asyncio.Server]:
        """Accept connections on these sockets too. They belong to the server now; a listener may be closed earlier."""
        loop = asyncio.get_running_loop()
        listeners: list[asyncio.Server] = []
        for sock in sockets:
            listener = await loop.create_server(
                lambda: _Connection(self, loop),
                sock=sock,
                backlog=1_024,
            )
            listeners.append(listener)
            self._listeners.append(listener)
        if self._sweep_handle is None:
            self.port = sockets[0].getsockname()[1]
            self._sweep(loop)
        return listeners

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        self.sweeps += 1
        self.date_header = f"date: {formatdate(self._clock.wall_ms() // 1_000, usegmt=True)}\r\n".encode()
        for connection in list(self.connections):
            connection.sweep()
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


class _Refused(Exception):
    """Raised in callbacks of the parser, to stop parsing: this request is refused."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        self.response = problem_response(status, code, detail)


class _Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._since = server.sweeps  # when the current activity (receiving, answering, idle) began
        # One task for the life of the connection, which waits between requests: a new task for each request would cost
        # more than parsing it.
        self._task: asyncio.Task[None] | None = None
        self._more: asyncio.Future[None] | None = None
        self._busy = False
        self._waiting: deque[Request | Response] = deque()
        self._reading_paused = False
        self._writing_paused: asyncio.Future[None] | None = None
        self._ended = False  # the client sends no more
        self._discarding = False  # what the client sends is dropped
        self._discarded_bytes = 0
        # the request that is being received
        self._receiving = False
        self._in_head = True
        self._head_bytes = 0
        self._fed_bytes = 0
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._continue_expected = False

    # -- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's transport is not a subclass, but has the same methods
        self._parser = httptools.HttpRequestParser(self)
        full = len(self._server.connections) >= self._server.connections_max
        self._server.connections.add(self)
        if full or self._server.stopping:
            self._refuse(problem_response(503, "not_applied", "this server has too many connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._parser = None  # parser and connection refer to each other
        self._waiting.clear()
        self._resume_writer()
        if not self._busy:
            self.cancel()
        self._server.connections.discard(self)
        self._server.connection_idle()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES_MAX:
                self.abort()
            return
        assert self._parser is not None
        arriving = self._headers if self._receiving else None
        body_bytes = self._body_bytes
        try:
            self._parser.feed_data(data)
            if self._headers is arriving and self._body_bytes == body_bytes:
                # All data belongs to the head, the trailers or the size of a chunk. The parser does not report an
                # unfinished header, so the bytes that it was given are counted.
                self._fed_bytes += len(data)
                if self._fed_bytes > HEAD_BYTES_MAX:
                    raise _head_too_large()
        except _Refused as refused:
            self._refuse(refused.response)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(_refusal(error))
        if len(self._waiting) > 1 and not self._reading_paused and self._transport is not None:
            # The client pipelines requests: do not read more of them before these are answered.
            self._reading_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        # A client may close its sending half and still wait for its answers.
        if not self._busy or self._transport is None or not self._transport.can_write_eof():
            return False
        self._ended = True
        return True

    def pause_writing(self) -> None:
        self._writing_paused = self._loop.create_future()
        self._since = self._server.sweeps

    def resume_writing(self) -> None:
        self._resume_writer()

    def _resume_writer(self) -> None:
        if self._writing_paused is not None and not self._writing_paused.done():
            self._writing_paused.set_result(None)
        self._writing_paused = None

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        self._receiving = True
        self._since = self._server.sweeps

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._head_bytes += len(name) + len(value) + 4
        if not self._in_head:  # a trailer: it is ignored, and must not be taken for a header
            if self._head_bytes > HEAD_BYTES_MAX:
                raise _head_too_large()
            return
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        self._in_head = False
        headers = self._headers
        if self._head_bytes + len(self._url) > HEAD_BYTES_MAX:
            raise _head_too_large()
        assert self._parser is not None
        if b"transfer-encoding" in headers and b"content-length" in headers:
            raise _Refused(400, "bad_request", "a request must not have both Content-Length and Transfer-Encoding")
        length = headers.get(b"content-length")
        if length is not None and int(length) > self._server.body_bytes_max:
            raise self._body_too_large()
        if b"host" not in headers and self._parser.get_http_version() == "1.1":
            raise _Refused(400, "bad_request", "an HTTP/1.1 request must have a Host header")
        if b"," in headers.get(b"host", b""):
            raise _Refused(400, "bad_request", "a request must have only one Host header")
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue":
            self._continue_expected = True
            self._send_continue()

    def on_body(self, data: bytes) -> None:
        self._continue_expected = False
        self._fed_bytes = 0
        if not self._body:
            self._body = data  # most bodies arrive in one piece
        else:
            # Not a list of pieces: small pieces would need twenty times their size in memory.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data
        self._body_bytes += len(data)
        if self._body_bytes > self._server.body_bytes_max:
            raise self._body_too_large()

    def on_message_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if parser.should_upgrade():
            return  # the parser stops here; see _ignore_upgrade
        path = self._url.partition(b"?")[0]
        if path[:1] != b"/":
            path = _path_of(path)
        request = Request(
            parser.get_method().decode("latin-1"),
            path.decode("latin-1"),
            headers=self._headers,
            body=bytes(self._body),
            keep_alive=parser.should_keep_alive(),
        )
        self._reset_request()
        self._enqueue(request)

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its headers for an upgrade, which a server may ignore."""
        assert self._parser is not None
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(
                problem_response(405, "method_not_allowed", "CONNECT is not supported: this server is not a proxy")
            )
            return
        lines = [b"%s %s HTTP/%s" % (method, self._url, self._parser.get_http_version().encode())]
        lines += [b"%s: %s" % pair for pair in self._headers.items() if pair[0] not in _UPGRADE_HEADERS]
        self._reset_request()
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _reset_request(self) -> None:
        self._receiving = False
        self._in_head = True
        self._head_bytes = 0
        self._fed_bytes = 0
        self._url = b""
        self._headers = {}
        self._body = b""
        self._body_bytes = 0
        self._continue_expected = False

    def _body_too_large(self) -> _Refused:
        return _Refused(413, "too_large", f"the body is larger than {self._server.body_bytes_max} bytes")

    def _send_continue(self) -> None:
        """Tell the client to send the body, when all earlier requests are answered."""
        if self._continue_expected and not self._busy and self._transport is not None:
            self._continue_expected = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- answering

    def _enqueue(self, item: Request | Response) -> None:
        self._waiting.append(item)
        if self._busy:
            return
        self._busy = True
        self._server.busy.add(self)
        if self._task is None:
            self._task = self._loop.create_task(self._answer())
        elif self._more is not None:
            self._more.set_result(None)

    async def _answer(self) -> None:
        while True:
            try:
                await self._answer_waiting()
            finally:
                self._between_requests()
            if self._transport is None:
                return
            self._more = self._loop.create_future()
            await self._more

    async def _answer_waiting(self) -> None:
        while self._waiting:
            item = self._waiting.popleft()
            if isinstance(item, Response):
                self._write(item, keep_alive=False, head_only=False)
                self._linger()
                return
            response = await self._handled(item)
            is_last = not item.keep_alive or (self._ended and not self._waiting)
            keep_alive = not is_last and not self._server.stopping
            self._write(response, keep_alive=keep_alive, head_only=item.method == "HEAD")
            if is_last:
                self._close()
                return
            if not keep_alive:
                self._linger()
                return
            if self._writing_paused is not None:
                await self._writing_paused

    async def _handled(self, request: Request) -> Response:
        try:
            return await self._server.handler(request)
        except Exception:
            log.exception("unexpected error in %s %s", request.method, request.path)
            return problem_response(500, "internal", "internal error; the server's log has the details")

    def _between_requests(self) -> None:
        self._busy = False
        self._server.busy.discard(self)
        self._since = self._server.sweeps
        self._send_continue()
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()
        self._server.connection_idle()

    def _write(self, response: Response, *, keep_alive: bool, head_only: bool) -> None:
        """Head and body in one write: two writes would be two packets."""
        if self._transport is None or self._transport.is_closing():
            return  # the client has disconnected
        body = response.body
        head = b"%scontent-type: %s\r\ncontent-length: %d\r\n%s" % (
            _STATUS_LINES[response.status],
            response.content_type,
            len(body),
            self._server.date_header,
        )
        if response.headers:
            head += "".join(f"{name}: {value}\r\n" for name, value in response.headers).encode("latin-1")
        head += b"connection: keep-alive\r\n\r\n" if keep_alive else b"connection: close\r\n\r\n"
        self._transport.write(head if head_only else head + body)

    # -- closing

    def _refuse(self, response: Response) -> None:
        """Send this answer after those of earlier requests, then close. Everything else that arrives is dropped."""
        self._discarding = True
        self._reset_request()
        self._enqueue(response)

    def _linger(self) -> None:
        """Close only the sending half: closing with unread input sends a reset, and the client may lose the answer."""
        self._discarding = True
        transport = self._transport
        if transport is not None and not transport.is_closing() and transport.can_write_eof():
            transport.write_eof()

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def cancel(self) -> None:
        """Stop answering requests of this connection."""
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """The server stops: close now if idle. A busy connection closes after its answer."""
        if not self._busy and not self._receiving:
            self._close()

    def sweep(self) -> None:
        idle_sweeps = self._server.sweeps - self._since
        if self._busy:
            if self._writing_paused is not None and idle_sweeps > self._server.idle_sweeps_max:
                self.abort()  # the client does not read its answers
        elif self._discarding:
            if idle_sweeps > LINGER_SWEEPS:
                self.abort()
        elif idle_sweeps > self._server.idle_sweeps_max:
            if self._receiving:
                self._refuse(problem_response(408, "request_timeout", "the request did not arrive completely in time"))
            else:
                self._close()


_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings", b"expect"})
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def problem_response(status: int, code: str, detail: str, headers: tuple[tuple[str, str], ...] = ()) -> Response:
    """The answer for an error of HTTP, outside of the API."""
    error = DuetimeError(detail, code=code)
    error.status, error.title = status, HTTPStatus(status).phrase
    return Response(status, encode_problem(problem_of(error)), PROBLEM_JSON, headers)


def _head_too_large() -> _Refused:
    return _Refused(431, "head_too_large", f"the head of the request is larger than {HEAD_BYTES_MAX} bytes")


def _refusal(error: httptools.HttpParserError) -> Response:
    cause = error.__context__
    if isinstance(cause, _Refused):
        return cause.response
    if isinstance(error, httptools.HttpParserCallbackError):
        log.error("unexpected error while parsing a request; it is refused", exc_info=cause or error)
    return problem_response(400, "bad_request", "the request is not valid HTTP/1.1")


def _path_of(url: bytes) -> bytes:
    """The path of a request target in absolute form, as proxies send it."""
    try:
        return httptools.parse_url(url).path or b"/"
    except httptools.HttpParserInvalidURLError:
        return url
