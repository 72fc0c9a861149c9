"""A limit on the work of a search: a schedule comes from outside, and may ask for what never comes. Pure."""

from __future__ import annotations

__all__ = ["PREVIEW_STEPS_MAX", "SEARCH_STEPS_MAX", "Steps", "TooManySteps"]

# For one occurrence. A step is a day, a period or a year that is looked at, about 1.5 microseconds: the search takes at
# most a millisecond of the event loop, each time a timer is scheduled again. The rarest rules that people use need few:
# 29 February on a Sunday, at most 40 years apart, needs about 40; a year of excluded days 370.
SEARCH_STEPS_MAX = 600
# For all occurrences of a preview: the rules that take most have some hundred steps for each of a thousand.
PREVIEW_STEPS_MAX = 400_000


class TooManySteps(Exception):
    """The search was given up: the rule never matches, or too rarely."""


class Steps:
    """Counts the steps of a search. `used` is for tests, which limit the work and not the time."""

    __slots__ = ("_left", "_maximum", "_total", "used")

    def __init__(self, maximum: int = SEARCH_STEPS_MAX, total: int | None = None) -> None:
        self.used = 0
        self._maximum = maximum
        self._left = maximum
        self._total = total

    def take(self, count: int = 1) -> None:
        self.used += count
        self._left -= count
        if self._left < 0 or self.is_total_used:
            raise TooManySteps

    @property
    def is_total_used(self) -> bool:
        return self._total is not None and self.used > self._total

    def found(self) -> None:
        """The next search may again take as many steps; all together at most `total`."""
        self._left = self._maximum
