"""The tables of CassandraStore: create, migrate, recognise, diagnose.

Cassandra changes its schema one statement at a time, and each node learns of a change at its own time. So migrations
run under a lock (a row with a lease), each statement may be repeated, and the next one waits until all nodes agree. One
table is created without the lock, because the lock is in it. All instances compute the same id for it: two nodes that
create it at the same time create the same table.
"""
# ruff: noqa: S608 (texts are built from constants and a checked keyspace)

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from duetime.errors import SchemaMismatch, SetupError, StoreError, StoreUnavailable
from duetime.store import Danger, Diagnosis
from duetime.stores.cassandra.address import Address
from duetime.stores.cassandra.connection import Connection, Row, connect
from duetime.stores.cassandra.errors import is_unknown_table, setup_error
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = (4, 0)
LEASE_SECONDS = 60
LOCK_WAIT_SECONDS = 150
NEW_TABLE_SECONDS = 20  # until a node can use what it lists
REPLICAS = 3  # if the URL does not set it and the datacenter has as many nodes

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.cassandra").joinpath("migrations").iterdir() if ".cql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("timers", "members", "namespaces")
_IDS = uuid.UUID("0f5e3a5e-9a4e-5f0b-8f43-d2a1e1b2c3d4")


async def migrate(address: Address) -> None:
    """Create keyspace and tables, or migrate them to this version."""
    async with _connected(address) as connection:
        await _check_server(address, connection)
        if await _recognise(address, connection) == SCHEMA_VERSION:
            return
        await _create_keyspace(address, connection)
        table_id = uuid.uuid5(_IDS, address.keyspace)
        await _execute_on_new(
            connection,
            f"CREATE TABLE IF NOT EXISTS {_settings(address)} (name text PRIMARY KEY, number bigint, text text)"
            f" WITH id = {table_id}",
        )
        async with _lock(address, connection):
            found = await _recognise(address, connection)
            for number in range(found + 1, SCHEMA_VERSION + 1):
                for statement in _statements(address, number):
                    await connection.execute(statement)
                await _record(address, connection, number)
                log.info("%s: created the tables of schema %d", address.label, number)


def _statements(address: Address, number: int) -> list[str]:
    text = re.sub(r"--.*", "", _MIGRATIONS[number - 1].read_text("utf-8"))
    qualified = re.sub(r"\b(CREATE|ALTER) TABLE (IF NOT EXISTS )?", rf'\g<0>"{address.keyspace}".', text)
    return [statement for part in qualified.split(";") if (statement := part.strip())]


async def _record(address: Address, connection: Connection, number: int) -> None:
    settings = _settings(address)
    await connection.execute(
        f"INSERT INTO {settings} (name, text) VALUES ('consistency', %s) IF NOT EXISTS",
        _consistency_text(address),
    )
    if number == 1:
        await connection.execute(f"INSERT INTO {settings} (name, number) VALUES ('version', 1) IF NOT EXISTS")
    else:
        await connection.execute(
            f"UPDATE {settings} SET number = %s WHERE name = 'version' IF number < %s", number, number
        )


async def check(address: Address) -> None:
    """Raise an error for a cluster that cannot be used, and log warnings about settings that may lose timers."""
    async with _connected(address) as connection:
        await _check_server(address, connection)
        found = await _recognise(address, connection)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` creates them")
        await _check_consistency(address, connection)
        await _check_rights(address, connection)
        for danger in _dangers(await connection.settings()):
            log.warning("%s: %s", address.label, danger)


async def wipe(address: Address) -> None:
    """For tests: delete all rows, by conditional deletes. Plain deletes, or TRUNCATE, which is slow, could miss rows of
    conditional writes, or delete later ones, because conditional writes have other timestamps."""
    async with _connected(address) as connection:
        if not await _recognise(address, connection):
            return
        keyspace, settings = f'"{address.keyspace}"', _settings(address)
        [[count]] = await connection.execute(f"SELECT max(number) FROM {settings} WHERE name = 'shards'")
        deletes = [
            f"BEGIN BATCH DELETE FROM {keyspace}.timers WHERE shard_id = {shard_id} AND row_type = 1"
            " AND timer_execute_at = 0 AND timer_uuid_high = 0 AND timer_uuid_low = 0 AND row_order = 0x IF EXISTS;"
            f" DELETE FROM {keyspace}.timers WHERE shard_id = {shard_id}; APPLY BATCH"
            for shard_id in range(count or 0)
        ]
        work = [connection.execute(delete) for delete in deletes]
        work += [connection.execute(f"DELETE FROM {settings} WHERE name = 'shards' IF EXISTS")] if count else []
        for table, key in (("members", "instance_id"), ("namespaces", "name")):
            rows = await connection.execute(f"SELECT {key} FROM {keyspace}.{table}")
            delete = f"DELETE FROM {keyspace}.{table} WHERE {key} = %s IF EXISTS"
            work += [connection.execute(delete, row[0]) for row in rows]
        await asyncio.gather(*work)


# --- parts ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _connected(address: Address) -> AsyncIterator[Connection]:
    """A connection for a few statements. Errors are raised as errors that say what to do."""
    try:
        connection = await connect(address, without_metadata=True)
        try:
            yield connection
        finally:
            await connection.close()
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise setup_error(address, error) from error


def _settings(address: Address) -> str:
    return f'"{address.keyspace}".duetime_schema'


def _url_error(text: str) -> SetupError:
    return SetupError(f"store.url: {text}", field="store.url")


async def _check_server(address: Address, connection: Connection) -> None:
    [[version]] = await connection.execute("SELECT release_version FROM system.local")
    if not is_new_enough(version):
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise _url_error(f"{address.label} is Cassandra {version}; {oldest} or later is needed")


def is_new_enough(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_SERVER


async def _recognise(address: Address, connection: Connection) -> int:
    """The schema version, 0 if there are no tables of Duetime."""
    rows = await connection.execute(
        "SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", address.keyspace
    )
    tables = {row[0] for row in rows}
    if "duetime_schema" not in tables:
        if foreign := sorted(tables.intersection(_TABLES)):
            raise _url_error(f"{address.label} has a table {foreign[0]} of another program; use a keyspace of its own")
        return 0
    rows = await _execute_on_new(connection, f"SELECT number FROM {_settings(address)} WHERE name = 'version'")
    version = int(rows[0][0]) if rows else 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _execute_on_new(connection: Connection, statement: str) -> list[Row]:
    """For a keyspace or a table that another instance may be creating: a node lists it in system_schema some
    milliseconds before statements can use it."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + NEW_TABLE_SECONDS
    while True:
        try:
            return await connection.execute(statement)
        except Exception as error:
            if not is_unknown_table(error) or clock() > give_up_at:
                raise
        await asyncio.sleep(0.05)


async def _create_keyspace(address: Address, connection: Connection) -> None:
    """With as many copies as the URL says; by default three, or as many as there are nodes."""
    if await connection.execute(
        "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s", address.keyspace
    ):
        return
    nodes = connection.nodes()
    if address.datacenter is not None:
        nodes = {address.datacenter: nodes.get(address.datacenter, 0)}
    copies = {
        position: address.replication or max(1, min(REPLICAS, count)) for position, count in sorted(nodes.items())
    }
    replication = ", ".join(f"'{position}': {count}" for position, count in copies.items())
    await connection.execute(
        f'CREATE KEYSPACE IF NOT EXISTS "{address.keyspace}"'
        f" WITH replication = {{'class': 'NetworkTopologyStrategy', {replication}}}"
    )
    log.info("%s: created the keyspace with copies: %s", address.label, replication)


@contextlib.asynccontextmanager
async def _lock(address: Address, connection: Connection) -> AsyncIterator[None]:
    """One instance at a time. The lease of the lock ends by itself if the instance crashes."""
    settings, me = _settings(address), uuid.uuid4().hex
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + LOCK_WAIT_SECONDS
    take = f"INSERT INTO {settings} (name, text) VALUES ('lock', %s) IF NOT EXISTS USING TTL {LEASE_SECONDS}"
    while not (await connection.execute(take, me))[0][0]:
        if clock() > give_up_at:
            raise StoreUnavailable(f"cassandra: {address.label} is being migrated by another instance for too long")
        await asyncio.sleep(0.2)
    try:
        yield
    finally:
        await connection.execute(f"DELETE FROM {settings} WHERE name = 'lock' IF text = %s", me)


def _consistency_text(address: Address) -> str:
    return f"{address.consistency} of {address.datacenter}" if "local" in address.consistency else address.consistency


async def _check_consistency(address: Address, connection: Connection) -> None:
    """Paxos rounds of all datacenters and rounds of one datacenter do not see each other."""
    rows = await connection.execute(f"SELECT text FROM {_settings(address)} WHERE name = 'consistency'")
    if rows and rows[0][0] != _consistency_text(address):
        raise _url_error(
            f"{address.label} was created with consistency={rows[0][0]}, and the URL says {_consistency_text(address)}:"
            " all instances must use the same"
        )


async def _check_rights(address: Address, connection: Connection) -> None:
    """By writes whose conditions are never met."""
    keyspace = f'"{address.keyspace}"'
    for delete in (
        f"DELETE FROM {keyspace}.timers WHERE shard_id = -1 AND row_type = 1 AND timer_execute_at = 0"
        " AND timer_uuid_high = 0 AND timer_uuid_low = 0 AND row_order = 0x IF EXISTS",
        f"DELETE FROM {keyspace}.members WHERE instance_id = 'nobody' IF counter = -1",
        f"DELETE FROM {keyspace}.namespaces WHERE name = 'nowhere' IF revision = -1",
        f"DELETE FROM {_settings(address)} WHERE name = 'nothing' IF EXISTS",
    ):
        await connection.execute(delete)


# --- diagnose ------------------------------------------------------------------------------------


def _dangers(settings: dict[str, dict[str, str]]) -> list[Danger]:
    """Warnings about the settings of each node."""
    periodic = [node for node, values in settings.items() if values.get("commitlog_sync") == "periodic"]
    if not periodic:
        return []
    return [
        Danger(
            f"commitlog_sync is periodic on {', '.join(sorted(periodic))}",
            "nodes that crash together lose timers that were acknowledged; set commitlog_sync: batch (or group) in"
            " cassandra.yaml",
        )
    ]


async def diagnose(address: Address) -> Diagnosis:
    """Facts about the cluster, and which of the settings can lose acknowledged timers."""
    async with _connected(address) as connection:
        [[version, name]] = await connection.execute("SELECT release_version, cluster_name FROM system.local")
        nodes = ", ".join(f"{count} in {position}" for position, count in sorted(connection.nodes().items()))
        sentences = [f"Cassandra {version}, cluster {name}", f"nodes: {nodes}", f"consistency is {address.consistency}"]
        rows = await connection.execute(
            "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s", address.keyspace
        )
        sentences.append(f"copies: {_copies(rows[0][0]) if rows else 'the keyspace does not exist yet'}")
        settings = await connection.settings()
        sentences += _settings_text(settings)
        found = await _recognise(address, connection)
        sentences.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return Diagnosis(sentences, _dangers(settings))


def _copies(replication: dict[str, Any]) -> str:
    return ", ".join(
        f"{count} ({position})" if position != "replication_factor" else str(count)
        for position, count in replication.items()
        if position != "class"
    )


def _settings_text(settings: dict[str, dict[str, str]]) -> list[str]:
    sentences = []
    for name in ("commitlog_sync", "paxos_variant", "max_mutation_size"):
        values = sorted({values[name] for values in settings.values() if values.get(name)})
        sentences.append(f"{name} is {' or '.join(values) if values else 'hidden from this user'}")
        if name == "paxos_variant" and values and values != ["v2"]:
            sentences.append("paxos_variant v2 handles concurrent writes far better than v1: set it on all nodes")
    return sentences
