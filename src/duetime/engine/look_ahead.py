"""Memory is bounded: pages of timers come in as their time draws near, and go out when there are too many.

Each shard holds in memory exactly its timers up to its horizon. The horizon is kept between half and one
`look_ahead` from now, the neediest shard first. Over `timers_in_memory_max` the furthest are forgotten
again (they are on disk); if what is left is due but cannot be delivered, it is put back for later.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence

from duetime.cluster.membership import Membership
from duetime.config import EngineConfig
from duetime.engine.fire_loop import FireLoop
from duetime.engine.shard import Shard
from duetime.errors import StoreError
from duetime.store import Page, PageRequest, Store
from duetime.telemetry import FailureLog

__all__ = ["LookAhead"]

_PAGE_TIMERS_MAX = 1_000
_PAGE_TIMERS_MIN = 50
_LOADERS = 4
_SHARDS_PER_LOAD = 64  # of which little is expected: thousands of idle shards must cost next to nothing
_URGENT_MS = 5_000
_PRESSING_MS = 2_000  # what is due within this time cannot wait for the next `look`
_ROOMY = 0.75  # of the cap: beyond it only what is urgent is loaded
_RELIEVED = 0.5


class LookAhead:
    def __init__(
        self,
        store: Store,
        config: EngineConfig,
        membership: Membership,
        fire_loop: FireLoop,
        shards: dict[int, Shard],
    ) -> None:
        self._store = store
        self._config = config
        self._membership = membership
        self._fire_loop = fire_loop
        self._shards = shards
        self._needy: list[tuple[int, int, int]] = []  # (when its last load failed, horizon, shard)
        # By shard, until a load succeeds. They come last, and the one that failed last after the others: loads that
        # hang must not take the loaders from the shards that can be loaded.
        self._failed_at_ms: dict[int, int] = {}
        self._deep: set[int] = set()  # shards whose last page was not the end, or failed: each is loaded by itself
        self._wake = asyncio.Event()
        self._relieving = False
        self._page_timers = max(_PAGE_TIMERS_MIN, min(_PAGE_TIMERS_MAX, config.timers_in_memory_max // 10))
        self.weight = 0  # of everything in memory
        self._wake_at_weight = -1  # a shard has to be loaded as soon as the weight is down to this; -1: none
        self._failure_log = FailureLog("could not load timers that come near", "timers are loaded again")

    # --- the account ------------------------------------------------------------------------------

    def remember(self, weight: int) -> None:
        self.weight += weight
        if self.weight > self._config.timers_in_memory_max and not self._relieving:
            self._relieving = True
            asyncio.get_running_loop().call_soon(self.relieve)
        elif self.weight <= self._wake_at_weight:
            self._wake_at_weight = -1
            self._wake.set()

    def relieve(self) -> None:
        """Make room: forget the furthest, then put back what nobody takes."""
        self._relieving = False
        cap = self._config.timers_in_memory_max
        if self.weight <= cap:
            return
        tickets = sorted(self._fire_loop.armed_tickets())
        held = self._fire_loop.waiting
        half = self._half()
        keep = max(0, half - held)
        if len(tickets) > keep:
            cutoff_ms = max(tickets[keep] >> 32, self._membership.now_ms() + _URGENT_MS)
            for shard in self._shards.values():
                shard.shrink(cutoff_ms)
        if self.weight > cap:
            self._fire_loop.park(held - half)

    def _half(self) -> int:
        """Half of the cap, as a number of timers of the weight they have on average."""
        timers = sum(len(shard.entries) for shard in self._shards.values())
        return int(self._config.timers_in_memory_max * _RELIEVED * timers / max(1, self.weight))

    # --- loading ----------------------------------------------------------------------------------

    def look(self) -> None:
        """Find the shards whose horizon comes too near; called every second and for every new shard."""
        near_ms = self._membership.now_ms() + self._config.look_ahead.ms // 2
        self._needy = [
            self._need_of(shard)
            for shard in self._shards.values()
            if shard.horizon.execute_at_ms < near_ms and not shard.loading
        ]
        heapq.heapify(self._needy)
        if self._needy:
            self._wake.set()

    def _need_of(self, shard: Shard) -> tuple[int, int, int]:
        return self._failed_at_ms.get(shard.shard_id, 0), shard.horizon.execute_at_ms, shard.shard_id

    async def run(self) -> None:
        await asyncio.gather(*(self._load_pages() for _ in range(_LOADERS)))

    async def _load_pages(self) -> None:
        while True:
            await self._wake.wait()
            shards = self._neediest()
            if not shards:
                self._wake.clear()
                continue
            await self._load(shards)

    def _neediest(self) -> list[Shard]:
        """The next to load: one that has much, or many of which nothing is known yet."""
        shards: list[Shard] = []
        while len(shards) < _SHARDS_PER_LOAD and not (shards and self._needy and self._needy[0][2] in self._deep):
            shard = self._next_needy()
            if shard is None:
                break
            shards.append(shard)
            shard.load_begins()
            if shard.shard_id in self._deep:
                break
        return shards

    def _next_needy(self) -> Shard | None:
        cap = self._config.timers_in_memory_max
        while self._needy:
            _, horizon_ms, shard_id = self._needy[0]
            near_ms = horizon_ms - self._membership.now_ms()
            urgent = near_ms < _URGENT_MS
            if self.weight > (cap if urgent else cap * _ROOMY):
                if near_ms < _PRESSING_MS:
                    self._wake_at_weight = cap
                if urgent and self._fire_loop.waiting > self._half():
                    self._fire_loop.park(self._page_timers)
                return None  # asked again within a second, when there may be room
            heapq.heappop(self._needy)
            shard = self._shards.get(shard_id)
            # One that recovers fires nothing, and what it would load could not be forgotten again.
            if shard is not None and not (shard.loading or shard.dropped or shard.draining or shard.recovering):
                return shard
        return None

    async def _load(self, shards: list[Shard]) -> None:
        until_ms = self._membership.now_ms() + self._config.look_ahead.ms
        limit = max(self._page_timers // len(shards), _PAGE_TIMERS_MIN)
        pages: Sequence[Page | StoreError | None] = [None] * len(shards)
        try:
            pages = await self._store.load([PageRequest(s.shard_id, s.horizon, until_ms, limit) for s in shards])
        except StoreError as error:
            pages = [error] * len(shards)
            # One of them may be the reason: from now on each is loaded by itself, until that succeeds.
            self._deep.update(shard.shard_id for shard in shards)
        finally:
            for shard, page in zip(shards, pages, strict=True):
                self._loaded(shard, None if isinstance(page, StoreError) else page, until_ms)
        troubles = [page for page in pages if isinstance(page, StoreError)]
        if troubles:
            self._failure_log.failed(troubles[0], self._membership.boot_ms())
        else:
            self._failure_log.recovered()

    def _loaded(self, shard: Shard, page: Page | None, until_ms: int) -> None:
        shard.load_ended(page, until_ms)
        if page is None:
            self._failed_at_ms[shard.shard_id] = self._membership.boot_ms()
            return
        self._failed_at_ms.pop(shard.shard_id, None)
        self._deep.discard(shard.shard_id)
        if page.next is not None and not shard.dropped:
            self._deep.add(shard.shard_id)
            heapq.heappush(self._needy, self._need_of(shard))
            self._wake.set()
