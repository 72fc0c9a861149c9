"""Who may ask a real server for what: tokens, their verbs and namespaces, other sites, and no open server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract import FAR, URL, Asker
from real_server import RealServer, free_port, serve_in_vain

pytestmark = pytest.mark.asyncio(loop_scope="module")

# What each token is for: verbs and namespaces; empty is all.
TOKENS: dict[str, tuple[list[str], list[str]]] = {
    "root": ([], []),
    "reader": (["read"], []),
    "writer": (["write"], []),
    "admin": (["admin"], []),
    "shop": (["read", "write"], ["orders"]),
    "shop-admin": (["admin"], ["orders"]),
}


def token_settings() -> str:
    return json.dumps(
        [
            {
                "name": name,
                "sha256": sha256(f"dt_{name}".encode()).hexdigest(),
                "verbs": verbs,
                "namespaces": namespaces,
            }
            for name, (verbs, namespaces) in TOKENS.items()
        ]
    )


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer dt_{name}"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guarded(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    """A server with tokens, and the namespaces orders and other, each with the timer `a`."""
    server = RealServer(tmp_path_factory.mktemp("guarded"), DUETIME_AUTH_TOKENS=token_settings())
    try:
        await server.start()
        api = Asker(server)
        for name in ("orders", "other"):
            assert (await api.ask("namespaces/create", {"namespace": name, "numShards": 2}, bearer("root")))[0] == 200
            timer = {"namespace": name, "timerId": "a", "executeAt": FAR, "callbackUrl": URL}
            assert (await api.ask("timers/create", timer, bearer("root")))[0] == 200
        yield api
    finally:
        await server.close()


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer dt_nobody", "Basic ZHRfcm9vdA==", "dt_root", "Bearer dt_roo", None],
    ids=str,
)
async def test_without_a_known_token_nothing_is_answered(guarded: Asker, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    for path in json.loads((await guarded.server.read("/openapi.json")).body)["paths"]:
        if path.startswith("/api/v1/"):
            answer = await guarded.server.post(path.removeprefix("/api/v1/"), b"{}", headers)
            assert (answer.status, json.loads(answer.body)["code"]) == (401, "unauthenticated"), path
            assert answer.header("www-authenticate") == 'Bearer realm="duetime"'


# What each token may do, as status by call.
KEY = {"namespace": "orders", "timerId": "a"}
CALLS: dict[str, dict[str, Any]] = {
    "timers/get": KEY,
    "timers/list": {"namespace": "orders"},
    "namespaces/get": {"namespace": "orders"},
    "namespaces/list": {},
    "cluster/status": {},
    "cluster/map": {},
    "schedules/preview": {"schedule": {"at": "2027-03-15T09:00", "timezone": "Europe/Paris"}},
    "timers/update": {**KEY, "payload": 1},
    "timers/createMany": {"timers": []},
    "timers/deleteMany": {"timers": []},
    "namespaces/update": {"namespace": "orders", "requireOk": False},
}
READS = {
    "timers/get",
    "timers/list",
    "namespaces/get",
    "namespaces/list",
    "cluster/status",
    "cluster/map",
    "schedules/preview",
}
WRITES = {"timers/update", "timers/createMany", "timers/deleteMany"}


@pytest.mark.parametrize(
    ("token", "allowed"),
    [
        ("root", CALLS.keys()),
        ("reader", READS),
        ("writer", WRITES),
        ("admin", CALLS.keys()),
        ("shop", READS | WRITES),
        ("shop-admin", CALLS.keys()),
    ],
)
async def test_a_token_is_good_for_its_verbs(guarded: Asker, token: str, allowed: set[str]) -> None:
    for path, body in CALLS.items():
        status, answer = await guarded.ask(path, body, bearer(token))
        if path in allowed:
            assert status == 200, (path, answer)
        else:
            assert (status, answer["code"]) == (403, "forbidden"), path
            assert token in answer["detail"]


async def test_a_token_is_good_for_its_namespaces_only(guarded: Asker) -> None:
    other = {"namespace": "other", "timerId": "a"}
    calls: dict[str, dict[str, Any]] = {
        "timers/get": other,
        "timers/create": {**other, "executeAt": FAR, "callbackUrl": URL, "payload": "stolen"},
        "timers/update": {**other, "payload": "stolen"},
        "timers/delete": other,
        "timers/fireNow": other,
        "timers/replay": other,
        "timers/list": {"namespace": "other"},
        "namespaces/get": {"namespace": "other"},
        "namespaces/update": {"namespace": "other", "requireOk": True},
        "namespaces/delete": {"namespace": "other"},
        "namespaces/create": {"namespace": "third", "numShards": 1},
    }
    before = await guarded.ask("timers/get", other, bearer("root"))
    for path, body in calls.items():
        status, problem = await guarded.ask(path, body, bearer("shop-admin"))
        assert (status, problem["code"], problem["field"]) == (403, "forbidden", "namespace"), path
    # The namespace that is meant when none is named is not the token's either.
    assert (await guarded.ask("timers/get", {"timerId": "a"}, bearer("shop")))[0] == 403
    assert await guarded.ask("timers/get", other, bearer("root")) == before
    assert (await guarded.ask("namespaces/get", {"namespace": "third"}, bearer("root")))[0] == 404


async def test_a_correlation_id_shows_a_tenant_its_own_timers_only(guarded: Asker) -> None:
    for name in ("orders", "other"):
        for timer_id, due in (("traced", FAR), ("fired", "2020-01-01T00:00:00Z")):
            timer = {"namespace": name, "timerId": timer_id, "executeAt": due, "callbackUrl": URL}
            timer["correlationId"] = "request-9"
            assert (await guarded.ask("timers/create", timer, bearer("root")))[0] == 200
    trace = {"correlationId": "request-9"}
    everywhere = {**trace, "allNamespaces": True}

    async def found(body: dict[str, Any], token: str) -> set[tuple[str, str]]:
        keys: set[tuple[str, str]] = set()
        cursor = None
        while True:
            status, answer = await guarded.ask("timers/list", {**body, "cursor": cursor}, bearer(token))
            assert status == 200, answer
            keys |= {(timer["namespace"], timer["timerId"]) for timer in answer["timers"]}
            cursor = answer["nextCursor"]
            if cursor is None:
                return keys

    own = {("orders", "traced"), ("orders", "fired")}
    assert await found({**trace, "namespace": "orders"}, "shop") == own
    for token in ("root", "admin"):
        assert await found(everywhere, token) == own | {("other", "traced"), ("other", "fired")}
    # A cursor of an operator gives a tenant nothing either.
    _, page = await guarded.ask("timers/list", {**everywhere, "limit": 1}, bearer("root"))
    for token in ("shop", "shop-admin", "reader"):
        for body in (everywhere, {**everywhere, "cursor": page["nextCursor"]}):
            status, problem = await guarded.ask("timers/list", body, bearer(token))
            assert (status, problem["code"], problem["field"]) == (403, "forbidden", "allNamespaces"), token
            assert token in problem["detail"]
    for token in ("shop", "shop-admin"):
        refused = await guarded.ask("timers/list", {**trace, "namespace": "other"}, bearer(token))
        assert (refused[0], refused[1]["field"]) == (403, "namespace")
        stolen = {**trace, "namespace": "orders", "cursor": page["nextCursor"]}
        assert (await guarded.ask("timers/list", stolen, bearer(token)))[0] == 400


async def test_in_a_batch_each_item_needs_its_namespace(guarded: Asker) -> None:
    timers = [
        {"namespace": name, "timerId": "of a batch", "executeAt": FAR, "callbackUrl": URL}
        for name in ("orders", "other", "orders")
    ]
    _, answer = await guarded.ask("timers/createMany", {"timers": timers}, bearer("shop"))
    assert [result.get("error", {}).get("code") for result in answer["results"]] == [None, "forbidden", None]
    keys = [{"namespace": "other", "timerId": "a"}, {"namespace": "orders", "timerId": "of a batch"}]
    _, answer = await guarded.ask("timers/deleteMany", {"timers": keys}, bearer("shop"))
    assert [result.get("verdict") for result in answer["results"]] == [None, "cancelled"]
    status, _ = await guarded.ask("timers/get", {"namespace": "other", "timerId": "of a batch"}, bearer("root"))
    assert status == 404


async def test_the_namespaces_of_others_are_not_listed(guarded: Asker) -> None:
    _, answer = await guarded.ask("namespaces/list", {}, bearer("shop"))
    assert [namespace["namespace"] for namespace in answer["namespaces"]] == ["orders"]
    _, answer = await guarded.ask("namespaces/list", {}, bearer("reader"))
    assert [namespace["namespace"] for namespace in answer["namespaces"]] == ["default", "orders", "other"]


async def test_health_and_documents_are_open_and_metrics_are_not(guarded: Asker) -> None:
    for path, status in {"/healthz": 200, "/readyz": 200, "/openapi.json": 200, "/docs": 200, "/metrics": 401}.items():
        assert (await guarded.server.read(path)).status == status, path
    url = guarded.server.url + "/metrics"
    for token, status in {"reader": 200, "admin": 200, "writer": 403}.items():
        assert (await guarded.server.http.request("GET", url, bearer(token), timeout_ms=5_000)).status == status


async def test_the_log_shows_no_token(guarded: Asker) -> None:
    await guarded.ask("timers/get", KEY, bearer("root"))
    await guarded.ask("timers/get", KEY, {"authorization": "Bearer dt_wrong-token"})
    text = guarded.server.log.read_text()
    assert "dt_" not in text
    assert sha256(b"dt_root").hexdigest() not in text


# --- pages of other sites ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://127.0.0.1:1", "null", "http://127.0.0.1.evil.example"]
)
async def test_a_page_of_another_site_is_refused_and_changes_nothing(api: Asker, origin: str) -> None:
    timer = {"timerId": "by a page", "executeAt": FAR, "callbackUrl": URL}
    # `text/plain` is what a page can send without asking first.
    for content_type in ("application/json", "text/plain"):
        headers = {"origin": origin, "content-type": content_type}
        status, problem = await api.ask("timers/create", timer, headers)
        assert "token" not in problem["title"]
        assert (status, problem["code"]) == (403, "cross_origin")
    assert (await api.ask("timers/get", {"timerId": "by a page"}, {"origin": origin}))[0] == 403
    assert (await api.ask("timers/get", {"timerId": "by a page"}))[0] == 404


async def test_a_page_of_the_server_itself_may_ask(api: Asker) -> None:
    assert (await api.ask("cluster/status", {}, {"origin": api.server.url}))[0] == 200


async def _status(server: RealServer, path: str, host: str, method: str = "GET") -> int:
    """Over a plain connection, because a client writes the Host header itself."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{{}}".encode()
    )
    status = int((await asyncio.wait_for(reader.readline(), 10)).split()[1])
    writer.close()
    return status


async def test_a_web_site_cannot_reach_an_open_server_under_its_own_name(tmp_path: Path) -> None:
    server = RealServer(tmp_path, DUETIME_SERVER_ALLOWED_HOSTS='["timers.internal"]')
    await server.start()
    try:
        for path in ("/metrics", "/docs", "/openapi.json", "/", "/nowhere"):
            assert await _status(server, path, f"evil.example:{server.port}") == 403
            assert await _status(server, path, f"127.0.0.1:{server.port}") != 403
            assert await _status(server, path, "timers.internal") != 403
        assert await _status(server, "/api/v1/cluster/status", "evil.example", "POST") == 403
        assert await _status(server, "/api/v1/cluster/status", "timers.internal", "POST") == 200
        for path in ("/healthz", "/readyz"):  # probes send any Host
            assert await _status(server, path, "evil.example") == 200
    finally:
        await server.close()


async def test_a_server_with_tokens_answers_to_any_name(guarded: Asker) -> None:
    assert await _status(guarded.server, "/docs", "evil.example") == 200
    assert await _status(guarded.server, "/metrics", "evil.example") == 401


async def test_another_site_is_refused_also_with_a_token(guarded: Asker) -> None:
    status, problem = await guarded.ask("timers/get", KEY, {**bearer("root"), "origin": "https://evil.example"})
    assert (status, problem["code"]) == (403, "cross_origin")


# --- not without tokens --------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
async def test_a_server_others_can_reach_does_not_start_without_tokens(tmp_path: Path, host: str) -> None:
    store = f"sqlite:///{tmp_path}/timers.db"
    code, said = serve_in_vain("--listen", f"{host}:{free_port()}", "--store", store)
    assert code == 2
    assert f"{host}:" in said
    assert "can be reached from other machines, but there are no tokens" in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


async def test_with_tokens_a_server_others_can_reach_starts(tmp_path: Path) -> None:
    server = RealServer(tmp_path, token="dt_root", DUETIME_AUTH_TOKENS=token_settings())
    server.settings["DUETIME_SERVER_LISTEN"] = f"0.0.0.0:{server.port}"
    try:
        await server.start()
        assert (await server.call("cluster/status", {}))[0] == 200
        assert await server.stop() == 0
    finally:
        await server.close()
