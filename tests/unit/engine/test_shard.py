"""A Shard by itself, without lanes and engine: every step of its life, and its accounts after each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from engine_world import check_shard

from duetime.domain.settle import Settlement
from duetime.domain.timer import BEFORE_ALL, Extras, Position, Timer, TimerKey
from duetime.engine.shard import UNKNOWN, Entry, PendingWrite, Phase, Shard, Written, end_of
from duetime.errors import Busy, NotOwner, OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Committed, Fence, Found, Page, ShardRow, Unreadable
from duetime.testing import make_reached, make_timer
from duetime.testing.virtual import VirtualClock, run_virtual

NOW_MS = 1_800_000_000_000
UNTIL_MS = NOW_MS + 60_000
A = TimerKey("test", "a")
B = TimerKey("test", "b")


class Surroundings:
    """What a shard needs of an engine: counters, and which entries are armed."""

    def __init__(self) -> None:
        self.writes_waiting = 0
        self.writes_waiting_max = 1_000
        self.unsettled = 0
        self.weight = 0
        self.now_ms = 1_000
        self.armed: list[Entry] = []
        self.told_written = 0

    def arm(self, entry: Entry) -> None:
        assert entry not in self.armed, "armed twice"
        self.armed.append(entry)

    def disarm(self, entry: Entry) -> None:
        self.armed.remove(entry)

    def remember(self, weight: int) -> None:
        self.weight += weight

    def written(self, shard: Shard) -> None:
        self.told_written += 1

    def boot_ms(self) -> int:
        return self.now_ms


class Bench:
    """One shard that has loaded everything up to UNTIL_MS, and what a lane and the fire loop do with it."""

    def __init__(self, low_water: Position = BEFORE_ALL, *, loaded: bool = True, version: int = 3) -> None:
        self.yard = Surroundings()
        self.shard = Shard(ShardRow(7, version, 1, "me", low_water=low_water), self.yard)
        if loaded:
            self.load([])

    def check(self) -> None:
        yard = self.yard
        check_shard(self.shard)
        ops = [*self.shard.pending.values(), *self.shard.committing.values()]
        assert yard.writes_waiting == len(ops), "writes_waiting drifts"
        assert yard.unsettled == sum(op.settlement is not None for op in ops), "unsettled drifts"
        assert yard.weight == sum(entry.weight for entry in self.shard.entries.values()), "weight drifts"
        armed = [entry for entry in self.shard.entries.values() if entry.phase is Phase.ARMED]
        assert {id(entry) for entry in yard.armed} == {id(entry) for entry in armed}

    def load(self, timers: list[Timer], more: Position | None = None, until_ms: int = UNTIL_MS, **rest: Any) -> None:
        self.shard.load_begins()
        self.shard.load_ended(Page(timers, more, **rest), until_ms)

    def write(self, put: Timer, **rest: Any) -> asyncio.Future[Written]:
        return self.shard.write(put.key, put, [], **rest)

    def delete(self, key: TimerKey = A) -> asyncio.Future[Written]:
        return self.shard.write(key, None, [])

    def take(self, room: int = 100, chars: int = 1_000_000) -> Batch:
        batch = self.shard.next_batch(room, chars)
        assert batch is not None
        return batch

    def commit(self, replaced: frozenset[int] = frozenset()) -> Batch:
        batch = self.take()
        self.shard.committed(batch, Committed(replaced))
        self.check()
        return batch

    def put(self, timer: Timer) -> Entry:
        """On disk and in memory."""
        self.write(timer)
        self.commit()
        return self.shard.entries[timer.key]

    def queue(self, entry: Entry) -> None:
        """What the fire loop does with a due timer."""
        self.yard.disarm(entry)
        entry.phase = Phase.QUEUED

    def send(self, entry: Entry) -> None:
        self.queue(entry)
        assert self.shard.begin(entry, NOW_MS, again=False)

    def recover(self, found: dict[TimerKey, Found], low_water: Position = BEFORE_ALL) -> None:
        self.shard.recovered(ShardRow(7, self.shard.fence.version + 1, 2, "me", low_water=low_water), found)
        self.check()


def on_a_bench(story: Callable[[Bench], Awaitable[None]], **settings: Any) -> None:
    async def told(clock: VirtualClock) -> None:
        bench = Bench(**settings)
        await story(bench)
        bench.check()
        bench.shard.drop(NotOwner())
        bench.check()
        assert bench.yard.armed == []
        assert (bench.yard.writes_waiting, bench.yard.unsettled, bench.yard.weight) == (0, 0, 0)

    run_virtual(told)


def timer(timer_id: str = "a", execute_at_ms: int = NOW_MS, **changes: Any) -> Timer:
    return make_timer(timer_id, execute_at_ms, **changes)


def delivered(entry: Entry) -> Settlement:
    return Settlement(reached=make_reached(entry.timer), succeeded=True)


def phase_of(entry: Entry) -> Phase:
    """Asked for by a call, because a type checker does not see that it changes."""
    return entry.phase


def error_of(future: asyncio.Future[Written]) -> BaseException | None:
    return future.exception() if future.done() else None


class TestWriting:
    def test_a_write_is_in_memory_only_once_it_is_on_disk(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            writing = bench.write(timer())
            assert shard.current(A) == timer()
            assert shard.entries == {}
            batch = bench.take()
            assert (list(batch.puts), list(batch.deletes), list(batch.reached)) == ([timer()], [], [])
            assert batch.fence == Fence(7, 3, 1)
            assert not shard.is_quiet
            assert shard.current(A) == timer()
            assert not writing.done()
            shard.committed(batch, Committed())
            assert writing.result() == (timer(), False)
            entry = shard.entries[A]
            assert (entry.timer, entry.phase, entry.shard) == (timer(), Phase.ARMED, shard)
            assert shard.current(A) == timer()
            assert shard.current(B) is UNKNOWN
            assert shard.is_quiet

        on_a_bench(story)

    def test_a_timer_that_is_written_anew_does_not_fire_meanwhile(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.write(timer(payload="2"))
            assert phase_of(entry) is Phase.WRITING
            bench.check()
            bench.take()
            bench.check()
            assert not shard_begins(bench, entry)

        on_a_bench(story)

    def test_writes_about_one_timer_merge_and_everybody_is_told(self) -> None:
        async def story(bench: Bench) -> None:
            first = bench.write(timer(payload="1"))
            second = bench.shard.write(A, None, [make_reached(timer(payload="1"))])
            third = bench.shard.write(A, timer(payload="3"), [make_reached(timer(payload="2"))])
            bench.check()
            batch = bench.commit()
            assert list(batch.puts) == [timer(payload="3")]
            assert list(batch.reached) == [make_reached(timer(payload="1")), make_reached(timer(payload="2"))]
            assert first.result() == (timer(payload="1"), False)
            assert second.result() == (None, True)
            assert third.result() == (timer(payload="3"), False), "it was deleted before"

        on_a_bench(story)

    def test_whether_it_replaced_one_is_said_by_memory_or_else_by_the_store(self) -> None:
        async def story(bench: Bench) -> None:
            far = timer("far", UNTIL_MS + 1)
            asked = [bench.write(timer("x")), bench.write(far)]
            bench.commit(replaced=frozenset({1}))
            assert [future.result()[1] for future in asked] == [False, True]
            asked = [bench.write(timer("x")), bench.write(far)]
            bench.commit()
            assert [future.result()[1] for future in asked] == [True, False]
            first = bench.write(far)
            bench.take()
            second = bench.write(far)
            bench.check()
            bench.shard.committed(Batch(bench.shard.fence, [far]), Committed())
            bench.commit()
            assert (first.result()[1], second.result()[1]) == (False, True), "it follows one that was admitted"

        on_a_bench(story)

    def test_what_was_admitted_last_says_whether_one_is_replaced(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(payload="1"))
            batch = bench.take()
            bench.delete()
            third = bench.write(timer(payload="3"))
            bench.shard.committed(batch, Committed())
            bench.commit()
            assert third.result()[1] is False, "it was deleted before"

        on_a_bench(story)

    def test_while_one_is_committing_the_next_waits_and_the_lane_is_told_of_it(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(payload="1"))
            assert bench.yard.told_written == 1
            batch = bench.take()
            second = bench.write(timer(payload="2"))
            bench.write(timer("b"))
            assert bench.shard.next_batch(100, 1_000_000) is None, "one at a time"
            assert bench.shard.current(A) == timer(payload="2")
            bench.yard.told_written = 0
            bench.shard.committed(batch, Committed())
            bench.check()
            assert bench.yard.told_written == 1
            assert phase_of(bench.shard.entries[A]) is Phase.WRITING, "it must not fire: another write is on its way"
            bench.yard.told_written = 0
            bench.commit()
            assert second.result() == (timer(payload="2"), True)
            assert bench.shard.entries[A].timer.payload == "2"
            assert bench.yard.told_written == 0
            assert bench.shard.next_batch(100, 1_000_000) is None, "nothing is waiting"

        on_a_bench(story)

    def test_one_who_has_gone_is_not_told(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer()).cancel()
            other = bench.write(timer("b"))
            bench.commit()
            assert other.done()
            bench.write(timer()).cancel()
            bench.take()
            bench.recover({A: Found(timer())})

        on_a_bench(story)

    def test_the_queue_is_bounded(self) -> None:
        async def story(bench: Bench) -> None:
            bench.yard.writes_waiting_max = 2
            bench.write(timer("a"))
            bench.write(timer("b"))
            with pytest.raises(Busy):
                bench.write(timer("c"))

        on_a_bench(story)

    @pytest.mark.parametrize("state", ["closing", "dropped"])
    def test_a_shard_that_is_given_away_takes_no_writes(self, state: str) -> None:
        async def story(bench: Bench) -> None:
            setattr(bench.shard, state, True)
            with pytest.raises(NotOwner):
                bench.write(timer())

        on_a_bench(story)

    def test_one_that_asks_to_be_told_is_told_when_what_was_admitted_last_is_decided(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            assert shard.undecided(A) is None
            bench.write(timer(payload="1"))
            batch = bench.take()
            committing = shard.undecided(A)
            bench.write(timer(payload="2"))
            pending = shard.undecided(A)
            assert committing is not None
            assert pending is not None
            shard.committed(batch, Committed())
            assert committing.done()
            assert not pending.done()
            bench.commit()
            assert pending.result() == (timer(payload="2"), True)

        on_a_bench(story)

    def test_generations_never_repeat_also_after_the_shard_was_claimed_again(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            first = [shard.next_generation() for _ in range(3)]
            assert first == [3 << 32 | 1, 3 << 32 | 2, 3 << 32 | 3]
            bench.write(timer())
            bench.take()
            bench.recover({A: Found(timer())})
            assert shard.next_generation() == 4 << 32 | 1
            again = Bench(version=5)
            assert again.shard.next_generation() == 5 << 32 | 1

        on_a_bench(story)


def shard_begins(bench: Bench, entry: Entry) -> bool:
    return bench.shard.begin(entry, NOW_MS, again=False)


class TestBatches:
    def test_a_batch_has_as_many_rows_as_there_is_room_for_and_the_rest_waits_in_order(self) -> None:
        async def story(bench: Bench) -> None:
            for name in "abcde":
                bench.write(timer(name))
            batch = bench.take(room=3)
            assert [put.timer_id for put in batch.puts] == ["a", "b", "c"]
            assert bench.shard.committing_rows == 3
            assert list(bench.shard.pending) == [timer("d").key, timer("e").key]
            bench.check()
            bench.shard.committed(batch, Committed())
            batch = bench.take(room=2)
            assert [put.timer_id for put in batch.puts] == ["d", "e"]
            assert bench.shard.committing_rows == 2
            assert bench.shard.pending == {}

        on_a_bench(story)

    def test_an_end_is_two_rows(self) -> None:
        async def story(bench: Bench) -> None:
            for name in "abc":
                bench.shard.write(timer(name).key, None, [make_reached(timer(name))])
            batch = bench.take(room=5)
            assert [key.timer_id for key in batch.deletes] == ["a", "b"]
            assert (len(batch.reached), bench.shard.committing_rows) == (2, 4)

        on_a_bench(story)

    def test_there_is_at_least_one_op_in_it_whatever_it_weighs(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.write(A, None, [make_reached(timer()), make_reached(timer(generation=2))])
            bench.write(timer("b", payload="x" * 1_000))
            assert list(bench.take(room=1).deletes) == [A]
            bench.shard.not_committed()
            assert [put.timer_id for put in bench.take(chars=1).puts] == ["b"], "what failed waits behind the others"

        on_a_bench(story)

    def test_the_characters_of_a_batch_are_bounded_and_counted_from_above(self) -> None:
        async def story(bench: Bench) -> None:
            url = "http://r.example/" + "u" * 83
            plain = timer("plain", callback_url=url)
            bench.write(plain)
            bench.take()
            assert bench.shard.committing_chars == 300
            bench.shard.not_committed()
            bench.write(timer("payload", callback_url=url, payload="x" * 50))
            bench.take()
            assert bench.shard.committing_chars == 650
            bench.shard.not_committed()
            extras = Extras(headers={"ab": "cde"}, tags=("12", "345"), last_error="oops")
            bench.write(timer("extras", callback_url=url, extras=extras))
            bench.take()
            assert bench.shard.committing_chars == 950 + 4 * (5 + 5 + 4)
            bench.shard.not_committed()
            bench.shard.write(B, None, [make_reached(plain)])
            bench.take()
            assert bench.shard.committing_chars == 950 + 4 * 14 + 300
            bench.shard.not_committed()
            bench.take(chars=650)
            assert len(bench.shard.committing) == 2, "enough once it is reached"

        on_a_bench(story)

    def test_extras_without_headers_and_errors_are_counted(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(callback_url="u" * 100, extras=Extras(tags=("12",))))
            bench.take()
            assert bench.shard.committing_chars == 308

        on_a_bench(story)

    def test_an_end_that_is_not_kept_is_not_written(self) -> None:
        async def story(bench: Bench) -> None:
            gone = make_reached(timer(), purge_at_ms=NOW_MS)
            kept = make_reached(timer(generation=2), purge_at_ms=NOW_MS + 1)
            bench.shard.write(A, None, [gone, kept])
            assert list(bench.commit().reached) == [kept]

        on_a_bench(story)

    @pytest.mark.parametrize("state", ["recovering", "dropped"])
    def test_nothing_is_committed_by_a_shard_that_recovers_or_is_dropped(self, state: str) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer())
            setattr(bench.shard, state, True)
            assert bench.shard.next_batch(100, 1_000_000) is None

        on_a_bench(story)


class TestLowWater:
    def test_a_put_below_the_low_water_takes_it_down_in_the_same_batch(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("c", NOW_MS + 1))
            assert bench.take().low_water is None
            bench.shard.not_committed()
            bench.write(timer("a", NOW_MS - 5))
            bench.write(timer("b", NOW_MS))
            batch = bench.take()
            assert batch.low_water == end_of(NOW_MS - 6)
            assert bench.shard.low_water == end_of(NOW_MS), "not before it is on disk"
            bench.shard.committed(batch, Committed())
            assert bench.shard.low_water == end_of(NOW_MS - 6)
            bench.write(timer("d", NOW_MS - 4))
            assert bench.commit().low_water is None, "it is above"
            assert bench.shard.low_water == end_of(NOW_MS - 6)

        on_a_bench(story, low_water=end_of(NOW_MS))

    def test_a_put_in_the_millisecond_of_the_low_water_takes_it_down_too(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("b", NOW_MS))
            assert bench.commit().low_water == end_of(NOW_MS - 1)

        on_a_bench(story, low_water=end_of(NOW_MS))

    def test_what_was_written_below_the_low_water_is_found_after_a_restart(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("old", NOW_MS - 500))
            low_water = bench.commit().low_water
            assert low_water is not None
            assert low_water < timer("old", NOW_MS - 500).position

        on_a_bench(story, low_water=end_of(NOW_MS))

    def test_it_rises_to_just_below_the_first_timer_in_memory(self) -> None:
        async def story(bench: Bench) -> None:
            bench.put(timer("first", NOW_MS + 1_000))
            bench.put(timer("later", NOW_MS + 2_000))
            bench.write(timer("b", NOW_MS + 3_000))
            batch = bench.take()
            assert bench.shard.raise_low_water(batch).low_water == end_of(NOW_MS + 999)
            raised = bench.shard.raise_low_water(batch)
            assert (raised.fence, raised.puts, raised.deletes, raised.reached) == (
                batch.fence,
                batch.puts,
                batch.deletes,
                batch.reached,
            )
            bench.shard.committed(raised, Committed())
            assert bench.shard.low_water == end_of(NOW_MS + 999)

        on_a_bench(story)

    def test_it_rises_no_further_than_what_is_being_put(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("b", NOW_MS + 3_000))
            bench.write(timer("c", NOW_MS + 4_000))
            assert bench.shard.raise_low_water(bench.take()).low_water == end_of(NOW_MS + 2_999)

        on_a_bench(story)

    def test_it_rises_no_further_than_the_horizon(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("far", UNTIL_MS + 5_000))
            raised = bench.shard.raise_low_water(bench.take()).low_water
            assert raised == end_of(UNTIL_MS - 1)

        on_a_bench(story)

    def test_it_is_not_lowered_by_raising_it(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("b", NOW_MS + 1))
            batch = bench.take()
            assert bench.shard.raise_low_water(batch) is batch, "it is there already"
            bench.shard.not_committed()
            bench.write(timer("b", NOW_MS + 2))
            assert bench.shard.raise_low_water(bench.take()).low_water == end_of(NOW_MS + 1)

        on_a_bench(story, low_water=end_of(NOW_MS))

    def test_a_batch_that_takes_it_down_is_not_raised(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("b", NOW_MS - 10))
            batch = bench.take()
            assert bench.shard.raise_low_water(batch).low_water == end_of(NOW_MS - 11)

        on_a_bench(story, low_water=end_of(NOW_MS))

    def test_it_stays_below_a_row_that_cannot_be_decoded(self) -> None:
        async def story(bench: Bench) -> None:
            row = Unreadable(Position(NOW_MS + 100, 1, 1), "test", "x", "broken")
            bench.load([], unreadable=[row])
            bench.write(timer("far", UNTIL_MS + 5_000))
            assert bench.shard.raise_low_water(bench.take()).low_water == end_of(NOW_MS + 99)

        on_a_bench(story)

    def test_it_does_not_rise_at_all_where_not_all_such_rows_are_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("duetime.engine.shard._UNREADABLE_MAX", 2)

        async def story(bench: Bench) -> None:
            rows = [Unreadable(Position(NOW_MS + n, 1, 1), "test", f"x{n}", "broken") for n in range(3)]
            bench.load([], unreadable=rows[:2])
            bench.write(timer("b", UNTIL_MS - 1))
            batch = bench.take()
            assert bench.shard.raise_low_water(batch).low_water == end_of(NOW_MS - 1)
            bench.load([], unreadable=rows)
            assert len(bench.shard.unreadable) == 2
            assert bench.shard.raise_low_water(batch) is batch

        on_a_bench(story)

    def test_after_a_recovery_it_is_what_the_store_says(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer("a", NOW_MS - 5))
            bench.take()
            bench.recover({A: Found()}, low_water=end_of(NOW_MS - 50))
            assert bench.shard.low_water == end_of(NOW_MS - 50)

        on_a_bench(story, low_water=end_of(NOW_MS))


class TestNotApplied:
    def test_what_was_not_applied_waits_again_and_the_lane_is_told(self) -> None:
        async def story(bench: Bench) -> None:
            writing = bench.write(timer())
            bench.take()
            bench.yard.told_written = 0
            bench.shard.not_committed("the disk is full")
            bench.check()
            assert bench.yard.told_written == 1
            assert not writing.done()
            assert bench.shard.trouble == "the disk is full"
            bench.commit()
            assert writing.result() == (timer(), False)
            assert bench.shard.trouble == ""

        on_a_bench(story)

    def test_it_merges_with_what_came_meanwhile(self) -> None:
        async def story(bench: Bench) -> None:
            first = bench.shard.write(A, timer(payload="1"), [make_reached(timer(generation=1))])
            other = bench.write(timer("b"))
            bench.take()
            second = bench.shard.write(A, timer(payload="2"), [make_reached(timer(generation=2))])
            bench.shard.not_committed()
            bench.check()
            batch = bench.commit()
            assert [put.payload for put in batch.puts if put.timer_id == "a"] == ["2"]
            assert len(batch.reached) == 2
            assert [future.result()[0] for future in (first, second)] == [timer(payload="1"), timer(payload="2")]
            assert other.done()

        on_a_bench(story)

    def test_a_delete_that_merges_with_an_end_leaves_no_timer(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            assert bench.shard.settle(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 10, attempts=1)))
            bench.take()
            deleting = bench.delete()
            bench.shard.not_committed()
            bench.check()
            batch = bench.commit()
            assert (list(batch.puts), list(batch.deletes)) == ([], [A])
            assert deleting.done()
            assert A not in bench.shard.entries

        on_a_bench(story)


class TestRecovery:
    def test_what_the_store_holds_is_done_and_what_it_does_not_hold_is_written_again(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            there, not_there = bench.write(timer("a")), bench.write(timer("b"))
            bench.take()
            shard.recovering = True
            bench.yard.now_ms = 5_000
            bench.recover({A: Found(timer("a")), B: Found()})
            assert not shard.recovering
            assert shard.fence == Fence(7, 4, 2)
            assert shard.fenced_at_ms == 5_000
            assert there.result() == (timer("a"), None)
            assert phase_of(shard.entries[A]) is Phase.ARMED
            assert not not_there.done()
            assert bench.commit().puts == [timer("b")]
            assert not_there.done()

        on_a_bench(story)

    def test_one_that_the_store_holds_in_another_form_is_written_again(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(payload="new"))
            bench.take()
            bench.recover({A: Found(timer(payload="old"))})
            assert list(bench.shard.pending) == [A]

        on_a_bench(story)

    @pytest.mark.parametrize(
        ("found", "done"),
        [
            (Found(), False),
            (Found(reached=make_reached(timer())), True),
            (Found(reached=make_reached(timer(generation=0))), False),
            (Found(timer()), False),
            (Found(reached=make_reached(timer()), unreadable="broken"), False),
        ],
    )
    def test_a_delete_is_done_if_its_last_end_is_there(self, found: Found, done: bool) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.write(A, None, [make_reached(timer(generation=0)), make_reached(timer())])
            bench.take()
            bench.recover({A: found})
            assert (A not in bench.shard.pending) is done

        on_a_bench(story)

    def test_a_delete_without_an_end_that_is_kept_is_done_if_nothing_is_there(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.write(A, None, [make_reached(timer(), purge_at_ms=NOW_MS)])
            bench.delete(B)
            bench.take()
            bench.recover({A: Found(), B: Found(reached=make_reached(timer("b")))})
            assert bench.shard.is_quiet

        on_a_bench(story)

    def test_a_put_is_done_if_it_is_there_whatever_ended_before(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.write(A, timer(), [make_reached(timer(generation=0))])
            bench.take()
            bench.recover({A: Found(timer())})
            assert bench.shard.is_quiet

        on_a_bench(story)

    def test_an_outcome_that_was_recorded_is_not_recorded_again(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.settle(entry, delivered(entry))
            bench.check()
            bench.take()
            bench.recover({A: Found(reached=make_reached(timer()))})
            assert bench.yard.unsettled == 0
            assert bench.shard.is_quiet
            assert bench.shard.entries == {}

        on_a_bench(story)

    def test_a_due_timer_that_waited_for_it_is_armed_once(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.write(timer("b"))
            bench.take()
            bench.shard.recovering = True
            bench.yard.disarm(entry)
            bench.shard.stall(entry)
            bench.shard.stall(entry)
            assert phase_of(entry) is Phase.WRITING
            bench.recover({B: Found()})
            assert phase_of(entry) is Phase.ARMED
            assert bench.shard.stalled == []

        on_a_bench(story)

    def test_one_that_was_written_deleted_or_is_held_meanwhile_is_not_armed_by_it(self) -> None:
        async def story(bench: Bench) -> None:
            entries = [bench.put(timer(name)) for name in "abcd"]
            bench.write(timer("a", payload="new"))
            bench.delete(timer("d").key)
            bench.take()
            bench.shard.recovering = True
            for entry in entries[1:3]:
                bench.yard.disarm(entry)
            for entry in entries:
                bench.shard.stall(entry)
            bench.write(timer("b", payload="new"))
            async with bench.shard.key_lock(timer("c").key):
                bench.recover({A: Found(), timer("d").key: Found()})
                assert [entry.phase for entry in entries[:3]] == [Phase.WRITING] * 3
                assert phase_of(entries[3]) is Phase.GONE
            assert phase_of(entries[2]) is Phase.ARMED

        on_a_bench(story)

    def test_one_that_is_not_in_memory_any_more_is_not_armed_by_it(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.stall(Entry(timer(), bench.shard))
            bench.put(timer(payload="2"))
            bench.recover({})
            assert [entry.timer.payload for entry in bench.yard.armed] == ["2"]

        on_a_bench(story)

    def test_what_is_decided_by_it_does_not_fire_before_it_is_over(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.queue(entry)
            bench.shard.recovering = True
            assert not bench.shard.begin(entry, NOW_MS, again=False)
            bench.shard.not_sent(entry, begun=False)
            assert phase_of(entry) is Phase.WRITING
            bench.check()
            bench.recover({})
            assert phase_of(entry) is Phase.ARMED

        on_a_bench(story)


class TestExpiry:
    """Writes whose users have waited for too long."""

    def test_one_that_waits_is_told_that_it_was_not_applied_and_is_not(self) -> None:
        async def story(bench: Bench) -> None:
            writing = bench.write(timer())
            bench.yard.now_ms = 2_000
            young = bench.write(timer("b"))
            bench.shard.expire(1_000)
            assert not writing.done(), "not before its time"
            bench.shard.expire(1_001)
            bench.check()
            assert isinstance(error_of(writing), StoreUnavailable)
            assert "could not be written to in time" in str(error_of(writing))
            assert not young.done()
            assert list(bench.commit().puts) == [timer("b")]

        on_a_bench(story)

    def test_it_is_told_why_the_store_refuses(self) -> None:
        async def story(bench: Bench) -> None:
            writing = bench.write(timer())
            bench.take()
            bench.shard.not_committed("the disk is full")
            bench.shard.expire(1_001)
            assert str(error_of(writing)) == "the disk is full"

        on_a_bench(story)

    def test_the_timer_is_armed_again_and_fires_as_it_was(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            deleting = bench.delete()
            bench.shard.expire(1_001)
            bench.check()
            assert isinstance(error_of(deleting), StoreUnavailable)
            assert phase_of(entry) is Phase.ARMED
            assert bench.shard.current(A) == timer()

        on_a_bench(story)

    def test_one_in_flight_is_in_flight_again_and_its_outcome_settles_it(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.delete()
            assert phase_of(entry) is Phase.WRITING
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(entry) is Phase.SENDING
            assert bench.shard.begin(entry, NOW_MS, again=True)
            assert bench.shard.settle(entry, delivered(entry))
            bench.check()
            batch = bench.commit()
            assert (list(batch.deletes), len(batch.reached)) == ([A], 1)
            assert bench.shard.is_quiet

        on_a_bench(story)

    def test_an_outcome_that_came_meanwhile_settles_it_after_all(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.delete()
            assert not bench.shard.settle(entry, delivered(entry)), "for now it is stale"
            assert bench.yard.unsettled == 0
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(entry) is Phase.SETTLING
            assert entry.outcome_of is None
            assert bench.yard.unsettled == 1
            batch = bench.commit()
            assert (list(batch.deletes), len(batch.reached)) == ([A], 1)

        on_a_bench(story)

    def test_an_attempt_that_was_not_made_meanwhile_is_made_again(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.delete()
            bench.shard.not_sent(entry, begun=True)
            assert phase_of(entry) is Phase.WRITING
            assert bench.shard.sending == {}
            bench.shard.expire(1_001)
            assert phase_of(entry) is Phase.ARMED

        on_a_bench(story)

    def test_one_that_was_never_there_leaves_nothing(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer())
            bench.shard.expire(1_001)
            assert bench.shard.is_quiet
            assert bench.shard.current(A) is UNKNOWN

        on_a_bench(story)

    def test_of_one_that_is_committing_nobody_knows(self) -> None:
        async def story(bench: Bench) -> None:
            writing = bench.write(timer())
            batch = bench.take()
            bench.shard.expire(1_000)
            assert not writing.done()
            bench.shard.expire(1_001)
            assert isinstance(error_of(writing), OutcomeUnknown)
            bench.check()
            bench.shard.committed(batch, Committed())
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED, "it was applied"

        on_a_bench(story)

    def test_one_that_follows_an_open_one_is_as_unknown_and_decided_with_it(self) -> None:
        async def story(bench: Bench) -> None:
            first = bench.write(timer(payload="1"))
            batch = bench.take()
            second = bench.write(timer(payload="2"))
            bench.shard.expire(1_001)
            assert [type(error_of(future)) for future in (first, second)] == [OutcomeUnknown, OutcomeUnknown]
            assert "earlier write" in str(error_of(second))
            bench.check()
            bench.shard.expire(1_001)
            bench.check()
            bench.shard.committed(batch, Committed())
            bench.shard.expire(1_001)
            assert bench.commit().puts == [timer(payload="2")]

        on_a_bench(story)

    def test_one_that_nobody_waits_for_is_given_up_if_it_was_not_applied(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer(payload="1"))
            bench.write(timer(payload="2"))
            other = bench.write(timer("b"))
            bench.take()
            bench.shard.expire(1_001)
            assert other.done()
            kept = bench.write(timer("c"))
            bench.shard.not_committed()
            bench.check()
            assert list(bench.shard.pending) == [timer("c").key]
            assert phase_of(entry) is Phase.ARMED
            assert bench.shard.current(A) == timer(payload="1")
            bench.commit()
            assert kept.done()

        on_a_bench(story)

    def test_one_that_somebody_builds_on_is_not_given_up(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(payload="1"))
            bench.take()
            bench.shard.expire(1_001)
            bench.yard.now_ms = 2_000
            second = bench.write(timer(payload="2"))
            bench.shard.not_committed()
            bench.check()
            assert bench.commit().puts == [timer(payload="2")]
            assert second.done()

        on_a_bench(story)

    def test_what_one_ended_that_somebody_builds_on_is_written_with_it(self) -> None:
        async def story(bench: Bench) -> None:
            bench.put(timer(payload="1"))
            bench.shard.write(A, None, [make_reached(timer(payload="1"))])
            bench.take()
            bench.shard.expire(1_001)
            second = bench.write(timer(payload="2"))
            bench.shard.not_committed()
            bench.check()
            assert list(bench.commit().reached) == [make_reached(timer(payload="1"))]
            assert second.result()[1] is False, "it was deleted before, and that is on disk too"

        on_a_bench(story)

    def test_one_that_somebody_still_asks_about_is_not_given_up(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer())
            bench.take()
            bench.shard.expire(1_001)
            asked = bench.shard.undecided(A)
            assert asked is not None
            bench.shard.not_committed()
            bench.check()
            bench.commit()
            assert asked.done(), "whoever asks is answered"

        on_a_bench(story)

    def test_one_that_followed_another_is_given_up_by_itself(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer(payload="1"))
            batch = bench.take()
            bench.write(timer(payload="2"))
            bench.shard.expire(1_001)
            bench.shard.committed(batch, Committed())
            bench.take()
            bench.shard.not_committed()
            bench.check()
            assert bench.shard.is_quiet
            assert bench.shard.entries[A].timer.payload == "1"
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED

        on_a_bench(story)

    def test_two_that_nobody_waits_for_are_given_up_together(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.delete()
            bench.take()
            bench.write(timer(payload="2"))
            bench.shard.expire(1_001)
            bench.shard.not_committed()
            bench.check()
            bench.take()
            bench.shard.not_committed()
            bench.check()
            assert bench.shard.is_quiet
            assert phase_of(entry) is Phase.ARMED

        on_a_bench(story)

    def test_one_whose_user_still_waits_is_not_given_up(self) -> None:
        async def story(bench: Bench) -> None:
            bench.write(timer())
            bench.take()
            bench.shard.not_committed()
            assert list(bench.shard.pending) == [A]

        on_a_bench(story)

    def test_an_outcome_is_never_given_up(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.settle(entry, delivered(entry))
            bench.take()
            waiting = bench.shard.undecided(A)
            assert waiting is not None
            bench.shard.expire(1_001)
            assert isinstance(waiting.exception(), OutcomeUnknown)
            bench.shard.not_committed()
            bench.check()
            assert list(bench.shard.pending) == [A]
            bench.shard.expire(1_001)
            bench.check()
            assert list(bench.shard.pending) == [A], "nobody waits for it, and yet it is recorded"
            bench.commit()
            assert bench.yard.unsettled == 0

        on_a_bench(story)

    @pytest.mark.parametrize("ends", [True, False])
    def test_a_write_that_merged_into_an_outcome_goes_and_the_outcome_stays(self, ends: bool) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            rearmed = timer(execute_at_ms=NOW_MS + 10, attempts=1)
            settlement = delivered(entry) if ends else Settlement(rearmed=rearmed)
            bench.shard.settle(entry, settlement)
            writing = bench.shard.write(A, timer(payload="new"), [make_reached(timer(generation=9))])
            bench.check()
            bench.shard.expire(1_001)
            bench.check()
            assert isinstance(error_of(writing), StoreUnavailable)
            assert phase_of(entry) is Phase.SETTLING
            assert bench.shard.pending[A].waiters == []
            batch = bench.commit()
            if ends:
                assert (list(batch.puts), list(batch.deletes)) == ([], [A])
                assert list(batch.reached) == [settlement.reached]
            else:
                assert (list(batch.puts), list(batch.reached)) == ([rearmed], [])
            assert writing.done()
            assert bench.yard.unsettled == 0

        on_a_bench(story)

    def test_a_delete_that_merged_into_an_outcome_on_its_way_is_unknown_and_made(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.settle(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 10, attempts=1)))
            bench.take()
            deleting = bench.delete()
            bench.shard.expire(1_001)
            assert isinstance(error_of(deleting), OutcomeUnknown)
            bench.shard.not_committed()
            bench.check()
            assert list(bench.commit().deletes) == [A]

        on_a_bench(story)

    def test_a_timer_that_was_replaced_meanwhile_is_not_restored(self) -> None:
        async def story(bench: Bench) -> None:
            old = bench.put(timer(payload="1"))
            bench.write(timer(payload="2"))
            batch = bench.take()
            bench.write(timer(payload="3"))
            bench.shard.committed(batch, Committed())
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(old) is Phase.GONE
            assert bench.shard.entries[A].timer.payload == "2"
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED

        on_a_bench(story)

    def test_a_timer_that_was_deleted_meanwhile_is_not_restored(self) -> None:
        async def story(bench: Bench) -> None:
            old = bench.put(timer())
            bench.delete()
            batch = bench.take()
            bench.write(timer(payload="2"))
            bench.shard.committed(batch, Committed())
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(old) is Phase.GONE
            assert bench.shard.entries == {}

        on_a_bench(story)

    def test_a_timer_restored_during_a_recovery_waits_for_its_end(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.write(timer("b"))
            bench.take()
            bench.shard.recovering = True
            bench.delete()
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(entry) is Phase.WRITING
            bench.recover({B: Found()})
            assert phase_of(entry) is Phase.ARMED

        on_a_bench(story)

    def test_a_timer_about_which_more_is_to_be_written_is_not_restored(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.delete()
            bench.shard._restore(A, entry)
            assert phase_of(entry) is Phase.WRITING
            bench.take()
            bench.shard._restore(A, entry)
            assert phase_of(entry) is Phase.WRITING

        on_a_bench(story)

    def test_only_what_a_user_was_told_about_can_be_given_up(self) -> None:
        async def story(bench: Bench) -> None:
            op = PendingWrite(timer(), [], [], 0)
            assert not op.is_given_up
            op.told = True
            assert op.is_given_up
            op.settlement = Settlement(rearmed=timer())
            assert not op.is_given_up

        on_a_bench(story)


class TestReadingBeforeWriting:
    def test_a_timer_that_is_placed_while_somebody_reads_it_is_armed_when_he_is_done(self) -> None:
        async def story(bench: Bench) -> None:
            assert not bench.shard.is_held(A)
            async with bench.shard.key_lock(A):
                assert bench.shard.is_held(A)
                bench.load([timer()])
                assert phase_of(bench.shard.entries[A]) is Phase.WRITING
            assert not bench.shard.is_held(A)
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED

        on_a_bench(story)

    def test_one_that_he_writes_is_not(self) -> None:
        async def story(bench: Bench) -> None:
            async with bench.shard.key_lock(A):
                bench.load([timer()])
                bench.write(timer(payload="2"))
            assert phase_of(bench.shard.entries[A]) is Phase.WRITING
            batch = bench.take()
            async with bench.shard.key_lock(A):
                pass
            assert phase_of(bench.shard.entries[A]) is Phase.WRITING
            bench.shard.committed(batch, Committed())
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED

        on_a_bench(story)

    def test_one_that_is_armed_queued_or_in_flight_is_left_alone(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            async with bench.shard.key_lock(A):
                pass
            assert phase_of(entry) is Phase.ARMED
            bench.send(entry)
            async with bench.shard.key_lock(A):
                pass
            assert phase_of(entry) is Phase.SENDING

        on_a_bench(story)

    def test_one_that_is_not_in_memory_may_be_read_too(self) -> None:
        async def story(bench: Bench) -> None:
            async with bench.shard.key_lock(A):
                pass
            assert bench.shard.entries == {}

        on_a_bench(story)

    def test_they_take_turns_also_if_one_fails(self) -> None:
        async def story(bench: Bench) -> None:
            order: list[str] = []

            async def one(name: str) -> None:
                async with bench.shard.key_lock(A):
                    order.append(name)
                    await asyncio.sleep(1)
                    order.append(name)
                    raise ZeroDivisionError

            await asyncio.gather(*(one(name) for name in "xyz"), return_exceptions=True)
            assert order == list("xxyyzz")
            assert not bench.shard.is_held(A)

        on_a_bench(story)


class TestMemory:
    def test_weights_follow_the_payloads(self) -> None:
        async def story(bench: Bench) -> None:
            assert bench.put(timer("a")).weight == 1
            assert bench.put(timer("b", payload="x" * 1_023)).weight == 1
            assert bench.put(timer("c", payload="x" * 1_024)).weight == 2
            assert bench.put(timer("d", payload="x" * 10_240)).weight == 11
            assert bench.yard.weight == 15
            bench.put(timer("d"))
            bench.delete(timer("c").key)
            bench.commit()
            assert bench.yard.weight == 3

        on_a_bench(story)

    def test_one_beyond_the_horizon_is_not_kept(self) -> None:
        async def story(bench: Bench) -> None:
            bench.put(timer("a", UNTIL_MS))
            bench.write(timer("b", UNTIL_MS + 1))
            bench.commit()
            assert list(bench.shard.entries) == [A]
            bench.write(timer("a", UNTIL_MS + 1))
            bench.commit()
            assert bench.shard.entries == {}
            assert bench.yard.armed == []

        on_a_bench(story)

    def test_within_a_millisecond_the_position_decides(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            here = [timer(f"t{n}", NOW_MS) for n in range(20)]
            cut = sorted(t.position for t in here)[9]
            bench.load([], cut)
            assert shard.horizon == cut
            for each in here:
                bench.write(each)
            bench.commit()
            assert {entry.timer.position for entry in shard.entries.values()} == {
                t.position for t in here if t.position <= cut
            }

        on_a_bench(story, loaded=False)

    def test_a_row_that_could_not_be_decoded_is_forgotten_once_its_timer_is_written(self) -> None:
        async def story(bench: Bench) -> None:
            rows = [
                Unreadable(Position(NOW_MS, 1, 1), "test", "a", "broken"),
                Unreadable(Position(NOW_MS, 1, 2), "test", "b", "broken"),
                Unreadable(Position(NOW_MS, 1, 3), "other", "a", "broken"),
            ]
            bench.load([], unreadable=rows)
            bench.load([], unreadable=rows)
            assert list(bench.shard.unreadable.values()) == rows
            bench.put(timer())
            assert list(bench.shard.unreadable.values()) == rows[1:]

        on_a_bench(story)


def test_the_end_of_a_millisecond_is_behind_every_position_in_it_and_can_be_stored() -> None:
    assert end_of(5) == Position(5, 2**63 - 1, 2**63 - 1)


class TestLoading:
    def test_before_anything_is_loaded_a_timer_is_only_on_disk(self) -> None:
        async def story(bench: Bench) -> None:
            bench.yard.now_ms = 9_000
            shard = bench.shard
            assert (shard.loading, shard.fenced_at_ms) == (False, 1_000)
            writing = bench.write(timer())
            bench.commit()
            assert writing.done()
            assert shard.entries == {}

        on_a_bench(story, loaded=False)

    def test_one_decided_while_the_page_was_read_that_ends_with_it_is_placed(self) -> None:
        async def story(bench: Bench) -> None:
            last = timer("last", NOW_MS + 10)
            bench.shard.load_begins()
            bench.write(timer("last", NOW_MS + 10, payload="new"))
            bench.commit()
            bench.shard.load_ended(Page([last], last.position), UNTIL_MS)
            assert [entry.timer.payload for entry in bench.shard.entries.values()] == ["new"]

        on_a_bench(story, loaded=False)

    def test_a_timer_that_is_placed_while_a_write_about_it_is_committing_does_not_fire(self) -> None:
        async def story(bench: Bench) -> None:
            bench.delete()
            batch = bench.take()
            bench.load([timer()])
            entry = bench.shard.entries[A]
            assert phase_of(entry) is Phase.WRITING
            bench.check()
            bench.shard.expire(1_001)
            bench.shard.not_committed()
            assert phase_of(entry) is Phase.ARMED, "given up: it is what it was"
            bench.delete()
            batch = bench.take()
            bench.shard.committed(batch, Committed())
            assert bench.shard.entries == {}

        on_a_bench(story)

    def test_a_row_that_was_set_aside_before_is_not_counted_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("duetime.engine.shard._UNREADABLE_MAX", 2)

        async def story(bench: Bench) -> None:
            rows = [Unreadable(Position(NOW_MS + n, 1, 1), "test", f"x{n}", "broken") for n in range(2)]
            bench.load([], unreadable=rows)
            bench.load([], unreadable=rows)
            bench.write(timer("b", UNTIL_MS - 1))
            assert bench.shard.raise_low_water(bench.take()).low_water == end_of(NOW_MS - 1), "all of them are known"

        on_a_bench(story)

    def test_a_page_is_placed_and_the_horizon_follows(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            assert shard.horizon == shard.low_water == end_of(NOW_MS - 1_000)
            shard.load_begins()
            assert shard.loading
            shard.load_ended(Page([timer("a"), timer("b", NOW_MS + 5)], None), UNTIL_MS)
            assert not shard.loading
            assert shard.horizon == end_of(UNTIL_MS)
            assert {entry.phase for entry in shard.entries.values()} == {Phase.ARMED}
            assert len(shard.entries) == 2

        on_a_bench(story, loaded=False, low_water=end_of(NOW_MS - 1_000))

    def test_a_page_that_was_cut_is_not_the_end_however_few_are_on_it(self) -> None:
        async def story(bench: Bench) -> None:
            first = timer("a", NOW_MS + 10)
            bench.load([first], first.position)
            assert bench.shard.horizon == first.position
            bench.write(timer("late", NOW_MS + 20))
            bench.commit()
            assert list(bench.shard.entries) == [A], "beyond what was loaded"
            bench.load([timer("late", NOW_MS + 20)], None)
            assert bench.shard.horizon == end_of(UNTIL_MS)
            assert len(bench.shard.entries) == 2

        on_a_bench(story, loaded=False)

    def test_the_horizon_does_not_move_back_by_a_page(self) -> None:
        async def story(bench: Bench) -> None:
            bench.load([], until_ms=UNTIL_MS - 500)
            assert bench.shard.horizon == end_of(UNTIL_MS)

        on_a_bench(story)

    def test_a_page_that_did_not_come_changes_nothing(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.load_begins()
            bench.put(timer())
            bench.shard.load_ended(None, UNTIL_MS + 1)
            assert not bench.shard.loading
            assert bench.shard.horizon == end_of(UNTIL_MS)

        on_a_bench(story)

    def test_a_page_for_a_shard_that_was_dropped_meanwhile_places_nothing(self) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.load_begins()
            bench.shard.drop(NotOwner())
            bench.shard.load_ended(Page([timer()], None), UNTIL_MS)
            assert bench.shard.entries == {}
            assert bench.shard.horizon == BEFORE_ALL

        on_a_bench(story)

    def test_a_timer_that_is_in_memory_is_not_placed_twice(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.load([timer()])
            assert bench.shard.entries[A] is entry
            bench.send(entry)
            bench.load([timer()])
            assert bench.shard.entries[A] is entry

        on_a_bench(story)

    def test_whatever_was_decided_while_a_page_was_read_wins(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            for name in ("deleted", "replaced"):
                bench.put(timer(name, NOW_MS))
            shard.load_begins()
            bench.delete(timer("deleted").key)
            bench.write(timer("replaced", NOW_MS, payload="new"))
            bench.write(timer("moved", UNTIL_MS + 100, payload="new"))
            bench.write(timer("gone", UNTIL_MS + 900, payload="new"))
            bench.commit()
            page = [timer(name, UNTIL_MS + 50) for name in ("moved", "gone", "left")]
            shard.load_ended(Page([timer("deleted"), timer("replaced"), *page], None), UNTIL_MS + 500)
            bench.check()
            held = {entry.timer.timer_id: entry.timer for entry in shard.entries.values()}
            assert held == {
                "replaced": timer("replaced", NOW_MS, payload="new"),
                "moved": timer("moved", UNTIL_MS + 100, payload="new"),
                "left": page[2],
            }

        on_a_bench(story)

    def test_what_was_decided_and_is_in_memory_is_not_placed_twice(self) -> None:
        async def story(bench: Bench) -> None:
            far = timer("far", UNTIL_MS + 100)
            bench.shard.load_begins()
            bench.write(far)
            bench.commit()
            bench.shard._place(far.key, far)
            bench.shard.load_ended(Page([far], None), UNTIL_MS + 500)
            bench.check()

        on_a_bench(story)

    def test_what_is_decided_after_a_page_counts_for_the_next_one(self) -> None:
        async def story(bench: Bench) -> None:
            far = timer("far", UNTIL_MS + 100)
            bench.shard.load_begins()
            bench.write(far)
            bench.commit()
            bench.shard.load_ended(Page([], None), UNTIL_MS)
            bench.shard.load_begins()
            bench.shard.load_ended(Page([far], None), UNTIL_MS + 500)
            assert list(bench.shard.entries) == [far.key]

        on_a_bench(story)

    def test_a_timer_that_is_placed_while_a_write_about_it_waits_does_not_fire(self) -> None:
        async def story(bench: Bench) -> None:
            deleting = bench.delete()
            bench.load([timer()])
            entry = bench.shard.entries[A]
            assert phase_of(entry) is Phase.WRITING
            bench.check()
            bench.shard.expire(1_001)
            assert deleting.done()
            assert phase_of(entry) is Phase.ARMED, "the write came to nothing: it is what it was"

        on_a_bench(story)

    def test_an_unreadable_row_whose_timer_was_written_meanwhile_is_not_set_aside(self) -> None:
        async def story(bench: Bench) -> None:
            row = Unreadable(Position(NOW_MS, 1, 1), "test", "a", "broken")
            bench.shard.load_begins()
            bench.put(timer())
            bench.shard.load_ended(Page([], None, [row]), UNTIL_MS)
            assert bench.shard.unreadable == {}

        on_a_bench(story)


class TestShrinking:
    def test_what_is_armed_for_after_the_cutoff_is_forgotten_and_loaded_again_later(self) -> None:
        async def story(bench: Bench) -> None:
            kept, gone = bench.put(timer("a", NOW_MS)), bench.put(timer("b", NOW_MS + 1))
            bench.shard.shrink(NOW_MS)
            bench.check()
            assert bench.shard.horizon == end_of(NOW_MS)
            assert list(bench.shard.entries) == [A]
            assert (kept.phase, gone.phase) == (Phase.ARMED, Phase.GONE)
            bench.load([gone.timer])
            assert phase_of(bench.shard.entries[B]) is Phase.ARMED

        on_a_bench(story)

    def test_what_is_written_or_in_flight_stays(self) -> None:
        async def story(bench: Bench) -> None:
            written, sent = bench.put(timer("a", NOW_MS + 5)), bench.put(timer("b", NOW_MS + 5))
            bench.write(timer("a", NOW_MS + 5, payload="2"))
            bench.send(sent)
            bench.shard.shrink(NOW_MS)
            assert set(bench.shard.entries.values()) == {written, sent}
            bench.shard.expire(1_001)
            bench.check()
            assert phase_of(written) is Phase.ARMED

        on_a_bench(story)

    def test_not_while_a_page_is_loading(self) -> None:
        async def story(bench: Bench) -> None:
            bench.put(timer("a", NOW_MS + 5))
            bench.shard.load_begins()
            bench.shard.shrink(NOW_MS)
            assert bench.shard.horizon == end_of(UNTIL_MS)
            assert list(bench.shard.entries) == [A]

        on_a_bench(story)

    @pytest.mark.parametrize("cutoff_ms", [UNTIL_MS, UNTIL_MS + 10])
    def test_a_cutoff_beyond_the_horizon_does_nothing(self, cutoff_ms: int) -> None:
        async def story(bench: Bench) -> None:
            bench.shard.shrink(cutoff_ms)
            assert bench.shard.horizon == end_of(UNTIL_MS)

        on_a_bench(story)

    def test_not_to_a_cutoff_in_the_millisecond_in_which_a_page_was_cut(self) -> None:
        async def story(bench: Bench) -> None:
            cut = Position(NOW_MS, 5, 5)
            bench.load([], cut)
            bench.shard.shrink(NOW_MS)
            assert bench.shard.horizon == cut, "what is behind it in the same millisecond was not loaded"

        on_a_bench(story, loaded=False)


class TestFiring:
    def test_an_attempt_begins_once_and_is_in_flight_until_it_is_settled(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            entry = bench.put(timer())
            assert not shard.begin(entry, NOW_MS, again=False), "it is not queued"
            bench.queue(entry)
            assert not shard.begin(entry, NOW_MS, again=True), "there is nothing to repeat"
            assert shard.begin(entry, NOW_MS + 5, again=False)
            assert (entry.phase, entry.started_at_ms) == (Phase.SENDING, NOW_MS + 5)
            assert not shard.begin(entry, NOW_MS, again=False)
            assert shard.is_sending(A)
            assert not shard.is_quiet
            assert shard.settle(entry, delivered(entry))
            assert not shard.is_sending(A)
            assert (entry.phase, entry.started_at_ms) == (Phase.SETTLING, 0)
            bench.check()
            assert bench.yard.unsettled == 1
            assert not shard.is_quiet
            bench.commit()
            assert phase_of(entry) is Phase.GONE
            assert shard.is_quiet

        on_a_bench(story)

    @pytest.mark.parametrize("how", ["deleted", "replaced", "draining", "dropped", "recovering"])
    def test_it_does_not_begin_once_it_is_no_longer_wanted(self, how: str) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.queue(entry)
            unwanted(bench, how)
            assert not bench.shard.begin(entry, NOW_MS, again=False)
            assert bench.shard.sending == {}

        on_a_bench(story)

    @pytest.mark.parametrize("how", ["deleted", "replaced", "dropped", "recovering"])
    def test_nor_is_it_repeated_on_a_fresh_connection(self, how: str) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            assert bench.shard.begin(entry, NOW_MS, again=True)
            unwanted(bench, how)
            assert not bench.shard.begin(entry, NOW_MS, again=True)

        on_a_bench(story)

    def test_a_repeat_goes_on_while_the_shard_drains_and_is_one_delivery(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.draining = True
            assert bench.shard.begin(entry, NOW_MS, again=True)
            assert bench.shard.sending == {A: 1}
            bench.shard.settle(entry, delivered(entry))
            assert bench.shard.sending == {}

        on_a_bench(story)

    def test_two_generations_of_a_timer_may_be_in_flight_at_once(self) -> None:
        async def story(bench: Bench) -> None:
            shard = bench.shard
            old = bench.put(timer(payload="1"))
            bench.send(old)
            new = bench.put(timer(payload="2"))
            bench.send(new)
            assert shard.sending == {A: 2}
            assert not shard.settle(old, delivered(old)), "stale"
            assert shard.sending == {A: 1}
            assert shard.is_sending(A)
            assert phase_of(new) is Phase.SENDING
            assert shard.settle(new, delivered(new))
            assert shard.sending == {}

        on_a_bench(story)

    def test_an_attempt_that_was_not_made_leaves_the_timer_waiting_again(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.not_sent(entry, begun=True)
            bench.check()
            assert (entry.phase, entry.started_at_ms) == (Phase.ARMED, 0)
            assert bench.shard.sending == {}
            bench.queue(entry)
            bench.shard.not_sent(entry, begun=False)
            bench.check()
            assert phase_of(entry) is Phase.ARMED

        on_a_bench(story)

    def test_another_attempt_of_it_that_was_not_made_does_not_disturb_one_in_flight(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.not_sent(entry, begun=False)
            assert (entry.phase, entry.started_at_ms) == (Phase.SENDING, NOW_MS)
            assert bench.shard.sending == {A: 1}

        on_a_bench(story)

    def test_nor_is_a_timer_that_was_deleted_armed_by_it(self) -> None:
        async def story(bench: Bench) -> None:
            first, second = bench.put(timer()), bench.put(timer("b"))
            bench.send(first)
            bench.queue(second)
            bench.delete()
            bench.delete(B)
            bench.commit()
            bench.shard.not_sent(first, begun=True)
            bench.shard.not_sent(second, begun=False)
            bench.check()
            assert (first.phase, second.phase) == (Phase.GONE, Phase.GONE)
            assert bench.shard.is_quiet

        on_a_bench(story)

    def test_a_retry_is_a_new_entry_that_waits_for_its_time(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            rearmed = timer(execute_at_ms=NOW_MS + 1_000, attempts=1)
            bench.shard.settle(entry, Settlement(rearmed=rearmed))
            batch = bench.commit()
            assert (list(batch.puts), list(batch.deletes), list(batch.reached)) == ([rearmed], [], [])
            assert bench.shard.entries[A].timer == rearmed
            assert phase_of(bench.shard.entries[A]) is Phase.ARMED
            assert (entry.phase, bench.yard.unsettled) == (Phase.GONE, 0)

        on_a_bench(story)

    def test_an_end_without_an_attempt_is_recorded_like_any_other(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.queue(entry)
            bench.shard.end_unfired(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 1_000)))
            bench.check()
            assert bench.yard.unsettled == 1
            assert list(bench.commit().puts) == [timer(execute_at_ms=NOW_MS + 1_000)]
            assert bench.yard.unsettled == 0

        on_a_bench(story)

    def test_an_outcome_that_comes_after_the_shard_was_lost_is_stale(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.drop(NotOwner())
            assert not bench.shard.settle(entry, delivered(entry))
            assert bench.shard.is_quiet
            assert bench.yard.writes_waiting == 0

        on_a_bench(story)

    def test_a_shard_that_is_not_ours_records_nothing(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.dropped = True
            assert not bench.shard.settle(entry, delivered(entry))
            assert bench.shard.pending == {}
            assert bench.shard.sending == {}
            bench.shard.drop(NotOwner())

        on_a_bench(story)

    def test_an_outcome_that_waits_for_its_commit_keeps_that_phase_when_it_is_written(self) -> None:
        async def story(bench: Bench) -> None:
            entry = bench.put(timer())
            bench.send(entry)
            bench.shard.settle(entry, delivered(entry))
            batch = bench.take()
            bench.write(timer(payload="new"))
            assert phase_of(entry) is Phase.SETTLING
            bench.shard.committed(batch, Committed())
            bench.commit()
            assert bench.shard.entries[A].timer.payload == "new"

        on_a_bench(story)


def unwanted(bench: Bench, how: str) -> None:
    if how == "deleted":
        bench.delete()
    elif how == "replaced":
        bench.write(timer(payload="2"))
    else:
        setattr(bench.shard, how, True)


class TestDropping:
    def test_everybody_is_told_what_is_known(self) -> None:
        async def story(bench: Bench) -> None:
            committing = bench.write(timer())
            bench.take()
            pending = bench.write(timer("b"))
            gone = bench.write(timer("c"))
            gone.cancel()
            bench.shard.drop(NotOwner(), OutcomeUnknown())
            assert isinstance(error_of(committing), OutcomeUnknown)
            assert isinstance(error_of(pending), NotOwner)
            assert bench.shard.dropped
            assert bench.shard.is_quiet

        on_a_bench(story)

    def test_a_commit_that_was_refused_is_told_as_such(self) -> None:
        async def story(bench: Bench) -> None:
            committing = bench.write(timer())
            bench.take()
            bench.shard.drop(NotOwner())
            assert isinstance(error_of(committing), NotOwner)

        on_a_bench(story)

    def test_nothing_is_left_of_it(self) -> None:
        async def story(bench: Bench) -> None:
            entries = [bench.put(timer(name, payload="x" * 5_000)) for name in "abcd"]
            for entry in entries[:2]:
                bench.send(entry)
                bench.shard.settle(entry, delivered(entry))
            bench.take(room=2)
            bench.write(timer("c", payload="2"))
            bench.check()
            bench.shard.drop(NotOwner())
            bench.check()
            yard = bench.yard
            assert (yard.writes_waiting, yard.unsettled, yard.weight, yard.armed) == (0, 0, 0, [])
            assert {entry.phase for entry in entries} == {Phase.GONE}
            assert bench.shard.entries == {}
            assert bench.shard.horizon == BEFORE_ALL

        on_a_bench(story)
