"""Timers, reached timers and shards as JSON for SQL Server, and as rows of it.

A table of values is an array of arrays in JSON. A statement reads it with `json_rows`, which states the types. A text
that is compared as bytes is text in the JSON, and in the tables the bytes of that text (UTF-16).
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec

from duetime.domain.timer import BEFORE_ALL, ROW_FORMAT, Position, Reached, Timer
from duetime.store import ShardRow
from duetime.stores.rows import (
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    TIMES,
    Row,
    RowReader,
    reached_of,
    reached_values,
    timer_of,
    timer_values,
)

__all__ = [
    "KEY",
    "ROW_READER",
    "SHARD",
    "as_bytes",
    "at",
    "document",
    "insert_sql",
    "json_rows",
    "ms",
    "reached_at",
    "reached_row",
    "selected",
    "shard_row",
    "timer_at",
    "timer_row",
]

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a datetime2 has no time zone; all are UTC
_MILLISECOND: Final = timedelta(milliseconds=1)
_encode = msgspec.json.Encoder().encode


def at(milliseconds: int) -> datetime:
    """The time as a datetime, which is written to JSON as "1970-01-01T00:00:00"."""
    return _EPOCH + milliseconds * _MILLISECOND


def ms(time: datetime) -> int:
    return (time - _EPOCH) // _MILLISECOND


def document(value: object) -> str:
    return _encode(value).decode()


# --- columns -------------------------------------------------------------------------------------

KEY: Final = ", ".join(KEY_COLUMNS)
COLUMNS: Final = {2: TIMER_COLUMNS, 3: REACHED_COLUMNS}
_BYTES: Final = frozenset({"timer_namespace", "timer_id", "timer_correlation_id"})
_LONG_COLUMNS: Final = frozenset({"timer_payload", "timer_options"})
_TYPES: Final = {
    "shard_id": "int",
    "timer_uuid_high": "bigint",
    "timer_uuid_low": "bigint",
    "timer_generation": "bigint",
    "timer_attempts": "int",
    "timer_callback_url": "nvarchar(2048)",
    "timer_retry_policy": "nvarchar(1000)",
    "timer_callback_timeout_seconds": "int",
    "timer_own_uuid_high": "bigint",
    "timer_own_uuid_low": "bigint",
    "timer_outcome": "varchar(20)",
    **dict.fromkeys(TIMES, "datetime2(3)"),
    **dict.fromkeys(_BYTES, "nvarchar(255)"),
    **dict.fromkeys(_LONG_COLUMNS, "nvarchar(max)"),
}


def json_rows(path: str, **columns: str) -> str:
    """The rows of a table in the JSON document, with their types. The columns are in the order of the values."""
    types = ", ".join(f"{name} {kind} '$[{index}]'" for index, (name, kind) in enumerate(columns.items()))
    return f"OPENJSON(@doc, '{path}') WITH ({types})"


def as_bytes(text: str) -> str:
    return f"CAST({text} AS varbinary(510))"


def insert_sql(row_type: int, path: str) -> str:
    """A reached row that is stored already does not change."""
    names = ("shard_id", *COLUMNS[row_type])
    values = ", ".join(as_bytes(f"v.{name}") if name in _BYTES else f"v.{name}" for name in names)
    rows = json_rows(path, **{name: _TYPES[name] for name in names})
    sql = f"""INSERT INTO timers WITH (ROWLOCK) (row_type, row_format, {", ".join(names)})
  SELECT {row_type}, {ROW_FORMAT}, {values} FROM {rows} AS v"""  # noqa: S608
    if row_type == 3:
        same = " AND ".join(f"t.{name} = v.{name}" for name in ("shard_id", *KEY_COLUMNS))
        sql += f"""
  WHERE NOT EXISTS (SELECT 1 FROM timers AS t WITH (INDEX(timers_key)) WHERE t.row_type = 3 AND {same})"""  # noqa: S608
    return f"{sql}\n  OPTION (MAXDOP 1);"


def selected(row_type: int, only_if: str = "", payload_if: str = "") -> str:
    """The columns of t for a SELECT. `only_if`: columns that may be long are NULL unless this condition is true.
    `payload_if`: the payload under this condition instead."""
    return ", ".join(
        _selected(name, payload_if or only_if if name == "timer_payload" else only_if) for name in COLUMNS[row_type]
    )


def _selected(name: str, only_if: str) -> str:
    if name in _BYTES:
        return f"CAST(t.{name} AS nvarchar(255)) AS {name}"
    if only_if and name in _LONG_COLUMNS:
        return f"CASE WHEN {only_if} THEN t.{name} END AS {name}"
    return f"t.{name}"


# --- rows ----------------------------------------------------------------------------------------

_TIME_INDEXES: Final = {
    row_type: tuple(index for index, name in enumerate(names) if name in TIMES) for row_type, names in COLUMNS.items()
}


def _row(shard_id: int, row_type: int, values: Iterable[Any]) -> list[Any]:
    row = list(values)
    for index in _TIME_INDEXES[row_type]:
        row[index] = at(row[index])
    return [shard_id, *row]


def timer_row(shard_id: int, timer: Timer) -> list[Any]:
    return _row(shard_id, 2, timer_values(timer))


def reached_row(shard_id: int, reached: Reached) -> list[Any]:
    return _row(shard_id, 3, reached_values(reached))


def _read(row: Row, row_type: int) -> list[Any]:
    values = list(row)
    for index in _TIME_INDEXES[row_type]:
        values[index] = ms(values[index])
    return values


def timer_at(row: Row) -> Timer:
    """Decodes a row that begins with the columns of a timer."""
    return timer_of(_read(row, 2))


def reached_at(row: Row) -> Reached:
    """Decodes a row that begins with the columns of a reached timer."""
    return reached_of(_read(row, 3))


def _position(row: Row) -> Position:
    return Position(ms(row[0]), row[1], row[2])


ROW_READER: Final = RowReader(timer=timer_at, reached=reached_at, position=_position)

SHARD: Final = (
    "s.shard_id, s.shard_version, s.shard_nonce, s.shard_owner_id, s.shard_owner_address, s.shard_claimed_at,"
    " s.shard_low_water"
)


def shard_row(row: Row) -> ShardRow:
    """Decodes a row with the columns of SHARD."""
    low_water = BEFORE_ALL if row[6] is None else Position(*msgspec.json.decode(row[6]))
    return ShardRow(row[0], row[1], row[2], row[3], row[4], ms(row[5]), low_water)
