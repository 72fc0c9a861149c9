"""Reads from Cassandra over a range of positions, whatever was deleted in it.

A deleted row stays for days as a tombstone. A read that meets 100,000 of them is given up by the server, and would be
again; a narrower one meets fewer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from duetime.model import Position
from duetime.stores.cassandra_link import TooManyDeleted
from duetime.stores.rows import LARGEST, Row

__all__ = ["between", "end_of"]

NARROWER: Final = 8  # times, where a range has too many tombstones; it grows again where there are fewer


async def between(
    read: Callable[..., Awaitable[Sequence[Row]]],
    statement: Any,
    shard_id: int,
    after: Position,
    until_ms: int,
    count: int,
) -> list[Row]:
    """The first `count` rows of a shard behind `after` and not behind `until_ms`; all of them if there are fewer."""
    rows: list[Row] = []
    start, end = _number_of(after), _number_of(end_of(until_ms))
    width = end - start
    while start < end and len(rows) < count:
        upto = min(start + width, end)
        try:
            rows += await read(statement, shard_id, *_position_of(start), *_position_of(upto), count - len(rows))
        except TooManyDeleted:
            width = (upto - start) // NARROWER
            if not width:
                raise
        else:
            start, width = upto, width * 2
    return rows


def end_of(ms: int) -> Position:
    """Behind everything that is due by then."""
    return Position(ms, LARGEST, LARGEST)


# A position as one number, so that there is a middle between any two: timers due at the same moment are apart, too.
_MIDDLE: Final = 1 << 63
_HALF: Final = (1 << 64) - 1


def _number_of(position: Position) -> int:
    at_ms, high, low = position
    return at_ms << 128 | (high + _MIDDLE) << 64 | (low + _MIDDLE)


def _position_of(number: int) -> Position:
    return Position(number >> 128, (number >> 64 & _HALF) - _MIDDLE, (number & _HALF) - _MIDDLE)
