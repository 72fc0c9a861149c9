"""Cassandra, by hand: a fenced write and a claim in every order that two real sessions can have.

A write looks at what it replaces and then says its batch, which is held until a test lets it go. Inside the server
there is no order to choose: Paxos lets one batch of a partition happen after the other, and they are raced. A fence
that is no condition, and a batch that forgets Cassandra's rules, are caught.
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
from duetime.stores.cassandra.address import TooManyDeleted
from duetime.stores.cassandra.connection import Line, Statement
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


class Over(Line):
    """A line over another one."""

    def __init__(self, line: Line) -> None:
        super().__init__(line._address, line._link, line._deadline_seconds)


class Held(Over):
    """A line on which writes wait until they are let go."""

    def __init__(self, line: Line) -> None:
        super().__init__(line)
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
    """The old owner's session, with a writer that can be held, and the new one's."""

    def __init__(self, a: CassandraStore, b: CassandraStore) -> None:
        self.a, self.b = a, b
        self.line = Held(a._open.data)
        self.writer = Writer(self.line, a._open.say)

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
async def test_a_claim_between_the_look_and_the_batch_leaves_nothing_of_the_write(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    write = asyncio.ensure_future(WRITES[name](scene.writer, fence))
    await scene.line.is_waiting.wait()
    await scene.claim(fence)
    before = await contents(scene.b)
    scene.line.let_go.set()
    assert was_refused(await write)
    assert await contents(scene.b) == before


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_after_the_claim_leaves_nothing(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    scene.line.let_go.set()
    taken = await scene.claim(fence)
    before = await contents(scene.b)
    assert was_refused(await WRITES[name](scene.writer, fence))
    assert await contents(scene.b) == before
    assert not was_refused(await WRITES[name](scene.writer, taken))


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_after_the_write_sees_all_of_it(scene: Scene, name: str) -> None:
    fence = await filled(scene)
    before = await contents(scene.b)
    scene.line.let_go.set()
    assert not was_refused(await WRITES[name](scene.writer, fence))
    taken = await scene.claim(fence)
    after = await contents(scene.b)
    assert after != before
    assert (await scene.b.shards())[0].fence == taken


@pytest.mark.parametrize("name", ["put", "everything", "purge"])
async def test_of_a_write_and_a_claim_at_the_same_moment_nothing_comes_after_the_claim(scene: Scene, name: str) -> None:
    """In the server, both at once: the claim's answer is the end of all that the old owner can do."""
    fence = await filled(scene)
    scene.line.let_go.set()
    for turn in range(ROUNDS):
        held = Held(scene.a._open.data)
        write = asyncio.ensure_future(WRITES[name](Writer(held, scene.a._open.say), fence))
        await held.is_waiting.wait()
        held.let_go.set()
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


async def test_a_fence_that_is_no_condition_lets_the_zombie_write_and_is_noticed(scene: Scene) -> None:
    """The tests above can fail: with a batch that only asks whether there is a shard, the zombie's timer is there."""
    link, say = scene.a._open.data._link, scene.a._open.say
    text = say.fence.query_string
    blind = (await link.prepare({"blind": text.replace("IF shard_version = ? AND shard_nonce = ?", "IF EXISTS")}))[
        "blind"
    ]
    assert blind.query_string != text

    class Blind(Held):
        async def write_batch(self, statements: Iterable[Statement]) -> bool:
            (_, values), *rest = statements
            return await super().write_batch([(blind, values[:-2]), *rest])

    line = Blind(scene.a._open.data)
    fence = await filled(scene)
    write = asyncio.ensure_future(WRITES["put"](Writer(line, say), fence))
    await line.is_waiting.wait()
    await scene.claim(fence)
    line.let_go.set()
    assert not was_refused(await write)
    assert make_timer("new") in await all_timers(scene.b), "the zombie's timer"


async def test_a_look_instead_of_a_condition_is_noticed_too(scene: Scene) -> None:
    """Without the look the batch alone still refuses; so it is the batch that guards, not the look before it."""
    fence = await filled(scene)
    taken = await scene.claim(fence)
    assert taken != fence
    scene.line.let_go.set()
    blind = cassandra_writes._Before.holds
    try:
        cassandra_writes._Before.holds = lambda self, fence: True  # type: ignore[method-assign]
        before = await contents(scene.b)
        assert was_refused(await WRITES["everything"](scene.writer, fence))
        assert await contents(scene.b) == before
    finally:
        cassandra_writes._Before.holds = blind  # type: ignore[method-assign]


# --- rules of Cassandra's that a batch could break -----------------------------------------------


async def test_what_a_timer_no_longer_has_is_gone_also_where_it_stays_in_its_place(scene: Scene) -> None:
    fence = await take(scene.a, 0)
    rich = make_timer("one", 7, payload='"p"', correlation_id="c", callback_timeout_seconds=3)
    bare = make_timer("one", 7)
    for timer in (rich, bare, rich, bare):
        await put(scene.a, fence, timer)
        assert await all_timers(scene.a) == [timer]


async def test_a_timer_that_moves_away_and_comes_back_is_there_once(scene: Scene) -> None:
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


async def test_thousands_of_ends_of_one_timer_hide_no_other(scene: Scene) -> None:
    fence = await take(scene.a, 0)
    ids = [f"n-{number}" for number in range(12)]
    for name in (ids[3], ids[7]):
        ends = [make_reached(make_timer(name, generation=number), reached_at_ms=number) for number in range(1, 501)]
        await commit_one(scene.a, Batch(fence, reached=ends))
    for name in ids:
        await commit_one(scene.a, Batch(fence, reached=[make_reached(make_timer(name, generation=900))]))
    found = await scene.a.get_many([(0, make_timer(name).key) for name in ids])
    assert [item.reached and item.reached.timer.generation for item in found] == [900] * len(ids)


async def floors(scene: Scene) -> tuple[int | None, int | None]:
    [row] = await scene.a._open.data.read(scene.a._open.say.shards, [0])
    return row[9], row[10]


async def test_lists_begin_where_something_stands_and_miss_nothing_that_comes_below(scene: Scene) -> None:
    """Before the floors are only the tombstones of days."""
    fence = await take(scene.a, 0)
    everything = ListQuery(namespace="test", num_shards=4)
    await put(scene.a, fence, *(make_timer(f"n-{number}", 100 + number) for number in range(10)))
    await commit_one(scene.a, Batch(fence, (), [make_timer(f"n-{number}").key for number in range(5)]))
    assert await floors(scene) == (None, None)
    await commit_one(scene.a, Batch(fence, low_water=Position(104, 0, 0)))
    assert await floors(scene) == (104, None)
    await commit_one(scene.a, Batch(fence, low_water=Position(200, 0, 0)))
    assert await floors(scene) == (105, None), "the low water is the engine's word, the floor what was found"
    early = make_timer("early", 3)
    await put(scene.a, fence, early)
    assert await floors(scene) == (3, None)
    assert early in (await listed(scene.b, everything))[0]

    ends = [make_reached(make_timer(f"n-{number}"), purge_at_ms=number) for number in range(10)]
    await commit_one(scene.a, Batch(fence, reached=ends))
    assert await scene.a.purge_reached([fence], 8, 5) == [5]
    assert await floors(scene) == (3, 4)
    assert await scene.a.purge_reached([fence], 8, 5) == [3]
    assert await floors(scene) == (3, 8)
    late = make_reached(make_timer("late"), purge_at_ms=2)
    await commit_one(scene.a, Batch(fence, reached=[late]))
    assert await floors(scene) == (3, 2)
    assert await all_reached(scene.b) == [late, *ends[8:]]
    assert await scene.a.purge_reached([fence], 8, 5) == [1]
    assert (await listed(scene.b, replace(everything, outcomes=frozenset(Outcome))))[1] == ends[8:]


async def leave_tombstones(scene: Scene, places: Sequence[Position]) -> None:
    """As deleting so many timers does, but in seconds. The server gives up a read that meets 100,000."""
    data, say = scene.a._open.data, scene.a._open.say
    for start in range(0, len(places), 5_000):
        batch = BatchStatement(BatchType.UNLOGGED)
        for place in places[start : start + 5_000]:
            batch.add(say.drop, (0, TIMER, *place, b""))
        await data._rows(batch, None)


async def test_timers_behind_more_deleted_ones_than_a_read_may_meet_are_found(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of one moment, as of those who wanted to be called at nine: no range of times is narrow enough."""
    fence = await take(scene.a, 0)
    before, behind, last = make_timer("before", 10), make_timer("behind", 60_000), make_timer("last", 2_000_000)
    await put(scene.a, fence, before, behind, last)
    await leave_tombstones(scene, [Position(50_000, *uuid_of("test", f"nine-{n}")) for n in range(110_000)])
    with pytest.raises(TooManyDeleted, match="READ_TOO_MANY_TOMBSTONES"):
        await scene.a._open.data.read(scene.a._open.say.load, 0, *before.position, *behind.position, 1)

    assert await all_timers(scene.b) == [before, behind, last]
    page, pages = Page((), before.position), 0
    while not page.timers:  # a page is not kept waiting for all that has to be passed
        assert page.next is not None
        [page] = await scene.b.load([PageRequest(0, page.next, 2_000_000, 1)])  # type: ignore[assignment]
        pages += 1
    assert page == Page([behind], behind.position)
    assert pages < 10
    assert (await listed(scene.b, ListQuery(namespace="test", num_shards=4)))[0] == [before, behind, last]
    await commit_one(scene.a, Batch(fence, (), [before.key]))
    monkeypatch.setattr(cassandra_writes, "FLOOR_PAUSE_SECONDS", 0)
    for _ in range(10):  # each looks a bit further
        await commit_one(scene.a, Batch(fence, low_water=Position(70_000, 0, 0)))
    assert await floors(scene) == (60_000, None), "from now on nobody has to pass over them"


# --- some shards, but not all --------------------------------------------------------------------


class Turning(Over):
    """A line that turns away some writes, as an overloaded node does."""

    def __init__(self, line: Line, refused: Callable[[int, int], StoreUnavailable | OutcomeUnknown | None]) -> None:
        super().__init__(line)
        self.refused = refused  # by their count, and the shard
        self.count = 0

    async def write(self, statement: Any, *values: Any) -> bool:
        self.turn_away(values[-2])
        return await super().write(statement, *values)

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        fence, *rest = statements
        self.turn_away(fence[1][-3])
        return await super().write_batch([fence, *rest])

    def turn_away(self, shard_id: int) -> None:
        self.count += 1
        error = self.refused(self.count, shard_id)
        if error is not None:
            raise error


async def test_a_batch_that_is_turned_away_leaves_the_others_alone(scene: Scene) -> None:
    fences = [await take(scene.a, shard_id) for shard_id in range(4)]
    errors: dict[int, StoreUnavailable | OutcomeUnknown] = {1: StoreUnavailable(), 3: OutcomeUnknown()}
    line = Turning(scene.a._open.data, lambda count, shard_id: errors.get(shard_id))
    batches = [Batch(fence, [make_timer()]) for fence in fences]
    again = [Batch(fence, [make_timer("again")]) for fence in fences[2:]]
    results = await Writer(line, scene.a._open.say).commit([*batches, *again])
    done = Committed()
    assert results == [done, errors[1], done, errors[3], done, errors[3]]
    assert line.count == 5, "after one that failed, none of the same shard is tried"
    assert [len(await all_timers(scene.a, shard_id)) for shard_id in range(4)] == [1, 0, 2, 0]


async def test_if_all_claims_are_turned_away_nothing_was_applied_and_if_some_are_nobody_knows(scene: Scene) -> None:
    claims = [Claim(shard_id, 0, 7, "a", "host:1", 1) for shard_id in range(4)]
    for refused, kind in (
        (lambda count, _: StoreUnavailable(), StoreUnavailable),
        (lambda count, _: StoreUnavailable() if count != 2 else None, OutcomeUnknown),
        (lambda count, _: OutcomeUnknown() if count == 2 else None, OutcomeUnknown),
    ):
        with pytest.raises(kind):
            await Writer(Turning(scene.a._open.data, refused), scene.a._open.say).claim(claims)
