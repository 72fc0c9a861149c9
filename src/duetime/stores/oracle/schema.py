"""The tables under OracleStore: made, brought up to date, recognised; and what a doctor wants to know.

Migrations are forward-only, under a lock, so that any number of instances may start at once. Here a statement that
makes a table commits, and with it goes every lock of its session: so the lock is held by a second one. What a migration
has begun is written down before it begins; one that was broken off is gone on with, and what it finds is its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import oracledb

from duetime.errors import SchemaMismatch, SetupError, StoreError
from duetime.stores.oracle import connection
from duetime.stores.oracle.connection import Address, Link, code_of
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = (12, 2)
MIGRATION_SECONDS = 60

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.oracle").joinpath("migrations").iterdir() if ".sql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("shards", "timers", "reached", "members", "namespaces")
_OURS = (
    "CREATE TABLE duetime_lock (held NUMBER(1))",
    "CREATE TABLE duetime_schema ("
    "version NUMBER(5) NOT NULL CONSTRAINT duetime_schema_key PRIMARY KEY, begun_at TIMESTAMP(3) NOT NULL,"
    " done_at TIMESTAMP(3))",
)
_THERE_ALREADY = frozenset({955, 1408, 2261})  # an object of this name, an index or a key over these columns


def statements(text: str) -> list[str]:
    """Of a migration: what stands between lines of "/", without the comments before it."""
    parts = [part.strip() for part in f"\n{text}".split("\n/\n")]
    lines = [[line for line in part.splitlines() if not line.startswith("--")] for part in parts]
    return [found for found in ("\n".join(some).strip() for some in lines) if found]


async def migrate(address: Address) -> None:
    """Make the tables, or bring them up to this version."""
    async with _session(address) as db, _session(address) as keeper:
        await _check_server(address, db)
        if await _recognise(address, db) == SCHEMA_VERSION:
            return
        for sql in _OURS:
            await _make(db, sql, or_find=True)
        await keeper.connection.execute(f"LOCK TABLE duetime_lock IN EXCLUSIVE MODE WAIT {MIGRATION_SECONDS}")
        found = await _recognise(address, db)
        for number in range(found + 1, SCHEMA_VERSION + 1):
            await _bring_to(address, db, number)
        if found < SCHEMA_VERSION:
            log.info("%s: made the tables of schema %d", address.label, SCHEMA_VERSION)


async def _bring_to(address: Address, db: Link, version: int) -> None:
    was_begun = await _value(db, "SELECT COUNT(*) FROM duetime_schema WHERE version = :1", version)
    if not was_begun:
        await _refuse_foreign_tables(address, db, version)
        await db.connection.execute(
            "INSERT INTO duetime_schema (version, begun_at) VALUES (:1, SYSTIMESTAMP)", [version]
        )
        await db.connection.commit()
    for sql in statements(_MIGRATIONS[version - 1].read_text("utf-8")):
        await _make(db, sql, or_find=bool(was_begun))
    await db.connection.execute("UPDATE duetime_schema SET done_at = SYSTIMESTAMP WHERE version = :1", [version])
    await db.connection.commit()


async def _make(db: Link, sql: str, *, or_find: bool) -> None:
    try:
        await db.connection.execute(sql)
    except oracledb.DatabaseError as error:
        if not or_find or code_of(error) not in _THERE_ALREADY:
            raise


async def check(address: Address) -> str:
    """Refuse a database that cannot be used, and say loudly what endangers the promise. A connection knows the
    database's history: no statement has to ask."""
    async with _session(address) as db:
        await _check_server(address, db)
        found = await _recognise(address, db)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
        for table in _TABLES:  # a right that is missing is an error, also where there is nothing to do
            column = _FIRST_COLUMN[table]
            for sql in (
                f"SELECT 1 FROM {table} WHERE 1 = 0",  # noqa: S608
                f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0",  # noqa: S608
                f"UPDATE {table} SET {column} = {column} WHERE 1 = 0",  # noqa: S608
                f"DELETE FROM {table} WHERE 1 = 0",  # noqa: S608
            ):
                await db.connection.execute(sql)
        await db.connection.rollback()
        for warning in await _dangers(db):
            log.warning("%s: %s", address.label, warning)
    return ""


_FIRST_COLUMN = dict.fromkeys(_TABLES, "shard_id") | {"members": "instance_id", "namespaces": "name"}


async def wipe(address: Address) -> None:
    """For tests: all rows. By DELETE, which in small tables is much faster than making them anew."""
    async with _session(address) as db:
        if await _recognise(address, db):
            for table in _TABLES:
                await db.connection.execute(f"DELETE FROM {table}")  # noqa: S608
            await db.connection.commit()


@contextlib.asynccontextmanager
async def _session(address: Address) -> AsyncIterator[Link]:
    """A connection of its own. What goes wrong becomes an error that says what to do."""
    db: Link | None = None
    try:
        db = await connection.connect(address)
        yield db
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise connection.setup_error(address, error) from error
    finally:
        if db is not None:
            with contextlib.suppress(Exception):
                await db.connection.close()
            db.terminate()


async def _value(db: Link, sql: str, *values: Any) -> Any:
    row = await db.connection.fetchone(sql, list(values))
    return None if row is None else row[0]


async def _check_server(address: Address, db: Link) -> None:
    version = db.connection.version
    if tuple(map(int, version.split(".")[:2])) < OLDEST_SERVER:
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise SetupError(
            f"store.url: {address.label} is Oracle {version}; {oldest} or later is needed", field="store.url"
        )
    encoding = await _value(db, _CHARACTER_SET)
    if encoding != "AL32UTF8":
        raise SetupError(
            f"store.url: {address.label} has the character set {encoding}, which cannot hold every text;"
            " AL32UTF8 is needed",
            field="store.url",
        )
    role = await _value(db, _ROLE)
    if role != "PRIMARY":
        raise SetupError(f"store.url: {address.label} is a standby ({role}); name the primary", field="store.url")


_CHARACTER_SET = "SELECT value FROM nls_database_parameters WHERE parameter = 'NLS_CHARACTERSET'"
_ROLE = "SELECT SYS_CONTEXT('USERENV', 'DATABASE_ROLE') FROM dual"
_OBJECTS = (
    "SELECT MIN(object_name) FROM all_objects"
    " WHERE owner = SYS_CONTEXT('USERENV', 'CURRENT_SCHEMA') AND object_name IN ({})"
)


def _objects(*names: str) -> str:
    return _OBJECTS.format(", ".join(f"'{name.upper()}'" for name in names))


async def _recognise(address: Address, db: Link) -> int:
    """The schema version, 0 where there is nothing of ours."""
    if await _value(db, _objects("duetime_schema")) is None:
        return 0
    version = int(await _value(db, "SELECT NVL(MAX(version), 0) FROM duetime_schema WHERE done_at IS NOT NULL"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _refuse_foreign_tables(address: Address, db: Link, version: int) -> None:
    other = await _value(db, _objects(*_TABLES, "timer_schedules")) if version == 1 else None
    if other is not None:
        raise SetupError(
            f"store.url: {address.label} has a table {other} of another program; use a user of its own",
            field="store.url",
        )


# --- for the doctor ------------------------------------------------------------------------------

_PROTECTION = "SELECT protection_mode FROM v$database"
_UNTOLD = "not told to this user"


async def _told(db: Link, sql: str) -> str:
    """Much of what a server knows about itself is only for some."""
    try:
        return str(await _value(db, sql))
    except oracledb.DatabaseError as error:
        if code_of(error) not in (942, 1031):
            raise
        return _UNTOLD


async def _dangers(db: Link) -> list[str]:
    said: list[str] = []
    if await _told(db, "SELECT log_mode FROM v$database") == "NOARCHIVELOG":
        said.append("the database does not archive its log: if its disk is lost, so is all since the last backup")
    return said


async def diagnose(address: Address) -> list[str]:
    """Plain sentences: what the server is, and, after "danger: ", what about it endangers the promise."""
    async with _session(address) as db:
        said = [
            f"Oracle {db.connection.version}",
            f"character set {await _value(db, _CHARACTER_SET)}",
            f"it is {str(await _value(db, _ROLE)).lower()}",
            f"protection mode {await _told(db, _PROTECTION)}",
            f"its history is {db.history}",
        ]
        found = await _recognise(address, db)
        said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return said + [f"danger: {text}" for text in await _dangers(db)]
