"""The days that a rule names, as one bit for each day of a year. Pure.

A search that looks at each day takes seconds for a rule that never matches. There are only 14 calendars of a year (28
where weeks are numbered), so the days of a rule are computed once for each, and a year costs one look.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from functools import cache, lru_cache
from typing import NamedTuple

from msgspec import Struct

__all__ = ["DAY_S", "EPOCH_DAY", "LAST_DAY", "Days", "bits_of"]

DAY_S = 86_400
EPOCH_DAY = date(1970, 1, 1).toordinal()
LAST_DAY = date(9998, 12, 31).toordinal()  # timers end with the year 9998


class _Calendar(NamedTuple):
    """One of the 14 calendars: masks in which bit 0 is 1 January."""

    length: int
    months: tuple[int, ...]  # by month; 0 is not used
    weekdays: tuple[int, ...]  # Monday is 0
    monthdays: dict[int, int]  # by day of the month; -1 is the last one


@cache
def _calendar(first_weekday: int, is_leap: bool) -> _Calendar:
    lengths = (31, 29 if is_leap else 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
    length = sum(lengths)
    months = [0]
    monthdays = dict.fromkeys((*range(-31, 0), *range(1, 32)), 0)
    start = 0
    for days in lengths:
        months.append(((1 << days) - 1) << start)
        for day in range(days):
            monthdays[day + 1] |= 1 << (start + day)
            monthdays[day - days] |= 1 << (start + day)
        start += days
    weekdays = [0] * 7
    for day in range(length):
        weekdays[(first_weekday + day) % 7] |= 1 << day
    return _Calendar(length, tuple(months), tuple(weekdays), monthdays)


class Days(Struct, frozen=True, kw_only=True):
    """Which days a rule names. What is empty does not restrict; everything given must hold."""

    months: tuple[int, ...] = ()
    monthdays: tuple[int, ...] = ()  # negative: from the end of the month
    last_workday: bool = False  # also the last Monday to Friday of the month, beside `monthdays`
    yeardays: tuple[int, ...] = ()  # negative: from the end of the year
    weeks: tuple[int, ...] = ()  # negative: from the end of the year
    week_start: int = 0  # the first day of a week; Monday is 0
    weekdays: tuple[int, ...] = ()
    nth_weekdays: tuple[tuple[int, int], ...] = ()  # (weekday, n); negative: from the end
    nth_in_year: bool = False  # n counts in the year, not in the month
    either: bool = False  # as cron: a day of the month or a day of the week is enough

    def in_year(self, year: int) -> int:
        """The mask of a year."""
        first_weekday = date(year, 1, 1).weekday()
        return _mask(self, first_weekday, _is_leap(year), _is_leap(year - 1) if self.weeks else False)


def _is_leap(year: int) -> bool:
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


@lru_cache(maxsize=8_192)
def _mask(days: Days, first_weekday: int, is_leap: bool, previous_is_leap: bool) -> int:
    calendar = _calendar(first_weekday, is_leap)
    mask = _either_of(calendar.months[month] for month in days.months) if days.months else (1 << calendar.length) - 1
    restrictions: list[int] = []
    if days.monthdays or days.last_workday:
        of_month = _either_of(calendar.monthdays[day] for day in days.monthdays)
        restrictions.append(of_month | (_last_workdays(calendar) if days.last_workday else 0))
    if days.weekdays or days.nth_weekdays:
        of_week = _either_of(calendar.weekdays[day] for day in days.weekdays)
        spans = ((1 << calendar.length) - 1,) if days.nth_in_year else calendar.months[1:]
        for weekday, n in days.nth_weekdays:
            of_week |= _either_of(_nth_bit(calendar.weekdays[weekday] & span, n) for span in spans)
        restrictions.append(of_week)
    if days.either and len(restrictions) == 2:
        mask &= restrictions[0] | restrictions[1]
    else:
        for restriction in restrictions:
            mask &= restriction
    if days.yeardays:
        in_year = (day - 1 if day > 0 else calendar.length + day for day in days.yeardays)
        mask &= _either_of(1 << day for day in in_year if 0 <= day < calendar.length)
    if days.weeks:
        mask &= _in_weeks(days, calendar.length, first_weekday, previous_is_leap)
    return mask


def _either_of(masks: Iterable[int]) -> int:
    combined = 0
    for mask in masks:
        combined |= mask
    return combined


def _last_workdays(calendar: _Calendar) -> int:
    workdays = _either_of(calendar.weekdays[:5])
    return _either_of(_nth_bit(month & workdays, -1) for month in calendar.months[1:])


def _in_weeks(days: Days, length: int, first_weekday: int, previous_is_leap: bool) -> int:
    """Week 1 is the first with at least four days in the year, so the first days of a year may be in the last week of
    the year before, and its last days in week 1 of the year after."""
    first = (days.week_start - first_weekday) % 7  # the first day that begins a week
    if first >= 4:
        first -= 7  # its week has four days or more in this year: it is week 1
    count = _week_count(first, length)
    previous_length = 366 if previous_is_leap else 365
    previous_first = (first + previous_length) % 7  # as `first`, of the year before
    if previous_first >= 4:
        previous_first -= 7
    previous_count = _week_count(previous_first, previous_length)
    weeks = {week if week > 0 else count + 1 + week for week in days.weeks}
    mask = 0
    for week in weeks:
        if 1 <= week <= count:
            begin = first + 7 * (week - 1)
            mask |= 0x7F << begin if begin >= 0 else 0x7F >> -begin
    mask &= (1 << length) - 1
    if first > 0 and (previous_count in days.weeks or -1 in days.weeks):
        mask |= (1 << first) - 1
    after = first + 7 * count
    if after < length and 1 in days.weeks:
        mask |= ((1 << length - after) - 1) << after
    return mask


def _week_count(first: int, length: int) -> int:
    """The number of weeks with at least four days in the year."""
    return (length - first + 3) // 7


def bits_of(mask: int) -> list[int]:
    """The positions of the bits that are set, ascending."""
    positions = []
    while mask:
        lowest = mask & -mask
        positions.append(lowest.bit_length() - 1)
        mask ^= lowest
    return positions


def _nth_bit(mask: int, n: int) -> int:
    """The n-th bit that is set, alone; from the highest if n is negative; 0 if there are fewer."""
    if n < 0:
        n += mask.bit_count() + 1
        if n < 1:
            return 0
    for _ in range(n - 1):
        mask &= mask - 1
    return mask & -mask
