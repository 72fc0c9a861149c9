"""Fenced writes to Cassandra: commits, claims, releases, purges.

**The fence.** Every write to a partition is one conditional batch (a lightweight transaction): its first statement is
`UPDATE … IF shard_version = ? AND shard_nonce = ?` on the shard row, the others write timer rows. Conditional writes of
one partition are agreed on one after the other, by Paxos, so the batch happens whole at a moment when the fence holds,
or not at all. No other kind of write is ever made: plain writes get their timestamps elsewhere, and could undo these.

**After a claim** a plain quorum read sees everything that the former owner's writes will ever have done. The claim is a
round on the same partition. To begin it, a majority promises to accept nothing older; whatever one of them had accepted
before is completed first, and all of them are brought up to the last commit. A write that no majority had accepted can
find none any more; one that some lone replica accepted is older than the claim, and never taken up again. So before the
claim is answered each earlier write is with a majority, or is nowhere; and a quorum meets every majority. That is why
a write whose outcome is unknown is settled by claiming anew, as the engine does, and by nothing less.

**The upsert.** What a put replaces is read before the batch (the row of its id says where it stands), which is no race:
only the holder of the fence changes a shard, and here one change of a shard begins when the last one has ended.
All rows of a batch carry one timestamp, and of equal timestamps a deletion wins. So a place that is left and taken in
one batch is not deleted but overwritten, nulls included; and no range is deleted in a batch that inserts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from duetime.domain.timer import Position, TimerKey
from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, ShardRow
from duetime.stores.cassandra.connection import Line, Statement
from duetime.stores.cassandra.ranges import Ranges, end_of
from duetime.stores.cassandra.statements import (
    TIMER,
    UNSET,
    Floors,
    Key,
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

AT_ONCE = 16  # conditional batches in flight
FLOOR_READS = 8
FLOOR_PAUSE_SECONDS = 60.0


class Writer:
    """Writes to shards, each shard's one after the other, those of different shards at once."""

    def __init__(self, line: Line, say: Statements) -> None:
        self._line = line
        self._say = say
        self._ranges = Ranges(line.read)
        self._looks_from: dict[int, float] = {}
        self._turns: dict[int, asyncio.Lock] = {}
        self._room = asyncio.Semaphore(AT_ONCE)

    # -- whole calls: one result for each, in order

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:
        """Each fares by itself."""
        return await self._each(batches, [batch.fence.shard_id for batch in batches], self._commit)

    async def purge(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        shard_ids = [fence.shard_id for fence in fences]
        return await self._each(fences, shard_ids, lambda f: self._purge(f, before_ms, limit))

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return all_or_error(await self._each(fences, [fence.shard_id for fence in fences], self._release))

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return all_or_error(await self._each(claims, [claim.shard_id for claim in claims], self._claim))

    async def new_shards(self, shard_ids: Sequence[int]) -> None:
        all_or_error(await self._each(shard_ids, shard_ids, lambda s: self._line.write(self._say.new_shard, s)))

    async def _each(
        self, items: Sequence[I], shard_ids: Sequence[int], one: Callable[[I], Awaitable[T]]
    ) -> list[T | StoreError]:
        async def in_turn(item: tuple[int, I]) -> T:
            async with self._turns.setdefault(item[0], asyncio.Lock()), self._room:
                return await one(item[1])

        return await each_shard_separately(list(zip(shard_ids, items, strict=True)), shard_ids, in_turn)

    # -- one shard

    async def _commit(self, batch: Batch) -> Committed | ShardLost:
        fence = batch.fence
        put_rows = [id_row(timer.key) for timer in batch.puts]
        gone_rows = [id_row(key) for key in batch.deletes]
        before = await self._before(fence.shard_id, [*put_rows, *gone_rows])
        if not before.holds(fence):
            return lost(fence)
        floors = await self._floors(batch, before)
        write = [self._fence(fence, floors, batch), *_changes(self._say, batch, put_rows, gone_rows, before.places)]
        if not await self._line.write_batch(write):
            return lost(fence)
        replaced = frozenset(index for index, row in enumerate(put_rows) if row in before.places)
        return Committed(replaced) if replaced else NOTHING_REPLACED

    async def _purge(self, fence: Fence, before_ms: int, limit: int) -> int | ShardLost:
        shard, say = fence.shard_id, self._say
        before = await self._before(shard, ())
        if not before.holds(fence):
            return lost(fence)
        first_ms = FIRST_MS if before.floors.reached_from_ms is None else before.floors.reached_from_ms
        until_ms = bound_ms(before_ms)
        rows = await self._line.read(say.expired, shard, first_ms, until_ms, limit)
        if not rows:
            return 0
        places = [Position(*row[:3]) for row in rows]
        floor_ms = until_ms if len(rows) < limit else places[-1].execute_at_ms
        write = [
            self._fence(fence, Floors(None, floor_ms)),
            (say.drop_reached, (shard, *places[-1])),
            *(
                (say.drop, (shard, *reached_id_row(TimerKey(row[3], row[4]), row[5], row[6], place)))
                for row, place in zip(rows, places, strict=True)
                if None not in row[3:]  # otherwise the row of its id cannot be found
            ),
        ]
        return len(rows) if await self._line.write_batch(write) else lost(fence)

    async def _release(self, fence: Fence) -> ShardLost | None:
        applied = await self._line.write(self._say.release, fence.shard_id, fence.version, fence.nonce)
        return None if applied else lost(fence)

    async def _claim(self, claim: Claim) -> ShardRow:
        version = claim.expected_version
        owner = (claim.nonce, claim.owner_id, claim.owner_address, claim.now_ms)
        await self._line.write(self._say.claim, version + 1, *owner, claim.shard_id, version)
        try:
            rows = await self._line.read(self._say.shards, [claim.shard_id])
        except StoreUnavailable as error:
            raise OutcomeUnknown(error.detail) from error
        return shard_row(rows[0]) if rows else ShardRow(claim.shard_id)

    # -- parts of a write

    async def _before(self, shard_id: int, rows: Sequence[Key]) -> _Before:
        """The fence as it is, and where the timers of these ids stand."""
        version = nonce = None
        floors = Floors(None, None)
        places: dict[Key, Position] = {}
        for row in await self._line.read(self._say.before, shard_id, [shard_key, *rows]):
            if row[0] == shard_key[0]:
                version, nonce, floors = row[6], row[7], Floors(row[8], row[9])
            else:
                places[(row[0], 0, row[1], row[2], b"")] = Position(*row[3:6])
        return _Before(version, nonce, floors, places)

    def _fence(self, fence: Fence, floors: Floors, batch: Batch | None = None) -> Statement:
        low_water = (UNSET,) * 3 if batch is None or batch.low_water is None else batch.low_water
        held = (fence.shard_id, fence.version, fence.nonce)
        return self._say.fence, (fence.nonce, *low_water, *without_nulls(floors), *held)

    async def _floors(self, batch: Batch, before: _Before) -> Floors:
        """What changes of them: lower where something is added below, higher where nothing is left."""
        timers_from_ms, reached_from_ms = before.floors
        floor_ms = timers_from_ms
        if batch.low_water is not None:
            floor_ms = await self._first_timer_ms(batch.fence.shard_id, timers_from_ms, batch.low_water.execute_at_ms)
        lowest_ms = min((timer.execute_at_ms for timer in batch.puts), default=None)
        if floor_ms is not None and lowest_ms is not None:
            floor_ms = min(floor_ms, lowest_ms)
        earliest_ms = min((reached.purge_at_ms for reached in batch.reached), default=None)
        is_below = reached_from_ms is not None and earliest_ms is not None and earliest_ms < reached_from_ms
        return Floors(floor_ms if floor_ms != timers_from_ms else None, earliest_ms if is_below else None)

    async def _first_timer_ms(self, shard_id: int, from_ms: int | None, until_ms: int) -> int | None:
        """The engine says that nothing stands before its low water; here that is looked up, since lists rely on it.
        A commit waits for it: where much was deleted it goes as far as a few reads come, and not soon again if these
        were in vain."""
        start_ms = FIRST_MS if from_ms is None else from_ms
        now = asyncio.get_running_loop().time()
        if until_ms <= start_ms or now < self._looks_from.get(shard_id, now):
            return from_ms
        before, statement = end_of(start_ms - 1), self._say.first_timer
        try:
            rows, passed = await self._ranges.between(statement, shard_id, before, until_ms - 1, 1, FLOOR_READS)
        except StoreError:  # the floor stays where it is
            return from_ms
        if rows:
            return int(rows[0][0])
        if passed is None:
            return until_ms
        if passed.execute_at_ms <= start_ms:
            self._looks_from[shard_id] = now + FLOOR_PAUSE_SECONDS
            return from_ms
        return passed.execute_at_ms


def _changes(
    say: Statements, batch: Batch, put_rows: Sequence[Key], gone_rows: Sequence[Key], places: dict[Key, Position]
) -> Iterator[Statement]:
    """What a batch does to the rows of its shard, where `places` says which of its ids stand where."""
    shard, left = batch.fence.shard_id, set(places.values())
    for timer, row in zip(batch.puts, put_rows, strict=True):
        values = timer_values(timer)
        yield say.put_timer, (shard, *(values if timer.position in left else without_nulls(values)))
        if places.get(row) != timer.position:
            yield say.put_place, (shard, *row, *timer.position)
    for row in gone_rows:
        if row in places:
            yield say.drop, (shard, *row)
    for place in left.difference(timer.position for timer in batch.puts):
        yield say.drop, (shard, TIMER, *place, b"")
    for reached in batch.reached:
        timer, place = reached.timer, reached.position
        yield say.put_reached, (shard, *without_nulls(reached_values(reached)))
        yield (
            say.put_reached_place,
            (
                shard,
                *reached_id_row(timer.key, timer.generation, reached.reached_at_ms, place),
            ),
        )


class _Before(NamedTuple):
    version: int | None
    nonce: int | None
    floors: Floors
    places: dict[Key, Position]

    def holds(self, fence: Fence) -> bool:
        """A quorum that was read cannot be older than the claim; so what does not match now never will again."""
        return (self.version, self.nonce) == (fence.version, fence.nonce)
