"""The file of SqliteStore: who may open it, what is refused, and what people see in it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from duetime.domain.timer import BEFORE_ALL, Outcome, TimerKey
from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, Found, ListQuery, Page, PageRequest, open_store
from duetime.stores.sqlite.store import SqliteStore
from duetime.testing import make_reached, make_timer


def url_of(path: Path) -> str:
    return f"sqlite:///{path}"


async def opened(path: Path) -> SqliteStore:
    store = SqliteStore.from_url(url_of(path))
    await store.migrate()
    await store.open()
    return store


async def owned(store: SqliteStore) -> Fence:
    await store.ensure_shards(1)
    version = (await store.shards())[0].version
    [row] = await store.claim([Claim(0, version, 7, "me", "here:1", 1)])
    return row.fence


async def test_a_second_store_on_the_file_is_refused_and_the_error_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    who = SqliteStore.holder(url_of(path))
    assert who is not None
    assert who["pid"] == os.getpid()
    for start in (SqliteStore.from_url(url_of(path)).open, SqliteStore.from_url(url_of(path)).migrate):
        with pytest.raises(SetupError, match=rf"in use by process {os.getpid()} .* since {who['since']}"):
            await start()
    await store.close()
    assert SqliteStore.holder(url_of(path)) is None
    await (await opened(path)).close()


async def test_a_killed_process_leaves_the_file_free_and_its_commits_in_it(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    program = (
        "import asyncio, sys\n"
        "from duetime.store import Batch, Claim, open_store\n"
        "from duetime.testing import make_timer\n"
        "async def main():\n"
        "    store = open_store(sys.argv[1])\n"
        "    await store.migrate()\n"
        "    await store.open()\n"
        "    await store.ensure_shards(1)\n"
        "    [row] = await store.claim([Claim(0, 0, 7, 'me', 'here:1', 1)])\n"
        "    await store.commit([Batch(row.fence, [make_timer()])])\n"
        "    print('committed', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, url_of(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == b"committed"
        with pytest.raises(SetupError, match=f"in use by process {process.pid}"):
            await opened(path)
        process.send_signal(signal.SIGKILL)
    store = await opened(path)
    assert list((await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 10)]))[0].timers) == [make_timer()]
    await store.close()


async def test_a_closed_store_is_one_file_and_a_free_lock(tmp_path: Path) -> None:
    store = await opened(tmp_path / "duetime.db")
    await owned(store)
    await store.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["duetime.db", "duetime.db.lock"]


async def test_a_call_on_a_store_that_is_not_open_is_an_error(tmp_path: Path) -> None:
    store = SqliteStore.from_url(url_of(tmp_path / "duetime.db"))
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.shards()
    await store.migrate()
    await store.open()
    await store.close()
    with pytest.raises(StoreUnavailable, match="not open"):
        await store.commit([])


async def test_a_file_without_our_schema_is_not_opened_before_it_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    with pytest.raises(SchemaMismatch, match="does not exist"):
        await SqliteStore.from_url(url_of(path)).open()
    path.touch()
    with pytest.raises(SchemaMismatch, match="has no tables yet"):
        await SqliteStore.from_url(url_of(path)).open()
    await (await opened(path)).close()


async def test_case_53_a_schema_of_a_newer_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    await (await opened(path)).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    store = SqliteStore.from_url(url_of(path))
    with pytest.raises(SchemaMismatch, match="newer Duetime"):
        await store.open()
    with pytest.raises(SchemaMismatch, match="newer Duetime"):
        await store.migrate()
    await store.close()
    assert SqliteStore.holder(url_of(path)) is None


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear reader, " * 1_000)
    store = SqliteStore.from_url(url_of(path))
    for start in (store.migrate, store.open):
        with pytest.raises(SetupError, match="not a SQLite database"):
            await start()
    await store.close()
    assert path.read_text() == "Dear reader, " * 1_000


async def test_a_database_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE timers (mine TEXT)")
    db.commit()
    db.close()
    before = path.read_bytes()
    store = SqliteStore.from_url(url_of(path))
    for start in (store.migrate, store.open):
        with pytest.raises(SetupError, match="another program"):
            await start()
    await store.close()
    assert path.read_bytes() == before


async def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    await owned(store)
    await store.close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)  # all pages but the first
    path.write_bytes(content)
    with pytest.raises(SetupError, match="damaged"):
        await SqliteStore.from_url(url_of(path)).open()


@pytest.mark.parametrize("name", ["missing/duetime.db", "folder"])
async def test_a_path_that_cannot_be_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    store = SqliteStore.from_url(url_of(tmp_path / name))
    with pytest.raises(SetupError, match=r"store\.url"):
        await store.migrate()
    await store.close()


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="this user may write everywhere")
async def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(SetupError, match="cannot write in the directory"):
        await SqliteStore.from_url(url_of(tmp_path / "duetime.db")).migrate()


@pytest.mark.parametrize("url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite:///:memory:", "sqlite:///a.db?x=1"])
def test_a_url_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(SetupError, match="names no file"):
        open_store(url)


async def test_a_relative_and_an_encoded_path_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = SqliteStore.from_url("sqlite:///with%20space%3F.db")
    await store.migrate()
    await store.close()
    assert (tmp_path / "with space?.db").exists()


async def test_commits_are_durable_and_the_file_has_our_application_id(tmp_path: Path) -> None:
    store = await opened(tmp_path / "duetime.db")
    db = store._write_db
    assert db is not None
    assert db.pragma("journal_mode") == "wal"
    assert db.pragma("synchronous") == 2
    await store.close()
    header = (tmp_path / "duetime.db").read_bytes()[68:72]
    assert header == b"DueT"


async def test_a_commit_whose_caller_is_cancelled_is_applied(tmp_path: Path) -> None:
    store = await opened(tmp_path / "duetime.db")
    fence = await owned(store)
    task = asyncio.create_task(store.commit([Batch(fence, [make_timer()])]))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.commit([Batch(fence)])  # after it in the queue
    assert list((await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 10)]))[0].timers) == [make_timer()]
    await store.close()


async def test_timer_schedules_shows_each_timer_once_as_text(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    fence = await owned(store)
    at_ms = 1_763_100_000_007
    waiting = make_timer("waiting", at_ms + 5_000, scheduled_at_ms=at_ms, created_at_ms=0, correlation_id="trace")
    ended = [
        make_reached(make_timer("over", at_ms, created_at_ms=1, generation=g), Outcome.FAILED, reached_at_ms=at_ms + g)
        for g in (1, 2)
    ]
    earlier = make_reached(make_timer("waiting", at_ms), reached_at_ms=at_ms)
    await store.commit([Batch(fence, [waiting], (), [*ended, earlier])])
    await store.close()
    db = sqlite3.connect(path)
    rows = db.execute("SELECT * FROM timer_schedules ORDER BY service_call_id").fetchall()
    plan = json.dumps(
        db.execute("EXPLAIN QUERY PLAN SELECT * FROM timer_schedules WHERE correlation_id = 'x'").fetchall()
    )
    db.close()
    due, born = "2025-11-14T06:00:00.007Z", "1970-01-01T00:00:00.000Z"
    assert rows == [
        ("test", "over", None, due, "1970-01-01T00:00:00.001Z", "2025-11-14T06:00:00.009Z", "Reached"),
        ("test", "waiting", "trace", due, born, None, "Scheduled"),
    ]
    assert plan.count("timers_by_correlation") == 2


async def test_timer_schedules_shows_failed_and_skipped_timers_as_reached_and_no_cancelled_ones(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    ended = [make_reached(make_timer(str(outcome.value)), outcome, reached_at_ms=5) for outcome in Outcome]
    cancelled_later = [
        make_reached(make_timer("twice", generation=generation), outcome, reached_at_ms=generation)
        for generation, outcome in ((1, Outcome.DELIVERED), (2, Outcome.CANCELLED))
    ]
    await store.commit([Batch(await owned(store), (), (), [*ended, *cancelled_later])])
    await store.close()
    db = sqlite3.connect(path)
    shown = dict(db.execute("SELECT service_call_id, state FROM timer_schedules").fetchall())
    with pytest.raises(sqlite3.OperationalError, match="cannot modify timer_schedules because it is a view"):
        db.execute("DELETE FROM timer_schedules")
    db.close()
    assert shown == {"delivered": "Reached", "failed": "Reached", "skipped": "Reached"}


@pytest.mark.skipif(sys.platform == "win32", reason="no such modes")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_only_the_owner_can_read_the_files_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """The files contain signing secrets and payloads."""
    before = os.umask(umask)
    try:
        store = await opened(tmp_path / "duetime.db")
        fence = await owned(store)
        await store.commit([Batch(fence, [make_timer()])])
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        await store.close()
    finally:
        os.umask(before)
    names = {"duetime.db", "duetime.db-wal", "duetime.db-shm", "duetime.db.lock"}
    assert modes == dict.fromkeys(names, 0o600)


# --- text that is no UTF-8 ------------------------------------------------------------------------


async def spoil(path: Path, column: str, timer_id: str, row_type: int = 2) -> None:
    db = apsw.Connection(str(path))
    db.set_busy_timeout(5_000)
    db.execute(
        f"UPDATE timers SET {column} = CAST(x'22ff22' AS TEXT) WHERE timer_id = ? AND row_type = ?",
        (timer_id, row_type),
    )
    assert db.changes() == 1
    db.close()


@pytest.mark.parametrize("column", ["timer_payload", "timer_options", "timer_callback_url", "timer_correlation_id"])
async def test_a_text_that_is_not_utf8_makes_only_its_row_unreadable(tmp_path: Path, column: str) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    fence = await owned(store)
    timers = [make_timer(f"t-{n}", 100 + n, payload='"ü\\ud800"', correlation_id="c") for n in range(4)]
    await store.commit([Batch(fence, timers)])
    await spoil(path, column, "t-1")
    good = [timers[0], *timers[2:]]
    [page] = await store.load([PageRequest(0, BEFORE_ALL, 500, 50)])
    assert (list(page.timers), page.next) == (good, None)
    assert [(item.position, item.timer_id) for item in page.unreadable] == [(timers[1].position, "t-1")]
    found = await store.get_many([(0, timer.key) for timer in timers])
    assert [item.timer for item in found] == [timers[0], None, *timers[2:]]
    assert [item.unreadable is None for item in found] == [True, False, True, True]
    listing = await store.list_timers(ListQuery(namespace="test", num_shards=1))
    assert (list(listing.timers), listing.unreadable) == (good, 1)
    [put] = await store.commit([Batch(fence, [timers[1]])])
    assert put == Committed(frozenset({0}))
    assert (await store.load([PageRequest(0, BEFORE_ALL, 500, 50)])) == [Page(timers, None)]
    await store.close()


async def test_a_reached_row_whose_text_is_not_utf8_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    fence = await owned(store)
    await store.commit([Batch(fence, reached=[make_reached(make_timer("a")), kept := make_reached(make_timer("b"))])])
    await spoil(path, "timer_payload", "a", 3)
    keys = [(0, TimerKey("test", name)) for name in ("a", "b")]
    assert await store.get_many(keys) == [Found(), Found(None, kept)]
    await store.close()


async def test_an_id_that_is_not_utf8_is_reported_as_empty(tmp_path: Path) -> None:
    path = tmp_path / "duetime.db"
    store = await opened(path)
    await store.commit([Batch(await owned(store), [timer := make_timer("a")])])
    await spoil(path, "timer_id", "a")
    [page] = await store.load([PageRequest(0, BEFORE_ALL, 1 << 53, 50)])
    assert [(item.position, item.namespace, item.timer_id) for item in page.unreadable] == [
        (timer.position, "test", "")
    ]
    await store.close()
