"""MySQL, MariaDB and TiDB as they are found: missing, forbidden, foreign, old and new tables, TLS, and what a doctor
says of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from on_mysql import on_all, on_innodb
from scripts.servers import MySqlLike

from duetime.errors import FailedOver, SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, Member, open_store
from duetime.stores.mysql import schema as mysql_schema
from duetime.stores.mysql.schema import SCHEMA_VERSION
from duetime.stores.mysql.store import MySqlStore, wipe
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from servers import fresh_database, own, require


@pytest.fixture
def server(server_name: str) -> MySqlLike:
    found = require(server_name)
    assert isinstance(found, MySqlLike)
    return found


@pytest.fixture
def url(server: MySqlLike) -> str:
    return fresh_database(server)


def database_of(url: str) -> str:
    return url.rpartition("/")[2]


async def ready(url: str) -> MySqlStore:
    store = MySqlStore.from_url(url)
    await store.migrate()
    await store.open()
    return store


@contextlib.contextmanager
def globally(server: MySqlLike, **settings: str) -> Iterator[None]:
    """For new sessions, until it is over."""
    before = {name: server.query(f"SELECT @@GLOBAL.{name}") for name in settings}
    for name, value in settings.items():
        server.query(f"SET GLOBAL {name} = {value}")
    try:
        yield
    finally:
        for name, old in before.items():
            server.query(f"SET GLOBAL {name} = {old if old.isdigit() else repr(old)}")


# --- tables --------------------------------------------------------------------------------------


@on_all
async def test_many_instances_that_start_at_once_make_the_tables_once(url: str) -> None:
    stores = [open_store(url) for _ in range(8)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await asyncio.gather(*(store.open() for store in stores))
    await stores[0].ensure_shards(2)
    assert len(await stores[7].shards()) == 2
    await asyncio.gather(*(store.close() for store in stores))


@on_all
async def test_a_migration_that_was_interrupted_is_finished_by_the_next(url: str, server: MySqlLike) -> None:
    await open_store(url).migrate()
    server.query("DROP VIEW timer_schedules", database_of(url))
    server.query("DROP TABLE members", database_of(url))
    server.query("DELETE FROM duetime_schema", database_of(url))
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await open_store(url).open()
    store = await ready(url)
    await store.join(Member("a", "host:1", 0, True, 17))
    await store.close()
    assert server.query("SELECT MAX(version) FROM duetime_schema", database_of(url)) == str(SCHEMA_VERSION)


@on_all
async def test_a_database_without_tables_and_one_of_a_newer_version_are_not_opened(url: str, server: MySqlLike) -> None:
    store = open_store(url)
    with pytest.raises(SchemaMismatch, match="no tables yet"):
        await store.open()
    await store.migrate()
    server.query(f"INSERT INTO duetime_schema VALUES ({SCHEMA_VERSION + 1}, NOW(3))", database_of(url))
    for act in (store.open, store.migrate):
        with pytest.raises(SchemaMismatch, match="a newer Duetime"):
            await act()


@on_all
async def test_tables_of_another_program_are_left_alone(url: str, server: MySqlLike) -> None:
    server.query("CREATE TABLE timers (mine INT)", database_of(url))
    with pytest.raises(SetupError, match="table timers of another program"):
        await open_store(url).migrate()
    assert server.query("SHOW TABLES", database_of(url)) == "timers"


@on_all
async def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mysql_schema, "OLDEST_SERVERS", dict.fromkeys(mysql_schema.OLDEST_SERVERS, (99, 1)))
    with pytest.raises(SetupError, match=r"is (MySQL|MariaDB|TiDB) .*; 99\.1 or later is needed"):
        await open_store(url).migrate()


@on_all
async def test_wiping_leaves_tables_without_rows(url: str) -> None:
    store = await ready(url)
    await store.ensure_shards(1)
    await store.commit([Batch(await take(store, 0), [make_timer()], (), [make_reached(make_timer())])])
    await wipe(url)
    assert await store.shards() == []
    assert (await all_timers(store), await all_reached(store)) == ([], [])
    await store.close()


@on_all
async def test_the_view_shows_each_timer_once_as_it_stands_or_as_it_last_ended(url: str, server: MySqlLike) -> None:
    store = await ready(url)
    await store.ensure_shards(1)
    waiting, over = make_timer("waits ü", 0), make_timer("over", 1_000)
    ends = [make_reached(timer, reached_at_ms=at_ms) for timer in (waiting, over) for at_ms in (1_000, 2_001)]
    ends[2] = make_reached(make_timer("over", 1_000, generation=0), reached_at_ms=9_000)
    await store.commit([Batch(await take(store, 0), [waiting], (), ends)])
    await store.close()
    shown = server.query(
        "SELECT service_call_id, due_at, reached_at, state FROM timer_schedules ORDER BY due_at", database_of(url)
    )
    assert shown.splitlines() == [
        "waits ü\t1970-01-01 00:00:00.000\tNULL\tScheduled",
        "over\t1970-01-01 00:00:01.000\t1970-01-01 00:00:02.001\tReached",
    ]


# --- who and what is let in ----------------------------------------------------------------------


@on_all
async def test_what_is_not_there_is_named(server: MySqlLike) -> None:
    with pytest.raises(SetupError, match=r"nowhere does not exist; create it with CREATE DATABASE"):
        await open_store(server.url("nowhere")).migrate()
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("mysql://root@127.0.0.1:1/nowhere").open()


@on_all
async def test_a_user_who_may_not_make_or_use_tables_is_told_what_to_grant(url: str, server: MySqlLike) -> None:
    database, user = database_of(url), f"weak_{database_of(url)[-20:]}"
    server.query(f"CREATE USER '{user}'@'127.0.0.1' IDENTIFIED BY 'p@ss:w/rd'")
    weak_url = url.replace("//root@", f"//{user}:p%40ss%3Aw%2Frd@")
    with pytest.raises(SetupError, match="rejects the user or the password"):
        await open_store(url.replace("//root@", f"//{user}:wrong@")).migrate()
    with pytest.raises(SetupError, match="GRANT ALL ON"):
        await open_store(weak_url).migrate()
    await open_store(url).migrate()
    server.query(f"GRANT SELECT ON {database}.* TO '{user}'@'127.0.0.1'")
    with pytest.raises(SetupError, match=r"GRANT SELECT, INSERT.*(?i:INSERT command denied|UPDATE command denied)"):
        await open_store(weak_url).open()
    server.query(f"GRANT INSERT, UPDATE, DELETE ON {database}.* TO '{user}'@'127.0.0.1'")
    weak = open_store(weak_url)
    await weak.open()
    await weak.ensure_shards(1)
    await weak.close()


@on_innodb
async def test_a_server_that_is_read_only_is_refused_even_to_a_user_who_might_write(
    url: str, server: MySqlLike
) -> None:
    await open_store(url).migrate()
    with globally(server, read_only="1"), pytest.raises(SetupError, match="is read-only"):
        await open_store(url).open()


@on_innodb
async def test_packets_that_are_too_small_are_refused(url: str, server: MySqlLike) -> None:
    with globally(server, max_allowed_packet="4194304"), pytest.raises(SetupError, match="max_allowed_packet of 419"):
        await open_store(url).migrate()


@on_innodb
async def test_settings_of_the_server_weaken_neither_fences_nor_quotes(url: str, server: MySqlLike) -> None:
    isolation = "tx_isolation" if server.name == "mariadb" else "transaction_isolation"
    strange = {isolation: "'SERIALIZABLE'", "sql_mode": "'ANSI_QUOTES,NO_BACKSLASH_ESCAPES'", "time_zone": "'+05:00'"}
    with globally(server, **strange):
        store = await ready(url)
        [[[found]]] = await store._open.reads.read((f"SELECT @@{isolation}",))
        assert found == "READ-COMMITTED"
        await store.ensure_shards(1)
        timers = [make_timer(f"a{mark}", payload=f'"{mark}') for mark in ("'", '"', "\\", "\\'", "\0", "%s", ";--")]
        await store.commit([Batch(await take(store, 0), timers)])
        assert sorted(await all_timers(store), key=lambda timer: timer.timer_id) == sorted(
            timers, key=lambda timer: timer.timer_id
        )
        await store.close()


@on_innodb
async def test_settings_that_endanger_the_promise_are_said_loudly(
    url: str, server: MySqlLike, caplog: pytest.LogCaptureFixture
) -> None:
    with globally(server, innodb_flush_log_at_trx_commit="2"), caplog.at_level(logging.WARNING):
        store = await ready(url)
        diagnosis = await store.diagnose()
    await store.close()
    assert "innodb_flush_log_at_trx_commit is 2" in caplog.text
    assert any(danger.problem.startswith("innodb_flush_log_at_trx_commit is 2") for danger in diagnosis.dangers)
    assert not (await store.diagnose()).dangers


async def test_a_binary_log_has_to_be_by_rows_and_flushed(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"log_bin": "", "binlog_format": "STATEMENT", "sync_binlog": "0"}
    with own("mariadb", settings=settings) as server, caplog.at_level(logging.WARNING):
        assert isinstance(server, MySqlLike)
        with pytest.raises(SetupError, match="binlog_format"):
            await ready(server.url())
        server.query("SET GLOBAL binlog_format = 'ROW'")
        await (await ready(server.url())).close()
        assert "sync_binlog is 0" in caplog.text


@on_all
async def test_a_doctor_hears_what_the_server_is(url: str, server: MySqlLike) -> None:
    diagnosis = await MySqlStore.from_url(url).diagnose()
    kind = {"mariadb": "MariaDB 1", "mysql": "MySQL ", "tidb": "TiDB "}[server.name]
    assert diagnosis.facts[0].startswith(kind)
    assert f"schema version none yet, this Duetime knows {SCHEMA_VERSION}" in diagnosis.facts
    assert not diagnosis.dangers


@on_all
async def test_the_largest_payload_fits_even_if_all_of_it_has_to_be_escaped(url: str) -> None:
    store = await ready(url)
    await store.ensure_shards(1)
    payload = '"' * store.capabilities.payload_bytes_max
    timers = [make_timer(f"n-{n}", 1_000 + n, payload=payload) for n in range(3)]
    await store.commit([Batch(await take(store, 0), timers, (), [make_reached(timer) for timer in timers])])
    assert await all_timers(store) == timers
    await store.close()


# --- TLS and other ways --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(server_name: str, certificates: Path) -> Iterator[MySqlLike]:
    """A server that speaks TLS, and wants it and a password from the user `guest`."""
    settings = {"ssl_ca": "ca.pem", "ssl_cert": "server.pem", "ssl_key": "server.key"}
    with own(server_name, settings={name: str(certificates / file) for name, file in settings.items()}) as server:
        assert isinstance(server, MySqlLike)
        server.query("CREATE USER guest@'127.0.0.1' IDENTIFIED BY 'p@ss:w/rd' REQUIRE SSL")
        server.query("GRANT ALL ON *.* TO guest@'127.0.0.1'")
        yield server


def guest(server: MySqlLike, options: str, host: str = "localhost", password: str = "p%40ss%3Aw%2Frd") -> str:
    return f"mysql://guest:{password}@{host}:{server.port}/test?{options}"


def on_guarded(name: str) -> Any:
    return pytest.mark.parametrize("server_name", [name], scope="module")


class Tls:
    async def test_a_server_with_the_right_certificate_and_name_is_trusted(
        self, guarded: MySqlLike, certificates: Path
    ) -> None:
        store = await ready(guest(guarded, f"ssl-mode=VERIFY_IDENTITY&ssl-ca={certificates}/ca.pem"))
        [[[_, cipher]]] = await store._open.reads.read(("SHOW STATUS LIKE 'Ssl_cipher'",))
        assert cipher
        await store.close()

    async def test_a_server_with_another_name_or_an_unknown_authority_is_not(
        self, guarded: MySqlLike, certificates: Path
    ) -> None:
        for host, mode, authority in (
            ("127.0.0.1", "verify_identity", "ca.pem"),
            ("localhost", "verify_identity", "other.pem"),
            ("localhost", "verify_ca", "other.pem"),
        ):
            url = guest(guarded, f"ssl-mode={mode}&ssl-ca={certificates}/{authority}", host)
            with pytest.raises(SetupError, match="TLS"):
                await open_store(url).open()

    async def test_tls_is_used_where_it_can_be_had_and_a_password_is_checked(self, guarded: MySqlLike) -> None:
        store = await ready(guest(guarded, "ssl-mode=preferred"))
        [[[_, cipher]]] = await store._open.reads.read(("SHOW STATUS LIKE 'Ssl_cipher'",))
        assert cipher
        await store.close()
        for options, password in (("ssl-mode=required", "wrong"), ("ssl-mode=disabled", "p%40ss%3Aw%2Frd")):
            with pytest.raises(SetupError, match="rejects the user or the password"):
                await open_store(guest(guarded, options, password=password)).open()

    async def test_files_that_are_not_there_are_named(self, guarded: MySqlLike) -> None:
        with pytest.raises(SetupError, match="TLS files"):
            await open_store(guest(guarded, "ssl-mode=verify_ca&ssl-ca=/nowhere.pem")).open()


@on_guarded("mariadb")
class TestTlsOfMariaDb(Tls):
    pass


@on_guarded("mysql")
class TestTlsOfMySql(Tls):
    pass


@pytest.mark.parametrize("server_name", ["mariadb"])
async def test_a_server_without_tls_is_refused_where_it_is_required(url: str) -> None:
    with pytest.raises(SetupError, match="does not support TLS"):
        await open_store(f"{url}?ssl-mode=required").open()
    await (await ready(f"{url}?ssl-mode=preferred")).close()


@pytest.mark.parametrize("server_name", ["mariadb"])
async def test_a_unix_socket_serves_as_well(server: MySqlLike, url: str) -> None:
    path = server.query("SELECT CONCAT(@@datadir, @@socket)")
    store = await ready(f"mysql://root@/{database_of(url)}?socket={path}")
    await store.ensure_shards(1)
    assert len(await store.shards()) == 1
    await store.close()


# --- another server ------------------------------------------------------------------------------


async def test_a_beat_on_another_server_than_the_one_joined_under_is_a_failover() -> None:
    with own("mysql") as server:
        assert isinstance(server, MySqlLike)
        store = await ready(server.url())
        member = Member("a", "host:1", 0, True, 17)
        await store.join(member)
        assert await store.heartbeat("a", 1) > 1_600_000_000_000
        await asyncio.to_thread(server.restart)
        await _beaten(store, 2)  # it is the same one still
        await asyncio.to_thread(server.halt)
        (server.data / "auto.cnf").unlink()  # where it has its uuid
        await asyncio.to_thread(server.start)
        with pytest.raises(FailedOver, match="failed over"):
            await _beaten(store, 3)
        await store.join(Member("b", "host:1", 0, True, 17))
        await store.heartbeat("b", 1)
        await store.close()


async def _beaten(store: MySqlStore, counter: int) -> None:
    """A connection that broke is noticed at its next use, perhaps."""
    with contextlib.suppress(StoreUnavailable):
        await store.heartbeat("a", counter)
        return
    await store.heartbeat("a", counter)


async def test_two_servers_of_mariadb_are_told_apart() -> None:
    with own("mariadb") as other:
        stores = [await ready(fresh_database(server)) for server in (require("mariadb"), other)]
        found = [(await store._open.reads.read((f"SELECT {store._history_sql}",)))[0][0][0] for store in stores]
        await asyncio.gather(*(store.close() for store in stores))
    assert found[0]
    assert found[0] != found[1]
