"""The message brokers of an instance: which parts there are by its configuration, and what they report."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from threaded_server import free_port

from duetime.clock import SystemClock
from duetime.config import load_config
from duetime.message_brokers import MessageBrokers
from duetime.service.service import Service
from duetime.telemetry import Telemetry


class _Service:
    """As much of a service as an intake asks before it receives."""

    brokers: object = None

    def readiness(self) -> str | None:
        return None


def _brokers(telemetry: Telemetry, **settings: object) -> MessageBrokers:
    flags = {name.replace("__", "."): value for name, value in settings.items()}
    return MessageBrokers(load_config(environ={}, flags=flags), SystemClock(), telemetry)


def test_without_brokers_there_is_nothing() -> None:
    telemetry = Telemetry()
    brokers = _brokers(telemetry)
    assert (brokers.deliverers, brokers.status()) == ({}, ())
    assert "duetime_intake_consuming{" not in telemetry.render()


@pytest.mark.parametrize(
    ("broker", "setting"),
    [("nats", ("nats__url", "nats://127.0.0.1:{}")), ("kafka", ("kafka__servers", "127.0.0.1:{}"))],
)
def test_a_broker_that_is_away_does_not_stop_the_start_and_is_reported(
    broker: str, setting: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        telemetry, (name, address) = Telemetry(), setting
        value: object = address.format(free_port())
        brokers = _brokers(telemetry, **{name: value if broker == "nats" else (value,)})
        assert list(brokers.deliverers) == [broker]
        await brokers.start()
        service = _Service()
        await brokers.open_intakes(cast(Service, service))
        await brokers.start_intakes()
        try:
            (status,) = brokers.status()
            assert (status.name, status.connected, status.consuming, status.waiting) == (broker, False, False, None)
            assert status.away_reason
            assert status.not_consuming_reason
            assert service.brokers == brokers.status
            assert f'duetime_intake_consuming{{broker="{broker}"}} 0.0' in telemetry.render()
            assert f'duetime_commands_received_total{{broker="{broker}"}} 0' in telemetry.render()
        finally:
            await brokers.stop_intakes()
            await brokers.close()
        assert len([record for record in caplog.records if "goes on trying" in record.getMessage()]) == 1

    asyncio.run(scenario())
