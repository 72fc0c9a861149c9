"""Targets `kafka:TOPIC`: a timer that is due becomes an event in Apache Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from aiokafka.errors import KafkaError

from duetime.brokers.connection import bare
from duetime.brokers.envelopes import encode_event
from duetime.brokers.kafka import KafkaConnection, NotPublished, is_topic, named
from duetime.brokers.names import TENANT, is_allowed, message_id, tenant_of
from duetime.clock import Clock
from duetime.config import Kafka
from duetime.delivery import Attempt
from duetime.domain.headers import check_header_form
from duetime.domain.settle import AttemptResult, Contact
from duetime.errors import BrokerAway
from duetime.telemetry import Telemetry, log

__all__ = ["KafkaDeliverer"]

_SCHEME: Final = "kafka:"
_RESERVED_PREFIX: Final = "duetime-"
_RESERVED: Final = frozenset({"content-type"})
_NOT_SENT: Final = AttemptResult(Contact.NOT_SENT)


class KafkaDeliverer:
    """`key` of a record is the id of its timer, so that the events of one timer keep their order."""

    def __init__(self, config: Kafka, connection: KafkaConnection, clock: Clock, telemetry: Telemetry) -> None:
        self._allowed = config.allow_topics
        self._own = (config.command_topic, config.dead_letter_topic) if config.command_topic else ()
        self._connection = connection
        self._clock = clock
        self._telemetry = telemetry
        self._bugs_logged: set[type[Exception]] = set()
        telemetry.events_published.add(connection.name, 0)
        telemetry.event_failures.add(connection.name, 0)

    def check(self, url: str, namespace: str) -> None:
        topic = url[len(_SCHEME) :]
        if not is_topic(topic):
            raise ValueError(
                "must be kafka: and the name of a topic: 1 to 249 characters of A-Z, a-z, 0-9, dot, _ and -"
            )
        if any(_is_of(pattern, topic) for pattern in self._own):
            raise ValueError("must not be a topic of commands or dead letters")
        if not is_allowed(self._allowed, topic, namespace):
            raise ValueError("must be a topic that kafka.allow_topics allows for this namespace")

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        check_header_form(headers)
        for name in headers:
            lower = name.lower()
            if lower in _RESERVED or lower.startswith(_RESERVED_PREFIX):
                raise ValueError(f'must not have "{name}", which is reserved for Duetime')

    def origin(self, url: str) -> str:
        return _SCHEME

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        timer = attempt.timer
        try:
            self.check(timer.callback_url, attempt.namespace.name)  # again: the row may be older than a rule
        except ValueError as error:
            return AttemptResult(Contact.REFUSED, error=f"callbackUrl {error}")
        seconds = timer.callback_timeout_seconds or attempt.namespace.callback_timeout_seconds
        began = False
        try:
            async with asyncio.timeout(seconds):
                topic = timer.callback_url[len(_SCHEME) :]
                limit, problem = 0, None
                try:
                    limit = await self._connection.ready(topic)
                except NotPublished as error:
                    problem = str(error)
                reached_at_ms = attempt.begin()
                if reached_at_ms is None:
                    return _NOT_SENT
                began = True
                if problem is not None:
                    return self._failed(Contact.BROKEN, problem)
                await self._publish(topic, attempt, reached_at_ms, limit)
        except BrokerAway as error:  # nothing was sent, so this is no attempt
            return AttemptResult(Contact.AWAY, error=f"no connection to Kafka: {bare('kafka', error.detail)}")
        except TimeoutError:
            if not began:
                return AttemptResult(Contact.AWAY, error="Kafka does not answer")
            return self._failed(Contact.BROKEN, f"Kafka has not acknowledged the event within {seconds} s")
        except NotPublished as error:
            return self._failed(Contact.REFUSED if error.never else Contact.BROKEN, str(error))
        except KafkaError as error:
            return self._failed(Contact.BROKEN, named(error))
        except Exception as error:  # `deliver` never raises (delivery.py)
            return self._failed(Contact.BROKEN, self._unexpected(error))
        self._telemetry.events_published.add(self._connection.name)
        delay_ms = self._clock.wall_ms() - timer.late_from_ms
        self._telemetry.event_delay_seconds.observe(max(delay_ms, 0) / 1_000)
        return AttemptResult(Contact.ACCEPTED)

    async def close(self) -> None:
        """The connection is closed by who opened it."""

    async def _publish(self, topic: str, attempt: Attempt, reached_at_ms: int, limit: int) -> None:
        timer = attempt.timer
        identity = message_id(timer, attempt.namespace)
        headers = {
            "content-type": b"application/json",
            "duetime-message-id": identity.encode(),
            "duetime-attempt": b"%d" % (timer.attempts + 1),
            "duetime-fence": attempt.fence.encode(),
        }
        if timer.extras.headers:
            headers |= self._own_headers(timer.callback_url, timer.extras.headers)
        value = encode_event(timer, identity, reached_at_ms)
        await self._connection.publish(topic, value, key=timer.timer_id.encode(), headers=headers, bytes_max=limit)

    def _own_headers(self, url: str, headers: Mapping[str, str]) -> dict[str, bytes]:
        """Headers were checked when the timer was created. Rows may be older than a rule: then all are left out."""
        try:
            self.check_headers(url, headers)
        except ValueError:
            return {}
        return {name: value.encode() for name, value in headers.items()}

    def _failed(self, contact: Contact, error: str) -> AttemptResult:
        self._telemetry.event_failures.add(self._connection.name)
        return AttemptResult(contact, error=error)

    def _unexpected(self, error: Exception) -> str:
        """A bug. It must not write a log line for every attempt."""
        if type(error) not in self._bugs_logged:
            self._bugs_logged.add(type(error))
            log.error("kafka: unexpected error while an event is published: %s", named(error))
        return named(error)


def _is_of(pattern: str, topic: str) -> bool:
    return topic == pattern or (TENANT in pattern and tenant_of(pattern, topic) is not None)
