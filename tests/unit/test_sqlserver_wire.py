"""SqlServerStore and its driver before a server that knows no SQL: what becomes of errors, and of lost answers.

Skipped where Microsoft's ODBC driver cannot be loaded: it needs libltdl of the system (Debian: libltdl7).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import mssql_python
import pytest
from scripts.servers.install import CannotInstall, debian_package
from tds_server import TdsServer, done, error, failed, more, numbers

from duetime.errors import OutcomeUnknown, SetupError, ShardLost, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed, Fence
from duetime.stores import sqlserver_link, sqlserver_sql
from duetime.stores.sqlserver_link import Line, address_of, ask, connect, setup_error
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
def lines() -> Iterator[list[Line]]:
    made: list[Line] = []
    yield made
    for line in made:
        line.drop_connections()


def line_to(server: TdsServer, lines: list[Line], deadline_seconds: float = 5.0) -> Line:
    lines.append(Line(address_of(server.url()), 1, deadline_seconds, 3.0))
    return lines[-1]


def settings(said: str) -> bytes | None:
    """What a connection says of itself at its beginning."""
    if "SET LANGUAGE" in said:
        return done()
    return numbers((7,)) + done() if "recovery_fork_guid" in said else None


def answering(answer: bytes | None) -> TdsServer:
    return TdsServer(lambda said: settings(said) or answer)


async def test_a_commit_is_one_call_with_one_text_of_any_length(lines: list[Line]) -> None:
    with answering(numbers((0,)) + more() + numbers((0,)) + done()) as server:
        write = line_to(server, lines).write
        for payload in (None, "x" * 300_000, '"ü😀"'):
            batches = [Batch(Fence(0, 1, 1), [make_timer(payload=payload)])]
            assert await sqlserver_sql.commit(write, batches) == [Committed(frozenset({0}))]
            assert payload is None or payload.strip('"') in server.said[-1]
        assert len(server.said) == 2 + 3, "what a connection says at its beginning, and a call for each"


@pytest.mark.parametrize(
    ("number", "text", "severity", "kind"),
    [
        (2627, "Violation of PRIMARY KEY constraint", 14, StoreUnavailable),
        (1105, "Could not allocate space for object", 17, StoreUnavailable),
        (9002, "The transaction log for database 'x' is full", 17, StoreUnavailable),
        (208, "Invalid object name 'timers'.", 16, StoreUnavailable),
        (10928, "Resource ID : 1. The request limit for the database is 60 and has been reached.", 16, StoreThrottled),
        (596, "Cannot continue the execution because the session is in the kill state.", 21, OutcomeUnknown),
        (6005, "SHUTDOWN is in progress.", 20, OutcomeUnknown),
    ],
)
async def test_what_an_error_in_the_middle_of_a_commit_means(
    lines: list[Line], number: int, text: str, severity: int, kind: type[Exception]
) -> None:
    with answering(failed(number, text, severity)) as server, pytest.raises(kind, match=text[:20]):
        await sqlserver_sql.commit(line_to(server, lines).write, BATCHES)


async def test_an_error_of_a_later_statement_is_not_overlooked(lines: list[Line]) -> None:
    """The first of them has answered by then, and the driver says nothing until it is asked for the next."""
    answer = numbers((0,)) + more() + failed(2627, "Violation of PRIMARY KEY constraint", 14)
    with answering(answer) as server, pytest.raises(StoreUnavailable, match="PRIMARY KEY"):
        await sqlserver_sql.commit(line_to(server, lines).write, BATCHES)


async def test_a_deadlock_is_tried_again(lines: list[Line]) -> None:
    answers = [failed(1205, "was deadlocked", 13), failed(1222, "Lock request time out period exceeded.")]
    answers.append(numbers((0,)) + more() + done())
    with TdsServer(lambda said: settings(said) or answers.pop(0)) as server:
        [result] = await sqlserver_sql.commit(line_to(server, lines).write, BATCHES)
        assert result == Committed()
        assert not answers


async def test_a_fence_that_fails_is_a_loss(lines: list[Line]) -> None:
    with answering(numbers((5,)) + done()) as server:
        [result] = await sqlserver_sql.release(line_to(server, lines).write, [Fence(0, 1, 1)])
        assert isinstance(result, ShardLost)


async def test_a_commit_whose_answer_is_lost_is_unknown_and_the_next_one_connects_anew(lines: list[Line]) -> None:
    heard: list[str] = []

    def answer(said: str) -> bytes | None:
        if known := settings(said):
            return known
        heard.append(said)
        return None if len(heard) == 1 else numbers((0,)) + more() + done()

    with TdsServer(answer) as server:
        write = line_to(server, lines).write
        with pytest.raises(OutcomeUnknown):
            await sqlserver_sql.commit(write, BATCHES)
        assert len(heard) == 1, "nothing is said twice in secret"
        assert await sqlserver_sql.commit(write, BATCHES) == [Committed()]


async def test_a_commit_that_is_not_answered_in_time_is_unknown_and_holds_up_nobody(lines: list[Line]) -> None:
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
        waiting = asyncio.ensure_future(sqlserver_sql.commit(write, BATCHES))
        assert await sqlserver_sql.heartbeat(membership, "me", 1, "") == (1_700_000_000_000, "7")
        with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.5 s"):
            await asyncio.wait_for(waiting, 10)
        may_answer.set()
        assert await sqlserver_sql.commit(write, BATCHES) == [Committed()]


@pytest.mark.parametrize(
    ("number", "text", "severity", "says"),
    [
        (18456, "Login failed for user 'me'.", 14, "refuses the user or the password"),
        (4060, 'Cannot open database "test" requested by the login. The login failed.', 11, "does not exist"),
    ],
)
async def test_who_is_not_let_in_is_told_why(number: int, text: str, severity: int, says: str) -> None:
    with TdsServer(lambda said: None, login=error(number, text, severity) + done(0x02)) as server:
        address = address_of(server.url())
        with pytest.raises(mssql_python.Error) as caught:
            await connect(address)
        explained = setup_error(address, caught.value)
        assert isinstance(explained, SetupError)
        assert says in explained.detail
        assert "secret" not in explained.detail


async def test_results_come_in_the_order_of_the_batch(lines: list[Line]) -> None:
    with answering(numbers((1, 2), (3, 4)) + more() + numbers((5,)) + done()) as server:
        found = await line_to(server, lines).read(lambda link: ask(link, "SELECT …"))
        assert found == [[(1, 2), (3, 4)], [(5,)]]
        assert sqlserver_link.PORTION_ROWS > 1
