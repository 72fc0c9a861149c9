"""What the HTTP server holds in memory of the bodies of requests. Over real sockets."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest
from served import (
    MIB,
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

from duetime.http import server as http_server
from duetime.http import server_connection
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer


def held_bytes(server: HttpServer) -> int:
    """Of bodies, as they are in memory."""
    return sum(len(each._body) for each in server.connections)


async def test_a_large_body_without_a_token_is_refused_before_it_is_sent() -> None:
    async with serving(admit=by_token) as server, connected(server) as (reader, writer):
        writer.write(head(16 * MIB))
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (401, "close")


async def test_what_refused_clients_send_is_read_up_to_a_limit_until_the_next_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_connection, "DROPPED_BYTES_MAX", 2 * MIB)
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 3_600)
    body = b"x" * 8 * MIB
    async with serving(admit=by_token) as server, AsyncExitStack() as stack:
        refused = [await stack.enter_async_context(connected(server)) for _ in range(4)]
        for reader, writer in refused:
            writer.write(head(len(body)) + body)
            assert (await read_answer(reader))[0] == 401
        await until(lambda: server.dropped_bytes > 2 * MIB)
        await until(lambda: all(each._reading_paused for each in server.connections))
        # One more read of each connection, before it is paused.
        assert server.dropped_bytes <= 2 * MIB + 4 * 256 * 1024
        assert (await ask(server, post(b"hello", "/p", "authorization: a")))[2] == b"POST /p hello"
        for connection in server.connections:
            connection.sweep()
        server.dropped_bytes = 0
        await until(lambda: server.dropped_bytes > 2 * MIB)


async def test_a_body_in_tiny_pieces_is_refused_because_each_costs_as_much_as_many_bytes() -> None:
    start = post(b"", "/p", "transfer-encoding: chunked", "authorization: a").replace(b"content-length: 0\r\n", b"")
    async with serving(admit=by_token) as server:
        async with connected(server) as (reader, writer):
            writer.write(start + b"1\r\nx\r\n" * 3_000)
            status, _, body = await read_answer(reader)
            assert (status, b"less than 64 bytes" in body) == (400, True)
        async with connected(server) as (reader, writer):  # as much in pieces of a usual size
            writer.write(start + b"1\r\nx\r\n" * 1_000 + (b"80\r\n" + b"x" * 128 + b"\r\n") * 3_000 + b"0\r\n\r\n")
            status, _, body = await read_answer(reader)
            assert (status, len(body)) == (200, len("POST /p ") + 1_000 + 128 * 3_000)


async def test_a_small_body_without_a_token_is_dropped_and_the_connection_stays() -> None:
    async with serving(admit=by_token) as server, connected(server) as (reader, writer):
        body = b"x" * 100_000
        writer.write(head(len(body)) + body[:50_000])
        await until(lambda: any(each._body_bytes for each in server.connections))
        assert held_bytes(server) == 0
        writer.write(body[50_000:])
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (401, "keep-alive")
        writer.write(post(b"hello", "/p", "authorization: a"))
        assert (await read_answer(reader))[2] == b"POST /p hello"


async def test_a_chunked_body_without_a_token_ends_the_connection_when_it_is_large() -> None:
    async with serving(admit=by_token) as server, connected(server) as (reader, writer):
        writer.write(b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"8000\r\n" + b"x" * 0x8000 + b"\r\n")
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (401, "close")
        assert held_bytes(server) == 0


async def test_nobody_without_a_token_is_asked_to_send_a_body() -> None:
    async with serving(admit=by_token) as server, connected(server) as (reader, writer):
        writer.write(head(4, "expect: 100-continue"))
        assert (await read_answer(reader))[0] == 401


async def test_the_limit_of_a_body_is_that_of_its_request() -> None:
    async def handler(request: Request) -> Response:
        return Response(200, b"%d" % len(request.body))

    def admit(request: Request) -> int:
        return 100 if request.path == "/small" else 1_000

    async with serving(handler, admit=admit) as server:
        assert (await ask(server, post(b"x" * 101, "/small")))[0] == 413
        assert (await ask(server, post(b"x" * 100, "/small")))[2] == b"100"
        assert (await ask(server, post(b"x" * 101, "/large")))[2] == b"101"


async def test_an_error_in_the_admission_is_a_500() -> None:
    def admit(request: Request) -> int:
        raise RuntimeError("broken")

    async with serving(admit=admit) as server:
        assert (await ask(server, post(b"x")))[0] == 500


async def test_slow_bodies_of_one_tenant_leave_room_for_another() -> None:
    """Twenty bodies of 1 MiB, all but their last byte: the tenant gets half of the room, the rest waits unread."""
    body = b"x" * MIB

    async with (
        serving(admit=by_token, buffered_bytes_max=8 * MIB) as server,
        AsyncExitStack() as stack,
    ):
        slow = [await stack.enter_async_context(connected(server)) for _ in range(20)]
        for _, writer in slow:
            writer.write(head(MIB, "authorization: slow") + body[:-1])
        await until(lambda: server.bodies.held == 4 * MIB and server.bodies.waiting == 16)
        answers = await asyncio.gather(*(ask(server, post(body, "/p", "authorization: other")) for _ in range(3)))
        assert [status for status, _, _ in answers] == [200, 200, 200]
        assert held_bytes(server) <= 8 * MIB
        for _, writer in slow:  # those that wait get the room of those that are answered
            writer.write(b"x")
        for reader, _ in slow:
            assert (await read_answer(reader))[0] == 200
        await until(lambda: server.bodies.held == 0)


async def test_a_request_does_not_wait_for_room_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.001)
    async with (
        serving(admit=by_token, buffered_bytes_max=MIB) as server,
        connected(server) as (_, first),
        connected(server) as (reader, second),
    ):
        first.write(head(MIB, "authorization: a"))
        await until(lambda: server.bodies.held == MIB)
        second.write(head(MIB, "authorization: b"))
        status, headers, body = await read_answer(reader)
        assert (status, headers["retry-after"]) == (429, "1")
        assert b"server.buffered_bytes_max" in body


async def test_few_requests_of_a_tenant_may_wait_for_room() -> None:
    async with serving(admit=by_token, buffered_bytes_max=MIB) as server, AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(connected(server)) for _ in range(17)]
        for _, writer in connections:
            writer.write(head(MIB, "authorization: a"))
        await until(lambda: server.bodies.waiting == 16)
        assert (await ask(server, head(MIB, "authorization: a")))[0] == 429


async def test_a_client_that_disconnects_gives_its_room_back() -> None:
    async with serving(admit=by_token, buffered_bytes_max=MIB) as server:
        async with connected(server) as (_, first), connected(server) as (_, second):
            first.write(head(MIB, "authorization: a") + b"x")
            await until(lambda: server.bodies.held == MIB)
            second.write(head(MIB, "authorization: a") + b"x")
            await until(lambda: server.bodies.waiting == 1)
        await until(lambda: server.bodies.held == 0 and server.bodies.waiting == 0)


async def test_pipelined_bodies_are_counted() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        started.set()
        await go_on.wait()
        return Response()

    async with serving(handler, admit=by_token) as server, connected(server) as (reader, writer):
        writer.write(post(b"x" * 1_000, "/p", "authorization: a") * 11)
        await started.wait()
        assert server.bodies.held == 10_000  # the first one is the only one of its connection
        go_on.set()
        for _ in range(11):
            assert (await read_answer(reader))[0] == 200
        await until(lambda: server.bodies.held == 0)


@pytest.mark.parametrize("coding", ["gzip, chunked", "chunked, chunked", "gzip", "identity, chunked"])
async def test_a_body_that_is_encoded_in_another_way_is_refused(coding: str) -> None:
    lines = f"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: {coding}\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    async with serving() as server:
        status, headers, _ = await ask(server, lines.encode())
    assert (status, headers["connection"]) == (400, "close")


@on_uvloop_too(globals())
def test_the_same_holds_on_uvloop(scenario: Scenario) -> None:
    run_on_uvloop(scenario)
