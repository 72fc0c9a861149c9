"""Look-ups of names: the threads that make them, and how many of them one owner may have.

`getaddrinfo` finds a name in the same way as all other programs on the machine (/etc/hosts, nsswitch.conf, search
domains), but it blocks, and it cannot be cancelled: a look-up of a name whose servers do not answer keeps its thread
for half a minute. The threads of the event loop are few (uvloop runs two look-ups at a time), and files and other
names need them. So look-ups of names that users choose have threads of their own, and an owner has only a share.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Final

from duetime.domain.shares import SHARE
from duetime.errors import Shortage

__all__ = ["LOOKUPS_MAX", "LookupSlots", "LookupThreads", "addresses_of"]

LOOKUPS_MAX: Final = 64

LookUp = Callable[[str], Sequence[str]]


class LookupSlots:
    """How many look-ups run, in all and of each owner, which has a share of them (`domain/shares.py`)."""

    def __init__(self, slots_max: int) -> None:
        self._max = slots_max
        self._by_owner: dict[str, int] = {}
        self.taken = 0

    def take(self, owner: str) -> bool:
        held = self._by_owner.get(owner, 0)
        if held >= SHARE * (self._max - self.taken):
            return False
        self._by_owner[owner] = held + 1
        self.taken += 1
        return True

    def release(self, owner: str) -> None:
        self.taken -= 1
        held = self._by_owner.pop(owner) - 1
        if held:
            self._by_owner[owner] = held


def addresses_of(host: str) -> Sequence[str]:
    """The addresses of a name. Blocks. Raises an OSError or ValueError."""
    try:
        return [str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        # Without a free file descriptor the system has many errors for it, also that the name does not exist. This has
        # the right one.
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
        raise


class LookupThreads:
    """Threads that look up names, started when they are needed. The caller limits how many run.

    They are daemon threads: a look-up that hangs must not delay the end of the process.
    """

    def __init__(self, look_up: LookUp = addresses_of) -> None:
        self._look_up = look_up
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._started = 0
        self._running = 0

    async def __call__(self, host: str) -> Sequence[str]:
        if self._running == self._started:
            try:
                threading.Thread(target=self._work, name="duetime-look-up", daemon=True).start()
            except RuntimeError as error:
                raise Shortage(f"no thread to look up {host}: {error}", sent=False) from None
            self._started += 1
        self._running += 1
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Sequence[str]] = loop.create_future()
        self._jobs.put((loop, result, host))
        return await result

    def close(self) -> None:
        """The threads end when they have finished their look-ups."""
        for _ in range(self._started):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, result, host = job
            found: Sequence[str] | BaseException
            try:
                found = self._look_up(host)
            except BaseException as error:
                found = error
            with contextlib.suppress(RuntimeError):  # the event loop has been closed: nobody waits any more
                loop.call_soon_threadsafe(self._finish, result, found)

    def _finish(self, result: asyncio.Future[Sequence[str]], found: Sequence[str] | BaseException) -> None:
        self._running -= 1
        if result.done():  # cancelled
            return
        if isinstance(found, BaseException):
            result.set_exception(found)
        else:
            result.set_result(found)


_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Sequence[str]]", str]
