"""The table of the HTTP API: every POST path with its request, its answer and the verb it requires.

The API and its OpenAPI document are both made from it, so that they always agree.
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
    errors: tuple[int, ...] = ()  # in addition to those of every route


_REF = {"namespace": "default", "timerId": "order-17"}
_WRITE_ERRORS = (429, 503)

ROUTES = (
    Route(
        path="timers/create",
        verb="write",
        request=wire.CreateTimerJson,
        answer=wire.CreatedAnswer,
        summary="Create or replace a timer",
        description="The answer means that the timer is stored and will fire. A scheduled timer with the same id is "
        "replaced. If the timer has fired already, a new one is created, which fires again. With `ifAbsent` a create "
        "may safely be repeated. Exactly one of `executeAt` and `delay` is required.",
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
        description="The timer becomes due now; its `scheduledAt` becomes the current time.",
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
        path="cluster/status",
        verb="read",
        request=wire.ClusterQueryJson,
        answer=wire.ClusterStatusJson,
        summary="Get the status of the cluster",
        description="Members, shards, backlog, lateness and clocks of the whole cluster; every instance can answer. "
        "A member that is alive but does not answer is shown with the reason. With `shards` also every shard and its "
        "owner.",
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
