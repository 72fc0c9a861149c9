"""Requests about timers, and their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.domain.timer import Outcome, State, Verdict
from duetime.wire.parts import (
    AnswerJson,
    CallbackUrl,
    CorrelationId,
    DurationText,
    FlowKeyOfTimer,
    Headers,
    InstantText,
    MissedJson,
    NamespaceOfTimer,
    Payload,
    RequestJson,
    RetryPolicyJson,
    Tags,
    TimeoutSeconds,
    TimerId,
)
from duetime.wire.problems import ProblemJson
from duetime.wire.schedules import ScheduleJson

_WHERE = "The URL that the callback is sent to with POST. {}: the `callbackUrl` of the namespace."
_RETRY = "How failed attempts are retried. {}: the policy of the namespace."
IfReached = Literal["replace", "ignore"]
_FLOW_KEY = (
    "The flow that the timer belongs to: limits, breaker and pause are per flow (`flows/*`). 1 to 255 bytes of UTF-8 "
    "without NUL, not a URL with a query. {}: the URL that is called, without its query."
)
_MISSED = "What to do if the timer could not be fired in time. {}: fire it however late."


# --- requests ----------------------------------------------------------------------------------


class TimerRefJson(RequestJson, kw_only=True):
    """The name of a timer."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"


class CreateTimerJson(RequestJson, kw_only=True):
    """A timer to create. It replaces a scheduled timer with the same id. Exactly one of `executeAt`, `delay` and
    `schedule` is required."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"
    execute_at: Annotated[InstantText, Meta(description="When to call. A time in the past means now.")] | None = None
    delay: Annotated[DurationText, Meta(description="When to call, as the time from now.")] | None = None
    schedule: Annotated[
        ScheduleJson | None, Meta(description="When to call, as local times in a time zone, once or repeated.")
    ] = None
    callback_url: Annotated[CallbackUrl | None, Meta(description=_WHERE.format("Omitted"))] = None
    payload: Payload | UnsetType = UNSET
    retry_policy: Annotated[RetryPolicyJson | None, Meta(description=_RETRY.format("Omitted"))] = None
    callback_timeout_seconds: TimeoutSeconds | None = None
    headers: Headers | None = None
    correlation_id: CorrelationId | None = None
    tags: Tags | None = None
    missed: Annotated[MissedJson | None, Meta(description=_MISSED.format("Omitted"))] = None
    flow_key: Annotated[FlowKeyOfTimer | None, Meta(description=_FLOW_KEY.format("Omitted"))] = None
    if_absent: Annotated[
        bool | UnsetType,
        Meta(
            description="true: never replace a timer. If the same timer exists, it is answered as it is, also if it is "
            "reached and still stored; if a different one exists, the answer is a 409."
        ),
    ] = UNSET
    if_reached: Annotated[
        IfReached | UnsetType,
        Meta(
            description="What happens if a timer with this id is reached and still stored. `replace`: a new one is "
            "created, which fires (the default). `ignore`: nothing is created, whatever its values, and the reached "
            "timer is answered with `existed: true`. A scheduled timer is replaced either way."
        ),
    ] = UNSET


class UpdateTimerJson(RequestJson, kw_only=True):
    """The fields to change. Omitted fields keep their values; `null` sets the default."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"
    execute_at: InstantText | UnsetType = UNSET
    delay: DurationText | UnsetType = UNSET
    schedule: Annotated[
        ScheduleJson | UnsetType | None,
        Meta(
            description="Another schedule; its first occurrence takes the place of the pending one. `null`: none, the "
            "pending call is the last. (`executeAt` and `delay` move the pending call of a schedule, and no other.)"
        ),
    ] = UNSET
    callback_url: Annotated[CallbackUrl | UnsetType | None, Meta(description=_WHERE.format("`null`"))] = UNSET
    payload: Payload | UnsetType = UNSET
    retry_policy: Annotated[RetryPolicyJson | UnsetType | None, Meta(description=_RETRY.format("`null`"))] = UNSET
    callback_timeout_seconds: TimeoutSeconds | UnsetType | None = UNSET
    headers: Headers | UnsetType | None = UNSET
    correlation_id: CorrelationId | UnsetType | None = UNSET
    tags: Tags | UnsetType | None = UNSET
    missed: Annotated[MissedJson | UnsetType | None, Meta(description=_MISSED.format("`null`"))] = UNSET
    flow_key: Annotated[FlowKeyOfTimer | UnsetType | None, Meta(description=_FLOW_KEY.format("`null`"))] = UNSET


class CreateTimersJson(RequestJson):
    """Up to 1,000 timers. Each succeeds or fails by itself."""

    timers: list[CreateTimerJson]


class DeleteTimersJson(RequestJson):
    """Up to 1,000 timers. Each succeeds or fails by itself."""

    timers: list[TimerRefJson]


class RawTimersJson(RequestJson):
    """One of the two above, with items that are not decoded yet: a wrong item must not affect the others."""

    timers: list[Raw]


class ListTimersJson(RequestJson, kw_only=True):
    """A filter for the timers of one namespace, or, by their correlation id, of all. All conditions must be met."""

    namespace: NamespaceOfTimer = "default"
    all_namespaces: Annotated[
        bool,
        Meta(
            description="true: timers of all namespaces, one namespace after the other by name; only together with "
            "`correlationId`, without `namespace`, and with the verb `admin` for all namespaces."
        ),
    ] = False
    state: Annotated[State, Meta(description="Omitted: first the scheduled timers, then the reached ones.")] | None = (
        None
    )
    due_from: Annotated[InstantText, Meta(description="Due at this time or later.")] | None = None
    due_until: Annotated[InstantText, Meta(description="Due before this time.")] | None = None
    tag: Annotated[str, Meta(description="Has this tag.")] | None = None
    id_prefix: Annotated[str, Meta(description="timerId begins with this.")] | None = None
    correlation_id: Annotated[str, Meta(description="Has this correlationId.")] | None = None
    payloads: Annotated[
        bool, Meta(description="false: the timers have no `payload`, whether they are stored with one or not.")
    ] = True
    limit: Annotated[
        int,
        Meta(
            ge=1,
            description="Largest number of timers in a page, at most 1,000. A page may have fewer: it ends after the "
            "timer with which it has more than 8 MiB.",
        ),
    ] = 100
    cursor: Annotated[str, Meta(description="`nextCursor` of the previous page.")] | None = None


# --- answers -----------------------------------------------------------------------------------


class TimerJson(Struct, gc=False, rename="camel", omit_defaults=True):
    """A timer. Fields without a value are omitted."""

    namespace: str
    timer_id: str
    state: State
    execute_at: Annotated[
        InstantText, Meta(description="The time of the next attempt; of a reached timer, the time of the last one.")
    ]
    scheduled_at: Annotated[InstantText, Meta(description="The requested time; a retry does not change it.")]
    created_at: InstantText
    attempts: Annotated[int, Meta(description="Attempts made so far.")]
    callback_url: str
    payload: Payload | UnsetType = UNSET
    retry_policy: RetryPolicyJson | UnsetType = UNSET
    callback_timeout_seconds: int | UnsetType = UNSET
    correlation_id: str | UnsetType = UNSET
    tags: list[str] | UnsetType = UNSET
    headers: dict[str, str] | UnsetType = UNSET
    missed: MissedJson | UnsetType = UNSET
    flow_key: Annotated[str, Meta(description="As given. Omitted: the URL without its query.")] | UnsetType = UNSET
    schedule: Annotated[ScheduleJson, Meta(description="As given.")] | UnsetType = UNSET
    occurrence: (
        Annotated[int, Meta(description="The number of the pending occurrence of the schedule, from 1.")] | UnsetType
    ) = UNSET
    scheduled_at_local: (
        Annotated[
            str,
            Meta(
                description="`scheduledAt` in the zone of the schedule, with its offset. Omitted: the call is not an "
                "occurrence of the schedule.",
                examples=["2027-03-15T09:00:00-04:00"],
            ),
        ]
        | UnsetType
    ) = UNSET
    tzdata: (
        Annotated[str, Meta(description="The version of the time-zone rules by which `scheduledAt` was computed.")]
        | UnsetType
    ) = UNSET
    paused: (
        Annotated[bool, Meta(description="true: it does not fire until it is resumed. Omitted: it is not paused.")]
        | UnsetType
    ) = UNSET
    outcome: Annotated[Outcome, Meta(description="The outcome of a reached timer.")] | UnsetType = UNSET
    reached_at: Annotated[InstantText, Meta(description="When the timer was reached.")] | UnsetType = UNSET
    first_attempt_at: InstantText | UnsetType = UNSET
    last_attempt_at: InstantText | UnsetType = UNSET
    late_by_ms: (
        Annotated[int, Meta(description="Start of the first attempt minus `scheduledAt`, in milliseconds.")] | UnsetType
    ) = UNSET
    last_error: Annotated[str, Meta(description="Why the last attempt failed.")] | UnsetType = UNSET


class TimerAnswer(AnswerJson):
    timer: TimerJson


_REPLACED = (
    "Was there a scheduled timer with this id before? `null`: the timer is stored, but the database's answer was lost, "
    "so it is unknown whether it replaced another one."
)
_EXISTED = (
    '`true` if `ifAbsent` found the timer, scheduled or reached, or `ifReached: "ignore"` found it reached: nothing '
    "was created. Present only if `ifAbsent` or `ifReached` was given."
)


class CreatedAnswer(AnswerJson):
    timer: TimerJson
    replaced: Annotated[bool | None, Meta(description=_REPLACED)]
    existed: Annotated[bool | UnsetType, Meta(description=_EXISTED)] = UNSET


class UpdatedAnswer(AnswerJson):
    timer: TimerJson
    verdict: Annotated[
        Verdict,
        Meta(description="`updated`, or `inFlight`: updated, but a callback with the old values is in flight."),
    ]


class DeletedAnswer(AnswerJson):
    verdict: Annotated[
        Verdict,
        Meta(
            description="`cancelled`: no callback will start. `inFlight`: deleted, but a callback is in flight. "
            "`alreadyReached`: the timer was reached before."
        ),
    ]


class CreateResult(AnswerJson):
    """`timer` and `replaced`, or `error`."""

    timer: TimerJson | UnsetType = UNSET
    replaced: Annotated[bool | UnsetType | None, Meta(description=_REPLACED)] = UNSET
    existed: Annotated[bool | UnsetType, Meta(description=_EXISTED)] = UNSET
    error: ProblemJson | UnsetType = UNSET


class CreatedManyAnswer(AnswerJson):
    """One result for each timer, in order: the timer, or its error."""

    results: list[CreateResult]


class DeleteResult(AnswerJson):
    """`verdict`, or `error`."""

    verdict: Verdict | UnsetType = UNSET
    error: ProblemJson | UnsetType = UNSET


class DeletedManyAnswer(AnswerJson):
    """One result for each timer, in order: the verdict, or its error."""

    results: list[DeleteResult]


class TimersAnswer(AnswerJson):
    timers: list[TimerJson]
    next_cursor: Annotated[str, Meta(description="For the next page; null: there is no further page.")] | None
