"""Message brokers for tests, NATS and Kafka by one interface: publish commands, read events and dead letters, break the
broker. And the judgement of what came of the commands.

The drivers are used directly, not through Duetime's adapters: what a test says of a stream is what any client sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

import nats
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError, TopicAlreadyExistsError
from load_clients import Door
from msgspec import Struct
from nats.aio.client import Client as NatsClient
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.client import JetStreamContext
from nats.js.errors import NotFoundError
from real_server import until, wall_ms
from scripts.gate.record import FinalFailure
from scripts.servers import Kafka, Link, Nats

from duetime.brokers.kafka import _stop_producer
from duetime.domain.instants import format_instant, parse_instant
from duetime.testing.checker import Callback, ClientRequest, Kind, Result, find_violations
from servers import require

__all__ = [
    "Broker",
    "Commands",
    "KafkaBroker",
    "NatsBroker",
    "Stored",
    "cancel_timer",
    "find_event_violations",
    "reached_timers",
    "schedule_timer",
]

# Commands that are published at once, and how long one publication may take before it is made again.
_AT_ONCE: Final = 500
_PUBLISH_SECONDS: Final = 3.0
_READ_AT_ONCE: Final = 2_000
_READ_SECONDS: Final = 5.0
_PRODUCER_SECONDS: Final = 15.0  # without an acknowledgement, after which a producer of Kafka is replaced


def schedule_timer(
    tenant: str, timer_id: str, due_ms: int, correlation_id: str | None = None, **changes: Any
) -> dict[str, Any]:
    """The envelope of the command. `changes` replace its fields; None leaves a field out."""
    envelope = {
        "id": f"{random.getrandbits(128):032x}",
        "type": "ScheduleTimer",
        "tenantId": tenant,
        "correlationId": correlation_id,
        "timestampMs": wall_ms(),
        "payload": {"tenantId": tenant, "serviceCallId": timer_id, "dueAt": format_instant(due_ms)},
        **changes,
    }
    return {name: value for name, value in envelope.items() if value is not None}


def cancel_timer(tenant: str, timer_id: str, **changes: Any) -> dict[str, Any]:
    payload = {"tenantId": tenant, "serviceCallId": timer_id}
    return schedule_timer(tenant, timer_id, 0) | {"type": "CancelTimer", "payload": payload} | changes


class Stored(Struct, frozen=True):
    """A message as the broker keeps it."""

    place: str  # its subject or topic
    body: dict[str, Any]
    headers: dict[str, str]
    stored_at_ms: int

    @property
    def timer_id(self) -> str:
        return str(self.body["payload"]["serviceCallId"])


class Broker(ABC):
    """One for each test: its names are those of no other test. `server` may be killed, restarted and frozen.

    `link` leads to the server, if the test asked for it.
    """

    name: ClassVar[str]
    message_id_header: ClassVar[str]
    drops_duplicates: ClassVar[bool]  # the broker itself, by the message id
    server: Nats | Kafka

    def __init__(self) -> None:
        self._events: list[Stored] = []
        self._dead_letters: list[Stored] = []
        self._connecting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @abstractmethod
    def settings(self, *, linked: bool = False, **changes: Any) -> dict[str, str]:
        """The environment of a `duetime serve` that uses it, `linked`: by the link. `changes` are settings of its
        section."""

    @abstractmethod
    def target(self, tenant: str) -> str:
        """Where the events of a tenant go: a URL of timers."""

    @abstractmethod
    def link(self) -> Link:
        """The way of a server with the settings `linked`. What a test breaks there it mends, for others come by it."""

    @abstractmethod
    async def add_tenant(self, tenant: str) -> None:
        """Make what the broker needs before this tenant can publish."""

    async def publish(self, commands: Iterable[Mapping[str, Any]], tenant: str | None = None) -> None:
        """As the tenant that they name, or another. Returns when the broker has acknowledged all of them; what it does
        not acknowledge is published again, as a careful publisher does."""
        encoded = ((tenant or str(c["tenantId"]), c["payload"], json.dumps(c).encode()) for c in commands)
        batch: list[Awaitable[None]] = []
        for name, payload, body in encoded:
            batch.append(self._publish_one(name, str(payload["serviceCallId"]), body))
            if len(batch) >= _AT_ONCE:
                await asyncio.gather(*batch)
                batch.clear()
        await asyncio.gather(*batch)

    async def publish_raw(self, tenant: str, body: bytes) -> None:
        await self._publish_one(tenant, "", body)

    async def events(self) -> list[Stored]:
        """All that are stored by now. While the broker is away: those that were read before."""
        with contextlib.suppress(TimeoutError, *self._errors):
            async with asyncio.timeout(_READ_SECONDS):
                await self._read_events(self._events)
        return self._events

    async def dead_letters(self) -> list[Stored]:
        with contextlib.suppress(TimeoutError, *self._errors):
            async with asyncio.timeout(_READ_SECONDS):
                await self._read_dead_letters(self._dead_letters)
        return self._dead_letters

    async def has_events(self, count: int, within_seconds: float = 30) -> list[Stored]:
        """Waits until so many timers have an event."""

        async def are_there() -> bool:
            events = await self.events()
            return len(events) >= count and len({event.timer_id for event in events}) >= count

        await until(are_there, f"{count} events", within_seconds)
        return self._events

    async def has_dead_letters(self, count: int) -> list[Stored]:
        async def are_there() -> bool:
            return len(await self.dead_letters()) >= count

        await until(are_there, f"{count} dead letters")
        return self._dead_letters

    # --- faults: the server's own methods block -----------------------------------------------------

    async def kill(self) -> None:
        await asyncio.to_thread(self.server.kill)

    async def start(self) -> None:
        await asyncio.to_thread(self.server.start)

    async def restart(self) -> None:
        await asyncio.to_thread(self.server.restart)

    def freeze(self) -> None:
        self.server.freeze()

    def thaw(self) -> None:
        self.server.thaw()

    # --- what a kind of broker does -----------------------------------------------------------------

    _errors: tuple[type[Exception], ...]

    @abstractmethod
    async def _publish_one(self, tenant: str, key: str, body: bytes) -> None: ...

    @abstractmethod
    async def _read_events(self, into: list[Stored]) -> None:
        """Appends what was stored since the last time."""

    @abstractmethod
    async def _read_dead_letters(self, into: list[Stored]) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...


def _environment(section: str, settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        f"DUETIME_{section}_{name}".upper(): value if isinstance(value, str) else json.dumps(value)
        for name, value in settings.items()
    }


class NatsBroker(Broker):
    """With the names that Duetime's configuration has: the server belongs to the test alone."""

    name = "nats"
    message_id_header = "Nats-Msg-Id"
    drops_duplicates = True
    _errors = (nats.errors.Error, OSError)

    def __init__(self, server: Nats) -> None:
        super().__init__()
        self.server: Nats = server
        self._link: Link | None = None
        self._client: NatsClient | None = None
        self._read: dict[str, int] = defaultdict(int)  # by stream: the last sequence that was read
        self._published = 0

    def settings(self, *, linked: bool = False, **changes: Any) -> dict[str, str]:
        url = f"nats://127.0.0.1:{self.link().port}" if linked else self.server.url()
        # What a lost connection or instance had received comes again after this time: half a minute by default.
        return _environment(self.name, {"url": url, "ack_wait": "3s", **changes})

    def target(self, tenant: str) -> str:
        return f"nats:timers.events.{tenant}"

    def link(self) -> Link:
        if self._link is None:
            self._link = require("toxiproxy").link(self.server.port)
        return self._link

    async def add_tenant(self, tenant: str) -> None:
        """Nothing: Duetime makes a stream for all tenants at its start. What is published before that is refused, and
        published again."""

    async def jetstream(self) -> JetStreamContext:
        async with self._connecting:
            if self._client is None:
                self._client = await nats.connect(
                    self.server.url(),
                    error_cb=_ignored,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.1,
                    ping_interval=3_600,  # what is frozen thaws; giving a connection up leaks it in the driver
                )
        return self._client.jetstream(timeout=_PUBLISH_SECONDS)

    async def _publish_one(self, tenant: str, key: str, body: bytes) -> None:
        js = await self.jetstream()
        self._published += 1
        headers = {"Nats-Msg-Id": f"test-{self._published}"}
        while True:
            try:
                await js.publish(f"timers.commands.{tenant}", body, headers=headers)
                return
            except (TimeoutError, *self._errors):
                await asyncio.sleep(0.1)

    async def _read_events(self, into: list[Stored]) -> None:
        await self._read_stream("TIMER_EVENTS", into)

    async def _read_dead_letters(self, into: list[Stored]) -> None:
        await self._read_stream("TIMER_DEAD_LETTERS", into)

    async def _read_stream(self, stream: str, into: list[Stored]) -> None:
        js = await self.jetstream()
        try:
            last = (await js.stream_info(stream)).state.last_seq
        except NotFoundError:  # Duetime has not made it yet
            return
        if last <= self._read[stream]:
            return
        reader = await js.add_consumer(
            stream,
            ConsumerConfig(
                deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._read[stream] + 1,
                ack_policy=AckPolicy.NONE,
                inactive_threshold=30,
            ),
        )
        subscription = await js.pull_subscribe_bind(consumer=reader.name, stream=stream)
        try:
            while self._read[stream] < last:
                for message in await subscription.fetch(min(last - self._read[stream], _READ_AT_ONCE), timeout=2):
                    self._read[stream] = message.metadata.sequence.stream
                    stored_at_ms = int(message.metadata.timestamp.timestamp() * 1_000)
                    body = json.loads(message.data)
                    into.append(Stored(message.subject, body, dict(message.headers or {}), stored_at_ms))
        finally:
            await subscription.unsubscribe()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._link is not None:
            self._link.close()


async def _ignored(error: Exception) -> None:
    """The driver reports each lost connection here, and connects again by itself."""


class KafkaBroker(Broker):
    """Topics of its own on a server that tests share one after the other."""

    name = "kafka"
    message_id_header = "duetime-message-id"
    drops_duplicates = False
    _errors = (KafkaError, OSError)

    def __init__(self, server: Kafka, link: Link) -> None:
        super().__init__()
        self.server: Kafka = server
        self._link = link
        self._prefix = f"test{random.getrandbits(32):08x}"
        self._producer: AIOKafkaProducer | None = None
        self._stored_at = 0.0  # by the loop's clock; or when the producer was started
        self._reader: AIOKafkaConsumer | None = None
        self._read: dict[TopicPartition, int] = defaultdict(int)

    def settings(self, *, linked: bool = False, **changes: Any) -> dict[str, str]:
        own = {
            "servers": [f"127.0.0.1:{self._link.port}" if linked else self.server.url()],
            "command_topic": f"{self._prefix}.commands.{{tenant}}",
            "group": f"{self._prefix}-group",
            "target": f"kafka:{self._prefix}.events",
            "dead_letter_topic": f"{self._prefix}.dead",
            "allow_topics": [f"{self._prefix}.events"],
        }
        return _environment(self.name, own | changes)

    def target(self, tenant: str) -> str:
        return f"kafka:{self._prefix}.events"

    def link(self) -> Link:
        return self._link

    async def add_tenant(self, tenant: str) -> None:
        admin = AIOKafkaAdminClient(bootstrap_servers=self.server.url())
        await admin.start()
        try:
            with contextlib.suppress(TopicAlreadyExistsError):
                await admin.create_topics([NewTopic(f"{self._prefix}.commands.{tenant}", 4, 1)])
        finally:
            await admin.close()

    async def _publish_one(self, tenant: str, key: str, body: bytes) -> None:
        producer: AIOKafkaProducer | None = None
        while True:
            try:
                producer = await self._started_producer()
                await producer.send_and_wait(f"{self._prefix}.commands.{tenant}", body, key=key.encode())
                self._stored_at = asyncio.get_running_loop().time()
                return
            except (TimeoutError, *self._errors) as error:
                silent = asyncio.get_running_loop().time() - self._stored_at
                if silent > _PRODUCER_SECONDS or not getattr(error, "retriable", True):
                    await self._replace(producer)
                await asyncio.sleep(0.1)

    async def _replace(self, producer: AIOKafkaProducer | None) -> None:
        """An idempotent producer numbers its messages. After one was given up, the broker can refuse all later ones."""
        async with self._connecting:
            if producer is not None and producer is self._producer:
                self._producer = None
                await _stop_producer(producer, answers=False)

    async def _started_producer(self) -> AIOKafkaProducer:
        async with self._connecting:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    bootstrap_servers=self.server.url(),
                    enable_idempotence=True,
                    request_timeout_ms=5_000,
                    linger_ms=2,
                    max_batch_size=262_144,
                )
                await producer.start()
                self._producer, self._stored_at = producer, asyncio.get_running_loop().time()
        return self._producer

    async def _read_events(self, into: list[Stored]) -> None:
        await self._read_topic(f"{self._prefix}.events", into)

    async def _read_dead_letters(self, into: list[Stored]) -> None:
        await self._read_topic(f"{self._prefix}.dead", into)

    async def _read_topic(self, topic: str, into: list[Stored]) -> None:
        if self._reader is None:
            reader = AIOKafkaConsumer(bootstrap_servers=self.server.url(), auto_offset_reset="earliest")
            await reader.start()
            self._reader = reader
        reader = self._reader
        try:
            if topic not in await reader.topics():
                return
            partitions = [TopicPartition(topic, number) for number in reader.partitions_for_topic(topic) or ()]
            ends = await reader.end_offsets(partitions)
            reader.assign(partitions)
            for partition in partitions:
                reader.seek(partition, self._read[partition])
            while any(self._read[partition] < ends[partition] for partition in partitions):
                for partition, records in (await reader.getmany(timeout_ms=500)).items():
                    self._read[partition] = records[-1].offset + 1
                    into.extend(_stored(record) for record in records)
        except BaseException:
            self._reader = None
            await reader.stop()
            raise

    async def close(self) -> None:
        for client in (self._producer, self._reader):
            if client is not None:
                await client.stop()


def _stored(record: Any) -> Stored:
    headers = {name: value.decode() for name, value in record.headers}
    return Stored(record.topic, json.loads(record.value), headers, record.timestamp)


# --- many commands, and what came of them --------------------------------------------------------


class Commands:
    """Publishes commands of three kinds, each timer with one or two, and keeps them for the judge: most timers are due
    at once, some are scheduled for a far day and then replaced by a time that is now, some are cancelled before a far
    day. Each ScheduleTimer has a correlation id of its own, which its event repeats."""

    FAR_MS: Final = 86_400_000

    def __init__(self, broker: Broker, tenant: str) -> None:
        self.requests: list[ClientRequest] = []
        self._broker = broker
        self._tenant = tenant
        self._number = 0

    @property
    def timers(self) -> int:
        return self._number

    @property
    def firing(self) -> int:
        """How many of the timers have an event in the end."""
        return self._number - self._number // 10

    async def publish(self, timers: int) -> None:
        """Returns when the broker has acknowledged the commands of so many timers."""
        numbers = range(self._number, self._number + timers)
        self._number += timers
        for first in range(numbers.start, numbers.stop, _AT_ONCE):
            some = range(first, min(first + _AT_ONCE, numbers.stop))
            await self._step([self._first(number) for number in some])
            await self._step([second for number in some if (second := self._second(number)) is not None])

    def _first(self, number: int) -> tuple[Kind, str, str, int]:
        is_far = number % 10 in (8, 9)
        return Kind.PUT, f"timer-{number}", f"first-{number}", wall_ms() + (self.FAR_MS if is_far else 0)

    def _second(self, number: int) -> tuple[Kind, str, str, int] | None:
        if number % 10 == 8:
            return Kind.PUT, f"timer-{number}", f"second-{number}", wall_ms()
        if number % 10 == 9:
            return Kind.DELETE, f"timer-{number}", "", 0
        return None

    async def _step(self, steps: Sequence[tuple[Kind, str, str, int]]) -> None:
        sent_at_ms = wall_ms()
        await self._broker.publish(
            schedule_timer(self._tenant, timer, due_ms, value)
            if kind is Kind.PUT
            else cancel_timer(self._tenant, timer)
            for kind, timer, value, due_ms in steps
        )
        answered_at_ms = wall_ms()
        self.requests += [
            ClientRequest(timer, kind, sent_at_ms, answered_at_ms, Result.OK, value, due_ms, ignores_reached=True)
            for kind, timer, value, due_ms in steps
        ]

    async def judge(self, server: Door) -> None:
        """Waits for the last event and the last reached timer, and judges all of them."""
        events = await self._broker.has_events(self.firing, 120)
        reached: list[tuple[str, str]] = []

        async def are_reached() -> bool:
            reached[:] = await reached_timers(server, self._tenant)
            return len(reached) >= self.timers

        await until(are_reached, f"{self.timers} timers are over", 60)
        violations = find_event_violations(self.requests, await self._broker.events(), reached, self._broker)
        print(f"{self._broker.name}: {self.timers} timers, {len(events)} events")
        listed = "\n".join(violations[:5])
        if violations:
            raise FinalFailure(f"{len(violations)} violations, the first:\n{listed}")


def find_event_violations(
    requests: Sequence[ClientRequest],
    events: Sequence[Stored],
    reached: Sequence[tuple[str, str]],
    broker: Broker | type[Broker],
) -> list[str]:
    """The checker's invariants (no timer lost, early, or fired with a value that was replaced or cancelled), and those
    of brokers: each timer is over, in the state that its last command asks for; its events have one message id, and are
    stored once where the broker drops duplicates. `reached`: id and state of each row of a timer that is over."""
    header = broker.message_id_header
    callbacks = [
        Callback(
            timer=event.timer_id,
            value=event.body.get("correlationId", ""),
            attempt=1,
            started_at_ms=event.body["timestampMs"],
            fence=event.headers.get("Duetime-Fence", ""),
            seen_at_ms=parse_instant(event.body["payload"]["reachedAt"]),
            delivery=event.headers.get(header, ""),
        )
        for event in events
    ]
    found = [str(violation) for violation in find_violations(requests, callbacks)]
    last = {request.timer: request for request in requests}
    states: dict[str, list[str]] = defaultdict(list)
    for timer, state in reached:
        states[timer].append(state)
    for timer, request in last.items():
        wanted = "delivered" if request.kind is Kind.PUT else "cancelled"
        if states[timer] != [wanted]:
            found.append(f"{timer}: its reached timers are {states[timer]}, not one that is {wanted}")
    found += [f"{timer}: is over, but no command asked for it" for timer in states.keys() - last.keys()]
    ids: dict[str, list[str]] = defaultdict(list)
    for call in callbacks:
        ids[call.timer].append(call.delivery)
    for timer, its in ids.items():
        if len(set(its)) > 1 or "" in its:
            found.append(f"{timer}: its events have the message ids {sorted(set(its))}")
        elif len(its) > 1 and broker.drops_duplicates:
            found.append(f"{timer}: its event is stored {len(its)} times, although the stream drops duplicates")
    return found


async def reached_timers(server: Door, namespace: str) -> list[tuple[str, str]]:
    """Id and state of all that are over, each row of them."""
    found: list[tuple[str, str]] = []
    for state in ("delivered", "cancelled", "failed", "skipped"):
        cursor = None
        while True:
            asked = {"namespace": namespace, "state": state, "limit": 1_000, "cursor": cursor, "payloads": False}
            status, page = await server.call("timers/list", asked)
            assert status == 200, page
            found += [(timer["timerId"], state) for timer in page["timers"]]
            cursor = page["nextCursor"]
            if cursor is None:
                break
    return found
