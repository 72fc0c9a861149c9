"""The engine of one instance: it starts, stops, and runs the loops that serve the shards it owns.

`Ownership` says which shards these are. One `GroupCommit` or several write for them, `LookAhead` keeps the timers that
are due soon in memory, and `FireLoop` fires them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from duetime.clock import Clock
from duetime.cluster.membership import Membership
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.engine.counters import Counters
from duetime.engine.fire_loop import FireLoop
from duetime.engine.flow_allowances import FlowAllowances
from duetime.engine.flow_homes import FlowHomes
from duetime.engine.group_commit import BatchedReader, GroupCommit
from duetime.engine.look_ahead import LookAhead
from duetime.engine.namespaces import Namespaces
from duetime.engine.ownership import Ownership
from duetime.engine.shard import Entry, Shard
from duetime.errors import FailedOver, MemberDead, OutcomeUnknown, ShardLost, StoreError
from duetime.store import ShardRow, Store, guarded
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["Engine"]

# Rows of all shards together: a database may remove them in one transaction, and commits wait for that.
_PURGED_PER_CALL = 1_000
_PURGE_ROUND_SECONDS = 60
_BALANCE_EVERY_MS = 5_000  # while every shard is with the member that should own it
_HEARTBEAT_DELAY_MIN_SECONDS = 0.05
# Deliveries that are made but not yet recorded are made again after a crash: with so many, no more are started.
_UNSETTLED_MAX = 4_000


class Engine:
    def __init__(
        self,
        config: Config,
        store: Store,
        deliverer: Deliverer,
        clock: Clock,
        telemetry: Telemetry,
        *,
        address: str,
        rng: random.Random | None = None,
        ownership: type[Ownership] = Ownership,
    ) -> None:
        rng = rng or random.SystemRandom()
        store = guarded(store)
        counters = Counters(config.engine.writes_waiting_max, config.engine.write_bytes_waiting_max)
        self.telemetry = telemetry
        self.clock = clock
        self.counters = counters
        self.namespaces = Namespaces(store, clock)
        self.membership = Membership(
            store, clock, config.engine, telemetry, rng, address, tls=bool(config.server.tls_certificate)
        )
        self.lookup = BatchedReader(store)
        self.ownership = ownership(
            config,
            store,
            clock,
            telemetry,
            rng,
            self.membership,
            self,
            spawn=self._spawn,
            is_stopping=lambda: self.stopping,
            on_claimed=lambda: self.look_ahead.find_shards_to_load(),
        )
        self.shards = self.ownership.shards
        self.fire_loop = FireLoop(
            config.delivery,
            self.membership,
            deliverer,
            telemetry,
            random.Random(rng.getrandbits(64)),  # for jitter: cheaper than the generator for nonces and ids
            self.namespaces,
            lambda: self._spawn_once(self._read_namespaces),
            congested=lambda: counters.unsettled >= _UNSETTLED_MAX,
        )
        self.namespaces.on_change = self.fire_loop.apply_limits
        self.look_ahead = LookAhead(store, config.engine, self.membership, self.fire_loop, self.shards, counters)
        self.flow_homes = FlowHomes(config.delivery, self.membership, self.namespaces, self.shards, clock)
        self.flow_allowances = FlowAllowances(
            self.flow_homes,
            self.fire_loop.flow,
            self.membership,
            self.namespaces,
            lambda: self.ownership.rows,
            clock,
            spawn=self._spawn,
        )
        self.fire_loop.flow.divide_limits(self.flow_allowances.need, clock.boot_ms)
        self.started = False
        self.stopping = False
        self.failed = asyncio.Event()  # an internal error has stopped the engine
        self._config = config
        self._store = store
        self._rng = rng
        self._group_commits = [
            GroupCommit(
                store,
                clock,
                telemetry,
                on_lost=self.ownership.lost,
                on_unknown=self.ownership.recover,
                on_committed=self.fire_loop.flow.resume,
            )
            for _ in range(store.capabilities.parallel_commits)
        ]
        self._tasks: dict[asyncio.Task[None], None] = {}  # a dict, so that they are cancelled in the order they began
        self._last_task: asyncio.Task[None] | None = None  # leaves the cluster after an internal error
        self._running: set[str] = set()  # names of the functions that `_spawn_once` has begun
        self._cluster_read_log = FailureLog("cannot read cluster state", "cluster state is readable again")
        self._purge_log = FailureLog("cannot purge timers past their retention", "timers are purged again")
        self._wire_gauges()

    def _wire_gauges(self) -> None:
        telemetry, flow = self.telemetry, self.fire_loop.flow
        telemetry.in_memory.read = lambda: sum(len(shard.entries) for shard in self.shards.values())
        telemetry.in_flight.read = lambda: flow.in_flight
        telemetry.held.read = lambda: self.fire_loop.waiting
        telemetry.writes_waiting.read = lambda: self.counters.writes_waiting
        telemetry.shards_owned.read = lambda: len(self.shards)
        telemetry.lease_seconds.read = lambda: self.membership.lease_ms / 1_000
        telemetry.clock_skew_seconds.read = lambda: self.membership.skew_ms / 1_000
        telemetry.clock_error_seconds.read = lambda: self.membership.clock_error_ms / 1_000
        telemetry.unreadable.read = lambda: self.unreadable
        telemetry.oldest_due_seconds.read = lambda: (self.oldest_due_ms() or 0) / 1_000
        telemetry.backlogs.read = lambda: self.look_ahead.backlogs

    # --- lifecycle --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join the cluster, claim shards and start to serve. The store is open and migrated, and the default namespace
        exists."""
        await self.namespaces.refresh()
        await self.membership.join()
        for group_commit in self._group_commits:
            self._spawn(group_commit.run())
        self._spawn(self.look_ahead.run())
        self._spawn(self.flow_allowances.run())
        self._spawn(self._heartbeats())  # before the claims, which may take longer than the lease
        try:
            await self.balance()
        except StoreError as error:
            if self._store.capabilities.exclusive:
                raise
            # This instance is a member already: it goes on, and the next balance claims.
            self._cluster_read_log.failed(error, self.clock.boot_ms())
        self._spawn(self._sweeps())
        self._spawn(self._purges())
        self.started = True

    async def stop(self) -> None:
        """Drain and release all shards, and leave the cluster: after this nothing is in flight, and the other members
        need not wait until the lease ends."""
        self.stopping = True
        self.fire_loop.stop()
        await self.ownership.release(list(self.shards.values()))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._last_task is not None:
            await self._last_task
        elif self.started:
            await self.membership.leave()

    def abandon(self) -> None:
        """Stop at once and leave everything as it is, as a crash would."""
        self.stopping = True
        self.fire_loop.stop()
        for task in self._tasks:
            task.cancel()

    def readiness(self) -> str | None:
        """None: ready to serve. Otherwise why not."""
        if self.broken:
            return "ended by an internal error: the log says which; restart this instance"
        if self.stopping:
            return "stopping"
        if not self.started:
            return "starting"
        if self.membership.is_skewed:
            return f"the clock is {self.membership.skew_ms} ms off the database's"
        if self._store.capabilities.exclusive and len(self.shards) < len(self.rows):
            return f"{len(self.rows) - len(self.shards)} shards are not claimed yet"
        if not self.membership.may_fire():
            reason = self.membership.heartbeat_log.reason or "the store does not answer heartbeats"
            return f"the lease has run out: {reason}"
        return None

    @property
    def paused(self) -> bool:
        """Are no deliveries started, because the operator has paused them?"""
        return self.fire_loop.flow.paused

    def pause(self) -> None:
        self.fire_loop.pause()

    def resume(self) -> None:
        self.fire_loop.resume()

    @property
    def broken(self) -> bool:
        return self.failed.is_set()

    @property
    def rows(self) -> dict[int, ShardRow]:
        """All shards, as last read."""
        return self.ownership.rows

    async def balance(self) -> None:
        """See `Ownership.balance`."""
        await self.ownership.balance()

    @property
    def unreadable(self) -> int:
        """Stored timers of our shards that cannot be decoded, as far as they have been read."""
        return sum(len(shard.unreadable) for shard in self.shards.values())

    def oldest_due_ms(self) -> int | None:
        """For how long the earliest due timer has been waiting, in memory or in a backlog. None: no timer is due."""
        now_ms = self.membership.now_ms()
        ages = (self.fire_loop.oldest_due_ms(now_ms), self.look_ahead.oldest_in_backlog_ms(now_ms))
        return max((age for age in ages if age is not None), default=None)

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _spawn_once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run it as a task, unless it is still running."""
        if work.__name__ not in self._running:
            self._running.add(work.__name__)
            self._spawn(self._run_once(work))

    async def _run_once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        finally:
            self._running.discard(work.__name__)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None and not self.broken:
            log.critical(
                "internal error: this instance fires nothing more and gives up its lease and its shards; restart it",
                exc_info=task.exception(),
            )
            self.failed.set()
            self.abandon()
            self.ownership.drop_all()
            self._last_task = asyncio.get_running_loop().create_task(self.membership.leave())

    # --- what shards need (ShardHost) -------------------------------------------------------------

    def arm(self, entry: Entry) -> None:
        self.fire_loop.arm(entry)

    def disarm(self, entry: Entry) -> None:
        self.fire_loop.disarm(entry)

    def discard(self, entry: Entry) -> None:
        self.fire_loop.discard(entry)

    def add_weight(self, weight: int) -> None:
        self.look_ahead.add_weight(weight)

    def enqueue(self, shard: Shard) -> None:
        self._group_commits[shard.shard_id % len(self._group_commits)].enqueue(shard)

    def boot_ms(self) -> int:
        return self.clock.boot_ms()

    # --- loops ------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        interval = self._config.engine.heartbeat_interval.seconds
        exclusive = self._store.capabilities.exclusive
        dead = False
        while True:
            await asyncio.sleep(self._heartbeat_delay(interval))
            try:
                if dead:
                    # A join that failed half-way may have let a claim through. Drop all shards again: none may be
                    # served under a new id that was claimed under an old one.
                    self.ownership.drop_all()
                    await self.membership.join()
                    dead = False
                    self._spawn_once(self._observe_cluster)
                await self.membership.send_heartbeat()
                if self.membership.is_skewed and not exclusive:
                    # The lease is given up with the skew: other members can serve these shards, this one cannot.
                    self._spawn(self.ownership.release([s for s in self.shards.values() if not s.draining]))
                if not exclusive:
                    self._spawn_once(self._observe_cluster)
            except MemberDead as error:
                # Other members may own our shards by now.
                log.warning("dropping all shards and joining again under a new id: %s", error)
                self.ownership.drop_all()
                if isinstance(error, FailedOver):
                    self.membership.wait_before_claims()
                dead = True
            except StoreError as error:
                self._cluster_read_log.failed(error, self.clock.boot_ms())
            self.fire_loop.wake()

    def _heartbeat_delay(self, interval: float) -> float:
        """Seconds until the next heartbeat; fewer if a member may be declared dead before it."""
        death_ms = self.membership.next_death_ms()
        if death_ms is None:
            return interval
        return min(interval, max(_HEARTBEAT_DELAY_MIN_SECONDS, (death_ms - self.clock.boot_ms()) / 1_000))

    async def _observe_cluster(self) -> None:
        """A task of its own: a claim that waits for a lock, or on a connection that hangs, must not delay heartbeats,
        or the lease would end."""
        try:
            # A balance reads the members itself. If they have changed it has to read them again, after the shards.
            if not self.ownership.is_balanced or await self.membership.observe():
                await self.balance()
        except StoreError as error:
            self._cluster_read_log.failed(error, self.clock.boot_ms())
        else:
            self._cluster_read_log.recovered()

    async def _sweeps(self) -> None:
        """Once a second all that may be due is checked, so that nothing depends on a wake-up that was lost."""
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + 1.0
            await asyncio.sleep(1.0)
            self.telemetry.loop_lag_seconds.observe(max(0.0, loop.time() - expected))
            now_ms = self.clock.boot_ms()
            for shard in list(self.shards.values()):
                shard.expire(now_ms - self._config.engine.write_timeout.ms)
            self.fire_loop.flow.sweep()
            self.look_ahead.reduce_memory()
            self.look_ahead.find_shards_to_load()
            self.fire_loop.wake()
            if self.fire_loop.holds_any:
                self._spawn_once(self._read_namespaces)
            self._spawn_once(self._refresh_from_store)

    async def _read_namespaces(self) -> None:
        """For due timers whose namespace is not known: they are not sent before it is."""
        while held := self.fire_loop.take_held():
            reread = False
            try:
                await self.namespaces.reread()
                reread = True
            except StoreError as error:
                self._cluster_read_log.failed(error, self.clock.boot_ms())
            more_held = self.fire_loop.holds_any
            self.fire_loop.fire_held(held, reread=reread)
            if not more_held:
                return  # timers that are still held are tried again with the next sweep

    async def _refresh_from_store(self) -> None:
        """A task of its own: sweeps must not wait for a store that hangs."""
        exclusive = self._store.capabilities.exclusive
        try:
            if not exclusive:
                await self.namespaces.refresh()
            if exclusive:
                due = len(self.shards) < len(self.rows)  # some could not be claimed, because there was no lease
            else:
                due = self.clock.boot_ms() - self.ownership.balanced_at_ms > _BALANCE_EVERY_MS
            # Another instance may have created a namespace that needs more shards than there were.
            if due or self.namespaces.shards_needed() > len(self.rows):
                await self.balance()
        except StoreError as error:
            self._cluster_read_log.failed(error, self.clock.boot_ms())

    async def _purges(self) -> None:
        """Removes reached timers past their retention, of every shard once a minute."""
        second = 0
        while True:
            await asyncio.sleep(1.0)
            second = (second + 1) % _PURGE_ROUND_SECONDS
            shards = [s for s in self.shards.values() if s.shard_id % _PURGE_ROUND_SECONDS == second]
            errors: list[StoreError] = []
            while shards:
                shards = await self._purge([s for s in shards if not (s.dropped or s.recovering)], errors)
            if errors:
                self._purge_log.failed(errors[0], self.clock.boot_ms())
            else:
                self._purge_log.recovered()

    async def _purge(self, shards: list[Shard], errors: list[StoreError]) -> list[Shard]:
        """One call. Returns the shards that may have more to purge; those that failed wait for the next minute."""
        fences = [shard.fence for shard in shards]
        limit = max(1, _PURGED_PER_CALL // max(1, len(shards)))
        try:
            results = await self._store.purge_reached(fences, self.membership.now_ms(), limit)
        except StoreError as error:
            errors.append(error)
            return []
        more: list[Shard] = []
        for shard, fence, removed in zip(shards, fences, results, strict=True):
            if isinstance(removed, ShardLost):
                # A recovery changes the fence. Then the error says nothing about the shard's owner.
                if shard.fence is fence and not shard.recovering:
                    self.ownership.lost(shard, OutcomeUnknown())
            elif isinstance(removed, StoreError):
                errors.append(removed)
            elif removed == limit:
                more.append(shard)
        return more
