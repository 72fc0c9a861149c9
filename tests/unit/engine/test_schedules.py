"""Timers with a schedule on the engine, in virtual time: which calls are made, and which rows they leave."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from engine_world import OK, URL, World, in_world, on_faulty, on_one_shard
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.instants import format_instant
from duetime.domain.recurrence import first_occurrence, is_held, state_of, with_state
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    NOT_BY_OLDER_VERSIONS_MS,
    Extras,
    Missed,
    Outcome,
    Reached,
    RetryPolicy,
    State,
    TimerKey,
    TimerPatch,
    TimerSpec,
    Verdict,
)
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import Conflict, InvalidField, NotFound
from duetime.service import commands
from duetime.store import ListQuery
from duetime.testing import make_timer
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import START_WALL_MS

A = TimerKey("default", "a")
FAILS = AttemptResult(Contact.ANSWERED, 500)
START = "2027-01-15T08:00"  # when every world begins, in UTC
EVERY_MINUTE = Schedule(timezone="UTC", repeat="cron:* * * * *", at="2027-01-15T08:01")
MINUTE_MS = 60_000


async def create(world: World, schedule: Schedule = EVERY_MINUTE, timer_id: str = "a", **fields: Any) -> Any:
    spec = TimerSpec(namespace="default", timer_id=timer_id, schedule=schedule, **({"callback_url": URL} | fields))
    return await world.service.create(spec)


def minutes_called(world: World, timer_id: str = "a") -> list[float]:
    """When the calls were made, in minutes since the start."""
    return [(at - START_WALL_MS) / MINUTE_MS for at, called, _ in world.destinations.calls if called == timer_id]


async def rows(world: World) -> list[Reached]:
    found = await world.store.list_timers(
        ListQuery(namespace="default", num_shards=16, limit=1_000, outcomes=frozenset(Outcome))
    )
    return sorted(found.reached, key=lambda row: row.timer.scheduled_at_ms)


class TestOccurrences:
    def test_a_recurring_timer_is_called_at_each_occurrence_until_the_last(self) -> None:
        async def scenario(world: World) -> None:
            until = "2027-01-15T09:04"
            await create(
                world, Schedule(timezone="Europe/Berlin", at="2027-01-15T09:01", repeat="cron:* * * * *", until=until)
            )
            await asyncio.sleep(600)
            assert minutes_called(world) == [1, 2, 3, 4]
            view = await world.get("a")
            assert view.state is State.DELIVERED
            state = state_of(view.timer)
            assert state is not None
            assert state.number == 4

        in_world(scenario)

    def test_each_occurrence_has_a_row_and_an_id_of_its_own(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await asyncio.sleep(4.5 * 60)
            found = await rows(world)
            assert [row.timer.scheduled_at_ms for row in found] == [START_WALL_MS + n * MINUTE_MS for n in (1, 2, 3, 4)]
            assert len({row.timer.delivery_id for row in found}) == 4
            view = await world.get("a")
            assert view.state is State.SCHEDULED
            assert view.timer.execute_at_ms == START_WALL_MS + 5 * MINUTE_MS

        in_world(scenario)

    def test_it_goes_on_after_occurrences_that_failed_or_were_skipped(self) -> None:
        async def scenario(world: World) -> None:
            answers = [AttemptResult(Contact.ANSWERED, 400), OK, OK]

            async def answer(attempt: Attempt) -> AttemptResult:
                return answers.pop(0)

            world.destinations.answers["http://shop.test/mixed"] = answer
            await create(world, callback_url="http://shop.test/mixed", missed=Missed(skip_if_late_by_ms=1_000))
            await asyncio.sleep(90)
            world.engine.abandon()
            await asyncio.sleep(40)  # nothing runs at the second occurrence
            world.new_instance()
            world.destinations.answers["http://shop.test/mixed"] = answer
            await world.start()
            await asyncio.sleep(100)
            assert [row.outcome for row in await rows(world)] == [Outcome.FAILED, Outcome.SKIPPED, Outcome.DELIVERED]

        in_world(scenario)

    def test_retries_belong_to_their_occurrence_and_end_with_the_next(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                return FAILS if attempt.timer.scheduled_at_ms == START_WALL_MS + MINUTE_MS else OK

            world.destinations.answers["http://shop.test/fails"] = answer
            policy = RetryPolicy(initial_interval_ms=20_000, max_interval_ms=20_000)
            await create(world, callback_url="http://shop.test/fails", retry_policy=policy)
            await asyncio.sleep(3.5 * 60)
            found = await rows(world)
            assert [row.outcome for row in found] == [Outcome.FAILED, Outcome.DELIVERED, Outcome.DELIVERED]
            assert "superseded" in str(found[0].timer.extras.last_error)
            assert found[0].timer.attempts > 1
            assert minutes_called(world)[-2:] == [2, 3]

        in_world(scenario)

    def test_a_call_that_takes_longer_than_the_period_does_not_overlap_the_next(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(150)
                return OK

            world.destinations.answers["http://shop.test/slow"] = answer
            await create(world, callback_url="http://shop.test/slow")
            await asyncio.sleep(9 * 60)
            calls = minutes_called(world)
            assert calls[0] == 1
            assert all(later - sooner >= 2.5 for sooner, later in pairwise(calls))
            ends = [row.timer.scheduled_at_ms - START_WALL_MS for row in await rows(world)]
            assert ends == [1 * MINUTE_MS, 3 * MINUTE_MS, 6 * MINUTE_MS]  # the latest that had passed

        in_world(scenario)

    @pytest.mark.parametrize(
        ("catch_up", "late_calls", "skipped"), [("one", [5], 1), ("skip", [], 1), ("all", [1, 2, 3, 4, 5], 0)]
    )
    def test_what_passed_during_an_outage_follows_catch_up(
        self, catch_up: str, late_calls: list[int], skipped: int
    ) -> None:
        async def scenario(world: World) -> None:
            schedule = Schedule(timezone="UTC", at="2027-01-15T08:01", repeat="cron:*/1 * * * *", catch_up=catch_up)
            if catch_up == "skip":
                schedule = Schedule(timezone="UTC", at="2027-01-15T08:01", repeat="cron:1-4,7 * * * *", catch_up="skip")
            await create(world, schedule)
            world.engine.abandon()
            await asyncio.sleep(5.5 * 60)
            world.new_instance()
            await world.start()
            await asyncio.sleep(60)
            made = [
                (row.timer.scheduled_at_ms - START_WALL_MS) / MINUTE_MS
                for row in await rows(world)
                if row.outcome is Outcome.DELIVERED
            ]
            assert [at for at in made if at < 6] == late_calls
            assert sum(row.outcome is Outcome.SKIPPED for row in await rows(world)) == skipped

        in_world(scenario)

    def test_a_pause_of_the_namespace_counts_as_an_outage(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await world.service.namespaces.pause("default")
            await asyncio.sleep(5.5 * 60)
            assert minutes_called(world) == []
            await world.service.namespaces.resume("default")
            await asyncio.sleep(10)
            assert len(minutes_called(world)) == 1
            made = [row for row in await rows(world) if row.outcome is Outcome.DELIVERED]
            assert [row.timer.scheduled_at_ms for row in made] == [START_WALL_MS + 5 * MINUTE_MS]

        in_world(scenario)

    def test_a_crash_after_the_call_repeats_the_occurrence_with_the_same_id(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            ids: list[str] = []

            async def answer(attempt: Attempt) -> AttemptResult:
                ids.append(attempt.timer.delivery_id)
                return OK

            world.destinations.answers["http://shop.test/x"] = answer
            await create(world, callback_url="http://shop.test/x")
            await asyncio.sleep(59)
            store.fail("commit", *[Fault.UNAVAILABLE] * 100)
            await asyncio.sleep(5)
            store.heal()
            await world.crash_and_restart()
            world.destinations.answers["http://shop.test/x"] = answer
            await asyncio.sleep(70)
            assert ids[0] == ids[1]
            assert len(set(ids)) == 2

        on_faulty(scenario)


class TestCommands:
    def test_a_schedule_that_is_wrong_is_refused_with_its_field(self) -> None:
        async def scenario(world: World) -> None:
            with pytest.raises(InvalidField) as error:
                await create(world, Schedule(timezone="Europe/Berlinn", at=START))
            assert error.value.field == "schedule.timezone"
            with pytest.raises(NotFound):
                await world.get("a")

        in_world(scenario)

    def test_if_absent_compares_the_schedule(self) -> None:
        async def scenario(world: World) -> None:
            first = await create(world)
            await asyncio.sleep(130)
            again = await create(world, if_absent=True)
            assert again.existed
            assert again.view.timer.generation == first.view.timer.generation
            with pytest.raises(Conflict):
                await create(
                    world, Schedule(timezone="UTC", repeat="cron:*/2 * * * *", at="2027-01-15T08:01"), if_absent=True
                )

        in_world(scenario)

    def test_an_update_with_another_schedule_keeps_the_rows_and_the_count(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await asyncio.sleep(2.5 * 60)
            schedule = Schedule(timezone="UTC", repeat="daily", at="2027-01-15T08:10")
            patch = TimerPatch(schedule=schedule, delay_ms=NOT_BY_OLDER_VERSIONS_MS)
            updated = await world.service.update(A, patch)
            assert format_instant(updated.view.timer.execute_at_ms) == "2027-01-15T08:10:00.000Z"
            state = state_of(updated.view.timer)
            assert state is not None
            assert (state.number, state.schedule) == (3, schedule)
            await asyncio.sleep(900)
            assert minutes_called(world) == [1, 2, 10]
            assert len(await rows(world)) == 3

        in_world(scenario)

    def test_a_plain_timer_gets_a_schedule_and_loses_it_again(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 3_600_000)
            await world.service.update(A, TimerPatch(schedule=EVERY_MINUTE, delay_ms=NOT_BY_OLDER_VERSIONS_MS))
            await asyncio.sleep(2.5 * 60)
            updated = await world.service.update(A, TimerPatch(schedule=None, delay_ms=NOT_BY_OLDER_VERSIONS_MS))
            assert updated.view.timer.extras.later is None
            await asyncio.sleep(600)
            assert minutes_called(world) == [1, 2, 3]  # the pending call was the last
            await world.create("b", 1_000)
            await world.service.update(TimerKey("default", "b"), TimerPatch(schedule=None, payload="1"))
            await asyncio.sleep(5)
            assert world.destinations.called()[-1] == "b"

        in_world(scenario)

    def test_an_update_with_a_time_moves_the_pending_occurrence_only(self) -> None:
        async def scenario(world: World) -> None:
            await create(world, Schedule(timezone="UTC", repeat="cron:*/10 * * * *", at="2027-01-15T08:10"))
            await world.service.update(A, TimerPatch(delay_ms=15 * MINUTE_MS))
            await asyncio.sleep(35 * 60)
            assert minutes_called(world) == [15, 20, 30]

        in_world(scenario)

    def test_an_update_without_a_time_keeps_the_schedule(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await world.service.update(A, TimerPatch(payload='"new"', tags=("x",)))
            await asyncio.sleep(2.5 * 60)
            assert world.destinations.payloads == ['"new"', '"new"']
            assert minutes_called(world) == [1, 2]

        in_world(scenario)

    def test_fire_now_is_a_call_in_addition(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await asyncio.sleep(30)
            await world.service.fire_now(A)
            await asyncio.sleep(100)
            assert minutes_called(world) == [0.5, 1, 2]
            state = state_of((await world.get("a")).timer)
            assert state is not None
            assert state.number == 3

        in_world(scenario)

    def test_a_receiver_adds_a_call(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                if attempt.timer.extras.occurrence:
                    return OK
                at = format_instant(START_WALL_MS + 90_000)
                return AttemptResult(Contact.ANSWERED, 200, f'{{"ok":true,"nextExecuteAt":"{at}"}}'.encode())

            world.destinations.answers["http://shop.test/again"] = answer
            await create(world, callback_url="http://shop.test/again")
            await asyncio.sleep(3.5 * 60)
            assert minutes_called(world) == [1, 1.5, 2, 3]

        in_world(scenario)

    def test_a_replay_of_a_cancelled_timer_lets_its_schedule_go_on(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await asyncio.sleep(90)
            assert await world.service.delete(A) is Verdict.CANCELLED
            await asyncio.sleep(5 * 60)
            assert minutes_called(world) == [1]
            await world.service.replay(A)
            with pytest.raises(Conflict):
                await world.service.replay(A)
            await asyncio.sleep(80)
            assert minutes_called(world) == [1, 6.5, 7]

        in_world(scenario)

    def test_the_view_of_a_timer_that_is_over_has_its_schedule(self) -> None:
        async def scenario(world: World) -> None:
            await create(world, Schedule(timezone="UTC", at="2027-01-15T08:01"))
            await asyncio.sleep(90)
            view = await world.get("a")
            assert view.state is State.DELIVERED
            assert state_of(view.timer) is not None
            assert minutes_called(world) == [1]

        in_world(scenario)


class TestPauses:
    def test_a_paused_timer_does_not_fire_and_a_resumed_one_catches_up(self) -> None:
        async def scenario(world: World) -> None:
            await create(world)
            await asyncio.sleep(90)
            paused = await world.service.pause(A)
            assert is_held(paused.timer)
            assert paused.timer.execute_at_ms == HELD_MS
            assert (await world.service.pause(A)).timer == paused.timer
            await world.crash_and_restart()
            await asyncio.sleep(240)
            assert minutes_called(world) == [1]
            resumed = await world.service.resume(A)
            assert resumed.timer.execute_at_ms == START_WALL_MS + 5 * MINUTE_MS
            assert (await world.service.resume(A)).state is not State.CANCELLED
            await asyncio.sleep(60)
            assert minutes_called(world)[-2:] == [5.5, 6]

        in_world(scenario)

    def test_a_plain_timer_can_be_paused_too(self) -> None:
        async def scenario(world: World) -> None:
            await world.create("a", 60_000, payload="1")
            await world.service.pause(A)
            await world.service.update(A, TimerPatch(delay_ms=120_000, payload="2"))
            with pytest.raises(Conflict) as error:
                await world.service.fire_now(A)
            assert error.value.code == "timer_paused"
            await asyncio.sleep(600)
            assert world.destinations.calls == []
            resumed = await world.service.resume(A)
            assert resumed.timer.extras.later is None
            await asyncio.sleep(1)
            assert world.destinations.payloads == ["2"]
            with pytest.raises(Conflict):
                await world.service.pause(A)

        in_world(scenario)

    def test_a_call_in_flight_that_is_made_again_after_the_pause_has_the_same_id(self) -> None:
        async def scenario(world: World) -> None:
            ids: list[str] = []

            async def answer(attempt: Attempt) -> AttemptResult:
                ids.append(attempt.timer.delivery_id)
                await asyncio.sleep(5)
                return OK

            world.destinations.answers["http://shop.test/slow"] = answer
            await create(world, callback_url="http://shop.test/slow")
            await asyncio.sleep(61)
            assert (await world.service.pause(A)).state is State.IN_FLIGHT
            await asyncio.sleep(10)
            await world.service.resume(A)
            await asyncio.sleep(10)
            assert len(ids) == 2
            assert ids[0] == ids[1]

        in_world(scenario)

    def test_a_pause_waits_a_moment_for_the_call_in_flight(self) -> None:
        async def scenario(world: World) -> None:
            async def answer(attempt: Attempt) -> AttemptResult:
                await asyncio.sleep(1.5)
                return OK

            world.destinations.answers["http://shop.test/slow"] = answer
            await create(world, callback_url="http://shop.test/slow")
            await asyncio.sleep(61)
            paused = await world.service.pause(A)
            assert paused.state is State.SCHEDULED
            assert [row.outcome for row in await rows(world)] == [Outcome.DELIVERED]
            await asyncio.sleep(10)
            resumed = await world.service.resume(A)
            assert resumed.timer.execute_at_ms == START_WALL_MS + 2 * MINUTE_MS
            assert minutes_called(world) == [1]

        in_world(scenario)

    def test_a_paused_timer_is_cancelled_with_the_time_it_had(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            await create(world)
            await world.service.pause(A)
            assert await world.service.delete(A) is Verdict.CANCELLED
            view = await world.get("a")
            assert view.state is State.CANCELLED
            assert view.timer.execute_at_ms == START_WALL_MS + MINUTE_MS
            assert not is_held(view.timer)

        on_one_shard(scenario)

    def test_a_schedule_that_has_ended_during_the_pause_ends_the_timer(self) -> None:
        async def scenario(world: World) -> None:
            schedule = Schedule(
                timezone="UTC",
                repeat="cron:* * * * *",
                at="2027-01-15T08:01",
                until="2027-01-15T08:03",
                catch_up="skip",
            )
            await create(world, schedule)
            await world.service.pause(A)
            await asyncio.sleep(600)
            assert (await world.service.resume(A)).state is State.SKIPPED
            await asyncio.sleep(600)
            assert world.destinations.calls == []

        in_world(scenario)


class TestFieldsOfOtherVersions:
    def test_fields_of_a_later_version_survive_a_schedule_and_a_pause(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            later = {"k": [1]}
            stored = make_timer("a", START_WALL_MS + MINUTE_MS, namespace="default", callback_url=URL)
            stored = replace(stored, extras=Extras(later=later))
            [shard] = world.engine.shards.values()
            await shard.write(A, stored, [])
            await world.service.update(A, TimerPatch(schedule=EVERY_MINUTE, delay_ms=NOT_BY_OLDER_VERSIONS_MS))
            await world.service.pause(A)
            await world.service.resume(A)
            await asyncio.sleep(90)
            state = state_of((await world.get("a")).timer)
            assert state is not None
            assert (state.later, state.number) == (later, 2)
            updated = await world.service.update(A, TimerPatch(schedule=None, delay_ms=NOT_BY_OLDER_VERSIONS_MS))
            assert updated.view.timer.extras.later == later

        on_one_shard(scenario)

    def test_a_timer_that_has_paused_itself_goes_on_where_its_zone_is_known(self) -> None:
        async def scenario(world: World, store: FaultyStore) -> None:
            timer = (await create(world)).view.timer
            state = state_of(timer)
            assert state is not None
            [shard] = world.engine.shards.values()
            unknown = replace(state, schedule=Schedule(timezone="Mars/Olympus", repeat="daily", at=START))
            await shard.write(A, with_state(timer, unknown), [])
            await asyncio.sleep(90)
            stopped = (await world.get("a")).timer
            assert is_held(stopped)
            assert "schedule.timezone" in str(stopped.extras.last_error)
            assert minutes_called(world) == [1]
            with pytest.raises(InvalidField):
                await world.service.resume(A)
            of_stopped = state_of(stopped)
            assert of_stopped is not None
            over = Schedule(timezone="UTC", at=START, repeat="daily", until="2027-01-15T08:00")
            await shard.write(A, with_state(stopped, replace(of_stopped, schedule=over)), [])
            with pytest.raises(Conflict) as error:
                await world.service.resume(A)
            assert error.value.code == "schedule_ended"
            await world.service.update(A, TimerPatch(schedule=EVERY_MINUTE, delay_ms=NOT_BY_OLDER_VERSIONS_MS))
            await world.service.resume(A)
            await asyncio.sleep(60)
            assert minutes_called(world) == [1, 2]

        on_one_shard(scenario)


class TestSearches:
    def test_there_is_one_in_each_step_of_the_event_loop(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One may take a millisecond or two, and those of fifty creates of one request were made in one step."""
        step, searches = 0, []

        def counted(schedule: Schedule, now_ms: int) -> tuple[ScheduleState, int]:
            searches.append(step)
            return first_occurrence(schedule, now_ms)

        async def count_steps() -> None:
            nonlocal step
            while True:
                await asyncio.sleep(0)
                step += 1

        async def scenario(world: World) -> None:
            for n in range(20):
                await create(world, timer_id=str(n))
            monkeypatch.setattr(commands, "first_occurrence", counted)
            counting = asyncio.create_task(count_steps())
            spec = TimerSpec(namespace="default", timer_id="", callback_url=URL, schedule=EVERY_MINUTE)
            specs = [replace(spec, timer_id=f"many {n}") for n in range(100)]
            patch = TimerPatch(schedule=EVERY_MINUTE, delay_ms=NOT_BY_OLDER_VERSIONS_MS)
            updates = [world.service.update(TimerKey("default", str(n)), patch) for n in range(20)]
            await asyncio.gather(world.service.create_many(specs), *updates)
            counting.cancel()
            assert len(searches) == 120
            assert len(set(searches)) == 120

        in_world(scenario)
