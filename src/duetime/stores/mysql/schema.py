"""The tables under MySqlStore: made, brought up to date, recognised; and what a doctor wants to know.

Migrations are forward-only, under a lock of the server, so that any number of instances may start at once. Tables are
not made in transactions here: one that was interrupted is done again from its beginning, and every statement of it
can be said twice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Mapping
from importlib import resources
from typing import Any

from duetime.errors import SchemaMismatch, SetupError, StoreError
from duetime.stores.mysql import connection
from duetime.stores.mysql.connection import Address, ask
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "identity_sql", "migrate", "wipe"]

OLDEST_SERVERS = {"MySQL": (8, 0), "MariaDB": (10, 6), "TiDB": (6, 5)}
MIGRATION_SECONDS = 60

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.mysql").joinpath("migrations").iterdir() if ".sql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("shards", "timers", "reached", "members", "namespaces")
_MAKE_VERSIONS = """
CREATE TABLE IF NOT EXISTS duetime_schema (
    version INT NOT NULL, applied_at DATETIME(3) NOT NULL, PRIMARY KEY (version) /*T![clustered_index] CLUSTERED */
) ENGINE = InnoDB COMMENT = 'duetime'
"""
_CHANGED = {"members": "instance_id", "namespaces": "name"}
# One for each database of a server, within the 64 characters that a name may have.
_LOCK = "CONCAT('duetime ', SHA2(DATABASE(), 224))"


async def migrate(address: Address) -> None:
    """Make the tables, or bring them up to this version."""
    async with _session(address) as db:
        await _check_server(address, db)
        if await _value(db, f"SELECT GET_LOCK({_LOCK}, {MIGRATION_SECONDS})") != 1:
            raise SetupError(
                f"store.url: {address.label} is being updated by another instance for too long; is one of them stuck?",
                field="store.url",
            )
        found = await _recognise(address, db)
        if found == SCHEMA_VERSION:
            return
        if not found:
            await _refuse_foreign_tables(address, db)
        await ask(db, (_MAKE_VERSIONS,))
        for number in range(found + 1, SCHEMA_VERSION + 1):
            await ask(db, (_MIGRATIONS[number - 1].read_text("utf-8"),))
            await ask(db, (f"INSERT INTO duetime_schema VALUES ({number}, UTC_TIMESTAMP(3))",))  # noqa: S608
        log.info("%s: made the tables of schema %d", address.label, SCHEMA_VERSION)


async def check(address: Address) -> str:
    """Refuse a database that cannot be used, and say loudly what endangers the promise. Answers how to ask which
    server one speaks to."""
    async with _session(address) as db:
        await _check_server(address, db)
        found = await _recognise(address, db)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
        await ask(db, _RIGHTS)
        variables = await _variables(db)
    for warning in _dangers(variables):
        log.warning("%s: %s", address.label, warning)
    return identity_sql(variables)


# A right that is missing is an error also where there is nothing to do.
_RIGHTS = [
    right
    for table in _TABLES
    for right in (
        f"SELECT 1 FROM {table} WHERE 1 = 0",  # noqa: S608
        f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0",  # noqa: S608
        f"UPDATE {table} SET {_CHANGED.get(table, 'shard_id')} = NULL WHERE 1 = 0",  # noqa: S608
        f"DELETE FROM {table} WHERE 1 = 0",  # noqa: S608
    )
]


async def wipe(address: Address) -> None:
    """For tests: all rows. By DELETE, which in small tables is much faster than making them anew."""
    async with _session(address) as db:
        if await _recognise(address, db):
            await ask(db, [f"DELETE FROM {table}" for table in _TABLES])  # noqa: S608


def identity_sql(variables: Mapping[str, str]) -> str:
    """How to ask which server this is. One of TiDB is as good as another, and they all say the same."""
    for name in ("server_uuid", "server_uid"):
        if variables.get(name):
            return f"@@{name}"
    return "CONCAT(@@hostname, ':', @@port, ' ', @@server_id)"


@contextlib.asynccontextmanager
async def _session(address: Address) -> AsyncIterator[Any]:
    """A connection of its own. What goes wrong becomes an error that says what to do."""
    db: Any = None
    try:
        db = await connection.connect(address, read_seconds=MIGRATION_SECONDS + 10)
        yield db
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise connection.setup_error(address, error) from error
    finally:
        if db is not None:
            with contextlib.suppress(Exception):
                await db.ensure_closed()
            db.close()


async def _value(db: Any, sql: str) -> Any:
    [rows] = await ask(db, (sql,))
    return rows[0][0] if rows else None


async def _variables(db: Any) -> dict[str, str]:
    """Settings that somebody here looks at; not every server has all of them."""
    names = ", ".join(f"'{name}'" for name in _SETTINGS)
    [rows] = await ask(db, (f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})",))
    return {str(name).lower(): str(value) for name, value in rows}


_SETTINGS = (
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "innodb_doublewrite",
    "innodb_flush_log_at_trx_commit",
    "log_bin",
    "max_allowed_packet",
    "max_connections",
    "server_uid",
    "server_uuid",
    "sync_binlog",
    "wsrep_on",
)


def kind_of(version: str) -> tuple[str, tuple[int, int]]:
    """The server and its version, by what it calls itself: "8.0.11-TiDB-v8.5.6", "10.11.6-MariaDB", "8.4.2"."""
    for kind, pattern in (
        ("TiDB", r".*TiDB-v?(\d+)\.(\d+)"),
        ("MariaDB", r"(?:5\.5\.5-)?(\d+)\.(\d+).*MariaDB"),
        ("MySQL", r"(\d+)\.(\d+)"),
    ):
        match = re.match(pattern, version)
        if match:
            return kind, (int(match[1]), int(match[2]))
    return "MySQL", (0, 0)


async def _check_server(address: Address, db: Any) -> None:
    name = str(await _value(db, "SELECT VERSION()"))
    kind, version = kind_of(name)
    if version < OLDEST_SERVERS[kind]:
        oldest = ".".join(map(str, OLDEST_SERVERS[kind]))
        raise SetupError(f"store.url: {address.label} is {kind} {name}; {oldest} or later is needed", field="store.url")


async def _recognise(address: Address, db: Any) -> int:
    """The schema version, 0 where there is nothing of ours."""
    if not await _value(db, _TABLE.format("= 'duetime_schema'")):
        return 0
    version = int(await _value(db, "SELECT COALESCE(MAX(version), 0) FROM duetime_schema"))
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


_TABLE = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name {}"


async def _refuse_foreign_tables(address: Address, db: Any) -> None:
    names = ", ".join(f"'{table}'" for table in _TABLES)
    other = await _value(db, _TABLE.format(f"IN ({names})") + " AND table_comment <> 'duetime'")
    if other is not None:
        raise SetupError(
            f"store.url: {address.label} has a table {other} of another program; name a database of its own",
            field="store.url",
        )


def _dangers(variables: Mapping[str, str]) -> list[str]:
    said: list[str] = []
    flush = variables.get("innodb_flush_log_at_trx_commit", "1")
    if flush not in ("1", "3"):
        said.append(
            f"innodb_flush_log_at_trx_commit is {flush}: a crash of the server or its machine loses timers that were"
            " acknowledged"
        )
    if variables.get("log_bin") == "ON" and variables.get("sync_binlog", "1") != "1":
        said.append(
            f"sync_binlog is {variables['sync_binlog']}: a crash of the server's machine loses timers that were"
            " acknowledged"
        )
    if variables.get("innodb_doublewrite") == "OFF":
        said.append("innodb_doublewrite is off: a crash of the server's machine may damage the tables")
    if variables.get("wsrep_on") == "ON":
        said.append(_MANY_WRITERS.format("a Galera cluster"))
    if (
        variables.get("group_replication_group_name")
        and variables.get("group_replication_single_primary_mode") == "OFF"
    ):
        said.append(_MANY_WRITERS.format("a replication group with many primaries"))
    return said


_MANY_WRITERS = "it is {}: two owners of a shard are kept apart only while all instances write to the same node"

# --- for the doctor ------------------------------------------------------------------------------


async def diagnose(address: Address) -> list[str]:
    """Plain sentences: what the server is, and, after "danger: ", what about it endangers the promise."""
    async with _session(address) as db:
        name = str(await _value(db, "SELECT VERSION()"))
        variables = await _variables(db)
        [[_, used]] = (await ask(db, ("SHOW GLOBAL STATUS LIKE 'Threads_connected'",)))[0] or [["", "?"]]
        found = await _recognise(address, db)
    said = [f"{kind_of(name)[0]} {name}"]
    said += [
        f"{setting} is {variables[setting]}"
        for setting in ("innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet")
        if setting in variables
    ]
    if variables.get("max_connections", "0") != "0":
        said.append(f"{used} of {variables['max_connections']} connections are in use")
    said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
    return said + [f"danger: {text}" for text in _dangers(variables)]
