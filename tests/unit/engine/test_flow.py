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


class Street:
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

    def place(self, name: str) -> Destination[Item]:
        return next(place for place in self.flow.destinations() if place.name == name)

    def is_quiet(self) -> bool:
        flow = self.flow
        return flow.waiting == flow.in_flight == 0 and not any(p.waiting or p.in_flight for p in flow.destinations())


def now() -> float:
    return asyncio.get_running_loop().time()


def on_a_street(story: Callable[[Street], Awaitable[None]], **settings: Any) -> None:
    async def told(clock: VirtualClock) -> None:
        street = Street(**settings)
        try:
            await story(street)
        finally:
            street.flow.stop()

    run_virtual(told)


class TestIsolation:
    def test_a_slow_destination_never_delays_another(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["slow"] = 3_600
            street.submit("slow", 500)
            for _ in range(100):
                street.submit("fast")
                await asyncio.sleep(1)
            assert street.starts("fast") == [float(second) for second in range(100)]

        on_a_street(story)

    def test_a_dead_destination_never_delays_another(self) -> None:
        async def story(street: Street) -> None:
            street.result["dead"] = BROKEN
            street.submit("dead", 500)
            for _ in range(100):
                street.submit("fast")
                await asyncio.sleep(1)
            assert street.starts("fast") == [float(second) for second in range(100)]
            assert street.place("dead").waiting > 400  # held, not burnt

        on_a_street(story)

    def test_one_destination_gets_no_more_than_its_cap_at_once(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 50)
            await asyncio.sleep(100)
            assert street.most_in_flight["a"] == 8
            assert len(street.finished) == 50
            assert now_finished(street) == 7  # as fast as the cap allows: 50 calls of a second, eight at a time

        on_a_street(story, concurrency_per_destination=8)

    def test_items_of_one_destination_start_in_the_order_they_came(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 50)
            await asyncio.sleep(100)
            assert [item.number for _, item in street.started] == list(range(50))

        on_a_street(story, concurrency_per_destination=4)

    def test_an_item_whose_settling_breaks_does_not_hold_up_those_behind_it(self) -> None:
        async def story(street: Street) -> None:
            def done(item: Item, result: AttemptResult) -> None:
                street._done(item, result)
                if item.number == 0:
                    raise ZeroDivisionError

            street.flow._done = done
            street.submit("a", 5)
            await asyncio.sleep(1)
            assert len(street.finished) == 5
            assert street.is_quiet()

        on_a_street(story, concurrency_per_destination=1)


def now_finished(street: Street) -> float:
    return round(street.finished[-1][0], 6)


class TestTurns:
    def test_all_together_get_no_more_than_the_total_cap(self) -> None:
        async def story(street: Street) -> None:
            for name in "abcde":
                street.seconds[name] = 1
                street.submit(name, 20)
            await asyncio.sleep(100)
            # One more for each destination that would have none under way (TestHangingDestinations says why).
            assert 10 <= street.most_in_flight["all"] <= 10 + 4
            assert len(street.finished) == 100
            assert now_finished(street) <= 10  # nothing of it is left unused
            assert street.is_quiet()

        on_a_street(story, concurrency_max=10)

    def test_at_the_total_cap_destinations_take_turns(self) -> None:
        async def story(street: Street) -> None:
            for name in ("big", "small", "tiny"):
                street.seconds[name] = 1
            street.submit("big", 1_000)
            street.submit("small", 10)
            street.submit("tiny", 1)
            await asyncio.sleep(30)
            order = [item.destination for _, item in street.started]
            # The big one was first and had all four; from then on each one that waits has every other turn.
            assert order[:4] == ["big"] * 4
            assert order.index("tiny") <= 6
            assert max(street.starts("small")) <= 6

        on_a_street(story, concurrency_max=4)

    def test_within_a_destination_namespaces_take_turns(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 100, "loud")
            street.submit("a", 3, "quiet")
            street.submit("a", 3, "calm")
            await asyncio.sleep(9)
            order = [item.namespace for _, item in street.started]
            assert order[:2] == ["loud", "loud"]
            assert sorted(order[2:8]) == ["calm", "calm", "loud", "loud", "quiet", "quiet"]

        on_a_street(story, concurrency_per_destination=1)

    def test_a_destination_that_waits_for_its_turn_does_not_lose_it_to_a_newcomer(self) -> None:
        async def story(street: Street) -> None:
            for name in "abc":
                street.seconds[name] = 1
            street.submit("a", 1)
            street.submit("b", 1)
            await asyncio.sleep(0.5)
            street.submit("c", 1)
            await asyncio.sleep(10)
            assert [item.destination for _, item in street.started] == ["a", "b", "c"]

        on_a_street(story, concurrency_max=1)

    def test_turns_at_the_cap_pass_over_a_destination_whose_breaker_is_open(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["good"] = 1
            street.result["bad"] = overloaded(503, 30)
            street.submit("good", 2)
            street.submit("bad", 5)
            street.submit("good", 20)
            await asyncio.sleep(15)
            assert len(street.starts("bad")) == 1
            assert len(street.starts("good")) == 22

        on_a_street(story, concurrency_max=2)


class TestBreaker:
    def test_it_opens_after_so_many_failures_in_a_row_and_holds_the_rest(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 100)
            await asyncio.sleep(0.5)
            assert len(street.started) == 3
            assert street.flow.waiting == 97
            assert street.flow.in_flight == 0

        on_a_street(story, breaker_failures=3, concurrency_per_destination=1)

    def test_a_success_in_between_starts_the_count_over(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: OK if item.number % 3 == 2 else FAILS
            street.submit("a", 99)
            await asyncio.sleep(0.5)
            assert len(street.finished) == 99

        on_a_street(story, breaker_failures=3, concurrency_per_destination=1)

    def test_it_probes_with_one_call_and_doubles_its_pause_up_to_the_limit(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 100)
            await asyncio.sleep(20)
            assert street.starts("a") == [0, 1, 3, 7, 11, 15, 19]
            assert street.most_in_flight["a"] == 1

        on_a_street(
            story, breaker_failures=1, concurrency_per_destination=1, breaker_pause="1s", breaker_pause_max="4s"
        )

    def test_while_a_probe_is_under_way_nothing_else_starts(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 50)
            await asyncio.sleep(0.5)
            begun = len(street.started)
            assert begun < 50
            street.seconds["a"] = 5
            await asyncio.sleep(3)
            street.submit("a", 10)
            assert len(street.started) == begun + 1

        on_a_street(story, breaker_failures=10, concurrency_per_destination=20)

    def test_a_probe_that_succeeds_closes_it_and_everything_held_goes_out_at_once(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 60)
            await asyncio.sleep(0.5)
            held = street.flow.waiting
            assert held > 0
            street.result["a"] = OK
            street.seconds["a"] = 0.1
            await asyncio.sleep(0.65)  # the probe is at 1.0 and takes 0.1
            assert street.flow.waiting == 0
            assert street.flow.in_flight == held - 1
            await asyncio.sleep(1)
            assert street.is_quiet()

        on_a_street(story, breaker_failures=10, concurrency_per_destination=30)

    def test_a_breaker_that_closed_opens_with_the_first_pause_again(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: OK if item.number == 3 else FAILS
            street.submit("a", 7)
            await asyncio.sleep(60)
            # Fails at 0, 1, 3; succeeds at 7 and fails at once with the next; then the pauses start over.
            assert street.starts("a") == [0, 1, 3, 7, 7, 8, 10]

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    @pytest.mark.parametrize("status", [429, 503])
    def test_retry_after_opens_it_at_once_and_is_honoured(self, status: int) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: overloaded(status, 7) if item.number == 0 else OK
            street.submit("a", 3)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 7, 7]

        on_a_street(story, concurrency_per_destination=1)

    def test_retry_after_is_bounded_by_the_longest_pause(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: overloaded(503, 86_400) if item.number == 0 else OK
            street.submit("a", 2)
            await asyncio.sleep(100)
            assert street.starts("a") == [0, 60]

        on_a_street(story, concurrency_per_destination=1)

    def test_an_answer_to_a_call_from_before_does_not_close_it_during_its_pause(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: overloaded(429, 10) if item.number == 0 else OK
            street.submit("a", 2)  # both under way at once
            street.seconds["a"] = 0.0
            await asyncio.sleep(0.1)
            street.submit("a", 1)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 0, 10]

        on_a_street(story, concurrency_per_destination=2)

    def test_a_call_from_before_that_asks_for_more_time_gets_it(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: overloaded(429, 5 * (item.number + 1)) if item.number < 3 else OK
            street.submit("a", 4)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 0, 0, 15]

        on_a_street(story, concurrency_per_destination=3)

    @pytest.mark.parametrize("status", [503, 429, 500, 408])
    def test_without_retry_after_a_failure_is_one_of_several(self, status: int) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: overloaded(status, None) if item.number < 2 else OK
            street.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(street.finished) == 5

        on_a_street(story, breaker_failures=3, concurrency_per_destination=1)

    def test_retry_after_on_an_ordinary_answer_says_nothing_about_the_destination(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = AttemptResult(Contact.ANSWERED, 200, retry_after_ms=60_000)
            street.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(street.finished) == 5

        on_a_street(story, concurrency_per_destination=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_what_never_reached_the_destination_does_not_count(self, contact: Contact) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = AttemptResult(contact)
            street.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(street.finished) == 50

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    @pytest.mark.parametrize("contact", [Contact.NOT_SENT, Contact.REFUSED])
    def test_nor_does_it_start_the_count_over(self, contact: Contact) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = lambda item: AttemptResult(contact) if item.number % 2 else FAILS
            street.submit("a", 50)
            await asyncio.sleep(0.1)
            assert [item.number for _, item in street.started] == [0, 1, 2, 3, 4]

        on_a_street(story, breaker_failures=3, concurrency_per_destination=1)

    @pytest.mark.parametrize("status", [200, 302, 400, 404, 410])
    def test_a_destination_that_answers_is_alive_whatever_it_says(self, status: int) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = AttemptResult(Contact.ANSWERED, status)
            street.submit("a", 50)
            await asyncio.sleep(0.1)
            assert len(street.finished) == 50

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    def test_a_breaker_outlives_an_empty_queue(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = overloaded(503, 20)
            street.submit("a", 1)
            await asyncio.sleep(10)
            assert street.is_quiet()
            street.result["a"] = OK
            street.submit("a", 1)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 20]

        on_a_street(story)

    def test_too_many_requests_and_a_request_timeout_count_as_failures(self) -> None:
        async def story(street: Street) -> None:
            for status in (408, 429, 500):
                street.result[str(status)] = AttemptResult(Contact.ANSWERED, status)
                street.submit(str(status), 50)
            await asyncio.sleep(0.1)
            assert [len(street.starts(name)) for name in ("408", "429", "500")] == [3, 3, 3]

        on_a_street(story, breaker_failures=3, concurrency_per_destination=1)

    def test_only_an_overloaded_destination_can_ask_for_time(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = AttemptResult(Contact.ANSWERED, 500, retry_after_ms=60_000)
            street.submit("a", 2)
            await asyncio.sleep(1)
            assert street.starts("a") == [0, 0]

        on_a_street(story, concurrency_per_destination=1)

    def test_one_that_asked_for_time_and_fails_after_it_is_left_alone_again(self) -> None:
        async def story(street: Street) -> None:
            outcomes = [overloaded(503, 4), FAILS, OK]
            street.result["a"] = lambda item: outcomes[item.number]
            street.submit("a", 3)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 4, 12], "a single failure opens it again, for twice as long"

        on_a_street(story, concurrency_per_destination=1, breaker_failures=50, breaker_pause="1s")

    def test_however_many_wait_behind_a_breaker_there_is_one_wake_up(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a")
            await asyncio.sleep(0.1)
            calls: list[float] = []
            loop = asyncio.get_running_loop()
            call_at = loop.call_at
            loop.call_at = lambda at, *rest: calls.append(at) or call_at(at, *rest)  # type: ignore[method-assign, func-returns-value]
            street.submit("a", 20)
            assert len(calls) == 1
            waker = street.place("a").waker
            assert waker is not None
            street.flow.stop()
            assert waker.cancelled()

        on_a_street(story, breaker_failures=1)


class TestCongestion:
    """Outcomes come in faster than they can be recorded."""

    def test_who_does_not_say_that_it_is_is_not(self) -> None:
        async def story(street: Street) -> None:
            config = load_config(environ={}).delivery
            flow: Flow[Item] = Flow(config, deliver=street._deliver, wanted=lambda _: True, done=street._done)
            flow.submit(Item(0, "a", "n"), "a", "n")
            await asyncio.sleep(1)
            assert len(street.finished) == 1

        on_a_street(story)

    def test_nothing_is_started_until_it_is_over_and_then_everything(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 3)
            street.congested = True
            street.submit("b", 2)
            await asyncio.sleep(5)
            assert [item.destination for _, item in street.started] == ["a"], "what was started goes on, no more"
            assert {place.name for place in street.flow.destinations()} == {"a", "b"}, "nobody is forgotten"
            street.flow.resume()
            assert len(street.started) == 1
            street.congested = False
            street.flow.resume()
            await asyncio.sleep(5)
            assert len(street.finished) == 5
            assert street.is_quiet()

        on_a_street(story, concurrency_per_destination=1)


class TestRate:
    def test_slow_calls_keep_the_pace_too(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 10
            street.submit("a", 4)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 0.5, 1, 1.5]

        on_a_street(story, rate_per_destination=2)

    def test_calls_to_one_destination_keep_the_pace(self) -> None:
        async def story(street: Street) -> None:
            street.submit("a", 20)
            street.submit("b", 1)
            await asyncio.sleep(100)
            assert street.starts("a") == [pytest.approx(number / 4) for number in range(20)]
            assert street.starts("b") == [0]

        on_a_street(story, rate_per_destination=4)

    def test_the_pace_holds_between_items_that_come_one_by_one(self) -> None:
        async def story(street: Street) -> None:
            for _ in range(99):
                street.submit("a")
                await asyncio.sleep(0.01)
            assert street.starts("a") == [0, 0.25, 0.5, 0.75]
            await asyncio.sleep(100)
            assert len(street.starts("a")) == 99

        on_a_street(story, rate_per_destination=4)

    def test_the_pace_holds_for_a_destination_that_is_idle_in_between(self) -> None:
        async def story(street: Street) -> None:
            for _ in range(10):
                while not street.is_quiet():
                    await asyncio.sleep(0.01)
                street.submit("a")
            assert now() == pytest.approx(8 / 4, abs=0.1)

        on_a_street(story, rate_per_destination=4)

    def test_what_was_not_used_is_not_saved_up(self) -> None:
        async def story(street: Street) -> None:
            street.submit("a", 1)
            await asyncio.sleep(3_600)
            street.submit("a", 10)
            await asyncio.sleep(0.9)
            assert len(street.starts("a")) == 1 + 4

        on_a_street(story, rate_per_destination=4)

    def test_wakers_that_come_late_do_not_slow_it_down(self) -> None:
        async def story(street: Street) -> None:
            loop = asyncio.get_running_loop()
            exactly = loop.call_at
            # As real loops do: no wake-up between two ticks of three milliseconds.
            loop.call_at = lambda at, *rest, **kw: exactly((at // 0.003 + 1) * 0.003, *rest, **kw)  # type: ignore[method-assign]
            street.submit("a", 3_000)
            await asyncio.sleep(1)
            assert 990 <= len(street.started) <= 1_010
            loop.call_at = exactly  # type: ignore[method-assign]

        on_a_street(story, rate_per_destination=1_000)

    def test_the_pace_goes_on_where_a_breaker_closed(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 0.01
            street.result["a"] = lambda item: FAILS if item.number < 1 else OK
            street.submit("a", 30)
            await asyncio.sleep(1.0 + 28 / 4 + 0.5)
            assert len(street.started) == 30
            assert street.starts("a")[1] == pytest.approx(1.01)

        on_a_street(story, rate_per_destination=4, breaker_failures=1)


class TestTakingBack:
    def test_what_waits_behind_an_open_breaker_comes_back_the_last_first(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 20)
            await asyncio.sleep(0.5)
            taken = street.flow.take_back(5)
            assert [item.number for item, _ in taken] == [19, 18, 17, 16, 15]
            assert all(seconds >= 30 for _, seconds in taken)
            assert street.flow.waiting == street.place("a").waiting == 20 - 1 - 5

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    def test_a_destination_that_keeps_up_keeps_its_items(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["quick"] = 0.01
            street.submit("quick", 1_000)
            for _ in range(3):
                await asyncio.sleep(1)
                street.flow.measure()
            assert 0 < street.flow.waiting < 1_000
            assert street.flow.take_back(1_000) == []

        on_a_street(story, concurrency_per_destination=1)

    def test_a_destination_far_behind_gives_some_up_and_the_others_do_not(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["slow"] = 10
            street.submit("slow", 100)
            street.seconds["quick"] = 0.01
            street.submit("quick", 1_000)
            for _ in range(3):
                await asyncio.sleep(1)
                street.flow.measure()
            taken = street.flow.take_back(500)
            assert {item.destination for item, _ in taken} == {"slow"}
            assert len(taken) == 99

        on_a_street(story, concurrency_per_destination=1)

    def test_the_namespace_with_the_most_gives_up_first(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 10, "loud")
            street.submit("a", 2, "quiet")
            await asyncio.sleep(0.5)
            assert {item.namespace for item, _ in street.flow.take_back(6)} == {"loud"}

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    def test_the_more_are_taken_the_wider_they_are_spread_up_to_an_hour(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 1)
            await asyncio.sleep(0.5)
            street.place("a").taken_back = 100_000
            street.submit("a", 2)
            assert [seconds for _, seconds in street.flow.take_back(1)] == [pytest.approx(130, abs=1)]
            street.place("a").taken_back = 100_000_000
            assert [seconds for _, seconds in street.flow.take_back(1)] == [3_600]

        on_a_street(story, breaker_failures=1)

    def test_each_item_that_is_taken_back_widens_the_spread_until_the_breaker_closes(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 10)
            await asyncio.sleep(0.5)
            spread = [seconds for _, seconds in street.flow.take_back(3)]
            assert spread == [pytest.approx(30.001), pytest.approx(30.002), pytest.approx(30.003)]
            street.result["a"] = OK
            street.seconds["a"] = 100
            await asyncio.sleep(150)
            assert len(street.finished) == 2, "the first of them has closed the breaker"
            assert street.place("a").taken_back == 0

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    def test_an_answer_while_the_breaker_is_closed_leaves_the_spread_as_it_is(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 40
            street.submit("a", 5)
            for _ in range(3):
                await asyncio.sleep(1)
                street.flow.measure()
            assert len(street.flow.take_back(2)) == 2
            await asyncio.sleep(40)
            assert [seconds for _, seconds in street.flow.take_back(1)] == [pytest.approx(30.003)]

        on_a_street(story, concurrency_per_destination=1)

    def test_a_destination_that_gave_everything_back_is_called_with_what_comes_then(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 5, "one")
            await asyncio.sleep(0.5)
            assert len(street.flow.take_back(10)) == 4
            street.result["a"] = OK
            street.submit("a", 1, "two")
            await asyncio.sleep(60)
            assert len(street.finished) == 2
            assert street.is_quiet()

        on_a_street(story, breaker_failures=1, concurrency_per_destination=1)

    def test_what_will_be_called_within_half_a_minute_is_not_taken_back(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 1)
            await asyncio.sleep(0.5)
            street.place("a").per_second = 0.1
            street.submit("a", 2)
            assert street.flow.take_back(9) == []
            street.submit("a", 1)
            assert len(street.flow.take_back(9)) == 3

        on_a_street(story, concurrency_per_destination=1)

    def test_how_fast_a_destination_is_follows_what_it_takes_each_second(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 0.1
            street.submit("a", 1_000)
            speeds: list[float] = []
            await asyncio.sleep(0.05)
            for second in range(5):
                if second == 3:
                    street.seconds["a"] = 100
                await asyncio.sleep(1)
                street.flow.measure()
                speeds.append(street.place("a").per_second)
            assert speeds[0] == float("inf"), "the first second was not a whole one"
            assert speeds[1:] == [10, 10, 5.5, 2.75]

        on_a_street(story, concurrency_per_destination=1)


class TestNothingIsLeftBehind:
    def test_a_call_under_way_is_referenced_or_it_might_be_collected(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 3)
            assert len(street.flow._workers) == 3

        on_a_street(story)

    def test_a_destination_with_a_call_under_way_is_not_forgotten_and_keeps_its_cap(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 10
            street.submit("a", 1)
            await asyncio.sleep(0.1)
            street.seconds["a"] = 1
            street.submit("a", 1)
            await asyncio.sleep(2)
            street.submit("a", 3)
            assert street.flow.in_flight == street.place("a").in_flight == 2

        on_a_street(story, concurrency_per_destination=2)

    def test_what_is_remembered_of_a_destination_outlives_newcomers(self) -> None:
        async def story(street: Street) -> None:
            street.result["a"] = FAILS
            street.submit("a", 2)
            await asyncio.sleep(0.1)
            street.submit("b")
            street.submit("a", 5)
            await asyncio.sleep(0.1)
            assert len(street.starts("a")) == 3

        on_a_street(story, concurrency_per_destination=1, breaker_failures=3)

    def test_busy_destinations_are_not_all_looked_at_again_for_every_newcomer(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 4)

        async def story(street: Street) -> None:
            limits: list[int] = []
            for number in range(10):
                street.seconds[f"host-{number}"] = 60
                street.submit(f"host-{number}")
                limits.append(street.flow._forget_at)
            assert limits == [4, 4, 4, 4, 8, 8, 8, 8, 16, 16]
            await asyncio.sleep(100)
            street.flow._forget_idle()
            assert street.flow._forget_at == 4

        on_a_street(story)

    def test_what_has_waited_longest_is_the_head_of_each_queue(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = street.seconds["b"] = 10
            street.submit("a", 3, "one")
            street.submit("a", 2, "two")
            street.submit("b", 2, "one")
            assert [item.number for item in street.flow.heads()] == [1, 3, 6]

        on_a_street(story, concurrency_per_destination=1)

    def test_items_no_longer_wanted_are_dropped_without_a_call(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 10)
            street.unwanted = {2, 3, 4, 9}
            await asyncio.sleep(60)
            assert [item.number for _, item in street.started] == [0, 1, 5, 6, 7, 8]
            assert street.is_quiet()

        on_a_street(story, concurrency_per_destination=2)

    def test_an_unwanted_item_uses_up_no_turn_of_the_pace(self) -> None:
        async def story(street: Street) -> None:
            street.unwanted = {1, 2, 3}
            street.submit("a", 5)
            await asyncio.sleep(60)
            assert street.starts("a") == [0, 1]

        on_a_street(story, rate_per_destination=1)

    def test_after_all_is_done_there_are_no_workers_and_no_counts(self) -> None:
        async def story(street: Street) -> None:
            street.result["bad"] = lambda item: FAILS if now() < 30 else OK
            street.result["gone"] = lambda item: BROKEN if now() < 30 else OK
            for name in ("good", "bad", "slow", "gone"):
                street.seconds[name] = 2 if name == "slow" else 0.01
                street.submit(name, 100, "one")
                street.submit(name, 100, "two")
            street.unwanted = set(range(50, 150))
            await asyncio.sleep(1_000)
            assert street.is_quiet()
            assert street.flow.destinations() == []
            assert not street.flow._workers
            assert not street.flow._starved
            assert len(street.finished) == 700

        on_a_street(story, concurrency_max=20, concurrency_per_destination=8, breaker_pause_max="4s")

    def test_after_stop_nothing_starts_and_what_is_in_flight_lands(self) -> None:
        async def story(street: Street) -> None:
            street.seconds["a"] = 1
            street.submit("a", 10)
            street.result["b"] = FAILS
            street.submit("b", 10)
            await asyncio.sleep(0.5)
            begun = len(street.started)
            street.flow.stop()
            street.submit("c", 1)
            await asyncio.sleep(100)
            assert len(street.started) == len(street.finished) == begun
            assert street.flow.in_flight == 0

        on_a_street(story, concurrency_per_destination=2, breaker_failures=1)

    def test_a_destination_that_is_done_is_forgotten(self) -> None:
        async def story(street: Street) -> None:
            for number in range(1_000):
                street.submit(f"host-{number}")
            await asyncio.sleep(1)
            assert street.flow.destinations() == []

        on_a_street(story)

    def test_the_number_of_idle_destinations_remembered_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 100)

        async def story(street: Street) -> None:
            street.seconds["busy"] = 3_600
            street.submit("busy")
            for number in range(1_000):
                street.result[f"host-{number}"] = FAILS  # which is remembered of them
                street.submit(f"host-{number}")
                await asyncio.sleep(0.01)
                assert len(street.flow.destinations()) <= 101
            assert "busy" in [place.name for place in street.flow.destinations()]

        on_a_street(story)

    def test_a_destination_forgotten_while_it_settles_and_called_again_keeps_its_cap(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 1)

        async def story(street: Street) -> None:
            def done(item: Item, result: AttemptResult) -> None:
                if item.number == 0:
                    street.seconds["a"] = street.seconds["b"] = 1
                    street.submit("b")  # one too many: what is idle goes
                    street.submit("a")

            street.flow._done = done
            street.submit("a")
            await asyncio.sleep(0.5)
            street.submit("a", 3)
            await asyncio.sleep(10)
            assert street.most_in_flight["a"] == 1
            assert len(street.starts("a")) == 5

        on_a_street(story, concurrency_per_destination=1)

    def test_busy_destinations_are_never_forgotten_however_many(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(flow_module, "_IDLE_DESTINATIONS_MAX", 100)

        async def story(street: Street) -> None:
            for number in range(1_000):
                street.submit(f"host-{number}", 2)
            assert len(street.flow.destinations()) == 1_000
            await asyncio.sleep(1)
            assert len(street.finished) == 2_000
            assert street.is_quiet()

        on_a_street(story, concurrency_max=5)


class TestHangingDestinations:
    def test_many_that_hang_do_not_delay_one_that_answers(self) -> None:
        """All slots of the total cap are held by calls that hang; a healthy destination still gets its turn."""

        async def story(street: Street) -> None:
            for number in range(20):
                street.seconds[f"hangs{number}"] = 30
                street.submit(f"hangs{number}", 64)
            await asyncio.sleep(0.1)
            street.seconds["healthy"] = 0.01
            street.submit("healthy", 20)
            await asyncio.sleep(1)
            assert sum(item.destination == "healthy" for _, item in street.finished) == 20

        on_a_street(story)

    def test_they_get_no_more_than_as_many_calls_again_as_the_cap(self) -> None:
        async def story(street: Street) -> None:
            for number in range(50):
                street.seconds[f"hangs{number}"] = 30
                street.submit(f"hangs{number}", 2)
            await asyncio.sleep(0.1)
            assert street.flow.in_flight == 20
            await asyncio.sleep(1_000)
            assert len(street.finished) == 100

        on_a_street(story, concurrency_max=10)

    def test_two_namespaces_of_a_destination_take_turns(self) -> None:
        async def story(street: Street) -> None:
            street.submit("a", 3, "one")
            street.submit("a", 3, "two")
            await asyncio.sleep(1)
            assert [item.namespace for _, item in street.started] == ["one", "one", "two", "one", "two", "two"]

        on_a_street(story, concurrency_per_destination=1)
