"""Which calls of the client are repeated, and how calls about many timers are sent."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_server import LOST, Answer, Peer, batch_rule, created, problem, timer_json

from duetime.client import (
    AsyncClient,
    Busy,
    Conflict,
    ConnectionFailed,
    Created,
    InvalidField,
    NewTimer,
    OutcomeUnknown,
    Verdict,
)

NOT_APPLIED = Answer(problem(503, "not_applied"), 503, "retry-after: 0\r\n")


UNKNOWN = Answer(problem(503, "outcome_unknown"), 503, "retry-after: 0\r\n")


BUSY = Answer(problem(429, "busy"), 429, "retry-after: 0\r\n")


# Without a problem document, so not of Duetime: a proxy that may have lost the answer of the server.
GATEWAYS = [Answer("gateway", status) for status in (502, 503, 504)]


@pytest.mark.parametrize("refusal", [NOT_APPLIED, BUSY])
async def test_a_plain_create_is_retried_if_nothing_was_applied(
    peer: Peer, client: AsyncClient, refusal: Answer
) -> None:
    peer.script = [refusal, refusal, Answer(created())]
    assert (await client.create("a", delay=1)).timer.timer_id == "a"
    assert len(peer.requests) == 3


async def test_the_number_of_retries_is_bounded(peer: Peer, client: AsyncClient) -> None:
    peer.script = [BUSY] * 9
    with pytest.raises(Busy):
        await client.create("a", delay=1)
    assert len(peer.requests) == 3


async def test_a_retry_after_longer_than_the_timeout_ends_the_call_at_once(peer: Peer) -> None:
    peer.script = [Answer(problem(429, "busy"), 429, "retry-after: 3600\r\n")]
    async with AsyncClient(peer.url, timeout=5) as client:
        with pytest.raises(Busy):
            await client.create("a", delay=1)
    assert len(peer.requests) == 1


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST, *GATEWAYS, Answer({"timer": 1})])
async def test_a_plain_create_of_unknown_outcome_is_never_retried(
    peer: Peer, client: AsyncClient, doubt: Answer
) -> None:
    peer.script = [doubt]
    with pytest.raises(OutcomeUnknown, match=r"it could fire twice.*if_absent"):
        await client.create("a", delay=1)
    assert len(peer.requests) == 1


async def test_a_plain_create_is_not_sent_twice_if_a_kept_connection_ends(peer: Peer, client: AsyncClient) -> None:
    peer.script = [Answer(created()), LOST]
    await client.create("a", delay=1)
    with pytest.raises(OutcomeUnknown):
        await client.create("b", delay=1)
    assert len(peer.requests) == 2


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST, *GATEWAYS])
async def test_a_create_with_if_absent_is_retried_after_an_unknown_outcome(
    peer: Peer, client: AsyncClient, doubt: Answer
) -> None:
    peer.script = [doubt, Answer(created())]
    await client.create("a", delay=1, if_absent=True)
    assert len(peer.requests) == 2


async def test_an_unknown_outcome_stays_unknown_after_later_failures(peer: Peer, client: AsyncClient) -> None:
    peer.script = [LOST, NOT_APPLIED, BUSY]
    with pytest.raises(OutcomeUnknown):
        await client.create("a", delay=1, if_absent=True)
    peer.script = [LOST, Answer(problem(409, "if_absent"), 409)]
    with pytest.raises(Conflict) as caught:
        await client.create("a", delay=1, if_absent=True)
    assert "may have been applied" in caught.value.__notes__[0]


@pytest.mark.parametrize("doubt", [UNKNOWN, LOST, NOT_APPLIED, BUSY, *GATEWAYS])
async def test_a_read_is_retried_after_any_lost_response(peer: Peer, client: AsyncClient, doubt: Answer) -> None:
    peer.script = [doubt, Answer({"timer": timer_json()})]
    assert (await client.get("a")).timer_id == "a"


async def test_update_fire_now_and_replay_of_unknown_outcome_are_not_retried(peer: Peer, client: AsyncClient) -> None:
    for call in (client.update("a", delay=1), client.fire_now("a"), client.replay("a")):
        peer.script = [LOST]
        with pytest.raises(OutcomeUnknown):
            await call
    assert peer.paths == ["timers/update", "timers/fireNow", "timers/replay"]


async def test_without_a_server_connection_failed_is_raised(peer: Peer) -> None:
    peer.stop()
    async with AsyncClient(peer.url, retries=1) as client:
        with pytest.raises(ConnectionFailed, match="cannot reach"):
            await client.create("a", delay=1)
        assert await client.ready() is False


async def test_create_many_sends_batches_and_returns_results_in_order(peer: Peer, client: AsyncClient) -> None:
    peer.rule = batch_rule
    results = await client.create_many([NewTimer(f"t{i}", delay=1, if_absent=i % 2 == 0) for i in range(2_500)])
    assert [r.timer.timer_id for r in results if isinstance(r, Created)] == [f"t{i}" for i in range(2_500)]
    assert sorted(len(body["timers"]) for _, body in peer.requests) == [250, 250, 1_000, 1_000]


async def test_create_many_retries_only_the_timers_that_failed(peer: Peer, client: AsyncClient) -> None:
    refusals = [{"error": problem(503, "not_applied")}, {"error": problem(400, "invalid_field", field="callbackUrl")}]
    peer.script = [Answer({"results": [created("a"), *refusals]}), Answer({"results": [created("b")]})]
    results = await client.create_many([NewTimer(name, delay=1) for name in "abc"])
    assert [type(result) for result in results] == [Created, Created, InvalidField]
    assert [item["timerId"] for item in peer.requests[1][1]["timers"]] == ["b"]


async def test_in_create_many_an_unknown_outcome_stays_unknown_after_later_failures(
    peer: Peer, client: AsyncClient
) -> None:
    not_applied = Answer({"results": [{"error": problem(503, "not_applied")}]})
    peer.script = [LOST, not_applied, not_applied]
    [result] = await client.create_many([NewTimer("a", delay=1, if_absent=True)])
    assert isinstance(result, OutcomeUnknown)
    assert len(peer.requests) == 3
    peer.script = [LOST, Answer({"results": [{"error": problem(409, "if_absent")}]})]
    [result] = await client.create_many([NewTimer("a", delay=1, if_absent=True)])
    assert isinstance(result, Conflict)
    peer.script = [LOST, not_applied, not_applied]
    [verdict] = await client.delete_many(["a"])
    assert isinstance(verdict, OutcomeUnknown)


async def test_in_create_many_plain_creates_of_unknown_outcome_are_not_sent_again(
    peer: Peer, client: AsyncClient
) -> None:
    peer.script = [LOST]
    results = await client.create_many([NewTimer(name, delay=1) for name in "ab"])
    assert [type(result) for result in results] == [OutcomeUnknown] * 2
    assert len(peer.requests) == 1


async def test_delete_many_asks_what_became_of_timers_whose_response_was_lost(peer: Peer, client: AsyncClient) -> None:
    states = {
        "cancelled": timer_json("cancelled", state="cancelled", outcome="cancelled"),
        "attempted": timer_json("attempted", state="cancelled", outcome="cancelled", attempts=1),
        "delivered": timer_json("delivered", state="delivered", outcome="delivered", attempts=1),
    }

    def rule(path: str, body: Any) -> Answer:
        if path.endswith("deleteMany"):
            return Answer({"results": [{"verdict": "alreadyReached"} for _ in body["timers"]]})
        timer = states.get(body["timerId"])
        return Answer(problem(404, "not_found"), 404) if timer is None else Answer({"timer": timer})

    peer.rule, peer.script = rule, [LOST]
    assert await client.delete_many([*states, "purged"]) == [
        Verdict.CANCELLED,
        Verdict.IN_FLIGHT,
        Verdict.ALREADY_REACHED,
        Verdict.ALREADY_REACHED,
    ]
    peer.requests.clear()
    assert await client.delete_many(list(states)) == [Verdict.ALREADY_REACHED] * 3
    assert peer.paths == ["timers/deleteMany"]  # nothing was lost, nothing is asked
