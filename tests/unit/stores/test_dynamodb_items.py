"""Items of DynamoDB: their keys have the order of timers, and items decode to what was encoded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from duetime.domain.instants import LATEST_MS
from duetime.domain.timer import Extras, Position, Reached, TimerKey
from duetime.stores.dynamodb import rows as items
from duetime.testing import make_reached, make_timer

HALVES = st.integers(-(1 << 63), (1 << 63) - 1) | st.sampled_from([-(1 << 63), -1, 0, 1, (1 << 63) - 1])
POSITIONS = st.builds(Position, st.integers(-1, LATEST_MS), HALVES, HALVES)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=8)
ENDS = st.builds(
    lambda generation, occurrence, at_ms, purge_at_ms: make_reached(
        make_timer("t", generation=generation, extras=Extras(occurrence=occurrence)),
        reached_at_ms=at_ms,
        purge_at_ms=purge_at_ms,
    ),
    st.integers(1, (1 << 63) - 1) | st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 5),
    st.integers(0, 5),
)


@given(POSITIONS, POSITIONS)
def test_positions_have_the_order_of_their_bytes(one: Position, two: Position) -> None:
    first, second = (items.position_bytes(items.TIMER, position) for position in (one, two))
    assert (first < second) == (one < two)
    assert (items.after(items.TIMER, one) <= second) == (one < two), "the bound after a position excludes it"
    assert (second <= items.up_to(items.TIMER, one.execute_at_ms)) == (two.execute_at_ms <= one.execute_at_ms)
    assert (second <= items.before(items.TIMER, one.execute_at_ms)) == (two.execute_at_ms < one.execute_at_ms)


@given(POSITIONS, POSITIONS)
def test_reached_rows_sort_after_all_timers(one: Position, two: Position) -> None:
    assert items.after(items.TIMER, one) < items.position_bytes(items.REACHED, two)


@given(ENDS, ENDS)
def test_the_newest_reached_row_sorts_last_and_the_timer_after_it(one: Reached, two: Reached) -> None:
    ages = [(end.timer.generation, end.reached_at_ms, end.position) for end in (one, two)]
    keys = [items.reached_key(end) for end in (one, two)]
    assert (keys[0] < keys[1]) == (ages[0] < ages[1])
    assert max(keys) < items.timer_key(one.timer.key)


@given(st.builds(TimerKey, NAMES, NAMES), st.builds(TimerKey, NAMES, NAMES))
def test_the_key_prefix_of_a_timer_matches_no_other_timer(one: TimerKey, two: TimerKey) -> None:
    assert items.timer_key(one).startswith(items.key_prefix(two)) == (one == two)
    assert len(items.timer_key(one)) <= 1_024


def test_the_longest_names_fit_a_key() -> None:
    timer = make_timer("x" * 255, namespace="n" * 255)
    assert len(items.reached_key(make_reached(timer))) <= 1_024


def test_a_payload_is_stored_unescaped_in_its_own_attribute() -> None:
    timer = make_timer(payload='{"a": "\\"quoted\\""}')
    item = items.timer_item(3, timer)
    assert item["timer_payload"] == {"S": timer.payload}
    assert "quoted" not in item["timer_row"]["S"]
    assert (items.timer_of_item(item), items.position_of(item)) == (timer, timer.position)
    assert items.is_timer(item)
    reached = make_reached(timer)
    assert items.reached_of_item(items.reached_item(3, reached)) == reached
    assert not items.is_timer(items.reached_item(3, reached))
