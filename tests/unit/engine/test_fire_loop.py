"""The fire loop with real shards and a real flow, but without an engine: when a timer fires, and when it must not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from engine_world import OK, URL, check_shard
from msgspec.structs import replace

from duetime.cluster.membership import Membership
from duetime.config import load_config
from duetime.delivery import Attempt, Deliverer
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Extras, Missed, Namespace, TimerKey
from duetime.engine.counters import Counters
from duetime.engine.fire_loop import FireLoop
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Entry, Phase, Shard
from duetime.errors import DuetimeError, NotOwner
from duetime.store import Committed, Page, ShardRow
from duetime.telemetry import Telemetry
from duetime.testing import make_timer
from duetime.testing.virtual import START_WALL_MS, VirtualClock, run_virtual

A = TimerKey("test", "a")
NAMESPACE = Namespace(name="test", num_shards=1, created_at_ms=0)
FAILS = AttemptResult(Contact.ANSWERED, 500)


class Lease:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.is_valid = True

    def may_fire(self) -> bool:
        return self.is_valid

    def now_ms(self) -> int:
        return self.clock.wall_ms()

    def boot_ms(self) -> int:
        return self.clock.boot_ms()


class Receiver:
    """Answers each call with `outcome`, after `seconds`; what `begin` returned before the first byte is in `begun`."""

    def __init__(self) -> None:
        self.outcome: AttemptResult = OK
        self.seconds = 0.0
        self.connect_seconds = 0.0
        self.begun: list[tuple[str, int | None]] = []
        self.attempts: list[Attempt] = []

    def origin(self, url: str) -> str:
        if "broken" in url:
            raise ZeroDivisionError(url)
        return url

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        self.attempts.append(attempt)
        if self.connect_seconds:
            await asyncio.sleep(self.connect_seconds)
        at_ms = attempt.begin()
        self.begun.append((attempt.timer.timer_id, at_ms))
        if at_ms is None:
            return AttemptResult(Contact.NOT_SENT)
        await asyncio.sleep(self.seconds)
        return self.outcome

    def called(self) -> list[str]:
        return [name for name, at_ms in self.begun if at_ms is not None]


class Harness:
    """One shard with its fire loop. Commits are made when the test says so, or at once with `commits`."""

    def __init__(self, clock: VirtualClock, **settings: Any) -> None:
        self.counters = Counters(writes_waiting_max=1_000)
        self.commits = True
        self.clock = clock
        self.lease = Lease(clock)
        self.receiver = Receiver()
        self.telemetry = Telemetry()
        self.known: dict[str, Namespace] = {"test": NAMESPACE}
        self.asked_to_read = 0
        self.congested = False
        flags = {f"delivery.{name}": value for name, value in settings.items()}
        self.loop = FireLoop(
            load_config(environ={}, flags=flags).delivery,
            cast(Membership, self.lease),
            cast(Deliverer, self.receiver),
            self.telemetry,
            random.Random(1),
            cast(Namespaces, Names(self)),
            self.read_namespaces,
            congested=lambda: self.congested,
        )
        self.shard = Shard(ShardRow(7, 3, 1, "me"), self)
        self.shard.begin_load(START_WALL_MS + 10_000_000)
        self.shard.end_load(Page([], None), 0)

    # what the fire loop needs
    def read_namespaces(self) -> None:
        self.asked_to_read += 1

    # what the shard needs
    def arm(self, entry: Entry) -> None:
        self.loop.arm(entry)

    def disarm(self, entry: Entry) -> None:
        self.loop.disarm(entry)

    def discard(self, entry: Entry) -> None:
        self.loop.discard(entry)

    def add_weight(self, weight: int) -> None:
        pass

    def enqueue(self, shard: Shard) -> None:
        if self.commits:
            asyncio.get_running_loop().call_soon(self.commit)

    def boot_ms(self) -> int:
        return self.clock.boot_ms()

    def commit(self) -> None:
        batch = self.shard.next_batch(10_000, 1_000_000_000)
        if batch is not None:
            self.shard.committed(batch, Committed())

    def put(self, timer_id: str = "a", delay_ms: int = 1_000, **changes: Any) -> Entry:
        changes.setdefault("callback_url", URL)
        timer = make_timer(timer_id, self.clock.wall_ms() + delay_ms, **changes)
        self.shard.write(timer.key, timer, [])
        self.commit()
        return self.shard.entries[timer.key]

    def check(self) -> None:
        check_shard(self.shard)
        writes = [*self.shard.pending.values(), *self.shard.committing.values()]
        assert self.counters.writes_waiting == len(writes)
        assert self.counters.unsettled == sum(write.settlement is not None for write in writes)


class Names:
    def __init__(self, harness: Harness) -> None:
        self._place = harness

    def known(self, name: str) -> Namespace | None:
        return self._place.known.get(name)

    def cached(self) -> list[Namespace]:
        return list(self._place.known.values())


def with_harness(scenario: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
    async def run(clock: VirtualClock) -> None:
        harness = Harness(clock, **settings)
        await scenario(harness)
        harness.check()
        harness.loop.stop()
        harness.shard.drop(NotOwner())
        assert harness.loop.armed_tickets() == []
        assert (harness.counters.writes_waiting, harness.counters.unsettled) == (0, 0)

    run_virtual(run)


class TestTheHeap:
    def test_a_timer_fires_in_its_millisecond_and_not_before(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(delay_ms=1_500)
            assert harness.loop.armed_tickets() == [entry.ticket]
            assert entry.ticket >> 32 == entry.timer.execute_at_ms
            await asyncio.sleep(1.4995)
            harness.loop.wake()
            await asyncio.sleep(0)
            assert harness.receiver.begun == []
            await asyncio.sleep(1)
            assert harness.receiver.begun == [("a", entry.timer.execute_at_ms)]
            assert harness.loop.armed_tickets() == []
            assert harness.shard.entries == {}

        with_harness(scenario)

    def test_timers_of_one_millisecond_fire_in_the_order_they_were_armed(self) -> None:
        async def scenario(harness: Harness) -> None:
            names = [f"t{number}" for number in range(20)]
            for name in names:
                harness.put(name, 1_000)
            harness.put("first", 500)
            await asyncio.sleep(2)
            assert harness.receiver.called() == ["first", *names]
            assert len({attempt.timer.timer_id for attempt in harness.receiver.attempts}) == 21

        with_harness(scenario, concurrency_per_flow=100)

    def test_an_earlier_timer_does_not_wait_for_a_later_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            late, early = harness.put("late", 900), harness.put("early", 100)
            await asyncio.sleep(2)
            assert harness.receiver.begun == [("early", early.timer.execute_at_ms), ("late", late.timer.execute_at_ms)]

        with_harness(scenario)

    def test_a_timer_that_is_due_again_during_a_call_that_is_not_begun_waits_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            deliver = harness.receiver.deliver

            async def is_short(attempt: Attempt) -> AttemptResult:
                harness.receiver.deliver = deliver  # type: ignore[method-assign]
                await asyncio.sleep(3)
                return AttemptResult(Contact.SHORTAGE)

            harness.receiver.deliver = is_short  # type: ignore[method-assign]
            entry = harness.put(delay_ms=100)
            await asyncio.sleep(1)
            harness.commits = False
            writing = harness.shard.write(A, replace(entry.timer, payload="2"), [])
            harness.shard.expire(harness.boot_ms() + 1)  # the write is not applied: the timer goes on
            with pytest.raises(DuetimeError):
                await writing
            await asyncio.sleep(0.5)
            assert harness.loop.flow.waiting == 1, "behind its own call"
            harness.commits = True
            await asyncio.sleep(1.62)  # its call has ended
            assert harness.loop.flow.tickets() == [entry.ticket]
            await asyncio.sleep(5)
            assert (harness.receiver.called(), harness.loop.flow.waiting) == (["a"], 0)

        with_harness(scenario, concurrency_per_flow=1)

    def test_a_later_timer_does_not_delay_the_wake_up_for_an_earlier_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            early = harness.put("early", 100)
            harness.put("late", 900)
            await asyncio.sleep(2)
            assert harness.receiver.begun[0] == ("early", early.timer.execute_at_ms)

        with_harness(scenario)

    @pytest.mark.parametrize("delay_ms", [100, 101])
    def test_a_counter_that_starts_over_does_not_change_the_time(self, delay_ms: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.loop._counter = 2**32 - 2
            entries = [harness.put(f"t{number}", delay_ms) for number in range(4)]
            assert [entry.ticket >> 32 for entry in entries] == [entries[0].timer.execute_at_ms] * 4
            assert len({entry.ticket for entry in entries}) == 4

        with_harness(scenario)

    def test_a_timer_of_the_next_millisecond_is_not_due_whatever_its_counter_is(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.loop._counter = 2**32 - 1
            entry = harness.put("a", 1)
            assert entry.ticket == entry.timer.execute_at_ms << 32
            harness.loop._fire_due()
            assert entry.phase is Phase.ARMED

        with_harness(scenario)

    def test_a_wake_up_is_made_earlier_and_never_later(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("a", 500)
            waker = harness.loop._waker
            assert waker is not None
            harness.loop._wake_in(0.9)
            assert harness.loop._waker is waker
            assert not waker.cancelled()
            harness.loop.wake()
            assert waker.cancelled()
            assert harness.loop._wake_at == 0

        with_harness(scenario)

    def test_a_disarmed_timer_does_not_fire(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("a", 100)
            harness.put("b", 200)
            harness.shard.write(A, None, [])
            harness.commit()
            await asyncio.sleep(1)
            assert harness.receiver.called() == ["b"]

        with_harness(scenario)

    def test_a_burst_is_fired_a_bounded_number_at_a_time(self) -> None:
        async def scenario(harness: Harness) -> None:
            fired: list[str] = []
            turns: list[int] = []
            turn = harness.loop._fire_due

            def counted() -> None:
                before = len(fired)
                turn()
                turns.append(len(fired) - before)

            harness.loop._fire_due = counted  # type: ignore[method-assign]
            harness.loop.flow.submit = lambda item, *_: fired.append(item.entry.timer.timer_id)  # type: ignore[method-assign]
            for number in range(600):
                harness.put(f"t{number}", 1_000)
            await asyncio.sleep(0.9)
            assert fired == []
            turns.clear()
            await asyncio.sleep(0.101)
            assert turns == [256, 256, 88]
            assert fired == [f"t{number}" for number in range(600)]

        with_harness(scenario)

    def test_many_timers_of_one_namespace_due_at_once_do_not_delay_those_of_another(self) -> None:
        async def scenario(harness: Harness) -> None:
            fired: list[str] = []
            harness.loop.flow.submit = lambda item, *_: fired.append(item.entry.timer.namespace)  # type: ignore[method-assign]
            harness.known["quiet"] = Namespace(name="quiet", num_shards=1, created_at_ms=0)
            for number in range(5_000):
                harness.put(f"t{number}", 1_000)
            for number in range(5):
                harness.put(f"t{number}", 1_000, namespace="quiet")
            await asyncio.sleep(1.5)
            assert fired[:256].count("quiet") == 5
            assert len(fired) == 5_005

        with_harness(scenario)

    def test_a_paused_engine_fires_nothing_and_then_everything(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.loop.pause()
            harness.put("a", 100)
            await asyncio.sleep(60)
            assert harness.receiver.attempts == []
            assert harness.loop.waiting == 1
            harness.loop.resume()
            await asyncio.sleep(0.1)
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_limits_of_the_namespace_are_applied_to_timers_that_wait(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.known["test"] = replace(NAMESPACE, paused=True)
            harness.loop.apply_limits()
            harness.put("a", 100)
            await asyncio.sleep(60)
            assert harness.receiver.attempts == []
            harness.known["test"] = NAMESPACE
            harness.loop.apply_limits()
            await asyncio.sleep(0.1)
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_timers_with_the_same_flow_key_are_one_flow(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            for number in range(3):
                harness.put(f"t{number}", 100, callback_url=f"http://host/{number}", extras=Extras(flow_key="shop"))
                harness.put(f"u{number}", 100, callback_url=f"http://host/?{number}")
            await asyncio.sleep(0.5)
            assert sorted(flow.key for flow in harness.loop.flow.flows()) == ["http://host/", "shop"]
            assert harness.loop.flow.in_flight == 2
            await asyncio.sleep(5)

        with_harness(scenario, concurrency_per_flow=1)

    @pytest.mark.parametrize("change", ["deleted", "replaced", "drained", "dropped"])
    def test_a_queued_timer_that_must_not_be_called_leaves_its_queue_at_once(self, change: str) -> None:
        async def scenario(harness: Harness) -> None:
            harness.loop.pause()
            harness.put("a", 100)
            await asyncio.sleep(1)
            assert harness.loop.waiting == 1
            if change == "deleted":
                harness.shard.write(A, None, [])
            elif change == "replaced":
                harness.put("a", 60_000)
            elif change == "drained":
                harness.shard.start_drain()
            else:
                harness.shard.drop(NotOwner())
            assert harness.loop.waiting == 0
            assert list(harness.loop.flow.flows()) == []
            if change != "drained":
                assert harness.loop.oldest_due_ms(harness.clock.wall_ms()) is None

        with_harness(scenario)

    def test_the_age_of_the_oldest_timer_is_right_after_the_first_of_a_held_queue_is_deleted(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.loop.pause()
            harness.put("a", 100)
            harness.put("b", 600)
            await asyncio.sleep(1.1)
            assert harness.loop.oldest_due_ms(harness.clock.wall_ms()) == 1_000
            harness.shard.write(A, None, [])
            assert harness.loop.oldest_due_ms(harness.clock.wall_ms()) == 500
            assert harness.loop.waiting == 1

        with_harness(scenario)

    def test_a_timer_queued_again_while_its_call_is_being_made_waits_no_longer_once_the_call_begins(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.connect_seconds = 1
            harness.receiver.seconds = 100
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.commits = False
            harness.shard.write(A, None, [])
            harness.shard.next_batch(10, 1_000_000)
            harness.shard.expire(harness.clock.boot_ms() + 1)  # its caller has gone away
            harness.shard.not_committed()
            await asyncio.sleep(0.1)
            assert harness.loop.waiting == 1, "the delete was not applied, and the timer is due"
            await asyncio.sleep(0.6)
            assert harness.receiver.called() == ["a"]
            assert harness.loop.waiting == 0
            assert harness.loop.park(9) == 0, "it is in flight"
            harness.commits = True
            await asyncio.sleep(200)

        with_harness(scenario, concurrency_per_flow=1)

    def test_a_shortage_of_the_instance_is_no_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            async def no_socket(attempt: Attempt) -> AttemptResult:
                harness.receiver.attempts.append(attempt)
                return AttemptResult(Contact.SHORTAGE, error="no socket to spare")

            deliver, harness.receiver.deliver = harness.receiver.deliver, no_socket  # type: ignore[method-assign]
            harness.put("a", 100)
            await asyncio.sleep(4)
            assert len(harness.receiver.attempts) == 3, "after 1 and 2 seconds"
            assert harness.shard.entries[A].timer.attempts == 0
            assert harness.telemetry.attempts.value == 0
            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            await asyncio.sleep(5)
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_jitter_is_drawn_only_for_a_retry(self) -> None:
        async def scenario(harness: Harness) -> None:
            drawn = harness.loop._rng.getstate()
            harness.put("a", 100)
            await asyncio.sleep(1)
            assert harness.loop._rng.getstate() == drawn
            harness.receiver.outcome = FAILS
            harness.put("b", 100)
            await asyncio.sleep(0.2)
            assert harness.loop._rng.getstate() != drawn

        with_harness(scenario)

    def test_the_waiting_time_of_the_earliest_due_timer(self) -> None:
        async def scenario(harness: Harness) -> None:
            now_ms = harness.clock.wall_ms
            assert harness.loop.oldest_due_ms(now_ms()) is None
            harness.lease.is_valid = False
            harness.put("gone", 10)
            harness.put("a", 100)
            harness.put("b", 300)
            harness.shard.write(TimerKey("test", "gone"), None, [])
            assert harness.loop.oldest_due_ms(now_ms()) is None
            await asyncio.sleep(0.1)
            assert harness.loop.oldest_due_ms(now_ms()) is None, "due just now"
            await asyncio.sleep(0.4)
            assert harness.loop.oldest_due_ms(now_ms()) == 400
            harness.lease.is_valid = True
            harness.receiver.seconds = 100
            harness.loop.wake()
            await asyncio.sleep(1)
            assert harness.receiver.called() == ["a"]
            assert harness.loop.oldest_due_ms(now_ms()) == 1_200, "b waits for its destination"
            harness.shard.write(TimerKey("test", "b"), None, [])
            assert harness.loop.oldest_due_ms(now_ms()) is None

        with_harness(scenario, concurrency_per_flow=1)


class TestTheLease:
    def test_without_a_lease_nothing_fires_and_with_it_everything_that_was_due(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.lease.is_valid = False
            harness.put("a", 100)
            await asyncio.sleep(10)
            assert harness.receiver.begun == []
            harness.lease.is_valid = True
            harness.loop.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_a_lease_that_ends_while_a_connection_is_made_sends_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.connect_seconds = 1
            entry = harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.lease.is_valid = False
            await asyncio.sleep(1)
            assert harness.receiver.begun == [("a", None)]
            assert entry.phase is Phase.ARMED, "it waits for another attempt"
            harness.lease.is_valid = True
            harness.loop.wake()
            await asyncio.sleep(3)
            assert harness.receiver.called() == ["a"]
            assert harness.telemetry.attempts.value == 1

        with_harness(scenario)

    def test_a_clock_that_is_corrected_backward_while_a_connection_is_made_makes_it_wait(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.connect_seconds = 1
            entry = harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.clock.offset_ms -= 5_000
            await asyncio.sleep(0.7)
            assert harness.receiver.begun == [("a", None)]
            await asyncio.sleep(20)
            assert len(harness.receiver.called()) == 1
            sent_ms = harness.receiver.begun[-1][1]
            assert sent_ms is not None
            assert sent_ms >= entry.timer.execute_at_ms

        with_harness(scenario)

    def test_exactly_when_it_is_due_it_may_be_sent(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", 100)
            await asyncio.sleep(1)
            assert harness.receiver.begun == [("a", entry.timer.execute_at_ms)]

        with_harness(scenario)

    def test_after_a_stop_nothing_more_is_sent_and_no_wake_up_is_left(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.connect_seconds = 1
            harness.put("a", 100)
            harness.put("b", 5_000)
            await asyncio.sleep(0.5)
            waker = harness.loop._waker
            assert waker is not None
            harness.loop.stop()
            assert waker.cancelled()
            assert harness.loop.flow.stopped
            late = harness.put("c", -10)
            harness.loop.wake()
            assert harness.loop._waker is waker, "no other was set"
            harness.loop._fire_due()
            assert late.phase is Phase.ARMED
            await asyncio.sleep(20)
            assert harness.receiver.begun == [("a", None)]
            assert len(harness.receiver.attempts) == 1

        with_harness(scenario)

    def test_a_lost_wake_up_costs_a_second_at_most(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("far", 3_600_000)
            waits = harness.loop._wake_at - asyncio.get_running_loop().time()
            assert waits == 1.0

        with_harness(scenario)

    def test_a_timer_that_is_long_due_is_fired_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", -60_000)
            await asyncio.sleep(0.001)
            assert harness.receiver.called() == ["a"]
            assert entry.phase is Phase.GONE

        with_harness(scenario)


class TestAttempts:
    def test_an_attempt_carries_the_fence_and_is_counted_once_however_often_it_begins(self) -> None:
        async def scenario(harness: Harness) -> None:
            begun: list[int | None] = []

            async def deliver(attempt: Attempt) -> AttemptResult:
                harness.receiver.attempts.append(attempt)
                begun.append(attempt.begin())
                await asyncio.sleep(1)
                begun.append(attempt.begin())
                return OK

            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            entry = harness.put("a", 100)
            await asyncio.sleep(5)
            due_ms = entry.timer.execute_at_ms
            assert begun == [due_ms, due_ms + 1_000]
            assert harness.receiver.attempts[0].fence == "7.3"
            assert harness.receiver.attempts[0].namespace is NAMESPACE
            assert harness.telemetry.attempts.value == 1
            assert harness.telemetry.lateness.count == 1
            assert harness.shard.sending == {}

        with_harness(scenario)

    def test_a_repeat_on_a_fresh_connection_is_refused_after_a_delete(self) -> None:
        async def scenario(harness: Harness) -> None:
            begun: list[int | None] = []

            async def deliver(attempt: Attempt) -> AttemptResult:
                begun.append(attempt.begin())
                await asyncio.sleep(1)
                begun.append(attempt.begin())
                return AttemptResult(Contact.NOT_SENT)

            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.shard.write(A, None, [])
            harness.commit()
            await asyncio.sleep(5)
            assert begun[0] is not None
            assert begun[1] is None
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_nothing_is_sent_under_a_fence_that_is_no_longer_the_shards(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.connect_seconds = 1
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.shard.finish_recovery(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert harness.receiver.begun[0] == ("a", None)
            assert harness.receiver.called() == ["a"]
            assert [attempt.fence for attempt in harness.receiver.attempts] == ["7.3", "7.4"]

        with_harness(scenario)

    def test_lateness_is_that_of_the_first_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.outcome = FAILS
            harness.put("a", 100)
            await asyncio.sleep(2)
            assert harness.telemetry.attempts.value > 1
            assert harness.telemetry.lateness.count == 1

        with_harness(scenario)

    @pytest.mark.parametrize(("created_ms", "late_s"), [(-1_000, 60.0), (0, 60.0), (59_000, 1.0), (61_000, 0.0)])
    def test_a_timer_is_late_from_its_creation_if_its_time_was_past_then(self, created_ms: int, late_s: float) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("a", -60_000, created_at_ms=START_WALL_MS - 60_000 + created_ms)
            await asyncio.sleep(1)
            assert harness.telemetry.lateness.count == 1
            assert harness.telemetry.lateness.sum == late_s

        with_harness(scenario)

    def test_a_destination_that_cannot_be_reached_counts_as_an_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                return AttemptResult(Contact.BROKEN, error="refused")

            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            timer = harness.shard.entries[A].timer
            assert (timer.attempts, timer.extras.last_error) == (1, "refused")
            assert timer.extras.first_attempt_at_ms == START_WALL_MS + 300
            assert harness.shard.sending == {}

        with_harness(scenario)

    def test_a_destination_that_cannot_be_reached_does_not_count_if_the_timer_was_deleted(self) -> None:
        async def scenario(harness: Harness) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                return AttemptResult(Contact.BROKEN, error="refused")

            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            entry = harness.put("a", 100)
            await asyncio.sleep(0.2)
            harness.shard.write(A, None, [])
            await asyncio.sleep(5)
            assert entry.phase is Phase.GONE
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_a_destination_that_cannot_be_reached_during_a_recovery_is_tried_after_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            deliver = harness.receiver.deliver

            async def refused(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                harness.receiver.deliver = deliver  # type: ignore[method-assign]
                return AttemptResult(Contact.BROKEN, error="refused")

            harness.receiver.deliver = refused  # type: ignore[method-assign]
            harness.put("a", 100)
            await asyncio.sleep(0.2)
            harness.shard.start_recovery()
            await asyncio.sleep(5)
            assert harness.receiver.attempts == []
            harness.shard.finish_recovery(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert [attempt.timer.attempts for attempt in harness.receiver.attempts] == [0], "no attempt was spent"
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_a_timer_deleted_while_it_is_queued_opens_no_connection(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.put("a", 100)
            harness.put("b", 100)
            await asyncio.sleep(0.5)
            harness.shard.write(TimerKey("test", "b"), None, [])
            await asyncio.sleep(5)
            assert [attempt.timer.timer_id for attempt in harness.receiver.attempts] == ["a"]

        with_harness(scenario, concurrency_per_flow=1)

    def test_an_outcome_after_the_timer_was_replaced_is_stale_and_settles_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.put("a", 60_000, payload="new")
            await asyncio.sleep(5)
            assert harness.telemetry.stale_outcomes.value == 1
            assert harness.telemetry.outcomes.by_label == {}
            assert harness.shard.entries[A].timer.payload == "new"
            assert harness.shard.entries[A].timer.attempts == 0

        with_harness(scenario)

    def test_an_outcome_is_counted_and_a_retry_is_not_one(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.outcome = FAILS
            harness.put("a", 100)
            await asyncio.sleep(0.2)
            assert harness.telemetry.outcomes.by_label == {}
            harness.receiver.outcome = OK
            await asyncio.sleep(60)
            assert harness.telemetry.outcomes.by_label == {"delivered": 1}
            assert harness.telemetry.stale_outcomes.value == 0
            assert harness.telemetry.attempt_results.by_label["answered"] >= 2
            assert "could not be settled" not in caplog.text

        with_harness(scenario)

    def test_a_call_during_which_the_clock_goes_back_ends_no_earlier_than_it_began(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.commits = False
            entry = harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.clock.offset_ms -= 5_000
            await asyncio.sleep(2)
            settlement = harness.shard.pending[A].settlement
            assert settlement is not None
            assert settlement.reached is not None
            assert settlement.reached.reached_at_ms == entry.timer.execute_at_ms

        with_harness(scenario)

    def test_a_call_is_settled_with_the_time_it_ended(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.commits = False
            entry = harness.put("a", 100)
            await asyncio.sleep(2)
            settlement = harness.shard.pending[A].settlement
            assert settlement is not None
            assert settlement.reached is not None
            assert settlement.reached.reached_at_ms == entry.timer.execute_at_ms + 1_000

        with_harness(scenario)

    def test_a_deliverer_that_raises_is_a_failed_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                attempt.begin()
                raise ZeroDivisionError("oops")

            harness.receiver.deliver = deliver  # type: ignore[method-assign]
            harness.put("a", 100)
            await asyncio.sleep(0.2)
            timer = harness.shard.entries[A].timer
            assert timer.attempts == 1
            assert timer.extras.last_error == "internal: ZeroDivisionError('oops')"

        with_harness(scenario)

    def test_a_timer_that_cannot_be_queued_is_a_failed_attempt_and_the_others_fire(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("a", 100, callback_url="http://broken")
            harness.put("b", 100)
            await asyncio.sleep(0.2)
            assert harness.receiver.called() == ["b"]
            timer = harness.shard.entries[A].timer
            assert timer.attempts == 1
            assert "ZeroDivisionError" in (timer.extras.last_error or "")
            assert harness.shard.sending == {}

        with_harness(scenario)

    def test_an_unexpected_error_while_firing_counts_as_an_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("duetime.engine.fire_loop.missed", breaks)

        async def scenario(harness: Harness) -> None:
            harness.put("a", 100, extras=Extras(missed=Missed(skip_if_late_by_ms=1_000)))
            await asyncio.sleep(0.2)
            assert harness.shard.entries[A].timer.attempts == 1
            assert harness.shard.entries[A].phase is Phase.ARMED

        with_harness(scenario)

    def test_a_timer_that_cannot_be_settled_does_not_stop_the_others(self) -> None:
        async def scenario(harness: Harness) -> None:
            def breaks(*_: Any) -> None:
                raise ZeroDivisionError

            harness.put("a", 100, callback_url="http://broken")
            harness.put("b", 100)
            done = harness.loop._attempt_done
            harness.loop._attempt_done = breaks  # type: ignore[method-assign, assignment]
            await asyncio.sleep(0.2)
            assert harness.receiver.called() == ["b"]
            harness.loop._attempt_done = done  # type: ignore[method-assign]

        with_harness(scenario)

    def test_an_unexpected_error_is_not_settled_while_the_namespace_is_unknown(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", 60_000)
            harness.known.clear()
            harness.loop._firing_failed(entry, ZeroDivisionError())
            assert entry.phase is Phase.ARMED
            assert harness.loop.take_held() == [entry]
            assert harness.asked_to_read == 1

        with_harness(scenario)

    def test_a_timer_that_is_no_longer_armed_is_not_fired(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", 60_000)
            harness.shard.write(A, None, [])
            harness.loop._fire(entry, harness.clock.wall_ms(), False)
            assert entry.phase is Phase.WRITING
            assert harness.loop.flow.waiting == harness.loop.flow.in_flight == 0
            harness.commit()

        with_harness(scenario)

    def test_a_timer_due_during_a_recovery_waits_for_its_end(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", 100)
            harness.shard.start_recovery()
            await asyncio.sleep(5)
            assert harness.receiver.attempts == []
            assert harness.shard.due_during_recovery == [entry]
            harness.shard.finish_recovery(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert harness.receiver.called() == ["a"]

        with_harness(scenario)

    def test_a_timer_due_while_its_shard_drains_is_left_to_the_next_owner(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put("a", 100)
            harness.put("queued", 50)
            harness.shard.start_drain()
            await asyncio.sleep(5)
            assert harness.receiver.attempts == []
            assert entry.phase is Phase.ARMED
            assert harness.loop.flow.waiting == 0

        with_harness(scenario)

    def test_a_timer_queued_when_its_shard_begins_to_drain_is_not_started(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.put("a", 100)
            harness.put("b", 100)
            await asyncio.sleep(0.5)
            harness.shard.start_drain()
            await asyncio.sleep(5)
            assert [attempt.timer.timer_id for attempt in harness.receiver.attempts] == ["a"]

        with_harness(scenario, concurrency_per_flow=1)


class TestMissed:
    def test_a_timer_that_is_too_late_is_skipped_without_an_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put("a", -5_000, extras=Extras(missed=Missed(skip_if_late_by_ms=1_000)))
            harness.put("b", -5_000, extras=Extras(missed=Missed(skip_if_late_by_ms=10_000)))
            await asyncio.sleep(1)
            assert harness.receiver.called() == ["b"]
            assert harness.telemetry.outcomes.by_label == {"skipped": 1, "delivered": 1}
            assert harness.shard.entries == {}

        with_harness(scenario)


class TestNamespaces:
    def test_before_its_namespace_is_known_nothing_is_sent(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario(harness: Harness) -> None:
            harness.known.clear()
            entry = harness.put("a", 100)
            assert not harness.loop.holds_any
            await asyncio.sleep(0.5)
            assert harness.receiver.attempts == []
            assert harness.asked_to_read == 1
            assert harness.loop.holds_any
            held = harness.loop.take_held()
            assert held == [entry]
            assert not harness.loop.holds_any
            harness.loop.fire_held(held, reread=True)
            assert harness.loop.holds_any, "still unknown"
            assert "test" in harness.loop._unknown_namespace_log.reason
            held = harness.loop.take_held()
            harness.known["test"] = NAMESPACE
            harness.loop.fire_held(held, reread=False)
            assert harness.loop.take_held() == held, "it could not be read"
            harness.lease.is_valid = False
            harness.loop.fire_held(held, reread=True)
            assert harness.loop.take_held() == held, "the lease is over"
            harness.lease.is_valid = True
            harness.loop.fire_held(held, reread=True)
            assert harness.loop._unknown_namespace_log.reason == ""
            await asyncio.sleep(1)
            assert harness.receiver.called() == ["a"]
            assert "unexpected error" not in caplog.text

        with_harness(scenario)

    def test_a_timer_deleted_while_it_is_held_is_not_held_any_more(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.known.clear()
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            harness.shard.write(A, None, [])
            harness.loop.fire_held(harness.loop.take_held(), reread=True)
            assert not harness.loop.holds_any

        with_harness(scenario)

    def test_a_namespace_that_is_cached_as_deleted_is_read_again_before_its_settings_are_used(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.known["test"] = Namespace(name="test", num_shards=1, created_at_ms=0, deleted=True)
            harness.put("a", 100)
            await asyncio.sleep(0.5)
            assert harness.receiver.attempts == []
            harness.loop.fire_held(harness.loop.take_held(), reread=True)
            await asyncio.sleep(0.5)
            assert harness.receiver.called() == ["a"], "it is: with its last settings"

        with_harness(scenario)

    def test_a_timer_deleted_while_it_was_held_is_not_fired_and_the_next_one_is(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.known.clear()
            harness.put("a", 100)
            harness.put("b", 100)
            await asyncio.sleep(0.5)
            harness.shard.write(A, None, [])
            harness.known["test"] = NAMESPACE
            harness.loop.fire_held(harness.loop.take_held(), reread=True)
            await asyncio.sleep(1)
            assert harness.receiver.called() == ["b"]
            assert not harness.loop.holds_any

        with_harness(scenario)

    def test_an_attempt_uses_the_settings_as_they_are_when_it_is_made(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.put("a", 100)
            harness.put("b", 100)
            await asyncio.sleep(0.5)
            newer = Namespace(name="test", num_shards=1, created_at_ms=0, revision=1, require_ok=True)
            harness.known["test"] = newer
            await asyncio.sleep(5)
            assert [attempt.namespace for attempt in harness.receiver.attempts][:2] == [NAMESPACE, newer]
            assert harness.telemetry.outcomes.by_label.get("delivered") == 1, (
                "a by the old ones; b was not acknowledged"
            )

        with_harness(scenario, concurrency_per_flow=1)

    def test_an_attempt_uses_the_settings_it_was_queued_with_if_the_namespace_is_unknown_by_then(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.receiver.seconds = 1
            harness.put("a", 100)
            harness.put("b", 100)
            await asyncio.sleep(0.5)
            harness.known.clear()
            await asyncio.sleep(5)
            assert harness.receiver.called() == ["a", "b"]
            assert harness.telemetry.outcomes.by_label == {"delivered": 2}

        with_harness(scenario, concurrency_per_flow=1)


class Lowest(random.Random):
    def random(self) -> float:
        return 0.0


class TestParking:
    @staticmethod
    async def backlog(harness: Harness, count: int = 5) -> list[Entry]:
        """One call fails and opens the breaker; the others wait behind it."""
        harness.receiver.outcome = AttemptResult(Contact.BROKEN, error="down")
        entries = [harness.put(f"t{number}", 100) for number in range(count)]
        await asyncio.sleep(0.2)
        assert harness.loop.flow.waiting == count - 1
        return entries

    def test_timers_that_wait_for_a_failing_destination_are_parked_without_an_attempt(self) -> None:
        async def scenario(harness: Harness) -> None:
            entries = await self.backlog(harness)
            now_ms = harness.clock.wall_ms()
            assert harness.loop.park(2) == 2
            assert harness.telemetry.parked.value == 2
            harness.check()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for name in ("t4", "t3"):
                timer = harness.shard.entries[TimerKey("test", name)].timer
                assert now_ms + 30_000 <= timer.execute_at_ms <= now_ms + 60_010
                assert (timer.attempts, timer.scheduled_at_ms) == (0, entries[0].timer.scheduled_at_ms)
            assert harness.loop.flow.waiting == 2
            assert len(set(harness.loop.armed_tickets())) == 3

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_a_parked_timer_is_due_half_a_minute_later_at_the_earliest(self) -> None:
        async def scenario(harness: Harness) -> None:
            await self.backlog(harness)
            now_ms = harness.clock.wall_ms()
            harness.loop._rng = Lowest()
            harness.loop.park(1)
            await asyncio.sleep(0.001)
            assert harness.shard.entries[TimerKey("test", "t4")].timer.execute_at_ms == now_ms + 30_000

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_the_new_due_times_of_parked_timers_are_spread(self) -> None:
        async def scenario(harness: Harness) -> None:
            await self.backlog(harness, 20)
            now_ms = harness.clock.wall_ms()
            harness.loop.park(100)
            await asyncio.sleep(0.001)
            delays = [
                entry.timer.execute_at_ms - now_ms
                for entry in harness.shard.entries.values()
                if not entry.timer.attempts
            ]
            assert len(delays) == 19
            assert min(delays) >= 30_000
            assert max(delays) <= 60_020
            assert max(delays) - min(delays) > 10_000

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_a_deleted_timer_is_not_parked(self) -> None:
        async def scenario(harness: Harness) -> None:
            await self.backlog(harness)
            key = TimerKey("test", "t4")
            harness.shard.write(key, None, [])
            assert harness.loop.park(1) == 1, "t3; the delete stays"
            await asyncio.sleep(0.01)
            assert key not in harness.shard.entries
            harness.commits = False
            harness.shard.write(TimerKey("test", "t2"), None, [])
            harness.commit()
            assert harness.loop.park(9) == 1, "t1"
            assert TimerKey("test", "t2") not in harness.shard.entries
            assert harness.telemetry.parked.value == 2

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_a_timer_of_a_dropped_shard_is_not_parked(self) -> None:
        async def scenario(harness: Harness) -> None:
            await self.backlog(harness)
            harness.shard.drop(NotOwner())
            assert harness.loop.park(9) == 0
            assert harness.counters.writes_waiting == 0

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)


def test_when_results_cannot_be_recorded_no_more_deliveries_are_started() -> None:
    async def scenario(harness: Harness) -> None:
        for number in range(10):
            harness.put(f"t{number}", 100)
        harness.congested = True
        await asyncio.sleep(5)
        assert harness.receiver.attempts == []
        harness.congested = False
        harness.loop.flow.resume()
        await asyncio.sleep(5)
        assert len(harness.receiver.called()) == 10

    with_harness(scenario)
