"""The sockets of the HTTP client: a limit, idle connections that make room, and a shortage that is told apart from a
target that cannot be reached."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
import uvloop
from open_files import no_more_files
from raw_server import OK, Server, answering, serving, silent

from duetime.errors import HttpError, Shortage, Unreachable
from duetime.http.client import HttpClient, parse_target
from duetime.http.connect_errors import is_shortage, is_shortage_of_connecting

# Every test runs on both loops.
pytestmark = pytest.mark.filterwarnings('ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture(params=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    return uvloop.EventLoopPolicy() if request.param == "uvloop" else asyncio.DefaultEventLoopPolicy()


async def to_loopback(host: str, port: int, owner: str) -> Sequence[str]:
    return ["127.0.0.1"]


@pytest.fixture
async def client() -> AsyncIterator[HttpClient]:
    client = HttpClient(resolve=to_loopback)
    yield client
    await client.close()


async def post(client: HttpClient, server: Server) -> int:
    return (await client.request("POST", server.url, timeout_ms=20_000)).status


def never_called() -> bytes:
    raise AssertionError("nothing may be sent")


async def test_without_a_file_descriptor_a_call_ends_with_a_shortage_before_anything_begins(client: HttpClient) -> None:
    async with answering(OK) as server:
        with no_more_files(), pytest.raises(Shortage, match="no socket for a call: Too many open files") as caught:
            await client.send(parse_target(server.url), never_called, timeout_ms=5_000)
        assert not caught.value.sent
        assert client._sockets == 0
        assert not client._origins
        assert await post(client, server) == 200


async def test_a_name_that_cannot_be_looked_up_for_lack_of_a_descriptor_is_a_shortage() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        raise OSError(errno.EMFILE, "Too many open files")

    client = HttpClient(resolve=resolve)
    with pytest.raises(Shortage, match=r"cannot look up a\.test: Too many open files"):
        await client.send(parse_target("http://a.test/"), never_called, timeout_ms=5_000)
    await client.close()


async def test_without_a_file_descriptor_idle_connections_make_room(client: HttpClient) -> None:
    async with answering(OK) as one, answering(OK) as two:
        await asyncio.gather(*(post(client, one) for _ in range(4)))
        with no_more_files():
            assert await post(client, two) == 200
        assert one.connections == 4
        assert await post(client, one) == 200
        assert client._sockets == len(client._connections)


async def test_calls_use_no_more_sockets_than_the_limit_and_others_end_with_a_shortage() -> None:
    client = HttpClient(sockets_max=2)
    async with serving(silent) as server:
        calls = [asyncio.create_task(post(client, server)) for _ in range(2)]
        while sum(connection.busy for connection in client._connections) < 2:
            await asyncio.sleep(0)
        for _ in range(3):
            with pytest.raises(Shortage, match="all 2 sockets for calls are in use"):
                await client.send(parse_target(server.url), never_called, timeout_ms=5_000)
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        async with answering(OK) as other:
            async with asyncio.timeout(10):
                while client._sockets > 1:
                    await asyncio.sleep(0)
            assert await post(client, other) == 200
        await client.close()
        await asyncio.gather(*calls, return_exceptions=True)
    assert client._sockets == 0


async def test_at_the_limit_of_sockets_the_connection_that_is_idle_for_longest_makes_room() -> None:
    client = HttpClient(sockets_max=3)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(answering(OK)) for _ in range(4)]
        for server in servers:
            assert await post(client, server) == 200
        assert client._sockets == 3
        for server in servers[1:]:
            assert await post(client, server) == 200
        assert [server.connections for server in servers] == [1, 1, 1, 1]
        assert await post(client, servers[0]) == 200
        assert servers[0].connections == 2
        await client.close()


async def test_many_calls_at_once_stay_below_the_limit_of_sockets() -> None:
    client = HttpClient(sockets_max=5)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(answering(OK)) for _ in range(20)]
        for start in (0, 5, 10, 15):  # each time the five connections of before are idle
            group = servers[start : start + 5]
            assert await asyncio.gather(*(post(client, server) for server in group)) == [200] * 5
            assert client._sockets <= 5
        await client.close()


async def test_a_shortage_when_a_request_is_repeated_leaves_unknown_whether_it_was_sent() -> None:
    """The reused connection was closed without an answer, and there is no descriptor for a new one."""
    client = HttpClient()

    async def second_closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)
        client._sockets_max = 0

    async with serving(second_closes) as server:
        assert await post(client, server) == 200
        with pytest.raises(Shortage) as caught:
            await post(client, server)
        assert caught.value.sent
        await client.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://127.0.0.1:{closed}/", "connection refused"),
        ("http://nowhere.invalid/", "cannot resolve nowhere.invalid"),
        ("https://127.0.0.1:{silent}/", "connect timeout"),
        ("https://127.0.0.1:{plain}/", "TLS: "),
    ],
)
async def test_a_target_without_contact_is_unreachable(url: str, reason: str) -> None:
    client = HttpClient(connect_timeout_ms=300)
    closed = socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with serving(silent) as hanging, serving(plain) as other:
        target = parse_target(url.format(closed=port, silent=hanging.port, plain=other.port))
        with pytest.raises(Unreachable, match=reason) as caught:
            await client.send(target, never_called, timeout_ms=20_000)
        assert not caught.value.sent
        await client.close()


async def test_after_the_connection_was_made_a_failure_is_of_neither_kind(client: HttpClient) -> None:
    async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)

    async with serving(closes) as server:
        with pytest.raises(HttpError, match="connection closed before the answer") as caught:
            await post(client, server)
        assert not isinstance(caught.value, Shortage | Unreachable)


async def test_the_owner_of_a_call_is_passed_to_the_resolver() -> None:
    owners = []

    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        owners.append(owner)
        return ["127.0.0.1"]

    client = HttpClient(resolve=resolve)
    async with answering(OK) as server:
        target = parse_target(server.url.replace("127.0.0.1", "a.test"))
        await client.send(
            target, lambda: b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", timeout_ms=5_000, owner="shop"
        )
        await client.close()
    assert owners == ["shop"]


def test_no_local_port_is_a_shortage_but_no_local_address_of_that_kind_is_not() -> None:
    no_address = OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
    assert is_shortage_of_connecting(no_address, "127.0.0.1")
    assert not is_shortage_of_connecting(no_address, "fe80::1"), "without a zone nothing can be sent there"
    with no_more_files():
        assert is_shortage_of_connecting(no_address, "127.0.0.1")


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_what_this_machine_is_short_of_is_no_failure_of_the_target(number: int) -> None:
    assert is_shortage(OSError(number, "x"))
    assert is_shortage_of_connecting(OSError(number, "x"), "127.0.0.1")


def test_other_errors_are_failures_of_the_target() -> None:
    for number in (errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT):
        assert not is_shortage_of_connecting(OSError(number, "x"), "127.0.0.1")
    assert not is_shortage(socket.gaierror(socket.EAI_NONAME, "x"))
    assert is_shortage(socket.gaierror(socket.EAI_MEMORY, "x"))
