"""Fenced writes to Cassandra: commits, claims, releases, purges.

**The fence.** Every write to a partition is one conditional batch (a lightweight transaction). Its first statement is
`UPDATE … IF shard_version = ? AND shard_nonce = ?` on the shard row; the others write timer rows. Paxos decides the
conditional writes of one partition one after the other. So the whole batch is applied while the fence is valid, or
nothing of it is applied. No other kind of write is used: plain writes get their timestamps in another way, and could
undo conditional ones.

**After a claim** a quorum read sees every effect that the writes of the former owner will ever have. The claim is a
Paxos round on the same partition. To begin it, a majority of the replicas promises to accept no older proposal. A
proposal that one of them had accepted before is completed first, and all of them are brought up to the last commit. A
write that no majority had accepted can no longer get a majority. A write that only one other replica had accepted is
older than the claim, and is never taken up again. So before the claim is answered, each earlier write is either on a
majority or will never be applied; and every quorum overlaps every majority. That is why a new claim, and nothing less,
settles a write of unknown outcome. The engine does that.

**The upsert.** What a put replaces is read before the batch (the row of its id has its position). That is no race: only
the owner of the fence changes a shard, and this class writes to a shard only after its last write to it has ended. All
rows of a batch have the same timestamp, and of equal timestamps a deletion wins. So a position that one timer of a
batch leaves and another takes is not deleted but overwritten, including nulls; and no batch that inserts deletes a
range.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from duetime.domain.timer import Position, TimerKey
from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, ShardRow
from duetime.stores.cassandra.connection import Client, Statement
from duetime.stores.cassandra.ranges import RangeReader, end_of
from duetime.stores.cassandra.statements import (
    TIMER,
    UNSET,
    Key,
    LowerBounds,
    Statements,
    id_row,
    reached_id_row,
    shard_key,
    shard_row,
    without_nulls,
)
from duetime.stores.fencing import NOTHING_REPLACED, all_or_error, each_shard_separately, lost
from duetime.stores.rows import FIRST_MS, bound_ms, reached_values, timer_values

__all__ = ["Writer"]

I = TypeVar("I")  # noqa: E741
T = TypeVar("T")

PARALLEL_WRITES = 16  # conditional batches in flight
LOWER_BOUND_READS = 8
LOWER_BOUND_PAUSE_SECONDS = 60.0


class Writer:
    """Writes to shards: one write to a shard at a time, different shards at the same time."""

    def __init__(self, client: Client, statements: Statements) -> None:
        self._client = client
        self._statements = statements
        self._ranges = RangeReader(client.read)
        self._search_from: dict[int, float] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._limit = asyncio.Semaphore(PARALLEL_WRITES)

    # -- calls of the store: one result for each item, in order

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:
        """Each batch succeeds or fails by itself."""
        return await self._each(batches, [batch.fence.shard_id for batch in batches], self._commit)

    async def purge(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        shard_ids = [fence.shard_id for fence in fences]
        return await self._each(fences, shard_ids, lambda f: self._purge(f, before_ms, limit))

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return all_or_error(await self._each(fences, [fence.shard_id for fence in fences], self._release))

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return all_or_error(await self._each(claims, [claim.shard_id for claim in claims], self._claim))

    async def new_shards(self, shard_ids: Sequence[int]) -> None:
        all_or_error(
            await self._each(shard_ids, shard_ids, lambda s: self._client.write(self._statements.new_shard, s))
        )

    async def _each(
        self, items: Sequence[I], shard_ids: Sequence[int], one: Callable[[I], Awaitable[T]]
    ) -> list[T | StoreError]:
        async def under_lock(item: tuple[int, I]) -> T:
            async with self._locks.setdefault(item[0], asyncio.Lock()), self._limit:
                return await one(item[1])

        return await each_shard_separately(list(zip(shard_ids, items, strict=True)), shard_ids, under_lock)

    # -- one shard

    async def _commit(self, batch: Batch) -> Committed | ShardLost:
        fence = batch.fence
        put_rows = [id_row(timer.key) for timer in batch.puts]
        deleted_rows = [id_row(key) for key in batch.deletes]
        before = await self._state_before(fence.shard_id, [*put_rows, *deleted_rows])
        if not before.matches(fence):
            return lost(fence)
        lower_bounds = await self._lower_bounds(batch, before)
        write = [
            self._fence(fence, lower_bounds, batch),
            *_changes(self._statements, batch, put_rows, deleted_rows, before.positions),
        ]
        if not await self._client.write_batch(write):
            return lost(fence)
        replaced = frozenset(index for index, row in enumerate(put_rows) if row in before.positions)
        return Committed(replaced) if replaced else NOTHING_REPLACED

    async def _purge(self, fence: Fence, before_ms: int, limit: int) -> int | ShardLost:
        shard, statements = fence.shard_id, self._statements
        before = await self._state_before(shard, ())
        if not before.matches(fence):
            return lost(fence)
        first_ms = FIRST_MS if before.lower_bounds.reached_from_ms is None else before.lower_bounds.reached_from_ms
        until_ms = bound_ms(before_ms)
        rows = await self._client.read(statements.expired, shard, first_ms, until_ms, limit)
        if not rows:
            return 0
        positions = [Position(*row[:3]) for row in rows]
        lower_ms = until_ms if len(rows) < limit else positions[-1].execute_at_ms
        write = [
            self._fence(fence, LowerBounds(None, lower_ms)),
            (statements.delete_reached, (shard, *positions[-1])),
            *(
                (statements.delete_row, (shard, *reached_id_row(TimerKey(row[3], row[4]), row[5], row[6], position)))
                for row, position in zip(rows, positions, strict=True)
                if None not in row[3:]  # otherwise the row of its id is not known
            ),
        ]
        return len(rows) if await self._client.write_batch(write) else lost(fence)

    async def _release(self, fence: Fence) -> ShardLost | None:
        applied = await self._client.write(self._statements.release, fence.shard_id, fence.version, fence.nonce)
        return None if applied else lost(fence)

    async def _claim(self, claim: Claim) -> ShardRow:
        version = claim.expected_version
        owner = (claim.nonce, claim.owner_id, claim.owner_address, claim.now_ms)
        await self._client.write(self._statements.claim, version + 1, *owner, claim.shard_id, version)
        try:
            rows = await self._client.read(self._statements.shards, [claim.shard_id])
        except StoreUnavailable as error:
            raise OutcomeUnknown(error.detail) from error
        return shard_row(rows[0]) if rows else ShardRow(claim.shard_id)

    # -- parts of a write

    async def _state_before(self, shard_id: int, rows: Sequence[Key]) -> _StateBefore:
        """The current fence, and the positions of the timers of these ids."""
        version = nonce = None
        lower_bounds = LowerBounds(None, None)
        positions: dict[Key, Position] = {}
        for row in await self._client.read(self._statements.before, shard_id, [shard_key, *rows]):
            if row[0] == shard_key[0]:
                version, nonce, lower_bounds = row[6], row[7], LowerBounds(row[8], row[9])
            else:
                positions[(row[0], 0, row[1], row[2], b"")] = Position(*row[3:6])
        return _StateBefore(version, nonce, lower_bounds, positions)

    def _fence(self, fence: Fence, lower_bounds: LowerBounds, batch: Batch | None = None) -> Statement:
        low_water = (UNSET,) * 3 if batch is None or batch.low_water is None else batch.low_water
        condition = (fence.shard_id, fence.version, fence.nonce)
        return self._statements.fence, (fence.nonce, *low_water, *without_nulls(lower_bounds), *condition)

    async def _lower_bounds(self, batch: Batch, before: _StateBefore) -> LowerBounds:
        """The bounds that change: lower if a row is added before them, higher if no row is left after them."""
        timers_from_ms, reached_from_ms = before.lower_bounds
        lower_ms = timers_from_ms
        if batch.low_water is not None:
            lower_ms = await self._first_timer_ms(batch.fence.shard_id, timers_from_ms, batch.low_water.execute_at_ms)
        lowest_ms = min((timer.execute_at_ms for timer in batch.puts), default=None)
        if lower_ms is not None and lowest_ms is not None:
            lower_ms = min(lower_ms, lowest_ms)
        earliest_ms = min((reached.purge_at_ms for reached in batch.reached), default=None)
        is_below = reached_from_ms is not None and earliest_ms is not None and earliest_ms < reached_from_ms
        return LowerBounds(lower_ms if lower_ms != timers_from_ms else None, earliest_ms if is_below else None)

    async def _first_timer_ms(self, shard_id: int, from_ms: int | None, until_ms: int) -> int | None:
        """The time of the first timer. The engine reports that there is none before its low water; that is checked
        here, because lists rely on it. A commit waits for this search: where many rows were deleted it stops after a
        few reads, and if these found nothing it is not repeated soon."""
        start_ms = FIRST_MS if from_ms is None else from_ms
        now = asyncio.get_running_loop().time()
        if until_ms <= start_ms or now < self._search_from.get(shard_id, now):
            return from_ms
        before, statement = end_of(start_ms - 1), self._statements.first_timer
        try:
            rows, passed = await self._ranges.between(statement, shard_id, before, until_ms - 1, 1, LOWER_BOUND_READS)
        except StoreError:  # the bound stays as it is
            return from_ms
        if rows:
            return int(rows[0][0])
        if passed is None:
            return until_ms
        if passed.execute_at_ms <= start_ms:
            self._search_from[shard_id] = now + LOWER_BOUND_PAUSE_SECONDS
            return from_ms
        return passed.execute_at_ms


def _changes(
    statements: Statements,
    batch: Batch,
    put_rows: Sequence[Key],
    deleted_rows: Sequence[Key],
    positions: dict[Key, Position],
) -> Iterator[Statement]:
    """The statements of a batch for the rows of its shard. `positions`: the current positions of its ids."""
    shard, left = batch.fence.shard_id, set(positions.values())
    for timer, row in zip(batch.puts, put_rows, strict=True):
        values = timer_values(timer)
        yield statements.put_timer, (shard, *(values if timer.position in left else without_nulls(values)))
        if positions.get(row) != timer.position:
            yield statements.put_position, (shard, *row, *timer.position)
    for row in deleted_rows:
        if row in positions:
            yield statements.delete_row, (shard, *row)
    for position in left.difference(timer.position for timer in batch.puts):
        yield statements.delete_row, (shard, TIMER, *position, b"")
    for reached in batch.reached:
        timer, position = reached.timer, reached.position
        yield statements.put_reached, (shard, *without_nulls(reached_values(reached)))
        yield (
            statements.put_reached_position,
            (
                shard,
                *reached_id_row(timer.key, timer.generation, reached.reached_at_ms, position),
            ),
        )


class _StateBefore(NamedTuple):
    version: int | None
    nonce: int | None
    lower_bounds: LowerBounds
    positions: dict[Key, Position]

    def matches(self, fence: Fence) -> bool:
        """A quorum read is not older than the claim, so a fence that does not match now will never match again."""
        return (self.version, self.nonce) == (fence.version, fence.nonce)
