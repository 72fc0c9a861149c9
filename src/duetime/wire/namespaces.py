"""Requests about namespaces, and their answers."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from duetime.domain.secrets import SECRETS_MAX
from duetime.domain.timer import SHARDS_MAX
from duetime.wire.parts import (
    AnswerJson,
    CallbackUrl,
    InstantText,
    NamespaceName,
    RequestJson,
    RetryPolicyJson,
    TimeoutSeconds,
)

NamespaceSize = Literal["small", "medium", "large", "xlarge"]
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
CreatesPerSecond = Annotated[
    int,
    Meta(
        ge=1,
        le=1_000_000_000,
        description="Creates per second in the whole cluster; more are answered 429 `quota_creates_per_second`. Each "
        "instance allows an equal part, with at most a second's worth at once. Omitted: `limits.creates_per_second`.",
        examples=[1000],
    ),
]
RequestsPerSecond = Annotated[
    int,
    Meta(
        ge=1,
        le=1_000_000_000,
        description="Requests per second that concern timers of the namespace, in the whole cluster; more are answered "
        "429 `quota_requests_per_second`. A bulk request counts once for each namespace in it. Omitted: "
        "`limits.requests_per_second`.",
        examples=[2000],
    ),
]
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


class NamespaceRefJson(RequestJson):
    """The name of a namespace."""

    namespace: NamespaceName


class CreateNamespaceJson(RequestJson, kw_only=True):
    """A namespace to create, with the defaults of its timers."""

    namespace: NamespaceName
    num_shards: NumShards | UnsetType = UNSET
    size: (
        Annotated[
            NamespaceSize,
            Meta(
                description="Instead of `numShards`: small is 16 shards, medium 256, large 1,024, xlarge 4,096.",
                examples=["medium"],
            ),
        ]
        | UnsetType
    ) = UNSET
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
    creates_per_second: CreatesPerSecond | UnsetType | None = UNSET
    requests_per_second: RequestsPerSecond | UnsetType | None = UNSET
    signing_secrets: Secrets | UnsetType | None = UNSET


class UpdateNamespaceJson(CreateNamespaceJson):
    """The settings to change. Omitted settings keep their values; `null` sets the default."""


class NamespaceJson(AnswerJson, kw_only=True):
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
    creates_per_second: CreatesPerSecond | UnsetType = UNSET
    requests_per_second: RequestsPerSecond | UnsetType = UNSET
    signing_secrets: Annotated[list[str], Meta(description="Redacted.", examples=[["whsec_…aLSw"]])]
    paused: Annotated[bool, Meta(description="true: none of its timers fires until it is resumed.")]
    created_at: InstantText


class NamespaceAnswer(AnswerJson):
    namespace: NamespaceJson


class NamespacesAnswer(AnswerJson):
    namespaces: list[NamespaceJson]
