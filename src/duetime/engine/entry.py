"""A timer in memory, and what it is doing there."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from duetime.domain.settle import Settlement
from duetime.domain.timer import Timer
from duetime.engine.weight import timer_bytes

if TYPE_CHECKING:
    from duetime.engine.shard import Shard

__all__ = ["Entry", "Phase"]


class Phase(enum.Enum):
    """Of a timer in memory."""

    ARMED = 0  # in the heap
    QUEUED = 1  # due: in flow control, which may hold it
    SENDING = 2  # in flight
    SETTLING = 3  # its settlement waits for a commit
    WRITING = 4  # it does not fire: a write of it waits for a commit, or its key is locked, or the shard recovers
    GONE = 5  # replaced, deleted or removed from memory, or its shard was dropped


class Entry:
    """A timer in memory."""

    __slots__ = ("deferred_settlement", "phase", "shard", "started_at_ms", "ticket", "timer", "weight")

    def __init__(self, timer: Timer, shard: Shard) -> None:
        self.timer = timer
        self.shard = shard
        self.phase = Phase.WRITING
        self.ticket = 0  # its place in the fire loop's heap while ARMED
        self.started_at_ms = 0  # of the attempt in flight
        # Of an attempt that ended while a write of the timer was pending. It counts if that write is not applied.
        self.deferred_settlement: Settlement | None = None
        # In bytes. It is kept, because the same number must be subtracted that was added.
        self.weight = timer_bytes(timer)
