"""Which stored timers of a shard are in memory: all up to the horizon, except perhaps those of the backlog.

The backlog is one range of positions up to the horizon. It arises in two ways. After an outage more timers are overdue
than one page holds: then the horizon is set to now, so that timers that are due next are loaded next, and what lies
between the page and now becomes the backlog. And when memory is short, due timers of the largest flows leave memory
without a write: the backlog is widened to include them. Timers in this range may be in memory or not. It is loaded page
by page, oldest first, when memory allows it.

Pure: no I/O, and time is passed as a value.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from duetime.domain.timer import BEFORE_ALL, Position

__all__ = ["Backlog", "Load", "Window", "end_of"]

_HIGHEST: Final = 2**63 - 1
_LOWEST: Final = -(2**63)


def end_of(execute_at_ms: int) -> Position:
    """The last position of a millisecond."""
    return Position(execute_at_ms, _HIGHEST, _HIGHEST)


def _just_before(position: Position) -> Position:
    """The position right before this one, or one that is a little lower."""
    at_ms, high, low = position
    return Position(at_ms, high, low - 1) if low > _LOWEST else end_of(at_ms - 1)


class Backlog(NamedTuple):
    """Timers with `after < position <= until` may be stored and not in memory."""

    after: Position
    until: Position


class Load(NamedTuple):
    """A load that has begun, of the positions `after < position <= until`."""

    after: Position
    until: Position
    is_backlog: bool


class Window:
    __slots__ = ("backlog", "horizon")

    def __init__(self, low_water: Position) -> None:
        self.horizon = low_water
        self.backlog: Backlog | None = None

    @property
    def complete_until(self) -> Position:
        """All stored timers up to this position are in memory."""
        return self.horizon if self.backlog is None else min(self.horizon, self.backlog.after)

    def begin_load(self, until_ms: int) -> Load:
        """Of the timers that follow the horizon."""
        return Load(self.horizon, end_of(until_ms), False)

    def begin_backlog_load(self) -> Load:
        assert self.backlog is not None
        return Load(*self.backlog, True)

    def end_load(self, load: Load, following: Position | None, now_ms: int) -> Position:
        """The load has returned all timers up to the position `following` (None: all it has asked for). Returns up to
        where it was complete; what it has returned is in memory from now on."""
        end = load.until if following is None else min(following, load.until)
        if load.is_backlog:
            backlog = self.backlog
            # If it was widened downwards meanwhile, it is loaded again from there.
            if backlog is not None and backlog.after == load.after:
                self.backlog = Backlog(end, backlog.until) if end < backlog.until else None
            return end
        now = end_of(now_ms)
        if following is not None and end < now:
            self._widen(end, now)
            self.horizon = max(self.horizon, now)
        else:
            self.horizon = max(self.horizon, end)
        return end

    def add_to_backlog(self, position: Position) -> None:
        """This timer leaves memory. It is due, or will be soon."""
        self._widen(_just_before(position), position)

    def _widen(self, after: Position, until: Position) -> None:
        if self.backlog is not None:
            after, until = min(after, self.backlog.after), max(until, self.backlog.until)
        self.backlog = Backlog(after, until)

    def shrink(self, cutoff_ms: int) -> None:
        """Move the horizon back: timers due after the cutoff leave memory."""
        self.horizon = min(self.horizon, end_of(cutoff_ms))
        if self.backlog is not None and self.backlog.until > self.horizon:
            after = self.backlog.after
            self.backlog = Backlog(after, self.horizon) if after < self.horizon else None

    def clear(self) -> None:
        self.horizon = BEFORE_ALL
        self.backlog = None
