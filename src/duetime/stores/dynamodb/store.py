"""DynamoStore: two tables of Amazon DynamoDB, for any number of instances.

Every batch is a transaction of its own, applied as a whole or not at all; transactions of different shards run at the
same time. Different kinds of work have their own connections, so that one does not wait for another: the heartbeat,
which the lease depends on, commits, reads, claims and lists.

The service does not report whether it has lost acknowledged writes, so this store never raises FailedOver. In one
region it does not happen. A restored table has another name, and is another store.

address.py: the URL. connection.py: connections, deadlines, retries. errors.py: what errors mean. clock.py: the time of
the service. rows.py: items. writes.py and reads.py: requests. schema.py: tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from duetime.domain.timer import Namespace, TimerKey
from duetime.errors import ShardLost, StoreError, StoreUnavailable
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
from duetime.stores.dynamodb import reads, schema, writes
from duetime.stores.dynamodb.address import Address, address_of
from duetime.stores.dynamodb.connection import ConnectionPool, DynamoClient
from duetime.stores.dynamodb.reads import Tables
from duetime.stores.fencing import reading, writing

__all__ = ["DynamoStore", "wipe"]

# Measured with 8 ms for a transaction: one commit at a time for each of 16 shards writes four times as much as one for
# all shards, with less work for each row, because transactions are fuller. More than the number of shards costs
# nothing.
PARALLEL_COMMITS = 32
READERS = 16
MEMBERSHIP_CONNECTIONS = 4  # heartbeat, list of members, marking dead members; and one that hangs
CALL_SECONDS = 10.0
ATTEMPT_SECONDS = 3.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: leaves time for a second heartbeat, on a new connection
MEMBERSHIP_ATTEMPT_SECONDS = 0.7

# A transaction may have 100 actions and 4 MB: the fence, and one action for each row. A character may take four bytes.
# An item and its entry in the local index, which is a copy of it, may take 400 KB together, including payload and
# headers.
_ROWS_MAX = writes.ACTIONS_MAX - 1
_CHARS_MAX = 384 * 1024
_PAYLOAD_BYTES_MAX = 144 * 1024


class DynamoStore:
    capabilities = Capabilities(
        name="dynamodb",
        batch_max=_ROWS_MAX,
        batch_chars_max=_CHARS_MAX,
        payload_bytes_max=_PAYLOAD_BYTES_MAX,
        parallel_commits=PARALLEL_COMMITS,
        clock_error_ms=500,  # the service reports whole seconds only (clock.py)
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
        await schema.check(self._address)
        if self._opened is None:
            self._opened = await _Open.to(self._address)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.client.close()

    async def diagnose(self) -> Diagnosis:
        """Sentences about the tables for `duetime doctor`. The store need not be open."""
        return await schema.diagnose(self._address)

    @property
    def _open(self) -> _Open:
        if self._opened is None:
            raise StoreUnavailable("the store is not open")
        return self._opened

    # -- members

    @writing
    async def join(self, member: Member) -> None:
        opened = self._open
        await opened.client.run_to_end(writes.join(opened.membership.write, opened.tables, member))

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        opened = self._open
        await opened.client.run_to_end(writes.heartbeat(opened.membership.write, opened.tables, instance_id, counter))
        if not opened.client.clock.is_known:
            raise StoreUnavailable("dynamodb: its answers have no Date, so its time is not known")
        return opened.client.clock.now_ms(opened.client.boot_ms())

    @reading
    async def members(self) -> list[Member]:
        return await writes.members(self._open.membership.read, self._open.tables)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        opened = self._open
        work = writes.mark_dead(opened.membership.write, opened.tables, instance_id, counter)
        return await opened.client.run_to_end(work)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        opened = self._open
        await opened.client.run_to_end(writes.forget_member(opened.membership.write, opened.tables, instance_id))

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        opened = self._open
        work = writes.ensure_shards(opened.reads.read, opened.changes.write, opened.tables, count)
        await opened.client.run_to_end(work)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await writes.shards(self._open.reads.read, self._open.tables)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        opened = self._open
        return await opened.client.run_to_end(writes.claim(opened.changes.write, opened.tables, claims))

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        opened = self._open
        return await opened.client.run_to_end(writes.release(opened.changes.write, opened.tables, fences))

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:
        opened = self._open
        work = writes.commit(opened.reads.read, opened.commits.write, opened.tables, batches)
        return await opened.client.run_to_end(work)

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        return await reads.load(self._open.reads.read, self._open.tables, requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await reads.get_many(self._open.reads.read, self._open.tables, keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await reads.list_timers(self._open.lists.read, self._open.tables, query)

    async def next_namespace(self, correlation_id: str, after: str) -> str | None:
        """There is no index: any namespace may have such a timer."""
        names = (namespace.name for namespace in await self.namespaces() if not namespace.deleted)
        return min((name for name in names if name > after), default=None)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        opened = self._open
        work = writes.purge_reached(opened.lists.read, opened.changes.write, opened.tables, fences, before_ms, limit)
        return await opened.client.run_to_end(work)

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return await writes.namespaces(self._open.reads.read, self._open.tables)

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        opened = self._open
        work = writes.put_namespace(opened.changes.write, opened.tables, namespace, expected_revision)
        return await opened.client.run_to_end(work)


class _Open:
    """The connection pools of an open store. Each connects when it is first used."""

    def __init__(self, client: DynamoClient, tables: Tables, pools: Sequence[ConnectionPool]) -> None:
        self.client = client
        self.tables = tables
        self.commits, self.reads, self.changes, self.lists, self.membership = pools

    @classmethod
    async def to(cls, address: Address) -> Self:
        client = DynamoClient(address)
        counts = (PARALLEL_COMMITS, READERS, READERS, READERS)
        try:
            pools = [await client.open_pool(count, CALL_SECONDS, ATTEMPT_SECONDS) for count in counts]
            pools.append(await client.open_pool(MEMBERSHIP_CONNECTIONS, MEMBERSHIP_SECONDS, MEMBERSHIP_ATTEMPT_SECONDS))
        except BaseException:
            await client.close()
            raise
        return cls(client, Tables(address.timers, address.cluster, {}), pools)


async def wipe(url: str) -> None:
    """For tests: delete all rows."""
    await schema.wipe(address_of(url))
