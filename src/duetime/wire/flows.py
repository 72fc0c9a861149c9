"""Requests about flows, and their answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType, field

from duetime.domain.flow_status import FlowState
from duetime.wire.parts import URL_BYTES_MAX, AnswerJson, InstantText, NamespaceName, NamespaceOfTimer, RequestJson

FlowKey = Annotated[
    str,
    Meta(
        description="The `flowKey` of its timers, 1 to 255 bytes; or, for timers without one, their URL as it was "
        "given, without its query, up to 2,048 bytes.",
        examples=["https://shop.example/hooks/expire"],
        extra_json_schema={"minLength": 1, "maxLength": URL_BYTES_MAX},
    ),
]
FlowRate = Annotated[
    float,
    Meta(
        description="Calls per second in the whole cluster, evenly spaced; 0.001 to 100,000. "
        "`null`: the default of the server.",
        examples=[5],
        extra_json_schema={"minimum": 0.001, "maximum": 100_000},
    ),
]
FlowConcurrency = Annotated[
    int,
    Meta(
        ge=1,
        le=10_000,
        description="Calls in flight at once, in the whole cluster. `null`: only the limits of the server apply.",
        examples=[2],
    ),
]


class FlowRefJson(RequestJson, kw_only=True):
    """The name of a flow: the timers of a namespace with the same flow key."""

    flow_key: FlowKey
    namespace: NamespaceOfTimer = "default"


class UpdateFlowJson(FlowRefJson):
    """The limits to change. Omitted limits keep their values; `null` clears a limit."""

    rate: FlowRate | UnsetType | None = UNSET
    concurrency: FlowConcurrency | UnsetType | None = UNSET


class ListFlowsJson(RequestJson, kw_only=True):
    """A filter for flows."""

    namespace: Annotated[NamespaceName, Meta(description="Omitted: all that the token allows.")] | None = None
    state: Annotated[FlowState, Meta(description="Only flows in this state.")] | None = None
    limit: Annotated[
        int, Meta(ge=1, description="Largest number of flows in a page, at most 1,000. A page may have fewer.")
    ] = 100
    cursor: Annotated[str, Meta(description="`nextCursor` of the previous page.")] | None = None


class FlowJson(AnswerJson, kw_only=True):
    """A flow: its state, what waits, and its limits."""

    namespace: str
    flow_key: str
    origin: Annotated[str, Meta(description="Scheme, host and port that was called last; empty: none, lately.")]
    state: Annotated[
        FlowState,
        Meta(
            description="`closed`: its timers are delivered. `open`: its breaker, or that of its origin, is open; its "
            "timers wait until `until`. `halfOpen`: one call is tried. `paused`: it is paused, or its namespace is."
        ),
    ]
    waiting: Annotated[int, Meta(description="Due timers that wait, sum of all members.")]
    in_flight: Annotated[int, Meta(description="Callbacks in flight, sum of all members.")]
    until: Annotated[InstantText, Meta(description="When an open breaker lets a call through again.")] | None
    last_error: Annotated[str, Meta(description="Why the last call failed that counted for the breaker.")] | None
    rate: Annotated[float, Meta(description="The limit that is set, in calls per second.")] | None
    concurrency: Annotated[int, Meta(description="The limit that is set, in calls in flight.")] | None


class UnansweredJson(AnswerJson, kw_only=True):
    """An instance that is alive but did not answer."""

    instance_id: str
    address: str
    reason: str


_UNANSWERED = "Live instances that did not answer within a second: their timers and breakers are missing here."


class FlowAnswerJson(AnswerJson):
    flow: FlowJson
    unanswered: Annotated[list[UnansweredJson], Meta(description=_UNANSWERED)] = field(default_factory=list)


class FlowsAnswer(AnswerJson):
    flows: list[FlowJson]
    next_cursor: Annotated[str, Meta(description="For the next page; null: there is no further page.")] | None
    unanswered: Annotated[list[UnansweredJson], Meta(description=_UNANSWERED)] = field(default_factory=list)
