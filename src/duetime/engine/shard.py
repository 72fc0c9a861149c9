"""One owned shard: admit a write -> commit it -> heap -> fire -> settle.

A Shard is the only place where the timers of a shard change. It holds, per timer:

- an `Entry` in memory, for every timer that is within its `Window`, and for no other;
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
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Final

from duetime.domain.settle import Settlement
from duetime.domain.timer import Position, Reached, Timer, TimerKey
from duetime.engine.entry import Entry, Phase
from duetime.engine.pending_write import PendingWrite, Waiter, WriteResult, in_turns
from duetime.engine.shard_host import ShardHost, ShardState
from duetime.engine.unreadable_rows import UnreadableRows
from duetime.engine.window import Load, Window, end_of
from duetime.errors import Busy, DuetimeError, NotOwner, OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Committed, Fence, Found, Page, ShardRow

__all__ = ["UNKNOWN", "Entry", "Phase", "Shard", "ShardHost", "ShardState", "Unknown", "end_of"]


class Unknown(enum.Enum):
    """Memory does not know whether there is such a timer: read the store."""

    UNKNOWN = 0


UNKNOWN: Final = Unknown.UNKNOWN


# Looking up an enum member through its class costs as much as the comparison it is for.
_ARMED, _QUEUED, _SENDING = Phase.ARMED, Phase.QUEUED, Phase.SENDING
_SETTLING, _WRITING, _GONE = Phase.SETTLING, Phase.WRITING, Phase.GONE


_OPEN, _DRAINING, _CLOSING, _DROPPED = ShardState.OPEN, ShardState.DRAINING, ShardState.CLOSING, ShardState.DROPPED


class Shard:
    def __init__(self, row: ShardRow, host: ShardHost) -> None:
        self.shard_id = row.shard_id
        self.fence: Fence = row.fence
        self.fenced_at_ms = host.boot_ms()  # when this fence was learnt
        self.low_water = row.low_water
        self.window = Window(row.low_water)
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
        self.unreadable = UnreadableRows(row.shard_id)
        self._host = host
        self._counters = host.counters
        self._loop = asyncio.get_running_loop()  # get_running_loop() costs a system call each time
        self._generations = 0  # made under this fence
        self._key_locks: dict[TimerKey, asyncio.Future[None]] = {}  # by key, the lock that was asked for last
        self._load: Load | None = None  # the page that is being read
        self._changed_during_load: dict[TimerKey, Timer | None] | None = None  # None: no page is being read

    # --- state ------------------------------------------------------------------------------------

    @property
    def horizon(self) -> Position:
        return self.window.horizon

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
        for entry in self.entries.values():
            if entry.phase is _QUEUED:
                self._host.discard(entry)  # its next owner calls

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
            for key, write in writes.items():
                self._write_decided(key, write)
                write.fail_waiters(reason)
        self.committing, self.pending = {}, {}
        for entry in self.entries.values():
            self._remove_entry(entry)
        self.entries = {}
        self.window.clear()

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
        if not counters.has_room():
            self._check_room(key.namespace)
        before = self.pending.get(key) or self.committing.get(key)
        if before is not None:
            replaced = before.put is not None
        elif key in self.entries:
            replaced = True
        future: asyncio.Future[WriteResult] = self._loop.create_future()
        self._admit(key, PendingWrite(put, reached, [Waiter(future, put, replaced)], self._host.boot_ms()))
        return future

    def _check_room(self, namespace: str) -> None:
        if self._counters.is_full:
            raise Busy("Too many writes are waiting; nothing was applied")
        if self._counters.is_over_share(namespace):
            raise Busy(
                f"Too many writes of namespace {namespace!r} are waiting; nothing was applied", code="namespace_busy"
            )

    def _admit(self, key: TimerKey, write: PendingWrite) -> None:
        waiting = self.pending.get(key)
        if waiting is not None:
            waiting.merge(write)
            self._counters.add_bytes(key.namespace, write.weight)
            return
        entry = self.entries.get(key)
        if entry is not None:
            write.previous_entry = entry
            if entry.phase is _ARMED:
                self._host.disarm(entry)
            elif entry.phase is _QUEUED:
                self._host.discard(entry)
            if entry.phase is not _SETTLING:
                # A delivery in flight goes on, but its result must not settle what is written now.
                entry.phase = _WRITING
        self.pending[key] = write
        self._counters.add_write(key.namespace, write.weight)
        self._host.enqueue(self)

    def _write_decided(self, key: TimerKey, write: PendingWrite) -> None:
        """It is committed, certainly not applied, or not ours any more: it does not wait."""
        self._counters.remove_write(key.namespace, write.weight)
        if write.settlement is not None:
            self._counters.unsettled -= 1

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
        taken = self._measure(self.pending.values(), rows_max, chars_max)
        if taken == len(self.pending):
            self.committing, self.pending = self.pending, {}
        else:
            keys = list(self.pending)
            if self.is_contended:
                keys = in_turns(keys, rows_max)
                taken = self._measure([self.pending[key] for key in keys], rows_max, chars_max)
            for key in keys[:taken]:
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

    @property
    def is_contended(self) -> bool:
        """Do writes of several namespaces wait on this instance? Then each namespace gets its turn in every commit."""
        return len(self._counters.writes_of) > 1

    def _measure(self, writes: Iterable[PendingWrite], rows_max: int, chars_max: int) -> int:
        """How many of these writes, from the first on, make the next batch. Sets `committing_rows` and
        `committing_chars`."""
        taken = rows = chars = 0
        for write in writes:
            rows_with_it = rows + 1 + len(write.reached)
            if taken and (rows_with_it > rows_max or chars >= chars_max):
                break
            taken += 1
            rows = rows_with_it
            chars += write.chars
        self.committing_rows, self.committing_chars = rows, chars
        return taken

    def raise_low_water(self, batch: Batch) -> Batch:
        """The same batch, with the highest low-water mark that is correct once it is committed."""
        lowest_ms = self.window.complete_until.execute_at_ms
        for entry in self.entries.values():
            lowest_ms = min(lowest_ms, entry.timer.execute_at_ms)
        for put in batch.puts:
            lowest_ms = min(lowest_ms, put.execute_at_ms)
        for position in self.unreadable.rows:  # another version may be able to decode it, and must find it
            lowest_ms = min(lowest_ms, position.execute_at_ms)
        if lowest_ms - 1 <= self.low_water.execute_at_ms or self.unreadable.truncated:
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
        counters = self._counters
        if len(counters.writes_of) == 1:  # all of these writes are of this namespace
            (namespace,) = counters.writes_of
            counters.remove_write(namespace, sum([write.weight for write in writes.values()]), len(writes))
        else:
            for key, write in writes.items():
                counters.remove_write(key.namespace, write.weight)
        for key, write in writes.items():
            if write.settlement is not None:
                counters.unsettled -= 1
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
            write = writes.pop(key)
            self._write_decided(key, write)
            self._restore(key, write.previous_entry)
        self._requeue(writes)

    def _requeue(self, writes: dict[TimerKey, PendingWrite]) -> None:
        for key, write in writes.items():
            later = self.pending.get(key)
            if later is not None:
                self._counters.remove_write(key.namespace, later.weight)
                self._counters.add_bytes(key.namespace, later.weight)
                write.merge(later)
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
            self._write_decided(key, write)
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
                self._counters.add_bytes(key.namespace, -write.forget_commands())
                continue
            del self.pending[key]
            self._write_decided(key, write)
            self._restore(key, write.previous_entry)

    # --- memory -----------------------------------------------------------------------------------

    def _apply(self, key: TimerKey, timer: Timer | None) -> None:
        """A write is on disk: memory gets the new timer, or none if it was deleted or is beyond the horizon."""
        if self._changed_during_load is not None:
            self._changed_during_load[key] = timer
        if self.unreadable.rows:
            self.unreadable.discard(key)
        old = self.entries.pop(key, None)
        if old is not None:
            self._remove_entry(old)
        horizon = self.window.horizon
        if timer is None or timer.execute_at_ms > horizon.execute_at_ms:
            return
        if timer.execute_at_ms < horizon.execute_at_ms or timer.position <= horizon:
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
        elif entry.phase is _QUEUED:
            self._host.discard(entry)
        entry.phase = _GONE
        self._host.add_weight(-entry.weight)

    # --- loading: called by look-ahead ------------------------------------------------------------

    def begin_load(self, until_ms: int, *, backlog: bool = False) -> Load:
        """A page is read from now on: of the timers after the horizon, or of the backlog."""
        load = self.window.begin_backlog_load() if backlog else self.window.begin_load(until_ms)
        self.loading = True
        self._load = load
        self._changed_during_load = {}
        return load

    def end_load(self, page: Page | None, now_ms: int) -> None:
        """A page was read (None: the read failed). Timers that were written since the load began are taken from memory
        and not from the page, which may be older."""
        changed, self._changed_during_load = self._changed_during_load or {}, None
        load, self._load = self._load, None
        self.loading = False
        if page is None or load is None or self.state is _DROPPED:
            return
        end = self.window.end_load(load, page.next, now_ms)
        # The last millisecond of a backlog may go on beyond the horizon.
        timers = [timer for timer in page.timers if timer.position <= end] if load.is_backlog else page.timers
        for timer in timers:
            key = timer.key
            if key not in changed and key not in self.entries:
                self._add_entry(key, timer)
        for row in page.unreadable:
            if (row.namespace, row.timer_id) not in changed:
                self.unreadable.add(row)
        for key, written in changed.items():
            if written is not None and key not in self.entries and load.after < written.position <= end:
                self._add_entry(key, written)

    def shrink(self, cutoff_ms: int) -> None:
        """Remove armed timers due after the cutoff from memory, and move the horizon back, so that they are loaded
        again."""
        if self.loading or cutoff_ms >= self.horizon.execute_at_ms:
            return
        self.window.shrink(cutoff_ms)
        removed = [
            key
            for key, entry in self.entries.items()
            if entry.phase is _ARMED and entry.timer.execute_at_ms > cutoff_ms
        ]
        for key in removed:
            self._remove_entry(self.entries.pop(key))

    def spill(self, entry: Entry) -> bool:
        """Remove a timer that waits from memory. It is loaded again with the backlog. False: it may not leave."""
        timer = entry.timer
        key = timer.key
        if entry.phase is not _QUEUED and entry.phase is not _ARMED:
            return False
        if self.entries.get(key) is not entry or key in self._key_locks:
            return False
        self.window.add_to_backlog(timer.position)
        self._remove_entry(self.entries.pop(key))
        return True

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
        write = PendingWrite.of_settlement(settlement, self._host.boot_ms())
        self._counters.unsettled += 1
        self._admit(entry.timer.key, write)
