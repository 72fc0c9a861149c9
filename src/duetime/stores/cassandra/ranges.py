"""Reads from Cassandra over a range of positions, whatever was deleted in it.

A deleted row stays for days as a tombstone. A read that meets 100,000 of them is given up by the server, and would be
again; a narrower one meets fewer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from duetime.domain.timer import Position
from duetime.stores.cassandra.address import TooManyDeleted
from duetime.stores.rows import LARGEST, Row

__all__ = ["Ranges", "end_of"]

NARROWER: Final = 8  # times, where a range has too many tombstones
WIDER: Final = 2  # times, behind a range that was read
WIDEST: Final = 1 << 176  # thousands of years: whatever is asked for


class Ranges:
    """Of each shard it is remembered how narrow a range has to be, or every page would find it out anew."""

    def __init__(self, read: Callable[..., Awaitable[Sequence[Row]]]) -> None:
        self._read = read
        self._widths: dict[int, int] = {}

    async def between(
        self, statement: Any, shard_id: int, after: Position, until_ms: int, count: int, reads_max: int | None = None
    ) -> tuple[list[Row], Position | None]:
        """The first `count` rows of a shard behind `after` and not behind `until_ms`; all of them if there are fewer.

        If that would take more than `reads_max` reads: what these have found, and up to where.
        """
        rows: list[Row] = []
        start, end = _number_of(after), _number_of(end_of(until_ms))
        reads = 0
        while start < end and len(rows) < count:
            if reads == reads_max:
                return rows, _position_of(start)
            reads += 1
            upto = min(start + self._widths.get(shard_id, end - start), end)
            try:
                rows += await self._read(
                    statement, shard_id, *_position_of(start), *_position_of(upto), count - len(rows)
                )
            except TooManyDeleted:
                if upto - start == 1:
                    raise
                self._widths[shard_id] = max(1, (upto - start) // NARROWER)
            else:
                start = upto
                self._widen(shard_id)
        return rows, None

    def _widen(self, shard_id: int) -> None:
        width = self._widths.pop(shard_id, WIDEST) * WIDER
        if width < WIDEST:
            self._widths[shard_id] = width


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
