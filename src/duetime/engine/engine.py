"""Which shards are mine: membership, claims, recovery, release; and the lanes and loops that serve them.

The database is the only truth and the only coordinator. A shard is claimed only if it is free or its
owner is dead, by compare-and-set on its version; nobody steals from the living. A commit whose outcome is
unknown is resolved by claiming the shard again, which fences the old commit off, and then reading.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

from duetime.clock import Clock
from duetime.cluster.membership import Membership
from duetime.cluster.placement import owners
from duetime.config import Config
from duetime.delivery import Deliverer
from duetime.domain.timer import TimerKey
from duetime.engine.fire_loop import FireLoop
from duetime.engine.group_commit import BatchedReader, GroupCommit
from duetime.engine.look_ahead import LookAhead
from duetime.engine.namespaces import Namespaces
from duetime.engine.shard import Entry, Shard
from duetime.errors import DuetimeError, FailedOver, MemberDead, NotOwner, OutcomeUnknown, ShardLost, StoreError
from duetime.single_flight import SingleFlight
from duetime.store import Claim, Fence, Found, ShardRow, Store, guarded
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["Engine"]

_CLAIMS_PER_CALL = 256
_PURGED_PER_CALL = 1_000  # rows of all its shards: a database may do it in one transaction, and commits wait for that
_PURGE_ROUND_SECONDS = 60
_BALANCE_EVERY_MS = 5_000  # when everything is where it should be
_RECOVERY_PAUSE_SECONDS = 0.05
# Deliveries made but not yet on disk would be made again after a crash: beyond this many, no more are started.
_UNSETTLED_MAX = 4_000
_RECOVERY_PAUSE_MAX_SECONDS = 2.0


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
    ) -> None:
        rng = rng or random.SystemRandom()
        store = guarded(store)
        self.telemetry = telemetry
        self.shards: dict[int, Shard] = {}
        self.rows: dict[int, ShardRow] = {}  # all shards, as last read
        self.namespaces = Namespaces(store, clock)
        self.membership = Membership(store, clock, config.engine, telemetry, rng, address)
        self.lookup = BatchedReader(store)
        self.fire_loop = FireLoop(
            config.delivery,
            self.membership,
            deliverer,
            telemetry,
            rng,
            self.namespaces,
            lambda: self._once(self._read_namespaces),
            congested=lambda: self.unsettled >= _UNSETTLED_MAX,
        )
        self.horizon = LookAhead(store, config.engine, self.membership, self.fire_loop, self.shards)
        self.writes_waiting = 0
        self.unsettled = 0
        self.writes_waiting_max = config.engine.writes_waiting_max
        self.started = False
        self.stopping = False
        self.failed = asyncio.Event()  # an internal error has ended the engine
        self._config = config
        self._store = store
        self.clock = clock
        self._rng = rng
        self._lanes = [
            GroupCommit(
                store,
                clock,
                telemetry,
                lost=self._lost,
                unknown=self._unknown,
                committed=self.fire_loop.flow.resume,
            )
            for _ in range(store.capabilities.parallel_commits)
        ]
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_task: asyncio.Task[None] | None = None  # of an engine that an internal error has ended
        self._under_way: set[str] = set()
        self._newly_lost = 0
        self._shared_balance = SingleFlight(self._balance)
        self._settled = False  # as last read, every shard is where it should be
        self._cluster_read_log = FailureLog("could not look at the cluster", "the cluster is in sight again")
        self._purge_log = FailureLog("could not purge what is past its retention", "purging again")
        self._recovery_log = FailureLog("shards are not recovered yet", "shards are recovered")
        self._balanced_at_ms = 0
        self._wire_gauges()

    def _wire_gauges(self) -> None:
        telemetry, flow = self.telemetry, self.fire_loop.flow
        telemetry.in_memory.read = lambda: sum(len(shard.entries) for shard in self.shards.values())
        telemetry.in_flight.read = lambda: flow.in_flight
        telemetry.held.read = lambda: self.fire_loop.waiting
        telemetry.writes_waiting.read = lambda: self.writes_waiting
        telemetry.shards_owned.read = lambda: len(self.shards)
        telemetry.lease_seconds.read = lambda: self.membership.lease_ms / 1_000
        telemetry.clock_skew_seconds.read = lambda: self.membership.skew_ms / 1_000
        telemetry.clock_error_seconds.read = lambda: self.membership.clock_error_ms / 1_000
        telemetry.unreadable.read = lambda: self.unreadable
        telemetry.oldest_due_seconds.read = lambda: (
            (self.fire_loop.oldest_due_ms(self.membership.now_ms()) or 0) / 1_000
        )

    # --- life -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join, claim, and begin to serve. The store is open and migrated, its namespaces are there."""
        await self.namespaces.refresh()
        await self.membership.join()
        for lane in self._lanes:
            self._spawn(lane.run())
        self._spawn(self.horizon.run())
        self._spawn(self._heartbeats())  # before the claims, which may take longer than the lease
        try:
            await self.balance()
        except StoreError as error:
            if self._store.capabilities.exclusive:
                raise
            # This instance is a member by now, and goes on from here: the next look claims.
            self._cluster_read_log.failed(error, self.clock.boot_ms())
        self._spawn(self._sweeps())
        self._spawn(self._purges())
        self.started = True

    async def stop(self) -> None:
        """Drain and release: after this no timer of ours is in flight, and nobody has to wait for our lease."""
        self.stopping = True
        self.fire_loop.stop()
        await self._release(list(self.shards.values()))
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
            return f"the lease has run out: {self.membership.trouble.reason or 'the store does not answer heartbeats'}"
        return None

    @property
    def broken(self) -> bool:
        return self.failed.is_set()

    @property
    def unreadable(self) -> int:
        """Stored timers of our shards that cannot be decoded, as far as they have been read."""
        return sum(len(shard.unreadable) for shard in self.shards.values())

    def new_id(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _once(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Begin it, unless it is still under way."""
        if work.__name__ not in self._under_way:
            self._under_way.add(work.__name__)
            self._spawn(self._noted(work))

    async def _noted(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        finally:
            self._under_way.discard(work.__name__)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.broken:
            log.critical(
                "internal error: this instance fires nothing more and gives up its lease and its shards; restart it",
                exc_info=task.exception(),
            )
            self.failed.set()
            self.abandon()
            self._drop_all()
            self._last_task = asyncio.get_running_loop().create_task(self.membership.leave())

    # --- what shards need (shard.Yard) ------------------------------------------------------------

    def arm(self, entry: Entry) -> None:
        self.fire_loop.arm(entry)

    def disarm(self, entry: Entry) -> None:
        self.fire_loop.disarm(entry)

    def remember(self, weight: int) -> None:
        self.horizon.remember(weight)

    def written(self, shard: Shard) -> None:
        self._lanes[shard.shard_id % len(self._lanes)].written(shard)

    def boot_ms(self) -> int:
        return self.clock.boot_ms()

    # --- claims -----------------------------------------------------------------------------------

    async def balance(self) -> None:
        """Read the shards anew; claim what should be mine and is free, release what should be another's.

        What it reads is no older than the call. All who ask while one is waiting to begin share it.
        """
        await self._shared_balance()

    async def _balance(self) -> None:
        self._settled = False
        asked_at_ms = self._balanced_at_ms = self.clock.boot_ms()
        self.rows = {row.shard_id: row for row in await self._store.shards()}
        if not self._store.capabilities.exclusive:
            # Members after shards, never before: an owner that joined in between would look dead.
            await self.membership.observe()
        alive, eligible = self.membership.alive, self.membership.eligible
        me = self.membership.instance_id
        if not self.stopping and me in alive and not self.membership.may_claim():
            # One whose clock is off is alive: what it does not serve, and yet owns, nobody else may take.
            await self._give_free([row.fence for row in self.rows.values() if self._is_orphan(row)])
        if self.stopping or not self.membership.may_claim() or me not in alive:
            return  # nothing is claimed before this instance is fully alive, nor once it is dead
        target = owners(len(self.rows), eligible)
        wanted: list[ShardRow] = []
        unwanted: list[Shard] = []
        orphaned: list[Fence] = []
        for row in self.rows.values():
            is_mine = target[row.shard_id] == me
            shard = self.shards.get(row.shard_id)
            if shard is not None:
                # Another has it, or a failover of the database has forgotten that we do.
                if row.fence != shard.fence and shard.fenced_at_ms < asked_at_ms and not shard.recovering:
                    self._lost(shard, OutcomeUnknown())
                elif not is_mine and not shard.draining and self.membership.is_established(target[row.shard_id]):
                    unwanted.append(shard)
            elif is_mine and (row.owner_id == me or row.owner_id not in alive):
                wanted.append(row)
            elif self._is_orphan(row):
                orphaned.append(row.fence)
        for start in range(0, len(wanted), _CLAIMS_PER_CALL):
            await self._claim(wanted[start : start + _CLAIMS_PER_CALL])
        self._settled = all(row.owner_id == target[shard_id] for shard_id, row in self.rows.items())
        self.horizon.look()
        if unwanted:
            self._spawn(self._release(unwanted))
        await self._give_free(orphaned)

    def _is_orphan(self, row: ShardRow) -> bool:
        """Ours by its row and not served: a release that did not get through."""
        return row.owner_id == self.membership.instance_id and row.shard_id not in self.shards

    async def _claim(self, rows: list[ShardRow]) -> None:
        claims = [self._claim_of(row.shard_id, row.version) for row in rows]
        for claim, row in zip(claims, await self._store.claim(claims), strict=True):
            self.rows[row.shard_id] = row
            # An answer that got lost is no matter: the row then carries our id, and is claimed once more.
            # One that was made under a name we no longer have is not ours.
            if row.nonce == claim.nonce and claim.owner_id == self.membership.instance_id:
                self.shards[row.shard_id] = Shard(row, self)

    def _claim_of(self, shard_id: int, expected_version: int) -> Claim:
        return Claim(
            shard_id=shard_id,
            expected_version=expected_version,
            nonce=self._rng.getrandbits(63),
            owner_id=self.membership.instance_id,
            owner_address=self.membership.address,
            now_ms=self.clock.wall_ms(),
        )

    # --- losing and giving away -------------------------------------------------------------------

    def _lost(self, shard: Shard, unknown: DuetimeError | None = None) -> None:
        """`unknown`: what to tell about a commit under way, unless it was the one that was refused."""
        self.telemetry.shards_lost.value += 1
        log.debug("lost ownership of shard %d", shard.shard_id)
        if not self._newly_lost:
            asyncio.get_running_loop().call_soon(self._tell_lost)
        self._newly_lost += 1
        self._drop(shard, NotOwner(), unknown)

    def _tell_lost(self) -> None:
        """One line for all that were lost together."""
        log.warning("lost ownership of %d shards", self._newly_lost)
        self._newly_lost = 0

    def _drop(self, shard: Shard, error: DuetimeError, unknown: DuetimeError | None = None) -> None:
        if self.shards.get(shard.shard_id) is shard:
            del self.shards[shard.shard_id]
        shard.drop(error, unknown)

    def _drop_all(self) -> None:
        self._settled = False
        for shard in list(self.shards.values()):
            self._drop(shard, NotOwner(), OutcomeUnknown())

    async def _release(self, shards: list[Shard]) -> None:
        """Start no more deliveries. Once those in flight have ended, accept no more writes, commit, and only then
        release the shards, each as soon as it is possible."""
        for shard in shards:
            shard.draining = True
        deadline_ms = self.clock.boot_ms() + self._config.server.drain_timeout.ms
        waiting = shards
        while waiting := [shard for shard in waiting if not shard.dropped]:
            too_late = self.clock.boot_ms() >= deadline_ms
            for shard in waiting:
                shard.closing = shard.closing or too_late or not shard.sending
            if too_late and not all(shard.is_quiet for shard in waiting):
                log.warning("drain timeout: deliveries still in flight may be repeated")
            quiet = [shard for shard in waiting if too_late or (shard.closing and shard.is_quiet)]
            fences = [shard.fence for shard in quiet]
            for shard in quiet:
                self._drop(shard, NotOwner(), OutcomeUnknown())
            await self._give_free(fences)
            if len(quiet) < len(waiting):
                await asyncio.sleep(0.01)

    async def _give_free(self, fences: list[Fence]) -> None:
        for start in range(0, len(fences), _CLAIMS_PER_CALL):
            try:
                await self._store.release(fences[start : start + _CLAIMS_PER_CALL])
            except StoreError as error:
                log.warning("could not release shards, trying again at the next look: %s", error)

    # --- recovery ---------------------------------------------------------------------------------

    def _unknown(self, shard: Shard) -> None:
        """The outcome of the shard's commit is unknown. Single flight: one recovery at a time."""
        if not shard.recovering:
            shard.recovering = True
            self.telemetry.reclaims.value += 1
            self._spawn(self._recover(shard))

    async def _recover(self, shard: Shard) -> None:
        """Claim again, so that the old commit can no longer happen; then read whether it has."""
        claim = self._claim_of(shard.shard_id, shard.fence.version)
        pause = _RECOVERY_PAUSE_SECONDS
        while not shard.dropped:
            try:
                # The same claim again if its answer got lost: the nonce tells whether it was made.
                row = (await self._store.claim([claim]))[0]
                if row.nonce != claim.nonce:
                    self._drop(shard, NotOwner(), OutcomeUnknown())
                    return
                found = await self._read(shard.shard_id, list(shard.committing))
            except StoreError as error:
                self._recovery_log.failed(error, self.clock.boot_ms())
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RECOVERY_PAUSE_MAX_SECONDS)
                continue
            if not shard.dropped:
                self.rows[shard.shard_id] = row
                shard.recovered(row, found)
                self._recovery_log.recovered()
            return

    async def _read(self, shard_id: int, keys: list[TimerKey]) -> dict[TimerKey, Found]:
        found: dict[TimerKey, Found] = {}
        for start in range(0, len(keys), _CLAIMS_PER_CALL):
            some = keys[start : start + _CLAIMS_PER_CALL]
            found.update(zip(some, await self._store.get_many([(shard_id, key) for key in some]), strict=True))
        return found

    # --- loops ------------------------------------------------------------------------------------

    async def _heartbeats(self) -> None:
        interval = self._config.engine.heartbeat_interval.seconds
        alone = self._store.capabilities.exclusive
        dead = False
        while True:
            await asyncio.sleep(self._until_next_look(interval))
            try:
                if dead:
                    # A join that fails half-way may have let a claim through: nothing outlives a name.
                    self._drop_all()
                    await self.membership.join()
                    dead = False
                    self._once(self._look)
                await self.membership.beat()
                if self.membership.is_skewed and not alone:
                    self._spawn(self._release([s for s in self.shards.values() if not s.draining]))
                if not alone:
                    self._once(self._look)
            except MemberDead as error:
                # Whatever we held is another's. Begin again, under a new name.
                log.warning("dropping all shards and joining again under a new id: %s", error)
                self._drop_all()
                if isinstance(error, FailedOver):
                    self.membership.wait_before_claims()
                dead = True
            except StoreError as error:
                self._cluster_read_log.failed(error, self.clock.boot_ms())
            self.fire_loop.wake()

    async def _look(self) -> None:
        """Beside the heartbeats: a claim that waits for a lock, or on a line that hangs, must not cost the lease."""
        try:
            if await self.membership.observe() or not self._settled:
                await self.balance()
        except StoreError as error:
            self._cluster_read_log.failed(error, self.clock.boot_ms())
        else:
            self._cluster_read_log.recovered()

    def _until_next_look(self, interval: float) -> float:
        """The next heartbeat; sooner if a member may be declared dead before it."""
        death_ms = self.membership.next_death_ms()
        if death_ms is None:
            return interval
        return min(interval, max(0.05, (death_ms - self.clock.boot_ms()) / 1_000))

    async def _sweeps(self) -> None:
        """Once a second: nothing depends on a wake-up that might have been lost."""
        loop = asyncio.get_running_loop()
        while True:
            expected = loop.time() + 1.0
            await asyncio.sleep(1.0)
            self.telemetry.loop_lag_seconds.observe(max(0.0, loop.time() - expected))
            now_ms = self.clock.boot_ms()
            for shard in list(self.shards.values()):
                shard.expire(now_ms - self._config.engine.write_timeout.ms)
            self.fire_loop.flow.measure()
            self.fire_loop.flow.resume()
            self.horizon.relieve()
            self.horizon.look()
            self.fire_loop.wake()
            if self.fire_loop.holds_any:
                self._once(self._read_namespaces)
            self._once(self._look_at_store)

    async def _read_namespaces(self) -> None:
        """For due timers whose namespace is not known: until it is known, they are not sent."""
        while held := self.fire_loop.take_held():
            reread = False
            try:
                await self.namespaces.reread()
                reread = True
            except StoreError as error:
                self._cluster_read_log.failed(error, self.clock.boot_ms())
            came_meanwhile = self.fire_loop.holds_any
            self.fire_loop.fire_held(held, reread=reread)
            if not came_meanwhile:
                return  # timers that are still held are tried again with the next sweep

    async def _look_at_store(self) -> None:
        """Beside the sweeps, which must not wait for a store that hangs."""
        exclusive = self._store.capabilities.exclusive
        try:
            if not exclusive:
                await self.namespaces.refresh()
            if exclusive:
                due = len(self.shards) < len(self.rows)  # what could not be claimed for want of a lease
            else:
                due = self.clock.boot_ms() - self._balanced_at_ms > _BALANCE_EVERY_MS
            if due or self.namespaces.shards_needed() > len(self.rows):  # another instance has made a wider one
                await self.balance()
        except StoreError as error:
            self._cluster_read_log.failed(error, self.clock.boot_ms())

    async def _purges(self) -> None:
        """Reached rows past their retention go, every shard once a minute."""
        turn = 0
        while True:
            await asyncio.sleep(1.0)
            turn = (turn + 1) % _PURGE_ROUND_SECONDS
            shards = [s for s in self.shards.values() if s.shard_id % _PURGE_ROUND_SECONDS == turn]
            troubles: list[StoreError] = []
            while shards:
                shards = await self._purge([s for s in shards if not (s.dropped or s.recovering)], troubles)
            if troubles:
                self._purge_log.failed(troubles[0], self.clock.boot_ms())
            else:
                self._purge_log.recovered()

    async def _purge(self, shards: list[Shard], troubles: list[StoreError]) -> list[Shard]:
        """One round; answers the shards that may have more. Those in trouble have to wait for the next minute."""
        fences = [shard.fence for shard in shards]
        limit = max(1, _PURGED_PER_CALL // max(1, len(shards)))
        try:
            results = await self._store.purge_reached(fences, self.membership.now_ms(), limit)
        except StoreError as error:
            troubles.append(error)
            return []
        more: list[Shard] = []
        for shard, fence, removed in zip(shards, fences, results, strict=True):
            if isinstance(removed, ShardLost):
                if shard.fence is fence and not shard.recovering:  # a recovery changes the fence under our feet
                    self._lost(shard, OutcomeUnknown())
            elif isinstance(removed, StoreError):
                troubles.append(removed)
            elif removed == limit:
                more.append(shard)
        return more
