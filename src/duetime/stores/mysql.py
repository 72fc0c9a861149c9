"""MySqlStore: MySQL, MariaDB or TiDB for any number of instances.

Every read is one message; every fenced write is a transaction of two: lock and look, write and commit. Sessions are
kept apart by what may wait for what: commits have one for each writer lane; the heartbeat, on which the right to fire
depends, waits behind no other work; lists, which may take long, hold up nobody.

mysql_sql.py and mysql_reads.py are what is said to the database, mysql_rows.py what its rows are, mysql_link.py the
connections and their errors, mysql_schema.py the tables.
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
from duetime.stores import mysql_link, mysql_reads, mysql_schema, mysql_sql
from duetime.stores.mysql_link import Address, Line
from duetime.stores.sessions import CONNECT_SECONDS

__all__ = ["MySqlStore", "wipe"]

LANES = 1  # on two cores more of them were sometimes better and sometimes worse; one gathers the larger commits
READERS = 2
STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection


class MySqlStore:
    # A payload may be twice as long in a statement, which has to fit into a packet of 16 MiB (MariaDB's default);
    # and a row into an entry of 6 MiB (TiDB's).
    capabilities = Capabilities(name="mysql", batch_max=1_000, payload_bytes_max=4 * 1024 * 1024, lanes=LANES)

    def __init__(self, address: Address) -> None:
        self._address = address
        self._sessions: _Open | None = None
        self._identity_sql = "''"
        self._servers: dict[str, str] = {}  # member -> the server it joined under

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(mysql_link.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await mysql_schema.migrate(self._address)

    async def open(self) -> None:
        self._identity_sql = await mysql_schema.check(self._address)
        if self._sessions is None:
            self._sessions = _Open(self._address)

    async def close(self) -> None:
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            await sessions.close()

    async def diagnose(self) -> list[str]:
        """What a doctor says of the server, in plain sentences. Needs no open store."""
        return await mysql_schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._sessions is None:
            raise StoreUnavailable("the store is not open")
        return self._sessions

    # -- members

    async def join(self, member: Member) -> None:
        server = await mysql_sql.join(self._open.membership.write, member, self._identity_sql)
        self._servers = {member.instance_id: server}

    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """Another server than the one joined under was a replica of it, and may lack its last commits: whoever
        remembers them has to forget, and nothing makes an instance forget like its death."""
        write = self._open.membership.write
        now_ms, server = await mysql_sql.heartbeat(write, instance_id, counter, self._identity_sql)
        if self._servers.setdefault(instance_id, server) != server:
            # The other sessions may still be with the server of before, and take its word for the truth.
            self._open.drop_connections()
            raise FailedOver(f"the database has failed over to another server ({server}): joining again")
        return now_ms

    async def members(self) -> list[Member]:
        return await mysql_sql.members(self._open.reads.read)

    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        return await mysql_sql.mark_dead(self._open.membership.write, instance_id, counter)

    async def forget_member(self, instance_id: str) -> None:
        await mysql_sql.forget_member(self._open.membership.write, instance_id)

    # -- shards

    async def ensure_shards(self, count: int) -> None:
        await mysql_sql.ensure_shards(self._open.changes.write, count)

    async def shards(self) -> list[ShardRow]:
        return await mysql_sql.shards(self._open.reads.read)

    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await mysql_sql.claim(self._open.changes.write, claims)

    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await mysql_sql.release(self._open.changes.write, fences)

    # -- timers

    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        return await mysql_sql.commit(self._open.commits.write, batches)

    async def load(self, stretches: Sequence[Stretch]) -> list[Page]:
        return await mysql_reads.load(self._open.reads.read, stretches)

    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await mysql_reads.get_many(self._open.reads.read, keys)

    async def list_timers(self, query: ListQuery) -> Listing:
        return await mysql_reads.list_timers(self._open.lists.read, query)

    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await mysql_sql.purge_reached(self._open.changes.write, fences, before_ms, limit)

    # -- namespaces

    async def namespaces(self) -> list[Namespace]:
        return await mysql_sql.namespaces(self._open.reads.read)

    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await mysql_sql.put_namespace(self._open.changes.write, namespace, expected_revision)


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
    await mysql_schema.wipe(mysql_link.address_of(url))
