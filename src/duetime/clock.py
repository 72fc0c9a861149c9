"""The Clock port: the only source of time.

Two clocks, both in whole milliseconds:

- wall time says *when a timer is due*; it may jump, forwards and backwards;
- boot time says *how long something took*; leases are measured by it. It is CLOCK_BOOTTIME if the system has it,
  because CLOCK_MONOTONIC does not count the time while a machine is suspended, and a lease must.
"""

from __future__ import annotations

import time
from functools import partial
from math import inf
from typing import Protocol

__all__ = ["Clock", "OffsetBounds", "SystemClock"]

_DRIFT_MS_PER_SECOND = 0.5  # how fast two clocks may drift apart: as fast as a clock is usually slewed


class Clock(Protocol):
    def wall_ms(self) -> int: ...
    def boot_ms(self) -> int: ...


# None on Windows, which has neither. The client imports this module there.
_BOOT_CLOCK: int | None = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))
_boot_ns = time.monotonic_ns if _BOOT_CLOCK is None else partial(time.clock_gettime_ns, _BOOT_CLOCK)


class SystemClock:
    """The machine's clocks."""

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return _boot_ns() // 1_000_000


class OffsetBounds:
    """Bounds on how far another machine's clock is ahead of this machine's boot clock.

    The other machine reads its clock after a request is sent and before its answer is received, so each answer bounds
    the offset. All answers together give narrower bounds. The bounds widen with time, because clocks drift apart.

    An answer that contradicts the bounds means that a clock was set. Then only that answer counts; the new bounds are
    at most `follow_ms` wide and at the side that is nearest to the old ones.
    """

    def __init__(self, follow_ms: float = inf) -> None:
        self.low_ms = self.high_ms = 0.0
        self._follow_ms = follow_ms
        self._as_of_ms: int | None = None

    @property
    def is_known(self) -> bool:
        return self._as_of_ms is not None

    @property
    def width_ms(self) -> float:
        return self.high_ms - self.low_ms

    def saw(self, earliest_ms: int, latest_ms: int, sent_ms: int, received_ms: int) -> None:
        """The other clock showed a time between `earliest_ms` and `latest_ms`, at some moment between `sent_ms` and
        `received_ms` of the boot clock."""
        low, high = float(earliest_ms - received_ms), float(latest_ms - sent_ms)
        if self._as_of_ms is None:
            self.low_ms, self.high_ms, self._as_of_ms = low, high, received_ms
            return
        grown = max(0, received_ms - self._as_of_ms) / 1_000 * _DRIFT_MS_PER_SECOND
        self._as_of_ms = max(self._as_of_ms, received_ms)
        self.low_ms, self.high_ms = self.low_ms - grown, self.high_ms + grown
        if low > self.high_ms:
            self.low_ms, self.high_ms = low, min(high, low + self._follow_ms)
        elif high < self.low_ms:
            self.low_ms, self.high_ms = max(low, high - self._follow_ms), high
        else:
            self.low_ms, self.high_ms = max(self.low_ms, low), min(self.high_ms, high)
