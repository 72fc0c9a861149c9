"""What OracleStore says to its database: every statement, and the functions that ask and read the answers.

A fenced write is a transaction of array statements, each one message. The first changes the shard rows that carry the
fences, one after the other in the order of their ids, and counts what it met: like SELECT … FOR UPDATE, which takes no
arrays, it waits for a claim that is under way, and then looks at the row as it has become (Oracle begins the statement
anew). A fence that met nothing undoes all of it; the others are begun again without that one. From there to the commit
nobody else writes to those shards.

Timers that puts replace are deleted by their ids, and then all are inserted: two of a batch may change places, and a
MERGE has one key to go by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any, Final

import oracledb

from duetime.domain.timer import Namespace, Position, TimerKey
from duetime.errors import MemberDead, ShardLost
from duetime.store import Batch, Claim, Committed, Fence, Found, Member, Page, PageRequest, ShardRow
from duetime.stores.fencing import NOTHING_REPLACED, committed, in_steps, lost, shard_rounds
from duetime.stores.oracle.connection import Connection, Run
from duetime.stores.oracle.errors import code_of
from duetime.stores.oracle.rows import (
    INSERT,
    INSERT_TYPES,
    KEY,
    ROW_READER,
    SHARD,
    as_was,
    at,
    kept,
    ms,
    reached_row,
    shard_row,
    timer_row,
)
from duetime.stores.rows import (
    KEY_COLUMNS,
    REACHED_COLUMNS,
    TIMER_COLUMNS,
    Row,
    StoredRows,
    as_json,
    bound_ms,
    found_by_key,
    namespaces_of,
    page_of,
)

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in one answer; pages that would be longer are made shorter
KEYS_AT_ONCE = 50
FETCH_ROWS = 100  # in one message

_PAYLOAD = TIMER_COLUMNS.index("timer_payload")
_DUPLICATE: Final = 1

# --- SQL -----------------------------------------------------------------------------------------

_FENCED = "shard_id = :shard_id AND shard_version = :version AND shard_nonce = :nonce AND shard_owner_id IS NOT NULL"
FENCE = f"UPDATE shards SET shard_low_water = NVL(:low_water, shard_low_water) WHERE {_FENCED}"  # noqa: S608
RELEASE = (
    "UPDATE shards SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL,"  # noqa: S608
    f" shard_claimed_at = TIMESTAMP '1970-01-01 00:00:00' WHERE {_FENCED}"
)
CLAIM = (
    "UPDATE shards SET shard_version = shard_version + 1, shard_nonce = :nonce, shard_owner_id = :owner_id,"
    " shard_owner_address = :owner_address, shard_claimed_at = :claimed_at"
    " WHERE shard_id = :shard_id AND shard_version = :version"
)
SHARDS = f"SELECT {SHARD} FROM shards WHERE shard_id BETWEEN :first AND :last ORDER BY shard_id"  # noqa: S608
NEW_SHARD = (
    "INSERT INTO shards (shard_id, shard_version, shard_nonce, shard_claimed_at)"
    " VALUES (:shard_id, 0, 0, TIMESTAMP '1970-01-01 00:00:00')"
)
DELETE = "DELETE FROM timers WHERE shard_id = :shard_id AND timer_namespace = :timer_namespace AND timer_id = :timer_id"
# The oldest, so that what is left is a range.
PURGE = (
    f"DELETE FROM reached WHERE shard_id = :shard_id AND ({KEY}) IN (SELECT {KEY} FROM (SELECT {KEY} FROM reached"  # noqa: S608
    f" WHERE shard_id = :shard_id AND timer_execute_at < :before ORDER BY {KEY}) WHERE ROWNUM <= :most)"
)


def beyond(number: int = 0) -> str:
    """Rows after a place. Written out, because rows are not compared by size here."""
    return (
        f"timer_execute_at >= :at_{number} AND (timer_execute_at > :at_{number} OR timer_uuid_high > :high_{number}"
        f" OR (timer_uuid_high = :high_{number} AND timer_uuid_low > :low_{number}))"
    )


def scan_values(number: int, shard_id: int, after: Position, until_ms: int, count: int) -> dict[str, Any]:
    return {
        f"shard_{number}": shard_id,
        f"at_{number}": at(bound_ms(after.execute_at_ms)),
        f"high_{number}": after.uuid_high,
        f"low_{number}": after.uuid_low,
        f"until_{number}": at(bound_ms(until_ms)),
        f"count_{number}": count,
    }


LOAD = (
    f"SELECT * FROM (SELECT {', '.join(TIMER_COLUMNS)} FROM timers WHERE shard_id = :shard_0 AND {beyond()}"  # noqa: S608
    f" AND timer_execute_at <= :until_0 ORDER BY {KEY}) WHERE ROWNUM <= :count_0"
)


@cache
def get_sql(count: int, reached_max: int) -> str:
    """Timers and the newest ends in one statement, so that they are of one moment. What a timer has not is NULL."""
    keys = ", ".join(f"(:shard_{n}, :namespace_{n}, :id_{n})" for n in range(count))
    wanted = f"(shard_id, timer_namespace, timer_id) IN ({keys})"
    ended = ", ".join(REACHED_COLUMNS)
    newest_first = ", ".join(f"{name} DESC" for name in ("timer_generation", "timer_reached_at", *KEY_COLUMNS))
    no_end = "CAST(NULL AS TIMESTAMP(3)), CAST(NULL AS NUMBER), CAST(NULL AS NUMBER), CAST(NULL AS VARCHAR2(20))"
    return f"""
SELECT {", ".join(TIMER_COLUMNS)}, {no_end}, CAST(NULL AS TIMESTAMP(3)), shard_id FROM timers WHERE {wanted}
UNION ALL
SELECT {ended}, shard_id FROM (
  SELECT {ended}, shard_id,
    ROW_NUMBER() OVER (PARTITION BY shard_id, timer_namespace, timer_id ORDER BY {newest_first}) AS place
  FROM reached WHERE {wanted})
WHERE place <= {reached_max}
"""  # noqa: S608


_OUTCOME = REACHED_COLUMNS.index("timer_outcome")

# --- asking --------------------------------------------------------------------------------------


async def met(db: Connection, sql: str, rows: Sequence[dict[str, Any]], **types: Any) -> list[int]:
    """Of an array statement: how many rows each of its parts has met."""
    with db.connection.cursor() as cursor:
        if types:
            cursor.setinputsizes(**types)
        await cursor.executemany(sql, list(rows), arraydmlrowcounts=True)
        return list(cursor.getarraydmlrowcounts())


async def add(db: Connection, sql: str, rows: Sequence[Any], types: Sequence[Any], *, unless_there: bool) -> None:
    """Of those that may be there already, those that are stay as they are."""
    if not rows:
        return
    with db.connection.cursor() as cursor:
        cursor.setinputsizes(*types)
        await cursor.executemany(sql, list(rows), batcherrors=unless_there)
        for error in cursor.getbatcherrors() if unless_there else ():
            if error.code != _DUPLICATE:
                raise oracledb.DatabaseError(error)


async def fetched(
    db: Connection, sql: str, values: dict[str, Any], enough: Callable[[Sequence[Row]], bool] | None = None
) -> list[Row]:
    """The rows of a query. `enough` is asked after every portion whether it is."""
    with db.connection.cursor() as cursor:
        cursor.arraysize, cursor.prefetchrows = FETCH_ROWS, FETCH_ROWS
        types = {name: oracledb.DB_TYPE_TIMESTAMP for name, value in values.items() if isinstance(value, datetime)}
        if types:
            cursor.setinputsizes(**types)
        await cursor.execute(sql, values, fetch_lobs=False)
        rows: list[Row] = []
        while portion := await cursor.fetchmany(FETCH_ROWS):
            rows += portion
            if enough is not None and enough(portion):
                break
        return rows


async def _held(db: Connection, fences: Sequence[Fence], waters: Sequence[Position | None]) -> list[bool]:
    """Locks the shard rows, in the order given. `waters`: what their low water becomes, if anything."""
    rows = [
        {"low_water": None if water is None else as_json(water), **_fence(fence)}
        for fence, water in zip(fences, waters, strict=True)
    ]
    return [count == 1 for count in await met(db, FENCE, rows, low_water=oracledb.DB_TYPE_VARCHAR)]


def _fence(fence: Fence) -> dict[str, Any]:
    return {"shard_id": fence.shard_id, "version": fence.version, "nonce": fence.nonce}


# --- members -------------------------------------------------------------------------------------


async def join(write: Run, member: Member, _: str) -> str:
    """Joining twice is joining once; but the dead stay dead. Answers its history, as the connection knows it."""
    values = (
        member.instance_id,
        kept(member.address),
        member.counter,
        int(member.alive),
        at(member.joined_at_ms),
        kept(member.secret),
    )
    sql = (
        "INSERT INTO members (instance_id, address, counter, alive, joined_at, secret) VALUES (:1, :2, :3, :4, :5, :6)"
    )
    types = (None, None, None, None, oracledb.DB_TYPE_TIMESTAMP, None)

    async def work(db: Connection) -> tuple[bool, str]:
        await add(db, sql, [values], types, unless_there=True)
        row = await db.connection.fetchone("SELECT alive FROM members WHERE instance_id = :1", [member.instance_id])
        return row is not None and bool(row[0]), db.history

    alive, history = await write(work)
    if not alive:
        raise MemberDead(f"{member.instance_id} was declared dead")
    return history


async def heartbeat(write: Run, instance_id: str, counter: int, _: str) -> tuple[int, str]:
    sql = (
        "UPDATE members SET counter = GREATEST(counter, :counter) WHERE instance_id = :instance_id AND alive = 1"
        " RETURNING SYS_EXTRACT_UTC(SYSTIMESTAMP) INTO :now"
    )

    async def work(db: Connection) -> tuple[list[datetime], str]:
        with db.connection.cursor() as cursor:
            now = cursor.var(oracledb.DB_TYPE_TIMESTAMP)
            await cursor.execute(sql, {"counter": counter, "instance_id": instance_id, "now": now})
            return list(now.getvalue() or ()), db.history

    now, history = await write(work)
    if not now:
        raise MemberDead(f"{instance_id} was declared dead")
    return ms(now[0]), history


async def members(read: Run) -> list[Member]:
    sql = "SELECT instance_id, address, counter, alive, joined_at, secret FROM members"
    rows = await read(lambda db: fetched(db, sql, {}))
    found = [
        Member(name, as_was(address) or "", counter, bool(alive), ms(joined_at), as_was(secret) or "")
        for name, address, counter, alive, joined_at, secret in rows
    ]
    return sorted(found, key=lambda member: member.instance_id)


async def mark_dead(write: Run, instance_id: str, counter: int) -> bool:
    sql = "UPDATE members SET alive = 0 WHERE instance_id = :instance_id AND counter = :counter"

    async def work(db: Connection) -> bool:
        [died] = await met(db, sql, [{"instance_id": instance_id, "counter": counter}])
        row = await db.connection.fetchone("SELECT alive FROM members WHERE instance_id = :1", [instance_id])
        return bool(died) or row is None or not row[0]

    return await write(work)


async def forget_member(write: Run, instance_id: str) -> None:
    sql = "DELETE FROM members WHERE instance_id = :1 AND alive = 0"
    await write(lambda db: db.connection.execute(sql, [instance_id]))


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(write: Run, count: int) -> None:
    async def work(db: Connection) -> None:
        there = {row[0] for row in await fetched(db, SHARDS, {"first": 0, "last": count})}
        missing = [[shard_id] for shard_id in range(count) if shard_id not in there]
        await add(db, NEW_SHARD, missing, (oracledb.DB_TYPE_NUMBER,), unless_there=True)

    await write(work)


async def shards(read: Run) -> list[ShardRow]:
    rows = await read(lambda db: fetched(db, SHARDS, {"first": 0, "last": 1 << 31}))
    return [shard_row(row) for row in rows]


async def claim(write: Run, claims: Sequence[Claim]) -> list[ShardRow]:
    rows: dict[int, ShardRow] = {}
    step = in_steps(write)
    for turn in shard_rounds([claim.shard_id for claim in claims]):
        found: list[Row] = await step(partial(_claim_turn, [claims[index] for index in turn]))
        rows.update((row[0], shard_row(row)) for row in found)
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def _claim_turn(claims: Sequence[Claim], db: Connection) -> list[Row]:
    """The rows as they are afterwards: all that lie between, because that is one statement."""
    values = [
        {
            "nonce": claim.nonce,
            "owner_id": claim.owner_id,
            "owner_address": kept(claim.owner_address),
            "claimed_at": at(claim.now_ms),
            "shard_id": claim.shard_id,
            "version": claim.expected_version,
        }
        for claim in claims
    ]
    await met(db, CLAIM, values, claimed_at=oracledb.DB_TYPE_TIMESTAMP)
    return await fetched(db, SHARDS, {"first": claims[0].shard_id, "last": claims[-1].shard_id})


async def release(write: Run, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    step = in_steps(write)
    for turn in shard_rounds([fence.shard_id for fence in fences]):
        counts: list[int] = await step(partial(_release_turn, [fences[index] for index in turn]))
        for index, count in zip(turn, counts, strict=True):
            results[index] = None if count else lost(fences[index])
    return results


async def _release_turn(fences: Sequence[Fence], db: Connection) -> list[int]:
    return await met(db, RELEASE, [_fence(fence) for fence in fences])


# --- timers: writing -----------------------------------------------------------------------------


async def commit(write: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    step = in_steps(write)
    for turn in shard_rounds([batch.fence.shard_id for batch in batches]):
        answers: list[Committed | ShardLost] = await step(partial(_commit_turn, [batches[index] for index in turn]))
        for index, answer in zip(turn, answers, strict=True):
            results[index] = answer
    return results


async def _commit_turn(batches: Sequence[Batch], db: Connection) -> list[Committed | ShardLost]:
    """All batches or, if a fence failed, nothing; then the others are written as if that one had not been there."""
    held = await _held(db, [batch.fence for batch in batches], [batch.low_water for batch in batches])
    if not all(held):
        await db.connection.rollback()
        good = [batch for batch, holds in zip(batches, held, strict=True) if holds]
        done = iter(await _commit_turn(good, db) if good else ())
        return [next(done) if holds else lost(batch.fence) for batch, holds in zip(batches, held, strict=True)]
    puts = [(batch.fence.shard_id, timer) for batch in batches for timer in batch.puts]
    reached = [(batch.fence.shard_id, ended) for batch in batches for ended in batch.reached]
    keys = [(shard_id, timer.key) for shard_id, timer in puts]
    keys += [(batch.fence.shard_id, key) for batch in batches for key in batch.deletes]
    gone = await met(db, DELETE, [_key(shard_id, key) for shard_id, key in keys]) if keys else []
    timer_rows = [timer_row(shard_id, timer) for shard_id, timer in puts]
    reached_rows = [reached_row(shard_id, ended) for shard_id, ended in reached]
    await add(db, INSERT["timers"], timer_rows, INSERT_TYPES["timers"], unless_there=False)
    await add(db, INSERT["reached"], reached_rows, INSERT_TYPES["reached"], unless_there=True)
    return committed(batches, (number for number in range(len(puts)) if gone[number]))


def _key(shard_id: int, key: TimerKey) -> dict[str, Any]:
    return {"shard_id": shard_id, "timer_namespace": key.namespace, "timer_id": key.timer_id}


async def purge_reached(write: Run, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    step = in_steps(write)
    values = {"before": at(bound_ms(before_ms)), "most": limit}
    for turn in shard_rounds([fence.shard_id for fence in fences]):
        some = [fences[index] for index in turn]
        answers: list[int | ShardLost] = await step(partial(_purge_turn, some, values))
        for index, answer in zip(turn, answers, strict=True):
            results[index] = answer
    return results


async def _purge_turn(fences: Sequence[Fence], values: dict[str, Any], db: Connection) -> list[int | ShardLost]:
    """A fence that failed has changed nothing, so the others can go on."""
    held = await _held(db, fences, [None] * len(fences))
    good = [{"shard_id": fence.shard_id, **values} for fence, holds in zip(fences, held, strict=True) if holds]
    counts = iter(await met(db, PURGE, good, before=oracledb.DB_TYPE_TIMESTAMP) if good else ())
    return [next(counts) if holds else lost(fence) for fence, holds in zip(fences, held, strict=True)]


# --- timers: reading -----------------------------------------------------------------------------


async def load(read: Run, requests: Sequence[PageRequest]) -> list[Page]:
    async def work(db: Connection) -> list[Page]:
        return [await _load_one(db, request, LOAD_BYTES_MAX // len(requests)) for request in requests]

    return await read(work) if requests else []


async def _load_one(db: Connection, request: PageRequest, bytes_max: int) -> Page:
    """A page ends early after the portion in which its payloads pass its weight."""
    weight = 0

    def enough(portion: Sequence[Row]) -> bool:
        nonlocal weight
        weight += sum(len(row[_PAYLOAD] or b"") for row in portion)
        return weight > bytes_max

    values = scan_values(0, request.shard_id, request.after, request.until_ms, request.limit + 1)
    rows = await fetched(db, LOAD, values, enough)
    if weight <= bytes_max and len(rows) <= request.limit:
        return page_of(rows, None, ROW_READER)
    del rows[request.limit :]
    return page_of(rows, ROW_READER.place(rows[-1]), ROW_READER)


async def get_many(read: Run, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    wanted = list(dict.fromkeys(keys))
    found: dict[tuple[int, TimerKey], Found] = {}
    for first in range(0, len(wanted), KEYS_AT_ONCE):
        some = wanted[first : first + KEYS_AT_ONCE]
        found |= await found_by_key(some, partial(_stored, read), ROW_READER)
    return [found[key] for key in keys]


async def _stored(
    read: Run, keys: Sequence[tuple[int, TimerKey]], reached_max: int
) -> StoredRows[tuple[int, TimerKey]]:
    timers: dict[tuple[int, TimerKey], Row] = {}
    ends: dict[tuple[int, TimerKey], list[Row]] = {}
    sql = get_sql(KEYS_AT_ONCE, reached_max)
    for row in await read(partial(fetched, sql=sql, values=_keys_values(keys))):
        key = row[-1], TimerKey(*ROW_READER.name(row))
        if row[_OUTCOME] is None:
            timers[key] = row
        else:
            ends.setdefault(key, []).append(row)
    return timers, ends


def _keys_values(keys: Sequence[tuple[int, TimerKey]]) -> dict[str, Any]:
    """Always as many, the last one again and again, so that it is always the same statement."""
    values: dict[str, Any] = {}
    for number in range(KEYS_AT_ONCE):
        shard_id, key = keys[min(number, len(keys) - 1)]
        values |= {f"shard_{number}": shard_id, f"namespace_{number}": key.namespace, f"id_{number}": key.timer_id}
    return values


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(read: Run) -> list[Namespace]:
    rows = await read(lambda db: fetched(db, "SELECT name, body FROM namespaces", {}))
    return namespaces_of(rows)


async def put_namespace(write: Run, namespace: Namespace, expected_revision: int | None) -> bool:
    values = {
        "name": namespace.name,
        "num_shards": namespace.num_shards,
        "revision": namespace.revision,
        "body": as_json(namespace).encode(),
    }
    sql = "INSERT INTO namespaces (name, num_shards, revision, body) VALUES (:name, :num_shards, :revision, :body)"
    if expected_revision is not None:
        values["expected"] = expected_revision
        sql = (
            "UPDATE namespaces SET num_shards = :num_shards, revision = :revision, body = :body"
            " WHERE name = :name AND revision = :expected"
        )

    async def work(db: Connection) -> bool:
        try:
            [changed] = await met(db, sql, [values])
        except oracledb.IntegrityError as error:
            if code_of(error) != _DUPLICATE:
                raise
            return False  # there is one
        return bool(changed)

    return await write(work)
