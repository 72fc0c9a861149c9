"""What flow control counts: flows and their queues, namespaces, origins.

    NamespaceShare    a namespace: its flows, its calls in flight
    Flow              (namespace, flow key): breaker, limits, pause
    Queue             (flow, origin): the tickets that wait; most flows have exactly one
    Origin            scheme, host and port: its calls in flight, its breaker
    Part              (namespace, origin): what a namespace has at an origin

A timer with a URL of its own makes a flow of its own, so these are small, and what most of them do not need is None.
"""

from __future__ import annotations

import heapq
from asyncio import TimerHandle
from collections import OrderedDict
from collections.abc import Container, Iterator
from enum import Enum
from math import inf

from duetime.engine.breaker import Breaker
from duetime.engine.flow_limits import Limit

__all__ = ["Flow", "NamespaceShare", "Origin", "Part", "Place", "Queue", "cancel_waker"]

_DEAD_TICKETS_MAX = 64
_TRIES_PER_SECOND = 200  # of a namespace, after a shortage of this instance
_TRIED_WITHIN_SECONDS = 60  # each of its flows; so with more than 12,000 of them there are more tries


class Place(Enum):
    """In which list something waits for its next call."""

    NONE = 0  # in none: it has nothing to call with, or is a namespace that is paused
    TURNS = 1  # for its turn
    FIRST = 2  # a namespace without calls in flight: before those in TURNS
    HELD = 3  # for something that must change first: its flow, its origin, or its share
    GONE = 4  # a queue that was removed


class NamespaceShare:
    """A namespace: what it has waiting and in flight."""

    __slots__ = (
        "flows",
        "idle_max",
        "in_flight",
        "in_shortage",
        "last_try_at",
        "limits",
        "name",
        "parts",
        "paused",
        "place",
        "ready",
    )

    def __init__(self, name: str, idle_max: int) -> None:
        self.name = name
        self.in_flight = 0
        self.paused = False
        self.place = Place.NONE
        self.ready: OrderedDict[Part, None] = OrderedDict()  # the parts whose origin can be called
        self.flows: dict[str, Flow] = {}
        self.parts: dict[str, Part] = {}  # by the name of the origin
        self.limits: dict[str, Limit] = {}  # by flow key, those that the operator has set
        self.idle_max = idle_max  # with so many flows, idle ones are removed
        self.in_shortage = 0  # flows for whose last call this instance had no socket or look-up
        self.last_try_at = 0.0  # the time planned for the last of them

    def plan_try(self, at: float) -> float:
        """When a flow in shortage is tried, not before `at`. Tries cost processor time, so they are spread."""
        pause = 1 / max(_TRIES_PER_SECOND, self.in_shortage / _TRIED_WITHIN_SECONDS)
        self.last_try_at = max(at, self.last_try_at + pause)
        return self.last_try_at

    @property
    def is_idle(self) -> bool:
        return not (self.flows or self.limits or self.paused)


class Origin:
    __slots__ = ("blocked", "breaker", "in_flight", "name", "parts", "waiting", "waker")

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_flight = 0
        self.waiting = 0
        self.parts = 0
        self.breaker: Breaker | None = None
        self.blocked: OrderedDict[Part, None] = OrderedDict()  # parts that wait until the origin can be called
        self.waker: TimerHandle | None = None


class Part:
    """What a namespace has at an origin."""

    __slots__ = ("in_flight", "namespace", "origin", "place", "queues", "ready")

    def __init__(self, namespace: NamespaceShare, origin: Origin) -> None:
        self.namespace = namespace
        self.origin = origin
        self.in_flight = 0
        self.queues = 0
        self.place = Place.NONE
        self.ready: OrderedDict[Queue, None] | None = None  # None: nothing has waited yet


class Flow:
    __slots__ = (
        "breaker",
        "held",
        "in_flight",
        "key",
        "limit",
        "namespace",
        "origin_name",
        "others",
        "queue",
        "removed",
        "waker",
    )

    def __init__(self, namespace: NamespaceShare, key: str, limit: Limit | None) -> None:
        self.namespace = namespace
        self.key = key
        self.limit = limit
        self.in_flight = 0
        self.queue: Queue | None = None
        self.others: dict[str, Queue] | None = None  # by origin, of a flow with several origins
        self.breaker: Breaker | None = None
        self.held: OrderedDict[Queue, None] | None = None  # queues that wait until the flow can be called
        self.origin_name = ""  # the last one
        self.waker: TimerHandle | None = None
        self.removed = 0  # tickets that were parked since the breaker closed

    def count_shortage(self, error: str, now: float) -> None:
        """This instance had no socket or look-up for a call."""
        breaker = self.breaker = self.breaker or Breaker()
        is_first = not breaker.shortage_seconds
        if breaker.shortage(error, now):
            self.namespace.in_shortage += is_first
            breaker.hold_until = self.namespace.plan_try(breaker.hold_until)

    def end_shortage(self) -> None:
        if self.breaker is not None and self.breaker.shortage_seconds:
            self.breaker.shortage_seconds = 0.0
            self.namespace.in_shortage -= 1

    def forget_breaker(self) -> None:
        self.end_shortage()
        self.breaker = None

    def queues(self) -> Iterator[Queue]:
        if self.queue is not None:
            yield self.queue
        if self.others is not None:
            yield from self.others.values()

    def queue_for(self, origin_name: str) -> Queue | None:
        queue = self.queue
        if queue is not None and queue.part.origin.name == origin_name:
            return queue
        return None if self.others is None else self.others.get(origin_name)

    @property
    def waiting(self) -> int:
        return sum(queue.waiting for queue in self.queues())

    @property
    def is_paused(self) -> bool:
        return self.namespace.paused or (self.limit is not None and self.limit.limits.paused)


def cancel_waker(waits: Flow | Origin) -> None:
    if waits.waker is not None:
        waits.waker.cancel()
        waits.waker = None


class Queue:
    """The tickets of one flow for one origin, the oldest first. Those that were discarded are still among them; the
    caller knows which."""

    __slots__ = (
        "finished",
        "flow",
        "in_flight",
        "measured_from",
        "part",
        "per_second",
        "place",
        "tickets",
        "waiting",
    )

    def __init__(self, flow: Flow, part: Part, now: float) -> None:
        self.flow = flow
        self.part = part
        self.tickets: list[int] = []  # a heap
        self.waiting = 0  # tickets that were not discarded
        self.in_flight = 0
        self.place = Place.NONE
        self.finished = 0  # calls since `measured_from`
        self.measured_from = now
        self.per_second = inf  # calls that end in a second; infinite until a whole second was measured

    @property
    def name(self) -> str:
        """For operators: the flow key, and the origin unless the key is a URL of it."""
        key, origin = self.flow.key, self.part.origin.name
        return key if key.startswith(origin) else f"{key} ({origin})"

    @property
    def is_breaker_open(self) -> bool:
        return any(breaker is not None and breaker.is_open for breaker in (self.flow.breaker, self.part.origin.breaker))

    @property
    def failures(self) -> int:
        """In a row, of the flow or of its origin."""
        breakers = (self.flow.breaker, self.part.origin.breaker)
        return max((breaker.failures for breaker in breakers if breaker is not None), default=0)

    @property
    def last_error(self) -> str | None:
        """Why calls fail, of the flow or of its origin. None: they do not."""
        breakers = (self.flow.breaker, self.part.origin.breaker)
        return next((breaker.last_error for breaker in breakers if breaker is not None and breaker.failures), None)

    def oldest(self, waiting: Container[int]) -> int:
        """The oldest ticket that waits. There must be one."""
        tickets = self.tickets
        while tickets[0] not in waiting:
            heapq.heappop(tickets)
        return tickets[0]

    def pop_newest(self, waiting: Container[int]) -> int:
        """Remove the newest ticket that waits. There must be one, and `tickets` must be sorted: that is a heap too."""
        while (ticket := self.tickets.pop()) not in waiting:
            pass
        return ticket

    def compact(self, waiting: Container[int]) -> None:
        """Forget discarded tickets once there are more of them than of the others."""
        if len(self.tickets) > 2 * self.waiting + _DEAD_TICKETS_MAX or not self.waiting:
            self.tickets = [ticket for ticket in self.tickets if ticket in waiting]
            heapq.heapify(self.tickets)

    def count_end(self, now: float) -> None:
        """A call has ended."""
        self.finished += 1
        if now - self.measured_from >= 1:
            self._measure(now)

    def is_slow(self, now: float, soon_seconds: float) -> bool:
        """Will it not be worked off soon?"""
        self._measure(now)
        return self.waiting >= self.per_second * soon_seconds

    def _measure(self, now: float) -> None:
        seconds = now - self.measured_from
        if seconds >= 1:
            speed = self.finished / seconds
            self.per_second = speed if self.per_second == inf else (self.per_second + speed) / 2
            self.finished = 0
            self.measured_from = now
