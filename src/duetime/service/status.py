"""The status of this instance, and of the cluster: all live members are asked, in parallel.

The rows of the store say which members there are and who owns a shard; figures come from the members themselves. A
member that does not answer is shown with the reason, which helps operators too: its address may be wrong.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from duetime import __version__
from duetime.cluster.forwarding import Peer, Peers
from duetime.config import EngineConfig
from duetime.domain.status import (
    BrokerStatus,
    ClusterStatus,
    HeldFor,
    InstanceStatus,
    MemberStatus,
    ShardCounts,
    ShardStatus,
)
from duetime.engine.engine import Engine
from duetime.service.asking import NoAnswer, answer_of
from duetime.store import Member, ShardRow, Store

__all__ = ["cluster_status", "instance_status"]

_UNOWNED_LISTED_MAX = 100
_DEAD_LISTED_MAX = 100
_HELD_FOR_MAX = 5

N = TypeVar("N", int, float)


def instance_status(engine: Engine, brokers: Sequence[BrokerStatus] = ()) -> InstanceStatus:
    membership, flow, lateness = engine.membership, engine.fire_loop.flow, engine.telemetry.lateness
    reason = engine.readiness()
    p50, p99 = lateness.quantile(0.5), lateness.quantile(0.99)
    return InstanceStatus(
        instance_id=membership.instance_id,
        version=__version__,
        ready=reason is None,
        reason=reason,
        lease_ms=membership.lease_ms,
        clock_skew_ms=membership.skew_ms,
        shards=len(engine.shards),
        in_memory=sum(len(shard.entries) for shard in engine.shards.values()),
        in_flight=flow.in_flight,
        held=engine.fire_loop.waiting,
        writes_waiting=engine.counters.writes_waiting,
        unreadable=engine.unreadable,
        oldest_due_ms=engine.oldest_due_ms(),
        lateness_p50_ms=None if p50 is None else p50 * 1_000,
        lateness_p99_ms=None if p99 is None else p99 * 1_000,
        held_for=_held_for(engine),
        brokers=tuple(brokers),
    )


def _held_for(engine: Engine) -> tuple[HeldFor, ...]:
    flow = engine.fire_loop.flow
    if not flow.waiting:
        return ()
    most_held = heapq.nlargest(_HELD_FOR_MAX, flow.queues(), key=lambda queue: queue.waiting)
    return tuple(
        HeldFor(
            destination=queue.name,
            held=queue.waiting,
            in_flight=queue.in_flight,
            failures=queue.failures,
            breaker_open=queue.is_breaker_open,
            last_error=queue.last_error,
        )
        for queue in most_held
        if queue.waiting
    )


async def cluster_status(
    engine: Engine,
    store: Store,
    peers: Peers,
    config: EngineConfig,
    brokers: Callable[[], Sequence[BrokerStatus]],
    *,
    with_shards: bool,
) -> ClusterStatus:
    # Read members after shards: otherwise an owner that joined between the two reads would look dead.
    rows = await store.shards()
    members = _shown_members(await store.members())
    owned = Counter(row.owner_id for row in rows)
    own = instance_status(engine, brokers())
    shown = await asyncio.gather(*(_ask(member, owned[member.instance_id], own, peers) for member in members))
    reported = [member.status for member in shown if member.status is not None]
    alive = {member.instance_id for member in members if member.alive}
    unowned = [row.shard_id for row in rows if row.owner_id not in alive]
    return ClusterStatus(
        instance_id=own.instance_id,
        version=own.version,
        store=store.capabilities.name,
        ready=own.ready,
        reason=own.reason,
        clock_skew_max_ms=config.clock_skew_max.ms,
        dead_after_ms=config.dead_after.ms,
        members=tuple(shown),
        shard_counts=ShardCounts(
            total=len(rows),
            owned=len(rows) - len(unowned),
            free=owned[None],
            of_dead=len(unowned) - owned[None],
        ),
        unowned_shards=tuple(unowned[:_UNOWNED_LISTED_MAX]),
        shards=tuple(_shard_status(engine, row) for row in rows) if with_shards else None,
        in_memory=sum(status.in_memory for status in reported),
        in_flight=sum(status.in_flight for status in reported),
        held=sum(status.held for status in reported),
        writes_waiting=sum(status.writes_waiting for status in reported),
        unreadable=sum(status.unreadable for status in reported),
        paused_namespaces=sum(namespace.paused for namespace in engine.namespaces.all_known()),
        clock_skew_ms=max((status.clock_skew_ms for status in reported), key=abs, default=0),
        oldest_due_ms=_worst(reported, lambda status: status.oldest_due_ms),
        lateness_p50_ms=_worst(reported, lambda status: status.lateness_p50_ms),
        lateness_p99_ms=_worst(reported, lambda status: status.lateness_p99_ms),
    )


def _shown_members(members: list[Member]) -> list[Member]:
    """Live members by address, then the dead ones that joined last. They are limited, because an instance that crashes
    again and again leaves a row each time, for ten minutes."""
    alive = sorted((m for m in members if m.alive), key=lambda m: (m.address, m.joined_at_ms))
    dead = sorted((m for m in members if not m.alive), key=lambda m: (-m.joined_at_ms, m.instance_id))
    return alive + dead[:_DEAD_LISTED_MAX]


async def _ask(member: Member, shards: int, own: InstanceStatus, peers: Peers) -> MemberStatus:
    status, unreachable = None, None
    if member.instance_id == own.instance_id:
        status = own
    elif member.alive:
        answer = await answer_of(peers.status(Peer(member.instance_id, member.address, member.secret)))
        if isinstance(answer, NoAnswer):
            unreachable = answer.reason
        else:
            status = answer
    return MemberStatus(
        instance_id=member.instance_id,
        address=member.address,
        alive=member.alive,
        self_=status is own,
        shards=shards,
        joined_at_ms=member.joined_at_ms,
        status=status,
        unreachable=unreachable,
    )


def _shard_status(engine: Engine, row: ShardRow) -> ShardStatus:
    shard = engine.shards.get(row.shard_id)
    return ShardStatus(
        shard_id=row.shard_id,
        version=row.version,
        owner_id=row.owner_id,
        owner_address=row.owner_address,
        in_memory=None if shard is None else len(shard.entries),
        horizon_ms=None if shard is None else max(0, shard.horizon.execute_at_ms),
    )


def _worst(reported: Iterable[InstanceStatus], figure: Callable[[InstanceStatus], N | None]) -> N | None:
    return max((value for status in reported if (value := figure(status)) is not None), default=None)
