"""Connections of OracleStore to its database: the URL, the settings of a session, and the session pool."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar
from urllib.parse import unquote

import oracledb
from msgspec import Struct

from duetime.errors import SetupError, StoreError, StoreUnavailable
from duetime.stores.oracle.errors import connection_survives, is_hidden, setup_error, store_error
from duetime.stores.sessions import CONNECT_SECONDS, Sessions
from duetime.stores.store_url import parse_store_url

__all__ = ["Address", "Connection", "OracledbDriver", "Run", "SessionPool", "address_of", "connect"]

T = TypeVar("T")

# --- the URL -------------------------------------------------------------------------------------

_DRIVER_OPTIONS = ("wallet_location", "wallet_password", "ssl_server_dn_match", "ssl_server_cert_dn", "server_type")
_OPTIONS = frozenset({*_DRIVER_OPTIONS, "protocol", "schema", "sid"})
_ALLOWED_VALUES = {
    "protocol": ("tcp", "tcps"),
    "ssl_server_dn_match": ("true", "false"),
    "server_type": ("dedicated", "shared", "pooled"),
}


class Address(Struct, frozen=True):
    """The parsed URL of the database. `dsn` and `options` are for the driver; `label` has no password."""

    dsn: str
    label: str
    user: str
    password: str
    schema: str | None = None
    options: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(text: str) -> Address:
    """oracle://user:password@host:port/service?option=value; several hosts are separated by commas."""
    url = parse_store_url(text, "Oracle")
    options = url.options
    url.check_options(sorted(_OPTIONS))
    for name, allowed in _ALLOWED_VALUES.items():
        url.check_value(name, allowed)
    user, _, password = (unquote(part) for part in url.user_info.partition(":"))
    if not user:
        raise url.error("names no user: oracle://USER:PASSWORD@host:1521/service")
    if not url.hosts:
        raise url.error("names no host: oracle://user:password@HOST:1521/service")
    service = url.database
    if bool(service) == ("sid" in options):
        raise url.error("names no service: oracle://user:password@host:1521/SERVICE, or ?sid=SID for an old database")
    schema = options.get("schema")
    if schema is not None and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_$#]{0,127}", schema):
        raise url.error(f"has the schema {schema!r}: allowed are letters, digits and underscores, at most 128")
    return Address(
        dsn=_dsn(url.hosts, service, options),
        label=f"{url.hosts}/{service or options['sid']}",
        user=user,
        password=password,
        schema=schema,
        options={name: _driver_value(value) for name, value in options.items() if name in _DRIVER_OPTIONS},
    )


def _driver_value(value: str) -> str | bool:
    return {"true": True, "false": False}.get(value, value)


def _dsn(hosts: str, service: str, options: dict[str, str]) -> str:
    """The "Easy Connect" syntax, which allows several hosts; for a SID, which it does not support, a descriptor."""
    protocol = options.get("protocol", "tcp")
    if service:
        return f"{protocol}://{hosts}/{service}"
    host, _, port = hosts.partition(":")
    address = f"(ADDRESS=(PROTOCOL={protocol})(HOST={host})(PORT={port or 1521}))"
    return f"(DESCRIPTION={address}(CONNECT_DATA=(SID={options['sid']})))"


# --- connections ---------------------------------------------------------------------------------

# Settings that statements.py requires, and that a database may have changed: text is compared as bytes, a statement
# sees what was committed before it, and a commit is on disk before it is acknowledged.
_SETTINGS = (
    "ALTER SESSION SET NLS_COMP = BINARY",
    "ALTER SESSION SET NLS_SORT = BINARY",
    "ALTER SESSION SET ISOLATION_LEVEL = READ COMMITTED",
    "ALTER SESSION SET COMMIT_LOGGING = 'IMMEDIATE'",
    "ALTER SESSION SET COMMIT_WAIT = 'WAIT'",
)
# The history of a database changes with a failover or a restore: it says where the log was started again. A user who
# may not read it reads the unique name instead, which is different on a standby.
_HISTORY = "SELECT TO_CHAR(resetlogs_change#) || ' ' || TO_CHAR(resetlogs_time, 'YYYYMMDDHH24MISS') FROM v$database"
_NAME = "SELECT SYS_CONTEXT('USERENV', 'DB_UNIQUE_NAME') FROM dual"


class Connection:
    """A connection that can be terminated while a call to the driver waits for the server."""

    def __init__(self, connection: oracledb.AsyncConnection, history: str) -> None:
        self.connection = connection
        self.history = history  # of the database at the time of the connect: a change of it ends all connections
        self._terminated: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_closed(self) -> bool:
        return self._terminated.done() or not self.connection.is_healthy()

    async def run(self, work: Work[T]) -> T:
        task = asyncio.ensure_future(work(self))
        try:
            either: set[asyncio.Future[Any]] = {task, self._terminated}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ConnectionAbortedError("the connection was terminated")
        finally:
            if not task.done():
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                task.cancel()

    def terminate(self) -> None:
        if not self._terminated.done():
            self._terminated.set_result(None)
        _terminate(self.connection)


Work: TypeAlias = Callable[[Connection], Awaitable[T]]


class Run(Protocol):
    """Runs a function in a session. A write is a transaction that is committed after the function."""

    def __call__(self, work: Work[T], /) -> Awaitable[T]: ...


def _terminate(connection: oracledb.AsyncConnection) -> None:
    """`terminate` of the driver is meant for connections whose event loop is closed. Older drivers do not have it; then
    the connection is closed by garbage collection."""
    terminate = getattr(connection, "terminate", None)
    if terminate is not None:
        with contextlib.suppress(Exception):
            terminate()


async def connect(address: Address, within_seconds: float = CONNECT_SECONDS) -> Connection:
    """Connects and sets the session up as statements.py requires."""
    async with asyncio.timeout(within_seconds):
        connection = await oracledb.connect_async(
            user=address.user,
            password=address.password,
            dsn=address.dsn,
            tcp_connect_timeout=within_seconds,
            retry_count=0,
            expire_time=1,  # minutes between probes of an idle connection: the minimum
            driver_name="duetime",
            **address.options,
        )
        try:
            return Connection(connection, await _prepare(address, connection))
        except BaseException:
            _terminate(connection)
            raise


async def _prepare(address: Address, connection: oracledb.AsyncConnection) -> str:
    """Sets the session up. Returns the history of the database."""
    for sql in _SETTINGS:
        await connection.execute(sql)
    if address.schema is not None:
        await connection.execute(f"ALTER SESSION SET CURRENT_SCHEMA = {address.schema}")
    try:
        row = await connection.fetchone(_HISTORY)
    except oracledb.DatabaseError as error:
        if not is_hidden(error):
            raise
        row = await connection.fetchone(_NAME)
    return str(row[0])


# --- sessions ------------------------------------------------------------------------------------


class OracledbDriver:
    """Implements `sessions.Driver` with python-oracledb."""

    name = "oracle"

    def __init__(self, address: Address) -> None:
        self._address = address

    async def connect(self, within_seconds: float) -> Connection:
        return await connect(self._address, within_seconds)

    def is_closed(self, connection: Connection) -> bool:
        return connection.is_closed

    def terminate(self, connection: Connection) -> None:
        connection.terminate()

    async def close(self, connection: Connection) -> None:
        await connection.connection.close()

    async def rollback(self, connection: Connection) -> None:
        await connection.run(_rollback)

    def setup_error(self, error: Exception) -> SetupError | StoreUnavailable:
        return setup_error(self._address.label, error)

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        """A connection whose COMMIT failed may still have its transaction open, and the next COMMIT would commit it."""
        return store_error(error, writing=writing), connection_survives(error) and not writing


async def _commit(db: Connection) -> None:
    await db.connection.commit()


async def _rollback(db: Connection) -> None:
    await db.connection.rollback()


class SessionPool:
    """Sessions for one kind of work."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions: Sessions[Connection] = Sessions(
            OracledbDriver(address), count, deadline_seconds, connect_seconds
        )

    async def read(self, work: Work[T], /) -> T:
        """A query starts no transaction, so there is no COMMIT."""
        return await self._sessions.read(lambda db: db.run(work))

    async def write(self, work: Work[T], /) -> T:
        return await self._sessions.write(lambda db: db.run(work), lambda db: db.run(_commit))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()
