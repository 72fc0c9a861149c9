"""Rare turns a hostile reviewer took: each was once a broken promise."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engine_world import OK, URL, World, check_accounts, check_nothing_is_left

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Missed, RetryPolicy, State, TimerKey, TimerPatch, TimerSpec, Verdict
from duetime.errors import DuetimeError, OutcomeUnknown, StoreUnavailable
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

X = TimerKey("default", "x")


def on_one_shard(scenario: Callable[[World, FaultyStore], Awaitable[None]], **settings: Any) -> None:
    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        world = World(clock, store.as_store, namespaces__default_num_shards=1, **settings)
        await world.start()
        try:
            await scenario(world, store)
            check_accounts(world.engine)
        finally:
            store.heal()
            await world.engine.stop()
        check_nothing_is_left(world.engine)

    run_virtual(run)


def test_a_timer_whose_connect_fails_during_a_recovery_still_fires() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        refused = asyncio.Event()

        async def connect(attempt: Attempt) -> AttemptResult:
            if attempt.timer.timer_id == "x" and not refused.is_set():
                await asyncio.sleep(1)
                refused.set()
                return AttemptResult(Contact.BROKEN, error="connection refused")
            return await deliver(attempt)

        deliver = world.destinations.deliver
        world.destinations.deliver = connect  # type: ignore[method-assign]
        world.engine.fire_loop._deliverer = world.destinations
        await world.create("x", 1_000)
        await asyncio.sleep(1.5)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 4)
        other = asyncio.ensure_future(world.create("other", 3_600_000))
        await refused.wait()
        assert world.engine.shards[0].recovering
        await asyncio.sleep(60)
        await other
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_timer_that_became_due_twice_during_a_recovery_does_not_fire_after_its_delete() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        due_ms = world.clock.wall_ms() + 1_000
        fields = {"namespace": "default", "timer_id": "x", "execute_at_ms": due_ms, "callback_url": URL}
        await world.service.create(TimerSpec(**fields))  # type: ignore[arg-type]
        await asyncio.sleep(0.9)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 9)
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 20)
        other = asyncio.ensure_future(world.create("other", 3_600_000))
        await asyncio.sleep(0.5)
        await world.service.create(TimerSpec(**fields, if_absent=True))  # type: ignore[arg-type]
        shard = world.engine.shards[0]
        while shard.recovering:
            await asyncio.sleep(0.01)
        await other
        assert await world.service.delete(X) is Verdict.CANCELLED
        before = len(world.destinations.calls)
        await asyncio.sleep(60)
        assert world.destinations.calls[before:] == []
        assert (world.engine.counters.writes_waiting, world.engine.counters.unsettled) == (0, 0)

    on_one_shard(scenario)


def test_if_absent_is_not_answered_from_a_write_that_is_not_on_disk() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("commit", *[Fault.UNAVAILABLE] * 1_000)
        first = asyncio.ensure_future(world.create("x", 60_000, payload="1"))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(world.create("x", 60_000, payload="1", if_absent=True))
        with pytest.raises(StoreUnavailable):
            await first
        store.heal()
        assert not (await second).existed
        await asyncio.sleep(120)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_delete_is_not_answered_from_an_outcome_that_is_not_on_disk() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 1_000)
        await asyncio.sleep(0.9)
        store.fail("commit", *[Fault.UNAVAILABLE] * 5)
        await asyncio.sleep(0.2)
        assert world.destinations.called() == ["x"]
        assert await world.service.delete(X) is Verdict.ALREADY_REACHED
        await world.crash_and_restart()
        await asyncio.sleep(60)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_delete_that_is_repeated_after_an_unknown_outcome_is_not_answered_before_it_is_known() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 60_000)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 1_000)
        with pytest.raises(OutcomeUnknown):
            await world.service.delete(X)
        with pytest.raises(DuetimeError):
            await world.service.delete(X)
        await world.crash_and_restart()
        store.heal()
        await asyncio.sleep(120)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_every_caller_is_answered_also_after_a_write_of_unknown_outcome() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 100)
        first = asyncio.ensure_future(world.create("x", 600_000))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(world.create("x", 610_000))
        await asyncio.sleep(30)
        assert isinstance(first.exception(), OutcomeUnknown)
        assert isinstance(second.exception(), OutcomeUnknown)

    on_one_shard(scenario)


def test_a_caller_that_stops_waiting_for_a_timer_does_not_affect_the_others() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 60_000, payload="0")
        updates = [
            asyncio.ensure_future(world.service.update(X, TimerPatch(payload=str(number)))) for number in (1, 2, 3)
        ]
        await asyncio.sleep(0)
        updates[1].cancel()
        results = await asyncio.gather(*updates, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert (await world.get("x")).timer.payload == "3"

    on_one_shard(scenario)


def test_large_timers_for_a_failing_destination_leave_memory_for_the_others() -> None:
    async def run(clock: VirtualClock) -> None:
        world = World(clock, engine__timers_in_memory_max=1_000, engine__writes_waiting_max=5_000)
        await world.start()

        async def dead(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.BROKEN, error="refused")

        world.destinations.answers["http://dead.test/"] = dead
        large = '"' + "x" * 8_000 + '"'
        for number in range(400):
            await world.create(f"dead{number}", 1_000, callback_url="http://dead.test/", payload=large)
        for number in range(50):
            await world.create(f"live{number}", 120_000 + number * 100)
        await asyncio.sleep(300)
        assert sum(timer_id.startswith("live") for timer_id in world.destinations.called()) == 50
        await world.engine.stop()

    run_virtual(run)


def test_shards_that_could_not_be_claimed_at_the_start_are_claimed_later() -> None:
    class Exclusive(MemoryStore):
        capabilities = type(MemoryStore.capabilities)(
            name="memory", batch_max=100, payload_bytes_max=1_000, parallel_commits=1, exclusive=True, durable=False
        )

    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(Exclusive(clock))
        store.fail("heartbeat", Fault.UNAVAILABLE)
        world = World(clock, store.as_store)
        await world.start()
        assert world.service.readiness() is not None
        await asyncio.sleep(5)
        assert world.service.readiness() is None
        await world.create("x", 1_000)
        await asyncio.sleep(2)
        assert (await world.get("x")).state is State.DELIVERED
        await world.engine.stop()

    run_virtual(run)


def test_an_update_that_does_not_change_the_time_keeps_the_attempts() -> None:
    """A timer that was tried on time is being retried: no missed-fire policy may skip it for being late."""

    async def scenario(world: World, store: FaultyStore) -> None:
        outcomes = [AttemptResult(Contact.ANSWERED, 500), AttemptResult(Contact.ANSWERED, 200)]

        async def answer(attempt: Attempt) -> AttemptResult:
            return outcomes.pop(0)

        world.destinations.answers[URL] = answer
        policy = RetryPolicy(initial_interval_ms=60_000, max_interval_ms=60_000)
        await world.create("x", 1_000, missed=Missed(skip_if_late_by_ms=100), retry_policy=policy, tags=("t",))
        await asyncio.sleep(1.5)
        before = (await world.get("x")).timer
        assert before.attempts == 1
        changed = (await world.service.update(X, TimerPatch(payload='"new"'))).view.timer
        assert changed.attempts == 1
        assert (changed.execute_at_ms, changed.scheduled_at_ms) == (before.execute_at_ms, before.scheduled_at_ms)
        assert changed.extras == before.extras
        assert changed.generation > before.generation
        await asyncio.sleep(120)
        view = await world.get("x")
        assert view.state is State.DELIVERED
        assert (view.timer.attempts, view.timer.extras.late_by_ms) == (2, 0)
        assert world.destinations.payloads == [None, '"new"']

    on_one_shard(scenario)


@pytest.mark.parametrize("time", [{"delay_ms": 5_000}, {"execute_at_ms": 1_800_000_020_000}])
def test_an_update_of_the_time_starts_the_attempts_over(time: dict[str, int]) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        async def answer(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.ANSWERED, 500)

        world.destinations.answers[URL] = answer
        await world.create("x", 1_000, tags=("t",), retry_policy=RetryPolicy(initial_interval_ms=60_000))
        await asyncio.sleep(1.5)
        changed = (await world.service.update(X, TimerPatch(**time))).view.timer  # type: ignore[arg-type]
        assert changed.attempts == 0
        assert changed.execute_at_ms == changed.scheduled_at_ms
        assert (changed.extras.tags, changed.extras.first_attempt_at_ms, changed.extras.last_error) == (
            ("t",),
            None,
            None,
        )

    on_one_shard(scenario)


def test_whether_a_timer_was_replaced_is_not_known_after_a_lost_answer_beyond_the_horizon() -> None:
    """The lost answer of the store said it; timers beyond the horizon are not in memory."""

    async def scenario(world: World, store: FaultyStore) -> None:
        day_ms = 86_400_000
        await world.create("x", day_ms)
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        assert (await world.create("x", day_ms)).replaced is None
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        assert (await world.create("x", day_ms)).replaced is True, "written again, and the store has said so"
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        await world.create("y", 1_000)
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        assert (await world.create("y", 1_000)).replaced is True, "in memory, so it is known"

    on_one_shard(scenario)


def test_a_read_of_a_timer_whose_result_cannot_be_recorded_is_answered_in_time() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 1_000)
        store.fail("commit", *[Fault.UNAVAILABLE] * 10_000)
        await asyncio.sleep(30)
        assert world.destinations.called() == ["x"]
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(world.service.delete(X), 15)
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(world.service.update(X, TimerPatch(payload="2")), 15)
        store.heal()
        await asyncio.sleep(10)
        assert (await world.get("x")).state is State.DELIVERED
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_no_more_deliveries_are_started_than_may_be_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not recorded is repeated after a crash: that has to be a bounded number."""
    monkeypatch.setattr("duetime.engine.engine._UNSETTLED_MAX", 10)

    async def scenario(world: World, store: FaultyStore) -> None:
        names = [f"t{number}" for number in range(50)]
        for name in names:
            await world.create(name, 1_000)
        await world.create("elsewhere", 3_000, callback_url="http://idle.test/")
        committing = store.hold("commit")
        await asyncio.sleep(30)
        assert len(world.destinations.calls) == 10
        assert world.engine.counters.unsettled == 10
        committing.set()
        await asyncio.sleep(30)
        assert sorted(world.destinations.called()) == sorted([*names, "elsewhere"])

    on_one_shard(scenario, delivery__concurrency_per_destination=1)


def test_generations_go_on_growing_over_restarts_and_recoveries() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        generations: list[int] = []
        for _ in range(3):
            for _ in range(3):
                generations.append((await world.create("x", 60_000)).view.timer.generation)
            store.fail("commit", Fault.LOST_THEN_UNKNOWN)
            generations.append((await world.create("x", 60_000)).view.timer.generation)
            generations.append((await world.create("x", 60_000)).view.timer.generation)
            await world.crash_and_restart()
            await asyncio.sleep(30)  # until its predecessor is declared dead
        assert generations == sorted(set(generations))

    on_one_shard(scenario)


def test_a_delete_that_could_not_be_applied_in_time_does_not_keep_the_timer_from_firing() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        answered = asyncio.Event()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return OK

        world.destinations.answers["http://hangs.test/"] = hangs
        await world.create("armed", 25_000)
        await world.create("due meanwhile", 5_000)
        await world.create("in flight", 1_000, callback_url="http://hangs.test/")
        await world.create("answered meanwhile", 1_000, callback_url="http://hangs.test/")
        await asyncio.sleep(2)
        names = ["armed", "due meanwhile", "in flight", "answered meanwhile"]
        store.fail("commit", *[Fault.UNAVAILABLE] * 10_000)
        deletes = [asyncio.ensure_future(world.service.delete(TimerKey("default", name))) for name in names]
        await asyncio.sleep(1)
        answered.set()
        await asyncio.wait(deletes)
        assert [type(delete.exception()) for delete in deletes] == [StoreUnavailable] * 4
        check_accounts(world.engine)
        store.heal()
        await asyncio.sleep(60)
        assert sorted(world.destinations.called()) == sorted(names)
        assert [(await world.get(name)).state for name in names] == [State.DELIVERED] * 4

    on_one_shard(scenario)
