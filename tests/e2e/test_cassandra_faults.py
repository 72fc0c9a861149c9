"""Cassandra goes away in every way it can: what the store says then, what is true, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

import pytest
from scripts.servers import Cassandra

from duetime.errors import OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Member
from duetime.stores.cassandra import store as adapter
from duetime.stores.cassandra.connection import Client, Statement
from duetime.stores.cassandra.store import CassandraStore
from duetime.stores.cassandra.writes import Writer
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers, take
from servers import at_port, fresh_database, own, require

T = TypeVar("T")


class Link:
    """A way to the server. `mute`: the connections there are say nothing any more, to nobody; new ones work."""

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._muted: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.port = 0

    async def start(self) -> Link:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def mute(self) -> None:
        self._muted |= self._writers

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        self._writers |= {writer, ours}
        for source, target in ((reader, ours), (theirs, writer)):
            task = asyncio.create_task(self._pass_on(source, target))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while message := await source.read(65_536):
                if target not in self._muted:
                    target.write(message)
                    await target.drain()
            target.close()


class Cutting(Client):
    """A client that does something to the link when a batch was sent, or is about to be."""

    def __init__(self, client: Client, act: Callable[[], None], *, once_sent: bool) -> None:
        super().__init__(client._address, client._connection, client._deadline_seconds)
        self._act, self._once_sent = act, once_sent

    async def write_batch(self, statements: Iterable[Statement]) -> bool:
        if not self._once_sent:
            self._act()
            return await super().write_batch(statements)
        writing = asyncio.ensure_future(super().write_batch(statements))
        await asyncio.sleep(0)
        self._act()
        return await writing


@pytest.fixture(scope="module")
def server() -> Cassandra:
    found = require("cassandra")
    assert isinstance(found, Cassandra)
    return found


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr(adapter, "MEMBERSHIP_SECONDS", 1.0)


@pytest.fixture
async def near(server: Cassandra) -> AsyncIterator[CassandraStore]:
    """A store with a way of its own: it sees what is true."""
    store = CassandraStore.from_url(fresh_database(server))
    await store.migrate()
    await store.open()
    await store.ensure_shards(4)
    yield store
    await store.close()


@pytest.fixture
async def link(server: Cassandra) -> AsyncIterator[Link]:
    made = await Link(server.port).start()
    yield made
    await made.stop()


@pytest.fixture
async def far(
    short_patience: None, near: CassandraStore, link: Link, server: Cassandra
) -> AsyncIterator[CassandraStore]:
    """A store behind the link."""
    store = CassandraStore.from_url(at_port(server.url(near._address.keyspace), link.port))
    await store.open()
    yield store
    await store.close()


async def when_back(act: Callable[[], Awaitable[T]], seconds: float = 20) -> T:
    """Its answer, once the store is available again. For what may be said twice, as a claim may: it has its nonce."""
    clock = asyncio.get_running_loop().time
    give_up_at = clock() + seconds
    while True:
        try:
            return await act()
        except (StoreUnavailable, OutcomeUnknown):
            assert clock() < give_up_at, "it does not come back"
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", ["mute", "cut"])
@pytest.mark.parametrize("once_sent", [False, True])
async def test_a_batch_without_an_answer_is_an_unknown_outcome_which_a_claim_settles(
    far: CassandraStore, near: CassandraStore, link: Link, how: str, once_sent: bool
) -> None:
    fence = await take(far, 0)
    act = link.mute if how == "mute" else link.cut
    writer = Writer(Cutting(far._open.data, act, once_sent=once_sent), far._open.statements)
    [result] = await writer.commit([Batch(fence, [make_timer()])])
    [row] = await when_back(lambda: far.claim([Claim(0, fence.version, 77, "a", "host:1", 1)]))  # what the engine does
    assert row.nonce == 77
    found = await all_timers(far)
    assert found == await all_timers(near)
    if not isinstance(result, OutcomeUnknown):
        assert found == ([make_timer()] if isinstance(result, Committed) else [])


async def test_connections_that_went_silent_are_replaced_when_a_deadline_has_passed(
    far: CassandraStore, link: Link
) -> None:
    """Not after the minute that the system takes to notice."""
    await far.join(Member("a", "host:1", 0, True, 1))
    link.mute()
    clock = asyncio.get_running_loop().time
    began_at = clock()
    with pytest.raises(StoreError, match="no answer within 1 s"):
        await far.heartbeat("a", 1)
    assert clock() - began_at < 1.5
    with pytest.raises(StoreError):
        await far.shards()
    assert await when_back(lambda: far.heartbeat("a", 2), 10) > 0
    assert len(await when_back(far.shards, 10)) == 4


async def test_a_line_whose_driver_has_lost_all_its_connections_for_good_gets_another_one(
    far: CassandraStore, near: CassandraStore
) -> None:
    """As the driver was seen to do under random faults: a pool that is shut down, and nobody who makes another."""
    fence = await take(far, 0)
    data = far._open.data
    first = data._connection
    for pool in list(first.session._pools.values()):
        pool.shutdown()
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, StoreUnavailable), "nobody was asked"
    assert (await when_back(far.shards))[0].fence == fence
    assert data._connection is not first
    assert await far.commit([Batch(fence, [make_timer()])]) == [Committed()]
    assert await all_timers(near) == [make_timer()]


async def test_a_heartbeat_does_not_wait_behind_other_work(far: CassandraStore, near: CassandraStore) -> None:
    fence = await take(far, 0)
    await far.join(Member("a", "host:1", 0, True, 1))
    work = asyncio.ensure_future(
        far.commit([Batch(fence, [make_timer(f"n-{number}", number, payload='"x"') for number in range(1_000)])])
    )
    beats = 0
    while not work.done():
        await far.heartbeat("a", beats + 1)
        beats += 1
    assert (await work) == [Committed()]
    assert beats >= 1
    assert await near.members() == [Member("a", "host:1", beats, True, 1)]


async def test_a_caller_who_gives_up_leaves_the_commit_to_finish(far: CassandraStore, near: CassandraStore) -> None:
    fence = await take(far, 0)
    sent = asyncio.Event()
    writer = Writer(Cutting(far._open.data, sent.set, once_sent=True), far._open.statements)
    commit = asyncio.ensure_future(far._open.run_to_end(writer.commit([Batch(fence, [make_timer()])])))
    await sent.wait()
    commit.cancel()
    await asyncio.gather(commit, return_exceptions=True)
    assert commit.cancelled()
    assert await writer.commit([Batch(fence, [make_timer("next")])]) == [Committed()]
    assert {timer.timer_id for timer in await all_timers(near)} == {make_timer().timer_id, "next"}


async def test_a_server_that_crashes_and_comes_back_has_all_that_it_acknowledged() -> None:
    with own("cassandra") as server:
        store = CassandraStore.from_url(fresh_database(server))
        await store.migrate()
        await store.open()
        await store.ensure_shards(2)
        fence = await take(store, 0)
        kept = []
        for number in range(20):
            timer = make_timer(f"n-{number}", number)
            assert await store.commit([Batch(fence, [timer])]) == [Committed()]
            kept.append(timer)
        await asyncio.to_thread(server.kill)
        [result] = await store.commit([Batch(fence, [make_timer("lost", 500)])])
        assert isinstance(result, StoreUnavailable | OutcomeUnknown)
        with pytest.raises(StoreUnavailable):
            await store.shards()
        await asyncio.to_thread(server.start)
        rows = await when_back(store.shards, 30)
        assert rows[0].fence == fence
        assert [timer for timer in await when_back(lambda: all_timers(store)) if timer.timer_id != "lost"] == kept
        # The server has forgotten the statements; they are prepared again without a word.
        assert await store.commit([Batch(fence, [make_timer("next", 600)])]) == [Committed()]
        await store.close()
