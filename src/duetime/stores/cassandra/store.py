"""CassandraStore: a Cassandra cluster, for any number of instances. Some of its nodes may fail.

A shard is a partition. Every write is a lightweight transaction. A commit is one lightweight transaction for each of
its shards, all at the same time. Reads are quorum reads. Different kinds of work have their own connections, so that
one does not wait for another: the heartbeat, which the lease depends on, and lists, which may take long.

Cassandra does not report when it has lost acknowledged writes (which happens if a majority of the replicas lose their
disks, or crash with `commitlog_sync: periodic`), so a heartbeat never raises FailedOver.

address.py: the URL. connection.py: connections. errors.py: what errors mean. statements.py: CQL and rows.
writes.py: fenced writes. reads.py and ranges.py: reads. schema.py: tables.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Self, TypeVar

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import MemberDead, ShardLost, StoreError, StoreUnavailable
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
from duetime.stores.background import BackgroundTasks
from duetime.stores.cassandra import errors, schema  # errors first: it reports a missing driver
from duetime.stores.cassandra.address import Address, address_of
from duetime.stores.cassandra.connection import Client, Connection, connect
from duetime.stores.cassandra.reads import Reader
from duetime.stores.cassandra.statements import Statements, texts
from duetime.stores.cassandra.writes import Writer
from duetime.stores.fencing import reading, writing
from duetime.stores.rows import as_json, namespaces_of

__all__ = ["CassandraStore", "wipe"]

T = TypeVar("T")

STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: leaves time for a second heartbeat, on a new connection


class CassandraStore:
    # A message may be at most half a segment of the commit log: 16 MiB by default, 8 MiB if the segment size was
    # halved. A batch stays below that even if each character takes four bytes.
    capabilities = Capabilities(
        name="cassandra",
        batch_max=1_000,
        batch_chars_max=1024 * 1024,
        payload_bytes_max=1024 * 1024,
        parallel_commits=1,
    )

    def __init__(self, address: Address) -> None:
        self._address = address
        self._opened: _Open | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(address_of(url))

    # -- open and close

    async def migrate(self) -> None:
        await schema.migrate(self._address)

    async def open(self) -> None:
        if self._opened is not None:
            return
        await schema.check(self._address)
        try:
            self._opened = await _Open.ready(self._address)
        except Exception as error:
            raise errors.setup_error(self._address, error) from error

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
        client, statements = self._open.membership, self._open.statements
        at_first = (member.counter, member.alive, member.joined_at_ms, member.secret)
        if await client.write(statements.join, member.instance_id, member.address, *at_first):
            return
        if not await self._is_alive(member.instance_id):
            raise MemberDead(f"{member.instance_id} was declared dead")

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """The time is read from one node, at the same time as the counter is written."""
        client, statements = self._open.membership, self._open.statements
        raised, [[now_ms]] = await asyncio.gather(
            client.write(statements.heartbeat, counter, instance_id, counter), client.read(statements.now)
        )
        # Not raised: the member is dead, or a later heartbeat was applied first.
        if not raised and not await self._is_alive(instance_id):
            raise MemberDead(f"{instance_id} was declared dead")
        return int(now_ms)

    async def _is_alive(self, instance_id: str) -> bool:
        rows = await self._open.membership.read(self._open.statements.member, instance_id)
        return any(row[3] for row in rows)

    @reading
    async def members(self) -> list[Member]:
        rows = await self._open.data.read(self._open.statements.members)
        return sorted((Member(*row) for row in rows), key=lambda member: member.instance_id)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        client, statements = self._open.membership, self._open.statements
        if await client.write(statements.mark_dead, instance_id, counter):
            return True
        return not await self._is_alive(instance_id)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await self._open.membership.write(self._open.statements.forget, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        """Write the rows first and the number of shards last: readers read only that many rows."""
        await self._open.run_to_end(self._ensure_shards(self._open, count))

    async def _ensure_shards(self, opened: _Open, count: int) -> None:
        known = await opened.reader.shard_count()
        if known >= count:
            return
        await opened.writer.new_shards(range(known, count))
        if not await opened.data.write(opened.statements.first_shard_count, count):
            await opened.data.write(opened.statements.raise_shard_count, count, count)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await self._open.reader.shards()

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        return await self._open.run_to_end(self._open.writer.claim(claims))

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        return await self._open.run_to_end(self._open.writer.release(fences))

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:
        return await self._open.run_to_end(self._open.writer.commit(batches))

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        return await self._open.reader.load(requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await self._open.reader.get_many(keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await self._open.lister.list_timers(query)

    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        """There is no index: any namespace may have such a timer."""
        names = (namespace.name for namespace in await self.namespaces() if not namespace.deleted)
        return min((name for name in names if name > after), default=None)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        return await self._open.run_to_end(self._open.writer.purge(fences, before_ms, limit))

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return namespaces_of(await self._open.data.read(self._open.statements.namespaces))

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        data, statements = self._open.data, self._open.statements
        name, revision, document = namespace.name, namespace.revision, as_json(namespace)
        if expected_revision is None:
            return await data.write(statements.new_namespace, name, revision, document)
        return await data.write(statements.change_namespace, revision, document, name, expected_revision)


class _Open:
    """The clients and statements of an open store."""

    def __init__(self, statements: Statements, data: Client, lists: Client, membership: Client) -> None:
        self.statements = statements
        self.data = data
        self.membership = membership
        self.writer = Writer(data, statements)
        self.reader = Reader(data, statements)
        self.lister = Reader(lists, statements)
        self._clients = (data, lists, membership)
        self._background = BackgroundTasks()
        self.run_to_end = self._background.run_to_end

    @classmethod
    async def ready(cls, address: Address) -> _Open:
        connections: list[Connection] = []
        async with contextlib.AsyncExitStack() as undo:
            for without_metadata in (False, True, True):
                connection = await connect(address, without_metadata=without_metadata)
                undo.push_async_callback(connection.close)
                connections.append(connection)
            prepared = await connections[0].prepare(texts(address.keyspace))
            for connection in connections[1:]:
                connection.adopt(connections[0].prepared)
            undo.pop_all()
        return cls(
            Statements(**prepared),
            Client(address, connections[0], STATEMENT_SECONDS),
            Client(address, connections[1], STATEMENT_SECONDS),
            Client(address, connections[2], MEMBERSHIP_SECONDS, reconnect_on_timeout=True),
        )

    async def close(self) -> None:
        """Wait for work in progress, for a limited time, then close."""
        await self._background.close()
        await asyncio.gather(*(client.close() for client in self._clients))


async def wipe(url: str) -> None:
    """For tests: delete all rows."""
    await schema.wipe(address_of(url))
