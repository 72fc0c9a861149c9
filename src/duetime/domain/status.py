"""How an instance and its cluster stand: what is told of them to operators, clients and each other."""

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
    """Who owns which shard, for clients that write to the owner at once. A hint: any instance takes any request."""

    addresses: tuple[str, ...]  # of the alive
    instance_ids: tuple[str, ...]  # of the same, in the same order
    owners: tuple[int | None, ...]  # by shard id: an index into them, or nobody
    num_shards: dict[str, int]  # by namespace


class InstanceStatus(Struct, frozen=True, kw_only=True):
    """How one instance is doing, in its own words."""

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
    held_for: tuple[HeldFor, ...] = ()  # the destinations with most timers held, a few


class MemberStatus(Struct, frozen=True, kw_only=True):
    """A member by its row, and, if it is alive and answers, in its own words."""

    instance_id: str
    address: str
    alive: bool
    self_: bool
    shards: int
    joined_at_ms: int
    status: InstanceStatus | None = None
    unreachable: str | None = None  # alive, but cannot be asked: why


class ShardStatus(Struct, frozen=True, kw_only=True):
    shard_id: int
    version: int
    owner_id: str | None
    owner_address: str | None
    in_memory: int | None  # None: not owned here
    horizon_ms: int | None


class ShardCounts(Struct, frozen=True, kw_only=True):
    total: int
    owned: int  # by the living
    free: int
    of_dead: int


class ClusterStatus(Struct, frozen=True, kw_only=True):
    """The whole cluster, as told by its living members to the one that was asked. Figures are those of all
    members that answered, together or, of lateness, skew and age, at their worst."""

    instance_id: str  # who was asked
    version: str
    store: str
    ready: bool  # who was asked
    reason: str | None  # why not ready
    clock_skew_max_ms: int
    dead_after_ms: int
    members: tuple[MemberStatus, ...]
    shard_counts: ShardCounts
    unowned_shards: tuple[int, ...]  # free or of the dead, the first few
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
