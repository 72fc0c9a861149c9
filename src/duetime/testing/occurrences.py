"""Checks the occurrences of timers with a schedule: what was recorded of each, and the callbacks that receivers saw.

A `Series` is a timer with a schedule that nobody changes after it was created. Its occurrences are computed here by
arithmetic, not by the code under test.

    T  each occurrence has exactly one reached row, and at least one call (none if it was skipped); none is called
       early; none is lost; while one is pending there is no other
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct

from duetime.domain.instants import format_instant
from duetime.domain.recurrence import SKIPPED_IF_LATE_BY_MS
from duetime.domain.timer import Outcome
from duetime.testing.checker import Callback, Fault, Violation

__all__ = ["EndedOccurrence", "Pause", "PauseRequest", "Series", "find_occurrence_violations", "paused_in_flight"]


class Series(Struct, frozen=True):
    """A timer whose schedule is due at `first_ms` and every `period_ms`, up to and with `last_ms`."""

    timer: str
    first_ms: int
    period_ms: int
    last_ms: int
    catch_up: str
    created_ms: int  # when its create was acknowledged; 0: its outcome is unknown

    def next_ms(self, after_ms: int) -> int | None:
        """The first occurrence after this time."""
        passed = max(0, (after_ms - self.first_ms) // self.period_ms + 1)
        at_ms = self.first_ms + passed * self.period_ms
        return at_ms if at_ms <= self.last_ms else None


class EndedOccurrence(Struct, frozen=True):
    """A reached row of a timer with a schedule, in the order they were stored."""

    timer: str
    delivery: str
    scheduled_ms: int
    is_extra: bool  # a call in addition to the schedule
    outcome: Outcome
    attempts: int
    reached_ms: int  # when it ended, by the clock of the instance that recorded it


class Pause(Struct, frozen=True):
    """No call starts from the acknowledgement of a pause until a request is sent that may end it."""

    timer: str
    acknowledged_ms: int
    until_ms: int


class PauseRequest(Struct, frozen=True):
    """A pause that was acknowledged, or whose outcome is unknown. The result of a call in flight is not recorded if the
    call takes longer than the pause waits for it: after the pause it is made again, with the same id."""

    timer: str
    sent_ms: int
    answered_ms: int


def paused_in_flight(requests: Iterable[PauseRequest], callbacks: Iterable[Callback]) -> list[Fault]:
    """What allows to repeat these deliveries."""
    asked: dict[str, list[PauseRequest]] = defaultdict(list)
    for request in requests:
        asked[request.timer].append(request)
    return [
        Fault("paused in flight", request.sent_ms, request.answered_ms, delivery=call.delivery)
        for call in callbacks
        for request in asked.get(call.timer, ())
        if request.sent_ms <= (call.recorded_at_ms or request.sent_ms) and call.started_at_ms <= request.answered_ms
    ]


def find_occurrence_violations(
    series: Iterable[Series],
    ended: Iterable[EndedOccurrence],
    pauses: Iterable[Pause],
    callbacks: Sequence[Callback],
    *,
    clock_error_ms: int,
) -> list[Violation]:
    rows: dict[str, list[EndedOccurrence]] = defaultdict(list)
    calls: dict[str, list[Callback]] = defaultdict(list)
    for row in ended:
        rows[row.timer].append(row)
    for call in callbacks:
        calls[call.timer].append(call)
    found = [(timer, what) for timer in sorted(rows) for what in _wrong_rows(rows[timer], calls[timer], clock_error_ms)]
    for each in series:
        found += [
            (each.timer, what) for what in _wrong_series(each, rows[each.timer], calls[each.timer], clock_error_ms)
        ]
    for pause in pauses:
        found += [
            (
                pause.timer,
                f"paused at {_text(pause.acknowledged_ms)}, and a call started at {_text(call.started_at_ms)}",
            )
            for call in calls[pause.timer]
            if pause.acknowledged_ms < call.started_at_ms < pause.until_ms
        ]
    return [Violation("T", timer, what, _history(rows[timer], calls[timer])) for timer, what in found]


def _wrong_rows(rows: Sequence[EndedOccurrence], calls: Sequence[Callback], error_ms: int) -> Iterator[str]:
    accepted = {call.delivery for call in calls if call.accepted_at_ms}
    seen: set[str] = set()
    for row in rows:
        if row.delivery in seen:
            yield f"the occurrence of {_text(row.scheduled_ms)} has two reached rows"
        seen.add(row.delivery)
        if row.outcome is Outcome.DELIVERED and row.delivery not in accepted:
            yield f"the occurrence of {_text(row.scheduled_ms)} is recorded as delivered, and no receiver accepted it"
        if row.outcome is Outcome.FAILED and not row.attempts:
            yield f"the occurrence of {_text(row.scheduled_ms)} failed without an attempt"


def _wrong_series(
    series: Series, rows: Sequence[EndedOccurrence], calls: Sequence[Callback], error_ms: int
) -> Iterator[str]:
    for call in calls:
        if call.seen_at_ms < call.scheduled_ms - error_ms:
            yield f"the occurrence of {_text(call.scheduled_ms)} was called at {_text(call.seen_at_ms)}"
    deliveries: dict[int, set[str]] = defaultdict(set)
    for call in calls:
        deliveries[call.scheduled_ms].add(call.delivery)
    extras = {row.scheduled_ms for row in rows if row.is_extra}
    for scheduled_ms, ids in deliveries.items():
        if len(ids) > 1 and scheduled_ms not in extras:
            yield f"the occurrence of {_text(scheduled_ms)} was called under {len(ids)} ids"
    if not rows:
        if series.created_ms:
            yield "it was created, and no occurrence is recorded"
        return
    before_ms, ended_ms = rows[0].scheduled_ms - 1, 0
    if rows[0].scheduled_ms != series.next_ms(before_ms):
        yield f"{_text(rows[0].scheduled_ms)} is no occurrence"
    latest_ms = series.next_ms(series.created_ms + error_ms)
    if series.created_ms and latest_ms is not None and rows[0].scheduled_ms > latest_ms:
        yield f"it was created at {_text(series.created_ms)}, and the first occurrence is {_text(rows[0].scheduled_ms)}"
    for row in rows:
        if row.is_extra:
            ended_ms = row.reached_ms
            continue
        next_ms = series.next_ms(before_ms)
        if row.scheduled_ms != next_ms and not _may_follow(series, row.scheduled_ms, next_ms, ended_ms + error_ms):
            yield (
                f"the occurrence of {_text(row.scheduled_ms)} followed that of {_text(before_ms)}, which ended at "
                f"{_text(ended_ms)}"
            )
        if row.outcome is Outcome.SKIPPED and series.catch_up == "all":
            yield f"the occurrence of {_text(row.scheduled_ms)} was skipped"
        before_ms, ended_ms = row.scheduled_ms, row.reached_ms
    next_ms = series.next_ms(before_ms)
    if next_ms is not None and not _may_end(series, ended_ms + error_ms):
        yield f"no occurrence is recorded after that of {_text(before_ms)}"


def _may_follow(series: Series, at_ms: int, next_ms: int | None, ended_ms: int) -> bool:
    """After an end at `ended_ms`, occurrences that had passed may be left out: but for the latest, or with `skip` all
    that were late by more than it allows."""
    if next_ms is None or at_ms < next_ms or series.catch_up == "all" or series.next_ms(at_ms - 1) != at_ms:
        return False
    is_next = series.catch_up == "skip" and series.next_ms(ended_ms) in (at_ms, at_ms + series.period_ms)
    return at_ms <= ended_ms or is_next


def _may_end(series: Series, ended_ms: int) -> bool:
    """May all occurrences that are left have been skipped?"""
    return series.catch_up == "skip" and ended_ms - series.last_ms > SKIPPED_IF_LATE_BY_MS


def _text(milliseconds: int) -> str:
    return format_instant(milliseconds)[11:23]


def _history(rows: Sequence[EndedOccurrence], calls: Sequence[Callback]) -> str:
    lines = [
        (row.reached_ms, f"{_text(row.reached_ms)}  {row.outcome} {_text(row.scheduled_ms)} {row.delivery}")
        for row in rows
    ]
    lines += [
        (
            call.started_at_ms,
            f"{_text(call.started_at_ms)}  called {_text(call.scheduled_ms)} {call.delivery} {call.owner}",
        )
        for call in calls
    ]
    return "\n".join("    " + text for _, text in sorted(lines))
