"""Look-ahead: loads timers before they are due, and removes timers from memory when there are too many.

Each shard holds in memory exactly its timers up to its horizon. The horizon is kept between half a `look_ahead` and one
`look_ahead` from now; the shard with the nearest horizon is loaded first. Above `timers_in_memory_max` the timers that
are due last are removed from memory again (they are on disk). If the remaining ones are due but cannot be delivered,
they are parked.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence

from duetime.cluster.membership import Membership
from duetime.config import EngineConfig
from duetime.engine.counters import Counters
from duetime.engine.fire_loop import FireLoop
from duetime.engine.shard import Shard, ShardState
from duetime.errors import StoreError
from duetime.store import Page, PageRequest, Store
from duetime.telemetry import FailureLog

__all__ = ["LookAhead"]

_PAGE_TIMERS_MAX = 1_000
_PAGE_TIMERS_MIN = 50
_LOADERS = 4
_SHARDS_PER_LOAD = 64  # shards with few timers are loaded together: thousands of idle shards must cost almost nothing
_URGENT_MS = 5_000
_CRITICAL_MS = 2_000  # timers that are due within this time cannot wait for the next sweep
_LOAD_AHEAD_BELOW = 0.75  # of the limit: above it only urgent shards are loaded
_REDUCE_TO = 0.5  # of the limit


class LookAhead:
    def __init__(
        self,
        store: Store,
        config: EngineConfig,
        membership: Membership,
        fire_loop: FireLoop,
        shards: dict[int, Shard],
        counters: Counters,
    ) -> None:
        self._store = store
        self._config = config
        self._membership = membership
        self._fire_loop = fire_loop
        self._shards = shards
        self._counters = counters
        self._to_load: list[tuple[int, int, int]] = []  # heap of (when its last load failed, horizon, shard)
        # By shard, until a load succeeds. They come last, and the one that failed last after the others: loads that
        # hang must not take the loaders from the shards that can be loaded.
        self._failed_at_ms: dict[int, int] = {}
        # Each of these shards is loaded in a call of its own: its last page was not the end, or the load failed.
        self._load_alone: set[int] = set()
        self._wake = asyncio.Event()
        self._reduction_scheduled = False
        self._page_timers = max(_PAGE_TIMERS_MIN, min(_PAGE_TIMERS_MAX, config.timers_in_memory_max // 10))
        self._wake_at_weight = -1  # a shard has to be loaded as soon as the weight is down to this; -1: none
        self._failure_log = FailureLog("cannot load timers that are due soon", "timers are loaded again")

    # --- the limit of memory ----------------------------------------------------------------------

    def add_weight(self, weight: int) -> None:
        """Count a timer that enters memory, or with a negative weight one that leaves it."""
        counters = self._counters
        counters.weight += weight
        if counters.weight > self._config.timers_in_memory_max and not self._reduction_scheduled:
            self._reduction_scheduled = True
            asyncio.get_running_loop().call_soon(self.reduce_memory)
        elif counters.weight <= self._wake_at_weight:
            self._wake_at_weight = -1
            self._wake.set()

    def reduce_memory(self) -> None:
        """Above the limit: remove the timers that are due last, then park due timers that cannot be delivered soon."""
        self._reduction_scheduled = False
        limit = self._config.timers_in_memory_max
        if self._counters.weight <= limit:
            return
        tickets = sorted(self._fire_loop.armed_tickets())
        held = self._fire_loop.waiting
        target = self._target_timers()
        keep = max(0, target - held)
        if len(tickets) > keep:
            cutoff_ms = max(tickets[keep] >> 32, self._membership.now_ms() + _URGENT_MS)
            for shard in self._shards.values():
                shard.shrink(cutoff_ms)
        if self._counters.weight > limit:
            self._fire_loop.park(held - target)

    def _target_timers(self) -> int:
        """How many timers of the average weight make half of the limit."""
        timers = sum(len(shard.entries) for shard in self._shards.values())
        return int(self._config.timers_in_memory_max * _REDUCE_TO * timers / max(1, self._counters.weight))

    # --- loading ----------------------------------------------------------------------------------

    def find_shards_to_load(self) -> None:
        """Find the shards whose horizon is too near. Called every second, and after shards were claimed."""
        near_ms = self._membership.now_ms() + self._config.look_ahead.ms // 2
        self._to_load = [
            self._load_priority(shard)
            for shard in self._shards.values()
            if shard.horizon.execute_at_ms < near_ms and not shard.loading
        ]
        heapq.heapify(self._to_load)
        if self._to_load:
            self._wake.set()

    def _load_priority(self, shard: Shard) -> tuple[int, int, int]:
        return self._failed_at_ms.get(shard.shard_id, 0), shard.horizon.execute_at_ms, shard.shard_id

    async def run(self) -> None:
        await asyncio.gather(*(self._load_pages() for _ in range(_LOADERS)))

    async def _load_pages(self) -> None:
        while True:
            await self._wake.wait()
            shards = self._take_next()
            if not shards:
                self._wake.clear()
                continue
            await self._load(shards)

    def _take_next(self) -> list[Shard]:
        """The shards of the next load: one that is loaded alone, or several others together."""
        shards: list[Shard] = []
        while len(shards) < _SHARDS_PER_LOAD and not (
            shards and self._to_load and self._to_load[0][2] in self._load_alone
        ):
            shard = self._pop_next()
            if shard is None:
                break
            shards.append(shard)
            shard.begin_load()
            if shard.shard_id in self._load_alone:
                break
        return shards

    def _pop_next(self) -> Shard | None:
        limit = self._config.timers_in_memory_max
        while self._to_load:
            _, horizon_ms, shard_id = self._to_load[0]
            near_ms = horizon_ms - self._membership.now_ms()
            urgent = near_ms < _URGENT_MS
            if self._counters.weight > (limit if urgent else limit * _LOAD_AHEAD_BELOW):
                if not urgent and self._keep_urgent():
                    continue
                if near_ms < _CRITICAL_MS:
                    self._wake_at_weight = limit
                if urgent and self._fire_loop.waiting > self._target_timers():
                    self._fire_loop.park(self._page_timers)
                return None  # tried again with the next sweep, when there may be fewer timers in memory
            heapq.heappop(self._to_load)
            shard = self._shards.get(shard_id)
            # A shard that recovers fires nothing, and `shrink` could not remove what it would load.
            if shard is not None and not (shard.loading or shard.state is not ShardState.OPEN or shard.recovering):
                return shard
        return None

    def _keep_urgent(self) -> bool:
        """Only urgent shards may be loaded now, and the first one is not urgent: urgent ones whose last load failed
        come after it. Keep the urgent ones, if there are any; the others are found again with the next sweep."""
        urgent_before_ms = self._membership.now_ms() + _URGENT_MS
        urgent = [waiting for waiting in self._to_load if waiting[1] < urgent_before_ms]
        if urgent:
            heapq.heapify(urgent)
            self._to_load = urgent
        return bool(urgent)

    async def _load(self, shards: list[Shard]) -> None:
        until_ms = self._membership.now_ms() + self._config.look_ahead.ms
        limit = max(self._page_timers // len(shards), _PAGE_TIMERS_MIN)
        pages: Sequence[Page | StoreError | None] = [None] * len(shards)
        try:
            pages = await self._store.load([PageRequest(s.shard_id, s.horizon, until_ms, limit) for s in shards])
        except StoreError as error:
            pages = [error] * len(shards)
            # One of them may be the reason: from now on each is loaded alone, until that succeeds.
            self._load_alone.update(shard.shard_id for shard in shards)
        finally:
            for shard, page in zip(shards, pages, strict=True):
                self._loaded(shard, None if isinstance(page, StoreError) else page, until_ms)
        errors = [page for page in pages if isinstance(page, StoreError)]
        if errors:
            self._failure_log.failed(errors[0], self._membership.boot_ms())
        else:
            self._failure_log.recovered()

    def _loaded(self, shard: Shard, page: Page | None, until_ms: int) -> None:
        shard.end_load(page, until_ms)
        if page is None:
            self._failed_at_ms[shard.shard_id] = self._membership.boot_ms()
            return
        self._failed_at_ms.pop(shard.shard_id, None)
        self._load_alone.discard(shard.shard_id)
        if page.next is not None and not shard.dropped:
            self._load_alone.add(shard.shard_id)
            heapq.heappush(self._to_load, self._load_priority(shard))
            self._wake.set()
