"""A Shard under random steps: its counters are always true, and it forgets no timer."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from shard_world import NOW_MS, Harness, delivered, timer, with_harness

from duetime.domain.settle import Settlement
from duetime.domain.timer import Reached, Timer, TimerKey
from duetime.engine.shard import end_of
from duetime.engine.window import Load
from duetime.store import Batch, Committed, Found, Page, ShardRow
from duetime.testing import make_reached


class TestRandomSteps:
    """Whatever happens to a shard and in which order: its counters equal a count of what it holds, and every stored
    timer up to the horizon is in memory or in the backlog."""

    @pytest.mark.parametrize("seed", range(150))
    def test_the_counters_are_true_and_no_timer_is_forgotten(self, seed: int) -> None:
        async def scenario(harness: Harness) -> None:
            steps = RandomSteps(harness, random.Random(seed))
            for _ in range(150):
                steps.one()
                steps.check()
            steps.end()

        with_harness(scenario, loaded=False)


class RandomSteps:
    """A shard, its rows in a store, and random steps of everything that uses it."""

    NAMES = tuple("abcdefghijklmnop")

    def __init__(self, harness: Harness, rng: random.Random) -> None:
        self.harness = harness
        self.shard = harness.shard
        self.rng = rng
        self.stored: dict[TimerKey, Timer] = {}
        self.reached: dict[TimerKey, Reached] = {}
        self.low_water = self.shard.low_water  # as stored
        self.written = 0
        self.batch: Batch | None = None
        self.rows_when_read: list[Timer] = []
        self.load: Load | None = None
        self.now_ms = NOW_MS
        for name in self.NAMES[:10]:
            self.stored[timer(name).key] = self.random_timer(name)

    def random_timer(self, name: str) -> Timer:
        self.written += 1
        at_ms = self.now_ms + self.rng.choice((self.rng.randint(-500, 0), self.rng.randint(-500, 2_000)))
        return timer(name, at_ms, payload="x" * self.rng.choice((1, 5_000)), generation=self.written)

    def one(self) -> None:
        self.now_ms += self.rng.randint(0, 20)
        self.harness.host.now_ms += 100
        writing = (self.write, self.write, self.take, self.decide, self.expire)
        loading = (self.begin_load, self.end_load, self.spill, self.spill, self.shrink)
        firing = (self.begin, self.settle)
        self.rng.choice((*writing, *loading, *firing))()

    def write(self) -> None:
        name = self.rng.choice(self.NAMES)
        if self.rng.random() < 0.3:
            future = self.shard.write(timer(name).key, None, [make_reached(timer(name))])
        else:
            future = self.harness.write(self.random_timer(name))
        future.add_done_callback(lambda done: done.exception())

    def take(self) -> None:
        if self.batch is None:
            self.batch = self.shard.next_batch(self.rng.choice((1, 3, 100)), 1_000_000)
            if self.batch is not None and self.rng.random() < 0.3:
                self.batch = self.shard.raise_low_water(self.batch)

    def decide(self) -> None:
        """The commit is applied, or not, or it is unknown which, and the shard recovers."""
        if self.batch is None:
            return
        batch, self.batch = self.batch, None
        outcome = self.rng.choice(("applied", "applied", "refused", "unknown, applied", "unknown, lost"))
        if outcome.endswith("applied"):
            for key in batch.deletes:
                self.stored.pop(key, None)
            self.stored.update((put.key, put) for put in batch.puts)
            self.reached.update((row.timer.key, row) for row in batch.reached)
            self.low_water = batch.low_water or self.low_water
            if self.rng.random() < 0.5:  # the page in flight shows the commit, or it does not
                self.rows_when_read = list(self.stored.values())
        if outcome == "applied":
            self.shard.committed(batch, Committed())
        elif outcome == "refused":
            self.shard.not_committed("refused")
        else:
            self.shard.start_recovery()
            found = {key: Found(self.stored.get(key), self.reached.get(key)) for key in self.shard.committing}
            version = self.shard.fence.version + 1
            self.shard.finish_recovery(ShardRow(7, version, 2, "me", low_water=self.low_water), found)

    def begin_load(self) -> None:
        if not self.shard.loading:
            backlog = self.shard.window.backlog is not None and self.rng.random() < 0.7
            self.load = self.shard.begin_load(self.now_ms + self.rng.choice((0, 300, 1_000)), backlog=backlog)
            self.rows_when_read = list(self.stored.values())

    def end_load(self) -> None:
        load, self.load = self.load, None
        if load is None:
            return
        if self.rng.random() < 0.2:
            self.shard.end_load(None, self.now_ms)
            return
        wanted = sorted(
            (row for row in self.rows_when_read if row.position > load.after and row.position <= end_of(load.until[0])),
            key=lambda row: row.position,
        )
        page = wanted[: self.rng.randint(1, 5)]
        following = page[-1].position if len(page) < len(wanted) else None
        self.shard.end_load(Page(page, following), self.now_ms)

    def spill(self) -> None:
        """Also timers after the horizon: it was moved back while a write of them was pending."""
        after_ms = self.now_ms + self.rng.choice((0, 0, 2_000))
        waiting = [entry for entry in self.shard.entries.values() if entry.timer.execute_at_ms <= after_ms]
        if waiting:
            self.shard.spill(self.rng.choice(waiting))

    def begin(self) -> None:
        due = [entry for entry in self.harness.host.armed if entry.timer.execute_at_ms <= self.now_ms]
        if due:
            entry = self.rng.choice(due)
            self.harness.queue(entry)
            if self.rng.random() < 0.7:
                self.shard.begin(entry, self.now_ms, again=False)
            else:
                self.shard.not_sent(entry, begun=False)

    def settle(self) -> None:
        sending = [entry for entry in self.shard.entries.values() if entry.started_at_ms]
        if sending:
            entry = self.rng.choice(sending)
            if entry.timer.key in self.shard.sending:
                again = replace(entry.timer, execute_at_ms=self.now_ms + self.rng.randint(1, 1_500), attempts=1)
                retried = Settlement(rearmed=again)
                self.shard.settle(entry, retried if self.rng.random() < 0.5 else delivered(entry))

    def expire(self) -> None:
        self.shard.expire(self.harness.host.now_ms - self.rng.randint(0, 3_000))

    def shrink(self) -> None:
        self.shard.shrink(self.now_ms + self.rng.randint(*self.rng.choice(((-100, 500), (-1_500, 1_500)))))

    def check(self) -> None:
        self.harness.check()
        shard, counters = self.shard, self.harness.host.counters
        writes = [*shard.pending.values(), *shard.committing.values()]
        assert counters.write_bytes_waiting == sum(write.weight for write in writes), "write_bytes_waiting drifts"
        assert sum(counters.bytes_of.values()) == counters.write_bytes_waiting
        assert sum(counters.writes_of.values()) == counters.writes_waiting
        window = shard.window
        for key, row in self.stored.items():
            in_doubt = key in shard.committing
            if key in shard.entries or in_doubt or row.position > window.horizon:
                continue
            backlog = window.backlog
            assert backlog is not None, f"{row.timer_id} is not in memory and will not be loaded"
            assert backlog.after < row.position <= backlog.until, f"{row.timer_id} is not in memory nor in the backlog"
        for key, entry in shard.entries.items():
            assert key in shard.committing or entry.timer == self.stored[key], "memory does not show what is stored"
        for row in self.stored.values():
            assert row.position > self.low_water, "the next owner would not load it"
        assert shard.low_water == self.low_water, "memory does not show the low-water mark that is stored"

    def end(self) -> None:
        """Load everything: then everything is in memory."""
        self.batch = self.batch or self.shard.next_batch(1_000, 10_000_000)
        while self.batch is not None:
            self.decide()
            self.batch = self.shard.next_batch(1_000, 10_000_000)
        self.end_load()
        while self.shard.window.backlog is not None or self.shard.horizon < end_of(self.now_ms + 10_000):
            backlog = self.shard.window.backlog is not None
            self.load = self.shard.begin_load(self.now_ms + 10_000, backlog=backlog)
            self.rows_when_read = list(self.stored.values())
            self.end_load()
            self.check()
        assert self.shard.entries.keys() == self.stored.keys()
