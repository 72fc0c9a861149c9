"""What the errors of python-oracledb mean: for a write, for a session, and while the store is opened."""

from __future__ import annotations

import ssl
from typing import Final

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.sessions import CONNECT_SECONDS, RetryAtOnce
from duetime.stores.store_url import store_url_error

__all__ = [
    "DRIVER_MAY_HAVE_COMMITTED",
    "MAY_HAVE_COMMITTED",
    "code_of",
    "connection_survives",
    "is_hidden",
    "may_have_committed",
    "setup_error",
    "store_error",
]

# A statement that the server answers with an error was rolled back. Its transaction was not: the session rolls that
# back. If the connection ends without an answer, the outcome is unknown. Errors that come with the end of a connection
# may come after the commit. For an error that is not listed here, the outcome is unknown too.

_NOT_APPLIED: Final = False
_UNKNOWN: Final = True

# By the number after ORA-. tests/unit/stores/test_oracle_errors.py fails when the driver has one that is not listed.
MAY_HAVE_COMMITTED: dict[int, bool] = {
    # Values, constraints, and other errors of a statement.
    **dict.fromkeys((1, 1400, 1401, 1407, 1438, 1440, 1455, 1461, 1722, 1795, 2289, 2290, 2291, 2292), _NOT_APPLIED),
    **dict.fromkeys((12899, 21525, 24381, 24816, 30926, 38104, 40479, 22165, 22303, 24338, 24349), _NOT_APPLIED),
    **dict.fromkeys((900, 903, 904, 905, 906, 907, 911, 913, 917, 922, 923, 933, 936, 942, 947, 955), _NOT_APPLIED),
    **dict.fromkeys((972, 979, 1008, 1031, 1036, 1408, 1418, 1427, 1430, 1740, 1756, 24344, 38902), _NOT_APPLIED),
    # A conflict with another transaction, or a lock that was waited for too long.
    **dict.fromkeys((51, 54, 60, 2049, 4020, 4021, 8176, 8177, 30006), _NOT_APPLIED),
    # Something is full: memory, cursors, undo, disk, quota.
    **dict.fromkeys((1000, 1536, 1555, 1562, 1628, 1950, 4030, 4031, 30036), _NOT_APPLIED),
    **dict.fromkeys((1650, 1651, 1652, 1653, 1654, 1655, 1658, 1659, 1683, 1688, 1691, 1692, 1693), _NOT_APPLIED),
    # The database is read-only, or cannot read a file.
    **dict.fromkeys((376, 439, 1115, 1502, 8102, 8103, 16000, 16456), _NOT_APPLIED),
    # The whole transaction was rolled back.
    **dict.fromkeys((2091, 24761, 25402), _NOT_APPLIED),
    # The connection or its session was never established.
    **dict.fromkeys((18, 20, 257, 1005, 1017, 1035, 1045, 2391, 7455, 28000, 28001), _NOT_APPLIED),
    **dict.fromkeys((12154, 12170, 12203, 12500, 12505, 12514, 12516, 12518, 12519, 12520), _NOT_APPLIED),
    **dict.fromkeys((12526, 12527, 12528, 12541, 12545, 12757, 1033, 1034, 1090), _NOT_APPLIED),
    # Errors of the pool of the driver and of other features that are not used here.
    **dict.fromkeys((24422, 24457, 24459, 24496, 26202, 26211, 26216, 29970), _NOT_APPLIED),
    # The session, the process or the instance ended, or an operator ended it.
    **dict.fromkeys((22, 28, 31, 45, 378, 600, 602, 603, 604, 609, 1012, 1013, 1041, 1043, 1089, 1092), _UNKNOWN),
    **dict.fromkeys((2396, 3111, 3113, 3114, 3122, 3135, 7445, 27146, 28511, 56600), _UNKNOWN),
    **dict.fromkeys((12153, 12537, 12547, 12570, 12571, 12583), _UNKNOWN),
    # The server itself reports that the outcome of the commit is unknown.
    **dict.fromkeys((1591, 2050, 2051, 2053, 2054, 25405, 25408), _UNKNOWN),
}

# Errors of the driver (DPY-), by thousands, and single ones that differ: 1 wrong use of the interface, 2 wrong use of a
# call, 3 not supported, 4 from the database, 5 unexpected protocol data, 6 no connection, 7 a warning, 8 a value does
# not fit.
DRIVER_MAY_HAVE_COMMITTED: dict[int, bool] = {
    **dict.fromkeys((1, 2, 6, 8), _NOT_APPLIED),
    **dict.fromkeys((3, 4, 5, 7), _UNKNOWN),
    **dict.fromkeys((4000, 4001, 4008, 4009, 4010, 4017, 4018, 4026, 4027), _NOT_APPLIED),  # before anything is sent
}

# Rolled back, and likely to succeed if repeated: deadlocks, timeouts of a lock.
_RETRY_AT_ONCE = frozenset({51, 54, 60, 8177, 30006})
# No more sessions or processes, or rejected by the resource manager.
_OVERLOADED = frozenset({18, 20, 2391, 7455, 12516, 12518, 12519, 12520})
# The server has become read-only: a new connection may reach another server.
_RECONNECT = frozenset({16000, 16456})

_MESSAGES: dict[int, str] = {
    60: "the database ended a deadlock",
    257: "the archiver of the database is stuck: its disk is full",
    1033: "the database is starting or stopping",
    1034: "the database is not running",
    1089: "the database is shutting down",
    1090: "the database is shutting down",
    1536: "the quota of the user is used up",
    1653: "the tablespace is full",
    1654: "the tablespace is full",
    1691: "the tablespace is full",
    3113: "the connection was lost",
    16000: "the database is read-only: a standby",
    30006: "the database timed out waiting for a lock",
    30036: "the undo tablespace is full",
}


def code_of(error: BaseException) -> int:
    """The number after ORA-, or 0 if the error is not from the server."""
    return int(getattr(error.args[0] if error.args else None, "code", 0) or 0)


def _driver_code_of(error: BaseException) -> int:
    full = str(getattr(error.args[0] if error.args else None, "full_code", "") or "")
    return int(full[4:]) if full.startswith("DPY-") and full[4:].isdigit() else 0


def may_have_committed(error: BaseException) -> bool:
    """For an error of a write, after it was sent."""
    if code := code_of(error):
        return MAY_HAVE_COMMITTED.get(code, _UNKNOWN)
    if code := _driver_code_of(error):
        return DRIVER_MAY_HAVE_COMMITTED.get(code, DRIVER_MAY_HAVE_COMMITTED.get(code // 1000, _UNKNOWN))
    return _UNKNOWN


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    code = code_of(error)
    detail = f"oracle: {_MESSAGES.get(code, type(error).__name__)} ({_server_text(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if code in _RETRY_AT_ONCE:
        return RetryAtOnce(detail)
    return StoreThrottled(detail) if code in _OVERLOADED else StoreUnavailable(detail)


def _server_text(error: BaseException) -> str:
    """The text of the server, without the text that the driver puts before it."""
    lines = [line for line in str(error).splitlines() if line and not line.startswith("Help:")]
    return next((line for line in lines if line.startswith("ORA-")), "; ".join(lines[:2]) or type(error).__name__)


def connection_survives(error: BaseException) -> bool:
    """Whether the connection can still be used after an error of a statement before COMMIT."""
    code = code_of(error)
    return code not in _RECONNECT and not MAY_HAVE_COMMITTED.get(code, _UNKNOWN)


def is_hidden(error: BaseException) -> bool:
    """Whether the error says that this user may not read a system view."""
    return code_of(error) in (942, 1031)


def setup_error(label: str, error: BaseException) -> SetupError | StoreUnavailable:
    """For an error while the store is opened: a SetupError that says what to do, or StoreUnavailable if the server
    may come back."""
    text = _EXPLANATIONS.get(code_of(error)) or _DRIVER_EXPLANATIONS.get(_driver_code_of(error))
    if text is not None:
        return store_url_error(f"{label} {text} ({_server_text(error)})")
    if isinstance(error.__cause__ or error, ssl.SSLError):
        return store_url_error(
            f"{label}: no TLS connection as protocol=tcps and the wallet require ({_server_text(error)})"
        )
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"oracle: {label} does not answer within {CONNECT_SECONDS:g} s")
    if isinstance(error, OSError) or _driver_code_of(error) // 1000 == 6:
        return StoreUnavailable(f"oracle: {label} cannot be reached ({_server_text(error)})")
    return store_error(error, writing=False)  # type: ignore[return-value]


_NO_SERVICE = "does not have this service, or has not opened it yet; lsnrctl status lists the services"
_RIGHTS = (
    "does not give this user enough rights; `duetime serve` creates its tables itself:"
    " GRANT CREATE SESSION, CREATE TABLE, CREATE VIEW TO …"
)
_QUOTA = "has no space for the tables of this user: ALTER USER … QUOTA UNLIMITED ON …"
_EXPLANATIONS: dict[int, str] = {
    955: "has tables of another program with the names of ours; use a separate user",
    942: _RIGHTS,
    1005: "needs a password: oracle://user:PASSWORD@…",
    1017: "rejects the user or the password",
    1031: _RIGHTS,
    1045: "rejects this user: GRANT CREATE SESSION TO …",
    1435: "has no such user or schema",
    1536: _QUOTA,
    1950: _QUOTA,
    12505: _NO_SERVICE,
    12514: _NO_SERVICE,
    16000: "is read-only: a standby",
    28000: "has locked this account: ALTER USER … ACCOUNT UNLOCK",
    28001: "requires a new password for this user: the old one has expired",
    30006: "is locked by a migration of another instance for too long; is that instance stuck?",
}
_DRIVER_EXPLANATIONS: dict[int, str] = {
    3010: "is an Oracle version that the driver does not support: it is too old",
    3015: "has this password in an old format that the driver does not support: set it again (ALTER USER …)",
    3016: "needs a Python package that is missing: pip install cryptography",
    4026: "needs a wallet, and a file of the wallet is missing",
    4027: "needs a wallet, and the folder of the wallet is missing",
    6001: _NO_SERVICE,
    6002: "has a certificate for another name (ssl_server_cert_dn)",
    6003: _NO_SERVICE,
}
