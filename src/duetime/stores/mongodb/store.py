"""MongoStore: one replica set for any number of instances.

A commit is a transaction that counts itself in the documents of its shards, on condition of their fences; it is
acknowledged when a majority of the replica set has it on disk, and what is read was on a majority too. Two clients
are kept apart: the heartbeat, on which the right to fire depends, waits behind no other work and for no other's
connections. All other work shares one client, and with it one view of who the primary is, which only goes forward:
who claims a shard and then loads it cannot be answered by a primary of before.

statements.py and listing.py are what is said to the database, rows.py what its documents are,
connection.py the sessions, transactions and errors, schema.py the collections.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Self

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import FailedOver, ShardLost, StoreUnavailable
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
from duetime.stores.mongodb import connection, schema, statements
from duetime.stores.mongodb.connection import Address, Line, Moment
from duetime.stores.mongodb.listing import list_timers

__all__ = ["MongoStore", "wipe"]

# Measured: one big commit at a time is quicker than several smaller ones; and those of one store never conflict.
LANES = 1
READERS = 4
LISTERS = 4
CHANGES = 2
COMMAND_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection


class MongoStore:
    # A document may have 16 MiB; a payload leaves room for all the rest.
    capabilities = Capabilities(
        name="mongodb", batch_max=2_000, payload_bytes_max=15 * 1024 * 1024, parallel_commits=LANES
    )

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lines: _Open | None = None
        self._beaten: dict[str, int] = {}  # member -> its counter, as last acknowledged

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(connection.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await schema.migrate(self._address)

    async def open(self) -> None:
        await schema.check(self._address)
        if self._lines is None:
            self._lines = _Open(self._address)

    async def close(self) -> None:
        lines, self._lines = self._lines, None
        if lines is not None:
            await lines.close()

    async def diagnose(self) -> Diagnosis:
        return await schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._lines is None:
            raise StoreUnavailable("the store is not open")
        return self._lines

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        await statements.join(self._open.beats.write, member)
        self._beaten.pop(member.instance_id, None)

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """An election loses nothing that a majority has, and nothing else is ever acknowledged: so a new primary is
        no reason to forget. But a set that was restored, or made anew by force from a member that lagged, has lost
        commits; and with them this member's own counter, which is acknowledged twice a second."""
        now_ms, before = await statements.heartbeat(self._open.beats.write, instance_id, counter)
        if before < self._beaten.get(instance_id, before):
            raise FailedOver(f"the database has lost acknowledged writes (heartbeat {before}): joining again")
        self._beaten[instance_id] = counter
        return now_ms

    @reading
    async def members(self) -> list[Member]:
        return await statements.members(self._open.looks.read)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        lines = self._open
        return await statements.mark_dead(lines.beats.write, lines.looks.read, instance_id, counter)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await statements.forget_member(self._open.beats.write, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        await statements.ensure_shards(self._open.changes.write, count)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await statements.shards(self._open.reads.read)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        lines = self._open
        return await statements.claim(lines.changes.write, lines.reads.read, claims, lines.commits.session_ids)

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await statements.release(self._open.commits.transaction, fences)

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> list[Committed | ShardLost]:
        return await statements.commit(self._open.commits.transaction, batches)

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page]:
        return await statements.load(self._open.reads.read, requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await statements.get_many(self._open.reads.read, keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await list_timers(self._open.lists.read, query)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | ShardLost]:
        return await statements.purge_reached(self._open.commits.transaction, fences, before_ms, limit)

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return await statements.namespaces(self._open.reads.read)

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        return await statements.put_namespace(self._open.changes.write, namespace, expected_revision)


class _Open:
    """The clients of an open store and their lines. Each connects when it is first used.

    All transactions are in one line, so that those of one store never conflict with each other. There are as many
    connections as sessions, so that none waits for one.
    """

    def __init__(self, address: Address) -> None:
        moment = Moment()
        self._client = connection.connect(address, LANES + READERS + LISTERS + CHANGES)
        self._membership = connection.connect(address, 3, MEMBERSHIP_SECONDS)
        name = address.database
        self.commits = Line(self._client, name, LANES, COMMAND_SECONDS, moment)
        self.changes = Line(self._client, name, CHANGES, COMMAND_SECONDS, moment)
        self.reads = Line(self._client, name, READERS, COMMAND_SECONDS, moment)
        self.lists = Line(self._client, name, LISTERS, COMMAND_SECONDS, moment)
        self.beats = Line(self._membership, name, 2, MEMBERSHIP_SECONDS)
        self.looks = Line(self._membership, name, 1, MEMBERSHIP_SECONDS)
        self._all = [self.commits, self.changes, self.reads, self.lists, self.beats, self.looks]

    async def close(self) -> None:
        await asyncio.gather(*(line.close() for line in self._all))
        for client in (self._client, self._membership):
            await connection.close(client)


async def wipe(url: str) -> None:
    """For tests: all documents."""
    await schema.wipe(connection.address_of(url))
