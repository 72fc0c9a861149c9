"""The tables of PostgresStore: migrations, the checks when a store is opened, and the diagnosis.

All migrations run in one transaction under an advisory lock that ends with it. So any number of instances can start at
the same time, also behind a pooler.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import asyncpg

from duetime.errors import DuetimeError
from duetime.store import Danger, Diagnosis
from duetime.stores.migrations import Migrations
from duetime.stores.postgres import statements
from duetime.stores.postgres.connection import Address, AsyncpgDriver, begin_sql
from duetime.stores.sessions import setup_session
from duetime.stores.store_url import store_url_error
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = 13
MIGRATION_SECONDS = 60
_LOCK = 0x44756554  # "DueT"

_MIGRATIONS = Migrations.of_package("duetime.stores.postgres")
SCHEMA_VERSION = _MIGRATIONS.version

_TABLES = ("shards", "timers", "members", "namespaces")
_CREATE_VERSIONS = """
CREATE TABLE IF NOT EXISTS duetime_schema (version integer PRIMARY KEY, applied_at timestamptz NOT NULL DEFAULT now())
"""


async def migrate(address: Address) -> None:
    """Creates the tables, or updates them to this version: completely or not at all."""
    async with _transaction(address) as db:
        await _check_server(address, db)
        await db.execute(f"SET LOCAL lock_timeout = '{MIGRATION_SECONDS}s'")
        await db.execute(f"SELECT pg_advisory_xact_lock({_LOCK}, hashtext(coalesce(current_schema(), '')))")
        if address.schema is not None and await _value(db, "SELECT current_schema() IS NULL"):
            await db.execute(f'CREATE SCHEMA IF NOT EXISTS "{address.schema}"')
        found = await _schema_version(address, db)
        if found == SCHEMA_VERSION:
            return
        await db.execute(_CREATE_VERSIONS)
        for number, sql in _MIGRATIONS.missing(found):
            await db.execute(sql)
            await db.execute(f"INSERT INTO duetime_schema (version) VALUES ({number})")  # noqa: S608
        _MIGRATIONS.log_applied(address.label)


async def check(address: Address) -> str:
    """Raises if the database cannot be used, and logs a warning for each danger. Returns the SQL expression for its
    timeline."""
    async with _transaction(address) as db:
        await _check_server(address, db)
        _MIGRATIONS.check_complete(address.label, await _schema_version(address, db))
        for table in _TABLES:
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                if not await _value(db, f"SELECT has_table_privilege('{table}', '{right}')"):
                    raise store_url_error(
                        f"{address.label} does not allow this user to {right} in {table};"
                        f" GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA … TO …"
                    )
        for danger in await _dangers(db):
            log.warning("%s: %s", address.label, danger)
    return await _timeline_sql(address)


async def wipe(address: Address) -> None:
    """For tests: deletes all rows. DELETE is much faster on small tables than TRUNCATE of every partition."""
    async with _transaction(address) as db:
        if await _schema_version(address, db):
            for table in _TABLES:
                await db.execute(f"DELETE FROM {table}")  # noqa: S608


async def _timeline_sql(address: Address) -> str:
    """The SQL expression for the timeline, or for "" if this user may not read it."""
    try:
        async with _transaction(address) as db:
            await _value(db, f"SELECT {statements.TIMELINE}")
    except DuetimeError:
        log.info(
            "%s: this user may not read the timeline; a failover that loses commits is not detected", address.label
        )
        return statements.NO_TIMELINE
    return statements.TIMELINE


@contextlib.asynccontextmanager
async def _transaction(address: Address) -> AsyncIterator[asyncpg.Connection[Any]]:
    """A new connection in a transaction. Errors of the driver are raised as a SetupError or StoreUnavailable."""
    async with setup_session(AsyncpgDriver(address)) as db:
        # Sent as simple statements: behind a pooler the messages of a prepared one could reach different servers.
        await db.execute("BEGIN" if not address.pooled else begin_sql(address))
        yield db
        await db.execute("COMMIT")


async def _value(db: asyncpg.Connection[Any], sql: str) -> Any:
    return await db.fetchval(sql)


async def _check_server(address: Address, db: asyncpg.Connection[Any]) -> None:
    version = int(await _value(db, "SELECT current_setting('server_version_num')::int")) // 10_000
    if version < OLDEST_SERVER:
        raise store_url_error(f"{address.label} is PostgreSQL {version}; {OLDEST_SERVER} or later is needed")
    encoding = await _value(db, "SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        raise store_url_error(
            f"{address.label} has the encoding {encoding}, which cannot store every text;"
            " CREATE DATABASE … ENCODING 'UTF8' TEMPLATE template0"
        )
    if await _value(db, "SELECT pg_is_in_recovery()"):
        raise store_url_error(f"{address.label} is a read-only standby; name the primary")
    if await _value(db, "SELECT current_setting('transaction_read_only')") == "on":
        raise store_url_error(f"{address.label} is read-only for this user: default_transaction_read_only is on")


async def _schema_version(address: Address, db: asyncpg.Connection[Any]) -> int:
    """The schema version, 0 if there are no tables of Duetime."""
    if await _value(db, "SELECT to_regclass('duetime_schema') IS NULL"):
        return 0
    version = int(await _value(db, "SELECT coalesce(max(version), 0) FROM duetime_schema"))
    return _MIGRATIONS.check_not_newer(address.label, version)


async def _dangers(db: asyncpg.Connection[Any]) -> list[Danger]:
    consequences = {
        "fsync": "a crash of the server's machine may destroy everything",
        "full_page_writes": "a crash of the server's machine may damage the tables",
        "synchronous_commit": "a crash of the server loses timers that were acknowledged",
    }
    return [
        Danger(f"{name} is off", consequence)
        for name, consequence in consequences.items()
        if await _value(db, f"SELECT current_setting('{name}')") == "off"
    ]


# --- diagnosis -----------------------------------------------------------------------------------

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


async def diagnose(address: Address) -> Diagnosis:
    """What the server is, and which of its settings can lose acknowledged timers."""
    async with _transaction(address) as db:
        facts = [text.format(await _value(db, sql)) for text, sql in _FACTS]
        facts.append(_MIGRATIONS.fact(await _schema_version(address, db)))
        return Diagnosis(facts, await _dangers(db))
