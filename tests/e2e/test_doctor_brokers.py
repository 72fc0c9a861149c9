"""`duetime doctor` and real message brokers: what is missing, which settings break a promise, and that it creates
nothing. No server of Duetime runs."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace as Arguments
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import nats
import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from nats.js import JetStreamContext
from nats.js.api import ConsumerConfig
from scripts.servers import Kafka, Nats
from threaded_server import free_port, serving

from duetime.brokers.nats import NatsConnection
from duetime.cli.broker_checks import check_brokers
from duetime.cli.diagnosis import GOOD, NOTE, WRONG, Finding
from duetime.client import AsyncClient
from duetime.config import Config, load_config
from duetime.domain.timer import Namespace
from duetime.errors import SetupError
from duetime.ingress.nats import NatsCommands
from duetime.store import open_store
from servers import own


def configured(tmp_path: Path, **flags: Any) -> Config:
    return load_config(environ={}, flags={"store.url": f"sqlite:///{tmp_path}/timers.db", **flags})


async def doctor(config: Config) -> list[Finding]:
    """Without a server of Duetime."""
    return await check_brokers(Arguments(), config, has_server=False)


def summary(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.verdict, finding.says) for finding in findings]


async def test_brokers_that_are_not_configured_are_not_mentioned(tmp_path: Path) -> None:
    assert await doctor(configured(tmp_path)) == []


async def test_a_namespace_whose_target_no_section_serves_is_wrong(tmp_path: Path) -> None:
    config = configured(tmp_path)
    store = open_store(config.store.url)
    await store.migrate()
    await store.open()
    acme = Namespace(name="acme", num_shards=1, created_at_ms=0, callback_url="nats:timers.events.acme")
    assert await store.put_namespace(acme, None)
    await store.close()
    (finding,) = await doctor(config)
    assert (finding.check, finding.verdict, finding.says) == (
        "targets",
        WRONG,
        "the default target of 'acme' is nats:…, and the configuration has no [nats] for it",
    )
    assert "duetime namespace update acme --to URL" in finding.advice


async def test_a_missing_driver_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "duetime.brokers.kafka_diagnosis", raising=False)
    monkeypatch.setitem(sys.modules, "aiokafka.admin", None)
    (finding,) = await doctor(configured(tmp_path, **{"kafka.servers": ["127.0.0.1:1"]}))
    assert (finding.verdict, finding.says) == (
        WRONG,
        'the package aiokafka.admin is missing: pip install "duetime[kafka]"',
    )


# --- NATS ----------------------------------------------------------------------------------------

COMMANDS, EVENTS, DEAD = "timers.commands.*", "timers.events.*", "timers.dead.*"


@pytest.fixture(scope="module")
def server() -> Iterator[Nats]:
    with own("nats") as nats_server:
        yield nats_server


@pytest.fixture
async def jetstream(server: Nats) -> AsyncIterator[JetStreamContext]:
    """Without any stream."""
    client = await nats.connect(server.url())
    context = client.jetstream()
    for stream in await context.streams_info():
        await context.delete_stream(stream.config.name or "")
    yield context
    await client.close()


def with_nats(tmp_path: Path, server: Nats, **flags: Any) -> Config:
    return configured(tmp_path, **{"nats.url": server.url(), **flags})


async def with_streams(jetstream: JetStreamContext, pending: int | None = 100_000, **of_commands: Any) -> None:
    """As the first `serve` makes them, if nothing else is said. `pending`: None is the default of NATS."""
    await jetstream.add_stream(name="TIMER_COMMANDS", subjects=[COMMANDS], **{"max_age": 3_600, **of_commands})
    await jetstream.add_stream(name="TIMER_EVENTS", subjects=[EVENTS], duplicate_window=120)
    await jetstream.add_stream(name="TIMER_DEAD_LETTERS", subjects=[DEAD])
    wanted = ConsumerConfig(durable_name="duetime", filter_subject=COMMANDS, ack_wait=30, max_ack_pending=pending)
    await jetstream.add_consumer("TIMER_COMMANDS", wanted)


async def test_good_streams_are_one_line(tmp_path: Path, server: Nats, jetstream: JetStreamContext) -> None:
    await with_streams(jetstream)
    for _ in range(3):
        await jetstream.publish("timers.commands.shop", b"{}")
    assert summary(await doctor(with_nats(tmp_path, server))) == [
        (
            GOOD,
            f"connected to {server.url()}; commands: stream 'TIMER_COMMANDS' with 1 replica; consumer 'duetime': "
            "3 commands waiting, 0 not acknowledged; events: stream 'TIMER_EVENTS' with 1 replica, drops repeated "
            "events within 2m; dead letters: stream 'TIMER_DEAD_LETTERS' with 1 replica",
        )
    ]
    assert not list(tmp_path.iterdir())  # it has created no store either


async def test_missing_streams_are_created_by_serve_and_not_by_the_doctor(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    findings = await doctor(with_nats(tmp_path, server))
    assert summary(findings)[:3] == [
        (NOTE, "the stream 'TIMER_COMMANDS' for commands (timers.commands.*) does not exist yet"),
        (NOTE, "a stream for events (timers.events.*) does not exist yet"),
        (NOTE, "a stream for dead letters (timers.dead.*) does not exist yet"),
    ]
    assert await jetstream.streams_info() == []


async def test_missing_streams_that_serve_does_not_create_are_wrong(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    findings = await doctor(with_nats(tmp_path, server, **{"nats.create_streams": False}))
    assert [finding.verdict for finding in findings] == [WRONG, WRONG, WRONG, GOOD]
    assert findings[0].advice == (
        "nats stream add TIMER_COMMANDS --subjects 'timers.commands.*' --storage file --retention work --defaults"
    )


async def test_a_missing_consumer_is_named(tmp_path: Path, server: Nats, jetstream: JetStreamContext) -> None:
    await with_streams(jetstream)
    await jetstream.delete_consumer("TIMER_COMMANDS", "duetime")
    (finding, _) = await doctor(with_nats(tmp_path, server, **{"nats.create_streams": False}))
    assert finding.verdict == WRONG
    assert finding.says == "the consumer 'duetime' of the stream 'TIMER_COMMANDS' does not exist"
    assert finding.advice == (
        "nats consumer add TIMER_COMMANDS duetime --pull --filter 'timers.commands.*' --ack explicit --wait 30s "
        "--max-deliver=-1 --deliver all --replay instant --max-pending 100000 --defaults"
    )


@pytest.mark.parametrize(("pending", "found", "verdict"), [(None, 1_000, WRONG), (50_000, 50_000, NOTE)])
async def test_a_consumer_that_lets_one_tenant_stop_all_others_is_wrong(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext, pending: int | None, found: int, verdict: str
) -> None:
    await with_streams(jetstream, pending=pending)
    (finding, _) = await doctor(with_nats(tmp_path, server))
    assert (finding.verdict, finding.advice) == (
        verdict,
        "nats consumer edit TIMER_COMMANDS duetime --max-pending 100000",
    )
    assert f"delivers at most {found} commands" in finding.says


async def test_serve_and_doctor_name_the_same_command(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    config = with_nats(tmp_path, server, **{"nats.create_streams": False})
    connection = NatsConnection(config.nats)

    async def asked_for(open: Callable[[], Awaitable[None]]) -> str:
        """What the error of `serve` says is to be run. The doctor must say it too."""
        with pytest.raises(SetupError) as caught:
            await open()
        command = caught.value.detail.partition("(")[2].partition("), or set")[0]
        assert command in [finding.advice for finding in await doctor(config)]
        return command

    try:
        assert "TIMER_EVENTS" in await asked_for(connection.open)
        await jetstream.add_stream(name="TIMER_EVENTS", subjects=[EVENTS])
        assert "TIMER_DEAD_LETTERS" in await asked_for(connection.open)
        await jetstream.add_stream(name="TIMER_DEAD_LETTERS", subjects=[DEAD])
        commands = NatsCommands(config.nats, connection)
        assert "--retention work" in await asked_for(commands.open)
        await jetstream.add_stream(name="TIMER_COMMANDS", subjects=[COMMANDS], retention="workqueue")
        assert "--max-pending 100000" in await asked_for(commands.open)
    finally:
        await connection.close()


async def test_what_keeps_serve_from_reading_commands_is_wrong(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    await with_streams(jetstream)
    (other_stream, _) = await doctor(with_nats(tmp_path, server, **{"nats.stream": "COMMANDS"}))
    (other_wait, _) = await doctor(with_nats(tmp_path, server, **{"nats.ack_wait": "10s"}))
    assert summary([other_stream, other_wait]) == [
        (WRONG, "commands (timers.commands.*) are stored by 'TIMER_COMMANDS', not by the stream 'COMMANDS'"),
        (WRONG, other_wait.says),
    ]
    assert "has an ack wait of 30 s" in other_wait.says


@pytest.mark.parametrize(("max_age", "kept"), [(0, "for ever"), (7 * 86_400, "for 7d"), (86_400, "for 1d")])
async def test_commands_that_stay_longer_than_reached_timers_are_a_warning(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext, max_age: int, kept: str
) -> None:
    await with_streams(jetstream, max_age=max_age)
    (finding, _) = await doctor(with_nats(tmp_path, server))
    assert finding.verdict == NOTE
    assert finding.says == (
        f"commands stay {kept} in the stream 'TIMER_COMMANDS', but timers that are over only for 1d in 'default'"
    )


async def test_commands_that_are_deleted_when_they_are_acknowledged_may_stay_for_ever(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    await with_streams(jetstream, max_age=0, retention="workqueue")
    assert [finding.verdict for finding in await doctor(with_nats(tmp_path, server))] == [GOOD]


async def test_the_retention_of_stored_namespaces_is_compared(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    config = with_nats(tmp_path, server)
    store = open_store(config.store.url)
    await store.migrate()
    await store.open()
    for name, retention_ms in (("shop", 600_000), ("depot", 30 * 86_400_000)):
        namespace = Namespace(name=name, num_shards=1, created_at_ms=0, delivered_retention_ms=retention_ms)
        assert await store.put_namespace(namespace, None)
    await store.close()
    await with_streams(jetstream)
    (finding, _) = await doctor(config)
    assert finding.says.endswith("but timers that are over only for 10m in 'shop'")


async def test_a_duplicate_window_that_is_too_short_is_a_warning(
    tmp_path: Path, server: Nats, jetstream: JetStreamContext
) -> None:
    await with_streams(jetstream)
    await jetstream.update_stream(name="TIMER_EVENTS", subjects=[EVENTS], duplicate_window=20)
    (finding, _) = await doctor(with_nats(tmp_path, server))
    assert finding.verdict == NOTE
    assert finding.says == (
        "the stream 'TIMER_EVENTS' drops repeated events within 20s only, but the next attempt in 'default' may end up "
        "to 21s later"
    )


async def test_a_stream_in_memory_is_wrong(tmp_path: Path, server: Nats, jetstream: JetStreamContext) -> None:
    await with_streams(jetstream, storage="memory")
    (finding, _) = await doctor(with_nats(tmp_path, server))
    assert (finding.verdict, finding.says) == (WRONG, "the stream 'TIMER_COMMANDS' is in memory")


async def test_a_running_server_is_asked_for_the_namespaces(server: Nats, jetstream: JetStreamContext) -> None:
    await with_streams(jetstream)
    with serving(free_port(), nats_url=server.url()) as url:
        async with AsyncClient(url) as client:
            await client.namespaces.create("shop", delivered_retention="10m")
        config = load_config(environ={}, flags={"store.url": "postgresql://127.0.0.1:1/none", "nats.url": server.url()})
        findings = await check_brokers(Arguments(url=url, token=None, timeout=10), config, has_server=True)
    assert [finding.verdict for finding in findings] == [NOTE, GOOD]
    assert findings[0].says.endswith("but timers that are over only for 10m in 'shop'")


async def test_namespaces_that_cannot_be_read_are_a_warning(server: Nats, jetstream: JetStreamContext) -> None:
    await with_streams(jetstream)
    config = load_config(environ={}, flags={"store.url": "postgresql://127.0.0.1:1/none", "nats.url": server.url()})
    assert [(finding.check, finding.verdict) for finding in await doctor(config)] == [("nats", GOOD), ("brokers", NOTE)]


async def test_a_broker_that_is_away_or_refuses_the_login_is_wrong(tmp_path: Path) -> None:
    with own("nats", users=[{"user": "duetime", "password": "right"}]) as guarded:
        (refused,) = await doctor(with_nats(tmp_path, guarded, **{"nats.user": "duetime", "nats.password": "other"}))
        guarded.kill()
        (away,) = await doctor(with_nats(tmp_path, guarded))
    assert (refused.verdict, away.verdict) == (WRONG, WRONG)
    assert "refused the login" in refused.says
    assert "cannot connect" in away.says
    assert "timers with a target nats:… wait" in away.why


# --- Kafka ---------------------------------------------------------------------------------------

DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def kafka() -> Iterator[Kafka]:
    with own("kafka") as kafka_server:
        yield kafka_server


def with_kafka(tmp_path: Path, kafka: Kafka, **flags: Any) -> Config:
    return configured(tmp_path, **{"kafka.servers": [f"127.0.0.1:{kafka.port}"], **flags})


async def make_topics(kafka: Kafka, **settings: dict[str, str]) -> None:
    """By name, with dots written as underscores."""
    admin = AIOKafkaAdminClient(bootstrap_servers=f"127.0.0.1:{kafka.port}")
    await admin.start()
    wanted = [
        NewTopic(name.replace("_", "."), num_partitions=1, replication_factor=1, topic_configs=settings[name])
        for name in settings
    ]
    await admin.create_topics(wanted)
    async with asyncio.timeout(20):
        while any(topic["error_code"] for topic in await admin.describe_topics([topic.name for topic in wanted])):
            await asyncio.sleep(0.05)
    await admin.close()


async def test_topics_of_kafka_are_checked_and_not_created(tmp_path: Path, kafka: Kafka) -> None:
    config = with_kafka(tmp_path, kafka, **{"kafka.create_topics": False})
    findings = await doctor(config)
    assert summary(findings)[:2] == [
        (WRONG, "the topic 'timers.events' does not exist"),
        (WRONG, "the topic 'timers.dead' does not exist"),
    ]
    assert findings[0].advice == (
        f"kafka-topics.sh --bootstrap-server 127.0.0.1:{kafka.port} --create --topic timers.events --partitions 12 "
        "--replication-factor 1"
    )

    await make_topics(
        kafka,
        timers_events={},
        timers_dead={"unclean.leader.election.enable": "true"},
        timers_commands_default={"retention.ms": str(DAY_MS)},
        timers_commands_shop={"retention.ms": str(DAY_MS)},
        timers_commands_depot={"retention.ms": "-1"},
    )
    assert summary(await doctor(config)) == [
        (WRONG, "unclean.leader.election.enable is true for the topic 'timers.dead'"),
        (
            GOOD,
            f"connected to 127.0.0.1:{kafka.port}; commands: 3 topics of tenants; topic 'timers.events' with 1 "
            "replica; topic 'timers.dead' with 1 replica; commands stay for ever, the offsets of the group for 7d",
        ),
    ]


async def test_topics_of_tenants_that_do_not_exist_are_named_with_the_command_that_creates_them(
    tmp_path: Path, kafka: Kafka
) -> None:
    flags: dict[str, Any] = {
        "kafka.command_topic": "each.in.{tenant}",
        "kafka.allow_topics": ["each.out.{tenant}"],
        "kafka.dead_letter_topic": "each.dead.{tenant}",
        "kafka.target": "kafka:each.out.{tenant}",
    }
    config = with_kafka(tmp_path, kafka, **flags)
    (none, _) = await doctor(config)
    assert (none.verdict, none.says) == (NOTE, "no topic matches kafka.command_topic (each.in.{tenant}) yet")
    assert "--create --topic each.in.TENANT --partitions 12" in none.advice
    await make_topics(kafka, each_in_acme={}, each_in_shop={}, each_out_shop={})
    (events, good) = await doctor(config)
    assert (events.verdict, events.says, good.verdict) == (
        WRONG,
        "the topic 'each.out.acme' for the events of 'acme' does not exist",
        GOOD,
    )
    assert "--create --topic each.out.acme --partitions 12 --replication-factor 1" in events.advice


async def test_commands_that_stay_for_no_longer_than_the_offsets_are_good(tmp_path: Path, kafka: Kafka) -> None:
    """The defaults: 7 days for both in Kafka, one day for timers that are over."""
    await make_topics(kafka, week_in_default={}, week_out={}, week_dead={})
    flags: dict[str, Any] = {"kafka.allow_topics": ["week.out"], "kafka.target": "kafka:week.out"}
    flags |= {"kafka.command_topic": "week.in.{tenant}", "kafka.dead_letter_topic": "week.dead"}
    findings = await doctor(with_kafka(tmp_path, kafka, **flags))
    assert [finding.verdict for finding in findings] == [GOOD], summary(findings)
    assert findings[0].says.endswith("commands stay for 7d, the offsets of the group for 7d")


async def test_one_topic_for_all_tenants_is_compared_with_every_namespace(tmp_path: Path, kafka: Kafka) -> None:
    await make_topics(kafka, all_commands={"retention.ms": str(8 * DAY_MS)}, short_commands={"retention.ms": "60000"})
    flags = {"kafka.allow_topics": [], "kafka.dead_letter_topic": "all.commands.dead"}
    found = await doctor(with_kafka(tmp_path, kafka, **flags, **{"kafka.command_topic": "all.commands"}))
    assert (NOTE, "the topic 'all.commands.dead' does not exist yet") in summary(found)
    (kept,) = [finding for finding in found if "commands stay for 8d in the topic 'all.commands', but" in finding.says]
    assert kept.advice.startswith("set retention.ms to at most 7d,")
    found = await doctor(with_kafka(tmp_path, kafka, **flags, **{"kafka.command_topic": "short.commands"}))
    assert not any("but timers that are over" in finding.says for finding in found)


async def test_a_kafka_that_is_away_is_wrong(tmp_path: Path, kafka: Kafka) -> None:
    (away,) = await doctor(configured(tmp_path, **{"kafka.servers": ["127.0.0.1:1"]}))
    assert away.verdict == WRONG
    assert "no broker can be reached" in away.says
