"""The way to the database under OracleStore: its URL, its connections, and what their errors mean."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, Again, Sessions

try:
    import oracledb
except ImportError:
    raise SetupError("store.url: Oracle needs its driver: pip install 'duetime[oracle]'", field="store.url") from None

__all__ = ["Address", "Line", "Link", "Run", "address_of", "code_of", "connect", "setup_error", "store_error"]

T = TypeVar("T")

# --- the URL -------------------------------------------------------------------------------------

_DRIVER_OPTIONS = ("wallet_location", "wallet_password", "ssl_server_dn_match", "ssl_server_cert_dn", "server_type")
_OPTIONS = frozenset({*_DRIVER_OPTIONS, "protocol", "schema", "sid"})
_KNOWN_VALUES = {
    "protocol": ("tcp", "tcps"),
    "ssl_server_dn_match": ("true", "false"),
    "server_type": ("dedicated", "shared", "pooled"),
}


class Address(Struct, frozen=True):
    """Where the database is, as the driver wants to hear it, and as a person may read it (no password)."""

    dsn: str
    label: str
    user: str
    password: str
    schema: str | None = None
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(url: str) -> Address:
    """oracle://user:password@host:port/service?option=value; several hosts are told apart by commas."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(f"cannot be read: {error}") from None
    for name, value in options.items():
        if name not in _OPTIONS:
            raise _wrong(f"has the option {name!r}, which is not known; known are {', '.join(sorted(_OPTIONS))}")
        if value not in _KNOWN_VALUES.get(name, (value,)):
            raise _wrong(f"has {name}={value}; known are {', '.join(_KNOWN_VALUES[name])}")
    if parts.fragment:
        raise _wrong("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise _wrong("has an '@' in its password: there it is written %40")
    who, _, hosts = parts.netloc.rpartition("@")
    user, _, password = (unquote(part) for part in who.partition(":"))
    if not user:
        raise _wrong("names no user: oracle://USER:PASSWORD@host:1521/service")
    if not hosts:
        raise _wrong("names no host: oracle://user:password@HOST:1521/service")
    service = unquote(parts.path.strip("/"))
    if bool(service) == ("sid" in options):
        raise _wrong("names no service: oracle://user:password@host:1521/SERVICE, or, of old, ?sid=SID instead")
    schema = options.get("schema")
    if schema is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_$#]{0,127}", schema):
        raise _wrong(f"has the schema {schema!r}: letters, digits and underscores, at most 128")
    return Address(
        dsn=_dsn(hosts, service, options),
        label=f"{hosts}/{service or options['sid']}",
        user=user,
        password=password,
        schema=schema,
        options={name: _as_asked(value) for name, value in options.items() if name in _DRIVER_OPTIONS},
    )


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the Oracle URL {what}", field="store.url")


def _as_asked(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value, value)


def _dsn(hosts: str, service: str, options: dict[str, str]) -> str:
    """As "Easy Connect", which knows several hosts, or, for a SID, which that does not know, as a descriptor."""
    protocol = options.get("protocol", "tcp")
    if service:
        return f"{protocol}://{hosts}/{service}"
    host, _, port = hosts.partition(":")
    address = f"(ADDRESS=(PROTOCOL={protocol})(HOST={host})(PORT={port or 1521}))"
    return f"(DESCRIPTION={address}(CONNECT_DATA=(SID={options['sid']})))"


# --- errors --------------------------------------------------------------------------------------
#
# A statement that the server answers with an error was rolled back; the transaction it belongs to is not, which is
# for the session to do. If the connection ends without an answer, nobody knows; and the errors that come with its end
# may come after the commit. What is not listed here is not known either.

_APPLIED_NOT: Final = False
_MAYBE: Final = True

# By the number after ORA-. tests/unit/stores/test_oracle_errors.py fails when the driver has one that is not listed.
MAY_HAVE_COMMITTED: dict[int, bool] = {
    # Values, constraints, and what else is wrong with a statement.
    **dict.fromkeys((1, 1400, 1401, 1407, 1438, 1440, 1455, 1461, 1722, 1795, 2289, 2290, 2291, 2292), _APPLIED_NOT),
    **dict.fromkeys((12899, 21525, 24381, 24816, 30926, 38104, 40479, 22165, 22303, 24338, 24349), _APPLIED_NOT),
    **dict.fromkeys((900, 903, 904, 905, 906, 907, 911, 913, 917, 922, 923, 933, 936, 942, 947, 955), _APPLIED_NOT),
    **dict.fromkeys((972, 979, 1008, 1031, 1036, 1408, 1418, 1427, 1430, 1740, 1756, 24344, 38902), _APPLIED_NOT),
    # It lost against another one, or waited too long.
    **dict.fromkeys((51, 54, 60, 2049, 4020, 4021, 8176, 8177, 30006), _APPLIED_NOT),
    # There is no room: memory, cursors, undo, disk, quota.
    **dict.fromkeys((1000, 1536, 1555, 1562, 1628, 1950, 4030, 4031, 30036), _APPLIED_NOT),
    **dict.fromkeys((1650, 1651, 1652, 1653, 1654, 1655, 1658, 1659, 1683, 1688, 1691, 1692, 1693), _APPLIED_NOT),
    # The database does not take writes, or takes a file for unreadable.
    **dict.fromkeys((376, 439, 1115, 1502, 8102, 8103, 16000, 16456), _APPLIED_NOT),
    # The whole transaction was rolled back.
    **dict.fromkeys((2091, 24761, 25402), _APPLIED_NOT),
    # There never was a connection, or no session on it.
    **dict.fromkeys((18, 20, 257, 1005, 1017, 1035, 1045, 2391, 7455, 28000, 28001), _APPLIED_NOT),
    **dict.fromkeys((12154, 12170, 12203, 12500, 12505, 12514, 12516, 12518, 12519, 12520), _APPLIED_NOT),
    **dict.fromkeys((12526, 12527, 12528, 12541, 12545, 12757, 1033, 1034, 1090), _APPLIED_NOT),
    # The driver's own pool and other features, which are not used.
    **dict.fromkeys((24422, 24457, 24459, 24496, 26202, 26211, 26216, 29970), _APPLIED_NOT),
    # The session, the process or the instance ended, or an operator put an end to it.
    **dict.fromkeys((22, 28, 31, 45, 378, 600, 602, 603, 604, 609, 1012, 1013, 1041, 1043, 1089, 1092), _MAYBE),
    **dict.fromkeys((2396, 3111, 3113, 3114, 3122, 3135, 7445, 27146, 28511, 56600), _MAYBE),
    **dict.fromkeys((12153, 12537, 12547, 12570, 12571, 12583), _MAYBE),
    # A commit of which the server itself says that it does not know.
    **dict.fromkeys((1591, 2050, 2051, 2053, 2054, 25405, 25408), _MAYBE),
}

# The driver's own errors, by their thousands, and single ones that differ: 1 the interface was misused, 2 so was a
# call, 3 something is not supported, 4 from the database, 5 a surprise in the protocol, 6 no connection came about,
# 7 a warning, 8 a value does not fit.
DRIVER_MAY_HAVE_COMMITTED: dict[int, bool] = {
    **dict.fromkeys((1, 2, 6, 8), _APPLIED_NOT),
    **dict.fromkeys((3, 4, 5, 7), _MAYBE),
    **dict.fromkeys((4000, 4001, 4008, 4009, 4010, 4017, 4018, 4026, 4027), _APPLIED_NOT),  # before anything is sent
}

# Rolled back, and may well work at once: deadlocks, waits for a lock that were too long.
_TRY_AGAIN = frozenset({51, 54, 60, 8177, 30006})
# No more sessions or processes, or the resource manager refuses.
_OVERLOADED = frozenset({18, 20, 2391, 7455, 12516, 12518, 12519, 12520})
# The server became read-only under the session: whoever connects anew may find another one.
_MOVED = frozenset({16000, 16456})

_MESSAGES: dict[int, str] = {
    60: "the database broke a deadlock",
    257: "the archiver of the database is stuck: its disk is full",
    1033: "the database is starting or stopping",
    1034: "the database is not running",
    1089: "the database is shutting down",
    1090: "the database is shutting down",
    1536: "the quota of the user is used up",
    1653: "the tablespace is full",
    1654: "the tablespace is full",
    1691: "the tablespace is full",
    3113: "the connection broke",
    16000: "the database is read-only: a standby",
    30006: "a lock was not to be had in time",
    30036: "the undo tablespace is full",
}


def code_of(error: BaseException) -> int:
    """The number after ORA-, 0 if it is none of the server's."""
    return int(getattr(error.args[0] if error.args else None, "code", 0) or 0)


def _driver_code_of(error: BaseException) -> int:
    full = str(getattr(error.args[0] if error.args else None, "full_code", "") or "")
    return int(full[4:]) if full.startswith("DPY-") and full[4:].isdigit() else 0


def may_have_committed(error: BaseException) -> bool:
    """Of an error met by a write after it was begun."""
    if code := code_of(error):
        return MAY_HAVE_COMMITTED.get(code, _MAYBE)
    if code := _driver_code_of(error):
        return DRIVER_MAY_HAVE_COMMITTED.get(code, DRIVER_MAY_HAVE_COMMITTED.get(code // 1000, _MAYBE))
    return _MAYBE


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    code = code_of(error)
    detail = f"oracle: {_MESSAGES.get(code, type(error).__name__)} ({_in_words(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if code in _TRY_AGAIN:
        return Again(detail)
    return StoreThrottled(detail) if code in _OVERLOADED else StoreUnavailable(detail)


def _in_words(error: BaseException) -> str:
    """The server's word, where the driver has put its own before it."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Help:")]
    return next((line for line in lines if line.startswith("ORA-")), "; ".join(lines[:2]) or type(error).__name__)


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    text = _EXPLANATIONS.get(code_of(error)) or _DRIVER_EXPLANATIONS.get(_driver_code_of(error))
    if text is not None:
        return SetupError(f"store.url: {address.label} {text} ({_in_words(error)})", field="store.url")
    if isinstance(error.__cause__ or error, ssl.SSLError):
        return SetupError(
            f"store.url: {address.label}: no TLS connection as protocol=tcps and the wallet ask for"
            f" ({_in_words(error)})",
            field="store.url",
        )
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"oracle: {address.label} does not answer within {CONNECT_SECONDS:g} s")
    if isinstance(error, OSError) or _driver_code_of(error) // 1000 == 6:
        return StoreUnavailable(f"oracle: {address.label} cannot be reached ({_in_words(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_NO_SERVICE = "knows no such service, or has not opened it yet; lsnrctl status tells which there are"
_RIGHTS = (
    "does not allow this user to do what is needed; `duetime serve` makes its tables itself:"
    " GRANT CREATE SESSION, CREATE TABLE, CREATE VIEW TO …"
)
_ROOM = "has no room for this user's tables: ALTER USER … QUOTA UNLIMITED ON …"
_EXPLANATIONS: dict[int, str] = {
    955: "has tables of another program under the names needed here; use a user of its own",
    942: _RIGHTS,
    1005: "needs a password: oracle://user:PASSWORD@…",
    1017: "refuses the user or the password",
    1031: _RIGHTS,
    1045: "does not let this user in: GRANT CREATE SESSION TO …",
    1435: "has no such user or schema",
    1536: _ROOM,
    1950: _ROOM,
    12505: _NO_SERVICE,
    12514: _NO_SERVICE,
    16000: "is read-only: a standby",
    28000: "has locked this account: ALTER USER … ACCOUNT UNLOCK",
    28001: "wants a new password of this user: it has expired",
    30006: "is being updated by another instance for too long; is one of them stuck?",
}
_DRIVER_EXPLANATIONS: dict[int, str] = {
    3010: "is an Oracle that the driver cannot speak to: it is too old",
    3015: "keeps this user's password in an old way that the driver does not know: set it again (ALTER USER …)",
    3016: "needs a Python package that is missing: pip install cryptography",
    4026: "is to be reached with a wallet, of which a file is missing",
    4027: "is to be reached with a wallet, of which the folder is missing",
    6001: _NO_SERVICE,
    6002: "shows a certificate with another name (ssl_server_cert_dn)",
    6003: _NO_SERVICE,
}


# --- connections ---------------------------------------------------------------------------------

# What a database may have set otherwise, and everything here is written for: text is compared as bytes, a statement
# sees what was committed before it, and a commit is on disk before it is answered.
_SETTINGS = (
    "ALTER SESSION SET NLS_COMP = BINARY",
    "ALTER SESSION SET NLS_SORT = BINARY",
    "ALTER SESSION SET ISOLATION_LEVEL = READ COMMITTED",
    "ALTER SESSION SET COMMIT_LOGGING = 'IMMEDIATE'",
    "ALTER SESSION SET COMMIT_WAIT = 'WAIT'",
)
# What tells a database from the one it was before a failover or a restore: where its log was begun anew. Who may not
# read that reads the name, which a standby has of its own.
_HISTORY = "SELECT TO_CHAR(resetlogs_change#) || ' ' || TO_CHAR(resetlogs_time, 'YYYYMMDDHH24MISS') FROM v$database"
_NAME = "SELECT SYS_CONTEXT('USERENV', 'DB_UNIQUE_NAME') FROM dual"


class Link:
    """A connection that can be given up while it is waited for, whatever the driver thinks of that."""

    def __init__(self, connection: oracledb.AsyncConnection, history: str) -> None:
        self.connection = connection
        self.history = history  # of the database when it was connected to: it changes only while nobody is
        self._given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_closed(self) -> bool:
        return self._given_up.done() or not self.connection.is_healthy()

    async def run(self, work: Work[T]) -> T:
        task = asyncio.ensure_future(work(self))
        try:
            either: set[asyncio.Future[Any]] = {task, self._given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionAbortedError("the connection was given up")
        finally:
            if not task.done():
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                task.cancel()

    def terminate(self) -> None:
        if not self._given_up.done():
            self._given_up.set_result(None)
        _terminate(self.connection)


Work: TypeAlias = Callable[[Link], Awaitable[T]]


class Run(Protocol):
    """Does a piece of work in one of the store's sessions; a write is a transaction, committed after it."""

    def __call__(self, work: Work[T], /) -> Awaitable[T]: ...


def _terminate(connection: oracledb.AsyncConnection) -> None:
    """The driver means this for connections whose event loop is gone. Of older drivers, when it is garbage."""
    end = getattr(connection, "terminate", None)
    if end is not None:
        with contextlib.suppress(Exception):
            end()


async def connect(address: Address, within_seconds: float = CONNECT_SECONDS) -> Link:
    """A session in the state that everything here relies on."""
    async with asyncio.timeout(within_seconds):
        connection = await oracledb.connect_async(
            user=address.user,
            password=address.password,
            dsn=address.dsn,
            tcp_connect_timeout=within_seconds,
            retry_count=0,
            expire_time=1,  # minutes between probes of an idle connection: the least there is
            driver_name="duetime",
            **address.options,
        )
        try:
            return Link(connection, await _prepare(address, connection))
        except BaseException:
            _terminate(connection)
            raise


async def _prepare(address: Address, connection: oracledb.AsyncConnection) -> str:
    """Answers the database's history."""
    for sql in _SETTINGS:
        await connection.execute(sql)
    if address.schema is not None:
        await connection.execute(f"ALTER SESSION SET CURRENT_SCHEMA = {address.schema}")
    try:
        row = await connection.fetchone(_HISTORY)
    except oracledb.DatabaseError as error:
        if code_of(error) not in (942, 1031):
            raise
        row = await connection.fetchone(_NAME)
    return str(row[0])


# --- sessions ------------------------------------------------------------------------------------


class _Driver:
    """python-oracledb, as a session uses it."""

    name = "oracle"

    def __init__(self, address: Address) -> None:
        self._address = address

    async def connect(self, within_seconds: float) -> Link:
        return await connect(self._address, within_seconds)

    def is_closed(self, connection: Link) -> bool:
        return connection.is_closed

    def terminate(self, connection: Link) -> None:
        connection.terminate()

    async def close(self, connection: Link) -> None:
        await connection.connection.close()

    async def rollback(self, connection: Link) -> None:
        await connection.run(_rollback)

    def refusal(self, error: Exception) -> str:
        return setup_error(self._address, error).detail

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """A connection whose COMMIT failed may have its transaction still open, and the next one would commit that."""
        code = code_of(error)
        lives = not writing and code not in _MOVED and not MAY_HAVE_COMMITTED.get(code, _MAYBE)
        return store_error(error, writing=writing), lives


async def _commit(link: Link) -> None:
    await link.connection.commit()


async def _rollback(link: Link) -> None:
    await link.connection.rollback()


class Line:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions: Sessions[Link] = Sessions(_Driver(address), count, deadline_seconds, connect_seconds)

    async def read(self, work: Work[T], /) -> T:
        """A query opens no transaction, so there is none to end."""
        return await self._sessions.read(lambda link: link.run(work))

    async def write(self, work: Work[T], /) -> T:
        return await self._sessions.write(lambda link: link.run(work), lambda link: link.run(_commit))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
