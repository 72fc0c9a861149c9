"""The same work on every store, in one run: commits by batch size, settling, loading, claiming, a heartbeat.

    python -m benchmarks.stores [--stores sqlite,postgres18,…] [--seconds 3] [--out FILE.json]

Each store is the adapter that `duetime serve` would use, on a real server with its data on this machine's disk and the
durability its promise needs, started for the run and stopped after it. One after the other, so that none takes time
from another. A commit goes to as many shards as the engine would send it to, with as many commits in flight as the
adapter asks for (`parallel_commits`), and is split where the adapter takes no larger one (`batch_max`). Prints JSON;
`--out` writes it and the plot. Absolute figures are this machine's; ratios between stores are what to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scripts.servers import ServerError, running

from benchmarks.checks import check_disk
from benchmarks.core import machine, say
from benchmarks.drawing import dot, line, picture, text
from duetime.domain.timer import BEFORE_ALL, Timer, shard_of
from duetime.store import Batch, Claim, Committed, Fence, Member, Page, PageRequest, Store, open_store
from duetime.testing import make_reached, make_timer

STORES = ("sqlite", "postgres18", "mariadb", "mysql", "tidb", "mongodb", "cassandra", "ministack")
SHARDS = 16
SIZES = (1, 10, 100, 1_000)
PAGE = 1_000
_numbers = itertools.count()


@contextmanager
def place_for(name: str) -> Iterator[str]:
    """The URL of an empty store."""
    if name == "sqlite":
        with tempfile.TemporaryDirectory() as folder:
            check_disk(Path(folder))
            yield f"sqlite:///{folder}/bench.db"
    else:
        with running(name) as server:
            check_disk(server.folder)
            server.make_database("bench")
            yield server.url("bench")


def some_timers(count: int) -> list[Timer]:
    return [
        make_timer(
            f"order-{next(_numbers):x}-{random.getrandbits(32):x}",
            1_800_000_000_000 + random.randrange(10**8),
            namespace="default",
            payload='{"order":17,"user":"abc"}',
        )
        for _ in range(count)
    ]


class Bench:
    def __init__(self, store: Store, fences: list[Fence], seconds: float) -> None:
        self.store = store
        self.fences = fences
        self.seconds = seconds
        self.stored: list[Timer] = []

    def lane_of(self, timer: Timer) -> int:
        return shard_of(timer.timer_id, SHARDS) % self.store.capabilities.parallel_commits

    async def commits(self, size: int) -> dict[str, float]:
        """Rows per second when so many are waiting at a time, and how long one commit takes."""
        parallel_commits = min(self.store.capabilities.parallel_commits, size)
        share = min(size // parallel_commits, self.store.capabilities.batch_max)
        waiting: list[list[Timer]] = [[] for _ in range(parallel_commits)]
        for timer in some_timers(int(min(60_000, 2_000 * size) * self.seconds)):
            waiting[self.lane_of(timer) % parallel_commits].append(timer)
        took: list[float] = []
        written = 0

        async def commit_loop(mine: list[Timer]) -> None:
            nonlocal written
            for first in range(0, len(mine), share):
                batch = mine[first : first + share]
                before = time.perf_counter()
                if before > ends_at:
                    return
                await self.commit(self.puts(batch))
                took.append(time.perf_counter() - before)
                written += len(batch)
                self.stored += batch

        started_at = time.perf_counter()
        ends_at = started_at + self.seconds
        await asyncio.gather(*map(commit_loop, waiting))
        return {
            "rows_per_s": written / (time.perf_counter() - started_at),
            "ms_per_commit": statistics.median(took) * 1_000,
        }

    def puts(self, timers: list[Timer]) -> list[Batch]:
        by_shard: dict[int, list[Timer]] = {}
        for timer in timers:
            by_shard.setdefault(shard_of(timer.timer_id, SHARDS), []).append(timer)
        return [Batch(self.fences[shard_id], mine) for shard_id, mine in by_shard.items()]

    async def commit(self, batches: list[Batch]) -> None:
        for result in await self.store.commit(batches):
            assert isinstance(result, Committed), result

    async def settle(self, most: int) -> float:
        """Fired timers per second: each is deleted and its reached row added, in batches as large as it takes."""
        due = sorted(self.stored[:most], key=lambda timer: timer.position)
        parallel_commits = self.store.capabilities.parallel_commits
        share = max(1, min(500, self.store.capabilities.batch_max // 2))
        done = 0

        async def commit_loop(number: int) -> None:
            nonlocal done
            mine = [timer for timer in due if self.lane_of(timer) == number]
            for first in range(0, len(mine), share):
                if time.perf_counter() > ends_at:
                    return
                batches = self.puts(mine[first : first + share])
                await self.commit(
                    [Batch(b.fence, (), [t.key for t in b.puts], [make_reached(t) for t in b.puts]) for b in batches]
                )
                done += len(mine[first : first + share])

        started_at = time.perf_counter()
        ends_at = started_at + self.seconds
        await asyncio.gather(*(commit_loop(number) for number in range(parallel_commits)))
        return done / (time.perf_counter() - started_at)

    async def load(self) -> float:
        """Timers per second, in pages, as after a claim."""
        count = 0
        started_at = time.perf_counter()
        for shard_id in range(SHARDS):
            after = BEFORE_ALL
            while time.perf_counter() - started_at < self.seconds:
                [page] = await self.store.load([PageRequest(shard_id, after, 1 << 60, PAGE)])
                assert isinstance(page, Page), page
                count += len(page.timers)
                if page.next is None:
                    break
                after = page.next
        return count / (time.perf_counter() - started_at)

    async def claim_ms(self) -> float:
        """All shards at once, as after the death of their owner."""
        rows = await self.store.shards()
        before = time.perf_counter()
        claimed = await self.store.claim([Claim(r.shard_id, r.version, 7, "heir", "-", 0) for r in rows])
        took = (time.perf_counter() - before) * 1_000
        assert all(row.nonce == 7 for row in claimed)
        return took

    async def heartbeat_ms(self) -> float:
        await self.store.join(Member("bench", "-", 0, True, 0))
        took = []
        for counter in range(1, 31):
            before = time.perf_counter()
            await self.store.heartbeat("bench", counter)
            took.append((time.perf_counter() - before) * 1_000)
        return statistics.median(took)


async def measure(url: str, seconds: float) -> dict[str, Any]:
    store = open_store(url)
    await store.migrate()
    await store.open()
    try:
        await store.ensure_shards(SHARDS)
        claims = [Claim(shard_id, 0, shard_id + 1, "bench", "-", 0) for shard_id in range(SHARDS)]
        bench = Bench(store, [row.fence for row in await store.claim(claims)], seconds)
        await bench.commits(10)  # connections, plans, caches
        commits = {str(size): await bench.commits(size) for size in SIZES}
        return {
            "parallel_commits": store.capabilities.parallel_commits,
            "batch_max": store.capabilities.batch_max,
            "commit": commits,
            "load_rows_per_s": await bench.load(),
            "settle_timers_per_s": await bench.settle(most=20_000),
            "claim_16_shards_ms": await bench.claim_ms(),
            "heartbeat_ms": await bench.heartbeat_ms(),
        }
    finally:
        await store.close()


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return round(value) if value >= 100 else round(value, 2)
    return value


# --- as a table ----------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """For docs/operating/databases.md, which a test compares with the figures on record."""
    lines = [
        "| | timers/s by commits of 1 | of 10 | of 100 | of 1,000 | loaded/s | settled/s | 16 claims | heartbeat |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, figures in result["stores"].items():
        rates = " | ".join(f"{figures['commit'][str(size)]['rows_per_s']:,.0f}" for size in SIZES)
        rest = f"{figures['load_rows_per_s']:,.0f} | {figures['settle_timers_per_s']:,.0f}"
        lines.append(
            f"| {name} | {rates} | {rest} | {figures['claim_16_shards_ms']:.1f} ms | {figures['heartbeat_ms']:.1f} ms |"
        )
    return "\n".join(lines)


def said_of(result: dict[str, Any], *names: str) -> str:
    """For the page of a database: its figures, and how they stand to PostgreSQL's in the same run."""
    beside = result["stores"]["postgres18"]["commit"]["100"]["rows_per_s"]
    said = []
    for name in names:
        figures = result["stores"][name]
        one, many, most = (figures["commit"][size]["rows_per_s"] for size in ("1", "100", "1000"))
        said.append(
            f"{name}: commits of 1, 100 and 1,000 timers make {one:,.0f}, {many:,.0f} and {most:,.0f} timers/s"
            f" (of 100: {many / beside:.2f} times PostgreSQL 18), a commit of one takes"
            f" {figures['commit']['1']['ms_per_commit']:.1f} ms, {figures['settle_timers_per_s']:,.0f} timers/s settle,"
            f" {figures['load_rows_per_s']:,.0f}/s load."
        )
    return " ".join(said)


# --- the plot ------------------------------------------------------------------------------------

_WIDTH, _LEFT, _RIGHT, _TOP, _ROW = 860, 110, 30, 84, 34
_COLOURS = {"1": "#9ca3af", "10": "#60a5fa", "100": "#1d4ed8", "1000": "#c2410c"}


def plot(result: dict[str, Any]) -> str:
    """Rows per second by store, one dot for each batch size, on a logarithmic scale."""
    stores = result["stores"]
    bottom = _TOP + _ROW * len(stores)
    decades = range(1, 6)

    def x(rate: float) -> float:
        share = (math.log10(max(rate, 10)) - decades[0]) / (decades[-1] - decades[0])
        return round(_LEFT + share * (_WIDTH - _LEFT - _RIGHT), 1)

    parts = [
        text(_LEFT, 24, "Durable commits: timers per second, by how many wait at a time", 'font-size="16"'),
        text(_LEFT, 44, f"{result['machine']}; every server on the same machine, one at a time"),
    ]
    for place, (size, colour) in enumerate(_COLOURS.items()):
        parts.append(dot(_LEFT + 6 + place * 80, 62, colour))
        parts.append(text(_LEFT + 16 + place * 80, 66, f"{int(size):,}"))
    for power in decades:
        parts.append(line(x(10**power), _TOP - 10, x(10**power), bottom, 'stroke="#e5e7eb"'))
        parts.append(text(x(10**power), bottom + 18, f"{10**power:,}", 'text-anchor="middle"'))
    for row, (name, figures) in enumerate(stores.items()):
        at_y = _TOP + _ROW * row + _ROW / 2
        rates = [figures["commit"][size]["rows_per_s"] for size in _COLOURS]
        parts.append(text(_LEFT - 10, at_y + 4, name, 'text-anchor="end"'))
        parts.append(line(x(min(rates)), at_y, x(max(rates)), at_y, 'stroke="#d1d5db" stroke-width="2"'))
        parts += [dot(x(rate), at_y, colour, 5) for rate, colour in zip(rates, _COLOURS.values(), strict=True)]
    return picture(_WIDTH, bottom + 34, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stores", default=",".join(STORES), help=f"default: {','.join(STORES)}")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each measurement")
    parser.add_argument("--out", type=Path, help="write the JSON here too, and the plot beside it")
    options = parser.parse_args()
    result: dict[str, Any] = {**machine(), "seconds_each": options.seconds, "stores": {}}
    sys.setswitchinterval(0.0005)  # what `duetime serve` sets
    for name in options.stores.split(","):
        say(name)
        try:
            with place_for(name) as url:
                result["stores"][name] = rounded(asyncio.run(measure(url, options.seconds)))
        except ServerError as error:
            say(f"{name} is left out: {error}")
    print(json.dumps(result, indent=2))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        options.out.with_suffix(".svg").write_text(plot(result))


if __name__ == "__main__":
    main()
