"""What is loaded when, and what goes when memory is short: the horizon with real shards, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import pytest

from duetime.cluster.membership import Membership
from duetime.config import load_config
from duetime.domain.timer import BEFORE_ALL, Position, Timer
from duetime.engine.counters import Counters
from duetime.engine.fire_loop import FireLoop
from duetime.engine.look_ahead import LookAhead
from duetime.engine.shard import Entry, Shard, ShardState, end_of
from duetime.errors import NotOwner, StoreError, StoreUnavailable
from duetime.store import Page, PageRequest, ShardRow, Store
from duetime.testing import make_timer
from duetime.testing.virtual import START_WALL_MS, VirtualClock, run_virtual

MINUTE_MS = 60_000


class Observatory:
    """Horizon, store, membership, fire loop and engine of the test: shards that are empty unless `timers` says so."""

    def __init__(self, clock: VirtualClock, shards: int, timers_in_memory_max: int) -> None:
        self.clock = clock
        self.timers: dict[int, list[Timer]] = {}
        self.asked: list[list[PageRequest]] = []
        self.errors: list[Exception] = []
        self.trouble: dict[int, StoreError] = {}  # by shard
        self.page_max = 1_000  # a page is cut here, whatever the limit
        self.seconds = 0.0
        self.loads_under_way = self.most_loads = 0
        self.armed: dict[int, Entry] = {}
        self.waiting = 0
        self.parked: list[int] = []
        self.shards: dict[int, Shard] = {}
        self.counters = Counters(writes_waiting_max=1_000)
        flags = {"engine.look_ahead": "60s", "engine.timers_in_memory_max": timers_in_memory_max}
        self.horizon = LookAhead(
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
        self.loads_under_way += 1
        self.most_loads = max(self.most_loads, self.loads_under_way)
        await asyncio.sleep(self.seconds)
        self.loads_under_way -= 1
        if self.errors:
            raise self.errors.pop(0)
        return [self.trouble.get(request.shard_id) or self._page(request) for request in requests]

    def _page(self, request: PageRequest) -> Page:
        wanted = [
            timer
            for timer in sorted(self.timers.get(request.shard_id, []), key=lambda timer: timer.position)
            if timer.position > request.after and timer.execute_at_ms <= request.until_ms
        ]
        page = wanted[: min(request.limit, self.page_max)]
        return Page(page, page[-1].position if len(page) < len(wanted) else None)

    # of the membership
    def now_ms(self) -> int:
        return self.clock.wall_ms()

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

    def disarm(self, entry: Entry) -> None:
        del self.armed[entry.ticket]

    def add_weight(self, weight: int) -> None:
        self.horizon.add_weight(weight)

    def enqueue(self, shard: Shard) -> None:
        pass

    @property
    def fire_loop(self) -> Observatory:
        return self

    def timers_of(self, shard_id: int, count: int, first_ms: int = 1_000, step_ms: int = 10, **changes: Any) -> None:
        at_ms = START_WALL_MS + first_ms
        self.timers[shard_id] = [make_timer(f"s{shard_id}-{n}", at_ms + n * step_ms, **changes) for n in range(count)]

    def in_memory(self) -> int:
        return sum(len(shard.entries) for shard in self.shards.values())


def looking(
    story: Callable[[Observatory], Awaitable[None]], *, shards: int = 1, timers_in_memory_max: int = 10_000
) -> None:
    async def told(clock: VirtualClock) -> None:
        place = Observatory(clock, shards, timers_in_memory_max)
        running = asyncio.ensure_future(place.horizon.run())
        await asyncio.sleep(0)
        try:
            await story(place)
            assert not running.done(), "a loader has ended"
        finally:
            running.cancel()
        entries = [entry for shard in place.shards.values() for entry in shard.entries.values()]
        assert place.counters.weight == sum(entry.weight for entry in entries)
        assert {id(entry) for entry in place.armed.values()} == {id(entry) for entry in entries}

    run_virtual(told)


async def until_loaded(place: Observatory) -> None:
    place.horizon.find_shards_to_load()
    await asyncio.sleep(0.5)


class TestLoading:
    def test_a_shard_is_loaded_up_to_the_look_ahead_and_not_again_before_half_of_it_is_over(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 5)
            assert place.horizon._to_load == []
            await until_loaded(place)
            assert place.asked == [[PageRequest(0, BEFORE_ALL, START_WALL_MS + MINUTE_MS, 1_000)]]
            shard = place.shards[0]
            assert shard.horizon == end_of(START_WALL_MS + MINUTE_MS)
            assert len(shard.entries) == 5
            assert not shard.loading
            await asyncio.sleep(29.5)
            assert place.clock.wall_ms() == START_WALL_MS + 30_000
            await until_loaded(place)
            assert len(place.asked) == 1, "just half"
            place.horizon.find_shards_to_load()
            await asyncio.sleep(0.001)
            assert len(place.asked) == 2
            assert place.asked[1][0].after == end_of(START_WALL_MS + MINUTE_MS)
            assert place.asked[1][0].until_ms == place.clock.wall_ms() - 1 + MINUTE_MS

        looking(story)

    def test_a_page_that_was_cut_is_followed_by_the_next_at_once(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 95)
            place.page_max = 10
            place.seconds = 0.01
            place.horizon.find_shards_to_load()
            await asyncio.sleep(0.025)
            assert place.horizon._load_alone == {0}, "it has more: from now on it is loaded by itself"
            await asyncio.sleep(0.5)
            assert len(place.asked) == 10
            assert place.in_memory() == 95
            assert place.shards[0].horizon == end_of(START_WALL_MS + MINUTE_MS + 90), "ninety milliseconds later"
            assert place.horizon._load_alone == set()

        looking(story)

    def test_shards_of_which_nothing_is_known_are_loaded_together_with_a_smaller_page_each(self) -> None:
        async def story(place: Observatory) -> None:
            await until_loaded(place)
            assert [len(requests) for requests in place.asked] == [64, 36]
            assert {request.shard_id for requests in place.asked for request in requests} == set(range(100))
            assert {request.limit for request in place.asked[0]} == {50}

        looking(story, shards=100)

    def test_the_page_is_shared_among_them(self) -> None:
        async def story(place: Observatory) -> None:
            await until_loaded(place)
            assert [[request.limit for request in requests] for requests in place.asked] == [[250] * 4]

        looking(story, shards=4)

    @pytest.mark.parametrize(("memory", "page"), [(1_000, 100), (5_000, 500), (20_000, 1_000)])
    def test_a_page_is_a_tenth_of_the_memory_and_at_most_a_thousand(self, memory: int, page: int) -> None:
        async def story(place: Observatory) -> None:
            await until_loaded(place)
            assert place.asked[0][0].limit == page

        looking(story, timers_in_memory_max=memory)

    def test_a_shard_with_much_to_load_is_loaded_by_itself_and_the_others_beside_it(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(1, 300)
            place.page_max = 50
            await until_loaded(place)
            sizes = [[request.shard_id for request in requests] for requests in place.asked]
            assert sizes[0] == [0, 1, 2]
            assert sizes[1:] == [[1]] * 5
            assert place.in_memory() == 300

        looking(story, shards=3)

    def test_one_that_has_much_ends_the_gathering_of_others(self) -> None:
        async def story(place: Observatory) -> None:
            place.horizon._load_alone = {1, 3}
            for shard_id, shard in place.shards.items():
                shard.horizon = end_of(START_WALL_MS + shard_id)
            await until_loaded(place)
            assert [[request.shard_id for request in requests] for requests in place.asked] == [
                [0],
                [1],
                [2],
                [3],
            ]

        looking(story, shards=4)

    def test_the_neediest_comes_first_and_four_load_at_a_time(self) -> None:
        async def story(place: Observatory) -> None:
            place.horizon._load_alone = set(range(10))
            for shard_id, shard in place.shards.items():
                shard.horizon = end_of(START_WALL_MS + 10_000 - shard_id * 1_000)
            place.seconds = 0.01
            await until_loaded(place)
            assert [requests[0].shard_id for requests in place.asked] == list(range(9, -1, -1))
            assert place.most_loads == 4

        looking(story, shards=10)

    def test_one_whose_load_failed_comes_after_the_others_until_a_load_succeeds(self) -> None:
        async def story(place: Observatory) -> None:
            place.errors = [StoreUnavailable("away")]
            await until_loaded(place)
            place.asked.clear()
            for shard in place.shards.values():
                shard.horizon = BEFORE_ALL
            place.trouble[0] = StoreUnavailable("away")
            await until_loaded(place)
            await until_loaded(place)
            assert place.horizon._failed_at_ms.keys() == {0}
            assert place.horizon._load_priority(place.shards[0]) > place.horizon._load_priority(place.shards[2])
            place.trouble.clear()
            await until_loaded(place)
            assert place.horizon._failed_at_ms == {}

        looking(story, shards=3)

    def test_one_that_is_loading_is_not_loaded_a_second_time(self) -> None:
        async def story(place: Observatory) -> None:
            place.seconds = 10
            place.horizon.find_shards_to_load()
            await asyncio.sleep(1)
            assert place.shards[0].loading
            place.horizon.find_shards_to_load()
            assert place.horizon._to_load == []
            place.horizon._to_load = [(0, 0, 0)]
            place.horizon._wake.set()
            await asyncio.sleep(1)
            assert len(place.asked) == 1
            assert place.horizon._to_load == []

        looking(story)

    @pytest.mark.parametrize("state", [ShardState.DROPPED, ShardState.CLOSING, ShardState.DRAINING, None])
    def test_a_shard_that_is_dropped_or_drains_is_not_loaded_and_the_next_one_is(
        self, state: ShardState | None
    ) -> None:
        async def story(place: Observatory) -> None:
            place.horizon.find_shards_to_load()
            if state is None:
                del place.shards[0]
            else:
                place.shards[0].state = state
            await asyncio.sleep(1)
            assert [[request.shard_id for request in requests] for requests in place.asked] == [[1]]

        looking(story, shards=2)

    def test_one_that_is_dropped_while_it_loads_is_not_loaded_on(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 100)
            place.page_max = 10
            place.seconds = 1
            place.horizon.find_shards_to_load()
            await asyncio.sleep(0.5)
            place.shards[0].drop(NotOwner())
            await asyncio.sleep(5)
            assert len(place.asked) == 1
            assert place.in_memory() == 0
            assert place.horizon._load_alone == set()

        looking(story)

    def test_an_error_of_all_makes_each_load_by_itself_until_that_works(self) -> None:
        async def story(place: Observatory) -> None:
            place.errors = [StoreUnavailable("cannot read")]
            await until_loaded(place)
            assert not any(shard.loading for shard in place.shards.values())
            assert place.horizon._failure_log.reason == "cannot read"
            assert place.horizon._load_alone == {0, 1, 2}
            place.asked.clear()
            await until_loaded(place)
            assert [len(requests) for requests in place.asked] == [1, 1, 1]
            assert place.horizon._load_alone == set()
            assert place.horizon._failure_log.reason == ""
            assert {shard.horizon for shard in place.shards.values()} == {place.shards[0].horizon}

        looking(story, shards=3)

    def test_an_error_of_one_leaves_the_others_as_they_are(self) -> None:
        async def story(place: Observatory) -> None:
            place.trouble = {1: StoreUnavailable("not this one")}
            place.timers_of(2, 3)
            await until_loaded(place)
            assert place.horizon._failure_log.reason == "not this one"
            assert place.shards[1].horizon == BEFORE_ALL
            assert not place.shards[1].loading
            assert place.in_memory() == 3
            place.trouble = {}
            await until_loaded(place)
            assert place.horizon._failure_log.reason == ""
            assert place.asked[1][0].shard_id == 1

        looking(story, shards=3)

    def test_an_error_that_nobody_expects_leaves_no_shard_loading_for_ever(self) -> None:
        async def story(place: Observatory) -> None:
            place.errors = [ZeroDivisionError()]
            place.shards[0].begin_load()
            with pytest.raises(ZeroDivisionError):
                await place.horizon._load([place.shards[0]])
            assert not place.shards[0].loading

        looking(story)

    def test_a_store_that_does_not_answer_for_every_shard_is_an_internal_error(self) -> None:
        async def story(place: Observatory) -> None:
            shards = list(place.shards.values())
            place.load = lambda _: asyncio.sleep(0, [Page([], None)])  # type: ignore[method-assign, assignment]
            for shard in shards:
                shard.begin_load()
            with pytest.raises(ValueError, match="shorter"):
                await place.horizon._load(shards)

        looking(story, shards=2)


class TestMemory:
    def test_at_the_cap_nothing_goes_and_beyond_it_the_furthest_go(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 1_000, first_ms=10_000)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            await asyncio.sleep(0.1)
            place.horizon.reduce_memory()
            assert place.counters.weight == place.in_memory() == 1_000
            assert place.parked == []
            place.timers_of(1, 1, first_ms=10_000)
            place.add(1)
            shard = place.shards[1]
            shard.begin_load()
            shard.end_load(Page(place.timers[1], None), START_WALL_MS + MINUTE_MS)
            assert place.counters.weight == 1_001
            assert place.horizon._reduction_scheduled
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not place.horizon._reduction_scheduled
            kept = sorted(entry.timer.execute_at_ms for entry in place.shards[0].entries.values())
            assert len(kept) == 500
            assert kept[-1] == START_WALL_MS + 10_000 + 499 * 10, "the nearest stay"
            assert place.shards[0].horizon == end_of(START_WALL_MS + 10_000 + 499 * 10)
            assert place.parked == []

        looking(story, timers_in_memory_max=1_000)

    def test_it_is_asked_for_once_however_much_comes_at_once(self) -> None:
        async def story(place: Observatory) -> None:
            relieved: list[int] = []
            place.horizon.reduce_memory = lambda: relieved.append(1)  # type: ignore[method-assign]
            place.horizon.add_weight(1_000)
            await asyncio.sleep(0.1)
            assert relieved == []
            place.horizon.add_weight(1)
            place.horizon.add_weight(1)
            await asyncio.sleep(0.1)
            assert relieved == [1]
            place.horizon.add_weight(-1_002)

        looking(story, timers_in_memory_max=1_000)

    def test_what_is_due_within_five_seconds_stays_whatever_it_weighs(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 100, first_ms=4_010, payload="x" * 20_480)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            assert place.counters.weight == 2_100
            place.horizon.reduce_memory()
            assert len(shard.entries) == 100
            assert shard.horizon == end_of(START_WALL_MS + 5_000)

        looking(story, timers_in_memory_max=1_000)

    def test_what_waits_for_its_destination_is_put_back_if_that_is_not_enough(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 100, first_ms=10, payload="x" * 20_480)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            place.waiting = 60
            place.horizon.reduce_memory()
            half = int(1_000 * 0.5 * 100 / 2_100)
            assert place.parked == [60 - half]

        looking(story, timers_in_memory_max=1_000)

    def test_if_few_are_armed_none_of_them_goes(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 100, first_ms=10_000, payload="x" * 20_480)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            armed = dict(place.armed)
            place.armed = dict(list(armed.items())[: int(1_000 * 0.5 * 100 / 2_100)])
            place.horizon.reduce_memory()
            assert len(shard.entries) == 100
            place.armed = armed

        looking(story, timers_in_memory_max=1_000)

    def test_if_it_is_enough_that_the_furthest_go_nothing_is_put_back(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 1_000, first_ms=10, step_ms=1)
            place.timers[0].append(make_timer("far", START_WALL_MS + 50_000))
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            place.waiting = 600
            place.horizon.reduce_memory()
            assert place.counters.weight == 1_000
            assert place.parked == []

        looking(story, timers_in_memory_max=1_000)

    def test_as_many_as_wait_for_their_destination_fewer_may_stay_armed(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 1_001, first_ms=10_000)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            place.waiting = 300
            place.horizon.reduce_memory()
            assert len(shard.entries) == 201
            assert place.parked == []

        looking(story, timers_in_memory_max=1_000)

    def test_with_everything_waiting_all_that_is_armed_goes(self) -> None:
        async def story(place: Observatory) -> None:
            place.timers_of(0, 1_001, first_ms=10_000)
            shard = place.shards[0]
            shard.begin_load()
            shard.end_load(Page(place.timers[0], None), START_WALL_MS + MINUTE_MS)
            place.waiting = 900
            place.horizon.reduce_memory()
            assert len(shard.entries) == 1, "those of the first millisecond"

        looking(story, timers_in_memory_max=1_000)

    def test_beyond_three_quarters_only_what_is_urgent_is_loaded(self) -> None:
        async def story(place: Observatory) -> None:
            place.horizon.add_weight(751)
            place.shards[0].horizon = end_of(START_WALL_MS + 5_000)
            await until_loaded(place)
            assert place.asked == [], "not urgent before it is nearer than five seconds"
            place.shards[0].horizon = end_of(place.clock.wall_ms() + 4_999)
            await until_loaded(place)
            assert len(place.asked) == 1
            place.horizon.add_weight(-1)
            place.shards[0].horizon = end_of(place.clock.wall_ms() + 6_000)
            await until_loaded(place)
            assert len(place.asked) == 2, "just three quarters"
            place.horizon.add_weight(-750)

        looking(story, timers_in_memory_max=1_000)

    @pytest.mark.parametrize(("near_ms", "loaded"), [(1_999, True), (2_000, False)])
    def test_a_shard_that_cannot_wait_for_the_next_look_is_loaded_as_soon_as_there_is_room(
        self, near_ms: int, loaded: bool
    ) -> None:
        async def story(place: Observatory) -> None:
            place.horizon.reduce_memory = lambda: None  # type: ignore[method-assign]
            place.horizon.add_weight(1_002)
            place.shards[0].horizon = end_of(place.clock.wall_ms() + near_ms)
            place.horizon.find_shards_to_load()
            await asyncio.sleep(0)
            place.horizon.add_weight(-1)
            await asyncio.sleep(0.01)
            assert place.asked == [], "still over the cap"
            place.horizon.add_weight(-1)
            await asyncio.sleep(0.01)
            assert bool(place.asked) == loaded
            place.horizon.add_weight(-1_000)

        looking(story, timers_in_memory_max=1_000)

    def test_over_the_cap_nothing_is_loaded_and_what_waits_is_put_back_to_make_room(self) -> None:
        async def story(place: Observatory) -> None:
            place.horizon.reduce_memory = lambda: None  # type: ignore[method-assign]
            place.horizon.add_weight(1_000)
            await until_loaded(place)
            assert len(place.asked) == 1, "just at the cap, and urgent"
            place.shards[0].horizon = BEFORE_ALL
            place.horizon.add_weight(1)
            await until_loaded(place)
            assert (len(place.asked), place.parked) == (1, []), "nothing waits"
            place.waiting = 1
            await until_loaded(place)
            assert (len(place.asked), set(place.parked)) == (1, {100})
            place.parked.clear()
            place.shards[0].horizon = end_of(place.clock.wall_ms() + 10_000)
            await until_loaded(place)
            assert (len(place.asked), place.parked) == (1, []), "it is not urgent"
            place.horizon.add_weight(-1_001)

        looking(story, timers_in_memory_max=1_000)
