"""A server that is frozen (SIGSTOP) for longer than its lease, and thawed.

On one SQLite file nobody can take over meanwhile: the frozen process still holds the file. What is proved
here is that the lease has ended when it wakes, whatever its memory says, and that nothing is lost, early or
fired after a delete; two instances on one database are the simulator's and the cluster tests' business.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio
from load_clients import Load
from real_server import RealReceiver, RealServer, free_port, serve_in_vain, until
from scripts.gate.seeds import new_seed

from duetime.testing.checker import Result

FREEZES = 6
LEASE_SECONDS = 0.6
QUICK = {
    "DUETIME_ENGINE_LEASE": "600ms",
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "150ms",
    "DUETIME_ENGINE_DEAD_AFTER": "800ms",
}


@pytest_asyncio.fixture
async def quick(tmp_path: Path) -> AsyncIterator[RealServer]:
    """A server with a short lease."""
    server = RealServer(tmp_path)
    server.settings.update(QUICK)
    await server.start()
    yield server
    if server.is_running:
        server.signal(signal.SIGCONT)
    await server.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


async def test_case_1_frozen_beyond_the_lease_under_load_loses_nothing_and_fires_nothing_wrong(
    quick: RealServer, receiver: RealReceiver
) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    load = Load(quick, receiver, rng)
    async with load.running():
        for _ in range(FREEZES):
            await load.acknowledged(rng.randint(1, 200))
            quick.signal(signal.SIGSTOP)
            await asyncio.sleep(LEASE_SECONDS + rng.uniform(0.1, 1.0))
            quick.signal(signal.SIGCONT)
            await quick.ready(5)
        await load.acknowledged(100)
    await load.until_nothing_is_scheduled()
    assert await quick.stop() == 0
    assert "Traceback" not in quick.log.read_text()
    load.judge(seed)
    assert load.results[Result.INFO] == 0, "a process that was only frozen answers in the end"
    assert len(receiver.callbacks) > FREEZES * 20


async def test_case_1_a_thawed_server_fires_nothing_until_a_heartbeat_has_succeeded(
    quick: RealServer, receiver: RealReceiver
) -> None:
    """Its heartbeats are kept from succeeding by a lock on the file, so that there is time to look."""
    status, _ = await quick.call("timers/create", {"timerId": "a", "delay": "300ms", "callbackUrl": receiver.url})
    assert status == 200
    other = sqlite3.connect(quick.file, isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        quick.signal(signal.SIGSTOP)
        await asyncio.sleep(LEASE_SECONDS + 0.3)  # the timer comes due and the lease ends while it is frozen
        quick.signal(signal.SIGCONT)

        async def has_tried() -> bool:
            return await quick.metric('duetime_heartbeats_total{result="failed"}') > 0

        await until(has_tried, "a heartbeat has failed")
        assert "the lease has run out" in (await quick.not_ready() or "")
        assert "locked by another program" in (await quick.not_ready() or "")
        assert receiver.bodies == []
        other.execute("ROLLBACK")
    finally:
        other.close()
    await receiver.received(1)
    await quick.ready()
    assert await quick.stop() == 0
    assert [body["attempt"] for body in receiver.bodies] == [1]


async def test_case_55_a_frozen_server_still_holds_its_file(quick: RealServer) -> None:
    quick.signal(signal.SIGSTOP)
    await asyncio.sleep(LEASE_SECONDS)
    listen = f"127.0.0.1:{free_port()}"
    code, said = await asyncio.to_thread(serve_in_vain, "--store", f"sqlite:///{quick.file}", "--listen", listen)
    assert code == 2
    assert f"in use by process {quick.pid}" in said
    quick.signal(signal.SIGCONT)
    await quick.ready()
