"""How timers, reached timers and shards are rows of Oracle: what goes in, what comes out.

Times are bound as TIMESTAMP, which has to be said: left to itself the driver may make a DATE of them, without
milliseconds. Text goes in through `kept` and comes out through `as_was`, because for Oracle an empty text is no text.
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
    "as_was",
    "at",
    "kept",
    "ms",
    "reached_at",
    "reached_row",
    "shard_row",
    "timer_at",
    "timer_row",
]

_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a TIMESTAMP has no time zone; all of ours are UTC
_MILLISECOND: Final = timedelta(milliseconds=1)


def at(milliseconds: int) -> datetime:
    return _EPOCH + milliseconds * _MILLISECOND


def ms(time: datetime) -> int:
    return (time - _EPOCH) // _MILLISECOND


def kept(text: str | None) -> str | None:
    """An empty text is stored as a NUL, and one that begins with NUL with one more in front."""
    return "\0" + text if text is not None and text[:1] in ("", "\0") else text


def as_was(text: str | None) -> str | None:
    return text[1:] if text is not None and text[:1] == "\0" else text


def _blob(text: str | None) -> bytes | None:
    stored = kept(text)
    return None if stored is None else stored.encode()


def _text(blob: bytes | None) -> str | None:
    return None if blob is None else as_was(blob.decode())


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
# Of the values of an insert, where the driver would guess wrong, or has nothing to guess from.
INSERT_TYPES: Final = {
    table: [
        oracledb.DB_TYPE_TIMESTAMP if name in TIMES else oracledb.DB_TYPE_NUMBER if name in _NUMBERS else None
        for name in ("shard_id", *names)
    ]
    for table, names in COLUMNS.items()
}

Change = Callable[[Any], Any]


def _changes(table: str, times: Change, texts: Change, blobs: Change) -> list[tuple[int, Change]]:
    """Which values of a row do not go as they are."""
    by_name = dict.fromkeys(TIMES, times) | dict.fromkeys(_TEXTS, texts) | dict.fromkeys(_BLOBS, blobs)
    return [(place, by_name[name]) for place, name in enumerate(COLUMNS[table]) if name in by_name]


_INWARDS: Final = {table: _changes(table, at, kept, _blob) for table in COLUMNS}
_OUTWARDS: Final = {table: _changes(table, ms, as_was, _text) for table in COLUMNS}


def _changed(values: Iterable[Any], changes: list[tuple[int, Change]]) -> list[Any]:
    row = list(values)
    for place, change in changes:
        row[place] = change(row[place])
    return row


# --- rows ----------------------------------------------------------------------------------------


def timer_row(shard_id: int, timer: Timer) -> list[Any]:
    return [shard_id, *_changed(timer_values(timer), _INWARDS["timers"])]


def reached_row(shard_id: int, reached: Reached) -> list[Any]:
    return [shard_id, *_changed(reached_values(reached), _INWARDS["reached"])]


def timer_at(row: Row) -> Timer:
    """Of a row that begins with TIMER_COLUMNS."""
    return timer_of(_changed(row[: len(TIMER_COLUMNS)], _OUTWARDS["timers"]))


def reached_at(row: Row) -> Reached:
    """Of a row that begins with REACHED_COLUMNS."""
    return reached_of(_changed(row[: len(REACHED_COLUMNS)], _OUTWARDS["reached"]))


def _place(row: Row) -> Position:
    return Position(ms(row[0]), row[1], row[2])


ROW_READER: Final = RowReader(timer=timer_at, reached=reached_at, place=_place)

SHARD: Final = (
    "shard_id, shard_version, shard_nonce, shard_owner_id, shard_owner_address, shard_claimed_at, shard_low_water"
)


def shard_row(row: Row) -> ShardRow:
    """Of a row of SHARD."""
    low_water = BEFORE_ALL if row[6] is None else Position(*msgspec.json.decode(row[6]))
    return ShardRow(row[0], row[1], row[2], row[3], as_was(row[4]), ms(row[5]), low_water)
