"""The core's figures in one run: creates, fires, lateness, memory, idle cost and start, with their ceilings.

    python -m benchmarks.core [--quick] [--out FILE.json]

Everything runs on this machine: a real `duetime serve` on SQLite, a load generator and a receiver, each a
process of its own. Figures are meant as ratios within one run; machines are small and noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw

from benchmarks.checks import check_disk, get, until_answers
from duetime.domain.instants import format_instant
from duetime.domain.timer import Timer, shard_of, uuid_of
from duetime.store import Batch, Claim
from duetime.stores.sqlite.store import WRITER_PRAGMAS, SqliteStore

PORT, RECEIVER_PORT = 18_463, 18_900
TARGET = f"http://127.0.0.1:{RECEIVER_PORT}/hook"
DAY_MS = 86_400_000


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def process(*command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen(
        [sys.executable, "-m", *command], env=os.environ | environment, stderr=subprocess.DEVNULL
    )
    try:
        yield running
    finally:
        running.terminate()
        running.wait(60)


@contextmanager
def serving(folder: Path, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        "DUETIME_SERVER_LISTEN": f"127.0.0.1:{PORT}",
        "DUETIME_STORE_URL": f"sqlite:///{folder}/timers.db",
        **settings,
    }
    with process("duetime", "serve", **environment) as server:
        until_answers(f"http://127.0.0.1:{PORT}/readyz", server)
        yield server


@contextmanager
def receiving() -> Iterator[None]:
    with process("benchmarks.load", "receive", "--port", str(RECEIVER_PORT)) as receiver:
        until_answers(f"http://127.0.0.1:{RECEIVER_PORT}/reset", receiver)
        yield


def report(*, reset: bool = True) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(get(f"http://127.0.0.1:{RECEIVER_PORT}/{'reset' if reset else 'report'}"))
    return answer


def load(**options: object) -> dict[str, Any]:
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.load", "create", "--port", str(PORT), "--to", TARGET, *arguments],
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert not answer["errors"], answer["first_error"]
    return answer


def machine() -> dict[str, str]:
    return {
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    return 0.0


# --- the ceiling: a bare batched insert into the same table --------------------------------------


def timer(number: int, due_ms: int) -> Timer:
    timer_id = f"order-{number}"
    high, low = uuid_of("default", timer_id)
    return Timer(
        namespace="default",
        timer_id=timer_id,
        uuid_high=high,
        uuid_low=low,
        generation=number,
        execute_at_ms=due_ms,
        scheduled_at_ms=due_ms,
        created_at_ms=due_ms - 1_000,
        callback_url=TARGET,
        payload=f'{{"order":{number},"kind":"expire"}}',
    )


def bare_insert(folder: Path, batch: int, seconds: float) -> int:
    """Rows per second of one program that does nothing but executemany and COMMIT, same schema and settings."""
    path = folder / "bare.db"
    for leftover in folder.glob("bare.db*"):
        leftover.unlink()
    store = SqliteStore(str(path))

    async def make() -> None:
        await store.migrate()
        await store.close()

    asyncio.run(make())
    db = apsw.Connection(str(path))
    for pragma in ("journal_mode=WAL", *WRITER_PRAGMAS):
        db.execute(f"PRAGMA {pragma}")
    statement = (
        "INSERT INTO timers (shard_id, row_type, row_format, timer_execute_at, timer_uuid_high, timer_uuid_low,"
        " timer_namespace, timer_id, timer_generation, timer_scheduled_at, timer_created_at, timer_attempts,"
        " timer_callback_url, timer_payload) VALUES (?,2,1,?,?,?,?,?,?,?,?,0,?,?)"
    )
    start_ms = wall_ms() + 30 * DAY_MS
    number, spent = 0, 0.0
    while spent < seconds:
        rows = []
        for _ in range(batch):
            number += 1
            t = timer(number, start_ms + number)
            rows.append(
                (
                    shard_of(t.timer_id, 16),
                    t.execute_at_ms,
                    t.uuid_high,
                    t.uuid_low,
                    t.namespace,
                    t.timer_id,
                    t.generation,
                    t.scheduled_at_ms,
                    t.created_at_ms,
                    t.callback_url,
                    t.payload,
                )
            )
        started = time.perf_counter()
        with db:
            db.executemany(statement, rows)
        spent += time.perf_counter() - started
    db.close()
    return round(number / spent)


def fill(folder: Path, count: int, first_due_ms: int, spread_ms: int) -> None:
    """Put pending timers into a store that is not being served, through the store port."""

    async def run() -> None:
        store = SqliteStore(str(folder / "timers.db"))
        await store.migrate()
        await store.open()
        await store.ensure_shards(16)
        rows = await store.shards()
        claimed = await store.claim([Claim(row.shard_id, row.version, 1, "fill", "", 0) for row in rows])
        fences = {row.shard_id: row.fence for row in claimed}
        rng = random.Random(1)
        for start in range(0, count, 8_000):
            puts: dict[int, list[Timer]] = {}
            for number in range(start, min(start + 8_000, count)):
                t = timer(number, first_due_ms + rng.randrange(spread_ms))
                puts.setdefault(shard_of(t.timer_id, 16), []).append(t)
            for shard_id, timers in puts.items():
                await store.commit([Batch(fences[shard_id], timers)])
            if start % 200_000 == 0:
                say(f"  filled {start:,} of {count:,}")
        await store.release(list(fences.values()))
        await store.close()

    asyncio.run(run())


# --- the measurements ----------------------------------------------------------------------------


def creates(folder: Path, seconds: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with serving(folder) as server:
        load(seconds=2, connections=64, prefix="warm")
        for connections in (64, 256):
            cpu = cpu_seconds(server.pid)
            run = load(seconds=seconds, connections=connections, prefix=f"c{connections}")
            run["cpu_us_each"] = round((cpu_seconds(server.pid) - cpu) / run["creates"] * 1e6, 1)
            result[f"connections_{connections}"] = run
            say(f"  creates, {connections} connections: {run['per_second']:,}/s, p99 {run['p99_ms']} ms")
        metrics = get(f"http://127.0.0.1:{PORT}/metrics").decode()
        values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        operations = float(values["duetime_commit_operations_sum"])
        result["mean_batch"] = round(operations / float(values["duetime_commit_operations_count"]))
    return result


def fires(folder: Path, count: int) -> dict[str, Any]:
    """All due at one instant: how fast are they called and settled?"""
    with receiving(), serving(folder) as server:
        due_ms = wall_ms() + 1_000 * (5 + count // 8_000)
        load(count=count, seconds=600, connections=256, prefix="f", at=format_instant(due_ms))
        assert wall_ms() < due_ms, "creating took too long"
        time.sleep(max(0.0, (due_ms - wall_ms()) / 1_000))
        cpu = cpu_seconds(server.pid)
        started = time.perf_counter()
        delivered = 0
        while delivered < count:
            time.sleep(0.05)
            metrics = get(f"http://127.0.0.1:{PORT}/metrics").decode()
            in_memory = next(x for x in metrics.splitlines() if x.startswith("duetime_timers_in_memory "))
            delivered = report(reset=False)["count"] if in_memory.endswith(" 0") else 0
            assert time.perf_counter() - started < 120, "not all have fired"
        settled_seconds = time.perf_counter() - started
        result = report()
        result["settled_per_second"] = round(count / settled_seconds)
        result["cpu_us_each"] = round((cpu_seconds(server.pid) - cpu) / count * 1e6, 1)
        assert result["earliest_ms"] >= 0, "fired early"
        say(f"  fires: {result['per_second']:,}/s, with settle {result['settled_per_second']:,}/s")
        return result


def lateness(folder: Path, per_second: int, seconds: int, pending: int) -> dict[str, Any]:
    """Timers due evenly at a rate, with many others pending: how late are they?"""
    if pending:
        say(f"  {pending:,} pending")
        fill(folder, pending, wall_ms() + DAY_MS, 30 * DAY_MS)
    with receiving(), serving(folder) as server:
        first_ms = wall_ms() + 15_000
        _create_evenly(first_ms, per_second, seconds)
        time.sleep(max(0.0, (first_ms - wall_ms()) / 1_000 + seconds + 2))
        result = report()
        result["resident_mb"] = resident_mb(server.pid)
        assert result["count"] == per_second * seconds, result
        assert result["earliest_ms"] >= 0, "fired early"
        say(
            f"  lateness at {per_second}/s, {pending:,} pending: p50 {result['p50_ms']} ms,"
            f" p99 {result['p99_ms']} ms, {result['resident_mb']} MB"
        )
        return result


def _create_evenly(first_ms: int, per_second: int, seconds: int) -> None:
    for start in range(0, per_second * seconds, 1_000):
        timers = [
            {
                "timerId": f"even-{n}",
                "executeAt": format_instant(first_ms + n * 1_000 // per_second),
                "callbackUrl": TARGET,
                "payload": {"command": n},
            }
            for n in range(start, min(start + 1_000, per_second * seconds))
        ]
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/api/v1/timers/createMany",
            json.dumps({"timers": timers}).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            assert all("error" not in item for item in json.load(answer)["results"])


def idle(folder: Path, seconds: float) -> dict[str, Any]:
    with serving(folder) as server:
        time.sleep(2)
        cpu = cpu_seconds(server.pid)
        time.sleep(seconds)
        percent = round((cpu_seconds(server.pid) - cpu) / seconds * 100, 2)
        say(f"  idle: {percent}% of a core")
        return {"percent_of_a_core": percent, "resident_mb": resident_mb(server.pid)}


def cold_start(folder: Path) -> float:
    started = time.perf_counter()
    with serving(folder):
        load(count=1, seconds=10, connections=1, prefix="cold")
        return round(time.perf_counter() - started, 2)


def create_many(folder: Path, seconds: float) -> int:
    """Timers per second by createMany of 1,000, from one client."""
    body_of = [
        json.dumps(
            {
                "timers": [
                    {
                        "timerId": f"m{batch}-{n}",
                        "delay": "30d",
                        "callbackUrl": TARGET,
                        "payload": {"command": n, "kind": "expire"},
                    }
                    for n in range(1_000)
                ]
            }
        ).encode()
        for batch in range(400)
    ]
    with serving(folder):
        started, sent = time.perf_counter(), 0
        for body in body_of:
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/api/v1/timers/createMany", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request) as answer:
                answer.read()
            sent += 1_000
            if time.perf_counter() - started > seconds:
                break
        return round(sent / (time.perf_counter() - started))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller numbers: a look, not a figure")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--only", default="", help="creates,fires,lateness,idle,start")
    options = parser.parse_args()
    quick = options.quick
    wanted = set(options.only.split(",")) if options.only else {"creates", "fires", "lateness", "idle", "start"}
    result: dict[str, Any] = {
        **machine(),
        "sqlite": apsw.sqlite_lib_version(),
    }
    with tempfile.TemporaryDirectory() as name:
        check_disk(Path(name))

        def folder(part: str) -> Path:
            path = Path(name) / part
            path.mkdir()
            return path

        if "start" in wanted:
            result["cold_start_seconds"] = cold_start(folder("start"))
            say(f"  cold start to the first create: {result['cold_start_seconds']} s")
        if "creates" in wanted:
            say("creates")
            seconds = 4 if quick else 10
            result["creates"] = creates(folder("creates"), seconds)
            result["create_many_per_second"] = create_many(folder("many"), seconds)
            mean = max(1, result["creates"]["mean_batch"])
            bare = folder("bare")
            result["bare_insert"] = {str(b): bare_insert(bare, b, seconds / 2) for b in (mean, 1_000)}
            say(f"  bare inserts by batch: {result['bare_insert']}, createMany {result['create_many_per_second']}")
            best = max(run["per_second"] for key, run in result["creates"].items() if key.startswith("conn"))
            result["creates_of_bare"] = round(best / result["bare_insert"][str(mean)], 2)
            result["create_many_of_bare"] = round(result["create_many_per_second"] / result["bare_insert"]["1000"], 2)
            say(f"  of the bare insert at the same batch size ({mean}): {result['creates_of_bare']:.0%}")
        if "fires" in wanted:
            say("fires")
            result["fires"] = fires(folder("fires"), 20_000 if quick else 60_000)
        if "lateness" in wanted:
            say("lateness")
            seconds = 5 if quick else 20
            few = lateness(folder("few"), 1_000, seconds, 0)
            many = lateness(folder("million"), 1_000, seconds, 100_000 if quick else 1_000_000)
            result["lateness"] = {"few_pending": few, "many_pending": many}
            result["lateness_p99_ratio"] = round(many["p99_ms"] / few["p99_ms"], 2)
            if "idle" in wanted:
                result["idle_many_pending"] = idle(Path(name) / "million", 10)
        elif "idle" in wanted:
            result["idle"] = idle(folder("idle"), 10)
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
