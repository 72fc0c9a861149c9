"""The tables of SqlServerStore: migrations, the checks when a store is opened, and the diagnosis.

All migrations run in one transaction under a lock that ends with it. So any number of instances can start at the same
time.
"""

from __future__ import annotations

import contextlib
from typing import Any

import mssql_python

from duetime.store import Danger, Diagnosis
from duetime.stores.migrations import Migrations
from duetime.stores.sessions import setup_session
from duetime.stores.sqlserver.connection import Address, Connection, MssqlDriver, connect, execute
from duetime.stores.store_url import store_url_error
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = 13  # SQL Server 2016
OLDEST_LEVEL = 130  # compatibility level; lower levels have no OPENJSON
MIGRATION_SECONDS = 60
_AZURE = (5, 8)  # SQL Database and Managed Instance; their version number has no meaning

_MIGRATIONS = Migrations.of_package("duetime.stores.sqlserver")
SCHEMA_VERSION = _MIGRATIONS.version

_TABLES = ("shards", "timers", "members", "namespaces")
_RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")
# Sent without a parameter: a batch with a parameter must end with as many open transactions as it began with.
_BEGIN = f"""
BEGIN TRANSACTION;
SET LOCK_TIMEOUT {MIGRATION_SECONDS * 1000};
DECLARE @got int;
EXEC @got = sp_getapplock @Resource = 'duetime', @LockMode = 'Exclusive', @LockOwner = 'Transaction',
  @LockTimeout = {MIGRATION_SECONDS * 1000};
SELECT @got;
"""
_CREATE_VERSIONS = """
IF OBJECT_ID('duetime_schema', 'U') IS NULL CREATE TABLE duetime_schema (
    version    int          NOT NULL CONSTRAINT duetime_schema_key PRIMARY KEY,
    applied_at datetime2(3) NOT NULL CONSTRAINT duetime_schema_applied_at DEFAULT SYSUTCDATETIME()
);
"""


async def migrate(address: Address) -> None:
    """Creates the tables, or updates them to this version: completely or not at all."""
    async with _session(address) as db:
        await db.run(lambda db: _migrate(address, db))


def _migrate(address: Address, db: Connection) -> None:
    _check_server(address, db)
    _refuse_hidden_tables(address, db)
    if _value(db, _BEGIN) < 0:
        raise store_url_error(
            f"{address.label} is locked by a migration of another instance for too long; is that instance stuck?"
        )
    found = _schema_version(address, db)
    if found < SCHEMA_VERSION:
        execute(db, _CREATE_VERSIONS)
        for number, sql in _MIGRATIONS.missing(found):
            execute(db, sql)
            execute(db, f"INSERT INTO duetime_schema (version) VALUES ({number})")  # noqa: S608
    execute(db, "COMMIT TRANSACTION")
    if found < SCHEMA_VERSION:
        _MIGRATIONS.log_applied(address.label)


async def check(address: Address) -> str:
    """Raises if the database cannot be used, and logs a warning for each danger. Returns "": a connection knows the
    history of the database, so no statement has to read it."""
    async with _session(address) as db:
        for danger in await db.run(lambda db: _check(address, db)):
            log.warning("%s: %s", address.label, danger)
    return ""


def _check(address: Address, db: Connection) -> list[Danger]:
    _check_server(address, db)
    _refuse_hidden_tables(address, db)
    _MIGRATIONS.check_complete(address.label, _schema_version(address, db))
    for table in _TABLES:
        for right in _RIGHTS:
            if not _value(db, f"SELECT HAS_PERMS_BY_NAME('{table}', 'OBJECT', '{right}')"):
                raise store_url_error(f"{address.label} does not allow this user to {right} in {table}; {_GRANT}")
    return _dangers(db)


_GRANT = "GRANT SELECT, INSERT, UPDATE, DELETE ON SCHEMA::dbo TO … (or the roles db_datareader and db_datawriter)"


def _refuse_hidden_tables(address: Address, db: Connection) -> None:
    """SQL Server hides a table from a user without rights to it: OBJECT_ID returns NULL as for a missing table. Reading
    the table tells the difference: a hidden table gives error 229 (a right is missing), a missing one 208. This is not
    done in a transaction, because either error would end it."""
    if _value(db, _FIND) is not None:
        return
    try:
        execute(db, "SELECT TOP (0) version FROM duetime_schema")
    except mssql_python.DatabaseError as error:
        if "permission" not in str(error).lower():
            return  # the table does not exist, or the next statement will fail as well
        raise store_url_error(
            f"{address.label} has the tables already, and does not allow this user to use them; {_GRANT}"
        ) from error


async def wipe(address: Address) -> None:
    """For tests: deletes all rows. DELETE is much faster on small tables than TRUNCATE."""
    async with _session(address) as db:
        await db.run(lambda db: _wipe(address, db))


def _wipe(address: Address, db: Connection) -> None:
    if _schema_version(address, db):
        execute(db, "; ".join(f"DELETE FROM {table}" for table in _TABLES))  # noqa: S608


def _session(address: Address) -> contextlib.AbstractAsyncContextManager[Connection]:
    seconds = MIGRATION_SECONDS + 10
    connecting = connect(address, cancel_seconds=seconds, limit_seconds=2.0 * seconds)
    return setup_session(MssqlDriver(address), connecting)


def _value(db: Connection, sql: str) -> Any:
    *_, rows = execute(db, sql)
    return rows[0][0] if rows else None


def _check_server(address: Address, db: Connection) -> None:
    edition = _value(db, "SELECT CAST(SERVERPROPERTY('EngineEdition') AS int)")
    version = str(_value(db, _VERSION))
    if edition not in _AZURE and int(version.partition(".")[0]) < OLDEST_SERVER:
        raise store_url_error(
            f"{address.label} is SQL Server {version}; {OLDEST_SERVER}.0, which is 2016, or later is needed"
        )
    level = _value(db, _LEVEL)
    if level is not None and level < OLDEST_LEVEL:
        raise store_url_error(
            f"{address.label} has the compatibility level {level}; {OLDEST_LEVEL} or more is needed:"
            f" ALTER DATABASE … SET COMPATIBILITY_LEVEL = {OLDEST_LEVEL}"
        )
    if _value(db, "SELECT CAST(DATABASEPROPERTYEX(DB_NAME(), 'Updateability') AS nvarchar(60))") == "READ_ONLY":
        raise store_url_error(f"{address.label} is read-only: a secondary, or set to read-only")


_VERSION = "SELECT CAST(SERVERPROPERTY('ProductVersion') AS nvarchar(128))"
_LEVEL = "SELECT compatibility_level FROM sys.databases WHERE name = DB_NAME()"


_FIND = "SELECT OBJECT_ID('duetime_schema', 'U')"


def _schema_version(address: Address, db: Connection) -> int:
    """The schema version, 0 if there are no tables of Duetime."""
    if _value(db, _FIND) is None:
        return 0
    version = int(_value(db, "SELECT COALESCE(MAX(version), 0) FROM duetime_schema"))
    return _MIGRATIONS.check_not_newer(address.label, version)


# --- diagnosis -----------------------------------------------------------------------------------

_DURABILITY = "SELECT delayed_durability_desc FROM sys.databases WHERE name = DB_NAME()"
_SNAPSHOT = "SELECT is_read_committed_snapshot_on FROM sys.databases WHERE name = DB_NAME()"
_RECOVERY = "SELECT recovery_model_desc FROM sys.databases WHERE name = DB_NAME()"


def _dangers(db: Connection) -> list[Danger]:
    if _value(db, _DURABILITY) == "FORCED":
        return [Danger("delayed durability is forced", "a crash of the server loses timers that were acknowledged")]
    return []


async def diagnose(address: Address) -> Diagnosis:
    """What the server is, and which of its settings can lose acknowledged timers."""
    async with _session(address) as db:
        return await db.run(lambda db: _diagnose(address, db))


def _diagnose(address: Address, db: Connection) -> Diagnosis:
    facts = [
        f"SQL Server {_value(db, _VERSION)}",
        f"compatibility level {_value(db, _LEVEL)}",
        f"recovery model {_value(db, _RECOVERY)}",
        f"delayed durability is {_value(db, _DURABILITY)}",
        f"read committed snapshot is {'on' if _value(db, _SNAPSHOT) else 'off: reads wait for writes'}",
        _MIGRATIONS.fact(_schema_version(address, db)),
    ]
    return Diagnosis(facts, _dangers(db))
