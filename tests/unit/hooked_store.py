"""A store with hooks before and after its calls, and engines on it."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any

from engine_world import World
from msgspec.structs import replace

from duetime.domain.timer import Created, TimerKey
from duetime.store import Claim, Member, ShardRow
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import FaultyStore
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual

A = TimerKey("default", "a")
Hook = Callable[[], Awaitable[None]]


class HookedStore(FaultyStore):
    """Runs a hook right before a call reaches the database, or after it was applied and before its answer."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.database = store
        self.before: dict[str, deque[Hook]] = defaultdict(deque)
        self.after: dict[str, deque[Hook]] = defaultdict(deque)
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any) -> Any:
            self.order.append(name)
            if self.before[name]:
                await self.before[name].popleft()()
            answer = await inner(*args)
            if self.after[name]:
                await self.after[name].popleft()()
            return answer

        return call


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


def with_store(
    scenario: Callable[[World, HookedStore], Awaitable[None]],
    new_store: Callable[[VirtualClock], MemoryStore] = MemoryStore,
    **settings: Any,
) -> None:
    settings.setdefault("namespaces__default_num_shards", 1)

    async def run(clock: VirtualClock) -> None:
        store = HookedStore(new_store(clock))
        world = World(clock, store.as_store, **settings)
        await world.start()
        try:
            await scenario(world, store)
        finally:
            store.heal()
            store.before.clear()
            store.after.clear()
            await world.engine.stop()

    run_virtual(run)


async def row_of(store: HookedStore, shard_id: int = 0) -> ShardRow:
    return (await store.database.shards())[shard_id]


async def claim_for_another(store: HookedStore, shard_id: int = 0, owner_id: str = "another") -> ShardRow:
    """Another instance, which is alive, claims the shard."""
    if owner_id not in {member.instance_id for member in await store.database.members()}:
        await store.database.join(Member(owner_id, "elsewhere:1", 0, True, 0))
    row = await row_of(store, shard_id)
    [claimed] = await store.database.claim([Claim(shard_id, row.version, 4_711, owner_id, "elsewhere:1", 0)])
    assert claimed.nonce == 4_711
    return claimed


async def stored(store: HookedStore, key: TimerKey = A) -> str | None:
    """The payload that is stored under a key."""
    timer = (await store.database.get_many([(0, key)]))[0].timer
    return None if timer is None else timer.payload


def creating(world: World, payload: str = "1", delay_ms: int = 60_000) -> asyncio.Future[Created]:
    return asyncio.ensure_future(world.create("a", delay_ms, payload=payload))


class Pair:
    """Two instances on one database, each with its own connection to it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.database = MemoryStore(clock)
        self.stores: list[HookedStore] = []
        self.worlds: list[World] = []

    async def enter(self, offset_ms: int = 0, **settings: Any) -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        store = HookedStore(self.database)
        world = World(VirtualClock(loop, offset_ms), store.as_store, **settings)
        for _ in self.worlds:
            world.new_instance()  # another seed
        self.stores.append(store)
        self.worlds.append(world)
        await world.start()
        return world


def of_pair(scenario: Callable[[Pair], Awaitable[None]]) -> None:
    async def run(clock: VirtualClock) -> None:
        pair = Pair(clock)
        try:
            await scenario(pair)
        finally:
            for store in pair.stores:
                store.heal()
            for world in pair.worlds:
                await world.engine.stop()

    run_virtual(run)


async def is_served_once(pair: Pair) -> bool:
    """Every shard is served by the instance that its row names, and by no other."""
    rows = await pair.database.shards()
    return all(
        [world.engine.membership.instance_id for world in pair.worlds if row.shard_id in world.engine.shards]
        == [row.owner_id]
        for row in rows
    )
