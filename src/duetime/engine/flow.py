"""Per-destination fairness: concurrency caps, circuit breakers, pacing.

Every due timer goes through here on its way out. Each destination has a queue of its own, so a slow or
dead one holds up nobody else; within a destination namespaces take turns; and when the total is at its
cap, destinations take turns. A destination that keeps failing is left alone for a while (its breaker is
open) and then tried with a single call. What waits behind an open breaker is held: no attempt is spent.

When outcomes come in faster than they can be recorded (`congested`), nothing more is started: what is not
recorded is repeated after a crash. Flow knows nothing of timers or shards: it is given items and functions
about them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from math import inf
from typing import Any, Generic, TypeVar

from duetime.config import Delivery
from duetime.domain.settle import AttemptResult, Contact
from duetime.telemetry import log

__all__ = ["Destination", "Flow"]

T = TypeVar("T")

_IDLE_DESTINATIONS_MAX = 10_000
_OVERLOADED = (429, 503)
_SOON_SECONDS = 30.0
_CATCH_UP_SECONDS = 0.05


class Destination(Generic[T]):
    """One place that is called: its queues, its calls under way, its breaker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queues: dict[str, deque[T]] = {}  # by namespace; the first in order has the next turn
        self.waiting = 0
        self.in_flight = 0
        self.failures = 0  # in a row
        self.pause_seconds = 0.0
        self.open_until = 0.0  # loop time; 0: the breaker is closed
        self.next_start = 0.0  # loop time of the next call the pace allows
        self.starved = False  # waits for its turn at the total cap
        self.waker: asyncio.TimerHandle | None = None
        self.finished = 0  # calls since the last measurement
        self.measured = False
        self.per_second = inf  # nobody is judged before a whole second was measured
        self.taken_back = 0  # items given back since its breaker closed

    def push(self, item: T, namespace: str) -> None:
        queue = self.queues.get(namespace)
        if queue is None:
            queue = self.queues[namespace] = deque()
        queue.append(item)
        self.waiting += 1

    def pop(self) -> T:
        """The next item, namespace by namespace."""
        namespace = next(iter(self.queues))
        queue = self.queues[namespace]
        item = queue.popleft()
        self.waiting -= 1
        if not queue:
            del self.queues[namespace]
        elif len(self.queues) > 1:
            self.queues[namespace] = self.queues.pop(namespace)
        return item

    def pop_last(self) -> T:
        """The item that would have waited longest: from the tail of the longest queue."""
        namespace = max(self.queues, key=lambda name: len(self.queues[name]))
        queue = self.queues[namespace]
        item = queue.pop()
        self.waiting -= 1
        if not queue:
            del self.queues[namespace]
        return item


class Flow(Generic[T]):
    def __init__(
        self,
        config: Delivery,
        *,
        deliver: Callable[[T], Coroutine[Any, Any, AttemptResult]],
        wanted: Callable[[T], bool],
        done: Callable[[T, AttemptResult], None],
        congested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._deliver = deliver
        self._wanted = wanted
        self._done = done
        self._congested = congested
        self._destinations: dict[str, Destination[T]] = {}
        self._starved: deque[Destination[T]] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._forget_at = _IDLE_DESTINATIONS_MAX  # as many destinations; grows while they are all busy
        self._loop = asyncio.get_running_loop()
        self.waiting = 0
        self.in_flight = 0
        self.stopped = False

    def submit(self, item: T, destination: str, namespace: str) -> None:
        place = self._destinations.get(destination)
        if place is None:
            if len(self._destinations) >= self._forget_at:
                self._forget_idle()
            place = self._destinations[destination] = Destination(destination)
        place.push(item, namespace)
        self.waiting += 1
        self._pump(place)

    def destinations(self) -> list[Destination[T]]:
        return list(self._destinations.values())

    def heads(self) -> Iterator[T]:
        """What has waited longest, of each queue."""
        return (queue[0] for place in self._destinations.values() for queue in place.queues.values())

    def measure(self) -> None:
        """Once a second: how fast does each destination take what it is given?"""
        for place in self._destinations.values():
            if place.per_second != inf:
                place.per_second = (place.per_second + place.finished) / 2
            elif place.measured:
                place.per_second = place.finished
            place.measured = True
            place.finished = 0

    def take_back(self, count: int) -> list[tuple[T, float]]:
        """Up to `count` waiting items back out, the last first, from destinations that will not get to
        them soon; each with the seconds over which such items had better be spread."""
        taken: list[tuple[T, float]] = []
        for place in sorted(self._destinations.values(), key=lambda place: -place.waiting):
            if not place.open_until and place.waiting < place.per_second * _SOON_SECONDS:
                continue
            while place.waiting and len(taken) < count:
                place.taken_back += 1
                taken.append((place.pop_last(), min(_SOON_SECONDS + place.taken_back / 1_000, 3_600.0)))
                self.waiting -= 1
        return taken

    def stop(self) -> None:
        """Start nothing more; what is in flight goes on."""
        self.stopped = True
        for place in self._destinations.values():
            if place.waker is not None:
                place.waker.cancel()

    # --- turns ------------------------------------------------------------------------------------

    def _pump(self, place: Destination[T]) -> None:
        """Start as many calls to this destination as it, the pace and the total allow."""
        while (item := self._next(place)) is not None:
            worker = asyncio.ensure_future(self._work(place, item))
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)

    async def _work(self, place: Destination[T], item: T | None) -> None:
        """Call with one item after the other, as long as it is this destination's turn."""
        while item is not None:
            result = await self._deliver(item)
            place.in_flight -= 1
            place.finished += 1
            self.in_flight -= 1
            try:
                self._done(item, result)
            except Exception:  # one item that breaks its settling must not hold up those behind it
                log.exception("an outcome from destination %s could not be settled", place.name)
            if self._judge(place, result):
                self._pump(place)
            if self._starved:
                self.resume()
            item = self._next(place)
        if not (place.waiting or place.in_flight or place.failures or place.next_start > self._loop.time()):
            self._forget(place)

    def _next(self, place: Destination[T]) -> T | None:
        """The next item to call with, counted as in flight; None if none may be called now."""
        while place.waiting and self._may_call(place):
            item = place.pop()
            self.waiting -= 1
            if self._wanted(item):
                place.in_flight += 1
                self.in_flight += 1
                if self._config.rate_per_destination:
                    self._pace(place)
                return item
        return None

    def _pace(self, place: Destination[T]) -> None:
        """The wake-ups of a loop come a little late: that much is made up for, or the pace would be missed."""
        now = self._loop.time()
        due = place.next_start if now - place.next_start < _CATCH_UP_SECONDS else now
        place.next_start = due + 1 / self._config.rate_per_destination

    def _may_call(self, place: Destination[T]) -> bool:
        if self.stopped or place.in_flight >= self._config.concurrency_per_destination:
            return False
        if place.open_until or place.next_start:
            if place.open_until and place.in_flight:
                return False  # the call under way decides
            at = max(place.open_until, place.next_start)
            if at > self._loop.time():
                if place.waker is None:
                    place.waker = self._loop.call_at(at, self._woken, place)
                return False
        if self._is_full() and (place.in_flight or not self._has_spare()):
            if not place.starved:
                place.starved = True
                self._starved.append(place)
            return False
        return True

    def _has_spare(self) -> bool:
        """A destination that has no call under way gets one beyond the cap: all slots may be held by others
        that hang, and it must not wait for their time-outs."""
        return self.in_flight < 2 * self._config.concurrency_max and not self._congested()

    def _is_full(self) -> bool:
        return self.in_flight >= self._config.concurrency_max or self._congested()

    def resume(self) -> None:
        """There may be room again: those that wait for their turn at the total cap get it."""
        for _ in range(len(self._starved)):
            if self._is_full():
                return
            other = self._starved.popleft()
            other.starved = False
            self._pump(other)

    def _woken(self, place: Destination[T]) -> None:
        place.waker = None
        self._pump(place)

    # --- breaker ----------------------------------------------------------------------------------

    def _judge(self, place: Destination[T], result: AttemptResult) -> bool:
        """Count the outcome for or against the destination; True if its breaker closes by it."""
        if place.open_until and place.open_until > self._loop.time():
            # One that was still under way when the breaker opened: it proves nothing, but may ask for more time.
            place.open_until = max(place.open_until, self._loop.time() + self._asked_seconds(result))
            return False
        if result.contact is Contact.ANSWERED and result.status < 500 and result.status not in (408, 429):
            was_open = place.open_until != 0
            place.failures = 0
            place.pause_seconds = place.open_until = 0.0
            if was_open:
                place.taken_back = 0
                log.info("destination %s answers again", place.name)
            return was_open
        if result.contact in (Contact.NOT_SENT, Contact.REFUSED):
            return False
        place.failures += 1
        asked_seconds = self._asked_seconds(result)
        if place.open_until or asked_seconds or place.failures >= self._config.breaker_failures:
            self._open(place, asked_seconds)
        return False

    def _asked_seconds(self, result: AttemptResult) -> float:
        """How long an overloaded destination asks to be left alone, within bounds."""
        if result.status not in _OVERLOADED or not result.retry_after_ms:
            return 0.0
        return min(result.retry_after_ms / 1_000, self._config.breaker_pause_max.seconds)

    def _open(self, place: Destination[T], asked_seconds: float) -> None:
        config = self._config
        pause = max(place.pause_seconds * 2, config.breaker_pause.seconds, asked_seconds)
        place.pause_seconds = min(pause, config.breaker_pause_max.seconds)
        if not place.open_until:
            log.warning("destination %s fails: held for %g s", place.name, place.pause_seconds)
        place.open_until = self._loop.time() + place.pause_seconds

    # --- forgetting -------------------------------------------------------------------------------

    def _forget(self, place: Destination[T]) -> None:
        if self._destinations.get(place.name) is place:
            del self._destinations[place.name]

    def _forget_idle(self) -> None:
        """Drop what was remembered of destinations that nobody calls now: their breaker and their pace."""
        for place in [p for p in self._destinations.values() if not (p.waiting or p.in_flight)]:
            self._forget(place)
        # If most are busy, looking at all of them again for every newcomer would cost more than they do.
        self._forget_at = max(_IDLE_DESTINATIONS_MAX, 2 * len(self._destinations))
