"""What the errors of MongoDB and its driver mean.

Until a transaction is told to commit, nothing of it is applied, whatever the error is. The server reports the result of
a commit with an error label. So the tables here are for writes that are not transactions: they say which errors mean
that the write was refused. After all other errors the write may have been applied before a majority knew of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import bson.errors
from pymongo import errors

from duetime.errors import OutcomeUnknown, SetupError, StoreError, StoreThrottled, StoreUnavailable
from duetime.stores.mongodb.address import Address

__all__ = [
    "MAY_HAVE_COMMITTED",
    "NOT_SENT_BY_THE_DRIVER",
    "NO_REPLICA_SET",
    "code_of",
    "error_text",
    "has_label",
    "may_have_committed",
    "setup_error",
    "store_error",
]

# Server errors by number. tests/unit/stores/test_mongodb_errors.py fails when the driver knows one that is not listed.
MAY_HAVE_COMMITTED: Final[dict[int, bool]] = {
    # Refused before anything was done: because of the command, its values or its user, or because the server is no
    # primary.
    **dict.fromkeys((2, 9, 13, 14, 18, 20, 26, 59, 72, 133, 263, 391, 10058, 10107, 10334, 13435, 13436), False),
    # A duplicate key; a write conflict; a transaction that the server has aborted.
    **dict.fromkeys((112, 251, 11000, 11001, 12582), False),
    # Killed, timed out, or no longer primary during the write or during the wait for a majority.
    **dict.fromkeys((43, 50, 64, 91, 134, 189, 262, 11600, 11601, 11602), True),
    # Network errors between servers, reported by a router.
    **dict.fromkeys((6, 7, 89, 9001), True),
}

# Errors of the driver raised before the command was sent. Other errors that are no answer of the server may come before
# or after the command was applied.
NOT_SENT_BY_THE_DRIVER: Final = (
    errors.ServerSelectionTimeoutError,
    errors.WaitQueueTimeoutError,
    errors.ConfigurationError,
    errors.InvalidOperation,
    errors.InvalidName,
    errors.CollectionInvalid,
    errors.EncryptionError,
    bson.errors.BSONError,
)

_MESSAGES: Final[dict[int, str]] = {
    13: "the database does not allow this user to do that",
    18: "the database refuses the password",
    50: "the time limit of the command was exceeded",
    64: "a majority of the replica set did not confirm",
    91: "the database is shutting down",
    112: "write conflict with another transaction",
    189: "the primary stepped down",
    388: "the transaction is too large for what is free in the server's cache (cacheSizeGB)",
    10107: "the server is not primary",
    11600: "the database is shutting down",
    11602: "the primary changed",
}


def code_of(error: BaseException) -> int:
    details = getattr(error, "details", None)
    code = getattr(error, "code", None) or (details.get("code") if isinstance(details, Mapping) else None)
    return int(code or 0)


def may_have_committed(error: BaseException) -> bool:
    """May a write that is not a transaction have been applied, after this error?"""
    if isinstance(error, errors.WriteConcernError):
        return True
    if isinstance(error, errors.OperationFailure | errors.NotPrimaryError):
        return MAY_HAVE_COMMITTED.get(code_of(error), True)
    # If the connection could not be opened, nothing was sent; newer drivers mark that with this label.
    return not (isinstance(error, NOT_SENT_BY_THE_DRIVER) or has_label(error, "SystemOverloadedError"))


def store_error(error: BaseException, *, writing: bool) -> StoreError:
    """The StoreError for an error of the driver."""
    detail = f"mongodb: {_MESSAGES.get(code_of(error), type(error).__name__)} ({error_text(error)})"
    if writing and may_have_committed(error):
        return OutcomeUnknown(detail)
    if isinstance(error, errors.OperationFailure) and has_label(error, "SystemOverloadedError"):
        return StoreThrottled(detail)
    return StoreUnavailable(detail)


def has_label(error: BaseException, label: str) -> bool:
    return isinstance(error, errors.PyMongoError) and error.has_error_label(label)


def error_text(error: BaseException) -> str:
    """The message without the whole answer, or the whole view of the servers, that the driver adds."""
    text = str(error) or type(error).__name__
    # The server repeats the refused command with all its values; that is removed, too.
    return re.split(
        r", full error:|, Timeout: |\n| \(configured timeouts|(?: to execute command)? \{", text, maxsplit=1
    )[0]


def setup_error(address: Address, error: BaseException) -> SetupError | StoreUnavailable:
    """The error for a failure while opening, with what to do about it. An unreachable server is not a SetupError: it
    may come back."""
    if re.search("SSL|TLS|CERTIFICATE", str(error)):
        return _unusable(address, f": no TLS connection with these options ({error_text(error)})")
    if explanation := _EXPLANATIONS.get(code_of(error)):
        return _unusable(address, f" {explanation} ({error_text(error)})")
    if isinstance(error, errors.ServerSelectionTimeoutError):
        return StoreUnavailable(f"mongodb: {address.label} cannot be reached ({error_text(error)})")
    if isinstance(error, errors.ConfigurationError) and "lifetime expired" not in str(error):
        return _unusable(address, f": {error_text(error)}")
    return store_error(error, writing=False)  # type: ignore[return-value]


def _unusable(address: Address, why: str) -> SetupError:
    return SetupError(f"store.url: {address.label}{why}", field="store.url")


NO_REPLICA_SET: Final = (
    "is no replica set: transactions are missing; start mongod with --replSet NAME and call rs.initiate() once"
    " (one member is enough)"
)
_EXPLANATIONS: Final[dict[int, str]] = {
    13: "does not give this user the needed permissions: grant it the role readWrite on that database",
    18: "refuses the user or the password; is authSource the database that has the user?",
    8000: "refuses the user or the password",  # Atlas
    20: NO_REPLICA_SET,
    263: NO_REPLICA_SET,
    10107: "is a secondary; name the primary, or leave out directConnection",
    13435: "is a secondary; name the primary, or leave out directConnection",
    13436: "is neither primary nor secondary: is the replica set initiated?",
}
