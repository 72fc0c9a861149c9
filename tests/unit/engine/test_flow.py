"""Flow in virtual time: caps, fair turns, breakers and pace, destination by destination."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from duetime.config import load_config
from duetime.domain.settle import AttemptResult, Contact
from duetime.engine import flow as flow_module
from duetime.engine.flow import Destination, Flow
from duetime.testing.virtual import VirtualClock, run_virtual

OK = AttemptResult(Contact.ANSWERED, 200)
FAILS = AttemptResult(Contact.ANSWERED, 500)
BROKEN = AttemptResult(Contact.BROKEN, error="timed out")


def overloaded(status: int, retry_after_seconds: float | None) -> AttemptResult:
    return AttemptResult(
        Contact.ANSWERED,
        status,
        retry_after_ms=None if retry_after_seconds is None else int(retry_after_seconds * 1_000),
    )


class Item(NamedTuple):
    number: int
    destination: str
    namespace: str


class Harness:
    """A flow whose destinations answer as the test says: after `seconds`, with `result`."""

    def __init__(self, **settings: Any) -> None:
        flags = {f"delivery.{key}": value for key, value in settings.items()}
        self.flow: Flow[Item] = Flow(
            load_config(environ={}, flags=flags).delivery,
            deliver=self._deliver,
            wanted=lambda item: item.number not in self.unwanted,
            done=self._done,
            congested=lambda: self.congested,
        )
        self.congested = False
        self.seconds: dict[str, float] = defaultdict(float)
        self.result: dict[str, AttemptResult | Callable[[Item], AttemptResult]] = defaultdict(lambda: OK)
        self.unwanted: set[int] = set()
        self.started: list[tuple[float, Item]] = []
        self.finished: list[tuple[float, Item]] = []
        self.most_in_flight: dict[str, int] = defaultdict(int)
        self._in_flight: dict[str, int] = defaultdict(int)
        self._submitted = 0

    def submit(self, destination: str, count: int = 1, namespace: str = "n") -> None:
        for _ in range(count):
            self.flow.submit(Item(self._submitted, destination, namespace), destination, namespace)
            self._submitted += 1

    async def _deliver(self, item: Item) -> AttemptResult:
        self.started.append((now(), item))
        for name in (item.destination, "all"):
            self._in_flight[name] += 1
            self.most_in_flight[name] = max(self.most_in_flight[name], self._in_flight[name])
        result = self.result[item.destination]
        answer = result if isinstance(result, AttemptResult) else result(item)
        await asyncio.sleep(self.seconds[item.destination])
        for name in (item.destination, "all"):
            self._in_flight[name] -= 1
        return answer

    def _done(self, item: Item, result: AttemptResult) -> None:
        self.finished.append((now(), item))

    def starts(self, destination: str) -> list[float]:
        return [round(at, 6) for at, item in self.started if item.destination == destination]

    def destination(self, name: str) -> Destination[Item]:
        return next(destination for destination in self.flow.destinations() if destination.name == name)

    def is_quiet(self) -> bool:
        flow = self.flow
        return flow.waiting == flow.in_flight == 0 and not any(p.waiting or p.in_flight for p in flow.destinations())


def now() -> float:
    return asyncio.get_running_loop().time()


def with_harness(scenario: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
    async def run(clock: VirtualClock) -> None:
        harness = Harness(**settings)
        try:
            await scenario(harness)
        finally:
            harness.flow.stop()

    run_virtual(run)


class TestIsolation:
    def test_a_slow_destination_never_delays_another(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["slow"] = 3_600
            harness.submit("slow", 500)
            for _ in range(100):
                harness.submit("fast")
                await asyncio.sleep(1)
            assert harness.starts("fast") == [float(second) for second in range(100)]

        with_harness(scenario)

    def test_a_failing_destination_never_delays_another(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["dead"] = BROKEN
            harness.submit("dead", 500)
            for _ in range(100):
                harness.submit("fast")
                await asyncio.sleep(1)
            assert harness.starts("fast") == [float(second) for second in range(100)]
            assert harness.destination("dead").waiting > 400  # held, not burnt

        with_harness(scenario)

    def test_one_destination_gets_no_more_than_its_cap_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 50)
            await asyncio.sleep(100)
            assert harness.most_in_flight["a"] == 8
            assert len(harness.finished) == 50
            assert now_finished(harness) == 7  # as fast as the cap allows: 50 calls of a second, eight at a time

        with_harness(scenario, concurrency_per_destination=8)

    def test_items_of_one_destination_start_in_the_order_they_came(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 50)
            await asyncio.sleep(100)
            assert [item.number for _, item in harness.started] == list(range(50))

        with_harness(scenario, concurrency_per_destination=4)

    def test_an_item_that_cannot_be_settled_does_not_block_those_behind_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            def done(item: Item, result: AttemptResult) -> None:
                harness._done(item, result)
                if item.number == 0:
                    raise ZeroDivisionError

            harness.flow._done = done
            harness.submit("a", 5)
            await asyncio.sleep(1)
            assert len(harness.finished) == 5
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_destination=1)


def now_finished(harness: Harness) -> float:
    return round(harness.finished[-1][0], 6)


class TestTurns:
    def test_all_destinations_together_get_no_more_calls_than_the_total_cap(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in "abcde":
                harness.seconds[name] = 1
                harness.submit(name, 20)
            await asyncio.sleep(100)
            # One more for each destination that would have no call in flight (TestHangingDestinations says why).
            assert 10 <= harness.most_in_flight["all"] <= 10 + 4
            assert len(harness.finished) == 100
            assert now_finished(harness) <= 10  # nothing of it is left unused
            assert harness.is_quiet()

        with_harness(scenario, concurrency_max=10)

    def test_at_the_total_cap_destinations_take_turns(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in ("big", "small", "tiny"):
                harness.seconds[name] = 1
            harness.submit("big", 1_000)
            harness.submit("small", 10)
            harness.submit("tiny", 1)
            await asyncio.sleep(30)
            order = [item.destination for _, item in harness.started]
            # "big" came first and had all four calls; from then on the two destinations take turns.
            assert order[:4] == ["big"] * 4
            assert order.index("tiny") <= 6
            assert max(harness.starts("small")) <= 6

        with_harness(scenario, concurrency_max=4)

    def test_within_a_destination_namespaces_take_turns(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 100, "loud")
            harness.submit("a", 3, "quiet")
            harness.submit("a", 3, "calm")
            await asyncio.sleep(9)
            order = [item.namespace for _, item in harness.started]
            assert order[:2] == ["loud", "loud"]
            assert sorted(order[2:8]) == ["calm", "calm", "loud", "loud", "quiet", "quiet"]

        with_harness(scenario, concurrency_per_destination=1)

    def test_a_destination_that_waits_for_its_turn_does_not_lose_it_to_a_new_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in "abc":
                harness.seconds[name] = 1
            harness.submit("a", 1)
            harness.submit("b", 1)
            await asyncio.sleep(0.5)
            harness.submit("c", 1)
            await asyncio.sleep(10)
            assert [item.destination for _, item in harness.started] == ["a", "b", "c"]

        with_harness(scenario, concurrency_max=1)

    def test_turns_at_the_cap_pass_over_a_destination_whose_breaker_is_open(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["good"] = 1
            harness.result["bad"] = overloaded(503, 30)
            harness.submit("good", 2)
            harness.submit("bad", 5)
            harness.submit("good", 20)
            await asyncio.sleep(15)
            assert len(harness.starts("bad")) == 1
            assert len(harness.starts("good")) == 22

        with_harness(scenario, concurrency_max=2)


class TestBreaker:
    def test_it_opens_after_the_configured_number_of_failures_in_a_row_and_holds_the_others(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 100)
            await asyncio.sleep(0.5)
            assert len(harness.started) == 3
            assert harness.flow.waiting == 97
            assert harness.flow.in_flight == 0

        with_harness(scenario, breaker_failures=3, concurrency_per_destination=1)

    def test_a_success_in_between_starts_the_count_over(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: OK if item.number % 3 == 2 else FAILS
            harness.submit("a", 99)
            await asyncio.sleep(0.5)
            assert len(harness.finished) == 99

        with_harness(scenario, breaker_failures=3, concurrency_per_destination=1)

    def test_it_tries_one_call_and_doubles_its_pause_up_to_the_limit(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 100)
            await asyncio.sleep(20)
            assert harness.starts("a") == [0, 1, 3, 7, 11, 15, 19]
            assert harness.most_in_flight["a"] == 1

        with_harness(
            scenario, breaker_failures=1, concurrency_per_destination=1, breaker_pause="1s", breaker_pause_max="4s"
        )

    def test_while_the_trial_call_is_in_flight_nothing_else_starts(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 50)
            await asyncio.sleep(0.5)
            begun = len(harness.started)
            assert begun < 50
            harness.seconds["a"] = 5
            await asyncio.sleep(3)
            harness.submit("a", 10)
            assert len(harness.started) == begun + 1

        with_harness(scenario, breaker_failures=10, concurrency_per_destination=20)

    def test_a_trial_call_that_succeeds_closes_it_and_all_held_items_start_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 60)
            await asyncio.sleep(0.5)
            held = harness.flow.waiting
            assert held > 0
            harness.result["a"] = OK
            harness.seconds["a"] = 0.1
            await asyncio.sleep(0.65)  # the trial call is at 1.0 and takes 0.1
            assert harness.flow.waiting == 0
            assert harness.flow.in_flight == held - 1
            await asyncio.sleep(1)
            assert harness.is_quiet()

        with_harness(scenario, breaker_failures=10, concurrency_per_destination=30)

    def test_a_breaker_that_closed_opens_with_the_first_pause_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: OK if item.number == 3 else FAILS
            harness.submit("a", 7)
            await asyncio.sleep(60)
            # Fails at 0, 1, 3; succeeds at 7 and fails at once with the next; then the pauses start over.
            assert harness.starts("a") == [0, 1, 3, 7, 7, 8, 10]

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_opens_it_at_once_and_is_honoured(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(status, 7) if item.number == 0 else OK
            harness.submit("a", 3)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 7, 7]

        with_harness(scenario, concurrency_per_destination=1)

    def test_retry_after_is_bounded_by_the_longest_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(503, 86_400) if item.number == 0 else OK
            harness.submit("a", 2)
            await asyncio.sleep(100)
            assert harness.starts("a") == [0, 60]

        with_harness(scenario, concurrency_per_destination=1)

    def test_an_answer_to_a_call_made_before_it_opened_does_not_close_it_during_its_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(429, 10) if item.number == 0 else OK
            harness.submit("a", 2)  # both in flight at once
            harness.seconds["a"] = 0.0
            await asyncio.sleep(0.1)
            harness.submit("a", 1)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0, 10]

        with_harness(scenario, concurrency_per_destination=2)

    def test_a_call_made_before_it_opened_can_ask_for_a_longer_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(429, 5 * (item.number + 1)) if item.number < 3 else OK
            harness.submit("a", 4)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0, 0, 15]

        with_harness(scenario, concurrency_per_destination=3)

    @pytest.mark.parametrize("status", [503, 429, 500, 408])
    def test_without_retry_after_a_failure_is_one_of_several(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(status, None) if item.number < 2 else OK
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 5

        with_harness(scenario, breaker_failures=3, concurrency_per_destination=1)

    def test_retry_after_on_an_ordinary_answer_says_nothing_about_the_destination(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, 200, retry_after_ms=60_000)
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 5

        with_harness(scenario, concurrency_per_destination=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_a_call_that_was_not_sent_does_not_count(self, contact: Contact) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(contact)
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 50

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_a_call_that_was_not_sent_does_not_reset_the_count(self, contact: Contact) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: AttemptResult(contact) if item.number % 2 else FAILS
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert [item.number for _, item in harness.started] == [0, 1, 2, 3, 4]

        with_harness(scenario, breaker_failures=3, concurrency_per_destination=1)

    @pytest.mark.parametrize("status", [200, 302, 400, 404, 410])
    def test_a_client_error_of_a_destination_does_not_count_as_failure(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, status)
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 50

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    def test_a_breaker_is_kept_while_the_queue_is_empty(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = overloaded(503, 20)
            harness.submit("a", 1)
            await asyncio.sleep(10)
            assert harness.is_quiet()
            harness.result["a"] = OK
            harness.submit("a", 1)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 20]

        with_harness(scenario)

    def test_too_many_requests_and_a_request_timeout_count_as_failures(self) -> None:
        async def scenario(harness: Harness) -> None:
            for status in (408, 429, 500):
                harness.result[str(status)] = AttemptResult(Contact.ANSWERED, status)
                harness.submit(str(status), 50)
            await asyncio.sleep(0.1)
            assert [len(harness.starts(name)) for name in ("408", "429", "500")] == [3, 3, 3]

        with_harness(scenario, breaker_failures=3, concurrency_per_destination=1)

    def test_only_an_overloaded_destination_can_ask_for_a_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, 500, retry_after_ms=60_000)
            harness.submit("a", 2)
            await asyncio.sleep(1)
            assert harness.starts("a") == [0, 0]

        with_harness(scenario, concurrency_per_destination=1)

    def test_a_destination_that_asked_for_a_pause_and_fails_after_it_is_paused_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            outcomes = [overloaded(503, 4), FAILS, OK]
            harness.result["a"] = lambda item: outcomes[item.number]
            harness.submit("a", 3)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 4, 12], "a single failure opens it again, for twice as long"

        with_harness(scenario, concurrency_per_destination=1, breaker_failures=50, breaker_pause="1s")

    def test_there_is_one_wake_up_for_all_items_behind_a_breaker(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a")
            await asyncio.sleep(0.1)
            calls: list[float] = []
            loop = asyncio.get_running_loop()
            call_at = loop.call_at
            loop.call_at = lambda at, *rest: calls.append(at) or call_at(at, *rest)  # type: ignore[method-assign, func-returns-value]
            harness.submit("a", 20)
            assert len(calls) == 1
            waker = harness.destination("a").waker
            assert waker is not None
            harness.flow.stop()
            assert waker.cancelled()

        with_harness(scenario, breaker_failures=1)


class TestCongestion:
    """Outcomes come in faster than they can be recorded."""

    def test_flow_is_not_congested_by_default(self) -> None:
        async def scenario(harness: Harness) -> None:
            config = load_config(environ={}).delivery
            flow: Flow[Item] = Flow(config, deliver=harness._deliver, wanted=lambda _: True, done=harness._done)
            flow.submit(Item(0, "a", "n"), "a", "n")
            await asyncio.sleep(1)
            assert len(harness.finished) == 1

        with_harness(scenario)

    def test_nothing_is_started_until_the_congestion_ends_and_then_everything(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 3)
            harness.congested = True
            harness.submit("b", 2)
            await asyncio.sleep(5)
            assert [item.destination for _, item in harness.started] == ["a"], "what was started goes on, no more"
            assert {destination.name for destination in harness.flow.destinations()} == {"a", "b"}, (
                "nobody is forgotten"
            )
            harness.flow.resume()
            assert len(harness.started) == 1
            harness.congested = False
            harness.flow.resume()
            await asyncio.sleep(5)
            assert len(harness.finished) == 5
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_destination=1)


class TestRate:
    def test_slow_calls_keep_the_rate_too(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 10
            harness.submit("a", 4)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0.5, 1, 1.5]

        with_harness(scenario, rate_per_destination=2)

    def test_calls_to_one_destination_keep_the_rate(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 20)
            harness.submit("b", 1)
            await asyncio.sleep(100)
            assert harness.starts("a") == [pytest.approx(number / 4) for number in range(20)]
            assert harness.starts("b") == [0]

        with_harness(scenario, rate_per_destination=4)

    def test_the_rate_holds_between_items_that_arrive_one_by_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            for _ in range(99):
                harness.submit("a")
                await asyncio.sleep(0.01)
            assert harness.starts("a") == [0, 0.25, 0.5, 0.75]
            await asyncio.sleep(100)
            assert len(harness.starts("a")) == 99

        with_harness(scenario, rate_per_destination=4)

    def test_the_rate_holds_for_a_destination_that_is_idle_in_between(self) -> None:
        async def scenario(harness: Harness) -> None:
            for _ in range(10):
                while not harness.is_quiet():
                    await asyncio.sleep(0.01)
                harness.submit("a")
            assert now() == pytest.approx(8 / 4, abs=0.1)

        with_harness(scenario, rate_per_destination=4)

    def test_unused_calls_of_the_rate_are_not_saved(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 1)
            await asyncio.sleep(3_600)
            harness.submit("a", 10)
            await asyncio.sleep(0.9)
            assert len(harness.starts("a")) == 1 + 4

        with_harness(scenario, rate_per_destination=4)

    def test_late_wake_ups_do_not_lower_the_rate(self) -> None:
        async def scenario(harness: Harness) -> None:
            loop = asyncio.get_running_loop()
            exactly = loop.call_at
            # As real loops do: no wake-up between two ticks of three milliseconds.
            loop.call_at = lambda at, *rest, **kw: exactly((at // 0.003 + 1) * 0.003, *rest, **kw)  # type: ignore[method-assign]
            harness.submit("a", 3_000)
            await asyncio.sleep(1)
            assert 990 <= len(harness.started) <= 1_010
            loop.call_at = exactly  # type: ignore[method-assign]

        with_harness(scenario, rate_per_destination=1_000)

    def test_the_rate_holds_after_a_breaker_closed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 0.01
            harness.result["a"] = lambda item: FAILS if item.number < 1 else OK
            harness.submit("a", 30)
            await asyncio.sleep(1.0 + 28 / 4 + 0.5)
            assert len(harness.started) == 30
            assert harness.starts("a")[1] == pytest.approx(1.01)

        with_harness(scenario, rate_per_destination=4, breaker_failures=1)


class TestTakingBack:
    def test_items_behind_an_open_breaker_are_removed_the_newest_first(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 20)
            await asyncio.sleep(0.5)
            taken = harness.flow.remove_waiting(5)
            assert [item.number for item, _ in taken] == [19, 18, 17, 16, 15]
            assert all(seconds >= 30 for _, seconds in taken)
            assert harness.flow.waiting == harness.destination("a").waiting == 20 - 1 - 5

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    def test_a_destination_that_keeps_up_keeps_its_items(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["quick"] = 0.01
            harness.submit("quick", 1_000)
            for _ in range(3):
                await asyncio.sleep(1)
                harness.flow.measure()
            assert 0 < harness.flow.waiting < 1_000
            assert harness.flow.remove_waiting(1_000) == []

        with_harness(scenario, concurrency_per_destination=1)

    def test_items_are_removed_from_a_destination_that_is_far_behind_and_from_no_other(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["slow"] = 10
            harness.submit("slow", 100)
            harness.seconds["quick"] = 0.01
            harness.submit("quick", 1_000)
            for _ in range(3):
                await asyncio.sleep(1)
                harness.flow.measure()
            taken = harness.flow.remove_waiting(500)
            assert {item.destination for item, _ in taken} == {"slow"}
            assert len(taken) == 99

        with_harness(scenario, concurrency_per_destination=1)

    def test_items_are_removed_from_the_namespace_with_the_most_first(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 10, "loud")
            harness.submit("a", 2, "quiet")
            await asyncio.sleep(0.5)
            assert {item.namespace for item, _ in harness.flow.remove_waiting(6)} == {"loud"}

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    def test_the_more_items_are_removed_the_wider_they_are_spread_up_to_an_hour(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 1)
            await asyncio.sleep(0.5)
            harness.destination("a").removed = 100_000
            harness.submit("a", 2)
            assert [seconds for _, seconds in harness.flow.remove_waiting(1)] == [pytest.approx(130, abs=1)]
            harness.destination("a").removed = 100_000_000
            assert [seconds for _, seconds in harness.flow.remove_waiting(1)] == [3_600]

        with_harness(scenario, breaker_failures=1)

    def test_each_item_that_is_removed_widens_the_spread_until_the_breaker_closes(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 10)
            await asyncio.sleep(0.5)
            spread = [seconds for _, seconds in harness.flow.remove_waiting(3)]
            assert spread == [pytest.approx(30.001), pytest.approx(30.002), pytest.approx(30.003)]
            harness.result["a"] = OK
            harness.seconds["a"] = 100
            await asyncio.sleep(150)
            assert len(harness.finished) == 2, "the first of them has closed the breaker"
            assert harness.destination("a").removed == 0

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    def test_an_answer_while_the_breaker_is_closed_leaves_the_spread_as_it_is(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 40
            harness.submit("a", 5)
            for _ in range(3):
                await asyncio.sleep(1)
                harness.flow.measure()
            assert len(harness.flow.remove_waiting(2)) == 2
            await asyncio.sleep(40)
            assert [seconds for _, seconds in harness.flow.remove_waiting(1)] == [pytest.approx(30.003)]

        with_harness(scenario, concurrency_per_destination=1)

    def test_a_destination_whose_items_were_all_removed_is_called_with_new_items(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 5, "one")
            await asyncio.sleep(0.5)
            assert len(harness.flow.remove_waiting(10)) == 4
            harness.result["a"] = OK
            harness.submit("a", 1, "two")
            await asyncio.sleep(60)
            assert len(harness.finished) == 2
            assert harness.is_quiet()

        with_harness(scenario, breaker_failures=1, concurrency_per_destination=1)

    def test_items_that_will_be_called_within_half_a_minute_are_not_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 1)
            await asyncio.sleep(0.5)
            harness.destination("a").per_second = 0.1
            harness.submit("a", 2)
            assert harness.flow.remove_waiting(9) == []
            harness.submit("a", 1)
            assert len(harness.flow.remove_waiting(9)) == 3

        with_harness(scenario, concurrency_per_destination=1)

    def test_the_speed_of_a_destination_is_measured_each_second(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 0.1
            harness.submit("a", 1_000)
            speeds: list[float] = []
            await asyncio.sleep(0.05)
            for second in range(5):
                if second == 3:
                    harness.seconds["a"] = 100
                await asyncio.sleep(1)
                harness.flow.measure()
                speeds.append(harness.destination("a").per_second)
            assert speeds[0] == float("inf"), "the first second was not a whole one"
            assert speeds[1:] == [10, 10, 5.5, 2.75]

        with_harness(scenario, concurrency_per_destination=1)


class TestNothingIsLeftBehind:
    def test_a_call_in_flight_is_referenced_so_that_it_is_not_garbage_collected(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 3)
            assert len(harness.flow._calls) == 3

        with_harness(scenario)

    def test_a_destination_with_a_call_in_flight_is_not_removed_and_keeps_its_cap(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 10
            harness.submit("a", 1)
            await asyncio.sleep(0.1)
            harness.seconds["a"] = 1
            harness.submit("a", 1)
            await asyncio.sleep(2)
            harness.submit("a", 3)
            assert harness.flow.in_flight == harness.destination("a").in_flight == 2

        with_harness(scenario, concurrency_per_destination=2)

    def test_the_state_of_a_destination_is_kept_when_new_destinations_come(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 2)
            await asyncio.sleep(0.1)
            harness.submit("b")
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.starts("a")) == 3

        with_harness(scenario, concurrency_per_destination=1, breaker_failures=3)

    def test_busy_destinations_are_not_all_checked_again_for_every_new_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 4)

        async def scenario(harness: Harness) -> None:
            limits: list[int] = []
            for number in range(10):
                harness.seconds[f"host-{number}"] = 60
                harness.submit(f"host-{number}")
                limits.append(harness.flow._remove_idle_at)
            assert limits == [4, 4, 4, 4, 8, 8, 8, 8, 16, 16]
            await asyncio.sleep(100)
            harness.flow._remove_idle()
            assert harness.flow._remove_idle_at == 4

        with_harness(scenario)

    def test_the_oldest_waiting_items_are_the_first_of_each_queue(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = harness.seconds["b"] = 10
            harness.submit("a", 3, "one")
            harness.submit("a", 2, "two")
            harness.submit("b", 2, "one")
            assert [item.number for item in harness.flow.oldest_waiting()] == [1, 3, 6]

        with_harness(scenario, concurrency_per_destination=1)

    def test_items_that_are_no_longer_wanted_are_dropped_without_a_call(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 10)
            harness.unwanted = {2, 3, 4, 9}
            await asyncio.sleep(60)
            assert [item.number for _, item in harness.started] == [0, 1, 5, 6, 7, 8]
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_destination=2)

    def test_an_unwanted_item_does_not_count_for_the_rate(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.unwanted = {1, 2, 3}
            harness.submit("a", 5)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 1]

        with_harness(scenario, rate_per_destination=1)

    def test_after_all_items_are_done_there_are_no_tasks_and_all_counts_are_zero(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["bad"] = lambda item: FAILS if now() < 30 else OK
            harness.result["gone"] = lambda item: BROKEN if now() < 30 else OK
            for name in ("good", "bad", "slow", "gone"):
                harness.seconds[name] = 2 if name == "slow" else 0.01
                harness.submit(name, 100, "one")
                harness.submit(name, 100, "two")
            harness.unwanted = set(range(50, 150))
            await asyncio.sleep(1_000)
            assert harness.is_quiet()
            assert harness.flow.destinations() == []
            assert not harness.flow._calls
            assert not harness.flow._starved
            assert len(harness.finished) == 700

        with_harness(scenario, concurrency_max=20, concurrency_per_destination=8, breaker_pause_max="4s")

    def test_after_a_stop_nothing_starts_and_calls_in_flight_go_on(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 10)
            harness.result["b"] = FAILS
            harness.submit("b", 10)
            await asyncio.sleep(0.5)
            begun = len(harness.started)
            harness.flow.stop()
            harness.submit("c", 1)
            await asyncio.sleep(100)
            assert len(harness.started) == len(harness.finished) == begun
            assert harness.flow.in_flight == 0

        with_harness(scenario, concurrency_per_destination=2, breaker_failures=1)

    def test_a_destination_without_items_is_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(1_000):
                harness.submit(f"host-{number}")
            await asyncio.sleep(1)
            assert harness.flow.destinations() == []

        with_harness(scenario)

    def test_the_number_of_idle_destinations_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 100)

        async def scenario(harness: Harness) -> None:
            harness.seconds["busy"] = 3_600
            harness.submit("busy")
            for number in range(1_000):
                harness.result[f"host-{number}"] = FAILS  # which is remembered of them
                harness.submit(f"host-{number}")
                await asyncio.sleep(0.01)
                assert len(harness.flow.destinations()) <= 101
            assert "busy" in [destination.name for destination in harness.flow.destinations()]

        with_harness(scenario)

    def test_a_destination_removed_while_it_settles_and_called_again_keeps_its_cap(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 1)

        async def scenario(harness: Harness) -> None:
            def done(item: Item, result: AttemptResult) -> None:
                if item.number == 0:
                    harness.seconds["a"] = harness.seconds["b"] = 1
                    harness.submit("b")  # one too many: what is idle goes
                    harness.submit("a")

            harness.flow._done = done
            harness.submit("a")
            await asyncio.sleep(0.5)
            harness.submit("a", 3)
            await asyncio.sleep(10)
            assert harness.most_in_flight["a"] == 1
            assert len(harness.starts("a")) == 5

        with_harness(scenario, concurrency_per_destination=1)

    def test_busy_destinations_are_never_removed_however_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 100)

        async def scenario(harness: Harness) -> None:
            for number in range(1_000):
                harness.submit(f"host-{number}", 2)
            assert len(harness.flow.destinations()) == 1_000
            await asyncio.sleep(1)
            assert len(harness.finished) == 2_000
            assert harness.is_quiet()

        with_harness(scenario, concurrency_max=5)


class TestHangingDestinations:
    def test_many_destinations_that_hang_do_not_delay_one_that_answers(self) -> None:
        """All calls under the total cap are to destinations that hang; a healthy destination is still called."""

        async def scenario(harness: Harness) -> None:
            for number in range(20):
                harness.seconds[f"hangs{number}"] = 30
                harness.submit(f"hangs{number}", 64)
            await asyncio.sleep(0.1)
            harness.seconds["healthy"] = 0.01
            harness.submit("healthy", 20)
            await asyncio.sleep(1)
            assert sum(item.destination == "healthy" for _, item in harness.finished) == 20

        with_harness(scenario)

    def test_calls_above_the_total_cap_are_limited_to_the_same_number_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(50):
                harness.seconds[f"hangs{number}"] = 30
                harness.submit(f"hangs{number}", 2)
            await asyncio.sleep(0.1)
            assert harness.flow.in_flight == 20
            await asyncio.sleep(1_000)
            assert len(harness.finished) == 100

        with_harness(scenario, concurrency_max=10)

    def test_two_namespaces_of_a_destination_take_turns(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 3, "one")
            harness.submit("a", 3, "two")
            await asyncio.sleep(1)
            assert [item.namespace for _, item in harness.started] == ["one", "one", "two", "one", "two", "two"]

        with_harness(scenario, concurrency_per_destination=1)
