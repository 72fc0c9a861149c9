"""One call for all who ask: a reading of the store that many wait for is made once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

__all__ = ["SingleFlight", "retrieved"]


class SingleFlight:
    """Calls that begin after they were asked for, one at a time; whoever asks before one begins shares it.

    `pause_s`: so much lies between the beginnings of two calls, whoever is asking.
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
        await asyncio.shield(self._next)  # one who gives up must not stop it for the others

    async def _run(self) -> None:
        async with self._one_at_a_time:
            loop = asyncio.get_running_loop()
            early_s = self._began_at + self._pause_s - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            self._began_at = loop.time()
            self._next = None  # who asks from here on needs a newer one
            await self._call()


def retrieved(future: asyncio.Future[Any]) -> None:
    """An error is the askers' to see; if they have all gone it is nobody's."""
    if not future.cancelled():
        future.exception()
