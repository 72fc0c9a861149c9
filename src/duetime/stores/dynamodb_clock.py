"""DynamoDB's time. All that it tells is the Date of its answers, in whole seconds; this makes milliseconds of it.

An answer whose Date is D was made between D and D + 1 s by the service's clock, and between our sending and our
receiving by ours. Each answer so bounds the difference of the two clocks, to a second and the way there and back; all
of them together bound it much closer, because answers fall at any point of a second: those right before and right after
its turn are what counts.
"""

from __future__ import annotations

__all__ = ["ServerClock"]

SECOND_MS = 1_000
DRIFT_MS_PER_SECOND = 0.5  # how fast two clocks may part: as much as a clock is ever slewed
NARROWEST_MS = 20.0  # servers behind one name do not agree to the last millisecond either


class ServerClock:
    """What is known of the service's clock: it is ahead of our boot clock by `low` to `high`."""

    def __init__(self) -> None:
        self._low = self._high = 0.0
        self._as_of_ms: int | None = None

    @property
    def is_known(self) -> bool:
        return self._as_of_ms is not None

    @property
    def width_ms(self) -> float:
        """How far the time that it tells may be off, up or down together."""
        return self._high - self._low

    def saw(self, date_ms: int, sent_ms: int, received_ms: int) -> None:
        """An answer with that Date, sent for and received at those times of the boot clock."""
        low, high = float(date_ms - received_ms), float(date_ms + SECOND_MS - sent_ms)
        if self._as_of_ms is None:
            self._low, self._high, self._as_of_ms = low, high, received_ms
            return
        grown = max(0, received_ms - self._as_of_ms) / 1_000 * DRIFT_MS_PER_SECOND
        self._as_of_ms = max(self._as_of_ms, received_ms)
        self._low, self._high = self._low - grown, self._high + grown
        if low > self._high:  # one of the clocks was set: follow, no further than this answer proves
            self._low, self._high = low, low + NARROWEST_MS
        elif high < self._low:
            self._low, self._high = high - NARROWEST_MS, high
        else:
            self._low, self._high = max(self._low, low), min(self._high, high)

    def now_ms(self, boot_ms: int) -> int:
        """The middle of what it may be."""
        return boot_ms + round((self._low + self._high) / 2)
