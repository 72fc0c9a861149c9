"""Group commit: one commit in flight for many shards; writes that arrive meanwhile go into the next one.

No timer is needed: while a commit is in flight the shards collect pending writes, so a batch grows and shrinks with the
load. Also here: `BatchedReader`, which collects reads by key in the same way.
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
_ROWS_OF_SHARD_MIN = 16  # of one shard in a commit that many shards share, so that a commit does not name too many


class GroupCommit:
    """Commits the batches of its shards, one call at a time."""

    def __init__(
        self,
        store: Store,
        clock: Clock,
        telemetry: Telemetry,
        *,
        on_lost: Callable[[Shard], None],
        on_unknown: Callable[[Shard], None],
        on_committed: Callable[[], None],
    ) -> None:
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._on_lost = on_lost
        self._on_unknown = on_unknown
        self._on_committed = on_committed
        self._queue: deque[Shard] = deque()  # shards with pending writes
        self._in_queue: set[Shard] = set()
        self._failures: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # in a row
        self._rows_max: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # rows per batch, after a failure
        self._alone: WeakSet[Shard] = WeakSet()  # each is committed alone, until such a commit succeeds
        self._paused: set[Shard] = set()
        self._wake = asyncio.Event()
        self._low_water_at_ms: dict[int, int] = {}  # by shard, boot time at which its low-water mark was raised last
        self._failure_log = FailureLog("commits are not applied, and tried again", "commits are applied again")

    def enqueue(self, shard: Shard) -> None:
        """The shard has pending writes."""
        if shard not in self._in_queue and shard not in self._paused:
            self._in_queue.add(shard)
            self._queue.append(shard)
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            # One iteration of the event loop: writes that arrived together are committed together.
            await asyncio.sleep(0)
            taken = self._next_batches()
            if taken:
                await self._commit(taken)
            else:
                self._wake.clear()

    def _next_batches(self) -> list[tuple[Shard, Batch]]:
        rows_left, chars_left = self._store.capabilities.batch_max, self._store.capabilities.batch_chars_max
        taken: list[tuple[Shard, Batch]] = []
        for shards_left in range(len(self._queue), 0, -1):
            if rows_left <= 0 or chars_left <= 0:
                break
            shard = self._queue[0]
            if shard in self._alone and taken:
                break
            self._queue.popleft()
            self._in_queue.discard(shard)
            if shard in self._paused:
                continue  # it is enqueued again when its pause ends
            rows_max, chars_max = min(rows_left, self._rows_max.get(shard, rows_left)), chars_left
            if shard.is_contended:
                # The shards share the commit: the writes of one namespace in one shard must not delay those of another
                # namespace in another shard.
                rows_max = min(rows_max, max(_ROWS_OF_SHARD_MIN, rows_left // shards_left))
                chars_max = max(1, chars_left // shards_left)
            batch = shard.next_batch(rows_max, chars_max)
            if batch is None:
                continue  # dropped, or recovering: then it is enqueued again when the recovery ends
            if shard.pending:
                self.enqueue(shard)
            rows_left -= shard.committing_rows
            chars_left -= shard.committing_chars
            taken.append((shard, self._with_raised_low_water(shard, batch)))
            if shard in self._alone:
                break
        return taken

    def _with_raised_low_water(self, shard: Shard, batch: Batch) -> Batch:
        """Every 10 s a batch also raises the low-water mark. There is never a commit for that alone."""
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
                self._finish(shard, batch, result, is_shared=is_shared)
        if len(errors) < len(results):
            self._on_committed()

    def _finish(self, shard: Shard, batch: Batch, result: Committed | StoreError, *, is_shared: bool) -> None:
        """`is_shared`: the error is of a commit of several shards, and another shard may be the reason."""
        if isinstance(result, Committed):
            self._failures.pop(shard, None)
            if shard in self._rows_max:
                self._raise_rows_max(shard)
            else:
                self._alone.discard(shard)
            shard.committed(batch, result)
        elif isinstance(result, ShardLost):
            self._on_lost(shard)
        else:
            # A write that can never be applied must not block other writes. The shards of the commit are tried one
            # by one; for a shard that still fails the batch is halved, down to one write.
            if is_shared:
                self._alone.add(shard)
            else:
                self._rows_max[shard] = max(1, shard.committing_rows // 2)
            if not is_shared or isinstance(result, StoreThrottled):
                self._pause(shard, can_be_split=len(shard.committing) > 1)
            if isinstance(result, StoreUnavailable):
                shard.not_committed(str(result))
            else:
                # It may have been applied: committing the same writes again could undo a later change.
                self._on_unknown(shard)

    def _raise_rows_max(self, shard: Shard) -> None:
        self._rows_max[shard] *= 2
        if self._rows_max[shard] >= self._store.capabilities.batch_max:
            del self._rows_max[shard]

    def _pause(self, shard: Shard, *, can_be_split: bool) -> None:
        """Pauses this shard, longer with each failure; the others continue. While its batch can still be halved the
        pause does not grow: a part of it may succeed."""
        self._paused.add(shard)
        failures = self._failures.get(shard, 0)
        pause = min(_PAUSE_FIRST_SECONDS * 2 ** min(failures, 10), _PAUSE_MAX_SECONDS)
        if not can_be_split:
            self._failures[shard] = failures + 1
        asyncio.get_running_loop().call_later(pause, self._end_pause, shard)

    def _end_pause(self, shard: Shard) -> None:
        self._paused.discard(shard)
        if shard.pending and not shard.dropped:
            self.enqueue(shard)


class BatchedReader:
    """Reads by key: what is asked for in one iteration of the event loop goes to the store in one call."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._waiting: dict[tuple[int, TimerKey], list[asyncio.Future[Found]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop keeps only weak references

    async def find(self, shard_id: int, key: TimerKey) -> Found:
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((shard_id, key), []).append(future)
        if len(self._waiting) == 1 and len(self._waiting[shard_id, key]) == 1:
            task = asyncio.create_task(self._read())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _read(self) -> None:
        await asyncio.sleep(0)
        waiting, self._waiting = self._waiting, {}
        keys = list(waiting)
        for start in range(0, len(keys), _KEYS_PER_READ):
            some = keys[start : start + _KEYS_PER_READ]
            try:
                found: list[Found] | Exception = await self._store.get_many(some)
            except Exception as error:  # every caller gets it, or it would wait for ever
                found = error
            for index, key in enumerate(some):
                for future in waiting[key]:
                    if future.done():
                        continue
                    if isinstance(found, Exception):
                        future.set_exception(found)
                    else:
                        future.set_result(found[index])
