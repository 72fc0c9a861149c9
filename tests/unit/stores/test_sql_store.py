"""A store on a SQL database: which sessions do what, when they open and close, and what a failover does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from duetime.domain.timer import BEFORE_ALL, Namespace, TimerKey
from duetime.errors import FailedOver, StoreUnavailable
from duetime.store import Batch, Capabilities, Claim, Fence, ListQuery, Member, PageRequest
from duetime.stores import sql_store
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.stores.sql_store import MEMBERSHIP_SECONDS, READERS, STATEMENT_SECONDS, SqlStore

FENCE = Fence(1, 1, 1)
ME = Member("me", "here:1", 0, True, 0)


class Line:
    """Sessions for one kind of work. What they are given to run is told apart by (their number, read or write)."""

    def __init__(self, number: int, *arguments: Any) -> None:
        self.arguments = arguments
        self.read, self.write = (number, "read"), (number, "write")
        self.closed = self.dropped = 0

    async def close(self) -> None:
        self.closed += 1

    def drop_connections(self) -> None:
        self.dropped += 1


class Database:
    """All modules of an adapter in one: notes who was asked for what, and answers with the name of the call."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.calls: list[tuple[Any, ...]] = []
        self.history = "timeline 1"
        self.now_ms = 5

    # -- link and schema

    def address_of(self, url: str) -> str:
        return url.removeprefix("some://")

    def Line(self, *arguments: Any) -> Line:
        self.lines.append(Line(len(self.lines), *arguments))
        return self.lines[-1]

    async def migrate(self, address: str) -> None:
        self.calls.append(("migrate", address))

    async def check(self, address: str) -> str:
        self.calls.append(("check", address))
        return "SELECT history"

    async def diagnose(self, address: str) -> list[str]:
        return [f"{address} is well"]

    # -- words, reads and lists

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
def store(database: Database) -> SqlStore:
    class SomeStore(SqlStore):
        capabilities = Capabilities(name="some", batch_max=100, payload_bytes_max=100, parallel_commits=3)
        link = schema = words = reads = lists = database

    return SomeStore.from_url("some://host/db")


async def test_each_kind_of_work_has_sessions_of_its_own_with_their_number_and_limits(
    store: SqlStore, database: Database
) -> None:
    await store.open()
    usual, membership = (STATEMENT_SECONDS, CONNECT_SECONDS), (MEMBERSHIP_SECONDS, MEMBERSHIP_SECONDS)
    assert [line.arguments for line in database.lines] == [
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
STRETCH = PageRequest(1, BEFORE_ALL, 1, 1)
QUERY = ListQuery(namespace="n", num_shards=1)
NAMESPACE = Namespace(name="n", num_shards=1, created_at_ms=0)


@pytest.mark.parametrize(
    ("name", "arguments", "line", "way"),
    [
        ("members", (), READS, "read"),
        ("mark_dead", ("me", 3), MEMBERSHIP, "write"),
        ("forget_member", ("me",), MEMBERSHIP, "write"),
        ("ensure_shards", (4,), CHANGES, "write"),
        ("shards", (), READS, "read"),
        ("claim", ([CLAIM],), CHANGES, "write"),
        ("release", ([FENCE],), CHANGES, "write"),
        ("commit", ([Batch(FENCE)],), COMMITS, "write"),
        ("load", ([STRETCH],), READS, "read"),
        ("get_many", ([(1, TimerKey("n", "t"))],), READS, "read"),
        ("list_timers", (QUERY,), LISTS, "read"),
        ("purge_reached", ([FENCE], 7, 8), CHANGES, "write"),
        ("namespaces", (), READS, "read"),
        ("put_namespace", (NAMESPACE, None), CHANGES, "write"),
    ],
)
async def test_what_is_asked_for_runs_on_its_sessions_and_is_answered(
    store: SqlStore, database: Database, name: str, arguments: tuple[Any, ...], line: int, way: str
) -> None:
    await store.open()
    answer = await getattr(store, name)(*arguments)
    assert database.calls[1:] == [(name, (line, way), *arguments)]
    assert answer == (None if name in ("forget_member", "ensure_shards") else f"the answer to {name}")


async def test_members_join_and_beat_on_their_own_sessions_with_the_question_for_the_history(
    store: SqlStore, database: Database
) -> None:
    await store.open()
    await store.join(ME)
    assert await store.heartbeat("me", 7) == 5
    assert database.calls[1:] == [
        ("join", (MEMBERSHIP, "write"), ME, "SELECT history"),
        ("heartbeat", (MEMBERSHIP, "write"), "me", 7, "SELECT history"),
    ]


async def test_a_database_of_another_history_is_reported_and_every_connection_dropped(
    store: SqlStore, database: Database
) -> None:
    await store.open()
    await store.join(ME)
    await store.heartbeat("me", 1)
    assert [line.dropped for line in database.lines] == [0] * 5
    database.history = "timeline 2"
    for beats in (1, 2):  # until it has joined again
        with pytest.raises(FailedOver, match="timeline 2"):
            await store.heartbeat("me", 2)
        assert [line.dropped for line in database.lines] == [beats] * 5
    await store.join(ME)
    assert await store.heartbeat("me", 3) == 5
    assert [line.dropped for line in database.lines] == [2] * 5


async def test_one_that_joined_under_another_name_has_the_history_of_that_moment(
    store: SqlStore, database: Database
) -> None:
    """Only the newest name counts; of an instance that never joined here the first beat tells the history."""
    await store.open()
    await store.join(ME)
    database.history = "timeline 2"
    await store.join(Member("new", "here:1", 0, True, 0))
    assert await store.heartbeat("new", 1) == 5
    assert await store.heartbeat("me", 1) == 5
    database.history = "timeline 3"
    with pytest.raises(FailedOver):
        await store.heartbeat("me", 2)


async def test_a_beat_without_having_joined_learns_the_history(store: SqlStore, database: Database) -> None:
    await store.open()
    assert await store.heartbeat("me", 1) == 5
    database.history = "timeline 2"
    with pytest.raises(FailedOver):
        await store.heartbeat("me", 2)


async def test_a_store_opens_once_and_closes_all_its_sessions(store: SqlStore, database: Database) -> None:
    await store.close()  # never opened
    await store.migrate()
    assert database.calls == [("migrate", "host/db")]
    assert await store.diagnose() == ["host/db is well"]
    with pytest.raises(StoreUnavailable, match="the store is not open"):
        await store.shards()
    await store.open()
    await store.open()
    assert len(database.lines) == 5
    await store.close()
    await store.close()
    assert [line.closed for line in database.lines] == [1] * 5
    with pytest.raises(StoreUnavailable, match="the store is not open"):
        await store.commit([Batch(FENCE)])
    await store.open()
    assert len(database.lines) == 10
