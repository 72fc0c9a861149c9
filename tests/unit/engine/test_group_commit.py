"""Group commit: first with real shards and a store that answers as the test says, without an engine; then in an engine,
on databases where the batches of a commit are independent of each other."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from engine_world import World, in_world
from msgspec.structs import replace

from duetime.clock import Clock
from duetime.domain.timer import State, TimerKey, shard_of
from duetime.engine.counters import Counters
from duetime.engine.group_commit import BatchedReader, GroupCommit
from duetime.engine.pending_write import WriteResult
from duetime.engine.shard import Entry, Shard, end_of
from duetime.errors import (
    NotFound,
    NotOwner,
    OutcomeUnknown,
    ShardLost,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from duetime.store import Batch, Committed, Found, Page, PageRequest, ShardRow, Store
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing import make_timer
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import START_WALL_MS, VirtualClock, run_virtual

FAR_MS = START_WALL_MS + 1_000_000_000
Answers = Sequence[Committed | StoreError]


class Harness:
    """A group commit, its shards, and what they need of an engine and a store."""

    def __init__(self, clock: VirtualClock, shards: int, **capabilities: Any) -> None:
        self.clock = clock
        self.capabilities = replace(MemoryStore.capabilities, **capabilities)
        self.commits: list[dict[int, int]] = []  # of each: how many puts of which shard
        self.batches: list[Batch] = []
        self.at: list[float] = []
        self.answers: list[StoreError | Answers | None] = []  # of the next commits; None, or none: applied
        self.poison = ""
        self.seconds = 0.0
        self.lost: list[int] = []
        self.unknown: list[int] = []
        self.told_committed = 0
        self.counters = Counters(writes_waiting_max=100_000)
        self.running: asyncio.Future[None] | None = None
        self.telemetry = Telemetry()
        self.group_commit = GroupCommit(
            cast(Store, self),
            clock,
            self.telemetry,
            on_lost=lambda shard: self.lost.append(shard.shard_id),
            on_unknown=self._unknown,
            on_committed=self._committed,
        )
        self.shards = [Shard(ShardRow(number, 1, 1, "me"), self) for number in range(shards)]

    async def commit(self, batches: Sequence[Batch]) -> Answers:
        self.commits.append({batch.fence.shard_id: len(batch.puts) for batch in batches})
        self.batches += batches
        self.at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.seconds)
        answer = self.answers.pop(0) if self.answers else None
        if self.poison and any(put.timer_id == self.poison for batch in batches for put in batch.puts):
            raise StoreUnavailable("poison")
        if isinstance(answer, StoreError):
            raise answer
        return [Committed() for _ in batches] if answer is None else answer

    def _unknown(self, shard: Shard) -> None:
        self.unknown.append(shard.shard_id)
        shard.start_recovery()

    def _committed(self) -> None:
        self.told_committed += 1

    def arm(self, entry: Entry) -> None: ...
    def disarm(self, entry: Entry) -> None: ...
    def discard(self, entry: Entry) -> None: ...
    def add_weight(self, weight: int) -> None: ...

    def enqueue(self, shard: Shard) -> None:
        self.group_commit.enqueue(shard)

    def boot_ms(self) -> int:
        return self.clock.boot_ms()

    def put(self, shard: int, name: str = "a", at_ms: int = FAR_MS, **changes: Any) -> asyncio.Future[WriteResult]:
        timer = make_timer(name, at_ms, **changes)
        return self.shards[shard].write(timer.key, timer, [])

    def puts(self, shard: int, count: int) -> list[asyncio.Future[WriteResult]]:
        return [self.put(shard, f"t{number}") for number in range(count)]


def with_harness(scenario: Callable[[Harness], Awaitable[None]], shards: int = 3, **capabilities: Any) -> None:
    async def run(clock: VirtualClock) -> None:
        harness = Harness(clock, shards, **capabilities)
        running = harness.running = asyncio.ensure_future(harness.group_commit.run())
        await asyncio.sleep(0)
        try:
            await scenario(harness)
        finally:
            running.cancel()
        assert harness.counters.writes_waiting == sum(
            len(shard.pending) + len(shard.committing) for shard in harness.shards
        )

    run_virtual(run)


class TestBatching:
    def test_writes_that_arrive_together_are_committed_together_and_later_ones_with_the_next_commit(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 1
            first = [harness.put(0), harness.put(1), harness.put(0, "b")]
            await asyncio.sleep(0.5)
            second = [harness.put(2), harness.put(0)]
            await asyncio.gather(*first, *second)
            assert harness.commits == [{0: 2, 1: 1}, {2: 1, 0: 1}]
            assert harness.at == [0, 1]
            assert harness.told_committed == 2
            await asyncio.sleep(10)
            assert len(harness.commits) == 2
            assert not harness.group_commit._wake.is_set(), "it waits, and does not turn in circles"

        with_harness(scenario)

    def test_a_commit_is_limited_by_rows_and_the_next_one_goes_on_where_it_stopped(self) -> None:
        async def scenario(harness: Harness) -> None:
            asked = [*harness.puts(0, 3), *harness.puts(1, 3), *harness.puts(2, 1)]
            await asyncio.gather(*asked)
            assert harness.commits == [{0: 3, 1: 2}, {2: 1, 1: 1}]

        with_harness(scenario, batch_max=5)

    def test_a_shard_that_has_more_than_a_batch_takes_turns_with_the_others(self) -> None:
        async def scenario(harness: Harness) -> None:
            asked = [*harness.puts(0, 12), *harness.puts(1, 2)]
            await asyncio.gather(*asked)
            assert harness.commits == [{0: 5}, {1: 2, 0: 3}, {0: 4}]

        with_harness(scenario, batch_max=5)

    def test_a_commit_is_limited_by_characters(self) -> None:
        async def scenario(harness: Harness) -> None:
            asked = [harness.put(shard, f"t{n}", payload="x" * 1_000) for shard in range(3) for n in range(2)]
            await asyncio.gather(*asked)
            assert harness.commits == [{0: 2, 1: 1}, {2: 2, 1: 1}]

        with_harness(scenario, batch_chars_max=3_000)

    def test_a_shard_that_cannot_commit_now_is_skipped(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put(0)
            second = harness.put(1)
            harness.shards[0].start_recovery()
            await second
            assert harness.commits == [{1: 1}]

        with_harness(scenario)


class TestLowWater:
    def test_it_is_raised_with_a_commit_of_each_shard_every_ten_seconds(self) -> None:
        async def scenario(harness: Harness) -> None:
            async def low_water_after(shard_id: int, second: int) -> Any:
                shard = harness.shards[shard_id]
                shard.begin_load(START_WALL_MS + second)
                shard.end_load(Page([], None), 0)
                await harness.put(shard_id)
                return harness.batches[-1].low_water

            assert await low_water_after(0, 1) == end_of(START_WALL_MS)
            assert harness.shards[0].low_water == end_of(START_WALL_MS)
            assert await low_water_after(1, 1) == end_of(START_WALL_MS)
            await asyncio.sleep(9.999)
            assert await low_water_after(0, 2) is None
            await asyncio.sleep(0.001)
            assert await low_water_after(0, 3) == end_of(START_WALL_MS + 2)
            await asyncio.sleep(9.999)
            assert await low_water_after(0, 4) is None

        with_harness(scenario)


class TestFailures:
    def test_a_commit_of_several_shards_that_fails_is_tried_shard_by_shard(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            await asyncio.gather(harness.put(0), harness.put(1), harness.put(2))
            assert harness.commits == [{0: 1, 1: 1, 2: 1}, {0: 1}, {1: 1}, {2: 1}]
            assert harness.at == [0, 0, 0, 0], "at once: only one of them may be the reason"
            await asyncio.gather(harness.put(0), harness.put(1), harness.put(2))
            assert harness.commits[4:] == [{0: 1, 1: 1, 2: 1}], "and together again once that worked"
            assert len(harness.group_commit._alone) == 0

        with_harness(scenario)

    def test_a_shard_that_is_tried_alone_is_committed_without_others_before_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            harness.seconds = 0.01
            asked = [harness.put(0), harness.put(1)]
            await asyncio.sleep(0.005)
            asked.append(harness.put(2))
            await asyncio.gather(*asked)
            assert harness.commits == [{0: 1, 1: 1}, {2: 1}, {0: 1}, {1: 1}]

        with_harness(scenario)

    def test_a_shard_that_is_tried_alone_is_committed_without_others_after_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            harness.seconds = 0.01
            asked = [harness.put(0), harness.put(1)]
            await asyncio.sleep(0.015)
            asked.append(harness.put(2))
            await asyncio.gather(*asked)
            assert harness.commits == [{0: 1, 1: 1}, {0: 1}, {1: 1}, {2: 1}]

        with_harness(scenario)

    def test_a_shard_that_fails_alone_is_paused_longer_each_time_up_to_a_second(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.poison = "a"
            harness.put(0)
            await asyncio.sleep(4)
            pauses = [round(after - before, 6) for before, after in zip(harness.at, harness.at[1:], strict=False)]
            assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1, 1]
            assert harness.group_commit._failure_log.reason == "poison"
            harness.poison = ""
            await asyncio.sleep(1)
            assert harness.shards[0].is_quiet
            assert harness.group_commit._failure_log.reason == ""
            harness.poison = "a"
            harness.at.clear()
            harness.put(0)
            await asyncio.sleep(0.03)
            assert [round(b - a, 6) for a, b in zip(harness.at, harness.at[1:], strict=False)] == [0.02], (
                "from the start"
            )

        with_harness(scenario)

    def test_a_paused_shard_is_not_tried_whatever_is_written(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            harness.put(0)
            await asyncio.sleep(0.01)
            harness.put(0, "b")
            other = harness.put(1)
            await other
            assert harness.commits == [{0: 1}, {1: 1}]
            await asyncio.sleep(0.02)
            assert harness.commits[2] == {0: 1}, "half of what failed"
            assert harness.commits[3:] == [{0: 1}]

        with_harness(scenario)

    def test_a_paused_shard_is_not_tried_if_it_was_written_while_the_commit_was_in_flight(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 0.01
            harness.answers = [StoreUnavailable("no")]
            harness.put(0)
            await asyncio.sleep(0.005)
            await harness.put(0, "b")
            assert harness.at[1] == pytest.approx(0.03)

        with_harness(scenario)

    def test_of_two_shards_the_one_that_is_not_the_reason_waits_only_a_little(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.poison = "a"
            harness.put(0, "a")
            await harness.put(0, "b")
            assert harness.at == [0, pytest.approx(0.02), pytest.approx(0.04)]

        with_harness(scenario)

    def test_a_failed_batch_is_halved_until_the_reason_is_found_and_grows_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.poison = "t15"
            asked = harness.puts(0, 16)
            await asyncio.sleep(0.15)
            assert [future.done() for future in asked] == [True] * 15 + [False]
            sizes = [commit[0] for commit in harness.commits]
            assert sizes[:2] == [16, 8]
            assert harness.at[1] == pytest.approx(0.02), "a moment's rest"
            assert max(harness.at[: sizes.index(1) + 1]) < 0.15, "and no longer while it can be halved"
            harness.poison = ""
            await asyncio.gather(*asked)
            harness.commits.clear()
            for _ in range(6):
                await asyncio.gather(*harness.puts(0, 20))
            assert [commit[0] for commit in harness.commits][-1] == 20
            assert len(harness.group_commit._rows_max) == 0

        with_harness(scenario, batch_max=20)

    def test_the_rows_of_a_batch_double_with_each_success(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            asked = harness.puts(0, 16)
            await asyncio.gather(*asked)
            assert [commit[0] for commit in harness.commits] == [16, 8, 8]
            assert harness.group_commit._rows_max == {}
            harness.commits.clear()
            harness.answers = [StoreUnavailable("no"), StoreUnavailable("no"), StoreUnavailable("no")]
            await asyncio.gather(*harness.puts(0, 16))
            assert [commit[0] for commit in harness.commits] == [16, 8, 4, 2, 4, 8, 2]

        with_harness(scenario, batch_max=16)

    def test_a_batch_of_one_write_is_not_halved_to_none(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no"), StoreUnavailable("no")]
            await harness.put(0)
            assert harness.commits == [{0: 1}] * 3

        with_harness(scenario)

    def test_a_throttled_shard_is_paused_also_if_it_was_not_alone(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreThrottled("slow down")]
            await asyncio.gather(harness.put(0), harness.put(1))
            assert harness.at[0] == 0
            assert harness.at[1] == pytest.approx(0.02)

        with_harness(scenario)

    def test_each_batch_of_a_commit_has_its_own_result(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [[Committed(), StoreUnavailable("no"), OutcomeUnknown("who knows")]]
            asked = [harness.put(0), harness.put(1), harness.put(2)]
            await asked[0]
            assert harness.told_committed == 1
            assert not asked[1].done()
            assert harness.unknown == [2]
            assert harness.shards[2].committing
            await asked[1]
            assert harness.commits == [{0: 1, 1: 1, 2: 1}, {1: 1}]
            assert harness.at[1] == pytest.approx(0.02)

        with_harness(scenario)

    def test_an_unknown_outcome_is_recovered_and_not_tried_again_by_itself(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [OutcomeUnknown("who knows")]
            writing = harness.put(0)
            await asyncio.sleep(5)
            assert harness.unknown == [0]
            assert harness.group_commit._failure_log.reason == "", "that is for refused ones"
            assert len(harness.commits) == 1
            assert harness.told_committed == 0
            key = TimerKey("test", "a")
            harness.shards[0].finish_recovery(ShardRow(0, 2, 2, "me"), {key: Found()})
            await writing
            assert len(harness.commits) == 2

        with_harness(scenario)

    def test_a_refused_shard_is_lost_and_the_others_are_committed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [[ShardLost(), Committed()]]
            first, second = harness.put(0), harness.put(1)
            await second
            assert harness.lost == [0]
            assert not first.done()
            assert harness.shards[0].committing, "dropping the shard answers the callers"
            assert harness.told_committed == 1

        with_harness(scenario)

    def test_a_store_that_does_not_answer_for_every_batch_is_an_internal_error(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [[Committed()]]
            harness.put(0)
            harness.put(1)
            await asyncio.sleep(1)
            assert harness.running is not None
            assert isinstance(harness.running.exception(), ValueError)

        with_harness(scenario)

    def test_a_result_for_a_shard_that_was_dropped_meanwhile_is_ignored(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 1
            harness.answers = [[StoreUnavailable("no"), Committed()]]
            first, second = harness.put(0), harness.put(1)
            await asyncio.sleep(0.5)
            harness.shards[0].drop(NotOwner())
            assert isinstance(first.exception(), NotOwner)
            await second
            await asyncio.sleep(5)
            assert len(harness.commits) == 1

        with_harness(scenario)

    def test_a_closing_shard_still_gets_the_result_of_its_commit(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 1
            harness.answers = [StoreUnavailable("no")]
            writing = harness.put(0)
            await asyncio.sleep(0.5)
            harness.shards[0].close()
            await writing
            assert len(harness.commits) == 2
            assert harness.shards[0].is_quiet

        with_harness(scenario)

    def test_a_shard_that_was_dropped_meanwhile_is_not_lost_once_more(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 1
            harness.answers = [[ShardLost(), OutcomeUnknown(), Committed()]]
            harness.put(0)
            harness.put(1)
            third = harness.put(2)
            await asyncio.sleep(0.5)
            for shard in harness.shards[:2]:
                shard.drop(NotOwner())
            await third
            assert (harness.lost, harness.unknown) == ([], [])

        with_harness(scenario)

    def test_a_shard_that_was_dropped_while_it_was_paused_is_not_enqueued_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            writing = harness.put(0)
            await asyncio.sleep(0.01)
            harness.shards[0].drop(NotOwner())
            assert writing.done()
            await asyncio.sleep(1)
            assert len(harness.commits) == 1
            assert len(harness.group_commit._paused) == 0

        with_harness(scenario)

    def test_a_paused_shard_without_pending_writes_is_not_enqueued_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.answers = [StoreUnavailable("no")]
            harness.put(0)
            await asyncio.sleep(0.01)
            harness.shards[0].expire(harness.clock.boot_ms() + 1)
            await asyncio.sleep(1)
            assert len(harness.commits) == 1
            await harness.put(0)
            assert len(harness.commits) == 2

        with_harness(scenario)


class ReadStore:
    def __init__(self) -> None:
        self.calls: list[int] = []
        self.error: Exception | None = None

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        self.calls.append(len(keys))
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error
        return [Found(make_timer(key.timer_id, shard_id)) for shard_id, key in keys]


class TestBatchedReader:
    def test_keys_asked_for_in_one_iteration_of_the_loop_are_read_in_one_call(self) -> None:
        async def scenario(clock: VirtualClock) -> None:
            shelf = ReadStore()
            lookup = BatchedReader(cast(Store, shelf))
            keys = [(shard_id, TimerKey("test", name)) for shard_id in (1, 2) for name in ("a", "b", "a")]
            found = await asyncio.gather(*(lookup.find(*key) for key in keys))
            assert shelf.calls == [4], "each key once"
            assert [(f.timer.execute_at_ms, f.timer.key) for f in found if f.timer] == keys
            await lookup.find(*keys[0])
            assert shelf.calls == [4, 1]
            await asyncio.sleep(0)
            assert not lookup._tasks

        run_virtual(scenario)

    def test_a_read_in_flight_is_referenced_so_that_it_is_not_garbage_collected(self) -> None:
        async def scenario(clock: VirtualClock) -> None:
            lookup = BatchedReader(cast(Store, ReadStore()))
            asked = [asyncio.ensure_future(lookup.find(1, TimerKey("test", name))) for name in "aab"]
            await asyncio.sleep(0)
            assert len(lookup._tasks) == 1, "one for all"
            await asyncio.sleep(0.5)
            assert len(lookup._tasks) == 1
            await asyncio.gather(*asked)

        run_virtual(scenario)

    def test_a_key_asked_for_while_a_read_is_in_flight_is_read_again(self) -> None:
        async def scenario(clock: VirtualClock) -> None:
            shelf = ReadStore()
            lookup = BatchedReader(cast(Store, shelf))
            first = asyncio.ensure_future(lookup.find(1, TimerKey("test", "a")))
            await asyncio.sleep(0.5)
            second = asyncio.ensure_future(lookup.find(1, TimerKey("test", "a")))
            await asyncio.gather(first, second)
            assert shelf.calls == [1, 1]

        run_virtual(scenario)

    def test_five_hundred_keys_are_read_at_a_time(self) -> None:
        async def scenario(clock: VirtualClock) -> None:
            shelf = ReadStore()
            lookup = BatchedReader(cast(Store, shelf))
            found = await asyncio.gather(*(lookup.find(n, TimerKey("test", f"t{n}")) for n in range(1_200)))
            assert shelf.calls == [500, 500, 200]
            assert [f.timer.execute_at_ms for f in found if f.timer] == list(range(1_200))

        run_virtual(scenario)

    def test_an_error_is_given_to_every_caller_and_a_cancelled_caller_does_not_matter(self) -> None:
        async def scenario(clock: VirtualClock) -> None:
            shelf = ReadStore()
            lookup = BatchedReader(cast(Store, shelf))
            asked = [asyncio.ensure_future(lookup.find(1, TimerKey("test", name))) for name in "aab"]
            await asyncio.sleep(0.5)
            asked[0].cancel()
            await asyncio.wait(asked)
            assert asked[0].cancelled()
            assert asked[1].result().timer == make_timer("a", 1)
            assert asked[2].result().timer == make_timer("b", 1)
            shelf.error = ZeroDivisionError()
            asked = [asyncio.ensure_future(lookup.find(1, TimerKey("test", name))) for name in "aab"]
            await asyncio.sleep(0.5)
            asked[0].cancel()
            await asyncio.wait(asked)
            assert [type(future.exception()) for future in asked[1:]] == [ZeroDivisionError] * 2

        run_virtual(scenario)


# --- in an engine --------------------------------------------------------------------------------

REFUSED, UNKNOWN, FINE = 1, 2, 3


def name_in(shard: int, number: int = 0) -> str:
    return [name for n in range(1_000) if shard_of(name := f"t{n}", 16) == shard][number]


class Torn(MemoryStore):
    """Refuses the batch of shard 1, and applies that of shard 2 with an unknown outcome, `times` times."""

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.times = 0
        self.torn: list[list[int]] = []

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:  # type: ignore[override]
        shard_ids = [batch.fence.shard_id for batch in batches]
        if not self.times or not {REFUSED, UNKNOWN} & set(shard_ids):
            return list(await super().commit(batches))
        self.times -= 1
        self.torn.append(shard_ids)
        results: list[Committed | StoreError] = []
        for batch in batches:
            if batch.fence.shard_id == REFUSED:
                results.append(StoreThrottled("slow down"))
                continue
            [result] = await super().commit([batch])
            results.append(OutcomeUnknown("who knows") if batch.fence.shard_id == UNKNOWN else result)
        return results


def test_a_refused_batch_is_tried_again_one_of_unknown_outcome_is_recovered_and_the_others_are_done() -> None:
    names = [name_in(shard, number) for shard in (REFUSED, UNKNOWN, FINE) for number in range(2)]

    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        before = {shard_id: shard.fence for shard_id, shard in world.engine.shards.items()}
        store.times = 1
        await asyncio.gather(*(world.create(name, 1_000) for name in names))
        assert store.torn == [[REFUSED, UNKNOWN, FINE]]
        after = {shard_id: shard.fence for shard_id, shard in world.engine.shards.items()}
        assert {shard for shard in before if before[shard] != after[shard]} == {UNKNOWN}, "claimed again, and no other"
        assert world.engine.telemetry.commits.by_label["unknown"] == 1
        await asyncio.sleep(5)
        assert sorted(world.destinations.called()) == sorted(names)
        for name in names:
            assert (await world.get(name)).state is State.DELIVERED

    in_world(scenario, new_store=Torn)


def test_a_shard_whose_batches_are_refused_for_long_is_not_lost_and_only_its_own_timers_wait() -> None:
    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        store.times = 1_000_000
        fence = world.engine.shards[REFUSED].fence
        waits = asyncio.ensure_future(world.create(name_in(REFUSED), 1_000))
        started_ms = world.clock.boot_ms()
        for number in range(20):
            await world.create(name_in(FINE, number), 1_000)
            assert world.clock.boot_ms() - started_ms < 100, "they do not wait for it"
        with pytest.raises(StoreUnavailable, match="slow down"):
            await waits
        assert len(store.torn) < 20, "it backs off"
        store.times = 0
        await world.create(name_in(REFUSED, 1), 0)
        await asyncio.sleep(3)
        assert len(world.destinations.called()) == 21, "what was not applied stays so"
        assert world.engine.shards[REFUSED].fence == fence
        assert world.engine.telemetry.shards_lost.value == 0

    in_world(scenario, new_store=Torn)


class Poisoned(MemoryStore):
    """Refuses, for ever, every commit that has the timer "poison" in it, with the error `how`."""

    how: StoreError = StoreUnavailable("too large")

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        if any(put.timer_id == "poison" for batch in batches for put in batch.puts):
            raise self.how
        return await super().commit(batches)


@pytest.mark.parametrize("how", [StoreUnavailable("too large"), OutcomeUnknown("who knows")])
def test_a_write_that_can_never_be_applied_blocks_no_other_and_ends_with_the_write_timeout(
    how: StoreError,
) -> None:
    async def scenario(world: World) -> None:
        assert isinstance(world.store, Poisoned)
        world.store.how = how
        names = [f"t{n}" for n in range(60)]
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        await asyncio.gather(*(world.create(name, 60_000) for name in names))
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            await poison
        await asyncio.sleep(60)
        assert sorted(world.destinations.called()) == sorted(names), "fired, and their ends are written"
        assert all([(await world.get(name)).state is State.DELIVERED for name in names])
        if isinstance(how, StoreUnavailable):
            await asyncio.sleep(60)
            assert all(shard.is_quiet for shard in world.engine.shards.values())

    in_world(scenario, new_store=Poisoned, namespaces__default_num_shards=1)


class InSmallParts(Torn):
    capabilities = replace(Torn.capabilities, batch_max=5)


def test_a_refused_shard_is_paused_even_if_it_has_more_than_one_batch_waiting() -> None:
    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, Torn)
        store.times = 1_000_000
        asked = [asyncio.ensure_future(world.create(name_in(REFUSED, number), 60_000)) for number in range(11)]
        await asyncio.sleep(5)
        assert len(store.torn) < 15, "20 ms, then twice as long each time, up to a second"
        store.times = 0
        await asyncio.gather(*asked)

    in_world(scenario, new_store=InSmallParts)


class Slow(MemoryStore):
    """Answers a commit of the timer "late" after the write timeout: it was not applied."""

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        if any(put.timer_id == "late" for batch in batches for put in batch.puts):
            await asyncio.sleep(15)
            raise StoreUnavailable("no")
        return await super().commit(batches)


def test_a_write_whose_caller_was_answered_unknown_is_abandoned_if_it_was_not_applied() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(OutcomeUnknown):
            await world.create("late", 3_600_000)
        await asyncio.sleep(20)
        assert all(shard.is_quiet for shard in world.engine.shards.values())
        assert world.engine.counters.writes_waiting == 0
        with pytest.raises(NotFound):
            await world.get("late")

    in_world(scenario, new_store=Slow)


class Weighed(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, batch_chars_max=20_000)

    def __init__(self, clock: Clock | None = None) -> None:
        super().__init__(clock)
        self.counts: list[int] = []

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        self.counts.append(sum(len(batch.puts) for batch in batches))
        return await super().commit(batches)


@pytest.mark.parametrize("large", [{"headers": {"X-A": "x" * 2_000}}, {"tags": tuple(f"{n:0100}" for n in range(20))}])
def test_headers_and_tags_count_for_the_size_of_a_commit_as_payloads_do(large: dict[str, object]) -> None:
    async def scenario(world: World) -> None:
        assert isinstance(world.store, Weighed)
        await asyncio.gather(*(world.create(f"t{n}", 60_000, **large) for n in range(30)))
        assert max(world.store.counts) <= 3

    in_world(scenario, new_store=Weighed, namespaces__default_num_shards=1)


class HalfBlind(MemoryStore):
    """Cannot read shard 1, as long as `blind`: and says so for it alone, or for all."""

    blind = False
    says = "alone"

    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:  # type: ignore[override]
        pages: list[Page | StoreError] = list(await super().load(requests))
        if not self.blind:
            return pages
        if self.says == "for all":
            raise StoreUnavailable("cannot read")
        return [StoreUnavailable("cannot read") if s.shard_id == 1 else p for s, p in zip(requests, pages, strict=True)]


@pytest.mark.parametrize("says", ["alone", "for all"])
def test_a_shard_that_cannot_be_read_blocks_no_other_and_fires_when_it_can_be_read(says: str) -> None:
    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, HalfBlind)
        names = [name_in(shard) for shard in range(16)]
        await asyncio.gather(*(world.create(name, 600_000) for name in names))
        store.blind, store.says = True, says
        await world.crash_and_restart()
        await asyncio.sleep(700)
        others = sorted(set(names) - {name_in(1)})
        assert sorted(world.destinations.called()) == (others if says == "alone" else [])
        store.blind = False
        await asyncio.sleep(30)
        assert sorted(world.destinations.called()) == sorted(names)

    in_world(scenario, new_store=HalfBlind)


@pytest.mark.parametrize("how", [StoreUnavailable("too large"), OutcomeUnknown("who knows")])
def test_a_write_that_can_never_be_applied_delays_the_others_of_its_commit_only_a_little(
    how: StoreError,
) -> None:
    """A commit of several shards is one transaction: its shards are tried one by one, and then its batch in halves."""

    async def scenario(world: World) -> None:
        assert isinstance(world.store, Poisoned)
        world.store.how = how
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        took_ms: list[int] = []

        async def create(name: str) -> None:
            asked_ms = world.clock.boot_ms()
            await world.create(name, 60_000)
            took_ms.append(world.clock.boot_ms() - asked_ms)

        for turn in range(20):
            await asyncio.gather(*(create(f"t{turn}-{n}") for n in range(200)))
            await asyncio.sleep(0.01)
        poison.cancel()
        took_ms.sort()
        assert took_ms[len(took_ms) * 9 // 10] <= 20, "most do not notice it"
        assert took_ms[-1] <= 400, "the other writes of the shard wait until it is found"

    in_world(scenario, new_store=Poisoned)


def test_the_pause_after_a_throttled_commit_is_short_again_once_commits_succeed() -> None:
    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        world = World(clock, store.as_store)
        await world.start()
        for _ in range(8):
            store.fail("commit", Fault.THROTTLED)
            asked_ms = clock.boot_ms()
            await asyncio.gather(*(world.create(f"t{n}", 3_600_000) for n in range(40)))
            assert clock.boot_ms() - asked_ms <= 20
            await asyncio.sleep(60)
        await world.engine.stop()

    run_virtual(run)


def test_a_shard_whose_write_is_refused_again_and_again_fails_the_commit_of_the_others_once() -> None:
    async def scenario(world: World) -> None:
        store = world.store
        assert isinstance(store, Poisoned)
        store.how = StoreUnavailable("too large")
        shared: list[int] = []
        right = store.commit

        async def commit(batches: Sequence[Batch]) -> list[Committed | ShardLost]:
            is_poisoned = any(put.timer_id == "poison" for batch in batches for put in batch.puts)
            if is_poisoned and len(batches) > 1:
                shared.append(len(batches))
            return await right(batches)

        store.commit = commit  # type: ignore[method-assign]
        poison = asyncio.ensure_future(world.create("poison", 3_600_000))
        for turn in range(40):
            await asyncio.gather(*(world.create(f"t{turn}-{n}", 3_600_000) for n in range(30)))
            await asyncio.sleep(0.05)
        poison.cancel()
        assert len(shared) == 1

    in_world(scenario, new_store=Poisoned)
