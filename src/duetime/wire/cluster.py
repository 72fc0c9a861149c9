"""Requests about the cluster, and their answers.

The figures of the cluster are declared and described in domain/status.py. Here is only what JSON says differently.
"""

from __future__ import annotations

from types import NoneType
from typing import Annotated, Any, Union, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from duetime.domain.status import (
    BrokerStatus,
    ClusterStatus,
    HeldFor,
    InstanceStatus,
    MemberStatus,
    ShardCounts,
    ShardStatus,
)
from duetime.wire.parts import AnswerJson, InstantText, RequestJson


class ClusterQueryJson(RequestJson):
    """What to include. No body means `{}`."""

    shards: Annotated[bool, Meta(description="true: include every shard with its owner; there may be thousands.")] = (
        False
    )


def _answer_of(status: type[Struct], *without: str, base: type[Struct] = AnswerJson, optional: bool = False) -> Any:
    """An answer with the fields of a status, where None is omitted. `optional`: all may be omitted."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(status):
        kinds = [kind for kind in get_args(field.type) if kind is not NoneType]
        if field.name in without:
            continue
        if NoneType in get_args(field.type):
            fields.append((field.name, Union[(*kinds, UnsetType)], UNSET))
        elif optional:
            fields.append((field.name, field.type | UnsetType, UNSET))
        else:
            fields.append((field.name, field.type))
    return msgspec.defstruct(status.__name__, fields, bases=(base,), kw_only=True)


_MemberFigures: Any = _answer_of(InstanceStatus, "instance_id", "shards", "held_for", "brokers", optional=True)
_MemberRow: Any = _answer_of(MemberStatus, "self_", "joined_at_ms", "status", base=_MemberFigures)
_Shard: Any = _answer_of(ShardStatus, "horizon_ms")
_ClusterFigures: Any = _answer_of(ClusterStatus, "members", "shard_counts", "unowned_shards", "shards")


class HeldForJson(_answer_of(HeldFor)):  # type: ignore[misc]
    """A flow that due timers wait for."""


class BrokerJson(_answer_of(BrokerStatus)):  # type: ignore[misc]
    """The connection of an instance to a message broker, and the commands that it receives from there."""


class MemberJson(_MemberRow, kw_only=True):  # type: ignore[misc, call-arg]
    """An instance. The figures that it reports itself are omitted if it is dead or does not answer."""

    self: Annotated[bool, Meta(description="true: this is the instance that answers the request.")]
    joined_at: InstantText
    held_for: (
        Annotated[
            list[HeldForJson],
            Meta(
                description="The flows with the most held timers, at most 5. Only for tokens that allow "
                "every namespace."
            ),
        ]
        | UnsetType
    ) = UNSET
    brokers: Annotated[list[BrokerJson], Meta(description="The message brokers of its configuration.")] | UnsetType = (
        UNSET
    )


class ShardCountsJson(_answer_of(ShardCounts)):  # type: ignore[misc]
    pass


class ShardJson(_Shard, kw_only=True):  # type: ignore[misc, call-arg]
    horizon: (
        Annotated[InstantText, Meta(description="Timers that are due up to this time are in memory.")] | UnsetType
    ) = UNSET


class ClusterStatusJson(_ClusterFigures, kw_only=True):  # type: ignore[misc, call-arg]
    """The status of the whole cluster. All live members are asked, and have one second to answer; sums and worst
    values are of those that answered."""

    members: Annotated[list[MemberJson], Meta(description="First the live ones, then at most 100 dead ones.")]
    shard_counts: ShardCountsJson
    unowned_shards: Annotated[list[int], Meta(description="Shards without a live owner, at most 100.")]
    shards: Annotated[list[ShardJson], Meta(description="Only if requested.")] | UnsetType = UNSET


class ClusterMapJson(AnswerJson, kw_only=True):
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
