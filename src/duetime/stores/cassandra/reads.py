"""Reads from Cassandra: by a range of time, by id, and in order over all shards of a namespace.

All are quorum reads: they see every acknowledged write (writes.py explains why that is enough after a claim).
Large answers are read in pieces, because a row may have a payload of a megabyte and the server does not count bytes.
How many rows a piece has is decided by the length of the payloads that were last read from the shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from duetime.domain.timer import Position, TimerKey
from duetime.errors import StoreError, StoreUnavailable
from duetime.store import Found, Listing, ListQuery, Page, PageRequest, ShardRow
from duetime.stores.cassandra.connection import Client
from duetime.stores.cassandra.errors import TooManyTombstones
from duetime.stores.cassandra.ranges import RangeReader, end_of
from duetime.stores.cassandra.statements import (
    REACHED,
    TIMER,
    Key,
    LowerBounds,
    Statements,
    id_row,
    lower_bounds_of,
    position_in,
    shard_row,
    with_no_payload,
)
from duetime.stores.fencing import each_shard_separately
from duetime.stores.merging import NO_PAYLOADS, Item, Scan, ScanResult, match_row, merge_scans, within
from duetime.stores.rows import REACHED_ROWS_MAX, Row, found_of, page_of, position_of, rows_of_page

__all__ = ["Reader"]

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

PARALLEL_READS = 16
SHARDS_PER_READ = 100
KEYS_PER_READ = 100
ROWS_PER_READ = 250  # of a page at first; more if the rows are small
ROWS_OF_UNKNOWN_LENGTH = 8  # in the first read of a shard
SCAN_CHARS_PER_READ = 1024 * 1024  # of payloads that a list reads at a time from a shard
LOAD_CHARS_MAX = 32 * 1024 * 1024  # of payloads in one page; a longer page is cut
READS_PER_PAGE = 8
_PAYLOAD = 10
_READ_ATTEMPTS = 10


class Reader:
    def __init__(self, client: Client, statements: Statements) -> None:
        self._client = client
        self._statements = statements
        self._limit = asyncio.Semaphore(PARALLEL_READS)
        self._ranges = RangeReader(self._read)
        self._row_chars: dict[int, int] = {}  # by shard: the mean of the payloads in the last read

    async def _read(self, statement: Any, *values: Any) -> list[Row]:
        async with self._limit:
            return await self._client.read(statement, *values)  # type: ignore[return-value]

    # -- shards

    async def shard_count(self) -> int:
        rows = await self._read(self._statements.shard_count)
        return int(rows[0][0]) if rows else 0

    async def shards(self) -> list[ShardRow]:
        return sorted((shard_row(row) for row in await self._shard_rows(await self.shard_count())), key=_by_id)

    async def _shard_rows(self, count: int) -> Iterable[Row]:
        ids = range(count)
        pieces = [list(ids[start : start + SHARDS_PER_READ]) for start in range(0, count, SHARDS_PER_READ)]
        found = await asyncio.gather(*(self._read(self._statements.shards, piece) for piece in pieces))
        return (row for rows in found for row in rows)

    # -- timers by time

    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        """Each shard has its own result: the replicas of one may be down."""
        return await each_shard_separately(requests, [request.shard_id for request in requests], self._load)

    async def _load(self, request: PageRequest) -> Page:
        """Other pages wait for this one, so it reads only a limited number of ranges with many tombstones."""
        found: list[Row] = []
        after, chars_left = request.after, min(request.chars_max, LOAD_CHARS_MAX)
        rows_max = ROWS_PER_READ
        while True:
            count = min(request.limit - len(found), rows_max, self._rows_of(request.shard_id, chars_left))
            rows, passed = await self._ranges.between(
                self._statements.load, request.shard_id, after, request.until_ms, count, READS_PER_PAGE
            )
            self._learn_length(request.shard_id, rows)
            lengths = [_payload_chars(row) for row in rows]
            found += rows[: rows_of_page(lengths, chars_left)]
            chars_left -= sum(lengths)
            if chars_left < 0:
                return page_of(found, position_of(found[-1]))
            if passed is not None:
                if passed == after:
                    continue  # nothing was read yet, but the range is narrower now
                return page_of(found, passed)
            if len(rows) < count:
                return page_of(found, None)
            after = position_of(found[-1])
            if len(found) >= request.limit:
                return page_of(found, after)
            rows_max = request.limit

    def _rows_of(self, shard_id: int, chars: int) -> int:
        """How many rows of the shard have about so many characters."""
        row_chars = self._row_chars.get(shard_id)
        return ROWS_OF_UNKNOWN_LENGTH if row_chars is None else max(1, chars // (row_chars + 1))

    def _learn_length(self, shard_id: int, rows: Sequence[Row]) -> None:
        if rows:
            self._row_chars[shard_id] = sum(map(_payload_chars, rows)) // len(rows)

    # -- timers by id

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        by_shard: dict[int, list[TimerKey]] = {}
        for shard_id, key in dict.fromkeys(keys):
            by_shard.setdefault(shard_id, []).append(key)
        requested = [
            (shard_id, some[start : start + KEYS_PER_READ])
            for shard_id, some in by_shard.items()
            for start in range(0, len(some), KEYS_PER_READ)
        ]
        answers = await asyncio.gather(*(self._get(shard_id, some) for shard_id, some in requested))
        found = {
            (shard_id, key): item
            for (shard_id, some), items in zip(requested, answers, strict=True)
            for key, item in zip(some, items, strict=True)
        }
        return [found[key] for key in keys]

    async def _get(self, shard_id: int, keys: Sequence[TimerKey]) -> list[Found]:
        """Read the positions, then the rows at these positions. A timer that has moved in between is read again."""
        ids = [id_row(key) for key in keys]
        for _ in range(_READ_ATTEMPTS):
            positions, newest = await asyncio.gather(self._positions(shard_id, ids), self._newest(shard_id, ids))
            wanted: list[Key] = [(TIMER, *position, b"") for position in positions.values()]
            wanted += [(REACHED, *position, b"") for position in newest.values()]
            if not wanted:
                return [Found()] * len(keys)
            rows = await self._read(self._statements.rows, shard_id, wanted)
            if len(rows) < len(wanted):
                continue
            at = {(row[-1], position_of(row)): row for row in rows}
            return [
                await self._found(
                    shard_id,
                    row,
                    at[TIMER, positions[row]] if row in positions else None,
                    at[REACHED, newest[row]] if row in newest else None,
                )
                for row in ids
            ]
        raise StoreUnavailable(f"cassandra: timers of shard {shard_id} move faster than they can be read")

    async def _found(self, shard_id: int, id_: Key, timer: Row | None, newest: Row | None) -> Found:
        found = found_of(timer, () if newest is None else (newest,))
        if newest is None or found.reached is not None:
            return found
        # The newest row cannot be decoded: look for an older one.
        orders = await self._read(self._statements.newest, shard_id, [(id_[2], id_[3])], REACHED_ROWS_MAX)
        wanted = [(REACHED, *position_in(order), b"") for _, _, order in orders]
        return found_of(timer, await self._read(self._statements.rows, shard_id, wanted))

    async def _positions(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        rows = await self._read(self._statements.before, shard_id, ids)
        return {(row[0], 0, row[1], row[2], b""): Position(*row[3:6]) for row in rows}

    async def _newest(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        """With fewer ids at a time if the server gives up because so many reached rows were purged."""
        try:
            return await self._newest_of(shard_id, ids)
        except TooManyTombstones:
            if len(ids) == 1:
                raise
            middle = len(ids) // 2
            return await self._newest(shard_id, ids[:middle]) | await self._newest(shard_id, ids[middle:])

    async def _newest_of(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        """In reverse order, so the first row of an id is the newest; an id may have thousands, which are skipped."""
        found: dict[Key, Position] = {}
        wanted = {(row[2], row[3]): row for row in ids}
        while wanted:
            limit = 1 if len(wanted) == 1 else KEYS_PER_READ * 2
            rows = await self._read(self._statements.newest, shard_id, list(wanted), limit)
            for high, low, order in rows:
                found.setdefault(wanted[high, low], position_in(order))
            if len(rows) < limit:
                break
            last = (rows[-1][0], rows[-1][1])
            wanted = {halves: row for halves, row in wanted.items() if halves < last}
        return found

    # -- lists

    async def list_timers(self, query: ListQuery) -> Listing:
        lower_bounds = {row[0]: lower_bounds_of(row) for row in await self._shard_rows(query.num_shards)}

        async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
            return await asyncio.gather(*(self._scan(query, scan, lower_bounds.get(scan.shard_id)) for scan in scans))

        return await merge_scans(query, fetch)

    async def _scan(self, query: ListQuery, scan: Scan, lower_bounds: LowerBounds | None) -> ScanResult:
        if lower_bounds is None:  # no such shard
            return ScanResult((), True)
        ended = bool(query.outcomes)
        bound_from_ms = lower_bounds.reached_from_ms if ended else lower_bounds.timers_from_ms
        after = scan.after if bound_from_ms is None else max(scan.after, end_of(bound_from_ms - 1))
        if scan.chars_max == NO_PAYLOADS:
            statement = self._statements.list_reached_bare if ended else self._statements.list_timers_bare
            rows, _ = await self._ranges.between(statement, scan.shard_id, after, scan.until_ms, scan.count)
            items: list[Item] = [(position_of(row), match_row(query, with_no_payload(row))) for row in rows]
            return ScanResult(items, len(rows) < scan.count)
        statement = self._statements.list_reached if ended else self._statements.load
        items = []
        while len(items) < scan.count:  # long payloads are left out after each read
            count = min(scan.count - len(items), self._rows_of(scan.shard_id, SCAN_CHARS_PER_READ))
            rows, _ = await self._ranges.between(statement, scan.shard_id, after, scan.until_ms, count)
            self._learn_length(scan.shard_id, rows)
            items += ((position_of(row), within(scan, match_row(query, row))) for row in rows)
            if len(rows) < count:
                return ScanResult(items, True)
            after = items[-1][0]
        return ScanResult(items, False)


def _payload_chars(row: Row) -> int:
    return len(row[_PAYLOAD] or "")


def _by_id(row: ShardRow) -> int:
    return row.shard_id
