"""Reads a range of positions from Cassandra, even if very many rows in it were deleted.

A deleted row stays for days as a tombstone. The server gives up a read that meets 100,000 tombstones, every time. A
read of a narrower range meets fewer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from duetime.domain.timer import Position
from duetime.stores.cassandra.errors import TooManyTombstones
from duetime.stores.rows import LARGEST, Row

__all__ = ["RangeReader", "end_of"]

NARROWER: Final = 8  # divides the width of a range that has too many tombstones
WIDER: Final = 2  # multiplies the width after a range that was read
WIDEST: Final = 1 << 176  # thousands of years: any range


class RangeReader:
    """Remembers for each shard how narrow a range has to be; otherwise every page would have to find it out again."""

    def __init__(self, read: Callable[..., Awaitable[Sequence[Row]]]) -> None:
        self._read = read
        self._widths: dict[int, int] = {}

    async def between(
        self, statement: Any, shard_id: int, after: Position, until_ms: int, count: int, reads_max: int | None = None
    ) -> tuple[list[Row], Position | None]:
        """The first `count` rows of a shard after `after` and due by `until_ms`; all of them if there are fewer.

        If that takes more than `reads_max` reads: the rows found so far, and the position up to which was read.
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
            except TooManyTombstones:
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
    """The position after every timer that is due by then."""
    return Position(ms, LARGEST, LARGEST)


# A position as one number, so that a range can be divided, also between timers that are due at the same time.
_MIDDLE: Final = 1 << 63
_HALF: Final = (1 << 64) - 1


def _number_of(position: Position) -> int:
    at_ms, high, low = position
    return at_ms << 128 | (high + _MIDDLE) << 64 | (low + _MIDDLE)


def _position_of(number: int) -> Position:
    return Position(number >> 128, (number >> 64 & _HALF) - _MIDDLE, (number & _HALF) - _MIDDLE)
