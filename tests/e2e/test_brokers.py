"""Commands in and events out over real message brokers: the same tests over NATS and over Kafka.

Each test has a `duetime serve` of its own. What comes of many commands is judged by `Commands.judge`: the checker's
invariants, and one timer and at least one event for each command.
"""

from __future__ import annotations

import asyncio
import base64
import os
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from brokers import (
    Broker,
    Commands,
    KafkaBroker,
    NatsBroker,
    Stored,
    cancel_timer,
    find_event_violations,
    schedule_timer,
)
from cluster import Cluster, Sideline, Way
from contract import Asker, ended
from real_server import RealReceiver, RealServer, free_port, serve_in_vain, until, wall_ms
from scripts.gate.seeds import new_seed
from scripts.servers import Kafka, Link

from duetime.domain.instants import parse_instant
from duetime.testing.checker import ClientRequest, Kind, Result
from servers import fresh_database, own, postgres, require

TENANT = "acme"
COMMANDS = int(os.environ.get("DUETIME_BROKER_COMMANDS", "10000"))
FAR_MS = 86_400_000

pytestmark = pytest.mark.time_limit(300 + COMMANDS / 100, "the judge waits for thousands of events")


@pytest.fixture(scope="module")
def linked_kafka() -> Iterator[tuple[Kafka, Link]]:
    """A server that tests may break, and the link to it. Each test has topics of its own."""
    port = free_port()
    link = require("toxiproxy").link(port)
    with own("kafka", linked=(port, link.port)) as server:
        yield server, link
    link.close()


@pytest_asyncio.fixture(params=["nats", "kafka"])
async def broker(request: pytest.FixtureRequest) -> AsyncIterator[Broker]:
    if request.param == "nats":
        with own("nats") as nats:
            async with NatsBroker(nats) as broker:
                yield broker
                nats.thaw()
    else:
        kafka, link = request.getfixturevalue("linked_kafka")
        if not kafka.is_running:  # the test before this one failed
            kafka.start()
        async with KafkaBroker(kafka, link) as broker:
            yield broker
            if kafka.is_running:
                kafka.thaw()


@asynccontextmanager
async def serving(folder: Path, settings: Mapping[str, str], store_url: str | None = None) -> AsyncIterator[RealServer]:
    """A Duetime that ends well."""
    server = RealServer(folder, store_url=store_url)
    server.settings.update(settings)
    try:
        await server.start()
        yield server
        assert await server.stop() == 0, server.log.read_text()[-2_000:]
        assert "Traceback" not in server.log.read_text()
    finally:
        await server.close()


async def results(server: RealServer, result: str) -> float:
    return await server.metric(f'duetime_commands_total{{result="{result}"}}')


async def has_results(server: RealServer, result: str, count: int, within_seconds: float = 20) -> None:
    async def are_there() -> bool:
        return await results(server, result) >= count

    await until(are_there, f"{count} commands are {result}", within_seconds)


async def is_consuming(server: RealServer, broker: Broker, *, consuming: bool, within_seconds: float = 30) -> None:
    """Waits until the intake receives commands, or until it does not."""
    name = f'duetime_intake_consuming{{broker="{broker.name}"}}'

    async def is_so() -> bool:
        return await server.metric(name) == consuming

    await until(is_so, f"{name} is {consuming}", within_seconds)


# --- what a command does -------------------------------------------------------------------------


async def test_a_command_becomes_a_timer_and_its_event_has_the_shape_of_the_design(
    broker: Broker, tmp_path: Path
) -> None:
    await broker.add_tenant(TENANT)
    async with serving(tmp_path, broker.settings()) as server:
        due_ms = wall_ms() + 300
        await broker.publish(
            [schedule_timer(TENANT, "call-1", due_ms, "order-17"), schedule_timer(TENANT, "call-2", due_ms)]
        )
        first, second = sorted(await broker.has_events(2), key=lambda event: event.timer_id)
        assert list(first.body) == ["id", "type", "tenantId", "correlationId", "timestampMs", "payload"]
        assert uuid.UUID(first.body["id"]).version == 7
        assert (first.body["type"], first.body["tenantId"]) == ("DueTimeReached", TENANT)
        assert first.body["correlationId"] == "order-17"
        assert list(first.body["payload"]) == ["tenantId", "serviceCallId", "reachedAt"]
        assert (first.body["payload"]["tenantId"], first.timer_id) == (TENANT, "call-1")
        reached_at_ms = parse_instant(first.body["payload"]["reachedAt"])
        assert due_ms <= first.body["timestampMs"] == reached_at_ms <= wall_ms()
        assert broker.target(TENANT).endswith(f":{first.place}")
        assert list(second.body) == ["id", "type", "tenantId", "timestampMs", "payload"]
        ids = {event.headers[broker.message_id_header] for event in (first, second)}
        assert len(ids) == 2

        api = Asker(server)
        timer = await ended(api, namespace=TENANT, timerId="call-1")
        assert (timer["state"], timer["attempts"], timer["correlationId"]) == ("delivered", 1, "order-17")
        assert timer["callbackUrl"] == broker.target(TENANT)
        assert parse_instant(timer["scheduledAt"]) == due_ms
        made = (await api.ok("namespaces/get", namespace=TENANT))["namespace"]
        assert made["callbackUrl"] == broker.target(TENANT)


async def test_case_33_commands_replace_and_cancel_a_timer_and_leave_one_that_is_over_alone(
    broker: Broker, tmp_path: Path
) -> None:
    await broker.add_tenant(TENANT)
    async with serving(tmp_path, broker.settings()) as server:
        api = Asker(server)
        await broker.publish([schedule_timer(TENANT, name, wall_ms() + FAR_MS, "first") for name in "ab"])
        await has_results(server, "scheduled", 2)
        await broker.publish([schedule_timer(TENANT, "a", wall_ms(), "second"), cancel_timer(TENANT, "b")])
        [event] = await broker.has_events(1)
        assert (event.timer_id, event.body["correlationId"]) == ("a", "second")
        assert (await ended(api, namespace=TENANT, timerId="a"))["state"] == "delivered"
        assert (await ended(api, namespace=TENANT, timerId="b"))["state"] == "cancelled"
        assert await results(server, "ignored") == 0

        again = [schedule_timer(TENANT, name, wall_ms(), "third") for name in "ab"]
        await broker.publish([*again, cancel_timer(TENANT, "a")])
        await has_results(server, "ignored", 3)
        assert (await api.timer(namespace=TENANT, timerId="b"))["state"] == "cancelled"
        assert len(await broker.events()) == 1

        # Of two commands for one timer the later one counts: this timer is created after it was cancelled.
        await broker.publish([cancel_timer(TENANT, "c")])
        await broker.publish([schedule_timer(TENANT, "c", wall_ms(), "created")])
        assert (await broker.has_events(2))[1].body["correlationId"] == "created"


async def test_timers_of_http_have_events_and_commands_have_callbacks(broker: Broker, tmp_path: Path) -> None:
    receiver = RealReceiver()
    await receiver.start()
    await broker.add_tenant(TENANT)
    try:
        async with serving(tmp_path, broker.settings()) as server:
            api = Asker(server)
            await api.ok("namespaces/create", namespace=TENANT, numShards=4, callbackUrl=receiver.url)
            await broker.publish([schedule_timer(TENANT, "by command", wall_ms(), "order-17")])
            await receiver.received(1)
            assert (receiver.bodies[0]["timerId"], receiver.bodies[0]["correlationId"]) == ("by command", "order-17")

            target = {"namespace": TENANT, "callbackUrl": broker.target(TENANT)}
            await api.ok("timers/create", timerId="by http", delay="0s", payload={"order": 17}, **target)
            [event] = await broker.has_events(1)
            assert event.timer_id == "by http"
            assert event.body["payload"]["data"] == {"order": 17}
            timer = await ended(api, namespace=TENANT, timerId="by http")
            assert (timer["state"], timer["attempts"]) == ("delivered", 1)

            for url in (f"{broker.name}:elsewhere.{TENANT}", f"{broker.name}:timers.*", f"{broker.name}:"):
                refused = await api.refused(
                    "timers/create", namespace=TENANT, timerId="no", delay="0s", callbackUrl=url
                )
                assert refused[::2] == (400, "callbackUrl"), url
    finally:
        await receiver.close()


# --- the three classes of errors -----------------------------------------------------------------


def bad_commands() -> list[tuple[dict[str, Any], str, str]]:
    """A command that can never succeed, and what its dead letter says: the field, and a part of the reason."""
    wrong: list[tuple[dict[str, Any], str, str]] = [
        ({"type": "Rejoice"}, "type", "ScheduleTimer or CancelTimer"),
        ({"payload": {"dueAt": "tomorrow"}}, "payload.dueAt", "payload.dueAt"),
        ({"payload": {"dueAt": None}}, "payload.dueAt", "payload.dueAt must be a string, not null"),
        ({"payload": {"serviceCallId": ""}}, "payload.serviceCallId", "1 to 255 bytes"),
        ({"tenantId": "other"}, "tenantId", "tenant of the subject"),
        ({"payload": {"tenantId": "other"}}, "payload.tenantId", "not the same"),
        ({"timestampMs": "now"}, "timestampMs", "timestampMs must be a whole number, not a string"),
    ]
    commands = []
    for changes, field, reason in wrong:
        good = schedule_timer(TENANT, "call", wall_ms())
        payload = good["payload"] | changes.get("payload", {})
        commands.append((good | changes | {"payload": payload}, field, reason))
    return commands


async def test_case_35_commands_that_can_never_succeed_become_dead_letters_with_the_reason(
    broker: Broker, tmp_path: Path
) -> None:
    for tenant in (TENANT, "stranger"):
        await broker.add_tenant(tenant)
    async with serving(tmp_path, broker.settings(create_tenants=False)) as server:
        target = {"numShards": 4, "callbackUrl": broker.target(TENANT)}
        await Asker(server).ok("namespaces/create", namespace=TENANT, **target)
        bad = bad_commands()
        stranger = schedule_timer("stranger", "call", wall_ms())
        await broker.publish([command for command, _, _ in bad], TENANT)
        await broker.publish([stranger])
        await broker.publish_raw(TENANT, b"neither JSON nor \xff UTF-8")
        await broker.publish([schedule_timer(TENANT, "good", wall_ms())])
        [event] = await broker.has_events(1)
        assert event.timer_id == "good"

        letters = [letter.body for letter in await broker.has_dead_letters(len(bad) + 2)]
        assert len(letters) == len(bad) + 2
        for command, field, reason in bad:
            [letter] = [letter for letter in letters if command["id"] in letter.get("body", "")]
            assert letter["field"] == field
            assert reason in letter["reason"]
            assert letter.get("commandId") == (command["id"] if field != "timestampMs" else None)
            assert TENANT in letter["subject"]
        [unknown] = [letter for letter in letters if letter.get("commandId") == stranger["id"]]
        assert unknown["field"] == "tenantId"
        assert "create_tenants is false" in unknown["reason"]
        [binary] = [letter for letter in letters if "bodyBase64" in letter]
        assert base64.b64decode(binary["bodyBase64"]) == b"neither JSON nor \xff UTF-8"
        await has_results(server, "refused", len(bad) + 2)
        status, _ = await server.call("namespaces/get", {"namespace": "stranger"})
        assert status == 404


async def test_commands_beyond_a_quota_are_delivered_again_until_there_is_room(broker: Broker, tmp_path: Path) -> None:
    await broker.add_tenant(TENANT)
    async with serving(tmp_path, broker.settings()) as server:
        limited = {"numShards": 4, "callbackUrl": broker.target(TENANT), "createsPerSecond": 5}
        await Asker(server).ok("namespaces/create", namespace=TENANT, **limited)
        await broker.publish([schedule_timer(TENANT, f"call-{n}", wall_ms(), f"order-{n}") for n in range(12)])
        await broker.has_events(12)
        assert await results(server, "retried") >= 1
        assert await broker.dead_letters() == []


async def test_a_start_without_stream_or_topic_fails_if_none_may_be_created(broker: Broker, tmp_path: Path) -> None:
    creates = {"nats": "create_streams", "kafka": "create_topics"}[broker.name]
    code, said = await asyncio.to_thread(
        serve_in_vain,
        *("--store", f"sqlite:///{tmp_path}/timers.db", "--listen", f"127.0.0.1:{free_port()}"),
        **broker.settings(**{creates: False}),
    )
    assert code == 2, said
    assert {"nats": "no stream stores", "kafka": "there is no topic"}[broker.name] in said
    assert creates in said
    assert "Traceback" not in said


async def test_a_server_starts_without_its_broker_and_goes_on_when_it_is_there(broker: Broker, tmp_path: Path) -> None:
    await broker.add_tenant(TENANT)
    await broker.kill()
    receiver = RealReceiver()
    await receiver.start()
    try:
        async with serving(tmp_path, broker.settings()) as server:
            api = Asker(server)
            await api.ok("timers/create", timerId="http", delay="0s", callbackUrl=receiver.url)
            await receiver.received(1)
            await api.ok("namespaces/create", namespace=TENANT, numShards=4, callbackUrl=broker.target(TENANT))
            await api.ok("timers/create", namespace=TENANT, timerId="waits", delay="0s")
            await broker.start()
            await is_consuming(server, broker, consuming=True)
            await broker.publish([schedule_timer(TENANT, "by command", wall_ms())])
            assert {event.timer_id for event in await broker.has_events(2)} == {"waits", "by command"}
            timer = await ended(api, namespace=TENANT, timerId="waits")
            assert (timer["state"], timer["attempts"]) == ("delivered", 1)  # attempts without a broker do not count
    finally:
        await receiver.close()


# --- faults of the broker ------------------------------------------------------------------------


@asynccontextmanager
async def publishing(commands: Commands) -> AsyncIterator[None]:
    """Commands for as long as the block takes."""
    stopping = False

    async def publish() -> None:
        while not stopping:
            await commands.publish(100)
            await asyncio.sleep(0.02)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        stopping = True
        await task


@pytest.mark.parametrize("fault", ["restart", "kill", "freeze"])
async def test_nothing_is_lost_when_the_broker_fails(broker: Broker, tmp_path: Path, fault: str) -> None:
    async with under_load(broker, tmp_path) as server:
        if fault == "restart":
            await broker.restart()
        elif fault == "kill":
            await broker.kill()
            await broker.start()
        else:
            broker.freeze()
            await is_consuming(server, broker, consuming=False)
            broker.thaw()


async def test_case_36_nothing_is_lost_when_the_answers_of_the_broker_are(broker: Broker, tmp_path: Path) -> None:
    """It stores events and acknowledgements, and nothing of what it answers arrives."""
    async with under_load(broker, tmp_path) as server:
        toxic = await asyncio.to_thread(broker.link().add, "timeout", timeout=0)
        try:
            await is_consuming(server, broker, consuming=False)
        finally:
            await asyncio.to_thread(broker.link().remove, toxic)


@asynccontextmanager
async def under_load(broker: Broker, folder: Path) -> AsyncIterator[RealServer]:
    """Commands before, during and after what the block does, judged at the end."""
    await broker.add_tenant(TENANT)
    commands = Commands(broker, TENANT)
    async with serving(folder, broker.settings(linked=True)) as server:
        async with publishing(commands):
            await broker.has_events(500)
            yield server
            await broker.has_events(len(await broker.events()) + 300, 60)
        await commands.judge(server)
        assert await broker.dead_letters() == []


async def test_a_slow_link_delays_commands_and_loses_none(broker: Broker, tmp_path: Path) -> None:
    """The server takes commands more slowly than they are published, and keeps few of them."""
    await broker.add_tenant(TENANT)
    commands = Commands(broker, TENANT)
    async with serving(tmp_path, broker.settings(linked=True, in_flight_max=50)) as server:
        toxic = await asyncio.to_thread(broker.link().add, "bandwidth", rate=50)
        try:
            await commands.publish(1_000)
            assert len({event.timer_id for event in await broker.events()}) < 800, "it was not slow"
        finally:
            await asyncio.to_thread(broker.link().remove, toxic)
        await commands.judge(server)


# --- faults of Duetime and of its store ----------------------------------------------------------


async def test_kill_9_amid_very_many_commands_loses_none_and_doubles_no_timer(broker: Broker, tmp_path: Path) -> None:
    """`DUETIME_BROKER_COMMANDS` is how many: 10,000, or 100,000 for the promise as it is stated."""
    await broker.add_tenant(TENANT)
    commands = Commands(broker, TENANT)
    async with serving(tmp_path, broker.settings()) as server:
        publishing = asyncio.create_task(commands.publish(COMMANDS * 10 // 12))  # of ten timers two have two commands
        await broker.has_events(COMMANDS // 20, 60)
        await server.kill()
        await server.start()
        await publishing
        await commands.judge(server)


async def test_two_instances_share_the_commands_and_one_is_killed(broker: Broker, tmp_path: Path) -> None:
    await broker.add_tenant(TENANT)
    commands = Commands(broker, TENANT)
    with Sideline() as sideline:
        rng = random.Random(new_seed())
        database_url = fresh_database(postgres(18))
        cluster = Cluster(tmp_path, database_url, rng, lambda port: Way(sideline, port))
        try:
            first, second = [await cluster.join(settings=broker.settings()) for _ in range(2)]
            await cluster.until_even()
            async with publishing(commands):
                await has_results(first, "scheduled", 200)
                await has_results(second, "scheduled", 200)
                await first.kill()
                await has_results(second, "scheduled", int(await results(second, "scheduled")) + 500)
            await commands.judge(second)
            assert await broker.dead_letters() == []
            await cluster.leave(second)
            assert "Traceback" not in cluster.logs
        finally:
            await cluster.close()


async def test_case_34_while_the_store_is_away_commands_wait_in_the_broker(broker: Broker, tmp_path: Path) -> None:
    """They are neither refused nor delivered again and again, though NATS waits only a second for acknowledgements."""
    await broker.add_tenant(TENANT)
    commands = Commands(broker, TENANT)
    in_flight_max = 20
    with own("postgres18") as database:
        settings = broker.settings(in_flight_max=in_flight_max) | {"DUETIME_NATS_ACK_WAIT": "1s"}
        async with serving(tmp_path, settings, fresh_database(database)) as server:
            await commands.publish(100)
            await broker.has_events(commands.firing)
            received = f'duetime_commands_received_total{{broker="{broker.name}"}}'
            before = await server.metric(received)
            await asyncio.to_thread(database.halt)
            await commands.publish(500)
            await is_consuming(server, broker, consuming=False)
            await has_results(server, "retried", 1)
            amid = await server.metric(received) - before
            await asyncio.to_thread(database.start)
            assert amid <= 2 * in_flight_max, "commands are received although they cannot be carried out"
            await commands.judge(server)
            assert await broker.dead_letters() == []


# --- the judge can fail --------------------------------------------------------------------------


def judged(**changes: Any) -> str:
    """The judgement of one fine timer and one cancelled one, except for `changes`."""
    body = {"correlationId": "first", "timestampMs": 1_000}
    payload = {"serviceCallId": "a", "reachedAt": "1970-01-01T00:00:01.000Z"}
    event = Stored("events", body | {"payload": payload}, {NatsBroker.message_id_header: "1"}, 1_000)
    requests = [
        ClientRequest("a", Kind.PUT, 800, 900, Result.OK, "first", 1_000),
        ClientRequest("b", Kind.PUT, 800, 900, Result.OK, "other", 9_000),
        ClientRequest("b", Kind.DELETE, 901, 950, Result.OK),
    ]
    fine: dict[str, Any] = {
        "requests": requests,
        "events": [event],
        "reached": [("a", "delivered"), ("b", "cancelled")],
    }
    given = {name: change(fine[name]) for name, change in changes.items()}
    return "\n".join(find_event_violations(**(fine | given), broker=NatsBroker))


def test_the_judge_accepts_what_is_as_it_should_be() -> None:
    assert judged() == ""


def test_the_judge_sees_what_is_wrong() -> None:
    def with_id(event: Stored, message_id: str) -> Stored:
        return Stored(event.place, event.body, {NatsBroker.message_id_header: message_id}, event.stored_at_ms)

    def of(event: Stored, **changes: Any) -> Stored:
        return Stored(event.place, event.body | changes, event.headers, event.stored_at_ms)

    assert "[A]" in judged(events=lambda events: [])
    assert "early" in judged(
        events=lambda events: [of(events[0], payload=events[0].body["payload"] | {"reachedAt": "1970-01-01T00:00:00Z"})]
    )
    assert "[D]" in judged(events=lambda events: [of(events[0], correlationId="nobody's")])
    assert "[C]" in judged(
        events=lambda events: [
            *events,
            of(events[0], correlationId="other", payload=events[0].body["payload"] | {"serviceCallId": "b"}),
        ]
    )
    assert "message ids ['1', '2']" in judged(events=lambda events: [*events, with_id(events[0], "2")])
    assert "stored 2 times" in judged(events=lambda events: [*events, *events])
    assert "a: its reached timers are []" in judged(reached=lambda reached: reached[1:])
    assert "b: its reached timers are ['delivered']" in judged(reached=lambda reached: [reached[0], ("b", "delivered")])
    assert "['delivered', 'delivered']" in judged(reached=lambda reached: [*reached, reached[0]])
    assert "no command asked for it" in judged(reached=lambda reached: [*reached, ("c", "delivered")])
