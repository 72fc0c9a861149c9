"""The HTTP server, spoken to over real sockets."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import struct
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duetime.http import server as http_server
from duetime.http.server import HttpServer, Request, Response, serve_http

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter


async def echo(request: Request) -> Response:
    head = f"{request.method} {request.path} ".encode()
    return Response(200, head + request.body, b"text/plain")


@asynccontextmanager
async def serving(
    handler: Callable[[Request], Awaitable[Response]] = echo,
    *,
    body_bytes_max: int = 100_000,
    connections_max: int = 100,
    idle_timeout_ms: int = 60_000,
) -> AsyncIterator[HttpServer]:
    server = await serve_http(
        handler,
        "127.0.0.1",
        0,
        body_bytes_max=body_bytes_max,
        connections_max=connections_max,
        idle_timeout_ms=idle_timeout_ms,
    )
    try:
        yield server
    finally:
        await server.close(0)


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_answer(reader: Reader, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
    status_line, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    size = 0 if head_only else int(headers.get("content-length", "0"))
    return int(status_line.split()[1]), headers, await asyncio.wait_for(reader.readexactly(size), 10)


async def ask(server: HttpServer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await read_answer(reader)


def post(body: bytes = b"", path: str = "/p", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: h", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


async def test_a_request_is_answered_with_its_length_type_and_date() -> None:
    async with serving() as server:
        status, headers, body = await ask(server, post(b"hello", "/a/b?c=d&e"))
    assert status == 200
    assert body == b"POST /a/b hello"
    assert headers["content-type"] == "text/plain"
    assert headers["connection"] == "keep-alive"
    assert headers["date"].endswith(" GMT")


async def test_a_connection_serves_many_requests() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        for n in range(50):
            writer.write(post(b"%d" % n))
            assert (await read_answer(reader))[2] == b"POST /p %d" % n


async def test_a_request_that_arrives_byte_by_byte_is_one_request() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        for n in post(b"slow", "/very/slow", "x-header: value"):
            writer.write(bytes([n]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_answer(reader))[2] == b"POST /very/slow slow"


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    running: list[str] = []

    async def handler(request: Request) -> Response:
        running.append(request.path)
        assert len(running) == 1
        # The first ones take longest: without ordering, later answers would be sent first.
        for _ in range(50 - int(request.path[1:])):
            await asyncio.sleep(0)
        running.remove(request.path)
        return Response(200, request.path.encode())

    async with serving(handler) as server, connected(server) as (reader, writer):
        writer.write(b"".join(post(b"x" * n, f"/{n}") for n in range(50)))
        answers = [(await read_answer(reader))[2] for _ in range(50)]
    assert answers == [f"/{n}".encode() for n in range(50)]


async def test_a_chunked_body_is_put_together() -> None:
    data = (
        b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n"
        b"5\r\nhello\r\n1;ext=1\r\n \r\n5\r\nworld\r\n0\r\ntrailer: x\r\n\r\n"
    )
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(data + post(b"next"))
        assert (await read_answer(reader))[2] == b"POST /p hello world"
        assert (await read_answer(reader))[2] == b"POST /p next"


async def test_expect_100_continue_is_answered_before_the_body_comes() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        whole = post(b"body", "/p", "expect: 100-continue")
        writer.write(whole[:-4])
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"body")
        assert (await read_answer(reader))[2] == b"POST /p body"


async def test_a_body_announced_too_large_is_refused_before_it_is_sent() -> None:
    async with serving(body_bytes_max=10) as server, connected(server) as (reader, writer):
        writer.write(post(b"x" * 11, "/p", "expect: 100-continue")[:-11])
        status, headers, body = await read_answer(reader)
        assert status == 413
        assert headers["connection"] == "close"
        assert headers["content-type"] == "application/problem+json"
        assert b'"code":"too_large"' in body
        assert await reader.read() == b""


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_refusal_reaches_a_client_that_is_still_sending(chunked: bool) -> None:
    async with serving(body_bytes_max=1_000) as server, connected(server) as (reader, writer):
        megabytes = 4 * 1024 * 1024
        if chunked:
            writer.write(b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n" % megabytes)
        else:
            writer.write(b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: %d\r\n\r\n" % megabytes)
        for _ in range(megabytes // 65_536):
            writer.write(b"x" * 65_536)
            await writer.drain()  # a reset would raise here, or hide the answer below
        assert (await read_answer(reader))[0] == 413
        assert await reader.read() == b""


async def test_head_is_answered_without_a_body() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"HEAD /p HTTP/1.1\r\nhost: h\r\n\r\n")
        status, headers, _ = await read_answer(reader, head_only=True)
        assert (status, headers["content-length"]) == (200, "8")
        writer.write(post(b"next"))
        assert (await read_answer(reader))[2] == b"POST /p next"


@pytest.mark.parametrize(
    ("version", "header", "stays"),
    [
        ("1.1", "", True),
        ("1.1", "connection: close\r\n", False),
        ("1.0", "", False),
        ("1.0", "connection: keep-alive\r\n", True),
    ],
)
async def test_the_client_says_whether_the_connection_stays(version: str, header: str, stays: bool) -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(f"GET / HTTP/{version}\r\nhost: h\r\n{header}\r\n".encode())
        _, headers, _ = await read_answer(reader)
        assert headers["connection"] == ("keep-alive" if stays else "close")
        if stays:
            writer.write(post(b"again"))
            assert (await read_answer(reader))[0] == 200
        else:
            assert await asyncio.wait_for(reader.read(), 10) == b""


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"POST /p HTTP/1.1\r\n\r\n",  # no host
        b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nhello",
        b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: -1\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost: h\r\ncontent-length: ten\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: gzip\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost: h\r\nbad header: x\r\n\r\n",
        b"POST /p HTTP/1.1\r\nhost : h\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS to a plain port
    ],
)
async def test_what_is_not_a_request_is_refused_and_the_connection_closed(data: bytes) -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(data)
        status, headers, _ = await read_answer(reader)
        assert (status, headers["connection"]) == (400, "close")
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_good_requests_before_a_bad_one_are_answered_first() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(post(b"good") + b"nonsense\r\n\r\n" + post(b"never"))
        assert (await read_answer(reader))[2] == b"POST /p good"
        assert (await read_answer(reader))[0] == 400
        assert await asyncio.wait_for(reader.read(), 10) == b""


@pytest.mark.parametrize("lines", [["x: " + "v" * 17_000], [f"x-{n}: {'v' * 100}" for n in range(200)]])
async def test_a_head_over_16_kib_is_refused(lines: list[str]) -> None:
    async with serving() as server:
        assert (await ask(server, post(b"", "/p", *lines)))[0] == 431


async def test_a_head_that_never_ends_is_refused_without_being_kept() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"POST /p HTTP/1.1\r\nhost: h\r\nx: ")
        for _ in range(40):
            writer.write(b"v" * 1_000)
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_answer(reader))[0] == 431


async def test_a_head_of_almost_16_kib_is_fine_however_it_arrives() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        data = post(b"", "/p", *[f"x-{n}: {'v' * 100}" for n in range(140)])
        for start in range(0, len(data), 500):
            writer.write(data[start : start + 500])
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_answer(reader))[0] == 200


async def test_an_upgrade_is_ignored() -> None:
    async with serving() as server:
        status, _, body = await ask(server, post(b"hi", "/p", "connection: upgrade", "upgrade: h2c"))
    assert (status, body) == (200, b"POST /p hi")


async def test_a_tunnel_is_refused() -> None:
    async with serving() as server:
        assert (await ask(server, b"CONNECT example.org:443 HTTP/1.1\r\nhost: h\r\n\r\n"))[0] == 405


async def test_a_target_in_absolute_form_is_understood() -> None:
    async with serving() as server:
        data = b"GET http://example.org:80/path?q=1 HTTP/1.1\r\nhost: h\r\n\r\n"
        assert (await ask(server, data))[2] == b"GET /path "


async def test_headers_are_found_by_lower_case_name_and_joined() -> None:
    seen: list[Request] = []

    async def handler(request: Request) -> Response:
        seen.append(request)
        return Response()

    async with serving(handler) as server:
        await ask(server, post(b"", "/p", "X-One: 1", "X-Two: a", "x-two: b"))
    assert seen[0].header(b"x-one") == "1"
    assert seen[0].header(b"x-two") == "a, b"
    assert seen[0].header(b"x-three") is None
    assert seen[0].headers["host"] == "h"


async def test_a_handler_that_fails_is_a_500_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: Request) -> Response:
        raise RuntimeError("a defect")

    caplog.set_level(logging.ERROR, "duetime.http")
    logging.getLogger("duetime").propagate = True
    async with serving(handler) as server, connected(server) as (reader, writer):
        for _ in range(2):  # and the connection lives on
            writer.write(post())
            status, headers, body = await read_answer(reader)
            assert (status, headers["content-type"]) == (500, "application/problem+json")
            assert b"a defect" not in body
    assert "a defect" in caplog.text


async def test_a_client_that_disconnects_does_not_stop_its_request() -> None:
    started, go_on, finished = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        started.set()
        await go_on.wait()
        finished.set()
        return Response()

    async with serving(handler) as server:
        async with connected(server) as (_, writer):
            writer.write(post())
            await started.wait()
            # With a reset, so that the server knows: a mere close may be that of one half.
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        while server.connections:
            await asyncio.sleep(0)
        go_on.set()
        await asyncio.wait_for(finished.wait(), 10)


async def test_a_client_that_only_closed_its_sending_half_gets_its_answer() -> None:
    go_on = asyncio.Event()

    async def handler(request: Request) -> Response:
        await go_on.wait()
        return Response(200, b"late")

    async with serving(handler) as server, connected(server) as (reader, writer):
        writer.write(post())
        writer.write_eof()
        while not server.busy:
            await asyncio.sleep(0)
        go_on.set()
        assert (await read_answer(reader))[2] == b"late"
        assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_client_that_does_not_read_stops_being_served() -> None:
    handled = 0

    async def handler(request: Request) -> Response:
        nonlocal handled
        handled += 1
        return Response(200, b"x" * 1_000_000)

    async with serving(handler) as server, connected(server) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post() * 200)
        before = -1
        while handled != before or not handled:
            before = handled
            for _ in range(100):
                await asyncio.sleep(0)
        assert handled < 200
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(200):
            await read_answer(reader)
    assert handled == 200


async def test_more_connections_than_allowed_get_an_error() -> None:
    async with serving(connections_max=1) as server, connected(server) as (reader, writer):
        writer.write(post(b"first"))
        assert (await read_answer(reader))[0] == 200
        async with connected(server) as (other_reader, _):
            status, headers, _ = await read_answer(other_reader)
            assert (status, headers["connection"]) == (503, "close")
        writer.write(post(b"still here"))
        assert (await read_answer(reader))[0] == 200


async def test_an_idle_connection_is_closed_and_a_slow_request_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.01)
    async with serving(idle_timeout_ms=50) as server:
        async with connected(server) as (reader, _):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        async with connected(server) as (reader, writer):
            writer.write(post(b"x" * 100)[:-50])
            assert (await read_answer(reader))[0] == 408
            assert await asyncio.wait_for(reader.read(), 10) == b""


async def test_a_request_that_is_being_handled_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.001)

    async def handler(request: Request) -> Response:
        swept = server.sweeps + 30
        while server.sweeps < swept:
            await asyncio.sleep(0.001)
        return Response(200, b"done")

    async with serving(handler, idle_timeout_ms=5) as server:
        assert (await ask(server, post()))[2] == b"done"


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


SCENARIOS = [
    test
    for name, test in list(globals().items())
    if name.startswith("test_") and inspect.iscoroutinefunction(test) and not inspect.signature(test).parameters
]


@pytest.mark.skipif(sys.platform == "win32", reason="there is no uvloop on Windows")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda test: test.__name__)
def test_the_same_holds_on_uvloop(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Its transports differ from asyncio's in small ways."""
    import uvloop

    uvloop.run(scenario())
