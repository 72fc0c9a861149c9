"""Do the limits of flows hold for the whole simulated cluster? A record of the calls of limited flows, and the check.

A call counts from the moment at which flow control starts it until its delivery has ended. Calls of an instance that
was killed, or is not a live member any more, do not count: nobody can know of them. While an instance had to use its
share of a limit because no home answered, more is allowed (docs/adr/0030-limits-of-flows.md); these seconds are not
checked.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from duetime.domain.timer import FlowLimits
from duetime.testing.checker import Violation

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import Instance, SimulatedCluster

__all__ = ["LimitWatch"]

_PERIODS_S = (1.0, 4.0, 12.0)
# A share of a limit that was used without an answer of the home may be in use until its calls have ended.
_EXEMPT_S = 20.0
_CATCH_UP_S = 0.05


class LimitWatch:
    """The calls of limited flows in the namespace `default`, by flow key."""

    def __init__(self, cluster: SimulatedCluster, flows: dict[str, FlowLimits]) -> None:
        self._cluster = cluster
        self._flows = flows
        self._in_flight: dict[str, list[tuple[str, str]]] = defaultdict(list)  # name of the instance, its member id
        self._starts: dict[str, list[tuple[float, str, bool]]] = defaultdict(list)  # when, by which member, exempt?
        self._exempt_until = 0.0
        self._moved_at: list[float] = []  # when instances came or went, and with them the homes of flows
        self.violations: list[Violation] = []
        self._is_over = False

    def end(self) -> None:
        """The run is over: what its tasks still do while they are cancelled does not count."""
        self._is_over = True

    def moved(self) -> None:
        self._moved_at.append(self._cluster.loop.now)

    def started(self, instance: str, namespace: str, flow_key: str) -> tuple[str, str] | None:
        """None: the flow has no limit."""
        limits = self._flows.get(flow_key) if namespace == "default" else None
        if limits is None or self._is_over:
            return None
        cluster = self._cluster
        running = {other.name: other for other in cluster.running()}
        self._look_for_fallbacks(list(running.values()))
        call = instance, running[instance].engine.membership.instance_id if instance in running else ""
        self._in_flight[flow_key].append(call)
        is_exempt = cluster.loop.now < self._exempt_until
        self._starts[flow_key].append((cluster.loop.now, call[1], is_exempt))
        alive = {member.instance_id for member in cluster.database._members.values() if member.alive}
        count = sum(name in running and member in alive for name, member in self._in_flight[flow_key])
        if limits.concurrency is not None and count > limits.concurrency and not is_exempt:
            self._violated(flow_key, f"{count} calls in flight, {limits.concurrency} are allowed")
        return call

    def ended(self, flow_key: str, call: tuple[str, str]) -> None:
        self._in_flight[flow_key].remove(call)

    def check_rates(self) -> list[Violation]:
        for flow_key, limits in self._flows.items():
            if limits.rate is not None:
                self._check_rate(flow_key, limits.rate)
        return self.violations

    def _check_rate(self, flow_key: str, rate: float) -> None:
        starts = self._starts[flow_key]
        for period_s in _PERIODS_S:
            first = 0
            for last, (at, _, _) in enumerate(starts):
                while starts[first][0] <= at - period_s:
                    first += 1
                if any(is_exempt for _, _, is_exempt in starts[first : last + 1]):
                    continue
                count = last - first + 1
                moves = sum(at - period_s - 4 <= moved <= at for moved in self._moved_at)
                instances = len({member for _, member, _ in starts[first : last + 1]})
                if count > rate * (period_s + _CATCH_UP_S) + instances * (1 + moves):
                    self._violated(flow_key, f"{count} calls in the {period_s:g} s before {at:.3f}, at {rate:g}/s")
                    return

    def _look_for_fallbacks(self, instances: list[Instance]) -> None:
        for instance in instances:
            if instance.engine.flow_allowances.uses_shares:
                self._exempt_until = self._cluster.loop.now + _EXEMPT_S

    def _violated(self, flow_key: str, what: str) -> None:
        self.violations.append(Violation("R", flow_key, what, ""))
