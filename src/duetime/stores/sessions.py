"""Sessions with a database whose driver gives connections: one piece of work at a time on each.

A session connects when it is used, and again when it broke. Work that was begun is never cancelled
(background.py): past its deadline the connection is thrown away, and a caller who gives up leaves the work to finish.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, Protocol, TypeVar

from duetime.errors import OutcomeUnknown, StoreError, StoreUnavailable
from duetime.stores.background import CLOSE_SECONDS, BackgroundTasks

__all__ = ["CONNECT_SECONDS", "Again", "Driver", "Session", "Sessions"]

C = TypeVar("C")
T = TypeVar("T")

CONNECT_SECONDS = 3.0
TRIES = 3


class Again(StoreUnavailable):
    """Not applied, for no fault of its own (a deadlock, say), and worth another try at once."""


class Driver(Protocol[C]):
    """What a session has to know of a database's driver."""

    @property
    def name(self) -> str: ...
    async def connect(self, within_seconds: float) -> C: ...
    def is_closed(self, connection: C) -> bool: ...
    def terminate(self, connection: C) -> None:
        """At once and without a word, also of a connection that is closed already."""
        ...

    async def close(self, connection: C) -> None: ...
    async def rollback(self, connection: C) -> None: ...
    def refusal(self, error: Exception) -> str:
        """Why there is no connection, in plain words."""
        ...

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """What an error of begun work means, and whether the connection is as good as before."""
        ...


Work = Callable[[C], Awaitable[T]]


class Session(Generic[C]):
    """One connection and the work that waits for it, in its order."""

    def __init__(self, driver: Driver[C], deadline_seconds: float, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._driver = driver
        self._deadline_seconds = deadline_seconds
        self._connect_seconds = connect_seconds
        self._connection: C | None = None
        self._turn = asyncio.Lock()
        self._begun = BackgroundTasks()
        self._refused_at = -1.0
        self._refusal: StoreUnavailable | None = None
        self._expired = False
        self._closed = False  # starts no new work
        self._ended = False  # and `close` has stopped waiting

    @property
    def busy(self) -> int:
        """How many pieces of work are under way or waiting."""
        return len(self._begun)

    async def read(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._begun.outliving(self._run(work, commit, writing=False))

    async def write(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        """Without `commit`, the work is one statement and commits itself. With it, nothing is applied before that."""
        return await self._begun.outliving(self._run(work, commit, writing=True))

    async def close(self) -> None:
        """After what is under way, unless that takes too long."""
        self._closed = True
        await self._begun.close()
        self._ended = True
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._driver.close(connection), CLOSE_SECONDS)
            self._driver.terminate(connection)

    def drop_connection(self) -> None:
        """Whatever is under way there is unknown; the next work connects anew."""
        if self._connection is not None:
            self._drop(self._connection)

    async def _run(self, work: Work[C, T], commit: Work[C, None] | None, *, writing: bool) -> T:
        loop = asyncio.get_running_loop()
        arrived_at = loop.time()
        async with self._turn:
            connection = await self._connected(arrived_at)
            expiry = loop.call_later(self._deadline_seconds, self._expire)
            try:
                if commit is None:
                    return await self._step(connection, work, writing=writing)
                try:
                    answer = await self._step(connection, work, writing=False)
                except Exception:
                    await self._roll_back(connection)
                    raise
                await self._step(connection, commit, writing=writing)
                return answer
            except asyncio.CancelledError:  # the event loop is being torn down
                self._drop(connection)
                raise
            finally:
                expiry.cancel()
                self._expired = False

    async def _step(self, connection: C, work: Work[C, T], *, writing: bool) -> T:
        try:
            return await work(connection)
        except StoreError:
            raise
        except Exception as error:
            raise self._failed(connection, error, writing) from error

    async def _roll_back(self, connection: C) -> None:
        """One that cannot even do this is of no use any more."""
        if self._connection is not connection:
            return
        try:
            await self._driver.rollback(connection)
        except Exception:
            self._drop(connection)

    async def _connected(self, arrived_at: float) -> C:
        if self._closed:
            raise StoreUnavailable("the store is closed")
        connection = self._connection
        if connection is not None and not self._driver.is_closed(connection):
            return connection
        if self._refusal is not None and self._refused_at >= arrived_at:
            raise StoreUnavailable(self._refusal.detail)  # somebody tried while this one was waiting
        try:
            connection = await self._driver.connect(self._connect_seconds)
        except Exception as error:
            self._refusal = StoreUnavailable(self._driver.refusal(error))
            self._refused_at = asyncio.get_running_loop().time()
            raise self._refusal from error
        if self._ended:  # the login took longer than `close` waits: without this the connection would stay open
            self._driver.terminate(connection)
            raise StoreUnavailable("the store is closed")
        self._refusal = None
        self._connection = connection
        return connection

    def _expire(self) -> None:
        if self._connection is not None:
            self._expired = True
            self._driver.terminate(self._connection)

    def _failed(self, connection: C, error: Exception, writing: bool) -> StoreError:
        failure, lives = self._driver.failure(error, writing=writing)
        if self._expired or not lives or self._driver.is_closed(connection):
            self._drop(connection)
        if self._expired:
            detail = f"{self._driver.name}: no answer within {self._deadline_seconds:g} s"
            return OutcomeUnknown(detail) if writing else StoreUnavailable(detail)
        return failure

    def _drop(self, connection: C) -> None:
        self._driver.terminate(connection)
        if self._connection is connection:
            self._connection = None


class Sessions(Generic[C]):
    """A few sessions for the same kind of work: the idlest one takes it, and another one may try again."""

    def __init__(
        self, driver: Driver[C], count: int, deadline_seconds: float, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._sessions = [Session(driver, deadline_seconds, connect_seconds) for _ in range(count)]

    async def read(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._tried(lambda session: session.read(work, commit))

    async def write(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._tried(lambda session: session.write(work, commit))

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))

    def drop_connections(self) -> None:
        for session in self._sessions:
            session.drop_connection()

    async def _tried(self, run: Callable[[Session[C]], Awaitable[T]]) -> T:
        for turn in range(1, TRIES):
            try:
                return await run(self._idlest())
            except Again:
                await asyncio.sleep(0.02 * turn)
        return await run(self._idlest())

    def _idlest(self) -> Session[C]:
        return min(self._sessions, key=lambda session: session.busy)
