"""The request batcher: sends calls that are made at the same time in one request, without a delay for any of them.

While no request is in flight, all calls of the current iteration of the event loop are sent at its end. While a
request is in flight, calls wait for the next one. A full batch does not wait, up to IN_FLIGHT_MAX requests.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from duetime.errors import DuetimeError

R = TypeVar("R")

BATCH_ITEMS_MAX = 1_000
BATCH_BYTES_MAX = 4 * 1024 * 1024
IN_FLIGHT_MAX = 4

Send = Callable[[Sequence[bytes]], Awaitable[Sequence[R | DuetimeError]]]


class RequestBatcher(Generic[R]):
    """Collects items, sends them in batches with `send`, and gives each caller the result of its own item."""

    def __init__(self, send: Send[R]) -> None:
        self._send = send
        self._waiting: list[tuple[bytes, asyncio.Future[R]]] = []
        self._in_flight: set[asyncio.Task[None]] = set()
        self._scheduled = False

    def add(self, item: bytes) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if not self._scheduled and self._may_send():
            self._scheduled = True
            loop.call_soon(self._send_waiting)
        return future

    def _may_send(self) -> bool:
        if not self._in_flight:
            return True
        return len(self._waiting) >= BATCH_ITEMS_MAX and len(self._in_flight) < IN_FLIGHT_MAX

    def _send_waiting(self) -> None:
        self._scheduled = False
        while self._waiting and self._may_send():
            count = batch_length([item for item, _ in self._waiting[:BATCH_ITEMS_MAX]])
            batch = [(item, future) for item, future in self._waiting[:count] if not future.done()]
            del self._waiting[:count]
            if batch:
                task = asyncio.get_running_loop().create_task(self._post(batch))
                self._in_flight.add(task)
                task.add_done_callback(self._request_done)

    def _request_done(self, task: asyncio.Task[None]) -> None:
        self._in_flight.discard(task)
        self._send_waiting()

    async def _post(self, batch: list[tuple[bytes, asyncio.Future[R]]]) -> None:
        results: Sequence[R | DuetimeError]
        try:
            results = await self._send([item for item, _ in batch])
        except DuetimeError as error:
            results = [copy.copy(error) for _ in batch]  # a copy each: a caller may add a note to its own
        except BaseException:
            for _, future in batch:
                future.cancel()
            raise
        for (_, future), result in zip(batch, results, strict=True):
            if future.done():
                continue
            if isinstance(result, DuetimeError):
                future.set_exception(result)
            else:
                future.set_result(result)


def batch_length(items: Sequence[bytes]) -> int:
    """How many of the first items fit into one request."""
    size = 0
    for count, item in enumerate(items[:BATCH_ITEMS_MAX]):
        size += len(item)
        if size > BATCH_BYTES_MAX and count:
            return count
    return min(len(items), BATCH_ITEMS_MAX)
