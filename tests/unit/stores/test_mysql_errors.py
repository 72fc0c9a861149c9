"""What the errors of MySQL, MariaDB and TiDB mean: not applied, or unknown."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import asyncmy
import pytest
from asyncmy.constants import ER

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.store import Fence
from duetime.stores.mysql import errors as mysql_errors
from duetime.stores.mysql import statements as mysql_statements
from duetime.stores.mysql.connection import AsyncmyDriver, address_of, execute_and_commit
from duetime.stores.mysql.errors import MAY_HAVE_COMMITTED, RolledBack, may_have_committed, setup_error, store_error
from duetime.stores.sessions import RetryAtOnce

ADDRESS = address_of("mysql://me:secret@db.example/timers")


def _raised(number: int) -> asyncmy.OperationalError:
    return asyncmy.OperationalError(number, "x")


def _of_the_server() -> set[int]:
    """Every error the driver has a name for."""
    return {value for name, value in vars(ER).items() if name.isupper() and isinstance(value, int)}


def test_every_error_the_driver_knows_is_listed() -> None:
    known = _of_the_server()
    assert len(known) > 400
    assert known <= MAY_HAVE_COMMITTED.keys()


def test_every_table_of_errors_has_only_listed_errors() -> None:
    said = {
        *mysql_errors._RETRY_AT_ONCE,
        *mysql_errors._OVERLOADED,
        *mysql_errors._RECONNECT,
        *mysql_errors._MESSAGES,
    }
    assert said | mysql_errors._EXPLANATIONS.keys() <= MAY_HAVE_COMMITTED.keys()
    assert not any(MAY_HAVE_COMMITTED[number] for number in mysql_errors._RETRY_AT_ONCE), (
        "else it must not be tried again"
    )


@pytest.mark.parametrize(
    "number", [1023, 1026, 1053, 1105, 1152, 1158, 1160, 1180, 1317, 1927, 1969, 2013, 2014, 9001, 9003, 9005]
)
def test_these_may_come_after_the_commit(number: int) -> None:
    assert isinstance(store_error(_raised(number), writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    "number",
    [
        0,
        1040,
        1062,
        1114,
        1142,
        1146,
        1153,
        1205,
        1213,
        1290,
        1406,
        1836,
        2003,
        2006,
        3101,
        3572,
        4025,
        8025,
        8028,
        9007,
    ],
)
def test_after_these_errors_the_statement_was_rolled_back(number: int) -> None:
    assert isinstance(store_error(_raised(number), writing=True), StoreUnavailable)


@pytest.mark.parametrize("number", [1205, 1213, 8002, 8028, 9007])
def test_conflicts_are_retried_at_once(number: int) -> None:
    assert isinstance(store_error(_raised(number), writing=True), RetryAtOnce)


@pytest.mark.parametrize("number", [1040, 1203, 1226, 8252])
def test_an_overloaded_server_is_throttled(number: int) -> None:
    assert isinstance(store_error(_raised(number), writing=True), StoreThrottled)
    assert isinstance(store_error(_raised(9003), writing=False), StoreThrottled)


def test_a_read_is_never_unknown() -> None:
    for number in MAY_HAVE_COMMITTED:
        assert isinstance(store_error(_raised(number), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_an_unlisted_error_is_unknown_on_a_write() -> None:
    odd = (_raised(7_777), _raised(3_999), asyncmy.InternalError("Packet sequence number wrong"), asyncmy.MySQLError())
    for error in (*odd, RuntimeError("x"), OSError("x"), TimeoutError("x"), UnicodeError("x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


def test_a_connection_whose_commit_failed_is_not_used_again() -> None:
    driver = AsyncmyDriver(ADDRESS)
    for number in (1062, 1205, 1213, 1317, 2013):
        assert driver.failure(_raised(number), writing=True)[1] is False
    assert [driver.failure(_raised(number), writing=False)[1] for number in (1213, 1146, 1290, 2006, 2013, 1053)] == [
        *(True, True),
        *(False, False, False, False),
    ]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_raised(1045), "rejects the user or the password"),
        (_raised(1044), "GRANT ALL"),
        (_raised(1049), "CREATE DATABASE"),
        (_raised(1142), "GRANT SELECT, INSERT, UPDATE, DELETE"),
        (_raised(1290), "read-only"),
        (_raised(2026), "TLS"),
        (_raised(3159), "ssl-mode=required"),
        (RuntimeError("'cryptography' package is required"), "cryptography"),
    ],
)
def test_an_error_at_the_start_is_explained(error: Exception, says: str) -> None:
    said = setup_error(ADDRESS.label, error)
    assert isinstance(said, SetupError)
    assert says in said.detail
    assert said.field == "store.url"
    assert "secret" not in said.detail


def test_an_untrusted_certificate_is_a_setup_error() -> None:
    error = _raised(2003)
    error.__cause__ = ssl.SSLCertVerificationError("self-signed")
    said = setup_error(ADDRESS.label, error)
    assert isinstance(said, SetupError)
    assert "TLS" in said.detail


@pytest.mark.parametrize("error", [_raised(2003), TimeoutError(), _raised(1040), _raised(2013)])
def test_an_unreachable_server_is_unavailable_and_not_a_setup_error(error: Exception) -> None:
    assert isinstance(setup_error(ADDRESS.label, error), StoreUnavailable)


# --- transactions --------------------------------------------------------------------------------


class _Refusing:
    """A connection to a server that executes this many statements of a message and fails the next one."""

    def __init__(self, answers: int, error: Exception) -> None:
        self.answers, self.error = answers, error
        self.rowcount, self.description = 0, None

    def cursor(self) -> _Refusing:
        return self

    async def execute(self, sql: str) -> None:
        await self.nextset()

    async def nextset(self) -> bool:
        if not self.answers:
            raise self.error
        self.answers -= 1
        return True


@pytest.mark.parametrize(("answers", "kind"), [(0, RolledBack), (1, RolledBack), (2, asyncmy.OperationalError)])
async def test_an_error_before_the_commit_in_the_same_message_was_not_applied(
    answers: int, kind: type[Exception]
) -> None:
    with pytest.raises(kind) as caught:
        await execute_and_commit(_Refusing(answers, _raised(1317)), ["DELETE …", "INSERT …"])
    assert may_have_committed(caught.value) is (kind is not RolledBack)


async def test_a_connection_that_ends_before_the_answer_to_the_commit_is_unknown() -> None:
    with pytest.raises(asyncmy.OperationalError) as caught:
        await execute_and_commit(_Refusing(0, _raised(2013)), ["DELETE …", "INSERT …"])
    assert may_have_committed(caught.value)


@pytest.mark.parametrize(("failing", "kind"), [(1, StoreUnavailable), (2, OutcomeUnknown)])
async def test_a_failure_after_a_part_was_applied_is_unknown(failing: int, kind: type[StoreError]) -> None:
    """One shard twice in a call is two transactions; the first of them is on disk when the second fails."""
    asked = 0

    async def write(work: Any, commit: Any = None, /) -> None:
        nonlocal asked
        asked += 1
        if asked == failing:
            raise StoreUnavailable("away")

    with pytest.raises(kind):
        await mysql_statements.release(write, [Fence(0, 1, 1), Fence(0, 1, 1)])  # type: ignore[arg-type]


def test_long_statements_are_sent_in_separate_messages() -> None:
    long = "x" * (mysql_statements.MESSAGE_CHARS_MAX - 10)
    assert mysql_statements._messages([]) == [[]]
    assert mysql_statements._messages(["a", "b"]) == [["a", "b"]]
    assert mysql_statements._messages(["a" * 20, long, "b", "c" * 20, "d"]) == [
        ["a" * 20],
        [long, "b"],
        ["c" * 20, "d"],
    ]
    parts: list[Sequence[str]] = list(mysql_statements._messages([long, long * 3, "b"]))
    assert [len(part) for part in parts] == [1, 1, 1]
