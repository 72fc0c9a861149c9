"""Lists over a namespace: one range scan per shard, merged by position.

Timers are clustered by shard, so no database has all of them in one order. The scans are read in rounds: each round
reads the next rows of those scans that have few rows left. The number of rows that one call reads is limited.

Payloads are limited too: many scans are read before it is known which rows are on the page. A scan leaves out payloads
that are longer than its share of the limit, and returns how long they are. Those on the page are read afterwards.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any

from msgspec import Struct

from duetime.domain.timer import Position, Reached, Timer
from duetime.store import NO_CHARS_MAX, Listing, ListQuery, Unreadable
from duetime.stores.rows import (
    DEFAULT_ROW_READER,
    LARGEST,
    LAST_MS,
    RowReader,
    decode_or_unreadable,
    payload_chars,
    position_before,
    without_payload,
)

__all__ = [
    "NO_PAYLOADS",
    "Item",
    "ListingBuilder",
    "Match",
    "PayloadLeftOut",
    "Scan",
    "ScanResult",
    "is_match",
    "match_row",
    "merge_scans",
    "scan_chars_max",
    "within",
]

LIST_ROWS_MAX = 20_000  # rows that one call reads
LIST_PAGE_MAX = 256
SCAN_CHARS_MIN = 1_024  # payloads up to this length are always read together with their row
NO_PAYLOADS = -1


class PayloadLeftOut(Struct, frozen=True):
    """A row that matches, without its payload, which has so many characters."""

    item: Timer | Reached
    chars: int


Match = Timer | Reached | Unreadable | PayloadLeftOut
Item = tuple[Position, Match | None]
"""The position of a row, and its content if it matches the query."""


class Scan(Struct, frozen=True):
    """Asks for the next `count` rows of a shard with `after < position` and `execute_at_ms <= until_ms`, in order.

    Payloads of more than `chars_max` characters are left out; all of them if it is NO_PAYLOADS.
    """

    shard_id: int
    after: Position
    until_ms: int
    count: int
    chars_max: int = NO_CHARS_MAX


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
    query: ListQuery, row: Any, reader: RowReader = DEFAULT_ROW_READER, chars: int | None = None, chars_max: int = 0
) -> Match | None:
    """Decodes a row. None if it does not match. A row that cannot be decoded is compared by namespace and id only.

    `chars`: how long the stored payload is, if the row has none when it is longer than `chars_max`.
    """
    item: Timer | Reached | Unreadable
    if query.outcomes:
        item = decode_or_unreadable(row, reader.reached, reader)
    else:
        item = decode_or_unreadable(row, reader.timer, reader)
    if isinstance(item, Unreadable):
        is_match_by_name = item.namespace == query.namespace and item.timer_id.startswith(query.id_prefix or "")
        return item if is_match_by_name else None
    if not is_match(query, item):
        return None
    return PayloadLeftOut(item, chars) if query.payloads and chars is not None and chars > chars_max else item


def within(scan: Scan, match: Match | None) -> Match | None:
    """For databases that do not leave out payloads by their length: leaves out that of a match if it is too long."""
    if match is None or isinstance(match, Unreadable | PayloadLeftOut):
        return match
    chars = payload_chars(match)
    if chars <= max(0, scan.chars_max):
        return match
    item = without_payload(match)
    return item if scan.chars_max == NO_PAYLOADS else PayloadLeftOut(item, chars)


Fetch = Callable[[Sequence[Scan]], Awaitable[list[ScanResult]]]


async def merge_scans(query: ListQuery, fetch: Fetch, *, in_order: bool = False) -> Listing:
    """`fetch` returns a result for each scan; no two are of the same shard. `in_order`: an index has the rows of all
    shards in one order, so there is one scan, whose `shard_id` is the number of shards."""
    streams = _streams(query, in_order)
    found = ListingBuilder(query.limit, query.chars_max)
    after = await _merge(query, streams, fetch, found)
    await _add_payloads(streams, fetch, found)
    return found.listing(query, after)


async def _merge(query: ListQuery, streams: Sequence[_Stream], fetch: Fetch, found: ListingBuilder) -> Position | None:
    """Adds the rows of a page, and returns the position after which the next one begins."""
    rows_left = LIST_ROWS_MAX  # the first pages may exceed it: without them nothing can be merged
    seen: Position | None = None
    to_read = streams
    while to_read:
        chars_max = scan_chars_max(query, sum(stream.page for stream in to_read))
        results = await fetch([stream.scan(chars_max) for stream in to_read])
        for stream, result in zip(to_read, results, strict=True):
            stream.add(result)
            rows_left -= len(result.items)
        for stream, (position, item) in _ready(streams):
            if found.is_full:
                return seen
            seen = position
            stream.has_merged(position, item)
            found.add(item)
        to_read = _to_read(streams)
        if to_read and seen is not None and (rows_left <= 0 or found.is_heavy):
            return seen
    return None


def scan_chars_max(query: ListQuery, rows: int) -> int:
    """The share of each of so many rows in the characters that may be read before they are merged."""
    if not query.payloads:
        return NO_PAYLOADS
    return min(max(SCAN_CHARS_MIN, 2 * query.chars_max // rows), NO_CHARS_MAX)


async def _add_payloads(streams: Sequence[_Stream], fetch: Fetch, found: ListingBuilder) -> None:
    """Reads the rows whose payloads were left out again, whole: a row may have been replaced meanwhile, and nothing of
    two readings may be mixed. One that is gone is removed, as if the listing had been read later."""
    wanted = {position for stream in streams for position in stream.left_out}
    whole: dict[Position, Match | None] = {}
    while to_read := [stream for stream in streams if stream.left_out]:
        results = await fetch([stream.whole_scan() for stream in to_read])
        for stream, result in zip(to_read, results, strict=True):
            whole |= result.items
            stream.has_read_whole(result)
    if wanted:
        found.replace({position: whole.get(position) for position in wanted})


class ListingBuilder:
    """Collects the items of a list."""

    def __init__(self, limit: int = LIST_ROWS_MAX, chars_max: int = NO_CHARS_MAX) -> None:
        self.items: list[Any] = []
        self.unreadable = 0
        self._limit = limit
        self._chars_left = chars_max

    def add(self, item: Match | None) -> None:
        if isinstance(item, Unreadable):
            self.unreadable += 1
        elif isinstance(item, PayloadLeftOut):
            self.items.append(item.item)
            self._chars_left -= item.chars
        elif item is not None:
            self.items.append(item)
            self._chars_left -= payload_chars(item)

    def replace(self, whole: Mapping[Position, Match | None]) -> None:
        """Replaces the items at these positions; None removes them."""
        items, self.items = self.items, []
        for item in items:
            self.add(whole.get(item.position, item))

    @property
    def is_heavy(self) -> bool:
        return self._chars_left < 0

    @property
    def is_full(self) -> bool:
        return len(self.items) == self._limit or self.is_heavy

    def listing(self, query: ListQuery, after: Position | None) -> Listing:
        if query.outcomes:
            return Listing(reached=self.items, next=after, unreadable=self.unreadable)
        return Listing(timers=self.items, next=after, unreadable=self.unreadable)


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
        self.left_out: list[Position] = []  # merged rows whose payloads were left out
        self._rows_since = 0  # merged since the first of them
        self._rows_whole = 0  # up to the last of them

    @property
    def left(self) -> int:
        return len(self.items) - self.first

    def scan(self, chars_max: int) -> Scan:
        return Scan(self.shard_id, self.after, self.until_ms, self.page, chars_max)

    def has_merged(self, position: Position, item: Match | None) -> None:
        if isinstance(item, PayloadLeftOut):
            self.left_out.append(position)
        if self.left_out:
            self._rows_since += 1
        if isinstance(item, PayloadLeftOut):
            self._rows_whole = self._rows_since

    def whole_scan(self) -> Scan:
        """The rows from the first whose payload was left out to the last."""
        first, last = self.left_out[0], self.left_out[-1]
        return Scan(self.shard_id, position_before(first), last.execute_at_ms, self._rows_whole)

    def has_read_whole(self, result: ScanResult) -> None:
        """Rows that were added meanwhile may have taken the places of some."""
        if result.ended:
            self.left_out = []
        elif result.items:
            read_up_to = result.items[-1][0]
            self.left_out = [position for position in self.left_out if position > read_up_to]

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


def _ready(streams: Sequence[_Stream]) -> Iterator[tuple[_Stream, Item]]:
    """Rows in order, until a scan that has not ended has no rows left."""
    if any(not stream.left and not stream.ended for stream in streams):
        return
    heap = [(stream.items[stream.first][0], n, stream) for n, stream in enumerate(streams) if stream.left]
    heapify(heap)
    while heap:
        _, number, stream = heap[0]
        item = stream.items[stream.first]
        stream.first += 1
        yield stream, item
        if stream.left:
            heapreplace(heap, (stream.items[stream.first][0], number, stream))
        elif stream.ended:
            heappop(heap)
        else:
            return


def _to_read(streams: Sequence[_Stream]) -> list[_Stream]:
    """The scans to read next: the one that stopped the merge, and others with few rows left."""
    return [stream for stream in streams if not stream.ended and stream.left <= stream.page // 4]
