"""PORT: what Duetime needs of a database, and nothing more.

A store is a shared, durable place for shards of timers. It decides nothing: ownership, time and
retries are the engine's. What it must give is one thing, and it must give it absolutely:

    A write to a shard happens, whole, if and only if the shard row still carries the writer's fence
    at the moment of the write; otherwise nothing of it happens.

Time comes in as a value; there is no clock in a store, but for `heartbeat`, which reports the
database's own so that skew can be seen. Batches are the normal case. An adapter raises only the
StoreErrors of errors.py, and on a write anything it cannot classify is OutcomeUnknown. A timer or a namespace that
cannot be decoded is not an error of the call: it is left out and reported as described below; the rest is answered.

`duetime.testing.conformance` is the definition in executable form, `stores/memory.py` the shortest
implementation.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

from msgspec import Struct

from duetime.domain.timer import BEFORE_ALL, Namespace, Outcome, Position, Reached, Timer, TimerKey
from duetime.errors import DuetimeError, OutcomeUnknown, SetupError, ShardLost, StoreError, StoreUnavailable
from duetime.telemetry import log

__all__ = [
    "Batch",
    "Capabilities",
    "Claim",
    "Committed",
    "Fence",
    "Found",
    "GuardedStore",
    "ListQuery",
    "Listing",
    "Member",
    "Page",
    "PageRequest",
    "ShardRow",
    "Store",
    "Unreadable",
    "guarded",
    "open_store",
]


class Capabilities(Struct, frozen=True, kw_only=True):
    """How a store likes to be used. The only difference between stores that anything else may see."""

    name: str
    batch_max: int  # rows in one commit call: puts, deletes and reached, all shards together
    batch_chars_max: int = 8 * 1024 * 1024  # of all rows in one commit call, about; a single larger one is let through
    payload_bytes_max: int
    parallel_commits: int  # commits that may usefully be in flight at once
    clock_error_ms: int = 0  # how far the time that `heartbeat` answers may be off the database's clock
    exclusive: bool = False  # an open store is used by no other process: whoever was here before is dead
    durable: bool = True


class Fence(Struct, frozen=True, gc=False):
    """Proof of ownership, checked inside every write."""

    shard_id: int
    version: int
    nonce: int  # random, signed 64 bits: tells two claims of one version apart after a failover lost commits


class ShardRow(Struct, frozen=True):
    """The ownership row of a shard. `owner_id is None`: free."""

    shard_id: int
    version: int = 0
    nonce: int = 0
    owner_id: str | None = None
    owner_address: str | None = None
    claimed_at_ms: int = 0
    low_water: Position = BEFORE_ALL  # no timer of the shard is stored before this

    @property
    def fence(self) -> Fence:
        return Fence(self.shard_id, self.version, self.nonce)


class Claim(Struct, frozen=True):
    """A wish to own a shard: succeeds if its version is still `expected_version`, and makes it one more."""

    shard_id: int
    expected_version: int
    nonce: int
    owner_id: str
    owner_address: str
    now_ms: int


class Batch(Struct, frozen=True):
    """What one commit does to one shard. A timer is named at most once in `puts` and `deletes` together.

    `puts`     replace whatever timer is stored under the same namespace and id, wherever it stands;
    `deletes`  remove the timer stored under that key; absent is fine;
    `reached`  are added as they are; adding the same one again changes nothing;
    `low_water`, if set, replaces the shard's.
    """

    fence: Fence
    puts: Sequence[Timer] = ()
    deletes: Sequence[TimerKey] = ()
    reached: Sequence[Reached] = ()
    low_water: Position | None = None


class Committed(Struct, frozen=True):
    """A batch that is on disk. `replaced`: indexes of those puts that found a timer and replaced it."""

    replaced: frozenset[int] = frozenset()


class PageRequest(Struct, frozen=True):
    """A wish to load: timers of a shard with `after < position` and `execute_at_ms <= until_ms`, in order."""

    shard_id: int
    after: Position
    until_ms: int
    limit: int


class Unreadable(Struct, frozen=True):
    """A stored timer that this version cannot decode. Its row is not changed, and it does not fire."""

    position: Position
    namespace: str  # as far as it can be read; "" if not
    timer_id: str
    error: str  # short, one line, no payload content


class Page(Struct, frozen=True):
    """A stretch of timers in order. `next is None`: the range is exhausted; an empty page alone says nothing.

    A row that cannot be decoded is in `unreadable` and not in `timers`; `next` moves past it like past any other.
    """

    timers: Sequence[Timer]
    next: Position | None
    unreadable: Sequence[Unreadable] = ()


class Found(Struct, frozen=True):
    """What is stored under a key: the timer, and the newest of its reached rows (by generation, then time).

    A reached row that cannot be decoded counts as absent: the newest of the others is answered.
    """

    timer: Timer | None = None
    reached: Reached | None = None
    unreadable: str | None = None  # why the timer that is stored there cannot be decoded; then `timer` is None


class ListQuery(Struct, frozen=True, kw_only=True):
    """A filtered look at one namespace, in the order of positions over all its shards.

    `outcomes` empty: scheduled timers, positions and due range by execute_at. Otherwise reached timers
    with one of those outcomes, positions by purge time, due range by scheduled_at.
    """

    namespace: str
    num_shards: int
    after: Position = BEFORE_ALL
    limit: int = 100
    outcomes: frozenset[Outcome] = frozenset()
    due_from_ms: int | None = None  # inclusive
    due_until_ms: int | None = None  # exclusive
    id_prefix: str | None = None
    tag: str | None = None
    correlation_id: str | None = None


class Listing(Struct, frozen=True):
    """A page of a list. A store bounds its work: a page may be short or empty and still have a `next`.

    Rows that cannot be decoded are left out and counted in `unreadable`; `next` moves past them.
    """

    timers: Sequence[Timer] = ()
    reached: Sequence[Reached] = ()
    next: Position | None = None
    unreadable: int = 0


class Member(Struct, frozen=True):
    """An instance of the cluster. Dead never comes back; a member without a row is dead."""

    instance_id: str
    address: str
    counter: int
    alive: bool
    joined_at_ms: int
    secret: str = ""  # what the others sign with when they speak to it; whoever reads the database may


class Store(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    # -- life: open() connects and refuses a schema it does not know; migrate() makes or updates it,
    #    under a lock, so that many instances may start at once.
    async def migrate(self) -> None: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...

    # -- members
    async def join(self, member: Member) -> None: ...
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """Raise the member's counter if it is alive and answer the database's time; else MemberDead."""
        ...

    async def members(self) -> list[Member]: ...
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        """Declare a member dead if its counter is still that; True if it is dead now."""
        ...

    async def forget_member(self, instance_id: str) -> None:
        """Remove the row of a dead member; a living one stays."""
        ...

    # -- shards
    async def ensure_shards(self, count: int) -> None:
        """Make the ownership rows of shards 0 … count-1 that are missing."""
        ...

    async def shards(self) -> list[ShardRow]:
        """All of them, by id."""
        ...

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        """The rows as they stand afterwards, in the order of the claims: those with your nonce are yours."""
        ...

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        """Give shards back: free, same version. Fenced like any write."""
        ...

    # -- timers
    async def commit(self, batches: Sequence[Batch]) -> Sequence[Committed | StoreError]:
        """Write each batch whole or, if its fence fails, not at all; one result for each, in order.

        Where batches are written one by one, the error of one is its result, and leaves the others alone. An error
        that is raised is that of all of them.
        """
        ...

    async def load(self, requests: Sequence[PageRequest]) -> Sequence[Page | StoreError]:
        """A page for each, in the order asked; sees every commit that was acknowledged before the call. As in commit,
        the error of one may be its answer."""
        ...

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        """What is stored under (shard, key), in the order asked."""
        ...

    async def list_timers(self, query: ListQuery) -> Listing: ...

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> Sequence[int | StoreError]:
        """Remove up to `limit` reached rows of each shard with `purge_at_ms < before_ms`; how many were. Fenced. As in
        commit, the error of one may be its answer."""
        ...

    # -- namespaces
    async def namespaces(self) -> list[Namespace]:
        """All of them by name, the deleted ones too. One that cannot be decoded is left out and logged."""
        ...

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        """Write it if the stored revision is the expected one (None: if there is none); did it?"""
        ...


_READS = frozenset({"shards", "load", "get_many", "list_timers", "members", "namespaces"})


class GuardedStore:
    """A Store that raises StoreErrors only, whatever the adapter or its driver raises.

    An unexpected error of an adapter must not end a loop of the engine. After such an error of a write it is not known
    whether it was applied.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(member):
            return member

        async def call(*args: Any) -> Any:
            try:
                return await member(*args)
            except DuetimeError:
                raise
            except Exception as error:
                log.exception("unexpected error in store call %s", name)
                what = f"unexpected error in store call {name}: {error!r}"
                raise (StoreUnavailable(what) if name in _READS else OutcomeUnknown(what)) from error

        return call


def guarded(store: Store) -> Store:
    return store if isinstance(store, GuardedStore) else cast(Store, GuardedStore(store))


_ADAPTERS = {
    "sqlite": "duetime.stores.sqlite.store:SqliteStore",
    "memory": "duetime.stores.memory:MemoryStore",
    "postgresql": "duetime.stores.postgres.store:PostgresStore",
    "postgres": "duetime.stores.postgres.store:PostgresStore",
    "mysql": "duetime.stores.mysql.store:MySqlStore",
    "mariadb": "duetime.stores.mysql.store:MySqlStore",
    "tidb": "duetime.stores.mysql.store:MySqlStore",
    "cassandra": "duetime.stores.cassandra.store:CassandraStore",
    "mongodb": "duetime.stores.mongodb.store:MongoStore",
    "mongodb+srv": "duetime.stores.mongodb.store:MongoStore",
    "dynamodb": "duetime.stores.dynamodb.store:DynamoStore",
    "oracle": "duetime.stores.oracle.store:OracleStore",
    "sqlserver": "duetime.stores.sqlserver.store:SqlServerStore",
}


def open_store(url: str) -> Store:
    """The adapter for a store URL, not yet opened. Only the module that is needed gets imported."""
    scheme = urlsplit(url).scheme
    target = _ADAPTERS.get(scheme)
    if target is None:
        raise SetupError(
            f"store.url: no adapter for {scheme or url!r}; known are {', '.join(sorted(_ADAPTERS))}", field="store.url"
        )
    module, _, name = target.partition(":")
    adapter = getattr(importlib.import_module(module), name)
    return cast(Store, adapter.from_url(url))
