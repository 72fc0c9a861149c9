"""A stage for directed stories about a cluster: the world of the simulator without its weather. What goes wrong
is what the story says; the checker judges the end all the same."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from duetime.domain.timer import shard_of
from duetime.errors import OutcomeUnknown, StoreThrottled
from duetime.store import GuardedStore, ShardRow
from duetime.testing.checker import Callback, Result
from duetime.testing.simulation.network import SimStore
from duetime.testing.simulation.world import Instance, Scenario, SimClient, World, judged

__all__ = ["Line", "Stage", "staged"]

# Deliveries take up to three seconds to connect: the time in which everything may change.
QUIET = Scenario(
    num_shards=(4,),
    slow_store=0,
    failed_store=0,
    unknown_store=0,
    torn_commit=0,
    lost_requests=0,
    slow_connects=1,
    broken_deliveries=0,
    dead_connections=0,
    lost_callback_answers=0,
    lost_forwards=0,
    repeated_forwards=0,
    varied=False,
)


class Stage(World):
    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed, QUIET)
        self.client = SimClient(self, "client")

    async def enter(self, count: int) -> list[Instance]:
        """So many more instances, up and with their share of the shards."""
        entered = [self.launch() for _ in range(count)]
        await asyncio.gather(*(instance.started.wait() for instance in entered))
        await asyncio.sleep(3)
        return entered

    async def put(self, timer: str, delay_ms: int, url: str = "http://ok") -> None:
        """Acknowledged, or the story is over."""
        await self.client.put(timer, url, delay_ms)
        assert self.wishes[-1].result is Result.OK

    async def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(12_000):
            if happened():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("two minutes, and it has not happened")

    async def names_of(self, instance: Instance, count: int, prefix: str = "t") -> list[str]:
        """Names of timers whose shards this instance owns."""
        names = (f"{prefix}{number}" for number in range(10_000))
        return [n for n in names if shard_of(n, self.num_shards) in instance.engine.shards][:count]

    async def rows(self) -> list[ShardRow]:
        return await self.database.shards()

    def calls_by(self, instance: Instance, *, since_ms: int = 0) -> list[Callback]:
        return [c for c in self.callbacks if c.owner == instance.name and c.started_at_ms >= since_ms]

    def called(self) -> set[str]:
        return {callback.timer for callback in self.callbacks}


class Line:
    """One instance's line to the database, in the hands of the story."""

    def __init__(self, instance: Instance) -> None:
        self._store = cast(SimStore, cast(GuardedStore, instance.engine._store).inner)
        self._travel = self._store._travel
        self._store._travel = self._in_our_hands  # type: ignore[method-assign]
        self._held: asyncio.Event | None = None
        self._held_methods: frozenset[str] = frozenset()
        self._lost: list[str] = []
        self._throttled = False
        self.throttled_calls = 0

    def hold(self, *methods: str) -> asyncio.Event:
        """These calls (none named: all) wait on the line until the event is set."""
        self._held_methods = frozenset(methods)
        self._held = asyncio.Event()
        return self._held

    def lose_answers(self, *methods: str) -> None:
        """One answer of each of these calls gets lost: it is applied, and the caller told that nobody knows."""
        self._lost += methods

    def throttle(self, on: bool) -> None:
        self._throttled = on

    async def _in_our_hands(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        if self._throttled:
            self.throttled_calls += 1
            answer.set_exception(StoreThrottled("slow down"))
            return
        if self._held is not None and (not self._held_methods or name in self._held_methods):
            await self._held.wait()
        if name in self._lost:
            self._lost.remove(name)
            await inner(*args)
            answer.set_exception(OutcomeUnknown("no answer"))
            return
        await self._travel(name, inner, args, answer)


def staged(story: Callable[[Stage], Awaitable[None]], *, is_judged: bool = True) -> Stage:
    """Play it, and let the checker judge what the destinations saw."""
    stage = Stage()
    asyncio.set_event_loop(stage.loop)
    logging.disable(logging.CRITICAL)

    async def told() -> None:
        stage.outside(stage.watch())
        await story(stage)

    try:
        stage.loop.run_until_complete(stage.outside(told()))
    finally:
        logging.disable(logging.NOTSET)
        stage.loop.clear_up()
        asyncio.set_event_loop(None)
    if is_judged:
        violations = judged(stage)
        assert not violations, str(violations[0])
    return stage
