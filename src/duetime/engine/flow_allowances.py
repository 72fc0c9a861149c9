"""How much of the limits of flows this instance may use: it asks the home of each flow, again and again.

A limit of a flow holds for the whole cluster, and the timers of a flow are spread over all instances. So an instance
that has timers waiting or calls in flight in a limited flow reports that to the home of the flow (`FlowHomes`), and may
use what the home answers for ALLOWANCE_MS, counted from before the request was sent. All flows of one home are in one
request. If this instance is the home, no request is needed. If no flow is limited, nothing runs.

As long as the home of a flow does not answer, this instance uses its share of the rate, and no concurrency at first. A
failover ends before `_FALLBACK_AFTER_MS`; after that, instances cannot reach each other, and the flow gets at least one
call on each instance.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol

from duetime.clock import Clock
from duetime.cluster.forwarding import NoPeers, Peer, Peers
from duetime.cluster.membership import Membership
from duetime.cluster.peer_protocol import FLOWS_PER_REQUEST_MAX
from duetime.domain.flow_shares import ALLOWANCE_MS, FlowAllowance, FlowReport
from duetime.domain.timer import shard_of
from duetime.engine.flow_homes import FlowHomes
from duetime.engine.flow_limits import LimitedFlow
from duetime.engine.namespaces import Namespaces
from duetime.errors import NotFound, Unserved
from duetime.store import ShardRow
from duetime.telemetry import FailureLog

__all__ = ["FlowAllowances", "LimitedCalls"]

_ROUND_S = 0.1
_ROUND_STARVED_S = 0.05  # while timers wait in a flow of which this instance may use nothing
_ROUND_MIN_S = 0.01  # flows that need an allowance at once are reported together
_REST_FACTOR = 9  # rounds take at most a tenth of the time, however many flows are limited
_FLOWS_PER_STEP = 500  # without a pause for other work
_FALLBACK_AFTER_MS = 10_000
_IDLE_ROUNDS = 2  # then the allowance is given back

FlowId = tuple[str, str]


class LimitedCalls(Protocol):
    """The part of flow control that is used here."""

    def limited_flows(self) -> Iterable[LimitedFlow]:
        """The limited flows that have timers waiting, which may be called, or calls in flight."""
        ...

    def set_allowance(
        self, namespace: str, flow_key: str, rate: float | None, concurrency: int | None, until_ms: int
    ) -> None:
        """From now on this instance may use so much, until this boot time."""
        ...


class _Allowance:
    """What this instance goes by in one flow."""

    __slots__ = ("answered_ms", "concurrency", "flow", "idle_rounds", "rate", "request", "sent_ms", "until_ms")

    def __init__(self, flow: LimitedFlow, now_ms: int) -> None:
        self.flow = flow
        self.rate = 0.0
        self.concurrency = 0
        self.until_ms = 0
        self.sent_ms = now_ms  # when the allowance was asked for
        self.answered_ms = now_ms  # when the home was last known to answer; at first: when it was first needed
        self.idle_rounds = 0
        self.request: object = None  # the last one; an answer to another one is out of date

    @property
    def flow_id(self) -> FlowId:
        return self.flow.namespace, self.flow.flow_key

    @property
    def is_starved(self) -> bool:
        flow = self.flow
        has_rate, has_concurrency = flow.rate is None or self.rate, flow.concurrency is None or self.concurrency
        return bool(flow.waiting and not (has_rate and has_concurrency))

    def report(self) -> FlowReport:
        flow = self.flow
        rate = 0.0 if flow.rate is None else self.rate
        concurrency = 0 if flow.concurrency is None else self.concurrency
        return FlowReport(flow.namespace, flow.flow_key, flow.waiting, flow.in_flight, rate, concurrency)


class FlowAllowances:
    """`rows` are all shards, as last read. `spawn` runs a task until the engine stops."""

    def __init__(
        self,
        homes: FlowHomes,
        calls: LimitedCalls,
        membership: Membership,
        namespaces: Namespaces,
        rows: Callable[[], Mapping[int, ShardRow]],
        clock: Clock,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.peers: Peers = NoPeers()
        self._homes = homes
        self._calls = calls
        self._membership = membership
        self._namespaces = namespaces
        self._rows = rows
        self._clock = clock
        self._spawn = spawn
        self._allowances: dict[FlowId, _Allowance] = {}
        self._asked: set[str] = set()  # the instances to which a request is running
        self._unable: set[str] = set()  # instances of a version that divides no limits
        self._share_until_ms = 0
        self._is_resting = True  # nothing is limited
        self._woken = asyncio.Event()
        self._log = FailureLog(
            "cannot ask the homes of limited flows for allowances; without one for 3 s this instance uses "
            "the limits divided by the number of members",
            "the homes of limited flows answer again",
        )

    def need(self, flow: LimitedFlow) -> None:
        """Timers wait in a flow without allowance: ask for one now. If no request is needed, it is set at once."""
        allowance = self._allowances.get((flow.namespace, flow.flow_key))
        if allowance is None:
            allowance = self._new(flow)
        allowance.flow, allowance.idle_rounds = flow, 0
        if self._decide_here(allowance, self._home_of(flow)) is not None and allowance.until_ms:
            # It is flow control that has forgotten it, or the limits have changed.
            self._set(allowance, allowance.rate, allowance.concurrency, allowance.until_ms)
        self._woken.set()

    def answer(self, sender: str, number: int, reports: list[FlowReport]) -> list[FlowAllowance]:
        """What another instance may use of the limits of flows whose home is this instance."""
        answers = self._homes.answer_peer(sender, number, reports)
        if self._is_resting:
            self._woken.set()  # from now on there is something to forget
        return answers

    @property
    def uses_shares(self) -> bool:
        """Does this instance use its share of a limit at the moment, because the home of the flow does not answer?"""
        return self._clock.boot_ms() < self._share_until_ms

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._is_resting = not self._allowances and not self._homes.flows
            if self._is_resting:
                await self._woken.wait()
                self._is_resting = False
            self._woken.clear()
            began = loop.time()
            is_starved = await self._round()
            rest_s = max(_ROUND_STARVED_S if is_starved else _ROUND_S, _REST_FACTOR * (loop.time() - began))
            await asyncio.sleep(_ROUND_MIN_S)
            try:
                async with asyncio.timeout(rest_s - _ROUND_MIN_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _round(self) -> bool:
        """Report all flows, and let allowances end that are too old. True: some flow has timers and no allowance."""
        is_starved = False
        self._homes.sweep()
        self._unable &= self._membership.alive.keys()
        waiting: dict[str, dict[str, deque[_Allowance]]] = {}  # by home and namespace
        self._update(self._calls.limited_flows())
        for number, allowance in enumerate(list(self._allowances.values()), 1):
            if number % _FLOWS_PER_STEP == 0:
                await asyncio.sleep(0)
            home = self._decide_here(allowance, self._home_of(allowance.flow))
            is_starved = is_starved or allowance.is_starved
            if home is not None and home not in self._asked:
                of_home = waiting.setdefault(home, {})
                of_home.setdefault(allowance.flow.namespace, deque()).append(allowance)
        for home, of_home in waiting.items():
            self._ask(home, of_home)
        return is_starved

    def _update(self, flows: Iterable[LimitedFlow]) -> None:
        """What waits and is in flight now. A flow that was idle for some rounds gives its allowance back."""
        active: set[FlowId] = set()
        for flow in flows:
            flow_id = flow.namespace, flow.flow_key
            active.add(flow_id)
            allowance = self._allowances.get(flow_id)
            if allowance is None:
                allowance = self._new(flow)
            allowance.flow = flow
            allowance.idle_rounds = 0
        for flow_id in self._allowances.keys() - active:
            allowance = self._allowances[flow_id]
            allowance.idle_rounds += 1
            allowance.flow = LimitedFlow(
                flow_id[0], flow_id[1], allowance.flow.rate, allowance.flow.concurrency, waiting=0, in_flight=0
            )
            if allowance.idle_rounds >= _IDLE_ROUNDS:
                self._set(allowance, 0.0, 0)

    def _new(self, flow: LimitedFlow) -> _Allowance:
        allowance = self._allowances[flow.namespace, flow.flow_key] = _Allowance(flow, self._clock.boot_ms())
        return allowance

    def _home_of(self, flow: LimitedFlow) -> str | None:
        """The instance that divides the limits of the flow. None: not known at the moment."""
        namespace = self._namespaces.known(flow.namespace)
        if namespace is None:
            return None
        shard_id = shard_of(flow.flow_key, namespace.num_shards)
        if self._homes.is_home(shard_id):
            return self._membership.instance_id
        row = self._rows().get(shard_id)
        if row is None or row.owner_id == self._membership.instance_id:
            return None
        return row.owner_id if row.owner_id in self._membership.alive else None

    def _decide_here(self, allowance: _Allowance, home: str | None) -> str | None:
        """Set the allowance without asking another instance, if that is possible. Returns the home to ask."""
        now_ms = self._clock.boot_ms()
        if home == self._membership.instance_id:
            report = allowance.report()
            self._apply(allowance, report, self._homes.answer(home, report), now_ms)
            home = None
        self._let_end(allowance, home, now_ms)
        return home

    def _let_end(self, allowance: _Allowance, home: str | None, now_ms: int) -> None:
        """Use a share of the limits if the home of the flow has not answered in time."""
        members = max(1, len(self._membership.alive))
        is_unable = home in self._unable
        is_over = now_ms - allowance.sent_ms >= ALLOWANCE_MS
        if allowance.idle_rounds >= _IDLE_ROUNDS:
            if is_over:  # the home has forgotten it by now
                self._forget(allowance)
        elif is_over or is_unable or (members == 1 and home is None):
            rate, concurrency = allowance.flow.rate or 0.0, allowance.flow.concurrency or 0
            if members > 1:
                rate /= members
                waits = not is_unable and now_ms - allowance.answered_ms < _FALLBACK_AFTER_MS
                concurrency = 0 if waits or not concurrency else max(1, concurrency // members)
                self._share_until_ms = now_ms + ALLOWANCE_MS
            self._set(allowance, rate, concurrency, now_ms + ALLOWANCE_MS)

    def _apply(self, allowance: _Allowance, report: FlowReport, answer: FlowAllowance, sent_ms: int) -> None:
        flow = allowance.flow
        if answer.undecided:
            return
        if allowance.idle_rounds >= _IDLE_ROUNDS:
            if not (report.in_flight or report.rate or report.concurrency):  # the home knows that it was given back
                self._forget(allowance)
            return
        allowance.sent_ms = allowance.answered_ms = sent_ms
        rate = flow.rate or 0.0 if answer.rate is None else answer.rate
        concurrency = flow.concurrency or 0 if answer.concurrency is None else answer.concurrency
        self._set(allowance, rate, concurrency, sent_ms + ALLOWANCE_MS)

    def _is_known(self, allowance: _Allowance) -> bool:
        return self._allowances.get(allowance.flow_id) is allowance

    def _forget(self, allowance: _Allowance) -> None:
        """Its flow may have a new one by now: that one stays."""
        if self._is_known(allowance):
            del self._allowances[allowance.flow_id]

    def _set(self, allowance: _Allowance, rate: float, concurrency: int, until_ms: int = 0) -> None:
        allowance.rate, allowance.concurrency, allowance.until_ms = rate, concurrency, until_ms
        flow = allowance.flow
        self._calls.set_allowance(
            flow.namespace,
            flow.flow_key,
            None if flow.rate is None else rate,
            None if flow.concurrency is None else concurrency,
            until_ms,
        )

    # --- requests ---------------------------------------------------------------------------------

    def _ask(self, home: str, waiting: dict[str, deque[_Allowance]]) -> None:
        """Start a request with as many flows as it may have; namespaces take turns. The others wait for the next."""
        member = self._membership.alive.get(home)
        if member is None:
            return
        chosen: list[_Allowance] = []
        while waiting and len(chosen) < FLOWS_PER_REQUEST_MAX:
            name = next(iter(waiting))
            queue = waiting.pop(name)
            allowance = queue.popleft()
            if self._is_known(allowance):  # otherwise it was forgotten in this round
                chosen.append(allowance)
            if queue:
                waiting[name] = queue
        if not chosen:
            return
        for allowance in chosen:  # to the end, so that those left out come first in the next round
            self._allowances[allowance.flow_id] = self._allowances.pop(allowance.flow_id)
        self._asked.add(home)
        peer = Peer(member.instance_id, member.address, member.secret)
        self._spawn(self._request(peer, chosen, more=bool(waiting)))

    async def _request(self, peer: Peer, allowances: list[_Allowance], *, more: bool) -> None:
        sent_ms = self._clock.boot_ms()
        request = object()
        reports = [allowance.report() for allowance in allowances]
        for allowance in allowances:
            allowance.request = request
        try:
            answers = await self.peers.flow_allowances(peer, reports)
        except NotFound:
            self._unable.add(peer.instance_id)
        except Unserved as error:
            self._log.failed(error, self._clock.boot_ms())
        else:
            self._log.recovered()
            for allowance, report, answer in zip(allowances, reports, answers, strict=True):
                if allowance.request is request:
                    self._apply(allowance, report, answer, sent_ms)
        finally:
            self._asked.discard(peer.instance_id)
            if more:
                self._woken.set()
