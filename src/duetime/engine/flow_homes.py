"""What an instance decides as the home of limited flows: how much each instance may use of their limits.

The home of a flow is the owner of the shard that its key belongs to, so there is one at a time. It knows only what
instances report to it. A new home hears from all that still go by an allowance of the home before within ALLOWANCE_MS;
until then it raises no allowance (docs/adr/0030-limits-of-flows.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

from duetime.clock import Clock
from duetime.cluster.membership import Membership
from duetime.config import Delivery
from duetime.domain.flow_shares import ALLOWANCE_MS, FlowAllowance, FlowReport, FlowShare
from duetime.domain.timer import Namespace, shard_of
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Shard

__all__ = ["FlowHomes"]

_FLOWS_MAX = 100_000
_SWEPT_PER_ROUND = 1_000
_UNDECIDED = FlowAllowance(undecided=True)

FlowId = tuple[str, str]  # namespace and flow key


class _Home:
    """The flows of one shard, since this instance owns it."""

    __slots__ = ("flows", "shard", "since_ms")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.since_ms = shard.fenced_at_ms  # a recovery that comes later does not change it
        self.flows: dict[FlowId, FlowShare] = {}


class FlowHomes:
    """`shards` are those that this instance owns."""

    def __init__(
        self,
        config: Delivery,
        membership: Membership,
        namespaces: Namespaces,
        shards: Mapping[int, Shard],
        clock: Clock,
    ) -> None:
        self._config = config
        self._membership = membership
        self._namespaces = namespaces
        self._shards = shards
        self._clock = clock
        self._homes: dict[int, _Home] = {}
        self._flows = 0
        self._flows_of: Counter[str] = Counter()  # by namespace
        self._last_numbers: dict[str, int] = {}  # of the requests of each sender
        self._numbered_for = ""  # the id of this instance to which these requests were sent

    @property
    def flows(self) -> int:
        """How many flows this instance remembers as their home."""
        return self._flows

    def is_home(self, shard_id: int) -> bool:
        return shard_id in self._shards and self._membership.may_fire()

    def limits_of(self, namespace: Namespace, flow_key: str) -> tuple[float | None, int | None]:
        """Rate and concurrency of the flow in the whole cluster. None: no limit."""
        limits = namespace.flows.get(flow_key)
        rate_default = self._config.rate_per_flow or None
        if limits is None:
            return rate_default, None
        return rate_default if limits.rate is None else limits.rate, limits.concurrency

    def answer_peer(self, sender: str, number: int, reports: list[FlowReport]) -> list[FlowAllowance]:
        """The allowances of another instance. Nothing is decided for one that is not known as a live member, or whose
        request was overtaken by a later one: it says what was true before."""
        if self._numbered_for != self._membership.instance_id:  # joined again: senders number from 1 for the new id
            self._numbered_for, self._last_numbers = self._membership.instance_id, {}
        if sender not in self._membership.alive or number <= self._last_numbers.get(sender, 0):
            return [_UNDECIDED for _ in reports]
        self._last_numbers[sender] = number
        return [self.answer(sender, report) for report in reports]

    def answer(self, instance: str, report: FlowReport) -> FlowAllowance:
        namespace = self._namespaces.known(report.namespace)
        if namespace is None:
            return _UNDECIDED
        home = self._home(shard_of(report.flow_key, namespace.num_shards))
        if home is None:
            return _UNDECIDED
        flow_id = report.namespace, report.flow_key
        share = home.flows.get(flow_id) or self._new_share(home, flow_id)
        if share is None:
            return _UNDECIDED
        now_ms = self._clock.boot_ms()
        rate, concurrency = self.limits_of(namespace, report.flow_key)
        is_alone = len(self._membership.alive) == 1
        may_raise = is_alone or now_ms - home.since_ms > ALLOWANCE_MS
        allowance = share.report(instance, report, rate, concurrency, now_ms, may_raise=may_raise)
        if share.is_over(now_ms):
            self._remove(home, flow_id)
        return allowance

    def sweep(self) -> None:
        """Forget what is over: homes that moved, instances that have gone, flows that nobody reports any more. A part
        of them in each call."""
        for shard_id, home in list(self._homes.items()):
            if self._shards.get(shard_id) is not home.shard:
                self._close(shard_id, home)
        now_ms, alive = self._clock.boot_ms(), self._membership.alive.keys()
        for gone in self._last_numbers.keys() - alive:
            del self._last_numbers[gone]
        each = max(1, _SWEPT_PER_ROUND // max(1, len(self._homes)))
        for home in list(self._homes.values()):
            for flow_id in list(islice(home.flows, each)):
                share = home.flows.pop(flow_id)
                home.flows[flow_id] = share  # to the end: the next call looks at others
                share.keep_only(alive, now_ms)
                if share.is_over(now_ms):
                    self._remove(home, flow_id)

    def _home(self, shard_id: int) -> _Home | None:
        shard = self._shards.get(shard_id)
        if shard is None or not self._membership.may_fire():
            return None
        home = self._homes.get(shard_id)
        if home is not None and home.shard is not shard:
            self._close(shard_id, home)
            home = None
        if home is None:
            home = self._homes[shard_id] = _Home(shard)
        return home

    def _new_share(self, home: _Home, flow_id: FlowId) -> FlowShare | None:
        """None: too many flows. A namespace may have as many as are still free, so that some always remain
        for the others."""
        if self._flows_of[flow_id[0]] >= _FLOWS_MAX - self._flows:
            return None
        self._flows += 1
        self._flows_of[flow_id[0]] += 1
        share = home.flows[flow_id] = FlowShare()
        return share

    def _remove(self, home: _Home, flow_id: FlowId) -> None:
        del home.flows[flow_id]
        self._flows -= 1
        self._flows_of[flow_id[0]] -= 1
        if not self._flows_of[flow_id[0]]:
            del self._flows_of[flow_id[0]]

    def _close(self, shard_id: int, home: _Home) -> None:
        for flow_id in list(home.flows):
            self._remove(home, flow_id)
        del self._homes[shard_id]
