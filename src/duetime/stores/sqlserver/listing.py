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

__all__ = ["list_timers"]

SCANS_AT_ONCE = 64
_NAMESPACE = TIMER_COLUMNS.index("timer_namespace")


def list_sql(row_type: int, *, by_correlation: bool) -> str:
    """The namespace and the correlation id are declared with a type, because both may be long."""
    declarations = "DECLARE @namespace nvarchar(255) = JSON_VALUE(@doc, '$.namespace');\n"
    if by_correlation:
        declarations += "DECLARE @correlation_id nvarchar(255) = JSON_VALUE(@doc, '$.correlation_id');\n"
    columns = selected(row_type, f"t.timer_namespace = {as_bytes('@namespace')}")
    return query_sql(declarations + scan_sql(row_type, columns, by_correlation=by_correlation))


LIST = {
    (row_type, by_correlation): list_sql(row_type, by_correlation=by_correlation)
    for row_type in (2, 3)
    for by_correlation in (False, True)
}


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
        items[row[-1]].append(
            (ROW_READER.position(row), match_row(query, row, ROW_READER) if is_in_namespace else None)
        )
    for some in items:
        some.sort(key=lambda item: item[0])  # usually they are sorted already, but SQL Server does not guarantee it
    return [ScanResult(some, len(some) < scan.count) for some, scan in zip(items, scans, strict=True)]
