"""MemoryStore, in addition to the conformance suite: missing shards, ends of pages, and failovers."""

from __future__ import annotations

import pytest

from duetime.domain.timer import BEFORE_ALL, TimerKey
from duetime.errors import FailedOver, ShardLost
from duetime.store import Batch, Claim, Fence, Found, ListQuery, Member, Page, PageRequest, ShardRow, open_store
from duetime.stores.memory import MemoryStore
from duetime.testing import make_reached, make_timer

ME = Member("me", "here:1", 3, True, 0)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


async def owned(store: MemoryStore) -> Fence:
    await store.ensure_shards(1)
    [row] = await store.claim([Claim(0, 0, 7, "me", "here:1", 1)])
    return row.fence


def test_each_url_opens_a_separate_store_with_its_capabilities() -> None:
    store = open_store("memory://")
    assert isinstance(store, MemoryStore)
    assert open_store("memory://") is not store
    capabilities = store.capabilities
    assert (capabilities.durable, capabilities.parallel_commits, capabilities.exclusive) == (False, 1, False)
    assert capabilities.payload_bytes_max == 16_777_216


async def test_a_missing_shard_is_free_and_empty_and_cannot_be_claimed(store: MemoryStore) -> None:
    assert await store.claim([Claim(5, 0, 7, "me", "here:1", 1)]) == [ShardRow(5)]
    assert await store.load([PageRequest(5, BEFORE_ALL, 1 << 60, 10)]) == [Page((), None)]
    assert await store.get_many([(5, TimerKey("test", "a"))]) == [Found()]
    [lost] = await store.commit([Batch(Fence(5, 1, 7))])
    assert isinstance(lost, ShardLost)
    fence = await owned(store)
    await store.commit([Batch(fence, [make_timer("a")])])
    listing = await store.list_timers(ListQuery(namespace="test", num_shards=4))
    assert listing.timers == [make_timer("a")], "of the shards there are"


async def test_a_page_of_exactly_the_limit_with_no_more_rows_is_the_end(store: MemoryStore) -> None:
    fence = await owned(store)
    timers = [make_timer(f"t{n}", 1_000 + n) for n in range(3)]
    await store.commit([Batch(fence, timers, (), [make_reached(timer) for timer in timers])])
    [page] = await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 3)])
    assert page == Page(timers, None)
    [page] = await store.load([PageRequest(0, BEFORE_ALL, 1 << 60, 2)])
    assert page == Page(timers[:2], timers[1].position)
    query = ListQuery(namespace="test", num_shards=1, limit=3)
    assert (await store.list_timers(query)).next is None


async def test_a_member_whose_counter_moved_is_not_dead(store: MemoryStore) -> None:
    await store.join(ME)
    assert await store.mark_dead("me", 2) is False
    assert await store.mark_dead("me", 3) is True


async def test_after_each_failover_a_member_joins_again(store: MemoryStore) -> None:
    await store.join(ME)
    before = store.snapshot()
    for _ in range(3):
        await store.heartbeat("me", 4)
        store.restore(before)
        for _ in range(2):
            with pytest.raises(FailedOver):
                await store.heartbeat("me", 5)
        assert (await store.members())[0].counter == 3
        await store.join(ME)
