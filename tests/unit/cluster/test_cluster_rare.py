"""Rare cases of a cluster that reviews have found; each was a defect once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_world import URL, World
from two_instances import Wires, of_two, owned_by

from duetime.cluster.forwarding import CreateCommand, Forward
from duetime.domain.timer import NamespaceSpec, TimerKey, TimerSpec, shard_of
from duetime.errors import DuetimeError, StoreUnavailable
from duetime.store import Store
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual


def test_a_release_that_failed_while_the_clock_was_off_is_repeated() -> None:
    """The instance is alive, so no other member may claim the shards that it owns but does not serve."""

    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(b.store)
        b.engine.ownership._store = faulty.as_store
        faulty.fail("release", *[Fault.UNAVAILABLE] * 3)
        b.engine.membership.skew_ms = 10_000
        b.engine.membership._measure_clock = lambda *_: None  # type: ignore[method-assign]
        await asyncio.sleep(10)
        assert faulty.calls["release"] > 1
        assert not b.engine.shards
        assert len(a.engine.shards) == 16

    of_two(scenario)


def test_a_balance_that_failed_is_repeated_with_the_next_heartbeat() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(a.store)
        a.engine.ownership._store = faulty.as_store
        b.engine.abandon()
        faulty.fail("claim", Fault.UNAVAILABLE)
        await asyncio.sleep(5.5)
        assert len(a.engine.shards) == 16
        assert faulty.calls["claim"] > 1

    of_two(scenario)


def test_case_25_an_instance_that_dies_again_and_again_takes_nothing_from_those_that_stay() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        stays = World(clock, store)
        await stays.start()
        for number in range(5):
            comes = World(clock, store)
            comes.starts = 100 + number
            comes.new_instance()
            await comes.start()
            await asyncio.sleep(2)
            comes.engine.abandon()
            assert len(stays.engine.shards) == 16
            await asyncio.sleep(1)
        await stays.engine.stop()

    run_virtual(run)


def test_a_namespace_read_long_ago_is_read_again_before_a_create_is_accepted() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        await b.service.namespaces.get("n")
        stuck = FaultyStore(b.store)
        b.engine.namespaces._store = stuck.as_store
        released = stuck.hold("namespaces")
        await a.service.namespaces.delete("n")
        spec = TimerSpec(namespace="n", timer_id=owned_by(b), delay_ms=1_000, callback_url=URL)
        creating = asyncio.ensure_future(b.service.create(spec))
        await asyncio.sleep(1)
        assert not creating.done(), "it may have been deleted: not on a reading of long ago"
        released.set()
        with pytest.raises(DuetimeError, match="There is no namespace"):
            await creating

    of_two(scenario)


def test_a_deletion_whose_last_search_fails_deletes_nothing_and_fails() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        looks = 0

        async def list_timers(query: Any, real: Any = a.store.list_timers) -> Any:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise StoreUnavailable("a blip")
            return await real(query)

        a.service.namespaces._store = _With(a.store, list_timers)
        with pytest.raises(StoreUnavailable):
            await a.service.namespaces.delete("n")
        after = await a.service.namespaces.get("n")
        assert (after.deleted, after.deleting) == (False, False)

    of_two(scenario)


class _With:
    def __init__(self, store: Store, list_timers: Any) -> None:
        self._store = store
        self.list_timers = list_timers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_a_command_in_flight_is_never_forgotten_and_large_ones_do_not_fill_the_memory() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(b.store)
        for group_commit in b.engine._group_commits:
            group_commit._store = faulty.as_store
        released = faulty.hold("commit")
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        version = b.engine.shards[shard_id].fence.version

        def command(number: int, payload: str) -> Forward:
            spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=60_000, callback_url=URL, payload=payload)
            return Forward(f"order-{number}", shard_id, version, CreateCommand(spec))

        first = b.service.forwarded.receive(command(0, "1"))
        for number in range(1, 120):
            b.service.forwarded.receive(command(number, '"' + "x" * 250_000 + '"'))
        assert b.service.forwarded.answer_to("order-0") is first
        released.set()
        await first
        await asyncio.sleep(1)
        for number in range(1_000, 1_010):  # each new one lets a few old ones go
            b.service.forwarded.receive(command(number, "2"))
        assert b.service.forwarded._remembered_chars <= 17 * 1024 * 1024
        await b.service.delete(TimerKey("default", timer_id))

    of_two(scenario)
