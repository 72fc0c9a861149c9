"""Timers as rows: written values are read back, in the order of columns that every adapter relies on."""

from __future__ import annotations

import msgspec
import pytest

from duetime.domain.instants import LATEST_MS
from duetime.domain.timer import NO_EXTRAS, Extras, Missed, Outcome, RetryPolicy, Timer
from duetime.stores.rows import (
    FIRST_MS,
    KEY_COLUMNS,
    LARGEST,
    LAST_MS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    TIMES,
    bound_ms,
    reached_of,
    reached_values,
    timer_of,
    timer_values,
)
from duetime.testing import make_reached, make_timer

FULL = make_timer(
    "full",
    1_000,
    namespace="orders",
    generation=2,
    scheduled_at_ms=3,
    created_at_ms=4,
    attempts=5,
    callback_url="http://shop.test/6",
    payload='"7"',
    retry_policy=RetryPolicy(max_retries=8),
    callback_timeout_seconds=9,
    correlation_id="10",
    extras=Extras(
        headers={"a": "11"},
        tags=("t",),
        missed=Missed(skip_if_late_by_ms=12),
        occurrence=13,
        last_error="14",
        flow_key="15",
    ),
)
DEFAULT_ROW_READER = make_timer("plain", 2_000)


def test_each_value_is_in_its_column() -> None:
    row = dict(zip(TIMER_COLUMNS, timer_values(FULL), strict=True))
    assert row == {
        "timer_execute_at": 1_000,
        "timer_uuid_high": FULL.uuid_high,
        "timer_uuid_low": FULL.uuid_low,
        "timer_namespace": "orders",
        "timer_id": "full",
        "timer_generation": 2,
        "timer_scheduled_at": 3,
        "timer_created_at": 4,
        "timer_attempts": 5,
        "timer_callback_url": "http://shop.test/6",
        "timer_payload": '"7"',
        "timer_retry_policy": '{"maxRetries":8}',
        "timer_callback_timeout_seconds": 9,
        "timer_correlation_id": "10",
        "timer_options": '{"h":{"a":"11"},"t":["t"],"m":{"skipIfLateByMs":12},"o":13,"e":"14","k":"15"}',
    }
    assert TIMER_COLUMNS[:3] == KEY_COLUMNS == ("timer_execute_at", "timer_uuid_high", "timer_uuid_low")


def test_a_reached_row_has_its_own_key_and_then_the_key_of_the_timer() -> None:
    reached = make_reached(FULL, Outcome.FAILED, reached_at_ms=77, purge_at_ms=88)
    row = dict(zip(REACHED_COLUMNS, reached_values(reached), strict=True))
    assert tuple(row[name] for name in KEY_COLUMNS) == reached.position
    assert {name: row[name] for name in REACHED_COLUMNS[len(TIMER_COLUMNS) :]} == {
        "timer_own_execute_at": 1_000,
        "timer_own_uuid_high": FULL.uuid_high,
        "timer_own_uuid_low": FULL.uuid_low,
        "timer_outcome": "failed",
        "timer_reached_at": 77,
    }
    common = TIMER_COLUMNS[3:]
    assert [row[name] for name in common] == list(timer_values(FULL)[3:])


ONE_FIELD_EACH = [
    msgspec.structs.replace(DEFAULT_ROW_READER, payload="1"),
    msgspec.structs.replace(DEFAULT_ROW_READER, retry_policy=RetryPolicy(max_retries=8)),
    msgspec.structs.replace(DEFAULT_ROW_READER, callback_timeout_seconds=9),
    msgspec.structs.replace(DEFAULT_ROW_READER, correlation_id="10"),
    msgspec.structs.replace(DEFAULT_ROW_READER, extras=Extras(tags=("t",))),
]


@pytest.mark.parametrize("timer", [FULL, DEFAULT_ROW_READER, *ONE_FIELD_EACH])
def test_written_values_are_read_back(timer: Timer) -> None:
    assert timer_of(timer_values(timer)) == timer
    reached = make_reached(timer, Outcome.SKIPPED, reached_at_ms=77, purge_at_ms=88)
    assert reached_of(reached_values(reached)) == reached


def test_missing_values_of_a_timer_are_stored_as_null() -> None:
    row = dict(zip(TIMER_COLUMNS, timer_values(DEFAULT_ROW_READER), strict=True))
    assert [name for name, value in row.items() if value is None] == [
        "timer_payload",
        "timer_retry_policy",
        "timer_callback_timeout_seconds",
        "timer_correlation_id",
        "timer_options",
    ]
    assert timer_of(timer_values(DEFAULT_ROW_READER)).extras is NO_EXTRAS
    assert timer_of(timer_values(msgspec.structs.replace(DEFAULT_ROW_READER, extras=Extras()))) == DEFAULT_ROW_READER


def test_bounds_of_a_search_are_limited_to_the_range_of_timestamps() -> None:
    assert (FIRST_MS, LAST_MS) == (-1, LATEST_MS + 1)
    assert [bound_ms(at) for at in (-5, -1, 0, 7, LATEST_MS, LAST_MS, 1 << 60)] == [
        -1,
        -1,
        0,
        7,
        LATEST_MS,
        LAST_MS,
        LAST_MS,
    ]
    assert LARGEST == 9_223_372_036_854_775_807


def test_the_columns_that_are_times_are_known() -> None:
    assert {
        "timer_execute_at",
        "timer_scheduled_at",
        "timer_created_at",
        "timer_own_execute_at",
        "timer_reached_at",
    } == TIMES
