"""The JSON of the HTTP API: every request and answer, and errors as problems.

The API and the client both use these types. The names and descriptions are the reference for users: the OpenAPI
document is generated from them.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from duetime.domain.secrets import SECRETS_MAX
from duetime.domain.timer import SHARDS_MAX, Outcome, State, Verdict
from duetime.errors import DuetimeError

URL_BYTES_MAX = 2_048


# --- parts -------------------------------------------------------------------------------------

_ID = "1 to 255 bytes of UTF-8 without NUL. Compared byte by byte: case, spaces and accents matter."
_ID_LENGTH = {"minLength": 1, "maxLength": 255}
NamespaceOfTimer = Annotated[
    str,
    Meta(description="The namespace; `default` if omitted. " + _ID, examples=["orders"], extra_json_schema=_ID_LENGTH),
]
NamespaceName = Annotated[
    str, Meta(description="The name of the namespace. " + _ID, examples=["orders"], extra_json_schema=_ID_LENGTH)
]
TimerId = Annotated[
    str,
    Meta(
        description="The id of the timer, unique in its namespace. " + _ID,
        examples=["order-17"],
        extra_json_schema=_ID_LENGTH,
    ),
]
InstantText = Annotated[
    str,
    Meta(
        description="RFC 3339 with an offset, from 1970 to 9998. Answers are in UTC with milliseconds.",
        examples=["2027-01-01T09:00:00Z"],
        extra_json_schema={"format": "date-time"},
    ),
]
DurationText = Annotated[
    str,
    Meta(description='A duration: "250ms", "90s", "1h30m", "2d", or ISO 8601 "PT1H30M".', examples=["90s"]),
]
TimeoutSeconds = Annotated[
    int,
    Meta(
        ge=1, le=300, description="Time limit of a callback in seconds, from connecting to the last byte of its answer."
    ),
]
CallbackUrl = Annotated[
    str, Meta(examples=["https://shop.example/hooks/expire"], extra_json_schema={"maxLength": URL_BYTES_MAX})
]
Payload = Annotated[
    Raw,
    Meta(
        description="Any JSON. The receiver gets it byte for byte as it was sent. `null` means no payload.",
        examples=[{"order": 17}],
    ),
]
Headers = Annotated[
    dict[str, str],
    Meta(
        description="Additional headers of the callback, at most 32 and 8 KiB. Values are visible ASCII. Headers "
        "of the connection and those reserved for Duetime (`Host`, `Content-Length`, `webhook-…`, …) are refused.",
        examples=[{"x-shop": "17"}],
    ),
]
Tags = Annotated[
    list[str],
    Meta(
        description="Up to 20 labels of 1 to 64 bytes, a filter of `timers/list`. A repeated one counts once.",
        examples=[["expiry", "eu"]],
    ),
]
CorrelationId = Annotated[
    str, Meta(description="1 to 255 bytes, sent to the receiver, and a filter of `timers/list`.", examples=["c-99"])
]


class RetryPolicyJson(Struct, frozen=True, gc=False, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How failed attempts are retried. The first pause is random, up to `initialInterval`; the upper bound of each
    further pause is multiplied by `backoffMultiplier`. When a limit is reached, the timer is `failed`. An omitted field
    has the default shown here, not the value of the namespace."""

    max_retries: (
        Annotated[int, Meta(ge=0, le=1000, description="Attempts after the first. Omitted: not limited.")] | None
    ) = None
    initial_interval: Annotated[str, Meta(description="1ms to 1d.", examples=["1s"])] = "1s"
    backoff_multiplier: Annotated[float, Meta(ge=1, le=10)] = 2.0
    max_interval: (
        Annotated[
            str,
            Meta(
                description="Longest pause, up to 366d. Omitted: 10m, or initialInterval if longer.", examples=["10m"]
            ),
        ]
        | None
    ) = None
    max_duration: Annotated[
        str,
        Meta(
            description="Time after the first attempt in which retries are made; up to 366d.",
            examples=["1d"],
        ),
    ] = "1d"


class MissedJson(
    Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """What to do with a timer that could not be fired in time, for example after an outage. Exactly one field is
    required. Without `missed`, the timer is fired however late."""

    skip_if_late_by: (
        Annotated[str, Meta(description="If later than this: `skipped`, without a callback.", examples=["10m"])] | None
    ) = None
    fail_if_late_by: (
        Annotated[
            str,
            Meta(description="If later than this: `failed`, without a callback; it can be replayed.", examples=["10m"]),
        ]
        | None
    ) = None


_WHERE = "The URL that the callback is sent to with POST. {}: the `callbackUrl` of the namespace."
_RETRY = "How failed attempts are retried. {}: the policy of the namespace."
_MISSED = "What to do if the timer could not be fired in time. {}: fire it however late."


class ProblemJson(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """An error (RFC 9457). `code` is for programs, `detail` for people."""

    type: Annotated[str, Meta(examples=["urn:duetime:problem:invalid_field"])]
    title: str
    status: Annotated[int, Meta(description="The HTTP status.")]
    detail: str
    code: Annotated[
        str,
        Meta(
            description="Stable name of the problem. `not_applied`: nothing was changed, retry later. "
            "`outcome_unknown`: the write may or may not have been applied; reads, deletes and creates with "
            "`ifAbsent` may be repeated.",
            examples=["invalid_field"],
        ),
    ]
    field: Annotated[str, Meta(description="The wrong field.", examples=["executeAt"])] | None = None
    request_id: (
        Annotated[str, Meta(description="Of an internal error: the id of its entry in the server's log.")] | None
    ) = None


# --- requests ----------------------------------------------------------------------------------


class _Request(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    pass


class TimerRefJson(_Request, kw_only=True):
    """The name of a timer."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"


class CreateTimerJson(_Request, kw_only=True):
    """A timer to create. It replaces a scheduled timer with the same id. Exactly one of `executeAt` and `delay` is
    required."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"
    execute_at: Annotated[InstantText, Meta(description="When to call. A time in the past means now.")] | None = None
    delay: Annotated[DurationText, Meta(description="When to call, as the time from now.")] | None = None
    callback_url: Annotated[CallbackUrl | None, Meta(description=_WHERE.format("Omitted"))] = None
    payload: Payload | UnsetType = UNSET
    retry_policy: Annotated[RetryPolicyJson | None, Meta(description=_RETRY.format("Omitted"))] = None
    callback_timeout_seconds: TimeoutSeconds | None = None
    headers: Headers | None = None
    correlation_id: CorrelationId | None = None
    tags: Tags | None = None
    missed: Annotated[MissedJson | None, Meta(description=_MISSED.format("Omitted"))] = None
    if_absent: Annotated[
        bool,
        Meta(
            description="true: never replace a timer. If the same timer exists, it is answered as it is, also if it is "
            "reached and still stored; if a different one exists, the answer is a 409."
        ),
    ] = False


class UpdateTimerJson(_Request, kw_only=True):
    """The fields to change. Omitted fields keep their values; `null` sets the default."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"
    execute_at: InstantText | UnsetType = UNSET
    delay: DurationText | UnsetType = UNSET
    callback_url: Annotated[CallbackUrl | UnsetType | None, Meta(description=_WHERE.format("`null`"))] = UNSET
    payload: Payload | UnsetType = UNSET
    retry_policy: Annotated[RetryPolicyJson | UnsetType | None, Meta(description=_RETRY.format("`null`"))] = UNSET
    callback_timeout_seconds: TimeoutSeconds | UnsetType | None = UNSET
    headers: Headers | UnsetType | None = UNSET
    correlation_id: CorrelationId | UnsetType | None = UNSET
    tags: Tags | UnsetType | None = UNSET
    missed: Annotated[MissedJson | UnsetType | None, Meta(description=_MISSED.format("`null`"))] = UNSET


class CreateTimersJson(_Request):
    """Up to 1,000 timers. Each succeeds or fails by itself."""

    timers: list[CreateTimerJson]


class DeleteTimersJson(_Request):
    """Up to 1,000 timers. Each succeeds or fails by itself."""

    timers: list[TimerRefJson]


class RawTimersJson(_Request):
    """One of the two above, with items that are not decoded yet: a wrong item must not affect the others."""

    timers: list[Raw]


class ListTimersJson(_Request, kw_only=True):
    """A filter for the timers of one namespace. All conditions must be met."""

    namespace: NamespaceOfTimer = "default"
    state: Annotated[State, Meta(description="Omitted: first the scheduled timers, then the reached ones.")] | None = (
        None
    )
    due_from: Annotated[InstantText, Meta(description="Due at this time or later.")] | None = None
    due_until: Annotated[InstantText, Meta(description="Due before this time.")] | None = None
    tag: Annotated[str, Meta(description="Has this tag.")] | None = None
    id_prefix: Annotated[str, Meta(description="timerId begins with this.")] | None = None
    correlation_id: Annotated[str, Meta(description="Has this correlationId.")] | None = None
    limit: Annotated[
        int, Meta(ge=1, description="Largest number of timers in a page, at most 1,000. A page may have fewer.")
    ] = 100
    cursor: Annotated[str, Meta(description="`nextCursor` of the previous page.")] | None = None


NumShards = Annotated[
    int,
    Meta(
        ge=1,
        le=SHARDS_MAX,
        description="Number of shards. Instances share a namespace by shards. Never changes.",
        examples=[256],
    ),
]
DeliveredRetention = Annotated[
    str,
    Meta(
        description="How long `delivered`, `skipped` and `cancelled` timers are kept; up to 3660d, default 1d.",
        examples=["7d"],
    ),
]
FailedRetention = Annotated[
    str,
    Meta(
        description="How long `failed` timers are kept, to be read and replayed; up to 3660d, default 30d.",
        examples=["90d"],
    ),
]
PayloadMax = Annotated[int, Meta(ge=1, description="Largest payload in bytes, if less than the limit of the server.")]
Secrets = Annotated[
    list[str],
    Meta(
        description='Callbacks are signed with each of these (Standard Webhooks): "whsec_" and the base64 of 24 to 64 '
        "bytes. Answers show them redacted; in an update a redacted one means the stored one. To replace a secret: add "
        "the new one before the old one, change the receivers, remove the old one.",
        examples=[["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]],
        extra_json_schema={"maxItems": SECRETS_MAX},
    ),
]


class NamespaceRefJson(_Request):
    """The name of a namespace."""

    namespace: NamespaceName


class CreateNamespaceJson(_Request, kw_only=True):
    """A namespace to create, with the defaults of its timers."""

    namespace: NamespaceName
    num_shards: NumShards | UnsetType = UNSET
    callback_url: Annotated[
        CallbackUrl | UnsetType | None, Meta(description="The URL of timers without a `callbackUrl`.")
    ] = UNSET
    retry_policy: Annotated[
        RetryPolicyJson | UnsetType | None, Meta(description="For timers without a `retryPolicy`.")
    ] = UNSET
    callback_timeout_seconds: Annotated[
        TimeoutSeconds | UnsetType | None,
        Meta(description="Time limit of a callback in seconds, for timers without one; default 10."),
    ] = UNSET
    require_ok: (
        Annotated[bool, Meta(description='true: a callback is delivered only if its answer is `{"ok": true}`.')]
        | UnsetType
        | None
    ) = UNSET
    delivered_retention: DeliveredRetention | UnsetType | None = UNSET
    failed_retention: FailedRetention | UnsetType | None = UNSET
    payload_bytes_max: PayloadMax | UnsetType | None = UNSET
    signing_secrets: Secrets | UnsetType | None = UNSET


class UpdateNamespaceJson(CreateNamespaceJson):
    """The settings to change. Omitted settings keep their values; `null` sets the default."""


class EmptyJson(_Request):
    """An empty object `{}`, or no body."""


class ClusterQueryJson(_Request):
    """What to include. No body means `{}`."""

    shards: Annotated[bool, Meta(description="true: include every shard with its owner; there may be thousands.")] = (
        False
    )


# --- answers -----------------------------------------------------------------------------------


class _Answer(Struct, rename="camel", omit_defaults=True):
    """Later versions may add fields to answers: a decoder must ignore unknown ones."""


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
    outcome: Annotated[Outcome, Meta(description="The outcome of a reached timer.")] | UnsetType = UNSET
    reached_at: Annotated[InstantText, Meta(description="When the timer was reached.")] | UnsetType = UNSET
    first_attempt_at: InstantText | UnsetType = UNSET
    last_attempt_at: InstantText | UnsetType = UNSET
    late_by_ms: (
        Annotated[int, Meta(description="Start of the first attempt minus `scheduledAt`, in milliseconds.")] | UnsetType
    ) = UNSET
    last_error: Annotated[str, Meta(description="Why the last attempt failed.")] | UnsetType = UNSET


class TimerAnswer(_Answer):
    timer: TimerJson


_UNREADABLE = "Stored timers that were read, but cannot be decoded and do not fire. The log names them."
_REPLACED = (
    "Was there a scheduled timer with this id before? `null`: the timer is stored, but the database's answer was lost, "
    "so it is unknown whether it replaced another one."
)
_EXISTED = "`true` if `ifAbsent` found the timer, scheduled or reached: nothing was created. Omitted otherwise."


class CreatedAnswer(_Answer):
    timer: TimerJson
    replaced: Annotated[bool | None, Meta(description=_REPLACED)]
    existed: Annotated[bool, Meta(description=_EXISTED)] = False


class UpdatedAnswer(_Answer):
    timer: TimerJson
    verdict: Annotated[
        Verdict,
        Meta(description="`updated`, or `inFlight`: updated, but a callback with the old values is in flight."),
    ]


class DeletedAnswer(_Answer):
    verdict: Annotated[
        Verdict,
        Meta(
            description="`cancelled`: no callback will start. `inFlight`: deleted, but a callback is in flight. "
            "`alreadyReached`: the timer was reached before."
        ),
    ]


class CreateResult(_Answer):
    """`timer` and `replaced`, or `error`."""

    timer: TimerJson | UnsetType = UNSET
    replaced: Annotated[bool | UnsetType | None, Meta(description=_REPLACED)] = UNSET
    existed: Annotated[bool, Meta(description=_EXISTED)] = False
    error: ProblemJson | UnsetType = UNSET


class CreatedManyAnswer(_Answer):
    """One result for each timer, in order: the timer, or its error."""

    results: list[CreateResult]


class DeleteResult(_Answer):
    """`verdict`, or `error`."""

    verdict: Verdict | UnsetType = UNSET
    error: ProblemJson | UnsetType = UNSET


class DeletedManyAnswer(_Answer):
    """One result for each timer, in order: the verdict, or its error."""

    results: list[DeleteResult]


class TimersAnswer(_Answer):
    timers: list[TimerJson]
    next_cursor: Annotated[str, Meta(description="For the next page; null: there is no further page.")] | None


class NamespaceJson(_Answer, kw_only=True):
    """A namespace: a scope of timer ids, and the defaults of its timers."""

    namespace: str
    num_shards: int
    callback_url: str | UnsetType = UNSET
    retry_policy: RetryPolicyJson
    callback_timeout_seconds: int
    require_ok: bool
    delivered_retention: DeliveredRetention
    failed_retention: FailedRetention
    payload_bytes_max: int | UnsetType = UNSET
    signing_secrets: Annotated[list[str], Meta(description="Redacted.", examples=[["whsec_…aLSw"]])]
    created_at: InstantText


class NamespaceAnswer(_Answer):
    namespace: NamespaceJson


class NamespacesAnswer(_Answer):
    namespaces: list[NamespaceJson]


class EmptyAnswer(_Answer):
    """An empty object: the operation is done."""


class HeldForJson(_Answer, kw_only=True):
    """A destination that due timers wait for."""

    destination: str
    held: Annotated[int, Meta(description="Due timers that wait for it.")]
    in_flight: Annotated[int, Meta(description="Callbacks in flight to it.")]
    failures: Annotated[int, Meta(description="Failed attempts in a row.")]
    breaker_open: Annotated[bool, Meta(description="true: it failed so often that it is not called for a while.")]


class MemberJson(_Answer, kw_only=True):
    """An instance. The figures that it reports itself are omitted if it is dead or does not answer."""

    instance_id: str
    address: Annotated[str, Meta(description="The address at which other instances reach it.")]
    alive: bool
    self: Annotated[bool, Meta(description="true: this is the instance that answers the request.")]
    shards: Annotated[int, Meta(description="Shards it owns.")]
    joined_at: InstantText
    unreachable: Annotated[str, Meta(description="Why an instance that is alive did not answer.")] | UnsetType = UNSET
    version: str | UnsetType = UNSET
    ready: bool | UnsetType = UNSET
    reason: Annotated[str, Meta(description="Why it is not ready.")] | UnsetType = UNSET
    lease_ms: Annotated[int, Meta(description="For how long it may still fire timers.")] | UnsetType = UNSET
    clock_skew_ms: Annotated[int, Meta(description="Its clock minus the clock of the database.")] | UnsetType = UNSET
    in_memory: Annotated[int, Meta(description="Timers in memory.")] | UnsetType = UNSET
    in_flight: Annotated[int, Meta(description="Callbacks in flight.")] | UnsetType = UNSET
    held: Annotated[int, Meta(description="Due timers that wait for their destination.")] | UnsetType = UNSET
    writes_waiting: int | UnsetType = UNSET
    unreadable: Annotated[int, Meta(description=_UNREADABLE)] | UnsetType = UNSET
    oldest_due_ms: (
        Annotated[int, Meta(description="Age of the oldest due timer that was not fired yet, including held ones.")]
        | UnsetType
    ) = UNSET
    lateness_p50_ms: float | UnsetType = msgspec.field(name="latenessP50Ms", default=UNSET)
    lateness_p99_ms: float | UnsetType = msgspec.field(name="latenessP99Ms", default=UNSET)
    held_for: (
        Annotated[
            list[HeldForJson],
            Meta(
                description="The destinations with the most held timers, at most 5. Only for tokens that allow "
                "every namespace."
            ),
        ]
        | UnsetType
    ) = UNSET


class ShardCountsJson(_Answer, kw_only=True):
    total: int
    owned: Annotated[int, Meta(description="Owned by a live instance.")]
    free: Annotated[int, Meta(description="Without an owner. Normally for less than a few seconds.")]
    of_dead: Annotated[int, Meta(description="Owned by a dead instance; another one will claim them.")]


class ShardJson(_Answer):
    shard_id: int
    version: Annotated[int, Meta(description="Grows with every change of owner.")]
    owner_id: str | UnsetType = UNSET
    owner_address: str | UnsetType = UNSET
    in_memory: (
        Annotated[int, Meta(description="Timers in memory, if the answering instance owns the shard.")] | UnsetType
    ) = UNSET
    horizon: (
        Annotated[InstantText, Meta(description="Timers that are due up to this time are in memory.")] | UnsetType
    ) = UNSET


class ClusterStatusJson(_Answer, kw_only=True):
    """The status of the whole cluster. All live members are asked, and have one second to answer; sums and worst
    values are of those that answered."""

    instance_id: Annotated[str, Meta(description="The instance that answers the request.")]
    version: Annotated[str, Meta(description="The version of the instance that answers.")]
    store: str
    ready: Annotated[bool, Meta(description="Is the instance that answers ready (`/readyz`)?")]
    reason: Annotated[str, Meta(description="Why it is not ready.")] | UnsetType = UNSET
    clock_skew_max_ms: Annotated[int, Meta(description="An instance whose clock differs by more does not fire timers.")]
    dead_after_ms: Annotated[int, Meta(description="An instance without a heartbeat for longer is declared dead.")]
    members: Annotated[list[MemberJson], Meta(description="First the live ones, then at most 100 dead ones.")]
    shard_counts: ShardCountsJson
    unowned_shards: Annotated[list[int], Meta(description="Shards without a live owner, at most 100.")]
    shards: Annotated[list[ShardJson], Meta(description="Only if requested.")] | UnsetType = UNSET
    in_memory: Annotated[int, Meta(description="Timers in memory, sum of all members.")]
    in_flight: Annotated[int, Meta(description="Callbacks in flight, sum of all members.")]
    held: Annotated[int, Meta(description="Due timers that wait for their destination, sum of all members.")]
    writes_waiting: Annotated[int, Meta(description="Writes that wait for a commit, sum of all members.")]
    unreadable: Annotated[int, Meta(description=_UNREADABLE)]
    clock_skew_ms: Annotated[
        int, Meta(description="The clock of a member minus the clock of the database: the worst of all members.")
    ]
    oldest_due_ms: (
        Annotated[int, Meta(description="Age of the oldest due timer that was not fired yet, including held ones.")]
        | UnsetType
    ) = UNSET
    lateness_p50_ms: (
        Annotated[float, Meta(description="The worst of all members, each since its start.")] | UnsetType
    ) = msgspec.field(name="latenessP50Ms", default=UNSET)
    lateness_p99_ms: (
        Annotated[float, Meta(description="The worst of all members, each since its start.")] | UnsetType
    ) = msgspec.field(name="latenessP99Ms", default=UNSET)


class ClusterMapJson(_Answer, kw_only=True):
    """Who owns which shard, as the answering instance last read it."""

    instances: Annotated[
        tuple[str, ...],
        Meta(description="Addresses of the live instances.", examples=[["10.0.0.1:8463", "10.0.0.2:8463"]]),
    ]
    instance_ids: Annotated[
        tuple[str, ...],
        Meta(description="Ids of these instances. `/healthz` has the instance's id in the header `duetime-instance`."),
    ]
    owners: Annotated[
        tuple[int | None, ...],
        Meta(description="By shard: the index of the owner in `instances`; null: no live owner."),
    ]
    namespaces: Annotated[dict[str, int], Meta(description="`numShards` of the namespaces that the token allows.")]


# --- errors as problems --------------------------------------------------------------------------


def problem_of(error: DuetimeError, request_id: str | None = None) -> ProblemJson:
    return ProblemJson(
        type=f"urn:duetime:problem:{error.code}",
        title=error.title,
        status=error.status,
        detail=error.detail,
        code=error.code,
        field=error.field,
        request_id=request_id,
    )


def encode_problem(problem: ProblemJson) -> bytes:
    return msgspec.json.encode(problem)
