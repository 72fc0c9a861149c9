"""Reads from DynamoDB: rows by position, a timer and its reached rows by key, lists. All are consistent reads.

A query has ended only when its answer has no LastEvaluatedKey. An answer stops at a megabyte, and may be short or empty
without being the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from duetime.domain.timer import Position, TimerKey
from duetime.errors import StoreError
from duetime.store import NO_CHARS_MAX, Found, Listing, ListQuery, Page, PageRequest
from duetime.stores.dynamodb import rows as items
from duetime.stores.dynamodb.connection import Run
from duetime.stores.dynamodb.rows import Item, number, text
from duetime.stores.fencing import each_shard_separately
from duetime.stores.merging import NO_PAYLOADS, Scan, ScanResult, match_row, merge_scans, within
from duetime.stores.merging import Item as ListItem
from duetime.stores.rows import StoredRows, bound_ms, found_by_key, page_of, rows_of_page

__all__ = ["Tables", "all_of", "get_many", "list_timers", "load", "rows_by_position"]

_ANSWERS_MAX: Final = 16  # of up to 1 MB each, in one load


class Tables(Struct, frozen=True):
    """The names of the two tables, and a lock for the writes of each shard."""

    timers: str
    cluster: str
    locks: dict[int, asyncio.Lock]

    def lock_of(self, shard_id: int) -> asyncio.Lock:
        return self.locks.setdefault(shard_id, asyncio.Lock())


async def all_of(run: Run, tables: Tables, kind: str) -> list[Item]:
    """All items of a kind, in the order of their names."""
    found: list[Item] = []
    request: dict[str, Any] = {}
    while True:
        answer = await run(
            "query",
            TableName=tables.cluster,
            ConsistentRead=True,
            KeyConditionExpression="item_kind = :kind",
            ExpressionAttributeValues={":kind": text(kind)},
            **request,
        )
        found += answer["Items"]
        if "LastEvaluatedKey" not in answer:
            return found
        request = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}


async def rows_by_position(
    run: Run,
    tables: Tables,
    shard_id: int,
    first: bytes,
    last: bytes,
    limit: int,
    answers_max: int,
    chars_max: int,
    **more: Any,
) -> tuple[list[Item], bool]:
    """Rows in the order of positions, and whether the range ends with them. It may be left before its end after
    `answers_max` answers, and when payloads exceed `chars_max`."""
    found: list[Item] = []
    chars = 0
    if first > last:
        return found, True
    answers = 0
    while True:
        answer = await run(
            "query",
            TableName=tables.timers,
            IndexName=items.POSITIONS,
            ConsistentRead=True,
            KeyConditionExpression="shard_id = :shard_id AND row_at BETWEEN :first AND :last",
            ExpressionAttributeValues={":shard_id": number(shard_id), ":first": {"B": first}, ":last": {"B": last}},
            Limit=limit - len(found),
            **more,
        )
        found += answer["Items"]
        answers += 1
        chars += sum(map(items.payload_length, answer["Items"]))
        if "LastEvaluatedKey" not in answer:
            return found, True
        if len(found) >= limit or (found and (answers >= answers_max or chars > chars_max)):
            return found, False
        more["ExclusiveStartKey"] = answer["LastEvaluatedKey"]


async def load(run: Run, tables: Tables, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
    """Each request has its own result: one partition may be throttled, and the others not."""
    answers_max = max(1, _ANSWERS_MAX // max(1, len(requests)))
    shard_ids = [request.shard_id for request in requests]
    return await each_shard_separately(requests, shard_ids, lambda request: _load(run, tables, request, answers_max))


async def _load(run: Run, tables: Tables, request: PageRequest, answers_max: int) -> Page:
    first = items.after(items.TIMER, _bound(request.after))
    last = items.up_to(items.TIMER, bound_ms(request.until_ms))
    found, ended = await rows_by_position(
        run, tables, request.shard_id, first, last, request.limit + 1, answers_max, request.chars_max
    )
    count = rows_of_page(map(items.payload_length, found[: request.limit]), request.chars_max)
    if ended and len(found) == count:
        return page_of(found, None, items.ROW_READER)
    del found[count:]
    return page_of(found, items.position_of(found[-1]), items.ROW_READER)


def _bound(position: Position) -> Position:
    return position._replace(execute_at_ms=bound_ms(position.execute_at_ms))


async def get_many(run: Run, tables: Tables, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    distinct = list(dict.fromkeys(keys))
    found = await asyncio.gather(*(_get(run, tables, shard_id, key) for shard_id, key in distinct))
    by_key = dict(zip(distinct, found, strict=True))
    return [by_key[key] for key in keys]


async def _get(run: Run, tables: Tables, shard_id: int, key: TimerKey) -> Found:
    async def read(_: object, ends_max: int) -> StoredRows[TimerKey]:
        found = await _stored(run, tables, shard_id, key, ends_max)
        timer = found.pop(0) if found and items.is_timer(found[0]) else None
        ends = found[:ends_max]
        return {} if timer is None else {key: timer}, {key: ends} if ends else {}

    return (await found_by_key([key], read, items.ROW_READER))[key]


async def _stored(run: Run, tables: Tables, shard_id: int, key: TimerKey, ends_max: int) -> list[Item]:
    """In reverse order: the timer, if it exists, then its newest reached row. In this order because a query is not a
    snapshot: a timer that is reached meanwhile is seen twice, which does no harm, and is not missed in both places."""
    found: list[Item] = []
    request: dict[str, Any] = {}
    while len(found) < 1 + ends_max:
        answer = await run(
            "query",
            TableName=tables.timers,
            ConsistentRead=True,
            KeyConditionExpression="shard_id = :shard_id AND begins_with(row_key, :key)",
            ExpressionAttributeValues={":shard_id": number(shard_id), ":key": {"B": items.key_prefix(key)}},
            ScanIndexForward=False,
            Limit=1 + ends_max - len(found),
            **request,
        )
        found += answer["Items"]
        if "LastEvaluatedKey" not in answer:
            break
        request = {"ExclusiveStartKey": answer["LastEvaluatedKey"]}
    return found


async def list_timers(run: Run, tables: Tables, query: ListQuery) -> Listing:
    """Filtered here: the service charges also for items that its own filter removes."""
    row_type = items.REACHED if query.outcomes else items.TIMER

    async def scanned(scan: Scan) -> ScanResult:
        """Long payloads are left out after each answer."""
        after, last = scan.after, items.up_to(row_type, bound_ms(scan.until_ms))
        more = items.WITHOUT_PAYLOAD if scan.chars_max == NO_PAYLOADS else {}
        found: list[ListItem] = []
        for _ in range(_ANSWERS_MAX):
            some, ended = await rows_by_position(
                run,
                tables,
                scan.shard_id,
                items.after(row_type, _bound(after)),
                last,
                scan.count - len(found),
                1,
                NO_CHARS_MAX,
                **more,
            )
            found += (
                (items.position_of(item), within(scan, match_row(query, item, items.ROW_READER))) for item in some
            )
            if ended or len(found) >= scan.count:
                break
            after = found[-1][0]
        return ScanResult(found, ended)

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        return list(await asyncio.gather(*(scanned(scan) for scan in scans)))

    return await merge_scans(query, fetch)
