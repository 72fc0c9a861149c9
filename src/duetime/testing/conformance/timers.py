"""Conformance: timers and reached timers are stored, replaced, found, loaded and listed correctly."""

from __future__ import annotations

import asyncio
import itertools

import msgspec
import pytest
from msgspec import Struct
from msgspec.structs import replace

from duetime.domain.instants import EARLIEST_MS, LATEST_MS
from duetime.domain.timer import (
    BEFORE_ALL,
    Extras,
    Missed,
    Namespace,
    Outcome,
    Position,
    RetryPolicy,
    Timer,
    TimerKey,
    shard_of,
)
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import ShardLost
from duetime.store import Batch, Fence, Found, ListQuery, Member, PageRequest, Store
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import (
    EVERY_OUTCOME,
    FAR,
    SHARDS,
    Harness,
    all_reached,
    all_timers,
    commit_one,
    listed,
    load,
    load_one,
    put,
    take,
)

FULL = make_timer(
    "everything",
    generation=(7 << 32) + 3,
    attempts=12,
    payload='{"a": 1.0,  "b":"ü\\u00fc\\n", "c":[]}',
    retry_policy=RetryPolicy(max_retries=3, backoff_multiplier=1.5),
    callback_timeout_seconds=30,
    correlation_id="request-17",
    extras=Extras(
        headers={"X-Key": "väl"},
        tags=("red", "größe"),
        missed=Missed(skip_if_late_by_ms=5),
        occurrence=4,
        first_attempt_at_ms=1,
        last_attempt_at_ms=2,
        late_by_ms=3,
        last_error='HTTP 500 "quoted"',
        flow_key="shop/größe 😀",
        later={"from a later version": [1, {"deep": "välue"}]},
    ),
)

ALIKE_IDS = [
    "timer", "Timer", "TIMER", "timer ", " timer", "timer\t", "tımer", "é", "e\u0301", "ß", "ss", "ﬁ", "fi",
    "a%", "a_", "a\\", "a'", 'a"', "a;--", "😀", "😀😀", "\U0010ffff", "\uffff", "\u0001", "{}", "null", "0",
    "00", "1e0", "x" * 255, "ä" * 127, "😀" * 63,
]  # fmt: skip


_PLAIN = {int, str, bool, float, type(None), Outcome}


def _other_types(value: object) -> set[type]:
    """Types of all values in it, at any depth, that are not plain ones."""
    if isinstance(value, Struct):
        return _other_types(msgspec.structs.astuple(value))
    if isinstance(value, list | tuple | frozenset):
        return set().union(*map(_other_types, value))
    if isinstance(value, dict):
        return _other_types([*value, *value.values()])
    return set() if type(value) in _PLAIN else {type(value)}


SCHEDULED = make_timer(
    "scheduled",
    extras=Extras(
        later=ScheduleState(
            Schedule(at="2027-01-15T09:00", timezone="Europe/Berlin", repeat="daily", exclude=("2027-12-25",)),
            after_ms=1_800_000_000_000,
            number=7,
            tzdata="2026b",
            asked="2027-01-15T09:00:00",
            local="2027-01-15T09:00:00+01:00",
            later={"from a later version": "välue"},
        )
    ),
)
PAUSED = make_timer("paused", HELD_MS, extras=Extras(later=ScheduleState(held_ms=5)))


class Identity(Harness):
    async def test_a_timer_is_read_back_exactly_as_it_was_put(self, store: Store, fence: Fence) -> None:
        bare = make_timer("bare")
        await put(store, fence, FULL, bare)
        assert await store.get_many([(0, FULL.key), (0, bare.key)]) == [Found(FULL), Found(bare)]
        assert sorted(await all_timers(store), key=lambda timer: timer.timer_id) == [bare, FULL]

    async def test_a_schedule_and_a_pause_are_read_back_exactly(self, store: Store, fence: Fence) -> None:
        ended = make_reached(SCHEDULED)
        await put(store, fence, SCHEDULED, PAUSED)
        await commit_one(store, Batch(fence, (), (), [ended]))
        found = await store.get_many([(0, SCHEDULED.key), (0, PAUSED.key)])
        assert found == [Found(SCHEDULED, ended), Found(PAUSED)]

    async def test_values_read_back_have_plain_types(self, store: Store, fence: Fence) -> None:
        """A number or text type of the driver compares equal to ours, but cannot be encoded later."""
        await commit_one(store, Batch(fence, [FULL], (), [make_reached(FULL)], Position(5, -6, 7)))
        await store.join(Member("m", "host:1", 1, True, 5, "secret"))
        await store.put_namespace(Namespace(name="plain", num_shards=SHARDS, created_at_ms=1), None)
        [found] = await store.get_many([(0, FULL.key)])
        waiting = await store.list_timers(ListQuery(namespace=FULL.namespace, num_shards=SHARDS))
        ended = await store.list_timers(ListQuery(namespace=FULL.namespace, num_shards=SHARDS, outcomes=EVERY_OUTCOME))
        assert found.timer
        assert found.reached
        assert waiting.timers
        assert ended.reached
        for answer in (
            found,
            waiting,
            ended,
            await load_one(store, 0, BEFORE_ALL, 1 << 53, 1),
            await store.shards(),
            await store.members(),
            await store.namespaces(),
            await store.heartbeat("m", 2),
        ):
            assert _other_types(answer) == set()

    async def test_similar_ids_are_different_timers(self, store: Store, fence: Fence) -> None:
        timers = [make_timer(timer_id, payload=str(index)) for index, timer_id in enumerate(ALIKE_IDS)]
        assert (await put(store, fence, *timers)).replaced == frozenset()
        assert await store.get_many([(0, timer.key) for timer in timers]) == [Found(timer) for timer in timers]
        await commit_one(store, Batch(fence, deletes=[timer.key for timer in timers[::2]]))
        assert await store.get_many([(0, timer.key) for timer in timers]) == [
            Found(timer if index % 2 else None) for index, timer in enumerate(timers)
        ]

    async def test_equal_ids_in_different_namespaces_are_different_timers(self, store: Store, fence: Fence) -> None:
        timers = [make_timer("c", namespace=name) for name in ("a", "A", "a ", "a:b", "é", "e\u0301", "n" * 255)]
        timers += [make_timer("b:c", namespace="a"), make_timer("c" * 255, namespace="n" * 255)]
        await put(store, fence, *timers)
        assert await store.get_many([(0, timer.key) for timer in timers]) == [Found(timer) for timer in timers]

    @pytest.mark.parametrize(
        "payload",
        [
            "{}",
            '""',
            '{"b":1,"a":2,"a":3}',
            "1.0",
            "1e2",
            " [ 1 ,\n2 ] ",
            '"\\u0000"',
            '"\\ud83d\\ude00"',
            '"😀\u2028"',
            "null",
        ],
    )
    async def test_a_payload_is_kept_byte_for_byte(self, store: Store, fence: Fence, payload: str) -> None:
        timer = make_timer(payload=payload)
        await commit_one(store, Batch(fence, puts=[timer], reached=[make_reached(timer)]))
        [found] = await store.get_many([(0, timer.key)])
        assert found.timer is not None
        assert found.timer.payload == payload
        assert found.reached is not None
        assert found.reached.timer.payload == payload

    async def test_no_payload_and_an_empty_payload_are_different(self, store: Store, fence: Fence) -> None:
        empty = make_timer("empty", payload="", correlation_id="")
        await put(store, fence, empty, make_timer("none"))
        assert await store.get_many([(0, empty.key)]) == [Found(empty)]

    async def test_a_payload_of_a_quarter_mebibyte_fits_and_pages_of_them_too(self, store: Store, fence: Fence) -> None:
        size = min(256 * 1024, store.capabilities.payload_bytes_max)
        payload = '"' + "x\\n" * (size // 3 - 2) + '"'
        timers = [make_timer(f"large-{index}", 1_000 + index, payload=payload) for index in range(20)]
        for timer in timers:
            await put(store, fence, timer)
        assert await all_timers(store) == timers

    async def test_timers_are_ordered_by_time_and_then_by_signed_uuid(self, store: Store, fence: Fence) -> None:
        halves = [-(1 << 63), -1, 0, 1, (1 << 63) - 1]
        times = [EARLIEST_MS, 1, 1_800_000_000_000, LATEST_MS - 1]
        timers = [
            make_timer(f"{time}/{high}/{low}", time, uuid_high=high, uuid_low=low)
            for time, high, low in itertools.product(times, halves, halves)
        ]
        shuffled = sorted(timers, key=lambda timer: hash((timer.uuid_low, timer.execute_at_ms)))
        most = store.capabilities.batch_max
        for start in range(0, len(shuffled), most):
            await put(store, fence, *shuffled[start : start + most])
        assert await all_timers(store) == timers
        assert await all_timers(store, page=7) == timers

    async def test_generations_and_nonces_use_all_of_sixty_three_bits(self, store: Store) -> None:
        fence = await take(store, 0, nonce=-(1 << 63))
        timer = make_timer(generation=(1 << 63) - 1)
        await put(store, fence, timer)
        assert await store.get_many([(0, timer.key)]) == [Found(timer)]
        fence = await take(store, 0, nonce=(1 << 63) - 1)
        await put(store, fence, timer)


class Upserts(Harness):
    async def test_a_put_replaces_the_timer_of_the_same_key_at_any_position(self, store: Store, fence: Fence) -> None:
        old = make_timer("one", 5_000)
        assert (await put(store, fence, old)).replaced == frozenset()
        for new in (
            make_timer("one", 9_000, generation=2),  # later
            make_timer("one", 1_000, generation=3),  # earlier
            make_timer("one", 1_000, generation=4, payload="1"),  # same position
            make_timer("one", 2_000, generation=4, attempts=1),  # same generation: a retry
            make_timer("one", 2_000, generation=4, attempts=1),  # the very same again
        ):
            assert (await put(store, fence, new)).replaced == frozenset({0})
            assert await all_timers(store) == [new]
            assert await store.get_many([(0, new.key)]) == [Found(new)]

    async def test_replaced_names_exactly_the_puts_that_found_a_timer(self, store: Store, fence: Fence) -> None:
        other_fence = await take(store, 1)
        await put(store, fence, make_timer("a"), make_timer("c"), make_timer("gone"))
        first = Batch(fence, [make_timer(i, 7) for i in "abcd"], [TimerKey("test", "gone")])
        second = Batch(other_fence, [make_timer(i, 7) for i in "abcd"])  # the same ids, but in another shard
        results = await store.commit([first, second])
        assert [result.replaced for result in results if not isinstance(result, Exception)] == [{0, 2}, set()]
        assert [timer.timer_id for timer in await all_timers(store, 1, page=3)] == [
            timer.timer_id for timer in sorted(second.puts, key=lambda timer: timer.position)
        ]

    async def test_a_timer_may_move_to_the_position_of_another_one_in_the_same_batch(
        self, store: Store, fence: Fence
    ) -> None:
        left = make_timer("left", 1, uuid_high=1, uuid_low=1)
        right = make_timer("right", 2, uuid_high=1, uuid_low=1)
        await put(store, fence, left, right)
        swapped = [replace(left, execute_at_ms=2), replace(right, execute_at_ms=1)]
        assert (await put(store, fence, *swapped)).replaced == {0, 1}
        assert await all_timers(store) == swapped[::-1]
        await commit_one(store, Batch(fence, puts=[replace(left, execute_at_ms=1)], deletes=[right.key]))
        assert await all_timers(store) == [left]

    async def test_a_delete_removes_the_timer_and_ignores_an_absent_one(self, store: Store, fence: Fence) -> None:
        timer, kept = make_timer("gone"), make_timer("kept")
        await put(store, fence, timer, kept)
        for _ in range(2):
            await commit_one(
                store, Batch(fence, deletes=[timer.key, TimerKey("test", "never was"), TimerKey("x", "kept")])
            )
            assert await all_timers(store) == [kept]

    async def test_a_delete_affects_only_its_shard(self, store: Store, fence: Fence) -> None:
        other_fence = await take(store, 1)
        timer = make_timer()
        await put(store, fence, timer)
        await put(store, other_fence, timer)
        await commit_one(store, Batch(fence, deletes=[timer.key]))
        assert await store.get_many([(0, timer.key), (1, timer.key)]) == [Found(), Found(timer)]

    async def test_an_acknowledged_commit_is_seen_by_the_next_read(self, store: Store, fence: Fence) -> None:
        for number in range(30):
            timer = make_timer(f"n-{number}", number)
            await put(store, fence, timer)
            page, found = await asyncio.gather(
                load_one(store, 0, Position(number - 1, 1 << 62, 0), number, 5), store.get_many([(0, timer.key)])
            )
            assert timer in page.timers
            assert found == [Found(timer)]

    async def test_a_batch_of_the_largest_size_is_stored_and_deleted_whole(self, store: Store, fence: Fence) -> None:
        count = store.capabilities.batch_max
        timers = [make_timer(f"n-{number}", 1_000 + number) for number in range(count)]
        assert (await put(store, fence, *timers)).replaced == frozenset()
        assert await all_timers(store) == timers
        assert (await put(store, fence, *timers)).replaced == frozenset(range(count))
        assert await all_timers(store) == timers
        await commit_one(store, Batch(fence, deletes=[timer.key for timer in timers[: count // 2]]))
        assert await all_timers(store) == timers[count // 2 :]

    async def test_concurrent_commits_are_all_applied(self, store: Store, other_session: Store) -> None:
        fences = [await take(store, shard_id) for shard_id in range(SHARDS)]
        timers = [make_timer(f"n-{number}", number) for number in range(40)]
        sessions = itertools.cycle((store, other_session))
        await asyncio.gather(
            *(put(session, fence, timer) for timer in timers for fence, session in zip(fences, sessions, strict=False))
        )
        for shard_id in range(SHARDS):
            assert await all_timers(store, shard_id) == timers

    async def test_an_empty_commit_succeeds(self, store: Store, fence: Fence) -> None:
        assert await store.commit([]) == []
        assert (await commit_one(store, Batch(fence))).replaced == frozenset()
        assert await store.get_many([]) == []


class ReachedRows(Harness):
    async def test_a_reached_timer_is_read_back_exactly(self, store: Store, fence: Fence) -> None:
        for outcome in Outcome:
            timer = replace(FULL, timer_id=outcome.value)
            reached = make_reached(timer, outcome, reached_at_ms=5, purge_at_ms=LATEST_MS)
            await commit_one(store, Batch(fence, reached=[reached]))
            assert await store.get_many([(0, timer.key)]) == [Found(None, reached)]

    async def test_one_commit_deletes_a_timer_and_adds_its_reached_row(self, store: Store, fence: Fence) -> None:
        timer = make_timer()
        await put(store, fence, timer)
        reached = make_reached(timer)
        await commit_one(store, Batch(fence, deletes=[timer.key], reached=[reached]))
        assert await all_timers(store) == []
        assert await store.get_many([(0, timer.key)]) == [Found(None, reached)]

    async def test_adding_the_same_reached_again_changes_nothing(self, store: Store, fence: Fence) -> None:
        reached = make_reached(make_timer())
        for _ in range(3):
            await commit_one(store, Batch(fence, reached=[reached]))
        assert await all_reached(store) == [reached]

    async def test_a_timer_may_be_reached_many_times_and_the_newest_reached_row_is_found(
        self, store: Store, fence: Fence
    ) -> None:
        ends = [
            make_reached(make_timer(generation=generation, extras=Extras(occurrence=occurrence)), reached_at_ms=at_ms)
            for at_ms, (generation, occurrence) in enumerate(itertools.product((1, 2), range(4)))
        ]
        waiting = make_timer(generation=3)
        await commit_one(store, Batch(fence, puts=[waiting], reached=[*ends[4:], *ends[:4]]))
        assert sorted(await all_reached(store), key=lambda reached: reached.reached_at_ms) == ends
        assert await store.get_many([(0, waiting.key)]) == [Found(waiting, ends[-1])]

    async def test_where_clocks_disagree_the_newest_reached_row_is_that_of_the_last_generation(
        self, store: Store, fence: Fence
    ) -> None:
        """An owner whose clock was behind ended the later generation at an earlier time."""
        before = make_reached(make_timer(generation=1), reached_at_ms=9_000, purge_at_ms=99_000)
        after = make_reached(make_timer(generation=2, payload="2"), reached_at_ms=1_000, purge_at_ms=91_000)
        last = make_reached(make_timer(generation=3, payload="3"), reached_at_ms=5_000, purge_at_ms=95_000)
        for reached, newest in ((before, before), (after, after), (last, last)):
            await commit_one(store, Batch(fence, reached=[reached]))
            assert await store.get_many([(0, before.timer.key)]) == [Found(None, newest)]

    async def test_reached_rows_are_neither_loaded_nor_replaced_nor_deleted_as_timers(
        self, store: Store, fence: Fence
    ) -> None:
        timer = make_timer()
        reached = make_reached(timer)
        await commit_one(store, Batch(fence, reached=[reached]))
        assert list((await load_one(store, 0, BEFORE_ALL, FAR, 10)).timers) == []
        assert (await put(store, fence, timer)).replaced == frozenset()
        await commit_one(store, Batch(fence, deletes=[timer.key]))
        assert await all_reached(store) == [reached]

    async def test_a_purge_removes_the_oldest_rows_up_to_the_limit_and_only_before_the_time(
        self, store: Store, fence: Fence
    ) -> None:
        ends = [make_reached(make_timer(f"n-{number}"), purge_at_ms=number) for number in range(10)]
        other_fence = await take(store, 1)
        elsewhere = make_reached(make_timer("elsewhere"), purge_at_ms=0)
        waiting = make_timer("waiting", 0)
        await store.commit([Batch(fence, [waiting], (), ends), Batch(other_fence, reached=[elsewhere])])
        assert await store.purge_reached([fence], 8, 3) == [3]
        assert [r for r in await all_reached(store) if r != elsewhere] == ends[3:]
        assert await store.purge_reached([fence], 8, 100) == [5]
        assert await store.purge_reached([fence], 8, 100) == [0]
        assert await all_reached(store) == [elsewhere, *ends[8:]]
        assert await all_timers(store) == [waiting]

    async def test_a_purge_of_many_shards_has_a_result_for_each(self, store: Store, fence: Fence) -> None:
        fences = [fence, await take(store, 1), await take(store, 2)]
        ends = [make_reached(make_timer(f"n-{number}"), purge_at_ms=number) for number in range(6)]
        await store.commit(
            [Batch(owned, reached=ends[number * 2 : number * 2 + 2]) for number, owned in enumerate(fences)]
        )
        lost = replace(fences[1], nonce=7)
        results = await store.purge_reached([fences[2], lost, fence], 5, 10)
        assert [result if isinstance(result, int) else type(result) for result in results] == [1, ShardLost, 2]
        assert await all_reached(store) == [ends[2], ends[3], ends[5]]
        assert await store.purge_reached([], 5, 10) == []


class Loads(Harness):
    async def test_many_page_requests_are_answered_in_their_order(self, store: Store, fence: Fence) -> None:
        fences = [fence, await take(store, 1), await take(store, 2)]
        timers = [[make_timer(f"{s}-{n}", 10 + n) for n in range(4)] for s in range(3)]
        await store.commit([Batch(owned, timers[s]) for s, owned in enumerate(fences)])
        pages = await load(
            store,
            [
                PageRequest(2, BEFORE_ALL, FAR, 2),
                PageRequest(0, BEFORE_ALL, 11, 50),
                PageRequest(3, BEFORE_ALL, FAR, 50),
                PageRequest(1, timers[1][1].position, FAR, 50),
                PageRequest(2, timers[2][2].position, FAR, 50),
                PageRequest(99, BEFORE_ALL, FAR, 50),
            ],
        )
        wanted = [timers[2][:2], timers[0][:2], [], timers[1][2:], timers[2][3:], []]
        assert [list(page.timers) for page in pages] == wanted
        assert [page.next is None for page in pages] == [False, True, True, True, True, True]
        assert await store.load([]) == []

    @pytest.mark.parametrize("page", [1, 2, 3, 5, 6, 7, 8, 100])
    async def test_pages_of_any_size_together_are_complete(self, store: Store, fence: Fence, page: int) -> None:
        timers = [make_timer(f"{time}-{n}", time) for time in (5, 6, 6_000) for n in range(2 + time % 3)]
        await put(store, fence, *timers)
        whole = sorted(timers, key=lambda timer: timer.position)
        assert await all_timers(store, page=page) == whole
        for until_ms in (4, 5, 6, 5_999, 6_000):
            found: list[Timer] = []
            after = BEFORE_ALL
            while True:
                request = await load_one(store, 0, after, until_ms, page)
                assert len(request.timers) <= page
                found += request.timers
                if request.next is None:
                    break
                assert request.next > after
                after = request.next
            assert found == [timer for timer in whole if timer.execute_at_ms <= until_ms]

    async def test_after_is_exclusive_and_until_inclusive(self, store: Store, fence: Fence) -> None:
        timers = sorted((make_timer(f"n-{n}", 10 + n // 3) for n in range(9)), key=lambda timer: timer.position)
        await put(store, fence, *timers)
        for index, timer in enumerate(timers):
            assert list((await load_one(store, 0, timer.position, 12, 50)).timers) == timers[index + 1 :]
            just_before = timer.position._replace(uuid_low=timer.uuid_low - 1)
            assert list((await load_one(store, 0, just_before, 12, 50)).timers) == timers[index:]
        assert list((await load_one(store, 0, BEFORE_ALL, 11, 50)).timers) == timers[:6]

    async def test_a_page_without_next_is_the_end_of_the_range(self, store: Store, fence: Fence) -> None:
        await put(store, fence, *(make_timer(f"n-{n}", n) for n in range(5)))
        assert (await load_one(store, 0, BEFORE_ALL, FAR, 50)).next is None
        assert (await load_one(store, 0, BEFORE_ALL, 2, 50)).next is None
        assert (await load_one(store, 0, BEFORE_ALL, FAR, 4)).next is not None
        nothing = await load_one(store, 3, BEFORE_ALL, FAR, 4)
        assert (list(nothing.timers), nothing.next) == ([], None)

    async def test_a_load_reads_only_its_shard(self, store: Store, fence: Fence) -> None:
        other_fence = await take(store, 1)
        here, there = make_timer("here"), make_timer("there")
        await put(store, fence, here)
        await put(store, other_fence, there)
        assert await all_timers(store, 0) == [here]
        assert await all_timers(store, 1) == [there]

    async def test_keys_are_answered_in_their_order_also_if_repeated(self, store: Store, fence: Fence) -> None:
        one, two = make_timer("one"), make_timer("two")
        await put(store, fence, one, two)
        keys = [two.key, TimerKey("test", "none"), one.key, two.key]
        assert await store.get_many([(0, key) for key in keys]) == [Found(two), Found(), Found(one), Found(two)]


class Lists(Harness):
    async def fill(self, store: Store) -> list[Timer]:
        """Timers and reached timers in all shards and two namespaces, with different values in all fields that can be
        filtered by."""
        batches: dict[int, tuple[list[Timer], list[Timer]]] = {n: ([], []) for n in range(SHARDS)}
        for number in range(60):
            timer = make_timer(
                f"{'order' if number % 3 else 'ord%r'}-{number}",
                1_000 + number // 4,
                namespace="other" if number % 10 == 9 else "test",
                correlation_id=None if number % 4 else f"trace-{number % 8}",
                extras=Extras(tags=(("red", "blue"), ("red",), ("red%",), ())[number % 4]),
            )
            batches[shard_of(timer.timer_id, SHARDS)][number % 5 == 0].append(timer)
        for shard_id, (waiting, ended) in batches.items():
            reached = [
                make_reached(timer, list(Outcome)[n % 4], purge_at_ms=9_000 - timer.execute_at_ms % 7)
                for n, timer in enumerate(ended)
            ]
            await commit_one(store, Batch(await take(store, shard_id), waiting, (), reached))
        return [timer for waiting, ended in batches.values() for timer in waiting + ended]

    async def test_many_pages_over_many_shards_are_complete_and_in_order(self, store: Store) -> None:
        """Shards of very different size and pages much smaller than the whole, so that merging takes many rounds."""
        fences = [await take(store, shard_id) for shard_id in range(SHARDS)]
        timers: list[Timer] = []
        for start in range(0, 600, 60):
            batches: dict[int, list[Timer]] = {}
            for number in range(start, start + 60):
                batch = batches.setdefault(number % SHARDS if number % 7 else 0, [])
                timers.append(make_timer(f"n-{number}", (number * 7_919) % 100_000))
                batch.append(timers[-1])
                if number % 3 == 0:  # with rows of another namespace between them
                    batch.append(make_timer(f"o-{number}", (number * 104_729) % 100_000, namespace="other"))
            results = await store.commit([Batch(fences[shard_id], batch) for shard_id, batch in batches.items()])
            assert not any(isinstance(result, Exception) for result in results), results
        for limit in (7, 37, 100):
            found, _ = await listed(store, ListQuery(namespace="test", num_shards=SHARDS, limit=limit))
            assert found == sorted(timers, key=lambda timer: timer.position), f"pages of {limit}"

    async def test_lists_agree_with_a_simple_filter_for_every_page_size(self, store: Store) -> None:
        await self.fill(store)
        waiting = (await listed(store, ListQuery(namespace="test", num_shards=SHARDS, limit=1_000)))[0]
        ended = await all_reached(store)
        assert len(waiting) > 40
        assert len(ended) > 8
        for query in self.queries():
            due = [(t, t.execute_at_ms) for t in waiting]
            wanted = sorted((t for t, at in due if _wanted(query, t, at)), key=lambda timer: timer.position)
            over = [r for r in ended if _wanted(query, r.timer, r.timer.scheduled_at_ms)]
            for limit in (1, 3, 100):
                got = await listed(store, replace(query, limit=limit))
                assert got == (wanted, []), query
                for outcomes in ({Outcome.FAILED}, {Outcome.DELIVERED, Outcome.CANCELLED}, EVERY_OUTCOME):
                    some = sorted((r for r in over if r.outcome in outcomes), key=lambda reached: reached.position)
                    got = await listed(store, replace(query, limit=limit, outcomes=frozenset(outcomes)))
                    assert got == ([], some), query

    def queries(self) -> list[ListQuery]:
        plain = ListQuery(namespace="test", num_shards=SHARDS)
        changes: list[dict[str, object]] = [
            {},
            {"due_from_ms": 1_005},
            {"due_until_ms": 1_005},
            {"due_from_ms": 1_003, "due_until_ms": 1_004},
            {"due_from_ms": 1_004, "due_until_ms": 1_004},
            {"id_prefix": "ord%"},
            {"id_prefix": "ORDER"},
            {"id_prefix": "order-1"},
            {"tag": "red"},
            {"tag": "red%"},
            {"tag": "re"},
            {"correlation_id": "trace-4"},
            {"correlation_id": "trace"},
            {"correlation_id": "trace-0", "tag": "blue", "due_from_ms": 1_002, "id_prefix": "o"},
        ]
        return [msgspec.structs.replace(plain, **change) for change in changes]

    async def test_a_list_contains_one_namespace_and_its_shards_only(self, store: Store) -> None:
        timers = await self.fill(store)
        others, _ = await listed(store, ListQuery(namespace="other", num_shards=SHARDS))
        assert others
        assert {timer.namespace for timer in others} == {"other"}
        some, _ = await listed(store, ListQuery(namespace="test", num_shards=2, limit=7))
        assert some
        assert {shard_of(timer.timer_id, SHARDS) for timer in some} <= {0, 1}
        assert await listed(store, ListQuery(namespace="nobody's", num_shards=SHARDS)) == ([], [])
        assert {timer.namespace for timer in timers} == {"test", "other"}

    async def test_a_correlation_id_is_that_of_one_namespace(self, store: Store) -> None:
        """Namespaces share shards, ids and correlation ids: nobody finds the timers of another tenant by them."""
        names = ("test", "test ", "Test", "tes", "other")
        ids = [f"t-{number}" for number in range(2 * SHARDS)]
        expected: dict[str, tuple[set[str], set[str]]] = {}
        for shard_id in range(SHARDS):
            fence = await take(store, shard_id)
            here = [timer_id for timer_id in ids if shard_of(timer_id, SHARDS) == shard_id]
            for name in names:
                scheduled = [make_timer(timer_id, 9, namespace=name, correlation_id="c") for timer_id in here]
                ended = [make_reached(timer) for timer in scheduled[::2]]
                others = [
                    make_timer(f"{kind}-{shard_id}", 9, namespace=name, correlation_id=correlation_id)
                    for kind, correlation_id in (("none", None), ("upper", "C"), ("space", "c "), ("longer", "cc"))
                ]
                await store.commit([Batch(fence, [*scheduled, *others], (), ended)])
                waiting, over = expected.setdefault(name, (set(), set()))
                waiting |= set(here)
                over |= {one.timer.timer_id for one in ended}
        for name, (waiting, over) in expected.items():
            for outcomes, wanted in ((frozenset(), waiting), (EVERY_OUTCOME, over)):
                query = ListQuery(
                    namespace=name, num_shards=SHARDS, limit=3, correlation_id="c", outcomes=frozenset(outcomes)
                )
                timers, reached = await listed(store, query)
                found = [*timers, *(one.timer for one in reached)]
                assert {timer.namespace for timer in found} == {name}
                assert sorted(timer.timer_id for timer in found) == sorted(wanted)

    async def test_every_namespace_of_a_correlation_id_is_found_once(self, store: Store) -> None:
        fence = await take(store, 0)
        scheduled = {"a", "a ", "A", "b", "é", "\ud7ff", "😀", "x" * 255}
        names = scheduled | {"over", "none"}
        for name in names:
            await store.put_namespace(Namespace(name=name, num_shards=SHARDS, created_at_ms=1), None)
        timers = [
            make_timer(timer_id, 9, namespace=name, correlation_id="c") for name in scheduled for timer_id in ("s", "t")
        ]
        ended = make_reached(make_timer("r", 9, namespace="over", correlation_id="c"))
        others = [make_timer("o", 9, namespace="none", correlation_id=other) for other in (None, "C", "c ", "cc")]
        await store.commit([Batch(fence, timers, (), [ended])])
        for other in others:
            await put(store, fence, other)
        for correlation_id, wanted in (("c", scheduled | {"over"}), ("nobody's", set())):
            found: list[str] = []
            following = await store.next_namespace(correlation_id, "")
            while following is not None:
                found.append(following)
                assert len(found) <= len(names), "it comes to an end"
                following = await store.next_namespace(correlation_id, following)
            assert len(found) == len(set(found))
            assert wanted <= set(found) <= names  # a store without an index finds all

    async def test_a_rare_timer_among_many_of_another_namespace_is_found_by_following_next(self, store: Store) -> None:
        fence = await take(store, 0)
        count = min(1_000, store.capabilities.batch_max)
        for start in range(0, 3 * count, count):
            await put(store, fence, *(make_timer(f"n-{n}", n, namespace="crowd") for n in range(start, start + count)))
        rare = make_timer("rare", 2 * count)
        await put(store, fence, rare)
        assert await listed(store, ListQuery(namespace="test", num_shards=SHARDS, limit=10)) == ([rare], [])


def _wanted(query: ListQuery, timer: Timer, due_ms: int) -> bool:
    tests = [
        query.due_from_ms is None or due_ms >= query.due_from_ms,
        query.due_until_ms is None or due_ms < query.due_until_ms,
        query.id_prefix is None or timer.timer_id[: len(query.id_prefix)] == query.id_prefix,
        query.tag is None or query.tag in timer.extras.tags,
        query.correlation_id is None or timer.correlation_id == query.correlation_id,
    ]
    return all(tests)
