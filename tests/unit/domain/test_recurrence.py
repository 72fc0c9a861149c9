"""Timers with a schedule: the first occurrence, what follows the end of one, retries, catching up, pauses."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from duetime.domain.instants import format_instant, parse_instant
from duetime.domain.recurrence import (
    called_again,
    called_now,
    first_occurrence,
    following,
    held,
    is_held,
    moved,
    not_held,
    state_of,
    with_state,
)
from duetime.domain.schedule import SEARCH_STEPS_MAX, TZDATA_VERSION, Steps
from duetime.domain.settle import AttemptResult, Contact, Settlement, missed, resumed, settle
from duetime.domain.timer import DAY_MS, HOUR_MS, SECOND_MS, Extras, Missed, Namespace, Outcome, RetryPolicy, Timer
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import InvalidField
from duetime.testing import make_timer

NAMESPACE = Namespace(name="orders", num_shards=16, created_at_ms=0)
OK = AttemptResult(Contact.ANSWERED, 200)
FAILS = AttemptResult(Contact.ANSWERED, 500)
REFUSED = AttemptResult(Contact.ANSWERED, 400)
DAILY = Schedule(at="2027-01-15T09:00", timezone="Europe/Berlin", repeat="daily")
FIRST_MS = parse_instant("2027-01-15T08:00:00Z")


def timer_of(schedule: Schedule, now_ms: int, **fields: object) -> Timer:
    state, at_ms = first_occurrence(schedule, now_ms)
    timer = make_timer("a", execute_at_ms=at_ms, scheduled_at_ms=at_ms, **fields)
    return replace(timer, extras=replace(timer.extras, later=state))


def ended(timer: Timer, result: AttemptResult = OK, *, started_ms: int, now_ms: int | None = None) -> Settlement:
    return settle(
        timer,
        result,
        NAMESPACE,
        started_at_ms=started_ms,
        now_ms=started_ms + 50 if now_ms is None else now_ms,
        jitter=lambda: 0.5,
        rearm_interval_min_ms=SECOND_MS,
    )


def steps_of(search: Callable[[], object]) -> int:
    used: list[int] = []
    take = Steps.take

    def counted(self: Steps, count: int = 1) -> None:
        used.append(count)
        take(self, count)

    with patch.object(Steps, "take", counted):
        search()
    return sum(used)


def asks_for(at_ms: int) -> AttemptResult:
    body = json.dumps({"ok": True, "nextExecuteAt": format_instant(at_ms)})
    return AttemptResult(Contact.ANSWERED, 200, body.encode())


def pending(settlement: Settlement | None) -> tuple[str, int]:
    """When the rearmed timer is due, and the number of its occurrence."""
    assert settlement is not None
    assert settlement.rearmed is not None
    state = state_of(settlement.rearmed)
    assert state is not None
    return format_instant(settlement.rearmed.execute_at_ms), state.number


class TestFirstOccurrence:
    def test_a_schedule_that_repeats_begins_with_the_first_occurrence_from_now_on(self) -> None:
        state, at_ms = first_occurrence(DAILY, FIRST_MS + 3 * DAY_MS + 1)
        assert format_instant(at_ms) == "2027-01-19T08:00:00.000Z"
        assert (state.number, state.after_ms, state.tzdata) == (1, at_ms, TZDATA_VERSION)
        assert (state.asked, state.local) == ("2027-01-19T09:00:00", "2027-01-19T09:00:00+01:00")

    def test_an_occurrence_at_this_moment_is_the_first(self) -> None:
        assert first_occurrence(DAILY, FIRST_MS)[1] == FIRST_MS

    def test_a_single_time_in_the_past_is_due_at_once(self) -> None:
        assert first_occurrence(replace(DAILY, repeat=None), FIRST_MS + DAY_MS)[1] == FIRST_MS

    def test_a_rule_without_a_start_begins_now_and_keeps_its_start(self) -> None:
        schedule = Schedule(timezone="UTC", repeat="rrule:FREQ=DAILY;INTERVAL=3")
        state, at_ms = first_occurrence(schedule, FIRST_MS)
        assert (at_ms, state.start, state.schedule) == (FIRST_MS, "2027-01-15T08:00:00", schedule)
        following_one = following(state, FIRST_MS + 1)
        assert following_one is not None
        assert following_one.instant_ms == FIRST_MS + 3 * DAY_MS

    @pytest.mark.parametrize(
        ("schedule", "field"),
        [
            (replace(DAILY, timezone="Europe/Berlinn"), "schedule.timezone"),
            (replace(DAILY, repeat="hourly"), "schedule.repeat"),
            (replace(DAILY, until="2027-01-20"), "schedule.until"),
            (replace(DAILY, repeat="rrule:FREQ=DAILY;COUNT=2"), "schedule.repeat"),
            (Schedule(at="2027-03-28T02:30", timezone="Europe/Berlin", gap="skip"), "schedule.at"),
        ],
    )
    def test_a_schedule_without_an_occurrence_is_refused_with_its_field(self, schedule: Schedule, field: str) -> None:
        with pytest.raises(InvalidField) as error:
            first_occurrence(schedule, FIRST_MS + 30 * DAY_MS)
        assert error.value.field == field


class TestWhatFollows:
    @pytest.mark.parametrize(
        ("result", "outcome"), [(OK, Outcome.DELIVERED), (REFUSED, Outcome.FAILED)], ids=["delivered", "failed"]
    )
    def test_the_next_occurrence_is_scheduled_with_the_reached_row(
        self, result: AttemptResult, outcome: Outcome
    ) -> None:
        timer = timer_of(DAILY, FIRST_MS)
        settlement = ended(timer, result, started_ms=FIRST_MS + 90_000)
        assert settlement.reached is not None
        assert settlement.reached.outcome is outcome
        assert settlement.reached.timer.delivery_id == timer.delivery_id
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)
        rearmed = settlement.rearmed
        assert rearmed is not None
        assert rearmed.scheduled_at_ms == rearmed.execute_at_ms
        assert rearmed.attempts == 0
        assert rearmed.extras.first_attempt_at_ms is None
        assert rearmed.generation == timer.generation
        assert rearmed.delivery_id != timer.delivery_id

    @pytest.mark.parametrize(
        ("day", "fields", "instants"),
        [
            ("2027-03-28", {}, ["2027-03-27T01:30", "2027-03-28T01:30", "2027-03-29T00:30"]),
            ("2027-03-28", {"gap": "earlier"}, ["2027-03-27T01:30", "2027-03-28T00:30", "2027-03-29T00:30"]),
            ("2027-03-28", {"gap": "skip"}, ["2027-03-27T01:30", "2027-03-29T00:30", "2027-03-30T00:30"]),
            ("2027-10-31", {}, ["2027-10-30T00:30", "2027-10-31T00:30", "2027-11-01T01:30"]),
            ("2027-10-31", {"fold": "second"}, ["2027-10-30T00:30", "2027-10-31T01:30", "2027-11-01T01:30"]),
            ("2027-10-31", {"fold": "both"}, ["2027-10-30T00:30", "2027-10-31T00:30", "2027-10-31T01:30"]),
        ],
    )
    def test_case_11_a_timer_goes_on_over_a_gap_and_a_fold(
        self, day: str, fields: dict[str, str], instants: list[str]
    ) -> None:
        schedule = Schedule(timezone="Europe/Berlin", at="2027-01-01T02:30", repeat="daily", **fields)  # type: ignore[arg-type]
        timer = timer_of(schedule, parse_instant(f"{day}T00:00:00Z") - DAY_MS)
        found = []
        for _ in instants:
            found.append(format_instant(timer.execute_at_ms)[:16])
            rearmed = ended(timer, started_ms=timer.execute_at_ms + 20).rearmed
            assert rearmed is not None
            timer = rearmed
        assert found == instants

    def test_the_local_time_stays_over_a_change_of_the_offset(self) -> None:
        timer = timer_of(DAILY, parse_instant("2027-03-27T00:00:00Z"))
        settlement = ended(timer, started_ms=timer.execute_at_ms + 5)
        assert pending(settlement)[0] == "2027-03-28T07:00:00.000Z"
        state = state_of(settlement.rearmed) if settlement.rearmed else None
        assert state is not None
        assert state.local == "2027-03-28T09:00:00+02:00"

    @given(lateness=st.lists(st.integers(0, 40_000), min_size=1, max_size=30))
    def test_there_is_no_drift_however_late_the_calls_are(self, lateness: list[int]) -> None:
        timer = timer_of(Schedule(timezone="UTC", repeat="cron:* * * * *"), FIRST_MS)
        for number, late_ms in enumerate(lateness):
            assert timer.execute_at_ms == FIRST_MS + number * 60_000
            rearmed = ended(timer, started_ms=timer.execute_at_ms + late_ms).rearmed
            assert rearmed is not None
            timer = rearmed

    def test_after_the_last_occurrence_the_timer_is_over(self) -> None:
        timer = timer_of(replace(DAILY, until="2027-01-16"), FIRST_MS)
        second = ended(timer, started_ms=FIRST_MS).rearmed
        assert second is not None
        last = ended(second, started_ms=FIRST_MS + DAY_MS)
        assert last.rearmed is None
        assert last.reached is not None

    def test_a_single_time_is_called_once(self) -> None:
        timer = timer_of(replace(DAILY, repeat=None), FIRST_MS)
        assert ended(timer, started_ms=FIRST_MS).rearmed is None

    def test_a_single_time_that_the_clock_shows_twice_is_called_twice_if_so_asked(self) -> None:
        schedule = Schedule(at="2027-10-31T02:30", timezone="Europe/Berlin", fold="both")
        timer = timer_of(schedule, FIRST_MS)
        settlement = ended(timer, started_ms=timer.execute_at_ms)
        assert pending(settlement) == ("2027-10-31T01:30:00.000Z", 2)
        assert settlement.rearmed is not None
        assert ended(settlement.rearmed, started_ms=settlement.rearmed.execute_at_ms).rearmed is None

    def test_a_schedule_that_cannot_be_computed_pauses_the_timer(self) -> None:
        timer = timer_of(DAILY, FIRST_MS)
        state = state_of(timer)
        assert state is not None
        unknown = with_state(timer, replace(state, schedule=replace(DAILY, timezone="Mars/Olympus")))
        settlement = ended(unknown, started_ms=FIRST_MS)
        assert settlement.reached is not None
        assert settlement.rearmed is not None
        assert is_held(settlement.rearmed)
        assert "schedule.timezone" in str(settlement.rearmed.extras.last_error)
        # By an instance that knows the zone it goes on.
        known = state_of(settlement.rearmed)
        assert known is not None
        again = resumed(with_state(settlement.rearmed, replace(known, schedule=DAILY)), NAMESPACE, FIRST_MS + 5)
        assert pending(again) == ("2027-01-16T08:00:00.000Z", 2)
        assert again.rearmed is not None
        assert not is_held(again.rearmed)
        over = replace(known, schedule=replace(DAILY, until="2027-01-15T10:00"))
        assert resumed(with_state(settlement.rearmed, over), NAMESPACE, FIRST_MS + 5) == Settlement()


class TestRetries:
    def test_a_retry_before_the_next_occurrence_is_made(self) -> None:
        settlement = ended(timer_of(DAILY, FIRST_MS), FAILS, started_ms=FIRST_MS)
        assert settlement.reached is None
        assert settlement.rearmed is not None
        assert settlement.rearmed.attempts == 1
        assert pending(settlement)[1] == 1

    def test_retries_end_when_the_next_occurrence_is_due(self) -> None:
        policy = RetryPolicy(initial_interval_ms=HOUR_MS, max_interval_ms=HOUR_MS)
        timer = timer_of(DAILY, FIRST_MS, retry_policy=policy, attempts=5)
        settlement = ended(timer, FAILS, started_ms=FIRST_MS + DAY_MS - 60_000)
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert settlement.reached.timer.extras.last_error == "superseded by the next occurrence; HTTP 500"
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)

    def test_a_retry_that_the_receiver_asks_for_ends_there_too(self) -> None:
        body = json.dumps({"ok": False, "nextExecuteAt": format_instant(FIRST_MS + DAY_MS)}).encode()
        timer = timer_of(DAILY, FIRST_MS, retry_policy=RetryPolicy(max_duration_ms=10 * DAY_MS))
        settlement = ended(timer, AttemptResult(Contact.ANSWERED, 200, body), started_ms=FIRST_MS)
        assert settlement.reached is not None
        assert settlement.reached.timer.extras.last_error == (
            "superseded by the next occurrence; asked to be called again"
        )

    def test_a_retry_that_was_held_until_the_next_occurrence_is_due_is_not_made(self) -> None:
        timer = timer_of(DAILY, FIRST_MS, attempts=2)
        assert missed(timer, NAMESPACE, FIRST_MS + DAY_MS - 1) is None
        settlement = missed(timer, NAMESPACE, FIRST_MS + DAY_MS)
        assert settlement is not None
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert settlement.reached.timer.extras.last_error == "superseded by the occurrence at 2027-01-16T08:00:00.000Z"
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)


class TestCatchUp:
    LATE_MS = FIRST_MS + 4 * DAY_MS + HOUR_MS

    def test_one_fires_the_latest_that_was_missed(self) -> None:
        settlement = missed(timer_of(DAILY, FIRST_MS), NAMESPACE, self.LATE_MS)
        assert settlement is not None
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.SKIPPED
        assert pending(settlement) == ("2027-01-19T08:00:00.000Z", 2)
        assert settlement.rearmed is not None
        assert missed(settlement.rearmed, NAMESPACE, self.LATE_MS) is None  # it is called

    def test_skip_goes_on_with_the_next_one_in_the_future(self) -> None:
        settlement = missed(timer_of(replace(DAILY, catch_up="skip"), FIRST_MS), NAMESPACE, self.LATE_MS)
        assert pending(settlement) == ("2027-01-20T08:00:00.000Z", 2)

    def test_skip_makes_a_call_that_is_a_little_late(self) -> None:
        timer = timer_of(replace(DAILY, catch_up="skip"), FIRST_MS)
        assert missed(timer, NAMESPACE, FIRST_MS + 60_000) is None
        assert pending(missed(timer, NAMESPACE, FIRST_MS + 60_001)) == ("2027-01-16T08:00:00.000Z", 2)
        # Also if the call before it took until then.
        settlement = ended(timer, started_ms=FIRST_MS, now_ms=FIRST_MS + DAY_MS + 60_000)
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)

    def test_skip_ends_a_schedule_whose_last_occurrence_was_missed(self) -> None:
        timer = timer_of(replace(DAILY, catch_up="skip", until="2027-01-15"), FIRST_MS)
        settlement = missed(timer, NAMESPACE, self.LATE_MS)
        assert settlement is not None
        assert settlement.rearmed is None
        assert settlement.reached is not None

    def test_a_single_time_is_called_however_late(self) -> None:
        timer = timer_of(replace(DAILY, catch_up="skip", repeat=None), FIRST_MS)
        assert missed(timer, NAMESPACE, self.LATE_MS) is None

    def test_all_fires_each_one_after_the_other(self) -> None:
        timer: Timer | None = timer_of(replace(DAILY, catch_up="all"), FIRST_MS)
        fired = []
        while timer is not None and timer.execute_at_ms <= self.LATE_MS:
            assert missed(timer, NAMESPACE, self.LATE_MS) is None
            fired.append(format_instant(timer.execute_at_ms)[:10])
            timer = ended(timer, started_ms=self.LATE_MS).rearmed
        assert fired == ["2027-01-15", "2027-01-16", "2027-01-17", "2027-01-18", "2027-01-19"]

    def test_all_goes_on_with_the_latest_after_a_thousand_that_were_late(self) -> None:
        schedule = Schedule(timezone="UTC", repeat="cron:* * * * *", catch_up="all")
        timer: Timer | None = timer_of(schedule, FIRST_MS + 1)
        late_ms = FIRST_MS + 5_000 * 60_000 + 7
        called = []
        for _ in range(1_003):
            assert timer is not None
            assert missed(timer, NAMESPACE, late_ms) is None
            called.append((timer.execute_at_ms - FIRST_MS) // 60_000)
            timer = ended(timer, started_ms=late_ms).rearmed
        assert called == [*range(1, 1_002), 5_000, 5_001]

    @pytest.mark.parametrize("catch_up", ["one", "skip", "all"])
    def test_a_timer_is_scheduled_again_in_few_steps_however_many_occurrences_have_passed(self, catch_up: str) -> None:
        """A search through the thousands that had passed took 50 ms of the event loop, at the end of each call."""
        for repeat in ("cron:* * * * * *", "cron:* * 3 * * *", "cron:* * * * *", "cron:0 0 1 1 *"):
            timer = timer_of(Schedule(timezone="Europe/Berlin", repeat=repeat, catch_up=catch_up), FIRST_MS)
            for passed_ms in (HOUR_MS // 3, 7 * HOUR_MS, 30 * DAY_MS, 3_000 * DAY_MS):
                used = steps_of(partial(ended, timer, started_ms=FIRST_MS + passed_ms))
                assert used <= 2 * SEARCH_STEPS_MAX

    def test_the_latest_of_many_in_a_burst_long_ago_is_found(self) -> None:
        timer = timer_of(Schedule(timezone="UTC", repeat="cron:* * 3 * * *"), FIRST_MS)
        late_ms = FIRST_MS + 40 * DAY_MS + 18 * HOUR_MS  # at 02:00
        latest = ended(timer, started_ms=late_ms).rearmed
        for _ in range(3):
            assert latest is not None
            following_one = missed(latest, NAMESPACE, late_ms)
            if following_one is None:
                break
            latest = following_one.rearmed
        assert latest is not None
        assert format_instant(latest.execute_at_ms)[10:19] == "T03:59:59"

    def test_the_latest_is_found_quickly_after_years(self) -> None:
        schedule = Schedule(timezone="Europe/Berlin", repeat="cron:* * * * * *")
        timer = timer_of(schedule, FIRST_MS)
        late_ms = FIRST_MS + 20 * 366 * DAY_MS
        settlement = ended(timer, started_ms=late_ms, now_ms=late_ms + 300)
        assert settlement.rearmed is not None
        assert settlement.rearmed.execute_at_ms == late_ms

    def test_a_call_that_is_late_by_a_commit_is_made_even_if_others_have_passed(self) -> None:
        timer = timer_of(Schedule(timezone="UTC", repeat="cron:* * * * * *"), FIRST_MS)
        assert missed(timer, NAMESPACE, FIRST_MS + 5_000) is None
        assert pending(missed(timer, NAMESPACE, FIRST_MS + 5_001))[1] == 2

    def test_missed_applies_to_each_occurrence_and_the_next_one_follows(self) -> None:
        extras = Extras(missed=Missed(fail_if_late_by_ms=HOUR_MS // 2))
        timer = timer_of(DAILY, FIRST_MS)
        timer = replace(timer, extras=replace(extras, later=timer.extras.later))
        settlement = missed(timer, NAMESPACE, FIRST_MS + HOUR_MS)
        assert settlement is not None
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)
        assert settlement.rearmed is not None
        assert settlement.rearmed.extras.missed == extras.missed


class TestCallsInAddition:
    def test_a_receiver_adds_a_call_before_the_next_occurrence(self) -> None:
        settlement = ended(timer_of(DAILY, FIRST_MS), asks_for(FIRST_MS + HOUR_MS), started_ms=FIRST_MS)
        assert settlement.reached is not None
        assert settlement.rearmed is not None
        assert pending(settlement) == ("2027-01-15T09:00:00.000Z", 1)
        again = ended(settlement.rearmed, asks_for(FIRST_MS + 2 * HOUR_MS), started_ms=FIRST_MS + HOUR_MS)
        assert again.rearmed is not None
        assert pending(again) == ("2027-01-15T10:00:00.000Z", 1)
        then = ended(again.rearmed, started_ms=FIRST_MS + 2 * HOUR_MS)
        assert pending(then) == ("2027-01-16T08:00:00.000Z", 2)
        rows = [each.reached.timer.delivery_id for each in (settlement, again, then) if each.reached]
        assert len(set(rows)) == 3

    def test_a_call_that_is_asked_for_after_the_next_occurrence_is_ignored_with_a_warning(self) -> None:
        settlement = ended(timer_of(DAILY, FIRST_MS), asks_for(FIRST_MS + DAY_MS), started_ms=FIRST_MS)
        assert pending(settlement) == ("2027-01-16T08:00:00.000Z", 2)
        assert settlement.succeeded
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.DELIVERED
        assert settlement.reached.timer.extras.last_error == (
            "nextExecuteAt is ignored: the next occurrence is at 2027-01-16T08:00:00.000Z"
        )

    def test_after_the_last_occurrence_a_receiver_may_ask_for_any_time(self) -> None:
        timer = timer_of(replace(DAILY, repeat=None), FIRST_MS)
        settlement = ended(timer, asks_for(FIRST_MS + 9 * DAY_MS), started_ms=FIRST_MS)
        assert settlement.rearmed is not None
        assert settlement.rearmed.execute_at_ms == FIRST_MS + 9 * DAY_MS
        assert ended(settlement.rearmed, started_ms=FIRST_MS + 9 * DAY_MS).rearmed is None

    def test_fire_now_before_the_occurrence_adds_a_call(self) -> None:
        now_ms = FIRST_MS - HOUR_MS
        timer = called_now(timer_of(DAILY, now_ms), now_ms)
        timer = replace(timer, execute_at_ms=now_ms, scheduled_at_ms=now_ms)
        assert pending(ended(timer, started_ms=now_ms)) == ("2027-01-15T08:00:00.000Z", 1)

    def test_fire_now_of_a_call_that_is_due_is_that_call(self) -> None:
        timer = timer_of(DAILY, FIRST_MS)
        assert called_now(timer, FIRST_MS + 5) == timer
        assert called_now(make_timer("plain"), FIRST_MS) == make_timer("plain")

    def test_a_replay_goes_on_from_now(self) -> None:
        now_ms = FIRST_MS + 40 * DAY_MS - HOUR_MS
        timer = called_again(timer_of(replace(DAILY, catch_up="all"), FIRST_MS), now_ms)
        timer = replace(timer, execute_at_ms=now_ms, scheduled_at_ms=now_ms)
        assert pending(ended(timer, started_ms=now_ms)) == ("2027-02-24T08:00:00.000Z", 2)
        assert called_again(make_timer("plain"), FIRST_MS) == make_timer("plain")

    @pytest.mark.parametrize(
        ("moved_by_ms", "then"),
        [(-HOUR_MS, "2027-01-16T08:00:00.000Z"), (HOUR_MS, "2027-01-16T08:00:00.000Z"), (3 * DAY_MS, "2027-01-19T08")],
    )
    def test_a_moved_occurrence_takes_the_place_of_those_before_its_new_time(self, moved_by_ms: int, then: str) -> None:
        timer = timer_of(DAILY, FIRST_MS - 2 * HOUR_MS)
        at_ms = FIRST_MS + moved_by_ms
        timer = moved(replace(timer, execute_at_ms=at_ms, scheduled_at_ms=at_ms))
        assert missed(timer, NAMESPACE, at_ms) is None
        assert pending(ended(timer, started_ms=at_ms))[0].startswith(then)

    def test_a_call_that_was_moved_too_far_is_moved_back(self) -> None:
        """The occurrences up to the time to which it was moved first were left out all the same, for years."""
        timer = timer_of(DAILY, FIRST_MS - 2 * HOUR_MS)
        for at_ms in (FIRST_MS + 1_000 * DAY_MS, FIRST_MS - HOUR_MS):
            timer = moved(replace(timer, execute_at_ms=at_ms, scheduled_at_ms=at_ms))
        assert pending(ended(timer, started_ms=FIRST_MS - HOUR_MS)) == ("2027-01-16T08:00:00.000Z", 2)


class TestPauses:
    def test_a_pause_keeps_the_timer_as_it_is(self) -> None:
        for timer in (
            timer_of(DAILY, FIRST_MS, attempts=2),
            make_timer("plain"),
            make_timer("x", extras=Extras(later={"k": [1]})),
        ):
            paused = held(timer)
            assert is_held(paused)
            assert paused.execute_at_ms == HELD_MS
            assert held(paused) == paused
            assert not_held(paused) == timer
            assert not_held(timer) == timer

    def test_a_resumed_plain_timer_fires_when_it_was_due(self) -> None:
        plain = make_timer("plain")
        assert resumed(held(plain), NAMESPACE, FIRST_MS) == Settlement(rearmed=plain)

    @pytest.mark.parametrize(
        ("catch_up", "then"),
        [("one", "2027-01-18T08"), ("skip", "2027-01-19T08"), ("all", "2027-01-15T08")],
    )
    def test_a_pause_counts_as_an_outage(self, catch_up: str, then: str) -> None:
        paused = held(timer_of(replace(DAILY, catch_up=catch_up), FIRST_MS))
        settlement = resumed(paused, NAMESPACE, FIRST_MS + 3 * DAY_MS + HOUR_MS)
        assert pending(settlement)[0].startswith(then)
        assert (settlement.reached is None) == (catch_up == "all")
        assert settlement.rearmed is not None
        assert not is_held(settlement.rearmed)

    def test_after_a_short_pause_only_the_latest_is_called_too(self) -> None:
        paused = held(timer_of(Schedule(timezone="UTC", repeat="cron:* * * * * *"), FIRST_MS))
        settlement = resumed(paused, NAMESPACE, FIRST_MS + 2_500)
        assert settlement.rearmed is not None
        assert settlement.rearmed.execute_at_ms == FIRST_MS + 2_000
        assert resumed(paused, NAMESPACE, FIRST_MS + 500).reached is None


class TestStorage:
    def test_the_state_of_a_schedule_survives_its_row(self) -> None:
        schedule = replace(DAILY, exclude=("2027-12-25",), until="2028-01-01", catch_up="all", gap="skip", fold="both")
        extras = timer_of(schedule, FIRST_MS).extras
        assert msgspec.json.decode(msgspec.json.encode(extras), type=Extras) == extras
        paused = held(make_timer("x", extras=Extras(later={"k": 1}))).extras
        assert msgspec.json.decode(msgspec.json.encode(paused), type=Extras) == paused

    def test_case_53_a_version_without_schedules_cannot_decode_the_row(self) -> None:
        class OlderExtras(msgspec.Struct):
            """As of version 0.1."""

            occurrence: int = msgspec.field(default=0, name="o")
            later: dict[str, object] | None = msgspec.field(default=None, name="x")

        for timer in (timer_of(DAILY, FIRST_MS), held(make_timer("plain"))):
            with pytest.raises(msgspec.ValidationError):
                msgspec.json.decode(msgspec.json.encode(timer.extras), type=OlderExtras)
        plain = msgspec.json.encode(Extras(later={"k": 1}))
        assert msgspec.json.decode(plain, type=OlderExtras).later == {"k": 1}

    @pytest.mark.parametrize(
        "stored", ['{"x":[{"timezone":"UTC","calendar":"bank"}]}', '{"x":[null,null,0,0,"","","",null,null,0,1]}']
    )
    def test_what_a_later_version_adds_to_a_schedule_is_not_ignored(self, stored: str) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.json.decode(stored, type=Extras)
        assert msgspec.json.decode('{"x":[null]}', type=Extras).later == ScheduleState()
