"""What the result of an attempt makes of its timer: reached, retried later, or scheduled again.

Pure: no I/O, no clock, no randomness; time and jitter are parameters.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.domain.instants import parse_instant
from duetime.domain.timer import HOUR_MS, Extras, Namespace, Outcome, Reached, RetryPolicy, Timer

__all__ = [
    "ANSWER_BYTES_MAX",
    "ERROR_CHARS_MAX",
    "RETRY_AFTER_MAX_MS",
    "AttemptResult",
    "Contact",
    "Settlement",
    "armed_at",
    "attempted",
    "backoff_ms",
    "cancelled",
    "missed",
    "read_answer",
    "settle",
]


class Contact(enum.Enum):
    """How far an attempt got."""

    ANSWERED = "answered"  # an HTTP response with any status
    BROKEN = "broken"  # network error, timeout, malformed answer: the receiver may or may not have acted
    REFUSED = "refused"  # the target must not be called
    NOT_SENT = "not_sent"  # lease, ownership or generation changed before the first byte: not an attempt


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
    jitter: float,
) -> Settlement:
    """What the result of an attempt makes of its timer. `jitter` is in [0, 1)."""
    if result.contact is Contact.NOT_SENT:
        return Settlement(rearmed=armed_at(timer, max(timer.execute_at_ms, now_ms), occurrence_done=False))
    tried = attempted(timer, started_at_ms)
    if result.contact is Contact.REFUSED:
        return _ended(tried, namespace, Outcome.FAILED, now_ms, result.error or "refused")
    if result.contact is Contact.BROKEN:
        return _retry(tried, namespace, now_ms, jitter, None, result.error or "connection failed")
    status = result.status
    if 200 <= status < 300:
        return _settle_success(tried, result, namespace, now_ms, jitter)
    error = f"HTTP {status}"
    if status >= 500 or status in _RETRIED_STATUSES:
        return _retry(tried, namespace, now_ms, jitter, result.retry_after_ms, error)
    return _ended(tried, namespace, Outcome.FAILED, now_ms, error)


def _settle_success(
    timer: Timer, result: AttemptResult, namespace: Namespace, now_ms: int, jitter: float
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
        # A time in the past means now: a timer is never scheduled before the current time.
        rearmed = armed_at(timer, max(next_at_ms, now_ms), occurrence_done=bool(ok))
        if not ok:
            return Settlement(rearmed=_with_error(rearmed, "asked to be called again"))
        return Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), rearmed, True)
    if ok:
        return Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), None, True)
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
    """The settlement by the missed-fire policy of a timer about to be fired for the first time. None: fire it."""
    policy = timer.extras.missed
    if policy is None or timer.attempts:
        return None
    late_by_ms = now_ms - timer.scheduled_at_ms
    if policy.skip_if_late_by_ms is not None and late_by_ms > policy.skip_if_late_by_ms:
        return _ended(timer, namespace, Outcome.SKIPPED, now_ms, f"late by {late_by_ms} ms")
    if policy.fail_if_late_by_ms is not None and late_by_ms > policy.fail_if_late_by_ms:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, f"late by {late_by_ms} ms")
    return None


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
        later=old.later,
    )
    return msgspec.structs.replace(timer, attempts=timer.attempts + 1, extras=extras)


def _retry(
    timer: Timer,
    namespace: Namespace,
    now_ms: int,
    jitter: float,
    retry_after_ms: int | None,
    error: str,
) -> Settlement:
    policy = timer.retry_policy or namespace.retry_policy
    retries = timer.attempts
    if policy.max_retries is not None and retries > policy.max_retries:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, error)
    first = timer.extras.first_attempt_at_ms
    last_ms = (now_ms if first is None else first) + policy.max_duration_ms
    earliest_ms = now_ms + min(retry_after_ms or 0, RETRY_AFTER_MAX_MS)
    if now_ms >= last_ms or earliest_ms > last_ms:
        return _ended(timer, namespace, Outcome.FAILED, now_ms, error)
    # A pause never goes beyond the limit: the last attempt is made at the limit, whatever the jitter.
    execute_at_ms = max(earliest_ms, min(now_ms + backoff_ms(policy, retries, jitter), last_ms))
    return Settlement(rearmed=_with_error(armed_at(timer, execute_at_ms, occurrence_done=False), error))


def _ended(timer: Timer, namespace: Namespace, outcome: Outcome, now_ms: int, error: str) -> Settlement:
    return Settlement(reached=_reached(_with_error(timer, error), namespace, outcome, now_ms))


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
