"""The only door: create, get, update, delete, list… for api, ingress, calendar and cli.

Checks what only the server can check (limits, targets, namespaces), finds the shard, and hands the write
to its owner. Writes are acknowledged when they are on disk; reads go straight to the store.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET

from duetime import __version__
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.engine import Engine
from duetime.errors import Conflict, DuetimeError, InvalidField, NotFound, SetupError, TooLarge
from duetime.model import (
    BEFORE_ALL,
    ID_BYTES_MAX,
    NO_EXTRAS,
    ClusterStatus,
    Created,
    Ending,
    Extras,
    MemberStatus,
    Namespace,
    NamespaceSpec,
    Position,
    Reached,
    ShardStatus,
    State,
    Timer,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
    attempted,
    cancelled,
    kept_secrets,
    shard_of,
    uuid_of,
)
from duetime.namespaces import DEFAULT_NAMESPACE
from duetime.shard import UNKNOWN, Shard
from duetime.store import Found, ListQuery, Store
from duetime.timetext import LATEST_MS

__all__ = ["Service"]

Written = asyncio.Future[tuple[Timer | None, bool]]

_ENDINGS = {State(ending.value): ending for ending in Ending}
_replace = msgspec.structs.replace


class Service:
    """Errors: the Rejected family, Busy, Unserved, StoreUnavailable, OutcomeUnknown (errors.py)."""

    def __init__(self, config: Config, engine: Engine, store: Store, deliverer: Deliverer) -> None:
        self._config = config
        self._engine = engine
        self._store = store
        self._deliverer = deliverer
        self._namespaces = engine.namespaces
        self._telemetry = engine.telemetry

    # --- create -----------------------------------------------------------------------------------

    async def create(self, spec: TimerSpec) -> Created:
        """Upsert: whatever timer has this id is replaced."""
        admitted = self._admit(spec)
        if admitted is None:
            return await self._create_slowly(spec)
        timer, written = admitted
        _, replaced = await written
        self._telemetry.created.value += 1
        return Created(TimerView(timer, State.SCHEDULED), replaced)

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        """One result for each, in order; what could not be decoded passes through as its error."""
        admitted: list[tuple[Timer, Written] | asyncio.Future[Created] | DuetimeError] = []
        for spec in specs:
            try:
                if isinstance(spec, DuetimeError):
                    raise spec
                admitted.append(self._admit(spec) or asyncio.ensure_future(self._create_slowly(spec)))
            except DuetimeError as error:
                admitted.append(error)
        results: list[Created | DuetimeError] = []
        for item in admitted:
            try:
                if isinstance(item, DuetimeError):
                    results.append(item)
                elif isinstance(item, tuple):
                    _, replaced = await item[1]
                    self._telemetry.created.value += 1
                    results.append(Created(TimerView(item[0], State.SCHEDULED), replaced))
                else:
                    results.append(await item)
            except DuetimeError as error:
                results.append(error)
        return results

    def _admit(self, spec: TimerSpec) -> tuple[Timer, Written] | None:
        """The common create, without waiting for anything but the commit. None: this one has to wait."""
        namespace = self._namespaces.known(spec.namespace)
        if spec.if_absent or namespace is None or namespace.deleted:
            return None
        key = TimerKey(spec.namespace, spec.timer_id)
        shard = self._engine.owner_of(shard_of(spec.timer_id, namespace.num_shards))
        if shard.is_held(key):
            return None
        timer = self._timer_of(spec, namespace, shard)
        return timer, shard.write(key, timer, [])

    async def _create_slowly(self, spec: TimerSpec) -> Created:
        namespace = await self._namespace_for_create(spec.namespace)
        key = TimerKey(spec.namespace, spec.timer_id)
        shard = self._engine.owner_of(shard_of(spec.timer_id, namespace.num_shards))
        async with shard.alone(key):
            timer = self._timer_of(spec, namespace, shard)
            if spec.if_absent and (there := await self._already_there(shard, key, spec, timer)):
                return there
            _, replaced = await shard.write(key, timer, [])
        self._telemetry.created.value += 1
        return Created(TimerView(timer, State.SCHEDULED), replaced)

    async def _already_there(self, shard: Shard, key: TimerKey, spec: TimerSpec, timer: Timer) -> Created | None:
        """`ifAbsent`: the same request again gets the same answer, another one a conflict, also after the end."""
        found = await self._find(shard, key)
        stored = found.timer or (found.reached.timer if found.reached is not None else None)
        if stored is None:
            return None
        if not _same_wish(stored, timer, compare_time=spec.delay_ms is None):
            raise Conflict(
                f"Timer {key.timer_id!r} exists in namespace {key.namespace!r} and is different",
                field="timerId",
                code="timer_exists",
            )
        return Created(self._view(shard, key, found), False)

    async def _namespace_for_create(self, name: str) -> Namespace:
        try:
            return await self._namespaces.get(name)
        except NotFound:
            if not self._config.namespaces.create_on_first_use:
                raise
        try:
            return await self.create_namespace(NamespaceSpec(name=name))
        except Conflict:
            return await self._namespaces.get(name)  # somebody else was first

    def _timer_of(self, spec: TimerSpec, namespace: Namespace, shard: Shard) -> Timer:
        now_ms = self._engine.membership.now_ms()
        execute_at_ms = self._instant(spec.execute_at_ms, spec.delay_ms, now_ms)
        callback_url = spec.callback_url or namespace.callback_url
        if callback_url is None:
            raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
        self._check_target(callback_url)
        if spec.payload is not None:
            self._check_payload(spec.payload, namespace)
        extras = NO_EXTRAS
        if spec.headers or spec.tags or spec.missed is not None:
            self._check_headers(spec.headers)
            extras = Extras(headers=spec.headers or None, tags=spec.tags, missed=spec.missed)
        high, low = uuid_of(spec.namespace, spec.timer_id)
        return Timer(
            namespace=namespace.name,
            timer_id=spec.timer_id,
            uuid_high=high,
            uuid_low=low,
            generation=shard.next_generation(),
            execute_at_ms=execute_at_ms,
            scheduled_at_ms=execute_at_ms,
            created_at_ms=now_ms,
            callback_url=callback_url,
            payload=spec.payload,
            retry_policy=spec.retry_policy,
            callback_timeout_seconds=spec.callback_timeout_seconds,
            correlation_id=spec.correlation_id,
            extras=extras,
        )

    def _instant(self, execute_at_ms: int | None, delay_ms: int | None, now_ms: int) -> int:
        if execute_at_ms is not None:
            return execute_at_ms
        if delay_ms is None:
            raise InvalidField("executeAt", "one of executeAt and delay is required")
        if now_ms + delay_ms >= LATEST_MS:
            raise InvalidField("delay", "delay must end before 9999-01-01T00:00:00Z")
        return now_ms + delay_ms

    def _check_target(self, url: str) -> None:
        try:
            self._deliverer.check(url)
        except ValueError as error:
            raise InvalidField("callbackUrl", f"callbackUrl {error}") from None

    def _check_headers(self, headers: dict[str, str] | None) -> None:
        try:
            self._deliverer.check_headers(headers or {})
        except ValueError as error:
            raise InvalidField("headers", f"headers {error}") from None

    def _check_payload(self, payload: str, namespace: Namespace) -> None:
        most = min(
            self._config.limits.payload_bytes_max,
            self._store.capabilities.payload_bytes_max,
            namespace.payload_bytes_max or self._config.limits.payload_bytes_max,
        )
        # A character has at most four bytes: most payloads need not be encoded to be measured.
        if len(payload) * 4 > most and len(payload.encode()) > most:
            raise TooLarge(f"payload is larger than {most} bytes", field="payload")

    # --- get and list -----------------------------------------------------------------------------

    async def get(self, key: TimerKey) -> TimerView:
        namespace = await self._namespaces.get(key.namespace)
        shard_id = shard_of(key.timer_id, namespace.num_shards)
        found = await self._engine.lookup.find(shard_id, key)
        return self._view(self._engine.shards.get(shard_id), key, found)

    def _view(self, shard: Shard | None, key: TimerKey, found: Found) -> TimerView:
        if found.timer is not None:
            sending = shard is not None and shard.is_sending(key)
            return TimerView(found.timer, State.IN_FLIGHT if sending else State.SCHEDULED)
        if found.reached is not None:
            return TimerView(found.reached.timer, State(found.reached.ending.value), found.reached)
        raise _no_timer(key)

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        """A page in order of due time (reached ones: of when they will be purged), and where to go on."""
        namespace = await self._namespaces.get(filter.namespace)
        reached_first, after = _read_cursor(filter.cursor)
        ending = _ENDINGS.get(filter.state) if filter.state is not None else None
        wants_reached = reached_first or ending is not None
        query = ListQuery(
            namespace=namespace.name,
            num_shards=namespace.num_shards,
            after=after,
            limit=min(filter.limit, self._config.limits.page_timers_max),
            endings=frozenset() if not wants_reached else frozenset(Ending) if ending is None else frozenset({ending}),
            due_from_ms=filter.due_from_ms,
            due_until_ms=filter.due_until_ms,
            id_prefix=filter.id_prefix,
            tag=filter.tag,
            correlation_id=filter.correlation_id,
        )
        listing = await self._store.list_timers(query)
        views = [TimerView(row.timer, State(row.ending.value), row) for row in listing.reached]
        for timer in listing.timers:
            shard = self._engine.shards.get(shard_of(timer.timer_id, namespace.num_shards))
            views.append(self._view(shard, timer.key, Found(timer)))
        if filter.state is not None:
            views = [view for view in views if view.state is filter.state]
        cursor = None if listing.next is None else _cursor(wants_reached, listing.next)
        if cursor is None and filter.state is None and not wants_reached:
            cursor = _cursor(True, BEFORE_ALL)
        return views, cursor

    # --- update, delete, fire now, replay ---------------------------------------------------------

    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated:
        """Change a scheduled timer. The verdict tells whether its old self was already on its way."""
        shard, namespace = await self._shard_of(key)
        async with shard.alone(key):
            found = await self._find(shard, key)
            timer = found.timer
            if timer is None:
                raise _no_timer(key) if found.reached is None else _is_over(key, found.reached)
            changed = self._patched(timer, patch, namespace)
            verdict = Verdict.IN_FLIGHT if shard.is_sending(key) else Verdict.UPDATED
            changed = _replace(changed, generation=shard.next_generation())
            await shard.write(key, changed, [])
        self._telemetry.updated.value += 1
        return Updated(TimerView(changed, State.SCHEDULED), verdict)

    def _patched(self, timer: Timer, patch: TimerPatch, namespace: Namespace) -> Timer:
        """The timer with the patch applied: a new wish, so its attempts start over."""
        extras = timer.extras
        headers = extras.headers if patch.headers is UNSET else patch.headers or None
        tags = extras.tags if patch.tags is UNSET else patch.tags or ()
        missed = extras.missed if patch.missed is UNSET else patch.missed
        changed = _replace(timer, attempts=0, extras=Extras(headers=headers, tags=tags, missed=missed))
        if patch.execute_at_ms is not UNSET or patch.delay_ms is not UNSET:
            at_ms = self._instant(
                None if patch.execute_at_ms is UNSET else patch.execute_at_ms,
                None if patch.delay_ms is UNSET else patch.delay_ms,
                self._engine.membership.now_ms(),
            )
            changed = _replace(changed, execute_at_ms=at_ms, scheduled_at_ms=at_ms)
        if patch.headers is not UNSET:
            self._check_headers(patch.headers)
        if patch.callback_url is not UNSET:
            url = patch.callback_url or namespace.callback_url
            if url is None:
                raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
            self._check_target(url)
            changed = _replace(changed, callback_url=url)
        if patch.payload is not UNSET:
            if patch.payload is not None:
                self._check_payload(patch.payload, namespace)
            changed = _replace(changed, payload=patch.payload)
        if patch.retry_policy is not UNSET:
            changed = _replace(changed, retry_policy=patch.retry_policy)
        if patch.callback_timeout_seconds is not UNSET:
            changed = _replace(changed, callback_timeout_seconds=patch.callback_timeout_seconds)
        if patch.correlation_id is not UNSET:
            changed = _replace(changed, correlation_id=patch.correlation_id)
        return changed

    async def delete(self, key: TimerKey) -> Verdict:
        """After this is answered no delivery starts. The verdict tells whether one had."""
        shard, namespace = await self._shard_of(key)
        async with shard.alone(key):
            found = await self._find(shard, key)
            timer = found.timer
            if timer is None:
                if found.reached is None:
                    raise _no_timer(key)
                return Verdict.ALREADY_REACHED
            now_ms = self._engine.membership.now_ms()
            entry = shard.entries.get(key)
            sending = shard.is_sending(key)
            if sending and entry is not None and entry.started_at_ms:
                timer = attempted(timer, entry.started_at_ms)
            await shard.write(key, None, [cancelled(timer, namespace, now_ms)])
        self._telemetry.deleted.value += 1
        self._telemetry.endings.add(Ending.CANCELLED.value)
        return Verdict.IN_FLIGHT if sending else Verdict.CANCELLED

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

    async def fire_now(self, key: TimerKey) -> TimerView:
        """Make a scheduled timer due at once; one already on its way is left to it."""
        shard, _ = await self._shard_of(key)
        async with shard.alone(key):
            found = await self._find(shard, key)
            if found.timer is None:
                raise _no_timer(key) if found.reached is None else _is_over(key, found.reached)
            if shard.is_sending(key):
                return self._view(shard, key, found)
            return await self._arm_now(shard, key, found.timer)

    async def replay(self, key: TimerKey) -> TimerView:
        """Arm a reached timer again, as a new one that is due at once."""
        shard, _ = await self._shard_of(key)
        async with shard.alone(key):
            found = await self._find(shard, key)
            if found.timer is not None:
                raise Conflict(
                    f"Timer {key.timer_id!r} is scheduled, not reached", field="timerId", code="timer_scheduled"
                )
            if found.reached is None:
                raise _no_timer(key)
            return await self._arm_now(shard, key, found.reached.timer)

    async def _arm_now(self, shard: Shard, key: TimerKey, timer: Timer) -> TimerView:
        now_ms = self._engine.membership.now_ms()
        old = timer.extras
        timer = _replace(
            timer,
            generation=shard.next_generation(),
            execute_at_ms=now_ms,
            scheduled_at_ms=now_ms,
            attempts=0,
            extras=Extras(headers=old.headers, tags=old.tags, missed=old.missed),
        )
        await shard.write(key, timer, [])
        return TimerView(timer, State.SCHEDULED)

    async def _shard_of(self, key: TimerKey) -> tuple[Shard, Namespace]:
        namespace = await self._namespaces.get(key.namespace)
        return self._engine.owner_of(shard_of(key.timer_id, namespace.num_shards)), namespace

    async def _find(self, shard: Shard, key: TimerKey) -> Found:
        """What there is under a key once everything admitted is written. The caller is `alone` with the key."""
        timer = shard.current(key)
        if timer is UNKNOWN:
            found = await self._engine.lookup.find(shard.shard_id, key)
            timer = shard.current(key)  # it may have been loaded, or settled, meanwhile
            if timer is UNKNOWN:
                return found
        if timer is not None:
            return Found(timer)
        reached: Reached | None = shard.latest_reached(key)
        if reached is not None:
            return Found(None, reached)
        return Found(None, (await self._engine.lookup.find(shard.shard_id, key)).reached)

    # --- namespaces -------------------------------------------------------------------------------

    async def create_default_namespace(self) -> None:
        """At the first start. A configuration that contradicts what is stored is refused: shards never move."""
        num_shards = self._config.namespaces.default_num_shards
        await self._namespaces.refresh()
        known = self._namespaces.known(DEFAULT_NAMESPACE)
        if known is not None and known.num_shards != num_shards:
            raise SetupError(
                f"namespaces.default_num_shards is {num_shards}, but the store was made with {known.num_shards}: "
                "the number of shards of a namespace never changes",
                field="namespaces.default_num_shards",
            )
        if known is None:
            await self.create_namespace(NamespaceSpec(name=DEFAULT_NAMESPACE, num_shards=num_shards))

    async def create_namespace(self, spec: NamespaceSpec) -> Namespace:
        if not 1 <= len(spec.name.encode()) <= ID_BYTES_MAX or "\0" in spec.name:
            raise InvalidField("namespace", f"namespace must have 1 to {ID_BYTES_MAX} bytes and no NUL")
        num_shards = self._config.namespaces.default_num_shards if spec.num_shards is UNSET else spec.num_shards
        deleted = self._namespaces.known(spec.name)
        revision = 0 if deleted is None else deleted.revision + 1
        fresh = Namespace(
            name=spec.name,
            num_shards=num_shards,
            created_at_ms=self._engine.membership.now_ms(),
            revision=revision,
        )
        namespace = await self._namespaces.create(self._with(fresh, spec))
        await self._engine.balance()
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
        changed = self._with(_replace(old, revision=old.revision + 1), spec)
        return await self._namespaces.replace(changed, old)

    async def delete_namespace(self, name: str) -> None:
        """Only an empty one: no scheduled timers."""
        old = await self._namespaces.get(name)
        if name == DEFAULT_NAMESPACE:
            raise Conflict("The namespace `default` stays", field="namespace", code="namespace_in_use")
        after: Position | None = BEFORE_ALL
        while after is not None:
            listing = await self._store.list_timers(
                ListQuery(namespace=name, num_shards=old.num_shards, after=after, limit=1)
            )
            if listing.timers:
                raise Conflict(
                    f"Namespace {name!r} still has scheduled timers", field="namespace", code="namespace_in_use"
                )
            after = listing.next
        await self._namespaces.replace(_replace(old, revision=old.revision + 1, deleted=True), old)

    def _with(self, namespace: Namespace, spec: NamespaceSpec) -> Namespace:
        changes = {
            name: getattr(spec, name)
            for name in spec.__struct_fields__
            if name not in ("name", "num_shards") and getattr(spec, name) is not UNSET
        }
        if changes.get("callback_url") is not None:
            self._check_target(changes["callback_url"])
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

    async def cluster_status(self) -> ClusterStatus:
        engine = self._engine
        membership, lateness = engine.membership, self._telemetry.lateness
        rows = await self._store.shards()
        members = await self._store.members()
        reason = engine.readiness()
        owned: dict[str | None, int] = {}
        for row in rows:
            owned[row.owner_id] = owned.get(row.owner_id, 0) + 1
        p50, p99 = lateness.quantile(0.5), lateness.quantile(0.99)
        return ClusterStatus(
            instance_id=membership.instance_id,
            version=__version__,
            store=self._store.capabilities.name,
            ready=reason is None,
            reason=reason,
            lease_ms=membership.lease_ms,
            clock_skew_ms=membership.skew_ms,
            members=tuple(
                MemberStatus(
                    instance_id=member.instance_id,
                    address=member.address,
                    alive=member.alive,
                    self_=member.instance_id == membership.instance_id,
                    shards=owned.get(member.instance_id, 0),
                )
                for member in members
            ),
            shards=tuple(
                ShardStatus(
                    shard_id=row.shard_id,
                    version=row.version,
                    owner_id=row.owner_id,
                    owner_address=row.owner_address,
                    in_memory=None if (shard := engine.shards.get(row.shard_id)) is None else len(shard.entries),
                    horizon_ms=None if shard is None else max(0, shard.horizon.execute_at_ms),
                )
                for row in rows
            ),
            in_memory=sum(len(shard.entries) for shard in engine.shards.values()),
            in_flight=engine.fire_loop.flow.in_flight,
            held=engine.fire_loop.flow.waiting,
            writes_waiting=engine.writes_waiting,
            oldest_due_ms=engine.fire_loop.oldest_due_ms(membership.now_ms()),
            lateness_p50_ms=None if p50 is None else p50 * 1_000,
            lateness_p99_ms=None if p99 is None else p99 * 1_000,
        )


def _no_timer(key: TimerKey) -> NotFound:
    return NotFound(
        f"There is no timer {key.timer_id!r} in namespace {key.namespace!r}", field="timerId", code="timer_not_found"
    )


def _is_over(key: TimerKey, reached: Reached) -> Conflict:
    return Conflict(f"Timer {key.timer_id!r} is over: {reached.ending}", field="timerId", code="already_reached")


def _same_wish(stored: Timer, wished: Timer, *, compare_time: bool) -> bool:
    return (
        stored.callback_url == wished.callback_url
        and stored.payload == wished.payload
        and stored.retry_policy == wished.retry_policy
        and stored.callback_timeout_seconds == wished.callback_timeout_seconds
        and stored.correlation_id == wished.correlation_id
        and stored.extras.headers == wished.extras.headers
        and stored.extras.tags == wished.extras.tags
        and stored.extras.missed == wished.extras.missed
        and (not compare_time or stored.scheduled_at_ms == wished.scheduled_at_ms)
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
