"""A whole cluster in one thread, in virtual time, from one seed: the real engine, shard, flow and service
code on a memory store, with a simulated network, clocks and destinations, and with everything going wrong.

    run = simulate(seed=7)
    assert not run.violations, run.violations[0]

The same seed gives the same history, byte for byte. A run has three acts: a stormy one, in which the
faults of `Scenario` happen; a calm one, in which all faults end and all timers must be settled; and a last
one without any fault, in which no timer may be late. The checker judges what the destinations saw. Beside its
invariants there are

    F  after the last fault all timers are settled
    G  a read sees what was acknowledged before it
    H  an instance that is broken keeps no shards
    L  without a fault no timer is late
    N  nothing fires before its namespace is known; nothing is acknowledged in a namespace whose deletion was
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from hashlib import blake2b
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from duetime.clock import Clock
from duetime.cluster.forwarding import CommandAnswer, Forward
from duetime.config import Config
from duetime.engine.engine import Engine
from duetime.engine.shard import Shard
from duetime.errors import StoreError
from duetime.service.service import Service
from duetime.store import Store
from duetime.telemetry import Telemetry
from duetime.testing.checker import Callback, Fault, Kind, Result, Violation, Wish, judge
from duetime.testing.simulation.clients import NamespaceClient, SimClient
from duetime.testing.simulation.database import SimDatabase
from duetime.testing.simulation.loop import INSTANCE, SimLoop
from duetime.testing.simulation.network import Cut, SimDeliverer, SimStore, name_in_history, value_of
from duetime.testing.simulation.peers import NEVER, SimPeers
from duetime.testing.simulation.settings import Settings, choose_settings, constants_set, plain_settings
from duetime.testing.virtual import START_WALL_MS, VirtualClock

__all__ = ["EARLY_BY_MAX_MS", "ODD_METHODS", "Instance", "Run", "Scenario", "SimClient", "World", "judged", "simulate"]

T = TypeVar("T")

# How early a callback may come by the database's clock, where every clock is right or wrong by a constant within
# engine.clock_skew_max. Where clocks jump it is engine.clock_skew_max itself.
EARLY_BY_MAX_MS = 25
_LATE_BY_MAX_MS = 100  # in the last act: many times the few milliseconds that network and store take
_OFFSET_MAX_MS = 450
_BROKEN_FOR_SECONDS = 15.0  # then the instance is restarted, as a service manager would do
ODD_METHODS = ("load", "commit", "get_many", "heartbeat", "shards", "namespaces", "claim", "members", "purge_reached")


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
    torn_answer: float = 0.03  # a load or a purge fails for some of its shards
    outages: float = 0.06  # per second: of the link to the database, of one instance or of all
    odd_errors: float = 0.03  # per second: store calls raise an unexpected error, once or several times
    spoilt_rows: float = 0.01  # per second: a timer that cannot be decoded any more
    crashes: float = 0.06
    freezes: float = 0.06
    jumps: float = 0.04
    departures: float = 0.04
    broken_deliveries: float = 0.003  # per delivery: the deliverer raises
    dead_connections: float = 0.02  # per delivery: the request goes once more, on another connection
    lost_callback_answers: float = 0.01  # per delivery that was accepted
    hang_ups: float = 0.01  # per request of a client
    lost_requests: float = 0.03  # per request of a client
    slow_connects: float = 0.1  # per delivery
    lost_forwards: float = 0.03  # per forward, on the way there; as many on the way back
    repeated_forwards: float = 0.05
    bursts: float = 0.1  # per second: many timers of one instant
    namespaces: int = 2  # beside `default`, made and deleted all the time
    varied: bool = True  # limits and clocks are chosen by the seed


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


class SimEngine(Engine):
    """Reports when a shard was released although deliveries were still in flight at the drain timeout: these may be
    repeated. (Not those that were begun during the drain.)"""

    def tell_of(self, told: Callable[[int, int], None], dead: Callable[[], None]) -> None:
        self._told = told
        self._dead = dead
        self._release_began_ms: dict[Shard, int] = {}

    async def _release(self, shards: list[Shard], *args: Any) -> None:
        for shard in shards:
            self._release_began_ms.setdefault(shard, self.clock.boot_ms())  # its release may have begun already
        await super()._release(shards, *args)

    def _drop(self, shard: Shard, *args: Any) -> None:
        began_ms = self._release_began_ms.pop(shard, None)
        waited_ms = 0 if began_ms is None else self.clock.boot_ms() - began_ms
        if not shard.is_quiet and began_ms is not None and waited_ms >= self._config.server.drain_timeout.ms:
            self._told(began_ms - self.clock.boot_ms(), 0)
        super()._drop(shard, *args)

    def _drop_all(self) -> None:
        self._dead()
        super()._drop_all()


class Instance:
    """One process of the cluster, and what can happen to it."""

    def __init__(self, world: World, name: str, config: Config) -> None:
        self.world = world
        self.name = name
        self.offset_ms = world.some_offset_ms()  # how far its clock is always off
        self.clock = VirtualClock(world.loop, self.offset_ms)
        self.started = asyncio.Event()
        self.broken_since: float | None = None
        deliverer = SimDeliverer(world, name)
        self.link = SimStore(world, name)
        store = cast(Store, self.link)
        self.engine = SimEngine(
            config,
            store,
            deliverer,
            cast(Clock, self.clock),
            Telemetry(),
            address=name,
            rng=random.Random(world.rng.getrandbits(64)),
        )
        self.engine.tell_of(self._drain_timed_out, self._declared_dead)
        self.service = Service(config, self.engine, store, deliverer, SimPeers(world, self))

    def inside(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something as part of this instance: it stops when the instance does."""
        context = copy_context()
        context.run(INSTANCE.set, self.name)
        return self.world.loop.create_task(work, context=context)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of this instance, as part of this instance."""

        async def cancel() -> None:
            task.cancel()

        self.inside(cancel())

    async def take(self, forward: Forward) -> CommandAnswer:
        return await asyncio.shield(self.service.forwarded.receive(forward))

    async def start(self) -> None:
        try:
            await self.service.namespaces.create_default()
            await self.engine.start()
        except Exception as error:
            self.world.tell(f"could not start {self.name}: {error!r}")
            if isinstance(error, StoreError) and not self.world.settings.exclusive:
                await asyncio.sleep(0.2)
                await self.start()  # nothing runs yet, and its rows in the store do not prevent the next start
            else:
                self.world.outside(self.world.restart(self, 0.2))  # the process ends, and is started again
        else:
            self.started.set()

    @property
    def up(self) -> bool:
        return self.started.is_set()

    def _declared_dead(self) -> None:
        """It was declared dead, or joins again after a join that failed: it drops what it has in flight."""
        now_ms = self.world.now_ms()
        self.world.explain(Fault("declared dead", now_ms, now_ms, self.name))

    def _drain_timed_out(self, began_ms: int, dropped_ms: int) -> None:
        """Relative to now. What was begun before the drain and is not on record at its end may be repeated."""
        world = self.world
        world.fault("drain timed out")
        now_ms = world.now_ms()
        world.explain(Fault("drain timed out", now_ms + dropped_ms, now_ms + began_ms, self.name))


class World:
    def __init__(self, seed: int, scenario: Scenario) -> None:
        self.seed = seed
        self.scenario = scenario
        self.rng = random.Random(seed)
        self.num_shards = self.rng.choice(scenario.num_shards)
        self.settings = self._choose_settings()
        self.loop = SimLoop(random.Random(self.rng.getrandbits(64)))
        self.database = SimDatabase(cast(Clock, VirtualClock(self.loop)), self.settings.capabilities)
        self.config = self.settings.config
        self.instances: dict[str, Instance] = {}
        self.stormy = False
        self.wishes: list[Wish] = []
        self.callbacks: list[Callback] = []
        self.violations: list[Violation] = []  # what was seen to be wrong at once; the checker finds the others
        self.faults: Counter[str] = Counter()
        self.explanations: list[Fault] = []  # of repetitions
        self.history: list[str] = []
        self.restless = False
        self.left_behind: list[tuple[str, str]] = []  # timers, and their values, in namespaces that were deleted
        self._deleted: dict[str, int] = {}  # namespace -> when its deletion was acknowledged
        self._changes: list[asyncio.Task[Any]] = []  # instances that leave, and those that come for them
        self._running: dict[str, Instance] = {}  # also those that clients do not ask any more
        self._born = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def _choose_settings(self) -> Settings:
        scenario = self.scenario
        if not scenario.varied:
            return plain_settings(self.num_shards, scenario.instances)
        rng = random.Random(self.rng.getrandbits(64))
        return choose_settings(self.seed, rng, self.num_shards, scenario.instances, scenario.stormy_seconds)

    def some_offset_ms(self) -> int:
        return self.rng.randint(-_OFFSET_MAX_MS, _OFFSET_MAX_MS) if self.settings.clocks == "offset" else 0

    def now_ms(self) -> int:
        """True time: that of the database, and of the judge."""
        return START_WALL_MS + int(self.loop.now * 1_000 + 1e-6)

    def tell(self, line: str) -> None:
        self.history.append(f"{self.loop.now:.6f} {line}")

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1
        self.tell(f"fault: {kind}")

    def explain(self, fault: Fault) -> None:
        """What happened here explains a repetition."""
        self.explanations.append(fault)

    def saw(self, callback: Callback) -> int:
        self.callbacks.append(callback)
        self.tell(f"callback {msgspec.json.encode(callback).decode()}")
        return len(self.callbacks) - 1

    def wished(self, wish: Wish, namespace: str) -> None:
        self.wishes.append(wish)
        self.tell(f"wish {msgspec.json.encode(wish).decode()}")
        deleted_at_ms = self._deleted.get(namespace)
        if deleted_at_ms is None or wish.result is not Result.OK or not self.database.is_deleted(namespace):
            return
        arms = wish.kind in (Kind.PUT, Kind.REPLAY, Kind.FIRE_NOW)
        if wish.asked_at_ms > deleted_at_ms or (arms and self.database.has(namespace, wish.timer.partition("/")[2])):
            self._violated(wish.timer, f"a {wish.kind} was acknowledged in a namespace that is deleted")

    # --- namespaces -------------------------------------------------------------------------------

    def namespace_made(self, name: str) -> None:
        """Perhaps."""
        self._deleted.pop(name, None)

    async def namespace_deleted(self, name: str) -> None:
        """The deletion was acknowledged: no acknowledged timer may be left in the namespace."""
        self.tell(f"namespace {name} deleted")
        if not self.database.is_deleted(name):
            return  # created again by a client that asked at the same time
        self._deleted[name] = self.now_ms()
        self.left_behind += [
            (name_in_history(timer.key), value_of(timer.payload)) for timer in await self.database.scheduled(name)
        ]

    def _violated(self, timer: str, what: str) -> None:
        self.violations.append(Violation("N", timer, what, ""))

    def judge_left_behind(self) -> None:
        done = [wish for wish in self.wishes if wish.result is Result.OK and wish.kind is not Kind.DELETE]
        acknowledged = {wish.value or wish.timer for wish in done}
        for timer, value in self.left_behind:
            if acknowledged & {timer, value}:
                self._violated(
                    timer, f"{value!r} was acknowledged, then the deletion of its namespace was, and it is still there"
                )

    def running(self) -> list[Instance]:
        return list(self._running.values())

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
        self.instances[instance.name] = self._running[instance.name] = instance
        self.tell(f"launch {instance.name}")
        if self.stormy and self.settings.clocks == "jumps" and self.rng.random() < 0.1:
            self.happen("jump", instance)
        instance.inside(instance.start())
        return instance

    def crash(self, instance: Instance) -> None:
        self.tell(f"crash {instance.name}")
        self.explain(Fault("crash", self.now_ms(), self.now_ms(), instance.name))
        self._kill(instance)
        self.instances.pop(instance.name, None)

    def _kill(self, instance: Instance) -> None:
        self.loop.kill(instance.name)
        self._running.pop(instance.name, None)

    async def restart(self, instance: Instance, seconds: float) -> None:
        """A process that ended at once is started again after a while."""
        if instance.name not in self.instances:
            return  # something else has ended it in the same moment
        self.crash(instance)
        await asyncio.sleep(seconds)
        self.launch()

    async def depart(self, instance: Instance) -> None:
        """A graceful stop: drain, release, sign off."""
        self.instances.pop(instance.name, None)
        self.tell(f"depart {instance.name}")
        try:
            await instance.inside(instance.engine.stop())
        except Exception as error:
            self.tell(f"broken departure of {instance.name}: {error!r}")
            self.explain(Fault("broken departure", self.now_ms(), self.now_ms(), instance.name))
        finally:
            self._kill(instance)

    async def faults_happen(self) -> None:
        """Once every tenth of a second, perhaps, something."""
        scenario, rng = self.scenario, self.rng
        while self.stormy:
            await asyncio.sleep(0.1)
            for kind, per_second in (
                ("crash", scenario.crashes),
                ("freeze", scenario.freezes),
                ("jump", scenario.jumps if self.settings.clocks == "jumps" else 0.0),
                ("departure", scenario.departures),
                ("outage", scenario.outages * self.settings.outages),
                ("odd errors", scenario.odd_errors),
                ("spoilt row", scenario.spoilt_rows),
            ):
                if rng.random() < per_second * 0.1 and self.instances:
                    self.happen(kind, rng.choice(list(self.instances.values())))

    def happen(self, kind: str, victim: Instance) -> None:
        rng = self.rng
        self.fault(kind)
        if kind == "crash":
            self._changes.append(self.outside(self.restart(victim, rng.uniform(0.1, 6.0))))
        elif kind == "freeze":
            self.loop.freeze(victim.name)
            self.tell(f"freeze {victim.name}")
            self.outside(self.later(rng.choice((0.3, 2.0, 4.0, 8.0)), lambda: self.loop.thaw(victim.name)))
        elif kind == "jump":
            victim.clock.offset_ms = rng.choice((-60_000, -700, -300, 300, 700, 3_600_000))
            self.tell(f"jump {victim.name} {victim.clock.offset_ms}")
            self.outside(self.later(rng.uniform(0.5, 5.0), lambda: setattr(victim.clock, "offset_ms", 0)))
        elif kind == "outage":
            self.cut_off(victim)
        elif kind == "spoilt row":
            self.database.spoil_one(rng)
        elif kind == "odd errors":
            method = rng.choice(ODD_METHODS)
            victim.link.odd_errors[method] = rng.choice((1, 2, 6))
            self.tell(f"odd errors {victim.name} {method}")
        elif victim.up:
            self._changes.append(self.outside(self._replace(victim)))

    def cut_off(self, victim: Instance, *, commits_only: bool = False) -> None:
        """No connection to the database for a while: for one or for all, for commits only or for everything."""
        rng = self.rng
        seconds = rng.choice((1.5, 3.0, 6.0, 15.0))
        methods = frozenset({"commit"}) if commits_only or rng.random() < 0.5 else frozenset()
        cut = Cut(self.loop.now + seconds, rng.random() < 0.5, methods)
        struck = list(self.instances.values()) if rng.random() < 0.2 else [victim]
        for instance in struck:
            instance.link.cut = cut
        self.tell(f"outage {[instance.name for instance in struck]} {seconds} s, {sorted(methods) or 'all'}")

    async def _replace(self, victim: Instance) -> None:
        """One instance leaves in order, another joins; with an exclusive store, after it."""
        if self.instances.pop(victim.name, None) is None:
            return  # something else has ended it in the same moment
        departure = self.outside(self.depart(victim))
        self._changes.append(departure)
        if self.settings.exclusive:
            await asyncio.wait({departure})
        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        self.launch()

    async def later(self, seconds: float, act: Callable[[], object]) -> None:
        await asyncio.sleep(seconds)
        act()

    async def watch(self) -> None:
        """An instance that stops firing because its lease ran out explains repetitions. A broken one has to give up its
        lease, so that others serve its timers; some time later it is restarted."""
        while True:
            await asyncio.sleep(0.1)
            for instance in list(self._running.values()):
                instance.service.readiness()
                if not instance.up:
                    continue
                if not instance.engine.membership.may_fire():
                    self.explain(Fault("lease ended", self.now_ms() - 100, self.now_ms(), instance.name))
                if instance.engine.broken and instance.name in self.instances:
                    self._is_broken(instance)

    def _is_broken(self, instance: Instance) -> None:
        if instance.broken_since is None:
            instance.broken_since = self.loop.now
            self.fault("instance broken")
        elif self.loop.now - instance.broken_since > _BROKEN_FOR_SECONDS:
            engine = instance.engine
            if engine.membership.may_fire() and engine.shards:
                what = f"is broken since {_BROKEN_FOR_SECONDS} s and keeps {len(engine.shards)} shards"
                self.violations.append(Violation("H", instance.name, what, ""))
            self.outside(self.restart(instance, 0.5))

    # --- the play ---------------------------------------------------------------------------------

    async def play(self) -> None:
        for _ in range(self.settings.instances):
            self.launch()
        await asyncio.gather(*(instance.started.wait() for instance in self.instances.values()))
        self.outside(self.watch())
        await asyncio.sleep(1)
        self.stormy = True
        clients = [self.outside(SimClient(self, f"c{n}").work()) for n in range(self.scenario.clients)]
        clients.append(self.outside(SimClient(self, "burst").burst()))
        clients += [self.outside(NamespaceClient(self, f"n{n}").work()) for n in range(self.scenario.namespaces)]
        storm = self.outside(self.faults_happen())
        await asyncio.sleep(self.settings.stormy_seconds)
        self.stormy = False
        self._mend()
        await asyncio.gather(storm, *clients)
        await self.calm()
        await self.last_act()

    def _mend(self) -> None:
        for name in list(self.loop.frozen):
            self.loop.thaw(name)
        for instance in self._running.values():
            instance.clock.offset_ms = instance.offset_ms
            instance.link.cut = None
            instance.link.odd_errors.clear()

    async def calm(self) -> None:
        """All faults end: frozen instances thaw, clocks are right, and all timers must be settled."""
        self._mend()
        await asyncio.gather(*self._changes)
        while len(self.instances) < self.settings.instances:
            self.launch()
        self.tell("calm")
        for _ in range(600):
            await asyncio.sleep(1)
            if await self.database.is_at_rest():
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


# --- the judgement -------------------------------------------------------------------------------


def simulate(seed: int, scenario: Scenario | None = None) -> Run:
    world = World(seed, scenario or Scenario())
    asyncio.set_event_loop(world.loop)
    try:
        with constants_set(world.settings.constants):
            world.loop.run_until_complete(world.outside(world.play()))
    finally:
        world.loop.clear_up()
        asyncio.set_event_loop(None)
    return Run(
        seed=seed,
        violations=judged(world),
        wishes=len(world.wishes),
        callbacks=len(world.callbacks),
        faults=dict(world.faults),
        virtual_seconds=world.loop.now,
        digest=blake2b("\n".join(world.history).encode(), digest_size=16).hexdigest(),
        history=world.history,
    )


def judged(world: World) -> list[Violation]:
    """Everything that was wrong in a story that is over."""
    world.judge_left_behind()
    jumps = world.settings.clocks == "jumps"
    recorded, over = world.database.recorded_at_ms, world.database.over_at_ms
    callbacks = [
        msgspec.structs.replace(
            call,
            recorded_at_ms=recorded.get((call.delivery, call.attempt), 0),
            over_at_ms=over.get(call.delivery, 0),
        )
        for call in world.callbacks
    ]
    # A timer whose row cannot be decoded is not judged; it must not affect the others.
    spoilt = {name_in_history(key) for key in world.database.spoilt}
    violations = world.violations + judge(
        [wish for wish in world.wishes if wish.timer not in spoilt],
        [call for call in callbacks if call.timer not in spoilt],
        clock_error_ms=world.config.engine.clock_skew_max.ms if jumps else EARLY_BY_MAX_MS,
        faults=world.explanations,
        all_accepted=True,
    )
    violations += [Violation("P", "-", kind, "") for kind in NEVER if world.faults[kind]]
    if world.restless:
        violations.append(Violation("F", "-", "timers are still scheduled ten minutes after the last fault", ""))
    return violations + _late(world)


def _late(world: World) -> list[Violation]:
    # A wish that took long to reach its owner cannot fire before it was told.
    due = {w.value: max(w.due_ms, w.told_at_ms) for w in world.wishes if w.timer.startswith("last-")}
    rate = world.config.delivery.rate_per_destination
    late_by_max_ms = _LATE_BY_MAX_MS + (len(due) * 1_000 // rate if rate else 0)
    return [
        Violation("L", call.timer, f"{call.started_at_ms - due[call.value]} ms late without a fault", "")
        for call in world.callbacks
        if call.value in due and call.attempt == 1 and call.started_at_ms - due[call.value] > late_by_max_ms
    ]
