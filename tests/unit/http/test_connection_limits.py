"""How many connections the HTTP server has, and which it closes. Over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from served import (
    Scenario,
    ask,
    by_token,
    connected,
    head,
    on_uvloop_too,
    post,
    read_answer,
    run_on_uvloop,
    serving,
    until,
)

from duetime.http import server_connection
from duetime.http.connection_limits import HEALTH_CONNECTIONS_MAX, address_of
from duetime.http.messages import Request, Response


async def test_more_connections_in_use_than_allowed_get_an_error() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        if request.path == "/p":
            started.set()
            await go_on.wait()
        return Response(200, request.body)

    async with serving(handler, connections_max=1) as server, connected(server) as (reader, writer):
        writer.write(post(b"first"))
        await started.wait()
        status, headers, _ = await ask(server, post(b"second"))
        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        status, headers, _ = await ask(server, b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n")
        assert (status, headers["connection"]) == (200, "close")
        go_on.set()
        assert (await read_answer(reader))[2] == b"first"


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: h\r\n\r\n"


async def test_connections_without_a_request_are_closed_first_and_then_idle_ones() -> None:
    async with (
        serving(admit=by_token, connections_max=3) as server,
        connected(server) as (idle, idle_writer),
        connected(server) as (silent, _),
        connected(server) as (half, half_writer),
        AsyncExitStack() as stack,
    ):
        idle_writer.write(post(b"", "/p", "authorization: a"))
        assert (await read_answer(idle))[0] == 200
        half_writer.write(b"POST /p HT")
        await until(lambda: len(server.connections) == 3)
        for known, closed in enumerate((silent, half, idle), start=1):
            _, writer = await stack.enter_async_context(connected(server))
            writer.write(post(b"x" * 20, "/p", "authorization: b")[:-1])  # it is being received: not idle
            assert await asyncio.wait_for(closed.read(), 10) == b""
            await until(lambda known=known: [each.tenant for each in server.connections].count("b") == known)  # type: ignore[misc]
        assert len(server.connections) == 3
        # All are in use.
        assert (await ask(server, post(b"", "/p", "authorization: c")))[0] == 503
        assert (await ask(server, HEALTH))[0] == 200


async def test_as_many_silent_connections_as_allowed_stop_nobody() -> None:
    async with serving(admit=by_token, connections_max=200) as server, AsyncExitStack() as stack:
        for _ in range(300):
            await stack.enter_async_context(connected(server))
        assert (await ask(server, HEALTH))[0] == 200
        assert (await ask(server, post(b"hello", "/p", "authorization: a")))[2] == b"POST /p hello"
        assert len(server.connections) <= 200


async def test_connections_for_health_are_few_and_the_oldest_makes_room() -> None:
    async with serving(admit=by_token, connections_max=1) as server, connected(server) as (_, writer):
        writer.write(head(10, "authorization: a"))
        await until(lambda: not server.limits.strangers)
        async with AsyncExitStack() as stack:
            for _ in range(HEALTH_CONNECTIONS_MAX + 50):
                await stack.enter_async_context(connected(server))
            await until(lambda: len(server.limits.for_health) == HEALTH_CONNECTIONS_MAX)
            assert (await ask(server, HEALTH))[0] == 200
            assert len(server.connections) <= 1 + HEALTH_CONNECTIONS_MAX


async def test_one_address_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["a", "a", "a", "b", "a"]
    monkeypatch.setattr(server_connection, "address_of", lambda peer: addresses.pop(0))
    async with (
        serving(admit=by_token, connections_per_address_max=2) as server,
        connected(server) as (first, _),
        connected(server) as (_, second),
    ):
        second.write(head(10, "authorization: t"))
        await until(lambda: len(server.limits.strangers) == 1)
        async with connected(server) as (_, third), connected(server) as (_, _other):
            assert await asyncio.wait_for(first.read(), 10) == b""  # it made room
            third.write(head(10, "authorization: t"))
            await until(lambda: len(server.limits.strangers) == 1)
            assert (await ask(server, post(b"", "/p", "authorization: t")))[0] == 503
        assert len(server.connections) <= 4


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        (("127.0.0.1", 1), ""),
        (("::1", 1, 0, 0), ""),
        (("10.0.0.7", 1), "10.0.0.7"),
        (("2001:db8:1:2:3:4:5:6", 1, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 1, 0, 2), "fe80::/64"),
        (None, ""),
    ],
)
def test_the_address_whose_connections_are_counted(peer: tuple[Any, ...] | None, address: str) -> None:
    assert address_of(peer) == address


@on_uvloop_too(globals())
def test_the_same_holds_on_uvloop(scenario: Scenario) -> None:
    run_on_uvloop(scenario)
