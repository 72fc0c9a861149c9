"""Conformance: pages of loads and lists are limited in characters, and lists can leave payloads out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from duetime.domain.timer import BEFORE_ALL, Extras, Outcome, Position, Reached, Timer, shard_of
from duetime.store import Batch, Fence, ListQuery, PageRequest, Store
from duetime.stores.rows import without_payload
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import (
    EVERY_OUTCOME,
    FAR,
    SHARDS,
    Harness,
    all_timers,
    commit_one,
    listed,
    load,
    put,
    take,
)

_PLAIN = ListQuery(namespace="test", num_shards=SHARDS, limit=1_000)
# Characters of payloads; None: no payload. Some are long enough that a store reads them separately from their rows.
SIZES = (2, None, 900, 5_000, 30, 30, 12_000, None, 700, 700, 5_000, 5_000, 40, 2)
LIMITS = (0, 1, 2, 901, 902, 5_000, 12_100, 20_000, 31_404, 31_405)


def payload_of(size: int | None) -> str | None:
    return None if size is None else '"' + "x" * (size - 2) + '"'


def chars_of(timer: Timer) -> int:
    return len(timer.payload or "")


def pages_of(timers: Sequence[Timer], chars_max: int, limit: int = 1_000) -> list[list[Timer]]:
    """The pages that a store returns if it counts characters and has no other limit."""
    pages: list[list[Timer]] = [[]]
    for timer in timers:
        if len(pages[-1]) == limit or sum(map(chars_of, pages[-1])) > chars_max:
            pages.append([])
        pages[-1].append(timer)
    return pages


class PageSizes(Harness):
    async def timers_of_one_shard(self, store: Store, fence: Fence, sizes: Sequence[int | None]) -> list[Timer]:
        timers = [make_timer(f"t-{n}", 100 + n, payload=payload_of(size)) for n, size in enumerate(sizes)]
        await put(store, fence, *timers)
        return timers

    async def loaded_pages(
        self, store: Store, chars_max: int, limit: int = 1_000, until_ms: int = FAR
    ) -> list[list[Timer]]:
        pages: list[list[Timer]] = []
        after: Position | None = BEFORE_ALL
        while after is not None:
            [page] = await load(store, [PageRequest(0, after, until_ms, limit, chars_max)])
            assert page.next is None or page.next > after, "a load must move on"
            pages.append(list(page.timers))
            after = page.next
        return pages if pages[-1] or len(pages) == 1 else pages[:-1]

    # -- loads

    @pytest.mark.parametrize("limit", [1_000, 3])
    async def test_a_page_ends_after_the_timer_with_which_it_exceeds_chars_max(
        self, store: Store, fence: Fence, limit: int
    ) -> None:
        timers = await self.timers_of_one_shard(store, fence, SIZES)
        for chars_max in LIMITS:
            pages = await self.loaded_pages(store, chars_max, limit)
            assert pages == pages_of(timers, chars_max, limit), chars_max

    async def test_chars_max_with_a_first_timer_that_is_larger_has_this_timer_only(
        self, store: Store, fence: Fence
    ) -> None:
        timers = await self.timers_of_one_shard(store, fence, (50_000, 2, 50_000))
        assert await self.loaded_pages(store, 10_000) == [timers[:1], timers[1:]]
        assert await self.loaded_pages(store, 10_000, until_ms=100) == [timers[:1]]

    async def test_chars_max_of_each_request_limits_its_page(self, store: Store, fence: Fence) -> None:
        timers = await self.timers_of_one_shard(store, fence, SIZES)
        requests = [PageRequest(0, BEFORE_ALL, FAR, 1_000, chars_max) for chars_max in LIMITS]
        for chars_max, page in zip(LIMITS, await load(store, requests), strict=True):
            assert list(page.timers) == pages_of(timers, chars_max)[0]

    async def test_chars_max_counts_payloads_of_any_characters(self, store: Store, fence: Fence) -> None:
        timers = [make_timer(f"t-{n}", 100 + n, payload=f'"{"ü😀x"[n % 3] * 3_000}"') for n in range(12)]
        await put(store, fence, *timers)
        for chars_max in (0, 5_000, 10_000):
            pages = await self.loaded_pages(store, chars_max)
            assert [timer for page in pages for timer in page] == timers
            assert all(sum(map(chars_of, page[:-1])) <= chars_max for page in pages)
            found = await self.listed_pages(store, replace(_PLAIN, chars_max=chars_max))
            assert [timer for page in found for timer in page] == timers

    async def test_chars_max_of_megabytes_limits_loads_and_lists(self, store: Store, fence: Fence) -> None:
        size = min(256 * 1024, store.capabilities.payload_bytes_max) - 16
        timers = [make_timer(f"t-{n}", 100 + n, payload=payload_of(size)) for n in range(24)]
        for timer in timers:
            await put(store, fence, timer)
        for pages in (
            await self.loaded_pages(store, 4 * size),
            await self.listed_pages(store, replace(_PLAIN, chars_max=4 * size)),
        ):
            assert [timer for page in pages for timer in page] == timers
            assert max(map(len, pages)) <= 5
            assert len(pages) <= 24  # each has some

    async def test_chars_max_counts_a_timer_that_cannot_be_decoded_as_a_row(self, store: Store, fence: Fence) -> None:
        timers = [
            make_timer(f"t-{n}", 100 + n, payload=payload_of(size), extras=Extras(tags=("red",)))
            for n, size in enumerate((30, 8_000, 8_000, 30, 8_000))
        ]
        await put(store, fence, *timers)
        for spoilt in (timers[1], timers[4]):
            await self.spoil_timer(0, spoilt)
        for chars_max in (0, 20, 8_000, 9_000, 20_000):
            assert [t for page in await self.loaded_pages(store, chars_max) for t in page] == [
                timers[0],
                timers[2],
                timers[3],
            ]
            query = replace(_PLAIN, chars_max=chars_max)
            assert [t for page in await self.listed_pages(store, query) for t in page] == [
                timers[0],
                timers[2],
                timers[3],
            ]

    # -- lists

    async def timers_of_all_shards(self, store: Store) -> list[Timer]:
        """Timers of every size in every shard, and reached ones with the same payloads."""
        batches: dict[int, list[Timer]] = {shard_id: [] for shard_id in range(SHARDS)}
        for number in range(60):
            timer = make_timer(
                f"{'order' if number % 3 else 'other'}-{number}",
                1_000 + number // 4,
                namespace="another" if number % 10 == 9 else "test",
                payload=payload_of(SIZES[number % len(SIZES)]),
                correlation_id=None if number % 4 else "trace",
                extras=Extras(tags=("red",) if number % 2 else ()),
            )
            batches[shard_of(timer.timer_id, SHARDS)].append(timer)
        for shard_id, timers in batches.items():
            ends = [
                make_reached(timer, list(Outcome)[n % 4], purge_at_ms=9_000 - timer.execute_at_ms % 7)
                for n, timer in enumerate(timers)
            ]
            await commit_one(store, Batch(await take(store, shard_id), timers, (), ends))
        return sorted(
            (timer for some in batches.values() for timer in some if timer.namespace == "test"),
            key=lambda timer: timer.position,
        )

    async def listed_pages(self, store: Store, query: ListQuery) -> list[list[Timer]]:
        """The pages that are not empty. Each has at least one row, or is the last, or found no row that matches."""
        pages: list[list[Timer]] = []
        after: Position | None = query.after
        while after is not None:
            page = await store.list_timers(replace(query, after=after))
            assert page.next is None or page.next > after, "a list must move on"
            assert not (page.timers and page.reached)
            timers = [*page.timers, *(reached.timer for reached in page.reached)]
            assert len(timers) <= query.limit
            assert sum(map(chars_of, timers[:-1])) <= query.chars_max
            pages += [timers] if timers else []
            after = page.next
        return pages

    async def test_a_listing_ends_after_the_timer_with_which_it_exceeds_chars_max(self, store: Store) -> None:
        timers = await self.timers_of_all_shards(store)
        for chars_max in LIMITS:
            for limit in (1_000, 3):
                pages = await self.listed_pages(store, replace(_PLAIN, chars_max=chars_max, limit=limit))
                assert pages == pages_of(timers, chars_max, limit), (chars_max, limit)

    async def test_chars_max_neither_skips_nor_repeats_with_any_filter(self, store: Store) -> None:
        await self.timers_of_all_shards(store)
        for query in self.filtered_queries():
            for outcomes in (frozenset[Outcome](), frozenset({Outcome.FAILED}), EVERY_OUTCOME):
                filtered = replace(query, outcomes=outcomes)
                whole = await listed(store, filtered)
                assert any(whole), filtered
                for chars_max in (0, 902, 12_000):
                    for limit in (5, 1_000):
                        some = replace(filtered, chars_max=chars_max, limit=limit)
                        assert await listed(store, some) == whole, some
                        pages = await self.listed_pages(store, some)
                        assert [timer for page in pages for timer in page] == [
                            *whole[0],
                            *(reached.timer for reached in whole[1]),
                        ]

    def filtered_queries(self) -> list[ListQuery]:
        return [
            _PLAIN,
            replace(_PLAIN, correlation_id="trace"),
            replace(_PLAIN, tag="red"),
            replace(_PLAIN, id_prefix="order"),
            replace(_PLAIN, due_from_ms=1_004, due_until_ms=1_012),
            replace(_PLAIN, num_shards=2),
        ]

    async def test_chars_max_of_reached_timers_is_that_of_their_payloads(self, store: Store, fence: Fence) -> None:
        timers = [make_timer(f"t-{n}", payload=payload_of(size)) for n, size in enumerate(SIZES)]
        ends = [make_reached(timer, purge_at_ms=900 + n) for n, timer in enumerate(timers)]
        await commit_one(store, Batch(fence, reached=ends))
        for chars_max in LIMITS:
            query = replace(_PLAIN, chars_max=chars_max, outcomes=EVERY_OUTCOME)
            assert await self.listed_pages(store, query) == pages_of(timers, chars_max)

    async def test_without_payloads_a_listing_has_everything_else_and_chars_max_limits_nothing(
        self, store: Store
    ) -> None:
        await self.timers_of_all_shards(store)
        for query in self.filtered_queries():
            for outcomes in (frozenset[Outcome](), EVERY_OUTCOME):
                timers, ends = await listed(store, replace(query, outcomes=outcomes))
                bare = await store.list_timers(replace(query, outcomes=outcomes, payloads=False, chars_max=0))
                assert _without_payloads(timers) == list(bare.timers)
                assert _without_payloads(ends) == list(bare.reached)

    async def test_a_listing_without_payloads_changes_no_stored_payload(self, store: Store, fence: Fence) -> None:
        timers = await self.timers_of_one_shard(store, fence, SIZES)
        await store.list_timers(replace(_PLAIN, payloads=False))
        assert await all_timers(store) == timers


def _without_payloads(items: Sequence[Timer] | Sequence[Reached]) -> list[Timer | Reached]:
    return [without_payload(item) for item in items]
