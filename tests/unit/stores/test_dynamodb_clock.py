"""DynamoDB's clock, which reports whole seconds only: how exactly and how soon it is known."""

from __future__ import annotations

import random

from duetime.stores.dynamodb.clock import NARROWEST_MS, ServerClock

AHEAD_MS = 1_700_000_000_123  # difference of the service's clock to our boot clock


def ask(clock: ServerClock, at_ms: int, took_ms: int = 8, ahead_ms: int = AHEAD_MS, answered_after_ms: int = 4) -> None:
    date_ms = (at_ms + answered_after_ms + ahead_ms) // 1_000 * 1_000
    clock.observe(date_ms, at_ms, at_ms + took_ms)


def test_after_one_answer_the_error_is_at_most_half_a_second() -> None:
    for at_ms in range(0, 2_000, 7):
        clock = ServerClock()
        assert not clock.is_known
        ask(clock, at_ms)
        assert clock.is_known
        assert abs(clock.now_ms(at_ms) - (at_ms + AHEAD_MS)) <= 505


def test_after_heartbeats_twice_a_second_the_error_is_much_smaller() -> None:
    rng = random.Random(1)
    for _ in range(50):
        clock, at_ms = ServerClock(), rng.randrange(1_000)
        for _ in range(200):
            at_ms += 500 + rng.randrange(20)
            ask(clock, at_ms, took_ms=rng.randrange(5, 30))
        assert clock.width_ms < 150
        assert abs(clock.now_ms(at_ms) - (at_ms + AHEAD_MS)) <= 80


def test_the_error_is_never_larger_than_the_reported_width() -> None:
    rng = random.Random(2)
    for _ in range(200):
        clock, at_ms = ServerClock(), 0
        for _ in range(50):
            at_ms += rng.choice((1, 40, 500, 3_000))
            took_ms = rng.choice((2, 10, 200, 1_400))
            ask(clock, at_ms, took_ms, answered_after_ms=rng.randint(0, took_ms))
            now_ms = at_ms + took_ms
            assert abs(clock.now_ms(now_ms) - (now_ms + AHEAD_MS)) <= clock.width_ms / 2 + 1


def test_a_clock_that_drifts_is_followed() -> None:
    clock, ahead_ms = ServerClock(), float(AHEAD_MS)
    for at_ms in range(0, 3_600_000, 507):
        ahead_ms += 507 / 1_000 * 0.2
        ask(clock, at_ms, ahead_ms=int(ahead_ms))
    assert abs(clock.now_ms(at_ms) - (at_ms + ahead_ms)) < 100


def test_a_clock_that_jumps_is_followed_within_some_answers() -> None:
    for jump_ms in (-7_000, -600, 600, 7_000):
        clock = ServerClock()
        for at_ms in range(0, 60_000, 507):
            ask(clock, at_ms)
        for at_ms in range(60_000, 90_000, 507):
            ask(clock, at_ms, ahead_ms=AHEAD_MS + jump_ms)
        assert abs(clock.now_ms(at_ms) - (at_ms + AHEAD_MS + jump_ms)) < 100


def test_small_differences_between_servers_do_not_make_the_clock_jump() -> None:
    clock, rng = ServerClock(), random.Random(3)
    for at_ms in range(0, 60_000, 107):
        ask(clock, at_ms)
    for at_ms in range(60_000, 120_000, 107):
        ask(clock, at_ms, ahead_ms=AHEAD_MS + rng.randint(-10, 10))
        assert abs(clock.now_ms(at_ms) - (at_ms + AHEAD_MS)) < 40 + NARROWEST_MS
