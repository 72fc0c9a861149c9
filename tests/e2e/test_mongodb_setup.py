"""MongoDB as it is found: no replica set, forbidden, foreign, old and new collections, TLS; and as it fails."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pymongo import MongoClient
from scripts.servers import MongoDb

from duetime.domain.timer import TimerKey
from duetime.errors import FailedOver, MemberDead, SchemaMismatch, SetupError, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Member, open_store
from duetime.stores.mongodb import schema as mongodb_schema
from duetime.stores.mongodb.connection import begin
from duetime.stores.mongodb.schema import SCHEMA_VERSION
from duetime.stores.mongodb.store import MongoStore
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers, take
from servers import fresh_database, own, require


@pytest.fixture
def server() -> MongoDb:
    server = require("mongodb")
    assert isinstance(server, MongoDb)
    return server


@pytest.fixture
def url(server: MongoDb) -> str:
    return fresh_database(server)


@pytest.fixture
def by_hand(url: str) -> Iterator[Any]:
    """The same database, through the driver."""
    with MongoClient[dict[str, Any]](url) as client:
        yield client.get_default_database()


async def ready(url: str) -> MongoStore:
    store = MongoStore.from_url(url)
    await store.migrate()
    await store.open()
    return store


@pytest.fixture
async def store(url: str) -> AsyncIterator[MongoStore]:
    store = await ready(url)
    await store.ensure_shards(2)
    yield store
    await store.close()


async def test_many_instances_that_start_at_once_make_the_collections_once(url: str) -> None:
    stores = [open_store(url) for _ in range(8)]
    await asyncio.gather(*(store.migrate() for store in stores))
    await asyncio.gather(*(store.open() for store in stores))
    await asyncio.gather(*(store.ensure_shards(50) for store in stores))
    assert [row.shard_id for row in await stores[7].shards()] == list(range(50))
    await asyncio.gather(*(store.close() for store in stores))


async def test_a_database_without_collections_and_one_of_a_newer_version_are_not_opened(url: str, by_hand: Any) -> None:
    store = open_store(url)
    with pytest.raises(SchemaMismatch, match="no collections yet"):
        await store.open()
    await store.migrate()
    by_hand["duetime_schema"].update_one({"_id": "schema"}, {"$set": {"version": SCHEMA_VERSION + 1}})
    for act in (store.open, store.migrate):
        with pytest.raises(SchemaMismatch, match="a newer Duetime"):
            await act()


async def test_a_migration_that_was_broken_off_is_finished(url: str, by_hand: Any) -> None:
    by_hand["duetime_schema"].insert_one({"_id": "schema", "version": 0})
    by_hand.create_collection("timers")
    store = open_store(url)
    with pytest.raises(SchemaMismatch):
        await store.open()
    await store.migrate()
    await store.open()
    await store.close()
    assert set(by_hand["timers"].index_information()) == {"_id_", "in_order", "by_correlation", "reached_by_key"}
    assert by_hand["duetime_schema"].find_one() == {"_id": "schema", "version": SCHEMA_VERSION}


async def test_a_collection_of_another_program_is_left_alone(url: str, by_hand: Any) -> None:
    by_hand["timers"].insert_one({"_id": "mine"})
    with pytest.raises(SetupError, match="another program; use a database of its own"):
        await open_store(url).migrate()
    assert by_hand["timers"].find_one() == {"_id": "mine"}


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        await open_store("mongodb://127.0.0.1:1/nowhere").open()


async def test_a_server_that_is_too_old_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mongodb_schema, "OLDEST_SERVER", 99)
    with pytest.raises(SetupError, match=r"is MongoDB 6\.0\.\d+; 99\.0 or later is needed"):
        await open_store(url).migrate()


async def test_a_server_that_is_no_replica_set_is_refused_and_told_how_to_become_one() -> None:
    with own("mongodb", replica_set=False) as server:
        for options in ("", "?directConnection=true", "?replicaSet=rs0"):
            for act in ("migrate", "open"):
                with pytest.raises(SetupError, match="is no replica set: transactions are missing; start mongod with"):
                    await getattr(open_store(f"mongodb://127.0.0.1:{server.port}/db{options}"), act)()


async def test_a_replica_set_of_another_name_is_named(server: MongoDb) -> None:
    with pytest.raises(SetupError, match="is the replica set 'duetime', not 'other'"):
        await open_store(f"mongodb://127.0.0.1:{server.port}/db?replicaSet=other").open()


async def test_the_doctor_says_what_the_server_is(url: str, store: MongoStore) -> None:
    diagnosis = await store.diagnose()
    assert diagnosis.facts[0].startswith("MongoDB 6.")
    assert "it is the primary of the replica set 'duetime' with 1 member" in diagnosis.facts
    assert "storage engine wiredTiger" in diagnosis.facts
    assert any("connections are free" in fact for fact in diagnosis.facts)
    assert f"schema version {SCHEMA_VERSION}, this Duetime knows {SCHEMA_VERSION}" in diagnosis.facts
    assert not diagnosis.dangers


async def test_people_find_names_and_dates_as_they_expect_them(store: MongoStore, by_hand: Any) -> None:
    await store.commit([Batch(await take(store, 0), [make_timer("order-17", 1_700_000_000_123, payload='{"a":1}')])])
    found = by_hand["timers"].find_one({"timer_id": "order-17"})
    assert found["_id"] == '[0,"test","order-17"]'
    assert found["timer_execute_at"].isoformat(timespec="milliseconds") == "2023-11-14T22:13:20.123"
    assert (found["timer_namespace"], found["timer_payload"], found["row_type"]) == ("test", '{"a":1}', 2)


# --- passwords, rights and TLS -------------------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(certificates: Path) -> Iterator[MongoDb]:
    """A server that speaks TLS and wants a password: `guest` may read and write in `shop`, `visitor` only read."""
    with own("mongodb") as server:
        assert isinstance(server, MongoDb)
        with MongoClient[dict[str, Any]](server.url("shop")) as client:
            for user, role in (("guest", "readWrite"), ("visitor", "read")):
                client["shop"].command("createUser", user, pwd="p@ss:w/rd", roles=[role])
        texts = {
            "both.pem": (certificates / "server.pem").read_text() + (certificates / "server.key").read_text(),
            "ca.pem": (certificates / "ca.pem").read_text(),
            "members.key": "c2VjcmV0IG9mIHRoZSBtZW1iZXJz",
        }
        owner = server.data.stat()
        for name, text in texts.items():
            file = server.folder / name
            file.write_text(text)
            file.chmod(0o600)
            subprocess.run(["chown", f"{owner.st_uid}:{owner.st_gid}", str(file)], check=True)
        server.settings |= {
            "security.authorization": "enabled",
            "security.keyFile": str(server.folder / "members.key"),
            "net.tls.mode": "preferTLS",
            "net.tls.certificateKeyFile": str(server.folder / "both.pem"),
            "net.tls.CAFile": str(server.folder / "ca.pem"),
            "net.tls.allowConnectionsWithoutCertificates": "true",
        }
        server.restart()
        yield server


def guest(server: MongoDb, options: str = "", *, user: str = "guest:p%40ss%3Aw%2Frd", host: str = "127.0.0.1") -> str:
    return f"mongodb://{user}@{host}:{server.port}/shop?directConnection=true{options}"


async def test_the_right_to_read_and_write_in_one_database_is_all_that_is_needed(guarded: MongoDb) -> None:
    """Even to end the transaction of an owner that died."""
    stores = [await ready(guest(guarded)) for _ in range(2)]
    await stores[0].ensure_shards(2)
    fence = await take(stores[0], 0)
    session = stores[0]._open.commits._sessions[0]
    await begin(session)
    await session.command({"update": "timers", "updates": [{"q": {"_id": "[0]"}, "u": {"$inc": {"shard_commits": 1}}}]})
    [row] = await asyncio.wait_for(stores[1].claim([Claim(0, fence.version, -7, "b", "host:2", 1)]), 5)
    assert row.nonce == -7
    [done] = await stores[1].commit([Batch(row.fence, [make_timer()])])
    assert isinstance(done, Committed)
    assert "MongoDB 6" in (await stores[0].diagnose()).facts[0]
    for store in stores:
        await store.close()


@pytest.mark.parametrize("user", ["guest:wrong", "nobody:wrong"])
async def test_a_wrong_user_or_password_is_said_without_repeating_it(guarded: MongoDb, user: str) -> None:
    for act in ("migrate", "open"):
        with pytest.raises(SetupError, match="refuses the user or the password") as caught:
            await getattr(open_store(guest(guarded, user=user)), act)()
        assert "wrong" not in caught.value.detail.replace("wrong password", "")


async def test_a_user_without_rights_is_told_what_to_grant(guarded: MongoDb) -> None:
    weak = open_store(guest(guarded, user="visitor:p%40ss%3Aw%2Frd", options="&appName=x"))
    with MongoClient[dict[str, Any]](guest(guarded)) as client:
        client["shop"]["duetime_schema"].update_one({"_id": "schema"}, {"$set": {"version": 0}})
    with pytest.raises(SetupError, match="grant it the role readWrite"):
        await weak.migrate()
    with pytest.raises(SetupError, match="grant it the role readWrite"):
        await open_store(f"mongodb://127.0.0.1:{guarded.port}/shop?directConnection=true").migrate()


async def test_a_server_with_the_right_certificate_and_name_is_trusted(guarded: MongoDb, certificates: Path) -> None:
    store = await ready(guest(guarded, f"&tls=true&tlsCAFile={certificates}/ca.pem", host="localhost"))
    await store.ensure_shards(1)
    assert await store.shards()
    await store.close()


@pytest.mark.parametrize(("host", "authority"), [("127.0.0.1", "ca.pem"), ("localhost", "other.pem")])
async def test_a_server_with_another_name_or_an_unknown_authority_is_not(
    guarded: MongoDb, certificates: Path, host: str, authority: str
) -> None:
    with pytest.raises(SetupError, match="no TLS connection"):
        await open_store(guest(guarded, f"&tls=true&tlsCAFile={certificates}/{authority}", host=host)).open()


async def test_a_server_without_tls_is_not_talked_to_where_it_is_asked_for(server: MongoDb) -> None:
    with pytest.raises(SetupError, match="no TLS connection"):
        await open_store(f"{server.url('db')}&tls=true").open()


# --- limits --------------------------------------------------------------------------------------


async def test_commits_larger_than_a_command_may_be_are_one_transaction_all_the_same(store: MongoStore) -> None:
    fence = await take(store, 0)
    timers = [make_timer(f"n-{n}", n, payload='"' + "ü" * 1_200_000 + '"') for n in range(12)]  # 29 MB
    [first] = await store.commit([Batch(fence, timers)])
    assert first == Committed()
    [again] = await store.commit([Batch(fence, timers)])
    assert again == Committed(frozenset(range(12)))
    assert await all_timers(store) == timers


async def test_the_largest_payload_fits_with_all_the_rest_of_its_timer(store: MongoStore) -> None:
    fence = await take(store, 0)
    payload = '"' + "x" * (store.capabilities.payload_bytes_max - 2) + '"'
    timers = [make_timer(f"{n}" * 255, n, payload=payload, correlation_id="c" * 255) for n in range(2)]
    await store.commit([Batch(fence, timers)])
    assert await all_timers(store) == timers


# --- failures ------------------------------------------------------------------------------------


async def test_a_heartbeat_waits_for_no_other_work(store: MongoStore, url: str) -> None:
    """All sessions for commits and reads are in use: commits wait for a lock, and reads queue."""
    await store.join(Member("a", "host:1", 0, True, 1))
    fence = await take(store, 0)
    other = await ready(url)
    session = other._open.commits._sessions[0]
    await begin(session)
    await session.command({"update": "timers", "updates": [{"q": {"_id": "[0]"}, "u": {"$inc": {"shard_commits": 1}}}]})
    commits = [asyncio.ensure_future(store.commit([Batch(fence, [make_timer(f"n-{n}")])])) for n in range(20)]
    reads = [asyncio.ensure_future(all_timers(store)) for _ in range(40)]
    await store.heartbeat("a", 1)
    assert not any(commit.done() for commit in commits)
    assert [member.counter for member in await store.members()] == [1]
    await session.driver_session.abort_transaction()
    await asyncio.gather(*commits, *reads)
    await other.close()


async def test_a_caller_that_gives_up_leaves_its_write_to_finish(store: MongoStore) -> None:
    fence = await take(store, 0)
    for turns in range(12):
        write = asyncio.ensure_future(store.commit([Batch(fence, [make_timer(f"n-{turns}")])]))
        for _ in range(turns + 2):
            await asyncio.sleep(0)
        write.cancel()
        await asyncio.gather(write, return_exceptions=True)
    await store.commit([Batch(fence, [make_timer("last")])])
    assert len(await all_timers(store)) == 13


async def test_a_database_that_forgot_heartbeats_it_acknowledged_has_lost_more(store: MongoStore, by_hand: Any) -> None:
    await store.join(Member("a", "host:1", 0, True, 1))
    await store.heartbeat("a", 2)
    await store.heartbeat("a", 4)
    by_hand["members"].update_one({"_id": "a"}, {"$set": {"counter": 2}})  # as after a restore
    with pytest.raises(FailedOver):
        await store.heartbeat("a", 6)
    by_hand["members"].delete_many({})
    with pytest.raises(MemberDead):
        await store.heartbeat("a", 8)


@pytest.mark.parametrize("fault", ["stepdown", "kill"])
async def test_nothing_acknowledged_is_lost_when_the_primary_changes_or_dies(fault: str) -> None:
    """Commits go on all the time; each is acknowledged, refused, or unknown, and then looked for."""
    with own("mongodb") as server:
        assert isinstance(server, MongoDb)
        store = await ready(server.url("db"))
        await store.ensure_shards(1)
        await store.join(Member("a", "host:1", 0, True, 1))
        fence = await take(store, 0)
        acknowledged: list[str] = []
        refused: list[str] = []
        over = asyncio.Event()

        async def write() -> None:
            number = 0
            while not over.is_set():
                number += 1
                name = f"n-{number}"
                try:
                    await store.commit([Batch(fence, [make_timer(name)])])
                except StoreUnavailable:
                    refused.append(name)
                except StoreError:
                    continue
                else:
                    acknowledged.append(name)

        async def beats(counter: int) -> int:
            """Until one succeeds. None may say that anything was lost."""
            for more in range(600):
                try:
                    await store.heartbeat("a", counter + more)
                    return counter + more + 1
                except FailedOver:
                    raise
                except StoreError:
                    await asyncio.sleep(0.05)
            raise AssertionError("it does not come back")

        writer = asyncio.ensure_future(write())
        counter = 1
        for _ in range(3):
            await grows(acknowledged)
            if fault == "kill":
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            else:
                await asyncio.to_thread(server.ask, {"replSetStepDown": 1, "force": True})
            counter = await beats(counter)
        await grows(acknowledged)
        over.set()
        await writer
        found = {timer.timer_id for timer in await all_timers(store)}
        assert found >= set(acknowledged)
        assert not found & set(refused), "said not to be applied"
        assert await store.get_many([(0, TimerKey("test", acknowledged[0]))])
        await store.close()


async def grows(items: list[str]) -> None:
    enough = len(items) + 20
    for _ in range(3_000):
        if len(items) > enough:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nothing is acknowledged any more")
