"""The connection to Apache Kafka: one producer, the topics that must exist, and whether the brokers answer.

A producer of the driver goes on by itself after an outage. It is replaced only after an error from which it cannot
recover (its sequence numbers no longer match those of the broker). The driver does not say whether the brokers answer,
so they are asked every second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from duetime.brokers.by_hand import PARTITIONS, add_topic
from duetime.brokers.connection import bare
from duetime.brokers.names import TENANT
from duetime.config import Kafka
from duetime.errors import BrokerAway, SetupError
from duetime.single_flight import retrieved
from duetime.telemetry import log

try:
    from aiokafka import AIOKafkaProducer
    from aiokafka.conn import collect_hosts, create_conn
    from aiokafka.errors import (
        AuthenticationFailedError,
        ClusterAuthorizationFailedError,
        IllegalSaslStateError,
        KafkaError,
        MessageSizeTooLargeError,
        ProducerClosed,
        SaslAuthenticationFailed,
        TopicAlreadyExistsError,
        TopicAuthorizationFailedError,
        UnknownTopicOrPartitionError,
        UnsupportedSaslMechanismError,
        for_code,
    )
    from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest
    from aiokafka.protocol.metadata import MetadataRequest
    from aiokafka.record.default_records import DefaultRecordBatchBuilder
except ImportError as error:
    raise SetupError('kafka.servers needs the package aiokafka: pip install "duetime[kafka]"') from error

__all__ = ["KafkaConnection", "NotPublished", "end", "is_topic", "named"]

# The driver also raises what it logs; and its log has names of tenants' topics that are not escaped.
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)

_REQUEST_SECONDS: Final = 10.0
_OPEN_SECONDS: Final = 25.0
_ASK_EVERY_SECONDS: Final = 1.0
_ASK_SECONDS: Final = 3.0  # without an answer within this time a broker counts as away
_STOP_SECONDS: Final = 5.0
_END_SECONDS: Final = 0.1
_METADATA_PAUSE_SECONDS: Final = 0.05
_CREATED_LOOKS: Final = 50
_TOPICS_MAX: Final = 4_096  # whose limits are known
_TOPIC_SECONDS: Final = 60.0
_REPLICAS: Final = 3  # or as many as there are brokers
_MESSAGE_BYTES_MAX: Final = 1_048_588  # Kafka's default for topics
_BATCH_BYTES_MAX: Final = 16 * 1024

_TOPIC_RESOURCE: Final = 2
_TOPIC_CHARS_MAX: Final = 249
_TOPIC_CHARS: Final = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")


_HOST: Final = re.compile(r"[A-Za-z0-9._:%-]+")  # a name, or an address


def is_topic(name: str) -> bool:
    """A legal name of a topic, and not one of Kafka's own."""
    return (
        1 <= len(name) <= _TOPIC_CHARS_MAX
        and _TOPIC_CHARS.issuperset(name)
        and name not in (".", "..")
        and not name.startswith("__")
    )


def named(error: BaseException) -> str:
    """An error of the driver, for logs and errors: its text often says nothing without its name."""
    text = str(error)
    return type(error).__name__ if not text else f"{type(error).__name__}: {text}"[:300]


class NotPublished(Exception):
    """The broker has not stored the message. `never`: a repeated attempt cannot succeed either."""

    def __init__(self, reason: str, *, never: bool = False) -> None:
        super().__init__(reason)
        self.never = never


class _Topic(Struct, frozen=True):
    bytes_max: int  # of a message
    until: float


class KafkaConnection:
    name = "kafka"

    def __init__(self, config: Kafka) -> None:
        _check_servers(config)
        self._config = config
        self._opening: asyncio.Future[None] | None = None
        self._is_closed = False
        self._producer: Any = None
        self._answers = False
        self._away = "not opened yet"
        self._watch: asyncio.Task[None] | None = None
        self._topics: dict[str, _Topic] = {}
        self._stopping: set[asyncio.Task[None]] = set()
        self._login = _login(config)

    # --- open and close ---------------------------------------------------------------------------

    @property
    def is_connected(self) -> bool:
        return self._answers and self._producer is not None

    @property
    def away_reason(self) -> str:
        return self._away

    def options(self) -> dict[str, Any]:
        """Of every client of the driver: where the brokers are, and the login."""
        return {"bootstrap_servers": list(self._config.servers), "client_id": "duetime", **self._login}

    async def open(self) -> None:
        if self.is_connected:
            return
        if self._is_closed:
            raise BrokerAway("kafka: closed")
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(retrieved)
            self._opening.add_done_callback(self._opened)
        await asyncio.shield(self._opening)  # a caller that is cancelled must not cancel it for the others

    def _opened(self, _: asyncio.Future[None]) -> None:
        self._opening = None

    async def _open(self) -> None:
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await self.contact()
                if self._producer is None:
                    self._producer = await self._new_producer()
                await self._check_topics()
        except BrokerAway as error:
            self._away = bare("kafka", error.detail)
            raise
        except SetupError as error:
            self._away = bare("kafka", error.detail)
            self._discard_producer()
            raise
        except Exception as error:  # the driver's errors have no common root: some are of asyncio, some assertions
            self._away = f"cannot connect: {named(error)}"
            raise BrokerAway(f"kafka: {self._away}") from None
        self._answers = True
        if self._watch is None:
            self._watch = asyncio.create_task(self._ask_all_the_time())

    async def close(self) -> None:
        self._is_closed, self._away = True, "closed"
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
            self._watch = None
        self._discard_producer()
        self._answers = False
        if self._stopping:
            await asyncio.wait(self._stopping)

    async def contact(self) -> None:
        """Of one broker, by a connection of its own: the driver's clients do not say why they get none. Errors:
        BrokerAway, SetupError."""
        config, refused, reasons = self._config, None, []
        for host, port, _ in collect_hosts(list(config.servers)):
            where = f"{host}:{port}"
            try:
                connection = await create_conn(
                    host, port, client_id="duetime", request_timeout_ms=int(_ASK_SECONDS * 1_000), **self._login
                )
            except (AuthenticationFailedError, SaslAuthenticationFailed) as error:
                refused = SetupError(f"kafka: {where} refuses the login as kafka.user {config.user!r}: {named(error)}")
            except (UnsupportedSaslMechanismError, IllegalSaslStateError) as error:
                refused = SetupError(f"kafka: {where} refuses kafka.sasl_mechanism {config.sasl_mechanism}: {error}")
            except ssl.SSLError as error:
                refused = SetupError(
                    f"kafka: TLS with {where} fails: {error}; see kafka.tls, kafka.ca_file and kafka.tls_certificate"
                )
            except (OSError, KafkaError, TimeoutError) as error:
                reasons.append(f"{where}: {named(error)}")
            else:
                try:
                    await connection.send(MetadataRequest([]))
                    return
                except (KafkaError, TimeoutError) as error:
                    # A broker that requires a login or TLS closes the connection without an error.
                    reasons.append(f"{where}: {named(error)} (does it ask for a login, or for TLS?)")
                finally:
                    connection.close()
        if refused is not None:
            raise refused
        raise BrokerAway(f"kafka: no broker can be reached: {'; '.join(reasons)}")

    async def _new_producer(self) -> Any:
        producer = AIOKafkaProducer(
            **self.options(),
            acks="all",
            enable_idempotence=True,
            max_batch_size=_BATCH_BYTES_MAX,
            max_request_size=2**31 - 1,  # the limit of each topic is checked here
            request_timeout_ms=int(_REQUEST_SECONDS * 1_000),
        )
        _pace_metadata(producer.client)
        try:
            await producer.start()
        except BaseException as error:
            await _stop_producer(producer, answers=False)
            if isinstance(error, ClusterAuthorizationFailedError | TopicAuthorizationFailedError):
                raise SetupError(
                    "kafka: this login may not publish: allow it WRITE on the topics of kafka.allow_topics"
                ) from None
            raise
        return producer

    def _discard_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            task = asyncio.create_task(_stop_producer(producer, answers=self._answers))
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def _ask_all_the_time(self) -> None:
        while True:
            await asyncio.sleep(_ASK_EVERY_SECONDS)
            if not self.is_connected:
                continue
            if self._producer._sender.sender_task.done():
                self._replace("the producer of the driver has failed")
                continue
            try:
                await self._ask(MetadataRequest([]))
            except BrokerAway as error:
                self._answers, self._away = False, bare("kafka", error.detail)

    def _replace(self, reason: str) -> None:
        """`open` makes a new producer."""
        self._away = f"the producer is replaced: {reason}"
        self._discard_producer()

    # --- topics -----------------------------------------------------------------------------------

    async def _check_topics(self) -> None:
        wanted = self._own_topics()
        missing = []
        for topic, error in (await self._describe(wanted)).items():
            if error is TopicAuthorizationFailedError:
                raise SetupError(
                    f"kafka: this login may not use the topic {topic!r}: "
                    "allow it DESCRIBE and WRITE on it (on the topic of commands: DESCRIBE and READ)"
                )
            if error is UnknownTopicOrPartitionError:
                missing.append(topic)
        if missing and not self._config.create_topics:
            raise SetupError(
                f"kafka: there is no topic {', '.join(map(repr, missing))}, and kafka.create_topics is false: "
                f"create it ({self._by_hand(missing[0])}), or set kafka.create_topics = true"
            )
        if missing:
            await self._create(missing)

    def _own_topics(self) -> list[str]:
        """Those whose names do not depend on the tenant."""
        config = self._config
        topics = list(config.allow_topics)
        if config.command_topic:
            topics += [config.dead_letter_topic, config.command_topic]
        return list(dict.fromkeys(topic for topic in topics if TENANT not in topic and is_topic(topic)))

    def _by_hand(self, topic: str) -> str:
        return add_topic(self._config, topic, len(self._producer.client.cluster.brokers()))

    async def _create(self, topics: Sequence[str]) -> None:
        brokers = len(self._producer.client.cluster.brokers())
        wanted: list[Any] = [(topic, PARTITIONS, min(_REPLICAS, brokers), [], []) for topic in topics]
        request = CreateTopicsRequest(
            create_topic_requests=wanted, timeout=int(_REQUEST_SECONDS * 1_000), validate_only=False
        )
        answer = await self._ask(request, of_controller=True, seconds=_REQUEST_SECONDS)
        for topic, code, *text in answer.topic_errors:
            error = for_code(code)
            if code == 0:
                log.info("kafka: created the topic %r", topic)
            elif error is TopicAlreadyExistsError:
                pass  # another instance has just created it
            elif error in (TopicAuthorizationFailedError, ClusterAuthorizationFailedError):
                raise SetupError(
                    f"kafka: this login may not create the topic {topic!r}: "
                    f"create it ({self._by_hand(topic)}), or allow it CREATE"
                )
            elif error.retriable:
                raise BrokerAway(f"kafka: cannot create the topic {topic!r} now: {error.__name__}")
            else:
                why = text[0] if text and text[0] else error.__name__
                raise SetupError(f"kafka: cannot create the topic {topic!r}: {why}")
        for _ in range(_CREATED_LOOKS):  # until all brokers know them; if it takes longer, the first messages wait
            if not any((await self._describe(topics)).values()):
                return
            await asyncio.sleep(0.1)

    async def _describe(self, topics: Sequence[str]) -> dict[str, Any]:
        """What is wrong with each topic: an error of the driver, or None."""
        if not topics:  # none would mean all
            return {}
        answer = await self._ask(MetadataRequest(list(topics), allow_auto_topic_creation=False))
        return {topic: for_code(code) if code else None for code, topic, *_ in answer.topics}

    async def bytes_max(self, topic: str) -> int:
        """Of a message of this topic. Errors: BrokerAway; NotPublished if nothing can be published there."""
        known = self._topics.get(topic)
        now = asyncio.get_running_loop().time()
        if known is not None and now < known.until:
            return known.bytes_max
        error = (await self._describe([topic])).get(topic)
        if error is not None:
            self._topics.pop(topic, None)
            if self._producer is not None:
                # Otherwise the driver would go on asking for a topic that does not exist.
                self._producer.client._topics.discard(topic)
            raise NotPublished(_topic_text(topic, error))
        limit = await self._message_bytes_max(topic)
        if len(self._topics) >= _TOPICS_MAX:
            self._topics.clear()
        self._topics[topic] = _Topic(limit, now + _TOPIC_SECONDS)
        return limit

    async def _message_bytes_max(self, topic: str) -> int:
        request = DescribeConfigsRequest(
            resources=[(_TOPIC_RESOURCE, topic, ["max.message.bytes"])], include_synonyms=False
        )
        answer = await self._ask(request)
        for resource in answer.to_object()["resources"]:
            for entry in resource["config_entries"]:
                if entry["config_names"] == "max.message.bytes" and str(entry["config_value"]).isdigit():
                    return int(entry["config_value"])
        return _MESSAGE_BYTES_MAX  # this login may not read it

    # --- requests ---------------------------------------------------------------------------------

    async def _ask(self, request: Any, *, of_controller: bool = False, seconds: float = _ASK_SECONDS) -> Any:
        """The answer of any broker, by connections on which no messages wait for their acknowledgement."""
        from aiokafka.client import ConnectionGroup

        if self._producer is None:
            raise BrokerAway(f"kafka: {self._away}")
        client, why = self._producer.client, "no brokers are known"
        nodes = [broker.nodeId for broker in client.cluster.brokers()]
        random.shuffle(nodes)
        if of_controller and client.cluster.controller is not None:
            nodes = [client.cluster.controller.nodeId]
        for node in nodes[:3]:
            try:
                async with asyncio.timeout(seconds):
                    return await client.send(node, request, group=ConnectionGroup.COORDINATION)
            except TimeoutError:
                why = f"no answer within {seconds:g} s"
            except Exception as error:  # the driver's errors have no common root
                why = named(error)
        raise BrokerAway(f"kafka: the brokers do not answer: {why}")

    async def ready(self, topic: str) -> int:
        """Before `publish`: afterwards it sends at once. The largest size of a message. Errors as `bytes_max`."""
        if not self.is_connected:
            raise BrokerAway(f"kafka: {self._away}")
        limit = await self.bytes_max(topic)
        producer = self._producer
        if producer is None:
            raise BrokerAway(f"kafka: {self._away}")
        if producer.client.cluster.partitions_for_topic(topic) is None:
            self._topics.pop(topic, None)  # it may have been removed since its limit was read
            limit = await self.bytes_max(topic)
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    await producer.partitions_for(topic)
            except (KafkaError, TimeoutError) as error:
                await self._ask(MetadataRequest([]))  # do the brokers answer? Else all topics have to wait
                raise NotPublished(
                    f"the partitions of the Kafka topic {topic!r} are not known: {named(error)}"
                ) from None
        return limit

    async def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, headers: Mapping[str, bytes], bytes_max: int
    ) -> None:
        """Returns when the brokers have stored it. BrokerAway, NotPublished: they have not, and will not. Any other
        error, and a cancellation, leaves it unknown whether they will."""
        listed = list(headers.items())
        size = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, listed)
        if size > bytes_max:
            raise NotPublished(f"the message has {size} bytes, the topic {topic!r} takes {bytes_max}", never=True)
        producer = self._producer
        if producer is None:
            raise BrokerAway(f"kafka: {self._away}")
        try:
            try:
                stored = await producer.send(topic, value, key=key, headers=listed)
            except ProducerClosed:  # it has just been replaced, and has not taken the message
                raise BrokerAway(f"kafka: {self._away}") from None
            await stored
        except MessageSizeTooLargeError:
            self._topics.pop(topic, None)
            if producer is self._producer:
                self._replace("a message was too large")
            raise NotPublished(f"the message is too large for the topic {topic!r}", never=True) from None
        except (TopicAuthorizationFailedError, UnknownTopicOrPartitionError) as error:
            self._topics.pop(topic, None)
            raise NotPublished(_topic_text(topic, type(error))) from None
        except KafkaError as error:
            if not error.retriable and producer is self._producer:
                # It numbers the messages of each partition. After one was refused, its numbers stay wrong.
                self._replace(named(error))
            raise


def _topic_text(topic: str, error: Any) -> str:
    if error is UnknownTopicOrPartitionError:
        return f"there is no Kafka topic {topic!r}"
    if error is TopicAuthorizationFailedError:
        return f"this server's login may not write to the Kafka topic {topic!r}"
    return f"the Kafka topic {topic!r} cannot be used: {error.__name__}"


def _check_servers(config: Kafka) -> None:
    for server in config.servers:
        try:
            (host, port, _), *_ = collect_hosts([server])
            is_valid = bool(_HOST.fullmatch(host)) and 1 <= port <= 65_535
        except ValueError:
            is_valid = False
        if not is_valid:
            raise SetupError(f'kafka.servers: must be "host:port", not {server!r}')


def _login(config: Kafka) -> dict[str, Any]:
    options: dict[str, Any] = {"security_protocol": ("SASL_" if config.sasl_mechanism else "") + "PLAINTEXT"}
    if config.tls:
        options["security_protocol"] = ("SASL_" if config.sasl_mechanism else "") + "SSL"
        options["ssl_context"] = _tls_context(config)
    if config.sasl_mechanism:
        options["sasl_mechanism"] = config.sasl_mechanism
        options["sasl_plain_username"], options["sasl_plain_password"] = config.user, config.password
    return options


def _tls_context(config: Kafka) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except OSError as error:  # SSLError is one
        raise SetupError(f"configuration: kafka.ca_file: {error}") from None
    if config.tls_certificate:
        try:
            context.load_cert_chain(config.tls_certificate, config.tls_key)
        except OSError as error:
            raise SetupError(f"configuration: kafka.tls_certificate, kafka.tls_key: {error}") from None
    return context


def _pace_metadata(client: Any) -> None:
    """While messages wait for a topic that was removed, the driver asks for its leader without any pause."""
    update, at = client._metadata_update, 0.0

    async def paced(*args: Any) -> Any:
        nonlocal at
        now = asyncio.get_running_loop().time()
        at = max(at + _METADATA_PAUSE_SECONDS, now)
        await asyncio.sleep(at - now)
        return await update(*args)

    client._metadata_update = paced


async def _stop_producer(producer: Any, *, answers: bool) -> None:
    """In bounded time. What it has accepted is sent first, if the brokers answer."""
    asking = producer.client._sync_task
    stop = asyncio.ensure_future(producer.stop())
    stop.add_done_callback(retrieved)
    if answers:
        await asyncio.wait({stop}, timeout=_STOP_SECONDS)
    if not stop.done():
        # Otherwise the driver would wait for messages that are not going to be stored, and send them again.
        accumulator, client = producer._message_accumulator, producer.client
        accumulator.reenqueue = lambda batch: None
        client._maybe_wait_metadata = _at_once
        lost = KafkaError("the producer was closed")
        for batch in [*accumulator._pending_batches, *(b for queue in accumulator._batches.values() for b in queue)]:
            batch.failure(lost)
            if not batch._drain_waiter.cancelled():
                batch._drain_waiter.exception()  # nobody waits for it: it must not be logged
        for connection in list(client._conns.values()):
            connection.close()
        await asyncio.wait({stop}, timeout=_STOP_SECONDS)
    if not stop.done():
        stop.cancel()
        await asyncio.wait({stop})
    with contextlib.suppress(Exception):
        await producer.client.close()
    await end(asking)


async def end(task: asyncio.Task[Any] | None) -> None:
    """A task of the driver: it can lose a cancellation, if the answer that it waits for comes at the same moment."""
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_END_SECONDS)


async def _at_once() -> None:
    pass
