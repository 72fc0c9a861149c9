"""The table of the HTTP API: every POST path with its request, its answer and the verb it requires.

The API and its OpenAPI document are both made from it, so that they always agree.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from duetime import wire
from duetime.config import Limits

__all__ = ["PREFIX", "ROUTES", "Route", "body_bytes_max"]

PREFIX = "/api/v1/"
_BODY_BYTES = 1024 * 1024
_PREVIEW_BYTES = 64 * 1024  # a thousand excluded dates, and space between them
_REF_BYTES = 4_096  # a namespace and a timer id with every character escaped, and space between them


class Route(Struct, frozen=True, kw_only=True):
    path: str
    verb: str
    request: type[Struct]
    answer: type[Struct]
    summary: str
    description: str = ""
    example: dict[str, Any]
    errors: tuple[int, ...] = ()  # in addition to those of every route


def body_bytes_max(path: str, limits: Limits, request_bytes_max: int) -> int:
    """The largest body of a route. Only a request with many timers needs many bytes: the time to decode a body grows
    with its size, and nothing else is decoded meanwhile."""
    if path == "timers/createMany":
        return request_bytes_max
    if path == "timers/deleteMany":
        return min(request_bytes_max, max(_BODY_BYTES, limits.batch_timers_max * _REF_BYTES))
    if path == "schedules/preview":
        return min(request_bytes_max, _PREVIEW_BYTES)
    # A timer's payload, and as much again for its other fields.
    return min(request_bytes_max, max(_BODY_BYTES, 2 * limits.payload_bytes_max))


_REF = {"namespace": "default", "timerId": "order-17"}
_FLOW = {"namespace": "orders", "flowKey": "https://shop.example/hooks/expire"}
_WRITE_ERRORS = (429, 503)

ROUTES = (
    Route(
        path="timers/create",
        verb="write",
        request=wire.CreateTimerJson,
        answer=wire.CreatedAnswer,
        summary="Create or replace a timer",
        description="The answer means that the timer is stored and will fire. A scheduled timer with the same id is "
        "replaced. If the timer has fired already, a new one is created, which fires again, unless `ifReached` is "
        "`ignore`. With `ifAbsent` a create may safely be repeated. Exactly one of `executeAt`, `delay` and "
        "`schedule` is required.",
        example={
            "timerId": "order-17",
            "delay": "10s",
            "callbackUrl": "http://127.0.0.1:9000/hooks/expire",
            "payload": {"order": 17},
        },
        errors=(404, 409, 413, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/get",
        verb="read",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Get a timer",
        description="A timer that is scheduled, in flight or reached. Reached timers are kept for the retention of "
        "their namespace.",
        example=_REF,
        errors=(404, 503),
    ),
    Route(
        path="timers/update",
        verb="write",
        request=wire.UpdateTimerJson,
        answer=wire.UpdatedAnswer,
        summary="Change a scheduled timer",
        description="Changes the fields that are given and keeps the others. A reached timer is a 409: "
        "create it again, or replay it.",
        example={**_REF, "delay": "1h"},
        errors=(404, 409, 413, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/delete",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.DeletedAnswer,
        summary="Cancel a timer",
        description="After the answer no callback starts. The verdict says whether one had started before.",
        example=_REF,
        errors=(404, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/createMany",
        verb="write",
        request=wire.CreateTimersJson,
        answer=wire.CreatedManyAnswer,
        summary="Create up to 1,000 timers",
        description="Much faster than one request for each. Each item succeeds or fails by itself: check every result.",
        example={
            "timers": [
                {"timerId": "order-17", "delay": "10m", "callbackUrl": "http://127.0.0.1:9000/hooks/expire"},
                {"timerId": "order-18", "delay": "20m", "callbackUrl": "http://127.0.0.1:9000/hooks/expire"},
            ]
        },
    ),
    Route(
        path="timers/deleteMany",
        verb="write",
        request=wire.DeleteTimersJson,
        answer=wire.DeletedManyAnswer,
        summary="Cancel up to 1,000 timers",
        description="Each item succeeds or fails by itself: check every result.",
        example={"timers": [{"timerId": "order-17"}, {"timerId": "order-18"}]},
    ),
    Route(
        path="timers/list",
        verb="read",
        request=wire.ListTimersJson,
        answer=wire.TimersAnswer,
        summary="List timers",
        description="Ordered by time, in pages. A page may have few timers, even none, and still have a `nextCursor`: "
        "continue until it is null.",
        example={"namespace": "default", "state": "scheduled", "limit": 100},
        errors=(404, 503),
    ),
    Route(
        path="timers/fireNow",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Fire a scheduled timer now",
        description="The timer becomes due now; its `scheduledAt` becomes the current time. A timer with a schedule is "
        "called in addition, and the schedule goes on.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/pause",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Pause a timer",
        description="It does not fire until it is resumed. The answer waits up to 2 s for a call in flight. If that "
        "takes longer, its result is not recorded, and it is made again after the pause, with the same `webhook-id`.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/resume",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Resume a paused timer",
        description="The pause counts as an outage: an overdue timer fires at once, unless `missed` says otherwise, "
        "and `catchUp` decides which of the occurrences of a schedule fire that have passed.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/replay",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Fire a reached timer again",
        description="Creates the timer again with the same values, due now. For timers that `failed`, after the cause "
        "is fixed.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="schedules/preview",
        verb="read",
        request=wire.PreviewScheduleJson,
        answer=wire.PreviewAnswer,
        summary="Preview a wall-clock schedule",
        description="The next instants of a schedule: local times in a time zone, what becomes of them when clocks "
        "change, and why. Nothing is stored.",
        example={
            "schedule": {"at": "2027-03-13T02:30", "timezone": "America/New_York", "repeat": "daily"},
            "count": 3,
            "from": "2027-03-13T00:00:00Z",
        },
    ),
    Route(
        path="namespaces/create",
        verb="admin",
        request=wire.CreateNamespaceJson,
        answer=wire.NamespaceAnswer,
        summary="Create a namespace",
        description="`numShards` never changes, not even if the namespace is deleted and created again.",
        example={"namespace": "orders", "numShards": 256},
        errors=(409, 503),
    ),
    Route(
        path="namespaces/get",
        verb="read",
        request=wire.NamespaceRefJson,
        answer=wire.NamespaceAnswer,
        summary="Get a namespace",
        example={"namespace": "orders"},
        errors=(404, 503),
    ),
    Route(
        path="namespaces/list",
        verb="read",
        request=wire.EmptyJson,
        answer=wire.NamespacesAnswer,
        summary="List namespaces",
        description="Those that the token allows, by name.",
        example={},
        errors=(503,),
    ),
    Route(
        path="namespaces/update",
        verb="admin",
        request=wire.UpdateNamespaceJson,
        answer=wire.NamespaceAnswer,
        summary="Change a namespace",
        description="Changes the settings that are given and keeps the others. They apply to all later attempts, also "
        "of existing timers. To replace a signing secret, send the new one before the redacted old one; callbacks then "
        "have both signatures. When all receivers have the new one, send only that one, redacted.",
        example={"namespace": "orders", "callbackTimeoutSeconds": 30, "failedRetention": "90d"},
        errors=(404, 409, 503),
    ),
    Route(
        path="namespaces/delete",
        verb="admin",
        request=wire.NamespaceRefJson,
        answer=wire.EmptyAnswer,
        summary="Delete a namespace",
        description="Only a namespace without scheduled timers; otherwise 409 `namespace_in_use`.",
        example={"namespace": "orders"},
        errors=(404, 409, 503),
    ),
    Route(
        path="namespaces/pause",
        verb="admin",
        request=wire.NamespaceRefJson,
        answer=wire.NamespaceAnswer,
        summary="Pause a namespace",
        description="Within 2 s none of its timers fires any more, in the whole cluster, until it is resumed; also "
        "after restarts. Timers can still be created, changed and cancelled. Calls in flight end normally.",
        example={"namespace": "orders"},
        errors=(404, 409, 503),
    ),
    Route(
        path="namespaces/resume",
        verb="admin",
        request=wire.NamespaceRefJson,
        answer=wire.NamespaceAnswer,
        summary="Resume a namespace",
        description="Its overdue timers fire, the oldest first, within the limits of their flows. Flows that are "
        "themselves paused stay paused.",
        example={"namespace": "orders"},
        errors=(404, 409, 503),
    ),
    Route(
        path="flows/list",
        verb="read",
        request=wire.ListFlowsJson,
        answer=wire.FlowsAnswer,
        summary="List flows",
        description="The flows with due timers, limits, a pause or recent failures, by namespace and key. All "
        "live instances are asked. A page may have few flows, even none, and still have a `nextCursor`: continue until "
        "it is null.",
        example={"namespace": "orders", "state": "open"},
        errors=(404, 429),
    ),
    Route(
        path="flows/get",
        verb="read",
        request=wire.FlowRefJson,
        answer=wire.FlowAnswerJson,
        summary="Get a flow",
        description="Also of a flow without timers: it is `closed`, with no limits.",
        example=_FLOW,
        errors=(404, 429, 503),
    ),
    Route(
        path="flows/update",
        verb="admin",
        request=wire.UpdateFlowJson,
        answer=wire.FlowAnswerJson,
        summary="Limit a flow",
        description="Limits hold for the whole cluster within 2 s, and survive restarts. `null` clears a limit. A "
        "namespace has at most 1,000 flows with limits or a pause.",
        example={**_FLOW, "rate": 5, "concurrency": 2},
        errors=(404, 409, 429, 503),
    ),
    Route(
        path="flows/pause",
        verb="admin",
        request=wire.FlowRefJson,
        answer=wire.FlowAnswerJson,
        summary="Pause a flow",
        description="Within 2 s none of its timers fires any more, in the whole cluster, until it is resumed; also "
        "after restarts. No attempts are used. Calls in flight end normally.",
        example=_FLOW,
        errors=(404, 409, 429, 503),
    ),
    Route(
        path="flows/resume",
        verb="admin",
        request=wire.FlowRefJson,
        answer=wire.FlowAnswerJson,
        summary="Resume a flow",
        description="Its overdue timers fire, the oldest first, within its limits. An open breaker stays open until a "
        "call that it lets through succeeds.",
        example=_FLOW,
        errors=(404, 409, 429, 503),
    ),
    Route(
        path="cluster/status",
        verb="read",
        request=wire.ClusterQueryJson,
        answer=wire.ClusterStatusJson,
        summary="Get the status of the cluster",
        description="Members, shards, held timers, lateness and clocks of the whole cluster; every instance can "
        "answer. A member that is alive but does not answer is shown with the reason. With `shards` also every shard "
        "and its owner.",
        example={},
        errors=(503,),
    ),
    Route(
        path="cluster/map",
        verb="read",
        request=wire.EmptyJson,
        answer=wire.ClusterMapJson,
        summary="Get the owners of the shards",
        description="For clients that send a write directly to the owner of its timer's shard, to save the hop from "
        "another instance. The shard of a timer is the CRC-32 of its id in UTF-8, modulo the number of shards of its "
        "namespace. The map is what the answering instance last read; a write to another instance is forwarded to the "
        "owner.",
        example={},
    ),
)
