"""How much of SQLite's speed is left by SqliteStore? Bare batched inserts against commits, side by side.

    python -m benchmarks.store_commit [--rows 40000] [--dir DIRECTORY]

Prints JSON: rows per second by batch size, with the event loop idle and with it busy. "bare" is a loop of
BEGIN IMMEDIATE, insert, COMMIT in the main thread into the same schema with the same pragmas: once with
executemany, once with multi-row VALUES. "settle" deletes timers and adds their reached rows; "load" reads
pages of 1,000. Every figure is the median of three runs taken in turns, so that ratios can be trusted on a
noisy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from benchmarks.checks import check_disk
from duetime.domain.timer import BEFORE_ALL, Timer, shard_of
from duetime.store import Batch, Claim, Fence, PageRequest
from duetime.stores.rows import timer_values
from duetime.stores.sqlite import schema as sqlite_schema
from duetime.stores.sqlite import statements as sqlite_statements
from duetime.stores.sqlite.store import WRITER_PRAGMAS, SqliteStore
from duetime.testing import make_reached, make_timer

SHARDS = 16
BATCHES = (1, 10, 100, 1_000)
RUNS = 3

Act = Callable[..., Coroutine[Any, Any, float]]


def some_timers(count: int) -> list[Timer]:
    return [
        make_timer(
            f"order-{random.getrandbits(48):x}",
            1_800_000_000_000 + random.randrange(10**8),
            namespace="default",
            payload='{"order":17,"user":"abc"}',
        )
        for _ in range(count)
    ]


def bare(path: Path, timers: list[Timer], size: int, *, many: bool) -> float:
    """Rows per second of inserting, and nothing else: no thread, no fence, no key that is looked up."""
    sqlite_schema.migrate(str(path))
    db = sqlite_schema.connect(str(path), *WRITER_PRAGMAS)
    rows = [(shard_of(timer.timer_id, SHARDS), *timer_values(timer)) for timer in timers]
    started = time.perf_counter()
    for first in range(0, len(rows), size):
        db.execute("BEGIN IMMEDIATE")
        if many:
            db.executemany(sqlite_statements.INSERTS[2][1], rows[first : first + size])
        else:
            sqlite_statements.insert_rows(db, 2, rows[first : first + size])
        db.execute("COMMIT")
    elapsed = time.perf_counter() - started
    db.close()
    return len(rows) / elapsed


async def opened(path: Path) -> tuple[SqliteStore, list[Fence]]:
    store = SqliteStore(str(path))
    await store.migrate()
    await store.open()
    await store.ensure_shards(SHARDS)
    claims = [Claim(shard_id, 0, shard_id + 1, "bench", "-", 0) for shard_id in range(SHARDS)]
    return store, [row.fence for row in await store.claim(claims)]


def by_shard(fences: list[Fence], timers: list[Timer]) -> list[Batch]:
    puts: dict[int, list[Timer]] = {}
    for timer in timers:
        puts.setdefault(shard_of(timer.timer_id, SHARDS), []).append(timer)
    return [Batch(fences[shard_id], mine) for shard_id, mine in puts.items()]


def settled(batch: Batch) -> Batch:
    return Batch(batch.fence, (), [timer.key for timer in batch.puts], [make_reached(timer) for timer in batch.puts])


async def commits(path: Path, timers: list[Timer], size: int, *, settle: bool = False) -> float:
    store, fences = await opened(path)
    puts = [by_shard(fences, timers[first : first + size]) for first in range(0, len(timers), size)]
    work = puts
    if settle:
        for batches in puts:
            await store.commit(batches)
        due = sorted(timers, key=lambda timer: timer.position)  # as they would be fired
        puts = [by_shard(fences, due[first : first + size]) for first in range(0, len(due), size)]
        work = [[settled(batch) for batch in batches] for batches in puts]
    started = time.perf_counter()
    for batches in work:
        await store.commit(batches)
    elapsed = time.perf_counter() - started
    await store.close()
    return len(timers) / elapsed


async def loads(path: Path, timers: list[Timer], size: int) -> float:
    store, fences = await opened(path)
    for first in range(0, len(timers), 1_000):
        await store.commit(by_shard(fences, timers[first : first + 1_000]))
    count = 0
    started = time.perf_counter()
    for shard_id in range(SHARDS):
        after = BEFORE_ALL
        while True:
            [page] = await store.load([PageRequest(shard_id, after, 1 << 60, size)])
            count += len(page.timers)
            if page.next is None:
                break
            after = page.next
    elapsed = time.perf_counter() - started
    assert count == len(timers)
    await store.close()
    return count / elapsed


async def beside_a_busy_loop(work: Coroutine[Any, Any, float]) -> float:
    """The same while the event loop never rests: turns of about 100 µs, one after the other."""
    task = asyncio.ensure_future(work)
    while not task.done():
        sum(range(4_000))
        await asyncio.sleep(0)
    return task.result()


def measure(rows: int, directory: str) -> dict[str, Any]:
    def fresh(run: Callable[[Path], float]) -> float:
        with tempfile.TemporaryDirectory(dir=directory) as folder:
            return run(Path(folder) / "bench.db")

    result: dict[str, Any] = {"rows": rows, "switch_interval_s": sys.getswitchinterval(), "unit": "rows/s"}
    for size in BATCHES:
        timers = some_timers(max(200, min(rows, size * 1_000)))

        def on_store(act: Act, *, busy: bool = False, **kw: bool) -> Callable[[Path], float]:
            def run_once(path: Path) -> float:
                work = act(path, timers, size, **kw)  # noqa: B023 - called within the turn
                return asyncio.run(beside_a_busy_loop(work) if busy else work)

            return run_once

        candidates: dict[str, Callable[[Path], float]] = {
            "bare_executemany": lambda path: bare(path, timers, size, many=True),  # noqa: B023
            "bare_multi_row": lambda path: bare(path, timers, size, many=False),  # noqa: B023
            "commit": on_store(commits),
            "commit_busy": on_store(commits, busy=True),
            "settle": on_store(commits, settle=True),
            "settle_busy": on_store(commits, busy=True, settle=True),
        }
        if size == 1_000:
            candidates |= {"load": on_store(loads), "load_busy": on_store(loads, busy=True)}
        figures: dict[str, list[float]] = {name: [] for name in candidates}
        for _ in range(RUNS):
            for name, run in candidates.items():
                figures[name].append(fresh(run))
        medians = {name: round(statistics.median(values)) for name, values in figures.items()}
        best = max(medians["bare_executemany"], medians["bare_multi_row"])
        result[f"batch_{size}"] = medians | {"commit_over_bare": round(medians["commit"] / best, 2)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--switch-interval-ms", type=float, default=0.5, help="what `duetime serve` sets")
    options = parser.parse_args()
    check_disk(Path(options.dir))
    sys.setswitchinterval(options.switch_interval_ms / 1_000)
    print(json.dumps(measure(options.rows, options.dir), indent=2))


if __name__ == "__main__":
    main()
