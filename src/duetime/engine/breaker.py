"""The breaker of a flow or of an origin: how long it is not called after it has failed.

It opens after a number of failures in a row. While it is open nothing is called; after the pause one call is tried. If
that fails too, the pause doubles, up to a maximum. A shortage of sockets or look-ups of this instance is no failure:
it only makes the flow wait for a few seconds, or longer if many flows of its namespace wait for that. Times are values
of the event loop's clock.
"""

from __future__ import annotations

from duetime.config import Delivery
from duetime.domain.settle import AttemptResult, Contact

__all__ = ["Breaker", "error_of"]

_SHORTAGE_SECONDS_MIN = 1.0
_SHORTAGE_SECONDS_MAX = 5.0


class Breaker:
    """Exists only for a flow or an origin that has failed."""

    __slots__ = ("failures", "hold_until", "last_error", "logged_at", "open_until", "pause_seconds", "shortage_seconds")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.pause_seconds = 0.0
        self.open_until = 0.0  # 0: closed; in the past: one call is tried
        self.hold_until = 0.0  # after a shortage of this instance
        self.shortage_seconds = 0.0
        self.last_error = ""
        self.logged_at = 0.0  # that it is open

    @property
    def is_open(self) -> bool:
        """Is it open, or is it not known yet whether the call that is tried succeeds?"""
        return self.open_until != 0

    @property
    def is_clear(self) -> bool:
        """Is there nothing to remember?"""
        return not (self.failures or self.open_until or self.shortage_seconds)

    def failed(self, error: str, retry_after_seconds: float, now: float, config: Delivery) -> bool:
        """Count a failure. True: it opens, for longer than the time before."""
        self.failures += 1
        self.last_error = error
        if not (self.open_until or retry_after_seconds or self.failures >= config.breaker_failures):
            return False
        pause = max(self.pause_seconds * 2, config.breaker_pause.seconds, retry_after_seconds)
        pause = min(pause, config.breaker_pause_max.seconds)
        has_grown = pause > self.pause_seconds
        self.pause_seconds = pause
        self.open_until = now + pause
        return has_grown

    def away(self, error: str, now: float, pause_seconds: float) -> None:
        """There is no connection: open for a pause that does not grow."""
        self.failures += 1
        self.last_error = error
        self.pause_seconds = pause_seconds
        self.open_until = now + pause_seconds

    def succeeded(self) -> bool:
        """True: this has closed it."""
        was_open = self.open_until != 0
        self.failures = 0
        self.pause_seconds = self.open_until = 0.0
        return was_open

    def extend(self, until: float) -> None:
        self.open_until = max(self.open_until, until)

    def shortage(self, error: str, now: float) -> bool:
        """This instance had no socket or look-up for a call. False: it began with one that counted."""
        self.last_error = error
        if now < self.hold_until:
            return False
        self.shortage_seconds = min(max(2 * self.shortage_seconds, _SHORTAGE_SECONDS_MIN), _SHORTAGE_SECONDS_MAX)
        self.hold_until = now + self.shortage_seconds
        return True


def error_of(result: AttemptResult) -> str:
    """Why the call failed, for `last_error`."""
    return result.error or (f"HTTP {result.status}" if result.contact is Contact.ANSWERED else result.contact.value)
