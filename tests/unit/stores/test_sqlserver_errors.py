"""What SQL Server's errors mean: not applied, or unknown. And threads that are abandoned."""

from __future__ import annotations

import asyncio
import inspect
import re
import threading

import mssql_python
import pytest
from mssql_python.exceptions import sqlstate_to_exception

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import RetryAtOnce
from duetime.stores.sqlserver import errors as sqlserver_errors
from duetime.stores.sqlserver.connection import Connection, address_of
from duetime.stores.sqlserver.errors import MAY_HAVE_COMMITTED, may_have_committed, setup_error, state_of, store_error

ADDRESS = address_of("sqlserver://me:secret@db.example/timers")
KNOWN = sorted(set(re.findall(r'"([0-9A-Z]{5})":', inspect.getsource(sqlstate_to_exception))))


def _raised(state: str, said: str = "words of the server") -> Exception:
    """As the driver raises an error of the server."""
    error = sqlstate_to_exception(state, f"[Microsoft][ODBC Driver 18 for SQL Server][SQL Server]{said}")
    assert isinstance(error, Exception)
    return error


def test_every_state_that_the_driver_knows_is_listed() -> None:
    assert len(KNOWN) > 100
    assert set(KNOWN) == set(sqlserver_errors._STATES)
    assert {state[:2] for state in KNOWN} == {state for state in MAY_HAVE_COMMITTED if len(state) == 2}
    assert {state for state in MAY_HAVE_COMMITTED if len(state) == 5} <= set(KNOWN)


@pytest.mark.parametrize("state", KNOWN)
def test_a_text_of_two_states_has_the_state_with_an_unknown_outcome(state: str) -> None:
    """The driver keeps only a text, and some states have the same text. Warnings are ignored: they are not raised."""
    text = getattr(_raised(state), "driver_error", None)
    same = [other for other in KNOWN if getattr(_raised(other), "driver_error", None) == text]
    errors = [other for other in same if not other.startswith("01")] or same
    assert may_have_committed(_raised(state)) == max(_listed(other) for other in errors)


def _listed(state: str) -> bool:
    return MAY_HAVE_COMMITTED.get(state, MAY_HAVE_COMMITTED.get(state[:2], True))


def test_data_that_does_not_fit_was_not_applied() -> None:
    """The driver has one text for 22001 and for the warning 01004. With an unknown outcome, the shard would be claimed
    again and again."""
    text = "String or binary data would be truncated in table 'timers', column 'timer_id'."
    refused = store_error(_raised("22001", text), writing=True)
    assert isinstance(refused, StoreUnavailable)
    assert not isinstance(refused, RetryAtOnce)
    assert "can never be applied" in refused.detail


@pytest.mark.parametrize(
    "state", ["01000", "08003", "08007", "08S01", "25000", "25S02", "40003", "HY000", "HY008", "HYT00", "HYT01"]
)
def test_these_may_come_after_the_commit(state: str) -> None:
    assert isinstance(store_error(_raised(state), writing=True), OutcomeUnknown)


@pytest.mark.parametrize("state", ["08001", "08004", "22003", "23000", "28000", "40001", "42000", "42S02", "IM002"])
def test_after_these_errors_the_batch_was_rolled_back(state: str) -> None:
    assert isinstance(store_error(_raised(state), writing=True), StoreUnavailable)


def test_a_state_without_a_text_is_read_from_the_message() -> None:
    error = mssql_python.DatabaseError("An error occurred with SQLSTATE code: 42999", "x")
    assert state_of(error) == "42999"
    assert not may_have_committed(error)
    assert may_have_committed(mssql_python.DatabaseError("An error occurred with SQLSTATE code: ZZ123", "x"))


@pytest.mark.parametrize("state", [*KNOWN, "ZZ123"])
@pytest.mark.parametrize(
    "said",
    [
        "Lock request time out period exceeded.",  # 1222
        "Transaction (Process ID 55) was deadlocked on lock resources with another process and has been chosen as the"
        " deadlock victim. Rerun the transaction.",  # 1205
    ],
)
def test_a_deadlock_and_a_lock_timeout_were_rolled_back_whatever_the_state(state: str, said: str) -> None:
    error = _raised(state if state in KNOWN else "HY000", said)
    if state not in KNOWN:
        unlisted = f"An error occurred with SQLSTATE code: {state}"
        error = mssql_python.DatabaseError(unlisted, f"[Microsoft][SQL Server]{said}")
    assert not may_have_committed(error)
    for writing in (False, True):
        assert isinstance(store_error(error, writing=writing), RetryAtOnce)


def test_a_deadlock_is_also_recognised_by_its_state() -> None:
    assert isinstance(store_error(_raised("40001", "in other words"), writing=True), RetryAtOnce)


def test_a_lock_error_inside_another_message_is_not_recognised() -> None:
    said = "Cannot continue the execution: 'Lock request time out period exceeded.'"
    assert isinstance(store_error(_raised("HY000", said), writing=True), OutcomeUnknown)


def test_an_overloaded_server_is_throttled_if_nothing_was_applied() -> None:
    busy = "The service is currently busy. Retry the request after 10 seconds."
    assert isinstance(store_error(_raised("42000", busy), writing=True), StoreThrottled)
    assert isinstance(store_error(_raised("HY000", busy), writing=True), OutcomeUnknown)


def test_errors_of_the_driver_come_before_anything_is_sent() -> None:
    assert not may_have_committed(mssql_python.InterfaceError("Cannot execute on a closed connection", ""))


def test_a_read_is_never_unknown() -> None:
    for state in KNOWN:
        assert isinstance(store_error(_raised(state), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_an_unlisted_error_is_unknown_on_a_write() -> None:
    for error in (RuntimeError("x"), OSError("x"), TimeoutError("x"), mssql_python.OperationalError("new text", "x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_raised("28000", "Login failed for user 'me'."), "rejects the user or the password"),
        (_raised("42000", 'Cannot open database "timers" requested by the login. The login failed.'), "does not exist"),
        (_raised("42000", "CREATE TABLE permission denied in database 'timers'."), "db_owner"),
        (_raised("42S01", "There is already an object named 'timers' in the database."), "another program"),
        (_raised("42000", 'Failed to update database "timers" because the database is read-only.'), "read-only"),
        (_raised("08001", "SSL Provider: [error:0A000086:SSL routines::certificate verify failed]"), "TLS"),
        (mssql_python.OperationalError("Connection operation failed", "Failed to load the driver. Please"), "libltdl7"),
    ],
)
def test_an_error_at_the_start_is_explained(error: Exception, says: str) -> None:
    said = setup_error(ADDRESS.label, error)
    assert isinstance(said, SetupError)
    assert says in said.detail
    assert said.field == "store.url"
    assert "secret" not in said.detail


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        _raised("08001", "TCP Provider: Error code 0x2749"),
        _raised("08S01", "Communication link failure"),
        _raised("HY000", "Database 'timers' is not currently available."),
        _raised("08004", "the maximum number of user connections has already been reached."),
    ],
)
def test_an_unreachable_server_is_unavailable_and_not_a_setup_error(error: Exception) -> None:
    assert isinstance(setup_error(ADDRESS.label, error), StoreUnavailable)


# --- threads -------------------------------------------------------------------------------------


async def test_work_runs_on_a_separate_thread_and_returns_its_result() -> None:
    db = Connection()
    names = {await db.run(lambda db: threading.current_thread().name) for _ in range(3)}
    assert names == {"duetime-sqlserver"}
    with pytest.raises(mssql_python.OperationalError):
        await db.run(_fails)
    assert await db.run(lambda db: "still there") == "still there"
    db.terminate()
    assert db.is_closed
    with pytest.raises(ConnectionAbortedError):
        await db.run(lambda db: None)


def _fails(db: Connection) -> None:
    raise _raised("40001")


async def test_a_blocked_thread_ends_when_it_is_unblocked() -> None:
    db = Connection()
    begun, may_end, disconnected = threading.Event(), threading.Event(), threading.Event()

    def waits(db: Connection) -> None:
        begun.set()
        may_end.wait(10)

    db.disconnect = disconnected.set  # type: ignore[method-assign]
    waiting = asyncio.ensure_future(db.run(waits))
    assert await asyncio.to_thread(begun.wait, 5)
    db.terminate()
    with pytest.raises(ConnectionAbortedError):
        await asyncio.wait_for(waiting, 1)
    assert not disconnected.is_set(), "the driver has it still"
    may_end.set()
    assert await asyncio.to_thread(disconnected.wait, 5)
