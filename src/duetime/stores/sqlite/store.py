"""SqliteStore: one file, one process, one writer. What `pip install duetime` runs on.

Three threads, each with a connection: the writer does every write in one BEGIN IMMEDIATE transaction,
so that a fence that was read in it holds until its COMMIT; the reader answers loads and gets without
waiting behind commits; the lister answers lists, which may take long, so that nobody waits behind them.
WAL with synchronous=FULL: a commit that returned is on disk.

statements.py is what is said to the database, connection.py the file itself: lock, schema, threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

import apsw

from duetime.clock import Clock, SystemClock
from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import (
    Batch,
    Capabilities,
    Claim,
    Committed,
    Fence,
    Found,
    Listing,
    ListQuery,
    Member,
    Page,
    PageRequest,
    ShardRow,
)
from duetime.stores.sqlite import connection, statements
from duetime.stores.sqlite.connection import FileLock, Worker

__all__ = ["SqliteStore", "wipe"]

P = ParamSpec("P")
T = TypeVar("T")

ANSWER_BYTES_MAX = 128 * 1024 * 1024  # of one statement's JSON text; a page that would be longer is made shorter
# A checkpoint every 16,000 pages (64 MiB of log): the default of 1,000 costs a third to a half of the throughput.
WRITER_PRAGMAS = ("synchronous=FULL", "temp_store=MEMORY", "cache_size=-65536", "wal_autocheckpoint=16000")
READER_PRAGMAS = ("query_only=ON", "temp_store=MEMORY", "cache_size=-16384")


# --- errors --------------------------------------------------------------------------------------
#
# Before COMMIT nothing is certain but this: nothing was applied, whatever went wrong, since SQLite
# shows and recovers only transactions whose commit frame is in the log. So any error before it, after
# a rollback, is StoreUnavailable.
#
# In COMMIT the frames are written, the one that marks the commit last, and then synced. An error that is
# reported before or while writing leaves no whole commit frame: not applied. An error of the sync, or one
# that may be, leaves a frame that a recovery after a crash could find: unknown, until a later write has
# gone over it. The engine's re-claim is such a write.

_APPLIED_NOT: Final = False
_MAYBE: Final = True

# Each class of apsw, and whether a COMMIT that raises it may have been applied. tests/unit/stores/test_sqlite_errors.py
# fails when apsw has a class that is not listed.
MAY_HAVE_COMMITTED: dict[type[apsw.Error], bool] = {
    # Refused before a byte was written: locks, permissions, misuse, the statement itself.
    apsw.BusyError: _APPLIED_NOT,
    apsw.LockedError: _APPLIED_NOT,
    apsw.ReadOnlyError: _APPLIED_NOT,
    apsw.PermissionsError: _APPLIED_NOT,
    apsw.AuthError: _APPLIED_NOT,
    apsw.CantOpenError: _APPLIED_NOT,
    apsw.ConstraintError: _APPLIED_NOT,
    apsw.MismatchError: _APPLIED_NOT,
    apsw.RangeError: _APPLIED_NOT,
    apsw.TooBigError: _APPLIED_NOT,
    apsw.SQLError: _APPLIED_NOT,
    apsw.SchemaChangeError: _APPLIED_NOT,
    apsw.BindingsError: _APPLIED_NOT,
    apsw.NotADBError: _APPLIED_NOT,
    apsw.FormatError: _APPLIED_NOT,
    apsw.EmptyError: _APPLIED_NOT,
    apsw.NoLFSError: _APPLIED_NOT,
    apsw.ThreadingViolationError: _APPLIED_NOT,
    apsw.ForkingViolationError: _APPLIED_NOT,
    apsw.ConnectionClosedError: _APPLIED_NOT,
    apsw.ConnectionNotClosedError: _APPLIED_NOT,
    apsw.CursorClosedError: _APPLIED_NOT,
    apsw.IncompleteExecutionError: _APPLIED_NOT,
    apsw.ExecutionCompleteError: _APPLIED_NOT,
    apsw.ExecTraceAbort: _APPLIED_NOT,
    apsw.ExtensionLoadingError: _APPLIED_NOT,
    apsw.InvalidContextError: _APPLIED_NOT,
    apsw.NoFTS5Error: _APPLIED_NOT,
    # The disk is full: a frame did not fit, and the commit frame is the last one.
    apsw.FullError: _APPLIED_NOT,
    # The sync may have failed after the write, or nobody can say.
    apsw.IOError: _MAYBE,
    apsw.NoMemError: _MAYBE,
    apsw.CorruptError: _MAYBE,
    apsw.ProtocolError: _MAYBE,
    apsw.InternalError: _MAYBE,
    apsw.InterruptError: _MAYBE,
    apsw.AbortError: _MAYBE,
    apsw.MisuseError: _MAYBE,
    apsw.NotFoundError: _MAYBE,
    apsw.VFSNotImplementedError: _MAYBE,
    apsw.VFSFileClosedError: _MAYBE,
}

_MESSAGES: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.FullError, "the disk is full; nothing was applied"),
    (apsw.BusyError, "the database file is locked by another program; nothing was applied"),
    (apsw.CorruptError, "the database file is damaged"),
    (apsw.IOError, "the disk reports an error"),
)


def store_error(error: Exception, *, in_commit: bool) -> StoreError:
    """What a driver's error means to the engine."""
    text = next((text for kind, text in _MESSAGES if isinstance(error, kind)), type(error).__name__)
    detail = f"sqlite: {text} ({error})"
    if in_commit and MAY_HAVE_COMMITTED.get(type(error), True):  # type: ignore[arg-type]
        return OutcomeUnknown(detail)
    return StoreUnavailable(detail)


# --- the store -----------------------------------------------------------------------------------


class SqliteStore:
    capabilities = Capabilities(
        name="sqlite", batch_max=2_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1, exclusive=True
    )

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._lock: FileLock | None = None
        self._writer: Worker | None = None
        self._reader: Worker | None = None
        self._lister: Worker | None = None
        self._write_db: apsw.Connection | None = None
        self._read_db: apsw.Connection | None = None
        self._list_db: apsw.Connection | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(connection.path_of(url))

    @staticmethod
    def holder(url: str) -> dict[str, Any] | None:
        """Who has the file open: {"pid", "host", "since"}, or None. Changes nothing."""
        return connection.holder(url)

    # -- life. The lock is taken by whichever of migrate() and open() comes first, and kept until close().

    async def migrate(self) -> None:
        await self._start().run(self._migrate)

    async def open(self) -> None:
        try:
            await self._start().run(self._connect)
        except BaseException:
            await self.close()
            raise
        if self._reader is None:  # a second open() changes nothing
            self._reader = Worker("duetime-sqlite-reader")
            self._lister = Worker("duetime-sqlite-lister")

    async def close(self) -> None:
        """Checkpoint, so that the file alone is the database, and let go of it. More than once is fine."""
        writer, readers = self._writer, (self._reader, self._lister)
        self._writer = self._reader = self._lister = None
        for reader in readers:
            if reader is not None:
                reader.stop()
        if writer is not None:
            await writer.run(self._disconnect)
            writer.stop()

    def _start(self) -> Worker:
        if self._writer is None:
            self._writer = Worker("duetime-sqlite-writer")
        return self._writer

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = FileLock(self._path)

    def _migrate(self) -> None:
        self._take_lock()
        connection.migrate(self._path)

    def _connect(self) -> None:
        self._take_lock()
        if self._write_db is None:
            self._write_db = connection.connect(self._path, *WRITER_PRAGMAS)
            self._read_db = connection.connect(self._path, *READER_PRAGMAS)
            self._list_db = connection.connect(self._path, *READER_PRAGMAS)
            for db in (self._read_db, self._list_db):
                db.limit(apsw.SQLITE_LIMIT_LENGTH, ANSWER_BYTES_MAX)

    def _disconnect(self) -> None:
        for reading in (self._read_db, self._list_db):
            if reading is not None:
                reading.close()
        if self._write_db is not None:
            with contextlib.suppress(apsw.Error):  # then the log stays, complete, and the next open reads it
                self._write_db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._write_db.close()
        self._read_db = self._list_db = self._write_db = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- the two ways in

    async def _write(self, work: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        db = self._write_db
        if self._writer is None or db is None:
            raise StoreUnavailable("the store is not open")
        return await self._writer.run(lambda: _transaction(db, lambda: work(db, *args, **kwargs)))

    async def _read(self, work: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        db = self._read_db
        if self._reader is None or db is None:
            raise StoreUnavailable("the store is not open")
        return await self._reader.run(lambda: _query(lambda: work(db, *args, **kwargs)))

    # -- members

    async def join(self, member: Member) -> None:
        await self._write(statements.join, member)

    async def heartbeat(self, instance_id: str, counter: int) -> int:
        await self._write(statements.heartbeat, instance_id, counter)
        return self._clock.wall_ms()

    async def members(self) -> list[Member]:
        return await self._read(statements.members)

    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        return await self._write(statements.mark_dead, instance_id, counter)

    async def forget_member(self, instance_id: str) -> None:
        await self._write(statements.forget_member, instance_id)

    # -- shards

    async def ensure_shards(self, count: int) -> None:
        await self._write(statements.ensure_shards, count)

    async def shards(self) -> list[ShardRow]:
        return await self._read(statements.shards)

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await self._write(statements.claim, claims)

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await self._write(statements.release, fences)

    # -- timers

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        return await self._write(statements.commit, batches)

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        return await self._read(statements.load, requests)

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await self._read(statements.get_many, keys)

    async def list_timers(self, query: ListQuery) -> Listing:
        if self._lister is None or self._list_db is None:
            raise StoreUnavailable("the store is not open")
        db = self._list_db
        return await self._lister.run(lambda: _query(lambda: statements.list_timers(db, query)))

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await self._write(statements.purge_reached, fences, before_ms, limit)

    # -- namespaces

    async def namespaces(self) -> list[Namespace]:
        return await self._read(statements.namespaces)

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await self._write(statements.put_namespace, namespace, expected_revision)


def _transaction(db: apsw.Connection, work: Callable[[], T]) -> T:
    try:
        _roll_back(db)  # a transaction whose own rollback failed
        db.execute("BEGIN IMMEDIATE")
        answer = work()
    except StoreError:
        _roll_back(db)
        raise
    except Exception as error:
        _roll_back(db)
        raise store_error(error, in_commit=False) from error
    try:
        db.execute("COMMIT")
    except Exception as error:
        _roll_back(db)
        raise store_error(error, in_commit=True) from error
    return answer


def _query(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        raise store_error(error, in_commit=False) from error


def _roll_back(db: apsw.Connection) -> None:
    """Never raises: what cannot be rolled back now is rolled back before the next transaction."""
    with contextlib.suppress(apsw.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


async def wipe(url: str) -> None:
    """For tests: the file, and what lies beside it."""
    for suffix in ("", "-wal", "-shm"):
        Path(connection.path_of(url) + suffix).unlink(missing_ok=True)  # noqa: ASYNC240
