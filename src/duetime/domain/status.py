"""The status of an instance and of the cluster, as operators, clients and other instances get it.

`InstanceStatus`, `HeldFor` and `BrokerStatus` are also the message between instances. The answers of the API have the
same fields, with these descriptions: `wire/cluster.py` derives them.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

__all__ = [
    "BrokerStatus",
    "ClusterStatus",
    "HeldFor",
    "InstanceStatus",
    "MemberStatus",
    "ShardCounts",
    "ShardMap",
    "ShardStatus",
]

_UNREADABLE = "Stored timers that were read, but cannot be decoded and do not fire. The log names them."
_OLDEST_DUE = "Age of the oldest due timer that was not fired yet, including held ones."
_WORST = "The worst of all members, each since its start."
_SUM = "{}, sum of all members."


class HeldFor(Struct, frozen=True, kw_only=True):
    """A flow that due timers wait for."""

    destination: Annotated[str, Meta(description="The flow key: `flowKey`, or the URL without its query.")]
    held: Annotated[int, Meta(description="Due timers that wait for it.")]
    in_flight: Annotated[int, Meta(description="Callbacks in flight to it.")]
    failures: Annotated[int, Meta(description="Failed attempts in a row.")]
    breaker_open: Annotated[bool, Meta(description="true: it failed so often that it is not called for a while.")]
    last_error: Annotated[str, Meta(description="Why the last of the failed attempts failed.")] | None = None


class BrokerStatus(Struct, frozen=True, kw_only=True):
    """The connection of an instance to a message broker, and the commands that it receives from there."""

    name: Annotated[str, Meta(description="`nats` or `kafka`.")]
    connected: bool
    away_reason: Annotated[str, Meta(description="Why it is not connected.")] | None = None
    consuming: (
        Annotated[
            bool,
            Meta(description="Does this instance receive commands? Omitted if no commands are read from this broker."),
        ]
        | None
    ) = None
    not_consuming_reason: Annotated[str, Meta(description="Why it receives no commands.")] | None = None
    waiting: (
        Annotated[
            int, Meta(description="Commands that wait in the broker, for all instances. Omitted if it is not known.")
        ]
        | None
    ) = None
    in_flight: Annotated[
        int,
        Meta(description="Commands that this instance works on: received, not acknowledged and not handed back yet."),
    ] = 0
    unacknowledged: (
        Annotated[
            int,
            Meta(
                description="Commands that the broker has delivered to any instance and that are not acknowledged, "
                "those that wait for a retry included: the fewest of the last few looks. Only of NATS."
            ),
        ]
        | None
    ) = None
    retrying: Annotated[
        int, Meta(description="Commands that this instance has handed back and that wait for a retry.")
    ] = 0
    retry_reason: (
        Annotated[
            str,
            Meta(description="Why the last of those was handed back. Only for tokens that allow every namespace."),
        ]
        | None
    ) = None
    refused: Annotated[int, Meta(description="Commands that became dead letters since this instance has started.")] = 0
    refused_ago_ms: Annotated[int, Meta(description="How long ago the last one became a dead letter.")] | None = None
    refusal_reason: Annotated[str, Meta(description="Why. Only for tokens that allow every namespace.")] | None = None
    remark: (
        Annotated[
            str, Meta(description="What an operator should know of the commands there, although it is no failure.")
        ]
        | None
    ) = None


class ShardMap(Struct, frozen=True):
    """Who owns which shard, for clients that send writes directly to the owner. A hint: any instance accepts any
    request."""

    addresses: tuple[str, ...]  # of live instances
    instance_ids: tuple[str, ...]  # of the same instances, in the same order
    owners: tuple[int | None, ...]  # by shard id: an index into these; None: no live owner
    num_shards: dict[str, int]  # by namespace


class InstanceStatus(Struct, frozen=True, kw_only=True):
    """The status that one instance reports of itself."""

    instance_id: str
    version: str
    ready: bool
    reason: Annotated[str, Meta(description="Why it is not ready.")] | None = None
    lease_ms: Annotated[int, Meta(description="For how long it may still fire timers.")]
    clock_skew_ms: Annotated[int, Meta(description="Its clock minus the clock of the database.")]
    shards: int
    in_memory: Annotated[int, Meta(description="Timers in memory.")]
    in_flight: Annotated[int, Meta(description="Callbacks in flight.")]
    held: Annotated[int, Meta(description="Due timers that are held: they wait for their flow, origin or namespace.")]
    writes_waiting: int
    unreadable: Annotated[int, Meta(description=_UNREADABLE)] = 0
    oldest_due_ms: Annotated[int, Meta(description=_OLDEST_DUE)] | None = None
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    held_for: tuple[HeldFor, ...] = ()  # the flows with the most held timers, a few
    brokers: tuple[BrokerStatus, ...] = ()  # those that are configured


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A member as its row describes it and, if it is alive and answers, the status that it reports."""

    instance_id: str
    address: Annotated[str, Meta(description="The address at which other instances reach it.")]
    alive: bool
    self_: bool
    shards: Annotated[int, Meta(description="Shards it owns.")]
    joined_at_ms: int
    status: InstanceStatus | None = None
    unreachable: Annotated[str, Meta(description="Why an instance that is alive did not answer.")] | None = None


class ShardStatus(Struct, frozen=True, kw_only=True):
    shard_id: int
    version: Annotated[int, Meta(description="Grows with every change of owner.")]
    owner_id: str | None
    owner_address: str | None
    in_memory: Annotated[int, Meta(description="Timers in memory, if the answering instance owns the shard.")] | None
    horizon_ms: int | None


class ShardCounts(Struct, frozen=True, kw_only=True):
    total: int
    owned: Annotated[int, Meta(description="Owned by a live instance.")]
    free: Annotated[int, Meta(description="Without an owner. Normally for less than a few seconds.")]
    of_dead: Annotated[int, Meta(description="Owned by a dead instance; another one will claim them.")]


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The status of the whole cluster, as its live members report it. Figures are the sum over all members that
    answered; lateness, clock skew and age are the worst of them."""

    instance_id: Annotated[str, Meta(description="The instance that answers the request.")]
    version: Annotated[str, Meta(description="The version of the instance that answers.")]
    store: str
    ready: Annotated[bool, Meta(description="Is the instance that answers ready (`/readyz`)?")]
    reason: Annotated[str, Meta(description="Why it is not ready.")] | None
    clock_skew_max_ms: Annotated[int, Meta(description="An instance whose clock differs by more does not fire timers.")]
    dead_after_ms: Annotated[int, Meta(description="An instance without a heartbeat for longer is declared dead.")]
    members: tuple[MemberStatus, ...]
    shard_counts: ShardCounts
    unowned_shards: tuple[int, ...]  # without a live owner, the first few
    shards: tuple[ShardStatus, ...] | None = None  # None: not asked for
    in_memory: Annotated[int, Meta(description=_SUM.format("Timers in memory"))]
    in_flight: Annotated[int, Meta(description=_SUM.format("Callbacks in flight"))]
    held: Annotated[int, Meta(description=_SUM.format("Due timers that are held"))]
    writes_waiting: Annotated[int, Meta(description=_SUM.format("Writes that wait for a commit"))]
    unreadable: Annotated[int, Meta(description=_UNREADABLE)] = 0
    paused_namespaces: Annotated[int, Meta(description="Namespaces that are paused: none of their timers fires.")] = 0
    clock_skew_ms: Annotated[
        int, Meta(description="The clock of a member minus the clock of the database: the worst of all members.")
    ]
    oldest_due_ms: Annotated[int, Meta(description=_OLDEST_DUE)] | None
    lateness_p50_ms: Annotated[float, Meta(description=_WORST)] | None
    lateness_p99_ms: Annotated[float, Meta(description=_WORST)] | None
