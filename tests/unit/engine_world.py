"""A small world for engine tests: a real engine and service on a memory store, in virtual time, with
destinations that answer as the test says."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from duetime.config import load_config
from duetime.delivery import Attempt
from duetime.domain.headers import check_http_headers
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Created, TimerKey, TimerSpec, TimerView
from duetime.engine.engine import Engine
from duetime.engine.pending_write import PendingWrite
from duetime.engine.shard import Phase, Shard
from duetime.service.service import Service
from duetime.store import Store
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing.faulty import FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

OK = AttemptResult(Contact.ANSWERED, 200)
URL = "http://shop.test/hook"


class Destinations:
    """A Deliverer whose receivers live in the test. `answers` maps a URL to what it does with a call."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.answers: dict[str, Callable[[Attempt], Awaitable[AttemptResult]]] = {}
        self.calls: list[tuple[int, str, int]] = []  # (wall time, timer id, attempt)
        self.payloads: list[str | None] = []
        self.before_begin: Callable[[Attempt], Awaitable[None]] | None = None

    def check(self, url: str, namespace: str) -> None:
        if not url.startswith("http"):
            raise ValueError("must be a URL")

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        check_http_headers(headers)

    def origin(self, url: str) -> str:
        return url.partition("?")[0]

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        if self.before_begin is not None:
            await self.before_begin(attempt)
        at_ms = attempt.begin()
        if at_ms is None:
            return AttemptResult(Contact.NOT_SENT)
        self.calls.append((at_ms, attempt.timer.timer_id, attempt.timer.attempts + 1))
        self.payloads.append(attempt.timer.payload)
        answer = self.answers.get(attempt.timer.callback_url)
        return OK if answer is None else await answer(attempt)

    async def close(self) -> None:
        pass

    def called(self) -> list[str]:
        return [timer_id for _, timer_id, _ in self.calls]


class World:
    def __init__(self, clock: VirtualClock, store: Store | None = None, **settings: Any) -> None:
        self.clock = clock
        self.store: Store = store or MemoryStore(clock)
        self.config = load_config(
            environ={}, flags={name.replace("__", "."): value for name, value in settings.items()}
        )
        self.destinations = Destinations(clock)
        self.starts = 0
        self.new_instance()

    def new_instance(self) -> None:
        self.starts += 1
        self.engine = Engine(
            self.config,
            self.store,
            self.destinations,
            self.clock,
            Telemetry(),
            address="test:1",
            rng=random.Random(self.starts),
        )
        self.service = Service(self.config, self.engine, self.store, self.destinations)

    async def start(self) -> None:
        await self.store.migrate()
        await self.store.open()
        await self.service.namespaces.create_default()
        await self.engine.start()

    async def crash_and_restart(self) -> None:
        """The process ends without a drain; another one starts on the same store."""
        self.engine.abandon()
        await asyncio.sleep(0)
        self.new_instance()
        await self.start()

    async def create(self, timer_id: str, delay_ms: int = 1_000, **fields: Any) -> Created:
        fields.setdefault("callback_url", URL)
        spec = TimerSpec(**{"namespace": "default", "timer_id": timer_id, "delay_ms": delay_ms, **fields})
        return await self.service.create(spec)

    async def get(self, timer_id: str) -> TimerView:
        return await self.service.get(TimerKey("default", timer_id))


def check_shard(shard: Shard) -> None:
    """What is true of a shard between any two iterations of the event loop."""
    for key, entry in shard.entries.items():
        assert entry.timer.key == key
        assert entry.shard is shard
        assert entry.phase is not Phase.GONE, f"{key} is in memory and gone"
        if entry.phase is Phase.ARMED:
            assert key not in shard.pending, f"{key} may fire while it is written"
            assert key not in shard.committing, f"{key} may fire while it is written"
            assert entry.deferred_settlement is None
        if entry.phase is Phase.SENDING:
            assert shard.sending.get(key), f"{key} is in flight and not counted"
            assert entry.started_at_ms
        if entry.phase is Phase.SETTLING:
            assert key in shard.pending or key in shard.committing, f"{key} has a settlement that is not pending"
    assert all(count > 0 for count in shard.sending.values())


def check_accounts(engine: Engine) -> None:
    """What is true of an engine between any two iterations of the event loop: its counters are correct."""
    shards = list(engine.shards.values())
    for shard in shards:
        check_shard(shard)
    writes: list[PendingWrite] = [
        write for shard in shards for write in (*shard.pending.values(), *shard.committing.values())
    ]
    entries = [entry for shard in shards for entry in shard.entries.values()]
    assert engine.counters.writes_waiting == len(writes), "writes_waiting drifts"
    of_namespaces = Counter(key.namespace for shard in shards for key in (*shard.pending, *shard.committing))
    assert engine.counters.writes_of == of_namespaces, "writes_of drifts"
    bytes_of: Counter[str] = Counter()
    for shard in shards:
        for key, write in (*shard.pending.items(), *shard.committing.items()):
            bytes_of[key.namespace] += write.weight
    assert engine.counters.bytes_of == bytes_of, "bytes_of drifts"
    assert engine.counters.write_bytes_waiting == bytes_of.total(), "write_bytes_waiting drifts"
    assert engine.counters.unsettled == sum(write.settlement is not None for write in writes), "unsettled drifts"
    assert engine.counters.weight == sum(entry.weight for entry in entries), "the weight of what is in memory drifts"
    armed = sorted(entry.ticket for entry in entries if entry.phase is Phase.ARMED)
    held = [
        entry.ticket
        for entry in (*engine.fire_loop._without_namespace.values(), *engine.fire_loop._being_read.values())
        if entry.phase is Phase.ARMED
    ]
    draining = [entry.ticket for entry in entries if entry.phase is Phase.ARMED and entry.shard.draining]
    tickets = engine.fire_loop.armed_tickets()
    assert set(tickets) <= set(armed), "what is armed is not in memory"
    assert set(armed) <= {*tickets, *held, *draining}, "an armed timer is not in the heap and will not fire"
    flow = engine.fire_loop.flow
    assert flow.waiting == sum(place.waiting for place in flow.queues())
    assert flow.in_flight == sum(place.in_flight for place in flow.queues())


def check_nothing_is_left(engine: Engine) -> None:
    """After a stop: every shard is given free, and nothing of them is left in memory."""
    assert engine.shards == {}
    assert (engine.counters.writes_waiting, engine.counters.unsettled, engine.counters.weight) == (0, 0, 0)
    assert engine.fire_loop.armed_tickets() == []


def in_world(
    scenario: Callable[[World], Awaitable[None]],
    *,
    new_store: Callable[[VirtualClock], Store] = MemoryStore,
    **settings: Any,
) -> None:
    """Run a scenario in a world of its own."""

    async def run(clock: VirtualClock) -> None:
        world = World(clock, new_store(clock), **settings)
        await world.start()
        try:
            await scenario(world)
            check_accounts(world.engine)
        finally:
            await world.engine.stop()
        check_nothing_is_left(world.engine)

    run_virtual(run)


def on_faulty(
    scenario: Callable[[World, FaultyStore], Awaitable[None]],
    new_store: Callable[[VirtualClock], MemoryStore] = MemoryStore,
    **settings: Any,
) -> None:
    """Run a scenario on a store that fails when told to."""

    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(new_store(clock))
        world = World(clock, store.as_store, **settings)
        await world.start()
        try:
            await scenario(world, store)
            check_accounts(world.engine)
        finally:
            store.heal()
            await world.engine.stop()
        check_nothing_is_left(world.engine)

    run_virtual(run)


def on_one_shard(
    scenario: Callable[[World, FaultyStore], Awaitable[None]],
    new_store: Callable[[VirtualClock], MemoryStore] = MemoryStore,
    **settings: Any,
) -> None:
    """The same, with all timers in one shard."""
    on_faulty(scenario, new_store, namespaces__default_num_shards=1, **settings)
