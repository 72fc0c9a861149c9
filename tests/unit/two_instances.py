"""Two instances on one store, which forward commands to each other directly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine_world import World

from duetime.cluster.forwarding import CommandAnswer, Forward, Peer
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowStatus
from duetime.domain.status import InstanceStatus
from duetime.domain.timer import shard_of
from duetime.errors import DuetimeError
from duetime.service.service import Service
from duetime.stores.memory import MemoryStore
from duetime.testing.virtual import VirtualClock, run_virtual


class Wires:
    """Peers that call each other directly; every forward is recorded."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.sent: list[tuple[str, Forward]] = []
        self.failure: Callable[[], DuetimeError] | None = None  # raised instead of forwarding
        self.deaf: set[str] = set()  # addresses that do not answer when they are asked for flows
        self.flow_failure: Callable[[], DuetimeError] | None = None  # raised instead of answering reports of flows
        self.reported: list[tuple[str, list[FlowReport]]] = []

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        self.sent.append((peer.address, forward))
        if self.failure is not None:
            raise self.failure()
        return await self.services[peer.address].forwarded.receive(forward)

    async def status(self, peer: Peer) -> InstanceStatus:
        return self.services[peer.address].instance_status()

    async def flows(self, peer: Peer, query: FlowQuery) -> list[FlowStatus]:
        if peer.address in self.deaf:
            await asyncio.sleep(3_600)
        return self.services[peer.address].flows.own(query)

    async def flow_allowances(self, peer: Peer, reports: list[FlowReport]) -> list[FlowAllowance]:
        self.reported.append((peer.address, reports))
        if self.flow_failure is not None:
            raise self.flow_failure()
        [sender] = [service.as_peer() for address, service in self.services.items() if address != peer.address]
        return self.services[peer.address].flow_allowances(sender.instance_id, len(self.reported), reports)

    async def close(self) -> None: ...


def of_two(scenario: Callable[[World, World, Wires], Awaitable[None]]) -> None:
    async def run(clock: VirtualClock) -> None:
        wires, store = Wires(), MemoryStore(clock)
        worlds: list[World] = []
        for name in ("a", "b"):
            world = World(clock, store)
            if worlds:
                world.new_instance()  # with another seed than the first
            world.engine.membership.address = name
            world.service = Service(world.config, world.engine, world.store, world.destinations, wires)
            wires.services[name] = world.service
            await world.start()
            worlds.append(world)
        await asyncio.sleep(10)  # a new instance gets its share of the shards after some seconds
        try:
            await scenario(worlds[0], worlds[1], wires)
        finally:
            for world in worlds:
                await world.engine.stop()

    run_virtual(run)


def owned_by(world: World) -> str:
    """An id whose shard that instance owns."""
    return next(f"t{n}" for n in range(1_000) if shard_of(f"t{n}", 16) in world.engine.shards)
