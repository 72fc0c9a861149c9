"""The doctor: what it calls wrong, in what order, and what it reads of a store that others use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from msgspec.structs import replace

from duetime.cli.diagnosis import GOOD, NOTE, WRONG, Finding, by_severity, check_cluster
from duetime.cli.doctor import _check_open_store
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
    return [finding for finding in by_severity(check_cluster(status)) if finding.verdict != GOOD]


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
            "1 alive, 1 dead; no new instance at 10.0.0.2:8463",
        ),
        (
            cluster(member(), member("10.0.0.2:8463", alive=False, self_=True)),
            "members",
            WRONG,
            "10.0.0.2:8463 was declared dead, but is running",
        ),
        (
            cluster(member(), member(instance_id="twin")),
            "addresses",
            WRONG,
            "2 live members have the address 10.0.0.1:8463",
        ),
        (
            cluster(member("127.0.0.1:8463"), member("10.0.0.2:8463")),
            "addresses",
            WRONG,
            "127.0.0.1:8463, which means another machine when 10.0.0.2 connects",
        ),
        (
            cluster(member("0.0.0.0:8463"), member("10.0.0.2:8463")),
            "addresses",
            WRONG,
            "which means all addresses",
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
            "the oldest was due 2 min ago, at 10.0.0.1:8463",
        ),
        (cluster(member(oldest_due_ms=6_000), oldest_due_ms=6_000), "backlog", NOTE, "the oldest was due 6 s ago"),
        (cluster(writes_waiting=5_000), "writes", NOTE, "5000 writes wait"),
        (
            cluster(member(lateness_p99_ms=900.0), lateness_p50_ms=5.0, lateness_p99_ms=900.0),
            "lateness",
            NOTE,
            "p99 within 900 ms; late at 10.0.0.1:8463",
        ),
    ],
)
def test_a_finding_has_a_reason_and_advice(status: ClusterStatus, check: str, verdict: str, says: str) -> None:
    (finding,) = problems(status)
    assert (finding.check, finding.verdict) == (check, verdict)
    assert says in finding.says
    assert (finding.why and finding.advice) or finding.says.endswith("stopping")


def test_a_restarted_member_and_loopback_addresses_on_one_machine_are_not_problems() -> None:
    restarted = cluster(member("127.0.0.1:1"), member("127.0.0.1:2"), absent("127.0.0.1:1", alive=False))
    assert problems(restarted) == []


def test_a_backlog_lists_the_destinations_it_waits_for() -> None:
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
    assert "35 timers held" in backlog.says
    assert "25 wait for https://dead.test: its breaker is open after 9 failures in a row" in dead.says
    assert "10 wait for https://slow.test: 64 calls to it are in flight" in slow.says


def test_wrong_findings_come_first() -> None:
    status = cluster(
        member(version="0.2.0"),
        member("10.0.0.2:8463", clock_skew_ms=900),
        absent("10.0.0.3:8463", alive=False),
    )
    verdicts = [finding.verdict for finding in by_severity(check_cluster(status))]
    assert verdicts == sorted(verdicts, key=(WRONG, NOTE, GOOD).index)
    assert verdicts[0] == WRONG


# --- the store, when no server answers -----------------------------------------------------------


def checks(store: MemoryStore, status: ClusterStatus | None = None) -> Callable[[], Awaitable[list[Finding]]]:
    async def ask() -> list[Finding]:
        return [finding async for finding in _check_open_store(store, load_config(environ={}), status)]

    return ask


def with_store(scenario: Callable[[MemoryStore], Awaitable[None]], kind: type[MemoryStore] = MemoryStore) -> None:
    async def run(clock: VirtualClock) -> None:
        store = kind(clock)
        await store.migrate()
        await store.open()
        await scenario(store)

    run_virtual(run)


def of(findings: list[Finding], check: str) -> Finding:
    (finding,) = (finding for finding in findings if finding.check == check)
    return finding


async def join(store: MemoryStore, name: str, address: str) -> None:
    await store.join(MemberRow(name, address, 0, True, 0))


async def beats(store: MemoryStore, name: str) -> None:
    for counter in range(2, 100, 2):
        await asyncio.sleep(0.5)
        await store.heartbeat(name, counter)


def test_members_without_heartbeats_are_distinguished_from_running_ones() -> None:
    async def scenario(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        await join(store, "b", "10.0.0.2:1")
        beating = asyncio.ensure_future(beats(store, "a"))
        finding = of(await checks(store)(), "members")
        assert finding.verdict == NOTE
        assert "no heartbeat in 2 s from 10.0.0.2:1" in finding.says
        beating.cancel()
        finding = of(await checks(store)(), "members")
        assert finding.verdict == WRONG
        assert "no timer fires" in finding.why

    with_store(scenario)


def test_a_store_without_a_live_member_is_reported() -> None:
    async def scenario(store: MemoryStore) -> None:
        assert "no instance uses this store" in of(await checks(store)(), "members").says

    with_store(scenario)


def test_free_shards_and_shards_of_dead_members_are_found_in_the_rows() -> None:
    async def scenario(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        await store.ensure_shards(3)
        await store.claim([Claim(0, 0, 1, "a", "10.0.0.1:1", 0), Claim(1, 0, 1, "gone", "10.0.0.2:1", 0)])
        beating = asyncio.ensure_future(beats(store, "a"))
        finding = of(await checks(store)(), "shards")
        assert finding.verdict == WRONG
        assert finding.says == "of 3, 1 without an owner and 1 of dead members: 1, 2"
        beating.cancel()

    with_store(scenario)


def test_a_server_that_uses_another_store_is_reported() -> None:
    async def scenario(store: MemoryStore) -> None:
        await join(store, "a", "10.0.0.1:1")
        findings = await checks(store, replace(cluster(), instance_id="stranger"))()
        assert "does not use this store" in findings[-1].says
        assert findings[-1].verdict == NOTE
        findings = await checks(store, replace(cluster(), instance_id="a"))()
        assert "members" not in {finding.check for finding in findings}  # the server reported them

    with_store(scenario)


class DiagnosingStore(MemoryStore):
    async def diagnose(self) -> Diagnosis:
        return Diagnosis(["PostgreSQL 18.1"], [Danger("fsync is off", "a crash may destroy everything")])


def test_the_diagnosis_of_a_store_becomes_findings() -> None:
    async def scenario(store: MemoryStore) -> None:
        good, danger = by_severity(f for f in await checks(store)() if f.check == "database")[::-1]
        assert (good.verdict, good.says) == (GOOD, "PostgreSQL 18.1")
        assert (danger.verdict, danger.says, danger.why) == (WRONG, "fsync is off", "a crash may destroy everything")

    with_store(scenario, DiagnosingStore)


@pytest.mark.parametrize(
    "error",
    [
        SetupError("store.url: db/x refuses the password"),
        StoreUnavailable("postgresql: the connection was refused"),
        SchemaMismatch("db/x has no tables yet"),
    ],
)
def test_a_store_that_cannot_be_opened_is_a_finding_and_not_a_traceback(error: Exception) -> None:
    class Closed(DiagnosingStore):
        refuses = False

        async def open(self) -> None:
            if self.refuses:
                raise error

    async def scenario(store: MemoryStore) -> None:
        Closed.refuses = True
        finding = of(await checks(store)(), "store")
        assert finding.verdict == WRONG
        assert finding.says == str(error)

    with_store(scenario, Closed)
