"""The commands of MongoStore: reads and writes, and decoding of their answers.

Every fenced write is a transaction. Its first step *changes* the documents of its shards, on condition of their fences:
it increments a counter of commits. A transaction that only read them would not notice a claim. So if a write and a
claim run at the same time, there are two cases. If the claim comes first, the write conflicts, is run again, and finds
that its fence is no longer valid. If the write comes first, the claim waits for its end.

That end may not come: a transaction belongs to a session and not to a connection, and if its owner crashes it stays
open on the server for a minute. Therefore the document of a shard names the sessions of its owner, and a claim of the
shard first ends these sessions. If the former owner is still alive, it runs its transaction again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from bson.datetime_ms import DatetimeMS
from pymongo import ReturnDocument, UpdateOne, errors
from pymongo.asynchronous.cursor import AsyncCursor

from duetime.domain.timer import Namespace, Position, TimerKey
from duetime.errors import MemberDead, OutcomeUnknown, ShardLost, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, Found, Member, Page, PageRequest, ShardRow
from duetime.stores.fencing import NOTHING_REPLACED, committed, in_steps, lost, shard_rounds
from duetime.stores.mongodb.connection import Session
from duetime.stores.mongodb.errors import error_text
from duetime.stores.mongodb.rows import (
    IN_ORDER,
    NEWEST,
    REACHED,
    ROW_READER,
    SHARD,
    TIMER,
    Document,
    bounds,
    free_shard,
    low_water_document,
    reached_document,
    shard_in,
    shard_key,
    timer_document,
    timer_key,
)
from duetime.stores.rows import FIRST_MS, StoredRows, as_json, found_by_key, namespaces_of, page_of
from duetime.telemetry import log

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in one load; longer pages are cut
COMMAND_BYTES_MAX = 12 * 1024 * 1024  # the limit of a command is 16 MiB; a single document may be larger
DOCUMENT_BYTES = 1024  # the most that a document takes without its texts
SMALL_COMMIT_MAX = 16  # documents: up to here one slow command is faster than three fast ones (measured)

T = TypeVar("T")
Cursor: TypeAlias = AsyncCursor[Document]


class Run(Protocol):
    """Runs a piece of work in one of the store's sessions."""

    def __call__(self, work: Callable[[Session], Awaitable[T]], /) -> Awaitable[T]: ...


# --- members -------------------------------------------------------------------------------------


async def join(run: Run, member: Member) -> None:
    """Joining twice is the same as joining once, but a dead member stays dead."""
    new = {
        "address": member.address,
        "counter": member.counter,
        "alive": member.alive,
        "joined_at": DatetimeMS(member.joined_at_ms),
        "secret": member.secret,
    }
    found = await run(
        lambda session: session.members.find_one_and_update(
            {"_id": member.instance_id},
            {"$setOnInsert": new},
            upsert=True,
            return_document=ReturnDocument.AFTER,
            session=session.driver_session,
        )
    )
    if found is None or not found["alive"]:
        raise MemberDead(f"{member.instance_id} was declared dead")


async def heartbeat(run: Run, instance_id: str, counter: int) -> tuple[int, int]:
    """The time of the server, and the counter before this heartbeat."""
    found = await run(
        lambda session: session.members.find_one_and_update(
            {"_id": instance_id, "alive": True},
            [{"$set": {"before": "$counter", "counter": {"$max": ["$counter", counter]}, "beat_at": "$$NOW"}}],
            return_document=ReturnDocument.AFTER,
            projection={"before": 1, "beat_at": 1},
            session=session.driver_session,
        )
    )
    if found is None:
        raise MemberDead(f"{instance_id} was declared dead")
    return int(found["beat_at"]), int(found["before"])


async def members(run: Run) -> list[Member]:
    found = await run(lambda session: session.members.find(session=session.driver_session).sort("_id").to_list())
    return [
        Member(m["_id"], m["address"], int(m["counter"]), m["alive"], int(m["joined_at"]), m["secret"]) for m in found
    ]


async def mark_dead(write: Run, read: Run, instance_id: str, counter: int) -> bool:
    is_that, now_dead = {"_id": instance_id, "counter": counter}, {"$set": {"alive": False}}
    done = await write(lambda session: session.members.update_one(is_that, now_dead, session=session.driver_session))
    if done.matched_count:
        return True
    living = {"_id": instance_id, "alive": True}
    return await read(lambda session: session.members.find_one(living, session=session.driver_session)) is None


async def forget_member(run: Run, instance_id: str) -> None:
    await run(
        lambda session: session.members.delete_one({"_id": instance_id, "alive": False}, session=session.driver_session)
    )


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(run: Run, count: int) -> None:
    async def work(session: Session) -> None:
        existing = {document["shard_id"] for document in await _shard_documents(session, {})}
        missing = [free_shard(shard_id) for shard_id in range(count) if shard_id not in existing]
        if missing:
            try:
                await session.timers.insert_many(missing, ordered=False, session=session.driver_session)
            except errors.BulkWriteError as error:
                codes = {refused["code"] for refused in error.details["writeErrors"]}
                if codes != {11000} or error.details["writeConcernErrors"]:
                    raise  # otherwise another instance has created them at the same time

    await run(work)


async def shards(run: Run) -> list[ShardRow]:
    return [shard_in(document) for document in await run(lambda session: _shard_documents(session, {}))]


async def _shard_documents(session: Session, condition: Document) -> list[Document]:
    """In the order of shard ids."""
    cursor = session.timers.find({"row_type": SHARD, **condition}, session=session.driver_session, hint="in_order")
    return await cursor.sort([("row_type", 1), ("shard_id", 1)]).to_list()


async def claim(write: Run, read: Run, claims: Sequence[Claim], session_ids: Sequence[Any]) -> list[ShardRow]:
    """Each claim changes the document of its shard or not; then the documents of all claims are read."""
    if not claims:
        return []
    wanted = {"_id": {"$in": [shard_key(claim.shard_id) for claim in claims]}}
    before = {
        document["shard_id"]: document for document in await read(lambda session: _shard_documents(session, wanted))
    }
    await write(lambda session: _claim(session, claims, before, session_ids))
    try:
        rows = await read(lambda session: _shard_documents(session, wanted))
    except StoreUnavailable as error:  # some claims may be applied by now
        raise OutcomeUnknown(error.detail) from error
    after = {document["shard_id"]: document for document in rows}
    return [
        shard_in(after[claim.shard_id]) if claim.shard_id in after else ShardRow(claim.shard_id) for claim in claims
    ]


async def _claim(
    session: Session, claims: Sequence[Claim], before: dict[int, Document], session_ids: Sequence[Any]
) -> None:
    to_end = {
        session_id
        for claim in claims
        if (shard := before.get(claim.shard_id)) and shard["shard_version"] == claim.expected_version
        for session_id in shard["shard_sessions"]
    }
    if to_end:
        await end_sessions(session, to_end)
    await session.timers.bulk_write(
        [claim_update(claim, session_ids) for claim in claims], session=session.driver_session
    )


def claim_update(claim: Claim, session_ids: Sequence[Any]) -> UpdateOne:
    owned = {
        "shard_version": claim.expected_version + 1,
        "shard_nonce": claim.nonce,
        "shard_owner_id": claim.owner_id,
        "shard_owner_address": claim.owner_address,
        "shard_claimed_at": DatetimeMS(claim.now_ms),
        "shard_sessions": list(session_ids),
    }
    is_free = {"_id": shard_key(claim.shard_id), "shard_version": claim.expected_version}
    return UpdateOne(is_free, {"$set": owned})


async def end_sessions(session: Session, session_ids: Iterable[Any]) -> None:
    """A user may end its own sessions. If even that is forbidden, a claim may have to wait for up to a minute."""
    try:
        await session.db.client.admin.command("killSessions", [{"id": session_id} for session_id in session_ids])
    except errors.OperationFailure as error:
        log.warning(
            "cannot end transactions of a former shard owner, claims may wait for them for up to a minute: %s",
            error_text(error),
        )


async def release(run: Run, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    run = in_steps(run)
    for group in shard_rounds([fence.shard_id for fence in fences]):
        valid = await run(partial(_release, fences=[fences[index] for index in group]))
        for index in group:
            if fences[index].shard_id not in valid:
                results[index] = lost(fences[index])
    return results


async def _release(session: Session, fences: Sequence[Fence]) -> set[int]:
    valid = await check_fences(session, fences)
    free: Document = {
        "shard_nonce": 0,
        "shard_owner_id": None,
        "shard_owner_address": None,
        "shard_claimed_at": DatetimeMS(0),
        "shard_sessions": [],
    }
    if valid:
        are_those = {"_id": {"$in": [shard_key(shard_id) for shard_id in valid]}}
        await session.command({"update": "timers", "updates": [{"q": are_those, "u": {"$set": free}, "multi": True}]})
    return valid


# --- fences --------------------------------------------------------------------------------------


def fence_update(fence: Fence, low_water: Position | None = None) -> Document:
    condition = {
        "_id": shard_key(fence.shard_id),
        "shard_version": fence.version,
        "shard_nonce": fence.nonce,
        "shard_owner_id": {"$ne": None},
    }
    change: Document = {"$inc": {"shard_commits": 1}}
    if low_water is not None:
        change["$set"] = {"shard_low_water": low_water_document(low_water)}
    return {"q": condition, "u": change}


async def check_fences(
    session: Session, fences: Sequence[Fence], low_waters: Sequence[Position | None] = ()
) -> set[int]:
    """The first step of a transaction: returns the shards whose fences are valid. They are locked until its end."""
    waters = low_waters or [None] * len(fences)
    answer = await session.command({"update": "timers", "updates": list(map(fence_update, fences, waters))})
    if answer["n"] == len(fences):
        return {fence.shard_id for fence in fences}
    # The answer is only a sum. Read in the same snapshot which fences were valid.
    rows = {document["shard_id"]: shard_in(document) for document in await _shards_of(session, fences)}
    return {
        fence.shard_id
        for fence in fences
        if (row := rows.get(fence.shard_id)) and row.owner_id is not None and row.fence == fence
    }


async def _shards_of(session: Session, fences: Sequence[Fence]) -> list[Document]:
    return await _shard_documents(session, {"_id": {"$in": [shard_key(fence.shard_id) for fence in fences]}})


# --- timers --------------------------------------------------------------------------------------


async def commit(run: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    run = in_steps(run)
    for group in shard_rounds([batch.fence.shard_id for batch in batches]):
        some = [batches[index] for index in group]
        for index, result in zip(group, await _commit_group(run, some), strict=True):
            results[index] = result
    return results


class _FenceFailed(Exception):
    """A fence was not valid: abort the transaction, because other writes are already in it."""


async def _commit_group(run: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    if _is_small(batches):
        try:
            return await run(lambda session: commit_small(session, batches))
        except _FenceFailed:
            pass
    return await run(lambda session: commit_large(session, batches))


def _is_small(batches: Sequence[Batch]) -> bool:
    if sum(len(batch.puts) + len(batch.reached) for batch in batches) > SMALL_COMMIT_MAX:
        return False
    timers = [timer for batch in batches for timer in (*batch.puts, *(r.timer for r in batch.reached))]
    return sum(_bytes_of(timer.payload or "") for timer in timers) < COMMAND_BYTES_MAX - SMALL_COMMIT_MAX * 64 * 1024


async def commit_small(session: Session, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    """Fences, puts and reached rows in one command of upserts; the answer says which were inserted."""
    puts, reached = _documents(batches)
    updates = [fence_update(batch.fence, batch.low_water) for batch in batches]
    updates += [{"q": {"_id": put["_id"]}, "u": put, "upsert": True} for put in puts]
    updates += [{"q": {"_id": row["_id"]}, "u": {"$setOnInsert": row}, "upsert": True} for row in reached]
    answer = await session.command({"update": "timers", "updates": updates})
    if answer["n"] < len(updates):
        raise _FenceFailed
    await _delete(session, batches)
    inserted = {entry["index"] - len(batches) for entry in answer.get("upserted", ())}
    return committed(batches, [number for number in range(len(puts)) if number not in inserted])


async def commit_large(session: Session, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    """Read which documents exist, then insert the others: an upsert takes twice as long as an insert."""
    valid = await check_fences(session, [batch.fence for batch in batches], [batch.low_water for batch in batches])
    valid_batches = [batch for batch in batches if batch.fence.shard_id in valid]
    puts, reached = _documents(valid_batches)
    existing = await _stored(session, [document["_id"] for document in (*puts, *reached)])
    new = {document["_id"]: document for document in (*puts, *reached) if document["_id"] not in existing}
    for part in _parts(list(new.values())):  # by id, because the same reached row may be in the batch twice
        await session.command({"insert": "timers", "documents": part})
    for part in _parts([put for put in puts if put["_id"] in existing]):
        await session.command({"update": "timers", "updates": [{"q": {"_id": put["_id"]}, "u": put} for put in part]})
    await _delete(session, valid_batches)
    replaced = [number for number, put in enumerate(puts) if put["_id"] in existing]
    done = dict(zip((batch.fence.shard_id for batch in valid_batches), committed(valid_batches, replaced), strict=True))
    return [done.get(batch.fence.shard_id) or lost(batch.fence) for batch in batches]


def _documents(batches: Sequence[Batch]) -> tuple[list[Document], list[Document]]:
    return (
        [timer_document(batch.fence.shard_id, timer) for batch in batches for timer in batch.puts],
        [reached_document(batch.fence.shard_id, ended) for batch in batches for ended in batch.reached],
    )


async def _stored(session: Session, ids: Sequence[str]) -> set[str]:
    if not ids:
        return set()
    find = {"find": "timers", "filter": {"_id": {"$in": ids}}, "projection": {"_id": 1}}
    answer = await session.command(find | {"batchSize": len(ids) + 1, "singleBatch": True})
    return {document["_id"] for document in answer["cursor"]["firstBatch"]}


async def _delete(session: Session, batches: Sequence[Batch]) -> None:
    keys = [timer_key(batch.fence.shard_id, key) for batch in batches for key in batch.deletes]
    await _delete_ids(session, keys)


async def _delete_ids(session: Session, ids: Sequence[str]) -> None:
    if ids:
        await session.command({"delete": "timers", "deletes": [{"q": {"_id": {"$in": ids}}, "limit": 0}]})


def _parts(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Lists of as many documents as fit into a command."""
    part: list[Document] = []
    size = 0
    for document in documents:
        more = DOCUMENT_BYTES + sum(_bytes_of(value) for value in document.values() if isinstance(value, str))
        if part and size + more > COMMAND_BYTES_MAX:
            yield part
            part, size = [], 0
        part.append(document)
        size += more
    if part:
        yield part


def _bytes_of(text: str) -> int:
    """An upper bound of its size in bytes."""
    return len(text) if text.isascii() else 4 * len(text)


async def load(run: Run, requests: Sequence[PageRequest]) -> list[Page]:
    """One command for each request: one shard and one range, read by the bounds of its index."""
    bytes_max = LOAD_BYTES_MAX // max(1, len(requests))
    return await gather_all([run(partial(_load, request=request, bytes_max=bytes_max)) for request in requests])


async def _load(session: Session, request: PageRequest, bytes_max: int) -> Page:
    found = bounds(IN_ORDER, (TIMER, request.shard_id), request.after, request.until_ms)
    if found is None:
        return Page((), None)
    documents: list[Document] = []
    weight, chars_max = 0, min(request.chars_max, bytes_max)
    async with between(
        session.timers.find(session=session.driver_session), "in_order", found, request.limit + 1
    ) as cursor:
        async for document in cursor:
            if len(documents) == request.limit or weight > chars_max:
                return page_of(documents, ROW_READER.position(documents[-1]), ROW_READER)
            documents.append(document)
            payload = document.get("timer_payload")
            weight += len(payload) if isinstance(payload, str) else 0
    return page_of(documents, None, ROW_READER)


def between(cursor: Cursor, index: str, found: tuple[Document, Document], count: int) -> Cursor:
    """The first `count` documents of an index between two bounds, in its order; in one answer if they fit."""
    cursor = cursor.hint(index).min(list(found[0].items())).max(list(found[1].items()))
    return cursor.limit(count).batch_size(count)


async def gather_all(work: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all of them, also if one fails. The session pool limits how many run at the same time."""
    answers = await asyncio.gather(*work, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers  # type: ignore[return-value]


async def get_many(run: Run, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    """Timers and their newest reached rows in one query of one snapshot: between two queries a timer could be
    reached."""
    if not keys:
        return []
    wanted = [timer_key(shard_id, key) for shard_id, key in keys]
    found = await found_by_key(list(dict.fromkeys(wanted)), partial(_found, run), ROW_READER)
    return [found[key] for key in wanted]


async def _found(run: Run, keys: Sequence[str], ends_max: int) -> StoredRows[str]:
    pipeline: list[Document] = [{"$match": {"_id": {"$in": keys}}}]
    if ends_max == 1:
        newest = [
            {"$match": {"timer_key": {"$in": keys}}},
            {"$sort": NEWEST},
            {"$group": {"_id": "$timer_key", "newest": {"$first": "$$ROOT"}}},
            {"$replaceWith": "$newest"},
        ]
        pipeline.append({"$unionWith": {"coll": "timers", "pipeline": newest}})
    else:
        for key in keys:
            some = [{"$match": {"timer_key": key}}, {"$sort": NEWEST}, {"$limit": ends_max}]
            pipeline.append({"$unionWith": {"coll": "timers", "pipeline": some}})

    async def work(session: Session) -> list[Document]:
        cursor = await session.timers_snapshot.aggregate(pipeline, session=session.driver_session)
        return await cursor.to_list()

    timers: dict[str, Document] = {}
    ends: dict[str, list[Document]] = {}
    for document in await run(work):
        if "timer_key" in document:
            ends.setdefault(document["timer_key"], []).append(document)
        else:
            timers[document["_id"]] = document
    return timers, ends


async def purge_reached(run: Run, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    run = in_steps(run)
    for group in shard_rounds([fence.shard_id for fence in fences]):
        some = [fences[index] for index in group]
        removed = await run(partial(_purge, fences=some, before_ms=before_ms, limit=limit))
        for index in group:
            count = removed.get(fences[index].shard_id)
            results[index] = lost(fences[index]) if count is None else count
    return results


async def _purge(session: Session, fences: Sequence[Fence], before_ms: int, limit: int) -> dict[int, int]:
    valid = await check_fences(session, fences)
    removed: dict[int, int] = {}
    ids: list[str] = []
    for shard_id in sorted(valid):
        expired = await _expired(session, shard_id, before_ms, limit)
        removed[shard_id] = len(expired)
        ids += expired
    await _delete_ids(session, ids)
    return removed


async def _expired(session: Session, shard_id: int, before_ms: int, limit: int) -> list[str]:
    found = bounds(IN_ORDER, (REACHED, shard_id), Position(FIRST_MS, 0, 0), before_ms - 1)
    if found is None:
        return []
    find = {"find": "timers", "projection": {"_id": 1}, "hint": "in_order", "min": found[0], "max": found[1]}
    answer = await session.command(find | {"limit": limit, "batchSize": limit, "singleBatch": True})
    return [document["_id"] for document in answer["cursor"]["firstBatch"]]


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(run: Run) -> list[Namespace]:
    found = await run(lambda session: session.namespaces.find(session=session.driver_session).to_list())
    return namespaces_of((document["_id"], document.get("body")) for document in found)


async def put_namespace(run: Run, namespace: Namespace, expected_revision: int | None) -> bool:
    body = {"num_shards": namespace.num_shards, "revision": namespace.revision, "body": as_json(namespace)}

    async def work(session: Session) -> bool:
        if expected_revision is not None:
            is_that = {"_id": namespace.name, "revision": expected_revision}
            return bool(
                (await session.namespaces.replace_one(is_that, body, session=session.driver_session)).matched_count
            )
        try:
            await session.namespaces.insert_one({"_id": namespace.name, **body}, session=session.driver_session)
        except errors.DuplicateKeyError:
            return False
        return True

    return await run(work)
