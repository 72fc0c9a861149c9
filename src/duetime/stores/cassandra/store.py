"""CassandraStore: a cluster of machines of which some may fail, for any number of instances.

A shard is a partition. Every write is a lightweight transaction, and a commit is one for each of its shards, all at
once; reads are quorum reads. Connections are kept apart by what may wait for what: the heartbeat, on which the right
to fire depends, has its own, and so have lists, which may take long.

Cassandra does not tell when it has lost acknowledged writes (as it does if a majority of the replicas lost their
disks, or crashed under `commitlog_sync: periodic`), so a heartbeat never answers FailedOver.

writes.py is the fence and what it guards, reads.py what is asked, statements.py the words,
connection.py the connections, address.py the URL and the errors, schema.py the tables.
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
from duetime.stores.cassandra import address, schema
from duetime.stores.cassandra.address import Address
from duetime.stores.cassandra.connection import Line, Link, connect
from duetime.stores.cassandra.reads import Reader
from duetime.stores.cassandra.statements import Statements, texts
from duetime.stores.cassandra.writes import Writer
from duetime.stores.fencing import reading, writing
from duetime.stores.rows import as_json, namespaces_of

__all__ = ["CassandraStore", "wipe"]

T = TypeVar("T")

STATEMENT_SECONDS = 10.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection


class CassandraStore:
    # A message may be no longer than half a segment of the commit log: 16 MiB as Cassandra comes, 8 MiB where that was
    # halved. A batch stays below whatever its characters are, four bytes each at most.
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
        return cls(address.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await schema.migrate(self._address)

    async def open(self) -> None:
        if self._opened is not None:
            return
        await schema.check(self._address)
        try:
            self._opened = await _Open.ready(self._address)
        except Exception as error:
            raise address.setup_error(self._address, error) from error

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def diagnose(self) -> Diagnosis:
        return await schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise StoreUnavailable("the store is not open")
        return self._opened

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        line, say = self._open.membership, self._open.say
        at_first = (member.counter, member.alive, member.joined_at_ms, member.secret)
        if await line.write(say.join, member.instance_id, member.address, *at_first):
            return
        if not await self._is_alive(member.instance_id):
            raise MemberDead(f"{member.instance_id} was declared dead")

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        """The time is that of the node that was asked, taken while the counter is on its way."""
        line, say = self._open.membership, self._open.say
        raised, [[now_ms]] = await asyncio.gather(
            line.write(say.beat, counter, instance_id, counter), line.read(say.now)
        )
        # Not raised: the member is dead, or a later heartbeat was applied first.
        if not raised and not await self._is_alive(instance_id):
            raise MemberDead(f"{instance_id} was declared dead")
        return int(now_ms)

    async def _is_alive(self, instance_id: str) -> bool:
        rows = await self._open.membership.read(self._open.say.member, instance_id)
        return any(row[3] for row in rows)

    @reading
    async def members(self) -> list[Member]:
        rows = await self._open.data.read(self._open.say.members)
        return sorted((Member(*row) for row in rows), key=lambda member: member.instance_id)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        line, say = self._open.membership, self._open.say
        if await line.write(say.mark_dead, instance_id, counter):
            return True
        return not await self._is_alive(instance_id)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        await self._open.membership.write(self._open.say.forget, instance_id)

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        """The rows first, then how many there are: nobody asks for more than that."""
        await self._open.run_to_end(self._ensure_shards(self._open, count))

    async def _ensure_shards(self, opened: _Open, count: int) -> None:
        known = await opened.reader.shard_count()
        if known >= count:
            return
        await opened.writer.new_shards(range(known, count))
        if not await opened.data.write(opened.say.first_shard_count, count):
            await opened.data.write(opened.say.raise_shard_count, count, count)

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

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        return await self._open.run_to_end(self._open.writer.purge(fences, before_ms, limit))

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return namespaces_of(await self._open.data.read(self._open.say.namespaces))

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        data, say = self._open.data, self._open.say
        name, revision, document = namespace.name, namespace.revision, as_json(namespace)
        if expected_revision is None:
            return await data.write(say.new_namespace, name, revision, document)
        return await data.write(say.change_namespace, revision, document, name, expected_revision)


class _Open:
    """What an open store works with."""

    def __init__(self, say: Statements, data: Line, lists: Line, membership: Line) -> None:
        self.say = say
        self.data = data
        self.membership = membership
        self.writer = Writer(data, say)
        self.reader = Reader(data, say)
        self.lister = Reader(lists, say)
        self._lines = (data, lists, membership)
        self._begun = BackgroundTasks()
        self.run_to_end = self._begun.run_to_end

    @classmethod
    async def ready(cls, address: Address) -> _Open:
        links: list[Link] = []
        async with contextlib.AsyncExitStack() as undo:
            for briefly in (False, True, True):
                link = await connect(address, briefly=briefly)
                undo.push_async_callback(link.close)
                links.append(link)
            said = await links[0].prepare(texts(address.keyspace))
            for link in links[1:]:
                link.adopt(links[0].prepared)
            undo.pop_all()
        return cls(
            Statements(**said),
            Line(address, links[0], STATEMENT_SECONDS),
            Line(address, links[1], STATEMENT_SECONDS),
            Line(address, links[2], MEMBERSHIP_SECONDS, impatient=True),
        )

    async def close(self) -> None:
        """After what is under way, unless that takes too long."""
        await self._begun.close()
        await asyncio.gather(*(line.close() for line in self._lines))


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(address.address_of(url))
