"""Three instances on one PostgreSQL with random faults, under load, judged by what the receiver saw.

A short form by default; `make chaos MINUTES=10` runs longer. `DUETIME_CHAOS_SEED` draws the same faults again; their
timing still depends on the machine. Instances with a safety rule taken away show that the judge can fail.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from cluster import name_in, staged
from random_faults import FaultInjector
from real_server import until, wall_ms
from scripts.gate.seeds import new_seed
from scripts.servers import Postgres

from duetime.testing.checker import Fault, Result, find_violations
from servers import fresh_database, own, postgres

FAULTS_SECONDS = float(os.environ.get("DUETIME_CHAOS_MINUTES", "0.3")) * 60
HEARTBEATS = 'duetime_heartbeats_total{result="ok"}'
BROKEN = str(Path(__file__).with_name("broken_server.py"))


@pytest.fixture
def own_database() -> Iterator[Postgres]:
    """A server of the test's own: it is killed."""
    with own("postgres18") as server:
        yield server


@pytest.fixture
def url() -> str:
    return fresh_database(postgres(18))


@pytest.mark.time_limit(300 + 3 * FAULTS_SECONDS, "every kind of fault, and each waits until the instances serve again")
async def test_random_faults_lose_nothing_and_repeat_only_what_was_in_flight(
    tmp_path: Path, own_database: Postgres
) -> None:
    seed = new_seed(os.environ.get("DUETIME_CHAOS_SEED"))
    rng = random.Random(seed)
    async with staged(tmp_path, fresh_database(own_database), rng) as (cluster, load, _):
        for client in load.clients:
            client.timeout_ms = 2_500  # longer than a request waits for an owner; not long for one that is frozen
        for _ in range(3):
            await cluster.join()
        injector = FaultInjector(cluster, own_database, rng)
        async with injector.watched(), load.running():
            await load.acknowledged(200)
            await injector.inject_for(FAULTS_SECONDS)
            await load.acknowledged(100)
            await cluster.until_even()
            await load.acknowledged(200)
        await cluster.until_all_have_fired()
        codes = [await cluster.leave(instance) for instance in list(cluster.instances)]
        print(injector.summary)
        load.judge(seed, injector.faults, tmp_path / "history.json")
        assert codes == [0, 0, 0]
        assert "Traceback" not in cluster.logs
        assert {fault.kind for fault in injector.faults} >= injector.kinds
        assert load.results[Result.OK] > 200


async def test_a_claim_that_has_to_wait_costs_nobody_the_lease_and_no_client_his_patience(
    tmp_path: Path, url: str
) -> None:
    """Somebody holds a lock on the row of one shard of an instance that dies. The others serve what they have."""
    quick = {
        "DUETIME_ENGINE_LEASE": "1500ms",
        "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "200ms",
        "DUETIME_ENGINE_DEAD_AFTER": "2s",
    }
    async with staged(tmp_path, url, random.Random(new_seed()), kindly=True) as (cluster, _, witness):
        dying, other = await cluster.join(settings=quick), await cluster.join(settings=quick)
        await cluster.until_even()
        was = {shard for shard, address in (await cluster.owners()).items() if address.endswith(f":{dying.port}")}
        locking: asyncpg.Connection[Any] = await asyncpg.connect(url)
        try:
            async with locking.transaction():
                await locking.execute("SELECT FROM shards WHERE shard_id = $1 FOR UPDATE", min(was))
                await dying.kill()

                async def is_buried() -> bool:
                    return "is dead" in other.log.read_text()

                await until(is_buried, "the other one has noticed, and claims")
                timer = {"timerId": name_in(min(was), "waits"), "delay": "0s", "callbackUrl": witness.url}
                status, answer = await other.call("timers/create", timer, timeout_ms=8_000)
                assert (status, answer["code"]) == (503, "not_applied")
                enough = await other.metric(HEARTBEATS) + 15  # three seconds: twice the lease

                async def beats_and_is_ready() -> bool:
                    assert await other.not_ready() is None
                    return await other.metric(HEARTBEATS) >= enough

                await until(beats_and_is_ready, "its heart goes on")
        finally:
            await locking.close()
        await cluster.leave(dying)
        await cluster.until_even()


# --- the judge can fail --------------------------------------------------------------------------


async def test_an_instance_that_fires_without_a_lease_is_caught(tmp_path: Path, url: str) -> None:
    """Cut off from the database it goes on, while its successor fires the same timers."""
    rng = random.Random(new_seed())
    async with staged(tmp_path, url, rng) as (cluster, load, _):
        broken = await cluster.join(program=(BROKEN, "no-lease"))
        await cluster.join()
        for client in load.clients:
            client.due_in_ms = (0, 15_000)  # much is in its memory when it is cut off
        async with load.running():
            await cluster.until_even()
            await load.acknowledged(500)
            from_ms = wall_ms()
            await broken.way.cut()
            excused = [Fault("link cut", from_ms, 2**62, broken.who)]

            async def is_caught() -> bool:
                violations = find_violations(load.requests, load.receiver.callbacks, faults=excused)
                return any(violation.invariant == "E" for violation in violations)

            await until(is_caught, "it fires what is another's, and the judge notices", 60)


async def test_an_instance_that_gives_its_shards_away_without_draining_is_caught(tmp_path: Path, url: str) -> None:
    """What it had in flight is delivered again by others, and no fault excuses that."""
    rng = random.Random(new_seed())
    async with staged(tmp_path, url, rng) as (cluster, load, _):
        await cluster.join()
        async with load.running():
            for _ in range(3):
                broken = await cluster.join(program=(BROKEN, "release-without-drain"))
                await cluster.until_even()
                await load.acknowledged(300)
                await cluster.leave(broken)
            await load.acknowledged(100)
        violations = find_violations(load.requests, load.receiver.callbacks, faults=[])
        assert "R" in {violation.invariant for violation in violations}
