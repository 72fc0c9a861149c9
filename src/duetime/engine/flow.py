"""Flow control per destination: concurrency caps, circuit breakers, rate limits.

Every due timer goes through here before it is delivered. Each destination has queues of its own, so a slow or failing
destination does not delay the others. Within a destination namespaces take turns, and when the total number of calls is
at its cap, destinations take turns. A destination that keeps failing is not called for a while (its breaker is open)
and then tried with a single call. Timers that wait behind an open breaker are held: no attempt is spent on them.

When results come in faster than they can be recorded (`congested`), nothing more is started: a delivery that is not
recorded is repeated after a crash. Flow knows nothing about timers or shards: it is given items, and functions to
call with them.
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
_SOON_SECONDS = 30.0  # a queue that is worked off within this time is not shortened
_CATCH_UP_SECONDS = 0.05


class Destination(Generic[T]):
    """One destination: its queues, its calls in flight, its breaker."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.queues: dict[str, deque[T]] = {}  # by namespace; the next item is of the first one
        self.waiting = 0
        self.in_flight = 0
        self.failures = 0  # in a row
        self.pause_seconds = 0.0
        self.open_until = 0.0  # loop time; 0: the breaker is closed
        self.next_start = 0.0  # loop time from which the rate limit allows the next call
        self.starved = False  # waits until the total is below its cap
        self.waker: asyncio.TimerHandle | None = None
        self.finished = 0  # calls since the last measurement
        self.measured = False
        self.per_second = inf  # calls that end in a second; infinite until a whole second was measured
        self.removed = 0  # items taken out of its queues since its breaker closed

    def push(self, item: T, namespace: str) -> None:
        queue = self.queues.get(namespace)
        if queue is None:
            queue = self.queues[namespace] = deque()
        queue.append(item)
        self.waiting += 1

    def pop(self) -> T:
        """The next item; namespaces take turns."""
        namespace = next(iter(self.queues))
        queue = self.queues[namespace]
        item = queue.popleft()
        self.waiting -= 1
        if not queue:
            del self.queues[namespace]
        elif len(self.queues) > 1:
            self.queues[namespace] = self.queues.pop(namespace)
        return item

    def pop_newest(self) -> T:
        """The item that would be called last: the newest of the longest queue."""
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
        self._calls: set[asyncio.Task[None]] = set()
        self._remove_idle_at = _IDLE_DESTINATIONS_MAX  # with so many destinations; grows while they are all busy
        self._loop = asyncio.get_running_loop()
        self.waiting = 0
        self.in_flight = 0
        self.stopped = False

    def submit(self, item: T, name: str, namespace: str) -> None:
        """Call the destination of this name with the item, now or when its turn has come."""
        destination = self._destinations.get(name)
        if destination is None:
            if len(self._destinations) >= self._remove_idle_at:
                self._remove_idle()
            destination = self._destinations[name] = Destination(name)
        destination.push(item, namespace)
        self.waiting += 1
        self._start_calls(destination)

    def destinations(self) -> list[Destination[T]]:
        return list(self._destinations.values())

    def oldest_waiting(self) -> Iterator[T]:
        """The first item of each queue."""
        return (queue[0] for destination in self._destinations.values() for queue in destination.queues.values())

    def measure(self) -> None:
        """Called once a second: how many calls to each destination end in a second?"""
        for destination in self._destinations.values():
            if destination.per_second != inf:
                destination.per_second = (destination.per_second + destination.finished) / 2
            elif destination.measured:
                destination.per_second = destination.finished
            destination.measured = True
            destination.finished = 0

    def remove_waiting(self, count: int) -> list[tuple[T, float]]:
        """Take up to `count` waiting items out of the queues, the newest first, of destinations that will not be called
        with them soon. Each comes with the number of seconds over which such items should be spread."""
        taken: list[tuple[T, float]] = []
        for destination in sorted(self._destinations.values(), key=lambda destination: -destination.waiting):
            if not destination.open_until and destination.waiting < destination.per_second * _SOON_SECONDS:
                continue
            while destination.waiting and len(taken) < count:
                destination.removed += 1
                taken.append((destination.pop_newest(), min(_SOON_SECONDS + destination.removed / 1_000, 3_600.0)))
                self.waiting -= 1
        return taken

    def stop(self) -> None:
        """Start no more calls; those in flight go on."""
        self.stopped = True
        for destination in self._destinations.values():
            if destination.waker is not None:
                destination.waker.cancel()

    # --- calls ------------------------------------------------------------------------------------

    def _start_calls(self, destination: Destination[T]) -> None:
        """Start as many calls to this destination as its cap, its rate limit and the total cap allow."""
        while (item := self._next(destination)) is not None:
            call = asyncio.ensure_future(self._run_calls(destination, item))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _run_calls(self, destination: Destination[T], item: T | None) -> None:
        """Call the destination with one item after the other, as long as it may be called."""
        while item is not None:
            result = await self._deliver(item)
            destination.in_flight -= 1
            destination.finished += 1
            self.in_flight -= 1
            try:
                self._done(item, result)
            except Exception:  # an item that cannot be settled must not block the items behind it
                log.exception("unexpected error while settling a result from destination %s", destination.name)
            if self._update_breaker(destination, result):
                self._start_calls(destination)
            if self._starved:
                self.resume()
            item = self._next(destination)
        if not (
            destination.waiting
            or destination.in_flight
            or destination.failures
            or destination.next_start > self._loop.time()
        ):
            self._remove(destination)

    def _next(self, destination: Destination[T]) -> T | None:
        """The next item to call with; it counts as in flight from here on. None: no call may be made now."""
        while destination.waiting and self._may_call(destination):
            item = destination.pop()
            self.waiting -= 1
            if self._wanted(item):
                destination.in_flight += 1
                self.in_flight += 1
                if self._config.rate_per_destination:
                    self._pace(destination)
                return item
        return None

    def _pace(self, destination: Destination[T]) -> None:
        """Set when the next call may start. Wake-ups of the event loop come a little late; a delay of up to 50 ms is
        made up for, or the rate would be lower than configured."""
        now = self._loop.time()
        due = destination.next_start if now - destination.next_start < _CATCH_UP_SECONDS else now
        destination.next_start = due + 1 / self._config.rate_per_destination

    def _may_call(self, destination: Destination[T]) -> bool:
        if self.stopped or destination.in_flight >= self._config.concurrency_per_destination:
            return False
        if destination.open_until or destination.next_start:
            if destination.open_until and destination.in_flight:
                return False  # the call in flight decides whether the breaker closes
            at = max(destination.open_until, destination.next_start)
            if at > self._loop.time():
                if destination.waker is None:
                    destination.waker = self._loop.call_at(at, self._wake_up, destination)
                return False
        if self._is_full() and (destination.in_flight or not self._may_exceed_cap()):
            if not destination.starved:
                destination.starved = True
                self._starved.append(destination)
            return False
        return True

    def _may_exceed_cap(self) -> bool:
        """A destination that has no call in flight gets one above the total cap: all calls under the cap may be to
        destinations that hang, and it must not wait for their time-outs."""
        return self.in_flight < 2 * self._config.concurrency_max and not self._congested()

    def _is_full(self) -> bool:
        return self.in_flight >= self._config.concurrency_max or self._congested()

    def resume(self) -> None:
        """The total may be below its cap again: start calls to the destinations that wait for that."""
        for _ in range(len(self._starved)):
            if self._is_full():
                return
            other = self._starved.popleft()
            other.starved = False
            self._start_calls(other)

    def _wake_up(self, destination: Destination[T]) -> None:
        destination.waker = None
        self._start_calls(destination)

    # --- breaker ----------------------------------------------------------------------------------

    def _update_breaker(self, destination: Destination[T], result: AttemptResult) -> bool:
        """Count the result for or against the destination. True: it has closed the breaker."""
        if destination.open_until and destination.open_until > self._loop.time():
            # This call was in flight when the breaker opened: it proves nothing, but may ask for a longer pause.
            destination.open_until = max(destination.open_until, self._loop.time() + self._retry_after_seconds(result))
            return False
        if result.contact is Contact.ANSWERED and result.status < 500 and result.status not in (408, 429):
            was_open = destination.open_until != 0
            destination.failures = 0
            destination.pause_seconds = destination.open_until = 0.0
            if was_open:
                destination.removed = 0
                log.info("destination %s answers again: its breaker is closed", destination.name)
            return was_open
        if result.contact in (Contact.NOT_SENT, Contact.REFUSED):
            return False
        destination.failures += 1
        retry_after_seconds = self._retry_after_seconds(result)
        if destination.open_until or retry_after_seconds or destination.failures >= self._config.breaker_failures:
            self._open(destination, retry_after_seconds)
        return False

    def _retry_after_seconds(self, result: AttemptResult) -> float:
        """How long an overloaded destination asks not to be called, within bounds."""
        if result.status not in _OVERLOADED or not result.retry_after_ms:
            return 0.0
        return min(result.retry_after_ms / 1_000, self._config.breaker_pause_max.seconds)

    def _open(self, destination: Destination[T], retry_after_seconds: float) -> None:
        config = self._config
        pause = max(destination.pause_seconds * 2, config.breaker_pause.seconds, retry_after_seconds)
        destination.pause_seconds = min(pause, config.breaker_pause_max.seconds)
        if not destination.open_until:
            log.warning(
                "destination %s fails: its breaker is open, its timers are held for %g s",
                destination.name,
                destination.pause_seconds,
            )
        destination.open_until = self._loop.time() + destination.pause_seconds

    # --- removing destinations --------------------------------------------------------------------

    def _remove(self, destination: Destination[T]) -> None:
        if self._destinations.get(destination.name) is destination:
            del self._destinations[destination.name]

    def _remove_idle(self) -> None:
        """Remove destinations that have no items, and with them the state of their breakers and rate limits."""
        for destination in [p for p in self._destinations.values() if not (p.waiting or p.in_flight)]:
            self._remove(destination)
        # If most are busy, checking all of them again for every new destination would cost more than keeping them.
        self._remove_idle_at = max(_IDLE_DESTINATIONS_MAX, 2 * len(self._destinations))
