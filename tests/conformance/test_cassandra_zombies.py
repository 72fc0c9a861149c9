"""Cassandra: a fenced write and a claim in every order that two real sessions can have.

A write first reads what it replaces and then sends its batch, which waits until the test lets it go. Inside the server
a test cannot choose the order: Paxos applies the batches of a partition one after the other, so they are run at the
same time, repeatedly. Other tests show that a fence without a condition is noticed, and that batches follow Cassandra's
rules of timestamps and tombstones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import pytest
from cassandra.query import BatchStatement, BatchType
from msgspec.structs import replace

from duetime.domain.timer import Outcome, Position, uuid_of
from duetime.errors import OutcomeUnknown, ShardLost, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, ListQuery, Page, PageRequest
from duetime.stores.cassandra import writes as cassandra_writes
from duetime.stores.cassandra.connection import Client, Statement
from duetime.stores.cassandra.errors import TooManyTombstones
from duetime.stores.cassandra.statements import TIMER
from duetime.stores.cassandra.store import CassandraStore, wipe
from duetime.stores.cassandra.writes import Writer
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, commit_one, contents, listed, put, take
from servers import fresh_database, require

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)
ROUNDS = 20

Write = Callable[[Writer, Fence], Awaitable[list[Any]]]

WRITES: dict[str, Write] = {
    "put": lambda writer, fence: writer.commit([Batch(fence, [make_timer("new")])]),
    "replace": lambda writer, fence: writer.commit([Batch(fence, [make_timer("kept", 9)])]),
    "delete": lambda writer, fence: writer.commit([Batch(fence, (), [KEPT.key])]),
    "reached": lambda writer, fence: writer.commit([Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda writer, fence: writer.commit([Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda writer, fence: writer.commit(
        [Batch(fence, [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3))]
    ),
    "purge": lambda writer, fence: writer.purge([fence], 1_000, 10),
    "release": lambda writer, fence: writer.release([fence]),
}


class Over(Client):
    """A client on the connection of another one."""

    def __init__(self, client: Client) -> None:
        super().__init__(client._address, client._connection, client._deadline_seconds)


class Waiting(Over):
    """A client whose writes wait until `let_go` is set."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.is_waiting = asyncio.Event()
        self.let_go = asyncio.Event()

    async def write(self, statement: Any, *values: Any) -> bool:
        await self._wait()
        return await super().write(statement, *values)

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        await self._wait()
        return await super().write_batch(statements)

    async def _wait(self) -> None:
        self.is_waiting.set()
        await self.let_go.wait()


class Scene:
    """Store `a` of the old owner, with a writer whose writes can be delayed, and store `b` of the new owner."""

    def __init__(self, a: CassandraStore, b: CassandraStore) -> None:
        self.a, self.b = a, b
        self.client = Waiting(a._open.data)
        self.writer = Writer(self.client, a._open.statements)

    async def claim(self, fence: Fence) -> Fence:
        [row] = await self.b.claim([Claim(0, fence.version, -7, "b", "host:2", 1)])
        assert row.nonce == -7
        return row.fence


@pytest.fixture(scope="module")
def shared_url() -> str:
    return fresh_database(require("cassandra"))


@pytest.fixture
async def scene(shared_url: str) -> AsyncIterator[Scene]:
    await wipe(shared_url)
    stores = [CassandraStore.from_url(shared_url) for _ in range(2)]
    await stores[0].migrate()
    for store in stores:
        await store.open()
    await stores[0].ensure_shards(4)
    yield Scene(*stores)
    for store in stores:
        await store.close()


async def filled(scene: Scene) -> Fence:
    fence = await take(scene.a, 0)
    await commit_one(scene.a, Batch(fence, [KEPT], (), [OVER]))
    return fence


def was_refused(answer: list[Any]) -> bool:
    return isinstance(answer[0], ShardLost)


@pytest.mark.parametrize("name", WRITES)
async def test_a_claim_between_the_read_and_the_batch_leaves_nothing_of_the_write(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    write = asyncio.ensure_future(WRITES[name](scene.writer, fence))
    await scene.client.is_waiting.wait()
    await scene.claim(fence)
    before = await contents(scene.b)
    scene.client.let_go.set()
    assert was_refused(await write)
    assert await contents(scene.b) == before


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_after_the_claim_leaves_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    scene.client.let_go.set()
    taken = await scene.claim(fence)
    before = await contents(scene.b)
    assert was_refused(await WRITES[name](scene.writer, fence))
    assert await contents(scene.b) == before
    assert not was_refused(await WRITES[name](scene.writer, taken))


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_after_the_write_sees_all_of_it(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = await contents(scene.b)
    scene.client.let_go.set()
    assert not was_refused(await WRITES[name](scene.writer, fence))
    taken = await scene.claim(fence)
    after = await contents(scene.b)
    assert after != before
    assert (await scene.b.shards())[0].fence == taken


@pytest.mark.parametrize("name", ["put", "everything", "purge"])
async def test_a_write_concurrent_with_a_claim_applies_nothing_after_the_claim(scene: Scene, name: str) -> None:
    """Both are in the server at the same time: after the answer to the claim, nothing of the old owner is applied."""
    fence = await filled(scene)
    scene.client.let_go.set()
    for turn in range(ROUNDS):
        waiting = Waiting(scene.a._open.data)
        write = asyncio.ensure_future(WRITES[name](Writer(waiting, scene.a._open.statements), fence))
        await waiting.is_waiting.wait()
        waiting.let_go.set()
        for _ in range(turn % 4):
            await asyncio.sleep(0)
        [row] = await scene.b.claim([Claim(0, fence.version, turn, "b", "host:2", 1)])
        at_once = await contents(scene.b)
        await write
        assert await contents(scene.b) == at_once
        fence = row.fence
        await commit_one(scene.b, Batch(fence, [KEPT], [make_timer("new").key], [OVER]))
        await scene.b.purge_reached([fence], 1 << 50, 100)
        await commit_one(scene.b, Batch(fence, reached=[OVER]))


async def test_without_the_condition_of_the_fence_the_old_owner_could_write(scene: Scene) -> None:
    """The tests above can fail: with a batch that only checks that the shard exists, the old owner's timer is
    stored."""
    connection, statements = scene.a._open.data._connection, scene.a._open.statements
    text = statements.fence.query_string
    blind = (
        await connection.prepare({"blind": text.replace("IF shard_version = ? AND shard_nonce = ?", "IF EXISTS")})
    )["blind"]
    assert blind.query_string != text

    class Blind(Waiting):
        async def write_batch(self, statements: Iterable[Statement]) -> bool:
            (_, values), *rest = statements
            return await super().write_batch([(blind, values[:-2]), *rest])

    client = Blind(scene.a._open.data)
    fence = await filled(scene)
    write = asyncio.ensure_future(WRITES["put"](Writer(client, statements), fence))
    await client.is_waiting.wait()
    await scene.claim(fence)
    client.let_go.set()
    assert not was_refused(await write)
    assert make_timer("new") in await all_timers(scene.b), "the timer of the old owner"


async def test_the_condition_of_the_batch_is_the_fence_and_not_the_read_before_it(scene: Scene) -> None:
    """Without the read before it, the batch alone still refuses the write: its condition is the fence, not the read."""
    fence = await filled(scene)
    taken = await scene.claim(fence)
    assert taken != fence
    scene.client.let_go.set()
    blind = cassandra_writes._StateBefore.matches
    try:
        cassandra_writes._StateBefore.matches = lambda self, fence: True  # type: ignore[method-assign]
        before = await contents(scene.b)
        assert was_refused(await WRITES["everything"](scene.writer, fence))
        assert await contents(scene.b) == before
    finally:
        cassandra_writes._StateBefore.matches = blind  # type: ignore[method-assign]


# --- timestamps and tombstones -------------------------------------------------------------------


async def test_values_that_a_timer_no_longer_has_are_removed_at_the_same_position(scene: Scene) -> None:
    fence = await take(scene.a, 0)
    rich = make_timer("one", 7, payload='"p"', correlation_id="c", callback_timeout_seconds=3)
    bare = make_timer("one", 7)
    for timer in (rich, bare, rich, bare):
        await put(scene.a, fence, timer)
        assert await all_timers(scene.a) == [timer]


async def test_a_timer_that_moves_away_and_back_exists_once(scene: Scene) -> None:
    fence = await take(scene.a, 0)
    for at_ms in (5, 9, 5, 9, 9, 5):
        timer = make_timer("one", at_ms)
        await put(scene.a, fence, timer)
        assert await all_timers(scene.a) == [timer]
        [found] = await scene.a.get_many([(0, timer.key)])
        assert found.timer == timer
    await commit_one(scene.a, Batch(fence, (), [make_timer("one").key]))
    await put(scene.a, fence, make_timer("one", 5))
    assert await all_timers(scene.a) == [make_timer("one", 5)]


async def test_many_reached_rows_of_one_timer_do_not_hide_those_of_others(scene: Scene) -> None:
    fence = await take(scene.a, 0)
    ids = [f"n-{number}" for number in range(12)]
    for name in (ids[3], ids[7]):
        ends = [make_reached(make_timer(name, generation=number), reached_at_ms=number) for number in range(1, 501)]
        await commit_one(scene.a, Batch(fence, reached=ends))
    for name in ids:
        await commit_one(scene.a, Batch(fence, reached=[make_reached(make_timer(name, generation=900))]))
    found = await scene.a.get_many([(0, make_timer(name).key) for name in ids])
    assert [item.reached and item.reached.timer.generation for item in found] == [900] * len(ids)


async def lower_bounds(scene: Scene) -> tuple[int | None, int | None]:
    [row] = await scene.a._open.data.read(scene.a._open.statements.shards, [0])
    return row[9], row[10]


async def test_lists_start_at_the_lower_bound_and_miss_no_row_added_before_it(scene: Scene) -> None:
    """Before the lower bounds there are only tombstones."""
    fence = await take(scene.a, 0)
    everything = ListQuery(namespace="test", num_shards=4)
    await put(scene.a, fence, *(make_timer(f"n-{number}", 100 + number) for number in range(10)))
    await commit_one(scene.a, Batch(fence, (), [make_timer(f"n-{number}").key for number in range(5)]))
    assert await lower_bounds(scene) == (None, None)
    await commit_one(scene.a, Batch(fence, low_water=Position(104, 0, 0)))
    assert await lower_bounds(scene) == (104, None)
    await commit_one(scene.a, Batch(fence, low_water=Position(200, 0, 0)))
    assert await lower_bounds(scene) == (105, None), (
        "the engine reports the low water, the lower bound is what was found"
    )
    early = make_timer("early", 3)
    await put(scene.a, fence, early)
    assert await lower_bounds(scene) == (3, None)
    assert early in (await listed(scene.b, everything))[0]

    ends = [make_reached(make_timer(f"n-{number}"), purge_at_ms=number) for number in range(10)]
    await commit_one(scene.a, Batch(fence, reached=ends))
    assert await scene.a.purge_reached([fence], 8, 5) == [5]
    assert await lower_bounds(scene) == (3, 4)
    assert await scene.a.purge_reached([fence], 8, 5) == [3]
    assert await lower_bounds(scene) == (3, 8)
    late = make_reached(make_timer("late"), purge_at_ms=2)
    await commit_one(scene.a, Batch(fence, reached=[late]))
    assert await lower_bounds(scene) == (3, 2)
    assert await all_reached(scene.b) == [late, *ends[8:]]
    assert await scene.a.purge_reached([fence], 8, 5) == [1]
    assert (await listed(scene.b, replace(everything, outcomes=frozenset(Outcome))))[1] == ends[8:]


async def leave_tombstones(scene: Scene, positions: Sequence[Position]) -> None:
    """The same tombstones as after deleting so many timers, but in seconds. The server gives up a read that meets
    100,000."""
    data, statements = scene.a._open.data, scene.a._open.statements
    for start in range(0, len(positions), 5_000):
        batch = BatchStatement(BatchType.UNLOGGED)
        for position in positions[start : start + 5_000]:
            batch.add(statements.delete_row, (0, TIMER, *position, b""))
        await data._rows(batch, None)


async def test_timers_after_more_tombstones_than_one_read_allows_are_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All were due at the same time, for example at nine o'clock: no range of times is narrow enough."""
    fence = await take(scene.a, 0)
    before, behind, last = make_timer("before", 10), make_timer("behind", 60_000), make_timer("last", 2_000_000)
    await put(scene.a, fence, before, behind, last)
    await leave_tombstones(scene, [Position(50_000, *uuid_of("test", f"nine-{n}")) for n in range(110_000)])
    with pytest.raises(TooManyTombstones, match="READ_TOO_MANY_TOMBSTONES"):
        await scene.a._open.data.read(scene.a._open.statements.load, 0, *before.position, *behind.position, 1)

    assert await all_timers(scene.b) == [before, behind, last]
    page, pages = Page((), before.position), 0
    while not page.timers:  # a page does not wait until all tombstones are passed
        assert page.next is not None
        [page] = await scene.b.load([PageRequest(0, page.next, 2_000_000, 1)])  # type: ignore[assignment]
        pages += 1
    assert page == Page([behind], behind.position)
    assert pages < 10
    assert (await listed(scene.b, ListQuery(namespace="test", num_shards=4)))[0] == [before, behind, last]
    await commit_one(scene.a, Batch(fence, (), [before.key]))
    monkeypatch.setattr(cassandra_writes, "LOWER_BOUND_PAUSE_SECONDS", 0)
    for _ in range(10):  # each searches a bit further
        await commit_one(scene.a, Batch(fence, low_water=Position(70_000, 0, 0)))
    assert await lower_bounds(scene) == (60_000, None), "from now on no read has to pass them"


# --- failures of some shards ---------------------------------------------------------------------


class Rejecting(Over):
    """A client that rejects some writes, as an overloaded node does."""

    def __init__(
        self, client: Client, error_for: Callable[[int, int], StoreUnavailable | OutcomeUnknown | None]
    ) -> None:
        super().__init__(client)
        self.error_for = error_for  # number of the write, shard -> the error to raise
        self.count = 0

    async def write(self, statement: Any, *values: Any) -> bool:
        self.reject(values[-2])
        return await super().write(statement, *values)

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        fence, *rest = statements
        self.reject(fence[1][-3])
        return await super().write_batch([fence, *rest])

    def reject(self, shard_id: int) -> None:
        self.count += 1
        error = self.error_for(self.count, shard_id)
        if error is not None:
            raise error


async def test_a_rejected_batch_does_not_affect_the_others(scene: Scene) -> None:
    fences = [await take(scene.a, shard_id) for shard_id in range(4)]
    errors: dict[int, StoreUnavailable | OutcomeUnknown] = {1: StoreUnavailable(), 3: OutcomeUnknown()}
    client = Rejecting(scene.a._open.data, lambda count, shard_id: errors.get(shard_id))
    batches = [Batch(fence, [make_timer()]) for fence in fences]
    again = [Batch(fence, [make_timer("again")]) for fence in fences[2:]]
    results = await Writer(client, scene.a._open.statements).commit([*batches, *again])
    done = Committed()
    assert results == [done, errors[1], done, errors[3], done, errors[3]]
    assert client.count == 5, "after a failed batch, no other of the same shard is tried"
    assert [len(await all_timers(scene.a, shard_id)) for shard_id in range(4)] == [1, 0, 2, 0]


async def test_if_all_claims_are_rejected_none_was_applied_and_if_some_are_the_outcome_is_unknown(scene: Scene) -> None:
    claims = [Claim(shard_id, 0, 7, "a", "host:1", 1) for shard_id in range(4)]
    for error_for, kind in (
        (lambda count, _: StoreUnavailable(), StoreUnavailable),
        (lambda count, _: StoreUnavailable() if count != 2 else None, OutcomeUnknown),
        (lambda count, _: OutcomeUnknown() if count == 2 else None, OutcomeUnknown),
    ):
        with pytest.raises(kind):
            await Writer(Rejecting(scene.a._open.data, error_for), scene.a._open.statements).claim(claims)
