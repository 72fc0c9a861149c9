"""DynamoDB: a fenced write and a claim, in every order in which they can arrive and be answered.

The service runs one request after the other, or rejects one of two that conflict; the emulator only runs one after the
other. So the tests delay requests and answers on the network, and simulate the rejection of a conflict. The last test
shows that the others notice a fence without a condition.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from duetime.domain.timer import Position
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Fence, ShardRow, Store, open_store
from duetime.stores.dynamodb import writes as dynamodb_writes
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, take
from dynamodb_way import DynamoWay, Gate, cancelled, refused
from servers import at_port, fresh_database, port_of, require

KEPT = make_timer("kept", 5)
OVER = make_reached(make_timer("over"), purge_at_ms=5)

Write = Callable[[Store, Fence], Awaitable[Sequence[object]]]

WRITES: dict[str, Write] = {
    "put": lambda store, fence: store.commit([Batch(fence, [make_timer("new")])]),
    "replace": lambda store, fence: store.commit([Batch(fence, [make_timer("kept", 9, attempts=1)])]),
    "delete": lambda store, fence: store.commit([Batch(fence, (), [KEPT.key])]),
    "reached": lambda store, fence: store.commit([Batch(fence, reached=[make_reached(KEPT)])]),
    "low water": lambda store, fence: store.commit([Batch(fence, low_water=Position(1, 2, 3))]),
    "everything": lambda store, fence: store.commit(
        [Batch(fence, [make_timer("new")], [KEPT.key], [make_reached(KEPT)], Position(1, 2, 3))]
    ),
    "purge": lambda store, fence: store.purge_reached([fence], 1_000, 10),
    "release": lambda store, fence: store.release([fence]),
}
OPERATION = dict.fromkeys(WRITES, "TransactWriteItems") | {"release": "UpdateItem"}


class Scene:
    """Stores of A, the old owner, and B, the new one, each with its own proxy, and a store that reads the result."""

    def __init__(self, stores: Sequence[Store], ways: Sequence[DynamoWay]) -> None:
        self.a, self.b, self.observer = stores
        self.way_of_a, self.way_of_b = ways

    async def filled(self) -> Fence:
        fence = await take(self.observer, 0)
        await self.observer.commit([Batch(fence, [KEPT], (), [OVER])])
        return fence

    async def claim(self, fence: Fence) -> ShardRow:
        [row] = await self.b.claim([Claim(0, fence.version, -7, "b", "host:2", 1)])
        assert row.nonce == -7
        return row

    async def rows(self) -> object:
        return await all_timers(self.observer), await all_reached(self.observer)

    async def shard(self) -> ShardRow:
        return (await self.observer.shards())[0]


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    url = fresh_database(require("ministack"))
    async with DynamoWay(port_of(url)) as first, DynamoWay(port_of(url)) as second:
        stores = [open_store(at_port(url, port)) for port in (first.port, second.port, port_of(url))]
        await stores[0].migrate()
        for store in stores:
            await store.open()
        await stores[0].ensure_shards(4)
        yield Scene(stores, [first, second])
        for store in stores:
            await store.close()


def was_refused(answer: Sequence[object]) -> bool:
    return isinstance(answer[0], ShardLost)


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_that_arrives_after_the_claim_leaves_nothing(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    before, gate = await scene.rows(), Gate()
    scene.way_of_a.next(OPERATION[name], gate)
    write = asyncio.ensure_future(WRITES[name](scene.a, fence))
    await gate.reached.wait()
    taken = await scene.claim(fence)
    gate.opened.set()
    assert was_refused(await write)
    assert await scene.rows() == before
    assert await scene.shard() == taken


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_after_the_write_sees_all_of_it_whenever_the_answer_comes(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    before, gate = await scene.rows(), Gate(after=True)
    scene.way_of_a.next(OPERATION[name], gate)
    write = asyncio.ensure_future(WRITES[name](scene.a, fence))
    await gate.reached.wait()
    taken = await scene.claim(fence)
    assert await scene.rows() != before or taken.low_water == Position(1, 2, 3)
    gate.opened.set()
    assert not was_refused(await write)
    assert await scene.shard() == taken


@pytest.mark.parametrize("name", WRITES)
async def test_a_write_that_is_retried_after_a_conflict_with_the_claim_is_refused(scene: Scene, name: str) -> None:
    """The service cancels a transaction that conflicts with another one; the store retries it, and must be refused."""
    fence = await scene.filled()
    before, gate = await scene.rows(), Gate()
    conflict = cancelled("TransactionConflict") if name != "release" else refused("TransactionConflictException")
    scene.way_of_a.next(OPERATION[name], conflict)
    scene.way_of_a.next(OPERATION[name], gate)
    write = asyncio.ensure_future(WRITES[name](scene.a, fence))
    await gate.reached.wait()
    taken = await scene.claim(fence)
    gate.opened.set()
    assert was_refused(await write)
    assert await scene.rows() == before
    assert await scene.shard() == taken


@pytest.mark.parametrize("name", [name for name in WRITES if name != "release"])
async def test_a_claim_that_is_retried_after_a_conflict_with_the_write_comes_after_it(scene: Scene, name: str) -> None:
    fence = await scene.filled()
    gate = Gate()
    scene.way_of_b.next("UpdateItem", refused("TransactionConflictException"))
    scene.way_of_b.next("UpdateItem", gate)
    claim = asyncio.ensure_future(scene.claim(fence))
    await gate.reached.wait()
    assert not was_refused(await WRITES[name](scene.a, fence))
    after = await scene.rows()
    gate.opened.set()
    taken = await claim
    assert await scene.rows() == after
    assert was_refused(await WRITES[name](scene.a, fence))
    assert await scene.rows() == after
    assert await scene.shard() == taken


async def test_of_two_concurrent_claims_one_succeeds(scene: Scene) -> None:
    fence = await scene.filled()
    gate = Gate()
    scene.way_of_a.next("UpdateItem", gate)
    late = asyncio.ensure_future(scene.a.claim([Claim(0, fence.version, 9, "a", "host:1", 1)]))
    await gate.reached.wait()
    taken = await scene.claim(fence)
    gate.opened.set()
    assert await late == [taken]


async def test_replaced_is_decided_when_the_write_is_applied(scene: Scene) -> None:
    """One timer is created and another deleted while the write is delayed: the answer says what it replaced."""
    fence = await scene.filled()
    gate = Gate()
    scene.way_of_a.next("TransactWriteItems", gate)
    write = asyncio.ensure_future(scene.a.commit([Batch(fence, [make_timer("new", 9), make_timer("kept", 9)])]))
    await gate.reached.wait()
    await scene.observer.commit([Batch(fence, [make_timer("new", 1)], [KEPT.key])])
    gate.opened.set()
    [result] = await write
    assert getattr(result, "replaced", None) == {0}


@pytest.mark.parametrize("name", [name for name in WRITES if name != "low water"])
async def test_without_the_condition_of_the_fence_the_old_owner_could_write(
    scene: Scene, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above can fail: with a condition that is always met, the same write is applied after the claim."""
    fence = await scene.filled()
    before = await scene.rows(), await scene.claim(fence)
    monkeypatch.setattr(dynamodb_writes, "_FENCE_IS_VALID", ":version = :version AND :nonce = :nonce")
    assert not was_refused(await WRITES[name](scene.a, fence))
    assert (await scene.rows(), await scene.shard()) != before
