"""What MongoDB's errors mean: not applied, or an unknown outcome."""

from __future__ import annotations

import bson.errors
import pytest
from pymongo import errors, helpers_shared
from pymongo.errors import OperationFailure

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Fence
from duetime.stores.fencing import NOTHING_REPLACED
from duetime.stores.mongodb import statements as mongodb_statements
from duetime.stores.mongodb.address import address_of
from duetime.stores.mongodb.errors import (
    MAY_HAVE_COMMITTED,
    NOT_SENT_BY_THE_DRIVER,
    code_of,
    error_text,
    may_have_committed,
    setup_error,
    store_error,
)

ADDRESS = address_of("mongodb://me:secret@db.example/timers")

# Not answers of a server: the connection failed, or an unexpected error.
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


def test_every_error_of_the_driver_is_classified() -> None:
    answers = (errors.OperationFailure, errors.NotPrimaryError)
    known = _of_the_driver()
    assert len(known) > 20
    for kind in known:
        is_refusal = issubclass(kind, NOT_SENT_BY_THE_DRIVER)
        is_answer = issubclass(kind, answers)
        is_undecided = kind in UNDECIDED or kind.__name__ == "_OperationCancelled"
        assert [is_refusal, is_answer, is_undecided].count(True) == 1, kind


def test_every_error_code_of_the_driver_is_listed() -> None:
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
def test_these_codes_mean_not_applied(code: int) -> None:
    assert isinstance(store_error(_answer(code), writing=True), StoreUnavailable)


def test_a_server_that_is_no_longer_primary_refuses_or_leaves_an_unknown_outcome() -> None:
    """The driver raises the same exception for both."""
    refused = errors.NotPrimaryError("x", {"code": 10107})
    stepped_down = errors.NotPrimaryError("x", {"code": 11602})
    assert (code_of(refused), may_have_committed(refused)) == (10107, False)
    assert (code_of(stepped_down), may_have_committed(stepped_down)) == (11602, True)
    assert may_have_committed(errors.NotPrimaryError("not master"))


def test_a_write_without_confirmation_by_a_majority_has_an_unknown_outcome_whatever_the_code() -> None:
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


def test_a_connection_that_could_not_be_opened_sent_nothing() -> None:
    error = errors.AutoReconnect("x")
    assert isinstance(store_error(error, writing=True), OutcomeUnknown)
    error._add_error_label("SystemOverloadedError")
    assert type(store_error(error, writing=True)) is StoreUnavailable


def test_an_overloaded_server_is_throttling() -> None:
    error = _answer(462)
    error._add_error_label("SystemOverloadedError")
    assert isinstance(store_error(error, writing=False), StoreThrottled)
    assert isinstance(store_error(error, writing=True), OutcomeUnknown), "unless it is certainly not applied"


def test_a_read_is_never_in_doubt() -> None:
    for code in (*MAY_HAVE_COMMITTED, 4711):
        assert isinstance(store_error(_answer(code), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_an_unlisted_error_of_a_write_has_an_unknown_outcome() -> None:
    for error in (_answer(4711), RuntimeError("x"), OSError("x"), TimeoutError("x"), errors.PyMongoError("x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    ("error", "expected"),
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
def test_what_is_wrong_at_the_start_is_said_in_plain_words(error: Exception, expected: str) -> None:
    answer = setup_error(ADDRESS, error)
    assert isinstance(answer, SetupError)
    assert expected in answer.detail
    assert "db.example/timers" in answer.detail
    assert "secret" not in answer.detail
    assert answer.field == "store.url"


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
async def test_a_failure_after_a_part_was_applied_has_an_unknown_outcome(failing: int, kind: type[Exception]) -> None:
    """A call with one shard twice is two transactions; the first of them is applied when the second fails."""
    attempts = 0

    async def run(work: object) -> object:
        nonlocal attempts
        attempts += 1
        if attempts == failing:
            raise StoreUnavailable("away")
        return [NOTHING_REPLACED]

    with pytest.raises(kind):
        await mongodb_statements.commit(run, [Batch(Fence(0, 1, 1)), Batch(Fence(0, 1, 1))])  # type: ignore[arg-type]


def test_error_texts_do_not_contain_the_command() -> None:
    answer = (
        'not authorized on shop to execute command { findAndModify: "members", secret: "abc" }, full error: {"a": 1}'
    )
    assert error_text(errors.OperationFailure(answer, 13)) == "not authorized on shop"
