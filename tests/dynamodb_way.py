"""A way to DynamoDB, or its imitation, on which requests can be refused, held, lost, and their answers too.

    async with DynamoWay(port) as way:
        store = open_store(at_port(url, way.port))
        way.next("TransactWriteItems", refused("ThrottlingException"), times=3)
        way.next("UpdateItem", gate := Gate())    # await gate.reached.wait(), gate.opened.set()

What is done to a request is decided by its operation; what nothing is planned for is passed on.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Self

__all__ = [
    "Act",
    "DynamoWay",
    "Gate",
    "Request",
    "cancelled",
    "cut",
    "cut_after",
    "one_at_a_time",
    "refused",
    "silence",
]


class Request:
    """One request, as it came."""

    def __init__(self, head: bytes, body: bytes) -> None:
        self.raw = head + body
        self.body: dict[str, Any] = json.loads(body or b"{}")
        self.headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.decode().split("\r\n")[1:])
        }
        self.operation = self.headers.get("x-amz-target", "").rpartition(".")[2]

    def rewrite(self, **members: object) -> None:
        """Pass it on with other members. An imitation looks at no signature."""
        body = json.dumps(self.body | members).encode()
        head = self.raw.partition(b"\r\n\r\n")[0].split(b"\r\n")
        kept = [line for line in head if not line.lower().startswith(b"content-length")]
        self.raw = b"\r\n".join([*kept, b"Content-Length: %d" % len(body), b"", body])


def _answer(status: int, members: dict[str, object]) -> bytes:
    body = json.dumps(members)
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/x-amz-json-1.0\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


Forward = Callable[[], Awaitable[bytes]]
Act = Callable[[Request, Forward], Awaitable[bytes | None]]
"""Answers the answer, or None to break the connection."""


def refused(code: str, status: int = 400, **members: object) -> Act:
    """As the service says no."""

    async def act(request: Request, forward: Forward) -> bytes:
        return _answer(status, {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": "as told", **members})

    return act


def cancelled(*reasons: str) -> Act:
    """A transaction that was cancelled for these reasons, one for each of its first actions."""

    async def act(request: Request, forward: Forward) -> bytes | None:
        codes = [*reasons, *["None"] * len(request.body["TransactItems"])][: len(request.body["TransactItems"])]
        listed = [{"Code": code, "Message": "as told"} for code in codes]
        return await refused("TransactionCanceledException", CancellationReasons=listed)(request, forward)

    return act


def one_at_a_time() -> Act:
    """Answers to queries have one item each, and each time before going on there is one that has none."""
    known: list[object] = []

    async def act(request: Request, forward: Forward) -> bytes:
        start = request.body.get("ExclusiveStartKey")
        if start is not None and start not in known:
            known.append(start)
            return _answer(200, {"Items": [], "Count": 0, "ScannedCount": 0, "LastEvaluatedKey": start})
        request.rewrite(Limit=1)
        return await forward()

    return act


def described_as(**members: object) -> Act:
    """A table that is there is described in these words instead."""

    async def act(request: Request, forward: Forward) -> bytes:
        answer = await forward()
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        return _answer(200, {"Table": body["Table"] | members}) if "Table" in body else answer

    return act


async def cut(request: Request, forward: Forward) -> None:
    """It never arrives."""


async def cut_after(request: Request, forward: Forward) -> None:
    """It is done, and nobody is told."""
    await forward()


async def silence(request: Request, forward: Forward) -> bytes | None:
    """It is neither done nor answered."""
    await asyncio.Event().wait()
    return None


class Gate:
    """Holds a request, before it is passed on or after it was done, until it is opened."""

    def __init__(self, *, after: bool = False) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self._after = after

    async def __call__(self, request: Request, forward: Forward) -> bytes | None:
        answer = await forward() if self._after else None
        self.reached.set()
        await self.opened.wait()
        return await forward() if answer is None else answer


class DynamoWay:
    def __init__(self, to_port: int, certificate: ssl.SSLContext | None = None) -> None:
        self._to_port = to_port
        self._certificate = certificate
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._next: defaultdict[str, deque[Act]] = defaultdict(deque)
        self._always: dict[str, Act] = {}
        self.seen: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.port = 0

    def next(self, operation: str, act: Act, times: int = 1) -> None:
        self._next[operation].extend([act] * times)

    def always(self, operation: str, act: Act | None) -> None:
        """From now on; None: no more."""
        if act is None:
            self._always.pop(operation, None)
        else:
            self._always[operation] = act

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port, ssl=self._certificate)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Nobody gets through any more."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = Request(head, b"").headers["content-length"]
                request = Request(head, await reader.readexactly(int(length)))
                self.seen[request.operation] += 1
                self.requests.append(request)
                answer = await self._act(request)(request, partial(self._forward, request))
                if answer is None:
                    return
                writer.write(answer)
                await writer.drain()
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.transport.abort()

    def _act(self, request: Request) -> Act:
        planned = self._next[request.operation]
        if planned:
            return planned.popleft()
        return self._always.get(request.operation, _pass_on)

    async def _forward(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        try:
            writer.write(request.raw)
            head = await reader.readuntil(b"\r\n\r\n")
            return head + await reader.readexactly(int(Request(head, b"").headers["content-length"]))
        finally:
            writer.transport.abort()


async def _pass_on(request: Request, forward: Forward) -> bytes:
    return await forward()
