"""The doctor: what it calls wrong, in what order, and what it reads of a store that others use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from duetime.cli.diagnosis import GOOD, NOTE, WRONG, Finding, about_cluster, by_severity
from duetime.cli.doctor import _examined
from duetime.client import ClusterStatus, HeldFor, Member, ShardCounts
from duetime.config import load_config
from duetime.errors import SchemaMismatch, SetupError, StoreUnavailable
from duetime.store import Claim, Danger, Diagnosis
from duetime.store import Member as MemberRow
from duetime.stores.memory import MemoryStore
from duetime.testing.virtual import VirtualClock, run_virtual

JOINED = datetime(2027, 1, 1, tzinfo=UTC)


def member(address: str = "10.0.0.1:8463", **changes: Any) -> Member:
    healthy: dict[str, Any] = {
        "instance_id": f"id of {address}",
        "address": address,
        "alive": True,
        "self_": False,
        "shards": 8,
        "joined_at": JOINED,
        "version": "0.1.0",
        "ready": True,
        "lease_ms": 2_500,
        "clock_skew_ms": 0,
        "in_memory": 0,
        "in_flight": 0,
        "held": 0,
        "writes_waiting": 0,
    }
    return Member(**healthy | changes)


def absent(address: str, **changes: Any) -> Member:
    """One that says nothing of itself."""
    bare = ("version", "ready", "lease_ms", "clock_skew_ms", "in_memory", "in_flight", "held", "writes_waiting")
    return member(address, **dict.fromkeys(bare) | changes)


def cluster(*members: Member, **changes: Any) -> ClusterStatus:
    healthy: dict[str, Any] = {
        "instance_id": "i",
        "version": "0.1.0",
        "store": "postgresql",
        "ready": True,
        "clock_skew_max_ms": 500,
        "dead_after_ms": 3_500,
        "members": members or (member("10.0.0.1:8463", self_=True), member("10.0.0.2:8463")),
        "shard_counts": ShardCounts(total=16, owned=16, free=0, of_dead=0),
        "unowned_shards": (),
        "in_memory": 0,
        "in_flight": 0,
        "held": 0,
        "writes_waiting": 0,
        "clock_skew_ms": 0,
    }
    return ClusterStatus(**healthy | changes)


def problems(status: ClusterStatus) -> list[Finding]:
    return [finding for finding in by_severity(about_cluster(status)) if finding.verdict != GOOD]


def test_nothing_is_wrong_with_a_healthy_cluster() -> None:
    assert problems(cluster()) == []


@pytest.mark.parametrize(
    ("status", "check", "verdict", "says"),
    [
        (
            cluster(member(), absent("10.0.0.2:8463", unreachable="connection refused by 10.0.0.2:8463")),
            "members",
            WRONG,
            "10.0.0.2:8463 is alive, but the instance that was asked cannot reach it: connection refused",
        ),
        (
            cluster(member(), member("10.0.0.2:8463", ready=False, reason="the lease has run out: timeout")),
            "members",
            WRONG,
            "10.0.0.2:8463 is not ready: the lease has run out: timeout",
        ),
        (
            cluster(member(), member("10.0.0.2:8463", ready=False, reason="stopping")),
            "members",
            NOTE,
            "10.0.0.2:8463 is not ready: stopping",
        ),
        (
            cluster(member(), absent("10.0.0.2:8463", alive=False)),
            "members",
            NOTE,
            "1 alive, 1 dead; nobody is back at 10.0.0.2:8463",
        ),
        (
            cluster(member(), member("10.0.0.2:8463", alive=False, self_=True)),
            "members",
            WRONG,
            "10.0.0.2:8463 was declared dead, but lives",
        ),
        (
            cluster(member(), member(instance_id="twin")),
            "addresses",
            WRONG,
            "2 living members say that they are at 10.0.0.1:8463",
        ),
        (
            cluster(member("127.0.0.1:8463"), member("10.0.0.2:8463")),
            "addresses",
            WRONG,
            "127.0.0.1:8463, which from 10.0.0.2 is another machine",
        ),
        (
            cluster(member("0.0.0.0:8463"), member("10.0.0.2:8463")),
            "addresses",
            WRONG,
            "which stands for every address",
        ),
        (
            cluster(shard_counts=ShardCounts(total=16, owned=11, free=2, of_dead=3), unowned_shards=(1, 2, 7, 8, 9)),
            "shards",
            WRONG,
            "of 16, 2 without an owner and 3 of dead members: 1, 2, 7, 8, 9",
        ),
        (cluster(member(clock_skew_ms=-700), clock_skew_ms=-700), "clock skew", WRONG, "-700 ms off the database's"),
        (cluster(member(clock_skew_ms=300), clock_skew_ms=300), "clock skew", NOTE, "300 ms off the database's"),
        (cluster(member(), member("10.0.0.2:8463", version="0.2.0")), "versions", NOTE, "1 of 0.1.0, 1 of 0.2.0"),
        (
            cluster(member(oldest_due_ms=90_000), oldest_due_ms=90_000),
            "backlog",
            WRONG,
            "the oldest due 2 min ago, at 10.0.0.1:8463",
        ),
        (cluster(member(oldest_due_ms=6_000), oldest_due_ms=6_000), "backlog", NOTE, "the oldest due 6 s ago"),
        (cluster(writes_waiting=5_000), "writes", NOTE, "5000 writes wait"),
        (
            cluster(member(lateness_p99_ms=900.0), lateness_p50_ms=5.0, lateness_p99_ms=900.0),
            "lateness",
            NOTE,
            "p99 within 900 ms; late at 10.0.0.1:8463",
        ),
    ],
)
def test_a_fault_is_found_and_comes_with_its_meaning_and_advice(
    status: ClusterStatus, check: str, verdict: str, says: str
) -> None:
    (finding,) = problems(status)
    assert (finding.check, finding.verdict) == (check, verdict)
    assert says in finding.says
    assert (finding.why and finding.advice) or finding.says.endswith("stopping")


def test_a_restarted_member_is_no_loss_and_one_machine_may_use_its_loopback() -> None:
    restarted = cluster(member("127.0.0.1:1"), member("127.0.0.1:2"), absent("127.0.0.1:1", alive=False))
    assert problems(restarted) == []


def test_a_backlog_is_explained_by_the_destinations_it_waits_for() -> None:
    def held(url: str, count: int, failures: int = 0) -> HeldFor:
        return HeldFor(destination=url, held=count, in_flight=64, failures=failures, breaker_open=failures > 0)

    status = cluster(
        member(held_for=(held("https://slow.test", 10), held("https://dead.test", 5, failures=7))),
        member("10.0.0.2:8463", held_for=(held("https://dead.test", 20, failures=9),)),
        held=35,
        oldest_due_ms=100_000,
    )
    backlog, dead, slow = problems(status)
    assert (backlog.check, backlog.verdict) == ("backlog", NOTE)
    assert "35 timers held back" in backlog.says
    assert "25 wait for https://dead.test: its breaker is open after 9 failures in a row" in dead.says
    assert "10 wait for https://slow.test: 64 calls are under way" in slow.says


def test_what_is_wrong_comes_first() -> None:
    status = cluster(
        member(version="0.2.0"),
        member("10.0.0.2:8463", clock_skew_ms=900),
        absent("10.0.0.3:8463", alive=False),
    )
    verdicts = [finding.verdict for finding in by_severity(about_cluster(status))]
    assert verdicts == sorted(verdicts, key=(WRONG, NOTE, GOOD).index)
    assert verdicts[0] == WRONG


# --- the store, when no server answers -----------------------------------------------------------


def examined(store: MemoryStore, status: ClusterStatus | None = None) -> Callable[[], Awaitable[list[Finding]]]:
    async def ask() -> list[Finding]:
        return [finding async for finding in _examined(store, load_config(environ={}), status)]

    return ask


def with_store(story: Callable[[MemoryStore], Awaitable[None]], kind: type[MemoryStore] = MemoryStore) -> None:
    async def told(clock: VirtualClock) -> None:
        store = kind(clock)
        await store.migrate()
        await store.open()
        await story(store)

    run_virtual(told)


def of(findings: list[Finding], check: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.check == check)
    return finding


async def join(store: MemoryStore, name: str, address: str) -> None:
    await store.join(MemberRow(name, address, 0, True, 0))


async def beats(store: MemoryStore, name: str) -> None:
    for counter in range(2, 100, 2):
        await asyncio.sleep(0.5)
        await store.heartbeat(name, counter)


def test_members_whose_heartbeats_do_not_come_are_told_from_those_that_live() -> None:
    async def story(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        await join(store, "b", "10.0.0.2:1")
        beating = asyncio.ensure_future(beats(store, "a"))
        finding = of(await examined(store)(), "members")
        assert finding.verdict == NOTE
        assert "no heartbeat in 2 s from 10.0.0.2:1" in finding.says
        beating.cancel()
        finding = of(await examined(store)(), "members")
        assert finding.verdict == WRONG
        assert "nothing is fired" in finding.why

    with_store(story)


def test_a_store_without_a_living_member_says_so() -> None:
    async def story(store: MemoryStore) -> None:
        assert "no instance is running" in of(await examined(store)(), "members").says

    with_store(story)


def test_shards_of_the_dead_and_free_ones_are_found_in_the_rows() -> None:
    async def story(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        await store.ensure_shards(3)
        await store.claim([Claim(0, 0, 1, "a", "10.0.0.1:1", 0), Claim(1, 0, 1, "gone", "10.0.0.2:1", 0)])
        beating = asyncio.ensure_future(beats(store, "a"))
        finding = of(await examined(store)(), "shards")
        assert finding.verdict == WRONG
        assert finding.says == "of 3, 1 without an owner and 1 of dead members: 1, 2"
        beating.cancel()

    with_store(story)


def test_a_server_that_is_on_another_store_is_noticed() -> None:
    async def story(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        findings = await examined(store, replace(cluster(), instance_id="stranger"))()
        assert "not on this store" in findings[-1].says
        assert findings[-1].verdict == NOTE
        findings = await examined(store, replace(cluster(), instance_id="a"))()
        assert "members" not in {finding.check for finding in findings}  # they have spoken for themselves

    with_store(story)


class Talkative(MemoryStore):
    async def diagnose(self) -> Diagnosis:
        return Diagnosis(["PostgreSQL 18.1"], [Danger("fsync is off", "a crash may destroy everything")])


def test_a_store_is_heard_about_its_own_database() -> None:
    async def story(store: MemoryStore) -> None:
        good, danger = by_severity(f for f in await examined(store)() if f.check == "database")[::-1]
        assert (good.verdict, good.says) == (GOOD, "PostgreSQL 18.1")
        assert (danger.verdict, danger.says, danger.why) == (WRONG, "fsync is off", "a crash may destroy everything")

    with_store(story, Talkative)


@pytest.mark.parametrize(
    "error",
    [
        SetupError("store.url: db/x refuses the password"),
        StoreUnavailable("postgresql: the connection was refused"),
        SchemaMismatch("db/x has no tables yet"),
    ],
)
def test_a_store_that_cannot_be_opened_is_a_finding_and_not_a_traceback(error: Exception) -> None:
    class Closed(Talkative):
        refuses = False

        async def open(self) -> None:
            if self.refuses:
                raise error

    async def story(store: MemoryStore) -> None:
        Closed.refuses = True
        finding = of(await examined(store)(), "store")
        assert finding.verdict == WRONG
        assert finding.says == str(error)

    with_store(story, Closed)
