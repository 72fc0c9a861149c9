"""SqlStore: which session pool runs which call, when pools open and close, and what a failover does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duetime.domain.timer import BEFORE_ALL, Namespace, TimerKey
from duetime.errors import FailedOver, StoreUnavailable
from duetime.store import Batch, Capabilities, Claim, Diagnosis, Fence, ListQuery, Member, PageRequest
from duetime.stores import sql_store
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.stores.sql_store import MEMBERSHIP_SECONDS, READERS, STATEMENT_SECONDS, SqlDatabase, SqlStore

FENCE = Fence(1, 1, 1)
Store = SqlStore[str, Any, Any]
ME = Member("me", "here:1", 0, True, 0)


class Pool:
    """A session pool. What it runs is recorded as (number of the pool, read or write)."""

    def __init__(self, number: int, *arguments: Any) -> None:
        self.arguments = arguments
        self.read, self.write = (number, "read"), (number, "write")
        self.closed = self.dropped = 0

    async def close(self) -> None:
        self.closed += 1

    def drop_connections(self) -> None:
        self.dropped += 1


class Database:
    """All modules of an adapter in one object: records each call, and returns the name of the call."""

    def __init__(self) -> None:
        self.pools: list[Pool] = []
        self.calls: list[tuple[Any, ...]] = []
        self.history = "timeline 1"
        self.now_ms = 5

    # -- connection and schema

    def address_of(self, url: str) -> str:
        return url.removeprefix("some://")

    def session_pool(self, *arguments: Any) -> Pool:
        self.pools.append(Pool(len(self.pools), *arguments))
        return self.pools[-1]

    async def migrate(self, address: str) -> None:
        self.calls.append(("migrate", address))

    async def check(self, address: str) -> str:
        self.calls.append(("check", address))
        return "SELECT history"

    async def diagnose(self, address: str) -> Diagnosis:
        return Diagnosis([f"the server is {address}"])

    # -- statements, reads and lists

    async def join(self, run: Any, member: Member, history_sql: str) -> str:
        self.calls.append(("join", run, member, history_sql))
        return self.history

    async def heartbeat(self, run: Any, instance_id: str, counter: int, history_sql: str) -> tuple[int, str]:
        self.calls.append(("heartbeat", run, instance_id, counter, history_sql))
        return self.now_ms, self.history

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> str:
            self.calls.append((name, *arguments))
            return f"the answer to {name}"

        return call


@pytest.fixture
def database() -> Database:
    return Database()


@pytest.fixture
def store(database: Database) -> Store:
    functions: Any = database

    class SomeStore(Store):
        capabilities = Capabilities(name="some", batch_max=100, payload_bytes_max=100, parallel_commits=3)
        database = SqlDatabase(
            address_of=functions.address_of,
            session_pool=functions.session_pool,
            schema=functions,
            statements=functions,
            reads=functions,
            lists=functions,
        )

    return SomeStore.from_url("some://host/db")


async def test_each_kind_of_work_has_a_session_pool_with_its_size_and_limits(store: Store, database: Database) -> None:
    await store.open()
    usual, membership = (STATEMENT_SECONDS, CONNECT_SECONDS), (MEMBERSHIP_SECONDS, MEMBERSHIP_SECONDS)
    assert [pool.arguments for pool in database.pools] == [
        ("host/db", 3, *usual),
        ("host/db", READERS, *usual),
        ("host/db", 1, *usual),
        ("host/db", 1, *usual),
        ("host/db", 1, *membership),
    ]
    assert sql_store.READERS > 1, "a slow read holds up another one"
    assert MEMBERSHIP_SECONDS * 2 <= 3, "a heartbeat that hangs leaves time for another one within a lease"


COMMITS, READS, CHANGES, LISTS, MEMBERSHIP = range(5)
CLAIM = Claim(1, 0, 1, "me", "here:1", 0)
PAGE_REQUEST = PageRequest(1, BEFORE_ALL, 1, 1)
QUERY = ListQuery(namespace="n", num_shards=1)
NAMESPACE = Namespace(name="n", num_shards=1, created_at_ms=0)


@pytest.mark.parametrize(
    ("name", "arguments", "pool", "access"),
    [
        ("members", (), READS, "read"),
        ("mark_dead", ("me", 3), MEMBERSHIP, "write"),
        ("forget_member", ("me",), MEMBERSHIP, "write"),
        ("ensure_shards", (4,), CHANGES, "write"),
        ("shards", (), READS, "read"),
        ("claim", ([CLAIM],), CHANGES, "write"),
        ("release", ([FENCE],), CHANGES, "write"),
        ("commit", ([Batch(FENCE)],), COMMITS, "write"),
        ("load", ([PAGE_REQUEST],), READS, "read"),
        ("get_many", ([(1, TimerKey("n", "t"))],), READS, "read"),
        ("list_timers", (QUERY,), LISTS, "read"),
        ("next_namespace", ("c", "n"), LISTS, "read"),
        ("purge_reached", ([FENCE], 7, 8), CHANGES, "write"),
        ("namespaces", (), READS, "read"),
        ("put_namespace", (NAMESPACE, None), CHANGES, "write"),
    ],
)
async def test_each_call_runs_in_its_session_pool_and_returns_the_result(
    store: Store, database: Database, name: str, arguments: tuple[Any, ...], pool: int, access: str
) -> None:
    await store.open()
    answer = await getattr(store, name)(*arguments)
    assert database.calls[1:] == [(name, (pool, access), *arguments)]
    assert answer == (None if name in ("forget_member", "ensure_shards") else f"the answer to {name}")


async def test_joins_and_heartbeats_run_in_the_membership_pool_and_read_the_history(
    store: Store, database: Database
) -> None:
    await store.open()
    await store.join(ME)
    assert await store.heartbeat("me", 7) == 5
    assert database.calls[1:] == [
        ("join", (MEMBERSHIP, "write"), ME, "SELECT history"),
        ("heartbeat", (MEMBERSHIP, "write"), "me", 7, "SELECT history"),
    ]


async def test_a_changed_history_raises_failed_over_and_drops_every_connection(
    store: Store, database: Database
) -> None:
    await store.open()
    await store.join(ME)
    await store.heartbeat("me", 1)
    assert [pool.dropped for pool in database.pools] == [0] * 5
    database.history = "timeline 2"
    for beats in (1, 2):  # until it has joined again
        with pytest.raises(FailedOver, match="timeline 2"):
            await store.heartbeat("me", 2)
        assert [pool.dropped for pool in database.pools] == [beats] * 5
    await store.join(ME)
    assert await store.heartbeat("me", 3) == 5
    assert [pool.dropped for pool in database.pools] == [2] * 5


async def test_an_instance_that_joins_under_a_new_id_has_the_history_of_that_join(
    store: Store, database: Database
) -> None:
    """Only the newest id counts. For an instance that never joined here, the first heartbeat reads the history."""
    await store.open()
    await store.join(ME)
    database.history = "timeline 2"
    await store.join(Member("new", "here:1", 0, True, 0))
    assert await store.heartbeat("new", 1) == 5
    assert await store.heartbeat("me", 1) == 5
    database.history = "timeline 3"
    with pytest.raises(FailedOver):
        await store.heartbeat("me", 2)


async def test_a_heartbeat_without_a_join_reads_the_history(store: Store, database: Database) -> None:
    await store.open()
    assert await store.heartbeat("me", 1) == 5
    database.history = "timeline 2"
    with pytest.raises(FailedOver):
        await store.heartbeat("me", 2)


async def test_a_store_opens_once_and_closes_all_its_pools(store: Store, database: Database) -> None:
    await store.close()  # never opened
    await store.migrate()
    assert database.calls == [("migrate", "host/db")]
    assert await store.diagnose() == Diagnosis(["the server is host/db"])
    with pytest.raises(StoreUnavailable, match="the store is not open"):
        await store.shards()
    await store.open()
    await store.open()
    assert len(database.pools) == 5
    await store.close()
    await store.close()
    assert [pool.closed for pool in database.pools] == [1] * 5
    with pytest.raises(StoreUnavailable, match="the store is not open"):
        await store.commit([Batch(FENCE)])
    await store.open()
    assert len(database.pools) == 10
