"""Timers, reached timers and shards as rows of Oracle.

Times are bound explicitly as TIMESTAMP: otherwise the driver may bind them as DATE, without milliseconds. Text is
written through `encode_text` and read through `decode_text`, because for Oracle an empty text is NULL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import oracledb

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
    "COLUMNS",
    "INSERT",
    "INSERT_TYPES",
    "KEY",
    "ROW_READER",
    "SHARD",
    "at",
    "decode_text",
    "encode_text",
    "ms",
    "reached_at",
    "reached_row",
    "shard_row",
    "timer_at",
    "timer_row",
]

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a TIMESTAMP has no time zone; all are UTC
_MILLISECOND: Final = timedelta(milliseconds=1)


def at(milliseconds: int) -> datetime:
    return _EPOCH + milliseconds * _MILLISECOND


def ms(time: datetime) -> int:
    return (time - _EPOCH) // _MILLISECOND


def encode_text(text: str | None) -> str | None:
    """Adds a NUL character before an empty text, and before a text that begins with NUL."""
    return "\0" + text if text is not None and text[:1] in ("", "\0") else text


def decode_text(text: str | None) -> str | None:
    return text[1:] if text is not None and text[:1] == "\0" else text


def _blob(text: str | None) -> bytes | None:
    stored = encode_text(text)
    return None if stored is None else stored.encode()


def _text(blob: bytes | None) -> str | None:
    return None if blob is None else decode_text(blob.decode())


# --- columns -------------------------------------------------------------------------------------

KEY: Final = ", ".join(KEY_COLUMNS)
COLUMNS: Final = {"timers": TIMER_COLUMNS, "reached": REACHED_COLUMNS}
INSERT: Final = {
    table: f"INSERT INTO {table} (row_format, shard_id, {', '.join(names)})"  # noqa: S608
    f" VALUES ({ROW_FORMAT}, :shard_id, {', '.join(f':{name}' for name in names)})"
    for table, names in COLUMNS.items()
}
_TEXTS: Final = ("timer_callback_url", "timer_correlation_id")
_BLOBS: Final = ("timer_payload", "timer_options")
_NUMBERS: Final = ("shard_id", "timer_uuid_high", "timer_uuid_low", "timer_callback_timeout_seconds")
# Types of the values of an insert, where the driver would choose a wrong one, or cannot choose.
INSERT_TYPES: Final = {
    table: [
        oracledb.DB_TYPE_TIMESTAMP if name in TIMES else oracledb.DB_TYPE_NUMBER if name in _NUMBERS else None
        for name in ("shard_id", *names)
    ]
    for table, names in COLUMNS.items()
}

Conversion = Callable[[Any], Any]


def _conversions(table: str, times: Conversion, texts: Conversion, blobs: Conversion) -> list[tuple[int, Conversion]]:
    """Which values of a row have to be converted, by index."""
    by_name = dict.fromkeys(TIMES, times) | dict.fromkeys(_TEXTS, texts) | dict.fromkeys(_BLOBS, blobs)
    return [(index, by_name[name]) for index, name in enumerate(COLUMNS[table]) if name in by_name]


_TO_DATABASE: Final = {table: _conversions(table, at, encode_text, _blob) for table in COLUMNS}
_FROM_DATABASE: Final = {table: _conversions(table, ms, decode_text, _text) for table in COLUMNS}


def _converted(values: Iterable[Any], conversions: list[tuple[int, Conversion]]) -> list[Any]:
    row = list(values)
    for index, convert in conversions:
        row[index] = convert(row[index])
    return row


# --- rows ----------------------------------------------------------------------------------------


def timer_row(shard_id: int, timer: Timer) -> list[Any]:
    return [shard_id, *_converted(timer_values(timer), _TO_DATABASE["timers"])]


def reached_row(shard_id: int, reached: Reached) -> list[Any]:
    return [shard_id, *_converted(reached_values(reached), _TO_DATABASE["reached"])]


def timer_at(row: Row) -> Timer:
    """Decodes a row that begins with TIMER_COLUMNS."""
    return timer_of(_converted(row[: len(TIMER_COLUMNS)], _FROM_DATABASE["timers"]))


def reached_at(row: Row) -> Reached:
    """Decodes a row that begins with REACHED_COLUMNS."""
    return reached_of(_converted(row[: len(REACHED_COLUMNS)], _FROM_DATABASE["reached"]))


def _position(row: Row) -> Position:
    return Position(ms(row[0]), row[1], row[2])


ROW_READER: Final = RowReader(timer=timer_at, reached=reached_at, position=_position)

SHARD: Final = (
    "shard_id, shard_version, shard_nonce, shard_owner_id, shard_owner_address, shard_claimed_at, shard_low_water"
)


def shard_row(row: Row) -> ShardRow:
    """Decodes a row with the columns of SHARD."""
    low_water = BEFORE_ALL if row[6] is None else Position(*msgspec.json.decode(row[6]))
    return ShardRow(row[0], row[1], row[2], row[3], decode_text(row[4]), ms(row[5]), low_water)
