"""The HTTP server: how it accepts connections, and how it closes. Over real sockets."""

from __future__ import annotations

import asyncio

import pytest
from served import Scenario, connected, on_uvloop_too, post, read_answer, run_on_uvloop, serving

from duetime.http.messages import Request, Response


async def test_closing_lets_running_requests_finish_and_closes_idle_connections() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return Response(200, b"finished")

    async with serving(handler) as server, connected(server) as (idle, _), connected(server) as (busy, writer):
        writer.write(post() + post())
        await started.wait()
        closing = asyncio.create_task(server.close(10_000))
        assert await asyncio.wait_for(idle.read(), 10) == b""
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert not closing.done()
        go_on.set()
        _, headers, body = await read_answer(busy)
        assert (body, headers["connection"]) == (b"finished", "close")
        assert await asyncio.wait_for(busy.read(), 10) == b""
        writer.close()
        await asyncio.wait_for(closing, 10)
        assert not server.connections


async def test_closing_does_not_wait_longer_than_the_drain_time() -> None:
    started = asyncio.Event()

    async def handler(request: Request) -> Response:
        started.set()
        await asyncio.Event().wait()
        return Response()

    async with serving(handler) as server, connected(server) as (_reader, writer):
        writer.write(post())
        await started.wait()
        await asyncio.wait_for(server.close(10), 10)
        assert not server.connections
        assert not server.busy


@on_uvloop_too(globals())
def test_the_same_holds_on_uvloop(scenario: Scenario) -> None:
    run_on_uvloop(scenario)
