"""Flow in virtual time: caps, fair turns, breakers and pace, destination by destination."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

from duetime.config import load_config
from duetime.domain.flow_status import FlowState
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import FlowLimits, Namespace
from duetime.engine import flow as flow_module
from duetime.engine.flow import FlowControl
from duetime.engine.flow_limits import LimitedFlow
from duetime.engine.flow_queues import Queue
from duetime.testing.virtual import VirtualClock, run_virtual

OK = AttemptResult(Contact.ANSWERED, 200)
FAILS = AttemptResult(Contact.ANSWERED, 500)
BROKEN = AttemptResult(Contact.BROKEN, error="timed out")
UNREACHABLE = AttemptResult(Contact.UNREACHABLE, error="connection refused")
TIMED_OUT = AttemptResult(Contact.TIMED_OUT, error="connect timeout after 1 s")
SHORTAGE = AttemptResult(Contact.SHORTAGE, error="no socket to spare")


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
        self.flow: FlowControl[Item] = FlowControl(
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

    def submit(self, destination: str, count: int = 1, namespace: str = "n", origin: str | None = None) -> None:
        """Items of the flow named `destination`; unless the test says otherwise each flow has an origin of its own."""
        for _ in range(count):
            number = self._submitted
            item = Item(number, destination, namespace)
            self.flow.submit(item, number, namespace, destination, origin or f"http://{destination}")
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

    def queue(self, name: str) -> Queue:
        return next(queue for queue in self.flow.queues() if queue.flow.key == name)

    def flows(self) -> list[str]:
        return [flow.key for flow in self.flow.flows()]

    def is_quiet(self) -> bool:
        flow = self.flow
        return flow.waiting == flow.in_flight == 0 and not any(q.waiting or q.in_flight for q in flow.queues())


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
            assert harness.queue("dead").waiting > 400  # held, not burnt

        with_harness(scenario)

    def test_one_destination_gets_no_more_than_its_cap_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 50)
            await asyncio.sleep(100)
            assert harness.most_in_flight["a"] == 8
            assert len(harness.finished) == 50
            assert now_finished(harness) == 7  # as fast as the cap allows: 50 calls of a second, eight at a time

        with_harness(scenario, concurrency_per_flow=8)

    def test_items_of_one_destination_start_in_the_order_they_came(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 50)
            await asyncio.sleep(100)
            assert [item.number for _, item in harness.started] == list(range(50))

        with_harness(scenario, concurrency_per_flow=4)

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

        with_harness(scenario, concurrency_per_flow=1)


def now_finished(harness: Harness) -> float:
    return round(harness.finished[-1][0], 6)


class TestTurns:
    def test_all_destinations_together_get_no_more_calls_than_the_total_cap(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in "abcde":
                harness.seconds[name] = 1
                harness.submit(name, 20)
            await asyncio.sleep(100)
            assert harness.most_in_flight["all"] == 8, "four fifths: another namespace could call at once"
            assert len(harness.finished) == 100
            assert now_finished(harness) <= 16  # the last flow leaves some of it to others
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
            # "big" came first and had all calls but one; from then on the two destinations take turns.
            assert order[:3] == ["big"] * 3
            assert order.index("tiny") <= 6
            assert max(harness.starts("small")) <= 7

        with_harness(scenario, concurrency_max=4)

    def test_within_an_origin_namespaces_take_turns(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 100, "loud")
            harness.submit("a", 3, "quiet")
            harness.submit("a", 3, "calm")
            await asyncio.sleep(9)
            order = [item.namespace for _, item in harness.started]
            assert order[:2] == ["loud", "loud"], "the second one waited before the others came"
            assert order[2:8] == ["quiet", "calm", "loud", "quiet", "calm", "loud"]

        with_harness(scenario, concurrency_per_origin=1)

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

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    def test_a_success_in_between_starts_the_count_over(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: OK if item.number % 3 == 2 else FAILS
            harness.submit("a", 99)
            await asyncio.sleep(0.5)
            assert len(harness.finished) == 99

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    def test_it_tries_one_call_and_doubles_its_pause_up_to_the_limit(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 100)
            await asyncio.sleep(20)
            assert harness.starts("a") == [0, 1, 3, 7, 11, 15, 19]
            assert harness.most_in_flight["a"] == 1

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1, breaker_pause="1s", breaker_pause_max="4s")

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

        with_harness(scenario, breaker_failures=10, concurrency_per_flow=20)

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

        with_harness(scenario, breaker_failures=10, concurrency_per_flow=30)

    def test_a_breaker_that_closed_opens_with_the_first_pause_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: OK if item.number == 3 else FAILS
            harness.submit("a", 7)
            await asyncio.sleep(60)
            # Fails at 0, 1, 3; succeeds at 7 and fails at once with the next; then the pauses start over.
            assert harness.starts("a") == [0, 1, 3, 7, 7, 8, 10]

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_opens_it_at_once_and_is_honoured(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(status, 7) if item.number == 0 else OK
            harness.submit("a", 3)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 7, 7]

        with_harness(scenario, concurrency_per_flow=1)

    def test_retry_after_is_bounded_by_the_longest_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(503, 86_400) if item.number == 0 else OK
            harness.submit("a", 2)
            await asyncio.sleep(100)
            assert harness.starts("a") == [0, 60]

        with_harness(scenario, concurrency_per_flow=1)

    def test_an_answer_to_a_call_made_before_it_opened_does_not_close_it_during_its_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(429, 10) if item.number == 0 else OK
            harness.submit("a", 2)  # both in flight at once
            harness.seconds["a"] = 0.0
            await asyncio.sleep(0.1)
            harness.submit("a", 1)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0, 10]

        with_harness(scenario, concurrency_per_flow=2)

    def test_a_call_made_before_it_opened_can_ask_for_a_longer_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(429, 5 * (item.number + 1)) if item.number < 3 else OK
            harness.submit("a", 4)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0, 0, 15]

        with_harness(scenario, concurrency_per_flow=3)

    @pytest.mark.parametrize("status", [503, 429, 500, 408])
    def test_without_retry_after_a_failure_is_one_of_several(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: overloaded(status, None) if item.number < 2 else OK
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 5

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    def test_retry_after_on_an_ordinary_answer_says_nothing_about_the_destination(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, 200, retry_after_ms=60_000)
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 5

        with_harness(scenario, concurrency_per_flow=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_a_call_that_was_not_sent_does_not_count(self, contact: Contact) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(contact)
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 50

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_a_call_that_was_not_sent_does_not_reset_the_count(self, contact: Contact) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: AttemptResult(contact) if item.number % 2 else FAILS
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert [item.number for _, item in harness.started] == [0, 1, 2, 3, 4]

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    @pytest.mark.parametrize("status", [200, 302, 400, 404, 410])
    def test_a_client_error_of_a_destination_does_not_count_as_failure(self, status: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, status)
            harness.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 50

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

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

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    def test_only_an_overloaded_destination_can_ask_for_a_pause(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = AttemptResult(Contact.ANSWERED, 500, retry_after_ms=60_000)
            harness.submit("a", 2)
            await asyncio.sleep(1)
            assert harness.starts("a") == [0, 0]

        with_harness(scenario, concurrency_per_flow=1)

    def test_a_destination_that_asked_for_a_pause_and_fails_after_it_is_paused_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            outcomes = [overloaded(503, 4), FAILS, OK]
            harness.result["a"] = lambda item: outcomes[item.number]
            harness.submit("a", 3)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 4, 12], "a single failure opens it again, for twice as long"

        with_harness(scenario, concurrency_per_flow=1, breaker_failures=50, breaker_pause="1s")

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
            waker = harness.queue("a").flow.waker
            assert waker is not None
            harness.flow.stop()
            assert waker.cancelled()

        with_harness(scenario, breaker_failures=1)


class TestCongestion:
    """Outcomes come in faster than they can be recorded."""

    def test_flow_is_not_congested_by_default(self) -> None:
        async def scenario(harness: Harness) -> None:
            config = load_config(environ={}).delivery
            flow: FlowControl[Item] = FlowControl(
                config, deliver=harness._deliver, wanted=lambda _: True, done=harness._done
            )
            flow.submit(Item(0, "a", "n"), 0, "n", "a", "a")
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
            assert set(harness.flows()) == {"a", "b"}, "nobody is forgotten"
            harness.flow.resume()
            assert len(harness.started) == 1
            harness.congested = False
            harness.flow.resume()
            await asyncio.sleep(5)
            assert len(harness.finished) == 5
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_flow=1)


class TestRate:
    def test_slow_calls_keep_the_rate_too(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 10
            harness.submit("a", 4)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 0.5, 1, 1.5]

        with_harness(scenario, rate_per_flow=2)

    def test_calls_to_one_destination_keep_the_rate(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 20)
            harness.submit("b", 1)
            await asyncio.sleep(100)
            assert harness.starts("a") == [pytest.approx(number / 4) for number in range(20)]
            assert harness.starts("b") == [0]

        with_harness(scenario, rate_per_flow=4)

    def test_the_rate_holds_between_items_that_arrive_one_by_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            for _ in range(99):
                harness.submit("a")
                await asyncio.sleep(0.01)
            assert harness.starts("a") == [0, 0.25, 0.5, 0.75]
            await asyncio.sleep(100)
            assert len(harness.starts("a")) == 99

        with_harness(scenario, rate_per_flow=4)

    def test_the_rate_holds_for_a_destination_that_is_idle_in_between(self) -> None:
        async def scenario(harness: Harness) -> None:
            for _ in range(10):
                while not harness.is_quiet():
                    await asyncio.sleep(0.01)
                harness.submit("a")
            assert now() == pytest.approx(8 / 4, abs=0.1)

        with_harness(scenario, rate_per_flow=4)

    def test_unused_calls_of_the_rate_are_not_saved(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 1)
            await asyncio.sleep(3_600)
            harness.submit("a", 10)
            await asyncio.sleep(0.9)
            assert len(harness.starts("a")) == 1 + 4

        with_harness(scenario, rate_per_flow=4)

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

        with_harness(scenario, rate_per_flow=1_000)

    def test_the_rate_holds_after_a_breaker_closed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 0.01
            harness.result["a"] = lambda item: FAILS if item.number < 1 else OK
            harness.submit("a", 30)
            await asyncio.sleep(1.0 + 28 / 4 + 0.5)
            assert len(harness.started) == 30
            assert harness.starts("a")[1] == pytest.approx(1.01)

        with_harness(scenario, rate_per_flow=4, breaker_failures=1)


class TestTakingBack:
    def test_items_behind_an_open_breaker_are_removed_the_newest_first(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 20)
            await asyncio.sleep(0.5)
            taken = harness.flow.remove_waiting(5)
            assert [item.number for item, _ in taken] == [19, 18, 17, 16, 15]
            assert all(seconds >= 30 for _, seconds in taken)
            assert harness.flow.waiting == harness.queue("a").waiting == 20 - 1 - 5

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_a_destination_that_keeps_up_keeps_its_items(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["quick"] = 0.01
            harness.submit("quick", 1_000)
            await asyncio.sleep(3)
            assert 0 < harness.flow.waiting < 1_000
            assert harness.flow.remove_waiting(1_000) == []

        with_harness(scenario, concurrency_per_flow=1)

    def test_items_are_removed_from_a_destination_that_is_far_behind_and_from_no_other(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["slow"] = 10
            harness.submit("slow", 100)
            harness.seconds["quick"] = 0.01
            harness.submit("quick", 1_000)
            await asyncio.sleep(3)
            taken = harness.flow.remove_waiting(500)
            assert {item.destination for item, _ in taken} == {"slow"}
            assert len(taken) == 99

        with_harness(scenario, concurrency_per_flow=1)

    def test_items_are_removed_from_the_namespace_with_the_most_first(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 10, "loud")
            harness.submit("a", 2, "quiet")
            await asyncio.sleep(0.5)
            assert {item.namespace for item, _ in harness.flow.remove_waiting(6)} == {"loud"}

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_the_more_items_are_removed_the_wider_they_are_spread_up_to_an_hour(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 1)
            await asyncio.sleep(0.5)
            harness.submit("a", 2)
            harness.queue("a").flow.removed = 100_000
            assert [seconds for _, seconds in harness.flow.remove_waiting(1)] == [pytest.approx(130, abs=1)]
            harness.queue("a").flow.removed = 100_000_000
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
            assert harness.queue("a").flow.removed == 0

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_an_answer_while_the_breaker_is_closed_leaves_the_spread_as_it_is(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 40
            harness.submit("a", 5)
            await asyncio.sleep(3)
            assert len(harness.flow.remove_waiting(2)) == 2
            await asyncio.sleep(40)
            assert [seconds for _, seconds in harness.flow.remove_waiting(1)] == [pytest.approx(30.003)]

        with_harness(scenario, concurrency_per_flow=1)

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

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_items_that_will_be_called_within_half_a_minute_are_not_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 1)
            await asyncio.sleep(0.5)
            harness.queue("a").per_second = 0.1
            harness.submit("a", 2)
            assert harness.flow.remove_waiting(9) == []
            harness.submit("a", 1)
            assert len(harness.flow.remove_waiting(9)) == 3

        with_harness(scenario, concurrency_per_flow=1)

    def test_the_speed_of_a_destination_is_measured_each_second(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 0.1
            harness.submit("a", 1_000)
            queue = harness.queue("a")
            speeds: list[float] = [queue.per_second]
            for second in range(1, 7):
                if second == 3:
                    harness.seconds["a"] = 100
                await asyncio.sleep(1 if second > 1 else 1.05)
                queue.is_slow(now(), 30)
                speeds.append(queue.per_second)
            assert speeds[:3] == [float("inf"), pytest.approx(10, abs=0.6), pytest.approx(10, abs=0.6)]
            assert speeds[3:] == sorted(speeds[3:], reverse=True)
            assert speeds[6] < 2

        with_harness(scenario, concurrency_per_flow=1)


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
            assert harness.flow.in_flight == harness.queue("a").in_flight == 2

        with_harness(scenario, concurrency_per_flow=2)

    def test_the_state_of_a_destination_is_kept_when_new_destinations_come(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 2)
            await asyncio.sleep(0.1)
            harness.submit("b")
            harness.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(harness.starts("a")) == 3

        with_harness(scenario, concurrency_per_flow=1, breaker_failures=3)

    def test_busy_destinations_are_not_all_checked_again_for_every_new_one(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_FLOWS_MAX", 4)

        async def scenario(harness: Harness) -> None:
            limits: list[int] = []
            for number in range(10):
                harness.seconds[f"host-{number}"] = 60
                harness.submit(f"host-{number}")
                limits.append(harness.flow._namespaces["n"].idle_max)
            assert limits == [4, 4, 4, 4, 8, 8, 8, 8, 16, 16]
            await asyncio.sleep(100)
            assert harness.flow._namespaces == {}

        with_harness(scenario)

    def test_origins_in_use_are_not_all_checked_again_for_every_new_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_ORIGINS_MAX", 10)

        async def scenario(harness: Harness) -> None:
            checks = 0
            forget = harness.flow._forget_idle_origins

            def counted() -> None:
                nonlocal checks
                checks += 1
                forget()

            monkeypatch.setattr(harness.flow, "_forget_idle_origins", counted)
            for number in range(100):
                harness.seconds[f"d{number}"] = 3_600
                harness.submit(f"d{number}")
            assert checks == 4, "at 10, 20, 40 and 80 origins"

        with_harness(scenario)

    def test_the_oldest_item_that_waits_is_found_in_any_queue(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = harness.seconds["b"] = 10
            harness.submit("a", 3, "one")
            harness.submit("a", 2, "two")
            harness.submit("b", 2, "one")
            assert harness.flow.oldest_ticket() == 1
            for discarded, oldest in ((3, 1), (1, 2), (2, 4), (4, 6), (6, None)):
                harness.flow.discard(discarded)
                assert harness.flow.oldest_ticket() == oldest

        with_harness(scenario, concurrency_per_flow=1)

    def test_items_that_are_no_longer_wanted_are_dropped_without_a_call(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 10)
            harness.unwanted = {2, 3, 4, 9}
            await asyncio.sleep(60)
            assert [item.number for _, item in harness.started] == [0, 1, 5, 6, 7, 8]
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_flow=2)

    def test_an_unwanted_item_does_not_count_for_the_rate(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.unwanted = {1, 2, 3}
            harness.submit("a", 5)
            await asyncio.sleep(60)
            assert harness.starts("a") == [0, 1]

        with_harness(scenario, rate_per_flow=1)

    def test_after_all_items_are_done_there_are_no_tasks_and_all_counts_are_zero(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["bad"] = lambda item: FAILS if now() < 30 else OK
            harness.result["gone"] = lambda item: BROKEN if now() < 30 else OK
            for name in ("good", "bad", "slow", "gone"):
                harness.seconds[name] = 2 if name == "slow" else 0.01
                harness.submit(name, 100, "one")
                harness.submit(name, 100, "two")
            harness.unwanted = {*range(50, 100), *range(150, 200)}
            await asyncio.sleep(1_000)
            assert harness.is_quiet()
            assert harness.flows() == []
            assert not harness.flow._calls
            assert not harness.flow._slots.has_turns()
            assert not harness.flow._slots._over_share
            assert (harness.flow._namespaces, harness.flow._origins, harness.flow._items) == ({}, {}, {})
            assert len(harness.finished) == 700

        with_harness(scenario, concurrency_max=20, concurrency_per_flow=8, breaker_pause_max="4s")

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

        with_harness(scenario, concurrency_per_flow=2, breaker_failures=1)

    def test_a_destination_without_items_is_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(1_000):
                harness.submit(f"host-{number}")
            await asyncio.sleep(1)
            assert harness.flows() == []

        with_harness(scenario)

    def test_the_number_of_idle_destinations_is_limited(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_FLOWS_MAX", 100)

        async def scenario(harness: Harness) -> None:
            harness.seconds["busy"] = 3_600
            harness.submit("busy")
            for number in range(1_000):
                harness.result[f"host-{number}"] = FAILS  # which is remembered of them
                harness.submit(f"host-{number}")
                await asyncio.sleep(0.01)
                assert len(harness.flows()) <= 101
            assert "busy" in harness.flows()

        with_harness(scenario)

    def test_a_destination_removed_while_it_settles_and_called_again_keeps_its_cap(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_FLOWS_MAX", 1)

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

        with_harness(scenario, concurrency_per_flow=1)

    def test_busy_destinations_are_never_removed_however_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_FLOWS_MAX", 100)

        async def scenario(harness: Harness) -> None:
            for number in range(1_000):
                harness.submit(f"host-{number}", 2)
            assert len(harness.flows()) == 1_000
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

    def test_no_call_is_made_above_the_total_cap(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(50):
                harness.seconds[f"hangs{number}"] = 30
                harness.submit(f"hangs{number}", 2)
            await asyncio.sleep(0.1)
            assert harness.flow.in_flight == 8
            await asyncio.sleep(1_000)
            assert len(harness.finished) == 100

        with_harness(scenario, concurrency_max=10)

    def test_two_namespaces_of_a_destination_take_turns(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.submit("a", 3, "one")
            harness.submit("a", 3, "two")
            await asyncio.sleep(1)
            assert [item.namespace for _, item in harness.started] == ["one", "one", "two", "one", "two", "two"]

        with_harness(scenario, concurrency_per_origin=1)


def limits(name: str = "n", *, paused: bool = False, **flows: FlowLimits) -> Namespace:
    return Namespace(name=name, num_shards=1, created_at_ms=0, paused=paused, flows=flows)


class TestShares:
    """What one namespace or flow can use up."""

    def test_a_namespace_with_thousands_of_hanging_origins_never_delays_another(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(2_048):
                harness.seconds[f"hangs{number}"] = 300
                harness.submit(f"hangs{number}", 2, "hostile")
            await asyncio.sleep(0.1)
            assert harness.flow.in_flight == 768, "three quarters of all slots"
            for _ in range(20):
                harness.submit("healthy", 10, "good")
                await asyncio.sleep(1)
            assert harness.starts("healthy") == [float(round(0.1 + n // 10, 6)) for n in range(200)]

        with_harness(scenario)

    def test_fifty_hostile_namespaces_one_after_the_other_leave_a_slot(self) -> None:
        async def scenario(harness: Harness) -> None:
            for tenant in range(50):
                for number in range(40):
                    harness.seconds[f"hangs{number}"] = 300
                    harness.submit(f"hangs{number}", 64, f"hostile-{tenant}")
            harness.seconds["healthy"] = 0.005
            harness.submit("healthy", 10, "good")
            await asyncio.sleep(0.1)
            assert len(harness.starts("healthy")) == 10

        with_harness(scenario)

    def test_forty_hanging_urls_of_an_origin_leave_slots_to_a_healthy_one_of_the_same_namespace(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(40):
                harness.seconds[f"hangs{number}"] = 300
                harness.submit(f"hangs{number}", 64, origin="http://host")
            harness.seconds["healthy"] = 0.005
            harness.submit("healthy", 10, origin="http://host")
            harness.submit("other tenant", 10, "good", origin="http://host")
            await asyncio.sleep(0.1)
            assert len(harness.starts("healthy")) == 10
            assert harness.starts("other tenant") == [0] * 10

        with_harness(scenario)

    def test_an_origin_gets_no_more_calls_than_its_cap(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in range(20):
                harness.seconds[str(name)] = 1
                for tenant in range(5):
                    harness.submit(str(name), 10, str(tenant), origin="http://host")
            await asyncio.sleep(0)
            origin = harness.flow._origins["http://host"]
            most = origin.in_flight
            while origin.in_flight:
                await asyncio.sleep(0.5)
                most = max(most, origin.in_flight)
            assert 30 <= most <= 32
            assert len(harness.finished) == 1_000

        with_harness(scenario, concurrency_per_origin=32)

    def test_a_call_that_ends_passes_its_slot_on_to_a_namespace_that_waits(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["loud"] = harness.seconds["quiet"] = 1
            harness.submit("loud", 100, "one")
            harness.submit("quiet", 3, "two")
            await asyncio.sleep(6.5)
            assert harness.starts("quiet") == [1, 3, 5]

        with_harness(scenario, concurrency_max=1)

    def test_a_single_namespace_with_a_url_for_each_timer_uses_its_share_and_leaves_nothing_behind(self) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(2_000):
                harness.seconds[f"u{number}"] = 1
                harness.submit(f"u{number}", origin="http://host")
            assert harness.flow.in_flight == 192
            await asyncio.sleep(30)
            assert len(harness.finished) == 2_000
            assert harness.flow._namespaces == {}

        with_harness(scenario)


class TestFlowsOfOneOrigin:
    def test_urls_that_fail_do_not_delay_a_healthy_url_of_the_same_host(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["http://host/s/500"] = FAILS
            harness.submit("http://host/s/500", 40, origin="http://host")
            for _ in range(10):
                harness.submit("http://host/s/200", origin="http://host")
                await asyncio.sleep(1)
            assert harness.starts("http://host/s/200") == [float(second) for second in range(10)]

        with_harness(scenario)

    def test_retry_after_holds_its_own_flow_and_nothing_else(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["http://host/1"] = overloaded(429, 3_600)
            harness.submit("http://host/1", 1, "one", origin="http://host")
            await asyncio.sleep(0.1)
            harness.submit("http://host/1", 1, "one", origin="http://host")
            harness.submit("http://host/2", 1, "one", origin="http://host")
            harness.submit("http://host/1", 1, "two", origin="http://host")
            await asyncio.sleep(1)
            assert [item.number for _, item in harness.started] == [0, 2, 3]

        with_harness(scenario)

    def test_an_origin_that_cannot_be_reached_is_not_called_for_any_of_its_flows(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in ("a", "b", "c"):
                harness.result[name] = UNREACHABLE if name != "c" else OK
            for name in ("a", "b", "a", "b", "c"):
                harness.submit(name, 5, origin="http://host")
            await asyncio.sleep(0.5)
            assert len(harness.started) == 3, "three failures in a row open it"
            harness.submit("d", 1, origin="http://other")
            await asyncio.sleep(0.4)
            assert len(harness.starts("d")) == 1
            for name in "ab":
                harness.result[name] = OK
            await asyncio.sleep(0.5)
            assert harness.is_quiet(), "one call was tried after a second, and then all others"

        with_harness(scenario, breaker_failures=3, concurrency_per_origin=1)

    def test_a_trial_call_that_hangs_holds_the_origin_for_one_more_pause_only(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = UNREACHABLE
            harness.submit("a", 1, "one", origin="http://host")
            await asyncio.sleep(0.1)
            harness.seconds["a"] = 300
            harness.submit("a", 1, "one", origin="http://host")
            await asyncio.sleep(1)
            harness.submit("b", 5, "two", origin="http://host")
            await asyncio.sleep(2)
            assert harness.starts("b") == [2, 2, 2, 2, 2]

        with_harness(scenario, breaker_failures=1)

    def test_timers_that_leave_too_little_time_to_connect_hold_their_own_flow_only(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["impatient"] = TIMED_OUT
            harness.submit("impatient", 20, "one", origin="http://host")
            await asyncio.sleep(0.1)
            for _ in range(20):
                harness.submit("patient", 1, "two", origin="http://host")
                await asyncio.sleep(0.1)
            assert harness.starts("patient") == [round(0.1 * n, 6) for n in range(1, 21)]
            assert len(harness.starts("impatient")) == 4, "three, and one that was tried after a second"
            assert harness.queue("impatient").waiting == 16

        with_harness(scenario, breaker_failures=3, concurrency_per_flow=1)

    def test_a_call_that_had_too_little_time_to_connect_does_not_end_the_failures_of_its_origin_in_a_row(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"], harness.result["b"] = UNREACHABLE, TIMED_OUT
            for name in "aba":
                harness.submit(name, 1, origin="http://host")
                await asyncio.sleep(0.1)
            harness.submit("c", 1, origin="http://host")
            await asyncio.sleep(0.1)
            assert harness.starts("c") == [], "the breaker of the origin is open"
            await asyncio.sleep(1)
            assert len(harness.starts("c")) == 1

        with_harness(scenario, breaker_failures=2)

    @pytest.mark.parametrize(("ended", "at"), [(TIMED_OUT, 60.2), (SHORTAGE, 61.2)])
    def test_a_trial_call_that_says_nothing_about_the_origin_does_not_use_up_its_pause(
        self, ended: AttemptResult, at: float
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = UNREACHABLE
            harness.submit("a", 1, "one", origin="http://host")
            await asyncio.sleep(0.1)
            harness.result["a"] = ended
            harness.seconds["a"] = 0.2
            harness.submit("a", 1, "one", origin="http://host")
            await asyncio.sleep(59.95)  # it is in flight, and the others would be woken at 120
            assert len(harness.starts("a")) == 2
            harness.submit("b", 3, "two", origin="http://host")
            await asyncio.sleep(3)
            assert harness.starts("b") == [at, at, at]

        with_harness(scenario, breaker_failures=1, breaker_pause="60s", breaker_pause_max="60s")


class TestOrder:
    def test_a_backlog_that_comes_after_newer_items_is_called_before_them(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            for ticket in (50, 40, 41, 10, 45, 20):
                harness.flow.submit(Item(ticket, "a", "n"), ticket, "n", "a", "http://a")
            await asyncio.sleep(10)
            assert [item.number for _, item in harness.started] == [50, 10, 20, 40, 41, 45]

        with_harness(scenario, concurrency_per_flow=1)


class TestShortages:
    def test_a_shortage_of_this_instance_is_tried_again_after_one_to_five_seconds(self) -> None:
        async def scenario(harness: Harness) -> None:
            def done(item: Item, result: AttemptResult) -> None:
                harness._done(item, result)
                if result is SHORTAGE:
                    harness.flow.submit(item, item.number, item.namespace, item.destination, "http://a")

            harness.flow._done = done
            harness.result["a"] = SHORTAGE
            harness.submit("a")
            await asyncio.sleep(20)
            assert harness.starts("a") == [0, 1, 3, 7, 12, 17]
            assert harness.queue("a").failures == 0, "it is not the fault of the receiver"
            harness.result["a"] = OK
            await asyncio.sleep(10)
            assert harness.is_quiet()
            assert harness.flows() == []

        with_harness(scenario, breaker_failures=1)

    @pytest.mark.parametrize(("flows", "tries_max", "seconds_max"), [(10_000, 200, 60), (24_000, 450, 150)])
    def test_many_flows_in_shortage_are_tried_at_a_bounded_rate_and_all_are_delivered_later(
        self, flows: int, tries_max: int, seconds_max: int
    ) -> None:
        async def scenario(harness: Harness) -> None:
            delivered: set[int] = set()

            def done(item: Item, result: AttemptResult) -> None:
                if result is SHORTAGE:
                    harness.flow.submit(item, item.number, item.namespace, item.destination, "http://a")
                else:
                    delivered.add(item.number)

            harness.flow._done = done
            results = [SHORTAGE]
            harness.result = defaultdict(lambda: lambda _: results[0])
            for number in range(flows):
                harness.submit(f"a{number}", origin="http://a")
            await asyncio.sleep(180)
            tries = Counter(int(at) for at, _ in harness.started if at > 0)
            assert max(tries.values()) <= tries_max + 1
            assert len({item.number for at, item in harness.started if at > 60}) == flows, "each is tried again"
            assert harness.flow._namespaces["n"].in_shortage == flows
            results[0] = OK
            await asyncio.sleep(seconds_max)
            assert len(delivered) == flows
            assert harness.is_quiet()
            assert harness.flow._namespaces == {}

        with_harness(scenario)

    def test_a_flow_that_ends_in_any_way_counts_no_longer_as_one_in_shortage(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_FLOWS_MAX", 4)

        async def scenario(harness: Harness) -> None:
            for name in "abcd":
                harness.result[name] = SHORTAGE
                harness.submit(name)
            await asyncio.sleep(0.1)
            share = harness.flow._namespaces["n"]
            assert share.in_shortage == 4
            harness.result["a"] = FAILS
            harness.submit("a")
            await asyncio.sleep(2)
            assert share.in_shortage == 3, "its call was made"
            harness.result["d"] = UNREACHABLE
            harness.submit("d")
            await asyncio.sleep(4)
            assert share.in_shortage == 2, "its name was looked up"
            harness.flow.set_limits(limits(b=FlowLimits(paused=True)))
            harness.flow.set_limits(limits())
            assert share.in_shortage == 1, "the pause of the operator has ended"
            for name in "efgh":
                harness.submit(name)
            assert (share.in_shortage, "c" in harness.flows()) == (0, False), "it was forgotten"

        with_harness(scenario)


class TestLimits:
    def test_limits_of_the_operator_hold_for_a_flow_that_exists_and_when_they_are_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a", 20)
            harness.flow.set_limits(limits(a=FlowLimits(concurrency=1)))
            await asyncio.sleep(1.5)
            assert len(harness.started) == 8 + 1
            harness.flow.set_limits(limits(a=FlowLimits(paused=True)))
            await asyncio.sleep(5)
            assert len(harness.started) == 9
            harness.flow.set_limits(limits())
            assert harness.flow.in_flight == 8
            await asyncio.sleep(10)
            assert harness.is_quiet()

        with_harness(scenario, concurrency_per_flow=8)

    def test_a_paused_namespace_is_held_and_the_others_are_not(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_limits(limits("one", paused=True))
            harness.submit("a", 5, "one")
            harness.submit("a", 5, "two")
            await asyncio.sleep(1)
            assert {item.namespace for _, item in harness.started} == {"two"}
            assert harness.flow.remove_waiting(1)[0][0].namespace == "one", "they may be parked"
            harness.flow.set_limits(limits("one"))
            await asyncio.sleep(1)
            assert len(harness.finished) == 9
            assert harness.flow._namespaces == {}

        with_harness(scenario)

    @pytest.mark.parametrize(
        ("paused", "resumed"),
        [
            (limits(a=FlowLimits(paused=True)), limits()),
            (limits(a=FlowLimits(paused=True, rate=100.0)), limits(a=FlowLimits(rate=100.0))),
            (limits(paused=True), limits()),
        ],
        ids=["flow", "limited flow", "namespace"],
    )
    def test_when_a_pause_ends_the_breaker_is_closed_whatever_was_known_of_the_receiver(
        self, paused: Namespace, resumed: Namespace
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 30)
            await asyncio.sleep(20)  # the pause of the breaker is 16 s, until second 31
            assert len(harness.started) == 5
            harness.flow.set_limits(paused)
            harness.result["a"] = OK
            await asyncio.sleep(2)
            assert len(harness.started) == 5
            harness.flow.set_limits(resumed)
            await asyncio.sleep(1)
            assert len(harness.started) == 30
            assert harness.is_quiet()

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_new_limits_without_a_pause_leave_the_breaker_open(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 30)
            await asyncio.sleep(20)
            assert len(harness.started) == 5
            harness.flow.set_limits(limits(a=FlowLimits(rate=100.0)))
            harness.flow.set_limits(limits())
            await asyncio.sleep(2)
            assert len(harness.started) == 5

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)

    def test_everything_can_be_paused(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_paused(True)
            harness.submit("a", 5)
            await asyncio.sleep(60)
            assert harness.started == []
            harness.flow.set_paused(False)
            await asyncio.sleep(1)
            assert len(harness.finished) == 5

        with_harness(scenario)

    def test_an_instance_uses_its_allowance_of_a_limit(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_limits(limits(a=FlowLimits(rate=4.0), b=FlowLimits(concurrency=9)))
            harness.seconds["b"] = 10
            harness.submit("a", 30)
            harness.submit("b", 30)
            assert harness.flow.limited_flows() == [
                LimitedFlow("n", "a", 4.0, None, 29, 1),
                LimitedFlow("n", "b", None, 9, 21, 9),
            ]
            harness.flow.set_allowance("n", "a", 0.5, None)
            harness.flow.set_allowance("n", "b", None, 12)
            await asyncio.sleep(5)
            assert harness.starts("a") == [0, 0.25, 2.25, 4.25]
            assert len(harness.starts("b")) == 9, "the limit holds, whatever is allowed"
            harness.flow.set_allowance("n", "a", 0.0, None)
            await asyncio.sleep(60)
            assert len(harness.starts("a")) == 4
            harness.flow.set_limits(limits(a=FlowLimits(rate=4.0), b=FlowLimits(concurrency=9)))
            await asyncio.sleep(60)
            assert len(harness.starts("a")) == 4, "limits that have not changed keep the allowance"
            harness.flow.set_allowance("n", "a", 4.0, None)
            await asyncio.sleep(1.1)
            assert len(harness.starts("a")) == 4 + 5, "at 0, 0.25, 0.5, 0.75 and 1 s"

        with_harness(scenario)

    def test_a_default_rate_makes_every_flow_a_limited_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 10
            harness.submit("a", 3)
            assert harness.flow.limited_flows() == [LimitedFlow("n", "a", 4, None, 2, 1)]

        with_harness(scenario, rate_per_flow=4)


class TestStatus:
    def test_flows_are_listed_in_order_page_by_page_with_their_state(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_limits(limits("n1", paused=False, c=FlowLimits(paused=True, rate=2.0)))
            harness.result["a"] = FAILS
            harness.seconds["b"] = 100
            for namespace in ("n2", "n1"):
                for key in "cba":
                    harness.submit(key, 2, namespace)
            await asyncio.sleep(0.5)
            statuses = harness.flow.flow_statuses(None, None, 4, now_ms=10_000)
            assert [(flow.namespace, flow.flow_key) for flow in statuses] == [
                ("n1", "a"),
                ("n1", "b"),
                ("n1", "c"),
                ("n2", "a"),
            ]
            a, b, c, _ = statuses
            assert (a.state, a.until_ms, a.last_error, a.waiting) == (FlowState.OPEN, 10_500, "HTTP 500", 1)
            assert (b.state, b.in_flight, b.until_ms, b.origin) == (FlowState.CLOSED, 1, None, "http://b")
            assert (c.state, c.rate, c.waiting, c.in_flight) == (FlowState.PAUSED, 2.0, 2, 0)
            after = harness.flow.flow_statuses(None, ("n2", "a"), 4, now_ms=0)
            assert [(flow.namespace, flow.flow_key) for flow in after] == [("n2", "b")], "c is done and forgotten"
            assert len(harness.flow.flow_statuses("n1", ("n1", "a"), 9, now_ms=0)) == 2
            harness.seconds["a"] = 10
            await asyncio.sleep(0.6)
            assert harness.flow.flow_statuses("n1", None, 1, now_ms=0)[0].state is FlowState.HALF_OPEN

        with_harness(scenario, breaker_failures=1, concurrency_per_flow=1)


class TestLog:
    def test_each_longer_pause_is_logged_once_and_the_end_of_the_failures(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = FAILS
            harness.submit("a", 20)
            await asyncio.sleep(20)
            harness.result["a"] = OK
            await asyncio.sleep(20)

        with caplog.at_level("INFO"):
            with_harness(
                scenario, breaker_failures=2, concurrency_per_flow=1, breaker_pause="1s", breaker_pause_max="4s"
            )
        said = "flow 'a' of namespace 'n' fails (HTTP 500): its breaker is open, its timers are held for "
        assert [record.getMessage() for record in caplog.records] == [
            f"{said}1 s; 18 wait",
            f"{said}2 s; 17 wait",
            f"{said}4 s; 16 wait",
            "flow 'a' of namespace 'n' answers again: its breaker is closed",
        ]

    def test_a_flow_that_fails_for_long_is_logged_once_a_minute_and_says_who_asked_for_the_pause(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.result["a"] = lambda item: FAILS if item.number == 3 else overloaded(503, 3_600)
            harness.submit("a", 20)
            await asyncio.sleep(250)

        with caplog.at_level("INFO"):
            with_harness(scenario, concurrency_per_flow=1)
        held = "its breaker is open, its timers are held for 60 s"
        asked = f"(HTTP 503): {held} as asked for by Retry-After"
        assert [record.getMessage() for record in caplog.records] == [
            f"flow 'a' of namespace 'n' fails {asked}; 19 wait",
            f"flow 'a' of namespace 'n' still fails {asked}; 18 wait",
            f"flow 'a' of namespace 'n' still fails {asked}; 17 wait",
            f"flow 'a' of namespace 'n' still fails (HTTP 500): {held}; 16 wait",
            f"flow 'a' of namespace 'n' still fails {asked}; 15 wait",
        ]

    def test_many_flows_that_fail_for_long_have_ten_lines_a_minute_and_a_count(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(harness: Harness) -> None:
            for number in range(25):
                harness.result[f"a{number}"] = overloaded(503, 60)
                harness.submit(f"a{number}", 20)
            await asyncio.sleep(150)

        with caplog.at_level("INFO"):
            with_harness(scenario, concurrency_per_flow=1)
        lines = [record.getMessage() for record in caplog.records]
        assert len([line for line in lines if " still fails " in line]) == 20
        assert lines[-11:][0] == "flows still fail whose breakers are open: 15 more lines were left out"
        assert len(lines) == 25 + 20 + 1


class TestDiscarding:
    def test_an_item_that_is_discarded_leaves_memory_at_once_and_its_queue_too(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_limits(limits(a=FlowLimits(paused=True)))
            harness.submit("a", 1_000)
            for ticket in range(999):
                harness.flow.discard(ticket)
                harness.flow.discard(ticket)
            assert harness.flow.waiting == harness.queue("a").waiting == 1
            assert len(harness.flow._items) == 1
            assert len(harness.queue("a").tickets) <= 70
            harness.flow.discard(999)
            assert harness.flows() == []
            harness.flow.discard(999)

        with_harness(scenario)

    def test_an_item_in_flight_is_not_discarded(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds["a"] = 1
            harness.submit("a")
            harness.flow.discard(0)
            await asyncio.sleep(2)
            assert len(harness.finished) == 1

        with_harness(scenario)


class TestTheSweep:
    def test_what_an_event_left_behind_is_found_within_a_second(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.flow.set_limits(limits(a=FlowLimits(paused=True)))
            harness.submit("a", 3)
            flow = harness.queue("a").flow
            flow.limit = None  # as if the event had been lost
            harness.flow.resume()
            assert harness.started == []
            harness.flow.sweep()
            harness.flow.sweep()
            await asyncio.sleep(0.1)
            assert len(harness.finished) == 3

        with_harness(scenario)
