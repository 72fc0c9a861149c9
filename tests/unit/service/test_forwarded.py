"""Commands that another instance forwards: refused unless this one owns the shard, and carried out once."""

from __future__ import annotations

import asyncio

import pytest
from engine_world import URL, World, on_faulty
from two_instances import Wires, of_two, owned_by

from duetime.cluster.forwarding import CreateCommand, DeleteCommand, Forward, UpdateCommand
from duetime.domain.timer import (
    Created,
    TimerKey,
    TimerPatch,
    TimerSpec,
    Updated,
    Verdict,
    shard_of,
)
from duetime.engine.shard import ShardState
from duetime.errors import (
    DuetimeError,
    InvalidField,
    NotFound,
    NotOwner,
    OutcomeUnknown,
)
from duetime.service import forwarded
from duetime.store import Claim
from duetime.testing.faulty import Fault, FaultyStore


def command_to(
    world: World, timer_id: str, command_id: str = "id", *, payload: str | None = None, later: int = 0
) -> Forward:
    """A create for a shard of this instance, in the version it has (or a later one)."""
    shard_id = shard_of(timer_id, 16)
    spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=60_000, callback_url=URL, payload=payload)
    return Forward(command_id, shard_id, world.engine.shards[shard_id].fence.version + later, CreateCommand(spec))


def test_a_command_of_another_version_of_the_shard_is_refused() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        for later in (-1, 1):
            with pytest.raises(NotOwner):
                await a.service.forwarded.receive(command_to(a, timer_id, f"off by {later}", later=later))
        with pytest.raises(NotFound):
            await a.get(timer_id)
        assert isinstance(await a.service.forwarded.receive(command_to(a, timer_id)), Created)

    of_two(scenario)


def test_a_command_for_a_shard_that_is_being_released_is_refused() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard = a.engine.shards[shard_of(timer_id, 16)]
        shard.close()
        create = command_to(a, timer_id)
        with pytest.raises(NotOwner):
            await a.service.forwarded.receive(create)
        delete = DeleteCommand(TimerKey("default", timer_id))
        with pytest.raises(NotOwner):  # whether there is such a timer is not looked up any more
            await a.service.forwarded.receive(Forward("d", create.shard_id, create.version, delete))
        with pytest.raises(NotOwner):
            await a.service._try_at_owner(create.shard_id, delete)
        shard.state = ShardState.OPEN
        with pytest.raises(NotFound):
            await a.service._try_at_owner(create.shard_id, delete)

    of_two(scenario)


def test_the_answer_to_a_command_can_be_asked_for_by_its_id() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        taken = a.service.forwarded.receive(command_to(a, timer_id))
        assert a.service.forwarded.answer_to("id") is taken, "not decided yet"
        assert isinstance(await taken, Created)
        assert a.service.forwarded.answer_to("id") is taken
        with pytest.raises(OutcomeUnknown, match="no longer in memory"):
            await a.service.forwarded.answer_to("never given")

    of_two(scenario)


def test_a_command_that_was_refused_stays_refused_by_its_id() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        early = command_to(a, owned_by(a), later=1)
        with pytest.raises(NotOwner):
            await a.service.forwarded.receive(early)
        with pytest.raises(NotOwner):
            await a.service.forwarded.answer_to("id")

    of_two(scenario)


def test_every_kind_of_command_is_carried_out_for_another_instance() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        key, create = TimerKey("default", timer_id), command_to(a, timer_id)
        await a.service.forwarded.receive(create)
        update = Forward("u", create.shard_id, create.version, UpdateCommand(key, TimerPatch(delay_ms=90_000)))
        assert isinstance(await a.service.forwarded.receive(update), Updated)
        delete = Forward("d", create.shard_id, create.version, DeleteCommand(key))
        assert await a.service.forwarded.receive(delete) is Verdict.CANCELLED

    of_two(scenario)


def test_a_command_that_the_owner_cannot_accept_gets_the_owners_error() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        good = command_to(a, timer_id)
        spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=1, callback_url="gopher://x")
        answer = a.service.forwarded.receive(Forward("bad", good.shard_id, good.version, CreateCommand(spec)))
        assert a.service.forwarded.answer_to("bad") is answer, "what is refused is remembered too"
        with pytest.raises(InvalidField, match="callbackUrl"):
            await answer
        nowhere = TimerSpec(namespace="nowhere", timer_id=timer_id, delay_ms=1, callback_url=URL)
        with pytest.raises(NotFound, match="There is no namespace"):
            await a.service.forwarded.receive(Forward("nowhere", good.shard_id, good.version, CreateCommand(nowhere)))

    of_two(scenario)


def test_a_create_of_another_instance_that_is_not_on_disk_is_not_acknowledged() -> None:
    """Its commit finds that the shard is another's."""

    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        forward = command_to(a, timer_id)
        of_b = b.engine.membership
        await a.store.claim([Claim(forward.shard_id, forward.version, 77, of_b.instance_id, "b", 0)])
        with pytest.raises(DuetimeError) as lost:
            await a.service.forwarded.receive(forward)
        assert lost.value.code == "not_applied"
        with pytest.raises(NotFound):
            await b.get(timer_id)

    of_two(scenario)


def test_a_create_of_another_instance_says_whether_it_replaced_something() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        first = await a.service.forwarded.receive(command_to(a, timer_id, "1"))
        second = await a.service.forwarded.receive(command_to(a, timer_id, "2"))
        assert [isinstance(answer, Created) and answer.replaced for answer in (first, second)] == [False, True]
        assert a.engine.telemetry.created.value == 2

    of_two(scenario)


def test_a_create_of_another_instance_is_acknowledged_after_its_namespace_was_read_again() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        commit = store.hold("commit")
        answer = world.service.forwarded.receive(command_to(world, "a"))
        await asyncio.sleep(0.1)
        namespaces = store.hold("namespaces")
        await asyncio.sleep(5)  # the last read of the namespaces is too old by now
        commit.set()
        await asyncio.sleep(0.1)
        assert not answer.done()
        namespaces.set()
        assert isinstance(await answer, Created)
        assert world.engine.telemetry.created.value == 1

    on_faulty(scenario, namespaces__default_num_shards=16)


def test_a_create_of_another_instance_whose_namespace_cannot_be_read_again_is_answered_unknown() -> None:
    """It is on disk, but perhaps its namespace was deleted: it must not be acknowledged, and the sender must not wait
    without end."""

    async def scenario(world: World, store: FaultyStore) -> None:
        commit = store.hold("commit")
        answer = world.service.forwarded.receive(command_to(world, "a"))
        await asyncio.sleep(0.1)
        store.fail("namespaces", *[Fault.UNAVAILABLE] * 20)
        await asyncio.sleep(5)  # the last read of the namespaces is too old by now
        commit.set()
        await asyncio.sleep(5)
        assert answer.done()
        with pytest.raises(OutcomeUnknown, match="cannot read whether the namespace still exists"):
            await answer
        assert world.engine.telemetry.created.value == 0

    on_faulty(scenario, namespaces__default_num_shards=16)


def test_a_create_of_another_instance_waits_for_a_write_about_the_same_timer() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard = a.engine.shards[shard_of(timer_id, 16)]
        async with shard.key_lock(TimerKey("default", timer_id)):
            taken = a.service.forwarded.receive(command_to(a, timer_id))
            await asyncio.sleep(5)
            assert not taken.done()
        assert isinstance(await taken, Created)

    of_two(scenario)


# --- remembered answers -------------------------------------------------------------------------


def test_answers_to_old_commands_are_removed_but_not_undecided_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded, "_REMEMBERED_MAX", 20)

    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard = a.engine.shards[shard_of(timer_id, 16)]
        async with shard.key_lock(TimerKey("default", timer_id)):
            pending = a.service.forwarded.receive(command_to(a, timer_id, "pending"))
            for number in range(100):
                with pytest.raises(NotOwner):
                    await a.service.forwarded.receive(command_to(a, timer_id, f"refused {number}", later=1))
                assert len(a.service.forwarded._remembered) <= 21
            assert a.service.forwarded.answer_to("pending") is pending
            for number, forgotten in ((0, True), (99, False)):
                with pytest.raises(OutcomeUnknown if forgotten else NotOwner):
                    await a.service.forwarded.answer_to(f"refused {number}")
        assert isinstance(await pending, Created)

    of_two(scenario)


def test_answers_to_large_commands_are_removed_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded, "_REMEMBERED_CHARS_MAX", 10_000)

    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        large = f'"{"x" * 998}"'
        for number in range(50):
            await a.service.forwarded.receive(command_to(a, timer_id, f"large {number}", payload=large))
            assert len(a.service.forwarded._remembered) <= 11
            assert a.service.forwarded._remembered_chars == 1_000 * len(a.service.forwarded._remembered)
        with pytest.raises(OutcomeUnknown):
            await a.service.forwarded.answer_to("large 30")
        assert isinstance(await a.service.forwarded.answer_to("large 49"), Created)
        for number in range(50):
            await a.service.forwarded.receive(command_to(a, timer_id, f"small {number}"))
        assert len(a.service.forwarded._remembered) > 50, "small ones need no room"

    of_two(scenario)


def test_many_undecided_commands_do_not_make_a_new_one_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarded, "_REMEMBERED_MAX", 5)

    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard = a.engine.shards[shard_of(timer_id, 16)]
        async with shard.key_lock(TimerKey("default", timer_id)):
            pending = [a.service.forwarded.receive(command_to(a, timer_id, f"p{number}")) for number in range(30)]
            assert [a.service.forwarded.answer_to(f"p{number}") for number in range(30)] == pending, "none is forgotten"
        for answer in pending:
            assert isinstance(await answer, Created)
        for number in range(10):
            with pytest.raises(NotOwner):
                await a.service.forwarded.receive(command_to(a, timer_id, f"next {number}", later=1))
        assert len(a.service.forwarded._remembered) <= 6, "several go at once, so that they become fewer"

    of_two(scenario)


def test_a_command_in_flight_is_never_forgotten_and_large_ones_do_not_fill_the_memory() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        faulty = FaultyStore(b.store)
        for group_commit in b.engine._group_commits:
            group_commit._store = faulty.as_store
        released = faulty.hold("commit")
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        version = b.engine.shards[shard_id].fence.version

        def command(number: int, payload: str) -> Forward:
            spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=60_000, callback_url=URL, payload=payload)
            return Forward(f"order-{number}", shard_id, version, CreateCommand(spec))

        first = b.service.forwarded.receive(command(0, "1"))
        for number in range(1, 120):
            b.service.forwarded.receive(command(number, '"' + "x" * 250_000 + '"'))
        assert b.service.forwarded.answer_to("order-0") is first
        released.set()
        await first
        await asyncio.sleep(1)
        for number in range(1_000, 1_010):  # each new one lets a few old ones go
            b.service.forwarded.receive(command(number, "2"))
        assert b.service.forwarded._remembered_chars <= 17 * 1024 * 1024
        await b.service.delete(TimerKey("default", timer_id))

    of_two(scenario)
