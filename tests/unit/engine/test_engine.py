"""The engine on a memory store in virtual time: promises 1–4 and 6, one instance."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest
from engine_world import OK, URL, World, in_world, on_faulty, on_one_shard

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    Missed,
    Outcome,
    RetryPolicy,
    State,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    Verdict,
    shard_of,
)
from duetime.errors import Busy, Conflict, NotFound, NotReady, OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Fence, ListQuery, Member
from duetime.stores.memory import MemoryStore
from duetime.testing import make_reached, make_timer
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

A = TimerKey("default", "a")
FAILS = AttemptResult(Contact.ANSWERED, 500)
FAST_RETRY = RetryPolicy(max_retries=3, initial_interval_ms=100, max_interval_ms=1_000)


class TestFiring:
    def test_a_timer_fires_once_at_its_time_and_is_delivered(self) -> None:
        async def scenario(world: World) -> None:
            due_ms = (await world.create("a", 1_500)).view.timer.execute_at_ms
            await asyncio.sleep(10)
            assert world.destinations.calls == [(due_ms, "a", 1)]
            view = await world.get("a")
            assert view.state is State.DELIVERED
            assert view.reached is not None
            assert view.timer.extras.late_by_ms == 0

        in_world(scenario)

    def test_a_time_in_the_past_fires_at_once(self) -> None:
        async def scenario(world: World) -> None:
            spec = TimerSpec(namespace="default", timer_id="a", execute_at_ms=0, callback_url=URL)
            await world.service.create(spec)
            await asyncio.sleep(0.05)
            assert world.destinations.called() == ["a"]

        in_world(scenario)

    def test_timers_fire_in_due_order_whatever_order_they_came_in(self) -> None:
        async def scenario(world: World) -> None:
            for delay_ms in (900, 100, 500, 300, 700):
                await world.create(f"t{delay_ms}", delay_ms)
            await asyncio.sleep(2)
            assert world.destinations.called() == ["t100", "t300", "t500", "t700", "t900"]

        in_world(scenario)

    def test_a_timer_far_beyond_the_horizon_is_not_in_memory_and_still_fires(self) -> None:
        async def scenario(world: World) -> None:
            due_ms = (await world.create("a", 3_600_000)).view.timer.execute_at_ms
            await asyncio.sleep(60)
            assert world.engine.counters.weight == 0
            await asyncio.sleep(3_600)
            assert world.destinations.calls == [(due_ms, "a", 1)]

        in_world(scenario)

    def test_a_restart_fires_what_was_acknowledged_before_the_crash(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 2_000)
            await world.create("far", 600_000)
            await world.crash_and_restart()
            await asyncio.sleep(700)
            assert sorted(world.destinations.called()) == ["a", "far"]

        in_world(scenario)

    def test_a_restart_after_the_low_water_rose_finds_a_timer_of_the_past(self) -> None:
        async def scenario(world: World) -> None:
            for number in range(40):
                await world.create(f"t{number}", 1_000 * number)
            await asyncio.sleep(60)
            assert any(row.low_water.execute_at_ms > 0 for row in await world.store.shards())
            held = asyncio.Event()

            async def never(attempt: Attempt) -> None:
                await held.wait()

            world.destinations.before_begin = never
            await world.service.create(
                TimerSpec(namespace="default", timer_id="old", execute_at_ms=5, callback_url=URL)
            )
            await asyncio.sleep(0.1)
            world.destinations.before_begin = None
            await world.crash_and_restart()
            await asyncio.sleep(10)
            assert world.destinations.called()[-1] == "old"

        in_world(scenario)


class TestRetries:
    def test_a_failure_is_retried_by_the_policy_until_it_succeeds(self) -> None:
        async def scenario(world: World) -> None:
            outcomes = iter([FAILS, AttemptResult(Contact.BROKEN, error="no route"), OK])

            async def answer(attempt: Attempt) -> AttemptResult:
                return next(outcomes)

            world.destinations.answers[URL] = answer
            await world.create("a", 100, retry_policy=FAST_RETRY)
            await asyncio.sleep(30)
            assert [attempt for _, _, attempt in world.destinations.calls] == [1, 2, 3]
            assert (await world.get("a")).state is State.DELIVERED

        in_world(scenario)

    def test_exhausted_retries_end_as_failed_with_the_last_error_and_can_be_replayed(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                return FAILS

            world.destinations.answers[URL] = answer
            await world.create("a", 100, retry_policy=FAST_RETRY)
            await asyncio.sleep(60)
            view = await world.get("a")
            assert (view.state, view.timer.attempts) == (State.FAILED, 4)
            assert view.timer.extras.last_error == "HTTP 500"
            del world.destinations.answers[URL]
            await world.service.replay(A)
            await asyncio.sleep(1)
            assert (await world.get("a")).state is State.DELIVERED

        in_world(scenario)

    def test_a_callback_that_asks_for_another_time_is_called_again_then(self) -> None:
        async def scenario(world: World) -> None:
            answers = iter([b'{"ok": true, "nextExecuteAt": "2027-01-15T09:00:00Z"}', b"{}"])

            async def answer(attempt: Attempt) -> AttemptResult:
                return AttemptResult(Contact.ANSWERED, 200, next(answers))

            world.destinations.answers[URL] = answer
            await world.create("a", 100)
            await asyncio.sleep(10)
            view = await world.get("a")
            assert (view.state, view.timer.attempts) == (State.SCHEDULED, 0)
            await asyncio.sleep(3_700)
            assert len(world.destinations.calls) == 2
            assert (await world.get("a")).state is State.DELIVERED

        in_world(scenario)

    @pytest.mark.parametrize("done", [True, False])
    def test_a_receiver_that_always_asks_for_a_time_in_the_past_is_called_once_a_second(self, done: bool) -> None:
        async def scenario(world: World) -> None:
            body = b'{"ok": %s, "nextExecuteAt": "1970-01-01T00:00:00Z"}' % (b"true" if done else b"false")

            async def answer(attempt: Attempt) -> AttemptResult:
                return AttemptResult(Contact.ANSWERED, 200, body)

            world.destinations.answers[URL] = answer
            await world.create("a", 0, retry_policy=RetryPolicy(max_retries=20))
            await asyncio.sleep(30)
            started = [at_ms for at_ms, _, _ in world.destinations.calls]
            assert all(later - earlier >= 1_000 for earlier, later in pairwise(started))
            if done:
                assert 28 <= len(started) <= 31
            else:
                assert len(started) == 21  # the first attempt and 20 retries
                assert (await world.get("a")).state is State.FAILED

        in_world(scenario)

    def test_a_missed_timer_is_skipped_if_it_asked_for_that(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000, missed=Missed(skip_if_late_by_ms=5_000))
            world.engine.abandon()
            await asyncio.sleep(60)
            world.new_instance()
            await world.start()
            await asyncio.sleep(10)
            assert world.destinations.calls == []
            assert (await world.get("a")).state is State.SKIPPED

        in_world(scenario)


class TestVerdicts:
    def test_a_deleted_timer_does_not_fire(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000)
            assert await world.service.delete(A) is Verdict.CANCELLED
            await asyncio.sleep(5)
            assert world.destinations.calls == []
            assert (await world.get("a")).state is State.CANCELLED
            assert await world.service.delete(A) is Verdict.ALREADY_REACHED

        in_world(scenario)

    def test_deleting_what_never_was_is_not_found(self) -> None:
        async def scenario(world: World) -> None:
            with pytest.raises(NotFound):
                await world.service.delete(A)

        in_world(scenario)

    def test_case_29_deleting_a_timer_in_flight_says_so_and_stops_its_retries(self) -> None:
        async def scenario(world: World) -> None:
            called, answer_now = asyncio.Event(), asyncio.Event()

            async def answer(attempt: Attempt) -> AttemptResult:
                called.set()
                await answer_now.wait()
                return FAILS

            world.destinations.answers[URL] = answer
            await world.create("a", 100)
            await called.wait()
            assert (await world.get("a")).state is State.IN_FLIGHT
            assert await world.service.delete(A) is Verdict.IN_FLIGHT
            answer_now.set()
            await asyncio.sleep(60)
            assert len(world.destinations.calls) == 1
            assert (await world.get("a")).state is State.CANCELLED

        in_world(scenario)

    def test_case_29_a_delete_between_queueing_and_the_first_byte_is_a_true_cancellation(self) -> None:
        async def scenario(world: World) -> None:
            queued, go_on = asyncio.Event(), asyncio.Event()

            async def wait(attempt: Attempt) -> None:
                queued.set()
                await go_on.wait()

            world.destinations.before_begin = wait
            await world.create("a", 100)
            await queued.wait()
            assert await world.service.delete(A) is Verdict.CANCELLED
            go_on.set()
            await asyncio.sleep(5)
            assert world.destinations.calls == []

        in_world(scenario)

    def test_case_30_the_outcome_of_an_old_generation_never_settles_the_new_one(self) -> None:
        async def scenario(world: World) -> None:
            called, answer_now = asyncio.Event(), asyncio.Event()

            async def answer(attempt: Attempt) -> AttemptResult:
                called.set()
                if attempt.timer.payload == '"old"':
                    await answer_now.wait()
                return OK

            world.destinations.answers[URL] = answer
            await world.create("a", 100, payload='"old"')
            await called.wait()
            updated = await world.service.update(A, TimerPatch(delay_ms=5_000, payload='"new"'))
            assert updated.verdict is Verdict.IN_FLIGHT
            answer_now.set()
            await asyncio.sleep(1)
            assert (await world.get("a")).state is State.SCHEDULED
            await asyncio.sleep(10)
            assert world.destinations.payloads == ['"old"', '"new"']

        in_world(scenario)

    def test_the_last_acknowledged_value_is_what_fires(self) -> None:
        async def scenario(world: World) -> None:
            assert not (await world.create("a", 1_000, payload="1")).replaced
            assert (await world.create("a", 2_000, payload="2")).replaced
            await world.service.update(A, TimerPatch(payload="3"))
            await asyncio.sleep(5)
            assert world.destinations.payloads == ["3"]

        in_world(scenario)

    def test_an_update_moves_a_timer_in_and_out_of_the_horizon(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000)
            await world.service.update(A, TimerPatch(delay_ms=7_200_000))
            await asyncio.sleep(10)
            assert world.destinations.calls == []
            await world.service.update(A, TimerPatch(delay_ms=500))
            await asyncio.sleep(1)
            assert world.destinations.called() == ["a"]
            await asyncio.sleep(8_000)
            assert world.destinations.called() == ["a"]

        in_world(scenario)

    def test_fire_now_brings_a_far_timer_forward(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 7_200_000)
            assert (await world.service.fire_now(A)).state is State.SCHEDULED
            await asyncio.sleep(1)
            assert world.destinations.called() == ["a"]
            with pytest.raises(NotFound):
                await world.service.fire_now(TimerKey("default", "unknown"))

        in_world(scenario)

    def test_many_commands_for_one_timer_at_once_are_all_answered_and_the_last_one_counts(self) -> None:
        async def scenario(world: World) -> None:
            results = await asyncio.gather(
                world.create("a", 1_000, payload="1"),
                world.create("a", 1_000, payload="2"),
                world.service.update(A, TimerPatch(payload="3")),
                world.create("a", 1_000, payload="4"),
                world.service.delete(A),
                world.create("a", 1_000, payload="5"),
            )
            assert results[4] is Verdict.CANCELLED
            await asyncio.sleep(5)
            assert world.destinations.payloads == ["5"]

        in_world(scenario)


class TestIfAbsent:
    def test_case_31_the_same_create_again_is_answered_with_the_same_timer(self) -> None:
        async def scenario(world: World) -> None:
            first = await world.create("a", 1_000, payload="1", if_absent=True)
            again = await world.create("a", 1_000, payload="1", if_absent=True)
            assert again.view.timer.generation == first.view.timer.generation

        in_world(scenario)

    def test_case_31_a_different_create_is_a_conflict(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000, payload="1", if_absent=True)
            with pytest.raises(Conflict):
                await world.create("a", 1_000, payload="2", if_absent=True)

        in_world(scenario)

    def test_case_32_a_late_retry_after_the_timer_was_reached_does_not_fire_it_again(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000, payload="1", if_absent=True)
            await asyncio.sleep(5)
            again = await world.create("a", 1_000, payload="1", if_absent=True)
            assert again.view.state is State.DELIVERED
            await asyncio.sleep(5)
            assert len(world.destinations.calls) == 1

        in_world(scenario)


class TestIsolation:
    def test_case_19_a_dead_destination_is_held_and_the_others_stay_on_time(self) -> None:
        async def scenario(world: World) -> None:
            dead_calls = 0

            async def dead(attempt: Attempt) -> AttemptResult:
                nonlocal dead_calls
                dead_calls += 1
                await asyncio.sleep(5)
                return AttemptResult(Contact.BROKEN, error="timeout")

            world.destinations.answers["http://dead.test/"] = dead
            for number in range(500):
                await world.create(f"dead{number}", 1_000, callback_url="http://dead.test/")
            lively = [(await world.create(f"live{n}", 1_000 + n * 10)).view.timer.execute_at_ms for n in range(500)]
            await asyncio.sleep(30)
            fired = [at_ms for at_ms, timer_id, _ in world.destinations.calls if timer_id.startswith("live")]
            assert [at - due for at, due in zip(fired, lively, strict=True)] == [0] * 500
            assert dead_calls < 100
            held = [n for n in range(500) if (await world.get(f"dead{n}")).timer.attempts == 0]
            assert len(held) > 300

        in_world(scenario)

    def test_memory_stays_bounded_behind_a_failing_destination_and_the_others_still_fire(self) -> None:
        async def scenario(world: World) -> None:
            async def dead(attempt: Attempt) -> AttemptResult:
                return AttemptResult(Contact.BROKEN, error="refused")

            world.destinations.answers["http://dead.test/"] = dead
            await asyncio.gather(
                *(world.create(f"dead{n}", 1_000, callback_url="http://dead.test/") for n in range(6_000))
            )
            await asyncio.gather(*(world.create(f"live{n}", 3_000 + n) for n in range(500)))
            most = 0
            for _ in range(120):
                await asyncio.sleep(1)
                most = max(most, world.engine.counters.weight)
            assert most < 7_000 * 1_024
            assert sum(timer_id.startswith("live") for timer_id in world.destinations.called()) == 500
            del world.destinations.answers["http://dead.test/"]
            await asyncio.sleep(7_200)
            delivered = {t for _, t, _ in world.destinations.calls}
            assert len(delivered) == 6_500

        in_world(scenario, engine__timers_in_memory_max=2_000)

    def test_a_hundred_thousand_timers_due_later_use_no_memory_and_are_loaded_page_by_page(self) -> None:
        async def scenario(world: World) -> None:
            await asyncio.gather(*(world.create(f"t{n}", 100_000 + n * 20) for n in range(20_000)))
            most = 0
            for _ in range(520):
                await asyncio.sleep(1)
                most = max(most, world.engine.counters.weight)
            assert len(world.destinations.calls) == 20_000
            assert most <= 4_000 * 1_024
            late = world.engine.telemetry.lateness
            assert late.counts[0] == 20_000

        in_world(scenario, engine__writes_waiting_max=30_000)

    def test_the_age_of_the_oldest_due_timer_counts_those_that_are_held(self) -> None:
        async def scenario(world: World) -> None:
            async def dead(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(3_600)
                return AttemptResult(Contact.BROKEN, error="timeout")

            world.destinations.answers[URL] = dead
            for number in range(100):
                await world.create(f"t{number}", 1_000)
            await asyncio.sleep(31)
            assert (await world.service.cluster_status()).oldest_due_ms == 30_000

        in_world(scenario)

    def test_a_full_queue_answers_busy_and_applies_nothing(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            release = store.hold("commit")
            waiting = [asyncio.ensure_future(world.create(f"t{n}")) for n in range(8)]
            await asyncio.sleep(0.01)
            with pytest.raises(Busy) as refused:  # a fifth of the queue is left for other namespaces
                await world.create("one-too-many")
            assert refused.value.code == "namespace_busy"
            release.set()
            await asyncio.gather(*waiting)
            with pytest.raises(NotFound):
                await world.get("one-too-many")

        on_faulty(scenario, engine__writes_waiting_max=10)


class TestUnknownOutcomes:
    @pytest.mark.parametrize("fault", [Fault.APPLIED_THEN_UNKNOWN, Fault.LOST_THEN_UNKNOWN, Fault.BROKEN])
    def test_case_3_a_commit_whose_answer_is_lost_is_resolved_by_claiming_again(self, fault: Fault) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            store.fail("commit", fault)
            created = await world.create("a", 1_000, payload="1")
            assert created.view.timer.payload == "1"
            assert world.engine.telemetry.reclaims.value == 1
            await asyncio.sleep(5)
            assert world.destinations.called() == ["a"]

        on_faulty(scenario)

    def test_case_5_a_lost_answer_to_the_claim_itself_is_told_by_the_nonce(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
            store.fail("claim", Fault.APPLIED_THEN_UNKNOWN, Fault.UNAVAILABLE, Fault.LOST_THEN_UNKNOWN)
            await world.create("a", 1_000)
            await asyncio.sleep(5)
            assert world.destinations.called() == ["a"]
            assert len(world.engine.shards) == 16

        on_faulty(scenario)

    def test_a_settle_whose_answer_is_lost_does_not_fire_the_timer_twice(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 1_000)
            store.fail("commit", Fault.LOST_THEN_UNKNOWN)
            await asyncio.sleep(5)
            assert world.destinations.called() == ["a"]
            assert (await world.get("a")).state is State.DELIVERED

        on_faulty(scenario)

    def test_a_delete_whose_answer_is_lost_is_still_a_delete(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 1_000)
            store.fail("commit", Fault.LOST_THEN_UNKNOWN)
            assert await world.service.delete(A) is Verdict.CANCELLED
            await asyncio.sleep(5)
            assert world.destinations.calls == []

        on_faulty(scenario)

    def test_case_3_who_waits_too_long_for_an_unknown_outcome_is_told_that_it_is_unknown(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
            store.fail("claim", *[Fault.UNAVAILABLE] * 30)
            with pytest.raises(OutcomeUnknown):
                await world.create("a", 60_000)
            store.heal()
            await asyncio.sleep(120)
            assert world.destinations.called() == ["a"]

        on_faulty(scenario)

    def test_case_25_a_store_that_is_away_for_a_moment_is_not_noticed(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            store.fail("commit", Fault.UNAVAILABLE, Fault.THROTTLED, Fault.UNAVAILABLE)
            await world.create("a", 1_000)
            assert world.engine.telemetry.reclaims.value == 0

        on_faulty(scenario)

    def test_while_the_store_stays_unavailable_creates_are_answered_not_applied_and_nothing_is_stored(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("b", 30_000, payload="1")
            store.fail("commit", *[Fault.UNAVAILABLE] * 200)
            with pytest.raises(StoreUnavailable):
                await world.create("a", 60_000)
            with pytest.raises(StoreUnavailable):
                await world.service.delete(TimerKey("default", "b"))
            store.heal()
            await asyncio.sleep(120)
            assert world.destinations.called() == ["b"]

        on_faulty(scenario)

    def test_a_delivery_made_while_the_store_is_unavailable_is_settled_when_it_is_available_again(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 100)
            store.fail("commit", *[Fault.UNAVAILABLE] * 50)
            await asyncio.sleep(200)
            assert world.destinations.called() == ["a"]
            assert (await world.get("a")).state is State.DELIVERED

        on_faulty(scenario)


class TestLease:
    def test_case_24_nothing_fires_past_the_lease_and_everything_after_it_is_renewed(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 10_000)
            answered = store.hold("heartbeat")
            await asyncio.sleep(20)
            assert world.destinations.calls == []
            assert world.service.readiness() is not None
            answered.set()
            await asyncio.sleep(2)
            assert world.destinations.called() == ["a"]
            assert world.service.readiness() is None

        on_faulty(scenario)

    def test_an_instance_declared_dead_joins_again_under_a_new_id_and_fires(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 10_000)
            old = world.engine.membership.instance_id
            for member in await world.store.members():
                assert await world.store.mark_dead(member.instance_id, member.counter)
            await asyncio.sleep(20)
            assert world.engine.membership.instance_id != old
            assert world.destinations.called() == ["a"]

        on_faulty(scenario)

    def test_a_shard_that_another_instance_has_claimed_is_dropped_and_not_written(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await world.create("a", 10_000, payload="1")
            rows = await world.store.shards()
            await world.store.join(Member("another", "elsewhere", 0, True, 0))
            await world.store.claim([Claim(row.shard_id, row.version, 7, "another", "elsewhere", 0) for row in rows])
            with pytest.raises(Exception, match="changing its owner"):
                await world.create("a", 10_000, payload="2")
            found = await world.store.get_many([(shard_of("a", 16), A)])
            assert found[0].timer is not None
            assert found[0].timer.payload == "1"

        on_faulty(scenario)

    def test_case_7_a_wall_clock_that_jumps_ahead_fires_nothing_early(self) -> None:
        async def run(clock: VirtualClock) -> None:
            true_time = VirtualClock(clock._loop)
            world = World(clock, MemoryStore(true_time))
            await world.start()
            await world.create("a", 3_600_000)
            clock.offset_ms += 7_200_000
            await asyncio.sleep(600)
            assert world.destinations.calls == []
            clock.offset_ms = 0
            await asyncio.sleep(3_600)
            assert world.destinations.called() == ["a"]
            await world.engine.stop()

        run_virtual(run)

    def test_case_8_a_wall_clock_that_jumps_back_only_delays(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 10_000)
            await asyncio.sleep(5)
            world.clock.offset_ms -= 60_000
            await asyncio.sleep(10)
            assert world.destinations.calls == []
            await asyncio.sleep(60)
            assert world.destinations.called() == ["a"]

        in_world(scenario)


class TestShutdown:
    def test_a_drain_waits_for_deliveries_in_flight_settles_them_and_releases_every_shard(self) -> None:
        async def scenario(world: World) -> None:
            called = asyncio.Event()

            async def answer(attempt: Attempt) -> AttemptResult:
                called.set()
                await asyncio.sleep(3)
                return OK

            world.destinations.answers[URL] = answer
            await world.create("a", 100)
            await world.create("b", 4_000)
            await called.wait()
            await world.engine.stop()
            assert (await world.store.get_many([(shard_of("a", 16), A)]))[0].reached is not None
            assert all(row.owner_id is None for row in await world.store.shards())
            assert not any(member.alive for member in await world.store.members())
            with pytest.raises(NotReady):
                await world.create("c")
            world.new_instance()
            await world.start()
            await asyncio.sleep(10)
            assert world.destinations.called() == ["a", "b"]

        in_world(scenario)


class TestNamespaces:
    def test_an_unknown_namespace_is_not_found(self) -> None:
        async def scenario(world: World) -> None:
            with pytest.raises(NotFound) as caught:
                await world.service.create(TimerSpec(namespace="nowhere", timer_id="a", delay_ms=1, callback_url=URL))
            assert caught.value.code == "namespace_not_found"

        in_world(scenario)

    def test_a_namespace_is_created_on_first_use_if_the_configuration_allows_it(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.create(TimerSpec(namespace="new", timer_id="a", delay_ms=100, callback_url=URL))
            await asyncio.sleep(1)
            assert world.destinations.called() == ["a"]

        in_world(scenario, namespaces__create_on_first_use=True)

    def test_a_list_shows_every_timer_once_over_pages_and_states(self) -> None:
        async def scenario(world: World) -> None:
            await asyncio.gather(*(world.create(f"t{n}", n * 1_000 + 500) for n in range(30)))
            await asyncio.sleep(10)
            seen: list[tuple[str, State]] = []
            cursor: str | None = None
            while True:
                views, cursor = await world.service.list_timers(
                    TimerFilter(namespace="default", limit=7, cursor=cursor)
                )
                seen += [(view.timer.timer_id, view.state) for view in views]
                if cursor is None:
                    break
            assert sorted(timer_id for timer_id, _ in seen) == sorted(f"t{n}" for n in range(30))
            assert sum(state is State.DELIVERED for _, state in seen) == 10

        in_world(scenario)


# --- what is over, and may go ---------------------------------------------------------------------


class Purging(MemoryStore):
    """Counts what one call removes; during the first ones the database is unavailable, and one shard never answers."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.removed: list[int] = []
        self.away = 3

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:  # type: ignore[override]
        if self.away:
            self.away -= 1
            raise StoreUnavailable("away")
        results: list[int | StoreError] = [*await super().purge_reached(fences, before_ms, limit)]
        self.removed.append(sum(count for count in results if isinstance(count, int)))
        return [StoreUnavailable("no quorum") if f.shard_id == 60 else r for f, r in zip(fences, results, strict=True)]


def test_reached_timers_are_purged_after_their_retention_a_limited_number_at_a_time() -> None:
    """However many shards there are: a call may be one transaction, and commits wait for it."""

    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, Purging)
        now_ms = world.clock.wall_ms()
        late = make_reached(make_timer("late"), purge_at_ms=now_ms + 3_600_000)
        shards = [world.engine.shards[shard_id] for shard_id in (0, 1, 61, 120, 121)]  # in two turns
        for shard in shards:
            ends = [make_reached(make_timer(f"n-{n}"), purge_at_ms=now_ms + 10_000) for n in range(700)]
            await store.commit([Batch(shard.fence, reached=[*ends, late])])
        await asyncio.sleep(80)
        assert sum(store.removed) == 700 * len(shards)
        assert max(store.removed) <= 1_000
        everything = ListQuery(namespace="test", num_shards=130, outcomes=frozenset(Outcome))
        assert (await store.list_timers(everything)).reached == [late] * len(shards)

    in_world(scenario, new_store=Purging, namespaces__default_num_shards=130)


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

    on_one_shard(scenario, delivery__concurrency_per_flow=1)


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
