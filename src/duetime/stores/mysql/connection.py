"""Connections of MySqlStore to its database: the URL, the settings of a session, and the session pool.

MySQL, MariaDB and TiDB use the same protocol. The SQL is what all three understand; what only TiDB needs is in comments
that only TiDB reads. Statements that do not depend on the results of each other are sent in one message.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import asyncmy
from asyncmy.constants import CLIENT
from asyncmy.cursors import Cursor
from msgspec import Struct

from duetime.errors import SetupError, StoreError, StoreUnavailable
from duetime.stores.mysql.errors import (
    RolledBack,
    connection_survives,
    first_line,
    is_from_server,
    number_of,
    setup_error,
    store_error,
)
from duetime.stores.sessions import CONNECT_SECONDS, Sessions, enable_keepalive
from duetime.stores.store_url import parse_store_url, store_url_error

__all__ = [
    "BEGIN",
    "Address",
    "AsyncmyDriver",
    "Read",
    "SessionPool",
    "Write",
    "address_of",
    "connect",
    "execute",
    "execute_and_commit",
]

T = TypeVar("T")
Connection: TypeAlias = "_Connection"
Result: TypeAlias = Any  # of a query: its rows; of another statement: how many rows it matched

# --- the URL -------------------------------------------------------------------------------------

_OPTIONS = ("socket", "ssl-ca", "ssl-cert", "ssl-key", "ssl-mode")
_SSL_MODES = ("preferred", "disabled", "required", "verify_ca", "verify_identity")


class Address(Struct, frozen=True):
    """The parsed URL of the database. `label` has no password."""

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


def address_of(text: str) -> Address:
    """mysql://user:password@host:port/database?option=value, with the options of MySQL's own clients."""
    url = parse_store_url(text, "MySQL", lambda name: name.replace("_", "-").lower())
    parts, options = url.parts, url.options
    url.check_options(_OPTIONS)
    if "," in url.hosts:
        raise url.error("names more than one host: name one that leads to the primary")
    port, database = url.port(3306), url.database
    if not database or "/" in database:
        raise url.error(f"names no database: {parts.scheme}://user:password@host:3306/DATABASE")
    # As in MySQL's own clients: with ssl-ca the certificate of the server is verified.
    mode = options.get("ssl-mode", "verify_ca" if "ssl-ca" in options else _SSL_MODES[0]).lower().replace("-", "_")
    if mode not in _SSL_MODES:
        raise url.error(f"has ssl-mode={options['ssl-mode']}; allowed: {', '.join(_SSL_MODES)}")
    host, socket = parts.hostname or "localhost", options.get("socket")
    return Address(
        label=f"{socket or f'{host}:{port}'}/{database}",
        host=host,
        port=port,
        user=unquote(parts.username or "root"),
        password=unquote(parts.password or ""),
        database=database,
        socket=socket,
        ssl_mode=mode,
        ssl_ca=options.get("ssl-ca"),
        ssl_cert=options.get("ssl-cert"),
        ssl_key=options.get("ssl-key"),
    )


# --- connections ---------------------------------------------------------------------------------

PACKET_BYTES_MIN = 16 * 1024 * 1024  # a payload of 4 MiB may be twice as long in a statement, where " is \"
# A lock is waited for longer than any transaction may hold one.
HOLD_SECONDS = 3
LOCK_WAIT_SECONDS = 4
_IDLE_SECONDS = 86_400

# The fences are correct under this isolation level. Strict, so that values that do not fit are rejected. `literal`
# in rows.py escapes for this sql_mode.
_SETTINGS = (
    "SET NAMES utf8mb4",
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    "SET SESSION autocommit = 1, time_zone = '+00:00',"
    f" sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', innodb_lock_wait_timeout = {LOCK_WAIT_SECONDS},"
    f" wait_timeout = {_IDLE_SECONDS}",
    "SELECT @@GLOBAL.read_only, @@max_allowed_packet",
)
# A client that stops in the middle of a transaction, frozen or disconnected, must not hold its locks for long: the
# server ends a connection on which it has waited this long for the next statement. TiDB takes locks only if asked to.
BEGIN = (f"SET SESSION wait_timeout = {HOLD_SECONDS}", "BEGIN /*T! PESSIMISTIC */")
_AFTER_COMMIT = f"SET SESSION wait_timeout = {_IDLE_SECONDS}"


class _Cursor(Cursor):
    async def _show_warnings(self, conn: Any) -> None:
        """Does nothing. The driver would request the warnings and log them."""


class _Connection(asyncmy.Connection):
    """Checks whether the server supports TLS, and closes a connection without waiting for the server."""

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
            raise asyncmy.OperationalError(2026, "the server does not support TLS")
        self._ssl_context = None
        self._client_flag &= ~CLIENT.SSL

    def close(self) -> None:
        """The driver calls this for a connection whose login failed. Its own `close` would leave a TLS connection open
        until the server has closed its side, for up to half a minute."""
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
    except OSError as error:  # also the errors of ssl
        raise store_url_error(f"the MySQL URL names TLS files that cannot be used: {first_line(error)}") from None
    return context


async def connect(address: Address, within_seconds: float = CONNECT_SECONDS, read_seconds: float | None = None) -> Any:
    """Connects and sets the session up as statements.py requires. Raises if the server cannot be written to."""
    connection = _Connection(  # type: ignore[no-untyped-call]
        host=address.host,
        port=address.port,
        unix_socket=address.socket,
        user=address.user,
        password=address.password.encode(),
        database=address.database,
        ssl=_tls(address),
        client_flag=CLIENT.FOUND_ROWS,  # an UPDATE returns how many rows it matched, changed or not
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
            enable_keepalive(connection._transport.get_extra_info("socket"))
            [*_, [[read_only, packet_bytes]]] = await execute(connection, _SETTINGS)
        if int(read_only):
            raise asyncmy.OperationalError(1290, "read_only is on")
        if int(packet_bytes) < PACKET_BYTES_MIN:
            raise store_url_error(
                f"{address.label} has a max_allowed_packet of {packet_bytes}; {PACKET_BYTES_MIN} or more is needed"
            )
    except BaseException:
        _terminate(connection)
        raise
    return connection


def _terminate(connection: Any) -> None:
    transport = connection._transport
    if transport is not None:
        transport.abort()  # not set to None, so that later calls find a closed transport


async def execute(connection: Any, statements: Sequence[str]) -> list[Result]:
    """Sends statements in one message and returns their results. The server stops at the first one that fails."""
    results: list[Result] = []
    await _execute(connection, statements, results)
    return results


async def _execute(connection: Any, statements: Sequence[str], results: list[Result]) -> None:
    cursor = connection.cursor()
    await cursor.execute(";".join(statements))
    while True:
        results.append(cursor.rowcount if cursor.description is None else await cursor.fetchall())
        if not await cursor.nextset():
            return


async def execute_and_commit(connection: Any, statements: Sequence[str]) -> list[Result]:
    """Sends the last statements of a transaction and its COMMIT in one message. Rolls back if there are none."""
    results: list[Result] = []
    try:
        await _execute(connection, (*statements, "COMMIT" if statements else "ROLLBACK", _AFTER_COMMIT), results)
    except asyncmy.MySQLError as error:
        if len(results) > len(statements):  # it is committed; a later statement failed
            connection.close()
            return results[: len(statements)]
        if len(results) < len(statements) and is_from_server(number_of(error)):
            raise RolledBack from error
        raise
    return results[:-2]


# --- sessions ------------------------------------------------------------------------------------


class AsyncmyDriver:
    """Implements `sessions.Driver` with asyncmy."""

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
        await execute(connection, ("ROLLBACK", _AFTER_COMMIT))

    def setup_error(self, error: Exception) -> SetupError | StoreUnavailable:
        return error if isinstance(error, SetupError) else setup_error(self._address.label, error)

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """A connection whose COMMIT failed may still have its transaction open, and BEGIN would commit it."""
        return store_error(error, writing=writing), connection_survives(error) and not writing


Work: TypeAlias = Callable[[Any], Awaitable[T]]


class Write(Protocol):
    """Runs a transaction: `work` begins it, `commit` ends it. Without `commit`, `work` is one statement."""

    def __call__(self, work: Work[T], commit: Work[None] | None = None, /) -> Awaitable[T]: ...


Read: TypeAlias = Callable[[Sequence[str]], Awaitable[list[Result]]]
"""Runs statements in a session, in one message."""


class SessionPool:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions: Sessions[Any] = Sessions(AsyncmyDriver(address), count, deadline_seconds, connect_seconds)

    async def read(self, statements: Sequence[str]) -> list[Result]:
        return await self._sessions.read(lambda db: execute(db, statements))

    async def write(self, work: Work[T], commit: Work[None] | None = None, /) -> T:
        return await self._sessions.write(work, commit)

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
