"""The operator of the simulated cluster: changes limits and pauses of flows and namespaces while they are used, and
lists flows. Without faults a pause holds on all instances within `_HOLDS_WITHIN_S`."""

from __future__ import annotations

import random
from asyncio import sleep
from typing import TYPE_CHECKING, Final

from duetime.domain.flow_status import FlowFilter
from duetime.service.service import Service
from duetime.testing.checker import Result, Violation
from duetime.testing.simulation.clients import SHARED_FLOW, Call, SimClient

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import SimulatedCluster

__all__ = ["OperatorClient"]

# `LimitWatch` does not count the calls of these: their limits change all the time.
_FLOWS: Final = ("http://ok", "http://slow", "http://flapping", "http://busy", SHARED_FLOW)
_HELD: Final = "http://ok"
_HOLDS_WITHIN_S: Final = 2.0
_MEMORY_MIN: Final = 200


class OperatorClient:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._client = SimClient(cluster, "operator")
        self._rng = random.Random(cluster.seed)

    async def work(self) -> None:
        """Change something every now and then. When the faults are over, all that was paused or limited is free."""
        while self._cluster.faults_on:
            await sleep(self._rng.expovariate(0.5))
            await self._client._send(self._some_change())
        await self._free_all()

    def _some_change(self) -> Call:
        rng, key = self._rng, self._rng.choice(_FLOWS)
        rate, concurrency = rng.choice((None, 5.0, 50.0)), rng.choice((None, 1, 4))
        changes: list[Call] = [
            lambda service: service.flows.update("default", key, rate, concurrency),
            lambda service: service.flows.pause("default", key),
            lambda service: service.flows.resume("default", key),
            lambda service: service.flows.get("default", key),
            _list_all,
            lambda service: service.namespaces.pause("default"),
            lambda service: service.namespaces.resume("default"),
            lambda service: service.namespaces.resume("default"),
        ]
        return rng.choice(changes)

    async def _free_all(self) -> None:
        calls: list[Call] = [lambda service: service.namespaces.resume("default")]
        calls += [_freeing(key) for key in _FLOWS]
        for call in calls:
            await self._until_done(call)

    async def _until_done(self, call: Call) -> None:
        for _ in range(100):
            result, _ = await self._client._send(call)
            if result is Result.OK:
                return
            await sleep(0.5)
        raise AssertionError("an operator's request was refused for a minute")

    async def pause_and_resume(self) -> None:
        """Without faults: no call of a paused flow or namespace starts, and after it is resumed all of them do."""
        if self._cluster.config.engine.timers_in_memory_max < _MEMORY_MIN:
            return  # one held timer may be more than fits: then it is parked, and fires up to a minute later
        pauses: list[tuple[Call, Call]] = [
            (
                lambda service: service.flows.pause("default", _HELD),
                lambda service: service.flows.resume("default", _HELD),
            ),
            (lambda service: service.namespaces.pause("default"), lambda service: service.namespaces.resume("default")),
        ]
        for number, (pause, resume) in enumerate(pauses):
            await self._until_done(pause)
            await sleep(_HOLDS_WITHIN_S)
            before = self._called()
            await self._client.put(f"held-{number}", _HELD, 500)
            await sleep(2)
            if self._called() > before:
                self._violated(number, "was called although its flow or its namespace is paused")
            await self._until_done(resume)
            await sleep(_HOLDS_WITHIN_S + 1)
            if self._called() == before:
                self._violated(number, "was not called after its flow or its namespace was resumed")

    def _called(self) -> int:
        return sum(call.timer.startswith("held-") for call in self._cluster.callbacks)

    def _violated(self, number: int, what: str) -> None:
        self._cluster.violations.append(Violation("S", f"held-{number}", what, ""))


async def _list_all(service: Service) -> object:
    """Page by page."""
    page = await service.flows.list_page(FlowFilter(namespace="default", limit=2))
    while page.next_cursor is not None:
        page = await service.flows.list_page(FlowFilter(namespace="default", limit=2, cursor=page.next_cursor))
    return page


def _freeing(key: str) -> Call:
    """Its limits are cleared, and it is resumed."""

    async def free(service: Service) -> object:
        await service.flows.update("default", key, None, None)
        return await service.flows.resume("default", key)

    return free
