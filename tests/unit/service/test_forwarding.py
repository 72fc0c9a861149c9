"""Two instances on one store: a command is sent to the owner of its shard, in one hop, and is carried out once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from engine_world import URL, World
from hooked_store import HookedStore, stored, with_store
from two_instances import Wires, of_two, owned_by

from duetime.cluster.forwarding import CommandAnswer, CreateCommand, Forward, Peer, UpdateCommand
from duetime.domain.recurrence import is_held
from duetime.domain.timer import (
    NOT_BY_OLDER_VERSIONS_MS,
    Created,
    NamespaceSpec,
    State,
    TimerKey,
    TimerSpec,
    Verdict,
    shard_of,
)
from duetime.domain.wall_clock import Schedule
from duetime.engine.shard import ShardState
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    NotOwner,
    NotReady,
    OutcomeUnknown,
    StoreUnavailable,
    Unserved,
)
from duetime.store import Claim
from duetime.testing.faulty import Fault


def test_both_own_some_shards_and_each_accepts_commands_for_all() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        assert len(a.engine.shards) + len(b.engine.shards) == 16
        assert a.engine.shards
        assert b.engine.shards
        ids = [f"t{n}" for n in range(40)]
        await asyncio.gather(*(a.create(timer_id, 1_000) for timer_id in ids))
        assert wires.sent
        assert await a.service.delete(TimerKey("default", owned_by(b))) is Verdict.CANCELLED
        await asyncio.sleep(5)
        assert sorted(a.destinations.called() + b.destinations.called()) == sorted(set(ids) - {owned_by(b)})

    of_two(scenario)


@pytest.mark.parametrize("many", [False, True])
def test_a_create_whose_shard_is_lost_before_its_commit_is_made_at_the_new_owner(many: bool) -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard_id = shard_of(timer_id, 16)
        of_b = b.engine.membership
        # b has taken the shard, and a does not know yet: it admits the create, and its commit is refused.
        [row] = await a.store.claim(
            [Claim(shard_id, a.engine.shards[shard_id].fence.version, 77, of_b.instance_id, "b", 0)]
        )
        assert row.nonce == 77
        spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=60_000, callback_url=URL)
        made = asyncio.ensure_future(a.service.create_many([spec]) if many else a.service.create(spec))
        await asyncio.sleep(0)
        assert shard_id in a.engine.shards, "admitted here"
        await made
        assert (await b.get(timer_id)).state is State.SCHEDULED

    of_two(scenario)


def test_the_map_says_who_owns_what_and_forwards_are_counted() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        found = a.service.shard_map()
        assert sorted(found.addresses) == ["a", "b"]
        assert found.num_shards == {"default": 16}
        for world, address in ((a, "a"), (b, "b")):
            index = found.addresses.index(address)
            assert found.instance_ids[index] == world.engine.membership.instance_id
            assert {i for i, owner in enumerate(found.owners) if owner == index} == set(world.engine.shards)
        await a.create(owned_by(a), 60_000)
        assert a.engine.telemetry.forwards.by_label == {}
        await a.create(owned_by(b), 60_000)
        assert a.engine.telemetry.forwards.by_label == {"ok": 1}
        assert b.engine.telemetry.forwards.by_label == {}

    of_two(scenario)


def test_a_member_that_has_left_owns_nothing_on_the_map() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        of_b = set(b.engine.shards)
        del a.engine.membership.alive[b.engine.membership.instance_id]
        found = a.service.shard_map()
        assert found.addresses == ("a",)
        assert {i for i, owner in enumerate(found.owners) if owner is None} == of_b

    of_two(scenario)


def test_case_26_a_forward_goes_one_hop_and_is_refused_rather_than_forwarded_again() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        spec = TimerSpec(namespace="default", timer_id=timer_id, delay_ms=1_000, callback_url=URL)
        misled = Forward("id", shard_of(timer_id, 16), 1, CreateCommand(spec))
        with pytest.raises(NotOwner) as refused:
            await a.service.forwarded.receive(misled)
        assert (refused.value.status, refused.value.retry_after_seconds) == (503, 1)
        assert wires.sent == []

    of_two(scenario)


def test_case_27_a_forward_to_an_ex_owner_is_refused_and_sent_once_more_to_the_new_one() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        b.engine.ownership.recover(b.engine.shards[shard_id])  # it claims again: another version
        await asyncio.sleep(0.5)
        stale = a.engine.rows[shard_id]
        a.engine.rows[shard_id] = type(stale)(shard_id, stale.version - 1, 1, stale.owner_id, stale.owner_address)
        await a.create(timer_id, 1_000)
        versions = [forward.version for _, forward in wires.sent]
        assert len(versions) == 2
        assert versions[1] == b.engine.shards[shard_id].fence.version
        await asyncio.sleep(5)
        assert b.destinations.called() == [timer_id]

    of_two(scenario)


def test_a_forward_that_arrives_twice_is_carried_out_once() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        await a.create(timer_id, 60_000)
        _, forward = wires.sent[-1]
        assert await b.service.delete(TimerKey("default", timer_id)) is Verdict.CANCELLED
        await b.service.forwarded.receive(forward)
        await asyncio.sleep(120)
        assert a.destinations.calls + b.destinations.calls == []

    of_two(scenario)


def test_an_error_of_the_owner_is_returned_to_the_caller() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        with pytest.raises(DuetimeError, match="There is no timer"):
            await a.service.delete(TimerKey("default", owned_by(b)))

    of_two(scenario)


def test_a_namespace_that_another_instance_still_fills_is_not_deleted() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        await b.service.namespaces.get("n")
        deleting = asyncio.ensure_future(a.service.namespaces.delete("n"))
        while not (known := a.engine.namespaces.known("n")) or not known.deleting:
            await asyncio.sleep(0)
        # The other instance has not seen the mark yet, and takes a create about a shard of its own.
        await b.service.create(TimerSpec(namespace="n", timer_id=owned_by(b), delay_ms=60_000, callback_url=URL))
        with pytest.raises(Conflict, match="still has scheduled timers"):
            await deleting
        await asyncio.sleep(5)
        assert (await b.service.get(TimerKey("n", owned_by(b)))).state is State.SCHEDULED
        await b.service.delete(TimerKey("n", owned_by(b)))
        await a.service.namespaces.delete("n")
        await asyncio.sleep(2)  # read again every second
        with pytest.raises(NotFound):
            await b.service.namespaces.get("n")

    of_two(scenario)


def test_a_new_namespace_is_known_to_the_others_at_once() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        with pytest.raises(NotFound):
            await b.service.namespaces.get("n")
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        await b.service.create(TimerSpec(namespace="n", timer_id="t", delay_ms=1_000, callback_url=URL))
        await asyncio.sleep(5)
        assert a.destinations.called() + b.destinations.called() == ["t"]

    of_two(scenario)


def test_commands_for_shards_of_an_instance_that_stops_wait_for_the_next_owner() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        ids = [f"t{n}" for n in range(60)]
        leaving = asyncio.ensure_future(b.engine.stop())
        await asyncio.gather(*(a.create(timer_id, 1_000) for timer_id in ids))
        await leaving
        await asyncio.sleep(5)
        assert sorted(a.destinations.called() + b.destinations.called()) == sorted(ids)

    of_two(scenario)


# --- commands to other instances -----------------------------------------------------------------


@pytest.mark.parametrize("failure", [OutcomeUnknown, NotFound, StoreUnavailable])
def test_a_command_whose_outcome_is_unknown_or_final_is_sent_once(failure: type[DuetimeError]) -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: failure("simulated")
        with pytest.raises(failure, match="simulated"):
            await a.create(owned_by(b))
        assert len(wires.sent) == 1
        assert a.engine.telemetry.forwards.by_label == {failure("").code: 1}

    of_two(scenario)


def test_a_command_that_was_certainly_not_applied_is_sent_again_under_another_id_for_two_seconds() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: NotOwner("simulated")
        began = a.clock.boot_ms()
        with pytest.raises(NotOwner, match="simulated"):
            await a.create(owned_by(b))
        assert 2_000 <= a.clock.boot_ms() - began < 2_600
        assert len({forward.command_id for _, forward in wires.sent}) == len(wires.sent)
        assert 10 <= len(wires.sent) <= 25, "with pauses that grow"
        assert a.engine.telemetry.forwards.by_label == {"not_applied": len(wires.sent)}

    of_two(scenario)


def test_a_command_that_was_not_applied_succeeds_as_soon_as_the_owner_accepts_it() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: NotOwner("simulated")
        making = asyncio.ensure_future(a.create(owned_by(b), 60_000))
        await asyncio.sleep(0.5)
        wires.failure = None
        began = a.clock.boot_ms()
        assert isinstance(await making, Created)
        assert a.clock.boot_ms() - began <= 300

    of_two(scenario)


def test_a_command_names_the_version_and_the_shard_and_goes_to_the_owner_with_its_secret() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        asked: list[Peer] = []
        arrive = wires.forward

        async def kept(peer: Peer, forward: Forward) -> CommandAnswer:
            asked.append(peer)
            return await arrive(peer, forward)

        wires.forward = kept  # type: ignore[method-assign]
        timer_id = owned_by(b)
        await a.create(timer_id)
        assert asked == [b.service.as_peer()]
        [(_, given)] = wires.sent
        assert given.shard_id == shard_of(timer_id, 16)
        assert given.version == b.engine.shards[given.shard_id].fence.version

    of_two(scenario)


def test_nothing_is_forwarded_if_the_owner_is_unknown_or_is_this_instance() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        row = a.engine.rows[shard_id]
        command = CreateCommand(TimerSpec(namespace="default", timer_id=timer_id, delay_ms=1, callback_url=URL))
        mine = a.engine.membership.instance_id
        for owner_id in (None, "a dead instance", mine):
            a.engine.rows[shard_id] = type(row)(shard_id, row.version, row.nonce, owner_id, row.owner_address)
            with pytest.raises(NotOwner):
                await a.service._try_at_owner(shard_id, command)
        del a.engine.rows[shard_id]
        with pytest.raises(NotOwner):
            await a.service._try_at_owner(shard_id, command)
        a.engine.rows[shard_id] = row
        assert wires.sent == []

    of_two(scenario)


def test_a_write_about_a_shard_that_is_being_given_away_waits_and_is_not_carried_out_here() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(a)
        shard = a.engine.shards[shard_of(timer_id, 16)]
        shard.close()
        making = asyncio.ensure_future(a.create(timer_id, 60_000))
        await asyncio.sleep(0.3)
        assert not making.done()
        shard.state = ShardState.OPEN
        assert isinstance(await making, Created)

    of_two(scenario)


def test_an_instance_that_is_not_started_refuses_at_once() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: NotOwner("simulated")
        a.engine.started = False
        began = a.clock.boot_ms()
        with pytest.raises(NotReady):
            await a.create(owned_by(b))
        a.engine.started = True
        assert a.clock.boot_ms() == began

    of_two(scenario)


def test_an_instance_that_stops_waits_for_new_owners_only_if_there_are_others() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: NotOwner("simulated")
        a.engine.stopping = True
        with pytest.raises(NotOwner, match="simulated"):
            await a.create(owned_by(b))
        others = a.engine.membership.alive
        timer_id, mine = owned_by(b), a.engine.membership.instance_id
        a.engine.membership.alive = {mine: others[mine]}
        with pytest.raises(NotReady):
            await a.create(timer_id)
        a.engine.membership.alive = others
        a.engine.stopping = False

    of_two(scenario)


def test_a_claim_that_hangs_does_not_keep_a_write_waiting_beyond_its_patience() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        wires.failure = lambda: NotOwner("simulated")
        timer_id, began = owned_by(b), a.clock.boot_ms()
        balance = a.engine.balance

        async def hangs() -> None:
            await asyncio.sleep(60)

        a.engine.balance = hangs  # type: ignore[method-assign]
        with pytest.raises(NotOwner):
            await a.create(timer_id)
        assert 2_000 <= a.clock.boot_ms() - began <= 2_100
        a.engine.balance = balance  # type: ignore[method-assign]

    of_two(scenario)


def test_a_claim_whose_outcome_is_unknown_does_not_make_the_outcome_of_a_command_unknown() -> None:
    """The command was refused before the claim: it was not applied, and its client may repeat it."""

    async def scenario(world: World, store: HookedStore) -> None:
        world.engine.ownership.drop(world.engine.shards[0], NotOwner())
        store.fail("claim", Fault.LOST_THEN_UNKNOWN)
        with pytest.raises(StoreUnavailable, match="injected"):
            await world.create("a", 60_000)
        assert await stored(store) is None
        assert isinstance(await world.create("a", 60_000), Created)

    with_store(scenario)


def test_a_shard_whose_row_changes_is_asked_for_again_at_once() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        timer_id = owned_by(b)
        shard_id = shard_of(timer_id, 16)
        right = a.engine.rows[shard_id]
        wrong = type(right)(shard_id, right.version - 1, 1, right.owner_id, right.owner_address)
        a.engine.rows[shard_id] = wrong
        balance = a.engine.balance

        async def learns() -> None:
            a.engine.rows[shard_id] = right

        a.engine.balance = learns  # type: ignore[method-assign]
        began = a.clock.boot_ms()
        await a.create(timer_id)
        a.engine.balance = balance  # type: ignore[method-assign]
        assert len(wires.sent) == 2
        assert a.clock.boot_ms() - began < 15, "without a pause"

    of_two(scenario)


def _as_older(answer: DuetimeError) -> Callable[[], DuetimeError]:
    return lambda: answer


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (InvalidField("executeAt", "one of executeAt and delay is required"), Unserved),
        (InvalidField("delay", "delay must end before 9999-01-01T00:00:00Z"), Unserved),
        (InvalidField("schedule.until", "schedule.until leaves no occurrence"), InvalidField),
    ],
)
def test_case_53_an_owner_of_a_version_without_schedules_refuses_them_and_nothing_is_applied(
    answer: DuetimeError, raised: type[DuetimeError]
) -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        key = TimerKey("default", owned_by(b))
        schedule = Schedule(timezone="UTC", repeat="daily", at="2027-01-20T09:00")
        spec = TimerSpec(namespace="default", timer_id=key.timer_id, schedule=schedule, callback_url=URL)
        wires.failure = _as_older(answer)
        for call in (lambda: a.service.create(spec), lambda: a.service.pause(key)):
            with pytest.raises(raised) as error:
                await call()
            assert type(error.value) is raised
        # As such a version decodes what it is sent: it finds no time, or one that is too late.
        assert (spec.execute_at_ms, spec.delay_ms) == (None, None)
        sent = wires.sent[-1][1].command
        assert isinstance(sent, UpdateCommand)
        assert sent.patch.delay_ms == NOT_BY_OLDER_VERSIONS_MS
        wires.failure = None
        created = await a.service.create(spec)
        assert created.view.timer.execute_at_ms == 1_800_435_600_000
        assert is_held((await a.service.pause(key)).timer)

    of_two(scenario)
