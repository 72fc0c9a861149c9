"""What SQLite's errors mean: not applied, or unknown; and what is stored afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import apsw
import pytest

from duetime.domain.timer import BEFORE_ALL, Timer
from duetime.errors import OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Claim, Fence, PageRequest
from duetime.stores.sqlite.errors import MAY_HAVE_COMMITTED, store_error
from duetime.stores.sqlite.store import SqliteStore
from duetime.testing import make_timer


def _all_below(kind: type[apsw.Error]) -> set[type[apsw.Error]]:
    return {kind} | {below for child in kind.__subclasses__() for below in _all_below(child)}


def test_every_error_of_the_driver_is_classified() -> None:
    assert _all_below(apsw.Error) - {apsw.Error} == set(MAY_HAVE_COMMITTED)


def test_before_the_commit_every_error_means_not_applied() -> None:
    for kind in MAY_HAVE_COMMITTED:
        assert isinstance(store_error(kind("x"), in_commit=False), StoreUnavailable)


def test_in_the_commit_an_unlisted_error_means_unknown() -> None:
    assert isinstance(store_error(RuntimeError("x"), in_commit=True), OutcomeUnknown)
    assert isinstance(store_error(apsw.IOError("x"), in_commit=True), OutcomeUnknown)
    assert isinstance(store_error(apsw.BusyError("x"), in_commit=True), StoreUnavailable)


class _Faults(apsw.VFS):
    """The real file system, except that the next writes or syncs of the log can fail."""

    def __init__(self) -> None:
        self.real = apsw.vfs_names()[0]
        super().__init__("duetime-faults", self.real)
        self.writes_left: int | None = None
        self.syncs_fail = False

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, faults: _Faults, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(faults.real, name, flags)
        self._faults = faults
        self._is_log = bool(flags[0] & apsw.SQLITE_OPEN_WAL)

    def xWrite(self, data: bytes, offset: int) -> None:
        faults = self._faults
        if self._is_log and faults.writes_left is not None:
            if faults.writes_left == 0:
                raise apsw.FullError("no space left")
            faults.writes_left -= 1
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        if self._is_log and self._faults.syncs_fail:
            raise apsw.IOError("the disk did not answer")
        super().xSync(flags)


@pytest.fixture
def faults() -> Iterator[_Faults]:
    faulty = _Faults()
    apsw.set_default_vfs("duetime-faults")
    yield faulty
    apsw.set_default_vfs(faulty.real)
    faulty.unregister()


@pytest.fixture
async def store(tmp_path: Path, faults: _Faults) -> AsyncIterator[SqliteStore]:
    store = SqliteStore.from_url(f"sqlite:///{tmp_path}/duetime.db")
    await store.migrate()
    await store.open()
    await store.ensure_shards(1)
    yield store
    await store.close()


async def _claimed(store: SqliteStore) -> Fence:
    version = (await store.shards())[0].version
    [row] = await store.claim([Claim(0, version, version + 7, "me", "here:1", 1)])
    return row.fence


async def _stored(store: SqliteStore) -> list[Timer]:
    return list((await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 1_000)]))[0].timers)


async def _restarted(store: SqliteStore) -> None:
    await store.close()
    await store.open()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_case_23_a_disk_that_fills_up_in_the_commit_applies_nothing_and_recovers(
    store: SqliteStore, faults: _Faults
) -> None:
    fence = await _claimed(store)
    kept = make_timer("kept", 1)
    await store.commit([Batch(fence, [kept])])
    large = [make_timer(f"n-{number}", payload='"' + "x" * 2_000 + '"') for number in range(50)]
    for writes_left in (0, 1, 2, 3, 20, 40):  # a frame is two writes: its header, its page
        faults.writes_left = writes_left
        with pytest.raises(StoreUnavailable, match="disk is full"):
            await store.commit([Batch(fence, large)])
        assert await _stored(store) == [kept]
        faults.writes_left = None
    await _restarted(store)
    assert await _stored(store) == [kept], "a recovery of the log finds nothing of it either"
    await store.commit([Batch(fence, [make_timer("after", 2)])])
    assert len(await _stored(store)) == 2


async def test_a_sync_that_fails_leaves_the_outcome_open_until_the_next_write(
    store: SqliteStore, faults: _Faults
) -> None:
    fence = await _claimed(store)
    faults.syncs_fail = True
    with pytest.raises(OutcomeUnknown, match="disk"):
        await store.commit([Batch(fence, [make_timer("unknown")])])
    faults.syncs_fail = False
    fence = await _claimed(store)  # what the engine does
    known = await _stored(store)
    await store.commit([Batch(fence, [make_timer("after", 2)])])
    await _restarted(store)
    assert await _stored(store) == [make_timer("after", 2), *known]


async def test_a_file_that_cannot_grow_applies_nothing_and_recovers(store: SqliteStore) -> None:
    fence = await _claimed(store)
    db = store._write_db
    assert db is not None
    limit = db.pragma("max_page_count", 40)
    with pytest.raises(StoreUnavailable, match="disk is full"):
        await store.commit([Batch(fence, [make_timer(f"n-{n}", payload="1" * 3_000) for n in range(200)])])
    assert await _stored(store) == []
    db.pragma("max_page_count", limit)
    await store.commit([Batch(fence, [make_timer()])])
    assert await _stored(store) == [make_timer()]


async def test_a_file_locked_by_another_program_is_unavailable_until_it_is_unlocked(
    store: SqliteStore, tmp_path: Path
) -> None:
    fence = await _claimed(store)
    assert store._write_db is not None
    store._write_db.set_busy_timeout(10)
    other = apsw.Connection(str(tmp_path / "duetime.db"))
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked by another program"):
        await store.commit([Batch(fence, [make_timer()])])
    assert await _stored(store) == [], "reads go on"
    other.execute("ROLLBACK")
    other.close()
    await store.commit([Batch(fence, [make_timer()])])
    assert await _stored(store) == [make_timer()]


async def test_a_value_that_cannot_be_stored_applies_nothing_of_its_commit(store: SqliteStore) -> None:
    fence = await _claimed(store)
    for wrong in (make_timer("wrong", generation=1 << 64), make_timer("wrong", payload="\ud800")):
        with pytest.raises(StoreUnavailable):
            await store.commit([Batch(fence, [make_timer("right"), wrong])])
        assert await _stored(store) == []
