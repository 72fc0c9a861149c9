"""MemoryStore: the executable specification of store.py, and the store of the simulator.

Everything is in dicts. No call awaits anything, so each call is atomic, and any number of engines can share one object.
Every adapter must return what this one returns; the conformance suite compares them.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence, Set
from copy import deepcopy
from typing import Any, Self, TypeVar, cast

from msgspec.structs import replace

from duetime.clock import Clock, SystemClock
from duetime.domain.timer import Namespace, Position, Reached, Timer, TimerKey
from duetime.errors import FailedOver, MemberDead, ShardLost
from duetime.store import (
    Batch,
    Capabilities,
    Claim,
    Committed,
    Diagnosis,
    Fence,
    Found,
    Listing,
    ListQuery,
    Member,
    Page,
    PageRequest,
    ShardRow,
    Unreadable,
)
from duetime.stores.fencing import lost
from duetime.stores.rows import log_unreadable_namespace, payload_chars, rows_of_page, without_payload

__all__ = ["MemoryStore"]

SPOILT = "made unreadable by a test"


class MemoryStore:
    capabilities = Capabilities(
        name="memory", batch_max=10_000, payload_bytes_max=16 * 1024 * 1024, parallel_commits=1, durable=False
    )

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._members: dict[str, Member] = {}
        self._namespaces: dict[str, Namespace] = {}
        self._shards: dict[int, _Shard] = {}
        self._spoilt_namespaces: set[str] = set()
        self._timeline = 0
        self._joined_on: dict[str, int] = {}  # not part of a snapshot, like the memory of a client

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls()

    async def migrate(self) -> None:
        pass

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def diagnose(self) -> Diagnosis:
        return Diagnosis()

    def snapshot(self) -> object:
        """For tests: a copy of everything, to which `restore` returns."""
        return deepcopy((self._members, self._namespaces, self._shards))

    def restore(self, snapshot: object) -> None:
        """A failover: what was acknowledged since the snapshot is lost. The next heartbeats raise FailedOver."""
        self._timeline += 1
        self._members, self._namespaces, self._shards = cast(Any, deepcopy(snapshot))

    # -- members

    async def join(self, member: Member) -> None:
        """A second join changes nothing, so a join whose answer was lost can be repeated. A dead member stays dead."""
        if not self._members.setdefault(member.instance_id, member).alive:
            raise MemberDead(f"{member.instance_id} was declared dead")
        self._joined_on[member.instance_id] = self._timeline

    async def heartbeat(self, instance_id: str, counter: int) -> int:
        member = self._members.get(instance_id)
        if member is None or not member.alive:
            raise MemberDead(f"{instance_id} was declared dead")
        if self._joined_on[instance_id] != self._timeline:
            raise FailedOver
        self._members[instance_id] = replace(member, counter=max(member.counter, counter))
        return self._clock.wall_ms()

    async def members(self) -> list[Member]:
        return sorted(self._members.values(), key=lambda member: member.instance_id)

    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        member = self._members.get(instance_id)
        if member is None or not member.alive:
            return True
        if member.counter != counter:
            return False
        self._members[instance_id] = replace(member, alive=False)
        return True

    async def forget_member(self, instance_id: str) -> None:
        member = self._members.get(instance_id)
        if member is not None and not member.alive:
            del self._members[instance_id]

    # -- shards

    async def ensure_shards(self, count: int) -> None:
        for shard_id in range(count):
            self._shards.setdefault(shard_id, _Shard(ShardRow(shard_id)))

    async def shards(self) -> list[ShardRow]:
        return [self._shards[shard_id].row for shard_id in sorted(self._shards)]

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        for claim in claims:
            shard = self._shards.get(claim.shard_id)
            if shard is not None and shard.row.version == claim.expected_version:
                shard.row = ShardRow(
                    claim.shard_id,
                    claim.expected_version + 1,
                    claim.nonce,
                    claim.owner_id,
                    claim.owner_address,
                    claim.now_ms,
                    shard.row.low_water,
                )
        return [self._row(claim.shard_id) for claim in claims]

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return [self._release(fence) for fence in fences]

    def _release(self, fence: Fence) -> ShardLost | None:
        shard = self._owned(fence)
        if isinstance(shard, ShardLost):
            return shard
        shard.row = ShardRow(fence.shard_id, fence.version, low_water=shard.row.low_water)
        return None

    def _row(self, shard_id: int) -> ShardRow:
        shard = self._shards.get(shard_id)
        return ShardRow(shard_id) if shard is None else shard.row

    def _owned(self, fence: Fence) -> _Shard | ShardLost:
        """The fence is valid if the shard has an owner, and its version and nonce are those of the fence."""
        shard = self._shards.get(fence.shard_id)
        if shard is None or shard.row.owner_id is None or shard.row.fence != fence:
            return lost(fence)
        return shard

    # -- timers

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        return [self._commit(batch) for batch in batches]

    def _commit(self, batch: Batch) -> Committed | ShardLost:
        shard = self._owned(batch.fence)
        if isinstance(shard, ShardLost):
            return shard
        for key in batch.deletes:
            shard.delete(key)
        replaced = frozenset(index for index, timer in enumerate(batch.puts) if shard.delete(timer.key))
        for timer in batch.puts:
            shard.put(timer)
        for reached in batch.reached:
            shard.add_reached(reached)
        if batch.low_water is not None:
            shard.row = replace(shard.row, low_water=batch.low_water)
        return Committed(replaced)

    def spoil_timer(self, shard_id: int, key: TimerKey) -> None:
        """For tests: make a stored timer undecodable, until it is replaced or deleted."""
        self._shards[shard_id].spoilt[self._shards[shard_id].timers[key].position] = SPOILT

    def spoil_reached(self, shard_id: int, reached: Reached) -> None:
        """For tests: make a reached row undecodable."""
        self._shards[shard_id].spoilt_reached.add(reached.position)

    def spoil_namespace(self, name: str) -> None:
        """For tests: make a namespace undecodable."""
        self._spoilt_namespaces.add(name)

    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        return [self._load(request) for request in requests]

    def _load(self, request: PageRequest) -> Page:
        shard = self._shards.get(request.shard_id)
        if shard is None:
            return Page((), None)
        start = bisect_right(shard.order, request.after)
        page = [shard.at[position] for position in shard.order[start : start + request.limit + 1]]
        timers = [timer for timer in page if timer.execute_at_ms <= request.until_ms]
        count = rows_of_page((payload_chars(timer) for timer in timers[: request.limit]), request.chars_max)
        after = None if len(timers) <= count else timers[count - 1].position
        return shard.without_spoilt(timers[:count], after)

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return [self._get(shard_id, key) for shard_id, key in keys]

    def _get(self, shard_id: int, key: TimerKey) -> Found:
        shard = self._shards.get(shard_id)
        if shard is None:
            return Found()
        ended = [r for at, r in shard.reached.get(key, {}).items() if at not in shard.spoilt_reached]
        newest = max(ended, key=lambda r: (r.timer.generation, r.reached_at_ms, r.position), default=None)
        timer = shard.timers.get(key)
        if timer is not None and timer.position in shard.spoilt:
            return Found(None, newest, shard.spoilt[timer.position])
        return Found(timer, newest)

    async def list_timers(self, query: ListQuery) -> Listing:
        shards = [self._shards[shard_id] for shard_id in range(query.num_shards) if shard_id in self._shards]
        if query.outcomes:
            ended = (r for shard in shards for r in shard.all_reached() if r.outcome in query.outcomes)
            spoilt = {position for shard in shards for position in shard.spoilt_reached}
            found = (r for r in ended if _matches(query, r.timer, r.timer.scheduled_at_ms))
            reached, after, unreadable = _page(found, query, spoilt)
            return Listing(reached=reached, next=after, unreadable=unreadable)
        waiting = (timer for shard in shards for timer in shard.timers.values())
        spoilt = {position for shard in shards for position in shard.spoilt}
        timers, after, unreadable = _page((t for t in waiting if _matches(query, t, t.execute_at_ms)), query, spoilt)
        return Listing(timers=timers, next=after, unreadable=unreadable)

    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        shards = self._shards.values()
        timers = [timer for shard in shards for timer in shard.timers.values()]
        timers += [reached.timer for shard in shards for reached in shard.all_reached()]
        found = (timer.namespace for timer in timers if timer.correlation_id == correlation_id)
        return min((name for name in found if name > after), default=None)

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return [self._purge(fence, before_ms, limit) for fence in fences]

    def _purge(self, fence: Fence, before_ms: int, limit: int) -> int | ShardLost:
        shard = self._owned(fence)
        if isinstance(shard, ShardLost):
            return shard
        expired = sorted((r.position, r.timer.key) for r in shard.all_reached() if r.purge_at_ms < before_ms)[:limit]
        for position, key in expired:
            del shard.reached[key][position]
            shard.spoilt_reached.discard(position)
        return len(expired)

    # -- namespaces

    async def namespaces(self) -> list[Namespace]:
        for name in self._spoilt_namespaces:
            log_unreadable_namespace(name, SPOILT)
        return [self._namespaces[name] for name in sorted(self._namespaces) if name not in self._spoilt_namespaces]

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        stored = self._namespaces.get(namespace.name)
        if (None if stored is None else stored.revision) != expected_revision:
            return False
        self._namespaces[namespace.name] = namespace
        self._spoilt_namespaces.discard(namespace.name)
        return True


class _Shard:
    """One shard: its row, its timers by key and ordered by position, and its reached rows."""

    def __init__(self, row: ShardRow) -> None:
        self.row = row
        self.timers: dict[TimerKey, Timer] = {}
        self.order: list[Position] = []
        self.at: dict[Position, Timer] = {}
        self.reached: dict[TimerKey, dict[Position, Reached]] = {}
        self.spoilt: dict[Position, str] = {}  # timers that cannot be decoded, and why
        self.spoilt_reached: set[Position] = set()

    def put(self, timer: Timer) -> None:
        self.timers[timer.key] = self.at[timer.position] = timer
        insort(self.order, timer.position)

    def delete(self, key: TimerKey) -> bool:
        timer = self.timers.pop(key, None)
        if timer is None:
            return False
        del self.at[timer.position]
        self.spoilt.pop(timer.position, None)
        del self.order[bisect_right(self.order, timer.position) - 1]
        return True

    def without_spoilt(self, timers: list[Timer], after: Position | None) -> Page:
        if not self.spoilt:
            return Page(timers, after)
        spoilt = [
            Unreadable(timer.position, timer.namespace, timer.timer_id, self.spoilt[timer.position])
            for timer in timers
            if timer.position in self.spoilt
        ]
        return Page([timer for timer in timers if timer.position not in self.spoilt], after, spoilt)

    def add_reached(self, reached: Reached) -> None:
        self.reached.setdefault(reached.timer.key, {}).setdefault(reached.position, reached)

    def all_reached(self) -> Iterable[Reached]:
        return (reached for ended in self.reached.values() for reached in ended.values())


def _matches(query: ListQuery, timer: Timer, due_ms: int) -> bool:
    return (
        timer.namespace == query.namespace
        and (query.due_from_ms is None or query.due_from_ms <= due_ms)
        and (query.due_until_ms is None or due_ms < query.due_until_ms)
        and (query.id_prefix is None or timer.timer_id.startswith(query.id_prefix))
        and (query.tag is None or query.tag in timer.extras.tags)
        and (query.correlation_id is None or timer.correlation_id == query.correlation_id)
    )


_Item = TypeVar("_Item", Timer, Reached)


def _page(found: Iterable[_Item], query: ListQuery, spoilt: Set[Position]) -> tuple[list[_Item], Position | None, int]:
    """The items of a page, where the next one begins, and how many rows were left out because they are undecodable."""
    page: list[_Item] = []
    after, unreadable, chars = query.after, 0, 0
    for item in sorted((item for item in found if item.position > query.after), key=lambda item: item.position):
        if len(page) == query.limit or chars > query.chars_max:
            return page, after, unreadable
        after = item.position
        if after in spoilt:
            unreadable += 1
            continue
        listed = item if query.payloads else without_payload(item)
        chars += payload_chars(listed)
        page.append(listed)
    return page, None, unreadable
