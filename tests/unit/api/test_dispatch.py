"""The HTTP API in front of a recorder: requests are refused, decoded, passed on and answered."""

from __future__ import annotations

import asyncio
import logging
from hashlib import sha256
from typing import Any

import pytest
from recording_service import World, headers_of

from duetime.api.routes import PREFIX, ROUTES
from duetime.cluster.peer_protocol import COMMANDS_PATH
from duetime.config import Token
from duetime.domain.timer import (
    Namespace,
    TimerKey,
)
from duetime.errors import Busy, DuetimeError, NotFound, OutcomeUnknown
from duetime.http.messages import Request, Response
from duetime.http.server import serve_http


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


@pytest.mark.parametrize(
    "path",
    # A create is counted by the service, which reads the namespace anyway: tests/unit/service/test_quotas.py.
    [route.path for route in ROUTES if route.path.startswith("timers/") and route.path != "timers/create"],
)
async def test_every_request_about_timers_is_counted_and_refused_before_the_service_is_asked(
    world: World, path: str
) -> None:
    example = next(route.example for route in ROUTES if route.path == path)
    assert (await world.ask(path, example))[0].status == 200
    assert world.service.quotas.counted == ["default"]
    world.service.asked.clear()
    world.service.quotas.refused = {"default"}
    response, answer = await world.ask(path, example)
    assert (response.status, answer["code"]) == (429, "quota_requests_per_second")
    assert world.service.asked == []


_COUNTED: list[tuple[str, dict[str, Any]]] = [
    ("flows/list", {"namespace": "orders"}),
    ("flows/get", {"namespace": "orders", "flowKey": "a"}),
    ("timers/list", {"namespace": "orders"}),
    ("timers/get", {"namespace": "orders", "timerId": "a"}),
    ("timers/update", {"namespace": "orders", "timerId": "a", "delay": "1h"}),
    ("timers/delete", {"namespace": "orders", "timerId": "a"}),
    ("timers/fireNow", {"namespace": "orders", "timerId": "a"}),
    ("timers/replay", {"namespace": "orders", "timerId": "a"}),
    ("timers/deleteMany", {"timers": [{"namespace": "orders", "timerId": "a"}]}),
]


@pytest.mark.parametrize(("path", "body"), _COUNTED)
async def test_the_quota_of_a_tenant_does_not_hold_for_an_operator(
    guarded: World, path: str, body: dict[str, Any]
) -> None:
    guarded.service.quotas.refused.add("orders")
    assert (await guarded.ask(path, body, bearer="root"))[0].status == 200
    assert guarded.service.quotas.counted == []
    assert (await guarded.ask(path, body, bearer="chief"))[0].status == 429


async def test_all_namespaces_without_admin_are_not_enough_to_be_an_operator(guarded: World) -> None:
    guarded.service.quotas.refused.add("orders")
    assert (await guarded.ask("timers/list", {"namespace": "orders"}, bearer="eye"))[0].status == 429


async def test_creates_count_for_every_token(guarded: World) -> None:
    guarded.service.quotas.refused.add("orders")
    timer = {"namespace": "orders", "timerId": "a", "delay": "1h", "callbackUrl": "http://127.0.0.1/"}
    assert (await guarded.ask("timers/createMany", {"timers": [timer]}, bearer="root"))[0].status == 429


@pytest.mark.parametrize("path", ["namespaces/create", "namespaces/update"])
@pytest.mark.parametrize("field", ["createsPerSecond", "requestsPerSecond"])
@pytest.mark.parametrize("value", [1_000_000, None])
async def test_a_tenant_cannot_change_its_own_quotas(guarded: World, path: str, field: str, value: int | None) -> None:
    body = {"namespace": "orders", field: value}
    response, problem = await guarded.ask(path, body, bearer="chief")
    assert (response.status, problem["field"]) == (403, field)
    assert field in problem["detail"]
    assert guarded.service.asked == []
    assert (await guarded.ask(path, body, bearer="root"))[0].status == 200


async def test_a_tenant_changes_the_other_settings_of_its_namespace(guarded: World) -> None:
    body = {"namespace": "orders", "callbackTimeoutSeconds": 30, "payloadBytesMax": 1000}
    assert (await guarded.ask("namespaces/update", body, bearer="chief"))[0].status == 200


async def test_a_tenant_cannot_delete_its_namespace_and_its_quotas_with_it(
    guarded: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def limited(name: str) -> Namespace:
        return Namespace(name=name, num_shards=4, created_at_ms=0, requests_per_second=5)

    assert (await guarded.ask("namespaces/delete", {"namespace": "orders"}, bearer="chief"))[0].status == 200
    monkeypatch.setattr(guarded.service.namespaces, "get", limited)
    guarded.service.asked.clear()
    response, problem = await guarded.ask("namespaces/delete", {"namespace": "orders"}, bearer="chief")
    assert (response.status, problem["field"]) == (403, "requestsPerSecond")
    assert guarded.service.asked == []
    assert (await guarded.ask("namespaces/delete", {"namespace": "orders"}, bearer="root"))[0].status == 200


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


async def test_the_api_runs_on_our_server(world: World) -> None:
    server = await serve_http(
        world.api.handle, "127.0.0.1", 0, body_bytes_max=1_000, connections_max=10, idle_timeout_ms=10_000
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    body = b'{"timerId":"a","delay":"1s"}'
    head = b"POST /api/v1/timers/create HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await server.close(1_000)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b'"timerId":"a"' in answer


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("timers/create", 1 << 20),
        ("timers/list", 1 << 20),
        ("namespaces/update", 1 << 20),
        ("timers/deleteMany", 1_000 * 4_096),
        ("timers/createMany", 1 << 24),
    ],
)
def test_only_requests_with_many_timers_may_be_large(world: World, path: str, limit: int) -> None:
    assert world.api.admit(Request("POST", PREFIX + path)) == limit


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("timers/create", {}, 401),
        ("timers/create", {b"authorization": b"Bearer wrong"}, 401),
        ("timers/create", {b"authorization": b"Bearer reader"}, 403),
        ("timers/list", {b"authorization": b"Bearer reader", b"content-type": b"text/plain"}, 415),
        ("/peer/v1/commands", {}, 401),
    ],
)
def test_a_request_is_refused_by_its_head(path: str, headers: dict[bytes, bytes], status: int) -> None:
    world = World(Token(name="r", sha256=sha256(b"reader").hexdigest(), verbs=("read",)))
    where = COMMANDS_PATH if path.startswith("/") else PREFIX + path
    refusal = world.api.admit(Request("POST", where, headers=headers))
    assert isinstance(refusal, Response)
    assert refusal.status == status


def test_the_holder_of_a_token_is_the_tenant() -> None:
    world = World(Token(name="r", sha256=sha256(b"reader").hexdigest(), verbs=("read",)))
    request = Request("POST", PREFIX + "timers/list", headers={b"authorization": b"Bearer reader"})
    assert world.api.admit(request) == 1 << 20
    assert request.tenant == "r"
