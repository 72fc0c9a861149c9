"""The database file of SqliteStore: its path, its lock, and the threads of its connections.

Only one process may use a file at a time. The store has an advisory lock on `<file>.lock`, which the operating system
releases when the process ends. The content of that file says in JSON which process has the lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from urllib.parse import unquote

import apsw
import msgspec

from duetime.clock import SystemClock
from duetime.domain.instants import format_instant
from duetime.errors import StoreUnavailable
from duetime.printable import redacted_url
from duetime.stores.store_url import store_url_error

__all__ = ["ConnectionThread", "FileLock", "holder", "open_file", "path_of"]

LOCK_WAIT_SECONDS = 0.5  # the previous process may be about to end
BUSY_TIMEOUT_MS = 2_000


def path_of(url: str) -> str:
    """sqlite:///relative.db or sqlite:////absolute/path.db, percent-encoded where needed."""
    prefix, separator, rest = url.partition(":///")
    path = unquote(rest)
    if prefix != "sqlite" or not separator or path in ("", ":memory:") or "?" in rest or "#" in rest:
        raise store_url_error(
            f"{redacted_url(url)!r} names no file; write sqlite:///relative.db or sqlite:////absolute/path.db"
            " (for a store in memory, memory://)"
        )
    return os.path.realpath(path)


# --- the lock ------------------------------------------------------------------------------------

if sys.platform == "win32":  # pragma: no cover - exercised on Windows only
    import msvcrt

    def _try_lock(handle: int) -> bool:
        # Windows locks are mandatory: lock a byte far after the text, so that other processes can read the text.
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
    """The lock of a database file, from construction to `release`."""

    def __init__(self, path: str) -> None:
        self._handle = _take(path)
        text = msgspec.json.encode(
            {"pid": os.getpid(), "host": socket.gethostname(), "since": format_instant(SystemClock().wall_ms())}
        )
        with contextlib.suppress(OSError):  # on a full disk the lock is valid, only its text is missing
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
        folder = os.path.dirname(path)
        raise store_url_error(f"cannot write in the directory {folder}: {error.strerror}") from None
    give_up_at = time.monotonic() + LOCK_WAIT_SECONDS
    while not _try_lock(handle):
        if time.monotonic() >= give_up_at:
            os.close(handle)
            who = _read_holder(path)
            raise store_url_error(
                f"{path} is in use by process {who.get('pid', 'unknown')}"
                f" on {who.get('host', 'this machine')} since {who.get('since', 'an unknown time')};"
                " only one process can use a SQLite file at a time"
            )
        time.sleep(0.02)
    return handle


def holder(url: str) -> dict[str, Any] | None:
    """The process that uses the file: {"pid", "host", "since"}; None if there is none. Changes nothing."""
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


# --- connections and their threads ---------------------------------------------------------------

T = TypeVar("T")


def open_file(path: str, flags: int) -> apsw.Connection:
    # The cache has space for every statement text of the store, including one for each number of inserted rows.
    db = apsw.Connection(path, flags=flags, statementcachesize=320)
    db.set_busy_timeout(BUSY_TIMEOUT_MS)
    return db


class ConnectionThread:
    """A thread for one connection. `run` executes a function on it and returns the result.

    If `run` is cancelled, the function is executed nevertheless.
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
                _call_on_loop(loop, _fail, answer, error)
            else:
                _call_on_loop(loop, _succeed, answer, result)

        self._jobs.put(job)
        return await answer

    def stop(self) -> None:
        """Stops the thread after the functions that are queued."""
        self._stopped = True
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # keep no batch in memory while waiting for the next


def _call_on_loop(loop: asyncio.AbstractEventLoop, act: Callable[..., None], *args: Any) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop is closed: no task waits for the result
        loop.call_soon_threadsafe(act, *args)


def _succeed(answer: asyncio.Future[T], result: T) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[T], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
