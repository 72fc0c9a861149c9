"""What operators do with flows: list them, limit them, pause and resume them. One flow is the timers of a namespace
with the same flow key.

The limits are in the row of the namespace, which every instance reads once a second (docs/adr/0032): a change holds on
all of them within 2 s, and survives restarts. What waits and what is open, the instances report themselves.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.cluster.forwarding import Peer, Peers
from duetime.domain.flow_status import FlowFilter, FlowQuery, FlowState, FlowStatus, merged
from duetime.domain.timer import FlowLimits, Namespace
from duetime.engine.engine import Engine
from duetime.engine.namespaces import no_namespace
from duetime.errors import Busy, Conflict, InvalidField, StoreError
from duetime.service.asking import NoAnswer, answer_of
from duetime.service.namespaces import NamespaceOperations
from duetime.store import Store
from duetime.wire import URL_BYTES_MAX

__all__ = ["FLOWS_MAX", "FlowAnswer", "FlowControl", "FlowPage", "Flows", "Unanswered"]

FLOWS_MAX: Final = 1_000  # with settings, in one namespace
SETTINGS_BYTES_MAX: Final = 256 * 1024  # of one namespace, as JSON: every instance reads them once a second

_READ_WITHIN_S: Final = 1.0
_ASKING_MAX: Final = 8  # reads at the same time; each asks every instance
_WAITING_MAX: Final = 256

_LONGER_THAN_ANY: Final = chr(sys.maxunicode) * URL_BYTES_MAX
_UNLIMITED: Final = FlowLimits()
_replace = msgspec.structs.replace


class FlowControl(Protocol):
    """The flows that one instance has in memory. The engine's flow control has these methods."""

    def flow_statuses(
        self, namespace: str | None, after: tuple[str, str] | None, limit: int, *, now_ms: int
    ) -> list[FlowStatus]:
        """Up to `limit` flows after a namespace and key, in their order. `namespace` None: of all."""
        ...


class Unanswered(Struct, frozen=True):
    """A live instance that could not be asked: its timers and breakers are missing in the answer."""

    instance_id: str
    address: str
    reason: str


class FlowAnswer(Struct, frozen=True):
    flow: FlowStatus
    unanswered: tuple[Unanswered, ...] = ()


class FlowPage(Struct, frozen=True):
    flows: tuple[FlowStatus, ...]
    next_cursor: str | None
    unanswered: tuple[Unanswered, ...] = ()


class Flows:
    def __init__(
        self, engine: Engine, store: Store, peers: Peers, namespaces: NamespaceOperations, control: FlowControl
    ) -> None:
        self._engine = engine
        self._is_shared = not store.capabilities.exclusive
        self._peers = peers
        self._namespaces = namespaces
        self._cache = engine.namespaces
        self._control = control
        self._asking = asyncio.Semaphore(_ASKING_MAX)
        self._waiting = 0

    # --- reads ------------------------------------------------------------------------------------

    async def get(self, namespace: str, flow_key: str) -> FlowAnswer:
        """Also for a flow that has no timers: its state is then closed."""
        await self._refresh()
        return await self._answer(self._known(namespace), flow_key)

    async def list_page(self, wanted: FlowFilter, allowed: Iterable[str] | None = None) -> FlowPage:
        """A page, ordered by namespace and key. `allowed`: the namespaces that the caller may see; None: all. The
        filter by state may leave a page empty that has a next one."""
        after, limit, state = _read_cursor(wanted.cursor), wanted.limit, wanted.state
        await self._refresh()
        if wanted.namespace is not None:
            allowed = (self._known(wanted.namespace).name,)
        query = FlowQuery(namespaces=None if allowed is None else tuple(sorted(allowed)), after=after, limit=limit)
        reports, unanswered = await self._ask_all(query)
        found = _merged(reports)
        for namespace, flow_key in self._with_settings(query):
            found.setdefault((namespace, flow_key), _without_timers(namespace, flow_key))
        page = sorted(found)[:limit]
        is_last = len(found) <= limit and all(len(report) < limit for report in reports)
        shown = [self._shown(found[name]) for name in page]
        return FlowPage(
            tuple(flow for flow in shown if state is None or flow.state is state),
            None if is_last else _cursor(page[-1]),
            unanswered,
        )

    def own(self, query: FlowQuery) -> list[FlowStatus]:
        """The flows that this instance has in memory: its part of the answer to a read, also of another instance."""
        now_ms = self._engine.membership.now_ms()
        if query.namespaces is None:
            return self._control.flow_statuses(None, query.after, query.limit, now_ms=now_ms)
        found: list[FlowStatus] = []
        for name in query.namespaces:
            after = query.after if query.flow_key is None else (name, _just_before(query.flow_key))
            found += self._control.flow_statuses(name, after, query.limit - len(found), now_ms=now_ms)
            if len(found) >= query.limit:
                break
        return [flow for flow in found if query.flow_key in (None, flow.flow_key)]

    async def _refresh(self) -> None:
        """See the latest changes, which another instance may have made. If the store does not answer, what was read
        last is shown: this is for bad days."""
        if self._is_shared:
            with contextlib.suppress(StoreError, TimeoutError):
                async with asyncio.timeout(_READ_WITHIN_S):
                    await self._cache.reread()

    def _known(self, name: str) -> Namespace:
        namespace = self._cache.known(name)
        if namespace is None or namespace.deleted:
            raise no_namespace(name)
        return namespace

    async def _answer(self, namespace: Namespace, flow_key: str) -> FlowAnswer:
        query = FlowQuery(namespaces=(namespace.name,), flow_key=flow_key, limit=1)
        reports, unanswered = await self._ask_all(query)
        name = (namespace.name, flow_key)
        return FlowAnswer(_as_set(_merged(reports).get(name) or _without_timers(*name), namespace), unanswered)

    async def _ask_all(self, query: FlowQuery) -> tuple[list[list[FlowStatus]], tuple[Unanswered, ...]]:
        """What all live instances report, this one included, and which of them did not answer."""
        if self._waiting >= _WAITING_MAX:
            raise Busy("Too many reads of flows are waiting; try again")
        self._waiting += 1
        try:
            async with self._asking:
                own_id = self._engine.membership.instance_id
                others = [member for name, member in self._engine.membership.alive.items() if name != own_id]
                peers = [Peer(member.instance_id, member.address, member.secret) for member in others]
                answers = await asyncio.gather(*(self._ask(peer, query) for peer in peers))
        finally:
            self._waiting -= 1
        reports = [self.own(query), *(answer for answer in answers if not isinstance(answer, Unanswered))]
        return reports, tuple(answer for answer in answers if isinstance(answer, Unanswered))

    async def _ask(self, peer: Peer, query: FlowQuery) -> list[FlowStatus] | Unanswered:
        answer = await answer_of(self._peers.flows(peer, query))
        return Unanswered(peer.instance_id, peer.address, answer.reason) if isinstance(answer, NoAnswer) else answer

    def _with_settings(self, query: FlowQuery) -> Iterable[tuple[str, str]]:
        """The flows with settings, also those without timers, in their order, as many as a page may need."""
        after = query.after or ("", "")
        found: list[tuple[str, str]] = []
        wanted = None if query.namespaces is None else frozenset(query.namespaces)
        known = [n for n in self._cache.all_known() if n.flows and (wanted is None or n.name in wanted)]
        for namespace in sorted(known, key=lambda known: known.name):
            if namespace.name >= after[0]:
                found += sorted((namespace.name, key) for key in namespace.flows if (namespace.name, key) > after)
            if len(found) > query.limit:
                break
        return found

    def _shown(self, flow: FlowStatus) -> FlowStatus:
        namespace = self._cache.known(flow.namespace)
        return flow if namespace is None else _as_set(flow, namespace)

    # --- changes ----------------------------------------------------------------------------------

    async def update(
        self,
        namespace: str,
        flow_key: str,
        rate: float | UnsetType | None = UNSET,
        concurrency: int | UnsetType | None = UNSET,
    ) -> FlowAnswer:
        """Set or clear (None) limits. What is UNSET does not change."""

        def changed(limits: FlowLimits) -> FlowLimits:
            return _replace(
                limits,
                rate=limits.rate if rate is UNSET else rate,
                concurrency=limits.concurrency if concurrency is UNSET else concurrency,
            )

        return await self._change(namespace, flow_key, changed)

    async def pause(self, namespace: str, flow_key: str) -> FlowAnswer:
        """No timer of the flow fires until it is resumed."""
        return await self._change(namespace, flow_key, lambda limits: _replace(limits, paused=True))

    async def resume(self, namespace: str, flow_key: str) -> FlowAnswer:
        return await self._change(namespace, flow_key, lambda limits: _replace(limits, paused=False))

    async def _change(self, namespace: str, flow_key: str, changed: Callable[[FlowLimits], FlowLimits]) -> FlowAnswer:
        stored = await self._namespaces.change(
            namespace, lambda old: _with_limits(old, flow_key, changed(old.flows.get(flow_key, _UNLIMITED)))
        )
        return await self._answer(stored, flow_key)


def _with_limits(namespace: Namespace, flow_key: str, limits: FlowLimits) -> Namespace:
    """An entry that says nothing more is removed."""
    flows = {**namespace.flows, flow_key: limits}
    if limits == _UNLIMITED:
        del flows[flow_key]
        return _replace(namespace, flows=flows)
    if flow_key not in namespace.flows and len(flows) > FLOWS_MAX:
        raise _too_many(namespace, f"{FLOWS_MAX} flows with limits or a pause")
    if len(msgspec.json.encode(flows)) > max(SETTINGS_BYTES_MAX, len(msgspec.json.encode(namespace.flows))):
        raise _too_many(namespace, f"{SETTINGS_BYTES_MAX} bytes of limits and pauses of flows")
    return _replace(namespace, flows=flows)


def _too_many(namespace: Namespace, what: str) -> Conflict:
    return Conflict(
        f"Namespace {namespace.name!r} may not have more than {what}; clear the limits of other flows, or resume them",
        field="flowKey",
        code="too_many_flows",
    )


def _merged(reports: Sequence[Sequence[FlowStatus]]) -> dict[tuple[str, str], FlowStatus]:
    found: dict[tuple[str, str], FlowStatus] = {}
    for report in reports:
        for flow in report:
            name = (flow.namespace, flow.flow_key)
            found[name] = merged(found[name], flow) if name in found else flow
    return found


def _just_before(flow_key: str) -> str:
    """Less than the key and greater than every lesser key, because no key is as long as this."""
    return f"{flow_key[:-1]}{chr(ord(flow_key[-1]) - 1)}{_LONGER_THAN_ANY}"


def _without_timers(namespace: str, flow_key: str) -> FlowStatus:
    return FlowStatus(namespace=namespace, flow_key=flow_key, origin="", state=FlowState.CLOSED, waiting=0, in_flight=0)


def _as_set(flow: FlowStatus, namespace: Namespace) -> FlowStatus:
    """With the settings as they are stored: what instances report may be up to 2 s older."""
    limits = namespace.flows.get(flow.flow_key, _UNLIMITED)
    state = flow.state
    if namespace.paused or limits.paused:
        state = FlowState.PAUSED
    elif state is FlowState.PAUSED:
        state = FlowState.CLOSED
    until_ms = None if state in (FlowState.PAUSED, FlowState.CLOSED) else flow.until_ms
    return _replace(flow, state=state, until_ms=until_ms, rate=limits.rate, concurrency=limits.concurrency)


def _cursor(name: tuple[str, str]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(name)).decode().rstrip("=")


def _read_cursor(text: str | None) -> tuple[str, str] | None:
    if text is None:
        return None
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        return msgspec.json.decode(raw, type=tuple[str, str])
    except (ValueError, msgspec.MsgspecError):
        raise InvalidField("cursor", "cursor must be the nextCursor of a list") from None
