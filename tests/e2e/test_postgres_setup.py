"""PostgreSQL as it is found: missing, forbidden, foreign, old and new tables, TLS, and what a doctor says of it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from scripts.servers import Postgres

from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, open_store
from duetime.stores.postgres.schema import SCHEMA_VERSION
from duetime.stores.postgres.store import PostgresStore
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers, take
from servers import at_port, own


def database_of(url: str) -> str:
    return url.rpartition("/")[2]


async def ready(url: str) -> PostgresStore:
    store = PostgresStore.from_url(url)
    await store.migrate()
    await store.open()
    return store


async def test_many_instances_that_start_at_once_make_the_tables_once(database_url: str) -> None:
    stores = [open_store(database_url) for _ in range(8)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].ensure_shards(2)
    assert len(await stores[7].shards()) == 2
    await asyncio.gather(*(store.close() for store in stores))


async def test_two_schemas_of_one_database_share_nothing(database_url: str) -> None:
    stores = [await ready(f"{database_url}?schema={name}") for name in ("one", "two")]
    for store in stores:
        await store.ensure_shards(1)
    await stores[0].commit([Batch(await take(stores[0], 0), [make_timer()])])
    assert [len(await all_timers(store)) for store in stores] == [1, 0]
    for store in stores:
        await store.close()


async def test_a_database_without_tables_and_one_of_a_newer_version_are_not_opened(
    database_url: str, postgres_server: Postgres
) -> None:
    store = open_store(database_url)
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await store.open()
    await store.migrate()
    newer = f"INSERT INTO duetime_schema (version) VALUES ({SCHEMA_VERSION + 1})"
    postgres_server.query(newer, database_of(database_url))
    for act in (store.open, store.migrate):
        with pytest.raises(SchemaMismatch, match="a newer Duetime"):
            await act()


async def test_a_database_that_is_not_there_is_named(postgres_server: Postgres) -> None:
    with pytest.raises(SetupError, match="nowhere does not exist"):
        await open_store(postgres_server.url("nowhere")).migrate()


async def test_a_server_that_is_not_there_is_unavailable(database_url: str) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("postgresql://postgres@127.0.0.1:1/nowhere").open()


async def test_tables_of_another_program_are_left_alone(database_url: str, postgres_server: Postgres) -> None:
    postgres_server.query("CREATE TABLE timers (mine int)", database_of(database_url))
    with pytest.raises(SetupError, match=r"another program.*\?schema="):
        await open_store(database_url).migrate()
    assert postgres_server.query("SELECT count(*) FROM timers", database_of(database_url)) == "0"
    await (await ready(f"{database_url}?schema=own")).close()


async def test_an_encoding_that_cannot_hold_every_text_is_refused(postgres_server: Postgres) -> None:
    name = f"latin_{postgres_server.version}"
    postgres_server.query(f"DROP DATABASE IF EXISTS {name}")
    postgres_server.query(f"CREATE DATABASE {name} ENCODING 'LATIN1' LOCALE 'C' TEMPLATE template0")
    with pytest.raises(SetupError, match="encoding LATIN1"):
        await open_store(postgres_server.url(name)).migrate()


async def test_a_user_who_may_not_make_or_use_tables_is_told_what_to_grant(
    database_url: str, postgres_server: Postgres
) -> None:
    database = database_of(database_url)
    user = f"weak_{database[-30:]}"
    postgres_server.query(f"CREATE ROLE {user} LOGIN; REVOKE CREATE ON SCHEMA public FROM PUBLIC", database)
    weak = open_store(database_url.replace("//postgres@", f"//{user}@"))
    with pytest.raises(SetupError, match="GRANT USAGE, CREATE"):
        await weak.migrate()
    await open_store(database_url).migrate()
    postgres_server.query(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {user}", database)
    with pytest.raises(SetupError, match="INSERT in shards"):
        await weak.open()
    granted = f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {user}"
    postgres_server.query(granted, database)
    await weak.open()
    await weak.ensure_shards(1)
    await weak.close()
    postgres_server.query(f"ALTER ROLE {user} SET default_transaction_read_only = on")
    with pytest.raises(SetupError, match="read-only"):
        await weak.open()
    with pytest.raises(SetupError, match="rejects this user"):
        await open_store(database_url.replace("//postgres@", "//nobody_of_that_name@")).open()


async def test_settings_of_the_role_do_not_weaken_the_fences(database_url: str, postgres_server: Postgres) -> None:
    database = database_of(database_url)
    postgres_server.query(f"ALTER DATABASE {database} SET default_transaction_isolation = 'repeatable read'", database)
    store = await ready(database_url)
    [[isolation]] = await store._open.reads.read("SELECT current_setting('transaction_isolation')")
    assert isolation == "read committed"
    await store.close()


async def test_settings_that_endanger_the_promise_are_said_loudly(
    database_url: str, postgres_server: Postgres, caplog: pytest.LogCaptureFixture
) -> None:
    database = database_of(database_url)
    postgres_server.query(f"ALTER DATABASE {database} SET synchronous_commit = off", database)
    with caplog.at_level(logging.WARNING):
        store = await ready(database_url)
    await store.close()
    assert "synchronous_commit is off" in caplog.text
    diagnosis = await store.diagnose()
    assert f"PostgreSQL {postgres_server.version}" in diagnosis.facts[0]
    assert f"schema version {SCHEMA_VERSION}, this Duetime knows {SCHEMA_VERSION}" in diagnosis.facts
    assert "it is a primary" in diagnosis.facts
    assert any(str(danger).startswith("synchronous_commit is off: a crash") for danger in diagnosis.dangers)
    assert any("connections are free" in fact for fact in diagnosis.facts)


async def test_a_standby_is_refused() -> None:
    with own("postgres18") as server:
        standby = await asyncio.to_thread(server.standby)
        with pytest.raises(SetupError, match="read-only standby"):
            await open_store(standby.url("postgres")).migrate()
        assert any("standbys: " in said and "(async)" in said for said in await _facts(server))


async def _facts(server: Postgres) -> Sequence[str]:
    return (await PostgresStore.from_url(server.url("postgres")).diagnose()).facts


# --- passwords and TLS ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[Postgres]:
    """A server that speaks TLS, and wants it and a password from the role `guest`."""
    with own("postgres18") as server:
        for name in ("server.key", "server.pem"):
            target = server.data / name
            target.write_bytes((certificates / name).read_bytes())
            target.chmod(0o600)
            owner = server.data.stat()
            subprocess.run(["chown", f"{owner.st_uid}:{owner.st_gid}", str(target)], check=True)
        hba = server.data / "pg_hba.conf"
        hba.write_text("hostssl all guest all scram-sha-256\nhost all postgres all trust\n")
        server.query("ALTER SYSTEM SET ssl_cert_file = 'server.pem'")
        server.query("ALTER SYSTEM SET ssl_key_file = 'server.key'")
        server.query("ALTER SYSTEM SET ssl = on")
        server.query("CREATE ROLE guest LOGIN SUPERUSER PASSWORD 'p@ss:w/rd'")
        server.restart()
        yield server


def guest(server: Postgres, host: str, options: str, password: str = "p%40ss%3Aw%2Frd") -> str:
    return f"postgresql://guest:{password}@{host}:{server.port}/postgres?{options}"


async def test_a_server_with_the_right_certificate_and_name_is_trusted(guarded: Postgres, certificates: Path) -> None:
    store = await ready(guest(guarded, "localhost", f"sslmode=verify-full&sslrootcert={certificates}/ca.pem"))
    sql = "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()"
    assert [list(row) for row in await store._open.reads.read(sql)] == [[True]]
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
    guarded: Postgres, certificates: Path, host: str, mode: str, authority: str
) -> None:
    url = guest(guarded, host, f"sslmode={mode}&sslrootcert={certificates}/{authority}")
    with pytest.raises(SetupError, match="TLS"):
        await open_store(url).open()


async def test_a_server_without_tls_is_refused_where_it_is_required(postgres_server: Postgres) -> None:
    with pytest.raises(SetupError, match="TLS"):
        await open_store(f"{postgres_server.url('postgres')}?sslmode=require").open()


async def test_a_wrong_password_and_a_link_without_tls_are_told_apart(guarded: Postgres) -> None:
    with pytest.raises(SetupError, match="rejects the password"):
        await open_store(guest(guarded, "localhost", "sslmode=require", "wrong")).open()
    with pytest.raises(SetupError, match=r"pg_hba\.conf"):
        await open_store(guest(guarded, "localhost", "sslmode=disable")).open()


async def test_a_unix_socket_serves_as_well() -> None:
    folder = tempfile.gettempdir()  # as short as a socket's path must be, and open to the server's user
    with own("postgres18", settings={"unix_socket_directories": folder}) as server:
        store = await ready(f"postgresql://postgres@/postgres?host={folder}&port={server.port}")
        await store.ensure_shards(1)
        assert len(await store.shards()) == 1
        await store.close()


async def test_a_pooler_has_to_be_named_and_then_works_by_session_too(
    database_url: str, postgres_server: Postgres
) -> None:
    with own("pgbouncer", upstream_port=postgres_server.port, settings={"pool_mode": "session"}) as bouncer:
        url = at_port(database_url, bouncer.port)
        with pytest.raises(SetupError, match=r"\?pooler=transaction or \?pooler=session"):
            await open_store(url).migrate()
        store = open_store(f"{url}?pooler=session")
        await store.migrate()
        await store.open()
        await store.ensure_shards(2)
        assert len(await store.shards()) == 2
        await store.close()
