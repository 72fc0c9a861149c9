"""A small HTTP/1.1 client on asyncio.Protocol and httptools, for callbacks, the SDK and calls between instances.

Why not a library: a callback costs a few microseconds here and about a hundred in general clients, and they make it
hard to control what a timer service has to control: the address that is connected to, deadlines, and the size of
answers. It follows no redirects, decodes no compression, keeps no cookies and reads no proxy settings.

How a call works: `send` takes the idle connection of the origin that was used last, or opens one, asks `begin` for the
bytes, writes them and waits. A deadline is a number on a connection; one sweep for the whole client runs when the
earliest deadline has passed, so that a call needs no timer of its own.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, cast

import httptools
from msgspec import Struct

from duetime.errors import HttpError
from duetime.http.urls import Target, parse_target, request_head

__all__ = ["Answer", "HttpClient", "HttpError", "Target", "parse_target", "request_head"]

HEADER_BYTES_MAX: Final = 16 * 1024
# An answer counts as endless if it has this many times the largest body, with chunk sizes, extensions and trailers.
_FRAMING_FACTOR: Final = 8
# A sweep this late means that the event loop was blocked: answers may be unread, so they are read first.
_LOOP_STALL_S: Final = 0.25
_SWEEP_PAUSE_S: Final = 0.01
_NEVER: Final = float("inf")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


class Answer(Struct, frozen=True, gc=False):
    """An answer. `truncated`: the body was longer than the client reads; the connection is closed."""

    status: int
    raw_headers: dict[bytes, bytes]
    body: bytes
    truncated: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name; of a repeated header the last value."""
        return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in self.raw_headers.items()}

    def header(self, name: str) -> str | None:
        return self.headers.get(name)


class _Stale(HttpError):
    """The connection was closed before any byte of an answer. On a reused connection: the server had closed it at the
    same time as the request was sent."""


# --- one connection ------------------------------------------------------------------------------


class _Connection(asyncio.Protocol):
    """One connection, with one call at a time. Parser callbacks of every call are bound C methods where possible."""

    def __init__(self, client: HttpClient, origin: _Origin) -> None:
        self._client = client
        self._origin = origin
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[Answer] | None = None
        self._timeout_ms = 0
        self._head_only = False
        self._headers: dict[bytes, bytes] = {}
        self._body: list[bytes] = []
        self._headers_done = False
        self._answer: Answer | None = None  # complete, but more data may follow in the same read
        self._keep_alive = False
        self._wire_bytes = 0
        self.deadline = _NEVER  # of the call; if idle, when to close
        self.opened_at = 0.0
        self.reused = False
        self.closed = False
        # The parser calls these attributes of the object that it is given.
        self.on_header = self._headers.__setitem__
        self.on_body = self._body.append
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data

    @property
    def busy(self) -> bool:
        return self._waiter is not None

    @property
    def idle(self) -> bool:
        return self in self._origin.idle

    def start(self, data: bytes, deadline: float, timeout_ms: int, head_only: bool) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._waiter = waiter = self._loop.create_future()
        self._headers_done = False
        self._head_only = head_only
        self._wire_bytes = 0
        self._timeout_ms = timeout_ms
        self.deadline = deadline
        self._transport.write(data)
        return waiter

    def abort(self) -> None:
        """Close the connection immediately; ignore data that is still to arrive."""
        self.closed = True
        if self.idle:
            self._origin.idle.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str, kind: type[HttpError] = HttpError) -> None:
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(kind(reason, sent=True))

    def time_out(self) -> None:
        self.fail(f"no answer within {_seconds(self._timeout_ms)}")

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._waiter is None or self.closed:
            self.abort()  # data without a request must not become the answer to the next call
            return
        self._wire_bytes += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserUpgrade:
            self.fail("malformed answer: an upgrade that was not requested")
            return
        except httptools.HttpParserError as error:
            if self._answer is None:
                self.fail(f"malformed answer: {error}")
                return
            self._keep_alive = False  # a valid answer followed by invalid data
        if self._answer is not None:
            self._finish(self._answer)
        elif self._wire_bytes > HEADER_BYTES_MAX:
            self._check_size()

    def eof_received(self) -> None:
        if self._waiter is None:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None:
            if self._headers_done and not self._has_length() and error is None:
                self._finish(self._read_answer())  # a body without a length ends when the connection closes
            elif self._wire_bytes:
                self.fail("connection closed during the answer")
            else:
                self.fail("connection closed before the answer", _Stale)
        self._client._lost(self._origin, self)
        # Parser and connection refer to each other: without these references both are freed at once.
        del self._parser, self._feed, self.on_header, self.on_body

    # httptools

    def on_message_begin(self) -> None:
        if self._answer is not None:
            self._keep_alive = False  # a second answer to one request: do not reuse the connection

    def on_headers_complete(self) -> None:
        if self._answer is None:
            self._headers_done = self._parser.get_status_code() >= 200
            if self._head_only and self._headers_done:
                self._answer = self._read_answer()  # the parser would wait for a body that does not exist

    def on_message_complete(self) -> None:
        if self._answer is not None:
            return
        if self._headers_done:
            # Read here, because the parser resets it at the end of the message.
            self._keep_alive = self._parser.should_keep_alive()
            self._answer = self._read_answer()
        else:  # 1xx: the final answer follows
            self._headers.clear()

    # the end of a call

    def _read_answer(self, *, truncated: bool = False) -> Answer:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        body_bytes_max = self._client.body_bytes_max
        if len(body) > body_bytes_max:
            body, truncated = body[:body_bytes_max], True
        headers = self._headers.copy()
        self._headers.clear()
        self._body.clear()
        return Answer(self._parser.get_status_code(), headers, body, truncated)

    def _finish(self, answer: Answer) -> None:
        waiter, self._waiter = self._waiter, None
        self._answer = None
        if self._keep_alive and not answer.truncated and not self.closed:
            self._keep_alive = False
            self.reused = True
            self._client._release(self._origin, self)
        else:
            self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def _check_size(self) -> None:
        """Called only if an answer is larger than its headers may be."""
        header_bytes = sum(len(name) + len(value) + 4 for name, value in self._headers.items())
        if not self._headers_done or header_bytes > HEADER_BYTES_MAX:
            self.fail(f"malformed answer: more than {HEADER_BYTES_MAX // 1024} KiB of headers")
            return
        if len(self._body) > 64:
            self._body[:] = [b"".join(self._body)]
        body_bytes_max = self._client.body_bytes_max
        wire_bytes_max = HEADER_BYTES_MAX + _FRAMING_FACTOR * body_bytes_max
        if sum(map(len, self._body)) > body_bytes_max or self._wire_bytes > wire_bytes_max:
            self._finish(self._read_answer(truncated=True))

    def _has_length(self) -> bool:
        names = {name.lower() for name in self._headers}
        return b"content-length" in names or b"transfer-encoding" in names


class _Origin:
    """The connections of one origin."""

    __slots__ = ("address", "idle", "key", "opened", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        self.idle: list[
            _Connection
        ] = []  # the last used one is taken first, so that those that are not needed reach their idle limit
        self.opened = 0  # number of connections, including those being opened
        self.waiting: deque[asyncio.Future[_Connection | None]] = deque()
        self.address: str | None = None  # the last one that was connected to


# --- the client ----------------------------------------------------------------------------------


class HttpClient:
    """May be used in one event loop: the one of its first call."""

    def __init__(
        self,
        *,
        resolve: Resolve | None = None,
        ssl_context: ssl.SSLContext | None = None,
        connect_timeout_ms: int = 5_000,
        body_bytes_max: int = 64 * 1024,
        idle_ms: int = 30_000,
        connection_age_ms_max: int = 300_000,
        connections_per_origin_max: int | None = None,
        connections_max: int = 1_024,
    ) -> None:
        """`resolve` returns the addresses that may be connected to; its errors other than OSError are passed on.

        A connection is not reused after `connection_age_ms_max`, so that a change in DNS takes effect. Above
        `connections_max` idle connections are closed; it does not limit calls.
        """
        self._resolve = resolve or _getaddrinfo
        self._ssl_context = ssl_context
        self._connect_timeout_s = connect_timeout_ms / 1_000
        self.body_bytes_max = body_bytes_max
        self._idle_s = idle_ms / 1_000
        self._age_s_max = connection_age_ms_max / 1_000
        self._per_origin_max = connections_per_origin_max
        self._connections_max = connections_max
        self._origins: dict[str, _Origin] = {}
        self._connections: set[_Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_at = _NEVER
        self._sweep_handle: asyncio.TimerHandle | None = None
        self._closed = False
        self._drained: asyncio.Future[None] | None = None

    async def request(
        self,
        method: str,
        url: str | Target,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int,
    ) -> Answer:
        target = _target(url) if isinstance(url, str) else url
        head = request_head(method, target, headers or {})
        data = b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)
        answer = await self.send(target, lambda: data, timeout_ms=timeout_ms, head_only=method == "HEAD")
        assert answer is not None
        return answer

    async def send(
        self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int, head_only: bool = False
    ) -> Answer | None:
        """One call. `begin` is called when there is a connection, right before the first byte is sent. It returns the
        whole request, or None: then nothing is sent and the result is None.

        If a reused connection closes before any byte of the answer, a new one is opened, once, and `begin` is called
        again. `head_only`: the answer has only headers (HEAD).
        """
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_ms / 1_000
        origin = self._origins.get(target.origin)
        retried = False
        while True:
            if origin is not None and origin.idle and not retried:
                connection = origin.idle.pop()
            else:
                try:
                    connection = await self._open_or_wait(target, deadline, timeout_ms, fresh=retried)
                except HttpError as error:
                    error.sent = retried
                    raise
            reused = connection.reused
            data = None
            try:
                data = begin()
            finally:
                if data is None:
                    self._release(connection._origin, connection)
            if data is None:
                return None
            waiter = connection.start(data, deadline, timeout_ms, head_only)
            if deadline < self._sweep_at:
                self._sweep_by(deadline)
            try:
                return await waiter
            except asyncio.CancelledError:
                connection.abort()
                raise
            except _Stale:
                if retried or not reused or self._closed:
                    raise
                retried = True

    async def close(self) -> None:
        """End running calls with an error and close all connections."""
        self._closed = True
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        for origin in self._origins.values():
            for waiting in origin.waiting:
                if not waiting.done():
                    waiting.set_result(None)
        if self._connections and self._loop is not None:
            self._drained = self._loop.create_future()
            for connection in tuple(self._connections):
                connection.fail("the client was closed")
            await self._drained

    # connections: open, wait for, release

    async def _open_or_wait(self, target: Target, deadline: float, timeout_ms: int, *, fresh: bool) -> _Connection:
        assert self._loop is not None
        while not self._closed:
            origin = self._origins.get(target.origin)
            if origin is None:
                origin = self._origins[target.origin] = _Origin(target.origin)
            if origin.idle and not fresh:
                return origin.idle.pop()
            if self._per_origin_max is None or origin.opened < self._per_origin_max:
                return await self._open(origin, target, deadline, timeout_ms)
            if origin.idle:  # close an idle one, so that a new one can be opened
                origin.idle[0].abort()
            connection = await self._wait(origin, deadline, timeout_ms)
            if connection is not None and not connection.closed:
                return connection
        raise HttpError("the client is closed", sent=False)

    async def _wait(self, origin: _Origin, deadline: float, timeout_ms: int) -> _Connection | None:
        assert self._loop is not None
        waiting: asyncio.Future[_Connection | None] = self._loop.create_future()
        origin.waiting.append(waiting)
        try:
            async with asyncio.timeout_at(deadline):
                return await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled():  # the connection came too late: pass it on
                self._pass_on(origin, waiting.result())
            if isinstance(error, TimeoutError):
                raise HttpError(f"no free connection within {_seconds(timeout_ms)}", sent=False) from None
            raise

    def _pass_on(self, origin: _Origin, connection: _Connection | None) -> None:
        if connection is not None and not connection.closed:
            self._release(origin, connection)
        else:
            self._wake(origin, None)

    async def _open(self, origin: _Origin, target: Target, deadline: float, timeout_ms: int) -> _Connection:
        assert self._loop is not None
        self._close_surplus()
        origin.opened += 1
        now = self._loop.time()
        connect_by = now + self._connect_timeout_s
        try:
            async with asyncio.timeout_at(min(connect_by, deadline)):
                connection = await self._connect(origin, target, min(connect_by, deadline))
        except BaseException as error:
            self._remove(origin)
            if isinstance(error, TimeoutError):
                limit_ms = round(self._connect_timeout_s * 1_000) if connect_by <= deadline else timeout_ms
                raise HttpError(f"connect timeout after {_seconds(limit_ms)}", sent=False) from None
            if isinstance(error, OSError):
                raise HttpError(_connect_reason(error, target), sent=False) from error
            raise
        if self._closed or connection.closed:
            connection.abort()
            self._remove(origin)
            raise HttpError(
                "the client is closed" if self._closed else "connection closed right after connecting", sent=False
            )
        connection.opened_at = now
        self._connections.add(connection)
        return connection

    async def _connect(self, origin: _Origin, target: Target, deadline: float) -> _Connection:
        """Connect to the first address that answers, starting with the last good one. Each address has a share of the
        time that is left."""
        assert self._loop is not None
        addresses = list(await self._resolve(target.host, target.port))
        if origin.address in addresses:
            addresses.remove(origin.address)
            addresses.insert(0, origin.address)
        refusal: OSError = OSError("the name has no address")
        for index, address in enumerate(addresses):
            now = self._loop.time()
            left = len(addresses) - index
            try:
                async with asyncio.timeout_at(now + (deadline - now) / left if left > 1 else None):
                    connection = await self._connect_to(origin, target, address)
            except OSError as error:  # TimeoutError is one
                refusal = error
            else:
                origin.address = address
                return connection
        raise refusal

    async def _connect_to(self, origin: _Origin, target: Target, address: str) -> _Connection:
        assert self._loop is not None
        connection = _Connection(self, origin)
        try:
            if target.tls:
                # The certificate must be that of the URL's host, whichever address it was resolved to.
                name = target.host.removesuffix(".")
                await self._loop.create_connection(
                    lambda: connection, address, target.port, ssl=self._tls(), server_hostname=name
                )
            else:
                await self._loop.create_connection(lambda: connection, address, target.port)
        except BaseException:
            connection.abort()
            raise
        return connection

    def _tls(self) -> ssl.SSLContext:
        if self._ssl_context is None:  # created at the first use: loading the certificate authorities takes time
            self._ssl_context = ssl.create_default_context()
        return self._ssl_context

    def _release(self, origin: _Origin, connection: _Connection) -> None:
        """A connection is free: give it to a waiting call, or keep it for the next one."""
        assert self._loop is not None
        now = self._loop.time()
        if connection.closed or self._closed or now - connection.opened_at > self._age_s_max:
            connection.abort()
            return
        connection.deadline = now + self._idle_s
        if connection.deadline < self._sweep_at:
            self._sweep_by(connection.deadline)
        if not origin.waiting or not self._wake(origin, connection):
            origin.idle.append(connection)

    def _wake(self, origin: _Origin, connection: _Connection | None) -> bool:
        while origin.waiting:
            waiting = origin.waiting.popleft()
            if not waiting.done():
                waiting.set_result(connection)
                return True
        return False

    def _lost(self, origin: _Origin, connection: _Connection) -> None:
        if connection.idle:
            origin.idle.remove(connection)
        if connection in self._connections:  # otherwise it was never used
            self._connections.discard(connection)
            self._remove(origin)
        if self._drained is not None and not self._connections and not self._drained.done():
            self._drained.set_result(None)

    def _remove(self, origin: _Origin) -> None:
        origin.opened -= 1
        if not self._wake(origin, None) and not origin.opened and self._origins.get(origin.key) is origin:
            del self._origins[origin.key]

    def _close_surplus(self) -> None:
        if len(self._connections) >= self._connections_max:
            idle = [connection for origin in self._origins.values() for connection in origin.idle[:1]]
            if idle:
                min(idle, key=lambda connection: connection.deadline).abort()

    # deadlines

    def _sweep_by(self, when: float) -> None:
        assert self._loop is not None
        if self._sweep_handle is not None:
            self._sweep_handle.cancel()
        self._sweep_at = when
        self._sweep_handle = self._loop.call_at(when, self._sweep, when, False)

    def _sweep(self, planned: float, after_stall: bool) -> None:
        assert self._loop is not None
        now = self._loop.time()
        if now - planned > _LOOP_STALL_S and not after_stall:
            self._sweep_handle = self._loop.call_at(now + _SWEEP_PAUSE_S, self._sweep, planned, True)
            return
        self._sweep_handle = None
        earliest = _NEVER
        for connection in tuple(self._connections):
            if connection.deadline > now:
                earliest = min(earliest, connection.deadline)
            elif connection.busy:
                connection.time_out()
            elif connection.idle:
                connection.abort()
        self._sweep_at = _NEVER
        if earliest != _NEVER:
            self._sweep_by(max(earliest, now + _SWEEP_PAUSE_S))


_target = lru_cache(1024)(parse_target)


async def _getaddrinfo(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


def _seconds(timeout_ms: int) -> str:
    return f"{timeout_ms / 1_000:g} s"


def _connect_reason(error: OSError, target: Target) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"TLS: certificate of {target.host} not accepted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {error.reason or error}"
    if isinstance(error, socket.gaierror):
        return f"cannot resolve {target.host}: {error.strerror}"
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused by {target.host_header}"
    if target.tls and isinstance(error, ConnectionError):
        return f"TLS: connection closed during the handshake with {target.host_header}"
    # The text differs between event loops; the error number does not.
    return f"cannot connect to {target.host_header}: {os.strerror(error.errno) if error.errno else error}"
