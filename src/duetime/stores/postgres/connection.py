"""The way to the database under PostgresStore: its URL, its connections, and what their errors mean.

Behind a pooler that shares connections by transaction (`?pooler=transaction`) every statement is a transaction
of three messages, and nothing is kept prepared.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from msgspec import Struct

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, Sessions

try:
    import asyncpg
    from asyncpg.connect_utils import SessionAttribute
except ImportError:
    raise SetupError(
        "store.url: PostgreSQL needs its driver: pip install 'duetime[postgres]'", field="store.url"
    ) from None

__all__ = ["Address", "Line", "address_of", "begin_sql", "connect", "setup_error", "store_error"]

Connection: TypeAlias = "asyncpg.Connection[Any]"

# --- the URL -------------------------------------------------------------------------------------

# What asyncpg takes out of a URL, and what the server itself takes at a connection's start.
_DRIVER_OPTIONS = frozenset(
    {
        "host", "port", "user", "password", "passfile", "dbname", "database", "target_session_attrs",
        "sslmode", "sslcert", "sslkey", "sslrootcert", "sslcrl", "sslpassword", "sslnegotiation",
        "ssl_min_protocol_version", "ssl_max_protocol_version", "krbsrvname", "gsslib",
    }
)  # fmt: skip
_SERVER_OPTIONS = frozenset({"application_name", "options"})
_OWN_OPTIONS = frozenset({"pooler", "schema"})
_SSL_MODES = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_PRIMARIES = ("any", "primary", "read-write")


class Address(Struct, frozen=True):
    """Where the database is, as the driver wants to hear it, and as a person may read it (no password)."""

    dsn: str
    label: str
    schema: str | None = None
    pooled: bool = False  # by transaction
    by_session: bool = False  # pooled by session: settings cannot come with the connection, but with its first word
    application_name: str = "duetime"
    target: str = "primary"


def address_of(url: str) -> Address:
    """postgresql://user:password@host:port/database?option=value, as in libpq; and `pooler`, `schema`."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(f"cannot be read: {error}") from None
    for name in options:
        if name not in _DRIVER_OPTIONS | _SERVER_OPTIONS | _OWN_OPTIONS:
            known = ", ".join(sorted(_DRIVER_OPTIONS | _SERVER_OPTIONS | _OWN_OPTIONS))
            raise _wrong(f"has the option {name!r}, which is not known; known are {known}")
    if parts.fragment:
        raise _wrong("has a '#': in a name or a password it is written %23")
    if parts.netloc.count("@") > 1:
        raise _wrong("has an '@' in its password: there it is written %40")
    if not parts.path.strip("/") and not options.keys() & {"dbname", "database"}:
        raise _wrong("names no database: postgresql://user:password@host:5432/DATABASE")
    _check(options, "sslmode", _SSL_MODES)
    _check(options, "pooler", ("transaction", "session", "none"))
    _check(options, "target_session_attrs", _PRIMARIES)
    schema = options.get("schema")
    if schema is not None and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema):
        raise _wrong(f"has the schema {schema!r}: letters, digits and underscores, at most 63")
    target = options.pop("target_session_attrs", "primary")
    given = {name: value for name, value in options.items() if name in _DRIVER_OPTIONS or name == "options"}
    return Address(
        dsn=urlunsplit(("postgresql", parts.netloc, parts.path, urlencode(given, quote_via=quote), "")),
        label=_label(parts.netloc, parts.path, options),
        schema=schema,
        pooled=options.get("pooler") == "transaction",
        by_session=options.get("pooler") == "session",
        application_name=options.get("application_name", "duetime"),
        target="primary" if target == "any" else target,
    )


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the PostgreSQL URL {what}", field="store.url")


def _check(options: dict[str, str], name: str, known: Sequence[str]) -> None:
    if options.get(name, known[0]) not in known:
        raise _wrong(f"has {name}={options[name]}; known are {', '.join(known)}")


def _label(netloc: str, path: str, options: dict[str, str]) -> str:
    host = netloc.rpartition("@")[2] or options.get("host", "")
    database = path.strip("/") or options.get("dbname", options.get("database", ""))
    return f"{host or 'the local server'}/{database}"


# --- errors --------------------------------------------------------------------------------------
#
# A statement on its own is a transaction. If the server answers it with an error, it was rolled back: nothing was
# applied. If the connection ends without an answer, nobody knows. In between stand the errors that come with the
# end of a connection: a server that shuts down may say so to a session whose commit is already in the log, and is
# waiting there for a standby; so those are unknown too.

_APPLIED_NOT: Final = False
_MAYBE: Final = True

# Each class of SQLSTATEs, and single ones that differ from their class. tests/unit/stores/test_postgres_errors.py fails
# when the driver knows a class that is not listed.
MAY_HAVE_COMMITTED: dict[str, bool] = {
    # The statement or its values were refused, or it lost against another one: rolled back.
    **dict.fromkeys(("03", "09", "0A", "0B", "0F", "0L", "0P", "0Z", "10", "20", "21", "22", "23"), _APPLIED_NOT),
    **dict.fromkeys(("24", "25", "26", "27", "28", "2B", "2D", "2F", "34", "38", "39", "3B", "3D"), _APPLIED_NOT),
    **dict.fromkeys(("3F", "40", "42", "44", "54", "55", "72", "F0", "HV", "P0"), _APPLIED_NOT),
    "40003": _MAYBE,  # statement completion unknown
    # Disk full, out of memory, too many connections. What fails after the commit is in the log stops the server.
    "53": _APPLIED_NOT,
    # The connection failed; but not so if it never came about. A pooler reports its troubles as 08P01.
    "08": _MAYBE,
    "08001": _APPLIED_NOT,
    "08004": _APPLIED_NOT,
    # An operator or the server intervened: a cancelled statement is rolled back, one whose session was ended may
    # be committed; a session that was idle too long never read it.
    "57": _MAYBE,
    "57014": _APPLIED_NOT,
    "57P03": _APPLIED_NOT,
    "57P05": _APPLIED_NOT,
    # Nobody can say.
    "58": _MAYBE,
    "XX": _MAYBE,
}

# After these a session is as good as before: the statement failed, not the server. After 25006, for one, it is
# not: the server became read-only under it.
_SESSION_LIVES = frozenset({"21", "22", "23", "40", "42", "53", "54", "55", "57014"})

_MESSAGES: tuple[tuple[str, str], ...] = (
    ("53100", "the disk of the database is full"),
    ("53300", "the database has no connection left"),
    ("53200", "the database is out of memory"),
    ("40P01", "the database broke a deadlock"),
    ("25006", "the database is read-only: a standby, or full"),
    ("57P03", "the database is starting or stopping"),
    ("57P01", "the database is shutting down"),
    ("57P02", "the database crashed"),
    ("57014", "the statement was cancelled on the server"),
    ("28", "the database refuses the user"),
    ("3D000", "the database does not exist"),
)


def may_have_committed(error: BaseException) -> bool:
    """Of an error met by a statement that is a transaction of its own, after it was sent."""
    if isinstance(error, asyncpg.PostgresError):
        state = str(error.sqlstate or "")
        return MAY_HAVE_COMMITTED.get(state, MAY_HAVE_COMMITTED.get(state[:2], _MAYBE))
    # The driver's own refusals, made before anything is sent: a closed connection, a value that has no such type.
    return not isinstance(error, asyncpg.InterfaceError)


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """What a driver's error means to the engine."""
    state = str(getattr(error, "sqlstate", None) or "")
    text = next((text for start, text in _MESSAGES if state.startswith(start)), type(error).__name__)
    detail = f"postgresql: {text} ({_in_words(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    return StoreUnavailable(detail)


def _in_words(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """What goes wrong while opening: said so that one knows what to do. A server that is away may come back."""
    state = str(getattr(error, "sqlstate", None) or "")
    for start, text in _EXPLANATIONS:
        if state.startswith(start):
            return SetupError(f"store.url: {address.label} {text} ({_in_words(error)})", field="store.url")
    if "startup parameter" in str(error):
        return SetupError(
            f"store.url: {address.label} is a pooler; say ?pooler=transaction or ?pooler=session ({_in_words(error)})",
            field="store.url",
        )
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return SetupError(
            f"store.url: {address.label} is a read-only standby; name the primary, or all hosts of the cluster",
            field="store.url",
        )
    if isinstance(error, ssl.SSLError) or "rejected SSL upgrade" in str(error):
        return SetupError(
            f"store.url: {address.label}: no TLS connection as sslmode asks for ({_in_words(error)})", field="store.url"
        )
    if isinstance(error, ValueError):  # the driver's word for options that make no sense
        return SetupError(f"store.url: {address.label}: {_in_words(error)}", field="store.url")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"postgresql: {address.label} does not answer within {CONNECT_SECONDS:g} s")
    if isinstance(error, OSError):
        return StoreUnavailable(f"postgresql: {address.label} cannot be reached ({_in_words(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("28P01", "refuses the password"),
    ("28000", "does not let this user in: is the role there, and does pg_hba.conf allow it from here?"),
    ("3D000", "does not exist; CREATE DATABASE … ENCODING 'UTF8' makes it"),
    ("42501", "does not allow this user to do what is needed; `duetime serve` makes its tables itself and needs"
              " CREATE on the schema: GRANT USAGE, CREATE ON SCHEMA … TO …"),
    ("3F000", "has no schema to make tables in; name one: ?schema=duetime"),
    ("42P07", "has tables of another program under the names needed here; name a schema of its own: ?schema=duetime"),
    ("25006", "is read-only: a standby, or default_transaction_read_only is on"),
    ("55P03", "is being updated by another instance for too long; is one of them stuck?"),
)  # fmt: skip


# --- sessions ------------------------------------------------------------------------------------

# Every statement is by index and planned once (statements.py says why).
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
    """What a session of its own is set to. A pooler passes none of it on, but for the name."""
    name = {"application_name": address.application_name}
    return name if address.pooled or address.by_session else name | _session_settings(address)


def _session_settings(address: Address) -> dict[str, str]:
    settings = {
        "default_transaction_isolation": "read committed",  # what the fences are proven under
        "tcp_keepalives_idle": "10",
        "tcp_keepalives_interval": "5",
        "tcp_keepalives_count": "3",
        **_PLANNING,
    }
    if address.schema is not None:
        settings["search_path"] = address.schema
    return settings


def begin_sql(address: Address) -> str:
    """READ WRITE, because a standby refuses that: nothing is ever read there."""
    settings = dict(_PLANNING) | {"idle_in_transaction_session_timeout": "15s"}
    if address.schema is not None:
        settings["search_path"] = address.schema
    sets = "".join(f"; SET LOCAL {name} = '{value}'" for name, value in settings.items())
    return f"BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE{sets}"


class _Connection(asyncpg.Connection):
    """A connection that notices by itself when its other end is gone."""

    def __init__(self, protocol: Any, transport: Any, *rest: Any) -> None:
        super().__init__(protocol, transport, *rest)
        link = transport.get_extra_info("socket")
        if link is None or link.family == getattr(socket, "AF_UNIX", None):
            return
        wanted = [(socket.SOL_SOCKET, "SO_KEEPALIVE", 1)]
        wanted += [
            (socket.IPPROTO_TCP, name, value)
            for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
        ]
        for level, name, value in wanted:
            if hasattr(socket, name):
                with contextlib.suppress(OSError):
                    link.setsockopt(level, getattr(socket, name), value)


class _Opening:
    """An event loop for the driver's login that records the connections which were opened.

    If a login fails, the driver closes a TLS connection in order: it waits until the server has closed its side, up to
    half a minute. Here such connections are aborted at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._opened: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    async def create_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        return self._remembered(await self._loop.create_connection(*args, **options))

    async def create_unix_connection(self, *args: Any, **options: Any) -> tuple[Any, Any]:
        return self._remembered(await self._loop.create_unix_connection(*args, **options))

    def _remembered(self, made: tuple[Any, Any]) -> tuple[Any, Any]:
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
    opening = _Opening(asyncio.get_running_loop())
    try:
        async with asyncio.timeout(within_seconds):
            connection = await _logged_in(address, within_seconds, opening)
            if address.by_session:
                settings = _session_settings(address).items()
                await connection.execute("; ".join(f"SET {name} = '{value}'" for name, value in settings))
    except BaseException:
        opening.abort()
        raise
    opening.succeeded()
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
        # Behind a pooler the driver's own question could be answered by two servers; BEGIN READ WRITE asks there.
        target_session_attrs=None if address.pooled else SessionAttribute(address.target),
    )


class _Driver:
    """asyncpg, as a session uses it."""

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

    def refusal(self, error: Exception) -> str:
        return setup_error(self._address, error).detail

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        state = str(getattr(error, "sqlstate", None) or "")
        return store_error(error, writing=writing), bool({state, state[:2]} & _SESSION_LIVES)


class Line:
    """Runs statements in sessions for one kind of work: each is a transaction, by itself or, behind a pooler, of three
    messages."""

    def __init__(self, address: Address, count: int, deadline_seconds: float, connect_seconds: float) -> None:
        self._sessions = Sessions(_Driver(address), count, deadline_seconds, connect_seconds)
        self._pooled = address.pooled
        self._begin = begin_sql(address)

    async def read(self, sql: str, *args: Any) -> list[Any]:
        if self._pooled:
            return await self._sessions.read(lambda db: self._begun(db, sql, args), _commit)
        return await self._sessions.read(lambda db: db.fetch(sql, *args))

    async def write(self, sql: str, *args: Any) -> list[Any]:
        if self._pooled:
            return await self._sessions.write(lambda db: self._begun(db, sql, args), _commit)
        return await self._sessions.write(lambda db: db.fetch(sql, *args))

    async def close(self) -> None:
        await self._sessions.close()

    def drop_connections(self) -> None:
        self._sessions.drop_connections()

    async def _begun(self, db: Connection, sql: str, args: Sequence[Any]) -> list[Any]:
        await db.execute(self._begin)
        rows: list[Any] = await db.fetch(sql, *args)
        return rows


async def _commit(db: Connection) -> None:
    answer = await db.execute("COMMIT")
    if answer != "COMMIT":
        raise StoreUnavailable(f"postgresql: the transaction was rolled back ({answer})")
