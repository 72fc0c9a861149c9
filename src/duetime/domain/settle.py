"""What the result of an attempt makes of its timer: reached, retried later, or scheduled again.

Pure: no I/O, no clock, no randomness; time and jitter are parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.domain.instants import format_instant, parse_instant
from duetime.domain.recurrence import (
    LATE_MS,
    SKIPPED_IF_LATE_BY_MS,
    at_occurrence,
    following,
    held,
    next_instant_ms,
    not_held,
    position_of,
    with_state,
)
from duetime.domain.timer import HOUR_MS, Extras, Namespace, Outcome, Reached, RetryPolicy, Timer
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import InvalidField

__all__ = [
    "ANSWER_BYTES_MAX",
    "ERROR_CHARS_MAX",
    "NO_ATTEMPT",
    "RETRY_AFTER_MAX_MS",
    "AttemptResult",
    "Contact",
    "Settlement",
    "armed_at",
    "attempted",
    "backoff_ms",
    "cancelled",
    "caught_up",
    "missed",
    "read_answer",
    "resumed",
    "settle",
]


class Contact(enum.Enum):
    """How far an attempt got."""

    ANSWERED = "answered"  # an HTTP response with any status
    ACCEPTED = "accepted"  # a message broker has stored the message: that is the whole answer
    BROKEN = "broken"  # network error, timeout, malformed answer: the receiver may or may not have acted
    UNREACHABLE = "unreachable"  # no connection: the name, the connect or TLS failed; every target there would fail
    TIMED_OUT = "timed_out"  # no connection within the timer's deadline; other timers may have more time to connect
    REFUSED = "refused"  # the target must not be called
    NOT_SENT = "not_sent"  # lease, ownership or generation changed before the first byte: not an attempt
    SHORTAGE = "shortage"  # this instance has no socket or no lookup to spare: not an attempt, try again soon
    AWAY = "away"  # there is no connection to the message broker: not an attempt, all of its targets wait


NO_ATTEMPT = frozenset({Contact.NOT_SENT, Contact.SHORTAGE, Contact.AWAY})


class AttemptResult(Struct, frozen=True, gc=False):
    """What a Deliverer returns. A failed attempt is a value too, never an exception."""

    contact: Contact
    status: int = 0
    body: bytes = b""
    retry_after_ms: int | None = None
    error: str | None = None
    truncated: bool = False  # `body` is only the first part of the response body


class Settlement(Struct, frozen=True, gc=False):
    """What follows an attempt: the timer is reached, or scheduled again, or both (delivered, and the receiver asked for
    another call)."""

    reached: Reached | None = None
    rearmed: Timer | None = None
    succeeded: bool = False


class _Answer(Struct, gc=False):
    ok: msgspec.Raw | UnsetType = UNSET
    next_execute_at: str | None = msgspec.field(default=None, name="nextExecuteAt")


_RETRIED_STATUSES = frozenset({408, 425, 429})
_decode_answer = msgspec.json.Decoder(_Answer).decode
RETRY_AFTER_MAX_MS = HOUR_MS
ANSWER_BYTES_MAX = 64 * 1024  # of a receiver's answer; the rest is not read
ERROR_CHARS_MAX = 500


def settle(
    timer: Timer,
    result: AttemptResult,
    namespace: Namespace,
    *,
    started_at_ms: int,
    now_ms: int,
    jitter: Callable[[], float],
    rearm_interval_min_ms: int = 0,
) -> Settlement:
    """What the result of an attempt makes of its timer. `jitter` returns a number in [0, 1) and is called
    only for a retry. `rearm_interval_min_ms`: a receiver that asks for another call gets it at the earliest this long
    after the start of this attempt."""
    if result.contact in NO_ATTEMPT:
        return Settlement(rearmed=armed_at(timer, max(timer.execute_at_ms, now_ms), occurrence_done=False))
    tried = attempted(timer, started_at_ms)
    if result.contact is Contact.REFUSED:
        return _ended(tried, namespace, Outcome.FAILED, now_ms, result.error or "refused")
    if result.contact in (Contact.BROKEN, Contact.UNREACHABLE, Contact.TIMED_OUT):
        return _retry(tried, namespace, now_ms, jitter, None, result.error or "connection failed")
    status = result.status
    if 200 <= status < 300:
        return _settle_success(tried, result, namespace, now_ms, jitter, started_at_ms + rearm_interval_min_ms)
    if result.contact is Contact.ACCEPTED:
        delivered = Settlement(_reached(tried, namespace, Outcome.DELIVERED, now_ms), None, True)
        return delivered if tried.extras.later is None else _continued(delivered, now_ms)
    error = f"HTTP {status}"
    if status >= 500 or status in _RETRIED_STATUSES:
        return _retry(tried, namespace, now_ms, jitter, result.retry_after_ms, error)
    return _ended(tried, namespace, Outcome.FAILED, now_ms, error)


def _settle_success(
    timer: Timer,
    result: AttemptResult,
    namespace: Namespace,
    now_ms: int,
    jitter: Callable[[], float],
    again_from_ms: int,
) -> Settlement:
    ok, next_at_ms, problem = read_answer(result.body, truncated=result.truncated)
    if ok is None and problem is None:
        if namespace.require_ok:
            problem = 'the namespace requires {"ok": true}, the answer has no "ok"'
        else:
            ok = True
    if problem is not None:
        return _retry(timer, namespace, now_ms, jitter, result.retry_after_ms, problem)
    if next_at_ms is not None:
        # A time in the past means as soon as possible. Without a least interval one timer could be called all the time.
        next_at_ms = max(next_at_ms, now_ms, again_from_ms)
        if not ok:
            return _retry_at(timer, namespace, now_ms, next_at_ms, "asked to be called again")
        rearmed = armed_at(timer, next_at_ms, occurrence_done=True)
        delivered = Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), rearmed, True)
        return delivered if timer.extras.later is None else _continued(delivered, now_ms)
    if ok:
        delivered = Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), None, True)
        return delivered if timer.extras.later is None else _continued(delivered, now_ms)
    return _retry(timer, namespace, now_ms, jitter, result.retry_after_ms, 'answered "ok": false')


def read_answer(body: bytes, *, truncated: bool = False) -> tuple[bool | None, int | None, str | None]:
    """(ok, next time, problem) of a 2xx body. A body that is not a JSON object has none of them."""
    first = body.lstrip()[:1]
    if truncated and first in (b"{", b""):
        # The part that was not read may contain "ok": false. After white space alone an object may follow.
        return None, None, f"the answer is larger than {ANSWER_BYTES_MAX} bytes and was not read to the end"
    if first != b"{":
        return None, None, None
    try:
        answer = _decode_answer(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None, None, None
        return None, None, "the answer's nextExecuteAt is not a string"
    ok: bool | None = None
    if answer.ok is not UNSET:
        raw = bytes(answer.ok)
        if raw not in (b"true", b"false"):
            return None, None, 'the answer\'s "ok" is neither true nor false'
        ok = raw == b"true"
    if answer.next_execute_at is None:
        return ok, None, None
    try:
        next_at_ms = parse_instant(answer.next_execute_at)
    except ValueError as error:
        return None, None, f"the answer's nextExecuteAt {error}"
    return ok, next_at_ms, None


def armed_at(timer: Timer, execute_at_ms: int, *, occurrence_done: bool) -> Timer:
    """The timer scheduled for a new time: as a new occurrence (attempts start at 0), or as the same one again."""
    if not occurrence_done:
        return msgspec.structs.replace(timer, execute_at_ms=execute_at_ms)
    extras = timer.extras.asked_for(timer.extras.occurrence + 1)
    return msgspec.structs.replace(
        timer, execute_at_ms=execute_at_ms, scheduled_at_ms=execute_at_ms, attempts=0, extras=extras
    )


def missed(timer: Timer, namespace: Namespace, now_ms: int) -> Settlement | None:
    """The settlement without a call of a timer about to be fired: by its schedule, or, before the first attempt, by its
    missed-fire policy. None: fire it."""
    if timer.extras.later is not None:
        settlement = caught_up(timer, namespace, now_ms)
        if settlement is not None:
            return settlement
    policy = timer.extras.missed
    if policy is None or timer.attempts:
        return None
    late_by_ms = now_ms - timer.scheduled_at_ms
    if policy.skip_if_late_by_ms is not None and late_by_ms > policy.skip_if_late_by_ms:
        return _ended(timer, namespace, Outcome.SKIPPED, now_ms, f"late by {late_by_ms} ms")
    if policy.fail_if_late_by_ms is not None and late_by_ms > policy.fail_if_late_by_ms:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, f"late by {late_by_ms} ms")
    return None


# --- timers with a schedule ----------------------------------------------------------------------


def resumed(timer: Timer, namespace: Namespace, now_ms: int) -> Settlement:
    """What becomes of a paused timer that is resumed. A pause counts as an outage. Neither `reached` nor `rearmed`: its
    schedule has ended."""
    state = position_of(timer)
    timer = not_held(timer)
    if state is None or timer.execute_at_ms < HELD_MS:
        return caught_up(timer, namespace, now_ms, late_ms=0) or Settlement(rearmed=timer)
    occurrence = following(state, now_ms)
    if occurrence is None:
        return Settlement()
    rearmed = armed_at(timer, occurrence.instant_ms, occurrence_done=False)
    rearmed = msgspec.structs.replace(rearmed, scheduled_at_ms=occurrence.instant_ms)
    state = msgspec.structs.replace(at_occurrence(state, occurrence, now_ms), held_ms=None)
    return Settlement(rearmed=with_state(rearmed, state))


def caught_up(timer: Timer, namespace: Namespace, now_ms: int, late_ms: int = LATE_MS) -> Settlement | None:
    """The end of an occurrence that gives way to later ones: its retries end when the next one is due, and occurrences
    that passed while nothing ran are left out by `catchUp`. None: it is called."""
    state = position_of(timer)
    if state is None or state.schedule is None:
        return None
    late_by_ms = now_ms - timer.scheduled_at_ms
    if not timer.attempts and (late_by_ms <= late_ms or state.schedule.catch_up == "all"):
        return None
    next_ms = _next_ms(state)
    if next_ms is not None and next_ms <= now_ms:
        reason = f"superseded by the occurrence at {format_instant(next_ms)}"
    elif _is_skipped(timer, state.schedule, late_by_ms):
        reason = f"late by {late_by_ms} ms"
    else:
        return None
    if timer.attempts:
        last = timer.extras.last_error
        return _ended(timer, namespace, Outcome.FAILED, now_ms, reason if last is None else f"{reason}; {last}")
    return _ended(timer, namespace, Outcome.SKIPPED, now_ms, reason)


def _is_skipped(timer: Timer, schedule: Schedule, late_by_ms: int) -> bool:
    is_repeated = schedule.repeat is not None and schedule.catch_up == "skip"
    return is_repeated and not timer.attempts and late_by_ms > SKIPPED_IF_LATE_BY_MS


def _continued(settlement: Settlement, now_ms: int) -> Settlement:
    """An occurrence has ended, in whatever way: with it the next one is scheduled."""
    reached = settlement.reached
    assert reached is not None
    timer = reached.timer
    state = position_of(timer)
    if state is None or state.schedule is None:
        return settlement
    try:
        if settlement.rearmed is not None:  # the receiver asks for a call in addition, before the next occurrence
            next_ms = next_instant_ms(state)
            if next_ms is None or settlement.rearmed.execute_at_ms < next_ms:
                extra = with_state(settlement.rearmed, msgspec.structs.replace(state, asked="", local=""))
                return Settlement(reached, extra, settlement.succeeded)
            warning = f"nextExecuteAt is ignored: the next occurrence is at {format_instant(next_ms)}"
            reached = msgspec.structs.replace(reached, timer=_with_error(timer, warning))
        occurrence = following(state, now_ms)
    except InvalidField as error:
        # By the time-zone rules of this instance it cannot be computed. Paused, the timer is not lost.
        stopped = with_state(timer, msgspec.structs.replace(state, asked="", local=""))
        stopped = held(armed_at(stopped, HELD_MS, occurrence_done=True))
        return Settlement(reached, _with_error(stopped, f"paused: {error}"), settlement.succeeded)
    if occurrence is None:
        return Settlement(reached, None, settlement.succeeded)
    rearmed = armed_at(timer, occurrence.instant_ms, occurrence_done=True)
    return Settlement(reached, with_state(rearmed, at_occurrence(state, occurrence, now_ms)), settlement.succeeded)


def _next_ms(state: ScheduleState) -> int | None:
    """None also if it cannot be computed: then nothing follows the pending occurrence until it has ended."""
    try:
        return next_instant_ms(state)
    except InvalidField:
        return None


def _is_superseded(timer: Timer, at_ms: int) -> bool:
    """Would a retry at this time come after the next occurrence?"""
    state = position_of(timer)
    next_ms = None if state is None else _next_ms(state)
    return next_ms is not None and at_ms >= next_ms


def cancelled(timer: Timer, namespace: Namespace, now_ms: int) -> Reached:
    return _reached(timer, namespace, Outcome.CANCELLED, now_ms)


def backoff_ms(policy: RetryPolicy, retries: int, jitter: float) -> int:
    """The pause before retry number `retries` (from 1): exponential, capped, full jitter."""
    try:
        ceiling = min(policy.max_interval_ms, policy.initial_interval_ms * policy.backoff_multiplier ** (retries - 1))
    except OverflowError:  # more than a float can hold is more than any limit
        ceiling = policy.max_interval_ms
    return int(ceiling * jitter)


def attempted(timer: Timer, started_at_ms: int) -> Timer:
    old = timer.extras
    first = old.first_attempt_at_ms
    late_by_ms = old.late_by_ms
    if first is None:
        first, late_by_ms = started_at_ms, started_at_ms - timer.scheduled_at_ms
    extras = Extras(
        headers=old.headers,
        tags=old.tags,
        missed=old.missed,
        occurrence=old.occurrence,
        first_attempt_at_ms=first,
        last_attempt_at_ms=started_at_ms,
        late_by_ms=late_by_ms,
        flow_key=old.flow_key,
        command=old.command,
        later=old.later,
    )
    return msgspec.structs.replace(timer, attempts=timer.attempts + 1, extras=extras)


def _retry(
    timer: Timer,
    namespace: Namespace,
    now_ms: int,
    jitter: Callable[[], float],
    retry_after_ms: int | None,
    error: str,
) -> Settlement:
    policy = timer.retry_policy or namespace.retry_policy
    earliest_ms = now_ms + min(retry_after_ms or 0, RETRY_AFTER_MAX_MS)
    last_ms = _last_retry_ms(timer, policy, now_ms)
    if last_ms is None or earliest_ms > last_ms:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, error)
    # A pause never goes beyond the limit: the last attempt is made at the limit, whatever the jitter.
    execute_at_ms = max(earliest_ms, min(now_ms + backoff_ms(policy, timer.attempts, jitter()), last_ms))
    if timer.extras.later is not None and _is_superseded(timer, execute_at_ms):
        return _ended(timer, namespace, Outcome.FAILED, now_ms, f"superseded by the next occurrence; {error}")
    return Settlement(rearmed=_with_error(armed_at(timer, execute_at_ms, occurrence_done=False), error))


def _retry_at(timer: Timer, namespace: Namespace, now_ms: int, at_ms: int, error: str) -> Settlement:
    """A retry at the time that the receiver asked for, within the same limits as any other."""
    last_ms = _last_retry_ms(timer, timer.retry_policy or namespace.retry_policy, now_ms)
    if last_ms is None or at_ms > last_ms:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, error)
    if timer.extras.later is not None and _is_superseded(timer, at_ms):
        return _ended(timer, namespace, Outcome.FAILED, now_ms, f"superseded by the next occurrence; {error}")
    return Settlement(rearmed=_with_error(armed_at(timer, at_ms, occurrence_done=False), error))


def _last_retry_ms(timer: Timer, policy: RetryPolicy, now_ms: int) -> int | None:
    """Until when a retry of this timer may be made. None: there is none left."""
    if policy.max_retries is not None and timer.attempts > policy.max_retries:
        return None
    first = timer.extras.first_attempt_at_ms
    last_ms = (now_ms if first is None else first) + policy.max_duration_ms
    return None if now_ms >= last_ms else last_ms


def _ended(timer: Timer, namespace: Namespace, outcome: Outcome, now_ms: int, error: str) -> Settlement:
    settlement = Settlement(reached=_reached(_with_error(timer, error), namespace, outcome, now_ms))
    return settlement if timer.extras.later is None else _continued(settlement, now_ms)


def _reached(timer: Timer, namespace: Namespace, outcome: Outcome, now_ms: int) -> Reached:
    return Reached(
        timer=timer,
        outcome=outcome,
        reached_at_ms=now_ms,
        purge_at_ms=now_ms + namespace.retention_ms(outcome),
    )


def _with_error(timer: Timer, error: str) -> Timer:
    return msgspec.structs.replace(
        timer, extras=msgspec.structs.replace(timer.extras, last_error=error[:ERROR_CHARS_MAX])
    )
