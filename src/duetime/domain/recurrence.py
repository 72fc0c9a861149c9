"""Timers with a schedule: their first occurrence, the next one when one has ended, and pauses. Pure.

The next occurrence follows from the schedule and the instant of the one before it, never from the time of a delivery.
"""

from __future__ import annotations

from msgspec.structs import replace

from duetime.domain.schedule import (
    SEARCH_STEPS_MAX,
    TZDATA_VERSION,
    Occurrence,
    Steps,
    check_schedule,
    occurrences,
    with_start,
)
from duetime.domain.timer import Extras, Timer
from duetime.domain.wall_clock import HELD_MS, Schedule, ScheduleState
from duetime.errors import InvalidField

__all__ = [
    "CAUGHT_UP_MAX",
    "LATE_MS",
    "SKIPPED_IF_LATE_BY_MS",
    "at_occurrence",
    "called_again",
    "called_now",
    "first_occurrence",
    "following",
    "held",
    "is_held",
    "moved",
    "next_instant_ms",
    "not_held",
    "position_of",
    "rescheduled",
    "schedule_of",
    "state_of",
    "with_state",
]

CAUGHT_UP_MAX = 1_000  # occurrences in a row that `catchUp: all` makes up for; then it goes on with the latest one
# A pending occurrence gives way to one that has passed after it only if it is late by more: a call that is late by the
# time of a commit is made, even if occurrences follow each other every second.
LATE_MS = 5_000
SKIPPED_IF_LATE_BY_MS = 60_000  # `catchUp: skip` skips an occurrence that is late by more


def state_of(timer: Timer) -> ScheduleState | None:
    later = timer.extras.later
    return later if isinstance(later, ScheduleState) else None


def position_of(timer: Timer) -> ScheduleState | None:
    """The state from which the next occurrence follows: it is after the pending one, and after the time to which the
    pending call was moved."""
    state = state_of(timer)
    if state is None or not state.after_ms < timer.scheduled_at_ms < HELD_MS:
        return state
    return replace(state, after_ms=timer.scheduled_at_ms)


def schedule_of(timer: Timer) -> Schedule | None:
    state = state_of(timer)
    return None if state is None else state.schedule


def with_state(timer: Timer, state: ScheduleState | None) -> Timer:
    return replace(timer, extras=replace(timer.extras, later=state))


def first_occurrence(schedule: Schedule, now_ms: int) -> tuple[ScheduleState, int]:
    """The state of a new timer, and when it is due. A schedule that repeats begins with the first occurrence from now
    on; a single time in the past is due at once. Raises InvalidField, with the path of the wrong field."""
    started = with_start(schedule, now_ms)
    check_schedule(started)
    first = next(occurrences(started, 0 if schedule.repeat is None else now_ms), None)
    if first is None and schedule.repeat is None:
        raise InvalidField("schedule.at", "schedule.at does not exist in its zone on this day, and `gap` is `skip`")
    if first is None:
        field = "schedule.repeat" if schedule.until is None else "schedule.until"
        raise InvalidField(field, f"{field} leaves no occurrence: the last one has passed")
    state = ScheduleState(schedule, None if schedule.at is not None else started.at)
    return at_occurrence(state, first, now_ms), first.instant_ms


def at_occurrence(state: ScheduleState, occurrence: Occurrence, now_ms: int) -> ScheduleState:
    """This occurrence is pending from now on."""
    is_late = occurrence.instant_ms <= now_ms and state.late < CAUGHT_UP_MAX
    return replace(
        state,
        after_ms=occurrence.instant_ms,
        number=state.number + 1,
        tzdata=TZDATA_VERSION,
        asked=occurrence.asked,
        local=occurrence.local,
        late=state.late + 1 if is_late else 0,
    )


def next_instant_ms(state: ScheduleState) -> int | None:
    """The instant of the next occurrence, whether it has passed or not. None: the schedule ends. Raises InvalidField if
    it cannot be computed: a zone may be unknown to this version's time-zone rules."""
    if state.schedule is None:
        return None
    following_one = _first_after(_started(state, state.schedule), state.after_ms)
    return None if following_one is None else following_one.instant_ms


def following(state: ScheduleState, now_ms: int) -> Occurrence | None:
    """The occurrence to schedule when one has ended. `catchUp` decides if some have passed meanwhile. None: the
    schedule ends. Raises InvalidField as `next_instant_ms`."""
    if state.schedule is None:
        return None
    schedule = _started(state, state.schedule)
    first = _first_after(schedule, state.after_ms)
    if first is None or first.instant_ms > now_ms:
        return first
    if schedule.catch_up == "all" and state.late < CAUGHT_UP_MAX:
        return first
    latest = _latest(schedule, first, now_ms)
    if schedule.catch_up == "skip" and now_ms - latest.instant_ms > SKIPPED_IF_LATE_BY_MS:
        return _first_after(schedule, now_ms)
    return latest


def _started(state: ScheduleState, schedule: Schedule) -> Schedule:
    return schedule if state.start is None else replace(schedule, at=state.start)


def _first_after(schedule: Schedule, instant_ms: int) -> Occurrence | None:
    return next(occurrences(schedule, instant_ms + 1), None)


def _latest(schedule: Schedule, first: Occurrence, until_ms: int) -> Occurrence:
    """The last occurrence up to this time, of which `first` is one; an earlier one if the search takes too long (the
    last is found when that one has ended). Occurrences are found forwards only, and there may be thousands: the search
    begins near the end, and then halves what is left."""
    steps = Steps(total=SEARCH_STEPS_MAX)

    def first_from(instant_ms: int) -> Occurrence | None:
        found = next(occurrences(schedule, instant_ms, steps), None)
        return None if found is None or found.instant_ms > until_ms else found

    latest, end_ms, span_ms = first, until_ms, 4_000
    try:
        while until_ms - span_ms > first.instant_ms:
            found = first_from(until_ms - span_ms)
            if found is not None:
                latest = found
                break
            end_ms = until_ms - span_ms
            span_ms *= 16
        while (found := first_from(latest.instant_ms + 1)) is not None:
            latest = found
            middle_ms = (latest.instant_ms + end_ms) // 2
            found = first_from(middle_ms + 1)
            if found is None:
                end_ms = middle_ms
            else:
                latest = found
    except InvalidField:
        pass
    return latest


# --- changes of a timer --------------------------------------------------------------------------


def moved(timer: Timer) -> Timer:
    """An update with a new time moves the pending call only. Occurrences up to the new time are left out, so that the
    call is still the only one that is pending (`position_of`); `after_ms` stays, for the call may be moved again."""
    state = state_of(timer)
    if state is None or state.schedule is None:
        return timer
    return with_state(timer, replace(state, asked="", local=""))


def rescheduled(timer: Timer, first: tuple[ScheduleState, int] | None) -> Timer:
    """With another schedule, whose first occurrence takes the place of the pending one; or without one: the pending
    call is the last."""
    old = state_of(timer)
    later = old.later if old is not None else timer.extras.later
    if first is None:
        return timer if old is None else replace(timer, extras=replace(timer.extras, later=later))
    state, at_ms = first
    if old is not None:  # the numbers of its occurrences go on
        state = replace(state, number=max(old.number, 1))
    if isinstance(later, dict):
        state = replace(state, later=later)
    return replace(
        timer,
        execute_at_ms=at_ms,
        scheduled_at_ms=at_ms,
        attempts=0,
        extras=replace(timer.extras.asked_for(), later=state),
    )


def called_now(timer: Timer, now_ms: int) -> Timer:
    """`fireNow`: a call in addition, after which the schedule goes on. If the pending call is due already, or is no
    occurrence, it is this one that is made now."""
    state = state_of(timer)
    if state is None or state.schedule is None or state.after_ms <= now_ms:
        return timer
    number = state.number - (state.asked != "")
    return with_state(timer, replace(state, after_ms=now_ms, number=number, asked="", local=""))


def called_again(timer: Timer, now_ms: int) -> Timer:
    """`replay` of a timer that is over: a call in addition, after which the schedule goes on from now."""
    state = state_of(timer)
    if state is None or state.schedule is None:
        return timer
    return with_state(timer, replace(state, after_ms=now_ms, asked="", local=""))


def is_held(timer: Timer) -> bool:
    state = state_of(timer)
    return state is not None and state.held_ms is not None


def held(timer: Timer) -> Timer:
    """The timer, paused."""
    later = timer.extras.later
    state = later if isinstance(later, ScheduleState) else ScheduleState(later=later)
    if state.held_ms is not None:
        return timer
    return replace(with_state(timer, replace(state, held_ms=timer.execute_at_ms)), execute_at_ms=HELD_MS)


def not_held(timer: Timer) -> Timer:
    """The timer as it was when it was paused."""
    state = state_of(timer)
    if state is None or state.held_ms is None:
        return timer
    later = state.later if state.schedule is None else replace(state, held_ms=None)
    extras: Extras = replace(timer.extras, later=later)
    return replace(timer, execute_at_ms=state.held_ms, extras=extras)
