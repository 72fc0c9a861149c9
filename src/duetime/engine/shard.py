"""One owned shard: admit a write -> commit it -> heap -> fire -> settle.

A Shard is the only place where the timers of a shard change. It holds, per timer:

- an `Entry` in memory, for every timer whose position is within the horizon, and for no other;
- at most one `PendingWrite` that waits for the next commit, and one in the commit in flight. A later write of the same
  timer is merged into the waiting one, so a batch never names a timer twice.

Two rules keep memory and store consistent. Memory changes only *after* a commit: an Entry shows what is on disk. And
from the moment a write is admitted until it is decided (committed, or certainly not applied), its timer does not fire
(phase WRITING), so that what the caller was answered stays true.

There is no I/O here: group commit commits the pending writes, look-ahead loads pages, the fire loop fires. What the
Shard needs of its engine is `ShardHost`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

from duetime.domain.settle import Settlement
from duetime.domain.timer import BEFORE_ALL, Position, Reached, Timer, TimerKey
from duetime.engine.counters import Counters
from duetime.engine.pending_write import PendingWrite, Waiter, WriteResult
from duetime.errors import Busy, DuetimeError, NotOwner, OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Committed, Fence, Found, Page, ShardRow, Unreadable
from duetime.telemetry import log

__all__ = ["UNKNOWN", "Entry", "Phase", "Shard", "ShardHost", "ShardState", "Unknown", "end_of"]

_HIGHEST: Final = 2**63 - 1
_UNREADABLE_MAX: Final = 1_000


def end_of(execute_at_ms: int) -> Position:
    """The last position of a millisecond."""
    return Position(execute_at_ms, _HIGHEST, _HIGHEST)


class Unknown(enum.Enum):
    """Memory does not know whether there is such a timer: read the store."""

    UNKNOWN = 0


UNKNOWN: Final = Unknown.UNKNOWN


class Phase(enum.Enum):
    """Of a timer in memory."""

    ARMED = 0  # in the heap
    QUEUED = 1  # due, waiting for its destination
    SENDING = 2  # in flight
    SETTLING = 3  # its settlement waits for a commit
    WRITING = 4  # it does not fire: a write of it waits for a commit, or its key is locked, or the shard recovers
    GONE = 5  # replaced, deleted, or its shard was dropped


# Looking up an enum member through its class costs as much as the comparison it is for.
_ARMED, _QUEUED, _SENDING = Phase.ARMED, Phase.QUEUED, Phase.SENDING
_SETTLING, _WRITING, _GONE = Phase.SETTLING, Phase.WRITING, Phase.GONE


class ShardState(enum.IntEnum):
    """How far the release of a shard has gone. It only moves forward, and may skip states.

    A recovery is independent of it (`Shard.recovering`): a shard that drains may have to recover as well.
    """

    OPEN = 0  # accepts writes and fires
    DRAINING = 1  # starts no delivery, still accepts writes
    CLOSING = 2  # accepts no writes either
    DROPPED = 3  # owned by another instance, or free: nothing of it is in memory


_OPEN, _DRAINING, _CLOSING, _DROPPED = ShardState.OPEN, ShardState.DRAINING, ShardState.CLOSING, ShardState.DROPPED


class Entry:
    """A timer in memory."""

    __slots__ = ("deferred_settlement", "phase", "shard", "started_at_ms", "ticket", "timer")

    def __init__(self, timer: Timer, shard: Shard) -> None:
        self.timer = timer
        self.shard = shard
        self.phase = _WRITING
        self.ticket = 0  # its place in the fire loop's heap while ARMED
        self.started_at_ms = 0  # of the attempt in flight
        # Of an attempt that ended while a write of the timer was pending. It counts if that write is not applied.
        self.deferred_settlement: Settlement | None = None

    @property
    def weight(self) -> int:
        payload = self.timer.payload
        return 1 if payload is None else 1 + (len(payload) >> 10)


class ShardHost(Protocol):
    """What a shard needs of its engine: the counters, the heap, the memory limit and the group commit."""

    counters: Counters

    def arm(self, entry: Entry) -> None: ...
    def disarm(self, entry: Entry) -> None: ...
    def add_weight(self, weight: int) -> None:
        """Count a timer that enters memory, or with a negative weight one that leaves it."""
        ...

    def enqueue(self, shard: Shard) -> None:
        """The shard has pending writes to commit."""
        ...

    def boot_ms(self) -> int: ...


class Shard:
    def __init__(self, row: ShardRow, host: ShardHost) -> None:
        self.shard_id = row.shard_id
        self.fence: Fence = row.fence
        self.fenced_at_ms = host.boot_ms()  # when this fence was learnt
        self.low_water = row.low_water
        self.horizon = row.low_water
        self.state = _OPEN
        self.recovering = False  # the outcome of a commit is unknown: nothing is written or fired until it is known
        self.loading = False  # a page is being read
        self.entries: dict[TimerKey, Entry] = {}
        self.pending: dict[TimerKey, PendingWrite] = {}
        self.committing: dict[TimerKey, PendingWrite] = {}
        self.committing_rows = 0
        self.committing_chars = 0
        self.sending: dict[TimerKey, int] = {}  # deliveries in flight
        self.last_commit_error = ""  # why the last batch was not applied; empty: it was
        self.due_during_recovery: list[Entry] = []  # they are armed again when the recovery ends
        # Stored rows that cannot be decoded: they do not fire. Only the first ones are kept.
        self.unreadable: dict[Position, Unreadable] = {}
        self._unreadable_keys: set[tuple[str, str]] = set()
        self._unreadable_truncated = False  # there are more than are kept
        self._host = host
        self._counters = host.counters
        self._loop = asyncio.get_running_loop()  # get_running_loop() costs a system call each time
        self._generations = 0  # made under this fence
        self._key_locks: dict[TimerKey, asyncio.Future[None]] = {}  # by key, the lock that was asked for last
        self._changed_during_load: dict[TimerKey, Timer | None] | None = None  # None: no page is being read

    # --- state ------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        return self.state is _DRAINING or self.state is _CLOSING

    @property
    def closing(self) -> bool:
        """Does it refuse writes?"""
        return self.state >= _CLOSING

    @property
    def dropped(self) -> bool:
        return self.state is _DROPPED

    @property
    def is_quiet(self) -> bool:
        """Is nothing of it in flight or waiting for a commit?"""
        return not (self.pending or self.committing or self.sending)

    def start_drain(self) -> None:
        """Start no more deliveries. Those in flight go on, and writes are still accepted."""
        self.state = max(self.state, _DRAINING)

    def close(self) -> None:
        """Accept no more writes either. Those that were admitted are still committed."""
        self.state = max(self.state, _CLOSING)

    def start_recovery(self) -> None:
        """The outcome of the commit in flight is unknown: commit and fire nothing until `finish_recovery`."""
        self.recovering = True

    def drop(self, error: DuetimeError, unknown: DuetimeError | None = None) -> None:
        """This instance does not own the shard any more: remove everything from memory.

        The callers of waiting writes get `error`; those of the commit in flight get `unknown`, if it is given.
        """
        self.state = _DROPPED
        for writes, reason in ((self.committing, unknown or error), (self.pending, error)):
            for write in writes.values():
                write.fail_waiters(reason)
                if write.settlement is not None:
                    self._counters.unsettled -= 1
            self._counters.writes_waiting -= len(writes)
        self.committing, self.pending = {}, {}
        for entry in self.entries.values():
            self._remove_entry(entry)
        self.entries = {}
        self.horizon = BEFORE_ALL

    # --- admitting writes -------------------------------------------------------------------------

    def next_generation(self) -> int:
        self._generations += 1
        return self.fence.version << 32 | self._generations

    def current(self, key: TimerKey) -> Timer | Unknown | None:
        """The timer as it will be once all admitted writes are committed."""
        write = self.pending.get(key) or self.committing.get(key)
        if write is not None:
            return write.put
        entry = self.entries.get(key)
        return UNKNOWN if entry is None else entry.timer

    def undecided(self, key: TimerKey) -> asyncio.Future[WriteResult] | None:
        """Done when the last write of this timer is committed or certainly not applied; None: no write is pending."""
        write = self.pending.get(key) or self.committing.get(key)
        if write is None:
            return None
        future: asyncio.Future[WriteResult] = self._loop.create_future()
        write.waiters.append(Waiter(future, write.put, True))
        return future

    def is_sending(self, key: TimerKey) -> bool:
        """Is a delivery of this timer, of any generation, in flight?"""
        return key in self.sending

    def write(
        self,
        key: TimerKey,
        put: Timer | None,
        reached: list[Reached],
        *,
        replaced: bool | None = None,
    ) -> asyncio.Future[WriteResult]:
        """Admit a write of one timer. The future is done when it is committed or certainly not applied.

        The caller has read `current` in the same iteration of the event loop, or holds the `key_lock`.
        """
        if self.state >= _CLOSING:
            raise NotOwner
        counters = self._counters
        if counters.writes_waiting >= counters.writes_waiting_max:
            raise Busy
        before = self.pending.get(key) or self.committing.get(key)
        if before is not None:
            replaced = before.put is not None
        elif key in self.entries:
            replaced = True
        future: asyncio.Future[WriteResult] = self._loop.create_future()
        self._admit(key, PendingWrite(put, reached, [Waiter(future, put, replaced)], self._host.boot_ms()))
        return future

    def _admit(self, key: TimerKey, write: PendingWrite) -> None:
        waiting = self.pending.get(key)
        if waiting is not None:
            waiting.merge(write)
            return
        entry = self.entries.get(key)
        if entry is not None:
            write.previous_entry = entry
            if entry.phase is _ARMED:
                self._host.disarm(entry)
            if entry.phase is not _SETTLING:
                # A delivery in flight goes on, but its result must not settle what is written now.
                entry.phase = _WRITING
        self.pending[key] = write
        self._counters.writes_waiting += 1
        self._host.enqueue(self)

    @asynccontextmanager
    async def key_lock(self, key: TimerKey) -> AsyncIterator[None]:
        """Serialises commands that read a timer before they write it, in the order they arrived. Meanwhile the timer
        does not start to fire."""
        previous = self._key_locks.get(key)
        lock = self._key_locks[key] = self._loop.create_future()
        if previous is not None:
            try:
                await asyncio.shield(previous)
            except asyncio.CancelledError:
                # The next command waits for this lock, and must still wait for the previous one.
                previous.add_done_callback(lambda _: self._unlock(key, lock))
                raise
        try:
            yield
        finally:
            self._unlock(key, lock)

    def _unlock(self, key: TimerKey, lock: asyncio.Future[None]) -> None:
        lock.set_result(None)
        if self._key_locks.get(key) is not lock:
            return  # another command waits for the key
        del self._key_locks[key]
        entry = self.entries.get(key)
        if entry is not None and entry.phase is _WRITING and not self.has_pending_write(key):
            self._arm(entry)

    def is_locked(self, key: TimerKey) -> bool:
        """Does a command hold the key lock of this timer, or wait for it?"""
        return key in self._key_locks

    def has_pending_write(self, key: TimerKey) -> bool:
        return key in self.pending or key in self.committing

    # --- committing: called by group commit -------------------------------------------------------

    def next_batch(self, rows_max: int, chars_max: int) -> Batch | None:
        """Pending writes of up to `rows_max` rows and about `chars_max` characters as a batch; from now on they are
        committing. At least one write, however large it is. None: there is nothing that may be committed now."""
        if self.recovering or self.state is _DROPPED or self.committing or not self.pending:
            return None
        taken = self.committing_rows = self.committing_chars = 0
        for write in self.pending.values():
            rows = self.committing_rows + 1 + len(write.reached)
            if taken and (rows > rows_max or self.committing_chars >= chars_max):
                break
            taken += 1
            self.committing_rows = rows
            self.committing_chars += write.chars
        if taken == len(self.pending):
            self.committing, self.pending = self.pending, {}
        else:
            for key in list(self.pending)[:taken]:
                self.committing[key] = self.pending.pop(key)
        puts: list[Timer] = []
        deletes: list[TimerKey] = []
        reached: list[Reached] = []
        lowest_ms = low_water_ms = self.low_water.execute_at_ms
        for key, write in self.committing.items():
            if write.put is None:
                deletes.append(key)
            else:
                puts.append(write.put)
                if write.put.execute_at_ms <= lowest_ms:
                    lowest_ms = write.put.execute_at_ms - 1
            if write.reached:
                reached += [row for row in write.reached if row.purge_at_ms > row.reached_at_ms]
        # A put below the low-water mark lowers the mark in the same batch: the next owner loads only from the mark on.
        low_water = end_of(lowest_ms) if lowest_ms < low_water_ms else None
        return Batch(self.fence, puts, deletes, reached, low_water)

    def raise_low_water(self, batch: Batch) -> Batch:
        """The same batch, with the highest low-water mark that is correct once it is committed."""
        lowest_ms = self.horizon.execute_at_ms
        for entry in self.entries.values():
            lowest_ms = min(lowest_ms, entry.timer.execute_at_ms)
        for put in batch.puts:
            lowest_ms = min(lowest_ms, put.execute_at_ms)
        for position in self.unreadable:  # another version may be able to decode it, and must find it
            lowest_ms = min(lowest_ms, position.execute_at_ms)
        if lowest_ms - 1 <= self.low_water.execute_at_ms or self._unreadable_truncated:
            return batch
        low_water = end_of(lowest_ms - 1)
        return Batch(batch.fence, batch.puts, batch.deletes, batch.reached, low_water)

    def committed(self, batch: Batch, result: Committed) -> None:
        """The batch is on disk: update memory and answer the callers."""
        self.last_commit_error = ""
        if batch.low_water is not None:
            self.low_water = batch.low_water
        replaced: set[TimerKey] | frozenset[TimerKey] = frozenset()
        if result.replaced:
            replaced = {batch.puts[index].key for index in result.replaced}
        writes, self.committing = self.committing, {}
        self._counters.writes_waiting -= len(writes)
        for key, write in writes.items():
            if write.settlement is not None:
                self._counters.unsettled -= 1
            self._apply(key, write.put)
            for waiter in write.waiters:
                if not waiter.future.done():
                    known = waiter.replaced
                    waiter.future.set_result((waiter.timer, key in replaced if known is None else known))
        if self.pending:
            self._host.enqueue(self)

    def not_committed(self, reason: str = "") -> None:
        """The batch was certainly not applied: its writes wait again, merged with later ones."""
        self.last_commit_error = reason
        writes, self.committing = self.committing, {}
        for key in [key for key, write in writes.items() if write.is_abandoned and key not in self.pending]:
            self._counters.writes_waiting -= 1
            self._restore(key, writes.pop(key).previous_entry)
        self._requeue(writes)

    def _requeue(self, writes: dict[TimerKey, PendingWrite]) -> None:
        for key, write in writes.items():
            later = self.pending.get(key)
            if later is not None:
                write.merge(later)
                self._counters.writes_waiting -= 1
            self.pending[key] = write
        if self.pending:
            self._host.enqueue(self)

    def finish_recovery(self, row: ShardRow, found: dict[TimerKey, Found]) -> None:
        """The shard was claimed again after an unknown outcome. The old commit can no longer be applied, so `found`,
        which was read after the claim, says for each of its writes whether it was."""
        self.fence = row.fence
        self.fenced_at_ms = self._host.boot_ms()
        self.low_water = row.low_water
        self._generations = 0
        self.recovering = False
        due, self.due_during_recovery = self.due_during_recovery, []
        writes, self.committing = self.committing, {}
        not_applied: dict[TimerKey, PendingWrite] = {}
        for key, write in writes.items():
            if not write.is_applied(found[key]):
                not_applied[key] = write
                continue
            self._counters.writes_waiting -= 1
            if write.settlement is not None:
                self._counters.unsettled -= 1
            self._apply(key, write.put)
            for waiter in write.waiters:
                if not waiter.future.done():
                    waiter.future.set_result((waiter.timer, waiter.replaced))
        self._requeue(not_applied)
        for entry in due:
            key = entry.timer.key
            # An entry may be in the list several times. It is armed once: after the first time its phase is ARMED.
            is_free = not self.has_pending_write(key) and key not in self._key_locks
            if entry.phase is _WRITING and self.entries.get(key) is entry and is_free:
                self._arm(entry)

    def expire(self, before_ms: int) -> None:
        """Answer the callers of writes that were admitted before `before_ms` with an error, so that no caller waits for
        ever. Settlements have no callers and wait on."""
        for write in self.committing.values():
            if write.admitted_at_ms < before_ms and write.waiters:
                write.fail_waiters(OutcomeUnknown("The store has not answered in time; the write may still be applied"))
                write.waiters = []
                write.waiters_timed_out = True
        expired = [key for key, write in self.pending.items() if write.admitted_at_ms < before_ms and write.waiters]
        for key in expired:
            write = self.pending[key]
            if key in self.committing:
                # It depends on the write in flight, whose outcome is unknown, and is decided together with it.
                write.fail_waiters(OutcomeUnknown("An earlier write of this timer is not decided yet"))
                write.waiters = []
                write.waiters_timed_out = True
                continue
            write.fail_waiters(
                StoreUnavailable(
                    self.last_commit_error or "The store could not be written to in time; nothing was applied"
                )
            )
            write.waiters = []
            if write.settlement is not None:
                write.put = write.settlement.rearmed
                write.reached = [] if write.settlement.reached is None else [write.settlement.reached]
                continue
            del self.pending[key]
            self._counters.writes_waiting -= 1
            self._restore(key, write.previous_entry)

    # --- memory -----------------------------------------------------------------------------------

    def _apply(self, key: TimerKey, timer: Timer | None) -> None:
        """A write is on disk: memory gets the new timer, or none if it was deleted or is beyond the horizon."""
        if self._changed_during_load is not None:
            self._changed_during_load[key] = timer
        if self._unreadable_keys and key in self._unreadable_keys:
            self._unreadable_keys.discard(key)
            rows = self.unreadable.items()
            self.unreadable = {at: row for at, row in rows if (row.namespace, row.timer_id) != key}
        old = self.entries.pop(key, None)
        if old is not None:
            self._remove_entry(old)
        if timer is not None and timer.execute_at_ms <= self.horizon.execute_at_ms and timer.position <= self.horizon:
            self._add_entry(key, timer)

    def _add_entry(self, key: TimerKey, timer: Timer) -> None:
        entry = Entry(timer, self)
        self.entries[key] = entry
        self._host.add_weight(entry.weight)
        write = self.committing.get(key) or self.pending.get(key)
        if write is not None:
            write.previous_entry = entry
        elif key not in self._key_locks:
            self._arm(entry)

    def _arm(self, entry: Entry) -> None:
        """Wait for the due time; a timer whose due time has passed is due at once."""
        if self.recovering:
            self.wait_for_recovery(entry)
            return
        entry.phase = _ARMED
        self._host.arm(entry)

    def wait_for_recovery(self, entry: Entry) -> None:
        """Do not fire this timer before the recovery has ended."""
        entry.phase = _WRITING
        self.due_during_recovery.append(entry)

    def _restore(self, key: TimerKey, previous_entry: Entry | None) -> None:
        """A write was not applied: the timer continues where it was before the write."""
        if previous_entry is None or self.entries.get(key) is not previous_entry or self.has_pending_write(key):
            return
        if previous_entry.deferred_settlement is not None:
            settlement, previous_entry.deferred_settlement = previous_entry.deferred_settlement, None
            self._settle(previous_entry, settlement)
        elif previous_entry.started_at_ms:
            previous_entry.phase = _SENDING
        else:
            self._arm(previous_entry)

    def _remove_entry(self, entry: Entry) -> None:
        if entry.phase is _ARMED:
            self._host.disarm(entry)
        entry.phase = _GONE
        self._host.add_weight(-entry.weight)

    # --- loading: called by look-ahead ------------------------------------------------------------

    def begin_load(self) -> None:
        self.loading = True
        self._changed_during_load = {}

    def end_load(self, page: Page | None, until_ms: int) -> None:
        """A page was read (None: the read failed). Timers that were written since the load began are taken from memory
        and not from the page, which may be older."""
        changed, self._changed_during_load = self._changed_during_load or {}, None
        self.loading = False
        if page is None or self.state is _DROPPED:
            return
        horizon = page.next if page.next is not None else end_of(until_ms)
        old_horizon, self.horizon = self.horizon, max(self.horizon, horizon)
        for timer in page.timers:
            key = timer.key
            if key not in changed and key not in self.entries:
                self._add_entry(key, timer)
        for row in page.unreadable:
            self._add_unreadable(row, changed)
        for key, written in changed.items():
            if written is not None and key not in self.entries and old_horizon < written.position <= self.horizon:
                self._add_entry(key, written)

    def _add_unreadable(self, row: Unreadable, changed: dict[TimerKey, Timer | None]) -> None:
        if (row.namespace, row.timer_id) in changed or row.position in self.unreadable:
            return
        if len(self.unreadable) >= _UNREADABLE_MAX:
            self._unreadable_truncated = True
            return
        self.unreadable[row.position] = row
        self._unreadable_keys.add((row.namespace, row.timer_id))
        log.error(
            "timer %r of namespace %r (shard %d) cannot be decoded and does not fire; create it again or delete it: %s",
            row.timer_id,
            row.namespace,
            self.shard_id,
            row.error,
        )

    def shrink(self, cutoff_ms: int) -> None:
        """Remove armed timers due after the cutoff from memory, and move the horizon back, so that they are loaded
        again."""
        if self.loading or cutoff_ms >= self.horizon.execute_at_ms:
            return
        self.horizon = end_of(cutoff_ms)
        removed = [
            key
            for key, entry in self.entries.items()
            if entry.phase is _ARMED and entry.timer.execute_at_ms > cutoff_ms
        ]
        for key in removed:
            self._remove_entry(self.entries.pop(key))

    # --- firing: called by the fire loop ----------------------------------------------------------

    def begin(self, entry: Entry, now_ms: int, *, again: bool) -> bool:
        """Right before the first byte: may this attempt still be made? If so, it counts as in flight from here on.

        `again`: the same attempt is sent once more, because a kept-alive connection turned out to be closed.
        """
        if self.recovering or self.state is _DROPPED:
            return False  # it may not be ours any more
        if again:
            return entry.phase is _SENDING
        if self.state is not _OPEN or entry.phase is not _QUEUED:
            return False
        entry.phase = _SENDING
        entry.started_at_ms = now_ms
        key = entry.timer.key
        self.sending[key] = self.sending.get(key, 0) + 1
        return True

    def _attempt_ended(self, key: TimerKey) -> None:
        in_flight = self.sending[key] - 1
        if in_flight:
            self.sending[key] = in_flight
        else:
            del self.sending[key]

    def not_sent(self, entry: Entry, *, begun: bool) -> None:
        """The attempt was not made: the timer is armed again, unless it has changed meanwhile."""
        if begun:
            self._attempt_ended(entry.timer.key)
            entry.started_at_ms = 0
        if entry.phase is (_SENDING if begun else _QUEUED):
            self._arm(entry)

    def settle(self, entry: Entry, settlement: Settlement) -> bool:
        """Record the result of an attempt. False: the timer has changed meanwhile, the result is not recorded."""
        self._attempt_ended(entry.timer.key)
        if self.state is _DROPPED:
            return False
        if entry.phase is _SENDING:
            self._settle(entry, settlement)
            return True
        # A write of this timer is pending. If it is not applied, the result counts after all.
        entry.deferred_settlement = settlement
        return False

    def settle_without_attempt(self, entry: Entry, settlement: Settlement) -> None:
        """Record an outcome without an attempt (a missed-fire policy), or a timer that is parked."""
        self._settle(entry, settlement)

    def _settle(self, entry: Entry, settlement: Settlement) -> None:
        entry.phase = _SETTLING
        entry.started_at_ms = 0
        reached = [] if settlement.reached is None else [settlement.reached]
        write = PendingWrite(settlement.rearmed, reached, [], self._host.boot_ms())
        write.settlement = settlement
        self._counters.unsettled += 1
        self._admit(entry.timer.key, write)
