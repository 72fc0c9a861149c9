"""Cases of the failure catalogue (docs/concepts/failures.md) that take a cluster: directed stories in virtual time."""

from __future__ import annotations

import asyncio

from stage import Line, Stage, staged

from duetime.domain.timer import shard_of

LEASE_MS = 3_000


def test_case_1_a_frozen_owner_that_thaws_sends_nothing_and_its_successor_everything() -> None:
    async def story(stage: Stage) -> None:
        frozen, _ = await stage.enter(2)
        names = await stage.names_of(frozen, 30)
        for name in names:
            await stage.put(name, 2_000)
        stage.stormy = True  # connecting takes its time: the freeze comes between the due time and the first byte
        await asyncio.sleep(2.5)
        stage.loop.freeze(frozen.name)
        sent = len(stage.calls_by(frozen))
        assert sent < len(names), "nothing was left to send"
        await asyncio.sleep(8)
        stage.stormy = False
        thawed_at_ms = stage.now_ms()
        stage.loop.thaw(frozen.name)
        await asyncio.sleep(20)
        assert stage.called() == set(names)
        # Whatever it had queued for those timers was for another to send by then.
        late = [call for call in stage.calls_by(frozen, since_ms=thawed_at_ms) if call.timer in names]
        assert late == []

    staged(story)


def test_case_1_what_a_frozen_owner_settles_after_its_thaw_is_refused() -> None:
    async def story(stage: Stage) -> None:
        frozen, _ = await stage.enter(2)
        [name] = await stage.names_of(frozen, 1)
        await stage.put(name, 500, "http://slow")
        await stage.until(lambda: bool(stage.callbacks))
        stage.loop.freeze(frozen.name)  # with its delivery in flight
        del stage.instances[frozen.name]  # clients do not ask the frozen one
        await asyncio.sleep(8)
        await stage.put(name, 10_000)
        stage.loop.thaw(frozen.name)  # and settles what landed meanwhile
        await asyncio.sleep(30)
        assert stage.callbacks[-1].value == stage.wishes[-1].value

    staged(story)


def test_case_5_a_claim_whose_answer_is_lost_is_claimed_once_more_and_owned_once() -> None:
    async def story(stage: Stage) -> None:
        dying, heir = await stage.enter(2)
        names = await stage.names_of(dying, 10)
        for name in names:
            await stage.put(name, 6_000)
        before = {row.shard_id: row.version for row in await stage.rows()}
        Line(heir).lose_answers("claim")
        stage.crash(dying)
        await asyncio.sleep(15)
        rows = await stage.rows()
        assert {row.owner_id for row in rows} == {heir.engine.membership.instance_id}
        assert {row.fence for row in rows} == {shard.fence for shard in heir.engine.shards.values()}
        taken = [row for row in rows if row.shard_id in {shard_of(name, stage.num_shards) for name in names}]
        assert all(row.version == before[row.shard_id] + 2 for row in taken), "the lost claim and the one that counts"
        assert [call.timer for call in sorted(stage.callbacks, key=lambda call: call.timer)] == sorted(names)

    staged(story)


def test_case_9_an_instance_whose_clock_is_off_sheds_its_shards_and_gets_them_back_with_the_right_time() -> None:
    async def story(stage: Stage) -> None:
        skewed, other = await stage.enter(2)
        names = await stage.names_of(skewed, 10)
        owned = set(skewed.engine.shards)
        for number, name in enumerate(names):
            await stage.put(name, 4_000 + number * 100)
        skewed.clock.offset_ms = 2_000
        await asyncio.sleep(2)
        assert skewed.engine.shards == {}
        assert abs(skewed.engine.membership.skew_ms - 2_000) < 10
        assert "off the database's" in (skewed.service.readiness() or "")
        await asyncio.sleep(10)
        assert {call.owner for call in stage.callbacks} == {other.name}
        assert stage.called() == set(names)
        skewed.clock.offset_ms = 0
        await asyncio.sleep(20)
        assert set(skewed.engine.shards) == owned

    staged(story)


def test_case_24_a_line_to_the_database_that_stalls_stops_the_firing_before_anybody_else_begins() -> None:
    async def story(stage: Stage) -> None:
        cut_off, other = await stage.enter(2)
        names = await stage.names_of(cut_off, 80)
        for number, name in enumerate(names):
            await stage.put(name, 2_000 + number * 100)
        stalled_at_ms = stage.now_ms()
        back = Line(cut_off).hold()
        await asyncio.sleep(12)
        lease_ended_ms = stalled_at_ms + LEASE_MS
        before = [call.started_at_ms for call in stage.calls_by(cut_off)]
        after = [call.started_at_ms for call in stage.calls_by(other)]
        assert before, "it fires as long as its lease lasts"
        assert max(before) <= lease_ended_ms < min(after)
        back.set()
        await asyncio.sleep(20)
        assert stage.called() == set(names)

    staged(story)


def test_case_25_a_store_that_throttles_moves_no_shard() -> None:
    async def story(stage: Stage) -> None:
        instances = await stage.enter(3)
        lines = [Line(instance) for instance in instances]
        before = [(row.owner_id, row.version, row.nonce) for row in await stage.rows()]
        names = [f"t{number}" for number in range(40)]
        for number, name in enumerate(names):
            await stage.put(name, 1_000 + number * 500)
        for _ in range(6):  # again and again for most of a lease, with hardly a moment in between
            for line in lines:
                line.throttle(on=True)
            await asyncio.sleep(2)
            for line in lines:
                line.throttle(on=False)
            await asyncio.sleep(0.7)
        assert all(line.throttled_calls > 20 for line in lines)
        await asyncio.sleep(20)
        assert [(row.owner_id, row.version, row.nonce) for row in await stage.rows()] == before
        for instance in instances:
            assert instance.engine.telemetry.shards_lost.value == 0
            assert instance.engine.telemetry.reclaims.value == 0
        assert stage.called() == set(names)
        assert len(stage.callbacks) == len(names)

    staged(story)


def test_case_50_a_newcomer_that_cannot_beat_yet_fires_nothing_and_its_share_fires_elsewhere() -> None:
    async def story(stage: Stage) -> None:
        await stage.enter(1)
        newcomer = stage.launch()
        beats = Line(newcomer).hold("heartbeat")
        names = [f"t{number}" for number in range(40)]
        for number, name in enumerate(names):
            await stage.put(name, 500 + number * 300)
        await asyncio.sleep(20)
        assert newcomer.engine.shards == {}
        assert stage.calls_by(newcomer) == []
        assert stage.called() == set(names)
        beats.set()
        await asyncio.sleep(20)
        assert newcomer.engine.shards, "it takes its share as soon as it is alive"

    staged(story)


def test_case_54_a_restored_backup_loses_nothing_from_before_it_and_obeys_nobody_from_after_it() -> None:
    async def story(stage: Stage) -> None:
        [first] = await stage.enter(1)
        kept = [f"kept{number}" for number in range(10)]
        for name in kept:
            await stage.put(name, 30_000, "http://slow")
        backup = stage.database.snapshot()
        # After the backup: another takes over, and freezes with its deliveries in flight.
        stage.crash(first)
        [zombie] = await stage.enter(1)
        await stage.client.put("forgotten", "http://ok", 60_000)
        await stage.until(lambda: stage.called() == set(kept))
        held = {shard.shard_id: shard.fence for shard in zombie.engine.shards.values()}
        stage.loop.freeze(zombie.name)
        del stage.instances[zombie.name]
        stage.database.restore(backup)
        [fresh] = await stage.enter(1)
        await asyncio.sleep(10)
        rows = {row.shard_id: row for row in await stage.rows()}
        assert {row.owner_id for row in rows.values()} == {fresh.engine.membership.instance_id}
        assert all(rows[shard_id].version == fence.version for shard_id, fence in held.items()), "given out twice"
        assert all(rows[shard_id].nonce != fence.nonce for shard_id, fence in held.items())
        assert {call.timer for call in stage.calls_by(fresh)} == set(kept), "fired again rather than not at all"
        for name in kept:
            await stage.put(name, 5_000)
        stage.loop.thaw(zombie.name)  # settles what it delivered, under versions that are another's now
        await asyncio.sleep(90)
        assert {call.value for call in stage.callbacks[-len(kept) :]} == {w.value for w in stage.wishes[-len(kept) :]}
        assert "forgotten" not in stage.called()

    staged(story, is_judged=False)  # the checker does not know of databases that forget


def test_case_54_whoever_runs_while_a_backup_is_restored_joins_again_and_goes_on() -> None:
    async def story(stage: Stage) -> None:
        [first] = await stage.enter(1)
        await stage.depart(first)
        nobody_there = stage.database.snapshot()
        [alone] = await stage.enter(1)
        name = alone.engine.membership.instance_id
        stage.database.restore(nobody_there)
        await alone.engine.balance()  # before the heartbeat that would tell it: nobody at all seems to be alive
        await asyncio.sleep(5)
        assert alone.engine.membership.instance_id != name
        assert {row.owner_id for row in await stage.rows()} == {alone.engine.membership.instance_id}
        await stage.put("a", 1_000)
        await asyncio.sleep(5)
        assert stage.called() == {"a"}

    staged(story)
