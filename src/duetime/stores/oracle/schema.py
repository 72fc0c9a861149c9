"""The tables of OracleStore: migrations, the checks when a store is opened, and the diagnosis.

Migrations run under a lock, so that any number of instances can start at the same time. In Oracle a statement that
creates a table commits and thereby releases every lock of its session, so a second session keeps the lock. The start of
a migration is recorded before it runs. A migration that was interrupted is continued: the objects that it finds are its
own.
"""

from __future__ import annotations

import contextlib
from typing import Any

import oracledb

from duetime.store import Danger, Diagnosis
from duetime.stores.migrations import Migrations
from duetime.stores.oracle.connection import Address, Connection, OracledbDriver
from duetime.stores.oracle.errors import code_of, is_hidden
from duetime.stores.sessions import setup_session
from duetime.stores.store_url import store_url_error
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = (12, 2)
MIGRATION_SECONDS = 60

_MIGRATIONS = Migrations.of_package("duetime.stores.oracle")
SCHEMA_VERSION = _MIGRATIONS.version

_TABLES = ("shards", "timers", "reached", "members", "namespaces")
_CREATE_VERSIONS = (
    "CREATE TABLE duetime_lock (held NUMBER(1))",
    "CREATE TABLE duetime_schema ("
    "version NUMBER(5) NOT NULL CONSTRAINT duetime_schema_key PRIMARY KEY, begun_at TIMESTAMP(3) NOT NULL,"
    " done_at TIMESTAMP(3))",
)
_EXISTS_ALREADY = frozenset({955, 1408, 2261})  # an object of this name, an index or a key over these columns


def statements(text: str) -> list[str]:
    """The statements of a migration file. They are separated by lines of "/"; comments before them are removed."""
    parts = [part.strip() for part in f"\n{text}".split("\n/\n")]
    lines = [[line for line in part.splitlines() if not line.startswith("--")] for part in parts]
    return [found for found in ("\n".join(some).strip() for some in lines) if found]


async def migrate(address: Address) -> None:
    """Creates the tables, or updates them to this version."""
    async with _session(address) as db, _session(address) as lock_session:
        await _check_server(address, db)
        if await _schema_version(address, db) == SCHEMA_VERSION:
            return
        for sql in _CREATE_VERSIONS:
            await _create(db, sql, allow_existing=True)
        await lock_session.connection.execute(f"LOCK TABLE duetime_lock IN EXCLUSIVE MODE WAIT {MIGRATION_SECONDS}")
        found = await _schema_version(address, db)
        for number, text in _MIGRATIONS.missing(found):
            await _apply(address, db, number, text)
        if found < SCHEMA_VERSION:
            _MIGRATIONS.log_applied(address.label)


async def _apply(address: Address, db: Connection, version: int, text: str) -> None:
    was_begun = await _value(db, "SELECT COUNT(*) FROM duetime_schema WHERE version = :1", version)
    if not was_begun:
        await _refuse_foreign_tables(address, db, version)
        await db.connection.execute(
            "INSERT INTO duetime_schema (version, begun_at) VALUES (:1, SYSTIMESTAMP)", [version]
        )
        await db.connection.commit()
    for sql in statements(text):
        await _create(db, sql, allow_existing=bool(was_begun))
    await db.connection.execute("UPDATE duetime_schema SET done_at = SYSTIMESTAMP WHERE version = :1", [version])
    await db.connection.commit()


async def _create(db: Connection, sql: str, *, allow_existing: bool) -> None:
    try:
        await db.connection.execute(sql)
    except oracledb.DatabaseError as error:
        if not allow_existing or code_of(error) not in _EXISTS_ALREADY:
            raise


async def check(address: Address) -> str:
    """Raises if the database cannot be used, and logs a warning for each danger. Returns "": a connection knows the
    history of the database, so no statement has to read it."""
    async with _session(address) as db:
        await _check_server(address, db)
        _MIGRATIONS.check_complete(address.label, await _schema_version(address, db))
        for table in _TABLES:  # statements that change nothing; each fails if this user lacks the right for it
            column = _FIRST_COLUMN[table]
            for sql in (
                f"SELECT 1 FROM {table} WHERE 1 = 0",  # noqa: S608
                f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0",  # noqa: S608
                f"UPDATE {table} SET {column} = {column} WHERE 1 = 0",  # noqa: S608
                f"DELETE FROM {table} WHERE 1 = 0",  # noqa: S608
            ):
                await db.connection.execute(sql)
        await db.connection.rollback()
        for danger in await _dangers(db):
            log.warning("%s: %s", address.label, danger)
    return ""


_FIRST_COLUMN = dict.fromkeys(_TABLES, "shard_id") | {"members": "instance_id", "namespaces": "name"}


async def wipe(address: Address) -> None:
    """For tests: deletes all rows. DELETE is much faster on small tables than TRUNCATE."""
    async with _session(address) as db:
        if await _schema_version(address, db):
            for table in _TABLES:
                await db.connection.execute(f"DELETE FROM {table}")  # noqa: S608
            await db.connection.commit()


def _session(address: Address) -> contextlib.AbstractAsyncContextManager[Connection]:
    return setup_session(OracledbDriver(address))


async def _value(db: Connection, sql: str, *values: Any) -> Any:
    row = await db.connection.fetchone(sql, list(values))
    return None if row is None else row[0]


async def _check_server(address: Address, db: Connection) -> None:
    version = db.connection.version
    if tuple(map(int, version.split(".")[:2])) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise store_url_error(f"{address.label} is Oracle {version}; {oldest} or later is needed")
    encoding = await _value(db, _CHARACTER_SET)
    if encoding != "AL32UTF8":
        raise store_url_error(
            f"{address.label} has the character set {encoding}, which cannot store every text; AL32UTF8 is needed"
        )
    role = await _value(db, _ROLE)
    if role != "PRIMARY":
        raise store_url_error(f"{address.label} is a standby ({role}); name the primary")


_CHARACTER_SET = "SELECT value FROM nls_database_parameters WHERE parameter = 'NLS_CHARACTERSET'"
_ROLE = "SELECT SYS_CONTEXT('USERENV', 'DATABASE_ROLE') FROM dual"
_OBJECTS = (
    "SELECT MIN(object_name) FROM all_objects"
    " WHERE owner = SYS_CONTEXT('USERENV', 'CURRENT_SCHEMA') AND object_name IN ({})"
)


def _objects(*names: str) -> str:
    return _OBJECTS.format(", ".join(f"'{name.upper()}'" for name in names))


async def _schema_version(address: Address, db: Connection) -> int:
    """The schema version, 0 if there are no tables of Duetime."""
    if await _value(db, _objects("duetime_schema")) is None:
        return 0
    version = int(await _value(db, "SELECT NVL(MAX(version), 0) FROM duetime_schema WHERE done_at IS NOT NULL"))
    return _MIGRATIONS.check_not_newer(address.label, version)


async def _refuse_foreign_tables(address: Address, db: Connection, version: int) -> None:
    other = await _value(db, _objects(*_TABLES, "timer_schedules")) if version == 1 else None
    if other is not None:
        raise store_url_error(f"{address.label} has a table {other} of another program; use a separate user")


# --- diagnosis -----------------------------------------------------------------------------------

_PROTECTION = "SELECT protection_mode FROM v$database"
_HIDDEN = "not readable for this user"


async def _value_or_hidden(db: Connection, sql: str) -> str:
    """Only some users may read the system views."""
    try:
        return str(await _value(db, sql))
    except oracledb.DatabaseError as error:
        if not is_hidden(error):
            raise
        return _HIDDEN


async def _dangers(db: Connection) -> list[Danger]:
    if await _value_or_hidden(db, "SELECT log_mode FROM v$database") == "NOARCHIVELOG":
        return [
            Danger(
                "the database does not archive its log",
                "if its disk is lost, everything since the last backup is lost",
            )
        ]
    return []


async def diagnose(address: Address) -> Diagnosis:
    """What the server is, and which of its settings can lose acknowledged timers."""
    async with _session(address) as db:
        facts = [
            f"Oracle {db.connection.version}",
            f"character set {await _value(db, _CHARACTER_SET)}",
            f"it is {str(await _value(db, _ROLE)).lower()}",
            f"protection mode {await _value_or_hidden(db, _PROTECTION)}",
            f"its history is {db.history}",
            _MIGRATIONS.fact(await _schema_version(address, db)),
        ]
        return Diagnosis(facts, await _dangers(db))
