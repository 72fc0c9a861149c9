"""The fire loop: when timers are due, one wake-up for the whole instance, and what happens to a due timer.

Each namespace has a heap of tickets (`due_heaps.py`), so that many timers of one that are due at the same instant do
not delay those of others. A ticket is `execute_at_ms << 32 | counter`: the heaps compare plain integers, and timers of
the same millisecond fire in the order they were armed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from duetime.cluster.membership import Membership
from duetime.config import Delivery
from duetime.delivery import Attempt, Deliverer
from duetime.domain.settle import NO_ATTEMPT, AttemptResult, Contact, Settlement, armed_at, caught_up, missed, settle
from duetime.domain.timer import Namespace, Outcome
from duetime.engine.due_heaps import COUNTER_BITS, DueHeaps
from duetime.engine.flow import FlowControl
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Entry, Phase, ShardState
from duetime.errors import NotFound
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["FireLoop", "Firing"]

_COUNTER_MASK = (1 << COUNTER_BITS) - 1
_FIRED_PER_WAKE_UP = 256
_SWEEP_SECONDS = 1.0
_SPREAD_SECONDS = 30.0  # over which the new due times of parked timers of an unknown namespace are spread
_QUEUED, _OPEN = Phase.QUEUED, ShardState.OPEN


class Firing:
    """One due timer, from flow control to the result of its attempt."""

    __slots__ = ("begun", "entry", "fence", "loop", "namespace")

    def __init__(self, entry: Entry, namespace: Namespace, loop: FireLoop) -> None:
        self.entry = entry
        self.namespace = namespace  # as known when the attempt is made; its result is settled with the same settings
        self.loop = loop
        self.fence = entry.shard.fence  # the request carries it; the shard's fence may change while the timer waits
        self.begun = False

    def begin(self) -> int | None:
        """Right before the first byte: the time to stamp on the request, or None if the attempt must not be made. It
        may be made if the lease is valid, the shard is still owned, and the timer is due and has not changed."""
        loop, entry = self.loop, self.entry
        if loop.stopped or not loop.membership.may_fire() or entry.shard.fence is not self.fence:
            return None
        now_ms = loop.membership.now_ms()
        if now_ms < entry.timer.execute_at_ms or not entry.shard.begin(entry, now_ms, again=self.begun):
            return None
        if not self.begun:
            self.begun = True
            # A write that was not applied after all may have queued the timer again while this call was being made.
            loop.flow.discard(entry.ticket)
            loop.telemetry.attempts.value += 1
            if not entry.timer.attempts:
                loop.telemetry.lateness.observe(max(now_ms - entry.timer.late_from_ms, 0) / 1_000)
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
        self.flow: FlowControl[Firing] = FlowControl(
            config,
            deliver=self._deliver,
            wanted=lambda firing: firing.entry.phase is _QUEUED and firing.entry.shard.state is _OPEN,
            done=self._attempt_done,
            congested=congested,
        )
        self._deliverer = deliverer
        self._rearm_interval_min_ms = config.rearm_interval_min.ms
        self._rng = rng
        self._namespaces = namespaces
        self._read_namespaces = read_namespaces
        self._without_namespace: dict[int, Entry] = {}  # by ticket: due, but their namespace has to be read first
        self._being_read: dict[int, Entry] = {}  # the same while their namespaces are read
        self._unknown_namespace_log = FailureLog(
            "due timers are held because their namespace is not known",
            "the namespaces of all due timers are known again",
        )
        self._due: DueHeaps[Entry] = DueHeaps()
        self._counter = 0
        self._loop = asyncio.get_running_loop()
        self._wake_at = float("inf")
        self._waker: asyncio.TimerHandle | None = None

    # --- the heap ---------------------------------------------------------------------------------

    def arm(self, entry: Entry) -> None:
        self._counter = (self._counter + 1) & _COUNTER_MASK
        timer = entry.timer
        ticket = entry.ticket = timer.execute_at_ms << COUNTER_BITS | self._counter
        if self._due.add(ticket, timer.namespace, entry):
            self._wake_for(timer.execute_at_ms)

    def disarm(self, entry: Entry) -> None:
        if not self._due.remove(entry.ticket, entry.timer.namespace):
            self._without_namespace.pop(entry.ticket, None)
            self._being_read.pop(entry.ticket, None)

    def discard(self, entry: Entry) -> None:
        """A queued timer was deleted, replaced, or its shard drains or was dropped: it must not wait in its flow."""
        self.flow.discard(entry.ticket)

    def armed_tickets(self) -> list[int]:
        return self._due.tickets()

    def oldest_due_ms(self, now_ms: int) -> int | None:
        """For how long the earliest due timer has been waiting: until it is fired, for its namespace, or in its flow.
        None: no timer is due."""
        held = (min(tickets, default=None) for tickets in (self._without_namespace, self._being_read))
        tickets = (self._due.first(), self.flow.oldest_ticket(), *held)
        oldest = min((ticket for ticket in tickets if ticket is not None), default=None)
        oldest_ms = now_ms if oldest is None else oldest >> COUNTER_BITS
        return now_ms - oldest_ms if oldest_ms < now_ms else None

    def apply_limits(self) -> None:
        """The namespaces were read or changed: their limits and pauses hold from now on."""
        for namespace in self._namespaces.cached():
            self.flow.set_limits(namespace)

    # --- pause ------------------------------------------------------------------------------------

    def pause(self) -> None:
        """Start no deliveries until `resume`. Those in flight go on; due timers are held."""
        self.flow.set_paused(True)

    def resume(self) -> None:
        self.flow.set_paused(False)

    # --- the wake-up ------------------------------------------------------------------------------

    def wake(self) -> None:
        """Check now what is due: the lease was renewed, or a second has passed."""
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
        self._waker = self._loop.call_at(at, self._fire_due)

    def _fire_due(self) -> None:
        """Fire what is due, a limited number at a time, so that other work does not wait for a burst."""
        self._waker = None
        if self.stopped:
            return
        if self.membership.may_fire():
            now_ms = self.membership.now_ms()
            for entry in self._due.pop_due((now_ms + 1) << COUNTER_BITS, _FIRED_PER_WAKE_UP):
                self._try_fire(entry, now_ms)
            following = self._due.next_ticket()
            if following is not None:
                self._wake_for(following >> COUNTER_BITS)

    def stop(self) -> None:
        """Start no more deliveries; those in flight go on."""
        self.stopped = True
        self.flow.stop()
        if self._waker is not None:
            self._waker.cancel()

    # --- one timer --------------------------------------------------------------------------------

    def _try_fire(self, entry: Entry, now_ms: int, *, reread: bool = False) -> None:
        try:
            self._fire(entry, now_ms, reread)
        except Exception as error:  # a timer that cannot be queued must not stop the others
            self._firing_failed(entry, error)

    def _fire(self, entry: Entry, now_ms: int, reread: bool) -> None:
        """`reread`: the namespaces were read after this timer was due."""
        shard, timer = entry.shard, entry.timer
        if entry.phase is not Phase.ARMED:
            return
        if shard.recovering:
            shard.wait_for_recovery(entry)
            return
        if shard.state is not _OPEN:
            return  # its next owner fires it
        namespace = self._namespaces.known(timer.namespace)
        if namespace is None or (namespace.deleted and not reread):
            # Not read yet, or created again since the last read. Without its secrets and its policy nothing is sent.
            self._hold(entry)
            return
        if timer.extras.missed is not None or timer.extras.later is not None:
            settlement = missed(timer, namespace, now_ms)
            if settlement is not None:
                self._count_outcome(settlement)
                shard.settle_without_attempt(entry, settlement)
                return
        entry.phase = _QUEUED
        origin = self._deliverer.origin(timer.callback_url)
        self.flow.submit(Firing(entry, namespace, self), entry.ticket, timer.namespace, timer.flow_key, origin)

    def _hold(self, entry: Entry) -> None:
        self._without_namespace[entry.ticket] = entry
        self._read_namespaces()

    @property
    def waiting(self) -> int:
        """Due timers that are held, or wait for their namespace to be read."""
        return self.flow.waiting + len(self._without_namespace) + len(self._being_read)

    @property
    def holds_any(self) -> bool:
        """Are there due timers whose namespace has to be read first?"""
        return bool(self._without_namespace)

    def take_held(self) -> list[Entry]:
        """Returns those timers. The caller reads the namespaces and then calls `fire_held` with them."""
        held, self._without_namespace = self._without_namespace, {}
        self._being_read.update(held)
        return list(held.values())

    def fire_held(self, entries: list[Entry], *, reread: bool) -> None:
        """`reread`: the namespaces were read after these timers were taken. Timers of unknown namespaces stay held."""
        reread = reread and self.membership.may_fire()
        unknown: set[str] = set()
        for entry in entries:
            if self._being_read.pop(entry.ticket, None) is None:
                continue  # it was replaced or deleted, or its shard was dropped
            if reread and self._namespaces.known(entry.timer.namespace) is not None:
                self._try_fire(entry, self.membership.now_ms(), reread=True)
            else:
                unknown.add(entry.timer.namespace)
                self._without_namespace[entry.ticket] = entry
        if unknown:
            names = ", ".join(map(repr, sorted(unknown)[:10]))
            self._unknown_namespace_log.failed(NotFound(names), self.membership.boot_ms())
        else:
            self._unknown_namespace_log.recovered()

    def _firing_failed(self, entry: Entry, error: Exception) -> None:
        """Count it as an attempt that failed: otherwise the timer would not be tried again before a restart."""
        timer = entry.timer
        log.exception("unexpected error while firing timer %r of namespace %r", timer.timer_id, timer.namespace)
        namespace = self._namespaces.known(timer.namespace)
        if namespace is None:
            self._hold(entry)
            return
        entry.phase = _QUEUED
        try:
            self._attempt_done(
                Firing(entry, namespace, self), AttemptResult(Contact.BROKEN, error=f"internal: {error!r}")
            )
        except Exception:
            log.exception("unexpected error while recording that failed attempt")

    async def _deliver(self, firing: Firing) -> AttemptResult:
        entry = firing.entry
        timer, fence = entry.timer, firing.fence
        # It may have been held for long: use the settings as they are now.
        firing.namespace = self._namespaces.known(timer.namespace) or firing.namespace
        if timer.extras.later is not None and self._is_caught_up(firing):
            return AttemptResult(Contact.NOT_SENT)
        attempt = Attempt(timer, firing.namespace, f"{fence.shard_id}.{fence.version}", firing.begin)
        try:
            return await self._deliverer.deliver(attempt)
        except Exception as error:  # a timer that makes its deliverer raise must not stop the others
            log.exception("unexpected error while delivering timer %r of namespace %r", timer.timer_id, timer.namespace)
            return AttemptResult(Contact.BROKEN, error=f"internal: {error!r}")

    def _is_caught_up(self, firing: Firing) -> bool:
        """Has the occurrence given way to a later one, while the timer waited in its flow?"""
        entry, shard = firing.entry, firing.entry.shard
        if entry.phase is not _QUEUED or shard.state is not _OPEN or shard.recovering or not self.membership.may_fire():
            return False
        settlement = caught_up(entry.timer, firing.namespace, self.membership.now_ms())
        if settlement is None:
            return False
        self._count_outcome(settlement)
        shard.settle_without_attempt(entry, settlement)
        return True

    def _attempt_done(self, firing: Firing, result: AttemptResult) -> None:
        entry = firing.entry
        shard, timer = entry.shard, entry.timer
        self.telemetry.attempt_results.add(result.contact.value)
        if not firing.begun:
            # A write that was not applied may have made the timer due again, while this call was not begun yet.
            self.flow.discard(entry.ticket)
        if result.contact in NO_ATTEMPT:
            # After a shortage its flow waits for a moment, and with it this timer; while a broker is away, its origin.
            shard.not_sent(entry, begun=firing.begun)
            return
        now_ms = self.membership.now_ms()
        if not firing.begun and not shard.begin(entry, now_ms, again=False):
            shard.not_sent(entry, begun=False)  # the shard may not make attempts now, so this one does not count
            return
        settlement = settle(
            timer,
            result,
            firing.namespace,
            started_at_ms=entry.started_at_ms,
            now_ms=max(now_ms, entry.started_at_ms),
            jitter=self._rng.random,
            rearm_interval_min_ms=self._rearm_interval_min_ms,
        )
        if shard.settle(entry, settlement):
            self._count_outcome(settlement)
        else:
            self.telemetry.stale_outcomes.value += 1

    def _count_outcome(self, settlement: Settlement) -> None:
        if settlement.reached is not None:
            outcome: Outcome = settlement.reached.outcome
            self.telemetry.outcomes.add(outcome.value)

    # --- parking ----------------------------------------------------------------------------------

    def park(self, count: int) -> int:
        """Park up to `count` held timers that will not be called soon: put them back to the store, due
        later. Returns how many.

        No attempt is spent. The more timers of a flow are parked, the wider their new due times are spread.
        """
        parked = 0
        now_ms = self.membership.now_ms()
        for firing, spread_seconds in self.flow.remove_waiting(count):
            if firing.entry.phase is _QUEUED:
                self._park(firing.entry, now_ms, spread_seconds)
                parked += 1
        while self._without_namespace and parked < count:
            _, entry = self._without_namespace.popitem()  # the newest first
            self._park(entry, now_ms, _SPREAD_SECONDS)
            parked += 1
        self.telemetry.parked.value += parked
        return parked

    def _park(self, entry: Entry, now_ms: int, spread_seconds: float) -> None:
        later_ms = now_ms + int((30 + self._rng.random() * spread_seconds) * 1_000)
        entry.shard.settle_without_attempt(
            entry, Settlement(rearmed=armed_at(entry.timer, later_ms, occurrence_done=False))
        )
