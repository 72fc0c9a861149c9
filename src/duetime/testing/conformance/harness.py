"""What all conformance tests use: a store on an empty database, and functions to claim shards, write and read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
import pytest_asyncio
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, Outcome, Position, Reached, Timer
from duetime.store import Batch, Claim, Committed, Fence, ListQuery, Page, PageRequest, Store

SHARDS = 4
FAR = 1 << 53
EVERY_OUTCOME = frozenset(Outcome)


@pytest.mark.asyncio
class Harness:
    def new_store(self) -> Store:
        """A store object, not yet opened, on the database under test."""
        raise NotImplementedError

    async def wipe(self) -> None:
        """Make the database under test empty."""
        raise NotImplementedError

    # For the tests of rows that cannot be decoded. Each changes one stored row with the driver of the database, not
    # with the store, so that the adapter can no longer decode it. The key of the row stays the same.

    async def spoil_timer(self, shard_id: int, timer: Timer) -> None:
        """Spoil the row of that timer."""
        _cannot_spoil("spoil_timer")

    async def spoil_reached(self, shard_id: int, reached: Reached) -> None:
        """Spoil that reached row."""
        _cannot_spoil("spoil_reached")

    async def spoil_namespace(self, name: str) -> None:
        _cannot_spoil("spoil_namespace")

    @pytest_asyncio.fixture
    async def store(self) -> AsyncIterator[Store]:
        await self.wipe()
        store = self.new_store()
        await store.migrate()
        await store.open()
        try:
            await store.ensure_shards(SHARDS)
            yield store
        finally:
            await store.close()

    @pytest_asyncio.fixture
    async def fence(self, store: Store) -> Fence:
        """The fence of shard 0, which is claimed."""
        return await take(store, 0)

    @pytest_asyncio.fixture
    async def other_session(self, store: Store) -> AsyncIterator[Store]:
        """A second session on the same database; an exclusive store has only the one."""
        if store.capabilities.exclusive:
            yield store
            return
        other = self.new_store()
        await other.open()
        try:
            yield other
        finally:
            await other.close()


def _cannot_spoil(method: str) -> None:
    pytest.skip(f"the test class of this adapter does not override {method}, so no stored row can be spoilt")


async def take(store: Store, shard_id: int, nonce: int | None = None, owner_id: str = "a") -> Fence:
    """Claim a shard at its current version, and return the fence."""
    version = next(row.version for row in await store.shards() if row.shard_id == shard_id)
    claim = Claim(shard_id, version, 1_000 + version if nonce is None else nonce, owner_id, "host:1", 1)
    [row] = await store.claim([claim])
    assert row.nonce == claim.nonce
    return row.fence


async def put(store: Store, fence: Fence, *timers: Timer) -> Committed:
    return await commit_one(store, Batch(fence, puts=timers))


async def commit_one(store: Store, batch: Batch) -> Committed:
    """Commit a batch that must succeed."""
    [result] = await store.commit([batch])
    assert isinstance(result, Committed), result
    return result


async def load(store: Store, requests: Sequence[PageRequest]) -> list[Page]:
    pages = list(await store.load(requests))
    assert all(isinstance(page, Page) for page in pages), pages
    return cast("list[Page]", pages)


async def load_one(store: Store, shard_id: int, after: Position, until_ms: int, limit: int) -> Page:
    [page] = await load(store, [PageRequest(shard_id, after, until_ms, limit)])
    return page


async def all_timers(store: Store, shard_id: int = 0, page: int = 1_000) -> list[Timer]:
    """All timers of a shard, page by page."""
    timers: list[Timer] = []
    after: Position | None = BEFORE_ALL
    while after is not None:
        request = await load_one(store, shard_id, after, FAR, page)
        assert request.next is None or request.next > after, "a load must move on"
        timers += request.timers
        after = request.next
    return timers


async def all_reached(store: Store, namespace: str = "test", page: int = 100) -> list[Reached]:
    return (await listed(store, ListQuery(namespace=namespace, num_shards=SHARDS, outcomes=EVERY_OUTCOME, limit=page)))[
        1
    ]


async def listed(store: Store, query: ListQuery) -> tuple[list[Timer], list[Reached]]:
    """All results of a query, page by page."""
    timers: list[Timer] = []
    reached: list[Reached] = []
    after: Position | None = query.after
    while after is not None:
        page = await store.list_timers(replace(query, after=after))
        assert len(page.timers) + len(page.reached) <= query.limit
        assert page.next is None or page.next > after, "a list must move on"
        timers += page.timers
        reached += page.reached
        after = page.next
    return timers, reached


async def contents(store: Store, namespace: str = "test") -> object:
    """Everything that a test may have changed, to compare before and after."""
    timers = [await all_timers(store, row.shard_id) for row in await store.shards()]
    return await store.shards(), timers, await all_reached(store, namespace)
