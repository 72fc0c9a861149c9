"""The HTTP client against real servers on loopback that behave well, badly, and hostilely."""

from __future__ import annotations

import asyncio
import errno
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from raw_server import OK, Server, answering, serving, silent

from duetime.errors import DeadlineTooShort, Unreachable
from duetime.http.client import Answer, HttpClient, HttpError, parse_target

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


# --- the ordinary way ----------------------------------------------------------------------------


async def test_a_request_is_written_as_asked_and_its_answer_read(client: HttpClient) -> None:
    async with answering(b'HTTP/1.1 201 Created\r\nX-Thing: A\r\nx-empty:\r\ncontent-length: 5\r\n\r\n{"a"}') as server:
        answer = await post(client, server, body=b'{"x":1}')
    assert (answer.status, answer.body, answer.truncated) == (201, b'{"a"}', False)
    assert answer.headers == {"x-thing": "A", "x-empty": "", "content-length": "5"}
    assert (
        server.requests[0]
        == (
            f"POST /hook HTTP/1.1\r\nhost: 127.0.0.1:{server.port}\r\naccept-encoding: identity\r\nx-one: 1\r\n"
            'content-length: 7\r\n\r\n{"x":1}'
        ).encode()
    )


async def test_calls_one_after_another_share_a_connection(client: HttpClient) -> None:
    async with answering(OK) as server:
        for _ in range(20):
            await post(client, server)
        assert server.connections == 1
        await asyncio.gather(*(post(client, server) for _ in range(8)))
        assert server.connections == 8
        await asyncio.gather(*(post(client, server) for _ in range(8)))
        assert server.connections == 8


async def test_connections_to_one_origin_stay_below_the_limit_and_every_call_gets_one() -> None:
    client = HttpClient(connections_per_origin_max=2)
    async with answering(OK) as server:
        answers = await asyncio.gather(*(post(client, server) for _ in range(50)))
        assert [answer.status for answer in answers] == [200] * 50
        assert server.connections == 2
        await client.close()


async def test_a_connection_that_becomes_free_goes_to_one_call_only() -> None:
    """The call that waits gets it, and no other that comes meanwhile."""
    client = HttpClient(connections_per_origin_max=1)
    asked, may_answer = asyncio.Queue[bytes](), asyncio.Semaphore(0)

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        while True:
            body = (await server.read_request(reader)).rpartition(b"\r\n\r\n")[2]
            asked.put_nowait(body)
            await may_answer.acquire()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))

    async with serving(echo) as server:
        first = asyncio.create_task(post(client, server, body=b"first"))
        assert await asked.get() == b"first"
        second = asyncio.create_task(post(client, server, body=b"second"))
        await asyncio.sleep(0)
        may_answer.release()
        assert (await first).body == b"first"
        assert await asked.get() == b"second"
        third = asyncio.create_task(post(client, server, body=b"third"))
        for _ in range(10):
            await asyncio.sleep(0)
        may_answer.release()
        assert (await second).body == b"second"
        assert await asked.get() == b"third"
        may_answer.release()
        assert (await third).body == b"third"
        assert server.connections == 1
    await client.close()


async def test_the_size_of_an_answer_is_counted_for_each_answer_of_a_connection() -> None:
    client = HttpClient(body_bytes_max=10)
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n12345678") as server:
        for _ in range(3):
            answer = await post(client, server)
            assert (answer.body, answer.truncated) == (b"12345678", False)
        assert server.connections == 1
    await client.close()


async def test_waiting_for_a_free_connection_ends_at_the_deadline_and_nothing_is_sent() -> None:
    client = HttpClient(connections_per_origin_max=1)

    async with serving(silent) as server:
        first = asyncio.create_task(post(client, server))
        await asyncio.sleep(0)
        error = await failure(client, server, timeout_ms=30)
        assert (error.reason, error.sent) == ("no free connection within 0.03 s", False)
        await client.close()
        with pytest.raises(HttpError, match="closed"):
            await first


async def test_the_next_waiting_call_replaces_a_cancelled_one() -> None:
    client = HttpClient(connections_per_origin_max=1)
    asked = asyncio.Event()

    async def first_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        while True:
            await server.read_request(reader)
            asked.set()
            if number > 1:
                writer.write(OK)

    async with serving(first_silent) as server:
        stuck, cancelled, patient = (asyncio.create_task(post(client, server)) for _ in range(3))
        await asked.wait()
        cancelled.cancel()
        stuck.cancel()
        assert (await patient).status == 200
        assert server.connections == 2
        await asyncio.gather(stuck, cancelled, return_exceptions=True)
        await client.close()


async def test_a_connection_given_to_a_call_that_was_just_cancelled_is_passed_to_the_next_one() -> None:
    client = HttpClient(connections_per_origin_max=1)
    release = client._release

    def release_and_cancel(origin: Any, connection: Any) -> None:
        release(origin, connection)
        second.cancel()  # it has got the connection, and has had no turn yet to take it

    async with answering(OK) as server:
        client._release = release_and_cancel  # type: ignore[method-assign]
        first, second, third = (asyncio.create_task(post(client, server, timeout_ms=20_000)) for _ in range(3))
        assert (await first).body == b"ok"
        with pytest.raises(asyncio.CancelledError):
            await second
        assert (await third).body == b"ok"
        assert server.connections == 1
    await client.close()


async def test_idle_connections_are_closed_after_a_while() -> None:
    client = HttpClient(idle_ms=20)
    gone = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await reader.read()
        gone.set()

    async with serving(handler) as server:
        await post(client, server)
        await asyncio.wait_for(gone.wait(), 5)
        await client.close()


async def test_an_old_connection_is_not_reused_so_that_a_change_of_dns_comes_through() -> None:
    client = HttpClient(connection_age_ms_max=-1)  # every connection is too old
    async with answering(OK) as server:
        for number in (1, 2, 3):
            await post(client, server)
            assert server.connections == number
        await client.close()


async def test_beyond_the_limit_idle_connections_of_other_origins_make_room() -> None:
    client = HttpClient(connections_max=1)
    async with answering(OK) as one, answering(OK) as two:
        for _ in range(3):
            await post(client, one)
            await post(client, two)
        assert (one.connections, two.connections) == (3, 3)
        await client.close()


# --- begin ---------------------------------------------------------------------------------------


async def test_begin_runs_when_there_is_a_connection_and_may_decline(client: HttpClient) -> None:
    async with answering(OK) as server:
        target = parse_target(server.url)
        assert await client.send(target, lambda: None, timeout_ms=1_000) is None
        await post(client, server)
        assert len(server.requests) == 1
        assert server.connections == 1, "the connection that was not used stays good"


async def test_begin_that_raises_gives_the_connection_back(client: HttpClient) -> None:
    def begin() -> bytes:
        raise KeyError("x")

    async with answering(OK) as server:
        with pytest.raises(KeyError):
            await client.send(parse_target(server.url), begin, timeout_ms=1_000)
        await post(client, server)
        assert server.connections == 1


# --- forms of answers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "status", "body"),
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n3;x=y\r\ncde\r\n0\r\nt: 1\r\n\r\n",
            200,
            b"abcde",
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 304 Not Modified\r\ncontent-length: 0\r\n\r\n", 304, b""),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK, 200, b"ok"),
        (b"HTTP/1.1 500 \r\ncontent-length: 3\r\n\r\nbad", 500, b"bad"),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", 302, b""),
    ],
)
async def test_an_answer_that_leaves_the_connection_open(
    client: HttpClient, raw: bytes, status: int, body: bytes
) -> None:
    async with answering(raw) as server:
        for _ in range(2):
            answer = await post(client, server)
            assert (answer.status, answer.body, answer.truncated) == (status, body, False)
        assert server.connections == 1
        assert "link" not in answer.headers, "headers of informational answers are not the answer's"


@pytest.mark.parametrize(
    ("raw", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200 OK\r\n\r\nuntil the end", b"until the end"),
        (b"HTTP/1.0 200 OK\r\n\r\n", b""),
    ],
)
async def test_an_answer_that_ends_the_connection(client: HttpClient, raw: bytes, body: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(raw)
        writer.write_eof()
        await reader.read()

    async with serving(handler) as server:
        for _ in range(2):
            assert (await post(client, server)).body == body
        assert server.connections == 2


async def test_head_and_get_work_too(client: HttpClient) -> None:
    async with answering(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n", OK) as server:
        answer = await client.request("HEAD", server.url, timeout_ms=1_000)
        assert (answer.status, answer.body) == (200, b"")


async def test_an_answer_that_drips_in_byte_by_byte_is_read(client: HttpClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        for index in range(len(OK)):
            writer.write(OK[index : index + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(handler) as server:
        assert (await post(client, server)).body == b"ok"


# --- deadlines -----------------------------------------------------------------------------------


@asynccontextmanager
async def silent_once_known(client: HttpClient) -> AsyncIterator[Server]:
    """A server that answers one request, so that connecting to it costs nothing of the next one's deadline."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        if number == 1:
            await server.read_request(reader)
            writer.write(OK)
        await reader.read()

    async with serving(handler) as server:
        await post(client, server)
        yield server


async def test_a_server_that_never_answers_is_given_up_at_the_deadline(client: HttpClient) -> None:
    async with silent_once_known(client) as server:
        started = asyncio.get_running_loop().time()
        error = await failure(client, server, timeout_ms=50)
        assert (error.reason, error.sent) == ("no answer within 0.05 s", True)
        assert asyncio.get_running_loop().time() - started >= 0.045


async def test_a_slow_drip_does_not_move_the_deadline(client: HttpClient) -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        writer.write(OK)
        await server.read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.005)

    async with serving(drip) as server:
        await post(client, server)
        assert (await failure(client, server, timeout_ms=60)).reason == "no answer within 0.06 s"


async def test_calls_with_different_deadlines_each_end_at_their_own(client: HttpClient) -> None:
    async with serving(silent) as server:
        loop = asyncio.get_running_loop()
        started = loop.time()

        async def call(timeout_ms: int) -> None:
            await failure(client, server, timeout_ms=timeout_ms)
            assert loop.time() - started >= timeout_ms / 1_000 - 0.005

        patient = asyncio.create_task(call(600_000))
        await asyncio.gather(call(150), call(30), call(90))
        assert not patient.done()
        patient.cancel()


async def test_case_12_connecting_has_a_deadline_of_its_own() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    client = HttpClient(resolve=resolve, connect_timeout_ms=20)
    with pytest.raises(HttpError, match=r"cannot resolve slow\.test: no answer within 0\.02 s") as caught:
        await client.request("POST", "http://slow.test/", timeout_ms=60_000)
    assert not caught.value.sent
    with pytest.raises(HttpError, match=r"no answer within 0\.01 s"):
        await client.request("POST", "http://slow.test/", timeout_ms=10)
    assert not client._origins, "a failed origin leaves nothing behind"
    await client.close()


async def test_a_peer_that_takes_the_connection_but_never_finishes_tls_is_a_connect_timeout() -> None:
    client = HttpClient(connect_timeout_ms=50)
    async with serving(silent) as server:
        with pytest.raises(HttpError, match=r"connect timeout after 0\.05 s"):
            await client.request("POST", f"https://127.0.0.1:{server.port}/", timeout_ms=5_000)
        await client.close()


async def test_without_an_answer_a_blocked_loop_delays_the_end_of_a_call_and_no_more(client: HttpClient) -> None:
    async with serving(silent) as server:
        call = asyncio.create_task(post(client, server, timeout_ms=1_000))
        while not any(connection.busy for connection in client._connections):
            await asyncio.sleep(0.001)
        time.sleep(1.5)
        async with asyncio.timeout(10):
            with pytest.raises(HttpError, match="no answer within 1 s"):
                await call


async def test_the_deadline_of_the_call_holds_while_it_connects() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        await asyncio.Event().wait()
        return ()

    client = HttpClient(resolve=resolve, connect_timeout_ms=60_000)
    async with asyncio.timeout(20):
        with pytest.raises(HttpError, match=r"cannot resolve a\.test: no answer within 0\.1 s") as caught:
            await client.request("POST", "http://a.test/", timeout_ms=100)
    assert not caught.value.sent


async def test_only_the_limit_for_connecting_makes_a_target_unreachable_for_all_calls() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        if host == "slow.test":
            await asyncio.Event().wait()
        return ["127.0.0.1"]

    client = HttpClient(resolve=resolve, connect_timeout_ms=200)
    async with serving(silent) as server:
        for url in ("https://slow.test/", f"https://silent.test:{server.port}/"):
            with pytest.raises(DeadlineTooShort, match=r" 0\.05 s"):
                await client.request("POST", url, timeout_ms=50)
            with pytest.raises(Unreachable, match=r" 0\.2 s") as caught:
                await client.request("POST", url, timeout_ms=20_000)
            assert type(caught.value) is Unreachable
        await client.close()


async def test_an_address_that_had_too_little_time_counts_for_more_than_one_that_refuses() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    client = HttpClient(resolve=resolve, connect_timeout_ms=2_000)

    async def slow_or_refused(origin: Any, target: Any, address: str) -> Any:
        if address == "127.0.0.9":
            await asyncio.Event().wait()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    client._connect_to = slow_or_refused  # type: ignore[method-assign]
    with pytest.raises(DeadlineTooShort):
        await client.request("POST", "http://two.test/", timeout_ms=50)
    client._connect_timeout_s = 0.05
    with pytest.raises(Unreachable, match="refused") as caught:
        await client.request("POST", "http://two.test/", timeout_ms=20_000)
    assert type(caught.value) is Unreachable
    await client.close()


async def test_a_silent_address_leaves_time_for_the_next_one() -> None:
    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        return ["127.0.0.9", "127.0.0.1"]

    client = HttpClient(resolve=resolve, connect_timeout_ms=3_000)
    connect_to = client._connect_to

    async def first_silent(origin: Any, target: Any, address: str) -> Any:
        if address == "127.0.0.9":
            await asyncio.Event().wait()
        return await connect_to(origin, target, address)

    client._connect_to = first_silent  # type: ignore[method-assign]
    async with answering(OK) as server:
        assert (await post(client, server, timeout_ms=20_000)).body == b"ok"
    await client.close()


async def test_a_client_that_is_closed_while_a_call_connects_sends_nothing() -> None:
    asked, may_answer = asyncio.Event(), asyncio.Event()

    async def resolve(host: str, port: int, owner: str) -> Sequence[str]:
        asked.set()
        await may_answer.wait()
        return ["127.0.0.1"]

    client = HttpClient(resolve=resolve)
    async with answering(OK) as server:
        call = asyncio.create_task(post(client, server))
        await asked.wait()
        await client.close()
        may_answer.set()
        with pytest.raises(HttpError, match="the client is closed") as caught:
            await call
        assert not caught.value.sent
        assert server.requests == []
    assert not client._connections


async def test_a_cancelled_call_closes_its_connection(client: HttpClient) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        asked.set()
        try:
            await reader.read()
        finally:
            closed.set()

    async with serving(handler) as server:
        call = asyncio.create_task(post(client, server))
        await asked.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.wait_for(closed.wait(), 5)


async def test_closing_the_client_aborts_running_calls_and_refuses_more() -> None:
    client = HttpClient()
    asked = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await server.read_request(reader)
        asked.set()
        await reader.read()

    async with serving(handler) as server:
        call = asyncio.create_task(post(client, server))
        await asked.wait()
        await client.close()
        with pytest.raises(HttpError, match="the client was closed"):
            await call
        with pytest.raises(HttpError, match="the client is closed"):
            await post(client, server)
        await client.close()


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("TLS IS NOT TESTED: there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    command += f" -addext subjectAltName=DNS:callback.test -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def serving_tls(certificate: tuple[Path, Path]) -> AsyncIterator[Server]:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        while True:
            await server.read_request(reader)
            writer.write(OK)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    async with serving(handler, context) as server:
        yield server


async def to_loopback(host: str, port: int, owner: str) -> Sequence[str]:
    return ["127.0.0.1"]


async def test_https_connects_to_the_given_address_and_checks_the_name_of_the_url(
    certificate: tuple[Path, Path],
) -> None:
    client = HttpClient(resolve=to_loopback, ssl_context=ssl.create_default_context(cafile=certificate[0]))
    async with serving_tls(certificate) as server:
        for name in ("callback.test", "CALLBACK.test."):
            for _ in range(2):
                answer = await client.request("POST", f"https://{name}:{server.port}/", timeout_ms=5_000)
                assert answer.body == b"ok"
        assert server.connections == 2
        with pytest.raises(HttpError, match=r"TLS: certificate of other\.test not accepted: .*mismatch") as caught:
            await client.request("POST", f"https://other.test:{server.port}/", timeout_ms=5_000)
        assert not caught.value.sent
        await client.close()


async def test_a_certificate_of_an_unknown_authority_is_refused(certificate: tuple[Path, Path]) -> None:
    client = HttpClient(resolve=to_loopback)
    async with serving_tls(certificate) as server:
        with pytest.raises(HttpError, match=r"TLS: certificate of callback\.test not accepted: self.signed"):
            await client.request("POST", f"https://callback.test:{server.port}/", timeout_ms=5_000)
        await client.close()


async def test_https_to_a_server_of_plain_http_is_a_tls_error() -> None:
    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _: int) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    client = HttpClient(resolve=to_loopback)
    async with serving(plain) as server:
        with pytest.raises(HttpError, match="TLS: "):
            await client.request("POST", f"https://callback.test:{server.port}/", timeout_ms=5_000)
        await client.close()


async def test_a_kept_connection_that_is_closed_is_replaced_by_a_fresh_one_not_by_another_kept_one(
    client: HttpClient,
) -> None:
    """After a restart of the server all kept connections are closed."""
    both = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await server.read_request(reader)
        if number == 2:
            both.set()
        await both.wait()
        writer.write(OK)
        await server.read_request(reader)  # on a kept connection: closed without an answer

    async with serving(handler) as server:
        await asyncio.gather(post(client, server), post(client, server))
        assert (await post(client, server)).body == b"ok"
        assert server.connections == 3
        assert len(server.requests) == 4
