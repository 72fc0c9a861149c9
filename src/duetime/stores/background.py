"""Work on a database goes on to its end, whoever stops waiting for it.

A cancelled write is one of which nobody knows how far it got; and drivers would cancel it on the server, or leave a
connection in the middle of an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["CLOSE_SECONDS", "BackgroundTasks"]

T = TypeVar("T")

CLOSE_SECONDS = 2.0  # that who closes waits for others


class BackgroundTasks:
    """What is under way, or waits for its turn."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def outliving(self, work: Coroutine[Any, Any, T]) -> T:
        """A caller that is cancelled stops waiting; the work goes on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it any more

    async def close(self) -> set[asyncio.Task[Any]]:
        """When all has ended, or when that takes too long: then what has not."""
        if not self._tasks:
            return set()
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        return late
