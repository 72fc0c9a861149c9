"""How timers, reached timers and shards are stored as documents of one collection, and its indexes.

`_id` identifies a document by the text of a JSON list: [shard] for a shard (row type 1), [shard, namespace, id] for a
timer (2), [shard, purge time, and the halves of a uuid] for a reached timer (3). So the index that every collection has
is the unique one, compared byte by byte. Fields have the names of the columns in the other stores; a field that would
be null is omitted. Times are dates, which have milliseconds from long before 1970 to long after 9999: exactly what is
needed, and what people who read the collection expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from bson.datetime_ms import DatetimeMS
from bson.min_key import MinKey

from duetime.domain.timer import BEFORE_ALL, ROW_FORMAT, Position, Reached, Timer, TimerKey
from duetime.store import ShardRow
from duetime.stores.rows import (
    LARGEST,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    TIMES,
    RowReader,
    bound_ms,
    check_types,
    reached_of,
    reached_values,
    timer_of,
    timer_values,
)

Document = dict[str, Any]

SHARD, TIMER, REACHED = 1, 2, 3
SMALLEST: Final = -LARGEST - 1

_COLUMNS: Final = {TIMER: TIMER_COLUMNS, REACHED: REACHED_COLUMNS}
_ARE_TIMES: Final = {kind: tuple(name in TIMES for name in names) for kind, names in _COLUMNS.items()}
# Columns that the driver decodes to types of its own: dates, and numbers of 64 bits.
_LARGE: Final = TIMES | {name for name in REACHED_COLUMNS if "_uuid_" in name} | {"timer_generation"}
_ARE_LARGE: Final = {
    kind: tuple(index for index, name in enumerate(names) if name in _LARGE) for kind, names in _COLUMNS.items()
}
_encode = msgspec.json.Encoder().encode

# --- indexes -------------------------------------------------------------------------------------

_POSITION: Final = ("timer_execute_at", "timer_uuid_high", "timer_uuid_low")
IN_ORDER: Final = ("row_type", "shard_id", *_POSITION)
BY_CORRELATION: Final = ("timer_correlation_id", "timer_namespace", "row_type", *_POSITION)
# Newest first. The key is one field, because only then can the server skip from one key to the next.
NEWEST: Final = {"timer_key": 1, "timer_generation": -1, "timer_reached_at": -1, **dict.fromkeys(_POSITION, -1)}

INDEXES: Final[tuple[Document, ...]] = (
    {"name": "in_order", "key": dict.fromkeys(IN_ORDER, 1)},
    {
        "name": "by_correlation",
        "key": dict.fromkeys(BY_CORRELATION, 1),
        "partialFilterExpression": {"timer_correlation_id": {"$exists": True}},
    },
    {
        "name": "reached_by_key",
        "key": NEWEST,
        "partialFilterExpression": {"timer_key": {"$exists": True}},
    },
)


def bounds(
    index: tuple[str, ...], leading: tuple[Any, ...], after: Position, until_ms: int
) -> tuple[Document, Document] | None:
    """The bounds between which an index is read; `leading` are the values before the position. None: an empty range.

    Bounds and not a condition, because a position has three fields, and the server cannot compare tuples.
    """
    first = _next(after._replace(execute_at_ms=bound_ms(after.execute_at_ms)))
    last_ms = bound_ms(until_ms)
    if first.execute_at_ms > last_ms:
        return None
    start = (*leading, DatetimeMS(first.execute_at_ms), first.uuid_high, first.uuid_low)
    end = (*leading, DatetimeMS(last_ms + 1), MinKey(), MinKey())
    return dict(zip(index, start, strict=True)), dict(zip(index, end, strict=True))


def _next(position: Position) -> Position:
    """The next position: a lower bound is inclusive."""
    at_ms, high, low = position
    if low < LARGEST:
        return Position(at_ms, high, low + 1)
    return Position(at_ms, high + 1, SMALLEST) if high < LARGEST else Position(at_ms + 1, SMALLEST, SMALLEST)


# --- documents -----------------------------------------------------------------------------------


def shard_key(shard_id: int) -> str:
    return f"[{shard_id}]"


def timer_key(shard_id: int, key: TimerKey) -> str:
    return _encode((shard_id, key.namespace, key.timer_id)).decode()


def timer_document(shard_id: int, timer: Timer) -> Document:
    key = _encode((shard_id, timer.namespace, timer.timer_id)).decode()
    document = {"_id": key, "shard_id": shard_id, "row_type": TIMER, "row_format": ROW_FORMAT}
    return _filled(document, TIMER, timer_values(timer))


def reached_document(shard_id: int, reached: Reached) -> Document:
    values = reached_values(reached)
    document = {
        "_id": _encode((shard_id, *values[:3])).decode(),
        "timer_key": timer_key(shard_id, reached.timer.key),
        "shard_id": shard_id,
        "row_type": REACHED,
        "row_format": ROW_FORMAT,
    }
    return _filled(document, REACHED, values)


def _filled(document: Document, kind: int, values: tuple[Any, ...]) -> Document:
    for name, is_time, value in zip(_COLUMNS[kind], _ARE_TIMES[kind], values, strict=True):
        if value is not None:
            document[name] = DatetimeMS(value) if is_time else value
    return document


def timer_in(document: Mapping[str, Any]) -> Timer:
    return timer_of(_row(document, TIMER))


def reached_in(document: Mapping[str, Any]) -> Reached:
    return reached_of(_row(document, REACHED))


def _row(document: Mapping[str, Any], kind: int) -> list[Any]:
    row: list[Any] = [document.get(name) for name in _COLUMNS[kind]]
    for index in _ARE_LARGE[kind]:
        row[index] = int(row[index])
    check_types(row)
    return row


def _position(document: Mapping[str, Any]) -> Position:
    """Position of a document that may be undecodable. The index sorts a missing value before all numbers, and a value
    of another type after them."""
    halves = (_half(document.get(name)) for name in _POSITION[1:])
    return Position(int(document[_POSITION[0]]), *halves)


def _half(value: object) -> int:
    if value is None:
        return SMALLEST
    return int(value) if isinstance(value, int) else LARGEST


def _name(document: Mapping[str, Any]) -> tuple[Any, Any]:
    return document.get("timer_namespace"), document.get("timer_id")


ROW_READER: Final = RowReader(timer=timer_in, reached=reached_in, position=_position, key=_name)


def free_shard(shard_id: int) -> Document:
    return {
        "_id": shard_key(shard_id),
        "shard_id": shard_id,
        "row_type": SHARD,
        "shard_version": 0,
        "shard_nonce": 0,
        "shard_owner_id": None,
        "shard_owner_address": None,
        "shard_claimed_at": DatetimeMS(0),
        "shard_commits": 0,  # changed by every fenced write, so that two of them conflict
        "shard_sessions": [],  # of the owner's transactions: a claim of the shard ends them
    }


def low_water_document(position: Position) -> Document:
    return {"at": DatetimeMS(position.execute_at_ms), "uuid_high": position.uuid_high, "uuid_low": position.uuid_low}


def shard_in(document: Mapping[str, Any]) -> ShardRow:
    water = document.get("shard_low_water")
    return ShardRow(
        document["shard_id"],
        int(document["shard_version"]),
        int(document["shard_nonce"]),
        document["shard_owner_id"],
        document["shard_owner_address"],
        int(document["shard_claimed_at"]),
        Position(int(water["at"]), int(water["uuid_high"]), int(water["uuid_low"])) if water else BEFORE_ALL,
    )
