"""A whole cluster in one thread, in virtual time, from one seed.

The engine, shards, flow control and service are the real code. The store is the memory store. Network, clocks and
receivers are simulated, with faults of every kind.

    run = simulate(seed=7)
    assert not run.violations, run.violations[0]

The same seed gives the same history, byte for byte. A run has three phases. In the phase with faults, the faults of
`Scenario` are injected. In the recovery phase all faults end, and all timers must be reached. In the final phase there
is no fault, and no timer may be late. The checker compares what the receivers got with what the clients requested.
In addition to the invariants of the checker there are

    F  after the last fault all timers are reached
    G  a read returns what was acknowledged before it
    H  a broken instance keeps no shards
    K  the timers that are held and the age of the oldest due one are those of a count by brute force
    L  without a fault no timer is late, also while the receivers of a hostile namespace hang and fail
    N  no timer fires with settings its namespace never had; no request is acknowledged in a namespace after the
       deletion of that namespace was acknowledged
    P  a request between instances is accepted once: a replay is refused, a new request is not
    R  the limits of a flow hold for the whole cluster
    S  without a fault nothing that is paused is called, and all of it after it was resumed
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

from duetime.clock import Clock
from duetime.cluster.forwarding import CommandAnswer, Forward
from duetime.config import Config
from duetime.engine.engine import Engine
from duetime.engine.ownership import Ownership
from duetime.engine.shard import Entry, Phase, Shard, ShardState
from duetime.errors import StoreError
from duetime.service.service import Service
from duetime.store import Store
from duetime.telemetry import Telemetry
from duetime.testing.checker import Callback, ClientRequest, Fault, Kind, Result, Violation
from duetime.testing.occurrences import Pause, PauseRequest, Series
from duetime.testing.simulation.clients import HostileClient, NamespaceClient, SimClient
from duetime.testing.simulation.commands import CommandClient
from duetime.testing.simulation.database import SimDatabase
from duetime.testing.simulation.flow_limits import LimitWatch
from duetime.testing.simulation.loop import INSTANCE, SimLoop
from duetime.testing.simulation.network import Outage, SimDeliverer, SimStore, name_in_history, value_of
from duetime.testing.simulation.operators import OperatorClient
from duetime.testing.simulation.peers import SimPeers
from duetime.testing.simulation.scenario import Run, Scenario
from duetime.testing.simulation.schedules import ScheduleClient
from duetime.testing.simulation.settings import Settings, choose_settings, constants_set, default_settings
from duetime.testing.simulation.violations import violations_of
from duetime.testing.virtual import START_WALL_MS, VirtualClock

__all__ = [
    "UNEXPECTED_ERROR_METHODS",
    "Instance",
    "Run",
    "Scenario",
    "SimClient",
    "SimulatedCluster",
    "simulate",
    "violations_of",
]

T = TypeVar("T")

_OFFSET_MAX_MS = 450
_BROKEN_FOR_SECONDS = 15.0  # then the instance is restarted, as a service manager would do
UNEXPECTED_ERROR_METHODS = (
    "load",
    "commit",
    "get_many",
    "heartbeat",
    "shards",
    "namespaces",
    "claim",
    "members",
    "purge_reached",
)


# --- the cluster ---------------------------------------------------------------------------------


class SimOwnership(Ownership):
    """Reports when a shard was released although deliveries were still in flight at the drain timeout: these may be
    repeated. (Deliveries that were begun during the drain may not.)"""

    def report_to(self, on_drain_timeout: Callable[[int, int], None], on_drop_all: Callable[[], None]) -> None:
        self._on_drain_timeout = on_drain_timeout
        self._on_drop_all = on_drop_all
        self._release_began_ms: dict[Shard, int] = {}

    async def release(self, shards: list[Shard], *args: Any) -> None:
        for shard in shards:
            self._release_began_ms.setdefault(shard, self._clock.boot_ms())  # its release may have begun already
        await super().release(shards, *args)

    def drop(self, shard: Shard, *args: Any) -> None:
        began_ms = self._release_began_ms.pop(shard, None)
        waited_ms = 0 if began_ms is None else self._clock.boot_ms() - began_ms
        if not shard.is_quiet and began_ms is not None and waited_ms >= self._config.server.drain_timeout.ms:
            self._on_drain_timeout(began_ms - self._clock.boot_ms(), 0)
        super().drop(shard, *args)

    def drop_all(self) -> None:
        self._on_drop_all()
        super().drop_all()


class Instance:
    """One process of the cluster."""

    def __init__(self, cluster: SimulatedCluster, name: str, config: Config) -> None:
        self.cluster = cluster
        self.name = name
        self.offset_ms = cluster.random_offset_ms()  # constant error of its clock
        self.clock = VirtualClock(cluster.loop, self.offset_ms)
        self.started = asyncio.Event()
        self.broken_since: float | None = None
        deliverer = SimDeliverer(cluster, name)
        self.sim_store = SimStore(cluster, name)
        store = cast(Store, self.sim_store)
        self.engine = Engine(
            config,
            store,
            deliverer,
            cast(Clock, self.clock),
            Telemetry(),
            address=name,
            rng=random.Random(cluster.rng.getrandbits(64)),
            ownership=SimOwnership,
        )
        cast(SimOwnership, self.engine.ownership).report_to(self._drain_timed_out, self._dropped_all)
        self.service = Service(config, self.engine, store, deliverer, SimPeers(cluster, self))

    def create_task(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a coroutine as part of this instance: it stops when the instance stops."""
        context = copy_context()
        context.run(INSTANCE.set, self.name)
        return self.cluster.loop.create_task(work, context=context)

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of this instance, as part of this instance."""

        async def cancel() -> None:
            task.cancel()

        self.create_task(cancel())

    async def take(self, forward: Forward) -> CommandAnswer:
        return await asyncio.shield(self.service.forwarded.receive(forward))

    async def start(self) -> None:
        try:
            await self.service.namespaces.create_default()
            await self.engine.start()
        except Exception as error:
            self.cluster.record(f"could not start {self.name}: {error!r}")
            if isinstance(error, StoreError) and not self.cluster.settings.exclusive:
                await asyncio.sleep(0.2)
                await self.start()  # nothing runs yet, and its rows in the store do not prevent another start
            else:
                self.cluster.create_task(self.cluster.restart(self, 0.2))  # the process ends and is started again
        else:
            self.started.set()

    @property
    def up(self) -> bool:
        return self.started.is_set()

    def _dropped_all(self) -> None:
        """The instance was declared dead, or joins again after a failed join: it drops its deliveries in flight."""
        self.cluster.limit_watch.moved()
        now_ms = self.cluster.now_ms()
        self.cluster.allow_repetition(Fault("declared dead", now_ms, now_ms, self.name))

    def _drain_timed_out(self, began_ms: int, dropped_ms: int) -> None:
        """Times are relative to now. A delivery that was begun before the drain and is not recorded at its end may be
        repeated."""
        cluster = self.cluster
        cluster.fault("drain timed out")
        now_ms = cluster.now_ms()
        cluster.allow_repetition(Fault("drain timed out", now_ms + dropped_ms, now_ms + began_ms, self.name))


class SimulatedCluster:
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
        self.faults_on = False
        self.cut_off: set[str] = set()  # instances that cannot reach the others
        self.limit_watch = LimitWatch(self, self.settings.flows)
        self.requests: list[ClientRequest] = []
        self.callbacks: list[Callback] = []
        self.series: list[Series] = []  # timers with a schedule that nobody changes
        self.pauses: list[Pause] = []
        self.pause_requests: list[PauseRequest] = []
        self.violations: list[Violation] = []  # those found during the run; the checker finds the others
        self.faults: Counter[str] = Counter()
        self.repetition_causes: list[Fault] = []  # faults that allow repetitions
        self.history: list[str] = []
        self.timers_left = False
        self.left_in_deleted_namespaces: list[tuple[str, str, int]] = []  # timer, value, when
        self._deleted: dict[str, int] = {}  # namespace -> when its deletion was acknowledged
        self._changes: list[asyncio.Task[Any]] = []  # instances that are being replaced
        self._running: dict[str, Instance] = {}  # including those that clients no longer use
        self._launched = 0
        self._tasks: set[asyncio.Task[Any]] = set()

    def _choose_settings(self) -> Settings:
        scenario = self.scenario
        if not scenario.varied:
            return default_settings(self.num_shards, scenario.instances)
        rng = random.Random(self.rng.getrandbits(64))
        return choose_settings(self.seed, rng, self.num_shards, scenario.instances, scenario.fault_seconds)

    def random_offset_ms(self) -> int:
        return self.rng.randint(-_OFFSET_MAX_MS, _OFFSET_MAX_MS) if self.settings.clocks == "offset" else 0

    def now_ms(self) -> int:
        """True time: the clock of the database and of the checker."""
        return START_WALL_MS + int(self.loop.now * 1_000 + 1e-6)

    def record(self, line: str) -> None:
        self.history.append(f"{self.loop.now:.6f} {line}")

    def fault(self, kind: str) -> None:
        self.faults[kind] += 1
        self.record(f"fault: {kind}")

    def allow_repetition(self, fault: Fault) -> None:
        """This fault allows that a delivery is repeated."""
        self.repetition_causes.append(fault)

    def record_callback(self, callback: Callback) -> int:
        self.callbacks.append(callback)
        self.record(f"callback {msgspec.json.encode(callback).decode()}")
        return len(self.callbacks) - 1

    def record_request(self, request: ClientRequest, namespace: str) -> None:
        self.requests.append(request)
        self.record(f"request {msgspec.json.encode(request).decode()}")
        deleted_at_ms = self._deleted.get(namespace)
        if deleted_at_ms is None or request.result is not Result.OK or not self.database.is_deleted(namespace):
            return
        arms = request.kind in (Kind.PUT, Kind.REPLAY, Kind.FIRE_NOW)
        if request.sent_at_ms > deleted_at_ms or (
            arms and self.database.has(namespace, request.timer.partition("/")[2])
        ):
            self._violated(request.timer, f"a {request.kind} was acknowledged in a namespace that is deleted")

    # --- namespaces -------------------------------------------------------------------------------

    def namespace_create_sent(self, name: str) -> None:
        """A client has sent the creation of this namespace; it may or may not be applied."""
        self._deleted.pop(name, None)

    async def namespace_deleted(self, name: str) -> None:
        """The deletion was acknowledged: no acknowledged timer may be left in the namespace."""
        self.record(f"namespace {name} deleted")
        if not self.database.is_deleted(name):
            return  # created again by a client at the same time
        self._deleted[name] = self.now_ms()
        self.left_in_deleted_namespaces += [
            (name_in_history(timer.key), value_of(timer.payload), self.now_ms())
            for timer in await self.database.scheduled(name)
        ]

    def _violated(self, timer: str, what: str) -> None:
        self.violations.append(Violation("N", timer, what, ""))

    def check_left_in_deleted_namespaces(self) -> None:
        done = [request for request in self.requests if request.result is Result.OK and request.kind is not Kind.DELETE]
        acknowledged = {request.value or request.timer for request in done}
        for timer, value, deleted_at_ms in self.left_in_deleted_namespaces:
            # A replay that was not acknowledged may have written it, with the value of a timer that is over.
            is_written = any(
                request.timer == timer
                and request.result is not Result.OK
                and request.sent_at_ms <= deleted_at_ms <= request.answered_at_ms
                for request in self.requests
            )
            if acknowledged & {timer, value} and not is_written:
                self._violated(
                    timer, f"{value!r} was acknowledged, then the deletion of its namespace, and the timer still exists"
                )

    def running(self) -> list[Instance]:
        return list(self._running.values())

    def is_running(self, name: str) -> bool:
        return name in self._running

    def create_task(self, work: Any) -> asyncio.Task[Any]:
        """Run a coroutine that belongs to no instance."""
        context = copy_context()
        context.run(INSTANCE.set, "")
        task = self.loop.create_task(work, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- instances start and stop -----------------------------------------------------------------

    def launch(self) -> Instance:
        self._launched += 1
        instance = Instance(self, f"i{self._launched}", self.config)
        self.instances[instance.name] = self._running[instance.name] = instance
        self.limit_watch.moved()
        self.record(f"launch {instance.name}")
        if self.faults_on and self.settings.clocks == "jumps" and self.rng.random() < 0.1:
            self.inject("jump", instance)
        instance.create_task(instance.start())
        return instance

    def crash(self, instance: Instance) -> None:
        self.record(f"crash {instance.name}")
        self.allow_repetition(Fault("crash", self.now_ms(), self.now_ms(), instance.name))
        self._kill(instance)
        self.instances.pop(instance.name, None)

    def _kill(self, instance: Instance) -> None:
        self.limit_watch.moved()
        self.loop.kill(instance.name)
        self._running.pop(instance.name, None)

    async def restart(self, instance: Instance, seconds: float) -> None:
        """Crash an instance, and launch another one some seconds later."""
        if instance.name not in self.instances:
            return  # another fault has ended it at the same time
        self.crash(instance)
        await asyncio.sleep(seconds)
        self.launch()

    async def depart(self, instance: Instance) -> None:
        """A graceful stop: drain, release the shards, leave the cluster."""
        self.instances.pop(instance.name, None)
        self.limit_watch.moved()
        self.record(f"depart {instance.name}")
        try:
            await instance.create_task(instance.engine.stop())
        except Exception as error:
            self.record(f"graceful stop of {instance.name} failed: {error!r}")
            self.allow_repetition(Fault("graceful stop failed", self.now_ms(), self.now_ms(), instance.name))
        finally:
            self._kill(instance)

    async def inject_faults(self) -> None:
        """Every tenth of a second each kind of fault may happen, with the probability of the scenario."""
        scenario, rng = self.scenario, self.rng
        while self.faults_on:
            await asyncio.sleep(0.1)
            for kind, per_second in (
                ("crash", scenario.crashes),
                ("freeze", scenario.freezes),
                ("jump", scenario.jumps if self.settings.clocks == "jumps" else 0.0),
                ("departure", scenario.departures),
                ("outage", scenario.outages * self.settings.outages),
                ("unexpected errors", scenario.unexpected_errors),
                ("cut off", scenario.cuts if self.settings.flows else 0.0),
                ("spoilt row", scenario.spoilt_rows),
            ):
                if rng.random() < per_second * 0.1 and self.instances:
                    self.inject(kind, rng.choice(list(self.instances.values())))

    def inject(self, kind: str, instance: Instance) -> None:
        rng = self.rng
        self.fault(kind)
        if kind == "crash":
            self._changes.append(self.create_task(self.restart(instance, rng.uniform(0.1, 6.0))))
        elif kind == "freeze":
            self.loop.freeze(instance.name)
            self.record(f"freeze {instance.name}")
            self.create_task(self.call_later(rng.choice((0.3, 2.0, 4.0, 8.0)), lambda: self.loop.resume(instance.name)))
        elif kind == "jump":
            instance.clock.offset_ms = rng.choice((-60_000, -700, -300, 300, 700, 3_600_000))
            self.record(f"jump {instance.name} {instance.clock.offset_ms}")
            self.create_task(self.call_later(rng.uniform(0.5, 5.0), lambda: setattr(instance.clock, "offset_ms", 0)))
        elif kind == "outage":
            self.start_outage(instance)
        elif kind == "cut off":
            self.cut_off.add(instance.name)
            self.record(f"cut off {instance.name}")
            seconds = rng.choice((0.5, 2.0, 5.0, 15.0))
            self.create_task(self.call_later(seconds, lambda: self.cut_off.discard(instance.name)))
        elif kind == "spoilt row":
            self.database.spoil_one(rng)
        elif kind == "unexpected errors":
            method = rng.choice(UNEXPECTED_ERROR_METHODS)
            instance.sim_store.unexpected_errors[method] = rng.choice((1, 2, 6))
            self.record(f"unexpected errors {instance.name} {method}")
        elif instance.up:
            self._changes.append(self.create_task(self._replace(instance)))

    def start_outage(self, instance: Instance, *, commits_only: bool = False) -> None:
        """No connection to the database for a while: for one instance or for all, for commits only or for all calls."""
        rng = self.rng
        seconds = rng.choice((1.5, 3.0, 6.0, 15.0))
        methods = frozenset({"commit"}) if commits_only or rng.random() < 0.5 else frozenset()
        outage = Outage(self.loop.now + seconds, rng.random() < 0.5, methods)
        struck = list(self.instances.values()) if rng.random() < 0.2 else [instance]
        for instance in struck:
            instance.sim_store.outage = outage
        self.record(f"outage {[instance.name for instance in struck]} {seconds} s, {sorted(methods) or 'all'}")

    async def _replace(self, instance: Instance) -> None:
        """One instance stops gracefully and another joins; with an exclusive store, after the first has stopped."""
        if self.instances.pop(instance.name, None) is None:
            return  # another fault has ended it at the same time
        departure = self.create_task(self.depart(instance))
        self._changes.append(departure)
        if self.settings.exclusive:
            await asyncio.wait({departure})
        await asyncio.sleep(self.rng.uniform(0.1, 3.0))
        self.launch()

    async def call_later(self, seconds: float, action: Callable[[], object]) -> None:
        await asyncio.sleep(seconds)
        action()

    async def watch_instances(self) -> None:
        """Check all instances every tenth of a second.

        An instance whose lease has ended may cause repetitions. A broken instance must give up its lease, so that
        others serve its timers; some time later it is restarted.
        """
        while True:
            await asyncio.sleep(0.1)
            for instance in list(self._running.values()):
                instance.service.readiness()
                if not instance.up:
                    continue
                self._check_held(instance)
                if not instance.engine.membership.may_fire():
                    self.allow_repetition(Fault("lease ended", self.now_ms() - 100, self.now_ms(), instance.name))
                if instance.engine.broken and instance.name in self.instances:
                    self._handle_broken(instance)

    def _check_held(self, instance: Instance) -> None:
        """Compare what the instance counts with the timers in its shards."""
        loop = instance.engine.fire_loop
        shards = instance.engine.shards.values()
        entries = {entry.ticket: entry for shard in shards for entry in shard.entries.values()}
        due_later = set(loop.armed_tickets())
        queued = {ticket for ticket, entry in entries.items() if entry.phase is Phase.QUEUED}
        waiting = set(loop.flow.tickets())
        without_namespace = {
            ticket
            for ticket, entry in entries.items()
            if entry.phase is Phase.ARMED and ticket not in due_later and entry.shard.state is ShardState.OPEN
        }
        if not (
            waiting <= queued and len(queued - waiting) <= loop.flow.in_flight + self._left_by_drains(queued, entries)
        ):
            what = f"{len(waiting)} timers wait by its count, {len(queued)} are queued or about to be sent"
            self.violations.append(Violation("K", instance.name, what, ""))
        now_ms = instance.engine.membership.now_ms()
        tickets = waiting | without_namespace | due_later
        oldest_ms = min(
            (entries[ticket].timer.execute_at_ms for ticket in tickets if ticket in entries), default=now_ms
        )
        if loop.oldest_due_ms(now_ms) != (now_ms - oldest_ms if oldest_ms < now_ms else None):
            what = f"the oldest due timer is {now_ms - oldest_ms} ms old, not {loop.oldest_due_ms(now_ms)}"
            self.violations.append(Violation("K", instance.name, what, ""))

    def _left_by_drains(self, queued: set[int], entries: dict[int, Entry]) -> int:
        """Queued timers of shards that drain: they wait for the next owner."""
        return sum(entries[ticket].shard.state is not ShardState.OPEN for ticket in queued)

    def _handle_broken(self, instance: Instance) -> None:
        if instance.broken_since is None:
            instance.broken_since = self.loop.now
            self.fault("instance broken")
        elif self.loop.now - instance.broken_since > _BROKEN_FOR_SECONDS:
            engine = instance.engine
            if engine.membership.may_fire() and engine.shards:
                what = f"is broken since {_BROKEN_FOR_SECONDS} s and keeps {len(engine.shards)} shards"
                self.violations.append(Violation("H", instance.name, what, ""))
            self.create_task(self.restart(instance, 0.5))

    # --- the phases of a run ----------------------------------------------------------------------

    async def run(self) -> None:
        for _ in range(self.settings.instances):
            self.launch()
        await asyncio.gather(*(instance.started.wait() for instance in self.instances.values()))
        self.create_task(self.watch_instances())
        await self._set_limits()
        await asyncio.sleep(1)
        self.faults_on = True
        clients = [self.create_task(SimClient(self, f"c{n}").work()) for n in range(self.scenario.clients)]
        clients.append(self.create_task(SimClient(self, "burst").burst()))
        clients.append(self.create_task(CommandClient(self, "command").work()))
        clients.append(self.create_task(ScheduleClient(self, "series").create_series()))
        clients.append(self.create_task(ScheduleClient(self, "schedule").work()))
        clients += [self.create_task(NamespaceClient(self, f"n{n}").work()) for n in range(self.scenario.namespaces)]
        if self.settings.operator:
            clients.append(self.create_task(OperatorClient(self).work()))
        injecting = self.create_task(self.inject_faults())
        await asyncio.sleep(self.settings.fault_seconds)
        self.faults_on = False
        self._end_faults()
        await asyncio.gather(injecting, *clients)
        await self.recovery_phase()
        await self.final_phase()

    async def _set_limits(self) -> None:
        if self.settings.exclusive:  # its process does not read what others write
            [only] = self.instances.values()
            for key, limits in self.settings.flows.items():
                await only.create_task(only.service.flows.update("default", key, limits.rate, limits.concurrency))
        elif self.settings.flows:
            [namespace] = [row for row in await self.database.namespaces() if row.name == "default"]
            limited = msgspec.structs.replace(namespace, revision=namespace.revision + 1, flows=self.settings.flows)
            await self.database.put_namespace(limited, namespace.revision)
            await asyncio.sleep(1)  # all instances have read it

    def _end_faults(self) -> None:
        self.cut_off.clear()
        for name in list(self.loop.frozen):
            self.loop.resume(name)
        for instance in self._running.values():
            instance.clock.offset_ms = instance.offset_ms
            instance.sim_store.outage = None
            instance.sim_store.unexpected_errors.clear()

    async def recovery_phase(self) -> None:
        """All faults end: frozen instances resume, clocks are right again, and all timers must be reached."""
        self._end_faults()
        await asyncio.gather(*self._changes)
        while len(self.instances) < self.settings.instances:
            self.launch()
        self.record("recovery phase")
        for _ in range(600):
            await asyncio.sleep(1)
            if await self.database.is_empty():
                return
        self.timers_left = True
        self.record("timers are left")

    async def final_phase(self) -> None:
        """Without faults, timers that are created now fire on time."""
        await asyncio.sleep(20)
        if self.settings.operator:
            await OperatorClient(self).pause_and_resume()
        await HostileClient(self).create_timers()
        client = SimClient(self, "last")
        for number in range(12):
            await client.put(f"last-{number}", "http://ok", self.rng.randint(500, 4_000))
        await asyncio.sleep(30)


def simulate(seed: int, scenario: Scenario | None = None) -> Run:
    cluster = SimulatedCluster(seed, scenario or Scenario())
    asyncio.set_event_loop(cluster.loop)
    try:
        with constants_set(cluster.settings.constants):
            cluster.loop.run_until_complete(cluster.create_task(cluster.run()))
    finally:
        cluster.limit_watch.end()
        cluster.loop.close_all()
        asyncio.set_event_loop(None)
    return Run(
        seed=seed,
        violations=violations_of(cluster),
        requests=len(cluster.requests),
        callbacks=len(cluster.callbacks),
        faults=dict(cluster.faults),
        virtual_seconds=cluster.loop.now,
        digest=blake2b("\n".join(cluster.history).encode(), digest_size=16).hexdigest(),
        history=cluster.history,
    )
