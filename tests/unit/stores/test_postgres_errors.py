"""What PostgreSQL's errors mean: not applied, or unknown."""

from __future__ import annotations

import ssl
from typing import Any

import asyncpg
import pytest

from duetime.errors import OutcomeUnknown, SetupError, StoreUnavailable
from duetime.store import Batch, Fence
from duetime.stores.postgres import statements as postgres_statements
from duetime.stores.postgres.connection import address_of
from duetime.stores.postgres.errors import MAY_HAVE_COMMITTED, may_have_committed, setup_error, store_error

ADDRESS = address_of("postgresql://me:secret@db.example/timers")


def _all_below(kind: type[BaseException]) -> set[type[BaseException]]:
    return {kind} | {below for child in kind.__subclasses__() for below in _all_below(child)}


def _of_the_server() -> dict[str, type[asyncpg.PostgresError]]:
    """Every error the driver has a class for, by its SQLSTATE."""
    kinds = [kind for kind in _all_below(asyncpg.PostgresError) if issubclass(kind, asyncpg.PostgresError)]
    return {str(kind.sqlstate): kind for kind in kinds if kind.sqlstate}


def _raised(sqlstate: str) -> asyncpg.PostgresError:
    error = _of_the_server()[sqlstate]("x")
    assert error.sqlstate == sqlstate
    return error


def test_every_class_of_errors_the_driver_knows_is_listed() -> None:
    known = _of_the_server()
    assert len(known) > 200
    assert {state[:2] for state in known} == {state for state in MAY_HAVE_COMMITTED if len(state) == 2}
    assert {state for state in MAY_HAVE_COMMITTED if len(state) == 5} <= set(known)


def test_an_error_of_the_driver_came_before_sending_or_the_outcome_is_unknown() -> None:
    own = {
        kind
        for kind in _all_below(Exception)
        if kind.__module__.startswith("asyncpg") and not issubclass(kind, asyncpg.PostgresError)
    }
    refusals = {kind for kind in own if issubclass(kind, asyncpg.InterfaceError)}
    assert asyncpg.InternalClientError in own - refusals
    for kind in own - refusals:
        assert may_have_committed(kind("x")), kind
    for kind in refusals:
        assert not may_have_committed(kind("x")), kind


@pytest.mark.parametrize(
    "sqlstate",
    ["08000", "08003", "08006", "08007", "08P01", "40003", "57P01", "57P02", "57P04", "58030", "XX000", "XX001"],
)
def test_these_may_come_after_the_commit(sqlstate: str) -> None:
    assert isinstance(store_error(_raised(sqlstate), writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    "sqlstate",
    [
        *("08001", "08004", "22000", "23505", "25006", "25P03", "40001", "40P01", "42501", "42P01", "53100", "53200"),
        *("53300", "54000", "55P03", "57014", "57P03", "57P05"),
    ],
)
def test_after_these_errors_the_statement_was_rolled_back(sqlstate: str) -> None:
    error = store_error(_raised(sqlstate), writing=True)
    assert isinstance(error, StoreUnavailable)


def test_a_read_is_never_unknown() -> None:
    for kind in _of_the_server().values():
        assert isinstance(store_error(kind("x"), writing=False), StoreUnavailable)
    assert isinstance(store_error(OSError("x"), writing=False), StoreUnavailable)


def test_an_unlisted_error_is_unknown_on_a_write() -> None:
    class Strange(asyncpg.PostgresError):
        sqlstate = "ZZ123"

    for error in (Strange("x"), RuntimeError("x"), OSError("x"), TimeoutError("x"), ConnectionResetError("x")):
        assert isinstance(store_error(error, writing=True), OutcomeUnknown)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (asyncpg.InvalidPasswordError("x"), "rejects the password"),
        (asyncpg.InvalidAuthorizationSpecificationError("x"), "pg_hba.conf"),
        (asyncpg.InvalidCatalogNameError("x"), "does not exist"),
        (asyncpg.InsufficientPrivilegeError("x"), "GRANT USAGE, CREATE"),
        (asyncpg.InvalidSchemaNameError("x"), "no schema"),
        (asyncpg.DuplicateTableError("x"), "another program"),
        (asyncpg.ReadOnlySQLTransactionError("x"), "read-only"),
        (asyncpg.TargetServerAttributeNotMatched("x"), "read-only standby"),
        (ssl.SSLCertVerificationError("x"), "TLS"),
        (ConnectionError("PostgreSQL server at ('h', 1) rejected SSL upgrade"), "TLS"),
        (asyncpg.ClientConfigurationError("x"), "db.example/timers: x"),
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
        asyncpg.CannotConnectNowError("x"),
        asyncpg.TooManyConnectionsError("x"),
    ],
)
def test_an_unreachable_server_is_unavailable_and_not_a_setup_error(error: Exception) -> None:
    said = setup_error(ADDRESS.label, error)
    assert isinstance(said, StoreUnavailable)


@pytest.mark.parametrize(("failing", "kind"), [(1, StoreUnavailable), (2, OutcomeUnknown)])
async def test_a_failure_after_a_part_was_applied_is_unknown(failing: int, kind: type[Exception]) -> None:
    """One shard twice in a call is two statements; the first of them is on disk when the second fails."""
    asked = 0

    async def run(sql: str, /, *args: Any) -> list[Any]:
        nonlocal asked
        asked += 1
        if asked == failing:
            raise StoreUnavailable("away")
        return [[[0], [], 1]]

    with pytest.raises(kind):
        await postgres_statements.commit(run, [Batch(Fence(0, 1, 1)), Batch(Fence(0, 1, 1))])
