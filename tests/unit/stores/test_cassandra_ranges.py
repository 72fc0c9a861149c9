"""Reads over deleted rows, against a simulated server that gives up as Cassandra does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.domain.timer import BEFORE_ALL, Position, Timer
from duetime.store import Page, PageRequest
from duetime.stores.cassandra.errors import TooManyTombstones
from duetime.stores.cassandra.ranges import RangeReader, _number_of, _position_of, end_of
from duetime.stores.cassandra.reads import Reader
from duetime.stores.cassandra.statements import Key
from duetime.stores.rows import LARGEST, LAST_MS, timer_values
from duetime.testing import make_timer

halves = st.integers(-3, 3).map(lambda number: number * 1_000)
positions = st.builds(Position, st.integers(0, 6), halves, halves)


class Partition:
    """Rows in order, of which some are deleted and remain as tombstones."""

    def __init__(self, living: set[Position], deleted: set[Position], deleted_max: int) -> None:
        self.rows = sorted(living | deleted)
        self.living = living
        self.deleted_max = deleted_max
        self.ends: set[Position] = set()
        self.reads = 0

    async def read(self, statement: Any, shard_id: int, *values: int) -> list[Position]:
        self.reads += 1
        after, upto, limit = Position(*values[:3]), Position(*values[3:6]), values[6]
        found: list[Position] = []
        passed = 0
        for row in self.rows:
            if not after < row <= upto:
                continue
            if row in self.living:
                found.append(row)
                if len(found) == limit:
                    break
            elif (passed := passed + 1) > self.deleted_max:
                raise TooManyTombstones("cassandra: tombstones")
        self.ends.add(upto)
        return found


def read_all(partition: Partition, until_ms: int, count: int, reads_max: int | None = None) -> list[Any]:
    """Read from the beginning, in as many calls as needed."""

    async def run() -> list[Any]:
        ranges, after = RangeReader(partition.read), BEFORE_ALL
        rows: list[Any] = []
        while True:
            some, passed = await ranges.between(None, 0, after, until_ms, count - len(rows), reads_max)
            rows += some
            if passed is None:
                return rows
            assert passed >= after
            after = passed

    return asyncio.run(run())


@given(
    st.sets(positions, max_size=20),
    st.sets(positions, min_size=30, max_size=60),
    st.integers(0, 6),
    st.integers(1, 40),
    st.integers(2, 4),
    st.sampled_from([None, 1, 3]),
)
def test_all_rows_are_found_whatever_rows_were_deleted(
    living: set[Position], deleted: set[Position], until_ms: int, count: int, deleted_max: int, reads_max: int | None
) -> None:
    """Also rows where one range ends and the next begins: the second read has rows at these positions."""
    first = Partition(living, deleted, deleted_max)
    read_all(first, until_ms, 1_000, reads_max)
    seams = first.ends | {_position_of(_number_of(end) + 1) for end in first.ends}
    living = living | (seams - deleted)
    for wanted in (count, 1_000):
        found = read_all(Partition(living, deleted, deleted_max), until_ms, wanted, reads_max)
        assert found == [row for row in sorted(living) if row.execute_at_ms <= until_ms][:wanted]


@pytest.mark.parametrize(
    "position",
    [
        Position(0, 0, 0),
        Position(-2, LARGEST, LARGEST),
        BEFORE_ALL,
        Position(LAST_MS, -LARGEST - 1, LARGEST),
        Position(7, -1, -LARGEST - 1),
    ],
)
def test_positions_are_numbers_in_the_same_order(position: Position) -> None:
    assert _position_of(_number_of(position)) == position
    assert _number_of(position) < _number_of(position._replace(execute_at_ms=position.execute_at_ms + 1))


async def test_where_little_was_deleted_one_read_is_enough() -> None:
    partition = Partition({Position(n, n, n) for n in range(10)}, {Position(n, 7, n) for n in range(5)}, 5)
    rows, passed = await RangeReader(partition.read).between(None, 0, BEFORE_ALL, 100, 20)
    assert (len(rows), passed, partition.reads) == (10, None, 1)


async def test_a_hundred_times_too_many_are_passed_in_not_many_more_reads() -> None:
    """Seven years of them, evenly; and who reads on does not find out again how narrow a range must be."""
    last = Position(LAST_MS - 1, 0, 0)
    partition = Partition({last}, {Position(n * 442_000_000, 1, 1) for n in range(500)}, 5)
    ranges = RangeReader(partition.read)
    rows, passed = await ranges.between(None, 0, BEFORE_ALL, LAST_MS, 10, reads_max=100)
    while passed is not None:
        rows, passed = await ranges.between(None, 0, passed, LAST_MS, 10, reads_max=10)
    assert rows == [last]
    assert partition.reads < 300


async def test_narrow_ranges_of_one_shard_are_not_those_of_another_and_widen_again() -> None:
    partition = Partition(set(), {Position(5, n, n) for n in range(100)}, 5)
    ranges = RangeReader(partition.read)
    await ranges.between(None, 5, BEFORE_ALL, 10, 10)
    before = partition.reads
    await ranges.between(None, 0, Position(6, 0, 0), 10, 10)
    assert partition.reads == before + 1
    await ranges.between(None, 5, Position(6, 0, 0), LAST_MS, 10)
    before = partition.reads
    await ranges.between(None, 5, Position(6, 0, 0), LAST_MS, 10)
    assert partition.reads < before + 5


async def test_a_server_that_gives_up_over_a_single_row_is_not_asked_for_ever() -> None:
    async def read(*_: Any) -> list[Position]:
        raise TooManyTombstones("cassandra: tombstones")

    with pytest.raises(TooManyTombstones):
        await RangeReader(read).between(None, 0, BEFORE_ALL, 100, 10)


class Deleted:
    """A line to a partition in which three deleted rows follow each timer, all due at one moment."""

    def __init__(self, timers: list[Timer]) -> None:
        self.living = {timer.position: timer for timer in timers}
        gone = {position._replace(uuid_low=position.uuid_low + n) for position in self.living for n in (1, 2, 3)}
        self.partition = Partition(set(self.living), gone, deleted_max=4)

    async def read(self, statement: Any, shard_id: int, *values: int) -> list[Any]:
        return [timer_values(self.living[row]) for row in await self.partition.read(statement, shard_id, *values)]


@pytest.mark.parametrize("limit", [1, 7, 1_000])
async def test_a_page_is_not_kept_waiting_for_all_that_was_deleted_and_nothing_is_missed(limit: int) -> None:
    timers = sorted((make_timer(f"n-{n}", 50_000) for n in range(40)), key=lambda timer: timer.position)
    client = Deleted(timers)
    reader = Reader(client, Said())  # type: ignore[arg-type]
    found: list[Timer] = []
    after: Position | None = end_of(49_999)  # the first reads only find out how narrow a range must be
    pages = 0
    while after is not None:
        [page] = await reader.load([PageRequest(0, after, LAST_MS, limit)])
        assert isinstance(page, Page)
        assert len(page.timers) <= limit
        assert page.next is None or page.next > after
        found += page.timers
        after = page.next
        pages += 1
    assert found == timers
    assert pages > 2
    assert client.partition.reads < 20 * pages


class Ids:
    """A line to a partition in which every id has a living end and two deleted ones behind it."""

    def __init__(self, deleted_max: int) -> None:
        self.deleted_max = deleted_max

    async def read(self, statement: Any, shard_id: int, ids: list[tuple[int, int]], limit: int) -> list[Any]:
        found: list[Any] = []
        for high, low in sorted(ids, reverse=True):
            found.append((high, low, bytes(40)))
            if len(found) == limit:
                return found
            if 2 * len(found) > self.deleted_max:
                raise TooManyTombstones("cassandra: tombstones")
        return found


class Said:
    newest = None
    load = None


@pytest.mark.parametrize("deleted_max", [1, 2, 7, 100])
async def test_the_newest_ends_of_many_ids_are_found_where_many_more_were_purged(deleted_max: int) -> None:
    ids: list[Key] = [(4, 0, n, -n, b"") for n in range(25)]
    reader = Reader(Ids(deleted_max), Said())  # type: ignore[arg-type]
    assert set(await reader._newest(0, ids)) == set(ids)
