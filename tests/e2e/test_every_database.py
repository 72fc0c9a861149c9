"""Every database, the same promise: two instances under load, killed and cut off from it, judged by the receiver.

The storm is that of test_cluster_chaos.py, with faults on the links made by Toxiproxy. `DUETIME_CHAOS_MINUTES` makes
it longer, and blows on all, `DUETIME_CHAOS_SEED` draws the same faults again.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from cluster import staged
from load_clients import new_seed
from real_server import wall_ms
from storm import Storm

from duetime.testing.checker import Fault, Result
from servers import fresh_database, own, require

STORM_SECONDS = float(os.environ.get("DUETIME_CHAOS_MINUTES", "0.3")) * 60
FORGETFUL = {"ministack"}  # keeps everything in memory: it is neither killed nor restarted
DATABASES = ["postgres15", "mariadb", "mysql", "mongodb", "cassandra", "ministack"]
# The storm takes longest: without being asked for it blows once on each adapter, where the server is a real one.
STORMY = DATABASES if "DUETIME_CHAOS_MINUTES" in os.environ else ["postgres15", "mysql", "mongodb", "cassandra"]
if os.environ.get("DUETIME_TEST_TIDB"):
    DATABASES = STORMY = ["tidb"]


@pytest.mark.parametrize("name", DATABASES)
async def test_two_instances_and_kill_9_of_one_after_the_other(name: str, tmp_path: Path) -> None:
    seed = new_seed()
    rng = random.Random(seed)
    server = await asyncio.to_thread(require, name)
    url = await asyncio.to_thread(fresh_database, server)
    faults: list[Fault] = []
    async with staged(tmp_path, url, rng) as (cluster, load, _):
        for _ in range(2):
            await cluster.join()
        await cluster.until_even()
        async with load.running():
            for instance in cluster.instances:
                await load.acknowledged(100, within_seconds=60)
                from_ms = wall_ms()
                await instance.kill()
                faults.append(Fault("kill", from_ms, wall_ms(), instance.who))
                await load.acknowledged(100, within_seconds=60)
                await instance.start_whatever_it_takes()
                await cluster.until_even()
            await load.acknowledged(100, within_seconds=60)
        await cluster.until_all_have_fired()
        codes = [await cluster.leave(instance) for instance in list(cluster.instances)]
        load.judge(seed, faults, tmp_path / "history.json")
        assert codes == [0, 0]
        assert "Traceback" not in cluster.logs
        assert len(load.receiver.callbacks) > 200


@pytest.mark.parametrize("name", STORMY)
async def test_a_storm_with_faults_on_the_link_loses_nothing_and_repeats_only_what_was_in_flight(
    name: str, tmp_path: Path
) -> None:
    seed = new_seed(os.environ.get("DUETIME_CHAOS_SEED"))
    rng = random.Random(seed)
    proxy = await asyncio.to_thread(require, "toxiproxy")
    with own(name) as database:
        url = await asyncio.to_thread(fresh_database, database)
        async with staged(tmp_path, url, rng, proxy=proxy) as (cluster, load, _):
            for client in load.clients:
                client.timeout_ms = 2_500  # longer than a wish waits for an owner; not long for one that is frozen
            for _ in range(2):
                await cluster.join()
            storm = Storm(cluster, database, rng, keeps_data=name not in FORGETFUL)
            async with storm.watched(), load.running():
                await load.acknowledged(100, within_seconds=60)
                await storm.blow(STORM_SECONDS)
                await load.acknowledged(100, within_seconds=60)
                await cluster.until_even()
            await cluster.until_all_have_fired()
            codes = [await cluster.leave(instance) for instance in list(cluster.instances)]
            print(storm.summary)
            load.judge(seed, storm.faults, tmp_path / "history.json")
            assert codes == [0, 0]
            assert "Traceback" not in cluster.logs
            assert {fault.kind for fault in storm.faults} >= storm.kinds
            assert load.results[Result.OK] > 200
