"""A writer lane: one commit in flight for all its shards, everything asked for meanwhile in the next.

Group commit without a timer: while a commit is on its way the shards gather Ops, so the batch grows with
the load and shrinks with it. Also here: bulk reads by key, gathered the same way (`BatchedReader`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary, WeakSet

from duetime.clock import Clock
from duetime.domain.timer import TimerKey
from duetime.engine.shard import Shard
from duetime.errors import ShardLost, StoreError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed, Found, Store
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["BatchedReader", "GroupCommit"]

_PAUSE_FIRST_SECONDS = 0.02
_PAUSE_MAX_SECONDS = 1.0
_LOW_WATER_EVERY_MS = 10_000
_KEYS_PER_READ = 500


class GroupCommit:
    """Commits the batches of its shards, one call at a time."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        telemetry: Telemetry,
        *,
        lost: Callable[[Shard], None],
        unknown: Callable[[Shard], None],
        committed: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._lost = lost
        self._unknown = unknown
        self._committed = committed
        self._dirty: deque[Shard] = deque()
        self._queued: set[Shard] = set()
        self._failures: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # in a row
        self._rooms: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # rows at a time, after a failure
        self._apart: WeakSet[Shard] = WeakSet()  # each is committed alone, until such a commit succeeds
        self._resting: set[Shard] = set()
        self._wake = asyncio.Event()
        self._low_water_at_ms: dict[int, int] = {}
        self._failure_log = FailureLog("commits are not applied, and tried again", "commits are applied again")

    def written(self, shard: Shard) -> None:
        """The shard has Ops waiting."""
        if shard not in self._queued and shard not in self._resting:
            self._queued.add(shard)
            self._dirty.append(shard)
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            # One turn of the loop: whatever arrived together is committed together.
            await asyncio.sleep(0)
            taken = self._take()
            if taken:
                await self._commit(taken)
            else:
                self._wake.clear()

    def _take(self) -> list[tuple[Shard, Batch]]:
        room, chars = self._store.capabilities.batch_max, self._store.capabilities.batch_chars_max
        taken: list[tuple[Shard, Batch]] = []
        for _ in range(len(self._dirty)):
            if room <= 0 or chars <= 0:
                break
            shard = self._dirty[0]
            if shard in self._apart and taken:
                break
            self._dirty.popleft()
            self._queued.discard(shard)
            if shard in self._resting:
                continue  # it comes back when it has rested
            batch = shard.next_batch(min(room, self._rooms.get(shard, room)), chars)
            if batch is None:
                continue  # dropped, or recovering: it comes back by itself
            if shard.pending:
                self.written(shard)
            room -= shard.committing_rows
            chars -= shard.committing_chars
            taken.append((shard, self._with_low_water(shard, batch)))
            if shard in self._apart:
                break
        return taken

    def _with_low_water(self, shard: Shard, batch: Batch) -> Batch:
        """Now and then a batch also carries the low water upwards; never a commit for it alone."""
        now_ms = self._clock.boot_ms()
        if now_ms - self._low_water_at_ms.get(shard.shard_id, 0) < _LOW_WATER_EVERY_MS:
            return batch
        self._low_water_at_ms[shard.shard_id] = now_ms
        return shard.raise_low_water(batch)

    async def _commit(self, taken: list[tuple[Shard, Batch]]) -> None:
        telemetry = self._telemetry
        started_ms = self._clock.boot_ms()
        telemetry.commit_operations.observe(sum(len(shard.committing) for shard, _ in taken))
        results: Sequence[Committed | StoreError]
        raised = False
        try:
            results = await self._store.commit([batch for _, batch in taken])
        except StoreError as error:
            raised, results = True, [error] * len(taken)
        telemetry.commit_seconds.observe((self._clock.boot_ms() - started_ms) / 1_000)
        errors = [result for result in results if not isinstance(result, Committed | ShardLost)]
        unknown = [error for error in errors if not isinstance(error, StoreUnavailable)]
        telemetry.commits.add("unknown" if unknown else "not_applied" if errors else "applied")
        if unknown:
            log.warning("outcome of a commit is unknown, claiming its shards again: %s", unknown[0])
        elif errors:
            self._failure_log.failed(errors[0], self._clock.boot_ms())
        else:
            self._failure_log.recovered()
        is_shared = raised and len(taken) > 1
        for (shard, batch), result in zip(taken, results, strict=True):
            if not shard.dropped:
                self._settle(shard, batch, result, is_shared=is_shared)
        if len(errors) < len(results):
            self._committed()

    def _settle(self, shard: Shard, batch: Batch, result: Committed | StoreError, *, is_shared: bool) -> None:
        """`is_shared`: the error is of a commit of several shards, and another shard may be the reason."""
        if isinstance(result, Committed):
            self._failures.pop(shard, None)
            if shard in self._rooms:
                self._succeeded(shard)
            else:
                self._apart.discard(shard)
            shard.committed(batch, result)
        elif isinstance(result, ShardLost):
            self._lost(shard)
        else:
            # A write that can never be applied must not block other writes. The shards of the commit are tried one
            # by one; for a shard that still fails the batch is halved, down to one Op.
            if is_shared:
                self._apart.add(shard)
            else:
                self._rooms[shard] = max(1, shard.committing_rows // 2)
            if not is_shared or isinstance(result, StoreThrottled):
                self._rest(shard, can_be_split=len(shard.committing) > 1)
            if isinstance(result, StoreUnavailable):
                shard.not_committed(str(result))
            else:
                self._unknown(shard)

    def _succeeded(self, shard: Shard) -> None:
        self._rooms[shard] *= 2
        if self._rooms[shard] >= self._store.capabilities.batch_max:
            del self._rooms[shard]

    def _rest(self, shard: Shard, *, can_be_split: bool) -> None:
        """Pauses this shard, longer with each failure; the others continue. While its batch can still be halved the
        pause does not grow: a part of it may succeed."""
        self._resting.add(shard)
        failures = self._failures.get(shard, 0)
        pause = min(_PAUSE_FIRST_SECONDS * 2 ** min(failures, 10), _PAUSE_MAX_SECONDS)
        if not can_be_split:
            self._failures[shard] = failures + 1
        asyncio.get_running_loop().call_later(pause, self._rested, shard)

    def _rested(self, shard: Shard) -> None:
        self._resting.discard(shard)
        if shard.pending and not shard.dropped:
            self.written(shard)


class BatchedReader:
    """Reads by key: what is asked for in one turn of the loop goes to the store in one call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asked: dict[tuple[int, TimerKey], list[asyncio.Future[Found]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, shard_id: int, key: TimerKey) -> Found:
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._asked.setdefault((shard_id, key), []).append(future)
        if len(self._asked) == 1 and len(self._asked[shard_id, key]) == 1:
            task = asyncio.create_task(self._read())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _read(self) -> None:
        await asyncio.sleep(0)
        asked, self._asked = self._asked, {}
        keys = list(asked)
        for start in range(0, len(keys), _KEYS_PER_READ):
            some = keys[start : start + _KEYS_PER_READ]
            try:
                found: list[Found] | Exception = await self._store.get_many(some)
            except Exception as error:  # every asker is told, whatever it was
                found = error
            for index, key in enumerate(some):
                for future in asked[key]:
                    if future.done():
                        continue
                    if isinstance(found, Exception):
                        future.set_exception(found)
                    else:
                        future.set_result(found[index])
