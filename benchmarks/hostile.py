"""How much a hostile tenant can hurt another one: lateness and create latency of the victim, with each attack.

    python -m benchmarks.hostile [--seconds 30] [--attack NAME] [--out benchmarks/results/hostile.json]

A real server on SQLite has two tenants with a token each. The victim creates 50 timers a second, due 0.3 s later, to a
receiver that answers at once. The attacker is a process of its own and does one thing for the whole time. Each attack
gets a fresh server. `tests/e2e/test_hostile_tenant.py` runs the same attacks and fails if the victim loses an attempt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from benchmarks.hostile_attacks import ATTACKER, ATTACKS, SERVERS, Target, http_client, names_that_hang
from benchmarks.hostile_server import GOOD
from duetime.domain.instants import parse_instant
from duetime.http.client import HttpClient, HttpError
from duetime.http.messages import Request, Response
from duetime.http.server import serve_http

VICTIM = "victim"
EVERY_S, DUE_IN_MS = 0.02, 300
ARRIVAL_MAX_S = 30.0
READY = b"attacking\n"
ROOT = Path(__file__).parents[1]


async def attack_until_killed(name: str, port: int, receiver: str) -> None:
    target = Target(port, ATTACKER, receiver)
    await ATTACKS[name](target)
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    await asyncio.Event().wait()


# --- the victim ----------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What the victim saw during one attack; times in milliseconds."""

    attack: str
    created: int
    refused: list[str]  # answers other than 200, and requests without an answer
    arrived: int
    repeated: int  # callbacks with an attempt above 1
    late_p50: float
    late_p99: float
    late_max: float
    began_p99: float  # lateness when the server began the call: without the way to the receiver
    create_p50: float
    create_p99: float
    create_max: float
    server_mb_max: int  # largest resident memory of the server; 0: unknown


class Victim:
    """Creates timers at a steady rate, and is their receiver."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1/timers/create"
        self.latencies_ms: list[float] = []
        self.refused: list[str] = []
        self.attempts: dict[str, list[int]] = {}
        self.late_ms: dict[str, float] = {}
        self.began_ms: dict[str, float] = {}
        self.created: set[str] = set()
        self.arrived = asyncio.Event()
        self.receiver = ""
        self.names = ""  # if it is set, each timer calls the receiver by another name

    async def receive(self, request: Request) -> Response:
        if request.path == "/fail":
            return Response(500)
        if request.path.startswith("/later"):
            return Response(503, headers=(("retry-after", "3600"),))
        if request.path == "/hang":
            await asyncio.sleep(3_600)
        body = json.loads(request.body)
        if body["namespace"] == VICTIM:
            name = body["timerId"]
            self.attempts.setdefault(name, []).append(body["attempt"])
            due_ms = parse_instant(body["executeAt"])
            self.late_ms.setdefault(name, time.time() * 1_000 - due_ms)
            self.began_ms.setdefault(name, parse_instant(body["firedAt"]) - due_ms)
            self.arrived.set()
        return Response(200, b'{"ok":true}')

    async def work(self, seconds: float) -> None:
        """At a steady rate, also while earlier creates wait for their answer."""
        async with http_client() as http, asyncio.TaskGroup() as creates:
            loop = asyncio.get_running_loop()
            start = loop.time()
            for number in range(int(seconds / EVERY_S)):
                await asyncio.sleep(max(0.0, start + number * EVERY_S - loop.time()))
                creates.create_task(self._create(http, f"v{number}"))

    async def _create(self, http: HttpClient, name: str) -> None:
        url = f"{self.names.format(name) or self.receiver}/ok"
        body = {"namespace": VICTIM, "timerId": name, "delay": f"{DUE_IN_MS}ms", "callbackUrl": url}
        headers = {"authorization": f"Bearer {VICTIM}", "content-type": "application/json"}
        asked = time.perf_counter()
        try:
            answer = await http.request("POST", self.url, headers, json.dumps(body).encode(), timeout_ms=30_000)
        except HttpError as error:
            self.refused.append(str(error))
            return
        self.latencies_ms.append((time.perf_counter() - asked) * 1_000)
        if answer.status == 200:
            self.created.add(name)
        else:
            self.refused.append(f"{answer.status} {answer.body[:300]!r}")

    async def until_all_arrived(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ARRIVAL_MAX_S):
                while self.created - self.attempts.keys():
                    self.arrived.clear()
                    await self.arrived.wait()

    def outcome(self, attack: str, server_mb_max: int) -> Outcome:
        late = sorted(self.late_ms.values())
        took = sorted(self.latencies_ms)
        late_p50, late_p99, late_max = (quantile(late, q) for q in (0.5, 0.99, 1.0))
        create_p50, create_p99, create_max = (quantile(took, q) for q in (0.5, 0.99, 1.0))
        return Outcome(
            attack=attack,
            created=len(self.created),
            refused=self.refused,
            arrived=len(self.created & self.attempts.keys()),
            repeated=sum(attempt > 1 for attempts in self.attempts.values() for attempt in attempts),
            late_p50=late_p50,
            late_p99=late_p99,
            late_max=late_max,
            began_p99=quantile(sorted(self.began_ms.values()), 0.99),
            create_p50=create_p50,
            create_p99=create_p99,
            create_max=create_max,
            server_mb_max=server_mb_max,
        )


def quantile(ordered: list[float], q: float) -> float:
    return round(ordered[min(len(ordered) - 1, int(q * len(ordered)))], 1) if ordered else float("inf")


# --- one run -------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def serving(folder: Path, attack: str) -> AsyncIterator[tuple[int, int]]:
    """A server with a token and a namespace for each of the two: its port and pid."""
    port = free_port()
    program = ("-m", "benchmarks.hostile_server", *SERVERS[attack]) if attack in SERVERS else ("-m", "duetime", "serve")
    tokens = [
        {"name": name, "sha256": sha256(name.encode()).hexdigest(), "namespaces": [name], "verbs": ["admin"]}
        for name in (VICTIM, ATTACKER)
    ]
    settings = {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")} | {
        "DUETIME_SERVER_LISTEN": f"127.0.0.1:{port}",
        "DUETIME_STORE_URL": f"sqlite:///{folder}/timers.db",
        "DUETIME_AUTH_TOKENS": json.dumps(tokens),
    }
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, *program], env=settings, stdout=log, stderr=log, cwd=ROOT)
    try:
        async with http_client() as http:
            await until_ready(http, port)
            for name in (VICTIM, ATTACKER):
                answer = await http.request(
                    "POST",
                    f"http://127.0.0.1:{port}/api/v1/namespaces/create",
                    {"authorization": f"Bearer {name}", "content-type": "application/json"},
                    json.dumps({"namespace": name, "numShards": 16}).encode(),
                    timeout_ms=10_000,
                )
                assert answer.status == 200, answer.body
        yield port, process.pid
        assert process.poll() is None, (folder / "server.log").read_text()[-2_000:]
    finally:
        process.kill()
        process.wait()


async def until_ready(http: HttpClient, port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            with contextlib.suppress(HttpError):
                if (await http.request("GET", f"http://127.0.0.1:{port}/readyz", timeout_ms=1_000)).status == 200:
                    return
            await asyncio.sleep(0.05)


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection has it."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


async def measure(attack: str, seconds: float) -> Outcome:
    """The victim's view of one attack; with the attack "none", of a quiet server."""
    with tempfile.TemporaryDirectory(prefix="duetime-hostile-") as name:
        async with serving(Path(name), attack) as (port, pid):
            victim = Victim(port)
            receiver = await serve_http(
                victim.receive, "127.0.0.1", 0, body_bytes_max=1 << 20, connections_max=8_192, idle_timeout_ms=60_000
            )
            victim.receiver = f"http://127.0.0.1:{receiver.port}"
            if attack == names_that_hang.__name__:
                victim.names = f"http://{{}}{GOOD}:{receiver.port}"
            try:
                async with attacking(attack, port, victim.receiver):
                    await victim.work(seconds)
                    await victim.until_all_arrived()
                outcome = victim.outcome(attack, memory_mb_max(pid))
            finally:
                await receiver.close()
    return outcome


def memory_mb_max(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except OSError:  # not Linux
        return 0
    return int(status.partition("VmHWM:")[2].split()[0]) // 1_024


@contextlib.asynccontextmanager
async def attacking(attack: str, port: int, receiver: str) -> AsyncIterator[None]:
    if attack == "none":
        yield
        return
    command = [sys.executable, "-m", "benchmarks.hostile", "--attack", attack, "--port", str(port)]
    process = await asyncio.create_subprocess_exec(*command, "--receiver", receiver, stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    try:
        # An attack that is slow to start is an attack all the same.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.stdout.readline(), 10)
        yield
        assert process.returncode is None, f"the attack {attack} has ended"
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def run(attacks: list[str], seconds: float) -> list[Outcome]:
    outcomes = []
    for attack in attacks:
        outcome = await measure(attack, seconds)
        outcomes.append(outcome)
        print(summary(outcome), file=sys.stderr, flush=True)
    return outcomes


def summary(outcome: Outcome) -> str:
    return (
        f"{outcome.attack}: {outcome.created} created, {outcome.arrived} arrived, {outcome.repeated} repeated, "
        f"{len(outcome.refused)} refused; late p50 {outcome.late_p50} p99 {outcome.late_p99} max {outcome.late_max}, "
        f"begun p99 {outcome.began_p99}; "
        f"create p50 {outcome.create_p50} p99 {outcome.create_p99} max {outcome.create_max} ms; "
        f"server up to {outcome.server_mb_max} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--attack", action="append", choices=["none", *ATTACKS], help="only this one; repeatable")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to standard output")
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)  # to be the attacker
    parser.add_argument("--receiver", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port is not None:
        asyncio.run(attack_until_killed(arguments.attack[0], arguments.port, arguments.receiver))
        return
    outcomes = asyncio.run(run(arguments.attack or ["none", *ATTACKS], arguments.seconds))
    text = json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n"
    if arguments.out is None:
        print(text, end="")
    else:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
