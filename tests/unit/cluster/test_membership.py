"""Membership on the memory store in virtual time: leases, dead members, clocks, and which members may own shards."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from duetime.cluster.membership import EARLY_MAX_MS, Membership
from duetime.config import load_config
from duetime.errors import MemberDead, StoreUnavailable
from duetime.store import Member
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual

LEASE_MS = 3_000
DEAD_AFTER_MS = 3_500


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


class Cluster:
    """One database with a clock of its own, and members whose connections to it can fail or be slow."""

    def __init__(self, clock: VirtualClock, store: MemoryStore | None = None) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self.clock = clock  # the database's
        self.store = store or MemoryStore(clock)
        self._seed = 0

    def member(self, offset_ms: int = 0) -> SimMember:
        self._seed += 1
        return SimMember(self, VirtualClock(self.loop, offset_ms), self._seed)


class SimMember(Membership):
    """A Membership with its own connection to the database and its own clock."""

    def __init__(self, cluster: Cluster, clock: VirtualClock, seed: int) -> None:
        self.connection = SlowStore(cluster.store)
        self.clock = clock
        self.telemetry = Telemetry()
        config = load_config(environ={}).engine
        super().__init__(
            self.connection.as_store, clock, config, self.telemetry, random.Random(seed), address=f"host-{seed}:8463"
        )


class SlowStore(FaultyStore):
    """Every call takes `lag` seconds to the database and `lag_back` seconds back."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.lag = self.lag_back = 0.0

    def __getattr__(self, name: str) -> Any:
        inner = super().__getattr__(name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(self.lag)
            answer = await inner(*args, **kwargs)
            await asyncio.sleep(self.lag_back)
            return answer

        return call


def with_cluster(scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def run(clock: VirtualClock) -> None:
        await scenario(Cluster(clock))

    run_virtual(run)


async def row_of(cluster: Cluster, member: Membership) -> Member:
    return next(row for row in await cluster.store.members() if row.instance_id == member.instance_id)


async def passing(seconds: float, *living: Membership, observer: Membership | None = None) -> None:
    """Let time pass with heartbeats of these members, and observations by `observer`, every half second."""
    for _ in range(round(seconds / 0.5)):
        await asyncio.sleep(0.5)
        for member in living:
            await member.send_heartbeat()
        if observer is not None:
            await observer.observe()


class TestLease:
    def test_before_the_first_join_nothing_may_be_fired(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            assert not a.may_fire()
            assert a.lease_ms == 0

        with_cluster(scenario)

    def test_joining_starts_the_lease(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            assert a.may_fire()
            assert a.lease_ms == LEASE_MS
            assert list(a.alive) == [a.instance_id]

        with_cluster(scenario)

    def test_the_lease_counts_from_the_start_of_the_heartbeat(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.lag = a.connection.lag_back = 1.0
            await a.send_heartbeat()
            assert a.lease_ms == LEASE_MS - 2_000

        with_cluster(scenario)

    def test_an_answer_that_took_longer_than_the_lease_extends_nothing(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.lag_back = 4.0
            await a.send_heartbeat()
            assert not a.may_fire()

        with_cluster(scenario)

    def test_without_answers_the_lease_ends_to_the_millisecond(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            await asyncio.sleep(2.999)
            assert a.may_fire()
            await asyncio.sleep(0.001)
            assert not a.may_fire()
            assert a.lease_ms == 0

        with_cluster(scenario)

    @pytest.mark.parametrize(
        "fault", [Fault.UNAVAILABLE, Fault.THROTTLED, Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN]
    )
    def test_a_heartbeat_that_failed_does_not_extend_it_and_the_next_one_does(self, fault: Fault) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.fail("heartbeat", fault)
            await asyncio.sleep(2)
            await a.send_heartbeat()
            assert a.lease_ms == 1_000
            await a.send_heartbeat()
            assert a.lease_ms == LEASE_MS
            assert a.telemetry.heartbeats.by_label == {"ok": 2, "failed": 1}

        with_cluster(scenario)

    def test_leaving_ends_the_lease_and_the_other_members_see_it_at_once(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await a.leave()
            assert not a.may_fire()
            assert await b.observe()
            assert list(b.alive) == [b.instance_id]

        with_cluster(scenario)

    @pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.APPLIED_THEN_UNKNOWN])
    def test_leaving_succeeds_even_after_a_heartbeat_that_failed(self, fault: Fault) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.fail("heartbeat", fault)
            await a.send_heartbeat()
            await a.leave()
            assert await cluster.store.members() == [], "its row is removed"

        with_cluster(scenario)

    def test_leaving_while_the_database_is_unavailable_is_no_error(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.fail("mark_dead", Fault.UNAVAILABLE)
            await a.leave()
            assert not a.may_fire()

        with_cluster(scenario)


class TestDeath:
    def test_a_member_whose_counter_does_not_change_is_marked_dead(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, b, observer=b)
            assert a.instance_id in b.alive  # not longer than dead_after yet
            await passing(0.5, b, observer=b)
            assert list(b.alive) == [b.instance_id]
            assert not (await row_of(cluster, a)).alive

        with_cluster(scenario)

    def test_a_member_that_sends_heartbeats_is_not_marked_dead_however_often_it_is_observed(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(600, a, b, observer=b)
            assert set(b.alive) == {a.instance_id, b.instance_id}

        with_cluster(scenario)

    def test_when_a_member_is_marked_dead_its_lease_has_ended(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(5, a, b, observer=b)
            while a.instance_id in b.alive:
                await asyncio.sleep(0.01)
                await b.send_heartbeat()
                await b.observe()
            assert not a.may_fire()

        with_cluster(scenario)

    def test_a_slow_read_of_the_members_does_not_make_a_live_member_look_dead(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await b.join()
            await a.join()
            # The request takes three seconds to the database: it was sent long ago, but what it reads is new.
            b.connection.lag = 3.05
            reading = asyncio.create_task(b.observe())
            await passing(3.0, a)
            await reading
            b.connection.lag = 0.0
            await asyncio.sleep(0.6)
            assert a.may_fire()
            await b.observe()
            assert (await row_of(cluster, a)).alive

        with_cluster(scenario)

    def test_after_an_outage_of_the_database_the_first_observer_marks_no_live_member_dead(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(2, a, b, observer=b)
            await asyncio.sleep(60)  # the database is unavailable
            await b.send_heartbeat()
            await b.observe()
            assert (await row_of(cluster, a)).alive
            await passing(4, b, observer=b)  # and now it does stand still
            assert list(b.alive) == [b.instance_id]

        with_cluster(scenario)

    def test_death_is_measured_by_the_observers_boot_clock_and_never_by_wall_time(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            b.clock.offset_ms = 86_400_000
            await b.observe()
            assert a.instance_id in b.alive

        with_cluster(scenario)

    def test_a_member_is_marked_dead_only_if_its_counter_has_not_changed(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, observer=b)
            held = b.connection.hold("mark_dead")
            await asyncio.sleep(0.5)
            observing = asyncio.create_task(b.observe())
            await asyncio.sleep(0.1)
            await a.send_heartbeat()  # it comes in just before the mark
            assert b.connection.calls["mark_dead"] == 1
            held.set()
            await observing
            assert a.instance_id in b.alive
            assert (await row_of(cluster, a)).alive
            assert a.may_fire()

        with_cluster(scenario)

    def test_a_mark_of_unknown_outcome_is_checked_again(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, observer=b)
            b.connection.fail("mark_dead", Fault.APPLIED_THEN_UNKNOWN)
            await asyncio.sleep(0.5)
            await b.observe()
            await b.observe()
            assert list(b.alive) == [b.instance_id]

        with_cluster(scenario)

    def test_a_dead_member_never_becomes_alive_again(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(4, b, observer=b)
            with pytest.raises(MemberDead):
                await a.send_heartbeat()
            with pytest.raises(MemberDead):
                await a.send_heartbeat()
            assert not a.may_fire()
            assert not (await row_of(cluster, a)).alive
            assert a.telemetry.heartbeats.by_label["dead"] == 2

        with_cluster(scenario)

    def test_joining_again_uses_a_new_id(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            old = a.instance_id
            await passing(4, b, observer=b)
            await a.join()
            assert a.instance_id != old
            assert a.may_fire()
            assert old not in a.alive
            assert await b.observe()
            assert set(b.alive) == {a.instance_id, b.instance_id}

        with_cluster(scenario)

    def test_observe_returns_whether_the_live_members_have_changed(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            assert not await a.observe()
            await b.join()
            assert await a.observe()
            assert not await a.observe()
            await b.leave()
            assert await a.observe()

        with_cluster(scenario)

    def test_rows_of_dead_members_are_removed_after_a_while_and_nothing_of_them_stays_in_memory(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b, c = cluster.member(), cluster.member(), cluster.member()
            for member in (a, b, c):
                await member.join()
            await cluster.store.mark_dead(a.instance_id, (await row_of(cluster, a)).counter)
            await passing(300, b, c, observer=b)
            assert len(await cluster.store.members()) == 3
            await passing(400, b, c, observer=b)
            await c.observe()
            assert {row.instance_id for row in await cluster.store.members()} == {b.instance_id, c.instance_id}
            for member in (b, c):
                await member.observe()
                assert a.instance_id not in member._seen
                assert a.instance_id not in member._dead_since_ms

        with_cluster(scenario)

    def test_while_the_database_cannot_be_read_the_members_do_not_change(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            b.connection.fail("members", Fault.UNAVAILABLE)
            with pytest.raises(StoreUnavailable):
                await b.observe()
            assert set(b.alive) == {a.instance_id, b.instance_id}

        with_cluster(scenario)

    def test_on_an_exclusive_store_former_members_are_marked_dead_at_once(self) -> None:
        async def run(clock: VirtualClock) -> None:
            cluster = Cluster(clock, ExclusiveStore(clock))
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            assert [row.instance_id for row in await cluster.store.members()] == [b.instance_id]
            assert list(b.alive) == [b.instance_id]
            with pytest.raises(MemberDead):
                await a.send_heartbeat()

        run_virtual(run)


def is_now(member: Membership, at_ms: int) -> bool:
    """Never early; a clock that is corrected, or has jumped, may be late by the milliseconds that rounding took."""
    return 0 <= at_ms - member.now_ms() <= 2


class TestClock:
    def test_a_jump_forward_is_ignored_until_the_database_agrees(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            before_ms = a.now_ms()
            a.clock.offset_ms = 60_000
            assert is_now(a, before_ms)
            await asyncio.sleep(1)
            assert is_now(a, before_ms + 1_000)
            await a.send_heartbeat()  # the database does not agree
            assert is_now(a, before_ms + 1_000)
            assert not a.may_fire()
            cluster.clock.offset_ms = 60_000
            await a.send_heartbeat()  # now it does
            assert a.now_ms() == before_ms + 61_000
            assert a.may_fire()

        with_cluster(scenario)

    @pytest.mark.parametrize("jump_ms", [300, 499, -300])
    def test_a_small_jump_is_corrected_by_the_next_heartbeat_and_ignored_until_then(self, jump_ms: int) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.clock.offset_ms = jump_ms
            assert is_now(a, cluster.clock.wall_ms())
            await a.send_heartbeat()
            assert a.skew_ms == jump_ms
            assert is_now(a, cluster.clock.wall_ms())
            a.clock.offset_ms = 2 * jump_ms
            assert is_now(a, cluster.clock.wall_ms())

        with_cluster(scenario)

    @pytest.mark.parametrize("offset_ms", [-450, -20, 0, 3, 20, 450])
    def test_whatever_the_clock_is_off_the_time_is_at_most_five_milliseconds_ahead_of_the_databases(
        self, offset_ms: int
    ) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member(offset_ms)
            rng = random.Random(offset_ms)
            a.connection.lag, a.connection.lag_back = 2.0, 0.0  # the first answer proves next to nothing
            await a.join()
            for _ in range(200):
                assert a.now_ms() <= cluster.clock.wall_ms() + EARLY_MAX_MS
                a.connection.lag, a.connection.lag_back = rng.uniform(0, 0.004), rng.uniform(0, 0.004)
                await a.send_heartbeat()
                await asyncio.sleep(0.5)
            assert abs(a.now_ms() - cluster.clock.wall_ms()) <= 8
            assert a.clock_error_ms <= 8

        with_cluster(scenario)

    def test_a_correct_clock_is_not_made_late_by_a_connection_that_becomes_slow(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            a.connection.lag = a.connection.lag_back = 0.001
            await a.join()
            a.connection.lag = a.connection.lag_back = 0.4
            for _ in range(10):
                await a.send_heartbeat()
                assert 0 <= cluster.clock.wall_ms() - a.now_ms() <= 5, "clocks drift: half a millisecond each second"

        with_cluster(scenario)

    def test_a_database_whose_clock_is_set_is_followed(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            for offset_ms in (-400, 300, 0):
                cluster.clock.offset_ms = offset_ms
                await a.send_heartbeat()
                assert is_now(a, cluster.clock.wall_ms())

        with_cluster(scenario)

    def test_a_database_with_a_rough_clock_corrects_only_what_it_proves(self) -> None:
        async def run(clock: VirtualClock) -> None:
            store = MemoryStore(clock)
            store.capabilities = replace(MemoryStore.capabilities, clock_error_ms=100)
            cluster = Cluster(clock, store)
            near, far = cluster.member(90), cluster.member(400)
            await near.join()
            await far.join()
            assert near.now_ms() == clock.wall_ms() + 90
            assert (near.skew_ms, far.skew_ms) == (0, 300)
            assert far.now_ms() <= clock.wall_ms()

        run_virtual(run)

    def test_on_an_exclusive_store_a_slow_heartbeat_makes_nothing_late(self) -> None:
        async def run(clock: VirtualClock) -> None:
            cluster = Cluster(clock, ExclusiveStore(clock))
            a = SimMember(cluster, clock, 1)
            a.connection.lag = a.connection.lag_back = 0.2
            await a.join()
            assert a.now_ms() == clock.wall_ms()

        run_virtual(run)

    def test_an_answer_that_is_too_slow_confirms_no_jump(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.clock.offset_ms = 1_500
            a.connection.lag = 2.0
            await a.send_heartbeat()  # the database may have read its clock just now, or two seconds ago
            assert a.now_ms() <= cluster.clock.wall_ms()

        with_cluster(scenario)

    def test_joining_again_confirms_no_jump_either(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            await cluster.store.mark_dead(a.instance_id, 1)
            a.clock.offset_ms = 1_500
            a.connection.lag = 2.0
            await a.join()
            assert a.now_ms() <= cluster.clock.wall_ms()

        with_cluster(scenario)

    def test_a_jump_forward_after_one_backward_is_a_jump_like_any_other(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.clock.offset_ms = cluster.clock.offset_ms = -10_000
            a.connection.lag_back = 2.0
            await a.send_heartbeat()
            a.clock.offset_ms = 0
            assert a.now_ms() <= cluster.clock.wall_ms()

        with_cluster(scenario)

    def test_a_jump_backward_is_ignored_too(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            before_ms = a.now_ms()
            a.clock.offset_ms = -60_000
            assert is_now(a, before_ms)

        with_cluster(scenario)

    @pytest.mark.parametrize("skew_ms", [501, -501, 86_400_000, -86_400_000])
    def test_a_clock_off_by_more_than_the_limit_gets_no_lease(self, skew_ms: int) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member(skew_ms)
            await a.join()
            assert a.skew_ms == skew_ms
            assert a.is_skewed
            assert not a.may_fire()
            a.clock.offset_ms = 0
            await a.send_heartbeat()
            assert a.may_fire()

        with_cluster(scenario)

    @pytest.mark.parametrize("skew_ms", [0, 1, -1, 500, -500])
    def test_a_clock_off_by_less_may_fire(self, skew_ms: int) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member(skew_ms)
            await a.join()
            assert a.skew_ms == skew_ms
            assert a.may_fire()
            assert abs(a.now_ms() - cluster.clock.wall_ms()) <= 1

        with_cluster(scenario)

    def test_a_clock_that_goes_off_ends_a_lease(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.clock.offset_ms = -10_000
            await a.send_heartbeat()
            assert not a.may_fire()

        with_cluster(scenario)

    @pytest.mark.parametrize(("lag", "lag_back"), [(0.0, 1.0), (1.0, 0.0), (0.5, 0.5)])
    def test_the_time_an_answer_takes_is_not_mistaken_for_skew(self, lag: float, lag_back: float) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            a.connection.lag, a.connection.lag_back = lag, lag_back
            await a.join()
            assert a.skew_ms == 0
            a.clock.offset_ms = 5_000
            await a.send_heartbeat()
            assert 4_000 <= a.skew_ms <= 5_000  # the least it can be

        with_cluster(scenario)

    def test_case_9_a_member_whose_clock_is_off_is_alive_and_known_to_own_nothing(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            right, wrong = cluster.member(), cluster.member(offset_ms=2_000)
            await right.join()
            await wrong.join()
            await right.observe()
            assert set(right.alive) == {right.instance_id, wrong.instance_id}
            assert right.eligible == wrong.eligible == (right.instance_id,)
            wrong.clock.offset_ms = 0
            await wrong.send_heartbeat()  # learns that it is right again
            await wrong.send_heartbeat()  # and says so
            assert await right.observe()
            assert set(right.eligible) == {right.instance_id, wrong.instance_id}

        with_cluster(scenario)


class TestSteady:
    """Shards are given only to those who have been there for seven heartbeats, and who still beat."""

    def test_a_new_member_is_established_after_seven_heartbeats_to_the_millisecond(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, a, b, observer=b)
            assert not b.is_established(a.instance_id)
            await asyncio.sleep(0.001)
            assert b.is_established(a.instance_id)

        with_cluster(scenario)

    def test_a_member_that_missed_more_than_two_heartbeats_is_not_established(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(10, a, b, observer=b)
            await asyncio.sleep(1.25)
            assert b.is_established(a.instance_id)
            await asyncio.sleep(0.001)
            assert not b.is_established(a.instance_id)

        with_cluster(scenario)

    def test_an_unknown_member_is_not_established(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            assert not a.is_established("nobody")

        with_cluster(scenario)


class TestClaims:
    def test_without_a_lease_nothing_may_be_claimed(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            assert not a.may_claim()
            await a.join()
            assert a.may_claim()
            await asyncio.sleep(LEASE_MS / 1_000)
            assert not a.may_claim()

        with_cluster(scenario)

    def test_after_a_failover_nothing_may_be_claimed_while_a_lost_lease_may_be_valid(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.wait_before_claims()
            await asyncio.sleep((DEAD_AFTER_MS - 1) / 1_000)
            await a.send_heartbeat()
            assert a.may_fire()
            assert not a.may_claim()
            await asyncio.sleep(0.001)
            assert a.may_claim()

        with_cluster(scenario)


class TestJoining:
    def test_before_joining_the_time_is_that_of_this_machine(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member(offset_ms=7_000)
            assert a.now_ms() == a.clock.wall_ms()
            assert a.boot_ms() == a.clock.boot_ms()
            assert a.skew_ms == 0

        with_cluster(scenario)

    def test_the_row_of_a_new_member_says_that_it_may_own_shards_before_its_first_heartbeat(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await b.join()
            beating = a.connection.hold("heartbeat")
            joining = asyncio.ensure_future(a.join())
            await asyncio.sleep(0.1)
            await b.observe()
            assert set(b.eligible) == {a.instance_id, b.instance_id}
            beating.set()
            await joining

        with_cluster(scenario)

    def test_joining_again_uses_a_new_secret_and_marks_the_former_id_dead_at_once(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            former, secret = await row_of(cluster, a), a.secret
            assert former.secret == secret
            assert len(secret.removeprefix("signs.")) == 64
            await a.join()
            assert (await row_of(cluster, a)).secret == a.secret != secret
            dead = next(row for row in await cluster.store.members() if row.instance_id == former.instance_id)
            assert not dead.alive

        with_cluster(scenario)

    def test_while_it_joins_again_the_lease_of_its_former_id_is_not_valid(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            held = a.connection.hold("join")
            joining = asyncio.ensure_future(a.join())
            await asyncio.sleep(0.1)
            assert not a.may_fire()
            held.set()
            await joining
            assert a.may_fire()

        with_cluster(scenario)

    def test_an_instance_that_learns_that_it_is_dead_stops_firing_at_once(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            await cluster.store.mark_dead(a.instance_id, (await row_of(cluster, a)).counter)
            assert a.may_fire()
            with pytest.raises(MemberDead):
                await a.send_heartbeat()
            assert not a.may_fire()

        with_cluster(scenario)

    def test_on_a_shared_store_dead_members_stay_visible_when_another_joins(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await cluster.store.mark_dead(a.instance_id, (await row_of(cluster, a)).counter)
            await b.join()
            assert not (await row_of(cluster, a)).alive
            assert b.connection.calls["mark_dead"] == 0

        with_cluster(scenario)

    def test_a_member_that_leaves_removes_its_row(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            beats = a.connection.calls["heartbeat"]
            await a.leave()
            assert await cluster.store.members() == []
            assert a.connection.calls["heartbeat"] == beats

        with_cluster(scenario)

    def test_the_reason_why_heartbeats_fail_is_kept_until_one_succeeds(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.connection.fail("heartbeat", Fault.UNAVAILABLE)
            await a.send_heartbeat()
            assert a.heartbeat_log.reason == "injected"
            await a.send_heartbeat()
            assert a.heartbeat_log.reason == ""

        with_cluster(scenario)


class TestWatching:
    def test_a_mark_of_unknown_outcome_that_was_not_applied_leaves_its_member_alive(self) -> None:
        """Taken for dead, its shards would be taken from it while it fires."""

        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, observer=b)
            b.connection.fail("mark_dead", Fault.LOST_THEN_UNKNOWN)
            await asyncio.sleep(0.5)
            await b.observe()
            assert b.connection.calls["mark_dead"] == 1
            assert a.instance_id in b.alive
            await a.send_heartbeat()
            await b.observe()
            assert a.instance_id in b.alive
            assert (await row_of(cluster, a)).alive

        with_cluster(scenario)

    def test_a_dead_member_is_not_marked_again(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await cluster.store.mark_dead(a.instance_id, (await row_of(cluster, a)).counter)
            await passing(20, b, observer=b)
            assert b.connection.calls["mark_dead"] == 0

        with_cluster(scenario)

    def test_the_row_of_a_dead_member_is_kept_for_ten_minutes(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await cluster.store.mark_dead(a.instance_id, (await row_of(cluster, a)).counter)
            await b.observe()
            await asyncio.sleep(599)
            await b.observe()
            assert len(await cluster.store.members()) == 2
            await asyncio.sleep(2)
            await b.observe()
            assert len(await cluster.store.members()) == 1

        with_cluster(scenario)

    def test_of_the_time_between_two_observations_at_most_two_heartbeats_count(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            for _ in range(3):
                await asyncio.sleep(1.4)
                await b.send_heartbeat()
                await b.observe()
            assert a.instance_id in b.alive, "it was watched for three seconds only"
            await asyncio.sleep(1.4)
            await b.observe()
            assert a.instance_id not in b.alive

        with_cluster(scenario)

    def test_the_next_death_is_that_of_the_member_whose_counter_is_unchanged_longest(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b, c = cluster.member(), cluster.member(), cluster.member()
            await a.join()
            assert a.next_death_ms() is None
            await b.join()
            await a.observe()
            seen_ms = a.boot_ms()
            await asyncio.sleep(0.4)
            await c.join()
            await a.observe()
            assert a.next_death_ms() == seen_ms + DEAD_AFTER_MS + 1
            await b.send_heartbeat()
            await a.observe()
            assert a.next_death_ms() == seen_ms + 400 + DEAD_AFTER_MS + 1

        with_cluster(scenario)

    def test_members_that_are_overdue_or_dead_do_not_count_for_the_next_death(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await a.observe()
            await asyncio.sleep(DEAD_AFTER_MS / 1_000)
            assert a.next_death_ms() == a.boot_ms() + 1
            await asyncio.sleep(0.001)
            assert a.next_death_ms() is None, "it is checked with every heartbeat"
            await b.send_heartbeat()
            await a.observe()
            assert a.next_death_ms() is not None
            await cluster.store.mark_dead(b.instance_id, (await row_of(cluster, b)).counter)
            await a.observe()
            assert b.instance_id in a._seen
            assert a.next_death_ms() is None

        with_cluster(scenario)

    def test_a_death_is_logged_once_and_only_if_the_mark_succeeded(self, caplog: pytest.LogCaptureFixture) -> None:
        async def scenario(cluster: Cluster) -> None:
            a, b = cluster.member(), cluster.member()
            await a.join()
            await b.join()
            await passing(3.5, observer=b)
            held = b.connection.hold("mark_dead")
            await asyncio.sleep(0.5)
            observing = asyncio.create_task(b.observe())
            await asyncio.sleep(0.1)
            await a.send_heartbeat()  # it comes in just before the mark
            held.set()
            await observing
            assert "is dead" not in caplog.text
            await passing(4.5, observer=b)
            assert caplog.text.count(f"member {a.instance_id} at {a.address} is dead: its shards can be claimed") == 1

        with caplog.at_level("WARNING", "duetime"):
            with_cluster(scenario)


class PausedClock(VirtualClock):
    """The process is paused right after reads of the wall clock: after each of the next ones for so many
    milliseconds."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(loop)
        self.pauses_ms: list[int] = []

    def wall_ms(self) -> int:
        wall_ms = super().wall_ms()
        if self.pauses_ms:
            self._loop.now += self.pauses_ms.pop(0) / 1_000
        return wall_ms


class TestOffset:
    def test_a_difference_of_a_millisecond_is_no_jump_and_one_of_two_is(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            for offset_ms in (1, -1):
                a.clock.offset_ms = offset_ms
                assert a.now_ms() == a.clock.wall_ms()
            for offset_ms in (2, -2):
                a.clock.offset_ms = offset_ms
                assert a.now_ms() == cluster.clock.wall_ms() - 1, "rather late than early by what rounding took"

        with_cluster(scenario)

    def test_a_clock_that_is_a_millisecond_ahead_is_used_and_one_that_is_two_ahead_is_corrected(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            one, two = cluster.member(1), cluster.member(2)
            await one.join()
            await two.join()
            assert one.now_ms() == cluster.clock.wall_ms() + 1
            assert two.now_ms() == cluster.clock.wall_ms() - 1

        with_cluster(scenario)

    @pytest.mark.parametrize(
        ("pauses_ms", "not_read"),
        [([300, 0, 300, 300, 300], 3), ([300, 300, 300, 300, 0], 0), ([1, 300, 300, 300, 300], 4)],
    )
    def test_clocks_between_whose_reads_the_process_was_paused_are_read_again(
        self, pauses_ms: list[int], not_read: int
    ) -> None:
        """The difference of such reads is wrong by the pause: a correct clock would count as wrong."""

        async def scenario(cluster: Cluster) -> None:
            clock = PausedClock(cluster.loop)
            a = SimMember(cluster, clock, 1)
            await a.join()
            clock.pauses_ms = list(pauses_ms)
            await a.send_heartbeat()
            assert len(clock.pauses_ms) == not_read
            clock.pauses_ms = []
            assert abs(a.skew_ms) <= 1
            assert abs(a.now_ms() - cluster.clock.wall_ms()) <= 1

        with_cluster(scenario)

    def test_a_delay_is_counted_from_the_upper_bound_of_the_time(self) -> None:
        """Another instance, whose clock is measured better, may have to fire the timer."""

        async def scenario(cluster: Cluster) -> None:
            right, ahead, behind = cluster.member(), cluster.member(300), cluster.member(-300)
            for member in (right, ahead, behind):
                member.connection.lag = member.connection.lag_back = 0.05
                await member.join()
                assert member.now_ms() <= cluster.clock.wall_ms() <= member.latest_now_ms()
            assert right.latest_now_ms() == cluster.clock.wall_ms() + 50  # half of what the heartbeat took

        with_cluster(scenario)

    def test_on_an_exclusive_store_a_delay_is_counted_from_this_machines_clock(self) -> None:
        async def run(clock: VirtualClock) -> None:
            store = MemoryStore(clock)
            store.capabilities = replace(MemoryStore.capabilities, exclusive=True)
            a = Cluster(clock, store).member()
            a.connection.lag = a.connection.lag_back = 0.05
            await a.join()
            assert a.latest_now_ms() == a.now_ms() == clock.wall_ms()
            b = Cluster(clock, store).member(300)  # the wall clock was set while the server ran
            await b.join()
            assert b.latest_now_ms() == clock.wall_ms()

        run_virtual(run)

    def test_of_the_uncertainty_of_a_slow_answer_all_but_five_milliseconds_are_subtracted(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            a.connection.lag_back = 0.010
            await a.join()
            assert a.skew_ms == 0
            assert a.clock_error_ms == 10
            assert a.now_ms() == cluster.clock.wall_ms() - 5

        with_cluster(scenario)

    def test_of_the_uncertainty_of_a_rough_answer_all_but_twice_its_error_is_subtracted(self) -> None:
        async def run(clock: VirtualClock) -> None:
            store = MemoryStore(clock)
            store.capabilities = replace(MemoryStore.capabilities, clock_error_ms=100)
            a = Cluster(clock, store).member(90)
            a.connection.lag_back = 0.1
            await a.join()
            assert a.skew_ms == 0
            assert a.now_ms() == clock.wall_ms()

        run_virtual(run)

    def test_on_an_exclusive_store_a_correction_ends_when_the_clocks_agree(self) -> None:
        async def run(clock: VirtualClock) -> None:
            a = Cluster(clock, ExclusiveStore(clock)).member(300)
            await a.join()
            assert a.now_ms() == clock.wall_ms() - 1
            a.clock.offset_ms = 0
            await a.send_heartbeat()
            assert a.now_ms() == clock.wall_ms()

        run_virtual(run)

    def test_a_member_whose_clock_is_off_becomes_ineligible_at_once_and_its_counter_still_rises(self) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            a.clock.offset_ms = 2_000
            await a.send_heartbeat()
            assert a.eligible == ()
            counters = [(await row_of(cluster, a)).counter]
            for _ in range(4):
                await a.send_heartbeat()
                counters.append((await row_of(cluster, a)).counter)
            assert counters == sorted(set(counters)), "a counter that stands still is taken for a death"
            assert all(counter % 2 for counter in counters[1:])

        with_cluster(scenario)

    def test_a_clock_that_goes_off_and_is_right_again_is_logged_once_each(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        async def scenario(cluster: Cluster) -> None:
            a = cluster.member()
            await a.join()
            assert caplog.text == ""
            a.clock.offset_ms = 2_000
            for _ in range(3):
                await a.send_heartbeat()
            assert [record.levelname for record in caplog.records] == ["ERROR"]
            assert "is 2000 ms off the database's" in caplog.text
            a.clock.offset_ms = 0
            for _ in range(3):
                await a.send_heartbeat()
            assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
            assert "agrees with the database's again" in caplog.text

        with caplog.at_level("INFO", "duetime"):
            with_cluster(scenario)
