"""What the errors of Cassandra and its driver mean: not applied, or an unknown outcome."""

from __future__ import annotations

import ssl
from typing import Any

import cassandra
import pytest
from cassandra import ConsistencyLevel, OperationTimedOut, WriteType, cluster, connection, protocol

from duetime.errors import OutcomeUnknown, SetupError, StoreThrottled, StoreUnavailable
from duetime.stores.cassandra.address import address_of
from duetime.stores.cassandra.errors import NOT_APPLIED, TooManyTombstones, setup_error, store_error

ADDRESS = address_of("cassandra://me:secret@db.example/timers")


def _all_below(kind: type[BaseException]) -> set[type[BaseException]]:
    return {kind} | {below for child in kind.__subclasses__() for below in _all_below(child)}


def _of_the_driver() -> set[type[BaseException]]:
    return {kind for kind in _all_below(Exception) if kind.__module__.split(".")[0] == "cassandra"}


def _bare(kind: type[BaseException]) -> BaseException:
    """An instance of the class, without calling its constructor."""
    error = kind.__new__(kind)
    if isinstance(error, protocol.ErrorMessage):
        error.message = error.summary = ""
        error.code, error.info = 0, None
    return error


# Errors raised before anything was applied. A driver with a new error makes the test fail, so that it is classified.
NOT_APPLIED_NAMES = {
    "AlreadyExists", "AlreadyExistsException", "AuthenticationFailed", "ConfigurationException", "InvalidRequest",
    "InvalidRequestException", "IsBootstrappingErrorMessage", "NoHostAvailable", "PreparedQueryNotFound",
    "RequestValidationException", "SyntaxException", "Unauthorized", "UnauthorizedErrorMessage",
    "UnavailableErrorMessage",
}  # fmt: skip


def _to_user(kind: type[BaseException]) -> bool:
    """Is it raised to the caller? The driver converts some messages of the server to exceptions of another class."""
    as_it_is = protocol.ErrorMessage.to_exception
    return not issubclass(kind, protocol.ErrorMessage) or getattr(kind, "to_exception", None) is as_it_is


def test_only_listed_errors_mean_not_applied() -> None:
    known = _of_the_driver()
    assert len(known) > 40
    for kind in known:
        if not _to_user(kind) or issubclass(kind, protocol.OverloadedErrorMessage):
            continue
        outcome = store_error(_bare(kind), writing=True)
        not_applied = kind.__name__ in NOT_APPLIED_NAMES
        assert type(outcome) is (StoreUnavailable if not_applied else OutcomeUnknown), kind


def test_every_listed_error_can_be_raised_by_the_driver() -> None:
    for kind in NOT_APPLIED:
        assert _to_user(kind), kind


@pytest.mark.parametrize(
    "error",
    [
        cassandra.WriteTimeout(
            "x", write_type=WriteType.CAS, consistency=8, required_responses=2, received_responses=1
        ),
        cassandra.WriteTimeout("x", write_type=WriteType.SIMPLE),
        cassandra.WriteFailure("x"),
        cassandra.ReadTimeout("x"),
        cassandra.ReadFailure("x"),
        OperationTimedOut({}, None),
        connection.ConnectionShutdown("closed"),
        protocol.ServerError(0, "java.lang.NullPointerException", None),
        protocol.ErrorMessage(0x1700, "CAS operation result is unknown - proposal accepted by 1 but not a quorum.", 0),
        RuntimeError("x"),
        OSError("x"),
    ],
)
def test_errors_that_may_come_after_the_proposal_have_an_unknown_outcome(error: Exception) -> None:
    assert isinstance(store_error(error, writing=True), OutcomeUnknown)
    assert isinstance(store_error(error, writing=False), StoreUnavailable), "a read has no unknown outcome"


@pytest.mark.parametrize(
    "error",
    [
        cassandra.Unavailable("x", consistency=ConsistencyLevel.SERIAL, required_replicas=2, alive_replicas=1),
        cassandra.InvalidRequest("CQL Message of size 15000158 bytes exceeds allowed maximum of 8388608 bytes"),
        cassandra.Unauthorized("x"),
        protocol.IsBootstrappingErrorMessage(0x1002, "x", None),
        cluster.NoHostAvailable("x", {"host": OSError("refused")}),
    ],
)
def test_errors_before_the_paxos_round_mean_not_applied(error: Exception) -> None:
    outcome = store_error(error, writing=True)
    assert type(outcome) is StoreUnavailable


@pytest.mark.parametrize(
    "expected",
    [
        "Request breached global limit of 5 requests/second. Server is currently in an overloaded state",
        "Request breached limit(s) on bytes in flight (Endpoint: 1, Global: 2) and triggered backpressure.",
        "Query timed out before it could start",
        "Request has spent over 1.2 time of the maximum timeout 12000ms in the queue",
    ],
)
def test_an_overloaded_coordinator_that_rejects_before_the_start_is_throttling(expected: str) -> None:
    assert isinstance(
        store_error(protocol.OverloadedErrorMessage(0x1001, expected, None), writing=True), StoreThrottled
    )


def test_an_overloaded_coordinator_with_another_message_has_an_unknown_outcome() -> None:
    error = protocol.OverloadedErrorMessage(0x1001, "Too many in flight hints: 4096", None)
    assert isinstance(store_error(error, writing=True), OutcomeUnknown)
    assert isinstance(store_error(error, writing=False), StoreThrottled)


def _no_host(*errors: Exception) -> cluster.NoHostAvailable:
    return cluster.NoHostAvailable("Unable to connect to any servers", dict(enumerate(errors)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_no_host(cassandra.AuthenticationFailed("Bad credentials")), "refuses the user or the password"),
        (
            _no_host(cassandra.AuthenticationFailed("Remote end requires authentication")),
            "needs a user and a password",
        ),
        (cassandra.Unauthorized("no MODIFY permission"), "GRANT"),
        (_no_host(ssl.SSLError("wrong version")), "TLS"),
        (_no_host(PermissionError(1, "Tried connecting. Last error: [SSL: WRONG_VERSION_NUMBER]")), "TLS"),
        (_no_host(protocol.ProtocolException(10, "Invalid or unsupported protocol version (5)", None)), "4.0 or later"),
    ],
)
def test_what_a_person_can_mend_is_said(error: Exception, expected: str) -> None:
    made = setup_error(ADDRESS, error)
    assert isinstance(made, SetupError)
    assert expected in made.detail
    assert "secret" not in made.detail


@pytest.mark.parametrize("error", [_no_host(ConnectionRefusedError("refused")), OSError("x"), _no_host()])
def test_a_server_that_is_away_may_come_back(error: Exception) -> None:
    made: Any = setup_error(ADDRESS, error)
    assert isinstance(made, StoreUnavailable)
    assert "db.example/timers cannot be reached" in made.detail


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (cluster.NoHostAvailable("Unable to complete the operation against any hosts", {}), "no node can be reached"),
        (_no_host(OperationTimedOut({}, "host")), "no answer in time"),
        (_no_host(OSError("refused"), OSError("refused")), "refused"),
        (
            connection.ConnectionShutdown("errors=Connection heartbeat timeout, last_host=10.0.0.1:9042"),
            "Connection heartbeat timeout",
        ),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_error_texts_are_short(error: Exception, expected: str) -> None:
    assert store_error(error, writing=False).detail == f"cassandra: {expected}"


def test_a_read_that_met_too_many_tombstones_has_its_own_error() -> None:
    met, failed = (
        cassandra.ReadFailure("x", consistency=4, required_responses=1, received_responses=0, error_code_map=codes)
        for codes in ({"10.0.0.1": 1}, {"10.0.0.1": 0})
    )
    assert type(store_error(met, writing=False)) is TooManyTombstones
    assert type(store_error(failed, writing=False)) is StoreUnavailable
    assert type(store_error(met, writing=True)) is OutcomeUnknown


def test_too_few_replicas_for_the_commit_of_a_paxos_round_have_an_unknown_outcome() -> None:
    error = cassandra.Unavailable("x", consistency=ConsistencyLevel.QUORUM, required_replicas=2, alive_replicas=1)
    assert type(store_error(error, writing=True)) is OutcomeUnknown
    assert type(store_error(error, writing=False)) is StoreUnavailable
