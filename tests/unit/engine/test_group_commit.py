"""A commit of which each batch fares by itself, as on databases where every shard is a transaction of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from engine_world import World, in_world
from msgspec.structs import replace

from duetime.clock import Clock
from duetime.domain.timer import State, shard_of
from duetime.errors import NotFound, OutcomeUnknown, ShardLost, StoreError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed, Page, PageRequest
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

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


class InSmallParts(Torn):
    capabilities = replace(Torn.capabilities, batch_max=5)


def test_a_refused_shard_rests_even_if_it_has_more_than_one_batch_waiting() -> None:
    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        store.times = 1_000_000
        asked = [asyncio.ensure_future(world.create(name_in(REFUSED, number), 60_000)) for number in range(11)]
        await asyncio.sleep(5)
        assert len(store.torn) < 15, "20 ms, then twice as long each time, up to a second"
        store.times = 0
        await asyncio.gather(*asked)

    in_world(story, new_store=InSmallParts)


class Slow(MemoryStore):
    """Answers a commit of the timer "late" after longer than a user waits: it was not applied."""

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        if any(put.timer_id == "late" for batch in batches for put in batch.puts):
            await asyncio.sleep(15)
            raise StoreUnavailable("no")
        return await super().commit(batches)


def test_a_write_whose_user_was_told_that_nobody_knows_ends_when_it_turns_out_not_to_be_applied() -> None:
    async def story(world: World) -> None:
        with pytest.raises(OutcomeUnknown):
            await world.create("late", 3_600_000)
        await asyncio.sleep(20)
        assert all(shard.is_quiet for shard in world.engine.shards.values())
        assert world.engine.counters.writes_waiting == 0
        with pytest.raises(NotFound):
            await world.get("late")

    in_world(story, new_store=Slow)


class Weighed(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, batch_chars_max=20_000)

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.counts: list[int] = []

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        self.counts.append(sum(len(batch.puts) for batch in batches))
        return await super().commit(batches)


@pytest.mark.parametrize("large", [{"headers": {"X-A": "x" * 2_000}}, {"tags": tuple(f"{n:0100}" for n in range(20))}])
def test_headers_and_tags_weigh_as_payloads_do(large: dict[str, object]) -> None:
    async def story(world: World) -> None:
        assert isinstance(world.store, Weighed)
        await asyncio.gather(*(world.create(f"t{n}", 60_000, **large) for n in range(30)))
        assert max(world.store.counts) <= 3

    in_world(story, new_store=Weighed, namespaces__default_num_shards=1)


class HalfBlind(MemoryStore):
    """Cannot read shard 1, as long as `blind`: and says so for it alone, or for all."""

    blind = False
    says = "alone"

    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:  # type: ignore[override]
        pages: list[Page | StoreError] = list(await super().load(requests))
        if not self.blind:
            return pages
        if self.says == "for all":
            raise StoreUnavailable("cannot read")
        return [StoreUnavailable("cannot read") if s.shard_id == 1 else p for s, p in zip(requests, pages, strict=True)]


@pytest.mark.parametrize("says", ["alone", "for all"])
def test_a_shard_that_cannot_be_read_keeps_no_other_from_firing_and_fires_when_it_can(says: str) -> None:
    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, HalfBlind)
        names = [name_in(shard) for shard in range(16)]
        await asyncio.gather(*(world.create(name, 600_000) for name in names))
        store.blind, store.says = True, says
        await world.crash_and_restart()
        await asyncio.sleep(700)
        others = sorted(set(names) - {name_in(1)})
        assert sorted(world.destinations.called()) == (others if says == "alone" else [])
        store.blind = False
        await asyncio.sleep(30)
        assert sorted(world.destinations.called()) == sorted(names)

    in_world(story, new_store=HalfBlind)


@pytest.mark.parametrize("how", [StoreUnavailable("too large"), OutcomeUnknown("who knows")])
def test_a_write_that_can_never_be_applied_delays_no_other_of_its_commit_by_more_than_a_moment(
    how: StoreError,
) -> None:
    """A commit of several shards is one transaction: its shards are tried one by one, and then its batch in halves."""

    async def story(world: World) -> None:
        assert isinstance(world.store, Poisoned)
        world.store.how = how
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        took_ms: list[int] = []

        async def create(name: str) -> None:
            asked_ms = world.clock.boot_ms()
            await world.create(name, 60_000)
            took_ms.append(world.clock.boot_ms() - asked_ms)

        for turn in range(20):
            await asyncio.gather(*(create(f"t{turn}-{n}") for n in range(200)))
            await asyncio.sleep(0.01)
        poison.cancel()
        took_ms.sort()
        assert took_ms[len(took_ms) * 9 // 10] <= 20, "most do not notice it"
        assert took_ms[-1] <= 400, "its neighbours in the same shard wait until it is found"

    in_world(story, new_store=Poisoned)


def test_the_pause_after_a_throttled_commit_is_short_again_once_commits_succeed() -> None:
    async def told(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        await world.start()
        for _ in range(8):
            store.fail("commit", Fault.THROTTLED)
            asked_ms = clock.boot_ms()
            await asyncio.gather(*(world.create(f"t{n}", 3_600_000) for n in range(40)))
            assert clock.boot_ms() - asked_ms <= 20
            await asyncio.sleep(60)
        await world.engine.stop()

    run_virtual(told)


def test_a_shard_whose_write_is_refused_again_and_again_spoils_the_commit_of_the_others_once() -> None:
    async def story(world: World) -> None:
        store = world.store
        assert isinstance(store, Poisoned)
        store.how = StoreUnavailable("too large")
        shared: list[int] = []
        right = store.commit

        async def commit(batches: Sequence[Batch]) -> list[Committed | ShardLost]:
            is_poisoned = any(put.timer_id == "poison" for batch in batches for put in batch.puts)
            if is_poisoned and len(batches) > 1:
                shared.append(len(batches))
            return await right(batches)

        store.commit = commit  # type: ignore[method-assign]
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        for turn in range(40):
            await asyncio.gather(*(world.create(f"t{turn}-{n}", 3_600_000) for n in range(30)))
            await asyncio.sleep(0.05)
        poison.cancel()
        assert len(shared) == 1

    in_world(story, new_store=Poisoned)
