"""Lists of MongoStore: each scan is one command; the server filters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from bson.datetime_ms import DatetimeMS

from duetime.store import Listing, ListQuery
from duetime.stores.merging import Item, Match, Scan, ScanResult, match_row, merge_scans
from duetime.stores.mongodb.connection import Session
from duetime.stores.mongodb.rows import (
    BY_CORRELATION,
    IN_ORDER,
    REACHED,
    ROW_READER,
    TIMER,
    Document,
    bounds,
)
from duetime.stores.mongodb.statements import Run, between, gather_all
from duetime.stores.rows import as_json, bound_ms

__all__ = ["list_timers", "next_namespace"]


async def list_timers(run: Run, query: ListQuery) -> Listing:
    """A merge of one scan per shard, or, with a correlation id, one scan of its index."""

    async def fetch(scans: Sequence[Scan]) -> list[ScanResult]:
        projection = _projection(query, scans[0].chars_max)
        return await gather_all([run(partial(_fetch, query=query, scan=scan, projection=projection)) for scan in scans])

    return await merge_scans(query, fetch, in_order=query.correlation_id is not None)


async def next_namespace(run: Run, correlation_id: str, after: str) -> str | None:
    async def fetch(session: Session) -> list[Document]:
        condition = {"timer_correlation_id": correlation_id, "timer_namespace": {"$gt": after}}
        cursor = session.timers.find(condition, {"_id": 0, "timer_namespace": 1}, session=session.driver_session)
        return await cursor.hint("by_correlation").sort("timer_namespace", 1).limit(1).to_list()

    found = await run(fetch)
    return str(found[0]["timer_namespace"]) if found else None


async def _fetch(session: Session, query: ListQuery, scan: Scan, projection: Document) -> ScanResult:
    row_type = REACHED if query.outcomes else TIMER
    condition: Document = {}
    if query.correlation_id is None:
        index, found = "in_order", bounds(IN_ORDER, (row_type, scan.shard_id), scan.after, scan.until_ms)
    else:
        leading = (query.correlation_id, query.namespace, row_type)
        index, found = "by_correlation", bounds(BY_CORRELATION, leading, scan.after, scan.until_ms)
        condition = {"shard_id": {"$lt": scan.shard_id}}
    if found is None:
        return ScanResult((), ended=True)
    cursor = session.timers.find(condition, projection, session=session.driver_session)
    documents = await between(cursor, index, found, scan.count).to_list()
    items: list[Item] = [(ROW_READER.position(document), _found(document, query, scan)) for document in documents]
    return ScanResult(items, len(items) < scan.count)


def _found(document: Document, query: ListQuery, scan: Scan) -> Match | None:
    whole = document.get("whole")
    return None if whole is None else match_row(query, whole, ROW_READER, document.get("length"), scan.chars_max)


def _projection(query: ListQuery, chars_max: int) -> Document:
    """Documents that match all filters as a whole, of the others only the position. Payloads of more bytes than
    `chars_max` are left out, and their length is returned. They must be texts: the length of any other value would be
    an error.

    A tag is searched in the text of the options, which may match too much; it is checked again after decoding.
    """
    due = "$timer_scheduled_at" if query.outcomes else "$timer_execute_at"
    tests: list[Document] = [{"$eq": ["$timer_namespace", _literal(query.namespace)]}]
    if query.id_prefix is not None:
        tests.append({"$eq": [{"$indexOfBytes": ["$timer_id", _literal(query.id_prefix)]}, 0]})
    if query.correlation_id is not None:
        tests.append({"$eq": ["$timer_correlation_id", _literal(query.correlation_id)]})
    if query.due_from_ms is not None:
        tests.append({"$gte": [due, DatetimeMS(bound_ms(query.due_from_ms))]})
    if query.due_until_ms is not None:
        tests.append({"$lt": [due, DatetimeMS(bound_ms(query.due_until_ms))]})
    if query.tag is not None:
        options = {"$ifNull": ["$timer_options", ""]}
        tests.append({"$gte": [{"$indexOfBytes": [options, _literal(as_json(query.tag))]}, 0]})
    if query.outcomes:
        tests.append({"$in": ["$timer_outcome", sorted(query.outcomes)]})
    text = {"$cond": [{"$eq": [{"$type": "$timer_payload"}, "string"]}, "$timer_payload", ""]}
    length = {"$strLenBytes": text}
    is_too_long: Any = {"$gt": [length, chars_max]} if query.payloads else True
    without_payload = {"$unsetField": {"field": "timer_payload", "input": "$$ROOT"}}
    return {
        "_id": 0,
        "timer_execute_at": 1,
        "timer_uuid_high": 1,
        "timer_uuid_low": 1,
        "length": length,
        "whole": {"$cond": [{"$and": tests}, {"$cond": [is_too_long, without_payload, "$$ROOT"]}, "$$REMOVE"]},
    }


def _literal(text: str) -> dict[str, Any]:
    """Without this, a text that begins with a dollar sign would be the name of a field."""
    return {"$literal": text}
