"""The tables of MySqlStore: migrations, the checks when a store is opened, and the diagnosis.

Migrations run under a lock of the server, so that any number of instances can start at the same time. These servers do
not create tables in transactions: a migration that was interrupted is run again from its beginning, and each of its
statements can be run twice.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Any

from duetime.store import Danger, Diagnosis
from duetime.stores.migrations import Migrations
from duetime.stores.mysql.connection import Address, AsyncmyDriver, connect, execute
from duetime.stores.sessions import setup_session
from duetime.stores.store_url import store_url_error
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "identity_sql", "migrate", "wipe"]

OLDEST_SERVERS = {"MySQL": (8, 0), "MariaDB": (10, 6), "TiDB": (6, 5)}
MIGRATION_SECONDS = 60

_MIGRATIONS = Migrations.of_package("duetime.stores.mysql")
SCHEMA_VERSION = _MIGRATIONS.version

_TABLES = ("shards", "timers", "reached", "members", "namespaces")
_CREATE_VERSIONS = """
CREATE TABLE IF NOT EXISTS duetime_schema (
    version INT NOT NULL, applied_at DATETIME(3) NOT NULL, PRIMARY KEY (version) /*T![clustered_index] CLUSTERED */
) ENGINE = InnoDB COMMENT = 'duetime'
"""
_FIRST_COLUMN = {"members": "instance_id", "namespaces": "name"}
# A lock for each database of a server. Its name may have up to 64 characters.
_LOCK = "CONCAT('duetime ', SHA2(DATABASE(), 224))"


async def migrate(address: Address) -> None:
    """Creates the tables, or updates them to this version."""
    async with _session(address) as db:
        await _check_server(address, db)
        if await _value(db, f"SELECT GET_LOCK({_LOCK}, {MIGRATION_SECONDS})") != 1:
            raise store_url_error(
                f"{address.label} is locked by a migration of another instance for too long; is that instance stuck?"
            )
        found = await _schema_version(address, db)
        if found == SCHEMA_VERSION:
            return
        if not found:
            await _refuse_foreign_tables(address, db)
        await execute(db, (_CREATE_VERSIONS,))
        for number, sql in _MIGRATIONS.missing(found):
            await execute(db, (sql,))
            await execute(db, (f"INSERT INTO duetime_schema VALUES ({number}, UTC_TIMESTAMP(3))",))  # noqa: S608
        _MIGRATIONS.log_applied(address.label)


async def check(address: Address) -> str:
    """Raises if the database cannot be used, and logs a warning for each danger. Returns the SQL expression for the
    identity of the server."""
    async with _session(address) as db:
        await _check_server(address, db)
        _MIGRATIONS.check_complete(address.label, await _schema_version(address, db))
        await execute(db, _CHECK_RIGHTS)
        variables = await _variables(db)
    for danger in _dangers(variables):
        log.warning("%s: %s", address.label, danger)
    return identity_sql(variables)


# Statements that change nothing. Each fails if this user lacks the right for it.
_CHECK_RIGHTS = [
    sql
    for table in _TABLES
    for sql in (
        f"SELECT 1 FROM {table} WHERE 1 = 0",  # noqa: S608
        f"INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0",  # noqa: S608
        f"UPDATE {table} SET {_FIRST_COLUMN.get(table, 'shard_id')} = NULL WHERE 1 = 0",  # noqa: S608
        f"DELETE FROM {table} WHERE 1 = 0",  # noqa: S608
    )
]


async def wipe(address: Address) -> None:
    """For tests: deletes all rows. DELETE is much faster on small tables than TRUNCATE."""
    async with _session(address) as db:
        if await _schema_version(address, db):
            await execute(db, [f"DELETE FROM {table}" for table in _TABLES])  # noqa: S608


def identity_sql(variables: Mapping[str, str]) -> str:
    """The SQL expression for the identity of the server. All servers of a TiDB cluster have the same one."""
    for name in ("server_uuid", "server_uid"):
        if variables.get(name):
            return f"@@{name}"
    return "CONCAT(@@hostname, ':', @@port, ' ', @@server_id)"


def _session(address: Address) -> contextlib.AbstractAsyncContextManager[Any]:
    connecting = connect(address, read_seconds=MIGRATION_SECONDS + 10)
    return setup_session(AsyncmyDriver(address), connecting)


async def _value(db: Any, sql: str) -> Any:
    [rows] = await execute(db, (sql,))
    return rows[0][0] if rows else None


async def _variables(db: Any) -> dict[str, str]:
    """The settings of _SETTINGS that the server has."""
    names = ", ".join(f"'{name}'" for name in _SETTINGS)
    [rows] = await execute(db, (f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})",))
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
    """The product and its version, parsed from VERSION(): "8.0.11-TiDB-v8.5.6", "10.11.6-MariaDB", "8.4.2"."""
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
        raise store_url_error(f"{address.label} is {kind} {name}; {oldest} or later is needed")


async def _schema_version(address: Address, db: Any) -> int:
    """The schema version, 0 if there are no tables of Duetime."""
    if not await _value(db, _TABLE.format("= 'duetime_schema'")):
        return 0
    version = int(await _value(db, "SELECT COALESCE(MAX(version), 0) FROM duetime_schema"))
    return _MIGRATIONS.check_not_newer(address.label, version)


_TABLE = "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE() AND table_name {}"


async def _refuse_foreign_tables(address: Address, db: Any) -> None:
    names = ", ".join(f"'{table}'" for table in _TABLES)
    other = await _value(db, _TABLE.format(f"IN ({names})") + " AND table_comment <> 'duetime'")
    if other is not None:
        raise store_url_error(f"{address.label} has a table {other} of another program; use a separate database")


def _dangers(variables: Mapping[str, str]) -> list[Danger]:
    dangers: list[Danger] = []
    flush = variables.get("innodb_flush_log_at_trx_commit", "1")
    if flush not in ("1", "3"):
        dangers.append(
            Danger(
                f"innodb_flush_log_at_trx_commit is {flush}",
                "a crash of the server or its machine loses timers that were acknowledged",
            )
        )
    if variables.get("log_bin") == "ON" and variables.get("sync_binlog", "1") != "1":
        dangers.append(
            Danger(
                f"sync_binlog is {variables['sync_binlog']}",
                "a crash of the server's machine loses timers that were acknowledged",
            )
        )
    if variables.get("innodb_doublewrite") == "OFF":
        dangers.append(Danger("innodb_doublewrite is off", "a crash of the server's machine may damage the tables"))
    if variables.get("wsrep_on") == "ON":
        dangers.append(Danger("it is a Galera cluster", _SEVERAL_WRITERS))
    if (
        variables.get("group_replication_group_name")
        and variables.get("group_replication_single_primary_mode") == "OFF"
    ):
        dangers.append(Danger("it is a replication group with many primaries", _SEVERAL_WRITERS))
    return dangers


_SEVERAL_WRITERS = "fences exclude two owners of a shard only while all instances write to the same node"

# --- diagnosis -----------------------------------------------------------------------------------


async def diagnose(address: Address) -> Diagnosis:
    """What the server is, and which of its settings can lose acknowledged timers."""
    async with _session(address) as db:
        name = str(await _value(db, "SELECT VERSION()"))
        variables = await _variables(db)
        [[_, used]] = (await execute(db, ("SHOW GLOBAL STATUS LIKE 'Threads_connected'",)))[0] or [["", "?"]]
        found = await _schema_version(address, db)
    facts = [f"{kind_of(name)[0]} {name}"]
    facts += [
        f"{setting} is {variables[setting]}"
        for setting in ("innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "max_allowed_packet")
        if setting in variables
    ]
    if variables.get("max_connections", "0") != "0":
        facts.append(f"{used} of {variables['max_connections']} connections are in use")
    facts.append(_MIGRATIONS.fact(found))
    return Diagnosis(facts, _dangers(variables))
