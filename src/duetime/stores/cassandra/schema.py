"""The tables under CassandraStore: made, brought up to date, recognised; and what a doctor wants to know.

Cassandra changes its schema one statement at a time, and each node learns of it in its own time. So migrations run
under a lock (a row with a lease), each statement may be said again, and the next one waits until all nodes agree.
The one table that is made without the lock, because the lock is in it, has an id that all instances make up alike:
two nodes that make it at the same time make the same table.
"""
# ruff: noqa: S608 (texts are put together from names of our own and a checked keyspace)

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
from duetime.stores.cassandra import connection
from duetime.stores.cassandra.address import Address, setup_error
from duetime.stores.cassandra.connection import Link
from duetime.telemetry import log

__all__ = ["SCHEMA_VERSION", "check", "diagnose", "migrate", "wipe"]

OLDEST_SERVER = (4, 0)
LEASE_SECONDS = 60
PATIENCE_SECONDS = 150
REPLICAS = 3  # where the URL does not say and the datacenter has as many nodes

_MIGRATIONS = sorted(
    (e for e in resources.files("duetime.stores.cassandra").joinpath("migrations").iterdir() if ".cql" in e.name),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)

_TABLES = ("timers", "members", "namespaces")
_IDS = uuid.UUID("0f5e3a5e-9a4e-5f0b-8f43-d2a1e1b2c3d4")


async def migrate(address: Address) -> None:
    """Make keyspace and tables, or bring them up to this version."""
    async with _linked(address) as link:
        await _check_server(address, link)
        if await _recognise(address, link) == SCHEMA_VERSION:
            return
        await _make_keyspace(address, link)
        table_id = uuid.uuid5(_IDS, address.keyspace)
        await link.execute(
            f"CREATE TABLE IF NOT EXISTS {_settings(address)} (name text PRIMARY KEY, number bigint, text text)"
            f" WITH id = {table_id}"
        )
        async with _lock(address, link):
            found = await _recognise(address, link)
            for number in range(found + 1, SCHEMA_VERSION + 1):
                for statement in _statements(address, number):
                    await link.execute(statement)
                await _record(address, link, number)
                log.info("%s: made the tables of schema %d", address.label, number)


def _statements(address: Address, number: int) -> list[str]:
    text = re.sub(r"--.*", "", _MIGRATIONS[number - 1].read_text("utf-8"))
    qualified = re.sub(r"\b(CREATE|ALTER) TABLE (IF NOT EXISTS )?", rf'\g<0>"{address.keyspace}".', text)
    return [statement for part in qualified.split(";") if (statement := part.strip())]


async def _record(address: Address, link: Link, number: int) -> None:
    settings = _settings(address)
    await link.execute(
        f"INSERT INTO {settings} (name, text) VALUES ('consistency', %s) IF NOT EXISTS",
        _agreed_by(address),
    )
    if number == 1:
        await link.execute(f"INSERT INTO {settings} (name, number) VALUES ('version', 1) IF NOT EXISTS")
    else:
        await link.execute(f"UPDATE {settings} SET number = %s WHERE name = 'version' IF number < %s", number, number)


async def check(address: Address) -> None:
    """Refuse a cluster that cannot be used, and say loudly what endangers the promise."""
    async with _linked(address) as link:
        await _check_server(address, link)
        found = await _recognise(address, link)
        if found < SCHEMA_VERSION:
            what = f"has schema {found}, this version needs {SCHEMA_VERSION}" if found else "has no tables yet"
            raise SchemaMismatch(f"{address.label} {what}; `duetime serve` makes them")
        await _check_consistency(address, link)
        await _check_rights(address, link)
        for warning in _dangers(await link.settings()):
            log.warning("%s: %s", address.label, warning)


async def wipe(address: Address) -> None:
    """For tests: all rows, by conditional deletes. Plain ones, or TRUNCATE, which is slow, could miss or outlive rows
    that conditional writes make, for those have timestamps of their own."""
    async with _linked(address) as link:
        if not await _recognise(address, link):
            return
        keyspace, settings = f'"{address.keyspace}"', _settings(address)
        [[count]] = await link.execute(f"SELECT max(number) FROM {settings} WHERE name = 'shards'")
        deletes = [
            f"BEGIN BATCH DELETE FROM {keyspace}.timers WHERE shard_id = {shard_id} AND row_type = 1"
            " AND timer_execute_at = 0 AND timer_uuid_high = 0 AND timer_uuid_low = 0 AND row_order = 0x IF EXISTS;"
            f" DELETE FROM {keyspace}.timers WHERE shard_id = {shard_id}; APPLY BATCH"
            for shard_id in range(count or 0)
        ]
        work = [link.execute(delete) for delete in deletes]
        work += [link.execute(f"DELETE FROM {settings} WHERE name = 'shards' IF EXISTS")] if count else []
        for table, key in (("members", "instance_id"), ("namespaces", "name")):
            rows = await link.execute(f"SELECT {key} FROM {keyspace}.{table}")
            delete = f"DELETE FROM {keyspace}.{table} WHERE {key} = %s IF EXISTS"
            work += [link.execute(delete, row[0]) for row in rows]
        await asyncio.gather(*work)


# --- parts ---------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def _linked(address: Address) -> AsyncIterator[Link]:
    """A link for a few statements. What goes wrong becomes an error that says what to do."""
    try:
        link = await connection.connect(address, briefly=True)
        try:
            yield link
        finally:
            await link.close()
    except (StoreError, SetupError):
        raise
    except Exception as error:
        raise setup_error(address, error) from error


def _settings(address: Address) -> str:
    return f'"{address.keyspace}".duetime_schema'


def _wrong(text: str) -> SetupError:
    return SetupError(f"store.url: {text}", field="store.url")


async def _check_server(address: Address, link: Link) -> None:
    [[version]] = await link.execute("SELECT release_version FROM system.local")
    if not is_new_enough(version):
        oldest = ".".join(map(str, OLDEST_SERVER))
        raise _wrong(f"{address.label} is Cassandra {version}; {oldest} or later is needed")


def is_new_enough(version: str) -> bool:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_SERVER


async def _recognise(address: Address, link: Link) -> int:
    """The schema version, 0 where there is nothing of ours."""
    rows = await link.execute("SELECT table_name FROM system_schema.tables WHERE keyspace_name = %s", address.keyspace)
    tables = {row[0] for row in rows}
    if "duetime_schema" not in tables:
        if foreign := sorted(tables.intersection(_TABLES)):
            raise _wrong(f"{address.label} has a table {foreign[0]} of another program; name a keyspace of its own")
        return 0
    rows = await link.execute(f"SELECT number FROM {_settings(address)} WHERE name = 'version'")
    version = int(rows[0][0]) if rows else 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{address.label} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return version


async def _make_keyspace(address: Address, link: Link) -> None:
    """With as many copies as the URL says; else three, or as many as there are nodes."""
    if await link.execute(
        "SELECT keyspace_name FROM system_schema.keyspaces WHERE keyspace_name = %s", address.keyspace
    ):
        return
    nodes = link.nodes()
    if address.datacenter is not None:
        nodes = {address.datacenter: nodes.get(address.datacenter, 0)}
    copies = {place: address.replication or max(1, min(REPLICAS, count)) for place, count in sorted(nodes.items())}
    replication = ", ".join(f"'{place}': {count}" for place, count in copies.items())
    await link.execute(
        f'CREATE KEYSPACE IF NOT EXISTS "{address.keyspace}"'
        f" WITH replication = {{'class': 'NetworkTopologyStrategy', {replication}}}"
    )
    log.info("%s: made the keyspace, with copies: %s", address.label, replication)


@contextlib.asynccontextmanager
async def _lock(address: Address, link: Link) -> AsyncIterator[None]:
    """One of all instances at a time. The lease ends by itself if its holder does."""
    settings, me = _settings(address), uuid.uuid4().hex
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + PATIENCE_SECONDS
    take = f"INSERT INTO {settings} (name, text) VALUES ('lock', %s) IF NOT EXISTS USING TTL {LEASE_SECONDS}"
    while not (await link.execute(take, me))[0][0]:
        if clock() > give_up_at:
            raise StoreUnavailable(f"cassandra: {address.label} is being migrated by another instance for too long")
        await asyncio.sleep(0.2)
    try:
        yield
    finally:
        await link.execute(f"DELETE FROM {settings} WHERE name = 'lock' IF text = %s", me)


def _agreed_by(address: Address) -> str:
    return f"{address.consistency} of {address.datacenter}" if "local" in address.consistency else address.consistency


async def _check_consistency(address: Address, link: Link) -> None:
    """Rounds agreed on by all datacenters and rounds agreed on by one do not see each other."""
    rows = await link.execute(f"SELECT text FROM {_settings(address)} WHERE name = 'consistency'")
    if rows and rows[0][0] != _agreed_by(address):
        raise _wrong(
            f"{address.label} was made with consistency={rows[0][0]}, and the URL says {_agreed_by(address)}:"
            " all instances have to use the same"
        )


async def _check_rights(address: Address, link: Link) -> None:
    """By writes whose conditions never hold."""
    keyspace = f'"{address.keyspace}"'
    for delete in (
        f"DELETE FROM {keyspace}.timers WHERE shard_id = -1 AND row_type = 1 AND timer_execute_at = 0"
        " AND timer_uuid_high = 0 AND timer_uuid_low = 0 AND row_order = 0x IF EXISTS",
        f"DELETE FROM {keyspace}.members WHERE instance_id = 'nobody' IF counter = -1",
        f"DELETE FROM {keyspace}.namespaces WHERE name = 'nowhere' IF revision = -1",
        f"DELETE FROM {_settings(address)} WHERE name = 'nothing' IF EXISTS",
    ):
        await link.execute(delete)


# --- for the doctor ------------------------------------------------------------------------------


def _dangers(settings: dict[str, dict[str, str]]) -> list[Danger]:
    """Of the settings of each node."""
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
    """What the cluster is, and which of its settings can lose acknowledged timers."""
    async with _linked(address) as link:
        [[version, name]] = await link.execute("SELECT release_version, cluster_name FROM system.local")
        nodes = ", ".join(f"{count} in {place}" for place, count in sorted(link.nodes().items()))
        said = [f"Cassandra {version}, cluster {name}", f"nodes: {nodes}", f"consistency is {address.consistency}"]
        rows = await link.execute(
            "SELECT replication FROM system_schema.keyspaces WHERE keyspace_name = %s", address.keyspace
        )
        said.append(f"copies: {_copies(rows[0][0]) if rows else 'the keyspace is not made yet'}")
        settings = await link.settings()
        said += _settings_said(settings)
        found = await _recognise(address, link)
        said.append(f"schema version {found or 'none yet'}, this Duetime knows {SCHEMA_VERSION}")
        return Diagnosis(said, _dangers(settings))


def _copies(replication: dict[str, Any]) -> str:
    return ", ".join(
        f"{count} ({place})" if place != "replication_factor" else str(count)
        for place, count in replication.items()
        if place != "class"
    )


def _settings_said(settings: dict[str, dict[str, str]]) -> list[str]:
    said = []
    for name in ("commitlog_sync", "paxos_variant", "max_mutation_size"):
        values = sorted({values[name] for values in settings.values() if values.get(name)})
        said.append(f"{name} is {' or '.join(values) if values else 'hidden from this user'}")
        if name == "paxos_variant" and values and values != ["v2"]:
            said.append("paxos_variant v2 takes writes that meet each other far better than v1: set it on all nodes")
    return said
