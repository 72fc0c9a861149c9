"""What the API asks for: commands for timers, lists page by page, and results of batches in order."""

from __future__ import annotations

import asyncio
import base64
from datetime import date, timedelta
from typing import Any

import pytest
from engine_world import OK, URL, World, in_world, on_faulty
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import (
    Created,
    Missed,
    NamespaceSpec,
    Outcome,
    State,
    TimerFilter,
    TimerKey,
    TimerPatch,
    TimerSpec,
    TimerView,
    Verdict,
    shard_of,
)
from duetime.domain.wall_clock import Schedule
from duetime.engine.shard import Shard
from duetime.errors import (
    Conflict,
    DuetimeError,
    InvalidField,
    NotFound,
    OutcomeUnknown,
    SetupError,
    StoreUnavailable,
    UnreadableTimer,
)
from duetime.store import (
    Capabilities,
    Claim,
    Found,
    GuardedStore,
    Listing,
    ListQuery,
    Member,
    ShardRow,
    guarded,
    open_store,
)
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import Fault, FaultyStore

A = TimerKey("default", "a")
HOUR_MS = 3_600_000


def hanging(world: World) -> asyncio.Event:
    """Deliveries stay in flight until the event is set."""
    answered = asyncio.Event()

    async def hangs(attempt: Attempt) -> AttemptResult:
        await answered.wait()
        return OK

    world.destinations.answers[URL] = hangs
    return answered


# --- commands for timers -------------------------------------------------------------------------


def test_what_never_was_is_not_found_by_any_verb() -> None:
    async def scenario(world: World) -> None:
        for ask in (
            lambda: world.service.get(A),
            lambda: world.service.update(A, TimerPatch(payload="1")),
            lambda: world.service.delete(A),
            lambda: world.service.fire_now(A),
            lambda: world.service.replay(A),
        ):
            with pytest.raises(NotFound, match="There is no timer 'a' in namespace 'default'") as caught:
                await ask()
            assert (caught.value.field, caught.value.code) == ("timerId", "timer_not_found")

    in_world(scenario)


def test_what_is_over_cannot_be_changed_and_a_delete_says_that_it_is_over() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", 100)
        await asyncio.sleep(1)
        for ask in (lambda: world.service.update(A, TimerPatch(payload="1")), lambda: world.service.fire_now(A)):
            with pytest.raises(Conflict, match="Timer 'a' is already reached: delivered") as caught:
                await ask()
            assert (caught.value.field, caught.value.code) == ("timerId", "already_reached")
        assert await world.service.delete(A) is Verdict.ALREADY_REACHED
        assert (await world.get("a")).state is State.DELIVERED

    in_world(scenario)


def test_a_scheduled_timer_cannot_be_replayed() -> None:
    async def scenario(world: World) -> None:
        created = await world.create("a", HOUR_MS)
        with pytest.raises(Conflict, match="is scheduled, not reached") as caught:
            await world.service.replay(A)
        assert (caught.value.field, caught.value.code) == ("timerId", "timer_scheduled")
        assert (await world.get("a")).timer == created.view.timer

    in_world(scenario)


def test_a_replay_arms_a_reached_timer_as_a_new_one_that_is_due_at_once() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", 100)
        await asyncio.sleep(1)
        before = (await world.get("a")).timer
        now_ms = world.clock.wall_ms()
        view = await world.service.replay(A)
        assert view.state is State.SCHEDULED
        assert (view.timer.execute_at_ms, view.timer.scheduled_at_ms, view.timer.attempts) == (now_ms, now_ms, 0)
        assert view.timer.generation > before.generation
        await asyncio.sleep(1)
        assert [(name, attempt) for _, name, attempt in world.destinations.calls] == [("a", 1), ("a", 1)]

    in_world(scenario)


def test_fire_now_makes_a_timer_due_at_once_and_answers_with_it() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", 90_000)
        view = await world.service.fire_now(A)
        assert (view.state, view.timer.execute_at_ms) == (State.SCHEDULED, world.clock.wall_ms())
        await asyncio.sleep(1)
        assert world.destinations.called() == ["a"]
        await asyncio.sleep(120)
        assert world.destinations.called() == ["a"]

    in_world(scenario)


def test_fire_now_of_a_timer_in_flight_leaves_it_to_its_delivery() -> None:
    async def scenario(world: World) -> None:
        answered = hanging(world)
        created = await world.create("a", 100)
        await asyncio.sleep(1)
        view = await world.service.fire_now(A)
        assert (view.state, view.timer) == (State.IN_FLIGHT, created.view.timer)
        answered.set()
        await asyncio.sleep(10)
        assert world.destinations.called() == ["a"], "delivered twice"

    in_world(scenario)


def test_a_timer_in_flight_is_shown_so_and_an_update_of_it_says_so() -> None:
    async def scenario(world: World) -> None:
        answered = hanging(world)
        await world.create("a", 100)
        assert (await world.get("a")).state is State.SCHEDULED
        await asyncio.sleep(1)
        assert (await world.get("a")).state is State.IN_FLIGHT
        views, _ = await world.service.list_timers(TimerFilter(namespace="default", state=State.IN_FLIGHT))
        assert [view.state for view in views] == [State.IN_FLIGHT]
        views, _ = await world.service.list_timers(TimerFilter(namespace="default", state=State.SCHEDULED))
        assert views == []
        updated = await world.service.update(A, TimerPatch(delay_ms=5_000))
        assert updated.verdict is Verdict.IN_FLIGHT
        answered.set()
        await asyncio.sleep(10)
        assert world.destinations.called() == ["a", "a"], "the old one, and the new one at its time"

    in_world(scenario)


def test_a_delete_in_flight_records_the_attempt_that_was_made() -> None:
    async def scenario(world: World) -> None:
        answered = hanging(world)
        await world.create("a", 100)
        await world.create("b", HOUR_MS)
        await asyncio.sleep(1)
        assert await world.service.delete(A) is Verdict.IN_FLIGHT
        assert await world.service.delete(TimerKey("default", "b")) is Verdict.CANCELLED
        in_flight, waiting = (await world.get("a")).reached, (await world.get("b")).reached
        assert in_flight is not None
        assert waiting is not None
        assert (in_flight.outcome, waiting.outcome) == (Outcome.CANCELLED, Outcome.CANCELLED)
        assert (in_flight.timer.attempts, waiting.timer.attempts) == (1, 0)
        answered.set()
        await asyncio.sleep(10)
        assert world.destinations.called() == ["a"]
        assert (await world.get("a")).state is State.CANCELLED

    in_world(scenario)


def test_a_delete_while_the_first_of_two_writes_is_in_flight_finds_the_timer_as_it_was_updated() -> None:
    """The delivery in flight is of an older generation: it counts for that one only."""

    async def scenario(world: World) -> None:
        answered = hanging(world)
        await world.create("a", 100)
        await asyncio.sleep(1)
        await world.service.update(A, TimerPatch(delay_ms=20_000))
        assert await world.service.delete(A) is Verdict.IN_FLIGHT
        reached = (await world.get("a")).reached
        assert reached is not None
        assert reached.timer.attempts == 0
        answered.set()
        await asyncio.sleep(120)
        assert world.destinations.called() == ["a"]

    in_world(scenario)


def test_a_create_after_one_that_waits_is_carried_out_after_it() -> None:
    """An update is reading the timer in order to write it: a create must not come between."""

    async def scenario(world: World, store: FaultyStore) -> None:
        await world.create("a", HOUR_MS)
        reading = store.hold("get_many")
        updating = asyncio.ensure_future(world.service.update(A, TimerPatch(payload="1")))
        await asyncio.sleep(0.1)
        creating = asyncio.ensure_future(world.create("a", HOUR_MS, payload="2"))
        await asyncio.sleep(0.1)
        assert not creating.done()
        reading.set()
        await updating
        assert (await creating).replaced is True
        assert (await world.get("a")).timer.payload == "2"

    on_faulty(scenario)


def test_a_create_without_if_absent_replaces_a_different_timer() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", HOUR_MS, payload="1")
        assert (
            await world.service._commands.create(
                world.engine.shards[shard_of("a", 16)],
                TimerSpec(namespace="default", timer_id="a", delay_ms=HOUR_MS, callback_url=URL, payload="2"),
            )
        ).replaced is True
        assert (await world.get("a")).timer.payload == "2"

    in_world(scenario)


def test_creates_updates_and_deletes_are_counted() -> None:
    async def scenario(world: World) -> None:
        telemetry = world.engine.telemetry
        await world.create("a", HOUR_MS)
        await world.create("b", HOUR_MS, if_absent=True)
        await world.create("b", HOUR_MS, if_absent=True)
        await world.service.update(A, TimerPatch(payload="1"))
        await world.service.delete(A)
        assert (telemetry.created.value, telemetry.updated.value, telemetry.deleted.value) == (2, 1, 1)
        assert telemetry.outcomes.by_label == {"cancelled": 1}

    in_world(scenario)


def test_what_is_empty_is_stored_as_absent_and_a_missed_fire_policy_alone_is_kept() -> None:
    async def scenario(world: World) -> None:
        plain = await world.create("a", HOUR_MS, headers={})
        assert plain.view.timer.extras.headers is None
        tagged = await world.create("a", HOUR_MS, headers={}, tags=("red",))
        assert (tagged.view.timer.extras.headers, tagged.view.timer.extras.tags) == (None, ("red",))
        missed = Missed(skip_if_late_by_ms=5)
        kept = await world.create("b", HOUR_MS, missed=missed)
        assert kept.view.timer.extras.missed == missed
        updated = await world.service.update(TimerKey("default", "b"), TimerPatch(headers={}))
        assert updated.view.timer.extras.headers is None
        assert updated.view.timer.extras.missed == missed

    in_world(scenario)


def test_a_timer_that_cannot_be_decoded_is_not_replayed_over() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", 100)
        await asyncio.sleep(1)
        await world.create("a", HOUR_MS)
        assert isinstance(world.store, MemoryStore)
        world.store.spoil_timer(shard_of("a", 16), A)
        with pytest.raises(UnreadableTimer):
            await world.service.replay(A)

    in_world(scenario)


# --- a namespace that is deleted during a create -------------------------------------------------


async def _make_shop(world: World) -> Any:
    return await world.service.namespaces.create(NamespaceSpec(name="shop", num_shards=1, callback_url=URL))


SHOP = TimerKey("shop", "a")


def test_a_create_that_is_removed_again_leaves_a_later_write_in_place() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await _make_shop(world)
        shard = world.engine.shards[0]
        spec = TimerSpec(namespace="shop", timer_id="a", delay_ms=HOUR_MS)
        first = (await world.service.create(spec)).view.timer
        second = (await world.service.create(replace(spec, payload="2"))).view.timer
        with pytest.raises(OutcomeUnknown):
            await world.service._commands._remove(shard, first)
        assert (await store.get_many([(0, SHOP)]))[0].timer == second
        await world.service._commands._remove(shard, second)
        assert (await store.get_many([(0, SHOP)]))[0].timer is None
        commits = store.calls["commit"]
        with pytest.raises(OutcomeUnknown):  # it is over: it may have fired
            await world.service._commands._remove(shard, second)
        assert store.calls["commit"] == commits, "there is nothing to remove"

    on_faulty(scenario, namespaces__default_num_shards=1)


def test_the_outcome_of_a_create_that_cannot_be_removed_again_is_unknown() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await _make_shop(world)
        commit = store.hold("commit")
        spec = TimerSpec(namespace="shop", timer_id="a", delay_ms=HOUR_MS)
        creating = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)
        await asyncio.sleep(4)
        shard = world.engine.shards[0]

        async def fails(shard: Shard, key: TimerKey) -> Found:
            raise StoreUnavailable("away")

        world.service._commands._find = fails  # type: ignore[method-assign]
        commit.set()
        with pytest.raises(OutcomeUnknown, match="the timer may still be stored: away"):
            await creating
        assert not shard.dropped

    on_faulty(scenario, namespaces__default_num_shards=1)


def test_a_create_whose_delivery_has_started_is_not_answered_as_refused() -> None:
    """Its namespace was deleted before its commit could be acknowledged; by then its callback is under way."""

    async def scenario(world: World, store: FaultyStore) -> None:
        shop = await _make_shop(world)
        answered = asyncio.Event()

        async def slow(attempt: Attempt) -> AttemptResult:
            await answered.wait()
            return AttemptResult(Contact.ANSWERED, 200)

        world.destinations.answers[URL] = slow
        commit, reading = store.hold("commit"), store.hold("namespaces")
        spec = TimerSpec(namespace="shop", timer_id="a", delay_ms=10, callback_url=URL)
        creating = asyncio.ensure_future(world.service.create(spec))
        await asyncio.sleep(0.1)
        await store.put_namespace(replace(shop, deleted=True, revision=1), 0)
        await asyncio.sleep(4)
        commit.set()
        await asyncio.sleep(1)
        assert world.destinations.called() == ["a"]
        reading.set()
        with pytest.raises(OutcomeUnknown, match="the delivery of the timer has started"):
            await creating
        answered.set()

    on_faulty(scenario, namespaces__default_num_shards=1)


# --- batches -------------------------------------------------------------------------------------


def test_a_batch_answers_each_item_in_its_place() -> None:
    async def scenario(world: World) -> None:
        bad = InvalidField("x", "cannot be decoded")

        def spec(name: str, **fields: Any) -> TimerSpec:
            return TimerSpec(namespace="default", timer_id=name, delay_ms=HOUR_MS, **{"callback_url": URL, **fields})

        results = await world.service.create_many(
            [
                spec("a"),
                bad,
                spec("b", callback_url="ftp://x"),
                spec("c", if_absent=True),
                replace(spec("d"), namespace="?"),
            ]
        )
        assert [isinstance(result, Created) for result in results] == [True, False, False, True, False]
        assert results[1] is bad
        assert isinstance(results[2], InvalidField)
        assert isinstance(results[4], NotFound)
        keys: list[TimerKey | DuetimeError] = [A, bad, TimerKey("default", "?"), TimerKey("default", "c")]
        deleted = await world.service.delete_many(keys)
        assert (deleted[0], deleted[1], deleted[3]) == (Verdict.CANCELLED, bad, Verdict.CANCELLED)
        assert isinstance(deleted[2], NotFound)

    in_world(scenario)


def test_an_item_of_a_batch_whose_commit_fails_is_answered_with_its_error() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        store.fail("commit", *[Fault.UNAVAILABLE] * 1_000)
        spec = TimerSpec(namespace="default", timer_id="a", delay_ms=HOUR_MS, callback_url=URL)
        [result] = await world.service.create_many([spec])
        assert isinstance(result, StoreUnavailable)

    on_faulty(scenario)


# --- lists ---------------------------------------------------------------------------------------


async def _listed(world: World, **fields: Any) -> list[TimerView]:
    """All pages of a list."""
    found: list[TimerView] = []
    cursor: str | None = None
    for _ in range(100):
        wanted = TimerFilter(**{"namespace": "default", "cursor": cursor, **fields})
        views, cursor = await world.service.list_timers(wanted)
        found += views
        if cursor is None:
            return found
    raise AssertionError("a list without an end")


def _names(views: list[TimerView]) -> list[str]:
    return [view.timer.timer_id for view in views]


def test_a_list_has_the_scheduled_in_order_of_their_time_and_then_the_reached() -> None:
    async def scenario(world: World) -> None:
        for number in range(6):
            await world.create(f"t{number}", 100 + number if number < 3 else HOUR_MS + number)
        await asyncio.sleep(5)
        assert _names(await _listed(world, limit=2))[:3] == ["t3", "t4", "t5"]
        assert sorted(_names(await _listed(world, limit=2))) == [f"t{number}" for number in range(6)]
        assert _names(await _listed(world, state=State.SCHEDULED)) == ["t3", "t4", "t5"]
        assert sorted(_names(await _listed(world, state=State.DELIVERED))) == ["t0", "t1", "t2"]
        assert await _listed(world, state=State.FAILED) == []
        delivered = await _listed(world, state=State.DELIVERED, limit=1)
        assert {view.state for view in delivered} == {State.DELIVERED}
        assert all(view.reached is not None for view in delivered)

    in_world(scenario)


def test_a_list_can_be_narrowed() -> None:
    async def scenario(world: World) -> None:
        now_ms = world.clock.wall_ms()
        await world.create("a1", HOUR_MS, tags=("red",), correlation_id="x")
        await world.create("a2", 2 * HOUR_MS, tags=("blue",))
        await world.create("b1", 3 * HOUR_MS, tags=("red",))
        assert _names(await _listed(world, id_prefix="a")) == ["a1", "a2"]
        assert _names(await _listed(world, tag="red")) == ["a1", "b1"]
        assert _names(await _listed(world, correlation_id="x")) == ["a1"]
        assert _names(await _listed(world, due_from_ms=now_ms + 2 * HOUR_MS)) == ["a2", "b1"]
        assert _names(await _listed(world, due_until_ms=now_ms + 2 * HOUR_MS)) == ["a1"]

    in_world(scenario)


def _keys(views: list[TimerView]) -> list[str]:
    return [f"{view.timer.namespace}/{view.timer.timer_id}" for view in views]


@pytest.mark.parametrize("new_store", ["MemoryStore", "SlowLists"])
def test_a_correlation_id_is_found_in_all_namespaces_one_after_the_other_by_name(new_store: str) -> None:
    async def scenario(world: World) -> None:
        for name in ("zoo", "ape", "empty", "gone"):
            await world.service.namespaces.create(NamespaceSpec(name=name, num_shards=2))
        for name in ("zoo", "default", "ape"):
            for number, delay_ms in enumerate((2 * HOUR_MS, 100, HOUR_MS)):
                await world.create(f"t{number}", delay_ms, namespace=name, correlation_id="x")
            await world.create("other", HOUR_MS, namespace=name, correlation_id="y")
            await world.create("none", HOUR_MS, namespace=name)
        await world.create("t", 100, namespace="gone", correlation_id="x")
        await asyncio.sleep(5)
        await world.service.namespaces.delete("gone")
        whole = [f"{name}/{timer_id}" for name in ("ape", "default", "zoo") for timer_id in ("t2", "t0", "t1")]
        for limit in (1, 2, 100):
            found = await _listed(world, namespace=None, correlation_id="x", limit=limit)
            assert _keys(found) == whole
        assert [view.reached is not None for view in found[:3]] == [False, False, True]
        scheduled = await _listed(world, namespace=None, correlation_id="x", state=State.SCHEDULED, id_prefix="t2")
        assert _keys(scheduled) == ["ape/t2", "default/t2", "zoo/t2"]
        assert await _listed(world, namespace=None, correlation_id="nobody's") == []

    in_world(scenario, new_store=globals()[new_store])


class SlowLists(MemoryStore):
    """Each list takes 0.6 s, so that one request makes at most two. There is no index of correlation ids."""

    async def list_timers(self, query: ListQuery) -> Listing:
        await asyncio.sleep(0.6)
        return await super().list_timers(query)

    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        names = (namespace.name for namespace in await self.namespaces())
        return min((name for name in names if name > after), default=None)


def test_a_list_of_all_namespaces_reads_for_a_second_and_then_returns_what_it_has() -> None:
    async def scenario(world: World) -> None:
        for number in range(8):
            await world.service.namespaces.create(NamespaceSpec(name=f"n{number}", num_shards=1))
        await world.create("last", HOUR_MS, namespace="n7", correlation_id="x")
        pages: list[list[str]] = []
        cursor: str | None = None
        while not pages or cursor is not None:
            wanted = TimerFilter(namespace=None, correlation_id="x", cursor=cursor)
            views, cursor = await world.service.list_timers(wanted)
            pages.append(_keys(views))
        assert pages == [[]] * 8 + [["n7/last"], []]  # two lists for each, the scheduled and the reached
        with pytest.raises(InvalidField, match="needs a correlationId"):
            await world.service.list_timers(TimerFilter(namespace=None))

    in_world(scenario, new_store=SlowLists)


@pytest.mark.parametrize("cursor", ["!", "WzAsMSwyLDNd", "WyJuIiwxXQ", "WyJuIiwieCJd"])
def test_a_list_of_all_namespaces_refuses_a_cursor_that_is_not_its_own(cursor: str) -> None:
    async def scenario(world: World) -> None:
        await world.service.namespaces.create(NamespaceSpec(name="n", num_shards=1))
        with pytest.raises(InvalidField) as caught:
            await world.service.list_timers(TimerFilter(namespace=None, correlation_id="x", cursor=cursor))
        assert caught.value.field == "cursor"

    in_world(scenario)


def test_a_page_is_never_larger_than_the_limit_of_the_configuration() -> None:
    async def scenario(world: World) -> None:
        for number in range(5):
            await world.create(f"t{number}", HOUR_MS)
        views, cursor = await world.service.list_timers(TimerFilter(namespace="default", limit=100))
        assert (len(views), cursor is not None) == (3, True)
        views, _ = await world.service.list_timers(TimerFilter(namespace="default", limit=2))
        assert len(views) == 2

    in_world(scenario, limits__page_timers_max=3)


@pytest.mark.parametrize("character", ["x", "é", "😀"])
def test_a_page_has_at_most_its_bytes_and_one_timer_and_nothing_is_skipped_between_pages(character: str) -> None:
    async def scenario(world: World) -> None:
        payload = f'"{character * 2_000}"'
        timer_bytes = len(payload.encode())
        for number in range(24):  # twelve of them are reached
            tags = ("odd",) if number % 2 else ()
            delay_ms = 100 if number < 12 else HOUR_MS + number
            await world.create(f"t{number:02}", delay_ms, payload=payload, tags=tags)
        await asyncio.sleep(5)
        filters: list[dict[str, Any]] = [{}, {"state": State.DELIVERED}, {"tag": "odd"}, {"id_prefix": "t0"}]
        for fields in filters:
            for limit in (1_000, 4):
                pages = await _pages(world, limit=limit, **fields)
                assert max(map(len, pages)) <= min(limit, 20_000 // timer_bytes + 1)
                names = [name for page in pages for name in _names(page)]
                wanted = _names(await _listed(world, payloads=False, **fields))
                assert names == wanted
                assert len(set(names)) == len(names) >= 10
        everything = [name for page in await _pages(world) for name in _names(page)]
        assert sorted(everything) == [f"t{number:02}" for number in range(24)]
        assert everything[:12] == [f"t{number}" for number in range(12, 24)]

    in_world(scenario, limits__page_bytes_max=20_000)


async def _pages(world: World, **fields: Any) -> list[list[TimerView]]:
    pages: list[list[TimerView]] = []
    cursor: str | None = None
    while True:
        views, cursor = await world.service.list_timers(TimerFilter(namespace="default", cursor=cursor, **fields))
        pages.append(views)
        if cursor is None:
            return pages


def test_the_bytes_of_a_page_are_also_those_of_headers() -> None:
    async def scenario(world: World) -> None:
        for number in range(20):
            await world.create(f"t{number:02}", HOUR_MS + number, headers={"X-Long": "x" * 4_000})
        pages = [page for page in await _pages(world) if page]
        assert [len(page) for page in pages] == [5, 5, 5, 5]
        assert [name for page in pages for name in _names(page)] == [f"t{number:02}" for number in range(20)]

    in_world(scenario, limits__page_bytes_max=20_000)


def test_the_bytes_of_a_page_are_also_those_of_schedules() -> None:
    async def scenario(world: World) -> None:
        excluded = tuple(str(date(2028, 1, 1) + timedelta(days=day)) for day in range(300))
        schedule = Schedule(timezone="UTC", at="2027-06-01T09:00", repeat="daily", exclude=excluded)
        for number in range(20):
            spec = TimerSpec(namespace="default", timer_id=f"t{number:02}", schedule=schedule, callback_url=URL)
            await world.service.create(spec)
        pages = [page for page in await _pages(world) if page]
        assert [len(page) for page in pages] == [5, 5, 5, 5]

    in_world(scenario, limits__page_bytes_max=20_000)


def test_the_errors_of_a_bulk_request_hold_no_frames() -> None:
    """The frames refer to the results: a thousand such cycles took the garbage collector half a second."""

    async def scenario(world: World) -> None:
        never = Schedule(timezone="UTC", at="2027-06-01T09:00", repeat="rrule:FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30")
        specs = [
            TimerSpec(namespace="default", timer_id="a", schedule=never, callback_url=URL),
            TimerSpec(namespace="default", timer_id="b", delay_ms=10**15, callback_url=URL),
            TimerSpec(namespace="none", timer_id="c", delay_ms=1, callback_url=URL),
        ]
        created = await world.service.create_many(specs)
        deleted = await world.service.delete_many([TimerKey("default", "a"), TimerKey("none", "c")])
        for error in (*created, *deleted):
            assert isinstance(error, DuetimeError)
            assert error.__traceback__ is None
            assert error.__context__ is None

    in_world(scenario)


def test_a_list_without_payloads_has_none_in_any_state() -> None:
    async def scenario(world: World) -> None:
        await world.create("over", 100, payload='{"a":1}')
        await asyncio.sleep(5)
        never = hanging(world)
        await world.create("sending", 100, payload='{"a":2}')
        await world.create("waiting", HOUR_MS, payload='{"a":3}')
        await asyncio.sleep(1)
        found = {view.timer.timer_id: view for view in await _listed(world, payloads=False)}
        assert {name: view.state for name, view in found.items()} == {
            "over": State.DELIVERED,
            "sending": State.IN_FLIGHT,
            "waiting": State.SCHEDULED,
        }
        assert {view.timer.payload for view in found.values()} == {None}
        assert {view.timer.payload for view in await _listed(world)} == {'{"a":1}', '{"a":2}', '{"a":3}'}
        never.set()

    in_world(scenario)


def test_a_timer_of_another_instances_shard_is_listed_as_scheduled() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", HOUR_MS)
        world.engine.shards.pop(shard_of("a", 16))
        assert [view.state for view in await _listed(world)] == [State.SCHEDULED]
        assert (await world.get("a")).state is State.SCHEDULED

    in_world(scenario)


@pytest.mark.parametrize("text", ["x", "!", "W10", base64.urlsafe_b64encode(b"[2,0,0,0]").decode()])
def test_a_cursor_that_no_list_has_answered_is_refused(text: str) -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidField, match="cursor must be the nextCursor of a list") as caught:
            await world.service.list_timers(TimerFilter(namespace="default", cursor=text))
        assert caught.value.field == "cursor"

    in_world(scenario)


# --- stores --------------------------------------------------------------------------------------


def test_a_store_url_names_its_adapter_and_one_without_an_adapter_is_refused() -> None:
    assert isinstance(open_store("memory://"), MemoryStore)
    with pytest.raises(SetupError, match="no adapter for 'nosuch'; allowed: cassandra, ") as caught:
        open_store("nosuch://x")
    assert caught.value.field == "store.url"
    with pytest.raises(SetupError, match="no adapter for 'plain'"):
        open_store("plain")


def test_a_store_is_guarded_once() -> None:
    once = guarded(MemoryStore())
    assert isinstance(once, GuardedStore)
    assert guarded(once) is once
    assert once.capabilities is MemoryStore.capabilities


def test_the_defaults_of_capabilities_are_the_careful_choice() -> None:
    plain = Capabilities(name="x", batch_max=1, payload_bytes_max=1, parallel_commits=1)
    assert (plain.exclusive, plain.durable) == (False, True)
    assert plain.clock_error_ms == 0
    assert plain.batch_chars_max == 8 * 1024 * 1024
    assert ListQuery(namespace="n", num_shards=1).limit == 100
    row = ShardRow(3)
    assert (row.version, row.nonce, row.owner_id, row.claimed_at_ms) == (0, 0, None, 0)


# --- routing to the owner ------------------------------------------------------------------------


def test_a_create_for_a_shard_that_closes_waits_for_its_next_owner() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        shard = world.engine.shards[0]
        shard.close()
        creating = asyncio.ensure_future(world.create("a", HOUR_MS))
        await asyncio.sleep(0.5)
        assert not creating.done()
        await world.engine.ownership.release([shard])
        assert (await creating).replaced is False
        assert world.engine.shards[0] is not shard

    on_faulty(scenario, namespaces__default_num_shards=1)


def test_a_list_of_the_scheduled_ends_with_them() -> None:
    async def scenario(world: World) -> None:
        await world.create("a", HOUR_MS)
        _, cursor = await world.service.list_timers(TimerFilter(namespace="default", state=State.SCHEDULED))
        assert cursor is None

    in_world(scenario)


def test_without_peers_other_members_are_unreachable_and_their_shards_are_not_served() -> None:
    async def scenario(world: World, store: FaultyStore) -> None:
        await store.join(Member("another", "elsewhere:1", 0, True, 0))
        await world.engine.balance()
        status = await world.service.cluster_status()
        assert [member.unreachable is None for member in status.members if member.alive] == [False, True]
        await world.engine.ownership.release(list(world.engine.shards.values()))
        row = (await store.shards())[0]
        await store.claim([Claim(0, row.version, 1, "another", "elsewhere:1", 0)])
        with pytest.raises(DuetimeError) as caught:
            await world.create("a", HOUR_MS)
        assert caught.value.status == 503

    on_faulty(scenario, namespaces__default_num_shards=1)
