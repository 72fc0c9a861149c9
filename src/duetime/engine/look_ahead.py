"""Look-ahead: loads timers before they are due, and removes timers from memory when there are too many.

Each shard holds in memory its timers up to its horizon. The horizon is kept between half a `look_ahead` and one
`look_ahead` from now; the shard with the nearest horizon is loaded first. When no shard has to be loaded for that, the
backlogs are loaded: overdue timers that are not in memory, the oldest first, as long as memory is half empty or few
timers wait.

Above `timers_in_memory_max` memory is reduced in three steps. The timers that are due last are removed (they are on
disk). Those of the remaining ones that are held and will not be called soon are parked. Of the
others, the largest flows of the largest namespaces give back their newest timers, to the backlogs of their shards.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence

from duetime.cluster.membership import Membership
from duetime.config import EngineConfig
from duetime.domain.timer import Position
from duetime.engine.counters import Counters
from duetime.engine.entry import Entry, Phase
from duetime.engine.fire_loop import FireLoop
from duetime.engine.shard import Shard, ShardState
from duetime.engine.weight import UNIT_BYTES, cuts
from duetime.engine.window import Load
from duetime.errors import StoreError
from duetime.store import Page, PageRequest, Store
from duetime.telemetry import FailureLog

__all__ = ["LookAhead"]

_PAGE_TIMERS_MAX = 1_000
_PAGE_TIMERS_MIN = 50
_LOADERS = 4
_BACKLOG_LOADS_MAX = 2  # at a time: there is always a loader for timers that are due soon
_SHARDS_PER_LOAD = 64  # shards with few timers are loaded together: thousands of idle shards must cost almost nothing
_TIMERS_PER_SHARD_MIN = 15  # in a load of several shards; those that have more are then loaded alone
_URGENT_MS = 5_000
_CRITICAL_MS = 2_000  # timers that are due within this time cannot wait for the next sweep
_LOAD_AHEAD_BELOW = 0.75  # of the limit: above it only urgent shards are loaded
_REDUCE_TO = 0.5  # of the limit
_LOAD_BACKLOG_BELOW = 0.5  # of the limit: above it a backlog is loaded only if few timers wait
_FEW_WAITING = 50
_KEEP_WAITING = 0.25  # of the limit: due timers that wait may use so much before they leave memory
_LOADS_SHARE = 1 / 8  # of the limit: payloads of all loads in flight
# Settlements that may wait when timers are parked. Each is a write: tens of thousands of them at once would stop all
# firing, and creates of other namespaces would be refused, until the store has written them.
_PARK_UNSETTLED_MAX = 2_000
_WAITED_MS = 1_000
_SLOW = 600  # if fewer than one in so many of the waiting timers were fired in a second, they are held
_ENTRIES_PER_STEP = 2_000  # that are looked at, or removed, before other work gets its turn


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
        self._limit = config.timers_in_memory_max * UNIT_BYTES
        self._to_load: list[tuple[int, int, int]] = []  # heap of (when its last load failed, horizon, shard)
        self._backlogs: list[tuple[int, Position, int]] = []  # heap of (when its last load failed, start, shard)
        self._backlog_loads = 0  # in flight
        # After timers were removed, no backlog is loaded until the next sweep. Otherwise the same timers could be
        # loaded and removed again and again.
        self._has_spilled = False
        self._waited = (0, 0)  # boot time at which a backlog had to wait, and how many timers waited then
        # By shard, until a load succeeds. They come last, and the one that failed last after the others: loads that
        # hang must not take the loaders from the shards that can be loaded.
        self._failed_at_ms: dict[int, int] = {}
        # Each of these shards is loaded in a call of its own: its last page was not the end, or the load failed.
        self._load_alone: set[int] = set()
        self._wake = asyncio.Event()
        self._reduce_above = self._limit
        self._reduction_scheduled = False
        self._page_timers = max(_PAGE_TIMERS_MIN, min(_PAGE_TIMERS_MAX, config.timers_in_memory_max // 10))
        self._page_chars = max(1, int(self._limit * _LOADS_SHARE) // _LOADERS)
        self._largest_row = 0  # characters of the largest payload that was loaded; it becomes smaller again
        self._wake_at_weight = -1  # a shard has to be loaded as soon as the weight is down to this; -1: none
        self._spill = asyncio.Event()  # waiting timers have to leave memory
        self._failure_log = FailureLog("cannot load timers that are due soon", "timers are loaded again")

    # --- the limit of memory ----------------------------------------------------------------------

    def add_weight(self, weight: int) -> None:
        """Count a timer that enters memory, or with a negative weight one that leaves it."""
        counters = self._counters
        counters.weight += weight
        if counters.weight > self._reduce_above and not self._reduction_scheduled:
            self._reduction_scheduled = True
            asyncio.get_running_loop().call_soon(self.reduce_memory)
        elif counters.weight <= self._wake_at_weight:
            self._wake_at_weight = -1
            self._wake.set()

    def reduce_memory(self) -> None:
        """Above the limit: remove the timers that are due last, then park due timers that cannot be delivered soon.
        What is still too much is removed by `_spill_waiting`."""
        self._reduction_scheduled = False
        if self._counters.weight > self._limit:
            self._reduce()
        self._set_next_reduction()

    def _set_next_reduction(self) -> None:
        """What could not leave memory now is tried again with the next sweep, or if much more is added."""
        weight = self._counters.weight
        self._reduce_above = self._limit if weight <= self._limit else weight + self._limit // 16

    def _reduce(self) -> None:
        tickets = sorted(self._fire_loop.armed_tickets())
        held = self._fire_loop.waiting
        target = self._target_timers()
        keep = max(0, target - held)
        if len(tickets) > keep:
            cutoff_ms = max(tickets[keep] >> 32, self._membership.now_ms() + _URGENT_MS)
            for shard in self._shards.values():
                shard.shrink(cutoff_ms)
        if self._counters.weight > self._limit:
            parked = self._park(held - target)
            if parked == 0 or parked < held - target:
                self._spill.set()

    def _park(self, count: int) -> int:
        """Park up to `count` timers, as many as the store can write soon. Returns how many."""
        free = _PARK_UNSETTLED_MAX - self._counters.unsettled
        return self._fire_loop.park(min(count, free)) if free > 0 else 0

    def _target_timers(self) -> int:
        """How many timers of the average weight make half of the limit."""
        timers = sum(len(shard.entries) for shard in self._shards.values())
        return int(self._limit * _REDUCE_TO * timers / max(1, self._counters.weight))

    async def _spills(self) -> None:
        while True:
            await self._spill.wait()
            self._spill.clear()
            self._has_spilled = True
            await self._spill_waiting()
            self._set_next_reduction()

    async def _spill_waiting(self) -> None:
        """Remove due timers that wait from memory: the newest ones of the largest flows. They are loaded again with the
        backlogs of their shards."""
        waiting: dict[str, dict[str, list[Entry]]] = {}  # by namespace and flow
        now_ms = self._membership.now_ms()
        looked_at = 0
        for shard in list(self._shards.values()):
            for entry in list(shard.entries.values()):
                looked_at += 1
                if looked_at % _ENTRIES_PER_STEP == 0:
                    await asyncio.sleep(0)
                if _is_waiting(entry, now_ms):
                    timer = entry.timer
                    waiting.setdefault(timer.namespace, {}).setdefault(timer.flow_key, []).append(entry)
        weights = {
            namespace: {key: sum(entry.weight for entry in entries) for key, entries in flows.items()}
            for namespace, flows in waiting.items()
        }
        of_namespaces = {namespace: sum(flows.values()) for namespace, flows in weights.items()}
        surplus = min(
            self._counters.weight - int(self._limit * _REDUCE_TO),
            sum(of_namespaces.values()) - int(self._limit * _KEEP_WAITING),
        )
        tickets = (entry.ticket for flows in waiting.values() for entries in flows.values() for entry in entries)
        oldest = min(tickets, default=0)  # it stays, however large it is: it is the next one
        removed = 0
        for namespace, of_namespace in cuts(of_namespaces, surplus).items():
            for key, of_flow in cuts(weights[namespace], of_namespace).items():
                for entry in _newest(waiting[namespace][key], of_flow):
                    removed += 1
                    if removed % _ENTRIES_PER_STEP == 0:
                        await asyncio.sleep(0)
                    if entry.ticket != oldest and _is_waiting(entry, now_ms):
                        entry.shard.spill(entry)

    def oldest_in_backlog_ms(self, now_ms: int) -> int | None:
        """For how long the earliest timer that is not in memory may have been due. None: no backlog is due."""
        starts = [shard.window.backlog.after for shard in self._shards.values() if shard.window.backlog is not None]
        oldest_ms = min(starts).execute_at_ms if starts else now_ms
        return now_ms - oldest_ms if oldest_ms < now_ms else None

    @property
    def backlogs(self) -> int:
        """How many shards have overdue timers that may not be in memory."""
        return sum(shard.window.backlog is not None for shard in self._shards.values())

    # --- loading ----------------------------------------------------------------------------------

    def find_shards_to_load(self) -> None:
        """Find the shards whose horizon is too near. Called every second, and after shards were claimed."""
        self._has_spilled = False
        near_ms = self._near_ms
        self._to_load = [
            self._load_priority(shard)
            for shard in self._shards.values()
            if shard.horizon.execute_at_ms < near_ms and not shard.loading
        ]
        heapq.heapify(self._to_load)
        self._backlogs = [
            self._backlog_priority(shard)
            for shard in self._shards.values()
            if shard.window.backlog is not None and not shard.loading
        ]
        heapq.heapify(self._backlogs)
        if self._to_load or self._backlogs:
            self._wake.set()

    @property
    def _near_ms(self) -> int:
        """A shard whose horizon is nearer has to be loaded."""
        return self._membership.now_ms() + self._config.look_ahead.ms // 2

    def _backlog_priority(self, shard: Shard) -> tuple[int, Position, int]:
        return self._failed_at_ms.get(shard.shard_id, 0), shard.window.complete_until, shard.shard_id

    def _load_priority(self, shard: Shard) -> tuple[int, int, int]:
        return self._failed_at_ms.get(shard.shard_id, 0), shard.horizon.execute_at_ms, shard.shard_id

    async def run(self) -> None:
        await asyncio.gather(self._spills(), *(self._load_pages() for _ in range(_LOADERS)))

    async def _load_pages(self) -> None:
        while True:
            await self._wake.wait()
            loads = self._take_next() or self._take_next_backlogs()
            if not loads:
                self._wake.clear()
                continue
            await self._load(loads)

    def _take_next(self) -> list[tuple[Shard, Load]]:
        """The shards of the next load: one that is loaded alone, or several others together."""
        until_ms = self._membership.now_ms() + self._config.look_ahead.ms
        loads: list[tuple[Shard, Load]] = []
        while len(loads) < self._shards_max and not (
            loads and self._to_load and self._to_load[0][2] in self._load_alone
        ):
            shard = self._pop_next()
            if shard is None:
                break
            loads.append((shard, shard.begin_load(until_ms)))
            if shard.shard_id in self._load_alone:
                break
        return loads

    @property
    def _shards_max(self) -> int:
        """How many shards are loaded together: a page has at least one row, and a row may be large."""
        return max(
            1,
            min(
                _SHARDS_PER_LOAD,
                self._page_timers // _TIMERS_PER_SHARD_MIN,
                self._page_chars // max(1, self._largest_row),
            ),
        )

    def _take_next_backlogs(self) -> list[tuple[Shard, Load]]:
        """The shards whose backlogs are loaded next: those that begin first."""
        loads: list[tuple[Shard, Load]] = []
        if self._backlog_loads >= _BACKLOG_LOADS_MAX:
            return loads
        while self._backlogs and len(loads) < self._shards_max and self._may_load_backlog():
            failed_at_ms, _, shard_id = self._backlogs[0]
            if failed_at_ms and loads:
                break
            heapq.heappop(self._backlogs)
            shard = self._shards.get(shard_id)
            if shard is not None and shard.window.backlog is not None and _may_load(shard):
                loads.append((shard, shard.begin_load(0, backlog=True)))
                if failed_at_ms:
                    break
        return loads

    def _may_load_backlog(self) -> bool:
        """A backlog must not take the memory that timers that are due soon need. It waits until the timers that wait
        have become few; those of flows that are held are parked, or the others behind them would wait for ever."""
        weight, waiting = self._counters.weight, self._fire_loop.waiting
        threshold = int(self._limit * _LOAD_BACKLOG_BELOW)
        if self._has_spilled:
            return False
        if weight <= threshold or (weight <= self._limit and waiting < _FEW_WAITING):
            return True
        self._wake_at_weight = max(self._wake_at_weight, threshold)
        now_ms = self._membership.boot_ms()
        since_ms, before = self._waited
        if now_ms - since_ms >= _WAITED_MS:
            self._waited = (now_ms, waiting)
            if now_ms - since_ms < 3 * _WAITED_MS and waiting >= before - before // _SLOW:
                self._park(max(self._page_timers, waiting // 2))
        return False

    def _pop_next(self) -> Shard | None:
        limit = self._limit
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
                    self._park(self._page_timers)
                return None  # tried again with the next sweep, when there may be fewer timers in memory
            heapq.heappop(self._to_load)
            shard = self._shards.get(shard_id)
            if shard is not None and _may_load(shard):
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

    async def _load(self, loads: list[tuple[Shard, Load]]) -> None:
        is_backlog = loads[0][1].is_backlog
        timers_max = max(self._page_timers // len(loads), _TIMERS_PER_SHARD_MIN)
        chars_max = max(1, self._page_chars // len(loads))
        requests = [
            PageRequest(shard.shard_id, load.after, load.until.execute_at_ms, timers_max, chars_max)
            for shard, load in loads
        ]
        pages: Sequence[Page | StoreError | None] = [None] * len(loads)
        self._backlog_loads += is_backlog
        try:
            pages = await self._store.load(requests)
        except StoreError as error:
            pages = [error] * len(loads)
            # One of them may be the reason: from now on each is loaded alone, until that succeeds.
            self._load_alone.update(shard.shard_id for shard, _ in loads)
        finally:
            self._backlog_loads -= is_backlog
            self._largest_row //= 2
            for (shard, _), page in zip(loads, pages, strict=True):
                self._loaded(shard, None if isinstance(page, StoreError) else page, is_backlog=is_backlog)
        errors = [page for page in pages if isinstance(page, StoreError)]
        if errors:
            self._failure_log.failed(errors[0], self._membership.boot_ms())
        else:
            self._failure_log.recovered()

    def _loaded(self, shard: Shard, page: Page | None, *, is_backlog: bool) -> None:
        shard.end_load(page, self._membership.now_ms())
        if page is None:
            self._failed_at_ms[shard.shard_id] = self._membership.boot_ms()
            return
        self._largest_row = max(self._largest_row, max((len(t.payload) for t in page.timers if t.payload), default=0))
        self._failed_at_ms.pop(shard.shard_id, None)
        if shard.dropped:
            self._load_alone.discard(shard.shard_id)
            return
        if shard.window.backlog is not None:
            heapq.heappush(self._backlogs, self._backlog_priority(shard))
        if self._backlogs:
            self._wake.set()  # this loader may load one of them
        if is_backlog:
            if shard.horizon.execute_at_ms < self._near_ms:
                # A backlog may be loaded without a break, and every sweep finds this shard loading.
                heapq.heappush(self._to_load, self._load_priority(shard))
                self._wake.set()
            return
        self._load_alone.discard(shard.shard_id)
        if page.next is not None:
            self._load_alone.add(shard.shard_id)
            heapq.heappush(self._to_load, self._load_priority(shard))
            self._wake.set()


def _may_load(shard: Shard) -> bool:
    """A shard that recovers fires nothing, and `shrink` could not remove what it would load."""
    return not (shard.loading or shard.state is not ShardState.OPEN or shard.recovering)


def _is_waiting(entry: Entry, now_ms: int) -> bool:
    """Is it held, or due and not fired yet?"""
    phase = entry.phase
    return phase is Phase.QUEUED or (phase is Phase.ARMED and entry.timer.execute_at_ms <= now_ms)


def _newest(entries: list[Entry], weight: int) -> list[Entry]:
    """The newest of these entries that together weigh so much."""
    ordered = sorted(entries, key=lambda entry: entry.ticket)
    newest: list[Entry] = []
    while weight > 0:
        newest.append(ordered.pop())
        weight -= newest[-1].weight
    return newest
