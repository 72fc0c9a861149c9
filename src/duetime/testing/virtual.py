"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

    def test_fires_after_an_hour():
        async def scenario(clock: VirtualClock) -> None:
            ...
            await asyncio.sleep(3600)      # takes no time at all
        run_virtual(scenario)

Code that takes its time from the loop and from the Clock port runs at full speed, and in the same order each time.
Threads and sockets are not supported: waiting for one would be a deadlock, and raises an error.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

__all__ = ["Deadlock", "VirtualClock", "VirtualLoop", "run_virtual"]

T = TypeVar("T")

START_WALL_MS = 1_800_000_000_000  # 2027-01-15T08:00:00Z


class Deadlock(RuntimeError):
    """Every task waits, and no timer is set that could wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Selects nothing: when the loop waits, virtual time advances."""

    def __init__(self) -> None:
        self.loop: VirtualLoop | None = None
        self._registered: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = self._registered[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._registered.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert self.loop is not None
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        self.loop.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._registered


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        selector = _JumpingSelector()
        super().__init__(selector)
        selector.loop = self
        self.now = 0.0

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: object, func: object, *args: object) -> Any:
        raise RuntimeError("no threads in virtual time")


class VirtualClock:
    """A Clock on a VirtualLoop. `offset_ms` is the error of its wall time; change it to make the clock jump."""

    def __init__(self, loop: VirtualLoop, offset_ms: int = 0) -> None:
        self._loop = loop
        self.offset_ms = offset_ms

    def boot_ms(self) -> int:
        return 1_000_000 + self._elapsed_ms()

    def wall_ms(self) -> int:
        return START_WALL_MS + self.offset_ms + self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        # Timers fire at float times: a whole millisecond must not be rounded down to the one before.
        return int(self._loop.now * 1_000 + 1e-6)


def run_virtual(scenario: Callable[[VirtualClock], Awaitable[T]]) -> T:
    """Run a coroutine function in virtual time, on a new loop."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_awaited(scenario, VirtualClock(loop)))
    finally:
        leftovers = asyncio.all_tasks(loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            loop.run_until_complete(asyncio.gather(*leftovers, return_exceptions=True))
        loop.close()


async def _awaited(scenario: Callable[[VirtualClock], Awaitable[T]], clock: VirtualClock) -> T:
    return await scenario(clock)
