"""What the errors of asyncpg mean: for a write, for a session, and while the store is opened."""

from __future__ import annotations

import ssl
from typing import Final

import asyncpg

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.stores.store_url import store_url_error

__all__ = ["MAY_HAVE_COMMITTED", "connection_survives", "may_have_committed", "setup_error", "store_error"]

# A statement without BEGIN is a transaction. If the server answers it with an error, it was rolled back: nothing was
# applied. If the connection ends without an answer, the outcome is unknown. Errors that come with the end of a
# connection are unknown too: a server that shuts down may send one to a session whose commit is already in the log and
# waits for a standby.

_NOT_APPLIED: Final = False
_UNKNOWN: Final = True

# Classes of SQLSTATEs, and single ones that differ from their class. tests/unit/stores/test_postgres_errors.py fails
# when the driver knows a class that is not listed.
MAY_HAVE_COMMITTED: dict[str, bool] = {
    # The statement or its values were rejected, or it conflicted with another transaction: rolled back.
    **dict.fromkeys(("03", "09", "0A", "0B", "0F", "0L", "0P", "0Z", "10", "20", "21", "22", "23"), _NOT_APPLIED),
    **dict.fromkeys(("24", "25", "26", "27", "28", "2B", "2D", "2F", "34", "38", "39", "3B", "3D"), _NOT_APPLIED),
    **dict.fromkeys(("3F", "40", "42", "44", "54", "55", "72", "F0", "HV", "P0"), _NOT_APPLIED),
    "40003": _UNKNOWN,  # statement completion unknown
    # Disk full, out of memory, too many connections. A failure after the commit is in the log stops the server.
    "53": _NOT_APPLIED,
    # The connection failed. If it was never established, nothing was applied. A pooler reports its errors as 08P01.
    "08": _UNKNOWN,
    "08001": _NOT_APPLIED,
    "08004": _NOT_APPLIED,
    # An operator or the server intervened. A cancelled statement is rolled back; a statement whose session was
    # ended may be committed; a session that was ended because it was idle never received it.
    "57": _UNKNOWN,
    "57014": _NOT_APPLIED,
    "57P03": _NOT_APPLIED,
    "57P05": _NOT_APPLIED,
    # System errors and internal errors.
    "58": _UNKNOWN,
    "XX": _UNKNOWN,
}

# After these errors the connection can still be used: the statement failed, not the server. Not after 25006, for
# example: the server has become read-only.
_CONNECTION_SURVIVES = frozenset({"21", "22", "23", "40", "42", "53", "54", "55", "57014"})

_MESSAGES: tuple[tuple[str, str], ...] = (
    ("53100", "the disk of the database is full"),
    ("53300", "the database has no connection left"),
    ("53200", "the database is out of memory"),
    ("40P01", "the database ended a deadlock"),
    ("25006", "the database is read-only: a standby, or full"),
    ("57P03", "the database is starting or stopping"),
    ("57P01", "the database is shutting down"),
    ("57P02", "the database crashed"),
    ("57014", "the statement was cancelled on the server"),
    ("28", "the database rejects the user"),
    ("3D000", "the database does not exist"),
)


def may_have_committed(error: BaseException) -> bool:
    """For an error of a statement that is its own transaction, after it was sent."""
    if isinstance(error, asyncpg.PostgresError):
        state = str(error.sqlstate or "")
        return MAY_HAVE_COMMITTED.get(state, MAY_HAVE_COMMITTED.get(state[:2], _UNKNOWN))
    # Raised by the driver before it sends anything: a closed connection, a value of a wrong type.
    return not isinstance(error, asyncpg.InterfaceError)


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    state = str(getattr(error, "sqlstate", None) or "")
    text = next((text for start, text in _MESSAGES if state.startswith(start)), type(error).__name__)
    detail = f"postgresql: {text} ({_first_line(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    return StoreUnavailable(detail)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).partition("\n")[0]


def connection_survives(error: BaseException) -> bool:
    """Whether the connection can still be used after this error."""
    state = str(getattr(error, "sqlstate", None) or "")
    return bool({state, state[:2]} & _CONNECTION_SURVIVES)


def setup_error(label: str, error: BaseException) -> SetupError | StoreUnavailable:
    """For an error while the store is opened: a SetupError that says what to do, or StoreUnavailable if the server
    may come back."""
    state = str(getattr(error, "sqlstate", None) or "")
    for start, text in _EXPLANATIONS:
        if state.startswith(start):
            return store_url_error(f"{label} {text} ({_first_line(error)})")
    if "startup parameter" in str(error):
        return store_url_error(
            f"{label} is a pooler; add ?pooler=transaction or ?pooler=session ({_first_line(error)})"
        )
    if isinstance(error, asyncpg.TargetServerAttributeNotMatched):
        return store_url_error(f"{label} is a read-only standby; name the primary, or all hosts of the cluster")
    if isinstance(error, ssl.SSLError) or "rejected SSL upgrade" in str(error):
        return store_url_error(f"{label}: no TLS connection as sslmode requires ({_first_line(error)})")
    if isinstance(error, ValueError):  # how the driver reports invalid options
        return store_url_error(f"{label}: {_first_line(error)}")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"postgresql: {label} does not answer within {CONNECT_SECONDS:g} s")
    if isinstance(error, OSError):
        return StoreUnavailable(f"postgresql: {label} cannot be reached ({_first_line(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("28P01", "rejects the password"),
    ("28000", "rejects this user: does the role exist, and does pg_hba.conf allow it from this machine?"),
    ("3D000", "does not exist; create it with CREATE DATABASE … ENCODING 'UTF8'"),
    ("42501", "does not give this user enough rights; `duetime serve` creates its tables itself and needs"
              " CREATE on the schema: GRANT USAGE, CREATE ON SCHEMA … TO …"),
    ("3F000", "has no schema for the tables; name one: ?schema=duetime"),
    ("42P07", "has tables of another program with the names of ours; use a separate schema: ?schema=duetime"),
    ("25006", "is read-only: a standby, or default_transaction_read_only is on"),
    ("55P03", "is locked by a migration of another instance for too long; is that instance stuck?"),
)  # fmt: skip
