"""Commands in and events out by NATS JetStream and Kafka, beside NATS' own scheduled messages, in one run.

    python -m benchmarks.brokers [--brokers nats,kafka] [--timers 20000] [--rate 250] [--seconds 20] [--out FILE.json]

A real broker that flushes to disk before it acknowledges, a real `duetime serve` on SQLite, and a publisher and a
subscriber in this process, all on this machine, one broker after the other. Prints JSON; ratios are what to look at:

- published: what the broker stores of one publisher, at most 500 messages at once: the ceiling of the events.
- commands: the stream holds all of them before Duetime starts; per second until the last one is acknowledged.
- events: that many timers are due at one instant; per second from the first event to the last one.
- lateness: `--rate` timers are due each second; from the due time to the arrival at the subscriber.
- scheduled messages: the same instants, published to NATS with `Nats-Schedule`, without Duetime.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import nats
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from msgspec import Struct
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.client import JetStreamContext
from scripts.servers import Kafka, Nats, Server, running

from benchmarks.checks import check_disk
from benchmarks.core import machine, say, serving, wall_ms
from duetime.domain.instants import format_instant

BROKERS = ("nats", "kafka")
TENANT = "shop"
HOUR_MS = 3_600_000
_AT_ONCE = 500
_QUIET_SECONDS = 30.0  # without an event for so long, some are lost


class Due(Struct, frozen=True):
    timer_id: str
    at_ms: int


class Sender(Protocol):
    """Publishes what is due later, and receives what is sent when it is due."""

    async def publish(self, timers: Sequence[Due]) -> None:
        """Returns when the broker has acknowledged all of them."""
        ...

    async def next_events(self) -> list[str]:
        """The ids of timers of events that have just arrived; waits for some."""
        ...


class Client(Sender, Protocol):
    """A publisher of commands and a subscriber to the events of Duetime."""

    @property
    def settings(self) -> Mapping[str, str]:
        """Of `duetime serve`."""
        ...

    async def waiting(self) -> int:
        """Commands that Duetime has not acknowledged yet."""
        ...


def some_timers(count: int, at_ms: Iterable[int]) -> list[Due]:
    return [Due(uuid.uuid4().hex, at) for _, at in zip(range(count), at_ms, strict=False)]


def spread(rate: int, seconds: int, first_ms: int) -> list[Due]:
    return some_timers(rate * seconds, (first_ms + number * 1_000 // rate for number in range(rate * seconds)))


def command(timer: Due) -> bytes:
    payload = {"tenantId": TENANT, "serviceCallId": timer.timer_id, "dueAt": format_instant(timer.at_ms)}
    envelope = {"id": timer.timer_id, "type": "ScheduleTimer", "tenantId": TENANT, "timestampMs": wall_ms()}
    return json.dumps(envelope | {"payload": payload}).encode()


def timer_of(event: bytes) -> str:
    return str(json.loads(event)["payload"]["serviceCallId"])


# --- the two brokers -----------------------------------------------------------------------------


async def subscribed(js: JetStreamContext, stream: str, subject: str) -> JetStreamContext.PullSubscription:
    config = ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=HOUR_MS / 1_000)
    return await js.pull_subscribe(subject, stream=stream, config=config)


class NatsClient:
    def __init__(self, server: Nats, js: JetStreamContext, events: JetStreamContext.PullSubscription) -> None:
        self.settings = {"DUETIME_NATS_URL": server.url()}
        self._js, self._events = js, events

    @classmethod
    @asynccontextmanager
    async def of(cls, server: Nats) -> AsyncIterator[NatsClient]:
        connection = await nats.connect(server.url())
        try:
            js = connection.jetstream()
            await js.add_stream(name="TIMER_COMMANDS", subjects=["timers.commands.*"])
            await js.add_stream(name="TIMER_EVENTS", subjects=["timers.events.*"])
            yield cls(server, js, await subscribed(js, "TIMER_EVENTS", "timers.events.*"))
        finally:
            await connection.close()

    async def publish(self, timers: Sequence[Due]) -> None:
        for first in range(0, len(timers), _AT_ONCE):
            some = timers[first : first + _AT_ONCE]
            await asyncio.gather(*(self._js.publish(f"timers.commands.{TENANT}", command(timer)) for timer in some))

    async def waiting(self) -> int:
        info = await self._js.consumer_info("TIMER_COMMANDS", "duetime")
        return (info.num_pending or 0) + (info.num_ack_pending or 0)

    async def next_events(self) -> list[str]:
        return [timer_of(message.data) for message in await self._events.fetch(500, timeout=_QUIET_SECONDS)]


class KafkaClient:
    def __init__(self, server: Kafka, producer: AIOKafkaProducer, consumer: AIOKafkaConsumer) -> None:
        self.settings = {
            "DUETIME_KAFKA_SERVERS": json.dumps([server.url()]),
            "DUETIME_KAFKA_COMMAND_TOPIC": "timers.commands",
        }
        self._server, self._producer, self._consumer = server, producer, consumer

    @classmethod
    @asynccontextmanager
    async def of(cls, server: Kafka) -> AsyncIterator[KafkaClient]:
        admin = AIOKafkaAdminClient(bootstrap_servers=server.url())
        await admin.start()
        await admin.create_topics([NewTopic(name, 4, 1) for name in ("timers.commands", "timers.events")])
        await admin.close()
        producer = AIOKafkaProducer(bootstrap_servers=server.url(), acks="all", enable_idempotence=True)
        consumer = AIOKafkaConsumer("timers.events", bootstrap_servers=server.url(), auto_offset_reset="earliest")
        async with AsyncExitStack() as stack:
            for part in (producer, consumer):
                await part.start()
                stack.push_async_callback(part.stop)
            yield cls(server, producer, consumer)

    async def publish(self, timers: Sequence[Due]) -> None:
        stored = [
            await self._producer.send("timers.commands", command(timer), key=timer.timer_id.encode())
            for timer in timers
        ]
        await asyncio.gather(*stored)

    async def waiting(self) -> int:
        places = [TopicPartition("timers.commands", number) for number in range(4)]
        ends = await self._consumer.end_offsets(places)
        admin = AIOKafkaAdminClient(bootstrap_servers=self._server.url())
        await admin.start()
        try:
            done = await admin.list_consumer_group_offsets("duetime")
        finally:
            await admin.close()
        return sum(ends[place] - max(done[place].offset if place in done else 0, 0) for place in places)

    async def next_events(self) -> list[str]:
        records = await self._consumer.getmany(timeout_ms=int(_QUIET_SECONDS * 1_000), max_records=500)
        return [timer_of(record.value) for some in records.values() for record in some]


# --- what is measured ----------------------------------------------------------------------------


async def arrivals(client: Sender, timers: Sequence[Due]) -> dict[str, float]:
    """When the event of each timer arrived, in milliseconds."""
    wanted, arrived = {timer.timer_id for timer in timers}, dict[str, float]()
    while len(arrived) < len(wanted):
        some = await client.next_events()
        if not some:
            raise RuntimeError(f"{len(wanted) - len(arrived)} of {len(wanted)} events did not arrive")
        now_ms = time.time() * 1_000
        for timer_id in wanted.intersection(some):
            arrived.setdefault(timer_id, now_ms)
    return arrived


def lateness(timers: Sequence[Due], arrived: dict[str, float]) -> dict[str, float]:
    late = sorted(arrived[timer.timer_id] - timer.at_ms for timer in timers)
    return {
        "p50_ms": round(statistics.median(late), 2),
        "p99_ms": round(late[len(late) * 99 // 100], 2),
        "earliest_ms": round(late[0], 2),
    }


def per_second(arrived: dict[str, float]) -> int:
    times = sorted(arrived.values())
    return round((len(times) - 1) * 1_000 / max(times[-1] - times[0], 1))


async def measure(client: Client, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    later = some_timers(options.timers, [wall_ms() + HOUR_MS] * options.timers)
    started = time.perf_counter()
    await client.publish(later)
    published = round(options.timers / (time.perf_counter() - started))
    with serving(folder, **client.settings):
        started = time.perf_counter()
        while await client.waiting():
            await asyncio.sleep(0.1)
        commands = round(options.timers / (time.perf_counter() - started))
        return {"published_per_s": published, "commands_per_s": commands} | await measure_events(client, options)


async def measure_events(client: Sender, options: argparse.Namespace) -> dict[str, Any]:
    """All are published well before they are due, so that only the events are measured."""
    due_ms = wall_ms() + 5_000 + options.timers
    burst = some_timers(options.timers, [due_ms] * options.timers)
    await client.publish(burst)
    if wall_ms() > due_ms:
        raise RuntimeError("publishing took too long")
    events = per_second(await arrivals(client, burst))
    steady = spread(options.rate, options.seconds, wall_ms() + 5_000 + options.rate * options.seconds)
    await client.publish(steady)
    return {"events_per_s": events, "lateness": lateness(steady, await arrivals(client, steady))}


class ScheduledMessages:
    """What NATS does by itself: a message of a stream is published again at its time."""

    def __init__(self, js: JetStreamContext, events: JetStreamContext.PullSubscription) -> None:
        self._js, self._events = js, events

    @classmethod
    @asynccontextmanager
    async def of(cls, server: Nats) -> AsyncIterator[ScheduledMessages]:
        connection = await nats.connect(server.url())
        try:
            stream = json.dumps({"name": "PEER", "subjects": ["peer.>"], "allow_msg_schedules": True})
            answer = json.loads((await connection.request("$JS.API.STREAM.CREATE.PEER", stream.encode())).data)
            if "error" in answer:
                raise RuntimeError(answer["error"]["description"])
            js = connection.jetstream()
            yield cls(js, await subscribed(js, "PEER", "peer.events"))
        finally:
            await connection.close()

    async def publish(self, timers: Sequence[Due]) -> None:
        for first in range(0, len(timers), _AT_ONCE):
            await asyncio.gather(*map(self._publish_one, timers[first : first + _AT_ONCE]))

    async def _publish_one(self, timer: Due) -> None:
        headers = {"Nats-Schedule": f"@at {format_instant(timer.at_ms)}", "Nats-Schedule-Target": "peer.events"}
        await self._js.publish(f"peer.schedules.{timer.timer_id}", timer.timer_id.encode(), headers=headers)

    async def next_events(self) -> list[str]:
        return [message.data.decode() for message in await self._events.fetch(500, timeout=_QUIET_SECONDS)]


async def measure_one(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        check_disk(Path(folder))
        if isinstance(server, Nats):
            async with NatsClient.of(server) as client:
                results = await measure(client, Path(folder), options)
            async with ScheduledMessages.of(server) as peer:
                return results | {"scheduled_messages": await measure_events(peer, options)}
        assert isinstance(server, Kafka)
        async with KafkaClient.of(server) as kafka_client:
            return await measure(kafka_client, Path(folder), options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brokers", default=",".join(BROKERS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--timers", type=int, default=20_000, help="commands, and events at one instant")
    parser.add_argument("--rate", type=int, default=250, help="timers per second, for lateness")
    parser.add_argument("--seconds", type=int, default=20, help="for lateness")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    options = parser.parse_args()
    names = options.brokers.split(",")
    if unknown := set(names) - set(BROKERS):
        parser.error(f"--brokers: unknown: {', '.join(sorted(unknown))}; there are {', '.join(BROKERS)}")
    results: dict[str, Any] = machine()
    for name in names:
        with running(name) as server:
            check_disk(server.folder)
            results[name] = asyncio.run(measure_one(server, options))
        say(f"{name}: {results[name]}")
    text = json.dumps(results, indent=1)
    if options.out:
        options.out.write_text(text + "\n", "utf-8")
    print(text)


if __name__ == "__main__":
    main()
