"""Recurrence rules of RFC 5545 ("FREQ=MONTHLY;BYDAY=-1FR"). Pure.

dateutil's rrule is not used: it looks at every period from the start of the rule, and at every day up to the year 9999
if nothing matches, without a limit. It judges this module in the tests instead.
"""

from __future__ import annotations

import re
from datetime import date

from duetime.domain.schedule.days import DAY_S, EPOCH_DAY, Days
from duetime.domain.schedule.rule import Frequency, TimesRule, local_seconds
from duetime.domain.schedule.steps import Steps, TooManySteps

__all__ = ["RRULE_LENGTH_MAX", "parse_rrule"]

RRULE_LENGTH_MAX = 1_024
_INTERVAL_MAX = 1_000_000
_COUNT_MAX = 1_000_000_000
_COUNT_STEPS_MAX = 1_000  # for each year, or with INTERVAL or BYSETPOS one to three for each day with a time
_TIMES_OF_DAY_MAX = 288  # every five minutes; a rule is read each time it is used
_WEEKDAYS = ("MO", "TU", "WE", "TH", "FR", "SA", "SU")
_NAMES = (
    "FREQ", "INTERVAL", "COUNT", "UNTIL", "BYSECOND", "BYMINUTE", "BYHOUR", "BYDAY", "BYMONTHDAY", "BYYEARDAY",
    "BYWEEKNO", "BYMONTH", "BYSETPOS", "WKST",
)  # fmt: skip
_BYDAY = re.compile(r"([+-]?\d{1,2})?(MO|TU|WE|TH|FR|SA|SU)", re.ASCII)
_NUMBER = re.compile(r"[+-]?\d{1,9}", re.ASCII)
_UNTIL = re.compile(r"(\d{4})(\d\d)(\d\d)(?:T(\d\d)(\d\d)(\d\d)(Z?))?", re.ASCII)


def parse_rrule(text: str, start_s: int) -> tuple[TimesRule, int | None]:
    """The rule, and the last instant (UTC, in seconds) if UNTIL is given in UTC. Raises a ValueError whose text
    continues after "the rule"."""
    parts = _parts(text)
    frequency = _frequency(parts)
    if "COUNT" in parts and "UNTIL" in parts:
        raise ValueError("must not have both COUNT and UNTIL")
    start = date.fromordinal(start_s // DAY_S + EPOCH_DAY)
    second_of_day = start_s % DAY_S
    hours = _numbers(parts, "BYHOUR", 0, 23)
    minutes = _numbers(parts, "BYMINUTE", 0, 59)
    seconds = _numbers(parts, "BYSECOND", 0, 59)
    # A part finer than the frequency that is not given is that of the start; a coarser one does not restrict.
    if not hours:
        hours = (second_of_day // 3_600,) if frequency <= Frequency.DAILY else tuple(range(24))
    if not minutes:
        minutes = (second_of_day // 60 % 60,) if frequency <= Frequency.HOURLY else tuple(range(60))
    if not seconds:
        seconds = (second_of_day % 60,) if frequency <= Frequency.MINUTELY else tuple(range(60))
    if frequency <= Frequency.DAILY and len(hours) * len(minutes) * len(seconds) > _TIMES_OF_DAY_MAX:
        raise ValueError(f"must have at most {_TIMES_OF_DAY_MAX:,} times of day: use FREQ=MINUTELY or FREQ=SECONDLY")
    week_start = _week_start(parts)
    rule = TimesRule(
        frequency,
        start_s,
        _days(parts, frequency, start, week_start),
        hours=hours,
        minutes=minutes,
        seconds=seconds,
        interval=_number(parts, "INTERVAL", 1, _INTERVAL_MAX) or 1,
        positions=_positions(parts),
        week_start=week_start,
    )
    count = _number(parts, "COUNT", 1, _COUNT_MAX)
    if count is not None:
        try:
            rule.end_after(count, Steps(_COUNT_STEPS_MAX))
        except TooManySteps:
            raise ValueError("has a COUNT that takes too long to count: give a smaller one, or `until`") from None
    return rule, _apply_until(parts, rule)


def _parts(text: str) -> dict[str, str]:
    if len(text) > RRULE_LENGTH_MAX:
        raise ValueError(f"must have at most {RRULE_LENGTH_MAX:,} characters")
    if not text.isascii():
        raise ValueError("must be ASCII")
    parts: dict[str, str] = {}
    for part in text.upper().strip().removesuffix(";").split(";"):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if name not in _NAMES:
            if name.startswith(("DTSTART", "RRULE", "EXDATE", "RDATE", "EXRULE")):
                raise ValueError("must be the value of an RRULE only, as in FREQ=WEEKLY;BYDAY=MO: the start is `at`")
            raise ValueError(f"has no part {name[:20]!r}: its parts are {', '.join(_NAMES)}")
        if not equals or not value:
            raise ValueError(f"needs a value for {name}, as in FREQ=WEEKLY;BYDAY=MO,FR")
        if name in parts:
            raise ValueError(f"must have {name} only once")
        parts[name] = value
    return parts


def _frequency(parts: dict[str, str]) -> Frequency:
    names = ", ".join(Frequency.__members__)
    if "FREQ" not in parts:
        raise ValueError(f"must have FREQ, one of {names}")
    if parts["FREQ"] not in Frequency.__members__:
        raise ValueError(f"must have as FREQ one of {names}")
    return Frequency[parts["FREQ"]]


def _numbers(parts: dict[str, str], name: str, least: int, most: int, *, signed: bool = False) -> tuple[int, ...]:
    """The sorted numbers of a list; empty if it is not given."""
    if name not in parts:
        return ()
    numbers = set()
    for item in parts[name].split(","):
        number = int(item) if _NUMBER.fullmatch(item.strip()) else None
        if number is None or not least <= (abs(number) if signed else number) <= most:
            either = f"{least} to {most}, or -{most} to -{least}" if signed else f"{least} to {most}"
            raise ValueError(f"must have in {name} numbers from {either}")
        numbers.add(number)
    return tuple(sorted(numbers))


def _number(parts: dict[str, str], name: str, least: int, most: int) -> int | None:
    if name not in parts:
        return None
    if not parts[name].isdigit() or len(parts[name]) > 12 or not least <= int(parts[name]) <= most:
        raise ValueError(f"must have as {name} a number from {least} to {most:,}")
    return int(parts[name])


def _week_start(parts: dict[str, str]) -> int:
    wanted = parts.get("WKST", "MO")
    if wanted not in _WEEKDAYS:
        raise ValueError(f"must have as WKST one of {', '.join(_WEEKDAYS)}")
    return _WEEKDAYS.index(wanted)


def _positions(parts: dict[str, str]) -> tuple[int, ...]:
    positions = _numbers(parts, "BYSETPOS", 1, 366, signed=True)
    if positions and not any(name.startswith("BY") and name != "BYSETPOS" for name in parts):
        raise ValueError("must have another BY part beside BYSETPOS")
    return positions


def _days(parts: dict[str, str], frequency: Frequency, start: date, week_start: int) -> Days:
    months = _numbers(parts, "BYMONTH", 1, 12)
    monthdays = _numbers(parts, "BYMONTHDAY", 1, 31, signed=True)
    yeardays = _numbers(parts, "BYYEARDAY", 1, 366, signed=True)
    weeks = _numbers(parts, "BYWEEKNO", 1, 53, signed=True)
    weekdays, nth_weekdays = _weekdays(parts)
    if monthdays and frequency == Frequency.WEEKLY:
        raise ValueError("must not have BYMONTHDAY with FREQ=WEEKLY")
    if yeardays and frequency in (Frequency.DAILY, Frequency.WEEKLY, Frequency.MONTHLY):
        raise ValueError(f"must not have BYYEARDAY with FREQ={frequency.name}")
    if weeks and frequency != Frequency.YEARLY:
        raise ValueError("must have BYWEEKNO only with FREQ=YEARLY")
    if nth_weekdays and (frequency > Frequency.MONTHLY or weeks):
        raise ValueError("must have numbers in BYDAY only with FREQ=MONTHLY or FREQ=YEARLY, and without BYWEEKNO")
    if not (weeks or yeardays or monthdays or weekdays or nth_weekdays):
        if frequency == Frequency.YEARLY:
            months, monthdays = months or (start.month,), (start.day,)
        elif frequency == Frequency.MONTHLY:
            monthdays = (start.day,)
        elif frequency == Frequency.WEEKLY:
            weekdays = (start.weekday(),)
    return Days(
        months=months,
        monthdays=monthdays,
        yeardays=yeardays,
        weeks=weeks,
        week_start=week_start if weeks else 0,
        weekdays=weekdays,
        nth_weekdays=nth_weekdays,
        nth_in_year=frequency == Frequency.YEARLY and not months,
    )


def _weekdays(parts: dict[str, str]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    plain: set[int] = set()
    nth: set[tuple[int, int]] = set()
    for item in parts["BYDAY"].split(",") if "BYDAY" in parts else ():
        match = _BYDAY.fullmatch(item.strip())
        if match is None or (match[1] is not None and not 1 <= abs(int(match[1])) <= 53):
            raise ValueError("must have in BYDAY days such as MO, or as 2TU and -1FR: the second and the last")
        weekday = _WEEKDAYS.index(match[2])
        if match[1] is None:
            plain.add(weekday)
        else:
            nth.add((weekday, int(match[1])))
    return tuple(sorted(plain)), tuple(sorted(nth))


def _apply_until(parts: dict[str, str], rule: TimesRule) -> int | None:
    if "UNTIL" not in parts:
        return None
    match = _UNTIL.fullmatch(parts["UNTIL"])
    try:
        if match is None:
            raise ValueError
        day = date(int(match[1]), int(match[2]), int(match[3]))
        hour, minute, second = (int(part or 0) for part in match.group(4, 5, 6))
        if hour > 23 or minute > 59 or second > 59:
            raise ValueError
    except ValueError:
        raise ValueError("must have as UNTIL a date or time: 20271231, 20271231T090000 or 20271231T090000Z") from None
    if match[4] is None:
        rule.end_at(local_seconds(day, DAY_S - 1))
    elif match[7]:
        return local_seconds(day, hour * 3_600 + minute * 60 + second)
    else:
        rule.end_at(local_seconds(day, hour * 3_600 + minute * 60 + second))
    return None
