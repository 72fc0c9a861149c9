"""The Clock port: the only place where time comes from.

Two clocks, both in whole milliseconds:

- wall time says *when a timer is due*; it may jump, forwards and backwards;
- boot time says *how long something took*, and leases hang on it. It is CLOCK_BOOTTIME where there is
  one, because CLOCK_MONOTONIC stands still while a machine is suspended, and a lease must not.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    def wall_ms(self) -> int: ...
    def boot_ms(self) -> int: ...


class SystemClock:
    """The machine's clocks."""

    _boot_clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

    def wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def boot_ms(self) -> int:
        return time.clock_gettime_ns(self._boot_clock) // 1_000_000
