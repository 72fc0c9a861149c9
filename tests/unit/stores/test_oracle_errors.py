"""What Oracle's errors mean: not applied, or unknown. And connections that are terminated."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Any, cast

import oracledb
import pytest
from oracledb import errors as driver

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.oracle.connection import Connection, SessionPool, address_of, connect
from duetime.stores.oracle.errors import DRIVER_MAY_HAVE_COMMITTED, MAY_HAVE_COMMITTED, setup_error, store_error
from duetime.stores.sessions import RetryAtOnce

ADDRESS = address_of("oracle://me:secret@db.example/timers")


def _raised(code: int) -> Exception:
    """As the driver raises an error of the server."""
    said = driver._Error(f"ORA-{code:05}: words of the server", code=code)
    return cast(Exception, said.exc_type(said))


def _by_the_driver(number: int) -> Exception:
    return driver._create_exception(number)


def test_every_error_of_the_server_that_the_driver_knows_is_listed() -> None:
    known = {
        *driver.ERR_INTEGRITY_ERROR_CODES,
        *driver.ERR_INTERFACE_ERROR_CODES,
        *driver.ERR_OPERATIONAL_ERROR_CODES,
        *driver.ERR_RECOVERABLE_ERROR_CODES,
        *driver.ERR_ORACLE_ERROR_XREF,
    }
    assert len(known) > 50
    assert known <= set(MAY_HAVE_COMMITTED)


def test_every_kind_of_error_of_the_driver_is_listed() -> None:
    assert set(driver.ERR_EXCEPTION_TYPES) == {number for number in DRIVER_MAY_HAVE_COMMITTED if number < 1_000}
    assert {number for number in DRIVER_MAY_HAVE_COMMITTED if number >= 1_000} <= set(driver.ERR_MESSAGE_FORMATS)


def test_an_error_that_ends_a_connection_has_an_unknown_outcome() -> None:
    closing = [code for code, to in driver.ERR_ORACLE_ERROR_XREF.items() if to == driver.ERR_CONNECTION_CLOSED]
    assert 3113 in closing
    for code in closing:
        assert isinstance(store_error(_raised(code), writing=True), OutcomeUnknown), code


@pytest.mark.parametrize("code", [28, 600, 603, 1013, 1089, 1092, 1591, 2050, 2054, 3113, 3135, 7445, 12571, 25408])
def test_these_may_come_after_the_commit(code: int) -> None:
    assert isinstance(store_error(_raised(code), writing=True), OutcomeUnknown)


@pytest.mark.parametrize("code", [1, 54, 60, 942, 1031, 1034, 1400, 1653, 2091, 8177, 12541, 12899, 16000, 30036])
def test_after_these_errors_the_statement_was_rolled_back(code: int) -> None:
    assert isinstance(store_error(_raised(code), writing=True), StoreUnavailable)


def test_a_deadlock_is_retried_and_too_many_sessions_are_throttled() -> None:
    assert isinstance(store_error(_raised(60), writing=True), RetryAtOnce)
    assert isinstance(store_error(_raised(12519), writing=True), StoreThrottled)


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (driver.ERR_NOT_CONNECTED, StoreUnavailable),
        (driver.ERR_MISSING_BIND_VALUE, StoreUnavailable),
        (driver.ERR_CONNECTION_FAILED, StoreUnavailable),
        (driver.ERR_CONNECTION_CLOSED, OutcomeUnknown),
        (driver.ERR_CALL_TIMEOUT_EXCEEDED, OutcomeUnknown),
        (driver.ERR_UNEXPECTED_DATA, OutcomeUnknown),
        (driver.ERR_MESSAGE_TYPE_UNKNOWN, OutcomeUnknown),
    ],
)
def test_an_error_of_the_driver_came_before_sending_or_the_outcome_is_unknown(
    number: int, kind: type[StoreError]
) -> None:
    assert isinstance(store_error(_by_the_driver(number), writing=True), kind)


def test_a_read_is_never_unknown() -> None:
    for code in MAY_HAVE_COMMITTED:
        assert isinstance(store_error(_raised(code), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_an_unlisted_error_is_unknown_on_a_write() -> None:
    for error in (_raised(4711), RuntimeError("x"), OSError("x"), TimeoutError("x"), ConnectionResetError("x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


def test_the_error_text_is_that_of_the_server_without_the_help_page_of_the_driver() -> None:
    said = store_error(_raised(3113), writing=True).detail
    assert said == "oracle: the connection was lost (ORA-03113: words of the server)"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_raised(1017), "rejects the user or the password"),
        (_raised(28000), "locked"),
        (_raised(28001), "expired"),
        (_raised(1045), "CREATE SESSION"),
        (_raised(1031), "GRANT CREATE SESSION, CREATE TABLE"),
        (_raised(1950), "QUOTA"),
        (_raised(955), "another program"),
        (_raised(12514), "does not have this service"),
        (_raised(16000), "standby"),
        (_by_the_driver(driver.ERR_SERVER_VERSION_NOT_SUPPORTED), "too old"),
        (_by_the_driver(driver.ERR_INVALID_SERVICE_NAME), "does not have this service"),
        (ssl.SSLCertVerificationError("x"), "TLS"),
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
        ConnectionRefusedError("x"),
        TimeoutError(),
        _raised(1033),
        _raised(1034),
        _raised(12541),
        _raised(12519),
        _by_the_driver(driver.ERR_CONNECTION_FAILED),
        _by_the_driver(driver.ERR_CONNECTION_CLOSED),
    ],
)
def test_an_unreachable_server_is_unavailable_and_not_a_setup_error(error: Exception) -> None:
    assert isinstance(setup_error(ADDRESS.label, error), StoreUnavailable)


# --- connections ---------------------------------------------------------------------------------


async def test_a_closed_port_is_an_unreachable_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        line = SessionPool(address_of(f"oracle://me:secret@127.0.0.1:{taken.getsockname()[1]}/test"), 1, 1.0, 1.0)
        with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
            await line.read(_nothing)
        assert "secret" not in caught.value.detail
        await line.close()


async def test_a_silent_server_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address_of(f"oracle://me:secret@127.0.0.1:{silent.getsockname()[1]}/test")
        with pytest.raises((TimeoutError, oracledb.Error)):
            await connect(address, 0.3)


async def _nothing(link: Connection) -> None:
    raise AssertionError("there is no connection")


class _Connection:
    """The part of a connection of the driver that `Connection` uses."""

    terminated = False

    def is_healthy(self) -> bool:
        return not self.terminated

    def terminate(self) -> None:
        self.terminated = True


async def test_a_terminated_connection_is_not_waited_for() -> None:
    connection = _Connection()
    link = Connection(cast(Any, connection), "history")
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def work(link: Connection) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.ensure_future(link.run(work))
    await begun.wait()
    link.terminate()
    with pytest.raises(ConnectionAbortedError):
        await waiting
    await asyncio.wait_for(ended.wait(), 5)
    assert link.is_closed
    assert connection.terminated
    link.terminate()  # once more changes nothing


async def test_work_returns_its_result_or_raises_its_error() -> None:
    link = Connection(cast(Any, _Connection()), "history")

    async def succeeds(link: Connection) -> str:
        return link.history

    async def fails(link: Connection) -> None:
        raise _raised(60)

    assert await link.run(succeeds) == "history"
    with pytest.raises(oracledb.DatabaseError, match="ORA-00060"):
        await link.run(fails)
    assert not link.is_closed
