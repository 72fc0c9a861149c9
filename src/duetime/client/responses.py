"""Decoders of the responses of the server. They unwrap the models that a user of the client gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from duetime.client.errors import error_of_problem
from duetime.client.models import (
    ClusterStatus,
    Created,
    Flow,
    FlowPage,
    Namespace,
    Page,
    SchedulePreview,
    Timer,
    Updated,
)
from duetime.domain.timer import Verdict
from duetime.errors import DuetimeError
from duetime.wire import ProblemJson


class _TimerResponse(Struct):
    timer: Timer


class _Deleted(Struct):
    verdict: Verdict


class _CreateResult(Struct):
    timer: Timer | None = None
    replaced: bool | None = False
    existed: bool = False
    error: ProblemJson | None = None


class _DeleteResult(Struct):
    verdict: Verdict | None = None
    error: ProblemJson | None = None


class _CreateResults(Struct):
    results: list[_CreateResult]


class _DeleteResults(Struct):
    results: list[_DeleteResult]


class _NamespaceResponse(Struct):
    namespace: Namespace


class _NamespacesResponse(Struct):
    namespaces: tuple[Namespace, ...]


class _FlowResponse(Struct):
    flow: Flow


class ClusterMap(Struct, rename="camel"):
    """Which instance owns which shard: `owners[shard_id]` is an index into `instances`."""

    instances: list[str]
    instance_ids: list[str]
    owners: list[Annotated[int, Meta(ge=0)] | None]
    namespaces: dict[str, Annotated[int, Meta(ge=1)]]


decode_created = msgspec.json.Decoder(Created).decode
decode_timer = msgspec.json.Decoder(_TimerResponse).decode
decode_updated = msgspec.json.Decoder(Updated).decode
decode_deleted = msgspec.json.Decoder(_Deleted).decode
decode_page = msgspec.json.Decoder(Page).decode
decode_status = msgspec.json.Decoder(ClusterStatus).decode
decode_map = msgspec.json.Decoder(ClusterMap).decode
decode_namespace = msgspec.json.Decoder(_NamespaceResponse).decode
decode_flow = msgspec.json.Decoder(_FlowResponse).decode
decode_flow_page = msgspec.json.Decoder(FlowPage).decode
decode_preview = msgspec.json.Decoder(SchedulePreview).decode
decode_namespaces = msgspec.json.Decoder(_NamespacesResponse).decode
_decode_create_results = msgspec.json.Decoder(_CreateResults).decode
_decode_delete_results = msgspec.json.Decoder(_DeleteResults).decode


def decode_created_many(body: bytes) -> Sequence[Created | DuetimeError]:
    return [
        error_of_problem(result.error)
        if result.timer is None
        else Created(result.timer, result.replaced, result.existed)
        for result in _decode_create_results(body).results
    ]


def decode_deleted_many(body: bytes) -> Sequence[Verdict | DuetimeError]:
    return [
        error_of_problem(result.error) if result.verdict is None else result.verdict
        for result in _decode_delete_results(body).results
    ]
