"""The adapters of Kafka, on a real server: the connection, events that are published, commands that are received.

The tests share one server, which has two listeners: one needs no login and allows everything, at the other one there
are logins and permissions. Each test has topics and a group of its own.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import CoordinatorNotAvailableError, UnknownError
from aiokafka.protocol.admin import CreateAclsRequest, DescribeAclsRequest
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition
from brokers import Commands, KafkaBroker
from real_server import RealServer, free_port
from scripts.servers import Kafka as KafkaServer
from scripts.servers import Link

from duetime.brokers.kafka import KafkaConnection
from duetime.clock import SystemClock
from duetime.config import Kafka, load_config
from duetime.deliveries.kafka import KafkaDeliverer
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Extras, Namespace, Timer, uuid_of
from duetime.errors import BrokerAway, SetupError
from duetime.ingress.kafka import KafkaCommands
from duetime.ingress.source import Backlog, Message, Refusal
from duetime.telemetry import Telemetry
from servers import own, require

DUE_MS = 1_800_000_000_000
MEGABYTE = 1 << 20
NO = Refusal("no", None, None)
PASSWORD = "secret"

# --- what the tests are made of ------------------------------------------------------------------


class World:
    """The server as one test sees it."""

    def __init__(self, server: KafkaServer, link: Link, login_port: int) -> None:
        self.server = server
        self.link = link
        self.name = f"t{random.getrandbits(40):x}"
        self.login = {"servers": [f"127.0.0.1:{login_port}"], "sasl_mechanism": "PLAIN", "password": PASSWORD}

    def settings(self, **fields: object) -> Kafka:
        own = {
            "servers": [self.server.url()],
            "command_topic": f"{self.name}.commands.{{tenant}}",
            "group": f"{self.name}-group",
            "target": f"kafka:{self.name}.events",
            "dead_letter_topic": f"{self.name}.dead",
            "allow_topics": [f"{self.name}.events"],
        }
        return load_config(environ={}, flags={f"kafka.{name}": value for name, value in (own | fields).items()}).kafka

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[AIOKafkaAdminClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.server.url())
        await admin.start()
        try:
            yield admin
        finally:
            await admin.close()

    async def make(self, *names: str, partitions: int = 1, **settings: str) -> None:
        """Topics. An underscore in a setting stands for a dot."""
        configs = {name.replace("_", "."): value for name, value in settings.items()}
        topics = [f"{self.name}.{name}" for name in names]
        async with self.admin() as admin:
            answer = await admin.create_topics(
                [NewTopic(topic, partitions, 1, topic_configs=configs) for topic in topics]
            )
            assert [code for _, code, _ in answer.topic_errors] == [0] * len(topics)
            await self._until(admin, topics, there=True)

    async def remove(self, name: str) -> None:
        async with self.admin() as admin:
            await admin.delete_topics([f"{self.name}.{name}"])
            await self._until(admin, [f"{self.name}.{name}"], there=False)

    async def _until(self, admin: AIOKafkaAdminClient, topics: list[str], *, there: bool) -> None:
        async with asyncio.timeout(20):
            while any(bool(topic["error_code"]) is there for topic in await admin.describe_topics(topics)):
                await asyncio.sleep(0.02)

    async def topics(self) -> set[str]:
        async with self.admin() as admin:
            return {topic for topic in await admin.list_topics() if topic.startswith(f"{self.name}.")}

    async def allow(self, user: str, *rules: tuple[str, str, str]) -> None:
        """Each: topic, group or cluster; its name after that of the test; what is allowed."""
        kinds, operations = {"topic": 2, "group": 3, "cluster": 4}, {"read": 3, "write": 4, "create": 5, "describe": 8}
        async with self.admin() as admin:
            for kind, name, operation in rules:
                resource = "kafka-cluster" if kind == "cluster" else self.name + name
                rule = kinds[kind], resource, 4, f"User:{user}", "*", operations[operation], 3
                answer = await admin._send_to_controller(CreateAclsRequest(*rule))
                assert answer.to_object()["creation_responses"][0]["error_code"] == 0, answer
                async with asyncio.timeout(10):  # until the broker knows of it too
                    while not (await admin._send_request(DescribeAclsRequest(*rule))).to_object()["resources"]:
                        await asyncio.sleep(0.02)

    async def send(self, name: str, *bodies: bytes | None, key: bytes | None = None, partition: int = 0) -> None:
        async with AIOKafkaProducer(bootstrap_servers=self.server.url()) as producer:
            for body in bodies:
                await producer.send(f"{self.name}.{name}", body, key=key or b"k", partition=partition)
            await producer.flush()

    async def send_batches(self, name: str, *batches: Sequence[bytes], codec: str = "gzip") -> None:
        """Compressed, to the first partition."""
        options = {"compression_type": codec, "max_batch_size": 8 * MEGABYTE, "max_request_size": 8 * MEGABYTE}
        async with AIOKafkaProducer(bootstrap_servers=self.server.url(), **options) as producer:
            for bodies in batches:
                builder = producer.create_batch()
                for body in bodies:
                    assert builder.append(key=None, value=body, timestamp=None) is not None
                await (await producer.send_batch(builder, f"{self.name}.{name}", partition=0))

    async def read(self, name: str, count: int) -> list[Any]:
        """Records, from the first one on."""
        records: list[Any] = []
        consumer = AIOKafkaConsumer(
            f"{self.name}.{name}", bootstrap_servers=self.server.url(), auto_offset_reset="earliest"
        )
        async with asyncio.timeout(20), consumer:
            while len(records) < count:
                for found in (await consumer.getmany(timeout_ms=200)).values():
                    records += found
        return records

    async def committed(self, name: str = "commands.orders", partition: int = 0) -> int | None:
        async with self.admin() as admin:
            offsets = await admin.list_consumer_group_offsets(f"{self.name}-group")
        found = offsets.get(TopicPartition(f"{self.name}.{name}", partition))
        return None if found is None else int(found.offset)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[KafkaServer, Link, int]]:
    port = free_port()
    link = require("toxiproxy").link(port)
    login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    users = dict.fromkeys(("admin", "nobody", "describer", "reader", "writer"), PASSWORD)
    named = " ".join(f'user_{user}="{password}"' for user, password in users.items())
    settings = {
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT,LINKED:SASL_PLAINTEXT",
        "listener.name.linked.plain.sasl.jaas.config": f"{login} {named};",
    }
    with own("kafka", users=users, linked=(port, link.port), settings=settings) as kafka:
        asyncio.run(first_group(kafka))
        yield kafka, link, link.port
        kafka.kill()  # its stop can take a quarter of a minute
    link.close()


async def first_group(server: KafkaServer) -> None:
    """Kafka makes its topic of offsets when it is asked for a group for the first time."""
    admin = AIOKafkaAdminClient(bootstrap_servers=server.url())
    await admin.start()
    async with asyncio.timeout(20):
        while True:
            try:
                await admin.find_coordinator("first")
                break
            except CoordinatorNotAvailableError:
                await asyncio.sleep(0.1)
    await admin.close()


@pytest.fixture
def world(server: tuple[KafkaServer, Link, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr("duetime.brokers.kafka.PARTITIONS", 2)  # each is a folder of files
    yield World(*server)
    server[0].thaw()


@asynccontextmanager
async def connected(config: Kafka) -> AsyncIterator[KafkaConnection]:
    connection = KafkaConnection(config)
    try:
        await connection.open()
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def receiving(config: Kafka) -> AsyncIterator[KafkaCommands]:
    async with connected(config) as connection:
        commands = KafkaCommands(config, connection)
        try:
            await commands.open()
            yield commands
        finally:
            await commands.close()


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)


async def receive(commands: KafkaCommands, count: int, limit: int = 100) -> list[Message]:
    """This many, from as many calls as it takes."""
    messages: list[Message] = []
    async with asyncio.timeout(30):
        while len(messages) < count:
            messages += await commands.receive(limit, MEGABYTE)
    assert len(messages) == count, bodies(messages)
    return messages


def bodies(messages: Sequence[Message]) -> list[bytes]:
    return [message.body for message in messages]


def due(world: World, topic: str = "events", **fields: Any) -> Timer:
    high, low = uuid_of("orders", "order-17")
    defaults: dict[str, Any] = {"timer_id": "order-17", "execute_at_ms": DUE_MS, "scheduled_at_ms": DUE_MS}
    return Timer(
        namespace="orders",
        uuid_high=high,
        uuid_low=low,
        created_at_ms=0,
        callback_url=f"kafka:{world.name}.{topic}",
        **(defaults | {"generation": 5 << 32} | fields),
    )


def attempt(timer: Timer, *, timeout_s: int = 5, begin: Callable[[], int | None] = lambda: DUE_MS + 12) -> Attempt:
    namespace = Namespace(name="orders", num_shards=16, created_at_ms=0, callback_timeout_seconds=timeout_s)
    return Attempt(timer, namespace, "3.9", begin)


class Deliverer(KafkaDeliverer):
    def __init__(self, config: Kafka, connection: KafkaConnection) -> None:
        self.telemetry = Telemetry()
        super().__init__(config, connection, SystemClock(), self.telemetry)

    @property
    def counted(self) -> tuple[int, int, int]:
        of = self.telemetry
        return (
            of.events_published.by_label["kafka"],
            of.event_failures.by_label["kafka"],
            of.event_delay_seconds.count,
        )


@asynccontextmanager
async def delivering(config: Kafka) -> AsyncIterator[tuple[Deliverer, KafkaConnection]]:
    async with connected(config) as connection:
        yield Deliverer(config, connection), connection


def never() -> int:
    raise AssertionError("an attempt has begun")


# --- the connection ------------------------------------------------------------------------------


async def test_topics_that_belong_to_no_tenant_are_created(world: World) -> None:
    allowed = [f"{world.name}.events", f"{world.name}.of.{{tenant}}"]
    async with receiving(world.settings(allow_topics=allowed)):
        assert await world.topics() == {f"{world.name}.events", f"{world.name}.dead"}
    async with receiving(world.settings(allow_topics=allowed)):  # all of it is used again
        pass


async def test_nothing_is_created_without_permission_to_do_so(world: World) -> None:
    with pytest.raises(SetupError, match=r"there is no topic .*create_topics is false: .*--create --topic"):
        await KafkaConnection(world.settings(create_topics=False)).open()
    await world.allow("describer", ("topic", "", "describe"), ("topic", ".other", "write"))
    with pytest.raises(SetupError, match=r"may not create the topic .*, or allow it CREATE"):
        await KafkaConnection(world.settings(**world.login, user="describer")).open()
    assert await world.topics() == set()


@pytest.mark.parametrize(
    ("fields", "error", "problem"),
    [
        ({"user": "admin", "password": "wrong"}, SetupError, r"refuses the login as kafka\.user 'admin'"),
        ({"user": "unknown"}, SetupError, r"refuses the login as kafka\.user 'unknown'"),
        ({"user": "admin", "sasl_mechanism": "SCRAM-SHA-256"}, SetupError, r"refuses kafka\.sasl_mechanism SCRAM"),
        ({"sasl_mechanism": "", "password": ""}, BrokerAway, r"does it ask for a login, or for TLS\?"),
        ({"user": "nobody"}, SetupError, r"may not publish: allow it WRITE"),
    ],
)
async def test_a_login_that_cannot_work(
    world: World, fields: dict[str, str], error: type[Exception], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(error, match=problem):
        await KafkaConnection(world.settings(**(world.login | fields))).open()
    assert PASSWORD not in caplog.text


async def test_a_login_with_the_permissions_of_the_page_is_enough(world: World) -> None:
    await world.make("events", "dead", "commands.orders")
    await world.allow(
        "writer",
        *(("topic", name, operation) for name in (".events", ".dead") for operation in ("write", "describe")),
        *(("topic", ".commands.", operation) for operation in ("read", "describe")),
        ("group", "-group", "read"),
    )
    config = world.settings(**world.login, user="writer", create_topics=False)
    async with receiving(config) as commands:
        await world.send("commands.orders", b"1", b"2")
        first, second = await receive(commands, 2)
        await commands.acknowledge([first])
        await commands.refuse(second, NO)
        kafka = Deliverer(config, commands._connection)
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
    assert await world.committed() == 2


async def test_without_permission_for_the_group_the_start_fails(world: World) -> None:
    await world.make("events", "dead")
    await world.allow("reader", ("topic", "", "describe"), ("topic", "", "read"), ("topic", "", "write"))
    async with connected(config := world.settings(**world.login, user="reader")) as connection:
        with pytest.raises(SetupError, match=r"may not read as the group .*kafka\.group"):
            await KafkaCommands(config, connection).open()


async def test_an_event_that_this_login_may_not_write(world: World) -> None:
    await world.make("events", "dead")
    await world.allow("reader", ("topic", "", "describe"))
    async with delivering(world.settings(**world.login, user="reader")) as (kafka, connection):
        result = await kafka.deliver(attempt(due(world)))
        assert (result.contact, "may not write" in str(result.error)) == (Contact.BROKEN, True)
        await world.allow("reader", ("topic", "", "write"))

        async def is_accepted() -> bool:
            return (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED

        async with asyncio.timeout(10):
            while not await is_accepted():
                await asyncio.sleep(0.1)
        assert connection.is_connected


async def test_a_server_that_cannot_be_reached(world: World) -> None:
    connection = KafkaConnection(world.settings(servers=["127.0.0.1:1"]))
    with pytest.raises(BrokerAway, match=r"no broker can be reached: 127\.0\.0\.1:1: "):
        await connection.open()
    assert not connection.is_connected
    kafka = Deliverer(world.settings(), connection)
    assert (await kafka.deliver(attempt(due(world), begin=never))).contact is Contact.AWAY
    assert kafka.counted == (0, 0, 0)
    await connection.close()


async def test_one_of_several_servers_is_enough(world: World) -> None:
    async with connected(world.settings(servers=["127.0.0.1:1", world.server.url(), "127.0.0.1:2"])) as connection:
        assert connection.is_connected


async def test_callers_share_one_attempt_and_after_the_end_there_is_none(world: World) -> None:
    connection = KafkaConnection(world.settings())
    await asyncio.gather(*(connection.open() for _ in range(5)))
    producer = connection._producer
    await connection.open()
    assert connection._producer is producer is not None
    await connection.close()
    with pytest.raises(BrokerAway, match="closed"):
        await connection.open()


def running() -> set[str]:
    """Tasks and threads, except for the test's own task and the threads of the test server's log."""
    tasks = {str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()}
    return tasks | {thread.name for thread in threading.enumerate()}


async def test_a_stop_leaves_no_task_and_no_thread(world: World) -> None:
    await world.make("commands.orders")
    before = running()
    config = world.settings()
    async with receiving(config) as commands:
        await world.send("commands.orders", b"1", b"2")
        await receive(commands, 2)
        await commands.retry((await receive_again(world, commands))[0], 60_000)
        assert (await Deliverer(config, commands._connection).deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        assert running() > before
    assert running() == before


async def receive_again(world: World, commands: KafkaCommands) -> list[Message]:
    await world.send("commands.orders", b"3")
    return await receive(commands, 1)


async def test_a_stop_amid_the_start_leaves_no_task(world: World) -> None:
    before = running()
    for pause in (0, 0.01, 0.05, 0.1, 0.3):
        connection = KafkaConnection(world.settings())
        opening = asyncio.ensure_future(connection.open())
        await asyncio.sleep(pause)
        await connection.close()
        await asyncio.wait({opening})
        assert not connection.is_connected
        if not opening.cancelled():
            opening.exception()
    assert running() == before


async def test_a_stop_while_no_answers_come_leaves_no_task(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("duetime.ingress.kafka._REVOKE_SECONDS", 0.3)
    monkeypatch.setattr("duetime.ingress.kafka._STOP_LOOK_SECONDS", 0.3)
    monkeypatch.setattr("duetime.brokers.kafka._STOP_SECONDS", 0.5)
    await world.make("commands.orders")
    before = running()
    config = world.settings()
    connection = KafkaConnection(config)
    await connection.open()
    commands, kafka = KafkaCommands(config, connection), Deliverer(config, connection)
    await commands.open()
    await world.send("commands.orders", b"1", b"2")
    messages = await receive(commands, 2)
    assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
    world.server.freeze()
    events = [asyncio.ensure_future(kafka.deliver(attempt(due(world), timeout_s=60))) for _ in range(5)]
    acknowledging = asyncio.ensure_future(commands.acknowledge(messages))
    await asyncio.sleep(0.1)
    async with asyncio.timeout(10):
        await commands.close()
        await connection.close()
        assert {event.contact for event in await asyncio.gather(*events)} == {Contact.BROKEN}
        await asyncio.wait({acknowledging})
        acknowledging.exception()  # unknown: another instance may receive them again
    world.server.thaw()
    assert running() == before
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_answers_that_never_come(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The brokers take messages, and store them perhaps: nothing is known of them. No attempt is begun after that."""
    await world.make("commands.orders")
    config = world.settings()
    async with receiving(config) as commands:
        connection = commands._connection
        kafka = Deliverer(config, connection)
        await world.send("commands.orders", b"1")
        (message,) = await receive(commands, 1)
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        world.server.freeze()
        try:
            result = await kafka.deliver(attempt(due(world), timeout_s=1))
            assert (result.contact, result.error) == (
                Contact.BROKEN,
                "Kafka has not acknowledged the event within 1 s",
            )
            await until(lambda: not connection.is_connected)
            assert "no answer within 3 s" in connection.away_reason
            assert (await kafka.deliver(attempt(due(world), begin=never))).contact is Contact.AWAY
            with pytest.raises(BrokerAway):
                await commands.receive(10, MEGABYTE)
            with pytest.raises(BrokerAway):
                await commands.acknowledge([message])
            with pytest.raises(BrokerAway):
                await commands.refuse(message, NO)
        finally:
            world.server.thaw()
        await connection.open()
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        await commands.acknowledge([message])
        await world.send("commands.orders", b"2")
        assert bodies(await receive(commands, 1)) == [b"2"]
    assert await world.committed() == 1
    ids = {dict(record.headers)["duetime-message-id"] for record in await world.read("events", 2)}
    assert len(ids) == 1  # however often it was stored
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


# --- events --------------------------------------------------------------------------------------


async def test_an_event_is_accepted_once_the_brokers_have_stored_it(world: World) -> None:
    timer = due(world, attempts=2, extras=Extras(headers={"x-order": "17"}))
    async with delivering(world.settings()) as (kafka, _):
        assert await kafka.deliver(attempt(timer)) == AttemptResult(Contact.ACCEPTED)
        assert kafka.counted == (1, 0, 1)
    (event,) = await world.read("events", 1)
    assert event.key == b"order-17"
    assert dict(event.headers) == {
        "content-type": b"application/json",
        "duetime-attempt": b"3",
        "duetime-fence": b"3.9",
        "duetime-message-id": f"{timer.delivery_id}.0".encode(),
        "x-order": b"17",
    }
    body = json.loads(event.value)
    assert (body["type"], body["tenantId"], body["timestampMs"]) == ("DueTimeReached", "orders", DUE_MS + 12)


async def test_events_of_one_timer_are_in_one_partition(world: World) -> None:
    await world.make("events", partitions=8)
    async with delivering(world.settings()) as (kafka, _):
        await asyncio.gather(*(kafka.deliver(attempt(due(world, generation=n << 32))) for n in range(1, 9)))
        await asyncio.gather(*(kafka.deliver(attempt(due(world, timer_id=f"other-{n}"))) for n in range(16)))
    records = await world.read("events", 24)
    assert len({record.partition for record in records if record.key == b"order-17"}) == 1
    assert len({record.partition for record in records}) > 1


async def test_an_attempt_that_must_not_be_made_any_more(world: World) -> None:
    async with delivering(world.settings()) as (kafka, _):
        assert (await kafka.deliver(attempt(due(world), begin=lambda: None))).contact is Contact.NOT_SENT
        assert kafka.counted == (0, 0, 0)
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
    assert len(await world.read("events", 1)) == 1


async def test_an_event_that_is_too_large_is_not_sent(world: World) -> None:
    await world.make("events", max_message_bytes="2000")
    async with delivering(world.settings()) as (kafka, connection):
        sizes = []
        for size in range(1_400, 2_000):  # up to the byte at which the brokers would refuse it
            payload = '"' + "x" * size + '"'
            result = await kafka.deliver(attempt(due(world, generation=size << 32, payload=payload)))
            if result.contact is Contact.REFUSED:
                assert "takes 2000" in str(result.error)
                sizes.append(size)
                break
            assert result.contact is Contact.ACCEPTED
        assert sizes
        producer = connection._producer
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        assert connection._producer is producer  # the brokers have refused nothing


async def test_an_event_that_only_the_brokers_find_too_large(world: World) -> None:
    """The limit of the topic was lowered a moment ago. The events of other topics go on."""
    await world.make("events", "other")
    allowed = [f"{world.name}.events", f"{world.name}.other"]
    async with delivering(world.settings(allow_topics=allowed)) as (kafka, connection):
        for topic in ("events", "other"):
            assert (await kafka.deliver(attempt(due(world, topic)))).contact is Contact.ACCEPTED
        async with world.admin() as admin:
            limit = ConfigResource(ConfigResourceType.TOPIC, f"{world.name}.events", {"max.message.bytes": "2000"})
            await admin.alter_configs([limit])
            async with asyncio.timeout(10):
                while "'2000'" not in str(await admin.describe_configs([limit])):
                    await asyncio.sleep(0.05)
        large = due(world, payload='"' + "x" * 3_000 + '"')
        others = [asyncio.ensure_future(kafka.deliver(attempt(due(world, "other")))) for _ in range(20)]
        result = await kafka.deliver(attempt(large))
        assert (result.contact, "too large" in str(result.error)) == (Contact.REFUSED, True)
        contacts = {other.contact for other in await asyncio.gather(*others)}
        assert contacts == {Contact.ACCEPTED}
        # Its numbers do not fit any more, so there is a new producer soon. Until then no attempt is begun.
        assert (await kafka.deliver(attempt(due(world), begin=never))).contact is Contact.AWAY
        await connection.open()
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED


async def test_a_topic_that_does_not_exist(world: World) -> None:
    allowed = [f"{world.name}.{{tenant}}"]
    async with delivering(world.settings(allow_topics=allowed)) as (kafka, _):
        result = await kafka.deliver(attempt(due(world, "orders")))
        assert (result.contact, result.error) == (Contact.BROKEN, f"there is no Kafka topic '{world.name}.orders'")
        await world.make("orders")
        assert (await kafka.deliver(attempt(due(world, "orders")))).contact is Contact.ACCEPTED
        assert kafka.counted == (1, 1, 1)


async def test_a_topic_that_is_removed_meanwhile_does_not_stop_the_others(world: World) -> None:
    await world.make("gone", "events")
    allowed = [f"{world.name}.events", f"{world.name}.gone"]
    async with delivering(world.settings(allow_topics=allowed, create_topics=False, command_topic="")) as (kafka, c):
        for topic in ("gone", "events"):
            assert (await kafka.deliver(attempt(due(world, topic)))).contact is Contact.ACCEPTED
        await world.remove("gone")
        client, asked = c._producer.client, 0
        update = client._metadata_update

        async def counted(*args: Any) -> Any:
            nonlocal asked
            asked += 1
            return await update(*args)

        client._metadata_update = counted
        removed = asyncio.ensure_future(kafka.deliver(attempt(due(world, "gone"), timeout_s=1)))
        while not removed.done():
            assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        assert removed.result().contact is Contact.BROKEN
        assert 1 <= asked < 100  # in a second; the driver by itself asks a thousand times
        await until(lambda: c._producer.client.cluster.partitions_for_topic(f"{world.name}.gone") is None)
        again = await kafka.deliver(attempt(due(world, "gone")))  # not AWAY, which would stop all topics
        assert (again.contact, again.error) == (Contact.BROKEN, f"there is no Kafka topic '{world.name}.gone'")
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        await world.make("gone")
        assert (await kafka.deliver(attempt(due(world, "gone")))).contact is Contact.ACCEPTED


async def test_a_producer_whose_numbers_do_not_fit_is_replaced(world: World) -> None:
    """As after the loss of records, or when a broker takes it for another one."""
    async with delivering(world.settings()) as (kafka, connection):
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
        producer = connection._producer
        numbers = producer._txn_manager._sequence_numbers
        for partition in numbers:
            numbers[partition] += 7
        result = await kafka.deliver(attempt(due(world)))
        assert (result.contact, "OutOfOrderSequence" in str(result.error)) == (Contact.BROKEN, True)
        assert (await kafka.deliver(attempt(due(world), begin=never))).contact is Contact.AWAY
        await connection.open()
        assert connection._producer is not producer
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED
    assert len(await world.read("events", 2)) == 2


async def test_a_producer_that_has_failed_is_replaced(world: World) -> None:
    async with delivering(world.settings()) as (kafka, connection):
        producer = connection._producer
        producer._sender.sender_task.cancel()
        await until(lambda: not connection.is_connected)
        await connection.open()
        assert connection._producer is not producer
        assert (await kafka.deliver(attempt(due(world)))).contact is Contact.ACCEPTED


# --- commands ------------------------------------------------------------------------------------


async def test_commands_are_received_in_order_and_once_acknowledged_not_again(world: World) -> None:
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"1", b"2", b"3")
        messages = await receive(commands, 3)
        assert bodies(messages) == [b"1", b"2", b"3"]
        one = messages[0]
        assert (one.subject, one.tenant, one.deliveries) == (f"{world.name}.commands.orders", "orders", 1)
        assert [message.position.sequence for message in messages] == [0, 1, 2]
        assert {message.position.stream for message in messages} == {f"kafka:{world.name}.commands.orders/0"}
        assert abs(one.position.at_ms - SystemClock().wall_ms()) < 60_000
        await commands.acknowledge(messages)
        assert await world.committed() == 3
        assert await commands.backlog() == Backlog(0)
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"4")
        assert bodies(await receive(commands, 1)) == [b"4"]


async def test_only_what_is_done_without_a_gap_is_committed(world: World) -> None:
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"1", b"2", b"3", b"4")
        first, second, third, fourth = await receive(commands, 4)
        await commands.acknowledge([third, second])
        assert await world.committed() is None or await world.committed() == 0
        await commands.acknowledge([first])
        assert await world.committed() == 3
        await commands.acknowledge([first, second])  # repeated: the offset does not go back
        assert await world.committed() == 3
        await commands.retry(fourth, 60_000)
    async with receiving(world.settings()) as other:
        (again,) = await receive(other, 1)
        assert (again.body, again.position) == (b"4", fourth.position)


async def test_a_retry_is_delivered_again_after_its_time_and_holds_back_nothing(world: World) -> None:
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"later", b"now")
        later, now = await receive(commands, 2)
        started = asyncio.get_running_loop().time()
        await commands.retry(later, 700)
        await commands.retry(now, 0)
        assert [(m.body, m.deliveries) for m in await receive(commands, 1)] == [(b"now", 2)]
        await world.send("commands.orders", b"next")
        assert bodies(await receive(commands, 2)) == [b"next", b"later"]
        assert asyncio.get_running_loop().time() - started >= 0.7


async def test_batches_of_every_codec_are_received(world: World) -> None:
    codecs = ("gzip", "snappy", "lz4", "zstd")
    await world.make("commands.orders")
    for codec in codecs:
        await world.send_batches("commands.orders", [codec.encode() * 10_000, b"small"], codec=codec)
    async with receiving(world.settings()) as commands:
        received = bodies(await receive(commands, 2 * len(codecs)))
        assert received == [body for codec in codecs for body in (codec.encode() * 10_000, b"small")]


async def test_a_command_of_any_form_is_received_or_becomes_a_dead_letter(world: World) -> None:
    """Without a value, empty, without a key, with headers that are no text: none stops those after it."""
    await world.make("commands.orders", cleanup_policy="compact")
    async with receiving(world.settings()) as commands:
        topic = f"{world.name}.commands.orders"
        async with AIOKafkaProducer(bootstrap_servers=world.server.url()) as producer:
            await producer.send_and_wait(topic, None, key=b"tombstone")
            await producer.send_and_wait(topic, b"", key=b"")
            await producer.send_and_wait(topic, b"\xff\0", key=b"\xff", headers=[("a", b"\xff"), ("b", b"")])
            odd = producer.create_batch()
            for value in (b"lost", b"lost too"):
                odd.append(key=b"k", value=value, timestamp=None, headers=[("odd-name", b"v")])
            whole = bytes(odd._build()).replace(b"odd-name", b"\xff\xfe--name")
            odd._buffer = whole[:17] + struct.pack(">I", calc_crc32c(whole[21:])) + whole[21:]
            await producer.send_batch(odd, topic, partition=0)
            await producer.send_and_wait(topic, b"good", key=b"k")
        messages = await receive(commands, 5)
        assert bodies(messages)[:3] == [b"", b"", b"\xff\0"]
        assert messages[3].body.startswith(b"the records 3 to 4, ")
        assert messages[4].body == b"good"
        for message in messages[:4]:
            await commands.refuse(message, Refusal("the message is not JSON", None, None))
        await commands.acknowledge(messages[4:])
        assert await world.committed() == 6
    letters = await world.read("dead", 4)
    assert {json.loads(letter.value)["reason"] for letter in letters} == {"the message is not JSON"}
    places = {dict(letter.headers)["duetime-position"].decode() for letter in letters}
    assert places == {f"kafka:{topic}/0/{offset}" for offset in (0, 1, 2, 4)}


async def test_a_batch_that_was_damaged_on_disk_stops_only_its_partition(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.make("commands.bad", "commands.good")
    for body in (b"first", b"damaged"):
        await world.send("commands.bad", body)
    [segment] = (world.server.folder / "data" / f"{world.name}.commands.bad-0").glob("*.log")
    with segment.open("r+b") as file:
        file.seek(-2, 2)  # the last byte of the value: then comes the number of headers
        assert file.read(1) == b"d"
        file.seek(-2, 2)
        file.write(b"D")
    async with receiving(world.settings()) as commands:
        await world.send("commands.good", b"good")
        messages = await receive(commands, 2)
        assert set(bodies(messages)) == {b"first", b"good"}
        await commands.acknowledge(messages)
        await world.send("commands.bad", b"after it")
        await world.send("commands.good", b"more")
        more = await receive(commands, 1)
        assert bodies(more) == [b"more"]
        await commands.acknowledge(more)
        assert await commands.receive(10, MEGABYTE) == []
        assert (await world.committed("commands.bad"), await world.committed("commands.good")) == (1, 2)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert f"from partition 0 of '{world.name}.commands.bad': the checksum of a batch is wrong" in errors[0]


async def test_a_dead_letter_is_published_once_though_its_offset_cannot_be_committed(world: World) -> None:
    await world.make("commands.orders", "dead")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"{}")
        (message,) = await receive(commands, 1)
        coordinator = commands._consumer._coordinator
        send, coordinator._send_req = coordinator._send_req, failing
        with pytest.raises(BrokerAway, match="cannot commit"):
            await commands.refuse(message, NO)
        coordinator._send_req = send
        await commands.refuse(message, NO)
        assert await world.committed() == 1
        await world.send("dead", b"the end")
    assert [letter.value for letter in await world.read("dead", 2)][1:] == [b"the end"]


async def failing(request: object) -> None:
    raise UnknownError


async def test_without_a_topic_for_dead_letters_only_their_tenant_waits(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duetime.ingress.kafka._LETTER_PAUSE_SECONDS", 1.0)
    await world.make("commands.bad", "commands.good", "dead.good")
    async with receiving(world.settings(dead_letter_topic=f"{world.name}.dead.{{tenant}}")) as commands:
        await world.send("commands.bad", b"{}")
        (bad,) = await receive(commands, 1)
        await commands.refuse(bad, NO)  # it returns: the intake has room for others
        await commands.refuse(bad, NO)
        assert len([record for record in caplog.records if "a dead letter cannot be published" in record.message]) == 1
        await world.send("commands.bad", b"waits")
        await world.send("commands.good", b"good")
        (good,) = await receive(commands, 1)
        assert good.tenant == "good"
        await commands.refuse(good, NO)
        await commands.acknowledge([good])
        assert await world.committed("commands.good") == 1
        assert await world.committed("commands.bad") is None
        await world.make("dead.bad")
        again = await receive(commands, 2)  # it was handed back twice here
        await asyncio.gather(*(commands.refuse(message, NO) for message in again))
        assert bodies(await receive(commands, 1)) == [b"waits"]
        assert await world.committed("commands.bad") == 1


async def test_a_tenant_whose_topic_may_not_be_read_any_more_does_not_stop_the_others(world: World) -> None:
    await world.make("events", "dead", "commands.bad", "commands.good")
    rules = [("topic", name, operation) for name in (".events", ".dead") for operation in ("write", "describe")]
    await world.allow("reader", *rules, ("group", "-group", "read"), ("topic", ".commands.", "describe"))
    await world.allow("reader", ("topic", ".commands.good", "read"))
    config = world.settings(**world.login, user="reader", create_topics=False)
    async with receiving(config) as commands:
        await world.send("commands.bad", b"bad")
        await world.send("commands.good", b"good")
        (good,) = await receive(commands, 1)
        assert good.body == b"good"
        # A command of the other one, as it was received before the permission was taken away.
        partition = TopicPartition(f"{world.name}.commands.bad", 0)
        commands._keep(partition, [_Received()])
        (bad,) = await receive(commands, 1)
        await commands.acknowledge([bad, good])
        assert await world.committed("commands.good") == 1
        assert await world.committed("commands.bad") is None


class _Received:
    offset, timestamp, value = 0, 0, b"bad"


async def test_a_topic_that_is_removed_and_made_again_is_read_from_its_first_record(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duetime.ingress.kafka._METADATA_SECONDS", 1.0)
    await world.make("commands.orders", "commands.other")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", *(b"old %d" % number for number in range(5)))
        old = await receive(commands, 5)
        await commands.acknowledge(old[:2])
        await world.remove("commands.orders")
        await commands.acknowledge(old[2:3])  # of a partition that does not exist: others go on
        await world.send("commands.other", b"other")
        (other,) = await receive(commands, 1)
        await commands.acknowledge([other])
        assert await world.committed("commands.other") == 1
        await world.make("commands.orders")
        await world.send("commands.orders", b"new 0", b"new 1")
        new = await receive(commands, 2)
        assert bodies(new) == [b"new 0", b"new 1"]
        await commands.acknowledge(old[3:])  # they say nothing of the new records
        assert await world.committed() in (None, 0)
        await commands.acknowledge(new)
        assert await world.committed() == 2


async def test_records_that_come_again_with_lower_numbers_are_other_records(world: World) -> None:
    """The log has lost its end, and the driver begins with the first record of what there is."""
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"1", b"2", b"3")
        before = await receive(commands, 3)
        await commands.acknowledge(before[:1])
        consumer = commands._consumer
        consumer.seek(TopicPartition(f"{world.name}.commands.orders", 0), 0)
        again = await receive(commands, 3)
        await commands.acknowledge(before)
        await commands.acknowledge(again[:2])
        assert await world.committed() == 2
        await commands.acknowledge(again[2:])
        assert await world.committed() == 3


async def test_an_instance_that_lost_its_place_in_the_group_commits_nothing(world: World) -> None:
    """It was frozen for longer than its session. The group is empty then, so that Kafka would take any offset."""
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"1", b"2")
        messages = await receive(commands, 2)
        coordinator = commands._consumer._coordinator
        await coordinator._maybe_leave_group()  # as its coordinator sees it
        await commands.acknowledge(messages)
        assert await world.committed() is None
        assert bodies(await receive(commands, 2)) == [b"1", b"2"]


async def test_a_second_instance_amid_a_batch_takes_over_what_is_not_done(world: World) -> None:
    await world.make("commands.orders", partitions=4)
    config = world.settings()
    async with receiving(config) as one:
        for partition in range(4):
            await world.send("commands.orders", b"a%d" % partition, b"b%d" % partition, partition=partition)
        held = await receive(one, 8)
        done = [message for message in held if message.body.startswith(b"a")]
        await one.acknowledge(done)
        async with receiving(config) as two:
            # The first one has to ask for more, as the intake does, to notice that it shares the partitions now.
            received: list[Message] = []
            theirs: list[Message] = []
            async with asyncio.timeout(30):
                while len(received) + len(theirs) < 4:
                    one_has, two_has = await asyncio.gather(one.receive(10, MEGABYTE), two.receive(10, MEGABYTE))
                    received += one_has
                    theirs += two_has
            assert {message.body for message in [*received, *theirs]} == {b"b0", b"b1", b"b2", b"b3"}
            assert len(received) == len(theirs) == 2
            await one.acknowledge(held)  # as if they had been in work all the time: they are not its own any more
            assert [await world.committed(partition=number) for number in range(4)] == [1, 1, 1, 1]
            await one.acknowledge(received)
            await two.acknowledge(theirs)
            assert [await world.committed(partition=number) for number in range(4)] == [2, 2, 2, 2]


async def test_rebalances_under_load_lose_no_command_and_make_no_timer_twice(world: World, tmp_path: Path) -> None:
    """A second member of the group comes, receives commands, carries none of them out, and goes; several times."""
    broker = KafkaBroker(world.server, world.link)
    broker._prefix = world.name
    config = world.settings()
    server = RealServer(tmp_path)
    server.settings.update(broker.settings())
    await broker.add_tenant("acme")
    commands = Commands(broker, "acme")
    try:
        await server.start()
        for _ in range(2):
            async with receiving(config) as other, asyncio.timeout(30):
                taken: list[Message] = []
                while not taken:
                    received, _ = await asyncio.gather(other.receive(20, MEGABYTE), commands.publish(50))
                    taken += received
            await commands.publish(50)
        await commands.judge(server)
        assert await broker.dead_letters() == []
        assert await server.stop() == 0
        assert "Traceback" not in server.log.read_text()
    finally:
        await broker.close()
        await server.close()


async def test_a_slow_instance_takes_no_more_than_it_is_asked_for(world: World) -> None:
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", *[b"x" * 1_000] * 100)
        assert len(await receive(commands, 7, limit=7)) == 7
        sizes = [len(await commands.receive(100, 2_500)) for _ in range(3)]
        assert all(1 <= size <= 3 for size in sizes), sizes


async def test_tenants_with_very_many_small_records_do_not_hold_up_the_others(world: World) -> None:
    """They are a few kilobytes when they are fetched, all at once."""
    names = [f"commands.evil{number}" for number in range(4)]
    await world.make("commands.good", *names)
    for name in names:
        await world.send_batches(name, [b"x"] * 10_000)
    await world.send("commands.good", b"y")
    async with receiving(world.settings()) as commands:
        messages: list[Message] = []
        async with asyncio.timeout(30):
            while len(messages) < 1_000:
                received = await commands.receive(100, MEGABYTE)
                await commands.acknowledge(received)
                messages += received
        assert "good" in {message.tenant for message in messages}


async def test_between_large_batches_the_event_loop_does_other_work(world: World) -> None:
    """Each is a few kilobytes when it is fetched, and takes about 10 ms to decompress."""
    await world.make("commands.evil")
    await world.send_batches("commands.evil", *[[b"x" * (MEGABYTE - 100)] * 3] * 20)
    async with receiving(world.settings()) as commands:
        counts: list[int] = []
        async with asyncio.timeout(30):
            while sum(counts) < 60:
                counts.append(len(await commands.receive(100, 100 * MEGABYTE)))
        assert sum(counts) == 60
        assert len([count for count in counts if count]) >= 10


async def test_the_backlog_is_what_no_instance_has_received(world: World) -> None:
    await world.make("commands.orders", partitions=2)
    async with receiving(world.settings()) as commands:
        assert await commands.backlog() is None  # before it has joined
        await receive_nothing(commands)
        await world.send("commands.orders", b"1", b"2")
        await world.send("commands.orders", b"3", partition=1)
        await receive(commands, 3)
        assert await commands.backlog() == Backlog(0)
    async with receiving(world.settings()) as commands:
        await world.send("commands.orders", b"4")
        await receive(commands, 4)
        assert await commands.backlog() == Backlog(0)


async def test_without_any_topic_of_commands_that_is_said_until_there_is_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    said = f"no topic matches kafka.command_topic ({world.name}.commands.{{tenant}}) yet"
    caplog.set_level(logging.INFO, "duetime")
    async with receiving(world.settings()) as commands:
        await receive_nothing(commands)
        first, later = await commands.backlog(), await commands.backlog()
        assert (first, later) == (Backlog(0), Backlog(0, remark=said)), "the driver may not know the topics at first"
        assert caplog.text.count(f"kafka: {said}: no commands are received") == 1
        await world.make("commands.orders")
        await world.send("commands.orders", b"1")
        await receive(commands, 1)
        assert await commands.backlog() == Backlog(0)
        assert "kafka: commands are received from 1 topic" in caplog.text


async def receive_nothing(commands: KafkaCommands) -> None:
    assert await commands.receive(10, MEGABYTE) == []


async def test_one_topic_for_all_tenants_names_none(world: World) -> None:
    config = world.settings(command_topic=f"{world.name}.commands")
    async with receiving(config) as commands:
        assert f"{world.name}.commands" in await world.topics()
        await world.send("commands", b"1")
        (message,) = await receive(commands, 1)
        assert message.tenant is None


async def test_in_a_topic_of_all_tenants_a_command_that_waits_does_not_stop_the_others_for_ever(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duetime.ingress.kafka._DISTANCE_MAX", 20)
    await world.make("commands", "commands.orders", "dead")
    for name, config in (
        ("commands", world.settings(command_topic=f"{world.name}.commands", group=f"{world.name}-shared")),
        ("commands.orders", world.settings()),
    ):
        async with receiving(config) as commands:
            await world.send(name, *(b"%d" % number for number in range(20)))
            first, *others = await receive(commands, 20)
            await commands.acknowledge(others)
            await world.send(name, b"after")
            await receive_nothing(commands)
            assert not commands.holds_others_up(first)
            for _ in range(4):
                await commands.retry(first, 0)
                (first,) = await receive(commands, 1)
            assert commands.holds_others_up(first) is (name == "commands")
            await commands.refuse(first, NO)
            assert bodies(await receive(commands, 1)) == [b"after"]


async def test_a_topic_of_a_new_tenant_is_found(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duetime.ingress.kafka._METADATA_SECONDS", 1.0)
    await world.make("commands.orders")
    async with receiving(world.settings()) as commands:
        await receive_nothing(commands)
        await world.make("commands.shop", "commands.shop.more", "commands.sh-op_2")
        for tenant in ("shop", "shop.more", "sh-op_2"):
            await world.send(f"commands.{tenant}", tenant.encode())
        assert {message.tenant for message in await receive(commands, 2)} == {"shop", "sh-op_2"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"command_topic": "a b"}, "command_topic"),
        ({"command_topic": "x{tenant}"}, "stands alone between dots"),
        ({"command_topic": "commands", "dead_letter_topic": "dead.{tenant}"}, "without {tenant}"),
        ({"dead_letter_topic": "dead letters"}, "dead_letter_topic"),
        ({"command_topic": "a.{tenant}", "dead_letter_topic": "a.dead"}, "must not be a topic that"),
    ],
)
def test_names_of_topics_that_cannot_work(fields: dict[str, str], problem: str) -> None:
    given = {"kafka.servers": ["127.0.0.1:1"], **{f"kafka.{name}": value for name, value in fields.items()}}
    config = load_config(environ={}, flags=given).kafka
    with pytest.raises(SetupError, match=problem):
        KafkaCommands(config, KafkaConnection(config))
