"""Reads over ranges with deleted rows in them, against a server that gives up as Cassandra does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.model import BEFORE_ALL, Position
from duetime.stores.cassandra_link import TooManyDeleted
from duetime.stores.cassandra_ranges import between, end_of
from duetime.stores.rows import LARGEST, LAST_MS

DELETED_MAX = 5  # that the server passes over

halves = st.one_of(st.integers(-3, 3), st.sampled_from([-LARGEST - 1, LARGEST]))
times = st.one_of(st.integers(0, 20), st.integers(0, LAST_MS))
positions = st.builds(Position, times, halves, halves)


class Partition:
    """Rows in order, of which some are deleted and still there."""

    def __init__(self, living: set[Position], deleted: set[Position]) -> None:
        self.rows = sorted(living | deleted)
        self.living = living
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
            elif (passed := passed + 1) > DELETED_MAX:
                raise TooManyDeleted("cassandra: tombstones")
        return found


@given(
    st.sets(positions, max_size=30),
    st.sets(positions, max_size=30),
    st.one_of(st.just(BEFORE_ALL), positions),
    times,
    st.integers(1, 40),
)
def test_the_same_rows_are_found_whatever_was_deleted_among_them(
    living: set[Position], deleted: set[Position], after: Position, until_ms: int, count: int
) -> None:
    partition = Partition(living, deleted)
    found = asyncio.run(between(partition.read, None, 0, after, until_ms, count))
    assert found == [row for row in sorted(living) if after < row <= end_of(until_ms)][:count]


async def test_where_little_was_deleted_one_read_is_enough() -> None:
    partition = Partition({Position(n, n, n) for n in range(10)}, {Position(n, 7, n) for n in range(DELETED_MAX)})
    assert len(await between(partition.read, None, 0, BEFORE_ALL, 100, 20)) == 10
    assert partition.reads == 1


async def test_a_hundred_times_too_many_are_passed_in_not_many_more_reads() -> None:
    """Seven years of them, evenly; what narrows at first grows again, and does not start anew each time."""
    spread = {Position(n * 442_000_000, 1, 1) for n in range(100 * DELETED_MAX)}
    partition = Partition({Position(LAST_MS - 1, 0, 0)}, spread)
    assert await between(partition.read, None, 0, BEFORE_ALL, LAST_MS, 10) == [Position(LAST_MS - 1, 0, 0)]
    assert partition.reads < 300


async def test_a_server_that_gives_up_over_a_single_row_is_not_asked_for_ever() -> None:
    async def read(*_: Any) -> list[Position]:
        raise TooManyDeleted("cassandra: tombstones")

    with pytest.raises(TooManyDeleted):
        await between(read, None, 0, BEFORE_ALL, 100, 10)
