"""From local times to instants: what becomes of a local time that does not exist, or exists twice. Pure.

A stretch is a span of UTC in which local times are a constant ahead of it. Where clocks go forward, the local times of
the gap are taken from a second stretch that lies over the first (`later`, `earlier`) or from none (`skip`); where they
go back, the local times of the fold are in two stretches, of which one may be left out (`first`, `second`). Local times
need no search in the zone then, and instants come out in order.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from duetime.domain.schedule.days import DAY_S
from duetime.domain.schedule.zones import BLOCK_S, OffsetChange, load_zone, offset_changes, offset_s

__all__ = ["Stretch", "stretches"]


class Lane(NamedTuple):
    """An offset with which local times are looked for."""

    offset_s: int
    because: str | None  # "gap" or "fold"
    is_second: bool = False  # the part of a fold after the change


class Stretch(NamedTuple):
    """From `begin_s` up to, not including, `end_s`. It has no lane if `fold` leaves it out, two if `gap` adds one."""

    begin_s: int
    end_s: int
    lanes: tuple[Lane, ...]


@lru_cache(maxsize=4_096)
def stretches(zone: str, block: int, gap: str, fold: str) -> tuple[Stretch, ...]:
    """The stretches of a block of UTC, in order and without holes between them."""
    begin, end = block * BLOCK_S, (block + 1) * BLOCK_S
    # A change has effects up to a day before and after it: the largest changes skip or repeat a day.
    changes = [
        change
        for nearby in (block - 1, block, block + 1)
        for change in offset_changes(zone, nearby)
        if begin - DAY_S <= change.at_s <= end + DAY_S
    ]
    bounds = {begin, end}
    for change in changes:
        size = abs(change.after_s - change.before_s)
        bounds |= {change.at_s - size, change.at_s, change.at_s + size}
    ordered = sorted(bound for bound in bounds if begin <= bound <= end)
    loaded = load_zone(zone)
    return tuple(
        Stretch(low, high, _lanes(low, offset_s(loaded, low), changes, gap, fold)) for low, high in pairwise(ordered)
    )


def _lanes(begin_s: int, offset: int, changes: list[OffsetChange], gap: str, fold: str) -> tuple[Lane, ...]:
    because: str | None = None
    ordinary, is_second = True, False
    extra: list[Lane] = []
    for change in changes:
        distance = begin_s - change.at_s
        size = change.after_s - change.before_s
        if size > 0:
            if gap == "later" and 0 <= distance < size:
                extra.append(Lane(change.before_s, "gap"))
            elif gap == "earlier" and -size <= distance < 0:
                extra.append(Lane(change.after_s, "gap"))
        elif size <= distance < -size:
            because, is_second = "fold", distance >= 0
            ordinary = fold == "both" or (fold == "second") == is_second
    return (*((Lane(offset, because, is_second),) if ordinary else ()), *extra)
