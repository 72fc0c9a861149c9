"""DynamoDB's time. All that it tells is the Date of its answers, in whole seconds; this makes milliseconds of it.

An answer whose Date is D was made between D and D + 1 s by the service's clock, and between our sending and our
receiving by ours. Each answer so bounds the difference of the two clocks, to a second and the way there and back; all
of them together bound it much closer, because answers fall at any point of a second: those right before and right after
its turn are what counts.
"""

from __future__ import annotations

from duetime.clock import OffsetBounds

__all__ = ["ServerClock"]

_SECOND_MS = 1_000
NARROWEST_MS = 20.0  # servers behind one name do not agree to the last millisecond either


class ServerClock:
    """What is known of the service's clock."""

    def __init__(self) -> None:
        self._bounds = OffsetBounds(NARROWEST_MS)

    @property
    def is_known(self) -> bool:
        return self._bounds.is_known

    @property
    def width_ms(self) -> float:
        """How far the time that it tells may be off, up or down together."""
        return self._bounds.width_ms

    def saw(self, date_ms: int, sent_ms: int, received_ms: int) -> None:
        """An answer with that Date, sent for and received at those times of the boot clock."""
        self._bounds.saw(date_ms, date_ms + _SECOND_MS, sent_ms, received_ms)

    def now_ms(self, boot_ms: int) -> int:
        """The middle of what it may be."""
        return boot_ms + round((self._bounds.low_ms + self._bounds.high_ms) / 2)
