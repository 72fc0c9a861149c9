"""Who is alive, and may I fire: the member row, heartbeats, the lease, and a clock that can be trusted.

- A heartbeat that *started* at boot time t and was answered extends the lease to t + L. Past the lease
  nothing is fired, whatever this process believes.
- A member whose counter stood still for `dead_after` (more than L), by this observer's own boot clock, is
  marked dead, on condition of that counter: it has stopped firing before anybody may take over.
- Dead never comes back: who learns that he is dead joins again under a new id.
- A member whose clock is off counts in odd numbers. It is alive, so nobody takes its shards from it; but it
  gives them away, and the others know that it will not claim any.
- Timers are due by the database's clock, as measured by heartbeats. This machine's wall clock is used while it agrees
  with that within the error of the measurement; if it is off, it is corrected, and a jump between two heartbeats is
  ignored. So neither makes a timer fire more than EARLY_MAX_MS early.
"""

from __future__ import annotations

import random
from math import ceil, floor

from msgspec.structs import replace

from duetime.clock import Clock, OffsetBounds
from duetime.config import EngineConfig
from duetime.errors import MemberDead, OutcomeUnknown, StoreError
from duetime.store import Member, Store
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["EARLY_MAX_MS", "Membership"]

_NEVER = -1
_FORGET_AFTER_MS = 600_000
_STEADY_BEATS = 7
# How early a timer may be by the database's clock. With a smaller value timers would be late by the round trip of a
# heartbeat although both clocks are right.
EARLY_MAX_MS = 5
_CLOCK_READINGS = 5
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
    ) -> None:
        self._store = store
        self._clock = clock
        self._config = config
        self._telemetry = telemetry
        self._rng = rng
        self.address = address
        self.instance_id = ""
        self.secret = ""
        self.skew_ms = 0
        self.heartbeat_log = FailureLog(
            "heartbeats fail, and without them nothing is fired", "heartbeats succeed again"
        )
        self.alive: dict[str, Member] = {}  # as last read, this instance included
        self._counter = 0
        self._lease_until_ms = _NEVER
        self._bounds = OffsetBounds()  # of the database's clock
        self._wall_minus_boot_ms = clock.wall_ms() - clock.boot_ms()  # as of the last heartbeat
        self._correction_ms = 0  # what is taken off this machine's wall clock
        self._latest_minus_boot_ms = self._wall_minus_boot_ms
        self._seen: dict[str, tuple[int, int]] = {}  # member -> (counter, boot time of its last change)
        self._observed_at_ms = _NEVER
        self._dead_since_ms: dict[str, int] = {}
        self._first_seen_ms: dict[str, int] = {}
        self._claims_from_ms = _NEVER
        self._former: set[str] = set()  # ids of this process that were declared dead, or that a failover forgot

    # --- asked all the time -----------------------------------------------------------------------

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
            wall_ms = unjumped_ms - _ROUNDING_MS  # late is better than early
        return wall_ms - self._correction_ms

    def latest_now_ms(self) -> int:
        """The latest that it may be: what a delay is counted from. `now_ms` may be behind, and another instance whose
        clock is measured better would fire the timer early."""
        return max(self.now_ms(), self._clock.boot_ms() + self._latest_minus_boot_ms)

    @property
    def clock_error_ms(self) -> float:
        """How far `skew_ms` may be off: the uncertainty that the round trips of the heartbeats leave."""
        return self._bounds.width_ms

    # --- joining and staying ----------------------------------------------------------------------

    def wait_before_claims(self) -> None:
        """After a failover: leases that the database forgot may still be running, so nothing is claimed meanwhile."""
        self._claims_from_ms = self._clock.boot_ms() + self._config.dead_after.ms

    def may_claim(self) -> bool:
        return self.may_fire() and self._clock.boot_ms() >= self._claims_from_ms

    def is_established(self, instance_id: str) -> bool:
        """Has it been there for a while? Who comes and goes again and again gets nothing from those who stay."""
        now_ms = self._clock.boot_ms()
        _, beat_at_ms = self._seen.get(instance_id, (0, _NEVER))
        if now_ms - beat_at_ms > 2.5 * self._config.heartbeat_interval.ms:
            return False  # perhaps it is dead already, and only not buried yet
        there_for_ms = now_ms - self._first_seen_ms.get(instance_id, now_ms)
        return there_for_ms > _STEADY_BEATS * self._config.heartbeat_interval.ms

    async def join(self) -> None:
        """Enter the cluster under a fresh id; the first heartbeat opens the lease.

        The caller has dropped whatever it held under the id before.
        """
        if self.instance_id:
            self._former.add(self.instance_id)
        self.instance_id = f"{self._rng.getrandbits(64):016x}"
        self._counter = 0
        self._lease_until_ms = _NEVER
        self.secret = f"{self._rng.getrandbits(256):064x}"
        member = Member(self.instance_id, self.address, 0, True, self._clock.wall_ms(), self.secret)
        await self._store.join(member)
        await self.beat()
        if self.is_skewed:
            await self.beat()  # says so at once, or the others would make room
        await self._mark_predecessors_dead()
        await self.observe()

    async def beat(self) -> None:
        """One heartbeat. Raises MemberDead; any other failure just leaves the lease to run out."""
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
        self._judge_clock(store_ms, started_ms)
        if self.is_skewed:
            self._lease_until_ms = _NEVER
        else:
            self._lease_until_ms = started_ms + self._config.lease.ms

    def _judge_clock(self, store_ms: int, started_ms: int) -> None:
        """The database read its clock somewhere between our sending and our receiving."""
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
            self._correction_ms = offset_ms - low_ms + _ROUNDING_MS  # late is better than early
        elif capabilities.exclusive:  # the database's clock is this machine's
            self._correction_ms = 0
            self._latest_minus_boot_ms = offset_ms
        else:
            self._correction_ms = max(0, offset_ms - low_ms - max(EARLY_MAX_MS, 2 * error_ms))
        if self.is_skewed and not was_skewed:
            log.error(
                "this machine's clock is %d ms off the database's: it fires nothing and gives its shards away"
                " until the clock is set right (NTP, chrony)",
                self.skew_ms,
            )
        elif was_skewed and not self.is_skewed:
            log.info("this machine's clock agrees with the database's again")

    def _wall_minus_boot(self) -> tuple[int, int]:
        """The difference of the two clocks, and the boot time at which it was read. Read again if the process was
        paused between the readings."""
        for _ in range(_CLOCK_READINGS):
            before_ms, wall_ms, boot_ms = self._clock.boot_ms(), self._clock.wall_ms(), self._clock.boot_ms()
            if boot_ms - before_ms <= _ROUNDING_MS:
                break
        return wall_ms - boot_ms, boot_ms

    async def observe(self) -> bool:
        """Read the members and bury the dead; True if the living, or the fit among them, are not those of before."""
        members = {member.instance_id: member for member in await self._store.members()}
        # After the reading, not before: its counter may have been raised while we waited for the answer.
        boot_ms = self._clock.boot_ms()
        self._discount_unobserved_time(boot_ms)
        for member in members.values():
            if member.instance_id == self.instance_id:
                continue
            if not member.alive:
                await self._forget(member, boot_ms)
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
        """Time in which we could not look is no time in which we saw somebody stand still: when a database comes back
        after a while, whoever is there first must not bury the others. Once or twice a heartbeat may be missed."""
        blind_ms = boot_ms - self._observed_at_ms - 2 * self._config.heartbeat_interval.ms
        if blind_ms > 0:
            self._seen = {name: (counter, since_ms + blind_ms) for name, (counter, since_ms) in self._seen.items()}
        self._observed_at_ms = boot_ms

    @property
    def eligible(self) -> tuple[str, ...]:
        """Those of the living that may own shards."""
        return tuple(sorted(name for name, member in self.alive.items() if self._is_eligible(member)))

    def _is_eligible(self, member: Member) -> bool:
        if member.instance_id == self.instance_id:
            return not self.is_skewed
        return member.counter % 2 == 0

    def next_death_ms(self) -> int | None:
        """Boot time at which a member will have stood still for too long, if it goes on standing still. None: nobody
        is about to; what is overdue is looked at with every heartbeat anyway."""
        now_ms, dead_after_ms = self._clock.boot_ms(), self._config.dead_after.ms
        stood = [since_ms for name, (_, since_ms) in self._seen.items() if name in self.alive]
        return min((since + dead_after_ms + 1 for since in stood if since + dead_after_ms >= now_ms), default=None)

    async def leave(self) -> None:
        """Gone for good, and said so: nobody has to wait for it."""
        self._lease_until_ms = _NEVER
        try:
            if not await self._store.mark_dead(self.instance_id, self._counter):
                # A heartbeat that failed left the counter in doubt; this one settles it.
                self._counter += 1
                await self._store.heartbeat(self.instance_id, self._counter)
                await self._store.mark_dead(self.instance_id, self._counter)
            await self._store.forget_member(self.instance_id)  # who leaves in order is no dead to be looked at
        except StoreError as error:
            log.warning("could not sign off: %s", error)

    async def _mark_predecessors_dead(self) -> None:
        """Those of whom it is certain without waiting that they fire nothing any more: who we were before, and,
        where the store is ours alone, everybody else."""
        exclusive = self._store.capabilities.exclusive
        for member in await self._store.members():
            if member.instance_id == self.instance_id:
                continue
            if exclusive or (member.alive and member.instance_id in self._former):
                await self._store.mark_dead(member.instance_id, member.counter)
            if exclusive:
                await self._store.forget_member(member.instance_id)
        self._former.clear()

    async def _mark_dead(self, member: Member) -> bool:
        try:
            dead = await self._store.mark_dead(member.instance_id, member.counter)
        except OutcomeUnknown:
            return False  # the next reading tells
        if dead:
            log.warning("member %s at %s is dead", member.instance_id, member.address)
        return dead

    async def _forget(self, member: Member, boot_ms: int) -> None:
        since_ms = self._dead_since_ms.setdefault(member.instance_id, boot_ms)
        if boot_ms - since_ms > _FORGET_AFTER_MS:
            await self._store.forget_member(member.instance_id)
