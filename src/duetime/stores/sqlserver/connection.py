"""Connections of SqlServerStore to its database: the URL, the settings of a session, and the session pool.

The driver blocks while it waits for the server, so each connection has its own thread. A statement is a constant text
with one parameter, a JSON document. So no batch exceeds the limit of 2,100 parameters, no parameter is NULL or of a
type that the driver has to guess, and the server, which caches plans by text, plans nothing twice. The text is sent
with every call: mssql-python binds the parameter again each time, and Microsoft's ODBC driver then prepares the
statement again (sp_prepexec), in the same message.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import mssql_python
from msgspec import Struct

from duetime.errors import SetupError, StoreError, StoreUnavailable
from duetime.stores.rows import Row
from duetime.stores.sessions import CONNECT_SECONDS, RetryAtOnce, Sessions
from duetime.stores.sqlserver.errors import setup_error, store_error
from duetime.stores.store_url import parse_store_url
from duetime.telemetry import log

__all__ = [
    "Address",
    "Connection",
    "MssqlDriver",
    "Run",
    "SessionPool",
    "address_of",
    "connect",
    "execute",
    "fetch_until",
]

T = TypeVar("T")
mssql_python.pooling(enabled=False)  # otherwise a closed connection would stay open in the pool of the driver

# --- the URL -------------------------------------------------------------------------------------

# Options of the connection strings of SQL Server, in lower case, with the name that the driver knows.
_OPTIONS = {
    "encrypt": "Encrypt",
    "trustservercertificate": "TrustServerCertificate",
    "hostnameincertificate": "HostnameInCertificate",
    "servercertificate": "ServerCertificate",
    "multisubnetfailover": "MultiSubnetFailover",
    "authentication": "Authentication",
}
_ALLOWED_VALUES = {
    "encrypt": ("yes", "no", "strict", "mandatory", "optional"),
    "trustservercertificate": ("yes", "no"),
    "multisubnetfailover": ("yes", "no"),
}


class Address(Struct, frozen=True):
    """The parsed URL of the database. The connection string is for the driver; `label` has no password."""

    connection_string: str
    label: str

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(text: str) -> Address:
    """sqlserver://user:password@host:port/database?option=value, with the options of its connection strings."""
    url = parse_store_url(text, "SQL Server", str.lower)
    parts, options = url.parts, url.options
    url.check_options(_OPTIONS)
    for name, allowed in _ALLOWED_VALUES.items():
        url.check_value(name, allowed, ignore_case=True)
    port, database = url.port(1433), url.database
    if not parts.hostname:
        raise url.error("names no host: sqlserver://user:password@HOST:1433/database")
    if not parts.username and "authentication" not in options:
        raise url.error("names no user: sqlserver://USER:PASSWORD@host:1433/database")
    if not database or "/" in database:
        raise url.error("names no database: sqlserver://user:password@host:1433/DATABASE")
    settings = {"Server": f"{parts.hostname},{port}", "Database": database}
    if parts.username:
        settings |= {"UID": unquote(parts.username), "PWD": unquote(parts.password or "")}
    settings |= {_OPTIONS[name]: value for name, value in options.items()}
    # A lost connection is detected by keepalive. The driver must not reconnect by itself: the caller has to learn that
    # the outcome of its work is unknown.
    settings |= {"KeepAlive": "10", "KeepAliveInterval": "2", "ConnectRetryCount": "0"}
    return Address(
        connection_string=";".join(f"{name}={_braced(value)}" for name, value in settings.items()),
        label=f"{parts.hostname}:{port}/{database}",
    )


def _braced(value: str) -> str:
    return "{" + value.replace("}", "}}") + "}"


# --- connections ---------------------------------------------------------------------------------

# The isolation level under which the fences are correct, settings that filtered indexes need, and the language of
# error messages.
_SETTINGS = """
SET LANGUAGE us_english;
SET XACT_ABORT ON; SET NOCOUNT ON; SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 4000;
SET QUOTED_IDENTIFIER, ANSI_NULLS, ANSI_PADDING, ANSI_WARNINGS, ARITHABORT, CONCAT_NULL_YIELDS_NULL ON;
SET NUMERIC_ROUNDABORT OFF;
"""
# The history of a database changes with a restore, or with a failover that lost commits. Only owners may read it, and
# Azure does not have it. Then the name of the server is used, which changes with every failover.
_HISTORY = (
    "SELECT CAST(recovery_fork_guid AS nvarchar(36)) FROM sys.database_recovery_status WHERE database_id = DB_ID()"
)
_NAME = "SELECT CAST(SERVERPROPERTY('ServerName') AS nvarchar(128))"
# After _CANCEL_SECONDS the driver asks the server to cancel (the attention signal) and waits without a limit for the
# server to confirm it: if the server does not answer at all, the thread stays blocked. So there is also a limit outside
# of the driver: _LIMIT_SECONDS, or an earlier one in sessions.py.
_CANCEL_SECONDS = 15
_LIMIT_SECONDS = 20.0
_TEXT = (mssql_python.SQL_WVARCHAR, 0, 0)  # nvarchar(max), for every text
ABANDONED_MAX = 8  # threads of one session that may be blocked by a server that does not answer


class AbandonedThreads:
    """Counts threads whose connection was terminated and that have not ended, because the driver may be blocked.

    Each has a socket and a stack, and cannot be stopped. At the limit no connection is opened until a thread ends.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.count >= self.limit:
            raise StoreUnavailable(
                f"sqlserver: no new connection: {self.count} threads are blocked by a server that does not answer"
            )

    def added(self) -> None:
        with self._lock:
            self.count += 1

    def removed(self) -> None:
        with self._lock:
            self.count -= 1


_setup_threads = AbandonedThreads(ABANDONED_MAX)  # of connections that are in no session pool


class Connection:
    """A connection and its thread."""

    def __init__(self, abandoned: AbandonedThreads | None = None, limit_seconds: float = _LIMIT_SECONDS) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Any] | None = None
        self._cursors: dict[str, Any] = {}
        self._connection: Any = None
        self._abandoned = abandoned or _setup_threads
        self._limit_seconds = limit_seconds
        self.history = ""
        self.is_closed = False
        threading.Thread(target=self._serve, name="duetime-sqlserver", daemon=True).start()

    # -- on the event loop

    async def run(self, work: Callable[[Connection], T]) -> T:
        """Runs `work` on the thread, one at a time. After the limit, or if the waiting task is cancelled, the
        connection is terminated, and the outcome of the work is unknown."""
        if self.is_closed:
            raise ConnectionAbortedError("the connection is closed")
        self._answer = answer = self._loop.create_future()
        self._jobs.put((lambda: work(self), answer))
        try:
            async with asyncio.timeout(self._limit_seconds):
                return await answer  # type: ignore[no-any-return]
        except BaseException as error:
            if not answer.cancelled():
                raise
            self.terminate()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {self._limit_seconds:g} s") from None
            raise

    def terminate(self) -> None:
        """A thread that is blocked by the server cannot be stopped. It closes its connection when it is unblocked."""
        if not self.is_closed:
            self.is_closed = True
            self._abandoned.added()
            self._jobs.put(None)
            if self._answer is not None and (not self._answer.done() or self._answer.cancelled()):
                log.warning(
                    "sqlserver: terminated a connection whose server does not answer; blocked threads: %d",
                    self._abandoned.count,
                )
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionAbortedError("the connection was terminated"))

    # -- on the thread

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, answer = job
            try:
                result, error = work(), None
            except BaseException as failed:
                result, error = None, failed
            with contextlib.suppress(RuntimeError):  # the event loop is closed: no task waits for the result
                self._loop.call_soon_threadsafe(_set_result, answer, result, error)
        try:
            self.disconnect()
        finally:
            self._abandoned.removed()

    def connect(self, connection_string: str, within_seconds: float, cancel_seconds: int) -> None:
        seconds = max(1, round(within_seconds))
        self._connection = mssql_python.connect(connection_string, autocommit=True, timeout=seconds)
        self._connection.timeout = cancel_seconds

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._cursors.clear()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def execute(self, sql: str, document: str | None) -> Any:
        """Returns a cursor with the results. One cursor for each text is kept: its next call tells the server, in the
        same message, to discard the statement that it prepared before. Closing a cursor would need another message."""
        cursor = self._cursors.pop(sql, None) or self._connection.cursor()
        if document is None:
            cursor.execute(sql)
        else:
            cursor.setinputsizes([_TEXT])
            cursor.execute(sql, document)
        return cursor

    def keep(self, sql: str, cursor: Any) -> None:
        """Keeps a cursor whose results were read to the end, for the next call with the same text."""
        self._cursors[sql] = cursor


def _set_result(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def execute(db: Connection, sql: str, document: str | None = None) -> list[list[Row]]:
    """Returns all results of a batch, in order. The driver raises the error of a later statement only when its result
    is read, so all results are read."""
    cursor = db.execute(sql, document)
    results: list[list[Row]] = []
    while True:
        if cursor.description:
            results.append([tuple(row) for row in cursor.fetchall()])
        if not cursor.nextset():
            break
    db.keep(sql, cursor)
    return results


def fetch_until(db: Connection, sql: str, document: str, is_enough: Callable[[Sequence[Row]], bool]) -> list[Row]:
    """Returns the rows of a query. Stops when `is_enough`, called with each group of rows, returns true."""
    cursor = db.execute(sql, document)
    rows: list[Row] = []
    while group := [tuple(row) for row in cursor.fetchmany(FETCH_ROWS)]:
        rows += group
        if is_enough(group):
            cursor.close()
            return rows
    while cursor.nextset():
        pass
    db.keep(sql, cursor)
    return rows


FETCH_ROWS = 100  # in one call to the driver


async def connect(
    address: Address,
    within_seconds: float = CONNECT_SECONDS,
    cancel_seconds: int = _CANCEL_SECONDS,
    limit_seconds: float = _LIMIT_SECONDS,
    abandoned: AbandonedThreads | None = None,
) -> Connection:
    """Connects and sets the session up as statements.py requires. No work on it takes longer than the limit."""
    (abandoned or _setup_threads).check()
    db = Connection(abandoned, limit_seconds)

    def work(db: Connection) -> str:
        db.connect(address.connection_string, within_seconds, cancel_seconds)
        execute(db, _SETTINGS)
        try:
            [[row]] = execute(db, _HISTORY)
        except (mssql_python.DatabaseError, ValueError):
            [[row]] = execute(db, _NAME)
        return str(row[0])

    try:
        async with asyncio.timeout(within_seconds + 0.5):  # the driver counts in seconds
            db.history = await db.run(work)
    except BaseException:
        db.terminate()
        raise
    return db


# --- sessions ------------------------------------------------------------------------------------


class MssqlDriver:
    """Implements `sessions.Driver` with mssql-python."""

    name = "sqlserver"

    def __init__(self, address: Address, abandoned: AbandonedThreads | None = None) -> None:
        self._address = address
        self._abandoned = abandoned

    async def connect(self, within_seconds: float) -> Connection:
        return await connect(self._address, within_seconds, abandoned=self._abandoned)

    def is_closed(self, connection: Connection) -> bool:
        return connection.is_closed

    def terminate(self, connection: Connection) -> None:
        connection.terminate()

    async def close(self, connection: Connection) -> None:
        await connection.run(Connection.disconnect)

    async def rollback(self, connection: Connection) -> None:
        """Does nothing: a transaction ends with its batch."""

    def setup_error(self, error: Exception) -> SetupError | StoreUnavailable:
        return setup_error(self._address.label, error)

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """Only after a deadlock or a timeout of a lock it is certain that the connection can still be used."""
        failure = store_error(error, writing=writing)
        return failure, isinstance(failure, RetryAtOnce)


Work: TypeAlias = Callable[[Connection], T]


class Run(Protocol):
    """Runs a function on the thread of a session. A write is one batch and one transaction."""

    def __call__(self, work: Work[T], /) -> Awaitable[T]: ...


class SessionPool:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        driver = MssqlDriver(address, AbandonedThreads(count * ABANDONED_MAX))
        self._sessions: Sessions[Connection] = Sessions(driver, count, deadline_seconds, connect_seconds)

    async def read(self, work: Work[T], /) -> T:
        return await self._sessions.read(lambda db: db.run(work))

    async def write(self, work: Work[T], /) -> T:
        return await self._sessions.write(lambda db: db.run(work))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
