"""Lists over shards are merged in order, read a limited number of rows, and end only when every scan has ended."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, Extras, Outcome, Position, Reached, Timer, shard_of, uuid_of
from duetime.store import Listing, ListQuery, Unreadable
from duetime.stores.merging import (
    LIST_PAGE_MAX,
    LIST_ROWS_MAX,
    NO_PAYLOADS,
    Item,
    Scan,
    ScanResult,
    is_match,
    merge_scans,
    within,
)
from duetime.stores.rows import LARGEST, LAST_MS, payload_chars, position_before

SHARDS = 4


def timer(number: int, at_ms: int | None = None, **fields: Any) -> Timer:
    timer_id = fields.pop("timer_id", f"t{number}")
    namespace = fields.pop("namespace", "ours")
    high, low = uuid_of(namespace, timer_id)
    at_ms = 1_000 + number if at_ms is None else at_ms
    return Timer(
        namespace=namespace,
        timer_id=timer_id,
        uuid_high=high,
        uuid_low=low,
        generation=1,
        execute_at_ms=at_ms,
        scheduled_at_ms=at_ms,
        created_at_ms=0,
        callback_url="http://shop.test",
        **fields,
    )


def reached(number: int, outcome: Outcome = Outcome.DELIVERED, **fields: Any) -> Reached:
    return Reached(timer=timer(number, **fields), outcome=outcome, reached_at_ms=5, purge_at_ms=9_000 + number)


class Database:
    """Rows by shard. Returns at most `most` rows at a time. With `late`, the end of a scan is reported only by a scan
    after the last row. Both are allowed."""

    def __init__(
        self, rows: Sequence[Timer | Reached], *, shards: int = SHARDS, most: int = 10_000, late: bool = False
    ):
        self.most, self.late = most, late
        self.calls: list[list[Scan]] = []
        self.rows_read = 0
        self.shards: list[list[Timer | Reached]] = [[] for _ in range(shards)]
        for row in sorted(rows, key=lambda row: row.position):
            timer_id = row.timer_id if isinstance(row, Timer) else row.timer.timer_id
            self.shards[shard_of(timer_id, shards)].append(row)
        self.query = ListQuery(namespace="ours", num_shards=shards)

    async def page(self, **fields: Any) -> Listing:
        self.query = replace(self.query, **fields)
        self.calls.clear()
        self.rows_read = 0
        return await merge_scans(self.query, self.fetch)

    async def fetch(self, scans: Sequence[Scan]) -> list[ScanResult]:
        self.calls.append(list(scans))
        return [self._piece(scan, self.shards[scan.shard_id]) for scan in scans]

    def _piece(self, scan: Scan, rows: list[Timer | Reached]) -> ScanResult:
        start = bisect_right(rows, scan.after, key=lambda row: row.position)
        end = bisect_right(rows, scan.until_ms, key=lambda row: row.position.execute_at_ms)
        page = rows[start : min(end, start + scan.count, start + self.most)]
        self.rows_read += len(page)
        items: list[Item] = [(row.position, row if is_match(self.query, row) else None) for row in page]
        return ScanResult(items, not page if self.late else start + len(page) >= end)

    async def walk(self, **fields: Any) -> list[Any]:
        """All pages, one after the other."""
        found: list[Any] = []
        after = BEFORE_ALL
        while True:
            listing = await self.page(after=after, **fields)
            found_here = [*listing.timers, *listing.reached]
            assert len(found_here) <= self.query.limit
            found += found_here
            if listing.next is None:
                return found
            assert listing.next > after
            after = listing.next


@pytest.mark.parametrize("limit", [1, 2, 7, 100])
@pytest.mark.parametrize(("most", "late"), [(10_000, False), (10_000, True), (3, False), (1, True)])
async def test_all_pages_together_are_everything_in_order(limit: int, most: int, late: bool) -> None:
    timers = [timer(n, at_ms=1_000 + n // 3) for n in range(60)]
    database = Database(timers, most=most, late=late)
    assert await database.walk(limit=limit) == sorted(timers, key=lambda row: row.position)


async def test_a_page_of_exactly_the_limit_with_no_more_rows_is_the_last_one() -> None:
    database = Database([timer(n) for n in range(10)])
    whole = await database.page(limit=10)
    assert len(whole.timers) == 10
    assert whole.next is None
    shorter = await database.page(limit=9)
    assert len(shorter.timers) == 9
    assert shorter.next == timer(8).position


async def test_without_stored_rows_the_result_is_empty_and_has_no_next() -> None:
    database = Database([])
    listing = await database.page(limit=5)
    assert (listing.timers, listing.reached, listing.next) == ([], (), None)
    assert len(database.calls) == 1


async def test_reached_timers_are_filtered_by_outcome_and_scheduled_time() -> None:
    rows = [reached(n, Outcome.FAILED if n % 2 else Outcome.DELIVERED) for n in range(20)]
    database = Database(rows)
    assert await database.walk(limit=3, outcomes=frozenset({Outcome.FAILED})) == rows[1::2]
    both = frozenset({Outcome.FAILED, Outcome.DELIVERED})
    due = {"due_from_ms": 1_005, "due_until_ms": 1_008}  # their purge times are far from these
    assert await database.walk(limit=3, outcomes=both, **due) == rows[5:8]
    assert {scan.until_ms for scan in database.calls[0]} == {LAST_MS}
    listing = await database.page(after=BEFORE_ALL)
    assert (listing.reached, listing.timers) == (rows[5:8], ())


async def test_the_due_range_of_scheduled_timers_limits_the_rows_that_are_read() -> None:
    timers = [timer(n) for n in range(100)]
    database = Database(timers)
    listing = await database.page(limit=100, due_from_ms=1_040, due_until_ms=1_050)
    assert listing.timers == timers[40:50]
    assert listing.next is None
    assert database.rows_read == 10
    for scan in database.calls[0]:
        assert (scan.after, scan.until_ms) == (Position(1_039, LARGEST, LARGEST), 1_049)
    resumed = await database.page(limit=100, after=timers[45].position)
    assert resumed.timers == timers[46:50]
    assert all(scan.after == timers[45].position for scan in database.calls[0])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"namespace": "theirs"}, [0]),
        ({"id_prefix": "order"}, [1]),
        ({"tag": "vip"}, [2]),
        ({"correlation_id": "c"}, [3]),
        ({"due_from_ms": 1_004}, [4]),
        ({"due_until_ms": 1_002}, [1]),
        ({}, [1, 2, 3, 4]),
    ],
)
async def test_each_filter_keeps_what_matches_it(fields: dict[str, Any], expected: list[int]) -> None:
    timers = [
        timer(0, namespace="theirs"),
        timer(1, timer_id="order-1"),
        timer(2, extras=Extras(tags=("a", "vip"))),
        timer(3, correlation_id="c"),
        timer(4),
    ]
    rows = [Reached(timer=each, outcome=Outcome.FAILED, reached_at_ms=5, purge_at_ms=9_000) for each in timers]
    query = ListQuery(num_shards=SHARDS, outcomes=frozenset({Outcome.FAILED}), **{"namespace": "ours", **fields})
    assert [number for number, each in enumerate(timers) if is_match(query, each)] == expected
    assert [number for number, row in enumerate(rows) if is_match(query, row)] == expected
    assert not any(is_match(replace(query, outcomes=frozenset({Outcome.SKIPPED})), row) for row in rows)


async def test_one_call_reads_a_limited_number_of_rows_and_returns_where_to_continue() -> None:
    others = [timer(n, namespace="theirs") for n in range(LIST_ROWS_MAX * 2)]
    ours = timer(LIST_ROWS_MAX * 2)
    database = Database([*others, ours], shards=2)
    first = await database.page(limit=10)
    assert first.timers == []
    assert first.next is not None
    assert LIST_ROWS_MAX <= database.rows_read <= LIST_ROWS_MAX + 2 * LIST_PAGE_MAX
    assert await database.walk(limit=10) == [ours]


async def test_a_call_reads_until_something_is_merged_however_many_rows_that_takes() -> None:
    """The first pages of many shards alone are more than the limit: the call must still merge some rows."""
    shards = LIST_ROWS_MAX // 2 + 1
    read: list[int] = []

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        read.append(len(scans))
        pieces = []
        for scan in scans:
            start = max(scan.after.execute_at_ms + 1, 0)
            items: list[Item] = [(Position(at, scan.shard_id, 0), None) for at in range(start, min(start + 2, 4))]
            pieces.append(ScanResult(items, start + 2 >= 4))
        return pieces

    listing = await merge_scans(ListQuery(namespace="ours", num_shards=shards, limit=10), fetch)
    assert read[0] == shards
    assert listing.next is not None
    assert listing.next >= Position(1, 0, 0)


class Script:
    """Returns for each scan of a shard the next of its prepared results: (how many rows, whether it ended)."""

    def __init__(self, **pieces: list[tuple[int, bool]]) -> None:
        self.pieces = [list(each) for each in pieces.values()]
        self.at = 0
        self.calls = 0

    async def page(self, limit: int = 10) -> Listing:
        return await merge_scans(ListQuery(namespace="ours", num_shards=len(self.pieces), limit=limit), self.fetch)

    async def fetch(self, scans: Sequence[Scan]) -> list[ScanResult]:
        self.calls += 1
        return [self._piece(scan, *self.pieces[scan.shard_id].pop(0)) for scan in scans]

    def _piece(self, scan: Scan, count: int, ended: bool) -> ScanResult:
        first = max(scan.after.execute_at_ms, 0) + 1
        return ScanResult([(Position(at, scan.shard_id, 0), None) for at in range(first, first + count)], ended)


async def test_an_empty_scan_result_that_is_not_the_end_is_continued_before_later_rows() -> None:
    script = Script(zero=[(3, True)], one=[(0, False), (2, True)])
    listing = await script.page()
    assert (listing.next, script.calls) == (None, 2)
    order = Script(zero=[(3, False), (0, True)], one=[(0, False), (0, False), (2, True)])
    assert (await order.page()).next is None


async def test_a_call_that_has_merged_nothing_continues_whatever_it_has_read() -> None:
    script = Script(zero=[(LIST_ROWS_MAX, False)], one=[(0, False), (1, False)])
    listing = await script.page()
    assert script.calls == 2
    assert listing.next == Position(1, 1, 0)


async def test_when_all_scans_have_ended_there_is_no_next_however_many_rows_were_read() -> None:
    script = Script(zero=[(LIST_ROWS_MAX + 5, True)])
    assert (await script.page()).next is None


@pytest.mark.parametrize(("read", "calls"), [(LIST_ROWS_MAX - 1, 2), (LIST_ROWS_MAX, 1)])
async def test_the_limit_counts_the_rows_that_were_read(read: int, calls: int) -> None:
    script = Script(zero=[(read, False), (0, True)])
    listing = await script.page()
    assert script.calls == calls
    assert listing.next == (Position(read, 0, 0) if calls == 1 else None)


async def test_pages_start_small_for_many_shards_and_grow_to_their_largest() -> None:
    database = Database([timer(n, namespace="theirs") for n in range(4_000)])
    await database.page(limit=10)
    assert {scan.count for scan in database.calls[0]} == {2 + 10 * 2 // SHARDS}
    counts = [max(scan.count for scan in scans) for scans in database.calls]
    assert counts[:3] == [7, 14, 28]
    assert max(counts) == LIST_PAGE_MAX
    await database.page(limit=10_000)
    assert {scan.count for scan in database.calls[0]} == {LIST_PAGE_MAX}


async def test_scans_with_few_rows_left_are_read_together_and_ended_scans_never_again() -> None:
    database = Database([timer(n) for n in range(400)])
    await database.page(limit=400)
    scans = [scan for call in database.calls for scan in call]
    assert len(database.calls) <= 3
    assert len({(scan.shard_id, scan.after) for scan in scans}) == len(scans)
    few = Database([timer(n) for n in range(4)], shards=1)
    await few.page(limit=400)
    assert len(few.calls) == 1


async def test_with_an_index_over_all_shards_one_scan_is_enough() -> None:
    timers = [timer(n) for n in range(30)]
    database = Database(timers, shards=1)
    scans: list[Scan] = []

    async def fetch(wanted: Sequence[Scan]) -> list[ScanResult]:
        scans.extend(wanted)
        return await database.fetch([replace(scan, shard_id=0) for scan in wanted])

    listing = await merge_scans(ListQuery(namespace="ours", num_shards=SHARDS, limit=10), fetch, in_order=True)
    assert listing.timers == timers[:10]
    assert listing.next == timers[9].position
    assert [(scan.shard_id, scan.count) for scan in scans] == [(SHARDS, 11)]


# --- payloads ------------------------------------------------------------------------------------


class Payloads(Database):
    """Leaves out payloads that are longer than a scan allows. `changed` may change rows between two fetches."""

    def __init__(self, rows: Sequence[Timer], **options: Any) -> None:
        super().__init__(rows, **options)
        self.held_max = 0  # characters that one fetch returned
        self.changed: Any = lambda: None

    async def fetch(self, scans: Sequence[Scan]) -> list[ScanResult]:
        if self.calls:
            self.changed()
        results = [
            ScanResult([(position, within(scan, item)) for position, item in result.items], result.ended)
            for scan, result in zip(scans, await super().fetch(scans), strict=True)
        ]
        items = [item for result in results for _, item in result.items]
        self.held_max = max(self.held_max, sum(payload_chars(item) for item in items if isinstance(item, Timer)))
        return results

    def remove(self, gone: Timer) -> None:
        for rows in self.shards:
            if gone in rows:
                rows.remove(gone)


def heavy(count: int, chars: int) -> list[Timer]:
    return [timer(number, payload="x" * chars) for number in range(count)]


@pytest.mark.parametrize("chars", [10, 1_024, 1_025, 3_000, 60_000])
@pytest.mark.parametrize("limit", [3, 200])
@pytest.mark.parametrize(("most", "late"), [(10_000, False), (2, True)])
async def test_pages_with_payloads_of_any_length_are_complete(chars: int, limit: int, most: int, late: bool) -> None:
    timers = heavy(100, chars)
    database = Payloads(timers, most=most, late=late)
    found: list[Timer] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        page = await database.page(limit=limit, chars_max=100_000, after=after)
        assert sum(map(payload_chars, page.timers[:-1])) <= 100_000
        found += page.timers
        after = page.next
    assert found == timers
    assert database.held_max <= 200_000 + 60_000 + 100 * 1_024


async def test_what_is_read_before_it_is_merged_is_limited_whatever_the_number_of_shards() -> None:
    timers = heavy(400, 50_000)
    database = Payloads(timers, shards=64)
    page = await database.page(limit=1_000, chars_max=100_000)
    assert page.timers == timers[:3]
    assert page.next == timers[2].position
    assert database.held_max == 150_000, "the payloads of the page, and no others"
    assert len(database.calls) == 2


async def test_without_long_payloads_a_page_takes_one_round() -> None:
    database = Payloads(heavy(100, 1_000))
    assert len((await database.page(limit=100, chars_max=8 * 1024 * 1024)).timers) == 100
    assert len(database.calls) == 1


async def test_a_page_that_is_full_of_payloads_reads_no_further() -> None:
    database = Payloads(heavy(400, 1_000), shards=2)
    page = await database.page(limit=1_000, chars_max=9_999)
    assert (len(page.timers), page.next) == (10, page.timers[-1].position)
    assert len(database.calls) == 1


async def test_a_timer_that_is_removed_before_its_payload_is_read_is_left_out() -> None:
    timers = heavy(20, 60_000)
    database = Payloads(timers)
    database.changed = lambda: database.remove(timers[3])
    page = await database.page(limit=10, chars_max=600_000)
    assert page.timers == [*timers[:3], *timers[4:10]]
    assert page.next == timers[9].position


async def test_a_timer_that_is_replaced_before_its_payload_is_read_is_returned_as_it_is_then() -> None:
    timers = heavy(20, 60_000)
    new = replace(timers[3], payload="y" * 70_000, generation=2, attempts=1)
    database = Payloads(timers)

    def replace_it() -> None:
        for rows in database.shards:
            rows[:] = [new if row == timers[3] else row for row in rows]

    database.changed = replace_it
    page = await database.page(limit=10, chars_max=600_000)
    assert page.timers == [*timers[:3], new, *timers[4:10]]


async def test_timers_that_are_added_before_the_payloads_are_read_hide_none() -> None:
    timers = heavy(20, 60_000)
    added = [timer(n, timer_id=f"new-{n}", payload="z") for n in range(10)]
    database = Payloads(timers, shards=1)
    database.changed = lambda: database.shards.__setitem__(
        0, sorted({row.position: row for row in (*database.shards[0], *added)}.values(), key=lambda row: row.position)
    )
    page = await database.page(limit=10, chars_max=600_000)
    assert page.timers == timers[:10]
    assert len(database.calls) > 2


async def test_a_row_that_cannot_be_decoded_when_its_payload_is_read_is_counted() -> None:
    timers = heavy(6, 60_000)
    bad = Unreadable(timers[2].position, "ours", "t2", "spoilt")

    class Spoilt(Payloads):
        def _piece(self, scan: Scan, rows: Any) -> ScanResult:
            result = super()._piece(scan, rows)
            if len(self.calls) == 1:
                return result
            return replace(result, items=[(at, bad if at == bad.position else item) for at, item in result.items])

    page = await Spoilt(timers).page(limit=10, chars_max=600_000)
    assert page.timers == [*timers[:2], *timers[3:]]
    assert (page.unreadable, page.next) == (1, None)


async def test_without_payloads_none_are_read_and_their_length_limits_nothing() -> None:
    timers = heavy(20, 50_000)
    database = Payloads(timers)
    page = await database.page(limit=100, chars_max=0, payloads=False)
    assert page.timers == [replace(each, payload=None) for each in timers]
    assert {scan.chars_max for scan in database.calls[0]} == {NO_PAYLOADS}
    assert len(database.calls) == 1


def test_the_position_before_another_is_the_last_smaller_one() -> None:
    for position, before in (
        (Position(5, 1, 1), Position(5, 1, 0)),
        (Position(5, 1, -LARGEST - 1), Position(5, 0, LARGEST)),
        (Position(5, -LARGEST - 1, -LARGEST - 1), Position(4, LARGEST, LARGEST)),
    ):
        assert position_before(position) == before < position
