"""PostgreSQL, step by step: a fenced write and a claim with every order of their locks and commits, in real sessions.

The conformance suite runs them at the same time; here each waits at a chosen point, so that a missing lock is detected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import asyncpg
import pytest
from scripts.servers import Postgres

from duetime.domain.timer import BEFORE_ALL, Position
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Fence, ListQuery, PageRequest
from duetime.stores.postgres import statements as postgres_statements
from duetime.stores.postgres.store import PostgresStore
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from servers import fresh_database

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)

Write = Callable[[postgres_statements.Run, Fence], Awaitable[list[Any]]]

WRITES: dict[str, Write] = {
    "put": lambda run, fence: postgres_statements.commit(run, [Batch(fence, [make_timer("new")])]),
    "replace": lambda run, fence: postgres_statements.commit(run, [Batch(fence, [make_timer("kept", 9)])]),
    "delete": lambda run, fence: postgres_statements.commit(run, [Batch(fence, (), [KEPT.key])]),
    "reached": lambda run, fence: postgres_statements.commit(run, [Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda run, fence: postgres_statements.commit(run, [Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda run, fence: postgres_statements.commit(
        run, [Batch(fence, [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3))]
    ),
    "purge": lambda run, fence: postgres_statements.purge_reached(run, [fence], 1_000, 10),
    "release": lambda run, fence: postgres_statements.release(run, [fence]),
}


class Scene:
    """Two sessions in transactions, A of the old owner, B of the new one; and a store that reads the result."""

    def __init__(self, store: PostgresStore, a: asyncpg.Connection[Any], b: asyncpg.Connection[Any]) -> None:
        self.store, self.a, self.b = store, a, b

    async def contents(self) -> object:
        return await self.store.shards(), await all_timers(self.store), await all_reached(self.store)

    async def claim(self, fence: Fence) -> Fence:
        [row] = await postgres_statements.claim(self.b.fetch, [Claim(0, fence.version, -7, "b", "host:2", 1)])
        assert row.nonce == -7
        return row.fence

    async def until_waiting(self, session: asyncpg.Connection[Any]) -> None:
        """Waits until the backend of the session waits for a lock, according to the server."""
        sql = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1"
        for _ in range(2_000):
            if await self.looking.fetchval(sql, session.get_server_pid()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it does not wait")

    looking: asyncpg.Connection[Any]


@pytest.fixture(scope="module")
def shared_url(postgres_server: Postgres) -> str:
    return fresh_database(postgres_server)


@pytest.fixture
async def scene(shared_url: str) -> AsyncIterator[Scene]:
    store = PostgresStore.from_url(shared_url)
    await store.migrate()
    await store.open()
    sessions = [await asyncpg.connect(shared_url) for _ in range(3)]
    made = Scene(store, sessions[0], sessions[1])
    made.looking = sessions[2]
    await made.looking.execute("TRUNCATE shards, timers")
    await store.ensure_shards(4)
    yield made
    for session in sessions:
        session.terminate()
    await store.close()


async def filled(scene: Scene) -> Fence:
    fence = await take(scene.store, 0)
    await scene.store.commit([Batch(fence, [KEPT], (), [OVER])])
    return fence


def was_refused(answer: list[Any]) -> bool:
    return isinstance(answer[0], ShardLost)


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_an_uncommitted_claim_and_then_writes_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = (await scene.contents())[1:]  # type: ignore[index]
    await scene.b.execute("BEGIN")
    taken = await scene.claim(fence)
    write = asyncio.ensure_future(WRITES[name](scene.a.fetch, fence))
    await scene.until_waiting(scene.a)
    await scene.b.execute("COMMIT")
    assert was_refused(await write)
    assert (await scene.contents())[1:] == before  # type: ignore[index]
    row = (await scene.store.shards())[0]
    assert (row.fence, row.low_water) == (taken, Position(-1, 0, 0))


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_a_claim_that_is_rolled_back_and_then_writes(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = await scene.contents()
    await scene.b.execute("BEGIN")
    await scene.claim(fence)
    write = asyncio.ensure_future(WRITES[name](scene.a.fetch, fence))
    await scene.until_waiting(scene.a)
    await scene.b.execute("ROLLBACK")
    assert not was_refused(await write)
    assert await scene.contents() != before


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_waits_for_a_write_that_has_its_fence_and_sees_all_of_it(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = (await scene.contents())[1:]  # type: ignore[index]
    await scene.a.execute("BEGIN")
    assert not was_refused(await WRITES[name](scene.a.fetch, fence))
    claim = asyncio.ensure_future(scene.claim(fence))
    await scene.until_waiting(scene.b)
    assert (await scene.contents())[1:] == before, "not committed yet"  # type: ignore[index]
    await scene.a.execute("COMMIT")
    taken = await claim
    row = (await scene.store.shards())[0]
    assert row.fence == taken
    changed = (await scene.contents())[1:] != before  # type: ignore[index]
    assert changed or row.low_water == Position(1, 2, 3), "the claim changes the owner and nothing else"


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_waits_for_a_write_of_the_same_owner_and_then_writes(scene: Scene, name: str) -> None:
    """The shard row was changed in the meantime, but not the columns of the fence."""
    fence = await filled(scene)
    await scene.b.execute("BEGIN")
    await WRITES["low water"](scene.b.fetch, fence)
    write = asyncio.ensure_future(WRITES[name](scene.a.fetch, fence))
    await scene.until_waiting(scene.a)
    await scene.b.execute("COMMIT")
    assert not was_refused(await write)
    assert (await scene.store.shards())[0].low_water == Position(1, 2, 3)


@pytest.mark.parametrize("act", ["commit", "claim", "purge", "release"])
async def test_a_write_of_many_shards_checks_the_one_that_it_waited_for(scene: Scene, act: str) -> None:
    fences = [await take(scene.store, shard_id) for shard_id in range(4)]
    await scene.b.execute("BEGIN")
    await postgres_statements.commit(scene.b.fetch, [Batch(fences[1], low_water=Position(1, 2, 3))])
    claims = [Claim(fence.shard_id, fence.version, 77, "b", "host:2", 1) for fence in fences]
    run = scene.a.fetch
    acts: dict[str, Callable[[], Awaitable[list[Any]]]] = {
        "commit": lambda: postgres_statements.commit(
            run, [Batch(f, [make_timer()], low_water=Position(4, 5, 6)) for f in fences]
        ),
        "claim": lambda: postgres_statements.claim(run, claims),
        "purge": lambda: postgres_statements.purge_reached(run, fences, 10, 10),
        "release": lambda: postgres_statements.release(run, fences),
    }
    task = asyncio.ensure_future(acts[act]())
    await scene.until_waiting(scene.a)
    await scene.b.execute("COMMIT")
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


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_after_the_claim_writes_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    taken = await scene.claim(fence)
    before = await scene.contents()
    assert was_refused(await WRITES[name](scene.a.fetch, fence))
    assert await scene.contents() == before
    assert not was_refused(await WRITES[name](scene.a.fetch, taken))


@pytest.mark.parametrize("name", ["put", "everything"])
async def test_without_the_lock_of_the_fence_the_zombie_writes(scene: Scene, name: str) -> None:
    """The tests above can fail: without the lock the same write is applied in the middle of the claim."""
    honest = str(await scene.looking.fetchval("SELECT pg_get_functiondef('shard_fence_holds'::regproc)"))
    without_lock = honest.replace("FOR SHARE", "").replace("FOR NO KEY UPDATE", "")
    assert without_lock != honest
    await scene.looking.execute(without_lock)
    try:
        fence = await filled(scene)
        await scene.b.execute("BEGIN")
        await scene.claim(fence)
        write = asyncio.ensure_future(WRITES[name](scene.a.fetch, fence))
        if name == "put":
            await asyncio.wait_for(write, 10)  # it does not wait at all
        else:
            await scene.until_waiting(scene.a)  # to raise the low water, when all the rest is written
        await scene.b.execute("COMMIT")
        assert not was_refused(await write)
        assert make_timer("new") in await all_timers(scene.store), "the zombie's timer"
    finally:
        await scene.looking.execute(honest)


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
            await store.claim([Claim(shard_id, 99, 1, "x", "y", 1) for shard_id in order])  # never that version

    await asyncio.gather(*(commits(turn) for turn in range(4)), purges(), claims())
    assert len(await all_timers(store)) == 60
    assert await store.release(fences[::-1]) == [None] * 4


async def test_no_plan_reads_more_than_it_needs_even_if_it_was_made_on_an_empty_table(scene: Scene) -> None:
    store, db = scene.store, scene.looking
    for number in range(32):
        await db.execute(f"ALTER TABLE timers_p{number:02} SET (autovacuum_enabled = off)")
    await db.execute("TRUNCATE shards, timers")
    await db.execute("SELECT pg_stat_force_next_flush()")  # creating an index reads the table
    await store.ensure_shards(4)
    await store.close()
    before = await _rows_read(db)
    await store.open()
    fence = await filled(scene)
    await _some_of_everything(store, fence, 0)  # the plans are made here
    for start in range(0, 12_000, 2_000):
        timers = [make_timer(f"n-{n}", n, correlation_id="c") for n in range(start, start + 2_000)]
        await store.commit([Batch(fence, timers)])
    for number in range(1, 20):
        await _some_of_everything(store, fence, number)
    await store.close()
    after = await _rows_read(db)
    assert after[1] == before[1], "no sequential scan"
    assert after[0] - before[0] < 3_000, "20 rounds that read a shard would be 240,000"


async def _some_of_everything(store: PostgresStore, fence: Fence, number: int) -> None:
    timer = make_timer(f"n-{number}", 7, correlation_id="c")
    await store.commit([Batch(fence, [timer], [make_timer(f"n-1{number}").key], [make_reached(timer)])])
    await store.commit([Batch(fence, [timer], low_water=Position(0, 0, number))])
    await store.get_many([(0, timer.key), (0, KEPT.key)])
    await store.load([PageRequest(0, BEFORE_ALL, 1 << 50, 5)])
    await store.purge_reached([fence], 10, 1)
    await store.shards()
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5))
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5, correlation_id="c"))


async def _rows_read(db: asyncpg.Connection[Any]) -> tuple[int, int]:
    """Index entries read in the partitions, and sequential scans, once all sessions have reported by ending."""
    sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'duetime'"
    for _ in range(2_000):
        if not await db.fetchval(sql):
            break
        await asyncio.sleep(0.005)
    await db.execute("SELECT pg_stat_clear_snapshot()")
    return (
        int(await db.fetchval("SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE relname ~ '^timers_p'")),
        int(await db.fetchval("SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname ~ '^timers_p'")),
    )
