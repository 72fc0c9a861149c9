"""The types that a user of the client passes in and gets back. They mirror the JSON structs of `wire`.

Instants are aware datetimes, payloads are plain Python values, an absent value is None. A unit test compares these
types with `wire`, field by field.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict

import msgspec
from msgspec import Struct

from duetime.domain.flow_status import FlowState
from duetime.domain.timer import Outcome, State, Verdict
from duetime.errors import InvalidField
from duetime.wire import IfReached, MissedJson, RetryPolicyJson, ScheduleJson

# --- input --------------------------------------------------------------------------------------


class RetryPolicy(RetryPolicyJson, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """How failed attempts are retried. Durations are text such as "90s". A field that is left out has its default."""


class Missed(MissedJson, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """What happens to a timer that fires too late. Give one of the two fields, as a duration such as "10m"."""


class Schedule(ScheduleJson, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=False):
    """A wall-clock schedule: local times in a zone, as text. A field that is left out has its default."""


Delay = timedelta | str | float


class NewTimer(Struct, frozen=True, gc=False):
    """A timer to create. Give exactly one of `at` (an aware datetime, or RFC 3339 text), `delay` (a float is in
    seconds) and `schedule` (local times in a zone)."""

    timer_id: str
    at: datetime | str | None = None
    delay: Delay | None = None
    callback_url: str | None = None
    payload: Any = None
    retry_policy: RetryPolicy | Mapping[str, Any] | None = None
    callback_timeout_seconds: int | None = None
    headers: Mapping[str, str] | None = None
    correlation_id: str | None = None
    tags: Sequence[str] = ()
    missed: Missed | Mapping[str, Any] | None = None
    if_absent: bool = False
    namespace: str | None = None
    flow_key: str | None = None
    if_reached: IfReached | None = None
    schedule: Schedule | Mapping[str, Any] | None = None


class TimerChanges(TypedDict, total=False):
    """Fields of an update. A field that is left out does not change; None resets it to the default."""

    at: datetime | str
    delay: Delay
    schedule: Schedule | Mapping[str, Any] | None
    callback_url: str | None
    payload: Any
    retry_policy: RetryPolicy | Mapping[str, Any] | None
    callback_timeout_seconds: int | None
    headers: Mapping[str, str] | None
    correlation_id: str | None
    tags: Sequence[str] | None
    missed: Missed | Mapping[str, Any] | None
    flow_key: str | None
    namespace: str


class TimerFilter(TypedDict, total=False):
    """A timer matches if it meets all conditions. `due_from` is inclusive, `due_until` is exclusive.

    `payloads=False`: the payload of every timer is None, also if it has one. `all_namespaces=True`: timers of all
    namespaces, one after the other by name; only with a `correlation_id`, and with a token for `admin` in all of them.
    """

    state: State | str
    due_from: datetime | str
    due_until: datetime | str
    tag: str
    id_prefix: str
    correlation_id: str
    namespace: str
    all_namespaces: bool
    payloads: bool


class NamespaceSettings(TypedDict, total=False):
    """A field that is left out has its default (create) or does not change (update). None resets it to the default."""

    callback_url: str | None
    retry_policy: RetryPolicy | Mapping[str, Any] | None
    callback_timeout_seconds: int | None
    require_ok: bool | None
    delivered_retention: timedelta | str | None
    failed_retention: timedelta | str | None
    payload_bytes_max: int | None
    creates_per_second: int | None
    requests_per_second: int | None
    signing_secrets: Sequence[str] | None


class FlowLimits(TypedDict, total=False):
    """The limits of a flow, in the whole cluster: calls per second, and calls in flight at once. One that is left out
    does not change. None clears it."""

    rate: float | None
    concurrency: int | None


class _CreateJson(Struct, gc=False, omit_defaults=True, rename="camel"):
    """The JSON of a `NewTimer`: as wire.CreateTimerJson, but the payload is any Python value."""

    timer_id: str
    namespace: str
    execute_at: datetime | str | None = None
    delay: str | None = None
    callback_url: str | None = None
    payload: Any = None
    retry_policy: RetryPolicy | Mapping[str, Any] | None = None
    callback_timeout_seconds: int | None = None
    headers: Mapping[str, str] | None = None
    correlation_id: str | None = None
    tags: Sequence[str] = ()
    missed: Missed | Mapping[str, Any] | None = None
    if_absent: bool = False
    flow_key: str | None = None
    if_reached: str | None = None
    schedule: Schedule | Mapping[str, Any] | None = None


_encode = msgspec.json.Encoder().encode


def encode_new(new: NewTimer, namespace: str) -> bytes:
    if (new.at is not None) + (new.delay is not None) + (new.schedule is not None) != 1:
        raise InvalidField("at", "give exactly one of at, delay and schedule")
    return encode_json(
        _CreateJson(
            new.timer_id,
            namespace if new.namespace is None else new.namespace,
            None if new.at is None else _instant("at", new.at),
            None if new.delay is None else _duration("delay", new.delay),
            new.callback_url,
            new.payload,
            new.retry_policy,
            new.callback_timeout_seconds,
            new.headers,
            new.correlation_id,
            new.tags,
            new.missed,
            new.if_absent,
            new.flow_key,
            new.if_reached,
            new.schedule,
        )
    )


def encode_json(value: Any) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise InvalidField(None, f"cannot be encoded as JSON: {error}") from None


def _instant(field: str, at: datetime | str) -> datetime | str:
    if isinstance(at, str):
        return at
    if at.tzinfo is None:
        raise InvalidField(field, f"{field} must be an aware datetime, as in datetime.now(UTC)")
    return at if at.tzinfo is UTC else at.astimezone(UTC)


def _duration(field: str, value: Delay) -> str:
    if isinstance(value, str):
        return value
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not 0 <= seconds < math.inf:
        raise InvalidField(field, f"{field} must be finite and not negative")
    # Rounded up, so that it is never early; round() first, or 1.1 s would become 1101 ms.
    return f"{math.ceil(round(seconds * 1_000, 3))}ms"


_WIRE_NAMES = {"at": "executeAt", "namespace": "namespace"}
_INSTANTS = frozenset({"at", "due_from", "due_until", "from"})
_DURATIONS = frozenset({"delay", "delivered_retention", "failed_retention"})


def to_wire(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as fields of a JSON request: names in camelCase, instants and durations as text."""
    wired: dict[str, Any] = {}
    for name, value in fields.items():
        if value is not None and name in _INSTANTS:
            value = _instant(name, value)
        elif value is not None and name in _DURATIONS:
            value = _duration(name, value)
        wired[_WIRE_NAMES.get(name) or _camel(name)] = value
    return wired


@functools.cache
def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# --- results ------------------------------------------------------------------------------------


class Timer(Struct, frozen=True, kw_only=True, rename="camel"):
    """A timer. `scheduled_at` is the time that was asked for, `execute_at` the time of the next attempt."""

    namespace: str
    timer_id: str
    state: State
    execute_at: datetime
    scheduled_at: datetime
    created_at: datetime
    attempts: int
    callback_url: str
    payload: Any = None
    retry_policy: RetryPolicy | None = None
    callback_timeout_seconds: int | None = None
    correlation_id: str | None = None
    tags: tuple[str, ...] = ()
    headers: dict[str, str] | None = None
    missed: Missed | None = None
    flow_key: str | None = None
    schedule: Schedule | None = None
    occurrence: int | None = None  # the number of the pending one, from 1
    scheduled_at_local: str | None = None  # of an occurrence of the schedule, with the offset
    tzdata: str | None = None
    paused: bool = False
    outcome: Outcome | None = None
    reached_at: datetime | None = None
    first_attempt_at: datetime | None = None
    last_attempt_at: datetime | None = None
    late_by_ms: int | None = None
    last_error: str | None = None

    @property
    def is_over(self) -> bool:
        """It was reached: no attempt will follow."""
        return self.outcome is not None


class Created(Struct, frozen=True):
    """`replaced`: there was a scheduled timer with that id (None: unknown, because a response of the database was
    lost). `existed`: with `if_absent`, the timer existed already and was not changed. An earlier attempt of the same
    call, whose response was lost, may have created it. With `if_reached="ignore"`: it was over and was not changed."""

    timer: Timer
    replaced: bool | None
    existed: bool = False


class Updated(Struct, frozen=True):
    timer: Timer
    verdict: Verdict


class Page(Struct, frozen=True, rename="camel"):
    timers: list[Timer]
    next_cursor: str | None = None


class Namespace(Struct, frozen=True, kw_only=True, rename="camel"):
    """A namespace. Its signing secrets are redacted. In an update, a redacted secret means: keep this one."""

    namespace: str
    num_shards: int
    retry_policy: RetryPolicy
    callback_timeout_seconds: int
    require_ok: bool
    delivered_retention: str
    failed_retention: str
    created_at: datetime
    callback_url: str | None = None
    payload_bytes_max: int | None = None
    creates_per_second: int | None = None
    requests_per_second: int | None = None
    signing_secrets: tuple[str, ...] = ()
    paused: bool = False


class Flow(Struct, frozen=True, kw_only=True, rename="camel"):
    """A flow: the timers of a namespace with the same flow key. `waiting` and `in_flight` are sums over all members.
    `until` is when an open breaker lets a call through again. `rate` and `concurrency` are the limits that are set."""

    namespace: str
    flow_key: str
    origin: str
    state: FlowState
    waiting: int
    in_flight: int
    until: datetime | None = None
    last_error: str | None = None
    rate: float | None = None
    concurrency: int | None = None


class Unanswered(Struct, frozen=True, kw_only=True, rename="camel"):
    """A live instance that did not answer: what it knows of the flows is missing."""

    instance_id: str
    address: str
    reason: str


class FlowPage(Struct, frozen=True, rename="camel"):
    flows: list[Flow]
    next_cursor: str | None = None
    unanswered: tuple[Unanswered, ...] = ()


class Occurrence(Struct, frozen=True, kw_only=True, rename="camel"):
    """An instant of a schedule. `local` is its local time with offset, `asked` the local time that the schedule asks
    for, `because` why the two may differ: "gap", "fold", "feb29", or None."""

    at: datetime
    local: str
    asked: str
    because: str | None = None


class SchedulePreview(Struct, frozen=True, kw_only=True, rename="camel"):
    """The next instants of a schedule; `tzdata` is the version of the time-zone rules of the server."""

    instants: tuple[Occurrence, ...]
    tzdata: str


class HeldFor(Struct, frozen=True, kw_only=True, rename="camel"):
    """A flow whose due timers are held. `destination` is its flow key."""

    destination: str
    held: int
    in_flight: int
    failures: int
    breaker_open: bool
    last_error: str | None = None


class Broker(Struct, frozen=True, kw_only=True, rename="camel"):
    """The connection of an instance to a message broker. `consuming` is None if no commands are read from it; `waiting`
    are the commands that wait there for all instances, `retrying` those that this instance has handed back, `refused`
    those that became dead letters since it has started."""

    name: str
    connected: bool
    away_reason: str | None = None
    consuming: bool | None = None
    not_consuming_reason: str | None = None
    waiting: int | None = None
    in_flight: int
    unacknowledged: int | None = None
    retrying: int = 0
    retry_reason: str | None = None
    refused: int = 0
    refused_ago_ms: int | None = None
    refusal_reason: str | None = None
    remark: str | None = None


class Member(Struct, frozen=True, kw_only=True, rename="camel"):
    """An instance. `unreachable` is the reason why it could not be asked. Fields that only the instance itself knows
    are None if it is dead or unreachable."""

    instance_id: str
    address: str
    alive: bool
    self_: bool = msgspec.field(name="self")
    shards: int
    joined_at: datetime
    unreachable: str | None = None
    version: str | None = None
    ready: bool | None = None
    reason: str | None = None
    lease_ms: int | None = None
    clock_skew_ms: int | None = None
    in_memory: int | None = None
    in_flight: int | None = None
    held: int | None = None
    writes_waiting: int | None = None
    unreadable: int | None = None
    oldest_due_ms: int | None = None
    lateness_p50_ms: float | None = msgspec.field(name="latenessP50Ms", default=None)
    lateness_p99_ms: float | None = msgspec.field(name="latenessP99Ms", default=None)
    held_for: tuple[HeldFor, ...] = ()
    brokers: tuple[Broker, ...] = ()


class Shard(Struct, frozen=True, kw_only=True, rename="camel"):
    shard_id: int
    version: int
    owner_id: str | None = None
    owner_address: str | None = None
    in_memory: int | None = None
    horizon: datetime | None = None


class ShardCounts(Struct, frozen=True, kw_only=True, rename="camel"):
    total: int
    owned: int
    free: int
    of_dead: int


class ClusterStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """The whole cluster. Counts are sums over all members that answered; lateness, clock skew and the age of the oldest
    due timer are the worst of them. `ready` and `version` are those of the instance that was asked."""

    instance_id: str
    version: str
    store: str
    ready: bool
    clock_skew_max_ms: int
    dead_after_ms: int
    members: tuple[Member, ...]
    shard_counts: ShardCounts
    unowned_shards: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    in_memory: int
    in_flight: int
    held: int
    writes_waiting: int
    unreadable: int = 0
    paused_namespaces: int = 0
    clock_skew_ms: int
    reason: str | None = None
    oldest_due_ms: int | None = None
    lateness_p50_ms: float | None = msgspec.field(name="latenessP50Ms", default=None)
    lateness_p99_ms: float | None = msgspec.field(name="latenessP99Ms", default=None)
