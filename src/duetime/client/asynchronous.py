"""AsyncClient: every call of the HTTP API as a method, repeated only where that is safe."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar, Unpack

from duetime.client.answers import (
    decode_created,
    decode_deleted,
    decode_namespace,
    decode_namespaces,
    decode_page,
    decode_status,
    decode_timer,
    decode_updated,
)
from duetime.client.calls import Calls
from duetime.client.failures import ConnectionFailed, Kind
from duetime.client.routing import Direct
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
from duetime.domain.timer import State, Verdict
from duetime.errors import DuetimeError, NotFound, OutcomeUnknown, SetupError

__all__ = ["DEFAULT_URL", "AsyncClient", "AsyncNamespaces"]

DEFAULT_URL = "http://127.0.0.1:8463"
RETRIES = 5

R = TypeVar("R")


class AsyncClient:
    """Use it as a context manager, or close() it. Belongs to the event loop it is first used in.

    `url` may be several, of one cluster: any that answers is used. `timeout` bounds a whole call in seconds,
    repeats included. `coalesce`: creates and deletes that are under way at the same time share requests
    (createMany, deleteMany), for several times the throughput; `timeout` then bounds each of those requests.
    `direct`: what is about one timer is sent to the instance that owns it, at the address that instance
    advertises. With an https URL that takes `direct="https"`: a token is never sent on in plain http.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = 15.0,  # more than the server takes to say that nothing was applied
        retries: int = RETRIES,
        coalesce: bool = False,
        direct: Direct = False,
    ) -> None:
        given = os.environ.get("DUETIME_URL") or DEFAULT_URL if url is None or url == "" else url
        self.urls = tuple(one.rstrip("/") for one in ([given] if isinstance(given, str) else given))
        if not self.urls:
            raise SetupError("the list of the server's URLs is empty")
        self.url = self.urls[0]
        self.namespace = namespace
        self.namespaces = AsyncNamespaces(self)
        headers = {"content-type": "application/json"}
        if token := token or os.environ.get("DUETIME_TOKEN"):
            headers["authorization"] = f"Bearer {token}"
        self._calls = Calls(self.urls, headers, timeout_s=timeout, retries=retries, direct=direct)
        self._way_of = self._calls.routes.way_of
        self._coalesce = coalesce

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._calls.close()

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
        key = (_or(namespace, self.namespace), timer_id)
        kind = Kind.REPEATABLE if if_absent else Kind.ONCE
        try:
            if not self._coalesce:
                return await self._calls.call("timers/create", body, decode_created, kind, key)

            def gathered(_: float) -> asyncio.Future[Created]:
                way = self._way_of(*key)
                return (way.creates_if_absent if if_absent else way.creates).add(body)

            return await self._calls.persist(gathered, kind)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(_create_in_doubt(timer_id, error, if_absent)) from None

    async def create_many(self, timers: Iterable[NewTimer]) -> builtins.list[Created | DuetimeError]:
        """Any number of timers, 1,000 to a request. A result or an error for each, in order."""
        listed = builtins.list(timers)
        bodies = [encoded_new(new, self.namespace) for new in listed]
        kinds = [Kind.REPEATABLE if new.if_absent else Kind.ONCE for new in listed]
        return await self._calls.many(
            bodies,
            kinds,
            lambda i: self._way_of(_or(listed[i].namespace, self.namespace), listed[i].timer_id),
            self._calls.create_batch,
        )

    async def get(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        return await self._about("timers/get", timer_id, namespace, Kind.READ)

    async def update(self, timer_id: str, **changes: Unpack[TimerChanges]) -> Updated:
        """Change some fields. The verdict is UPDATED, or IN_FLIGHT: applied, but an older callback is under way."""
        namespace = changes.get("namespace", self.namespace)
        body = encoded({"namespace": namespace, "timerId": timer_id, **wire_dict(changes)})
        return await self._calls.call("timers/update", body, decode_updated, Kind.ONCE, (namespace, timer_id))

    async def delete(self, timer_id: str, *, namespace: str | None = None) -> Verdict:
        """CANCELLED: no callback will start. IN_FLIGHT: one is under way. ALREADY_REACHED: it was over before."""
        name = _or(namespace, self.namespace)
        body = _ref(name, timer_id)
        tries = 0

        async def once(deadline: float) -> Verdict:
            nonlocal tries
            tries += 1
            way = self._way_of(name, timer_id)
            if self._coalesce:
                return await way.deletes.add(body)
            answer = await self._calls.once("timers/delete", body, decode_deleted, Kind.REPEATABLE, deadline, way)
            return answer.verdict

        verdict = await self._calls.persist(once, Kind.REPEATABLE)
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
        name = _or(namespace, self.namespace)
        listed = builtins.list(timer_ids)
        bodies = [_ref(name, timer_id) for timer_id in listed]
        kinds = [Kind.REPEATABLE] * len(bodies)
        return await self._calls.many(bodies, kinds, lambda i: self._way_of(name, listed[i]), self._calls.delete_batch)

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
        return await self._calls.call("timers/list", encoded(query), decode_page, Kind.READ)

    async def fire_now(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        return await self._about("timers/fireNow", timer_id, namespace, Kind.ONCE)

    async def replay(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Fire a timer that is over once more."""
        return await self._about("timers/replay", timer_id, namespace, Kind.ONCE)

    async def _about(self, path: str, timer_id: str, namespace: str | None, kind: Kind) -> Timer:
        key = (_or(namespace, self.namespace), timer_id)
        return (await self._calls.call(path, _ref(*key), decode_timer, kind, key)).timer

    # the server

    async def cluster_status(self, *, shards: bool = False) -> ClusterStatus:
        """The whole cluster, whichever instance is asked; with `shards` every shard and its owner, too."""
        return await self._calls.call("cluster/status", encoded({"shards": shards}), decode_status, Kind.READ)

    async def ready(self) -> bool:
        """Is there a server that serves? Asks once."""
        calls = self._calls
        deadline = asyncio.get_running_loop().time() + calls.timeout_s
        try:
            answer = await calls.send("/readyz", b"", Kind.READ, deadline, calls.routes.anywhere, "GET")
        except ConnectionFailed:
            return False
        return answer.status == 200


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
        return (await self._call("create", fields, decode_namespace, Kind.ONCE)).namespace

    async def get(self, name: str) -> Namespace:
        return (await self._call("get", {"namespace": name}, decode_namespace, Kind.READ)).namespace

    async def list(self) -> tuple[Namespace, ...]:
        return (await self._call("list", {}, decode_namespaces, Kind.READ)).namespaces

    async def update(self, name: str, **settings: Unpack[NamespaceSettings]) -> Namespace:
        # The same values twice are the same values: harmless to repeat.
        fields = {"namespace": name, **wire_dict(settings)}
        return (await self._call("update", fields, decode_namespace, Kind.REPEATABLE)).namespace

    async def delete(self, name: str) -> None:
        await self._call("delete", {"namespace": name}, lambda _: None, Kind.ONCE)

    async def _call(self, verb: str, fields: dict[str, Any], decode: Callable[[bytes], R], kind: Kind) -> R:
        return await self._client._calls.call(f"namespaces/{verb}", encoded(fields), decode, kind)


def _or(namespace: str | None, default: str) -> str:
    return default if namespace is None else namespace


def _ref(namespace: str, timer_id: str) -> bytes:
    return encoded({"namespace": namespace, "timerId": timer_id})


def _create_in_doubt(timer_id: str, error: OutcomeUnknown, if_absent: bool) -> str:
    if if_absent:
        return f"{error.detail}. Creating {timer_id!r} with if_absent again is safe."
    return (
        f"{error.detail}. Creating {timer_id!r} again could fire it twice; look with get() first. "
        "With if_absent=True a create is safe to repeat, and is repeated by itself."
    )
