"""Commands that were handed back because their namespace is beyond its quota: how many of each tenant wait.

A broker delivers only so many commands that are not acknowledged, and some wait in memory. If those of one tenant took
all the room, no command of another tenant would be delivered.
"""

from __future__ import annotations

import heapq

from duetime.brokers.by_hand import COMMAND_WEIGHT

__all__ = ["Waiting"]


class Waiting:
    """A tenant may use as much room as is still free. One alone uses at most half: others always find room."""

    def __init__(self, room: int) -> None:
        self._free = room
        self._ends: list[tuple[float, str, int]] = []  # a heap: time, tenant, weight
        self._used_by: dict[str, int] = {}

    def add(self, tenant: str, size: int, now: float, seconds: float) -> bool:
        """False: there is no room for it."""
        while self._ends and self._ends[0][0] <= now:
            _, ended, weight = heapq.heappop(self._ends)
            self._free += weight
            self._used_by[ended] -= weight
            if not self._used_by[ended]:
                del self._used_by[ended]
        weight = COMMAND_WEIGHT + size
        used = self._used_by.get(tenant, 0) + weight
        if used > self._free - weight:
            return False
        self._free -= weight
        self._used_by[tenant] = used
        heapq.heappush(self._ends, (now + seconds, tenant, weight))
        return True
