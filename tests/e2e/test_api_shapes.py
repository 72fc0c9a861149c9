"""The HTTP API, call by call, as programs rely on it: every field of every answer, on a real server.

Every request and answer is also held against spec/openapi.json (contract.py).
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import pytest
from contract import SPEC, Asker
from real_server import RealReceiver, RealServer, until, wall_ms

from duetime.http_server import Response
from duetime.signing import new_secret
from duetime.timetext import format_instant, parse_instant

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAR = "2127-01-01T09:00:00.000Z"
URL = "http://127.0.0.1:9/hooks"
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)

PLAIN = {"namespace", "timerId", "state", "executeAt", "scheduledAt", "createdAt", "attempts", "callbackUrl"}
ATTEMPTED = {"firstAttemptAt", "lastAttemptAt", "lateByMs"}
ENDED = {"outcome", "reachedAt"}
NEVER_AGAIN = {"maxRetries": 0}


async def ended(api: Asker, **key: str) -> dict[str, Any]:
    """The timer, once it is over."""
    found: dict[str, Any] = {}

    async def is_over() -> bool:
        found.update(await api.timer(**key))
        return found["state"] not in ("scheduled", "inFlight")

    await until(is_over, f"the end of {key}")
    return await api.timer(**key)


async def exists(api: Asker, **key: str) -> bool:
    return (await api.ask("timers/get", key))[0] == 200


# --- create and get ------------------------------------------------------------------------------


async def test_a_plain_timer_is_answered_with_exactly_what_it_is(api: Asker, namespace: str) -> None:
    before_ms = wall_ms()
    answer = await api.ok("timers/create", namespace=namespace, timerId="a", executeAt=FAR, callbackUrl=URL)
    assert answer.keys() == {"timer", "replaced"}
    assert answer["replaced"] is False
    timer = answer["timer"]
    assert timer.keys() == PLAIN
    created_ms = parse_instant(timer["createdAt"])
    assert before_ms <= created_ms <= wall_ms()
    assert timer == {
        "namespace": namespace,
        "timerId": "a",
        "state": "scheduled",
        "executeAt": FAR,
        "scheduledAt": FAR,
        "createdAt": timer["createdAt"],
        "attempts": 0,
        "callbackUrl": URL,
    }
    assert await api.ok("timers/get", namespace=namespace, timerId="a") == {"timer": timer}


async def test_a_timer_with_everything_is_answered_with_everything(api: Asker, namespace: str) -> None:
    given = {
        "payload": {"order": 17, "note": "später", "nested": [None, True, 1.5]},
        "retryPolicy": {
            "maxRetries": 5,
            "initialInterval": "1s",
            "backoffMultiplier": 2.0,
            "maxInterval": "10m",
            "maxDuration": "24h",
        },
        "callbackTimeoutSeconds": 10,
        "headers": {"x-shop": "17"},
        "correlationId": "c-99",
        "tags": ["expiry", "eu"],
        "missed": {"skipIfLateBy": "10m"},
    }
    timer = await api.timer(
        "timers/create", namespace=namespace, timerId="a", executeAt=FAR, callbackUrl=URL, ifAbsent=False, **given
    )
    assert timer.keys() == PLAIN | given.keys()
    given["retryPolicy"] = {**given["retryPolicy"], "maxDuration": "1d"}  # type: ignore[dict-item]
    assert {name: timer[name] for name in given} == given
    assert await api.timer(namespace=namespace, timerId="a") == timer


@pytest.mark.parametrize(
    ("given", "answered"),
    [
        ("2127-01-01T10:00:00+01:00", "2127-01-01T09:00:00.000Z"),
        ("2127-01-01T00:00:00.5-09:30", "2127-01-01T09:30:00.500Z"),
        ("2127-01-01t09:00:00.1230z", "2127-01-01T09:00:00.123Z"),
        ("2127-01-01T09:00:00.0001Z", "2127-01-01T09:00:00.001Z"),  # never early
    ],
)
async def test_instants_go_out_in_utc_with_milliseconds(api: Asker, given: str, answered: str) -> None:
    timer = await api.timer("timers/create", timerId=f"instant {given}", executeAt=given, callbackUrl=URL)
    assert (timer["executeAt"], timer["scheduledAt"]) == (answered, answered)
    assert INSTANT.fullmatch(timer["createdAt"])


@pytest.mark.parametrize(("delay", "delay_ms"), [("90m", 5_400_000), ("PT1H30M", 5_400_000), ("1d250ms", 86_400_250)])
async def test_a_delay_counts_from_now(api: Asker, delay: str, delay_ms: int) -> None:
    before_ms = wall_ms()
    timer = await api.timer("timers/create", timerId=f"delay {delay}", delay=delay, callbackUrl=URL)
    assert before_ms + delay_ms <= parse_instant(timer["executeAt"]) <= wall_ms() + delay_ms
    assert timer["executeAt"] == timer["scheduledAt"]


async def test_the_namespace_may_be_left_out_and_is_then_default(api: Asker) -> None:
    timer = await api.timer("timers/create", timerId="of the default", executeAt=FAR, callbackUrl=URL)
    assert timer["namespace"] == "default"
    assert await api.timer(timerId="of the default") == timer
    assert await api.timer(namespace="default", timerId="of the default") == timer
    assert (await api.ok("namespaces/get", namespace="default"))["namespace"]["numShards"] == 16


async def test_creating_again_replaces_and_says_so(api: Asker, namespace: str) -> None:
    timer = {"namespace": namespace, "timerId": "a", "executeAt": FAR, "callbackUrl": URL}
    first = await api.ok("timers/create", **timer, payload=1, tags=["old"])
    again = await api.ok("timers/create", **timer, payload=2)
    assert (first["replaced"], again["replaced"]) == (False, True)
    assert again["timer"].keys() == PLAIN | {"payload"}
    assert (await api.timer(namespace=namespace, timerId="a"))["payload"] == 2
    assert await api.ok("timers/delete", namespace=namespace, timerId="a") == {"verdict": "cancelled"}
    assert (await api.ok("timers/create", **timer))["replaced"] is False  # what is over is not replaced


async def test_if_absent_never_replaces(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    timer = {"namespace": namespace, "timerId": "a", "executeAt": FAR, "callbackUrl": receiver.url, "ifAbsent": True}
    first = await api.ok("timers/create", **timer, payload=1)
    assert await api.ok("timers/create", **timer, payload=1) == first
    assert await api.refused("timers/create", **timer, payload=2) == (409, "timer_exists", "timerId")
    assert (await api.timer(namespace=namespace, timerId="a"))["payload"] == 1


async def test_if_absent_after_the_end_answers_the_end_and_fires_nothing(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    at = format_instant(wall_ms())
    timer = {"namespace": namespace, "timerId": "a", "executeAt": at, "callbackUrl": receiver.url, "ifAbsent": True}
    await api.ok("timers/create", **timer)
    over = await ended(api, namespace=namespace, timerId="a")
    assert await api.ok("timers/create", **timer) == {"timer": over, "replaced": False}
    assert await api.refused("timers/create", **timer, payload=2) == (409, "timer_exists", "timerId")
    assert len(receiver.bodies) == 1


async def test_payload_null_is_no_payload_and_any_other_json_comes_back(api: Asker, namespace: str) -> None:
    for number, payload in enumerate([None, False, 0, "", [], {}, "text", [1, [2]], {"a": {"b": None}}]):
        key = {"namespace": namespace, "timerId": f"p{number}"}
        timer = await api.timer("timers/create", **key, executeAt=FAR, callbackUrl=URL, payload=payload)
        assert timer.get("payload") == payload
        assert ("payload" in timer) is (payload is not None)
        assert await api.timer(**key) == timer


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "colour": 1}, "colour"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "retryPolicy": {"tries": 1}}, "retryPolicy.tries"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "missed": {"skip": "1s"}}, "missed.skip"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "timer_id": "a"}, "timer_id"),
        ({"executeAt": FAR, "callbackUrl": URL}, "timerId"),
        ({"timerId": "a", "callbackUrl": URL}, "executeAt"),
        ({"timerId": "a", "executeAt": FAR}, "callbackUrl"),
        ({"timerId": "a", "executeAt": FAR, "delay": "1s", "callbackUrl": URL}, "delay"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": "ftp://example.com"}, "callbackUrl"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": "https://user:pw@example.com"}, "callbackUrl"),
        ({"timerId": "a", "delay": "-1s", "callbackUrl": URL}, "delay"),
        ({"timerId": "a", "delay": "a while", "callbackUrl": URL}, "delay"),
        ({"timerId": 17, "executeAt": FAR, "callbackUrl": URL}, "timerId"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "callbackTimeoutSeconds": 0}, "callbackTimeoutSeconds"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "callbackTimeoutSeconds": 301}, "callbackTimeoutSeconds"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "ifAbsent": "yes"}, "ifAbsent"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "tags": ["t"] * 21}, "tags"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "retryPolicy": {"maxRetries": -1}}, "retryPolicy.maxRetries"),
        (
            {"timerId": "a", "executeAt": FAR, "callbackUrl": URL, "retryPolicy": {"maxInterval": "never"}},
            "retryPolicy.maxInterval",
        ),
    ],
)  # fmt: skip
async def test_a_create_at_fault_names_the_field_and_changes_nothing(
    api: Asker, namespace: str, body: dict[str, Any], field: str
) -> None:
    body = {"namespace": namespace, **body}
    assert await api.refused("timers/create", **body) == (400, "invalid_field", field)
    assert (await api.ok("timers/list", namespace=namespace, state="scheduled"))["timers"] == []


async def test_an_unknown_field_is_named_by_every_call(api: Asker) -> None:
    paths = json.loads(SPEC.read_bytes())["paths"]
    for path in paths:
        if path.startswith("/api/v1/"):
            refusal = await api.refused(path.removeprefix("/api/v1/"), colour="blue")
            assert refusal == (400, "invalid_field", "colour"), path


async def test_an_unknown_namespace_is_not_found_by_every_call_on_timers(api: Asker) -> None:
    key = {"namespace": "nowhere", "timerId": "a"}
    expected = (404, "namespace_not_found", "namespace")
    assert await api.refused("timers/create", **key, executeAt=FAR, callbackUrl=URL) == expected
    assert await api.refused("timers/create", **key, executeAt=FAR, callbackUrl=URL, ifAbsent=True) == expected
    assert await api.refused("timers/update", **key, executeAt=FAR) == expected
    assert await api.refused("timers/list", namespace="nowhere") == expected
    for path in ("timers/get", "timers/delete", "timers/fireNow", "timers/replay"):
        assert await api.refused(path, **key) == expected, path
    for path in ("namespaces/get", "namespaces/delete", "namespaces/update"):
        assert await api.refused(path, namespace="nowhere") == expected, path


async def test_an_unknown_timer_is_not_found(api: Asker, namespace: str) -> None:
    key = {"namespace": namespace, "timerId": "nobody"}
    expected = (404, "timer_not_found", "timerId")
    assert await api.refused("timers/update", **key, executeAt=FAR) == expected
    for path in ("timers/get", "timers/delete", "timers/fireNow", "timers/replay"):
        assert await api.refused(path, **key) == expected, path


# --- states and what an ended timer shows --------------------------------------------------------


async def test_a_timer_goes_from_scheduled_over_in_flight_to_delivered(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.may_answer.clear()
    made = await api.timer("timers/create", **key, delay="50ms", callbackUrl=receiver.url, payload={"order": 17})
    assert made["state"] == "scheduled"
    await receiver.received(1)
    flying = await api.timer(**key)
    assert flying == {**made, "state": "inFlight"}
    receiver.may_answer.set()
    timer = await ended(api, **key)
    assert timer.keys() == PLAIN | {"payload"} | ENDED | ATTEMPTED
    assert (timer["state"], timer["outcome"], timer["attempts"]) == ("delivered", "delivered", 1)
    assert {k: timer[k] for k in ("executeAt", "scheduledAt", "createdAt", "payload")} == {
        k: made[k] for k in ("executeAt", "scheduledAt", "createdAt", "payload")
    }
    times = [timer[k] for k in ("createdAt", "scheduledAt", "firstAttemptAt", "reachedAt")]
    assert times == sorted(times)
    assert all(INSTANT.fullmatch(text) for text in times)
    assert timer["firstAttemptAt"] == timer["lastAttemptAt"] == receiver.bodies[0]["firedAt"]
    assert timer["lateByMs"] == parse_instant(timer["firstAttemptAt"]) - parse_instant(timer["scheduledAt"])
    assert receiver.bodies[0].keys() == {
        "namespace",
        "timerId",
        "executeAt",
        "firedAt",
        "attempt",
        "payload",
        "correlationId",
    }


async def test_a_failed_timer_shows_its_attempts_and_its_last_error(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.answers += [Response(500), Response(503), Response(502)]
    policy = {"maxRetries": 2, "initialInterval": "20ms", "maxInterval": "20ms"}
    made = await api.timer("timers/create", **key, delay="0s", callbackUrl=receiver.url, retryPolicy=policy)
    timer = await ended(api, **key)
    assert timer.keys() == PLAIN | {"retryPolicy"} | ENDED | ATTEMPTED | {"lastError"}
    assert (timer["state"], timer["outcome"], timer["attempts"]) == ("failed", "failed", 3)
    assert timer["lastError"] == "HTTP 502"
    assert timer["scheduledAt"] == made["scheduledAt"]
    assert [body["attempt"] for body in receiver.bodies] == [1, 2, 3]
    assert (timer["firstAttemptAt"], timer["lastAttemptAt"]) == (
        receiver.bodies[0]["firedAt"],
        receiver.bodies[2]["firedAt"],
    )
    assert timer["lateByMs"] == parse_instant(timer["firstAttemptAt"]) - parse_instant(timer["scheduledAt"])


async def test_a_timer_between_two_attempts_shows_when_the_next_is(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.answers.append(Response(503, headers=(("retry-after", "600"),)))
    made = await api.timer("timers/create", **key, delay="0s", callbackUrl=receiver.url)

    async def was_tried() -> bool:
        return bool((await api.timer(**key))["attempts"] == 1)

    await until(was_tried, "the first attempt is settled")
    timer = await api.timer(**key)
    assert timer.keys() == PLAIN | ATTEMPTED | {"lastError"}
    assert (timer["state"], timer["lastError"], timer["scheduledAt"]) == ("scheduled", "HTTP 503", made["scheduledAt"])
    assert parse_instant(timer["executeAt"]) >= parse_instant(timer["lastAttemptAt"]) + 600_000


async def test_a_cancelled_timer_shows_that_it_was_never_tried(api: Asker, namespace: str) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, executeAt=FAR, callbackUrl=URL)
    assert await api.ok("timers/delete", **key) == {"verdict": "cancelled"}
    timer = await api.timer(**key)
    assert timer.keys() == PLAIN | ENDED
    assert (timer["state"], timer["outcome"], timer["attempts"]) == ("cancelled", "cancelled", 0)


@pytest.mark.parametrize(("missed", "state"), [("skipIfLateBy", "skipped"), ("failIfLateBy", "failed")])
async def test_a_missed_timer_ends_without_an_attempt(
    api: Asker, namespace: str, receiver: RealReceiver, missed: str, state: str
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    past = format_instant(wall_ms() - 60_000)
    await api.ok("timers/create", **key, executeAt=past, callbackUrl=receiver.url, missed={missed: "1s"})
    timer = await ended(api, **key)
    assert timer.keys() == PLAIN | ENDED | {"missed", "lastError"}
    assert (timer["state"], timer["outcome"], timer["attempts"]) == (state, state, 0)
    assert timer["missed"] == {missed: "1s"}
    assert not receiver.bodies


# --- update and delete ---------------------------------------------------------------------------


async def test_an_update_changes_what_it_names_and_keeps_the_rest(api: Asker, namespace: str) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    made = await api.timer(
        "timers/create", **key, executeAt=FAR, callbackUrl=URL, payload=1, tags=["t"], correlationId="c"
    )
    answer = await api.ok("timers/update", **key, executeAt="2128-01-01T00:00:00Z", payload={"new": True})
    assert answer.keys() == {"timer", "verdict"}
    assert answer["verdict"] == "updated"
    moved = "2128-01-01T00:00:00.000Z"
    assert answer["timer"] == {**made, "executeAt": moved, "scheduledAt": moved, "payload": {"new": True}}
    assert await api.timer(**key) == answer["timer"]
    reset = await api.ok("timers/update", **key, payload=None, tags=None, correlationId=None)
    assert reset["timer"].keys() == PLAIN
    assert await api.timer(**key) == reset["timer"]


async def test_an_update_of_nothing_is_refused(api: Asker, namespace: str) -> None:
    await api.ok("timers/create", namespace=namespace, timerId="a", executeAt=FAR, callbackUrl=URL)
    assert await api.refused("timers/update", namespace=namespace, timerId="a") == (400, "invalid_field", None)


async def test_an_update_in_flight_says_so_and_the_new_value_fires(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.may_answer.clear()
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, payload="old")
    await receiver.received(1)
    answer = await api.ok("timers/update", **key, delay="10ms", payload="new")
    assert (answer["verdict"], answer["timer"]["payload"], answer["timer"]["attempts"]) == ("inFlight", "new", 0)
    receiver.may_answer.set()
    await receiver.received(2)
    assert [body["payload"] for body in receiver.bodies] == ["old", "new"]
    assert receiver.requests[0].header(b"webhook-id") != receiver.requests[1].header(b"webhook-id")
    assert (await ended(api, **key))["payload"] == "new"


async def test_a_timer_that_is_over_cannot_be_updated(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url)
    over = await ended(api, **key)
    assert await api.refused("timers/update", **key, executeAt=FAR) == (409, "already_reached", "timerId")
    assert await api.timer(**key) == over


async def test_a_delete_in_flight_says_so_and_stops_the_retries(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.may_answer.clear()
    receiver.answers.append(Response(500))
    policy = {"initialInterval": "1ms", "maxInterval": "1ms"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, retryPolicy=policy)
    await receiver.received(1)
    assert await api.ok("timers/delete", **key) == {"verdict": "inFlight"}
    timer = await api.timer(**key)
    assert timer.keys() == PLAIN | {"retryPolicy"} | ENDED | ATTEMPTED
    assert (timer["state"], timer["attempts"]) == ("cancelled", 1)
    receiver.may_answer.set()
    # A later timer to the same receiver: by then a retry of the deleted one would have come.
    await api.ok("timers/create", namespace=namespace, timerId="b", delay="100ms", callbackUrl=receiver.url)
    await ended(api, namespace=namespace, timerId="b")
    assert [body["timerId"] for body in receiver.bodies] == ["a", "b"]
    assert await api.timer(**key) == timer


async def test_deleting_what_is_over_says_so(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url)
    over = await ended(api, **key)
    assert await api.ok("timers/delete", **key) == {"verdict": "alreadyReached"}
    assert await api.timer(**key) == over


# --- many at once --------------------------------------------------------------------------------


async def test_create_many_answers_each_item_in_order_the_good_and_the_bad(api: Asker, namespace: str) -> None:
    def item(timer_id: str, **more: Any) -> dict[str, Any]:
        return {"namespace": namespace, "timerId": timer_id, "executeAt": FAR, "callbackUrl": URL, **more}

    await api.ok("timers/create", **item("old"))
    items: list[Any] = [
        item("good", payload={"n": 1}),
        item("unknown field", colour=1),
        item("bad time", executeAt="2027-01-01"),
        item("private", callbackUrl="http://10.0.0.1/"),
        {**item("nowhere"), "namespace": "nowhere"},
        {**item("nowhere, if absent"), "namespace": "nowhere", "ifAbsent": True},
        item("old"),
        item("old", ifAbsent=True, payload=2),
        item("fresh", ifAbsent=True),
        {"timerId": "in the default", "executeAt": FAR, "callbackUrl": URL},
        item("twice", payload=1),
        item("twice", payload=2),
    ]
    answer = await api.ok("timers/createMany", timers=items[:1] + items[6:7] + items[8:9])
    assert [result.keys() for result in answer["results"]] == [{"timer", "replaced"}] * 3
    status, answer = await api.ask("timers/createMany", {"timers": [*items, 17, None]})
    assert status == 200
    assert answer.keys() == {"results"}
    errors = {
        1: (400, "invalid_field", "colour"),
        2: (400, "invalid_field", "executeAt"),
        3: (400, "invalid_field", "callbackUrl"),
        4: (404, "namespace_not_found", "namespace"),
        5: (404, "namespace_not_found", "namespace"),
        7: (409, "timer_exists", "timerId"),
        12: (400, "invalid_field", None),
        13: (400, "invalid_field", None),
    }
    results = answer["results"]
    assert len(results) == 14
    for number, result in enumerate(results):
        if number in errors:
            assert result.keys() == {"error"}
            problem = result["error"]
            assert problem.keys() - {"field"} == {"type", "title", "status", "detail", "code"}
            assert (problem["status"], problem["code"], problem.get("field")) == errors[number]
        else:
            assert result.keys() == {"timer", "replaced"}
            assert result["timer"]["timerId"] == items[number]["timerId"]
    replaced = {results[n]["timer"]["timerId"]: results[n]["replaced"] for n in (0, 6, 8, 9)}
    assert replaced == {"good": True, "old": True, "fresh": False, "in the default": False}
    assert (results[10]["replaced"], results[11]["replaced"]) == (False, True)
    assert (await api.timer(namespace=namespace, timerId="twice"))["payload"] == 2
    for absent in ("unknown field", "bad time", "private"):
        assert not await exists(api, namespace=namespace, timerId=absent)


async def test_delete_many_answers_each_item_in_order(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    receiver.may_answer.clear()
    due = {"namespace": namespace, "delay": "0s", "callbackUrl": receiver.url}
    await api.ok("timers/create", timerId="flying", **due)
    await receiver.received(1)
    await api.ok("timers/create", namespace=namespace, timerId="waiting", executeAt=FAR, callbackUrl=URL)
    keys: list[Any] = [
        {"namespace": namespace, "timerId": "waiting"},
        {"namespace": namespace, "timerId": "flying"},
        {"namespace": namespace, "timerId": "nobody"},
        {"namespace": "nowhere", "timerId": "a"},
        {"namespace": namespace, "timerId": "waiting"},
        {"namespace": namespace, "timerId": ""},
        {"namespace": namespace, "timerId": "a", "colour": 1},
    ]
    status, answer = await api.ask("timers/deleteMany", {"timers": keys})
    assert status == 200
    assert answer.keys() == {"results"}
    short = [r.get("verdict") or (r["error"]["code"], r["error"].get("field")) for r in answer["results"]]
    assert short == [
        "cancelled",
        "inFlight",
        ("timer_not_found", "timerId"),
        ("namespace_not_found", "namespace"),
        "alreadyReached",
        ("invalid_field", "timerId"),
        ("invalid_field", "colour"),
    ]
    assert all(len(result) == 1 for result in answer["results"])


async def test_a_batch_may_be_empty_and_has_at_most_a_thousand_items(api: Asker, namespace: str) -> None:
    assert await api.ok("timers/createMany", timers=[]) == {"results": []}
    assert await api.ok("timers/deleteMany", timers=[]) == {"results": []}
    items = [{"namespace": namespace, "timerId": f"t{n}", "executeAt": FAR, "callbackUrl": URL} for n in range(1_001)]
    assert await api.refused("timers/createMany", timers=items) == (400, "invalid_field", "timers")
    assert not await exists(api, namespace=namespace, timerId="t0")
    keys = [{"namespace": namespace, "timerId": item["timerId"]} for item in items]
    assert await api.refused("timers/deleteMany", timers=keys) == (400, "invalid_field", "timers")
    assert await api.refused("timers/createMany") == (400, "invalid_field", "timers")
    assert len((await api.ok("timers/createMany", timers=items[:1_000]))["results"]) == 1_000
    answer = await api.ok("timers/deleteMany", timers=keys[:1_000])
    assert answer == {"results": [{"verdict": "cancelled"}] * 1_000}


# --- list ----------------------------------------------------------------------------------------


async def pages(api: Asker, **filter: Any) -> list[list[dict[str, Any]]]:
    """Every page of a list, by its cursors."""
    found: list[list[dict[str, Any]]] = []
    cursor: str | None = None
    while True:
        page = await api.ok("timers/list", **filter, cursor=cursor)
        assert page.keys() == {"timers", "nextCursor"}
        found.append(page["timers"])
        cursor = page["nextCursor"]
        if cursor is None:
            return found
        assert len(found) < 1_000


async def listed(api: Asker, **filter: Any) -> list[str]:
    return [timer["timerId"] for page in await pages(api, **filter) for timer in page]


async def test_a_list_is_in_due_order_and_filters_by_every_condition(api: Asker, namespace: str) -> None:
    items = [
        {"timerId": "b-2", "executeAt": "2127-01-02T00:00:00Z", "tags": ["red"], "correlationId": "c1"},
        {"timerId": "a-1", "executeAt": "2127-01-01T00:00:00Z", "tags": ["red", "blue"], "correlationId": "c2"},
        {"timerId": "a-3", "executeAt": "2127-01-03T00:00:00Z", "correlationId": "c1"},
        {"timerId": "a%4", "executeAt": "2127-01-04T00:00:00Z", "tags": ["blue"]},
    ]
    await api.ok("timers/createMany", timers=[{"namespace": namespace, "callbackUrl": URL, **item} for item in items])
    scheduled = {"namespace": namespace, "state": "scheduled"}
    page = await api.ok("timers/list", **scheduled)
    assert page["nextCursor"] is None
    assert [timer["timerId"] for timer in page["timers"]] == ["a-1", "b-2", "a-3", "a%4"]
    assert page["timers"][0] == await api.timer(namespace=namespace, timerId="a-1")
    conditions: list[tuple[dict[str, Any], list[str]]] = [
        ({"dueFrom": "2127-01-02T00:00:00Z"}, ["b-2", "a-3", "a%4"]),
        ({"dueUntil": "2127-01-03T00:00:00Z"}, ["a-1", "b-2"]),
        ({"dueFrom": "2127-01-02T00:00:00Z", "dueUntil": "2127-01-04T00:00:00Z"}, ["b-2", "a-3"]),
        ({"tag": "red"}, ["a-1", "b-2"]),
        ({"tag": "re"}, []),
        ({"idPrefix": "a-"}, ["a-1", "a-3"]),
        ({"idPrefix": "a%"}, ["a%4"]),
        ({"idPrefix": "A"}, []),
        ({"correlationId": "c1"}, ["b-2", "a-3"]),
        ({"correlationId": "c1", "idPrefix": "a"}, ["a-3"]),
        ({"correlationId": "c1", "tag": "red", "dueFrom": "2127-01-02T00:00:00+00:00"}, ["b-2"]),
    ]
    for condition, expected in conditions:
        assert await listed(api, **scheduled, **condition) == expected, condition
        assert await listed(api, **scheduled, **condition, limit=1) == expected, condition
    assert await listed(api, namespace="default", state="scheduled", tag="red") == []


async def test_paging_shows_every_timer_once_also_those_of_one_instant(api: Asker, namespace: str) -> None:
    items = [{"namespace": namespace, "timerId": f"t{n}", "executeAt": FAR, "callbackUrl": URL} for n in range(57)]
    await api.ok("timers/createMany", timers=items)
    found = await pages(api, namespace=namespace, state="scheduled", limit=10)
    assert all(len(page) <= 10 for page in found)
    assert sorted(timer["timerId"] for page in found for timer in page) == sorted(f"t{n}" for n in range(57))


async def test_every_state_can_be_listed_and_without_one_all_are(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    failing = {"retryPolicy": NEVER_AGAIN}
    due = {"namespace": namespace, "delay": "0s", "callbackUrl": receiver.url}
    await api.ok("timers/create", timerId="delivered", **due)
    await ended(api, namespace=namespace, timerId="delivered")
    receiver.answers.append(Response(500))
    await api.ok("timers/create", timerId="failed", **due, **failing)
    await ended(api, namespace=namespace, timerId="failed")
    past = format_instant(wall_ms() - 60_000)
    await api.ok(
        "timers/create",
        namespace=namespace,
        timerId="skipped",
        executeAt=past,
        callbackUrl=URL,
        missed={"skipIfLateBy": "1s"},
    )
    await ended(api, namespace=namespace, timerId="skipped")
    await api.ok("timers/create", namespace=namespace, timerId="cancelled", executeAt=FAR, callbackUrl=URL)
    await api.ok("timers/delete", namespace=namespace, timerId="cancelled")
    await api.ok("timers/create", namespace=namespace, timerId="scheduled", executeAt=FAR, callbackUrl=URL)
    receiver.may_answer.clear()
    await api.ok("timers/create", timerId="inFlight", **due)
    await receiver.received(3)

    for state in ("delivered", "failed", "skipped", "cancelled", "inFlight"):
        timers = [timer for page in await pages(api, namespace=namespace, state=state) for timer in page]
        assert [timer["timerId"] for timer in timers] == [state]
        assert timers == [await api.timer(namespace=namespace, timerId=state)]
    scheduled = await listed(api, namespace=namespace, state="scheduled")
    assert "scheduled" in scheduled
    everything = await listed(api, namespace=namespace, limit=2)
    assert everything[:2] == ["inFlight", "scheduled"]  # the waiting ones first, in due order
    assert sorted(everything[2:]) == ["cancelled", "delivered", "failed", "skipped"]


async def test_listing_the_scheduled_ones_does_not_show_what_is_in_flight(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    receiver.may_answer.clear()
    await api.ok("timers/create", namespace=namespace, timerId="a", delay="0s", callbackUrl=receiver.url)
    await receiver.received(1)
    for state, expected in (("inFlight", ["a"]), ("scheduled", [])):
        page = await api.ok("timers/list", namespace=namespace, state=state)
        assert [timer["timerId"] for timer in page["timers"]] == expected, state


@pytest.mark.parametrize(
    ("filter", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1_001}, "limit"),
        ({"limit": "10"}, "limit"),
        ({"state": "done"}, "state"),
        ({"dueFrom": "yesterday"}, "dueFrom"),
        ({"dueUntil": "2027-01-01"}, "dueUntil"),
        ({"cursor": "next"}, "cursor"),
        ({"cursor": "ü"}, "cursor"),
        ({"cursor": ""}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,1,2]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,1e3,2,3]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[0,99999999999999999999,0,0]").decode()}, "cursor"),
        ({"cursor": base64.urlsafe_b64encode(b"[7,1,2,3]").decode()}, "cursor"),
        ({"idPrefix": "x" * 256}, "idPrefix"),
        ({"tag": "a\0"}, "tag"),
    ],
)
async def test_a_list_that_cannot_be_names_the_field(api: Asker, filter: dict[str, Any], field: str) -> None:
    assert await api.refused("timers/list", **filter) == (400, "invalid_field", field)


# --- fire now and replay -------------------------------------------------------------------------


async def test_fire_now_makes_a_far_timer_due(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    made = await api.timer("timers/create", **key, executeAt=FAR, callbackUrl=receiver.url, payload=1)
    before_ms = wall_ms()
    answer = await api.ok("timers/fireNow", **key)
    assert answer.keys() == {"timer"}
    timer = answer["timer"]
    assert timer.keys() == PLAIN | {"payload"}
    assert before_ms <= parse_instant(timer["executeAt"]) <= wall_ms()
    assert timer == {**made, "executeAt": timer["executeAt"], "scheduledAt": timer["executeAt"]}
    over = await ended(api, **key)
    assert (over["state"], over["scheduledAt"]) == ("delivered", timer["executeAt"])
    assert await api.refused("timers/fireNow", **key) == (409, "already_reached", "timerId")
    assert len(receiver.bodies) == 1


async def test_fire_now_leaves_one_in_flight_to_it(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.may_answer.clear()
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url)
    await receiver.received(1)
    assert (await api.timer("timers/fireNow", **key))["state"] == "inFlight"
    receiver.may_answer.set()
    assert (await ended(api, **key))["attempts"] == 1
    assert len(receiver.bodies) == 1


async def test_replay_fires_a_failed_timer_again_under_a_new_id(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    receiver.answers.append(Response(400))
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, payload={"n": 1}, tags=["t"])
    failed = await ended(api, **key)
    assert (failed["state"], failed["lastError"]) == ("failed", "HTTP 400")
    answer = await api.ok("timers/replay", **key)
    assert answer.keys() == {"timer"}
    assert answer["timer"].keys() == PLAIN | {"payload", "tags"}
    assert (answer["timer"]["state"], answer["timer"]["attempts"]) == ("scheduled", 0)
    await receiver.received(2)
    over = await ended(api, **key)
    assert (over["state"], over["attempts"], over["payload"], over["tags"]) == ("delivered", 1, {"n": 1}, ["t"])
    assert "lastError" not in over
    first, second = (request.header(b"webhook-id") for request in receiver.requests)
    assert first != second


async def test_replay_of_a_scheduled_timer_is_a_conflict(api: Asker, namespace: str) -> None:
    key = {"namespace": namespace, "timerId": "a"}
    made = await api.timer("timers/create", **key, executeAt=FAR, callbackUrl=URL)
    assert await api.refused("timers/replay", **key) == (409, "timer_scheduled", "timerId")
    assert await api.timer(**key) == made


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
    }
    full = (await api.ok("namespaces/create", namespace="full", **given))["namespace"]
    assert full.keys() == NAMESPACE | {"callbackUrl", "payloadBytesMax"}
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
    assert (await api.ok("namespaces/create", namespace=namespace, numShards=4))["namespace"]["numShards"] == 4


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
        "leaseMs",
        "clockSkewMs",
        "members",
        "shards",
        "inMemory",
        "inFlight",
        "held",
        "writesWaiting",
    }
    assert always <= status.keys() <= always | {"oldestDueMs", "latenessP50Ms", "latenessP99Ms"}
    assert (status["store"], status["ready"]) == ("sqlite", True)
    assert 0 < status["leaseMs"] <= 3_000
    assert status["members"] == [
        {
            "instanceId": status["instanceId"],
            "address": f"127.0.0.1:{server.port}",
            "alive": True,
            "self": True,
            "shards": len(status["shards"]),
        }
    ]
    assert [shard["shardId"] for shard in status["shards"]] == list(range(len(status["shards"])))
    assert len(status["shards"]) >= 16
    for shard in status["shards"]:
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
