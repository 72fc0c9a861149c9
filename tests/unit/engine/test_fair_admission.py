"""Many writes of one namespace do not delay those of another: turns in commits, and a bounded share of the queue."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_world import URL, World, in_world
from msgspec.structs import replace

from duetime.domain.timer import NamespaceSpec, TimerSpec
from duetime.errors import Busy, DuetimeError
from duetime.stores.memory import MemoryStore


class SlowStore(MemoryStore):
    """A commit takes 100 ms and has at most 100 rows."""

    capabilities = replace(MemoryStore.capabilities, batch_max=100)

    async def commit(self, batches: Any) -> Any:
        await asyncio.sleep(0.1)
        return await super().commit(batches)


def spec(namespace: str, timer_id: str) -> TimerSpec:
    return TimerSpec(namespace=namespace, timer_id=timer_id, delay_ms=3_600_000, callback_url=URL)


async def add_namespace(world: World, name: str) -> None:
    await world.service.namespaces.create(NamespaceSpec(name=name))


def many_of_one(world: World, count: int) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(world.service.create(spec("default", f"t{n}"))) for n in range(count)]


class TestTurns:
    @pytest.mark.parametrize("shards", [1, 5])
    def test_a_create_is_in_the_next_commit_whatever_waits_of_another_namespace(self, shards: int) -> None:
        async def scenario(world: World) -> None:
            await add_namespace(world, "other")
            waiting = many_of_one(world, 2_000)
            await asyncio.sleep(0.01)
            for number in range(5):
                before_ms = world.clock.boot_ms()
                await world.service.create(spec("other", f"u{number}"))
                assert world.clock.boot_ms() - before_ms <= 250  # the commit in flight, and the next one
            assert sum(create.done() for create in waiting) < 1_500
            await asyncio.gather(*waiting)

        in_world(scenario, new_store=SlowStore, namespaces__default_num_shards=shards)

    def test_writes_of_one_namespace_keep_their_order_and_fill_the_commits(self) -> None:
        async def scenario(world: World) -> None:
            before_ms = world.clock.boot_ms()
            await asyncio.gather(*many_of_one(world, 2_000))
            assert world.clock.boot_ms() - before_ms <= 2_200  # 20 commits

        in_world(scenario, new_store=SlowStore, namespaces__default_num_shards=5)

    def test_namespaces_that_share_commits_fill_them(self) -> None:
        async def scenario(world: World) -> None:
            await add_namespace(world, "other")
            before_ms = world.clock.boot_ms()
            others = [world.service.create(spec("other", f"u{n}")) for n in range(1_000)]
            await asyncio.gather(*many_of_one(world, 1_000), *others)
            assert world.clock.boot_ms() - before_ms <= 2_400

        in_world(scenario, new_store=SlowStore, namespaces__default_num_shards=5)


class TestShareOfTheQueue:
    def test_a_namespace_that_fills_its_share_is_refused_and_others_are_not(self) -> None:
        async def scenario(world: World) -> None:
            await add_namespace(world, "other")
            answers = asyncio.gather(*many_of_one(world, 1_000), return_exceptions=True)
            await asyncio.sleep(0.01)
            await asyncio.gather(*(world.service.create(spec("other", f"u{n}")) for n in range(50)))
            refused = [answer for answer in await answers if isinstance(answer, DuetimeError)]
            assert len(refused) == 200
            assert {(type(error), error.code) for error in refused} == {(Busy, "namespace_busy")}

        in_world(scenario, new_store=SlowStore, engine__writes_waiting_max=1_000)


class TestBulkCreates:
    def test_a_bulk_create_lets_others_run_after_every_fifty(self) -> None:
        async def scenario(world: World) -> None:
            await add_namespace(world, "other")
            bulk = [
                asyncio.ensure_future(world.service.create_many([spec("default", f"{n} {m}") for m in range(1_000)]))
                for n in range(5)
            ]
            most = before = 0
            while before < 5_000:
                await asyncio.sleep(0)
                waiting = world.engine.counters.writes_waiting
                most, before = max(most, waiting - before), waiting
            assert 0 < most <= 50
            for results in await asyncio.gather(*bulk):
                assert len(results) == 1_000
                assert not any(isinstance(result, DuetimeError) for result in results)

        in_world(scenario, new_store=HeldStore)

    def test_the_results_are_in_order_with_the_errors_in_place(self) -> None:
        async def scenario(world: World) -> None:
            items: list[TimerSpec | DuetimeError] = [spec("default", f"t{n}") for n in range(120)]
            wrong = DuetimeError("wrong")
            items[60] = wrong
            results = await world.service.create_many(items)
            assert results[60] is wrong
            ids = [r.view.timer.timer_id for r in results if not isinstance(r, DuetimeError)]
            assert ids == [item.timer_id for item in items if isinstance(item, TimerSpec)]

        in_world(scenario)


class HeldStore(MemoryStore):
    """Commits take a second, so that the writes of a second wait together."""

    async def commit(self, batches: Any) -> Any:
        await asyncio.sleep(1)
        return await super().commit(batches)


LARGE = '"' + "x" * 100_000 + '"'


def large_ones(world: World, namespace: str, count: int) -> list[asyncio.Future[Any]]:
    specs = [replace(spec(namespace, f"t{n}"), payload=LARGE) for n in range(count)]
    return [asyncio.ensure_future(world.service.create(each)) for each in specs]


class TestBytesOfTheQueue:
    def test_writes_are_refused_by_the_bytes_they_hold_long_before_their_number(self) -> None:
        async def scenario(world: World) -> None:
            answers = asyncio.gather(*large_ones(world, "default", 1_000), return_exceptions=True)
            await asyncio.sleep(0.01)
            assert world.engine.counters.write_bytes_waiting < 10_000_000
            assert world.engine.counters.writes_waiting < 100
            refused = [answer for answer in await answers if isinstance(answer, DuetimeError)]
            assert 900 < len(refused) < 930, "it may use four fifths of ten million bytes"
            assert {(type(error), error.status, error.code) for error in refused} == {(Busy, 429, "namespace_busy")}
            assert world.engine.counters.write_bytes_waiting == 0
            assert world.engine.counters.bytes_of == {}

        in_world(scenario, new_store=HeldStore, engine__write_bytes_waiting_max=10_000_000)

    def test_another_namespace_is_still_accepted_and_when_all_is_used_nobody_is(self) -> None:
        async def scenario(world: World) -> None:
            await add_namespace(world, "other")
            first = asyncio.gather(*large_ones(world, "default", 100), return_exceptions=True)
            await asyncio.sleep(0.01)
            second = asyncio.gather(*large_ones(world, "other", 10), return_exceptions=True)
            assert not any(isinstance(answer, DuetimeError) for answer in await second)
            await first
            world.engine.counters.write_bytes_waiting_max = 0
            with pytest.raises(Busy) as refused:
                await world.service.create(spec("other", "one"))
            assert refused.value.code == "busy"

        in_world(scenario, new_store=HeldStore, engine__write_bytes_waiting_max=10_000_000)

    def test_a_write_that_is_larger_than_the_limit_is_accepted_alone(self) -> None:
        async def scenario(world: World) -> None:
            await world.service.create(replace(spec("default", "t"), payload=LARGE))

        in_world(scenario, new_store=HeldStore, engine__write_bytes_waiting_max=1_000)

    def test_settlements_of_large_timers_do_not_use_the_bytes_of_creates(self) -> None:
        """Their payloads are counted with the timers in memory."""

        async def scenario(world: World) -> None:
            creates = [replace(spec("default", f"t{n}"), delay_ms=20_000, payload=LARGE) for n in range(8)]
            await asyncio.gather(*(world.service.create(create) for create in creates))
            while not world.engine.counters.unsettled:
                await asyncio.sleep(0.01)
            assert world.engine.counters.unsettled == 8
            assert world.engine.counters.write_bytes_waiting < 10_000

        in_world(scenario, new_store=HeldStore, engine__write_bytes_waiting_max=2_000_000)
