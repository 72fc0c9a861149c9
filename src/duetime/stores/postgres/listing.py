"""Lists of PostgresStore: a round of scans is one statement. The server filters."""

from __future__ import annotations

from collections.abc import Sequence

from duetime.store import Listing, ListQuery
from duetime.stores.merging import Item, Scan, ScanResult, match_row, merge_scans
from duetime.stores.postgres.rows import KEY, at, selected
from duetime.stores.postgres.statements import Run
from duetime.stores.rows import as_json, bound_ms, position_of

__all__ = ["list_timers", "next_namespace"]


def _list_sql(row_type: int, by_correlation: bool) -> str:
    """The next rows of each scan: all columns of rows that match, only the position of others. Payloads that are too
    long are left out; their length is known without reading them.

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
SELECT {selected(row_type, "t.matches", "octet_length(t.timer_payload) <= $14::bigint")},
  octet_length(t.timer_payload), s.number, t.matches
FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::bigint[], $5::int[], $6::bigint[])
  WITH ORDINALITY AS s(shard_id, at, high, low, most, until, number)
CROSS JOIN LATERAL (
  SELECT *, ({matches}) IS TRUE AS matches
  FROM timers WHERE {where} AND row_type = {row_type} AND ({KEY}) > ({at("s.at")}, s.high, s.low)
  AND timer_execute_at <= {at("s.until")}
  ORDER BY {KEY} LIMIT s.most) AS t
"""  # noqa: S608


_LIST = {
    (row_type, by_correlation): _list_sql(row_type, by_correlation)
    for row_type in (2, 3)
    for by_correlation in (False, True)
}


async def next_namespace(run: Run, correlation_id: str, after: str) -> str | None:
    rows = await run(
        "SELECT timer_namespace FROM timers WHERE timer_correlation_id = $1::text AND timer_namespace > $2::text"
        " ORDER BY timer_namespace LIMIT 1",
        correlation_id,
        after,
    )
    return str(rows[0][0]) if rows else None


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
            [bound_ms(scan.until_ms) for scan in scans],
            *filters,
            chars_max := scans[0].chars_max,
        )
        items: list[list[Item]] = [[] for _ in scans]
        for row in rows:
            match = match_row(query, row, chars=row[-3], chars_max=chars_max) if row[-1] else None
            items[row[-2] - 1].append((position_of(row), match))
        return [ScanResult(found, len(found) < scan.count) for found, scan in zip(items, scans, strict=True)]

    return await merge_scans(query, fetch, in_order=by_correlation)
