"""kill -9 at random moments under load, again and again, judged by what the receiver saw.

`DUETIME_KILLS` is how often (50, as the promise is stated; more to look harder).
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from pathlib import Path

import pytest
from load_clients import Load
from real_server import RealReceiver, RealServer
from scripts.gate.seeds import new_seed

from duetime.testing.checker import Result

STARTS_KILLED = 3  # for each moment
KILLS = int(os.environ.get("DUETIME_KILLS", "50"))


async def test_kill_9_under_load_loses_nothing_fires_nothing_early_and_nothing_after_a_delete(tmp_path: Path) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    receiver = RealReceiver()
    await receiver.start()
    server = RealServer(tmp_path)
    load = Load(server, receiver, rng)
    try:
        await server.start()
        async with load.running():
            for _ in range(KILLS):
                await asyncio.sleep(rng.uniform(0.05, 0.6))
                await server.kill()
                await server.start()
            await load.acknowledged(200)
        await load.until_nothing_is_scheduled()
        assert await server.stop() == 0
    finally:
        await server.close()
        await receiver.close()
    load.judge(seed)
    assert load.results[Result.OK] > KILLS * 20
    assert len(receiver.callbacks) > KILLS * 10


@pytest.mark.parametrize("made", [".lock", "", "-wal", "-shm"])
async def test_kill_9_in_the_middle_of_the_first_start_and_of_the_second_leaves_a_file_that_starts(
    tmp_path: Path, made: str
) -> None:
    """`made`: the first start is killed at or shortly after the moment when this file of the database appears."""
    seed = new_seed()
    rng = random.Random(seed)
    receiver = RealReceiver()
    await receiver.start()
    try:
        for number in range(STARTS_KILLED):
            folder = tmp_path / str(number)
            folder.mkdir()
            server = RealServer(folder)
            try:
                await asyncio.to_thread(_killed_when, server, Path(f"{server.file}{made}"), rng.uniform(0, 0.02))
                await server.wait()
                server.launch()
                await asyncio.sleep(rng.uniform(0.1, 0.4))
                await server.kill()
                await server.start()
                timer = {"timerId": str(number), "delay": "0s", "callbackUrl": receiver.url}
                status, answer = await server.call("timers/create", timer)
                assert status == 200, answer
                await receiver.received(number + 1)
                assert await server.stop() == 0
                assert "Traceback" not in server.log.read_text()
            finally:
                await server.close()
    finally:
        await receiver.close()


def _killed_when(server: RealServer, file: Path, after_seconds: float) -> None:
    """In a thread, without a pause between two looks: what is to be hit takes milliseconds."""
    server.launch()
    give_up_at = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < give_up_at, f"{file} did not appear"
    kill_at = time.monotonic() + after_seconds
    while time.monotonic() < kill_at:
        pass
    server.signal(signal.SIGKILL)
