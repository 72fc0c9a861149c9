"""AsyncClient: every call of the HTTP API as a method, repeated only where that is safe."""

from __future__ import annotations

import asyncio
import builtins
import copy
import itertools
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar, Unpack

import msgspec
from msgspec import Struct

from duetime.client.failures import (
    ConnectionFailed,
    Kind,
    error_of_answer,
    error_of_problem,
    in_doubt,
    may_repeat,
    pause_s,
)
from duetime.client.gathering import BATCH_ITEMS_MAX, IN_FLIGHT_MAX, Gatherer, batch_length
from duetime.client.shapes import (
    ClusterStatus,
    Created,
    Delay,
    Missed,
    Namespace,
    NamespaceSettings,
    NewTimer,
    Page,
    RetryPolicy,
    Timer,
    TimerChanges,
    TimerFilter,
    Updated,
    encoded,
    encoded_new,
    wire_dict,
)
from duetime.errors import DuetimeError, NotFound, OutcomeUnknown, Rejected, SetupError
from duetime.http_client import Answer, HttpClient, HttpError, Target, parse_target, request_head
from duetime.model import State, Verdict
from duetime.wire import ProblemJson

__all__ = ["DEFAULT_URL", "AsyncClient", "AsyncNamespaces"]

DEFAULT_URL = "http://127.0.0.1:8463"
ANSWER_BYTES_MAX = 512 * 1024 * 1024  # a page of the largest timers there can be
CONNECTIONS_MAX = 64
RETRIES = 5

R = TypeVar("R")


class AsyncClient:
    """Use it as a context manager, or close() it. Belongs to the event loop it is first used in.

    `timeout` bounds a whole call in seconds, repeats included. `coalesce`: creates and deletes that are under
    way at the same time share requests (createMany, deleteMany), for several times the throughput; `timeout`
    then bounds each of those requests.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = 10.0,
        retries: int = RETRIES,
        coalesce: bool = False,
    ) -> None:
        self.url = (url or os.environ.get("DUETIME_URL") or DEFAULT_URL).rstrip("/")
        self.namespace = namespace
        self.namespaces = AsyncNamespaces(self)
        self._timeout_s = timeout
        self._retries = retries
        self._headers = {"content-type": "application/json"}
        if token := token or os.environ.get("DUETIME_TOKEN"):
            self._headers["authorization"] = f"Bearer {token}"
        self._heads: dict[str, tuple[Target, bytes]] = {}
        self._head("/readyz", "GET")  # a malformed URL or token is noticed here
        self._http = HttpClient(body_bytes_max=ANSWER_BYTES_MAX, connections_per_origin_max=CONNECTIONS_MAX)
        self._coalesce = coalesce
        # Apart, because one batch has one answer to "may it be repeated?".
        self._creates = Gatherer(lambda items: self._create_batch(items, Kind.ONCE))
        self._creates_if_absent = Gatherer(lambda items: self._create_batch(items, Kind.REPEATABLE))
        self._deletes = Gatherer(self._delete_batch)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    # timers

    async def create(
        self,
        timer_id: str,
        *,
        at: datetime | str | None = None,
        delay: Delay | None = None,
        callback_url: str | None = None,
        payload: Any = None,
        retry_policy: RetryPolicy | Mapping[str, Any] | None = None,
        callback_timeout_seconds: int | None = None,
        headers: Mapping[str, str] | None = None,
        correlation_id: str | None = None,
        tags: Sequence[str] = (),
        missed: Missed | Mapping[str, Any] | None = None,
        if_absent: bool = False,
        namespace: str | None = None,
    ) -> Created:
        """Create a timer or replace the one of that id, at an instant or after a delay (a float is seconds).

        `if_absent`: never replace; the same timer again is answered as it stands, a different one is a Conflict.
        """
        new = NewTimer(
            timer_id,
            at,
            delay,
            callback_url,
            payload,
            retry_policy,
            callback_timeout_seconds,
            headers,
            correlation_id,
            tags,
            missed,
            if_absent,
            namespace,
        )
        body = encoded_new(new, self.namespace)
        kind = Kind.REPEATABLE if if_absent else Kind.ONCE
        try:
            if self._coalesce:
                gatherer = self._creates_if_absent if if_absent else self._creates
                return await self._persist(lambda _: gatherer.add(body), kind)
            return await self._call("timers/create", body, _decode_created, kind)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(_create_in_doubt(timer_id, error, if_absent)) from None

    async def create_many(self, timers: Iterable[NewTimer]) -> builtins.list[Created | DuetimeError]:
        """Any number of timers, 1,000 to a request. A result or an error for each, in order."""
        listed = builtins.list(timers)
        bodies = [encoded_new(new, self.namespace) for new in listed]
        kinds = [Kind.REPEATABLE if new.if_absent else Kind.ONCE for new in listed]
        return await self._many(bodies, kinds, self._create_batch)

    async def get(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        return (await self._call("timers/get", self._ref(timer_id, namespace), _decode_timer, Kind.READ)).timer

    async def update(self, timer_id: str, **changes: Unpack[TimerChanges]) -> Updated:
        """Change some fields. The verdict is UPDATED, or IN_FLIGHT: applied, but an older callback is under way."""
        body = encoded({"namespace": self.namespace, "timerId": timer_id, **wire_dict(changes)})
        return await self._call("timers/update", body, _decode_updated, Kind.ONCE)

    async def delete(self, timer_id: str, *, namespace: str | None = None) -> Verdict:
        """CANCELLED: no callback will start. IN_FLIGHT: one is under way. ALREADY_REACHED: it was over before."""
        body = self._ref(timer_id, namespace)
        tries = 0

        async def once(timeout_s: float) -> Verdict:
            nonlocal tries
            tries += 1
            if self._coalesce:
                return await self._deletes.add(body)
            return (await self._once("timers/delete", body, _decode_deleted, Kind.REPEATABLE, timeout_s)).verdict

        verdict = await self._persist(once, Kind.REPEATABLE)
        if tries > 1 and verdict is Verdict.ALREADY_REACHED:
            # Perhaps over because an earlier try of ours was applied: then the verdict is the one it had.
            try:
                if (await self.get(timer_id, namespace=namespace)).state is State.CANCELLED:
                    return Verdict.CANCELLED
            except NotFound:
                pass
        return verdict

    async def delete_many(
        self, timer_ids: Iterable[str], *, namespace: str | None = None
    ) -> builtins.list[Verdict | DuetimeError]:
        """Any number of timers, 1,000 to a request. A verdict or an error for each, in order."""
        bodies = [self._ref(timer_id, namespace) for timer_id in timer_ids]
        return await self._many(bodies, [Kind.REPEATABLE] * len(bodies), lambda items, _: self._delete_batch(items))

    async def list(self, *, page_size: int = 500, **filter: Unpack[TimerFilter]) -> AsyncGenerator[Timer, None]:
        """All timers that match, page by page."""
        async for page in self.pages(page_size=page_size, **filter):
            for timer in page:
                yield timer

    async def pages(
        self, *, page_size: int = 500, **filter: Unpack[TimerFilter]
    ) -> AsyncGenerator[builtins.list[Timer], None]:
        cursor: str | None = None
        while True:
            page = await self.list_page(limit=page_size, cursor=cursor, **filter)
            yield page.timers
            cursor = page.next_cursor
            if cursor is None:
                return

    async def list_page(self, *, limit: int = 100, cursor: str | None = None, **filter: Unpack[TimerFilter]) -> Page:
        """One page. Only `next_cursor is None` means the end: a page may be short, even empty, before it."""
        query = {"namespace": self.namespace, **wire_dict(filter), "limit": limit, "cursor": cursor}
        return await self._call("timers/list", encoded(query), _decode_page, Kind.READ)

    async def fire_now(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        return (await self._call("timers/fireNow", self._ref(timer_id, namespace), _decode_timer, Kind.ONCE)).timer

    async def replay(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Fire a timer that is over once more."""
        return (await self._call("timers/replay", self._ref(timer_id, namespace), _decode_timer, Kind.ONCE)).timer

    # the server

    async def cluster_status(self) -> ClusterStatus:
        return await self._call("cluster/status", b"{}", _decode_status, Kind.READ)

    async def ready(self) -> bool:
        """Is there a server that serves? Asks once."""
        try:
            answer = await self._send("/readyz", b"", Kind.READ, self._timeout_s, "GET")
        except ConnectionFailed:
            return False
        return answer.status == 200

    # how a call is made

    def _ref(self, timer_id: str, namespace: str | None) -> bytes:
        return encoded({"namespace": self.namespace if namespace is None else namespace, "timerId": timer_id})

    async def _call(self, path: str, body: bytes, decode: Callable[[bytes], R], kind: Kind) -> R:
        return await self._persist(lambda timeout_s: self._once(path, body, decode, kind, timeout_s), kind)

    async def _persist(self, once: Callable[[float], Awaitable[R]], kind: Kind) -> R:
        """Repeats what may be repeated. What was in doubt once stays so, whatever later tries met."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        doubt: OutcomeUnknown | None = None
        repeats = 0
        while True:
            try:
                return await once(deadline - loop.time())
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

    async def _once(self, path: str, body: bytes, decode: Callable[[bytes], R], kind: Kind, timeout_s: float) -> R:
        answer = await self._send("/api/v1/" + path, body, kind, timeout_s)
        if answer.status != 200:
            raise error_of_answer(answer, kind)
        try:
            return decode(answer.body)
        except msgspec.MsgspecError as error:
            raise _malformed(self.url, error, kind) from None

    async def _send(self, path: str, body: bytes, kind: Kind, timeout_s: float, method: str = "POST") -> Answer:
        target, head = self._heads.get(path) or self._head(path, method)
        data: bytes | None = b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body)

        def begin() -> bytes | None:
            # Asked a second time, the first sending met a dying connection: was it read? A write must not guess.
            nonlocal data
            first, data = data, data if kind is Kind.READ else None
            return first

        try:
            answer = await self._http.send(target, begin, timeout_ms=max(1, int(timeout_s * 1_000)))
        except HttpError as error:
            if error.sent and kind is not Kind.READ:
                raise in_doubt(f"{self.url}: {error.reason}; it may or may not have been applied") from None
            raise ConnectionFailed(f"cannot reach {self.url}: {error.reason}") from None
        if answer is None:
            raise in_doubt(f"{self.url}: the connection was lost; it may or may not have been applied")
        return answer

    def _head(self, path: str, method: str = "POST") -> tuple[Target, bytes]:
        try:
            target = parse_target(self.url + path)
        except ValueError as error:
            raise SetupError(f"the server's URL {error}") from None  # unsaid: it may hold a password
        try:
            head = request_head(method, target, self._headers)
        except ValueError as error:
            raise SetupError(f"the token: {error}") from None
        self._heads[path] = target, head
        return target, head

    # many at once

    async def _create_batch(self, items: Sequence[bytes], kind: Kind) -> builtins.list[Created | DuetimeError]:
        return await self._once("timers/createMany", _array(items), _decode_created_many, kind, self._timeout_s)

    async def _delete_batch(self, items: Sequence[bytes]) -> builtins.list[Verdict | DuetimeError]:
        return await self._once(
            "timers/deleteMany", _array(items), _decode_deleted_many, Kind.REPEATABLE, self._timeout_s
        )

    async def _many(
        self,
        bodies: Sequence[bytes],
        kinds: Sequence[Kind],
        send: Callable[[Sequence[bytes], Kind], Awaitable[Sequence[R | DuetimeError]]],
    ) -> builtins.list[R | DuetimeError]:
        """Batches of all items; then of those that failed and may be repeated, by the rules of a single call."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout_s
        found: dict[int, R | DuetimeError] = {}
        doubts: dict[int, OutcomeUnknown] = {}
        todo = builtins.list(range(len(bodies)))
        for repeats in itertools.count():
            pause = pause_s(repeats, None)
            again = []
            for index, result in await _in_batches(todo, bodies, kinds, send):
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


async def _in_batches(
    todo: Iterable[int],
    bodies: Sequence[bytes],
    kinds: Sequence[Kind],
    send: Callable[[Sequence[bytes], Kind], Awaitable[Sequence[R | DuetimeError]]],
) -> builtins.list[tuple[int, R | DuetimeError]]:
    """One try of each: batches of one kind, a bounded number in flight."""
    results: list[tuple[int, R | DuetimeError]] = []
    free = asyncio.Semaphore(IN_FLIGHT_MAX)

    async def post(batch: Sequence[int], kind: Kind) -> None:
        async with free:
            try:
                results.extend(zip(batch, await send([bodies[i] for i in batch], kind), strict=True))
            except DuetimeError as error:
                results.extend((index, copy.copy(error)) for index in batch)

    async with asyncio.TaskGroup() as posts:
        for kind in Kind:
            rest = [index for index in todo if kinds[index] is kind]
            while rest:
                count = batch_length([bodies[index] for index in rest[:BATCH_ITEMS_MAX]])
                posts.create_task(post(rest[:count], kind))
                del rest[:count]
    return results


class AsyncNamespaces:
    """`client.namespaces`: the scopes of timers, and their defaults."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self, name: str, *, num_shards: int | None = None, **settings: Unpack[NamespaceSettings]
    ) -> Namespace:
        """`num_shards` never changes afterwards; left out, it is the server's default."""
        fields = {"namespace": name, **wire_dict(settings)}
        if num_shards is not None:
            fields["numShards"] = num_shards
        return (await self._call("create", fields, _decode_namespace, Kind.ONCE)).namespace

    async def get(self, name: str) -> Namespace:
        return (await self._call("get", {"namespace": name}, _decode_namespace, Kind.READ)).namespace

    async def list(self) -> tuple[Namespace, ...]:
        return (await self._call("list", {}, _decode_namespaces, Kind.READ)).namespaces

    async def update(self, name: str, **settings: Unpack[NamespaceSettings]) -> Namespace:
        # The same values twice are the same values: harmless to repeat.
        fields = {"namespace": name, **wire_dict(settings)}
        return (await self._call("update", fields, _decode_namespace, Kind.REPEATABLE)).namespace

    async def delete(self, name: str) -> None:
        await self._call("delete", {"namespace": name}, lambda _: None, Kind.ONCE)

    async def _call(self, verb: str, fields: dict[str, Any], decode: Callable[[bytes], R], kind: Kind) -> R:
        return await self._client._call(f"namespaces/{verb}", encoded(fields), decode, kind)


# --- answers -------------------------------------------------------------------------------------


class _TimerAnswer(Struct):
    timer: Timer


class _Deleted(Struct):
    verdict: Verdict


class _CreateResult(Struct):
    timer: Timer | None = None
    replaced: bool = False
    existed: bool = False
    error: ProblemJson | None = None


class _DeleteResult(Struct):
    verdict: Verdict | None = None
    error: ProblemJson | None = None


class _CreateResults(Struct):
    results: list[_CreateResult]


class _DeleteResults(Struct):
    results: list[_DeleteResult]


class _NamespaceAnswer(Struct):
    namespace: Namespace


class _NamespacesAnswer(Struct):
    namespaces: tuple[Namespace, ...]


_decode_created = msgspec.json.Decoder(Created).decode
_decode_timer = msgspec.json.Decoder(_TimerAnswer).decode
_decode_updated = msgspec.json.Decoder(Updated).decode
_decode_deleted = msgspec.json.Decoder(_Deleted).decode
_decode_page = msgspec.json.Decoder(Page).decode
_decode_status = msgspec.json.Decoder(ClusterStatus).decode
_decode_namespace = msgspec.json.Decoder(_NamespaceAnswer).decode
_decode_namespaces = msgspec.json.Decoder(_NamespacesAnswer).decode
_decode_create_results = msgspec.json.Decoder(_CreateResults).decode
_decode_delete_results = msgspec.json.Decoder(_DeleteResults).decode


def _decode_created_many(body: bytes) -> list[Created | DuetimeError]:
    return [
        error_of_problem(result.error)
        if result.timer is None
        else Created(result.timer, result.replaced, result.existed)
        for result in _decode_create_results(body).results
    ]


def _decode_deleted_many(body: bytes) -> list[Verdict | DuetimeError]:
    return [
        error_of_problem(result.error) if result.verdict is None else result.verdict
        for result in _decode_delete_results(body).results
    ]


def _array(items: Sequence[bytes]) -> bytes:
    return b'{"timers":[%s]}' % b",".join(items)


def _malformed(url: str, error: Exception, kind: Kind) -> DuetimeError:
    text = f"{url} gave an answer that cannot be read ({error}); is this a Duetime server?"
    return DuetimeError(text, code="malformed_answer") if kind is Kind.READ else in_doubt(text)


def _create_in_doubt(timer_id: str, error: OutcomeUnknown, if_absent: bool) -> str:
    if if_absent:
        return f"{error.detail}. Creating {timer_id!r} with if_absent again is safe."
    return (
        f"{error.detail}. Creating {timer_id!r} again could fire it twice; look with get() first. "
        "With if_absent=True a create is safe to repeat, and is repeated by itself."
    )
