"""Lists of PostgresStore: what is asked for, filtered by the server, merged here in the order of positions.

Timers are clustered by shard, so a list over a namespace is a merge of one range scan per shard. They are read in
rounds of one statement each, and one call looks at so many rows and no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, Final

from duetime.model import Position, Reached
from duetime.store import Listing, ListQuery
from duetime.stores.postgres_rows import KEY, LAST_MS, Row, as_json, at, bound_ms, reached_of, selected, timer_of
from duetime.stores.postgres_sql import Run

__all__ = ["list_timers"]

LIST_ROWS_MAX = 20_000  # rows one call of list_timers looks at
LIST_PAGE_MAX = 256
_LARGEST: Final = (1 << 63) - 1


def _list_sql(row_type: int, by_correlation: bool) -> str:
    """A stretch of each scan: rows that match in full, of the others the position only.

    A tag is looked for in the text of the options, which finds too much; the reader looks again. Taking JSON
    apart here would fail on a row that has an escaped NUL in it, anywhere.
    """
    due = "timer_execute_at" if row_type == 2 else "timer_scheduled_at"
    matches = f"""timer_namespace = $7::text
    AND ($8::text IS NULL OR starts_with(timer_id, $8)) AND ($9::text IS NULL OR timer_correlation_id = $9)
    AND ($10::bigint IS NULL OR {due} >= {at("$10")}) AND ($11::bigint IS NULL OR {due} < {at("$11")})
    AND ($12::text IS NULL OR strpos(timer_options::text, $12) > 0)
    AND ($13::text[] IS NULL OR timer_outcome = ANY($13))"""
    where = "shard_id = s.shard_id"
    if by_correlation:
        where = "timer_correlation_id = $9 AND timer_namespace = $7 AND shard_id < s.shard_id"
    return f"""
SELECT s.shard_id, t.matches, {selected(row_type, "t.matches")}
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::int[]) AS s(shard_id, at, high, low, most)
CROSS JOIN LATERAL (
  SELECT *, ({matches}) IS TRUE AS matches
  FROM timers WHERE {where} AND row_type = {row_type} AND ({KEY}) > ({at("s.at")}, s.high, s.low)
  AND timer_execute_at <= {at("$6::bigint")}
  ORDER BY {KEY} LIMIT s.most) AS t
"""  # noqa: S608


_LIST = {
    (row_type, by_correlation): _list_sql(row_type, by_correlation)
    for row_type in (2, 3)
    for by_correlation in (False, True)
}


async def list_timers(run: Run, query: ListQuery) -> Listing:
    """A merge of one scan per shard, or, with a correlation id, one scan of its index."""
    scan = _Scan(run, query)
    await scan.fetch(scan.streams)
    matches: list[Any] = []
    seen: Position | None = None
    while True:
        for row in scan.ready():
            if len(matches) == query.limit:
                return _listing(query, matches, seen)
            seen = _position(row)
            if row[1]:
                item = reached_of(row) if query.endings else timer_of(row)
                if query.tag is None or query.tag in (item.timer if isinstance(item, Reached) else item).extras.tags:
                    matches.append(item)
        wanting = scan.wanting()
        if not wanting:
            return _listing(query, matches, None)
        if scan.rows_left <= 0:
            return _listing(query, matches, seen)
        await scan.fetch(wanting)


def _listing(query: ListQuery, found: list[Any], after: Position | None) -> Listing:
    return Listing(reached=found, next=after) if query.endings else Listing(timers=found, next=after)


def _position(row: Row) -> Position:
    return Position(row[2], row[3], row[4])


class _Stream:
    """One scan: the rows that came and are not merged yet, and where to go on."""

    def __init__(self, shard_id: int, after: Position, page: int) -> None:
        self.shard_id = shard_id
        self.after = after
        self.page = min(page, LIST_PAGE_MAX)
        self.rows: list[Row] = []
        self.first = 0
        self.ended = False

    @property
    def left(self) -> int:
        return len(self.rows) - self.first

    def add(self, rows: list[Row]) -> None:
        self.ended = len(rows) < self.page
        self.rows = [*self.rows[self.first :], *rows]
        self.first = 0
        self.page = min(self.page * 2, LIST_PAGE_MAX)
        if rows:
            self.after = _position(rows[-1])


class _Scan:
    """The range scans of one list call, read in rounds: whoever runs low is read on in one statement."""

    def __init__(self, run: Run, query: ListQuery) -> None:
        self._run = run
        by_due = not query.endings  # then the due range bounds the scan itself
        by_correlation = query.correlation_id is not None
        after = query.after
        if by_due and query.due_from_ms is not None:
            after = max(after, Position(query.due_from_ms - 1, _LARGEST, _LARGEST))
        self._sql = _LIST[2 if by_due else 3, by_correlation]
        self._until_ms = query.due_until_ms - 1 if by_due and query.due_until_ms is not None else LAST_MS
        self._filter = (
            query.namespace,
            query.id_prefix,
            query.correlation_id,
            None if query.due_from_ms is None else bound_ms(query.due_from_ms),
            None if query.due_until_ms is None else bound_ms(query.due_until_ms),
            None if query.tag is None else as_json(query.tag),
            sorted(query.endings) or None,
        )
        # The first page of every shard is free of the budget: without it nothing can be merged.
        self.rows_left = LIST_ROWS_MAX
        if by_correlation:
            self.streams = [_Stream(query.num_shards, after, query.limit + 1)]
        else:
            # Matches come evenly from all shards; a page that turns out too short is followed by a longer one.
            page = 2 + query.limit * 2 // query.num_shards
            self.streams = [_Stream(shard_id, after, page) for shard_id in range(query.num_shards)]

    async def fetch(self, streams: Sequence[_Stream]) -> None:
        rows = await self._run(
            self._sql,
            [stream.shard_id for stream in streams],
            [bound_ms(stream.after.execute_at_ms) for stream in streams],
            [stream.after.uuid_high for stream in streams],
            [stream.after.uuid_low for stream in streams],
            [stream.page for stream in streams],
            bound_ms(self._until_ms),
            *self._filter,
        )
        self.rows_left -= len(rows)
        by_shard: dict[int, list[Row]] = {stream.shard_id: [] for stream in streams}
        for row in rows:
            by_shard[row[0]].append(row)
        for stream in streams:
            stream.add(by_shard[stream.shard_id])

    def ready(self) -> Iterator[Row]:
        """Rows in order, as far as the order is known: until a scan that goes on has no more at hand."""
        heap = [
            (_position(stream.rows[stream.first]), n, stream) for n, stream in enumerate(self.streams) if stream.left
        ]
        if any(not stream.left and not stream.ended for stream in self.streams):
            return
        heapify(heap)
        while heap:
            _, number, stream = heap[0]
            row = stream.rows[stream.first]
            stream.first += 1
            yield row
            if stream.left:
                heapreplace(heap, (_position(stream.rows[stream.first]), number, stream))
            elif stream.ended:
                heappop(heap)
            else:
                return

    def wanting(self) -> list[_Stream]:
        """Those that are to be read on: the one that stopped the merge, and others about to."""
        if all(stream.ended for stream in self.streams):
            return []
        return [stream for stream in self.streams if not stream.ended and stream.left <= stream.page // 4]
