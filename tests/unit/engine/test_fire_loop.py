"""The fire loop with real shards and a real flow, but without an engine: when a timer fires, and when it must not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from engine_world import OK, URL, check_shard

from duetime.cluster.membership import Membership
from duetime.config import load_config
from duetime.delivery import Attempt, Deliverer
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Extras, Missed, Namespace, TimerKey
from duetime.engine.fire_loop import FireLoop
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Entry, Phase, Shard
from duetime.errors import NotOwner
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
    """Answers each call with `outcome`, after `seconds`; what it is told before the first byte is in `begun`."""

    def __init__(self) -> None:
        self.outcome: AttemptResult = OK
        self.seconds = 0.0
        self.connect_seconds = 0.0
        self.begun: list[tuple[str, int | None]] = []
        self.attempts: list[Attempt] = []

    def destination(self, url: str) -> str:
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


class Range:
    """One shard with its fire loop. Commits are made when the test says so, or at once with `commits`."""

    def __init__(self, clock: VirtualClock, **settings: Any) -> None:
        self.writes_waiting = 0
        self.writes_waiting_max = 1_000
        self.unsettled = 0
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
        self.shard.load_begins()
        self.shard.load_ended(Page([], None), START_WALL_MS + 10_000_000)

    # what the fire loop needs
    def read_namespaces(self) -> None:
        self.asked_to_read += 1

    # what the shard needs
    def arm(self, entry: Entry) -> None:
        self.loop.arm(entry)

    def disarm(self, entry: Entry) -> None:
        self.loop.disarm(entry)

    def remember(self, weight: int) -> None:
        pass

    def written(self, shard: Shard) -> None:
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
        ops = [*self.shard.pending.values(), *self.shard.committing.values()]
        assert self.writes_waiting == len(ops)
        assert self.unsettled == sum(op.settlement is not None for op in ops)


class Names:
    def __init__(self, place: Range) -> None:
        self._place = place

    def known(self, name: str) -> Namespace | None:
        return self._place.known.get(name)


def on_a_range(story: Callable[[Range], Awaitable[None]], **settings: Any) -> None:
    async def told(clock: VirtualClock) -> None:
        place = Range(clock, **settings)
        await story(place)
        place.check()
        place.loop.stop()
        place.shard.drop(NotOwner())
        assert place.loop.armed_tickets() == []
        assert (place.writes_waiting, place.unsettled) == (0, 0)

    run_virtual(told)


class TestTheHeap:
    def test_a_timer_fires_in_its_millisecond_and_not_before(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put(delay_ms=1_500)
            assert place.loop.armed_tickets() == [entry.ticket]
            assert entry.ticket >> 32 == entry.timer.execute_at_ms
            await asyncio.sleep(1.4995)
            place.loop.wake()
            await asyncio.sleep(0)
            assert place.receiver.begun == []
            await asyncio.sleep(1)
            assert place.receiver.begun == [("a", entry.timer.execute_at_ms)]
            assert place.loop.armed_tickets() == []
            assert place.shard.entries == {}

        on_a_range(story)

    def test_those_of_one_millisecond_go_in_the_order_they_came(self) -> None:
        async def story(place: Range) -> None:
            names = [f"t{number}" for number in range(20)]
            for name in names:
                place.put(name, 1_000)
            place.put("first", 500)
            await asyncio.sleep(2)
            assert place.receiver.called() == ["first", *names]
            assert len({attempt.timer.timer_id for attempt in place.receiver.attempts}) == 21

        on_a_range(story, concurrency_per_destination=100)

    def test_an_earlier_one_is_not_made_to_wait_for_a_later_one(self) -> None:
        async def story(place: Range) -> None:
            late, early = place.put("late", 900), place.put("early", 100)
            await asyncio.sleep(2)
            assert place.receiver.begun == [("early", early.timer.execute_at_ms), ("late", late.timer.execute_at_ms)]

        on_a_range(story)

    def test_a_later_one_does_not_put_off_the_wake_up_for_an_earlier_one(self) -> None:
        async def story(place: Range) -> None:
            early = place.put("early", 100)
            place.put("late", 900)
            await asyncio.sleep(2)
            assert place.receiver.begun[0] == ("early", early.timer.execute_at_ms)

        on_a_range(story)

    @pytest.mark.parametrize("delay_ms", [100, 101])
    def test_a_counter_that_starts_over_does_not_change_the_time(self, delay_ms: int) -> None:
        async def story(place: Range) -> None:
            place.loop._counter = 2**32 - 2
            entries = [place.put(f"t{number}", delay_ms) for number in range(4)]
            assert [entry.ticket >> 32 for entry in entries] == [entries[0].timer.execute_at_ms] * 4
            assert len({entry.ticket for entry in entries}) == 4

        on_a_range(story)

    def test_one_of_the_next_millisecond_is_not_due_whatever_its_number_is(self) -> None:
        async def story(place: Range) -> None:
            place.loop._counter = 2**32 - 1
            entry = place.put("a", 1)
            assert entry.ticket == entry.timer.execute_at_ms << 32
            place.loop._turn()
            assert entry.phase is Phase.ARMED

        on_a_range(story)

    def test_a_wake_up_is_put_forward_and_never_off(self) -> None:
        async def story(place: Range) -> None:
            place.put("a", 500)
            waker = place.loop._waker
            assert waker is not None
            place.loop._wake_in(0.9)
            assert place.loop._waker is waker
            assert not waker.cancelled()
            place.loop.wake()
            assert waker.cancelled()
            assert place.loop._wake_at == 0

        on_a_range(story)

    def test_one_that_is_disarmed_does_not_fire(self) -> None:
        async def story(place: Range) -> None:
            place.put("a", 100)
            place.put("b", 200)
            place.shard.write(A, None, [])
            place.commit()
            await asyncio.sleep(1)
            assert place.receiver.called() == ["b"]

        on_a_range(story)

    def test_a_heap_made_anew_without_what_was_disarmed_is_a_heap(self) -> None:
        async def story(place: Range) -> None:
            for number in range(5):
                place.put(f"other{number}", 9_000_000 - number)
            while len(heap := place.loop._heap) < 1_000:
                place.put("a", 9_500_000)
            while place.loop._heap is heap:
                place.put("a", 9_500_000)
            heap = place.loop._heap
            assert len(heap) == 6
            assert all(heap[(child - 1) // 2] <= heap[child] for child in range(1, len(heap)))

        on_a_range(story)

    def test_the_heap_is_made_anew_when_it_is_twice_as_long_and_a_thousand_more(self) -> None:
        async def story(place: Range) -> None:
            lengths = []
            for number in range(1_010):
                place.put("a", 2_000_000 + number)
                lengths.append(len(place.loop._heap))
            assert max(lengths) == 1_001
            assert lengths[1_001] == 1

        on_a_range(story)

    def test_a_burst_is_fired_a_bounded_number_at_a_time(self) -> None:
        async def story(place: Range) -> None:
            fired: list[str] = []
            turns: list[int] = []
            turn = place.loop._turn

            def counted() -> None:
                before = len(fired)
                turn()
                turns.append(len(fired) - before)

            place.loop._turn = counted  # type: ignore[method-assign]
            place.loop.flow.submit = lambda item, *_: fired.append(item.entry.timer.timer_id)  # type: ignore[method-assign]
            for number in range(600):
                place.put(f"t{number}", 1_000)
            await asyncio.sleep(0.9)
            assert fired == []
            turns.clear()
            await asyncio.sleep(0.101)
            assert turns == [256, 256, 88]
            assert fired == [f"t{number}" for number in range(600)]

        on_a_range(story)

    def test_the_age_of_the_oldest_that_is_due(self) -> None:
        async def story(place: Range) -> None:
            now_ms = place.clock.wall_ms
            assert place.loop.oldest_due_ms(now_ms()) is None
            place.lease.is_valid = False
            place.put("gone", 10)
            place.put("a", 100)
            place.put("b", 300)
            place.shard.write(TimerKey("test", "gone"), None, [])
            assert place.loop.oldest_due_ms(now_ms()) is None
            await asyncio.sleep(0.1)
            assert place.loop.oldest_due_ms(now_ms()) is None, "due just now"
            await asyncio.sleep(0.4)
            assert place.loop.oldest_due_ms(now_ms()) == 400
            place.lease.is_valid = True
            place.receiver.seconds = 100
            place.loop.wake()
            await asyncio.sleep(1)
            assert place.receiver.called() == ["a"]
            assert place.loop.oldest_due_ms(now_ms()) == 1_200, "b waits for its destination"
            place.shard.write(TimerKey("test", "b"), None, [])
            assert place.loop.oldest_due_ms(now_ms()) is None

        on_a_range(story, concurrency_per_destination=1)


class TestTheLease:
    def test_without_a_lease_nothing_fires_and_with_it_everything_that_was_due(self) -> None:
        async def story(place: Range) -> None:
            place.lease.is_valid = False
            place.put("a", 100)
            await asyncio.sleep(10)
            assert place.receiver.begun == []
            place.lease.is_valid = True
            place.loop.wake()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert place.receiver.called() == ["a"]

        on_a_range(story)

    def test_a_lease_that_ends_while_a_connection_is_made_sends_nothing(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.connect_seconds = 1
            entry = place.put("a", 100)
            await asyncio.sleep(0.5)
            place.lease.is_valid = False
            await asyncio.sleep(1)
            assert place.receiver.begun == [("a", None)]
            assert entry.phase is Phase.ARMED, "it waits for another attempt"
            place.lease.is_valid = True
            place.loop.wake()
            await asyncio.sleep(3)
            assert place.receiver.called() == ["a"]
            assert place.telemetry.attempts.value == 1

        on_a_range(story)

    def test_a_clock_that_is_corrected_backward_while_a_connection_is_made_makes_it_wait(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.connect_seconds = 1
            entry = place.put("a", 100)
            await asyncio.sleep(0.5)
            place.clock.offset_ms -= 5_000
            await asyncio.sleep(0.7)
            assert place.receiver.begun == [("a", None)]
            await asyncio.sleep(20)
            assert len(place.receiver.called()) == 1
            sent_ms = place.receiver.begun[-1][1]
            assert sent_ms is not None
            assert sent_ms >= entry.timer.execute_at_ms

        on_a_range(story)

    def test_exactly_when_it_is_due_it_may_be_sent(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", 100)
            await asyncio.sleep(1)
            assert place.receiver.begun == [("a", entry.timer.execute_at_ms)]

        on_a_range(story)

    def test_after_a_stop_nothing_more_is_sent_and_no_wake_up_is_left(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.connect_seconds = 1
            place.put("a", 100)
            place.put("b", 5_000)
            await asyncio.sleep(0.5)
            waker = place.loop._waker
            assert waker is not None
            place.loop.stop()
            assert waker.cancelled()
            assert place.loop.flow.stopped
            late = place.put("c", -10)
            place.loop.wake()
            assert place.loop._waker is waker, "no other was set"
            place.loop._turn()
            assert late.phase is Phase.ARMED
            await asyncio.sleep(20)
            assert place.receiver.begun == [("a", None)]
            assert len(place.receiver.attempts) == 1

        on_a_range(story)

    def test_a_lost_wake_up_costs_a_second_at_most(self) -> None:
        async def story(place: Range) -> None:
            place.put("far", 3_600_000)
            waits = place.loop._wake_at - asyncio.get_running_loop().time()
            assert waits == 1.0

        on_a_range(story)

    def test_one_that_is_long_due_is_looked_at_at_once(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", -60_000)
            await asyncio.sleep(0.001)
            assert place.receiver.called() == ["a"]
            assert entry.phase is Phase.GONE

        on_a_range(story)


class TestAttempts:
    def test_an_attempt_carries_the_fence_and_is_counted_once_however_often_it_begins(self) -> None:
        async def story(place: Range) -> None:
            begun: list[int | None] = []

            async def deliver(attempt: Attempt) -> AttemptResult:
                place.receiver.attempts.append(attempt)
                begun.append(attempt.begin())
                await asyncio.sleep(1)
                begun.append(attempt.begin())
                return OK

            place.receiver.deliver = deliver  # type: ignore[method-assign]
            entry = place.put("a", 100)
            await asyncio.sleep(5)
            due_ms = entry.timer.execute_at_ms
            assert begun == [due_ms, due_ms + 1_000]
            assert place.receiver.attempts[0].fence == "7.3"
            assert place.receiver.attempts[0].namespace is NAMESPACE
            assert place.telemetry.attempts.value == 1
            assert place.telemetry.lateness.count == 1
            assert place.shard.sending == {}

        on_a_range(story)

    def test_a_repeat_on_a_fresh_connection_is_refused_after_a_delete(self) -> None:
        async def story(place: Range) -> None:
            begun: list[int | None] = []

            async def deliver(attempt: Attempt) -> AttemptResult:
                begun.append(attempt.begin())
                await asyncio.sleep(1)
                begun.append(attempt.begin())
                return AttemptResult(Contact.NOT_SENT)

            place.receiver.deliver = deliver  # type: ignore[method-assign]
            place.put("a", 100)
            await asyncio.sleep(0.5)
            place.shard.write(A, None, [])
            place.commit()
            await asyncio.sleep(5)
            assert begun[0] is not None
            assert begun[1] is None
            assert place.shard.is_quiet

        on_a_range(story)

    def test_nothing_is_sent_under_a_fence_that_is_no_longer_the_shards(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.connect_seconds = 1
            place.put("a", 100)
            await asyncio.sleep(0.5)
            place.shard.recovered(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert place.receiver.begun[0] == ("a", None)
            assert place.receiver.called() == ["a"]
            assert [attempt.fence for attempt in place.receiver.attempts] == ["7.3", "7.4"]

        on_a_range(story)

    def test_lateness_is_that_of_the_first_attempt(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.outcome = FAILS
            place.put("a", 100)
            await asyncio.sleep(2)
            assert place.telemetry.attempts.value > 1
            assert place.telemetry.lateness.count == 1

        on_a_range(story)

    def test_one_that_could_not_be_reached_counts_as_an_attempt(self) -> None:
        async def story(place: Range) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                return AttemptResult(Contact.BROKEN, error="refused")

            place.receiver.deliver = deliver  # type: ignore[method-assign]
            place.put("a", 100)
            await asyncio.sleep(0.5)
            timer = place.shard.entries[A].timer
            assert (timer.attempts, timer.extras.last_error) == (1, "refused")
            assert timer.extras.first_attempt_at_ms == START_WALL_MS + 300
            assert place.shard.sending == {}

        on_a_range(story)

    def test_unless_the_timer_was_deleted_meanwhile(self) -> None:
        async def story(place: Range) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                return AttemptResult(Contact.BROKEN, error="refused")

            place.receiver.deliver = deliver  # type: ignore[method-assign]
            entry = place.put("a", 100)
            await asyncio.sleep(0.2)
            place.shard.write(A, None, [])
            await asyncio.sleep(5)
            assert entry.phase is Phase.GONE
            assert place.shard.is_quiet

        on_a_range(story)

    def test_one_that_could_not_be_reached_during_a_recovery_is_tried_after_it(self) -> None:
        async def story(place: Range) -> None:
            deliver = place.receiver.deliver

            async def refused(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.2)
                place.receiver.deliver = deliver  # type: ignore[method-assign]
                return AttemptResult(Contact.BROKEN, error="refused")

            place.receiver.deliver = refused  # type: ignore[method-assign]
            place.put("a", 100)
            await asyncio.sleep(0.2)
            place.shard.recovering = True
            await asyncio.sleep(5)
            assert place.receiver.attempts == []
            place.shard.recovered(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert [attempt.timer.attempts for attempt in place.receiver.attempts] == [0], "no attempt was spent"
            assert place.receiver.called() == ["a"]

        on_a_range(story)

    def test_one_that_is_deleted_while_it_is_queued_is_not_even_connected(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.put("a", 100)
            place.put("b", 100)
            await asyncio.sleep(0.5)
            place.shard.write(TimerKey("test", "b"), None, [])
            await asyncio.sleep(5)
            assert [attempt.timer.timer_id for attempt in place.receiver.attempts] == ["a"]

        on_a_range(story, concurrency_per_destination=1)

    def test_an_outcome_after_the_timer_was_replaced_is_stale_and_settles_nothing(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.put("a", 100)
            await asyncio.sleep(0.5)
            place.put("a", 60_000, payload="new")
            await asyncio.sleep(5)
            assert place.telemetry.stale_outcomes.value == 1
            assert place.telemetry.outcomes.by_label == {}
            assert place.shard.entries[A].timer.payload == "new"
            assert place.shard.entries[A].timer.attempts == 0

        on_a_range(story)

    def test_an_end_is_counted_and_a_retry_is_none(self, caplog: pytest.LogCaptureFixture) -> None:
        async def story(place: Range) -> None:
            place.receiver.outcome = FAILS
            place.put("a", 100)
            await asyncio.sleep(0.2)
            assert place.telemetry.outcomes.by_label == {}
            place.receiver.outcome = OK
            await asyncio.sleep(60)
            assert place.telemetry.outcomes.by_label == {"delivered": 1}
            assert place.telemetry.stale_outcomes.value == 0
            assert place.telemetry.attempt_results.by_label["answered"] >= 2
            assert "could not be settled" not in caplog.text

        on_a_range(story)

    def test_a_clock_that_goes_back_during_a_call_ends_it_no_earlier_than_it_began(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.commits = False
            entry = place.put("a", 100)
            await asyncio.sleep(0.5)
            place.clock.offset_ms -= 5_000
            await asyncio.sleep(2)
            settlement = place.shard.pending[A].settlement
            assert settlement is not None
            assert settlement.reached is not None
            assert settlement.reached.reached_at_ms == entry.timer.execute_at_ms

        on_a_range(story)

    def test_a_call_is_settled_with_the_time_it_ended(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.commits = False
            entry = place.put("a", 100)
            await asyncio.sleep(2)
            settlement = place.shard.pending[A].settlement
            assert settlement is not None
            assert settlement.reached is not None
            assert settlement.reached.reached_at_ms == entry.timer.execute_at_ms + 1_000

        on_a_range(story)

    def test_a_deliverer_that_breaks_is_a_failed_attempt(self) -> None:
        async def story(place: Range) -> None:
            async def deliver(attempt: Attempt) -> AttemptResult:
                attempt.begin()
                raise ZeroDivisionError("oops")

            place.receiver.deliver = deliver  # type: ignore[method-assign]
            place.put("a", 100)
            await asyncio.sleep(0.2)
            timer = place.shard.entries[A].timer
            assert timer.attempts == 1
            assert timer.extras.last_error == "internal: ZeroDivisionError('oops')"

        on_a_range(story)

    def test_a_timer_that_cannot_be_queued_is_a_failed_attempt_and_the_others_fire(self) -> None:
        async def story(place: Range) -> None:
            place.put("a", 100, callback_url="http://broken")
            place.put("b", 100)
            await asyncio.sleep(0.2)
            assert place.receiver.called() == ["b"]
            timer = place.shard.entries[A].timer
            assert timer.attempts == 1
            assert "ZeroDivisionError" in (timer.extras.last_error or "")
            assert place.shard.sending == {}

        on_a_range(story)

    def test_whatever_it_is_that_cannot_be_judged_counts_as_an_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def breaks(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr("duetime.engine.fire_loop.missed", breaks)

        async def story(place: Range) -> None:
            place.put("a", 100, extras=Extras(missed=Missed(skip_if_late_by_ms=1_000)))
            await asyncio.sleep(0.2)
            assert place.shard.entries[A].timer.attempts == 1
            assert place.shard.entries[A].phase is Phase.ARMED

        on_a_range(story)

    def test_one_that_cannot_even_be_settled_does_not_stop_the_others(self) -> None:
        async def story(place: Range) -> None:
            def breaks(*_: Any) -> None:
                raise ZeroDivisionError

            place.put("a", 100, callback_url="http://broken")
            place.put("b", 100)
            done = place.loop._done
            place.loop._done = breaks  # type: ignore[method-assign, assignment]
            await asyncio.sleep(0.2)
            assert place.receiver.called() == ["b"]
            place.loop._done = done  # type: ignore[method-assign]

        on_a_range(story)

    def test_without_its_namespace_not_even_that_is_settled(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", 60_000)
            place.known.clear()
            place.loop._broke(entry, ZeroDivisionError())
            assert entry.phase is Phase.ARMED
            assert place.loop.take_held() == [entry]
            assert place.asked_to_read == 1

        on_a_range(story)

    def test_one_that_is_no_longer_armed_is_left_alone(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", 60_000)
            place.shard.write(A, None, [])
            place.loop._fire(entry, place.clock.wall_ms(), False)
            assert entry.phase is Phase.WRITING
            assert place.loop.flow.waiting == place.loop.flow.in_flight == 0
            place.commit()

        on_a_range(story)

    def test_one_due_during_a_recovery_waits_for_its_end(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", 100)
            place.shard.recovering = True
            await asyncio.sleep(5)
            assert place.receiver.attempts == []
            assert place.shard.stalled == [entry]
            place.shard.recovered(ShardRow(7, 4, 2, "me"), {})
            await asyncio.sleep(5)
            assert place.receiver.called() == ["a"]

        on_a_range(story)

    def test_one_due_while_its_shard_drains_is_left_to_the_next_owner(self) -> None:
        async def story(place: Range) -> None:
            entry = place.put("a", 100)
            place.put("queued", 50)
            place.shard.draining = True
            await asyncio.sleep(5)
            assert place.receiver.attempts == []
            assert entry.phase is Phase.ARMED
            assert place.loop.flow.waiting == 0

        on_a_range(story)

    def test_one_that_is_queued_when_its_shard_begins_to_drain_is_not_started(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.put("a", 100)
            place.put("b", 100)
            await asyncio.sleep(0.5)
            place.shard.draining = True
            await asyncio.sleep(5)
            assert [attempt.timer.timer_id for attempt in place.receiver.attempts] == ["a"]

        on_a_range(story, concurrency_per_destination=1)


class TestMissed:
    def test_one_that_is_too_late_ends_without_an_attempt(self) -> None:
        async def story(place: Range) -> None:
            place.put("a", -5_000, extras=Extras(missed=Missed(skip_if_late_by_ms=1_000)))
            place.put("b", -5_000, extras=Extras(missed=Missed(skip_if_late_by_ms=10_000)))
            await asyncio.sleep(1)
            assert place.receiver.called() == ["b"]
            assert place.telemetry.outcomes.by_label == {"skipped": 1, "delivered": 1}
            assert place.shard.entries == {}

        on_a_range(story)


class TestNamespaces:
    def test_before_its_namespace_is_known_nothing_is_sent(self, caplog: pytest.LogCaptureFixture) -> None:
        async def story(place: Range) -> None:
            place.known.clear()
            entry = place.put("a", 100)
            assert not place.loop.holds_any
            await asyncio.sleep(0.5)
            assert place.receiver.attempts == []
            assert place.asked_to_read == 1
            assert place.loop.holds_any
            held = place.loop.take_held()
            assert held == [entry]
            assert not place.loop.holds_any
            place.loop.fire_held(held, reread=True)
            assert place.loop.holds_any, "still unknown"
            assert "test" in place.loop._unknown_namespace_log.reason
            held = place.loop.take_held()
            place.known["test"] = NAMESPACE
            place.loop.fire_held(held, reread=False)
            assert place.loop.take_held() == held, "it could not be read"
            place.lease.is_valid = False
            place.loop.fire_held(held, reread=True)
            assert place.loop.take_held() == held, "the lease is over"
            place.lease.is_valid = True
            place.loop.fire_held(held, reread=True)
            assert place.loop._unknown_namespace_log.reason == ""
            await asyncio.sleep(1)
            assert place.receiver.called() == ["a"]
            assert "unexpected error" not in caplog.text

        on_a_range(story)

    def test_one_that_is_deleted_while_it_is_held_is_held_no_longer(self) -> None:
        async def story(place: Range) -> None:
            place.known.clear()
            place.put("a", 100)
            await asyncio.sleep(0.5)
            place.shard.write(A, None, [])
            place.loop.fire_held(place.loop.take_held(), reread=True)
            assert not place.loop.holds_any

        on_a_range(story)

    def test_one_that_seems_deleted_is_read_again_before_its_settings_are_used(self) -> None:
        async def story(place: Range) -> None:
            place.known["test"] = Namespace(name="test", num_shards=1, created_at_ms=0, deleted=True)
            place.put("a", 100)
            await asyncio.sleep(0.5)
            assert place.receiver.attempts == []
            place.loop.fire_held(place.loop.take_held(), reread=True)
            await asyncio.sleep(0.5)
            assert place.receiver.called() == ["a"], "it is: with its last settings"

        on_a_range(story)

    def test_one_that_was_deleted_while_it_was_held_is_not_fired_and_the_next_one_is(self) -> None:
        async def story(place: Range) -> None:
            place.known.clear()
            place.put("a", 100)
            place.put("b", 100)
            await asyncio.sleep(0.5)
            place.shard.write(A, None, [])
            place.known["test"] = NAMESPACE
            place.loop.fire_held(place.loop.take_held(), reread=True)
            await asyncio.sleep(1)
            assert place.receiver.called() == ["b"]
            assert not place.loop.holds_any

        on_a_range(story)

    def test_the_settings_of_the_moment_of_the_attempt_count(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.put("a", 100)
            place.put("b", 100)
            await asyncio.sleep(0.5)
            newer = Namespace(name="test", num_shards=1, created_at_ms=0, revision=1, require_ok=True)
            place.known["test"] = newer
            await asyncio.sleep(5)
            assert [attempt.namespace for attempt in place.receiver.attempts][:2] == [NAMESPACE, newer]
            assert place.telemetry.outcomes.by_label.get("delivered") == 1, "a by the old ones; b was not acknowledged"

        on_a_range(story, concurrency_per_destination=1)

    def test_if_they_are_forgotten_meanwhile_those_it_was_queued_with_count(self) -> None:
        async def story(place: Range) -> None:
            place.receiver.seconds = 1
            place.put("a", 100)
            place.put("b", 100)
            await asyncio.sleep(0.5)
            place.known.clear()
            await asyncio.sleep(5)
            assert place.receiver.called() == ["a", "b"]
            assert place.telemetry.outcomes.by_label == {"delivered": 2}

        on_a_range(story, concurrency_per_destination=1)


class Lowest(random.Random):
    def random(self) -> float:
        return 0.0


class TestParking:
    @staticmethod
    async def backlog(place: Range, count: int = 5) -> list[Entry]:
        """One call fails and opens the breaker; the others wait behind it."""
        place.receiver.outcome = AttemptResult(Contact.BROKEN, error="down")
        entries = [place.put(f"t{number}", 100) for number in range(count)]
        await asyncio.sleep(0.2)
        assert place.loop.flow.waiting == count - 1
        return entries

    def test_what_waits_for_a_dead_destination_is_put_off_without_an_attempt(self) -> None:
        async def story(place: Range) -> None:
            entries = await self.backlog(place)
            now_ms = place.clock.wall_ms()
            assert place.loop.park(2) == 2
            assert place.telemetry.parked.value == 2
            place.check()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            for name in ("t4", "t3"):
                timer = place.shard.entries[TimerKey("test", name)].timer
                assert now_ms + 30_000 <= timer.execute_at_ms <= now_ms + 60_010
                assert (timer.attempts, timer.scheduled_at_ms) == (0, entries[0].timer.scheduled_at_ms)
            assert place.loop.flow.waiting == 2
            assert len(set(place.loop.armed_tickets())) == 3

        on_a_range(story, breaker_failures=1, concurrency_per_destination=1)

    def test_half_a_minute_is_the_least(self) -> None:
        async def story(place: Range) -> None:
            await self.backlog(place)
            now_ms = place.clock.wall_ms()
            place.loop._rng = Lowest()
            place.loop.park(1)
            await asyncio.sleep(0.001)
            assert place.shard.entries[TimerKey("test", "t4")].timer.execute_at_ms == now_ms + 30_000

        on_a_range(story, breaker_failures=1, concurrency_per_destination=1)

    def test_they_are_spread(self) -> None:
        async def story(place: Range) -> None:
            await self.backlog(place, 20)
            now_ms = place.clock.wall_ms()
            place.loop.park(100)
            await asyncio.sleep(0.001)
            delays = [
                entry.timer.execute_at_ms - now_ms for entry in place.shard.entries.values() if not entry.timer.attempts
            ]
            assert len(delays) == 19
            assert min(delays) >= 30_000
            assert max(delays) <= 60_020
            assert max(delays) - min(delays) > 10_000

        on_a_range(story, breaker_failures=1, concurrency_per_destination=1)

    def test_one_that_was_deleted_meanwhile_is_not_put_back(self) -> None:
        async def story(place: Range) -> None:
            await self.backlog(place)
            key = TimerKey("test", "t4")
            place.shard.write(key, None, [])
            assert place.loop.park(2) == 1, "t3; the delete stays"
            await asyncio.sleep(0.01)
            assert key not in place.shard.entries
            place.commits = False
            place.shard.write(TimerKey("test", "t2"), None, [])
            place.commit()
            assert place.loop.park(1) == 0
            assert TimerKey("test", "t2") not in place.shard.entries
            assert place.telemetry.parked.value == 1

        on_a_range(story, breaker_failures=1, concurrency_per_destination=1)

    def test_one_that_was_lost_with_its_shard_is_not_put_back(self) -> None:
        async def story(place: Range) -> None:
            await self.backlog(place)
            place.shard.drop(NotOwner())
            assert place.loop.park(9) == 0
            assert place.writes_waiting == 0

        on_a_range(story, breaker_failures=1, concurrency_per_destination=1)


def test_when_outcomes_cannot_be_recorded_no_more_are_started() -> None:
    async def story(place: Range) -> None:
        for number in range(10):
            place.put(f"t{number}", 100)
        place.congested = True
        await asyncio.sleep(5)
        assert place.receiver.attempts == []
        place.congested = False
        place.loop.flow.resume()
        await asyncio.sleep(5)
        assert len(place.receiver.called()) == 10

    on_a_range(story)
