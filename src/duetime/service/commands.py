"""Carries out commands on the instance that owns the shard: checks them, reads the timer if necessary, writes.

`service.py` finds the owner of a shard, `forwarded.py` receives commands from other instances; both end here. Commands
for one timer are carried out in the order in which they arrived (`Shard.key_lock`), even if one of them has to wait: if
a client got `outcome_unknown` and writes again, its first write must not be applied after the second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
from msgspec import UNSET, Struct

from duetime.cluster.forwarding import (
    Command,
    CommandAnswer,
    CreateCommand,
    DeleteCommand,
    FireNowCommand,
    ReplayCommand,
    UpdateCommand,
)
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.instants import LATEST_MS
from duetime.domain.recurrence import (
    called_again,
    called_now,
    first_occurrence,
    held,
    is_held,
    moved,
    not_held,
    rescheduled,
    schedule_of,
)
from duetime.domain.settle import attempted, cancelled, resumed
from duetime.domain.timer import (
    NO_EXTRAS,
    NOT_BY_OLDER_VERSIONS_MS,
    CommandPosition,
    Created,
    Extras,
    Namespace,
    Outcome,
    Reached,
    State,
    Timer,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
    uuid_of,
)
from duetime.domain.wall_clock import ScheduleState
from duetime.engine.engine import Engine
from duetime.engine.pending_write import WriteResult
from duetime.engine.shard import UNKNOWN, Shard
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    TooLarge,
    UnreadableTimer,
    Unserved,
)
from duetime.service.turns import Turns
from duetime.store import Found, Store

__all__ = ["Commands", "StartedCreate", "view_of"]

_replace = msgspec.structs.replace
_STEPS_BETWEEN_SEARCHES = 5
_LOOKS, _LOOK_AGAIN_SECONDS = 100, 0.02


class StartedCreate(Struct, frozen=True):
    """A create whose timer waits for its commit."""

    shard: Shard
    timer: Timer
    writing: asyncio.Future[WriteResult]


class Commands:
    def __init__(self, config: Config, engine: Engine, store: Store, deliverer: Deliverer) -> None:
        self._config = config
        self._engine = engine
        self._store = store
        self._deliverer = deliverer
        self._payload_bytes_max = min(config.limits.payload_bytes_max, store.capabilities.payload_bytes_max)
        self._namespaces = engine.namespaces
        self._telemetry = engine.telemetry
        self._search_turns = Turns()

    def local_shard(self, shard_id: int) -> Shard | None:
        """The shard, if this instance owns it and accepts commands for it."""
        shard = self._engine.shards.get(shard_id)
        return None if shard is None or shard.closing else shard

    async def carry_out(self, shard: Shard, command: Command) -> CommandAnswer:
        match command:
            case CreateCommand(spec):
                return await self.create(shard, spec)
            case UpdateCommand(key, patch):
                return await self.update(shard, key, patch)
            case DeleteCommand(key, position, if_stored):
                return await self.delete(shard, key, position, if_stored=if_stored)
            case FireNowCommand(key):
                return await self.fire_now(shard, key)
            case ReplayCommand(key):
                return await self.replay(shard, key)

    # --- create -----------------------------------------------------------------------------------
    #
    # Every create (single, one of many, forwarded) is `start_create` and then `finish_create`. `create` is both, and
    # waits before the write where that is necessary.

    def start_create(self, shard: Shard, spec: TimerSpec, namespace: Namespace | None = None) -> StartedCreate | None:
        """Hand the timer to the next commit, without waiting. None: the create has to wait before the write, for a
        read (of its namespace, or of the timer because of `ifAbsent` or `ifReached`), for an earlier command, or
        because the first occurrence of a schedule takes time to find: call `create`.

        `namespace`: what `Namespaces.usable` returned, if the caller has just called it.
        """
        if namespace is None:
            namespace = self._namespaces.usable(spec.namespace)
        key = TimerKey(spec.namespace, spec.timer_id)
        if namespace is None or spec.if_absent or spec.ignore_reached or shard.is_locked(key):
            return None
        if spec.schedule is not None:
            return None
        timer = self._timer_of(spec, namespace, shard)
        return StartedCreate(shard, timer, shard.write(key, timer, []))

    async def create(self, shard: Shard, spec: TimerSpec) -> Created:
        """Upsert: a scheduled timer with this id is replaced."""
        started = self.start_create(shard, spec)
        if started is None:
            key = TimerKey(spec.namespace, spec.timer_id)
            async with shard.key_lock(key):
                namespace = await self._namespaces.get_for_create(spec.namespace)
                if spec.schedule is None:
                    timer = self._timer_of(spec, namespace, shard)
                else:
                    async with self._search(spec.namespace):
                        timer = self._timer_of(spec, namespace, shard)
                if spec.if_absent or spec.ignore_reached:
                    existing = await self._existing(shard, key, spec, timer)
                    if existing is not None:
                        return existing
                started = StartedCreate(shard, timer, shard.write(key, timer, []))
                await started.writing
        return await self.finish_create(started)

    async def finish_create(self, started: StartedCreate) -> Created:
        """Wait for the commit of a started create, and acknowledge it."""
        timer = started.timer
        _, replaced = await started.writing
        if self._namespaces.usable(timer.namespace) is None:
            await self._check_still_in_namespace(started.shard, timer, is_new=replaced is False)
        return self._acknowledged(timer, replaced)

    def acknowledge(self, timer: Timer, replaced: bool | None) -> Created | None:
        """The answer to a create that is committed. None: its namespace must be read again first (`finish_create`)."""
        return None if self._namespaces.usable(timer.namespace) is None else self._acknowledged(timer, replaced)

    def _acknowledged(self, timer: Timer, replaced: bool | None) -> Created:
        self._telemetry.created.value += 1
        return Created(TimerView(timer, State.SCHEDULED), replaced)

    async def _check_still_in_namespace(self, shard: Shard, timer: Timer, *, is_new: bool) -> None:
        """Called after a timer was written. It is acknowledged only if a recent read of the namespaces still shows its
        namespace: deleting a namespace waits longer than such a read stays valid and then lists the timers, so it finds
        all that were acknowledged (`NamespaceOperations.delete`). If the namespace is being deleted, a timer that did
        not exist before (`is_new`) is removed again. One that existed keeps the namespace: the deletion finds it."""
        try:
            await (self._namespaces.get_for_create if is_new else self._namespaces.get)(timer.namespace)
        except (NotFound, Unserved):
            if not is_new:
                raise OutcomeUnknown("stored, but the namespace was deleted") from None
            await self._remove(shard, timer)
            raise
        except StoreError as error:
            raise OutcomeUnknown(f"stored, but cannot read whether the namespace still exists: {error}") from error

    async def _remove(self, shard: Shard, timer: Timer) -> None:
        """Remove a timer whose namespace was deleted while it was written, unless its delivery has started."""
        try:
            async with shard.key_lock(timer.key):
                found = await self._find(shard, timer.key)
                if found.timer == timer and not shard.is_sending(timer.key):
                    await shard.write(timer.key, None, [])
                    return
        except DuetimeError as error:
            raise OutcomeUnknown(f"the namespace was deleted, but the timer may still be stored: {error}") from error
        raise OutcomeUnknown("the namespace was deleted, but the delivery of the timer has started")

    async def _existing(self, shard: Shard, key: TimerKey, spec: TimerSpec, timer: Timer) -> Created | None:
        """What is stored, if the create does not change it. None: create the timer.

        `ifReached`: one that is over stays as it is. `ifAbsent`: a repeated request gets the same answer, a different
        one a conflict, also if the timer is reached. The command of a broker changes nothing if it is not later than
        the one that wrote the timer, or asks for what is stored.
        """
        found = await self._find(shard, key)
        if found.unreadable is not None:
            if not spec.if_absent and spec.command is None:
                return None  # it is scheduled: replaced, as by a create without `ifReached`
            raise _unreadable(key, found.unreadable)
        reached = found.reached if found.timer is None else None
        if spec.ignore_reached and reached is not None and not _is_after_its_cancel(spec.command, reached):
            return Created(view_of(shard, key, found), replaced=False, existed=True)
        if found.timer is not None and not await self._is_changed_by(shard, found.timer, timer, spec.command):
            return Created(view_of(shard, key, found), replaced=False, existed=True)
        if not spec.if_absent:
            return None
        stored = found.timer or (reached.timer if reached is not None else None)
        if stored is None:
            return None
        if not _is_same(stored, timer, compare_time=spec.delay_ms is None and spec.schedule is None):
            raise Conflict(
                f"Timer {key.timer_id!r} exists in namespace {key.namespace!r} with other values",
                field="timerId",
                code="timer_exists",
            )
        return Created(view_of(shard, key, found), replaced=False, existed=True)

    async def _is_changed_by(self, shard: Shard, stored: Timer, asked: Timer, command: CommandPosition | None) -> bool:
        """Does the create of a broker's command change the stored timer? A later command that asks for the same keeps
        the generation, so that receivers see the same message id; only the position of the command is recorded."""
        if command is None:
            return True
        written_by = stored.extras.command
        if written_by is not None and not command.is_after(written_by):
            return False
        if not _is_same(stored, asked, compare_time=True):
            return True
        if not shard.is_sending(stored.key):
            await shard.write(stored.key, _replace(stored, extras=_replace(stored.extras, command=command)), [])
        return False

    def _timer_of(self, spec: TimerSpec, namespace: Namespace, shard: Shard) -> Timer:
        state = None
        if spec.schedule is None:
            created_at_ms, execute_at_ms = self._instants(spec.execute_at_ms, spec.delay_ms)
        else:
            created_at_ms = self._engine.membership.now_ms()
            state, execute_at_ms = first_occurrence(spec.schedule, created_at_ms)
        callback_url = spec.callback_url or namespace.callback_url
        if callback_url is None:
            raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
        self.check_target(callback_url, namespace.name)
        if spec.payload is not None:
            self._check_payload(spec.payload, namespace)
        extras = NO_EXTRAS
        if spec.headers:
            self._check_headers(callback_url, spec.headers)
        if (
            spec.headers
            or spec.tags
            or spec.missed is not None
            or spec.flow_key is not None
            or spec.command is not None
            or state is not None
        ):
            extras = Extras(
                headers=spec.headers or None,
                tags=spec.tags,
                missed=spec.missed,
                flow_key=spec.flow_key or None,
                command=spec.command,
                later=state,
            )
        high, low = uuid_of(spec.namespace, spec.timer_id)
        return Timer(
            namespace=namespace.name,
            timer_id=spec.timer_id,
            uuid_high=high,
            uuid_low=low,
            generation=shard.next_generation(),
            execute_at_ms=execute_at_ms,
            scheduled_at_ms=execute_at_ms,
            created_at_ms=created_at_ms,
            callback_url=callback_url,
            payload=spec.payload,
            retry_policy=spec.retry_policy,
            callback_timeout_seconds=spec.callback_timeout_seconds,
            correlation_id=spec.correlation_id,
            extras=extras,
        )

    def _instants(self, execute_at_ms: int | None, delay_ms: int | None) -> tuple[int, int]:
        """The current time and the time to execute at. A delay is exactly the difference between the two."""
        membership = self._engine.membership
        if execute_at_ms is not None:
            return membership.now_ms(), execute_at_ms
        if delay_ms is None:
            raise InvalidField("executeAt", "one of executeAt and delay is required")
        now_ms = membership.latest_now_ms()
        if now_ms + delay_ms >= LATEST_MS:
            raise InvalidField("delay", "delay must end before 9999-01-01T00:00:00Z")
        return now_ms, now_ms + delay_ms

    def check_target(self, url: str, namespace: str) -> None:
        try:
            self._deliverer.check(url, namespace)
        except ValueError as error:
            raise InvalidField("callbackUrl", f"callbackUrl {error}") from None

    def _check_headers(self, url: str, headers: dict[str, str]) -> None:
        try:
            self._deliverer.check_headers(url, headers)
        except ValueError as error:
            raise InvalidField("headers", f"headers {error}") from None

    def _check_payload(self, payload: str, namespace: Namespace) -> None:
        bytes_max = self._payload_bytes_max
        if namespace.payload_bytes_max:
            bytes_max = min(bytes_max, namespace.payload_bytes_max)
        # A character has at most four bytes: most payloads are short enough not to be encoded for this check.
        if len(payload) * 4 > bytes_max and len(payload.encode()) > bytes_max:
            raise TooLarge(f"payload is larger than {bytes_max} bytes", field="payload")

    # --- update, delete, fire now, replay ---------------------------------------------------------

    async def update(self, shard: Shard, key: TimerKey, patch: TimerPatch) -> Updated:
        """Change a scheduled timer. The verdict says whether a delivery with the old values had started."""
        async with shard.key_lock(key):
            namespace = await self._namespaces.get(key.namespace)
            if patch.paused is True:
                await self._call_ended(shard, key)
            first = None
            if patch.schedule is not UNSET and patch.schedule is not None:
                async with self._search(key.namespace):
                    first = first_occurrence(patch.schedule, self._engine.membership.now_ms())
            found = await self._find(shard, key)
            timer = found.timer
            if timer is None:
                raise _not_scheduled(key, found)
            verdict = Verdict.IN_FLIGHT if shard.is_sending(key) else Verdict.UPDATED
            if patch.paused is not UNSET:
                return Updated(await self._hold(shard, found, timer, namespace, paused=patch.paused), verdict)
            changed = self._patched(not_held(timer), patch, namespace, first)
            if is_held(timer):
                changed = held(changed)
            changed = _replace(changed, generation=shard.next_generation())
            await shard.write(key, changed, [])
        await self._check_still_in_namespace(shard, changed, is_new=False)
        self._telemetry.updated.value += 1
        return Updated(TimerView(changed, State.SCHEDULED), verdict)

    @asynccontextmanager
    async def _search(self, namespace: str) -> AsyncIterator[None]:
        """The search for an occurrence takes up to a millisecond. One is made in every fifth step of the event loop,
        and namespaces take turns, however many commands with schedules there are: a call takes many steps, which a
        search in each would make longer."""
        async with self._search_turns.turn(namespace):
            for _ in range(_STEPS_BETWEEN_SEARCHES):
                await asyncio.sleep(0)
            yield

    async def _call_ended(self, shard: Shard, key: TimerKey) -> None:
        """Wait a moment for a call in flight: most end within it, and their result is recorded before the pause."""
        for _ in range(_LOOKS):
            if not shard.is_sending(key):
                break
            await asyncio.sleep(_LOOK_AGAIN_SECONDS)

    async def _hold(self, shard: Shard, found: Found, timer: Timer, namespace: Namespace, *, paused: bool) -> TimerView:
        """Pause a timer, or resume it. The generation stays: if a call in flight is made again after the pause, the
        receiver sees the same id."""
        key = timer.key
        if is_held(timer) == paused:
            return view_of(shard, key, found)
        if paused:
            timer = held(timer)
            await shard.write(key, timer, [])
            return view_of(shard, key, Found(timer))
        settlement = resumed(timer, namespace, self._engine.membership.now_ms())
        reached = [] if settlement.reached is None else [settlement.reached]
        if settlement.rearmed is None and not reached:
            raise Conflict(f"The schedule of timer {key.timer_id!r} has ended", field="timerId", code="schedule_ended")
        await shard.write(key, settlement.rearmed, reached)
        for row in reached:
            self._telemetry.outcomes.add(row.outcome.value)
        return view_of(shard, key, Found(settlement.rearmed, settlement.reached))

    def _patched(
        self, timer: Timer, patch: TimerPatch, namespace: Namespace, first: tuple[ScheduleState, int] | None
    ) -> Timer:
        """The timer with the patch applied. `first`: the first occurrence of the patch's schedule. Only a new time
        makes its attempts start over: a timer that is being retried was fired on time, so the missed-fire policy must
        not apply to it."""
        extras = timer.extras
        changed = _replace(
            timer,
            extras=_replace(
                extras,
                headers=extras.headers if patch.headers is UNSET else patch.headers or None,
                tags=extras.tags if patch.tags is UNSET else patch.tags or (),
                missed=extras.missed if patch.missed is UNSET else patch.missed,
                flow_key=extras.flow_key if patch.flow_key is UNSET else patch.flow_key or None,
            ),
        )
        if patch.schedule is not UNSET:
            changed = rescheduled(changed, first)
        has_delay = patch.delay_ms is not UNSET and patch.delay_ms != NOT_BY_OLDER_VERSIONS_MS
        if patch.execute_at_ms is not UNSET or has_delay:
            _, at_ms = self._instants(
                None if patch.execute_at_ms is UNSET else patch.execute_at_ms,
                None if patch.delay_ms is UNSET else patch.delay_ms,
            )
            changed = _replace(
                changed, execute_at_ms=at_ms, scheduled_at_ms=at_ms, attempts=0, extras=changed.extras.asked_for()
            )
            changed = moved(changed)
        if patch.callback_url is not UNSET:
            url = patch.callback_url or namespace.callback_url
            if url is None:
                raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
            self.check_target(url, namespace.name)
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
        if changed.extras.headers and (patch.headers is not UNSET or patch.callback_url is not UNSET):
            self._check_headers(changed.callback_url, changed.extras.headers)
        return changed

    async def delete(
        self, shard: Shard, key: TimerKey, command: CommandPosition | None = None, *, if_stored: bool = False
    ) -> Verdict:
        """After the answer no delivery starts. The verdict says whether one had started before. `command`: of a broker;
        a Conflict if a later command has written the timer. If there is no timer, an earlier command that creates it
        may still arrive: it has to find that it was cancelled. `if_stored`: not found then."""
        async with shard.key_lock(key):
            namespace = await self._namespaces.get(key.namespace)
            found = await self._find(shard, key)
            timer = found.timer
            if found.unreadable is not None:
                if command is not None:  # a later command may have written it
                    raise _unreadable(key, found.unreadable)
                await shard.write(key, None, [])
                return Verdict.CANCELLED
            if timer is None:
                if found.reached is not None and not _is_after_its_cancel(command, found.reached):
                    return Verdict.ALREADY_REACHED
                if command is None or (if_stored and found.reached is None):
                    raise _no_timer(key)
                timer = _never_created(key, command, shard.next_generation(), self._engine.membership.now_ms())
            elif command is not None and (by := timer.extras.command) is not None and not command.is_after(by):
                raise Conflict(
                    f"Timer {key.timer_id!r} was written by a later command", field="timerId", code="later_command"
                )
            now_ms = self._engine.membership.now_ms()
            entry = shard.entries.get(key)
            is_sending = shard.is_sending(key)
            if is_sending and entry is not None and entry.started_at_ms:
                timer = attempted(timer, entry.started_at_ms)
            timer = not_held(timer)
            await shard.write(key, None, [cancelled(timer, namespace, now_ms)])
        self._telemetry.deleted.value += 1
        self._telemetry.outcomes.add(Outcome.CANCELLED.value)
        return Verdict.IN_FLIGHT if is_sending else Verdict.CANCELLED

    async def fire_now(self, shard: Shard, key: TimerKey) -> TimerView:
        """Make a scheduled timer due now. A timer in flight is not changed."""
        async with shard.key_lock(key):
            await self._namespaces.get(key.namespace)
            found = await self._find(shard, key)
            if found.timer is None:
                raise _not_scheduled(key, found)
            if is_held(found.timer):
                raise Conflict(
                    f"Timer {key.timer_id!r} is paused: resume it first", field="timerId", code="timer_paused"
                )
            if shard.is_sending(key):
                return view_of(shard, key, found)
            timer = await self._arm_now(shard, key, called_now(found.timer, self._engine.membership.now_ms()))
        await self._check_still_in_namespace(shard, timer, is_new=False)
        return TimerView(timer, State.SCHEDULED)

    async def replay(self, shard: Shard, key: TimerKey) -> TimerView:
        """Schedule a reached timer again, as a new timer that is due now."""
        async with shard.key_lock(key):
            await self._namespaces.get_for_create(key.namespace)
            found = await self._find(shard, key)
            if found.timer is not None:
                raise Conflict(
                    f"Timer {key.timer_id!r} is scheduled, not reached", field="timerId", code="timer_scheduled"
                )
            if found.reached is None or found.unreadable is not None:
                raise _not_scheduled(key, found)
            timer = called_again(found.reached.timer, self._engine.membership.now_ms())
            timer = await self._arm_now(shard, key, timer)
        await self._check_still_in_namespace(shard, timer, is_new=True)
        return TimerView(timer, State.SCHEDULED)

    async def _arm_now(self, shard: Shard, key: TimerKey, timer: Timer) -> Timer:
        now_ms = self._engine.membership.now_ms()
        timer = _replace(
            timer,
            generation=shard.next_generation(),
            execute_at_ms=now_ms,
            scheduled_at_ms=now_ms,
            attempts=0,
            extras=timer.extras.asked_for(),
        )
        await shard.write(key, timer, [])
        return timer

    async def _find(self, shard: Shard, key: TimerKey) -> Found:
        """What is stored for a key. The caller holds the key lock, so the row does not change until the caller writes.

        Waits for pending writes of this key: an answer must not depend on a write that may still fail.
        """
        while True:
            while (undecided := shard.undecided(key)) is not None:
                try:
                    await undecided
                except OutcomeUnknown:
                    raise StoreUnavailable(
                        "The outcome of an earlier write to this timer is unknown; this one was not applied"
                    ) from None
                except StoreError:
                    if shard.has_pending_write(key):
                        raise  # a settlement that cannot be written yet: a request must not wait for it without limit
                    # Otherwise the write was not applied: the previous timer is still stored.
            timer = shard.current(key)
            if timer is not UNKNOWN and timer is not None:
                return Found(timer)
            found = await self._engine.lookup.find(shard.shard_id, key)
            if shard.current(key) is UNKNOWN:
                return found  # otherwise it was loaded or settled during the read: check again


def view_of(shard: Shard | None, key: TimerKey, found: Found) -> TimerView:
    """What a user sees of a timer. Only its owner knows whether it is in flight (`shard` is None elsewhere)."""
    if found.timer is not None:
        is_sending = shard is not None and shard.is_sending(key)
        return TimerView(found.timer, State.IN_FLIGHT if is_sending else State.SCHEDULED)
    if found.unreadable is not None:
        raise _unreadable(key, found.unreadable)
    if found.reached is not None:
        return TimerView(found.reached.timer, State(found.reached.outcome.value), found.reached)
    raise _no_timer(key)


# Of a timer that was cancelled before it was created. No deliverer knows the scheme.
_NO_TARGET = "none:"


def _never_created(key: TimerKey, command: CommandPosition, generation: int, now_ms: int) -> Timer:
    """What is stored as cancelled, if a broker's cancel arrives before the command that creates the timer."""
    high, low = uuid_of(key.namespace, key.timer_id)
    return Timer(
        namespace=key.namespace,
        timer_id=key.timer_id,
        uuid_high=high,
        uuid_low=low,
        generation=generation,
        execute_at_ms=now_ms,
        scheduled_at_ms=now_ms,
        created_at_ms=now_ms,
        callback_url=_NO_TARGET,
        extras=Extras(command=command),
    )


def _is_after_its_cancel(command: CommandPosition | None, reached: Reached) -> bool:
    """Was the timer never created, only cancelled, by a command that stood before this one in the stream?"""
    timer, cancel = reached.timer, reached.timer.extras.command
    if command is None or cancel is None:
        return False
    return timer.callback_url == _NO_TARGET and command.is_after(cancel)


def _no_timer(key: TimerKey) -> NotFound:
    return NotFound(
        f"There is no timer {key.timer_id!r} in namespace {key.namespace!r}", field="timerId", code="timer_not_found"
    )


def _not_scheduled(key: TimerKey, found: Found) -> DuetimeError:
    if found.unreadable is not None:
        return _unreadable(key, found.unreadable)
    return _no_timer(key) if found.reached is None else _already_reached(key, found.reached)


def _unreadable(key: TimerKey, error: str) -> UnreadableTimer:
    return UnreadableTimer(
        f"Timer {key.timer_id!r} in namespace {key.namespace!r} is stored, but cannot be decoded and does not fire: "
        f"{error}. Create it again or delete it",
        field="timerId",
    )


def _already_reached(key: TimerKey, reached: Reached) -> Conflict:
    return Conflict(
        f"Timer {key.timer_id!r} is already reached: {reached.outcome}", field="timerId", code="already_reached"
    )


def _is_same(stored: Timer, asked: Timer, *, compare_time: bool) -> bool:
    return (
        stored.callback_url == asked.callback_url
        and stored.payload == asked.payload
        and stored.retry_policy == asked.retry_policy
        and stored.callback_timeout_seconds == asked.callback_timeout_seconds
        and stored.correlation_id == asked.correlation_id
        and stored.extras.headers == asked.extras.headers
        and stored.extras.tags == asked.extras.tags
        and stored.extras.missed == asked.extras.missed
        and stored.extras.flow_key == asked.extras.flow_key
        and schedule_of(stored) == schedule_of(asked)
        and (not compare_time or stored.scheduled_at_ms == asked.scheduled_at_ms)
    )
