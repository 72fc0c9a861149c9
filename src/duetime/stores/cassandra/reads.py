"""Reads from Cassandra: by a range of time, by id, and in order over all shards of a namespace.

All are quorum reads: they see whatever was acknowledged (writes.py says why that is enough after a claim).
Answers are asked for in pieces, because a row may carry a payload of a megabyte and the server does not count bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from duetime.domain.timer import Position, TimerKey
from duetime.errors import StoreError, StoreUnavailable
from duetime.store import Found, Listing, ListQuery, Page, PageRequest, ShardRow
from duetime.stores.cassandra.address import TooManyDeleted
from duetime.stores.cassandra.connection import Line
from duetime.stores.cassandra.ranges import Ranges, end_of
from duetime.stores.cassandra.statements import (
    REACHED,
    TIMER,
    Floors,
    Key,
    Statements,
    floors_of,
    id_row,
    place_in,
    shard_row,
)
from duetime.stores.fencing import each_shard_separately
from duetime.stores.merging import Scan, ScanResult, match_row, merge_scans
from duetime.stores.rows import REACHED_ROWS_MAX, Row, found_of, page_of, position_of

__all__ = ["Reader"]

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

AT_ONCE = 16  # questions in flight
SHARDS_PER_READ = 100
KEYS_PER_READ = 100
ROWS_PER_READ = 250  # the first time; more if they turn out to be small
LOAD_CHARS_MAX = 32 * 1024 * 1024  # of payloads in one answer; pages that would be longer are made shorter
READS_PER_PAGE = 8
_PAYLOAD = 10
_LOOKS = 10


class Reader:
    def __init__(self, line: Line, say: Statements) -> None:
        self._line = line
        self._say = say
        self._room = asyncio.Semaphore(AT_ONCE)
        self._ranges = Ranges(self._read)

    async def _read(self, statement: Any, *values: Any) -> list[Row]:
        async with self._room:
            return await self._line.read(statement, *values)  # type: ignore[return-value]

    # -- shards

    async def shard_count(self) -> int:
        rows = await self._read(self._say.shard_count)
        return int(rows[0][0]) if rows else 0

    async def shards(self) -> list[ShardRow]:
        return sorted((shard_row(row) for row in await self._shard_rows(await self.shard_count())), key=_by_id)

    async def _shard_rows(self, count: int) -> Iterable[Row]:
        ids = range(count)
        pieces = [list(ids[start : start + SHARDS_PER_READ]) for start in range(0, count, SHARDS_PER_READ)]
        found = await asyncio.gather(*(self._read(self._say.shards, piece) for piece in pieces))
        return (row for rows in found for row in rows)

    # -- timers by time

    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        """Each by itself: replicas of one may be down."""
        return await each_shard_separately(requests, [request.shard_id for request in requests], self._load)

    async def _load(self, request: PageRequest) -> Page:
        """Others wait for this page: it does not pass over all that was deleted at once."""
        found: list[Row] = []
        after, chars = request.after, 0
        count = min(request.limit, ROWS_PER_READ)
        while True:
            rows, passed = await self._ranges.between(
                self._say.load, request.shard_id, after, request.until_ms, count, READS_PER_PAGE
            )
            found += rows
            chars += sum(len(row[_PAYLOAD] or "") for row in rows)
            if passed is not None:
                if passed == after:
                    continue  # nothing is known yet but how narrow a range must be
                return page_of(found, passed)
            if len(rows) < count:
                return page_of(found, None)
            after = position_of(found[-1])
            if len(found) >= request.limit or chars >= LOAD_CHARS_MAX:
                return page_of(found, after)
            room = max(ROWS_PER_READ, LOAD_CHARS_MAX // (chars // len(found) + 1))
            count = min(request.limit - len(found), room)

    # -- timers by id

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        by_shard: dict[int, list[TimerKey]] = {}
        for shard_id, key in dict.fromkeys(keys):
            by_shard.setdefault(shard_id, []).append(key)
        asked = [
            (shard_id, some[start : start + KEYS_PER_READ])
            for shard_id, some in by_shard.items()
            for start in range(0, len(some), KEYS_PER_READ)
        ]
        answers = await asyncio.gather(*(self._get(shard_id, some) for shard_id, some in asked))
        found = {
            (shard_id, key): item
            for (shard_id, some), items in zip(asked, answers, strict=True)
            for key, item in zip(some, items, strict=True)
        }
        return [found[key] for key in keys]

    async def _get(self, shard_id: int, keys: Sequence[TimerKey]) -> list[Found]:
        """Where they stand, then what stands there. A timer that has moved in between is looked for again."""
        ids = [id_row(key) for key in keys]
        for _ in range(_LOOKS):
            places, newest = await asyncio.gather(self._places(shard_id, ids), self._newest(shard_id, ids))
            wanted: list[Key] = [(TIMER, *place, b"") for place in places.values()]
            wanted += [(REACHED, *place, b"") for place in newest.values()]
            if not wanted:
                return [Found()] * len(keys)
            rows = await self._read(self._say.rows, shard_id, wanted)
            if len(rows) < len(wanted):
                continue
            at = {(row[-1], position_of(row)): row for row in rows}
            return [
                await self._found(
                    shard_id,
                    row,
                    at[TIMER, places[row]] if row in places else None,
                    at[REACHED, newest[row]] if row in newest else None,
                )
                for row in ids
            ]
        raise StoreUnavailable(f"cassandra: timers of shard {shard_id} move faster than they can be read")

    async def _found(self, shard_id: int, id_: Key, timer: Row | None, newest: Row | None) -> Found:
        found = found_of(timer, () if newest is None else (newest,))
        if newest is None or found.reached is not None:
            return found
        # It cannot be decoded; perhaps an older one can.
        orders = await self._read(self._say.newest, shard_id, [(id_[2], id_[3])], REACHED_ROWS_MAX)
        wanted = [(REACHED, *place_in(order), b"") for _, _, order in orders]
        return found_of(timer, await self._read(self._say.rows, shard_id, wanted))

    async def _places(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        rows = await self._read(self._say.before, shard_id, ids)
        return {(row[0], 0, row[1], row[2], b""): Position(*row[3:6]) for row in rows}

    async def _newest(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        """Of fewer at a time, where so many of theirs were purged that the server gives up."""
        try:
            return await self._newest_of(shard_id, ids)
        except TooManyDeleted:
            if len(ids) == 1:
                raise
            middle = len(ids) // 2
            return await self._newest(shard_id, ids[:middle]) | await self._newest(shard_id, ids[middle:])

    async def _newest_of(self, shard_id: int, ids: Sequence[Key]) -> dict[Key, Position]:
        """Backwards, so the first of an id is its newest; an id may have thousands, which are then passed over."""
        found: dict[Key, Position] = {}
        wanted = {(row[2], row[3]): row for row in ids}
        while wanted:
            limit = 1 if len(wanted) == 1 else KEYS_PER_READ * 2
            rows = await self._read(self._say.newest, shard_id, list(wanted), limit)
            for high, low, order in rows:
                found.setdefault(wanted[high, low], place_in(order))
            if len(rows) < limit:
                break
            last = (rows[-1][0], rows[-1][1])
            wanted = {halves: row for halves, row in wanted.items() if halves < last}
        return found

    # -- lists

    async def list_timers(self, query: ListQuery) -> Listing:
        floors = {row[0]: floors_of(row) for row in await self._shard_rows(query.num_shards)}

        async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
            return await asyncio.gather(*(self._scan(query, scan, floors.get(scan.shard_id)) for scan in scans))

        return await merge_scans(query, fetch)

    async def _scan(self, query: ListQuery, scan: Scan, floors: Floors | None) -> ScanResult:
        if floors is None:  # there is no such shard
            return ScanResult((), True)
        ended = bool(query.outcomes)
        floor_ms = floors.reached_from_ms if ended else floors.timers_from_ms
        after = scan.after if floor_ms is None else max(scan.after, end_of(floor_ms - 1))
        statement = self._say.list_reached if ended else self._say.load
        rows, _ = await self._ranges.between(statement, scan.shard_id, after, scan.until_ms, scan.count)
        return ScanResult([(position_of(row), match_row(query, row)) for row in rows], len(rows) < scan.count)


def _by_id(row: ShardRow) -> int:
    return row.shard_id
