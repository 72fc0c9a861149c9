"""Orders between instances, which a network may repeat: whatever was answered once is the answer."""

from __future__ import annotations

import asyncio

import pytest
from stage import Stage, staged

from duetime.cluster.forwarding import CreateCommand, Forward
from duetime.domain.timer import TimerSpec, shard_of
from duetime.errors import NotOwner


def test_case_27_a_forward_that_was_refused_is_refused_again_even_by_an_owner() -> None:
    async def story(stage: Stage) -> None:
        dying, heir = await stage.enter(2)
        [name] = await stage.names_of(dying, 1)
        shard_id = shard_of(name, stage.num_shards)
        spec = TimerSpec(namespace="default", timer_id=name, delay_ms=1_000, callback_url="http://ok", payload='"x"')
        # Its sender has seen the claim in the store before the claimant itself got the answer.
        early = Forward("early", shard_id, dying.engine.shards[shard_id].fence.version + 1, CreateCommand(spec))
        with pytest.raises(NotOwner):
            await heir.inside(heir.take(early))
        stage.crash(dying)
        await asyncio.sleep(10)
        assert heir.engine.shards[shard_id].fence.version == early.version
        with pytest.raises(NotOwner):
            await heir.inside(heir.take(early))
        again = Forward("again", shard_id, early.version, early.command)
        first = await heir.inside(heir.take(again))
        assert await heir.inside(heir.take(again)) is first
        await asyncio.sleep(5)
        assert [call.timer for call in stage.callbacks] == [name]

    staged(story, is_judged=False)  # no client asked for it
