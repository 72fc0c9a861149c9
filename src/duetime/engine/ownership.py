"""Which shards this instance owns: claim, release (drain) and recovery.

The database is the only coordinator. A shard is claimed only if it is free or its owner is dead, by compare-and-set on
its version; a shard of a live member is never taken from it. A commit whose outcome is unknown is resolved by claiming
the shard again, which fences the old commit off, and by reading the store after that.
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
from duetime.domain.timer import TimerKey
from duetime.engine.shard import Shard, ShardHost
from duetime.errors import DuetimeError, NotOwner, OutcomeUnknown, StoreError
from duetime.single_flight import SingleFlight
from duetime.store import Claim, Fence, Found, ShardRow, Store
from duetime.telemetry import FailureLog, Telemetry, log

__all__ = ["Ownership"]

_SHARDS_PER_CALL = 256
_KEYS_PER_CALL = 256
_DRAIN_POLL_SECONDS = 0.01
_RECOVERY_PAUSE_SECONDS = 0.05
_RECOVERY_PAUSE_MAX_SECONDS = 2.0


class Ownership:
    """`host` is what the shards get as theirs. `spawn` runs a task until the engine stops."""

    def __init__(
        self,
        config: Config,
        store: Store,
        clock: Clock,
        telemetry: Telemetry,
        rng: random.Random,
        membership: Membership,
        host: ShardHost,
        *,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        is_stopping: Callable[[], bool],
        on_claimed: Callable[[], None],
    ) -> None:
        self.shards: dict[int, Shard] = {}  # those this instance owns
        self.rows: dict[int, ShardRow] = {}  # all shards, as last read
        self.is_balanced = False  # as last read, every shard is with the member that should own it
        self.balanced_at_ms = 0  # boot time of the last balance
        self._config = config
        self._store = store
        self._clock = clock
        self._telemetry = telemetry
        self._rng = rng
        self._membership = membership
        self._host = host
        self._spawn = spawn
        self._is_stopping = is_stopping
        self._on_claimed = on_claimed
        self._single_balance = SingleFlight(self._balance)
        self._newly_lost = 0
        self._recovery_log = FailureLog("cannot recover shards, trying again", "shards are recovered")

    # --- claiming ---------------------------------------------------------------------------------

    async def balance(self) -> None:
        """Read all shards; claim those this instance should own that are free, release those others should own.

        What it reads is no older than the call. Callers that ask before a balance begins share it.
        """
        await self._single_balance()

    async def _balance(self) -> None:
        self.is_balanced = False
        asked_at_ms = self.balanced_at_ms = self._clock.boot_ms()
        self.rows = {row.shard_id: row for row in await self._store.shards()}
        membership = self._membership
        if not self._store.capabilities.exclusive:
            # Members are read after shards, never before: an owner that joined in between would look dead.
            await membership.observe()
        alive, me = membership.alive, membership.instance_id
        if self._is_stopping() or me not in alive:
            return  # one that leaves or is dead claims nothing
        if not membership.may_claim():
            # A member whose clock is off is alive, so no other member may take the shards it owns but does not serve.
            await self._release_rows([row.fence for row in self.rows.values() if self._is_orphan(row)])
            return
        target = owners(len(self.rows), membership.eligible)
        to_claim: list[ShardRow] = []
        to_release: list[Shard] = []
        orphans: list[Fence] = []
        for row in self.rows.values():
            is_mine = target[row.shard_id] == me
            shard = self.shards.get(row.shard_id)
            if shard is not None:
                # Another instance owns it, or a failover of the database lost our claim. A fence that was learnt after
                # the read began proves nothing, and during a recovery the fence is about to change.
                if row.fence != shard.fence and shard.fenced_at_ms < asked_at_ms and not shard.recovering:
                    self.lost(shard, OutcomeUnknown())
                elif not is_mine and not shard.draining and membership.is_established(target[row.shard_id]):
                    to_release.append(shard)
            elif is_mine and (row.owner_id == me or row.owner_id not in alive):
                to_claim.append(row)
            elif self._is_orphan(row):
                orphans.append(row.fence)
        for start in range(0, len(to_claim), _SHARDS_PER_CALL):
            await self._claim(to_claim[start : start + _SHARDS_PER_CALL])
        # A shard may be ours by its row and not be served: it was lost above, or this instance joined again during a
        # claim. Then the next heartbeat balances again.
        self.is_balanced = all(
            row.owner_id == target[shard_id] and (row.owner_id != me or shard_id in self.shards)
            for shard_id, row in self.rows.items()
        )
        self._on_claimed()
        if to_release:
            self._spawn(self.release(to_release))
        await self._release_rows(orphans)

    def _is_orphan(self, row: ShardRow) -> bool:
        """Is it ours by its row, but not served? So it is after a release that failed."""
        return row.owner_id == self._membership.instance_id and row.shard_id not in self.shards

    async def _claim(self, rows: list[ShardRow]) -> None:
        claims = [self._claim_of(row.shard_id, row.version) for row in rows]
        for claim, row in zip(claims, await self._store.claim(claims), strict=True):
            self.rows[row.shard_id] = row
            # If the answer to a claim is lost, the row carries our id, and the next balance claims it once more.
            # A claim that was made under an id we no longer have is not ours: that member is dead.
            if row.nonce == claim.nonce and claim.owner_id == self._membership.instance_id:
                self.shards[row.shard_id] = Shard(row, self._host)

    def _claim_of(self, shard_id: int, expected_version: int) -> Claim:
        return Claim(
            shard_id=shard_id,
            expected_version=expected_version,
            nonce=self._rng.getrandbits(63),
            owner_id=self._membership.instance_id,
            owner_address=self._membership.address,
            now_ms=self._clock.wall_ms(),
        )

    # --- losing -----------------------------------------------------------------------------------

    def lost(self, shard: Shard, unknown: DuetimeError | None = None) -> None:
        """Another instance owns the shard now. `unknown` answers the callers of a commit in flight; it is left out if
        that commit was refused, and so certainly not applied."""
        self._telemetry.shards_lost.value += 1
        log.debug("lost ownership of shard %d", shard.shard_id)
        if not self._newly_lost:
            asyncio.get_running_loop().call_soon(self._log_lost)
        self._newly_lost += 1
        self.drop(shard, NotOwner(), unknown)

    def _log_lost(self) -> None:
        """One log line for all shards that were lost together."""
        log.warning("lost ownership of %d shards", self._newly_lost)
        self._newly_lost = 0

    def drop(self, shard: Shard, error: DuetimeError, unknown: DuetimeError | None = None) -> None:
        """Stop serving a shard at once. The row in the store is not changed."""
        if self.shards.get(shard.shard_id) is shard:
            del self.shards[shard.shard_id]
        shard.drop(error, unknown)

    def drop_all(self) -> None:
        self.is_balanced = False
        for shard in list(self.shards.values()):
            self.drop(shard, NotOwner(), OutcomeUnknown())

    # --- releasing --------------------------------------------------------------------------------

    async def release(self, shards: list[Shard]) -> None:
        """Drain shards and give them free, each as soon as possible.

        First no more deliveries are started. When those in flight have ended, no more writes are accepted. When
        everything is committed the shard is given free: not before, or the next owner would repeat deliveries. At the
        drain timeout it is given free in any case.
        """
        for shard in shards:
            shard.start_drain()
        deadline_ms = self._clock.boot_ms() + self._config.server.drain_timeout.ms
        waiting = shards
        while waiting := [shard for shard in waiting if not shard.dropped]:
            timed_out = self._clock.boot_ms() >= deadline_ms
            for shard in waiting:
                if timed_out or not shard.sending:
                    shard.close()
            if timed_out and not all(shard.is_quiet for shard in waiting):
                log.warning("drain timeout: deliveries still in flight may be repeated")
            drained = [shard for shard in waiting if timed_out or (shard.closing and shard.is_quiet)]
            fences = [shard.fence for shard in drained]
            for shard in drained:
                self.drop(shard, NotOwner(), OutcomeUnknown())
            await self._release_rows(fences)
            if len(drained) < len(waiting):
                await asyncio.sleep(_DRAIN_POLL_SECONDS)

    async def _release_rows(self, fences: list[Fence]) -> None:
        """Give shards free in the store. This instance no longer serves them."""
        for start in range(0, len(fences), _SHARDS_PER_CALL):
            try:
                await self._store.release(fences[start : start + _SHARDS_PER_CALL])
            except StoreError as error:
                log.warning("cannot release shards, trying again with the next balance: %s", error)

    # --- recovering -------------------------------------------------------------------------------

    def recover(self, shard: Shard) -> None:
        """The outcome of the shard's commit is unknown: start a recovery, unless one is running."""
        if not shard.recovering:
            shard.start_recovery()
            self._telemetry.reclaims.value += 1
            self._spawn(self._recover(shard))

    async def _recover(self, shard: Shard) -> None:
        """Claim the shard again, so that the old commit can no longer be applied; then read whether it was."""
        claim = self._claim_of(shard.shard_id, shard.fence.version)
        pause = _RECOVERY_PAUSE_SECONDS
        while not shard.dropped:
            try:
                # If the answer is lost the same claim is made again: its nonce shows whether it was successful.
                row = (await self._store.claim([claim]))[0]
                if row.nonce != claim.nonce:
                    self.drop(shard, NotOwner(), OutcomeUnknown())
                    return
                found = await self._read(shard.shard_id, list(shard.committing))
            except StoreError as error:
                self._recovery_log.failed(error, self._clock.boot_ms())
                await asyncio.sleep(pause)
                pause = min(pause * 2, _RECOVERY_PAUSE_MAX_SECONDS)
                continue
            if not shard.dropped:
                self.rows[shard.shard_id] = row
                shard.finish_recovery(row, found)
                self._recovery_log.recovered()
            return

    async def _read(self, shard_id: int, keys: list[TimerKey]) -> dict[TimerKey, Found]:
        found: dict[TimerKey, Found] = {}
        for start in range(0, len(keys), _KEYS_PER_CALL):
            some = keys[start : start + _KEYS_PER_CALL]
            found.update(zip(some, await self._store.get_many([(shard_id, key) for key in some]), strict=True))
        return found
