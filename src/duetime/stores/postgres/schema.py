"""The tables under PostgresStore: made, brought up to date, recognised; and what a doctor wants to know.

Migrations are forward-only, each database's in one transaction, under an advisory lock that ends with it: any
number of instances may start at once, and behind a pooler too.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

import asyncpg

from duetime.errors import DuetimeError, SchemaMismatch, SetupError, StoreError
from duetime.stores.postgres import connection, statements
from duetime.stores.postgres.connection import Address
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = 13
MIGRATION_SECONDS = 60
_LOCK = 0x44756554  # "DueT"

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.postgres").joinpath("migrations").iterdir() if ".sql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("shards", "timers", "members", "namespaces")
_MAKE_VERSIONS = """
CREATE TABLE IF NOT EXISTS duetime_schema (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())
"""


async def migrate(address: Address) -> None:
    """Make the tables, or bring them up to this version: all of it or nothing."""
    async with _transaction(address) as db:
        await _check_server(address, db)
        await db.execute(f"SET LOCAL lock_timeout = '{MIGRATION_SECONDS}s'")
        await db.execute(f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext(coalesce(current_schema(), '')))")
        if address.schema is not None and await _value(db, "SELECT current_schema() IS NULL"):
            await db.execute(f'CREATE SCHEMA IF NOT EXISTS "{address.schema}"')
        found = await _recognise(address, db)
        if found == SCHEMA_VERSION:
            return
        await db.execute(_MAKE_VERSIONS)
        for number in range(found + 1, SCHEMA_VERSION + 1):
            await db.execute(_MIGRATIONS[number - 1].read_text("utf-8"))
            await db.execute(f"INSERT INTO duetime_schema (version) VALUES ({number})")  # noqa: S608
        log.info("%s: made the tables of schema %d", address.label, SCHEMA_VERSION)


async def check(address: Address) -> str:
    """Refuse a database that cannot be used, and say loudly what endangers the promise. Answers how to ask for its
    timeline."""
    async with _transaction(address) as db:
        await _check_server(address, db)
        found = await _recognise(address, db)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
        for table in _TABLES:
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                if not await _value(db, f"SELECT has_table_privilege('{table}', '{right}')"):
                    raise SetupError(
                        f"store.url: {address.label} does not allow this user to {right} in {table};"
                        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA … TO …",
                        field="store.url",
                    )
        for warning in await _dangers(db):
            log.warning("%s: %s", address.label, warning)
    return await _timeline_sql(address)


async def wipe(address: Address) -> None:
    """For tests: all rows. By DELETE, which in small tables is much faster than emptying every partition."""
    async with _transaction(address) as db:
        if await _recognise(address, db):
            for table in _TABLES:
                await db.execute(f"DELETE FROM {table}")  # noqa: S608


async def _timeline_sql(address: Address) -> str:
    """How to ask for the timeline, or for nothing where the server does not tell."""
    try:
        async with _transaction(address) as db:
            await _value(db, f"SELECT {statements.TIMELINE}")
    except DuetimeError:
        log.info("%s does not tell its timeline: a failover that loses commits goes unnoticed", address.label)
        return statements.NO_TIMELINE
    return statements.TIMELINE


@contextlib.asynccontextmanager
async def _transaction(address: Address) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A connection of its own, in a transaction. What goes wrong becomes an error that says what to do."""
    try:
        db = await connection.connect(address)
    except Exception as error:
        raise connection.setup_error(address, error) from error
    try:
        # By hand and in simple statements: behind a pooler the parts of any other would meet different servers.
        await db.execute("BEGIN" if not address.pooled else connection.begin_sql(address))
        yield db
        await db.execute("COMMIT")
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise connection.setup_error(address, error) from error
    finally:
        with contextlib.suppress(Exception):
            await db.close(timeout=1)
        db.terminate()


async def _value(db: asyncpg.Connection[Any], sql: str) -> Any:
    return await db.fetchval(sql)


async def _check_server(address: Address, db: asyncpg.Connection[Any]) -> None:
    version = int(await _value(db, "SELECT current_setting('server_version_num')::int")) // 10_000
    if version < OLDEST_SERVER:
        raise SetupError(
            f"store.url: {address.label} is PostgreSQL {version}; {OLDEST_SERVER} or later is needed", field="store.url"
        )
    encoding = await _value(db, "SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise SetupError(
            f"store.url: {address.label} has the encoding {encoding}, which cannot hold every text;"
            " CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0",
            field="store.url",
        )
    if await _value(db, "SELECT pg_is_in_recovery()"):
        raise SetupError(f"store.url: {address.label} is a read-only standby; name the primary", field="store.url")
    if await _value(db, "SELECT current_setting('transaction_read_only')") == "on":
        raise SetupError(
            f"store.url: {address.label} is read-only for this user: default_transaction_read_only is on",
            field="store.url",
        )


async def _recognise(address: Address, db: asyncpg.Connection[Any]) -> int:
    """The schema version, 0 where there is nothing of ours."""
    if await _value(db, "SELECT to_regclass('duetime_schema') IS NULL"):
        return 0
    version = int(await _value(db, "SELECT coalesce(max(version), 0) FROM duetime_schema"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _dangers(db: asyncpg.Connection[Any]) -> list[str]:
    warnings = {
        "fsync": "fsync is off: a crash of the server's machine may destroy everything",
        "full_page_writes": "full_page_writes is off: a crash of the server's machine may damage the tables",
        "synchronous_commit": "synchronous_commit is off: a crash of the server loses timers that were acknowledged",
    }
    return [text for name, text in warnings.items() if await _value(db, f"SELECT current_setting('{name}')") == "off"]


# --- for the doctor ------------------------------------------------------------------------------

_FACTS = (
    ("PostgreSQL {}", "SELECT current_setting('server_version')"),
    ("encoding {}", "SELECT current_setting('server_encoding')"),
    ("fsync is {}", "SELECT current_setting('fsync')"),
    ("synchronous_commit is {}", "SELECT current_setting('synchronous_commit')"),
    ("full_page_writes is {}", "SELECT current_setting('full_page_writes')"),
    (
        "{} of its connections are free",
        "SELECT (current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int"
        " - count(*))::text || ' of ' || current_setting('max_connections') FROM pg_stat_activity"
        " WHERE backend_type = 'client backend'",
    ),
    ("it is {}", "SELECT CASE WHEN pg_is_in_recovery() THEN 'a read-only standby' ELSE 'a primary' END"),
    (
        "standbys: {}",
        "SELECT coalesce(string_agg(coalesce(nullif(application_name, ''), client_addr::text, 'unnamed') || ' ('"
        " || coalesce(sync_state, 'state hidden from this user') || ')', ', '), 'none') FROM pg_stat_replication",
    ),
)


async def diagnose(address: Address) -> list[str]:
    """Plain sentences: what the server is, and, after "danger: ", what about it endangers the promise."""
    async with _transaction(address) as db:
        said = [text.format(await _value(db, sql)) for text, sql in _FACTS]
        found = await _recognise(address, db)
        said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return said + [f"danger: {text}" for text in await _dangers(db)]
