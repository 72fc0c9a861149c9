"""A whole cluster in one thread, in virtual time, from one seed: the real engine, shard, flow and service
code on a memory store, with a simulated network, clocks and destinations, and with everything going wrong.

    run = simulate(seed=7)
    assert not run.violations, run.violations[0]

The same seed gives the same history, byte for byte. A run has three acts: a stormy one, in which the
faults of `Weather` happen; a calm one, in which everything is mended and must come to rest; and a last
one without any fault, in which no timer may be late. The checker judges what the destinations saw.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import copy_context
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from duetime.clock import Clock
from duetime.config import Config, load_config
from duetime.engine import Engine
from duetime.errors import (
    Busy,
    Conflict,
    DuetimeError,
    NotFound,
    OutcomeUnknown,
)
from duetime.model import TimerKey, TimerPatch, TimerSpec, Verdict
from duetime.peers import Forward, OrderAnswer
from duetime.service import Service
from duetime.store import ListQuery, Store
from duetime.stores.memory import MemoryStore
from duetime.telemetry import Telemetry
from duetime.testing.checker import Callback, Kind, Result, Violation, Wish, judge
from duetime.testing.sim_loop import INSTANCE, SimLoop
from duetime.testing.sim_network import SimDeliverer, SimStore
from duetime.testing.sim_peers import NEVER, SimPeers
from duetime.testing.virtual import START_WALL_MS, VirtualClock

__all__ = ["Run", "Scenario", "simulate"]

T = TypeVar("T")


class Scenario(Struct, frozen=True, kw_only=True):
    """What a run is made of. Probabilities are per call or per second of virtual time."""

    instances: int = 3
    clients: int = 4
    timers: int = 40  # the ids that clients fight over
    burst_timers: int = 120
    stormy_seconds: float = 25.0
    num_shards: tuple[int, ...] = (1, 4, 4)  # one of these
    slow_store: float = 0.05  # per call
    failed_store: float = 0.02
    unknown_store: float = 0.02  # half of them applied, some of those late
    torn_commit: float = 0.03  # each batch fares by itself, as where every shard is a transaction of its own
    crashes: float = 0.06  # per second
    freezes: float = 0.06
    jumps: float = 0.04
    departures: float = 0.04
    lost_requests: float = 0.03  # per request of a client
    slow_connects: float = 0.1  # per delivery
    lost_forwards: float = 0.03  # per forward, on the way there; as many on the way back
    repeated_forwards: float = 0.05
    bursts: float = 0.1  # per second: many timers of one instant


class Run(Struct):
    """What came of it."""

    seed: int
    violations: list[Violation]
    wishes: int
    callbacks: int
    faults: dict[str, int]
    virtual_seconds: float
    digest: str
    history: list[str]


# --- the cluster ---------------------------------------------------------------------------------


class Instance:
    """One process of the cluster, and what can happen to it."""

    def __init__(self, world: World, name: str, config: Config) -> None:
        self.world = world
        self.name = name
        self.clock = VirtualClock(world.loop)
        self.started = asyncio.Event()
        deliverer = SimDeliverer(world, name)
        store = cast(Store, SimStore(world))
        self.engine = Engine(
            config,
            store,
            deliverer,
            cast(Clock, self.clock),
            Telemetry(),
            address=name,
            rng=random.Random(world.rng.getrandbits(64)),
        )
        self.service = Service(config, self.engine, store, deliverer, SimPeers(world, self))

    def inside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something as part of this instance: it stops when the instance does."""
        context = copy_context()
        context.run(INSTANCE.set, self.name)
        return self.world.loop.create_task(work, context=context)

    async def take(self, forward: Forward) -> OrderAnswer:
        return await asyncio.shield(self.service.take(forward))

    async def start(self) -> None:
        while True:
            try:
                await self.service.create_default_namespace()
                await self.engine.start()
            except DuetimeError:
                await asyncio.sleep(0.2)
            else:
                self.started.set()
                return

    @property
    def up(self) -> bool:
        return self.started.is_set()


class World:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed = seed
        self.scenario = scenario
        self.rng = random.Random(seed)
        self.num_shards = self.rng.choice(scenario.num_shards)
        self.loop = SimLoop(random.Random(self.rng.getrandbits(64)))
        self.database = MemoryStore(cast(Clock, VirtualClock(self.loop)))
        self.config = load_config(
            environ={},
            flags={
                "namespaces.default_num_shards": self.num_shards,
                "delivery.breaker_pause_max": "4s",
                "engine.look_ahead": f"{self.rng.choice((2, 10, 60))}s",
                "engine.timers_in_memory_max": 1_000,
            },
        )
        self.instances: dict[str, Instance] = {}
        self.stormy = False
        self.wishes: list[Wish] = []
        self.callbacks: list[Callback] = []
        self.faults: Counter[str] = Counter()
        self.history: list[str] = []
        self.restless = False
        self._born = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def now_ms(self) -> int:
        """True time: that of the database, and of the judge."""
        return START_WALL_MS + int(self.loop.now * 1_000 + 1e-6)

    def tell(self, line: str) -> None:
        self.history.append(f"{self.loop.now:.6f} {line}")

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1
        self.tell(f"fault: {kind}")

    def saw(self, callback: Callback) -> None:
        self.callbacks.append(callback)
        self.tell(f"callback {msgspec.json.encode(callback).decode()}")

    def wished(self, wish: Wish) -> None:
        self.wishes.append(wish)
        self.tell(f"wish {msgspec.json.encode(wish).decode()}")

    def outside(self, work: Any) -> asyncio.Task[Any]:
        """Run something that belongs to no instance."""
        context = copy_context()
        context.run(INSTANCE.set, "")
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- instances come and go --------------------------------------------------------------------

    def launch(self) -> Instance:
        self._born += 1
        instance = Instance(self, f"i{self._born}", self.config)
        self.instances[instance.name] = instance
        self.tell(f"launch {instance.name}")
        instance.inside(instance.start())
        return instance

    def crash(self, instance: Instance) -> None:
        self.tell(f"crash {instance.name}")
        self.loop.kill(instance.name)
        del self.instances[instance.name]

    async def depart(self, instance: Instance) -> None:
        """A graceful stop: drain, release, sign off."""
        self.tell(f"depart {instance.name}")
        del self.instances[instance.name]
        await instance.inside(instance.engine.stop())
        self.loop.kill(instance.name)

    async def faults_happen(self) -> None:
        """Once every tenth of a second, perhaps, something."""
        scenario, rng = self.scenario, self.rng
        while self.stormy:
            await asyncio.sleep(0.1)
            for kind, per_second in (
                ("crash", scenario.crashes),
                ("freeze", scenario.freezes),
                ("jump", scenario.jumps),
                ("departure", scenario.departures),
            ):
                if rng.random() < per_second * 0.1 and self.instances:
                    self.happen(kind, rng.choice(list(self.instances.values())))

    def happen(self, kind: str, victim: Instance) -> None:
        rng = self.rng
        self.fault(kind)
        if kind == "crash":
            self.crash(victim)
            self.outside(self.later(rng.uniform(0.1, 6.0), self.launch))
        elif kind == "freeze":
            self.loop.freeze(victim.name)
            self.tell(f"freeze {victim.name}")
            self.outside(self.later(rng.choice((0.3, 2.0, 4.0, 8.0)), lambda: self.loop.thaw(victim.name)))
        elif kind == "jump":
            victim.clock.offset_ms = rng.choice((-60_000, -700, -300, 300, 700, 3_600_000))
            self.tell(f"jump {victim.name} {victim.clock.offset_ms}")
            self.outside(self.later(rng.uniform(0.5, 5.0), lambda: setattr(victim.clock, "offset_ms", 0)))
        elif victim.up:
            self.outside(self.depart(victim))
            self.outside(self.later(rng.uniform(0.1, 3.0), self.launch))

    async def later(self, seconds: float, act: Callable[[], object]) -> None:
        await asyncio.sleep(seconds)
        act()

    # --- the play ---------------------------------------------------------------------------------

    async def play(self) -> None:
        for _ in range(self.scenario.instances):
            self.launch()
        await asyncio.gather(*(instance.started.wait() for instance in self.instances.values()))
        await asyncio.sleep(1)
        self.stormy = True
        clients = [self.outside(SimClient(self, f"c{n}").work()) for n in range(self.scenario.clients)]
        clients.append(self.outside(SimClient(self, "burst").burst()))
        storm = self.outside(self.faults_happen())
        await asyncio.sleep(self.scenario.stormy_seconds)
        self.stormy = False
        await asyncio.gather(storm, *clients)
        await self.calm()
        await self.last_act()

    async def calm(self) -> None:
        """Everything is mended: whoever is frozen thaws, clocks are right, and it must come to rest."""
        for name in list(self.loop.frozen):
            self.loop.thaw(name)
        for instance in self.instances.values():
            instance.clock.offset_ms = 0
        while len(self.instances) < self.scenario.instances:
            self.launch()
        self.tell("calm")
        everything = ListQuery(namespace="default", num_shards=self.num_shards, limit=1)
        for _ in range(600):
            await asyncio.sleep(1)
            found = await self.database.list_timers(everything)
            if not found.timers:
                return
        self.restless = True
        self.tell("not at rest")

    async def last_act(self) -> None:
        """No fault any more: what is asked for now fires on time."""
        await asyncio.sleep(20)
        client = SimClient(self, "last")
        for number in range(12):
            await client.put(f"last-{number}", "http://ok", self.rng.randint(500, 4_000))
        await asyncio.sleep(30)


# --- clients -------------------------------------------------------------------------------------


class SimClient:
    """Creates, replaces, updates and deletes; one wish about a timer at a time, over a network that loses things."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.values = 0

    async def work(self) -> None:
        rng, world = self.world.rng, self.world
        mine = [f"{self.name}-{n}" for n in range(world.scenario.timers // world.scenario.clients)]
        while world.stormy:
            await asyncio.sleep(rng.expovariate(8.0))
            timer = rng.choice(mine)
            dice = rng.random()
            if dice < 0.2:
                await self.delete(timer)
            elif dice < 0.4:
                await self.put(timer, "", rng.randint(-200, 8_000), update=True)
            else:
                host = rng.choices(("ok", "slow", "dead", "flapping"), (6, 1, 1, 2))[0]
                await self.put(timer, f"http://{host}", rng.choice((rng.randint(-500, 3_000), rng.randint(0, 20_000))))

    async def burst(self) -> None:
        """Now and then more timers of one instant than fit a page."""
        rng, world = self.world.rng, self.world
        number = 0
        while world.stormy:
            await asyncio.sleep(rng.expovariate(world.scenario.bursts))
            number += 1
            delay_ms = rng.randint(3_000, 8_000)
            await asyncio.gather(
                *(self.put(f"burst{number}-{n}", "http://ok", delay_ms) for n in range(world.scenario.burst_timers))
            )

    async def put(self, timer: str, url: str, delay_ms: int, *, update: bool = False) -> None:
        world = self.world
        self.values += 1
        value = f'"{self.name}v{self.values}"'
        asked_at_ms = world.now_ms()
        due_ms = asked_at_ms + delay_ms
        key = TimerKey("default", timer)
        if update:
            patch = TimerPatch(execute_at_ms=due_ms, payload=value)
            result = await self._ask(lambda service: service.update(key, patch))
        else:
            spec = TimerSpec(namespace="default", timer_id=timer, execute_at_ms=due_ms, callback_url=url, payload=value)
            result = await self._ask(lambda service: service.create(spec))
        world.wished(Wish(timer, Kind.PUT, asked_at_ms, world.now_ms(), result, value, due_ms))

    async def delete(self, timer: str) -> None:
        asked_at_ms = self.world.now_ms()
        key = TimerKey("default", timer)
        result = await self._ask(lambda service: service.delete(key))
        self.world.wished(Wish(timer, Kind.DELETE, asked_at_ms, self.world.now_ms(), result))

    async def _ask(self, call: Callable[[Service], Awaitable[Any]]) -> Result:
        """At one instance after the other, as long as it is certain that nothing was applied."""
        world, rng = self.world, self.world.rng
        for _ in range(40):
            up = [instance for instance in world.instances.values() if instance.up]
            if not up:
                await asyncio.sleep(0.3)
                continue
            result = await self._ask_one(rng.choice(up), call)
            if result is not None:
                return result
            if world.stormy and rng.random() < 0.2:
                return Result.FAIL  # takes the server at its word
            await asyncio.sleep(rng.uniform(0.01, 0.3))
        return Result.FAIL

    async def _ask_one(self, instance: Instance, call: Callable[[Service], Awaitable[Any]]) -> Result | None:
        world, rng = self.world, self.world.rng
        lost = world.stormy and rng.random() < world.scenario.lost_requests
        if lost and rng.random() < 0.5:
            world.fault("request lost")
            return Result.INFO
        await asyncio.sleep(rng.uniform(0.0001, 0.002))
        answer = instance.inside(_outcome(call, instance.service))
        # A crashed instance never answers, and a client does not wait for ever.
        done, _ = await asyncio.wait({answer}, timeout=20)
        if not done or lost:
            if lost:
                world.fault("answer lost")
            return Result.INFO
        return answer.result()


async def _outcome(call: Callable[[Service], Awaitable[Any]], service: Service) -> Result | None:
    """None: certainly not applied, worth trying elsewhere."""
    try:
        answer = await call(service)
    except OutcomeUnknown:
        return Result.INFO
    except (NotFound, Conflict):
        return Result.FAIL
    except Busy:
        return None
    except DuetimeError as error:
        return None if error.status == 503 else Result.FAIL
    return Result.FAIL if answer is Verdict.ALREADY_REACHED else Result.OK


# --- the judgement -------------------------------------------------------------------------------

LATE_BY_MAX_MS = 100  # in the last act: the network's and the store's few milliseconds, many times over


def simulate(seed: int, scenario: Scenario | None = None) -> Run:
    world = World(seed, scenario or Scenario())
    asyncio.set_event_loop(world.loop)
    try:
        play = world.outside(world.play())
        world.loop.run_until_complete(play)
    finally:
        world.loop.clear_up()
        asyncio.set_event_loop(None)
    violations = judge(world.wishes, world.callbacks, clock_error_ms=world.config.engine.clock_skew_max.ms)
    if world.restless:
        violations.append(Violation("F", "-", "timers are still scheduled ten minutes after the last fault", ""))
    violations += _late(world)
    violations += [Violation("P", "-", kind, "") for kind in NEVER if world.faults[kind]]
    return Run(
        seed=seed,
        violations=violations,
        wishes=len(world.wishes),
        callbacks=len(world.callbacks),
        faults=dict(world.faults),
        virtual_seconds=world.loop.now,
        digest=blake2b("\n".join(world.history).encode(), digest_size=16).hexdigest(),
        history=world.history,
    )


def _late(world: World) -> list[Violation]:
    # A wish that took long to reach its owner cannot fire before it was told.
    due = {w.value: max(w.due_ms, w.told_at_ms) for w in world.wishes if w.timer.startswith("last-")}
    return [
        Violation("L", call.timer, f"{call.started_at_ms - due[call.value]} ms late without a fault", "")
        for call in world.callbacks
        if call.value in due and call.attempt == 1 and call.started_at_ms - due[call.value] > LATE_BY_MAX_MS
    ]
