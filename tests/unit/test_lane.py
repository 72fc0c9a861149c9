"""A commit of which each batch fares by itself, as on databases where every shard is a transaction of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_world import World, in_world

from duetime.clock import Clock
from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreThrottled, StoreUnavailable
from duetime.model import State, shard_of
from duetime.store import Batch, Committed
from duetime.stores.memory import MemoryStore

REFUSED, UNKNOWN, FINE = 1, 2, 3


def name_in(shard: int, number: int = 0) -> str:
    return [name for n in range(1_000) if shard_of(name := f"t{n}", 16) == shard][number]


class Torn(MemoryStore):
    """Shard 1 is refused, and of shard 2 nobody knows, though it is applied; as often as `times` says."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.times = 0
        self.torn: list[list[int]] = []

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:  # type: ignore[override]
        shard_ids = [batch.fence.shard_id for batch in batches]
        if not self.times or not {REFUSED, UNKNOWN} & set(shard_ids):
            return list(await super().commit(batches))
        self.times -= 1
        self.torn.append(shard_ids)
        results: list[Committed | StoreError] = []
        for batch in batches:
            if batch.fence.shard_id == REFUSED:
                results.append(StoreThrottled("slow down"))
                continue
            [result] = await super().commit([batch])
            results.append(OutcomeUnknown("who knows") if batch.fence.shard_id == UNKNOWN else result)
        return results


def test_a_batch_that_was_refused_is_tried_again_one_in_doubt_recovered_and_the_others_are_done() -> None:
    names = [name_in(shard, number) for shard in (REFUSED, UNKNOWN, FINE) for number in range(2)]

    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        before = {shard_id: shard.fence for shard_id, shard in world.engine.shards.items()}
        store.times = 1
        await asyncio.gather(*(world.create(name, 1_000) for name in names))
        assert store.torn == [[REFUSED, UNKNOWN, FINE]]
        after = {shard_id: shard.fence for shard_id, shard in world.engine.shards.items()}
        assert {shard for shard in before if before[shard] != after[shard]} == {UNKNOWN}, "claimed again, and no other"
        assert world.engine.telemetry.commits.by_label["unknown"] == 1
        await asyncio.sleep(5)
        assert sorted(world.destinations.called()) == sorted(names)
        for name in names:
            assert (await world.get(name)).state is State.DELIVERED

    in_world(story, new_store=Torn)


def test_one_shard_that_is_refused_for_long_costs_nobody_a_shard_and_only_its_own_timers_wait() -> None:
    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        store.times = 1_000_000
        fence = world.engine.shards[REFUSED].fence
        waits = asyncio.ensure_future(world.create(name_in(REFUSED), 1_000))
        started_ms = world.clock.boot_ms()
        for number in range(20):
            await world.create(name_in(FINE, number), 1_000)
            assert world.clock.boot_ms() - started_ms < 100, "they do not wait for it"
        with pytest.raises(StoreUnavailable, match="slow down"):
            await waits
        assert len(store.torn) < 20, "it backs off"
        store.times = 0
        await world.create(name_in(REFUSED, 1), 0)
        await asyncio.sleep(3)
        assert len(world.destinations.called()) == 21, "what was not applied stays so"
        assert world.engine.shards[REFUSED].fence == fence
        assert world.engine.telemetry.shards_lost.value == 0

    in_world(story, new_store=Torn)


class Poisoned(MemoryStore):
    """Refuses, for ever, every commit that has the timer "poison" in it, in the way that `how` says."""

    how: StoreError = StoreUnavailable("too large")

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        if any(put.timer_id == "poison" for batch in batches for put in batch.puts):
            raise self.how
        return await super().commit(batches)


@pytest.mark.parametrize("how", [StoreUnavailable("too large"), OutcomeUnknown("who knows")])
def test_a_write_that_can_never_be_applied_keeps_no_other_from_it_and_ends_with_its_users_patience(
    how: StoreError,
) -> None:
    async def story(world: World) -> None:
        assert isinstance(world.store, Poisoned)
        world.store.how = how
        names = [f"t{n}" for n in range(60)]
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        await asyncio.gather(*(world.create(name, 60_000) for name in names))
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            await poison
        await asyncio.sleep(60)
        assert sorted(world.destinations.called()) == sorted(names), "fired, and their ends are written"
        assert all([(await world.get(name)).state is State.DELIVERED for name in names])
        if isinstance(how, StoreUnavailable):
            await asyncio.sleep(60)
            assert all(shard.is_quiet for shard in world.engine.shards.values())

    in_world(story, new_store=Poisoned, namespaces__default_num_shards=1)
