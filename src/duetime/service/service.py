"""The only door, for the API: create, get, update, delete, list, namespaces, status.

Finds the owner of a timer's shard, here or one hop away, and hands the wish over (`service/commands.py`). Writes are
acknowledged when they are on disk; reads go straight to the store.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, cast

import msgspec
from msgspec import UNSET

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
    payload_chars,
)
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.status import ClusterStatus, InstanceStatus, ShardMap
from duetime.domain.timer import (
    BEFORE_ALL,
    ID_BYTES_MAX,
    Created,
    Namespace,
    NamespaceSpec,
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
    kept_secrets,
    shard_of,
)
from duetime.engine.engine import Engine
from duetime.engine.namespaces import DEFAULT_NAMESPACE, FRESH_FOR_MS
from duetime.engine.shard import Shard
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    NotOwner,
    NotReady,
    OutcomeUnknown,
    SetupError,
    StoreError,
)
from duetime.service import status
from duetime.service.commands import Admitted, Commands, Writing, view_of
from duetime.single_flight import SingleFlight, retrieved
from duetime.store import Found, ListQuery, Store, guarded
from duetime.telemetry import log

__all__ = ["Service"]

_TAKEN_MAX = 10_000
_TAKEN_CHARS_MAX = 16 * 1024 * 1024  # of payloads in them
_FORGOTTEN_AT_ONCE = 8  # so that they become fewer, and none costs much
_STATUS_EVERY_SECONDS = 0.2
# A shard that is between two owners has a new one within this time, normally; wishes about it wait so long.
_PATIENCE_MS = 2_000
# After a namespace was marked deleted: by then every instance has seen the mark, or acknowledges no write to it.
_DELETION_SEEN_SECONDS = FRESH_FOR_MS / 1_000 + 1.0
_PAUSE_FIRST_SECONDS = 0.02
_PAUSE_MAX_SECONDS = 0.25

_OUTCOMES = {State(outcome.value): outcome for outcome in Outcome}
_replace = msgspec.structs.replace


class Service:
    """Errors: the Rejected family, Busy, Unserved, StoreUnavailable, OutcomeUnknown (errors.py)."""

    def __init__(
        self, config: Config, engine: Engine, store: Store, deliverer: Deliverer, peers: Peers | None = None
    ) -> None:
        self._config = config
        self._engine = engine
        self._store = store = guarded(store)
        self._owner = Commands(config, engine, store, deliverer)
        self._peers = peers or NoPeers()
        self._namespaces = engine.namespaces
        self._telemetry = engine.telemetry
        self._clock = engine.clock
        # Orders from other instances, by their id: how large they are, and what became of them.
        self._taken: dict[str, tuple[int, asyncio.Future[CommandAnswer]]] = {}
        self._taken_chars = 0
        self._status: dict[bool, ClusterStatus] = {}
        self._read_status = {
            with_shards: SingleFlight(partial(self._look_at_cluster, with_shards), pause_s=_STATUS_EVERY_SECONDS)
            for with_shards in (False, True)
        }

    # --- create -----------------------------------------------------------------------------------

    async def create(self, spec: TimerSpec) -> Created:
        """Upsert: whatever timer has this id is replaced."""
        admitted = self._admit(spec)
        if admitted is None:
            return await self._create_slowly(spec)
        return await self._created(spec, admitted)

    async def _created(self, spec: TimerSpec, admitted: Admitted) -> Created:
        try:
            return await self._owner.created(admitted)
        except NotOwner:  # lost meanwhile, and not applied
            return await self._create_slowly(spec)

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        """One result for each, in order; what could not be decoded passes through as its error."""
        admitted: list[tuple[TimerSpec, Admitted] | asyncio.Future[Created] | DuetimeError] = []
        for spec in specs:
            try:
                if isinstance(spec, DuetimeError):
                    raise spec
                here = self._admit(spec)
                admitted.append((spec, here) if here else asyncio.ensure_future(self._create_slowly(spec)))
            except DuetimeError as error:
                admitted.append(error)
        results: list[Created | DuetimeError] = []
        for item in admitted:
            try:
                if isinstance(item, DuetimeError):
                    results.append(item)
                elif isinstance(item, tuple):
                    results.append(await self._created(*item))
                else:
                    results.append(await item)
            except DuetimeError as error:
                results.append(error)
        return results

    def _admit(self, spec: TimerSpec) -> Admitted | None:
        """The common create: of a shard that is here, in a namespace that is known. None: this one has to wait."""
        namespace = self._namespaces.usable(spec.namespace)
        if namespace is None:
            return None
        shard = self._engine.shards.get(shard_of(spec.timer_id, namespace.num_shards))
        if shard is None or shard.closing:
            return None
        return self._owner.admit(shard, namespace, spec)

    async def _create_slowly(self, spec: TimerSpec) -> Created:
        await self._namespace_for_create(spec.namespace)
        return cast(Created, await self._at_owner(CreateCommand(spec)))

    async def _namespace_for_create(self, name: str) -> Namespace:
        try:
            return await self._namespaces.get_for_create(name)
        except NotFound:
            if not self._config.namespaces.create_on_first_use:
                raise
        try:
            return await self.create_namespace(NamespaceSpec(name=name))
        except Conflict:
            return await self._namespaces.get(name)  # somebody else was first

    # --- get and list -----------------------------------------------------------------------------

    async def get(self, key: TimerKey) -> TimerView:
        namespace = await self._namespaces.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        found = await self._engine.lookup.find(shard_id, key)
        return view_of(self._engine.shards.get(shard_id), key, found)

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        """A page in order of due time (reached ones: of when they will be purged), and where to go on."""
        namespace = await self._namespaces.get(filter.namespace)
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
        """Change a scheduled timer. The verdict tells whether its old self was already on its way."""
        return cast(Updated, await self._at_owner(UpdateCommand(key, patch)))

    async def delete(self, key: TimerKey) -> Verdict:
        """After this is answered no delivery starts. The verdict tells whether one had."""
        return cast(Verdict, await self._at_owner(DeleteCommand(key)))

    async def fire_now(self, key: TimerKey) -> TimerView:
        """Make a scheduled timer due at once; one already on its way is left to it."""
        return cast(TimerView, await self._at_owner(FireNowCommand(key)))

    async def replay(self, key: TimerKey) -> TimerView:
        """Arm a reached timer again, as a new one that is due at once."""
        return cast(TimerView, await self._at_owner(ReplayCommand(key)))

    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]:
        """One result for each, in order, as create_many."""

        async def one(key: TimerKey | DuetimeError) -> Verdict | DuetimeError:
            if isinstance(key, DuetimeError):
                return key
            try:
                return await self.delete(key)
            except DuetimeError as error:
                return error

        return list(await asyncio.gather(*(one(key) for key in keys)))

    # --- the way to the owner ---------------------------------------------------------------------

    async def _at_owner(self, command: Command) -> CommandAnswer:
        """Have an order carried out by the owner of its shard, here or one hop away."""
        key = key_of(command)
        namespace = await self._namespaces.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        engine, deadline_ms, pause = self._engine, self._clock.boot_ms() + _PATIENCE_MS, _PAUSE_FIRST_SECONDS
        while True:
            try:
                return await self._try_at_owner(shard_id, command)
            except NotOwner:  # certainly not applied: the shard has moved, or is moving
                alone = len(engine.membership.alive) <= 1
                if not engine.started or (engine.stopping and alone):
                    raise NotReady from None
                if self._clock.boot_ms() >= deadline_ms:
                    raise
            known = engine.rows.get(shard_id)
            try:
                async with asyncio.timeout(max(1, deadline_ms - self._clock.boot_ms()) / 1_000):
                    await engine.balance()
            except TimeoutError:  # a claim waits for something; who wishes does not
                raise NotOwner from None
            if engine.rows.get(shard_id) == known:
                await asyncio.sleep(pause)
                pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _try_at_owner(self, shard_id: int, command: Command) -> CommandAnswer:
        """Here, or at the owner as last known. One hop: who is asked by another instance asks no third."""
        shard = self._engine.shards.get(shard_id)
        if shard is not None and not shard.closing:
            return await self._carry_out(shard, command)
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

    async def _carry_out(self, shard: Shard, command: Command) -> CommandAnswer:
        match command:
            case CreateCommand(spec):
                return await self._owner.create(shard, spec)
            case UpdateCommand(key, patch):
                return await self._owner.update(shard, key, patch)
            case DeleteCommand(key):
                return await self._owner.delete(shard, key)
            case FireNowCommand(key):
                return await self._owner.fire_now(shard, key)
            case ReplayCommand(key):
                return await self._owner.replay(shard, key)

    def take(self, forward: Forward) -> asyncio.Future[CommandAnswer]:
        """An order from another instance. One that was seen before is answered as it was then, refusals too:
        a repetition must neither happen twice nor find us the owner of what we had to refuse.

        The answer is shared: who gives up waiting for it must not cancel it.
        """
        known = self._taken.get(forward.command_id)
        if known is not None:
            return known[1]
        answer = self._take_create(forward) or asyncio.ensure_future(self._take(forward))
        answer.add_done_callback(retrieved)
        chars = payload_chars(forward.command)
        self._taken[forward.command_id] = (chars, answer)
        self._taken_chars += chars
        self._forget_old_orders()
        return answer

    def _forget_old_orders(self) -> None:
        """The oldest that are decided. One that is not will be asked for again by its id, and goes to the end."""
        for _ in range(_FORGOTTEN_AT_ONCE):
            if len(self._taken) <= _TAKEN_MAX and self._taken_chars <= _TAKEN_CHARS_MAX:
                return
            oldest = next(iter(self._taken))
            chars, answer = self._taken.pop(oldest)
            if answer.done():
                self._taken_chars -= chars
            else:
                self._taken[oldest] = (chars, answer)

    def taken(self, command_id: str) -> asyncio.Future[CommandAnswer]:
        """The answer to an order that was taken before."""
        known = self._taken.get(command_id)
        if known is not None:
            return known[1]
        answer: asyncio.Future[CommandAnswer] = asyncio.get_running_loop().create_future()
        answer.set_exception(OutcomeUnknown("nothing is known of this order any more"))
        return answer

    def as_peer(self) -> Peer:
        """This instance, as the others see it."""
        membership = self._engine.membership
        return Peer(membership.instance_id, membership.address, membership.secret)

    async def _take(self, forward: Forward) -> CommandAnswer:
        shard = self._shard_for(forward)
        if shard is None:
            raise NotOwner
        return await self._carry_out(shard, forward.command)

    def _take_create(self, forward: Forward) -> asyncio.Future[CommandAnswer] | None:
        """The common create, without a task of its own. None: this order has to wait, or to be refused."""
        command, shard = forward.command, self._shard_for(forward)
        if shard is None or not isinstance(command, CreateCommand):
            return None
        namespace = self._namespaces.usable(command.spec.namespace)
        if namespace is None:
            return None
        try:
            admitted = self._owner.admit(shard, namespace, command.spec)
        except DuetimeError:
            return None  # the slower way says the same, in its place
        if admitted is None:
            return None
        _, timer, writing = admitted
        answer: asyncio.Future[CommandAnswer] = writing.get_loop().create_future()

        def tell(_: Writing) -> None:
            error = writing.exception()
            if error is not None:
                answer.set_exception(error)
            elif (created := self._owner.acknowledged(timer, writing.result()[1])) is not None:
                answer.set_result(created)
            else:
                asyncio.ensure_future(self._owner.created(admitted)).add_done_callback(tell_late)

        def tell_late(created: asyncio.Future[Created]) -> None:
            error = created.exception()
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(created.result())

        writing.add_done_callback(tell)
        return answer

    def _shard_for(self, forward: Forward) -> Shard | None:
        """The shard an order is meant for, if it is still ours in that version."""
        shard = self._engine.shards.get(forward.shard_id)
        if shard is None or shard.closing or shard.fence.version != forward.version:
            return None
        return shard

    # --- namespaces -------------------------------------------------------------------------------

    async def create_default_namespace(self) -> None:
        """At the first start. A configuration that contradicts what is stored is refused: shards never move."""
        num_shards = self._config.namespaces.default_num_shards
        await self._namespaces.refresh()
        if self._namespaces.known(DEFAULT_NAMESPACE) is None:
            with contextlib.suppress(Conflict):  # another instance starts at the same time, and was quicker
                await self.create_namespace(NamespaceSpec(name=DEFAULT_NAMESPACE, num_shards=num_shards))
        known = self._namespaces.known(DEFAULT_NAMESPACE)
        if known is not None and known.num_shards != num_shards:
            raise SetupError(
                f"namespaces.default_num_shards is {num_shards}, but the store was made with {known.num_shards}: "
                "the number of shards of a namespace never changes",
                field="namespaces.default_num_shards",
            )

    async def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        if not 1 <= len(spec.name.encode()) <= ID_BYTES_MAX or "\0" in spec.name:
            raise InvalidField("namespace", f"namespace must have 1 to {ID_BYTES_MAX} bytes and no NUL")
        num_shards = self._config.namespaces.default_num_shards if spec.num_shards is UNSET else spec.num_shards
        fresh = Namespace(
            name=spec.name,
            num_shards=num_shards,
            created_at_ms=self._engine.membership.now_ms(),
        )
        namespace = await self._namespaces.create(self._with(fresh, spec))
        try:
            await self._engine.balance()
        except StoreError as error:
            log.warning("the shards of a new namespace are not claimed yet: %s", error)  # the next look claims them
        return namespace

    async def get_namespace(self, name: str) -> Namespace:
        return await self._namespaces.get(name)

    async def list_namespaces(self) -> list[Namespace]:
        return await self._namespaces.all()

    async def update_namespace(self, spec: NamespaceSpec) -> Namespace:
        old = await self._namespaces.get(spec.name)
        if spec.num_shards is not UNSET and spec.num_shards != old.num_shards:
            raise Conflict(
                f"numShards of {spec.name!r} is {old.num_shards} and never changes",
                field="numShards",
                code="num_shards_immutable",
            )
        changed = self._with(_replace(old, revision=old.revision + 1, deleting=False), spec)
        return await self._namespaces.replace(changed, old)

    async def delete_namespace(self, name: str) -> None:
        """Only an empty one: no scheduled timers."""
        old = await self._namespaces.get(name)
        if name == DEFAULT_NAMESPACE:
            raise Conflict("The namespace `default` stays", field="namespace", code="namespace_in_use")
        await self._refuse_if_used(old)
        marked = await self._namespaces.replace(_replace(old, revision=old.revision + 1, deleting=True), old)
        try:
            # A create is acknowledged only if a read of the namespaces that began less than FRESH_FOR_MS ago shows the
            # namespace without the mark. So after this wait every acknowledged timer is on disk, and if there is one,
            # the namespace stays; and no further create in it is acknowledged.
            if not self._store.capabilities.exclusive:
                await asyncio.sleep(_DELETION_SEEN_SECONDS)
            await self._refuse_if_used(marked)
        except BaseException:
            await self._unmark(marked)
            raise
        gone = _replace(marked, revision=marked.revision + 1, deleting=False, deleted=True)
        await self._namespaces.replace(gone, marked)

    async def _unmark(self, marked: Namespace) -> None:
        """Without the mark creates are taken again. If it cannot be removed, it is ignored after a while."""
        try:
            await self._namespaces.replace(_replace(marked, revision=marked.revision + 1, deleting=False), marked)
        except DuetimeError as error:
            log.warning("namespace %r is still marked for deletion; creates in it wait: %s", marked.name, error)

    async def _refuse_if_used(self, namespace: Namespace) -> None:
        after: Position | None = BEFORE_ALL
        while after is not None:
            listing = await self._store.list_timers(
                ListQuery(namespace=namespace.name, num_shards=namespace.num_shards, after=after, limit=1)
            )
            if listing.timers or listing.unreadable:
                raise Conflict(
                    f"Namespace {namespace.name!r} still has scheduled timers",
                    field="namespace",
                    code="namespace_in_use",
                )
            after = listing.next

    def _with(self, namespace: Namespace, spec: NamespaceSpec) -> Namespace:
        changes = {
            name: getattr(spec, name)
            for name in spec.__struct_fields__
            if name not in ("name", "num_shards") and getattr(spec, name) is not UNSET
        }
        if changes.get("callback_url") is not None:
            self._owner.check_target(changes["callback_url"])
        if "signing_secrets" in changes:
            try:
                changes["signing_secrets"] = kept_secrets(changes["signing_secrets"], namespace.signing_secrets)
            except ValueError as error:
                raise InvalidField("signingSecrets", f"signingSecrets {error}") from None
        return _replace(namespace, **changes)

    # --- how it is going --------------------------------------------------------------------------

    def readiness(self) -> str | None:
        """None: ready. Otherwise why not, in a sentence."""
        return self._engine.readiness()

    def shard_map(self) -> ShardMap:
        """Who owns what, as this instance knows it: from memory alone."""
        members, rows = self._engine.membership.alive.values(), self._engine.rows
        index: dict[str | None, int] = {member.instance_id: number for number, member in enumerate(members)}
        return ShardMap(
            addresses=tuple(member.address for member in members),
            instance_ids=tuple(member.instance_id for member in members),
            owners=tuple([index.get(rows[shard_id].owner_id) for shard_id in range(len(rows))]),
            num_shards={namespace.name: namespace.num_shards for namespace in self._namespaces.all_known()},
        )

    def instance_status(self) -> InstanceStatus:
        """How this instance is doing."""
        return status.instance_status(self._engine)

    async def cluster_status(self, *, with_shards: bool = False) -> ClusterStatus:
        """How the whole cluster is doing, by what its living members say of themselves."""
        await self._read_status[with_shards]()
        return self._status[with_shards]

    async def _look_at_cluster(self, with_shards: bool) -> None:
        """Once for all who ask at the same time: it costs the database and every member something."""
        self._status[with_shards] = await status.cluster_status(
            self._engine, self._store, self._peers, self._config.engine, with_shards=with_shards
        )


_SignedLong = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]  # what every database can compare with
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
        raise InvalidField("cursor", "cursor is not one that a list has answered") from None
    return bool(reached), Position(*position)
