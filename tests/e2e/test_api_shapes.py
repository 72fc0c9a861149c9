"""The calls about one timer, as programs rely on them: every field of every answer, on a real server.

Every request and answer is also held against spec/openapi.json (contract.py).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from contract import ATTEMPTED, ENDED, FAR, INSTANT, PLAIN, SPEC, URL, Asker, ended
from real_server import RealReceiver, until, wall_ms

from duetime.domain.instants import format_instant, parse_instant
from duetime.http.messages import Response

pytestmark = pytest.mark.asyncio(loop_scope="module")

GOOD = {"timerId": "a", "executeAt": FAR, "callbackUrl": URL}


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
        "flowKey": "shop",
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
    assert first["existed"] is False
    assert await api.ok("timers/create", **timer, payload=1) == {**first, "existed": True}
    assert await api.refused("timers/create", **timer, payload=2) == (409, "timer_exists", "timerId")
    assert (await api.timer(namespace=namespace, timerId="a"))["payload"] == 1


async def test_if_absent_after_the_end_answers_the_end_and_fires_nothing(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    at = format_instant(wall_ms())
    timer = {"namespace": namespace, "timerId": "a", "executeAt": at, "callbackUrl": receiver.url, "ifAbsent": True}
    await api.ok("timers/create", **timer)
    over = await ended(api, namespace=namespace, timerId="a")
    assert await api.ok("timers/create", **timer) == {"timer": over, "replaced": False, "existed": True}
    assert await api.refused("timers/create", **timer, payload=2) == (409, "timer_exists", "timerId")
    assert len(receiver.bodies) == 1


async def test_if_reached_ignore_after_the_end_answers_the_end_and_fires_nothing(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    timer = {"namespace": namespace, "timerId": "a", "callbackUrl": receiver.url, "ifReached": "ignore"}
    first = await api.ok("timers/create", **timer, executeAt=FAR)
    assert (first["replaced"], first["existed"]) == (False, False)
    again = await api.ok("timers/create", **timer, delay="0s")
    assert (again["replaced"], again["existed"]) == (True, False)
    over = await ended(api, namespace=namespace, timerId="a")
    ignored = {"timer": over, "replaced": False, "existed": True}
    assert await api.ok("timers/create", **timer, delay="0s", payload=2) == ignored
    many = await api.ok(
        "timers/createMany", timers=[{**timer, "delay": "0s"}, {**timer, "timerId": "b", "delay": "1h"}]
    )
    assert many["results"][0] == ignored
    assert many["results"][1]["existed"] is False
    assert len(receiver.bodies) == 1
    timer["ifReached"] = "replace"
    brought_back = await api.ok("timers/create", **timer, executeAt=FAR)
    assert (brought_back["replaced"], brought_back["existed"]) == (False, False)


async def test_the_answer_says_whether_a_timer_existed_only_if_asked(api: Asker, namespace: str) -> None:
    timer = {"namespace": namespace, "timerId": "a", "executeAt": FAR, "callbackUrl": URL}
    assert "existed" not in await api.ok("timers/create", **timer)
    assert (await api.ok("timers/create", **timer, ifAbsent=True))["existed"] is True
    assert (await api.ok("timers/create", **timer, ifAbsent=False))["existed"] is False


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
        ({**GOOD, "colour": 1}, "colour"),
        ({**GOOD, "retryPolicy": {"tries": 1}}, "retryPolicy.tries"),
        ({**GOOD, "missed": {"skip": "1s"}}, "missed.skip"),
        ({**GOOD, "timer_id": "a"}, "timer_id"),
        ({"executeAt": FAR, "callbackUrl": URL}, "timerId"),
        ({"timerId": "a", "callbackUrl": URL}, "executeAt"),
        ({"timerId": "a", "executeAt": FAR}, "callbackUrl"),
        ({"timerId": "a", "executeAt": FAR, "delay": "1s", "callbackUrl": URL}, "delay"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": "ftp://example.com"}, "callbackUrl"),
        ({"timerId": "a", "executeAt": FAR, "callbackUrl": "https://user:pw@example.com"}, "callbackUrl"),
        ({"timerId": "a", "delay": "-1s", "callbackUrl": URL}, "delay"),
        ({"timerId": "a", "delay": "a while", "callbackUrl": URL}, "delay"),
        ({"timerId": 17, "executeAt": FAR, "callbackUrl": URL}, "timerId"),
        ({**GOOD, "callbackTimeoutSeconds": 0}, "callbackTimeoutSeconds"),
        ({**GOOD, "callbackTimeoutSeconds": 301}, "callbackTimeoutSeconds"),
        ({**GOOD, "ifAbsent": "yes"}, "ifAbsent"),
        ({**GOOD, "ifReached": "keep"}, "ifReached"),
        ({**GOOD, "ifReached": None}, "ifReached"),
        ({**GOOD, "tags": ["t"] * 21}, "tags"),
        ({**GOOD, "retryPolicy": {"maxRetries": -1}}, "retryPolicy.maxRetries"),
        (
            {**GOOD, "retryPolicy": {"maxInterval": "never"}},
            "retryPolicy.maxInterval",
        ),
    ],
)
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
        "scheduledAt",
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
