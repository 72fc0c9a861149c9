"""How timers, reached timers and shards are text of SQL, and rows of MySQL.

Statements are made of text, because what travels in bulk is rows of VALUES. Everything that comes from outside goes
through `literal`, which escapes for a session as connection.py sets it up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Final

from asyncmy.converters import escape_string

from duetime.domain.timer import BEFORE_ALL, ROW_FORMAT, Position, Reached, Timer
from duetime.store import ShardRow
from duetime.stores.rows import (
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    TIMES,
    Row,
    bound_ms,
    reached_values,
    timer_values,
)

__all__ = [
    "INSERT",
    "INSERT_END",
    "KEY",
    "SHARD",
    "at",
    "beyond",
    "keyed",
    "literal",
    "ms",
    "reached_row",
    "selected",
    "shard_row",
    "timer_row",
]

KEY: Final = ", ".join(KEY_COLUMNS)
COLUMNS: Final = {"timers": TIMER_COLUMNS, "reached": REACHED_COLUMNS}
INSERT: Final = {
    table: f"INSERT INTO {table} (shard_id, row_format, {', '.join(names)}) VALUES "  # noqa: S608
    for table, names in COLUMNS.items()
}
# A reached row that is there already stays as it is. It has no other unique key that this could mean.
INSERT_END: Final = {"timers": "", "reached": " ON DUPLICATE KEY UPDATE row_format = reached.row_format"}

_TIMES: Final = frozenset(index for index, name in enumerate(REACHED_COLUMNS) if name in TIMES)
_BYTES: Final = frozenset({"timer_namespace", "timer_id", "timer_correlation_id"})  # text that is compared as bytes
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a DATETIME has no time zone; all of ours are UTC


@lru_cache(8_192)
def at(milliseconds: int) -> str:
    """A DATETIME(3)."""
    return f"'{_EPOCH + timedelta(milliseconds=milliseconds)}'"


def ms(column: str) -> str:
    return f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {column}) DIV 1000"


def literal(value: str | int | None) -> str:
    if value is None:
        return "NULL"
    return f"'{escape_string(value)}'" if isinstance(value, str) else str(value)


def selected(table: str, only_if: str = "") -> str:
    """The columns as they are read. `only_if`: those that may be long are NULL unless that is true."""
    return ", ".join(_selected(name, only_if) for name in COLUMNS[table])


def _selected(name: str, only_if: str) -> str:
    if name in TIMES:
        return ms(name)
    if name in _BYTES:
        return f"CONVERT({name} USING utf8mb4)"
    if only_if and name in ("timer_callback_url", "timer_payload", "timer_options"):
        return f"IF({only_if}, {name}, NULL)"
    return name


def beyond(place: Position) -> str:
    """Rows after that place. Written out, because a comparison of rows is not understood as a range."""
    time = at(bound_ms(place.execute_at_ms))
    return (
        f"(timer_execute_at > {time} OR (timer_execute_at = {time} AND timer_uuid_high > {place.uuid_high})"
        f" OR (timer_execute_at = {time} AND timer_uuid_high = {place.uuid_high}"
        f" AND timer_uuid_low > {place.uuid_low}))"
    )


def keyed(keys: Iterable[tuple[int, str, str]]) -> str:
    """Rows of these shards, namespaces and ids: points of an index, grouped so that they are lists of ids."""
    groups: dict[tuple[int, str], list[str]] = {}
    for shard_id, namespace, timer_id in keys:
        groups.setdefault((shard_id, namespace), []).append(literal(timer_id))
    return " OR ".join(
        f"(shard_id = {shard_id} AND timer_namespace = {literal(namespace)} AND timer_id IN ({','.join(ids)}))"
        for (shard_id, namespace), ids in groups.items()
    )


def timer_row(shard_id: int, timer: Timer) -> str:
    return _row(shard_id, timer_values(timer))


def reached_row(shard_id: int, reached: Reached) -> str:
    return _row(shard_id, reached_values(reached))


def _row(shard_id: int, values: Sequence[Any]) -> str:
    texts = [at(value) if index in _TIMES else literal(value) for index, value in enumerate(values)]
    return f"({shard_id},{ROW_FORMAT},{','.join(texts)})"


SHARD: Final = (
    "shard_id, shard_version, shard_nonce, shard_owner_id, shard_owner_address,"
    f" {ms('shard_claimed_at')}, shard_low_water_ms, shard_low_water_high, shard_low_water_low"
)


def shard_row(row: Row) -> ShardRow:
    """Of a row of SHARD."""
    low_water = BEFORE_ALL if row[6] is None else Position(row[6], row[7], row[8])
    return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5], low_water)
