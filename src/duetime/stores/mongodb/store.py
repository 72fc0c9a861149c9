"""MongoStore: one replica set for any number of instances.

A commit is a transaction that increments a counter in the documents of its shards, on condition of their fences. It is
acknowledged when a majority of the replica set has it on disk; reads return only what a majority has. There are two
clients. One is for the heartbeat, which the lease depends on, so that it never waits for other work or for its
connections. All other work shares the second client, and with it one view of the primary, which only moves forward: a
load after a claim is never answered by an earlier primary.

address.py: the URL. connection.py: clients, sessions, transactions. errors.py: what errors mean. rows.py: documents and
indexes. statements.py and listing.py: commands. schema.py: collections.
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
from duetime.stores.mongodb import address, connection, schema, statements  # address reports a missing driver
from duetime.stores.mongodb.address import Address
from duetime.stores.mongodb.connection import ClusterTime, SessionPool
from duetime.stores.mongodb.listing import list_timers, next_namespace

__all__ = ["MongoStore", "wipe"]

# Measured: one large commit at a time is faster than several small ones; and commits of one store never conflict.
COMMITTERS = 1
READERS = 4
LISTERS = 4
CHANGES = 2
COMMAND_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: leaves time for a second heartbeat, on a new connection


class MongoStore:
    # A document may have 16 MiB; the limit of a payload leaves enough for the other fields.
    capabilities = Capabilities(
        name="mongodb", batch_max=2_000, payload_bytes_max=15 * 1024 * 1024, parallel_commits=COMMITTERS
    )

    def __init__(self, address: Address) -> None:
        self._address = address
        self._opened: _Open | None = None
        self._acknowledged_counters: dict[str, int] = {}  # member -> its last acknowledged counter

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(address.address_of(url))

    # -- open and close

    async def migrate(self) -> None:
        await schema.migrate(self._address)

    async def open(self) -> None:
        await schema.check(self._address)
        if self._opened is None:
            self._opened = _Open(self._address)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def diagnose(self) -> Diagnosis:
        """Sentences about the server for `duetime doctor`. The store need not be open."""
        return await schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise StoreUnavailable("the store is not open")
        return self._opened

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        await statements.join(self._open.heartbeats.write, member)
        self._acknowledged_counters.pop(member.instance_id, None)

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """An election loses nothing that a majority has, and nothing else is acknowledged, so a new primary is no
        reason for FailedOver. But a replica set that was restored, or rebuilt by force from a member that lagged, has
        lost commits. Then the counter of this member is older than the last one that was acknowledged, which happens
        twice a second."""
        now_ms, before = await statements.heartbeat(self._open.heartbeats.write, instance_id, counter)
        if before < self._acknowledged_counters.get(instance_id, before):
            raise FailedOver(f"the database has lost acknowledged writes (heartbeat {before}): joining again")
        self._acknowledged_counters[instance_id] = counter
        return now_ms

    @reading
    async def members(self) -> list[Member]:
        return await statements.members(self._open.membership_reads.read)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        opened = self._open
        return await statements.mark_dead(opened.heartbeats.write, opened.membership_reads.read, instance_id, counter)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await statements.forget_member(self._open.heartbeats.write, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        await statements.ensure_shards(self._open.changes.write, count)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await statements.shards(self._open.reads.read)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        opened = self._open
        return await statements.claim(opened.changes.write, opened.reads.read, claims, opened.commits.session_ids)

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

    @reading
    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        return await next_namespace(self._open.lists.read, correlation_id, after)

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
    """The clients of an open store and their session pools. Each connects when it is first used.

    All transactions run in one pool, so that those of one store never conflict with each other. There are as many
    connections as sessions, so that no session waits for a connection.
    """

    def __init__(self, address: Address) -> None:
        cluster_time = ClusterTime()
        self._client = connection.connect(address, COMMITTERS + READERS + LISTERS + CHANGES)
        self._membership = connection.connect(address, 3, MEMBERSHIP_SECONDS)
        name = address.database
        self.commits = SessionPool(self._client, name, COMMITTERS, COMMAND_SECONDS, cluster_time)
        self.changes = SessionPool(self._client, name, CHANGES, COMMAND_SECONDS, cluster_time)
        self.reads = SessionPool(self._client, name, READERS, COMMAND_SECONDS, cluster_time)
        self.lists = SessionPool(self._client, name, LISTERS, COMMAND_SECONDS, cluster_time)
        self.heartbeats = SessionPool(self._membership, name, 2, MEMBERSHIP_SECONDS)
        self.membership_reads = SessionPool(self._membership, name, 1, MEMBERSHIP_SECONDS)
        self._all = [self.commits, self.changes, self.reads, self.lists, self.heartbeats, self.membership_reads]

    async def close(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._all))
        for client in (self._client, self._membership):
            await connection.close(client)


async def wipe(url: str) -> None:
    """For tests: delete all documents."""
    await schema.wipe(address.address_of(url))
