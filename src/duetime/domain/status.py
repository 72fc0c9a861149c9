"""The status of an instance and of the cluster, as operators, clients and other instances get it.

`InstanceStatus` and `HeldFor` are also the message between instances. wire.py describes the fields in JSON.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = [
    "ClusterStatus",
    "HeldFor",
    "InstanceStatus",
    "MemberStatus",
    "ShardCounts",
    "ShardMap",
    "ShardStatus",
]


class HeldFor(Struct, frozen=True, kw_only=True):
    """A destination that due timers wait for."""

    destination: str
    held: int
    in_flight: int
    failures: int  # in a row
    breaker_open: bool


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
    reason: str | None = None  # why not ready
    lease_ms: int
    clock_skew_ms: int
    shards: int
    in_memory: int
    in_flight: int
    held: int
    writes_waiting: int
    unreadable: int = 0
    oldest_due_ms: int | None = None
    lateness_p50_ms: float | None = None
    lateness_p99_ms: float | None = None
    held_for: tuple[HeldFor, ...] = ()  # the destinations with the most held timers, a few


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A member as its row describes it and, if it is alive and answers, the status that it reports."""

    instance_id: str
    address: str
    alive: bool
    self_: bool
    shards: int
    joined_at_ms: int
    status: InstanceStatus | None = None
    unreachable: str | None = None  # why a live member does not answer


class ShardStatus(Struct, frozen=True, kw_only=True):
    shard_id: int
    version: int
    owner_id: str | None
    owner_address: str | None
    in_memory: int | None  # None: not owned by the answering instance
    horizon_ms: int | None


class ShardCounts(Struct, frozen=True, kw_only=True):
    total: int
    owned: int  # by live members
    free: int
    of_dead: int


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The status of the whole cluster, as its live members report it. Figures are the sum over all members that
    answered; lateness, clock skew and age are the worst of them."""

    instance_id: str  # the answering instance
    version: str
    store: str
    ready: bool  # the answering instance
    reason: str | None  # why not ready
    clock_skew_max_ms: int
    dead_after_ms: int
    members: tuple[MemberStatus, ...]
    shard_counts: ShardCounts
    unowned_shards: tuple[int, ...]  # without a live owner, the first few
    shards: tuple[ShardStatus, ...] | None = None  # None: not asked for
    in_memory: int
    in_flight: int
    held: int
    writes_waiting: int
    unreadable: int = 0  # stored timers that cannot be decoded, as far as they have been read
    clock_skew_ms: int
    oldest_due_ms: int | None
    lateness_p50_ms: float | None
    lateness_p99_ms: float | None
