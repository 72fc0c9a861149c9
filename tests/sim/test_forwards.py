"""The simulated instances speak the real protocol to each other, over a network with faults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from stage import Stage, staged

from duetime.domain.timer import TimerSpec
from duetime.testing.simulate import run_seeds
from duetime.testing.simulation.peers import NEVER
from duetime.testing.simulation.world import Instance


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_kind_of_fault_between_instances_happens_and_does_no_harm() -> None:
    totals = run_seeds(0, 20)
    assert not totals.failed, "\n".join(totals.stories)
    assert set(totals.faults) >= {
        "forward lost",
        "answer to a forward lost",
        "forward repeated",
        "connection to a peer refused",
        "kept connection to a peer broken",
        "answer of a peer unreadable",
        "HTTP 500 from a peer",
    }


def test_an_instance_that_was_frozen_takes_forwards_again_as_soon_as_it_owns_shards() -> None:
    """It joins again under a new id, after its peers have sent it many requests under the id before."""

    async def story(stage: Stage) -> None:
        asking, frozen = await stage.enter(2)
        for name in await stage.names_of(frozen, 100):
            await create(asking, name)
        was = frozen.service.as_peer().instance_id
        stage.loop.freeze(frozen.name)
        await asyncio.sleep(8)
        stage.loop.thaw(frozen.name)
        await stage.until(lambda: frozen.service.as_peer().instance_id != was and bool(frozen.engine.shards))
        await asyncio.sleep(2)
        began_ms = stage.now_ms()
        for name in await stage.names_of(frozen, 20, "after"):
            await create(asking, name)
        assert stage.now_ms() - began_ms < 1_000
        assert not [kind for kind in NEVER if stage.faults[kind]]

    staged(story, is_judged=False)  # no client asked for it


async def create(instance: Instance, name: str) -> None:
    spec = TimerSpec(namespace="default", timer_id=name, delay_ms=60_000, callback_url="http://ok", payload='"x"')
    await instance.inside(instance.service.create(spec))
