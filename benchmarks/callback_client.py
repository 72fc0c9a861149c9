"""Callbacks per second and CPU per callback of Webhook.deliver, against a minimal server in another process.

    python benchmarks/callback_client.py [--posts 100000] [--concurrency 64] [--unsigned] [--profile]

Writes one JSON object to stdout. `cpu_us_per_post` is this process's user and system time: building, signing,
sending and reading one callback, without the engine; `cpu_user` is the part that is ours, the rest is the
kernel's TCP, most of it waking a receiver that has nothing else to do. `bare_cpu_us_per_post` is HttpClient.send
of fixed bytes in the same run: the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any, cast

from duetime.clock import SystemClock
from duetime.config import load_config
from duetime.deliveries.webhook import Webhook
from duetime.delivery import Attempt
from duetime.domain.settle import Contact
from duetime.domain.timer import Namespace, Timer, uuid_of
from duetime.http.client import HttpClient, parse_target
from duetime.signing import new_secret

ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 11\r\n\r\n{"ok":true}'
FIXED = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 11\r\n\r\n" + b'{"ok":true}'


class _Receiver(asyncio.Protocol):
    """Takes every read for one request: true here, where a request is one small write."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._write = cast(asyncio.Transport, transport).write

    def data_received(self, data: bytes) -> None:
        self._write(ANSWER)


def run(main: Awaitable[Any]) -> Any:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)  # type: ignore[arg-type]
    return uvloop.run(main)  # type: ignore[arg-type]


def serve(ready: Connection) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_Receiver, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    run(main())


async def measure(one: Callable[[int], Awaitable[Any]], posts: int, concurrency: int) -> dict[str, float]:
    numbers = iter(range(posts))

    async def worker() -> None:
        for number in numbers:
            await one(number)

    wall, before = time.perf_counter(), os.times()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    wall, after = time.perf_counter() - wall, os.times()
    user, system = after.user - before.user, after.system - before.system
    return {
        "posts_per_s": round(posts / wall),
        "cpu_us_per_post": round((user + system) / posts * 1e6, 1),
        "cpu_user_us_per_post": round(user / posts * 1e6, 1),
    }


async def bench(port: int, arguments: argparse.Namespace) -> dict[str, Any]:
    posts, concurrency = arguments.posts, arguments.concurrency
    clock = SystemClock()
    webhook = Webhook(load_config(environ={}), clock, loopback_allowed=True)
    secrets = () if arguments.unsigned else (new_secret(),)
    namespace = Namespace(name="commands", num_shards=16, created_at_ms=0, signing_secrets=secrets)
    url = f"http://127.0.0.1:{port}/hooks/expire"
    now_ms = clock.wall_ms()
    timers = []
    for number in range(10_000):
        timer_id = f"order-{number}"
        high, low = uuid_of("commands", timer_id)
        at_ms = now_ms + number
        timers.append(
            Timer(
                namespace="commands",
                timer_id=timer_id,
                uuid_high=high,
                uuid_low=low,
                generation=(1 << 32) + number,
                execute_at_ms=at_ms,
                scheduled_at_ms=at_ms,
                created_at_ms=now_ms,
                callback_url=url,
                payload='{"order":17}',
            )
        )

    async def deliver(number: int) -> None:
        outcome = await webhook.deliver(Attempt(timers[number % 10_000], namespace, "7.3", clock.wall_ms))
        if outcome.contact is not Contact.ANSWERED:
            raise SystemExit(f"a callback failed: {outcome.error}")

    client, target = HttpClient(), parse_target(url)

    async def bare(_: int) -> None:
        await client.send(target, lambda: FIXED, timeout_ms=10_000)

    await measure(deliver, 2_000, concurrency)
    await measure(bare, 2_000, concurrency)
    profiler = cProfile.Profile()
    if arguments.profile:
        profiler.enable()
    delivered = await measure(deliver, posts, concurrency)
    if arguments.profile:
        profiler.disable()
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    floor = await measure(bare, posts, concurrency)
    await webhook.close()
    await client.close()
    return {
        "benchmark": "callback_client",
        "posts": posts,
        "concurrency": concurrency,
        "signed": not arguments.unsigned,
        **delivered,
        **{f"bare_{name}": value for name, value in floor.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--posts", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--unsigned", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    here, there = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    server.start()
    try:
        json.dump(run(bench(here.recv(), arguments)), sys.stdout)
        print()
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
