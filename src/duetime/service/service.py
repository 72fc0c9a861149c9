"""The entry point of every interface: commands for timers, reads of timers, and status.

A command is routed to the owner of its timer's shard, on this instance (`commands.py`) or one hop away (`forwarded.py`
on the other instance). Writes are acknowledged after they are committed; reads go directly to the store. Namespaces
are in `namespaces.py`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec.structs import replace

from duetime.cluster.forwarding import (
    Command,
    CommandAnswer,
    CreateCommand,
    DeleteCommand,
    FireNowCommand,
    Forward,
    NoPeers,
    Peer,
    Peers,
    ReplayCommand,
    UpdateCommand,
    is_for_newer_versions,
    key_of,
)
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.recurrence import state_of
from duetime.domain.status import BrokerStatus, ClusterStatus, InstanceStatus, ShardMap
from duetime.domain.timer import (
    BEFORE_ALL,
    NO_EXTRAS,
    NOT_BY_OLDER_VERSIONS_MS,
    CommandPosition,
    Created,
    Namespace,
    Outcome,
    Position,
    State,
    Timer,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
    shard_of,
)
from duetime.engine.engine import Engine
from duetime.errors import (
    DuetimeError,
    InvalidField,
    NotFound,
    NotOwner,
    NotReady,
    OutcomeUnknown,
    StoreUnavailable,
    Unserved,
)
from duetime.service import status
from duetime.service.commands import Commands, StartedCreate, view_of
from duetime.service.flows import Flows
from duetime.service.forwarded import ForwardedCommands
from duetime.service.namespaces import NamespaceOperations
from duetime.service.quotas import Quotas
from duetime.service.turns import Turns
from duetime.single_flight import SingleFlight
from duetime.store import Found, Listing, ListQuery, Store, guarded

__all__ = ["Service"]

_STATUS_EVERY_SECONDS = 0.2
# While a shard changes its owner, commands for it wait up to this long. Normally it has a new owner within this time.
_OWNER_WAIT_MS = 2_000
_PAUSE_FIRST_SECONDS = 0.02
_PAUSE_MAX_SECONDS = 0.25

# A list of all namespaces returns what it has after this time, and does not begin with another namespace.
_LIST_ALL_MS = 1_000

# Creates of one bulk request that are started without a pause, about a millisecond of work.
_CREATES_PER_TURN = 50

_PendingCreate = tuple[TimerSpec, StartedCreate] | asyncio.Future[Created] | DuetimeError
_TIME_FIELDS = ("executeAt", "delay")  # what a version finds wrong that knows neither schedules nor pauses
_OUTCOMES = {State(outcome.value): outcome for outcome in Outcome}


class Service:
    """Errors: Rejected and its subclasses, Busy, Unserved, StoreUnavailable, OutcomeUnknown (errors.py)."""

    def __init__(
        self, config: Config, engine: Engine, store: Store, deliverer: Deliverer, peers: Peers | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._store = store = guarded(store)
        self._commands = Commands(config, engine, store, deliverer)
        self.namespaces = NamespaceOperations(config, engine, store, self._commands)
        self.forwarded = ForwardedCommands(self._commands)
        self._peers = engine.flow_allowances.peers = peers or NoPeers()
        self.flows = Flows(engine, store, self._peers, self.namespaces, engine.fire_loop.flow)
        self._turns = Turns()
        self.quotas = Quotas(config.limits, engine)
        self._namespace_cache = engine.namespaces
        self.brokers: Callable[[], Sequence[BrokerStatus]] = tuple  # set by the composition root, if there are any
        self._telemetry = engine.telemetry
        self._clock = engine.clock
        self._status: dict[bool, ClusterStatus] = {}
        self._read_status = {
            with_shards: SingleFlight(partial(self._refresh_status, with_shards), pause_s=_STATUS_EVERY_SECONDS)
            for with_shards in (False, True)
        }

    # --- create -----------------------------------------------------------------------------------

    async def create(self, spec: TimerSpec) -> Created:
        """Upsert: a scheduled timer with this id is replaced. Counts as one request of its namespace."""
        namespace, quotas = self._namespace_cache.usable(spec.namespace), self.quotas
        if namespace is None or namespace.requests_per_second or quotas.requests_default:
            quotas.take_request(spec.namespace)
        started = self._start_create(spec, namespace)
        if started is None:
            return await self._create_at_owner(spec)
        try:  # `_finish_create`, without the cost of two more coroutines
            _, replaced = await started.writing
        except NotOwner:
            return await self._create_at_owner(spec)
        return self._commands.acknowledge(started.timer, replaced) or await self._finish_create(spec, started)

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        """One result for each, in order. An item that could not be decoded is passed as its error, and returned."""
        pending: list[_PendingCreate] = []
        for start in range(0, len(specs), _CREATES_PER_TURN):
            some = specs[start : start + _CREATES_PER_TURN]
            async with self._turns.turn(_first_namespace(some)):
                pending += map(self._start_one_of_many, some)
                if len(specs) > _CREATES_PER_TURN:
                    await asyncio.sleep(0)  # other requests are handled before the next turn of any bulk create
        results: list[Created | DuetimeError] = []
        for item in pending:
            try:
                if isinstance(item, DuetimeError):
                    results.append(item)
                elif isinstance(item, tuple):
                    results.append(await self._finish_create(*item))
                else:
                    results.append(await item)
            except DuetimeError as error:
                results.append(_without_frames(error))
        return results

    def _start_one_of_many(self, spec: TimerSpec | DuetimeError) -> _PendingCreate:
        if isinstance(spec, DuetimeError):
            return spec
        try:
            started = self._start_create(spec, self._namespace_cache.usable(spec.namespace))
        except DuetimeError as error:
            return _without_frames(error)
        return (spec, started) if started else asyncio.ensure_future(self._create_at_owner(spec))

    def _start_create(self, spec: TimerSpec, namespace: Namespace | None) -> StartedCreate | None:
        """Start a create without waiting, if this instance owns the shard. None: `_create_at_owner` does it all.
        `namespace`: what `Namespaces.usable` has just returned."""
        if namespace is None or namespace.creates_per_second or self.quotas.creates_default:
            self.quotas.take_create(spec.namespace, namespace)
        if namespace is None:
            return None
        shard = self._commands.local_shard(shard_of(spec.timer_id, namespace.num_shards))
        return None if shard is None else self._commands.start_create(shard, spec, namespace)

    async def _finish_create(self, spec: TimerSpec, started: StartedCreate) -> Created:
        try:
            return await self._commands.finish_create(started)
        except NotOwner:  # the shard was lost before the commit, so nothing was applied: send it to the new owner
            return await self._create_at_owner(spec)

    async def _create_at_owner(self, spec: TimerSpec) -> Created:
        await self.namespaces.get_for_create(spec.namespace)
        return cast(Created, await self._at_owner(CreateCommand(spec)))

    # --- get and list -----------------------------------------------------------------------------

    async def get(self, key: TimerKey) -> TimerView:
        namespace = await self._namespace_cache.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        found = await self._engine.lookup.find(shard_id, key)
        return view_of(self._engine.shards.get(shard_id), key, found)

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        """A page, and the cursor of the next one. Ordered by due time; reached timers by the time they are purged.

        A page ends after the timer with which it exceeds `limits.page_bytes_max`."""
        if filter.namespace is None:
            return await self._list_all(filter)
        namespace = await self._namespace_cache.get(filter.namespace)
        return await self._list_namespace(namespace, filter, filter.cursor)

    async def _list_all(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        """One namespace after the other. A page has timers of one namespace. It is empty if none was found in a second,
        which limits the work of one request whatever the number of namespaces."""
        correlation_id = filter.correlation_id
        if correlation_id is None:
            raise InvalidField("correlationId", "a list of all namespaces needs a correlationId")
        name, following = _read_cursor_of_all(filter.cursor)
        known = {namespace.name: namespace for namespace in await self._namespace_cache.all()}
        until_ms = self._clock.boot_ms() + _LIST_ALL_MS
        views: list[TimerView] = []
        while not views and self._clock.boot_ms() < until_ms:
            if following is None:
                found = await self._store.next_namespace(correlation_id, name)
                if found is None:
                    return [], None
                name = found
            namespace = known.get(name)
            if namespace is None:  # deleted; what is left of its reached timers is not shown any more
                following = None
                continue
            views, following = await self._list_namespace(namespace, filter, following)
        return views, _cursor_of_all(name, following)

    async def _list_namespace(
        self, namespace: Namespace, filter: TimerFilter, cursor: str | None
    ) -> tuple[list[TimerView], str | None]:
        reached_first, after = _read_cursor(cursor)
        outcome = _OUTCOMES.get(filter.state) if filter.state is not None else None
        wants_reached = reached_first or outcome is not None
        query = ListQuery(
            namespace=namespace.name,
            num_shards=namespace.num_shards,
            after=after,
            limit=min(filter.limit, self._config.limits.page_timers_max),
            outcomes=frozenset()
            if not wants_reached
            else frozenset(Outcome)
            if outcome is None
            else frozenset({outcome}),
            due_from_ms=filter.due_from_ms,
            due_until_ms=filter.due_until_ms,
            id_prefix=filter.id_prefix,
            tag=filter.tag,
            correlation_id=filter.correlation_id,
            chars_max=self._config.limits.page_bytes_max,
            payloads=filter.payloads,
        )
        listing = _cut(await self._store.list_timers(query), self._config.limits.page_bytes_max)
        views = [TimerView(row.timer, State(row.outcome.value), row) for row in listing.reached]
        for timer in listing.timers:
            shard = self._engine.shards.get(shard_of(timer.timer_id, namespace.num_shards))
            views.append(view_of(shard, timer.key, Found(timer)))
        if filter.state is not None:
            views = [view for view in views if view.state is filter.state]
        following = None if listing.next is None else _cursor(wants_reached, listing.next)
        if following is None and filter.state is None and not wants_reached:
            following = _cursor(True, BEFORE_ALL)
        return views, following

    # --- update, delete, fire now, replay ---------------------------------------------------------

    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated:
        """Change a scheduled timer. The verdict says whether a delivery with the old values had started."""
        return cast(Updated, await self._at_owner(UpdateCommand(key, patch)))

    async def delete(self, key: TimerKey, command: CommandPosition | None = None) -> Verdict:
        """After the answer no delivery starts. The verdict says whether one had started before. `command`: that of a
        message broker; a Conflict if a later one has written the timer. It counts as a request, and, if it stores that
        a timer was cancelled before it is created, as a create."""
        if command is None:
            return cast(Verdict, await self._at_owner(DeleteCommand(key)))
        self.quotas.take_request(key.namespace)
        try:
            return cast(Verdict, await self._at_owner(DeleteCommand(key, command, if_stored=True)))
        except NotFound:  # the timer. If it is the namespace, it is not found again
            pass
        self.quotas.take_create(key.namespace, None)
        return cast(Verdict, await self._at_owner(DeleteCommand(key, command)))

    async def fire_now(self, key: TimerKey) -> TimerView:
        """Make a scheduled timer due now. A timer in flight is not changed."""
        return cast(TimerView, await self._at_owner(FireNowCommand(key)))

    async def replay(self, key: TimerKey) -> TimerView:
        """Schedule a reached timer again, as a new timer that is due now."""
        return cast(TimerView, await self._at_owner(ReplayCommand(key)))

    async def pause(self, key: TimerKey) -> TimerView:
        """A scheduled timer does not fire until `resume`. A call in flight is recorded only if it ends soon."""
        patch = TimerPatch(paused=True, delay_ms=NOT_BY_OLDER_VERSIONS_MS)
        return (await self.update(key, patch)).view

    async def resume(self, key: TimerKey) -> TimerView:
        """Resume a paused timer. `catchUp` and `missed` apply as after an outage."""
        patch = TimerPatch(paused=False, delay_ms=NOT_BY_OLDER_VERSIONS_MS)
        return (await self.update(key, patch)).view

    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]:
        """One result for each, in order, as `create_many`."""

        async def one(key: TimerKey | DuetimeError) -> Verdict | DuetimeError:
            if isinstance(key, DuetimeError):
                return key
            try:
                return await self.delete(key)
            except DuetimeError as error:
                return _without_frames(error)

        return list(await asyncio.gather(*(one(key) for key in keys)))

    # --- routing to the owner ---------------------------------------------------------------------

    async def _at_owner(self, command: Command) -> CommandAnswer:
        """Have a command carried out by the owner of its shard, on this instance or one hop away."""
        key = key_of(command)
        namespace = await self._namespace_cache.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        engine, deadline_ms, pause = self._engine, self._clock.boot_ms() + _OWNER_WAIT_MS, _PAUSE_FIRST_SECONDS
        while True:
            try:
                return await self._try_at_owner(shard_id, command)
            except NotOwner:  # certainly not applied: the shard has moved, or is moving
                is_only_member = len(engine.membership.alive) <= 1
                if not engine.started or (engine.stopping and is_only_member):
                    raise NotReady from None
                if self._clock.boot_ms() >= deadline_ms:
                    raise
            row = engine.rows.get(shard_id)
            try:
                async with asyncio.timeout(max(1, deadline_ms - self._clock.boot_ms()) / 1_000):
                    await engine.balance()
            except TimeoutError:  # a claim may take longer; the command does not wait for it
                raise NotOwner from None
            except OutcomeUnknown as error:  # of a claim: the command itself was certainly not applied
                raise StoreUnavailable(error.detail) from error
            if engine.rows.get(shard_id) == row:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _try_at_owner(self, shard_id: int, command: Command) -> CommandAnswer:
        """Carry out a command here, or send it to the owner that was last read. One hop: an instance does not forward a
        command that it received from another instance."""
        shard = self._commands.local_shard(shard_id)
        if shard is not None:
            return await self._commands.carry_out(shard, command)
        row = self._engine.rows.get(shard_id)
        owner = None if row is None or row.owner_id is None else self._engine.membership.alive.get(row.owner_id)
        if row is None or owner is None or owner.instance_id == self._engine.membership.instance_id:
            raise NotOwner
        peer = Peer(owner.instance_id, owner.address, owner.secret)
        forward = Forward(self._engine.new_id(), shard_id, row.version, command)
        try:
            answer = await self._peers.forward(peer, forward)
        except DuetimeError as error:
            self._telemetry.forwards.add(error.code)
            if isinstance(error, InvalidField) and is_for_newer_versions(command) and error.field in _TIME_FIELDS:
                raise Unserved("The owner of this timer is of a version without schedules and pauses") from None
            raise
        self._telemetry.forwards.add("ok")
        return answer

    def check_target(self, url: str, namespace: str) -> None:
        """Raises InvalidField if this instance refuses the URL as target of timers of this namespace."""
        self._commands.check_target(url, namespace)

    def flow_allowances(self, sender: str, number: int, reports: list[FlowReport]) -> list[FlowAllowance]:
        """What another instance may use of the limits of flows whose home is this instance."""
        return self._engine.flow_allowances.answer(sender, number, reports)

    def as_peer(self) -> Peer:
        """This instance, as other instances see it."""
        membership = self._engine.membership
        return Peer(membership.instance_id, membership.address, membership.secret)

    # --- status -----------------------------------------------------------------------------------

    def now_ms(self) -> int:
        """The time by which timers are due."""
        return self._engine.membership.now_ms()

    def readiness(self) -> str | None:
        """Why this instance is not ready; None if it is."""
        return self._engine.readiness()

    def shard_map(self) -> ShardMap:
        """Who owns which shard, as far as this instance knows. Reads memory only."""
        members, rows = self._engine.membership.alive.values(), self._engine.rows
        index: dict[str | None, int] = {member.instance_id: number for number, member in enumerate(members)}
        return ShardMap(
            addresses=tuple(member.address for member in members),
            instance_ids=tuple(member.instance_id for member in members),
            owners=tuple([index.get(rows[shard_id].owner_id) for shard_id in range(len(rows))]),
            num_shards={namespace.name: namespace.num_shards for namespace in self._namespace_cache.all_known()},
        )

    def instance_status(self) -> InstanceStatus:
        """The status of this instance."""
        return status.instance_status(self._engine, self.brokers())

    async def cluster_status(self, *, with_shards: bool = False) -> ClusterStatus:
        """The status of the whole cluster, as its live members report it."""
        await self._read_status[with_shards]()
        return self._status[with_shards]

    async def _refresh_status(self, with_shards: bool) -> None:
        """One read for all concurrent callers: it costs the database and every member some work."""
        self._status[with_shards] = await status.cluster_status(
            self._engine, self._store, self._peers, self._config.engine, self.brokers, with_shards=with_shards
        )


def _without_frames(error: DuetimeError) -> DuetimeError:
    """An error that is a result. The frames that it was raised in refer to the results: a thousand such cycles, with
    all that the frames hold, took the garbage collector half a second."""
    error.__context__ = None
    return error.with_traceback(None)


def _first_namespace(specs: Sequence[TimerSpec | DuetimeError]) -> str:
    return next((spec.namespace for spec in specs if isinstance(spec, TimerSpec)), "")


def _cut(listing: Listing, bytes_max: int) -> Listing:
    """Ends a listing after the timer with which it exceeds this size. The store has counted characters of payloads, and
    they may have several bytes; and it has not counted other fields."""
    positions = [timer.position for timer in listing.timers] + [reached.position for reached in listing.reached]
    sizes = map(_bytes_of, (*listing.timers, *(reached.timer for reached in listing.reached)))
    for count, size in enumerate(accumulate(sizes), 1):
        if size > bytes_max and count < len(positions):
            return replace(
                listing, timers=listing.timers[:count], reached=listing.reached[:count], next=positions[count - 1]
            )
    return listing


_TIMER_BYTES = 256  # of the fields of a timer that all have about the same length


def _bytes_of(timer: Timer) -> int:
    """About the size of a timer in an answer."""
    size = _TIMER_BYTES + len(timer.callback_url) + _utf8_length(timer.payload or "")
    if timer.extras is not NO_EXTRAS:
        size += sum(len(name) + _utf8_length(value) for name, value in (timer.extras.headers or {}).items())
        size += sum(map(_utf8_length, timer.extras.tags))
        state = state_of(timer)
        if state is not None and state.schedule is not None:
            size += state.schedule.chars
    return size


def _utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


_SignedLong = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what every database can compare
_Cursor = tuple[Literal[0, 1], _SignedLong, _SignedLong, _SignedLong]
_CursorOfAll = tuple[str, str | None]


def _cursor(reached: bool, position: Position) -> str:
    return _encode_cursor([int(reached), *position])


def _read_cursor(text: str | None) -> tuple[bool, Position]:
    if text is None:
        return False, BEFORE_ALL
    reached, *position = _decode_cursor(text, _Cursor)
    return bool(reached), Position(*position)


def _cursor_of_all(name: str, following: str | None) -> str:
    """`following`: the cursor within the namespace `name`; None: that namespace is over."""
    return _encode_cursor([name, following])


def _read_cursor_of_all(text: str | None) -> tuple[str, str | None]:
    if text is None:
        return "", None
    name, following = _decode_cursor(text, _CursorOfAll)
    return name, following


def _encode_cursor(content: list[object]) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(content)).decode().rstrip("=")


def _decode_cursor(text: str, kind: Any) -> Any:
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)), type=kind)
    except (ValueError, msgspec.MsgspecError):
        raise InvalidField("cursor", "cursor must be the nextCursor of a list") from None
