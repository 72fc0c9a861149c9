"""A shard on its way to another instance: what is queued, what is in flight, and who may write meanwhile."""

from __future__ import annotations

import asyncio

from engine_world import OK, URL, World, in_world

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult
from duetime.domain.timer import TimerKey, TimerSpec, shard_of


def test_a_shard_that_moves_starts_no_queued_delivery_and_repeats_none() -> None:
    """With a backlog the move would otherwise last the whole drain timeout, and repeat what is in flight then."""

    async def story(world: World) -> None:
        async def slow(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(0.5)
            return OK

        world.destinations.answers[URL] = slow
        names = [f"t{number}" for number in range(200)]
        await asyncio.gather(*(world.create(name, 2_000) for name in names))
        await asyncio.sleep(2.2)
        started = world.destinations.called()
        assert 0 < len(started) < len(names), "there has to be a backlog"
        began_ms = world.clock.boot_ms()
        await world.engine._release(list(world.engine.shards.values()))
        assert world.clock.boot_ms() - began_ms < 1_000, "no longer than what was in flight"
        assert world.destinations.called() == started, "a draining shard has started a delivery"
        await asyncio.sleep(60)  # claimed again: it is the only instance
        assert sorted(world.destinations.called()) == sorted(names), "lost, or delivered twice"

    in_world(story, delivery__concurrency_per_destination=8)


def test_a_shard_that_waits_for_a_delivery_in_flight_still_takes_writes() -> None:
    async def story(world: World) -> None:
        answered = asyncio.Event()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return OK

        world.destinations.answers["http://hangs.test/"] = hangs
        await world.create("hangs", 100, callback_url="http://hangs.test/")
        await asyncio.sleep(0.5)
        shard = world.engine.shards[0]
        release = asyncio.ensure_future(world.engine._release([shard]))
        await asyncio.sleep(1)
        assert shard.draining
        assert not shard.dropped
        assert (await world.create("written", 0)).replaced is False
        await asyncio.sleep(1)
        assert world.destinations.called() == ["hangs"], "it is for the next owner to fire"
        answered.set()
        await release
        assert shard.dropped
        await asyncio.sleep(10)  # claimed again: it is the only instance
        assert world.destinations.called() == ["hangs", "written"]

    in_world(story, namespaces__default_num_shards=1)


def test_at_the_drain_timeout_a_shard_is_given_away_with_what_hangs() -> None:
    async def story(world: World) -> None:
        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(3_600)
            return OK

        world.destinations.answers[URL] = hangs
        await world.create("hangs", 100)
        await asyncio.sleep(0.5)
        shard = world.engine.shards[0]
        began_ms = world.clock.boot_ms()
        await world.engine._release([shard])
        assert 10_000 <= world.clock.boot_ms() - began_ms <= 10_100
        assert shard.dropped

    in_world(story, namespaces__default_num_shards=1, server__drain_timeout="10s")


def test_a_connection_that_is_made_while_its_shard_drains_sends_nothing() -> None:
    async def story(world: World) -> None:
        connected = asyncio.Event()

        async def connecting(attempt: Attempt) -> None:
            await connected.wait()

        world.destinations.before_begin = connecting
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        release = asyncio.ensure_future(world.engine._release([world.engine.shards[0]]))
        await asyncio.sleep(0)
        connected.set()
        await release
        assert world.destinations.calls == []
        await asyncio.sleep(10)
        assert world.destinations.called() == ["a"], "its next owner sends it"

    in_world(story, namespaces__default_num_shards=1)


def test_a_repeat_on_a_fresh_connection_goes_on_while_its_shard_drains() -> None:
    """It is in flight already: the receiver may have it."""

    async def story(world: World) -> None:
        again: list[int | None] = []

        async def answer(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(1)
            again.append(attempt.begin())
            return OK

        world.destinations.answers[URL] = answer
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        await world.engine._release([world.engine.shards[0]])
        assert again[0] is not None
        assert (await world.get("a")).reached is not None

    in_world(story, namespaces__default_num_shards=1)


async def _scheduled(world: World, name: str) -> bool:
    found = await world.store.get_many([(shard_of(name, 1), TimerKey("default", name))])
    return found[0].timer is not None


def test_what_is_written_while_a_shard_drains_is_on_disk_before_it_is_given_away() -> None:
    async def story(world: World) -> None:
        shard = world.engine.shards[0]
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=60_000, callback_url=URL)
        writing = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(0)
        await world.engine._release([shard])
        await writing
        assert await _scheduled(world, "a")

    in_world(story, namespaces__default_num_shards=1)
