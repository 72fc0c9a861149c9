"""The database of the simulated cluster: the memory store, which also records what the checker needs."""

from __future__ import annotations

import random

from duetime.clock import Clock
from duetime.domain.recurrence import state_of
from duetime.domain.timer import Namespace, Timer, TimerKey
from duetime.errors import ShardLost
from duetime.store import Batch, Capabilities, Committed, ListQuery
from duetime.stores.memory import MemoryStore
from duetime.testing.occurrences import EndedOccurrence
from duetime.testing.simulation.network import name_in_history

__all__ = ["SimDatabase"]


class SimDatabase(MemoryStore):
    def __init__(self, clock: Clock, capabilities: Capabilities) -> None:
        super().__init__(clock)
        self.capabilities = capabilities
        # (delivery id, attempt) -> when the result of that attempt was written.
        self.recorded_at_ms: dict[tuple[str, int], int] = {}
        self.over_at_ms: dict[str, int] = {}  # delivery id -> when it was over: no attempt follows
        self.stored_namespaces: dict[str, list[Namespace]] = {}  # every version of each
        self.spoilt: set[TimerKey] = set()
        self.ended: list[EndedOccurrence] = []  # of timers with a schedule, in the order they were stored

    def _commit(self, batch: Batch) -> Committed | ShardLost:
        shard = self._shards.get(batch.fence.shard_id)
        changes: list[tuple[Timer, Timer | None]] = []
        if shard is not None:
            written: list[tuple[Timer | None, Timer | None]] = [(shard.timers.get(key), None) for key in batch.deletes]
            written += [(shard.timers.get(timer.key), timer) for timer in batch.puts]
            changes = [(old, new) for old, new in written if old is not None]
        result = super()._commit(batch)
        if isinstance(result, Committed):
            now_ms = self._clock.wall_ms()
            ended = {row.timer.key: row.timer for row in batch.reached}
            for old, new in changes:
                is_over = new is None or new.delivery_id != old.delivery_id
                now = ended.get(old.key) if is_over else new
                # A timer that was skipped, cancelled or parked was not attempted.
                if now is not None and now.delivery_id == old.delivery_id and now.attempts > old.attempts:
                    self.recorded_at_ms.setdefault((old.delivery_id, now.attempts), now_ms)
                if is_over:
                    self.over_at_ms.setdefault(old.delivery_id, now_ms)
            self._record_occurrences(batch)
        return result

    def _record_occurrences(self, batch: Batch) -> None:
        for row in batch.reached:
            timer = row.timer
            state = state_of(timer)
            if state is not None and state.schedule is not None:
                self.ended.append(
                    EndedOccurrence(
                        timer=name_in_history(timer.key),
                        delivery=timer.delivery_id,
                        scheduled_ms=timer.scheduled_at_ms,
                        is_extra=not state.asked,
                        outcome=row.outcome,
                        attempts=timer.attempts,
                        reached_ms=row.reached_at_ms,
                    )
                )

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        written = await super().put_namespace(namespace, expected_revision)
        if written:
            self.stored_namespaces.setdefault(namespace.name, []).append(namespace)
        return written

    def is_deleted(self, namespace: str) -> bool:
        row = self._namespaces.get(namespace)
        return row is not None and row.deleted

    def has(self, namespace: str, timer_id: str) -> bool:
        """Is this timer scheduled?"""
        return any(TimerKey(namespace, timer_id) in shard.timers for shard in self._shards.values())

    async def scheduled(self, namespace: str) -> list[Timer]:
        """All timers of a namespace, deleted or not."""
        row = self._namespaces.get(namespace)
        if row is None:
            return []
        query = ListQuery(namespace=namespace, num_shards=row.num_shards, limit=1_000_000)
        return list((await self.list_timers(query)).timers)

    async def is_empty(self) -> bool:
        """No timer is scheduled, in any namespace."""
        return not any(shard.timers.keys() - self.spoilt for shard in self._shards.values())

    def spoil_one(self, rng: random.Random) -> None:
        """Make the row of a random timer unreadable, if the memory store supports that."""
        spoil = getattr(self, "spoil_timer", None)
        there = [(shard_id, key) for shard_id, shard in self._shards.items() for key in shard.timers]
        if spoil is not None and there:
            shard_id, key = rng.choice(there)
            spoil(shard_id, key)
            self.spoilt.add(key)
