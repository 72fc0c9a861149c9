"""SqliteStore: one file, one process, one writer. `pip install duetime` needs no other database.

There are three threads, each with a connection. The writer runs every write in a BEGIN IMMEDIATE transaction, so that a
fence that was read in it is valid until its COMMIT. The reader runs loads and gets, which do not wait for commits. The
lister runs lists, which may take long, so that nothing else waits for them. WAL with synchronous=FULL: a commit that
returned is on disk.

statements.py and listing.py have the SQL, rows.py how results are read, connection.py the file, its lock and the
threads, errors.py the meaning of errors, schema.py the migrations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import apsw

from duetime.clock import Clock, SystemClock
from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import ShardLost, StoreError, StoreUnavailable
from duetime.store import (
    Batch,
    Capabilities,
    Claim,
    Committed,
    Diagnosis,
    Fence,
    Found,
    Listing,
    ListQuery,
    Member,
    Page,
    PageRequest,
    ShardRow,
)
from duetime.stores.sqlite import connection, listing, schema, statements
from duetime.stores.sqlite.connection import ConnectionThread, FileLock
from duetime.stores.sqlite.errors import store_error

__all__ = ["SqliteStore", "wipe"]

P = ParamSpec("P")
T = TypeVar("T")

# Of the JSON text that one statement returns. A page that would be longer is made shorter.
RESULT_BYTES_MAX = 128 * 1024 * 1024
# A checkpoint every 16,000 pages (64 MiB of log): the default of 1,000 costs a third to a half of the throughput.
WRITER_PRAGMAS = ("synchronous=FULL", "temp_store=MEMORY", "cache_size=-65536", "wal_autocheckpoint=16000")
READER_PRAGMAS = ("query_only=ON", "temp_store=MEMORY", "cache_size=-16384")


# --- the store -----------------------------------------------------------------------------------


class SqliteStore:
    capabilities = Capabilities(
        name="sqlite", batch_max=2_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1, exclusive=True
    )

    def __init__(self, path: str, clock: Clock | None = None) -> None:
        self._path = path
        self._clock = clock or SystemClock()
        self._lock: FileLock | None = None
        self._writer: ConnectionThread | None = None
        self._reader: ConnectionThread | None = None
        self._lister: ConnectionThread | None = None
        self._write_db: apsw.Connection | None = None
        self._read_db: apsw.Connection | None = None
        self._list_db: apsw.Connection | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(connection.path_of(url))

    @staticmethod
    def holder(url: str) -> dict[str, Any] | None:
        """The process that uses the file: {"pid", "host", "since"}; None if there is none. Changes nothing."""
        return connection.holder(url)

    # -- open and close. migrate() or open(), whichever is called first, takes the lock; close() releases it.

    async def migrate(self) -> None:
        await self._start().run(self._migrate)

    async def open(self) -> None:
        try:
            await self._start().run(self._connect)
        except BaseException:
            await self.close()
            raise
        if self._reader is None:  # a second open() changes nothing
            self._reader = ConnectionThread("duetime-sqlite-reader")
            self._lister = ConnectionThread("duetime-sqlite-lister")

    async def close(self) -> None:
        """Runs a checkpoint, so that the database is in one file, and closes the file. May be called more than once."""
        writer, readers = self._writer, (self._reader, self._lister)
        self._writer = self._reader = self._lister = None
        for reader in readers:
            if reader is not None:
                reader.stop()
        if writer is not None:
            await writer.run(self._disconnect)
            writer.stop()

    async def diagnose(self) -> Diagnosis:
        return Diagnosis()

    def _start(self) -> ConnectionThread:
        if self._writer is None:
            self._writer = ConnectionThread("duetime-sqlite-writer")
        return self._writer

    def _take_lock(self) -> None:
        if self._lock is None:
            self._lock = FileLock(self._path)

    def _migrate(self) -> None:
        self._take_lock()
        schema.migrate(self._path)

    def _connect(self) -> None:
        self._take_lock()
        if self._write_db is None:
            self._write_db = schema.connect(self._path, *WRITER_PRAGMAS)
            self._read_db = schema.connect(self._path, *READER_PRAGMAS)
            self._list_db = schema.connect(self._path, *READER_PRAGMAS)
            for db in (self._read_db, self._list_db):
                db.limit(apsw.SQLITE_LIMIT_LENGTH, RESULT_BYTES_MAX)

    def _disconnect(self) -> None:
        for reading in (self._read_db, self._list_db):
            if reading is not None:
                reading.close()
        if self._write_db is not None:
            with contextlib.suppress(apsw.Error):  # then the log stays and is complete; the next open reads it
                self._write_db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
            self._write_db.close()
        self._read_db = self._list_db = self._write_db = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- reads and writes

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
        return await self._list(listing.list_timers, query)

    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        return await self._list(listing.next_namespace, correlation_id, after)

    async def _list(self, work: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._lister is None or self._list_db is None:
            raise StoreUnavailable("the store is not open")
        db = self._list_db
        return await self._lister.run(lambda: _query(lambda: work(db, *args, **kwargs)))

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
        result = work()
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
    return result


def _query(work: Callable[[], T]) -> T:
    try:
        return work()
    except Exception as error:
        raise store_error(error, in_commit=False) from error


def _roll_back(db: apsw.Connection) -> None:
    """Never raises: if the rollback fails, it is repeated before the next transaction."""
    with contextlib.suppress(apsw.Error):
        if db.in_transaction:
            db.execute("ROLLBACK")


async def wipe(url: str) -> None:
    """For tests: deletes the file and its log."""
    for suffix in ("", "-wal", "-shm"):
        Path(connection.path_of(url) + suffix).unlink(missing_ok=True)  # noqa: ASYNC240
