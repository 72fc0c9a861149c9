"""A Shard alone, without group commit and engine: all that it does, and its counters after each step."""

from __future__ import annotations

import asyncio

import pytest
from shard_world import NOW_MS, UNTIL_MS, A, B, Harness, delivered, timer, with_harness

from duetime.domain.settle import Settlement
from duetime.domain.timer import BEFORE_ALL, Extras, Position
from duetime.engine.pending_write import PendingWrite, WriteResult
from duetime.engine.shard import UNKNOWN, Entry, Phase, ShardState, end_of
from duetime.errors import Busy, NotOwner, OutcomeUnknown, StoreUnavailable
from duetime.store import Batch, Committed, Fence, Found, Page, ShardRow, Unreadable
from duetime.testing import make_reached


def phase_of(entry: Entry) -> Phase:
    """Asked for by a call, because a type checker does not see that it changes."""
    return entry.phase


def error_of(future: asyncio.Future[WriteResult]) -> BaseException | None:
    return future.exception() if future.done() else None


class TestWriting:
    def test_a_write_is_in_memory_only_once_it_is_on_disk(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            writing = harness.write(timer())
            assert shard.current(A) == timer()
            assert shard.entries == {}
            batch = harness.take()
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

        with_harness(scenario)

    def test_a_timer_does_not_fire_while_it_is_written_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.write(timer(payload="2"))
            assert phase_of(entry) is Phase.WRITING
            harness.check()
            harness.take()
            harness.check()
            assert not shard_begins(harness, entry)

        with_harness(scenario)

    def test_writes_of_one_timer_are_merged_and_all_callers_are_answered(self) -> None:
        async def scenario(harness: Harness) -> None:
            first = harness.write(timer(payload="1"))
            second = harness.shard.write(A, None, [make_reached(timer(payload="1"))])
            third = harness.shard.write(A, timer(payload="3"), [make_reached(timer(payload="2"))])
            harness.check()
            batch = harness.commit()
            assert list(batch.puts) == [timer(payload="3")]
            assert list(batch.reached) == [make_reached(timer(payload="1")), make_reached(timer(payload="2"))]
            assert first.result() == (timer(payload="1"), False)
            assert second.result() == (None, True)
            assert third.result() == (timer(payload="3"), False), "it was deleted before"

        with_harness(scenario)

    def test_whether_a_write_replaced_a_timer_is_known_from_memory_or_else_from_the_store(self) -> None:
        async def scenario(harness: Harness) -> None:
            far = timer("far", UNTIL_MS + 1)
            asked = [harness.write(timer("x")), harness.write(far)]
            harness.commit(replaced=frozenset({1}))
            assert [future.result()[1] for future in asked] == [False, True]
            asked = [harness.write(timer("x")), harness.write(far)]
            harness.commit()
            assert [future.result()[1] for future in asked] == [True, False]
            first = harness.write(far)
            harness.take()
            second = harness.write(far)
            harness.check()
            harness.shard.committed(Batch(harness.shard.fence, [far]), Committed())
            harness.commit()
            assert (first.result()[1], second.result()[1]) == (False, True), "it follows one that was admitted"

        with_harness(scenario)

    def test_whether_a_write_replaces_a_timer_follows_from_the_write_admitted_before_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(payload="1"))
            batch = harness.take()
            harness.delete()
            third = harness.write(timer(payload="3"))
            harness.shard.committed(batch, Committed())
            harness.commit()
            assert third.result()[1] is False, "it was deleted before"

        with_harness(scenario)

    def test_while_a_write_is_committing_the_next_waits_and_the_shard_is_enqueued_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(payload="1"))
            assert harness.host.enqueued == 1
            batch = harness.take()
            second = harness.write(timer(payload="2"))
            harness.write(timer("b"))
            assert harness.shard.next_batch(100, 1_000_000) is None, "one at a time"
            assert harness.shard.current(A) == timer(payload="2")
            harness.host.enqueued = 0
            harness.shard.committed(batch, Committed())
            harness.check()
            assert harness.host.enqueued == 1
            assert phase_of(harness.shard.entries[A]) is Phase.WRITING, "it must not fire: another write is pending"
            harness.host.enqueued = 0
            harness.commit()
            assert second.result() == (timer(payload="2"), True)
            assert harness.shard.entries[A].timer.payload == "2"
            assert harness.host.enqueued == 0
            assert harness.shard.next_batch(100, 1_000_000) is None, "nothing is waiting"

        with_harness(scenario)

    def test_a_cancelled_caller_is_not_answered(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer()).cancel()
            other = harness.write(timer("b"))
            harness.commit()
            assert other.done()
            harness.write(timer()).cancel()
            harness.take()
            harness.recover({A: Found(timer())})

        with_harness(scenario)

    def test_the_number_of_waiting_writes_is_limited(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.host.counters.writes_waiting_max = 2
            harness.write(timer("a"))
            harness.write(timer("b"))
            with pytest.raises(Busy):
                harness.write(timer("c"))

        with_harness(scenario)

    @pytest.mark.parametrize("state", [ShardState.CLOSING, ShardState.DROPPED])
    def test_a_shard_that_closes_or_is_dropped_accepts_no_writes(self, state: ShardState) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.state = state
            with pytest.raises(NotOwner):
                harness.write(timer())

        with_harness(scenario)

    def test_undecided_is_done_when_the_write_admitted_last_is_decided(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            assert shard.undecided(A) is None
            harness.write(timer(payload="1"))
            batch = harness.take()
            committing = shard.undecided(A)
            harness.write(timer(payload="2"))
            pending = shard.undecided(A)
            assert committing is not None
            assert pending is not None
            shard.committed(batch, Committed())
            assert committing.done()
            assert not pending.done()
            harness.commit()
            assert pending.result() == (timer(payload="2"), True)

        with_harness(scenario)

    def test_generations_never_repeat_also_after_the_shard_was_claimed_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            first = [shard.next_generation() for _ in range(3)]
            assert first == [3 << 32 | 1, 3 << 32 | 2, 3 << 32 | 3]
            harness.write(timer())
            harness.take()
            harness.recover({A: Found(timer())})
            assert shard.next_generation() == 4 << 32 | 1
            again = Harness(version=5)
            assert again.shard.next_generation() == 5 << 32 | 1

        with_harness(scenario)


def shard_begins(harness: Harness, entry: Entry) -> bool:
    return harness.shard.begin(entry, NOW_MS, again=False)


class TestBatches:
    def test_a_batch_has_at_most_the_allowed_rows_and_the_others_wait_in_order(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in "abcde":
                harness.write(timer(name))
            batch = harness.take(room=3)
            assert [put.timer_id for put in batch.puts] == ["a", "b", "c"]
            assert harness.shard.committing_rows == 3
            assert list(harness.shard.pending) == [timer("d").key, timer("e").key]
            harness.check()
            harness.shard.committed(batch, Committed())
            batch = harness.take(room=2)
            assert [put.timer_id for put in batch.puts] == ["d", "e"]
            assert harness.shard.committing_rows == 2
            assert harness.shard.pending == {}

        with_harness(scenario)

    def test_a_timer_that_is_reached_counts_as_two_rows(self) -> None:
        async def scenario(harness: Harness) -> None:
            for name in "abc":
                harness.shard.write(timer(name).key, None, [make_reached(timer(name))])
            batch = harness.take(room=5)
            assert [key.timer_id for key in batch.deletes] == ["a", "b"]
            assert (len(batch.reached), harness.shard.committing_rows) == (2, 4)

        with_harness(scenario)

    def test_a_batch_has_at_least_one_write_however_large_it_is(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.write(A, None, [make_reached(timer()), make_reached(timer(generation=2))])
            harness.write(timer("b", payload="x" * 1_000))
            assert list(harness.take(room=1).deletes) == [A]
            harness.shard.not_committed()
            assert [put.timer_id for put in harness.take(chars=1).puts] == ["b"], "what failed waits behind the others"

        with_harness(scenario)

    def test_the_characters_of_a_batch_are_limited_and_rather_overestimated(self) -> None:
        async def scenario(harness: Harness) -> None:
            url = "http://r.example/" + "u" * 83
            plain = timer("plain", callback_url=url)
            harness.write(plain)
            harness.take()
            assert harness.shard.committing_chars == 300
            harness.shard.not_committed()
            harness.write(timer("payload", callback_url=url, payload="x" * 50))
            harness.take()
            assert harness.shard.committing_chars == 650
            harness.shard.not_committed()
            extras = Extras(headers={"ab": "cde"}, tags=("12", "345"), last_error="oops")
            harness.write(timer("extras", callback_url=url, extras=extras))
            harness.take()
            assert harness.shard.committing_chars == 950 + 4 * (5 + 5 + 4)
            harness.shard.not_committed()
            harness.shard.write(B, None, [make_reached(plain)])
            harness.take()
            assert harness.shard.committing_chars == 950 + 4 * 14 + 300
            harness.shard.not_committed()
            harness.take(chars=650)
            assert len(harness.shard.committing) == 2, "enough once it is reached"

        with_harness(scenario)

    def test_extras_without_headers_and_errors_are_counted(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(callback_url="u" * 100, extras=Extras(tags=("12",))))
            harness.take()
            assert harness.shard.committing_chars == 308

        with_harness(scenario)

    def test_a_reached_timer_without_retention_is_not_written(self) -> None:
        async def scenario(harness: Harness) -> None:
            gone = make_reached(timer(), purge_at_ms=NOW_MS)
            kept = make_reached(timer(generation=2), purge_at_ms=NOW_MS + 1)
            harness.shard.write(A, None, [gone, kept])
            assert list(harness.commit().reached) == [kept]

        with_harness(scenario)

    @pytest.mark.parametrize("dropped", [False, True])
    def test_nothing_is_committed_by_a_shard_that_recovers_or_is_dropped(self, dropped: bool) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer())
            if dropped:
                harness.shard.state = ShardState.DROPPED
            else:
                harness.shard.start_recovery()
            assert harness.shard.next_batch(100, 1_000_000) is None

        with_harness(scenario)


class TestLowWater:
    def test_a_put_below_the_low_water_mark_lowers_it_in_the_same_batch(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("c", NOW_MS + 1))
            assert harness.take().low_water is None
            harness.shard.not_committed()
            harness.write(timer("a", NOW_MS - 5))
            harness.write(timer("b", NOW_MS))
            batch = harness.take()
            assert batch.low_water == end_of(NOW_MS - 6)
            assert harness.shard.low_water == end_of(NOW_MS), "not before it is on disk"
            harness.shard.committed(batch, Committed())
            assert harness.shard.low_water == end_of(NOW_MS - 6)
            harness.write(timer("d", NOW_MS - 4))
            assert harness.commit().low_water is None, "it is above"
            assert harness.shard.low_water == end_of(NOW_MS - 6)

        with_harness(scenario, low_water=end_of(NOW_MS))

    def test_a_put_in_the_millisecond_of_the_low_water_mark_lowers_it_too(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("b", NOW_MS))
            assert harness.commit().low_water == end_of(NOW_MS - 1)

        with_harness(scenario, low_water=end_of(NOW_MS))

    def test_a_timer_written_below_the_low_water_mark_is_found_after_a_restart(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("old", NOW_MS - 500))
            low_water = harness.commit().low_water
            assert low_water is not None
            assert low_water < timer("old", NOW_MS - 500).position

        with_harness(scenario, low_water=end_of(NOW_MS))

    def test_it_rises_to_just_below_the_first_timer_in_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put(timer("first", NOW_MS + 1_000))
            harness.put(timer("later", NOW_MS + 2_000))
            harness.write(timer("b", NOW_MS + 3_000))
            batch = harness.take()
            assert harness.shard.raise_low_water(batch).low_water == end_of(NOW_MS + 999)
            raised = harness.shard.raise_low_water(batch)
            assert (raised.fence, raised.puts, raised.deletes, raised.reached) == (
                batch.fence,
                batch.puts,
                batch.deletes,
                batch.reached,
            )
            harness.shard.committed(raised, Committed())
            assert harness.shard.low_water == end_of(NOW_MS + 999)

        with_harness(scenario)

    def test_it_rises_no_further_than_the_puts_of_the_batch(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("b", NOW_MS + 3_000))
            harness.write(timer("c", NOW_MS + 4_000))
            assert harness.shard.raise_low_water(harness.take()).low_water == end_of(NOW_MS + 2_999)

        with_harness(scenario)

    def test_it_rises_no_further_than_the_horizon(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("far", UNTIL_MS + 5_000))
            raised = harness.shard.raise_low_water(harness.take()).low_water
            assert raised == end_of(UNTIL_MS - 1)

        with_harness(scenario)

    def test_it_is_not_lowered_by_raising_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("b", NOW_MS + 1))
            batch = harness.take()
            assert harness.shard.raise_low_water(batch) is batch, "it is there already"
            harness.shard.not_committed()
            harness.write(timer("b", NOW_MS + 2))
            assert harness.shard.raise_low_water(harness.take()).low_water == end_of(NOW_MS + 1)

        with_harness(scenario, low_water=end_of(NOW_MS))

    def test_a_batch_that_lowers_it_does_not_raise_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("b", NOW_MS - 10))
            batch = harness.take()
            assert harness.shard.raise_low_water(batch).low_water == end_of(NOW_MS - 11)

        with_harness(scenario, low_water=end_of(NOW_MS))

    def test_it_stays_below_a_row_that_cannot_be_decoded(self) -> None:
        async def scenario(harness: Harness) -> None:
            row = Unreadable(Position(NOW_MS + 100, 1, 1), "test", "x", "broken")
            harness.load([], unreadable=[row])
            harness.write(timer("far", UNTIL_MS + 5_000))
            assert harness.shard.raise_low_water(harness.take()).low_water == end_of(NOW_MS + 99)

        with_harness(scenario)

    def test_it_does_not_rise_if_not_all_unreadable_rows_are_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("duetime.engine.unreadable_rows._ROWS_MAX", 2)

        async def scenario(harness: Harness) -> None:
            rows = [Unreadable(Position(NOW_MS + n, 1, 1), "test", f"x{n}", "broken") for n in range(3)]
            harness.load([], unreadable=rows[:2])
            harness.write(timer("b", UNTIL_MS - 1))
            batch = harness.take()
            assert harness.shard.raise_low_water(batch).low_water == end_of(NOW_MS - 1)
            harness.load([], unreadable=rows)
            assert len(harness.shard.unreadable) == 2
            assert harness.shard.raise_low_water(batch) is batch

        with_harness(scenario)

    def test_after_a_recovery_it_is_what_the_store_says(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer("a", NOW_MS - 5))
            harness.take()
            harness.recover({A: Found()}, low_water=end_of(NOW_MS - 50))
            assert harness.shard.low_water == end_of(NOW_MS - 50)

        with_harness(scenario, low_water=end_of(NOW_MS))


class TestNotApplied:
    def test_writes_that_were_not_applied_wait_again_and_the_shard_is_enqueued(self) -> None:
        async def scenario(harness: Harness) -> None:
            writing = harness.write(timer())
            harness.take()
            harness.host.enqueued = 0
            harness.shard.not_committed("the disk is full")
            harness.check()
            assert harness.host.enqueued == 1
            assert not writing.done()
            assert harness.shard.last_commit_error == "the disk is full"
            harness.commit()
            assert writing.result() == (timer(), False)
            assert harness.shard.last_commit_error == ""

        with_harness(scenario)

    def test_a_write_that_was_not_applied_is_merged_with_a_later_one(self) -> None:
        async def scenario(harness: Harness) -> None:
            first = harness.shard.write(A, timer(payload="1"), [make_reached(timer(generation=1))])
            other = harness.write(timer("b"))
            harness.take()
            second = harness.shard.write(A, timer(payload="2"), [make_reached(timer(generation=2))])
            harness.shard.not_committed()
            harness.check()
            batch = harness.commit()
            assert [put.payload for put in batch.puts if put.timer_id == "a"] == ["2"]
            assert len(batch.reached) == 2
            assert [future.result()[0] for future in (first, second)] == [timer(payload="1"), timer(payload="2")]
            assert other.done()

        with_harness(scenario)

    def test_a_delete_that_is_merged_with_a_settlement_leaves_no_timer(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            assert harness.shard.settle(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 10, attempts=1)))
            harness.take()
            deleting = harness.delete()
            harness.shard.not_committed()
            harness.check()
            batch = harness.commit()
            assert (list(batch.puts), list(batch.deletes)) == ([], [A])
            assert deleting.done()
            assert A not in harness.shard.entries

        with_harness(scenario)


class TestRecovery:
    def test_a_write_that_the_store_holds_is_done_and_one_that_it_does_not_hold_is_written_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            there, not_there = harness.write(timer("a")), harness.write(timer("b"))
            harness.take()
            shard.start_recovery()
            harness.host.now_ms = 5_000
            harness.recover({A: Found(timer("a")), B: Found()})
            assert not shard.recovering
            assert shard.fence == Fence(7, 4, 2)
            assert shard.fenced_at_ms == 5_000
            assert there.result() == (timer("a"), None)
            assert phase_of(shard.entries[A]) is Phase.ARMED
            assert not not_there.done()
            assert harness.commit().puts == [timer("b")]
            assert not_there.done()

        with_harness(scenario)

    def test_a_timer_that_the_store_holds_in_another_form_is_written_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(payload="new"))
            harness.take()
            harness.recover({A: Found(timer(payload="old"))})
            assert list(harness.shard.pending) == [A]

        with_harness(scenario)

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
    def test_a_delete_is_done_if_its_last_reached_row_is_stored(self, found: Found, done: bool) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.write(A, None, [make_reached(timer(generation=0)), make_reached(timer())])
            harness.take()
            harness.recover({A: found})
            assert (A not in harness.shard.pending) is done

        with_harness(scenario)

    def test_a_delete_without_a_kept_reached_row_is_done_if_nothing_is_stored(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.write(A, None, [make_reached(timer(), purge_at_ms=NOW_MS)])
            harness.delete(B)
            harness.take()
            harness.recover({A: Found(), B: Found(reached=make_reached(timer("b")))})
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_a_put_is_done_if_it_is_stored_whatever_was_reached_before(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.write(A, timer(), [make_reached(timer(generation=0))])
            harness.take()
            harness.recover({A: Found(timer())})
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_a_settlement_that_was_recorded_is_not_recorded_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.settle(entry, delivered(entry))
            harness.check()
            harness.take()
            harness.recover({A: Found(reached=make_reached(timer()))})
            assert harness.host.counters.unsettled == 0
            assert harness.shard.is_quiet
            assert harness.shard.entries == {}

        with_harness(scenario)

    def test_a_due_timer_that_waited_for_it_is_armed_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.write(timer("b"))
            harness.take()
            harness.shard.start_recovery()
            harness.host.disarm(entry)
            harness.shard.wait_for_recovery(entry)
            harness.shard.wait_for_recovery(entry)
            assert phase_of(entry) is Phase.WRITING
            harness.recover({B: Found()})
            assert phase_of(entry) is Phase.ARMED
            assert harness.shard.due_during_recovery == []

        with_harness(scenario)

    def test_a_timer_that_was_written_deleted_or_locked_meanwhile_is_not_armed_by_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            entries = [harness.put(timer(name)) for name in "abcd"]
            harness.write(timer("a", payload="new"))
            harness.delete(timer("d").key)
            harness.take()
            harness.shard.start_recovery()
            for entry in entries[1:3]:
                harness.host.disarm(entry)
            for entry in entries:
                harness.shard.wait_for_recovery(entry)
            harness.write(timer("b", payload="new"))
            async with harness.shard.key_lock(timer("c").key):
                harness.recover({A: Found(), timer("d").key: Found()})
                assert [entry.phase for entry in entries[:3]] == [Phase.WRITING] * 3
                assert phase_of(entries[3]) is Phase.GONE
            assert phase_of(entries[2]) is Phase.ARMED

        with_harness(scenario)

    def test_a_timer_that_is_no_longer_in_memory_is_not_armed_by_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.wait_for_recovery(Entry(timer(), harness.shard))
            harness.put(timer(payload="2"))
            harness.recover({})
            assert [entry.timer.payload for entry in harness.host.armed] == ["2"]

        with_harness(scenario)

    def test_a_timer_whose_write_it_decides_does_not_fire_before_it_has_ended(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.queue(entry)
            harness.shard.start_recovery()
            assert not harness.shard.begin(entry, NOW_MS, again=False)
            harness.shard.not_sent(entry, begun=False)
            assert phase_of(entry) is Phase.WRITING
            harness.check()
            harness.recover({})
            assert phase_of(entry) is Phase.ARMED

        with_harness(scenario)


class TestExpiry:
    """Writes whose users have waited for too long."""

    def test_an_expired_waiting_write_is_answered_not_applied_and_is_not_applied(self) -> None:
        async def scenario(harness: Harness) -> None:
            writing = harness.write(timer())
            harness.host.now_ms = 2_000
            young = harness.write(timer("b"))
            harness.shard.expire(1_000)
            assert not writing.done(), "not before its time"
            harness.shard.expire(1_001)
            harness.check()
            assert isinstance(error_of(writing), StoreUnavailable)
            assert "could not be written to in time" in str(error_of(writing))
            assert not young.done()
            assert list(harness.commit().puts) == [timer("b")]

        with_harness(scenario)

    def test_the_answer_to_an_expired_write_says_why_the_store_refuses(self) -> None:
        async def scenario(harness: Harness) -> None:
            writing = harness.write(timer())
            harness.take()
            harness.shard.not_committed("the disk is full")
            harness.shard.expire(1_001)
            assert str(error_of(writing)) == "the disk is full"

        with_harness(scenario)

    def test_after_an_expired_write_the_timer_is_armed_again_and_fires_as_it_was(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            deleting = harness.delete()
            harness.shard.expire(1_001)
            harness.check()
            assert isinstance(error_of(deleting), StoreUnavailable)
            assert phase_of(entry) is Phase.ARMED
            assert harness.shard.current(A) == timer()

        with_harness(scenario)

    def test_after_an_expired_write_a_timer_in_flight_is_settled_by_its_result(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.delete()
            assert phase_of(entry) is Phase.WRITING
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(entry) is Phase.SENDING
            assert harness.shard.begin(entry, NOW_MS, again=True)
            assert harness.shard.settle(entry, delivered(entry))
            harness.check()
            batch = harness.commit()
            assert (list(batch.deletes), len(batch.reached)) == ([A], 1)
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_after_an_expired_write_a_result_that_came_meanwhile_settles_the_timer(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.delete()
            assert not harness.shard.settle(entry, delivered(entry)), "for now it is stale"
            assert harness.host.counters.unsettled == 0
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(entry) is Phase.SETTLING
            assert entry.deferred_settlement is None
            assert harness.host.counters.unsettled == 1
            batch = harness.commit()
            assert (list(batch.deletes), len(batch.reached)) == ([A], 1)

        with_harness(scenario)

    def test_after_an_expired_write_an_attempt_that_was_not_made_is_made_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.delete()
            harness.shard.not_sent(entry, begun=True)
            assert phase_of(entry) is Phase.WRITING
            assert harness.shard.sending == {}
            harness.shard.expire(1_001)
            assert phase_of(entry) is Phase.ARMED

        with_harness(scenario)

    def test_an_expired_create_leaves_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer())
            harness.shard.expire(1_001)
            assert harness.shard.is_quiet
            assert harness.shard.current(A) is UNKNOWN

        with_harness(scenario)

    def test_an_expired_write_that_is_committing_is_answered_unknown(self) -> None:
        async def scenario(harness: Harness) -> None:
            writing = harness.write(timer())
            batch = harness.take()
            harness.shard.expire(1_000)
            assert not writing.done()
            harness.shard.expire(1_001)
            assert isinstance(error_of(writing), OutcomeUnknown)
            harness.check()
            harness.shard.committed(batch, Committed())
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED, "it was applied"

        with_harness(scenario)

    def test_an_expired_write_after_one_that_is_committing_is_answered_unknown_and_decided_with_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            first = harness.write(timer(payload="1"))
            batch = harness.take()
            second = harness.write(timer(payload="2"))
            harness.shard.expire(1_001)
            assert [type(error_of(future)) for future in (first, second)] == [OutcomeUnknown, OutcomeUnknown]
            assert "earlier write" in str(error_of(second))
            harness.check()
            harness.shard.expire(1_001)
            harness.check()
            harness.shard.committed(batch, Committed())
            harness.shard.expire(1_001)
            assert harness.commit().puts == [timer(payload="2")]

        with_harness(scenario)

    def test_a_write_whose_callers_were_answered_is_abandoned_if_it_was_not_applied(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer(payload="1"))
            harness.write(timer(payload="2"))
            other = harness.write(timer("b"))
            harness.take()
            harness.shard.expire(1_001)
            assert other.done()
            kept = harness.write(timer("c"))
            harness.shard.not_committed()
            harness.check()
            assert list(harness.shard.pending) == [timer("c").key]
            assert phase_of(entry) is Phase.ARMED
            assert harness.shard.current(A) == timer(payload="1")
            harness.commit()
            assert kept.done()

        with_harness(scenario)

    def test_a_write_that_a_later_one_depends_on_is_not_abandoned(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(payload="1"))
            harness.take()
            harness.shard.expire(1_001)
            harness.host.now_ms = 2_000
            second = harness.write(timer(payload="2"))
            harness.shard.not_committed()
            harness.check()
            assert harness.commit().puts == [timer(payload="2")]
            assert second.done()

        with_harness(scenario)

    def test_the_reached_row_of_a_write_that_a_later_one_depends_on_is_written_with_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put(timer(payload="1"))
            harness.shard.write(A, None, [make_reached(timer(payload="1"))])
            harness.take()
            harness.shard.expire(1_001)
            second = harness.write(timer(payload="2"))
            harness.shard.not_committed()
            harness.check()
            assert list(harness.commit().reached) == [make_reached(timer(payload="1"))]
            assert second.result()[1] is False, "it was deleted before, and that is on disk too"

        with_harness(scenario)

    def test_a_write_whose_decision_is_awaited_is_not_abandoned(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer())
            harness.take()
            harness.shard.expire(1_001)
            asked = harness.shard.undecided(A)
            assert asked is not None
            harness.shard.not_committed()
            harness.check()
            harness.commit()
            assert asked.done(), "the caller is answered"

        with_harness(scenario)

    def test_a_write_that_followed_another_is_abandoned_alone(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer(payload="1"))
            batch = harness.take()
            harness.write(timer(payload="2"))
            harness.shard.expire(1_001)
            harness.shard.committed(batch, Committed())
            harness.take()
            harness.shard.not_committed()
            harness.check()
            assert harness.shard.is_quiet
            assert harness.shard.entries[A].timer.payload == "1"
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED

        with_harness(scenario)

    def test_two_writes_whose_callers_were_answered_are_abandoned_together(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.delete()
            harness.take()
            harness.write(timer(payload="2"))
            harness.shard.expire(1_001)
            harness.shard.not_committed()
            harness.check()
            harness.take()
            harness.shard.not_committed()
            harness.check()
            assert harness.shard.is_quiet
            assert phase_of(entry) is Phase.ARMED

        with_harness(scenario)

    def test_a_write_whose_caller_still_waits_is_not_abandoned(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.write(timer())
            harness.take()
            harness.shard.not_committed()
            assert list(harness.shard.pending) == [A]

        with_harness(scenario)

    def test_a_settlement_is_never_abandoned(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.settle(entry, delivered(entry))
            harness.take()
            waiting = harness.shard.undecided(A)
            assert waiting is not None
            harness.shard.expire(1_001)
            assert isinstance(waiting.exception(), OutcomeUnknown)
            harness.shard.not_committed()
            harness.check()
            assert list(harness.shard.pending) == [A]
            harness.shard.expire(1_001)
            harness.check()
            assert list(harness.shard.pending) == [A], "no caller waits for it, and yet it is recorded"
            harness.commit()
            assert harness.host.counters.unsettled == 0

        with_harness(scenario)

    @pytest.mark.parametrize("ends", [True, False])
    def test_an_expired_write_that_was_merged_into_a_settlement_is_undone_and_the_settlement_stays(
        self, ends: bool
    ) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            rearmed = timer(execute_at_ms=NOW_MS + 10, attempts=1)
            settlement = delivered(entry) if ends else Settlement(rearmed=rearmed)
            harness.shard.settle(entry, settlement)
            writing = harness.shard.write(A, timer(payload="new"), [make_reached(timer(generation=9))])
            harness.check()
            harness.shard.expire(1_001)
            harness.check()
            assert isinstance(error_of(writing), StoreUnavailable)
            assert phase_of(entry) is Phase.SETTLING
            assert harness.shard.pending[A].waiters == []
            batch = harness.commit()
            if ends:
                assert (list(batch.puts), list(batch.deletes)) == ([], [A])
                assert list(batch.reached) == [settlement.reached]
            else:
                assert (list(batch.puts), list(batch.reached)) == ([rearmed], [])
            assert writing.done()
            assert harness.host.counters.unsettled == 0

        with_harness(scenario)

    def test_an_expired_delete_after_a_settlement_that_is_committing_is_answered_unknown_and_made(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.settle(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 10, attempts=1)))
            harness.take()
            deleting = harness.delete()
            harness.shard.expire(1_001)
            assert isinstance(error_of(deleting), OutcomeUnknown)
            harness.shard.not_committed()
            harness.check()
            assert list(harness.commit().deletes) == [A]

        with_harness(scenario)

    def test_a_timer_that_was_replaced_meanwhile_is_not_restored(self) -> None:
        async def scenario(harness: Harness) -> None:
            old = harness.put(timer(payload="1"))
            harness.write(timer(payload="2"))
            batch = harness.take()
            harness.write(timer(payload="3"))
            harness.shard.committed(batch, Committed())
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(old) is Phase.GONE
            assert harness.shard.entries[A].timer.payload == "2"
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED

        with_harness(scenario)

    def test_a_timer_that_was_deleted_meanwhile_is_not_restored(self) -> None:
        async def scenario(harness: Harness) -> None:
            old = harness.put(timer())
            harness.delete()
            batch = harness.take()
            harness.write(timer(payload="2"))
            harness.shard.committed(batch, Committed())
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(old) is Phase.GONE
            assert harness.shard.entries == {}

        with_harness(scenario)

    def test_a_timer_restored_during_a_recovery_waits_for_its_end(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.write(timer("b"))
            harness.take()
            harness.shard.start_recovery()
            harness.delete()
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(entry) is Phase.WRITING
            harness.recover({B: Found()})
            assert phase_of(entry) is Phase.ARMED

        with_harness(scenario)

    def test_a_timer_that_has_another_pending_write_is_not_restored(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.delete()
            harness.shard._restore(A, entry)
            assert phase_of(entry) is Phase.WRITING
            harness.take()
            harness.shard._restore(A, entry)
            assert phase_of(entry) is Phase.WRITING

        with_harness(scenario)

    def test_only_a_write_whose_callers_were_answered_can_be_abandoned(self) -> None:
        async def scenario(harness: Harness) -> None:
            write = PendingWrite(timer(), [], [], 0)
            assert not write.is_abandoned
            write.waiters_timed_out = True
            assert write.is_abandoned
            write.settlement = Settlement(rearmed=timer())
            assert not write.is_abandoned

        with_harness(scenario)


class TestReadingBeforeWriting:
    def test_a_timer_loaded_while_its_key_is_locked_is_armed_when_it_is_unlocked(self) -> None:
        async def scenario(harness: Harness) -> None:
            assert not harness.shard.is_locked(A)
            async with harness.shard.key_lock(A):
                assert harness.shard.is_locked(A)
                harness.load([timer()])
                assert phase_of(harness.shard.entries[A]) is Phase.WRITING
            assert not harness.shard.is_locked(A)
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED

        with_harness(scenario)

    def test_a_timer_leaves_memory_only_if_no_command_is_at_work_on_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            async with harness.shard.key_lock(A):
                assert not harness.shard.spill(entry)
            assert A in harness.shard.entries
            assert harness.shard.window.backlog is None
            assert harness.shard.spill(entry)
            assert A not in harness.shard.entries
            assert harness.shard.window.backlog is not None
            assert not harness.shard.spill(entry)

        with_harness(scenario)

    def test_a_timer_that_is_written_under_its_key_lock_is_not_armed_when_it_is_unlocked(self) -> None:
        async def scenario(harness: Harness) -> None:
            async with harness.shard.key_lock(A):
                harness.load([timer()])
                harness.write(timer(payload="2"))
            assert phase_of(harness.shard.entries[A]) is Phase.WRITING
            batch = harness.take()
            async with harness.shard.key_lock(A):
                pass
            assert phase_of(harness.shard.entries[A]) is Phase.WRITING
            harness.shard.committed(batch, Committed())
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED

        with_harness(scenario)

    def test_unlocking_a_key_does_not_affect_a_timer_that_is_armed_queued_or_in_flight(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            async with harness.shard.key_lock(A):
                pass
            assert phase_of(entry) is Phase.ARMED
            harness.send(entry)
            async with harness.shard.key_lock(A):
                pass
            assert phase_of(entry) is Phase.SENDING

        with_harness(scenario)

    def test_the_key_of_a_timer_that_is_not_in_memory_can_be_locked_too(self) -> None:
        async def scenario(harness: Harness) -> None:
            async with harness.shard.key_lock(A):
                pass
            assert harness.shard.entries == {}

        with_harness(scenario)

    def test_key_locks_are_given_in_order_also_if_one_command_fails(self) -> None:
        async def scenario(harness: Harness) -> None:
            order: list[str] = []

            async def one(name: str) -> None:
                async with harness.shard.key_lock(A):
                    order.append(name)
                    await asyncio.sleep(1)
                    order.append(name)
                    raise ZeroDivisionError

            await asyncio.gather(*(one(name) for name in "xyz"), return_exceptions=True)
            assert order == list("xxyyzz")
            assert not harness.shard.is_locked(A)

        with_harness(scenario)


class TestMemory:
    def test_weights_follow_the_payloads(self) -> None:
        async def scenario(harness: Harness) -> None:
            plain = harness.put(timer("a")).weight
            assert harness.put(timer("b", payload="x" * 1_024)).weight == plain + 1_024 + 49
            assert harness.put(timer("c", payload="x" * 10_240)).weight == plain + 10_240 + 49
            assert harness.host.counters.weight == 3 * plain + 11_264 + 98
            harness.put(timer("c"))
            harness.delete(timer("b").key)
            harness.commit()
            assert harness.host.counters.weight == 2 * plain

        with_harness(scenario)

    def test_a_timer_beyond_the_horizon_is_not_kept_in_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put(timer("a", UNTIL_MS))
            harness.write(timer("b", UNTIL_MS + 1))
            harness.commit()
            assert list(harness.shard.entries) == [A]
            harness.write(timer("a", UNTIL_MS + 1))
            harness.commit()
            assert harness.shard.entries == {}
            assert harness.host.armed == []

        with_harness(scenario)

    def test_within_a_millisecond_the_position_decides(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            here = [timer(f"t{n}", NOW_MS) for n in range(20)]
            cut = sorted(t.position for t in here)[9]
            harness.load([], cut)
            assert shard.horizon == cut
            for each in here:
                harness.write(each)
            harness.commit()
            assert {entry.timer.position for entry in shard.entries.values()} == {
                t.position for t in here if t.position <= cut
            }

        with_harness(scenario, loaded=False)

    def test_an_unreadable_row_is_removed_once_its_timer_is_written(self) -> None:
        async def scenario(harness: Harness) -> None:
            rows = [
                Unreadable(Position(NOW_MS, 1, 1), "test", "a", "broken"),
                Unreadable(Position(NOW_MS, 1, 2), "test", "b", "broken"),
                Unreadable(Position(NOW_MS, 1, 3), "other", "a", "broken"),
            ]
            harness.load([], unreadable=rows)
            harness.load([], unreadable=rows)
            assert list(harness.shard.unreadable.rows.values()) == rows
            harness.put(timer())
            assert list(harness.shard.unreadable.rows.values()) == rows[1:]

        with_harness(scenario)


def test_the_end_of_a_millisecond_is_behind_every_position_in_it_and_can_be_stored() -> None:
    assert end_of(5) == Position(5, 2**63 - 1, 2**63 - 1)


class TestLoading:
    def test_before_anything_is_loaded_a_timer_is_only_on_disk(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.host.now_ms = 9_000
            shard = harness.shard
            assert (shard.loading, shard.fenced_at_ms) == (False, 1_000)
            writing = harness.write(timer())
            harness.commit()
            assert writing.done()
            assert shard.entries == {}

        with_harness(scenario, loaded=False)

    def test_a_timer_written_while_a_page_was_read_and_at_its_end_is_added(self) -> None:
        async def scenario(harness: Harness) -> None:
            last = timer("last", NOW_MS + 10)
            harness.shard.begin_load(UNTIL_MS)
            harness.write(timer("last", NOW_MS + 10, payload="new"))
            harness.commit()
            harness.shard.end_load(Page([last], last.position), 0)
            assert [entry.timer.payload for entry in harness.shard.entries.values()] == ["new"]

        with_harness(scenario, loaded=False)

    def test_a_timer_that_is_loaded_while_a_write_of_it_is_committing_does_not_fire(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.delete()
            batch = harness.take()
            harness.load([timer()])
            entry = harness.shard.entries[A]
            assert phase_of(entry) is Phase.WRITING
            harness.check()
            harness.shard.expire(1_001)
            harness.shard.not_committed()
            assert phase_of(entry) is Phase.ARMED, "given up: it is what it was"
            harness.delete()
            batch = harness.take()
            harness.shard.committed(batch, Committed())
            assert harness.shard.entries == {}

        with_harness(scenario)

    def test_an_unreadable_row_that_is_known_is_not_counted_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("duetime.engine.unreadable_rows._ROWS_MAX", 2)

        async def scenario(harness: Harness) -> None:
            rows = [Unreadable(Position(NOW_MS + n, 1, 1), "test", f"x{n}", "broken") for n in range(2)]
            harness.load([], unreadable=rows)
            harness.load([], unreadable=rows)
            harness.write(timer("b", UNTIL_MS - 1))
            assert harness.shard.raise_low_water(harness.take()).low_water == end_of(NOW_MS - 1), (
                "all of them are known"
            )

        with_harness(scenario)

    def test_the_timers_of_a_page_are_added_and_the_horizon_moves(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            assert shard.horizon == shard.low_water == end_of(NOW_MS - 1_000)
            shard.begin_load(UNTIL_MS)
            assert shard.loading
            shard.end_load(Page([timer("a"), timer("b", NOW_MS + 5)], None), 0)
            assert not shard.loading
            assert shard.horizon == end_of(UNTIL_MS)
            assert {entry.phase for entry in shard.entries.values()} == {Phase.ARMED}
            assert len(shard.entries) == 2

        with_harness(scenario, loaded=False, low_water=end_of(NOW_MS - 1_000))

    def test_a_page_that_was_cut_is_not_the_end_however_few_are_on_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            first = timer("a", NOW_MS + 10)
            harness.load([first], first.position)
            assert harness.shard.horizon == first.position
            harness.write(timer("late", NOW_MS + 20))
            harness.commit()
            assert list(harness.shard.entries) == [A], "beyond what was loaded"
            harness.load([timer("late", NOW_MS + 20)], None)
            assert harness.shard.horizon == end_of(UNTIL_MS)
            assert len(harness.shard.entries) == 2

        with_harness(scenario, loaded=False)

    def test_a_page_does_not_move_the_horizon_back(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.load([], until_ms=UNTIL_MS - 500)
            assert harness.shard.horizon == end_of(UNTIL_MS)

        with_harness(scenario)

    def test_a_load_that_failed_changes_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.begin_load(UNTIL_MS + 1)
            harness.put(timer())
            harness.shard.end_load(None, 0)
            assert not harness.shard.loading
            assert harness.shard.horizon == end_of(UNTIL_MS)

        with_harness(scenario)

    def test_a_page_for_a_shard_that_was_dropped_meanwhile_adds_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.begin_load(UNTIL_MS)
            harness.shard.drop(NotOwner())
            harness.shard.end_load(Page([timer()], None), 0)
            assert harness.shard.entries == {}
            assert harness.shard.horizon == BEFORE_ALL

        with_harness(scenario)

    def test_a_timer_that_is_in_memory_is_not_added_twice(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.load([timer()])
            assert harness.shard.entries[A] is entry
            harness.send(entry)
            harness.load([timer()])
            assert harness.shard.entries[A] is entry

        with_harness(scenario)

    def test_writes_decided_while_a_page_was_read_count_and_not_the_page(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            for name in ("deleted", "replaced"):
                harness.put(timer(name, NOW_MS))
            shard.begin_load(UNTIL_MS + 500)
            harness.delete(timer("deleted").key)
            harness.write(timer("replaced", NOW_MS, payload="new"))
            harness.write(timer("moved", UNTIL_MS + 100, payload="new"))
            harness.write(timer("gone", UNTIL_MS + 900, payload="new"))
            harness.commit()
            page = [timer(name, UNTIL_MS + 50) for name in ("moved", "gone", "left")]
            shard.end_load(Page([timer("deleted"), timer("replaced"), *page], None), 0)
            harness.check()
            held = {entry.timer.timer_id: entry.timer for entry in shard.entries.values()}
            assert held == {
                "replaced": timer("replaced", NOW_MS, payload="new"),
                "moved": timer("moved", UNTIL_MS + 100, payload="new"),
                "left": page[2],
            }

        with_harness(scenario)

    def test_a_timer_written_while_a_page_was_read_is_not_added_twice(self) -> None:
        async def scenario(harness: Harness) -> None:
            far = timer("far", UNTIL_MS + 100)
            harness.shard.begin_load(UNTIL_MS + 500)
            harness.write(far)
            harness.commit()
            harness.shard._add_entry(far.key, far)
            harness.shard.end_load(Page([far], None), 0)
            harness.check()

        with_harness(scenario)

    def test_writes_after_a_page_count_for_the_next_page(self) -> None:
        async def scenario(harness: Harness) -> None:
            far = timer("far", UNTIL_MS + 100)
            harness.shard.begin_load(UNTIL_MS)
            harness.write(far)
            harness.commit()
            harness.shard.end_load(Page([], None), 0)
            harness.shard.begin_load(UNTIL_MS + 500)
            harness.shard.end_load(Page([far], None), 0)
            assert list(harness.shard.entries) == [far.key]

        with_harness(scenario)

    def test_a_timer_that_is_loaded_while_a_write_of_it_waits_does_not_fire(self) -> None:
        async def scenario(harness: Harness) -> None:
            deleting = harness.delete()
            harness.load([timer()])
            entry = harness.shard.entries[A]
            assert phase_of(entry) is Phase.WRITING
            harness.check()
            harness.shard.expire(1_001)
            assert deleting.done()
            assert phase_of(entry) is Phase.ARMED, "the write was not applied: the timer is armed again"

        with_harness(scenario)

    def test_an_unreadable_row_whose_timer_was_written_meanwhile_is_not_counted(self) -> None:
        async def scenario(harness: Harness) -> None:
            row = Unreadable(Position(NOW_MS, 1, 1), "test", "a", "broken")
            harness.shard.begin_load(UNTIL_MS)
            harness.put(timer())
            harness.shard.end_load(Page([], None, [row]), 0)
            assert not harness.shard.unreadable.rows

        with_harness(scenario)


class TestShrinking:
    def test_timers_armed_after_the_cutoff_are_removed_and_loaded_again_later(self) -> None:
        async def scenario(harness: Harness) -> None:
            kept, gone = harness.put(timer("a", NOW_MS)), harness.put(timer("b", NOW_MS + 1))
            harness.shard.shrink(NOW_MS)
            harness.check()
            assert harness.shard.horizon == end_of(NOW_MS)
            assert list(harness.shard.entries) == [A]
            assert (kept.phase, gone.phase) == (Phase.ARMED, Phase.GONE)
            harness.load([gone.timer])
            assert phase_of(harness.shard.entries[B]) is Phase.ARMED

        with_harness(scenario)

    def test_timers_that_are_written_or_in_flight_stay_in_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            enqueue, sent = harness.put(timer("a", NOW_MS + 5)), harness.put(timer("b", NOW_MS + 5))
            harness.write(timer("a", NOW_MS + 5, payload="2"))
            harness.send(sent)
            harness.shard.shrink(NOW_MS)
            assert set(harness.shard.entries.values()) == {enqueue, sent}
            harness.shard.expire(1_001)
            harness.check()
            assert phase_of(enqueue) is Phase.ARMED

        with_harness(scenario)

    def test_nothing_is_removed_while_a_page_is_loading(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.put(timer("a", NOW_MS + 5))
            harness.shard.begin_load(UNTIL_MS)
            harness.shard.shrink(NOW_MS)
            assert harness.shard.horizon == end_of(UNTIL_MS)
            assert list(harness.shard.entries) == [A]

        with_harness(scenario)

    @pytest.mark.parametrize("cutoff_ms", [UNTIL_MS, UNTIL_MS + 10])
    def test_a_cutoff_beyond_the_horizon_does_nothing(self, cutoff_ms: int) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.shrink(cutoff_ms)
            assert harness.shard.horizon == end_of(UNTIL_MS)

        with_harness(scenario)

    def test_nothing_is_removed_for_a_cutoff_in_the_millisecond_in_which_a_page_was_cut(self) -> None:
        async def scenario(harness: Harness) -> None:
            cut = Position(NOW_MS, 5, 5)
            harness.load([], cut)
            harness.shard.shrink(NOW_MS)
            assert harness.shard.horizon == cut, "what is behind it in the same millisecond was not loaded"

        with_harness(scenario, loaded=False)


class TestFiring:
    def test_an_attempt_begins_once_and_is_in_flight_until_it_is_settled(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            entry = harness.put(timer())
            assert not shard.begin(entry, NOW_MS, again=False), "it is not queued"
            harness.queue(entry)
            assert not shard.begin(entry, NOW_MS, again=True), "there is nothing to repeat"
            assert shard.begin(entry, NOW_MS + 5, again=False)
            assert (entry.phase, entry.started_at_ms) == (Phase.SENDING, NOW_MS + 5)
            assert not shard.begin(entry, NOW_MS, again=False)
            assert shard.is_sending(A)
            assert not shard.is_quiet
            assert shard.settle(entry, delivered(entry))
            assert not shard.is_sending(A)
            assert (entry.phase, entry.started_at_ms) == (Phase.SETTLING, 0)
            harness.check()
            assert harness.host.counters.unsettled == 1
            assert not shard.is_quiet
            harness.commit()
            assert phase_of(entry) is Phase.GONE
            assert shard.is_quiet

        with_harness(scenario)

    @pytest.mark.parametrize("how", ["deleted", "replaced", "draining", "dropped", "recovering"])
    def test_an_attempt_does_not_begin_if_it_must_not_be_made_any_more(self, how: str) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.queue(entry)
            unwanted(harness, how)
            assert not harness.shard.begin(entry, NOW_MS, again=False)
            assert harness.shard.sending == {}

        with_harness(scenario)

    @pytest.mark.parametrize("how", ["deleted", "replaced", "dropped", "recovering"])
    def test_an_attempt_is_not_repeated_on_a_new_connection_if_it_must_not_be_made_any_more(self, how: str) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            assert harness.shard.begin(entry, NOW_MS, again=True)
            unwanted(harness, how)
            assert not harness.shard.begin(entry, NOW_MS, again=True)

        with_harness(scenario)

    def test_a_repeat_goes_on_while_the_shard_drains_and_is_one_delivery(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.start_drain()
            assert harness.shard.begin(entry, NOW_MS, again=True)
            assert harness.shard.sending == {A: 1}
            harness.shard.settle(entry, delivered(entry))
            assert harness.shard.sending == {}

        with_harness(scenario)

    def test_two_generations_of_a_timer_may_be_in_flight_at_once(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            old = harness.put(timer(payload="1"))
            harness.send(old)
            new = harness.put(timer(payload="2"))
            harness.send(new)
            assert shard.sending == {A: 2}
            assert not shard.settle(old, delivered(old)), "stale"
            assert shard.sending == {A: 1}
            assert shard.is_sending(A)
            assert phase_of(new) is Phase.SENDING
            assert shard.settle(new, delivered(new))
            assert shard.sending == {}

        with_harness(scenario)

    def test_after_an_attempt_that_was_not_made_the_timer_is_armed_again(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.not_sent(entry, begun=True)
            harness.check()
            assert (entry.phase, entry.started_at_ms) == (Phase.ARMED, 0)
            assert harness.shard.sending == {}
            harness.queue(entry)
            harness.shard.not_sent(entry, begun=False)
            harness.check()
            assert phase_of(entry) is Phase.ARMED

        with_harness(scenario)

    def test_an_attempt_that_was_not_made_does_not_affect_another_one_in_flight(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.not_sent(entry, begun=False)
            assert (entry.phase, entry.started_at_ms) == (Phase.SENDING, NOW_MS)
            assert harness.shard.sending == {A: 1}

        with_harness(scenario)

    def test_an_attempt_that_was_not_made_does_not_arm_a_deleted_timer(self) -> None:
        async def scenario(harness: Harness) -> None:
            first, second = harness.put(timer()), harness.put(timer("b"))
            harness.send(first)
            harness.queue(second)
            harness.delete()
            harness.delete(B)
            harness.commit()
            harness.shard.not_sent(first, begun=True)
            harness.shard.not_sent(second, begun=False)
            harness.check()
            assert (first.phase, second.phase) == (Phase.GONE, Phase.GONE)
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_a_retry_is_a_new_entry_that_waits_for_its_time(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            rearmed = timer(execute_at_ms=NOW_MS + 1_000, attempts=1)
            harness.shard.settle(entry, Settlement(rearmed=rearmed))
            batch = harness.commit()
            assert (list(batch.puts), list(batch.deletes), list(batch.reached)) == ([rearmed], [], [])
            assert harness.shard.entries[A].timer == rearmed
            assert phase_of(harness.shard.entries[A]) is Phase.ARMED
            assert (entry.phase, harness.host.counters.unsettled) == (Phase.GONE, 0)

        with_harness(scenario)

    def test_an_outcome_without_an_attempt_is_recorded_like_any_other(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.queue(entry)
            harness.shard.settle_without_attempt(entry, Settlement(rearmed=timer(execute_at_ms=NOW_MS + 1_000)))
            harness.check()
            assert harness.host.counters.unsettled == 1
            assert list(harness.commit().puts) == [timer(execute_at_ms=NOW_MS + 1_000)]
            assert harness.host.counters.unsettled == 0

        with_harness(scenario)

    def test_a_result_that_comes_after_the_shard_was_dropped_is_stale(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.drop(NotOwner())
            assert not harness.shard.settle(entry, delivered(entry))
            assert harness.shard.is_quiet
            assert harness.host.counters.writes_waiting == 0

        with_harness(scenario)

    def test_a_dropped_shard_records_nothing(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.state = ShardState.DROPPED
            assert not harness.shard.settle(entry, delivered(entry))
            assert harness.shard.pending == {}
            assert harness.shard.sending == {}
            harness.shard.drop(NotOwner())

        with_harness(scenario)

    def test_a_timer_whose_settlement_waits_for_a_commit_stays_in_that_phase_when_it_is_written(self) -> None:
        async def scenario(harness: Harness) -> None:
            entry = harness.put(timer())
            harness.send(entry)
            harness.shard.settle(entry, delivered(entry))
            batch = harness.take()
            harness.write(timer(payload="new"))
            assert phase_of(entry) is Phase.SETTLING
            harness.shard.committed(batch, Committed())
            harness.commit()
            assert harness.shard.entries[A].timer.payload == "new"

        with_harness(scenario)


def unwanted(harness: Harness, how: str) -> None:
    if how == "deleted":
        harness.delete()
    elif how == "replaced":
        harness.write(timer(payload="2"))
    elif how == "recovering":
        harness.shard.start_recovery()
    else:
        harness.shard.state = ShardState[how.upper()]


class TestState:
    def test_it_only_moves_forward(self) -> None:
        async def scenario(harness: Harness) -> None:
            shard = harness.shard
            states = [shard.state]
            for step in (
                shard.start_drain,
                shard.close,
                shard.start_drain,
                lambda: shard.drop(NotOwner()),
                shard.close,
            ):
                step()
                states.append(shard.state)
            shard.start_drain()
            assert [state.name for state in states] == ["OPEN", "DRAINING", "CLOSING", "CLOSING", "DROPPED", "DROPPED"]
            assert shard.dropped

        with_harness(scenario)

    @pytest.mark.parametrize(
        ("state", "draining", "closing", "dropped"),
        [
            (ShardState.OPEN, False, False, False),
            (ShardState.DRAINING, True, False, False),
            (ShardState.CLOSING, True, True, False),
            (ShardState.DROPPED, False, True, True),
        ],
    )
    def test_what_each_state_means(self, state: ShardState, draining: bool, closing: bool, dropped: bool) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.state = state
            assert (harness.shard.draining, harness.shard.closing, harness.shard.dropped) == (
                draining,
                closing,
                dropped,
            )

        with_harness(scenario)

    def test_a_recovery_does_not_change_it(self) -> None:
        async def scenario(harness: Harness) -> None:
            harness.shard.start_drain()
            harness.shard.start_recovery()
            assert (harness.shard.state, harness.shard.recovering) == (ShardState.DRAINING, True)
            harness.shard.finish_recovery(ShardRow(7, 4, 2, "me"), {})
            assert (harness.shard.state, harness.shard.recovering) == (ShardState.DRAINING, False)

        with_harness(scenario)


class TestDropping:
    def test_all_callers_are_answered_not_owner_or_unknown(self) -> None:
        async def scenario(harness: Harness) -> None:
            committing = harness.write(timer())
            harness.take()
            pending = harness.write(timer("b"))
            gone = harness.write(timer("c"))
            gone.cancel()
            harness.shard.drop(NotOwner(), OutcomeUnknown())
            assert isinstance(error_of(committing), OutcomeUnknown)
            assert isinstance(error_of(pending), NotOwner)
            assert harness.shard.dropped
            assert harness.shard.is_quiet

        with_harness(scenario)

    def test_the_callers_of_a_refused_commit_are_answered_not_owner(self) -> None:
        async def scenario(harness: Harness) -> None:
            committing = harness.write(timer())
            harness.take()
            harness.shard.drop(NotOwner())
            assert isinstance(error_of(committing), NotOwner)

        with_harness(scenario)

    def test_nothing_of_a_dropped_shard_is_left_in_memory(self) -> None:
        async def scenario(harness: Harness) -> None:
            entries = [harness.put(timer(name, payload="x" * 5_000)) for name in "abcd"]
            for entry in entries[:2]:
                harness.send(entry)
                harness.shard.settle(entry, delivered(entry))
            harness.take(room=2)
            harness.write(timer("c", payload="2"))
            harness.check()
            harness.shard.drop(NotOwner())
            harness.check()
            host = harness.host
            assert (host.counters.writes_waiting, host.counters.unsettled, host.counters.weight, host.armed) == (
                0,
                0,
                0,
                [],
            )
            assert {entry.phase for entry in entries} == {Phase.GONE}
            assert harness.shard.entries == {}
            assert harness.shard.horizon == BEFORE_ALL

        with_harness(scenario)
