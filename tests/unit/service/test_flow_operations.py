"""Limits and pauses of flows: stored with the namespace, seen by all instances, and listed as all instances report."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from engine_world import URL, World, in_world, on_faulty
from msgspec.structs import replace
from two_instances import Wires, of_two

from duetime.delivery import Attempt
from duetime.domain.flow_status import FlowFilter, FlowState
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import FlowLimits, Namespace, NamespaceSpec, State, TimerSpec
from duetime.engine.namespaces import Namespaces
from duetime.errors import Conflict, DuetimeError, InvalidField, NotFound, StoreUnavailable
from duetime.service.flows import FLOWS_MAX
from duetime.service.namespaces import pause_all
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

HOUR_MS = 3_600_000
Scenario = Callable[[World, World, Wires], Awaitable[None]]


async def stored(world: World, name: str = "default") -> Namespace:
    return next(namespace for namespace in await world.store.namespaces() if namespace.name == name)


async def all_flows(world: World, **wanted: object) -> list[tuple[str, str]]:
    page = await world.service.flows.list_page(FlowFilter(**wanted))  # type: ignore[arg-type]
    return [(flow.namespace, flow.flow_key) for flow in page.flows]


# --- changes -------------------------------------------------------------------------------------


def test_limits_are_set_one_by_one_and_an_entry_that_says_nothing_more_is_removed() -> None:
    async def scenario(world: World) -> None:
        flows = world.service.flows
        answer = await flows.update("default", "shop", rate=5.0)
        assert (answer.flow.rate, answer.flow.concurrency, answer.flow.state) == (5.0, None, FlowState.CLOSED)
        assert (await flows.update("default", "shop", concurrency=2)).flow.rate == 5.0
        assert (await flows.pause("default", "shop")).flow.state is FlowState.PAUSED
        assert (await stored(world)).flows == {"shop": FlowLimits(rate=5.0, concurrency=2, paused=True)}
        assert (await flows.update("default", "shop", rate=None)).flow.concurrency == 2
        assert (await flows.resume("default", "shop")).flow.state is FlowState.CLOSED
        assert (await stored(world)).flows == {"shop": FlowLimits(concurrency=2)}
        await flows.update("default", "shop", concurrency=None)
        assert (await stored(world)).flows == {}

    in_world(scenario)


def test_a_change_of_the_namespace_keeps_its_flows_and_its_pause() -> None:
    async def scenario(world: World) -> None:
        await world.service.flows.update("default", "shop", rate=5.0)
        await world.service.namespaces.pause("default")
        updated = await world.service.namespaces.update(NamespaceSpec(name="default", callback_timeout_seconds=20))
        assert (updated.paused, updated.flows) == (True, {"shop": FlowLimits(rate=5.0)})

    in_world(scenario)


def test_changes_at_the_same_time_on_two_instances_are_all_kept() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        changes = [world.service.flows.pause("default", f"{n}") for n in range(20) for world in (a, b)]
        changes += [world.service.flows.update("default", f"{n}", rate=n + 1.0) for n in range(20) for world in (b, a)]
        await asyncio.gather(*changes)
        expected = {f"{n}": FlowLimits(rate=n + 1.0, paused=True) for n in range(20)}
        assert (await stored(a)).flows == expected

    of_two(scenario)


def test_a_resume_right_after_a_pause_on_another_instance_is_not_taken_for_no_change() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.flows.pause("default", "shop")
        await b.service.flows.resume("default", "shop")
        assert (await stored(a)).flows == {}
        await a.service.namespaces.pause("default")
        await b.service.namespaces.resume("default")
        assert not (await stored(a)).paused

    of_two(scenario)


def test_a_namespace_has_at_most_a_thousand_flows_with_settings() -> None:
    async def scenario(world: World) -> None:
        old = await world.service.namespaces.get("default")
        full = {f"flow-{n}": FlowLimits(rate=1.0) for n in range(FLOWS_MAX)}
        await world.service.namespaces.change("default", lambda namespace: replace(namespace, flows=full))
        with pytest.raises(Conflict, match="may not have more than 1000 flows with limits or a pause") as refused:
            await world.service.flows.pause("default", "one more")
        assert (refused.value.code, refused.value.field) == ("too_many_flows", "flowKey")
        await world.service.flows.pause("default", "flow-7")
        await world.service.flows.update("default", "flow-8", rate=None)
        await world.service.flows.pause("default", "one more")
        assert len((await stored(world)).flows) == FLOWS_MAX
        assert old.flows == {}

    in_world(scenario)


def test_the_settings_of_a_namespace_have_a_limited_size() -> None:
    async def scenario(world: World) -> None:
        long = "http://shop.test/" + "x" * 2_000
        full = {f"{long}{n}": FlowLimits(rate=1.0) for n in range(128)}
        await world.service.namespaces.change("default", lambda namespace: replace(namespace, flows=full))
        with pytest.raises(Conflict, match="262144 bytes"):
            await world.service.flows.pause("default", f"{long}more")
        await world.service.flows.resume("default", f"{long}1")
        await world.service.flows.update("default", f"{long}1", rate=None)
        await world.service.flows.pause("default", f"{long}more")

    in_world(scenario)


def test_a_change_that_the_store_did_not_make_is_reported() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("put_namespace", Fault.UNAVAILABLE)
        with pytest.raises(StoreUnavailable):
            await world.service.flows.pause("default", "shop")
        assert (await world.service.flows.get("default", "shop")).flow.state is FlowState.CLOSED

    on_faulty(scenario)


@pytest.mark.parametrize("verb", ["get", "update", "pause", "resume"])
def test_a_flow_of_an_unknown_namespace_is_not_found(verb: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(NotFound) as refused:
            await getattr(world.service.flows, verb)("nowhere", "shop")
        assert refused.value.code == "namespace_not_found"
        with pytest.raises(NotFound):
            await all_flows(world, namespace="nowhere")

    in_world(scenario)


# --- lists ---------------------------------------------------------------------------------------


def test_a_list_has_the_flows_with_settings_by_namespace_and_key_page_by_page() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="a shop", num_shards=1))
        names = [("a shop", "x"), ("a shop", "y"), ("default", "a"), ("default", "é"), ("default", "\U0001f600")]
        for namespace, key in names:
            await world.service.flows.pause(namespace, key)
        assert await all_flows(world) == names
        assert await all_flows(world, namespace="default") == names[2:]
        assert await all_flows(world, state=FlowState.PAUSED) == names
        assert await all_flows(world, state=FlowState.OPEN) == []
        for limit in range(1, 7):
            found: list[tuple[str, str]] = []
            cursor = None
            for _ in range(20):
                page = await world.service.flows.list_page(FlowFilter(limit=limit, cursor=cursor))
                assert len(page.flows) <= limit
                found += [(flow.namespace, flow.flow_key) for flow in page.flows]
                cursor = page.next_cursor
                if cursor is None:
                    break
            assert found == names

    in_world(scenario)


def test_a_list_has_only_the_namespaces_that_the_caller_may_see() -> None:
    async def scenario(world: World) -> None:
        for name in ("a", "b", "c"):
            await world.service.namespaces.create(NamespaceSpec(name=name, num_shards=1, callback_url=URL))
            await world.service.namespaces.pause(name)
            await world.service.flows.update(name, "limited", rate=1.0)
            await world.service.create(TimerSpec(namespace=name, timer_id="t", delay_ms=1))
        await asyncio.sleep(1)
        page = await world.service.flows.list_page(FlowFilter(), ("c", "a"))
        assert [(flow.namespace, flow.flow_key) for flow in page.flows] == [
            ("a", URL),
            ("a", "limited"),
            ("c", URL),
            ("c", "limited"),
        ]

    in_world(scenario)


@pytest.mark.parametrize("cursor", ["", "x", "W10", "WzEsMl0", "é"])
def test_a_cursor_that_is_none_is_refused(cursor: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField) as refused:
            await all_flows(world, cursor=cursor)
        assert refused.value.field == "cursor"

    in_world(scenario)


def test_a_list_adds_what_all_instances_report() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.flows.pause("default", URL)
        await asyncio.sleep(2)
        await asyncio.gather(*(a.create(f"t{n}", 1) for n in range(60)))
        await asyncio.sleep(1)
        assert a.destinations.called() + b.destinations.called() == []
        each = [world.engine.fire_loop.waiting for world in (a, b)]
        assert all(each)
        for world in (a, b):
            page = await world.service.flows.list_page(FlowFilter())
            (flow,) = page.flows
            assert (flow.flow_key, flow.state, flow.waiting, flow.in_flight) == (URL, FlowState.PAUSED, 60, 0)
            assert (await world.service.flows.get("default", URL)).flow == flow
            assert page.unanswered == ()

    of_two(scenario)


def test_an_answer_shows_what_is_set_although_other_instances_have_not_read_it_yet() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        hangs = asyncio.Event()

        async def hang(attempt: Attempt) -> AttemptResult:
            await hangs.wait()
            return AttemptResult(Contact.ANSWERED, 200)

        for world in (a, b):
            world.destinations.answers[URL] = hang
        await asyncio.gather(*(a.create(f"t{n}", 1) for n in range(300)))
        await asyncio.sleep(1)
        for pause, resume in (
            (b.service.flows.pause("default", URL), b.service.flows.resume("default", URL)),
            (b.service.namespaces.pause("default"), b.service.namespaces.resume("default")),
        ):
            await pause
            shown = (await b.service.flows.get("default", URL)).flow
            assert (shown.state, shown.in_flight > 0, shown.waiting > 0) == (FlowState.PAUSED, True, True)
            await asyncio.sleep(2)  # the other instance has read it, and reports it
            await resume
            assert (await b.service.flows.get("default", URL)).flow.state is FlowState.CLOSED
        hangs.set()

    of_two(scenario)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100])
@pytest.mark.parametrize("allowed", [None, ("default", "a", "of nobody")])
def test_the_pages_of_a_list_have_every_flow_of_every_instance_once(
    limit: int, allowed: tuple[str, ...] | None
) -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="a", num_shards=16, callback_url=URL))
        await a.service.namespaces.pause("a")
        await a.service.namespaces.pause("default")
        await asyncio.sleep(2)
        keys = [f"key {number}" for number in range(8)]
        for namespace in ("a", "default"):
            for key in keys:
                spec = TimerSpec(namespace=namespace, timer_id=key, delay_ms=1, callback_url=URL, flow_key=key)
                await a.service.create(spec)
        await asyncio.sleep(1)
        assert all(world.engine.fire_loop.waiting for world in (a, b))
        found: list[tuple[str, str]] = []
        cursor = None
        for _ in range(40):
            page = await b.service.flows.list_page(FlowFilter(limit=limit, cursor=cursor), allowed)
            found += [(flow.namespace, flow.flow_key) for flow in page.flows]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == [(namespace, key) for namespace in ("a", "default") for key in keys]

    of_two(scenario)


def test_an_instance_that_does_not_answer_is_named_and_not_waited_for() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.deaf.add("b")
        began_ms = a.clock.boot_ms()
        page = await a.service.flows.list_page(FlowFilter())
        assert a.clock.boot_ms() - began_ms < 1_500
        (missing,) = page.unanswered
        assert (missing.address, missing.reason) == ("b", "no answer in time")
        assert missing.instance_id == b.engine.membership.instance_id
        assert (await a.service.flows.pause("default", "shop")).unanswered == page.unanswered

    of_two(scenario)


def test_without_the_store_a_list_shows_what_was_read_last() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.service.flows.pause("default", "shop")
        store.fail("namespaces", Fault.UNAVAILABLE)
        assert await all_flows(world) == [("default", "shop")]

    on_faulty(scenario)


def test_a_flow_with_an_open_breaker_shows_until_when_and_why() -> None:
    async def scenario(world: World) -> None:
        async def fails(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.ANSWERED, 500)

        world.destinations.answers[URL] = fails
        await asyncio.gather(*(world.create(f"t{n}", 1_000) for n in range(100)))
        await asyncio.sleep(1.5)
        flow = (await world.service.flows.get("default", URL)).flow
        assert flow.state is FlowState.OPEN
        assert flow.last_error == "HTTP 500"
        assert flow.until_ms is not None
        assert flow.until_ms > world.engine.membership.now_ms()
        assert flow.waiting > 10
        assert await all_flows(world, state=FlowState.OPEN) == [("default", URL)]
        paused = (await world.service.flows.pause("default", URL)).flow
        assert (paused.state, paused.until_ms) == (FlowState.PAUSED, None)

    in_world(scenario)


def test_a_resume_closes_the_breaker_that_was_open_before_the_pause() -> None:
    async def scenario(world: World) -> None:
        async def fails(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.ANSWERED, 500)

        world.destinations.answers[URL] = fails
        await asyncio.gather(*(world.create(f"t{n}", 1_000) for n in range(100)))
        await asyncio.sleep(1.5)
        await world.service.flows.pause("default", URL)
        del world.destinations.answers[URL]
        called = len(world.destinations.calls)
        assert (await world.service.flows.resume("default", URL)).flow.state is FlowState.CLOSED
        await asyncio.sleep(0.1)
        assert len(world.destinations.calls) > called + 50

    in_world(scenario)


# --- pauses --------------------------------------------------------------------------------------


def test_a_pause_and_a_resume_hold_on_every_instance_within_two_seconds() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        for pause, resume in (
            (a.service.flows.pause("default", URL), b.service.flows.resume("default", URL)),
            (a.service.namespaces.pause("default"), b.service.namespaces.resume("default")),
        ):
            await pause
            await asyncio.sleep(2)
            called = len(a.destinations.calls) + len(b.destinations.calls)
            await asyncio.gather(*(a.create(f"t{n}", 10) for n in range(60)))
            await asyncio.sleep(30)
            assert len(a.destinations.calls) + len(b.destinations.calls) == called
            assert (await a.get("t1")).state is State.SCHEDULED
            await resume
            await asyncio.sleep(2)
            assert len(a.destinations.calls) + len(b.destinations.calls) == called + 60

    of_two(scenario)


def test_a_paused_flow_does_not_hold_others_and_a_paused_namespace_not_other_namespaces() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="shop", num_shards=1, callback_url=URL))
        await world.service.flows.pause("default", "slow")
        await world.service.namespaces.pause("shop")
        await world.service.create(TimerSpec(namespace="shop", timer_id="of a paused namespace", delay_ms=10))
        await world.create("of a paused flow", 10, flow_key="slow")
        await world.create("free", 10)
        await asyncio.sleep(60)
        assert world.destinations.called() == ["free"]
        await world.service.namespaces.resume("shop")
        await asyncio.sleep(2)
        assert world.destinations.called() == ["free", "of a paused namespace"]

    in_world(scenario)


def test_a_pause_survives_a_crash() -> None:
    async def scenario(world: World) -> None:
        await world.service.flows.pause("default", URL)
        await world.create("x", 10)
        await world.crash_and_restart()
        await asyncio.sleep(60)
        assert world.destinations.called() == []
        await world.service.flows.resume("default", URL)
        await asyncio.sleep(2)
        assert world.destinations.called() == ["x"]

    in_world(scenario)


def test_everything_can_be_paused_before_the_first_instance_starts() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        first = World(clock, store)
        await first.start()
        await first.service.namespaces.create(NamespaceSpec(name="shop", num_shards=1, callback_url=URL))
        await first.create("x", 1_000)
        await first.engine.stop()
        assert await pause_all(Namespaces(store, clock), clock, 16) == ["default", "shop"]
        second = World(clock, store)
        second.new_instance()
        await second.start()
        await asyncio.sleep(60)
        assert second.destinations.called() == []
        await second.service.namespaces.resume("default")
        await asyncio.sleep(2)
        assert second.destinations.called() == ["x"]
        assert (await stored(second, "shop")).paused
        await second.engine.stop()

    run_virtual(run)


def test_on_a_new_store_the_default_namespace_is_created_paused() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        assert await pause_all(Namespaces(store, clock), clock, 16) == ["default"]
        world = World(clock, store)
        await world.start()
        await world.create("x", 10)
        await asyncio.sleep(10)
        assert world.destinations.called() == []
        await world.engine.stop()

    run_virtual(run)


def test_too_many_reads_at_the_same_time_are_refused() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.deaf.add("b")
        reads = await asyncio.gather(
            *(a.service.flows.list_page(FlowFilter()) for _ in range(300)), return_exceptions=True
        )
        refused = [read for read in reads if isinstance(read, DuetimeError)]
        assert {error.code for error in refused} == {"busy"}
        assert len(refused) == 300 - 256

    of_two(scenario)
