"""Turns: long work of many callers is done in short parts, and the namespaces that wait get their turn one by one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Turns"]


class Turns:
    """A lock. If callers of several namespaces wait for it, each namespace gets it once before one gets it again. The
    callers of one namespace get it in the order in which they came."""

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by namespace; the next one first

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        if self._is_taken:
            await self._wait(namespace)
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, namespace: str) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it got the turn and was cancelled in the same iteration of the event loop
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            namespace = next(iter(self._waiting))
            callers = self._waiting.pop(namespace)
            following = callers.popleft()
            if callers:
                self._waiting[namespace] = callers  # behind all others
            if not following.done():
                following.set_result(None)
                return
        self._is_taken = False
