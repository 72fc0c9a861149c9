"""What operators see of the flows in memory: which come next in a list, the status of one, the log of breakers."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from duetime.domain.flow_status import FlowState, FlowStatus
from duetime.engine.flow_queues import Flow, NamespaceShare
from duetime.telemetry import log

__all__ = ["BreakerLog", "next_flows", "status_of"]

_REPEAT_SECONDS = 59.0  # after the last line of the same flow: the longest pause by default is a minute
_PERIOD_SECONDS = 60.0
_REPEATED_MAX = 10  # lines in a period


def next_flows(namespaces: Iterable[NamespaceShare], after: tuple[str, str], limit: int) -> list[Flow]:
    """Up to `limit` flows by namespace and flow key, after the given one. The namespaces are in order."""
    after_name, after_key = after
    found: list[Flow] = []
    for share in namespaces:
        if len(found) >= limit:
            break
        if share.name >= after_name:
            keys = (key for key in share.flows if share.name > after_name or key > after_key)
            found += [share.flows[key] for key in heapq.nsmallest(limit - len(found), keys)]
    return found


def status_of(flow: Flow, now: float, now_ms: int, *, all_paused: bool) -> FlowStatus:
    """`now` is the time of the event loop, `now_ms` wall time."""
    state, until = FlowState.CLOSED, 0.0
    last_error: str | None = None
    for breaker in (flow.breaker, *(queue.part.origin.breaker for queue in flow.queues())):
        if breaker is None:
            continue
        last_error = last_error or breaker.last_error
        if breaker.is_open and state is not FlowState.OPEN:
            state = FlowState.OPEN if breaker.open_until > now else FlowState.HALF_OPEN
        until = max(until, breaker.open_until)
    if all_paused or flow.is_paused:
        state = FlowState.PAUSED
    limit = flow.limit
    return FlowStatus(
        namespace=flow.namespace.name,
        flow_key=flow.key,
        origin=flow.origin_name,
        state=state,
        waiting=flow.waiting,
        in_flight=flow.in_flight,
        until_ms=now_ms + int((until - now) * 1_000) if until > now else None,
        last_error=last_error,
        rate=None if limit is None else limit.rate,
        concurrency=None if limit is None else limit.limits.concurrency,
    )


class BreakerLog:
    """Logs each longer pause of a flow, and from time to time that it still fails. Such repeated lines are limited
    for the whole instance; those left out are counted."""

    def __init__(self) -> None:
        self._period_ends = 0.0
        self._repeated = 0
        self._left_out = 0

    def failed(self, flow: Flow, retry_after_seconds: float, now: float, *, has_grown: bool) -> None:
        """A call of the flow has failed. `has_grown`: its breaker is open for longer than the time before."""
        breaker = flow.breaker
        if breaker is None or not breaker.is_open:
            return
        if not (has_grown or (now - breaker.logged_at >= _REPEAT_SECONDS and self._may_repeat(now))):
            return
        breaker.logged_at = now
        log.warning(
            "flow %r of namespace %r %s (%s): its breaker is open, its timers are held for %g s%s; %d wait",
            flow.key,
            flow.namespace.name,
            "fails" if has_grown else "still fails",
            breaker.last_error,
            breaker.pause_seconds,
            " as asked for by Retry-After" if retry_after_seconds >= breaker.pause_seconds else "",
            flow.waiting,
        )

    def _may_repeat(self, now: float) -> bool:
        if now >= self._period_ends:
            if self._left_out:
                log.warning("flows still fail whose breakers are open: %d more lines were left out", self._left_out)
            self._period_ends = now + _PERIOD_SECONDS
            self._repeated = self._left_out = 0
        if self._repeated >= _REPEATED_MAX:
            self._left_out += 1
            return False
        self._repeated += 1
        return True
