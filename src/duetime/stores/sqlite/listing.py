"""Listing timers: a merge of scans, each of one shard or of one index, limited in rows."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Any

import apsw

from duetime.domain.timer import Position
from duetime.store import NO_CHARS_MAX, Listing, ListQuery
from duetime.stores.merging import LIST_PAGE_MAX, LIST_ROWS_MAX, ListingBuilder, Match, match_row, scan_chars_max
from duetime.stores.rows import LARGEST, REACHED_COLUMNS, TIMER_COLUMNS, as_json, position_before, position_of
from duetime.stores.sqlite.rows import KEY, MARKED_ROW_READER, REACHED, TIMER, limited, read_rows, shorter_if_too_big

__all__ = ["list_timers", "next_namespace"]


def _list_sql(row_type: int, row: str, due: str, where: str) -> str:
    """The next rows of one scan: all columns of rows that match, only the position of others."""
    return f"""
SELECT '[' || coalesce(group_concat(row, ','), '') || ']' AS answer FROM (
  SELECT CASE WHEN timer_namespace = :namespace
    AND (:id_prefix IS NULL OR substr(timer_id, 1, length(:id_prefix)) = :id_prefix)
    AND (:correlation_id IS NULL OR timer_correlation_id = :correlation_id)
    AND (:due_from IS NULL OR {due} >= :due_from) AND (:due_until IS NULL OR {due} < :due_until)
    AND (:tag IS NULL OR EXISTS (
      SELECT 1 FROM json_each(CASE WHEN json_valid(timer_options) THEN timer_options END, '$.t') WHERE value = :tag))
    AND (:outcomes IS NULL OR timer_outcome IN (SELECT value FROM json_each(:outcomes)))
  THEN {limited(row, "shard_id")} ELSE json_array({KEY}) END AS row
  FROM timers WHERE {where} AND row_type = {row_type} AND ({KEY}) > (:a, :b, :c) AND timer_execute_at <= :until
  ORDER BY {KEY} LIMIT :page)
"""  # noqa: S608


_BY_SHARD = "shard_id = :shard_id"
_BY_CORRELATION = "timer_correlation_id = :correlation_id AND timer_namespace = :namespace AND shard_id < :num_shards"
_LIST = {
    (reached, where): _list_sql(3, REACHED, "timer_scheduled_at", where)
    if reached
    else _list_sql(2, TIMER, "timer_execute_at", where)
    for reached in (False, True)
    for where in (_BY_SHARD, _BY_CORRELATION)
}


class _BudgetSpent(Exception):
    pass


def list_timers(db: apsw.Connection, query: ListQuery) -> Listing:
    """A merge of one scan per shard, or, with a correlation id, one scan of its index."""
    scan = _Scan(db, query)
    found = ListingBuilder(query.limit, query.chars_max)
    seen: Position | None = None
    try:
        for row in heapq.merge(*scan.streams(), key=position_of):
            if found.is_full:
                break
            seen = position_of(row)
            if len(row) > 3:
                found.add(scan.match(row))
        else:
            seen = None
    except _BudgetSpent:
        pass
    return found.listing(query, seen)


def next_namespace(db: apsw.Connection, correlation_id: str, after: str) -> str | None:
    row = db.execute(
        "SELECT timer_namespace FROM timers WHERE timer_correlation_id = ? AND timer_namespace > ?"
        " ORDER BY timer_namespace LIMIT 1",
        (correlation_id, after),
    ).fetchone()
    return None if row is None else str(row[0])


class _Scan:
    """The range scans of one list call. They raise _BudgetSpent after LIST_ROWS_MAX rows; merged rows are in order."""

    def __init__(self, db: apsw.Connection, query: ListQuery) -> None:
        self._db = db
        self._query = query
        self._rows_left = LIST_ROWS_MAX
        self._whole = len(REACHED_COLUMNS if query.outcomes else TIMER_COLUMNS)
        self._streams = 1 if query.correlation_id is not None else query.num_shards
        by_due = not query.outcomes  # then the due range limits the scan itself
        after = query.after
        if by_due and query.due_from_ms is not None:
            after = max(after, Position(query.due_from_ms - 1, LARGEST, LARGEST))
        self._after = after
        self._bindings: dict[str, Any] = {
            "namespace": query.namespace,
            "num_shards": query.num_shards,
            "id_prefix": query.id_prefix,
            "correlation_id": query.correlation_id,
            "tag": query.tag,
            "due_from": query.due_from_ms,
            "due_until": query.due_until_ms,
            "outcomes": as_json(sorted(query.outcomes)) if query.outcomes else None,
            "until": query.due_until_ms - 1 if by_due and query.due_until_ms is not None else LARGEST,
        }

    def streams(self) -> list[Iterator[list[Any]]]:
        if self._query.correlation_id is not None:
            return [self._stream(0, _BY_CORRELATION, self._query.limit + 1)]
        # Matches are spread evenly over the shards. If a page is too short, the next one is longer.
        first_page = 2 + self._query.limit * 2 // self._query.num_shards
        return [self._stream(shard_id, _BY_SHARD, first_page) for shard_id in range(self._query.num_shards)]

    def _stream(self, shard_id: int, where: str, page: int) -> Iterator[list[Any]]:
        sql = _LIST[bool(self._query.outcomes), where]
        after, first = self._after, True
        while True:
            # The first page of every shard may exceed the budget: without it nothing can be merged.
            if self._rows_left <= 0 and not first:
                raise _BudgetSpent
            rows, page = self._fetch(sql, shard_id, after, min(page, LIST_PAGE_MAX))
            first = False
            yield from rows
            if len(rows) < page:
                return
            after, page = position_of(rows[-1]), page * 2

    def _fetch(self, sql: str, shard_id: int, after: Position, page: int) -> tuple[list[list[Any]], int]:
        bindings = self._bindings | {"shard_id": shard_id, "a": after[0], "b": after[1], "c": after[2]}
        bindings["inline"] = scan_chars_max(self._query, page * self._streams)
        (rows, _), page = shorter_if_too_big(lambda count: read_rows(self._db, sql, bindings | {"page": count}), page)
        self._rows_left -= len(rows)
        return rows, page

    def match(self, row: list[Any]) -> Match | None:
        """A row whose payload was left out has two values more: its length and the shard."""
        if len(row) == self._whole or not self._query.payloads:
            return match_row(self._query, row, MARKED_ROW_READER)
        position = position_of(row)
        before = position_before(position)
        bindings = self._bindings | {"shard_id": row[-1], "a": before[0], "b": before[1], "c": before[2]}
        bindings |= {"until": position.execute_at_ms, "page": 1, "inline": NO_CHARS_MAX}
        rows, _ = read_rows(self._db, _LIST[bool(self._query.outcomes), _BY_SHARD], bindings)
        if not rows or len(rows[0]) == 3 or position_of(rows[0]) != position:
            return None  # it was removed meanwhile
        return match_row(self._query, rows[0], MARKED_ROW_READER)
