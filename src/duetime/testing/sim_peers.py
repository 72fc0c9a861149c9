"""Requests between the instances of the simulated cluster."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from duetime.errors import DuetimeError, NotOwner, OutcomeUnknown
from duetime.peers import Forward, OrderAnswer, Peer
from duetime.standing import InstanceStatus

if TYPE_CHECKING:
    from duetime.testing.sim import Instance, World

__all__ = ["SimPeers"]


class SimPeers:
    """Forwards between instances: slow, lost on the way there or back, and delivered twice."""

    def __init__(self, world: World, instance: Instance) -> None:
        self._world = world
        self._instance = instance

    async def forward(self, peer: Peer, forward: Forward) -> OrderAnswer:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(rng.uniform(0.0001, 0.003))
        target = world.instances.get(peer.address)
        if target is None or target.service.as_peer() != peer:
            raise NotOwner("nobody there, or somebody else")
        dice = rng.random() if world.stormy else 1.0
        if dice < world.scenario.lost_forwards:
            world.fault("forward lost")
            await asyncio.sleep(1)
            raise OutcomeUnknown("no answer")
        if rng.random() < world.scenario.repeated_forwards and world.stormy:
            world.fault("forward repeated")
            world.outside(self._again(target, forward))
        answer = target.inside(target.take(forward))
        done, _ = await asyncio.wait({answer}, timeout=12)
        if not done or dice < world.scenario.lost_forwards * 2:
            world.fault("answer to a forward lost")
            raise OutcomeUnknown("no answer")
        return answer.result()

    async def status(self, peer: Peer) -> InstanceStatus:
        return self._world.instances[peer.address].service.instance_status()

    async def close(self) -> None: ...

    async def _again(self, target: Instance, forward: Forward) -> None:
        await asyncio.sleep(self._world.rng.uniform(0.0, 6.0))
        if target.name in self._world.instances:
            target.inside(_quietly(lambda: target.take(forward)))


async def _quietly(call: Callable[[], Awaitable[Any]]) -> None:
    with contextlib.suppress(DuetimeError):
        await call()
