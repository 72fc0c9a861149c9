"""How long the timers of an instance wait that is killed: three instances on PostgreSQL, kill -9 of one.

    python -m benchmarks.failover [--runs 5] [--out benchmarks/results/failover.json]

A timer is due every 10 ms, in turn on every shard. After ten seconds, at a moment between two heartbeats that is left
to chance, one instance is killed. What is measured is how late each timer came, by the receiver's clock, and when
each of the dead one's shards fired for the first time elsewhere. Beside the JSON a plot is written, as SVG.
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
from pathlib import Path
from typing import Any

from scripts.servers import Postgres, free_port, running

from benchmarks.checks import check_disk, until_answers
from benchmarks.drawing import dot, line, picture, text
from duetime.domain.instants import format_instant
from duetime.domain.timer import shard_of
from duetime.http.client import HttpClient
from duetime.http.messages import Request, Response
from duetime.http.server import serve_http

INSTANCES, SHARDS = 3, 16
EVERY_MS, SECONDS, KILL_AFTER_SECONDS = 10, 30, 10
BUCKET_MS = 250
TARGET_SECONDS = 5.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Timers:
    """Which timers there are, when they are due, and when each came for the first time."""

    def __init__(self, first_ms: int) -> None:
        self.due: dict[str, int] = {}
        self.came: dict[str, int] = {}
        self.repeated = 0
        number = 0
        for n in range(SECONDS * 1_000 // EVERY_MS):
            while shard_of(f"t{number}", SHARDS) != n % SHARDS:
                number += 1
            self.due[f"t{number}"] = first_ms + n * EVERY_MS
            number += 1

    async def receive(self, request: Request) -> Response:
        name = json.loads(request.body)["timerId"]
        self.repeated += name in self.came
        self.came.setdefault(name, wall_ms())
        return Response(200, body=b'{"ok": true}')


async def create_all(http: HttpClient, port: int, timers: Timers, target: str) -> None:
    listed = list(timers.due.items())
    for start in range(0, len(listed), 500):
        some = [
            {"timerId": name, "executeAt": format_instant(due_ms), "callbackUrl": target}
            for name, due_ms in listed[start : start + 500]
        ]
        body = json.dumps({"timers": some}).encode()
        url = f"http://127.0.0.1:{port}/api/v1/timers/createMany"
        answer = await http.request("POST", url, {"content-type": "application/json"}, body, timeout_ms=30_000)
        assert answer.status == 200, answer.body
        assert all("error" not in result for result in json.loads(answer.body)["results"]), answer.body[:500]


def serve(folder: Path, url: str, port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "duetime", "serve", "--store", url, "--listen", f"127.0.0.1:{port}"]
    with (folder / f"{port}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


async def owners(database: Postgres, name: str) -> dict[int, str]:
    sql = "SELECT shard_id, shard_owner_address FROM shards"
    rows = (await asyncio.to_thread(database.query, sql, name)).splitlines()
    return {int(shard): address for shard, _, address in (row.partition("|") for row in rows)}


async def until_even(database: Postgres, name: str) -> None:
    for _ in range(300):
        shares = [*(await owners(database, name)).values()]
        counts = [shares.count(address) for address in set(shares)]
        if "" not in shares and len(counts) == INSTANCES and max(counts) - min(counts) <= 1:
            return
        await asyncio.sleep(0.1)
    raise RuntimeError("the shards are not spread evenly")


async def measure(database: Postgres, number: int, folder: Path) -> dict[str, Any]:
    name = f"failover_{number}"
    await asyncio.to_thread(database.query, f"CREATE DATABASE {name}")
    ports = [free_port() for _ in range(INSTANCES)]
    http = HttpClient(body_bytes_max=1 << 24)
    processes = []
    try:
        for port in ports:
            processes.append(serve(folder, database.url(name), port))
            await asyncio.to_thread(until_answers, f"http://127.0.0.1:{port}/readyz", processes[-1])
        await until_even(database, name)
        timers = Timers(wall_ms() + 4_000)
        receiver = await serve_http(
            timers.receive, "127.0.0.1", 0, body_bytes_max=1 << 20, connections_max=1_000, idle_timeout_ms=120_000
        )
        await create_all(http, ports[0], timers, f"http://127.0.0.1:{receiver.port}/hook")
        kill_at_ms = min(timers.due.values()) + KILL_AFTER_SECONDS * 1_000 + random.randrange(500)
        await asyncio.sleep((kill_at_ms - wall_ms()) / 1_000 - 0.5)
        victim = random.randrange(INSTANCES)
        was = await owners(database, name)
        await asyncio.sleep(max(0.0, (kill_at_ms - wall_ms()) / 1_000))
        processes[victim].kill()
        killed_at_ms = wall_ms()
        deadline = time.monotonic() + SECONDS + 60
        while len(timers.came) < len(timers.due) and time.monotonic() < deadline:
            await asyncio.sleep(0.1)
        await receiver.close()
    finally:
        await http.close()
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)
    dead = {shard for shard, address in was.items() if address == f"127.0.0.1:{ports[victim]}"}
    return judged(timers, killed_at_ms, dead)


def judged(timers: Timers, killed_at_ms: int, dead: set[int]) -> dict[str, Any]:
    """The timers of the dead instance apart from those of the others. Times are relative to the kill."""
    first_elsewhere: dict[int, int] = {}
    late: dict[str, list[tuple[int, int]]] = {"dead": [], "others": []}
    for name, due_ms in timers.due.items():
        came_ms = timers.came.get(name)
        assert came_ms is not None, f"{name} was lost"
        assert came_ms >= due_ms, f"{name} came early"
        shard = shard_of(name, SHARDS)
        late["dead" if shard in dead else "others"].append((due_ms - killed_at_ms, came_ms - due_ms))
        if shard in dead and due_ms > killed_at_ms:
            first_elsewhere[shard] = min(first_elsewhere.get(shard, came_ms), came_ms)
    took = [came_ms - killed_at_ms for came_ms in first_elsewhere.values()]
    others = sorted(lateness for due, lateness in late["others"] if 0 <= due < 6_000)
    before = sorted(lateness for group in late.values() for due, lateness in group if due < -500)
    return {
        "shards_of_the_dead": len(dead),
        "first_shard_fires_elsewhere_after_seconds": min(took) / 1_000,
        "last_shard_fires_elsewhere_after_seconds": max(took) / 1_000,
        "latest_timer_late_by_seconds": max(lateness for _, lateness in late["dead"]) / 1_000,
        "others_p99_late_by_ms_meanwhile": others[len(others) * 99 // 100],
        "p99_late_by_ms_before": before[len(before) * 99 // 100],
        "timers": len(timers.due),
        "repeated": timers.repeated,
        "worst_late_by_ms": {group: worst(points) for group, points in late.items()},
    }


def worst(points: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each quarter of a second in which timers were due, since the kill: how late the latest of them was."""
    buckets: dict[int, int] = {}
    for due_ms, lateness_ms in points:
        bucket = due_ms // BUCKET_MS * BUCKET_MS
        buckets[bucket] = max(buckets.get(bucket, 0), lateness_ms)
    return sorted(buckets.items())


# --- the plot ------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _RIGHT, _BOTTOM = 860, 420, 64, 56, 24, 52
_COLOURS = {"dead": "#c2410c", "others": "#1d4ed8"}


def plot(result: dict[str, Any]) -> str:
    """Lateness over the time a timer was due, all runs together."""
    from_ms, until_ms, top_ms = -5_000, 10_000, 6_000

    def x(ms: float) -> float:
        return round(_LEFT + (ms - from_ms) / (until_ms - from_ms) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(ms: float) -> float:
        return round(_HEIGHT - _BOTTOM - min(ms, top_ms) / top_ms * (_HEIGHT - _TOP - _BOTTOM), 1)

    thin, dashed = 'stroke="#e5e7eb"', 'stroke="#6b7280" stroke-dasharray="5 4"'
    parts = [
        text(_LEFT, 22, f"kill -9 of one of {INSTANCES} instances: how late timers come", 'font-size="16"'),
        text(_LEFT, 42, f"{len(result['runs'])} runs, {result['machine']}, PostgreSQL {result['postgresql']}"),
    ]
    for seconds in range(top_ms // 1_000 + 1):
        parts.append(line(_LEFT, y(seconds * 1_000), _WIDTH - _RIGHT, y(seconds * 1_000), thin))
        parts.append(text(_LEFT - 8, y(seconds * 1_000) + 4, f"{seconds} s", 'text-anchor="end"'))
    for seconds in range(from_ms // 1_000, until_ms // 1_000 + 1):
        parts.append(text(x(seconds * 1_000), _HEIGHT - _BOTTOM + 18, f"{seconds}", 'text-anchor="middle"'))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(text(middle, _HEIGHT - 12, "seconds after the kill at which a timer was due", 'text-anchor="middle"'))
    parts.append(line(x(0), _TOP, x(0), _HEIGHT - _BOTTOM, dashed))
    parts.append(line(_LEFT, y(TARGET_SECONDS * 1_000), _WIDTH - _RIGHT, y(TARGET_SECONDS * 1_000), dashed))
    parts.append(text(_LEFT + 6, y(TARGET_SECONDS * 1_000) - 6, f"the aim: {TARGET_SECONDS:g} s"))
    for group in ("others", "dead"):
        for run in result["runs"]:
            for due_ms, late_ms in run["worst_late_by_ms"][group]:
                if from_ms <= due_ms <= until_ms:
                    parts.append(dot(x(due_ms + BUCKET_MS / 2), y(late_ms), _COLOURS[group], 2.6, 0.65))
    legend = {"dead": "timers of the instance that was killed", "others": "timers of the other two"}
    for row, (group, words) in enumerate(legend.items()):
        at_y = y(3_800) + row * 20
        parts.append(dot(x(4_600), at_y - 4, _COLOURS[group]))
        parts.append(text(x(4_600) + 12, at_y, words))
    return picture(_WIDTH, _HEIGHT, parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON here too, and the plot beside it")
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with running("postgres18") as database, tempfile.TemporaryDirectory() as folder:
        assert isinstance(database, Postgres)
        check_disk(database.folder)
        for number in range(options.runs):
            run = asyncio.run(measure(database, number, Path(folder)))
            runs.append(run)
            took = run["last_shard_fires_elsewhere_after_seconds"]
            say(f"run {number + 1}: all {run['shards_of_the_dead']} shards of the dead fire elsewhere after {took} s")
        version = database.query("SHOW server_version").split()[0]
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "postgresql": version,
        "instances": INSTANCES,
        "worst_failover_seconds": max(run["last_shard_fires_elsewhere_after_seconds"] for run in runs),
        "aim_seconds": TARGET_SECONDS,
        "runs": runs,
    }
    text = json.dumps(result, separators=(",", ":") if options.runs > 1 else None)
    print(json.dumps({key: value for key, value in result.items() if key != "runs"}, indent=2))
    if options.out:
        options.out.write_text(text + "\n")
        options.out.with_suffix(".svg").write_text(plot(result))


if __name__ == "__main__":
    main()
