"""What a create and an update are checked for before anything is written, and what `ifAbsent` takes for the same."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from engine_world import URL, World, in_world

from duetime.cluster.forwarding import CreateCommand, Forward
from duetime.delivery import Attempt
from duetime.domain.instants import LATEST_MS
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    Missed,
    NamespaceSpec,
    Outcome,
    RetryPolicy,
    State,
    TimerKey,
    TimerPatch,
    TimerSpec,
    Verdict,
)
from duetime.errors import Conflict, InvalidField, TooLarge
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

X = TimerKey("default", "x")
HOUR_MS = 3_600_000

# Every field a user decides, but the time: the one value and another.
FIELDS: dict[str, tuple[Any, Any]] = {
    "callback_url": (URL, "http://shop.test/other"),
    "payload": ("1", "2"),
    "retry_policy": (RetryPolicy(max_retries=1), RetryPolicy(max_retries=2)),
    "callback_timeout_seconds": (5, 6),
    "correlation_id": ("a", "b"),
    "headers": ({"x": "1"}, {"x": "2"}),
    "tags": (("a",), ("b",)),
    "missed": (Missed(skip_if_late_by_ms=1), Missed(skip_if_late_by_ms=2)),
}
ONE = {name: one for name, (one, _) in FIELDS.items()}


def spec_at(execute_at_ms: int, **fields: Any) -> TimerSpec:
    return TimerSpec(namespace="default", timer_id="x", execute_at_ms=execute_at_ms, **{"callback_url": URL, **fields})


# --- refused -------------------------------------------------------------------------------------


REFUSED = [
    ({"callback_url": "ftp://shop.test"}, "callbackUrl", "callbackUrl must be a URL"),
    ({"headers": {"Host": "x"}}, "headers", 'headers must not have "Host", which is reserved for Duetime'),
]


@pytest.mark.parametrize(("fields", "field", "text"), REFUSED)
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_create_with_a_forbidden_url_or_header_is_refused(
    fields: dict[str, Any], field: str, text: str, if_absent: bool
) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField, match=text) as refused:
            await world.create("x", if_absent=if_absent, **fields)
        assert refused.value.field == field
        await asyncio.sleep(10)
        assert world.destinations.called() == []

    in_world(scenario)


@pytest.mark.parametrize(("fields", "field", "text"), REFUSED)
def test_an_update_with_a_forbidden_url_or_header_is_refused_and_changes_nothing(
    fields: dict[str, Any], field: str, text: str
) -> None:
    async def scenario(world: World) -> None:
        created = await world.create("x", **ONE)
        with pytest.raises(InvalidField, match=text) as refused:
            await world.service.update(X, TimerPatch(payload="9", **fields))
        assert refused.value.field == field
        assert (await world.get("x")).timer == created.view.timer

    in_world(scenario)


def test_a_payload_over_the_limit_is_refused_at_create_and_at_update_and_one_of_just_the_limit_is_not() -> None:
    async def scenario(world: World) -> None:
        largest, too_large = f'"{"é" * 49}"', f'"{"é" * 49}."'  # 100 and 101 bytes
        await world.create("x", 60_000, payload=largest)
        with pytest.raises(TooLarge, match="larger than 100 bytes"):
            await world.create("y", payload=too_large)
        with pytest.raises(TooLarge, match="larger than 100 bytes"):
            await world.service.update(X, TimerPatch(payload=too_large))
        assert (await world.get("x")).timer.payload == largest
        await world.service.update(X, TimerPatch(payload=largest))

    in_world(scenario, limits__payload_bytes_max=100)


def test_a_namespace_may_have_a_lower_limit_of_payloads() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="small", payload_bytes_max=10))
        spec = TimerSpec(namespace="small", timer_id="x", delay_ms=1, callback_url=URL, payload='"12345678"')
        await world.service.create(spec)
        longer = TimerSpec(namespace="small", timer_id="x", delay_ms=1, callback_url=URL, payload='"123456789"')
        with pytest.raises(TooLarge, match="larger than 10 bytes"):
            await world.service.create(longer)

    in_world(scenario)


def test_without_a_url_of_its_own_a_timer_has_that_of_its_namespace_and_one_of_them_there_must_be() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField, match="callbackUrl is required"):
            await world.create("x", callback_url=None)
        await world.create("x", HOUR_MS)
        with pytest.raises(InvalidField, match="callbackUrl is required"):
            await world.service.update(X, TimerPatch(callback_url=None))
        await world.service.namespaces.create(NamespaceSpec(name="commands", callback_url="http://shop.test/orders"))
        spec = TimerSpec(namespace="commands", timer_id="x", delay_ms=HOUR_MS)
        assert (await world.service.create(spec)).view.timer.callback_url == "http://shop.test/orders"
        key = TimerKey("commands", "x")
        updated = await world.service.update(key, TimerPatch(callback_url=URL))
        assert updated.view.timer.callback_url == URL
        updated = await world.service.update(key, TimerPatch(callback_url=None))
        assert updated.view.timer.callback_url == "http://shop.test/orders"

    in_world(scenario)


def test_a_delay_that_ends_after_the_last_instant_is_refused() -> None:
    async def scenario(world: World) -> None:
        too_long_ms = LATEST_MS - world.clock.wall_ms()
        with pytest.raises(InvalidField, match="delay must end before"):
            await world.create("x", too_long_ms)
        await world.create("x", too_long_ms - HOUR_MS)
        with pytest.raises(InvalidField, match="delay must end before"):
            await world.service.update(X, TimerPatch(delay_ms=too_long_ms))
        with pytest.raises(InvalidField, match="one of executeAt and delay"):
            await world.service.create(TimerSpec(namespace="default", timer_id="y", callback_url=URL))

    in_world(scenario)


class SlowHeartbeats(MemoryStore):
    """The clock is read when a heartbeat is sent, or when it is answered 100 ms later: it is unknown which."""

    async def heartbeat(self, instance_id: str, counter: int) -> int:
        await asyncio.sleep(0.1)
        return await super().heartbeat(instance_id, counter)


def test_a_delay_is_the_difference_of_createdat_and_executeat_however_inexact_the_clock_is() -> None:
    async def scenario(world: World) -> None:
        membership = world.engine.membership
        assert membership.latest_now_ms() > membership.now_ms()
        timer = (await world.create("x", HOUR_MS)).view.timer
        assert timer.created_at_ms == membership.latest_now_ms()
        assert timer.execute_at_ms == timer.created_at_ms + HOUR_MS
        at_ms = membership.now_ms() + 1
        timer = (await world.service.create(spec_at(at_ms))).view.timer
        assert (timer.created_at_ms, timer.execute_at_ms) == (at_ms - 1, at_ms)

    in_world(scenario, new_store=SlowHeartbeats)


# --- ifAbsent ------------------------------------------------------------------------------------


def test_if_absent_with_the_same_values_finds_the_existing_timer() -> None:
    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + HOUR_MS
        first = await world.service.create(spec_at(at_ms, **ONE, if_absent=True))
        assert (first.existed, first.replaced) == (False, False)
        again = await world.service.create(spec_at(at_ms, **ONE, if_absent=True))
        assert (again.existed, again.replaced) == (True, False)
        assert again.view.timer == first.view.timer

    in_world(scenario)


@pytest.mark.parametrize("name", FIELDS)
def test_if_absent_with_one_field_different_is_a_conflict_and_changes_nothing(name: str) -> None:
    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + HOUR_MS
        first = await world.service.create(spec_at(at_ms, **ONE))
        with pytest.raises(Conflict, match="exists in namespace 'default' with other values") as conflict:
            await world.service.create(spec_at(at_ms, **{**ONE, name: FIELDS[name][1]}, if_absent=True))
        assert (conflict.value.field, conflict.value.code) == ("timerId", "timer_exists")
        assert (await world.get("x")).timer == first.view.timer

    in_world(scenario)


def test_if_absent_with_another_time_is_a_conflict() -> None:
    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + 1_000
        await world.service.create(spec_at(at_ms))
        with pytest.raises(Conflict, match="with other values"):
            await world.service.create(spec_at(at_ms + 1, if_absent=True))
        await asyncio.sleep(5)
        assert world.destinations.called() == ["x"]

    in_world(scenario)


def test_if_absent_with_a_delay_does_not_compare_times_since_a_repeated_request_ends_later() -> None:
    async def scenario(world: World) -> None:
        first = await world.create("x", HOUR_MS, if_absent=True)
        await asyncio.sleep(1)
        again = await world.create("x", HOUR_MS, if_absent=True)
        assert again.existed
        assert again.view.timer == first.view.timer

    in_world(scenario)


def test_if_absent_compares_the_time_that_was_asked_for_and_not_that_of_a_retry() -> None:
    async def scenario(world: World) -> None:
        async def fails(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.BROKEN)

        world.destinations.answers[URL] = fails
        at_ms = world.clock.wall_ms() + 1_000
        await world.service.create(spec_at(at_ms))
        while not world.destinations.called():
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        again = await world.service.create(spec_at(at_ms, if_absent=True))
        assert again.existed
        assert again.view.timer.scheduled_at_ms == at_ms

    in_world(scenario)


def test_if_absent_finds_a_timer_that_is_over_and_does_not_fire_it_again() -> None:
    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + 1_000
        await world.service.create(spec_at(at_ms))
        await asyncio.sleep(2)
        again = await world.service.create(spec_at(at_ms, if_absent=True))
        assert again.existed
        assert again.view.state is State.DELIVERED
        assert again.view.reached is not None
        assert again.view.reached.outcome is Outcome.DELIVERED
        with pytest.raises(Conflict, match="with other values"):
            await world.service.create(spec_at(at_ms, payload="2", if_absent=True))
        await asyncio.sleep(60)
        assert world.destinations.called() == ["x"]

    in_world(scenario)


# --- update --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIELDS)
def test_an_update_changes_what_it_names_and_nothing_else(name: str) -> None:
    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + HOUR_MS
        await world.service.create(spec_at(at_ms, **ONE))
        updated = await world.service.update(X, TimerPatch(**{name: FIELDS[name][1]}))
        assert updated.verdict is Verdict.UPDATED
        timer = (await world.get("x")).timer
        assert timer == updated.view.timer
        found = {other: getattr(timer, other, None) or getattr(timer.extras, other, None) for other in FIELDS}
        assert found == {**ONE, name: FIELDS[name][1]}
        assert (timer.execute_at_ms, timer.scheduled_at_ms) == (at_ms, at_ms)

    in_world(scenario)


@pytest.mark.parametrize("name", [name for name in FIELDS if name != "callback_url"])
def test_an_update_with_null_sets_a_field_back_to_its_default(name: str) -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, **ONE)
        cleared: dict[str, Any] = {name: None}
        await world.service.update(X, TimerPatch(**cleared))
        timer = (await world.get("x")).timer
        found = {other: getattr(timer, other, None) or getattr(timer.extras, other, None) for other in FIELDS}
        assert found == {**ONE, name: () if name == "tags" else None}

    in_world(scenario)


@pytest.mark.parametrize("by_delay", [True, False])
def test_an_update_with_another_time_moves_the_timer(by_delay: bool) -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS)
        at_ms = world.clock.wall_ms() + 2_000
        await world.service.update(X, TimerPatch(delay_ms=2_000) if by_delay else TimerPatch(execute_at_ms=at_ms))
        timer = (await world.get("x")).timer
        assert (timer.execute_at_ms, timer.scheduled_at_ms) == (at_ms, at_ms)
        await asyncio.sleep(3)
        assert [at for at, _, _ in world.destinations.calls] == [at_ms]

    in_world(scenario)


@pytest.mark.parametrize("waits_for", ["namespaces", "get_many"])
def test_a_forwarded_create_that_has_to_wait_is_not_overtaken_by_a_later_one(waits_for: str) -> None:
    """Its sender may have got `outcome_unknown` and have written again: the last write counts."""

    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        world = World(clock, store.as_store, namespaces__default_num_shards=1)
        await world.start()
        if waits_for == "namespaces":
            world.engine.namespaces._fresh_until_ms = 0  # too old for a write: it is read again first
        held = store.hold(waits_for)
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=1_000, callback_url=URL, payload="1")
        first_spec = msgspec.structs.replace(spec, if_absent=waits_for == "get_many")
        version = world.engine.shards[0].fence.version
        first = world.service.forwarded.receive(Forward("1", 0, version, CreateCommand(first_spec)))
        await asyncio.sleep(0.1)
        if waits_for == "namespaces":
            world.engine.namespaces._fresh_until_ms = clock.boot_ms() + 60_000
        second = asyncio.ensure_future(world.service.create(msgspec.structs.replace(spec, payload="2")))
        await asyncio.sleep(0.1)
        assert not second.done()
        held.set()
        await first
        await second
        await asyncio.sleep(2)
        assert world.destinations.payloads == ["2"]
        await world.engine.stop()

    run_virtual(run)


# --- in flight ------------------------------------------------------------------------------------


def test_a_delete_of_a_timer_in_flight_that_was_moved_beyond_the_horizon_says_that_it_is_in_flight() -> None:
    """The timer has left memory, but the delivery that started before is still counted."""

    async def scenario(world: World) -> None:
        answered = asyncio.Event()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return AttemptResult(Contact.ANSWERED, 200)

        world.destinations.answers[URL] = hangs
        await world.create("x", 100)
        await asyncio.sleep(0.5)
        updated = await world.service.update(X, TimerPatch(delay_ms=24 * HOUR_MS))
        assert updated.verdict is Verdict.IN_FLIGHT
        assert all(X not in shard.entries for shard in world.engine.shards.values())
        assert await world.service.delete(X) is Verdict.IN_FLIGHT
        reached = (await world.get("x")).reached
        assert reached is not None
        assert reached.outcome is Outcome.CANCELLED
        answered.set()
        await asyncio.sleep(1)
        assert world.destinations.called() == ["x"]

    in_world(scenario)
