"""SqliteStore from open to close: the lock, migrations, threads, and texts of errors."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

from duetime.domain.timer import BEFORE_ALL
from duetime.errors import MemberDead, OutcomeUnknown, SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, Claim, Fence, ListQuery, Member, PageRequest
from duetime.stores.migrations import Migrations
from duetime.stores.sqlite import connection, schema
from duetime.stores.sqlite.connection import ConnectionThread, FileLock, holder
from duetime.stores.sqlite.errors import MAY_HAVE_COMMITTED, setup_errors, store_error
from duetime.stores.sqlite.schema import connect, migrate
from duetime.stores.sqlite.store import SqliteStore, wipe
from duetime.testing import make_timer
from duetime.testing.virtual import START_WALL_MS


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "duetime.db"


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore.from_url(url_of(path))
    await store.migrate()
    await store.open()
    return store


async def owned(store: SqliteStore) -> Fence:
    await store.ensure_shards(1)
    [row] = await store.claim([Claim(0, 0, 7, "me", "here:1", 1)])
    return row.fence


_earlier: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_earlier_tests() -> None:
    _earlier.clear()
    _earlier.update(threading.enumerate())


def our_threads() -> set[str]:
    new = [thread for thread in threading.enumerate() if thread not in _earlier]
    return {thread.name for thread in new if thread.name.startswith("duetime-sqlite")}


# --- opening and closing -------------------------------------------------------------------------


async def test_a_store_has_a_thread_for_each_connection_and_stops_all_of_them(path: Path) -> None:
    store = await opened(path)
    await store.open()
    assert our_threads() == {"duetime-sqlite-writer", "duetime-sqlite-reader", "duetime-sqlite-lister"}
    await store.close()
    await store.close()
    assert our_threads() == set(), "opened twice is opened once"


def connections_to(path: Path) -> int:
    return sum(each.filename == str(path) for each in apsw.connections())


async def test_a_store_has_three_connections_and_closes_them_all(path: Path) -> None:
    store = await opened(path)
    await store.open()
    assert connections_to(path) == 3
    await store.close()
    assert connections_to(path) == 0
    migrate(str(path))
    assert connections_to(path) == 0


async def test_a_store_that_is_opened_again_has_its_lock_again(path: Path) -> None:
    store = await opened(path)
    await store.close()
    assert holder(url_of(path)) is None
    await store.open()
    assert holder(url_of(path)) is not None
    await store.close()


def test_the_store_is_exclusive_and_durable() -> None:
    capabilities = SqliteStore.capabilities
    assert (capabilities.exclusive, capabilities.durable, capabilities.parallel_commits) == (True, True, 1)
    assert capabilities.payload_bytes_max == 16_777_216


async def test_calls_fail_while_a_store_closes(path: Path) -> None:
    store = await opened(path)
    query = ListQuery(namespace="test", num_shards=1)
    closing = asyncio.ensure_future(store.close())
    await asyncio.sleep(0)
    for call in (store.shards, lambda: store.commit([]), lambda: store.list_timers(query)):
        with pytest.raises(StoreUnavailable, match="the store is not open"):
            await call()
    await closing


async def test_a_store_that_could_not_be_opened_has_neither_lock_nor_thread(path: Path) -> None:
    store = SqliteStore.from_url(url_of(path))
    with pytest.raises(SchemaMismatch):
        await store.open()
    assert our_threads() == set()
    assert holder(url_of(path)) is None
    other = await opened(path)
    await other.close()


async def test_every_call_on_a_store_that_is_not_open_fails(path: Path) -> None:
    store = SqliteStore.from_url(url_of(path))
    await store.migrate()  # the thread of the writer exists, its connection does not
    query = ListQuery(namespace="test", num_shards=1)
    for call in (store.shards, store.namespaces, lambda: store.commit([]), lambda: store.list_timers(query)):
        with pytest.raises(StoreUnavailable, match="the store is not open"):
            await call()
    await store.open()
    await store.close()
    for call in (store.shards, store.namespaces, lambda: store.commit([]), lambda: store.list_timers(query)):
        with pytest.raises(StoreUnavailable, match="the store is not open"):
            await call()


async def test_a_reader_can_write_nothing(path: Path) -> None:
    store = await opened(path)
    for db in (store._read_db, store._list_db):
        assert db is not None
        with pytest.raises(apsw.ReadOnlyError):
            db.execute("DELETE FROM timers")
    await store.close()


async def test_a_heartbeat_returns_the_time_of_the_machine(path: Path) -> None:
    class Clock:
        def wall_ms(self) -> int:
            return START_WALL_MS

    store = SqliteStore(str(path), Clock())  # type: ignore[arg-type]
    await store.migrate()
    await store.open()
    await store.join(Member("me", "here:1", 0, True, 0))
    assert await store.heartbeat("me", 1) == START_WALL_MS
    with pytest.raises(MemberDead):
        await store.heartbeat("another", 1)
    await store.close()
    usual = await opened(path)
    assert await usual.heartbeat("me", 2) > 1_700_000_000_000
    await usual.close()


async def test_wipe_removes_the_file_and_its_log_if_they_exist(path: Path) -> None:
    await wipe(url_of(path))
    for suffix in ("", "-wal", "-shm"):
        path.with_name(path.name + suffix).touch()
    await wipe(url_of(path))
    assert list(path.parent.iterdir()) == []


# --- the lock ------------------------------------------------------------------------------------


def test_a_lock_that_is_released_soon_is_waited_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FileLock(str(path))
    monkeypatch.setattr("duetime.stores.sqlite.connection.time.sleep", lambda seconds: first.release())
    second = FileLock(str(path))
    assert holder(url_of(path)) is not None
    with monkeypatch.context() as watched:
        closed: list[int] = []
        watched.setattr("duetime.stores.sqlite.connection.os.close", closed.append)
        first.release()  # a second release changes nothing
        assert closed == []
    assert holder(url_of(path)) is not None
    second.release()
    assert holder(url_of(path)) is None


def test_a_lock_that_is_not_released_is_an_error_after_the_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += 0.1

    monkeypatch.setattr("duetime.stores.sqlite.connection.time.monotonic", lambda: now)
    monkeypatch.setattr("duetime.stores.sqlite.connection.time.sleep", sleep)
    first = FileLock(str(path))
    with pytest.raises(SetupError, match="in use by process") as refused:
        FileLock(str(path))
    assert refused.value.field == "store.url"
    assert 4 <= len(slept) <= 6
    first.release()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="only Linux lists what is open")
def test_a_refused_lock_leaves_no_file_open(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LOCK_WAIT_SECONDS", 0)
    first = FileLock(str(path))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SetupError, match="in use by process"):
        FileLock(str(path))
    assert len(os.listdir("/proc/self/fd")) == before
    first.release()


@pytest.mark.parametrize("text", [b"", b"not JSON", b"[1]"])
def test_a_lock_whose_text_cannot_be_read_is_valid(path: Path, text: bytes) -> None:
    lock = FileLock(str(path))
    lock_file = path.with_name(path.name + ".lock")
    lock_file.write_bytes(text)
    assert holder(url_of(path)) == {}
    with pytest.raises(SetupError, match="in use by process unknown on this machine since an unknown time"):
        FileLock(str(path))
    lock.release()
    lock_file.write_bytes(b"x" * 1_000)  # of a process that ended: nothing of it remains after the new text
    again = FileLock(str(path))
    assert set(holder(url_of(path)) or {}) == {"pid", "host", "since"}
    again.release()


def test_a_missing_file_has_no_holder_and_is_not_created(path: Path) -> None:
    assert holder(url_of(path)) is None
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("url", ["sqlite:///a.db#x", "other:///a.db", "sqlite:/a.db"])
def test_a_url_with_more_or_less_than_a_path_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="names no file") as refused:
        connection.path_of(url)
    assert refused.value.field == "store.url"


# --- the schema ----------------------------------------------------------------------------------


def version_of(path: Path) -> int:
    db = sqlite3.connect(path)
    [version] = db.execute("PRAGMA user_version").fetchone()
    db.close()
    return int(version)


def test_a_file_of_an_earlier_schema_is_migrated_and_keeps_its_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = schema.SCHEMA_VERSION
    with monkeypatch.context() as earlier:
        earlier.setattr(schema, "_MIGRATIONS", Migrations(schema._MIGRATIONS.texts[:1]))
        migrate(str(path))
    assert version_of(path) == 1
    db = sqlite3.connect(path)
    db.execute("INSERT INTO members (instance_id, address, counter, alive, joined_at) VALUES ('a', 'b', 1, 1, 1)")
    db.commit()
    db.close()
    with pytest.raises(SchemaMismatch, match=f"has schema 1, this version needs {newest}"):
        connect(str(path))
    migrate(str(path))
    assert version_of(path) == newest
    opened = connect(str(path))
    assert opened.execute("SELECT instance_id FROM members").fetchall() == [("a",)]
    opened.close()


def test_a_migration_that_fails_in_the_middle_is_rolled_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = schema.SCHEMA_VERSION
    wrong = "CREATE TABLE half (a); INSERT INTO nowhere VALUES (1);"
    monkeypatch.setattr(schema, "_MIGRATIONS", Migrations([*schema._MIGRATIONS.texts, wrong]))
    with pytest.raises(SetupError, match="nowhere"):
        migrate(str(path))
    assert version_of(path) == newest, "the steps before it stay"
    db = sqlite3.connect(path)
    assert db.execute("SELECT name FROM sqlite_schema WHERE name = 'half'").fetchall() == []
    db.close()


@pytest.mark.parametrize("pragma", ["application_id", "user_version"])
def test_an_empty_file_with_the_mark_of_another_program_is_refused(path: Path, pragma: str) -> None:
    db = sqlite3.connect(path)
    db.execute(f"PRAGMA {pragma} = 5")
    db.commit()
    db.close()
    with pytest.raises(SetupError, match="another program"):
        migrate(str(path))


def test_a_file_system_that_does_not_support_wal_is_refused(path: Path) -> None:
    class Without:
        def pragma(self, name: str, value: str) -> str:
            return "delete"

    without: Any = Without()
    with pytest.raises(SetupError, match="does not support a SQLite write-ahead log"):
        schema._use_wal(str(path), without)


def test_a_connection_that_is_refused_is_closed(path: Path) -> None:
    migrate(str(path))
    db = sqlite3.connect(path)
    db.execute("DROP TABLE namespaces")
    db.commit()
    db.close()
    with pytest.raises(SetupError, match=r"cannot be used: .*no such table: namespaces") as refused:
        connect(str(path))
    assert connections_to(path) == 0, f"also while somebody looks at {refused.value}"


def test_a_connection_waits_a_moment_for_another_program_that_locks_the_file(path: Path) -> None:
    migrate(str(path))
    db = connect(str(path), "cache_size=-77")
    assert db.pragma("busy_timeout") == 2_000
    assert db.pragma("cache_size") == -77
    db.close()


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (apsw.NotADBError, "is not a SQLite database"),
        (apsw.CorruptError, "is damaged"),
        (apsw.CantOpenError, "cannot be opened"),
        (apsw.ReadOnlyError, "is read-only"),
        (apsw.PermissionsError, "is not accessible"),
        (apsw.FullError, "cannot be written: the disk is full"),
        (apsw.BusyError, "is locked by another program"),
        (apsw.SQLError, "cannot be used: x"),
    ],
)
def test_an_error_while_opening_is_a_setup_error_that_explains_it(error: type[apsw.Error], text: str) -> None:
    with (
        pytest.raises(SetupError, match=f"/some/file.db {text}") as told,
        setup_errors("/some/file.db"),
    ):
        raise error("x")
    assert told.value.field == "store.url"
    with pytest.raises(ZeroDivisionError), setup_errors("/some/file.db"):
        raise ZeroDivisionError


# --- errors of open stores -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [kind for kind, maybe in MAY_HAVE_COMMITTED.items() if maybe])
def test_after_these_errors_a_commit_may_be_on_disk(kind: type[apsw.Error]) -> None:
    assert isinstance(store_error(kind("x"), in_commit=True), OutcomeUnknown)


def test_the_errors_with_an_unknown_outcome_are_those_of_the_disk_and_unclear_ones() -> None:
    assert {kind.__name__ for kind, maybe in MAY_HAVE_COMMITTED.items() if maybe} == {
        "IOError",
        "NoMemError",
        "CorruptError",
        "ProtocolError",
        "InternalError",
        "InterruptError",
        "AbortError",
        "MisuseError",
        "NotFoundError",
        "VFSNotImplementedError",
        "VFSFileClosedError",
    }


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (apsw.FullError, "sqlite: the disk is full; nothing was applied"),
        (apsw.BusyError, "sqlite: the database file is locked by another program; nothing was applied"),
        (apsw.CorruptError, "sqlite: the database file is damaged"),
        (apsw.IOError, "sqlite: the disk reports an error"),
        (apsw.SQLError, "sqlite: SQLError"),
    ],
)
def test_an_error_has_an_explanation(error: type[apsw.Error], text: str) -> None:
    assert store_error(error("x"), in_commit=False).detail == f"{text} (x)"


async def test_a_transaction_that_was_left_open_is_rolled_back_before_the_next_one(path: Path) -> None:
    store = await opened(path)
    fence = await owned(store)
    assert store._write_db is not None
    store._write_db.execute("BEGIN IMMEDIATE; DELETE FROM timers")
    await store.commit([Batch(fence, [make_timer()])])
    [page] = await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 10)])
    assert page.timers == [make_timer()]
    await store.close()


async def test_a_read_that_fails_is_unavailable_whatever_the_error(path: Path) -> None:
    store = await opened(path)

    def broken(db: apsw.Connection) -> None:
        raise apsw.IOError("the disk did not answer")

    with pytest.raises(StoreUnavailable, match="the disk reports an error"):
        await store._read(broken)
    with pytest.raises(StoreUnavailable, match="the disk reports an error"):
        await store._write(broken)
    assert store._write_db is not None
    assert not store._write_db.in_transaction, "another program may write now"
    await store.close()


async def test_a_dead_member_gets_an_error_and_no_transaction_stays_open(path: Path) -> None:
    store = await opened(path)
    await store.join(Member("me", "here:1", 3, True, 0))
    assert await store.mark_dead("me", 3)
    with pytest.raises(MemberDead):
        await store.join(Member("me", "here:1", 3, True, 0))
    assert store._write_db is not None
    assert not store._write_db.in_transaction
    await store.close()


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
def thread() -> Iterator[ConnectionThread]:
    thread = ConnectionThread("duetime-sqlite-test")
    yield thread
    thread.stop()


async def test_work_runs_in_order_on_one_thread_and_its_errors_are_raised(thread: ConnectionThread) -> None:
    assert await thread.run(lambda: threading.current_thread().name) == "duetime-sqlite-test"
    assert await thread.run(lambda: threading.current_thread().daemon), "a process that ends does not wait for it"
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    numbers: list[int] = []
    await asyncio.gather(*(thread.run(lambda n=n: numbers.append(n)) for n in range(50)))  # type: ignore[misc]
    assert numbers == list(range(50))


async def test_a_stopped_thread_finishes_queued_work_and_rejects_new_work(thread: ConnectionThread) -> None:
    may_end = threading.Event()
    first = asyncio.ensure_future(thread.run(may_end.wait))
    second = asyncio.ensure_future(thread.run(lambda: "done"))
    await asyncio.sleep(0)
    threading.Timer(0.01, may_end.set).start()
    thread.stop()
    with pytest.raises(StoreUnavailable, match="the store is closed"):
        await thread.run(lambda: None)
    assert (await first, await second) == (True, "done")


@pytest.mark.parametrize("fails", [False, True])
async def test_work_of_a_cancelled_caller_is_finished_without_an_error(thread: ConnectionThread, fails: bool) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        may_end.wait()
        if fails:
            raise ZeroDivisionError

    given_up = asyncio.ensure_future(thread.run(work))
    await asyncio.to_thread(begun.wait)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    may_end.set()
    problems: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
    assert await thread.run(lambda: "next") == "next"
    assert problems == []


def test_work_whose_event_loop_is_closed_causes_no_error(thread: ConnectionThread) -> None:
    may_end = threading.Event()

    async def ask_and_leave() -> None:
        asking = asyncio.ensure_future(thread.run(may_end.wait))
        await asyncio.sleep(0)
        asking.cancel()

    asyncio.run(ask_and_leave())
    may_end.set()
    assert asyncio.run(thread.run(lambda: "next")) == "next"
