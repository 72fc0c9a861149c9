"""Membership: this instance's member row and heartbeats, its lease, which members are alive, and the corrected clock.

- A heartbeat that *started* at boot time t and was answered extends the lease to t + L. After the end of the lease
  nothing is fired.
- A member whose counter has not changed for `dead_after` (more than L), by this observer's own boot clock, is marked
  dead, on condition that the counter still has that value. So it has stopped firing before another member may claim
  its shards.
- A dead member is never alive again: an instance that learns that it is dead joins again under a new id.
- A member whose clock is off raises its counter to odd numbers. It is alive, so no other member claims its shards; but
  it releases them, and the others know that it will not claim any.
- Timers are due by the database's clock, as measured by heartbeats. This machine's wall clock is used while it agrees
  with that within the error of the measurement; if it is off, it is corrected, and a jump between two heartbeats is
  ignored. So neither makes a timer fire more than EARLY_MAX_MS early.
"""

from __future__ import annotations

import random
from math import ceil, floor

from msgspec.structs import replace

from duetime.clock import Clock, OffsetBounds
from duetime.cluster.peer_protocol import new_secret
from duetime.config import EngineConfig
from duetime.errors import MemberDead, OutcomeUnknown, StoreError
from duetime.store import Member, Store
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["EARLY_MAX_MS", "Membership"]

_NEVER = -1
_FORGET_AFTER_MS = 600_000  # rows of dead members are kept for so long
_ESTABLISHED_HEARTBEATS = 7  # a member that has been there for more heartbeats is established
# How early a timer may be by the database's clock. With a smaller value timers would be late by the round trip of a
# heartbeat although both clocks are right.
EARLY_MAX_MS = 5
_CLOCK_READS_MAX = 5
_ROUNDING_MS = 1  # the difference of two clocks that are read in whole milliseconds varies by this much


class Membership:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        config: EngineConfig,
        telemetry: Telemetry,
        rng: random.Random,
        address: str,
        *,
        tls: bool = False,
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._telemetry = telemetry
        self._rng = rng
        self.address = address
        self._tls = tls  # do other instances reach this one with https?
        self.instance_id = ""
        self.secret = ""
        self.skew_ms = 0
        self.heartbeat_log = FailureLog(
            "heartbeats fail; nothing is fired after the end of the lease", "heartbeats succeed again"
        )
        self.alive: dict[str, Member] = {}  # as last read, this instance included
        self._counter = 0
        self._lease_until_ms = _NEVER
        self._bounds = OffsetBounds()  # of the database's clock
        self._wall_minus_boot_ms = clock.wall_ms() - clock.boot_ms()  # as of the last heartbeat
        self._correction_ms = 0  # subtracted from this machine's wall clock
        self._latest_minus_boot_ms = self._wall_minus_boot_ms  # upper bound of the database's clock
        self._seen: dict[str, tuple[int, int]] = {}  # member -> (counter, boot time of its last change)
        self._observed_at_ms = _NEVER
        self._dead_since_ms: dict[str, int] = {}
        self._first_seen_ms: dict[str, int] = {}
        self._claims_from_ms = _NEVER
        self._former_ids: set[str] = set()  # ids of this process that were declared dead, or lost in a failover

    # --- the lease and the clock ------------------------------------------------------------------

    @property
    def lease_ms(self) -> int:
        """How much longer this instance may fire."""
        return max(0, self._lease_until_ms - self._clock.boot_ms())

    def boot_ms(self) -> int:
        return self._clock.boot_ms()

    def may_fire(self) -> bool:
        return self._clock.boot_ms() < self._lease_until_ms

    @property
    def is_skewed(self) -> bool:
        return abs(self.skew_ms) > self._config.clock_skew_max.ms

    def now_ms(self) -> int:
        """The time by which timers are due: the wall clock, corrected as of the last heartbeat. If the wall clock has
        jumped since then, the time is counted from there by the boot clock."""
        wall_ms = self._clock.wall_ms()
        unjumped_ms = self._clock.boot_ms() + self._wall_minus_boot_ms
        if abs(wall_ms - unjumped_ms) > _ROUNDING_MS:
            wall_ms = unjumped_ms - _ROUNDING_MS  # if in doubt, a timer fires late rather than early
        return wall_ms - self._correction_ms

    def latest_now_ms(self) -> int:
        """The upper bound of the time by which timers are due. A delay is counted from it: `now_ms` may be behind, and
        another instance that has measured the clock better would fire the timer early."""
        return max(self.now_ms(), self._clock.boot_ms() + self._latest_minus_boot_ms)

    @property
    def clock_error_ms(self) -> float:
        """How inexact `skew_ms` may be, because a heartbeat takes a round trip."""
        return self._bounds.width_ms

    # --- joining and heartbeats -------------------------------------------------------------------

    def wait_before_claims(self) -> None:
        """After a failover of the database claim nothing for `dead_after`: members whose rows it lost may still have a
        valid lease, and fire."""
        self._claims_from_ms = self._clock.boot_ms() + self._config.dead_after.ms

    def may_claim(self) -> bool:
        return self.may_fire() and self._clock.boot_ms() >= self._claims_from_ms

    def is_established(self, instance_id: str) -> bool:
        """Has this member been there for a while? A new instance receives no shards from live members, so that one that
        starts and dies again and again does not move shards each time."""
        now_ms = self._clock.boot_ms()
        _, beat_at_ms = self._seen.get(instance_id, (0, _NEVER))
        if now_ms - beat_at_ms > 2.5 * self._config.heartbeat_interval.ms:
            return False  # it may be dead and not marked yet
        there_for_ms = now_ms - self._first_seen_ms.get(instance_id, now_ms)
        return there_for_ms > _ESTABLISHED_HEARTBEATS * self._config.heartbeat_interval.ms

    async def join(self) -> None:
        """Join the cluster under a new id. The first heartbeat starts the lease.

        The caller has dropped all shards that it owned under the id before.
        """
        if self.instance_id:
            self._former_ids.add(self.instance_id)
        self.instance_id = f"{self._rng.getrandbits(64):016x}"
        self._counter = 0
        self._lease_until_ms = _NEVER
        self.secret = new_secret(self._rng.getrandbits(256), tls=self._tls)
        member = Member(self.instance_id, self.address, 0, True, self._clock.wall_ms(), self.secret)
        await self._store.join(member)
        await self.send_heartbeat()
        if self.is_skewed:
            await self.send_heartbeat()  # tells the others at once, or they would release shards for it
        await self._mark_former_members_dead()
        await self.observe()

    async def send_heartbeat(self) -> None:
        """Send one heartbeat. Raises MemberDead; after any other error the lease is not extended."""
        started_ms = self._clock.boot_ms()
        self._counter = (self._counter // 2 + 1) * 2 + self.is_skewed
        try:
            store_ms = await self._store.heartbeat(self.instance_id, self._counter)
        except MemberDead:
            self._lease_until_ms = _NEVER
            self._telemetry.heartbeats.add("dead")
            raise
        except StoreError as error:
            self._telemetry.heartbeats.add("failed")
            self.heartbeat_log.failed(error, self._clock.boot_ms())
            return
        self.heartbeat_log.recovered()
        self._telemetry.heartbeats.add("ok")
        self._measure_clock(store_ms, started_ms)
        if self.is_skewed:
            self._lease_until_ms = _NEVER
        else:
            # Counted from the start of the heartbeat. Other members count `dead_after` from the moment they see the new
            # counter, which is later: so the lease ends before this member is marked dead.
            self._lease_until_ms = started_ms + self._config.lease.ms

    def _measure_clock(self, store_ms: int, started_ms: int) -> None:
        """Correct the clock by the answer to a heartbeat. The database read its clock between `started_ms` and now."""
        was_skewed = self.is_skewed
        capabilities, bounds = self._store.capabilities, self._bounds
        offset_ms, boot_ms = self._wall_minus_boot()
        error_ms = capabilities.clock_error_ms
        bounds.saw(store_ms - error_ms, store_ms + error_ms, started_ms, boot_ms)
        low_ms, high_ms = floor(bounds.low_ms), ceil(bounds.high_ms)
        self._wall_minus_boot_ms = offset_ms
        self.skew_ms = offset_ms - min(max(offset_ms, low_ms), high_ms)
        self._latest_minus_boot_ms = high_ms
        if abs(self.skew_ms) > _ROUNDING_MS:
            self._correction_ms = offset_ms - low_ms + _ROUNDING_MS  # if in doubt, late rather than early
        elif capabilities.exclusive:  # the database's clock is this machine's
            self._correction_ms = 0
            self._latest_minus_boot_ms = offset_ms
        else:
            self._correction_ms = max(0, offset_ms - low_ms - max(EARLY_MAX_MS, 2 * error_ms))
        if self.is_skewed and not was_skewed:
            log.error(
                "this machine's clock is %d ms off the database's: this instance fires nothing and releases its shards"
                " until the clock is corrected (NTP, chrony)",
                self.skew_ms,
            )
        elif was_skewed and not self.is_skewed:
            log.info("this machine's clock agrees with the database's again")

    def _wall_minus_boot(self) -> tuple[int, int]:
        """The difference of the two clocks, and the boot time at which it was read. The clocks are read again if the
        process was paused between the reads."""
        for _ in range(_CLOCK_READS_MAX):
            before_ms, wall_ms, boot_ms = self._clock.boot_ms(), self._clock.wall_ms(), self._clock.boot_ms()
            if boot_ms - before_ms <= _ROUNDING_MS:
                break
        return wall_ms - boot_ms, boot_ms

    async def observe(self) -> bool:
        """Read the members and mark stopped ones dead. True: the live or the eligible members have changed."""
        members = {member.instance_id: member for member in await self._store.members()}
        # The time after the read, not before: a counter may have been raised while we waited for the answer.
        boot_ms = self._clock.boot_ms()
        self._discount_unobserved_time(boot_ms)
        for member in members.values():
            if member.instance_id == self.instance_id:
                continue
            if not member.alive:
                await self._forget_if_old(member, boot_ms)
                continue
            counter, since_ms = self._seen.get(member.instance_id, (_NEVER, boot_ms))
            if counter != member.counter:
                self._seen[member.instance_id] = (member.counter, boot_ms)
            elif boot_ms - since_ms > self._config.dead_after.ms and await self._mark_dead(member):
                members[member.instance_id] = replace(member, alive=False)
        for gone in self._seen.keys() - members.keys():
            del self._seen[gone]
        self._first_seen_ms = {name: self._first_seen_ms.get(name, boot_ms) for name in members}
        for gone in self._dead_since_ms.keys() - members.keys():
            del self._dead_since_ms[gone]
        before = set(self.alive), self.eligible
        self.alive = {name: member for name, member in members.items() if member.alive}
        return before != (set(self.alive), self.eligible)

    def _discount_unobserved_time(self, boot_ms: int) -> None:
        """Time in which this instance could not read the members does not count as time in which their counters stood
        still. Otherwise, when a database is back after an outage, the first instance would mark all others dead. One
        or two missed reads are no such time."""
        unobserved_ms = boot_ms - self._observed_at_ms - 2 * self._config.heartbeat_interval.ms
        if unobserved_ms > 0:
            self._seen = {name: (counter, since_ms + unobserved_ms) for name, (counter, since_ms) in self._seen.items()}
        self._observed_at_ms = boot_ms

    @property
    def eligible(self) -> tuple[str, ...]:
        """The live members that may own shards, in the same order on every instance."""
        return tuple(sorted(name for name, member in self.alive.items() if self._is_eligible(member)))

    def _is_eligible(self, member: Member) -> bool:
        if member.instance_id == self.instance_id:
            return not self.is_skewed
        return member.counter % 2 == 0

    def next_death_ms(self) -> int | None:
        """Boot time at which the next member may be marked dead, if its counter does not change before. None: there is
        no such member. One whose time has passed is checked with every heartbeat anyway."""
        now_ms, dead_after_ms = self._clock.boot_ms(), self._config.dead_after.ms
        unchanged_since = [since_ms for name, (_, since_ms) in self._seen.items() if name in self.alive]
        return min(
            (since + dead_after_ms + 1 for since in unchanged_since if since + dead_after_ms >= now_ms), default=None
        )

    async def leave(self) -> None:
        """Leave the cluster for good: other members may claim at once and need not wait until the lease ends."""
        self._lease_until_ms = _NEVER
        try:
            if not await self._store.mark_dead(self.instance_id, self._counter):
                # After a heartbeat that failed the stored counter is not known. This heartbeat sets it.
                self._counter += 1
                await self._store.heartbeat(self.instance_id, self._counter)
                await self._store.mark_dead(self.instance_id, self._counter)
            await self._store.forget_member(self.instance_id)  # its row is kept only after a crash, for operators
        except StoreError as error:
            log.warning("cannot leave the cluster, the other members wait for the end of the lease: %s", error)

    async def _mark_former_members_dead(self) -> None:
        """Mark those members dead that certainly fire nothing any more: this process under its former ids and, if the
        store is exclusive, all other members."""
        exclusive = self._store.capabilities.exclusive
        for member in await self._store.members():
            if member.instance_id == self.instance_id:
                continue
            if exclusive or (member.alive and member.instance_id in self._former_ids):
                await self._store.mark_dead(member.instance_id, member.counter)
            if exclusive:
                await self._store.forget_member(member.instance_id)
        self._former_ids.clear()

    async def _mark_dead(self, member: Member) -> bool:
        try:
            dead = await self._store.mark_dead(member.instance_id, member.counter)
        except OutcomeUnknown:
            return False  # the next read of the members shows it
        if dead:
            log.warning("member %s at %s is dead: its shards can be claimed", member.instance_id, member.address)
        return dead

    async def _forget_if_old(self, member: Member, boot_ms: int) -> None:
        since_ms = self._dead_since_ms.setdefault(member.instance_id, boot_ms)
        if boot_ms - since_ms > _FORGET_AFTER_MS:
            await self._store.forget_member(member.instance_id)
