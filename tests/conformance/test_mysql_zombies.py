"""MariaDB, MySQL and TiDB: an old owner that still writes while a new owner claims its shard (zombies.py).

Also: what half a fence would let through, how long a session that has stopped holds its shards, and how many rows the
statements read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, ClassVar

import pytest
from zombies import KEPT, FencedWrites, Scene, Session, filled, some_of_everything, was_refused

from duetime.domain.timer import BEFORE_ALL, Position
from duetime.store import Batch, Claim, Committed, PageRequest
from duetime.stores.mysql import connection as mysql_connection
from duetime.stores.mysql import schema as mysql_schema
from duetime.stores.mysql import statements as mysql_statements
from duetime.stores.mysql.connection import HOLD_SECONDS, execute
from duetime.stores.mysql.store import MySqlStore
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_timers
from servers import fresh_database, require

INNODB_WAITS = "information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT' AND trx_mysql_thread_id = {}"
TIDB_WAITS = "information_schema.tidb_trx WHERE state = 'LockWaiting' AND session_id = {}"


class MySqlSession(Session):
    """Its transactions, when they have their locks, wait until they may commit."""

    def __init__(self, db: Any) -> None:
        self.db = db
        self.run = self._write
        self._has_locks = asyncio.Event()
        self._may_end = asyncio.Event()
        self._rolls_back = False

    async def _write(self, work: Any, commit: Any = None, /) -> Any:
        answer = await work(self.db)
        self._has_locks.set()
        await self._may_end.wait()
        if self._rolls_back:
            await execute(self.db, ("ROLLBACK",))
        elif commit is not None:
            await commit(self.db)
        return answer

    async def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        self._has_locks.clear()
        self._may_end.clear()
        task = asyncio.ensure_future(work)
        signal = asyncio.ensure_future(self._has_locks.wait())
        await asyncio.wait({task, signal}, return_when="FIRST_COMPLETED")
        signal.cancel()
        return task

    async def commit(self, begun: asyncio.Future[Any]) -> Any:
        self._may_end.set()
        return await asyncio.wait_for(begun, 20)

    async def roll_back(self, begun: asyncio.Future[Any]) -> None:
        self._rolls_back = True
        await self.commit(begun)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        self._may_end.set()
        return asyncio.ensure_future(work)


class MySqlScene(Scene):
    sql = mysql_statements
    a: MySqlSession
    b: MySqlSession

    def __init__(self, store: MySqlStore, waits: str, a: Any, b: Any, looking: Any) -> None:
        self.store, self.looking = store, looking
        self.a, self.b = MySqlSession(a), MySqlSession(b)
        self._waits = waits

    async def until_waiting(self, session: Session) -> None:
        assert isinstance(session, MySqlSession)
        for _ in range(100):
            [rows] = await execute(self.looking, (f"SELECT 1 FROM {self._waits.format(session.db.thread_id())}",))
            if rows:
                return
            # InnoDB refreshes its table of transactions only if nobody has read it for 0.1 s.
            await asyncio.sleep(0.12)
        raise AssertionError("it does not wait")


class MySqlWrites(FencedWrites):
    SERVER: ClassVar[str]
    WAITS: ClassVar[str] = INNODB_WAITS  # the rows that say that a session waits for a lock
    url: ClassVar[str] = ""

    @pytest.fixture
    async def scene(self) -> AsyncIterator[MySqlScene]:
        kind = type(self)
        kind.url = kind.url or fresh_database(require(self.SERVER))
        store = MySqlStore.from_url(kind.url)
        address = mysql_connection.address_of(kind.url)
        await store.migrate()
        await mysql_schema.wipe(address)
        await store.open()
        await store.ensure_shards(4)
        sessions = [await mysql_connection.connect(address) for _ in range(3)]
        yield MySqlScene(store, self.WAITS, *sessions)
        for session in sessions:
            await session.ensure_closed()
        await store.close()

    async def test_a_write_that_had_to_wait_sees_what_the_other_one_has_written(self, scene: MySqlScene) -> None:
        """What it reads after it got the lock is of that moment, and not of the moment when it began."""
        fence = await filled(scene)
        new, gone = make_timer("new", 7), make_timer("gone")
        other = await scene.b.begin(
            mysql_statements.commit(scene.b.run, [Batch(fence, [make_timer("new"), gone], [KEPT.key])])
        )
        write = scene.a.start(
            mysql_statements.commit(scene.a.run, [Batch(fence, [make_timer("kept", 9), new], [gone.key])])
        )
        await scene.until_waiting(scene.a)
        await scene.b.commit(other)
        assert await write == [Committed(frozenset({1}))]
        assert await all_timers(scene.store) == [new, make_timer("kept", 9)]

    @pytest.mark.parametrize("name", ["put", "everything"])
    @pytest.mark.parametrize("broken", ["no lock", "no comparison"])
    async def test_with_half_a_fence_the_old_owner_writes(
        self, scene: MySqlScene, monkeypatch: pytest.MonkeyPatch, name: str, broken: str
    ) -> None:
        """So the tests of zombies.py can fail: with either half of the fence missing the write is applied."""
        locking = mysql_statements._lock_sql
        fence = await filled(scene)
        claim = await scene.b.begin(scene.claim(fence))
        if broken == "no lock":
            monkeypatch.setattr(mysql_statements, "_lock_sql", lambda ids: locking(ids).replace(" FOR UPDATE", ""))
            write = await scene.a.begin(scene.write(scene.a, name, fence))  # it does not wait at all
            await scene.b.commit(claim)
        else:
            monkeypatch.setattr(
                mysql_statements, "_owned_shards", lambda rows, fences: {fence.shard_id for fence in fences}
            )
            await scene.b.commit(claim)
            write = await scene.a.begin(scene.write(scene.a, name, fence))
        assert not was_refused(await scene.a.commit(write))
        assert make_timer("new") in await all_timers(scene.store), "the timer of the old owner"

    async def test_what_fails_after_the_commit_does_not_make_the_commit_fail(
        self, scene: MySqlScene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is sent in one message with the commit. The commit is done: reported as failed it would be repeated."""
        fence = await filled(scene)
        monkeypatch.setattr(mysql_connection, "_AFTER_COMMIT", "SET SESSION wait_timeout = nonsense")
        [answer] = await scene.store.commit([Batch(fence, [make_timer("new"), make_timer("kept", 9)])])
        assert isinstance(answer, Committed)
        assert answer.replaced == {1}
        monkeypatch.undo()
        assert make_timer("new") in await all_timers(scene.store)

    async def test_an_owner_that_stops_in_the_middle_of_a_write_holds_its_shards_for_seconds_only(
        self, scene: MySqlScene
    ) -> None:
        """Frozen, or cut off from a server that does not notice: the server ends its transaction, and others go on."""
        fence = await filled(scene)
        before = await scene.rows()
        write = await scene.a.begin(scene.write(scene.a, "everything", fence))
        started = asyncio.get_running_loop().time()
        [row] = await scene.store.claim([Claim(0, fence.version, -7, "b", "host:2", 1)])
        waited = asyncio.get_running_loop().time() - started
        assert row is not None
        assert row.nonce == -7
        assert waited < HOLD_SECONDS + 2
        with pytest.raises(Exception, match=r"Lost connection|gone away|Inactive|inactivity|2013|2006|1927|4031"):
            await scene.a.commit(write)
        assert await scene.rows() == before


class InnoDbWrites(MySqlWrites):
    async def test_nothing_reads_more_than_it_needs_even_if_there_are_no_statistics(self, scene: MySqlScene) -> None:
        store = scene.store
        fence = await filled(scene)
        for start in range(0, 12_000, 1_000):
            timers = [make_timer(f"n-{n}", n, correlation_id="c") for n in range(start, start + 1_000)]
            await store.commit([Batch(fence, timers, (), [make_reached(timer) for timer in timers])])
        before = await _rows_read(scene)
        for number in range(20):
            await some_of_everything(store, fence, number)
            await store.get_many([(0, make_timer(f"x-{n}").key) for n in range(60)])
            middle = PageRequest(0, Position(6_000, 0, 0), 1 << 50, 5)
            await store.load([middle, PageRequest(1, BEFORE_ALL, 1 << 50, 5)])
        assert await _rows_read(scene) - before < 8_000, "20 rounds that read a whole shard would be 240,000"


class TestMariaDb(InnoDbWrites):
    SERVER = "mariadb"


class TestMySql(InnoDbWrites):
    SERVER = "mysql"


@pytest.mark.tidb
class TestTiDb(MySqlWrites):
    SERVER = "tidb"
    WAITS = TIDB_WAITS


async def _rows_read(scene: MySqlScene) -> int:
    """By all sessions, in whatever way."""
    [rows] = await execute(scene.looking, ("SHOW GLOBAL STATUS LIKE 'Handler_read%'",))
    return sum(int(value) for name, value in rows if name != "Handler_read_retry")
