"""Case 6: a database that loses writes it has acknowledged. The nonce distinguishes two claims of one version."""

from __future__ import annotations

import asyncio

import pytest
from engine_world import World, in_world

from duetime.domain.timer import State
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Committed
from duetime.stores.memory import MemoryStore
from duetime.testing import make_timer
from duetime.testing.mutants import MUTANTS


async def _late_commit_of_a_lost_claim() -> Committed | ShardLost:
    """A claims a shard, the database loses the claim, B claims the same version; then A's commit arrives."""
    store = MemoryStore()
    await store.ensure_shards(1)
    before = store.snapshot()
    [mine] = await store.claim([Claim(0, 0, 11, "a", "", 0)])
    store.restore(before)
    [theirs] = await store.claim([Claim(0, 0, 22, "b", "", 0)])
    assert mine.version == theirs.version
    [result] = await store.commit([Batch(mine.fence, puts=[make_timer()])])
    return result


async def test_case_6_a_commit_under_a_lost_claim_is_refused() -> None:
    assert isinstance(await _late_commit_of_a_lost_claim(), ShardLost)


async def test_case_6_without_the_nonce_a_commit_under_a_lost_claim_is_applied() -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == "no-nonce"]
    with mutant.applied():
        result = await _late_commit_of_a_lost_claim()
    assert isinstance(result, Committed), "the mutant has no effect"


@pytest.mark.parametrize("owner", ["a", "b"])
async def test_case_6_after_a_failover_the_store_has_one_owner(owner: str) -> None:
    store = MemoryStore()
    await store.ensure_shards(1)
    before = store.snapshot()
    await store.claim([Claim(0, 0, 11, "a", "", 0)])
    store.restore(before)
    [row] = await store.claim([Claim(0, 0, 22, owner, "", 0)])
    assert (row.owner_id, row.nonce) == (owner, 22)


def test_case_6_after_a_failover_that_lost_commits_memory_matches_the_database() -> None:
    """If the heartbeat did not report it, the owner would continue with a memory that differs from the database, and
    timers that exist again would wait for the next claim."""

    async def story(world: World) -> None:
        assert isinstance(world.store, MemoryStore)
        await world.create("fired", 1_000)
        await world.create("kept", 20_000)
        before = world.store.snapshot()
        await world.create("lost", 20_000)
        await asyncio.sleep(2)
        assert world.destinations.called() == ["fired"]
        assert (await world.get("fired")).state is State.DELIVERED
        former = world.engine.membership.instance_id
        world.store.restore(before)
        await asyncio.sleep(3)
        assert world.engine.membership.instance_id != former
        assert not world.engine.shards, "another instance may still have a lease that the database has lost"
        await asyncio.sleep(2)
        assert len(world.engine.shards) == 16
        assert world.destinations.called() == ["fired", "fired"], "its end was lost, so it soon fires again"
        await asyncio.sleep(30)
        assert world.destinations.called()[2:] == ["kept"], "an acknowledged create is lost with the database's commits"

    in_world(story)


def test_case_6_after_a_failover_nothing_is_claimed_while_a_lost_lease_may_be_valid() -> None:
    """Also shards that are free by the database: it may have lost the claim of another instance."""

    async def story(world: World) -> None:
        assert isinstance(world.store, MemoryStore)
        world.store.restore(world.store.snapshot())
        await world.store.release([row.fence for row in await world.store.shards()])
        dead_after_ms = world.config.engine.dead_after.ms
        while len(world.engine.shards) == 16:  # until its heartbeat reports it
            await asyncio.sleep(0.01)
        await asyncio.sleep((dead_after_ms - 100) / 1000)
        assert [row.owner_id for row in await world.store.shards()] == [None] * 16
        await asyncio.sleep(1)
        assert len(world.engine.shards) == 16

    in_world(story)
