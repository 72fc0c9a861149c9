"""Faults of every kind on a real cluster, drawn from a seed, one or two at a time; and a note of each for the checker.

Every kind comes once before any comes twice. A fault is over, for the judge, when whom it struck serves again.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from cluster import Cluster, Instance
from real_server import until, wall_ms
from scripts.servers import Server

from duetime.testing.checker import Fault

__all__ = ["FaultInjector"]

AT_ONCE = 2
_LOOK_SECONDS = 0.1
_STILL_SECONDS = 1.0


class FaultInjector:
    def __init__(self, cluster: Cluster, database: Server, rng: random.Random, *, keeps_data: bool = True) -> None:
        """`keeps_data`: the database may be killed and restarted."""
        self.faults: list[Fault] = []
        self.moves = 0  # graceful ones: no fault, no excuse
        self._cluster = cluster
        self._database = database
        self._rng = rng
        self._database_struck = asyncio.Lock()
        self._on_all: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "database restart": self._restart_database,
            "database kill": self._kill_database,
        }
        if not keeps_data:
            self._on_all.clear()
        self._on_one: dict[str, Callable[[Instance, random.Random], Awaitable[None]]] = {
            "kill": self._kill,
            "freeze": self._freeze,
            "roll": self._roll,
            "join before leave": self._join_before_leave,
            "link cut": self._cut,
            "link reset": self._reset,
            "link slow": self._slow,
            "link swallows all": self._black_hole,
            "link swallows answers": self._deaf,
        }

    @property
    def kinds(self) -> set[str]:
        """Of faults; graceful moves are none."""
        return (self._on_all.keys() | self._on_one.keys()) - {"roll", "join before leave"}

    @property
    def summary(self) -> str:
        counts = Counter(fault.kind for fault in self.faults)
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        return f"faults: {listed}; graceful moves: {self.moves}"

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """A machine that gives us no time gives none to the instances either: to them it is a freeze."""

        async def look() -> None:
            while True:
                from_ms, before = wall_ms(), time.monotonic()
                await asyncio.sleep(_LOOK_SECONDS)
                if time.monotonic() - before > _LOOK_SECONDS + _STILL_SECONDS:
                    self.faults.append(Fault("machine stood still", from_ms, wall_ms()))

        looking = asyncio.create_task(look())
        try:
            yield
        finally:
            looking.cancel()

    async def inject_for(self, seconds: float) -> None:
        """At least as long, and until every kind has come once."""
        ends_at = time.monotonic() + seconds
        turns = asyncio.Semaphore(AT_ONCE)
        bag: list[str] = []
        rounds = 0
        async with asyncio.TaskGroup() as faults:
            while time.monotonic() < ends_at or rounds == 0:
                if not bag:
                    bag = [*self._on_all, *self._on_one]
                    self._rng.shuffle(bag)
                await turns.acquire()
                fault = faults.create_task(self._one(bag.pop()))
                fault.add_done_callback(lambda _: turns.release())
                rounds += not bag
                await asyncio.sleep(self._rng.uniform(0.2, 2.5))

    async def _one(self, kind: str) -> None:
        rng = random.Random(self._rng.random())
        if kind in self._on_all:
            async with self._database_struck:
                await self._on_all[kind](rng)
            return
        instance = self._rng.choice([i for i in self._cluster.instances if not (i.struck or i.leaving)])
        instance.struck = True
        try:
            await self._on_one[kind](instance, rng)
        finally:
            instance.struck = False

    @asynccontextmanager
    async def noted(self, kind: str, who: str = "") -> AsyncIterator[None]:
        from_ms = wall_ms()
        try:
            yield
        finally:
            self.faults.append(Fault(kind, from_ms, wall_ms(), who))

    # --- an instance ------------------------------------------------------------------------------

    async def _kill(self, instance: Instance, rng: random.Random) -> None:
        async with self.noted("kill", instance.who):
            await instance.kill()
        await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 6))))
        await instance.start_whatever_it_takes()

    async def _freeze(self, instance: Instance, rng: random.Random) -> None:
        async with self.noted("freeze", instance.who):
            instance.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(4, 6))
            instance.signal(signal.SIGCONT)
            await self._serves(instance)

    async def _roll(self, instance: Instance, rng: random.Random) -> None:
        await self._leave(instance)
        await self._cluster.join()

    async def _join_before_leave(self, instance: Instance, rng: random.Random) -> None:
        await self._cluster.join()
        await self._leave(instance)

    async def _leave(self, instance: Instance) -> None:
        self.moves += 1
        code = await self._cluster.leave(instance)
        assert code == 0, f"{instance.name} ended with {code}:\n{instance.log.read_text()[-2_000:]}"

    async def _serves(self, instance: Instance) -> None:
        async def is_ready() -> bool:
            return await instance.not_ready() is None

        await until(is_ready, f"{instance.name} serves again; its log: {instance.log}", 60)

    # --- the database -----------------------------------------------------------------------------

    async def _restart_database(self, rng: random.Random) -> None:
        async with self.noted("database restart"):
            await asyncio.to_thread(self._database.restart)
            await self._all_serve()

    async def _kill_database(self, rng: random.Random) -> None:
        async with self.noted("database kill"):
            await asyncio.to_thread(self._database.kill)
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 5))))
            await asyncio.to_thread(self._database.start)
            await self._all_serve()

    async def _all_serve(self) -> None:
        async def are_ready() -> bool:
            return all([await i.not_ready() is None for i in self._cluster.instances if not (i.struck or i.leaving)])

        await until(are_ready, "the instances serve again", 60)

    # --- the way between the two ------------------------------------------------------------------

    async def _cut(self, instance: Instance, rng: random.Random) -> None:
        async with self._bad_way("link cut", instance, rng.uniform(0.2, 7)):
            await instance.way.cut()

    async def _reset(self, instance: Instance, rng: random.Random) -> None:
        async with self._bad_way("link reset", instance, rng.uniform(0, 2)):
            await instance.way.reset()

    async def _slow(self, instance: Instance, rng: random.Random) -> None:
        async with self._bad_way("link slow", instance, rng.uniform(2, 6)):
            await instance.way.slow_down(rng.uniform(0.05, 1.5))

    async def _black_hole(self, instance: Instance, rng: random.Random) -> None:
        async with self._bad_way("link swallows all", instance, rng.uniform(0.2, 7)):
            await instance.way.swallow(questions=True, answers=True)

    async def _deaf(self, instance: Instance, rng: random.Random) -> None:
        async with self._bad_way("link swallows answers", instance, rng.uniform(0.2, 7)):
            await instance.way.swallow(questions=False, answers=True)

    @asynccontextmanager
    async def _bad_way(self, kind: str, instance: Instance, seconds: float) -> AsyncIterator[None]:
        async with self.noted(kind, instance.who):
            yield
            await asyncio.sleep(seconds)
            await instance.way.mend()
            await self._serves(instance)
