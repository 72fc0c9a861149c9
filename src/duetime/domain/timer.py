"""The types: timers, namespaces, retry policies, and what users ask for and get. Pure.

Times are whole milliseconds since 1970 in UTC, durations whole milliseconds, and names end in their unit.
"""

from __future__ import annotations

import enum
import zlib
from hashlib import blake2b
from struct import Struct as Packing
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

SHARDS_MAX = 16_384
ID_BYTES_MAX = 255

# The format of the rows that this version writes. It never rewrites a row of a later format.
ROW_FORMAT = 1


# --- identity ------------------------------------------------------------------------------------


class TimerKey(NamedTuple):
    """The name of a timer: what users identify it by."""

    namespace: str
    timer_id: str


class Position(NamedTuple):
    """The position of a timer in its shard: the order in which timers are stored, loaded and listed."""

    execute_at_ms: int
    uuid_high: int
    uuid_low: int


BEFORE_ALL = Position(-1, 0, 0)

_two_signed_longs = Packing(">qq")
_length = Packing(">I")


def shard_of(timer_id: str, num_shards: int) -> int:
    return zlib.crc32(timer_id.encode()) % num_shards


def uuid_of(namespace: str, *parts: str) -> tuple[int, int]:
    """128 bits of BLAKE2b as two signed halves, so that every database and Python sort them in the same order.

    Every part but the last is prefixed with its length, so that ("a:b", "c") and ("a", "b:c") differ.
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


# --- timers --------------------------------------------------------------------------------------


class RetryPolicy(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, rename="camel"):
    """How an attempt that did not succeed is repeated. `max_retries=None`: until `max_duration_ms`."""

    max_retries: int | None = None
    initial_interval_ms: int = SECOND_MS
    backoff_multiplier: float = 2.0
    max_interval_ms: int = 10 * MINUTE_MS
    max_duration_ms: int = DAY_MS


class Missed(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True, rename="camel"):
    """What to do with a timer that could not be fired in time. Neither is set: fire it, however late."""

    skip_if_late_by_ms: int | None = None
    fail_if_late_by_ms: int | None = None


class Extras(Struct, frozen=True, gc=False, omit_defaults=True, kw_only=True):
    """The rarely used part of a timer: one JSON column. Its names are short because millions of them are stored."""

    headers: dict[str, str] | None = msgspec.field(default=None, name="h")
    tags: tuple[str, ...] = msgspec.field(default=(), name="t")
    missed: Missed | None = msgspec.field(default=None, name="m")
    occurrence: int = msgspec.field(default=0, name="o")
    first_attempt_at_ms: int | None = msgspec.field(default=None, name="f")
    last_attempt_at_ms: int | None = msgspec.field(default=None, name="l")
    late_by_ms: int | None = msgspec.field(default=None, name="b")
    last_error: str | None = msgspec.field(default=None, name="e")
    # Fields that a later version adds are stored here. This version does not know them, and keeps them (ADR 11).
    later: dict[str, Any] | None = msgspec.field(default=None, name="x")

    def asked_for(self, occurrence: int = 0) -> Extras:
        """Only what the user has asked for, without anything about attempts."""
        return Extras(headers=self.headers, tags=self.tags, missed=self.missed, occurrence=occurrence, later=self.later)


NO_EXTRAS = Extras()


class Timer(Struct, frozen=True, gc=False, kw_only=True):
    """One future callback. `execute_at_ms` is the time of the next attempt, `scheduled_at_ms` the requested time."""

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
    payload: str | None = None  # JSON text, byte for byte as it was received
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
        """The same for all attempts of one generation and occurrence: receivers use it to find duplicates."""
        return f"{uuid_hex(self.uuid_high, self.uuid_low)}.{self.generation:x}.{self.extras.occurrence}"


class Outcome(enum.StrEnum):
    """How a timer ended."""

    DELIVERED = "delivered"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class Reached(Struct, frozen=True, gc=False, kw_only=True, rename={"outcome": "ending"}):
    """A timer that is over, kept for the retention. `timer` has its last values."""

    timer: Timer
    outcome: Outcome
    reached_at_ms: int
    purge_at_ms: int

    @property
    def position(self) -> Position:
        """Reached rows are ordered by the time they are purged, so that a purge is one range delete.

        The uuid is that of the occurrence: one timer may be reached many times in a millisecond.
        """
        t = self.timer
        high, low = uuid_of(t.namespace, t.timer_id, f"{t.generation}.{t.extras.occurrence}")
        return Position(self.purge_at_ms, high, low)


class State(enum.StrEnum):
    """The state of a timer, as users see it."""

    SCHEDULED = "scheduled"
    IN_FLIGHT = "inFlight"
    DELIVERED = "delivered"
    FAILED = "failed"
    SKIPPED = "skipped"
    CANCELLED = "cancelled"


class TimerView(Struct, frozen=True, gc=False):
    """A timer and its state: the answer of get, list, create and update."""

    timer: Timer
    state: State
    reached: Reached | None = None


class Verdict(enum.StrEnum):
    """The state in which an update or a delete found the timer."""

    UPDATED = "updated"
    CANCELLED = "cancelled"
    IN_FLIGHT = "inFlight"
    ALREADY_REACHED = "alreadyReached"


class Namespace(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """A scope of timer ids, and the defaults of its timers. `num_shards` never changes, not even if the namespace is
    deleted and created again."""

    name: str
    num_shards: int
    created_at_ms: int
    revision: int = 0
    deleted: bool = False
    deleting: bool = False  # is being deleted, if it has no timers: no timer is created in it meanwhile
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


# --- requests ------------------------------------------------------------------------------------


class TimerSpec(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A create: everything about a timer that the user decides. Exactly one of `execute_at_ms` and `delay_ms`."""

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
    """An update: UNSET keeps the stored value, None sets the default."""

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


# --- answers -------------------------------------------------------------------------------------


class Created(Struct, frozen=True, gc=False):
    view: TimerView
    replaced: bool | None  # None: unknown; the timer is stored, but the answer of the store was lost
    existed: bool = False  # `ifAbsent` found the timer: nothing was created


class Updated(Struct, frozen=True, gc=False):
    view: TimerView
    verdict: Verdict
