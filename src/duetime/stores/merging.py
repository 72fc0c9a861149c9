"""Lists over a namespace: one range scan per shard, merged by position.

Timers are clustered by shard, so no database has all of them in one order. The scans are read in rounds: each round
reads the next rows of those scans that have few rows left. The number of rows that one call reads is limited.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from msgspec import Struct

from duetime.domain.timer import Position, Reached, Timer
from duetime.store import Listing, ListQuery, Unreadable
from duetime.stores.rows import DEFAULT_ROW_READER, LARGEST, LAST_MS, RowReader, decode_or_unreadable

__all__ = ["Item", "ListingBuilder", "Scan", "ScanResult", "is_match", "match_row", "merge_scans"]

LIST_ROWS_MAX = 20_000  # rows that one call reads
LIST_PAGE_MAX = 256

Item = tuple[Position, Timer | Reached | Unreadable | None]
"""The position of a row, and its content if it matches the query."""


class Scan(Struct, frozen=True):
    """Asks for the next `count` rows of a shard with `after < position` and `execute_at_ms <= until_ms`, in order."""

    shard_id: int
    after: Position
    until_ms: int
    count: int


class ScanResult(Struct, frozen=True):
    """The result of a scan. `ended`: there are no more rows. Otherwise it may have fewer rows than were asked for."""

    items: Sequence[Item]
    ended: bool


def is_match(query: ListQuery, item: Timer | Reached) -> bool:
    """Whether an item matches the query. For databases that do not filter."""
    timer, due_ms = (item, item.execute_at_ms) if isinstance(item, Timer) else (item.timer, item.timer.scheduled_at_ms)
    return (
        timer.namespace == query.namespace
        and (isinstance(item, Timer) or item.outcome in query.outcomes)
        and (query.due_from_ms is None or query.due_from_ms <= due_ms)
        and (query.due_until_ms is None or due_ms < query.due_until_ms)
        and (query.id_prefix is None or timer.timer_id.startswith(query.id_prefix))
        and (query.tag is None or query.tag in timer.extras.tags)
        and (query.correlation_id is None or timer.correlation_id == query.correlation_id)
    )


def match_row(
    query: ListQuery, row: Any, reader: RowReader = DEFAULT_ROW_READER
) -> Timer | Reached | Unreadable | None:
    """Decodes a row. None if it does not match. A row that cannot be decoded is compared by namespace and id only."""
    item: Timer | Reached | Unreadable
    if query.outcomes:
        item = decode_or_unreadable(row, reader.reached, reader)
    else:
        item = decode_or_unreadable(row, reader.timer, reader)
    if isinstance(item, Unreadable):
        is_match_by_name = item.namespace == query.namespace and item.timer_id.startswith(query.id_prefix or "")
        return item if is_match_by_name else None
    return item if is_match(query, item) else None


async def merge_scans(
    query: ListQuery, fetch: Callable[[Sequence[Scan]], Awaitable[list[ScanResult]]], *, in_order: bool = False
) -> Listing:
    """`fetch` returns a result for each scan. `in_order`: an index has the rows of all shards in one order, so there is
    one scan, whose `shard_id` is the number of shards."""
    streams = _streams(query, in_order)
    rows_left = LIST_ROWS_MAX  # the first pages may exceed it: without them nothing can be merged
    found = ListingBuilder(query)
    seen: Position | None = None
    to_read = streams
    while to_read:
        for stream, result in zip(to_read, await fetch([stream.scan() for stream in to_read]), strict=True):
            stream.add(result)
            rows_left -= len(result.items)
        for position, item in _ready(streams):
            if len(found.items) == query.limit:
                return found.listing(seen)
            seen = position
            found.add(item)
        to_read = _to_read(streams)
        if to_read and rows_left <= 0 and seen is not None:
            return found.listing(seen)
    return found.listing(None)


class ListingBuilder:
    """Collects the items of a list."""

    def __init__(self, query: ListQuery) -> None:
        self._are_reached = bool(query.outcomes)
        self.items: list[Any] = []
        self._unreadable = 0

    def add(self, item: Timer | Reached | Unreadable | None) -> None:
        if isinstance(item, Unreadable):
            self._unreadable += 1
        elif item is not None:
            self.items.append(item)

    def listing(self, after: Position | None) -> Listing:
        if self._are_reached:
            return Listing(reached=self.items, next=after, unreadable=self._unreadable)
        return Listing(timers=self.items, next=after, unreadable=self._unreadable)


class _Stream:
    """One scan: its rows that were read and not merged yet, and the position after which to continue."""

    def __init__(self, shard_id: int, after: Position, until_ms: int, page: int) -> None:
        self.shard_id = shard_id
        self.after = after
        self.until_ms = until_ms
        self.page = min(page, LIST_PAGE_MAX)
        self.items: list[Item] = []
        self.first = 0
        self.ended = False

    @property
    def left(self) -> int:
        return len(self.items) - self.first

    def scan(self) -> Scan:
        return Scan(self.shard_id, self.after, self.until_ms, self.page)

    def add(self, result: ScanResult) -> None:
        self.ended = result.ended
        self.items = [*self.items[self.first :], *result.items]
        self.first = 0
        self.page = min(self.page * 2, LIST_PAGE_MAX)
        if result.items:
            self.after = result.items[-1][0]


def _streams(query: ListQuery, in_order: bool) -> list[_Stream]:
    after, until_ms = query.after, LAST_MS
    if not query.outcomes:  # then the due range limits the scan itself
        if query.due_from_ms is not None:
            after = max(after, Position(query.due_from_ms - 1, LARGEST, LARGEST))
        if query.due_until_ms is not None:
            until_ms = query.due_until_ms - 1
    if in_order:
        return [_Stream(query.num_shards, after, until_ms, query.limit + 1)]
    # Matches are spread evenly over the shards. If a page is too short, the next one is longer.
    page = 2 + query.limit * 2 // query.num_shards
    return [_Stream(shard_id, after, until_ms, page) for shard_id in range(query.num_shards)]


def _ready(streams: Sequence[_Stream]) -> Iterator[Item]:
    """Rows in order, until a scan that has not ended has no rows left."""
    if any(not stream.left and not stream.ended for stream in streams):
        return
    heap = [(stream.items[stream.first][0], n, stream) for n, stream in enumerate(streams) if stream.left]
    heapify(heap)
    while heap:
        _, number, stream = heap[0]
        item = stream.items[stream.first]
        stream.first += 1
        yield item
        if stream.left:
            heapreplace(heap, (stream.items[stream.first][0], number, stream))
        elif stream.ended:
            heappop(heap)
        else:
            return


def _to_read(streams: Sequence[_Stream]) -> list[_Stream]:
    """The scans to read next: the one that stopped the merge, and others with few rows left."""
    return [stream for stream in streams if not stream.ended and stream.left <= stream.page // 4]
