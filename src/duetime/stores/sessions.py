"""Sessions with a database: a session is one connection that is used for one piece of work at a time.

A session connects when it is first used, and again after its connection was lost. Work that has started is never
cancelled (background.py): if the caller is cancelled, the work goes on. After the deadline of the work the connection
is terminated.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreUnavailable
from duetime.stores.background import CLOSE_SECONDS, BackgroundTasks

__all__ = ["CONNECT_SECONDS", "Driver", "RetryAtOnce", "Session", "Sessions", "enable_keepalive", "setup_session"]

C = TypeVar("C")
T = TypeVar("T")

CONNECT_SECONDS = 3.0
TRIES = 3


class RetryAtOnce(StoreUnavailable):
    """Not applied, because of a conflict such as a deadlock. It is likely to succeed if it is repeated at once."""


class Driver(Protocol[C]):
    """What a session needs of the driver of a database."""

    @property
    def name(self) -> str: ...
    async def connect(self, within_seconds: float) -> C: ...
    def is_closed(self, connection: C) -> bool: ...
    def terminate(self, connection: C) -> None:
        """Closes the connection at once, without a message to the server. It may be closed already."""
        ...

    async def close(self, connection: C) -> None: ...
    async def rollback(self, connection: C) -> None: ...
    def setup_error(self, error: Exception) -> SetupError | StoreUnavailable:
        """The error to raise for an error of a connect, a migration or a check."""
        ...

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """The StoreError for an error of work that has started, and whether the connection can still be used."""
        ...


Work = Callable[[C], Awaitable[T]]


class Session(Generic[C]):
    """One connection, and the work that waits for it, in order of arrival."""

    def __init__(self, driver: Driver[C], deadline_seconds: float, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._driver = driver
        self._deadline_seconds = deadline_seconds
        self._connect_seconds = connect_seconds
        self._connection: C | None = None
        self._lock = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._refused_at = -1.0
        self._refusal: StoreUnavailable | None = None
        self._expired = False
        self._closed = False  # no new work is started
        self._ended = False  # `close` has stopped waiting for work

    @property
    def busy(self) -> int:
        """How many pieces of work are running or waiting."""
        return len(self._tasks)

    async def read(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._tasks.run_to_end(self._run(work, commit, writing=False))

    async def write(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        """Without `commit`, `work` is one statement and commits itself. With it, nothing is applied before `commit`."""
        return await self._tasks.run_to_end(self._run(work, commit, writing=True))

    async def close(self) -> None:
        """Waits for running work, but not longer than CLOSE_SECONDS."""
        self._closed = True
        await self._tasks.close()
        self._ended = True
        connection, self._connection = self._connection, None
        if connection is not None:
            await _close(self._driver, connection)

    def drop_connection(self) -> None:
        """Terminates the connection. The outcome of running work is unknown; the next work connects again."""
        if self._connection is not None:
            self._drop(self._connection)

    async def _run(self, work: Work[C, T], commit: Work[C, None] | None, *, writing: bool) -> T:
        loop = asyncio.get_running_loop()
        arrived_at = loop.time()
        async with self._lock:
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
            except asyncio.CancelledError:  # the event loop is being closed
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
        """Drops the connection if the rollback fails."""
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
            raise StoreUnavailable(self._refusal.detail)  # a connect failed while this work was waiting
        try:
            connection = await self._driver.connect(self._connect_seconds)
        except Exception as error:
            self._refusal = StoreUnavailable(self._driver.setup_error(error).detail)
            self._refused_at = asyncio.get_running_loop().time()
            raise self._refusal from error
        if self._ended:  # the login took longer than `close` waits; the connection would stay open
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
        failure, survives = self._driver.failure(error, writing=writing)
        if self._expired or not survives or self._driver.is_closed(connection):
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
    """Several sessions for one kind of work. The session with the least work takes the next. RetryAtOnce is retried."""

    def __init__(
        self, driver: Driver[C], count: int, deadline_seconds: float, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        self._sessions = [Session(driver, deadline_seconds, connect_seconds) for _ in range(count)]

    async def read(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._with_retries(lambda session: session.read(work, commit))

    async def write(self, work: Work[C, T], commit: Work[C, None] | None = None) -> T:
        return await self._with_retries(lambda session: session.write(work, commit))

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self._sessions))

    def drop_connections(self) -> None:
        for session in self._sessions:
            session.drop_connection()

    async def _with_retries(self, run: Callable[[Session[C]], Awaitable[T]]) -> T:
        for attempt in range(1, TRIES):
            try:
                return await run(self._least_busy())
            except RetryAtOnce:
                await asyncio.sleep(0.02 * attempt)
        return await run(self._least_busy())

    def _least_busy(self) -> Session[C]:
        return min(self._sessions, key=lambda session: session.busy)


@contextlib.asynccontextmanager
async def setup_session(driver: Driver[C], connecting: Awaitable[C] | None = None) -> AsyncIterator[C]:
    """A connection for migrations and checks. Errors of the driver are raised as `driver.setup_error` returns them.
    `connecting`: for a connection with other settings than those of `driver.connect`."""
    connection: C | None = None
    try:
        connection = await (connecting or driver.connect(CONNECT_SECONDS))
        yield connection
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise driver.setup_error(error) from error
    finally:
        if connection is not None:
            await _close(driver, connection)


async def _close(driver: Driver[C], connection: C) -> None:
    with contextlib.suppress(Exception):
        await asyncio.wait_for(driver.close(connection), CLOSE_SECONDS)
    driver.terminate(connection)


def enable_keepalive(connection: Any) -> None:
    """Sets a TCP socket to detect within seconds that the other side is gone. None and Unix sockets are ignored."""
    if connection is None or connection.family == getattr(socket, "AF_UNIX", None):
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
