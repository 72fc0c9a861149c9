"""A real server with few file descriptors: strangers, and receivers that hang, cannot take those of everybody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from contract import Asker
from real_server import RealReceiver, RealServer, until

LIMIT = 256  # soft and hard: more cannot be had


def limited(limit: int) -> tuple[str, ...]:
    lines = (
        "import resource, sys",
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))",
        "from duetime.cli import main",
        "sys.exit(main(['serve', *sys.argv[1:]]))",
    )
    return ("-c", "\n".join(lines))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[RealServer]:
    server = RealServer(folder, program=limited(LIMIT))
    try:
        await server.start()
        yield server
        assert await server.stop() == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        await server.close()


@asynccontextmanager
async def receiving() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    try:
        yield receiver
    finally:
        await receiver.close()


@contextmanager
def hanging_receivers(count: int) -> Iterator[list[str]]:
    """URLs of so many origins: the system takes each connection, and nobody ever answers."""
    with ExitStack() as stack:
        urls = []
        for _ in range(count):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=8))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}/hook")
        yield urls


async def ask_on_a_new_connection(server: RealServer) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(b"POST /api/v1/timers/list HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n")
        writer.write(b"content-length: 25\r\n\r\n" + b'{"namespace":  "default"}')
        async with asyncio.timeout(10):
            return await reader.readline()
    finally:
        writer.transport.abort()


async def create(server: RealServer, namespace: str, name: str, url: str) -> None:
    timer = {"namespace": namespace, "timerId": name, "delay": "0s", "callbackUrl": url}
    status, answer = await server.call("timers/create", timer)
    assert status == 200, answer


@asynccontextmanager
async def full_of_calls_that_hang(server: RealServer) -> AsyncIterator[None]:
    """The namespace `hostile` has more calls to receivers that hang than this server may have sockets for."""
    await Asker(server).ok("namespaces/create", namespace="hostile", numShards=4)
    hostile = {"namespace": "hostile", "delay": "0s", "callbackTimeoutSeconds": 300}
    with hanging_receivers(300) as urls:
        for start in range(0, len(urls), 100):
            timers = [hostile | {"timerId": f"t{n}", "callbackUrl": urls[n]} for n in range(start, start + 100)]
            status, answer = await server.call("timers/createMany", {"timers": timers})
            assert status == 200, answer
        await until(lambda: holds_at_least(server, 30), "the callbacks that hang hold their share of sockets")
        yield


async def test_receivers_that_hang_do_not_take_the_api_and_a_shortage_of_sockets_is_not_an_attempt(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as server, full_of_calls_that_hang(server):
        for _ in range(50):
            assert await ask_on_a_new_connection(server) == b"HTTP/1.1 200 OK\r\n"
        for number in range(300):
            status, answer = await server.call("timers/get", {"namespace": "hostile", "timerId": f"t{number}"})
            assert (status, answer["timer"]["attempts"]) == (200, 0)
        assert "Too many open files" not in server.log.read_text()


async def test_receivers_that_hang_do_not_delay_the_timers_of_another_namespace(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, receiving() as receiver, full_of_calls_that_hang(server):
        await Asker(server).ok("namespaces/create", namespace="victim", numShards=4)
        for number in range(20):
            await create(server, "victim", f"v{number}", receiver.url)
        await receiver.received(20)
        assert {body["attempt"] for body in receiver.bodies} == {1}


async def holds_at_least(server: RealServer, count: int) -> bool:
    return await server.metric("duetime_deliveries_in_flight") >= count


async def test_silent_connections_stop_neither_the_api_nor_firing(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, receiving() as receiver:
        with ExitStack() as stack:
            for _ in range(2 * LIMIT):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            for number in range(10):
                await create(server, "default", f"t{number}", receiver.url)
                assert await ask_on_a_new_connection(server) == b"HTTP/1.1 200 OK\r\n"
            await receiver.received(10)
            assert {body["attempt"] for body in receiver.bodies} == {1}


async def test_the_log_says_once_which_limits_were_lowered_and_how_to_raise_them(tmp_path: Path) -> None:
    async with serving(tmp_path) as server:
        lines = [line for line in server.log.read_text().splitlines() if "open files" in line]
        assert len(lines) == 1
        assert f"allows this process {LIMIT} open files" in lines[0]
        assert "server.connections_max is " in lines[0]
        assert "delivery.concurrency_max is " in lines[0]
        assert "LimitNOFILE=" in lines[0]


async def test_a_limit_too_small_to_work_with_stops_the_start_and_says_what_is_needed(tmp_path: Path) -> None:
    server = RealServer(tmp_path, program=limited(100))
    try:
        with pytest.raises(RuntimeError, match=r"100 open files; at least \d+ are needed.*LimitNOFILE="):
            await server.start()
        assert await server.wait() != 0
    finally:
        await server.close()
