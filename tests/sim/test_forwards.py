"""The simulated instances use the real protocol between instances, over a network with faults."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest
from scripted_cluster import ScriptedCluster, run_scripted

from duetime.domain.timer import TimerSpec
from duetime.testing.simulate import run_seeds
from duetime.testing.simulation.cluster import Instance
from duetime.testing.simulation.peers import PROTOCOL_ERRORS


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_every_kind_of_fault_between_instances_happens_and_breaks_no_invariant() -> None:
    totals = run_seeds(0, 20)
    assert not totals.failed, "\n".join(totals.failures)
    assert set(totals.faults) >= {
        "forward lost",
        "answer to a forward lost",
        "forward repeated",
        "connection to a peer refused",
        "kept connection to a peer broken",
        "answer of a peer unreadable",
        "HTTP 500 from a peer",
    }


def test_a_resumed_instance_accepts_forwards_as_soon_as_it_owns_shards() -> None:
    """The instance joins again under a new id, after its peers have sent many requests to its old id."""

    async def scenario(cluster: ScriptedCluster) -> None:
        asking, frozen = await cluster.launch_many(2)
        for name in await cluster.names_of(frozen, 100):
            await create(asking, name)
        was = frozen.service.as_peer().instance_id
        cluster.loop.freeze(frozen.name)
        await asyncio.sleep(8)
        cluster.loop.resume(frozen.name)
        await cluster.until(lambda: frozen.service.as_peer().instance_id != was and bool(frozen.engine.shards))
        await asyncio.sleep(2)
        began_ms = cluster.now_ms()
        for name in await cluster.names_of(frozen, 20, "after"):
            await create(asking, name)
        assert cluster.now_ms() - began_ms < 1_000
        assert not [kind for kind in PROTOCOL_ERRORS if cluster.faults[kind]]

    run_scripted(scenario, check=False)  # no client of the checker sent it


async def create(instance: Instance, name: str) -> None:
    spec = TimerSpec(namespace="default", timer_id=name, delay_ms=60_000, callback_url="http://ok", payload='"x"')
    await instance.create_task(instance.service.create(spec))
