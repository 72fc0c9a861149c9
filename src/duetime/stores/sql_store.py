"""SqlStore: the Store port on a SQL database. It chooses the session pool for each call; the adapter has the SQL.

Work is divided over session pools by what may wait for what. Commits have one session for each parallel commit. The
heartbeat, on which the right to fire depends, waits for no other work. Lists may take long, so nothing else waits for
them. An adapter is a `SqlDatabase`: the functions of its package that are called here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, Self, TypeVar

from msgspec import Struct

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import FailedOver, ShardLost, StoreError, StoreUnavailable
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
)
from duetime.stores.fencing import reading, writing
from duetime.stores.sessions import CONNECT_SECONDS

__all__ = ["SqlDatabase", "SqlStore"]

READERS = 2
STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection

A = TypeVar("A")  # the address of a database, parsed from its URL
R = TypeVar("R")  # what runs a read in a session
W = TypeVar("W")  # what runs a write in a session
A_contra = TypeVar("A_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)
W_co = TypeVar("W_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)
W_contra = TypeVar("W_contra", contravariant=True)


class SessionPool(Protocol[R_co, W_co]):
    """Sessions for one kind of work. `read` and `write` run what the statements of the adapter pass to them."""

    @property
    def read(self) -> R_co: ...
    @property
    def write(self) -> W_co: ...
    async def close(self) -> None: ...
    def drop_connections(self) -> None: ...


class Schema(Protocol[A_contra]):
    """Creates and checks the tables."""

    async def migrate(self, address: A_contra, /) -> None: ...
    async def check(self, address: A_contra, /) -> str:
        """Raises if the database cannot be used. Returns the SQL expression for the history of the database, or ""
        where the connection knows the history."""
        ...

    async def diagnose(self, address: A_contra, /) -> Diagnosis: ...


class Statements(Protocol[R_contra, W_contra]):
    """Members, shards, fenced writes and namespaces. The first argument of each function runs its statements."""

    async def join(self, write: W_contra, member: Member, history_sql: str, /) -> str: ...
    async def heartbeat(
        self, write: W_contra, instance_id: str, counter: int, history_sql: str, /
    ) -> tuple[int, str]: ...
    async def members(self, read: R_contra, /) -> list[Member]: ...
    async def mark_dead(self, write: W_contra, instance_id: str, counter: int, /) -> bool: ...
    async def forget_member(self, write: W_contra, instance_id: str, /) -> None: ...
    async def ensure_shards(self, write: W_contra, count: int, /) -> None: ...
    async def shards(self, read: R_contra, /) -> list[ShardRow]: ...
    async def claim(self, write: W_contra, claims: Sequence[Claim], /) -> list[ShardRow]: ...
    async def release(self, write: W_contra, fences: Sequence[Fence], /) -> list[ShardLost | None]: ...
    async def commit(self, write: W_contra, batches: Sequence[Batch], /) -> Sequence[Committed | StoreError]: ...
    async def purge_reached(
        self, write: W_contra, fences: Sequence[Fence], before_ms: int, limit: int, /
    ) -> list[int | ShardLost]: ...
    async def namespaces(self, read: R_contra, /) -> list[Namespace]: ...
    async def put_namespace(self, write: W_contra, namespace: Namespace, expected_revision: int | None, /) -> bool: ...


class Reads(Protocol[R_contra]):
    """Pages of a shard, and timers by key."""

    async def load(self, read: R_contra, requests: Sequence[PageRequest], /) -> list[Page]: ...
    async def get_many(self, read: R_contra, keys: Sequence[tuple[int, TimerKey]], /) -> list[Found]: ...


class Lists(Protocol[R_contra]):
    """Lists over a namespace, and the namespaces of a correlation id."""

    async def list_timers(self, read: R_contra, query: ListQuery, /) -> Listing: ...
    async def next_namespace(self, read: R_contra, correlation_id: str, after: str, /) -> str | None: ...


class SqlDatabase(Struct, Generic[A, R, W], frozen=True, kw_only=True):
    """What an adapter supplies. Modules of its package are the values of the last four fields."""

    address_of: Callable[[str], A]
    session_pool: Callable[[A, int, float, float], SessionPool[R, W]]
    schema: Schema[A]
    statements: Statements[R, W]
    reads: Reads[R]
    lists: Lists[R]


class SqlStore(Generic[A, R, W]):
    capabilities: Capabilities
    database: SqlDatabase[A, R, W]

    def __init__(self, address: A) -> None:
        self._address = address
        self._pools: _Pools[A, R, W] | None = None
        self._history_sql = ""
        self._histories: dict[str, str] = {}  # instance id -> history of the database when it joined

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(cls.database.address_of(url))

    # -- open and close

    async def migrate(self) -> None:
        await self.database.schema.migrate(self._address)

    async def open(self) -> None:
        self._history_sql = await self.database.schema.check(self._address)
        if self._pools is None:
            self._pools = _Pools(self.database, self._address, self.capabilities.parallel_commits)

    async def close(self) -> None:
        pools, self._pools = self._pools, None
        if pools is not None:
            await pools.close()

    async def diagnose(self) -> Diagnosis:
        return await self.database.schema.diagnose(self._address)

    @property
    def _open(self) -> _Pools[A, R, W]:
        if self._pools is None:
            raise StoreUnavailable("the store is not open")
        return self._pools

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        history = await self.database.statements.join(self._open.membership.write, member, self._history_sql)
        self._histories = {member.instance_id: history}

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """Raises FailedOver if the database has another history than at the time of the join. It may have lost
        commits, so the instance has to drop what it has in memory: it joins again under a new id."""
        write = self._open.membership.write
        now_ms, history = await self.database.statements.heartbeat(write, instance_id, counter, self._history_sql)
        if self._histories.setdefault(instance_id, history) != history:
            # The other sessions may still be connected to the previous server, whose data is no longer valid.
            self._open.drop_connections()
            raise FailedOver(f"the database has failed over or was restored ({history}): joining again")
        return now_ms

    @reading
    async def members(self) -> list[Member]:
        return await self.database.statements.members(self._open.reads.read)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        return await self.database.statements.mark_dead(self._open.membership.write, instance_id, counter)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await self.database.statements.forget_member(self._open.membership.write, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        await self.database.statements.ensure_shards(self._open.changes.write, count)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await self.database.statements.shards(self._open.reads.read)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await self.database.statements.claim(self._open.changes.write, claims)

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await self.database.statements.release(self._open.changes.write, fences)

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> Sequence[Committed | StoreError]:
        return await self.database.statements.commit(self._open.commits.write, batches)

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        return await self.database.reads.load(self._open.reads.read, requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await self.database.reads.get_many(self._open.reads.read, keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await self.database.lists.list_timers(self._open.lists.read, query)

    @reading
    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        return await self.database.lists.next_namespace(self._open.lists.read, correlation_id, after)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await self.database.statements.purge_reached(self._open.changes.write, fences, before_ms, limit)

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return await self.database.statements.namespaces(self._open.reads.read)

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await self.database.statements.put_namespace(self._open.changes.write, namespace, expected_revision)


class _Pools(Generic[A, R, W]):
    """The session pools of an open store. A session connects when it is first used."""

    def __init__(self, database: SqlDatabase[A, R, W], address: A, parallel_commits: int) -> None:
        pool = database.session_pool
        self.commits = pool(address, parallel_commits, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.reads = pool(address, READERS, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.changes = pool(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.lists = pool(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.membership = pool(address, 1, MEMBERSHIP_SECONDS, MEMBERSHIP_SECONDS)
        self._all = [self.commits, self.reads, self.changes, self.lists, self.membership]

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._all))

    def drop_connections(self) -> None:
        for pool in self._all:
            pool.drop_connections()
