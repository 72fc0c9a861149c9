"""Single flight: a read of the store that many callers wait for is made once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["SingleFlight", "retrieved"]


class SingleFlight:
    """Shares one call between all callers that ask before it begins. A caller that asks later waits for the next call;
    there is never more than one call at a time.

    `pause_s`: the least time between the beginnings of two calls.
    """

    def __init__(self, call: Callable[[], Awaitable[None]], *, pause_s: float = 0.0) -> None:
        self._call = call
        self._pause_s = pause_s
        self._began_at = float("-inf")
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Future[None] | None = None

    async def __call__(self) -> None:
        if self._next is None:
            self._next = asyncio.ensure_future(self._run())
            self._next.add_done_callback(retrieved)
        await asyncio.shield(self._next)  # a caller that is cancelled must not cancel it for the others

    async def _run(self) -> None:
        async with self._one_at_a_time:
            loop = asyncio.get_running_loop()
            early_s = self._began_at + self._pause_s - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            self._began_at = loop.time()
            self._next = None  # a caller that asks from here on needs a newer result
            await self._call()


def retrieved(future: asyncio.Future[Any]) -> None:
    """A done callback that marks the future's error as retrieved. The callers get the error; if all of them were
    cancelled, asyncio must not log it."""
    if not future.cancelled():
        future.exception()
