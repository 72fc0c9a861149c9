"""One connection of the HTTP client, with one call at a time: it parses the answer, within limits."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final, cast

import httptools
from msgspec import Struct

from duetime.errors import HttpError

if TYPE_CHECKING:
    from duetime.http.client import HttpClient

__all__ = ["NEVER", "Answer", "Connection", "Origin", "Stale", "seconds_text"]

HEADER_BYTES_MAX: Final = 16 * 1024
# An answer counts as endless if it has this many times the largest body, with chunk sizes, extensions and trailers.
_FRAMING_FACTOR: Final = 8
# Each chunk or packet of a body costs as much time as many bytes. After so many pieces they must be so long on average.
BODY_PIECES_FREE: Final = 1_024
BODY_PIECE_BYTES_MIN: Final = 64
NEVER: Final = float("inf")


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


class Stale(HttpError):
    """The connection was closed before any byte of an answer. On a reused connection: the server had closed it at the
    same time as the request was sent."""


class Connection(asyncio.Protocol):
    """One connection, with one call at a time. Parser callbacks of every call are bound C methods where possible."""

    def __init__(self, client: HttpClient, origin: Origin) -> None:
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
        self._joined_pieces = 0  # of the body, without those that are in `_body` now
        self.deadline = NEVER  # of the call; if idle, when to close
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
        return self in self._client._idle

    def start(self, data: bytes, deadline: float, timeout_ms: int, head_only: bool) -> asyncio.Future[Answer]:
        assert self._transport is not None
        self._waiter = waiter = self._loop.create_future()
        self._headers_done = False
        self._head_only = head_only
        self._wire_bytes = self._joined_pieces = 0
        self._timeout_ms = timeout_ms
        self.deadline = deadline
        self._transport.write(data)
        return waiter

    def abort(self) -> None:
        """Close the connection immediately; ignore data that is still to arrive."""
        self.closed = True
        if self.idle:
            self._client._forget_idle(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str, kind: type[HttpError] = HttpError) -> None:
        waiter, self._waiter = self._waiter, None
        self.abort()
        if waiter is not None and not waiter.done():
            waiter.set_exception(kind(reason, sent=True))

    def time_out(self) -> None:
        self.fail(f"no answer within {seconds_text(self._timeout_ms)}")

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if len(data) <= HEADER_BYTES_MAX:
            self._received(data)
            return
        # A quarter of a megabyte may arrive at once: as header lines it would take many milliseconds to parse.
        for start in range(0, len(data), HEADER_BYTES_MAX):
            self._received(data[start : start + HEADER_BYTES_MAX])
            if self.closed:
                return

    def _received(self, data: bytes) -> None:
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
                self.fail("connection closed before the answer", Stale)
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
            self._joined_pieces += len(self._body) - 1
            self._body[:] = [b"".join(self._body)]
        body_bytes_max, body_bytes = self._client.body_bytes_max, sum(map(len, self._body))
        pieces_max = BODY_PIECES_FREE + body_bytes // BODY_PIECE_BYTES_MIN
        if self._joined_pieces + len(self._body) > pieces_max:
            self.fail(f"malformed answer: a body in pieces of less than {BODY_PIECE_BYTES_MIN} bytes")
            return
        wire_bytes_max = HEADER_BYTES_MAX + _FRAMING_FACTOR * body_bytes_max
        if body_bytes > body_bytes_max or self._wire_bytes > wire_bytes_max:
            self._finish(self._read_answer(truncated=True))

    def _has_length(self) -> bool:
        names = {name.lower() for name in self._headers}
        return b"content-length" in names or b"transfer-encoding" in names


class Origin:
    """The connections of one origin."""

    __slots__ = ("address", "idle", "key", "opened", "waiting")

    def __init__(self, key: str) -> None:
        self.key = key
        # The last used one is taken first, so that those that are not needed reach their idle limit.
        self.idle: list[Connection] = []
        self.opened = 0  # number of connections, including those being opened
        self.waiting: deque[asyncio.Future[Connection | None]] = deque()
        self.address: str | None = None  # the last one that was connected to


def seconds_text(milliseconds: int) -> str:
    return f"{milliseconds / 1_000:g} s"
