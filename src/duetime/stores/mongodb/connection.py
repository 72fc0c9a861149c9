"""Clients, sessions and transactions of MongoDB.

A `SessionPool` has a few sessions for one kind of work. Work that was begun is never cancelled: if its caller is
cancelled, it continues, and at its deadline the driver gives up the connection. Reads are causally consistent with all
that this store has read or written: the member or router that answers has seen all of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import traceback
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, TypeVar
from weakref import WeakSet

import bson.errors
import pymongo
import pymongo.asynchronous.pool
from bson import Timestamp
from bson.codec_options import DatetimeConversion
from pymongo import AsyncMongoClient, ReadPreference, WriteConcern, errors
from pymongo.asynchronous.client_session import AsyncClientSession
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.database import AsyncDatabase
from pymongo.read_concern import ReadConcern

from duetime.errors import OutcomeUnknown, StoreError, StoreUnavailable
from duetime.stores.background import CLOSE_SECONDS, BackgroundTasks
from duetime.stores.mongodb.address import Address
from duetime.stores.mongodb.errors import code_of, has_label, store_error
from duetime.stores.sessions import CONNECT_SECONDS

__all__ = ["Client", "ClusterTime", "Session", "SessionPool", "begin", "close", "connect"]

Document: TypeAlias = dict[str, Any]
Client: TypeAlias = "AsyncMongoClient[Document]"
Collection: TypeAlias = "AsyncCollection[Document]"
T = TypeVar("T")

# --- clients -------------------------------------------------------------------------------------


def connect(address: Address, connections: int, within_seconds: float = CONNECT_SECONDS) -> Client:
    """A client with its own view of the servers. It connects when it is first used."""
    settings: dict[str, Any] = {
        "appname": "duetime",
        "connectTimeoutMS": int(within_seconds * 1_000),
        "serverSelectionTimeoutMS": int(within_seconds * 1_000),
    }
    ours = {name: value for name, value in settings.items() if name.lower() not in address.options}
    if "max_adaptive_retries" in pymongo.common.VALIDATORS:  # retries of newer drivers when the server is overloaded
        ours["max_adaptive_retries"] = 0
    return AsyncMongoClient(
        address.uri,
        maxPoolSize=connections,
        maxConnecting=connections,
        retryWrites=False,
        retryReads=False,
        w="majority",
        journal=True,
        readConcernLevel="majority",
        readPreference="primary",
        datetime_conversion=DatetimeConversion.DATETIME_MS,
        event_listeners=[_Connections()],
        **ours,
    )


async def close(client: Client) -> None:
    """Close all connections of a client. The driver first ends its sessions on the server. That has a time limit here,
    because a `close` that is cancelled in the middle would leave connections open."""
    # RuntimeError: after a login that was cancelled, asyncio may refuse the connection that the driver opens for that.
    with contextlib.suppress(errors.PyMongoError, RuntimeError), pymongo.timeout(CLOSE_SECONDS):
        await client.close()
    for listener in client.options.event_listeners:
        if isinstance(listener, _Connections):
            listener.abort()


class _Connections(pymongo.monitoring.ServerHeartbeatListener):
    """The open connections of one client. The driver leaves some of them to the garbage collector, for example that of
    the monitor of a server that belongs to another replica set. This is a listener because the driver passes the
    listeners of a client to the code that opens its connections; the events are not used."""

    def __init__(self) -> None:
        self.opened: WeakSet[Any] = WeakSet()

    def abort(self) -> None:
        for connection in list(self.opened):
            connection.conn[0].abort()

    def started(self, event: object) -> None: ...
    def succeeded(self, event: object) -> None: ...
    def failed(self, event: object) -> None: ...


_driver_open: Any = getattr(pymongo.asynchronous.pool, "_configured_protocol_interface", None)


async def _open_or_close(*args: Any, **options: Any) -> Any:
    """Open a connection as the driver does. If that is cancelled in the middle, for example when a client is closed
    while its monitor connects, the driver leaves the socket to the garbage collector; here it is closed."""
    try:
        connection = await _driver_open(*args, **options)
        listeners = getattr(args[1] if len(args) > 1 else None, "_event_listeners", None)
        for listener in [] if listeners is None else listeners.event_listeners():
            if isinstance(listener, _Connections):
                listener.opened.add(connection)
        return connection
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            opened = frame.f_locals.get("sock")
            if isinstance(opened, socket.socket):
                opened.close()
        raise


if _driver_open is not None:
    pymongo.asynchronous.pool._configured_protocol_interface = _open_or_close  # type: ignore[attr-defined]


# --- sessions ------------------------------------------------------------------------------------


class ClusterTime:
    """The newest cluster time that the store has seen. Later reads see no older state."""

    def __init__(self) -> None:
        self._latest: Timestamp | None = None

    def apply_to(self, driver_session: AsyncClientSession) -> None:
        if self._latest is not None:
            driver_session.advance_operation_time(self._latest)

    def update_from(self, driver_session: AsyncClientSession) -> None:
        seen = driver_session.operation_time
        if seen is not None and (self._latest is None or seen > self._latest):
            self._latest = seen


class Session:
    """A session of the driver, for one piece of work at a time."""

    def __init__(self, db: AsyncDatabase[Document], driver_session: AsyncClientSession) -> None:
        self.db = db
        self.driver_session = driver_session
        self.timers: Collection = db["timers"]
        self.members: Collection = db["members"]
        self.namespaces: Collection = db["namespaces"]
        self.timers_snapshot: Collection = self.timers.with_options(read_concern=ReadConcern("snapshot"))

    async def command(self, command: Document) -> Document:
        """Run a command directly, without the cost of the driver's bulk interface. Only in a transaction: outside of
        one, errors of the write concern would not be checked."""
        answer: Document = await self.db.command(command, session=self.driver_session)
        if answer.get("writeErrors"):
            [error, *_] = answer["writeErrors"]
            raise errors.OperationFailure(error.get("errmsg", "refused"), error.get("code"), error)
        return answer


Work = Callable[[Session], Awaitable[T]]
_MAJORITY: Final = WriteConcern("majority", j=True)
_SNAPSHOT: Final = ReadConcern("snapshot")
_PAUSE_FIRST_SECONDS = 0.002
_PAUSE_MAX_SECONDS = 0.1
_INTERRUPTED = 11601  # the session was killed: the claim of a shard kills the sessions of its former owner
# The server has aborted the transaction, because its cache was full of changes, of this and of other transactions.
_CACHE_FULL = 388


class SessionPool:
    """A few sessions for one kind of work; if none is idle, work waits for one."""

    def __init__(
        self,
        client: Client,
        database: str,
        count: int,
        deadline_seconds: float,
        cluster_time: ClusterTime | None = None,
    ) -> None:
        self._client = client
        self._cluster_time = cluster_time or ClusterTime()
        self._deadline_seconds = deadline_seconds
        self._sessions = [
            Session(client[database], client.start_session(causal_consistency=True)) for _ in range(count)
        ]
        self._idle = list(self._sessions)
        self._free = asyncio.Semaphore(count)
        self._background = BackgroundTasks()
        self._closed = False

    @property
    def session_ids(self) -> list[Any]:
        """By these ids another instance can end what these sessions have begun."""
        return [session.driver_session.session_id["id"] for session in self._sessions]

    async def read(self, work: Work[T]) -> T:
        return await self._background.run_to_end(
            self._run(lambda session: self._run_plain(session, work, writing=False))
        )

    async def write(self, work: Work[T]) -> T:
        """Work with one writing command, which must be the last command."""
        return await self._background.run_to_end(
            self._run(lambda session: self._run_plain(session, work, writing=True))
        )

    async def transaction(self, work: Work[T]) -> T:
        """All of the work is applied, or nothing. It is run again from the start if it conflicts with another
        transaction."""
        return await self._background.run_to_end(self._run(lambda session: self._run_transaction(session, work)))

    async def close(self) -> None:
        """Wait for work in progress, for a limited time, then close."""
        self._closed = True
        await self._background.close()
        for session in self._sessions:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(session.driver_session.end_session(), CLOSE_SECONDS)

    async def _run(self, action: Work[T]) -> T:
        async with self._free:
            if self._closed:
                raise StoreUnavailable("the store is closed")
            session = self._idle.pop()
            try:
                self._cluster_time.apply_to(session.driver_session)
                with pymongo.timeout(self._deadline_seconds):
                    return await action(session)
            finally:
                self._cluster_time.update_from(session.driver_session)
                self._idle.append(session)

    async def _run_plain(self, session: Session, work: Work[T], *, writing: bool) -> T:
        try:
            return await work(session)
        except StoreError:
            raise
        except Exception as error:
            raise store_error(error, writing=writing) from error

    async def _run_transaction(self, session: Session, work: Work[T]) -> T:
        """The next transaction of a session ends the one before on the server, if that is still open."""
        expires_at = _now() + self._deadline_seconds
        pause = _PAUSE_FIRST_SECONDS
        while True:
            try:
                await begin(session)
                answer = await work(session)
            except BaseException as error:
                with contextlib.suppress(Exception):
                    await session.driver_session.abort_transaction()
                if not isinstance(error, (errors.PyMongoError, bson.errors.BSONError)):
                    raise
                if _now() > expires_at or not _may_run_again(error):
                    raise store_error(error, writing=False) from error
            else:
                if await self._commit(session, expires_at):
                    return answer
            await asyncio.sleep(pause * random.random())  # so as not to conflict with the same transaction again
            pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _commit(self, session: Session, expires_at: float) -> bool:
        """False: certainly not committed, and must be run again. After an unknown outcome the commit is repeated until
        the deadline, to get its result. An error of a repetition does not mean that the first commit was not
        applied."""
        while True:
            try:
                await session.driver_session.commit_transaction()
                return True
            except errors.PyMongoError as error:
                if has_label(error, "TransientTransactionError") or code_of(error) == _CACHE_FULL:
                    if _now() > expires_at:
                        raise store_error(error, writing=False) from error
                    return False
                asked_again = has_label(error, "UnknownTransactionCommitResult") or code_of(error) == _INTERRUPTED
                if not asked_again or _now() > expires_at:
                    raise OutcomeUnknown(store_error(error, writing=True).detail) from error
            await asyncio.sleep(_PAUSE_MAX_SECONDS * random.random())


async def begin(session: Session) -> None:
    """It reads one snapshot. It conflicts if another transaction has changed what it writes since that snapshot."""
    await session.driver_session.start_transaction(_SNAPSHOT, _MAJORITY, ReadPreference.PRIMARY)


def _may_run_again(error: BaseException) -> bool:
    return has_label(error, "TransientTransactionError") or code_of(error) in (_INTERRUPTED, _CACHE_FULL)


def _now() -> float:
    return asyncio.get_running_loop().time()
