"""Limits of flows hold for the whole cluster: real processes on PostgreSQL.

One flow may be called five times a second, another one once at a time. The timers of both are spread over all
instances. The rate is judged by the times at which the instances began the calls (`firedAt`): on a busy machine calls
that were made one after the other may reach the receiver together.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from pathlib import Path

import pytest
from cluster import Cluster, Sideline, Way
from msgspec.structs import replace
from real_server import until

from duetime.domain.instants import parse_instant
from duetime.domain.timer import FlowLimits
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer, serve_http
from servers import fresh_database, postgres

RATE = 5.0
TIMERS = 60
CALL_SECONDS = 0.5


class Receiver:
    """Remembers when calls came, and how many of a path were there at once."""

    def __init__(self) -> None:
        self.at: dict[str, list[float]] = {"/rate": [], "/single": []}  # seconds
        self.most: Counter[str] = Counter()
        self.callers: Counter[str] = Counter()  # by the User-Agent of the instance
        self._now: Counter[str] = Counter()
        self._server: HttpServer | None = None

    async def start(self) -> str:
        self._server = await serve_http(
            self._receive, "127.0.0.1", 0, body_bytes_max=1 << 20, connections_max=500, idle_timeout_ms=600_000
        )
        return f"http://127.0.0.1:{self._server.port}"

    async def _receive(self, request: Request) -> Response:
        path = request.path
        self.at[path].append(parse_instant(json.loads(request.body)["firedAt"]) / 1_000)
        self.callers[(request.header(b"user-agent") or "").partition("/")[0]] += 1
        self._now[path] += 1
        self.most[path] = max(self.most[path], self._now[path])
        await asyncio.sleep(CALL_SECONDS if path == "/single" else 0)
        self._now[path] -= 1
        return Response(200)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()


def most_in(seconds: float, at: list[float]) -> int:
    """The largest number of calls in any period of so many seconds."""
    return max(sum(first <= other < first + seconds for other in at) for first in at)


async def limit(cluster: Cluster, url: str) -> None:
    store = await cluster.looking()
    [namespace] = [row for row in await store.namespaces() if row.name == "default"]
    flows = {f"{url}/rate": FlowLimits(rate=RATE), f"{url}/single": FlowLimits(concurrency=1)}
    changed = replace(namespace, flows=flows, revision=namespace.revision + 1)
    assert await store.put_namespace(changed, namespace.revision)
    await asyncio.sleep(2.5)  # the bound within which every instance has read it


async def create(cluster: Cluster, url: str, path: str, count: int) -> None:
    for number in range(count):
        body = {"timerId": f"{path} {number}", "delay": "1s", "callbackUrl": f"{url}{path}"}
        status, answer = await cluster.call("timers/create", body)
        assert status == 200, answer


@pytest.mark.parametrize("killed", [False, True], ids=["calm", "one instance is killed and started again"])
async def test_the_limits_of_flows_hold_for_three_instances(tmp_path: Path, killed: bool) -> None:
    database_url = fresh_database(postgres(18))
    receiver = Receiver()
    with Sideline() as sideline:
        cluster = Cluster(tmp_path, database_url, random.Random(1), lambda port: Way(sideline, port))
        url = await receiver.start()
        try:
            for _ in range(3):
                await cluster.join()
            await cluster.until_even()
            await limit(cluster, url)
            await create(cluster, url, "/rate", TIMERS)
            await create(cluster, url, "/single", TIMERS // 3)
            instance = cluster.instances[1]
            if killed:

                async def has_begun() -> bool:
                    return len(receiver.at["/rate"]) >= 10

                await until(has_begun, "the first calls", 30)
                instance.leaving = True
                await instance.kill()
                await instance.start_whatever_it_takes()
                instance.leaving = False
            await cluster.until_all_have_fired(180)
        finally:
            await cluster.close()
            await receiver.close()

    rated = sorted(receiver.at["/rate"])
    assert len(rated) >= TIMERS
    moves = 2 * killed  # the instance goes and comes; each time the homes of some flows move
    for seconds in (2.0, 5.0, 10.0):
        assert most_in(seconds, rated) <= RATE * (seconds + 0.1) + 3 * (1 + moves)
    assert TIMERS / (rated[-1] - rated[0]) > RATE / (6 if killed else 2), "the rate is used, not only kept"
    assert len(receiver.callers) >= 3, "every instance has called"
    # A call of an instance that is killed goes on at the receiver for half a second; its lease lasts longer.
    assert receiver.most["/single"] == 1
    assert len(receiver.at["/single"]) >= TIMERS // 3
