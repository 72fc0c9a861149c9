"""Namespaces: create, update, delete, creation on first use, and how long a read of them stays valid."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from engine_world import URL, World, in_world, on_faulty
from msgspec.structs import replace
from two_instances import Wires, of_two

from duetime.domain.timer import (
    SHARDS_MAX,
    Namespace,
    NamespaceSpec,
    State,
    TimerKey,
    TimerSpec,
)
from duetime.engine.namespaces import FRESH_FOR_MS, Namespaces
from duetime.errors import (
    Conflict,
    InvalidField,
    NotFound,
    SetupError,
    StoreUnavailable,
)
from duetime.store import (
    Listing,
    ListQuery,
    Store,
)
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore
from duetime.testing.virtual import VirtualClock, run_virtual

A = TimerKey("default", "a")
HOUR_MS = 3_600_000
SHOP = TimerKey("shop", "a")


async def _make_shop(world: World) -> Any:
    return await world.service.namespaces.create(NamespaceSpec(name="shop", num_shards=1, callback_url=URL))


@pytest.mark.parametrize("num_shards", [0, -1, SHARDS_MAX + 1])
def test_a_namespace_has_at_least_one_shard_and_not_too_many(num_shards: int) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField, match="numShards must be between") as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=num_shards))
        assert caught.value.field == "numShards"
        with pytest.raises(NotFound):
            await world.service.namespaces.get("n")

    in_world(scenario)


@pytest.mark.parametrize("num_shards", [1, SHARDS_MAX])
def test_the_least_and_the_most_shards_are_allowed(num_shards: int) -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        namespaces = Namespaces(store, clock)
        made = await namespaces.create(_namespace("n", num_shards))
        assert made.num_shards == num_shards
        assert len(await store.shards()) == num_shards
        await namespaces.create(_namespace("small", 1))
        assert namespaces.shards_needed() == num_shards

    run_virtual(run)


def _namespace(name: str, num_shards: int = 1) -> Any:
    return Namespace(name=name, num_shards=num_shards, created_at_ms=0)


def test_a_namespace_that_exists_is_not_made_again() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="n", callback_url=URL))
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n"))
        assert caught.value.code == "namespace_exists"
        assert (await world.service.namespaces.get("n")).callback_url == URL

    in_world(scenario)


def test_a_namespace_made_by_another_instance_a_moment_ago_is_seen_before_one_is_made() -> None:
    async def scenario(world: World) -> None:
        await world.store.put_namespace(_namespace("n"), None)
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n"))
        assert caught.value.code == "namespace_exists"
        assert (await world.service.namespaces.get("n")).num_shards == 1

    in_world(scenario)


def test_a_deleted_name_is_made_anew_with_as_many_shards_only_and_a_higher_revision() -> None:
    async def scenario(world: World) -> None:
        first = await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=4))
        assert first.revision == 0
        await world.service.namespaces.delete("n")
        assert {namespace.name for namespace in await world.service.namespaces.list_all()} == {"default"}
        with pytest.raises(Conflict, match="was deleted that had 4 shards") as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=5))
        assert (caught.value.field, caught.value.code) == ("numShards", "num_shards_immutable")
        again = await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=4))
        assert (again.revision, again.deleted, again.deleting) == (3, False, False)
        assert (await world.service.namespaces.get("n")) == again

    in_world(scenario)


def test_of_two_concurrent_updates_of_a_namespace_one_gets_a_conflict() -> None:
    async def scenario(world: World) -> None:
        old = await world.service.namespaces.create(NamespaceSpec(name="n"))
        theirs = replace(old, callback_url="http://theirs.test/", revision=1)
        assert await world.store.put_namespace(theirs, 0)
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.update(NamespaceSpec(name="n", callback_url=URL))
        assert caught.value.code == "namespace_changed"
        assert world.engine.namespaces.known("n") == theirs
        updated = await world.service.namespaces.update(NamespaceSpec(name="n", callback_url=URL))
        assert (updated.callback_url, updated.revision) == (URL, 2)

    in_world(scenario)


def test_an_update_of_a_namespace_that_is_being_deleted_wins_and_its_creates_are_accepted_again() -> None:
    async def scenario(world: World) -> None:
        await _make_shop(world)
        deleting = asyncio.ensure_future(world.service.namespaces.delete("shop"))
        await asyncio.sleep(0.1)
        assert (await world.service.namespaces.get("shop")).deleting
        updated = await world.service.namespaces.update(NamespaceSpec(name="shop", callback_url="http://new.test/"))
        assert (updated.deleting, updated.deleted) == (False, False)
        created = await world.service.create(TimerSpec(namespace="shop", timer_id="a", delay_ms=HOUR_MS))
        assert created.view.timer.callback_url == "http://new.test/"
        with pytest.raises(Conflict):
            await deleting
        assert await world.service.namespaces.get("shop") == updated
        assert (await world.service.get(SHOP)).state is State.SCHEDULED

    in_world(scenario)


def test_the_number_of_shards_of_a_namespace_never_changes() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=4))
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.update(NamespaceSpec(name="n", num_shards=5))
        assert (caught.value.field, caught.value.code) == ("numShards", "num_shards_immutable")
        updated = await world.service.namespaces.update(NamespaceSpec(name="n", num_shards=4, payload_bytes_max=5))
        assert (updated.num_shards, updated.payload_bytes_max) == (4, 5)

    in_world(scenario)


def test_the_default_namespace_stays() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.delete("default")
        assert caught.value.code == "namespace_in_use"
        assert (await world.service.namespaces.get("default")).name == "default"

    in_world(scenario)


@pytest.mark.parametrize("name", ["", "a\0b", "é" * 128])
def test_a_name_that_no_namespace_can_have_is_refused(name: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField) as caught:
            await world.service.namespaces.create(NamespaceSpec(name=name))
        assert caught.value.field == "namespace"

    in_world(scenario)


def test_a_namespace_with_a_forbidden_url_or_secret_is_refused() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField) as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n", callback_url="ftp://x"))
        assert caught.value.field == "callbackUrl"
        with pytest.raises(InvalidField) as caught:
            await world.service.namespaces.create(NamespaceSpec(name="n", signing_secrets=("whsec_…none",)))
        assert caught.value.field == "signingSecrets"

    in_world(scenario)


def test_a_namespace_in_use_is_not_deleted_and_an_empty_one_is() -> None:
    async def scenario(world: World) -> None:
        await _make_shop(world)
        await world.service.create(TimerSpec(namespace="shop", timer_id="a", delay_ms=HOUR_MS))
        with pytest.raises(Conflict) as caught:
            await world.service.namespaces.delete("shop")
        assert (caught.value.field, caught.value.code) == ("namespace", "namespace_in_use")
        assert (await world.service.get(SHOP)).state is State.SCHEDULED
        await world.service.delete(SHOP)
        began_ms = world.clock.boot_ms()
        await world.service.namespaces.delete("shop")
        assert world.clock.boot_ms() - began_ms > FRESH_FOR_MS, "until every instance has seen it"
        with pytest.raises(NotFound):
            await world.service.namespaces.get("shop")

    in_world(scenario)


def test_a_store_made_with_another_number_of_shards_refuses_the_start() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        first = World(clock, store, namespaces__default_num_shards=4)
        await first.service.namespaces.create_default()
        await first.service.namespaces.create_default()
        with pytest.raises(SetupError, match="default_num_shards is 5, but the store was created with 4"):
            await World(clock, store, namespaces__default_num_shards=5).service.namespaces.create_default()

    run_virtual(run)


def test_the_shards_of_a_new_namespace_are_claimed_before_it_is_answered() -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=20))
        assert len(world.engine.shards) == 20
        assert world.service.readiness() is None
        world.engine.stopping = True
        assert world.service.readiness() == "stopping"
        world.engine.stopping = False

    in_world(scenario)


def test_a_namespace_is_there_also_if_its_shards_cannot_be_claimed_yet() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("claim", Fault.UNAVAILABLE)
        made = await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=20))
        assert made.num_shards == 20
        await asyncio.sleep(3)
        assert len(world.engine.shards) == 20

    on_faulty(scenario)


def test_what_is_made_on_first_use_by_two_at_once_is_made_once() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        spec = TimerSpec(namespace="new", timer_id="a", delay_ms=HOUR_MS, callback_url=URL)
        results = await asyncio.gather(*(world.service.create(replace(spec, timer_id=f"t{n}")) for n in range(5)))
        assert len(results) == 5
        assert len(await store.namespaces()) == 2

    on_faulty(scenario, namespaces__create_on_first_use=True)


def test_who_is_not_the_first_to_make_a_namespace_on_first_use_uses_it() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        putting = store.hold("put_namespace")
        spec = TimerSpec(namespace="new", timer_id="a", delay_ms=HOUR_MS, callback_url=URL)
        creating = [asyncio.ensure_future(world.service.create(replace(spec, timer_id=f"t{n}"))) for n in range(3)]
        await asyncio.sleep(1)
        assert store.calls["put_namespace"] == 4, "and one at the start"
        putting.set()
        assert [(await each).view.state for each in creating] == [State.SCHEDULED] * 3

    on_faulty(scenario, namespaces__create_on_first_use=True)


@pytest.mark.parametrize("fault", [Fault.LOST_THEN_UNKNOWN, Fault.APPLIED_THEN_UNKNOWN])
def test_a_timer_is_not_applied_if_the_outcome_of_making_its_namespace_is_unknown(fault: Fault) -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("put_namespace", fault)
        spec = TimerSpec(namespace="new", timer_id="a", delay_ms=HOUR_MS, callback_url=URL)
        with pytest.raises(StoreUnavailable, match="injected"):
            await world.service.create(spec)
        assert (await world.service.create(spec)).replaced is False

    on_faulty(scenario, namespaces__create_on_first_use=True)


def test_a_name_may_have_255_bytes() -> None:
    async def scenario(world: World) -> None:
        assert (await world.service.namespaces.create(NamespaceSpec(name="n" * 255))).name == "n" * 255

    in_world(scenario)


def test_on_an_exclusive_store_a_namespace_is_deleted_at_once() -> None:
    async def scenario(world: World) -> None:
        await _make_shop(world)
        began_ms = world.clock.boot_ms()
        await world.service.namespaces.delete("shop")
        assert world.clock.boot_ms() == began_ms

    in_world(scenario, new_store=ExclusiveStore)


def test_a_namespace_whose_deletion_failed_has_a_new_revision() -> None:
    """Whoever has read it in between must not be able to overwrite it."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await _make_shop(world)
        await world.service.create(TimerSpec(namespace="shop", timer_id="a", delay_ms=HOUR_MS))
        looks = 0
        real = store._store.list_timers

        async def empty_at_first(query: ListQuery) -> Listing:
            nonlocal looks
            looks += 1
            return Listing() if looks == 1 else await real(query)

        store._store.list_timers = empty_at_first  # type: ignore[method-assign]
        with pytest.raises(Conflict):
            await world.service.namespaces.delete("shop")
        back = await world.service.namespaces.get("shop")
        assert (back.revision, back.deleted) == (shop.revision + 2, False)

    on_faulty(scenario)


# --- the cache of namespaces ---------------------------------------------------------------------


class ExclusiveStore(MemoryStore):
    capabilities = replace(MemoryStore.capabilities, exclusive=True)


def test_a_reading_of_namespaces_is_good_for_writes_for_three_seconds_from_its_beginning() -> None:
    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(MemoryStore(clock))
        namespaces = Namespaces(store.as_store, clock)
        assert namespaces.usable("n") is None
        assert namespaces.shards_needed() == 0
        made = await namespaces.create(_namespace("n", 3))
        reading = store.hold("namespaces")
        refreshing = asyncio.ensure_future(namespaces.refresh())
        await asyncio.sleep(1)
        reading.set()
        await refreshing
        assert namespaces.usable("n") == made
        await asyncio.sleep(2)
        assert namespaces.usable("n") == made
        await asyncio.sleep(0.001)
        assert namespaces.usable("n") is None
        assert namespaces.known("n") == made
        reads = store.calls["namespaces"]
        assert await namespaces.get("n") == made
        assert await namespaces.get("n") == made
        assert store.calls["namespaces"] == reads + 1
        assert namespaces.usable("n") == made

    run_virtual(run)


def test_on_an_exclusive_store_a_read_never_becomes_stale() -> None:
    async def run(clock: VirtualClock) -> None:
        store = FaultyStore(ExclusiveStore(clock))
        namespaces = Namespaces(store.as_store, clock)
        made = await namespaces.create(_namespace("n"))
        reads = store.calls["namespaces"]
        await asyncio.sleep(3_600)
        assert namespaces.usable("n") == await namespaces.get("n") == made
        assert store.calls["namespaces"] == reads

    run_virtual(run)


def test_an_unknown_or_deleted_name_is_read_again_from_the_store() -> None:
    async def run(clock: VirtualClock) -> None:
        store = MemoryStore(clock)
        namespaces = Namespaces(store, clock)
        await namespaces.refresh()
        with pytest.raises(NotFound) as caught:
            await namespaces.get("n")
        assert (caught.value.field, caught.value.code) == ("namespace", "namespace_not_found")
        made = _namespace("n")
        await store.put_namespace(made, None)
        assert namespaces.known("n") is None
        assert await namespaces.get("n") == made
        await store.put_namespace(replace(made, deleted=True, revision=1), 0)
        assert [one.name for one in await namespaces.all()] == []
        assert namespaces.usable("n") is None
        known = namespaces.known("n")
        assert known is not None
        assert known.deleted
        with pytest.raises(NotFound):
            await namespaces.get("n")
        await store.put_namespace(replace(made, revision=2), 1)
        assert (await namespaces.get("n")).revision == 2

    run_virtual(run)


def test_a_deletion_whose_last_search_fails_deletes_nothing_and_fails() -> None:
    async def scenario(a: World, b: World, wires: Wires) -> None:
        await a.service.namespaces.create(NamespaceSpec(name="n", num_shards=16))
        looks = 0

        async def list_timers(query: Any, real: Any = a.store.list_timers) -> Any:
            nonlocal looks
            looks += 1
            if looks > 1:
                raise StoreUnavailable("a blip")
            return await real(query)

        a.service.namespaces._store = _With(a.store, list_timers)
        with pytest.raises(StoreUnavailable):
            await a.service.namespaces.delete("n")
        after = await a.service.namespaces.get("n")
        assert (after.deleted, after.deleting) == (False, False)

    of_two(scenario)


class _With:
    def __init__(self, store: Store, list_timers: Any) -> None:
        self._store = store
        self.list_timers = list_timers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
