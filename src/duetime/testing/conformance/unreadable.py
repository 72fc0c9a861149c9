"""Conformance: a stored row that cannot be decoded is reported and stops nothing else."""

from __future__ import annotations

import logging

import pytest
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, Extras, Namespace, Reached, RetryPolicy, Timer
from duetime.store import Batch, Committed, Fence, Found, ListQuery, Page, PageRequest, Store, Unreadable
from duetime.stores import rows
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import (
    EVERY_OUTCOME,
    FAR,
    SHARDS,
    Harness,
    all_timers,
    commit_one,
    load,
    load_one,
    put,
    take,
)

_PLAIN = ListQuery(namespace="test", num_shards=SHARDS)


def full_timer(timer_id: str, execute_at_ms: int = 100, generation: int = 1) -> Timer:
    """A timer with a value in every column that has a format of its own."""
    return make_timer(
        timer_id,
        execute_at_ms,
        generation=generation,
        payload='{"secret":"content"}',
        retry_policy=RetryPolicy(max_retries=3),
        correlation_id="trace",
        extras=Extras(tags=("red",), headers={"a": "b"}),
    )


class UnreadableRows(Harness):
    async def fill_and_spoil(self, store: Store, fence: Fence, count: int = 6, spoilt: int = 2) -> list[Timer]:
        """Store timers in order, and spoil one of them."""
        timers = [full_timer(f"t-{number}", 100 + number) for number in range(count)]
        await put(store, fence, *timers)
        await self.spoil_timer(fence.shard_id, timers[spoilt])
        return timers

    # -- load

    async def test_the_other_timers_of_its_page_are_loaded(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence)
        page = await load_one(store, 0, BEFORE_ALL, FAR, 50)
        assert list(page.timers) == [*timers[:2], *timers[3:]]
        assert page.next is None
        self.assert_reported(page, timers[2])

    def assert_reported(self, page: Page, timer: Timer) -> None:
        [found] = page.unreadable
        assert isinstance(found, Unreadable)
        assert found.position == timer.position
        assert (found.namespace, found.timer_id) == timer.key
        assert found.error
        assert "\n" not in found.error
        assert "content" not in found.error

    @pytest.mark.parametrize("spoilt", [0, 1, 2, 5])
    @pytest.mark.parametrize("page", [1, 2, 3, 6])
    async def test_pages_continue_after_it_wherever_they_end(
        self, store: Store, fence: Fence, page: int, spoilt: int
    ) -> None:
        timers = await self.fill_and_spoil(store, fence, spoilt=spoilt)
        found: list[Timer] = []
        unreadable: list[Unreadable] = []
        after = BEFORE_ALL
        while True:
            answer = await load_one(store, 0, after, FAR, page)
            assert len(answer.timers) + len(answer.unreadable) <= page
            found += answer.timers
            unreadable += answer.unreadable
            if answer.next is None:
                break
            assert answer.next > after
            after = answer.next
        assert found == [*timers[:spoilt], *timers[spoilt + 1 :]]
        assert [item.position for item in unreadable] == [timers[spoilt].position]

    async def test_the_other_shards_of_a_load_are_not_affected(self, store: Store, fence: Fence) -> None:
        others = [await take(store, shard_id) for shard_id in (1, 2)]
        timers = await self.fill_and_spoil(store, fence)
        for other in others:
            await put(store, other, full_timer(f"o-{other.shard_id}"))
        requests = [PageRequest(shard_id, BEFORE_ALL, FAR, 50) for shard_id in (1, 0, 2)]
        first, spoilt, last = await load(store, requests)
        assert [timer.timer_id for timer in (*first.timers, *last.timers)] == ["o-1", "o-2"]
        assert not first.unreadable
        assert not last.unreadable
        assert len(spoilt.timers) == len(timers) - 1
        self.assert_reported(spoilt, timers[2])

    async def test_a_page_with_only_that_row_is_empty(self, store: Store, fence: Fence) -> None:
        [timer] = await self.fill_and_spoil(store, fence, 1, 0)
        page = await load_one(store, 0, BEFORE_ALL, FAR, 50)
        assert (list(page.timers), page.next) == ([], None)
        self.assert_reported(page, timer)

    # -- get

    async def test_a_get_reports_that_it_exists_and_why_it_cannot_be_read(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence)
        ended = make_reached(full_timer("t-2", 50))
        await commit_one(store, Batch(fence, reached=[ended]))
        good, bad, none = await store.get_many([(0, timer.key) for timer in (*timers[1:3], make_timer("none"))])
        assert (good, none) == (Found(timers[1]), Found())
        assert (bad.timer, bad.reached) == (None, ended)
        assert bad.unreadable
        assert "\n" not in bad.unreadable

    async def test_a_get_of_very_many_keys_reports_it(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence, 90, 70)
        found = await store.get_many([(0, timer.key) for timer in timers])
        assert [item.timer for item in found] == [None if n == 70 else timer for n, timer in enumerate(timers)]
        assert [n for n, item in enumerate(found) if item.unreadable] == [70]

    async def test_an_unreadable_reached_row_counts_as_absent_and_an_older_one_is_the_newest(
        self, store: Store, fence: Fence
    ) -> None:
        ends = [
            make_reached(full_timer("over", 100 + generation, generation), purge_at_ms=900 + generation)
            for generation in (1, 2, 3)
        ]
        alone = make_reached(full_timer("alone"))
        timer = full_timer("over", 200, 4)
        await commit_one(store, Batch(fence, [timer], (), [*ends, alone]))
        for reached in (*ends[1:], alone):
            await self.spoil_reached(0, reached)
        keys = [(0, timer.key), (0, alone.timer.key)]
        assert await store.get_many(keys) == [Found(timer, ends[0]), Found()]

    # -- list

    @pytest.mark.parametrize("limit", [1, 2, 5, 50])
    async def test_lists_omit_it_and_count_it(self, store: Store, fence: Fence, limit: int) -> None:
        other = await take(store, 1)
        timers = await self.fill_and_spoil(store, fence)
        await put(store, other, beside := full_timer("beside", 103))
        wanted = sorted([*timers[:2], *timers[3:], beside], key=lambda timer: timer.position)
        for query in (_PLAIN, replace(_PLAIN, correlation_id="trace"), replace(_PLAIN, id_prefix="")):
            assert await self.list_and_count(store, replace(query, limit=limit)) == (wanted, 1)

    async def test_lists_with_a_tag_or_of_another_namespace_do_not_fail(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence)
        found, _ = await self.list_and_count(store, replace(_PLAIN, tag="red"))
        assert found == [*timers[:2], *timers[3:]]
        assert await self.list_and_count(store, replace(_PLAIN, namespace="other")) == ([], 0)

    @pytest.mark.parametrize("limit", [1, 2, 50])
    async def test_lists_of_reached_timers_omit_it_and_count_it(self, store: Store, fence: Fence, limit: int) -> None:
        ends = [make_reached(full_timer(f"t-{n}"), purge_at_ms=900 + n) for n in range(5)]
        await commit_one(store, Batch(fence, reached=ends))
        for reached in (ends[0], ends[3]):
            await self.spoil_reached(0, reached)
        for query in (_PLAIN, replace(_PLAIN, correlation_id="trace")):
            query = replace(query, outcomes=EVERY_OUTCOME, limit=limit)
            assert await self.list_and_count(store, query) == ([ends[1], ends[2], ends[4]], 2)

    async def list_and_count(self, store: Store, query: ListQuery) -> tuple[list[Timer | Reached], int]:
        found: list[Timer | Reached] = []
        unreadable = 0
        after = query.after
        while True:
            page = await store.list_timers(replace(query, after=after))
            found += [*page.timers, *page.reached]
            unreadable += page.unreadable
            if page.next is None:
                return found, unreadable
            assert page.next > after, "a list must move on"
            after = page.next

    # -- writes

    @pytest.mark.parametrize("move_ms", [0, -50, 50])
    async def test_a_put_replaces_it(self, store: Store, fence: Fence, move_ms: int) -> None:
        timers = await self.fill_and_spoil(store, fence)
        new = full_timer("t-2", 102 + move_ms, 2)
        assert await commit_one(store, Batch(fence, puts=[new])) == Committed(frozenset({0}))
        page = await load_one(store, 0, BEFORE_ALL, FAR, 50)
        wanted = sorted([*timers[:2], new, *timers[3:]], key=lambda timer: timer.position)
        assert (list(page.timers), list(page.unreadable)) == (wanted, [])
        assert await store.get_many([(0, new.key)]) == [Found(new)]

    async def test_a_delete_removes_it(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence)
        await commit_one(store, Batch(fence, deletes=[timers[2].key]))
        page = await load_one(store, 0, BEFORE_ALL, FAR, 50)
        assert (list(page.timers), list(page.unreadable)) == ([*timers[:2], *timers[3:]], [])
        assert await store.get_many([(0, timers[2].key)]) == [Found()]

    async def test_its_shard_can_be_written_claimed_and_released(self, store: Store, fence: Fence) -> None:
        timers = await self.fill_and_spoil(store, fence)
        new = full_timer("new", 500)
        await commit_one(store, Batch(fence, [new], [timers[0].key], low_water=timers[0].position))
        again = await take(store, 0, owner_id="b")
        assert (await store.shards())[0].fence == again
        await put(store, again, newer := full_timer("newer", 501))
        assert await store.release([again]) == [None]
        assert await all_timers(store) == [timers[1], *timers[3:], new, newer]

    async def test_a_reached_row_is_purged_like_any_other(self, store: Store, fence: Fence) -> None:
        ends = [make_reached(full_timer(f"t-{n}"), purge_at_ms=900 + n) for n in range(3)]
        await commit_one(store, Batch(fence, reached=ends))
        await self.spoil_reached(0, ends[1])
        assert await store.purge_reached([fence], 902, 10) == [2]
        assert await self.list_and_count(store, replace(_PLAIN, outcomes=EVERY_OUTCOME)) == ([ends[2]], 0)

    # -- namespaces

    async def test_a_namespace_is_omitted_and_logged_once(
        self, store: Store, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rows, "_logged_namespaces", set())
        spaces = [Namespace(name=name, num_shards=1, created_at_ms=1, revision=1) for name in ("a", "b", "c")]
        for namespace in spaces:
            assert await store.put_namespace(namespace, None)
        await self.spoil_namespace("b")
        with caplog.at_level(logging.ERROR, "duetime"):
            for _ in range(3):
                assert await store.namespaces() == [spaces[0], spaces[2]]
        [message] = [record.getMessage() for record in caplog.records if record.name == "duetime"]
        assert "'b'" in message
