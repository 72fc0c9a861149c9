"""PostgreSQL: an old owner that still writes while a new owner claims its shard (zombies.py), on 15 and 18.

Also: what a fence without its lock would let through, and how many rows the statements read.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
from collections.abc import AsyncIterator, Coroutine
from typing import Any, ClassVar

import asyncpg
import pytest
from zombies import FencedWrites, Scene, Session, filled, some_of_everything, was_refused

from duetime.domain.timer import BEFORE_ALL
from duetime.store import Batch, ListQuery, PageRequest
from duetime.stores.postgres import statements as postgres_statements
from duetime.stores.postgres.store import PostgresStore
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers
from servers import fresh_database, postgres


class PostgresSession(Session):
    def __init__(self, db: asyncpg.Connection[Any]) -> None:
        self.db = db
        self.run = db.fetch

    async def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        await self.db.execute("BEGIN")
        task = asyncio.ensure_future(work)
        await asyncio.wait_for(asyncio.shield(task), 10)
        return task

    async def commit(self, begun: asyncio.Future[Any]) -> Any:
        await self.db.execute("COMMIT")
        return await begun

    async def roll_back(self, begun: asyncio.Future[Any]) -> None:
        await self.db.execute("ROLLBACK")

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        return asyncio.ensure_future(work)  # each statement commits itself


class PostgresScene(Scene):
    sql = postgres_statements
    a: PostgresSession
    b: PostgresSession

    def __init__(self, store: PostgresStore, *sessions: asyncpg.Connection[Any]) -> None:
        self.store = store
        self.a, self.b = PostgresSession(sessions[0]), PostgresSession(sessions[1])
        self.looking = sessions[2]

    async def until_waiting(self, session: Session) -> None:
        assert isinstance(session, PostgresSession)
        sql = "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $1"
        for _ in range(2_000):
            if await self.looking.fetchval(sql, session.db.get_server_pid()):
                return
            await asyncio.sleep(0.005)
        raise AssertionError("it does not wait")


class PostgresWrites(FencedWrites):
    VERSION: ClassVar[int]
    url: ClassVar[str] = ""

    @pytest.fixture
    async def scene(self) -> AsyncIterator[PostgresScene]:
        kind = type(self)
        kind.url = kind.url or fresh_database(postgres(self.VERSION))
        store = PostgresStore.from_url(kind.url)
        await store.migrate()
        await store.open()
        sessions = [await asyncpg.connect(kind.url) for _ in range(3)]
        await sessions[2].execute("DELETE FROM timers; DELETE FROM shards")  # faster than TRUNCATE of 33 tables
        await store.ensure_shards(4)
        yield PostgresScene(store, *sessions)
        for session in sessions:
            session.terminate()
        await store.close()

    @pytest.mark.parametrize("name", ["put", "everything"])
    async def test_with_a_fence_that_does_not_lock_the_old_owner_writes(self, scene: PostgresScene, name: str) -> None:
        """So the tests of zombies.py can fail: without the lock the write is applied in the middle of the claim."""
        function = str(await scene.looking.fetchval("SELECT pg_get_functiondef('shard_fence_holds'::regproc)"))
        without_lock = function.replace("FOR SHARE", "").replace("FOR NO KEY UPDATE", "")
        assert without_lock != function
        await scene.looking.execute(without_lock)
        try:
            fence = await filled(scene)
            claim = await scene.b.begin(scene.claim(fence))
            write = scene.a.start(scene.write(scene.a, name, fence))
            if name == "put":
                await asyncio.wait_for(write, 10)  # it does not wait at all
            else:
                await scene.until_waiting(scene.a)  # to raise the low water, after everything else is written
            await scene.b.commit(claim)
            assert not was_refused(await write)
            assert make_timer("new") in await all_timers(scene.store), "the timer of the old owner"
        finally:
            await scene.looking.execute(function)

    async def test_no_plan_reads_more_than_it_needs_even_if_it_was_made_on_an_empty_table(
        self, scene: PostgresScene
    ) -> None:
        store, db = scene.store, scene.looking
        for number in range(32):
            await db.execute(f"ALTER TABLE timers_p{number:02} SET (autovacuum_enabled = off)")
        await db.execute("TRUNCATE shards, timers")
        await db.execute("SELECT pg_stat_force_next_flush()")  # creating indexes reads tables
        await store.ensure_shards(4)
        await store.close()
        before = await _rows_read(db)
        await store.open()
        fence = await filled(scene)
        await some_of_everything(store, fence, 0)  # the plans are made here
        for start in range(0, 12_000, 2_000):
            timers = [make_timer(f"n-{n}", n, correlation_id="c") for n in range(start, start + 2_000)]
            await store.commit([Batch(fence, timers)])
        for number in range(1, 20):
            await some_of_everything(store, fence, number)
        await store.close()
        after = await _rows_read(db)
        assert after[1] == before[1], "no sequential scan"
        assert after[0] - before[0] < 3_000, "20 rounds that read a whole shard would be 240,000"

    async def test_only_payloads_that_are_on_a_page_are_read(self, scene: PostgresScene) -> None:
        """The server stores a long payload apart from its row, in blocks of its own."""
        store, db = scene.store, scene.looking
        await db.execute("TRUNCATE timers")
        fence = await filled(scene)
        payload = json.dumps(base64.b64encode(random.Random(1).randbytes(75_000)).decode())  # hardly compressible
        timers = [make_timer(f"n-{n:02}", 1_000 + n, payload=payload) for n in range(40)]
        await store.commit([Batch(fence, timers)])
        await store.close()

        async def blocks_read(chars_max: int, payloads: bool) -> int:
            await _rows_read(db)  # all sessions have reported
            before = int(await db.fetchval(_BLOCKS_OF_PAYLOADS))
            await store.open()
            await store.load([PageRequest(fence.shard_id, BEFORE_ALL, 1 << 50, 30, chars_max)])
            query = ListQuery(namespace="test", num_shards=4, limit=30, chars_max=chars_max, payloads=payloads)
            await store.list_timers(query)
            await store.close()
            await _rows_read(db)
            return int(await db.fetchval(_BLOCKS_OF_PAYLOADS)) - before

        whole = await blocks_read(1 << 40, True)
        some = await blocks_read(3 * len(payload), True)
        one = await blocks_read(0, False)  # the load has at least one
        assert whole > 5 * some > 5 * one > 0
        assert 60 * one < 1.5 * whole


_BLOCKS_OF_PAYLOADS = (
    "SELECT sum(coalesce(toast_blks_hit, 0) + coalesce(toast_blks_read, 0)) FROM pg_statio_user_tables"
    " WHERE relname ~ '^timers_p'"
)


class TestPostgres15(PostgresWrites):
    VERSION = 15


class TestPostgres18(PostgresWrites):
    VERSION = 18


async def _rows_read(db: asyncpg.Connection[Any]) -> tuple[int, int]:
    """Index entries read in the partitions, and sequential scans, after all sessions have ended and so reported."""
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
