"""The statements of OracleStore, and the functions that run them and decode the results.

A fenced write is a transaction of array statements, each one message. The first one updates the shard rows that have
the fences, one after the other ordered by id, and counts the rows that it matched. Like SELECT … FOR UPDATE, which
takes no arrays, it waits for a claim that is not committed yet and then reads the current row (Oracle restarts the
statement). If a fence matched no row, everything is rolled back, and the other batches are written again without that
one. Until the commit no other transaction writes to these shards.

Timers that puts replace are deleted by id, and then all are inserted: two timers of a batch may exchange their
positions, and a MERGE uses only one key.
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
    at,
    decode_text,
    encode_text,
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
    rows_of_page,
)

LOAD_BYTES_MAX = 64 * 1024 * 1024  # of payloads in the pages of one load
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
# Deletes the oldest rows, so that the remaining rows are one range.
PURGE = (
    f"DELETE FROM reached WHERE shard_id = :shard_id AND ({KEY}) IN (SELECT {KEY} FROM (SELECT {KEY} FROM reached"  # noqa: S608
    f" WHERE shard_id = :shard_id AND timer_execute_at < :before ORDER BY {KEY}) WHERE ROWNUM <= :most)"
)


def after_position(number: int = 0) -> str:
    """A condition for rows after a position. Written out, because Oracle does not order row values."""
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
    f"SELECT * FROM (SELECT {', '.join(TIMER_COLUMNS)} FROM timers WHERE shard_id = :shard_0 AND {after_position()}"  # noqa: S608
    f" AND timer_execute_at <= :until_0 ORDER BY {KEY}) WHERE ROWNUM <= :count_0"
)


@cache
def get_sql(count: int, reached_max: int) -> str:
    """Timers and the newest reached rows in one statement, so that both are of the same snapshot. Columns that a timer
    does not have are NULL."""
    keys = ", ".join(f"(:shard_{n}, :namespace_{n}, :id_{n})" for n in range(count))
    wanted = f"(shard_id, timer_namespace, timer_id) IN ({keys})"
    reached_columns = ", ".join(REACHED_COLUMNS)
    newest_first = ", ".join(f"{name} DESC" for name in ("timer_generation", "timer_reached_at", *KEY_COLUMNS))
    no_reached_columns = (
        "CAST(NULL AS TIMESTAMP(3)), CAST(NULL AS NUMBER), CAST(NULL AS NUMBER), CAST(NULL AS VARCHAR2(20))"
    )
    return f"""
SELECT {", ".join(TIMER_COLUMNS)}, {no_reached_columns}, CAST(NULL AS TIMESTAMP(3)), shard_id FROM timers WHERE {wanted}
UNION ALL
SELECT {reached_columns}, shard_id FROM (
  SELECT {reached_columns}, shard_id,
    ROW_NUMBER() OVER (PARTITION BY shard_id, timer_namespace, timer_id ORDER BY {newest_first}) AS place
  FROM reached WHERE {wanted})
WHERE place <= {reached_max}
"""  # noqa: S608


_OUTCOME = REACHED_COLUMNS.index("timer_outcome")

# --- running statements --------------------------------------------------------------------------


async def execute_many(db: Connection, sql: str, rows: Sequence[dict[str, Any]], **types: Any) -> list[int]:
    """Runs a statement for each row of values, in one message. Returns how many rows each of them matched."""
    with db.connection.cursor() as cursor:
        if types:
            cursor.setinputsizes(**types)
        await cursor.executemany(sql, list(rows), arraydmlrowcounts=True)
        return list(cursor.getarraydmlrowcounts())


async def add(db: Connection, sql: str, rows: Sequence[Any], types: Sequence[Any], *, ignore_existing: bool) -> None:
    """Inserts rows. `ignore_existing`: rows that are stored already do not change."""
    if not rows:
        return
    with db.connection.cursor() as cursor:
        cursor.setinputsizes(*types)
        await cursor.executemany(sql, list(rows), batcherrors=ignore_existing)
        for error in cursor.getbatcherrors() if ignore_existing else ():
            if error.code != _DUPLICATE:
                raise oracledb.DatabaseError(error)


async def fetch(
    db: Connection, sql: str, values: dict[str, Any], is_enough: Callable[[Sequence[Row]], bool] | None = None
) -> list[Row]:
    """Returns the rows of a query. Stops when `is_enough`, called with each group of rows, returns true."""
    with db.connection.cursor() as cursor:
        cursor.arraysize, cursor.prefetchrows = FETCH_ROWS, FETCH_ROWS
        types = {name: oracledb.DB_TYPE_TIMESTAMP for name, value in values.items() if isinstance(value, datetime)}
        if types:
            cursor.setinputsizes(**types)
        await cursor.execute(sql, values, fetch_lobs=False)
        rows: list[Row] = []
        while group := await cursor.fetchmany(FETCH_ROWS):
            rows += group
            if is_enough is not None and is_enough(group):
                break
        return rows


async def _check_fences(db: Connection, fences: Sequence[Fence], low_waters: Sequence[Position | None]) -> list[bool]:
    """Locks the shard rows, in the given order. Returns which fences are valid. `low_waters`: the new low water of each
    shard, or None."""
    rows = [
        {"low_water": None if low_water is None else as_json(low_water), **_fence(fence)}
        for fence, low_water in zip(fences, low_waters, strict=True)
    ]
    return [count == 1 for count in await execute_many(db, FENCE, rows, low_water=oracledb.DB_TYPE_VARCHAR)]


def _fence(fence: Fence) -> dict[str, Any]:
    return {"shard_id": fence.shard_id, "version": fence.version, "nonce": fence.nonce}


# --- members -------------------------------------------------------------------------------------


async def join(write: Run, member: Member, _: str) -> str:
    """A second join changes nothing. A dead member stays dead. Returns the history that the connection has read."""
    values = (
        member.instance_id,
        encode_text(member.address),
        member.counter,
        int(member.alive),
        at(member.joined_at_ms),
        encode_text(member.secret),
    )
    sql = (
        "INSERT INTO members (instance_id, address, counter, alive, joined_at, secret) VALUES (:1, :2, :3, :4, :5, :6)"
    )
    types = (None, None, None, None, oracledb.DB_TYPE_TIMESTAMP, None)

    async def work(db: Connection) -> tuple[bool, str]:
        await add(db, sql, [values], types, ignore_existing=True)
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
    rows = await read(lambda db: fetch(db, sql, {}))
    found = [
        Member(name, decode_text(address) or "", counter, bool(alive), ms(joined_at), decode_text(secret) or "")
        for name, address, counter, alive, joined_at, secret in rows
    ]
    return sorted(found, key=lambda member: member.instance_id)


async def mark_dead(write: Run, instance_id: str, counter: int) -> bool:
    sql = "UPDATE members SET alive = 0 WHERE instance_id = :instance_id AND counter = :counter"

    async def work(db: Connection) -> bool:
        [was_marked] = await execute_many(db, sql, [{"instance_id": instance_id, "counter": counter}])
        row = await db.connection.fetchone("SELECT alive FROM members WHERE instance_id = :1", [instance_id])
        return bool(was_marked) or row is None or not row[0]

    return await write(work)


async def forget_member(write: Run, instance_id: str) -> None:
    sql = "DELETE FROM members WHERE instance_id = :1 AND alive = 0"
    await write(lambda db: db.connection.execute(sql, [instance_id]))


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(write: Run, count: int) -> None:
    async def work(db: Connection) -> None:
        stored = {row[0] for row in await fetch(db, SHARDS, {"first": 0, "last": count})}
        missing = [[shard_id] for shard_id in range(count) if shard_id not in stored]
        await add(db, NEW_SHARD, missing, (oracledb.DB_TYPE_NUMBER,), ignore_existing=True)

    await write(work)


async def shards(read: Run) -> list[ShardRow]:
    rows = await read(lambda db: fetch(db, SHARDS, {"first": 0, "last": 1 << 31}))
    return [shard_row(row) for row in rows]


async def claim(write: Run, claims: Sequence[Claim]) -> list[ShardRow]:
    rows: dict[int, ShardRow] = {}
    step = in_steps(write)
    for indexes in shard_rounds([claim.shard_id for claim in claims]):
        found: list[Row] = await step(partial(_claim_round, [claims[index] for index in indexes]))
        rows.update((row[0], shard_row(row)) for row in found)
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def _claim_round(claims: Sequence[Claim], db: Connection) -> list[Row]:
    """Returns the rows after the claims: all from the first to the last shard, because that is one statement."""
    values = [
        {
            "nonce": claim.nonce,
            "owner_id": claim.owner_id,
            "owner_address": encode_text(claim.owner_address),
            "claimed_at": at(claim.now_ms),
            "shard_id": claim.shard_id,
            "version": claim.expected_version,
        }
        for claim in claims
    ]
    await execute_many(db, CLAIM, values, claimed_at=oracledb.DB_TYPE_TIMESTAMP)
    return await fetch(db, SHARDS, {"first": claims[0].shard_id, "last": claims[-1].shard_id})


async def release(write: Run, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    step = in_steps(write)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        counts: list[int] = await step(partial(_release_round, [fences[index] for index in indexes]))
        for index, count in zip(indexes, counts, strict=True):
            results[index] = None if count else lost(fences[index])
    return results


async def _release_round(fences: Sequence[Fence], db: Connection) -> list[int]:
    return await execute_many(db, RELEASE, [_fence(fence) for fence in fences])


# --- timers: writing -----------------------------------------------------------------------------


async def commit(write: Run, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    step = in_steps(write)
    for indexes in shard_rounds([batch.fence.shard_id for batch in batches]):
        results_of_round: list[Committed | ShardLost] = await step(
            partial(_commit_round, [batches[index] for index in indexes])
        )
        for index, result in zip(indexes, results_of_round, strict=True):
            results[index] = result
    return results


async def _commit_round(batches: Sequence[Batch], db: Connection) -> list[Committed | ShardLost]:
    """Writes all batches or, if a fence failed, nothing. Then the batches whose fence is valid are written."""
    valid = await _check_fences(db, [batch.fence for batch in batches], [batch.low_water for batch in batches])
    if not all(valid):
        await db.connection.rollback()
        good = [batch for batch, holds in zip(batches, valid, strict=True) if holds]
        done = iter(await _commit_round(good, db) if good else ())
        return [next(done) if holds else lost(batch.fence) for batch, holds in zip(batches, valid, strict=True)]
    puts = [(batch.fence.shard_id, timer) for batch in batches for timer in batch.puts]
    reached = [(batch.fence.shard_id, reached_columns) for batch in batches for reached_columns in batch.reached]
    keys = [(shard_id, timer.key) for shard_id, timer in puts]
    keys += [(batch.fence.shard_id, key) for batch in batches for key in batch.deletes]
    deleted = await execute_many(db, DELETE, [_key(shard_id, key) for shard_id, key in keys]) if keys else []
    timer_rows = [timer_row(shard_id, timer) for shard_id, timer in puts]
    reached_rows = [reached_row(shard_id, reached_columns) for shard_id, reached_columns in reached]
    await add(db, INSERT["timers"], timer_rows, INSERT_TYPES["timers"], ignore_existing=False)
    await add(db, INSERT["reached"], reached_rows, INSERT_TYPES["reached"], ignore_existing=True)
    return committed(batches, (number for number in range(len(puts)) if deleted[number]))


def _key(shard_id: int, key: TimerKey) -> dict[str, Any]:
    return {"shard_id": shard_id, "timer_namespace": key.namespace, "timer_id": key.timer_id}


async def purge_reached(write: Run, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    step = in_steps(write)
    values = {"before": at(bound_ms(before_ms)), "most": limit}
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        some = [fences[index] for index in indexes]
        results_of_round: list[int | ShardLost] = await step(partial(_purge_round, some, values))
        for index, result in zip(indexes, results_of_round, strict=True):
            results[index] = result
    return results


async def _purge_round(fences: Sequence[Fence], values: dict[str, Any], db: Connection) -> list[int | ShardLost]:
    """A fence that failed has changed nothing, so the others continue."""
    valid = await _check_fences(db, fences, [None] * len(fences))
    good = [{"shard_id": fence.shard_id, **values} for fence, holds in zip(fences, valid, strict=True) if holds]
    counts = iter(await execute_many(db, PURGE, good, before=oracledb.DB_TYPE_TIMESTAMP) if good else ())
    return [next(counts) if holds else lost(fence) for fence, holds in zip(fences, valid, strict=True)]


# --- timers: reading -----------------------------------------------------------------------------


async def load(read: Run, requests: Sequence[PageRequest]) -> list[Page]:
    async def work(db: Connection) -> list[Page]:
        return [await _load_one(db, request, LOAD_BYTES_MAX // len(requests)) for request in requests]

    return await read(work) if requests else []


async def _load_one(db: Connection, request: PageRequest, bytes_max: int) -> Page:
    """Rows that are not on the page may be read: the rest of the group with which it exceeds the limit."""
    bytes_max = min(request.chars_max, bytes_max)
    payload_bytes = 0

    def is_enough(group: Sequence[Row]) -> bool:
        nonlocal payload_bytes
        payload_bytes += sum(map(_payload_bytes, group))
        return payload_bytes > bytes_max

    values = scan_values(0, request.shard_id, request.after, request.until_ms, request.limit + 1)
    rows = await fetch(db, LOAD, values, is_enough)
    count = rows_of_page(map(_payload_bytes, rows[: request.limit]), bytes_max)
    if payload_bytes <= bytes_max and len(rows) == count:
        return page_of(rows, None, ROW_READER)
    del rows[count:]
    return page_of(rows, ROW_READER.position(rows[-1]), ROW_READER)


def _payload_bytes(row: Row) -> int:
    return len(row[_PAYLOAD] or b"")


async def get_many(read: Run, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
    wanted = list(dict.fromkeys(keys))
    found: dict[tuple[int, TimerKey], Found] = {}
    for first in range(0, len(wanted), KEYS_AT_ONCE):
        some = wanted[first : first + KEYS_AT_ONCE]
        found |= await found_by_key(some, partial(_stored_rows, read), ROW_READER)
    return [found[key] for key in keys]


async def _stored_rows(
    read: Run, keys: Sequence[tuple[int, TimerKey]], reached_max: int
) -> StoredRows[tuple[int, TimerKey]]:
    timers: dict[tuple[int, TimerKey], Row] = {}
    reached_rows: dict[tuple[int, TimerKey], list[Row]] = {}
    sql = get_sql(KEYS_AT_ONCE, reached_max)
    for row in await read(partial(fetch, sql=sql, values=_keys_values(keys))):
        key = row[-1], TimerKey(*ROW_READER.key(row))
        if row[_OUTCOME] is None:
            timers[key] = row
        else:
            reached_rows.setdefault(key, []).append(row)
    return timers, reached_rows


def _keys_values(keys: Sequence[tuple[int, TimerKey]]) -> dict[str, Any]:
    """Values for KEYS_AT_ONCE keys, so that the statement is always the same. The last key is repeated."""
    values: dict[str, Any] = {}
    for number in range(KEYS_AT_ONCE):
        shard_id, key = keys[min(number, len(keys) - 1)]
        values |= {f"shard_{number}": shard_id, f"namespace_{number}": key.namespace, f"id_{number}": key.timer_id}
    return values


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(read: Run) -> list[Namespace]:
    rows = await read(lambda db: fetch(db, "SELECT name, body FROM namespaces", {}))
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
            [changed] = await execute_many(db, sql, [values])
        except oracledb.IntegrityError as error:
            if code_of(error) != _DUPLICATE:
                raise
            return False  # the namespace exists
        return bool(changed)

    return await write(work)
