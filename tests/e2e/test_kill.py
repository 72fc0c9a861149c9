"""kill -9 at random moments under load, again and again, judged by what the receiver saw.

`DUETIME_KILLS` is how often (50, as the promise is stated; more to look harder).
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from real_server import RealReceiver, RealServer, wall_ms

from duetime.http_client import HttpError
from duetime.testing.checker import Kind, Result, Wish, judge
from duetime.timetext import format_instant

KILLS = int(os.environ.get("DUETIME_KILLS", "50"))
CLIENTS = 8


class Client:
    """Creates, replaces, updates and deletes timers of its own, one wish at a time, and keeps the answers."""

    def __init__(self, name: str, server: RealServer, receiver: RealReceiver, rng: random.Random) -> None:
        self.name = name
        self.server = server
        self.receiver = receiver
        self.rng = rng
        self.number = 0
        self.values = 0
        self.stopping = False
        self.wishes: list[Wish] = []

    async def work(self) -> None:
        while not self.stopping:
            await self.one_wish()

    async def one_wish(self) -> None:
        old = self.number and self.rng.random() < 0.4
        number = self.rng.randint(max(1, self.number - 20), self.number) if old else self._next()
        timer = f"{self.name}-{number}"
        dice = self.rng.random()
        if old and dice < 0.4:
            await self._delete(timer)
        else:
            await self._put(timer, "timers/update" if old and dice < 0.7 else "timers/create")

    def _next(self) -> int:
        self.number += 1
        return self.number

    async def _put(self, timer: str, path: str) -> None:
        self.values += 1
        value = f"{self.name}v{self.values}"
        asked_at_ms = wall_ms()
        due_ms = asked_at_ms + self.rng.randint(-100, 2_500)
        body: dict[str, Any] = {"timerId": timer, "executeAt": format_instant(due_ms), "payload": value}
        if path.endswith("create"):
            body["callbackUrl"] = self.receiver.url
        result = await self._ask(path, body)
        self.wishes.append(Wish(timer, Kind.PUT, asked_at_ms, wall_ms(), result, value, due_ms))

    async def _delete(self, timer: str) -> None:
        asked_at_ms = wall_ms()
        result = await self._ask("timers/delete", {"timerId": timer})
        self.wishes.append(Wish(timer, Kind.DELETE, asked_at_ms, wall_ms(), result))

    async def _ask(self, path: str, body: dict[str, Any]) -> Result:
        try:
            status, answer = await self.server.call(path, body)
        except HttpError as error:
            if not error.sent:
                await asyncio.sleep(0.05)  # the server is down
                return Result.FAIL
            return Result.INFO
        if answer.get("verdict") == "alreadyReached" or status in (404, 409):
            return Result.FAIL
        assert status in (200, 429, 503), answer
        if status == 200:
            return Result.OK
        return Result.INFO if answer["code"] == "outcome_unknown" else Result.FAIL


async def test_kill_9_under_load_loses_nothing_fires_nothing_early_and_nothing_after_a_delete(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    receiver = RealReceiver()
    await receiver.start()
    server = RealServer(tmp_path)
    clients = [Client(f"c{n}", server, receiver, random.Random(rng.random())) for n in range(CLIENTS)]
    try:
        await server.start()
        workers = [asyncio.create_task(client.work()) for client in clients]
        for _ in range(KILLS):
            await asyncio.sleep(rng.uniform(0.05, 0.6))
            await server.kill()
            await server.start()
        await asyncio.sleep(1)
        for client in clients:
            client.stopping = True
        await asyncio.gather(*workers)
        await _until_nothing_is_scheduled(server)
        assert await server.stop() == 0
    finally:
        await server.close()
        await receiver.close()
    wishes = [wish for client in clients for wish in client.wishes]
    acknowledged = sum(wish.result is Result.OK for wish in wishes)
    violations = judge(wishes, receiver.callbacks)
    assert not violations, f"seed {seed}: {len(violations)} violations, the first:\n{violations[0]}"
    assert acknowledged > KILLS * 20
    assert len(receiver.callbacks) > KILLS * 10
    unknown = sum(wish.result is Result.INFO for wish in wishes)
    print(f"{KILLS} kills, {acknowledged} acknowledged, {unknown} unknown, {len(receiver.callbacks)} callbacks")


async def _until_nothing_is_scheduled(server: RealServer) -> None:
    """Everything left is due within seconds; a bound of a minute is a failure, not a race."""
    for _ in range(600):
        status, page = await server.call("timers/list", {"state": "scheduled", "limit": 1})
        assert status == 200
        if not page["timers"] and page["nextCursor"] is None:
            return
        await asyncio.sleep(0.1)
    raise AssertionError("timers are still scheduled a minute after the load ended")
