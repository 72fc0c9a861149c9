"""Namespaces while things happen: nothing fires before its namespace is known, and nothing is left in a deleted one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from engine_world import URL, World, in_world, on_one_shard
from msgspec.structs import replace
from two_instances import Wires, of_two, owned_by

from duetime.cluster.forwarding import CreateCommand, FireNowCommand, Forward, ReplayCommand, UpdateCommand
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Namespace, NamespaceSpec, State, TimerKey, TimerPatch, TimerSpec, Verdict, shard_of
from duetime.errors import Conflict, DuetimeError, NotFound, OutcomeUnknown, StoreUnavailable, Unserved
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock

SECRET = "whsec_c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"
KEY = TimerKey("shop", "a")


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


async def make_shop(world: World) -> Namespace:
    spec = NamespaceSpec(name="shop", num_shards=1, signing_secrets=(SECRET,), callback_url=URL)
    return await world.service.namespaces.create(spec)


async def create(world: World, delay_ms: int = 60_000, timer_id: str = "a") -> Any:
    return await world.service.create(TimerSpec(namespace="shop", timer_id=timer_id, delay_ms=delay_ms))


def seen_namespaces(world: World) -> list[Namespace]:
    """The namespace as each attempt was given it."""
    seen: list[Namespace] = []

    async def note(attempt: Attempt) -> None:
        seen.append(attempt.namespace)

    world.destinations.before_begin = note
    return seen


# --- nothing fires before its namespace is known -------------------------------------------------


def test_a_new_owner_that_has_not_read_the_namespace_reads_it_before_it_fires() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 5_000)
        seen = seen_namespaces(world)
        world.engine.namespaces._by_name.pop("shop")  # as on an instance that read them a moment before
        reading = store.hold("namespaces")
        await asyncio.sleep(6)
        assert seen == [], "nothing is sent without the secrets and the policy of its namespace"
        reading.set()
        await asyncio.sleep(1)
        assert seen == [shop]

    on_one_shard(scenario)


def test_while_the_namespaces_cannot_be_read_the_timer_is_held_and_no_attempt_is_spent() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 2_000)
        await world.create("other", 2_000)
        seen = seen_namespaces(world)
        world.engine.namespaces._by_name.pop("shop")
        store.fail("namespaces", *[Fault.UNAVAILABLE] * 8)
        await asyncio.sleep(4)
        assert [namespace.name for namespace in seen] == ["default"], "others are not held"
        await asyncio.sleep(20)
        assert [namespace for namespace in seen if namespace.name == "shop"] == [shop]
        found = (await store.get_many([(0, KEY)]))[0]
        assert found.reached is not None
        assert found.reached.timer.attempts == 1

    on_one_shard(scenario)


def test_a_timer_in_a_namespace_created_again_is_fired_with_the_new_settings() -> None:
    """What this instance has read is the deleted one; the new one has other secrets."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 3_000)
        seen = seen_namespaces(world)
        world.engine.namespaces._by_name["shop"] = replace(shop, deleted=True, signing_secrets=())
        reading = store.hold("namespaces")
        await asyncio.sleep(5)
        assert seen == []
        reading.set()
        await asyncio.sleep(1)
        assert seen == [shop]

    on_one_shard(scenario)


def test_a_timer_in_a_namespace_created_again_is_held_while_the_namespaces_cannot_be_read() -> None:
    """A read that failed proves nothing: the timer must not fire with the settings of the deleted namespace."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 3_000)
        seen = seen_namespaces(world)
        world.engine.namespaces._by_name["shop"] = replace(shop, deleted=True, signing_secrets=())
        store.fail("namespaces", *[Fault.UNAVAILABLE] * 12)
        await asyncio.sleep(5)
        assert seen == []
        await asyncio.sleep(20)
        assert seen == [shop]

    on_one_shard(scenario)


def test_a_timer_that_is_left_in_a_deleted_namespace_fires_with_its_settings() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 3_000)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)
        seen = seen_namespaces(world)
        await asyncio.sleep(10)
        assert [namespace.signing_secrets for namespace in seen] == [(SECRET,)]

    on_one_shard(scenario)


def test_a_held_timer_that_is_deleted_or_moved_meanwhile_does_not_fire_when_its_namespace_is_known() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        await create(world, 1_000)
        await create(world, 1_000, "b")
        world.engine.namespaces._by_name.pop("shop")
        reading = store.hold("namespaces")
        await asyncio.sleep(2)
        world.engine.namespaces._by_name["shop"] = (await store._store.namespaces())[1]
        await world.service.delete(KEY)
        await world.service.update(TimerKey("shop", "b"), TimerPatch(delay_ms=60_000))
        reading.set()
        await asyncio.sleep(20)
        assert world.destinations.calls == []

    on_one_shard(scenario)


def test_an_outcome_is_settled_by_the_namespace_it_was_sent_with() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        await create(world, 1_000)

        async def answer(attempt: Attempt) -> AttemptResult:
            world.engine.namespaces._by_name.pop("shop")
            return AttemptResult(Contact.ANSWERED, 200)

        world.destinations.answers[URL] = answer
        store.hold("namespaces")
        await asyncio.sleep(2)
        found = (await store.get_many([(0, KEY)]))[0]
        assert found.reached is not None

    on_one_shard(scenario)


# --- deleting a namespace against writes ---------------------------------------------------------

both = pytest.mark.parametrize("new_store", [MemoryStore, ExclusiveStore], ids=["shared", "exclusive"])


@both
def test_a_create_whose_commit_outlasts_the_deletion_of_its_namespace_is_not_acknowledged(
    new_store: Callable[[VirtualClock], MemoryStore],
) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        commit = store.hold("commit")
        creating = asyncio.ensure_future(create(world))
        await asyncio.sleep(0.1)
        await world.service.namespaces.delete("shop")
        commit.set()
        with pytest.raises(NotFound) as caught:
            await creating
        assert caught.value.code == "namespace_not_found"
        await asyncio.sleep(1)
        assert (await store.get_many([(0, KEY)]))[0].timer is None, "and nothing of it stays"

    on_one_shard(scenario, new_store)


@both
def test_a_create_that_was_acknowledged_before_keeps_its_namespace(
    new_store: Callable[[VirtualClock], MemoryStore],
) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        listing = store.hold("list_timers")
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        await asyncio.sleep(0.1)
        await create(world, 10_000)
        listing.set()
        with pytest.raises(Conflict) as caught:
            await deleting
        assert caught.value.code == "namespace_in_use"
        assert (await world.service.get(KEY)).state is State.SCHEDULED
        await asyncio.sleep(20)
        assert world.destinations.called() == ["a"]

    on_one_shard(scenario, new_store)


def test_an_instance_that_has_not_seen_the_deletion_acknowledges_no_create_after_it() -> None:
    """Its last read of the namespaces is too old when the commit is done, so it reads again."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        commit, reading = store.hold("commit"), store.hold("namespaces")
        creating = asyncio.ensure_future(create(world))
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)  # by another instance
        await asyncio.sleep(4)
        commit.set()
        await asyncio.sleep(0.1)
        assert not creating.done(), "acknowledged by a reading that is older than three seconds"
        reading.set()
        with pytest.raises(NotFound):
            await creating

    on_one_shard(scenario)


def test_a_create_in_a_namespace_that_is_cached_as_deleted_is_refused_until_it_is_created_again() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        await world.service.namespaces.delete("shop")
        with pytest.raises(NotFound):
            await create(world)
        assert (await store.get_many([(0, KEY)]))[0].timer is None
        await make_shop(world)
        assert (await create(world)).view.state is State.SCHEDULED

    on_one_shard(scenario)


def test_a_create_is_of_unknown_outcome_if_it_cannot_be_read_whether_its_namespace_still_exists() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        commit = store.hold("commit")
        creating = asyncio.ensure_future(create(world))
        store.fail("namespaces", *[Fault.UNAVAILABLE] * 20)
        await asyncio.sleep(4)
        commit.set()
        with pytest.raises(OutcomeUnknown):
            await creating

    on_one_shard(scenario)


@pytest.mark.parametrize("kind", ["create", "update", "fireNow", "replay"])
def test_a_forwarded_write_is_not_carried_out_in_a_deleted_namespace(kind: str) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 500 if kind == "replay" else 60_000)
        await asyncio.sleep(2)
        before = (await store.get_many([(0, KEY)]))[0]
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)  # by another instance
        await asyncio.sleep(2)
        command = {
            "create": CreateCommand(TimerSpec(namespace="shop", timer_id="a", delay_ms=1, callback_url=URL)),
            "update": UpdateCommand(KEY, TimerPatch(payload="1")),
            "fireNow": FireNowCommand(KEY),
            "replay": ReplayCommand(KEY),
        }[kind]
        commits = store.calls["commit"]
        with pytest.raises(NotFound) as caught:
            await world.service.forwarded.receive(Forward("1", 0, world.engine.shards[0].fence.version, command))  # type: ignore[arg-type]
        assert caught.value.code == "namespace_not_found"
        assert (await store.get_many([(0, KEY)]))[0] == before
        assert store.calls["commit"] == commits, "not even for a moment, in which it might fire"

    on_one_shard(scenario)


@pytest.mark.parametrize("kind", ["create", "replay"])
def test_a_forwarded_write_whose_commit_outlasts_the_deletion_is_not_acknowledged(kind: str) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        if kind == "replay":
            await create(world, 500)
        await asyncio.sleep(2)
        command = {
            "create": CreateCommand(TimerSpec(namespace="shop", timer_id="a", delay_ms=90_000, callback_url=URL)),
            "replay": ReplayCommand(KEY),
        }[kind]
        commit = store.hold("commit")
        answer = world.service.forwarded.receive(Forward("1", 0, world.engine.shards[0].fence.version, command))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)
        await asyncio.sleep(5)
        commit.set()
        with pytest.raises(NotFound):
            await answer
        await asyncio.sleep(1)
        assert (await store.get_many([(0, KEY)]))[0].timer is None

    on_one_shard(scenario)


@pytest.mark.parametrize("kind", ["create", "update", "fireNow"])
def test_a_write_over_a_timer_that_was_there_before_never_removes_it(kind: str) -> None:
    """The deletion finds the timer and is undone: a refused write must not remove an acknowledged timer."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world, 60_000)
        command = {
            "create": CreateCommand(TimerSpec(namespace="shop", timer_id="a", delay_ms=90_000, callback_url=URL)),
            "update": UpdateCommand(KEY, TimerPatch(payload="1")),
            "fireNow": FireNowCommand(KEY),
        }[kind]
        commit = store.hold("commit")
        answer = world.service.forwarded.receive(Forward("1", 0, world.engine.shards[0].fence.version, command))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)
        await asyncio.sleep(5)
        commit.set()
        with pytest.raises(OutcomeUnknown):
            await answer
        found = (await store.get_many([(0, KEY)]))[0]
        assert found.timer is not None or found.reached is not None

    on_one_shard(scenario)


# --- while a namespace is being deleted ----------------------------------------------------------


def test_while_a_namespace_is_being_deleted_its_timers_can_be_read_and_cancelled_and_creates_are_refused() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await create(world)
        await create(world, 60_000, "b")
        await store.put_namespace(replace(shop, deleting=True, revision=1), 0)  # by another instance
        await asyncio.sleep(2)
        assert (await world.service.get(KEY)).state is State.SCHEDULED
        assert (await world.service.update(KEY, TimerPatch(payload="1"))).verdict is Verdict.UPDATED
        assert await world.service.delete(KEY) is Verdict.CANCELLED
        for refused in (create(world, 1_000, "c"), world.service.replay(KEY)):
            with pytest.raises(Unserved, match="about to be deleted") as caught:
                await refused
            assert (caught.value.code, caught.value.status) == ("not_applied", 503)
        assert (await store.get_many([(0, TimerKey("shop", "c"))]))[0].timer is None
        await asyncio.sleep(70)
        assert world.destinations.called() == ["b"], "what is in it fires"

    on_one_shard(scenario)


def test_a_deletion_that_is_refused_leaves_the_namespace_as_it_was() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        listing = store.hold("list_timers")
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        await asyncio.sleep(0.1)
        await create(world)
        listing.set()
        with pytest.raises(Conflict):
            await deleting
        after = await world.service.namespaces.get("shop")
        assert (after.deleting, after.deleted) == (False, False)
        await create(world, 60_000, "b")

    on_one_shard(scenario)


def test_no_create_is_accepted_from_the_moment_a_deletion_has_searched_for_timers() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        for _ in range(3):
            await asyncio.sleep(1)
            with pytest.raises(Unserved):
                await create(world)
        await deleting
        assert replace(shop, deleted=True, revision=2) in await store.namespaces()
        with pytest.raises(NotFound):
            await create(world)

    on_one_shard(scenario)


def test_a_deletion_mark_that_cannot_be_removed_does_not_change_the_answer() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        marking = store.hold("put_namespace")  # the first search for timers has found nothing
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        await asyncio.sleep(0.1)
        await create(world)
        marking.set()
        await asyncio.sleep(1)
        store.fail("put_namespace", Fault.UNAVAILABLE)
        with pytest.raises(Conflict) as caught:
            await deleting
        assert caught.value.code == "namespace_in_use"

    on_one_shard(scenario)


def test_a_deletion_that_cannot_search_for_timers_fails_and_deletes_nothing() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        await asyncio.sleep(0.1)
        store.fail("list_timers", Fault.UNAVAILABLE)
        with pytest.raises(StoreUnavailable):
            await deleting
        await create(world)

    on_one_shard(scenario)


def test_the_deletion_mark_of_a_crashed_instance_is_removed_after_a_while() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        marked = replace(shop, deleting=True, revision=1)
        await store.put_namespace(marked, 0)
        await asyncio.sleep(2)
        for _ in range(3):
            with pytest.raises(Unserved):
                await create(world)
            await asyncio.sleep(9)
        await asyncio.sleep(9)
        assert (await create(world)).view.state is State.SCHEDULED
        assert not await store.put_namespace(replace(marked, deleted=True, revision=2), 1), "it has come too late"
        assert world.engine.namespaces.known("shop") == replace(shop, revision=2)

    on_one_shard(scenario)


def test_a_deletion_mark_that_was_removed_is_noticed_by_the_next_create() -> None:
    """Not only with the next sweep, a second later."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await store.put_namespace(replace(shop, deleting=True, revision=1), 0)
        await asyncio.sleep(2)
        assert (known := world.engine.namespaces.known("shop")) is not None
        assert known.deleting
        await store.put_namespace(replace(shop, revision=2), 1)
        assert (await create(world)).view.state is State.SCHEDULED

    on_one_shard(scenario)


def test_a_create_in_a_namespace_that_is_known_reads_nothing() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        before = store.calls["namespaces"]
        for number in range(20):
            await world.service.create(
                TimerSpec(namespace="shop", timer_id=f"t{number}", delay_ms=60_000, if_absent=True)
            )
        assert store.calls["namespaces"] == before

    on_one_shard(scenario)


def test_a_create_that_is_committed_after_the_deletion_mark_is_removed_again_and_may_be_retried() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        commit = store.hold("commit")
        creating = asyncio.ensure_future(create(world))
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleting=True, revision=1), 0)
        await asyncio.sleep(5)
        commit.set()
        with pytest.raises(Unserved):
            await creating
        assert (await store.get_many([(0, KEY)]))[0].timer is None

    on_one_shard(scenario)


# --- reads and writes of the namespaces ----------------------------------------------------------


def test_a_read_that_began_before_a_write_does_not_undo_it() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        rows: list[Namespace] = await store.namespaces()
        gate = asyncio.Event()
        right = store._store.namespaces

        async def late() -> list[Namespace]:
            await gate.wait()
            return rows  # as of before the write

        store._store.namespaces = late  # type: ignore[method-assign]
        reading = asyncio.ensure_future(world.engine.namespaces.refresh())
        await asyncio.sleep(0)
        changed = await world.service.namespaces.update(NamespaceSpec(name="shop", callback_url="http://new.test/"))
        made = await world.engine.namespaces._put(Namespace(name="other", num_shards=1, created_at_ms=0), None)
        gate.set()
        await reading
        assert world.engine.namespaces.known("shop") == changed
        assert world.engine.namespaces.known("other") == made
        store._store.namespaces = right  # type: ignore[method-assign]
        await world.engine.namespaces.refresh()
        assert world.engine.namespaces.known("shop") == changed

    on_one_shard(scenario, ExclusiveStore)


def test_of_two_reads_the_one_that_began_later_counts() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        old, new = [shop], [replace(shop, revision=1, callback_url="http://new.test/")]
        gate = asyncio.Event()
        answers = [old, new]

        async def namespaces() -> list[Namespace]:
            rows = answers.pop(0)
            if rows is old:
                await gate.wait()
            return rows

        store._store.namespaces = namespaces  # type: ignore[method-assign]
        first = asyncio.ensure_future(world.engine.namespaces.refresh())
        await asyncio.sleep(0)
        await world.engine.namespaces.refresh()
        gate.set()
        await first
        assert world.engine.namespaces.known("shop") == new[0]
        store._store.namespaces = MemoryStore.namespaces.__get__(store._store)  # type: ignore[method-assign]

    on_one_shard(scenario, ExclusiveStore)


def test_a_namespace_with_a_row_that_cannot_be_decoded_is_not_empty() -> None:
    async def scenario(world: World) -> None:
        await make_shop(world)
        await create(world)
        assert isinstance(world.store, MemoryStore)
        world.store.spoil_timer(shard_of("a", 1), KEY)
        with pytest.raises(DuetimeError) as caught:
            await world.service.namespaces.delete("shop")
        assert caught.value.code == "namespace_in_use"

    in_world(scenario, namespaces__default_num_shards=1)


def test_of_timers_held_for_their_namespace_as_many_are_parked_as_asked_for_and_none_that_was_deleted() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await make_shop(world)
        for name in ("a", "b", "c", "d"):
            await create(world, 1_000, name)
        shop = world.engine.namespaces._by_name.pop("shop")
        reading = store.hold("namespaces")
        await asyncio.sleep(0.9)
        world.engine._running.add("_read_namespaces")  # as if it were being read all the time
        await asyncio.sleep(1)
        fire_loop = world.engine.fire_loop
        assert fire_loop.waiting == 4
        world.engine.namespaces._by_name["shop"] = shop
        await world.service.delete(TimerKey("shop", "d"))
        assert fire_loop.park(2) == 2
        assert fire_loop.waiting == 1
        assert world.engine.telemetry.parked.value == 2
        world.engine._running.clear()
        reading.set()
        await asyncio.sleep(5)
        assert world.destinations.called() == ["a"]
        await asyncio.sleep(90)
        assert sorted(world.destinations.called()) == ["a", "b", "c"]

    on_one_shard(scenario)


def test_creates_that_remove_the_mark_of_a_crashed_instance_at_the_same_time_all_succeed() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await store.put_namespace(replace(shop, deleting=True, revision=1), 0)
        await asyncio.sleep(2)
        with pytest.raises(Unserved):
            await create(world)
        await asyncio.sleep(40)
        putting = store.hold("put_namespace")
        creating = [asyncio.ensure_future(create(world, 60_000, f"t{n}")) for n in range(3)]
        await asyncio.sleep(0.5)
        putting.set()
        answers = [await each for each in creating]
        assert [answer.replaced for answer in answers] == [False] * 3
        assert world.engine.namespaces.known("shop") == replace(shop, revision=2)

    on_one_shard(scenario)


@pytest.mark.parametrize("fault", [Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_a_create_is_not_applied_if_it_is_unknown_whether_the_mark_was_removed(fault: Fault) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await make_shop(world)
        await store.put_namespace(replace(shop, deleting=True, revision=1), 0)
        await asyncio.sleep(2)
        with pytest.raises(Unserved):
            await create(world)
        await asyncio.sleep(40)
        store.fail("put_namespace", fault)
        with pytest.raises(StoreUnavailable):
            await create(world)
        assert (await store.get_many([(0, KEY)]))[0].timer is None
        assert (await create(world)).replaced is False

    on_one_shard(scenario)


def test_a_namespace_read_long_ago_is_read_again_before_a_create_is_accepted() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        await b.service.namespaces.get("n")
        stuck = FaultyStore(b.store)
        b.engine.namespaces._store = stuck.as_store
        released = stuck.hold("namespaces")
        await a.service.namespaces.delete("n")
        spec = TimerSpec(namespace="n", timer_id=owned_by(b), delay_ms=1_000, callback_url=URL)
        creating = asyncio.ensure_future(b.service.create(spec))
        await asyncio.sleep(1)
        assert not creating.done(), "it may have been deleted: not on a reading of long ago"
        released.set()
        with pytest.raises(DuetimeError, match="There is no namespace"):
            await creating

    of_two(scenario)
