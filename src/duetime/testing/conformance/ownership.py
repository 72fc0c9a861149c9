"""Conformance: which instance may write. Open and migrate, members, namespaces, claims, fences, stale owners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, DAY_MS, FlowLimits, Namespace, Position, RetryPolicy, Timer
from duetime.errors import MemberDead, ShardLost
from duetime.store import Batch, Claim, Committed, Fence, Member, ShardRow, Store
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import (
    SHARDS,
    Harness,
    all_reached,
    all_timers,
    commit_one,
    contents,
    put,
    take,
)


class Lifecycle(Harness):
    async def test_migrating_again_changes_nothing(self, store: Store) -> None:
        timer, reached = make_timer(), make_reached(make_timer("over"))
        await commit_one(store, Batch(await take(store, 0), [timer], (), [reached]))
        before = await contents(store)
        await store.migrate()
        assert await contents(store) == before

    async def test_acknowledged_writes_exist_after_a_restart(self, store: Store) -> None:
        if not store.capabilities.durable:
            return
        fence = await take(store, 0)
        await commit_one(
            store, Batch(fence, [make_timer()], (), [make_reached(make_timer("over"))], Position(5, -6, 7))
        )
        await store.join(Member("a", "host:1", 4, True, 99, "its secret"))
        await store.put_namespace(Namespace(name="test", num_shards=SHARDS, created_at_ms=1), None)
        before = await contents(store), await store.members(), await store.namespaces()
        await store.close()
        await store.close()
        await store.open()
        assert (await contents(store), await store.members(), await store.namespaces()) == before
        await put(store, fence, make_timer("the fence is still valid"))

    async def test_the_capabilities_have_valid_values(self, store: Store) -> None:
        limits = store.capabilities
        assert limits.name
        assert limits.batch_max >= 1
        assert limits.parallel_commits >= 1
        assert limits.payload_bytes_max >= 64 * 1024


class Members(Harness):
    async def test_a_member_joins_sends_heartbeats_is_marked_dead_and_is_forgotten(self, store: Store) -> None:
        member = Member("a", "host:1", 0, True, 17)
        await store.join(member)
        assert await store.members() == [member]
        assert await store.heartbeat("a", 1) > 1_600_000_000_000
        assert await store.members() == [replace(member, counter=1)]
        assert await store.mark_dead("a", 1)
        assert await store.members() == [replace(member, counter=1, alive=False)]
        await store.forget_member("a")
        assert await store.members() == []

    async def test_a_member_whose_counter_moved_is_not_marked_dead(self, store: Store) -> None:
        await store.join(Member("a", "host:1", 0, True, 17))
        await store.heartbeat("a", 5)
        assert not await store.mark_dead("a", 4)
        assert not await store.mark_dead("a", 6)
        assert [member.alive for member in await store.members()] == [True]

    async def test_a_late_heartbeat_does_not_lower_the_counter(self, store: Store) -> None:
        """A heartbeat may arrive after a later one. If it lowered the counter, an observer could see a value again that
        it has seen before, and mark a member dead that is alive."""
        await store.join(Member("a", "host:1", 0, True, 17))
        await store.heartbeat("a", 6)
        assert await store.heartbeat("a", 4) > 1_600_000_000_000, "no error: the member is alive"
        assert [member.counter for member in await store.members()] == [6]
        assert not await store.mark_dead("a", 4), "it was never seen at 4"
        assert await store.mark_dead("a", 6)

    async def test_a_dead_member_stays_dead(self, store: Store) -> None:
        await store.join(Member("a", "host:1", 3, True, 17))
        assert await store.mark_dead("a", 3)
        assert await store.mark_dead("a", 99), "already dead, whatever the counter"
        with pytest.raises(MemberDead):
            await store.heartbeat("a", 4)
        with pytest.raises(MemberDead):
            await store.join(Member("a", "host:1", 0, True, 18))
        assert await store.members() == [Member("a", "host:1", 3, False, 17)]

    async def test_a_member_without_a_row_is_dead(self, store: Store) -> None:
        with pytest.raises(MemberDead):
            await store.heartbeat("nobody", 1)
        assert await store.mark_dead("nobody", 1)
        await store.forget_member("nobody")
        assert await store.members() == []

    async def test_joining_twice_is_the_same_as_joining_once(self, store: Store) -> None:
        member = Member("a", "host:1", 0, True, 17)
        await store.join(member)
        await store.heartbeat("a", 2)
        await store.join(member)
        assert await store.members() == [replace(member, counter=2)]

    async def test_members_that_are_alive_are_not_forgotten(self, store: Store) -> None:
        members = [Member(name, f"{name}:1", 0, True, 17) for name in ("a", "B", "b")]
        for member in members:
            await store.join(member)
        for member in members:
            await store.forget_member(member.instance_id)
        assert {member.instance_id for member in await store.members()} == {"a", "B", "b"}

    async def test_of_a_heartbeat_and_a_mark_dead_at_the_same_time_one_succeeds(
        self, store: Store, other_session: Store
    ) -> None:
        for number in range(10):
            name = f"m-{number}"
            await store.join(Member(name, "host:1", 0, True, 17))
            beat, dead = await asyncio.gather(
                store.heartbeat(name, 1), other_session.mark_dead(name, 0), return_exceptions=True
            )
            assert isinstance(beat, MemberDead) == (dead is True)


class Namespaces(Harness):
    async def test_namespaces_are_read_back_exactly_and_in_order_of_names(self, store: Store) -> None:
        full = Namespace(
            name="full",
            num_shards=3,
            created_at_ms=1,
            revision=5,
            deleted=True,
            callback_url="https://receiver.example/ü",
            retry_policy=RetryPolicy(max_retries=0),
            callback_timeout_seconds=3,
            require_ok=True,
            delivered_retention_ms=0,
            failed_retention_ms=DAY_MS,
            payload_bytes_max=10,
            creates_per_second=20,
            requests_per_second=30,
            signing_secrets=("one", "two"),
            paused=True,
            flows={
                "größe 'x' \\ 😀": FlowLimits(rate=0.5, concurrency=2, paused=True),
                "\u0001\n": FlowLimits(rate=1.0),
            },
        )
        plain = [Namespace(name=name, num_shards=1, created_at_ms=1) for name in ("Full", "full ", "é", "😀")]
        for namespace in (full, *plain):
            assert await store.put_namespace(namespace, None)
        assert await store.namespaces() == sorted([full, *plain], key=lambda namespace: namespace.name)

    async def test_a_namespace_may_have_a_quarter_of_a_mebibyte_of_settings(self, store: Store) -> None:
        flows = {f"https://receiver.example/{n:0220}": FlowLimits(rate=1.0) for n in range(1_000)}
        large = Namespace(name="n", num_shards=1, created_at_ms=1, flows=flows)
        assert 250_000 < len(msgspec.json.encode(flows)) < 262_144
        assert await store.put_namespace(large, None)
        assert await store.put_namespace(replace(large, revision=1), 0)
        (found,) = await store.namespaces()
        assert found == replace(large, revision=1)

    async def test_a_namespace_is_written_only_at_the_expected_revision(self, store: Store) -> None:
        first = Namespace(name="n", num_shards=3, created_at_ms=1, revision=1)
        second = replace(first, revision=2, require_ok=True)
        assert not await store.put_namespace(second, 1), "the namespace does not exist yet"
        assert await store.put_namespace(first, None)
        assert not await store.put_namespace(second, None), "the namespace exists now"
        assert not await store.put_namespace(second, 0)
        assert await store.namespaces() == [first]
        assert await store.put_namespace(second, 1)
        assert not await store.put_namespace(first, 1)
        assert await store.namespaces() == [second]

    async def test_of_two_writers_of_one_revision_one_succeeds(self, store: Store, other_session: Store) -> None:
        base = Namespace(name="n", num_shards=3, created_at_ms=1, revision=1)
        writes = [(store, replace(base, callback_url="a")), (other_session, replace(base, callback_url="b"))]
        won = await asyncio.gather(*(session.put_namespace(namespace, None) for session, namespace in writes))
        assert sorted(won) == [False, True]
        assert await store.namespaces() == [writes[won.index(True)][1]]


class Shards(Harness):
    async def test_shards_start_free_and_more_may_be_added(self, store: Store) -> None:
        assert await store.shards() == [ShardRow(shard_id) for shard_id in range(SHARDS)]
        fence = await take(store, 1)
        owned = await store.shards()
        await store.ensure_shards(SHARDS + 2)
        await store.ensure_shards(1)
        assert await store.shards() == [*owned, ShardRow(SHARDS), ShardRow(SHARDS + 1)]
        await put(store, fence, make_timer())

    async def test_a_claim_of_the_expected_version_increments_it(self, store: Store) -> None:
        claim = Claim(2, 0, -7, "a", "host:1", 99)
        row = ShardRow(2, 1, -7, "a", "host:1", 99)
        assert await store.claim([claim]) == [row]
        assert (await store.shards())[2] == row

    async def test_a_claim_of_another_version_returns_the_row_unchanged(self, store: Store) -> None:
        [row] = await store.claim([Claim(0, 0, 1, "a", "host:1", 1)])
        for expected_version in (0, 2, -1):
            assert await store.claim([Claim(0, expected_version, 2, "b", "host:2", 2)]) == [row]
        assert (await store.shards())[0] == row

    async def test_a_claim_with_a_lost_answer_is_recognised_by_its_nonce(self, store: Store) -> None:
        claim = Claim(0, 0, 4711, "a", "host:1", 1)
        await store.claim([claim])
        [row] = await store.claim([claim])
        assert (row.version, row.nonce) == (1, claim.nonce), "the first claim was applied, the second was not"
        await put(store, row.fence, make_timer())

    async def test_many_claims_at_once_are_answered_in_their_order(self, store: Store) -> None:
        await take(store, 1)
        claims = [Claim(shard_id, 0, shard_id + 10, "a", "host:1", 1) for shard_id in (3, 1, 0)]
        rows = await store.claim(claims)
        assert [row.shard_id for row in rows] == [3, 1, 0]
        assert [row.nonce == claim.nonce for row, claim in zip(rows, claims, strict=True)] == [True, False, True]
        assert await store.claim([]) == []

    async def test_of_many_claims_of_one_version_exactly_one_succeeds(self, store: Store, other_session: Store) -> None:
        for version in range(10):
            answers = await asyncio.gather(
                *(
                    session.claim([Claim(0, version, nonce, f"owner-{nonce}", "host:1", 1)])
                    for nonce, session in enumerate([store, other_session] * 3, start=1)
                )
            )
            winners = [nonce for nonce, [row] in enumerate(answers, start=1) if row.nonce == nonce]
            assert len(winners) == 1
            row = (await store.shards())[0]
            assert (row.version, row.nonce, row.owner_id) == (version + 1, winners[0], f"owner-{winners[0]}")

    async def test_a_released_shard_is_free_at_the_same_version(self, store: Store) -> None:
        fence = await take(store, 0)
        await commit_one(store, Batch(fence, low_water=Position(5, -6, 7)))
        assert await store.release([fence]) == [None]
        assert (await store.shards())[0] == ShardRow(0, fence.version, low_water=Position(5, -6, 7))
        again = await take(store, 0)
        assert again.version == fence.version + 1

    async def test_low_water_is_replaced_and_kept_by_claims(self, store: Store) -> None:
        fence = await take(store, 0)
        for low_water in (Position(100, -(1 << 63), (1 << 63) - 1), Position(50, 0, 0), BEFORE_ALL, Position(7, 8, 9)):
            await commit_one(store, Batch(fence, low_water=low_water))
            assert (await store.shards())[0].low_water == low_water
        await put(store, fence, make_timer())
        await take(store, 0)
        assert (await store.shards())[0].low_water == Position(7, 8, 9)


def _wrong_fences(fence: Fence) -> list[Fence]:
    return [
        replace(fence, version=fence.version + 1),
        replace(fence, version=fence.version - 1),
        replace(fence, nonce=fence.nonce + 1),
        replace(fence, nonce=-fence.nonce),
        Fence(1, 0, 0),  # free, and never owned
        Fence(SHARDS + 100, 1, 1),  # no such shard
    ]


class Fences(Harness):
    async def test_every_write_with_a_wrong_fence_is_refused_and_leaves_nothing(self, store: Store) -> None:
        fence = await take(store, 0)
        kept, over = make_timer("kept"), make_reached(make_timer("over"), purge_at_ms=5)
        await commit_one(store, Batch(fence, [kept], (), [over]))
        await self.refuses_everything(store, _wrong_fences(fence), kept)

    async def test_a_free_shard_accepts_nothing(self, store: Store) -> None:
        fence = await take(store, 0)
        kept, over = make_timer("kept"), make_reached(make_timer("over"), purge_at_ms=5)
        await commit_one(store, Batch(fence, [kept], (), [over]))
        await store.release([fence])
        await self.refuses_everything(store, [fence, Fence(0, fence.version, 0)], kept)

    async def test_an_earlier_owner_can_write_nothing(self, store: Store) -> None:
        first = await take(store, 0)
        kept = make_timer("kept")
        await put(store, first, kept)
        second = await take(store, 0, owner_id="b")
        await self.refuses_everything(store, [first], kept)
        await put(store, second, make_timer("new"))

    async def refuses_everything(self, store: Store, fences: list[Fence], kept: Timer) -> None:
        before = await contents(store)
        for fence in fences:
            writes = [
                Batch(fence),
                Batch(fence, puts=[make_timer("new")]),
                Batch(fence, puts=[replace(kept, execute_at_ms=1)]),
                Batch(fence, deletes=[kept.key]),
                Batch(fence, reached=[make_reached(make_timer("new"))]),
                Batch(fence, low_water=Position(1, 2, 3)),
                Batch(fence, [make_timer("new")], [kept.key], [make_reached(kept)], Position(1, 2, 3)),
            ]
            for batch in writes:
                [result] = await store.commit([batch])
                assert isinstance(result, ShardLost)
            [released] = await store.release([fence])
            assert isinstance(released, ShardLost)
            [purged] = await store.purge_reached([fence], 1_000, 10)
            assert isinstance(purged, ShardLost)
            assert await contents(store) == before

    async def test_one_lost_batch_does_not_affect_the_others(self, store: Store) -> None:
        fences = [await take(store, shard_id) for shard_id in range(SHARDS)]
        await put(store, fences[2], make_timer("t-2", 5))
        lost = await take(store, 1), fences[1]
        batches = [Batch(fence, [make_timer(f"t-{fence.shard_id}")], low_water=Position(1, 1, 1)) for fence in fences]
        results = await store.commit(batches)
        assert [type(result) for result in results] == [Committed, ShardLost, Committed, Committed]
        assert [result.replaced for result in results if isinstance(result, Committed)] == [set(), {0}, set()]
        assert await all_timers(store, 1) == []
        for shard_id in (0, 2, 3):
            assert await all_timers(store, shard_id) == list(batches[shard_id].puts)
        assert [row.low_water == Position(1, 1, 1) for row in await store.shards()] == [True, False, True, True]
        assert lost[0].version == lost[1].version + 1

    async def test_when_all_batches_are_lost_nothing_is_written(self, store: Store) -> None:
        fences = [await take(store, shard_id) for shard_id in (0, 1)]
        await store.release(fences)
        results = await store.commit([Batch(fence, [make_timer()]) for fence in fences])
        assert [type(result) for result in results] == [ShardLost, ShardLost]
        assert await all_timers(store, 0) == await all_timers(store, 1) == []

    async def test_each_release_has_its_own_result(self, store: Store) -> None:
        one, two = await take(store, 0), await take(store, 1)
        results = await store.release([one, replace(two, nonce=3), Fence(2, 0, 0)])
        assert [type(result) for result in results] == [type(None), ShardLost, ShardLost]
        assert [row.owner_id for row in await store.shards()] == [None, "a", None, None]


class StaleOwners(Harness):
    """Owner A writes while B claims the shard. Whatever the interleaving: all of A's write is applied or nothing, the
    answer says which, and nothing of A is applied after B's claim was acknowledged."""

    STEPS = 24

    async def test_a_write_concurrent_with_a_claim_is_applied_whole_or_refused(
        self, store: Store, other_session: Store
    ) -> None:
        old = await take(store, 0, owner_id="a")
        for step in range(self.STEPS):
            batch = self.batch(old, step)
            write = asyncio.create_task(store.commit([batch]))
            await _run_steps(step, write)
            [row] = await other_session.claim([Claim(0, old.version, -1 - step, "b", "host:2", 1)])
            assert row.nonce == -1 - step
            [late] = await store.commit([Batch(old, [make_timer(f"late-{step}")])])
            assert isinstance(late, ShardLost), "the claim was acknowledged: the old fence is never valid again"
            [result] = await write
            await self.assert_all_or_nothing(store, batch, isinstance(result, Committed))
            old = row.fence

    async def test_queued_writes_are_refused_after_the_claim(self, store: Store, other_session: Store) -> None:
        old = await take(store, 0, owner_id="a")
        for step in range(self.STEPS // 2):
            batches = [self.batch(old, f"{step}.{number}") for number in range(6)]
            writes = [asyncio.create_task(store.commit([batch])) for batch in batches]
            await _run_steps(step, writes[0])
            [row] = await other_session.claim([Claim(0, old.version, -1 - step, "b", "host:2", 1)])
            present = {timer.timer_id for timer in await all_timers(store)}
            results = [(await write)[0] for write in writes]
            for batch, result in zip(batches, results, strict=True):
                await self.assert_all_or_nothing(store, batch, isinstance(result, Committed))
                written = batch.puts[0].timer_id in present
                assert written == isinstance(result, Committed), "nothing was added after the claim was acknowledged"
            old = row.fence

    async def test_a_purge_or_release_concurrent_with_a_claim_is_fenced(
        self, store: Store, other_session: Store
    ) -> None:
        old = await take(store, 0, owner_id="a")
        actions: list[Callable[[Fence], Awaitable[Sequence[object]]]] = [
            lambda fence: store.purge_reached([fence], 1_000, 10),
            lambda fence: store.release([fence]),
        ]
        for step in range(self.STEPS):
            await commit_one(store, Batch(old, reached=[make_reached(make_timer(f"n-{step}"), purge_at_ms=5)]))
            action = asyncio.ensure_future(actions[step % 2](old))
            await _run_steps(step, action)
            [row] = await other_session.claim([Claim(0, old.version, -1 - step, "b", "host:2", 1)])
            assert (row.nonce, row.owner_id) == (-1 - step, "b")
            [outcome] = await action
            assert (await store.shards())[0] == row, "a release by the old owner does not free the new one's shard"
            refused = isinstance(outcome, ShardLost)
            if step % 2 == 0:
                left = [reached.timer.timer_id for reached in await all_reached(store)]
                assert (f"n-{step}" in left) == refused
            old = row.fence
            await store.purge_reached([old], 1_000, 100)

    def batch(self, fence: Fence, name: object) -> Batch:
        timers = [make_timer(f"{name}-{number}", 1_000 + number) for number in range(20)]
        return Batch(fence, timers, (), [make_reached(make_timer(f"{name}-over"))], Position(1, 2, 3))

    async def assert_all_or_nothing(self, store: Store, batch: Batch, committed: bool) -> None:
        found = await store.get_many([(0, item.key) for item in (*batch.puts, batch.reached[0].timer)])
        there = [item.timer is not None or item.reached is not None for item in found]
        assert there == [committed] * len(there)


async def _run_steps(steps: int, task: asyncio.Future[Any]) -> None:
    """Run the event loop for so many steps while the task is not done: from none to very many."""
    for _ in range(steps if steps < 16 else steps * steps):
        if task.done():
            return
        await asyncio.sleep(0)
