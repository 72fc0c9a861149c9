"""Claims, recovery after a commit of unknown outcome, and shards that are lost or released."""

from __future__ import annotations

import asyncio

import pytest
from engine_world import OK, URL, World, in_world, on_one_shard
from hooked_store import (
    HookedStore,
    Pair,
    claim_for_another,
    creating,
    is_served_once,
    of_pair,
    row_of,
    stored,
    with_store,
)
from msgspec.structs import replace
from two_instances import Wires, of_two

from duetime.cluster.placement import owners
from duetime.config import Duration
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    State,
    TimerKey,
    TimerSpec,
    Verdict,
    shard_of,
)
from duetime.errors import NotOwner, OutcomeUnknown
from duetime.store import Claim, ShardRow
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

ONE_SECOND = Duration(1_000)


# --- recovery -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_an_instance_that_loses_the_claim_of_a_recovery_drops_the_shard_and_never_uses_the_winners_fence(
    fault: Fault,
) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
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
        assert shard.fence == own, "the fence of the winner is not used"
        assert 0 not in world.engine.shards
        with pytest.raises(NotOwner):  # certainly not applied
            await second
        assert await row_of(store) == winner
        assert await stored(store) == (None if fault is Fault.LOST_THEN_UNKNOWN else "1")
        assert world.destinations.calls == []
        assert world.engine.counters.writes_waiting == 0

    with_store(scenario)


def test_a_shard_that_is_lost_while_it_recovers_is_not_served_again() -> None:
    """The claim was won, but before its timers are read the instance is declared dead."""

    async def scenario(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        reading = store.hold("get_many")
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        create = creating(world)
        await asyncio.sleep(0.1)
        recovering = world.engine.rows[0]
        world.engine.ownership.drop_all()
        with pytest.raises(OutcomeUnknown):
            await create
        reading.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert shard.dropped
        assert shard.recovering
        assert world.engine.rows[0] == recovering

    with_store(scenario)


def test_a_recovery_is_repeated_with_the_same_claim_and_longer_pauses_until_it_succeeds() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
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

    with_store(scenario, engine__write_timeout="30s")


def test_a_recovery_reads_all_timers_of_a_large_commit_in_parts() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        names = [f"t{number}" for number in range(600)]
        reads = store.calls["get_many"]
        created = await asyncio.gather(*(world.create(name, 1_000) for name in names))
        assert len(created) == 600
        assert store.calls["get_many"] == reads + 3
        assert store.calls["commit"] == 1, "everything was found: nothing is written again"
        await asyncio.sleep(3)
        assert sorted(world.destinations.called()) == sorted(names)

    with_store(scenario)


def test_after_a_recovery_the_rows_show_the_new_version() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        await creating(world)
        assert world.engine.rows[0] == await row_of(store)
        assert world.engine.rows[0].fence == world.engine.shards[0].fence

    with_store(scenario)


def test_a_shard_that_was_dropped_is_not_claimed_by_its_recovery() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        world.engine.membership.wait_before_claims()  # nothing else claims
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 3)
        create = creating(world)
        await asyncio.sleep(0.01)
        before = await row_of(store)
        claims = store.calls["claim"]
        world.engine.ownership.drop_all()
        with pytest.raises(OutcomeUnknown):
            await create
        await asyncio.sleep(2)
        assert store.calls["claim"] == claims
        assert (await row_of(store)).version == before.version

    with_store(scenario)


def test_a_recovery_that_fails_is_logged_and_so_is_its_success(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", Fault.UNAVAILABLE)
        await creating(world)
        assert caplog.text.count("cannot recover shards, trying again: injected") == 1
        assert caplog.text.count("shards are recovered") == 1

    with caplog.at_level("INFO", "duetime"):
        with_store(scenario)


# --- claims ---------------------------------------------------------------------------------------


def test_a_claim_that_was_made_under_a_former_id_is_not_served() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        membership = world.engine.membership
        former = membership.instance_id
        await world.engine.ownership.release(list(world.engine.shards.values()))

        async def rejoin() -> None:
            membership.instance_id = "new"

        store.after["claim"].append(rejoin)
        await world.engine.ownership._claim([await row_of(store)])
        assert (await row_of(store)).owner_id == former
        assert world.engine.rows[0].owner_id == former
        assert world.engine.shards == {}
        membership.instance_id = former

    with_store(scenario)


def test_an_instance_that_joined_again_during_a_claim_claims_with_its_next_heartbeat() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        membership = world.engine.membership
        former = membership.instance_id
        await world.engine.ownership.release(list(world.engine.shards.values()))

        has_joined = asyncio.Event()

        async def dies_and_joins_again() -> None:
            await store.database.mark_dead(former, membership._counter)
            while membership.instance_id == former or not membership.may_fire():
                await asyncio.sleep(0.1)
            has_joined.set()

        store.before["claim"].append(dies_and_joins_again)
        world.engine.ownership.is_balanced = False  # the next heartbeat claims
        await has_joined.wait()
        await asyncio.sleep(1.1)
        assert (await row_of(store)).owner_id == membership.instance_id
        assert list(world.engine.shards) == [0]

    with_store(scenario)


def test_a_claim_that_another_instance_has_won_is_not_served() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
        free = await row_of(store)
        winner = await claim_for_another(store)
        await world.engine.ownership._claim([free])
        assert world.engine.shards == {}
        assert world.engine.rows[0] == winner

    with_store(scenario)


def test_a_shard_of_a_live_member_is_not_claimed_before_that_member_is_dead() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
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

    with_store(scenario)


def test_a_claim_whose_answer_was_lost_is_made_once_more() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
        store.fail("claim", Fault.APPLIED_THEN_UNKNOWN)
        with pytest.raises(OutcomeUnknown):
            await world.engine.balance()
        assert (await row_of(store)).owner_id == world.engine.membership.instance_id
        assert world.engine.shards == {}
        await world.engine.balance()
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(scenario)


def test_an_owner_that_joins_between_the_reads_of_shards_and_members_is_not_considered_dead() -> None:
    """Members are read after the shards: the owner that a row names has joined before that."""

    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
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

    with_store(scenario)


def test_more_shards_than_fit_into_one_call_are_claimed_and_released_in_parts() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        assert sorted(world.engine.shards) == list(range(600))
        assert store.calls["claim"] == 3
        await world.engine.ownership.release(list(world.engine.shards.values()))
        assert store.calls["release"] == 3
        assert {row.owner_id for row in await store.database.shards()} == {None}

    with_store(scenario, namespaces__default_num_shards=600)


def test_an_instance_that_is_stopping_claims_nothing() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
        world.engine.stopping = True
        await world.engine.balance()
        assert world.engine.shards == {}
        assert (await row_of(store)).owner_id is None

    with_store(scenario)


def test_an_instance_that_is_not_among_the_live_members_claims_nothing() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        await world.engine.ownership.release(list(world.engine.shards.values()))
        [me] = await store.database.members()
        await store.database.mark_dead(me.instance_id, me.counter)
        assert world.engine.membership.may_claim()
        await world.engine.balance()
        assert world.engine.shards == {}
        assert (await row_of(store)).owner_id is None

    with_store(scenario)


def test_a_free_shard_is_left_to_the_member_that_should_own_it() -> None:
    async def scenario(pair: Pair) -> None:
        a = await pair.enter()
        b = await pair.enter()
        await asyncio.sleep(10)
        target = owners(16, a.engine.membership.eligible)
        shard_id = next(n for n, owner in enumerate(target) if owner == b.engine.membership.instance_id)
        pair.stores[1].hold("shards")  # b does not balance
        await pair.database.release([b.engine.shards[shard_id].fence])
        await a.engine.balance()
        assert (await pair.database.shards())[shard_id].owner_id is None
        pair.stores[1]._held["shards"].set()
        await asyncio.sleep(10)
        assert (await pair.database.shards())[shard_id].owner_id == b.engine.membership.instance_id
        assert await is_served_once(pair)

    of_pair(scenario)


def test_the_nonce_of_a_claim_fits_into_a_signed_integer_of_64_bits() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        nonces = {shard.fence.nonce for shard in world.engine.shards.values()}
        assert len(nonces) == 64
        assert max(nonces) < 2**63
        assert min(nonces) >= 0

    with_store(scenario, namespaces__default_num_shards=64)


# --- shards that are lost -------------------------------------------------------------------------


def test_a_shard_whose_row_names_another_owner_is_dropped_and_its_commit_in_flight_is_answered_unknown() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
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

    with_store(scenario)


def test_a_read_that_began_before_the_fence_was_learnt_proves_no_loss() -> None:
    """Not even if both happen within the same millisecond."""

    async def scenario(world: World, store: HookedStore) -> None:
        shard = world.engine.shards[0]
        version = shard.fence.version

        async def recovered_meanwhile() -> None:
            world.engine.ownership.recover(shard)
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

    with_store(scenario)


def test_a_recovering_shard_is_not_lost_if_a_balance_reads_its_new_claim_first() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
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

    with_store(scenario)


def test_a_shard_whose_claim_the_database_has_lost_is_dropped_and_claimed_again() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        before = world.engine.shards[0]
        await asyncio.sleep(1)
        await store.database.release([before.fence])
        await store.database.claim([Claim(0, before.fence.version, 1, world.engine.membership.instance_id, "", 0)])
        await world.engine.balance()
        assert before.dropped
        await asyncio.sleep(0.6)  # the next heartbeat claims it
        assert world.engine.shards[0].fence == (await row_of(store)).fence

    with_store(scenario)


def test_shards_that_are_lost_together_are_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
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
        with_store(scenario, namespaces__default_num_shards=4)


def test_dropping_an_old_shard_does_not_drop_the_one_that_was_claimed_after_it() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        old = world.engine.shards[0]
        await world.engine.ownership.release([old])
        await world.engine.balance()
        new = world.engine.shards[0]
        assert new is not old
        world.engine.ownership.drop(old, NotOwner())
        assert world.engine.shards == {0: new}
        assert not new.dropped
        world.engine.ownership.drop(new, NotOwner())
        world.engine.ownership.drop(new, NotOwner())
        assert world.engine.shards == {}

    with_store(scenario)


# --- releases -------------------------------------------------------------------------------------


def test_a_commit_in_flight_at_the_drain_timeout_is_answered_unknown() -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        committing = store.hold("commit")
        create = creating(world)
        await asyncio.sleep(0.1)
        shard = world.engine.shards[0]
        await world.engine.ownership.release([shard])
        with pytest.raises(OutcomeUnknown):
            await create
        assert shard.dropped
        assert (await row_of(store)).owner_id is None
        committing.set()

    with_store(scenario, server__drain_timeout="2s")


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_shards_whose_release_failed_are_released_with_the_next_balance_and_claimed_by_their_new_owner(
    fault: Fault,
) -> None:
    async def scenario(pair: Pair) -> None:
        a = await pair.enter()
        b = await pair.enter()
        pair.stores[0].fail("release", fault)
        await asyncio.sleep(20)
        assert not pair.stores[0]._faults["release"], "no release was tried"
        assert b.engine.shards
        assert a.engine.shards
        assert await is_served_once(pair)

    of_pair(scenario)


def test_an_instance_whose_clock_is_off_keeps_a_shard_until_its_delivery_in_flight_has_ended() -> None:
    async def scenario(pair: Pair) -> None:
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

    of_pair(scenario)


def test_a_move_to_a_new_instance_gives_each_shard_one_owner_and_fires_every_timer_once() -> None:
    async def scenario(pair: Pair) -> None:
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

    of_pair(scenario)


def test_a_drain_logs_that_deliveries_may_be_repeated_only_if_they_may(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: World, store: HookedStore) -> None:
        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(3)
            return OK

        world.destinations.answers[URL] = hangs
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        await world.engine.ownership.release(list(world.engine.shards.values()))
        assert "drain timeout" not in caplog.text
        await asyncio.sleep(5)
        assert world.engine.shards
        world.engine.ownership._config = replace(
            world.config, server=replace(world.config.server, drain_timeout=ONE_SECOND)
        )
        await world.engine.ownership.release(list(world.engine.shards.values()))
        assert "drain timeout" not in caplog.text
        await asyncio.sleep(5)
        await world.create("b", 100)
        await asyncio.sleep(0.5)
        await world.engine.ownership.release(list(world.engine.shards.values()))
        assert caplog.text.count("drain timeout") == 1

    with caplog.at_level("WARNING", "duetime"):
        with_store(scenario)


# --- drain -------------------------------------------------------------------------------------


def test_a_shard_that_moves_starts_no_queued_delivery_and_repeats_none() -> None:
    """With a backlog the move would otherwise last the whole drain timeout, and repeat what is in flight then."""

    async def scenario(world: World) -> None:
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
        await world.engine.ownership.release(list(world.engine.shards.values()))
        assert world.clock.boot_ms() - began_ms < 1_000, "no longer than what was in flight"
        assert world.destinations.called() == started, "a draining shard has started a delivery"
        await asyncio.sleep(60)  # claimed again: it is the only instance
        assert sorted(world.destinations.called()) == sorted(names), "lost, or delivered twice"

    in_world(scenario, delivery__concurrency_per_flow=8)


def test_a_shard_that_waits_for_a_delivery_in_flight_still_accepts_writes() -> None:
    async def scenario(world: World) -> None:
        answered = asyncio.Event()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return OK

        world.destinations.answers["http://hangs.test/"] = hangs
        await world.create("hangs", 100, callback_url="http://hangs.test/")
        await asyncio.sleep(0.5)
        shard = world.engine.shards[0]
        release = asyncio.ensure_future(world.engine.ownership.release([shard]))
        await asyncio.sleep(1)
        assert shard.draining
        assert not shard.dropped
        assert (await world.create("written", 0)).replaced is False
        await asyncio.sleep(1)
        assert world.destinations.called() == ["hangs"], "the next owner fires it"
        answered.set()
        await release
        assert shard.dropped
        await asyncio.sleep(10)  # claimed again: it is the only instance
        assert world.destinations.called() == ["hangs", "written"]

    in_world(scenario, namespaces__default_num_shards=1)


def test_at_the_drain_timeout_a_shard_is_released_with_deliveries_in_flight() -> None:
    async def scenario(world: World) -> None:
        async def hangs(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(3_600)
            return OK

        world.destinations.answers[URL] = hangs
        await world.create("hangs", 100)
        await asyncio.sleep(0.5)
        shard = world.engine.shards[0]
        began_ms = world.clock.boot_ms()
        await world.engine.ownership.release([shard])
        assert 10_000 <= world.clock.boot_ms() - began_ms <= 10_100
        assert shard.dropped

    in_world(scenario, namespaces__default_num_shards=1, server__drain_timeout="10s")


def test_a_connection_that_is_opened_while_its_shard_drains_sends_nothing() -> None:
    async def scenario(world: World) -> None:
        connected = asyncio.Event()

        async def connecting(attempt: Attempt) -> None:
            await connected.wait()

        world.destinations.before_begin = connecting
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        release = asyncio.ensure_future(world.engine.ownership.release([world.engine.shards[0]]))
        await asyncio.sleep(0)
        connected.set()
        await release
        assert world.destinations.calls == []
        await asyncio.sleep(10)
        assert world.destinations.called() == ["a"], "its next owner sends it"

    in_world(scenario, namespaces__default_num_shards=1)


def test_a_repeat_on_a_fresh_connection_goes_on_while_its_shard_drains() -> None:
    """It is in flight already: the receiver may have it."""

    async def scenario(world: World) -> None:
        again: list[int | None] = []

        async def answer(attempt: Attempt) -> AttemptResult:
            await asyncio.sleep(1)
            again.append(attempt.begin())
            return OK

        world.destinations.answers[URL] = answer
        await world.create("a", 100)
        await asyncio.sleep(0.5)
        await world.engine.ownership.release([world.engine.shards[0]])
        assert again[0] is not None
        assert (await world.get("a")).reached is not None

    in_world(scenario, namespaces__default_num_shards=1)


async def _scheduled(world: World, name: str) -> bool:
    found = await world.store.get_many([(shard_of(name, 1), TimerKey("default", name))])
    return found[0].timer is not None


def test_writes_accepted_while_a_shard_drains_are_on_disk_before_it_is_released() -> None:
    async def scenario(world: World) -> None:
        shard = world.engine.shards[0]
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=60_000, callback_url=URL)
        writing = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(0)
        await world.engine.ownership.release([shard])
        await writing
        assert await _scheduled(world, "a")

    in_world(scenario, namespaces__default_num_shards=1)


def test_a_timer_whose_connect_fails_during_a_recovery_still_fires() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        refused = asyncio.Event()

        async def connect(attempt: Attempt) -> AttemptResult:
            if attempt.timer.timer_id == "x" and not refused.is_set():
                await asyncio.sleep(1)
                refused.set()
                return AttemptResult(Contact.BROKEN, error="connection refused")
            return await deliver(attempt)

        deliver = world.destinations.deliver
        world.destinations.deliver = connect  # type: ignore[method-assign]
        world.engine.fire_loop._deliverer = world.destinations
        await world.create("x", 1_000)
        await asyncio.sleep(1.5)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 4)
        other = asyncio.ensure_future(world.create("other", 3_600_000))
        await refused.wait()
        assert world.engine.shards[0].recovering
        await asyncio.sleep(60)
        await other
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_timer_that_became_due_twice_during_a_recovery_does_not_fire_after_its_delete() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        due_ms = world.clock.wall_ms() + 1_000
        fields = {"namespace": "default", "timer_id": "x", "execute_at_ms": due_ms, "callback_url": URL}
        await world.service.create(TimerSpec(**fields))  # type: ignore[arg-type]
        await asyncio.sleep(0.9)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 9)
        store.fail("heartbeat", *[Fault.UNAVAILABLE] * 20)
        other = asyncio.ensure_future(world.create("other", 3_600_000))
        await asyncio.sleep(0.5)
        await world.service.create(TimerSpec(**fields, if_absent=True))  # type: ignore[arg-type]
        shard = world.engine.shards[0]
        while shard.recovering:
            await asyncio.sleep(0.01)
        await other
        assert await world.service.delete(TimerKey("default", "x")) is Verdict.CANCELLED
        before = len(world.destinations.calls)
        await asyncio.sleep(60)
        assert world.destinations.calls[before:] == []
        assert (world.engine.counters.writes_waiting, world.engine.counters.unsettled) == (0, 0)

    on_one_shard(scenario)


def test_shards_that_could_not_be_claimed_at_the_start_are_claimed_later() -> None:
    class Exclusive(MemoryStore):
        capabilities = type(MemoryStore.capabilities)(
            name="memory", batch_max=100, payload_bytes_max=1_000, parallel_commits=1, exclusive=True, durable=False
        )

    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(Exclusive(clock))
        store.fail("heartbeat", Fault.UNAVAILABLE)
        world = World(clock, store.as_store)
        await world.start()
        assert world.service.readiness() is not None
        await asyncio.sleep(5)
        assert world.service.readiness() is None
        await world.create("x", 1_000)
        await asyncio.sleep(2)
        assert (await world.get("x")).state is State.DELIVERED
        await world.engine.stop()

    run_virtual(run)


def test_a_release_that_failed_while_the_clock_was_off_is_repeated() -> None:
    """The instance is alive, so no other member may claim the shards that it owns but does not serve."""

    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(b.store)
        b.engine.ownership._store = faulty.as_store
        faulty.fail("release", *[Fault.UNAVAILABLE] * 3)
        b.engine.membership.skew_ms = 10_000
        b.engine.membership._measure_clock = lambda *_: None  # type: ignore[method-assign]
        await asyncio.sleep(10)
        assert faulty.calls["release"] > 1
        assert not b.engine.shards
        assert len(a.engine.shards) == 16

    of_two(scenario)


def test_a_balance_that_failed_is_repeated_with_the_next_heartbeat() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(a.store)
        a.engine.ownership._store = faulty.as_store
        b.engine.abandon()
        faulty.fail("claim", Fault.UNAVAILABLE)
        await asyncio.sleep(5.5)
        assert len(a.engine.shards) == 16
        assert faulty.calls["claim"] > 1

    of_two(scenario)


def test_case_25_an_instance_that_dies_again_and_again_takes_nothing_from_those_that_stay() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        stays = World(clock, store)
        await stays.start()
        for number in range(5):
            comes = World(clock, store)
            comes.starts = 100 + number
            comes.new_instance()
            await comes.start()
            await asyncio.sleep(2)
            comes.engine.abandon()
            assert len(stays.engine.shards) == 16
            await asyncio.sleep(1)
        await stays.engine.stop()

    run_virtual(run)
