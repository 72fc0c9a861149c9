"""Columns of PostgreSQL for timers, reached timers and shards: names, types, arrays for writes, rows of reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from duetime.domain.timer import NO_EXTRAS, Position, Reached, Timer
from duetime.store import ShardRow
from duetime.stores.rows import REACHED_COLUMNS, TIMER_COLUMNS, TIMES, Row, as_json

# --- columns -------------------------------------------------------------------------------------


def at(milliseconds: str) -> str:
    return f"to_timestamp({milliseconds}::float8 / 1000)::timestamptz(3)"


def ms(column: str) -> str:
    return f"(date_part('epoch', {column}) * 1000)::bigint"


def _ms_or_null(column: str) -> str:
    """For a stored time, which may be infinite: converting an infinite one would make the whole statement fail."""
    return f"CASE WHEN isfinite({column}) THEN {ms(column)} END"


KEY = "timer_execute_at, timer_uuid_high, timer_uuid_low"

_TYPES: Final = {
    "timer_execute_at": "bigint",
    "timer_uuid_high": "bigint",
    "timer_uuid_low": "bigint",
    "timer_generation": "bigint",
    "timer_scheduled_at": "bigint",
    "timer_created_at": "bigint",
    "timer_attempts": "int",
    "timer_retry_policy": "json",
    "timer_callback_timeout_seconds": "int",
    "timer_options": "json",
    "timer_own_execute_at": "bigint",
    "timer_own_uuid_high": "bigint",
    "timer_own_uuid_low": "bigint",
    "timer_reached_at": "bigint",
}
# By row type: name, type as an argument, and whether it is a time.
COLUMNS: Final = {
    row_type: tuple((name, _TYPES.get(name, "text"), name in TIMES) for name in names)
    for row_type, names in ((2, TIMER_COLUMNS), (3, REACHED_COLUMNS))
}
# Encoding arrays is the largest cost of a commit for the client. These columns nearly always have the same value, and
# then they are left out.
SCHEDULED_AT: Final = 3  # among the common columns
IF_NULL: Final = {"timer_attempts": "0", "timer_scheduled_at": "timer_execute_at"}


_PAYLOAD: Final = TIMER_COLUMNS.index("timer_payload")


def selected(row_type: int, if_only: str = "", payload_if: str = "true") -> str:
    """The columns for a SELECT. `if_only`: columns after the position are NULL unless this condition is true.
    `payload_if`: the payload only under this condition too."""
    texts = [_ms_or_null(f"t.{name}") if is_time else f"t.{name}" for name, _, is_time in COLUMNS[row_type]]
    if if_only:
        texts[3:] = [f"CASE WHEN {if_only} THEN {text} END" for text in texts[3:]]
        texts[_PAYLOAD] = f"CASE WHEN {if_only} AND {payload_if} THEN t.timer_payload END"
    return ", ".join(f"{text} AS {name}" for text, (name, _, _) in zip(texts, COLUMNS[row_type], strict=True))


# --- rows ----------------------------------------------------------------------------------------


def common_columns(timers: Sequence[Timer]) -> list[list[Any]]:
    """The columns from the namespace to the options."""
    return [
        [timer.namespace for timer in timers],
        [timer.timer_id for timer in timers],
        [timer.generation for timer in timers],
        [timer.scheduled_at_ms for timer in timers],
        [timer.created_at_ms for timer in timers],
        [timer.attempts for timer in timers] if any(timer.attempts for timer in timers) else [],
        [timer.callback_url for timer in timers],
        _empty_if_all_none([timer.payload for timer in timers]),
        _empty_if_all_none([None if timer.retry_policy is None else as_json(timer.retry_policy) for timer in timers]),
        _empty_if_all_none([timer.callback_timeout_seconds for timer in timers]),
        _empty_if_all_none([timer.correlation_id for timer in timers]),
        _empty_if_all_none([None if timer.extras is NO_EXTRAS else as_json(timer.extras) for timer in timers]),
    ]


def _empty_if_all_none(column: list[Any]) -> list[Any]:
    return [] if column.count(None) == len(column) else column


def own_columns(timers: Sequence[Timer]) -> list[list[Any]]:
    return [
        [timer.execute_at_ms for timer in timers],
        [timer.uuid_high for timer in timers],
        [timer.uuid_low for timer in timers],
    ]


def reached_columns(reached: Sequence[Reached]) -> list[list[Any]]:
    timers = [r.timer for r in reached]
    positions = [r.position for r in reached]
    return [
        *([position[part] for position in positions] for part in range(3)),
        *common_columns(timers),
        *own_columns(timers),
        [r.outcome.value for r in reached],
        [r.reached_at_ms for r in reached],
    ]


def shard_row(row: Row) -> ShardRow:
    if row[6] is None:
        return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5])
    return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5], Position(*row[6]))
