"""How a call is made: sent, sent elsewhere if nothing left, repeated where that is safe, split into batches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from duetime.client.answers import decode_created_many, decode_deleted_many
from duetime.client.failures import ConnectionFailed, Kind, error_of_answer, in_doubt, may_repeat, pause_s
from duetime.client.gathering import BATCH_ITEMS_MAX, IN_FLIGHT_MAX, batch_length
from duetime.client.routing import Direct, Routes, Way
from duetime.client.shapes import Created
from duetime.domain.timer import Verdict
from duetime.errors import DuetimeError, OutcomeUnknown, Rejected, Unserved
from duetime.http.client import Answer, HttpClient, HttpError

__all__ = ["Calls", "Key"]

ANSWER_BYTES_MAX = 512 * 1024 * 1024  # a page of the largest timers there can be
CONNECTIONS_MAX = 64  # to one instance
CONNECT_MS, CONNECT_MS_OF_MANY = 5_000, 2_000  # who has a choice does not wait long for one

Key = tuple[str, str]  # namespace and timer id: what finds the owner
R = TypeVar("R")
Send = Callable[[Sequence[bytes], Kind, Way], Awaitable[Sequence[R | DuetimeError]]]


class Calls:
    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], *, timeout_s: float, retries: int, direct: Direct
    ) -> None:
        self.timeout_s = timeout_s
        self._retries = retries
        self._http = HttpClient(
            connect_timeout_ms=CONNECT_MS_OF_MANY if direct or len(urls) > 1 else CONNECT_MS,
            body_bytes_max=ANSWER_BYTES_MAX,
            connections_per_origin_max=CONNECTIONS_MAX,
        )
        self.routes = Routes(urls, headers, direct, self, self._http)

    async def close(self) -> None:
        await self.routes.close()
        await self._http.close()

    # one call

    async def call(self, path: str, body: bytes, decode: Callable[[bytes], R], kind: Kind, key: Key | None = None) -> R:
        """`key`: what the call is about, if it is about one timer."""
        routes = self.routes

        def once(deadline: float) -> Awaitable[R]:
            way = routes.anywhere if key is None else routes.way_of(*key)
            return self.once(path, body, decode, kind, deadline, way)

        return await self.persist(once, kind)

    async def persist(self, once: Callable[[float], Awaitable[R]], kind: Kind) -> R:
        """Repeats what may be repeated. What was in doubt once stays so, whatever later tries met."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        if self.routes.unread:
            await self.routes.read_first(self.timeout_s / 2)
        doubt: OutcomeUnknown | None = None
        repeats = 0
        while True:
            try:
                return await once(deadline)
            except DuetimeError as error:
                if isinstance(error, OutcomeUnknown):
                    doubt = doubt or error
                elif doubt is not None and isinstance(error, Rejected):
                    error.add_note("An earlier try of this call lost its answer and may have been applied.")
                    raise
                pause = pause_s(repeats, error.retry_after_seconds)
                if not may_repeat(error, kind) or repeats >= self._retries or loop.time() + pause >= deadline:
                    raise (doubt or error) from None
            repeats += 1
            await asyncio.sleep(pause)

    async def once(
        self, path: str, body: bytes, decode: Callable[[bytes], R], kind: Kind, deadline: float, way: Way
    ) -> R:
        answer = await self.send("/api/v1/" + path, body, kind, deadline, way)
        if answer.status != 200:
            raise error_of_answer(answer, kind)
        try:
            return decode(answer.body)
        except msgspec.MsgspecError as error:
            raise _malformed(way.instances[0].url, error, kind) from None

    async def send(self, path: str, body: bytes, kind: Kind, deadline: float, way: Way, method: str = "POST") -> Answer:
        """To the first instance of the way; to the next one only if it is certain that nothing was sent (a read
        changes nothing either way)."""
        loop = asyncio.get_running_loop()
        reasons = []
        for instance in way.instances:
            target, head = instance.heads.get(path) or instance.head(path, method)
            begin = _beginning(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body), kind)
            try:
                timeout_ms = max(1, int((deadline - loop.time()) * 1_000))
                answer = await self._http.send(target, begin, timeout_ms=timeout_ms)
            except HttpError as error:
                self.routes.failed(instance)
                if error.sent and kind is not Kind.READ:
                    raise in_doubt(f"{instance.url}: {error.reason}; it may or may not have been applied") from None
                reasons.append(f"{instance.url}: {error.reason}")
                if loop.time() >= deadline:
                    break
                continue
            if answer is None:
                self.routes.failed(instance)
                raise in_doubt(f"{instance.url}: the connection was lost; it may or may not have been applied")
            if answer.status == 503:
                self.routes.refused(instance)
            return answer
        raise ConnectionFailed(f"cannot reach {'; nor '.join(reasons)}")

    # many at once

    async def create_batch(self, items: Sequence[bytes], kind: Kind, way: Way) -> Sequence[Created | DuetimeError]:
        return await self._batch("timers/createMany", items, decode_created_many, kind, way)

    async def delete_batch(self, items: Sequence[bytes], kind: Kind, way: Way) -> Sequence[Verdict | DuetimeError]:
        return await self._batch("timers/deleteMany", items, decode_deleted_many, kind, way)

    async def _batch(
        self,
        path: str,
        items: Sequence[bytes],
        decode: Callable[[bytes], Sequence[R | DuetimeError]],
        kind: Kind,
        way: Way,
    ) -> Sequence[R | DuetimeError]:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        body = b'{"timers":[%s]}' % b",".join(items)
        results = await self.once(path, body, decode, kind, deadline, way)
        if self.routes.is_direct and any(isinstance(result, Unserved) for result in results):
            self.routes.read_soon()
        return results

    async def many(
        self, bodies: Sequence[bytes], kinds: Sequence[Kind], way_of: Callable[[int], Way], send: Send[R]
    ) -> list[R | DuetimeError]:
        """Batches of all items; then of those that failed and may be repeated, by the rules of a single call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        if self.routes.unread:
            await self.routes.read_first(self.timeout_s / 2)
        found: dict[int, R | DuetimeError] = {}
        doubts: dict[int, OutcomeUnknown] = {}
        todo = list(range(len(bodies)))
        for repeats in itertools.count():
            pause = pause_s(repeats, None)
            again = []
            for index, result in await _in_batches(self._by_way(todo, way_of), bodies, kinds, send):
                found[index] = result
                if isinstance(result, DuetimeError):
                    if isinstance(result, OutcomeUnknown):
                        doubts.setdefault(index, result)
                    if not isinstance(result, Rejected) and index in doubts:
                        found[index] = doubts[index]
                    if may_repeat(result, kinds[index]):
                        again.append(index)
                        pause = max(pause, result.retry_after_seconds or 0)
            if not again or repeats >= self._retries or loop.time() + pause >= deadline:
                break
            todo = again
            await asyncio.sleep(pause)
        return [found[index] for index in range(len(bodies))]

    def _by_way(self, todo: list[int], way_of: Callable[[int], Way]) -> dict[Way, list[int]]:
        if not self.routes.is_direct:
            return {self.routes.anywhere: todo}
        ways: dict[Way, list[int]] = {}
        for index in todo:
            ways.setdefault(way_of(index), []).append(index)
        return ways


async def _in_batches(
    todo: Mapping[Way, Sequence[int]], bodies: Sequence[bytes], kinds: Sequence[Kind], send: Send[R]
) -> Iterable[tuple[int, R | DuetimeError]]:
    """One try of each: batches of one way and kind, on each way a bounded number in flight."""
    results: list[tuple[int, R | DuetimeError]] = []

    async def post(batch: Sequence[int], kind: Kind, way: Way, free: asyncio.Semaphore) -> None:
        async with free:
            try:
                results.extend(zip(batch, await send([bodies[i] for i in batch], kind, way), strict=True))
            except DuetimeError as error:
                results.extend((index, copy.copy(error)) for index in batch)

    async with asyncio.TaskGroup() as posts:
        for way, indexes in todo.items():
            free = asyncio.Semaphore(IN_FLIGHT_MAX)
            for kind in Kind:
                rest = [index for index in indexes if kinds[index] is kind]
                while rest:
                    count = batch_length([bodies[index] for index in rest[:BATCH_ITEMS_MAX]])
                    posts.create_task(post(rest[:count], kind, way, free))
                    del rest[:count]
    return results


def _beginning(data: bytes, kind: Kind) -> Callable[[], bytes | None]:
    left: bytes | None = data

    def begin() -> bytes | None:
        # Asked a second time, the first sending met a dying connection: was it read? A write must not guess.
        nonlocal left
        first, left = left, left if kind is Kind.READ else None
        return first

    return begin


def _malformed(url: str, error: Exception, kind: Kind) -> DuetimeError:
    text = f"{url} gave an answer that cannot be read ({error}); is this a Duetime server?"
    return DuetimeError(text, code="malformed_answer") if kind is Kind.READ else in_doubt(text)
