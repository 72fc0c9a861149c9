"""A store on a SQL database: which session says what, the same for all of them.

Sessions are kept apart by what may wait for what: commits have one for each writer lane; the heartbeat, on which the
right to fire depends, waits behind no other work; lists, which may take long, hold up nobody. What is said is the
adapter's: its modules are named in a subclass, and have the functions below.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol, Self

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import FailedOver, ShardLost, StoreError, StoreUnavailable
from duetime.store import (
    Batch,
    Capabilities,
    Claim,
    Committed,
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

__all__ = ["SqlStore"]

READERS = 2
STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection


class KindOfWork(Protocol):
    """Its sessions. `read` and `write` run what the adapter's own functions give them."""

    @property
    def read(self) -> Any: ...
    @property
    def write(self) -> Any: ...
    async def close(self) -> None: ...
    def drop_connections(self) -> None: ...


class Link(Protocol):
    """The way to the database."""

    def address_of(self, url: str) -> Any: ...
    def Line(self, address: Any, count: int, deadline_seconds: float, connect_seconds: float, /) -> KindOfWork: ...  # noqa: N802


class Schema(Protocol):
    """The tables."""

    async def migrate(self, address: Any) -> None: ...
    async def check(self, address: Any) -> str:
        """Answers how a statement asks for the database's history, where it has to; else nothing."""
        ...

    async def diagnose(self, address: Any) -> list[str]: ...


class Words(Protocol):
    """What is said. The first argument runs it."""

    async def join(self, run: Any, member: Member, history_sql: str, /) -> str: ...
    async def heartbeat(self, run: Any, instance_id: str, counter: int, history_sql: str, /) -> tuple[int, str]: ...
    async def members(self, run: Any, /) -> list[Member]: ...
    async def mark_dead(self, run: Any, instance_id: str, counter: int, /) -> bool: ...
    async def forget_member(self, run: Any, instance_id: str, /) -> None: ...
    async def ensure_shards(self, run: Any, count: int, /) -> None: ...
    async def shards(self, run: Any, /) -> list[ShardRow]: ...
    async def claim(self, run: Any, claims: Sequence[Claim], /) -> list[ShardRow]: ...
    async def release(self, run: Any, fences: Sequence[Fence], /) -> list[ShardLost | None]: ...
    async def commit(self, run: Any, batches: Sequence[Batch], /) -> Sequence[Committed | StoreError]: ...
    async def purge_reached(
        self, run: Any, fences: Sequence[Fence], before_ms: int, limit: int, /
    ) -> list[int | ShardLost]: ...
    async def namespaces(self, run: Any, /) -> list[Namespace]: ...
    async def put_namespace(self, run: Any, namespace: Namespace, expected_revision: int | None, /) -> bool: ...


class Reads(Protocol):
    async def load(self, run: Any, requests: Sequence[PageRequest], /) -> list[Page]: ...
    async def get_many(self, run: Any, keys: Sequence[tuple[int, TimerKey]], /) -> list[Found]: ...


class Lists(Protocol):
    async def list_timers(self, run: Any, query: ListQuery, /) -> Listing: ...


class SqlStore:
    capabilities: Capabilities
    link: Link
    schema: Schema
    words: Words
    reads: Reads
    lists: Lists

    def __init__(self, address: Any) -> None:
        self._address = address
        self._sessions: _Open | None = None
        self._history_sql = ""
        self._histories: dict[str, str] = {}  # member -> the history of the database that it joined under

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(cls.link.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await self.schema.migrate(self._address)

    async def open(self) -> None:
        self._history_sql = await self.schema.check(self._address)
        if self._sessions is None:
            self._sessions = _Open(self.link, self._address, self.capabilities.parallel_commits)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.close()

    async def diagnose(self) -> list[str]:
        """What a doctor says of the server, in plain sentences. Needs no open store."""
        return await self.schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._sessions is None:
            raise StoreUnavailable("the store is not open")
        return self._sessions

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        history = await self.words.join(self._open.membership.write, member, self._history_sql)
        self._histories = {member.instance_id: history}

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """A database with another history than the one joined under may have lost commits: whoever remembers them
        has to forget, and nothing makes an instance forget like its death."""
        run = self._open.membership.write
        now_ms, history = await self.words.heartbeat(run, instance_id, counter, self._history_sql)
        if self._histories.setdefault(instance_id, history) != history:
            # The other sessions may still be with the server of before, and take its word for the truth.
            self._open.drop_connections()
            raise FailedOver(f"the database has failed over or was restored ({history}): joining again")
        return now_ms

    @reading
    async def members(self) -> list[Member]:
        return await self.words.members(self._open.reads.read)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        return await self.words.mark_dead(self._open.membership.write, instance_id, counter)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await self.words.forget_member(self._open.membership.write, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        await self.words.ensure_shards(self._open.changes.write, count)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await self.words.shards(self._open.reads.read)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await self.words.claim(self._open.changes.write, claims)

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await self.words.release(self._open.changes.write, fences)

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> Sequence[Committed | StoreError]:
        return await self.words.commit(self._open.commits.write, batches)

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        return await self.reads.load(self._open.reads.read, requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await self.reads.get_many(self._open.reads.read, keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await self.lists.list_timers(self._open.lists.read, query)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await self.words.purge_reached(self._open.changes.write, fences, before_ms, limit)

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return await self.words.namespaces(self._open.reads.read)

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await self.words.put_namespace(self._open.changes.write, namespace, expected_revision)


class _Open:
    """The sessions of an open store. Each connects when it is first used."""

    def __init__(self, link: Link, address: Any, parallel_commits: int) -> None:
        self.commits = link.Line(address, parallel_commits, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.reads = link.Line(address, READERS, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.changes = link.Line(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.lists = link.Line(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.membership = link.Line(address, 1, MEMBERSHIP_SECONDS, MEMBERSHIP_SECONDS)
        self._all = [self.commits, self.reads, self.changes, self.lists, self.membership]

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._all))

    def drop_connections(self) -> None:
        for line in self._all:
            line.drop_connections()
