"""CQL statements, and the meaning of their rows. The files in migrations/ describe the tables.

Times are milliseconds in both directions. A column without a value is left unset, because a null is a tombstone. Only
where a row is overwritten in place are nulls written; otherwise the old values would remain.
"""
# ruff: noqa: S608 (texts are built from constants and a checked keyspace)

from __future__ import annotations

from struct import Struct as Packing
from typing import Any, Final, NamedTuple

from cassandra.query import UNSET_VALUE

from duetime.domain.timer import BEFORE_ALL, ROW_FORMAT, Position, TimerKey, uuid_of
from duetime.store import ShardRow
from duetime.stores.rows import KEY_COLUMNS, REACHED_COLUMNS, TIMER_COLUMNS, TIMES, Row

__all__ = [
    "REACHED",
    "TIMER",
    "UNSET",
    "Key",
    "LowerBounds",
    "Statements",
    "id_row",
    "lower_bounds_of",
    "position_in",
    "reached_id_row",
    "shard_key",
    "shard_row",
    "texts",
    "with_no_payload",
    "without_nulls",
]

UNSET: Final = UNSET_VALUE

SHARD, TIMER, REACHED, TIMER_OF_ID, REACHED_OF_ID = 1, 2, 3, 4, 5

Key = tuple[int, int, int, int, bytes]
"""The key of a row in its partition: row type, time, the two halves of a uuid, order."""

shard_key: Final[Key] = (SHARD, 0, 0, 0, b"")


def id_row(key: TimerKey) -> Key:
    """The row that has the position of a timer. Its uuid is made from the key, not the timer's own: a read by key has
    only the key."""
    return (TIMER_OF_ID, 0, *uuid_of(key.namespace, key.timer_id), b"")


_order = Packing(">QQQQQ")
_MIDDLE: Final = 1 << 63


def reached_id_row(key: TimerKey, generation: int, reached_at_ms: int, position: Position) -> Key:
    """The row that has the position of a reached timer: among those of its id, in the order of generations and
    times."""
    order = _order.pack(*(number + _MIDDLE for number in (generation, reached_at_ms, *position)))
    return (REACHED_OF_ID, 0, *uuid_of(key.namespace, key.timer_id), order)


def position_in(order: bytes) -> Position:
    _, _, *position = _order.unpack(order)
    return Position(*(number - _MIDDLE for number in position))


def without_nulls(values: tuple[Any, ...]) -> list[Any]:
    return [UNSET if value is None else value for value in values]


# --- statements ----------------------------------------------------------------------------------

_KEY: Final = "row_type, timer_execute_at, timer_uuid_high, timer_uuid_low, row_order"
_POSITION: Final = "(timer_execute_at, timer_uuid_high, timer_uuid_low)"
_BETWEEN: Final = f"{_POSITION} > (?, ?, ?) AND {_POSITION} <= (?, ?, ?) LIMIT ?"
_SHARD_ROW: Final = f"""shard_id = ? AND row_type = {SHARD}
  AND timer_execute_at = 0 AND timer_uuid_high = 0 AND timer_uuid_low = 0 AND row_order = 0x"""
_FENCE: Final = "IF shard_version = ? AND shard_nonce = ?"
_BACKWARDS: Final = "ORDER BY " + ", ".join(f"{name} DESC" for name in _KEY.split(", "))


class Statements(NamedTuple):
    """The prepared statements, under the names of their texts."""

    # shards
    shard_count: Any
    first_shard_count: Any
    raise_shard_count: Any
    new_shard: Any
    shards: Any
    claim: Any
    release: Any
    # parts of a fenced batch: the fence is the first
    fence: Any
    put_timer: Any
    put_reached: Any
    put_position: Any
    put_reached_position: Any
    delete_row: Any
    delete_reached: Any
    # reads before a fenced batch
    before: Any
    first_timer: Any
    expired: Any
    # reads
    load: Any
    list_reached: Any
    list_timers_bare: Any
    list_reached_bare: Any
    newest: Any
    rows: Any
    # members and namespaces
    now: Any
    join: Any
    heartbeat: Any
    member: Any
    members: Any
    mark_dead: Any
    forget: Any
    namespaces: Any
    new_namespace: Any
    change_namespace: Any


def texts(keyspace: str) -> dict[str, str]:
    timers, members, namespaces, settings = (
        f'"{keyspace}".{name}' for name in ("timers", "members", "namespaces", "duetime_schema")
    )
    timer_columns, reached_columns = ", ".join(TIMER_COLUMNS), ", ".join(REACHED_COLUMNS)
    of_shard = f"FROM {timers} WHERE shard_id = ? AND row_type"
    return {
        "shard_count": f"SELECT number FROM {settings} WHERE name = 'shards'",
        "first_shard_count": f"INSERT INTO {settings} (name, number) VALUES ('shards', ?) IF NOT EXISTS",
        "raise_shard_count": f"UPDATE {settings} SET number = ? WHERE name = 'shards' IF number < ?",
        "new_shard": f"""INSERT INTO {timers} (shard_id, {_KEY}, shard_version)
            VALUES (?, {SHARD}, 0, 0, 0, 0x, 0) IF NOT EXISTS""",
        "shards": f"SELECT {_SHARD_COLUMNS} FROM {timers} WHERE shard_id IN ? AND row_type = {SHARD}",
        "claim": f"""UPDATE {timers} SET shard_version = ?, shard_nonce = ?, shard_owner_id = ?,
            shard_owner_address = ?, shard_claimed_at = ? WHERE {_SHARD_ROW} IF shard_version = ?""",
        # A free shard has no nonce, so no fence matches it.
        "release": f"""UPDATE {timers} SET shard_nonce = null, shard_owner_id = null, shard_owner_address = null,
            shard_claimed_at = null WHERE {_SHARD_ROW} {_FENCE}""",
        "fence": f"""UPDATE {timers} SET shard_nonce = ?, shard_low_water_at = ?, shard_low_water_high = ?,
            shard_low_water_low = ?, shard_timers_from = ?, shard_reached_from = ? WHERE {_SHARD_ROW} {_FENCE}""",
        "put_timer": f"""INSERT INTO {timers} (shard_id, row_type, row_order, row_format, {timer_columns})
            VALUES (?, {TIMER}, 0x, {ROW_FORMAT}, {_marks(TIMER_COLUMNS)})""",
        "put_reached": f"""INSERT INTO {timers} (shard_id, row_type, row_order, row_format, {reached_columns})
            VALUES (?, {REACHED}, 0x, {ROW_FORMAT}, {_marks(REACHED_COLUMNS)})""",
        "put_position": f"""INSERT INTO {timers} (shard_id, {_KEY}, timer_own_execute_at, timer_own_uuid_high,
            timer_own_uuid_low) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)""",
        "put_reached_position": f"INSERT INTO {timers} (shard_id, {_KEY}) VALUES (?, ?, ?, ?, ?, ?)",
        "delete_row": f"""DELETE {of_shard} = ? AND timer_execute_at = ? AND timer_uuid_high = ? AND timer_uuid_low = ?
            AND row_order = ?""",
        "delete_reached": f"DELETE {of_shard} = {REACHED} AND {_POSITION} <= (?, ?, ?)",
        "before": f"""SELECT row_type, timer_uuid_high, timer_uuid_low, {_ms("timer_own_execute_at")},
            timer_own_uuid_high, timer_own_uuid_low, shard_version, shard_nonce, {_ms("shard_timers_from")},
            {_ms("shard_reached_from")} FROM {timers} WHERE shard_id = ? AND ({_KEY}) IN ?""",
        "first_timer": f"""SELECT {_ms("timer_execute_at")} {of_shard} = {TIMER} AND {_BETWEEN}""",
        "expired": f"""SELECT {_selected(KEY_COLUMNS)}, timer_namespace, timer_id, timer_generation,
            {_ms("timer_reached_at")} {of_shard} = {REACHED} AND timer_execute_at >= ? AND timer_execute_at < ?
            LIMIT ?""",
        "load": f"""SELECT {_selected(TIMER_COLUMNS)} {of_shard} = {TIMER} AND {_BETWEEN}""",
        "list_reached": f"""SELECT {_selected(REACHED_COLUMNS)} {of_shard} = {REACHED} AND {_BETWEEN}""",
        "list_timers_bare": f"""SELECT {_without_payload(TIMER_COLUMNS)} {of_shard} = {TIMER} AND {_BETWEEN}""",
        "list_reached_bare": f"""SELECT {_without_payload(REACHED_COLUMNS)} {of_shard} = {REACHED} AND {_BETWEEN}""",
        "newest": f"""SELECT timer_uuid_high, timer_uuid_low, row_order {of_shard} = {REACHED_OF_ID}
            AND timer_execute_at = 0 AND (timer_uuid_high, timer_uuid_low) IN ? {_BACKWARDS} LIMIT ?""",
        "rows": f"""SELECT {_selected(REACHED_COLUMNS)}, row_type FROM {timers}
            WHERE shard_id = ? AND ({_KEY}) IN ?""",
        "now": "SELECT toUnixTimestamp(now()) FROM system.local",
        "join": f"""INSERT INTO {members} (instance_id, address, counter, alive, joined_at, secret)
            VALUES (?, ?, ?, ?, ?, ?) IF NOT EXISTS""",
        "heartbeat": f"UPDATE {members} SET counter = ? WHERE instance_id = ? IF alive = true AND counter < ?",
        "member": f"SELECT {_MEMBER_COLUMNS} FROM {members} WHERE instance_id = ?",
        "members": f"SELECT {_MEMBER_COLUMNS} FROM {members}",
        "mark_dead": f"UPDATE {members} SET alive = false WHERE instance_id = ? IF alive = true AND counter = ?",
        "forget": f"DELETE FROM {members} WHERE instance_id = ? IF alive = false",
        "namespaces": f"SELECT name, document FROM {namespaces}",
        "new_namespace": f"INSERT INTO {namespaces} (name, revision, document) VALUES (?, ?, ?) IF NOT EXISTS",
        "change_namespace": f"UPDATE {namespaces} SET revision = ?, document = ? WHERE name = ? IF revision = ?",
    }


def _ms(column: str) -> str:
    return f"toUnixTimestamp({column})"


def _selected(columns: tuple[str, ...]) -> str:
    return ", ".join(_ms(name) if name in TIMES else name for name in columns)


def _without_payload(columns: tuple[str, ...]) -> str:
    return _selected(tuple(name for name in columns if name != "timer_payload"))


def with_no_payload(row: Row) -> Row:
    """Adds the missing column to a row that was read without payload."""
    place = TIMER_COLUMNS.index("timer_payload")
    return (*row[:place], None, *row[place:])


def _marks(columns: tuple[str, ...]) -> str:
    return ", ".join("?" * len(columns))


_SHARD_COLUMNS: Final = ", ".join(
    [
        *("shard_id", "shard_version", "shard_nonce", "shard_owner_id", "shard_owner_address"),
        _ms("shard_claimed_at"),
        *(_ms("shard_low_water_at"), "shard_low_water_high", "shard_low_water_low"),
        *(_ms("shard_timers_from"), _ms("shard_reached_from")),
    ]
)
_MEMBER_COLUMNS: Final = f"instance_id, address, counter, alive, {_ms('joined_at')}, secret"


# --- rows ----------------------------------------------------------------------------------------


class LowerBounds(NamedTuple):
    """Before these times a shard has no timer, and no reached timer. None: not known yet.

    Deleted rows leave tombstones, which reads have to pass for days. A read from the beginning starts here instead. A
    commit that writes a row before a bound lowers it; a commit that finds no row after it raises it.
    """

    timers_from_ms: int | None
    reached_from_ms: int | None


def shard_row(row: Row) -> ShardRow:
    low_water = BEFORE_ALL if row[6] is None else Position(row[6], row[7], row[8])
    return ShardRow(row[0], row[1], row[2] or 0, row[3], row[4], row[5] or 0, low_water)


def lower_bounds_of(row: Row) -> LowerBounds:
    return LowerBounds(row[9], row[10])
