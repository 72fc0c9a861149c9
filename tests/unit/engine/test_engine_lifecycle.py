"""The lifecycle and the loops of an engine: start, stop, joining again, readiness, sweeps, purges."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from engine_world import OK, URL, World
from hooked_store import (
    A,
    ExclusiveStore,
    HookedStore,
    Pair,
    claim_for_another,
    creating,
    of_pair,
    row_of,
    with_store,
)
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult
from duetime.domain.timer import NamespaceSpec, TimerKey, TimerSpec, shard_of
from duetime.engine.engine import Engine
from duetime.engine.shard import Shard
from duetime.errors import NotReady, OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Fence
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing import make_reached, make_timer
from duetime.testing.faulty import Fault
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual

# --- joining again --------------------------------------------------------------------------------


def test_shards_claimed_during_a_join_that_failed_are_dropped_before_the_next_join() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        membership, former = world.engine.membership, world.engine.membership.instance_id

        async def claims_and_fails() -> None:
            await world.engine.balance()
            assert world.engine.shards, "claimed under the id of a join that is about to fail"
            raise StoreUnavailable("in the middle of a join")

        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        while world.engine.shards:
            await asyncio.sleep(0.01)
        store.before["members"].append(claims_and_fails)
        await asyncio.sleep(3)
        assert not store.before["members"]
        assert membership.instance_id != former
        assert (await row_of(store)).owner_id == membership.instance_id
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(scenario)


def test_an_instance_that_is_declared_dead_serves_nothing_until_it_has_joined_again() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.create("a", 3_000)
        joining = store.hold("join")
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(10)
        assert world.engine.shards == {}
        assert world.destinations.calls == []
        assert world.service.readiness() == "the lease has run out: the store does not answer heartbeats"
        joining.set()
        await asyncio.sleep(2)
        assert world.destinations.called() == ["a"]
        assert world.service.readiness() is None

    with_store(scenario)


def test_a_join_that_fails_is_tried_again_at_the_next_heartbeat() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.fail("join", *[Fault.UNAVAILABLE] * 3)
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(1.4)
        assert store.calls["join"] >= 2
        await asyncio.sleep(3)
        assert world.engine.shards
        assert [member.alive for member in await store.database.members()].count(True) == 1

    with_store(scenario)


def test_when_an_instance_is_declared_dead_its_commits_in_flight_are_answered_unknown() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        with pytest.raises(OutcomeUnknown):
            await create
        assert world.engine.counters.writes_waiting == 0
        store._held["commit"].set()

    with_store(scenario)


# --- stopping -------------------------------------------------------------------------------------


def test_a_stop_releases_every_shard_leaves_the_cluster_and_ends_all_tasks() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.stop()
        assert {row.owner_id for row in await store.database.shards()} == {None}
        assert await store.database.members() == []
        assert world.engine.shards == {}
        assert world.engine._tasks == {}
        with pytest.raises(NotReady):
            await world.create("a")

    with_store(scenario, namespaces__default_num_shards=16)


def test_a_stop_before_the_start_does_not_leave_the_cluster() -> None:
    async def run(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        await world.engine.stop()
        assert store.calls["mark_dead"] == 0

    run_virtual(run)


def test_tasks_are_cancelled_in_the_order_they_began() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        cancelled: list[int] = []

        async def waits(number: int) -> None:
            try:
                await asyncio.sleep(3_600)
            finally:
                cancelled.append(number)

        for number in range(20):
            world.engine._spawn(waits(number))
        await asyncio.sleep(0.1)
        await world.engine.stop()
        assert cancelled == list(range(20))

    with_store(scenario)


def test_a_crash_leaves_everything_as_it_is() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.create("a", 1_000)
        world.engine.abandon()
        await asyncio.sleep(3)
        assert world.destinations.calls == []
        assert (await row_of(store)).owner_id == world.engine.membership.instance_id
        assert all(task.done() for task in world.engine._tasks)

    with_store(scenario)


def test_an_engine_that_has_stopped_claims_nothing_although_its_lease_still_runs() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        world.engine.abandon()
        world.engine.ownership.drop_all()
        await store.database.release([(await row_of(store)).fence])
        assert world.engine.membership.may_claim()
        await world.engine.balance()
        assert (await row_of(store)).owner_id is None
        assert world.engine.shards == {}

    with_store(scenario)


def test_a_shard_whose_claim_succeeds_while_the_instance_stops_fires_nothing() -> None:
    """Its deliveries would not be waited for, and its next owner would repeat them."""

    async def scenario(world: World, store: HookedStore) -> None:
        async def slow(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(5)
            return OK

        world.destinations.answers[URL] = slow
        first = next(f"t{n}" for n in range(100) if shard_of(f"t{n}", 2) == 0)
        second = next(f"t{n}" for n in range(100) if shard_of(f"t{n}", 2) == 1)
        await world.create(first, 100)
        await world.create(second, 2_000)
        await asyncio.sleep(0.5)
        claimed = store.hold("claim")
        await world.engine.ownership.release([world.engine.shards[1]])
        balancing = asyncio.ensure_future(world.engine.balance())
        await asyncio.sleep(0.5)
        stopping = asyncio.ensure_future(world.engine.stop())
        await asyncio.sleep(0.1)
        claimed.set()
        await balancing
        assert 1 in world.engine.shards
        await stopping
        assert world.destinations.called() == [first]

    with_store(scenario, namespaces__default_num_shards=2)


def test_tasks_that_are_cancelled_by_a_stop_are_not_logged_as_errors(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.stop()
        await asyncio.sleep(0.1)
        assert caplog.records == []

    with caplog.at_level("WARNING"):
        with_store(scenario)


def test_a_second_internal_error_does_not_stop_the_engine_twice(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        async def wrong() -> None:
            raise ZeroDivisionError("a bug")

        world.engine._spawn(wrong())
        world.engine._spawn(wrong())
        await asyncio.sleep(1)
        assert [record.levelname for record in caplog.records].count("CRITICAL") == 1
        assert store.calls["mark_dead"] == 1

    with caplog.at_level("WARNING"):
        with_store(scenario)


# --- starting -------------------------------------------------------------------------------------


def test_if_the_first_claims_fail_a_member_of_a_cluster_starts_and_claims_later() -> None:
    async def run(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        await world.start()
        assert world.engine.started
        assert world.engine.shards == {}
        await asyncio.sleep(2)
        assert len(world.engine.shards) == 16
        await world.engine.stop()

    run_virtual(run)


def test_if_the_first_claims_fail_on_an_exclusive_store_the_start_fails() -> None:
    async def run(clock: VirtualClock) -> None:
        store = HookedStore(ExclusiveStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        with pytest.raises(StoreUnavailable):
            await world.start()
        assert not world.engine.started
        await world.engine.stop()

    run_virtual(run)


def test_heartbeats_go_on_while_the_first_claims_take_longer_than_the_lease() -> None:
    async def run(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        claimed = store.hold("claim")
        starting = asyncio.ensure_future(world.start())
        await asyncio.sleep(20)
        assert not starting.done()
        assert world.engine.membership.may_fire()
        claimed.set()
        await starting
        await world.engine.stop()

    run_virtual(run)


def test_a_start_whose_claims_fail_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def run(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        await world.start()
        assert caplog.text.count("cannot read cluster state: injected") == 1
        await world.engine.stop()

    with caplog.at_level("WARNING", "duetime"):
        run_virtual(run)


def test_before_the_start_an_engine_knows_no_shards_and_its_random_numbers_are_its_own() -> None:
    async def run(clock: VirtualClock) -> None:
        world = World(clock, MemoryStore(clock))
        assert world.engine.rows == {}
        assert world.engine.readiness() == "starting"

        def new_engine(rng: random.Random | None) -> Engine:
            return Engine(world.config, world.store, world.destinations, clock, Telemetry(), address="test:1", rng=rng)

        assert new_engine(random.Random(7)).new_id() == new_engine(random.Random(7)).new_id()
        assert new_engine(None).new_id() != new_engine(None).new_id()

    run_virtual(run)


# --- readiness ------------------------------------------------------------------------------------


def test_readiness_says_why_an_instance_does_not_serve() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        engine = world.engine
        assert engine.readiness() is None
        engine.started = False
        assert engine.readiness() == "starting"
        engine.started = True
        engine.stopping = True
        assert engine.readiness() == "stopping"
        engine.stopping = False
        engine.membership.skew_ms = -501
        assert engine.readiness() == "the clock is -501 ms off the database's"
        engine.membership.skew_ms = 0
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 100)
        await asyncio.sleep(4)
        assert engine.readiness() == "the lease has run out: injected"
        store.heal()
        await asyncio.sleep(1)
        assert engine.readiness() is None
        engine.failed.set()
        assert engine.readiness() == "ended by an internal error: the log says which; restart this instance"
        engine.failed.clear()

    with_store(scenario)


def test_in_a_cluster_an_instance_without_shards_is_ready() -> None:
    async def scenario(pair: Pair) -> None:
        await pair.enter()
        b = await pair.enter()
        assert not b.engine.shards
        assert b.engine.readiness() is None

    of_pair(scenario)


def test_on_an_exclusive_store_an_instance_is_ready_when_all_shards_are_claimed() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        assert world.engine.readiness() is None
        store.fail("claim", Fault.UNAVAILABLE)
        await world.service.namespaces.create(NamespaceSpec(name="wider", num_shards=4))
        assert world.engine.readiness() == "3 shards are not claimed yet"
        await asyncio.sleep(3)
        assert world.engine.readiness() is None

    with_store(scenario, ExclusiveStore)


# --- reading the cluster --------------------------------------------------------------------------


def test_shards_of_a_namespace_that_another_instance_created_are_claimed_within_seconds() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        [default] = await store.database.namespaces()
        await store.database.ensure_shards(8)
        await store.database.put_namespace(replace(default, name="wider", num_shards=8), None)
        await asyncio.sleep(2.5)
        assert len(world.engine.shards) == 8

    with_store(scenario)


def test_a_round_of_an_unbalanced_cluster_reads_the_shards_once_and_then_the_members_once() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await asyncio.sleep(0.1)
        world.engine.ownership.is_balanced = False
        store.order.clear()
        await asyncio.sleep(0.5)
        assert [name for name in store.order if name in ("shards", "members")] == ["shards", "members"]
        assert world.engine.ownership.is_balanced
        store.order.clear()
        await asyncio.sleep(0.5)
        assert [name for name in store.order if name in ("shards", "members")] == ["members"]

    with_store(scenario)


def test_while_the_cluster_is_balanced_the_shards_are_read_every_few_seconds_only() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await asyncio.sleep(20)
        before = store.calls["shards"]
        await asyncio.sleep(60)
        assert 9 <= store.calls["shards"] - before <= 12

    with_store(scenario)


def test_on_an_exclusive_store_the_shards_are_not_read_again() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await asyncio.sleep(5)
        before = dict(store.calls)
        await asyncio.sleep(60)
        assert store.calls["shards"] == before["shards"]
        assert store.calls["members"] == before["members"]
        assert store.calls["namespaces"] == before["namespaces"]

    with_store(scenario, ExclusiveStore)


def test_a_member_is_marked_dead_when_that_is_due_and_not_a_heartbeat_later() -> None:
    async def scenario(pair: Pair) -> None:
        a = await pair.enter(engine__heartbeat_interval="400ms")
        b = await pair.enter(engine__heartbeat_interval="400ms")
        await asyncio.sleep(10.3)
        beats = pair.stores[0].calls["heartbeat"]
        b.engine.abandon()
        while len(a.engine.shards) < 16:
            last_beat_ms = a.engine.membership._seen[b.engine.membership.instance_id][1]
            await asyncio.sleep(0.001)
        assert a.clock.boot_ms() - last_beat_ms <= 3_501 + 60
        assert pair.stores[0].calls["heartbeat"] - beats <= 12, "and until then no sooner than usual"

    of_pair(scenario)


@pytest.mark.parametrize("call", ["members", "namespaces", "join"])
def test_an_error_while_reading_the_cluster_state_is_logged_and_so_is_its_end(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.fail(call, *[Fault.UNAVAILABLE] * 2)
        if call == "join":
            [me] = await store.database.members()
            await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(5)
        assert caplog.text.count("cannot read cluster state: injected") >= 1
        assert caplog.text.count("cluster state is readable again") >= 1

    with caplog.at_level("INFO", "duetime"):
        with_store(scenario)


def test_a_read_of_the_cluster_that_hangs_is_not_begun_a_second_time() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        before = store.calls["members"]
        held = store.hold("members")
        await asyncio.sleep(20)
        assert store.calls["members"] - before <= 2, "one for the heartbeats, and one for the sweeps"
        assert world.engine.membership.may_fire(), "heartbeats do not wait for it"
        held.set()

    with_store(scenario)


def test_on_an_exclusive_store_a_clock_that_is_off_releases_nothing() -> None:
    async def run(clock: VirtualClock) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        store = HookedStore(ExclusiveStore(clock))
        own_clock = VirtualClock(loop)
        world = World(own_clock, store.as_store)
        await world.start()
        own_clock.offset_ms = 10_000
        await asyncio.sleep(5)
        assert world.engine.membership.is_skewed
        assert len(world.engine.shards) == 16
        assert store.calls["release"] == 0
        await world.engine.stop()

    run_virtual(run)


# --- purging --------------------------------------------------------------------------------------


def test_every_shard_is_purged_once_a_minute_and_one_that_failed_waits_for_the_next_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        purged: list[int] = []
        purge = world.engine._purge

        async def noting(shards: list[Shard], errors: list[StoreError]) -> list[Shard]:
            purged.extend(shard.shard_id for shard in shards)
            return await purge(shards, errors)

        world.engine._purge = noting  # type: ignore[method-assign]
        await asyncio.sleep(60.5)
        assert sorted(purged) == [0, 1, 2]
        store.fail("purge_reached", *[Fault.UNAVAILABLE] * 3)
        await asyncio.sleep(60)
        assert sorted(purged) == [0, 0, 1, 1, 2, 2], "an error is not repeated at once"
        assert "cannot purge timers past their retention: injected" in caplog.text
        await asyncio.sleep(60)
        assert sorted(purged) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert "timers are purged again" in caplog.text

    with caplog.at_level("INFO", "duetime"):
        with_store(scenario, namespaces__default_num_shards=3)


class OneShardInTrouble(MemoryStore):
    """A purge of several shards: one of them answers with an error of its own."""

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:  # type: ignore[override]
        results = await super().purge_reached(fences, before_ms, limit)
        return [
            StoreUnavailable("no quorum") if fence.shard_id == 0 else r
            for fence, r in zip(fences, results, strict=True)
        ]


def test_a_shard_whose_purge_fails_alone_is_reported_and_not_purged_again_at_once() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        troubles: list[StoreError] = []
        assert await world.engine._purge(list(world.engine.shards.values()), troubles) == []
        assert [str(trouble) for trouble in troubles] == ["no quorum"]
        assert len(world.engine.shards) == 2

    with_store(scenario, OneShardInTrouble, namespaces__default_num_shards=2)


def test_nothing_is_purged_before_its_time_and_everything_after_it() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        now_ms = world.clock.wall_ms()
        ends = [make_reached(make_timer(f"n-{n}"), purge_at_ms=now_ms + 100_000) for n in range(2_500)]
        await store.database.commit([Batch(world.engine.shards[0].fence, reached=ends)])
        await asyncio.sleep(95)
        assert len(list(store.database._shards[0].all_reached())) == 2_500
        await asyncio.sleep(70)
        assert list(store.database._shards[0].all_reached()) == []

    with_store(scenario)


def test_a_shard_is_not_purged_while_it_recovers() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        now_ms = world.clock.wall_ms()
        end = make_reached(make_timer(), purge_at_ms=now_ms + 1_000)
        await store.database.commit([Batch(world.engine.shards[0].fence, reached=[end])])
        world.engine.shards[0].start_recovery()
        await asyncio.sleep(130)
        assert list(store.database._shards[0].all_reached()) == [end]
        world.engine.shards[0].recovering = False
        await asyncio.sleep(60)
        assert list(store.database._shards[0].all_reached()) == []

    with_store(scenario)


def test_a_shard_found_lost_by_a_purge_is_dropped_and_its_commit_in_flight_is_answered_unknown() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        committing = store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        await claim_for_another(store)
        assert await world.engine._purge([shard], []) == []
        assert shard.dropped
        with pytest.raises(OutcomeUnknown):
            await create
        committing.set()

    with_store(scenario)


def test_a_purge_that_ends_after_a_recovery_does_not_count_the_shard_as_lost() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]

        async def recovered_meanwhile() -> None:
            world.engine.ownership.recover(shard)
            while shard.recovering:
                await asyncio.sleep(0)

        store.before["purge_reached"].append(recovered_meanwhile)
        assert await world.engine._purge([shard], []) == []
        assert not shard.dropped
        assert (await row_of(store)).fence == shard.fence

    with_store(scenario)


def test_a_purge_during_a_recovery_does_not_count_the_shard_as_lost() -> None:
    """The new claim is made, and its owner is still reading what the old commit has left."""

    async def scenario(world: World, store: HookedStore) -> None:
        shard, reading = world.engine.shards[0], store.hold("get_many")
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        create = creating(world)
        await asyncio.sleep(0.1)
        assert shard.recovering
        assert (await row_of(store)).fence != shard.fence
        assert await world.engine._purge([shard], []) == []
        assert not shard.dropped
        reading.set()
        await create

    with_store(scenario)


# --- sweeps and counters --------------------------------------------------------------------------


def test_when_the_lease_is_renewed_timers_that_became_due_fire_at_once() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await asyncio.sleep(0.7)
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 9)
        await world.create("a", 4_000)
        while world.engine.membership.may_fire():
            await asyncio.sleep(0.001)
        while not world.engine.membership.may_fire():
            await asyncio.sleep(0.001)
        renewed_ms = world.clock.wall_ms()
        await asyncio.sleep(2)
        [(fired_at_ms, _, _)] = world.destinations.calls
        assert fired_at_ms <= renewed_ms, "it waits for no sweep"

    with_store(scenario)


def test_once_a_second_everything_that_a_lost_wake_up_could_delay_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        calls: Counter[str] = Counter()

        def count(thing: object, name: str) -> None:
            real = getattr(thing, name)

            def counted(*args: Any) -> Any:
                calls[name] += 1
                return real(*args)

            monkeypatch.setattr(thing, name, counted)

        engine = world.engine
        for thing, name in (
            (engine.fire_loop.flow, "sweep"),
            (engine.fire_loop.flow, "resume"),
            (engine.look_ahead, "reduce_memory"),
            (engine.fire_loop, "wake"),
            (engine.shards[0], "expire"),
        ):
            count(thing, name)
        await asyncio.sleep(10.2)
        assert (calls["sweep"], calls["resume"], calls["reduce_memory"], calls["expire"]) == (10, 10, 10, 10)
        assert calls["wake"] == 30, "and with both heartbeats of a second"
        assert (engine.telemetry.loop_lag_seconds.count, engine.telemetry.loop_lag_seconds.sum) == (10, 0.0)

    with_store(scenario)


def test_created_and_deleted_timers_are_counted_and_removed_from_the_heap() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        engine = world.engine
        await asyncio.sleep(2)
        for number in range(3):
            await world.create(f"t{number}", 20_000)
        assert (engine.counters.weight > 0, len(engine.fire_loop.armed_tickets())) == (True, 3)
        await world.create("t0", 25_000)
        assert (engine.counters.weight > 0, len(engine.fire_loop.armed_tickets())) == (True, 3)
        for number in range(3):
            await world.service.delete(TimerKey("default", f"t{number}"))
        assert (engine.counters.weight, len(engine.fire_loop.armed_tickets())) == (0, 0)

    with_store(scenario)


def test_a_create_whose_shard_is_not_owned_yet_waits_for_it() -> None:
    """The claims come late: a create waits for them, and is neither lost nor made twice."""

    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
        claimed = store.hold("claim")
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=2_000, callback_url=URL)
        create = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(1)
        claimed.set()
        assert (await create).replaced is False
        await asyncio.sleep(5)
        assert world.destinations.called() == ["a"]

    with_store(scenario)


def test_a_read_during_which_the_timer_was_written_is_made_again() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        async def meanwhile() -> None:
            await world.create("a", 20_000, payload="2")

        await asyncio.sleep(2)
        store.after["get_many"].append(meanwhile)
        found = await world.service._commands._find(world.engine.shards[0], A)
        assert found.timer is not None
        assert found.timer.payload == "2"

    with_store(scenario)
