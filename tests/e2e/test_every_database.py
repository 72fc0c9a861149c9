"""On every database: two instances under load are killed, and suffer random faults; the receiver's log is judged.

The random faults are those of test_cluster_chaos.py, with faults on the links made by Toxiproxy.
`DUETIME_CHAOS_MINUTES` sets how long they last, and runs them on all databases; `DUETIME_CHAOS_SEED` draws the same
faults again.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import ClassVar

import pytest
from cluster import staged
from random_faults import FaultInjector
from real_server import wall_ms
from scripts.gate.seeds import new_seed

from duetime.testing.checker import Fault, Result
from servers import fresh_database, own, require

ASKED_FOR = "DUETIME_CHAOS_MINUTES" in os.environ
FAULTS_SECONDS = float(os.environ.get("DUETIME_CHAOS_MINUTES", "0.3")) * 60


@pytest.mark.time_limit(300, "each instance is killed, and each step waits until the shards are shared out")
class Kills:
    NAME: ClassVar[str]  # of the server, in scripts/servers

    async def test_two_instances_are_killed_one_after_the_other_under_load(self, tmp_path: Path) -> None:
        seed = new_seed()
        rng = random.Random(seed)
        server = await asyncio.to_thread(require, self.NAME)
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


@pytest.mark.time_limit(300 + 3 * FAULTS_SECONDS, "every kind of fault, and each waits until the instances serve again")
class RandomFaults:
    NAME: ClassVar[str]
    KEEPS_DATA: ClassVar[bool] = True  # the database may be killed and restarted

    async def test_random_faults_lose_no_timer_and_repeat_only_what_was_in_flight(self, tmp_path: Path) -> None:
        seed = new_seed(os.environ.get("DUETIME_CHAOS_SEED"))
        rng = random.Random(seed)
        proxy = await asyncio.to_thread(require, "toxiproxy")
        with own(self.NAME) as database:
            url = await asyncio.to_thread(fresh_database, database)
            async with staged(tmp_path, url, rng, proxy=proxy) as (cluster, load, _):
                for client in load.clients:
                    client.timeout_ms = (
                        2_500  # longer than a request waits for an owner; not long for one that is frozen
                    )
                for _ in range(2):
                    await cluster.join()
                injector = FaultInjector(cluster, database, rng, keeps_data=self.KEEPS_DATA)
                async with injector.watched(), load.running():
                    await load.acknowledged(100, within_seconds=60)
                    await injector.inject_for(FAULTS_SECONDS)
                    await load.acknowledged(100, within_seconds=60)
                    await cluster.until_even()
                await cluster.until_all_have_fired()
                codes = [await cluster.leave(instance) for instance in list(cluster.instances)]
                print(injector.summary)
                load.judge(seed, injector.faults, tmp_path / "history.json")
                assert codes == [0, 0]
                assert "Traceback" not in cluster.logs
                assert {fault.kind for fault in injector.faults} >= injector.kinds
                assert load.results[Result.OK] > 200


# A class for each database and test: they run in several processes at the same time.


class TestKillsOnPostgres15(Kills):
    NAME = "postgres15"


class TestKillsOnMariaDb(Kills):
    NAME = "mariadb"


class TestKillsOnMySql(Kills):
    NAME = "mysql"


class TestKillsOnMongoDb(Kills):
    NAME = "mongodb"


class TestKillsOnCassandra(Kills):
    NAME = "cassandra"


class TestKillsOnMinistack(Kills):
    NAME = "ministack"


@pytest.mark.tidb
class TestKillsOnTiDb(Kills):
    NAME = "tidb"


class TestFaultsOnMySql(RandomFaults):
    NAME = "mysql"


class TestFaultsOnMongoDb(RandomFaults):
    NAME = "mongodb"


class TestFaultsOnCassandra(RandomFaults):
    NAME = "cassandra"


@pytest.mark.tidb
class TestFaultsOnTiDb(RandomFaults):
    NAME = "tidb"


# Random faults take longest. By default they run once for each adapter on a real server; for PostgreSQL that is
# test_cluster_chaos.py.
if ASKED_FOR:

    class TestFaultsOnPostgres15(RandomFaults):
        NAME = "postgres15"

    class TestFaultsOnMariaDb(RandomFaults):
        NAME = "mariadb"

    class TestFaultsOnMinistack(RandomFaults):
        NAME = "ministack"
        KEEPS_DATA = False  # it has everything in memory
