"""Limits and pauses of a real server: what is paused does not fire, on any instance and after any restart, until it is
resumed; what is limited fires slowly; and others notice nothing.

That something did not fire is seen by a timer of another flow that was due later and has fired.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract import Asker
from real_server import RealReceiver, RealServer, until, wall_ms

from duetime.domain.instants import format_instant
from duetime.http.messages import Response
from servers import fresh_database, postgres

TIMERS = 8


@pytest_asyncio.fixture
async def server(tmp_path: Path) -> AsyncIterator[RealServer]:
    server = RealServer(tmp_path)
    try:
        await server.start()
        yield server
        assert "Traceback" not in server.log.read_text()
    finally:
        await server.close()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest.fixture
def api(server: RealServer) -> Asker:
    return Asker(server)


async def create(api: Asker, receiver: RealReceiver, *ids: str, at_ms: int | None = None, **fields: Any) -> None:
    at = format_instant(wall_ms() if at_ms is None else at_ms)
    timers = [{"timerId": name, "executeAt": at, "callbackUrl": receiver.url, **fields} for name in ids]
    results = (await api.ok("timers/createMany", timers=timers))["results"]
    assert all("timer" in result for result in results)


def called(receiver: RealReceiver) -> set[str]:
    return {callback.timer for callback in receiver.callbacks}


def some(prefix: str, count: int = TIMERS) -> list[str]:
    return [f"{prefix}-{number}" for number in range(count)]


async def waits(api: Asker, flow: dict[str, str], count: int) -> dict[str, Any]:
    """The flow, once so many of its due timers wait."""
    found: dict[str, Any] = {}

    async def do() -> bool:
        found.update((await api.ok("flows/get", **flow))["flow"])
        return bool(found["waiting"] == count)

    await until(do, f"{count} timers of {flow} wait")
    return found


# --- one instance --------------------------------------------------------------------------------


async def test_a_paused_flow_holds_its_own_timers_until_it_is_resumed(api: Asker, receiver: RealReceiver) -> None:
    flow = {"namespace": "default", "flowKey": receiver.url}
    assert (await api.ok("flows/pause", **flow))["flow"]["state"] == "paused"
    await create(api, receiver, *some("held"))
    assert (await waits(api, flow, TIMERS))["state"] == "paused"
    await create(api, receiver, "of another flow", flowKey="other")
    await receiver.received(1)
    assert called(receiver) == {"of another flow"}
    assert (await api.timer(timerId="held-0"))["attempts"] == 0
    assert (await api.ok("flows/resume", **flow))["flow"]["state"] == "closed"
    await receiver.received(1 + TIMERS)
    assert called(receiver) == {"of another flow", *some("held")}
    assert (await api.ok("flows/list", state="paused"))["flows"] == []


async def test_a_paused_namespace_accepts_timers_and_fires_none(api: Asker, receiver: RealReceiver) -> None:
    await api.ok("namespaces/create", namespace="shop", numShards=4)
    assert (await api.ok("namespaces/pause", namespace="shop"))["namespace"]["paused"] is True
    await create(api, receiver, *some("held"), namespace="shop")
    await waits(api, {"namespace": "shop", "flowKey": receiver.url}, TIMERS)
    await api.ok("timers/delete", namespace="shop", timerId="held-0")
    await create(api, receiver, "of another namespace")
    await receiver.received(1)
    assert (await api.ok("cluster/status"))["pausedNamespaces"] == 1
    assert (await api.ok("namespaces/resume", namespace="shop"))["namespace"]["paused"] is False
    await receiver.received(TIMERS)
    assert called(receiver) == {"of another namespace", *some("held")[1:]}


async def test_a_pause_of_a_flow_and_of_a_namespace_survive_a_kill(
    api: Asker, server: RealServer, receiver: RealReceiver
) -> None:
    await api.ok("namespaces/create", namespace="shop", numShards=4)
    await api.ok("namespaces/pause", namespace="shop")
    await api.ok("flows/pause", flowKey="held")
    await api.ok("flows/update", flowKey="held", rate=100, concurrency=3)
    await create(api, receiver, "a", flowKey="held")
    await create(api, receiver, "b", namespace="shop")
    await server.kill()
    await server.start()
    await waits(api, {"namespace": "default", "flowKey": "held"}, 1)
    await waits(api, {"namespace": "shop", "flowKey": receiver.url}, 1)
    await create(api, receiver, "free")
    await receiver.received(1)
    assert called(receiver) == {"free"}
    flow = (await api.ok("flows/resume", flowKey="held"))["flow"]
    assert (flow["rate"], flow["concurrency"]) == (100, 3)
    await api.ok("namespaces/resume", namespace="shop")
    await receiver.received(3)


async def test_a_rate_spreads_the_calls_and_when_it_is_cleared_the_rest_follows_at_once(
    api: Asker, receiver: RealReceiver
) -> None:
    await api.ok("flows/update", flowKey="slow", rate=10)
    await create(api, receiver, *some("slow", 20), flowKey="slow")
    await create(api, receiver, "fast", flowKey="other")
    await receiver.received(21)
    seen = [callback.seen_at_ms for callback in receiver.callbacks if callback.timer != "fast"]
    assert max(seen) - min(seen) >= 900  # at most ten at once, then ten in a second
    assert receiver.callbacks[-1].timer != "fast"
    await api.ok("flows/update", flowKey="slow", rate=0.001)
    await create(api, receiver, *some("more"), flowKey="slow")
    await create(api, receiver, "marker", flowKey="other")

    async def marker_was_called() -> bool:
        return "marker" in called(receiver)

    await until(marker_was_called, "the marker is called")
    assert len(called(receiver) & set(some("more"))) <= 1
    assert (await api.ok("flows/update", flowKey="slow", rate=None))["flow"]["rate"] is None
    await receiver.received(21 + 1 + TIMERS)


async def test_a_concurrency_limits_the_calls_in_flight_of_its_flow_only(api: Asker, receiver: RealReceiver) -> None:
    flow = {"namespace": "default", "flowKey": "slow"}
    await api.ok("flows/update", **flow, concurrency=2)
    receiver.may_answer.clear()
    await create(api, receiver, *some("slow"), flowKey="slow")
    assert (await waits(api, flow, TIMERS - 2))["inFlight"] == 2
    await create(api, receiver, *some("fast"), flowKey="other")
    await receiver.received(2 + TIMERS)
    assert len(called(receiver) & set(some("slow"))) == 2
    receiver.may_answer.set()
    await receiver.received(2 * TIMERS)


async def test_a_receiver_that_fails_is_seen_in_the_list_with_the_reason(api: Asker, receiver: RealReceiver) -> None:
    receiver.answers.extend(Response(500) for _ in range(100))
    await create(api, receiver, *some("broken", 40))
    found: list[dict[str, Any]] = []

    async def is_open() -> bool:
        found[:] = (await api.ok("flows/list", namespace="default"))["flows"]
        return any(flow["state"] in ("open", "halfOpen") for flow in found)

    await until(is_open, "the breaker is open")
    (flow,) = found
    assert flow["flowKey"] == receiver.url
    assert flow["origin"] == receiver.url.removesuffix("/hook")
    assert "500" in flow["lastError"]
    receiver.answers.clear()
    await api.ok("flows/pause", flowKey=receiver.url)
    await api.ok("flows/resume", flowKey=receiver.url)

    async def all_done() -> bool:
        listed = await api.ok("timers/list", state="delivered")
        return len(listed["timers"]) == 40

    await until(all_done, "all are delivered", within_seconds=60)


async def test_serve_paused_fires_nothing_until_the_operator_has_looked(
    api: Asker, server: RealServer, receiver: RealReceiver
) -> None:
    await api.ok("namespaces/create", namespace="shop", numShards=4)
    await create(api, receiver, *some("restored"), at_ms=wall_ms() + 1_500)
    await create(api, receiver, "of the shop", at_ms=wall_ms() + 1_500, namespace="shop")
    await server.kill()
    server.arguments = ("--paused",)
    await server.start()
    flow = {"namespace": "default", "flowKey": receiver.url}
    await waits(api, flow, TIMERS)
    await waits(api, {"namespace": "shop", "flowKey": receiver.url}, 1)
    await api.ok("timers/delete", timerId="restored-0")
    await api.ok("namespaces/resume", namespace="default")
    await receiver.received(TIMERS - 1)
    assert called(receiver) == set(some("restored")[1:])
    # A restart without it keeps what is paused, and only that.
    await server.stop()
    server.arguments = ()
    await server.start()
    await create(api, receiver, "marker")
    await receiver.received(TIMERS)
    await api.ok("namespaces/resume", namespace="shop")
    await receiver.received(TIMERS + 1)
    assert called(receiver) == {*some("restored")[1:], "marker", "of the shop"}


# --- two instances -------------------------------------------------------------------------------


@asynccontextmanager
async def two_instances(folder: Path) -> AsyncIterator[tuple[RealServer, RealServer]]:
    url = fresh_database(postgres(18))
    servers = []
    try:
        for name in "ab":
            (folder / name).mkdir()
            servers.append(RealServer(folder / name, store_url=url))
            await servers[-1].start()
        await until(lambda: _have_their_share(servers[0]), "both instances own shards")
        yield servers[0], servers[1]
    finally:
        for server in servers:
            await server.close()


async def _have_their_share(server: RealServer) -> bool:
    _, status = await server.call("cluster/status", {})
    shares = [member["shards"] for member in status.get("members", ()) if member["alive"]]
    return len(shares) == 2 and sum(shares) == 16 and min(shares) >= 7


async def test_a_pause_holds_on_both_instances_within_two_seconds_and_survives_their_restart(tmp_path: Path) -> None:
    receiver = RealReceiver()
    await receiver.start()
    try:
        async with two_instances(tmp_path) as (a, b):
            api, other = Asker(a), Asker(b)
            flow = {"namespace": "default", "flowKey": receiver.url}
            await api.ok("flows/pause", **flow)
            # Enough that both instances have some of each. The markers are due after the others.
            due_ms = wall_ms() + 2_000
            held, markers = some("held", 64), some("marker", 64)
            await create(api, receiver, *held, at_ms=due_ms)
            await create(api, receiver, *markers, at_ms=due_ms + 500, flowKey="marker")
            await receiver.received(64)
            assert called(receiver) == set(markers)
            assert len({callback.fence for callback in receiver.callbacks}) > 8
            for asked in (api, other):
                answer = await asked.ok("flows/list", namespace="default", state="paused")
                (listed,) = answer["flows"]
                assert (listed["flowKey"], listed["waiting"]) == (receiver.url, 64)
                assert "unanswered" not in answer

            await asyncio.gather(a.stop(), b.stop())
            await asyncio.gather(a.start(), b.start())
            await until(lambda: _have_their_share(a), "both instances own shards again")
            await waits(other, flow, 64)
            more = some("more", 64)
            await create(other, receiver, *more, flowKey="marker")
            await receiver.received(128)
            assert called(receiver) == {*markers, *more}

            resumed_ms = wall_ms()
            await other.ok("flows/resume", **flow)
            await receiver.received(192)
            assert called(receiver) == {*held, *markers, *more}
            assert wall_ms() - resumed_ms < 5_000

            await b.kill()
            answer = await api.ok("flows/list")
            if "unanswered" in answer:  # until b is declared dead
                assert [instance["address"] for instance in answer["unanswered"]] == [f"127.0.0.1:{b.port}"]
    finally:
        await receiver.close()


async def test_changes_of_two_operators_on_two_instances_are_both_kept(tmp_path: Path) -> None:
    async with two_instances(tmp_path) as (a, b):
        changes = [
            Asker(server).ok("flows/update", flowKey=f"{name}-{number}", rate=number + 1)
            for number in range(10)
            for name, server in (("a", a), ("b", b))
        ]
        await asyncio.gather(*changes)
        flows = (await Asker(a).ok("flows/list", namespace="default"))["flows"]
        assert {flow["flowKey"] for flow in flows} == {f"{name}-{n}" for name in "ab" for n in range(10)}
