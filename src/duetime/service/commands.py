"""What the owner of a shard does with a wish about one of its timers: check it, read if need be, write.

Everything here happens on the instance that holds the shard; `service.py` finds that instance. Commands about one
timer are carried out in the order in which they arrived, whatever each of them has to wait for (`Shard.key_lock`): if a
client got `outcome_unknown` and writes again, its first write must not be applied after the second.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import UNSET

from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.instants import LATEST_MS
from duetime.domain.timer import (
    NO_EXTRAS,
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
    attempted,
    cancelled,
    uuid_of,
)
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
from duetime.store import Found, Store

__all__ = ["Admitted", "Commands", "Writing", "view_of"]

Writing = asyncio.Future[WriteResult]
# A create that waits for its commit.
Admitted = tuple[Shard, Timer, Writing]

_replace = msgspec.structs.replace


class Commands:
    def __init__(self, config: Config, engine: Engine, store: Store, deliverer: Deliverer) -> None:
        self._config = config
        self._engine = engine
        self._store = store
        self._deliverer = deliverer
        self._namespaces = engine.namespaces
        self._telemetry = engine.telemetry

    # --- create -----------------------------------------------------------------------------------

    def admit(self, shard: Shard, namespace: Namespace, spec: TimerSpec) -> Admitted | None:
        """The common create, without waiting for anything but the commit. None: this one has to wait."""
        key = TimerKey(spec.namespace, spec.timer_id)
        if spec.if_absent or shard.is_locked(key):
            return None
        timer = self._timer_of(spec, namespace, shard)
        return shard, timer, shard.write(key, timer, [])

    async def create(self, shard: Shard, spec: TimerSpec) -> Created:
        """Upsert: whatever timer has this id is replaced."""
        key = TimerKey(spec.namespace, spec.timer_id)
        async with shard.key_lock(key):
            namespace = await self._namespaces.get_for_create(spec.namespace)
            timer = self._timer_of(spec, namespace, shard)
            if spec.if_absent and (there := await self._already_there(shard, key, spec, timer)):
                return there
            _, replaced = await shard.write(key, timer, [])
        return await self._created(shard, timer, replaced)

    async def created(self, admitted: Admitted) -> Created:
        """The answer to a create that `admit` has admitted, once it is on disk."""
        shard, timer, writing = admitted
        _, replaced = await writing
        return self.acknowledged(timer, replaced) or await self._created(shard, timer, replaced)

    def acknowledged(self, timer: Timer, replaced: bool | None) -> Created | None:
        """It is on disk. None: whether its namespace still exists must be read first, see `created`."""
        if self._namespaces.usable(timer.namespace) is None:
            return None
        self._telemetry.created.value += 1
        return Created(TimerView(timer, State.SCHEDULED), replaced)

    async def _created(self, shard: Shard, timer: Timer, replaced: bool | None) -> Created:
        await self._check_still_in_namespace(shard, timer, is_new=replaced is False)
        self._telemetry.created.value += 1
        return Created(TimerView(timer, State.SCHEDULED), replaced)

    async def _check_still_in_namespace(self, shard: Shard, timer: Timer, *, is_new: bool) -> None:
        """A timer was written. It is acknowledged only if a recent read of the namespaces still shows its namespace:
        deleting a namespace waits longer than such a read stays valid and then looks for timers, so it finds all that
        were acknowledged (service.delete_namespace). If the namespace is being deleted, a timer that was not there
        before (`is_new`) is removed again. One that was there keeps its namespace: the deletion finds it."""
        try:
            await (self._namespaces.get_for_create if is_new else self._namespaces.get)(timer.namespace)
        except (NotFound, Unserved):
            if not is_new:
                raise OutcomeUnknown("stored, but the namespace was deleted") from None
            await self._remove(shard, timer)
            raise
        except StoreError as error:
            raise OutcomeUnknown(f"stored, but whether the namespace still exists is not known: {error}") from error

    async def _remove(self, shard: Shard, timer: Timer) -> None:
        """Remove a timer whose namespace was deleted while it was written, unless it has begun to fire."""
        try:
            async with shard.key_lock(timer.key):
                found = await self._find(shard, timer.key)
                if found.timer == timer and not shard.is_sending(timer.key):
                    await shard.write(timer.key, None, [])
                    return
        except DuetimeError as error:
            raise OutcomeUnknown(f"the namespace was deleted, and the timer may be left in it: {error}") from error
        raise OutcomeUnknown("the namespace was deleted, and the timer has begun to fire")

    async def _already_there(self, shard: Shard, key: TimerKey, spec: TimerSpec, timer: Timer) -> Created | None:
        """`ifAbsent`: the same request again gets the same answer, another one a conflict, also after the end."""
        found = await self._find(shard, key)
        if found.unreadable is not None:
            raise _unreadable(key, found.unreadable)
        stored = found.timer or (found.reached.timer if found.reached is not None else None)
        if stored is None:
            return None
        if not _same_wish(stored, timer, compare_time=spec.delay_ms is None):
            raise Conflict(
                f"Timer {key.timer_id!r} exists in namespace {key.namespace!r} and is different",
                field="timerId",
                code="timer_exists",
            )
        return Created(view_of(shard, key, found), replaced=False, existed=True)

    def _timer_of(self, spec: TimerSpec, namespace: Namespace, shard: Shard) -> Timer:
        created_at_ms, execute_at_ms = self._instants(spec.execute_at_ms, spec.delay_ms)
        callback_url = spec.callback_url or namespace.callback_url
        if callback_url is None:
            raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
        self.check_target(callback_url)
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
            created_at_ms=created_at_ms,
            callback_url=callback_url,
            payload=spec.payload,
            retry_policy=spec.retry_policy,
            callback_timeout_seconds=spec.callback_timeout_seconds,
            correlation_id=spec.correlation_id,
            extras=extras,
        )

    def _instants(self, execute_at_ms: int | None, delay_ms: int | None) -> tuple[int, int]:
        """Now, and the time to execute at. A delay is exactly the difference of the two."""
        membership = self._engine.membership
        if execute_at_ms is not None:
            return membership.now_ms(), execute_at_ms
        if delay_ms is None:
            raise InvalidField("executeAt", "one of executeAt and delay is required")
        now_ms = membership.latest_now_ms()
        if now_ms + delay_ms >= LATEST_MS:
            raise InvalidField("delay", "delay must end before 9999-01-01T00:00:00Z")
        return now_ms, now_ms + delay_ms

    def check_target(self, url: str) -> None:
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

    # --- update, delete, fire now, replay ---------------------------------------------------------

    async def update(self, shard: Shard, key: TimerKey, patch: TimerPatch) -> Updated:
        """Change a scheduled timer. The verdict tells whether its old self was already on its way."""
        async with shard.key_lock(key):
            namespace = await self._namespaces.get(key.namespace)
            found = await self._find(shard, key)
            timer = found.timer
            if timer is None:
                raise _not_scheduled(key, found)
            changed = self._patched(timer, patch, namespace)
            verdict = Verdict.IN_FLIGHT if shard.is_sending(key) else Verdict.UPDATED
            changed = _replace(changed, generation=shard.next_generation())
            await shard.write(key, changed, [])
        await self._check_still_in_namespace(shard, changed, is_new=False)
        self._telemetry.updated.value += 1
        return Updated(TimerView(changed, State.SCHEDULED), verdict)

    def _patched(self, timer: Timer, patch: TimerPatch, namespace: Namespace) -> Timer:
        """The timer with the patch applied. Only a new time makes its attempts start over: a timer that is being
        retried was fired on time, so the missed-fire policy must not apply to it."""
        extras = timer.extras
        changed = _replace(
            timer,
            extras=_replace(
                extras,
                headers=extras.headers if patch.headers is UNSET else patch.headers or None,
                tags=extras.tags if patch.tags is UNSET else patch.tags or (),
                missed=extras.missed if patch.missed is UNSET else patch.missed,
            ),
        )
        if patch.execute_at_ms is not UNSET or patch.delay_ms is not UNSET:
            _, at_ms = self._instants(
                None if patch.execute_at_ms is UNSET else patch.execute_at_ms,
                None if patch.delay_ms is UNSET else patch.delay_ms,
            )
            changed = _replace(
                changed, execute_at_ms=at_ms, scheduled_at_ms=at_ms, attempts=0, extras=changed.extras.asked_for()
            )
        if patch.headers is not UNSET:
            self._check_headers(patch.headers)
        if patch.callback_url is not UNSET:
            url = patch.callback_url or namespace.callback_url
            if url is None:
                raise InvalidField("callbackUrl", "callbackUrl is required: the namespace has no default target")
            self.check_target(url)
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

    async def delete(self, shard: Shard, key: TimerKey) -> Verdict:
        """After this is answered no delivery starts. The verdict tells whether one had."""
        async with shard.key_lock(key):
            namespace = await self._namespaces.get(key.namespace)
            found = await self._find(shard, key)
            timer = found.timer
            if found.unreadable is not None:
                await shard.write(key, None, [])
                return Verdict.CANCELLED
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
        self._telemetry.outcomes.add(Outcome.CANCELLED.value)
        return Verdict.IN_FLIGHT if sending else Verdict.CANCELLED

    async def fire_now(self, shard: Shard, key: TimerKey) -> TimerView:
        """Make a scheduled timer due at once; one already on its way is left to it."""
        async with shard.key_lock(key):
            await self._namespaces.get(key.namespace)
            found = await self._find(shard, key)
            if found.timer is None:
                raise _not_scheduled(key, found)
            if shard.is_sending(key):
                return view_of(shard, key, found)
            timer = await self._arm_now(shard, key, found.timer)
        await self._check_still_in_namespace(shard, timer, is_new=False)
        return TimerView(timer, State.SCHEDULED)

    async def replay(self, shard: Shard, key: TimerKey) -> TimerView:
        """Arm a reached timer again, as a new one that is due at once."""
        async with shard.key_lock(key):
            await self._namespaces.get_for_create(key.namespace)
            found = await self._find(shard, key)
            if found.timer is not None:
                raise Conflict(
                    f"Timer {key.timer_id!r} is scheduled, not reached", field="timerId", code="timer_scheduled"
                )
            if found.reached is None or found.unreadable is not None:
                raise _not_scheduled(key, found)
            timer = await self._arm_now(shard, key, found.reached.timer)
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
        """What is on disk under a key. The caller is `key_lock` with it, so it stays so until he writes.

        Waits for whatever was admitted before: an answer must not rest on a write that may still fail.
        """
        while True:
            while (undecided := shard.undecided(key)) is not None:
                try:
                    await undecided
                except OutcomeUnknown:
                    raise StoreUnavailable(
                        "An earlier write about this timer is not decided yet; not applied"
                    ) from None
                except StoreError:
                    if shard.has_pending_write(key):
                        raise  # an outcome that cannot be recorded yet: the request must not wait for it without limit
                    # It was not applied: the previous timer is still there.
            timer = shard.current(key)
            if timer is not UNKNOWN and timer is not None:
                return Found(timer)
            found = await self._engine.lookup.find(shard.shard_id, key)
            if shard.current(key) is UNKNOWN:
                return found  # otherwise it was loaded, or settled, while we were reading


def view_of(shard: Shard | None, key: TimerKey, found: Found) -> TimerView:
    """What a user sees. Whether it is in flight only its owner knows."""
    if found.timer is not None:
        sending = shard is not None and shard.is_sending(key)
        return TimerView(found.timer, State.IN_FLIGHT if sending else State.SCHEDULED)
    if found.unreadable is not None:
        raise _unreadable(key, found.unreadable)
    if found.reached is not None:
        return TimerView(found.reached.timer, State(found.reached.outcome.value), found.reached)
    raise _no_timer(key)


def _no_timer(key: TimerKey) -> NotFound:
    return NotFound(
        f"There is no timer {key.timer_id!r} in namespace {key.namespace!r}", field="timerId", code="timer_not_found"
    )


def _not_scheduled(key: TimerKey, found: Found) -> DuetimeError:
    if found.unreadable is not None:
        return _unreadable(key, found.unreadable)
    return _no_timer(key) if found.reached is None else _is_over(key, found.reached)


def _unreadable(key: TimerKey, error: str) -> UnreadableTimer:
    return UnreadableTimer(
        f"Timer {key.timer_id!r} in namespace {key.namespace!r} is stored, but cannot be decoded, and does not fire: "
        f"{error}. Create it again, or delete it",
        field="timerId",
    )


def _is_over(key: TimerKey, reached: Reached) -> Conflict:
    return Conflict(f"Timer {key.timer_id!r} is over: {reached.outcome}", field="timerId", code="already_reached")


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
