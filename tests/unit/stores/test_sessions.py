"""Sessions with a database: work that fails, hangs, or is cancelled, and its connection."""

from __future__ import annotations

import asyncio
import socket

import pytest

from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.stores import background
from duetime.stores import sessions as session_module
from duetime.stores.sessions import RetryAtOnce, Sessions, enable_keepalive, setup_session


class Connection:
    def __init__(self, number: int) -> None:
        self.number = number
        self.is_closed = False
        self.rolled_back = 0
        self.broke = asyncio.get_running_loop().create_future()

    def terminate(self) -> None:
        self.is_closed = True
        if not self.broke.done():
            self.broke.set_exception(ConnectionAbortedError("terminated"))
            self.broke.exception()


class Harmless(Exception):
    """An error of a statement after which the connection can still be used."""


class Database:
    """A driver that counts its connections."""

    name = "some"

    def __init__(self) -> None:
        self.connections: list[Connection] = []
        self.away: Exception | None = None
        self.may_connect = asyncio.Event()
        self.may_connect.set()
        self.tried = 0
        self.rollback_fails = False
        self.closed: list[int] = []
        self.close_hangs = False

    async def connect(self, within_seconds: float) -> Connection:
        self.tried += 1
        await self.may_connect.wait()
        if self.away is not None:
            raise self.away
        self.connections.append(Connection(len(self.connections) + 1))
        return self.connections[-1]

    def is_closed(self, connection: Connection) -> bool:
        return connection.is_closed

    def terminate(self, connection: Connection) -> None:
        assert connection is not None, "only of a connection that there is"
        connection.terminate()

    async def close(self, connection: Connection) -> None:
        self.closed.append(connection.number)
        if self.close_hangs:
            await asyncio.Event().wait()

    async def rollback(self, connection: Connection) -> None:
        if self.rollback_fails:
            raise OSError("gone")
        connection.rolled_back += 1

    def setup_error(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"refused: {error}")

    def failure(self, error: Exception, *, writing: bool) -> tuple[StoreError, bool]:
        if isinstance(error, Harmless):
            return StoreUnavailable(str(error)), True
        return (OutcomeUnknown if writing else StoreUnavailable)(str(error)), False


@pytest.fixture
async def database() -> Database:
    return Database()


def sessions_with(database: Database, count: int = 1, deadline_seconds: float = 60.0) -> Sessions[Connection]:
    return Sessions(database, count, deadline_seconds)


async def everybody_waits() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def number_of(connection: Connection) -> int:
    return connection.number


async def hangs(connection: Connection) -> None:
    await connection.broke


async def refused(connection: Connection) -> int:
    raise Harmless("no such table")


async def breaks(connection: Connection) -> int:
    raise ConnectionResetError("reset")


async def test_work_of_one_session_shares_its_connection(database: Database) -> None:
    sessions = sessions_with(database)
    assert await asyncio.gather(*(sessions.read(number_of) for _ in range(5))) == [1] * 5
    await sessions.close()
    assert database.connections[0].is_closed


async def test_the_least_busy_session_takes_the_work(database: Database) -> None:
    sessions = sessions_with(database, 2)
    stuck = asyncio.ensure_future(sessions.read(hangs))
    await everybody_waits()
    assert [await sessions.read(number_of) for _ in range(3)] == [2, 2, 2]
    sessions.drop_connections()
    with pytest.raises(StoreUnavailable):
        await stuck
    assert await sessions.read(number_of) == 3


async def test_a_rejected_statement_keeps_the_connection_and_a_lost_connection_is_replaced(database: Database) -> None:
    sessions = sessions_with(database)
    with pytest.raises(StoreUnavailable, match="no such table"):
        await sessions.write(refused)
    assert await sessions.read(number_of) == 1
    with pytest.raises(OutcomeUnknown):
        await sessions.write(breaks)
    assert await sessions.read(number_of) == 2
    database.connections[1].terminate()  # while it was not used
    assert await sessions.read(number_of) == 3


async def test_work_that_fails_before_its_commit_was_not_applied_and_is_rolled_back(database: Database) -> None:
    sessions = sessions_with(database)

    async def commit(_: Connection) -> None:
        raise AssertionError("there is nothing to commit")

    async def fenced(_: Connection) -> int:
        raise ShardLost("shard 3")

    with pytest.raises(StoreUnavailable):
        await sessions.write(refused, commit)
    with pytest.raises(ShardLost):
        await sessions.write(fenced, commit)
    assert (await sessions.read(number_of), database.connections[0].rolled_back) == (1, 2)
    with pytest.raises(StoreUnavailable):
        await sessions.write(breaks, commit)
    assert (await sessions.read(number_of), database.connections[0].rolled_back) == (2, 2)
    database.rollback_fails = True
    with pytest.raises(StoreUnavailable):
        await sessions.write(refused, commit)
    assert await sessions.read(number_of) == 3


async def test_committed_work_returns_its_result(database: Database) -> None:
    committed: list[int] = []

    async def commit(connection: Connection) -> None:
        committed.append(connection.number)

    sessions = sessions_with(database)
    assert await sessions.write(number_of, commit) == 1
    assert await sessions.read(number_of, commit) == 1
    assert committed == [1, 1]


async def test_a_commit_that_fails_has_an_unknown_outcome(database: Database) -> None:
    sessions = sessions_with(database)

    async def commit(connection: Connection) -> None:
        await breaks(connection)

    with pytest.raises(OutcomeUnknown):
        await sessions.write(number_of, commit)
    with pytest.raises(StoreUnavailable):
        await sessions.read(number_of, commit)
    assert database.connections[0].rolled_back == 0


@pytest.mark.parametrize("before_the_commit", [True, False])
async def test_after_the_deadline_the_connection_is_terminated(database: Database, before_the_commit: bool) -> None:
    """Work that hangs may be applied, except before its commit."""
    sessions = sessions_with(database, deadline_seconds=0.02)
    with pytest.raises(StoreUnavailable, match=r"some: no answer within 0\.02 s"):
        await sessions.read(hangs)
    if before_the_commit:
        with pytest.raises(StoreUnavailable, match="no answer"):
            await sessions.write(hangs, hangs)
    else:
        with pytest.raises(OutcomeUnknown, match="no answer"):
            await sessions.write(number_of, hangs)
    assert await sessions.read(number_of) == 3


async def test_a_deadline_that_has_passed_does_not_affect_the_next_work(database: Database) -> None:
    """A driver that does not report the end of a connection: a later error is one of the server."""
    sessions = sessions_with(database, deadline_seconds=0.02)

    async def hangs_and_is_refused(connection: Connection) -> int:
        await asyncio.wait({connection.broke})
        connection.is_closed = False
        return await refused(connection)

    with pytest.raises(StoreUnavailable, match="no answer"):
        await sessions.read(hangs_and_is_refused)
    assert await sessions.read(number_of) == 2, "it was thrown away however good it looks"
    with pytest.raises(StoreUnavailable, match="no such table"):
        await sessions.read(refused)
    await asyncio.sleep(0.05)
    assert await sessions.read(number_of) == 2, "the deadline of work that has ended is nobody's"


async def test_a_deadline_does_nothing_if_the_connection_was_dropped_before(database: Database) -> None:
    sessions = sessions_with(database, deadline_seconds=0.01)
    problems: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: problems.append(context))
    background, passed = asyncio.Event(), asyncio.Event()

    async def answers_all_the_same(connection: Connection) -> int:
        background.set()
        await passed.wait()
        return connection.number

    working = asyncio.ensure_future(sessions.read(answers_all_the_same))
    await background.wait()
    sessions.drop_connections()
    loop.call_later(0.03, passed.set)
    assert await working == 1
    assert problems == []
    assert await sessions.read(number_of) == 2


async def test_without_a_connection_there_is_nothing_to_drop_or_close(database: Database) -> None:
    sessions = sessions_with(database, 2)
    sessions.drop_connections()
    await sessions.close()
    assert (database.closed, database.connections) == ([], [])


@pytest.mark.parametrize("hangs_too", [False, True])
async def test_a_connection_is_closed_and_then_terminated_even_if_the_close_fails(
    database: Database, hangs_too: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "CLOSE_SECONDS", 0.01)
    database.close_hangs = hangs_too
    sessions = sessions_with(database)
    await sessions.read(number_of)
    await sessions.close()
    await sessions.close()
    assert database.closed == [1]
    assert database.connections[0].is_closed


async def test_when_the_event_loop_ends_the_connection_of_running_work_is_dropped(database: Database) -> None:
    sessions = sessions_with(database)
    background = asyncio.Event()

    async def slow(_: Connection) -> None:
        background.set()
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    caller = asyncio.ensure_future(sessions.write(slow))
    await background.wait()
    ended = asyncio.all_tasks() - before
    for task in ended:
        task.cancel()
    await asyncio.wait(ended)
    assert all(task.cancelled() for task in ended)
    assert caller in ended
    assert database.connections[0].is_closed
    assert await sessions.read(number_of) == 2


async def test_work_is_finished_if_its_caller_is_cancelled(database: Database) -> None:
    sessions = sessions_with(database)
    background, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_: Connection) -> None:
        background.set()
        await may_end.wait()
        ended.set()

    caller = asyncio.ensure_future(sessions.write(slow))
    await background.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    following = asyncio.ensure_future(sessions.read(number_of))
    await everybody_waits()
    assert not following.done(), "one piece of work at a time"
    may_end.set()
    assert await following == 1
    assert ended.is_set()


async def test_work_that_waited_for_a_failed_connect_fails_and_the_next_work_connects(database: Database) -> None:
    sessions = sessions_with(database)
    database.away = OSError("nobody there")
    database.may_connect.clear()
    several = [asyncio.ensure_future(sessions.read(number_of)) for _ in range(4)]
    await everybody_waits()
    database.may_connect.set()
    for one in several:
        with pytest.raises(StoreUnavailable, match="refused: nobody there"):
            await one
    assert database.tried == 1
    database.away = None
    assert await sessions.read(number_of) == 1


async def test_work_that_arrives_at_the_time_of_a_failed_connect_fails_too(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some event loops count in milliseconds."""
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: 5.0)
    sessions = sessions_with(database)
    database.away = OSError("nobody there")
    several = [asyncio.ensure_future(sessions.read(number_of)) for _ in range(4)]
    await asyncio.wait(several)
    assert database.tried == 1


async def test_a_deadlock_is_retried_from_the_start_and_then_raised(database: Database) -> None:
    sessions = sessions_with(database)
    tries = 0

    async def work(_: Connection) -> int:
        nonlocal tries
        tries += 1
        if tries < 3 or tries > 10:
            raise RetryAtOnce("deadlock")
        return tries

    started_at = asyncio.get_running_loop().time()
    assert await sessions.write(work) == 3
    assert asyncio.get_running_loop().time() - started_at > 0.05, "with a pause that grows, so that the other one ends"
    tries = 20
    with pytest.raises(RetryAtOnce):
        await sessions.write(work)
    assert tries == 23


async def test_close_waits_for_running_work_and_no_new_work_is_started(database: Database) -> None:
    sessions = sessions_with(database)
    background, may_end = asyncio.Event(), asyncio.Event()

    async def slow(connection: Connection) -> int:
        background.set()
        await may_end.wait()
        assert not connection.is_closed
        return connection.number

    under_way = asyncio.ensure_future(sessions.write(slow))
    await background.wait()
    closing = asyncio.ensure_future(sessions.close())
    await everybody_waits()
    may_end.set()
    assert await under_way == 1
    await closing
    assert database.connections[0].is_closed
    with pytest.raises(StoreUnavailable, match="closed"):
        await sessions.read(number_of)


async def test_a_connection_that_is_established_after_its_session_was_closed_is_closed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.01)
    sessions = sessions_with(database)
    database.may_connect.clear()
    work = asyncio.ensure_future(sessions.read(number_of))
    await everybody_waits()
    await sessions.close()
    database.may_connect.set()
    with pytest.raises(StoreUnavailable, match="closed"):
        await work
    assert [connection.is_closed for connection in database.connections] == [True]


async def test_work_that_waits_for_its_connection_when_its_session_is_closed_is_still_done(database: Database) -> None:
    sessions = sessions_with(database)
    database.may_connect.clear()
    work = asyncio.ensure_future(sessions.read(number_of))
    await everybody_waits()
    closing = asyncio.ensure_future(sessions.close())
    await everybody_waits()
    database.may_connect.set()
    assert await work == 1
    await closing
    assert database.connections[0].is_closed


def test_keepalive_is_set_on_tcp_sockets_only() -> None:
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix:
        enable_keepalive(tcp)
        enable_keepalive(unix)
        enable_keepalive(None)
        assert tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert tcp.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        assert not unix.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


async def test_a_setup_session_explains_errors_of_the_driver_and_closes_its_connection(database: Database) -> None:
    async with setup_session(database) as connection:
        assert not connection.is_closed
    assert (database.closed, connection.is_closed) == ([1], True)
    with pytest.raises(StoreUnavailable, match="refused: wrong"):
        async with setup_session(database, database.connect(1.0)):
            raise ValueError("wrong")
    with pytest.raises(ShardLost):
        async with setup_session(database):
            raise ShardLost("not an error of the driver")
    assert database.closed == [1, 2, 3]
    database.away = OSError("away")
    with pytest.raises(StoreUnavailable, match="refused: away"):
        async with setup_session(database):
            pytest.fail("there is no connection")
    assert database.closed == [1, 2, 3]
