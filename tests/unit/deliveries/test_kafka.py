"""Targets `kafka:TOPIC`: which ones a timer may have, and with which headers. No server is needed for that."""

from __future__ import annotations

import asyncio
import re

import pytest

from duetime.brokers.kafka import KafkaConnection, NotPublished, is_topic
from duetime.clock import SystemClock
from duetime.config import Kafka, load_config
from duetime.deliveries.kafka import KafkaDeliverer
from duetime.delivery import Attempt
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Extras, Namespace, Timer, uuid_of
from duetime.errors import BrokerAway, SetupError
from duetime.telemetry import Telemetry

NOW_MS = 1_800_000_000_012


def settings(**fields: object) -> Kafka:
    given = {"servers": ["127.0.0.1:1"], **fields}
    return load_config(environ={}, flags={f"kafka.{name}": value for name, value in given.items()}).kafka


def deliverer(**fields: object) -> KafkaDeliverer:
    config = settings(**fields)
    return KafkaDeliverer(config, KafkaConnection(config), SystemClock(), Telemetry())


# --- targets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topic", ["", ".", "..", "a b", "a/b", "a:b", "a*", "ä", "a\0", "a\r\nb", "a" * 250, "__offsets"]
)
def test_a_name_that_no_topic_has(topic: str) -> None:
    assert not is_topic(topic)
    with pytest.raises(ValueError, match="the name of a topic"):
        deliverer(allow_topics=[">"]).check(f"kafka:{topic}", "orders")


@pytest.mark.parametrize("topic", ["a", "a.b-c_d", "A9", "timers.commands", "timers.commands.a.b", "a" * 249, "_a"])
def test_a_topic_that_is_allowed(topic: str) -> None:
    deliverer(allow_topics=[">"]).check(f"kafka:{topic}", "orders")


@pytest.mark.parametrize(
    ("fields", "topic"),
    [
        ({}, "timers.commands.orders"),
        ({}, "timers.commands.somebody-else"),
        ({}, "timers.dead"),
        ({"command_topic": "commands", "dead_letter_topic": "dead"}, "commands"),
        ({"dead_letter_topic": "dead.{tenant}"}, "dead.billing"),
    ],
)
def test_topics_of_commands_and_dead_letters_are_no_targets(fields: dict[str, object], topic: str) -> None:
    kafka = deliverer(allow_topics=[">"], **fields)
    with pytest.raises(ValueError, match="commands or dead letters"):
        kafka.check(f"kafka:{topic}", "orders")


def test_without_commands_these_topics_are_like_others() -> None:
    deliverer(allow_topics=[">"], command_topic="").check("kafka:timers.dead", "orders")


def test_a_namespace_has_only_its_own_topics() -> None:
    kafka = deliverer(allow_topics=["timers.events.{tenant}"])
    kafka.check("kafka:timers.events.orders", "orders")
    for topic in ("timers.events.billing", "timers.events", "timers.events.orders.more"):
        with pytest.raises(ValueError, match=r"kafka\.allow_topics"):
            kafka.check(f"kafka:{topic}", "orders")
    with pytest.raises(ValueError, match=r"kafka\.allow_topics"):
        kafka.check("kafka:timers.events.a.b", "a.b")  # no tenant has such a name


def test_all_topics_are_one_origin() -> None:
    assert deliverer().origin("kafka:a") == deliverer().origin("kafka:b") == "kafka:"


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Duetime-Fence", "duetime-message-id", "duetime-new", "Content-Type", "content-type"])
def test_a_header_that_duetime_sets(name: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        deliverer().check_headers("kafka:timers.events", {name: "x"})


@pytest.mark.parametrize("name", ["a:b", "a b", "a\r\nb", "", "ä"])
def test_a_name_that_is_no_header_name(name: str) -> None:
    with pytest.raises(ValueError, match="header name"):
        deliverer().check_headers("kafka:timers.events", {name: "x"})


def test_other_headers_are_allowed() -> None:
    deliverer().check_headers("kafka:timers.events", {"x-order": "17", "Nats-Msg-Id": "1"})


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "server", ["", "kafka:", "kafka:abc", "kafka:0", "kafka:70000", ":9092", "http://kafka:9092", "a b:9092", "[::1"]
)
def test_an_address_that_cannot_be_one_of_kafka(server: str) -> None:
    with pytest.raises(SetupError, match=r"kafka\.servers: must be \"host:port\", not " + re.escape(repr(server))):
        KafkaConnection(settings(servers=["127.0.0.1:9092", server]))


@pytest.mark.parametrize("server", ["kafka", "kafka:9092", "10.0.0.1:9092", "[fd00::5]:9092", "fd00::5", "a-b.c_d:1"])
def test_an_address_of_kafka(server: str) -> None:
    KafkaConnection(settings(servers=[server]))


# --- what becomes of an attempt ------------------------------------------------------------------


class _Connection(KafkaConnection):
    """Whose answers are the test's: errors that real brokers give at rare moments only."""

    def __init__(self, *, ready: Exception | None = None, published: Exception | None = None) -> None:
        super().__init__(settings())
        self._on_ready, self._on_publish = ready, published

    async def ready(self, topic: str) -> int:
        if self._on_ready is not None:
            raise self._on_ready
        return 1_000_000

    async def publish(self, topic: str, value: bytes, **_: object) -> None:
        if self._on_publish is not None:
            raise self._on_publish


def deliver(connection: KafkaConnection, *, starts: bool = True, **fields: object) -> AttemptResult:
    high, low = uuid_of("orders", "order-17")
    due = {"execute_at_ms": NOW_MS, "scheduled_at_ms": NOW_MS, "created_at_ms": 0, "generation": 1 << 32}
    timer = Timer(namespace="orders", timer_id="order-17", uuid_high=high, uuid_low=low, **due, **fields)  # type: ignore[arg-type]
    namespace = Namespace(name="orders", num_shards=16, created_at_ms=0)
    attempt = Attempt(timer, namespace, "3.9", lambda: NOW_MS if starts else None)
    return asyncio.run(KafkaDeliverer(settings(), connection, SystemClock(), Telemetry()).deliver(attempt))


@pytest.mark.parametrize(
    ("connection", "contact"),
    [
        (_Connection(), Contact.ACCEPTED),
        (_Connection(ready=BrokerAway("kafka: away")), Contact.AWAY),
        (_Connection(ready=TimeoutError()), Contact.AWAY),
        (_Connection(ready=NotPublished("no such topic")), Contact.BROKEN),
        (_Connection(published=BrokerAway("kafka: the producer is replaced")), Contact.AWAY),  # nothing was sent
        (_Connection(published=NotPublished("no permission")), Contact.BROKEN),
        (_Connection(published=NotPublished("too large", never=True)), Contact.REFUSED),
        (_Connection(published=TimeoutError()), Contact.BROKEN),  # unknown: it may be stored
        (_Connection(published=ValueError("a bug")), Contact.BROKEN),
    ],
)
def test_what_each_error_means(connection: _Connection, contact: Contact) -> None:
    assert deliver(connection, callback_url="kafka:timers.events").contact is contact


def test_an_attempt_that_must_not_be_made_any_more() -> None:
    assert deliver(_Connection(), starts=False, callback_url="kafka:timers.events").contact is Contact.NOT_SENT


def test_a_target_that_is_not_allowed_any_more_is_refused() -> None:
    result = deliver(_Connection(), callback_url="kafka:timers.commands.orders")
    assert (result.contact, "commands or dead letters" in str(result.error)) == (Contact.REFUSED, True)


def test_headers_that_are_not_allowed_any_more_are_left_out() -> None:
    headers = Extras(headers={"duetime-fence": "9.9"})
    assert deliver(_Connection(), callback_url="kafka:timers.events", extras=headers).contact is Contact.ACCEPTED
