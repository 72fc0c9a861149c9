"""Answers of SQLite that would be too long are given in parts, and a part is never taken for the whole."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from duetime.errors import StoreUnavailable
from duetime.model import BEFORE_ALL, Ending, Position, Reached, Timer, TimerKey
from duetime.store import Batch, Claim, Fence, Found, ListQuery, Stretch
from duetime.stores import sqlite
from duetime.stores.sqlite import SqliteStore
from duetime.testing import make_reached, make_timer

COUNT = 40
FAR_MS = 1 << 53
PAYLOAD = '"' + "x" * 3_000 + '"'


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    """One answer holds six of our timers and no more."""
    monkeypatch.setattr(sqlite, "ANSWER_BYTES_MAX", 22_000)
    store = SqliteStore(str(tmp_path / "duetime.db"))
    await store.migrate()
    await store.open()
    yield store
    await store.close()


async def owned(store: SqliteStore, shard_id: int = 0) -> Fence:
    await store.ensure_shards(shard_id + 1)
    [row] = await store.claim([Claim(shard_id, 0, 7, "me", "here:1", 1)])
    return row.fence


def timers(count: int = COUNT) -> list[Timer]:
    return [make_timer(f"t{n}", execute_at_ms=1_000 + n, payload=PAYLOAD) for n in range(count)]


def ended(count: int = COUNT) -> list[Reached]:
    return [
        replace(make_reached(timer, Ending.DELIVERED), purge_at_ms=9_000 + number)
        for number, timer in enumerate(timers(count))
    ]


@pytest.mark.parametrize("limit", [4, 8, 16, 23, 24, 64, 1_000])
async def test_a_page_cut_by_its_byte_limit_is_not_the_end(store: SqliteStore, limit: int) -> None:
    await store.commit([Batch(await owned(store), timers())])
    found: list[Timer] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        [page] = await store.load([Stretch(0, after, FAR_MS, limit)])
        assert 0 < len(page.timers) <= limit
        assert page.next is None or page.next == page.timers[-1].position
        found += page.timers
        after = page.next
    assert found == timers()


async def test_many_timers_asked_for_at_once_are_all_found_in_the_order_asked(store: SqliteStore) -> None:
    await store.commit([Batch(await owned(store), timers(), reached=ended(7))])
    keys = [(0, timer.key) for timer in timers()][::-1]
    keys.insert(5, (0, TimerKey("test", "absent")))
    expected = [Found(timer, ended(7)[n] if n < 7 else None) for n, timer in enumerate(timers())][::-1]
    expected.insert(5, Found())
    assert await store.get_many(keys) == expected
    assert await store.get_many(keys[:7]) == expected[:7]
    assert await store.get_many([]) == []


@pytest.mark.parametrize("endings", [frozenset[Ending](), frozenset({Ending.DELIVERED})])
@pytest.mark.parametrize("limit", [3, 9, 100])
async def test_a_list_over_rows_too_large_for_one_answer_is_whole(
    store: SqliteStore, endings: frozenset[Ending], limit: int
) -> None:
    first, second = await owned(store), await owned(store, 1)
    await store.commit([Batch(first, timers()[::2], reached=ended()[::2])])
    await store.commit([Batch(second, timers()[1::2], reached=ended()[1::2])])
    query = ListQuery(namespace="test", num_shards=2, endings=endings, limit=limit)
    found: list[Timer | Reached] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        page = await store.list_timers(replace(query, after=after))
        found += [*page.timers, *page.reached]
        after = page.next
    assert found == (ended() if endings else timers())


async def test_one_row_too_large_for_an_answer_is_an_error_and_not_the_end(store: SqliteStore) -> None:
    huge = make_timer("huge", execute_at_ms=1_000, payload='"' + "x" * 30_000 + '"')
    await store.commit([Batch(await owned(store), [huge, *timers(2)])])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.load([Stretch(0, BEFORE_ALL, FAR_MS, 10)])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.get_many([(0, huge.key)])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.list_timers(ListQuery(namespace="test", num_shards=1))
