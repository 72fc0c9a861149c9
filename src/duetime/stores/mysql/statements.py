"""The writes of MySqlStore, and its other statements except for reads.py.

A fenced write is a transaction of two messages. The first locks the shard rows, ordered by id, and finds the timers
that will be replaced. The second writes for the shards whose fence is valid, and commits. The lock makes the fence
safe: it waits for a claim that is not committed yet, and then reads the current row.

Every access names its index (FORCE INDEX): no plan depends on statistics, and no statement reads or locks other rows
than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import asyncmy

from duetime.domain.timer import Namespace
from duetime.errors import MemberDead, ShardLost
from duetime.store import Batch, Claim, Committed, Fence, Member, ShardRow
from duetime.stores.fencing import NOTHING_REPLACED, in_steps, lost, shard_rounds
from duetime.stores.mysql.connection import BEGIN, Read, Write, execute, execute_and_commit
from duetime.stores.mysql.rows import (
    INSERT,
    INSERT_END,
    KEY,
    SHARD,
    at,
    literal,
    ms,
    reached_row,
    shard_row,
    timer_row,
    with_keys,
)
from duetime.stores.rows import Row, as_json, bound_ms, namespaces_of

# Of one message, which may have four times as many bytes. A single longer row is sent alone.
MESSAGE_CHARS_MAX = 1024 * 1024


# --- transactions --------------------------------------------------------------------------------


async def _transaction(
    write: Write, opening: Sequence[str], decide: Callable[[list[Any]], Sequence[str]]
) -> Sequence[Any]:
    """Runs `opening`, whose locks are kept until the end, then the statements that `decide` makes of its results, and
    commits. Returns how many rows each of these statements matched."""
    results: list[Any] = []
    last: Sequence[str] = ()

    async def work(db: Any) -> None:
        nonlocal last
        results.clear()
        found = await execute(db, (*BEGIN, *opening))
        *first, last = _messages(decide(found[len(BEGIN) :]))
        for statements in first:
            results.extend(await execute(db, statements))

    async def commit(db: Any) -> None:
        results.extend(await execute_and_commit(db, last))

    await write(work, commit)
    return results


def _messages(statements: Sequence[str]) -> list[list[str]]:
    """Divides statements into as few messages as possible. Returns at least one message, which may be empty."""
    messages: list[list[str]] = [[]]
    chars_left = MESSAGE_CHARS_MAX
    for statement in statements:
        if len(statement) > chars_left and messages[-1]:
            messages.append([])
            chars_left = MESSAGE_CHARS_MAX
        messages[-1].append(statement)
        chars_left -= len(statement)
    return messages


def _lock_sql(shard_ids: Iterable[int]) -> str:
    """Locks one shard row after the other, ordered by id. All writers lock in that order: this prevents deadlocks."""
    ids = ",".join(map(str, shard_ids))
    return (
        f"SELECT {SHARD} FROM shards FORCE INDEX (PRIMARY) WHERE shard_id IN ({ids})"  # noqa: S608
        " ORDER BY shard_id FOR UPDATE"
    )


def _owned_shards(rows: Iterable[Row], fences: Iterable[Fence]) -> set[int]:
    """The shards whose fence is valid, according to their locked rows."""
    owned = {row[0]: (row[1], row[2]) for row in rows if row[3] is not None}
    return {fence.shard_id for fence in fences if owned.get(fence.shard_id) == (fence.version, fence.nonce)}


def _inserts(table: str, rows: Sequence[str]) -> list[str]:
    """Divides rows into INSERT statements that are not too long."""
    statements: list[str] = []
    first = chars_left = 0
    for index, row in enumerate(rows):
        if len(row) > chars_left:
            if index:
                statements.append(_insert(table, rows[first:index]))
            first, chars_left = index, MESSAGE_CHARS_MAX
        chars_left -= len(row)
    statements.append(_insert(table, rows[first:]))
    return statements


def _insert(table: str, rows: Sequence[str]) -> str:
    return f"{INSERT[table]}{','.join(rows)}{INSERT_END[table]}"


# --- members -------------------------------------------------------------------------------------


async def join(write: Write, member: Member, identity: str) -> str:
    """A second join changes nothing. A dead member stays dead. Returns the identity of the server."""
    name = literal(member.instance_id)
    values = ", ".join(
        (
            name,
            literal(member.address),
            literal(member.counter),
            literal(int(member.alive)),
            at(member.joined_at_ms),
            literal(member.secret),
        )
    )
    statements = (
        "INSERT INTO members (instance_id, address, counter, alive, joined_at, secret)"  # noqa: S608
        f" VALUES ({values}) ON DUPLICATE KEY UPDATE alive = members.alive",
        f"SELECT alive, {identity} FROM members WHERE instance_id = {name}",  # noqa: S608
    )
    _, rows = await write(lambda db: execute(db, statements))
    if not rows or not rows[0][0]:
        raise MemberDead(f"{member.instance_id} was declared dead")
    return str(rows[0][1])


async def heartbeat(write: Write, instance_id: str, counter: int, identity: str) -> tuple[int, str]:
    statements = (
        f"UPDATE members SET counter = GREATEST(counter, {counter})"  # noqa: S608
        f" WHERE instance_id = {literal(instance_id)} AND alive = 1",
        f"SELECT {ms('UTC_TIMESTAMP(3)')}, {identity}",
    )
    matched, [[now_ms, server]] = await write(lambda db: execute(db, statements))
    if not matched:
        raise MemberDead(f"{instance_id} was declared dead")
    return int(now_ms), str(server)


async def members(read: Read) -> list[Member]:
    sql = (
        "SELECT CONVERT(instance_id USING utf8mb4), address, counter, alive,"  # noqa: S608
        f" {ms('joined_at')}, secret FROM members ORDER BY instance_id"
    )
    [rows] = await read((sql,))
    return [Member(name, address, counter, bool(alive), *rest) for name, address, counter, alive, *rest in rows]


async def mark_dead(write: Write, instance_id: str, counter: int) -> bool:
    name = literal(instance_id)
    statements = (
        f"UPDATE members SET alive = 0 WHERE instance_id = {name} AND counter = {counter}",  # noqa: S608
        f"SELECT 1 FROM members WHERE instance_id = {name} AND alive = 1",  # noqa: S608
    )
    _, alive = await write(lambda db: execute(db, statements))
    return not alive


async def forget_member(write: Write, instance_id: str) -> None:
    sql = f"DELETE FROM members WHERE instance_id = {literal(instance_id)} AND alive = 0"  # noqa: S608
    await write(lambda db: execute(db, (sql,)))


# --- shards --------------------------------------------------------------------------------------


async def ensure_shards(write: Write, count: int) -> None:
    rows = ",".join(f"({shard_id},0,0,{at(0)})" for shard_id in range(count))
    sql = (
        f"INSERT INTO shards (shard_id, shard_version, shard_nonce, shard_claimed_at) VALUES {rows}"  # noqa: S608
        " ON DUPLICATE KEY UPDATE shard_version = shards.shard_version"
    )
    await write(lambda db: execute(db, (sql,)))


async def shards(read: Read) -> list[ShardRow]:
    [rows] = await read((f"SELECT {SHARD} FROM shards ORDER BY shard_id",))  # noqa: S608
    return [shard_row(row) for row in rows]


async def claim(write: Write, claims: Sequence[Claim]) -> list[ShardRow]:
    rows: dict[int, ShardRow] = {}
    write = in_steps(write)
    for indexes in shard_rounds([claim.shard_id for claim in claims]):
        rows |= await _claim_round(write, [claims[index] for index in indexes])
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def _claim_round(write: Write, claims: Sequence[Claim]) -> dict[int, ShardRow]:
    rows: dict[int, ShardRow] = {}

    def decide(found: list[Any]) -> list[str]:
        rows.update((row[0], shard_row(row)) for row in found[0])
        taken: list[str] = []
        for claim in claims:
            row = rows.get(claim.shard_id)
            if row is not None and row.version == claim.expected_version:
                rows[claim.shard_id] = new = _claimed(row, claim)
                taken.append(
                    f"UPDATE shards SET shard_version = {new.version}, shard_nonce = {new.nonce},"  # noqa: S608
                    f" shard_owner_id = {literal(new.owner_id)}, shard_owner_address = {literal(new.owner_address)},"
                    f" shard_claimed_at = {at(new.claimed_at_ms)} WHERE shard_id = {new.shard_id}"
                )
        return taken

    await _transaction(write, (_lock_sql(claim.shard_id for claim in claims),), decide)
    return rows


def _claimed(row: ShardRow, claim: Claim) -> ShardRow:
    return ShardRow(
        row.shard_id,
        row.version + 1,
        claim.nonce,
        claim.owner_id,
        claim.owner_address,
        claim.now_ms,
        row.low_water,
    )


async def release(write: Write, fences: Sequence[Fence]) -> list[ShardLost | None]:
    results: list[ShardLost | None] = [None] * len(fences)
    write = in_steps(write)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        owned = await _release_round(write, [fences[index] for index in indexes])
        for index in indexes:
            if fences[index].shard_id not in owned:
                results[index] = lost(fences[index])
    return results


async def _release_round(write: Write, fences: Sequence[Fence]) -> set[int]:
    owned: set[int] = set()

    def decide(found: list[Any]) -> list[str]:
        owned.clear()
        owned.update(_owned_shards(found[0], fences))
        if not owned:
            return []
        return [
            "UPDATE shards SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL,"  # noqa: S608
            f" shard_claimed_at = {at(0)} WHERE shard_id IN ({','.join(map(str, owned))})"
        ]

    await _transaction(write, (_lock_sql(fence.shard_id for fence in fences),), decide)
    return owned


# --- timers --------------------------------------------------------------------------------------


async def commit(write: Write, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    write = in_steps(write)
    for indexes in shard_rounds([batch.fence.shard_id for batch in batches]):
        some = [batches[index] for index in indexes]
        for index, result in zip(indexes, await _commit_round(write, some), strict=True):
            results[index] = result
    return results


async def _commit_round(write: Write, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    # As much as possible is done before the locks are taken.
    prepared = [_Prepared(batch) for batch in batches]
    results: list[Committed | ShardLost] = []

    def decide(found: list[Any]) -> list[str]:
        owned = _owned_shards(found[0], (batch.fence for batch in batches))
        stored = {(row[0], row[1], row[2]) for row in found[1]} if len(found) > 1 else set()
        results[:] = [p.result(stored) if p.shard_id in owned else lost(p.batch.fence) for p in prepared]
        return _write_statements([p for p in prepared if p.shard_id in owned], stored)

    opening = [_lock_sql(p.shard_id for p in prepared)]
    keys = [key for p in prepared for key in p.keys]
    if keys:
        opening.append(
            "SELECT shard_id, CONVERT(timer_namespace USING utf8mb4), CONVERT(timer_id USING utf8mb4)"  # noqa: S608
            f" FROM timers FORCE INDEX (timers_by_id) WHERE {with_keys(keys)}"
        )
    await _transaction(write, opening, decide)
    return results


class _Prepared:
    """A batch as SQL text: the rows that it adds, and the keys that it replaces or deletes."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shard_id = shard_id = batch.fence.shard_id
        self.put_keys = [(shard_id, timer.namespace, timer.timer_id) for timer in batch.puts]
        self.keys = self.put_keys + [(shard_id, key.namespace, key.timer_id) for key in batch.deletes]
        self.puts = [timer_row(shard_id, timer) for timer in batch.puts]
        self.reached = [reached_row(shard_id, reached) for reached in batch.reached]

    def result(self, stored: set[tuple[int, str, str]]) -> Committed:
        replaced = frozenset(index for index, key in enumerate(self.put_keys) if key in stored)
        return Committed(replaced) if replaced else NOTHING_REPLACED


def _write_statements(owned: Sequence[_Prepared], stored: set[tuple[int, str, str]]) -> list[str]:
    """Deletes come first, because two timers of one batch may exchange their positions."""
    statements: list[str] = []
    replaced_or_deleted = [key for p in owned for key in p.keys if key in stored] if stored else []
    if replaced_or_deleted:
        statements.append(
            f"DELETE t FROM timers AS t FORCE INDEX (timers_by_id) WHERE {with_keys(replaced_or_deleted)}"
        )
    for table, rows in (("timers", [p.puts for p in owned]), ("reached", [p.reached for p in owned])):
        if any(rows):
            statements += _inserts(table, list(chain.from_iterable(rows)))
    for p in owned:
        if p.batch.low_water is not None:
            time, high, low = p.batch.low_water
            statements.append(
                f"UPDATE shards SET shard_low_water_ms = {time}, shard_low_water_high = {high},"  # noqa: S608
                f" shard_low_water_low = {low} WHERE shard_id = {p.shard_id}"
            )
    return statements


async def purge_reached(write: Write, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    write = in_steps(write)
    for indexes in shard_rounds([fence.shard_id for fence in fences]):
        removed = await _purge_round(write, [fences[index] for index in indexes], before_ms, limit)
        for index in indexes:
            count = removed.get(fences[index].shard_id)
            results[index] = lost(fences[index]) if count is None else count
    return results


async def _purge_round(write: Write, fences: Sequence[Fence], before_ms: int, limit: int) -> dict[int, int]:
    owned: list[int] = []

    def decide(found: list[Any]) -> list[str]:
        owned[:] = sorted(_owned_shards(found[0], fences))
        return [
            f"DELETE FROM reached WHERE shard_id = {shard_id} AND timer_execute_at < {at(bound_ms(before_ms))}"  # noqa: S608
            f" ORDER BY {KEY} LIMIT {limit}"
            for shard_id in owned
        ]

    counts = await _transaction(write, (_lock_sql(fence.shard_id for fence in fences),), decide)
    return dict(zip(owned, counts, strict=True))


# --- namespaces ----------------------------------------------------------------------------------


async def namespaces(read: Read) -> list[Namespace]:
    [rows] = await read(("SELECT CONVERT(name USING utf8mb4), body FROM namespaces",))
    return namespaces_of(rows)


async def put_namespace(write: Write, namespace: Namespace, expected_revision: int | None) -> bool:
    name, body = literal(namespace.name), literal(as_json(namespace))
    if expected_revision is None:
        sql = (
            "INSERT INTO namespaces (name, num_shards, revision, body)"  # noqa: S608
            f" VALUES ({name}, {namespace.num_shards}, {namespace.revision}, {body})"
        )
    else:
        sql = (
            f"UPDATE namespaces SET num_shards = {namespace.num_shards}, revision = {namespace.revision},"  # noqa: S608
            f" body = {body} WHERE name = {name} AND revision = {expected_revision}"
        )

    async def work(db: Any) -> bool:
        try:
            [matched] = await execute(db, (sql,))
        except asyncmy.IntegrityError:  # the namespace exists
            return False
        return bool(matched)

    return await write(work)
