"""An instance that was frozen until the others declared it dead joins again under a new id, and serves as before."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from cluster import Cluster, Instance, name_in, staged
from real_server import until
from scripts.gate.seeds import new_seed

from servers import fresh_database, postgres

QUICK = {
    "DUETIME_ENGINE_LEASE": "1500ms",
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "200ms",
    "DUETIME_ENGINE_DEAD_AFTER": "2s",
}


@pytest.fixture
def url() -> str:
    return fresh_database(postgres(18))


async def test_writes_are_forwarded_to_an_instance_that_joined_again_after_a_freeze(tmp_path: Path, url: str) -> None:
    async with staged(tmp_path, url, random.Random(new_seed()), kindly=True) as (cluster, _, witness):
        asking, frozen = [await cluster.join(settings=QUICK) for _ in range(2)]
        await cluster.until_even()

        async def create_on_frozen(text: str) -> int:
            """Through the other instance; answers the HTTP status."""
            shard = min(await shards_of(cluster, frozen))
            timer = {"timerId": name_in(shard, text), "delay": "1h", "callbackUrl": witness.url}
            return (await asking.call("timers/create", timer))[0]

        assert [await create_on_frozen(f"before {number}") for number in range(150)] == [200] * 150
        was = await member_id(asking, frozen)
        frozen.signal(signal.SIGSTOP)

        async def owns_nothing() -> bool:
            return not await shards_of(cluster, frozen)

        await until(owns_nothing, "the other instance has declared it dead and taken its shards")
        frozen.signal(signal.SIGCONT)
        await cluster.until_even()
        assert await member_id(asking, frozen) != was
        assert [await create_on_frozen(f"after {number}") for number in range(20)] == [200] * 20
        assert "replayed" not in cluster.logs


async def shards_of(cluster: Cluster, instance: Instance) -> set[int]:
    return {shard for shard, address in (await cluster.owners()).items() if address.endswith(f":{instance.port}")}


async def member_id(asked: Instance, instance: Instance) -> str:
    status, found = await asked.call("cluster/status", {})
    assert status == 200
    [member] = [m for m in found["members"] if m["alive"] and m["address"].endswith(f":{instance.port}")]
    return str(member["instanceId"])
