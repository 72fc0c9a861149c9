"""One shard for tests, without an engine: the harness is its host, and does what group commit and the fire loop do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from engine_world import check_shard

from duetime.domain.settle import Settlement
from duetime.domain.timer import BEFORE_ALL, Position, Timer, TimerKey
from duetime.engine.counters import Counters
from duetime.engine.pending_write import WriteResult
from duetime.engine.shard import Entry, Phase, Shard
from duetime.errors import NotOwner
from duetime.store import Batch, Committed, Found, Page, ShardRow
from duetime.testing import make_reached, make_timer
from duetime.testing.virtual import VirtualClock, run_virtual

__all__ = ["NOW_MS", "UNTIL_MS", "A", "B", "FakeHost", "Harness", "delivered", "timer", "with_harness"]

NOW_MS = 1_800_000_000_000
UNTIL_MS = NOW_MS + 60_000
A = TimerKey("test", "a")
B = TimerKey("test", "b")


class FakeHost:
    """What a shard needs of an engine: counters, and which entries are armed."""

    def __init__(self) -> None:
        self.counters = Counters(writes_waiting_max=1_000)
        self.now_ms = 1_000
        self.armed: list[Entry] = []
        self.enqueued = 0

    def arm(self, entry: Entry) -> None:
        assert entry not in self.armed, "armed twice"
        self.armed.append(entry)

    def discard(self, entry: Entry) -> None: ...

    def disarm(self, entry: Entry) -> None:
        self.armed.remove(entry)

    def add_weight(self, weight: int) -> None:
        self.counters.weight += weight

    def enqueue(self, shard: Shard) -> None:
        self.enqueued += 1

    def boot_ms(self) -> int:
        return self.now_ms


class Harness:
    """One shard that has loaded everything up to UNTIL_MS, and what group commit and the fire loop do with it."""

    def __init__(self, low_water: Position = BEFORE_ALL, *, loaded: bool = True, version: int = 3) -> None:
        self.host = FakeHost()
        self.shard = Shard(ShardRow(7, version, 1, "me", low_water=low_water), self.host)
        if loaded:
            self.load([])

    def check(self) -> None:
        host = self.host
        check_shard(self.shard)
        writes = [*self.shard.pending.values(), *self.shard.committing.values()]
        assert host.counters.writes_waiting == len(writes), "writes_waiting drifts"
        assert host.counters.unsettled == sum(write.settlement is not None for write in writes), "unsettled drifts"
        assert host.counters.weight == sum(entry.weight for entry in self.shard.entries.values()), "weight drifts"
        armed = [entry for entry in self.shard.entries.values() if entry.phase is Phase.ARMED]
        assert {id(entry) for entry in host.armed} == {id(entry) for entry in armed}

    def load(self, timers: list[Timer], more: Position | None = None, until_ms: int = UNTIL_MS, **rest: Any) -> None:
        self.shard.begin_load(until_ms)
        self.shard.end_load(Page(timers, more, **rest), 0)

    def write(self, put: Timer, **rest: Any) -> asyncio.Future[WriteResult]:
        return self.shard.write(put.key, put, [], **rest)

    def delete(self, key: TimerKey = A) -> asyncio.Future[WriteResult]:
        return self.shard.write(key, None, [])

    def take(self, room: int = 100, chars: int = 1_000_000) -> Batch:
        batch = self.shard.next_batch(room, chars)
        assert batch is not None
        return batch

    def commit(self, replaced: frozenset[int] = frozenset()) -> Batch:
        batch = self.take()
        self.shard.committed(batch, Committed(replaced))
        self.check()
        return batch

    def put(self, timer: Timer) -> Entry:
        """On disk and in memory."""
        self.write(timer)
        self.commit()
        return self.shard.entries[timer.key]

    def queue(self, entry: Entry) -> None:
        """What the fire loop does with a due timer."""
        self.host.disarm(entry)
        entry.phase = Phase.QUEUED

    def send(self, entry: Entry) -> None:
        self.queue(entry)
        assert self.shard.begin(entry, NOW_MS, again=False)

    def recover(self, found: dict[TimerKey, Found], low_water: Position = BEFORE_ALL) -> None:
        self.shard.finish_recovery(ShardRow(7, self.shard.fence.version + 1, 2, "me", low_water=low_water), found)
        self.check()


def with_harness(scenario: Callable[[Harness], Awaitable[None]], **settings: Any) -> None:
    async def run(clock: VirtualClock) -> None:
        harness = Harness(**settings)
        await scenario(harness)
        harness.check()
        harness.shard.drop(NotOwner())
        harness.check()
        assert harness.host.armed == []
        assert (
            harness.host.counters.writes_waiting,
            harness.host.counters.unsettled,
            harness.host.counters.weight,
        ) == (
            0,
            0,
            0,
        )

    run_virtual(run)


def timer(timer_id: str = "a", execute_at_ms: int = NOW_MS, **changes: Any) -> Timer:
    return make_timer(timer_id, execute_at_ms, **changes)


def delivered(entry: Entry) -> Settlement:
    return Settlement(reached=make_reached(entry.timer), succeeded=True)
