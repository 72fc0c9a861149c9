"""What MySqlStore reads: pages of a shard, timers by their keys, lists. Each is one message, or a few if it is long.

Parts of a question that are ranges of their own, a shard or a key each, are put together by UNION ALL: of what could
do that better (LATERAL, JSON_TABLE) the three have nothing in common. Every access is by an index that is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from duetime.domain.timer import Position, Timer, TimerKey
from duetime.store import Found, Listing, ListQuery, Page, PageRequest, Unreadable
from duetime.stores.merging import Item, Scan, ScanResult, matching, merge_scans
from duetime.stores.mysql.connection import Read
from duetime.stores.mysql.rows import KEY, at, beyond, keyed, literal, selected
from duetime.stores.rows import (
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    Row,
    StoredRows,
    as_json,
    bound_ms,
    found_by_key,
    found_of,
    page_of,
    page_of_items,
    position_of,
    readable,
    timer_of,
)

__all__ = ["get_many", "list_timers", "load"]

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in one answer; pages that would be longer are made shorter
LIGHT_BYTES = 4_096  # payloads up to this are always read with their row
KEYS_FEW = 50
KEYS_MANY = 1_000
SCANS_AT_ONCE = 64

_PAYLOAD = TIMER_COLUMNS.index("timer_payload")

# --- pages and keys ------------------------------------------------------------------------------


async def load(read: Read, requests: Sequence[PageRequest]) -> list[Page]:
    if not requests:
        return []
    light = max(LIGHT_BYTES, LOAD_BYTES_MAX // sum(request.limit + 1 for request in requests))
    parts = [_stretch_sql(number, request, light) for number, request in enumerate(requests)]
    [found] = await read((" UNION ALL ".join(parts),))
    rows: list[list[Row]] = [[] for _ in requests]
    for row in found:
        rows[row[-2]].append(row)
    room = LOAD_BYTES_MAX // len(requests)
    pages = [_cut(request, some, room) for request, some in zip(requests, rows, strict=True)]
    heavy = await _heavy(read, [(requests[row[-2]].shard_id, row) for some, _ in pages for row in some])
    return [_page(request, some, after, heavy) for request, (some, after) in zip(requests, pages, strict=True)]


def _stretch_sql(number: int, request: PageRequest, light: int) -> str:
    columns = selected("timers", f"timer_payload IS NULL OR LENGTH(timer_payload) <= {light}")
    return (
        f"(SELECT {columns}, {number}, LENGTH(timer_payload) FROM timers FORCE INDEX (PRIMARY)"  # noqa: S608
        f" WHERE shard_id = {request.shard_id} AND {beyond(request.after)}"
        f" AND timer_execute_at <= {at(bound_ms(request.until_ms))} ORDER BY {KEY} LIMIT {request.limit + 1})"
    )


def _cut(request: PageRequest, rows: list[Row], room: int) -> tuple[list[Row], Position | None]:
    """A page's rows, and where to go on. It ends where its payloads pass its weight, but for its first."""
    rows.sort(key=position_of)  # as they come, unless the server works on several parts at once
    end = min(len(rows), request.limit)
    for index in range(end):
        room -= rows[index][-1] or 0
        if room < 0 and index:
            end = index
            break
    return rows[:end], None if end == len(rows) else position_of(rows[end - 1])


def _is_heavy(row: Row) -> bool:
    return row[_PAYLOAD] is None and row[-1] is not None


Heavy = dict[tuple[int, Position], Timer | Unreadable]


async def _heavy(read: Read, rows: Iterable[tuple[int, Row]]) -> Heavy:
    """The timers whose payload was too long to come along, read whole: what was replaced meanwhile is not mixed."""
    places = [(shard_id, position_of(row)) for shard_id, row in rows if _is_heavy(row)]
    if not places:
        return {}
    where = " OR ".join(
        f"(shard_id = {shard_id} AND timer_execute_at = {at(place.execute_at_ms)}"
        f" AND timer_uuid_high = {place.uuid_high} AND timer_uuid_low = {place.uuid_low})"
        for shard_id, place in places
    )
    [found] = await read((f"SELECT {selected('timers')}, shard_id FROM timers FORCE INDEX (PRIMARY) WHERE {where}",))  # noqa: S608
    return {(row[-1], position_of(row)): readable(row, timer_of) for row in found}


def _page(request: PageRequest, rows: Sequence[Row], after: Position | None, heavy: Heavy) -> Page:
    if not any(map(_is_heavy, rows)):
        return page_of(rows, after)
    items: list[Timer | Unreadable] = []
    for row in rows:
        item = heavy.get((request.shard_id, position_of(row))) if _is_heavy(row) else readable(row, timer_of)
        if item is not None:  # one that is gone by now was removed after this began
            items.append(item)
    return page_of_items(items, after)


Key = tuple[int, str, str]
"""Shard, namespace, id."""


async def get_many(read: Read, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    """The newest end of each key is a query of its own; of many keys, most have none, and so that is asked first."""
    wanted = list(dict.fromkeys((shard_id, *key) for shard_id, key in keys))
    found: dict[Key, Found] = {}
    if len(wanted) > KEYS_FEW:
        for first in range(0, len(wanted), KEYS_MANY):
            found |= await _without_ends(read, wanted[first : first + KEYS_MANY])
        wanted = [key for key in wanted if key not in found]
    for first in range(0, len(wanted), KEYS_FEW):
        some = wanted[first : first + KEYS_FEW]
        found |= await found_by_key(some, partial(_with_ends, read))
    return [found[shard_id, *key] for shard_id, key in keys]


async def _without_ends(read: Read, keys: Sequence[Key]) -> dict[Key, Found]:
    """What is stored under those keys that have no reached rows. A few that have very many are not read through."""
    most = 4 * len(keys)
    nothing = "NULL, " * (len(TIMER_COLUMNS) - 5)
    [rows] = await read(
        (
            f"(SELECT {selected('timers')}, shard_id, 0 FROM timers FORCE INDEX (timers_by_id) WHERE {keyed(keys)})"  # noqa: S608
            " UNION ALL (SELECT NULL, NULL, NULL, CONVERT(timer_namespace USING utf8mb4),"
            f" CONVERT(timer_id USING utf8mb4), {nothing}shard_id, 1"
            f" FROM reached FORCE INDEX (reached_by_id) WHERE {keyed(keys)} LIMIT {most})",
        )
    )
    timers = {_key(row): row for row in rows if not row[-1]}
    ends = [_key(row) for row in rows if row[-1]]
    if len(ends) == most:
        return {}
    ended = set(ends)
    return {key: found_of(timers.get(key), ()) for key in keys if key not in ended}


async def _with_ends(read: Read, keys: Sequence[Key], reached_max: int) -> StoredRows[Key]:
    """In one statement, so that timer and end are of one moment. What a timer has not is NULL."""
    no_end = "NULL, " * (len(REACHED_COLUMNS) - len(TIMER_COLUMNS))
    newest_first = ", ".join(f"{name} DESC" for name in ("timer_generation", "timer_reached_at", *KEY_COLUMNS))
    parts = [
        f"(SELECT {selected('timers')}, {no_end}shard_id, 0 FROM timers FORCE INDEX (timers_by_id)"  # noqa: S608
        f" WHERE {keyed(keys)})"
    ]
    parts += (
        f"(SELECT {selected('reached')}, shard_id, 1 FROM reached FORCE INDEX (reached_by_id)"  # noqa: S608
        f" WHERE {keyed((key,))} ORDER BY {newest_first} LIMIT {reached_max})"
        for key in keys
    )
    [rows] = await read((" UNION ALL ".join(parts),))
    timers = {_key(row): row for row in rows if not row[-1]}
    ends: dict[Key, list[Row]] = {}
    for row in rows:
        if row[-1]:
            ends.setdefault(_key(row), []).append(row)
    return timers, ends


def _key(row: Row) -> Key:
    return row[-2], row[3], row[4]


# --- lists ---------------------------------------------------------------------------------------


async def list_timers(read: Read, query: ListQuery) -> Listing:
    """A merge of one scan per shard, or, with a correlation id, one scan of its index."""
    table = "reached" if query.outcomes else "timers"
    index, trace = "PRIMARY", ""
    if query.correlation_id is not None:
        index = f"{table}_by_correlation"
        trace = (
            f"timer_correlation_id = {literal(query.correlation_id)} AND timer_namespace = {literal(query.namespace)}"
        )
    condition = _condition(query)
    columns = selected(table, condition)

    def scan_sql(scan: Scan) -> str:
        rows = f"{trace} AND shard_id < {scan.shard_id}" if trace else f"shard_id = {scan.shard_id}"
        return (
            f"(SELECT {columns}, {scan.shard_id}, IF({condition}, 1, 0) FROM {table} FORCE INDEX ({index})"  # noqa: S608
            f" WHERE {rows} AND {beyond(scan.after)}"
            f" AND timer_execute_at <= {at(bound_ms(scan.until_ms))} ORDER BY {KEY} LIMIT {scan.count})"
        )

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        items: dict[int, list[Item]] = {scan.shard_id: [] for scan in scans}
        for first in range(0, len(scans), SCANS_AT_ONCE):
            [rows] = await read((" UNION ALL ".join(map(scan_sql, scans[first : first + SCANS_AT_ONCE])),))
            for row in rows:
                items[row[-2]].append((position_of(row), matching(query, row) if row[-1] else None))
        for some in items.values():
            some.sort(key=lambda item: item[0])  # as they come, unless the server works on several parts at once
        return [ScanResult(items[scan.shard_id], len(items[scan.shard_id]) < scan.count) for scan in scans]

    return await merge_scans(query, fetch, in_order=query.correlation_id is not None)


def _condition(query: ListQuery) -> str:
    """A tag is looked for in the text of the options, which finds too much; the reader looks again."""
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
