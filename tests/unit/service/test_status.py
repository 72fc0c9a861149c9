"""The status of a cluster: as all live members report it, from any member; and an answer that stays small."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from engine_world import OK, URL, World

from duetime.api.encode import encode_cluster_status
from duetime.cluster.forwarding import CommandAnswer, Forward, Peer
from duetime.delivery import Attempt
from duetime.domain.flow_shares import FlowAllowance, FlowReport
from duetime.domain.flow_status import FlowQuery, FlowStatus
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.status import BrokerStatus, ClusterStatus, InstanceStatus, MemberStatus
from duetime.errors import Unserved
from duetime.service.service import Service
from duetime.store import Member
from duetime.stores.memory import MemoryStore
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual


class Wires:
    """Peers that reach each other directly, but for what the test does to the way there."""

    def __init__(self) -> None:
        self.services: dict[str, Service] = {}
        self.instead: dict[str, Callable[[], Awaitable[InstanceStatus]]] = {}

    async def forward(self, peer: Peer, forward: Forward) -> CommandAnswer:
        return await self.services[peer.address].forwarded.receive(forward)

    async def flow_allowances(self, peer: Peer, reports: list[FlowReport]) -> list[FlowAllowance]:
        raise Unserved("not part of these tests")

    async def status(self, peer: Peer) -> InstanceStatus:
        if peer.address in self.instead:
            return await self.instead[peer.address]()
        assert peer == self.services[peer.address].as_peer()
        return self.services[peer.address].instance_status()

    async def flows(self, peer: Peer, query: FlowQuery) -> list[FlowStatus]:
        return self.services[peer.address].flows.own(query)

    async def close(self) -> None: ...


class Cluster:
    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.store = MemoryStore(clock)
        self.wires = Wires()
        self.worlds: dict[str, World] = {}

    async def join(self, name: str, offset_ms: int = 0) -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        world = World(VirtualClock(loop, offset_ms), self.store)
        for _ in self.worlds:
            world.new_instance()  # each by another seed
        world.engine.membership.address = name
        world.service = Service(world.config, world.engine, world.store, world.destinations, self.wires)
        self.wires.services[name] = world.service
        self.worlds[name] = world
        await world.start()
        return world

    async def ask(self, name: str = "a") -> ClusterStatus:
        return await self.worlds[name].service.cluster_status()


def in_cluster(names: str, scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run(clock: VirtualClock) -> None:
        cluster = Cluster(clock)
        for name in names:
            await cluster.join(name)
        await asyncio.sleep(10)  # shards find their owners
        try:
            await scenario(cluster)
        finally:
            for world in cluster.worlds.values():
                await world.engine.stop()

    run_virtual(run)


def at(status: ClusterStatus, address: str) -> MemberStatus:
    return next(member for member in status.members if member.address == address)


def own_words(status: ClusterStatus, address: str) -> InstanceStatus:
    words = at(status, address).status
    assert words is not None
    return words


async def refused() -> InstanceStatus:
    raise Unserved("connection refused by b")


async def silence() -> InstanceStatus:
    await asyncio.sleep(3_600)
    raise AssertionError


def test_every_member_reports_the_status_of_all() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in "abc":
            status = await cluster.ask(name)
            assert [member.address for member in status.members] == ["a", "b", "c"]
            assert [member.self_ for member in status.members] == [other == name for other in "abc"]
            for member in status.members:
                engine = cluster.worlds[member.address].engine
                words = own_words(status, member.address)
                assert words.instance_id == member.instance_id == engine.membership.instance_id
                assert member.shards == words.shards == len(engine.shards) > 0
                assert words.ready
                assert 0 < words.lease_ms <= 3_000
            assert status.shard_counts.owned == status.shard_counts.total == 16
            assert (status.unowned_shards, status.shards) == ((), None)

    in_cluster("abc", scenario)


def test_figures_are_those_of_all_members_together_or_at_their_worst() -> None:
    async def scenario(cluster: Cluster) -> None:
        a = cluster.worlds["a"]

        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(100)
            return OK

        for world in cluster.worlds.values():
            world.destinations.answers[URL] = hangs
        await asyncio.gather(*(a.create(f"t{n}", 10_000) for n in range(300)))
        assert (await cluster.ask()).in_memory == 300
        await asyncio.sleep(40)
        status = await cluster.ask()
        each = [own_words(status, name) for name in "ab"]
        assert all(words.in_flight and words.held for words in each)
        assert status.in_flight == sum(words.in_flight for words in each)
        assert status.held == sum(words.held for words in each)
        assert status.in_flight + status.held == 300
        assert status.oldest_due_ms == max(words.oldest_due_ms or 0 for words in each) == 30_000
        assert status.lateness_p99_ms == max(words.lateness_p99_ms or 0 for words in each)
        (place,) = own_words(status, "b").held_for
        assert (place.destination, place.held, place.breaker_open) == (URL, each[1].held, False)

    in_cluster("ab", scenario)


def test_a_destination_whose_breaker_is_open_is_named() -> None:
    async def scenario(cluster: Cluster) -> None:
        a = cluster.worlds["a"]

        async def broken(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.BROKEN, error="connection refused")

        a.destinations.answers[URL] = broken
        await asyncio.gather(*(a.create(f"t{n}", 1_000) for n in range(300)))
        await asyncio.sleep(1.5)
        (place,) = own_words(await cluster.ask(), "a").held_for
        assert place.breaker_open
        assert place.failures >= a.config.delivery.breaker_failures
        assert place.held > 100

    in_cluster("a", scenario)


def test_a_member_that_cannot_be_asked_is_shown_with_the_reason() -> None:
    async def scenario(cluster: Cluster) -> None:
        cluster.wires.instead["b"] = refused
        status = await cluster.ask()
        member = at(status, "b")
        assert (member.alive, member.status, member.unreachable) == (True, None, "connection refused by b")
        assert member.shards == len(cluster.worlds["b"].engine.shards)
        assert at(status, "c").unreachable is None

    in_cluster("abc", scenario)


def test_each_member_reports_its_brokers() -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = (cluster.worlds[name].service for name in "ab")
        b.brokers = lambda: [BrokerStatus(name="nats", connected=False, away_reason="refused", consuming=False)]
        assert own_words(await cluster.ask("a"), "b").brokers == (*b.brokers(),)
        assert own_words(await cluster.ask("b"), "b").brokers == (*b.brokers(),)
        assert own_words(await cluster.ask("b"), "a").brokers == (*a.brokers(),) == ()

    in_cluster("ab", scenario)


def test_members_are_asked_at_the_same_time_and_not_for_long() -> None:
    async def scenario(cluster: Cluster) -> None:
        for name in "bcd":
            cluster.wires.instead[name] = silence
        started_ms = cluster.clock.boot_ms()
        status = await cluster.ask()
        assert cluster.clock.boot_ms() - started_ms < 1_500
        assert [member.unreachable is None for member in status.members] == [True, False, False, False]

    in_cluster("abcd", scenario)


def test_a_member_of_another_version_whose_answer_cannot_be_decoded_is_shown_as_unreachable() -> None:
    async def scenario(cluster: Cluster) -> None:
        async def other_words() -> InstanceStatus:
            return msgspec.msgpack.decode(msgspec.msgpack.encode({"v": 9}), type=InstanceStatus)

        cluster.wires.instead["b"] = other_words
        assert "cannot be decoded" in (at(await cluster.ask(), "b").unreachable or "")

    in_cluster("ab", scenario)


def test_the_dead_stay_visible_and_their_shards_are_counted_until_others_have_them() -> None:
    async def scenario(cluster: Cluster) -> None:
        engine = cluster.worlds["b"].engine
        shards = len(engine.shards)
        engine.abandon()
        (row,) = [m for m in await cluster.store.members() if m.instance_id == engine.membership.instance_id]
        assert await cluster.store.mark_dead(row.instance_id, row.counter)
        status = await cluster.ask()
        assert [(member.address, member.alive) for member in status.members] == [("a", True), ("b", False)]
        assert at(status, "b").unreachable is None
        assert (status.shard_counts.of_dead, status.shard_counts.free) == (shards, 0)
        assert len(status.unowned_shards) == shards
        await asyncio.sleep(5)
        status = await cluster.ask()
        assert not at(status, "b").alive
        assert (status.shard_counts.owned, status.unowned_shards) == (16, ())

    in_cluster("ab", scenario)


def test_of_a_crash_loop_the_last_dead_are_shown() -> None:
    async def scenario(cluster: Cluster) -> None:
        for n in range(150):
            await cluster.store.join(Member(f"dead-{n}", f"host-{n}", 0, True, n))
            await cluster.store.mark_dead(f"dead-{n}", 0)
        status = await cluster.ask()
        assert len(status.members) == 101
        assert status.members[0].self_
        assert status.members[1].instance_id == "dead-149"

    in_cluster("a", scenario)


def test_a_skewed_member_is_the_worst_clock_and_says_why_it_is_not_ready() -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.join("late", offset_ms=-900)
        await asyncio.sleep(2)
        status = await cluster.ask()
        words = own_words(status, "late")
        assert (words.ready, words.shards, words.clock_skew_ms) == (False, 0, -900)
        assert "-900 ms off" in (words.reason or "")
        assert status.clock_skew_ms == -900
        assert status.clock_skew_max_ms == 500
        assert status.ready  # who was asked

    in_cluster("a", scenario)


def test_the_answer_stays_small_however_many_shards_there_are() -> None:
    async def scenario(cluster: Cluster) -> None:
        await asyncio.sleep(0.25)  # between two looks of the engine, which would claim them
        await cluster.store.ensure_shards(16_384)
        world = cluster.worlds["a"]
        status = await world.service.cluster_status()
        assert status.shard_counts.free == 16_384 - 16
        assert status.unowned_shards == tuple(range(16, 116))
        assert len(encode_cluster_status(status, with_held_for=True)) < 4_000
        detailed = await world.service.cluster_status(with_shards=True)
        assert [shard.shard_id for shard in detailed.shards or ()] == list(range(16_384))

    in_cluster("a", scenario)


def test_shards_are_counted_by_whether_they_are_owned_free_or_of_the_dead() -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = cluster.worlds["a"].engine, cluster.worlds["b"].engine
        of_b = len(b.shards)
        b.abandon()
        (row,) = [m for m in await cluster.store.members() if m.instance_id == b.membership.instance_id]
        assert await cluster.store.mark_dead(row.instance_id, row.counter)
        free = list(a.shards.values())[:2]
        await cluster.store.release([shard.fence for shard in free])
        counts = (await cluster.ask()).shard_counts
        assert (counts.total, counts.owned, counts.free, counts.of_dead) == (16, 14 - of_b, 2, of_b)

    in_cluster("ab", scenario)


def test_each_shard_is_shown_with_its_memory_and_horizon_where_it_is_owned() -> None:
    async def scenario(cluster: Cluster) -> None:
        a = cluster.worlds["a"]
        await a.create("t0", 20_000)
        service = a.service
        assert (await service.cluster_status()).shards is None
        shards = (await service.cluster_status(with_shards=True)).shards
        assert shards is not None
        assert len(shards) == 16
        own = [shard for shard in shards if shard.shard_id in a.engine.shards]
        assert 0 < len(own) < 16
        for shard in own:
            assert shard.in_memory == len(a.engine.shards[shard.shard_id].entries)
            assert shard.horizon_ms == a.engine.shards[shard.shard_id].horizon.execute_at_ms > a.clock.wall_ms()
        others = [shard for shard in shards if shard.shard_id not in a.engine.shards]
        assert {(shard.in_memory, shard.horizon_ms) for shard in others} == {(None, None)}

    in_cluster("ab", scenario)


def test_lateness_and_age_of_the_cluster_are_those_of_its_worst_member() -> None:
    async def scenario(cluster: Cluster) -> None:
        a, b = cluster.worlds["a"].engine, cluster.worlds["b"].engine
        for _ in range(10):
            a.telemetry.lateness.observe(0.001)
            b.telemetry.lateness.observe(1.0)
        status = await cluster.ask()
        quick, slow = own_words(status, "a"), own_words(status, "b")
        p50 = b.telemetry.lateness.quantile(0.5)
        assert p50 is not None
        assert slow.lateness_p50_ms == slow.lateness_p99_ms == p50 * 1_000 >= 1_000
        assert quick.lateness_p50_ms is not None
        assert quick.lateness_p50_ms < 1_000
        assert (status.lateness_p50_ms, status.lateness_p99_ms) == (slow.lateness_p50_ms, slow.lateness_p99_ms)

    in_cluster("ab", scenario)


def test_only_destinations_that_timers_wait_for_are_named() -> None:
    async def scenario(cluster: Cluster) -> None:
        a = cluster.worlds["a"]
        assert own_words(await cluster.ask(), "a").held_for == ()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(100)
            return OK

        a.destinations.answers[URL] = hangs
        a.destinations.answers["http://idle.test/"] = hangs
        await a.create("idle", 500, callback_url="http://idle.test/")
        await asyncio.gather(*(a.create(f"t{n}", 500) for n in range(300)))
        await asyncio.sleep(2)
        assert [place.destination for place in own_words(await cluster.ask(), "a").held_for] == [URL]

    in_cluster("a", scenario)
