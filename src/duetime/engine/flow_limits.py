"""The limits of one flow, and how much of them this instance may use.

The operator's limits of a flow (`FlowLimits`) hold for the whole cluster. An instance may use its allowance of them
(`FlowAllowances`), which ends at a time; if nobody divides limits, the allowance is the limit itself.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from duetime.domain.timer import FlowLimits

__all__ = ["Limit", "LimitedFlow"]

# Wake-ups of the event loop come a little late. A delay up to this is made up for, or the rate would be too low.
_CATCH_UP_SECONDS = 0.05


class LimitedFlow(Struct, frozen=True):
    """A flow with a limit that has timers waiting or in flight on this instance."""

    namespace: str
    flow_key: str
    rate: float | None  # the limits in the whole cluster; None: no limit
    concurrency: int | None
    waiting: int
    in_flight: int


class Limit:
    """The limits of one flow, this instance's allowance, and when the rate allows the next call."""

    __slots__ = ("allowed_concurrency", "allowed_rate", "allowed_until_ms", "limits", "next_start", "rate")

    def __init__(self, limits: FlowLimits, rate_default: float) -> None:
        self.next_start = 0.0  # loop time from which a rate allows the next call
        self.rate: float | None = None
        self.set(limits, rate_default)

    def set(self, limits: FlowLimits, rate_default: float) -> None:
        """New limits of the operator. If limits are divided, the allowance of before has ended with the old ones."""
        self.limits = limits
        rate_before = self.rate
        self.rate = limits.rate if limits.rate is not None else (rate_default or None)
        self.allowed_rate = self.rate
        self.allowed_concurrency = limits.concurrency
        self.allowed_until_ms = 0  # boot time; counts only if limits are divided
        if self.rate != rate_before:  # else a pause that begins and ends would allow a call too early each time
            self.next_start = 0.0

    @property
    def is_limited(self) -> bool:
        return self.rate is not None or self.limits.concurrency is not None

    @property
    def next_call(self) -> float:
        """Loop time from which the allowance permits the next call. Infinite: not before another allowance."""
        return inf if self.allowed_rate is not None and self.allowed_rate <= 0 else self.next_start

    def allow(self, rate: float | None, concurrency: int | None, now: float, until_ms: int = 0) -> None:
        """This instance's part of the limits until this boot time; None where there is no limit."""
        if self.rate is not None and rate is not None and rate != self.allowed_rate:
            self.allowed_rate = rate = min(rate, self.rate)
            if rate > 0:  # after a time without any rate, the last call under the old one still counts
                self.next_start = min(self.next_start, now + 1 / rate)
        if self.limits.concurrency is not None and concurrency is not None:
            self.allowed_concurrency = min(concurrency, self.limits.concurrency)
        self.allowed_until_ms = until_ms

    def call_started(self, now: float) -> None:
        """Set when the next call may start: the calls of a second are spread over the second."""
        if self.allowed_rate is not None and self.allowed_rate > 0:
            due = self.next_start if now - self.next_start < _CATCH_UP_SECONDS else now
            self.next_start = due + 1 / self.allowed_rate
