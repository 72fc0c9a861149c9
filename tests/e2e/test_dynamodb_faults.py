"""DynamoDB too busy, in error, or lost on the way: what the store says then, and what is true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from real_server import RealReceiver, RealServer, until

from duetime.domain.timer import Namespace
from duetime.errors import MemberDead, OutcomeUnknown, ShardLost, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Claim, Committed, Member, ShardRow, Store, open_store
from duetime.stores.dynamodb import connection as dynamodb_connection
from duetime.stores.dynamodb import store as adapter
from duetime.testing import make_reached, make_timer
from duetime.testing.conformance.harness import all_reached, all_timers, contents, take
from dynamodb_way import (
    Act,
    DynamoWay,
    Forward,
    Gate,
    Request,
    cancelled,
    cut,
    cut_after,
    one_at_a_time,
    refused,
    silence,
)
from servers import at_port, fresh_database, port_of, require

TRANSACTION, UPDATE, PUT = "TransactWriteItems", "UpdateItem", "PutItem"


@pytest.fixture
def database_url() -> str:
    return fresh_database(require("ministack"))


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
async def way(database_url: str) -> AsyncIterator[DynamoWay]:
    async with DynamoWay(port_of(database_url)) as made:
        yield made


@pytest.fixture
async def far(near: Store, way: DynamoWay, database_url: str) -> AsyncIterator[Store]:
    """A store behind the way."""
    store = open_store(at_port(database_url, way.port))
    await store.open()
    way.seen.clear()
    way.requests.clear()
    yield store
    await way.close()
    await store.close()


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamodb_connection, "BUSY_SECONDS", 1.0)
    monkeypatch.setattr(adapter, "CALL_SECONDS", 4.0)
    monkeypatch.setattr(adapter, "ATTEMPT_SECONDS", 2.0)


# --- too busy ------------------------------------------------------------------------------------

BUSY: dict[str, Act] = {
    "table": refused("ProvisionedThroughputExceededException"),
    "account": refused("RequestLimitExceeded"),
    "service": refused("ThrottlingException"),
    "partition": cancelled("None", "ThrottlingError"),
    "units": cancelled("None", "ProvisionedThroughputExceeded"),
    "another transaction": cancelled("TransactionConflict"),
}


@pytest.mark.parametrize("what", BUSY)
async def test_a_commit_that_is_told_to_slow_down_does_and_goes_through(
    far: Store, near: Store, way: DynamoWay, what: str
) -> None:
    fence = await take(far, 0)
    way.next(TRANSACTION, BUSY[what], times=3)
    assert await far.commit([Batch(fence, [make_timer()])]) == [Committed()]
    assert way.seen[TRANSACTION] == 4
    assert await all_timers(near) == [make_timer()]


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("what", BUSY)
async def test_if_that_goes_on_nothing_is_applied_and_the_shard_is_kept(
    far: Store, near: Store, way: DynamoWay, what: str
) -> None:
    fence = await take(far, 0)
    before = await contents(near)
    way.always(TRANSACTION, BUSY[what])
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, StoreThrottled)
    assert await contents(near) == before
    way.always(TRANSACTION, None)
    assert await far.commit([Batch(fence, [make_timer()])]) == [Committed()]


@pytest.mark.usefixtures("short_patience")
async def test_one_shard_that_is_too_busy_does_not_hold_up_the_others(far: Store, near: Store, way: DynamoWay) -> None:
    fences = [await take(far, shard_id) for shard_id in range(3)]
    await take(near, 1)

    async def act(request: Request, forward: Forward) -> bytes | None:
        is_first = request.body["TransactItems"][0]["ConditionCheck"]["Key"]["item_name"]["S"] == "00000"
        return await (BUSY["partition"](request, forward) if is_first else forward())

    way.always(TRANSACTION, act)
    results = await far.commit([Batch(fence, [make_timer()]) for fence in fences])
    assert [type(result) for result in results] == [StoreThrottled, ShardLost, Committed]
    assert [await all_timers(near, shard_id) for shard_id in range(3)] == [[], [], [make_timer()]]


async def test_claims_reads_and_heartbeats_are_patient_too(far: Store, near: Store, way: DynamoWay) -> None:
    await near.join(Member("a", "host:1", 0, True, 1))
    way.next(UPDATE, refused("TransactionConflictException"), times=2)
    [row] = await far.claim([Claim(0, 0, 7, "a", "host:1", 1)])
    assert row.nonce == 7
    way.next(UPDATE, refused("ThrottlingException"), times=2)
    await far.heartbeat("a", 1)
    way.next("Query", refused("ProvisionedThroughputExceededException"), times=2)
    assert [member.counter for member in await far.members()] == [1]
    way.next("Query", refused("InternalServerError", 500))
    assert len(await far.shards()) == 4


async def test_a_shard_that_is_full_refuses_and_says_why(far: Store, near: Store, way: DynamoWay) -> None:
    fence = await take(far, 0)
    way.next(TRANSACTION, cancelled("None", "ItemCollectionSizeLimitExceeded"))
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, StoreUnavailable)
    assert "10 GB" in str(result)
    assert way.seen[TRANSACTION] == 1, "it will not get better by asking again"


async def test_a_throttled_server_fires_on_time_and_keeps_its_shards(
    database_url: str, way: DynamoWay, tmp_path: Path
) -> None:
    server, receiver = RealServer(tmp_path, store_url=at_port(database_url, way.port)), RealReceiver()
    await receiver.start()
    try:
        await server.start()
        for number in range(20):
            timer = {"timerId": f"n-{number}", "delay": "3s", "callbackUrl": receiver.url}
            assert (await server.call("timers/create", {"namespace": "default", **timer}))[0] == 200
        before = way.seen[TRANSACTION]
        way.always(TRANSACTION, BUSY["partition"])
        await receiver.received(20)
        late = {"namespace": "default", "timerId": "late", "delay": "1s", "callbackUrl": receiver.url}
        create = asyncio.create_task(server.call("timers/create", late))
        await until(_seen(way, TRANSACTION, before + 60), "what the callbacks came to is tried again and again")
        way.always(TRANSACTION, None)
        assert (await create)[0] == 200
        await receiver.received(21)
        for number in range(20):
            await until(_is_delivered(server, f"n-{number}"), "it is settled")
        assert len(receiver.bodies) == 21, "each once"
        assert await server.metric("duetime_shards_lost_total") == 0
        assert await server.metric("duetime_reclaims_total") == 0
        assert await server.stop() == 0
    finally:
        await server.close()
        await receiver.close()


def _is_delivered(server: RealServer, timer_id: str) -> Callable[[], Awaitable[bool]]:
    async def is_so() -> bool:
        _, answer = await server.call("timers/get", {"namespace": "default", "timerId": timer_id})
        return bool(answer["timer"]["state"] == "delivered")

    return is_so


# --- lost on the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [cut, cut_after], ids=["request", "answer"])
async def test_a_commit_that_is_lost_is_sent_again_and_happens_once(
    far: Store, near: Store, way: DynamoWay, lost: Act
) -> None:
    fence = await take(far, 0)
    await near.commit([Batch(fence, [make_timer("old", 5)])])
    way.next(TRANSACTION, lost, times=2)
    batch = Batch(fence, [make_timer("new"), make_timer("old", 9, attempts=1)], (), [make_reached(make_timer("over"))])
    assert await far.commit([batch]) == [Committed(frozenset({1}))]
    sent = [request.body for request in way.requests if request.operation == TRANSACTION]
    assert len(sent) == 3
    assert sent[0] == sent[1] == sent[2], "the very same, by the same token"
    assert {timer.timer_id for timer in await all_timers(near)} == {"new", "old"}


@pytest.mark.usefixtures("short_patience")
@pytest.mark.parametrize("how", ["cut", "cut after", "silence", "500"])
async def test_if_no_answer_ever_comes_the_outcome_is_unknown(
    far: Store, near: Store, way: DynamoWay, how: str
) -> None:
    acts: dict[str, Act] = {
        "cut": cut,
        "cut after": cut_after,
        "silence": silence,
        "500": refused("InternalServerError", 500),
    }
    fence = await take(far, 0)
    way.always(TRANSACTION, acts[how])
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, OutcomeUnknown)
    assert len(await all_timers(near)) == (how == "cut after")


@pytest.mark.usefixtures("short_patience")
async def test_what_is_busy_after_a_lost_answer_is_not_taken_for_not_applied(
    far: Store, near: Store, way: DynamoWay
) -> None:
    fence = await take(far, 0)
    way.next(TRANSACTION, cut_after)
    way.always(TRANSACTION, BUSY["service"])
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, OutcomeUnknown)
    assert await all_timers(near) == [make_timer()]


async def test_an_attempt_that_may_still_be_on_its_way_is_not_followed_by_another_one(
    far: Store, near: Store, way: DynamoWay
) -> None:
    """The guess that the timer is new was wrong, and the request that says so was not the first."""
    fence = await take(far, 0)
    await near.commit([Batch(fence, [make_timer("old", 5)])])
    way.next(TRANSACTION, cut)
    [result] = await far.commit([Batch(fence, [make_timer("old", 9)])])
    assert isinstance(result, OutcomeUnknown)
    assert await all_timers(near) == [make_timer("old", 5)]


async def test_a_shard_that_was_lost_while_the_answer_was_is_lost(far: Store, near: Store, way: DynamoWay) -> None:
    fence = await take(far, 0)
    gate = Gate()

    way.next(TRANSACTION, cut)
    way.next(TRANSACTION, gate)
    commit = asyncio.create_task(far.commit([Batch(fence, [make_timer()])]))
    await gate.reached.wait()
    await take(near, 0)
    gate.opened.set()
    [result] = await commit
    assert isinstance(result, ShardLost)
    assert await all_timers(near) == []


@pytest.mark.parametrize("lost", [cut, cut_after], ids=["request", "answer"])
async def test_everything_else_that_is_lost_is_sent_again_too(
    far: Store, near: Store, way: DynamoWay, lost: Act
) -> None:
    way.next(PUT, lost)
    await far.join(Member("a", "host:1", 0, True, 1))
    way.next(UPDATE, lost)
    assert await far.heartbeat("a", 1) > 1_600_000_000_000
    way.next(UPDATE, lost)
    [row] = await far.claim([Claim(0, 0, 4711, "a", "host:1", 1)])
    assert row == ShardRow(0, 1, 4711, "a", "host:1", 1)
    await near.commit([Batch(row.fence, (), (), [make_reached(make_timer(), purge_at_ms=5)])])
    way.next(TRANSACTION, lost)
    assert await far.purge_reached([row.fence], 10, 10) == [1]
    assert await all_reached(near) == []
    way.next(UPDATE, lost)
    assert await far.release([row.fence]) == [None]
    assert [shard.owner_id for shard in await near.shards()] == [None] * 4
    way.next(PUT, lost)
    assert await far.put_namespace(Namespace(name="n", num_shards=4, created_at_ms=1), None)
    way.next(UPDATE, lost)
    assert await far.mark_dead("a", 1)
    way.next("DeleteItem", lost)
    await far.forget_member("a")
    assert await near.members() == []


async def test_the_dead_learn_it_even_if_the_first_answer_is_lost(far: Store, near: Store, way: DynamoWay) -> None:
    await near.join(Member("a", "host:1", 0, True, 1))
    await near.mark_dead("a", 0)
    way.next(UPDATE, cut_after)
    with pytest.raises(MemberDead):
        await far.heartbeat("a", 1)


@pytest.mark.usefixtures("short_patience")
async def test_a_service_that_cannot_be_reached_applies_nothing_and_comes_back(
    far: Store, near: Store, way: DynamoWay
) -> None:
    fence = await take(far, 0)
    await way.close()
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, StoreUnavailable | OutcomeUnknown), "a connection that was open may have carried it"
    [result] = await far.commit([Batch(fence, [make_timer()])])
    assert isinstance(result, StoreUnavailable), "certainly not applied"
    with pytest.raises(StoreUnavailable):
        await far.shards()
    async with way:
        assert await far.commit([Batch(fence, [make_timer()])]) == [Committed()]


# --- who waits for whom --------------------------------------------------------------------------


async def test_a_heartbeat_waits_for_nobody(far: Store, near: Store, way: DynamoWay) -> None:
    await near.join(Member("a", "host:1", 0, True, 1))
    fences = [await take(far, shard_id) for shard_id in range(4)]
    for operation in (TRANSACTION, "Query"):
        way.always(operation, silence)
    others: list[asyncio.Task[Any]] = []
    others += [asyncio.create_task(_ignored(far.commit([Batch(fence, [make_timer()])]))) for fence in fences * 20]
    others += [asyncio.create_task(_ignored(all_timers(far))) for _ in range(40)]
    await until(_seen(way, "Query", 16), "the reads hang")
    await far.heartbeat("a", 1)
    assert not any(other.done() for other in others), "all of them hang still"
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_the_members_are_told_while_a_heartbeat_hangs(far: Store, near: Store, way: DynamoWay) -> None:
    await near.join(Member("a", "host:1", 0, True, 1))
    way.always(UPDATE, silence)
    beat = asyncio.create_task(far.heartbeat("a", 1))
    await until(_seen(way, UPDATE, 1), "the heartbeat hangs")
    assert [member.instance_id for member in await far.members()] == ["a"]
    assert not beat.done()
    with pytest.raises(OutcomeUnknown):
        await beat


async def test_a_caller_that_gives_up_leaves_its_commit_to_finish(far: Store, near: Store, way: DynamoWay) -> None:
    fence = await take(far, 0)
    gate = Gate()
    way.next(TRANSACTION, gate)
    commit = asyncio.create_task(far.commit([Batch(fence, [make_timer()])]))
    await gate.reached.wait()
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    gate.opened.set()
    later = make_timer("later")
    assert await far.commit([Batch(fence, [later])]) == [Committed()], "in its turn, after the other"
    assert {timer.timer_id for timer in await all_timers(near)} == {make_timer().timer_id, "later"}


async def _ignored(work: Awaitable[object]) -> None:
    await work


def _seen(way: DynamoWay, operation: str, count: int) -> Callable[[], Awaitable[bool]]:
    async def has_come() -> bool:
        return way.seen[operation] >= count

    return has_come


# --- pages ---------------------------------------------------------------------------------------


async def test_a_short_or_empty_answer_that_is_not_the_last_is_read_on(far: Store, near: Store, way: DynamoWay) -> None:
    """As the service does with what it has looked at without finding anything, or after a megabyte."""
    fence = await take(near, 0)
    timers = [make_timer(f"n-{number}", number) for number in range(6)]
    ends = [make_reached(make_timer(f"e-{number}"), purge_at_ms=number) for number in range(3)]
    await near.commit([Batch(fence, timers, (), ends)])
    way.always("Query", one_at_a_time())
    assert await all_timers(far) == timers
    assert await all_reached(far) == ends
    found = await far.get_many([(0, timers[3].key), (0, ends[1].timer.key)])
    assert [found[0].timer, found[1].reached] == [timers[3], ends[1]]
    assert len(await far.shards()) == 4
    assert await far.purge_reached([fence], 10, 10) == [3]
