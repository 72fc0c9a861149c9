"""The doctor: what it calls wrong, in what order, and what it reads of a store that others use."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from command_line import Run
from msgspec.structs import replace
from threaded_server import free_port, serving

from duetime.cli import doctor
from duetime.cli.diagnosis import GOOD, NOTE, WRONG, Finding, by_severity, check_cluster
from duetime.cli.doctor import _check_certificate, _check_open_files, _check_open_store
from duetime.cli.output import now_ms
from duetime.client import Broker, ClusterStatus, HeldFor, Member, ShardCounts
from duetime.config import load_config
from duetime.descriptors import size
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
            "held",
            WRONG,
            "the oldest was due 2 min ago, at 10.0.0.1:8463",
        ),
        (cluster(member(oldest_due_ms=6_000), oldest_due_ms=6_000), "held", NOTE, "the oldest was due 6 s ago"),
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


def nats(**changes: Any) -> Broker:
    working: dict[str, Any] = {"name": "nats", "connected": True, "consuming": True, "waiting": 70, "in_flight": 3}
    return Broker(**working | changes)


AWAY = nats(connected=False, away_reason="connection refused", consuming=False)
BLOCKED = nats(consuming=False, not_consuming_reason="the store is away")


@pytest.mark.parametrize(
    ("first", "second", "verdict", "says", "why"),
    [
        ((nats(),), (AWAY,), WRONG, "10.0.0.2:8463 is not connected to nats: connection refused", "receives no comm"),
        ((nats(),), (BLOCKED,), NOTE, "10.0.0.2:8463 receives no commands from nats: the store is away", "other inst"),
        ((nats(),), (), WRONG, "nats is configured at 10.0.0.1:8463, but not at 10.0.0.2:8463", "they fail"),
    ],
)
def test_a_broker_that_an_instance_cannot_use_is_named_with_the_reason(
    first: tuple[Broker, ...], second: tuple[Broker, ...], verdict: str, says: str, why: str
) -> None:
    (finding,) = problems(cluster(member(brokers=first), member("10.0.0.2:8463", brokers=second)))
    assert (finding.check, finding.verdict, finding.says) == ("brokers", verdict, says)
    assert why in finding.why
    assert finding.advice


def test_commands_that_no_instance_receives_are_wrong() -> None:
    (finding,) = problems(cluster(member(brokers=(BLOCKED,))))
    assert (finding.check, finding.verdict) == ("brokers", WRONG)
    assert "no instance does: commands wait in nats (70 now)" in finding.why


def test_brokers_that_work_are_one_line_each() -> None:
    kafka = Broker(name="kafka", connected=True, in_flight=0)
    unasked = absent("10.0.0.3:8463", unreachable="timeout")
    status = cluster(member(brokers=(nats(), kafka)), member("10.0.0.2:8463", brokers=(nats(), kafka)), unasked)
    assert [finding.says for finding in check_cluster(status) if finding.check == "brokers"] == [
        "kafka: connected from 2 instances; no commands are read from it",
        "nats: connected from 2 instances; commands: 70 waiting, 6 in flight, 0 to retry",
    ]


RETRYING = nats(retrying=2, retry_reason="quota of a", unacknowledged=37)
REFUSING = {"refused": 3, "refused_ago_ms": 90_000, "refusal_reason": "the message is not JSON"}


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (
            RETRYING,
            nats(retrying=27, retry_reason="quota of b", unacknowledged=41),
            "29 commands of nats wait for a retry; the last at 10.0.0.2:8463: quota of b",
        ),
        (
            nats(in_flight=0, unacknowledged=9),
            nats(in_flight=2, unacknowledged=9),
            "5 commands of nats wait for an acknowledgement, and no instance works on them",
        ),
        (
            nats(**REFUSING),
            nats(refused=4, refused_ago_ms=1_000, refusal_reason=None),
            "7 commands of nats became dead letters since the instances started; the last at 10.0.0.2:8463, 1 s ago: "
            "the reason is in the log",
        ),
        (
            nats(**REFUSING),
            nats(refused=4, refused_ago_ms=900_000_000, refusal_reason="old"),
            "7 commands of nats became dead letters since the instances started; the last at 10.0.0.1:8463, 2 min ago: "
            "the message is not JSON",
        ),
        (nats(remark="no topic matches"), nats(remark="no topic matches"), "nats: no topic matches"),
    ],
)
def test_what_happens_to_commands_of_a_broker_that_works_is_a_warning(first: Broker, second: Broker, says: str) -> None:
    (finding,) = problems(cluster(member(brokers=(first,)), member("10.0.0.2:8463", brokers=(second,))))
    assert (finding.check, finding.verdict, finding.says) == ("brokers", NOTE, says)
    assert finding.why
    assert finding.advice


def test_commands_that_instances_work_on_and_old_dead_letters_are_no_warning() -> None:
    broker = nats(in_flight=3, unacknowledged=6, refused=4, refused_ago_ms=900_000_000, refusal_reason="old")
    assert problems(cluster(member(brokers=(broker,)))) == []


def test_a_restarted_member_and_loopback_addresses_on_one_machine_are_not_problems() -> None:
    restarted = cluster(member("127.0.0.1:1"), member("127.0.0.1:2"), absent("127.0.0.1:1", alive=False))
    assert problems(restarted) == []


def test_held_timers_are_listed_by_their_flow() -> None:
    def held_for(url: str, count: int, failures: int = 0) -> HeldFor:
        return HeldFor(destination=url, held=count, in_flight=64, failures=failures, breaker_open=failures > 0)

    status = cluster(
        member(held_for=(held_for("https://slow.test", 10), held_for("https://dead.test", 5, failures=7))),
        member("10.0.0.2:8463", held_for=(held_for("https://dead.test", 20, failures=9),)),
        held=35,
        oldest_due_ms=100_000,
    )
    held, dead, slow = problems(status)
    assert (held.check, held.verdict) == ("held", NOTE)
    assert "35 timers held" in held.says
    assert "https://dead.test: 25 due timers waiting; its breaker is open after 9 failures in a row" in dead.says
    assert "https://slow.test: 10 due timers waiting, 64 calls in flight" in slow.says


def test_timers_held_because_a_broker_stores_no_events_are_not_blamed_on_a_receiver() -> None:
    place = HeldFor(
        destination="kafka:timers.events.acme",
        held=2_047,
        in_flight=0,
        failures=70,
        breaker_open=True,
        last_error="there is no Kafka topic 'timers.events.acme'",
    )
    (flow,) = [
        finding for finding in problems(cluster(member(held_for=(place,)), held=2_047)) if finding.check == "flow"
    ]
    assert flow.says.endswith("70 failures in a row: there is no Kafka topic 'timers.events.acme'")
    assert flow.advice.startswith("kafka does not store the events")
    assert "receiver" not in flow.advice


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


def test_the_doctor_finds_nothing_wrong_with_a_good_server(at: Run, tmp_path: Path) -> None:
    code, out, _ = at("doctor", "--store", f"sqlite:///{tmp_path / 'x.db'}")
    assert code == 0, out
    assert "✓ server" in out
    assert "does not exist yet" in out
    assert "nothing is wrong; 1 warning" in out


def test_the_doctor_asks_the_server_at_the_configured_address(run: Run, server: str) -> None:
    code, out, _ = run("doctor", "--store", "memory://", "--listen", server.removeprefix("http://"))
    assert code == 0, out
    assert f"✓ server        {server}" in out


def test_the_doctor_says_how_to_give_a_token(run: Run) -> None:
    tokens = [{"name": "shop", "sha256": sha256(b"secret").hexdigest()}]
    with serving(free_port(), auth_tokens=tokens) as url:
        code, out, _ = run("doctor", "--store", "memory://", "--url", url)
        assert code == 1
        assert "--token or DUETIME_TOKEN" in out
        assert run("doctor", "--store", "memory://", "--url", url, "--token", "secret")[0] == 0


def test_the_doctor_names_what_is_wrong(run: Run, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path / 'no-such-folder' / 'x.db'}"
    code, out, _ = run("doctor", "--store", store, "--url", nowhere, "--json")
    assert code == 1
    wrong = {line["check"] for line in map(json.loads, out.splitlines()) if line["verdict"] == "wrong"}
    assert {"disk", "server"} <= wrong
    assert run("doctor", "--set", "log.level=loud")[0] == 1


def test_a_small_limit_of_open_files_is_named_with_what_it_should_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(environ={})
    wanted = size(None, config).wanted
    for hard, verdict in ((1_024, NOTE), (wanted, GOOD), (resource.RLIM_INFINITY, GOOD)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, hard=hard: (512, hard))
        found = _check_open_files(config)
        assert found.verdict == verdict
        if verdict == NOTE:
            assert f"at most {hard} (hard limit; soft limit 512); at full load {wanted} are needed" in found.says
            assert f"LimitNOFILE={wanted}" in found.advice
            assert f"server.connections_max is {size(hard, config).connections_max} instead of 4096" in found.why


def test_a_limit_of_open_files_that_serve_refuses_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    found = _check_open_files(load_config(environ={}))
    assert found.verdict == WRONG
    assert "100 open files; at least" in found.says
    assert "LimitNOFILE=" in found.says


@pytest.mark.parametrize(
    ("days", "verdict", "says"), [(-1, WRONG, "ago"), (10, NOTE, "in "), (15, GOOD, "in "), (None, WRONG, "cannot be")]
)
def test_a_certificate_that_ends_soon_is_named(
    monkeypatch: pytest.MonkeyPatch, days: int | None, verdict: str, says: str
) -> None:
    end_ms = None if days is None else now_ms() + days * 24 * 3_600_000
    monkeypatch.setattr(doctor, "expires_at_ms", lambda _: end_ms)
    config = load_config(environ={}, flags={"server.tls_certificate": "c.pem", "server.tls_key": "k.pem"})
    (found,) = _check_certificate(config)
    assert found.verdict == verdict
    assert says in found.says
    assert list(_check_certificate(load_config(environ={}))) == []


def test_a_server_with_a_certificate_is_asked_by_https() -> None:
    config = load_config(environ={}, flags={"server.tls_certificate": "c.pem", "server.tls_key": "k.pem"})
    assert doctor._url_of(config) == "https://127.0.0.1:8463"
    assert doctor._url_of(load_config(environ={})) == "http://127.0.0.1:8463"
