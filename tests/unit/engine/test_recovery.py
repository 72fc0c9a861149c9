"""Claims, recovery after a commit of unknown outcome, and what becomes of shards that are lost or given away."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from engine_world import OK, URL, World
from msgspec.structs import replace

from duetime.cluster.placement import owners
from duetime.config import Duration
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult
from duetime.domain.timer import Created, NamespaceSpec, TimerKey, TimerSpec, shard_of
from duetime.engine.engine import Engine
from duetime.engine.shard import Shard
from duetime.errors import NotOwner, NotReady, OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Fence, Member, ShardRow
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing import make_reached, make_timer
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual

A = TimerKey("default", "a")
ONE_SECOND = Duration(1_000)
Hook = Callable[[], Awaitable[None]]


class HookedStore(FaultyStore):
    """Something happens right before a call reaches the database, or after it was applied and before its answer."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.database = store
        self.before: dict[str, deque[Hook]] = defaultdict(deque)
        self.after: dict[str, deque[Hook]] = defaultdict(deque)
        self.order: list[str] = []

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any) -> Any:
            self.order.append(name)
            if self.before[name]:
                await self.before[name].popleft()()
            answer = await inner(*args)
            if self.after[name]:
                await self.after[name].popleft()()
            return answer

        return call


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


def with_store(
    story: Callable[[World, HookedStore], Awaitable[None]],
    new_store: Callable[[VirtualClock], MemoryStore] = MemoryStore,
    **settings: Any,
) -> None:
    settings.setdefault("namespaces__default_num_shards", 1)

    async def told(clock: VirtualClock) -> None:
        store = HookedStore(new_store(clock))
        world = World(clock, store.as_store, **settings)
        await world.start()
        try:
            await story(world, store)
        finally:
            store.heal()
            store.before.clear()
            store.after.clear()
            await world.engine.stop()

    run_virtual(told)


async def row_of(store: HookedStore, shard_id: int = 0) -> ShardRow:
    return (await store.database.shards())[shard_id]


async def claim_for_another(store: HookedStore, shard_id: int = 0, owner_id: str = "another") -> ShardRow:
    """Another instance, which is alive, claims the shard."""
    if owner_id not in {member.instance_id for member in await store.database.members()}:
        await store.database.join(Member(owner_id, "elsewhere:1", 0, True, 0))
    row = await row_of(store, shard_id)
    [claimed] = await store.database.claim([Claim(shard_id, row.version, 4_711, owner_id, "elsewhere:1", 0)])
    assert claimed.nonce == 4_711
    return claimed


async def stored(store: HookedStore, key: TimerKey = A) -> str | None:
    """The payload that is stored under a key."""
    timer = (await store.database.get_many([(0, key)]))[0].timer
    return None if timer is None else timer.payload


def creating(world: World, payload: str = "1", delay_ms: int = 60_000) -> asyncio.Future[Created]:
    return asyncio.ensure_future(world.create("a", delay_ms, payload=payload))


# --- the loser of a re-claim ---------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_who_loses_the_claim_of_a_recovery_drops_the_shard_and_never_uses_the_winners_fence(fault: Fault) -> None:
    async def story(world: World, store: HookedStore) -> None:
        shard, claimed = world.engine.shards[0], store.hold("claim")
        own = shard.fence
        store.fail("commit", fault)
        first = creating(world, "1", 500)
        await asyncio.sleep(0.1)
        second = creating(world, "2", 500)
        await asyncio.sleep(0)
        assert shard.recovering
        winner = await claim_for_another(store)
        claimed.set()
        with pytest.raises(OutcomeUnknown):
            await first
        assert shard.dropped
        assert shard.fence == own, "the fence of the winner is the winner's"
        assert 0 not in world.engine.shards
        with pytest.raises(NotOwner):  # certainly not applied
            await second
        assert await row_of(store) == winner
        assert await stored(store) == (None if fault is Fault.LOST_THEN_UNKNOWN else "1")
        assert world.destinations.calls == []
        assert world.engine.writes_waiting == 0

    with_store(story)


def test_a_shard_that_is_lost_while_it_recovers_is_not_taken_up_again() -> None:
    """The claim was won, but before its timers are read the instance is declared dead."""

    async def story(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        reading = store.hold("get_many")
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        create = creating(world)
        await asyncio.sleep(0.1)
        recovering = world.engine.rows[0]
        world.engine._drop_all()
        with pytest.raises(OutcomeUnknown):
            await create
        reading.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert shard.dropped
        assert shard.recovering
        assert world.engine.rows[0] == recovering

    with_store(story)


def test_a_recovery_is_repeated_with_the_same_claim_and_ever_longer_pauses_until_it_gets_through() -> None:
    async def story(world: World, store: HookedStore) -> None:
        version = world.engine.shards[0].fence.version
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", Fault.APPLIED_THEN_UNKNOWN, *[Fault.UNAVAILABLE] * 8)
        calls = store.calls["claim"]
        create = creating(world)
        await asyncio.sleep(0.04)
        assert store.calls["claim"] == calls + 1
        await asyncio.sleep(0.06 + 0.1 + 0.2 + 0.4 + 0.8)
        assert store.calls["claim"] == calls + 6
        await asyncio.sleep(1.6 + 2.0 + 2.0)
        assert store.calls["claim"] == calls + 9, "at most two seconds between two tries"
        await asyncio.sleep(2.0)
        assert (await create).view.timer.payload == "1"
        assert world.engine.shards[0].fence.version == version + 1, "one claim, however often it was asked for"
        assert await stored(store) == "1"
        assert world.engine.telemetry.reclaims.value == 1

    with_store(story, engine__write_timeout="30s")


def test_a_recovery_reads_all_timers_of_a_large_commit_in_parts() -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        names = [f"t{number}" for number in range(600)]
        reads = store.calls["get_many"]
        created = await asyncio.gather(*(world.create(name, 1_000) for name in names))
        assert len(created) == 600
        assert store.calls["get_many"] == reads + 3
        assert store.calls["commit"] == 1, "everything was found: nothing is written again"
        await asyncio.sleep(3)
        assert sorted(world.destinations.called()) == sorted(names)

    with_store(story)


def test_after_a_recovery_the_map_shows_the_new_version() -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        await creating(world)
        assert world.engine.rows[0] == await row_of(store)
        assert world.engine.rows[0].fence == world.engine.shards[0].fence

    with_store(story)


# --- claims --------------------------------------------------------------------------------------


def test_a_claim_that_was_made_under_a_former_id_is_not_served() -> None:
    async def story(world: World, store: HookedStore) -> None:
        membership = world.engine.membership
        former = membership.instance_id
        await world.engine._release(list(world.engine.shards.values()))

        async def rejoin() -> None:
            membership.instance_id = "new"

        store.after["claim"].append(rejoin)
        await world.engine._claim([await row_of(store)])
        assert (await row_of(store)).owner_id == former
        assert world.engine.rows[0].owner_id == former
        assert world.engine.shards == {}
        membership.instance_id = former

    with_store(story)


def test_a_claim_that_another_has_won_is_not_served() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        free = await row_of(store)
        winner = await claim_for_another(store)
        await world.engine._claim([free])
        assert world.engine.shards == {}
        assert world.engine.rows[0] == winner

    with_store(story)


def test_nobody_steals_a_shard_from_the_living_and_it_is_claimed_once_they_are_dead() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        winner = await claim_for_another(store)
        world.engine.membership._is_eligible = lambda member: member.instance_id != "another"  # type: ignore[method-assign]
        for counter in range(1, 20):
            await asyncio.sleep(1)
            await store.database.heartbeat("another", counter)
            await world.engine.balance()
            assert await row_of(store) == winner
        assert world.engine.shards == {}
        await asyncio.sleep(6)
        assert (await row_of(store)).owner_id == world.engine.membership.instance_id
        assert 0 in world.engine.shards

    with_store(story)


def test_a_claim_whose_answer_was_lost_is_made_once_more() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        store.fail("claim", Fault.APPLIED_THEN_UNKNOWN)
        with pytest.raises(OutcomeUnknown):
            await world.engine.balance()
        assert (await row_of(store)).owner_id == world.engine.membership.instance_id
        assert world.engine.shards == {}
        await world.engine.balance()
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(story)


def test_an_owner_that_joins_between_the_two_readings_is_not_taken_for_dead() -> None:
    """Members are read after the shards: who owns a shard by its row has joined before."""

    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        world.engine.membership._is_eligible = lambda member: member.instance_id != "another"  # type: ignore[method-assign]
        claimed: list[ShardRow] = []

        async def another_joins() -> None:
            store.after.clear()
            claimed.append(await claim_for_another(store))

        store.after["shards"].append(another_joins)
        store.after["members"].append(another_joins)
        await world.engine.balance()
        assert claimed == [await row_of(store)]
        assert world.engine.shards == {}

    with_store(story)


def test_more_shards_than_fit_into_one_call_are_claimed_and_released_in_parts() -> None:
    async def story(world: World, store: HookedStore) -> None:
        assert sorted(world.engine.shards) == list(range(600))
        assert store.calls["claim"] == 3
        await world.engine._release(list(world.engine.shards.values()))
        assert store.calls["release"] == 3
        assert {row.owner_id for row in await store.database.shards()} == {None}

    with_store(story, namespaces__default_num_shards=600)


def test_while_it_stops_an_instance_claims_nothing() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        world.engine.stopping = True
        await world.engine.balance()
        assert world.engine.shards == {}
        assert (await row_of(store)).owner_id is None

    with_store(story)


def test_one_that_the_members_do_not_show_alive_claims_nothing() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        assert world.engine.membership.may_claim()
        await world.engine.balance()
        assert world.engine.shards == {}
        assert (await row_of(store)).owner_id is None

    with_store(story)


# --- loss learnt by reading ----------------------------------------------------------------------


def test_a_shard_that_another_has_by_its_row_is_dropped_and_its_commit_under_way_is_told_unknown() -> None:
    async def story(world: World, store: HookedStore) -> None:
        shard, committing = world.engine.shards[0], store.hold("commit")
        first = creating(world, "1")
        await asyncio.sleep(0.1)
        second = creating(world, "2")
        await asyncio.sleep(0.1)
        winner = await claim_for_another(store)
        await world.engine.balance()
        assert shard.dropped
        assert 0 not in world.engine.shards
        with pytest.raises(OutcomeUnknown):
            await first
        committing.set()
        with pytest.raises(NotOwner):
            await second
        assert await row_of(store) == winner
        assert world.engine.telemetry.shards_lost.value == 1

    with_store(story)


def test_a_reading_that_is_older_than_the_fence_proves_no_loss() -> None:
    """Not even if both happen within the same millisecond."""

    async def story(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        version = shard.fence.version

        async def recovered_meanwhile() -> None:
            world.engine._unknown(shard)
            while shard.recovering:
                await asyncio.sleep(0)

        store.after["shards"].append(recovered_meanwhile)
        began_ms = world.clock.boot_ms()
        await world.engine.balance()
        assert world.clock.boot_ms() == began_ms
        assert shard.fence.version == version + 1
        assert not shard.dropped
        assert world.engine.shards == {0: shard}
        assert world.engine.telemetry.shards_lost.value == 0

    with_store(story)


def test_a_shard_that_recovers_is_not_lost_because_its_new_claim_is_read_first() -> None:
    async def story(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        await asyncio.sleep(1)
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        store.fail("claim", Fault.APPLIED_THEN_UNKNOWN)
        create = creating(world)
        await asyncio.sleep(0.01)
        assert shard.recovering
        assert (await row_of(store)).fence != shard.fence
        await world.engine.balance()
        assert not shard.dropped
        assert (await create).view.timer.payload == "1"
        assert world.engine.telemetry.shards_lost.value == 0

    with_store(story)


def test_a_shard_that_the_database_has_forgotten_is_dropped_and_claimed_again() -> None:
    async def story(world: World, store: HookedStore) -> None:
        before = world.engine.shards[0]
        await asyncio.sleep(1)
        await store.database.release([before.fence])
        await store.database.claim([Claim(0, before.fence.version, 1, world.engine.membership.instance_id, "", 0)])
        await world.engine.balance()
        await world.engine.balance()
        assert before.dropped
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(story)


# --- what a commit under way is told -------------------------------------------------------------


def test_when_an_instance_is_declared_dead_its_commits_under_way_are_told_unknown() -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        with pytest.raises(OutcomeUnknown):
            await create
        assert world.engine.writes_waiting == 0
        store._held["commit"].set()

    with_store(story)


def test_a_commit_that_outlasts_the_drain_is_told_unknown() -> None:
    async def story(world: World, store: HookedStore) -> None:
        committing = store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        shard = world.engine.shards[0]
        await world.engine._release([shard])
        with pytest.raises(OutcomeUnknown):
            await create
        assert shard.dropped
        assert (await row_of(store)).owner_id is None
        committing.set()

    with_store(story, server__drain_timeout="2s")


def test_a_shard_found_lost_by_a_purge_is_dropped_and_its_commit_under_way_is_told_unknown() -> None:
    async def story(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        committing = store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        await claim_for_another(store)
        assert await world.engine._purge([shard], []) == []
        assert shard.dropped
        with pytest.raises(OutcomeUnknown):
            await create
        committing.set()

    with_store(story)


def test_a_purge_that_was_overtaken_by_a_recovery_does_not_take_the_shard_for_lost() -> None:
    async def story(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]

        async def recovered_meanwhile() -> None:
            world.engine._unknown(shard)
            while shard.recovering:
                await asyncio.sleep(0)

        store.before["purge_reached"].append(recovered_meanwhile)
        assert await world.engine._purge([shard], []) == []
        assert not shard.dropped
        assert (await row_of(store)).fence == shard.fence

    with_store(story)


def test_a_purge_during_a_recovery_does_not_take_the_shard_for_lost() -> None:
    """The new claim is made, and its owner is still reading what the old commit has left."""

    async def story(world: World, store: HookedStore) -> None:
        shard, reading = world.engine.shards[0], store.hold("get_many")
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        create = creating(world)
        await asyncio.sleep(0.1)
        assert shard.recovering
        assert (await row_of(store)).fence != shard.fence
        assert await world.engine._purge([shard], []) == []
        assert not shard.dropped
        reading.set()
        await create

    with_store(story)


# --- giving away ---------------------------------------------------------------------------------


class Pair:
    """Two instances on one store, each with its own line to it."""

    def __init__(self, clock: VirtualClock) -> None:
        self.database = MemoryStore(clock)
        self.lines: list[HookedStore] = []
        self.worlds: list[World] = []

    async def enter(self, offset_ms: int = 0, **settings: Any) -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        line = HookedStore(self.database)
        world = World(VirtualClock(loop, offset_ms), line.as_store, **settings)
        for _ in self.worlds:
            world.new_instance()  # another seed
        self.lines.append(line)
        self.worlds.append(world)
        await world.start()
        return world


def of_pair(story: Callable[[Pair], Awaitable[None]]) -> None:
    async def told(clock: VirtualClock) -> None:
        pair = Pair(clock)
        try:
            await story(pair)
        finally:
            for line in pair.lines:
                line.heal()
            for world in pair.worlds:
                await world.engine.stop()

    run_virtual(told)


async def is_served_once(pair: Pair) -> bool:
    """Every shard is served by the instance that its row names, and by no other."""
    rows = await pair.database.shards()
    return all(
        [world.engine.membership.instance_id for world in pair.worlds if row.shard_id in world.engine.shards]
        == [row.owner_id]
        for row in rows
    )


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_shards_whose_release_failed_are_released_at_the_next_look_and_find_their_new_owner(fault: Fault) -> None:
    async def story(pair: Pair) -> None:
        a = await pair.enter()
        b = await pair.enter()
        pair.lines[0].fail("release", fault)
        await asyncio.sleep(20)
        assert not pair.lines[0]._faults["release"], "no release was tried"
        assert b.engine.shards
        assert a.engine.shards
        assert await is_served_once(pair)

    of_pair(story)


def test_an_instance_whose_clock_is_off_keeps_a_shard_until_its_delivery_in_flight_has_ended() -> None:
    async def story(pair: Pair) -> None:
        a = await pair.enter()
        b = await pair.enter()
        await asyncio.sleep(10)
        in_flight = asyncio.Event()
        landed: list[int] = []

        async def slow(attempt: Attempt) -> AttemptResult:
            in_flight.set()
            await asyncio.sleep(4)
            landed.append(b.clock.boot_ms())
            return OK

        b.destinations.answers[URL] = slow
        name = next(f"t{n}" for n in range(1_000) if shard_of(f"t{n}", 16) in b.engine.shards)
        shard_id = shard_of(name, 16)
        await b.create(name, 500)
        await in_flight.wait()
        b.clock.offset_ms = 10_000
        while set(b.engine.shards) != {shard_id}:
            await asyncio.sleep(0.01)
        while not landed:
            assert (await pair.database.shards())[shard_id].owner_id == b.engine.membership.instance_id
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        assert len(a.engine.shards) == 16
        await asyncio.sleep(30)
        assert a.destinations.called() + b.destinations.called() == [name], "delivered twice"

    of_pair(story)


def test_a_move_to_a_newcomer_gives_each_shard_one_owner_and_fires_every_timer_once() -> None:
    async def story(pair: Pair) -> None:
        a = await pair.enter()
        names = [f"t{number}" for number in range(60)]
        await asyncio.gather(*(a.create(name, 15_000) for name in names))
        b = await pair.enter()
        await asyncio.sleep(3)
        assert not b.engine.shards, "not before it has been there for a while"
        await asyncio.sleep(7)
        assert len(b.engine.shards) == len(a.engine.shards) == 8
        assert await is_served_once(pair)
        await asyncio.sleep(20)
        assert sorted(a.destinations.called() + b.destinations.called()) == sorted(names)

    of_pair(story)


# --- joining again -------------------------------------------------------------------------------


def test_nothing_that_was_claimed_during_a_join_that_failed_outlives_its_id() -> None:
    async def story(world: World, store: HookedStore) -> None:
        membership, former = world.engine.membership, world.engine.membership.instance_id

        async def claims_and_fails() -> None:
            await world.engine.balance()
            assert world.engine.shards, "claimed under the id of a join that is about to fail"
            raise StoreUnavailable("in the middle of a join")

        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        while world.engine.shards:
            await asyncio.sleep(0.01)
        store.before["members"].append(claims_and_fails)
        await asyncio.sleep(3)
        assert not store.before["members"]
        assert membership.instance_id != former
        assert (await row_of(store)).owner_id == membership.instance_id
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(story)


def test_one_that_is_declared_dead_serves_nothing_until_it_has_joined_again() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.create("a", 3_000)
        joining = store.hold("join")
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(10)
        assert world.engine.shards == {}
        assert world.destinations.calls == []
        assert world.service.readiness() == "the lease has run out: the store does not answer heartbeats"
        joining.set()
        await asyncio.sleep(2)
        assert world.destinations.called() == ["a"]
        assert world.service.readiness() is None

    with_store(story)


def test_a_join_that_fails_is_tried_again_at_the_next_heartbeat() -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.fail("join", *[Fault.UNAVAILABLE] * 3)
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(1.4)
        assert store.calls["join"] >= 2
        await asyncio.sleep(3)
        assert world.engine.shards
        assert [member.alive for member in await store.database.members()].count(True) == 1

    with_store(story)


# --- stopping ------------------------------------------------------------------------------------


def test_a_stop_releases_every_shard_leaves_the_cluster_and_ends_all_tasks() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine.stop()
        assert {row.owner_id for row in await store.database.shards()} == {None}
        assert await store.database.members() == []
        assert world.engine.shards == {}
        assert world.engine._tasks == set()
        with pytest.raises(NotReady):
            await world.create("a")

    with_store(story, namespaces__default_num_shards=16)


def test_a_stop_before_the_start_signs_nobody_off() -> None:
    async def told(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        await world.engine.stop()
        assert store.calls["mark_dead"] == 0

    run_virtual(told)


def test_a_crash_leaves_everything_as_it_is() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.create("a", 1_000)
        world.engine.abandon()
        await asyncio.sleep(3)
        assert world.destinations.calls == []
        assert (await row_of(store)).owner_id == world.engine.membership.instance_id
        assert all(task.done() for task in world.engine._tasks)

    with_store(story)


def test_an_engine_that_has_stopped_claims_nothing_although_its_lease_still_runs() -> None:
    async def story(world: World, store: HookedStore) -> None:
        world.engine.abandon()
        world.engine._drop_all()
        await store.database.release([(await row_of(store)).fence])
        assert world.engine.membership.may_claim()
        await world.engine.balance()
        assert (await row_of(store)).owner_id is None
        assert world.engine.shards == {}

    with_store(story)


def test_a_shard_whose_claim_comes_through_while_the_instance_stops_fires_nothing() -> None:
    """Its deliveries would not be waited for, and its next owner would repeat them."""

    async def story(world: World, store: HookedStore) -> None:
        async def slow(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(5)
            return OK

        world.destinations.answers[URL] = slow
        first = next(f"t{n}" for n in range(100) if shard_of(f"t{n}", 2) == 0)
        second = next(f"t{n}" for n in range(100) if shard_of(f"t{n}", 2) == 1)
        await world.create(first, 100)
        await world.create(second, 2_000)
        await asyncio.sleep(0.5)
        claimed = store.hold("claim")
        await world.engine._release([world.engine.shards[1]])
        balancing = asyncio.ensure_future(world.engine.balance())
        await asyncio.sleep(0.5)
        stopping = asyncio.ensure_future(world.engine.stop())
        await asyncio.sleep(0.1)
        claimed.set()
        await balancing
        assert 1 in world.engine.shards
        await stopping
        assert world.destinations.called() == [first]

    with_store(story, namespaces__default_num_shards=2)


# --- starting ------------------------------------------------------------------------------------


def test_where_the_first_claims_fail_a_member_of_a_cluster_starts_and_claims_later() -> None:
    async def told(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        await world.start()
        assert world.engine.started
        assert world.engine.shards == {}
        await asyncio.sleep(2)
        assert len(world.engine.shards) == 16
        await world.engine.stop()

    run_virtual(told)


def test_where_the_first_claims_fail_and_nobody_else_can_serve_the_start_fails() -> None:
    async def told(clock: VirtualClock) -> None:
        store = HookedStore(ExclusiveStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        with pytest.raises(StoreUnavailable):
            await world.start()
        assert not world.engine.started
        await world.engine.stop()

    run_virtual(told)


def test_heartbeats_go_on_while_the_first_claims_take_longer_than_the_lease() -> None:
    async def told(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        claimed = store.hold("claim")
        starting = asyncio.ensure_future(world.start())
        await asyncio.sleep(20)
        assert not starting.done()
        assert world.engine.membership.may_fire()
        claimed.set()
        await starting
        await world.engine.stop()

    run_virtual(told)


# --- ready or not --------------------------------------------------------------------------------


def test_readiness_says_why_an_instance_does_not_serve() -> None:
    async def story(world: World, store: HookedStore) -> None:
        engine = world.engine
        assert engine.readiness() is None
        engine.started = False
        assert engine.readiness() == "starting"
        engine.started = True
        engine.stopping = True
        assert engine.readiness() == "stopping"
        engine.stopping = False
        engine.membership.skew_ms = -501
        assert engine.readiness() == "the clock is -501 ms off the database's"
        engine.membership.skew_ms = 0
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 100)
        await asyncio.sleep(4)
        assert engine.readiness() == "the lease has run out: injected"
        store.heal()
        await asyncio.sleep(1)
        assert engine.readiness() is None
        engine.failed.set()
        assert engine.readiness() == "ended by an internal error: the log says which; restart this instance"
        engine.failed.clear()

    with_store(story)


def test_in_a_cluster_an_instance_without_shards_is_ready() -> None:
    async def story(pair: Pair) -> None:
        await pair.enter()
        b = await pair.enter()
        assert not b.engine.shards
        assert b.engine.readiness() is None

    of_pair(story)


def test_where_nobody_else_can_serve_an_instance_is_ready_when_all_shards_are_claimed() -> None:
    async def story(world: World, store: HookedStore) -> None:
        assert world.engine.readiness() is None
        store.fail("claim", Fault.UNAVAILABLE)
        await world.service.namespaces.create(NamespaceSpec(name="wider", num_shards=4))
        assert world.engine.readiness() == "3 shards are not claimed yet"
        await asyncio.sleep(3)
        assert world.engine.readiness() is None

    with_store(story, ExclusiveStore)


# --- looking -------------------------------------------------------------------------------------


def test_shards_of_a_namespace_that_another_instance_made_are_claimed_within_seconds() -> None:
    async def story(world: World, store: HookedStore) -> None:
        [default] = await store.database.namespaces()
        await store.database.ensure_shards(8)
        await store.database.put_namespace(replace(default, name="wider", num_shards=8), None)
        await asyncio.sleep(2.5)
        assert len(world.engine.shards) == 8

    with_store(story)


def test_once_everything_is_in_its_place_the_shards_are_read_every_few_seconds_only() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await asyncio.sleep(20)
        before = store.calls["shards"]
        await asyncio.sleep(60)
        assert 9 <= store.calls["shards"] - before <= 12

    with_store(story)


def test_where_nobody_else_can_serve_the_shards_are_not_read_again() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await asyncio.sleep(5)
        before = dict(store.calls)
        await asyncio.sleep(60)
        assert store.calls["shards"] == before["shards"]
        assert store.calls["members"] == before["members"]
        assert store.calls["namespaces"] == before["namespaces"]

    with_store(story, ExclusiveStore)


def test_the_death_of_a_member_is_noticed_when_it_is_due_and_not_a_heartbeat_later() -> None:
    async def story(pair: Pair) -> None:
        a = await pair.enter(engine__heartbeat_interval="400ms")
        b = await pair.enter(engine__heartbeat_interval="400ms")
        await asyncio.sleep(10.3)
        beats = pair.lines[0].calls["heartbeat"]
        b.engine.abandon()
        while len(a.engine.shards) < 16:
            last_beat_ms = a.engine.membership._seen[b.engine.membership.instance_id][1]
            await asyncio.sleep(0.001)
        assert a.clock.boot_ms() - last_beat_ms <= 3_501 + 60
        assert pair.lines[0].calls["heartbeat"] - beats <= 12, "and until then no sooner than usual"

    of_pair(story)


# --- purging -------------------------------------------------------------------------------------


def test_every_shard_is_purged_once_a_minute_and_one_in_trouble_waits_for_the_next(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(world: World, store: HookedStore) -> None:
        purged: list[int] = []
        purge = world.engine._purge

        async def noting(shards: list[Shard], troubles: list[StoreError]) -> list[Shard]:
            purged.extend(shard.shard_id for shard in shards)
            return await purge(shards, troubles)

        world.engine._purge = noting  # type: ignore[method-assign]
        await asyncio.sleep(60.5)
        assert sorted(purged) == [0, 1, 2]
        store.fail("purge_reached", *[Fault.UNAVAILABLE] * 3)
        await asyncio.sleep(60)
        assert sorted(purged) == [0, 0, 1, 1, 2, 2], "an error is not repeated at once"
        assert "could not purge what is past its retention: injected" in caplog.text
        await asyncio.sleep(60)
        assert sorted(purged) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert "purging again" in caplog.text

    with caplog.at_level("INFO", "duetime"):
        with_store(story, namespaces__default_num_shards=3)


class OneShardInTrouble(MemoryStore):
    """A purge of several shards: one of them answers with an error of its own."""

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:  # type: ignore[override]
        results = await super().purge_reached(fences, before_ms, limit)
        return [
            StoreUnavailable("no quorum") if fence.shard_id == 0 else r
            for fence, r in zip(fences, results, strict=True)
        ]


def test_a_shard_whose_purge_fails_alone_is_reported_and_not_asked_again_at_once() -> None:
    async def story(world: World, store: HookedStore) -> None:
        troubles: list[StoreError] = []
        assert await world.engine._purge(list(world.engine.shards.values()), troubles) == []
        assert [str(trouble) for trouble in troubles] == ["no quorum"]
        assert len(world.engine.shards) == 2

    with_store(story, OneShardInTrouble, namespaces__default_num_shards=2)


def test_nothing_is_purged_before_its_time_and_everything_after_it_however_much_it_is() -> None:
    async def story(world: World, store: HookedStore) -> None:
        now_ms = world.clock.wall_ms()
        ends = [make_reached(make_timer(f"n-{n}"), purge_at_ms=now_ms + 100_000) for n in range(2_500)]
        await store.database.commit([Batch(world.engine.shards[0].fence, reached=ends)])
        await asyncio.sleep(95)
        assert len(list(store.database._shards[0].all_reached())) == 2_500
        await asyncio.sleep(70)
        assert list(store.database._shards[0].all_reached()) == []

    with_store(story)


def test_a_shard_that_recovers_is_not_purged_meanwhile() -> None:
    async def story(world: World, store: HookedStore) -> None:
        now_ms = world.clock.wall_ms()
        end = make_reached(make_timer(), purge_at_ms=now_ms + 1_000)
        await store.database.commit([Batch(world.engine.shards[0].fence, reached=[end])])
        world.engine.shards[0].recovering = True
        await asyncio.sleep(130)
        assert list(store.database._shards[0].all_reached()) == [end]
        world.engine.shards[0].recovering = False
        await asyncio.sleep(60)
        assert list(store.database._shards[0].all_reached()) == []

    with_store(story)


def test_a_spec_without_a_shard_waits_for_the_shard() -> None:
    """The claims come late: a create waits for them, and is neither lost nor made twice."""

    async def story(world: World, store: HookedStore) -> None:
        await world.engine._release(list(world.engine.shards.values()))
        claimed = store.hold("claim")
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=2_000, callback_url=URL)
        create = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(1)
        claimed.set()
        assert (await create).replaced is False
        await asyncio.sleep(5)
        assert world.destinations.called() == ["a"]

    with_store(story)


# --- what is said, and how often -----------------------------------------------------------------


def test_shards_that_are_lost_together_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, store: HookedStore) -> None:
        for shard_id in range(4):
            await claim_for_another(store, shard_id)
        await asyncio.sleep(0.01)
        await world.engine.balance()
        await asyncio.sleep(0)
        assert [r.getMessage() for r in caplog.records] == ["lost ownership of 4 shards"]
        await asyncio.sleep(10)  # the other one is dead by now, and the shards are claimed again
        caplog.clear()
        await claim_for_another(store, 2, "a third")
        await asyncio.sleep(0.01)
        await world.engine.balance()
        await asyncio.sleep(0)
        assert [r.getMessage() for r in caplog.records] == ["lost ownership of 1 shards"]

    with caplog.at_level("WARNING", "duetime"):
        with_store(story, namespaces__default_num_shards=4)


def test_a_drain_says_that_deliveries_may_be_repeated_only_if_they_may(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, store: HookedStore) -> None:
        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(3)
            return OK

        world.destinations.answers[URL] = hangs
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        await world.engine._release(list(world.engine.shards.values()))
        assert "drain timeout" not in caplog.text
        await asyncio.sleep(5)
        assert world.engine.shards
        world.engine._config = replace(world.config, server=replace(world.config.server, drain_timeout=ONE_SECOND))
        await world.engine._release(list(world.engine.shards.values()))
        assert "drain timeout" not in caplog.text
        await asyncio.sleep(5)
        await world.create("b", 100)
        await asyncio.sleep(0.5)
        await world.engine._release(list(world.engine.shards.values()))
        assert caplog.text.count("drain timeout") == 1

    with caplog.at_level("WARNING", "duetime"):
        with_store(story)


def test_a_recovery_that_fails_is_in_the_log_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", Fault.UNAVAILABLE)
        await creating(world)
        assert caplog.text.count("shards are not recovered yet: injected") == 1
        assert caplog.text.count("shards are recovered") == 1

    with caplog.at_level("INFO", "duetime"):
        with_store(story)


@pytest.mark.parametrize("call", ["members", "namespaces", "join"])
def test_what_keeps_an_instance_from_looking_at_the_cluster_is_in_the_log(
    call: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(world: World, store: HookedStore) -> None:
        store.fail(call, *[Fault.UNAVAILABLE] * 2)
        if call == "join":
            [me] = await store.database.members()
            await store.database.mark_dead(me.instance_id, me.counter)
        await asyncio.sleep(5)
        assert caplog.text.count("could not look at the cluster: injected") >= 1
        assert caplog.text.count("the cluster is in sight again") >= 1

    with caplog.at_level("INFO", "duetime"):
        with_store(story)


def test_a_start_whose_claims_fail_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def told(clock: VirtualClock) -> None:
        store = HookedStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        store.fail("claim", Fault.UNAVAILABLE)
        await world.start()
        assert caplog.text.count("could not look at the cluster: injected") == 1
        await world.engine.stop()

    with caplog.at_level("WARNING", "duetime"):
        run_virtual(told)


def test_a_second_internal_error_is_not_a_second_end(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, store: HookedStore) -> None:
        async def wrong() -> None:
            raise ZeroDivisionError("a bug")

        world.engine._spawn(wrong())
        world.engine._spawn(wrong())
        await asyncio.sleep(1)
        assert [record.levelname for record in caplog.records].count("CRITICAL") == 1
        assert store.calls["mark_dead"] == 1

    with caplog.at_level("WARNING"):
        with_store(story)


def test_a_stop_is_no_error_for_the_tasks_that_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    async def story(world: World, store: HookedStore) -> None:
        await world.engine.stop()
        await asyncio.sleep(0.1)
        assert caplog.records == []

    with caplog.at_level("WARNING"):
        with_store(story)


# --- one at a time -------------------------------------------------------------------------------


def test_a_look_that_hangs_is_not_begun_a_second_time() -> None:
    async def story(world: World, store: HookedStore) -> None:
        before = store.calls["members"]
        held = store.hold("members")
        await asyncio.sleep(20)
        assert store.calls["members"] - before <= 2, "one for the heartbeats, and one for the sweeps"
        assert world.engine.membership.may_fire(), "heartbeats do not wait for it"
        held.set()

    with_store(story)


def test_a_shard_that_was_dropped_is_not_claimed_by_its_recovery() -> None:
    async def story(world: World, store: HookedStore) -> None:
        world.engine.membership.wait_before_claims()  # nothing else claims
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 3)
        create = creating(world)
        await asyncio.sleep(0.01)
        before = await row_of(store)
        claims = store.calls["claim"]
        world.engine._drop_all()
        with pytest.raises(OutcomeUnknown):
            await create
        await asyncio.sleep(2)
        assert store.calls["claim"] == claims
        assert (await row_of(store)).version == before.version

    with_store(story)


def test_the_end_of_an_old_shard_leaves_the_one_that_was_claimed_after_it_alone() -> None:
    async def story(world: World, store: HookedStore) -> None:
        old = world.engine.shards[0]
        await world.engine._release([old])
        await world.engine.balance()
        new = world.engine.shards[0]
        assert new is not old
        world.engine._drop(old, NotOwner())
        assert world.engine.shards == {0: new}
        assert not new.dropped
        world.engine._drop(new, NotOwner())
        world.engine._drop(new, NotOwner())
        assert world.engine.shards == {}

    with_store(story)


def test_a_free_shard_is_left_to_the_member_that_should_have_it() -> None:
    async def story(pair: Pair) -> None:
        a = await pair.enter()
        b = await pair.enter()
        await asyncio.sleep(10)
        target = owners(16, a.engine.membership.eligible)
        shard_id = next(n for n, owner in enumerate(target) if owner == b.engine.membership.instance_id)
        pair.lines[1].hold("shards")  # b does not look
        await pair.database.release([b.engine.shards[shard_id].fence])
        await a.engine.balance()
        assert (await pair.database.shards())[shard_id].owner_id is None
        pair.lines[1]._held["shards"].set()
        await asyncio.sleep(10)
        assert (await pair.database.shards())[shard_id].owner_id == b.engine.membership.instance_id
        assert await is_served_once(pair)

    of_pair(story)


def test_where_nobody_else_can_serve_a_clock_that_is_off_releases_nothing() -> None:
    async def told(clock: VirtualClock) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        store = HookedStore(ExclusiveStore(clock))
        own_clock = VirtualClock(loop)
        world = World(own_clock, store.as_store)
        await world.start()
        own_clock.offset_ms = 10_000
        await asyncio.sleep(5)
        assert world.engine.membership.is_skewed
        assert len(world.engine.shards) == 16
        assert store.calls["release"] == 0
        await world.engine.stop()

    run_virtual(told)


def test_when_the_lease_is_renewed_what_has_become_due_fires_at_once() -> None:
    async def story(world: World, store: HookedStore) -> None:
        await asyncio.sleep(0.7)
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 9)
        await world.create("a", 4_000)
        while world.engine.membership.may_fire():
            await asyncio.sleep(0.001)
        while not world.engine.membership.may_fire():
            await asyncio.sleep(0.001)
        renewed_ms = world.clock.wall_ms()
        await asyncio.sleep(2)
        [(fired_at_ms, _, _)] = world.destinations.calls
        assert fired_at_ms <= renewed_ms, "it waits for no sweep"

    with_store(story)


# --- an engine that was just made ----------------------------------------------------------------


def test_before_the_start_an_engine_knows_no_shards_and_its_random_numbers_are_its_own() -> None:
    async def told(clock: VirtualClock) -> None:
        world = World(clock, MemoryStore(clock))
        assert world.engine.rows == {}
        assert world.engine.readiness() == "starting"

        def new_engine(rng: random.Random | None) -> Engine:
            return Engine(world.config, world.store, world.destinations, clock, Telemetry(), address="test:1", rng=rng)

        assert new_engine(random.Random(7)).new_id() == new_engine(random.Random(7)).new_id()
        assert new_engine(None).new_id() != new_engine(None).new_id()

    run_virtual(told)


def test_the_nonce_of_a_claim_fits_into_a_signed_integer_of_64_bits() -> None:
    async def story(world: World, store: HookedStore) -> None:
        nonces = {shard.fence.nonce for shard in world.engine.shards.values()}
        assert len(nonces) == 64
        assert max(nonces) < 2**63
        assert min(nonces) >= 0

    with_store(story, namespaces__default_num_shards=64)


# --- sweeps and accounts -------------------------------------------------------------------------


def test_once_a_second_everything_that_a_lost_wake_up_could_delay_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World, store: HookedStore) -> None:
        calls: Counter[str] = Counter()

        def count(thing: object, name: str) -> None:
            real = getattr(thing, name)

            def counted(*args: Any) -> Any:
                calls[name] += 1
                return real(*args)

            monkeypatch.setattr(thing, name, counted)

        engine = world.engine
        for thing, name in (
            (engine.fire_loop.flow, "measure"),
            (engine.fire_loop.flow, "resume"),
            (engine.horizon, "relieve"),
            (engine.fire_loop, "wake"),
            (engine.shards[0], "expire"),
        ):
            count(thing, name)
        await asyncio.sleep(10.2)
        assert (calls["measure"], calls["resume"], calls["relieve"], calls["expire"]) == (10, 10, 10, 10)
        assert calls["wake"] == 30, "and with both heartbeats of a second"
        assert (engine.telemetry.loop_lag_seconds.count, engine.telemetry.loop_lag_seconds.sum) == (10, 0.0)

    with_store(story)


def test_what_is_written_and_deleted_is_counted_in_memory_and_taken_out_of_the_heap() -> None:
    async def story(world: World, store: HookedStore) -> None:
        engine = world.engine
        await asyncio.sleep(2)
        for number in range(3):
            await world.create(f"t{number}", 20_000)
        assert (engine.horizon.weight, len(engine.fire_loop.armed_tickets())) == (3, 3)
        await world.create("t0", 25_000)
        assert (engine.horizon.weight, len(engine.fire_loop.armed_tickets())) == (3, 3)
        for number in range(3):
            await world.service.delete(TimerKey("default", f"t{number}"))
        assert (engine.horizon.weight, len(engine.fire_loop.armed_tickets())) == (0, 0)

    with_store(story)


def test_a_reading_that_was_overtaken_by_a_write_is_made_again() -> None:
    async def story(world: World, store: HookedStore) -> None:
        async def meanwhile() -> None:
            await world.create("a", 20_000, payload="2")

        await asyncio.sleep(2)
        store.after["get_many"].append(meanwhile)
        found = await world.service._commands._find(world.engine.shards[0], A)
        assert found.timer is not None
        assert found.timer.payload == "2"

    with_store(story)
