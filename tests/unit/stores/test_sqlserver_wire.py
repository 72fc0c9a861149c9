"""SqlServerStore and its driver with a fake server that knows no SQL: errors, and lost answers.

Skipped where Microsoft's ODBC driver cannot be loaded: it needs libltdl of the system (Debian: libltdl7).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import mssql_python
import pytest
from scripts.servers.install import CannotInstall, debian_package
from tds_server import TdsServer, done, error, failed, more, null, numbers

from duetime.errors import OutcomeUnknown, SchemaMismatch, SetupError, ShardLost, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed, Fence
from duetime.stores.sessions import RetryAtOnce
from duetime.stores.sqlserver import connection as sqlserver_connection
from duetime.stores.sqlserver import schema as sqlserver_schema
from duetime.stores.sqlserver import statements as sqlserver_statements
from duetime.stores.sqlserver.connection import AbandonedThreads, Connection, SessionPool, address_of, connect, execute
from duetime.stores.sqlserver.errors import setup_error
from duetime.testing import make_timer

BATCHES = [Batch(Fence(0, 1, 1), [make_timer("ü")])]


@pytest.fixture(scope="module", autouse=True)
def _driver() -> None:
    with suppress(CannotInstall):
        debian_package("libltdl7", Path("/usr/lib/x86_64-linux-gnu/libltdl.so.7"))
    try:
        mssql_python.connect("Server=127.0.0.1,1;Database=x;UID=x;PWD=x;Encrypt=no;ConnectRetryCount=0", timeout=1)
    except mssql_python.Error as failure:
        if "Failed to load the driver" in str(failure):
            pytest.skip("Microsoft's ODBC driver cannot be loaded: apt install libltdl7")


@pytest.fixture
def lines() -> Iterator[list[SessionPool]]:
    made: list[SessionPool] = []
    yield made
    for line in made:
        line.drop_connections()


def line_to(server: TdsServer, lines: list[SessionPool], deadline_seconds: float = 5.0) -> SessionPool:
    lines.append(SessionPool(address_of(server.url()), 1, deadline_seconds, 3.0))
    return lines[-1]


def settings(said: str) -> bytes | None:
    """The answers to the first statements of a connection."""
    if "SET LANGUAGE" in said:
        return done()
    return numbers((7,)) + done() if "recovery_fork_guid" in said else None


def answering(answer: bytes | None) -> TdsServer:
    return TdsServer(lambda said: settings(said) or answer)


async def test_a_commit_is_one_call_with_one_text_of_any_length(lines: list[SessionPool]) -> None:
    with answering(numbers((0,)) + more() + numbers((0,)) + done()) as server:
        write = line_to(server, lines).write
        for payload in (None, "x" * 300_000, '"ü😀"'):
            batches = [Batch(Fence(0, 1, 1), [make_timer(payload=payload)])]
            assert await sqlserver_statements.commit(write, batches) == [Committed(frozenset({0}))]
            assert payload is None or payload.strip('"') in server.said[-1]
        assert len(server.said) == 2 + 3, "what a connection says at its beginning, and a call for each"


@pytest.mark.parametrize(
    ("number", "text", "severity", "kind"),
    [
        (2627, "Violation of PRIMARY KEY constraint", 14, StoreUnavailable),
        (1105, "Could not allocate space for object", 17, StoreUnavailable),
        (9002, "The transaction log for database 'x' is full", 17, StoreUnavailable),
        (208, "Invalid object name 'timers'.", 16, StoreUnavailable),
        (2628, "String or binary data would be truncated in table 'timers', column 'timer_id'.", 16, StoreUnavailable),
        (8152, "String or binary data would be truncated.", 16, StoreUnavailable),
        (1205, "Transaction (Process ID 55) was deadlocked on lock resources with another process", 13, RetryAtOnce),
        (1222, "Lock request time out period exceeded.", 16, RetryAtOnce),
        (1222, "Lock request time out period exceeded.", 19, RetryAtOnce),
        (10928, "Resource ID : 1. The request limit for the database is 60 and has been reached.", 16, StoreThrottled),
        (596, "Cannot continue the execution because the session is in the kill state.", 21, OutcomeUnknown),
        (6005, "SHUTDOWN is in progress.", 20, OutcomeUnknown),
    ],
)
async def test_what_an_error_in_the_middle_of_a_commit_means(
    lines: list[SessionPool], number: int, text: str, severity: int, kind: type[Exception]
) -> None:
    with answering(failed(number, text, severity)) as server, pytest.raises(kind, match=re.escape(text[:20])):
        await sqlserver_statements.commit(line_to(server, lines).write, BATCHES)


async def test_an_error_of_a_later_statement_is_raised(lines: list[SessionPool]) -> None:
    """The first statement has succeeded, and the driver raises nothing until the next result is read."""
    answer = numbers((0,)) + more() + failed(2627, "Violation of PRIMARY KEY constraint", 14)
    with answering(answer) as server, pytest.raises(StoreUnavailable, match="PRIMARY KEY"):
        await sqlserver_statements.commit(line_to(server, lines).write, BATCHES)


async def test_a_deadlock_is_retried(lines: list[SessionPool]) -> None:
    answers = [failed(1205, "was deadlocked", 13), failed(1222, "Lock request time out period exceeded.")]
    answers.append(numbers((0,)) + more() + done())
    with TdsServer(lambda said: settings(said) or answers.pop(0)) as server:
        [result] = await sqlserver_statements.commit(line_to(server, lines).write, BATCHES)
        assert result == Committed()
        assert not answers


async def test_a_fence_that_fails_is_shard_lost(lines: list[SessionPool]) -> None:
    with answering(numbers((5,)) + done()) as server:
        [result] = await sqlserver_statements.release(line_to(server, lines).write, [Fence(0, 1, 1)])
        assert isinstance(result, ShardLost)


async def test_a_commit_whose_answer_is_lost_is_unknown_and_the_next_one_reconnects(
    lines: list[SessionPool],
) -> None:
    heard: list[str] = []

    def answer(said: str) -> bytes | None:
        if known := settings(said):
            return known
        heard.append(said)
        return None if len(heard) == 1 else numbers((0,)) + more() + done()

    with TdsServer(answer) as server:
        write = line_to(server, lines).write
        with pytest.raises(OutcomeUnknown):
            await sqlserver_statements.commit(write, BATCHES)
        assert len(heard) == 1, "nothing is said twice in secret"
        assert await sqlserver_statements.commit(write, BATCHES) == [Committed()]


async def test_a_commit_without_an_answer_in_time_is_unknown_and_blocks_nothing(lines: list[SessionPool]) -> None:
    may_answer = threading.Event()

    def answer(said: str) -> bytes | None:
        if known := settings(said):
            return known
        if "$.fences" in said:
            may_answer.wait(20)
            return numbers((0,)) + more() + done()
        return numbers((1, 1_700_000_000_000)) + done()

    with TdsServer(answer) as server:
        write = line_to(server, lines, deadline_seconds=0.5).write
        membership = line_to(server, lines).write
        waiting = asyncio.ensure_future(sqlserver_statements.commit(write, BATCHES))
        assert await sqlserver_statements.heartbeat(membership, "me", 1, "") == (1_700_000_000_000, "7")
        with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.5 s"):
            await asyncio.wait_for(waiting, 10)
        may_answer.set()
        assert await sqlserver_statements.commit(write, BATCHES) == [Committed()]


@pytest.mark.parametrize(
    ("number", "text", "severity", "says"),
    [
        (18456, "Login failed for user 'me'.", 14, "rejects the user or the password"),
        (4060, 'Cannot open database "test" requested by the login. The login failed.', 11, "does not exist"),
    ],
)
async def test_a_rejected_login_is_explained(number: int, text: str, severity: int, says: str) -> None:
    with TdsServer(lambda said: None, login=error(number, text, severity) + done(0x02)) as server:
        address = address_of(server.url())
        with pytest.raises(mssql_python.Error) as caught:
            await connect(address)
        explained = setup_error(address.label, caught.value)
        assert isinstance(explained, SetupError)
        assert says in explained.detail
        assert "secret" not in explained.detail


async def test_results_come_in_the_order_of_the_batch(lines: list[SessionPool]) -> None:
    with answering(numbers((1, 2), (3, 4)) + more() + numbers((5,)) + done()) as server:
        found = await line_to(server, lines).read(lambda db: execute(db, "SELECT …"))
        assert found == [[(1, 2), (3, 4)], [(5,)]]
        assert sqlserver_connection.FETCH_ROWS > 1


async def test_a_call_discards_the_previously_prepared_statement_in_the_same_message(
    lines: list[SessionPool],
) -> None:
    """The driver prepares the statement again with every call. Without this, they would accumulate on the server."""
    with answering(numbers((0,)) + more() + numbers((0,)) + done()) as server:
        write = line_to(server, lines).write
        for _ in range(5):
            await sqlserver_statements.commit(write, BATCHES)
        assert len(server.said) == 2 + 5
        assert len(server.prepared) <= 1


# --- a server that does not answer, and does not confirm that it was told to stop ----------------


@pytest.fixture
def deaf() -> Iterator[TdsServer]:
    """Answers the login and the settings, and then nothing: neither statements nor the signal to cancel them."""
    with TdsServer(lambda said: settings(said) or b"", attention=False) as server:
        yield server


async def test_a_call_has_a_limit_also_if_the_driver_waits_without_one(deaf: TdsServer) -> None:
    """The limit of the driver, a second, is over long before; it waits for the server to confirm the cancellation."""
    abandoned = AbandonedThreads(8)
    db = await connect(address_of(deaf.url()), 3.0, 1, limit_seconds=2.0, abandoned=abandoned)
    with pytest.raises(TimeoutError, match="no answer within 2 s"):
        await asyncio.wait_for(db.run(lambda db: execute(db, "SELECT …")), 10)
    assert db.is_closed
    assert abandoned.count == 1, "its thread is with the driver still"
    with pytest.raises(ConnectionAbortedError):
        await db.run(lambda db: None)


async def test_a_cancelled_caller_terminates_the_connection(deaf: TdsServer) -> None:
    db = await connect(address_of(deaf.url()))
    waiting = asyncio.ensure_future(db.run(lambda db: execute(db, "SELECT …")))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert db.is_closed


async def test_a_terminated_write_is_unknown_and_the_next_one_has_a_new_connection(
    deaf: TdsServer, lines: list[SessionPool]
) -> None:
    heard: list[str] = []

    def answer(said: str) -> bytes:
        if known := settings(said):
            return known
        heard.append(said)
        return b"" if len(heard) == 1 else numbers((0,)) + more() + done()

    deaf.answer = answer
    write = line_to(deaf, lines, deadline_seconds=0.5).write
    with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.5 s"):
        await asyncio.wait_for(sqlserver_statements.commit(write, BATCHES), 10)
    lines[0]._sessions._sessions[0]._deadline_seconds = 60.0  # the next one is answered, even if slowly
    assert await sqlserver_statements.commit(write, BATCHES) == [Committed()]


async def test_abandoned_threads_are_counted_and_limited() -> None:
    abandoned = AbandonedThreads(2)
    may_end = threading.Event()

    async def hangs() -> None:
        db = Connection(abandoned, limit_seconds=0.05)
        with pytest.raises(TimeoutError):
            await db.run(lambda db: may_end.wait(20))

    await asyncio.gather(hangs(), hangs())
    assert abandoned.count == 2
    with pytest.raises(StoreUnavailable, match="2 threads are blocked"):
        await connect(address_of("sqlserver://me:secret@127.0.0.1:1/test"), abandoned=abandoned)
    may_end.set()
    while abandoned.count:  # each ends by itself
        await asyncio.sleep(0.01)
    abandoned.check()


async def test_a_pool_whose_server_does_not_answer_stops_opening_connections(
    deaf: TdsServer, lines: list[SessionPool]
) -> None:
    deaf.answer = lambda said: b""  # not even its settings
    line = SessionPool(address_of(deaf.url()), 1, 5.0, 0.01)
    lines.append(line)
    refusals = []
    for _ in range(sqlserver_connection.ABANDONED_MAX + 2):
        with pytest.raises(StoreUnavailable) as caught:
            await sqlserver_statements.members(line.read)
        refusals.append(caught.value.detail)
    assert "threads are blocked" in refusals[-1]
    assert "threads are blocked" not in refusals[0]


# --- rights --------------------------------------------------------------------------------------


def found(**answers: bytes) -> TdsServer:
    """A database without a schema that this user can see. `answers`: results of statements that contain the key."""

    def answer(said: str) -> bytes:
        if known := settings(said):
            return known
        for word, told in answers.items():
            if word in said:
                return told
        return (null() if "OBJECT_ID" in said else numbers((150,))) + done()

    return TdsServer(answer)


@pytest.mark.parametrize("act", [sqlserver_schema.check, sqlserver_schema.migrate])
async def test_tables_that_are_hidden_from_this_user_are_not_taken_for_missing(act: Any) -> None:
    denied = "The SELECT permission was denied on the object 'duetime_schema', database 'test', schema 'dbo'."
    with found(TOP=failed(229, denied, 14)) as server, pytest.raises(SetupError) as caught:
        await act(address_of(server.url()))
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON SCHEMA::dbo TO" in caught.value.detail
    assert "has the tables already" in caught.value.detail
    assert not any("BEGIN TRANSACTION" in said for said in server.said)


async def test_tables_that_are_missing_are_reported_as_missing() -> None:
    missing = failed(208, "Invalid object name 'duetime_schema'.")
    with found(TOP=missing) as server, pytest.raises(SchemaMismatch, match="no tables yet"):
        await sqlserver_schema.check(address_of(server.url()))


async def test_the_right_that_is_missing_is_named() -> None:
    answers = {"OBJECT_ID": numbers((1,)) + done(), "MAX(version)": numbers((1,)) + done()}
    no_delete = {"'DELETE'": null() + done()}
    with found(**no_delete, **answers) as server, pytest.raises(SetupError, match="user to DELETE in shards; GRANT"):
        await sqlserver_schema.check(address_of(server.url()))
