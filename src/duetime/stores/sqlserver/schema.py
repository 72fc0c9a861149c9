"""The tables under SqlServerStore: made, brought up to date, recognised; and what a doctor wants to know.

Migrations are forward-only, all of a database's in one transaction, under a lock that ends with it: any number of
instances may start at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import mssql_python

from duetime.errors import SchemaMismatch, SetupError, StoreError
from duetime.stores.sqlserver import connection
from duetime.stores.sqlserver.connection import Address, Link, ask
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = 13  # SQL Server 2016
OLDEST_LEVEL = 130  # of compatibility: below that there is no OPENJSON
MIGRATION_SECONDS = 60
_AZURE = (5, 8)  # SQL Database and Managed Instance, whose version says nothing

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.sqlserver").joinpath("migrations").iterdir() if ".sql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("shards", "timers", "members", "namespaces")
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
# In the session, not in a batch with a parameter: that must end with as many transactions as it began with.
_BEGIN = f"""
BEGIN TRANSACTION;
SET LOCK_TIMEOUT {MIGRATION_SECONDS * 1000};
DECLARE @got int;
EXEC @got = sp_getapplock @Resource = 'duetime', @LockMode = 'Exclusive', @LockOwner = 'Transaction',
  @LockTimeout = {MIGRATION_SECONDS * 1000};
SELECT @got;
"""
_MAKE_VERSIONS = """
IF OBJECT_ID('duetime_schema', 'U') IS NULL CREATE TABLE duetime_schema (
    version    int          NOT NULL CONSTRAINT duetime_schema_key PRIMARY KEY,
    applied_at datetime2(3) NOT NULL CONSTRAINT duetime_schema_applied_at DEFAULT SYSUTCDATETIME()
);
"""


async def migrate(address: Address) -> None:
    """Make the tables, or bring them up to this version: all of it or nothing."""
    async with _session(address) as link:
        await link.run(lambda link: _migrate(address, link))


def _migrate(address: Address, link: Link) -> None:
    _check_server(address, link)
    _refuse_hidden_tables(address, link)
    if _value(link, _BEGIN) < 0:
        raise SetupError(
            f"store.url: {address.label} is being updated by another instance for too long; is one of them stuck?",
            field="store.url",
        )
    found = _recognise(address, link)
    if found < SCHEMA_VERSION:
        ask(link, _MAKE_VERSIONS)
        for number in range(found + 1, SCHEMA_VERSION + 1):
            ask(link, _MIGRATIONS[number - 1].read_text("utf-8"))
            ask(link, f"INSERT INTO duetime_schema (version) VALUES ({number})")  # noqa: S608
    ask(link, "COMMIT TRANSACTION")
    if found < SCHEMA_VERSION:
        log.info("%s: made the tables of schema %d", address.label, SCHEMA_VERSION)


async def check(address: Address) -> str:
    """Refuse a database that cannot be used, and say loudly what endangers the promise. A connection knows the
    database's history: no statement has to ask."""
    async with _session(address) as link:
        for warning in await link.run(lambda link: _check(address, link)):
            log.warning("%s: %s", address.label, warning)
    return ""


def _check(address: Address, link: Link) -> list[str]:
    _check_server(address, link)
    _refuse_hidden_tables(address, link)
    found = _recognise(address, link)
    if found < SCHEMA_VERSION:
        what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
        raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
    for table in _TABLES:
        for right in _RIGHTS:
            if not _value(link, f"SELECT HAS_PERMS_BY_NAME('{table}', 'OBJECT', '{right}')"):
                raise SetupError(
                    f"store.url: {address.label} does not allow this user to {right} in {table}; {_GRANT}",
                    field="store.url",
                )
    return _dangers(link)


_GRANT = "GRANT SELECT, INSERT, UPDATE, DELETE ON SCHEMA::dbo TO … (or the roles db_datareader and db_datawriter)"


def _refuse_hidden_tables(address: Address, link: Link) -> None:
    """SQL Server shows no table to a user who has no right to it: OBJECT_ID answers as if there were none. Reading
    it shows which: a hidden table gives error 229 (a right is missing), a missing one 208. Not in a transaction: either
    error would end it."""
    if _value(link, _FIND) is not None:
        return
    try:
        ask(link, "SELECT TOP (0) version FROM duetime_schema")
    except mssql_python.DatabaseError as error:
        if "permission" not in str(error).lower():
            return  # there is no such table, or the next statement will fail as well
        raise SetupError(
            f"store.url: {address.label} has the tables already, and does not allow this user to use them; {_GRANT}",
            field="store.url",
        ) from error


async def wipe(address: Address) -> None:
    """For tests: all rows. By DELETE, which in small tables is much faster than making them anew."""
    async with _session(address) as link:
        await link.run(lambda link: _wipe(address, link))


def _wipe(address: Address, link: Link) -> None:
    if _recognise(address, link):
        ask(link, "; ".join(f"DELETE FROM {table}" for table in _TABLES))  # noqa: S608


@contextlib.asynccontextmanager
async def _session(address: Address) -> AsyncIterator[Link]:
    """A connection of its own. What goes wrong becomes an error that says what to do."""
    link: Link | None = None
    try:
        patience_seconds = MIGRATION_SECONDS + 10
        link = await connection.connect(
            address, patience_seconds=patience_seconds, limit_seconds=2.0 * patience_seconds
        )
        yield link
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise connection.setup_error(address, error) from error
    finally:
        if link is not None:
            with contextlib.suppress(Exception):
                await link.run(Link.disconnect)
            link.terminate()


def _value(link: Link, sql: str) -> Any:
    *_, rows = ask(link, sql)
    return rows[0][0] if rows else None


def _check_server(address: Address, link: Link) -> None:
    edition = _value(link, "SELECT CAST(SERVERPROPERTY('EngineEdition') AS int)")
    version = str(_value(link, _VERSION))
    if edition not in _AZURE and int(version.partition(".")[0]) < OLDEST_SERVER:
        raise SetupError(
            f"store.url: {address.label} is SQL Server {version}; {OLDEST_SERVER}.0, which is 2016, or later is needed",
            field="store.url",
        )
    level = _value(link, _LEVEL)
    if level is not None and level < OLDEST_LEVEL:
        raise SetupError(
            f"store.url: {address.label} has the compatibility level {level}; {OLDEST_LEVEL} or more is needed:"
            f" ALTER DATABASE … SET COMPATIBILITY_LEVEL = {OLDEST_LEVEL}",
            field="store.url",
        )
    if _value(link, "SELECT CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(60))") == "READ_ONLY":
        raise SetupError(f"store.url: {address.label} is read-only: a secondary, or it was set so", field="store.url")


_VERSION = "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128))"
_LEVEL = "SELECT compatibility_level FROM sys.databases WHERE name = DB_NAME()"


_FIND = "SELECT OBJECT_ID('duetime_schema', 'U')"


def _recognise(address: Address, link: Link) -> int:
    """The schema version, 0 where there is nothing of ours."""
    if _value(link, _FIND) is None:
        return 0
    version = int(_value(link, "SELECT COALESCE(MAX(version), 0) FROM duetime_schema"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


# --- for the doctor ------------------------------------------------------------------------------

_DURABILITY = "SELECT delayed_durability_desc FROM sys.databases WHERE name = DB_NAME()"
_SNAPSHOT = "SELECT is_read_committed_snapshot_on FROM sys.databases WHERE name = DB_NAME()"
_RECOVERY = "SELECT recovery_model_desc FROM sys.databases WHERE name = DB_NAME()"


def _dangers(link: Link) -> list[str]:
    said: list[str] = []
    if _value(link, _DURABILITY) == "FORCED":
        said.append("delayed durability is forced: a crash of the server loses timers that were acknowledged")
    return said


async def diagnose(address: Address) -> list[str]:
    """Plain sentences: what the server is, and, after "danger: ", what about it endangers the promise."""
    async with _session(address) as link:
        return await link.run(lambda link: _diagnose(address, link))


def _diagnose(address: Address, link: Link) -> list[str]:
    said = [
        f"SQL Server {_value(link, _VERSION)}",
        f"compatibility level {_value(link, _LEVEL)}",
        f"recovery model {_value(link, _RECOVERY)}",
        f"delayed durability is {_value(link, _DURABILITY)}",
        f"read committed snapshot is {'on' if _value(link, _SNAPSHOT) else 'off: reads wait for writes'}",
    ]
    found = _recognise(address, link)
    said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
    return said + [f"danger: {text}" for text in _dangers(link)]
