"""The limits of one flow and this instance's part of them: when the next call may start."""

from __future__ import annotations

from math import inf

from duetime.domain.timer import FlowLimits
from duetime.engine.flow_limits import Limit


def test_calls_of_a_rate_are_spread_evenly() -> None:
    limit = Limit(FlowLimits(rate=4.0), 0)
    limit.call_started(10.0)
    assert limit.next_call == 10.25
    limit.call_started(10.27)
    assert limit.next_call == 10.5, "a wake-up that comes a little late does not lower the rate"
    limit.call_started(11.0)
    assert limit.next_call == 11.25, "what was not used is not made up for"


def test_without_any_rate_nothing_starts_and_the_last_call_counts_when_it_comes_back() -> None:
    limit = Limit(FlowLimits(rate=0.5), 0)
    limit.call_started(10.0)
    limit.allow(0.0, None, 10.1)
    assert limit.next_call == inf
    limit.allow(0.5, None, 11.0)
    assert limit.next_call == 12.0
    limit.allow(0.0, None, 13.0)
    limit.allow(0.5, None, 20.0)
    assert limit.next_call <= 20.0, "long after the last call the first one starts at once"


def test_a_higher_rate_brings_the_next_call_forward() -> None:
    limit = Limit(FlowLimits(rate=10.0), 0)
    limit.allow(0.1, None, 10.0)
    limit.call_started(10.0)
    assert limit.next_call == 20.0
    limit.allow(10.0, None, 11.0)
    assert limit.next_call == 11.1


def test_an_allowance_is_never_more_than_the_limit() -> None:
    limit = Limit(FlowLimits(rate=2.0, concurrency=3), 0)
    limit.allow(5.0, 9, 0.0, 1_000)
    assert (limit.allowed_rate, limit.allowed_concurrency, limit.allowed_until_ms) == (2.0, 3, 1_000)


def test_new_limits_end_the_allowance_of_the_old_ones() -> None:
    limit = Limit(FlowLimits(concurrency=3), 0)
    limit.allow(None, 3, 0.0, 1_000)
    limit.set(FlowLimits(concurrency=1), 0)
    assert limit.allowed_until_ms == 0


def test_a_pause_that_begins_and_ends_does_not_allow_a_call_before_its_time() -> None:
    limit = Limit(FlowLimits(rate=2.0), 0)
    limit.call_started(100.0)
    limit.set(FlowLimits(rate=2.0, paused=True), 0)
    limit.set(FlowLimits(rate=2.0), 0)
    assert limit.next_call == 100.5
    limit.set(FlowLimits(rate=4.0), 0)
    assert limit.next_call == 0.0, "another rate starts anew"
