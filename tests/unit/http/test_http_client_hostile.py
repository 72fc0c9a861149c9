"""The HTTP client against servers that mean harm, are broken, or go away."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from unittest.mock import Mock

import pytest
import uvloop
from raw_server import OK, Server, answering, serving, silent

from duetime.http.client import Answer, HttpClient, HttpError
from duetime.http.client_connection import Connection, Origin
from duetime.http.urls import parse_target, request_head

# Every test runs on both loops. The plugin's successor to this fixture is a hook for the whole test suite only.
pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient()
    yield client
    await client.close()


async def post(client: HttpClient, server: Server, *, timeout_ms: int = 5_000, body: bytes = b"{}") -> Answer:
    return await client.request("POST", server.url, {"x-one": "1"}, body, timeout_ms=timeout_ms)


async def failure(client: HttpClient, server: Server, *, timeout_ms: int = 5_000) -> HttpError:
    with pytest.raises(HttpError) as caught:
        await post(client, server, timeout_ms=timeout_ms)
    return caught.value


# --- hostile answers -----------------------------------------------------------------------------


async def endless(writer: asyncio.StreamWriter, piece: bytes) -> None:
    while True:
        writer.write(piece)
        await writer.drain()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 4096),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000000\r\n\r\n", b"x" * 4096),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"40\r\n" + b"x" * 64 + b"\r\n"),
    ],
    ids=["until close", "a length of a terabyte", "chunked", "chunks of 64 bytes"],
)
async def test_case_13_an_endless_body_is_cut_off_and_the_status_decides(
    client: HttpClient, head: bytes, piece: bytes
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(head)
        await endless(writer, piece)

    async with serving(handler) as server:
        answer = await post(client, server)
        assert (answer.status, answer.truncated) == (200, True)
        assert set(answer.body) == {ord("x")}
        assert len(answer.body) == 64 * 1024
        await post(client, server)
        assert server.connections == 2


async def test_an_answer_in_more_and_smaller_pieces_than_are_worth_their_time_is_malformed(client: HttpClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        if number == 1:  # as many as are free
            writer.write(b"1;" + b"e" * 16_384 + b"\r\nx\r\n" + b"1\r\nx\r\n" * 1_023)
            writer.write(b"0\r\n\r\n")
            await reader.read()
        await endless(writer, b"1\r\nx\r\n" * 100)

    async with serving(handler) as server:
        assert (await post(client, server)).body == b"x" * 1_024
        for connection in client._connections:
            connection.abort()
        error = await failure(client, server)
        assert (error.reason, error.sent) == ("malformed answer: a body in pieces of less than 64 bytes", True)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"%x:\r\n" % n for n in range(36_000)), "more than 16 KiB of headers"),
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 40_000,
            "a body in pieces of less than 64 bytes",
        ),
    ],
    ids=["headers", "chunks"],
)
async def test_a_large_read_is_parsed_only_as_far_as_its_limits_allow(
    client: HttpClient, data: bytes, reason: str
) -> None:
    async with serving(silent) as server:
        call = asyncio.create_task(post(client, server))
        while not any(connection.busy for connection in client._connections):
            await asyncio.sleep(0)
        (connection,) = client._connections
        connection.data_received(data)
        with pytest.raises(HttpError, match=f"malformed answer: {reason}"):
            await call
        assert len(data) > 200_000
        assert connection._wire_bytes <= 2 * 16_384


async def test_what_follows_the_end_of_an_answer_in_a_large_read_is_no_answer_to_the_next_call(
    client: HttpClient,
) -> None:
    async with serving(silent) as server:
        call = asyncio.create_task(post(client, server))
        while not any(connection.busy for connection in client._connections):
            await asyncio.sleep(0)
        (connection,) = client._connections
        whole = b"HTTP/1.1 200 OK\r\ncontent-length: 16300\r\n\r\n"
        whole += b"x" * 16_300
        connection.data_received(whole.ljust(16_384, b"\r") + OK)
        assert (await call).body == b"x" * 16_300
        assert connection.closed


async def test_endless_chunk_extensions_and_trailers_count_as_an_endless_body(client: HttpClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1")
        if number == 1:
            writer.write(b";")
            await endless(writer, b"e" * 4096)
        writer.write(b"\r\nx\r\n0\r\n")
        await endless(writer, b"t: " + b"e" * 4000 + b"\r\n")

    async with serving(handler) as server:
        for _ in range(2):
            answer = await post(client, server)
            assert (answer.status, answer.truncated) == (200, True)


@pytest.mark.parametrize(
    ("head", "tail"),
    [
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10001\r\n", b"\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b""),
    ],
    ids=["with a length", "chunked", "until close"],
)
async def test_an_answer_over_the_limit_is_not_waited_for(client: HttpClient, head: bytes, tail: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(head + b"x" * 65_537 + tail)
        await reader.read()  # and no more of it comes

    async with serving(handler) as server:
        answer = await post(client, server, timeout_ms=20_000)
        assert (len(answer.body), answer.truncated) == (65_536, True)


async def test_a_body_of_exactly_the_limit_is_not_cut_before_its_end_is_known(client: HttpClient) -> None:
    limit_is_read = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n10000\r\n" + b"x" * 65_536 + b"\r\n")
        await limit_is_read.wait()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with serving(handler) as server:
        call = asyncio.create_task(post(client, server, timeout_ms=20_000))
        while not any(sum(map(len, connection._body)) == 65_536 for connection in client._connections):
            assert not call.done()
            await asyncio.sleep(0.001)
        limit_is_read.set()
        answer = await call
        assert (len(answer.body), answer.truncated) == (65_536, False)


async def test_headers_of_one_answer_are_not_those_of_the_next(client: HttpClient) -> None:
    first = b"HTTP/1.1 200 OK\r\nretry-after: 7\r\ncontent-length: 2\r\n\r\nok"
    async with answering(first, OK) as server:
        assert (await post(client, server)).header("retry-after") == "7"
        assert (await post(client, server)).header("retry-after") is None
        assert server.connections == 1


async def test_after_a_head_the_connection_is_not_used_again(client: HttpClient) -> None:
    """Some servers send a body all the same."""
    async with answering(OK, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", OK) as server:
        await post(client, server)
        assert (await client.request("HEAD", server.url, timeout_ms=5_000)).status == 200
        assert (await post(client, server)).body == b"ok"
        assert server.connections == 2


async def test_an_interim_answer_to_a_head_is_not_its_answer(client: HttpClient) -> None:
    async with answering(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\nx-a: 1\r\n\r\n") as server:
        answer = await client.request("HEAD", server.url, timeout_ms=5_000)
        assert (answer.status, answer.header("x-a")) == (204, "1")


async def test_a_second_try_that_cannot_connect_was_sent_all_the_same() -> None:
    """The first try was sent on a connection that closed: it is unknown whether it was carried out."""
    found: list[Sequence[str] | OSError] = [["127.0.0.1"], socket.gaierror(socket.EAI_AGAIN, "Try again")]

    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        answer = found.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)  # taken, and dropped without a word

    client = HttpClient(resolve=resolve)
    async with serving(handler) as server:
        await post(client, server)
        error = await failure(client, server)
        assert error.sent
        assert "cannot resolve" in error.reason
        assert (len(server.requests), found) == (2, [])
    await client.close()


async def test_a_body_of_exactly_the_limit_is_whole() -> None:
    client = HttpClient(body_bytes_max=1_000)
    answers = [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % n + b"x" * n for n in (1_000, 1_001)]
    async with answering(*answers) as server:
        whole, cut = await post(client, server), await post(client, server)
        assert (len(whole.body), whole.truncated) == (1_000, False)
        assert (len(cut.body), cut.truncated) == (1_000, True)
        assert server.connections == 1
        await post(client, server)
        assert server.connections == 2  # one that had to be cut is not used again
        await client.close()


@pytest.mark.parametrize(
    "piece",
    [b"x-filler: " + b"x" * 1000 + b"\r\n", b"x" * 4096, b"\r\n\r\nHTTP/1.1 100 Continue\r\na: b"],
    ids=["many headers", "one header", "endless 100 Continue"],
)
async def test_endless_headers_are_an_error(client: HttpClient, piece: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(b"HTTP/1.1 100 OK\r\na: ")
        await endless(writer, piece)

    async with serving(handler) as server:
        error = await failure(client, server)
        assert (error.reason, error.sent) == ("malformed answer: more than 16 KiB of headers", True)


async def test_headers_beyond_the_limit_are_not_parsed_even_if_one_packet_has_all_of_them() -> None:
    """To parse 36,000 of them takes milliseconds; receivers may send so many at the same time on each connection."""
    connection = Connection(HttpClient(), Origin("http://h"))
    connection.connection_made(Mock(spec=asyncio.Transport))
    waiter = connection.start(b"", 1e9, 1_000, False)
    connection.data_received(b"HTTP/1.1 500 x\r\n" + b"".join(b"%x:\r\n" % n for n in range(36_000)) + b"\r\n")
    assert "16 KiB of headers" in str(waiter.exception())
    assert len(connection._headers) < 10_000


async def test_a_large_block_of_headers_in_one_piece_is_an_error(client: HttpClient) -> None:
    filler = b"".join(b"x-%d: %s\r\n" % (n, b"y" * 100) for n in range(400))
    async with answering(b"HTTP/1.1 200 OK\r\n" + filler + b"content-length: 100000\r\n\r\n") as server:
        assert "16 KiB of headers" in (await failure(client, server)).reason


async def test_case_14_a_compressed_answer_is_not_decoded(client: HttpClient) -> None:
    bomb = b"\x1f\x8b" + b"\x00" * 100
    raw = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 102\r\n\r\n" + bomb
    async with answering(raw) as server:
        assert (await post(client, server)).body == bomb
        assert b"accept-encoding: identity\r\n" in server.requests[0]


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/3.7 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n\x00\x01",
        b"\x15\x03\x01\x00\x02\x02\x46",
    ],
)
async def test_a_malformed_answer_is_an_error_that_says_so(client: HttpClient, raw: bytes) -> None:
    async with answering(raw) as server:
        error = await failure(client, server)
        assert error.reason.startswith("malformed answer: ")
        assert error.sent


@pytest.mark.parametrize("garbage", [b"garbage", OK, b"HTTP/1.1 2", b"\x00"])
async def test_what_follows_an_answer_never_becomes_the_answer_to_another_call(
    client: HttpClient, garbage: bytes
) -> None:
    async with answering(OK + garbage) as server:
        for number in range(1, 4):
            answer = await post(client, server)
            assert (answer.status, answer.body) == (200, b"ok")
            assert server.connections == number


@pytest.mark.parametrize(
    "forged",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged",
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        b"\r",
    ],
    ids=["whole", "its beginning", "an interim answer", "one byte"],
)
async def test_an_answer_before_any_request_breaks_the_connection(client: HttpClient, forged: bytes) -> None:
    late = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        if number == 1:
            await writer.drain()
            await late.wait()
            writer.write(forged)
        await reader.read()

    async with serving(handler) as server:
        await post(client, server)
        late.set()
        async with asyncio.timeout(10):
            while client._connections:
                await asyncio.sleep(0.001)
        assert (await post(client, server)).body == b"ok"
        assert server.connections == 2


# --- connections that break ----------------------------------------------------------------------


async def test_the_keep_alive_race_is_repaired_on_a_fresh_connection_once(client: HttpClient) -> None:
    async def one_answer_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)  # taken, and dropped without a word

    begun = 0

    def begin() -> bytes:
        nonlocal begun
        begun += 1
        return request_head("POST", target, {}) + b"content-length: 0\r\n\r\n"

    async with serving(one_answer_each) as server:
        target = parse_target(server.url)
        for _ in range(3):
            answer = await client.send(target, begin, timeout_ms=5_000)
            assert answer is not None
            assert answer.status == 200
        assert server.connections == 3
        assert begun == 5, "a repeated call is stamped anew"


async def test_an_idle_connection_that_was_reset_is_not_used_again(client: HttpClient) -> None:
    both_asked = asyncio.Event()
    reset = {}

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        mine = reset[writer.get_extra_info("peername")[1]] = asyncio.Event()
        await server.read_request(reader)
        if number == 2:
            both_asked.set()
        await both_asked.wait()
        writer.write(OK)
        if number == 3:
            await reader.read()
        await mine.wait()
        # A linger time of zero makes the close a reset: there is no end of the stream before it.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(handler) as server:
        await asyncio.gather(post(client, server), post(client, server))
        (origin,) = client._origins.values()
        older, youngest = origin.idle
        assert youngest._transport is not None
        reset[youngest._transport.get_extra_info("sockname")[1]].set()
        async with asyncio.timeout(10):
            while len(client._connections) == 2:
                await asyncio.sleep(0.001)
        assert origin.idle == [older]


async def test_the_second_try_uses_a_new_connection_and_not_another_idle_one(client: HttpClient) -> None:
    """What closed one idle connection, such as a restart of the receiver, has closed the others too."""
    both_asked = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        if number == 2:
            both_asked.set()
        if number < 3:
            await both_asked.wait()
            writer.write(OK)
            await server.read_request(reader)  # taken, and dropped without a word
        else:
            writer.write(OK)
            await reader.read()

    async with serving(handler) as server:
        await asyncio.gather(post(client, server), post(client, server))
        assert (await post(client, server)).body == b"ok"
        assert (server.connections, len(server.requests)) == (3, 4)


async def test_the_race_is_repaired_under_a_cap_on_connections_too() -> None:
    client = HttpClient(connections_per_origin_max=1)

    async def one_answer_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)

    async with serving(one_answer_each) as server:
        for _ in range(3):
            assert (await post(client, server)).status == 200
        await client.close()


async def test_a_fresh_connection_closed_before_the_answer_is_an_error(client: HttpClient) -> None:
    async def rude(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)

    async with serving(rude) as server:
        error = await failure(client, server)
        assert (error.reason, error.sent) == ("connection closed before the answer", True)
        assert server.connections == 1


@pytest.mark.parametrize(
    "half",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n8\r\nhalf",
        b"HTTP/1.1 200 OK\r\nx: ",
        b"HTTP/1.1 100 Continue\r\n\r\n",
    ],
    ids=["with a length", "a Length", "between chunks", "within a chunk", "in the headers", "after an interim answer"],
)
async def test_a_connection_closed_in_the_middle_of_the_answer_is_an_error_and_not_repeated(
    client: HttpClient, half: bytes
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)
        writer.write(half)
        await writer.drain()

    async with serving(handler) as server:
        await post(client, server)
        error = await failure(client, server)
        assert error.reason == "connection closed during the answer"
        assert len(server.requests) == 2


async def test_a_body_without_a_length_whose_connection_is_reset_is_not_taken_for_whole(client: HttpClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(b'HTTP/1.1 200 OK\r\n\r\n{"ok": true, ')
        # A linger time of zero makes the close a reset.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    async with serving(handler) as server:
        error = await failure(client, server)
        assert error.sent


async def test_a_refused_connection_is_an_error_before_anything_was_sent(client: HttpClient) -> None:
    async with answering(OK) as server:
        pass
    error = await failure(client, server)
    assert error.reason == f"connection refused by 127.0.0.1:{server.port}"
    assert not error.sent


async def test_a_name_that_does_not_exist_is_an_error_before_anything_was_sent(client: HttpClient) -> None:
    with pytest.raises(HttpError, match=r"cannot resolve nowhere\.invalid: ") as caught:
        await client.request("POST", "http://nowhere.invalid/", timeout_ms=5_000)
    assert not caught.value.sent


async def test_the_next_address_is_tried_when_one_refuses_and_the_good_one_is_remembered() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    client = HttpClient(resolve=resolve)
    async with answering(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n") as server:
        target = parse_target(f"http://both.test:{server.port}/")
        for _ in range(2):
            answer = await client.request("POST", target, timeout_ms=5_000)
            assert answer.status == 200
        await client.close()
