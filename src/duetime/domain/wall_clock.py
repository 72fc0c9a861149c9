"""What is stored of a timer's schedule. Pure. What it means is computed by `schedule` and `recurrence`.

The types are here, apart from the code that computes occurrences, because clients need them and not that code.
"""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct

from duetime.domain.instants import LATEST_MS

__all__ = ["HELD_MS", "Schedule", "ScheduleState"]

# A paused timer is stored at this time, at which it never fires.
HELD_MS: Final = LATEST_MS - 1


class Schedule(
    Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True, rename="camel", forbid_unknown_fields=True
):
    """A schedule as its user wrote it. What each field means is in docs/howto/schedules.md."""

    timezone: str
    at: str | None = None  # only cron and rrule may have none: they start when the timer is created
    gap: str | None = None  # None: `later`, or `skip` for rules finer than daily
    fold: str | None = None  # None: `first`, or `both` for rules finer than daily
    repeat: str | None = None
    exclude: tuple[str, ...] = ()
    until: str | None = None
    feb29: str | None = None  # None: `feb28`
    catch_up: str | None = None  # None: `one`

    @property
    def chars(self) -> int:
        """The approximate number of characters that it takes in a row."""
        texts = (self.timezone, self.at, self.repeat, self.until, *self.exclude)
        return 100 + sum(4 + len(text) for text in texts if text is not None)


class ScheduleState(Struct, frozen=True, gc=False, array_like=True, forbid_unknown_fields=True):
    """The schedule of a timer, where the timer stands in it, and whether the timer is paused.

    It is stored as an array, which a version without schedules cannot decode: that version would end the timer with its
    next call (ADR 39). A later version that adds an element to the array is protected from this one in the same way.
    """

    schedule: Schedule | None = None  # None: a timer without a schedule, which is paused
    start: str | None = None  # `at`, if the schedule has none: the local time of the create
    after_ms: int = 0  # the next occurrence is the first one after this: the instant of the pending one, or of the last
    number: int = 0  # of the pending occurrence, or of the last one
    tzdata: str = ""  # the version of the time-zone rules that gave the pending occurrence its instant
    asked: str = ""  # the local time that the pending occurrence asks for. Empty: the pending call is no occurrence
    local: str = ""  # its local time, with the offset
    held_ms: int | None = None  # when the paused timer is due; HELD_MS: never, until its next occurrence is computed
    later: dict[str, Any] | None = None  # as in Extras
    late: int = 0  # how many occurrences in a row had passed when they were scheduled, for `catchUp: all`
