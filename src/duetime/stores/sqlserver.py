"""SqlServerStore: one database for any number of instances.

It has never run against a server: none could be had. What can be known without one is tested; the conformance suite
runs on whatever DUETIME_TEST_STORE names (docs/operating/sqlserver.md).

Sessions are kept apart by what may wait for what: commits have one for each writer lane; the heartbeat, on which the
right to fire depends, waits behind no other work; lists, which may take long, hold up nobody.

sqlserver_sql.py and sqlserver_list.py are what is said to the database, sqlserver_rows.py what its rows are,
sqlserver_link.py the connections and their errors, sqlserver_schema.py the tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from duetime.errors import FailedOver, ShardLost, StoreUnavailable
from duetime.model import Namespace, TimerKey
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
    ShardRow,
    Stretch,
)
from duetime.stores import sqlserver_link, sqlserver_list, sqlserver_schema, sqlserver_sql
from duetime.stores.sessions import CONNECT_SECONDS
from duetime.stores.sqlserver_link import Address, Line

__all__ = ["SqlServerStore", "wipe"]

LANES = 1  # as for PostgreSQL; nobody could measure it
READERS = 2
STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection


class SqlServerStore:
    # Few enough for a batch to stay under the 5,000 locks at which a table is locked as a whole, if that were allowed:
    # each row is in the table and in at most three of its indexes.
    capabilities = Capabilities(name="sqlserver", batch_max=1_000, payload_bytes_max=16 * 1024 * 1024, lanes=LANES)

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sessions: _Open | None = None
        self._histories: dict[str, str] = {}  # member -> the database's history when it joined

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(sqlserver_link.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await sqlserver_schema.migrate(self._address)

    async def open(self) -> None:
        await sqlserver_schema.check(self._address)
        if self._sessions is None:
            self._sessions = _Open(self._address)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.close()

    async def diagnose(self) -> list[str]:
        """What a doctor says of the server, in plain sentences. Needs no open store."""
        return await sqlserver_schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._sessions is None:
            raise StoreUnavailable("the store is not open")
        return self._sessions

    # -- members

    async def join(self, member: Member) -> None:
        history = await sqlserver_sql.join(self._open.membership.write, member)
        self._histories = {member.instance_id: history}

    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """A database with another history than the one joined under may have lost commits: whoever remembers them
        has to forget, and nothing makes an instance forget like its death."""
        now_ms, history = await sqlserver_sql.heartbeat(self._open.membership.write, instance_id, counter)
        if self._histories.setdefault(instance_id, history) != history:
            # The other sessions may still be with the server of before, and take its word for the truth.
            self._open.drop_connections()
            raise FailedOver(f"the database has failed over or was restored ({history}): joining again")
        return now_ms

    async def members(self) -> list[Member]:
        return await sqlserver_sql.members(self._open.reads.read)

    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        return await sqlserver_sql.mark_dead(self._open.membership.write, instance_id, counter)

    async def forget_member(self, instance_id: str) -> None:
        await sqlserver_sql.forget_member(self._open.membership.write, instance_id)

    # -- shards

    async def ensure_shards(self, count: int) -> None:
        await sqlserver_sql.ensure_shards(self._open.changes.write, count)

    async def shards(self) -> list[ShardRow]:
        return await sqlserver_sql.shards(self._open.reads.read)

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await sqlserver_sql.claim(self._open.changes.write, claims)

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await sqlserver_sql.release(self._open.changes.write, fences)

    # -- timers

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        return await sqlserver_sql.commit(self._open.commits.write, batches)

    async def load(self, stretches: Sequence[Stretch]) -> list[Page]:
        return await sqlserver_sql.load(self._open.reads.read, stretches)

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await sqlserver_sql.get_many(self._open.reads.read, keys)

    async def list_timers(self, query: ListQuery) -> Listing:
        return await sqlserver_list.list_timers(self._open.lists.read, query)

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await sqlserver_sql.purge_reached(self._open.changes.write, fences, before_ms, limit)

    # -- namespaces

    async def namespaces(self) -> list[Namespace]:
        return await sqlserver_sql.namespaces(self._open.reads.read)

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await sqlserver_sql.put_namespace(self._open.changes.write, namespace, expected_revision)


class _Open:
    """The sessions of an open store. Each connects when it is first used."""

    def __init__(self, address: Address) -> None:
        self.commits = Line(address, LANES, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.reads = Line(address, READERS, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.changes = Line(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.lists = Line(address, 1, STATEMENT_SECONDS, CONNECT_SECONDS)
        self.membership = Line(address, 1, MEMBERSHIP_SECONDS, MEMBERSHIP_SECONDS)
        self._all = [self.commits, self.reads, self.changes, self.lists, self.membership]

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._all))

    def drop_connections(self) -> None:
        for line in self._all:
            line.drop_connections()


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await sqlserver_schema.wipe(sqlserver_link.address_of(url))
