"""The fire loop: one integer heap and one wake-up for the whole instance, and what happens to a due timer.

A ticket is `execute_at_ms << 32 | counter`, so the heap compares plain integers and timers of one
millisecond go in the order they came. A ticket that is no longer in `_armed` is skipped when it surfaces.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable

from duetime.cluster.membership import Membership
from duetime.config import Delivery
from duetime.delivery import Attempt, Deliverer
from duetime.domain.settle import AttemptResult, Contact, Settlement, armed_at, missed, settle
from duetime.domain.timer import Namespace, Outcome
from duetime.engine.flow import Flow
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Entry, Phase
from duetime.errors import NotFound
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["FireLoop", "Firing"]

_COUNTER_BITS = 32
_COUNTER_MASK = (1 << _COUNTER_BITS) - 1
_FIRED_PER_TURN = 256
_SWEEP_SECONDS = 1.0
_SPREAD_SECONDS = 30.0  # over which parked timers of a namespace that is not known come back
_QUEUED = Phase.QUEUED


class Firing:
    """One due timer on its way through flow and delivery."""

    __slots__ = ("begun", "entry", "fence", "loop", "namespace")

    def __init__(self, entry: Entry, namespace: Namespace, loop: FireLoop) -> None:
        self.entry = entry
        self.namespace = namespace  # as read when the attempt is made; the outcome is settled with the same settings
        self.loop = loop
        self.fence = entry.shard.fence  # as the request will say; it may change while the request waits
        self.begun = False

    def begin(self) -> int | None:
        """Right before the first byte: lease valid, shard still owned, timer still this generation, and due."""
        loop, entry = self.loop, self.entry
        if loop.stopped or not loop.membership.may_fire() or entry.shard.fence is not self.fence:
            return None
        now_ms = loop.membership.now_ms()
        if now_ms < entry.timer.execute_at_ms or not entry.shard.begin(entry, now_ms, again=self.begun):
            return None
        if not self.begun:
            self.begun = True
            loop.telemetry.attempts.value += 1
            if not entry.timer.attempts:
                loop.telemetry.lateness.observe((now_ms - entry.timer.scheduled_at_ms) / 1_000)
        return now_ms


class FireLoop:
    def __init__(
        self,
        config: Delivery,
        membership: Membership,
        deliverer: Deliverer,
        telemetry: Telemetry,
        rng: random.Random,
        namespaces: Namespaces,
        read_namespaces: Callable[[], None],
        congested: Callable[[], bool],
    ) -> None:
        self.membership = membership
        self.telemetry = telemetry
        self.stopped = False
        self.flow: Flow[Firing] = Flow(
            config,
            deliver=self._deliver,
            wanted=lambda firing: firing.entry.phase is _QUEUED and not firing.entry.shard.draining,
            done=self._done,
            congested=congested,
        )
        self._deliverer = deliverer
        self._rng = rng
        self._namespaces = namespaces
        self._read_namespaces = read_namespaces
        self._without_namespace: list[Entry] = []  # due, but their namespace has to be read first
        self._unknown_namespace_log = FailureLog(
            "due timers are held: their namespace is not known", "all namespaces of due timers are known again"
        )
        self._heap: list[int] = []
        self._armed: dict[int, Entry] = {}
        self._counter = 0
        self._loop = asyncio.get_running_loop()
        self._wake_at = float("inf")
        self._waker: asyncio.TimerHandle | None = None

    # --- the heap ---------------------------------------------------------------------------------

    def arm(self, entry: Entry) -> None:
        self._counter = (self._counter + 1) & _COUNTER_MASK
        ticket = entry.ticket = entry.timer.execute_at_ms << _COUNTER_BITS | self._counter
        self._armed[ticket] = entry
        heap = self._heap
        heapq.heappush(heap, ticket)
        if heap[0] == ticket:
            self._wake_for(entry.timer.execute_at_ms)

    def disarm(self, entry: Entry) -> None:
        self._armed.pop(entry.ticket, None)
        if len(self._heap) > 2 * len(self._armed) + 1_000:
            self._heap = list(self._armed)
            heapq.heapify(self._heap)

    def armed_tickets(self) -> list[int]:
        return list(self._armed)

    def oldest_due_ms(self, now_ms: int) -> int | None:
        """How long the first timer that should have been fired has been waiting for it, here or at its destination."""
        while self._heap and self._heap[0] not in self._armed:
            heapq.heappop(self._heap)
        oldest_ms = self._heap[0] >> _COUNTER_BITS if self._heap else now_ms
        for firing in self.flow.heads():
            if firing.entry.phase is _QUEUED:
                oldest_ms = min(oldest_ms, firing.entry.timer.execute_at_ms)
        for entry in self._without_namespace[:1]:  # held in the order they were due
            oldest_ms = min(oldest_ms, entry.timer.execute_at_ms)
        return now_ms - oldest_ms if oldest_ms < now_ms else None

    # --- the wake-up ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Look again now: the lease was renewed, or a second has passed."""
        self._wake_in(0.0)

    def _wake_for(self, due_ms: int) -> None:
        self._wake_in(min(max(0, due_ms - self.membership.now_ms()) / 1_000, _SWEEP_SECONDS))

    def _wake_in(self, seconds: float) -> None:
        at = self._loop.time() + seconds
        if self.stopped or (self._waker is not None and self._wake_at <= at):
            return
        if self._waker is not None:
            self._waker.cancel()
        self._wake_at = at
        self._waker = self._loop.call_at(at, self._turn)

    def _turn(self) -> None:
        """Fire what is due, a bounded number at a time, so that nothing else has to wait for a burst."""
        self._waker = None
        if self.stopped:
            return
        heap, armed = self._heap, self._armed
        if self.membership.may_fire():
            now_ms = self.membership.now_ms()
            due_before = (now_ms + 1) << _COUNTER_BITS
            for _ in range(_FIRED_PER_TURN):
                if not heap or heap[0] >= due_before:
                    break
                entry = armed.pop(heapq.heappop(heap), None)
                if entry is not None:
                    self._try_fire(entry, now_ms)
            heap = self._heap
            if heap:
                self._wake_for(heap[0] >> _COUNTER_BITS)

    def stop(self) -> None:
        """Fire nothing more; deliveries in flight go on."""
        self.stopped = True
        self.flow.stop()
        if self._waker is not None:
            self._waker.cancel()

    # --- one timer --------------------------------------------------------------------------------

    def _try_fire(self, entry: Entry, now_ms: int, *, reread: bool = False) -> None:
        try:
            self._fire(entry, now_ms, reread)
        except Exception as error:  # one timer that cannot even be queued must not stop the others
            self._broke(entry, error)

    def _fire(self, entry: Entry, now_ms: int, reread: bool) -> None:
        """`reread`: the namespaces were read after this timer was due."""
        shard, timer = entry.shard, entry.timer
        if entry.phase is not Phase.ARMED:
            return
        if shard.recovering:
            shard.stall(entry)
            return
        if shard.draining:
            return  # on its way to another instance, which will find it due
        namespace = self._namespaces.known(timer.namespace)
        if namespace is None or (namespace.deleted and not reread):
            # Not read yet, or created again since the last read. Nothing is sent without its secrets and its policy.
            self._hold(entry)
            return
        if timer.extras.missed is not None:
            settlement = missed(timer, namespace, now_ms)
            if settlement is not None:
                self._count_end(settlement)
                shard.end_unfired(entry, settlement)
                return
        entry.phase = _QUEUED
        firing = Firing(entry, namespace, self)
        self.flow.submit(firing, self._deliverer.destination(timer.callback_url), timer.namespace)

    def _hold(self, entry: Entry) -> None:
        self._without_namespace.append(entry)
        self._read_namespaces()

    @property
    def waiting(self) -> int:
        """Due timers that wait for their destination, or for their namespace to be read."""
        return self.flow.waiting + len(self._without_namespace)

    @property
    def holds_any(self) -> bool:
        """Are there due timers whose namespace has to be read first?"""
        return bool(self._without_namespace)

    def take_held(self) -> list[Entry]:
        """Returns those timers and removes them. The caller reads the namespaces and then calls `fire_held`."""
        held, self._without_namespace = self._without_namespace, []
        return held

    def fire_held(self, entries: list[Entry], *, reread: bool) -> None:
        """`reread`: the namespaces were read after these timers were taken. Those of unknown ones stay held."""
        reread = reread and self.membership.may_fire()
        unknown: set[str] = set()
        for entry in entries:
            if entry.phase is not Phase.ARMED:
                continue  # replaced, deleted, or lost with its shard
            if reread and self._namespaces.known(entry.timer.namespace) is not None:
                self._try_fire(entry, self.membership.now_ms(), reread=True)
            else:
                unknown.add(entry.timer.namespace)
                self._without_namespace.append(entry)
        if unknown:
            self._unknown_namespace_log.failed(NotFound(", ".join(sorted(unknown)[:10])), self.membership.boot_ms())
        else:
            self._unknown_namespace_log.recovered()

    def _broke(self, entry: Entry, error: Exception) -> None:
        """It counts as an attempt that failed, or it would be forgotten until the next restart."""
        timer = entry.timer
        log.exception("unexpected error while firing timer %r of namespace %r", timer.timer_id, timer.namespace)
        namespace = self._namespaces.known(timer.namespace)
        if namespace is None:
            self._hold(entry)
            return
        entry.phase = _QUEUED
        try:
            self._done(Firing(entry, namespace, self), AttemptResult(Contact.BROKEN, error=f"internal: {error!r}"))
        except Exception:
            log.exception("unexpected error while recording that failed attempt")

    async def _deliver(self, firing: Firing) -> AttemptResult:
        entry = firing.entry
        timer, fence = entry.timer, firing.fence
        # It may have waited long for its destination: use the current settings.
        firing.namespace = self._namespaces.known(timer.namespace) or firing.namespace
        attempt = Attempt(timer, firing.namespace, f"{fence.shard_id}.{fence.version}", firing.begin)
        try:
            return await self._deliverer.deliver(attempt)
        except Exception as error:  # one timer that breaks its deliverer must not stop the others
            log.exception("unexpected error while delivering timer %r of namespace %r", timer.timer_id, timer.namespace)
            return AttemptResult(Contact.BROKEN, error=f"internal: {error!r}")

    def _done(self, firing: Firing, result: AttemptResult) -> None:
        entry = firing.entry
        shard, timer = entry.shard, entry.timer
        self.telemetry.attempt_results.add(result.contact.value)
        if result.contact is Contact.NOT_SENT:
            shard.not_sent(entry, begun=firing.begun)
            return
        now_ms = self.membership.now_ms()
        if not firing.begun and not shard.begin(entry, now_ms, again=False):
            shard.not_sent(entry, begun=False)  # it could not be reached, and does not count now; perhaps later
            return
        settlement = settle(
            timer,
            result,
            firing.namespace,
            started_at_ms=entry.started_at_ms,
            now_ms=max(now_ms, entry.started_at_ms),
            jitter=self._rng.random(),
        )
        if shard.settle(entry, settlement):
            self._count_end(settlement)
        else:
            self.telemetry.stale_outcomes.value += 1

    def _count_end(self, settlement: Settlement) -> None:
        if settlement.reached is not None:
            outcome: Outcome = settlement.reached.outcome
            self.telemetry.outcomes.add(outcome.value)

    # --- memory is short --------------------------------------------------------------------------

    def park(self, count: int) -> int:
        """Put due timers whose destination will not take them soon back to the store, for later.

        No attempt is spent. The more of a destination are parked, the wider they are spread.
        """
        parked = 0
        now_ms = self.membership.now_ms()
        for firing, spread_seconds in self.flow.take_back(count):
            entry = firing.entry
            if entry.phase is not _QUEUED:
                continue
            self._park(entry, now_ms, spread_seconds)
            parked += 1
        while self._without_namespace and parked < count:
            entry = self._without_namespace.pop()  # the last ones first
            if entry.phase is Phase.ARMED:
                self._park(entry, now_ms, _SPREAD_SECONDS)
                parked += 1
        self.telemetry.parked.value += parked
        return parked

    def _park(self, entry: Entry, now_ms: int, spread_seconds: float) -> None:
        later_ms = now_ms + int((30 + self._rng.random() * spread_seconds) * 1_000)
        entry.shard.end_unfired(entry, Settlement(rearmed=armed_at(entry.timer, later_ms, occurrence_done=False)))
