"""One owned shard: admit -> commit -> heap -> fire -> settle.

A Shard is the single place where the timers of a shard change. It holds, per timer:

- an `Entry` in memory, for every timer whose position is within the horizon, and for no other;
- at most one `PendingWrite` waiting for the next commit and one in the commit under way. Later wishes about the
  same timer merge into the waiting Op, so a batch never names a timer twice.

Two rules keep it honest. Memory changes only *after* a commit: an Entry shows what is on disk. And from
the moment an Op is admitted until its commit is decided, its timer does not fire (phase WRITING), so that
the verdict given with the Op stays true.

No I/O here: lanes (group_commit.py) commit the Ops, the engine loads pages and fires. What the Shard needs of the
world comes as `ShardHost`.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, Protocol

from duetime.domain.settle import Settlement
from duetime.domain.timer import BEFORE_ALL, NO_EXTRAS, Position, Reached, Timer, TimerKey
from duetime.errors import Busy, DuetimeError, NotOwner, OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Committed, Fence, Found, Page, ShardRow, Unreadable
from duetime.telemetry import log

__all__ = ["UNKNOWN", "Entry", "PendingWrite", "Phase", "Shard", "ShardHost", "Unknown", "Written"]

# The result of a write: the timer as written, and whether it replaced one. None: not known, because the store's answer
# was lost.
Written = tuple[Timer | None, bool | None]

_HIGHEST: Final = 2**63 - 1
_ROW_CHARS: Final = 200  # of what is short
_UNREADABLE_MAX: Final = 1_000


def end_of(execute_at_ms: int) -> Position:
    """The last position of a millisecond."""
    return Position(execute_at_ms, _HIGHEST, _HIGHEST)


class Unknown(enum.Enum):
    """Memory does not know whether there is such a timer: ask the store."""

    UNKNOWN = 0


UNKNOWN: Final = Unknown.UNKNOWN


class Phase(enum.Enum):
    ARMED = 0  # in the heap
    QUEUED = 1  # due, waiting for its destination
    SENDING = 2  # in flight
    SETTLING = 3  # its outcome waits for a commit
    WRITING = 4  # a write about it waits for a commit: it does not fire
    GONE = 5  # replaced, deleted, or the shard is not ours any more


# A global look-up of an enum member costs as much as the comparison it is for.
_ARMED, _QUEUED, _SENDING = Phase.ARMED, Phase.QUEUED, Phase.SENDING
_SETTLING, _WRITING, _GONE = Phase.SETTLING, Phase.WRITING, Phase.GONE


class Entry:
    """A timer in memory."""

    __slots__ = ("outcome_of", "phase", "shard", "started_at_ms", "ticket", "timer")

    def __init__(self, timer: Timer, shard: Shard) -> None:
        self.timer = timer
        self.shard = shard
        self.phase = _WRITING
        self.ticket = 0  # its place in the engine's heap while ARMED
        self.started_at_ms = 0  # of the attempt in flight
        self.outcome_of: Settlement | None = None  # came in while a write about the timer was on its way

    @property
    def weight(self) -> int:
        payload = self.timer.payload
        return 1 if payload is None else 1 + (len(payload) >> 10)


class Waiter:
    """Somebody to tell when an Op is decided. `replaced is None`: the store will say."""

    __slots__ = ("future", "replaced", "timer")

    def __init__(self, future: asyncio.Future[Written], timer: Timer | None, replaced: bool | None):
        self.future = future
        self.timer = timer
        self.replaced = replaced


class PendingWrite:
    """What the next commit does to one timer: put it (or delete it), and record what it reached."""

    __slots__ = ("prior", "put", "reached", "settlement", "since_ms", "told", "waiters")

    def __init__(self, put: Timer | None, reached: list[Reached], waiters: list[Waiter], since_ms: int) -> None:
        self.put = put
        self.reached = reached
        self.waiters = waiters
        self.since_ms = since_ms
        self.prior: Entry | None = None  # what memory held, to go back to if the Op comes to nothing
        self.told = False  # its users gave up waiting
        self.settlement: Settlement | None = None  # what it goes back to if users' wishes merged into it expire

    @property
    def chars(self) -> int:
        """Of the texts in its rows that may be long."""
        chars = 0 if self.put is None else _chars_of(self.put)
        for row in self.reached:
            chars += _chars_of(row.timer)
        return chars

    @property
    def is_given_up(self) -> bool:
        """A user's, who was told that nobody knows; and then it turned out that it was not applied."""
        return self.told and not self.waiters and self.settlement is None

    def then(self, later: PendingWrite) -> None:
        """Merge a later Op into this one: its state wins, everybody is told."""
        self.put = later.put
        self.reached += later.reached
        self.waiters += later.waiters


def _chars_of(timer: Timer) -> int:
    """Of a row, about and rather too many: quotes in headers are escaped, perhaps twice."""
    chars = _ROW_CHARS + len(timer.callback_url)
    if timer.payload is not None:
        chars += len(timer.payload)
    extras = timer.extras
    if extras is not NO_EXTRAS:
        if extras.headers:
            chars += 4 * sum(len(name) + len(value) for name, value in extras.headers.items())
        chars += 4 * (sum(map(len, extras.tags)) + len(extras.last_error or ""))
    return chars


class ShardHost(Protocol):
    """What surrounds a shard: the engine's heap, its memory account and the shard's lane."""

    writes_waiting: int
    writes_waiting_max: int
    unsettled: int  # outcomes that wait for a commit

    def arm(self, entry: Entry) -> None: ...
    def disarm(self, entry: Entry) -> None: ...
    def remember(self, weight: int) -> None: ...
    def written(self, shard: Shard) -> None:
        """The shard has something to commit."""
        ...

    def boot_ms(self) -> int: ...


class Shard:
    def __init__(self, row: ShardRow, yard: ShardHost) -> None:
        self.shard_id = row.shard_id
        self.fence: Fence = row.fence
        self.fenced_at_ms = yard.boot_ms()  # when this fence was learnt
        self.low_water = row.low_water
        self.horizon = row.low_water
        self.entries: dict[TimerKey, Entry] = {}
        self.pending: dict[TimerKey, PendingWrite] = {}
        self.committing: dict[TimerKey, PendingWrite] = {}
        self.committing_rows = 0
        self.committing_chars = 0
        self.recovering = False  # the outcome of a commit is unknown: nothing is written or fired until it is known
        self.draining = False  # being moved to another instance: starts no delivery
        self.closing = False  # and takes no more writes
        self.dropped = False
        self.loading = False
        self.sending: dict[TimerKey, int] = {}  # deliveries under way
        self.trouble = ""  # why the last batch was not applied; empty: it was
        self.stalled: list[Entry] = []  # due, but waiting for the end of a recovery
        # Stored rows that cannot be decoded: they do not fire. The first ones; how many more there are is not known.
        self.unreadable: dict[Position, Unreadable] = {}
        self._unreadable_keys: set[tuple[str, str]] = set()
        self._unreadable_more = False
        self._host = yard
        self._loop = asyncio.get_running_loop()  # asking for it costs a system call each time
        self._counter = 0
        self._key_locks: dict[TimerKey, asyncio.Future[None]] = {}
        self._touched: dict[TimerKey, Timer | None] | None = None  # decided while a page load is under way

    # --- admitting wishes -------------------------------------------------------------------------

    def next_generation(self) -> int:
        self._counter += 1
        return self.fence.version << 32 | self._counter

    def current(self, key: TimerKey) -> Timer | Unknown | None:
        """The timer as it will be once everything admitted is committed."""
        op = self.pending.get(key) or self.committing.get(key)
        if op is not None:
            return op.put
        entry = self.entries.get(key)
        return UNKNOWN if entry is None else entry.timer

    def undecided(self, key: TimerKey) -> asyncio.Future[Written] | None:
        """Done when what was admitted last about this timer is on disk, or is certainly not; None: nothing is."""
        op = self.pending.get(key) or self.committing.get(key)
        if op is None:
            return None
        future: asyncio.Future[Written] = self._loop.create_future()
        op.waiters.append(Waiter(future, op.put, True))
        return future

    def is_sending(self, key: TimerKey) -> bool:
        """Is a delivery of this timer under way, of whatever generation?"""
        return key in self.sending

    def write(
        self,
        key: TimerKey,
        put: Timer | None,
        reached: list[Reached],
        *,
        replaced: bool | None = None,
    ) -> asyncio.Future[Written]:
        """Admit a wish about one timer; the future is done when it is on disk, or certainly is not.

        The caller has looked at `current` in the same turn of the loop, or waited in `key_lock`.
        """
        if self.closing or self.dropped:
            raise NotOwner
        if self._host.writes_waiting >= self._host.writes_waiting_max:
            raise Busy
        before = self.pending.get(key) or self.committing.get(key)
        if before is not None:
            replaced = before.put is not None
        elif key in self.entries:
            replaced = True
        future: asyncio.Future[Written] = self._loop.create_future()
        self._admit(key, PendingWrite(put, reached, [Waiter(future, put, replaced)], self._host.boot_ms()))
        return future

    def _admit(self, key: TimerKey, op: PendingWrite) -> None:
        waiting = self.pending.get(key)
        if waiting is not None:
            waiting.then(op)
            return
        entry = self.entries.get(key)
        if entry is not None:
            op.prior = entry
            if entry.phase is _ARMED:
                self._host.disarm(entry)
            if entry.phase is not _SETTLING:
                # One in flight is not called back, but its outcome will not settle what is written now.
                entry.phase = _WRITING
        self.pending[key] = op
        self._host.writes_waiting += 1
        self._host.written(self)

    @asynccontextmanager
    async def key_lock(self, key: TimerKey) -> AsyncIterator[None]:
        """Serialises commands that read a timer before they write it, in the order they arrived. Meanwhile the timer
        does not start to fire."""
        before = self._key_locks.get(key)
        turn = self._key_locks[key] = self._loop.create_future()
        if before is not None:
            try:
                await asyncio.shield(before)  # if this one is cancelled, the next must still wait for the one before
            except asyncio.CancelledError:
                before.add_done_callback(lambda _: self._end_turn(key, turn))
                raise
        try:
            yield
        finally:
            self._end_turn(key, turn)

    def _end_turn(self, key: TimerKey, turn: asyncio.Future[None]) -> None:
        turn.set_result(None)
        if self._key_locks.get(key) is not turn:
            return  # the next one is waiting
        del self._key_locks[key]
        entry = self.entries.get(key)
        if entry is not None and entry.phase is _WRITING and not self.is_written(key):
            self._rest(entry)

    def is_held(self, key: TimerKey) -> bool:
        """Is somebody reading this timer in order to write it?"""
        return key in self._key_locks

    def is_written(self, key: TimerKey) -> bool:
        """Is a write of this timer waiting for a commit?"""
        return key in self.pending or key in self.committing

    # --- committing: called by the lane -----------------------------------------------------------

    def next_batch(self, room: int, chars: int) -> Batch | None:
        """Ops of up to `room` rows, and about so many characters, as a batch; they are committing from now
        on. At least one, whatever it weighs."""
        if self.recovering or self.dropped or self.committing or not self.pending:
            return None
        taken = self.committing_rows = self.committing_chars = 0
        for op in self.pending.values():
            rows = self.committing_rows + 1 + len(op.reached)
            if taken and (rows > room or self.committing_chars >= chars):
                break
            taken += 1
            self.committing_rows = rows
            self.committing_chars += op.chars
        if taken == len(self.pending):
            self.committing, self.pending = self.pending, {}
        else:
            for key in list(self.pending)[:taken]:
                self.committing[key] = self.pending.pop(key)
        puts: list[Timer] = []
        deletes: list[TimerKey] = []
        reached: list[Reached] = []
        lowest_ms = low_water_ms = self.low_water.execute_at_ms
        for key, op in self.committing.items():
            if op.put is None:
                deletes.append(key)
            else:
                puts.append(op.put)
                if op.put.execute_at_ms <= lowest_ms:
                    lowest_ms = op.put.execute_at_ms - 1
            if op.reached:
                reached += [row for row in op.reached if row.purge_at_ms > row.reached_at_ms]
        # A put below the low water takes it down with it, in the same batch, or a restart would miss it.
        low_water = end_of(lowest_ms) if lowest_ms < low_water_ms else None
        return Batch(self.fence, puts, deletes, reached, low_water)

    def raise_low_water(self, batch: Batch) -> Batch:
        """The same batch, carrying the highest low water that is true once it is written."""
        lowest_ms = self.horizon.execute_at_ms
        for entry in self.entries.values():
            lowest_ms = min(lowest_ms, entry.timer.execute_at_ms)
        for put in batch.puts:
            lowest_ms = min(lowest_ms, put.execute_at_ms)
        for position in self.unreadable:  # another version may be able to read it
            lowest_ms = min(lowest_ms, position.execute_at_ms)
        if lowest_ms - 1 <= self.low_water.execute_at_ms or self._unreadable_more:
            return batch
        low_water = end_of(lowest_ms - 1)
        return Batch(batch.fence, batch.puts, batch.deletes, batch.reached, low_water)

    def committed(self, batch: Batch, result: Committed) -> None:
        """The batch is on disk: memory follows, and everybody is told."""
        self.trouble = ""
        if batch.low_water is not None:
            self.low_water = batch.low_water
        replaced: set[TimerKey] | frozenset[TimerKey] = frozenset()
        if result.replaced:
            replaced = {batch.puts[index].key for index in result.replaced}
        ops, self.committing = self.committing, {}
        self._host.writes_waiting -= len(ops)
        for key, op in ops.items():
            if op.settlement is not None:
                self._host.unsettled -= 1
            self._apply(key, op.put)
            for waiter in op.waiters:
                if not waiter.future.done():
                    was_there = waiter.replaced
                    waiter.future.set_result((waiter.timer, key in replaced if was_there is None else was_there))
        if self.pending:
            self._host.written(self)

    def not_committed(self, why: str = "") -> None:
        """The batch was certainly not applied: its Ops wait again, merged with what came meanwhile."""
        self.trouble = why
        ops, self.committing = self.committing, {}
        for key in [key for key, op in ops.items() if op.is_given_up and key not in self.pending]:
            self._host.writes_waiting -= 1
            self._restore(key, ops.pop(key).prior)
        self._requeue(ops)

    def _requeue(self, ops: dict[TimerKey, PendingWrite]) -> None:
        for key, op in ops.items():
            later = self.pending.get(key)
            if later is not None:
                op.then(later)
                self._host.writes_waiting -= 1
            self.pending[key] = op
        if self.pending:
            self._host.written(self)

    def recovered(self, row: ShardRow, found: dict[TimerKey, Found]) -> None:
        """After an unknown outcome: the shard was claimed again, so what `found` says is final."""
        self.fence = row.fence
        self.fenced_at_ms = self._host.boot_ms()
        self.low_water = row.low_water
        self._counter = 0
        self.recovering = False
        stalled, self.stalled = self.stalled, []
        ops, self.committing = self.committing, {}
        again: dict[TimerKey, PendingWrite] = {}
        for key, op in ops.items():
            if not _is_there(op, found[key]):
                again[key] = op
                continue
            self._host.writes_waiting -= 1
            if op.settlement is not None:
                self._host.unsettled -= 1
            self._apply(key, op.put)
            for waiter in op.waiters:
                if not waiter.future.done():
                    waiter.future.set_result((waiter.timer, waiter.replaced))
        self._requeue(again)
        for entry in stalled:
            key = entry.timer.key
            # Once only, however often it was stalled: after the first time it is ARMED.
            is_free = not self.is_written(key) and key not in self._key_locks
            if entry.phase is _WRITING and self.entries.get(key) is entry and is_free:
                self._rest(entry)

    def expire(self, before_ms: int) -> None:
        """Nobody waits for ever: users whose write is older than this are answered. Settles stay."""
        for op in self.committing.values():
            if op.since_ms < before_ms and op.waiters:
                _tell(op, OutcomeUnknown("The store has not answered in time; the write may still be applied"))
                op.waiters = []
                op.told = True
        expired = [key for key, op in self.pending.items() if op.since_ms < before_ms and op.waiters]
        for key in expired:
            op = self.pending[key]
            if key in self.committing:
                # It builds on one whose outcome is open, and is decided with it.
                _tell(op, OutcomeUnknown("An earlier write about this timer is not decided yet"))
                op.waiters = []
                op.told = True
                continue
            _tell(
                op, StoreUnavailable(self.trouble or "The store could not be written to in time; nothing was applied")
            )
            op.waiters = []
            if op.settlement is not None:
                op.put = op.settlement.rearmed
                op.reached = [] if op.settlement.reached is None else [op.settlement.reached]
                continue
            del self.pending[key]
            self._host.writes_waiting -= 1
            self._restore(key, op.prior)

    # --- memory -----------------------------------------------------------------------------------

    def _apply(self, key: TimerKey, timer: Timer | None) -> None:
        """What is on disk now is this: a new entry, no entry, or one beyond the horizon."""
        if self._touched is not None:
            self._touched[key] = timer
        if self._unreadable_keys and key in self._unreadable_keys:
            self._unreadable_keys.discard(key)
            rows = self.unreadable.items()
            self.unreadable = {at: row for at, row in rows if (row.namespace, row.timer_id) != key}
        old = self.entries.pop(key, None)
        if old is not None:
            self._forget(old)
        if timer is not None and timer.execute_at_ms <= self.horizon.execute_at_ms and timer.position <= self.horizon:
            self._place(key, timer)

    def _place(self, key: TimerKey, timer: Timer) -> None:
        entry = Entry(timer, self)
        self.entries[key] = entry
        self._host.remember(entry.weight)
        waiting = self.committing.get(key) or self.pending.get(key)
        if waiting is not None:
            waiting.prior = entry
        elif key not in self._key_locks:
            self._rest(entry)

    def _rest(self, entry: Entry) -> None:
        """Wait for the due time; a timer of the past is due at once."""
        if self.recovering:
            self.stall(entry)
            return
        entry.phase = _ARMED
        self._host.arm(entry)

    def stall(self, entry: Entry) -> None:
        entry.phase = _WRITING
        self.stalled.append(entry)

    def _restore(self, key: TimerKey, prior: Entry | None) -> None:
        """A write came to nothing: the timer is again what it was."""
        if prior is None or self.entries.get(key) is not prior or self.is_written(key):
            return
        if prior.outcome_of is not None:
            settlement, prior.outcome_of = prior.outcome_of, None
            self._settle(prior, settlement)
        elif prior.started_at_ms:
            prior.phase = _SENDING
        else:
            self._rest(prior)

    def _forget(self, entry: Entry) -> None:
        if entry.phase is _ARMED:
            self._host.disarm(entry)
        entry.phase = _GONE
        self._host.remember(-entry.weight)

    # --- loading: called by the engine ------------------------------------------------------------

    def load_begins(self) -> None:
        self.loading = True
        self._touched = {}

    def load_ended(self, page: Page | None, until_ms: int) -> None:
        """A page came (None: it did not). For whatever was decided since the load began, memory wins."""
        touched, self._touched = self._touched or {}, None
        self.loading = False
        if page is None or self.dropped:
            return
        horizon = page.next if page.next is not None else end_of(until_ms)
        old_horizon, self.horizon = self.horizon, max(self.horizon, horizon)
        for timer in page.timers:
            key = timer.key
            if key not in touched and key not in self.entries:
                self._place(key, timer)
        for row in page.unreadable:
            self._set_aside(row, touched)
        for key, decided in touched.items():
            if decided is not None and key not in self.entries and old_horizon < decided.position <= self.horizon:
                self._place(key, decided)

    def _set_aside(self, row: Unreadable, touched: dict[TimerKey, Timer | None]) -> None:
        if (row.namespace, row.timer_id) in touched or row.position in self.unreadable:
            return
        if len(self.unreadable) >= _UNREADABLE_MAX:
            self._unreadable_more = True
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
        """Memory is short: forget what is armed for after the cutoff; the horizon moves back with it."""
        if self.loading or cutoff_ms >= self.horizon.execute_at_ms:
            return
        self.horizon = end_of(cutoff_ms)
        gone = [
            key
            for key, entry in self.entries.items()
            if entry.phase is _ARMED and entry.timer.execute_at_ms > cutoff_ms
        ]
        for key in gone:
            self._forget(self.entries.pop(key))

    # --- firing -----------------------------------------------------------------------------------

    def begin(self, entry: Entry, now_ms: int, *, again: bool) -> bool:
        """Right before the first byte: is this attempt still wanted? From here on it counts as in flight.

        `again`: the same attempt once more, because a kept-alive connection turned out dead.
        """
        if self.dropped or self.recovering:
            return False
        if again:
            return entry.phase is _SENDING
        if self.draining or entry.phase is not _QUEUED:
            return False
        entry.phase = _SENDING
        entry.started_at_ms = now_ms
        key = entry.timer.key
        self.sending[key] = self.sending.get(key, 0) + 1
        return True

    def _landed(self, key: TimerKey) -> None:
        under_way = self.sending[key] - 1
        if under_way:
            self.sending[key] = under_way
        else:
            del self.sending[key]

    def not_sent(self, entry: Entry, *, begun: bool) -> None:
        """The attempt was not made after all: the timer waits again, if it is still that one."""
        if begun:
            self._landed(entry.timer.key)
            entry.started_at_ms = 0
        if entry.phase is (_SENDING if begun else _QUEUED):
            self._rest(entry)

    def settle(self, entry: Entry, settlement: Settlement) -> bool:
        """Record what became of an attempt. False: the timer has changed meanwhile, the outcome is stale."""
        self._landed(entry.timer.key)
        if self.dropped:
            return False
        if entry.phase is _SENDING:
            self._settle(entry, settlement)
            return True
        # A write about this timer is on its way. If it comes to nothing, the outcome counts after all.
        entry.outcome_of = settlement
        return False

    def end_unfired(self, entry: Entry, settlement: Settlement) -> None:
        """Record an end without an attempt (a missed-fire policy, or a timer put back for later)."""
        self._settle(entry, settlement)

    def _settle(self, entry: Entry, settlement: Settlement) -> None:
        entry.phase = _SETTLING
        entry.started_at_ms = 0
        reached = [] if settlement.reached is None else [settlement.reached]
        op = PendingWrite(settlement.rearmed, reached, [], self._host.boot_ms())
        op.settlement = settlement
        self._host.unsettled += 1
        self._admit(entry.timer.key, op)

    # --- letting go -------------------------------------------------------------------------------

    @property
    def is_quiet(self) -> bool:
        return not (self.pending or self.committing or self.sending)

    def drop(self, error: DuetimeError, unknown: DuetimeError | None = None) -> None:
        """Not ours any more: forget everything. Who waits is told `error`, or `unknown` if the outcome is."""
        self.dropped = True
        for ops, reason in ((self.committing, unknown or error), (self.pending, error)):
            for op in ops.values():
                _tell(op, reason)
                if op.settlement is not None:
                    self._host.unsettled -= 1
            self._host.writes_waiting -= len(ops)
        self.committing, self.pending = {}, {}
        for entry in self.entries.values():
            self._forget(entry)
        self.entries = {}
        self.horizon = BEFORE_ALL


def _is_there(op: PendingWrite, found: Found) -> bool:
    """Does the store hold what the Op wanted? A delete leaves nothing but the row that says how it ended."""
    if found.timer != op.put or found.unreadable is not None:
        return False
    kept = [row for row in op.reached if row.purge_at_ms > row.reached_at_ms]
    return op.put is not None or not kept or found.reached == kept[-1]


def _tell(op: PendingWrite, error: DuetimeError) -> None:
    for waiter in op.waiters:
        if not waiter.future.done():
            waiter.future.set_exception(error)
