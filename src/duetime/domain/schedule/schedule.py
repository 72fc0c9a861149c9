"""Wall-clock schedules: the type, its checks, and its occurrences. Pure.

A schedule is kept as it was written. `check_schedule` refuses what is wrong, with an error that names the field;
`occurrences` are the instants it stands for, in order, each with the local time that was asked for and what became of
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, timedelta
from functools import lru_cache
from heapq import merge

import msgspec
from msgspec import Struct

from duetime.domain.instants import LATEST_MS
from duetime.domain.schedule.cron import parse_cron
from duetime.domain.schedule.days import DAY_S, EPOCH_DAY
from duetime.domain.schedule.resolve import Lane, stretches
from duetime.domain.schedule.rrule import parse_rrule
from duetime.domain.schedule.rule import MonthlyRule, Once, Rule, YearlyRule, local_seconds
from duetime.domain.schedule.steps import Steps, TooManySteps
from duetime.domain.schedule.zones import BLOCK_S, load_zone, offset_s, suggested_zone, zone_names
from duetime.domain.wall_clock import Schedule
from duetime.errors import InvalidField

__all__ = ["EXCLUDED_DATES_MAX", "Occurrence", "Schedule", "check_schedule", "occurrences", "with_start"]

EXCLUDED_DATES_MAX = 1_000
# No local time is further from UTC than this, and no gap or fold is longer than a day.
_OFFSET_MAX_S = 26 * 3_600

_GAPS = ("later", "earlier", "skip")
_FOLDS = ("first", "second", "both")
_FEB29S = ("feb28", "mar1", "leap")
_CATCH_UPS = ("one", "skip", "all")
_PERIODS = ("daily", "weekly", "monthly", "yearly")


class Occurrence(Struct, frozen=True, gc=False):
    """One instant of a schedule. Local times are seconds since 1970-01-01T00:00:00 on the wall clock."""

    instant_ms: int
    asked_s: int
    offset_s: int  # of the zone at the instant
    because: str | None  # why the instant is not simply the asked local time: "feb29", "gap", "fold"
    is_second: bool  # of the two instants of a local time in a fold

    @property
    def asked(self) -> str:
        """The local time that the schedule asks for, which may not exist: `2027-03-14T02:30:00`."""
        return _local_text(self.asked_s)

    @property
    def local(self) -> str:
        """The local time of the instant, with its offset: `2027-03-14T03:30:00-04:00`."""
        minutes, seconds = divmod(abs(self.offset_s), 60)
        offset = f"{'-' if self.offset_s < 0 else '+'}{minutes // 60:02d}:{minutes % 60:02d}"
        return _local_text(self.instant_ms // 1_000 + self.offset_s) + offset + (f":{seconds:02d}" if seconds else "")


def _local_text(local_s: int) -> str:
    return (datetime(1970, 1, 1) + timedelta(seconds=local_s)).isoformat()  # noqa: DTZ001 - a local time


def with_start(schedule: Schedule, now_ms: int) -> Schedule:
    """With `at`: the local time now, if a cron or RFC 5545 rule has none."""
    if schedule.at is not None or not _may_start_now(schedule.repeat):
        return schedule
    now_s = now_ms // 1_000
    _check_zone(schedule.timezone)
    local_s = max(0, now_s + offset_s(load_zone(schedule.timezone), now_s))
    return msgspec.structs.replace(schedule, at=_local_text(local_s))


def check_schedule(schedule: Schedule) -> None:
    """Raises InvalidField, with the path of the wrong field. Looks for the first occurrence."""
    compiled = _compiled(schedule)
    if schedule.repeat is None:
        return
    try:
        if next(_occurrences(compiled, 0, Steps()), None) is None:
            raise _invalid("repeat", "has no occurrence: nothing matches before the end of the schedule")
    except TooManySteps:
        raise _never_matches() from None


def occurrences(schedule: Schedule, from_ms: int, steps: Steps | None = None) -> Iterator[Occurrence]:
    """The occurrences at and after an instant, in order. Raises InvalidField if the search takes too many steps."""
    compiled = _compiled(schedule)
    steps = Steps() if steps is None else steps
    try:
        for occurrence in _occurrences(compiled, -(-max(0, from_ms) // 1_000), steps):
            steps.found()
            yield occurrence
    except TooManySteps:
        if steps.is_total_used:
            raise _invalid("repeat", "takes too long to compute: ask for fewer occurrences") from None
        raise _never_matches() from None


def _never_matches() -> InvalidField:
    return InvalidField(
        "schedule.repeat", "schedule.repeat has no occurrence that a search finds: it never matches, or too rarely"
    )


# --- how instants are found ----------------------------------------------------------------------


class _Compiled(Struct, frozen=True, gc=False):
    timezone: str
    rule: Rule
    gap: str
    fold: str
    excluded: frozenset[int]  # days since 1970
    until_s: int | None  # local
    until_instant_s: int
    moves_feb29: bool

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        """The next local time that is neither excluded nor after the end."""
        while True:
            found = self.rule.next_from(local_s, steps)
            if found is None or (self.until_s is not None and found > self.until_s):
                return None
            if found // DAY_S not in self.excluded:
                return found
            local_s = (found // DAY_S + 1) * DAY_S

    def reason(self, asked_s: int, because: str | None) -> str | None:
        if self.moves_feb29:
            asked = date.fromordinal(asked_s // DAY_S + EPOCH_DAY)
            if (asked.month, asked.day) != (2, 29):
                return "feb29"
        return because


class _Search:
    """Remembers the last answer: it is that of every local time between the question and it."""

    def __init__(self, compiled: _Compiled, steps: Steps) -> None:
        self._compiled, self._steps = compiled, steps
        self._asked_s: int | None = None
        self._found_s: int | None = None

    def next_from(self, local_s: int) -> int | None:
        if self._asked_s is None or local_s < self._asked_s or (self._found_s is not None and local_s > self._found_s):
            self._found_s = self._compiled.next_from(local_s, self._steps)
            self._asked_s = local_s
        return self._found_s


def _occurrences(compiled: _Compiled, from_s: int, steps: Steps) -> Iterator[Occurrence]:
    search = _Search(compiled, steps)
    latest_s = min(LATEST_MS // 1_000 - 1, compiled.until_instant_s)
    while from_s <= latest_s:
        steps.take()
        local_s = search.next_from(from_s - _OFFSET_MAX_S)
        if local_s is None:
            return
        from_s = max(from_s, local_s - _OFFSET_MAX_S)  # nothing is before: years without a time cost nothing
        block = from_s // BLOCK_S
        for stretch in stretches(compiled.timezone, block, compiled.gap, compiled.fold):
            begin_s = max(from_s, stretch.begin_s)
            last_s = -1
            lanes = [_in_lane(search, lane, begin_s, stretch.end_s) for lane in stretch.lanes]
            for instant_s, is_moved, asked_s, lane in merge(*lanes):
                if instant_s > latest_s:
                    return
                if instant_s == last_s:  # moved out of a gap to an instant that the schedule has anyway
                    continue
                last_s = instant_s
                offset = offset_s(load_zone(compiled.timezone), instant_s) if is_moved else lane.offset_s
                yield Occurrence(
                    instant_s * 1_000, asked_s, offset, compiled.reason(asked_s, lane.because), lane.is_second
                )
        from_s = (block + 1) * BLOCK_S


def _in_lane(search: _Search, lane: Lane, begin_s: int, end_s: int) -> Iterator[tuple[int, bool, int, Lane]]:
    local_s: int | None = begin_s + lane.offset_s
    end_local_s = end_s + lane.offset_s
    while local_s is not None and local_s < end_local_s:
        local_s = search.next_from(local_s)
        if local_s is not None and local_s < end_local_s:
            yield local_s - lane.offset_s, lane.because == "gap", local_s, lane
            local_s += 1


# --- checks --------------------------------------------------------------------------------------

_LOCAL = re.compile(r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d))?)?", re.ASCII)
_WITH_OFFSET = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d.*([Zz]|[+-]\d\d:?\d\d)", re.ASCII)
_TEXT_MAX = 64


@lru_cache(maxsize=128)
def _compiled(schedule: Schedule) -> _Compiled:
    """Checks everything but whether there are occurrences: for the next one of a timer that is not searched again."""
    _check_zone(schedule.timezone)
    for name, value, allowed in (
        ("gap", schedule.gap, _GAPS),
        ("fold", schedule.fold, _FOLDS),
        ("feb29", schedule.feb29, _FEB29S),
        ("catchUp", schedule.catch_up, _CATCH_UPS),
    ):
        if value is not None and value not in allowed:
            raise _invalid(name, f"must be one of {', '.join(allowed)}, not {value[:_TEXT_MAX]!r}")
    at_s = None if schedule.at is None else _local(schedule.at, "at", "2027-03-15T09:00")
    if at_s is None and not _may_start_now(schedule.repeat):
        raise _invalid("at", "is required: the local time, as in 2027-03-15T09:00")
    until_s = None if schedule.until is None else _local(schedule.until, "until", "2027-12-31T23:59", is_end=True)
    if until_s is not None and at_s is not None and until_s < at_s:
        raise _invalid("until", "must not be before schedule.at")
    if schedule.feb29 is not None and schedule.repeat != "yearly":
        raise _invalid("feb29", 'is only for schedules that repeat "yearly"')
    rule, until_instant_s = _rule(schedule, at_s or 0)
    finer = rule.is_finer_than_daily
    return _Compiled(
        timezone=schedule.timezone,
        rule=rule,
        gap=schedule.gap or ("skip" if finer else "later"),
        fold=schedule.fold or ("both" if finer else "first"),
        excluded=_excluded(schedule.exclude),
        until_s=until_s,
        until_instant_s=LATEST_MS // 1_000 if until_instant_s is None else until_instant_s,
        moves_feb29=isinstance(rule, YearlyRule) and rule.is_of_29_february,
    )


def _rule(schedule: Schedule, at_s: int) -> tuple[Rule, int | None]:
    repeat = schedule.repeat
    if repeat is None:
        return Once(at_s), None
    if repeat == "monthly":
        return MonthlyRule(at_s), None
    if repeat == "yearly":
        return YearlyRule(at_s, schedule.feb29 or "feb28"), None
    if repeat in ("daily", "weekly"):
        return parse_rrule(f"FREQ={repeat.upper()}", at_s)
    kind, colon, text = repeat.partition(":")
    if colon and kind == "cron":
        try:
            return parse_cron(text, at_s), None
        except ValueError as error:
            raise _invalid("repeat", f"is not valid: the cron expression {error}") from None
    if colon and kind == "rrule":
        try:
            return parse_rrule(text, at_s)
        except ValueError as error:
            raise _invalid("repeat", f"is not valid: the rule {error}") from None
    raise _invalid(
        "repeat",
        f"must be one of {', '.join(_PERIODS)}, cron:<expression> or rrule:<RFC 5545 rule>, not {repeat[:_TEXT_MAX]!r}",
    )


def _may_start_now(repeat: str | None) -> bool:
    return repeat is not None and repeat.startswith(("cron:", "rrule:"))


def _check_zone(name: str) -> None:
    if name not in zone_names():
        suggestion = suggested_zone(name)
        hint = f": did you mean {suggestion}?" if suggestion else ", such as America/New_York"
        raise _invalid("timezone", f"must be the name of an IANA time zone, not {name[:_TEXT_MAX]!r}{hint}")


def _local(text: str, name: str, example: str, *, is_end: bool = False) -> int:
    match = _LOCAL.fullmatch(text) if len(text) <= _TEXT_MAX else None
    if match is None:
        if len(text) <= _TEXT_MAX and _WITH_OFFSET.fullmatch(text):
            raise _invalid(name, f"must be a local time without offset, as in {example}: the zone gives the offset")
        raise _invalid(name, f"must be a local time such as {example}")
    year, month, day, hour, minute, second = match.groups()
    if hour is None and not is_end:
        raise _invalid(name, f"needs a time of day, as in {example}")
    if hour is not None and (hour > "23" or minute > "59" or (second or "0") > "59"):
        raise _invalid(name, "must have a time of day from 00:00:00 to 23:59:59")
    if not "1970" <= year <= "9998":
        raise _invalid(name, "must be in a year from 1970 to 9998")
    try:
        at = date(int(year), int(month), int(day))
    except ValueError:
        raise _invalid(name, "must have a day that exists") from None
    if hour is None:  # a date is the end of its day
        return local_seconds(at, DAY_S - 1)
    return local_seconds(at, int(hour) * 3_600 + int(minute) * 60 + int(second or 0))


def _excluded(dates: tuple[str, ...]) -> frozenset[int]:
    if len(dates) > EXCLUDED_DATES_MAX:
        raise _invalid("exclude", f"must have at most {EXCLUDED_DATES_MAX:,} dates")
    days = set()
    for text in dates:
        try:
            # There may be a thousand: only forms that `fromisoformat` also reads (20271225, 2027-W51-6) are checked.
            if len(text) != 10 or text[7] != "-":
                raise ValueError
            days.add(date.fromisoformat(text).toordinal() - EPOCH_DAY)
        except ValueError:
            raise _invalid("exclude", f"must have local dates such as 2027-12-25, not {text[:_TEXT_MAX]!r}") from None
    return frozenset(days)


def _invalid(name: str, detail: str) -> InvalidField:
    return InvalidField(f"schedule.{name}", f"schedule.{name} {detail}")
