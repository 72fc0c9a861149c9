"""One connection of the HTTP server: requests and answers, spoken over real sockets."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct

import pytest
from served import Scenario, ask, connected, on_uvloop_too, post, read_answer, run_on_uvloop, serving

from duetime.http import server as http_server
from duetime.http import server_connection
from duetime.http.messages import Request, Response


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


async def test_the_size_of_a_body_is_counted_for_each_request_of_a_connection() -> None:
    async with serving(body_bytes_max=10) as server, connected(server) as (reader, writer):
        for _ in range(3):
            writer.write(post(b"12345678"))
            assert (await read_answer(reader))[::2] == (200, b"POST /p 12345678")
        chunked = "POST /p HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n8\r\n12345678\r\n0\r\n\r\n"
        for _ in range(3):
            writer.write(chunked.encode())
            assert (await read_answer(reader))[::2] == (200, b"POST /p 12345678")


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


async def test_a_pipelined_request_for_an_upgrade_is_refused() -> None:
    """One call deeper for each of them: 250 KiB of them stopped the event loop for a third of a second."""
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(post(b"", "/p", "connection: upgrade", "upgrade: h2c") * 1_000)
        assert [(await read_answer(reader))[0] for _ in range(2)] == [200, 400]
        assert not server.busy


async def test_a_head_is_not_read_beyond_its_limit_even_if_one_packet_has_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal headers are joined, which takes time by the square of their number."""
    longest = 0
    original = server_connection.Connection.on_header

    def on_header(connection: server_connection.Connection, name: bytes, value: bytes) -> None:
        nonlocal longest
        longest = max(longest, connection._head_bytes)
        original(connection, name, value)

    monkeypatch.setattr(server_connection.Connection, "on_header", on_header)
    async with serving() as server:
        assert (await ask(server, b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 62_000))[0] == 431
    assert longest <= server_connection.HEAD_BYTES_MAX


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


@on_uvloop_too(globals())
def test_the_same_holds_on_uvloop(scenario: Scenario) -> None:
    run_on_uvloop(scenario)
