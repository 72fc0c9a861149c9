"""The life cycle of an instance: its parts in an ordered list.

Parts start in order. They end in two passes, both from the last to the first: all drain, then all stop. So what
accepts work ends before what does it, and the store, which all need, is among the last.

    parts = Components(seconds_to_end=60)
    await parts.begin(Part("store", start=store.open, stop=store.close))
    ...
    await parts.end()

A part is a `Component`: a class of its own, or a `Part` made of functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from duetime.telemetry import log

__all__ = ["Component", "Components", "Part"]

Step = Callable[[], Awaitable[object]]


class Component(Protocol):
    """A part of an instance. `drain` and `stop` are called once each, also after a start that failed or was broken off;
    they have a deadline, at which they are cancelled."""

    @property
    def name(self) -> str:
        """For the log."""
        ...

    @property
    def failed(self) -> asyncio.Event | None:
        """Set when an internal error has ended it: then the instance must end too. None: it never fails."""
        ...

    async def start(self) -> None: ...

    async def drain(self) -> None:
        """Take no more work, and end what was begun."""
        ...

    async def stop(self) -> None:
        """Give back what it holds."""
        ...

    def not_ready(self) -> str | None:
        """Why the instance cannot serve. None: it can, as far as this part knows."""
        ...


async def _nothing() -> None:
    pass


class Part:
    """A component made of functions. One that is left out does nothing."""

    def __init__(
        self,
        name: str,
        *,
        start: Step = _nothing,
        drain: Step = _nothing,
        stop: Step = _nothing,
        not_ready: Callable[[], str | None] = lambda: None,
        failed: asyncio.Event | None = None,
    ) -> None:
        self.name = name
        self.failed = failed
        self.not_ready = not_ready
        self._start, self._drain, self._stop = start, drain, stop

    async def start(self) -> None:
        await self._start()

    async def drain(self) -> None:
        await self._drain()

    async def stop(self) -> None:
        await self._stop()


class Components:
    """The parts that have begun, in order. `seconds_to_end`: how long one may take to drain, and to stop."""

    def __init__(self, *, seconds_to_end: float) -> None:
        self._seconds_to_end = seconds_to_end
        self._begun: list[Component] = []
        self._ended = False

    async def begin(self, part: Component) -> None:
        """Start it. From now on `end` ends it, also if the start fails."""
        self._begun.append(part)
        await part.start()

    def not_ready(self) -> str | None:
        """The first reason that a part has."""
        return next((reason for part in self._begun if (reason := part.not_ready()) is not None), None)

    async def until_failed(self) -> str:
        """Waits until a part has failed, and returns its name."""
        waiting = {
            asyncio.ensure_future(part.failed.wait()): part.name for part in self._begun if part.failed is not None
        }
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            return waiting[done.pop()]
        finally:
            for task in waiting:
                task.cancel()

    async def end(self) -> bool:
        """An error of one part does not keep the others from ending. False: there was one, and the log has it."""
        parts = [] if self._ended else list(reversed(self._begun))
        self._ended = True
        drained = [await self._within_deadline(part, part.drain, "drain") for part in parts]
        stopped = [await self._within_deadline(part, part.stop, "stop") for part in parts]
        return all(drained + stopped)

    async def _within_deadline(self, part: Component, step: Step, verb: str) -> bool:
        try:
            async with asyncio.timeout(self._seconds_to_end) as deadline:
                await step()
            return True
        except TimeoutError:
            if not deadline.expired():
                log.exception("cannot %s %s: the others go on", verb, part.name)
            else:
                log.error("%s did not %s within %.0f s: the others go on", part.name, verb, self._seconds_to_end)
        except Exception:
            log.exception("cannot %s %s: the others go on", verb, part.name)
        return False
