"""PORT: the connection to a message broker, shared by its command source and its deliverer; and what keeps it open.

While the broker is away the instance keeps serving: commands wait in the broker, and timers with a target there wait
in the store. What can never work (no permission, a missing stream that must not be created) fails the start.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from duetime.errors import BrokerAway, SetupError
from duetime.telemetry import log

__all__ = ["BrokerConnection", "KeptOpen", "bare"]

_PAUSE_FIRST_SECONDS: Final = 0.5
_PAUSE_MAX_SECONDS: Final = 15.0
_WATCH_SECONDS: Final = 0.5


def bare(name: str, reason: str) -> str:
    """The reason without the name of the broker in front, for logs and status, which name it themselves."""
    prefix = f"{name}: "
    while reason.startswith(prefix):
        reason = reason.removeprefix(prefix)
    return reason


class BrokerConnection(Protocol):
    name: str  # of the broker: "nats", "kafka"

    @property
    def is_connected(self) -> bool: ...

    @property
    def away_reason(self) -> str:
        """Why it is not connected, for logs and errors, without the name of the broker."""
        ...

    async def open(self) -> None:
        """Connect, and create the streams or topics for events and dead letters, if allowed. Callers share one attempt,
        and it returns at once while it is connected. Errors: SetupError, BrokerAway."""
        ...

    async def close(self) -> None: ...


class KeptOpen:
    """Opens a connection, and opens it again whenever it is lost and does not come back by itself."""

    def __init__(self, connection: BrokerConnection) -> None:
        self._connection = connection
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises SetupError. If the broker is away, it is tried again in the background."""
        try:
            await self._connection.open()
        except BrokerAway as error:
            reason = bare(self._connection.name, error.detail)
            log.warning("%s: %s; this instance serves without it and goes on trying", self._connection.name, reason)
        self._task = asyncio.create_task(self._keep_open())

    async def _keep_open(self) -> None:
        connection, pause, was_connected = self._connection, _PAUSE_FIRST_SECONDS, self._connection.is_connected
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            if not connection.is_connected:
                if was_connected:
                    log.warning("%s: connection lost: %s", connection.name, connection.away_reason)
                    was_connected = False
                try:
                    await connection.open()
                except BrokerAway:
                    pass
                except SetupError as error:
                    log.error("%s: %s", connection.name, bare(connection.name, error.detail))
            if connection.is_connected:
                if not was_connected:
                    log.info("%s: connected", connection.name)
                was_connected, pause = True, _PAUSE_FIRST_SECONDS
            else:
                await self._connected_within(pause)
                pause = min(2 * pause, _PAUSE_MAX_SECONDS)

    async def _connected_within(self, seconds: float) -> None:
        """The intake opens the connection too: that must be noticed, and logged, at once."""
        for _ in range(int(seconds / _WATCH_SECONDS)):
            if self._connection.is_connected:
                return
            await asyncio.sleep(_WATCH_SECONDS)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        await self._connection.close()
