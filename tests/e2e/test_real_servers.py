"""The servers that tests run on (scripts/servers): each is durable, private, and survives being killed.

What all of them have in common is tested without a database in tests/unit/scripts/test_servers_script.py.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from scripts.servers import Cassandra, MongoDb, MySqlLike, Postgres, ServerError, TiDb

from duetime.store import open_store
from servers import at_port, fresh_database, own, postgres, require

ROOT = Path(__file__).parents[2]


def until(condition: Callable[[], bool], what: str, within_seconds: float = 20) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- PostgreSQL ----------------------------------------------------------------------------------


@pytest.fixture(params=["postgres15", "postgres18"])
def mine(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    with own(request.param) as server:
        assert isinstance(server, Postgres)
        yield server


def test_postgres_is_durable_private_and_of_the_version_asked_for(postgres_server: Postgres) -> None:
    assert int(postgres_server.query("SHOW server_version_num")) // 10_000 == postgres_server.version
    assert postgres_server.query("SHOW fsync") == "on"
    assert postgres_server.query("SHOW max_connections") == "200"
    assert postgres_server.query("SHOW listen_addresses") == "127.0.0.1"
    assert Path(postgres_server.program("pgbench")).is_file()


def test_every_database_is_fresh(postgres_server: Postgres) -> None:
    first, second = fresh_database(postgres_server), fresh_database(postgres_server)
    assert first != second
    for url in (first, second):
        assert url.startswith(f"postgresql://postgres@127.0.0.1:{postgres_server.port}/duetime_test_")
        assert postgres_server.query("SELECT count(*) FROM pg_stat_user_tables", url.rpartition("/")[2]) == "0"


def test_postgres_keeps_what_was_committed_when_it_is_killed(mine: Postgres) -> None:
    mine.query("CREATE TABLE kept (number int)")
    for count in (1, 2, 3):
        mine.query("INSERT INTO kept VALUES (1)")
        mine.kill()
        mine.start()
        assert mine.query("SELECT count(*) FROM kept") == str(count)
    mine.restart()
    assert mine.query("SELECT count(*) FROM kept") == "3"


def test_a_standby_follows_and_takes_over(mine: Postgres) -> None:
    mine.query("CREATE TABLE kept (number int)")
    standby = mine.standby()
    mine.query("INSERT INTO kept VALUES (1)")
    standby.wait_until_caught_up()
    assert standby.query("SELECT count(*) FROM kept") == "1"
    with pytest.raises(ServerError, match="read-only"):
        standby.query("INSERT INTO kept VALUES (2)")
    mine.kill()
    standby.promote()
    standby.query("INSERT INTO kept VALUES (2)")
    assert standby.query("SELECT count(*) FROM kept") == "2"


def test_a_synchronous_standby_has_every_acknowledged_commit(mine: Postgres) -> None:
    mine.query("CREATE TABLE kept (number int)")
    standby = mine.standby(synchronous=True)
    standby.kill()
    writer = threading.Thread(target=mine.query, args=["INSERT INTO kept VALUES (1)"])
    writer.start()
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
    until(lambda: mine.query(waiting) == "1", "the commit waits for the standby")
    standby.start()
    writer.join(20)
    assert not writer.is_alive()
    mine.kill()
    standby.promote()
    assert standby.query("SELECT count(*) FROM kept") == "1"


def test_a_standby_stops_with_its_primary() -> None:
    with own("postgres18") as primary:
        standby = primary.standby()
        pid = standby.pid
    assert not is_alive(pid)


# --- MariaDB, MySQL, TiDB ------------------------------------------------------------------------

if_tidb_is_built = pytest.mark.skipif(
    not TiDb.is_built(), reason="TiDB is not built yet: `python -m scripts.servers up tidb` takes a quarter of an hour"
)
MYSQLS = ["mariadb", "mysql", pytest.param("tidb", marks=if_tidb_is_built)]


@pytest.fixture(params=MYSQLS)
def my_mysql(request: pytest.FixtureRequest) -> Iterator[MySqlLike]:
    with own(request.param) as server:
        assert isinstance(server, MySqlLike)
        yield server


@pytest.mark.parametrize("name", MYSQLS)
def test_every_database_of_a_mysql_is_fresh_private_and_speaks_utf8(name: str) -> None:
    server = require(name)
    assert isinstance(server, MySqlLike)
    first, second = fresh_database(server), fresh_database(server)
    assert first != second
    for url in (first, second):
        assert url.startswith(f"mysql://root@127.0.0.1:{server.port}/duetime_test_")
        assert server.query("SHOW TABLES", url.rpartition("/")[2]) == ""
    assert server.query("SELECT @@character_set_server, current_user()").startswith("utf8mb4\troot@")
    assert server.query("SELECT 'zwölf 🙂', length('🙂')") == "zwölf 🙂\t4"


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
def test_a_mysql_flushes_every_commit_and_takes_settings(name: str) -> None:
    with own(name, settings={"max_connections": "17"}) as server:
        assert isinstance(server, MySqlLike)
        asked = "SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@bind_address, @@max_connections"
        assert server.query(asked) == "1\t0\t127.0.0.1\t17"


@if_tidb_is_built
def test_tidb_commits_by_one_write_and_takes_settings() -> None:
    with own("tidb", settings={"tidb_txn_mode": "optimistic", "log.level": "error"}) as server:
        assert isinstance(server, TiDb)
        for _ in range(2):
            asked = "SELECT @@global.tidb_txn_commit_batch_size, @@global.tidb_enable_async_commit, @@tidb_txn_mode"
            assert server.query(asked) == "67108864\t0\toptimistic"
            configuration = server.query("SELECT @@tidb_config")
            assert '"split-table": false' in configuration
            assert '"level": "error"' in configuration
            server.restart()


def test_a_mysql_keeps_what_was_committed_when_it_is_killed(my_mysql: MySqlLike) -> None:
    my_mysql.query("CREATE TABLE kept (number int)")
    for count in (1, 2, 3):
        my_mysql.query("INSERT INTO kept VALUES (1)")
        my_mysql.kill()
        my_mysql.start()
        assert my_mysql.query("SELECT count(*) FROM kept") == str(count)
    my_mysql.restart()
    assert my_mysql.query("SELECT count(*) FROM kept") == "3"


def test_a_mysql_says_what_is_wrong_with_a_statement() -> None:
    server = require("mariadb")
    assert isinstance(server, MySqlLike)
    with pytest.raises(ServerError, match="Unknown column 'nonsense'"):
        server.query("SELECT nonsense")


# --- what stands between -------------------------------------------------------------------------


def psql(server: Postgres, url: str, sql: str) -> str:
    return server.run([server.program("psql"), "-Atqc", sql, url]).strip()


def test_pgbouncer_pools_by_transaction() -> None:
    server = postgres(15)
    url = fresh_database(server)
    with own("pgbouncer", upstream_port=server.port, settings={"default_pool_size": "1"}) as bouncer:
        # With one connection for all, the second session is served only because the first holds none between its
        # transactions.
        talk = [server.program("psql"), "-XAtq", at_port(url, bouncer.port)]
        with subprocess.Popen(talk, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
            assert first.stdin is not None
            assert first.stdout is not None
            first.stdin.write(b"SELECT pg_backend_pid();\n")
            first.stdin.flush()
            backend = first.stdout.readline().decode().strip()
            assert psql(server, at_port(url, bouncer.port), "SELECT pg_backend_pid()") == backend
            first.stdin.close()
        assert "|transaction" in psql(server, bouncer.url("pgbouncer"), "SHOW POOLS")


def test_toxiproxy_slows_cuts_and_mends_a_link() -> None:
    server, proxy = postgres(18), require("toxiproxy")
    link = proxy.link(server.port)
    url = at_port(fresh_database(server), link.port)
    assert psql(server, url, "SELECT 1") == "1"
    slow = link.add("latency", latency=300)
    started = time.monotonic()
    psql(server, url, "SELECT 1")
    assert time.monotonic() - started > 0.3
    link.remove(slow)
    link.cut()
    with pytest.raises(ServerError, match="Connection refused"):
        psql(server, url, "SELECT 1")
    link.mend()
    assert psql(server, url, "SELECT 1") == "1"
    link.close()


# --- from a shell --------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> tuple[int, str]:
    return command_in(ROOT, *arguments, **environment)


def command_in(checkout: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "CI"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout.decode()


@pytest.mark.parametrize("broker", ["nats", "kafka"])
async def test_a_broker_goes_on_with_a_folder_that_another_program_filled(broker: str) -> None:
    """As `up --folder` does after a `down`: nothing but the folder is known of the first one, not even its ports."""
    await asyncio.to_thread(require, broker)  # skips this test where it cannot be had
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        for is_first in (True, False):
            with own(broker, folder=Path(folder) / broker) as server:
                names = await (_streams if broker == "nats" else _topics)(server.url(), is_first)
                assert names == ["kept"]


async def _streams(url: str, is_first: bool) -> list[str]:
    client = await nats.connect(url)
    js = client.jetstream()
    if is_first:
        await js.add_stream(name="kept", subjects=["kept"])
    names = [stream.config.name or "" for stream in await js.streams_info()]
    await client.close()
    return names


async def _topics(url: str, is_first: bool) -> list[str]:
    admin = AIOKafkaAdminClient(bootstrap_servers=url)
    await admin.start()
    try:
        if is_first:
            await admin.create_topics([NewTopic("kept", 1, 1)])
        return list(await admin.list_topics())
    finally:
        await admin.close()


def test_settings_of_nats_stand_at_the_top_or_in_jetstream() -> None:
    """A setting at the wrong place stops the server."""
    with own("nats", settings={"max_payload": "64KB", "jetstream.sync_interval": "2m"}) as server:
        text = (server.folder / "nats.conf").read_text()
    assert "\nmax_payload: 64KB\n" in text
    assert "sync_interval: 2m}" in text


def test_up_status_and_down_work_from_shells_of_their_own() -> None:
    postgres(15)  # skips this test where it cannot be had
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place: dict[str, Any] = {"DUETIME_SERVERS_CACHE": folder}
        try:
            code, said = command("scripts.servers", "up", "postgres15", **place)
            assert code == 0, said
            assert "postgres15 is up: postgresql://postgres@127.0.0.1:" in said
            assert command("scripts.servers", "status", **place)[0] == 0
            assert "is up already" in command("scripts.servers", "up", "postgres15", **place)[1]
        finally:
            code, said = command("scripts.servers", "down", **place)
        assert (code, said) == (0, "postgres15 is down\n")
        assert command("scripts.servers", "status", "postgres15", **place) == (1, "postgres15 is not up\n")


def test_a_checkout_does_not_see_or_end_the_servers_of_another(tmp_path: Path) -> None:
    postgres(15)  # skips this test where it cannot be had
    one, other = (tmp_path / name / "duetime" for name in ("one", "other"))
    for checkout in (one, other):
        shutil.copytree(ROOT / "scripts", checkout / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    try:
        code, said = command_in(one, "scripts.servers", "up", "postgres15")
        assert code == 0, said
        assert command_in(other, "scripts.servers", "status") == (0, "nothing is up\n")
        code, said = command_in(other, "scripts.servers", "up", "postgres15")
        assert (code, "is up already" in said) == (0, False), said
        assert command_in(other, "scripts.servers", "down") == (0, "postgres15 is down\n")
        assert command_in(other, "scripts.servers", "down", "postgres15") == (0, "postgres15 is not up\n")
        code, said = command_in(one, "scripts.servers", "status")
        assert (code, "postgres15 is up" in said) == (0, True), said
    finally:
        for checkout in (one, other):
            command_in(checkout, "scripts.servers", "down")
    assert command_in(one, "scripts.servers", "status") == (0, "nothing is up\n")


@pytest.mark.parametrize("name", ["mariadb", "mysql"])
def test_the_url_that_is_printed_is_of_a_database_that_can_be_served(name: str) -> None:
    async def migrate(url: str) -> None:
        store = open_store(url)
        try:
            await store.migrate()
            await store.open()
        finally:
            await store.close()

    with own(name) as server:
        asyncio.run(migrate(server.url()))


# --- MongoDB, Cassandra, ministack ---------------------------------------------------------------


def test_mongodb_keeps_what_was_acknowledged_when_it_is_killed() -> None:
    with own("mongodb") as mine:
        assert isinstance(mine, MongoDb)
        for count in (1, 2, 3):
            majority = {"w": "majority"}
            mine.ask({"insert": "kept", "documents": [{"n": count}], "writeConcern": majority}, "box")
            mine.kill()
            mine.start()
            assert mine.ask({"count": "kept"}, "box")["n"] == count


def test_mongodb_can_be_had_without_a_replica_set() -> None:
    with own("mongodb", replica_set=False) as mine:
        assert isinstance(mine, MongoDb)
        assert "setName" not in mine.ask({"hello": 1})
        assert "replicaSet" not in mine.url("box")


def test_cassandra_keeps_what_was_acknowledged_when_it_is_killed() -> None:
    with own("cassandra") as mine:
        assert isinstance(mine, Cassandra)
        mine.make_database("box")
        mine.kill()
        mine.start()
        with pytest.raises(ServerError, match="existing keyspace"):
            mine.make_database("box")


def test_ministack_starts_again_after_a_kill_and_a_restart() -> None:
    with own("ministack") as mine:
        mine.kill()
        mine.start()
        mine.restart()
        assert mine.is_running
