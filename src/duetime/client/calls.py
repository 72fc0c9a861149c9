"""Makes the calls: sends a request, tries the next instance if nothing was sent, retries where that is safe, and splits
many items into batches."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from duetime.client.batching import BATCH_ITEMS_MAX, IN_FLIGHT_MAX, batch_length
from duetime.client.errors import CallKind, ConnectionFailed, error_of_answer, may_retry, outcome_unknown, pause_s
from duetime.client.models import Created
from duetime.client.responses import decode_created_many, decode_deleted_many
from duetime.client.routing import Direct, Route, Routes
from duetime.domain.timer import Verdict
from duetime.errors import DuetimeError, OutcomeUnknown, Rejected, Unserved
from duetime.http.client import Answer, HttpClient, HttpError

__all__ = ["Calls", "Key"]

ANSWER_BYTES_MAX = 512 * 1024 * 1024  # enough for a page of timers of the largest size
CONNECTIONS_MAX = 64  # to one instance
CONNECT_TIMEOUT_MS, CONNECT_TIMEOUT_SEVERAL_MS = 5_000, 2_000  # shorter if there are other instances to try

Key = tuple[str, str]  # namespace and timer id: they determine the owner
R = TypeVar("R")
Send = Callable[[Sequence[bytes], CallKind, Route], Awaitable[Sequence[R | DuetimeError]]]


class Calls:
    """Sends the requests of one client. `timeout_s` bounds a whole call with its retries."""

    def __init__(
        self, urls: Sequence[str], headers: Mapping[str, str], *, timeout_s: float, retries: int, direct: Direct
    ) -> None:
        self.timeout_s = timeout_s
        self._retries_max = retries
        self._http = HttpClient(
            connect_timeout_ms=CONNECT_TIMEOUT_SEVERAL_MS if direct or len(urls) > 1 else CONNECT_TIMEOUT_MS,
            body_bytes_max=ANSWER_BYTES_MAX,
            connections_per_origin_max=CONNECTIONS_MAX,
        )
        self.routes = Routes(urls, headers, direct, self, self._http)

    async def close(self) -> None:
        await self.routes.close()
        await self._http.close()

    # one call

    async def call(
        self, path: str, body: bytes, decode: Callable[[bytes], R], kind: CallKind, key: Key | None = None
    ) -> R:
        """`key`: the timer, for a call about one timer."""
        routes = self.routes

        def attempt(deadline: float) -> Awaitable[R]:
            route = routes.default_route if key is None else routes.route_of(*key)
            return self.attempt(path, body, decode, kind, deadline, route)

        return await self.with_retries(attempt, kind)

    async def with_retries(self, attempt: Callable[[float], Awaitable[R]], kind: CallKind) -> R:
        """Calls `attempt` until it succeeds or may not be retried. Once the outcome of an attempt was unknown, the
        outcome of the call stays unknown, unless a later attempt succeeds or is rejected."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        if self.routes.map_pending:
            await self.routes.wait_for_map(self.timeout_s / 2)
        unknown: OutcomeUnknown | None = None
        retries_made = 0
        while True:
            try:
                return await attempt(deadline)
            except DuetimeError as error:
                if isinstance(error, OutcomeUnknown):
                    unknown = unknown or error
                elif unknown is not None and isinstance(error, Rejected):
                    error.add_note(
                        "The response to an earlier attempt of this call was lost; that attempt may have been applied."
                    )
                    raise
                pause = pause_s(retries_made, error.retry_after_seconds)
                if not may_retry(error, kind) or retries_made >= self._retries_max or loop.time() + pause >= deadline:
                    raise (unknown or error) from None
            retries_made += 1
            await asyncio.sleep(pause)

    async def attempt(
        self, path: str, body: bytes, decode: Callable[[bytes], R], kind: CallKind, deadline: float, route: Route
    ) -> R:
        answer = await self.send("/api/v1/" + path, body, kind, deadline, route)
        if answer.status != 200:
            raise error_of_answer(answer, kind)
        try:
            return decode(answer.body)
        except msgspec.MsgspecError as error:
            raise _malformed(route.instances[0].url, error, kind) from None

    async def send(
        self, path: str, body: bytes, kind: CallKind, deadline: float, route: Route, method: str = "POST"
    ) -> Answer:
        """Sends to the first instance of the route. Sends to the next one only if certainly nothing was sent before, or
        if the call is a read, which changes nothing."""
        loop = asyncio.get_running_loop()
        reasons = []
        for instance in route.instances:
            target, head = instance.heads.get(path) or instance.head(path, method)
            begin = _request_bytes(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body), kind)
            try:
                timeout_ms = max(1, int((deadline - loop.time()) * 1_000))
                answer = await self._http.send(target, begin, timeout_ms=timeout_ms)
            except HttpError as error:
                self.routes.mark_failed(instance)
                if error.sent and kind is not CallKind.READ:
                    raise outcome_unknown(
                        f"{instance.url}: {error.reason}; it may or may not have been applied"
                    ) from None
                reasons.append(f"{instance.url}: {error.reason}")
                if loop.time() >= deadline:
                    break
                continue
            if answer is None:
                self.routes.mark_failed(instance)
                raise outcome_unknown(f"{instance.url}: the connection was lost; it may or may not have been applied")
            if answer.status == 503:
                self.routes.mark_refused(instance)
            return answer
        raise ConnectionFailed(f"cannot reach {'; cannot reach '.join(reasons)}")

    # many at once

    async def create_batch(
        self, items: Sequence[bytes], kind: CallKind, route: Route
    ) -> Sequence[Created | DuetimeError]:
        return await self._batch("timers/createMany", items, decode_created_many, kind, route)

    async def delete_batch(
        self, items: Sequence[bytes], kind: CallKind, route: Route
    ) -> Sequence[Verdict | DuetimeError]:
        return await self._batch("timers/deleteMany", items, decode_deleted_many, kind, route)

    async def _batch(
        self,
        path: str,
        items: Sequence[bytes],
        decode: Callable[[bytes], Sequence[R | DuetimeError]],
        kind: CallKind,
        route: Route,
    ) -> Sequence[R | DuetimeError]:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        body = b'{"timers":[%s]}' % b",".join(items)
        results = await self.attempt(path, body, decode, kind, deadline, route)
        if self.routes.is_direct and any(isinstance(result, Unserved) for result in results):
            self.routes.refresh_soon()
        return results

    async def many(
        self, bodies: Sequence[bytes], kinds: Sequence[CallKind], route_of: Callable[[int], Route], send: Send[R]
    ) -> tuple[list[R | DuetimeError], Collection[int]]:
        """Sends all items in batches, then again those that failed and may be retried, by the rules of a single
        call. Returns the results, and which items had an attempt of unknown outcome."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.timeout_s
        if self.routes.map_pending:
            await self.routes.wait_for_map(self.timeout_s / 2)
        found: dict[int, R | DuetimeError] = {}
        unknown: dict[int, OutcomeUnknown] = {}
        todo = list(range(len(bodies)))
        for retries_made in itertools.count():
            pause = pause_s(retries_made, None)
            again = []
            for index, result in await _send_batches(self._by_route(todo, route_of), bodies, kinds, send):
                found[index] = result
                if isinstance(result, DuetimeError):
                    if isinstance(result, OutcomeUnknown):
                        unknown.setdefault(index, result)
                    if not isinstance(result, Rejected) and index in unknown:
                        found[index] = unknown[index]
                    if may_retry(result, kinds[index]):
                        again.append(index)
                        pause = max(pause, result.retry_after_seconds or 0)
            if not again or retries_made >= self._retries_max or loop.time() + pause >= deadline:
                break
            todo = again
            await asyncio.sleep(pause)
        return [found[index] for index in range(len(bodies))], unknown

    def _by_route(self, todo: list[int], route_of: Callable[[int], Route]) -> dict[Route, list[int]]:
        if not self.routes.is_direct:
            return {self.routes.default_route: todo}
        by_route: dict[Route, list[int]] = {}
        for index in todo:
            by_route.setdefault(route_of(index), []).append(index)
        return by_route


async def _send_batches(
    todo: Mapping[Route, Sequence[int]], bodies: Sequence[bytes], kinds: Sequence[CallKind], send: Send[R]
) -> Iterable[tuple[int, R | DuetimeError]]:
    """Makes one attempt for each item. A batch has one route and one kind; each route has at most IN_FLIGHT_MAX batches
    in flight."""
    results: list[tuple[int, R | DuetimeError]] = []

    async def post(batch: Sequence[int], kind: CallKind, route: Route, free: asyncio.Semaphore) -> None:
        async with free:
            try:
                results.extend(zip(batch, await send([bodies[i] for i in batch], kind, route), strict=True))
            except DuetimeError as error:
                results.extend((index, copy.copy(error)) for index in batch)

    async with asyncio.TaskGroup() as posts:
        for route, indexes in todo.items():
            free = asyncio.Semaphore(IN_FLIGHT_MAX)
            for kind in CallKind:
                rest = [index for index in indexes if kinds[index] is kind]
                while rest:
                    count = batch_length([bodies[index] for index in rest[:BATCH_ITEMS_MAX]])
                    posts.create_task(post(rest[:count], kind, route, free))
                    del rest[:count]
    return results


def _request_bytes(data: bytes, kind: CallKind) -> Callable[[], bytes | None]:
    left: bytes | None = data

    def begin() -> bytes | None:
        # A second call means that the connection ended after the request was sent on it. The server may have read the
        # request, so only a read is sent again.
        nonlocal left
        first, left = left, left if kind is CallKind.READ else None
        return first

    return begin


def _malformed(url: str, error: Exception, kind: CallKind) -> DuetimeError:
    text = f"{url} sent a response that cannot be decoded (is this a Duetime server?): {error}"
    return DuetimeError(text, code="malformed_answer") if kind is CallKind.READ else outcome_unknown(text)
