"""More timers are due than fit in memory: they are fired as fast as their destination allows, oldest first, and timers
of other flows stay on time. In virtual time, with real shards, look-ahead and flow control."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine_world import OK, World, check_accounts, in_world

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult
from duetime.domain.timer import TimerSpec
from duetime.errors import DuetimeError

OTHERS = "http://others.test/hook"
BUSY = "http://busy.test/hook"
KIB = 1_024


def takes(seconds: float) -> Callable[[Attempt], Awaitable[AttemptResult]]:
    async def answer(attempt: Attempt) -> AttemptResult:
        await asyncio.sleep(seconds)
        return OK

    return answer


async def create_many(world: World, prefix: str, dues_ms: list[int], url: str, payload: str | None = None) -> None:
    """Creates timers whose ids end in their place in the order of their due times."""
    specs = [
        TimerSpec(namespace="default", timer_id=f"{prefix}{n}", execute_at_ms=due_ms, callback_url=url, payload=payload)
        for n, due_ms in enumerate(dues_ms)
    ]
    for first in range(0, len(specs), 500):
        results = await world.service.create_many(specs[first : first + 500])
        assert not any(isinstance(result, DuetimeError) for result in results)


def called(world: World, prefix: str) -> list[int]:
    """The numbers of these timers, in the order of their calls."""
    return [
        int(timer_id.removeprefix(prefix)) for timer_id in world.destinations.called() if timer_id.startswith(prefix)
    ]


def late_by_ms(world: World, prefix: str, dues_ms: list[int]) -> list[int]:
    return [
        at_ms - dues_ms[int(timer_id.removeprefix(prefix))]
        for at_ms, timer_id, _ in world.destinations.calls
        if timer_id.startswith(prefix)
    ]


async def watch_weight(world: World, seconds: int) -> int:
    """The most that timers in memory weighed in these seconds."""
    most = 0
    for _ in range(seconds * 10):
        await asyncio.sleep(0.1)
        most = max(most, world.engine.counters.weight)
        check_accounts(world.engine)
    return most


def largest_disorder(numbers: list[int]) -> int:
    """By how many places a timer was called before an older one."""
    worst, seen = 0, -1
    for number in numbers:
        worst = max(worst, seen - number)
        seen = max(seen, number)
    return worst


class TestCatchUp:
    def test_after_an_outage_what_is_overdue_fires_in_order_and_other_flows_are_on_time(self) -> None:
        count, memory = 20_000, 1_000

        async def scenario(world: World) -> None:
            world.destinations.answers[BUSY] = takes(0.02)
            now_ms = world.clock.wall_ms()
            await create_many(world, "busy", [now_ms + 100_000 + n for n in range(count)], BUSY)
            others = [now_ms + 3_700_000 + n * 20 for n in range(2_500)]
            await create_many(world, "other", others, OTHERS)
            world.engine.abandon()
            await asyncio.sleep(3_685)
            world.new_instance()
            await world.start()
            most = await watch_weight(world, 70)
            assert sorted(called(world, "busy")) == list(range(count)), "nothing is lost, and nothing is called twice"
            assert largest_disorder(called(world, "busy")) < 2 * memory
            late = late_by_ms(world, "other", others)
            assert len(late) == 2_500
            assert max(late) < 100
            assert most < 1.1 * memory * KIB
            assert world.engine.telemetry.parked.value == 0
            assert world.engine.look_ahead.backlogs == 0

        in_world(
            scenario,
            engine__timers_in_memory_max=memory,
            engine__writes_waiting_max=50_000,
            delivery__concurrency_per_flow=8,
        )

    def test_while_a_backlog_is_loaded_the_oldest_due_timer_counts_although_it_is_not_in_memory(self) -> None:
        async def scenario(world: World) -> None:
            world.destinations.answers[BUSY] = takes(0.02)
            now_ms = world.clock.wall_ms()
            await create_many(world, "busy", [now_ms + 100_000 + n for n in range(5_000)], BUSY)
            world.engine.abandon()
            await asyncio.sleep(1_000)
            world.new_instance()
            await world.start()
            await asyncio.sleep(12)
            status = await world.service.cluster_status()
            assert world.engine.look_ahead.backlogs > 0
            assert "duetime_backlog_shards 0" not in world.engine.telemetry.render()
            left = set(range(5_000)) - set(called(world, "busy"))
            oldest_ms = world.clock.wall_ms() - (now_ms + 100_000 + min(left))
            assert oldest_ms - 500 <= (status.oldest_due_ms or 0) <= oldest_ms + 2_000, "some may be in flight"
            await asyncio.sleep(30)
            assert (await world.service.cluster_status()).oldest_due_ms is None
            assert "duetime_backlog_shards 0" in world.engine.telemetry.render()

        in_world(
            scenario,
            engine__timers_in_memory_max=1_000,
            delivery__concurrency_per_flow=4,
        )


class TestMemoryIsShared:
    def test_large_timers_that_are_due_at_once_do_not_delay_those_of_other_flows(self) -> None:
        """Item 18: the destination is too fast for its timers to be parked."""

        async def scenario(world: World) -> None:
            world.destinations.answers[BUSY] = takes(0.02)
            now_ms = world.clock.wall_ms()
            await create_many(world, "busy", [now_ms + 100_000] * 400, BUSY, '"' + "x" * 255 * KIB + '"')
            others = [now_ms + 100_001 + n * 20 for n in range(500)]
            await create_many(world, "other", others, OTHERS)
            await asyncio.sleep(90)
            most = await watch_weight(world, 30)
            late = late_by_ms(world, "other", others)
            assert len(late) == 500
            assert max(late) < 100
            assert sorted(called(world, "busy")) == list(range(400))
            assert most < 1.3 * 20_000 * KIB
            assert world.engine.telemetry.parked.value == 0

        in_world(scenario, engine__timers_in_memory_max=20_000, delivery__concurrency_per_flow=1)

    def test_timers_created_overdue_leave_memory_while_they_wait_and_fire_later(self) -> None:
        async def scenario(world: World) -> None:
            world.destinations.answers[BUSY] = takes(0.02)
            now_ms = world.clock.wall_ms()
            others = [now_ms + 1_000 + n * 20 for n in range(500)]
            await create_many(world, "other", others, OTHERS)
            await create_many(world, "busy", [now_ms - 100_000 + n for n in range(5_000)], BUSY)
            await watch_weight(world, 2)
            most = await watch_weight(world, 20)
            assert max(late_by_ms(world, "other", others)) < 100
            assert sorted(called(world, "busy")) == list(range(5_000))
            assert most <= 1_000 * KIB
            assert world.engine.telemetry.parked.value == 0

        in_world(scenario, engine__timers_in_memory_max=1_000, delivery__concurrency_per_flow=8)
