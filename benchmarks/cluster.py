"""A cluster on PostgreSQL, in one run: creates against pgbench, one process against two, many shards at rest.

    python -m benchmarks.cluster [--quick] [--postgres 15|18] [--out FILE.json]

Everything runs on this machine: a real PostgreSQL with fsync on, instances of `duetime serve`, load generators
and a receiver, each a process of its own. On a machine of few cores two instances would only take processor
time from the database and the load. So for the comparison of one and two, every instance gets the same fixed
share of a core (a cgroup with a quota), small enough that the rest of the machine is not the limit; what is
compared is then what an instance can do with its share.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from scripts.servers import Postgres, running

from benchmarks.checks import check_disk, until_answers
from benchmarks.core import TARGET, cpu_seconds, machine, process, receiving, report, say, wall_ms
from duetime.domain.instants import format_instant

FIRST_PORT = 18_463
SHARE = 0.25  # of a core, for each instance
_databases = 0


# --- the parts -----------------------------------------------------------------------------------


def fresh_database(server: Postgres) -> str:
    global _databases
    _databases += 1
    server.query(f"CREATE DATABASE bench{_databases}")
    return server.url(f"bench{_databases}")


@contextmanager
def instances(url: str, count: int, **settings: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    with ExitStack() as stack:
        servers = []
        for port in ports(count):
            environment = {"DUETIME_SERVER_LISTEN": f"127.0.0.1:{port}", "DUETIME_STORE_URL": url, **settings}
            servers.append(stack.enter_context(process("duetime", "serve", **environment)))
        for port, server in zip(ports(count), servers, strict=True):
            until_answers(f"http://127.0.0.1:{port}/readyz", server)
        until_settled(count)
        yield servers


def ports(count: int) -> list[int]:
    return list(range(FIRST_PORT, FIRST_PORT + count))


def ask(path: str, body: dict[str, Any], port: int = FIRST_PORT) -> Any:
    url = f"http://127.0.0.1:{port}/api/v1/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def until_settled(count: int, within_seconds: float = 60) -> None:
    """Every shard has an owner, and each instance as many as any other."""
    deadline = time.monotonic() + within_seconds
    while True:
        found = ask("cluster/map", {})
        shares = [found["owners"].count(index) for index in range(len(found["instances"]))]
        if None not in found["owners"] and len(shares) == count and max(shares) - min(shares) <= 1:
            return
        assert time.monotonic() < deadline, shares
        time.sleep(0.05)


def load(number: int, **options: object) -> dict[str, Any]:
    """Creates from one generator for each instance: one alone would be the limit."""
    direct = ["--direct"] if options.pop("direct", False) else []
    prefix = options.pop("prefix")
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    all_ports = ",".join(str(port) for port in ports(number))
    command = [sys.executable, "-m", "benchmarks.load", "create", "--port", all_ports, "--to", TARGET, *direct]
    runs = [
        subprocess.Popen([*command, "--prefix", f"{prefix}-{generator}", *arguments], stdout=subprocess.PIPE)
        for generator in range(number)
    ]
    answers = [json.loads(run.communicate()[0]) for run in runs]
    for answer in answers:
        assert not answer["errors"], answer["first_error"]
    return {
        "creates": sum(answer["creates"] for answer in answers),
        "per_second": sum(answer["per_second"] for answer in answers),
        "p99_ms": max(answer["p99_ms"] for answer in answers),
    }


class Quota:
    """A share of a core for a process, by a cgroup of version 1 or 2."""

    def __init__(self, number: int, share: float) -> None:
        period_us = 10_000  # short, so that a process that has used up its share is not away for long
        quota_us = int(period_us * share)
        one = Path("/sys/fs/cgroup/cpu")
        self.folder = (one if one.is_dir() else Path("/sys/fs/cgroup")) / f"duetime-bench-{os.getpid()}-{number}"
        self.folder.mkdir()
        if one.is_dir():
            (self.folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {period_us}")

    def hold(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        self.folder.rmdir()


@contextmanager
def shares(servers: list[subprocess.Popen[bytes]], share: float) -> Iterator[None]:
    quotas = [Quota(number, share) for number in range(len(servers))]
    try:
        for quota, server in zip(quotas, servers, strict=True):
            quota.hold(server.pid)
        yield
    finally:
        for server in servers:  # an empty cgroup can be removed; the processes go back to the root's
            root = quotas[0].folder.parent
            (root / "cgroup.procs").write_text(str(server.pid))
        for quota in quotas:
            quota.remove()


# --- creates against pgbench ---------------------------------------------------------------------

_PGBENCH = """
\\set id random(1, 9000000000000000)
INSERT INTO timers (shard_id, row_type, row_format, timer_execute_at, timer_uuid_high, timer_uuid_low,
  timer_namespace, timer_id, timer_generation, timer_scheduled_at, timer_created_at, timer_attempts,
  timer_callback_url, timer_payload)
VALUES (:id::bigint % 16, 2, 1, now() + interval '30 days', :id::bigint, 17, 'pgbench', 'bench-' || :id::bigint, 1,
  now() + interval '30 days', now(), 0, 'http://127.0.0.1:18900/hook', '{"order":17,"kind":"expire"}');
"""


def against_pgbench(server: Postgres, folder: Path, seconds: int, rounds: int) -> dict[str, Any]:
    """The same rows into the same table: one by one with 16 clients of pgbench, and over HTTP, in turn."""
    url = fresh_database(server)
    script = folder / "insert.sql"
    script.write_text(_PGBENCH)
    results: dict[str, list[float]] = {
        name: [] for name in ("pgbench_simple", "pgbench_prepared", "one", "two", "own_client")
    }
    for number in range(rounds):
        for count in (1, 2):
            with instances(url, count):
                if not number:
                    load(count, seconds=2, connections=64, prefix=f"warm{count}")
                run = load(count, seconds=seconds, connections=256 // count, prefix=f"r{number}-{count}")
                results["one" if count == 1 else "two"].append(run["per_second"])
                if count == 1:
                    results["own_client"].append(own_client(seconds, f"o{number}"))
        database = url.rpartition("/")[2]
        for mode in ("simple", "prepared"):
            options = f"-n -c 16 -j 2 -T {seconds} -M {mode} -h 127.0.0.1 -p {server.port} -U postgres"
            said = server.run([server.program("pgbench"), *options.split(), "-f", str(script), database])
            rate = next(float(line.split()[2]) for line in said.splitlines() if line.startswith("tps"))
            results[f"pgbench_{mode}"].append(rate)
        say(f"  round {number + 1}: " + ", ".join(f"{name} {values[-1]:,.0f}/s" for name, values in results.items()))
    middle = {name: round(statistics.median(values)) for name, values in results.items()}
    return {
        "rows_per_second": results,
        "median": middle,
        "ratio_to_simple": round(middle["one"] / middle["pgbench_simple"], 2),
        "ratio_to_prepared": round(middle["one"] / middle["pgbench_prepared"], 2),
        "ratio_own_client_to_prepared": round(middle["own_client"] / middle["pgbench_prepared"], 2),
    }


def own_client(seconds: int, prefix: str) -> float:
    command = [sys.executable, "-m", "benchmarks.load", "client", "--port", str(FIRST_PORT), "--to", TARGET]
    done = subprocess.run(
        [*command, "--seconds", str(seconds), "--prefix", prefix, "--connections", "512"],
        stdout=subprocess.PIPE,
        check=True,
    )
    return float(json.loads(done.stdout)["per_second"])


# --- one process against two ---------------------------------------------------------------------


def scale_out(server: Postgres, seconds: int, count: int) -> dict[str, Any]:
    result: dict[str, Any] = {"share_of_a_core_each": SHARE}
    for number in (1, 2):
        result[f"{number}"] = {
            "creates_direct": scaled_creates(server, number, seconds, direct=True),
            "creates_anywhere": scaled_creates(server, number, seconds, direct=False),
            "fires": scaled_fires(server, number, count * number),
        }
    for what in ("creates_direct", "creates_anywhere", "fires"):
        one, two = (result[f"{number}"][what]["per_second"] for number in (1, 2))
        result[f"ratio_{what}"] = round(two / one, 2)
        say(f"  {what}: {one:,}/s by one, {two:,}/s by two: {two / one:.2f}")
    return result


def scaled_creates(server: Postgres, number: int, seconds: int, *, direct: bool) -> dict[str, Any]:
    database = BusyTime(server)
    with instances(fresh_database(server), number) as servers, shares(servers, SHARE):
        load(number, seconds=2, connections=32, prefix="warm", direct=direct)
        database.begin()
        run = load(number, seconds=seconds, connections=128, prefix="c", direct=direct)
        return run | {"postgres_cores": database.cores()}


def scaled_fires(server: Postgres, number: int, count: int) -> dict[str, Any]:
    """All due at one instant, made before the instances get their shares."""
    database = BusyTime(server)
    with receiving(), instances(fresh_database(server), number) as servers:
        due_ms = wall_ms() + 1_000 * (8 + count // 4_000)
        load(number, count=count // number, seconds=600, connections=128, prefix="f", at=format_instant(due_ms))
        with shares(servers, SHARE):
            assert wall_ms() < due_ms, "creating took too long"
            time.sleep((due_ms - wall_ms()) / 1_000)
            database.begin()
            started = time.perf_counter()
            while report(reset=False)["count"] < count:
                time.sleep(0.05)
                assert time.perf_counter() - started < 120, "not all have fired"
            cores = database.cores()
        found = report()
        assert found["earliest_ms"] >= 0, "fired early"
        return {"count": found["count"], "per_second": found["per_second"], "postgres_cores": cores}


class BusyTime:
    """How many cores PostgreSQL uses: with all its backends."""

    def __init__(self, server: Postgres) -> None:
        self._server = server

    def begin(self) -> None:
        self._cpu, self._at = self._used(), time.perf_counter()

    def cores(self) -> float:
        return round((self._used() - self._cpu) / (time.perf_counter() - self._at), 2)

    def _used(self) -> float:
        total = 0.0
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    if self._server.pid in (parent, int(folder.name)):
                        total += cpu_seconds(int(folder.name))
                except OSError:
                    continue
        return total


# --- many shards at rest -------------------------------------------------------------------------


def many_shards(server: Postgres, shards: int, seconds: float) -> dict[str, Any]:
    """Two instances, and a namespace of very many shards: how long until all are claimed, what do they cost?"""
    database = BusyTime(server)
    with instances(fresh_database(server), 2) as servers:
        started = time.perf_counter()
        ask("namespaces/create", {"namespace": "wide", "numShards": shards})
        until_settled(2)
        claimed_seconds = time.perf_counter() - started
        time.sleep(5)  # the first loads
        before = [cpu_seconds(running.pid) for running in servers]
        database.begin()
        time.sleep(seconds)
        percent = [round((cpu_seconds(s.pid) - cpu) / seconds * 100, 2) for s, cpu in zip(servers, before, strict=True)]
        cores = database.cores()
        joined = time.perf_counter()
        with process(
            "duetime",
            "serve",
            DUETIME_SERVER_LISTEN=f"127.0.0.1:{FIRST_PORT + 2}",
            DUETIME_STORE_URL=server.url(f"bench{_databases}"),
        ) as third:
            until_answers(f"http://127.0.0.1:{FIRST_PORT + 2}/readyz", third)
            until_settled(3)
            third_seconds = time.perf_counter() - joined
        found = {
            "all_claimed_after_s": round(claimed_seconds, 2),
            "even_after_a_third_joined_s": round(third_seconds, 2),
            "idle_percent_of_a_core_each": percent,
            "postgres_idle_percent_of_a_core": round(cores * 100, 2),
        }
        say(f"  {shards:,} shards: {found}")
        return found


# --- all of it -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures are rougher")
    parser.add_argument("--postgres", choices=("15", "18"), default="15", help="15 comes with pgbench")
    parser.add_argument("--only", choices=("pgbench", "scale", "shards"), help="one part of it")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    seconds, rounds = (4, 1) if options.quick else (8, 3)
    result: dict[str, Any] = {**machine(), "postgres": options.postgres}
    with running(f"postgres{options.postgres}") as server:
        assert isinstance(server, Postgres)
        check_disk(server.folder)
        if options.only in (None, "pgbench"):
            say("creates against pgbench's single-row inserts")
            result["against_pgbench"] = against_pgbench(server, server.folder, seconds, rounds)
        if options.only in (None, "scale"):
            say("one process against two")
            result["scale_out"] = scale_out(server, seconds, 8_000 if options.quick else 20_000)
        if options.only in (None, "shards"):
            say("many shards at rest, on two instances")
            result["shards"] = {
                str(count): many_shards(server, count, 5 if options.quick else 20) for count in (1_024, 4_096)
            }
    text = json.dumps(result, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
