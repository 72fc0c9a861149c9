"""How many requests a second each HTTP server makes of one core: ours, uvicorn and Granian, in one run.

Each server runs in a process of its own and echoes a create of about 200 bytes; wrk (or, without it, a
small asyncio client) loads it from another. Rounds are interleaved, so that a noisy machine is equally
unkind to all; the best round of each counts, and processor time per request tells more than requests per
second where others share the cores. `api` is our server with the whole API in front of a service
that does nothing: routing, decoding and encoding of a create included.

    python -m benchmarks.http_servers [--rounds 3] [--seconds 3] [--connections 32]

Needs `uvicorn` and `granian` (pip) for their rows; missing ones are left out. Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.checks import check_own
from duetime.api.dispatch import Api
from duetime.config import load_config
from duetime.domain.timer import Created, State, Timer, TimerSpec, TimerView
from duetime.http.messages import Request, Response
from duetime.http.server import serve_http
from duetime.service.service import Service
from duetime.telemetry import Telemetry

BODY = (
    b'{"namespace":"default","timerId":"order-17","executeAt":"2027-01-01T09:00:00Z",'
    b'"callbackUrl":"https://shop.example/hooks/expire","payload":{"order":17,"note":"hello"}}'
)
PATH = "/api/v1/timers/create"


# --- what is measured ----------------------------------------------------------------------------


async def echo(request: Request) -> Response:
    return Response(200, request.body)


Message = MutableMapping[str, Any]


async def app(
    scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
) -> None:
    """The same echo as a bare ASGI application."""
    if scope["type"] != "http":
        return
    body = b""
    more = True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Idle:
    """A service that takes every timer and does nothing with it."""

    async def create(self, spec: TimerSpec) -> Created:
        at_ms = spec.execute_at_ms or 0
        timer = Timer(
            namespace=spec.namespace,
            timer_id=spec.timer_id,
            uuid_high=0,
            uuid_low=0,
            generation=1,
            execute_at_ms=at_ms,
            scheduled_at_ms=at_ms,
            created_at_ms=at_ms,
            callback_url=spec.callback_url or "",
            payload=spec.payload,
        )
        return Created(TimerView(timer, State.SCHEDULED), False)


async def serve_ours(port: int, *, with_api: bool) -> None:
    handler = echo
    if with_api:
        handler = Api(cast(Service, Idle()), load_config(environ={}), Telemetry()).handle
    await serve_http(handler, "127.0.0.1", port, body_bytes_max=1 << 24, connections_max=4_096, idle_timeout_ms=75_000)
    await asyncio.Event().wait()


def serve(name: str, port: int) -> None:
    if name in ("duetime", "api"):
        import uvloop

        uvloop.run(serve_ours(port, with_api=name == "api"))


def command(name: str, port: int) -> list[str]:
    root = str(Path(__file__).parents[1])
    if name == "uvicorn":
        return [
            *(sys.executable, "-m", "uvicorn", "benchmarks.http_servers:app", "--app-dir", root, "--port", str(port)),
            *("--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "error"),
        ]
    if name == "granian":
        return [
            *(sys.executable, "-m", "granian", "benchmarks.http_servers:app", "--interface", "asgi"),
            *("--port", str(port)),
            *("--workers", "1", "--loop", "uvloop", "--no-access-log", "--log-level", "error"),
            *("--working-dir", root),
        ]
    return [sys.executable, "-m", "benchmarks.http_servers", "--serve", name, "--port", str(port)]


# --- load ----------------------------------------------------------------------------------------


def load(port: int, seconds: int, connections: int) -> float:
    if shutil.which("wrk"):
        return load_with_wrk(port, seconds, connections)
    return asyncio.run(load_with_python(port, seconds, connections))


def load_with_wrk(port: int, seconds: int, connections: int) -> float:
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write('wrk.method = "POST"\nwrk.headers["content-type"] = "application/json"\n')
        script.write(f"wrk.body = [[{BODY.decode()}]]\n")
        script.flush()
        done = subprocess.run(
            ["wrk", "-t1", f"-c{connections}", f"-d{seconds}", "-s", script.name, f"http://127.0.0.1:{port}{PATH}"],
            capture_output=True,
            text=True,
            check=True,
        )
    if "Non-2xx" in done.stdout:
        raise RuntimeError(done.stdout)
    found = re.search(r"Requests/sec:\s+([0-9.]+)", done.stdout)
    assert found is not None, done.stdout
    return float(found.group(1))


async def load_with_python(port: int, seconds: int, connections: int) -> float:
    head = f"POST {PATH} HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\ncontent-length: {len(BODY)}\r\n\r\n"
    request = head.encode() + BODY
    until = time.perf_counter() + seconds

    async def client() -> int:
        count = 0
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < until:
            writer.write(request)
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = re.search(rb"content-length: (\d+)", answer)
            assert length is not None
            await reader.readexactly(int(length.group(1)))
            count += 1
        writer.close()
        return count

    return sum(await asyncio.gather(*(client() for _ in range(connections)))) / seconds


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"nothing listens on {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_seconds(pid: int) -> float:
    """Processor time of a process and its children so far, from Linux's /proc."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = " ".join(task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/children")).split()
    return own + sum(cpu_seconds(int(child)) for child in children)


def measured(name: str, seconds: int, connections: int) -> tuple[float, float]:
    """Requests a second, and microseconds of processor time for each."""
    port = free_port()
    process = subprocess.Popen(command(name, port))
    try:
        wait_for(port)
        check_own(process, port)
        load(port, 1, connections)  # warm up
        before = cpu_seconds(process.pid)
        rate = load(port, seconds, connections)
        return rate, (cpu_seconds(process.pid) - before) * 1e6 / (rate * seconds)
    finally:
        process.terminate()
        process.wait(10)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, given.port)
        return
    names = ["duetime", "api", *(name for name in ("uvicorn", "granian") if importlib.util.find_spec(name))]
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(given.rounds):
        for name in names:
            rate, cost = measured(name, given.seconds, given.connections)
            rates[name].append(round(rate))
            costs[name].append(round(cost, 1))
    best = {name: max(results) for name, results in rates.items()}
    report = {
        "requests_per_second": best,
        "cpu_microseconds_per_request": {name: min(results) for name, results in costs.items()},
        "rounds": rates,
        "duetime_against": {name: round(best["duetime"] / best[name], 2) for name in names[1:]},
        "load": "wrk" if shutil.which("wrk") else "asyncio",
        "connections": given.connections,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
