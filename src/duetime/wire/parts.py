"""The types of the fields that several requests and answers have."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Raw, Struct

URL_BYTES_MAX = 2_048

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
FlowKeyOfTimer = Annotated[
    str,
    Meta(
        description="The flow that the timer belongs to, in its namespace: limits, breaker and pause are per flow. "
        + _ID
        + " Not a URL with a query.",
        examples=["shop-webhooks"],
        extra_json_schema=_ID_LENGTH,
    ),
]


class RequestJson(Struct, rename="camel", omit_defaults=True, forbid_unknown_fields=True):
    pass


class AnswerJson(Struct, rename="camel", omit_defaults=True):
    """Later versions may add fields to answers: a decoder must ignore unknown ones."""


class EmptyJson(RequestJson):
    """An empty object `{}`, or no body."""


class EmptyAnswer(AnswerJson):
    """An empty object: the operation is done."""


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
