"""What the next commit does to one timer, and the callers that wait for it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Final

from duetime.domain.settle import Settlement
from duetime.domain.timer import NO_EXTRAS, Reached, Timer, TimerKey
from duetime.domain.wall_clock import ScheduleState
from duetime.engine.weight import timer_bytes
from duetime.errors import DuetimeError
from duetime.store import Found

if TYPE_CHECKING:
    from duetime.engine.shard import Entry

__all__ = ["PendingWrite", "Waiter", "WriteResult", "in_turns"]

# The result of a write: the timer as written, and whether it replaced one. None: not known, because the store's answer
# was lost.
WriteResult = tuple[Timer | None, bool | None]

_ROW_CHARS_MIN: Final = 200  # the short columns of a row, together
_WRITE_BYTES: Final = 700  # of a pending write without its timers: with its waiter, futures and places in dictionaries


class Waiter:
    """A caller that waits for the result of a write. `replaced is None`: the store will say."""

    __slots__ = ("future", "replaced", "timer")

    def __init__(self, future: asyncio.Future[WriteResult], timer: Timer | None, replaced: bool | None):
        self.future = future
        self.timer = timer
        self.replaced = replaced


class PendingWrite:
    """What the next commit does to one timer: put it (or delete it), and record what it reached."""

    __slots__ = (
        "admitted_at_ms",
        "previous_entry",
        "put",
        "reached",
        "settlement",
        "waiters",
        "waiters_timed_out",
        "weight",
    )

    def __init__(self, put: Timer | None, reached: list[Reached], waiters: list[Waiter], admitted_at_ms: int) -> None:
        self.put = put
        self.reached = reached
        self.waiters = waiters
        self.admitted_at_ms = admitted_at_ms
        self.previous_entry: Entry | None = None  # what memory holds; it is restored if the write is not applied
        self.waiters_timed_out = False  # callers were answered "outcome unknown" before the write was decided
        # Of the attempt that this write records. If commands that were merged into the write expire, this remains.
        self.settlement: Settlement | None = None
        # In bytes, of all writes that were merged into it: their waiters hold what they wanted to write.
        self.weight = _WRITE_BYTES
        if put is not None:
            self.weight += timer_bytes(put)
        for row in reached:
            self.weight += timer_bytes(row.timer)

    @classmethod
    def of_settlement(cls, settlement: Settlement, admitted_at_ms: int) -> PendingWrite:
        """It holds no more than its entry, which is counted with the timers in memory until it is committed."""
        write = cls(None, [], [], admitted_at_ms)
        write.settlement = settlement
        write.put = settlement.rearmed
        if settlement.reached is not None:
            write.reached.append(settlement.reached)
        return write

    @property
    def chars(self) -> int:
        """The approximate number of characters in its rows."""
        chars = 0 if self.put is None else _row_chars(self.put)
        for row in self.reached:
            chars += _row_chars(row.timer)
        return chars

    @property
    def is_abandoned(self) -> bool:
        """If this write turns out not to be applied, may it be given up? Only if all its callers were already answered
        that the outcome is unknown, and it records no settlement."""
        return self.waiters_timed_out and not self.waiters and self.settlement is None

    def merge(self, later: PendingWrite) -> None:
        """Merge a later write of the same timer into this one: the later state is written, all waiters are kept."""
        self.put = later.put
        self.reached += later.reached
        self.waiters += later.waiters
        self.weight += later.weight

    def forget_commands(self) -> int:
        """Only the settlement remains of what was merged into this write. Returns by how much it is lighter."""
        assert self.settlement is not None
        self.put = self.settlement.rearmed
        self.reached = [] if self.settlement.reached is None else [self.settlement.reached]
        lighter = self.weight - _WRITE_BYTES
        self.weight = _WRITE_BYTES
        return lighter

    def fail_waiters(self, error: DuetimeError) -> None:
        for waiter in self.waiters:
            if not waiter.future.done():
                waiter.future.set_exception(error)

    def is_applied(self, found: Found) -> bool:
        """Does the store hold what this write wanted? After a delete only the reached row shows it."""
        if found.timer != self.put or found.unreadable is not None:
            return False
        kept = [row for row in self.reached if row.purge_at_ms > row.reached_at_ms]
        return self.put is not None or not kept or found.reached == kept[-1]


def _row_chars(timer: Timer) -> int:
    """The approximate number of characters in a row; rather too many, because quotes in headers are escaped, perhaps
    twice."""
    chars = _ROW_CHARS_MIN + len(timer.callback_url)
    if timer.payload is not None:
        chars += len(timer.payload)
    extras = timer.extras
    if extras is not NO_EXTRAS:
        if extras.headers:
            chars += 4 * sum(len(name) + len(value) for name, value in extras.headers.items())
        if extras.command is not None:
            chars += len(extras.command.stream) + 40
        if isinstance(extras.later, ScheduleState) and extras.later.schedule is not None:
            chars += 200 + extras.later.schedule.chars
        chars += 4 * (sum(map(len, extras.tags)) + len(extras.last_error or ""))
    return chars


def in_turns(keys: list[TimerKey], count: int) -> list[TimerKey]:
    """The first `count` of these keys if their namespaces get turns, one key each. The keys of one namespace keep their
    order, and the namespace with the oldest key is the first."""
    by_namespace: dict[str, list[TimerKey]] = {}
    for key in keys:
        by_namespace.setdefault(key.namespace, []).append(key)
    turns = deque(map(iter, by_namespace.values()))
    ordered: list[TimerKey] = []
    while turns and len(ordered) < count:
        keys_left = turns.popleft()
        following = next(keys_left, None)
        if following is not None:
            ordered.append(following)
            turns.append(keys_left)
    return ordered
