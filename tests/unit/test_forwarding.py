"""Two instances on one store: a wish goes to the owner of its shard, in one hop, and happens once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_world import URL, World

from duetime.errors import Conflict, DuetimeError, NotFound, NotOwner
from duetime.model import NamespaceSpec, State, TimerKey, TimerSpec, Verdict, shard_of
from duetime.peers import CreateOrder, Forward, OrderAnswer, Peer
from duetime.service import Service
from duetime.standing import InstanceStatus
from duetime.store import Claim
from duetime.stores.memory import MemoryStore
from duetime.testing.virtual import VirtualClock, run_virtual


class Wires:
    """Peers that reach each other directly; every forward is kept."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.sent: list[tuple[str, Forward]] = []

    async def forward(self, peer: Peer, forward: Forward) -> OrderAnswer:
        self.sent.append((peer.address, forward))
        return await self.services[peer.address].take(forward)

    async def status(self, peer: Peer) -> InstanceStatus:
        return self.services[peer.address].instance_status()

    async def close(self) -> None: ...


def of_two(story: Callable[[World, World, Wires], Awaitable[None]]) -> None:
    async def told(clock: VirtualClock) -> None:
        wires, store = Wires(), MemoryStore(clock)
        worlds: list[World] = []
        for name in ("a", "b"):
            world = World(clock, store)
            if worlds:
                world.new_instance()  # another seed than the first one's
            world.engine.membership.address = name
            world.service = Service(world.config, world.engine, world.store, world.destinations, wires)
            wires.services[name] = world.service
            await world.start()
            worlds.append(world)
        await asyncio.sleep(10)  # a newcomer gets its share when it has been there for a while
        try:
            await story(worlds[0], worlds[1], wires)
        finally:
            for world in worlds:
                await world.engine.stop()

    run_virtual(told)


def owned_by(world: World) -> str:
    """An id whose shard that instance owns."""
    return next(f"t{n}" for n in range(1_000) if shard_of(f"t{n}", 16) in world.engine.shards)


def test_both_own_some_and_each_takes_wishes_about_all() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        assert len(a.engine.shards) + len(b.engine.shards) == 16
        assert a.engine.shards
        assert b.engine.shards
        ids = [f"t{n}" for n in range(40)]
        await asyncio.gather(*(a.create(timer_id, 1_000) for timer_id in ids))
        assert wires.sent
        assert await a.service.delete(TimerKey("default", owned_by(b))) is Verdict.CANCELLED
        await asyncio.sleep(5)
        assert sorted(a.destinations.called() + b.destinations.called()) == sorted(set(ids) - {owned_by(b)})

    of_two(story)


@pytest.mark.parametrize("many", [False, True])
def test_a_create_whose_shard_is_lost_before_its_commit_is_made_at_the_new_owner(many: bool) -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard_id = shard_of(timer_id, 16)
        of_b = b.engine.membership
        # b has taken the shard, and a does not know yet: it admits the create, and its commit is refused.
        [row] = await a.store.claim(
            [Claim(shard_id, a.engine.shards[shard_id].fence.version, 77, of_b.instance_id, "b", 0)]
        )
        assert row.nonce == 77
        spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=60_000, callback_url=URL)
        made = asyncio.ensure_future(a.service.create_many([spec]) if many else a.service.create(spec))
        await asyncio.sleep(0)
        assert shard_id in a.engine.shards, "admitted here"
        await made
        assert (await b.get(timer_id)).state is State.SCHEDULED

    of_two(story)


def test_the_map_says_who_owns_what_and_forwards_are_counted() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        found = a.service.shard_map()
        assert sorted(found.addresses) == ["a", "b"]
        assert found.num_shards == {"default": 16}
        for world, address in ((a, "a"), (b, "b")):
            index = found.addresses.index(address)
            assert found.instance_ids[index] == world.engine.membership.instance_id
            assert {i for i, owner in enumerate(found.owners) if owner == index} == set(world.engine.shards)
        await a.create(owned_by(a), 60_000)
        assert a.engine.telemetry.forwards.by_label == {}
        await a.create(owned_by(b), 60_000)
        assert a.engine.telemetry.forwards.by_label == {"ok": 1}
        assert b.engine.telemetry.forwards.by_label == {}

    of_two(story)


def test_a_member_that_is_gone_owns_nothing_on_the_map() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        of_b = set(b.engine.shards)
        del a.engine.membership.alive[b.engine.membership.instance_id]
        found = a.service.shard_map()
        assert found.addresses == ("a",)
        assert {i for i, owner in enumerate(found.owners) if owner is None} == of_b

    of_two(story)


def test_case_26_a_forward_goes_one_hop_and_is_refused_rather_than_passed_on() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=1_000, callback_url=URL)
        misled = Forward("id", shard_of(timer_id, 16), 1, CreateOrder(spec))
        with pytest.raises(NotOwner) as refused:
            await a.service.take(misled)
        assert (refused.value.status, refused.value.retry_after_seconds) == (503, 1)
        assert wires.sent == []

    of_two(story)


def test_case_27_a_forward_to_an_ex_owner_is_refused_and_sent_once_more_to_the_new_one() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        b.engine._unknown(b.engine.shards[shard_id])  # it claims again: another version
        await asyncio.sleep(0.5)
        stale = a.engine.rows[shard_id]
        a.engine.rows[shard_id] = type(stale)(shard_id, stale.version - 1, 1, stale.owner_id, stale.owner_address)
        await a.create(timer_id, 1_000)
        versions = [forward.version for _, forward in wires.sent]
        assert len(versions) == 2
        assert versions[1] == b.engine.shards[shard_id].fence.version
        await asyncio.sleep(5)
        assert b.destinations.called() == [timer_id]

    of_two(story)


def test_a_forward_that_arrives_twice_is_carried_out_once() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        await a.create(timer_id, 60_000)
        _, forward = wires.sent[-1]
        assert await b.service.delete(TimerKey("default", timer_id)) is Verdict.CANCELLED
        await b.service.take(forward)
        await asyncio.sleep(120)
        assert a.destinations.calls + b.destinations.calls == []

    of_two(story)


def test_an_error_of_the_owner_comes_back_to_who_asked() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        with pytest.raises(DuetimeError, match="There is no timer"):
            await a.service.delete(TimerKey("default", owned_by(b)))

    of_two(story)


def test_a_namespace_that_another_instance_still_fills_is_not_deleted() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        await a.service.create_namespace(NamespaceSpec(name="n", num_shards=16))
        await b.service.get_namespace("n")
        deleting = asyncio.ensure_future(a.service.delete_namespace("n"))
        while not (known := a.engine.namespaces.known("n")) or not known.deleted:
            await asyncio.sleep(0)
        # The word has not got round: the other instance takes a create about a shard of its own.
        await b.service.create(TimerSpec(namespace="n", timer_id=owned_by(b), delay_ms=60_000, callback_url=URL))
        with pytest.raises(Conflict, match="still has scheduled timers"):
            await deleting
        await asyncio.sleep(5)
        assert (await b.service.get(TimerKey("n", owned_by(b)))).state is State.SCHEDULED
        await b.service.delete(TimerKey("n", owned_by(b)))
        await a.service.delete_namespace("n")
        with pytest.raises(NotFound):
            await b.service.get_namespace("n")

    of_two(story)


def test_a_new_namespace_is_known_to_the_others_at_once() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        with pytest.raises(NotFound):
            await b.service.get_namespace("n")
        await a.service.create_namespace(NamespaceSpec(name="n", num_shards=16))
        await b.service.create(TimerSpec(namespace="n", timer_id="t", delay_ms=1_000, callback_url=URL))
        await asyncio.sleep(5)
        assert a.destinations.called() + b.destinations.called() == ["t"]

    of_two(story)


def test_wishes_about_the_shards_of_an_instance_that_leaves_wait_for_the_next_owner() -> None:
    async def story(a: World, b: World, wires: Wires) -> None:
        ids = [f"t{n}" for n in range(60)]
        leaving = asyncio.ensure_future(b.engine.stop())
        await asyncio.gather(*(a.create(timer_id, 1_000) for timer_id in ids))
        await leaving
        await asyncio.sleep(5)
        assert sorted(a.destinations.called() + b.destinations.called()) == sorted(ids)

    of_two(story)
