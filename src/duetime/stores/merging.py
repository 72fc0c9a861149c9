"""Lists over a namespace: one range scan per shard, merged in the order of positions.

Timers are clustered by shard, so no database has them in one order over all. The scans are read in rounds: whoever
runs low is read on, together with the others that are about to. One call looks at so many rows and no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from msgspec import Struct

from duetime.domain.timer import Position, Reached, Timer
from duetime.store import Listing, ListQuery, Unreadable
from duetime.stores.rows import DEFAULT_ROW_READER, LARGEST, LAST_MS, RowReader, readable

__all__ = ["Item", "ListingBuilder", "Scan", "ScanResult", "matches", "matching", "merge_scans"]

LIST_ROWS_MAX = 20_000  # rows one call looks at
LIST_PAGE_MAX = 256

Item = tuple[Position, Timer | Reached | Unreadable | None]
"""A row that a scan has met, and what it is, if it matches."""


class Scan(Struct, frozen=True):
    """A wish: the next `count` rows of the shard with `after < position` and `execute_at_ms <= until_ms`, in order."""

    shard_id: int
    after: Position
    until_ms: int
    count: int


class ScanResult(Struct, frozen=True):
    """The answer to a scan. `ended`: nothing is behind it; else it has something, if perhaps less than asked for."""

    items: Sequence[Item]
    ended: bool


def matches(query: ListQuery, item: Timer | Reached) -> bool:
    """For databases that do not filter: is it what the query asks for?"""
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


def matching(
    query: ListQuery, row: Any, reading: RowReader = DEFAULT_ROW_READER
) -> Timer | Reached | Unreadable | None:
    """The item of a row, if it matches the query. A row that cannot be decoded is compared by namespace and id only."""
    item: Timer | Reached | Unreadable
    if query.outcomes:
        item = readable(row, reading.reached, reading)
    else:
        item = readable(row, reading.timer, reading)
    if isinstance(item, Unreadable):
        is_asked_for = item.namespace == query.namespace and item.timer_id.startswith(query.id_prefix or "")
        return item if is_asked_for else None
    return item if matches(query, item) else None


async def merge_scans(
    query: ListQuery, fetch: Callable[[Sequence[Scan]], Awaitable[list[ScanResult]]], *, in_order: bool = False
) -> Listing:
    """`fetch` answers a piece for each scan. `in_order`: there is an index that has them all in order already;
    then its `shard_id` is the number of shards."""
    streams = _streams(query, in_order)
    rows_left = LIST_ROWS_MAX  # the first pages are free of it: without them nothing can be merged
    found = ListingBuilder(query)
    seen: Position | None = None
    wanting = streams
    while wanting:
        for stream, piece in zip(wanting, await fetch([stream.scan() for stream in wanting]), strict=True):
            stream.add(piece)
            rows_left -= len(piece.items)
        for position, item in _ready(streams):
            if len(found.items) == query.limit:
                return found.listing(seen)
            seen = position
            found.add(item)
        wanting = _wanting(streams)
        if wanting and rows_left <= 0 and seen is not None:
            return found.listing(seen)
    return found.listing(None)


class ListingBuilder:
    """What a list has collected so far."""

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
    """One scan: the rows that came and are not merged yet, and where to go on."""

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

    def add(self, piece: ScanResult) -> None:
        self.ended = piece.ended
        self.items = [*self.items[self.first :], *piece.items]
        self.first = 0
        self.page = min(self.page * 2, LIST_PAGE_MAX)
        if piece.items:
            self.after = piece.items[-1][0]


def _streams(query: ListQuery, in_order: bool) -> list[_Stream]:
    after, until_ms = query.after, LAST_MS
    if not query.outcomes:  # then the due range bounds the scan itself
        if query.due_from_ms is not None:
            after = max(after, Position(query.due_from_ms - 1, LARGEST, LARGEST))
        if query.due_until_ms is not None:
            until_ms = query.due_until_ms - 1
    if in_order:
        return [_Stream(query.num_shards, after, until_ms, query.limit + 1)]
    # Matches come evenly from all shards; a page that turns out too short is followed by a longer one.
    page = 2 + query.limit * 2 // query.num_shards
    return [_Stream(shard_id, after, until_ms, page) for shard_id in range(query.num_shards)]


def _ready(streams: Sequence[_Stream]) -> Iterator[Item]:
    """Rows in order, as far as the order is known: until a scan that goes on has no more at hand."""
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


def _wanting(streams: Sequence[_Stream]) -> list[_Stream]:
    """Those that are to be read on: the one that stopped the merge, and others about to."""
    return [stream for stream in streams if not stream.ended and stream.left <= stream.page // 4]
