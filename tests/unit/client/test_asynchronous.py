"""The asynchronous client: what it sends and returns."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from scripted_server import HOOK, LOST, NEW_YEAR, Answer, Peer, created, problem, timer_json

from duetime.client import (
    AsyncClient,
    InvalidField,
    NewTimer,
    OutcomeUnknown,
    RetryPolicy,
    Schedule,
    State,
    Verdict,
    models,
)
from duetime.errors import SetupError


async def test_a_create_sends_what_the_api_expects_and_returns_a_typed_timer(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created("order-17", payload={"order": 17}, tags=["eu"]))]
    result = await client.create(
        "order-17",
        at=datetime(2027, 1, 1, 10, tzinfo=timezone(timedelta(hours=1))),
        callback_url=HOOK,
        payload={"order": 17},
        retry_policy=RetryPolicy(max_retries=3),
        callback_timeout_seconds=5,
        headers={"x-shop": "1"},
        correlation_id="c-1",
        tags=["eu"],
        if_absent=True,
        namespace="orders",
    )
    assert peer.requests == [
        (
            "/api/v1/timers/create",
            {
                "timerId": "order-17",
                "namespace": "orders",
                "executeAt": "2027-01-01T09:00:00Z",
                "callbackUrl": HOOK,
                "payload": {"order": 17},
                "retryPolicy": {"maxRetries": 3},
                "callbackTimeoutSeconds": 5,
                "headers": {"x-shop": "1"},
                "correlationId": "c-1",
                "tags": ["eu"],
                "ifAbsent": True,
            },
        )
    ]
    assert result.timer.execute_at == NEW_YEAR
    assert result.timer.payload == {"order": 17}
    assert result.timer.state is State.SCHEDULED
    assert result.replaced is False


async def test_a_schedule_is_sent_as_given_and_returned(peer: Peer, client: AsyncClient) -> None:
    schedule = Schedule(at="2027-03-15T09:00", timezone="Europe/Berlin", repeat="daily")
    wired = {"at": "2027-03-15T09:00", "timezone": "Europe/Berlin", "repeat": "daily"}
    answer = created("a", schedule=wired, occurrence=2, scheduledAtLocal="2027-03-16T09:00:00+01:00", paused=True)
    peer.script = [Answer(answer), Answer({"timer": timer_json("a")}), Answer({"timer": timer_json("a")})]
    result = await client.create("a", schedule=schedule, callback_url=HOOK)
    assert peer.requests[0][1]["schedule"] == wired
    assert result.timer.schedule == schedule
    assert (result.timer.occurrence, result.timer.paused) == (2, True)
    assert result.timer.scheduled_at_local == "2027-03-16T09:00:00+01:00"
    await client.pause("a")
    await client.resume("a", namespace="orders")
    assert [path for path, _ in peer.requests[1:]] == ["/api/v1/timers/pause", "/api/v1/timers/resume"]
    assert peer.requests[2][1] == {"namespace": "orders", "timerId": "a"}
    with pytest.raises(InvalidField):
        await client.create("a", schedule=schedule, delay=1)


@pytest.mark.parametrize(
    ("delay", "sent"),
    [("30m", "30m"), (1.5, "1500ms"), (timedelta(seconds=90), "90000ms"), (1.1, "1100ms"), (0.0001, "1ms"), (0, "0ms")],
)
async def test_a_delay_may_be_text_seconds_or_a_timedelta_and_is_never_rounded_down(
    peer: Peer, client: AsyncClient, delay: Any, sent: str
) -> None:
    peer.script = [Answer(created())]
    await client.create("a", delay=delay)
    assert peer.requests[0][1]["delay"] == sent


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"at": datetime(2027, 1, 1)}, "at"),  # noqa: DTZ001 - the point of the test
        ({}, "at"),
        ({"at": NEW_YEAR, "delay": 1}, "at"),
        ({"delay": -1}, "delay"),
        ({"delay": float("nan")}, "delay"),
        ({"delay": 1, "payload": object()}, None),
    ],
)
async def test_invalid_arguments_are_refused_before_a_request_is_sent(
    peer: Peer, client: AsyncClient, arguments: Any, field: str | None
) -> None:
    with pytest.raises(InvalidField) as caught:
        await client.create("a", **arguments)
    assert caught.value.field == field
    assert peer.requests == []


async def test_an_update_sends_only_the_given_fields_and_none_resets_a_field(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer({"timer": timer_json(), "verdict": "inFlight"})]
    updated = await client.update("a", at=NEW_YEAR, payload=None)
    assert peer.requests[0][1] == {
        "namespace": "default",
        "timerId": "a",
        "executeAt": "2027-01-01T09:00:00Z",
        "payload": None,
    }
    assert updated.verdict is Verdict.IN_FLIGHT


async def test_if_absent_returns_whether_the_timer_existed(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created()), Answer({**created(), "existed": True})]
    found = [await client.create("a", delay=1, callback_url=HOOK, if_absent=True) for _ in range(2)]
    assert [one.existed for one in found] == [False, True]
    peer.script = [Answer({"results": [created(), {**created(), "existed": True}]})]
    many = await client.create_many([NewTimer("a", delay=1, if_absent=True)] * 2)
    assert [isinstance(one, models.Created) and one.existed for one in many] == [False, True]


async def test_if_reached_is_sent_and_the_answer_says_whether_the_timer_was_over(
    peer: Peer, client: AsyncClient
) -> None:
    peer.script = [Answer({**created(), "existed": False}), Answer({**created(), "existed": True})]
    found = [await client.create("a", delay=1, callback_url=HOOK, if_reached="ignore") for _ in range(2)]
    assert [one.existed for one in found] == [False, True]
    assert [body["ifReached"] for _, body in peer.requests] == ["ignore", "ignore"]
    peer.script = [Answer({"results": [{**created(), "existed": True}]})]
    [many] = await client.create_many([NewTimer("a", delay=1, if_reached="ignore")])
    assert isinstance(many, models.Created)
    assert many.existed
    assert peer.requests[2][1]["timers"][0]["ifReached"] == "ignore"


async def test_a_list_reads_all_pages_also_after_an_empty_one(peer: Peer, client: AsyncClient) -> None:
    peer.script = [
        Answer({"timers": [timer_json("a"), timer_json("b")], "nextCursor": "1"}),
        Answer({"timers": [], "nextCursor": "2"}),
        Answer({"timers": [timer_json("c")], "nextCursor": None}),
    ]
    found = [timer.timer_id async for timer in client.list(state=State.FAILED, due_from=NEW_YEAR, namespace="n")]
    assert found == ["a", "b", "c"]
    assert [body["cursor"] for _, body in peer.requests] == [None, "1", "2"]
    assert peer.requests[0][1]["state"] == "failed"
    assert peer.requests[0][1]["dueFrom"] == "2027-01-01T09:00:00Z"


async def test_a_list_asks_for_no_payloads_only_if_it_is_told_to(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer({"timers": [timer_json("a")], "nextCursor": None})] * 2
    assert [timer.payload async for timer in client.list(payloads=False)] == [None]
    assert [timer.timer_id async for timer in client.list()] == ["a"]
    assert [body.get("payloads") for _, body in peer.requests] == [False, None]


async def test_a_list_of_all_namespaces_names_none(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer({"timers": [timer_json("a")], "nextCursor": None})] * 2
    everywhere = client.list(correlation_id="c", all_namespaces=True)
    assert [timer.timer_id async for timer in everywhere] == ["a"]
    assert [timer.timer_id async for timer in client.list(correlation_id="c")] == ["a"]
    bodies = [body for _, body in peer.requests]
    assert [(body.get("allNamespaces"), body.get("namespace")) for body in bodies] == [(True, None), (None, "default")]


async def test_namespaces_have_methods_of_their_own(peer: Peer, client: AsyncClient) -> None:
    answer = {
        "namespace": "orders",
        "numShards": 4,
        "retryPolicy": {"maxRetries": 1, "aFieldOfTheFuture": 1},
        "callbackTimeoutSeconds": 10,
        "requireOk": False,
        "deliveredRetention": "1d",
        "failedRetention": "30d",
        "signingSecrets": ["whsec_…abcd"],
        "createdAt": "2027-01-01T09:00:00.000Z",
    }
    peer.script = [Answer({"namespace": answer}), Answer({"namespaces": [answer]}), Answer({})]
    peer.script.append(Answer({"namespace": answer}))
    made = await client.namespaces.create("orders", num_shards=4, failed_retention=timedelta(days=2))
    listed = await client.namespaces.list()
    await client.namespaces.delete("orders")
    assert peer.requests[0][1] == {"namespace": "orders", "numShards": 4, "failedRetention": "172800000ms"}
    await client.namespaces.create("users", size="large")
    assert peer.requests[3][1] == {"namespace": "users", "size": "large"}
    assert made.signing_secrets == ("whsec_…abcd",)
    assert made.retry_policy.max_retries == 1
    assert listed == (made,)


async def test_the_token_is_sent_to_the_server(peer: Peer) -> None:
    peer.script = [Answer({"timer": timer_json()})]
    async with AsyncClient(peer.url, "secret-token") as client:
        await client.get("a")
    assert "authorization: Bearer secret-token\r\n" in peer.heads[0]


def test_a_malformed_url_or_token_is_refused_by_the_constructor() -> None:
    for arguments in (("ftp://x",), ("http://user@host",), ("http://host", "two\r\nlines")):
        with pytest.raises(SetupError):
            AsyncClient(*arguments)


def test_the_url_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETIME_URL", "http://timers.example:1/")
    assert AsyncClient().url == "http://timers.example:1"
    assert AsyncClient("http://other.example").url == "http://other.example"


async def test_a_delete_whose_response_was_lost_still_returns_cancelled(peer: Peer, client: AsyncClient) -> None:
    cancelled = timer_json(state="cancelled", outcome="cancelled")
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), Answer({"timer": cancelled})]
    assert await client.delete("a") is Verdict.CANCELLED
    attempted = timer_json(state="cancelled", outcome="cancelled", attempts=1)
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), Answer({"timer": attempted})]
    assert await client.delete("a") is Verdict.IN_FLIGHT
    delivered = timer_json(state="delivered", outcome="delivered")
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), Answer({"timer": delivered})]
    assert await client.delete("a") is Verdict.ALREADY_REACHED


async def test_a_delete_whose_response_was_lost_is_unknown_if_the_timer_cannot_be_read(
    peer: Peer, client: AsyncClient
) -> None:
    """A token for writing only. Neither Forbidden nor ConnectionFailed would be true of the delete."""
    forbidden = Answer(problem(403, "forbidden"), 403)
    peer.script = [LOST, Answer({"verdict": "alreadyReached"}), forbidden]
    with pytest.raises(OutcomeUnknown, match="the timer is over, but whether this call cancelled it cannot be read"):
        await client.delete("a")
    peer.script = [LOST, Answer({"results": [{"verdict": "alreadyReached"}]}), forbidden]
    [result] = await client.delete_many(["a"])
    assert isinstance(result, OutcomeUnknown)


async def test_a_delete_that_was_certainly_not_applied_before_asks_for_nothing(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(problem(503, "not_applied"), 503), Answer({"verdict": "alreadyReached"})]
    assert await client.delete("a") is Verdict.ALREADY_REACHED
    assert peer.paths == ["timers/delete"] * 2
