"""The way to the database under MySqlStore: its URL, its connections, and what their errors mean.

MySQL, MariaDB and TiDB speak the same protocol. What is said to them is SQL that all three understand; what only TiDB
has to hear stands in comments that only TiDB reads. Statements that need nothing from us in between travel together,
in one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, Again, Sessions

try:
    import asyncmy
    from asyncmy.constants import CLIENT
    from asyncmy.cursors import Cursor
except ImportError:
    raise SetupError("store.url: MySQL needs its driver: pip install 'duetime[mysql]'", field="store.url") from None

__all__ = [
    "BEGIN",
    "Address",
    "Line",
    "Read",
    "Write",
    "address_of",
    "ask",
    "conclude",
    "connect",
    "setup_error",
    "store_error",
]

T = TypeVar("T")
Connection: TypeAlias = "_Connection"
Answer: TypeAlias = Any  # rows of a query; how many rows anything else has met

# --- the URL -------------------------------------------------------------------------------------

_OPTIONS = ("socket", "ssl-ca", "ssl-cert", "ssl-key", "ssl-mode")
_SSL_MODES = ("preferred", "disabled", "required", "verify_ca", "verify_identity")


class Address(Struct, frozen=True):
    """Where the database is, and as a person may read it (no password)."""

    label: str
    host: str
    port: int
    user: str
    password: str
    database: str
    socket: str | None = None
    ssl_mode: str = "preferred"
    ssl_ca: str | None = None
    ssl_cert: str | None = None
    ssl_key: str | None = None

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(url: str) -> Address:
    """mysql://user:password@host:port/database?option=value, with the options of MySQL's own clients."""
    try:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(f"cannot be read: {error}") from None
    options = {name.replace("_", "-").lower(): value for name, value in given.items()}
    for name in options:
        if name not in _OPTIONS:
            raise _wrong(f"has the option {name!r}, which is not known; known are {', '.join(_OPTIONS)}")
    if parts.fragment:
        raise _wrong("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise _wrong("has an '@' in its password: there it is written %40")
    if "," in parts.netloc.rpartition("@")[2]:
        raise _wrong("names more than one host: name the one that leads to the primary")
    try:
        port = parts.port or 3306
    except ValueError:  # whose text may be a part of a password
        raise _wrong("has a port that is none") from None
    database = unquote(parts.path.strip("/"))
    if not database or "/" in database:
        raise _wrong(f"names no database: {parts.scheme}://user:password@host:3306/DATABASE")
    # As MySQL's own clients: whoever names an authority wants the server's certificate to be one of its.
    mode = options.get("ssl-mode", "verify_ca" if "ssl-ca" in options else _SSL_MODES[0]).lower().replace("-", "_")
    if mode not in _SSL_MODES:
        raise _wrong(f"has ssl-mode={options['ssl-mode']}; known are {', '.join(_SSL_MODES)}")
    host, where = parts.hostname or "localhost", options.get("socket")
    return Address(
        label=f"{where or f'{host}:{port}'}/{database}",
        host=host,
        port=port,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
        database=database,
        socket=where,
        ssl_mode=mode,
        ssl_ca=options.get("ssl-ca"),
        ssl_cert=options.get("ssl-cert"),
        ssl_key=options.get("ssl-key"),
    )


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the MySQL URL {what}", field="store.url")


# --- errors --------------------------------------------------------------------------------------
#
# What a transaction said before its COMMIT is undone with the connection, whatever goes wrong. So this is about COMMIT
# itself, and about statements that are a transaction each. If the server answers one with an error that is about the
# statement, it was rolled back; if the connection ends without an answer, nobody knows. In between stand the errors
# that come with the end of a connection or a server: a commit that waits for a replica is in the log already.

_APPLIED_NOT: Final = False
_MAYBE: Final = True

# By number. tests/unit/stores/test_mysql_errors.py fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: dict[int, bool] = {
    # The driver's own: never connected, or gone before anything was sent; lost while an answer was waited for.
    **dict.fromkeys((0, 2003, 2006, 2026, 2059), _APPLIED_NOT),
    **dict.fromkeys((2013, 2014), _MAYBE),
    # Refused: what the statement says, who says it, what it met. These are the same for all three.
    **dict.fromkeys(range(1_000, 1_469), _APPLIED_NOT),
    # Files that could not be written or closed, "unknown error", damaged tables.
    **dict.fromkeys((1023, 1026, 1030, 1105, 1194, 1195, 1296, 1297), _MAYBE),
    # The connection or the server ends, or somebody ends the statement.
    **dict.fromkeys((1053, 1077, 1078, 1079, 1080, 1152, *range(1_154, 1_162), 1184, 1317, 1927, 1969), _MAYBE),
    # The commit itself, or the rollback, or the logs.
    **dict.fromkeys((1180, 1181, 1182, 1183, 1186, 1196), _MAYBE),
    # MySQL's and MariaDB's later ones: too many transactions, read-only, a timeout of a query, a group that decided
    # against the commit, a lock that would not be waited for, a constraint, a session that was idle too long.
    **dict.fromkeys((1637, 1665, 1698, 1792, 1836, 3024, 3101, 3159, 3572, 4025, 4031), _APPLIED_NOT),
    # TiDB's: conflicts, too large, tables that changed meanwhile.
    **dict.fromkeys((8002, 8004, 8005, 8022, 8024, 8025, 8027, 8028, 8252, 9007), _APPLIED_NOT),
    # Its storage does not answer, or not in time.
    **dict.fromkeys((9001, 9002, 9003, 9004, 9005, 9006, 9008), _MAYBE),
}

# Rolled back, and may well work at once: deadlocks, waits for a lock that were too long, conflicts, changed tables.
_TRY_AGAIN = frozenset({1205, 1213, 1412, 8002, 8005, 8022, 8027, 8028, 9007})
_OVERLOADED = frozenset({1040, 1041, 1135, 1203, 1226, 1637, 8252, 9003, 9008})
# The server became read-only under the session, or has ended it: whoever connects anew may find another one.
_MOVED = frozenset({1290, 1792, 1836, 4031})

_MESSAGES: dict[int, str] = {
    1021: "the disk of the database is full",
    1040: "the database has no connection left",
    1041: "the database is out of memory",
    1053: "the database is shutting down",
    1114: "the disk of the database is full",
    1153: "the database's max_allowed_packet is too small",
    1203: "the database has no connection left for this user",
    1205: "the database gave up waiting for a lock",
    1213: "the database broke a deadlock",
    1290: "the database is read-only",
    1317: "the statement was cancelled on the server",
    1836: "the database is read-only",
    2013: "the connection was lost",
    8025: "the timer is too large for the database (txn-entry-size-limit)",
}


class RolledBack(Exception):
    """The server refused something that was said before COMMIT, in the same message: so nothing was committed."""


def number_of(error: BaseException) -> int | None:
    number = error.args[0] if error.args and isinstance(error, asyncmy.MySQLError) else None
    return number if isinstance(number, int) else None


def _is_answer(number: int | None) -> bool:
    """Of the server, and not the driver's own."""
    return bool(number) and not 2_000 <= (number or 0) < 3_000


def may_have_committed(error: BaseException) -> bool:
    """Of an error met by a COMMIT, or by a statement that is a transaction of its own, after it was sent."""
    number = number_of(error)
    return MAY_HAVE_COMMITTED.get(number, _MAYBE) if number is not None else not isinstance(error, RolledBack)


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    cause = error.__cause__ if isinstance(error, RolledBack) and error.__cause__ else error
    number = number_of(cause)
    detail = f"mysql: {_MESSAGES.get(number or 0, type(cause).__name__)} ({_in_words(cause)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if number in _TRY_AGAIN:
        return Again(detail)
    return StoreThrottled(detail) if number in _OVERLOADED else StoreUnavailable(detail)


def _in_words(error: BaseException) -> str:
    text = str(error.args[1]) if number_of(error) is not None and len(error.args) > 1 else str(error)
    return (text or type(error).__name__).partition("\n")[0]


_EXPLANATIONS: dict[int, str] = {
    1044: "does not let this user in: GRANT ALL ON … TO …",
    1045: "refuses the user or the password",
    1049: "does not exist; CREATE DATABASE … CHARACTER SET utf8mb4 makes it",
    1050: "has tables of another program under the names needed here; name a database of its own",
    1130: "does not let anybody in from here",
    1142: "does not allow this user to do what is needed; `duetime serve` makes its tables itself: GRANT ALL ON … TO …;"
    " where they are made, GRANT SELECT, INSERT, UPDATE, DELETE ON … TO … is enough",
    1193: "does not know a setting that is needed: is it MySQL, MariaDB or TiDB?",
    1227: "does not allow this user to do what is needed",
    1290: "is read-only: a replica, or read_only is on",
    1665: "has binlog_format = STATEMENT, which does not go with read committed; ROW or MIXED is needed",
    1698: "refuses the user or the password",
    1836: "is read-only: a replica, or read_only is on",
    2026: "gives no TLS connection as ssl-mode asks for",
    2059: "wants a way of proving who one is that the driver does not know",
    3159: "wants TLS: say ?ssl-mode=required, or better verify_identity",
}


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    if isinstance(error.__cause__, ssl.SSLError):  # the driver calls it an unreachable host
        error = asyncmy.OperationalError(2026, str(error.__cause__))
    explanation = _EXPLANATIONS.get(number_of(error) or 0)
    if explanation is not None:
        return SetupError(f"store.url: {address.label} {explanation} ({_in_words(error)})", field="store.url")
    if isinstance(error, RuntimeError):  # the driver's word for a package that it needs for some kinds of passwords
        return SetupError(f"store.url: {address.label}: {_in_words(error)}", field="store.url")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"mysql: {address.label} does not answer within {CONNECT_SECONDS:g} s")
    if number_of(error) == 2003:
        return StoreUnavailable(f"mysql: {address.label} cannot be reached ({_in_words(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]


# --- connections ---------------------------------------------------------------------------------

PACKET_BYTES_MIN = 16 * 1024 * 1024  # a payload of 4 MiB may be twice as long in a statement, where " is \"
# Whoever waits for a lock waits longer than anybody may hold one.
HOLD_SECONDS = 3
LOCK_WAIT_SECONDS = 4
_IDLE_SECONDS = 86_400

# What the fences are proven under. Strict, so that what does not fit is refused; and as escaping knows it.
_SETTINGS = (
    "SET NAMES utf8mb4",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION autocommit = 1, time_zone = '+00:00',"
    f" sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS},"
    f" wait_timeout = {_IDLE_SECONDS}",
    "SELECT @@GLOBAL.read_only, @@max_allowed_packet",
)
# A client that stops in the middle of a transaction, frozen or cut off, must not hold its locks for long: the server
# ends a connection on which it has waited for the next word so many seconds. TiDB has to be told to take locks at all.
BEGIN = (f"SET SESSION wait_timeout = {HOLD_SECONDS}", "BEGIN /*T! PESSIMISTIC */")
_AFTERWARDS = f"SET SESSION wait_timeout = {_IDLE_SECONDS}"


class _Cursor(Cursor):
    async def _show_warnings(self, conn: Any) -> None:
        """The driver would ask for them, and log them."""


class _Connection(asyncmy.Connection):
    """Checks whether the server supports TLS at all, and closes at once a connection that is not used any more."""

    tls_is_optional = False
    server_capabilities: int
    _client_flag: int
    _transport: Any
    _ssl_context: ssl.SSLContext | None

    async def _get_server_information(self) -> None:
        await super()._get_server_information()  # type: ignore[misc]
        if self._ssl_context is None or self.server_capabilities & CLIENT.SSL:
            return
        if not self.tls_is_optional:
            raise asyncmy.OperationalError(2026, "the server does not speak TLS")
        self._ssl_context = None
        self._client_flag &= ~CLIENT.SSL

    def close(self) -> None:
        """The driver calls this for a connection whose login failed, and drops it. Its own `close` would leave a TLS
        connection open until the server has closed its side, up to half a minute."""
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


def _tls(address: Address) -> ssl.SSLContext | None:
    if address.ssl_mode == "disabled" or address.socket is not None:
        return None
    try:
        if address.ssl_mode.startswith("verify"):
            context = ssl.create_default_context(cafile=address.ssl_ca)
            context.check_hostname = address.ssl_mode == "verify_identity"
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if address.ssl_cert is not None:
            context.load_cert_chain(address.ssl_cert, address.ssl_key)
    except OSError as error:  # ssl's own errors are among them
        raise _wrong(f"names TLS files that cannot be used: {_in_words(error)}") from None
    return context


async def connect(address: Address, within_seconds: float = CONNECT_SECONDS, read_seconds: float | None = None) -> Any:
    """A session in the state that everything here relies on, with a server that may be written to."""
    connection = _Connection(  # type: ignore[no-untyped-call]
        host=address.host,
        port=address.port,
        unix_socket=address.socket,
        user=address.user,
        password=address.password.encode(),
        database=address.database,
        ssl=_tls(address),
        client_flag=CLIENT.FOUND_ROWS,  # an UPDATE answers how many rows it found, changed or not
        autocommit=None,
        connect_timeout=within_seconds,
        read_timeout=read_seconds,
        cursor_cls=_Cursor,
        program_name="duetime",
    )
    connection.tls_is_optional = address.ssl_mode == "preferred"
    try:
        async with asyncio.timeout(within_seconds):
            await connection.connect()
            _keep_alive(connection._transport.get_extra_info("socket"))
            [*_, [[read_only, packet_bytes]]] = await ask(connection, _SETTINGS)
        if int(read_only):
            raise asyncmy.OperationalError(1290, "read_only is on")
        if int(packet_bytes) < PACKET_BYTES_MIN:
            raise SetupError(
                f"store.url: {address.label} has a max_allowed_packet of {packet_bytes};"
                f" {PACKET_BYTES_MIN} or more is needed",
                field="store.url",
            )
    except BaseException:
        _terminate(connection)
        raise
    return connection


def _keep_alive(link: Any) -> None:
    """So that a connection notices by itself when its other end is gone."""
    if link is None or link.family == getattr(socket, "AF_UNIX", None):
        return
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            with contextlib.suppress(OSError):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _terminate(connection: Any) -> None:
    transport = connection._transport
    if transport is not None:
        transport.abort()  # kept in the connection, so that later calls find a closed transport


async def ask(connection: Any, statements: Sequence[str]) -> list[Answer]:
    """The answers to statements that travel in one message. At the first that fails the server stops."""
    answers: list[Answer] = []
    await _ask(connection, statements, answers)
    return answers


async def _ask(connection: Any, statements: Sequence[str], answers: list[Answer]) -> None:
    cursor = connection.cursor()
    await cursor.execute(";".join(statements))
    while True:
        answers.append(cursor.rowcount if cursor.description is None else await cursor.fetchall())
        if not await cursor.nextset():
            return


async def conclude(connection: Any, statements: Sequence[str]) -> list[Answer]:
    """The last words of a transaction, and its COMMIT in the same message; without any it is as if never begun."""
    answers: list[Answer] = []
    try:
        await _ask(connection, (*statements, "COMMIT" if statements else "ROLLBACK", _AFTERWARDS), answers)
    except asyncmy.MySQLError as error:
        if len(answers) > len(statements):  # it is committed; what failed came after
            connection.close()
            return answers[: len(statements)]
        if len(answers) < len(statements) and _is_answer(number_of(error)):
            raise RolledBack from error
        raise
    return answers[:-2]


# --- sessions ------------------------------------------------------------------------------------


class _Driver:
    """asyncmy, as a session uses it."""

    name = "mysql"

    def __init__(self, address: Address) -> None:
        self._address = address

    async def connect(self, within_seconds: float) -> Any:
        return await connect(self._address, within_seconds)

    def is_closed(self, connection: Any) -> bool:
        transport = connection._transport
        return transport is None or transport.is_closing() or connection._stream_broken or not connection.connected

    def terminate(self, connection: Any) -> None:
        _terminate(connection)

    async def close(self, connection: Any) -> None:
        await connection.ensure_closed()

    async def rollback(self, connection: Any) -> None:
        await ask(connection, ("ROLLBACK", _AFTERWARDS))

    def refusal(self, error: Exception) -> str:
        return error.detail if isinstance(error, SetupError) else setup_error(self._address, error).detail

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """A connection whose COMMIT failed may have its transaction still open, and BEGIN would commit that."""
        number = number_of(error)
        about_the_statement = _is_answer(number) and not may_have_committed(error) and number not in _MOVED
        return store_error(error, writing=writing), about_the_statement and not writing


Work: TypeAlias = Callable[[Any], Awaitable[T]]


class Write(Protocol):
    """Runs a transaction: `work` begins it, `commit` ends it. Without `commit`, `work` is one statement."""

    def __call__(self, work: Work[T], commit: Work[None] | None = None, /) -> Awaitable[T]: ...


Read: TypeAlias = Callable[[Sequence[str]], Awaitable[list[Answer]]]
"""Runs statements in one of the sessions, in one message."""


class Line:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions: Sessions[Any] = Sessions(_Driver(address), count, deadline_seconds, connect_seconds)

    async def read(self, statements: Sequence[str]) -> list[Answer]:
        return await self._sessions.read(lambda db: ask(db, statements))

    async def write(self, work: Work[T], commit: Work[None] | None = None, /) -> T:
        return await self._sessions.write(work, commit)

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
