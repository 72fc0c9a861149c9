"""Who may call next: the slots of the instance and of each origin, the shares in them, and the turns.

A call needs a slot of the instance (`delivery.concurrency_max`) and one of its origin (`concurrency_per_origin`). Of
both a namespace may have at most `SHARE` times as many as are still free, and a flow at most `SHARE` times as many as
its namespace may still take. One slot in `_RESERVE` (of a namespace: in `_FLOW_RESERVE`) does not count as free, except
for a namespace or a flow without any call in flight: otherwise a handful that come one after the other could take the
last ones. So there is a slot for another namespace, and for another flow of it.

When slots are short, namespaces take turns, within a namespace its origins, and within both its flows. Namespaces
without a call in flight come first. What cannot call now although its turn has come is taken out of its list, and waits
where the event that changes this finds it: a queue at its flow, a part at its origin, a namespace in `_over_share`.
Each event looks at a limited number of those; what it leaves is found by the next event or by the sweep each second.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from duetime.config import Delivery
from duetime.domain.shares import SHARE
from duetime.engine.flow_queues import Flow, NamespaceShare, Origin, Part, Place, Queue

__all__ = ["Slots"]

_RESERVE = 16  # one in so many slots is left to namespaces without a call in flight
_FLOW_RESERVE = 4  # and one in so many of those of a namespace to flows without a call in flight
_TRIES = 8  # how many that cannot call now are passed over for one call
_FREED_MAX = 1_000  # the sweep finds the others
_NONE, _TURNS, _FIRST, _HELD = Place.NONE, Place.TURNS, Place.FIRST, Place.HELD


class Slots:
    def __init__(
        self, config: Delivery, flow_is_held: Callable[[Flow], bool], origin_is_held: Callable[[Origin], bool]
    ) -> None:
        self.max = config.concurrency_max
        self._per_origin = config.concurrency_per_origin
        self._per_flow = config.concurrency_per_flow
        self._reserve = self.max // _RESERVE
        self._origin_reserve = self._per_origin // _RESERVE
        self._flow_is_held = flow_is_held
        self._origin_is_held = origin_is_held
        self._first: OrderedDict[NamespaceShare, None] = OrderedDict()  # namespaces without a call in flight
        self._turns: OrderedDict[NamespaceShare, None] = OrderedDict()
        self._over_share: OrderedDict[NamespaceShare, None] = OrderedDict()
        # Something of these was released, but may not have led to a call.
        self._freed_flows: OrderedDict[Flow, None] = OrderedDict()
        self._freed_origins: OrderedDict[Origin, None] = OrderedDict()
        self.in_flight = 0

    # --- the rules --------------------------------------------------------------------------------

    def has_turns(self) -> bool:
        """Does anything wait for its turn that could perhaps call now?"""
        return bool(self._first or self._turns)

    def waits_alone(self, queue: Queue) -> bool:
        """Does the queue wait for its flow, and nothing else for anything that a call of it takes or frees?"""
        return (
            queue.place is _HELD
            and queue.flow.held is not None
            and len(queue.flow.held) == 1
            and not (self._first or self._turns or self._over_share or queue.part.origin.blocked)
        )

    def may_start(self, queue: Queue) -> bool:
        """May the queue make a call now, if there is a slot and nothing else waits for it?"""
        part, flow = queue.part, queue.flow
        namespace = part.namespace
        if flow.breaker is None and flow.limit is None:
            is_held = flow.in_flight >= self._per_flow  # the same as `_flow_is_held`, for most flows
        else:
            is_held = self._flow_is_held(flow)
        if is_held or namespace.paused:
            return False
        return self._are_slots_free(queue) or not (
            self._is_over_share(namespace) or self._is_blocked(part) or self._is_over_flow_share(queue)
        )

    def _are_slots_free(self, queue: Queue) -> bool:
        """Are so many slots free that no share has to be computed? True implies that the rules below allow the call."""
        part = queue.part
        origin, in_flight = part.origin, part.namespace.in_flight
        free = self.max - self.in_flight - self._reserve
        free_at_origin = self._per_origin - origin.in_flight - self._origin_reserve
        if free <= 0 or free_at_origin <= 0 or origin.breaker is not None:
            return False
        if queue.flow.in_flight:  # half of what is free: see `_takes_too_much`
            return 2 * in_flight <= free and 2 * part.in_flight <= free_at_origin
        return in_flight < SHARE * free and part.in_flight < SHARE * free_at_origin

    def _is_over_share(self, namespace: NamespaceShare) -> bool:
        in_flight, free = namespace.in_flight, self.max - self.in_flight
        return in_flight >= SHARE * (free - self._reserve) if in_flight else not free

    def _is_blocked(self, part: Part) -> bool:
        origin, in_flight = part.origin, part.in_flight
        free = self._per_origin - origin.in_flight
        if in_flight >= SHARE * (free - self._origin_reserve) if in_flight else not free:
            return True
        return origin.breaker is not None and self._origin_is_held(origin)

    def _is_over_flow_share(self, queue: Queue) -> bool:
        """Asked only if the namespace itself may make another call."""
        flow, part = queue.flow, queue.part
        if not flow.in_flight:
            return False
        free = self.max - self.in_flight - self._reserve
        free_at_origin = self._per_origin - part.origin.in_flight - self._origin_reserve
        in_flight, in_flight_at_origin = part.namespace.in_flight, part.in_flight
        return _takes_too_much(flow.in_flight, in_flight, free) or (
            queue.in_flight > 0 and _takes_too_much(queue.in_flight, in_flight_at_origin, free_at_origin)
        )

    # --- counting ---------------------------------------------------------------------------------

    def started(self, queue: Queue) -> None:
        part, flow = queue.part, queue.flow
        self.in_flight += 1
        queue.in_flight += 1
        flow.in_flight += 1
        part.in_flight += 1
        part.origin.in_flight += 1
        part.namespace.in_flight += 1
        # An event lets one of those continue that wait; if that one starts, another one.
        if flow.held or part.origin.blocked or self._over_share:
            self.freed(queue)

    def ended(self, queue: Queue) -> None:
        part = queue.part
        namespace = part.namespace
        self.in_flight -= 1
        queue.in_flight -= 1
        queue.flow.in_flight -= 1
        part.in_flight -= 1
        part.origin.in_flight -= 1
        namespace.in_flight -= 1
        if not namespace.in_flight and namespace.place is _TURNS:
            del self._turns[namespace]
            namespace.place = _FIRST
            self._first[namespace] = None

    # --- the lists --------------------------------------------------------------------------------

    def enlist(self, queue: Queue) -> None:
        """The queue is in no list: it waits for its turn if it has anything to call with. Its part and its namespace
        wait too, if they have anything."""
        part = queue.part
        if queue.waiting:
            queue.place = _TURNS
            if part.ready is None:
                part.ready = OrderedDict()
            part.ready[queue] = None
        if part.ready and part.place is _NONE:
            part.place = _TURNS
            part.namespace.ready[part] = None
        self.enlist_namespace(part.namespace)

    def enlist_namespace(self, namespace: NamespaceShare) -> None:
        if namespace.ready and namespace.place is _NONE and not namespace.paused:
            if namespace.in_flight:
                namespace.place = _TURNS
                self._turns[namespace] = None
            else:
                namespace.place = _FIRST
                self._first[namespace] = None

    def unlist(self, queue: Queue) -> None:
        """The queue has nothing to call with any more."""
        part = queue.part
        if queue.place is _TURNS and part.ready is not None:
            del part.ready[queue]
            if not part.ready:
                self._unlist_part(part)
        elif queue.place is _HELD and queue.flow.held is not None:
            del queue.flow.held[queue]
        queue.place = _NONE

    def _unlist_part(self, part: Part) -> None:
        namespace = part.namespace
        if part.place is _TURNS:
            del namespace.ready[part]
            if not namespace.ready:
                self.unlist_namespace(namespace)
        elif part.place is _HELD:
            del part.origin.blocked[part]
        part.place = _NONE

    def unlist_namespace(self, namespace: NamespaceShare) -> None:
        for place, listed in ((_TURNS, self._turns), (_FIRST, self._first), (_HELD, self._over_share)):
            if namespace.place is place:
                del listed[namespace]
        namespace.place = _NONE

    # --- turns ------------------------------------------------------------------------------------

    def next_queue(self) -> Queue | None:
        """The queue whose turn it is, out of all lists: count its call, and then enlist it again. None: none that waits
        may call now, as far as this event looks."""
        while True:
            queue = self._next_in_turn()
            if queue is not None or self.in_flight >= self.max or not self._release_another():
                return queue

    def _next_in_turn(self) -> Queue | None:
        passed = 0
        while passed < _TRIES and self.in_flight < self.max:
            if self._first:
                namespace, _ = self._first.popitem(last=False)
            elif self._turns:
                namespace, _ = self._turns.popitem(last=False)
            else:
                return None
            namespace.place = _NONE
            if self._is_over_share(namespace):
                namespace.place = _HELD
                self._over_share[namespace] = None
                continue
            queue = self._next_of(namespace)
            if queue is not None:
                return queue
            if namespace.ready:
                # At the end of the others, although it may have no call in flight: it could not use its turn.
                namespace.place = _TURNS
                self._turns[namespace] = None
                passed += 1
        return None

    def _next_of(self, namespace: NamespaceShare) -> Queue | None:
        passed = 0
        while namespace.ready and passed < _TRIES:
            part, _ = namespace.ready.popitem(last=False)
            part.place = _NONE
            if self._is_blocked(part):
                part.place = _HELD
                part.origin.blocked[part] = None
                continue
            queue = self._next_at(part)
            if queue is not None:
                return queue
            if part.ready:
                part.place = _TURNS
                namespace.ready[part] = None
                passed += 1
        return None

    def _next_at(self, part: Part) -> Queue | None:
        passed = 0
        while part.ready and passed < _TRIES:
            queue, _ = part.ready.popitem(last=False)
            if self._flow_is_held(queue.flow):
                queue.place = _HELD
                if queue.flow.held is None:
                    queue.flow.held = OrderedDict()
                queue.flow.held[queue] = None
            elif self._is_over_flow_share(queue):
                part.ready[queue] = None
                passed += 1
            else:
                queue.place = _NONE
                return queue
        return None

    # --- what waits for something else ------------------------------------------------------------

    def freed(self, queue: Queue) -> None:
        """Counts of this queue have changed: let one of each kind that waited for that have its turn."""
        flow, origin = queue.flow, queue.part.origin
        if flow.held and (flow.limit is not None or flow.in_flight < self._per_flow):  # otherwise it stays held
            self.release_flow(flow)
        if origin.blocked:
            self.release_origin(origin)
        if self._over_share:
            self._release_namespace(queue.part.namespace)

    def release_flow(self, flow: Flow) -> bool:
        """Let one queue of the flow have its turn. False: none may."""
        if not flow.held or self._flow_is_held(flow):
            return False
        queue, _ = flow.held.popitem(last=False)
        self.enlist(queue)
        if flow.held:
            self._freed_flows[flow] = None
        return True

    def release_origin(self, origin: Origin) -> bool:
        """Let one part of the origin have its turn. False: none may, as far as this event looks."""
        for _ in range(min(len(origin.blocked), _TRIES)):
            part, _ = origin.blocked.popitem(last=False)
            if not self._is_blocked(part):
                part.place = _TURNS
                part.namespace.ready[part] = None
                self.enlist_namespace(part.namespace)
                if origin.blocked:
                    self._freed_origins[origin] = None
                return True
            origin.blocked[part] = None
        return False

    def _release_namespace(self, ended: NamespaceShare | None = None) -> bool:
        """Those that wait for the longest time first; then the one whose call has ended, which may be alone below its
        share."""
        for _ in range(min(len(self._over_share), _TRIES)):
            namespace, _ = self._over_share.popitem(last=False)
            if not self._is_over_share(namespace):
                namespace.place = _NONE
                self.enlist_namespace(namespace)
                return True
            self._over_share[namespace] = None
        if ended is None or ended.place is not _HELD or self._is_over_share(ended):
            return False
        self.unlist_namespace(ended)
        self.enlist_namespace(ended)
        return True

    def _release_another(self) -> bool:
        """What an event has released could not call for another reason: let the next one have its turn. False: there is
        none. Each is released only if what it waited for is over, so this ends."""
        if len(self._freed_flows) > _FREED_MAX:
            self._freed_flows.clear()
        while self._freed_flows:
            if self.release_flow(next(iter(self._freed_flows))):
                return True
            self._freed_flows.popitem(last=False)
        while self._freed_origins:
            if self.release_origin(next(iter(self._freed_origins))):
                return True
            self._freed_origins.popitem(last=False)
        return self._release_namespace()

    def release_namespaces(self) -> None:
        """All that are below their share again."""
        for namespace in [namespace for namespace in self._over_share if not self._is_over_share(namespace)]:
            self.unlist_namespace(namespace)
            self.enlist_namespace(namespace)

    def release_parts(self, origin: Origin) -> None:
        """All that may call the origin again."""
        for part in [part for part in origin.blocked if not self._is_blocked(part)]:
            del origin.blocked[part]
            part.place = _TURNS
            part.namespace.ready[part] = None
            self.enlist_namespace(part.namespace)


def _takes_too_much(in_flight: int, namespace_in_flight: int, free: int) -> bool:
    """Has the flow so many calls in flight that it must leave the others that its namespace may make to its other
    flows?"""
    # Each call of the namespace takes one that is free: it may make a fifth of this many, rounded up.
    left = (SHARE * free - namespace_in_flight + SHARE) // (SHARE + 1)
    return in_flight >= SHARE * (left - (namespace_in_flight + left) // _FLOW_RESERVE)
