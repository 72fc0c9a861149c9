"""Cron expressions, read by cronsim. Pure.

cronsim reads the fields; the search for the next time is that of `TimesRule`, which takes a limited number of steps.
cronsim's own search takes tens of milliseconds to find that `0 0 29 2 1L` has no time within 50 years.
"""

from __future__ import annotations

from datetime import datetime

from cronsim import CronSim, CronSimError

from duetime.domain.schedule.days import Days
from duetime.domain.schedule.rule import Frequency, TimesRule

__all__ = ["CRON_LENGTH_MAX", "parse_cron"]

CRON_LENGTH_MAX = 256
_SHORT_NAMES = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_ANY_START = datetime(2000, 1, 1)  # noqa: DTZ001 - a local time; only the fields of the expression are used
_FIELDS = "minute hour day-of-month month day-of-week, or six with second first"


def parse_cron(expression: str, start_s: int) -> TimesRule:
    """Raises a ValueError whose text continues after "the cron expression"."""
    if len(expression) > CRON_LENGTH_MAX:
        raise ValueError(f"must have at most {CRON_LENGTH_MAX} characters")
    given = expression.strip()
    if given.startswith("@"):
        if given.lower() not in _SHORT_NAMES:
            raise ValueError(f"must be one of {', '.join(_SHORT_NAMES)}, or five or six fields")
        given = _SHORT_NAMES[given.lower()]
    if len(given.split()) not in (5, 6):
        raise ValueError(f"must have five fields ({_FIELDS}), not {len(given.split())}")
    try:
        fields = CronSim(given, _ANY_START)
    except CronSimError as error:
        raise ValueError(f"is not valid: {str(error).removeprefix('Bad ')} is wrong") from None
    except (AssertionError, ValueError):
        raise ValueError("is not valid") from None
    return TimesRule(
        Frequency.MINUTELY,
        start_s,
        _days(fields),
        hours=tuple(sorted(fields.hours)),
        minutes=tuple(sorted(fields.minutes)),
        seconds=tuple(sorted(fields.seconds)),
    )


def _days(fields: CronSim) -> Days:
    """A field that allows everything is left out. In cron, Sunday is 0 and 7; here Monday is 0."""
    monthdays = tuple(sorted(day for day in fields.days if day > 0))
    weekdays = tuple(sorted({(day - 1) % 7 for day in fields.weekdays if isinstance(day, int)}))
    any_monthday, any_weekday = len(monthdays) == 31, len(weekdays) == 7
    if not fields.day_and and (any_monthday or any_weekday):  # one of the two is enough
        any_monthday = any_weekday = True
    if CronSim.LAST in fields.days:
        monthdays = (*monthdays, -1)
    nth = [(pair[0], pair[1]) for pair in fields.weekdays if isinstance(pair, tuple)]
    return Days(
        months=() if len(fields.months) == 12 else tuple(sorted(fields.months)),
        monthdays=() if any_monthday else monthdays,
        last_workday=not any_monthday and CronSim.LAST_WEEKDAY in fields.days,
        weekdays=() if any_weekday else weekdays,
        nth_weekdays=()
        if any_weekday
        else tuple(sorted(((day - 1) % 7, -1 if n == CronSim.LAST else n) for day, n in nth)),
        either=not fields.day_and,
    )
