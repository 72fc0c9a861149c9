"""Unexpected errors, and rows that cannot be decoded: they stop nothing else, and are logged and counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import pytest
from engine_world import URL, World, in_world

from duetime.domain.timer import Namespace, NamespaceSpec, State, TimerKey, TimerPatch, TimerSpec, Verdict, shard_of
from duetime.errors import MemberDead, OutcomeUnknown, StoreError, StoreUnavailable, UnreadableTimer
from duetime.service.status import instance_status
from duetime.store import Batch, Claim, Committed, Page, PageRequest, ShardRow, guarded
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

LOOPS = ("load", "commit", "heartbeat", "members", "shards", "namespaces", "claim", "purge_reached")


def on_faulty(scenario: Callable[[World, FaultyStore], Awaitable[None]], **settings: object) -> None:
    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        world = World(clock, store.as_store, **settings)
        await world.start()
        try:
            await scenario(world, store)
        finally:
            store.heal()
            await world.engine.stop()

    run_virtual(run)


@pytest.mark.parametrize("call", LOOPS)
def test_no_loop_of_the_engine_ends_by_an_error_that_a_store_call_should_not_raise(call: str) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("far", 100_000)
        store.fail(call, *[Fault.BROKEN] * 20)
        await asyncio.sleep(90)
        assert store.calls[call], "it was never called"
        store.heal()
        await asyncio.sleep(10)
        await world.create("near", 1_000)
        await asyncio.sleep(60)
        assert sorted(world.destinations.called()) == ["far", "near"]
        assert not world.engine.broken
        assert world.service.readiness() is None

    on_faulty(scenario)


def test_after_an_unexpected_error_a_write_is_of_unknown_outcome_and_a_read_may_be_repeated() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("put_namespace", Fault.BROKEN)
        with pytest.raises(OutcomeUnknown):
            await guarded(store.as_store).put_namespace(world.engine.namespaces.all_known()[0], 99)
        store.fail("shards", Fault.BROKEN)
        with pytest.raises(StoreUnavailable):
            await guarded(store.as_store).shards()

    on_faulty(scenario)


class OneUnreadableShard(MemoryStore):
    """A page of shard 3 is an error of the whole call, whatever else was asked for in it."""

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        if any(request.shard_id == 3 for request in requests):
            raise StoreUnavailable("shard 3")
        return await super().load(requests)


def test_a_shard_whose_pages_fail_does_not_block_the_others_of_the_same_load() -> None:
    async def scenario(world: World) -> None:
        names = [f"t{number}" for number in range(64)]
        await asyncio.gather(*(world.create(name, 100_000) for name in names))
        await asyncio.sleep(130)
        readable = [name for name in names if shard_of(name, 16) != 3]
        assert len(readable) < len(names)
        assert sorted(world.destinations.called()) == sorted(readable)

    in_world(scenario, new_store=OneUnreadableShard)


def test_an_engine_stopped_by_an_internal_error_fires_nothing_and_gives_up_its_shards() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("a", 20_000)

        def wrong() -> None:
            raise ZeroDivisionError("a bug")

        world.engine.look_ahead.find_shards_to_load = wrong  # type: ignore[method-assign]
        await asyncio.sleep(2)
        assert world.engine.broken
        assert world.service.readiness() == "ended by an internal error: the log says which; restart this instance"
        assert not world.engine.membership.may_fire()
        assert not world.engine.shards
        assert not any(member.alive for member in await store.members())
        with pytest.raises(MemberDead):
            await store.heartbeat(world.engine.membership.instance_id, 1_000)
        await asyncio.sleep(30)
        assert world.destinations.calls == []
        world.new_instance()
        await world.start()
        await asyncio.sleep(1)
        assert world.destinations.called() == ["a"]

    on_faulty(scenario)


# --- rows that cannot be decoded -----------------------------------------------------------------

SPOILT = TimerKey("default", "spoilt")


def with_a_spoilt_row(scenario: Callable[[World], Awaitable[None]], delay_ms: int = 100_000) -> None:
    async def run(world: World) -> None:
        assert isinstance(world.store, MemoryStore)
        await world.create("before", delay_ms - 1)
        await world.create("spoilt", delay_ms)
        await world.create("after", delay_ms + 1)
        world.store.spoil_timer(0, SPOILT)
        await scenario(world)

    in_world(run, namespaces__default_num_shards=1)


def test_a_row_that_cannot_be_decoded_is_counted_and_shown_and_blocks_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World) -> None:
        with caplog.at_level(logging.ERROR, "duetime"):
            await asyncio.sleep(130)
        assert world.destinations.called() == ["before", "after"]
        assert world.engine.telemetry.unreadable.read() == 1
        assert instance_status(world.engine).unreadable == 1
        assert (await world.service.cluster_status()).unreadable == 1
        lines = [record.getMessage() for record in caplog.records]
        assert sum("'spoilt'" in line and "cannot be decoded" in line for line in lines) == 1, "once, not every second"

    with_a_spoilt_row(scenario)


def test_a_read_of_a_timer_that_cannot_be_decoded_says_so_and_it_can_be_created_again() -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(80)
        for ask in (
            lambda: world.get("spoilt"),
            lambda: world.service.update(SPOILT, TimerPatch(payload="1")),
            lambda: world.service.fire_now(SPOILT),
            lambda: world.service.replay(SPOILT),
            lambda: world.create("spoilt", 1_000, if_absent=True),
        ):
            with pytest.raises(UnreadableTimer) as caught:
                await ask()
            assert (caught.value.code, caught.value.field) == ("timer_unreadable", "timerId")
        assert (await world.create("spoilt", 1_000)).replaced
        assert world.engine.unreadable == 0
        await asyncio.sleep(2)
        assert world.destinations.called() == ["spoilt"]

    with_a_spoilt_row(scenario)


def test_a_timer_that_cannot_be_decoded_can_be_deleted() -> None:
    async def scenario(world: World) -> None:
        await asyncio.sleep(80)
        assert world.engine.unreadable == 1
        assert await world.service.delete(SPOILT) is Verdict.CANCELLED
        assert world.engine.unreadable == 0
        assert (await world.store.get_many([(0, SPOILT)]))[0].unreadable is None

    with_a_spoilt_row(scenario)


def test_a_row_that_cannot_be_decoded_is_found_again_after_a_restart() -> None:
    """Another version may be able to decode it: the low-water mark must not rise above it."""

    async def scenario(world: World) -> None:
        for _ in range(20):
            await asyncio.sleep(20)
            await world.create("other", 1_000)  # commits that may raise the low-water mark
        assert (await world.get("after")).state is State.DELIVERED
        row = (await world.store.shards())[0]
        spoilt_at_ms = (await world.get("before")).timer.execute_at_ms + 1
        assert row.low_water.execute_at_ms < spoilt_at_ms
        await world.crash_and_restart()
        await asyncio.sleep(10)
        assert world.engine.unreadable == 1

    with_a_spoilt_row(scenario)


def test_a_delete_of_unknown_outcome_that_left_an_unreadable_row_is_made_again() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("spoilt", 100_000)
        memory = store._store
        assert isinstance(memory, MemoryStore)
        memory.spoil_timer(0, SPOILT)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        assert await world.service.delete(SPOILT) is Verdict.CANCELLED
        assert (await store.get_many([(0, SPOILT)]))[0].unreadable is None

    on_faulty(scenario, namespaces__default_num_shards=1)


# --- what cannot be served must not take the memory or the loaders from the others ---------------


def test_due_timers_of_a_namespace_that_cannot_be_decoded_leave_memory_for_the_others_and_are_counted() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        world = World(clock, store, engine__timers_in_memory_max=1_000, namespaces__default_num_shards=4)
        await world.start()
        await world.service.namespaces.create(NamespaceSpec(name="bad", num_shards=4))
        bad = [TimerSpec(namespace="bad", timer_id=f"b{n}", delay_ms=100_000, callback_url=URL) for n in range(1_500)]
        for first in range(0, len(bad), 500):
            await world.service.create_many(bad[first : first + 500])
        for number in range(20):
            await world.create(f"good{number}", 200_000 + number)
        store.spoil_namespace("bad")
        await world.crash_and_restart()
        await asyncio.sleep(120)
        assert instance_status(world.engine).held > 0
        assert (instance_status(world.engine).oldest_due_ms or 0) > 10_000
        await asyncio.sleep(180)
        assert sorted(world.destinations.called()) == sorted(f"good{number}" for number in range(20))
        assert world.engine.counters.weight <= 1_000 * 1_024
        await store.put_namespace(Namespace(name="bad", num_shards=4, created_at_ms=0, revision=1), 0)
        await asyncio.sleep(200)
        assert len([name for name in world.destinations.called() if name.startswith("b")]) == 1_500
        await world.engine.stop()

    run_virtual(run)


class OnePartitionAway(MemoryStore):
    """Commits of shard 0 have an unknown outcome, and claims of it fail."""

    away = False

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:  # type: ignore[override]
        if not self.away:
            return [*await super().commit(batches)]
        return [
            OutcomeUnknown("away") if batch.fence.shard_id == 0 else (await super(type(self), self).commit([batch]))[0]
            for batch in batches
        ]

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        if self.away and claims[0].shard_id == 0:
            raise StoreUnavailable("away")
        return await super().claim(claims)


def test_a_shard_that_cannot_be_recovered_leaves_memory_for_the_others() -> None:
    async def run(clock: VirtualClock) -> None:
        store = OnePartitionAway(clock)
        world = World(clock, store, engine__timers_in_memory_max=1_000, namespaces__default_num_shards=4)
        await world.start()
        for number in range(6_000):
            if shard_of(f"x{number}", 4) == 0:
                await world.create(f"x{number}", 200_000)
        healthy = [f"y{number}" for number in range(80) if shard_of(f"y{number}", 4) != 0]
        for name in healthy:
            await world.create(name, 300_000)
        store.away = True
        lost = asyncio.ensure_future(world.create(next(f"z{n}" for n in range(99) if shard_of(f"z{n}", 4) == 0), 1_000))
        await asyncio.sleep(500)
        assert isinstance(lost.exception(), OutcomeUnknown)
        assert sorted(world.destinations.called()) == sorted(healthy)
        world.engine.abandon()

    run_virtual(run)


class HangingShards(MemoryStore):
    """A load that names one of the first eight shards fails, after ten seconds."""

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        if any(request.shard_id < 8 for request in requests):
            await asyncio.sleep(10)
            raise StoreUnavailable("no answer")
        return await super().load(requests)


def test_loads_that_hang_do_not_take_the_loaders_from_the_other_shards() -> None:
    async def scenario(world: World) -> None:
        names = [f"t{number}" for number in range(100)]
        await asyncio.gather(*(world.create(name, 200_000) for name in names))
        await asyncio.sleep(260)
        assert sorted(world.destinations.called()) == sorted(name for name in names if shard_of(name, 32) >= 8)

    in_world(scenario, new_store=HangingShards, namespaces__default_num_shards=32)
