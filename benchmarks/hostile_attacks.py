"""The attacks of benchmarks/hostile.py: each is made by a process of its own, until it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from benchmarks.hostile_server import HANGING
from duetime.http.client import HttpClient

__all__ = ["ATTACKER", "ATTACKS", "SERVERS", "Target", "http_client"]

ATTACKER = "attacker"


@contextlib.asynccontextmanager
async def http_client() -> AsyncIterator[HttpClient]:
    http = HttpClient(body_bytes_max=1 << 24)
    try:
        yield http
    finally:
        await http.close()


@dataclass
class Target:
    """What the attacker knows: the server, a token, and the address of the victim's receiver."""

    port: int
    token: str
    receiver: str
    errors: int = 0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def head(self, path: str, *headers: str) -> bytes:
        lines = [f"POST /api/v1/{path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
        return "\r\n".join([*lines, f"authorization: Bearer {self.token}", "", ""]).encode()

    def request(self, path: str, body: Any) -> bytes:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.head(path, f"content-length: {len(data)}") + data

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def send(self, requests: Callable[[], bytes], pause_s: float = 0.0) -> None:
        """Sends requests on one connection, one after the other, and connects again if it is closed."""
        while True:
            try:
                reader, writer = await self.connect()
                while True:
                    writer.write(requests())
                    await writer.drain()
                    head = (await reader.readuntil(b"\r\n\r\n")).lower()
                    size = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
                    await reader.readexactly(int(size))
                    await asyncio.sleep(pause_s)
            except (OSError, asyncio.IncompleteReadError):
                self.errors += 1
                await asyncio.sleep(0.02)

    def spread(self, count: int, requests: Callable[[], bytes], pause_s: float = 0.0) -> None:
        self.tasks += [asyncio.create_task(self.send(requests, pause_s)) for _ in range(count)]

    async def create_many(self, timers: list[dict[str, Any]]) -> None:
        async with http_client() as http:
            for start in range(0, len(timers), 500):
                await http.request(
                    "POST",
                    f"http://127.0.0.1:{self.port}/api/v1/timers/createMany",
                    {"authorization": f"Bearer {self.token}", "content-type": "application/json"},
                    json.dumps({"timers": timers[start : start + 500]}).encode(),
                    timeout_ms=60_000,
                )


def timer(number: int | str, url: str, **more: Any) -> dict[str, Any]:
    return {"namespace": ATTACKER, "timerId": f"a{number}", "callbackUrl": url, "delay": "100ms"} | more


async def bad_receiver(answer: bytes | None) -> int:
    """Listens on all loopback addresses. None: never answers."""

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await reader.read(65_536)
                if answer is None:
                    await asyncio.sleep(3_600)
                else:
                    writer.write(answer)

    server = await asyncio.start_server(receive, "0.0.0.0", 0, backlog=4_096)
    return int(server.sockets[0].getsockname()[1])


def answered(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def origins(port: int, count: int) -> list[str]:
    """Loopback has many addresses, and each is an origin of its own."""
    return [f"http://127.0.{1 + n // 250}.{1 + n % 250}:{port}/" for n in range(count)]


async def hanging_receivers(target: Target) -> None:
    port = await bad_receiver(None)
    urls = origins(port, 2_048)
    await target.create_many([timer(n, url, callbackTimeoutSeconds=300) for n, url in enumerate(urls)])


async def failing_receivers(target: Target) -> None:
    port = await bad_receiver(answered("500 Internal Server Error"))
    retries = {"initialInterval": "100ms", "maxInterval": "100ms"}
    await target.create_many([timer(n, url, retryPolicy=retries) for n, url in enumerate(origins(port, 500))])


async def failing_path_of_the_victims_receiver(target: Target) -> None:
    retries = {"initialInterval": "100ms", "maxInterval": "100ms"}
    await target.create_many([timer(n, f"{target.receiver}/fail", retryPolicy=retries) for n in range(40)])


async def retry_after_of_the_victims_receiver(target: Target) -> None:
    await target.create_many([timer(n, f"{target.receiver}/later/{n}") for n in range(20)])


async def hanging_path_of_the_victims_receiver(target: Target) -> None:
    await target.create_many([timer(n, f"{target.receiver}/hang", callbackTimeoutSeconds=300) for n in range(500)])


async def redelivery_loop(target: Target) -> None:
    port = await bad_receiver(answered("200 OK", b'{"ok":false,"nextExecuteAt":"2020-01-01T00:00:00Z"}'))
    await target.create_many([timer(n, url) for n, url in enumerate(origins(port, 200))])


async def names_that_do_not_resolve(target: Target) -> None:
    await target.create_many([timer(n, f"http://name-{n}.invalid/") for n in range(500)])


async def names_that_hang(target: Target) -> None:
    await target.create_many([timer(n, f"http://name-{n}{HANGING}/", callbackTimeoutSeconds=300) for n in range(500)])


async def hanging_receivers_and_few_open_files(target: Target) -> None:
    await hanging_receivers(target)


async def idle_connections_and_few_open_files(target: Target) -> None:
    await idle_connections(target)


async def slow_bodies(target: Target) -> None:
    async def drip() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await target.connect()
                writer.write(target.head("timers/createMany", "content-length: 16000000"))
                while True:
                    writer.write(b" " * 100)
                    await writer.drain()
                    await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)

    target.tasks += [asyncio.create_task(drip()) for _ in range(100)]


async def bodies_without_a_token(target: Target) -> None:
    stranger = Target(target.port, "wrong", target.receiver)
    body = b" " * 16_000_000
    stranger.spread(8, lambda: stranger.request("timers/createMany", body))
    target.tasks += stranger.tasks


async def tiny_chunks(target: Target) -> None:
    async def drip() -> None:
        while True:
            with contextlib.suppress(OSError):
                _, writer = await target.connect()
                writer.write(target.head("timers/createMany", "transfer-encoding: chunked"))
                while True:
                    writer.write(b"1\r\n \r\n" * 2_000)
                    await writer.drain()
            await asyncio.sleep(0.02)

    target.tasks += [asyncio.create_task(drip()) for _ in range(4)]


async def lone_surrogates(target: Target) -> None:
    body = b'{"timers":[{"timerId":"' + b"\\ud800" * 2_600_000 + b'"}]}'
    target.spread(2, lambda: target.request("timers/createMany", body))


async def long_lists(target: Target) -> None:
    body = b'{"timers":[' + b",".join([b"0"] * 8_000_000) + b"]}"
    target.spread(2, lambda: target.request("timers/createMany", body))


async def large_maps(target: Target) -> None:
    headers = {f"x-{n}": "v" for n in range(40_000)}
    body = json.dumps(timer(0, target.receiver, headers=headers)).encode()[: (1 << 20) - 1]
    target.spread(4, lambda: target.request("timers/create", body))


async def large_creates(target: Target) -> None:
    payload = "x" * 250_000
    numbers = iter(range(10**9))
    target.spread(
        4,
        lambda: target.request(
            "timers/create", timer(next(numbers) % 2_000, target.receiver, delay="1h", payload=payload)
        ),
    )


async def creates_of_many(target: Target) -> None:
    rounds = iter(range(10**9))

    def request() -> bytes:
        base = next(rounds) * 1_000
        return target.request(
            "timers/createMany", {"timers": [timer(base + n, target.receiver, delay="1h") for n in range(1_000)]}
        )

    target.spread(4, request)


async def due_timers(target: Target) -> None:
    """Many due timers with large payloads for a receiver that is slow."""
    port = await bad_receiver(None)
    payload = "x" * 200_000
    timers = [timer(n, f"http://127.0.0.1:{port}/", payload=payload, callbackTimeoutSeconds=300) for n in range(400)]
    for start in range(0, len(timers), 40):
        await target.create_many(timers[start : start + 40])


async def large_pages(target: Target) -> None:
    payload = "x" * 100_000
    timers = [timer(n, target.receiver, delay="1h", payload=payload) for n in range(300)]
    for start in range(0, len(timers), 100):
        await target.create_many(timers[start : start + 100])
    target.spread(4, lambda: target.request("timers/list", {"namespace": ATTACKER, "limit": 300}))


async def clients_that_do_not_read(target: Target) -> None:
    payload = "x" * 100_000
    timers = [timer(n, target.receiver, delay="1h", payload=payload) for n in range(80)]
    await target.create_many(timers)

    async def ask_only() -> None:
        request = target.request("timers/list", {"namespace": ATTACKER, "limit": 80})
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await target.connect()
                cast(Any, writer.transport).pause_reading()
                writer.write(request * 20)
                await asyncio.sleep(5)
                writer.transport.abort()
                del reader
            await asyncio.sleep(0.1)

    target.tasks += [asyncio.create_task(ask_only()) for _ in range(100)]


async def idle_connections(target: Target) -> None:
    """More than the server's limit: those that are closed are opened again."""
    kept: list[socket.socket] = []

    async def fill() -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock = socket.socket()
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, ("127.0.0.1", target.port))
                kept.append(sock)
            except OSError:
                sock.close()
                await asyncio.sleep(0.01)
            if len(kept) > 4_500:
                for old in kept[:500]:
                    old.close()
                del kept[:500]

    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    target.tasks.append(asyncio.create_task(fill()))


async def pipelined_requests(target: Target) -> None:
    async def pipeline() -> None:
        request = target.request("timers/get", {"namespace": ATTACKER, "timerId": "none"})
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await target.connect()
                while True:
                    writer.write(request * 200)
                    await writer.drain()
                    if not await reader.read(1 << 20):
                        break

    target.tasks += [asyncio.create_task(pipeline()) for _ in range(2)]


ATTACKS: dict[str, Callable[[Target], Awaitable[None]]] = {
    attack.__name__: attack
    for attack in (
        hanging_receivers,
        hanging_receivers_and_few_open_files,
        failing_receivers,
        failing_path_of_the_victims_receiver,
        retry_after_of_the_victims_receiver,
        hanging_path_of_the_victims_receiver,
        redelivery_loop,
        names_that_do_not_resolve,
        names_that_hang,
        slow_bodies,
        bodies_without_a_token,
        tiny_chunks,
        lone_surrogates,
        long_lists,
        large_maps,
        large_creates,
        creates_of_many,
        due_timers,
        large_pages,
        clients_that_do_not_read,
        idle_connections,
        idle_connections_and_few_open_files,
        pipelined_requests,
    )
}

# The arguments of benchmarks/hostile_server.py for attacks that need another server than the usual one.
SERVERS: dict[str, tuple[str, ...]] = {
    hanging_receivers_and_few_open_files.__name__: ("--open-files", "1024"),
    idle_connections_and_few_open_files.__name__: ("--open-files", "1024"),
    names_that_hang.__name__: ("--names",),
}
