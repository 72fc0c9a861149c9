"""The API's own part: routing, who may ask, what an error becomes. The service behind it has its own tests."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, cast

import msgspec
import pytest

from duetime import wire
from duetime.api.auth import check_binding, is_loopback, split_listen
from duetime.api.dispatch import Api
from duetime.api.routes import PREFIX, ROUTES
from duetime.cluster.forwarding import Peer
from duetime.config import Auth, Config, Token, load_config
from duetime.domain.status import (
    ClusterStatus,
    HeldFor,
    InstanceStatus,
    MemberStatus,
    ShardCounts,
    ShardMap,
    ShardStatus,
)
from duetime.domain.timer import (
    Created,
    Namespace,
    NamespaceSpec,
    State,
    Timer,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Updated,
    Verdict,
)
from duetime.errors import Busy, DuetimeError, NotFound, OutcomeUnknown, SetupError
from duetime.http.server import Request, Response, serve_http
from duetime.service.service import Service
from duetime.telemetry import Telemetry


class NamespaceRecorder:
    def __init__(self, note: Callable[[Any], None]) -> None:
        self.note = note

    async def create(self, spec: NamespaceSpec) -> Namespace:
        self.note(spec)
        return Namespace(name=spec.name, num_shards=4, created_at_ms=0)

    update = create

    async def get(self, name: str) -> Namespace:
        return await self.create(NamespaceSpec(name=name))

    async def list_all(self) -> list[Namespace]:
        return [await self.get(name) for name in ("default", "orders")]

    async def delete(self, name: str) -> None:
        self.note(name)


class Recorder:
    """Stands where the service stands, writes down what it is asked and answers something of the right shape."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: Exception | None = None
        self.reason: str | None = None
        self.namespaces = NamespaceRecorder(self.note)

    def note(self, what: Any) -> None:
        self.asked.append(what)
        if self.error is not None:
            raise self.error

    def view(self, key: TimerKey) -> TimerView:
        timer = Timer(
            namespace=key.namespace,
            timer_id=key.timer_id,
            uuid_high=0,
            uuid_low=0,
            generation=1,
            execute_at_ms=0,
            scheduled_at_ms=0,
            created_at_ms=0,
            callback_url="http://127.0.0.1/",
        )
        return TimerView(timer, State.SCHEDULED)

    async def create(self, spec: TimerSpec) -> Created:
        self.note(spec)
        return Created(self.view(TimerKey(spec.namespace, spec.timer_id)), False)

    async def create_many(self, specs: Sequence[TimerSpec | DuetimeError]) -> list[Created | DuetimeError]:
        return [spec if isinstance(spec, DuetimeError) else await self.create(spec) for spec in specs]

    async def get(self, key: TimerKey) -> TimerView:
        self.note(key)
        return self.view(key)

    async def update(self, key: TimerKey, patch: TimerPatch) -> Updated:
        self.note((key, patch))
        return Updated(self.view(key), Verdict.UPDATED)

    async def delete(self, key: TimerKey) -> Verdict:
        self.note(key)
        return Verdict.CANCELLED

    async def delete_many(self, keys: Sequence[TimerKey | DuetimeError]) -> list[Verdict | DuetimeError]:
        return [key if isinstance(key, DuetimeError) else await self.delete(key) for key in keys]

    async def list_timers(self, filter: TimerFilter) -> tuple[list[TimerView], str | None]:
        self.note(filter)
        return [self.view(TimerKey(filter.namespace, "a"))], None

    fire_now = replay = get

    def as_peer(self) -> Peer:
        return Peer("i", "127.0.0.1:1", "secret")

    def shard_map(self) -> ShardMap:
        return ShardMap(("127.0.0.1:1", "127.0.0.1:2"), ("i", "j"), (0, 1, None), {"default": 3, "orders": 2})

    async def cluster_status(self, *, with_shards: bool = False) -> ClusterStatus:
        self.note(with_shards)
        words = InstanceStatus(
            instance_id="i",
            version="1",
            ready=False,
            reason="starting",
            lease_ms=3_000,
            clock_skew_ms=-3,
            shards=1,
            in_memory=5,
            in_flight=2,
            held=4,
            writes_waiting=0,
            held_for=(HeldFor(destination="https://a.test", held=4, in_flight=2, failures=0, breaker_open=False),),
        )
        mine = MemberStatus(
            instance_id="i", address="a:1", alive=True, self_=True, shards=1, joined_at_ms=0, status=words
        )
        other = MemberStatus(
            instance_id="j", address="b:1", alive=True, self_=False, shards=0, joined_at_ms=0, unreachable="timeout"
        )
        return ClusterStatus(
            instance_id="i",
            version="1",
            store="memory",
            ready=True,
            reason=None,
            clock_skew_max_ms=500,
            dead_after_ms=3_500,
            members=(mine, other),
            shard_counts=ShardCounts(total=2, owned=1, free=1, of_dead=0),
            unowned_shards=(1,),
            shards=(
                (
                    ShardStatus(
                        shard_id=0, version=3, owner_id="i", owner_address="a:1", in_memory=5, horizon_ms=60_000
                    ),
                    ShardStatus(
                        shard_id=1, version=0, owner_id=None, owner_address=None, in_memory=None, horizon_ms=None
                    ),
                )
                if with_shards
                else None
            ),
            in_memory=5,
            in_flight=2,
            held=4,
            writes_waiting=0,
            clock_skew_ms=-3,
            oldest_due_ms=None,
            lateness_p50_ms=1.0,
            lateness_p99_ms=None,
        )

    def readiness(self) -> str | None:
        return self.reason


def configured(*tokens: Token, **flags: Any) -> Config:
    config = load_config(environ={}, flags=flags)
    return msgspec.structs.replace(config, auth=Auth(tokens=tokens))


def token(text: str, *, namespaces: tuple[str, ...] = (), verbs: tuple[str, ...] = ()) -> Token:
    return Token(name=text, sha256=sha256(text.encode()).hexdigest(), namespaces=namespaces, verbs=verbs)


class World:
    """An Api in front of a Recorder."""

    def __init__(self, *tokens: Token) -> None:
        self.service = Recorder()
        self.telemetry = Telemetry()
        self.api = Api(cast(Service, self.service), configured(*tokens), self.telemetry)

    async def ask(
        self, path: str, body: Any = None, *, bearer: str | None = None, method: str = "POST", **headers: str
    ) -> tuple[Response, Any]:
        sent = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
        if bearer is not None:
            sent[b"authorization"] = f"Bearer {bearer}".encode()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        where = path if path.startswith("/") else PREFIX + path
        response = await self.api.handle(Request(method, where, headers=sent, body=data))
        return response, json.loads(response.body) if response.content_type.endswith(b"json") else None


@pytest.fixture
def world() -> World:
    return World()


def headers_of(response: Response) -> dict[str, str]:
    return dict(response.headers)


# --- routing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.path)
async def test_every_route_answers_its_own_example_in_its_own_shape(world: World, route: Any) -> None:
    response, _ = await world.ask(route.path, route.example)
    assert response.status == 200, response.body
    msgspec.json.decode(response.body, type=route.answer)


async def test_the_service_is_called_with_the_decoded_request(world: World) -> None:
    await world.ask("timers/get", {"timerId": "a"})
    await world.ask("timers/fireNow", {"namespace": "n", "timerId": "b"})
    await world.ask("namespaces/delete", {"namespace": "n"})
    assert world.service.asked == [TimerKey("default", "a"), TimerKey("n", "b"), "n"]


async def test_one_wrong_item_does_not_affect_the_others(world: World) -> None:
    items = [{"timerId": "a", "delay": "1s"}, {"timerId": "b"}, 17, {"timerId": "c", "delay": "1s"}]
    _, answer = await world.ask("timers/createMany", {"timers": items})
    results = answer["results"]
    assert results[0]["timer"]["timerId"] == "a"
    assert results[1]["error"]["field"] == "executeAt"
    assert results[2]["error"]["status"] == 400
    assert results[3]["timer"]["timerId"] == "c"
    _, answer = await world.ask("timers/deleteMany", {"timers": [{"timerId": "a"}, {}]})
    assert answer["results"][0] == {"verdict": "cancelled"}
    assert answer["results"][1]["error"]["field"] == "timerId"


async def test_the_map_has_the_namespaces_the_token_is_for_and_healthz_names_the_instance() -> None:
    world = World(token("all"), token("shop", namespaces=("orders",), verbs=("read",)), token("w", verbs=("write",)))
    _, answer = await world.ask("cluster/map", {}, bearer="all")
    assert answer == {
        "instances": ["127.0.0.1:1", "127.0.0.1:2"],
        "instanceIds": ["i", "j"],
        "owners": [0, 1, None],
        "namespaces": {"default": 3, "orders": 2},
    }
    _, answer = await world.ask("cluster/map", {}, bearer="shop")
    assert answer["namespaces"] == {"orders": 2}
    assert (await world.ask("cluster/map", {}, bearer="w"))[0].status == 403
    response, _ = await world.ask("/healthz", method="GET")
    assert headers_of(response)["duetime-instance"] == "i"


async def test_the_status_shows_each_member_and_lists_shards_if_asked_to(world: World) -> None:
    _, status = await world.ask("cluster/status")
    mine, other = status["members"]
    assert (mine["self"], mine["ready"], mine["reason"], mine["clockSkewMs"]) == (True, False, "starting", -3)
    assert mine["joinedAt"] == "1970-01-01T00:00:00.000Z"
    assert mine["heldFor"] == [
        {"destination": "https://a.test", "held": 4, "inFlight": 2, "failures": 0, "breakerOpen": False}
    ]
    assert other.keys() == {"instanceId", "address", "alive", "self", "shards", "joinedAt", "unreachable"}
    assert status["shardCounts"] == {"total": 2, "owned": 1, "free": 1, "ofDead": 0}
    assert status["unownedShards"] == [1]
    assert "shards" not in status
    _, detailed = await world.ask("cluster/status", {"shards": True})
    assert [shard.get("ownerId") for shard in detailed["shards"]] == ["i", None]
    assert world.service.asked == [False, True]


async def test_destinations_are_named_only_to_those_who_may_see_every_namespace() -> None:
    world = World(token("all"), token("some", namespaces=("orders",)))
    for name, shown in (("all", True), ("some", False)):
        _, status = await world.ask("cluster/status", bearer=name)
        assert ("heldFor" in status["members"][0]) is shown
        assert status["held"] == 4


async def test_a_batch_over_the_limit_is_refused_whole(world: World) -> None:
    for path in ("timers/createMany", "timers/deleteMany"):
        response, answer = await world.ask(path, {"timers": [{"timerId": "a", "delay": "1s"}] * 1_001})
        assert (response.status, answer["field"]) == (400, "timers")
    assert world.service.asked == []


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/api/v1/timers/create", 405, "POST"),
        ("PUT", "/api/v1/timers/create", 405, "POST"),
        ("POST", "/healthz", 405, "GET, HEAD"),
        ("POST", "/api/v1/timers/crate", 404, None),
        ("GET", "/nowhere", 404, None),
        ("GET", "/api/v1/timers/create/", 404, None),
    ],
)
async def test_wrong_paths_and_methods_have_distinct_errors(
    world: World, method: str, path: str, status: int, allow: str | None
) -> None:
    response, answer = await world.ask(path, method=method)
    assert (response.status, answer["status"]) == (status, status)
    assert headers_of(response).get("allow") == allow


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("APPLICATION/JSON", 200),
        ("application/vnd.api+json", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
    ],
)
async def test_only_json_is_accepted(world: World, content_type: str, status: int) -> None:
    response, _ = await world.ask("timers/get", {"timerId": "a"}, content_type=content_type)
    assert response.status == status


async def test_an_empty_body_is_a_clear_error_but_for_those_who_need_none(world: World) -> None:
    response, answer = await world.ask("timers/create")
    assert (response.status, answer["code"]) == (400, "invalid_field")
    assert "empty" in answer["detail"]
    assert (await world.ask("namespaces/list"))[0].status == 200
    assert (await world.ask("cluster/status", {"x": 1}))[1]["field"] == "x"


# --- errors --------------------------------------------------------------------------------------


async def test_an_error_of_the_service_becomes_a_problem(world: World) -> None:
    world.service.error = NotFound("there is no timer 'a'", code="timer_not_found")
    response, answer = await world.ask("timers/get", {"timerId": "a"})
    assert response.status == 404
    assert response.content_type == b"application/problem+json"
    assert answer == {
        "type": "urn:duetime:problem:timer_not_found",
        "title": "Not found",
        "status": 404,
        "detail": "there is no timer 'a'",
        "code": "timer_not_found",
    }


@pytest.mark.parametrize(
    ("error", "status", "code"), [(Busy(), 429, "busy"), (OutcomeUnknown(), 503, "outcome_unknown")]
)
async def test_what_may_be_tried_again_says_when(world: World, error: DuetimeError, status: int, code: str) -> None:
    world.service.error = error
    response, answer = await world.ask("timers/get", {"timerId": "a"})
    assert (response.status, answer["code"], headers_of(response)["retry-after"]) == (status, code, "1")


async def test_a_defect_is_a_500_that_leads_to_the_log(world: World, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("duetime").propagate = True
    world.service.error = RuntimeError("secret detail")
    response, answer = await world.ask("timers/get", {"timerId": "a"})
    assert response.status == 500
    assert "secret detail" not in response.body.decode()
    assert answer["requestId"] in caplog.text
    assert "secret detail" in caplog.text


async def test_requests_are_counted_by_status(world: World) -> None:
    await world.ask("timers/get", {"timerId": "a"})
    await world.ask("timers/get", {})
    assert world.telemetry.requests.by_label == {"200": 1, "400": 1}


# --- tokens --------------------------------------------------------------------------------------


@pytest.fixture
def guarded() -> World:
    return World(
        token("root"),
        token("shop", namespaces=("orders",), verbs=("read", "write")),
        token("eye", verbs=("read",)),
        token("chief", namespaces=("orders",), verbs=("admin",)),
    )


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer ", "Basic cm9vdA==", "root", "Bearer rööt"])
async def test_without_a_known_token_nothing_is_answered(guarded: World, header: str | None) -> None:
    sent = {} if header is None else {b"authorization": header.encode("latin-1")}
    response = await guarded.api.handle(Request("POST", PREFIX + "timers/get", headers=sent, body=b'{"timerId":"a"}'))
    assert response.status == 401
    assert headers_of(response)["www-authenticate"].startswith("Bearer")
    assert guarded.service.asked == []


@pytest.mark.parametrize(
    ("bearer", "path", "namespace", "status"),
    [
        ("root", "timers/get", "any", 200),
        ("root", "namespaces/create", "any", 200),
        ("shop", "timers/get", "orders", 200),
        ("shop", "timers/delete", "orders", 200),
        ("shop", "timers/get", "default", 403),
        ("shop", "timers/list", "default", 403),
        ("shop", "timers/update", "default", 403),
        ("shop", "namespaces/update", "orders", 403),
        ("shop", "namespaces/get", "orders", 200),
        ("eye", "timers/get", "any", 200),
        ("eye", "timers/delete", "any", 403),
        ("eye", "timers/createMany", "any", 403),
        ("chief", "namespaces/update", "orders", 200),
        ("chief", "namespaces/delete", "default", 403),
        ("chief", "timers/delete", "orders", 200),
    ],
)
async def test_a_token_is_good_for_its_verbs_and_namespaces(
    guarded: World, bearer: str, path: str, namespace: str, status: int
) -> None:
    body: dict[str, Any] = {"namespace": namespace}
    if path in ("timers/get", "timers/delete", "timers/update"):
        body["timerId"] = "a"
    if path == "timers/update":
        body["delay"] = "1s"
    for _ in range(2):  # the second time the token comes from the cache
        response, answer = await guarded.ask(path, body, bearer=bearer)
        assert response.status == status
        if status == 403:
            assert bearer in answer["detail"]
    if status == 403:
        assert guarded.service.asked == []


async def test_each_item_of_a_batch_needs_its_namespace(guarded: World) -> None:
    items = [{"namespace": name, "timerId": "a", "delay": "1s"} for name in ("orders", "default")]
    _, answer = await guarded.ask("timers/createMany", {"timers": items}, bearer="shop")
    assert "timer" in answer["results"][0]
    assert answer["results"][1]["error"]["code"] == "forbidden"
    _, answer = await guarded.ask("timers/deleteMany", {"timers": [{"timerId": "a"}]}, bearer="shop")
    assert answer["results"][0]["error"]["code"] == "forbidden"


async def test_namespaces_of_others_are_not_listed(guarded: World) -> None:
    _, answer = await guarded.ask("namespaces/list", bearer="shop")
    assert [namespace["namespace"] for namespace in answer["namespaces"]] == ["orders"]


async def test_health_and_documents_are_open_and_metrics_are_not(guarded: World) -> None:
    for path in ("/healthz", "/readyz", "/openapi.json", "/docs"):
        assert (await guarded.ask(path, method="GET"))[0].status == 200
    assert (await guarded.ask("/metrics", method="GET"))[0].status == 401
    assert (await guarded.ask("/metrics", method="GET", bearer="eye"))[0].status == 200


@pytest.mark.parametrize(
    ("origin", "host", "status"),
    [
        ("http://127.0.0.1:8463", "127.0.0.1:8463", 200),
        ("http://localhost:8463", "localhost:8463", 200),
        ("http://evil.example", "127.0.0.1:8463", 403),
        ("null", "127.0.0.1:8463", 403),
        ("http://evil.example:8463", "evil.example:8463", 403),
    ],
)
async def test_pages_of_other_sites_cannot_use_an_open_server(
    world: World, origin: str, host: str, status: int
) -> None:
    response, _ = await world.ask("timers/get", {"timerId": "a"}, origin=origin, host=host)
    assert response.status == status


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:8463", True),
        ("127.9.9.9:1", True),
        ("[::1]:8463", True),
        ("localhost:8463", True),
        ("0.0.0.0:8463", False),
        ("[::]:8463", False),
        ("10.0.0.1:8463", False),
        ("example.org:80", False),
    ],
)
def test_a_server_others_can_reach_must_have_tokens(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback
    open_config = configured(**{"server.listen": listen})
    if loopback:
        check_binding(open_config)
    else:
        with pytest.raises(SetupError, match="no tokens"):
            check_binding(open_config)
    check_binding(configured(token("root"), **{"server.listen": listen}))


@pytest.mark.parametrize("listen", ["", "8463", ":8463", "127.0.0.1", "127.0.0.1:http", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_refused(listen: str) -> None:
    with pytest.raises(SetupError, match=r"server\.listen"):
        split_listen(listen)


# --- documents -----------------------------------------------------------------------------------


async def test_readiness_says_why_not(world: World) -> None:
    assert (await world.ask("/readyz", method="GET"))[0].body == b"ready\n"
    world.service.reason = "still loading"
    response, _ = await world.ask("/readyz", method="GET")
    assert (response.status, response.body) == (503, b"not ready: still loading\n")
    assert (await world.ask("/healthz", method="GET"))[0].status == 200


async def test_the_root_points_to_the_documentation(world: World) -> None:
    response, _ = await world.ask("/", method="GET")
    assert (response.status, headers_of(response)["location"]) == (307, "/docs")


async def test_metrics_are_prometheus_text(world: World) -> None:
    response, _ = await world.ask("/metrics", method="GET")
    assert response.content_type.startswith(b"text/plain; version=0.0.4")
    assert b"# TYPE duetime_http_requests_total counter" in response.body


# --- servers -------------------------------------------------------------------------------------


async def test_the_api_runs_on_our_server(world: World) -> None:
    server = await serve_http(
        world.api.handle, "127.0.0.1", 0, body_bytes_max=1_000, connections_max=10, idle_timeout_ms=10_000
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"timerId":"a","delay":"1s"}'
    head = b"POST /api/v1/timers/create HTTP/1.1\r\nhost: h\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await server.close(1_000)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"timerId":"a"' in answer


@pytest.mark.parametrize(
    ("status", "shape", "encoded_otherwise"),
    [
        (ClusterStatus, wire.ClusterStatusJson, set()),
        (MemberStatus, wire.MemberJson, {"self_", "joined_at_ms", "status"}),
        (InstanceStatus, wire.MemberJson, set()),
        (ShardStatus, wire.ShardJson, {"horizon_ms"}),
        (ShardCounts, wire.ShardCountsJson, set()),
        (HeldFor, wire.HeldForJson, set()),
    ],
)
def test_every_field_of_a_status_is_in_the_answer(
    status: type[msgspec.Struct], shape: type[msgspec.Struct], encoded_otherwise: set[str]
) -> None:
    assert set(status.__struct_fields__) - set(shape.__struct_fields__) == encoded_otherwise
