"""The way to the database under SqlServerStore: its URL, its connections, and what their errors mean.

The driver waits for the server, which the event loop must not: so each connection lives on a thread of its own. What
is said to the server is a constant text with one parameter, a JSON document: so no batch has more parameters than a
statement may have (2,100), none is NULL or of a type that the driver has to guess, and the server, which caches plans
by their text, plans nothing twice. The text itself is sent with every call: mssql-python binds the parameter again for
each, and Microsoft's ODBC driver then prepares the statement again (sp_prepexec), in the same message.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Awaitable, Callable, Sequence
from queue import SimpleQueue
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.rows import Row
from duetime.stores.sessions import CONNECT_SECONDS, Again, Sessions
from duetime.telemetry import log

try:
    import mssql_python
    from mssql_python.exceptions import sqlstate_to_exception
except ImportError:
    raise SetupError(
        "store.url: SQL Server needs its driver: pip install 'duetime[sqlserver]'", field="store.url"
    ) from None

__all__ = ["Address", "Line", "Link", "Run", "address_of", "ask", "connect", "setup_error", "store_error"]

T = TypeVar("T")
mssql_python.pooling(enabled=False)  # a connection that is closed is closed

# --- the URL -------------------------------------------------------------------------------------

# As in the connection strings of SQL Server, written small. Which of them the driver is given, and what they may say.
_OPTIONS = {
    "encrypt": "Encrypt",
    "trustservercertificate": "TrustServerCertificate",
    "hostnameincertificate": "HostnameInCertificate",
    "servercertificate": "ServerCertificate",
    "multisubnetfailover": "MultiSubnetFailover",
    "authentication": "Authentication",
}
_KNOWN_VALUES = {
    "encrypt": ("yes", "no", "strict", "mandatory", "optional"),
    "trustservercertificate": ("yes", "no"),
    "multisubnetfailover": ("yes", "no"),
}


class Address(Struct, frozen=True):
    """Where the database is, as the driver wants to hear it, and as a person may read it (no password)."""

    connection_string: str
    label: str

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(url: str) -> Address:
    """sqlserver://user:password@host:port/database?option=value, with the options of its connection strings."""
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(f"cannot be read: {error}") from None
    options = {name.lower(): value for name, value in given.items()}
    for name, value in options.items():
        if name not in _OPTIONS:
            raise _wrong(f"has the option {name!r}, which is not known; known are {', '.join(_OPTIONS)}")
        if value.lower() not in _KNOWN_VALUES.get(name, (value.lower(),)):
            raise _wrong(f"has {name}={value}; known are {', '.join(_KNOWN_VALUES[name])}")
    if parts.fragment:
        raise _wrong("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise _wrong("has an '@' in its password: there it is written %40")
    try:  # only now: where a port may stand can be a part of a password
        port = parts.port or 1433
    except ValueError:
        raise _wrong("has a port that is no number") from None
    if not parts.hostname:
        raise _wrong("names no host: sqlserver://user:password@HOST:1433/database")
    if not parts.username and "authentication" not in options:
        raise _wrong("names no user: sqlserver://USER:PASSWORD@host:1433/database")
    database = unquote(parts.path.strip("/"))
    if not database or "/" in database:
        raise _wrong("names no database: sqlserver://user:password@host:1433/DATABASE")
    said = {"Server": f"{parts.hostname},{port}", "Database": database}
    if parts.username:
        said |= {"UID": unquote(parts.username), "PWD": unquote(parts.password or "")}
    said |= {_OPTIONS[name]: value for name, value in options.items()}
    # A dead connection is found out, and none is mended in secret: whoever had begun something has to know.
    said |= {"KeepAlive": "10", "KeepAliveInterval": "2", "ConnectRetryCount": "0"}
    return Address(
        connection_string=";".join(f"{name}={_braced(value)}" for name, value in said.items()),
        label=f"{parts.hostname}:{port}/{database}",
    )


def _braced(value: str) -> str:
    return "{" + value.replace("}", "}}") + "}"


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the SQL Server URL {what}", field="store.url")


# --- errors --------------------------------------------------------------------------------------
#
# A write is one batch that begins a transaction and ends with its COMMIT: if the server answers with an error, it came
# before that, and was rolled back (XACT_ABORT). If the connection ends without an answer, nobody knows; and what the
# server says while it ends the connection, or is asked to stop, may be said after the COMMIT.
#
# The driver keeps neither the server's number nor the SQLSTATE, only a text for the latter; `_state_of` goes back.

_APPLIED_NOT: Final = False
_MAYBE: Final = True

# Each class of SQLSTATEs, and single ones that differ from their class. tests/unit/stores/test_sqlserver_errors.py
# fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: dict[str, bool] = {
    # The statement or its values were refused, or it lost against another one: rolled back.
    **dict.fromkeys(("07", "21", "22", "23", "24", "28", "34", "3C", "3D", "3F", "40", "42", "44"), _APPLIED_NOT),
    "40003": _MAYBE,  # statement completion unknown
    "01": _MAYBE,  # warnings: the driver does not raise them, so the meaning of an error with such a state is not known
    "25": _MAYBE,  # the state of the transaction is not what anybody thought
    # The connection failed; but not so if it never came about.
    "08": _MAYBE,
    "08001": _APPLIED_NOT,
    "08002": _APPLIED_NOT,
    "08004": _APPLIED_NOT,
    # From the driver itself, a timeout, or of no kind at all: among them what a server says when it ends a session.
    "HY": _MAYBE,
    "IM": _APPLIED_NOT,  # the driver could not be used
}

# By what the message says, in English: so the session asks for it.
#
# Errors 1205 and 1222: the server ended a deadlock, or a wait for a lock (LOCK_TIMEOUT), and rolled back. Checked
# before the SQLSTATE, which the driver chooses: by a general SQLSTATE a rollback would count as an unknown outcome.
_LOCKED_OUT = re.compile(
    r"(\[[^\]]*\])*(Lock request time out period exceeded|Transaction \(Process ID \d+\) was deadlocked)"
)
_OVERLOADED = (
    "The service is currently busy",
    "the server is currently too busy",
    "limit for the database is",
    "maximum number of user connections",
)
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("Could not allocate space", "the disk of the database is full, or its file must not grow"),
    ("The transaction log for database", "the transaction log of the database is full"),
    ("Lock request time out", "the database gave up waiting for a lock"),
    ("data would be truncated", "a value is too long for its column: this write can never be applied"),
    ("deadlock", "the database broke a deadlock"),
    ("is read-only", "the database is read-only"),
    ("SHUTDOWN is in progress", "the database is shutting down"),
    ("Communication link failure", "the connection was lost"),
    ("TCP Provider", "the connection was lost"),
)


_WARNING: Final = "01"
_DEADLOCK: Final = "40001"


def _states_by_text() -> dict[str, str]:
    """The driver's texts, each with the worst of the SQLSTATEs it stands for.

    Except that of a warning (01…), if the text also stands for an error: the driver raises errors only. One text
    stands for 22001 (data too long, refused) and for 01004 (an answer that was cut, a warning).
    """
    found: dict[str, str] = {}
    for state in sorted(_STATES):  # warnings come first
        error = sqlstate_to_exception(state, "")
        if error is None:
            continue
        known = found.get(error.driver_error, "")
        if known.startswith(_WARNING) or not _may(known):
            found[error.driver_error] = state
    return found


def _may(state: str) -> bool:
    return bool(state) and MAY_HAVE_COMMITTED.get(state, MAY_HAVE_COMMITTED.get(state[:2], _MAYBE))


# Those that the driver has a text for.
_STATES: Final = (
    "01000", "01001", "01002", "01003", "01004", "01006", "01007", "01S00", "01S01", "01S02", "01S06", "01S07",
    "01S08", "01S09", "07001", "07002", "07005", "07006", "07009", "07S01", "08001", "08002", "08003", "08004",
    "08007", "08S01", "21S01", "21S02", "22001", "22002", "22003", "22007", "22008", "22012", "22015", "22018",
    "22019", "22025", "22026", "23000", "24000", "25000", "25S01", "25S02", "25S03", "28000", "34000", "3C000",
    "3D000", "3F000", "40001", "40002", "40003", "42000", "42S01", "42S02", "42S11", "42S12", "42S21", "42S22",
    "44000", "HY000", "HY001", "HY003", "HY004", "HY007", "HY008", "HY009", "HY010", "HY011", "HY012", "HY013",
    "HY014", "HY015", "HY016", "HY017", "HY018", "HY019", "HY020", "HY021", "HY024", "HY090", "HY091", "HY092",
    "HY095", "HY096", "HY097", "HY098", "HY099", "HY100", "HY101", "HY103", "HY104", "HY105", "HY106", "HY107",
    "HY109", "HY110", "HY111", "HYC00", "HYT00", "HYT01", "IM001", "IM002", "IM003", "IM004", "IM005", "IM006",
    "IM007", "IM008", "IM009", "IM010", "IM011", "IM012", "IM013", "IM014", "IM015",
)  # fmt: skip
_TEXTS: Final = _states_by_text()
_UNLISTED: Final = "An error occurred with SQLSTATE code: "


def state_of(error: BaseException) -> str:
    """The SQLSTATE, as far as it can be known."""
    text = str(getattr(error, "driver_error", ""))
    return text.removeprefix(_UNLISTED) if text.startswith(_UNLISTED) else _TEXTS.get(text, "")


def may_have_committed(error: BaseException) -> bool:
    """Of an error met by a write after it was begun."""
    if _is_locked_out(error):
        return False
    state = state_of(error)
    if not state:  # the driver's refusals, made before anything is sent: a closed connection, a closed cursor
        return not isinstance(error, mssql_python.InterfaceError)
    return _may(state)


def _is_locked_out(error: BaseException) -> bool:
    return state_of(error) == _DEADLOCK or bool(_LOCKED_OUT.match(_in_words(error)))


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    said = _in_words(error)
    text = next((text for part, text in _MESSAGES if part in said), type(error).__name__)
    detail = f"sqlserver: {text} ({said})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if _is_locked_out(error):
        return Again(detail)
    return StoreThrottled(detail) if any(part in said for part in _OVERLOADED) else StoreUnavailable(detail)


def _in_words(error: BaseException) -> str:
    text = str(getattr(error, "ddbc_error", "") or error) or type(error).__name__
    return text.replace("[Microsoft]", "").replace("[SQL Server]", "").partition("\n")[0].strip()


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    if isinstance(error, StoreUnavailable):
        return error
    said = _in_words(error)
    for part, text in _EXPLANATIONS:
        if part in (said, state_of(error)) or (len(part) > 5 and part in said):
            return SetupError(f"store.url: {address.label} {text} ({said})", field="store.url")
    if isinstance(error, TimeoutError):
        why = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
        return StoreUnavailable(f"sqlserver: {address.label}: {why}")
    if state_of(error).startswith("08"):
        return StoreUnavailable(f"sqlserver: {address.label} cannot be reached ({said})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("Cannot open database", "does not exist, or this user may not use it; CREATE DATABASE … makes it"),
    ("28000", "refuses the user or the password"),
    ("SSL Provider", "gives no TLS connection as encrypt and trustservercertificate ask for"),
    ("certificate", "gives no TLS connection as encrypt and trustservercertificate ask for"),
    ("permission", "does not allow this user to do what is needed; `duetime serve` makes its tables itself:"
                   " ALTER ROLE db_owner ADD MEMBER …; once they are made, db_datareader and db_datawriter do"),
    ("42S01", "has tables of another program under the names needed here; name a database of its own"),
    ("There is already an object", "has tables of another program under the names needed here;"
                                   " name a database of its own"),
    ("is read-only", "is read-only: a secondary, or it was set so"),
    ("Failed to load the driver", "cannot be reached: Microsoft's ODBC driver, which comes with mssql-python, needs"
                                  " libraries of the system (Debian: apt install libltdl7 libkrb5-3)"),
)  # fmt: skip


# --- connections ---------------------------------------------------------------------------------

# What the fences are proven under, what indexes over some of the rows ask for, and how messages are read.
_SETTINGS = """
SET LANGUAGE us_english;
SET XACT_ABORT ON; SET NOCOUNT ON; SET IMPLICIT_TRANSACTIONS OFF;
SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
SET LOCK_TIMEOUT 4000;
SET QUOTED_IDENTIFIER, ANSI_NULLS, ANSI_PADDING, ANSI_WARNINGS, ARITHABORT, CONCAT_NULL_YIELDS_NULL ON;
SET NUMERIC_ROUNDABORT OFF;
"""
# What tells a database from the one it was before a failover that lost something, or a restore. Where that is not
# told (it is for owners, and not for Azure), the server's name: it is another one after every failover to it.
_HISTORY = (
    "SELECT CAST(recovery_fork_guid AS nvarchar(36)) FROM sys.database_recovery_status WHERE database_id = DB_ID()"
)
_NAME = "SELECT CAST(SERVERPROPERTY('ServerName') AS nvarchar(128))"
# After _PATIENCE_SECONDS the driver tells the server to stop (the attention signal), and then waits for the server to
# confirm it, without a limit: if the server does not answer at all, the thread stays blocked. So there is a limit
# outside the driver too: _LIMIT_SECONDS, or an earlier one in sessions.py.
_PATIENCE_SECONDS = 15
_LIMIT_SECONDS = 20.0
_TEXT = (mssql_python.SQL_WVARCHAR, 0, 0)  # nvarchar(max), whatever its length and its letters
ABANDONED_MAX = 8  # threads of one session that may wait for a server that does not answer


class Abandoned:
    """Counts threads whose connection was given up and that have not ended: the driver may still be waiting.

    Each holds a socket and a stack, and cannot be stopped. At the limit no connection is opened until one has ended.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._lock = threading.Lock()

    def check(self) -> None:
        if self.count >= self.limit:
            raise StoreUnavailable(
                f"sqlserver: no new connection: {self.count} threads still wait for a server that does not answer"
            )

    def begins(self) -> None:
        with self._lock:
            self.count += 1

    def ends(self) -> None:
        with self._lock:
            self.count -= 1


_of_setup = Abandoned(ABANDONED_MAX)  # of connections that belong to no line


class Link:
    """A connection and the thread that it lives on."""

    def __init__(self, abandoned: Abandoned | None = None, limit_seconds: float = _LIMIT_SECONDS) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Any] | None = None
        self._cursors: dict[str, Any] = {}
        self._connection: Any = None
        self._abandoned = abandoned or _of_setup
        self._limit_seconds = limit_seconds
        self.history = ""
        self.is_closed = False
        threading.Thread(target=self._live, name="duetime-sqlserver", daemon=True).start()

    # -- on the event loop

    async def run(self, work: Callable[[Link], T]) -> T:
        """Does the work on the thread. One at a time. Past the limit, or if the waiting task is cancelled, the
        connection is given up: the outcome of work that was begun is unknown."""
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
        """A thread that waits for the server cannot be stopped. It is left alone, and closes when it is back."""
        if not self.is_closed:
            self.is_closed = True
            self._abandoned.begins()
            self._jobs.put(None)
            if self._answer is not None and (not self._answer.done() or self._answer.cancelled()):
                log.warning(
                    "sqlserver: gave up a connection whose server does not answer; threads not ended yet: %d",
                    self._abandoned.count,
                )
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionAbortedError("the connection was given up"))

    # -- on the thread

    def _live(self) -> None:
        while (job := self._jobs.get()) is not None:
            work, answer = job
            try:
                result, error = work(), None
            except BaseException as failed:
                result, error = None, failed
            with contextlib.suppress(RuntimeError):  # the loop is gone, and with it whoever waited
                self._loop.call_soon_threadsafe(_tell, answer, result, error)
        try:
            self.disconnect()
        finally:
            self._abandoned.ends()

    def connect(self, connection_string: str, within_seconds: float, patience_seconds: int) -> None:
        seconds = max(1, round(within_seconds))
        self._connection = mssql_python.connect(connection_string, autocommit=True, timeout=seconds)
        self._connection.timeout = patience_seconds

    def disconnect(self) -> None:
        connection, self._connection = self._connection, None
        self._cursors.clear()
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.close()

    def execute(self, sql: str, document: str | None) -> Any:
        """A cursor on the answer. One for each text is kept: its next call tells the server, in the same message, to
        discard the statement that it had prepared before. Closing the cursor would need a message of its own."""
        cursor = self._cursors.pop(sql, None) or self._connection.cursor()
        if document is None:
            cursor.execute(sql)
        else:
            cursor.setinputsizes([_TEXT])
            cursor.execute(sql, document)
        return cursor

    def keep(self, sql: str, cursor: Any) -> None:
        """One whose answer was read to its end."""
        self._cursors[sql] = cursor


def _tell(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


def ask(link: Link, sql: str, document: str | None = None) -> list[list[Row]]:
    """All results of a batch, in its order. An error of a later statement shows only to whoever goes on to it: so this
    goes to the end."""
    cursor = link.execute(sql, document)
    results: list[list[Row]] = []
    while True:
        if cursor.description:
            results.append([tuple(row) for row in cursor.fetchall()])
        if not cursor.nextset():
            break
    link.keep(sql, cursor)
    return results


def ask_until(link: Link, sql: str, document: str, enough: Callable[[Sequence[Row]], bool]) -> list[Row]:
    """The rows of a query. `enough` is asked after every portion whether it is."""
    cursor = link.execute(sql, document)
    rows: list[Row] = []
    while portion := [tuple(row) for row in cursor.fetchmany(PORTION_ROWS)]:
        rows += portion
        if enough(portion):
            cursor.close()
            return rows
    while cursor.nextset():
        pass
    link.keep(sql, cursor)
    return rows


PORTION_ROWS = 100


async def connect(
    address: Address,
    within_seconds: float = CONNECT_SECONDS,
    patience_seconds: int = _PATIENCE_SECONDS,
    limit_seconds: float = _LIMIT_SECONDS,
    abandoned: Abandoned | None = None,
) -> Link:
    """A session with the settings that this module relies on. No work on it takes longer than the limit."""
    (abandoned or _of_setup).check()
    link = Link(abandoned, limit_seconds)

    def work(link: Link) -> str:
        link.connect(address.connection_string, within_seconds, patience_seconds)
        ask(link, _SETTINGS)
        try:
            [[row]] = ask(link, _HISTORY)
        except (mssql_python.DatabaseError, ValueError):
            [[row]] = ask(link, _NAME)
        return str(row[0])

    try:
        async with asyncio.timeout(within_seconds + 0.5):  # the driver counts in seconds
            link.history = await link.run(work)
    except BaseException:
        link.terminate()
        raise
    return link


# --- sessions ------------------------------------------------------------------------------------


class _Driver:
    """mssql-python, as a session uses it."""

    name = "sqlserver"

    def __init__(self, address: Address, abandoned: Abandoned) -> None:
        self._address = address
        self._abandoned = abandoned

    async def connect(self, within_seconds: float) -> Link:
        return await connect(self._address, within_seconds, abandoned=self._abandoned)

    def is_closed(self, connection: Link) -> bool:
        return connection.is_closed

    def terminate(self, connection: Link) -> None:
        connection.terminate()

    async def close(self, connection: Link) -> None:
        await connection.run(Link.disconnect)

    async def rollback(self, connection: Link) -> None:
        """No transaction outlives its batch."""

    def refusal(self, error: Exception) -> str:
        return setup_error(self._address, error).detail

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """Only after a deadlock or a wait for a lock it is sure that the session is as good as before."""
        failure = store_error(error, writing=writing)
        return failure, isinstance(failure, Again)


Work: TypeAlias = Callable[[Link], T]


class Run(Protocol):
    """Does a piece of work on the thread of one of the store's sessions; a write is one batch, and one transaction."""

    def __call__(self, work: Work[T], /) -> Awaitable[T]: ...


class Line:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        driver = _Driver(address, Abandoned(count * ABANDONED_MAX))
        self._sessions: Sessions[Link] = Sessions(driver, count, deadline_seconds, connect_seconds)

    async def read(self, work: Work[T], /) -> T:
        return await self._sessions.read(lambda link: link.run(work))

    async def write(self, work: Work[T], /) -> T:
        return await self._sessions.write(lambda link: link.run(work))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
