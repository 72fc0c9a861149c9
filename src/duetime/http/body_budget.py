"""How many bytes of request bodies a server holds at a time, shared between tenants.

A request takes the bytes of its whole body before the body is read, so a body that has begun can always be completed. A
tenant (the holder of a token, or a client address) may hold as much as is left free after it: one tenant alone at most
half of all bytes, two a third each, and so on. So a tenant that holds its share never keeps a tenant without any body
from sending one. A request for which too few are free waits; `release` gives the bytes to the tenant that holds least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

__all__ = ["BodyBudget"]

# The first part of a waiting body may be in memory already, as much as was read at once: so few may wait.
WAITING_PER_TENANT_MAX: Final = 16
WAITING_MAX: Final = 128


class BodyBudget:
    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self.waiting = 0
        self._held_by: dict[str, int] = {}
        self._waiting: dict[str, deque[tuple[int, Callable[[], None]]]] = {}

    def take(self, tenant: str, size: int) -> bool:
        """Take the bytes of a body. False: too few are free now."""
        if tenant in self._waiting or not self._fits(tenant, size):
            return False
        self.add(tenant, size)
        return True

    def add(self, tenant: str, size: int) -> None:
        """Count a body that is in memory already."""
        self.held += size
        self._held_by[tenant] = self._held_by.get(tenant, 0) + size

    def wait(self, tenant: str, size: int, granted: Callable[[], None]) -> bool:
        """Call `granted` when enough is free, which is then taken. False: too many requests wait."""
        queue = self._waiting.get(tenant)
        if self.waiting >= WAITING_MAX or (queue is not None and len(queue) >= WAITING_PER_TENANT_MAX):
            return False
        if queue is None:
            queue = self._waiting[tenant] = deque()
        queue.append((size, granted))
        self.waiting += 1
        return True

    def cancel(self, tenant: str, size: int, granted: Callable[[], None]) -> None:
        """Stop waiting."""
        self._waiting[tenant].remove((size, granted))
        self.waiting -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._grant()  # the next of this tenant may need less

    def release(self, tenant: str, size: int) -> None:
        self.held -= size
        left = self._held_by[tenant] - size
        if left:
            self._held_by[tenant] = left
        else:
            del self._held_by[tenant]
        if self._waiting:
            self._grant()

    def _fits(self, tenant: str, size: int) -> bool:
        free = self.bytes_max - self.held - size
        own = self._held_by.get(tenant, 0)
        return free >= 0 and (own == 0 or own + size <= free)

    def _grant(self) -> None:
        while True:
            fitting = [tenant for tenant, queue in self._waiting.items() if self._fits(tenant, queue[0][0])]
            if not fitting:
                return
            tenant = min(fitting, key=lambda each: self._held_by.get(each, 0))
            queue = self._waiting[tenant]
            size, granted = queue.popleft()
            self.waiting -= 1
            if not queue:
                del self._waiting[tenant]
            self.add(tenant, size)
            granted()
