"""Timers, reached timers and shards as SQL text, and as rows of MySQL.

Statements are built as text, because batches are sent as rows of VALUES. Every value from outside is passed through
`literal`, which escapes it for a session as connection.py sets it up.
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
    "after_position",
    "at",
    "literal",
    "ms",
    "reached_row",
    "selected",
    "shard_row",
    "timer_row",
    "with_keys",
]

KEY: Final = ", ".join(KEY_COLUMNS)
COLUMNS: Final = {"timers": TIMER_COLUMNS, "reached": REACHED_COLUMNS}
INSERT: Final = {
    table: f"INSERT INTO {table} (shard_id, row_format, {', '.join(names)}) VALUES "  # noqa: S608
    for table, names in COLUMNS.items()
}
# A reached row that is stored already does not change. The table has no other unique key.
INSERT_END: Final = {"timers": "", "reached": " ON DUPLICATE KEY UPDATE row_format = reached.row_format"}

_TIMES: Final = frozenset(index for index, name in enumerate(REACHED_COLUMNS) if name in TIMES)
_BYTES: Final = frozenset({"timer_namespace", "timer_id", "timer_correlation_id"})  # texts that are compared as bytes
_EPOCH: Final = datetime(1970, 1, 1)  # noqa: DTZ001 - a DATETIME has no time zone; all are UTC


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


def selected(table: str, only_if: str = "", payload_if: str = "") -> str:
    """The columns for a SELECT. `only_if`: columns that may be long are NULL unless this condition is true.
    `payload_if`: the payload under this condition instead; if it is NULL, the payload is not read."""
    return ", ".join(
        _selected(name, payload_if or only_if if name == "timer_payload" else only_if) for name in COLUMNS[table]
    )


def _selected(name: str, only_if: str) -> str:
    if name in TIMES:
        return ms(name)
    if name in _BYTES:
        return f"CONVERT({name} USING utf8mb4)"
    if only_if == "NULL":
        return only_if
    if only_if and name in ("timer_callback_url", "timer_payload", "timer_options"):
        return f"IF({only_if}, {name}, NULL)"
    return name


def after_position(position: Position) -> str:
    """A condition for rows after a position. Written out, because the servers do not use an index for a comparison of
    row values."""
    time = at(bound_ms(position.execute_at_ms))
    return (
        f"(timer_execute_at > {time} OR (timer_execute_at = {time} AND timer_uuid_high > {position.uuid_high})"
        f" OR (timer_execute_at = {time} AND timer_uuid_high = {position.uuid_high}"
        f" AND timer_uuid_low > {position.uuid_low}))"
    )


def with_keys(keys: Iterable[tuple[int, str, str]]) -> str:
    """A condition for rows with these shards, namespaces and ids. Keys of one namespace become one list of ids."""
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
    """Decodes a row with the columns of SHARD."""
    low_water = BEFORE_ALL if row[6] is None else Position(row[6], row[7], row[8])
    return ShardRow(row[0], row[1], row[2], row[3], row[4], row[5], low_water)
