"""AsyncClient: every call of the HTTP API as a method, retried only where that is safe."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Self, TypeVar, Unpack

from duetime.client.calls import Calls
from duetime.client.errors import CallKind, ConnectionFailed, outcome_unknown
from duetime.client.models import (
    ClusterStatus,
    Created,
    Delay,
    Flow,
    FlowLimits,
    FlowPage,
    Missed,
    Namespace,
    NamespaceSettings,
    NewTimer,
    Page,
    RetryPolicy,
    Schedule,
    SchedulePreview,
    Timer,
    TimerChanges,
    TimerFilter,
    Updated,
    encode_json,
    encode_new,
    to_wire,
)
from duetime.client.responses import (
    decode_created,
    decode_deleted,
    decode_flow,
    decode_flow_page,
    decode_namespace,
    decode_namespaces,
    decode_page,
    decode_preview,
    decode_status,
    decode_timer,
    decode_updated,
)
from duetime.client.routing import Direct
from duetime.domain.flow_status import FlowState
from duetime.domain.timer import State, Verdict
from duetime.errors import DuetimeError, NotFound, OutcomeUnknown, SetupError
from duetime.wire import IfReached, NamespaceSize

__all__ = ["DEFAULT_URL", "AsyncClient", "AsyncNamespaces"]

DEFAULT_URL = "http://127.0.0.1:8463"
RETRIES = 5
_LOOK_UPS_MAX = 32  # at once, after a lost answer to delete_many

R = TypeVar("R")


class AsyncClient:
    """Use it as a context manager, or call close(). It belongs to the event loop in which it is first used.

    `url` may be a list of URLs of one cluster: any that answers is used. `timeout` bounds a whole call with its
    retries, in seconds. With `coalesce`, creates and deletes that are made at the same time share requests
    (createMany, deleteMany), for several times the throughput; `timeout` then bounds each of those requests.
    With `direct`, a call about one timer is sent to the instance that owns it, at the address which that instance
    advertises. With an https URL this needs `direct="https"`: a token that was given for https is never sent in plain
    http.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = 15.0,  # longer than the server takes to answer that nothing was applied
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
        self._route_of = self._calls.routes.route_of
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
        flow_key: str | None = None,
        namespace: str | None = None,
        if_reached: IfReached | None = None,
        schedule: Schedule | Mapping[str, Any] | None = None,
    ) -> Created:
        """Create a timer, or replace the timer with that id. It is due `at` an instant, after a `delay` (a float is in
        seconds), or by a `schedule` of local times in a zone, once or repeated.

        `if_absent`: never replace. If the same timer exists, it is returned unchanged; if a different one exists,
        Conflict is raised. `if_reached="ignore"`: a timer with that id that is over, and still stored, is returned
        unchanged; a scheduled one is replaced. `flow_key`: the flow whose limits, breaker and pause apply (default: the
        URL without query).
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
            flow_key,
            if_reached,
            schedule,
        )
        body = encode_new(new, self.namespace)
        key = (_namespace_or(namespace, self.namespace), timer_id)
        kind = CallKind.IDEMPOTENT if if_absent else CallKind.NOT_IDEMPOTENT
        try:
            if not self._coalesce:
                return await self._calls.call("timers/create", body, decode_created, kind, key)

            def attempt(_: float) -> asyncio.Future[Created]:
                route = self._route_of(*key)
                return (route.creates_if_absent if if_absent else route.creates).add(body)

            return await self._calls.with_retries(attempt, kind)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(_unknown_create_text(timer_id, error, if_absent)) from None

    async def create_many(self, timers: Iterable[NewTimer]) -> builtins.list[Created | DuetimeError]:
        """Create any number of timers, 1,000 in each request. Returns a result or an error for each, in order."""
        listed = builtins.list(timers)
        bodies = [encode_new(new, self.namespace) for new in listed]
        kinds = [CallKind.IDEMPOTENT if new.if_absent else CallKind.NOT_IDEMPOTENT for new in listed]
        results, _ = await self._calls.many(
            bodies,
            kinds,
            lambda i: self._route_of(_namespace_or(listed[i].namespace, self.namespace), listed[i].timer_id),
            self._calls.create_batch,
        )
        return results

    async def get(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Raises NotFound if there is no such timer."""
        return await self._timer_call("timers/get", timer_id, namespace, CallKind.READ)

    async def update(self, timer_id: str, **changes: Unpack[TimerChanges]) -> Updated:
        """Change some fields. The verdict is UPDATED, or IN_FLIGHT: the change was applied, but a callback with the old
        values is in flight."""
        namespace = changes.get("namespace", self.namespace)
        body = encode_json({"namespace": namespace, "timerId": timer_id, **to_wire(changes)})
        return await self._calls.call(
            "timers/update", body, decode_updated, CallKind.NOT_IDEMPOTENT, (namespace, timer_id)
        )

    async def delete(self, timer_id: str, *, namespace: str | None = None) -> Verdict:
        """Cancel a timer. CANCELLED: no callback will start. IN_FLIGHT: one is in flight, no other will follow.
        ALREADY_REACHED: the timer was already over.

        If an answer was lost and the call was sent again, IN_FLIGHT means that there was at least one attempt: whether
        it was in flight is not known any more."""
        name = _namespace_or(namespace, self.namespace)
        body = _timer_ref(name, timer_id)
        in_doubt = False

        async def attempt(deadline: float) -> Verdict:
            nonlocal in_doubt
            route = self._route_of(name, timer_id)
            try:
                if self._coalesce:
                    return await route.deletes.add(body)
                answer = await self._calls.attempt(
                    "timers/delete", body, decode_deleted, CallKind.IDEMPOTENT, deadline, route
                )
            except OutcomeUnknown:
                in_doubt = True
                raise
            return answer.verdict

        verdict = await self._calls.with_retries(attempt, CallKind.IDEMPOTENT)
        if in_doubt and verdict is Verdict.ALREADY_REACHED:
            return await self._verdict_of_lost_answer(timer_id, namespace)
        return verdict

    async def _verdict_of_lost_answer(self, timer_id: str, namespace: str | None) -> Verdict:
        """The timer is over, perhaps because an earlier attempt of this call cancelled it and the answer was lost. The
        server counts an attempt before it sends the callback: only without attempts was there certainly none."""
        try:
            timer = await self.get(timer_id, namespace=namespace)
        except NotFound:
            return Verdict.ALREADY_REACHED
        except DuetimeError as error:  # the token may not read, for example: that says nothing about the delete
            raise outcome_unknown(
                f"the timer is over, but whether this call cancelled it cannot be read: {error.detail}"
            ) from error
        if timer.state is not State.CANCELLED:
            return Verdict.ALREADY_REACHED
        return Verdict.IN_FLIGHT if timer.attempts else Verdict.CANCELLED

    async def delete_many(
        self, timer_ids: Iterable[str], *, namespace: str | None = None
    ) -> builtins.list[Verdict | DuetimeError]:
        """Cancel any number of timers, 1,000 in each request. Returns a verdict or an error for each, in order."""
        name = _namespace_or(namespace, self.namespace)
        listed = builtins.list(timer_ids)
        bodies = [_timer_ref(name, timer_id) for timer_id in listed]
        kinds = [CallKind.IDEMPOTENT] * len(bodies)
        verdicts, in_doubt = await self._calls.many(
            bodies, kinds, lambda i: self._route_of(name, listed[i]), self._calls.delete_batch
        )
        free = asyncio.Semaphore(_LOOK_UPS_MAX)

        async def look_up(index: int) -> None:
            async with free:
                try:
                    verdicts[index] = await self._verdict_of_lost_answer(listed[index], namespace)
                except DuetimeError as error:
                    verdicts[index] = error

        async with asyncio.TaskGroup() as looking_up:
            for index in in_doubt:
                if verdicts[index] is Verdict.ALREADY_REACHED:
                    looking_up.create_task(look_up(index))
        return verdicts

    async def list(self, *, page_size: int = 500, **filter: Unpack[TimerFilter]) -> AsyncGenerator[Timer, None]:
        """All timers that match. They are read page by page while you iterate."""
        async for page in self.pages(page_size=page_size, **filter):
            for timer in page:
                yield timer

    async def pages(
        self, *, page_size: int = 500, **filter: Unpack[TimerFilter]
    ) -> AsyncGenerator[builtins.list[Timer], None]:
        """The same as `list`, one page at a time."""
        cursor: str | None = None
        while True:
            page = await self.list_page(limit=page_size, cursor=cursor, **filter)
            yield page.timers
            cursor = page.next_cursor
            if cursor is None:
                return

    async def list_page(self, *, limit: int = 100, cursor: str | None = None, **filter: Unpack[TimerFilter]) -> Page:
        """One page. Only `next_cursor is None` means the end: an earlier page may be short or even empty."""
        query = {**to_wire(filter), "limit": limit, "cursor": cursor}
        if not filter.get("all_namespaces"):
            query.setdefault("namespace", self.namespace)
        return await self._calls.call("timers/list", encode_json(query), decode_page, CallKind.READ)

    async def fire_now(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Make a scheduled timer due now."""
        return await self._timer_call("timers/fireNow", timer_id, namespace, CallKind.NOT_IDEMPOTENT)

    async def replay(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Fire again a timer that is over."""
        return await self._timer_call("timers/replay", timer_id, namespace, CallKind.NOT_IDEMPOTENT)

    async def pause(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        """Pause a timer: it does not fire until it is resumed."""
        # Idempotent, as resume: twice has the same effect as once.
        return await self._timer_call("timers/pause", timer_id, namespace, CallKind.IDEMPOTENT)

    async def resume(self, timer_id: str, *, namespace: str | None = None) -> Timer:
        return await self._timer_call("timers/resume", timer_id, namespace, CallKind.IDEMPOTENT)

    async def _timer_call(self, path: str, timer_id: str, namespace: str | None, kind: CallKind) -> Timer:
        key = (_namespace_or(namespace, self.namespace), timer_id)
        return (await self._calls.call(path, _timer_ref(*key), decode_timer, kind, key)).timer

    # schedules

    async def preview_schedule(
        self, schedule: Schedule | Mapping[str, Any], *, count: int = 5, from_: datetime | str | None = None
    ) -> SchedulePreview:
        """The next instants of a wall-clock schedule, at most 1,000, at and after `from_` (default: now). Nothing is
        created. A mapping has the names of the HTTP API: {"at": "2027-03-15T09:00", "timezone": "Europe/Paris"}."""
        query = to_wire({"schedule": schedule, "count": count} | ({} if from_ is None else {"from": from_}))
        return await self._calls.call("schedules/preview", encode_json(query), decode_preview, CallKind.READ)

    # flows and pauses

    async def list_flows(
        self, *, namespace: str | None = None, state: FlowState | str | None = None, page_size: int = 500
    ) -> AsyncGenerator[Flow, None]:
        """The flows that have due timers, limits, a pause or recent failures, page by page while you iterate. Without
        `namespace`: of all namespaces that the token allows."""
        async for page in self.flow_pages(namespace=namespace, state=state, page_size=page_size):
            for flow in page:
                yield flow

    async def flow_pages(
        self, *, namespace: str | None = None, state: FlowState | str | None = None, page_size: int = 500
    ) -> AsyncGenerator[builtins.list[Flow], None]:
        """The same as `list_flows`, one page at a time."""
        cursor: str | None = None
        while True:
            page = await self.list_flows_page(namespace=namespace, state=state, limit=page_size, cursor=cursor)
            yield page.flows
            cursor = page.next_cursor
            if cursor is None:
                return

    async def list_flows_page(
        self,
        *,
        namespace: str | None = None,
        state: FlowState | str | None = None,
        limit: int = 100,
        cursor: str | None = None,
    ) -> FlowPage:
        """One page, and the instances that did not answer. Only `next_cursor is None` means the end."""
        query = {"namespace": namespace, "state": state, "limit": limit, "cursor": cursor}
        return await self._calls.call("flows/list", encode_json(query), decode_flow_page, CallKind.READ)

    async def get_flow(self, flow_key: str, *, namespace: str | None = None) -> Flow:
        """`flow_key`: that of its timers; for timers without one, their URL without its query."""
        return await self._flow_call("get", flow_key, namespace, {}, CallKind.READ)

    async def update_flow(self, flow_key: str, *, namespace: str | None = None, **limits: Unpack[FlowLimits]) -> Flow:
        """Change the limits of a flow. They hold for the whole cluster within 2 s, and survive restarts."""
        # Idempotent, as pause and resume: the same values twice have the same effect as once.
        return await self._flow_call("update", flow_key, namespace, limits, CallKind.IDEMPOTENT)

    async def pause_flow(self, flow_key: str, *, namespace: str | None = None) -> Flow:
        """Within 2 s no timer of the flow fires any more, until it is resumed."""
        return await self._flow_call("pause", flow_key, namespace, {}, CallKind.IDEMPOTENT)

    async def resume_flow(self, flow_key: str, *, namespace: str | None = None) -> Flow:
        return await self._flow_call("resume", flow_key, namespace, {}, CallKind.IDEMPOTENT)

    async def _flow_call(
        self, verb: str, flow_key: str, namespace: str | None, limits: Mapping[str, Any], kind: CallKind
    ) -> Flow:
        body = encode_json({"namespace": _namespace_or(namespace, self.namespace), "flowKey": flow_key, **limits})
        return (await self._calls.call(f"flows/{verb}", body, decode_flow, kind)).flow

    async def pause_namespace(self, name: str) -> Namespace:
        """Within 2 s no timer of the namespace fires any more, until it is resumed."""
        return await self.namespaces.pause(name)

    async def resume_namespace(self, name: str) -> Namespace:
        return await self.namespaces.resume(name)

    # the server

    async def cluster_status(self, *, shards: bool = False) -> ClusterStatus:
        """The status of the whole cluster; any instance can answer. With `shards`: also every shard and its owner."""
        return await self._calls.call("cluster/status", encode_json({"shards": shards}), decode_status, CallKind.READ)

    async def ready(self) -> bool:
        """True if a server answers and is ready. Asks once, without retries."""
        calls = self._calls
        deadline = asyncio.get_running_loop().time() + calls.timeout_s
        try:
            answer = await calls.send("/readyz", b"", CallKind.READ, deadline, calls.routes.default_route, "GET")
        except ConnectionFailed:
            return False
        return answer.status == 200


class AsyncNamespaces:
    """`client.namespaces`: namespaces of timers, and the defaults of their timers."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def create(
        self,
        name: str,
        *,
        num_shards: int | None = None,
        size: NamespaceSize | None = None,
        **settings: Unpack[NamespaceSettings],
    ) -> Namespace:
        """Give `num_shards`, or a `size` that stands for one (16, 256, 1,024 or 4,096). It cannot be changed later.
        Without both, the server uses its default."""
        fields = {"namespace": name, **to_wire(settings)}
        if num_shards is not None:
            fields["numShards"] = num_shards
        if size is not None:
            fields["size"] = size
        return (await self._call("create", fields, decode_namespace, CallKind.NOT_IDEMPOTENT)).namespace

    async def get(self, name: str) -> Namespace:
        return (await self._call("get", {"namespace": name}, decode_namespace, CallKind.READ)).namespace

    async def list(self) -> tuple[Namespace, ...]:
        return (await self._call("list", {}, decode_namespaces, CallKind.READ)).namespaces

    async def update(self, name: str, **settings: Unpack[NamespaceSettings]) -> Namespace:
        # Idempotent: the same values twice have the same effect as once.
        fields = {"namespace": name, **to_wire(settings)}
        return (await self._call("update", fields, decode_namespace, CallKind.IDEMPOTENT)).namespace

    async def pause(self, name: str) -> Namespace:
        """Within 2 s none of its timers fires any more, until it is resumed. Timers can still be created."""
        return (await self._call("pause", {"namespace": name}, decode_namespace, CallKind.IDEMPOTENT)).namespace

    async def resume(self, name: str) -> Namespace:
        return (await self._call("resume", {"namespace": name}, decode_namespace, CallKind.IDEMPOTENT)).namespace

    async def delete(self, name: str) -> None:
        await self._call("delete", {"namespace": name}, lambda _: None, CallKind.NOT_IDEMPOTENT)

    async def _call(self, verb: str, fields: dict[str, Any], decode: Callable[[bytes], R], kind: CallKind) -> R:
        return await self._client._calls.call(f"namespaces/{verb}", encode_json(fields), decode, kind)


def _namespace_or(namespace: str | None, default: str) -> str:
    return default if namespace is None else namespace


def _timer_ref(namespace: str, timer_id: str) -> bytes:
    return encode_json({"namespace": namespace, "timerId": timer_id})


def _unknown_create_text(timer_id: str, error: OutcomeUnknown, if_absent: bool) -> str:
    if if_absent:
        return f"{error.detail}. It is safe to create {timer_id!r} with if_absent again."
    return (
        f"{error.detail}. If you create {timer_id!r} again, it could fire twice; call get() first. "
        "With if_absent=True a create is safe to retry, and the client retries it."
    )
