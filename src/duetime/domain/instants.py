"""Instants and durations as text: RFC 3339 and "90s" / "PT1H30M" to milliseconds and back. Pure.

Both parsers raise a ValueError whose text continues after the name of the field.
"""

from __future__ import annotations

import re
from datetime import date
from functools import lru_cache

__all__ = ["EARLIEST_MS", "LATEST_MS", "format_duration", "format_instant", "parse_duration", "parse_instant"]

# Instants a timer may have: from 1970-01-01T00:00:00Z up to, not including, 9999-01-01T00:00:00Z.
EARLIEST_MS = 0
LATEST_MS = 253_370_764_800_000

DURATION_MAX_MS = 100 * 366 * 86_400_000

_EPOCH_DAY = date(1970, 1, 1).toordinal()

_INSTANT = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[Tt ](\d\d):(\d\d):(\d\d)(?:\.(\d{1,30}))?(?:([Zz])|([+-])(\d\d):(\d\d))", re.ASCII
)
_INSTANT_CHARS_MAX = 100  # a command may have a megabyte there
_WITHOUT_OFFSET = re.compile(r"\d{4}-\d\d-\d\d([Tt ]\d\d:\d\d(:\d\d(\.\d+)?)?)?", re.ASCII)


def parse_instant(text: str) -> int:
    """Milliseconds since 1970, rounded *up*: a timer never fires early."""
    match = _INSTANT.fullmatch(text)
    if match is None:
        if len(text) <= _INSTANT_CHARS_MAX and _WITHOUT_OFFSET.fullmatch(text):
            raise ValueError('needs a time and an offset, as in "2027-01-01T09:00:00Z" or "…T09:00:00+01:00"')
        raise ValueError('must be an RFC 3339 instant such as "2027-01-01T09:00:00Z"')
    year, month, day, hour, minute, second, fraction, _, sign, offset_hour, offset_minute = match.groups()
    if second == "60":
        raise ValueError("must not be a leap second (:60)")
    if hour > "23" or minute > "59" or second > "59":
        raise ValueError("must have a time of day from 00:00:00 to 23:59:59")
    try:
        days = date(int(year), int(month), int(day)).toordinal() - _EPOCH_DAY
    except ValueError:
        raise ValueError("must have a day that exists") from None
    milliseconds = (days * 86_400 + int(hour) * 3_600 + int(minute) * 60 + int(second)) * 1_000
    if fraction is not None:
        milliseconds += int(fraction[:3].ljust(3, "0")) + (fraction[3:].strip("0") != "")
    if sign is not None:
        if offset_hour > "23" or offset_minute > "59":
            raise ValueError("must have an offset of at most 23:59")
        offset = (int(offset_hour) * 60 + int(offset_minute)) * 60_000
        milliseconds += offset if sign == "-" else -offset
    if not EARLIEST_MS <= milliseconds < LATEST_MS:
        raise ValueError("must be between 1970-01-01T00:00:00Z and 9999-01-01T00:00:00Z")
    return milliseconds


@lru_cache(maxsize=4_096)
def _day_text(day: int) -> str:
    return date.fromordinal(_EPOCH_DAY + day).isoformat() + "T"


_MINUTE_TEXT = [f"{minute // 60:02d}:{minute % 60:02d}:" for minute in range(1_440)]
_SECOND_TEXT = [f"{second:02d}." for second in range(60)]
_MILLISECOND_TEXT = [f"{millisecond:03d}Z" for millisecond in range(1_000)]


def format_instant(milliseconds: int) -> str:
    """UTC with milliseconds, the format of all answers. Uses tables, because every answer has several instants."""
    return _until_second(milliseconds // 1_000) + _MILLISECOND_TEXT[milliseconds % 1_000]


@lru_cache(maxsize=1_024)  # most instants are now, or a common delay from now
def _until_second(seconds: int) -> str:
    day, rest = divmod(seconds, 86_400)
    minute, second = divmod(rest, 60)
    return _day_text(day) + _MINUTE_TEXT[minute] + _SECOND_TEXT[second]


_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SHORT = re.compile(r"(?:\d{1,15}(?:\.\d{1,3})?(?:ms|s|m|h|d))+", re.ASCII)
_SHORT_PART = re.compile(r"(\d+)(?:\.(\d+))?(ms|s|m|h|d)", re.ASCII)
_ISO = re.compile(
    r"P(?:(\d{1,9})W)?(?:(\d{1,9})D)?(?:T(?:(\d{1,9})H)?(?:(\d{1,9})M)?(?:(\d{1,12})(?:\.(\d{1,3}))?S)?)?", re.ASCII
)


@lru_cache(maxsize=1_024)  # most requests have one of a few durations
def parse_duration(text: str) -> int:
    """ "250ms", "90s", "1h30m", "2d", or ISO 8601 such as "PT1H30M", in milliseconds, rounded *up*.

    Computed in thousandths of a millisecond: with floats "4.001s" would be a little more than 4001 ms.
    """
    thousandths = 0
    if _SHORT.fullmatch(text):
        for whole, fraction, unit in _SHORT_PART.findall(text):
            thousandths += int(whole + fraction.ljust(3, "0")) * _UNITS_MS[unit]
    elif (match := _ISO.fullmatch(text)) and not text.endswith(("P", "T")):
        weeks, days, hours, minutes, seconds = (int(part or 0) for part in match.groups()[:5])
        thousandths = ((((weeks * 7 + days) * 24 + hours) * 60 + minutes) * 60 + seconds) * 1_000_000
        thousandths += int((match[6] or "").ljust(3, "0")) * 1_000
    else:
        raise ValueError('must be a duration such as "90s", "1h30m" or "PT1H30M"')
    milliseconds = -(-thousandths // 1_000)
    if milliseconds > DURATION_MAX_MS:
        raise ValueError("must be at most 100 years")
    return milliseconds


def format_duration(milliseconds: int) -> str:
    """In the largest unit that is exact: 5400000 -> "90m"."""
    for unit in ("d", "h", "m", "s"):
        if milliseconds and milliseconds % _UNITS_MS[unit] == 0:
            return f"{milliseconds // _UNITS_MS[unit]}{unit}"
    return f"{milliseconds}ms" if milliseconds else "0s"
