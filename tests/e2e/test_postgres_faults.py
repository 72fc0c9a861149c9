"""PostgreSQL goes away in every way it can: what the store says then, what is true, and how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from real_server import until
from scripts.servers import Postgres

from duetime.domain.timer import Timer
from duetime.errors import FailedOver, MemberDead, OutcomeUnknown, StoreError, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Fence, Member, Store, open_store
from duetime.stores import sql_store
from duetime.testing import make_timer
from duetime.testing.conformance.harness import all_timers, take
from servers import at_port, fresh_database, own


class Link:
    """A way to the server that can be told what to lose. Nothing is left to chance: it acts on the next message."""

    def __init__(self, port: int) -> None:
        self._upstream_port = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.loses_requests = self.loses_answers = self.swallows = False
        self.lost = asyncio.Event()
        self.connections = 0
        self.port = 0

    async def start(self) -> Link:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def leads_to(self, port: int) -> None:
        """From now on, for those who come; who is inside stays where he is."""
        self._upstream_port = port

    async def refuse(self) -> None:
        """Nobody gets in any more, and those inside are thrown out."""
        assert self._server is not None
        self._server.close()
        self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def stop(self) -> None:
        await self.refuse()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        theirs, ours = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        self._writers |= {writer, ours}
        for source, target, from_client in ((reader, ours, True), (theirs, writer, False)):
            task = asyncio.create_task(self._pass_on(source, target, from_client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, from_client: bool) -> None:
        with contextlib.suppress(OSError):
            while message := await source.read(65_536):
                if self.swallows:
                    self.lost.set()
                elif self.loses_requests if from_client else self.loses_answers:
                    self.lost.set()
                    self.cut()
                else:
                    target.write(message)
                    await target.drain()
            target.close()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_store, "STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(sql_store, "MEMBERSHIP_SECONDS", 0.5)


@pytest.fixture
async def link(postgres_server: Postgres) -> AsyncIterator[Link]:
    made = await Link(postgres_server.port).start()
    yield made
    await made.stop()


@pytest.fixture
async def near(database_url: str) -> AsyncIterator[Store]:
    """A store with a way of its own: it sees what is true."""
    store = open_store(database_url)
    await store.migrate()
    await store.open()
    await store.ensure_shards(4)
    yield store
    await store.close()


@pytest.fixture
async def far(near: Store, link: Link, database_url: str) -> AsyncIterator[Store]:
    """A store behind the link, with its sessions connected and its statements prepared."""
    store = open_store(at_port(database_url, link.port))
    await store.open()
    fence = await take(store, 3)
    await asyncio.gather(
        *(store.commit([Batch(fence, [make_timer(f"warm-{n}")])]) for n in range(store.capabilities.parallel_commits))
    )
    await asyncio.gather(*(all_timers(store) for _ in range(sql_store.READERS)))
    yield store
    await link.refuse()
    await store.close()


def put(fence: Fence, timer: Timer) -> list[Batch]:
    return [Batch(fence, [timer])]


async def test_a_request_that_never_arrives_applies_nothing(far: Store, near: Store, link: Link) -> None:
    fence = await take(far, 0)
    link.loses_requests = True
    with pytest.raises((OutcomeUnknown, StoreUnavailable)):
        await far.commit(put(fence, make_timer()))
    assert link.lost.is_set()
    assert await all_timers(near) == []
    link.loses_requests = False
    assert await far.commit(put(fence, make_timer())) == [Committed()]


async def test_an_answer_that_never_arrives_is_an_unknown_outcome_and_the_write_is_there(
    far: Store, near: Store, link: Link
) -> None:
    fence = await take(far, 0)
    link.loses_answers = True
    with pytest.raises(OutcomeUnknown):
        await far.commit(put(fence, make_timer()))
    assert await all_timers(near) == [make_timer()]
    with pytest.raises(StoreUnavailable):
        await far.shards()  # a read is never in doubt
    link.loses_answers = False
    [row] = await far.claim([Claim(0, fence.version, 77, "a", "host:1", 1)])  # what the engine does
    assert row.nonce == 77
    assert await all_timers(far) == [make_timer()]


async def test_a_claim_whose_answer_is_lost_is_known_by_its_nonce(far: Store, near: Store, link: Link) -> None:
    await take(far, 1)  # its session is connected
    link.loses_answers = True
    with pytest.raises(OutcomeUnknown):
        await far.claim([Claim(0, 0, 4711, "a", "host:1", 1)])
    link.loses_answers = False
    assert (await far.shards())[0].nonce == 4711


async def test_a_server_that_says_nothing_is_given_up_at_the_deadline_without_a_word(
    short_patience: None, far: Store, near: Store, link: Link
) -> None:
    fence = await take(far, 0)
    connections = link.connections
    link.swallows = True
    with pytest.raises(OutcomeUnknown, match=r"no answer within 0\.5 s"):
        await far.commit(put(fence, make_timer()))
    with pytest.raises(StoreUnavailable, match=r"no answer within 0\.5 s"):
        await far.shards()
    assert link.connections == connections, "no cancel request, which would come by a connection of its own"
    link.swallows = False
    assert await far.commit(put(fence, make_timer())) == [Committed()]
    assert await all_timers(near) == [make_timer()]


async def test_who_stops_waiting_for_a_write_neither_stops_it_nor_harms_its_session(far: Store, near: Store) -> None:
    fence = await take(far, 0)
    for number in range(20):
        write = asyncio.create_task(far.commit(put(fence, make_timer(f"n-{number}", number))))
        for _ in range(number % 5):
            await asyncio.sleep(0)
        write.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await write
    assert await far.commit(put(fence, make_timer("last", 99))) == [Committed()]

    async def all_there() -> bool:
        began = {f"n-{number}" for number in range(20) if number % 5}  # the others were cancelled before that
        return {timer.timer_id for timer in await all_timers(near)} == began | {"last"}

    await until(all_there, "all writes that began, and no other")


async def test_a_server_that_cannot_be_reached_is_unavailable_and_all_who_wait_hear_it_at_once(
    far: Store, link: Link
) -> None:
    fence = await take(far, 0)
    await link.refuse()
    for _ in range(2):
        calls = [far.commit(put(fence, make_timer(f"n-{n}"))) for n in range(30)] + [far.shards() for _ in range(30)]
        answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
        assert all(isinstance(answer, StoreError) for answer in answers)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers), "nothing was even sent"
    await link.start()
    assert await far.commit(put(fence, make_timer("after"))) == [Committed()]


async def test_a_heartbeat_waits_behind_nothing(near: Store, database_url: str) -> None:
    """While commits, claims and lists are stuck behind a lock, the member stays alive."""
    import asyncpg

    fence = await take(near, 0)
    await near.join(Member("me", "host:1", 0, True, 1))
    other = await asyncpg.connect(database_url)
    await other.execute("BEGIN; LOCK TABLE shards, timers")
    stuck = [
        asyncio.ensure_future(near.commit(put(fence, make_timer()))),
        asyncio.ensure_future(near.claim([Claim(0, 9, 9, "x", "y", 1)])),
        *(asyncio.ensure_future(near.shards()) for _ in range(5)),
    ]
    for counter in range(1, 6):
        await asyncio.wait_for(near.heartbeat("me", counter), 1)
    assert await other.fetchval("SELECT counter FROM members") == 5
    assert not any(task.done() for task in stuck)
    await other.execute("ROLLBACK")
    await asyncio.gather(*stuck)
    await other.close()


# --- the server itself ---------------------------------------------------------------------------


@pytest.fixture(params=["postgres15", "postgres18"])
def mine(request: pytest.FixtureRequest) -> Iterator[Postgres]:
    """A server of the test's own: it will be killed."""
    with own(request.param) as server:
        yield server


async def opened(url: str) -> tuple[Store, Fence]:
    store = open_store(url)
    await store.migrate()
    await store.open()
    await store.ensure_shards(4)
    return store, await take(store, 0)


@pytest.mark.parametrize("way", ["kill", "halt"])
async def test_after_a_crash_under_load_every_session_recovers_and_what_was_acknowledged_is_there(
    mine: Postgres, way: str
) -> None:
    store, fence = await opened(fresh_database(mine))
    acknowledged: list[str] = []
    failures: list[StoreError] = []

    async def write(writer: int) -> None:
        """Goes on until the server is back."""
        number, back = 0, 0
        while back < 5:
            number += 1
            name = f"{writer}-{number}"
            try:
                assert await store.commit(put(fence, make_timer(name))) == [Committed()]
            except StoreError as error:
                failures.append(error)
                await asyncio.sleep(0.02)
            else:
                acknowledged.append(name)
                back += bool(failures)

    parallel_commits = [asyncio.create_task(write(writer)) for writer in range(3)]

    async def busy() -> bool:
        return len(acknowledged) > 100

    await until(busy, "a hundred commits")
    await asyncio.to_thread(mine.kill if way == "kill" else mine.halt)
    await asyncio.to_thread(mine.start)
    await asyncio.wait_for(asyncio.gather(*parallel_commits), 60)
    assert all(isinstance(error, OutcomeUnknown | StoreUnavailable) for error in failures)
    stored = {timer.timer_id for timer in await all_timers(store)}
    assert stored >= set(acknowledged)
    await store.join(Member("me", "host:1", 0, True, 1))
    await store.heartbeat("me", 1)
    await store.close()


async def test_case_6_whoever_beats_on_a_database_that_failed_over_is_dead_and_joins_again(mine: Postgres) -> None:
    url = fresh_database(mine)
    standby = await asyncio.to_thread(mine.standby)
    store = open_store(f"{url.replace(f':{mine.port}/', f':{mine.port},127.0.0.1:{standby.port}/')}")
    await store.migrate()
    await store.open()
    await store.join(Member("me", "host:1", 0, True, 1))
    await store.heartbeat("me", 1)
    await asyncio.to_thread(standby.wait_until_caught_up)
    await asyncio.to_thread(mine.kill)
    with pytest.raises(StoreError) as caught:
        await store.heartbeat("me", 2)
    assert not isinstance(caught.value, MemberDead)
    with pytest.raises(StoreUnavailable):
        await store.shards()  # the standby is not asked: it may lag
    await asyncio.to_thread(standby.promote)
    with pytest.raises(MemberDead, match="failed over"):
        await _until_it_answers(store)
    await store.join(Member("again", "host:1", 0, True, 1))
    for counter in range(1, 4):
        await store.heartbeat("again", counter)
    await store.close()


async def test_case_6_after_a_failover_no_session_stays_with_the_server_of_before(mine: Postgres) -> None:
    """The old primary is still up, and only the heartbeat has lost it: the other sessions must not go on there."""
    url = fresh_database(mine)
    standby = await asyncio.to_thread(mine.standby)
    link = await Link(mine.port).start()
    store = open_store(at_port(url, link.port))
    await store.migrate()
    await store.open()
    await store.join(Member("me", "host:1", 0, True, 1))
    await store.ensure_shards(4)
    fence = await take(store, 0)
    await store.commit(put(fence, make_timer()))
    await asyncio.to_thread(standby.wait_until_caught_up)
    await asyncio.to_thread(standby.promote)
    link.leads_to(standby.port)
    beating = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%members SET counter%'"
    await store.heartbeat("me", 1)
    await asyncio.to_thread(mine.query, beating + " AND pid <> pg_backend_pid()")
    with pytest.raises(FailedOver):
        await _until_it_answers(store)
    await store.join(Member("again", "host:1", 0, True, 1))
    await store.heartbeat("again", 1)
    await store.commit(put(await take(store, 1), make_timer("after")))
    straight = open_store(standby.url(url.rpartition("/")[2]))
    await straight.open()
    assert await all_timers(straight, 1) == [make_timer("after")], "what is acknowledged is where the heartbeat is"
    await straight.close()
    await store.close()
    await link.stop()


async def _until_it_answers(store: Store) -> None:
    for counter in range(2, 400):
        try:
            await store.heartbeat("me", counter)
        except (StoreUnavailable, OutcomeUnknown):
            await asyncio.sleep(0.05)
        else:
            return
