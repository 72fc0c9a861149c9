"""The simulator's event loop: virtual time, an order chosen by the seed, and instances that freeze or crash."""

from __future__ import annotations

import asyncio
import heapq
import random
from contextvars import ContextVar
from typing import Any, cast

from duetime.testing.virtual import Deadlock, VirtualLoop

__all__ = ["INSTANCE", "Livelock", "SimLoop"]

# The instance whose code is running. Handles carry it in their context, so that a whole instance can be stopped.
INSTANCE: ContextVar[str] = ContextVar("instance", default="")

_STEPS_MAX = 3_000_000


class Livelock(RuntimeError):
    """The simulation does not end."""


class SimLoop(VirtualLoop):
    """Runs ready handles in an order chosen by the seed, and delays those of frozen instances."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng
        self.frozen: dict[str, list[asyncio.Handle]] = {}
        self.killed: set[str] = set()
        self.steps = 0
        self._discarded: list[asyncio.Handle] = []
        self.set_exception_handler(lambda loop, context: None)  # killed instances do not retrieve exceptions

    def _run_once(self) -> None:
        ready = cast(Any, self)._ready
        scheduled = cast(Any, self)._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            if not scheduled:
                raise Deadlock("every task waits and no timer is set")
            self.now = max(self.now, scheduled[0]._when)
        while scheduled and scheduled[0]._when <= self.now + 1e-9:
            handle = heapq.heappop(scheduled)
            handle._scheduled = False
            ready.append(handle)
        handles = list(ready)
        ready.clear()
        self.steps += len(handles)
        if self.steps > _STEPS_MAX:
            raise Livelock(f"{_STEPS_MAX:,} steps and {self.now:.0f} s of virtual time: endless loop?")
        if len(handles) > 1:
            self._rng.shuffle(handles)
        for handle in handles:
            if handle._cancelled:
                continue
            owner = handle._context.get(INSTANCE, "")
            if owner in self.killed:
                self._discarded.append(handle)
            elif owner in self.frozen:
                self.frozen[owner].append(handle)
            else:
                handle._run()

    def freeze(self, name: str) -> None:
        self.frozen.setdefault(name, [])

    def resume(self, name: str) -> None:
        cast(Any, self)._ready.extend(self.frozen.pop(name, []))

    def kill(self, name: str) -> None:
        """Nothing of this instance runs again: no handler, no `finally`, as with a real crash."""
        self.killed.add(name)
        self._discarded += self.frozen.pop(name, [])

    def close_all(self) -> None:
        """After the run: cancel every task, including those of killed instances, and close the loop."""
        self.killed.clear()
        for name in list(self.frozen):
            self.resume(name)
        cast(Any, self)._ready.extend(self._discarded)
        self._discarded = []
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            self.run_until_complete(asyncio.wait(tasks, timeout=1))
        self.close()
