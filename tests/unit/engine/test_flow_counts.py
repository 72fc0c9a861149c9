"""Random operations on flow control: after each one its counts equal a count by brute force, no limit is exceeded, and
nothing waits that may be called."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.config import load_config
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import FlowLimits, Namespace
from duetime.engine.flow import FlowControl
from duetime.engine.flow_queues import Place
from duetime.testing.virtual import VirtualClock, run_virtual

OK = AttemptResult(Contact.ANSWERED, 200)
RESULTS = (
    OK,
    OK,
    AttemptResult(Contact.ANSWERED, 500),
    AttemptResult(Contact.ANSWERED, 503, retry_after_ms=3_000),
    AttemptResult(Contact.BROKEN, error="timeout"),
    AttemptResult(Contact.UNREACHABLE, error="refused"),
    AttemptResult(Contact.UNREACHABLE, error="refused"),
    AttemptResult(Contact.TIMED_OUT, error="connect timeout after 1 s"),
    AttemptResult(Contact.SHORTAGE, error="no socket"),
    AttemptResult(Contact.NOT_SENT),
)
NAMESPACES = ("m", "n", "o")
ORIGINS = ("http://a", "http://b")


class Item(NamedTuple):
    ticket: int
    namespace: str
    flow_key: str
    origin: str


class World:
    """Flow control whose calls end when the test says so, and a model of what it should have."""

    def __init__(self) -> None:
        flags = {
            "delivery.concurrency_max": 7,
            "delivery.concurrency_per_origin": 5,
            "delivery.concurrency_per_flow": 3,
            "delivery.breaker_failures": 2,
        }
        self.waiting: dict[int, Item] = {}
        self.calls: dict[int, tuple[Item, asyncio.Future[AttemptResult]]] = {}
        self.unwanted: set[int] = set()
        self.dropped: set[int] = set()
        self.flow: FlowControl[Item] = FlowControl(
            load_config(environ={}, flags=flags).delivery,
            deliver=self._deliver,
            wanted=self._is_wanted,
            done=self._done,
        )
        self.submitted = 0

    def _is_wanted(self, item: Item) -> bool:
        if item.ticket in self.unwanted:
            del self.waiting[item.ticket]
            return False
        return True

    async def _deliver(self, item: Item) -> AttemptResult:
        del self.waiting[item.ticket]
        future: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        self.calls[item.ticket] = (item, future)
        return await future

    def _done(self, item: Item, result: AttemptResult) -> None:
        if result.contact in (Contact.SHORTAGE, Contact.NOT_SENT):
            self.submit(item.namespace, item.flow_key, item.origin)

    def submit(self, namespace: str, flow_key: str, origin: str) -> None:
        self.submitted += 1
        # Tickets come in any order: a backlog is loaded after newer timers.
        item = Item((self.submitted * 7919) % 10_007, namespace, flow_key, origin)
        self.waiting[item.ticket] = item
        self.flow.submit(item, item.ticket, namespace, flow_key, origin)

    def step(self, kind: str, number: int) -> None:
        namespace, origin = NAMESPACES[number % 3], ORIGINS[number % 2]
        if kind == "submit":
            # One flow key has timers of both origins; the others are URLs.
            key = "shared" if number % 5 == 0 else f"{origin}/{number % 4}"
            for _ in range(1 + number % 3):
                self.submit(namespace, key, origin)
        elif kind == "discard" and self.waiting:
            ticket = sorted(self.waiting)[number % len(self.waiting)]
            if ticket in self.flow._items:
                del self.waiting[ticket]
            self.flow.discard(ticket)
        elif kind == "end" and self.calls:
            ticket = sorted(self.calls)[number % len(self.calls)]
            self.calls.pop(ticket)[1].set_result(RESULTS[number % len(RESULTS)])
        elif kind == "limit":
            limits = (
                {},
                {"shared": FlowLimits(concurrency=1), f"{origin}/1": FlowLimits(paused=True)},
                {"shared": FlowLimits(rate=2.0)},
            )[number % 3]
            self.set_namespace(namespace, limits, paused=number % 7 == 0)
        elif kind == "allow":
            self.flow.set_allowance(namespace, "shared", number % 3, number % 2)
        elif kind == "pause":
            self.flow.set_paused(number % 2 == 0)
        elif kind == "park":
            for item, _ in self.flow.remove_waiting(number % 5):
                del self.waiting[item.ticket]
        elif kind == "unwanted":
            self.unwanted.update(sorted(self.waiting)[: number % 3])
        elif kind == "sweep":
            self.flow.sweep()

    def set_namespace(self, name: str, limits: dict[str, FlowLimits], *, paused: bool) -> None:
        self.flow.set_limits(Namespace(name=name, num_shards=1, created_at_ms=0, flows=limits, paused=paused))

    def check(self) -> None:
        flow = self.flow
        queues = list(flow.queues())
        assert flow.waiting == len(self.waiting) == sum(queue.waiting for queue in queues)
        assert flow.oldest_ticket() == min(self.waiting, default=None)
        assert flow.in_flight == len(self.calls) == sum(queue.in_flight for queue in queues)
        items = [item for item, _ in self.calls.values()]
        by_origin = Counter(item.origin for item in items)
        by_namespace = Counter(item.namespace for item in items)
        assert by_origin == Counter({name: origin.in_flight for name, origin in flow._origins.items()})
        assert by_namespace == Counter({name: share.in_flight for name, share in flow._namespaces.items()})
        assert flow.in_flight <= 7
        assert max(by_origin.values(), default=0) <= 5
        assert max((one.in_flight for one in flow.flows()), default=0) <= 3
        for queue in queues:
            name = (queue.part.namespace.name, queue.flow.key, queue.part.origin.name)
            mine = {item.ticket for item in self.waiting.values() if item[1:] == name}
            assert queue.waiting == len(mine)
            assert mine <= set(queue.tickets)
            assert (queue.place is not Place.NONE) == bool(mine), "it is in a list if it has anything waiting"
            assert queue.waiting or queue.in_flight, "an idle queue is removed"
        if not flow._is_full():
            slots = flow._slots
            passed_over = [queue for queue in queues if queue.waiting and slots.may_start(queue)]
            assert not passed_over, "it may be called and waits"


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


KINDS = (
    ("submit",) * 9
    + ("end",) * 14
    + ("wait",) * 3
    + ("discard", "limit", "allow", "pause", "park", "unwanted", "sweep")
)
steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1_000)), max_size=120)


@settings(max_examples=300, deadline=None)
@given(steps)
def test_counts_are_right_limits_hold_and_nothing_that_may_be_called_waits(operations: list[tuple[str, int]]) -> None:
    async def scenario(clock: VirtualClock) -> None:
        world = World()
        for kind, number in operations:
            world.step(kind, number)
            await asyncio.sleep(number % 50 / 10 if kind == "wait" else 0.0001)
            world.check()
        # Everything answers again, and is no longer limited: all that waits is called, without a sweep.
        world.flow.set_paused(False)
        for name in NAMESPACES:
            world.set_namespace(name, {}, paused=False)
        for _ in range(10_000):
            for _item, future in list(world.calls.values()):
                future.set_result(OK)
            world.calls.clear()
            if not world.waiting:
                break
            await asyncio.sleep(0.1 if world.flow.in_flight else 1)
            world.check()
        await asyncio.sleep(0.1)
        assert world.waiting == {}
        assert world.flow.in_flight == 0
        world.flow.stop()

    run_virtual(scenario)
