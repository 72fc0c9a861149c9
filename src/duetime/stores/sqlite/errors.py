"""What the errors of apsw mean: for a COMMIT, for other statements, and while the store is opened."""

from __future__ import annotations

from typing import Final

import apsw

from duetime.errors import OutcomeUnknown, StoreError, StoreUnavailable
from duetime.stores.store_url import store_url_error

__all__ = ["MAY_HAVE_COMMITTED", "setup_errors", "store_error"]

# After an error before COMMIT nothing was applied, because SQLite shows and recovers only transactions whose commit
# frame is in the log. So an error before COMMIT is StoreUnavailable, after a rollback.
#
# COMMIT writes the frames, the commit frame last, and then syncs the file. After an error before or during the writing
# there is no complete commit frame: not applied. After an error of the sync, or one that may be of the sync, there is a
# frame that a recovery after a crash could find: the outcome is unknown until a later write overwrites the frame. The
# engine claims the shard again, which is such a write.

_NOT_APPLIED: Final = False
_UNKNOWN: Final = True

# Whether a COMMIT that raises this exception of apsw may have been applied. tests/unit/stores/test_sqlite_errors.py
# fails when apsw has a class that is not listed.
MAY_HAVE_COMMITTED: dict[type[apsw.Error], bool] = {
    # Rejected before a byte was written: locks, permissions, misuse, the statement itself.
    apsw.BusyError: _NOT_APPLIED,
    apsw.LockedError: _NOT_APPLIED,
    apsw.ReadOnlyError: _NOT_APPLIED,
    apsw.PermissionsError: _NOT_APPLIED,
    apsw.AuthError: _NOT_APPLIED,
    apsw.CantOpenError: _NOT_APPLIED,
    apsw.ConstraintError: _NOT_APPLIED,
    apsw.MismatchError: _NOT_APPLIED,
    apsw.RangeError: _NOT_APPLIED,
    apsw.TooBigError: _NOT_APPLIED,
    apsw.SQLError: _NOT_APPLIED,
    apsw.SchemaChangeError: _NOT_APPLIED,
    apsw.BindingsError: _NOT_APPLIED,
    apsw.NotADBError: _NOT_APPLIED,
    apsw.FormatError: _NOT_APPLIED,
    apsw.EmptyError: _NOT_APPLIED,
    apsw.NoLFSError: _NOT_APPLIED,
    apsw.ThreadingViolationError: _NOT_APPLIED,
    apsw.ForkingViolationError: _NOT_APPLIED,
    apsw.ConnectionClosedError: _NOT_APPLIED,
    apsw.ConnectionNotClosedError: _NOT_APPLIED,
    apsw.CursorClosedError: _NOT_APPLIED,
    apsw.IncompleteExecutionError: _NOT_APPLIED,
    apsw.ExecutionCompleteError: _NOT_APPLIED,
    apsw.ExecTraceAbort: _NOT_APPLIED,
    apsw.ExtensionLoadingError: _NOT_APPLIED,
    apsw.InvalidContextError: _NOT_APPLIED,
    apsw.NoFTS5Error: _NOT_APPLIED,
    # The disk is full: a frame did not fit, and the commit frame is written last.
    apsw.FullError: _NOT_APPLIED,
    # The sync may have failed after the write, or the cause is unclear.
    apsw.IOError: _UNKNOWN,
    apsw.NoMemError: _UNKNOWN,
    apsw.CorruptError: _UNKNOWN,
    apsw.ProtocolError: _UNKNOWN,
    apsw.InternalError: _UNKNOWN,
    apsw.InterruptError: _UNKNOWN,
    apsw.AbortError: _UNKNOWN,
    apsw.MisuseError: _UNKNOWN,
    apsw.NotFoundError: _UNKNOWN,
    apsw.VFSNotImplementedError: _UNKNOWN,
    apsw.VFSFileClosedError: _UNKNOWN,
}

_MESSAGES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, "the disk is full; nothing was applied"),
    (apsw.BusyError, "the database file is locked by another program; nothing was applied"),
    (apsw.CorruptError, "the database file is damaged"),
    (apsw.IOError, "the disk reports an error"),
)


def store_error(error: Exception, *, in_commit: bool) -> StoreError:
    """The StoreError for an error of apsw."""
    text = next((text for kind, text in _MESSAGES if isinstance(error, kind)), type(error).__name__)
    detail = f"sqlite: {text} ({error})"
    if in_commit and MAY_HAVE_COMMITTED.get(type(error), True):  # type: ignore[arg-type]
        return OutcomeUnknown(detail)
    return StoreUnavailable(detail)


# --- while the store is opened -------------------------------------------------------------------

_EXPLANATIONS: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.NotADBError, "is not a SQLite database; name another file"),
    (apsw.CorruptError, "is damaged; restore a backup, or try `sqlite3 <file> .recover`"),
    (apsw.CantOpenError, "cannot be opened: is it a file, and may this user write to it and its directory?"),
    (apsw.ReadOnlyError, "is read-only for this user"),
    (apsw.PermissionsError, "is not accessible for this user"),
    (apsw.FullError, "cannot be written: the disk is full"),
    (apsw.BusyError, "is locked by another program"),
)


class setup_errors:  # noqa: N801 - a context manager
    """Raises errors of apsw while the store is opened as a SetupError that says what to do."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, apsw.Error):
            return
        for kind, text in _EXPLANATIONS:
            if isinstance(error, kind):
                raise store_url_error(f"{self._path} {text} ({error})") from error
        raise store_url_error(f"{self._path} cannot be used: {error}") from error
