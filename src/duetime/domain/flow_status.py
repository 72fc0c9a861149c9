"""What operators see of a flow: its state, what waits, and its limits. Pure."""

from __future__ import annotations

import enum

from msgspec import Struct

__all__ = ["FlowFilter", "FlowQuery", "FlowState", "FlowStatus", "merged"]


class FlowState(enum.StrEnum):
    """What happens to the timers of a flow that are due."""

    CLOSED = "closed"  # its timers are delivered
    HALF_OPEN = "halfOpen"  # its breaker lets one call through, to see whether the receiver answers again
    OPEN = "open"  # its breaker, or that of its origin, is open: its timers are held
    PAUSED = "paused"  # a user has paused it, or its namespace


class FlowStatus(Struct, frozen=True, kw_only=True, rename="camel"):
    """One flow, as one instance or the whole cluster knows it."""

    namespace: str
    flow_key: str
    origin: str  # scheme, host and port that was called last; "" if none was
    state: FlowState
    waiting: int
    in_flight: int
    until_ms: int | None = None  # wall time at which the breaker lets a call through again
    last_error: str | None = None
    rate: float | None = None
    concurrency: int | None = None


class FlowFilter(Struct, frozen=True):
    """Which flows a user lists. `namespace` None: all that the user may see."""

    namespace: str | None = None
    state: FlowState | None = None
    limit: int = 100
    cursor: str | None = None


class FlowQuery(Struct, frozen=True, kw_only=True):
    """Which flows an instance is asked for: those of `namespaces` (None: all), the first `limit` after a namespace and
    key. With `flow_key` only that one."""

    namespaces: tuple[str, ...] | None
    after: tuple[str, str] | None = None
    limit: int
    flow_key: str | None = None


_SEVERITY = (FlowState.CLOSED, FlowState.HALF_OPEN, FlowState.OPEN, FlowState.PAUSED)


def merged(one: FlowStatus, other: FlowStatus) -> FlowStatus:
    """One flow on two instances, as one: the counts are added, of the states the worse one counts."""
    worse = max(one, other, key=lambda flow: (_SEVERITY.index(flow.state), flow.until_ms or 0))
    return FlowStatus(
        namespace=one.namespace,
        flow_key=one.flow_key,
        origin=worse.origin or one.origin or other.origin,
        state=worse.state,
        waiting=one.waiting + other.waiting,
        in_flight=one.in_flight + other.in_flight,
        until_ms=worse.until_ms,
        last_error=worse.last_error or one.last_error or other.last_error,
        rate=worse.rate,
        concurrency=worse.concurrency,
    )
