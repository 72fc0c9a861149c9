"""Time zones of the tzdata package, and when their offsets change. Pure: the package's data never change while it runs.

The zones of the operating system are not used: the version of the rules is then known, and the same on all instances.
"""

from __future__ import annotations

from datetime import datetime
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from zoneinfo import ZoneInfo

import tzdata
from msgspec import Struct

from duetime.domain.schedule.days import DAY_S

__all__ = ["TZDATA_VERSION", "OffsetChange", "load_zone", "offset_changes", "offset_s", "suggested_zone", "zone_names"]

TZDATA_VERSION: str = tzdata.IANA_VERSION

# Offset changes are looked for in blocks of this length, by the offset of each of its days. No zone has had two changes
# within six days since 1970; a test compares all changes with the data.
BLOCK_S = 16 * DAY_S


class OffsetChange(Struct, frozen=True, gc=False):
    """At `at_s` (UTC) the offset changes. An increase makes a gap in local time, a decrease a fold."""

    at_s: int
    before_s: int
    after_s: int


@lru_cache(maxsize=1)
def zone_names() -> frozenset[str]:
    names = files("tzdata").joinpath("zones").read_text("utf-8").split()
    return frozenset(names) - {"Factory"}  # which stands for a system whose zone is not set


@lru_cache(maxsize=1_024)
def load_zone(name: str) -> ZoneInfo:
    """Only of a name in `zone_names`."""
    with files("tzdata").joinpath("zoneinfo", *name.split("/")).open("rb") as data:
        return ZoneInfo.from_file(data, name)


def suggested_zone(name: str) -> str | None:
    """The zone that was probably meant: "new york", "europe/berln"."""
    if len(name) > _NAME_MAX:  # the comparison takes long for a long text
        return None
    by_name, by_city = _spellings()
    wanted = name.lower().replace("_", " ").strip()
    found = by_name.get(wanted) or by_city.get(wanted)
    if found is None:
        close = get_close_matches(wanted, by_name, n=1, cutoff=0.75)
        found = by_name[close[0]] if close else None
    if found is None:
        close = get_close_matches(wanted.rpartition("/")[2], by_city, n=1, cutoff=0.8)
        found = by_city[close[0]] if close else None
    return found


_NAME_MAX = 40  # the longest name has 32


@lru_cache(maxsize=1)
def _spellings() -> tuple[dict[str, str], dict[str, str]]:
    """The zones by their names in lower case, and by their last parts, which are mostly cities."""
    by_name = {name.lower().replace("_", " "): name for name in sorted(zone_names())}
    by_city: dict[str, str] = {}
    for lower, name in by_name.items():
        if "/" in lower:
            by_city.setdefault(lower.rpartition("/")[2], name)
    return by_name, by_city


def offset_s(zone: ZoneInfo, instant_s: int) -> int:
    """Seconds that the local time is ahead of UTC."""
    offset = datetime.fromtimestamp(instant_s, zone).utcoffset()
    assert offset is not None
    return offset.days * DAY_S + offset.seconds


@lru_cache(maxsize=16_384)
def offset_changes(name: str, block: int) -> tuple[OffsetChange, ...]:
    """The changes in a block: after its begin, up to and including its end."""
    zone = load_zone(name)
    changes = []
    begin = block * BLOCK_S
    before = offset_s(zone, begin)
    for day_end in range(begin + DAY_S, begin + BLOCK_S + 1, DAY_S):
        after = offset_s(zone, day_end)
        if after != before:
            at = _first_with_other_offset(zone, day_end - DAY_S, day_end, before)
            changes.append(OffsetChange(at, before, after))
            before = after
    return tuple(changes)


def _first_with_other_offset(zone: ZoneInfo, low_s: int, high_s: int, before: int) -> int:
    while high_s - low_s > 1:
        middle = (low_s + high_s) // 2
        if offset_s(zone, middle) == before:
            low_s = middle
        else:
            high_s = middle
    return high_s
