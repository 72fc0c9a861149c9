"""What MySqlStore says to its database: every statement, and the functions that ask and read the answers.

A fenced write is a transaction in two messages. The first locks the shard rows, in the order of their ids, and looks
for the timers that are going to be replaced; the second writes, for the shards whose fence holds, and commits. Locking
is what makes a fence: a claim that is under way is waited for, and what the lock then shows is the row as it is now.

Every access is by an index that is named (FORCE INDEX): no plan depends on statistics, and no statement reads, or
locks, rows that it has nothing to do with.
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
    keyed,
    literal,
    ms,
    reached_row,
    shard_row,
    timer_row,
)
from duetime.stores.rows import Row, as_json, bound_ms, namespaces_of

MESSAGE_CHARS_MAX = 1024 * 1024  # of one message, which may be four times as many bytes; a single longer row goes alone


# --- transactions --------------------------------------------------------------------------------


async def _transaction(
    write: Write, opening: Sequence[str], decide: Callable[[list[Any]], Sequence[str]]
) -> Sequence[Any]:
    """What `opening` locks stays locked until the end; of what it finds, `decide` makes what is to be done.
    Answers how many rows each of that has met."""
    answers: list[Any] = []
    last: Sequence[str] = ()

    async def work(db: Any) -> None:
        nonlocal last
        answers.clear()
        found = await execute(db, (*BEGIN, *opening))
        *first, last = _messages(decide(found[len(BEGIN) :]))
        for statements in first:
            answers.extend(await execute(db, statements))

    async def commit(db: Any) -> None:
        answers.extend(await execute_and_commit(db, last))

    await write(work, commit)
    return answers


def _messages(statements: Sequence[str]) -> list[list[str]]:
    """As few as fit. At least one, if an empty one."""
    messages: list[list[str]] = [[]]
    room = MESSAGE_CHARS_MAX
    for statement in statements:
        if len(statement) > room and messages[-1]:
            messages.append([])
            room = MESSAGE_CHARS_MAX
        messages[-1].append(statement)
        room -= len(statement)
    return messages


def _locking(shard_ids: Iterable[int]) -> str:
    """One row after the other, in the order of ids, which is the order in which everybody locks."""
    ids = ",".join(map(str, shard_ids))
    return (
        f"SELECT {SHARD} FROM shards FORCE INDEX (PRIMARY) WHERE shard_id IN ({ids})"  # noqa: S608
        " ORDER BY shard_id FOR UPDATE"
    )


def _held(rows: Iterable[Row], fences: Iterable[Fence]) -> set[int]:
    """The shards whose fence holds, by rows of SHARD that are locked."""
    owned = {row[0]: (row[1], row[2]) for row in rows if row[3] is not None}
    return {fence.shard_id for fence in fences if owned.get(fence.shard_id) == (fence.version, fence.nonce)}


def _inserts(table: str, rows: Sequence[str]) -> list[str]:
    """Rows in statements that are not too long."""
    statements: list[str] = []
    first = room = 0
    for index, row in enumerate(rows):
        if len(row) > room:
            if index:
                statements.append(_insert(table, rows[first:index]))
            first, room = index, MESSAGE_CHARS_MAX
        room -= len(row)
    statements.append(_insert(table, rows[first:]))
    return statements


def _insert(table: str, rows: Sequence[str]) -> str:
    return f"{INSERT[table]}{','.join(rows)}{INSERT_END[table]}"


# --- members -------------------------------------------------------------------------------------


async def join(write: Write, member: Member, identity: str) -> str:
    """Joining twice is joining once; but the dead stay dead. Answers the identity of the server."""
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
    said = (
        "INSERT INTO members (instance_id, address, counter, alive, joined_at, secret)"  # noqa: S608
        f" VALUES ({values}) ON DUPLICATE KEY UPDATE alive = members.alive",
        f"SELECT alive, {identity} FROM members WHERE instance_id = {name}",  # noqa: S608
    )
    _, rows = await write(lambda db: execute(db, said))
    if not rows or not rows[0][0]:
        raise MemberDead(f"{member.instance_id} was declared dead")
    return str(rows[0][1])


async def heartbeat(write: Write, instance_id: str, counter: int, identity: str) -> tuple[int, str]:
    said = (
        f"UPDATE members SET counter = GREATEST(counter, {counter})"  # noqa: S608
        f" WHERE instance_id = {literal(instance_id)} AND alive = 1",
        f"SELECT {ms('UTC_TIMESTAMP(3)')}, {identity}",
    )
    met, [[now_ms, server]] = await write(lambda db: execute(db, said))
    if not met:
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
    said = (
        f"UPDATE members SET alive = 0 WHERE instance_id = {name} AND counter = {counter}",  # noqa: S608
        f"SELECT 1 FROM members WHERE instance_id = {name} AND alive = 1",  # noqa: S608
    )
    _, living = await write(lambda db: execute(db, said))
    return not living


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
    for turn in shard_rounds([claim.shard_id for claim in claims]):
        rows |= await _claim_turn(write, [claims[index] for index in turn])
    return [rows.get(claim.shard_id) or ShardRow(claim.shard_id) for claim in claims]


async def _claim_turn(write: Write, claims: Sequence[Claim]) -> dict[int, ShardRow]:
    rows: dict[int, ShardRow] = {}

    def decide(found: list[Any]) -> list[str]:
        rows.update((row[0], shard_row(row)) for row in found[0])
        taken: list[str] = []
        for wish in claims:
            row = rows.get(wish.shard_id)
            if row is not None and row.version == wish.expected_version:
                rows[wish.shard_id] = new = _claimed(row, wish)
                taken.append(
                    f"UPDATE shards SET shard_version = {new.version}, shard_nonce = {new.nonce},"  # noqa: S608
                    f" shard_owner_id = {literal(new.owner_id)}, shard_owner_address = {literal(new.owner_address)},"
                    f" shard_claimed_at = {at(new.claimed_at_ms)} WHERE shard_id = {new.shard_id}"
                )
        return taken

    await _transaction(write, (_locking(claim.shard_id for claim in claims),), decide)
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
    for turn in shard_rounds([fence.shard_id for fence in fences]):
        held = await _release_turn(write, [fences[index] for index in turn])
        for index in turn:
            if fences[index].shard_id not in held:
                results[index] = lost(fences[index])
    return results


async def _release_turn(write: Write, fences: Sequence[Fence]) -> set[int]:
    held: set[int] = set()

    def decide(found: list[Any]) -> list[str]:
        held.clear()
        held.update(_held(found[0], fences))
        if not held:
            return []
        return [
            "UPDATE shards SET shard_nonce = 0, shard_owner_id = NULL, shard_owner_address = NULL,"  # noqa: S608
            f" shard_claimed_at = {at(0)} WHERE shard_id IN ({','.join(map(str, held))})"
        ]

    await _transaction(write, (_locking(fence.shard_id for fence in fences),), decide)
    return held


# --- timers --------------------------------------------------------------------------------------


async def commit(write: Write, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    results: list[Committed | ShardLost] = [NOTHING_REPLACED] * len(batches)
    write = in_steps(write)
    for turn in shard_rounds([batch.fence.shard_id for batch in batches]):
        some = [batches[index] for index in turn]
        for index, result in zip(turn, await _commit_turn(write, some), strict=True):
            results[index] = result
    return results


async def _commit_turn(write: Write, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
    # All that can be done before the locks are taken is done before.
    prepared = [_Prepared(batch) for batch in batches]
    results: list[Committed | ShardLost] = []

    def decide(found: list[Any]) -> list[str]:
        held = _held(found[0], (batch.fence for batch in batches))
        there = {(row[0], row[1], row[2]) for row in found[1]} if len(found) > 1 else set()
        results[:] = [p.result(there) if p.shard_id in held else lost(p.batch.fence) for p in prepared]
        return _writing([p for p in prepared if p.shard_id in held], there)

    opening = [_locking(p.shard_id for p in prepared)]
    keys = [key for p in prepared for key in p.keys]
    if keys:
        opening.append(
            "SELECT shard_id, CONVERT(timer_namespace USING utf8mb4), CONVERT(timer_id USING utf8mb4)"  # noqa: S608
            f" FROM timers FORCE INDEX (timers_by_id) WHERE {keyed(keys)}"
        )
    await _transaction(write, opening, decide)
    return results


class _Prepared:
    """A batch as text: the rows it adds, the keys it looks for."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.shard_id = shard_id = batch.fence.shard_id
        self.put_keys = [(shard_id, timer.namespace, timer.timer_id) for timer in batch.puts]
        self.keys = self.put_keys + [(shard_id, key.namespace, key.timer_id) for key in batch.deletes]
        self.puts = [timer_row(shard_id, timer) for timer in batch.puts]
        self.reached = [reached_row(shard_id, reached) for reached in batch.reached]

    def result(self, there: set[tuple[int, str, str]]) -> Committed:
        replaced = frozenset(index for index, key in enumerate(self.put_keys) if key in there)
        return Committed(replaced) if replaced else NOTHING_REPLACED


def _writing(held: Sequence[_Prepared], there: set[tuple[int, str, str]]) -> list[str]:
    """What is replaced or removed goes first: two timers of one batch may swap their places."""
    said: list[str] = []
    gone = [key for p in held for key in p.keys if key in there] if there else []
    if gone:
        said.append(f"DELETE t FROM timers AS t FORCE INDEX (timers_by_id) WHERE {keyed(gone)}")
    for table, rows in (("timers", [p.puts for p in held]), ("reached", [p.reached for p in held])):
        if any(rows):
            said += _inserts(table, list(chain.from_iterable(rows)))
    for p in held:
        if p.batch.low_water is not None:
            time, high, low = p.batch.low_water
            said.append(
                f"UPDATE shards SET shard_low_water_ms = {time}, shard_low_water_high = {high},"  # noqa: S608
                f" shard_low_water_low = {low} WHERE shard_id = {p.shard_id}"
            )
    return said


async def purge_reached(write: Write, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
    results: list[int | ShardLost] = [0] * len(fences)
    write = in_steps(write)
    for turn in shard_rounds([fence.shard_id for fence in fences]):
        removed = await _purge_turn(write, [fences[index] for index in turn], before_ms, limit)
        for index in turn:
            count = removed.get(fences[index].shard_id)
            results[index] = lost(fences[index]) if count is None else count
    return results


async def _purge_turn(write: Write, fences: Sequence[Fence], before_ms: int, limit: int) -> dict[int, int]:
    held: list[int] = []

    def decide(found: list[Any]) -> list[str]:
        held[:] = sorted(_held(found[0], fences))
        return [
            f"DELETE FROM reached WHERE shard_id = {shard_id} AND timer_execute_at < {at(bound_ms(before_ms))}"  # noqa: S608
            f" ORDER BY {KEY} LIMIT {limit}"
            for shard_id in held
        ]

    counts = await _transaction(write, (_locking(fence.shard_id for fence in fences),), decide)
    return dict(zip(held, counts, strict=True))


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
            [met] = await execute(db, (sql,))
        except asyncmy.IntegrityError:  # there is one
            return False
        return bool(met)

    return await write(work)
