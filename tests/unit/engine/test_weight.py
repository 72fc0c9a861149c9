"""The account of memory: what a timer weighs, compared with the process, and who gives memory back first."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from typing import Any

import pytest
from engine_world import World, in_world
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import TimerKey, TimerSpec
from duetime.engine.weight import cuts, timer_bytes
from duetime.errors import DuetimeError
from duetime.stores.memory import MemoryStore
from duetime.testing import make_timer

HELD = "http://held.test/hook"


def spec_of(shape: str, number: int) -> dict[str, Any]:
    """Fields of a timer; each has texts of its own, as requests have."""
    if shape == "payload":
        return {"payload": '"' + "x" * 2_000 + str(number) + '"'}
    if shape == "not latin":
        return {"payload": '"' + "\u4e2d" * 1_000 + str(number) + '"'}
    if shape == "headers":
        return {
            "headers": {f"x-header-{n}-{number}": "v" * 50 + str(number) for n in range(10)},
            "tags": tuple(f"tag {n} {number}" for n in range(10)),
        }
    if shape == "URL":
        return {"callback_url": HELD + "?" + "q" * 1_500 + str(number)}
    if shape == "correlation id":
        return {"correlation_id": "c" * 400 + str(number)}
    return {}


SHAPES = ["small", "payload", "not latin", "headers", "URL", "correlation id"]
COUNT = 2_000


class OnlyCounts(MemoryStore):
    """Stores nothing, so that only the engine holds the timers."""

    async def commit(self, batches: Any) -> Any:
        kept = [type(batch)(batch.fence) for batch in batches]
        return await super().commit(kept)


async def create_all(world: World, shape: str, delay_ms: int) -> None:
    for first in range(0, COUNT, 100):
        specs = [
            replace(
                TimerSpec(namespace="default", timer_id=f"t{n}", delay_ms=delay_ms, callback_url=f"{HELD}/{n}"),
                **spec_of(shape, n),
            )
            for n in range(first, first + 100)
        ]
        results = await world.service.create_many(specs)
        assert not any(isinstance(result, DuetimeError) for result in results)


def traced() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_account_agrees_with_the_memory_of_the_process(shape: str) -> None:
    async def scenario(world: World) -> None:
        counters = world.engine.counters
        await create_all(world, shape, 1_000)  # caches are filled
        for n in range(COUNT):
            await world.service.delete(TimerKey("default", f"t{n}"))
        await asyncio.sleep(5)
        tracemalloc.start()
        try:
            before = traced()
            await create_all(world, shape, 20_000)
            await asyncio.sleep(1)
            assert 0.6 < counters.weight / (traced() - before) < 1.5
        finally:
            tracemalloc.stop()

    in_world(scenario, new_store=OnlyCounts)


def test_held_timers_that_were_deleted_or_replaced_are_neither_in_memory_nor_in_the_account() -> None:
    async def scenario(world: World) -> None:
        async def broken(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.BROKEN, error="refused")

        for n in range(COUNT):
            world.destinations.answers[f"{HELD}/{n}"] = broken
        world.destinations.answers[HELD] = broken
        tracemalloc.start()
        try:
            before = traced()
            payload = "x" * 5_000
            for n in range(COUNT):
                await world.create(f"t{n}", 100, callback_url=HELD, payload=f'"{payload}{n}"')
            await asyncio.sleep(10)
            full = traced() - before
            assert full > 5_000 * COUNT
            for n in range(COUNT):
                await world.service.delete(TimerKey("default", f"t{n}"))
            await asyncio.sleep(10)
            assert world.engine.counters.weight == 0
            assert traced() - before < full / 10
        finally:
            tracemalloc.stop()

    in_world(scenario, new_store=OnlyCounts, delivery__breaker_pause="60s")


def test_every_text_of_a_timer_counts() -> None:
    plain = timer_bytes(make_timer())
    assert timer_bytes(make_timer(callback_url="http://h/" + "x" * 1_000)) > plain + 900
    assert timer_bytes(make_timer(payload="x" * 1_000)) > plain + 1_000
    assert timer_bytes(make_timer(payload="\u4e2d" * 1_000)) > plain + 2_000
    assert timer_bytes(make_timer(correlation_id="x" * 200)) > plain + 200


class TestCuts:
    def test_the_largest_give_until_they_are_as_small_as_the_next(self) -> None:
        assert cuts({"a": 100, "b": 60, "c": 10}, 30) == {"a": 30}
        assert cuts({"a": 100, "b": 60, "c": 10}, 40) == {"a": 40}
        assert cuts({"a": 100, "b": 60, "c": 10}, 60) == {"a": 50, "b": 10}
        assert cuts({"a": 100, "b": 60, "c": 10}, 140) == {"a": 90, "b": 50}

    def test_nobody_gives_more_than_it_has(self) -> None:
        assert cuts({"a": 100, "b": 60}, 160) == {"a": 100, "b": 60}
        assert cuts({"a": 100, "b": 60}, 1_000) == {"a": 100, "b": 60}
        assert cuts({}, 10) == {}

    @pytest.mark.parametrize("surplus", [0, -5])
    def test_nobody_gives_anything_if_nothing_is_too_much(self, surplus: int) -> None:
        assert cuts({"a": 100, "b": 60}, surplus) == {}

    @pytest.mark.parametrize("surplus", range(1, 200, 7))
    def test_together_they_give_what_is_too_much(self, surplus: int) -> None:
        weights = {"a": 100, "b": 60, "c": 33, "d": 33, "e": 1}
        given = cuts(weights, surplus)
        assert surplus <= sum(given.values()) < surplus + len(weights) or sum(given.values()) == 227
        left = [weights[name] - given.get(name, 0) for name in weights]
        assert max(left) - min(left[0], *left[1:4]) >= 0
        assert all(left[n] == max(left) for n, name in enumerate(weights) if name in given)
