"""MySQL, MariaDB and TiDB, step by step: a fenced write and a claim with every order of their locks and commits.

The conformance suite runs them at the same time; here each waits at a chosen point, so that a missing lock is detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from on_mysql import on_all, on_innodb

from duetime.domain.timer import BEFORE_ALL, Position
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Committed, Fence, ListQuery, PageRequest
from duetime.stores.mysql import connection as mysql_connection
from duetime.stores.mysql import schema as mysql_schema
from duetime.stores.mysql import statements as mysql_statements
from duetime.stores.mysql.connection import HOLD_SECONDS, Write, execute
from duetime.stores.mysql.store import MySqlStore
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from servers import fresh_database, require

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)
NEVER = 99  # a version that no shard has

Act = Callable[[Write, Fence], Awaitable[list[Any]]]

WRITES: dict[str, Act] = {
    "put": lambda write, fence: mysql_statements.commit(write, [Batch(fence, [make_timer("new")])]),
    "replace": lambda write, fence: mysql_statements.commit(write, [Batch(fence, [make_timer("kept", 9)])]),
    "delete": lambda write, fence: mysql_statements.commit(write, [Batch(fence, (), [KEPT.key])]),
    "reached": lambda write, fence: mysql_statements.commit(write, [Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda write, fence: mysql_statements.commit(write, [Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda write, fence: mysql_statements.commit(
        write, [Batch(fence, [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3))]
    ),
    "purge": lambda write, fence: mysql_statements.purge_reached(write, [fence], 1_000, 10),
    "release": lambda write, fence: mysql_statements.release(write, [fence]),
}

# How a server reports that a session waits for a lock.
WAITS = {
    "mariadb": "information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = {}",
    "mysql": "information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = {}",
    "tidb": "information_schema.tidb_trx WHERE state = 'LockWaiting' AND session_id = {}",
}


class Session:
    """A session whose transactions, once they have their locks, wait for an event before their COMMIT."""

    def __init__(self, db: Any) -> None:
        self.db = db
        self.has_locks = asyncio.Event()
        self.may_end = asyncio.Event()
        self.gives_up = False

    async def write(self, work: Any, commit: Any = None, /) -> Any:
        answer = await work(self.db)
        self.has_locks.set()
        await self.may_end.wait()
        if self.gives_up:
            await execute(self.db, ("ROLLBACK",))
        elif commit is not None:
            await commit(self.db)
        return answer

    async def begin(self, act: Awaitable[Any]) -> asyncio.Future[Any]:
        """Up to where it has its locks."""
        self.has_locks.clear()
        self.may_end.clear()
        task = asyncio.ensure_future(act)
        await asyncio.wait(
            {task, signal := asyncio.ensure_future(self.has_locks.wait())}, return_when="FIRST_COMPLETED"
        )
        signal.cancel()
        return task

    async def end(self, task: asyncio.Future[Any]) -> Any:
        self.may_end.set()
        return await asyncio.wait_for(task, 20)


class Scene:
    """Two sessions, A of the old owner, B of the new one; and a store that reads the result."""

    def __init__(self, store: MySqlStore, server_name: str, a: Any, b: Any, looking: Any) -> None:
        self.store, self.server_name, self.looking = store, server_name, looking
        self.a, self.b = Session(a), Session(b)

    async def contents(self) -> object:
        return await self.store.shards(), await all_timers(self.store), await all_reached(self.store)

    async def claim(self, fence: Fence) -> Fence:
        [row] = await mysql_statements.claim(self.b.write, [Claim(0, fence.version, -7, "b", "host:2", 1)])
        assert row.nonce == -7
        return row.fence

    async def until_waiting(self, session: Session) -> None:
        """Waits until it waits for a lock, according to the server."""
        where = WAITS[self.server_name].format(session.db.thread_id())
        for _ in range(100):
            [rows] = await execute(self.looking, (f"SELECT 1 FROM {where}",))
            if rows:
                return
            await asyncio.sleep(0.12)  # InnoDB refreshes its table of transactions only if it was not read for 0.1 s
        raise AssertionError("it does not wait")


@pytest.fixture(scope="module")
def urls() -> dict[str, str]:
    return {}


@pytest.fixture
async def scene(server_name: str, urls: dict[str, str]) -> AsyncIterator[Scene]:
    if server_name not in urls:
        urls[server_name] = fresh_database(require(server_name))
    store = MySqlStore.from_url(urls[server_name])
    address = mysql_connection.address_of(urls[server_name])
    await store.migrate()
    await mysql_schema.wipe(address)
    await store.open()
    await store.ensure_shards(4)
    sessions = [await mysql_connection.connect(address) for _ in range(3)]
    yield Scene(store, server_name, *sessions)
    for session in sessions:
        await session.ensure_closed()
    await store.close()


async def filled(scene: Scene) -> Fence:
    fence = await take(scene.store, 0)
    await scene.store.commit([Batch(fence, [KEPT], (), [OVER])])
    return fence


def was_refused(answer: list[Any]) -> bool:
    return isinstance(answer[0], ShardLost)


@on_all
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_an_uncommitted_claim_and_then_writes_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = (await scene.contents())[1:]  # type: ignore[index]
    claim = await scene.b.begin(scene.claim(fence))
    scene.a.may_end.set()
    write = asyncio.ensure_future(WRITES[name](scene.a.write, fence))
    await scene.until_waiting(scene.a)
    taken = await scene.b.end(claim)
    assert was_refused(await write)
    assert (await scene.contents())[1:] == before  # type: ignore[index]
    row = (await scene.store.shards())[0]
    assert (row.fence, row.low_water) == (taken, BEFORE_ALL)


@on_all
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_a_claim_that_is_rolled_back_and_then_writes(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = await scene.contents()
    claim = await scene.b.begin(scene.claim(fence))
    scene.a.may_end.set()
    write = asyncio.ensure_future(WRITES[name](scene.a.write, fence))
    await scene.until_waiting(scene.a)
    scene.b.gives_up = True
    await scene.b.end(claim)
    assert not was_refused(await write)
    assert await scene.contents() != before


@on_all
@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_waits_for_a_write_that_has_its_fence_and_sees_all_of_it(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = (await scene.contents())[1:]  # type: ignore[index]
    write = await scene.a.begin(WRITES[name](scene.a.write, fence))
    scene.b.may_end.set()
    claim = asyncio.ensure_future(scene.claim(fence))
    await scene.until_waiting(scene.b)
    assert (await scene.contents())[1:] == before, "not committed yet"  # type: ignore[index]
    assert not was_refused(await scene.a.end(write))
    taken = await claim
    row = (await scene.store.shards())[0]
    assert row.fence == taken
    changed = (await scene.contents())[1:] != before  # type: ignore[index]
    assert changed or row.low_water == Position(1, 2, 3), "the claim changes the owner and nothing else"


@on_all
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_a_write_of_the_same_owner_and_then_writes(scene: Scene, name: str) -> None:
    """The shard row was changed in the meantime, but not the columns of the fence."""
    fence = await filled(scene)
    other = await scene.b.begin(WRITES["low water"](scene.b.write, fence))
    scene.a.may_end.set()
    write = asyncio.ensure_future(WRITES[name](scene.a.write, fence))
    await scene.until_waiting(scene.a)
    await scene.b.end(other)
    assert not was_refused(await write)
    assert (await scene.store.shards())[0].low_water == Position(1, 2, 3)


@on_all
async def test_a_write_that_waited_sees_what_the_other_one_has_written(scene: Scene) -> None:
    """What it reads after the lock is the current state, and not that of its start."""
    fence = await filled(scene)
    new, gone = make_timer("new", 7), make_timer("gone")
    other = await scene.b.begin(
        mysql_statements.commit(scene.b.write, [Batch(fence, [make_timer("new"), gone], [KEPT.key])])
    )
    scene.a.may_end.set()
    write = asyncio.ensure_future(
        mysql_statements.commit(scene.a.write, [Batch(fence, [make_timer("kept", 9), new], [gone.key])])
    )
    await scene.until_waiting(scene.a)
    await scene.b.end(other)
    assert await write == [Committed(frozenset({1}))]
    assert await all_timers(scene.store) == [new, make_timer("kept", 9)]


@on_all
@pytest.mark.parametrize("act", ["commit", "claim", "purge", "release"])
async def test_a_write_of_many_shards_checks_the_one_that_it_waited_for(scene: Scene, act: str) -> None:
    fences = [await take(scene.store, shard_id) for shard_id in range(4)]
    other = await scene.b.begin(mysql_statements.commit(scene.b.write, [Batch(fences[1], low_water=Position(1, 2, 3))]))
    claims = [Claim(fence.shard_id, fence.version, 77, "b", "host:2", 1) for fence in fences]
    write = scene.a.write
    acts: dict[str, Callable[[], Awaitable[list[Any]]]] = {
        "commit": lambda: mysql_statements.commit(
            write, [Batch(f, [make_timer()], low_water=Position(4, 5, 6)) for f in fences]
        ),
        "claim": lambda: mysql_statements.claim(write, claims),
        "purge": lambda: mysql_statements.purge_reached(write, fences, 10, 10),
        "release": lambda: mysql_statements.release(write, fences),
    }
    scene.a.may_end.set()
    task = asyncio.ensure_future(acts[act]())
    await scene.until_waiting(scene.a)
    await scene.b.end(other)
    answer = await task
    assert not any(isinstance(item, ShardLost) for item in answer)
    rows = await scene.store.shards()
    if act == "commit":
        assert [row.low_water for row in rows] == [Position(4, 5, 6)] * 4
    if act == "claim":
        assert [row.nonce for row in answer] == [77] * 4
        assert rows == answer
    if act == "release":
        assert [row.owner_id for row in rows] == [None] * 4


@on_all
@pytest.mark.parametrize("name", WRITES)
async def test_a_write_after_the_claim_writes_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    scene.a.may_end.set()
    scene.b.may_end.set()
    taken = await scene.claim(fence)
    before = await scene.contents()
    assert was_refused(await WRITES[name](scene.a.write, fence))
    assert await scene.contents() == before
    assert not was_refused(await WRITES[name](scene.a.write, taken))


@on_all
@pytest.mark.parametrize("name", ["put", "everything"])
@pytest.mark.parametrize("broken", ["no lock", "no look"])
async def test_without_the_lock_or_the_check_of_the_fence_the_zombie_writes(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, name: str, broken: str
) -> None:
    """The tests above can fail: without either half of the fence the same write is applied."""
    honest = mysql_statements._lock_sql
    fence = await filled(scene)
    claim = await scene.b.begin(scene.claim(fence))
    if broken == "no lock":
        monkeypatch.setattr(mysql_statements, "_lock_sql", lambda ids: honest(ids).replace(" FOR UPDATE", ""))
        write = await scene.a.begin(WRITES[name](scene.a.write, fence))  # it does not wait at all
        await scene.b.end(claim)
    else:
        monkeypatch.setattr(
            mysql_statements, "_owned_shards", lambda rows, fences: {fence.shard_id for fence in fences}
        )
        await scene.b.end(claim)
        write = await scene.a.begin(WRITES[name](scene.a.write, fence))
    assert not was_refused(await scene.a.end(write))
    assert make_timer("new") in await all_timers(scene.store), "the zombie's timer"


@on_all
async def test_an_error_after_the_commit_does_not_make_the_commit_fail(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is sent in one message with the commit. The commit is done; a caller that gets an error would repeat it."""
    fence = await filled(scene)
    monkeypatch.setattr(mysql_connection, "_AFTER_COMMIT", "SET SESSION wait_timeout = nonsense")
    [answer] = await scene.store.commit([Batch(fence, [make_timer("new"), make_timer("kept", 9)])])
    assert isinstance(answer, Committed)
    assert answer.replaced == {1}
    monkeypatch.undo()
    assert make_timer("new") in await all_timers(scene.store)


@on_all
async def test_a_client_that_stops_in_the_middle_of_a_write_locks_its_shards_only_briefly(scene: Scene) -> None:
    """The client is frozen, or disconnected without the server noticing: the server ends its transaction."""
    fence = await filled(scene)
    before = (await scene.contents())[1:]  # type: ignore[index]
    write = await scene.a.begin(WRITES["everything"](scene.a.write, fence))
    started = asyncio.get_running_loop().time()
    [row] = await scene.store.claim([Claim(0, fence.version, -7, "b", "host:2", 1)])
    waited = asyncio.get_running_loop().time() - started
    assert row.nonce == -7
    assert waited < HOLD_SECONDS + 2
    with pytest.raises(Exception, match=r"Lost connection|gone away|Inactive|inactivity|2013|2006|1927|4031"):
        await scene.a.end(write)
    assert (await scene.contents())[1:] == before  # type: ignore[index]


@on_all
async def test_commits_claims_purges_and_releases_of_many_shards_never_deadlock(scene: Scene) -> None:
    """All writers lock shards ordered by id, whatever the order of the call."""
    store, shards = scene.store, range(4)
    fences = [await take(store, shard_id) for shard_id in shards]

    async def commits(turn: int) -> None:
        for number in range(15):
            order = fences if (turn + number) % 2 else fences[::-1]
            low_water = Position(number, 0, 0) if number % 3 == 0 else None
            done = await store.commit(
                [Batch(f, [make_timer(f"{turn}-{number}")], (), [OVER], low_water) for f in order]
            )
            assert not any(isinstance(result, ShardLost) for result in done)

    async def purges() -> None:
        for number in range(15):
            await store.purge_reached(fences if number % 2 else fences[::-1], 1_000, 5)

    async def claims() -> None:
        for number in range(15):
            order = shards if number % 2 else shards[::-1]
            await store.claim([Claim(shard_id, NEVER, 1, "x", "y", 1) for shard_id in order])

    await asyncio.gather(*(commits(turn) for turn in range(4)), purges(), claims())
    assert len(await all_timers(store)) == 60
    assert await store.release(fences[::-1]) == [None] * 4


@on_innodb
async def test_nothing_reads_more_than_it_needs_even_if_there_are_no_statistics(scene: Scene) -> None:
    store = scene.store
    fence = await filled(scene)
    for start in range(0, 12_000, 1_000):
        timers = [make_timer(f"n-{n}", n, correlation_id="c") for n in range(start, start + 1_000)]
        await store.commit([Batch(fence, timers, (), [make_reached(timer) for timer in timers])])
    before = await _rows_read(scene)
    for number in range(20):
        await _some_of_everything(store, fence, number)
    assert await _rows_read(scene) - before < 8_000, "20 rounds that read a shard would be 240,000"


async def _some_of_everything(store: MySqlStore, fence: Fence, number: int) -> None:
    timer = make_timer(f"n-{number}", 7, correlation_id="c")
    await store.commit([Batch(fence, [timer], [make_timer(f"n-1{number}").key], [make_reached(timer)])])
    await store.commit([Batch(fence, [timer], low_water=Position(0, 0, number))])
    await store.get_many([(0, timer.key), (0, KEPT.key)])
    await store.get_many([(0, make_timer(f"x-{n}").key) for n in range(60)])
    await store.load([PageRequest(0, Position(6_000, 0, 0), 1 << 50, 5), PageRequest(1, BEFORE_ALL, 1 << 50, 5)])
    await store.purge_reached([fence], 10, 1)
    await store.shards()
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5))
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5, correlation_id="c"))


async def _rows_read(scene: Scene) -> int:
    """By all sessions, in whatever way."""
    [rows] = await execute(scene.looking, ("SHOW GLOBAL STATUS LIKE 'Handler_read%'",))
    return sum(int(value) for name, value in rows if name != "Handler_read_retry")
