"""Lists of OracleStore: a few scans are one statement. The server leaves out long columns; this module filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from duetime.store import Listing, ListQuery
from duetime.stores.merging import Item, Scan, ScanResult, match_row, merge_scans
from duetime.stores.oracle.connection import Connection, Run
from duetime.stores.oracle.rows import COLUMNS, KEY, ROW_READER, encode_text
from duetime.stores.oracle.statements import after_position, fetch, scan_values
from duetime.stores.rows import TIMER_COLUMNS

__all__ = ["list_timers", "next_namespace"]

SCANS_AT_ONCE = 16
_LONG_COLUMNS = {"timer_payload": " AND DBMS_LOB.GETLENGTH(timer_payload) <= :bytes_max", "timer_options": ""}
_NAMESPACE = TIMER_COLUMNS.index("timer_namespace")


def scans_sql(table: str, count: int, *, by_correlation: bool) -> str:
    """The next rows of `count` scans, each with the length of its payload and the number of its scan. Payloads of more
    than :bytes_max bytes are left out."""
    columns = ", ".join(
        f"CASE WHEN timer_namespace = :namespace{_LONG_COLUMNS[name]} THEN {name} END AS {name}"
        if name in _LONG_COLUMNS
        else name
        for name in COLUMNS[table]
    )
    columns += ", CASE WHEN timer_namespace = :namespace THEN DBMS_LOB.GETLENGTH(timer_payload) END AS payload_bytes"
    by_correlation_sql = "timer_correlation_id = :correlation_id AND timer_namespace = :namespace"
    return "\nUNION ALL\n".join(
        f"SELECT * FROM (SELECT {columns}, {number} AS scan_number FROM {table} WHERE "  # noqa: S608
        + (f"{by_correlation_sql} AND shard_id < :shard_{number}" if by_correlation else f"shard_id = :shard_{number}")
        + f" AND {after_position(number)} AND timer_execute_at <= :until_{number} ORDER BY {KEY})"
        f" WHERE ROWNUM <= :count_{number}"
        for number in range(count)
    )


SCANS = {
    (table, by_correlation): scans_sql(table, 1 if by_correlation else SCANS_AT_ONCE, by_correlation=by_correlation)
    for table in COLUMNS
    for by_correlation in (False, True)
}


# "" is NULL, with which nothing compares; no name is empty or begins with CHR(0).
NEXT_NAMESPACE = "\nUNION ALL\n".join(
    f"SELECT * FROM (SELECT timer_namespace FROM {table} WHERE timer_correlation_id = :correlation_id"  # noqa: S608
    " AND timer_namespace > NVL(:after, CHR(0)) ORDER BY timer_namespace) WHERE ROWNUM <= 1"
    for table in COLUMNS
)


async def next_namespace(read: Run, correlation_id: str, after: str) -> str | None:
    values = {"correlation_id": encode_text(correlation_id), "after": after}
    rows = await read(partial(fetch, sql=NEXT_NAMESPACE, values=values))
    return min((str(name) for (name,) in rows), key=str.encode, default=None)


async def list_timers(read: Run, query: ListQuery) -> Listing:
    """Merges one scan per shard. With a correlation id, one scan of its index is enough."""

    async def fetch_scans(scans: Sequence[Scan]) -> list[ScanResult]:
        results: list[ScanResult] = []
        for first in range(0, len(scans), SCANS_AT_ONCE):
            results += await read(partial(_scan_results, query, scans[first : first + SCANS_AT_ONCE]))
        return results

    return await merge_scans(query, fetch_scans, in_order=query.correlation_id is not None)


async def _scan_results(query: ListQuery, scans: Sequence[Scan], db: Connection) -> list[ScanResult]:
    by_correlation = query.correlation_id is not None
    chars_max = scans[0].chars_max
    values: dict[str, Any] = {"namespace": query.namespace, "bytes_max": chars_max}
    if by_correlation:
        values["correlation_id"] = encode_text(query.correlation_id)
    for number in range(1 if by_correlation else SCANS_AT_ONCE):
        scan = scans[
            min(number, len(scans) - 1)
        ]  # the statement always has SCANS_AT_ONCE scans; surplus ones read nothing
        count = scan.count if number < len(scans) else 0
        values |= scan_values(number, scan.shard_id, scan.after, scan.until_ms, count)
    items: list[list[Item]] = [[] for _ in scans]
    for row in await fetch(db, SCANS["reached" if query.outcomes else "timers", by_correlation], values):
        is_in_namespace = row[_NAMESPACE] == query.namespace
        match = match_row(query, row, ROW_READER, row[-2], chars_max) if is_in_namespace else None
        items[int(row[-1])].append((ROW_READER.position(row), match))
    for some in items:
        some.sort(key=lambda item: item[0])  # they are sorted already, unless the server runs several parts in parallel
    return [ScanResult(some, len(some) < scan.count) for some, scan in zip(items, scans, strict=True)]
