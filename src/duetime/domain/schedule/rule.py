"""Recurrence in local time: the next local time of a rule, whatever the zone. Pure.

Local times are whole seconds since 1970-01-01T00:00:00 on the wall clock. Every rule (daily to yearly, cron, RFC 5545)
answers one question, `next_from`, and each answer takes a limited number of steps.
"""

from __future__ import annotations

from bisect import bisect_left
from calendar import monthrange
from datetime import date
from enum import IntEnum
from functools import lru_cache
from typing import Protocol

from duetime.domain.schedule.days import DAY_S, EPOCH_DAY, LAST_DAY, Days, bits_of
from duetime.domain.schedule.steps import Steps

__all__ = ["Frequency", "MonthlyRule", "Once", "Rule", "TimesRule", "YearlyRule", "local_seconds"]

_LAST_S = (LAST_DAY + 1 - EPOCH_DAY) * DAY_S - 1


def local_seconds(day: date, second_of_day: int = 0) -> int:
    return (day.toordinal() - EPOCH_DAY) * DAY_S + second_of_day


class Rule(Protocol):
    """`is_finer_than_daily`: a day may have more than one of its times."""

    is_finer_than_daily: bool

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        """The first local time of the rule at or after this one; None: there is none."""


class Once:
    """A single local time."""

    is_finer_than_daily = False

    def __init__(self, at_s: int) -> None:
        self._at_s = at_s

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        return self._at_s if local_s <= self._at_s else None


class MonthlyRule:
    """The same day of every month; the last day of a month that is shorter."""

    is_finer_than_daily = False

    def __init__(self, at_s: int) -> None:
        self._at_s = at_s
        at = date.fromordinal(at_s // DAY_S + EPOCH_DAY)
        self._day, self._second = at.day, at_s % DAY_S

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        local_s = max(local_s, self._at_s)
        if local_s > _LAST_S:
            return None
        at = date.fromordinal(local_s // DAY_S + EPOCH_DAY)
        found = self._in_month(at.year, at.month)
        return found if found >= local_s else _within(self._in_month(at.year + at.month // 12, at.month % 12 + 1))

    def _in_month(self, year: int, month: int) -> int:
        return local_seconds(date(year, month, min(self._day, monthrange(year, month)[1])), self._second)


class YearlyRule:
    """The same date of every year. 29 February by policy: `feb28`, `mar1`, or `leap` (leap years only)."""

    is_finer_than_daily = False

    def __init__(self, at_s: int, feb29: str) -> None:
        self._at_s = at_s
        at = date.fromordinal(at_s // DAY_S + EPOCH_DAY)
        self._month, self._day, self._second = at.month, at.day, at_s % DAY_S
        self._feb29 = feb29

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        local_s = max(local_s, self._at_s)
        if local_s > _LAST_S:
            return None
        year = date.fromordinal(local_s // DAY_S + EPOCH_DAY).year
        for candidate in range(year, min(year + 9, 9999)):  # 1896 to 1904: at most eight years between leap years
            found = self._in_year(candidate)
            if found is not None and found >= local_s:
                return _within(found)
        return None

    def _in_year(self, year: int) -> int | None:
        month, day = self._month, self._day
        if self.is_of_29_february and monthrange(year, 2)[1] == 28:
            if self._feb29 == "leap":
                return None
            month, day = (2, 28) if self._feb29 == "feb28" else (3, 1)
        return local_seconds(date(year, month, day), self._second)

    @property
    def is_of_29_february(self) -> bool:
        return (self._month, self._day) == (2, 29)


def _within(local_s: int) -> int | None:
    return local_s if local_s <= _LAST_S else None


class Frequency(IntEnum):
    YEARLY = 0
    MONTHLY = 1
    WEEKLY = 2
    DAILY = 3
    HOURLY = 4
    MINUTELY = 5
    SECONDLY = 6


_UNIT_S = {Frequency.HOURLY: 3_600, Frequency.MINUTELY: 60, Frequency.SECONDLY: 1}


class TimesRule:
    """What cron and RFC 5545 have in common: days by `Days`, times of day, and every n-th period from the start.

    A day is divided into units: hours, minutes or seconds for frequencies finer than a day, else the day itself. Which
    units of a day are allowed is one integer with a bit for each, and each unit has the same offsets in seconds.
    """

    def __init__(
        self,
        frequency: Frequency,
        start_s: int,
        days: Days,
        *,
        hours: tuple[int, ...],
        minutes: tuple[int, ...],
        seconds: tuple[int, ...],
        interval: int = 1,
        positions: tuple[int, ...] = (),
        week_start: int = 0,
    ) -> None:
        self._frequency = frequency
        self._start_s = start_s
        self._days = days
        self._interval = interval
        self._week_start = week_start
        self._end_s = _LAST_S
        self._unit_s = _UNIT_S.get(frequency, DAY_S)
        self._units_in_day = DAY_S // self._unit_s
        self._offsets: tuple[int, ...] = tuple(
            hour * 3_600 + minute * 60 + second
            for hour in (hours if frequency <= Frequency.DAILY else (0,))
            for minute in (minutes if frequency <= Frequency.HOURLY else (0,))
            for second in (seconds if frequency <= Frequency.MINUTELY else (0,))
        )
        self._allowed = _units(self._unit_s, hours, minutes, seconds)
        # A day of seconds is an integer of 11 kB, and handling it takes ten times as long.
        self._steps_of_day = 1 + self._units_in_day // 10_000
        self._positions = positions
        if frequency > Frequency.DAILY:
            self._comb = _comb(self._units_in_day, interval)
            if positions:  # the set of a period is the same in every unit
                self._offsets = tuple(_picked(self._offsets, positions))
                self._positions = ()
        else:
            self._base = self._period_of(start_s // DAY_S)
        in_day = self._allowed.bit_count() if interval < self._units_in_day else 1
        self.is_finer_than_daily = in_day * len(self._offsets) > 1

    def next_from(self, local_s: int, steps: Steps) -> int | None:
        local_s = max(local_s, self._start_s)
        find = self._next_in_units if self._frequency > Frequency.DAILY else self._next_in_period
        while local_s <= self._end_s:
            steps.take(self._steps_of_day)
            day = self._day_from(local_s // DAY_S, steps)
            if day is None:
                return None
            found, local_s = find(max(local_s, day * DAY_S), steps)
            if found:
                return local_s if local_s <= self._end_s else None
        return None

    def _day_from(self, day: int, steps: Steps) -> int | None:
        """The first day at or after this one that `days` allows, without regard to the interval."""
        ordinal = day + EPOCH_DAY
        if ordinal > LAST_DAY:
            return None
        year = date.fromordinal(ordinal).year
        first = date(year, 1, 1).toordinal()
        mask = self._days.in_year(year) >> (ordinal - first) << (ordinal - first)
        while not mask:
            steps.take()
            year += 1
            if year > 9998:
                return None
            first = date(year, 1, 1).toordinal()
            mask = self._days.in_year(year)
        return first + (mask & -mask).bit_length() - 1 - EPOCH_DAY

    # `find`: (True, the local time), or (False, the local time from which to search on). `local_s` is in a day that
    # `days` allows.

    def _next_in_units(self, local_s: int, steps: Steps) -> tuple[bool, int]:
        unit = self._aligned_unit(local_s // self._unit_s)
        if unit * self._unit_s // DAY_S > local_s // DAY_S:
            return False, unit * self._unit_s
        bits = self._units_from(unit)
        while bits:
            lowest = (bits & -bits).bit_length() - 1
            begin = (unit + lowest) * self._unit_s
            index = bisect_left(self._offsets, local_s - begin)
            if index < len(self._offsets):
                return True, begin + self._offsets[index]
            bits &= bits - 1  # only the first unit may have no time left
            steps.take()
            if not self._offsets:
                break
        return False, (local_s // DAY_S + 1) * DAY_S

    def _aligned_unit(self, unit: int) -> int:
        return unit + (self._start_s // self._unit_s - unit) % self._interval

    def _units_from(self, unit: int) -> int:
        """The units of its day from this one, which is aligned, as bits; bit 0 is the unit itself."""
        return (self._allowed >> (unit % self._units_in_day)) & self._comb

    def _next_in_period(self, local_s: int, steps: Steps) -> tuple[bool, int]:
        day = local_s // DAY_S
        period = self._period_of(day)
        skipped = (self._base - period) % self._interval
        if skipped:
            return False, self._begin_of(period + skipped)
        if self._positions:
            times = self._picked_in(period, steps)
            index = bisect_left(times, local_s)
            return (True, times[index]) if index < len(times) else (False, self._begin_of(period + self._interval))
        index = bisect_left(self._offsets, local_s - day * DAY_S)
        if index < len(self._offsets):
            return True, day * DAY_S + self._offsets[index]
        return False, (day + 1) * DAY_S

    def _picked_in(self, period: int, steps: Steps) -> list[int]:
        """BYSETPOS: the times of a period at the given positions, counted from 1, or from the end if negative."""
        begin, end = self._begin_of(period) // DAY_S, self._begin_of(period + 1) // DAY_S
        days: list[int] = []
        for year in range(_year_of(begin), _year_of(end - 1) + 1):
            first = date(year, 1, 1).toordinal() - EPOCH_DAY
            low, high = max(begin - first, 0), end - first
            days += [first + low + bit for bit in bits_of(self._days.in_year(year) >> low & (1 << high - low) - 1)]
        steps.take(2 + (len(days) + len(self._positions)) // 8)
        count = len(self._offsets)
        chosen = _indexes(len(days) * count, self._positions)
        return [days[index // count] * DAY_S + self._offsets[index % count] for index in chosen]

    def _period_of(self, day: int) -> int:
        ordinal = day + EPOCH_DAY
        if self._frequency == Frequency.DAILY:
            return ordinal
        if self._frequency == Frequency.WEEKLY:
            return (ordinal - 1 - self._week_start) // 7
        at = date.fromordinal(ordinal)
        return at.year if self._frequency == Frequency.YEARLY else at.year * 12 + at.month - 1

    def _begin_of(self, period: int) -> int:
        if self._frequency == Frequency.DAILY:
            ordinal = period
        elif self._frequency == Frequency.WEEKLY:
            ordinal = period * 7 + 1 + self._week_start
        else:
            year, month = (period, 0) if self._frequency == Frequency.YEARLY else divmod(period, 12)
            ordinal = date(year, month + 1, 1).toordinal() if year < 9999 else LAST_DAY + 1
        return (ordinal - EPOCH_DAY) * DAY_S

    # -- COUNT

    def end_after(self, count: int, steps: Steps) -> None:
        """Lets the rule end with its count-th time. Whole days are counted at once, and whole years if none is left out
        by the interval."""
        local_s = self.next_from(self._start_s, steps)
        while local_s is not None:
            if self._positions:
                if count == 1:
                    break
                count -= 1
                local_s = self.next_from(local_s + 1, steps)
                continue
            in_day = self._count_in_day_from(local_s)
            if in_day >= count:
                local_s = self._nth_in_day_from(local_s, in_day - count)
                break
            count -= in_day
            day = local_s // DAY_S + 1
            if self._interval == 1:
                following = self._whole_days_from(day, count, steps)
                if following is None:
                    return
                day, count = following
            local_s = self.next_from(day * DAY_S, steps)
        if local_s is not None:
            self._end_s = local_s

    def _whole_days_from(self, day: int, count: int, steps: Steps) -> tuple[int, int] | None:
        """The day with the count-th time from this day on, and which of the times of that day it is, from 1."""
        in_day = self._allowed.bit_count() * len(self._offsets)
        while (found := self._day_from(day, steps)) is not None:
            steps.take()
            year = _year_of(found)
            mask = self._days.in_year(year) >> (found + EPOCH_DAY - date(year, 1, 1).toordinal())
            in_year = mask.bit_count() * in_day
            if in_year >= count:
                passed = (count - 1) // in_day
                return found + bits_of(mask)[passed], count - passed * in_day
            count -= in_year
            day = date(year, 12, 31).toordinal() - EPOCH_DAY + 1
        return None

    def end_at(self, local_s: int) -> None:
        self._end_s = min(self._end_s, local_s)

    def _count_in_day_from(self, local_s: int) -> int:
        """How many times the day of this time has, at and after it."""
        if self._frequency <= Frequency.DAILY:
            return len(self._offsets) - bisect_left(self._offsets, local_s % DAY_S)
        unit = self._aligned_unit(local_s // self._unit_s)
        if unit * self._unit_s // DAY_S > local_s // DAY_S:
            return 0
        bits = self._units_from(unit)
        passed = bisect_left(self._offsets, local_s - unit * self._unit_s) if bits & 1 else 0
        return bits.bit_count() * len(self._offsets) - passed

    def _nth_in_day_from(self, local_s: int, left: int) -> int:
        """The last time in the rest of the day that has at least `left` times after it."""
        low, high = local_s, (local_s // DAY_S + 1) * DAY_S - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self._count_in_day_from(middle) > left:
                low = middle
            else:
                high = middle - 1
        return low


def _year_of(day: int) -> int:
    return date.fromordinal(min(day + EPOCH_DAY, LAST_DAY)).year


def _indexes(length: int, positions: tuple[int, ...]) -> list[int]:
    found = {position - 1 if position > 0 else length + position for position in positions}
    return sorted(index for index in found if 0 <= index < length)


def _picked(values: tuple[int, ...], positions: tuple[int, ...]) -> list[int]:
    return [values[index] for index in _indexes(len(values), positions)]


@lru_cache(maxsize=64)
def _units(unit_s: int, hours: tuple[int, ...], minutes: tuple[int, ...], seconds: tuple[int, ...]) -> int:
    """The units of a day that are allowed, as bits. A field finer than the unit does not restrict it."""
    if unit_s == DAY_S:
        return 1
    pattern, length = 1, unit_s
    for size, allowed in ((60, seconds), (3_600, minutes), (DAY_S, hours)):
        if size > unit_s:
            pattern = sum(pattern << (length // unit_s * value) for value in allowed)
            length = size
    return pattern


@lru_cache(maxsize=64)
def _comb(units: int, interval: int) -> int:
    """Every interval-th of the units of a day, as bits."""
    count = -(-units // interval)
    if count < 64:
        return sum(1 << (interval * index) for index in range(count))
    return ((1 << (interval * count)) - 1) // ((1 << interval) - 1)
