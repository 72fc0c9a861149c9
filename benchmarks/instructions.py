"""How many instructions a create costs, counted by valgrind: unlike a duration, this hardly depends on the machine and
on what else it does. It shows whether a change made creates more expensive.

    python -m benchmarks.instructions [--source OTHER_CHECKOUT ...] [--connections 256] [--store memory://] [--urls 1]

A whole instance runs in one process, together with a small client that creates timers over real connections. The
difference between two numbers of creates leaves out the start. The client is counted too, but it is the same for every
checkout. With `--fires` all timers are due at once, and the figure includes callback and settle; `--urls`: they take
turns with so many URLs of one origin (with 12000 or more, each has its own). `--source`: also
measure these checkouts, with the Python and the packages of this one. `--calls` counts calls of Python functions for
each create instead (cProfile), which shows what has changed. Needs valgrind, and takes a minute for each checkout.
Work that is done once a second is counted too: on a busy machine the run takes longer, and the figure is higher.
Prints JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FEW, MANY = 2_000, 12_000
HERE = Path(__file__).parents[1]
# No heartbeat while it runs: their number depends on the time that it takes.
ENVIRONMENT = {
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "10m",
    "DUETIME_ENGINE_LEASE": "30m",
    "DUETIME_ENGINE_DEAD_AFTER": "31m",
    "DUETIME_SERVER_LISTEN": "127.0.0.1:0",
    "PYTHONHASHSEED": "0",
}
HEAD = (
    b"POST /api/v1/timers/create HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n"
)
BODY = b'{"timerId":"order-%06d","delay":"30d","callbackUrl":"https://shop.example/","payload":{"n":1}}'
BODY_DUE = b'{"timerId":"order-%06d","delay":"0s","callbackUrl":"http://127.0.0.1:%d/%06d","payload":{"n":1}}'


class Creator(asyncio.Protocol):
    """Creates a timer, and the next one when it is answered."""

    def __init__(self, numbers: Iterator[int], receiver_port: int | None, urls: int, finished: asyncio.Event) -> None:
        self._numbers = numbers
        self._urls = urls
        self._receiver_port = receiver_port
        self._finished = finished
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        number = next(self._numbers, None)
        if number is None:
            self._finished.set()
            return
        if self._receiver_port is None:
            body = BODY % number
        else:
            body = BODY_DUE % (number, self._receiver_port, number % self._urls)
        self._transport.write(HEAD % len(body) + body)

    def data_received(self, data: bytes) -> None:
        if not data.startswith(b"HTTP/1.1 200"):
            raise SystemExit(data.decode())
        self._send()


class Receiver(asyncio.Protocol):
    """Answers callbacks, each of which arrives as a whole."""

    def __init__(self, left: list[int], finished: asyncio.Event) -> None:
        self._left = left
        self._finished = finished
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        self._left[0] -= 1
        if self._left[0] == 0:
            self._finished.set()


async def create(count: int, connections: int, profile: cProfile.Profile | None, *, fires: bool, urls: int) -> None:
    """Runs in the process that is measured. What it imports exists in older checkouts too."""
    from duetime.app import App
    from duetime.config import load_config

    app = App(load_config())
    await app.start()
    gc.collect()
    gc.disable()  # its runs would depend on how many objects there were at the start
    loop, numbers = asyncio.get_running_loop(), iter(range(count))
    created, received = asyncio.Event(), asyncio.Event()
    port = None
    if fires:
        left = [count]
        receiver = await loop.create_server(lambda: Receiver(left, received), "127.0.0.1", 0)
        port = receiver.sockets[0].getsockname()[1]
    if profile is not None:
        profile.enable()
    for _ in range(connections):
        await loop.create_connection(lambda: Creator(numbers, port, urls, created), *app.address)
    await created.wait()
    if fires:
        await received.wait()
    if profile is not None:
        profile.disable()
    # Without `app.stop`, which would write as many timers as there are.


def run(arguments: argparse.Namespace, source: Path, count: int, *command: str) -> str:
    """The output of a process that creates so many timers with this checkout."""
    options = ["--create", str(count), "--connections", str(arguments.connections), "--urls", str(arguments.urls)]
    options += [option for option in ("--calls", "--fires") if getattr(arguments, option[2:])]
    environment = os.environ | ENVIRONMENT | {"DUETIME_STORE_URL": arguments.store, "PYTHONPATH": str(source / "src")}
    done = subprocess.run(
        [*command, sys.executable, __file__, *options],
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout + done.stderr


def instructions(arguments: argparse.Namespace, source: Path) -> int:
    """Of one create."""
    valgrind = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
    few, many = (
        int(re.findall(r"Collected : (\d+)", run(arguments, source, count, *valgrind))[0]) for count in (FEW, MANY)
    )
    return round((many - few) / (MANY - FEW))


def calls(arguments: argparse.Namespace, source: Path) -> dict[str, float]:
    """How often each function is called for one create."""
    few, many = (json.loads(run(arguments, source, count)) for count in (FEW, MANY))
    each = {name: (count - few.get(name, 0)) / (MANY - FEW) for name, count in many.items()}
    return {name: round(count, 2) for name, count in sorted(each.items()) if count >= 0.005}


def called(profile: cProfile.Profile) -> dict[str, int]:
    found: dict[str, int] = {}
    for entry in profile.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_qualname}"
        found[name] = found.get(name, 0) + entry.callcount
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="counts the instructions of a create")
    parser.add_argument("--source", type=Path, action="append", default=[], help="also measure this checkout")
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--store", default="memory://")
    parser.add_argument("--calls", action="store_true", help="calls of functions instead of instructions")
    parser.add_argument("--fires", action="store_true", help="of a create with its callback and its settle")
    parser.add_argument("--urls", type=int, default=1, help="with --fires: so many URLs")
    parser.add_argument("--create", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.create is not None:
        import uvloop

        profile = cProfile.Profile() if arguments.calls else None
        run_options = {"fires": arguments.fires, "urls": arguments.urls}
        uvloop.run(create(arguments.create, arguments.connections, profile, **run_options))
        if profile is not None:
            print(json.dumps(called(profile)))
        return
    measure = calls if arguments.calls else instructions
    print(json.dumps({str(source): measure(arguments, source) for source in (HERE, *arguments.source)}, indent=2))


if __name__ == "__main__":
    main()
