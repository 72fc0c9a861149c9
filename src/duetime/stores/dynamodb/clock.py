"""The clock of DynamoDB. The service reports its time only in the Date of its answers, in whole seconds; this computes
milliseconds from it.

An answer with the Date D was made between D and D + 1 s by the clock of the service, and between sending and receiving
by our clock. So each answer bounds the difference of the two clocks to one second plus the round trip. Many answers
together bound it much closer, because they fall at any point of a second: the ones just before and just after a full
second give the narrowest bounds.
"""

from __future__ import annotations

from duetime.clock import OffsetBounds

__all__ = ["ServerClock"]

_SECOND_MS = 1_000
NARROWEST_MS = 20.0  # the servers behind one name differ by some milliseconds


class ServerClock:
    """Bounds of the difference between the service's clock and our boot clock."""

    def __init__(self) -> None:
        self._bounds = OffsetBounds(NARROWEST_MS)

    @property
    def is_known(self) -> bool:
        return self._bounds.is_known

    @property
    def width_ms(self) -> float:
        """The width of the bounds: the time may be wrong by half of it in each direction."""
        return self._bounds.width_ms

    def observe(self, date_ms: int, sent_ms: int, received_ms: int) -> None:
        """An answer with that Date; request sent and answer received at those times of the boot clock."""
        self._bounds.saw(date_ms, date_ms + _SECOND_MS, sent_ms, received_ms)

    def now_ms(self, boot_ms: int) -> int:
        """The middle of the bounds."""
        return boot_ms + round((self._bounds.low_ms + self._bounds.high_ms) / 2)
