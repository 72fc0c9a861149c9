"""The vocabulary: timers, namespaces, retry policies, and what becomes of a timer after an attempt.

Pure: no I/O, no clock, no randomness; time and jitter come in as values. Times are whole milliseconds
since 1970 in UTC, durations whole milliseconds, and names end in their unit.
"""

from __future__ import annotations

import enum
import zlib
from hashlib import blake2b
from struct import Struct as Packing
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.domain.instants import parse_instant

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

SHARDS_MAX = 16_384
ID_BYTES_MAX = 255

# The format of the rows this version writes. A row of a later format is never rewritten by this one.
ROW_FORMAT = 1


# --- identity ------------------------------------------------------------------------------------


class TimerKey(NamedTuple):
    """What a user calls a timer."""

    namespace: str
    timer_id: str


class Position(NamedTuple):
    """Where a timer stands in its shard: the order in which timers are stored, loaded and listed."""

    execute_at_ms: int
    uuid_high: int
    uuid_low: int


BEFORE_ALL = Position(-1, 0, 0)

_two_signed_longs = Packing(">qq")
_length = Packing(">I")


def shard_of(timer_id: str, num_shards: int) -> int:
    return zlib.crc32(timer_id.encode()) % num_shards


def uuid_of(namespace: str, *parts: str) -> tuple[int, int]:
    """128 bits of BLAKE2b as two signed halves, so that every database and Python order them alike.

    Every part but the last is length-prefixed: ("a:b", "c") and ("a", "b:c") must differ.
    """
    digest = blake2b(digest_size=16)
    last = namespace
    for part in parts:
        head = last.encode()
        digest.update(_length.pack(len(head)) + head)
        last = part
    digest.update(last.encode())
    high, low = _two_signed_longs.unpack(digest.digest())
    return high, low


def uuid_hex(high: int, low: int) -> str:
    return _two_signed_longs.pack(high, low).hex()


# --- what a timer is -----------------------------------------------------------------------------


class RetryPolicy(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, rename="camel"):
    """How an attempt that did not succeed is repeated. `max_retries=None`: until `max_duration_ms`."""

    max_retries: int | None = None
    initial_interval_ms: int = SECOND_MS
    backoff_multiplier: float = 2.0
    max_interval_ms: int = 10 * MINUTE_MS
    max_duration_ms: int = DAY_MS


class Missed(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, rename="camel"):
    """What to do with a timer that could not be fired in time. Neither set: fire it however late."""

    skip_if_late_by_ms: int | None = None
    fail_if_late_by_ms: int | None = None


class Extras(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The rarer part of a timer: one JSON column. Short names, because they are stored by the million."""

    headers: dict[str, str] | None = msgspec.field(default=None, name="h")
    tags: tuple[str, ...] = msgspec.field(default=(), name="t")
    missed: Missed | None = msgspec.field(default=None, name="m")
    occurrence: int = msgspec.field(default=0, name="o")
    first_attempt_at_ms: int | None = msgspec.field(default=None, name="f")
    last_attempt_at_ms: int | None = msgspec.field(default=None, name="l")
    late_by_ms: int | None = msgspec.field(default=None, name="b")
    last_error: str | None = msgspec.field(default=None, name="e")
    # What a later version adds goes in here: this one does not understand it, and hands it on (ADR 11).
    later: dict[str, Any] | None = msgspec.field(default=None, name="x")

    def asked_for(self, occurrence: int = 0) -> Extras:
        """Only what the user has asked for: nothing was attempted yet."""
        return Extras(headers=self.headers, tags=self.tags, missed=self.missed, occurrence=occurrence, later=self.later)


NO_EXTRAS = Extras()


class Timer(Struct, frozen=True, gc=False, kw_only=True):
    """One future callback. `execute_at_ms` is the next try, `scheduled_at_ms` the time that was asked for."""

    namespace: str
    timer_id: str
    uuid_high: int
    uuid_low: int
    generation: int
    execute_at_ms: int
    scheduled_at_ms: int
    created_at_ms: int
    callback_url: str
    attempts: int = 0
    payload: str | None = None  # JSON text, byte for byte as it came
    retry_policy: RetryPolicy | None = None  # None: the namespace's
    callback_timeout_seconds: int | None = None  # None: the namespace's
    correlation_id: str | None = None
    extras: Extras = NO_EXTRAS

    @property
    def key(self) -> TimerKey:
        return TimerKey(self.namespace, self.timer_id)

    @property
    def position(self) -> Position:
        return Position(self.execute_at_ms, self.uuid_high, self.uuid_low)

    @property
    def delivery_id(self) -> str:
        """Stable over retries, new for a new generation or occurrence: what receivers deduplicate by."""
        return f"{uuid_hex(self.uuid_high, self.uuid_low)}.{self.generation:x}.{self.extras.occurrence}"


class Outcome(enum.StrEnum):
    """How a timer ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class Reached(Struct, frozen=True, gc=False, kw_only=True, rename={"outcome": "ending"}):
    """A timer that is over, kept for the retention. `timer` is how it stood at its end."""

    timer: Timer
    outcome: Outcome
    reached_at_ms: int
    purge_at_ms: int

    @property
    def position(self) -> Position:
        """Reached rows are ordered by when they may go, so that a retention is one range delete.

        The uuid is that of the occurrence: one timer may end many times in a millisecond.
        """
        t = self.timer
        high, low = uuid_of(t.namespace, t.timer_id, f"{t.generation}.{t.extras.occurrence}")
        return Position(self.purge_at_ms, high, low)


class State(enum.StrEnum):
    """What a user sees of a timer."""

    SCHEDULED = "scheduled"
    IN_FLIGHT = "inFlight"
    DELIVERED = "delivered"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class TimerView(Struct, frozen=True, gc=False):
    """A timer and the state it is in: what get, list, create and update answer with."""

    timer: Timer
    state: State
    reached: Reached | None = None


class Verdict(enum.StrEnum):
    """What an update or a delete met."""

    UPDATED = "updated"
    CANCELLED = "cancelled"
    IN_FLIGHT = "inFlight"
    ALREADY_REACHED = "alreadyReached"


class Namespace(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """Scope of timer ids, and the defaults of its timers. `num_shards` never changes, not even by
    deleting the namespace and making it again."""

    name: str
    num_shards: int
    created_at_ms: int
    revision: int = 0
    deleted: bool = False
    deleting: bool = False  # about to be deleted if it is empty: no timer is created in it meanwhile
    callback_url: str | None = None
    retry_policy: RetryPolicy = RetryPolicy()
    callback_timeout_seconds: int = 10
    require_ok: bool = False
    delivered_retention_ms: int = DAY_MS
    failed_retention_ms: int = 30 * DAY_MS
    payload_bytes_max: int | None = None
    signing_secrets: tuple[str, ...] = ()
    later: dict[str, Any] | None = None  # as in Extras

    def retention_ms(self, outcome: Outcome) -> int:
        return self.failed_retention_ms if outcome is Outcome.FAILED else self.delivered_retention_ms


SECRET_PREFIX = "whsec_"  # noqa: S105 (a prefix, not a password)
_REDACTED = (SECRET_PREFIX + "…", SECRET_PREFIX + "...")


def redacted_secret(secret: str) -> str:
    """A signing secret as it may be shown: enough to tell it from its neighbours, not enough to sign."""
    return f"{SECRET_PREFIX}…{secret[-4:]}"


def is_redacted_secret(text: str) -> bool:
    return text.startswith(_REDACTED)


def kept_secrets(given: tuple[str, ...], stored: tuple[str, ...]) -> tuple[str, ...]:
    """The secrets an update asks for: a redacted one stands for the stored secret it is shown for.

    So a namespace can be read, changed and sent back, and a secret rotated without knowing the old one.
    Raises ValueError with a message that reads on after the field's name.
    """
    secrets: list[str] = []
    for secret in given:
        if is_redacted_secret(secret):
            matching = [known for known in stored if redacted_secret(known)[-4:] == secret[-4:]]
            if len(matching) != 1:
                raise ValueError(f"has {secret!r}, which stands for {len(matching)} of the stored secrets, not for one")
            secret = matching[0]
        if secret not in secrets:
            secrets.append(secret)
    return tuple(secrets)


# --- what a user asks for ------------------------------------------------------------------------


class TimerSpec(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A create: everything about a timer that its user decides. Exactly one of `execute_at_ms`, `delay_ms`."""

    namespace: str
    timer_id: str
    execute_at_ms: int | None = None
    delay_ms: int | None = None
    callback_url: str | None = None
    payload: str | None = None
    retry_policy: RetryPolicy | None = None
    callback_timeout_seconds: int | None = None
    correlation_id: str | None = None
    headers: dict[str, str] | None = None
    tags: tuple[str, ...] = ()
    missed: Missed | None = None
    if_absent: bool = False


class TimerPatch(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An update: UNSET keeps what is stored, None sets back to the default."""

    execute_at_ms: int | UnsetType = UNSET
    delay_ms: int | UnsetType = UNSET
    callback_url: str | UnsetType | None = UNSET
    payload: str | UnsetType | None = UNSET
    retry_policy: RetryPolicy | UnsetType | None = UNSET
    callback_timeout_seconds: int | UnsetType | None = UNSET
    correlation_id: str | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType | None = UNSET
    tags: tuple[str, ...] | UnsetType | None = UNSET
    missed: Missed | UnsetType | None = UNSET


class TimerFilter(Struct, frozen=True, kw_only=True):
    namespace: str
    state: State | None = None  # None: the scheduled ones first, then the reached ones
    due_from_ms: int | None = None
    due_until_ms: int | None = None
    tag: str | None = None
    id_prefix: str | None = None
    correlation_id: str | None = None
    limit: int = 100
    cursor: str | None = None


class NamespaceSpec(Struct, frozen=True, kw_only=True):
    """What a user decides about a namespace. UNSET: the default at create, unchanged at update."""

    name: str
    num_shards: int | UnsetType = UNSET
    callback_url: str | UnsetType | None = UNSET
    retry_policy: RetryPolicy | UnsetType = UNSET
    callback_timeout_seconds: int | UnsetType = UNSET
    require_ok: bool | UnsetType = UNSET
    delivered_retention_ms: int | UnsetType = UNSET
    failed_retention_ms: int | UnsetType = UNSET
    payload_bytes_max: int | UnsetType | None = UNSET
    signing_secrets: tuple[str, ...] | UnsetType = UNSET


# --- what a user is answered ---------------------------------------------------------------------


class Created(Struct, frozen=True, gc=False):
    view: TimerView
    replaced: bool | None  # None: not known; it is stored, but the answer of the store was lost
    existed: bool = False  # `ifAbsent` found it: nothing was created


class Updated(Struct, frozen=True, gc=False):
    view: TimerView
    verdict: Verdict


# --- what becomes of an attempt ------------------------------------------------------------------


class Contact(enum.Enum):
    """How far an attempt got."""

    ANSWERED = "answered"  # an HTTP answer, whatever it says
    BROKEN = "broken"  # network error, timeout, malformed answer: the receiver may or may not have acted
    REFUSED = "refused"  # the target may not be called at all
    NOT_SENT = "not_sent"  # lease, ownership or generation changed before the first byte: not an attempt


class AttemptResult(Struct, frozen=True, gc=False):
    """What a Deliverer returns, always as a value, never as an exception."""

    contact: Contact
    status: int = 0
    body: bytes = b""
    retry_after_ms: int | None = None
    error: str | None = None
    truncated: bool = False  # there was more body than `body` holds


class Settlement(Struct, frozen=True, gc=False):
    """What happens next: the timer ended, or is armed again, or both (delivered, and asked for more)."""

    reached: Reached | None = None
    rearmed: Timer | None = None
    succeeded: bool = False


class _Answer(Struct, gc=False):
    ok: msgspec.Raw | UnsetType = UNSET
    next_execute_at: str | None = msgspec.field(default=None, name="nextExecuteAt")


_RETRIED_STATUSES = frozenset({408, 425, 429})
_decode_answer = msgspec.json.Decoder(_Answer).decode
RETRY_AFTER_MAX_MS = HOUR_MS
ANSWER_BYTES_MAX = 64 * 1024  # of a receiver's answer; a longer one is cut
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
    """The settle table of the design: what the result of an attempt makes of its timer. `jitter` is in [0, 1)."""
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
            problem = 'the namespace demands {"ok": true}, the answer has no "ok"'
        else:
            ok = True
    if problem is not None:
        return _retry(timer, namespace, now_ms, jitter, result.retry_after_ms, problem)
    if next_at_ms is not None:
        # A time that is past means at once: nothing is ever armed behind the present.
        rearmed = armed_at(timer, max(next_at_ms, now_ms), occurrence_done=bool(ok))
        if not ok:
            return Settlement(rearmed=_with_error(rearmed, "asked to be called again"))
        return Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), rearmed, True)
    if ok:
        return Settlement(_reached(timer, namespace, Outcome.DELIVERED, now_ms), None, True)
    return _retry(timer, namespace, now_ms, jitter, result.retry_after_ms, 'answered "ok": false')


def read_answer(body: bytes, *, truncated: bool = False) -> tuple[bool | None, int | None, str | None]:
    """(ok, next time, problem) of a 2xx body. Anything that is not a JSON object says nothing."""
    first = body.lstrip()[:1]
    if truncated and first in (b"{", b""):
        # The part that was not read may say "ok": false. If only white space was read, an object may follow.
        return None, None, f"the answer is larger than {ANSWER_BYTES_MAX} bytes and cannot be judged"
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
    """The timer set to a new time: a new occurrence (attempts start over), or the same one once more."""
    if not occurrence_done:
        return msgspec.structs.replace(timer, execute_at_ms=execute_at_ms)
    extras = timer.extras.asked_for(timer.extras.occurrence + 1)
    return msgspec.structs.replace(
        timer, execute_at_ms=execute_at_ms, scheduled_at_ms=execute_at_ms, attempts=0, extras=extras
    )


def missed(timer: Timer, namespace: Namespace, now_ms: int) -> Settlement | None:
    """What the missed-fire policy says of a timer about to be fired for the first time, if anything."""
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
    except OverflowError:  # more than a float can say is more than any cap
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
    # A pause that would pass the limit ends at it: the last attempt is made there, whatever the dice said.
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
