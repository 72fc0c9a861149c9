"""Work on a database runs to its end, also if the caller is cancelled.

The outcome of a cancelled write would be unknown. Drivers would cancel it on the server, or leave the connection in the
middle of a result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["CLOSE_SECONDS", "BackgroundTasks"]

T = TypeVar("T")

CLOSE_SECONDS = 2.0  # how long `close` waits for running work


class BackgroundTasks:
    """Tasks that are running, or waiting for a session."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits the work. If the caller is cancelled, the work goes on."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the caller may have been cancelled

    async def close(self) -> set[asyncio.Task[Any]]:
        """Waits until all tasks have ended, or for CLOSE_SECONDS. Returns those that have not ended."""
        if not self._tasks:
            return set()
        _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
        return late
