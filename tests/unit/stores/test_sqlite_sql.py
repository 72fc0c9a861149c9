"""Results of SQLite that would be too long are read in parts, and a part is never taken for the whole. Lists read a
limited number of rows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import apsw
import pytest
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, Extras, Outcome, Position, Reached, Timer, TimerKey
from duetime.errors import StoreUnavailable
from duetime.store import Batch, Claim, Fence, Found, ListQuery, PageRequest, ShardRow
from duetime.stores.rows import LARGEST
from duetime.stores.sqlite import listing as sqlite_listing
from duetime.stores.sqlite import rows as sqlite_rows
from duetime.stores.sqlite import statements as sqlite_statements
from duetime.stores.sqlite import store as sqlite
from duetime.stores.sqlite.store import SqliteStore
from duetime.testing import make_reached, make_timer

COUNT = 40
FAR_MS = 1 << 53
PAYLOAD = '"' + "x" * 3_000 + '"'


@pytest.fixture
async def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqliteStore]:
    """One result has space for six of our timers and no more."""
    monkeypatch.setattr(sqlite, "RESULT_BYTES_MAX", 22_000)
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
        replace(make_reached(timer, Outcome.DELIVERED), purge_at_ms=9_000 + number)
        for number, timer in enumerate(timers(count))
    ]


@pytest.mark.parametrize("limit", [4, 8, 16, 23, 24, 64, 1_000])
async def test_a_page_cut_by_its_byte_limit_is_not_the_end(store: SqliteStore, limit: int) -> None:
    await store.commit([Batch(await owned(store), timers())])
    found: list[Timer] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        [page] = await store.load([PageRequest(0, after, FAR_MS, limit)])
        assert 0 < len(page.timers) <= limit
        assert page.next is None or page.next == page.timers[-1].position
        found += page.timers
        after = page.next
    assert found == timers()


async def test_many_timers_of_one_get_are_all_found_in_order(store: SqliteStore) -> None:
    await store.commit([Batch(await owned(store), timers(), reached=ended(7))])
    keys = [(0, timer.key) for timer in timers()][::-1]
    keys.insert(5, (0, TimerKey("test", "absent")))
    expected = [Found(timer, ended(7)[n] if n < 7 else None) for n, timer in enumerate(timers())][::-1]
    expected.insert(5, Found())
    assert await store.get_many(keys) == expected
    assert await store.get_many(keys[:7]) == expected[:7]
    assert await store.get_many([]) == []


@pytest.mark.parametrize("outcomes", [frozenset[Outcome](), frozenset({Outcome.DELIVERED})])
@pytest.mark.parametrize("limit", [3, 9, 100])
async def test_a_list_over_rows_too_large_for_one_result_is_complete(
    store: SqliteStore, outcomes: frozenset[Outcome], limit: int
) -> None:
    first, second = await owned(store), await owned(store, 1)
    await store.commit([Batch(first, timers()[::2], reached=ended()[::2])])
    await store.commit([Batch(second, timers()[1::2], reached=ended()[1::2])])
    query = ListQuery(namespace="test", num_shards=2, outcomes=outcomes, limit=limit)
    found: list[Timer | Reached] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        page = await store.list_timers(replace(query, after=after))
        found += [*page.timers, *page.reached]
        after = page.next
    assert found == (ended() if outcomes else timers())


async def test_one_row_too_large_for_a_result_is_an_error_and_not_the_end(store: SqliteStore) -> None:
    huge = make_timer("huge", execute_at_ms=1_000, payload='"' + "x" * 30_000 + '"')
    await store.commit([Batch(await owned(store), [huge, *timers(2)])])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.load([PageRequest(0, BEFORE_ALL, FAR_MS, 10)])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.get_many([(0, huge.key)])
    with pytest.raises(StoreUnavailable, match="TooBig"):
        await store.list_timers(ListQuery(namespace="test", num_shards=1))


# --- lists ---------------------------------------------------------------------------------------


class Pages:
    """What each statement of a list reads."""

    def __init__(self, store: SqliteStore) -> None:
        self.asked: list[dict[str, Any]] = []
        assert store._list_db is not None
        store._list_db.exec_trace = self._note

    def _note(self, cursor: apsw.Cursor, sql: str, bindings: Any) -> bool:
        self.asked.append(bindings)
        return True

    def sizes(self) -> list[int]:
        return [bindings["page"] for bindings in self.asked]


async def walked(store: SqliteStore, query: ListQuery) -> tuple[list[Timer | Reached], int]:
    """All pages together, and how many there were."""
    found: list[Timer | Reached] = []
    after: Position | None = BEFORE_ALL
    pages = 0
    while after is not None:
        page = await store.list_timers(replace(query, after=after))
        found += [*page.timers, *page.reached]
        after = page.next
        pages += 1
    return found, pages


def small(count: int, **fields: Any) -> list[Timer]:
    return [make_timer(f"t{n}", execute_at_ms=1_000 + n, **fields) for n in range(count)]


async def fill(store: SqliteStore, timers: list[Timer], shards: int = 1) -> None:
    for shard_id in range(shards):
        await store.commit([Batch(await owned(store, shard_id), timers[shard_id::shards])])


async def test_a_list_reads_a_limited_number_of_rows_and_returns_where_to_continue(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_listing, "LIST_ROWS_MAX", 50)
    monkeypatch.setattr(sqlite_listing, "LIST_PAGE_MAX", 8)
    ours = make_timer("ours", execute_at_ms=9_000)
    await fill(store, [*small(200, namespace="theirs"), ours], shards=2)
    query = ListQuery(namespace="test", num_shards=2, limit=3)
    pages = Pages(store)
    first = await store.list_timers(query)
    assert (first.timers, first.next is None) == ([], False)
    assert 50 // 8 <= len(pages.asked) <= 50 // 8 + 2
    assert set(pages.sizes()) == {2 + 3 * 2 // 2, 8}, "pages grow, but not for ever"
    found, count = await walked(store, query)
    assert found == [ours]
    assert count >= 4


@pytest.mark.parametrize(("rows_max", "statements"), [(15, 2), (16, 2), (17, 3)])
async def test_the_limit_of_a_list_counts_the_rows_that_were_read(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch, rows_max: int, statements: int
) -> None:
    monkeypatch.setattr(sqlite_listing, "LIST_ROWS_MAX", rows_max)
    monkeypatch.setattr(sqlite_listing, "LIST_PAGE_MAX", 8)
    await fill(store, small(100, namespace="theirs"))
    pages = Pages(store)
    await store.list_timers(ListQuery(namespace="test", num_shards=1, limit=3))
    assert pages.sizes() == [8] * statements


async def test_the_first_rows_of_every_shard_are_read_whatever_the_limit(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_listing, "LIST_ROWS_MAX", 1)
    await fill(store, small(30), shards=3)
    found, _ = await walked(store, ListQuery(namespace="test", num_shards=3, limit=2))
    assert found == small(30)


async def test_pages_of_a_list_double(store: SqliteStore) -> None:
    await fill(store, small(400, namespace="theirs"))
    pages = Pages(store)
    listing = await store.list_timers(ListQuery(namespace="test", num_shards=1, limit=10))
    assert pages.sizes() == [22, 44, 88, 176, 256]
    assert listing.next is None, "all of them were read"


async def test_a_list_of_exactly_the_limit_with_no_more_rows_is_the_end(store: SqliteStore) -> None:
    await fill(store, small(3))
    assert (await store.list_timers(ListQuery(namespace="test", num_shards=1, limit=3))).next is None
    shorter = await store.list_timers(ListQuery(namespace="test", num_shards=1, limit=2))
    assert shorter.next == small(3)[1].position


async def test_the_due_range_of_scheduled_timers_limits_the_rows_that_are_read(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_listing, "LIST_ROWS_MAX", 20)
    await fill(store, small(200))
    pages = Pages(store)
    query = ListQuery(namespace="test", num_shards=1, limit=15, due_from_ms=1_100, due_until_ms=1_110)
    listing = await store.list_timers(query)
    assert listing.timers == small(200)[100:110]
    assert listing.next is None
    [asked] = pages.asked
    assert (asked["a"], asked["b"], asked["c"], asked["until"]) == (1_099, LARGEST, LARGEST, 1_109)


async def test_the_due_range_of_reached_timers_is_by_scheduled_time_and_not_by_purge_time(
    store: SqliteStore,
) -> None:
    early = make_reached(make_timer("early", execute_at_ms=9_000), purge_at_ms=5_000)
    late = make_reached(make_timer("late", execute_at_ms=9_000), purge_at_ms=50_000)
    await store.commit([Batch(await owned(store), reached=[early, late])])
    outcomes = frozenset({Outcome.DELIVERED})
    query = ListQuery(namespace="test", num_shards=1, outcomes=outcomes, due_from_ms=8_000, due_until_ms=10_000)
    assert (await store.list_timers(query)).reached == [early, late]


async def test_timers_of_a_correlation_are_found_by_one_scan_of_their_index_in_the_shards_of_the_namespace(
    store: SqliteStore,
) -> None:
    await fill(store, small(30, correlation_id="c"), shards=3)
    pages = Pages(store)
    query = ListQuery(namespace="test", num_shards=2, limit=7, correlation_id="c")
    listing = await store.list_timers(query)
    assert listing.timers == [timer for n, timer in enumerate(small(30, correlation_id="c")) if n % 3 < 2][:7]
    assert pages.sizes() == [8]


# --- the rest ------------------------------------------------------------------------------------


async def test_low_water_is_written_to_the_row_of_its_shard_only(store: SqliteStore) -> None:
    fence = await owned(store)
    await store.commit([Batch(fence, small(3), low_water=Position(5, 0, 0))])
    await store.commit([Batch(fence, low_water=Position(6, 0, 0))])
    assert (await store.shards())[0].low_water == Position(6, 0, 0)
    assert store._read_db is not None
    assert store._read_db.execute("SELECT count(*) FROM timers WHERE shard_low_water IS NOT NULL").get == 1


async def test_two_timers_with_the_same_row_key_are_an_error_and_neither_is_lost(
    store: SqliteStore,
) -> None:
    """Two names with the same digest. It will not happen; if it does, the second one must not be acknowledged."""
    fence = await owned(store)
    first = make_timer("first", execute_at_ms=1_000)
    second = replace(first, timer_id="second")
    await store.commit([Batch(fence, [first])])
    with pytest.raises(StoreUnavailable, match="Constraint"):
        await store.commit([Batch(fence, [second])])
    [page] = await store.load([PageRequest(0, BEFORE_ALL, FAR_MS, 10)])
    assert page.timers == [first]


async def test_ensure_shards_of_zero_creates_none_and_an_empty_claim_succeeds(store: SqliteStore) -> None:
    await store.ensure_shards(0)
    assert await store.shards() == []
    assert await store.claim([Claim(3, 0, 7, "me", "here:1", 1)]) == [ShardRow(3)]


async def test_of_reached_rows_of_one_time_the_one_with_the_highest_position_is_the_newest(
    store: SqliteStore,
) -> None:
    fence = await owned(store)

    def end(occurrence: int, purge_at_ms: int) -> Reached:
        timer = make_timer("a", execute_at_ms=1_000, extras=Extras(occurrence=occurrence))
        return make_reached(timer, purge_at_ms=purge_at_ms)

    ends = [end(0, 9_000), end(1, 9_002), end(2, 9_001)]
    await store.commit([Batch(fence, reached=ends)])
    assert await store.get_many([(0, TimerKey("test", "a"))]) == [Found(None, ends[1])]
    more = [end(occurrence, 9_003) for occurrence in range(3, 9)]
    await store.commit([Batch(fence, reached=more)])
    highest = max(more, key=lambda reached: reached.position)
    assert await store.get_many([(0, TimerKey("test", "a"))]) == [Found(None, highest)]


async def test_a_get_of_many_long_payloads_holds_few_of_them_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(str(tmp_path / "duetime.db"))
    await store.migrate()
    await store.open()
    timers = [make_timer(f"t-{n}", payload=f'"{"x" * 200_000}"') for n in range(60)]
    ends = [make_reached(timer) for timer in timers]
    await store.commit([Batch(await owned(store), timers, (), ends)])
    lengths: list[int] = []
    decode = sqlite_rows.decode_rows

    def measured(text: str) -> list[list[Any]]:
        lengths.append(len(text))
        return decode(text)

    monkeypatch.setattr(sqlite_statements, "decode_rows", measured)
    found = await store.get_many([(0, timer.key) for timer in timers])
    await store.close()
    assert found == [Found(timer, end) for timer, end in zip(timers, ends, strict=True)]
    assert max(lengths) < 300_000, "together they are 24 MB"
