"""The JSON of the HTTP API: the shape of every request and answer, and errors as problems.

Imported by the API and by the client, so that both speak of the same fields. Names and descriptions here
are the reference users read: the OpenAPI document is generated from them.
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

_ID = "1 to 255 bytes of UTF-8 without NUL. Compared byte by byte: case, spaces and accents all count."
_ID_LENGTH = {"minLength": 1, "maxLength": 255}
NamespaceOfTimer = Annotated[
    str,
    Meta(description="The namespace; `default` if left out. " + _ID, examples=["orders"], extra_json_schema=_ID_LENGTH),
]
NamespaceName = Annotated[
    str, Meta(description="The name of the namespace. " + _ID, examples=["orders"], extra_json_schema=_ID_LENGTH)
]
TimerId = Annotated[
    str,
    Meta(
        description="What you call the timer, unique in its namespace. " + _ID,
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
    Meta(description='A length of time: "250ms", "90s", "1h30m", "2d", or ISO 8601 "PT1H30M".', examples=["90s"]),
]
TimeoutSeconds = Annotated[
    int, Meta(ge=1, le=300, description="Seconds a callback may take, from connecting to its last byte.")
]
CallbackUrl = Annotated[
    str, Meta(examples=["https://shop.example/hooks/expire"], extra_json_schema={"maxLength": URL_BYTES_MAX})
]
Payload = Annotated[
    Raw,
    Meta(
        description="Any JSON, handed to the receiver byte for byte as you sent it. `null` is no payload.",
        examples=[{"order": 17}],
    ),
]
Headers = Annotated[
    dict[str, str],
    Meta(
        description="Extra headers of the callback, at most 32 and 8 KiB. Values are visible ASCII. Headers that "
        "belong to the connection or to Duetime (`Host`, `Content-Length`, `webhook-…`, …) are refused.",
        examples=[{"x-shop": "17"}],
    ),
]
Tags = Annotated[
    list[str],
    Meta(
        description="Up to 20 labels of 1 to 64 bytes, to list by. One that is repeated counts once.",
        examples=[["expiry", "eu"]],
    ),
]
CorrelationId = Annotated[
    str, Meta(description="1 to 255 bytes, handed to the receiver, and a filter of `timers/list`.", examples=["c-99"])
]


class RetryPolicyJson(Struct, frozen=True, gc=False, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How an attempt that did not succeed is repeated: after a random pause of up to `initialInterval`, then of up
    to `backoffMultiplier` times more each time, until one of the limits is met; then the timer is `failed`. A field
    that is left out has the default shown here, not the namespace's value."""

    max_retries: (
        Annotated[int, Meta(ge=0, le=1000, description="Attempts after the first. Left out: no limit of their own.")]
        | None
    ) = None
    initial_interval: Annotated[str, Meta(description="1ms to 1d.", examples=["1s"])] = "1s"
    backoff_multiplier: Annotated[float, Meta(ge=1, le=10)] = 2.0
    max_interval: (
        Annotated[
            str,
            Meta(
                description="Longest pause, up to 366d. Left out: 10m, or initialInterval if longer.", examples=["10m"]
            ),
        ]
        | None
    ) = None
    max_duration: Annotated[
        str,
        Meta(
            description="The last retry is made this long after the first attempt, none later; up to 366d.",
            examples=["1d"],
        ),
    ] = "1d"


class MissedJson(
    Struct, frozen=True, gc=False, kw_only=True, rename="camel", omit_defaults=True, forbid_unknown_fields=True
):
    """What to do with a timer that could not be fired in time, say after a downtime. Exactly one field. Without
    `missed`, the timer is fired however late."""

    skip_if_late_by: (
        Annotated[str, Meta(description="Later than this: `skipped`, no callback.", examples=["10m"])] | None
    ) = None
    fail_if_late_by: (
        Annotated[str, Meta(description="Later than this: `failed`, no callback; replayable.", examples=["10m"])] | None
    ) = None


_WHERE = "Where the callback is POSTed to. {}: the namespace's `callbackUrl`."
_RETRY = "How an attempt that did not succeed is repeated. {}: as the namespace says."
_MISSED = "What to do when it could not be fired in time. {}: fire it however late."


class ProblemJson(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What went wrong (RFC 9457). Programs look at `code`, people at `detail`."""

    type: Annotated[str, Meta(examples=["urn:duetime:problem:invalid_field"])]
    title: str
    status: Annotated[int, Meta(description="The HTTP status.")]
    detail: str
    code: Annotated[
        str,
        Meta(
            description="Stable name of the problem. `not_applied`: nothing was changed, retry. `outcome_unknown`: "
            "the write may or may not have been applied; reads, deletes and creates with `ifAbsent` may be repeated.",
            examples=["invalid_field"],
        ),
    ]
    field: Annotated[str, Meta(description="The field at fault.", examples=["executeAt"])] | None = None
    request_id: Annotated[str, Meta(description="Of an internal error: where to look in the log.")] | None = None


# --- requests ----------------------------------------------------------------------------------


class _Request(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    pass


class TimerRefJson(_Request, kw_only=True):
    """Names a timer."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"


class CreateTimerJson(_Request, kw_only=True):
    """A timer to be made, or to replace the one of the same name. Exactly one of `executeAt` and `delay`."""

    timer_id: TimerId
    namespace: NamespaceOfTimer = "default"
    execute_at: Annotated[InstantText, Meta(description="When to call. A time in the past: at once.")] | None = None
    delay: Annotated[DurationText, Meta(description="When to call, counted from now.")] | None = None
    callback_url: Annotated[CallbackUrl | None, Meta(description=_WHERE.format("Left out"))] = None
    payload: Payload | UnsetType = UNSET
    retry_policy: Annotated[RetryPolicyJson | None, Meta(description=_RETRY.format("Left out"))] = None
    callback_timeout_seconds: TimeoutSeconds | None = None
    headers: Headers | None = None
    correlation_id: CorrelationId | None = None
    tags: Tags | None = None
    missed: Annotated[MissedJson | None, Meta(description=_MISSED.format("Left out"))] = None
    if_absent: Annotated[
        bool,
        Meta(
            description="true: never replace. The same timer again is answered as it stands, also after its end "
            "for as long as it is kept; a different one is a 409."
        ),
    ] = False


class UpdateTimerJson(_Request, kw_only=True):
    """The fields to change. What is left out stays; `null` sets back to the default."""

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
    """Either of the two above, its items not looked at yet: one bad item must not hurt the others."""

    timers: list[Raw]


class ListTimersJson(_Request, kw_only=True):
    """A filtered look at one namespace. All conditions must hold."""

    namespace: NamespaceOfTimer = "default"
    state: Annotated[State, Meta(description="Left out: the scheduled ones, then the reached ones.")] | None = None
    due_from: Annotated[InstantText, Meta(description="Due at this time or later.")] | None = None
    due_until: Annotated[InstantText, Meta(description="Due before this time.")] | None = None
    tag: Annotated[str, Meta(description="Has this tag.")] | None = None
    id_prefix: Annotated[str, Meta(description="timerId begins with this.")] | None = None
    correlation_id: Annotated[str, Meta(description="Has this correlationId.")] | None = None
    limit: Annotated[int, Meta(ge=1, description="Timers in a page, at most 1,000. A page may hold fewer.")] = 100
    cursor: Annotated[str, Meta(description="`nextCursor` of the page before. Opaque.")] | None = None


NumShards = Annotated[
    int,
    Meta(
        ge=1,
        le=SHARDS_MAX,
        description="Parts the namespace is spread over, the unit in which instances share it. Never changes.",
        examples=[256],
    ),
]
DeliveredRetention = Annotated[
    str,
    Meta(
        description="How long `delivered`, `skipped` and `cancelled` timers are kept; 1d unless told, up to 3660d.",
        examples=["7d"],
    ),
]
FailedRetention = Annotated[
    str,
    Meta(
        description="How long `failed` timers are kept, to be looked at and replayed; 30d unless told, up to 3660d.",
        examples=["90d"],
    ),
]
PayloadMax = Annotated[int, Meta(ge=1, description="Bytes of one payload, if less than the server's limit.")]
Secrets = Annotated[
    list[str],
    Meta(
        description='Callbacks are signed with each of these (Standard Webhooks), "whsec_" and base64 of 24 to 64 '
        "bytes. Answers show them redacted; in an update a redacted one stands for itself. To rotate: put the new "
        "one in front, switch the receivers, drop the old one.",
        examples=[["whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"]],
        extra_json_schema={"maxItems": SECRETS_MAX},
    ),
]


class NamespaceRefJson(_Request):
    """Names a namespace."""

    namespace: NamespaceName


class CreateNamespaceJson(_Request, kw_only=True):
    """A namespace to be made, with the defaults of its timers."""

    namespace: NamespaceName
    num_shards: NumShards | UnsetType = UNSET
    callback_url: Annotated[
        CallbackUrl | UnsetType | None, Meta(description="Where timers without a `callbackUrl` of their own call.")
    ] = UNSET
    retry_policy: Annotated[
        RetryPolicyJson | UnsetType | None, Meta(description="Of timers that have none of their own.")
    ] = UNSET
    callback_timeout_seconds: Annotated[
        TimeoutSeconds | UnsetType | None,
        Meta(description="Seconds a callback may take, of timers that do not say; 10 unless told."),
    ] = UNSET
    require_ok: (
        Annotated[bool, Meta(description='true: a callback counts only if its answer says `{"ok": true}`.')]
        | UnsetType
        | None
    ) = UNSET
    delivered_retention: DeliveredRetention | UnsetType | None = UNSET
    failed_retention: FailedRetention | UnsetType | None = UNSET
    payload_bytes_max: PayloadMax | UnsetType | None = UNSET
    signing_secrets: Secrets | UnsetType | None = UNSET


class UpdateNamespaceJson(CreateNamespaceJson):
    """The settings to change. What is left out stays; `null` sets back to the default."""


class EmptyJson(_Request):
    """Nothing: `{}`, or no body at all."""


class ClusterQueryJson(_Request):
    """How much to tell. No body at all means `{}`."""

    shards: Annotated[bool, Meta(description="true: list every shard with its owner; there may be thousands.")] = False


# --- answers -----------------------------------------------------------------------------------


class _Answer(Struct, rename="camel", omit_defaults=True):
    """Answers may grow fields: whoever decodes one ignores those it does not know."""


class TimerJson(Struct, gc=False, rename="camel", omit_defaults=True):
    """A timer as it stands. A field without a value is left out."""

    namespace: str
    timer_id: str
    state: State
    execute_at: Annotated[InstantText, Meta(description="The next attempt, or the last one there was.")]
    scheduled_at: Annotated[InstantText, Meta(description="The time that was asked for; a retry does not move it.")]
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
    outcome: Annotated[Outcome, Meta(description="How the timer ended.")] | UnsetType = UNSET
    reached_at: Annotated[InstantText, Meta(description="When it ended.")] | UnsetType = UNSET
    first_attempt_at: InstantText | UnsetType = UNSET
    last_attempt_at: InstantText | UnsetType = UNSET
    late_by_ms: (
        Annotated[int, Meta(description="Start of the first attempt minus scheduledAt, in milliseconds.")] | UnsetType
    ) = UNSET
    last_error: Annotated[str, Meta(description="Why the last attempt did not succeed.")] | UnsetType = UNSET


class TimerAnswer(_Answer):
    timer: TimerJson


_UNREADABLE = "Stored timers that cannot be decoded and do not fire, as far as they have been read. The log names them."
_REPLACED = (
    "Was there a scheduled timer with this id before? `null`: the timer is stored, but the database's answer was lost, "
    "and whether it replaced another one is not known."
)
_EXISTED = "`true` if `ifAbsent` found the timer, scheduled or over: nothing was created. Left out otherwise."


class CreatedAnswer(_Answer):
    timer: TimerJson
    replaced: Annotated[bool | None, Meta(description=_REPLACED)]
    existed: Annotated[bool, Meta(description=_EXISTED)] = False


class UpdatedAnswer(_Answer):
    timer: TimerJson
    verdict: Annotated[
        Verdict,
        Meta(description="`updated`, or `inFlight`: applied, but a callback with the old values is under way."),
    ]


class DeletedAnswer(_Answer):
    verdict: Annotated[
        Verdict,
        Meta(
            description="`cancelled`: no callback will start. `inFlight`: gone, but a callback is under way. "
            "`alreadyReached`: it was over before."
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
    next_cursor: Annotated[str, Meta(description="For the next page; null: this was the last.")] | None


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
    """Nothing: it was done."""


class HeldForJson(_Answer, kw_only=True):
    """A destination that due timers wait for."""

    destination: str
    held: Annotated[int, Meta(description="Due timers that wait for it.")]
    in_flight: Annotated[int, Meta(description="Callbacks under way to it.")]
    failures: Annotated[int, Meta(description="Attempts that failed in a row.")]
    breaker_open: Annotated[bool, Meta(description="true: it failed so often that it is left alone for a while.")]


class MemberJson(_Answer, kw_only=True):
    """An instance. What only it can know is left out if it is dead or cannot be asked."""

    instance_id: str
    address: Annotated[str, Meta(description="Where the other instances reach it.")]
    alive: bool
    self: Annotated[bool, Meta(description="Is it the instance that answers?")]
    shards: Annotated[int, Meta(description="Shards it owns.")]
    joined_at: InstantText
    unreachable: Annotated[str, Meta(description="Alive, but it could not be asked: why.")] | UnsetType = UNSET
    version: str | UnsetType = UNSET
    ready: bool | UnsetType = UNSET
    reason: Annotated[str, Meta(description="Why it is not ready.")] | UnsetType = UNSET
    lease_ms: Annotated[int, Meta(description="How much longer it may fire.")] | UnsetType = UNSET
    clock_skew_ms: Annotated[int, Meta(description="Its clock minus the database's.")] | UnsetType = UNSET
    in_memory: Annotated[int, Meta(description="Timers in memory.")] | UnsetType = UNSET
    in_flight: Annotated[int, Meta(description="Callbacks under way.")] | UnsetType = UNSET
    held: Annotated[int, Meta(description="Due timers waiting for their destination.")] | UnsetType = UNSET
    writes_waiting: int | UnsetType = UNSET
    unreadable: Annotated[int, Meta(description=_UNREADABLE)] | UnsetType = UNSET
    oldest_due_ms: (
        Annotated[int, Meta(description="Age of the oldest due timer not yet fired, held ones included.")] | UnsetType
    ) = UNSET
    lateness_p50_ms: float | UnsetType = msgspec.field(name="latenessP50Ms", default=UNSET)
    lateness_p99_ms: float | UnsetType = msgspec.field(name="latenessP99Ms", default=UNSET)
    held_for: (
        Annotated[
            list[HeldForJson],
            Meta(
                description="The destinations with most timers held, at most 5. Told only to those who may see "
                "every namespace."
            ),
        ]
        | UnsetType
    ) = UNSET


class ShardCountsJson(_Answer, kw_only=True):
    total: int
    owned: Annotated[int, Meta(description="By a living instance.")]
    free: Annotated[int, Meta(description="Between two owners; more than seconds is too long.")]
    of_dead: Annotated[int, Meta(description="Owned by an instance that is dead: about to be claimed by another.")]


class ShardJson(_Answer):
    shard_id: int
    version: Annotated[int, Meta(description="Grows with every change of owner.")]
    owner_id: str | UnsetType = UNSET
    owner_address: str | UnsetType = UNSET
    in_memory: Annotated[int, Meta(description="Timers in memory, if owned by the answering instance.")] | UnsetType = (
        UNSET
    )
    horizon: Annotated[InstantText, Meta(description="Timers due up to then are in memory.")] | UnsetType = UNSET


class ClusterStatusJson(_Answer, kw_only=True):
    """The whole cluster. Its living members were asked, each for a second at most; sums and worst figures are of
    those that answered."""

    instance_id: Annotated[str, Meta(description="The instance that answers.")]
    version: Annotated[str, Meta(description="Of the instance that answers.")]
    store: str
    ready: Annotated[bool, Meta(description="Is the instance that answers ready, as `/readyz` says?")]
    reason: Annotated[str, Meta(description="Why it is not ready.")] | UnsetType = UNSET
    clock_skew_max_ms: Annotated[int, Meta(description="An instance whose clock is off by more does not fire.")]
    dead_after_ms: Annotated[int, Meta(description="An instance silent for longer is declared dead.")]
    members: Annotated[list[MemberJson], Meta(description="First the living, then at most 100 of the dead.")]
    shard_counts: ShardCountsJson
    unowned_shards: Annotated[list[int], Meta(description="Shards that are free or of the dead, at most 100.")]
    shards: Annotated[list[ShardJson], Meta(description="If asked for.")] | UnsetType = UNSET
    in_memory: Annotated[int, Meta(description="Timers in memory, all members together.")]
    in_flight: Annotated[int, Meta(description="Callbacks under way, all members together.")]
    held: Annotated[int, Meta(description="Due timers waiting for their destination, all members together.")]
    writes_waiting: Annotated[int, Meta(description="All members together.")]
    unreadable: Annotated[int, Meta(description=_UNREADABLE)]
    clock_skew_ms: Annotated[int, Meta(description="A member's clock minus the database's, where it is worst.")]
    oldest_due_ms: (
        Annotated[int, Meta(description="Age of the oldest due timer not yet fired, held ones included.")] | UnsetType
    ) = UNSET
    lateness_p50_ms: (
        Annotated[float, Meta(description="Of the member where it is worst, since it started.")] | UnsetType
    ) = msgspec.field(name="latenessP50Ms", default=UNSET)
    lateness_p99_ms: (
        Annotated[float, Meta(description="Of the member where it is worst, since it started.")] | UnsetType
    ) = msgspec.field(name="latenessP99Ms", default=UNSET)


class ClusterMapJson(_Answer, kw_only=True):
    """Who owns which shard, as one instance last saw it."""

    instances: Annotated[
        tuple[str, ...], Meta(description="Addresses of the living.", examples=[["10.0.0.1:8463", "10.0.0.2:8463"]])
    ]
    instance_ids: Annotated[
        tuple[str, ...],
        Meta(description="Of the same instances. `/healthz` answers the id of the one there as `duetime-instance`."),
    ]
    owners: Annotated[
        tuple[int | None, ...],
        Meta(description="By shard: the owner's index in `instances`; null: nobody, or not a living one."),
    ]
    namespaces: Annotated[dict[str, int], Meta(description="`numShards` of those the token is for.")]


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
