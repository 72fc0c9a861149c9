"""Cassandra as it is found: missing, forbidden, foreign, old and new tables, TLS, and what a doctor says of it."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from scripts.servers import Cassandra

from duetime.domain.timer import Namespace
from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, Member, open_store
from duetime.stores.cassandra import schema as cassandra_schema
from duetime.stores.cassandra.address import address_of
from duetime.stores.cassandra.connection import Connection
from duetime.stores.cassandra.schema import SCHEMA_VERSION
from duetime.stores.cassandra.store import CassandraStore, wipe
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from servers import fresh_database, own, require


@pytest.fixture(scope="module")
def server() -> Cassandra:
    found = require("cassandra")
    assert isinstance(found, Cassandra)
    return found


@pytest.fixture
def url(server: Cassandra) -> str:
    return fresh_database(server)


def keyspace_of(url: str) -> str:
    return url.rpartition("/")[2]


def beside(url: str, name: str) -> str:
    """A keyspace that nobody has made."""
    return f"{url[: -len(name) - 1]}_{name}"


async def ready(url: str) -> CassandraStore:
    store = CassandraStore.from_url(url)
    await store.migrate()
    await store.open()
    return store


async def test_many_instances_that_start_at_once_make_keyspace_and_tables_once(server: Cassandra, url: str) -> None:
    missing = beside(url, "not_made_yet")
    stores = [open_store(missing) for _ in range(8)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].ensure_shards(2)
    assert len(await stores[7].shards()) == 2
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_table_that_is_listed_before_it_can_be_used_is_waited_for(server: Cassandra, url: str) -> None:
    """A node lists a new table in system_schema some milliseconds before statements can use it."""

    class ListsEarly:
        """A connection to a node where another instance is creating the table, slowly."""

        def __init__(self, connection: Connection) -> None:
            self._connection = connection
            self.creating: asyncio.Task[object] | None = None

        async def execute(self, text: str, *values: object) -> list[Any]:
            if "system_schema.tables" in text:
                self.creating = asyncio.create_task(self._create())
                return [("duetime_schema",)]
            return await self._connection.execute(text, *values)

        async def _create(self) -> None:
            await asyncio.sleep(0.2)
            await self._connection.execute(
                f"CREATE TABLE {keyspace_of(url)}.duetime_schema (name text PRIMARY KEY, number bigint, text text)"
            )

    async with cassandra_schema._connected(address_of(url)) as connection:
        node = ListsEarly(connection)
        assert await cassandra_schema._recognise(address_of(url), cast(Connection, node)) == 0
        assert node.creating is not None
        await node.creating
    await (await ready(url)).close()


async def test_instances_in_processes_of_their_own_start_at_once_on_a_new_keyspace(server: Cassandra, url: str) -> None:
    """One after the other in one process they are too well behaved to meet each other's half-made tables."""
    program = (
        "import asyncio, sys\nfrom duetime.store import open_store\nstore = open_store(sys.argv[1])\n"
        "sys.stdin.readline()\nasyncio.run(store.migrate())\n"
    )
    new = beside(url, "by_processes")
    starting = [
        await asyncio.create_subprocess_exec(sys.executable, "-c", program, new, stdin=PIPE, stderr=PIPE)
        for _ in range(4)
    ]
    ended = await asyncio.gather(*(process.communicate(b"now\n") for process in starting))
    said = [error.decode() for _, error in ended]
    assert [process.returncode for process in starting] == [0] * 4, said
    await (await ready(new)).close()


async def test_shards_that_two_instances_make_at_once_are_all_there(url: str) -> None:
    stores = [await ready(url) for _ in range(2)]
    await asyncio.gather(*(store.ensure_shards(count) for store, count in zip(stores, (9, 5), strict=True)))
    assert [row.shard_id for row in await stores[1].shards()] == list(range(9))
    for store in stores:
        await store.close()


async def test_a_keyspace_without_tables_and_one_of_a_newer_version_are_not_opened(server: Cassandra, url: str) -> None:
    store = open_store(url)
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await store.open()
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await open_store(beside(url, "missing")).open()
    await store.migrate()
    newer = f"UPDATE {keyspace_of(url)}.duetime_schema SET number = {SCHEMA_VERSION + 1} WHERE name = 'version'"
    server.execute(f"{newer} IF EXISTS")
    for act in (store.open, store.migrate):
        with pytest.raises(SchemaMismatch, match="a newer Duetime"):
            await act()


async def test_a_migration_that_was_broken_off_is_finished_when_its_lease_has_ended(
    server: Cassandra, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tables are there, the version is not, and the lock is held by somebody who died."""
    monkeypatch.setattr(cassandra_schema, "LEASE_SECONDS", 1)
    async with cassandra_schema._connected(address_of(url)) as connection:
        make = f"CREATE TABLE {keyspace_of(url)}.duetime_schema (name text PRIMARY KEY, number bigint, text text)"
        await connection.execute(make)
        first = cassandra_schema._statements(address_of(url), 1)[0]
        await connection.execute(first)
        lock = cassandra_schema._lock(address_of(url), connection)
        await lock.__aenter__()
        store = await ready(url)
        await store.ensure_shards(1)
        assert len(await store.shards()) == 1
        await store.close()
        await lock.__aexit__(None, None, None)


async def test_wiping_leaves_nothing_and_what_is_written_afterwards_stays(url: str) -> None:
    store = await ready(url)
    for _ in range(3):
        await store.ensure_shards(4)
        fence = await take(store, 3)
        await store.commit([Batch(fence, [make_timer()], (), [make_reached(make_timer("over"))])])
        await store.join(Member("a", "host:1", 0, True, 1))
        await store.put_namespace(Namespace(name="n", num_shards=4, created_at_ms=1), None)
        assert len(await all_timers(store, 3)) == len(await all_reached(store)) == 1
        await wipe(url)
        assert (await store.shards(), await store.members(), await store.namespaces()) == ([], [], [])
        assert await all_timers(store, 3) == []
    await store.close()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("cassandra://127.0.0.1:1/nowhere").open()
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("cassandra://nowhere.invalid/nowhere").migrate()


async def test_tables_of_another_program_are_left_alone(server: Cassandra, url: str) -> None:
    server.execute(f"CREATE TABLE {keyspace_of(url)}.timers (mine int PRIMARY KEY)")
    with pytest.raises(SetupError, match="another program"):
        await open_store(url).migrate()


async def test_a_datacenter_that_is_not_there_is_told(server: Cassandra, url: str) -> None:
    with pytest.raises(SetupError, match="datacenter=nowhere, which does not exist; the cluster has datacenter1"):
        await open_store(f"{beside(url, 'elsewhere')}?datacenter=nowhere&replication=3").migrate()


async def test_all_instances_have_to_use_one_consistency(url: str) -> None:
    await (await ready(url)).close()
    with pytest.raises(SetupError, match="created with consistency=quorum"):
        await open_store(f"{url}?consistency=local_quorum&datacenter=datacenter1").open()


async def test_local_quorums_serve_as_well(url: str) -> None:
    store = await ready(f"{url}?consistency=local_quorum&datacenter=datacenter1")
    await store.ensure_shards(1)
    await store.commit([Batch(await take(store, 0), [make_timer()])])
    assert await all_timers(store) == [make_timer()]
    await store.close()


async def test_a_doctor_says_what_the_cluster_is(server: Cassandra, url: str) -> None:
    store = CassandraStore.from_url(url)
    assert f"schema version none yet, this Duetime knows {SCHEMA_VERSION}" in (await store.diagnose()).facts
    await store.migrate()
    diagnosis = await store.diagnose()
    assert diagnosis.facts[0].startswith("Cassandra 5.0")
    assert "nodes: 1 in datacenter1" in diagnosis.facts
    assert "commitlog_sync is batch" in diagnosis.facts
    assert "paxos_variant is v2" in diagnosis.facts
    assert "copies: 1" in diagnosis.facts
    assert f"schema version {SCHEMA_VERSION}, this Duetime knows {SCHEMA_VERSION}" in diagnosis.facts
    assert not diagnosis.dangers


# --- passwords, rights, TLS, dangerous settings --------------------------------------------------


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[Cassandra]:
    """A server that wants a password, grants rights, speaks TLS; and does not keep its word."""
    keys = certificates / "server.p12"
    tls = f"{{enabled: true, optional: true, keystore: {keys}, keystore_password: secret, store_type: PKCS12}}"
    settings = {
        "authenticator": "PasswordAuthenticator",
        "authorizer": "CassandraAuthorizer",
        "client_encryption_options": tls,
        "permissions_validity": "0ms",  # a grant holds at once
        "commitlog_sync": "periodic",
        "commitlog_sync_period": "10000ms",
        "paxos_variant": "v1",
    }
    with own("cassandra", settings=settings) as server:
        assert isinstance(server, Cassandra)
        server.execute("CREATE ROLE guest WITH PASSWORD = 'p@ss:w/rd' AND LOGIN = true")
        yield server


def url_of(server: Cassandra, keyspace: str, login: str, options: str = "", host: str = "127.0.0.1") -> str:
    return f"cassandra://{login}@{host}:{server.port}/{keyspace}{options}"


GUEST = "guest:p%40ss%3Aw%2Frd"
SUPERUSER = "cassandra:cassandra"


async def test_a_wrong_password_and_none_at_all_are_told(guarded: Cassandra) -> None:
    with pytest.raises(SetupError, match="refuses the user or the password") as wrong:
        await open_store(url_of(guarded, "some", "guest:wrong-word")).migrate()
    assert "wrong-word" not in str(wrong.value)
    with pytest.raises(SetupError, match="needs a user and a password"):
        await open_store(f"cassandra://127.0.0.1:{guarded.port}/some").migrate()


async def test_a_user_who_may_not_make_or_use_tables_is_told_what_to_grant(guarded: Cassandra) -> None:
    weak = open_store(url_of(guarded, "granted", GUEST))
    with pytest.raises(SetupError, match="GRANT CREATE ON ALL KEYSPACES"):
        await weak.migrate()
    guarded.make_database("granted")
    with pytest.raises(SetupError, match="GRANT CREATE, ALTER, SELECT, MODIFY"):
        await weak.migrate()
    await open_store(url_of(guarded, "granted", SUPERUSER)).migrate()
    guarded.execute("GRANT SELECT ON KEYSPACE granted TO guest")
    with pytest.raises(SetupError, match="GRANT"):
        await weak.open()
    guarded.execute("GRANT MODIFY ON KEYSPACE granted TO guest")
    await weak.open()
    await weak.ensure_shards(1)
    assert len(await weak.shards()) == 1
    await weak.close()


async def test_settings_that_endanger_the_promise_are_said_loudly(
    guarded: Cassandra, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        store = await ready(url_of(guarded, "loud", SUPERUSER))
    await store.close()
    assert "commitlog_sync is periodic" in caplog.text
    diagnosis = await store.diagnose()
    assert any(danger.problem.startswith("commitlog_sync is periodic on 127.0.0.1") for danger in diagnosis.dangers)
    assert any(fact.startswith("paxos_variant v2 handles") for fact in diagnosis.facts)


async def test_a_server_with_the_right_certificate_and_name_is_trusted(guarded: Cassandra, certificates: Path) -> None:
    tls = f"?sslmode=verify-full&sslrootcert={certificates}/ca.pem"
    store = await ready(url_of(guarded, "trusted", SUPERUSER, tls, host="localhost"))
    await store.ensure_shards(1)
    payload = '"' + "x" * 300_000 + '"'  # many records of TLS in one answer
    await store.commit([Batch(await take(store, 0), [make_timer(payload=payload)])])
    assert await all_timers(store) == [make_timer(payload=payload)]
    await store.close()


@pytest.mark.parametrize(
    ("host", "mode", "authority"),
    [
        ("127.0.0.1", "verify-full", "ca.pem"),
        ("localhost", "verify-full", "other.pem"),
        ("localhost", "verify-ca", "other.pem"),
    ],
)
async def test_a_server_with_another_name_or_an_unknown_authority_is_not(
    guarded: Cassandra, certificates: Path, host: str, mode: str, authority: str
) -> None:
    tls = f"?sslmode={mode}&sslrootcert={certificates}/{authority}"
    with pytest.raises(SetupError, match="TLS"):
        await open_store(url_of(guarded, "some", SUPERUSER, tls, host)).open()


async def test_a_server_without_tls_is_refused_where_it_is_required(server: Cassandra) -> None:
    with pytest.raises(SetupError, match="TLS"):
        await open_store(f"{server.url('some')}?sslmode=require").open()
