"""Limits of flows on two instances in virtual time: who divides them, who asks whom, what holds without answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_world import OK, URL, World, in_world
from msgspec.structs import replace
from two_instances import Wires, of_two, owned_by

from duetime.delivery import Attempt
from duetime.domain.flow_shares import ALLOWANCE_MS, FlowAllowance, FlowReport
from duetime.domain.settle import AttemptResult
from duetime.domain.timer import FlowLimits, shard_of
from duetime.engine import flow_homes
from duetime.engine.flow_limits import LimitedFlow
from duetime.errors import NotFound, Unserved


class Busy:
    """A receiver that takes its time, and counts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.now = self.most = 0
        self.at: list[float] = []
        self.by: list[str] = []

    def answers(self, world: World, name: str) -> None:
        async def answer(_: Attempt) -> AttemptResult:
            self.now += 1
            self.most = max(self.most, self.now)
            self.at.append(asyncio.get_running_loop().time())
            self.by.append(name)
            await asyncio.sleep(self.seconds)
            self.now -= 1
            return OK

        world.destinations.answers[URL] = answer


async def limit(world: World, flow_key: str = URL, **limits: float) -> None:
    old = await world.engine.namespaces.get("default")
    flows = {**old.flows, flow_key: FlowLimits(**limits)}  # type: ignore[arg-type]
    await world.store.put_namespace(replace(old, flows=flows, revision=old.revision + 1), old.revision)
    await asyncio.sleep(1.5)  # all instances have read it


async def create_on(world: World, count: int, delay_ms: int = 1_000, **fields: str) -> None:
    names = [f"t{n}" for n in range(10_000) if shard_of(f"t{n}", 16) in world.engine.shards][:count]
    await asyncio.gather(*(world.create(name, delay_ms, **fields) for name in names))


def home_and_other(a: World, b: World, flow_key: str = URL) -> tuple[World, World]:
    return (a, b) if shard_of(flow_key, 16) in a.engine.shards else (b, a)


def held_by(world: World) -> dict[str, tuple[float, int]]:
    allowances = world.engine.flow_allowances._allowances.values()
    return {allowance.flow.flow_key: (allowance.rate, allowance.concurrency) for allowance in allowances}


def run_two(scenario: Callable[[World, World, Wires, Busy], Awaitable[None]], seconds: float = 0.5) -> None:
    """`scenario` gets the home of the flow first."""

    async def run(a: World, b: World, wires: Wires) -> None:
        busy = Busy(seconds)
        home, other = home_and_other(a, b)
        busy.answers(home, "home")
        busy.answers(other, "other")
        await scenario(home, other, wires, busy)

    of_two(run)


# --- one instance --------------------------------------------------------------------------------


def test_alone_a_limited_flow_waits_for_nothing() -> None:
    async def scenario(world: World) -> None:
        await limit(world, rate=5.0, concurrency=1)
        began = world.engine.membership.now_ms()
        await world.create("t", 1_000)
        await asyncio.sleep(3)
        [(at_ms, _, _)] = world.destinations.calls
        assert at_ms - began == 1_000

    in_world(scenario)


def test_without_a_limited_flow_nothing_runs() -> None:
    async def scenario(world: World) -> None:
        rounds = 0
        right = world.engine.flow_allowances._round

        async def count() -> bool:
            nonlocal rounds
            rounds += 1
            return await right()

        world.engine.flow_allowances._round = count  # type: ignore[method-assign]
        await world.create("free", 100)
        await asyncio.sleep(10)
        assert world.destinations.called() == ["free"]
        assert rounds == 0
        await limit(world, concurrency=1)
        await world.create("t", 100)
        await asyncio.sleep(20)
        ran = rounds
        assert ran > 0
        await asyncio.sleep(20)
        assert rounds == ran, "and it ends when the flow is idle"
        assert world.engine.flow_homes.flows == 0

    in_world(scenario)


# --- two instances -------------------------------------------------------------------------------


def test_a_rate_holds_for_both_instances_and_is_used() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, rate=5.0)
        await create_on(home, 50)
        await create_on(other, 50)
        await asyncio.sleep(15)
        assert {"home", "other"} <= set(busy.by)
        for first in busy.at:
            assert sum(first <= at < first + 2 for at in busy.at) <= 5 * 2.05 + 2
        assert len(busy.at) > 0.9 * 5 * 13

    run_two(scenario, seconds=0.01)


def test_one_call_at_a_time_on_both_instances_and_both_get_turns() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, concurrency=1)
        await create_on(home, 20)
        await create_on(other, 20)
        await asyncio.sleep(20)
        assert busy.most == 1
        assert min(busy.by.count("home"), busy.by.count("other")) > 0.3 * len(busy.by)
        assert len(busy.by) > 0.6 * 19 / 0.5

    run_two(scenario)


def test_an_instance_that_alone_has_timers_gets_everything_after_one_request() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, rate=50.0, concurrency=7)
        await create_on(other, 30, 1_000)
        await asyncio.sleep(1.05)
        assert held_by(other) == {URL: (50.0, 7)}
        assert {address for address, _ in wires.reported} == {home.engine.membership.address}
        await asyncio.sleep(3)
        assert busy.most == 7

    run_two(scenario)


def test_an_allowance_is_given_back_when_nothing_waits_any_more() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, concurrency=1)
        await create_on(other, 1, 100)
        await asyncio.sleep(3)
        assert len(busy.at) == 1
        assert held_by(other) == {}
        assert home.engine.flow_homes.flows == 0
        asked = len(wires.reported)
        await asyncio.sleep(10)
        assert len(wires.reported) == asked

    run_two(scenario)


def test_what_does_not_fit_into_a_request_is_in_the_next() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        urls = (f"http://shop.test/{n}" for n in range(2_000))
        keys = [url for url in urls if shard_of(url, 16) in home.engine.shards][:700]
        old = await home.engine.namespaces.get("default")
        flows = {key: FlowLimits(concurrency=1) for key in keys}
        await home.store.put_namespace(replace(old, flows=flows, revision=old.revision + 1), old.revision)
        await asyncio.sleep(1.5)
        names = [f"t{n}" for n in range(10_000) if shard_of(f"t{n}", 16) in other.engine.shards]
        await asyncio.gather(
            *(other.create(name, 1_000, callback_url=key) for name, key in zip(names, keys, strict=False))
        )
        await asyncio.sleep(2)
        sizes = [len(reports) for _, reports in wires.reported]
        assert max(sizes) == 500
        assert len(other.destinations.calls) == 700

    run_two(scenario)


# --- no answer -----------------------------------------------------------------------------------


def test_without_an_answer_calls_stop_when_the_allowance_ends_and_go_on_with_a_share() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, concurrency=4)
        await create_on(other, 300, 1_000)
        await asyncio.sleep(3)
        began = len(busy.at)
        assert busy.most == 4
        wires.flow_failure = lambda: Unserved("cut off")
        cut_at = asyncio.get_running_loop().time()
        await asyncio.sleep(ALLOWANCE_MS / 1_000 + 0.6)
        assert began < len(busy.at), "until the allowance ends"
        stopped = len(busy.at)
        busy.most = 0
        await asyncio.sleep(5)
        assert len(busy.at) == stopped, "a failover ends within this time"
        await asyncio.sleep(4)
        assert busy.most == 2, "then half of the limit for each of two members"
        assert max(at for at in busy.at if at < cut_at + 5) <= cut_at + ALLOWANCE_MS / 1_000
        assert other.engine.flow_allowances.uses_shares
        wires.flow_failure = None
        await asyncio.sleep(4)
        assert busy.most == 4
        assert not other.engine.flow_allowances.uses_shares

    run_two(scenario)


def test_an_instance_uses_its_share_of_the_rate_when_the_home_does_not_answer() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, rate=10.0)
        wires.flow_failure = lambda: Unserved("cut off")
        await create_on(other, 300, 1_000)
        await asyncio.sleep(1 + ALLOWANCE_MS / 1_000 - 0.2)
        assert busy.at == []
        await asyncio.sleep(10.2)
        assert len(busy.at) == pytest.approx(50, abs=3)

    run_two(scenario, seconds=0.01)


def test_limits_of_a_home_of_an_older_version_are_shared_at_once() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        def unknown() -> NotFound:
            return NotFound("there is no such path")

        await limit(home, concurrency=1)
        wires.flow_failure = unknown
        await create_on(other, 5, 1_000)
        await asyncio.sleep(1.2)
        assert len(busy.at) == 1

    run_two(scenario)


def test_an_idle_flow_is_forgotten_although_its_home_does_not_answer_and_the_instance_goes_on() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, concurrency=1)
        await create_on(other, 1, 1_000)
        await asyncio.sleep(1.2)
        assert busy.by == ["other"]
        wires.flow_failure = lambda: Unserved("cut off")
        await asyncio.sleep(1 + ALLOWANCE_MS / 1_000)
        assert held_by(other) == {}
        assert not other.engine.broken

    run_two(scenario)


def test_an_answer_about_a_forgotten_allowance_does_not_end_the_new_one_of_the_flow() -> None:
    async def scenario(home: World, other: World, wires: Wires, busy: Busy) -> None:
        await limit(home, concurrency=1)
        allowances = other.engine.flow_allowances
        idle = LimitedFlow("default", URL, None, 1, waiting=0, in_flight=0)
        allowances.need(replace(idle, waiting=1))
        forgotten = allowances._allowances.pop(("default", URL))
        forgotten.flow, forgotten.idle_rounds = idle, 5
        allowances.need(replace(idle, waiting=1))
        allowances._apply(forgotten, report(URL), FlowAllowance(), 0)
        assert set(held_by(other)) == {URL}

    run_two(scenario)


# --- homes ---------------------------------------------------------------------------------------


def report(flow_key: str, **fields: float) -> FlowReport:
    return FlowReport("default", flow_key, **fields)  # type: ignore[arg-type]


def test_a_new_home_raises_no_allowance_before_it_has_heard_of_all_others() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        key = owned_by(a)
        await limit(a, key, concurrency=4)
        shard_id = shard_of(key, 16)
        other = b.engine.membership.instance_id
        assert a.engine.flow_homes.answer(other, report(key, waiting=9, concurrency=3)).concurrency == 4
        await a.engine.ownership.release([a.engine.shards[shard_id]])
        while shard_id not in a.engine.shards:
            await asyncio.sleep(0.1)
        assert a.engine.flow_homes.answer(other, report(key, waiting=9, concurrency=3)).concurrency == 3
        await asyncio.sleep(ALLOWANCE_MS / 1_000 + 0.1)
        assert a.engine.flow_homes.answer(other, report(key, waiting=9, concurrency=3)).concurrency == 4

    of_two(scenario)


def test_only_a_home_decides_and_only_for_live_members_and_known_namespaces() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        key = owned_by(a)
        await limit(a, key, concurrency=4)
        asks = b.engine.membership.instance_id
        homes = a.engine.flow_homes
        assert homes.answer(asks, report(owned_by(b), waiting=1)).undecided
        assert homes.answer(asks, FlowReport("nowhere", key, waiting=1)).undecided
        assert not homes.answer(asks, report(key, waiting=1)).undecided
        assert homes.answer_peer("stranger", 1, [report(key, waiting=1)])[0].undecided
        assert not homes.answer_peer(asks, 10, [report(key, waiting=1)])[0].undecided
        assert homes.answer_peer(asks, 9, [report(key, waiting=1)])[0].undecided, "it was overtaken"
        a.engine.membership._lease_until_ms = 0
        assert homes.answer(asks, report(key, waiting=1)).undecided, "without a lease another one may be the home"

    of_two(scenario)


def test_a_home_that_has_joined_again_answers_requests_that_are_numbered_from_1_again() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        key, membership = owned_by(a), a.engine.membership
        await limit(a, key, concurrency=4)
        asks, former = b.engine.membership.instance_id, membership.instance_id
        assert not a.engine.flow_homes.answer_peer(asks, 10, [report(key, waiting=1)])[0].undecided
        [member] = [member for member in await a.store.members() if member.instance_id == former]
        assert await a.store.mark_dead(former, member.counter)
        await asyncio.sleep(20)  # it owns other shards by then
        assert membership.instance_id != former
        assert not a.engine.flow_homes.answer_peer(asks, 1, [report(owned_by(a), waiting=1)])[0].undecided

    of_two(scenario)


def test_a_namespace_cannot_use_up_the_memory_of_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_homes, "_FLOWS_MAX", 100)

    async def scenario(world: World) -> None:
        await world.service.namespaces.create_default()
        homes, me = world.engine.flow_homes, world.engine.membership.instance_id
        reports = [report(f"k{n}", waiting=1) for n in range(200)]
        answers = world.service.flow_allowances(me, 1, reports)
        assert sum(not answer.undecided for answer in answers) == 50
        assert homes.flows == 50
        answer = homes.answer(me, report("k1", waiting=1, rate=5.0))
        assert answer == FlowAllowance(5.0, None), "those that it knows go on"
        await asyncio.sleep(30)
        assert not homes.answer(me, report("k199", waiting=1)).undecided, "when others are over"

    in_world(scenario, delivery__rate_per_flow=5)
