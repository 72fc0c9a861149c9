"""The message brokers of one instance: builds, for each that is configured, its connection, the deliverer of its
targets and the intake of its commands; starts and stops them with the instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from duetime.brokers.connection import BrokerConnection, KeptOpen
from duetime.clock import Clock
from duetime.config import Config, Kafka, Nats
from duetime.delivery import Deliverer
from duetime.domain.status import BrokerStatus
from duetime.ingress.intake import Intake, IntakeSettings
from duetime.ingress.source import CommandSource
from duetime.service.service import Service
from duetime.telemetry import Telemetry

__all__ = ["MessageBrokers"]

# A command is extended this often within the time after which NATS delivers it again.
_EXTENSIONS_PER_ACK_WAIT = 3


class _Settings(Protocol):
    """What [nats] and [kafka] have in common."""

    @property
    def target(self) -> str: ...
    @property
    def create_tenants(self) -> bool: ...
    @property
    def tenants_max(self) -> int: ...
    @property
    def in_flight_max(self) -> int: ...
    @property
    def in_flight_bytes_max(self) -> int: ...


class _Broker(Struct, eq=False):
    connection: BrokerConnection
    kept_open: KeptOpen
    deliverer: Deliverer
    source: CommandSource | None  # None: no commands are read from it
    settings: IntakeSettings
    intake: Intake | None = None  # None: there is no source, or the service has not been built yet


class MessageBrokers:
    """Call `start`, then `open_intakes` when the service exists, then `start_intakes` when the engine has started; at
    the end `stop_intakes` before the engine stops, and `close` after it."""

    def __init__(self, config: Config, clock: Clock, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._brokers: list[_Broker] = []
        self._stopped = False
        if config.nats.url:
            self._brokers.append(_nats(config.nats, clock, telemetry))
        if config.kafka.servers:
            self._brokers.append(_kafka(config.kafka, clock, telemetry))
        telemetry.commands_waiting.read = self._commands_waiting
        telemetry.commands_retrying.read = self._commands_retrying
        telemetry.intake_consuming.read = self._intake_consuming

    @property
    def deliverers(self) -> dict[str, Deliverer]:
        """By the scheme of the URLs."""
        return {broker.connection.name: broker.deliverer for broker in self._brokers}

    async def start(self) -> None:
        """Connect. What can never work is a SetupError; a broker that is away is tried again in the background."""
        for broker in self._brokers:
            await broker.kept_open.start()

    async def open_intakes(self, service: Service) -> None:
        for broker in self._brokers:
            if broker.source is not None:
                broker.intake = Intake(broker.source, broker.settings, service, self._telemetry)
                await broker.intake.open()
        if self._brokers:
            service.brokers = self.status

    async def start_intakes(self) -> None:
        for intake in self._intakes():
            intake.start()

    async def stop_intakes(self) -> None:
        """Also those that are open and not started. A second call does nothing."""
        intakes, self._stopped = [] if self._stopped else self._intakes(), True
        await asyncio.gather(*(intake.stop() for intake in intakes))

    async def close(self) -> None:
        """The deliverers are closed by the router that has them."""
        for broker in self._brokers:
            await broker.kept_open.close()

    def _intakes(self) -> list[Intake]:
        return [broker.intake for broker in self._brokers if broker.intake is not None]

    # --- status -----------------------------------------------------------------------------------

    def status(self) -> tuple[BrokerStatus, ...]:
        return tuple(map(_status, self._brokers))

    def _commands_waiting(self) -> Mapping[str, float]:
        return {intake.name: intake.waiting for intake in self._intakes() if intake.waiting is not None}

    def _commands_retrying(self) -> Mapping[str, float]:
        return {intake.name: intake.retrying for intake in self._intakes()}

    def _intake_consuming(self) -> Mapping[str, float]:
        return {intake.name: float(intake.not_consuming() is None) for intake in self._intakes()}


def _status(broker: _Broker) -> BrokerStatus:
    connection, intake = broker.connection, broker.intake
    away = None if connection.is_connected else connection.away_reason
    if intake is None:
        return BrokerStatus(name=connection.name, connected=away is None, away_reason=away)
    reason = intake.not_consuming()
    return BrokerStatus(
        name=connection.name,
        connected=away is None,
        away_reason=away,
        consuming=reason is None,
        not_consuming_reason=reason,
        waiting=intake.waiting,
        in_flight=intake.in_flight,
        unacknowledged=intake.unacknowledged,
        retrying=intake.retrying,
        retry_reason=intake.retry_reason,
        refused=intake.refusals.count,
        refused_ago_ms=intake.refused_ago_ms,
        refusal_reason=intake.refusals.reason,
        remark=intake.remark,
    )


# The adapters are imported only if they are used: they need packages that are not always installed.


def _nats(config: Nats, clock: Clock, telemetry: Telemetry) -> _Broker:
    from duetime.brokers.nats import NatsConnection
    from duetime.deliveries.nats import NatsDeliverer
    from duetime.ingress.nats import NatsCommands

    connection = NatsConnection(config)
    return _Broker(
        connection,
        KeptOpen(connection),
        NatsDeliverer(config, connection, clock, telemetry),
        NatsCommands(config, connection) if config.command_subject else None,
        _intake_settings(config, extend_seconds=config.ack_wait.seconds / _EXTENSIONS_PER_ACK_WAIT),
    )


def _kafka(config: Kafka, clock: Clock, telemetry: Telemetry) -> _Broker:
    from duetime.brokers.kafka import KafkaConnection
    from duetime.deliveries.kafka import KafkaDeliverer
    from duetime.ingress.kafka import KafkaCommands

    connection = KafkaConnection(config)
    return _Broker(
        connection,
        KeptOpen(connection),
        KafkaDeliverer(config, connection, clock, telemetry),
        KafkaCommands(config, connection) if config.command_topic else None,
        _intake_settings(config, extend_seconds=None),
    )


def _intake_settings(config: _Settings, *, extend_seconds: float | None) -> IntakeSettings:
    return IntakeSettings(
        target=config.target,
        create_tenants=config.create_tenants,
        tenants_max=config.tenants_max,
        in_flight_max=config.in_flight_max,
        in_flight_bytes_max=config.in_flight_bytes_max,
        extend_seconds=extend_seconds,
    )
