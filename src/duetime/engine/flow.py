"""Flow control: when a due timer is delivered, within the limits of its namespace, its flow and its origin.

Every due timer goes through here. A flow is the flow key of a timer in its namespace: its explicit `flowKey`, or its
URL without the query. It has a breaker, a pause that its receiver asked for (`Retry-After`), limits, and a pause of the
operator. An origin (scheme, host and port) has a breaker that counts only what concerns all of its URLs: no connection
could be made. Timers that wait for any of these are held: no attempt is spent on them. `flow_slots.py` says who may
call next when slots are short.

When results come in faster than they can be recorded (`congested`), nothing more is started: a delivery that is not
recorded is repeated after a crash. Flow control knows nothing about timers, shards or the store: it is given items
with tickets that order them, and functions to call with them.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Generic, TypeVar

from duetime.config import Delivery
from duetime.domain.flow_status import FlowStatus
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import FlowLimits, Namespace
from duetime.engine.breaker import Breaker, error_of
from duetime.engine.flow_limits import Limit, LimitedFlow
from duetime.engine.flow_queues import Flow, NamespaceShare, Origin, Part, Place, Queue, cancel_waker
from duetime.engine.flow_report import BreakerLog, next_flows, status_of
from duetime.engine.flow_slots import Slots
from duetime.telemetry import log

__all__ = ["FlowControl"]

T = TypeVar("T")

_IDLE_FLOWS_MAX = 10_000  # of a namespace; more are forgotten, with their breakers
_IDLE_ORIGINS_MAX = 10_000
_SWEPT_PER_SECOND = 2_000
_OVERLOADED = (429, 503)
_ANSWERED = Contact.ANSWERED
_SHORTAGE, _SHORTAGE_SECONDS = Contact.SHORTAGE, 1.0  # how long an origin waits if its trial call ends so
_AWAY, _AWAY_SECONDS = Contact.AWAY, 1.0  # how often an origin that is a message broker is tried; this costs nothing
_SAYS_NOTHING_OF_FLOW = (Contact.NOT_SENT, Contact.REFUSED, Contact.UNREACHABLE, Contact.AWAY)
_HAS_CONTACT = (Contact.ANSWERED, Contact.ACCEPTED, Contact.BROKEN)
_NONE, _GONE = Place.NONE, Place.GONE
_SOON_SECONDS = 30.0  # a queue that is worked off within this time is not shortened


class FlowControl(Generic[T]):
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
        self._loop = asyncio.get_running_loop()
        self._slots = Slots(config, self._is_held, self._is_origin_held)
        self._namespaces: dict[str, NamespaceShare] = {}
        self._origins: dict[str, Origin] = {}
        self._idle_origins_max = _IDLE_ORIGINS_MAX
        self._items: dict[int, tuple[T, Queue]] = {}  # by ticket, what waits
        self._breaker_log = BreakerLog()
        self._calls: set[asyncio.Task[None]] = set()
        self._to_sweep: Iterator[Flow] = iter(())
        self._ask: Callable[[LimitedFlow], None] | None = None
        self._asking: Flow | None = None
        self._boot_ms: Callable[[], int] = lambda: 0
        self.paused = False  # by the operator, everything
        self.stopped = False

    # --- items ------------------------------------------------------------------------------------

    def submit(self, item: T, ticket: int, namespace: str, flow_key: str, origin: str) -> None:
        """Call with the item, now or when its turn has come. Tickets are unique; in a flow the lowest is the first."""
        share = self._namespaces.get(namespace)
        if share is None:
            share = self._namespaces[namespace] = NamespaceShare(namespace, _IDLE_FLOWS_MAX)
        flow = share.flows.get(flow_key)
        if flow is None:
            flow = self._add_flow(share, flow_key)
            queue = self._add_queue(flow, origin)
        elif flow.queue is not None and flow.queue.part.origin.name == origin:
            queue = flow.queue
        else:
            queue = flow.queue_for(origin) or self._add_queue(flow, origin)
        slots = self._slots
        if not (queue.waiting or slots.has_turns() or self._is_full()) and slots.may_start(queue):
            self._run(queue, item, self._count_start(queue))
            return
        heapq.heappush(queue.tickets, ticket)
        self._items[ticket] = (item, queue)
        queue.waiting += 1
        queue.part.origin.waiting += 1
        if queue.place is _NONE:
            slots.enlist(queue)
            self.resume()

    def discard(self, ticket: int) -> None:
        """Forget an item that waits. One that is in flight, or was never submitted, stays as it is."""
        found = self._items.get(ticket)
        if found is not None:
            self._take_out(ticket, found[1])
            found[1].compact(self._items)

    def _take_out(self, ticket: int, queue: Queue) -> None:
        del self._items[ticket]
        queue.waiting -= 1
        queue.part.origin.waiting -= 1
        if not queue.waiting:
            self._slots.unlist(queue)
            self._remove_if_idle(queue)

    def _pop(self, queue: Queue) -> T | None:
        """The oldest item that is still wanted."""
        tickets = queue.tickets
        while queue.waiting:
            found = self._items.pop(heapq.heappop(tickets), None)
            if found is not None:
                queue.waiting -= 1
                queue.part.origin.waiting -= 1
                if self._wanted(found[0]):
                    return found[0]
        tickets.clear()
        return None

    @property
    def waiting(self) -> int:
        return len(self._items)

    @property
    def in_flight(self) -> int:
        return self._slots.in_flight

    def tickets(self) -> list[int]:
        """Of all items that wait."""
        return list(self._items)

    def oldest_ticket(self) -> int | None:
        return min((queue.oldest(self._items) for queue in self.queues() if queue.waiting), default=None)

    def flows(self) -> Iterator[Flow]:
        return (flow for share in self._namespaces.values() for flow in share.flows.values())

    def queues(self) -> Iterator[Queue]:
        return (queue for flow in self.flows() for queue in flow.queues())

    def remove_waiting(self, count: int) -> list[tuple[T, float]]:
        """Take up to `count` waiting items out of their queues, the newest first, where they will not be called with
        soon. Each comes with the number of seconds over which such items should be spread."""
        taken: list[tuple[T, float]] = []
        now = self._loop.time()
        for queue in sorted(self.queues(), key=lambda queue: -queue.waiting):
            if len(taken) >= count:
                break
            if not queue.waiting or not (self._is_closed(queue) or queue.is_slow(now, _SOON_SECONDS)):
                continue
            queue.tickets.sort()
            while queue.waiting and len(taken) < count:
                queue.flow.removed += 1
                ticket = queue.pop_newest(self._items)
                taken.append((self._items[ticket][0], min(_SOON_SECONDS + queue.flow.removed / 1_000, 3_600.0)))
                self._take_out(ticket, queue)
        return taken

    def _is_closed(self, queue: Queue) -> bool:
        """Is it held whatever slots are free?"""
        return self.paused or queue.flow.is_paused or queue.is_breaker_open

    # --- calls ------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Something may be free again: start the calls that may be made."""
        while (call := self._next_call()) is not None:
            self._run(*call)

    def stop(self) -> None:
        """Start no more calls; those in flight go on."""
        self.stopped = True
        for flow in self.flows():
            cancel_waker(flow)
        for origin in self._origins.values():
            cancel_waker(origin)

    def _is_full(self) -> bool:
        slots = self._slots
        return slots.in_flight >= slots.max or self.stopped or self.paused or self._congested()

    def _next_call(self) -> tuple[Queue, T, bool] | None:
        """The call whose turn it is; it counts as in flight from here on. None: no call may be made now."""
        slots = self._slots
        while not self._is_full():
            queue = slots.next_queue()
            if queue is None:
                return None
            call = self._start_of(queue)
            slots.enlist(queue)
            if call is not None:
                return call
            self._remove_if_idle(queue)
        return None

    def _start_of(self, queue: Queue) -> tuple[Queue, T, bool] | None:
        item = self._pop(queue)
        if not queue.waiting:
            self._slots.unlist(queue)
        return None if item is None else (queue, item, self._count_start(queue))

    def _count_start(self, queue: Queue) -> bool:
        """True: the call is the one by which an open breaker of the origin finds out whether it can be reached."""
        flow, origin = queue.flow, queue.part.origin
        if flow.limit is not None:
            flow.limit.call_started(self._loop.time())
        flow.origin_name = origin.name
        breaker = origin.breaker
        is_trial = breaker is not None and breaker.is_open
        if breaker is not None and is_trial:
            # A call to a URL that hangs has an answer late. Then another call is tried after the same pause.
            breaker.open_until = self._loop.time() + breaker.pause_seconds
        self._slots.started(queue)
        return is_trial

    def _run(self, queue: Queue, item: T, is_trial: bool) -> None:
        call = self._loop.create_task(self._make_calls(queue, item, is_trial))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)

    async def _make_calls(self, queue: Queue, item: T, is_trial: bool) -> None:
        """Make a call, and after it the one whose turn it is then, whatever its flow."""
        while True:
            result = await self._deliver(item)
            self._ended(queue, item, result, is_trial)
            following = self._next_after(queue)
            if following is None:
                return
            queue, item, is_trial = following

    def _ended(self, queue: Queue, item: T, result: AttemptResult, is_trial: bool) -> None:
        self._slots.ended(queue)
        queue.count_end(self._loop.time())
        flow, origin = queue.flow, queue.part.origin
        if result.contact is not _ANSWERED or origin.breaker is not None:
            self._update_origin(origin, result, is_trial)
        if result.contact is not _ANSWERED or flow.breaker is not None or result.status >= 400:
            self._update_flow(flow, result)
        try:
            self._done(item, result)
        except Exception:  # an item that cannot be settled must not block the items behind it
            log.exception("unexpected error while settling a result of flow %r", queue.flow.key)

    def _next_after(self, queue: Queue) -> tuple[Queue, T, bool] | None:
        """A call of this queue has ended: the next one, of any flow. Others that may be made too are started."""
        slots, following = self._slots, None
        if queue.waiting and slots.waits_alone(queue) and not self._is_full() and slots.may_start(queue):
            following = self._start_of(queue)  # the usual case of one busy flow: it stays in its list
        if following is None:
            slots.freed(queue)
            self._remove_if_idle(queue)
            if not self._items:
                return None  # nothing waits
            following = self._next_call()
        if slots.has_turns():
            self.resume()
        return following

    # --- what holds a flow or an origin -----------------------------------------------------------

    def _is_held(self, flow: Flow) -> bool:
        """Must its timers wait, whatever slots are free? If only for a time, it is woken after it."""
        limit, breaker = flow.limit, flow.breaker
        concurrency, at = self._config.concurrency_per_flow, 0.0
        if limit is not None:
            if limit.limits.paused or not self._has_allowance(flow, limit):
                return True
            if limit.allowed_concurrency is not None:
                concurrency = limit.allowed_concurrency
            at = limit.next_call
        if flow.in_flight >= concurrency:
            return True
        if breaker is not None:
            if breaker.is_open and flow.in_flight:
                return True  # the call in flight decides whether the breaker closes
            at = max(at, breaker.open_until, breaker.hold_until)
        if at <= self._loop.time():
            return False
        if flow.waker is None and at < float("inf") and not self.stopped:
            flow.waker = self._loop.call_at(at, self._wake_flow, flow)
        return True

    def _has_allowance(self, flow: Flow, limit: Limit) -> bool:
        """If it has none, it is asked for. A flow that may not be called anyway needs none."""
        if self._ask is None or not limit.is_limited or limit.allowed_until_ms > self._boot_ms():
            return True
        if self._is_stopped_by_breaker(flow):
            return True
        outer, self._asking = self._asking, flow
        self._ask(self._limited(flow, limit, max(1, flow.waiting)))
        self._asking = outer
        return limit.allowed_until_ms > self._boot_ms()

    def _is_stopped_by_breaker(self, flow: Flow) -> bool:
        return flow.breaker is not None and max(flow.breaker.open_until, flow.breaker.hold_until) > self._loop.time()

    def _wake_flow(self, flow: Flow) -> None:
        flow.waker = None
        self._slots.release_flow(flow)
        self.resume()
        self._remove_flow_if_idle(flow)

    def _is_origin_held(self, origin: Origin) -> bool:
        breaker = origin.breaker
        if breaker is None or breaker.open_until <= self._loop.time():
            return False
        if origin.waker is None and not self.stopped:
            origin.waker = self._loop.call_at(breaker.open_until, self._wake_origin, origin)
        return True

    def _wake_origin(self, origin: Origin) -> None:
        origin.waker = None
        self._slots.release_origin(origin)
        self.resume()

    # --- results ----------------------------------------------------------------------------------

    def _update_flow(self, flow: Flow, result: AttemptResult) -> None:
        """Count the result for or against the flow."""
        contact, status, breaker = result.contact, result.status, flow.breaker
        if contact in (Contact.REFUSED, Contact.UNREACHABLE):
            flow.end_shortage()  # there was a look-up or a socket
        is_success = contact is Contact.ACCEPTED or (
            contact is Contact.ANSWERED and status < 500 and status not in (408, 429)
        )
        if (is_success and breaker is None) or contact in _SAYS_NOTHING_OF_FLOW:
            return
        now = self._loop.time()
        if contact is Contact.SHORTAGE:
            flow.count_shortage(result.error or "shortage of sockets or look-ups", now)
            return
        flow.end_shortage()
        if breaker is None:
            breaker = flow.breaker = Breaker()
        if breaker.open_until > now:
            # This call was in flight when the breaker opened: it proves nothing, but may ask for a longer pause.
            breaker.extend(now + self._retry_after_seconds(result))
        elif is_success:
            if breaker.succeeded():
                log.info("flow %r of namespace %r answers again: its breaker is closed", flow.key, flow.namespace.name)
                flow.removed = 0
            flow.forget_breaker()
        else:
            seconds = self._retry_after_seconds(result)
            has_grown = breaker.failed(error_of(result), seconds, now, self._config)
            self._breaker_log.failed(flow, seconds, now, has_grown=has_grown)

    def _update_origin(self, origin: Origin, result: AttemptResult, is_trial: bool) -> None:
        """Count the result for or against the origin. While its breaker is open, only calls that are tried count."""
        contact, breaker = result.contact, origin.breaker
        if breaker is not None and breaker.is_open and not is_trial:
            return
        now = self._loop.time()
        if contact is Contact.UNREACHABLE:
            if breaker is None:
                breaker = origin.breaker = Breaker()
            if breaker.failed(error_of(result), 0.0, now, self._config):
                log.warning(
                    "origin %s cannot be reached (%s): its breaker is open, its timers are held for %g s; %d wait",
                    origin.name,
                    breaker.last_error,
                    breaker.pause_seconds,
                    origin.waiting,
                )
        elif contact is _AWAY:
            self._away(origin, error_of(result), now)
        elif breaker is None:
            return
        elif contact in _HAS_CONTACT:
            if breaker.succeeded():
                log.info("origin %s can be reached again: its breaker is closed", origin.name)
            origin.breaker = None
        elif is_trial:  # that call said nothing about the origin: the next one is tried
            cancel_waker(origin)  # it is for the end of the pause
            breaker.open_until = min(breaker.open_until, now + (_SHORTAGE_SECONDS if contact is _SHORTAGE else 0.0))

    def _away(self, origin: Origin, error: str, now: float) -> None:
        """There is no connection to a message broker. It is tried again soon: to find out costs no call."""
        breaker = origin.breaker
        if breaker is None:
            breaker = origin.breaker = Breaker()
            log.warning("the timers with a target %s… are held, %d wait: %s", origin.name, origin.waiting, error)
        breaker.away(error, now, _AWAY_SECONDS)

    def _retry_after_seconds(self, result: AttemptResult) -> float:
        """How long an overloaded receiver asks not to be called, within bounds."""
        if result.status not in _OVERLOADED or not result.retry_after_ms:
            return 0.0
        return min(result.retry_after_ms / 1_000, self._config.breaker_pause_max.seconds)

    # --- limits -----------------------------------------------------------------------------------

    def set_paused(self, paused: bool) -> None:
        """Pause everything on this instance, or resume it."""
        self.paused = paused
        self.resume()

    def set_limits(self, namespace: Namespace) -> None:
        """The operator's limits and pauses of a namespace, as they are now. Cheap if nothing has changed."""
        share = self._namespaces.get(namespace.name)
        if share is None:
            if not (namespace.paused or namespace.flows):
                return
            share = self._namespaces[namespace.name] = NamespaceShare(namespace.name, _IDLE_FLOWS_MAX)
        for key in [key for key in share.limits if key not in namespace.flows]:
            was_paused = share.limits.pop(key).limits.paused
            self._set_limit(share, key, self._default_limit(), was_paused)
        for key, limits in namespace.flows.items():
            limit, was_paused = share.limits.get(key), False
            if limit is None:
                limit = share.limits[key] = Limit(limits, self._config.rate_per_flow)
            elif limit.limits != limits:
                was_paused = limit.limits.paused
                limit.set(limits, self._config.rate_per_flow)
            else:
                continue
            self._set_limit(share, key, limit, was_paused and not limits.paused)
        if share.paused != namespace.paused:
            share.paused = namespace.paused
            if share.paused:
                self._slots.unlist_namespace(share)
            else:
                self._slots.enlist_namespace(share)
                for flow in list(share.flows.values()):
                    self._pause_ended(flow)
                self.resume()
        self._remove_share_if_idle(share)

    def _default_limit(self) -> Limit | None:
        return Limit(FlowLimits(), self._config.rate_per_flow) if self._config.rate_per_flow else None

    def _set_limit(self, share: NamespaceShare, key: str, limit: Limit | None, pause_ended: bool) -> None:
        flow = share.flows.get(key)
        if flow is not None:
            flow.limit = limit
            if pause_ended:
                self._pause_ended(flow)
            self._limit_changed(flow)

    def _pause_ended(self, flow: Flow) -> None:
        """The operator has resumed it: it is called at once, whatever was known about its receiver."""
        if flow.breaker is not None:
            flow.forget_breaker()
            flow.removed = 0
            self._limit_changed(flow)

    def _limit_changed(self, flow: Flow) -> None:
        cancel_waker(flow)  # it may be for a later time than is right now
        if flow.held:
            self._slots.release_flow(flow)
            self.resume()

    def divide_limits(self, ask: Callable[[LimitedFlow], None], boot_ms: Callable[[], int]) -> None:
        """From now on a limited flow is called only under an allowance. `ask` is called when a flow has none."""
        self._ask, self._boot_ms = ask, boot_ms

    def limited_flows(self) -> list[LimitedFlow]:
        """The flows with a limit of rate or concurrency that have timers waiting, which may be called, or in flight."""
        found: list[LimitedFlow] = []
        for share in self._namespaces.values():
            if self._config.rate_per_flow:
                flows = list(share.flows.values())
            else:
                flows = [share.flows[key] for key in share.limits if key in share.flows]
            for flow in flows:
                limit = flow.limit
                if limit is None or not limit.is_limited:
                    continue
                is_stopped = self.stopped or self.paused or flow.is_paused or self._is_stopped_by_breaker(flow)
                waiting = 0 if is_stopped else flow.waiting
                if waiting or flow.in_flight:
                    found.append(self._limited(flow, limit, waiting))
        return found

    def _limited(self, flow: Flow, limit: Limit, waiting: int) -> LimitedFlow:
        concurrency = limit.limits.concurrency
        return LimitedFlow(flow.namespace.name, flow.key, limit.rate, concurrency, waiting, flow.in_flight)

    def set_allowance(
        self, namespace: str, flow_key: str, rate: float | None, concurrency: int | None, until_ms: int = 0
    ) -> None:
        """How much of the limits of a flow this instance may use until this boot time; None where there is no limit. It
        ends when the operator changes the limits, or when the flow is forgotten."""
        share = self._namespaces.get(namespace)
        if share is None:
            return
        flow = share.flows.get(flow_key)
        limit = share.limits.get(flow_key) or (flow.limit if flow is not None else None)
        if limit is not None:
            limit.allow(rate, concurrency, self._loop.time(), until_ms)
            if flow is not None and flow is not self._asking:
                self._limit_changed(flow)

    # --- status -----------------------------------------------------------------------------------

    def flow_statuses(
        self, namespace: str | None, after: tuple[str, str] | None, limit: int, *, now_ms: int
    ) -> list[FlowStatus]:
        """The flows in memory by namespace and flow key, at most `limit` after the given one. `now_ms` is wall time."""
        names = [namespace] if namespace is not None else sorted(self._namespaces)
        shares = [share for name in names if (share := self._namespaces.get(name)) is not None]
        flows = next_flows(shares, after or ("", ""), limit)
        now = self._loop.time()
        return [status_of(flow, now, now_ms, all_paused=self.paused) for flow in flows]

    # --- adding and removing ----------------------------------------------------------------------

    def _add_flow(self, share: NamespaceShare, key: str) -> Flow:
        if len(share.flows) >= share.idle_max:
            self._forget_idle(share)
        limit = share.limits.get(key) if share.limits else None
        if limit is None and self._config.rate_per_flow:
            limit = self._default_limit()
        flow = share.flows[key] = Flow(share, key, limit)
        return flow

    def _add_queue(self, flow: Flow, origin_name: str) -> Queue:
        share = flow.namespace
        part = share.parts.get(origin_name)
        if part is None:
            origin = self._origins.get(origin_name)
            if origin is None:
                if len(self._origins) >= self._idle_origins_max:
                    self._forget_idle_origins()
                origin = self._origins[origin_name] = Origin(origin_name)
            origin.parts += 1
            part = share.parts[origin_name] = Part(share, origin)
        part.queues += 1
        queue = Queue(flow, part, self._loop.time())
        if flow.queue is None:
            flow.queue = queue
        else:
            if flow.others is None:
                flow.others = {}
            flow.others[origin_name] = queue
        return queue

    def _remove_if_idle(self, queue: Queue) -> None:
        if queue.waiting or queue.in_flight or queue.place is _GONE:
            return
        queue.place = _GONE
        flow, part = queue.flow, queue.part
        origin = part.origin
        if flow.queue is queue:
            flow.queue = None
        elif flow.others is not None:
            del flow.others[origin.name]
        part.queues -= 1
        if not part.queues:
            del part.namespace.parts[origin.name]
            origin.parts -= 1
            if not origin.parts and origin.breaker is None:
                self._remove_origin(origin)
        self._remove_flow_if_idle(flow)

    def _remove_flow_if_idle(self, flow: Flow) -> None:
        """Remove it if it has no queue and nothing to remember."""
        share, limit = flow.namespace, flow.limit
        if flow.queue is not None or flow.others or not (flow.breaker is None or flow.breaker.is_clear):
            return
        if limit is not None and flow.key not in share.limits and limit.next_start > self._loop.time():
            return  # the next timer of this flow must not be called sooner
        self._remove_flow(flow)

    def _remove_flow(self, flow: Flow) -> None:
        share = flow.namespace
        if share.flows.get(flow.key) is flow:
            del share.flows[flow.key]
            flow.end_shortage()
        if flow.waker is not None:
            cancel_waker(flow)
        if not share.flows:
            self._remove_share_if_idle(share)

    def _remove_share_if_idle(self, share: NamespaceShare) -> None:
        if share.is_idle and self._namespaces.get(share.name) is share:
            del self._namespaces[share.name]

    def _remove_origin(self, origin: Origin) -> None:
        del self._origins[origin.name]
        cancel_waker(origin)

    def _forget_idle(self, share: NamespaceShare) -> None:
        """Remove the flows of a namespace that have nothing waiting or in flight, and with them their breakers."""
        for flow in [flow for flow in share.flows.values() if flow.queue is None and not flow.others]:
            del share.flows[flow.key]
            flow.forget_breaker()
            cancel_waker(flow)
        # If most are busy, checking all of them again for every new flow would cost more than keeping them.
        share.idle_max = max(_IDLE_FLOWS_MAX, 2 * len(share.flows))

    def _forget_idle_origins(self) -> None:
        for origin in [origin for origin in self._origins.values() if not origin.parts]:
            self._remove_origin(origin)
        self._idle_origins_max = max(_IDLE_ORIGINS_MAX, 2 * len(self._origins))  # as above

    def sweep(self) -> None:
        """Called once a second: look again at a limited number of flows, and at all origins and namespaces that wait,
        so that nothing depends on an event that was missed."""
        for _ in range(_SWEPT_PER_SECOND):
            flow = next(self._to_sweep, None)
            if flow is None:
                self._to_sweep = iter(list(self.flows()))
                break
            if flow.held:
                self._slots.release_flow(flow)
            elif flow.queue is None and flow.namespace.flows.get(flow.key) is flow:
                self._remove_flow_if_idle(flow)
        for origin in self._origins.values():
            if origin.blocked:
                self._slots.release_parts(origin)
        self._slots.release_namespaces()
        self.resume()
