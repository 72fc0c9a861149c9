"""The machine's clocks, and the bounds that answers of another clock give."""

from __future__ import annotations

import time

from duetime.clock import OffsetBounds, SystemClock


def test_both_clocks_of_the_machine_count_milliseconds() -> None:
    before_ms = time.time() * 1_000
    wall_ms = SystemClock().wall_ms()
    assert isinstance(wall_ms, int)
    assert before_ms - 1_000 <= wall_ms <= time.time() * 1_000 + 1_000
    boot_clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    before_ms = time.clock_gettime(boot_clock) * 1_000
    boot_ms = SystemClock().boot_ms()
    assert isinstance(boot_ms, int)
    assert before_ms - 1 <= boot_ms <= time.clock_gettime(boot_clock) * 1_000 + 1


class TestOffsetBounds:
    def test_the_bounds_are_unknown_before_the_first_answer(self) -> None:
        bounds = OffsetBounds()
        assert not bounds.is_known
        assert (bounds.low_ms, bounds.high_ms, bounds.width_ms) == (0, 0, 0)
        bounds.saw(1_000, 1_002, 500, 510)
        assert bounds.is_known is True
        assert (bounds.low_ms, bounds.high_ms, bounds.width_ms) == (490, 502, 12)

    def test_several_answers_give_narrower_bounds(self) -> None:
        bounds = OffsetBounds()
        bounds.saw(1_000, 1_000, 500, 510)
        bounds.saw(1_000, 1_000, 505, 510)
        assert (bounds.low_ms, bounds.high_ms) == (490, 495)
        bounds.saw(1_004, 1_004, 505, 510)
        assert (bounds.low_ms, bounds.high_ms) == (494, 495)

    def test_the_bounds_widen_by_half_a_millisecond_per_second(self) -> None:
        bounds = OffsetBounds()
        bounds.saw(1_000, 1_000, 500, 500)
        bounds.saw(11_000, 11_000, 10_400, 10_600)
        assert (bounds.low_ms, bounds.high_ms) == (500 - 5.05, 500 + 5.05)

    def test_an_answer_that_comes_out_of_order_widens_nothing(self) -> None:
        bounds = OffsetBounds()
        bounds.saw(11_000, 11_000, 10_400, 10_600)
        bounds.saw(1_000, 1_000, 400, 600)
        assert (bounds.low_ms, bounds.high_ms) == (400, 600)
        bounds.saw(13_000, 13_000, 12_400, 12_600)
        assert (bounds.low_ms, bounds.high_ms) == (400, 600), "widened by a millisecond and bounded again"
        bounds.saw(13_000, 13_000, 12_000, 12_600)
        assert (bounds.low_ms, bounds.high_ms) == (400, 600), "no time has passed since the newest"

    def test_an_answer_that_contradicts_the_bounds_replaces_them(self) -> None:
        bounds = OffsetBounds()
        bounds.saw(1_000, 1_000, 500, 500)
        bounds.saw(2_000, 2_000, 490, 500)
        assert (bounds.low_ms, bounds.high_ms) == (1_500, 1_510)
        bounds.saw(1_000, 1_000, 490, 500)
        assert (bounds.low_ms, bounds.high_ms) == (500, 510)

    def test_bounds_that_are_replaced_are_at_most_follow_ms_wide(self) -> None:
        bounds = OffsetBounds(follow_ms=5)
        bounds.saw(1_000, 1_000, 500, 500)
        bounds.saw(2_000, 2_000, 400, 500)
        assert (bounds.low_ms, bounds.high_ms) == (1_500, 1_505)
        bounds.saw(1_000, 1_000, 400, 500)
        assert (bounds.low_ms, bounds.high_ms) == (595, 600)

    def test_an_answer_that_just_touches_the_bounds_does_not_contradict_them(self) -> None:
        bounds = OffsetBounds(follow_ms=5)
        bounds.saw(1_000, 1_000, 500, 600)
        bounds.saw(1_000, 1_050, 450, 500)
        assert (bounds.low_ms, bounds.high_ms) == (500, 500)
        bounds = OffsetBounds(follow_ms=5)
        bounds.saw(1_000, 1_000, 500, 600)
        bounds.saw(900, 1_000, 600, 600)
        assert (bounds.low_ms, bounds.high_ms) == (400, 400)
