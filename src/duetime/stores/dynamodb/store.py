"""DynamoStore: two tables of Amazon DynamoDB for any number of instances.

Every batch is a transaction of its own, whole or not at all, those of different shards side by side. Requests
are kept apart by what may wait for what: the heartbeat, on which the right to fire depends, has connections of its own,
and so have commits, reads, claims and lists.

The service does not tell whether it ever went back behind what it acknowledged, so this store never says FailedOver: in
one region it does not happen; a table that was restored has another name, and is another store.

writes.py and reads.py are what is said to the service, rows.py what is stored there,
connection.py the connections, errors.py what their errors mean, clock.py its time,
schema.py the tables.
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
from duetime.stores.dynamodb import connection, reads, schema, writes
from duetime.stores.dynamodb.connection import Address, Line, Link
from duetime.stores.dynamodb.reads import Tables
from duetime.stores.fencing import reading, writing

__all__ = ["DynamoStore", "wipe"]

# Measured at 8 ms a transaction: a lane for each of 16 shards commits four times what one lane for all does, at less
# work for each row, because transactions are fuller. More lanes than shards cost nothing.
LANES = 32
READERS = 16
MEMBERSHIP_CONNECTIONS = 4  # the heartbeat, who is alive, the burial of the dead; and one that hangs
CALL_SECONDS = 10.0
ATTEMPT_SECONDS = 3.0
MEMBERSHIP_SECONDS = 1.5  # half a lease: a heartbeat that hangs leaves time for another one, on a new connection
MEMBERSHIP_ATTEMPT_SECONDS = 0.7

# A transaction takes 100 actions and 4 MB: the fence and a row each. Characters may be four bytes each. An item and its
# entry in the local index, which has all of it again, take 400 KB together: payload, headers and all.
_ROWS_MAX = writes.ACTIONS_MAX - 1
_CHARS_MAX = 384 * 1024
_PAYLOAD_BYTES_MAX = 144 * 1024


class DynamoStore:
    capabilities = Capabilities(
        name="dynamodb",
        batch_max=_ROWS_MAX,
        batch_chars_max=_CHARS_MAX,
        payload_bytes_max=_PAYLOAD_BYTES_MAX,
        parallel_commits=LANES,
        clock_error_ms=500,  # its time has whole seconds only (clock.py)
    )

    def __init__(self, address: Address) -> None:
        self._address = address
        self._opened: _Open | None = None

    @classmethod
    def from_url(cls, url: str) -> Self:
        return cls(connection.address_of(url))

    # -- life

    async def migrate(self) -> None:
        await schema.migrate(self._address)

    async def open(self) -> None:
        await schema.check(self._address)
        if self._opened is None:
            self._opened = await _Open.to(self._address)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.link.close()

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
        now = self._open
        await now.link.run_to_end(writes.join(now.membership.write, now.tables, member))

    @writing
    async def heartbeat(self, instance_id: str, counter: int) -> int:
        now = self._open
        await now.link.run_to_end(writes.heartbeat(now.membership.write, now.tables, instance_id, counter))
        if not now.link.clock.is_known:
            raise StoreUnavailable("dynamodb: its answers carry no Date, so nobody knows what time it is there")
        return now.link.clock.now_ms(now.link.boot_ms())

    @reading
    async def members(self) -> list[Member]:
        return await writes.members(self._open.membership.read, self._open.tables)

    @writing
    async def mark_dead(self, instance_id: str, counter: int) -> bool:
        now = self._open
        work = writes.mark_dead(now.membership.write, now.tables, instance_id, counter)
        return await now.link.run_to_end(work)

    @writing
    async def forget_member(self, instance_id: str) -> None:
        now = self._open
        await now.link.run_to_end(writes.forget_member(now.membership.write, now.tables, instance_id))

    # -- shards

    @writing
    async def ensure_shards(self, count: int) -> None:
        now = self._open
        work = writes.ensure_shards(now.reads.read, now.changes.write, now.tables, count)
        await now.link.run_to_end(work)

    @reading
    async def shards(self) -> list[ShardRow]:
        return await writes.shards(self._open.reads.read, self._open.tables)

    @writing
    async def claim(self, claims: Sequence[Claim]) -> list[ShardRow]:
        now = self._open
        return await now.link.run_to_end(writes.claim(now.changes.write, now.tables, claims))

    @writing
    async def release(self, fences: Sequence[Fence]) -> list[ShardLost | None]:
        now = self._open
        return await now.link.run_to_end(writes.release(now.changes.write, now.tables, fences))

    # -- timers

    @writing
    async def commit(self, batches: Sequence[Batch]) -> list[Committed | StoreError]:
        now = self._open
        work = writes.commit(now.reads.read, now.commits.write, now.tables, batches)
        return await now.link.run_to_end(work)

    @reading
    async def load(self, requests: Sequence[PageRequest]) -> list[Page | StoreError]:
        return await reads.load(self._open.reads.read, self._open.tables, requests)

    @reading
    async def get_many(self, keys: Sequence[tuple[int, TimerKey]]) -> list[Found]:
        return await reads.get_many(self._open.reads.read, self._open.tables, keys)

    @reading
    async def list_timers(self, query: ListQuery) -> Listing:
        return await reads.list_timers(self._open.lists.read, self._open.tables, query)

    @writing
    async def purge_reached(self, fences: Sequence[Fence], before_ms: int, limit: int) -> list[int | StoreError]:
        now = self._open
        work = writes.purge_reached(now.lists.read, now.changes.write, now.tables, fences, before_ms, limit)
        return await now.link.run_to_end(work)

    # -- namespaces

    @reading
    async def namespaces(self) -> list[Namespace]:
        return await writes.namespaces(self._open.reads.read, self._open.tables)

    @writing
    async def put_namespace(self, namespace: Namespace, expected_revision: int | None) -> bool:
        now = self._open
        work = writes.put_namespace(now.changes.write, now.tables, namespace, expected_revision)
        return await now.link.run_to_end(work)


class _Open:
    """The lines of an open store. Each connects when it is first used."""

    def __init__(self, link: Link, tables: Tables, lines: Sequence[Line]) -> None:
        self.link = link
        self.tables = tables
        self.commits, self.reads, self.changes, self.lists, self.membership = lines

    @classmethod
    async def to(cls, address: Address) -> Self:
        link = Link(address)
        counts = (LANES, READERS, READERS, READERS)
        try:
            lines = [await link.line(count, CALL_SECONDS, ATTEMPT_SECONDS) for count in counts]
            lines.append(await link.line(MEMBERSHIP_CONNECTIONS, MEMBERSHIP_SECONDS, MEMBERSHIP_ATTEMPT_SECONDS))
        except BaseException:
            await link.close()
            raise
        return cls(link, Tables(address.timers, address.cluster, {}), lines)


async def wipe(url: str) -> None:
    """For tests: all rows."""
    await schema.wipe(connection.address_of(url))
