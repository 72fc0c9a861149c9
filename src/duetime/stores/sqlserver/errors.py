"""What the errors of mssql-python mean: for a write, for a session, and while the store is opened."""

from __future__ import annotations

import re
from typing import Final

import mssql_python
from mssql_python.exceptions import sqlstate_to_exception

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, RetryAtOnce
from duetime.stores.store_url import store_url_error

__all__ = ["MAY_HAVE_COMMITTED", "may_have_committed", "setup_error", "state_of", "store_error"]

# A write is one batch that begins a transaction and ends with its COMMIT. If the server answers with an error, the
# error came before COMMIT, and the transaction was rolled back (XACT_ABORT). If the connection ends without an answer,
# the outcome is unknown. Errors that the server sends while it ends the connection, or while it stops, may come after
# COMMIT.
#
# The driver keeps neither the error number of the server nor the SQLSTATE, only a text for the SQLSTATE. `state_of`
# finds the SQLSTATE by that text.

_NOT_APPLIED: Final = False
_UNKNOWN: Final = True

# Classes of SQLSTATEs, and single ones that differ from their class. tests/unit/stores/test_sqlserver_errors.py
# fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: dict[str, bool] = {
    # The statement or its values were rejected, or it conflicted with another transaction: rolled back.
    **dict.fromkeys(("07", "21", "22", "23", "24", "28", "34", "3C", "3D", "3F", "40", "42", "44"), _NOT_APPLIED),
    "40003": _UNKNOWN,  # statement completion unknown
    "01": _UNKNOWN,  # warnings: the driver does not raise them, so the meaning of an error with such a state is unknown
    "25": _UNKNOWN,  # unexpected state of the transaction
    # The connection failed. If it was never established, nothing was applied.
    "08": _UNKNOWN,
    "08001": _NOT_APPLIED,
    "08002": _NOT_APPLIED,
    "08004": _NOT_APPLIED,
    # From the driver, a timeout, or a general error. The error with which a server ends a session is one of these.
    "HY": _UNKNOWN,
    "IM": _NOT_APPLIED,  # the driver could not be used
}

# The errors below are recognised by the text of their message, in English: the session sets that language.
#
# Errors 1205 and 1222: the server ended a deadlock or a wait for a lock (LOCK_TIMEOUT), and rolled back. Checked
# before the SQLSTATE, which the driver chooses: by a general SQLSTATE a rollback would count as an unknown outcome.
_LOCK_FAILURE = re.compile(
    r"(\[[^\]]*\])*(Lock request time out period exceeded|Transaction \(Process ID \d+\) was deadlocked)"
)
_OVERLOADED = (
    "The service is currently busy",
    "the server is currently too busy",
    "limit for the database is",
    "maximum number of user connections",
)
_MESSAGES: tuple[tuple[str, str], ...] = (
    ("Could not allocate space", "the disk of the database is full, or its file has reached its maximum size"),
    ("The transaction log for database", "the transaction log of the database is full"),
    ("Lock request time out", "the database timed out waiting for a lock"),
    ("data would be truncated", "a value is too long for its column: this write can never be applied"),
    ("deadlock", "the database ended a deadlock"),
    ("is read-only", "the database is read-only"),
    ("SHUTDOWN is in progress", "the database is shutting down"),
    ("Communication link failure", "the connection was lost"),
    ("TCP Provider", "the connection was lost"),
)


_WARNING: Final = "01"
_DEADLOCK: Final = "40001"


def _states_by_text() -> dict[str, str]:
    """The texts of the driver, each with its SQLSTATE. Several SQLSTATEs may have the same text: then one with an
    unknown outcome is chosen.

    A warning (01…) is not chosen if the text also belongs to an error: the driver raises only errors. One text belongs
    to 22001 (data too long, rejected) and to 01004 (a result that was cut off, a warning).
    """
    found: dict[str, str] = {}
    for state in sorted(_STATES):  # warnings come first
        error = sqlstate_to_exception(state, "")
        if error is None:
            continue
        known = found.get(error.driver_error, "")
        if known.startswith(_WARNING) or not _may_have_committed(known):
            found[error.driver_error] = state
    return found


def _may_have_committed(state: str) -> bool:
    return bool(state) and MAY_HAVE_COMMITTED.get(state, MAY_HAVE_COMMITTED.get(state[:2], _UNKNOWN))


# The SQLSTATEs for which the driver has a text.
_STATES: Final = (
    "01000", "01001", "01002", "01003", "01004", "01006", "01007", "01S00", "01S01", "01S02", "01S06", "01S07",
    "01S08", "01S09", "07001", "07002", "07005", "07006", "07009", "07S01", "08001", "08002", "08003", "08004",
    "08007", "08S01", "21S01", "21S02", "22001", "22002", "22003", "22007", "22008", "22012", "22015", "22018",
    "22019", "22025", "22026", "23000", "24000", "25000", "25S01", "25S02", "25S03", "28000", "34000", "3C000",
    "3D000", "3F000", "40001", "40002", "40003", "42000", "42S01", "42S02", "42S11", "42S12", "42S21", "42S22",
    "44000", "HY000", "HY001", "HY003", "HY004", "HY007", "HY008", "HY009", "HY010", "HY011", "HY012", "HY013",
    "HY014", "HY015", "HY016", "HY017", "HY018", "HY019", "HY020", "HY021", "HY024", "HY090", "HY091", "HY092",
    "HY095", "HY096", "HY097", "HY098", "HY099", "HY100", "HY101", "HY103", "HY104", "HY105", "HY106", "HY107",
    "HY109", "HY110", "HY111", "HYC00", "HYT00", "HYT01", "IM001", "IM002", "IM003", "IM004", "IM005", "IM006",
    "IM007", "IM008", "IM009", "IM010", "IM011", "IM012", "IM013", "IM014", "IM015",
)  # fmt: skip
_TEXTS: Final = _states_by_text()
_UNLISTED: Final = "An error occurred with SQLSTATE code: "


def state_of(error: BaseException) -> str:
    """The SQLSTATE, or "" if it cannot be found."""
    text = str(getattr(error, "driver_error", ""))
    return text.removeprefix(_UNLISTED) if text.startswith(_UNLISTED) else _TEXTS.get(text, "")


def may_have_committed(error: BaseException) -> bool:
    """For an error of a write, after it was sent."""
    if _is_lock_failure(error):
        return False
    state = state_of(error)
    if not state:  # raised by the driver before it sends anything: a closed connection, a closed cursor
        return not isinstance(error, mssql_python.InterfaceError)
    return _may_have_committed(state)


def _is_lock_failure(error: BaseException) -> bool:
    return state_of(error) == _DEADLOCK or bool(_LOCK_FAILURE.match(_text_of(error)))


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    message = _text_of(error)
    text = next((text for part, text in _MESSAGES if part in message), type(error).__name__)
    detail = f"sqlserver: {text} ({message})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if _is_lock_failure(error):
        return RetryAtOnce(detail)
    return StoreThrottled(detail) if any(part in message for part in _OVERLOADED) else StoreUnavailable(detail)


def _text_of(error: BaseException) -> str:
    text = str(getattr(error, "ddbc_error", "") or error) or type(error).__name__
    return text.replace("[Microsoft]", "").replace("[SQL Server]", "").partition("\n")[0].strip()


def setup_error(label: str, error: BaseException) -> SetupError | StoreUnavailable:
    """For an error while the store is opened: a SetupError that says what to do, or StoreUnavailable if the server
    may come back."""
    if isinstance(error, StoreUnavailable):
        return error
    message = _text_of(error)
    for part, text in _EXPLANATIONS:
        if part in (message, state_of(error)) or (len(part) > 5 and part in message):
            return store_url_error(f"{label} {text} ({message})")
    if isinstance(error, TimeoutError):
        why = str(error) or f"no answer within {CONNECT_SECONDS:g} s"
        return StoreUnavailable(f"sqlserver: {label}: {why}")
    if state_of(error).startswith("08"):
        return StoreUnavailable(f"sqlserver: {label} cannot be reached ({message})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_EXPLANATIONS: tuple[tuple[str, str], ...] = (
    ("Cannot open database", "does not exist, or this user may not use it; create it with CREATE DATABASE …"),
    ("28000", "rejects the user or the password"),
    ("SSL Provider", "gives no TLS connection as encrypt and trustservercertificate require"),
    ("certificate", "gives no TLS connection as encrypt and trustservercertificate require"),
    ("permission", "does not give this user enough rights; `duetime serve` creates its tables itself:"
                   " ALTER ROLE db_owner ADD MEMBER …; once they exist, db_datareader and db_datawriter are enough"),
    ("42S01", "has tables of another program with the names of ours; use a separate database"),
    ("There is already an object", "has tables of another program with the names of ours;"
                                   " use a separate database"),
    ("is read-only", "is read-only: a secondary, or set to read-only"),
    ("Failed to load the driver", "cannot be reached: Microsoft's ODBC driver, which comes with mssql-python, needs"
                                  " libraries of the system (Debian: apt install libltdl7 libkrb5-3)"),
)  # fmt: skip
