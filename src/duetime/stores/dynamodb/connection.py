"""The way to DynamoDB under DynamoStore: its URL, its connections, and how long it is asked.

The driver's own retries are off. What was certainly not applied because the service is busy is tried again here, for a
moment; what may have been applied is tried again until the deadline, because every write that is sent from here can be
repeated: a transaction carries a token by which the service knows it again, anything else a condition that it breaks
itself. Only what is still open then is of unknown outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from msgspec import Struct

from duetime.clock import SystemClock
from duetime.errors import SetupError
from duetime.stores.background import BackgroundTasks
from duetime.stores.dynamodb.clock import ServerClock

try:
    from aiobotocore.config import AioConfig
    from aiobotocore.session import AioSession
    from botocore import exceptions as aws
    from botocore.loaders import create_loader

    from duetime.stores.dynamodb.errors import Refused, Verdict, judged, setup_error, store_error
except ImportError:
    raise SetupError(
        "store.url: DynamoDB needs its driver: pip install 'duetime[dynamodb]'", field="store.url"
    ) from None

__all__ = ["Address", "Line", "Link", "Run", "address_of"]

T = TypeVar("T")
Answer = Mapping[str, Any]
Run = Callable[..., Awaitable[Answer]]
"""An operation by its name, and its request; answers what the service does, or raises a StoreError or Refused."""

CONNECT_SECONDS = 3.0
BUSY_SECONDS = 2.0  # how long the busy and the absent are asked again, before the engine hears of it
_PAUSE_FIRST_SECONDS = 0.025
_PAUSE_MAX_SECONDS = 0.8

# --- the URL -------------------------------------------------------------------------------------

_OPTIONS = ("billing", "ca_file", "endpoint", "profile", "read_units", "write_units")
_BILLING = ("on-demand", "provisioned")
_UNITS_DEFAULT = "25"


class Address(Struct, frozen=True):
    """Where the tables are, and as a person may read it (no secrets)."""

    prefix: str
    label: str
    region: str | None = None  # None: as the environment or the profile says
    access_key: str | None = None  # None: by the chain that every program on AWS uses
    secret_key: str | None = None
    endpoint: str | None = None
    profile: str | None = None
    ca_file: str | None = None
    units: tuple[int, int] | None = None  # read, write; None: on demand

    @property
    def timers(self) -> str:
        return f"{self.prefix}-timers"

    @property
    def cluster(self) -> str:
        return f"{self.prefix}-cluster"


def address_of(url: str) -> Address:
    """dynamodb://REGION/PREFIX?option=value: tables PREFIX-timers and PREFIX-cluster of that region."""
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError as error:
        raise _wrong(f"cannot be read: {error}") from None
    for name in options:
        if name not in _OPTIONS:
            raise _wrong(f"has the option {name!r}, which is not known; known are {', '.join(_OPTIONS)}")
    if parts.fragment:
        raise _wrong("has a '#': in a name or a secret it is written %23")
    if "@" in parts.path:
        raise _wrong("has a '/' in its secret: there it is written %2F")
    credentials, _, region = parts.netloc.rpartition("@")
    if region and not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", region):
        raise _wrong(
            f"names {region!r} where a region is meant: dynamodb://eu-central-1/PREFIX;"
            " the address of a stand-in or of a VPC endpoint is ?endpoint=http://host:port"
        )
    prefix = parts.path.strip("/")
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", prefix):
        what = f"has {prefix!r} for" if prefix else "does not have"
        raise _wrong(f"{what} what names of tables begin with: dynamodb://REGION/PREFIX, of letters, digits, _ . -")
    access_key, secret_key = _credentials(credentials, options)
    endpoint = _endpoint(options.get("endpoint"))
    return Address(
        prefix=prefix,
        label=f"dynamodb {region or 'of the default region'}/{prefix}" + (f" at {endpoint}" if endpoint else ""),
        region=region or None,
        access_key=access_key,
        secret_key=secret_key,
        endpoint=endpoint,
        profile=options.get("profile"),
        ca_file=options.get("ca_file"),
        units=_units(options),
    )


def _wrong(what: str) -> SetupError:
    return SetupError(f"store.url: the DynamoDB URL {what}", field="store.url")


def _credentials(given: str, options: Mapping[str, str]) -> tuple[str | None, str | None]:
    if not given:
        return None, None
    key, _, secret = given.partition(":")
    if not key or not secret:
        raise _wrong("has half of a pair of credentials: dynamodb://ACCESS_KEY:SECRET@REGION/PREFIX, or none at all")
    if "profile" in options:
        raise _wrong("has credentials and a profile: one of them")
    return unquote(key), unquote(secret)


def _endpoint(given: str | None) -> str | None:
    if given is None:
        return None
    parts = urlsplit(given)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise _wrong("has an endpoint= that is not like https://host:port")
    return given.rstrip("/")


def _units(options: Mapping[str, str]) -> tuple[int, int] | None:
    billing = options.get("billing", _BILLING[0])
    if billing not in _BILLING:
        raise _wrong(f"has billing={billing}; known are {', '.join(_BILLING)}")
    if billing == _BILLING[0]:
        for name in ("read_units", "write_units"):
            if name in options:
                raise _wrong(f"has {name}, which is for billing=provisioned")
        return None
    found = [options.get(name, _UNITS_DEFAULT) for name in ("read_units", "write_units")]
    if not all(re.fullmatch(r"[1-9][0-9]{0,6}", value) for value in found):
        raise _wrong("has read_units or write_units that are not a number from 1")
    return int(found[0]), int(found[1])


# --- connections ---------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _loader() -> Any:
    """The driver's descriptions of the service: a quarter of a second to read, and the same for all."""
    return create_loader()


class Link:
    """One open way to the service: a client for each kind of work, and what is known of the service's clock."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.clock = ServerClock()
        self._boot_ms = SystemClock().boot_ms
        self._exit = contextlib.AsyncExitStack()
        self._begun = BackgroundTasks()
        self.run_to_end = self._begun.run_to_end
        if address.ca_file is not None:
            try:
                ssl.create_default_context(cafile=address.ca_file)  # the driver would not say which file it was
            except OSError as error:
                raise _wrong(f"has ca_file={address.ca_file}, which cannot be read: {error}") from None
        try:
            self._session = AioSession(profile=address.profile)
            self._session.register_component("data_loader", _loader())
        except aws.BotoCoreError as error:
            raise setup_error(address.label, error) from error

    async def line(self, connections: int, deadline_seconds: float, attempt_seconds: float) -> Line:
        """A line has connections of its own: work of one kind does not wait for another's."""
        address = self.address
        config = AioConfig(
            retries={"total_max_attempts": 1, "mode": "standard"},
            max_pool_connections=connections,
            connect_timeout=min(CONNECT_SECONDS, attempt_seconds),
            read_timeout=attempt_seconds,
            parameter_validation=False,
            user_agent_extra="duetime",
        )
        made = self._session.create_client(
            "dynamodb",
            region_name=address.region,
            endpoint_url=address.endpoint,
            aws_access_key_id=address.access_key,
            aws_secret_access_key=address.secret_key,
            verify=address.ca_file,
            config=config,
        )
        try:
            client = await self._exit.enter_async_context(made)
        except (aws.BotoCoreError, OSError, ValueError) as error:
            raise setup_error(address.label, error) from error
        return Line(self, client, connections, deadline_seconds, attempt_seconds)

    async def close(self) -> None:
        """After what is under way, unless that takes too long."""
        late = await self._begun.close()
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await self._exit.aclose()

    def answered(self, response: Mapping[str, Any], sent_ms: int) -> None:
        """Any answer tells the time, an error as well."""
        date = response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
        if date is not None and (date_ms := _date_ms(date)) is not None:
            self.clock.saw(date_ms, sent_ms, self._boot_ms())

    def boot_ms(self) -> int:
        return self._boot_ms()


@lru_cache(maxsize=4)
def _date_ms(date: str) -> int | None:
    try:
        return int(parsedate_to_datetime(date).timestamp()) * 1_000
    except ValueError:
        return None


class Line:
    """Asks for one kind of work."""

    def __init__(
        self, link: Link, client: Any, connections: int, deadline_seconds: float, attempt_seconds: float
    ) -> None:
        self._link = link
        self._client = client
        self._free = asyncio.Semaphore(connections)
        self._deadline_seconds = deadline_seconds
        self._attempt_seconds = attempt_seconds
        self._busy_seconds = min(BUSY_SECONDS, deadline_seconds)

    async def read(self, operation: str, **request: Any) -> Answer:
        return await self._insist(operation, request, writing=False)

    async def write(self, operation: str, **request: Any) -> Answer:
        return await self._insist(operation, request, writing=True)

    async def once(self, operation: str, **request: Any) -> Answer:
        """Without trying again, and with the driver's errors: for what happens at the start."""
        return await self._attempt(operation, request, self._attempt_seconds)

    async def _insist(self, operation: str, request: Mapping[str, Any], *, writing: bool) -> Answer:
        loop = asyncio.get_running_loop()
        begun_at = loop.time()
        in_doubt = False
        pause = _PAUSE_FIRST_SECONDS
        while True:
            try:
                left = begun_at + self._deadline_seconds - loop.time()
                return await self._attempt(operation, request, min(self._attempt_seconds, left))
            except Exception as error:
                verdict = judged(error)
                if verdict is Verdict.CONDITION:
                    raise Refused(error, in_doubt) from None
                in_doubt = in_doubt or (writing and verdict is Verdict.MAYBE)
                left = begun_at + (self._deadline_seconds if in_doubt else self._busy_seconds) - loop.time()
                if verdict is Verdict.REFUSED or left < pause:
                    raise store_error(error, verdict, in_doubt=in_doubt) from error
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(pause * 2, _PAUSE_MAX_SECONDS)

    async def _attempt(self, operation: str, request: Mapping[str, Any], within_seconds: float) -> Answer:
        async with self._free:
            sent_ms = self._link.boot_ms()
            try:
                async with asyncio.timeout(within_seconds):
                    answer: Answer = await getattr(self._client, operation)(**request)
            except aws.ClientError as error:
                self._link.answered(error.response, sent_ms)
                raise
            self._link.answered(answer, sent_ms)
            return answer
