"""The simulated cluster without random faults, for tests that inject their own. The checker still checks the result."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

from duetime.domain.timer import shard_of
from duetime.errors import OutcomeUnknown, StoreThrottled
from duetime.store import GuardedStore, ShardRow
from duetime.testing.checker import Callback, Result
from duetime.testing.simulation.cluster import Instance, Scenario, SimClient, SimulatedCluster, violations_of
from duetime.testing.simulation.network import SimStore

__all__ = ["ScriptedCluster", "StoreConnection", "run_scripted"]

# While `faults_on` is set, deliveries take up to three seconds to connect: the timer may change in that time.
WITHOUT_FAULTS = Scenario(
    num_shards=(4,),
    slow_store=0,
    failed_store=0,
    unknown_store=0,
    torn_commit=0,
    lost_requests=0,
    slow_connects=1,
    broken_deliveries=0,
    broken_connections=0,
    lost_callback_answers=0,
    lost_forwards=0,
    repeated_forwards=0,
    varied=False,
)


class ScriptedCluster(SimulatedCluster):
    def __init__(self, seed: int = 1) -> None:
        super().__init__(seed, WITHOUT_FAULTS)
        self.client = SimClient(self, "client")

    async def launch_many(self, count: int) -> list[Instance]:
        """Launch more instances, and wait until they have started and own their share of the shards."""
        launched = [self.launch() for _ in range(count)]
        await asyncio.gather(*(instance.started.wait() for instance in launched))
        await asyncio.sleep(3)
        return launched

    async def put(self, timer: str, delay_ms: int, url: str = "http://ok") -> None:
        """Create a timer; the create must be acknowledged."""
        await self.client.put(timer, url, delay_ms)
        assert self.requests[-1].result is Result.OK

    async def until(self, happened: Callable[[], bool]) -> None:
        for _ in range(12_000):
            if happened():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the condition was not met within two minutes")

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


class StoreConnection:
    """The connection of one instance to the database, controlled by the test."""

    def __init__(self, instance: Instance) -> None:
        self._store = cast(SimStore, cast(GuardedStore, instance.engine._store).inner)
        self._call = self._store._call
        self._store._call = self._controlled_call  # type: ignore[method-assign]
        self._blocked: asyncio.Event | None = None
        self._blocked_methods: frozenset[str] = frozenset()
        self._lost: list[str] = []
        self._throttled = False
        self.throttled_calls = 0

    def block(self, *methods: str) -> asyncio.Event:
        """These calls (none named: all) wait until the event is set."""
        self._blocked_methods = frozenset(methods)
        self._blocked = asyncio.Event()
        return self._blocked

    def lose_answers(self, *methods: str) -> None:
        """One answer of each of these calls is lost: the call is applied, and the caller gets `OutcomeUnknown`."""
        self._lost += methods

    def throttle(self, on: bool) -> None:
        self._throttled = on

    async def _controlled_call(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        if self._throttled:
            self.throttled_calls += 1
            answer.set_exception(StoreThrottled("slow down"))
            return
        if self._blocked is not None and (not self._blocked_methods or name in self._blocked_methods):
            await self._blocked.wait()
        if name in self._lost:
            self._lost.remove(name)
            await inner(*args)
            answer.set_exception(OutcomeUnknown("no answer"))
            return
        await self._call(name, inner, args, answer)


def run_scripted(scenario: Callable[[ScriptedCluster], Awaitable[None]], *, check: bool = True) -> ScriptedCluster:
    """Run the scenario, and check what the destinations saw."""
    cluster = ScriptedCluster()
    asyncio.set_event_loop(cluster.loop)
    logging.disable(logging.CRITICAL)

    async def run() -> None:
        cluster.create_task(cluster.watch_instances())
        await scenario(cluster)

    try:
        cluster.loop.run_until_complete(cluster.create_task(run()))
    finally:
        logging.disable(logging.NOTSET)
        cluster.loop.close_all()
        asyncio.set_event_loop(None)
    if check:
        violations = violations_of(cluster)
        assert not violations, str(violations[0])
    return cluster
