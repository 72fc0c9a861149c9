"""Lists of SqlServerStore: some scans are one query. The server leaves out long columns; this module filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from duetime.store import Listing, ListQuery
from duetime.stores.merging import Item, Scan, ScanResult, match_row, merge_scans
from duetime.stores.rows import TIMER_COLUMNS, bound_ms
from duetime.stores.sqlserver.connection import Connection, Run, execute
from duetime.stores.sqlserver.rows import ROW_READER, as_bytes, at, document, selected
from duetime.stores.sqlserver.statements import query as query_sql
from duetime.stores.sqlserver.statements import scan_sql

__all__ = ["list_timers", "next_namespace"]

SCANS_AT_ONCE = 64
_NAMESPACE = TIMER_COLUMNS.index("timer_namespace")


def list_sql(row_type: int, *, by_correlation: bool) -> str:
    """The namespace and the correlation id are declared with a type, because both may be long. Payloads of more than
    @chars_max characters are left out, and their length is returned."""
    declarations = "DECLARE @namespace nvarchar(255) = JSON_VALUE(@doc, '$.namespace');\n"
    if by_correlation:
        declarations += "DECLARE @correlation_id nvarchar(255) = JSON_VALUE(@doc, '$.correlation_id');\n"
    declarations += "DECLARE @chars_max bigint = JSON_VALUE(@doc, '$.chars_max');\n"
    is_ours = f"t.timer_namespace = {as_bytes('@namespace')}"
    length = "DATALENGTH(t.timer_payload) / 2"
    columns = selected(row_type, is_ours, f"{is_ours} AND {length} <= @chars_max")
    columns += f", CASE WHEN {is_ours} THEN {length} END AS payload_chars"
    return query_sql(declarations + scan_sql(row_type, columns, by_correlation=by_correlation))


LIST = {
    (row_type, by_correlation): list_sql(row_type, by_correlation=by_correlation)
    for row_type in (2, 3)
    for by_correlation in (False, True)
}


NEXT_NAMESPACE = query_sql(f"""DECLARE @correlation_id nvarchar(255) = JSON_VALUE(@doc, '$.correlation_id');
DECLARE @after nvarchar(255) = JSON_VALUE(@doc, '$.after');
SELECT TOP (1) CAST(t.timer_namespace AS nvarchar(255)) FROM timers AS t WITH (INDEX(timers_by_correlation))
WHERE t.timer_correlation_id IS NOT NULL AND t.timer_correlation_id = {as_bytes("@correlation_id")}
  AND t.timer_namespace > {as_bytes("@after")}
ORDER BY t.timer_namespace
OPTION (MAXDOP 1);""")  # noqa: S608


async def next_namespace(read: Run, correlation_id: str, after: str) -> str | None:
    """In the order of UTF-16, in which SQL Server has the names."""
    request = document({"correlation_id": correlation_id, "after": after})
    [rows] = await read(lambda db: execute(db, NEXT_NAMESPACE, request))
    return str(rows[0][0]) if rows else None


async def list_timers(read: Run, query: ListQuery) -> Listing:
    """Merges one scan per shard. With a correlation id, one scan of its index is enough."""

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        results: list[ScanResult] = []
        for first in range(0, len(scans), SCANS_AT_ONCE):
            results += await read(partial(_scan_results, query, scans[first : first + SCANS_AT_ONCE]))
        return results

    return await merge_scans(query, fetch, in_order=query.correlation_id is not None)


def _scan_results(query: ListQuery, scans: Sequence[Scan], db: Connection) -> list[ScanResult]:
    request = {
        "namespace": query.namespace,
        "correlation_id": query.correlation_id,
        "chars_max": scans[0].chars_max,
        "scans": [
            (
                number,
                scan.shard_id,
                at(bound_ms(scan.after.execute_at_ms)),
                scan.after.uuid_high,
                scan.after.uuid_low,
                at(bound_ms(scan.until_ms)),
                scan.count,
            )
            for number, scan in enumerate(scans)
        ],
    }
    sql = LIST[3 if query.outcomes else 2, query.correlation_id is not None]
    [rows] = execute(db, sql, document(request))
    items: list[list[Item]] = [[] for _ in scans]
    for row in rows:
        is_in_namespace = row[_NAMESPACE] == query.namespace
        match = match_row(query, row, ROW_READER, row[-2], scans[0].chars_max) if is_in_namespace else None
        items[row[-1]].append((ROW_READER.position(row), match))
    for some in items:
        some.sort(key=lambda item: item[0])  # usually they are sorted already, but SQL Server does not guarantee it
    return [ScanResult(some, len(some) < scan.count) for some, scan in zip(items, scans, strict=True)]
