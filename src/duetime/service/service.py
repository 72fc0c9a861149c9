"""The entry point of every interface: commands for timers, reads of timers, and status.

A command is routed to the owner of its timer's shard, on this instance (`commands.py`) or one hop away (`forwarded.py`
on the other instance). Writes are acknowledged after they are committed; reads go directly to the store. Namespaces
are in `namespaces.py`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, cast

import msgspec

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
    key_of,
)
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.status import ClusterStatus, InstanceStatus, ShardMap
from duetime.domain.timer import (
    BEFORE_ALL,
    Created,
    Outcome,
    Position,
    State,
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
from duetime.errors import DuetimeError, InvalidField, NotOwner, NotReady, OutcomeUnknown, StoreUnavailable
from duetime.service import status
from duetime.service.commands import Commands, StartedCreate, view_of
from duetime.service.forwarded import ForwardedCommands
from duetime.service.namespaces import NamespaceOperations
from duetime.single_flight import SingleFlight
from duetime.store import Found, ListQuery, Store, guarded

__all__ = ["Service"]

_STATUS_EVERY_SECONDS = 0.2
# While a shard changes its owner, commands for it wait up to this long. Normally it has a new owner within this time.
_OWNER_WAIT_MS = 2_000
_PAUSE_FIRST_SECONDS = 0.02
_PAUSE_MAX_SECONDS = 0.25

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
        self._peers = peers or NoPeers()
        self._namespace_cache = engine.namespaces
        self._telemetry = engine.telemetry
        self._clock = engine.clock
        self._status: dict[bool, ClusterStatus] = {}
        self._read_status = {
            with_shards: SingleFlight(partial(self._refresh_status, with_shards), pause_s=_STATUS_EVERY_SECONDS)
            for with_shards in (False, True)
        }

    # --- create -----------------------------------------------------------------------------------

    async def create(self, spec: TimerSpec) -> Created:
        """Upsert: a scheduled timer with this id is replaced."""
        return await self._finish_create(spec, self._start_create(spec))

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        """One result for each, in order. An item that could not be decoded is passed as its error, and returned."""
        pending: list[tuple[TimerSpec, StartedCreate] | asyncio.Future[Created] | DuetimeError] = []
        for spec in specs:
            try:
                if isinstance(spec, DuetimeError):
                    raise spec
                started = self._start_create(spec)
                pending.append((spec, started) if started else asyncio.ensure_future(self._finish_create(spec, None)))
            except DuetimeError as error:
                pending.append(error)
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
                results.append(error)
        return results

    def _start_create(self, spec: TimerSpec) -> StartedCreate | None:
        """Start a create without waiting, if this instance owns the shard. None: `_finish_create` does it all."""
        namespace = self._namespace_cache.usable(spec.namespace)
        if namespace is None:
            return None
        shard = self._commands.local_shard(shard_of(spec.timer_id, namespace.num_shards))
        return None if shard is None else self._commands.start_create(shard, spec, namespace)

    async def _finish_create(self, spec: TimerSpec, started: StartedCreate | None) -> Created:
        if started is not None:
            try:
                return await self._commands.finish_create(started)
            except NotOwner:
                pass  # the shard was lost before the commit, so nothing was applied: send it to the new owner
        await self.namespaces.get_for_create(spec.namespace)
        return cast(Created, await self._at_owner(CreateCommand(spec)))

    # --- get and list -----------------------------------------------------------------------------

    async def get(self, key: TimerKey) -> TimerView:
        namespace = await self._namespace_cache.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        found = await self._engine.lookup.find(shard_id, key)
        return view_of(self._engine.shards.get(shard_id), key, found)

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        """A page, and the cursor of the next one. Ordered by due time; reached timers by the time they are purged."""
        namespace = await self._namespace_cache.get(filter.namespace)
        reached_first, after = _read_cursor(filter.cursor)
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
        )
        listing = await self._store.list_timers(query)
        views = [TimerView(row.timer, State(row.outcome.value), row) for row in listing.reached]
        for timer in listing.timers:
            shard = self._engine.shards.get(shard_of(timer.timer_id, namespace.num_shards))
            views.append(view_of(shard, timer.key, Found(timer)))
        if filter.state is not None:
            views = [view for view in views if view.state is filter.state]
        cursor = None if listing.next is None else _cursor(wants_reached, listing.next)
        if cursor is None and filter.state is None and not wants_reached:
            cursor = _cursor(True, BEFORE_ALL)
        return views, cursor

    # --- update, delete, fire now, replay ---------------------------------------------------------

    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated:
        """Change a scheduled timer. The verdict says whether a delivery with the old values had started."""
        return cast(Updated, await self._at_owner(UpdateCommand(key, patch)))

    async def delete(self, key: TimerKey) -> Verdict:
        """After the answer no delivery starts. The verdict says whether one had started before."""
        return cast(Verdict, await self._at_owner(DeleteCommand(key)))

    async def fire_now(self, key: TimerKey) -> TimerView:
        """Make a scheduled timer due now. A timer in flight is not changed."""
        return cast(TimerView, await self._at_owner(FireNowCommand(key)))

    async def replay(self, key: TimerKey) -> TimerView:
        """Schedule a reached timer again, as a new timer that is due now."""
        return cast(TimerView, await self._at_owner(ReplayCommand(key)))

    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]:
        """One result for each, in order, as `create_many`."""

        async def one(key: TimerKey | DuetimeError) -> Verdict | DuetimeError:
            if isinstance(key, DuetimeError):
                return key
            try:
                return await self.delete(key)
            except DuetimeError as error:
                return error

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
            raise
        self._telemetry.forwards.add("ok")
        return answer

    def as_peer(self) -> Peer:
        """This instance, as other instances see it."""
        membership = self._engine.membership
        return Peer(membership.instance_id, membership.address, membership.secret)

    # --- status -----------------------------------------------------------------------------------

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
        return status.instance_status(self._engine)

    async def cluster_status(self, *, with_shards: bool = False) -> ClusterStatus:
        """The status of the whole cluster, as its live members report it."""
        await self._read_status[with_shards]()
        return self._status[with_shards]

    async def _refresh_status(self, with_shards: bool) -> None:
        """One read for all concurrent callers: it costs the database and every member some work."""
        self._status[with_shards] = await status.cluster_status(
            self._engine, self._store, self._peers, self._config.engine, with_shards=with_shards
        )


_SignedLong = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what every database can compare
_Cursor = tuple[Literal[0, 1], _SignedLong, _SignedLong, _SignedLong]


def _cursor(reached: bool, position: Position) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode([int(reached), *position])).decode().rstrip("=")


def _read_cursor(text: str | None) -> tuple[bool, Position]:
    if text is None:
        return False, BEFORE_ALL
    try:
        raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        reached, *position = msgspec.json.decode(raw, type=_Cursor)
    except (ValueError, msgspec.MsgspecError):
        raise InvalidField("cursor", "cursor must be the nextCursor of a list") from None
    return bool(reached), Position(*position)
