"""Virtual time: an event loop whose clock jumps to the next timer instead of waiting for it.

    def test_fires_after_an_hour():
        async def story(clock: VirtualClock) -> None:
            ...
            await asyncio.sleep(3600)      # takes no time at all
        run_virtual(story)

Everything that takes its time from the loop and from the Clock port runs at full speed and in the same
order each time. Threads and sockets do not belong here: waiting for one would be a deadlock, and is said so.
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
    """Everybody waits, and nothing is scheduled that could wake anybody."""


class _JumpingSelector(selectors.BaseSelector):
    """Has nothing to select from: the loop's waiting becomes the passing of virtual time."""

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
    """A Clock on a VirtualLoop. `offset_ms` is how far its wall time is off; jump by changing it."""

    def __init__(self, loop: VirtualLoop, offset_ms: int = 0) -> None:
        self._loop = loop
        self.offset_ms = offset_ms

    def boot_ms(self) -> int:
        return 1_000_000 + self._elapsed_ms()

    def wall_ms(self) -> int:
        return START_WALL_MS + self.offset_ms + self._elapsed_ms()

    def _elapsed_ms(self) -> int:
        # Timers fire at float times: what is meant to be a whole millisecond must not be read as one less.
        return int(self._loop.now * 1_000 + 1e-6)


def run_virtual(story: Callable[[VirtualClock], Awaitable[T]]) -> T:
    """Run a story in virtual time, on a loop of its own."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_told(story, VirtualClock(loop)))
    finally:
        leftovers = asyncio.all_tasks(loop)
        for task in leftovers:
            task.cancel()
        if leftovers:
            loop.run_until_complete(asyncio.gather(*leftovers, return_exceptions=True))
        loop.close()


async def _told(story: Callable[[VirtualClock], Awaitable[T]], clock: VirtualClock) -> T:
    return await story(clock)
