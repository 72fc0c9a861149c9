"""What the errors of asyncmy mean: for a write, for a session, and while the store is opened."""

from __future__ import annotations

import ssl
from typing import Final

import asyncmy

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, RetryAtOnce
from duetime.stores.store_url import store_url_error

__all__ = [
    "MAY_HAVE_COMMITTED",
    "RolledBack",
    "connection_survives",
    "first_line",
    "is_from_server",
    "may_have_committed",
    "number_of",
    "setup_error",
    "store_error",
]

# Before COMMIT, the end of the connection undoes a transaction, whatever the error was. So this is about COMMIT itself,
# and about statements that are their own transaction. If the server answers with an error about the statement, it was
# rolled back. If the connection ends without an answer, the outcome is unknown. Errors that come with the end of a
# connection or a server are unknown too: a commit that waits for a replica is already in the log.

_NOT_APPLIED: Final = False
_UNKNOWN: Final = True

# By error number. tests/unit/stores/test_mysql_errors.py fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: dict[int, bool] = {
    # Of the driver: never connected, or disconnected before anything was sent; connection lost before the answer.
    **dict.fromkeys((0, 2003, 2006, 2026, 2059), _NOT_APPLIED),
    **dict.fromkeys((2013, 2014), _UNKNOWN),
    # Rejected: the statement, the user, or a conflict with stored rows. These are the same for all three.
    **dict.fromkeys(range(1_000, 1_469), _NOT_APPLIED),
    # Files that cannot be written or closed, "unknown error", damaged tables.
    **dict.fromkeys((1023, 1026, 1030, 1105, 1194, 1195, 1296, 1297), _UNKNOWN),
    # The connection or the server ends, or an operator ends the statement.
    **dict.fromkeys((1053, 1077, 1078, 1079, 1080, 1152, *range(1_154, 1_162), 1184, 1317, 1927, 1969), _UNKNOWN),
    # Errors of the commit, the rollback or the logs.
    **dict.fromkeys((1180, 1181, 1182, 1183, 1186, 1196), _UNKNOWN),
    # Later ones of MySQL and MariaDB: too many transactions, read-only, a query timeout, a replication group that
    # rejected the commit, a lock with NOWAIT, a constraint, a session that was idle too long.
    **dict.fromkeys((1637, 1665, 1698, 1792, 1836, 3024, 3101, 3159, 3572, 4025, 4031), _NOT_APPLIED),
    # Of TiDB: conflicts, too large, tables that were changed during the transaction.
    **dict.fromkeys((8002, 8004, 8005, 8022, 8024, 8025, 8027, 8028, 8252, 9007), _NOT_APPLIED),
    # Of TiDB: its storage does not answer, or not in time.
    **dict.fromkeys((9001, 9002, 9003, 9004, 9005, 9006, 9008), _UNKNOWN),
}

# Rolled back, and likely to succeed if repeated: deadlocks, timeouts of a lock, conflicts, changed tables.
_RETRY_AT_ONCE = frozenset({1205, 1213, 1412, 8002, 8005, 8022, 8027, 8028, 9007})
_OVERLOADED = frozenset({1040, 1041, 1135, 1203, 1226, 1637, 8252, 9003, 9008})
# The server has become read-only or has ended the session: a new connection may reach another server.
_RECONNECT = frozenset({1290, 1792, 1836, 4031})

_MESSAGES: dict[int, str] = {
    1021: "the disk of the database is full",
    1040: "the database has no connection left",
    1041: "the database is out of memory",
    1053: "the database is shutting down",
    1114: "the disk of the database is full",
    1153: "the database's max_allowed_packet is too small",
    1203: "the database has no connection left for this user",
    1205: "the database timed out waiting for a lock",
    1213: "the database ended a deadlock",
    1290: "the database is read-only",
    1317: "the statement was cancelled on the server",
    1836: "the database is read-only",
    2013: "the connection was lost",
    8025: "the timer is too large for the database (txn-entry-size-limit)",
}


class RolledBack(Exception):
    """The server rejected a statement before COMMIT in the same message, so nothing was committed."""


def number_of(error: BaseException) -> int | None:
    number = error.args[0] if error.args and isinstance(error, asyncmy.MySQLError) else None
    return number if isinstance(number, int) else None


def is_from_server(number: int | None) -> bool:
    """Whether the server sent this error, and not the driver."""
    return bool(number) and not 2_000 <= (number or 0) < 3_000


def may_have_committed(error: BaseException) -> bool:
    """For an error of a COMMIT, or of a statement that is its own transaction, after it was sent."""
    number = number_of(error)
    return MAY_HAVE_COMMITTED.get(number, _UNKNOWN) if number is not None else not isinstance(error, RolledBack)


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    cause = error.__cause__ if isinstance(error, RolledBack) and error.__cause__ else error
    number = number_of(cause)
    detail = f"mysql: {_MESSAGES.get(number or 0, type(cause).__name__)} ({first_line(cause)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if number in _RETRY_AT_ONCE:
        return RetryAtOnce(detail)
    return StoreThrottled(detail) if number in _OVERLOADED else StoreUnavailable(detail)


def first_line(error: BaseException) -> str:
    text = str(error.args[1]) if number_of(error) is not None and len(error.args) > 1 else str(error)
    return (text or type(error).__name__).partition("\n")[0]


_EXPLANATIONS: dict[int, str] = {
    1044: "rejects this user: GRANT ALL ON … TO …",
    1045: "rejects the user or the password",
    1049: "does not exist; create it with CREATE DATABASE … CHARACTER SET utf8mb4",
    1050: "has tables of another program with the names of ours; use a separate database",
    1130: "rejects connections from this machine",
    1142: "does not give this user enough rights; `duetime serve` creates its tables itself: GRANT ALL ON … TO …;"
    " once they exist, GRANT SELECT, INSERT, UPDATE, DELETE ON … TO … is enough",
    1193: "does not know a setting that is needed: is it MySQL, MariaDB or TiDB?",
    1227: "does not give this user enough rights",
    1290: "is read-only: a replica, or read_only is on",
    1665: "has binlog_format = STATEMENT, which does not work with read committed; ROW or MIXED is needed",
    1698: "rejects the user or the password",
    1836: "is read-only: a replica, or read_only is on",
    2026: "gives no TLS connection as ssl-mode requires",
    2059: "requires an authentication method that the driver does not support",
    3159: "requires TLS: add ?ssl-mode=required, or better verify_identity",
}


def connection_survives(error: BaseException) -> bool:
    """Whether the connection can still be used after an error of a statement before COMMIT."""
    number = number_of(error)
    return is_from_server(number) and not may_have_committed(error) and number not in _RECONNECT


def setup_error(label: str, error: BaseException) -> SetupError | StoreUnavailable:
    """For an error while the store is opened: a SetupError that says what to do, or StoreUnavailable if the server
    may come back."""
    if isinstance(error.__cause__, ssl.SSLError):  # the driver reports it as an unreachable host
        error = asyncmy.OperationalError(2026, str(error.__cause__))
    explanation = _EXPLANATIONS.get(number_of(error) or 0)
    if explanation is not None:
        return store_url_error(f"{label} {explanation} ({first_line(error)})")
    if isinstance(error, RuntimeError):  # the driver needs another package for some kinds of passwords
        return store_url_error(f"{label}: {first_line(error)}")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"mysql: {label} does not answer within {CONNECT_SECONDS:g} s")
    if number_of(error) == 2003:
        return StoreUnavailable(f"mysql: {label} cannot be reached ({first_line(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]
