"""One connection of the HTTP server: reads requests, gives them to the handler, and writes its answers in order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, cast

import httptools

from duetime.http.connection_limits import address_of
from duetime.http.messages import Request, Response, problem_response

if TYPE_CHECKING:
    from duetime.http.server import HttpServer

__all__ = ["Connection"]

log = logging.getLogger("duetime.http")

HEAD_BYTES_MAX = 16_384
# What a refused client still sends is read and dropped, for this many sweeps and up to this many bytes.
LINGER_SWEEPS = 2
LINGER_BYTES_MAX = 64 * 1024 * 1024
# So much of all refused clients between two sweeps: reading as fast as they send would take the event loop's time.
DROPPED_BYTES_MAX = 64 * 1024 * 1024
# The body of a refused request is read and dropped up to this size, so that the connection can stay; a larger one is
# not read: the connection is closed after the answer.
DROPPED_BODY_BYTES_MAX = 256 * 1024
# A body up to this size is not counted: a connection receives one at a time.
SMALL_BODY_BYTES = 16 * 1024
# How long a request waits for the bytes of its body, in sweeps.
ROOM_SWEEPS = 10
# Each chunk or packet of a body costs as much time as many bytes. After so many pieces they must be so long on average.
BODY_PIECES_FREE = 1_024
BODY_PIECE_BYTES_MIN = 64
# An answer is counted as unread if the system did not accept all but so many bytes of it.
UNCOUNTED_ANSWER_BYTES = 16 * 1024
# Connections above the limit may only ask for health, and not be idle for longer, in sweeps.
HEALTH_SWEEPS = 5
HEALTH_PATHS: Final = frozenset({"/healthz", "/readyz"})
TLS_WRITE_BYTES = 64 * 1024


class _Refused(Exception):
    """Raised in callbacks of the parser, to stop parsing: this request is refused."""

    def __init__(self, response: Response) -> None:
        self.response = response


class Connection(asyncio.Protocol):
    def __init__(self, server: HttpServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpRequestParser | None = None
        self._unwritten_bytes = 0  # of the answer, see _write_pieces
        self.address = ""  # "": loopback, which has no limit
        self.tenant = ""  # of its last request
        self.only_health = False
        self._is_stranger = True
        self.since = server.sweeps  # when the current activity (receiving, answering, idle) began
        # One task for the life of the connection, which waits between requests: a new task for each request would cost
        # more than parsing it.
        self._task: asyncio.Task[None] | None = None
        self._more: asyncio.Future[None] | None = None
        self.busy = False
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
        self._request: Request | None = None  # set when the head is complete
        self._body: bytes | bytearray = b""
        self._body_bytes = 0
        self._body_pieces = 0
        self._body_bytes_max = 0
        self._bytes_wanted = 0  # the bytes for which the request waits
        self._continue_expected = False
        self._ignores_upgrade = False  # a request is parsed again

    # -- the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass, but has the same methods.
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self.address = address_of(transport.get_extra_info("peername"))
        self.tenant = self.address or "loopback"
        self._server.limits.add(self)
        self._transport.set_write_buffer_limits(high=UNCOUNTED_ANSWER_BYTES)
        if self._server.stopping:
            self._refuse(problem_response(503, "not_applied", "this server is stopping"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._parser = None  # parser and connection refer to each other
        self._reset_request()
        for item in self._waiting:
            if isinstance(item, Request):
                self._release_body(item)
        self._waiting.clear()
        self._resume_writer()
        if not self.busy:
            self.cancel()
        self._server.limits.remove(self)
        self._server.connection_idle()

    def data_received(self, data: bytes) -> None:
        if self._discarding:
            self._discarded_bytes += len(data)
            self._server.dropped_bytes += len(data)
            if self._discarded_bytes > LINGER_BYTES_MAX:
                self.abort()
            elif self._server.dropped_bytes > DROPPED_BYTES_MAX:
                self._pause_reading()
            return
        if self._parser is None:
            return
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
        if len(self._waiting) > 1 or self._bytes_wanted:
            # The client pipelines requests, which are answered first. Or too few bytes are free for the body.
            self._pause_reading()

    def eof_received(self) -> bool:
        # A client may close its sending half and still wait for its answers.
        if not self.busy or self._transport is None or not self._transport.can_write_eof():
            return False
        self._ended = True
        return True

    def pause_writing(self) -> None:
        self._writing_paused = self._loop.create_future()
        self.since = self._server.sweeps
        if self._transport is not None:
            self._server.unread.add(self, self.unsent_bytes(), self._server.sweeps)

    def resume_writing(self) -> None:
        self._resume_writer()

    def _resume_writer(self) -> None:
        if self._writing_paused is not None and not self._writing_paused.done():
            self._writing_paused.set_result(None)
        self._writing_paused = None
        self._server.unread.remove(self)

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        self._receiving = True
        self.since = self._server.sweeps

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES_MAX:  # now, because one packet may have many headers, and to join them is slow
            raise _head_too_large()
        if not self._in_head:  # a trailer: it is ignored, and must not be taken for a header
            return
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        self._in_head = False
        headers = self._headers
        if self._head_bytes + len(self._url) > HEAD_BYTES_MAX:
            raise _head_too_large()
        assert self._parser is not None
        length = headers.get(b"content-length")
        coding = headers.get(b"transfer-encoding")
        if coding is not None:
            if length is not None:
                raise _bad_request("a request must not have both Content-Length and Transfer-Encoding")
            if coding.strip().lower() != b"chunked":
                # The parser reads "gzip, chunked" as if it were "chunked": the body would be compressed data.
                raise _bad_request("the only Transfer-Encoding that is supported is chunked")
        host = headers.get(b"host")
        if host is None:
            if self._parser.get_http_version() == "1.1":
                raise _bad_request("an HTTP/1.1 request must have a Host header")
        elif b"," in host:
            raise _bad_request("a request must have only one Host header")
        path = self._url.partition(b"?")[0]
        if path[:1] != b"/":
            path = _path_of(path)
        request = Request(self._parser.get_method().decode("latin-1"), path.decode("latin-1"), headers=headers)
        self._request = request
        request.tenant = self.address or "loopback"
        size = 0 if length is None else int(length)
        self._admit(request)
        if request.refusal is not None:
            if size > DROPPED_BODY_BYTES_MAX or b"expect" in headers:
                raise _Refused(request.refusal)
            self._body_bytes_max = DROPPED_BODY_BYTES_MAX
            return
        if size > self._body_bytes_max:
            raise self._body_too_large()
        if coding is not None:
            size = self._body_bytes_max
        if size > SMALL_BODY_BYTES or (size and self.busy):
            self._take_bytes(request, size)
        if b"expect" in headers and headers[b"expect"].lower() == b"100-continue":
            self._continue_expected = True
            self._send_continue()

    def _admit(self, request: Request) -> None:
        """Sets the largest body that the request may have, or its refusal."""
        server = self._server
        limit: int | Response
        if self.only_health and request.path not in HEALTH_PATHS:
            limit = problem_response(
                503, "not_applied", "this server has too many connections; nothing was applied", _TRY_LATER
            )
        elif server.admit is None:
            self._body_bytes_max = server.body_bytes_max
            if self._is_stranger:
                self._known()
            return
        else:
            try:
                limit = server.admit(request)
            except Exception:
                log.exception("unexpected error in the head of %s %s", request.method, request.path)
                limit = _internal_error()
        if isinstance(limit, Response):
            request.refusal = limit
        else:
            self._body_bytes_max = limit
            self.tenant = request.tenant
            if self._is_stranger and request.admitted is not None:
                self._known()

    def _known(self) -> None:
        self._is_stranger = False
        self._server.limits.strangers.pop(self, None)

    def _take_bytes(self, request: Request, size: int) -> None:
        bodies = self._server.bodies
        if bodies.take(request.tenant, size):
            request.body_bytes_counted = size
        elif bodies.wait(request.tenant, size, self._bytes_granted):
            self._bytes_wanted = size
        else:
            raise _Refused(_no_bytes_free())

    def _bytes_granted(self) -> None:
        assert self._request is not None
        self._request.body_bytes_counted, self._bytes_wanted = self._bytes_wanted, 0
        self.since = self._server.sweeps
        self._send_continue()
        self._resume_reading()

    def _stop_waiting_for_bytes(self) -> None:
        if self._bytes_wanted:
            assert self._request is not None
            size, self._bytes_wanted = self._bytes_wanted, 0
            self._server.bodies.cancel(self._request.tenant, size, self._bytes_granted)

    def _release_body(self, request: Request) -> None:
        if request.body_bytes_counted:
            size, request.body_bytes_counted = request.body_bytes_counted, 0
            self._server.bodies.release(request.tenant, size)

    def on_body(self, data: bytes) -> None:
        self._continue_expected = False
        self._fed_bytes = 0
        self._body_bytes += len(data)
        self._body_pieces += 1
        if self._body_pieces > BODY_PIECES_FREE + self._body_bytes // BODY_PIECE_BYTES_MIN:
            raise _bad_request(f"the body arrives in pieces of less than {BODY_PIECE_BYTES_MIN} bytes")
        if self._body_bytes > self._body_bytes_max:
            assert self._request is not None
            raise self._body_too_large() if self._request.refusal is None else _Refused(self._request.refusal)
        if self._request is not None and self._request.refusal is not None:
            return
        if not self._body:
            self._body = data  # most bodies arrive in one piece
        else:
            # Not a list of pieces: small pieces would need twenty times their size in memory.
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        parser = self._parser
        assert parser is not None
        if parser.should_upgrade():
            return  # the parser stops here; see _ignore_upgrade
        request = self._request
        assert request is not None
        request.body = bytes(self._body)
        request.keep_alive = parser.should_keep_alive()
        if self._bytes_wanted:  # all of it had arrived with the head
            size = self._bytes_wanted
            self._stop_waiting_for_bytes()
            self._server.bodies.add(request.tenant, size)
            request.body_bytes_counted = size
        if self.only_health:
            request.keep_alive = False
        self._request = None
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
        if self._ignores_upgrade:  # each would be one call deeper, with a copy of all that follows
            self._refuse(problem_response(400, "bad_request", "pipelined requests must not ask for an upgrade"))
            return
        lines = [b"%s %s HTTP/%s" % (method, self._url, self._parser.get_http_version().encode())]
        lines += [b"%s: %s" % pair for pair in self._headers.items() if pair[0] not in _UPGRADE_HEADERS]
        self._reset_request()
        self._parser = httptools.HttpRequestParser(self)
        self._ignores_upgrade = True
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)
        self._ignores_upgrade = False

    def _reset_request(self) -> None:
        if self._request is not None:  # it is not complete
            self._stop_waiting_for_bytes()
            self._release_body(self._request)
            self._request = None
        self._receiving = False
        self._in_head = True
        self._head_bytes = 0
        self._fed_bytes = 0
        self._url = b""
        self._headers = {}
        self._body = b""
        self._body_bytes = 0
        self._body_pieces = 0
        self._continue_expected = False

    def _body_too_large(self) -> _Refused:
        return _Refused(problem_response(413, "too_large", f"the body is larger than {self._body_bytes_max} bytes"))

    def _send_continue(self) -> None:
        """Tell the client to send the body, when all earlier requests are answered."""
        if self._continue_expected and not self.busy and not self._bytes_wanted and self._transport is not None:
            self._continue_expected = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- answering

    def _enqueue(self, item: Request | Response) -> None:
        self._waiting.append(item)
        if self.busy:
            return
        self.busy = True
        self._server.busy.add(self)
        if self._task is None:
            self._task = self._loop.create_task(self._answer())
        elif self._more is not None:
            self._more.set_result(None)

    async def _answer(self) -> None:
        """Answers the requests that wait, in their order, and then waits for more, until the connection is lost. One
        coroutine does all this, because each further one would be called for every request."""
        while True:
            try:
                while self._waiting:
                    item = self._waiting.popleft()
                    if isinstance(item, Response):
                        self._write(item, keep_alive=False, head_only=False)
                        self._linger()
                        break
                    try:
                        response = item.refusal or await self._server.handler(item)
                    except Exception:
                        log.exception("unexpected error in %s %s", item.method, item.path)
                        response = _internal_error()
                    is_last = not item.keep_alive or (self._ended and not self._waiting)
                    keep_alive = not is_last and not self._server.stopping
                    large = self._write(response, keep_alive=keep_alive, head_only=item.method == "HEAD")
                    if item.body_bytes_counted:
                        self._release_body(item)
                    if self._is_stranger and item.admitted is not None:
                        self._known()
                    del item, response  # they may be large, and the client may take its time to read
                    if large is not None:
                        await self._write_pieces(large)
                        large = None
                    if is_last:
                        self._close()
                        break
                    if not keep_alive:
                        self._linger()
                        break
                    if self._writing_paused is not None:
                        await self._writing_paused
            finally:
                self._between_requests()
            if self._transport is None:
                return
            self._more = self._loop.create_future()
            await self._more

    def _between_requests(self) -> None:
        self.busy = False
        self._server.busy.discard(self)
        self.since = self._server.sweeps
        if self._continue_expected:
            self._send_continue()
        if self._reading_paused and not self._bytes_wanted:
            self._resume_reading()
        if self._server.stopping:
            self._server.connection_idle()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if self._reading_paused and self._transport is not None and not self._transport.is_closing():
            self._reading_paused = False
            self._transport.resume_reading()

    def _write(self, response: Response, *, keep_alive: bool, head_only: bool) -> bytes | None:
        """Head and body in one write: two writes would be two packets. Returns what must be written in pieces."""
        if self._transport is None or self._transport.is_closing():
            return None  # the client has disconnected
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
        if head_only:
            self._transport.write(head)
        elif self._server.tls is not None and len(body) > TLS_WRITE_BYTES:
            return head + body
        else:
            self._transport.write(head + body)
        return None

    async def _write_pieces(self, data: bytes) -> None:
        """A transport that encrypts takes all at once, and says that the client does not read only before the next
        write."""
        for start in range(0, len(data), TLS_WRITE_BYTES):
            if self._transport is None or self._transport.is_closing():
                return
            self._unwritten_bytes = max(0, len(data) - start - TLS_WRITE_BYTES)
            self._transport.write(data[start : start + TLS_WRITE_BYTES])
            if self._writing_paused is not None:
                await self._writing_paused

    def unsent_bytes(self) -> int:
        return self._unwritten_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())

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

    def abort_soon(self) -> None:
        """For callers inside of a write."""
        self._loop.call_soon(self.abort)

    def evict(self) -> None:
        """Close it now, so that another connection can be accepted."""
        self._server.limits.remove(self)
        self.abort()

    @property
    def idle(self) -> bool:
        """It waits for the next request."""
        return not (self.busy or self._receiving or self._discarding or self._transport is None) and (
            not self._transport.is_closing()
        )

    def cancel(self) -> None:
        """Stop answering requests of this connection."""
        if self._task is not None:
            self._task.cancel()

    def stop(self) -> None:
        """The server stops: close now if idle. A busy connection closes after its answer."""
        if not self.busy and not self._receiving:
            self._close()

    def sweep(self) -> None:
        waited = self._server.sweeps - self.since
        patience = self._server.idle_sweeps_max
        if self.only_health:
            patience = min(patience, HEALTH_SWEEPS)
        if self.busy:
            if self._writing_paused is not None and waited > patience:
                self.abort()  # the client does not read its answers
        elif self._discarding:
            if waited > LINGER_SWEEPS:
                self.abort()
            else:
                self._resume_reading()
        elif self._bytes_wanted:
            if waited > ROOM_SWEEPS:
                self._refuse(_no_bytes_free())
        elif waited > patience:
            self._time_out()

    def _time_out(self) -> None:
        if self._transport is None or self._transport.is_closing() or self in self._server.unread.connections:
            self.abort()  # the client does not read its last answer
        elif self._receiving:
            self._refuse(problem_response(408, "request_timeout", "the request did not arrive completely in time"))
        else:
            self._close()


_UPGRADE_HEADERS = frozenset({b"connection", b"upgrade", b"http2-settings", b"expect"})
_TRY_LATER = (("retry-after", "1"),)
_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}


def _bad_request(detail: str) -> _Refused:
    return _Refused(problem_response(400, "bad_request", detail))


def _internal_error() -> Response:
    return problem_response(500, "internal", "internal error; the server's log has the details")


def _no_bytes_free() -> Response:
    detail = "this server holds as many bytes of requests as it may (server.buffered_bytes_max); nothing was applied"
    return problem_response(429, "busy", detail, _TRY_LATER)


def _head_too_large() -> _Refused:
    return _Refused(
        problem_response(431, "head_too_large", f"the head of the request is larger than {HEAD_BYTES_MAX} bytes")
    )


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
