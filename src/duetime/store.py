"""PORT: what Duetime needs of a database.

A store keeps shards of timers, durable and shared by all instances. It makes no decisions: the engine decides about
ownership, time and retries. A store must guarantee one thing:

    A write to a shard is applied completely if the shard row has the fence of the writer at the moment of the write.
    Otherwise nothing of it is applied.

Time is passed in as a value. A store has no clock, except that `heartbeat` returns the time of the database, so that
clock skew can be measured. Calls take batches. An adapter raises only the StoreErrors of errors.py; on a write, an
error that it cannot classify is OutcomeUnknown. A timer or a namespace that cannot be decoded does not make the call
fail: it is left out and reported as described below.

`duetime.testing.conformance` is the executable definition, `stores/memory.py` the shortest implementation.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any, Protocol, cast

from msgspec import Struct

from duetime.domain.timer import BEFORE_ALL, Namespace, Outcome, Position, Reached, Timer, TimerKey
from duetime.errors import DuetimeError, OutcomeUnknown, SetupError, ShardLost, StoreError, StoreUnavailable
from duetime.telemetry import log

__all__ = [
    "NO_CHARS_MAX",
    "Batch",
    "Capabilities",
    "Claim",
    "Committed",
    "Danger",
    "Diagnosis",
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


NO_CHARS_MAX = 2**62


class Capabilities(Struct, frozen=True, kw_only=True):
    """The limits of a store. These are the only differences between stores that other packages may depend on."""

    name: str
    batch_max: int  # rows in one commit call: puts, deletes and reached of all shards
    batch_chars_max: int = 8 * 1024 * 1024  # of all rows in one commit call, estimated; a single larger row is allowed
    payload_bytes_max: int
    parallel_commits: int  # commits that may usefully be in flight at once
    clock_error_ms: int = 0  # largest error of the time that `heartbeat` returns
    exclusive: bool = False  # no other process can use an open store: all earlier members are dead
    durable: bool = True


class Fence(Struct, frozen=True, gc=False):
    """Proof of ownership, checked in every write."""

    shard_id: int
    version: int
    nonce: int  # random, signed 64 bits: distinguishes two claims of one version, after a failover that lost commits


class ShardRow(Struct, frozen=True):
    """The ownership row of a shard. `owner_id is None`: the shard is free."""

    shard_id: int
    version: int = 0
    nonce: int = 0
    owner_id: str | None = None
    owner_address: str | None = None
    claimed_at_ms: int = 0
    low_water: Position = BEFORE_ALL  # no timer of the shard is stored before this position

    @property
    def fence(self) -> Fence:
        return Fence(self.shard_id, self.version, self.nonce)


class Claim(Struct, frozen=True):
    """A request to own a shard. It succeeds if the version is `expected_version`, and increases the version by one."""

    shard_id: int
    expected_version: int
    nonce: int
    owner_id: str
    owner_address: str
    now_ms: int


class Batch(Struct, frozen=True):
    """What one commit does to one shard. A timer occurs at most once in `puts` and `deletes` together.

    `puts`     replace the timer that is stored under the same namespace and id, whatever its position;
    `deletes`  remove the timer that is stored under that key, if there is one;
    `reached`  are added; adding the same one again changes nothing;
    `low_water`, if set, replaces that of the shard.
    """

    fence: Fence
    puts: Sequence[Timer] = ()
    deletes: Sequence[TimerKey] = ()
    reached: Sequence[Reached] = ()
    low_water: Position | None = None


class Committed(Struct, frozen=True):
    """A batch that is on disk. `replaced`: indexes of the puts that replaced a stored timer."""

    replaced: frozenset[int] = frozenset()


class PageRequest(Struct, frozen=True):
    """Asks for the timers of a shard with `after < position` and `execute_at_ms <= until_ms`, ordered by position."""

    shard_id: int
    after: Position
    until_ms: int
    limit: int
    chars_max: int = NO_CHARS_MAX  # see Page


class Unreadable(Struct, frozen=True):
    """A stored timer that this version cannot decode. Its row is not changed, and it does not fire."""

    position: Position
    namespace: str  # as far as it can be read; "" if not
    timer_id: str
    error: str  # short, one line, no payload content


class Page(Struct, frozen=True):
    """Timers ordered by position. `next is None`: there are no more. An empty page may have a `next`.

    A page ends at the latest after the row with which the characters of its payloads exceed `chars_max`; it has at
    least one row if there is one. It may end earlier: a store may count bytes, and has limits of its own. While a page
    is read, the store holds no more payloads in memory than a few times that, as far as its driver allows.

    A row that cannot be decoded is in `unreadable` and not in `timers`; `next` is after it as after any other row.
    """

    timers: Sequence[Timer]
    next: Position | None
    unreadable: Sequence[Unreadable] = ()


class Found(Struct, frozen=True):
    """What is stored under a key: the timer, and the newest of its reached rows (by generation, then time).

    A reached row that cannot be decoded is ignored: the newest of the others is returned.
    """

    timer: Timer | None = None
    reached: Reached | None = None
    unreadable: str | None = None  # why the stored timer cannot be decoded; `timer` is None then


class ListQuery(Struct, frozen=True, kw_only=True):
    """Asks for timers of one namespace that match a filter, ordered by position over all shards.

    If `outcomes` is empty: scheduled timers; positions and the due range are by execute_at. Otherwise: reached timers
    with one of these outcomes; positions are by purge time, the due range is by scheduled_at.

    A listing ends at `chars_max` like a page of a load. If `payloads` is False, the timers have no payload, and a store
    does not read it if its database can leave it out.
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
    chars_max: int = NO_CHARS_MAX
    payloads: bool = True


class Listing(Struct, frozen=True):
    """A page of a list. A store limits the rows it reads for one: a short or empty page may have a `next`.

    Rows that cannot be decoded are left out and counted in `unreadable`; `next` is after them.
    """

    timers: Sequence[Timer] = ()
    reached: Sequence[Reached] = ()
    next: Position | None = None
    unreadable: int = 0


class Member(Struct, frozen=True):
    """An instance of the cluster. A dead member never becomes alive again; a member without a row is dead."""

    instance_id: str
    address: str
    counter: int
    alive: bool
    joined_at_ms: int
    secret: str = ""  # with which other instances sign their requests to it; readable by all who can read the database


class Danger(Struct, frozen=True):
    """A setting of the database with which acknowledged timers can be lost."""

    problem: str
    consequence: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.consequence}"


class Diagnosis(Struct, frozen=True):
    """What `duetime doctor` reports about a database server. Each fact is a short phrase."""

    facts: Sequence[str] = ()
    dangers: Sequence[Danger] = ()


class Store(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    # -- open and close. open() connects and raises SchemaMismatch for an unknown schema. migrate() creates or updates
    #    the schema under a lock, so that many instances can start at the same time.
    async def migrate(self) -> None: ...
    async def open(self) -> None: ...
    async def close(self) -> None: ...
    async def diagnose(self) -> Diagnosis:
        """Describes the database server. The store need not be open. Nothing to report: an empty Diagnosis."""
        ...

    # -- members
    async def join(self, member: Member) -> None: ...
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """Increases the counter of the member and returns the time of the database. MemberDead if it is not alive."""
        ...

    async def members(self) -> list[Member]: ...
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        """Declares a member dead if its counter has this value. Returns whether it is dead now."""
        ...

    async def forget_member(self, instance_id: str) -> None:
        """Removes the row of a member if it is dead."""
        ...

    # -- shards
    async def ensure_shards(self, count: int) -> None:
        """Creates those ownership rows of shards 0 … count-1 that are missing."""
        ...

    async def shards(self) -> list[ShardRow]:
        """All ownership rows, ordered by id."""
        ...

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        """Returns the rows after the claims, in the order of the claims. A claim succeeded if the row has its nonce."""
        ...

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        """Makes shards free; their version does not change. Fenced like any write."""
        ...

    # -- timers
    async def commit(self, batches: Sequence[Batch]) -> Sequence[Committed | StoreError]:
        """Applies each batch completely or, if its fence fails, not at all. One result for each, in order.

        Where batches are written separately, the error of one is its result and does not affect the others. An error
        that is raised applies to all batches.
        """
        ...

    async def load(self, requests: Sequence[PageRequest]) -> Sequence[Page | StoreError]:
        """Returns a page for each request, in order. Sees every commit that was acknowledged before the call. As in
        commit, the error of one request may be its result."""
        ...

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        """Returns what is stored under each (shard, key), in order."""
        ...

    async def list_timers(self, query: ListQuery) -> Listing: ...
    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        """The first name after `after`, in an order of the store, of a namespace that has a timer with this correlation
        id, scheduled or reached. "" is before all names. A store without an index returns the next of all namespaces.
        """
        ...

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> Sequence[int | StoreError]:
        """Removes up to `limit` reached rows of each shard with `purge_at_ms < before_ms`. Returns how many were
        removed. Fenced. As in commit, the error of one shard may be its result."""
        ...

    # -- namespaces
    async def namespaces(self) -> list[Namespace]:
        """All namespaces ordered by name, deleted ones too. One that cannot be decoded is left out and logged."""
        ...

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        """Writes it if the stored revision is the expected one (None: if none is stored). Returns whether it did."""
        ...


_READS = frozenset({"shards", "load", "get_many", "list_timers", "next_namespace", "members", "namespaces", "diagnose"})


class GuardedStore:
    """A Store that raises only StoreErrors, whatever the adapter or its driver raises.

    An unexpected error of an adapter must not end a loop of the engine. After such an error of a write it is not known
    whether the write was applied.
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


def _check_marks(url: str) -> None:
    """Refuse a URL that an adapter could misread, so that it repeats a part of the password in its error: as the name
    of a database or of an option."""
    if url.partition(":")[2][:2] != "//":
        raise SetupError("store.url: must be SCHEME://user:password@host/database", field="store.url")
    if "@" in url.partition("?")[2]:
        raise SetupError(
            "store.url: has an '@' after a '?': in a name, a password or an option it is written %40, and the '?' %3F",
            field="store.url",
        )


def open_store(url: str) -> Store:
    """The adapter for a store URL, not opened. Only the module of that adapter is imported."""
    # Not urlsplit(): it raises for some passwords, with the password in its text.
    scheme = url.partition(":")[0].strip().lower()
    target = _ADAPTERS.get(scheme)
    if target is None:
        raise SetupError(
            f"store.url: no adapter for {scheme!r}; allowed: {', '.join(sorted(_ADAPTERS))}", field="store.url"
        )
    if scheme not in ("memory", "sqlite"):
        _check_marks(url)
    module, _, name = target.partition(":")
    adapter = getattr(importlib.import_module(module), name)
    return cast(Store, adapter.from_url(url))
