"""Forwarded commands that the network repeats: the repetition gets the same answer as the first one."""

from __future__ import annotations

import asyncio

import pytest
from scripted_cluster import ScriptedCluster, run_scripted

from duetime.cluster.forwarding import CreateCommand, Forward
from duetime.domain.timer import TimerSpec, shard_of
from duetime.errors import NotOwner


def test_case_27_a_refused_forward_is_refused_again_even_if_the_receiver_owns_the_shard_by_then() -> None:
    async def scenario(cluster: ScriptedCluster) -> None:
        crashed, successor = await cluster.launch_many(2)
        [name] = await cluster.names_of(crashed, 1)
        shard_id = shard_of(name, cluster.num_shards)
        spec = TimerSpec(namespace="default", timer_id=name, delay_ms=1_000, callback_url="http://ok", payload='"x"')
        # The sender has read the claim in the store before the claiming instance got its answer.
        early = Forward("early", shard_id, crashed.engine.shards[shard_id].fence.version + 1, CreateCommand(spec))
        with pytest.raises(NotOwner):
            await successor.create_task(successor.take(early))
        cluster.crash(crashed)
        await asyncio.sleep(10)
        assert successor.engine.shards[shard_id].fence.version == early.version
        with pytest.raises(NotOwner):
            await successor.create_task(successor.take(early))
        again = Forward("again", shard_id, early.version, early.command)
        first = await successor.create_task(successor.take(again))
        assert await successor.create_task(successor.take(again)) is first
        await asyncio.sleep(5)
        assert [call.timer for call in cluster.callbacks] == [name]

    run_scripted(scenario, check=False)  # no client of the checker sent it
