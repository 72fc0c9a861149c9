"""The client that knows the way, in front of two real instances on one PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from real_server import RealReceiver, RealServer, until

from duetime.client import AsyncClient, Client, Created, NewTimer, OutcomeUnknown
from servers import fresh_database, postgres

CREATES = 400

Condition = Callable[[], Awaitable[bool]]


class Pair:
    """Two instances that share the shards."""

    def __init__(self, folder: Path, url: str) -> None:
        self.both = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            self.both.append(RealServer(folder / name, DUETIME_STORE_URL=url))
        self.a, self.b = self.both

    async def start(self) -> None:
        for server in self.both:
            await server.start()
        await until(self.is_shared_out, "each owns half of the shards, and both know it")

    async def is_shared_out(self) -> bool:
        for server in self.both:
            status, found = await server.call("cluster/map", {})
            owners = found["owners"] if status == 200 else [None]
            counts = [owners.count(index) for index in range(len(found["instances"]))]
            if None in owners or len(counts) != 2 or abs(counts[0] - counts[1]) > 1:
                return False
        return True

    async def forwards(self) -> float:
        return sum([await server.metric('duetime_forwards_total{result="ok"}') for server in self.both])

    async def created(self) -> list[float]:
        return [await server.metric("duetime_timers_created_total") for server in self.both]

    async def close(self) -> None:
        for server in self.both:
            await server.close()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    pair = Pair(tmp_path, fresh_database(postgres(18)))
    try:
        await pair.start()
        yield pair
    finally:
        await pair.close()


@pytest.fixture
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


async def test_with_direct_creates_go_to_their_owners_and_nothing_is_handed_on(
    pair: Pair, receiver: RealReceiver
) -> None:
    hook = receiver.url
    async with AsyncClient(pair.a.url, direct=True) as client:
        await asyncio.gather(*(client.create(f"one-{i}", delay="1h", callback_url=hook) for i in range(CREATES)))
        many = await client.create_many([NewTimer(f"many-{i}", delay="1h", callback_url=hook) for i in range(CREATES)])
        assert all(isinstance(one, Created) for one in many)
        await client.delete_many([f"many-{i}" for i in range(CREATES)])
    async with AsyncClient(pair.b.url, direct=True, coalesce=True) as client:
        await asyncio.gather(*(client.create(f"more-{i}", delay="1h", callback_url=hook) for i in range(CREATES)))
    assert await pair.forwards() == 0
    created = await pair.created()
    assert sum(created) == 3 * CREATES
    assert min(created) > CREATES

    def plainly() -> None:
        with Client(pair.a.url) as client:
            client.create_many([NewTimer(f"plain-{i}", delay="1h", callback_url=hook) for i in range(CREATES)])

    await asyncio.to_thread(plainly)
    assert await pair.forwards() > CREATES / 4  # what direct has saved


@pytest.mark.parametrize("killed", ["a", "b"], ids=["the-one-of-the-url", "the-other"])
async def test_kill_9_of_an_instance_and_the_client_goes_on(pair: Pair, receiver: RealReceiver, killed: str) -> None:
    acknowledged: list[str] = []
    unknown: list[str] = []
    enough = asyncio.Event()

    async def create(worker: int) -> None:
        number = 0
        while not enough.is_set():
            timer_id = f"{worker}-{number}"
            number += 1
            try:
                await client.create(timer_id, delay=0.5, callback_url=receiver.url)
                acknowledged.append(timer_id)
            except OutcomeUnknown:
                unknown.append(timer_id)

    async with AsyncClient(pair.a.url, direct=True, timeout=20, retries=50) as client:
        workers = [asyncio.ensure_future(create(worker)) for worker in range(8)]
        await until(_more_than(acknowledged, 200), "creates go through")
        await getattr(pair, killed).kill()
        survivor = pair.b if killed == "a" else pair.a
        await until(_all_owned_by(survivor), "the other has taken over", within_seconds=30)
        await until(_more_than(acknowledged, len(acknowledged) + 200), "creates go through again")
        enough.set()
        await asyncio.gather(*workers)

    async def all_called() -> bool:
        return set(acknowledged) <= {body["timerId"] for body in receiver.bodies}

    await until(all_called, "every acknowledged timer has fired", within_seconds=30)
    # No more than were under way at the moment of the kill, and those that the other instance handed on to the dead.
    assert len(unknown) <= 2 * len(workers)
    assert {body["timerId"] for body in receiver.bodies} <= {*acknowledged, *unknown}


def _more_than(found: list[str], count: int) -> Condition:
    async def so_many() -> bool:
        return len(found) > count

    return so_many


def _all_owned_by(server: RealServer) -> Condition:
    async def all_owned() -> bool:
        _, found = await server.call("cluster/map", {})
        return len(found["instances"]) == 1 and set(found["owners"]) == {0}

    return all_owned
