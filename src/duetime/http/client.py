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
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final, NamedTuple

from duetime.errors import DeadlineTooShort, HttpError, Shortage, Unreachable
from duetime.http.client_connection import NEVER, Answer, Connection, Origin, Stale, seconds_text
from duetime.http.connect_errors import connect_reason, is_shortage, is_shortage_of_connecting, system_text
from duetime.http.urls import Target, parse_target, request_head

__all__ = ["Answer", "HttpClient", "HttpError", "Target", "parse_target", "request_head"]

# A sweep this late means that the event loop was blocked: answers may be unread, so they are read first.
_LOOP_STALL_S: Final = 0.25
_SWEEP_PAUSE_S: Final = 0.01
# Idle connections that are closed at once when there is no file descriptor for a new one.
_CLOSED_AT_ONCE: Final = 16

# Host, port and owner of the call; see `HttpClient`.
Resolve = Callable[[str, int, str], Awaitable[Sequence[str]]]


class _Limit(NamedTuple):
    """Until when one step of connecting must be done, and the reason."""

    by: float
    milliseconds: int
    of_call: bool  # the deadline of the call, and not the client's limit for connecting

    def error(self, reason: str) -> Unreachable:
        reason = f"{reason} {seconds_text(self.milliseconds)}"
        return DeadlineTooShort(reason, sent=False) if self.of_call else Unreachable(reason, sent=False)


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
        sockets_max: int | None = None,
    ) -> None:
        """`resolve` returns the addresses that may be connected to; its errors other than OSError are passed on.

        A connection is not reused after `connection_age_ms_max`, so that a change in DNS takes effect. Above
        `connections_max` idle connections are closed, the one that is idle for longest first; it does not limit calls.
        `sockets_max` does: a call that would need one more ends with Shortage.
        """
        self._resolve = resolve or _getaddrinfo
        self._ssl_context = ssl_context
        self._connect_timeout_s = connect_timeout_ms / 1_000
        self.body_bytes_max = body_bytes_max
        self._idle_s = idle_ms / 1_000
        self._age_s_max = connection_age_ms_max / 1_000
        self._per_origin_max = connections_per_origin_max
        self._connections_max = connections_max
        self._sockets_max = sockets_max
        self._sockets = 0  # connections, including those that are being opened
        self._idle: dict[Connection, None] = {}  # of all origins, the one that is idle for longest first
        self._origins: dict[str, Origin] = {}
        self._connections: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sweep_at = NEVER
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
        self,
        target: Target,
        begin: Callable[[], bytes | None],
        *,
        timeout_ms: int,
        head_only: bool = False,
        owner: str = "",
    ) -> Answer | None:
        """One call. `begin` is called when there is a connection, right before the first byte is sent. It returns the
        whole request, or None: then nothing is sent and the result is None.

        If a reused connection closes before any byte of the answer, a new one is opened, once, and `begin` is called
        again. `head_only`: the answer has only headers (HEAD). `owner` is passed on to `resolve`.

        Raises Unreachable if there is no connection to the target (DeadlineTooShort if this call had less time to
        connect than others have), Shortage if this process or machine is the reason for that, and HttpError for
        everything after.
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
                del self._idle[connection]
            else:
                try:
                    connection = await self._open_or_wait(target, deadline, timeout_ms, owner, fresh=retried)
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
            except Stale:
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

    async def _open_or_wait(
        self, target: Target, deadline: float, timeout_ms: int, owner: str, *, fresh: bool
    ) -> Connection:
        assert self._loop is not None
        while not self._closed:
            origin = self._origins.get(target.origin)
            if origin is None:
                origin = self._origins[target.origin] = Origin(target.origin)
            if origin.idle and not fresh:
                connection = origin.idle.pop()
                del self._idle[connection]
                return connection
            if self._per_origin_max is None or origin.opened < self._per_origin_max:
                return await self._open(origin, target, deadline, timeout_ms, owner)
            if origin.idle:  # close an idle one, so that a new one can be opened
                origin.idle[0].abort()
            waited_for = await self._wait(origin, deadline, timeout_ms)
            if waited_for is not None and not waited_for.closed:
                return waited_for
        raise HttpError("the client is closed", sent=False)

    async def _wait(self, origin: Origin, deadline: float, timeout_ms: int) -> Connection | None:
        assert self._loop is not None
        waiting: asyncio.Future[Connection | None] = self._loop.create_future()
        origin.waiting.append(waiting)
        try:
            async with asyncio.timeout_at(deadline):
                return await waiting
        except BaseException as error:
            if waiting.done() and not waiting.cancelled():  # the connection came too late: pass it on
                self._pass_on(origin, waiting.result())
            if isinstance(error, TimeoutError):
                raise HttpError(f"no free connection within {seconds_text(timeout_ms)}", sent=False) from None
            raise

    def _pass_on(self, origin: Origin, connection: Connection | None) -> None:
        if connection is not None and not connection.closed:
            self._release(origin, connection)
        else:
            self._wake(origin, None)

    async def _open(self, origin: Origin, target: Target, deadline: float, timeout_ms: int, owner: str) -> Connection:
        assert self._loop is not None
        origin.opened += 1
        try:
            addresses = await self._addresses(target, deadline, timeout_ms, owner)
            await self._take_socket()
            try:
                connection = await self._connect(origin, target, addresses, deadline, timeout_ms)
            except BaseException:
                self._sockets -= 1
                raise
        except BaseException:
            self._remove(origin)
            raise
        connection.opened_at = self._loop.time()
        self._connections.add(connection)
        return connection

    async def _addresses(self, target: Target, deadline: float, timeout_ms: int, owner: str) -> Sequence[str]:
        assert self._loop is not None
        limit = self._connect_by(deadline, timeout_ms)
        try:
            async with asyncio.timeout_at(limit.by):
                return await self._resolve(target.host, target.port, owner)
        except TimeoutError:
            raise limit.error(f"cannot resolve {target.host}: no answer within") from None
        except OSError as error:
            if is_shortage(error):
                raise Shortage(f"cannot look up {target.host}: {system_text(error)}", sent=False) from error
            raise Unreachable(connect_reason(error, target), sent=False) from error

    def _connect_by(self, deadline: float, timeout_ms: int) -> _Limit:
        assert self._loop is not None
        by = self._loop.time() + self._connect_timeout_s
        if by <= deadline:
            return _Limit(by, round(self._connect_timeout_s * 1_000), of_call=False)
        return _Limit(deadline, timeout_ms, of_call=True)

    async def _take_socket(self) -> None:
        """Count one socket more. If there are too many, idle connections are closed."""
        if len(self._connections) >= self._connections_max:
            self._close_idle(1)
        while self._sockets_max is not None and self._sockets >= self._sockets_max:
            if not self._close_idle(1):
                raise Shortage(f"all {self._sockets_max} sockets for calls are in use", sent=False)
            await asyncio.sleep(0)  # it is closed by the event loop
        self._sockets += 1

    async def _connect(
        self, origin: Origin, target: Target, addresses: Sequence[str], deadline: float, timeout_ms: int
    ) -> Connection:
        limit = self._connect_by(deadline, timeout_ms)
        try:
            async with asyncio.timeout_at(limit.by):
                connection = await self._connect_to_any(origin, target, addresses, limit)
        except TimeoutError:
            raise limit.error("connect timeout after") from None
        except OSError as error:
            raise Unreachable(connect_reason(error, target), sent=False) from error
        if self._closed:
            connection.abort()
            raise HttpError("the client is closed", sent=False)
        if connection.closed:
            connection.abort()
            raise Unreachable("connection closed right after connecting", sent=False)
        return connection

    async def _connect_to_any(self, origin: Origin, target: Target, found: Sequence[str], limit: _Limit) -> Connection:
        """Connect to the first address that answers, starting with the last good one. Each address has a share of the
        time that is left."""
        assert self._loop is not None
        addresses = list(found)
        if origin.address in addresses:
            addresses.remove(origin.address)
            addresses.insert(0, origin.address)
        refusal: OSError = OSError("the name has no address")
        timed_out = False
        for index, address in enumerate(addresses):
            now = self._loop.time()
            left = len(addresses) - index
            try:
                async with asyncio.timeout_at(now + (limit.by - now) / left if left > 1 else None):
                    connection = await self._connect_or_close_idle(origin, target, address)
            except OSError as error:  # TimeoutError is one
                refusal = error
                timed_out = timed_out or isinstance(error, TimeoutError)
            else:
                origin.address = address
                return connection
        if timed_out and limit.of_call:
            raise TimeoutError  # with more time that address might have answered, whatever the others did
        raise refusal

    async def _connect_or_close_idle(self, origin: Origin, target: Target, address: str) -> Connection:
        """Without a file descriptor or a port for the connection, close idle connections, and try once more."""
        try:
            return await self._connect_to(origin, target, address)
        except OSError as error:
            if not is_shortage_of_connecting(error, address):
                raise
            self._close_idle(_CLOSED_AT_ONCE)
        await asyncio.sleep(0)
        try:
            return await self._connect_to(origin, target, address)
        except OSError as error:
            if not is_shortage_of_connecting(error, address):
                raise
            raise Shortage(f"no socket for a call: {system_text(error)}", sent=False) from error

    async def _connect_to(self, origin: Origin, target: Target, address: str) -> Connection:
        assert self._loop is not None
        connection = Connection(self, origin)
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

    def _release(self, origin: Origin, connection: Connection) -> None:
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
            self._idle[connection] = None

    def _wake(self, origin: Origin, connection: Connection | None) -> bool:
        while origin.waiting:
            waiting = origin.waiting.popleft()
            if not waiting.done():
                waiting.set_result(connection)
                return True
        return False

    def _lost(self, origin: Origin, connection: Connection) -> None:
        if connection.idle:
            self._forget_idle(connection)
        if connection in self._connections:  # otherwise it was never used
            self._connections.discard(connection)
            self._sockets -= 1
            self._remove(origin)
        if self._drained is not None and not self._connections and not self._drained.done():
            self._drained.set_result(None)

    def _remove(self, origin: Origin) -> None:
        origin.opened -= 1
        if not self._wake(origin, None) and not origin.opened and self._origins.get(origin.key) is origin:
            del self._origins[origin.key]

    def _forget_idle(self, connection: Connection) -> None:
        connection._origin.idle.remove(connection)
        del self._idle[connection]

    def _close_idle(self, count: int) -> bool:
        """Close so many idle connections, those that are idle for longest. False: there is none."""
        closed = list(islice(self._idle, count))
        for connection in closed:
            connection.abort()
        return bool(closed)

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
        earliest = NEVER
        for connection in tuple(self._connections):
            if connection.deadline > now:
                earliest = min(earliest, connection.deadline)
            elif connection.busy:
                connection.time_out()
            elif connection.idle:
                connection.abort()
        self._sweep_at = NEVER
        if earliest != NEVER:
            self._sweep_by(max(earliest, now + _SWEEP_PAUSE_S))


_target = lru_cache(1024)(parse_target)


async def _getaddrinfo(host: str, port: int, owner: str) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]
