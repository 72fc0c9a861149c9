"""Cases of the failure catalogue (docs/concepts/failures.md) that need a cluster, as scenarios in virtual time."""

from __future__ import annotations

import asyncio
from itertools import accumulate

from msgspec.structs import replace
from scripted_cluster import ScriptedCluster, StoreConnection, run_scripted

from duetime.domain.timer import shard_of

LEASE_MS = 3_000
MEMORY = 50  # `engine.timers_in_memory_max` of the catch-up after an outage


def test_case_1_a_resumed_owner_sends_nothing_and_its_successor_sends_everything() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        frozen, _ = await cluster.launch_many(2)
        names = await cluster.names_of(frozen, 30)
        for name in names:
            await cluster.put(name, 2_000)
        cluster.faults_on = True  # slow connects: the freeze comes between the due time and the first byte
        await asyncio.sleep(2.5)
        cluster.loop.freeze(frozen.name)
        sent = len(cluster.calls_by(frozen))
        assert sent < len(names), "nothing was left to send"
        await asyncio.sleep(8)
        cluster.faults_on = False
        resumed_at_ms = cluster.now_ms()
        cluster.loop.resume(frozen.name)
        await asyncio.sleep(20)
        assert cluster.called() == set(names)
        # Another instance owns those timers by then.
        late = [call for call in cluster.calls_by(frozen, since_ms=resumed_at_ms) if call.timer in names]
        assert late == []

    run_scripted(scenario)


def test_case_1_results_that_a_resumed_owner_settles_are_refused() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        frozen, _ = await cluster.launch_many(2)
        [name] = await cluster.names_of(frozen, 1)
        await cluster.put(name, 500, "http://slow")
        await cluster.until(lambda: bool(cluster.callbacks))
        cluster.loop.freeze(frozen.name)  # with its delivery in flight
        del cluster.instances[frozen.name]  # clients do not use the frozen instance
        await asyncio.sleep(8)
        await cluster.put(name, 10_000)
        cluster.loop.resume(frozen.name)  # and settles the delivery that ended meanwhile
        await asyncio.sleep(30)
        assert cluster.callbacks[-1].value == cluster.requests[-1].value

    run_scripted(scenario)


def test_case_5_a_claim_with_a_lost_answer_is_repeated_and_the_shard_has_one_owner() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        crashed, successor = await cluster.launch_many(2)
        names = await cluster.names_of(crashed, 10)
        for name in names:
            await cluster.put(name, 6_000)
        before = {row.shard_id: row.version for row in await cluster.rows()}
        StoreConnection(successor).lose_answers("claim")
        cluster.crash(crashed)
        await asyncio.sleep(15)
        rows = await cluster.rows()
        assert {row.owner_id for row in rows} == {successor.engine.membership.instance_id}
        assert {row.fence for row in rows} == {shard.fence for shard in successor.engine.shards.values()}
        taken = [row for row in rows if row.shard_id in {shard_of(name, cluster.num_shards) for name in names}]
        assert all(row.version == before[row.shard_id] + 2 for row in taken), (
            "one for the lost claim and one for the repeated claim"
        )
        assert [call.timer for call in sorted(cluster.callbacks, key=lambda call: call.timer)] == sorted(names)

    run_scripted(scenario)


def test_case_9_an_instance_with_a_wrong_clock_releases_its_shards_and_gets_them_back_when_the_clock_is_right() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        skewed, other = await cluster.launch_many(2)
        names = await cluster.names_of(skewed, 10)
        owned = set(skewed.engine.shards)
        for number, name in enumerate(names):
            await cluster.put(name, 4_000 + number * 100)
        skewed.clock.offset_ms = 2_000
        await asyncio.sleep(2)
        assert skewed.engine.shards == {}
        assert abs(skewed.engine.membership.skew_ms - 2_000) < 10
        assert "off the database's" in (skewed.service.readiness() or "")
        await asyncio.sleep(10)
        assert {call.owner for call in cluster.callbacks} == {other.name}
        assert cluster.called() == set(names)
        skewed.clock.offset_ms = 0
        await asyncio.sleep(20)
        assert set(skewed.engine.shards) == owned

    run_scripted(scenario)


def test_case_24_a_stalled_database_connection_stops_firing_before_another_instance_starts() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        start_outage, other = await cluster.launch_many(2)
        names = await cluster.names_of(start_outage, 80)
        for number, name in enumerate(names):
            await cluster.put(name, 2_000 + number * 100)
        stalled_at_ms = cluster.now_ms()
        back = StoreConnection(start_outage).block()
        await asyncio.sleep(12)
        lease_ended_ms = stalled_at_ms + LEASE_MS
        before = [call.started_at_ms for call in cluster.calls_by(start_outage)]
        after = [call.started_at_ms for call in cluster.calls_by(other)]
        assert before, "it fires as long as its lease lasts"
        assert max(before) <= lease_ended_ms < min(after)
        back.set()
        await asyncio.sleep(20)
        assert cluster.called() == set(names)

    run_scripted(scenario)


def test_case_25_throttling_by_the_store_moves_no_shard() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        instances = await cluster.launch_many(3)
        connections = [StoreConnection(instance) for instance in instances]
        before = [(row.owner_id, row.version, row.nonce) for row in await cluster.rows()]
        names = [f"t{number}" for number in range(40)]
        for number, name in enumerate(names):
            await cluster.put(name, 1_000 + number * 500)
        for _ in range(6):  # most of a lease each time, with a short pause in between
            for connection in connections:
                connection.throttle(on=True)
            await asyncio.sleep(2)
            for connection in connections:
                connection.throttle(on=False)
            await asyncio.sleep(0.7)
        assert all(connection.throttled_calls > 20 for connection in connections)
        await asyncio.sleep(20)
        assert [(row.owner_id, row.version, row.nonce) for row in await cluster.rows()] == before
        for instance in instances:
            assert instance.engine.telemetry.shards_lost.value == 0
            assert instance.engine.telemetry.reclaims.value == 0
        assert cluster.called() == set(names)
        assert len(cluster.callbacks) == len(names)

    run_scripted(scenario)


def test_case_50_a_new_instance_without_a_heartbeat_fires_nothing_and_others_fire_its_share() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        await cluster.launch_many(1)
        newcomer = cluster.launch()
        beats = StoreConnection(newcomer).block("heartbeat")
        names = [f"t{number}" for number in range(40)]
        for number, name in enumerate(names):
            await cluster.put(name, 500 + number * 300)
        await asyncio.sleep(20)
        assert newcomer.engine.shards == {}
        assert cluster.calls_by(newcomer) == []
        assert cluster.called() == set(names)
        beats.set()
        await asyncio.sleep(20)
        assert newcomer.engine.shards, "it takes its share as soon as it has a lease"

    run_scripted(scenario)


def test_case_54_a_restored_backup_keeps_all_earlier_timers_and_refuses_later_owners() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        [first] = await cluster.launch_many(1)
        kept = [f"kept{number}" for number in range(10)]
        for name in kept:
            await cluster.put(name, 30_000, "http://slow")
        backup = cluster.database.snapshot()
        # After the backup: another instance takes over, and freezes with its deliveries in flight.
        cluster.crash(first)
        [zombie] = await cluster.launch_many(1)
        await cluster.client.put("forgotten", "http://ok", 60_000)
        await cluster.until(lambda: cluster.called() == set(kept))
        held = {shard.shard_id: shard.fence for shard in zombie.engine.shards.values()}
        cluster.loop.freeze(zombie.name)
        del cluster.instances[zombie.name]
        cluster.database.restore(backup)
        [fresh] = await cluster.launch_many(1)
        await asyncio.sleep(10)
        rows = {row.shard_id: row for row in await cluster.rows()}
        assert {row.owner_id for row in rows.values()} == {fresh.engine.membership.instance_id}
        assert all(rows[shard_id].version == fence.version for shard_id, fence in held.items()), (
            "the same version was given out twice"
        )
        assert all(rows[shard_id].nonce != fence.nonce for shard_id, fence in held.items())
        assert {call.timer for call in cluster.calls_by(fresh)} == set(kept), "timers from before the backup fire again"
        for name in kept:
            await cluster.put(name, 5_000)
        cluster.loop.resume(zombie.name)  # settles its deliveries, under versions that another instance has now
        await asyncio.sleep(90)
        assert {call.value for call in cluster.callbacks[-len(kept) :]} == {
            w.value for w in cluster.requests[-len(kept) :]
        }
        assert "forgotten" not in cluster.called()

    run_scripted(scenario, check=False)  # the checker does not handle a database that loses acknowledged writes


def test_case_54_an_instance_that_runs_during_a_restore_joins_again_and_continues() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        [first] = await cluster.launch_many(1)
        await cluster.depart(first)
        without_members = cluster.database.snapshot()
        [only] = await cluster.launch_many(1)
        name = only.engine.membership.instance_id
        cluster.database.restore(without_members)
        await only.engine.balance()  # before the next heartbeat: the members table is empty
        await asyncio.sleep(5)
        assert only.engine.membership.instance_id != name
        assert {row.owner_id for row in await cluster.rows()} == {only.engine.membership.instance_id}
        await cluster.put("a", 1_000)
        await asyncio.sleep(5)
        assert cluster.called() == {"a"}

    run_scripted(scenario)


def test_after_an_outage_of_the_whole_cluster_what_is_overdue_fires_in_order_and_other_flows_are_on_time() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        """More timers are overdue than fit into the memory of all instances."""
        cluster.config = replace(
            cluster.config,
            engine=replace(cluster.config.engine, timers_in_memory_max=MEMORY),
            delivery=replace(cluster.config.delivery, concurrency_per_flow=8),
        )
        before = await cluster.launch_many(2)
        overdue = [f"overdue{number}" for number in range(6 * MEMORY)]
        first_due_ms = cluster.now_ms() + 60_000
        for number, name in enumerate(overdue):
            await cluster.put(name, first_due_ms + 20 * number - cluster.now_ms(), "http://slow")
        for instance in before:
            cluster.crash(instance)
        await asyncio.sleep(200)
        assert cluster.callbacks == []
        after = await cluster.launch_many(2)
        await cluster.until(lambda: sum(len(instance.engine.shards) for instance in after) == cluster.num_shards)
        await cluster.until(lambda: all(instance.engine.look_ahead.backlogs for instance in after))
        due_ms = {f"new{number}": cluster.now_ms() + 1_000 + 200 * number for number in range(50)}
        for name, at_ms in due_ms.items():
            await cluster.put(name, at_ms - cluster.now_ms())
        await cluster.until(lambda: set(due_ms) <= cluster.called())
        assert any(instance.engine.look_ahead.backlogs for instance in after), "they were due during the catch-up"
        started_ms = {call.timer: call.started_at_ms for call in cluster.callbacks}
        assert max(started_ms[name] - at_ms for name, at_ms in due_ms.items()) < 100
        await cluster.until(lambda: set(overdue) <= cluster.called())
        for instance in after:
            numbers = [overdue.index(call.timer) for call in cluster.calls_by(instance) if call.timer in overdue]
            assert len(numbers) > MEMORY
            assert len(numbers) == len(set(numbers))
            assert (
                max(latest - number for latest, number in zip(accumulate(numbers, max), numbers, strict=True)) < MEMORY
            )
        await asyncio.sleep(10)

    run_scripted(scenario)
