"""Lists of PostgresStore: a round of scans is one statement. The server filters."""

from __future__ import annotations

from collections.abc import Sequence

from duetime.store import Listing, ListQuery
from duetime.stores.merging import Item, Scan, ScanResult, match_row, merge_scans
from duetime.stores.postgres.rows import KEY, at, selected
from duetime.stores.postgres.statements import Run
from duetime.stores.rows import as_json, bound_ms, position_of

__all__ = ["list_timers"]


def _list_sql(row_type: int, by_correlation: bool) -> str:
    """The next rows of each scan: all columns of rows that match, only the position of others.

    A tag is searched in the text of the options, which finds too many rows; `match_row` checks again. Parsing the JSON
    here would fail for a row that has an escaped NUL anywhere in it.
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
SELECT {selected(row_type, "t.matches")}, s.shard_id, t.matches
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
    """Merges one scan per shard. With a correlation id, one scan of its index is enough."""
    by_correlation = query.correlation_id is not None
    sql = _LIST[3 if query.outcomes else 2, by_correlation]
    filters = (
        query.namespace,
        query.id_prefix,
        query.correlation_id,
        None if query.due_from_ms is None else bound_ms(query.due_from_ms),
        None if query.due_until_ms is None else bound_ms(query.due_until_ms),
        None if query.tag is None else as_json(query.tag),
        sorted(query.outcomes) or None,
    )

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        rows = await run(
            sql,
            [scan.shard_id for scan in scans],
            [bound_ms(scan.after.execute_at_ms) for scan in scans],
            [scan.after.uuid_high for scan in scans],
            [scan.after.uuid_low for scan in scans],
            [scan.count for scan in scans],
            bound_ms(scans[0].until_ms),
            *filters,
        )
        items: dict[int, list[Item]] = {scan.shard_id: [] for scan in scans}
        for row in rows:
            items[row[-2]].append((position_of(row), match_row(query, row) if row[-1] else None))
        return [ScanResult(items[scan.shard_id], len(items[scan.shard_id]) < scan.count) for scan in scans]

    return await merge_scans(query, fetch, in_order=by_correlation)
