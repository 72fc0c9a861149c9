"""Concurrent calls that share a request (`coalesce`)."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from scripted_server import LOST, Answer, Peer, batch_rule, created, problem

from duetime.client import (
    AsyncClient,
    Created,
    InvalidField,
    OutcomeUnknown,
    Verdict,
)


async def test_concurrent_calls_share_a_request_with_coalesce(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        results = await asyncio.gather(*[client.create(f"t{i}", delay=1) for i in range(1_500)])
        assert [r.timer.timer_id for r in results] == [f"t{i}" for i in range(1_500)]
        assert [len(body["timers"]) for _, body in peer.requests] == [1_000, 500]
        verdicts = await asyncio.gather(*[client.delete(f"t{i}") for i in range(10)])
    assert verdicts == [Verdict.CANCELLED] * 10
    assert peer.paths[2:] == ["timers/deleteMany"]


async def test_a_single_coalesced_create_is_sent_at_once(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        for name in "ab":
            assert (await client.create(name, delay=1)).timer.timer_id == name
    assert [len(body["timers"]) for _, body in peer.requests] == [1, 1]


async def test_coalesced_creates_fail_separately_and_keep_their_retry_rules(peer: Peer) -> None:
    peer.script = [
        Answer({"results": [created("a"), {"error": problem(400, "invalid_field", field="timerId")}]}),
        LOST,
    ]
    async with AsyncClient(peer.url, coalesce=True, retries=1) as client:
        first = await asyncio.gather(*[client.create(n, delay=1) for n in "ab"], return_exceptions=True)
        lost = await asyncio.gather(*[client.create(n, delay=1) for n in "cd"], return_exceptions=True)
    assert [type(result) for result in first] == [Created, InvalidField]
    assert [type(result) for result in lost] == [OutcomeUnknown] * 2
    assert lost[0] is not lost[1]
    assert len(peer.requests) == 2


async def test_coalesced_creates_with_if_absent_are_retried_separately_from_plain_ones(peer: Peer) -> None:
    seen: set[str] = set()

    def lose_each_the_first_time(path: str, body: Any) -> Answer:
        is_new = str(body) not in seen
        seen.add(str(body))
        return LOST if is_new else batch_rule(path, body)

    peer.rule = lose_each_the_first_time
    async with AsyncClient(peer.url, coalesce=True) as client:
        plain, safe = await asyncio.gather(
            client.create("plain", delay=1), client.create("safe", delay=1, if_absent=True), return_exceptions=True
        )
    assert isinstance(plain, OutcomeUnknown)
    assert isinstance(safe, Created)


async def test_a_caller_that_gives_up_while_its_request_is_in_flight_does_not_shift_the_results(peer: Peer) -> None:
    arrived, may_answer = threading.Event(), threading.Event()

    def answer_later(path: str, body: Any) -> Answer:
        arrived.set()
        may_answer.wait()
        return batch_rule(path, body)

    peer.rule = answer_later
    async with AsyncClient(peer.url, coalesce=True) as client:
        tasks = [asyncio.ensure_future(client.create(n, delay=1)) for n in "abc"]
        assert await asyncio.to_thread(arrived.wait, 10)
        tasks[0].cancel()
        may_answer.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert [result.timer.timer_id for result in done[1:] if isinstance(result, Created)] == ["b", "c"]
    assert [[item["timerId"] for item in body["timers"]] for _, body in peer.requests] == [["a", "b", "c"]]


async def test_a_cancelled_caller_does_not_disturb_the_others(peer: Peer) -> None:
    peer.rule = batch_rule
    async with AsyncClient(peer.url, coalesce=True) as client:
        tasks = [asyncio.ensure_future(client.create(n, delay=1)) for n in "abc"]
        await asyncio.sleep(0)
        tasks[1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in done] == [Created, asyncio.CancelledError, Created]
