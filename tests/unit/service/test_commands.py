"""What a create and an update are checked for before anything is written, and what `ifAbsent` takes for the same."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from engine_world import OK, URL, World, check_accounts, in_world, on_one_shard

from duetime.cluster.forwarding import CreateCommand, Forward
from duetime.delivery import Attempt
from duetime.domain.instants import LATEST_MS
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    CommandPosition,
    Missed,
    NamespaceSpec,
    Outcome,
    RetryPolicy,
    State,
    Timer,
    TimerKey,
    TimerPatch,
    TimerSpec,
    Verdict,
)
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    StoreUnavailable,
    TooLarge,
    UnreadableTimer,
)
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
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
    "flow_key": ("shop", "bank"),
}
ONE = {name: one for name, (one, _) in FIELDS.items()}


def decided(timer: Timer) -> dict[str, Any]:
    """What the user has decided about a timer, by the names of FIELDS."""
    return {name: getattr(timer.extras if hasattr(timer.extras, name) else timer, name) for name in FIELDS}


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
        found = decided(timer)
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
        found = decided(timer)
        assert found == {**ONE, name: () if name == "tags" else None}

    in_world(scenario)


def test_a_flow_key_survives_retries_an_update_and_a_replay() -> None:
    async def scenario(world: World) -> None:
        results = [AttemptResult(Contact.ANSWERED, 500), AttemptResult(Contact.ANSWERED, 500)]

        async def refuse(attempt: Attempt) -> AttemptResult:
            assert attempt.timer.flow_key == "shop"
            return results.pop() if results else AttemptResult(Contact.ANSWERED, 404)

        world.destinations.answers[URL] = refuse
        await world.create("x", 1_000, flow_key="shop")
        await world.service.update(X, TimerPatch(payload="1"))
        await asyncio.sleep(60)
        failed = await world.get("x")
        assert (failed.state, failed.timer.attempts, failed.timer.extras.flow_key) == (State.FAILED, 3, "shop")
        assert (await world.service.replay(X)).timer.extras.flow_key == "shop"
        await asyncio.sleep(60)
        assert (await world.get("x")).timer.extras.flow_key == "shop"

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


# --- ifReached -----------------------------------------------------------------------------------


async def _end_x(world: World, how: Outcome) -> None:
    """The timer x ends this way."""
    if how is Outcome.FAILED:

        async def refuses(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.ANSWERED, status=400)

        world.destinations.answers[URL] = refuses
    await world.create("x", 1_000, payload="1")
    if how is Outcome.CANCELLED:
        await world.service.delete(X)
    await asyncio.sleep(2)
    found = (await world.get("x")).reached
    assert found is not None
    assert found.outcome is how


@pytest.mark.parametrize("how", [Outcome.DELIVERED, Outcome.FAILED, Outcome.CANCELLED])
@pytest.mark.parametrize("if_absent", [False, True])
def test_if_reached_ignore_leaves_a_timer_that_is_over_as_it_is(how: Outcome, if_absent: bool) -> None:
    async def scenario(world: World) -> None:
        await _end_x(world, how)
        calls = len(world.destinations.called())
        again = await world.create("x", 1_000, payload="2", ignore_reached=True, if_absent=if_absent)
        assert (again.existed, again.replaced) == (True, False)
        assert again.view.state.value == how.value
        assert again.view.timer.payload == "1"
        await asyncio.sleep(60)
        assert len(world.destinations.called()) == calls

    in_world(scenario)


def test_if_reached_ignore_replaces_a_scheduled_timer_and_creates_a_new_one() -> None:
    async def scenario(world: World) -> None:
        first = await world.create("x", HOUR_MS, payload="1", ignore_reached=True)
        assert (first.existed, first.replaced) == (False, False)
        again = await world.create("x", 1_000, payload="2", ignore_reached=True)
        assert (again.existed, again.replaced) == (False, True)
        await asyncio.sleep(2)
        assert (await world.get("x")).timer.payload == "2"
        assert world.destinations.called() == ["x"]

    in_world(scenario)


def test_if_reached_ignore_creates_a_timer_again_whose_reached_row_was_purged() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.update(NamespaceSpec(name="default", delivered_retention_ms=1_000))
        await world.create("x", 1_000)
        await asyncio.sleep(180)
        again = await world.create("x", 1_000, ignore_reached=True)
        assert not again.existed
        await asyncio.sleep(2)
        assert world.destinations.called() == ["x", "x"]

    in_world(scenario)


def test_if_reached_ignore_waits_for_the_end_of_a_delivery_that_is_being_recorded() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 1_000, payload="1")
        await asyncio.sleep(0.9)
        store.fail("commit", *[Fault.UNAVAILABLE] * 3)
        await asyncio.sleep(0.2)
        again = await world.create("x", 1_000, payload="2", ignore_reached=True)
        assert again.existed
        assert again.view.state is State.DELIVERED
        await asyncio.sleep(60)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


# --- the order of commands -----------------------------------------------------------------------


def _command(number: int, stream: str = "s") -> CommandPosition:
    return CommandPosition(stream, number, number)


def test_a_command_that_arrives_late_neither_replaces_nor_cancels_what_a_later_one_wrote() -> None:
    async def scenario(world: World) -> None:
        for number in (1, 3, 2, 1):
            created = await world.create(
                "x", HOUR_MS, payload=str(number), ignore_reached=True, command=_command(number)
            )
            assert created.existed is (number < 3 and created.view.timer.payload == "3")
        assert created.view.timer.payload == "3"
        with pytest.raises(Conflict, match="later command") as conflict:
            await world.service.delete(X, _command(2))
        assert conflict.value.code == "later_command"
        assert (await world.get("x")).state is State.SCHEDULED
        assert await world.service.delete(X, _command(4)) is Verdict.CANCELLED
        again = await world.create("x", HOUR_MS, ignore_reached=True, command=_command(5))
        assert (again.existed, again.view.state) == (True, State.CANCELLED)

    in_world(scenario)


def test_a_command_for_what_is_stored_keeps_the_generation_and_records_its_position() -> None:
    """A change and a change back are not undone by the command between them, even if that one arrives last."""

    async def scenario(world: World) -> None:
        at_ms = world.clock.wall_ms() + HOUR_MS
        first = await world.service.create(spec_at(at_ms, ignore_reached=True, command=_command(1)))
        again = await world.service.create(spec_at(at_ms, ignore_reached=True, command=_command(3)))
        assert again.existed
        assert again.view.timer.generation == first.view.timer.generation
        between = await world.service.create(spec_at(at_ms + 1, ignore_reached=True, command=_command(2)))
        assert between.existed
        assert between.view.timer.scheduled_at_ms == at_ms

    in_world(scenario)


def test_clocks_of_publishers_that_differ_do_not_change_the_order_of_commands() -> None:
    """In Kafka the publishers set the times. A command that is delivered again does not undo a later one."""

    async def scenario(world: World) -> None:
        ahead, behind = CommandPosition("s", 1, 1_000_000), CommandPosition("s", 2, 990_000)
        await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=ahead)
        await world.create("x", HOUR_MS, payload="2", ignore_reached=True, command=behind)
        again = await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=ahead)
        assert again.existed
        assert again.view.timer.payload == "2"
        with pytest.raises(Conflict, match="later command"):
            await world.service.delete(X, ahead)

    in_world(scenario)


def test_after_its_stream_was_deleted_and_created_again_commands_count() -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=CommandPosition("s", 9, 1_000_000))
        position = CommandPosition("s", 1, 1_100_000)
        again = await world.create("x", HOUR_MS, payload="2", ignore_reached=True, command=position)
        assert (again.existed, again.replaced) == (False, True)

    in_world(scenario)


def test_commands_of_different_streams_replace_each_other_as_they_arrive() -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=_command(9, "one"))
        other = await world.create("x", HOUR_MS, payload="2", ignore_reached=True, command=_command(1, "two"))
        assert (other.existed, other.replaced) == (False, True)

    in_world(scenario)


def test_a_timer_written_by_http_is_replaced_by_any_command_and_the_other_way_round() -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=_command(5))
        assert (await world.create("x", HOUR_MS, payload="2")).replaced
        old = await world.create("x", HOUR_MS, payload="3", ignore_reached=True, command=_command(1))
        assert (old.existed, old.replaced) == (False, True)

    in_world(scenario)


def test_an_update_keeps_the_position_of_the_command_that_wrote_the_timer() -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, payload="1", ignore_reached=True, command=_command(2))
        await world.service.update(X, TimerPatch(delay_ms=HOUR_MS, payload="2"))
        late = await world.create("x", HOUR_MS, payload="3", ignore_reached=True, command=_command(1))
        assert late.existed
        assert late.view.timer.payload == "2"

    in_world(scenario)


def test_a_cancel_that_arrives_before_its_create_leaves_nothing_to_fire() -> None:
    async def scenario(world: World) -> None:
        assert await world.service.delete(X, _command(2)) is Verdict.CANCELLED
        assert (await world.get("x")).state is State.CANCELLED
        assert await world.service.delete(X, _command(2)) is Verdict.ALREADY_REACHED  # delivered again
        late = await world.create("x", 1_000, ignore_reached=True, command=_command(1))
        assert (late.existed, late.view.state) == (True, State.CANCELLED)
        await asyncio.sleep(10)
        assert world.destinations.called() == []

    in_world(scenario)


def test_a_create_after_such_a_cancel_makes_the_timer() -> None:
    async def scenario(world: World) -> None:
        await world.service.delete(X, _command(2))
        later = await world.create("x", 1_000, ignore_reached=True, command=_command(3))
        assert not later.existed
        await asyncio.sleep(10)
        assert world.destinations.called() == ["x"]

    in_world(scenario)


def test_commands_leave_a_timer_alone_that_cannot_be_decoded_because_a_later_one_may_have_written_it() -> None:
    async def scenario(world: World) -> None:
        await world.create("x", HOUR_MS, ignore_reached=True, command=_command(2))
        world.engine.shards[0].shrink(0)
        assert isinstance(world.store, MemoryStore)
        world.store.spoil_timer(0, X)
        for number in (1, 3):
            with pytest.raises(UnreadableTimer):
                await world.service.delete(X, _command(number))
            with pytest.raises(UnreadableTimer):
                await world.create("x", HOUR_MS, ignore_reached=True, command=_command(number))
        assert await world.service.delete(X) is Verdict.CANCELLED

    in_world(scenario, namespaces__default_num_shards=1)


def test_the_later_of_two_cancels_before_the_create_counts() -> None:
    async def scenario(world: World) -> None:
        await world.service.delete(X, _command(2))
        assert await world.service.delete(X, _command(4)) is Verdict.CANCELLED
        assert await world.service.delete(X, _command(3)) is Verdict.ALREADY_REACHED
        assert (await world.create("x", 1_000, ignore_reached=True, command=_command(3))).existed

    in_world(scenario)


def test_a_delete_by_http_of_a_timer_that_was_never_created_is_not_found() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(NotFound):
            await world.service.delete(X)
        await world.service.delete(X, _command(1))
        assert await world.service.delete(X) is Verdict.ALREADY_REACHED
        assert not (await world.create("x")).existed

    in_world(scenario)


def test_if_absent_is_not_answered_from_a_write_that_is_not_on_disk() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("commit", *[Fault.UNAVAILABLE] * 1_000)
        first = asyncio.ensure_future(world.create("x", 60_000, payload="1"))
        await asyncio.sleep(1)
        second = asyncio.ensure_future(world.create("x", 60_000, payload="1", if_absent=True))
        with pytest.raises(StoreUnavailable):
            await first
        store.heal()
        assert not (await second).existed
        await asyncio.sleep(120)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_delete_is_not_answered_from_an_outcome_that_is_not_on_disk() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 1_000)
        await asyncio.sleep(0.9)
        store.fail("commit", *[Fault.UNAVAILABLE] * 5)
        await asyncio.sleep(0.2)
        assert world.destinations.called() == ["x"]
        assert await world.service.delete(X) is Verdict.ALREADY_REACHED
        await world.crash_and_restart()
        await asyncio.sleep(60)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_delete_that_is_repeated_after_an_unknown_outcome_is_not_answered_before_it_is_known() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 60_000)
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 1_000)
        with pytest.raises(OutcomeUnknown):
            await world.service.delete(X)
        with pytest.raises(DuetimeError):
            await world.service.delete(X)
        await world.crash_and_restart()
        store.heal()
        await asyncio.sleep(120)
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_every_caller_is_answered_also_after_a_write_of_unknown_outcome() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        store.fail("claim", *[Fault.UNAVAILABLE] * 100)
        first = asyncio.ensure_future(world.create("x", 600_000))
        await asyncio.sleep(0.5)
        second = asyncio.ensure_future(world.create("x", 610_000))
        await asyncio.sleep(30)
        assert isinstance(first.exception(), OutcomeUnknown)
        assert isinstance(second.exception(), OutcomeUnknown)

    on_one_shard(scenario)


def test_a_caller_that_stops_waiting_for_a_timer_does_not_affect_the_others() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 60_000, payload="0")
        updates = [
            asyncio.ensure_future(world.service.update(X, TimerPatch(payload=str(number)))) for number in (1, 2, 3)
        ]
        await asyncio.sleep(0)
        updates[1].cancel()
        results = await asyncio.gather(*updates, return_exceptions=True)
        assert isinstance(results[1], asyncio.CancelledError)
        assert (await world.get("x")).timer.payload == "3"

    on_one_shard(scenario)


def test_an_update_that_does_not_change_the_time_keeps_the_attempts() -> None:
    """A timer that was tried on time is being retried: no missed-fire policy may skip it for being late."""

    async def scenario(world: World, store: FaultyStore) -> None:
        outcomes = [AttemptResult(Contact.ANSWERED, 500), AttemptResult(Contact.ANSWERED, 200)]

        async def answer(attempt: Attempt) -> AttemptResult:
            return outcomes.pop(0)

        world.destinations.answers[URL] = answer
        policy = RetryPolicy(initial_interval_ms=60_000, max_interval_ms=60_000)
        await world.create("x", 1_000, missed=Missed(skip_if_late_by_ms=100), retry_policy=policy, tags=("t",))
        await asyncio.sleep(1.5)
        before = (await world.get("x")).timer
        assert before.attempts == 1
        changed = (await world.service.update(X, TimerPatch(payload='"new"'))).view.timer
        assert changed.attempts == 1
        assert (changed.execute_at_ms, changed.scheduled_at_ms) == (before.execute_at_ms, before.scheduled_at_ms)
        assert changed.extras == before.extras
        assert changed.generation > before.generation
        await asyncio.sleep(120)
        view = await world.get("x")
        assert view.state is State.DELIVERED
        assert (view.timer.attempts, view.timer.extras.late_by_ms) == (2, 0)
        assert world.destinations.payloads == [None, '"new"']

    on_one_shard(scenario)


@pytest.mark.parametrize("time", [{"delay_ms": 5_000}, {"execute_at_ms": 1_800_000_020_000}])
def test_an_update_of_the_time_starts_the_attempts_over(time: dict[str, int]) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        async def answer(attempt: Attempt) -> AttemptResult:
            return AttemptResult(Contact.ANSWERED, 500)

        world.destinations.answers[URL] = answer
        await world.create("x", 1_000, tags=("t",), retry_policy=RetryPolicy(initial_interval_ms=60_000))
        await asyncio.sleep(1.5)
        changed = (await world.service.update(X, TimerPatch(**time))).view.timer  # type: ignore[arg-type]
        assert changed.attempts == 0
        assert changed.execute_at_ms == changed.scheduled_at_ms
        assert (changed.extras.tags, changed.extras.first_attempt_at_ms, changed.extras.last_error) == (
            ("t",),
            None,
            None,
        )

    on_one_shard(scenario)


def test_whether_a_timer_was_replaced_is_not_known_after_a_lost_answer_beyond_the_horizon() -> None:
    """The lost answer of the store said it; timers beyond the horizon are not in memory."""

    async def scenario(world: World, store: FaultyStore) -> None:
        day_ms = 86_400_000
        await world.create("x", day_ms)
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        assert (await world.create("x", day_ms)).replaced is None
        store.fail("commit", Fault.LOST_THEN_UNKNOWN)
        assert (await world.create("x", day_ms)).replaced is True, "written again, and the store has said so"
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        await world.create("y", 1_000)
        store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)
        assert (await world.create("y", 1_000)).replaced is True, "in memory, so it is known"

    on_one_shard(scenario)


def test_a_read_of_a_timer_whose_result_cannot_be_recorded_is_answered_in_time() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("x", 1_000)
        store.fail("commit", *[Fault.UNAVAILABLE] * 10_000)
        await asyncio.sleep(30)
        assert world.destinations.called() == ["x"]
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(world.service.delete(X), 15)
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(world.service.update(X, TimerPatch(payload="2")), 15)
        store.heal()
        await asyncio.sleep(10)
        assert (await world.get("x")).state is State.DELIVERED
        assert world.destinations.called() == ["x"]

    on_one_shard(scenario)


def test_a_delete_that_could_not_be_applied_in_time_does_not_keep_the_timer_from_firing() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        answered = asyncio.Event()

        async def hangs(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return OK

        world.destinations.answers["http://hangs.test/"] = hangs
        await world.create("armed", 25_000)
        await world.create("due meanwhile", 5_000)
        await world.create("in flight", 1_000, callback_url="http://hangs.test/")
        await world.create("answered meanwhile", 1_000, callback_url="http://hangs.test/")
        await asyncio.sleep(2)
        names = ["armed", "due meanwhile", "in flight", "answered meanwhile"]
        store.fail("commit", *[Fault.UNAVAILABLE] * 10_000)
        deletes = [asyncio.ensure_future(world.service.delete(TimerKey("default", name))) for name in names]
        await asyncio.sleep(1)
        answered.set()
        await asyncio.wait(deletes)
        assert [type(delete.exception()) for delete in deletes] == [StoreUnavailable] * 4
        check_accounts(world.engine)
        store.heal()
        await asyncio.sleep(60)
        assert sorted(world.destinations.called()) == sorted(names)
        assert [(await world.get(name)).state for name in names] == [State.DELIVERED] * 4

    on_one_shard(scenario)
