"""The table of the HTTP API: every POST path with its request, its answer and the verb it needs.

Both the API and its OpenAPI document are made from it, so that they cannot drift.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from duetime import wire

__all__ = ["PREFIX", "ROUTES", "Route"]

PREFIX = "/api/v1/"


class Route(Struct, frozen=True, kw_only=True):
    path: str
    verb: str
    request: type[Struct]
    answer: type[Struct]
    summary: str
    description: str = ""
    example: dict[str, Any]
    errors: tuple[int, ...] = ()  # beyond those every route may answer


_REF = {"namespace": "default", "timerId": "order-17"}
_WRITE_ERRORS = (429, 503)

ROUTES = (
    Route(
        path="timers/create",
        verb="write",
        request=wire.CreateTimerJson,
        answer=wire.CreatedAnswer,
        summary="Create or replace a timer",
        description="The answer means that the timer is on disk and will fire. A scheduled timer of the same name is "
        "replaced; one that has fired meanwhile is made anew, and fires again. With `ifAbsent` a create may safely be "
        "repeated. Give exactly one of `executeAt` and `delay`.",
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
        summary="Look at a timer",
        description="Scheduled, in flight or, for as long as its namespace keeps it, reached.",
        example=_REF,
        errors=(404, 503),
    ),
    Route(
        path="timers/update",
        verb="write",
        request=wire.UpdateTimerJson,
        answer=wire.UpdatedAnswer,
        summary="Change a scheduled timer",
        description="Changes the fields that are given and keeps the others. A timer that is over is a 409: "
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
        description="After the answer no callback starts. The verdict says whether one was under way.",
        example=_REF,
        errors=(404, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/createMany",
        verb="write",
        request=wire.CreateTimersJson,
        answer=wire.CreatedManyAnswer,
        summary="Create up to 1,000 timers",
        description="Much faster than one by one. Each item succeeds or fails by itself; look at every result.",
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
        description="Each item succeeds or fails by itself; look at every result.",
        example={"timers": [{"timerId": "order-17"}, {"timerId": "order-18"}]},
    ),
    Route(
        path="timers/list",
        verb="read",
        request=wire.ListTimersJson,
        answer=wire.TimersAnswer,
        summary="List timers",
        description="By time, a page at a time. A page may be short, even empty, and still have a `nextCursor`: go on "
        "until it is null.",
        example={"namespace": "default", "state": "scheduled", "limit": 100},
        errors=(404, 503),
    ),
    Route(
        path="timers/fireNow",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Fire a scheduled timer now",
        description="As if its time had come; its `scheduledAt` is now.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="timers/replay",
        verb="write",
        request=wire.TimerRefJson,
        answer=wire.TimerAnswer,
        summary="Fire a reached timer again",
        description="Makes the timer anew, due now, with everything it had: for timers that `failed`, once the cause "
        "is mended.",
        example=_REF,
        errors=(404, 409, *_WRITE_ERRORS),
    ),
    Route(
        path="namespaces/create",
        verb="admin",
        request=wire.CreateNamespaceJson,
        answer=wire.NamespaceAnswer,
        summary="Create a namespace",
        description="`numShards` never changes, not even by deleting the namespace and making it again.",
        example={"namespace": "orders", "numShards": 256},
        errors=(409, 503),
    ),
    Route(
        path="namespaces/get",
        verb="read",
        request=wire.NamespaceRefJson,
        answer=wire.NamespaceAnswer,
        summary="Look at a namespace",
        example={"namespace": "orders"},
        errors=(404, 503),
    ),
    Route(
        path="namespaces/list",
        verb="read",
        request=wire.EmptyJson,
        answer=wire.NamespacesAnswer,
        summary="List namespaces",
        description="Those the token is for, by name.",
        example={},
        errors=(503,),
    ),
    Route(
        path="namespaces/update",
        verb="admin",
        request=wire.UpdateNamespaceJson,
        answer=wire.NamespaceAnswer,
        summary="Change a namespace",
        description="Changes the settings that are given and keeps the others. They apply to attempts made from now "
        "on, of existing timers too. To rotate a signing secret, send the new one in front of the redacted old one; "
        "callbacks then carry both signatures. When all receivers know the new one, send it alone, redacted.",
        example={"namespace": "orders", "callbackTimeoutSeconds": 30, "failedRetention": "90d"},
        errors=(404, 409, 503),
    ),
    Route(
        path="namespaces/delete",
        verb="admin",
        request=wire.NamespaceRefJson,
        answer=wire.EmptyAnswer,
        summary="Delete a namespace",
        description="Only one without scheduled timers: otherwise 409 `namespace_in_use`.",
        example={"namespace": "orders"},
        errors=(404, 409, 503),
    ),
    Route(
        path="cluster/status",
        verb="read",
        request=wire.ClusterQueryJson,
        answer=wire.ClusterStatusJson,
        summary="How the cluster is doing",
        description="Members, shards, backlog, lateness and clocks of the whole cluster, whichever instance is asked. "
        "A member that is alive but cannot be asked is shown with the reason. With `shards` also every shard and its "
        "owner.",
        example={},
        errors=(503,),
    ),
    Route(
        path="cluster/map",
        verb="read",
        request=wire.EmptyJson,
        answer=wire.ClusterMapJson,
        summary="Who owns which shard",
        description="For clients that send a write to the owner of its timer's shard at once, to save the hop from any "
        "other instance. The shard of a timer is the CRC-32 of its id, in UTF-8, modulo the number of shards of its "
        "namespace. As the instance that answers last saw it: a write sent to another than the owner is handed on.",
        example={},
    ),
)
