"""Connections of PostgresStore to its database: the URL, the settings of a session, and the session pool.

Behind a pooler that shares connections by transaction (`?pooler=transaction`) every statement is a transaction
of three messages, and no statement stays prepared.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode, urlunsplit

import asyncpg
from asyncpg.connect_utils import SessionAttribute
from msgspec import Struct

from duetime.errors import SetupError, StoreError, StoreUnavailable
from duetime.stores.postgres.errors import connection_survives, setup_error, store_error
from duetime.stores.sessions import CONNECT_SECONDS, Sessions, enable_keepalive
from duetime.stores.store_url import StoreUrl, parse_store_url

__all__ = ["Address", "AsyncpgDriver", "SessionPool", "address_of", "begin_sql", "connect"]

Connection: TypeAlias = "asyncpg.Connection[Any]"

# --- the URL -------------------------------------------------------------------------------------

# Options of asyncpg, and options that the server receives when a connection starts.
_DRIVER_OPTIONS = frozenset(
    {
        "host", "port", "user", "password", "passfile", "dbname", "database", "target_session_attrs",
        "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation",
        "ssl_min_protocol_version", "ssl_max_protocol_version", "krbsrvname", "gsslib",
    }
)  # fmt: skip
_SERVER_OPTIONS = frozenset({"application_name", "options"})
_OWN_OPTIONS = frozenset({"pooler", "schema"})
_PASSED_ON = _DRIVER_OPTIONS - {"target_session_attrs"} | {"options"}  # to the driver, in the URL
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_PRIMARIES = ("any", "primary", "read-write")


class Address(Struct, frozen=True):
    """The parsed URL of the database. `dsn` is for the driver; `label` has no password."""

    dsn: str
    label: str
    schema: str | None = None
    pooled: bool = False  # behind a pooler that shares connections by transaction
    by_session: bool = False  # behind a pooler by session: settings are sent as the first statement of a connection
    application_name: str = "duetime"
    target: str = "primary"

    def __repr__(self) -> str:
        return f"Address({self.label})"


def address_of(text: str) -> Address:
    """postgresql://user:password@host:port/database?option=value, as in libpq; and `pooler`, `schema`."""
    url = parse_store_url(text, "PostgreSQL")
    parts, options = url.parts, url.options
    url.check_options(sorted(_DRIVER_OPTIONS | _SERVER_OPTIONS | _OWN_OPTIONS))
    if not parts.path.strip("/") and not options.keys() & {"dbname", "database"}:
        raise url.error("names no database: postgresql://user:password@host:5432/DATABASE")
    url.check_value("sslmode", _SSL_MODES)
    url.check_value("pooler", ("transaction", "session", "none"))
    url.check_value("target_session_attrs", _PRIMARIES)
    schema = options.get("schema")
    if schema is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema):
        raise url.error(f"has the schema {schema!r}: allowed are letters, digits and underscores, at most 63")
    target = options.get("target_session_attrs", "primary")
    given = {name: value for name, value in options.items() if name in _PASSED_ON}
    return Address(
        dsn=urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(given, quote_via=quote), "")),
        label=_label(url),
        schema=schema,
        pooled=options.get("pooler") == "transaction",
        by_session=options.get("pooler") == "session",
        application_name=options.get("application_name", "duetime"),
        target="primary" if target == "any" else target,
    )


def _label(url: StoreUrl) -> str:
    host = url.hosts or url.options.get("host", "")
    database = url.parts.path.strip("/") or url.options.get("dbname", url.options.get("database", ""))
    return f"{host or 'the local server'}/{database}"


# --- sessions ------------------------------------------------------------------------------------

# Every statement uses an index and is planned once. statements.py says why.
_PLANNING = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}


def _server_settings(address: Address) -> dict[str, str]:
    """Settings that are sent when a connection starts. A pooler passes on only the application name."""
    name = {"application_name": address.application_name}
    return name if address.pooled or address.by_session else name | _session_settings(address)


def _session_settings(address: Address) -> dict[str, str]:
    settings = {
        "default_transaction_isolation": "read committed",  # the fences are correct under this level
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        **_PLANNING,
    }
    if address.schema is not None:
        settings["search_path"] = address.schema
    return settings


def begin_sql(address: Address) -> str:
    """READ WRITE, because a standby rejects it: nothing may be read from a standby."""
    settings = dict(_PLANNING) | {"idle_in_transaction_session_timeout": "15s"}
    if address.schema is not None:
        settings["search_path"] = address.schema
    sets = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in settings.items())
    return f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE{sets}"


class _Connection(asyncpg.Connection):
    """A connection with TCP keepalive, which detects that the other side is gone."""

    def __init__(self, protocol: Any, transport: Any, *rest: Any) -> None:
        super().__init__(protocol, transport, *rest)
        enable_keepalive(transport.get_extra_info("socket"))


class _LoginLoop:
    """An event loop for the driver's login that records the connections which were opened.

    If a login fails, the driver closes a TLS connection and waits until the server has closed its side, for up to half
    a minute. Here such connections are aborted at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        return self._recorded(await self._loop.create_connection(*args, **options))

    async def create_unix_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        return self._recorded(await self._loop.create_unix_connection(*args, **options))

    def _recorded(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
        self._opened.append(made[0])
        return made

    def succeeded(self) -> None:
        self._opened.clear()

    def abort(self) -> None:
        """Aborts the transports below TLS: a TLS transport that is already closing would ignore it."""
        for transport in self._opened:
            transport.abort()


async def connect(address: Address, within_seconds: float = CONNECT_SECONDS) -> Connection:
    """Opens a session. If that fails for any reason, no connection stays open."""
    login = _LoginLoop(asyncio.get_running_loop())
    try:
        async with asyncio.timeout(within_seconds):
            connection = await _logged_in(address, within_seconds, login)
            if address.by_session:
                settings = _session_settings(address).items()
                await connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in settings))
    except BaseException:
        login.abort()
        raise
    login.succeeded()
    return connection


async def _logged_in(address: Address, within_seconds: float, loop: Any) -> Connection:
    return await asyncpg.connect(
        address.dsn,
        loop=loop,
        timeout=within_seconds,
        connection_class=_Connection,
        server_settings=_server_settings(address),
        statement_cache_size=0 if address.pooled else 200,
        max_cached_statement_lifetime=0,
        # Behind a pooler the check of the driver could reach two servers. There BEGIN READ WRITE is the check.
        target_session_attrs=None if address.pooled else SessionAttribute(address.target),
    )


class AsyncpgDriver:
    """Implements `sessions.Driver` with asyncpg."""

    name = "postgresql"

    def __init__(self, address: Address) -> None:
        self._address = address

    async def connect(self, within_seconds: float) -> Connection:
        return await connect(self._address, within_seconds)

    def is_closed(self, connection: Connection) -> bool:
        return connection.is_closed()

    def terminate(self, connection: Connection) -> None:
        connection.terminate()

    async def close(self, connection: Connection) -> None:
        await connection.close()

    async def rollback(self, connection: Connection) -> None:
        await connection.execute("ROLLBACK")

    def setup_error(self, error: Exception) -> SetupError | StoreUnavailable:
        return setup_error(self._address.label, error)

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        return store_error(error, writing=writing), connection_survives(error)


class SessionPool:
    """Runs statements in sessions for one kind of work. Each statement is a transaction: one message, or behind a
    pooler three."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions = Sessions(AsyncpgDriver(address), count, deadline_seconds, connect_seconds)
        self._pooled = address.pooled
        self._begin = begin_sql(address)

    async def read(self, sql: str, *args: Any) -> list[Any]:
        if self._pooled:
            return await self._sessions.read(lambda db: self._in_transaction(db, sql, args), _commit)
        return await self._sessions.read(lambda db: db.fetch(sql, *args))

    async def write(self, sql: str, *args: Any) -> list[Any]:
        if self._pooled:
            return await self._sessions.write(lambda db: self._in_transaction(db, sql, args), _commit)
        return await self._sessions.write(lambda db: db.fetch(sql, *args))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()

    async def _in_transaction(self, db: Connection, sql: str, args: Sequence[Any]) -> list[Any]:
        await db.execute(self._begin)
        rows: list[Any] = await db.fetch(sql, *args)
        return rows


async def _commit(db: Connection) -> None:
    answer = await db.execute("COMMIT")
    if answer != "COMMIT":
        raise StoreUnavailable(f"postgresql: the transaction was rolled back ({answer})")
