"""Which timers of a shard are in memory: the horizon and the backlog."""

from __future__ import annotations

import pytest

from duetime.domain.timer import BEFORE_ALL, Position
from duetime.engine.window import Backlog, Load, Window, end_of

NOW_MS = 1_000_000


def at(ms: int, low: int = 0) -> Position:
    return Position(ms, 0, low)


def window_until(horizon: Position, backlog: Backlog | None = None) -> Window:
    window = Window(horizon)
    window.backlog = backlog
    return window


class TestLoadingAhead:
    def test_the_last_page_moves_the_horizon_to_the_end_of_what_was_asked_for(self) -> None:
        window = Window(BEFORE_ALL)
        load = window.begin_load(NOW_MS + 60_000)
        assert load == Load(BEFORE_ALL, end_of(NOW_MS + 60_000), False)
        assert window.end_load(load, None, NOW_MS) == end_of(NOW_MS + 60_000)
        assert (window.horizon, window.backlog) == (end_of(NOW_MS + 60_000), None)

    @pytest.mark.parametrize("cut", [at(NOW_MS + 1), end_of(NOW_MS)])
    def test_a_page_that_ends_now_or_later_moves_the_horizon_to_its_end(self, cut: Position) -> None:
        window = Window(BEFORE_ALL)
        assert window.end_load(window.begin_load(NOW_MS + 60_000), cut, NOW_MS) == cut
        assert (window.horizon, window.backlog) == (cut, None)

    def test_a_page_that_ends_in_the_past_leaves_a_backlog_up_to_now(self) -> None:
        window = Window(BEFORE_ALL)
        assert window.end_load(window.begin_load(NOW_MS + 60_000), at(NOW_MS, 5), NOW_MS) == at(NOW_MS, 5)
        assert window.horizon == end_of(NOW_MS)
        assert window.backlog == Backlog(at(NOW_MS, 5), end_of(NOW_MS))
        assert window.complete_until == at(NOW_MS, 5)

    def test_a_backlog_is_widened_by_the_next_one(self) -> None:
        window = window_until(at(500), Backlog(at(100), at(400)))
        window.end_load(window.begin_load(NOW_MS + 60_000), at(700), NOW_MS)
        assert (window.horizon, window.backlog) == (end_of(NOW_MS), Backlog(at(100), end_of(NOW_MS)))


class TestLoadingTheBacklog:
    def test_it_is_loaded_page_by_page_and_then_there_is_none(self) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        load = window.begin_backlog_load()
        assert load == Load(at(100), at(400), True)
        assert window.end_load(load, at(200), NOW_MS) == at(200)
        assert window.backlog == Backlog(at(200), at(400))
        assert window.end_load(window.begin_backlog_load(), None, NOW_MS) == at(400)
        assert window.backlog is None
        assert window.horizon == end_of(NOW_MS)

    @pytest.mark.parametrize("following", [at(400), at(400, 1), at(900)])
    def test_a_page_that_goes_beyond_it_ends_it(self, following: Position) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        assert window.end_load(window.begin_backlog_load(), following, NOW_MS) == at(400)
        assert window.backlog is None

    def test_what_was_added_before_the_page_meanwhile_is_loaded_again(self) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        load = window.begin_backlog_load()
        window.add_to_backlog(at(50))
        window.end_load(load, None, NOW_MS)
        assert window.backlog == Backlog(at(50, -1), at(400))

    def test_what_was_added_behind_the_page_meanwhile_stays(self) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        load = window.begin_backlog_load()
        window.add_to_backlog(at(500))
        assert window.end_load(load, None, NOW_MS) == at(400)
        assert window.backlog == Backlog(at(400), at(500))


class TestTimersThatLeaveMemory:
    def test_the_backlog_includes_a_timer_that_left_memory_and_no_earlier_one(self) -> None:
        window = Window(end_of(NOW_MS))
        window.add_to_backlog(at(300, 7))
        assert window.backlog == Backlog(at(300, 6), at(300, 7))
        window.add_to_backlog(at(200))
        assert window.backlog == Backlog(at(200, -1), at(300, 7))
        window.add_to_backlog(at(250))
        assert window.backlog == Backlog(at(200, -1), at(300, 7))

    def test_the_lowest_number_that_a_database_can_store_is_not_decreased(self) -> None:
        window = Window(end_of(NOW_MS))
        window.add_to_backlog(at(300, -(2**63)))
        assert window.backlog == Backlog(end_of(299), at(300, -(2**63)))

    def test_if_the_horizon_moves_back_behind_a_backlog_what_follows_is_loaded_ahead_again(self) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        window.shrink(400)
        assert (window.horizon, window.backlog) == (end_of(400), Backlog(at(100), at(400)))
        window.shrink(300)
        assert (window.horizon, window.backlog) == (end_of(300), Backlog(at(100), end_of(300)))
        window.shrink(99)
        assert (window.horizon, window.backlog) == (end_of(99), None)
        window.shrink(200)
        assert window.horizon == end_of(99)

    def test_what_lies_between_the_horizon_and_a_backlog_after_it_is_loaded_ahead(self) -> None:
        """A timer of which a write was pending stays in memory when the horizon moves back, and may leave it later."""
        window = Window(end_of(NOW_MS))
        window.shrink(300)
        window.add_to_backlog(at(400))
        assert (window.horizon, window.backlog) == (end_of(300), Backlog(at(400, -1), at(400)))
        assert window.complete_until == end_of(300), "the low-water mark must not pass what lies between"
        assert window.end_load(window.begin_backlog_load(), None, NOW_MS) == at(400)
        assert (window.horizon, window.backlog) == (end_of(300), None), "only the backlog was loaded"
        window.add_to_backlog(at(400))
        load = window.begin_load(NOW_MS + 60_000)
        assert load.after == end_of(300)
        assert window.end_load(load, at(350), NOW_MS) == at(350)
        assert (window.horizon, window.backlog) == (end_of(NOW_MS), Backlog(at(350), end_of(NOW_MS)))

    def test_a_shard_that_was_dropped_has_nothing_in_memory(self) -> None:
        window = window_until(end_of(NOW_MS), Backlog(at(100), at(400)))
        window.clear()
        assert (window.horizon, window.backlog, window.complete_until) == (BEFORE_ALL, None, BEFORE_ALL)
