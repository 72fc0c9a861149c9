"""An old owner that still writes while a new owner claims its shard: every order of their locks and commits.

The cases that are the same on every SQL database that locks rows. The conformance suite lets a write and a claim race;
here each of the two stops where the test says, in real sessions of a real server. A database derives a class from
`FencedWrites`, and shows in tests of its own that these tests fail if its fence does not lock.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from duetime.domain.timer import BEFORE_ALL, Position
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Fence, ListQuery, PageRequest, Store
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take

__all__ = ["KEPT", "WRITES", "FencedWrites", "Scene", "Session", "filled", "some_of_everything", "was_refused"]

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)
NEVER = 99  # a version that no shard has

# A write, by the module `statements` of an adapter, in a session, with a fence.
Write = Callable[[Any, Any, Fence], Awaitable[list[Any]]]

WRITES: dict[str, Write] = {
    "put": lambda sql, run, fence: sql.commit(run, [Batch(fence, [make_timer("new")])]),
    "replace": lambda sql, run, fence: sql.commit(run, [Batch(fence, [make_timer("kept", 9)])]),
    "delete": lambda sql, run, fence: sql.commit(run, [Batch(fence, (), [KEPT.key])]),
    "reached": lambda sql, run, fence: sql.commit(run, [Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda sql, run, fence: sql.commit(run, [Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda sql, run, fence: sql.commit(
        run, [Batch(fence, [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3))]
    ),
    "purge": lambda sql, run, fence: sql.purge_reached(run, [fence], 1_000, 10),
    "release": lambda sql, run, fence: sql.release(run, [fence]),
}


class Session(ABC):
    """A session in which a transaction can be stopped between its statements and its COMMIT."""

    run: Any  # what the functions of `statements` take

    @abstractmethod
    async def begin(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Runs the work until it has its locks, in a transaction that stays open."""

    @abstractmethod
    async def commit(self, begun: asyncio.Future[Any]) -> Any:
        """Commits what was begun. Answers what the work answers."""

    @abstractmethod
    async def roll_back(self, begun: asyncio.Future[Any]) -> None: ...

    @abstractmethod
    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Runs the work with its COMMIT, in the background."""


class Scene(ABC):
    """Two sessions, `a` of the old owner and `b` of the new owner, and a store to look at the result with."""

    sql: Any  # the module `statements` of the adapter
    store: Store
    a: Session
    b: Session

    @abstractmethod
    async def until_waiting(self, session: Session) -> None:
        """Until the session waits for a lock, as the server itself reports."""

    async def contents(self) -> tuple[Any, ...]:
        return await self.store.shards(), await all_timers(self.store), await all_reached(self.store)

    async def rows(self) -> tuple[Any, ...]:
        """The contents without the shards, which a claim changes."""
        return (await self.contents())[1:]

    async def claim(self, fence: Fence) -> Fence:
        """A claim by the new owner."""
        [row] = await self.sql.claim(self.b.run, [Claim(0, fence.version, -7, "b", "host:2", 1)])
        assert row.nonce == -7
        found: Fence = row.fence
        return found

    async def write(self, session: Session, name: str, fence: Fence) -> list[Any]:
        return await WRITES[name](self.sql, session.run, fence)


async def filled(scene: Scene) -> Fence:
    """One timer and one reached timer in shard 0."""
    fence = await take(scene.store, 0)
    await scene.store.commit([Batch(fence, [KEPT], (), [OVER])])
    return fence


def was_refused(answer: list[Any]) -> bool:
    return isinstance(answer[0], ShardLost)


class FencedWrites:
    """The cases. A class of a database brings the fixture `scene`, with four shards."""

    @pytest.mark.parametrize("name", WRITES)
    async def test_a_write_waits_for_a_claim_in_progress_and_changes_nothing(self, scene: Scene, name: str) -> None:
        fence = await filled(scene)
        before = await scene.rows()
        claim = await scene.b.begin(scene.claim(fence))
        write = scene.a.start(scene.write(scene.a, name, fence))
        await scene.until_waiting(scene.a)
        taken = await scene.b.commit(claim)
        assert was_refused(await write)
        assert await scene.rows() == before
        row = (await scene.store.shards())[0]
        assert (row.fence, row.low_water) == (taken, BEFORE_ALL)

    @pytest.mark.parametrize("name", WRITES)
    async def test_a_write_goes_on_when_the_claim_it_waited_for_is_rolled_back(self, scene: Scene, name: str) -> None:
        fence = await filled(scene)
        before = await scene.contents()
        claim = await scene.b.begin(scene.claim(fence))
        write = scene.a.start(scene.write(scene.a, name, fence))
        await scene.until_waiting(scene.a)
        await scene.b.roll_back(claim)
        assert not was_refused(await write)
        assert await scene.contents() != before

    @pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
    async def test_a_claim_waits_for_a_write_in_progress_and_sees_all_of_it(self, scene: Scene, name: str) -> None:
        fence = await filled(scene)
        before = await scene.rows()
        write = await scene.a.begin(scene.write(scene.a, name, fence))
        claim = scene.b.start(scene.claim(fence))
        await scene.until_waiting(scene.b)
        assert await scene.rows() == before, "not committed yet"
        assert not was_refused(await scene.a.commit(write))
        taken = await claim
        row = (await scene.store.shards())[0]
        assert row.fence == taken
        changed = await scene.rows() != before
        assert changed or row.low_water == Position(1, 2, 3), "the claim changes the owner and nothing else"

    @pytest.mark.parametrize("name", WRITES)
    async def test_a_write_goes_on_after_waiting_for_a_write_of_the_same_owner(self, scene: Scene, name: str) -> None:
        """The row of the shard has changed meanwhile, but not the version and the nonce of the fence."""
        fence = await filled(scene)
        other = await scene.b.begin(scene.write(scene.b, "low water", fence))
        write = scene.a.start(scene.write(scene.a, name, fence))
        await scene.until_waiting(scene.a)
        await scene.b.commit(other)
        assert not was_refused(await write)
        assert (await scene.store.shards())[0].low_water == Position(1, 2, 3)

    @pytest.mark.parametrize("action", ["commit", "claim", "purge", "release"])
    async def test_a_shard_that_had_to_be_waited_for_is_treated_like_the_others(
        self, scene: Scene, action: str
    ) -> None:
        sql, run = scene.sql, scene.a.run
        fences = [await take(scene.store, shard_id) for shard_id in range(4)]
        other = await scene.b.begin(sql.commit(scene.b.run, [Batch(fences[1], low_water=Position(1, 2, 3))]))
        claims = [Claim(fence.shard_id, fence.version, 77, "b", "host:2", 1) for fence in fences]
        actions: dict[str, Callable[[], Coroutine[Any, Any, list[Any]]]] = {
            "commit": lambda: sql.commit(run, [Batch(f, [make_timer()], low_water=Position(4, 5, 6)) for f in fences]),
            "claim": lambda: sql.claim(run, claims),
            "purge": lambda: sql.purge_reached(run, fences, 10, 10),
            "release": lambda: sql.release(run, fences),
        }
        task = scene.a.start(actions[action]())
        await scene.until_waiting(scene.a)
        await scene.b.commit(other)
        answer = await task
        assert not any(isinstance(item, ShardLost) for item in answer)
        rows = await scene.store.shards()
        if action == "commit":
            assert [row.low_water for row in rows] == [Position(4, 5, 6)] * 4
        if action == "claim":
            assert [row.nonce for row in answer] == [77] * 4
            assert rows == answer
        if action == "release":
            assert [row.owner_id for row in rows] == [None] * 4

    @pytest.mark.parametrize("name", WRITES)
    async def test_a_write_after_the_claim_changes_nothing(self, scene: Scene, name: str) -> None:
        fence = await filled(scene)
        taken = await scene.b.start(scene.claim(fence))
        before = await scene.contents()
        assert was_refused(await scene.a.start(scene.write(scene.a, name, fence)))
        assert await scene.contents() == before
        assert not was_refused(await scene.a.start(scene.write(scene.a, name, taken)))

    async def test_commits_claims_purges_and_releases_of_many_shards_do_not_deadlock(self, scene: Scene) -> None:
        """Shards are locked in the order of their ids, whatever order they are named in."""
        store, shards = scene.store, range(4)
        fences = [await take(store, shard_id) for shard_id in shards]

        async def commits(client: int) -> None:
            for number in range(15):
                order = fences if (client + number) % 2 else fences[::-1]
                low_water = Position(number, 0, 0) if number % 3 == 0 else None
                done = await store.commit(
                    [Batch(f, [make_timer(f"{client}-{number}")], (), [OVER], low_water) for f in order]
                )
                assert not any(isinstance(result, ShardLost) for result in done)

        async def purges() -> None:
            for number in range(15):
                await store.purge_reached(fences if number % 2 else fences[::-1], 1_000, 5)

        async def claims() -> None:
            for number in range(15):
                order = shards if number % 2 else shards[::-1]
                await store.claim([Claim(shard_id, NEVER, 1, "x", "y", 1) for shard_id in order])

        await asyncio.gather(*(commits(client) for client in range(4)), purges(), claims())
        assert len(await all_timers(store)) == 60
        assert await store.release(fences[::-1]) == [None] * 4


async def some_of_everything(store: Store, fence: Fence, number: int) -> None:
    """One call of each kind, for tests that count what is read."""
    timer = make_timer(f"n-{number}", 7, correlation_id="c", payload=f'"{"x" * 5_000}"')
    await store.commit([Batch(fence, [timer], [make_timer(f"n-1{number}").key], [make_reached(timer)])])
    await store.commit([Batch(fence, [timer], low_water=Position(0, 0, number))])
    await store.get_many([(0, timer.key), (0, KEPT.key)])
    await store.load([PageRequest(0, BEFORE_ALL, 1 << 50, 5)])
    await store.load([PageRequest(0, BEFORE_ALL, 1 << 50, 5, 0)])
    await store.purge_reached([fence], 10, 1)
    await store.shards()
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5))
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5, correlation_id="c"))
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5, chars_max=0))
    await store.list_timers(ListQuery(namespace="test", num_shards=4, limit=5, payloads=False))
