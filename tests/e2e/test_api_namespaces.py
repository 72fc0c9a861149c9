"""The calls about namespaces and the cluster, and what is read with GET."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from contract import FAR, INSTANT, SPEC, URL, Asker, exists
from real_server import RealServer

from duetime.signing import new_secret

pytestmark = pytest.mark.asyncio(loop_scope="module")


# --- namespaces ----------------------------------------------------------------------------------

NAMESPACE = {
    "namespace",
    "numShards",
    "retryPolicy",
    "callbackTimeoutSeconds",
    "requireOk",
    "deliveredRetention",
    "failedRetention",
    "signingSecrets",
    "paused",
    "createdAt",
}


async def test_a_namespace_is_answered_with_all_its_settings(api: Asker) -> None:
    answer = await api.ok("namespaces/create", namespace="plain")
    assert answer.keys() == {"namespace"}
    plain = answer["namespace"]
    assert plain == {
        "namespace": "plain",
        "numShards": 16,
        "retryPolicy": {
            "maxRetries": None,
            "initialInterval": "1s",
            "backoffMultiplier": 2.0,
            "maxInterval": "10m",
            "maxDuration": "1d",
        },
        "callbackTimeoutSeconds": 10,
        "requireOk": False,
        "deliveredRetention": "1d",
        "failedRetention": "30d",
        "signingSecrets": [],
        "paused": False,
        "createdAt": plain["createdAt"],
    }
    assert INSTANT.fullmatch(plain["createdAt"])
    given = {
        "numShards": 256,
        "callbackUrl": URL,
        "callbackTimeoutSeconds": 30,
        "requireOk": True,
        "deliveredRetention": "2h",
        "failedRetention": "90d",
        "payloadBytesMax": 1_000,
        "createsPerSecond": 50,
        "requestsPerSecond": 60,
    }
    full = (await api.ok("namespaces/create", namespace="full", **given))["namespace"]
    assert full.keys() == NAMESPACE | {"callbackUrl", "payloadBytesMax", "createsPerSecond", "requestsPerSecond"}
    assert {name: full[name] for name in given} == given
    assert await api.ok("namespaces/get", namespace="full") == {"namespace": full}
    answer = await api.ok("namespaces/list")
    assert answer.keys() == {"namespaces"}
    names = [namespace["namespace"] for namespace in answer["namespaces"]]
    assert names == sorted(names)
    assert {"default", "plain", "full"} <= set(names)
    assert full in answer["namespaces"]


async def test_an_update_of_a_namespace_changes_what_it_names(api: Asker, namespace: str) -> None:
    made = (await api.ok("namespaces/get", namespace=namespace))["namespace"]
    answer = await api.ok("namespaces/update", namespace=namespace, requireOk=True, callbackUrl=URL)
    assert answer == {"namespace": {**made, "requireOk": True, "callbackUrl": URL}}
    timer = await api.timer("timers/create", namespace=namespace, timerId="a", executeAt=FAR)
    assert timer["callbackUrl"] == URL
    reset = await api.ok("namespaces/update", namespace=namespace, requireOk=None, callbackUrl=None)
    assert reset == {"namespace": made}


async def test_the_number_of_shards_never_changes(api: Asker, namespace: str) -> None:
    made = await api.ok("namespaces/get", namespace=namespace)
    assert await api.refused("namespaces/update", namespace=namespace, numShards=8) == (
        400,
        "invalid_field",
        "numShards",
    )
    assert await api.refused("namespaces/create", namespace=namespace, numShards=4) == (
        409,
        "namespace_exists",
        "namespace",
    )
    assert await api.ok("namespaces/get", namespace=namespace) == made
    assert await api.ok("namespaces/delete", namespace=namespace) == {}
    assert (await api.refused("namespaces/get", namespace=namespace))[0] == 404
    assert namespace not in json.dumps(await api.ok("namespaces/list"))
    refused = await api.refused("namespaces/create", namespace=namespace, numShards=8)
    assert refused == (409, "num_shards_immutable", "numShards")
    refused = await api.refused("namespaces/create", namespace=namespace, size="small", numShards=4)
    assert refused == (400, "invalid_field", "size")
    assert (await api.refused("namespaces/create", namespace=namespace, size="small"))[1] == "num_shards_immutable"
    assert (await api.ok("namespaces/create", namespace=namespace, numShards=4))["namespace"]["numShards"] == 4
    assert (await api.ok("namespaces/create", namespace="of-size", size="medium"))["namespace"]["numShards"] == 256


async def test_a_namespace_in_use_and_the_default_one_stay(api: Asker, namespace: str) -> None:
    await api.ok("timers/create", namespace=namespace, timerId="a", executeAt=FAR, callbackUrl=URL)
    in_use = (409, "namespace_in_use", "namespace")
    assert await api.refused("namespaces/delete", namespace=namespace) == in_use
    assert await api.refused("namespaces/delete", namespace="default") == in_use
    assert await exists(api, namespace=namespace, timerId="a")
    await api.ok("timers/delete", namespace=namespace, timerId="a")
    assert await api.ok("namespaces/delete", namespace=namespace) == {}


async def test_secrets_are_shown_redacted_and_a_redacted_one_stands_for_itself(api: Asker, namespace: str) -> None:
    old, new = new_secret(), new_secret()
    shown = [f"whsec_…{old[-4:]}"]
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[old])
    assert answer["namespace"]["signingSecrets"] == shown
    for path in ("namespaces/get", "namespaces/list"):
        text = json.dumps(await api.ok(path, **({"namespace": namespace} if path.endswith("get") else {})))
        assert old not in text
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[new, *shown])
    assert answer["namespace"]["signingSecrets"] == [f"whsec_…{new[-4:]}", *shown]
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[f"whsec_…{new[-4:]}"])
    assert answer["namespace"]["signingSecrets"] == [f"whsec_…{new[-4:]}"]
    refused = await api.refused("namespaces/update", namespace=namespace, signingSecrets=shown)
    assert refused == (400, "invalid_field", "signingSecrets")
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[])
    assert answer["namespace"]["signingSecrets"] == []


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"numShards": 0}, "numShards"),
        ({"numShards": 16_385}, "numShards"),
        ({"numShards": "4"}, "numShards"),
        ({"callbackUrl": "http://169.254.169.254/latest"}, "callbackUrl"),
        ({"callbackUrl": "mailto:me"}, "callbackUrl"),
        ({"callbackTimeoutSeconds": 301}, "callbackTimeoutSeconds"),
        ({"deliveredRetention": "for ever"}, "deliveredRetention"),
        ({"failedRetention": "99999d"}, "failedRetention"),
        ({"payloadBytesMax": 0}, "payloadBytesMax"),
        ({"signingSecrets": ["secret"]}, "signingSecrets"),
        ({"signingSecrets": [new_secret() for _ in range(6)]}, "signingSecrets"),
        ({"retryPolicy": {"backoffMultiplier": 0.5}}, "retryPolicy.backoffMultiplier"),
    ],
)
async def test_a_namespace_at_fault_names_the_field_and_is_not_made(
    api: Asker, settings: dict[str, Any], field: str
) -> None:
    assert await api.refused("namespaces/create", namespace="faulty", **settings) == (400, "invalid_field", field)
    assert (await api.refused("namespaces/get", namespace="faulty"))[0] == 404


# --- how it is going, and the documents ----------------------------------------------------------


async def test_the_status_of_the_cluster(api: Asker, server: RealServer) -> None:
    await api.ok("timers/create", timerId="far", executeAt=FAR, callbackUrl=URL)
    status = await api.ok("cluster/status")
    always = {
        "instanceId",
        "version",
        "store",
        "ready",
        "clockSkewMaxMs",
        "deadAfterMs",
        "members",
        "shardCounts",
        "unownedShards",
        "inMemory",
        "inFlight",
        "held",
        "writesWaiting",
        "unreadable",
        "pausedNamespaces",
        "clockSkewMs",
    }
    assert always <= status.keys() <= always | {"oldestDueMs", "latenessP50Ms", "latenessP99Ms"}
    assert (status["store"], status["ready"]) == ("sqlite", True)
    counts = status["shardCounts"]
    assert counts["owned"] == counts["total"] >= 16
    (member,) = status["members"]
    assert 0 < member["leaseMs"] <= 3_000
    assert INSTANT.fullmatch(member["joinedAt"])
    assert (member["instanceId"], member["address"]) == (status["instanceId"], f"127.0.0.1:{server.port}")
    assert (member["alive"], member["self"], member["ready"]) == (True, True, True)
    assert (member["shards"], member["version"]) == (counts["total"], status["version"])
    shards = (await api.ok("cluster/status", shards=True))["shards"]
    assert [shard["shardId"] for shard in shards] == list(range(counts["total"]))
    for shard in shards:
        assert shard.keys() == {"shardId", "version", "ownerId", "ownerAddress", "inMemory", "horizon"}
        assert shard["ownerId"] == status["instanceId"]
        assert INSTANT.fullmatch(shard["horizon"])
    assert (await api.ask_raw("cluster/status", b""))[0] == 200


async def test_health_and_readiness_are_plain_text(server: RealServer) -> None:
    for path, said in (("/healthz", b"alive\n"), ("/readyz", b"ready\n")):
        answer = await server.read(path)
        assert (answer.status, answer.body) == (200, said)
        assert (answer.header("content-type") or "").startswith("text/plain")


async def test_metrics_are_prometheus_text(server: RealServer) -> None:
    answer = await server.read("/metrics")
    assert answer.status == 200
    assert answer.header("content-type") == "text/plain; version=0.0.4; charset=utf-8"
    names = set()
    for line in answer.body.decode().splitlines():
        if match := re.fullmatch(r"# TYPE (duetime_\w+) (counter|gauge|histogram)", line):
            names.add(match[1])
        elif not line.startswith("# HELP duetime_"):
            assert re.fullmatch(r'duetime_\w+(\{\w+="[^"]*"\})? [-+.e\d]+', line), line
    assert {"duetime_timers_created_total", "duetime_late_by_seconds", "duetime_attempts_total"} <= names


async def test_the_documents_are_those_of_the_repository(server: RealServer) -> None:
    answer = await server.read("/openapi.json")
    assert (answer.status, answer.header("content-type")) == (200, "application/json")
    assert answer.body == SPEC.read_bytes()
    page = await server.read("/docs")
    assert page.status == 200
    assert (page.header("content-type") or "").startswith("text/html")
    for path in json.loads(answer.body)["paths"]:
        assert path.removeprefix("/api/v1/").encode() in page.body


async def test_wrong_paths_methods_and_media_types_are_problems(server: RealServer) -> None:
    answers = {
        (404, "path_not_found"): await server.read("/api/v1/timers/creat"),
        (405, "method_not_allowed"): await server.read("/api/v1/timers/create"),
        (415, "unsupported_media_type"): await server.post("timers/get", b"{}", {"content-type": "text/plain"}),
        (400, "invalid_field"): await server.post("timers/get", b"[]"),
    }
    for (status, code), answer in answers.items():
        assert answer.header("content-type") == "application/problem+json"
        problem = json.loads(answer.body)
        assert (answer.status, problem["status"], problem["code"]) == (status, status, code)
        assert {"type", "title", "status", "detail", "code"} == problem.keys()


@pytest.mark.parametrize(
    "body", [b"", b"  ", b"{", b'"text"', b"null", b"[]", b"\xff", b'{"timerId":"a"}x', b"{'a':1}"]
)
async def test_a_body_that_is_no_json_object_is_refused(api: Asker, body: bytes) -> None:
    for path in ("timers/create", "timers/get", "timers/createMany", "timers/list", "namespaces/create"):
        status, problem = await api.ask_raw(path, body)
        assert (status, problem["code"]) == (400, "invalid_field"), path
