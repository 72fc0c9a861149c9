"""What the clients say when an answer of a real server was lost and they asked again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from answer_proxy import AnswerProxy
from contract import FAR
from real_server import RealReceiver, RealServer, until

from duetime.client import AsyncClient, Client, NotFound
from duetime.domain.timer import State, Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def proxy(server: RealServer) -> AsyncIterator[AnswerProxy]:
    async with AnswerProxy(server.port) as proxy:
        yield proxy


@pytest_asyncio.fixture(loop_scope="module", params=[False, True], ids=["single", "coalesced"])
async def client(request: pytest.FixtureRequest, proxy: AnswerProxy, namespace: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(proxy.url, namespace=namespace, coalesce=request.param) as client:
        yield client


async def test_a_delete_of_a_scheduled_timer_is_cancelled(client: AsyncClient, proxy: AnswerProxy) -> None:
    await client.create("a", at=FAR, callback_url="http://127.0.0.1:9/hook")
    proxy.lose_answers()
    assert await client.delete("a") is Verdict.CANCELLED
    assert len(proxy.lost) == 1
    assert b"cancelled" in proxy.lost[0]


async def test_a_delete_of_a_timer_in_flight_is_in_flight(
    client: AsyncClient, proxy: AnswerProxy, receiver: RealReceiver
) -> None:
    receiver.may_answer.clear()
    await client.create("a", delay="0s", callback_url=receiver.url)
    await receiver.received(1)
    proxy.lose_answers()
    assert await client.delete("a") is Verdict.IN_FLIGHT
    assert b"inFlight" in proxy.lost[0]


async def test_a_delete_of_a_delivered_timer_came_too_late(
    client: AsyncClient, proxy: AnswerProxy, receiver: RealReceiver
) -> None:
    await client.create("a", delay="0s", callback_url=receiver.url)
    await until_delivered(client, "a")
    proxy.lose_answers()
    assert await client.delete("a") is Verdict.ALREADY_REACHED
    assert len(proxy.lost) == 1


async def test_delete_many_says_of_each_timer_what_became_of_it(
    client: AsyncClient, proxy: AnswerProxy, receiver: RealReceiver
) -> None:
    await client.create("delivered", delay="0s", callback_url=receiver.url)
    await until_delivered(client, "delivered")
    receiver.may_answer.clear()
    await client.create("in flight", delay="0s", callback_url=receiver.url)
    await receiver.received(2)
    await client.create("scheduled", at=FAR, callback_url=receiver.url)
    proxy.lose_answers()
    *verdicts, error = await client.delete_many(["scheduled", "in flight", "delivered", "never"])
    assert verdicts == [Verdict.CANCELLED, Verdict.IN_FLIGHT, Verdict.ALREADY_REACHED]
    assert isinstance(error, NotFound)
    assert len(proxy.lost) == 1


async def test_the_synchronous_client_says_the_same(proxy: AnswerProxy, namespace: str) -> None:
    def delete() -> list[object]:
        with Client(proxy.url, namespace=namespace) as client:
            for name in "abc":
                client.create(name, at=FAR, callback_url="http://127.0.0.1:9/hook")
            proxy.lose_answers()
            one = client.delete("a")
            proxy.lose_answers()
            return [one, *client.delete_many(["b", "c"])]

    assert await asyncio.to_thread(delete) == [Verdict.CANCELLED] * 3
    assert len(proxy.lost) == 2


async def until_delivered(client: AsyncClient, timer_id: str) -> None:
    async def is_delivered() -> bool:
        return (await client.get(timer_id)).state is State.DELIVERED

    await until(is_delivered, f"{timer_id} is delivered")
