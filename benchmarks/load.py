"""Load and receivers for the benchmarks: raw HTTP on asyncio.Protocol, as little work per call as can be.

Run as processes of their own, so that they do not share an interpreter with what is measured:

    python -m benchmarks.load create --port 8463 --connections 256 --seconds 10 --to URL --delay 1h
    python -m benchmarks.load create --port 8463,8464 --direct …     # each timer to the instance that owns it
    python -m benchmarks.load client --port 8463 …                   # our own client, which coalesces
    python -m benchmarks.load receive --port 9000

`receive` answers 200 to everything; `GET /report` on it answers how many came and how late they were.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import urllib.request
import zlib
from functools import partial
from typing import Any, cast

import uvloop

from duetime import AsyncClient


class _Creator(asyncio.Protocol):
    """One connection of a closed loop: sends a create, waits for the answer, sends the next."""

    def __init__(self, run: CreateRun, instance: int) -> None:
        self.run = run
        self.instance = instance
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.send()

    def send(self) -> None:
        request = self.run.next_request(self.instance)
        if request is None:
            self.transport.close()
            return
        self.sent_at = time.perf_counter()
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        if data[9:12] == b"200":
            self.run.answered(time.perf_counter() - self.sent_at)
        else:
            self.run.failed(data)
        self.send()

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.closed()


class CreateRun:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.ports = [int(port) for port in options.port.split(",")]
        self.owners: list[int] = []  # with --direct: of each shard the index of its instance
        self.number = 0
        self.errors = 0
        self.first_error = ""
        self.latencies: list[float] = []
        self.until = 0.0
        self.open = options.connections
        self.done = asyncio.Event()

    def next_request(self, instance: int) -> bytes | None:
        if time.perf_counter() >= self.until or (self.options.count and self.number >= self.options.count):
            return None
        self.number += 1
        while self.owners and self._owner(f"{self.options.prefix}-{self.number}") != instance:
            self.number += 1
        when = f'"executeAt":"{self.options.at}"' if self.options.at else f'"delay":"{self.options.delay}"'
        body = (
            f'{{"timerId":"{self.options.prefix}-{self.number}",{when},'
            f'"callbackUrl":"{self.options.to}","payload":{{"order":{self.number},"kind":"expire"}}}}'
        ).encode()
        return (
            b"POST /api/v1/timers/create HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: " + str(len(body)).encode() + b"\r\n\r\n" + body
        )

    def _owner(self, timer_id: str) -> int:
        return self.owners[zlib.crc32(timer_id.encode()) % len(self.owners)]

    def learn_the_way(self) -> None:
        """Who owns the shards of the namespace `default`."""
        url = f"http://127.0.0.1:{self.ports[0]}/api/v1/cluster/map"
        request = urllib.request.Request(url, b"{}", {"content-type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            found = json.load(answer)
        ports = [int(address.rpartition(":")[2]) for address in found["instances"]]
        owners = found["owners"][: found["namespaces"]["default"]]
        self.owners = [self.ports.index(ports[owner]) for owner in owners]

    def answered(self, seconds: float) -> None:
        self.latencies.append(seconds)

    def failed(self, data: bytes) -> None:
        self.errors += 1
        self.first_error = self.first_error or data.decode("latin-1")

    def closed(self) -> None:
        self.open -= 1
        if not self.open:
            self.done.set()

    async def run(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        if self.options.direct:
            self.learn_the_way()
        started = time.perf_counter()
        self.until = started + self.options.seconds
        for number in range(self.options.connections):
            instance = number % len(self.ports)
            await loop.create_connection(partial(_Creator, self, instance), "127.0.0.1", self.ports[instance])
        await self.done.wait()
        seconds = time.perf_counter() - started
        self.latencies.sort()
        count = len(self.latencies)
        return {
            "creates": count,
            "errors": self.errors,
            "first_error": self.first_error,
            "per_second": round(count / seconds),
            "p50_ms": round(self.latencies[count // 2] * 1_000, 2) if count else None,
            "p99_ms": round(self.latencies[count * 99 // 100] * 1_000, 2) if count else None,
        }


_MARK = b'"executeAt":"'


class Receiver:
    """Counts callbacks; looks at how late each is by the time it was asked for, in its body."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.count = 0
        self.first = self.last = 0.0
        self.late_ms: list[float] = []

    def report(self) -> bytes:
        late = sorted(self.late_ms)
        report = {
            "count": self.count,
            "per_second": round((self.count - 1) / (self.last - self.first)) if self.last > self.first else 0,
            "p50_ms": round(late[len(late) // 2], 2) if late else None,
            "p99_ms": round(late[len(late) * 99 // 100], 2) if late else None,
            "max_ms": round(late[-1], 2) if late else None,
            "earliest_ms": round(late[0], 2) if late else None,
        }
        return json.dumps(report).encode()


class _Callback(asyncio.Protocol):
    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.buffer:
            data = self.buffer + data
            self.buffer = b""
        if data.startswith(b"GET"):
            self.tell(data)
            return
        head_end = data.find(b"\r\n\r\n")
        if head_end < 0:
            self.buffer = data
            return
        length_at = data.find(b"ontent-length: ")
        length = int(data[length_at + 15 : data.find(b"\r\n", length_at)])
        if len(data) < head_end + 4 + length:
            self.buffer = data
            return
        now = time.time()
        receiver = self.receiver
        at = data.find(_MARK, head_end) + len(_MARK)
        receiver.late_ms.append(now * 1_000 - _milliseconds(data[at : at + 24]))
        receiver.count += 1
        receiver.last = now
        receiver.first = receiver.first or now
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    def tell(self, data: bytes) -> None:
        body = self.receiver.report()
        if b"/reset" in data:
            self.receiver.reset()
        self.transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: "
            + str(len(body)).encode()
            + b"\r\n\r\n"
            + body
        )
        self.transport.close()


_days: dict[bytes, int] = {}


def _milliseconds(text: bytes) -> int:
    day = _days.get(text[:10])
    if day is None:
        from datetime import date

        day = _days[text[:10]] = (date.fromisoformat(text[:10].decode()).toordinal() - 719_163) * 86_400_000
    return day + (int(text[11:13]) * 3600 + int(text[14:16]) * 60 + int(text[17:19])) * 1000 + int(text[20:23])


async def _receive(options: argparse.Namespace) -> None:
    receiver = Receiver()
    server = await asyncio.get_running_loop().create_server(lambda: _Callback(receiver), "127.0.0.1", options.port)
    await server.serve_forever()


async def _client(options: argparse.Namespace) -> None:
    """The same with our own client: every create awaited by itself, sent together with those made meanwhile."""
    until, done = time.perf_counter() + options.seconds, 0
    async with AsyncClient(f"http://127.0.0.1:{options.port}", coalesce=True) as client:

        async def creator(number: int) -> int:
            count = 0
            while time.perf_counter() < until:
                count += 1
                command = {"command": count, "kind": "expire"}
                timer_id = f"{options.prefix}-{number}-{count}"
                await client.create(timer_id, delay=options.delay, callback_url=options.to, payload=command)
            return count

        started = time.perf_counter()
        done = sum(await asyncio.gather(*(creator(number) for number in range(options.connections))))
    print(json.dumps({"creates": done, "per_second": round(done / (time.perf_counter() - started))}))


async def _create(options: argparse.Namespace) -> None:
    print(json.dumps(await CreateRun(options).run()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    create = commands.add_parser("create")
    create.set_defaults(run=_create)
    create.add_argument("--port", default="8463", help="one, or several with commas")
    create.add_argument("--direct", action="store_true", help="each timer to the instance that owns its shard")
    create.add_argument("--connections", type=int, default=256)
    create.add_argument("--seconds", type=float, default=10)
    create.add_argument("--count", type=int, default=0)
    create.add_argument("--to", default="http://127.0.0.1:9000/hook")
    create.add_argument("--delay", default="30d")
    create.add_argument("--at", default="")
    create.add_argument("--prefix", default="bench")
    client = commands.add_parser("client", parents=[create], add_help=False, conflict_handler="resolve")
    client.set_defaults(run=_client)
    receive = commands.add_parser("receive")
    receive.set_defaults(run=_receive)
    receive.add_argument("--port", type=int, default=9000)
    options = parser.parse_args()
    try:
        uvloop.run(options.run(options))
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
