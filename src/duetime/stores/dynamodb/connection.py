"""Connections to DynamoDB, deadlines and retries.

The retries of the driver are off. A request that was certainly not applied because the service is busy is repeated
here, for a short time. A request that may have been applied is repeated until the deadline. That is safe because every
write can be repeated: a transaction has a token by which the service recognises it, and any other write has a condition
that is no longer met once it was applied. Only if the deadline ends first is the outcome unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, TypeVar

from duetime.clock import SystemClock
from duetime.errors import SetupError
from duetime.stores.background import BackgroundTasks
from duetime.stores.dynamodb.address import Address, wrong_url
from duetime.stores.dynamodb.clock import ServerClock

try:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession
    from botocore import exceptions as aws
    from botocore.loaders import create_loader

    from duetime.stores.dynamodb.errors import ConditionFailed, ErrorMeaning, meaning_of, setup_error, store_error
except ImportError:
    raise SetupError(
        "store.url: DynamoDB needs its driver: pip install 'duetime[dynamodb]'", field="store.url"
    ) from None

__all__ = ["ConnectionPool", "DynamoClient", "Run"]

T = TypeVar("T")
Answer = Mapping[str, Any]
Run = Callable[..., Awaitable[Answer]]
"""Runs an operation by its name, with its request. Returns the answer, or raises a StoreError or ConditionFailed."""

CONNECT_SECONDS = 3.0
BUSY_SECONDS = 2.0  # how long a request is repeated while the service is busy or unreachable
_PAUSE_FIRST_SECONDS = 0.025
_PAUSE_MAX_SECONDS = 0.8


@lru_cache(maxsize=1)
def _loader() -> Any:
    """The driver's descriptions of the service. They take a quarter of a second to read, and are shared by all
    clients."""
    return create_loader()


class DynamoClient:
    """The driver's session: opens connection pools, and observes the clock of the service."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.clock = ServerClock()
        self._boot_ms = SystemClock().boot_ms
        self._exit = contextlib.AsyncExitStack()
        self._background = BackgroundTasks()
        self.run_to_end = self._background.run_to_end
        if address.ca_file is not None:
            try:
                ssl.create_default_context(cafile=address.ca_file)  # the driver's error does not name the file
            except OSError as error:
                raise wrong_url(f"has ca_file={address.ca_file}, which cannot be read: {error}") from None
        try:
            self._session = AioSession(profile=address.profile)
            self._session.register_component("data_loader", _loader())
        except aws.BotoCoreError as error:
            raise setup_error(address.label, error) from error

    async def open_pool(self, connections: int, deadline_seconds: float, attempt_seconds: float) -> ConnectionPool:
        """A pool has its own connections, so that one kind of work does not wait for another."""
        address = self.address
        config = AioConfig(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=connections,
            connect_timeout=min(CONNECT_SECONDS, attempt_seconds),
            read_timeout=attempt_seconds,
            parameter_validation=False,
            user_agent_extra="duetime",
        )
        created = self._session.create_client(
            "dynamodb",
            region_name=address.region,
            endpoint_url=address.endpoint,
            aws_access_key_id=address.access_key,
            aws_secret_access_key=address.secret_key,
            verify=address.ca_file,
            config=config,
        )
        try:
            client = await self._exit.enter_async_context(created)
        except (aws.BotoCoreError, OSError, ValueError) as error:
            raise setup_error(address.label, error) from error
        return ConnectionPool(self, client, connections, deadline_seconds, attempt_seconds)

    async def close(self) -> None:
        """Wait for work in progress, for a limited time, then close."""
        late = await self._background.close()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._exit.aclose()

    def observe_time(self, response: Mapping[str, Any], sent_ms: int) -> None:
        """Every answer has the time of the service, also an error."""
        date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date is not None and (date_ms := _date_ms(date)) is not None:
            self.clock.observe(date_ms, sent_ms, self._boot_ms())

    def boot_ms(self) -> int:
        return self._boot_ms()


@lru_cache(maxsize=4)
def _date_ms(date: str) -> int | None:
    try:
        return int(parsedate_to_datetime(date).timestamp()) * 1_000
    except ValueError:
        return None


class ConnectionPool:
    """Sends requests of one kind of work, with a deadline and retries."""

    def __init__(
        self, owner: DynamoClient, driver_client: Any, connections: int, deadline_seconds: float, attempt_seconds: float
    ) -> None:
        self._owner = owner
        self._driver_client = driver_client
        self._free_connections = asyncio.Semaphore(connections)
        self._deadline_seconds = deadline_seconds
        self._attempt_seconds = attempt_seconds
        self._busy_seconds = min(BUSY_SECONDS, deadline_seconds)

    async def read(self, operation: str, **request: Any) -> Answer:
        return await self._retry(operation, request, writing=False)

    async def write(self, operation: str, **request: Any) -> Answer:
        return await self._retry(operation, request, writing=True)

    async def call_once(self, operation: str, **request: Any) -> Answer:
        """Without retries, and with the errors of the driver: for the start of the store."""
        return await self._attempt(operation, request, self._attempt_seconds)

    async def _retry(self, operation: str, request: Mapping[str, Any], *, writing: bool) -> Answer:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        may_be_applied = False
        pause = _PAUSE_FIRST_SECONDS
        while True:
            try:
                left = begun_at + self._deadline_seconds - loop.time()
                return await self._attempt(operation, request, min(self._attempt_seconds, left))
            except Exception as error:
                meaning = meaning_of(error)
                if meaning is ErrorMeaning.CONDITION:
                    raise ConditionFailed(error, may_be_applied) from None
                may_be_applied = may_be_applied or (writing and meaning is ErrorMeaning.UNKNOWN)
                left = begun_at + (self._deadline_seconds if may_be_applied else self._busy_seconds) - loop.time()
                if meaning is ErrorMeaning.REJECTED or left < pause:
                    raise store_error(error, meaning, may_be_applied=may_be_applied) from error
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _attempt(self, operation: str, request: Mapping[str, Any], within_seconds: float) -> Answer:
        async with self._free_connections:
            sent_ms = self._owner.boot_ms()
            try:
                async with asyncio.timeout(within_seconds):
                    answer: Answer = await getattr(self._driver_client, operation)(**request)
            except aws.ClientError as error:
                self._owner.observe_time(error.response, sent_ms)
                raise
            self._owner.observe_time(answer, sent_ms)
            return answer
