"""Instances that come and go in an orderly way, under load: nothing is lost, nothing repeated, nobody is sent away.

The lease is long here. Whoever leaves must not be waited for, so no test notices; and a machine that stands still for
some seconds does not make it look as if an instance had died.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Instance, Witness, name_in, staged
from load_clients import Load
from real_server import until
from scripts.gate.seeds import new_seed

from duetime.testing.checker import repetitions
from servers import fresh_database, postgres

LONG_LEASE = {"DUETIME_ENGINE_LEASE": "30s", "DUETIME_ENGINE_DEAD_AFTER": "40s"}


@pytest.fixture
def url() -> str:
    return fresh_database(postgres(18))


async def join(cluster: Cluster) -> Instance:
    return await cluster.join(settings=LONG_LEASE)


async def leave(cluster: Cluster, instance: Instance) -> None:
    assert await cluster.leave(instance) == 0, instance.log.read_text()[-2_000:]


async def judged(cluster: Cluster, load: Load, seed: int) -> None:
    """Everything has fired, once; everybody got an answer."""
    await cluster.until_all_have_fired()
    load.judge(seed, faults=[])
    assert load.refusals == [], "a request waits for the new owner of its shard, and nobody is left in doubt"
    assert "Traceback" not in cluster.logs
    assert "it may be delivered twice" not in cluster.logs
    assert "is dead" not in cluster.logs


async def test_instances_join_and_leave_under_load(tmp_path: Path, url: str) -> None:
    seed = new_seed()
    async with staged(tmp_path, url, random.Random(seed)) as (cluster, load, _):
        await join(cluster)
        async with load.running():
            for _ in range(2):
                await load.acknowledged(200)
                await join(cluster)
                await cluster.until_even()
            for _ in range(2):
                await load.acknowledged(200)
                await leave(cluster, cluster.instances[0])
                await cluster.until_even()
            await load.acknowledged(200)
        await judged(cluster, load, seed)


async def test_a_rolling_restart_loses_nothing_and_repeats_nothing(tmp_path: Path, url: str) -> None:
    seed = new_seed()
    async with staged(tmp_path, url, random.Random(seed)) as (cluster, load, _):
        for _ in range(3):
            await join(cluster)
        async with load.running():
            for instance in list(cluster.instances):
                await load.acknowledged(200)
                await leave(cluster, instance)
                await join(cluster)
            await load.acknowledged(200)
        await judged(cluster, load, seed)


async def test_sigterm_lets_deliveries_land_before_another_instance_gets_their_timers(tmp_path: Path, url: str) -> None:
    async with staged(tmp_path, url, random.Random(new_seed()), kindly=True) as (cluster, _, witness):
        leaver, other = await join(cluster), await join(cluster)
        await cluster.until_even()
        witness.hold()
        await created(other, witness, [f"flying {n}" for n in range(40)])
        await witness.called(40)
        flying = sum(call.owner == leaver.who for call in witness.callbacks)
        assert 0 < flying < 40, "both have some"

        leaving = asyncio.create_task(cluster.leave(leaver))

        async def only_those_in_flight_are_left() -> bool:
            return "waiting for deliveries in flight" in leaver.log.read_text()

        await until(only_those_in_flight_are_left, "it says that it waits")
        # What hangs on nobody's answer goes on meanwhile: a timer of the other one's is made and fired.
        mine = await shard_owned_by(cluster, other)
        await created(other, witness, [name_in(mine, "meanwhile")])
        await witness.called(41)
        assert leaver.is_running
        witness.let_go()
        assert await leaving == 0
        await cluster.until_all_have_fired()
        assert len(witness.callbacks) == 41
        assert repetitions(witness.callbacks) == []


@pytest.mark.parametrize("ex_owner", ["moved on", "gone"])
async def test_case_27_a_command_sent_on_to_an_ex_owner_reaches_the_new_one(
    tmp_path: Path, url: str, ex_owner: str
) -> None:
    """The instance that is asked sleeps through the move, so it can only send the request to where the shard was."""
    async with staged(tmp_path, url, random.Random(new_seed()), kindly=True) as (cluster, _, witness):
        asked, former = await join(cluster), await join(cluster)
        await cluster.until_even()
        was = await cluster.owners()
        asked.signal(signal.SIGSTOP)
        asked.leaving = True
        latter = await join(cluster)
        if ex_owner == "gone":
            await leave(cluster, former)

        async def has_moved() -> bool:
            return bool(await moved(cluster, was, former, latter))

        await until(has_moved, "a shard has moved")
        shards = await moved(cluster, was, former, latter)
        names = [name_in(shard, f"{n}") for n, shard in enumerate(shards * 5)]
        asking = asyncio.create_task(created(asked, witness, names))
        await until(lambda: waiting_at(asked), "the requests wait at the instance that sleeps")
        asked.signal(signal.SIGCONT)
        await asking
        await witness.called(len(names))
        await cluster.until_all_have_fired()
        assert sorted(call.timer for call in witness.callbacks) == sorted(names)


# --- on the stage --------------------------------------------------------------------------------


async def created(instance: Instance, witness: Witness, names: list[str]) -> None:
    async def create(name: str) -> None:
        timer: dict[str, Any] = {"timerId": name, "delay": "0s", "callbackUrl": witness.url, "payload": name}
        status, answer = await instance.call("timers/create", timer)
        assert status == 200, answer

    await asyncio.gather(*(create(name) for name in names))


async def moved(cluster: Cluster, was: dict[int, str], former: Instance, latter: Instance) -> list[int]:
    now = await cluster.owners()
    return [shard for shard in was if was[shard] == address_of(former) and now[shard] == address_of(latter)]


async def shard_owned_by(cluster: Cluster, instance: Instance) -> int:
    return next(shard for shard, address in (await cluster.owners()).items() if address == address_of(instance))


def address_of(instance: Instance) -> str:
    return f"127.0.0.1:{instance.port}"


async def waiting_at(instance: Instance) -> bool:
    """By the kernel: bytes have arrived on a connection to it that nobody has read."""
    port = f"0100007F:{instance.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(line[1] == port and line[4].partition(":")[2] != "00000000" for line in lines)
