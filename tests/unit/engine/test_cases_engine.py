"""Cases of the failure catalogue (docs/concepts/failures.md) that one engine can meet, in virtual time."""

from __future__ import annotations

import asyncio
import runpy
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from engine_world import OK, URL, World, check_accounts, check_nothing_is_left, in_world
from msgspec.structs import replace

from duetime import clock
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import RetryPolicy, State, TimerFilter, TimerKey, TimerPatch, Verdict, shard_of
from duetime.engine.shard import end_of
from duetime.errors import ShardLost
from duetime.store import Batch, Claim, Committed, Listing, ListQuery, Member, Page, PageRequest
from duetime.stores.memory import MemoryStore
from duetime.testing import make_timer
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, VirtualLoop, run_virtual

A = TimerKey("default", "a")
FAILS = AttemptResult(Contact.ANSWERED, 500)


def on_store(
    build: Callable[[VirtualClock], Any], scenario: Callable[[World, Any], Awaitable[None]], **settings: Any
) -> None:
    """Run a scenario in a world on the given store."""

    async def run(clock: VirtualClock) -> None:
        store = build(clock)
        world = World(clock, store, **settings)
        await world.start()
        try:
            await scenario(world, store)
            check_accounts(world.engine)
        finally:
            if isinstance(store, FaultyStore):
                store.heal()
            await world.engine.stop()
        check_nothing_is_left(world.engine)

    run_virtual(run)


def faulty(clock: VirtualClock) -> FaultyStore:
    return FaultyStore(MemoryStore(clock))


class TestTime:
    def test_case_2_after_a_suspension_nothing_is_sent_before_the_lease_is_renewed(self) -> None:
        async def run(awake: VirtualClock) -> None:
            clock = SleepyClock(awake._loop)
            store = FaultyStore(MemoryStore(clock))
            world = World(clock, store.as_store)
            await world.start()
            connecting, connected = asyncio.Event(), asyncio.Event()

            async def connect(attempt: Attempt) -> None:
                connecting.set()
                await connected.wait()

            world.destinations.before_begin = connect
            await world.create("connecting", 100)
            await world.create("armed", 200)
            await asyncio.wait_for(connecting.wait(), 60)
            # The machine sleeps for an hour: its loop and its monotonic clock do not notice.
            answered = store.hold("heartbeat")
            clock.asleep_ms += 3_600_000
            connected.set()
            world.destinations.before_begin = None
            await asyncio.sleep(2)
            assert world.destinations.calls == []
            assert world.service.readiness() is not None
            answered.set()
            await asyncio.sleep(2)
            assert sorted(world.destinations.called()) == ["armed", "connecting"]
            await world.engine.stop()

        run_virtual(run)

    @pytest.mark.skipif(not hasattr(time, "CLOCK_BOOTTIME"), reason="this system has no such clock")
    def test_case_2_leases_hang_on_the_clock_that_goes_on_while_a_machine_is_suspended(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(time, "clock_gettime_ns", {time.CLOCK_BOOTTIME: 5_000_000}.__getitem__)
        module = runpy.run_path(clock.__file__)  # which clock it reads is decided when the module is loaded
        assert module["SystemClock"]().boot_ms() == 5

    def test_case_48_a_wake_up_that_is_lost_costs_a_second_at_most(self, monkeypatch: pytest.MonkeyPatch) -> None:
        async def scenario(world: World) -> None:
            monkeypatch.setattr(world.engine.fire_loop, "_wake_for", lambda due_ms: None)
            due_ms = (await world.create("a", 2_500)).view.timer.execute_at_ms
            await asyncio.sleep(10)
            [(at_ms, _, _)] = world.destinations.calls
            assert due_ms <= at_ms <= due_ms + 1_000

        in_world(scenario)

    def test_case_49_a_blocked_loop_is_measured_and_the_lease_decides_what_it_may_still_send(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, VirtualLoop)
            await world.create("a", 2_000)
            lag = world.engine.telemetry.loop_lag_seconds
            before = lag.sum
            answered = store.hold("heartbeat")
            loop.now += 10  # a computation blocks the event loop for ten seconds
            await asyncio.sleep(1.5)
            assert world.destinations.calls == []
            assert lag.sum - before > 5
            answered.set()
            await asyncio.sleep(1)
            assert world.destinations.called() == ["a"]

        on_store(faulty, scenario)


class SleepyClock(VirtualClock):
    """Both clocks of a machine that was suspended for a while have gone on; the loop's has not."""

    asleep_ms = 0

    def boot_ms(self) -> int:
        return super().boot_ms() + self.asleep_ms

    def wall_ms(self) -> int:
        return super().wall_ms() + self.asleep_ms


class TestOwnership:
    def test_case_4_a_second_unknown_outcome_does_not_claim_a_second_time(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            claims, claimed = store.calls["claim"], store.hold("claim")
            store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
            first = asyncio.ensure_future(world.create("a", 1_000, payload="1"))
            await asyncio.sleep(0.1)
            shard = world.engine.shards[shard_of("a", 16)]
            assert shard.recovering
            world.engine.ownership.recover(shard)
            second = asyncio.ensure_future(world.create("a", 1_000, payload="2"))
            await asyncio.sleep(0.1)
            claimed.set()
            await asyncio.gather(first, second)
            assert store.calls["claim"] == claims + 1
            await asyncio.sleep(5)
            assert world.destinations.payloads == ["2"]

        on_store(faulty, scenario)

    def test_case_4_a_claim_on_its_way_when_its_instance_joins_again_takes_nothing_from_it(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            claimed = store.hold("claim")
            store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
            created = asyncio.ensure_future(world.create("a", 8_000, payload="1"))
            await asyncio.sleep(0.1)
            for member in await world.store.members():
                assert await world.store.mark_dead(member.instance_id, member.counter)
            await asyncio.sleep(2)  # it has joined again, and its new claims wait behind the old one
            claimed.set()
            with pytest.raises(Exception, match="may or may not have been applied"):
                await created
            await asyncio.sleep(20)
            rows = await world.store.shards()
            assert {row.owner_id for row in rows} == {world.engine.membership.instance_id}
            assert {row.fence for row in rows} == {shard.fence for shard in world.engine.shards.values()}
            assert world.destinations.called() == ["a"]

        on_store(faulty, scenario)

    @pytest.mark.parametrize("exclusive", [False, True])
    def test_case_50_before_its_first_heartbeat_got_through_an_instance_claims_and_fires_nothing(
        self, exclusive: bool
    ) -> None:
        async def run(clock: VirtualClock) -> None:
            store = FaultyStore(ExclusiveStore(clock) if exclusive else MemoryStore(clock))
            world = World(clock, store.as_store)
            await world.start()
            await world.create("a", 1_000)
            await world.engine.stop()
            await asyncio.sleep(5)
            world.new_instance()
            store.fail("heartbeat", *[Fault.UNAVAILABLE] * 10)
            await world.start()
            await asyncio.sleep(4)
            assert world.destinations.calls == []
            assert all(row.owner_id is None for row in await world.store.shards())
            assert world.service.readiness() is not None
            await asyncio.sleep(4)
            assert world.destinations.called() == ["a"]
            assert len(world.engine.shards) == 16
            await world.engine.stop()

        run_virtual(run)

    def test_case_51_a_restart_on_the_same_address_is_another_instance_and_its_predecessor_can_write_nothing(
        self,
    ) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 2_000)
            old, old_rows = world.engine.membership, await world.store.shards()
            await world.crash_and_restart()
            assert world.engine.membership.address == old.address
            assert world.engine.membership.instance_id != old.instance_id
            # The predecessor is not marked dead yet, and a shard of a live member is not claimed.
            await asyncio.sleep(2.5)
            assert await world.store.shards() == old_rows
            assert world.destinations.calls == []
            await asyncio.sleep(5)
            assert {row.owner_id for row in await world.store.shards()} == {world.engine.membership.instance_id}
            assert world.destinations.called() == ["a"]
            results = await world.store.commit([Batch(row.fence, [make_timer()]) for row in old_rows])
            assert all(isinstance(result, ShardLost) for result in results)

        in_world(scenario)


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


class TestOverload:
    def test_case_17_after_downtime_what_is_overdue_goes_out_in_order_bounded_paced_and_visibly(self) -> None:
        count, memory, at_once = 10_000, 1_000, 8

        async def scenario(world: World) -> None:
            in_flight = most_in_flight = most_in_memory = 0

            async def answer(attempt: Attempt) -> AttemptResult:
                nonlocal in_flight, most_in_flight
                in_flight += 1
                most_in_flight = max(most_in_flight, in_flight)
                await asyncio.sleep(0.02)
                in_flight -= 1
                return OK

            world.destinations.answers[URL] = answer
            await asyncio.gather(*(world.create(f"{n}", 100_000 + n) for n in range(count)))
            world.engine.abandon()
            await asyncio.sleep(3_600)
            world.new_instance()
            await world.start()
            await asyncio.sleep(8)  # the predecessor is marked dead, and this instance claims
            status = await world.service.cluster_status()
            assert (status.oldest_due_ms or 0) > 3_000_000
            assert status.held > 0
            for _ in range(120):
                await asyncio.sleep(1)
                most_in_memory = max(most_in_memory, world.engine.counters.weight)
            called = [int(timer_id) for timer_id in world.destinations.called()]
            assert sorted(called) == list(range(count))
            assert max(abs(place - number) for place, number in enumerate(called)) < 2 * memory
            assert most_in_flight == at_once
            assert most_in_memory <= 1.1 * memory * 1_024
            assert (await world.service.cluster_status()).oldest_due_ms is None

        in_world(
            scenario,
            engine__writes_waiting_max=2 * count,
            engine__timers_in_memory_max=memory,
            delivery__concurrency_per_flow=at_once,
        )

    @pytest.mark.parametrize("where", ["origin", "connecting", "calling"])
    def test_case_18_a_timer_that_breaks_its_handler_has_failed_and_the_others_fire(
        self, where: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async def scenario(world: World) -> None:
            async def broken(attempt: Attempt) -> AttemptResult:
                raise ZeroDivisionError

            async def before_begin(attempt: Attempt) -> None:
                if attempt.timer.timer_id == "a":
                    raise ZeroDivisionError

            def origin(url: str) -> str:
                if "poison" in url:
                    raise ZeroDivisionError
                return url

            if where == "origin":
                monkeypatch.setattr(world.destinations, "origin", origin)
            elif where == "connecting":
                world.destinations.before_begin = before_begin
            else:
                world.destinations.answers["http://poison.test/"] = broken
            policy = RetryPolicy(max_retries=2, initial_interval_ms=100, max_interval_ms=100)
            due = [(await world.create(f"t{n}", 1_000)).view.timer.execute_at_ms for n in range(10)]
            await world.create("a", 1_000, callback_url="http://poison.test/", retry_policy=policy)
            due += [(await world.create(f"u{n}", 1_000)).view.timer.execute_at_ms for n in range(10)]
            await asyncio.sleep(30)
            assert [at for at, timer_id, _ in world.destinations.calls if timer_id != "a"] == due
            view = await world.get("a")
            assert (view.state, view.timer.attempts) == (State.FAILED, 3)
            assert "ZeroDivisionError" in (view.timer.extras.last_error or "")

        in_world(scenario)

    def test_case_20_timers_that_failed_together_are_not_tried_again_together(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                return FAILS if attempt.timer.attempts == 0 else OK

            world.destinations.answers[URL] = answer
            policy = RetryPolicy(max_retries=3, initial_interval_ms=10_000, max_interval_ms=10_000)
            await asyncio.gather(*(world.create(f"t{n}", 1_000, retry_policy=policy) for n in range(400)))
            await asyncio.sleep(30)
            first = [at for at, _, attempt in world.destinations.calls if attempt == 1]
            again = [at - max(first) for at, _, attempt in world.destinations.calls if attempt == 2]
            assert len(again) == 400
            by_second = [sum(1_000 * s <= at < 1_000 * (s + 1) for at in again) for s in range(10)]
            assert sum(by_second) >= 390
            assert max(by_second) < 80, by_second

        in_world(scenario, delivery__breaker_failures=1_000)

    @pytest.mark.parametrize("asked_ms", [20_000])
    def test_case_20_a_destination_that_asks_for_time_gets_it(self, asked_ms: int) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                return (
                    AttemptResult(Contact.ANSWERED, 503, retry_after_ms=asked_ms) if attempt.timer.attempts == 0 else OK
                )

            world.destinations.answers[URL] = answer
            policy = RetryPolicy(max_retries=3, initial_interval_ms=1, max_interval_ms=1)
            await world.create("a", 1_000, retry_policy=policy)
            await asyncio.sleep(60)
            (first, _, _), (second, _, _) = world.destinations.calls
            assert second - first >= asked_ms

        in_world(scenario)


class TestRaces:
    def test_case_22_a_crash_between_delivery_and_settling_repeats_it_with_the_same_id(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            ids: list[str] = []

            async def answer(attempt: Attempt) -> AttemptResult:
                ids.append(attempt.timer.delivery_id)
                return OK

            world.destinations.answers[URL] = answer
            await world.create("a", 100)
            written = store.hold("commit")
            await asyncio.sleep(1)
            assert len(ids) == 1
            await world.crash_and_restart()
            written.set()
            await asyncio.sleep(10)
            assert len(ids) == 2
            assert ids[0] == ids[1]
            assert (await world.get("a")).state is State.DELIVERED

        on_store(faulty, scenario)

    @pytest.mark.parametrize("moment", ["queued", "in flight", "settling"])
    def test_case_28_an_upsert_that_meets_a_fire_survives_it(self, moment: str) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            reached, go_on = asyncio.Event(), asyncio.Event()

            async def pause(attempt: Attempt) -> None:
                if attempt.timer.payload == '"old"':
                    reached.set()
                    await go_on.wait()

            async def answer(attempt: Attempt) -> AttemptResult:
                if moment == "in flight":
                    await pause(attempt)
                reached.set()
                return OK

            if moment == "queued":
                world.destinations.before_begin = pause
            world.destinations.answers[URL] = answer
            await world.create("a", 100, payload='"old"')
            written = store.hold("commit")
            if moment != "settling":
                written.set()
            await asyncio.wait_for(reached.wait(), 60)
            await asyncio.sleep(0.05)
            created = asyncio.ensure_future(world.create("a", 5_000, payload='"new"'))
            await asyncio.sleep(0.05)
            written.set()
            go_on.set()
            assert (await created).replaced == (moment != "settling")
            await asyncio.sleep(1)
            assert (await world.get("a")).state is State.SCHEDULED
            await asyncio.sleep(10)
            assert world.destinations.payloads == (['"new"'] if moment == "queued" else ['"old"', '"new"'])
            assert (await world.get("a")).state is State.DELIVERED

        on_store(faulty, scenario)

    def test_case_29_a_delete_that_meets_a_fire_tells_the_truth_at_whatever_moment_it_comes(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(0.004)
                return OK

            async def connect(attempt: Attempt) -> None:
                await asyncio.sleep(0.003)

            world.destinations.answers[URL] = answer
            world.destinations.before_begin = connect
            seen: set[Verdict] = set()
            for moment_ms in range(-2, 12):
                key = TimerKey("default", f"t{moment_ms}")
                due_ms = (await world.create(key.timer_id, 100)).view.timer.execute_at_ms
                await asyncio.sleep((due_ms + moment_ms - world.clock.wall_ms()) / 1_000)
                fired_before = key.timer_id in world.destinations.called()
                verdict = await world.service.delete(key)
                seen.add(verdict)
                await asyncio.sleep(5)
                fired = key.timer_id in world.destinations.called()
                assert fired == fired_before == (verdict is not Verdict.CANCELLED)
            assert seen == {Verdict.CANCELLED, Verdict.IN_FLIGHT, Verdict.ALREADY_REACHED}

        in_world(scenario)

    def test_case_31_an_upsert_sent_twice_is_one_timer(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 1_000, payload="1")
            await world.create("a", 1_000, payload="1")
            await asyncio.sleep(5)
            assert world.destinations.payloads == ["1"]

        in_world(scenario)


class SlowPages(MemoryStore):
    """Reads a page, and returns it when the test says so: what is written in between is not on it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.delivered = asyncio.Event()
        self.delivered.set()
        self.read: asyncio.Queue[int] = asyncio.Queue()

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        pages = await super().load(requests)
        read = [request.shard_id for request, page in zip(requests, pages, strict=True) if page.timers]
        if read and not self.delivered.is_set():
            for shard_id in read:
                self.read.put_nowait(shard_id)
            await self.delivered.wait()
        return pages


class GappyPages(MemoryStore):
    """Every other page is empty and not the end, as with stores that filter what they have read."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.empty = 0

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        pages = await super().load([replace(request, limit=3) for request in requests])
        return [self._gappy(request, page) for request, page in zip(requests, pages, strict=True)]

    def _gappy(self, request: PageRequest, page: Page) -> Page:
        if page.timers and (gap := end_of(page.timers[0].execute_at_ms - 1)) > request.after:
            self.empty += 1
            return Page((), gap)
        return page

    async def list_timers(self, query: ListQuery) -> Listing:
        listing = await super().list_timers(query)
        first: Sequence[Any] = listing.timers or listing.reached
        if first and (gap := end_of(first[0].position.execute_at_ms - 1)) > query.after:
            self.empty += 1
            return Listing(next=gap)
        return listing


class TestPages:
    def test_case_46_a_page_read_before_a_commit_does_not_undo_it(self) -> None:
        async def scenario(world: World, store: SlowPages) -> None:
            for name in ("deleted", "updated", "replaced", "moved", "left"):
                await world.create(name, 70_000, payload='"old"')
            store.delivered.clear()
            await asyncio.wait_for(store.read.get(), 60)
            assert await world.service.delete(TimerKey("default", "deleted")) is Verdict.CANCELLED
            await world.service.update(TimerKey("default", "updated"), TimerPatch(payload='"new"'))
            await world.create("replaced", 40_000, payload='"new"')
            await world.service.update(TimerKey("default", "moved"), TimerPatch(delay_ms=3_600_000))
            await world.create("created", 40_000, payload='"new"')
            store.delivered.set()
            await asyncio.sleep(300)
            fired = dict(zip(world.destinations.called(), world.destinations.payloads, strict=True))
            assert fired == {"updated": '"new"', "replaced": '"new"', "created": '"new"', "left": '"old"'}
            assert len(world.destinations.calls) == 4
            assert (await world.get("moved")).state is State.SCHEDULED

        on_store(SlowPages, scenario, namespaces__default_num_shards=1)

    def test_case_47_an_empty_page_is_not_the_end(self) -> None:
        async def scenario(world: World, store: GappyPages) -> None:
            names = [f"t{n}" for n in range(60)]
            created = await asyncio.gather(*(world.create(name, 100_000 + n * 500) for n, name in enumerate(names)))
            listed: list[str] = []
            cursor: str | None = None
            pages = 0
            while pages == 0 or cursor is not None:
                views, cursor = await world.service.list_timers(
                    TimerFilter(namespace="default", limit=7, cursor=cursor)
                )
                listed += [view.timer.timer_id for view in views]
                pages += 1
            assert listed == names
            await asyncio.sleep(600)
            assert [(at, name) for at, name, _ in world.destinations.calls] == [
                (item.view.timer.execute_at_ms, item.view.timer.timer_id) for item in created
            ]
            assert store.empty > 30

        on_store(GappyPages, scenario)


def test_case_38_what_is_over_the_stores_limit_is_split_and_each_part_is_fenced() -> None:
    async def scenario(world: World, store: SmallBatches) -> None:
        results = await asyncio.gather(*(world.create(f"t{n}", 60_000) for n in range(50)))
        assert len(results) == 50
        assert max(store.sizes) <= SmallBatches.capabilities.batch_max
        await store.join(Member("another", "elsewhere", 0, True, 0))
        claims = [Claim(row.shard_id, row.version, 7, "another", "elsewhere", 0) for row in await store.shards()]
        parts = len(store.sizes)
        store.before_part = (parts + 2, lambda: store.claim(claims))
        answers = await asyncio.gather(*(world.create(f"u{n}", 60_000) for n in range(50)), return_exceptions=True)
        kept = [f"u{n}" for n, result in enumerate(answers) if not isinstance(result, Exception)]
        assert 0 < len(kept) < 50, "some parts were committed before the claim and some after"
        found = await store.get_many([(shard_of(f"u{n}", 16), TimerKey("default", f"u{n}")) for n in range(50)])
        assert [item.timer.timer_id for item in found if item.timer is not None] == kept

    on_store(SmallBatches, scenario)


def test_case_38_a_commit_is_bounded_by_the_size_of_its_payloads_too() -> None:
    async def scenario(world: World, store: LightBatches) -> None:
        payload = '"' + "x" * 300 + '"'
        results = await asyncio.gather(*(world.create(f"t{n}", 60_000, payload=payload) for n in range(60)))
        large = await world.create("large", 60_000, payload='"' + "x" * 5_000 + '"')
        assert len(results) == 60
        assert large.view.timer.payload is not None, "what is larger than a whole batch goes alone"
        assert max(chars for chars, count in store.parts if count > 1) < 1_000 + 310
        assert len(store.parts) > 10

    on_store(LightBatches, scenario)


def test_case_38_the_end_of_a_timer_is_two_rows_of_a_commit() -> None:
    async def scenario(world: World, store: SmallBatches) -> None:
        await asyncio.gather(*(world.create(f"t{n}", 1_000) for n in range(50)))
        store.sizes.clear()
        await asyncio.sleep(10)
        assert len(world.destinations.called()) == 50
        assert sum(store.sizes) == 100
        assert max(store.sizes) <= SmallBatches.capabilities.batch_max + 1, "the last timer of a batch is not split"

    on_store(SmallBatches, scenario)


class LightBatches(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, batch_chars_max=1_000)

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.parts: list[tuple[int, int]] = []

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        puts = [timer for batch in batches for timer in batch.puts]
        self.parts.append((sum(len(timer.payload or "") for timer in puts), len(puts)))
        return await super().commit(batches)


class SmallBatches(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, batch_max=7)

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.sizes: list[int] = []
        self.before_part: tuple[int, Callable[[], Awaitable[object]]] = (-1, lambda: asyncio.sleep(0))

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        self.sizes.append(sum(len(batch.puts) + len(batch.deletes) + len(batch.reached) for batch in batches))
        at, act = self.before_part
        if len(self.sizes) == at:
            await act()
        return await super().commit(batches)


def test_case_53_what_a_later_version_added_survives_updates_retries_and_replays() -> None:
    async def scenario(world: World) -> None:
        key, later = TimerKey("default", "a"), {"y": [1, {"deep": "value"}]}
        await world.create("a", 60_000, tags=("t",))
        [found] = await world.store.get_many([(shard_of("a", 16), key)])
        assert found.timer is not None
        newer = replace(found.timer, extras=replace(found.timer.extras, later=later), generation=1 << 60)
        shard = world.engine.shards[shard_of("a", 16)]
        await shard.write(key, newer, [])  # as if the instance of a newer version had written it

        async def later_now() -> object:
            return (await world.get("a")).timer.extras.later

        await world.service.update(key, TimerPatch(payload="1", tags=("u",)))
        assert await later_now() == later
        world.destinations.answers[URL] = fails
        await world.service.fire_now(key)
        await asyncio.sleep(5)
        assert (await world.get("a")).timer.attempts > 0
        assert await later_now() == later
        del world.destinations.answers[URL]
        await asyncio.sleep(3_600)
        assert (await world.get("a")).state is State.DELIVERED
        await world.service.replay(key)
        assert await later_now() == later

    in_world(scenario)


async def fails(_: Attempt) -> AttemptResult:
    return FAILS
