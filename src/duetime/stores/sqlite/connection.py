"""The file under SqliteStore: its path, its lock, its schema, and the threads its connections live on.

One process at a time: the store holds an advisory lock on `<file>.lock`, which the operating system
drops when the process dies, and which says in JSON who holds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from importlib import resources
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import unquote

import apsw
import msgspec

from duetime.clock import SystemClock
from duetime.domain.instants import format_instant
from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable

__all__ = ["FileLock", "Worker", "connect", "holder", "migrate", "path_of"]

APPLICATION_ID = 0x44756554  # "DueT" in the file's header: tells our files from other programs'
LOCK_PATIENCE_SECONDS = 0.5  # a predecessor may be in its last breath
BUSY_TIMEOUT_MS = 2_000

_MIGRATIONS = sorted(
    (
        entry
        for entry in resources.files("duetime.stores.sqlite").joinpath("migrations").iterdir()
        if ".sql" in entry.name
    ),
    key=lambda entry: entry.name,
)
SCHEMA_VERSION = len(_MIGRATIONS)


def path_of(url: str) -> str:
    """sqlite:///relative.db or sqlite:////absolute/path.db, percent-encoded where needed."""
    prefix, separator, rest = url.partition(":///")
    path = unquote(rest)
    if prefix != "sqlite" or not separator or path in ("", ":memory:") or "?" in rest or "#" in rest:
        raise SetupError(
            f"store.url: {url!r} names no file; write sqlite:///relative.db or sqlite:////absolute/path.db"
            " (for a store in memory, memory://)",
            field="store.url",
        )
    return os.path.realpath(path)


# --- the lock ------------------------------------------------------------------------------------

if sys.platform == "win32":  # pragma: no cover - exercised on Windows only
    import msvcrt

    def _try_lock(handle: int) -> bool:
        # Windows locks are mandatory: lock a byte far behind the text, so that others can read who it is.
        os.lseek(handle, 1 << 30, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True
else:
    import fcntl

    def _try_lock(handle: int) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


class FileLock:
    """The right to use a database file, held from construction to `release`."""

    def __init__(self, path: str) -> None:
        self._handle = _take(path)
        text = msgspec.json.encode(
            {"pid": os.getpid(), "host": socket.gethostname(), "since": format_instant(SystemClock().wall_ms())}
        )
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same, only its text is missing
            os.ftruncate(self._handle, 0)
            os.lseek(self._handle, 0, os.SEEK_SET)
            os.write(self._handle, text)

    def release(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def _take(path: str) -> int:
    try:
        handle = os.open(path + ".lock", os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
    except OSError as error:
        where = os.path.dirname(path)
        raise SetupError(
            f"store.url: cannot write in the directory {where}: {error.strerror}", field="store.url"
        ) from None
    give_up_at = time.monotonic() + LOCK_PATIENCE_SECONDS
    while not _try_lock(handle):
        if time.monotonic() >= give_up_at:
            os.close(handle)
            who = _read_holder(path)
            raise SetupError(
                f"store.url: {path} is in use by process {who.get('pid', 'unknown')}"
                f" on {who.get('host', 'this machine')} since {who.get('since', 'an unknown time')};"
                " a SQLite file serves one process at a time",
                field="store.url",
            )
        time.sleep(0.02)
    return handle


def holder(url: str) -> dict[str, Any] | None:
    """Who uses the file now: {"pid", "host", "since"}; None if nobody does. Changes nothing."""
    path = path_of(url)
    try:
        handle = os.open(path + ".lock", os.O_RDWR)
    except OSError:
        return None
    try:
        return None if _try_lock(handle) else _read_holder(path)
    finally:
        os.close(handle)


def _read_holder(path: str) -> dict[str, Any]:
    try:
        with open(path + ".lock", "rb") as file:
            who = msgspec.json.decode(file.read())
    except (OSError, msgspec.MsgspecError):
        return {}
    return who if isinstance(who, dict) else {}


# --- the schema ----------------------------------------------------------------------------------


def migrate(path: str) -> None:
    """Make the tables, or bring them up to this version. Each step is whole or not at all."""
    with _explained(path):
        _make_private(path)
        db = _open(path, apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            found = _recognise(path, db)
            _use_wal(path, db)
            for number in range(found + 1, SCHEMA_VERSION + 1):
                script = _MIGRATIONS[number - 1].read_text("utf-8")
                db.execute("BEGIN IMMEDIATE")
                try:
                    db.execute(script)
                    db.execute(f"PRAGMA application_id={APPLICATION_ID}")
                    db.execute(f"PRAGMA user_version={number}")
                    db.execute("COMMIT")
                finally:
                    if db.in_transaction:
                        db.execute("ROLLBACK")
        finally:
            db.close()


def connect(path: str, *pragmas: str) -> apsw.Connection:
    """A connection to a file whose schema is exactly this version's."""
    if not os.path.exists(path):
        raise SchemaMismatch(f"{path} does not exist; `duetime serve` makes it")
    with _explained(path):
        db = _open(path, apsw.SQLITE_OPEN_READWRITE)
        try:
            found = _recognise(path, db)
            if found < SCHEMA_VERSION:
                raise SchemaMismatch(
                    f"{path} has schema {found}, this version needs {SCHEMA_VERSION}; `duetime serve` updates it"
                )
            _use_wal(path, db)
            for pragma in pragmas:
                db.execute(f"PRAGMA {pragma}").fetchall()
            # A damaged root page should stop the start, not the first request.
            for table in ("timers", "members", "namespaces"):
                db.execute(f"SELECT 1 FROM {table} LIMIT 1").fetchall()  # noqa: S608 - names from the line above
        except BaseException:
            db.close()
            raise
        return db


def _open(path: str, flags: int) -> apsw.Connection:
    # The cache holds every statement text of the store: a handful, times the chunk sizes.
    db = apsw.Connection(path, flags=flags, statementcachesize=320)
    db.set_busy_timeout(BUSY_TIMEOUT_MS)
    return db


def _make_private(path: str) -> None:
    """A new file is its owner's alone: signing secrets are in it. SQLite gives its log the same mode."""
    with contextlib.suppress(OSError):  # it is there already, or cannot be made: then SQLite says why
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def _recognise(path: str, db: apsw.Connection) -> int:
    """The schema version of the file, 0 for an empty one."""
    application_id, version = db.pragma("application_id"), db.pragma("user_version")
    if application_id != APPLICATION_ID:
        if application_id or version or db.execute("SELECT count(*) FROM sqlite_schema").get:
            raise SetupError(
                f"store.url: {path} is a SQLite database of another program; name another file", field="store.url"
            )
        return 0
    if version > SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{path} has schema {version}, this version knows {SCHEMA_VERSION}: it was used by a newer Duetime"
        )
    return int(version)


def _use_wal(path: str, db: apsw.Connection) -> None:
    if db.pragma("journal_mode", "wal") != "wal":
        raise SetupError(f"store.url: {path}: this file system cannot hold a SQLite write-ahead log", field="store.url")


_EXPLANATIONS: tuple[tuple[type[apsw.Error], str], ...] = (
    (apsw.NotADBError, "is not a SQLite database; name another file"),
    (apsw.CorruptError, "is damaged; restore a backup, or try `sqlite3 <file> .recover`"),
    (apsw.CantOpenError, "cannot be opened: is it a file, and may this user write to it and its directory?"),
    (apsw.ReadOnlyError, "is read-only for this user"),
    (apsw.PermissionsError, "is not accessible for this user"),
    (apsw.FullError, "cannot be written: the disk is full"),
    (apsw.BusyError, "is locked by another program"),
)


class _explained:  # noqa: N801 - reads as a word
    """What goes wrong while opening becomes a SetupError that says what to do."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        if not isinstance(error, apsw.Error):
            return
        for kind, text in _EXPLANATIONS:
            if isinstance(error, kind):
                raise SetupError(f"store.url: {self._path} {text} ({error})", field="store.url") from error
        raise SetupError(f"store.url: {self._path} cannot be used: {error}", field="store.url") from error


# --- the threads ---------------------------------------------------------------------------------

T = TypeVar("T")


class Worker:
    """A thread for one connection. `run` hands it a function and awaits the answer: one hop there, one back.

    A cancelled `run` gives up waiting; the work itself is done all the same.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._stopped = False
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        if self._stopped:
            raise StoreUnavailable("the store is closed")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def job() -> None:
            try:
                result = work()
            except BaseException as error:
                _tell(loop, _fail, answer, error)
            else:
                _tell(loop, _succeed, answer, result)

        self._jobs.put(job)
        return await answer

    def stop(self) -> None:
        """After what was asked for so far."""
        self._stopped = True
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # hold no batch while waiting for the next


def _tell(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is waiting any more
        loop.call_soon_threadsafe(act, *args)


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
