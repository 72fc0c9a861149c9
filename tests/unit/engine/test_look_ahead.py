"""Look-ahead with real shards, without an engine: which shards are loaded when, and what is removed above the limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest
from msgspec.structs import replace

from duetime.cluster.membership import Membership
from duetime.config import load_config
from duetime.domain.timer import BEFORE_ALL, Position, Timer
from duetime.engine.counters import Counters
from duetime.engine.fire_loop import FireLoop
from duetime.engine.look_ahead import LookAhead
from duetime.engine.shard import Entry, Shard, ShardState, end_of
from duetime.engine.weight import timer_bytes
from duetime.engine.window import Backlog
from duetime.errors import NotOwner, StoreError, StoreUnavailable
from duetime.store import Page, PageRequest, ShardRow, Store
from duetime.testing import make_timer
from duetime.testing.virtual import START_WALL_MS, VirtualClock, run_virtual

MINUTE_MS = 60_000
KIB = 1_024


def of_weight(timer_id: str, execute_at_ms: int, kib: int = 1, **changes: Any) -> Timer:
    """A timer that counts for so many KiB in memory."""
    empty = make_timer(timer_id, execute_at_ms, payload="", **changes)
    return replace(empty, payload="x" * (kib * KIB - timer_bytes(empty)))


class Harness:
    """A LookAhead; the harness is its store, membership, fire loop and engine. Shards are empty except for `timers`."""

    def __init__(self, clock: VirtualClock, shards: int, timers_in_memory_max: int) -> None:
        self.clock = clock
        self.timers: dict[int, list[Timer]] = {}
        self.asked: list[list[PageRequest]] = []
        self.errors: list[Exception] = []
        self.load_errors: dict[int, StoreError] = {}  # by shard
        self.page_max = 1_000  # a page has at most so many timers, whatever the limit
        self.seconds = 0.0
        self.loads_in_flight = self.most_loads = 0
        self.armed: dict[int, Entry] = {}
        self.waiting = 0
        self.parked: list[int] = []
        self.shards: dict[int, Shard] = {}
        self.counters = Counters(writes_waiting_max=1_000)
        flags = {"engine.look_ahead": "60s", "engine.timers_in_memory_max": timers_in_memory_max}
        self.look_ahead = LookAhead(
            cast(Store, self),
            load_config(environ={}, flags=flags).engine,
            cast(Membership, self),
            cast(FireLoop, self),
            self.shards,
            self.counters,
        )
        for shard_id in range(shards):
            self.add(shard_id)

    def add(self, shard_id: int, low_water: Position = BEFORE_ALL) -> Shard:
        shard = self.shards[shard_id] = Shard(ShardRow(shard_id, 1, 1, "me", low_water=low_water), self)
        return shard

    # of the store
    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        self.asked.append(list(requests))
        self.loads_in_flight += 1
        self.most_loads = max(self.most_loads, self.loads_in_flight)
        await asyncio.sleep(self.seconds)
        self.loads_in_flight -= 1
        if self.errors:
            raise self.errors.pop(0)
        return [self.load_errors.get(request.shard_id) or self._page(request) for request in requests]

    def _page(self, request: PageRequest) -> Page:
        wanted = [
            timer
            for timer in sorted(self.timers.get(request.shard_id, []), key=lambda timer: timer.position)
            if timer.position > request.after and timer.execute_at_ms <= request.until_ms
        ]
        page: list[Timer] = []
        for timer in wanted[: min(request.limit, self.page_max)]:
            if sum(len(other.payload or "") for other in page) > request.chars_max:
                break
            page.append(timer)
        return Page(page, page[-1].position if len(page) < len(wanted) else None)

    # of the membership
    def now_ms(self) -> int:
        return self.clock.wall_ms()

    def may_fire(self) -> bool:
        return True

    def boot_ms(self) -> int:
        return self.clock.boot_ms()

    # of the fire loop
    def armed_tickets(self) -> list[int]:
        return list(self.armed)

    def park(self, count: int) -> int:
        self.parked.append(count)
        return 0

    # of the engine
    def arm(self, entry: Entry) -> None:
        entry.ticket = entry.timer.execute_at_ms << 32 | (len(self.armed) + 1)
        assert entry.ticket not in self.armed
        self.armed[entry.ticket] = entry

    def discard(self, entry: Entry) -> None: ...

    def disarm(self, entry: Entry) -> None:
        del self.armed[entry.ticket]

    def add_weight(self, weight: int) -> None:
        self.look_ahead.add_weight(weight)

    def enqueue(self, shard: Shard) -> None:
        pass

    @property
    def fire_loop(self) -> Harness:
        return self

    def timers_of(self, shard_id: int, count: int, first_ms: int = 1_000, step_ms: int = 10, **changes: Any) -> None:
        at_ms = START_WALL_MS + first_ms
        make = make_timer if "payload" in changes else of_weight
        self.timers[shard_id] = [make(f"s{shard_id}-{n}", at_ms + n * step_ms, **changes) for n in range(count)]

    def in_memory(self) -> int:
        return sum(len(shard.entries) for shard in self.shards.values())


def with_harness(
    scenario: Callable[[Harness], Awaitable[None]], *, shards: int = 1, timers_in_memory_max: int = 10_000
) -> None:
    async def run(clock: VirtualClock) -> None:
        harness = Harness(clock, shards, timers_in_memory_max)
        running = asyncio.ensure_future(harness.look_ahead.run())
        await asyncio.sleep(0)
        try:
            await scenario(harness)
            assert not running.done(), "a loader has ended"
        finally:
            running.cancel()
        entries = [entry for shard in harness.shards.values() for entry in shard.entries.values()]
        assert harness.counters.weight == sum(entry.weight for entry in entries)
        assert {id(entry) for entry in harness.armed.values()} == {id(entry) for entry in entries}

    run_virtual(run)


async def until_loaded(harness: Harness) -> None:
    harness.look_ahead.find_shards_to_load()
    await asyncio.sleep(0.5)


class TestLoading:
    def test_a_shard_is_loaded_up_to_the_look_ahead_and_not_again_before_half_of_it_is_over(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 5)
            assert harness.look_ahead._to_load == []
            await until_loaded(harness)
            assert harness.asked == [[PageRequest(0, BEFORE_ALL, START_WALL_MS + MINUTE_MS, 1_000, 320_000)]]
            shard = harness.shards[0]
            assert shard.horizon == end_of(START_WALL_MS + MINUTE_MS)
            assert len(shard.entries) == 5
            assert not shard.loading
            await asyncio.sleep(29.5)
            assert harness.clock.wall_ms() == START_WALL_MS + 30_000
            await until_loaded(harness)
            assert len(harness.asked) == 1, "just half"
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(0.001)
            assert len(harness.asked) == 2
            assert harness.asked[1][0].after == end_of(START_WALL_MS + MINUTE_MS)
            assert harness.asked[1][0].until_ms == harness.clock.wall_ms() - 1 + MINUTE_MS

        with_harness(scenario)

    def test_a_page_that_was_cut_is_followed_by_the_next_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 95)
            harness.page_max = 10
            harness.seconds = 0.01
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(0.025)
            assert harness.look_ahead._load_alone == {0}, "it has more: from now on it is loaded alone"
            await asyncio.sleep(0.5)
            assert len(harness.asked) == 10
            assert harness.in_memory() == 95
            assert harness.shards[0].horizon == end_of(START_WALL_MS + MINUTE_MS + 90), "ninety milliseconds later"
            assert harness.look_ahead._load_alone == set()

        with_harness(scenario)

    def test_shards_that_were_not_loaded_yet_are_loaded_together_with_a_smaller_page_each(self) -> None:
        async def scenario(harness: Harness) -> None:
            await until_loaded(harness)
            assert [len(requests) for requests in harness.asked] == [64, 36]
            assert {request.shard_id for requests in harness.asked for request in requests} == set(range(100))
            assert {request.limit for request in harness.asked[0]} == {15}

        with_harness(scenario, shards=100)

    def test_shards_that_are_loaded_together_share_the_page(self) -> None:
        async def scenario(harness: Harness) -> None:
            await until_loaded(harness)
            assert [[request.limit for request in requests] for requests in harness.asked] == [[250] * 4]

        with_harness(scenario, shards=4)

    @pytest.mark.parametrize(("memory", "page"), [(1_000, 100), (5_000, 500), (20_000, 1_000)])
    def test_a_page_is_a_tenth_of_the_memory_and_at_most_a_thousand(self, memory: int, page: int) -> None:
        async def scenario(harness: Harness) -> None:
            await until_loaded(harness)
            assert harness.asked[0][0].limit == page

        with_harness(scenario, timers_in_memory_max=memory)

    def test_a_shard_with_many_timers_is_loaded_alone_and_the_others_at_the_same_time(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(1, 300)
            harness.page_max = 50
            await until_loaded(harness)
            sizes = [[request.shard_id for request in requests] for requests in harness.asked]
            assert sizes[0] == [0, 1, 2]
            assert sizes[1:] == [[1]] * 5
            assert harness.in_memory() == 300

        with_harness(scenario, shards=3)

    def test_a_shard_that_is_loaded_alone_is_not_added_to_a_load_of_others(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead._load_alone = {1, 3}
            for shard_id, shard in harness.shards.items():
                shard.window.horizon = end_of(START_WALL_MS + shard_id)
            await until_loaded(harness)
            assert [[request.shard_id for request in requests] for requests in harness.asked] == [
                [0],
                [1],
                [2],
                [3],
            ]

        with_harness(scenario, shards=4)

    def test_the_shard_with_the_nearest_horizon_comes_first_and_there_are_four_loads_at_a_time(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead._load_alone = set(range(10))
            for shard_id, shard in harness.shards.items():
                shard.window.horizon = end_of(START_WALL_MS + 10_000 - shard_id * 1_000)
            harness.seconds = 0.01
            await until_loaded(harness)
            assert [requests[0].shard_id for requests in harness.asked] == list(range(9, -1, -1))
            assert harness.most_loads == 4

        with_harness(scenario, shards=10)

    def test_a_shard_whose_load_failed_comes_after_the_others_until_a_load_succeeds(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.errors = [StoreUnavailable("away")]
            await until_loaded(harness)
            harness.asked.clear()
            for shard in harness.shards.values():
                shard.window.horizon = BEFORE_ALL
            harness.load_errors[0] = StoreUnavailable("away")
            await until_loaded(harness)
            await until_loaded(harness)
            assert harness.look_ahead._failed_at_ms.keys() == {0}
            assert harness.look_ahead._load_priority(harness.shards[0]) > harness.look_ahead._load_priority(
                harness.shards[2]
            )
            harness.load_errors.clear()
            await until_loaded(harness)
            assert harness.look_ahead._failed_at_ms == {}

        with_harness(scenario, shards=3)

    def test_a_shard_that_is_loading_is_not_loaded_a_second_time(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.seconds = 10
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(1)
            assert harness.shards[0].loading
            harness.look_ahead.find_shards_to_load()
            assert harness.look_ahead._to_load == []
            harness.look_ahead._to_load = [(0, 0, 0)]
            harness.look_ahead._wake.set()
            await asyncio.sleep(1)
            assert len(harness.asked) == 1
            assert harness.look_ahead._to_load == []

        with_harness(scenario)

    @pytest.mark.parametrize("state", [ShardState.DROPPED, ShardState.CLOSING, ShardState.DRAINING, None])
    def test_a_shard_that_is_dropped_or_drains_is_not_loaded_and_the_next_one_is(
        self, state: ShardState | None
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead.find_shards_to_load()
            if state is None:
                del harness.shards[0]
            else:
                harness.shards[0].state = state
            await asyncio.sleep(1)
            assert [[request.shard_id for request in requests] for requests in harness.asked] == [[1]]

        with_harness(scenario, shards=2)

    def test_a_shard_that_recovers_is_not_loaded_before_its_recovery_has_ended(self) -> None:
        """Until then it fires nothing, and what it loads could not be removed from memory again."""

        async def scenario(harness: Harness) -> None:
            recovering = harness.shards[0]
            harness.timers_of(0, 3)
            recovering.start_recovery()
            await until_loaded(harness)
            assert [[request.shard_id for request in requests] for requests in harness.asked] == [[1]]
            assert harness.in_memory() == 0
            recovering.finish_recovery(ShardRow(0, 2, 2, "me"), {})
            await until_loaded(harness)
            assert [request.shard_id for request in harness.asked[1]] == [0]
            assert harness.in_memory() == 3

        with_harness(scenario, shards=2)

    def test_a_shard_that_is_dropped_while_it_loads_is_not_loaded_further(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 100)
            harness.page_max = 10
            harness.seconds = 1
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(0.5)
            harness.shards[0].drop(NotOwner())
            await asyncio.sleep(5)
            assert len(harness.asked) == 1
            assert harness.in_memory() == 0
            assert harness.look_ahead._load_alone == set()

        with_harness(scenario)

    def test_after_an_error_of_a_whole_load_each_shard_is_loaded_alone_until_that_succeeds(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.errors = [StoreUnavailable("cannot read")]
            await until_loaded(harness)
            assert not any(shard.loading for shard in harness.shards.values())
            assert harness.look_ahead._failure_log.reason == "cannot read"
            assert harness.look_ahead._load_alone == {0, 1, 2}
            harness.asked.clear()
            await until_loaded(harness)
            assert [len(requests) for requests in harness.asked] == [1, 1, 1]
            assert harness.look_ahead._load_alone == set()
            assert harness.look_ahead._failure_log.reason == ""
            assert {shard.horizon for shard in harness.shards.values()} == {harness.shards[0].horizon}

        with_harness(scenario, shards=3)

    def test_an_error_of_one_shard_does_not_affect_the_others(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.load_errors = {1: StoreUnavailable("not this one")}
            harness.timers_of(2, 3)
            await until_loaded(harness)
            assert harness.look_ahead._failure_log.reason == "not this one"
            assert harness.shards[1].horizon == BEFORE_ALL
            assert not harness.shards[1].loading
            assert harness.in_memory() == 3
            harness.load_errors = {}
            await until_loaded(harness)
            assert harness.look_ahead._failure_log.reason == ""
            assert harness.asked[1][0].shard_id == 1

        with_harness(scenario, shards=3)

    def test_an_unexpected_error_leaves_no_shard_in_the_loading_state(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.errors = [ZeroDivisionError()]
            shard = harness.shards[0]
            with pytest.raises(ZeroDivisionError):
                await harness.look_ahead._load([(shard, shard.begin_load(START_WALL_MS))])
            assert not harness.shards[0].loading

        with_harness(scenario)

    def test_a_store_that_does_not_answer_for_every_shard_is_an_internal_error(self) -> None:
        async def scenario(harness: Harness) -> None:
            shards = list(harness.shards.values())
            harness.load = lambda _: asyncio.sleep(0, [Page([], None)])  # type: ignore[method-assign, assignment]
            loads = [(shard, shard.begin_load(START_WALL_MS)) for shard in shards]
            with pytest.raises(ValueError, match="shorter"):
                await harness.look_ahead._load(loads)

        with_harness(scenario, shards=2)


class TestMemory:
    def test_at_the_limit_nothing_is_removed_and_above_it_the_timers_due_last_are(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1_000, first_ms=10_000)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            await asyncio.sleep(0.1)
            harness.look_ahead.reduce_memory()
            assert harness.counters.weight == harness.in_memory() * KIB == 1_000 * KIB
            assert harness.parked == []
            harness.timers_of(1, 1, first_ms=10_000)
            harness.add(1)
            shard = harness.shards[1]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[1], None), START_WALL_MS)
            assert harness.counters.weight == 1_001 * KIB
            assert harness.look_ahead._reduction_scheduled
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not harness.look_ahead._reduction_scheduled
            kept = sorted(entry.timer.execute_at_ms for entry in harness.shards[0].entries.values())
            assert len(kept) == 500
            assert kept[-1] == START_WALL_MS + 10_000 + 499 * 10, "the nearest stay"
            assert harness.shards[0].horizon == end_of(START_WALL_MS + 10_000 + 499 * 10)
            assert harness.parked == []

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_a_reduction_is_scheduled_once_however_many_timers_are_added(self) -> None:
        async def scenario(harness: Harness) -> None:
            reduced: list[int] = []
            harness.look_ahead.reduce_memory = lambda: reduced.append(1)  # type: ignore[method-assign]
            harness.look_ahead.add_weight(1_000 * KIB)
            await asyncio.sleep(0.1)
            assert reduced == []
            harness.look_ahead.add_weight(1)
            harness.look_ahead.add_weight(1)
            await asyncio.sleep(0.1)
            assert reduced == [1]
            harness.look_ahead.add_weight(-(1_000 * KIB + 2))

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_timers_due_within_five_seconds_stay_in_memory_whatever_their_weight(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 100, first_ms=4_010, kib=21)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            assert harness.counters.weight == 2_100 * KIB
            harness.look_ahead.reduce_memory()
            assert len(shard.entries) == 100
            assert shard.horizon == end_of(START_WALL_MS + 5_000)

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_timers_that_wait_for_their_destination_are_parked_if_that_is_not_enough(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 100, first_ms=10, kib=21)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            harness.waiting = 60
            harness.look_ahead.reduce_memory()
            half = int(1_000 * 0.5 * 100 / 2_100)
            assert harness.parked == [60 - half]

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_no_more_timers_are_parked_than_the_store_can_write_soon(self) -> None:
        """Each is a write: 22,000 at once stopped all firing for seconds, and creates of others were refused."""

        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 100, first_ms=10, kib=21)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            harness.waiting = 50_000
            harness.look_ahead.reduce_memory()
            harness.counters.unsettled = 1_500
            harness.look_ahead.reduce_memory()
            harness.counters.unsettled = 2_000
            harness.look_ahead.reduce_memory()
            assert harness.parked == [2_000, 500]

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_if_few_timers_are_armed_none_of_them_is_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 100, first_ms=10_000, kib=21)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            armed = dict(harness.armed)
            harness.armed = dict(list(armed.items())[: int(1_000 * 0.5 * 100 / 2_100)])
            harness.look_ahead.reduce_memory()
            assert len(shard.entries) == 100
            harness.armed = armed

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_if_removing_the_timers_due_last_is_enough_nothing_is_parked(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1_000, first_ms=10, step_ms=1)
            harness.timers[0].append(of_weight("far", START_WALL_MS + 50_000))
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            harness.waiting = 600
            harness.look_ahead.reduce_memory()
            assert harness.counters.weight == 1_000 * KIB
            assert harness.parked == []

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_timers_that_wait_for_their_destination_reduce_how_many_stay_armed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1_001, first_ms=10_000)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            harness.waiting = 300
            harness.look_ahead.reduce_memory()
            assert len(shard.entries) == 201
            assert harness.parked == []

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_if_very_many_wait_for_their_destination_all_armed_timers_are_removed(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1_001, first_ms=10_000)
            shard = harness.shards[0]
            shard.begin_load(START_WALL_MS + MINUTE_MS)
            shard.end_load(Page(harness.timers[0], None), START_WALL_MS)
            harness.waiting = 900
            harness.look_ahead.reduce_memory()
            assert len(shard.entries) == 1, "those of the first millisecond"

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_above_three_quarters_of_the_limit_only_urgent_shards_are_loaded(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead.add_weight(750 * KIB + 1)
            harness.shards[0].window.horizon = end_of(START_WALL_MS + 5_000)
            await until_loaded(harness)
            assert harness.asked == [], "not urgent before it is nearer than five seconds"
            harness.shards[0].window.horizon = end_of(harness.clock.wall_ms() + 4_999)
            await until_loaded(harness)
            assert len(harness.asked) == 1
            harness.look_ahead.add_weight(-1)
            harness.shards[0].window.horizon = end_of(harness.clock.wall_ms() + 6_000)
            await until_loaded(harness)
            assert len(harness.asked) == 2, "just three quarters"
            harness.look_ahead.add_weight(-750 * KIB)

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_above_three_quarters_an_urgent_shard_whose_load_failed_does_not_wait_for_shards_that_are_not_urgent(
        self,
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1)
            harness.shards[1].window.horizon = end_of(START_WALL_MS + 20_000)
            harness.look_ahead.add_weight(8_000 * KIB)
            harness.load_errors[0] = StoreUnavailable("away")
            await until_loaded(harness)
            assert harness.look_ahead._failed_at_ms.keys() == {0}
            harness.load_errors.clear()
            await until_loaded(harness)
            assert harness.in_memory() == 1
            assert harness.shards[1].horizon == end_of(START_WALL_MS + 20_000), "it is not urgent"
            harness.look_ahead.add_weight(-8_000 * KIB)
            await until_loaded(harness)
            assert harness.shards[1].horizon > end_of(START_WALL_MS + 20_000)

        with_harness(scenario, shards=2)

    @pytest.mark.parametrize(("near_ms", "loaded"), [(1_999, True), (2_000, False)])
    def test_a_shard_that_cannot_wait_for_the_next_sweep_is_loaded_as_soon_as_the_weight_allows(
        self, near_ms: int, loaded: bool
    ) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead.reduce_memory = lambda: None  # type: ignore[method-assign]
            harness.look_ahead.add_weight(1_000 * KIB + 2)
            harness.shards[0].window.horizon = end_of(harness.clock.wall_ms() + near_ms)
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(0)
            harness.look_ahead.add_weight(-1)
            await asyncio.sleep(0.01)
            assert harness.asked == [], "still above the limit"
            harness.look_ahead.add_weight(-1)
            await asyncio.sleep(0.01)
            assert bool(harness.asked) == loaded
            harness.look_ahead.add_weight(-1_000 * KIB)

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_timers_that_leave_memory_after_an_awaited_load_do_not_wake_the_loaders_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead.reduce_memory = lambda: None  # type: ignore[method-assign]
            harness.look_ahead.add_weight(1_000 * KIB + 1)
            harness.look_ahead.find_shards_to_load()
            await asyncio.sleep(0.01)
            assert harness.asked == []
            harness.look_ahead.add_weight(-1)
            await asyncio.sleep(0.01)
            assert len(harness.asked) == 1
            harness.look_ahead.add_weight(-1)
            assert not harness.look_ahead._wake.is_set()
            harness.look_ahead.add_weight(-(1_000 * KIB - 1))

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_above_the_limit_nothing_is_loaded_and_waiting_timers_are_parked(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead.reduce_memory = lambda: None  # type: ignore[method-assign]
            harness.look_ahead.add_weight(1_000 * KIB)
            await until_loaded(harness)
            assert len(harness.asked) == 1, "just at the limit, and urgent"
            harness.shards[0].window.horizon = BEFORE_ALL
            harness.look_ahead.add_weight(1)
            await until_loaded(harness)
            assert (len(harness.asked), harness.parked) == (1, []), "nothing waits"
            harness.waiting = 1
            await until_loaded(harness)
            assert (len(harness.asked), set(harness.parked)) == (1, {100})
            harness.parked.clear()
            harness.shards[0].window.horizon = end_of(harness.clock.wall_ms() + 10_000)
            await until_loaded(harness)
            assert (len(harness.asked), harness.parked) == (1, []), "it is not urgent"
            harness.look_ahead.add_weight(-(1_000 * KIB + 1))

        with_harness(scenario, timers_in_memory_max=1_000)


class TestBacklogs:
    def test_what_is_due_next_is_loaded_before_the_backlogs_and_these_begin_with_the_oldest(self) -> None:
        async def scenario(harness: Harness) -> None:
            for shard_id in range(2):
                harness.timers_of(shard_id, 120, first_ms=-60_000 + shard_id, step_ms=500)
            harness.page_max = 40
            harness.seconds = 0.01
            await until_loaded(harness)
            until = [requests[0].until_ms for requests in harness.asked]
            ahead_ms = START_WALL_MS + MINUTE_MS
            assert all(at_ms >= ahead_ms for at_ms in until[:3]), "both shards up to a minute ahead"
            backlogs = [requests for requests in harness.asked if requests[0].until_ms < ahead_ms]
            assert backlogs[0][0].shard_id == 0, "the one that begins first is the first"
            assert harness.in_memory() == 240
            assert harness.look_ahead.backlogs == 0

        with_harness(scenario, shards=2)

    def test_a_shard_whose_backlog_is_loaded_without_a_break_is_also_loaded_ahead(self) -> None:
        """Each sweep finds it loading: its timers that became due next were late until the backlog was loaded."""

        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 1_000, first_ms=-60_000, step_ms=1)
            next_one = of_weight("next", START_WALL_MS + 65_000)
            harness.timers[0].append(next_one)
            harness.page_max = 5
            harness.seconds = 0.4
            for _ in range(65):
                harness.look_ahead.find_shards_to_load()
                await asyncio.sleep(1)
            shard = harness.shards[0]
            assert shard.window.backlog is not None, "it is still being loaded"
            assert next_one.key in shard.entries, "it is due"

        with_harness(scenario)

    def test_a_backlog_waits_while_memory_is_half_full_of_timers_that_wait(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 120, first_ms=-60_000, step_ms=500)
            harness.shards[0].window.horizon = end_of(START_WALL_MS + MINUTE_MS)
            harness.shards[0].window.backlog = Backlog(BEFORE_ALL, end_of(START_WALL_MS))
            harness.waiting = 60
            harness.look_ahead.add_weight(500 * KIB + 1)
            await until_loaded(harness)
            await asyncio.sleep(1)
            assert (harness.asked, harness.parked) == ([], [])
            await until_loaded(harness)
            assert harness.parked == [100], "they are held, and must not block it for ever"
            harness.waiting -= 1
            await asyncio.sleep(1)
            await until_loaded(harness)
            assert (harness.asked, harness.parked) == ([], [100]), "some were fired"
            harness.look_ahead.add_weight(-1)
            await asyncio.sleep(0.1)
            assert len(harness.asked) >= 1
            harness.look_ahead.add_weight(-500 * KIB)

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_a_backlog_is_loaded_if_few_timers_wait_although_those_due_soon_use_half_of_the_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.timers_of(0, 120, first_ms=-60_000, step_ms=500)
            harness.shards[0].window.horizon = end_of(START_WALL_MS + MINUTE_MS)
            harness.shards[0].window.backlog = Backlog(BEFORE_ALL, end_of(START_WALL_MS))
            harness.waiting = 49
            harness.look_ahead.add_weight(800 * KIB)
            await until_loaded(harness)
            assert harness.in_memory() == 120
            harness.look_ahead.add_weight(-800 * KIB)

        with_harness(scenario, timers_in_memory_max=1_000)

    def test_at_most_two_loads_of_backlogs_are_in_flight_and_one_that_fails_comes_last(self) -> None:
        async def scenario(harness: Harness) -> None:
            for shard_id, shard in harness.shards.items():
                shard.window.horizon = end_of(START_WALL_MS + MINUTE_MS)
                shard.window.backlog = Backlog(end_of(shard_id), end_of(START_WALL_MS))
            harness.load_errors[0] = StoreUnavailable("away")
            harness.look_ahead._largest_row = 10**9  # each shard is loaded alone
            harness.seconds = 0.1
            await until_loaded(harness)
            assert harness.most_loads == 2
            assert harness.look_ahead._failed_at_ms.keys() == {0}
            assert {shard_id for shard_id, s in harness.shards.items() if s.window.backlog is not None} == {0}
            harness.load_errors.clear()
            await until_loaded(harness)
            assert harness.look_ahead.backlogs == 0
            assert harness.look_ahead._failed_at_ms == {}

        with_harness(scenario, shards=6)


class TestBytesOfLoads:
    def test_the_shards_of_a_load_share_its_part_of_the_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            await until_loaded(harness)
            part = 10_000 * KIB // 8 // 4
            assert [{request.chars_max for request in requests} for requests in harness.asked] == [{part // 4}]

        with_harness(scenario, shards=4)

    def test_after_large_rows_fewer_shards_are_loaded_together_so_that_their_first_rows_fit(self) -> None:
        async def scenario(harness: Harness) -> None:
            for shard_id in range(64):
                harness.timers_of(shard_id, 3, first_ms=1_000, step_ms=1, payload="x" * 100_000)
            await until_loaded(harness)
            assert len(harness.asked[0]) == 64, "nothing is known yet"
            part = 10_000 * KIB // 8 // 4
            assert max(len(requests) * 100_000 for requests in harness.asked[1:]) <= part

        with_harness(scenario, shards=64)

    def test_large_rows_are_forgotten_after_some_loads(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.look_ahead._largest_row = 1_000_000
            await until_loaded(harness)
            sizes = [len(requests) for requests in harness.asked]
            assert sizes[0] == 1
            assert max(sizes) > 16
            assert sum(sizes) == 200

        with_harness(scenario, shards=200)
