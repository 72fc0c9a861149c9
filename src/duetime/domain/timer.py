"""The types: timers, namespaces, retry policies, and what users ask for and get. Pure.

Times are whole milliseconds since 1970 in UTC, durations whole milliseconds, and names end in their unit.
"""

from __future__ import annotations

import enum
import zlib
from functools import lru_cache
from hashlib import blake2b
from struct import Struct as Packing
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from duetime.domain.wall_clock import Schedule, ScheduleState

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS

SHARDS_MAX = 16_384
SHARDS_BY_SIZE = {"small": 16, "medium": 256, "large": 1_024, "xlarge": 4_096}
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
    digest = _digest_of(namespace).copy()
    *heads, last = parts
    for head in heads:
        digest.update(_with_length(head))
    digest.update(last.encode())
    high, low = _two_signed_longs.unpack(digest.digest())
    return high, low


@lru_cache(maxsize=1_024)  # most timers are in one of a few namespaces
def _digest_of(namespace: str) -> blake2b:
    return blake2b(_with_length(namespace), digest_size=16)


def _with_length(part: str) -> bytes:
    data = part.encode()
    return _length.pack(len(data)) + data


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


_CLOCKS_DIFFER_MS = 60_000


class CommandPosition(Struct, frozen=True, gc=False, array_like=True):
    """Where a command stood in the stream of a message broker: with it a command that arrives late is recognised."""

    stream: str  # the stream or partition in which commands have an order
    sequence: int
    at_ms: int  # when it was put into the stream

    def is_after(self, other: CommandPosition) -> bool:
        """Commands of different streams have no order: the one that arrives later counts as later. The time decides
        where numbers start again, because a stream was deleted and created again: if it is later by more than the
        clocks of publishers, which set it in Kafka, may differ."""
        if self.stream != other.stream or self.sequence > other.sequence:
            return True
        return self.at_ms > other.at_ms + _CLOCKS_DIFFER_MS


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
    flow_key: str | None = msgspec.field(default=None, name="k")  # None: the URL without its query
    command: CommandPosition | None = msgspec.field(default=None, name="c")  # of a broker, which wrote this timer last
    # Fields that a later version adds are stored here. This version does not know them, and keeps them (ADR 11). With a
    # schedule or a pause it is an array, so that a version that would ignore them does not fire the timer (ADR 39).
    later: dict[str, Any] | ScheduleState | None = msgspec.field(default=None, name="x")

    def asked_for(self, occurrence: int = 0) -> Extras:
        """Only what the user has asked for, without anything about attempts."""
        return Extras(
            headers=self.headers,
            tags=self.tags,
            missed=self.missed,
            occurrence=occurrence,
            flow_key=self.flow_key,
            command=self.command,
            later=self.later,
        )


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
        # Asked for several times for each write: this leaves out the constructor, which is a function in Python.
        return tuple.__new__(TimerKey, (self.namespace, self.timer_id))

    @property
    def position(self) -> Position:
        return tuple.__new__(Position, (self.execute_at_ms, self.uuid_high, self.uuid_low))

    @property
    def late_from_ms(self) -> int:
        """From when on the server is late with it: the requested time, but not before the timer existed. A time in the
        past, or a command that arrived late, is not the server's lateness."""
        return max(self.scheduled_at_ms, self.created_at_ms)

    @property
    def flow_key(self) -> str:
        """The flow of the timer in its namespace: limits, breaker and pause are per flow."""
        return self.extras.flow_key or self.callback_url.partition("?")[0]

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


class FlowLimits(Struct, frozen=True, kw_only=True, omit_defaults=True, rename="camel"):
    """What the operator has set for one flow. None: the server's default."""

    rate: float | None = None  # calls per second, in the whole cluster
    concurrency: int | None = None  # calls in flight at once, in the whole cluster
    paused: bool = False


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
    creates_per_second: int | None = None  # None: the server's default
    requests_per_second: int | None = None  # None: the server's default
    signing_secrets: tuple[str, ...] = ()
    paused: bool = False  # none of its timers fires
    flows: dict[str, FlowLimits] = {}  # by flow key, those that differ from the default
    later: dict[str, Any] | None = None  # as in Extras

    def retention_ms(self, outcome: Outcome) -> int:
        return self.failed_retention_ms if outcome is Outcome.FAILED else self.delivered_retention_ms


# --- requests ------------------------------------------------------------------------------------


class TimerSpec(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """A create: everything about a timer that the user decides. Exactly one of `execute_at_ms`, `delay_ms` and
    `schedule`: an instance of a version without schedules refuses the create, because it finds no time."""

    namespace: str
    timer_id: str
    execute_at_ms: int | None = None
    delay_ms: int | None = None
    schedule: Schedule | None = None
    callback_url: str | None = None
    payload: str | None = None
    retry_policy: RetryPolicy | None = None
    callback_timeout_seconds: int | None = None
    correlation_id: str | None = None
    headers: dict[str, str] | None = None
    tags: tuple[str, ...] = ()
    missed: Missed | None = None
    flow_key: str | None = None
    if_absent: bool = False
    ignore_reached: bool = False  # `ifReached: "ignore"`: a timer that is over is not created again
    command: CommandPosition | None = None  # of a broker's command; only together with `ignore_reached`
    says_existed: bool = False  # `ifAbsent` or `ifReached` was given: the answer says whether the timer existed


# A version that knows neither schedules nor pauses ignores these fields of a patch. With this delay it refuses the
# patch, which is then certainly not applied; a version that knows them ignores the delay.
NOT_BY_OLDER_VERSIONS_MS = 10**15


class TimerPatch(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An update: UNSET keeps the stored value, None sets the default. With `schedule` or `paused`, `delay_ms` is
    NOT_BY_OLDER_VERSIONS_MS if there is no new time."""

    execute_at_ms: int | UnsetType = UNSET
    delay_ms: int | UnsetType = UNSET
    schedule: Schedule | UnsetType | None = UNSET
    paused: bool | UnsetType = UNSET  # alone: `timers/pause` and `timers/resume`
    callback_url: str | UnsetType | None = UNSET
    payload: str | UnsetType | None = UNSET
    retry_policy: RetryPolicy | UnsetType | None = UNSET
    callback_timeout_seconds: int | UnsetType | None = UNSET
    correlation_id: str | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType | None = UNSET
    tags: tuple[str, ...] | UnsetType | None = UNSET
    missed: Missed | UnsetType | None = UNSET
    flow_key: str | UnsetType | None = UNSET


class TimerFilter(Struct, frozen=True, kw_only=True):
    namespace: str | None  # None: all of them; only together with a correlation id
    state: State | None = None  # None: the scheduled ones first, then the reached ones
    due_from_ms: int | None = None
    due_until_ms: int | None = None
    tag: str | None = None
    id_prefix: str | None = None
    correlation_id: str | None = None
    payloads: bool = True  # False: the timers of the answer have no payloads
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
    creates_per_second: int | UnsetType | None = UNSET
    requests_per_second: int | UnsetType | None = UNSET
    signing_secrets: tuple[str, ...] | UnsetType = UNSET


# --- answers -------------------------------------------------------------------------------------


class Created(Struct, frozen=True, gc=False):
    view: TimerView
    replaced: bool | None  # None: unknown; the timer is stored, but the answer of the store was lost
    existed: bool = False  # the timer was found, and nothing was changed: `ifAbsent`, `ifReached`, or a late command


class Updated(Struct, frozen=True, gc=False):
    view: TimerView
    verdict: Verdict
