"""What MongoDB's errors mean: nothing was applied, or nobody knows."""

from __future__ import annotations

import bson.errors
import pytest
from pymongo import errors, helpers_shared
from pymongo.errors import OperationFailure

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Fence
from duetime.stores.fencing import NOTHING_REPLACED
from duetime.stores.mongodb import statements as mongodb_statements
from duetime.stores.mongodb.connection import (
    MAY_HAVE_COMMITTED,
    REFUSED_BY_THE_DRIVER,
    address_of,
    code_of,
    in_words,
    may_have_committed,
    setup_error,
    store_error,
)

ADDRESS = address_of("mongodb://me:secret@db.example/timers")

# Not answers of a server: the connection failed, or something that nobody foresaw.
UNDECIDED = {
    errors.PyMongoError,
    errors.ProtocolError,
    errors.ConnectionFailure,
    errors.AutoReconnect,
    errors.NetworkTimeout,
}


def _of_the_driver() -> set[type[errors.PyMongoError]]:
    def below(kind: type[errors.PyMongoError]) -> set[type[errors.PyMongoError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    return {kind for kind in below(errors.PyMongoError) if kind.__module__ == "pymongo.errors"}


def test_every_error_the_driver_knows_is_an_answer_or_a_refusal_or_undecided() -> None:
    answers = (errors.OperationFailure, errors.NotPrimaryError)
    known = _of_the_driver()
    assert len(known) > 20
    for kind in known:
        is_refusal = issubclass(kind, REFUSED_BY_THE_DRIVER)
        is_answer = issubclass(kind, answers)
        is_undecided = kind in UNDECIDED or kind.__name__ == "_OperationCancelled"
        assert [is_refusal, is_answer, is_undecided].count(True) == 1, kind


def test_every_number_the_driver_knows_is_listed() -> None:
    lists = [value for name, value in vars(helpers_shared).items() if name.endswith("_CODES")]
    numbers = {number for some in lists if isinstance(some, frozenset) for number in some}
    assert numbers >= {10107, 189, 91, 262}
    assert numbers <= set(MAY_HAVE_COMMITTED)


def _answer(code: int) -> OperationFailure:
    return OperationFailure("x", code, {"code": code})


@pytest.mark.parametrize("code", [50, 64, 91, 134, 189, 262, 6, 7, 89, 9001, 11600, 11601, 11602])
def test_these_may_come_after_the_write(code: int) -> None:
    assert isinstance(store_error(_answer(code), writing=True), OutcomeUnknown)


@pytest.mark.parametrize("code", [13, 18, 20, 112, 251, 263, 10107, 10334, 11000, 13435, 13436])
def test_what_was_answered_with_these_was_not_applied(code: int) -> None:
    assert isinstance(store_error(_answer(code), writing=True), StoreUnavailable)


def test_a_primary_that_is_none_any_more_refuses_or_leaves_it_open() -> None:
    """The driver makes a kind of its own of both."""
    refused = errors.NotPrimaryError("x", {"code": 10107})
    stepped_down = errors.NotPrimaryError("x", {"code": 11602})
    assert (code_of(refused), may_have_committed(refused)) == (10107, False)
    assert (code_of(stepped_down), may_have_committed(stepped_down)) == (11602, True)
    assert may_have_committed(errors.NotPrimaryError("not master"))


def test_a_write_that_was_not_confirmed_by_a_majority_may_have_been_applied_whatever_the_number() -> None:
    for kind in (errors.WriteConcernError, errors.WTimeoutError):
        assert isinstance(store_error(kind("x", 11000, {}), writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    "error",
    [
        errors.ServerSelectionTimeoutError("x"),
        errors.WaitQueueTimeoutError("x"),
        errors.DocumentTooLarge("x"),
        errors.InvalidOperation("x"),
        bson.errors.InvalidDocument("x"),
    ],
)
def test_what_was_never_sent_was_not_applied(error: Exception) -> None:
    assert isinstance(store_error(error, writing=True), StoreUnavailable)


def test_a_connection_that_did_not_come_about_carried_nothing() -> None:
    error = errors.AutoReconnect("x")
    assert isinstance(store_error(error, writing=True), OutcomeUnknown)
    error._add_error_label("SystemOverloadedError")
    assert type(store_error(error, writing=True)) is StoreUnavailable


def test_a_server_that_asks_to_slow_down_is_told_apart() -> None:
    error = _answer(462)
    error._add_error_label("SystemOverloadedError")
    assert isinstance(store_error(error, writing=False), StoreThrottled)
    assert isinstance(store_error(error, writing=True), OutcomeUnknown), "unless it is certain"


def test_a_read_is_never_in_doubt() -> None:
    for code in (*MAY_HAVE_COMMITTED, 4711):
        assert isinstance(store_error(_answer(code), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_what_nobody_listed_is_unknown_on_a_write() -> None:
    for error in (_answer(4711), RuntimeError("x"), OSError("x"), TimeoutError("x"), errors.PyMongoError("x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (_answer(18), "refuses the user or the password"),
        (_answer(8000), "refuses the user or the password"),
        (_answer(13), "readWrite"),
        (_answer(20), "is no replica set: transactions are missing; start mongod with --replSet"),
        (_answer(263), "is no replica set"),
        (_answer(10107), "is a secondary"),
        (errors.NotPrimaryError("x", {"code": 13435}), "is a secondary"),
        (errors.ServerSelectionTimeoutError("h:1: SSL handshake failed: CERTIFICATE_VERIFY_FAILED"), "TLS"),
        (errors.ConfigurationError("The DNS query name does not exist"), "does not exist"),
    ],
)
def test_what_is_wrong_at_the_start_is_said_in_plain_words(error: Exception, says: str) -> None:
    said = setup_error(ADDRESS, error)
    assert isinstance(said, SetupError)
    assert says in said.detail
    assert "db.example/timers" in said.detail
    assert "secret" not in said.detail
    assert said.field == "store.url"


@pytest.mark.parametrize(
    "error",
    [
        errors.ServerSelectionTimeoutError("h:1: Connection refused"),
        errors.AutoReconnect("x"),
        errors.ConfigurationError("The resolution lifetime expired after 3.0 seconds"),
        _answer(91),
    ],
)
def test_a_server_that_is_away_is_unavailable_and_may_come_back(error: Exception) -> None:
    assert isinstance(setup_error(ADDRESS, error), StoreUnavailable)


@pytest.mark.parametrize(("failing", "kind"), [(1, StoreUnavailable), (2, OutcomeUnknown)])
async def test_what_fails_after_a_part_was_applied_is_unknown_and_not_unapplied(
    failing: int, kind: type[Exception]
) -> None:
    """One shard twice in a call is two transactions; the first of them is on disk when the second fails."""
    asked = 0

    async def run(work: object) -> object:
        nonlocal asked
        asked += 1
        if asked == failing:
            raise StoreUnavailable("away")
        return [NOTHING_REPLACED]

    with pytest.raises(kind):
        await mongodb_statements.commit(run, [Batch(Fence(0, 1, 1)), Batch(Fence(0, 1, 1))])  # type: ignore[arg-type]


def test_what_the_server_repeats_of_a_command_is_not_repeated() -> None:
    said = 'not authorized on shop to execute command { findAndModify: "members", secret: "abc" }, full error: {"a": 1}'
    assert in_words(errors.OperationFailure(said, 13)) == "not authorized on shop"
