"""Routing of a direct client: which call is sent to which instance, and where it goes if that one is down."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duetime.client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    Created,
    NewTimer,
    OutcomeUnknown,
    Unserved,
    Verdict,
    routing,
)
from duetime.domain.timer import shard_of
from duetime.errors import SetupError
from duetime.http.messages import JSON, PROBLEM_JSON, Request, Response
from duetime.http.server import HttpServer, serve_http

SHARDS = 8
TOKEN = "the-token"
AT = "2027-01-01T09:00:00.000Z"


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
    writer.close()


class Instance:
    """A server that accepts and records every request, and returns the map of its cluster."""

    def __init__(self, cluster: Cluster, name: str, tls: ssl.SSLContext | None = None) -> None:
        self.cluster = cluster
        self.name = name
        self.instance_id = f"id-{name}"
        self.tls = tls
        self.bodies: list[tuple[str, Any]] = []  # of the requests about timers
        self.posts: list[Request] = []
        self.script: deque[Response] = deque()
        self.is_frozen = False
        # If there is an event: accept a request, set the event, and close the connection without a response.
        self.closes_connection: asyncio.Event | None = None
        self._server: HttpServer | None = None
        self._tls_proxy: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await serve_http(
            self._handle,
            "127.0.0.1",
            0 if self.tls else port,
            body_bytes_max=1 << 24,
            connections_max=200,
            idle_timeout_ms=60_000,
        )
        self.port = self._server.port
        if self.tls:
            self._tls_proxy = await asyncio.start_server(self._proxied, "127.0.0.1", port, ssl=self.tls)
            self.port = self._tls_proxy.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"{'https' if self.tls else 'http'}://{self.address}"

    async def stop(self) -> None:
        proxy, self._tls_proxy = self._tls_proxy, None
        if proxy is not None:
            proxy.close()
        server, self._server = self._server, None
        if server is not None:
            await server.close(0)

    async def _proxied(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Duetime has no TLS of its own: a proxy in front of it has."""
        assert self._server is not None
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server.port)
        await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))

    @property
    def ids(self) -> list[str]:
        """The ids of the timers it was asked to write."""
        return [item["timerId"] for _, body in self.bodies for item in body.get("timers", [body]) if "timerId" in item]

    async def _handle(self, request: Request) -> Response:
        path = request.path.removeprefix("/api/v1/")
        if self.is_frozen:
            await asyncio.Event().wait()
        if path == "/healthz":
            assert request.header(b"authorization") is None
            return Response(200, b"alive\n", b"text/plain", (("duetime-instance", self.instance_id),))
        self.posts.append(request)
        if path == "cluster/map":
            return self.cluster.tell_map()
        body = msgspec.json.decode(request.body)
        self.bodies.append((path, body))
        if self.closes_connection is not None:
            self.closes_connection.set()
            await asyncio.Event().wait()  # until the connection is closed
        return self.script.popleft() if self.script else answer_to(path, body)


def answer_to(path: str, body: Any) -> Response:
    if path == "timers/list":
        found: Any = {"timers": [], "nextCursor": None}
    elif path == "timers/createMany":
        found = {"results": [created(item["timerId"]) for item in body["timers"]]}
    elif path == "timers/deleteMany":
        found = {"results": [{"verdict": "cancelled"} for _ in body["timers"]]}
    elif path == "timers/delete":
        found = {"verdict": "cancelled"}
    elif path == "timers/update":
        found = {**created(body["timerId"]), "verdict": "updated"}
    else:
        found = created(body["timerId"])
    return Response(200, msgspec.json.encode(found), JSON)


def created(timer_id: str) -> dict[str, Any]:
    times = dict.fromkeys(("executeAt", "scheduledAt", "createdAt"), AT)
    timer = {
        "namespace": "default",
        "timerId": timer_id,
        "state": "scheduled",
        "attempts": 0,
        "callbackUrl": "http://x",
    }
    return {"timer": timer | times, "replaced": False}


def refusal(status: int, code: str) -> Response:
    problem = {"type": f"urn:{code}", "title": code, "status": status, "detail": code, "code": code}
    return Response(status, msgspec.json.encode(problem), PROBLEM_JSON, (("retry-after", "0"),))


class Cluster:
    """Instances, and the map that each returns. The first one owns the even shards, the second one the odd ones."""

    def __init__(self) -> None:
        self.a, self.b = Instance(self, "a"), Instance(self, "b")
        self.owners: list[int | None] = [shard % 2 for shard in range(SHARDS)]
        self.namespaces = {"default": SHARDS}
        self.addresses: list[str] | None = None  # None: the real addresses
        self.refusal: Response | None = None
        self.maps_sent = 0

    def tell_map(self) -> Response:
        self.maps_sent += 1
        if self.refusal is not None:
            return self.refusal
        addresses = self.addresses or [self.a.address, self.b.address]
        body = {
            "instances": addresses,
            "instanceIds": [self.a.instance_id, self.b.instance_id, "id-c", "id-d"][: len(addresses)],
            "owners": self.owners,
            "namespaces": self.namespaces,
        }
        return Response(200, msgspec.json.encode(body), JSON)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    await cluster.a.start()
    await cluster.b.start()
    yield cluster
    await cluster.a.stop()
    await cluster.b.stop()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(cluster.a.url, TOKEN, direct=True, retries=3) as client:
        yield client


IDS = [f"t{number}" for number in range(200)]
OF_A = [timer_id for timer_id in IDS if shard_of(timer_id, SHARDS) % 2 == 0]
OF_B = [timer_id for timer_id in IDS if shard_of(timer_id, SHARDS) % 2 == 1]


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + 10
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline, f"not within 10 s: {what}"
        await asyncio.sleep(0.01)


# --- routes to the owner -------------------------------------------------------------------------


async def test_a_call_about_a_timer_is_sent_to_its_owner_and_other_calls_to_the_url(
    cluster: Cluster, client: AsyncClient
) -> None:
    mine, others = OF_A[0], OF_B[0]
    for timer_id in (mine, others):
        assert (await client.create(timer_id, delay=1)).timer.timer_id == timer_id
        await client.get(timer_id)
        await client.update(timer_id, delay=2)
        await client.fire_now(timer_id)
        await client.replay(timer_id)
        assert await client.delete(timer_id) is Verdict.CANCELLED
    await client.list_page()
    calls = [f"timers/{name}" for name in ("create", "get", "update", "fireNow", "replay", "delete")]
    assert [path for path, _ in cluster.a.bodies] == [*calls, "timers/list"]
    assert [path for path, _ in cluster.b.bodies] == calls
    assert set(cluster.a.ids) == {mine}
    assert set(cluster.b.ids) == {others}
    assert {post.header(b"authorization") for post in cluster.b.posts} == {f"Bearer {TOKEN}"}
    assert cluster.maps_sent == 1


async def test_create_many_and_delete_many_are_split_by_owner_and_answered_in_order(
    cluster: Cluster, client: AsyncClient
) -> None:
    results = await client.create_many(NewTimer(timer_id, delay=1) for timer_id in IDS)
    assert [result.timer.timer_id for result in results if isinstance(result, Created)] == IDS
    assert cluster.a.ids == OF_A
    assert cluster.b.ids == OF_B
    assert await client.delete_many(IDS) == [Verdict.CANCELLED] * len(IDS)
    assert [path for path, _ in cluster.b.bodies] == ["timers/createMany", "timers/deleteMany"]
    assert cluster.b.ids == OF_B * 2


async def test_coalesced_calls_are_batched_for_each_owner(cluster: Cluster) -> None:
    async with AsyncClient(cluster.a.url, direct=True, coalesce=True) as client:
        results = await asyncio.gather(*(client.create(timer_id, delay=1) for timer_id in IDS))
        assert [result.timer.timer_id for result in results] == IDS
        await asyncio.gather(*(client.delete(timer_id) for timer_id in IDS))
    for instance, ids in ((cluster.a, OF_A), (cluster.b, OF_B)):
        assert [path for path, _ in instance.bodies] == ["timers/createMany", "timers/deleteMany"]
        assert instance.ids == ids * 2


async def test_the_sync_client_sends_to_the_owner_too(cluster: Cluster) -> None:
    def work() -> None:
        with Client(cluster.a.url, direct=True) as client:
            for timer_id in IDS[:20]:
                client.create(timer_id, delay=1)

    await asyncio.to_thread(work)
    assert cluster.a.ids == [timer_id for timer_id in IDS[:20] if timer_id in OF_A]
    assert cluster.b.ids == [timer_id for timer_id in IDS[:20] if timer_id in OF_B]


async def test_without_direct_the_map_is_not_read(cluster: Cluster) -> None:
    async with AsyncClient(cluster.a.url) as client:
        await client.create(OF_B[0], delay=1)
    assert cluster.maps_sent == 0
    assert cluster.a.ids == [OF_B[0]]


async def test_calls_about_a_new_namespace_go_to_the_url_until_the_map_has_it(
    cluster: Cluster, client: AsyncClient
) -> None:
    await client.create(OF_B[0], delay=1, namespace="new")
    assert cluster.a.ids == [OF_B[0]]
    cluster.namespaces["new"] = SHARDS

    async def arrives_directly() -> bool:
        await client.create(OF_B[1], delay=1, namespace="new")
        return OF_B[1] in cluster.b.ids

    await until(arrives_directly, "the owner gets what is of the new namespace")


# --- the map changes -----------------------------------------------------------------------------


async def test_a_shard_that_moves_is_found_at_its_new_owner_after_a_refusal(
    cluster: Cluster, client: AsyncClient
) -> None:
    await client.create(OF_B[0], delay=1)
    cluster.owners = [0] * SHARDS
    cluster.b.script.extend([refusal(503, "not_applied")] * 100)
    while True:
        try:
            await client.create(OF_B[1], delay=1)
            break
        except Unserved:  # the retries ended before the map was refreshed
            continue
    assert cluster.b.ids.count(OF_B[1]) == 100 - len(cluster.b.script)
    assert cluster.a.ids == [OF_B[1]]
    assert cluster.maps_sent == 2


async def test_refusals_in_a_batch_refresh_the_map_and_only_the_refused_are_sent_again(
    cluster: Cluster, client: AsyncClient
) -> None:
    await client.create(OF_A[0], delay=1)
    cluster.owners = [0] * SHARDS
    problem = msgspec.json.decode(refusal(503, "not_applied").body)
    partly = {"results": [created(OF_B[0]), {"error": problem}]}
    nothing = {"results": [{"error": problem}]}
    cluster.b.script.append(Response(200, msgspec.json.encode(partly), JSON))
    cluster.b.script.extend([Response(200, msgspec.json.encode(nothing), JSON)] * 100)
    again = await client.create_many([NewTimer(timer_id, delay=1) for timer_id in OF_B[:2]])
    assert isinstance(again[0], Created)
    while not isinstance(again[-1], Created):
        assert isinstance(again[-1], Unserved)
        again = await client.create_many([NewTimer(OF_B[1], delay=1)])
    assert cluster.b.ids.count(OF_B[0]) == 1
    assert cluster.a.ids == [OF_A[0], OF_B[1]]


async def test_the_map_is_refreshed_at_intervals(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REFRESH_INTERVAL_S", 0.05)
    monkeypatch.setattr(routing, "REFRESH_SPACING_S", 0.01)
    async with AsyncClient(cluster.a.url, direct=True) as client:
        await client.create(OF_B[0], delay=1)
        cluster.owners = [0] * SHARDS

        async def moved() -> bool:
            await client.create(OF_B[1], delay=1)
            return OF_B[1] in cluster.a.ids

        await until(moved, "the new owner is found without any refusal")
        read = cluster.maps_sent
        await asyncio.sleep(0.2)
        assert cluster.maps_sent <= read + 1  # it is read only while the client is used


async def test_a_restarted_owner_is_verified_again_under_its_new_id(cluster: Cluster, client: AsyncClient) -> None:
    await client.create(OF_B[0], delay=1)
    await cluster.b.stop()
    await client.create(OF_B[0], delay=1)
    assert cluster.a.ids == [OF_B[0]]
    cluster.b.instance_id = "id-b-again"
    await cluster.b.start(cluster.b.port)
    client._calls.routes.refresh_soon()

    async def arrives_directly() -> bool:
        await client.create(OF_B[1], delay=1)
        return OF_B[1] in cluster.b.ids

    await until(arrives_directly, "the owner is used again")


# --- an instance is down -------------------------------------------------------------------------


async def test_an_owner_that_is_down_is_bypassed_and_nothing_is_sent_twice(
    cluster: Cluster, client: AsyncClient
) -> None:
    await client.create(OF_B[0], delay=1)
    await cluster.b.stop()
    for timer_id in OF_B[1:10]:
        await client.create(timer_id, delay=1)
    results = await client.create_many([NewTimer(timer_id, delay=1) for timer_id in OF_B[10:]])
    assert all(isinstance(result, Created) for result in results)
    assert sorted(cluster.a.ids + cluster.b.ids) == sorted(OF_B)


async def test_a_url_that_is_down_is_replaced_by_discovered_instances(cluster: Cluster, client: AsyncClient) -> None:
    await client.create(OF_A[0], delay=1)
    await cluster.a.stop()
    await client.create(OF_A[1], delay=1)
    await client.list_page()
    assert cluster.b.ids == [OF_A[1]]
    assert cluster.b.bodies[-1][0] == "timers/list"


async def test_a_plain_create_is_not_sent_again_if_its_owner_hung_up(cluster: Cluster, client: AsyncClient) -> None:
    await client.create(OF_B[0], delay=1)
    cluster.b.closes_connection = asyncio.Event()
    call = asyncio.ensure_future(client.create(OF_B[1], delay=1))
    await cluster.b.closes_connection.wait()
    await cluster.b.stop()
    with pytest.raises(OutcomeUnknown, match="it could fire twice"):
        await call
    assert cluster.a.ids == []
    assert cluster.b.ids == [OF_B[0], OF_B[1]]


async def test_an_idempotent_call_is_sent_to_another_instance_if_its_owner_hung_up(
    cluster: Cluster, client: AsyncClient
) -> None:
    await client.create(OF_B[0], delay=1)
    cluster.b.closes_connection = asyncio.Event()
    call = asyncio.ensure_future(client.create(OF_B[1], delay=1, if_absent=True))
    await cluster.b.closes_connection.wait()
    await cluster.b.stop()
    await call
    assert cluster.a.ids == [OF_B[1]]


async def test_if_no_instance_can_be_reached_the_error_names_them(cluster: Cluster, client: AsyncClient) -> None:
    await client.create(OF_B[0], delay=1)
    await cluster.a.stop()
    await cluster.b.stop()
    with pytest.raises(ConnectionFailed) as caught:
        await client.create(OF_B[1], delay=1)
    assert cluster.a.url in str(caught.value)


async def test_an_owner_that_no_longer_answers_is_bypassed_until_it_is_verified_again(cluster: Cluster) -> None:
    async with AsyncClient(cluster.a.url, direct=True, timeout=0.5) as client:
        await client.create(OF_B[0], delay=1)
        cluster.b.is_frozen = True
        with pytest.raises(OutcomeUnknown):
            await client.create(OF_B[1], delay=1)
        await client.create(OF_B[2], delay=1)
    assert cluster.a.ids == [OF_B[2]]


async def test_from_outside_the_clusters_network_all_calls_go_to_the_url(
    cluster: Cluster, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "REFRESH_SPACING_S", 0.0)
    await cluster.b.stop()
    cluster.addresses = [cluster.b.address, cluster.b.address]
    cluster.a.script.append(refusal(503, "not_applied"))
    for timer_id in IDS[:20]:
        await client.create(timer_id, delay=1)
    await client.create(IDS[20], delay=1, namespace="unknown")
    assert cluster.a.ids == [IDS[0], *IDS[:21]]
    assert cluster.maps_sent == 1


@pytest.mark.parametrize("answer", [refusal(403, "forbidden"), refusal(404, "path_not_found"), Response(200, b"{}")])
async def test_without_a_map_all_calls_go_to_the_url(
    cluster: Cluster, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, answer: Response
) -> None:
    monkeypatch.setattr(routing, "REFRESH_SPACING_S", 0.0)
    cluster.refusal = answer
    for timer_id in IDS[:10]:
        await client.create(timer_id, delay=1)
    assert cluster.a.ids == IDS[:10]
    assert cluster.maps_sent == 1


# --- several URLs --------------------------------------------------------------------------------


async def test_of_several_urls_any_that_answers_is_used(cluster: Cluster) -> None:
    async with AsyncClient([cluster.a.url, cluster.b.url + "/"], retries=0) as client:
        assert client.urls == (cluster.a.url, cluster.b.url)
        await client.create("1", delay=1)
        await cluster.a.stop()
        await client.create("2", delay=1)
        await cluster.a.start(cluster.a.port)
        await client.create("3", delay=1)  # the client stays with the URL that answered
        await cluster.b.stop()
        await client.create("4", delay=1)
    assert cluster.a.ids == ["1", "4"]
    assert cluster.b.ids == ["2", "3"]


async def test_after_a_refusal_the_next_url_is_used(cluster: Cluster) -> None:
    cluster.a.script.extend([refusal(503, "not_applied")] * 9)
    async with AsyncClient([cluster.a.url, cluster.b.url]) as client:
        await client.create("1", delay=1)
    assert cluster.b.ids == ["1"]
    assert len(cluster.a.ids) == 1


def test_the_sync_client_takes_several_urls_too() -> None:
    with Client(["http://one:1", "http://two:2/"]) as client:
        assert client.urls == ("http://one:1", "http://two:2")
        assert client.url == "http://one:1"
    with pytest.raises(SetupError):
        Client(["http://one:1", "ftp://two"])
    with pytest.raises(SetupError, match="empty"):
        Client([])


# --- which server gets the token -----------------------------------------------------------------


async def test_another_server_at_a_discovered_address_gets_neither_timers_nor_the_token(
    cluster: Cluster, client: AsyncClient
) -> None:
    other = Instance(Cluster(), "other")
    await other.start()
    cluster.addresses = [cluster.a.address, other.address]
    try:
        for timer_id in IDS[:20]:
            await client.create(timer_id, delay=1)
        await cluster.a.stop()
        with pytest.raises(ConnectionFailed):
            await client.create(IDS[0], delay=1)
        assert other.posts == []
    finally:
        await other.stop()


@pytest.mark.parametrize(
    "address", ["{}/elsewhere", "{}/", "{}?x", "{}#x", "user@{}", "{} ", "x\r\ny: {}", "", ":", "http://{}"]
)
async def test_an_address_that_is_not_host_and_port_is_not_used(
    cluster: Cluster, client: AsyncClient, address: str
) -> None:
    cluster.addresses = [cluster.a.address, address.format(cluster.b.address)]
    for timer_id in IDS[:10]:
        await client.create(timer_id, delay=1)
    assert cluster.a.ids == IDS[:10]
    assert cluster.b.posts == []


async def test_owner_indexes_outside_the_map_are_ignored(cluster: Cluster, client: AsyncClient) -> None:
    cluster.owners = [7, None, *cluster.owners[2:4]]  # also fewer than the shards of the namespace
    for timer_id in IDS:
        await client.create(timer_id, delay=1)
    assert sorted(cluster.a.ids + cluster.b.ids) == sorted(IDS)
    assert set(cluster.b.ids) == {timer_id for timer_id in IDS if shard_of(timer_id, SHARDS) == 3}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("TLS IS NOT TESTED: there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=x"
    command += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


@pytest.mark.parametrize("direct", [True, "https"])
async def test_a_client_with_an_https_url_never_sends_to_http(
    cluster: Cluster, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, direct: routing.Direct
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    front = Instance(cluster, "a", tls=context)
    await front.start()
    cluster.addresses = [cluster.a.address, cluster.b.address]  # they accept http only
    try:
        async with AsyncClient(front.url, TOKEN, direct=direct) as client:
            for timer_id in IDS[:10]:
                await client.create(timer_id, delay=1)
        assert front.ids == IDS[:10]
        assert cluster.a.posts == cluster.b.posts == []
        assert cluster.maps_sent == (1 if direct == "https" else 0)
    finally:
        await front.stop()


async def test_with_direct_https_the_owner_is_called_over_https(
    cluster: Cluster, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    front, owner = Instance(cluster, "a", tls=context), Instance(cluster, "b", tls=context)
    await front.start()
    await owner.start()
    cluster.addresses = [front.address, owner.address]
    try:
        async with AsyncClient(front.url, TOKEN, direct="https") as client:
            for timer_id in IDS[:10]:
                await client.create(timer_id, delay=1)
        assert owner.ids == [timer_id for timer_id in IDS[:10] if timer_id in OF_B]
    finally:
        await front.stop()
        await owner.stop()


def test_direct_must_be_true_false_or_https() -> None:
    with pytest.raises(SetupError, match="direct"):
        AsyncClient("http://x", direct="http")  # type: ignore[arg-type]
