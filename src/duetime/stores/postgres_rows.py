"""How timers, reached timers and shards are columns of PostgreSQL: names and types, arrays in, rows out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from duetime.model import NO_EXTRAS, Ending, Extras, Namespace, Position, Reached, RetryPolicy, Timer
from duetime.store import ShardRow
from duetime.timetext import LATEST_MS

Row = Sequence[Any]

# --- columns -------------------------------------------------------------------------------------


def at(milliseconds: str) -> str:
    return f"to_timestamp({milliseconds}::float8 / 1000)::timestamptz(3)"


def ms(column: str) -> str:
    return f"(date_part('epoch', {column}) * 1000)::bigint"


KEY = "timer_execute_at, timer_uuid_high, timer_uuid_low"

# The columns of a timer: name, type, and whether it is a time. In the order of timer_of and reached_of.
TIMER_COLUMNS: Final = (
    ("timer_execute_at", "bigint", True),
    ("timer_uuid_high", "bigint", False),
    ("timer_uuid_low", "bigint", False),
    ("timer_namespace", "text", False),
    ("timer_id", "text", False),
    ("timer_generation", "bigint", False),
    ("timer_scheduled_at", "bigint", True),
    ("timer_created_at", "bigint", True),
    ("timer_attempts", "int", False),
    ("timer_callback_url", "text", False),
    ("timer_payload", "text", False),
    ("timer_retry_policy", "json", False),
    ("timer_callback_timeout_seconds", "int", False),
    ("timer_correlation_id", "text", False),
    ("timer_options", "json", False),
)
REACHED_COLUMNS: Final = (
    *TIMER_COLUMNS,
    ("timer_own_execute_at", "bigint", True),
    ("timer_own_uuid_high", "bigint", False),
    ("timer_own_uuid_low", "bigint", False),
    ("timer_outcome", "text", False),
    ("timer_reached_at", "bigint", True),
)
COLUMNS = {2: TIMER_COLUMNS, 3: REACHED_COLUMNS}
# Arrays are what a commit costs the client most; these columns are nearly always the same, and then left out.
SCHEDULED_AT: Final = 3  # among the common columns
IF_NULL: Final = {"timer_attempts": "0", "timer_scheduled_at": "timer_execute_at"}


def selected(row_type: int, if_only: str = "") -> str:
    """The columns as they are read. `if_only`: NULL instead, but for the position, unless that is true."""
    texts = [ms(f"t.{name}") if is_time else f"t.{name}" for name, _, is_time in COLUMNS[row_type]]
    if if_only:
        texts[3:] = [f"CASE WHEN {if_only} THEN {text} END" for text in texts[3:]]
    return ", ".join(f"{text} AS {name}" for text, (name, _, _) in zip(texts, COLUMNS[row_type], strict=True))


# --- rows ----------------------------------------------------------------------------------------

_encode = msgspec.json.Encoder().encode
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode
_decode_extras = msgspec.json.Decoder(Extras).decode
decode_namespace = msgspec.json.Decoder(Namespace).decode
FIRST_MS: Final = -1
LAST_MS: Final = LATEST_MS + 1  # no timer is stored at or after it


def as_json(value: object) -> str:
    return _encode(value).decode()


def bound_ms(at_ms: int) -> int:
    """A bound of a search, brought to where a timestamp can be; beyond that nothing is stored anyway."""
    return min(max(at_ms, FIRST_MS), LAST_MS)


def common_columns(timers: Sequence[Timer]) -> list[list[Any]]:
    """From the namespace to the options."""
    return [
        [timer.namespace for timer in timers],
        [timer.timer_id for timer in timers],
        [timer.generation for timer in timers],
        [timer.scheduled_at_ms for timer in timers],
        [timer.created_at_ms for timer in timers],
        [timer.attempts for timer in timers] if any(timer.attempts for timer in timers) else [],
        [timer.callback_url for timer in timers],
        _unless_none([timer.payload for timer in timers]),
        _unless_none([None if timer.retry_policy is None else as_json(timer.retry_policy) for timer in timers]),
        _unless_none([timer.callback_timeout_seconds for timer in timers]),
        _unless_none([timer.correlation_id for timer in timers]),
        _unless_none([None if timer.extras is NO_EXTRAS else as_json(timer.extras) for timer in timers]),
    ]


def _unless_none(column: list[Any]) -> list[Any]:
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
        [r.ending.value for r in reached],
        [r.reached_at_ms for r in reached],
    ]


def timer_of(row: Row, own: int = 2) -> Timer:
    """Of a row whose first two columns say where it belongs. `own`: where the timer's own position stands."""
    return Timer(
        namespace=row[5],
        timer_id=row[6],
        uuid_high=row[own + 1],
        uuid_low=row[own + 2],
        generation=row[7],
        execute_at_ms=row[own],
        scheduled_at_ms=row[8],
        created_at_ms=row[9],
        callback_url=row[11],
        attempts=row[10],
        payload=row[12],
        retry_policy=None if row[13] is None else _decode_policy(row[13]),
        callback_timeout_seconds=row[14],
        correlation_id=row[15],
        extras=NO_EXTRAS if row[16] is None else _decode_extras(row[16]),
    )


def reached_of(row: Row) -> Reached:
    return Reached(timer=timer_of(row, own=17), ending=Ending(row[20]), reached_at_ms=row[21], purge_at_ms=row[2])


def shard_row(row: Row) -> ShardRow:
    if row[6] is None:
        return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5])
    return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5], Position(*row[6]))
