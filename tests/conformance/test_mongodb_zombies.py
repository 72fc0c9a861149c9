"""MongoDB: a fenced write and a claim in every order of their steps, in real sessions and transactions.

The conformance suite runs them at random; here each step is controlled by the test, and one test shows that a fence
that only reads is noticed. In MongoDB a transaction fails at once if another one has written the same document and not
ended yet; a write outside a transaction waits. A transaction also continues after its connection is closed: the next
owner has to end the transaction of an owner that crashed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import pytest
from pymongo.errors import AutoReconnect, OperationFailure, ServerSelectionTimeoutError

from duetime.domain.timer import Position
from duetime.errors import OutcomeUnknown, ShardLost, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence
from duetime.stores.mongodb import connection as mongodb_connection
from duetime.stores.mongodb import statements as mongodb_statements
from duetime.stores.mongodb.connection import Session, begin
from duetime.stores.mongodb.store import MongoStore, wipe
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from servers import fresh_database, require

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)
EVERYTHING = [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3)

Run = mongodb_statements.Run
Write = Callable[[Run, Fence], Awaitable[Sequence[Any]]]

WRITES: dict[str, Write] = {
    "put": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, [make_timer("new")])]),
    "replace": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, [make_timer("kept", 9)])]),
    "delete": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, (), [KEPT.key])]),
    "reached": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda run, fence: mongodb_statements.commit(run, [Batch(fence, *EVERYTHING)]),
    "purge": lambda run, fence: mongodb_statements.purge_reached(run, [fence], 1_000, 10),
    "release": lambda run, fence: mongodb_statements.release(run, [fence]),
}
WRITE_CONFLICT, NO_SUCH_TRANSACTION = 112, 251


class Scene:
    """A session of the old owner, in which a transaction runs step by step, one of the new owner, and both stores."""

    def __init__(self, old: MongoStore, new: MongoStore) -> None:
        self.store, self.new_store = old, new
        self.a: Session = old._open.commits._sessions[0]
        self.b: Session = new._open.commits._sessions[0]

    async def contents(self) -> tuple[object, ...]:
        """All contents except the shards, which a claim changes."""
        return await all_timers(self.store), await all_reached(self.store), (await self.row()).low_water

    async def row(self) -> Any:
        return (await self.store.shards())[0]

    async def filled(self) -> Fence:
        fence = await take(self.store, 0)
        await self.store.commit([Batch(fence, [KEPT], (), [OVER])])
        return fence

    async def step(self, name: str, fence: Fence) -> Sequence[Any]:
        """A's write in its open transaction, not committed."""
        return await WRITES[name](lambda work: work(self.a), fence)

    async def run_write(self, name: str, fence: Fence) -> Sequence[Any]:
        """A's write as the store does it: a transaction that is run again when it conflicts."""
        return await WRITES[name](self.store._open.commits.transaction, fence)

    async def claim_without_ending_sessions(self, fence: Fence, session: Session | None = None) -> Fence:
        """B's claim, without ending A's sessions first."""
        claim = Claim(0, fence.version, -7, "b", "host:2", 1)
        session = session or self.new_store._open.changes._sessions[0]
        done = await session.timers.bulk_write(
            [mongodb_statements.claim_update(claim, [])], session=session.driver_session
        )
        assert done.modified_count == 1
        return Fence(0, fence.version + 1, -7)


@pytest.fixture(scope="module")
def shared_url() -> str:
    return fresh_database(require("mongodb"))


@pytest.fixture(params=["in one command", "in several commands"])
async def scene(
    shared_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Scene]:
    if request.param == "in several commands":
        monkeypatch.setattr(mongodb_statements, "SMALL_COMMIT_MAX", -1)
    await MongoStore.from_url(shared_url).migrate()
    await wipe(shared_url)
    stores = [MongoStore.from_url(shared_url) for _ in range(2)]
    for store in stores:
        await store.open()
    await stores[0].ensure_shards(4)
    yield Scene(*stores)
    for store in stores:
        await store.close()


def was_refused(answer: Sequence[Any]) -> bool:
    return isinstance(answer[0], ShardLost)


async def still_waits(task: asyncio.Future[Any], scene: Scene) -> None:
    """Wait until the server reports that the claim has met several conflicts and keeps trying."""
    admin = scene.a.db.client.admin
    for _ in range(1_000):
        ops = (await admin.command({"currentOp": 1, "op": "update", "active": True}))["inprog"]
        if any(op.get("writeConflicts", 0) > 5 for op in ops):
            assert not task.done()
            return
        assert not task.done(), "it does not wait"
        await asyncio.sleep(0.005)
    raise AssertionError("it does not wait")


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_concurrent_with_an_open_claim_conflicts_and_leaves_nothing(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    before = await scene.contents()
    await begin(scene.b)
    await scene.claim_without_ending_sessions(fence, scene.b)
    await begin(scene.a)
    with pytest.raises(OperationFailure) as met:
        await scene.step(name, fence)
    assert met.value.code == WRITE_CONFLICT
    assert met.value.has_error_label("TransientTransactionError")
    await scene.a.driver_session.abort_transaction()
    write = asyncio.ensure_future(scene.run_write(name, fence))
    await scene.b.driver_session.commit_transaction()
    assert was_refused(await write), "run again until the claim was committed"
    assert await scene.contents() == before
    assert (await scene.row()).fence == Fence(0, fence.version + 1, -7)


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_concurrent_with_an_aborted_claim_succeeds(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    before = await scene.contents(), await scene.row()
    await begin(scene.b)
    await scene.claim_without_ending_sessions(fence, scene.b)
    write = asyncio.ensure_future(scene.run_write(name, fence))
    await asyncio.sleep(0)
    await scene.b.driver_session.abort_transaction()
    assert not was_refused(await write)
    assert (await scene.contents(), await scene.row()) != before


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_whose_snapshot_is_older_than_the_claim_conflicts(scene: Scene, name: str) -> None:
    """It still reads its own fence in its snapshot, but cannot write it."""
    fence = await scene.filled()
    await begin(scene.a)
    [seen] = await mongodb_statements._shards_of(scene.a, [fence])  # the snapshot is taken here
    await scene.claim_without_ending_sessions(fence)
    before = await scene.contents()
    [seen_again] = await mongodb_statements._shards_of(scene.a, [fence])
    assert seen_again == seen
    with pytest.raises(OperationFailure) as met:
        await scene.step(name, fence)
    assert met.value.code == WRITE_CONFLICT
    await scene.a.driver_session.abort_transaction()
    assert await scene.contents() == before


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_waits_for_a_write_that_has_its_fence_and_sees_all_of_it(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    before = await scene.contents()
    await begin(scene.a)
    assert not was_refused(await scene.step(name, fence))
    claim = asyncio.ensure_future(scene.claim_without_ending_sessions(fence))
    await still_waits(claim, scene)
    assert await scene.contents() == before, "not committed yet"
    await scene.a.driver_session.commit_transaction()
    taken = await claim
    assert (await scene.row()).fence == taken
    assert await scene.contents() != before, "the claim changes the owner and nothing else"


@pytest.mark.parametrize("name", WRITES)
async def test_the_next_owner_ends_an_open_write_and_nothing_of_it_is_left(scene: Scene, name: str) -> None:
    """The old owner is frozen or has crashed: otherwise its transaction would lock the shard for a minute."""
    fence = await scene.filled()
    before = await scene.contents()
    await begin(scene.a)
    assert not was_refused(await scene.step(name, fence))
    claim = Claim(0, fence.version, -7, "b", "host:2", 1)
    [row] = await asyncio.wait_for(scene.new_store.claim([claim]), 5)
    assert (row.version, row.nonce) == (fence.version + 1, -7)
    with pytest.raises(OperationFailure) as met:  # the old owner resumes and tries to commit
        await scene.a.driver_session.commit_transaction()
    assert met.value.code == NO_SUCH_TRANSACTION
    assert met.value.has_error_label("TransientTransactionError"), "certain: not committed"
    assert await scene.contents() == before
    assert was_refused(await scene.run_write(name, fence))
    assert await scene.contents() == before
    assert not was_refused(await WRITES[name](scene.new_store._open.commits.transaction, row.fence))


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_after_the_claim_leaves_nothing(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    taken = await scene.claim_without_ending_sessions(fence)
    before = await scene.contents()
    assert was_refused(await scene.run_write(name, fence))
    assert await scene.contents() == before
    assert not was_refused(await scene.run_write(name, taken))


@pytest.mark.parametrize("name", ["put", "everything", "purge"])
async def test_a_fence_that_only_reads_lets_the_zombie_write_and_is_noticed(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: a transaction that reads its fence and does not change it never conflicts."""

    async def only_read(session: Session, fences: Sequence[Fence], *_: object) -> set[int]:
        rows = await mongodb_statements._shards_of(session, fences)
        return {row["shard_id"] for row, fence in zip(rows, fences, strict=True) if row["shard_nonce"] == fence.nonce}

    monkeypatch.setattr(mongodb_statements, "check_fences", only_read)
    monkeypatch.setattr(mongodb_statements, "SMALL_COMMIT_MAX", -1)
    fence = await scene.filled()
    before = await scene.contents()
    await begin(scene.a)
    assert not was_refused(await scene.step(name, fence))
    await asyncio.wait_for(scene.claim_without_ending_sessions(fence), 5)  # it does not wait at all
    assert (await scene.row()).nonce == -7
    assert await scene.contents() == before
    await scene.a.driver_session.commit_transaction()
    assert await scene.contents() != before, "the write of the old owner, after the claim was acknowledged"


@pytest.mark.parametrize("action", ["commit", "purge", "release"])
async def test_one_lost_shard_in_a_conflict_does_not_affect_the_others(scene: Scene, action: str) -> None:
    fences = [await take(scene.store, shard_id) for shard_id in range(4)]
    await begin(scene.b)
    await scene.claim_without_ending_sessions(fences[0], scene.b)
    run = scene.store._open.commits.transaction
    actions: dict[str, Callable[[], Awaitable[Sequence[Any]]]] = {
        "commit": lambda: mongodb_statements.commit(
            run, [Batch(fence, [make_timer()], low_water=Position(4, 5, 6)) for fence in fences]
        ),
        "purge": lambda: mongodb_statements.purge_reached(run, fences, 10, 10),
        "release": lambda: mongodb_statements.release(run, fences),
    }
    task = asyncio.ensure_future(actions[action]())
    await asyncio.sleep(0.05)
    assert not task.done()
    await scene.b.driver_session.commit_transaction()
    assert [isinstance(result, ShardLost) for result in await task] == [True, False, False, False]
    rows = await scene.store.shards()
    if action == "commit":
        assert [row.low_water == Position(4, 5, 6) for row in rows] == [False, True, True, True]
    if action == "release":
        assert [row.owner_id for row in rows] == ["b", None, None, None]


async def test_an_owner_whose_sessions_are_ended_by_a_claim_of_another_shard_continues(scene: Scene) -> None:
    fences = [await take(scene.store, shard_id) for shard_id in range(2)]
    writes = [asyncio.ensure_future(scene.store.commit([Batch(fences[0], [make_timer(f"n-{n}")])])) for n in range(40)]
    nonce = -1
    while not all(write.done() for write in writes):
        version = (await scene.new_store.shards())[1].version
        # The engine would not do this: claim a shard of a live owner, and give it back.
        await scene.new_store.claim([Claim(1, version, nonce, "b", "host:2", 1)])
        await scene.store.claim([Claim(1, version + 1, nonce, "a", "host:1", 1)])
        nonce -= 1
    assert not any(was_refused(answer) for answer in await asyncio.gather(*writes))
    assert len(await all_timers(scene.store)) == 40


async def test_a_transaction_that_conflicts_until_its_deadline_is_not_applied(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fence = await scene.filled()
    monkeypatch.setattr(scene.store._open.commits, "_deadline_seconds", 0.3)
    await begin(scene.b)
    await scene.claim_without_ending_sessions(fence, scene.b)
    with pytest.raises(StoreUnavailable):
        await scene.run_write("put", fence)
    await scene.b.driver_session.abort_transaction()
    assert not was_refused(await scene.run_write("put", fence))


async def test_a_commit_larger_than_a_command_is_one_transaction(scene: Scene) -> None:
    """30 MiB, while a command may have 16: timers are put and replaced, and reached rows added."""
    fence = await scene.filled()
    timers = [make_timer(f"long-{n}", payload="é" * 512 * 1024) for n in range(30)]
    ended = [make_reached(make_timer(f"over-{n}", payload="x" * 1024 * 1024)) for n in range(15)]
    [answer] = await scene.store.commit([Batch(fence, timers[:15], (), ended)])
    assert isinstance(answer, Committed)
    [answer] = await scene.store.commit([Batch(fence, timers)])
    assert isinstance(answer, Committed)
    assert sum(timer in timers for timer in await all_timers(scene.store)) == 30
    assert sum(reached in ended for reached in await all_reached(scene.store)) == 15


async def test_a_transaction_that_found_the_cache_of_the_server_full_is_run_again(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server aborts it and says so with a code, but without the label of errors that are worth another attempt."""
    fence = await scene.filled()
    right_commit, attempts = scene.a.driver_session.commit_transaction, 0

    async def commit_transaction() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            await scene.a.driver_session.abort_transaction()
            raise OperationFailure("transaction is too large and will not fit in the storage engine cache", 388)
        await right_commit()

    monkeypatch.setattr(scene.a.driver_session, "commit_transaction", commit_transaction)
    assert not was_refused(await scene.run_write("put", fence))
    assert attempts == 2


async def test_a_batch_that_the_driver_cannot_encode_was_not_applied(scene: Scene) -> None:
    fence = await scene.filled()
    before = await scene.contents()
    too_long = make_timer("too long", payload="x" * 20 * 1024 * 1024)
    with pytest.raises(StoreUnavailable):
        await scene.store.commit([Batch(fence, [make_timer("new"), too_long])])
    assert await scene.contents() == before
    assert not was_refused(await scene.run_write("put", fence)), "the session can still be used"


@pytest.mark.parametrize("applied", [True, False])
@pytest.mark.parametrize("last", [ServerSelectionTimeoutError, AutoReconnect])
async def test_a_commit_without_an_answer_has_an_unknown_outcome_whatever_failed_last(
    scene: Scene, applied: bool, last: type[AutoReconnect], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is lost, and then no server can be reached: that error does not tell the result of the first."""
    fence = await scene.filled()
    right_commit, attempts = scene.a.driver_session.commit_transaction, 0

    async def commit_transaction() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 1 and applied:
            await right_commit()
        error = AutoReconnect("lost") if attempts == 1 else last("no server")
        error._add_error_label("UnknownTransactionCommitResult")
        raise error

    monkeypatch.setattr(scene.a.driver_session, "commit_transaction", commit_transaction)
    monkeypatch.setattr(mongodb_connection, "_now", count(0, 3).__next__)  # three seconds pass at each call
    with pytest.raises(OutcomeUnknown):
        await scene.run_write("put", fence)
    assert 1 < attempts < 10
    monkeypatch.setattr(scene.a.driver_session, "commit_transaction", right_commit)
    [row] = await scene.store.claim([Claim(0, fence.version, 9, "a", "host:1", 1)])  # as the engine does then
    assert (row.version, row.nonce) == (fence.version + 1, 9)
    assert (make_timer("new") in await all_timers(scene.store)) == applied


async def test_concurrent_commits_claims_purges_and_releases_of_many_shards_all_succeed(scene: Scene) -> None:
    store, shards = scene.store, range(4)
    fences = [await take(store, shard_id) for shard_id in shards]

    async def commits(group: int) -> None:
        for number in range(10):
            order = fences if (group + number) % 2 else fences[::-1]
            low_water = Position(number, 0, 0) if number % 3 == 0 else None
            writer = store if group % 2 else scene.new_store  # any store may write with a valid fence
            done = await writer.commit(
                [Batch(f, [make_timer(f"{group}-{number}")], (), [OVER], low_water) for f in order]
            )
            assert not any(isinstance(result, ShardLost) for result in done)

    async def purges() -> None:
        for number in range(10):
            await store.purge_reached(fences if number % 2 else fences[::-1], 1_000, 5)

    async def claims() -> None:
        for number in range(10):
            order = shards if number % 2 else shards[::-1]
            await store.claim([Claim(shard_id, 99, 1, "x", "y", 1) for shard_id in order])  # never that version

    await asyncio.gather(*(commits(group) for group in range(4)), purges(), claims())
    assert len(await all_timers(store)) == 40
    assert await store.release(fences[::-1]) == [None] * 4
