"""The reads of MySqlStore: pages of a shard, timers by key, lists. Each is one message, or a few if it is long.

A read of several ranges, one for each shard or key, is a UNION ALL: LATERAL and JSON_TABLE would be better, but no form
of them works on all three servers. Every access names its index.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from duetime.domain.timer import Position, Timer, TimerKey
from duetime.store import Found, Listing, ListQuery, Page, PageRequest, Unreadable
from duetime.stores.merging import NO_PAYLOADS, Item, Scan, ScanResult, match_row, merge_scans
from duetime.stores.mysql.connection import Read
from duetime.stores.mysql.rows import KEY, after_position, at, literal, selected, with_keys
from duetime.stores.rows import (
    INLINE_CHARS_MIN,
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    Row,
    StoredRows,
    as_json,
    bound_ms,
    decode_or_unreadable,
    found_by_key,
    found_of,
    page_of,
    page_of_items,
    position_of,
    rows_of_page,
    timer_of,
)

__all__ = ["get_many", "list_timers", "load", "next_namespace"]

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in one result; pages that would be longer are made shorter
KEYS_FEW = 50
KEYS_MANY = 1_000
SCANS_AT_ONCE = 64

_PAYLOAD = TIMER_COLUMNS.index("timer_payload")

# --- pages and keys ------------------------------------------------------------------------------


async def load(read: Read, requests: Sequence[PageRequest]) -> list[Page]:
    if not requests:
        return []
    bytes_max = [min(request.chars_max, LOAD_BYTES_MAX // len(requests)) for request in requests]
    inline_bytes_max = max(INLINE_CHARS_MIN, sum(bytes_max) // sum(request.limit + 1 for request in requests))
    parts = [_page_sql(number, request, inline_bytes_max) for number, request in enumerate(requests)]
    [found] = await read((" UNION ALL ".join(parts),))
    rows: list[list[Row]] = [[] for _ in requests]
    for row in found:
        rows[row[-2]].append(row)
    pages = [_cut(request, some, most) for request, some, most in zip(requests, rows, bytes_max, strict=True)]
    large = await _read_large(read, [(requests[row[-2]].shard_id, row) for some, _ in pages for row in some])
    return [_page(request, some, after, large) for request, (some, after) in zip(requests, pages, strict=True)]


def _page_sql(number: int, request: PageRequest, inline_bytes_max: int) -> str:
    columns = selected("timers", f"timer_payload IS NULL OR LENGTH(timer_payload) <= {inline_bytes_max}")
    return (
        f"(SELECT {columns}, {number}, LENGTH(timer_payload) FROM timers FORCE INDEX (PRIMARY)"  # noqa: S608
        f" WHERE shard_id = {request.shard_id} AND {after_position(request.after)}"
        f" AND timer_execute_at <= {at(bound_ms(request.until_ms))} ORDER BY {KEY} LIMIT {request.limit + 1})"
    )


def _cut(request: PageRequest, rows: list[Row], bytes_max: int) -> tuple[list[Row], Position | None]:
    """The rows of a page, and the position after which to continue."""
    rows.sort(key=position_of)  # they are sorted already, unless the server runs several parts in parallel
    end = rows_of_page((row[-1] or 0 for row in rows[: request.limit]), bytes_max)
    return rows[:end], None if end == len(rows) else position_of(rows[end - 1])


def _is_payload_missing(row: Row) -> bool:
    return row[_PAYLOAD] is None and row[-1] is not None


LargeTimers = dict[tuple[int, Position], Timer | Unreadable]


async def _read_large(read: Read, rows: Iterable[tuple[int, Row]]) -> LargeTimers:
    """Reads the timers whose payload was left out. Reads all of their columns, so that the columns of a timer that was
    replaced in the meantime are not mixed with those of the new one."""
    positions = [(shard_id, position_of(row)) for shard_id, row in rows if _is_payload_missing(row)]
    if not positions:
        return {}
    where = " OR ".join(
        f"(shard_id = {shard_id} AND timer_execute_at = {at(position.execute_at_ms)}"
        f" AND timer_uuid_high = {position.uuid_high} AND timer_uuid_low = {position.uuid_low})"
        for shard_id, position in positions
    )
    [found] = await read((f"SELECT {selected('timers')}, shard_id FROM timers FORCE INDEX (PRIMARY) WHERE {where}",))  # noqa: S608
    return {(row[-1], position_of(row)): decode_or_unreadable(row, timer_of) for row in found}


def _page(request: PageRequest, rows: Sequence[Row], after: Position | None, large: LargeTimers) -> Page:
    if not any(map(_is_payload_missing, rows)):
        return page_of(rows, after)
    items: list[Timer | Unreadable] = []
    for row in rows:
        item = (
            large.get((request.shard_id, position_of(row)))
            if _is_payload_missing(row)
            else decode_or_unreadable(row, timer_of)
        )
        if item is not None:  # a timer that is missing was removed after the first read
            items.append(item)
    return page_of_items(items, after)


Key = tuple[int, str, str]
"""Shard, namespace, id."""


async def get_many(read: Read, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    """The newest reached row of each key is a separate part of the query. Most of many keys have none, so a first query
    finds the keys that have any."""
    wanted = list(dict.fromkeys((shard_id, *key) for shard_id, key in keys))
    found: dict[Key, Found] = {}
    if len(wanted) > KEYS_FEW:
        for first in range(0, len(wanted), KEYS_MANY):
            found |= await _without_reached(read, wanted[first : first + KEYS_MANY])
        wanted = [key for key in wanted if key not in found]
    for first in range(0, len(wanted), KEYS_FEW):
        some = wanted[first : first + KEYS_FEW]
        found |= await found_by_key(some, partial(_with_reached, read))
    return [found[shard_id, *key] for shard_id, key in keys]


async def _without_reached(read: Read, keys: Sequence[Key]) -> dict[Key, Found]:
    """What is stored under those keys that have no reached rows. {} if there are very many reached rows."""
    most = 4 * len(keys)
    nothing = "NULL, " * (len(TIMER_COLUMNS) - 5)
    [rows] = await read(
        (
            f"(SELECT {selected('timers')}, shard_id, 0 FROM timers FORCE INDEX (timers_by_id) WHERE {with_keys(keys)})"  # noqa: S608
            " UNION ALL (SELECT NULL, NULL, NULL, CONVERT(timer_namespace USING utf8mb4),"
            f" CONVERT(timer_id USING utf8mb4), {nothing}shard_id, 1"
            f" FROM reached FORCE INDEX (reached_by_id) WHERE {with_keys(keys)} LIMIT {most})",
        )
    )
    timers = {_key(row): row for row in rows if not row[-1]}
    reached_rows = [_key(row) for row in rows if row[-1]]
    if len(reached_rows) == most:
        return {}
    has_reached = set(reached_rows)
    return {key: found_of(timers.get(key), ()) for key in keys if key not in has_reached}


async def _with_reached(read: Read, keys: Sequence[Key], reached_max: int) -> StoredRows[Key]:
    """Reads timers and reached rows in one statement, so that both are of the same snapshot. Columns that a timer does
    not have are NULL."""
    no_reached_columns = "NULL, " * (len(REACHED_COLUMNS) - len(TIMER_COLUMNS))
    newest_first = ", ".join(f"{name} DESC" for name in ("timer_generation", "timer_reached_at", *KEY_COLUMNS))
    parts = [
        f"(SELECT {selected('timers')}, {no_reached_columns}shard_id, 0 FROM timers FORCE INDEX (timers_by_id)"  # noqa: S608
        f" WHERE {with_keys(keys)})"
    ]
    parts += (
        f"(SELECT {selected('reached')}, shard_id, 1 FROM reached FORCE INDEX (reached_by_id)"  # noqa: S608
        f" WHERE {with_keys((key,))} ORDER BY {newest_first} LIMIT {reached_max})"
        for key in keys
    )
    [rows] = await read((" UNION ALL ".join(parts),))
    timers = {_key(row): row for row in rows if not row[-1]}
    reached_rows: dict[Key, list[Row]] = {}
    for row in rows:
        if row[-1]:
            reached_rows.setdefault(_key(row), []).append(row)
    return timers, reached_rows


def _key(row: Row) -> Key:
    return row[-2], row[3], row[4]


# --- lists ---------------------------------------------------------------------------------------


async def list_timers(read: Read, query: ListQuery) -> Listing:
    """Merges one scan per shard. With a correlation id, one scan of its index is enough."""
    table = "reached" if query.outcomes else "timers"
    index, by_correlation = "PRIMARY", ""
    if query.correlation_id is not None:
        index = f"{table}_by_correlation"
        by_correlation = (
            f"timer_correlation_id = {literal(query.correlation_id)} AND timer_namespace = {literal(query.namespace)}"
        )
    condition = _condition(query)

    def scan_sql(number: int, scan: Scan) -> str:
        if scan.chars_max == NO_PAYLOADS:  # not even named: InnoDB reads a column whole to know its length
            columns, length = selected(table, condition, "NULL"), "NULL"
        else:
            length = "LENGTH(timer_payload)"
            columns = selected(table, condition, f"({condition}) AND {length} <= {scan.chars_max}")
        rows = f"{by_correlation} AND shard_id < {scan.shard_id}" if by_correlation else f"shard_id = {scan.shard_id}"
        return (
            f"(SELECT {columns}, {length}, {number}, IF({condition}, 1, 0)"  # noqa: S608
            f" FROM {table} FORCE INDEX ({index})"
            f" WHERE {rows} AND {after_position(scan.after)}"
            f" AND timer_execute_at <= {at(bound_ms(scan.until_ms))} ORDER BY {KEY} LIMIT {scan.count})"
        )

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        items: list[list[Item]] = [[] for _ in scans]
        parts = [scan_sql(number, scan) for number, scan in enumerate(scans)]
        for first in range(0, len(scans), SCANS_AT_ONCE):
            [rows] = await read((" UNION ALL ".join(parts[first : first + SCANS_AT_ONCE]),))
            for row in rows:
                scan = scans[row[-2]]
                match = match_row(query, row, chars=row[-3], chars_max=scan.chars_max) if row[-1] else None
                items[row[-2]].append((position_of(row), match))
        for some in items:
            some.sort(
                key=lambda item: item[0]
            )  # they are sorted already, unless the server runs several parts in parallel
        return [ScanResult(some, len(some) < scan.count) for some, scan in zip(items, scans, strict=True)]

    return await merge_scans(query, fetch, in_order=query.correlation_id is not None)


async def next_namespace(read: Read, correlation_id: str, after: str) -> str | None:
    parts = (
        f"(SELECT CONVERT(timer_namespace USING utf8mb4) FROM {table} FORCE INDEX ({table}_by_correlation)"  # noqa: S608
        f" WHERE timer_correlation_id = {literal(correlation_id)} AND timer_namespace > {literal(after)}"
        " ORDER BY timer_namespace LIMIT 1)"
        for table in ("timers", "reached")
    )
    [rows] = await read((" UNION ALL ".join(parts),))
    return min((str(name) for (name,) in rows), key=str.encode, default=None)


def _condition(query: ListQuery) -> str:
    """A tag is searched in the text of the options, which finds too many rows; `match_row` checks again."""
    due = "timer_scheduled_at" if query.outcomes else "timer_execute_at"
    wanted = [f"timer_namespace = {literal(query.namespace)}"]
    if query.id_prefix is not None:
        wanted.append(f"LEFT(timer_id, {len(query.id_prefix.encode())}) = {literal(query.id_prefix)}")
    if query.correlation_id is not None:
        wanted.append(f"timer_correlation_id = {literal(query.correlation_id)}")
    if query.due_from_ms is not None:
        wanted.append(f"{due} >= {at(bound_ms(query.due_from_ms))}")
    if query.due_until_ms is not None:
        wanted.append(f"{due} < {at(bound_ms(query.due_until_ms))}")
    if query.tag is not None:
        wanted.append(f"LOCATE({literal(as_json(query.tag))}, timer_options) > 0")
    if query.outcomes:
        wanted.append(f"timer_outcome IN ({','.join(map(literal, sorted(query.outcomes)))})")
    return " AND ".join(wanted)
