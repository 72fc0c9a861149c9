"""The connection to NATS with JetStream that is kept open: the login, and the streams for events and dead letters."""

from __future__ import annotations

import asyncio
import random
import re
import ssl
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import nats.errors
from nats.aio.client import RawCredentials

from duetime.brokers.by_hand import add_stream
from duetime.brokers.connection import bare
from duetime.brokers.names import TENANT, is_allowed
from duetime.brokers.nats_session import CONNECT_SECONDS, ApiError, NatsSession, text_of
from duetime.config import Nats
from duetime.errors import BrokerAway, SetupError
from duetime.single_flight import retrieved
from duetime.telemetry import log

__all__ = [
    "DEAD_LETTERS",
    "EVENTS",
    "NatsConnection",
    "check_consumer",
    "ensure_stream",
    "stream_with",
    "subject_of",
]

DEAD_LETTERS: Final = "TIMER_DEAD_LETTERS"
EVENTS: Final = "TIMER_EVENTS"

_SETUP_SECONDS: Final = 20.0
_NAME_IN_USE: Final = 10058
_MS_IN_NS: Final = 1_000_000


def subject_of(pattern: str) -> str:
    """The NATS subject, with wildcards, of a pattern of the configuration."""
    return ".".join("*" if TENANT in token else token for token in pattern.split("."))


# --- the connection that is kept open ------------------------------------------------------------


class NatsConnection:
    """BrokerConnection for NATS."""

    name = "nats"

    def __init__(self, config: Nats) -> None:
        self._config = config
        self._servers = _servers(config.url)
        self._session: NatsSession | None = None
        self._opening: asyncio.Future[None] | None = None
        self._reason = "not opened yet"
        self._is_closed = False
        self._warned: set[str] = set()

    @property
    def is_connected(self) -> bool:
        return self._session is not None and self._session.is_connected

    @property
    def away_reason(self) -> str:
        return bare("nats", self._reason if self._session is None else self._session.reason)

    @property
    def session(self) -> NatsSession | None:
        """The present connection. None: there is none."""
        session = self._session
        return session if session is not None and session.is_connected else None

    async def open(self) -> None:
        if self.is_connected:
            return
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(retrieved)
        await asyncio.shield(self._opening)  # a caller that is cancelled must not cancel it for the others

    async def close(self) -> None:
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _open(self) -> None:
        try:
            if self._is_closed:
                raise BrokerAway("nats: closed")
            old, self._session = self._session, None
            if old is not None:
                await old.close()
            session = await self.connect()
            try:
                async with asyncio.timeout(_SETUP_SECONDS):
                    await self._prepare(session)
            except TimeoutError:
                await session.close()
                raise BrokerAway("nats: JetStream answers too slowly") from None
            except BaseException:
                await session.close()
                raise
            self._session = session
        except (BrokerAway, SetupError) as error:
            self._reason = error.detail
            raise
        finally:
            self._opening = None

    async def connect(self) -> NatsSession:
        """A connection of the caller's own, for which nothing is created. Servers are tried in a random order, so that
        instances spread over them. Errors: BrokerAway, SetupError."""
        config = self._config
        only_tls = bool(config.ca_file or config.tls_certificate) or any(s.startswith("tls:") for s in self._servers)
        options = _login(config)
        if only_tls:
            options["tls"] = _tls_context(config)
        errors: list[BrokerAway | SetupError] = []
        for server in random.sample(self._servers, len(self._servers)):
            session = NatsSession(only_tls=only_tls)
            try:
                async with asyncio.timeout(2 * CONNECT_SECONDS):
                    await session.connect(server, options)
            except (OSError, TimeoutError, nats.errors.Error) as error:
                await session.close()
                errors.append(_connect_error(server, error))
            except BaseException:
                await session.close()
                raise
            else:
                return session
        for failure in errors:
            if isinstance(failure, SetupError):
                raise failure
        raise BrokerAway("nats: " + "; ".join(bare("nats", failure.detail) for failure in errors))

    async def _prepare(self, session: NatsSession) -> None:
        config = self._config
        window_ns = config.duplicate_window.ms * _MS_IN_NS
        if config.allow_subjects:
            streams = await ensure_stream(
                session,
                EVENTS,
                [subject_of(pattern) for pattern in config.allow_subjects],
                "nats.allow_subjects",
                create={"duplicate_window": window_ns},
                is_created=config.create_streams,
            )
            for stream in streams:
                name, found_ns = stream["name"], stream.get("duplicate_window", 0)
                if found_ns < window_ns and name not in self._warned:
                    self._warned.add(name)
                    log.warning(
                        "nats: the stream %s drops duplicates within %g s, less than nats.duplicate_window (%g s): "
                        "a repeated event may be stored twice",
                        name,
                        found_ns / 1e9,
                        window_ns / 1e9,
                    )
        if config.command_subject:
            await ensure_stream(
                session,
                DEAD_LETTERS,
                [subject_of(config.dead_letter_subject)],
                "nats.dead_letter_subject",
                create={},
                is_created=config.create_streams,
            )


def _servers(url: str) -> list[str]:
    servers = [server.strip() for server in url.split(",") if server.strip()]
    for server in servers:
        try:
            parts = urlsplit(server if "://" in server else f"nats://{server}")
            is_valid = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_valid = False
        if not is_valid:
            raise SetupError(f'nats.url: must be "nats://host:port" or "tls://host:port", not {server!r}')
    if not servers:
        raise SetupError("nats.url: is empty")
    return servers


def _tls_context(config: Nats) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
        if config.tls_certificate:
            context.load_cert_chain(config.tls_certificate, config.tls_key)
    except OSError as error:  # SSLError is one
        raise SetupError(f"configuration: nats.ca_file, nats.tls_certificate or nats.tls_key: {error}") from None
    return context


def _login(config: Nats) -> dict[str, Any]:
    if config.credentials:
        return {"user_credentials": RawCredentials(_credentials(config.credentials))}
    if config.user:
        return {"user": config.user, "password": config.password}
    return {"token": config.token} if config.token else {}


def _credentials(setting: str) -> str:
    """The checked content of a credentials file: the driver never returns from reading one without a JWT. With "file:"
    in front, the configuration has read the file already."""
    content = setting
    if "-----" not in setting:
        try:
            content = Path(setting).read_text("ascii")
        except (OSError, ValueError) as error:
            raise SetupError(f"nats.credentials: {error}") from None
    jwt = re.search(r"-----BEGIN NATS USER JWT-----\s+(\S+)", content)
    seed = re.search(r"-----BEGIN USER NKEY SEED-----\s+(\S+)", content)
    if jwt is None or seed is None:
        raise SetupError("nats.credentials: the file must hold a NATS USER JWT and a USER NKEY SEED, as nsc writes it")
    try:
        import nkeys  # type: ignore[import-untyped]
    except ImportError:
        raise SetupError('nats.credentials: needs a package: pip install "duetime[nats]"') from None
    try:
        nkeys.from_seed(bytearray(seed[1].encode())).wipe()
    except Exception:  # nkeys raises several kinds, and their texts may hold the seed
        raise SetupError("nats.credentials: the USER NKEY SEED is not valid") from None
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt[1]}\n------END NATS USER JWT------\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed[1]}\n------END USER NKEY SEED------\n"
    )


def _connect_error(server: str, error: Exception) -> BrokerAway | SetupError:
    text = text_of(error)
    lower = text.lower()
    if isinstance(error, nats.errors.SecureConnWantedError):
        return SetupError(f"nats: {server} offers no TLS, and nats.url or the TLS settings ask for it")
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return SetupError(f"nats: no TLS connection to {server}: {text}: check nats.ca_file and nats.tls_certificate")
    if "authorization violation" in lower or ("authentication" in lower and "timeout" not in lower):
        return SetupError(
            f"nats: {server} refused the login ({text}): check nats.user and nats.password, nats.token or "
            "nats.credentials"
        )
    if isinstance(error, TimeoutError):
        text = f"no answer within {CONNECT_SECONDS} s"
    return BrokerAway(f"nats: cannot connect to {server}: {text}")


# --- streams -------------------------------------------------------------------------------------


async def ensure_stream(
    session: NatsSession,
    name: str,
    subjects: Sequence[str],
    setting: str,
    *,
    create: Mapping[str, Any],
    is_created: bool,
) -> list[dict[str, Any]]:
    """The configurations of the streams that store these subjects. The subjects that none stores get the stream `name`,
    with `create` as settings of its own, if it may be created. Errors: SetupError, BrokerAway."""
    found: dict[str, dict[str, Any]] = {}
    missing: list[str] = []
    for subject in dict.fromkeys(subjects):
        stream = await stream_with(session, subject)
        if stream is None:
            missing.append(subject)
        else:
            found[stream["name"]] = stream
    if not missing:
        return list(found.values())
    # A stream must not have subjects that overlap.
    missing = [one for one in missing if not any(_covers(other, one) for other in missing if other != one)]
    wanted = ",".join(missing)
    what = f'nats: no stream stores the subject "{wanted}" of {setting}'
    if not is_created:
        by_hand = add_stream(name, missing, deletes_acknowledged=create.get("retention") == "workqueue")
        raise SetupError(f"{what}: create one ({by_hand}), or set nats.create_streams = true")
    request = {"name": name, "subjects": missing, "storage": "file", "retention": "limits", **create}
    try:
        answer = await session.api(f"STREAM.CREATE.{name}", request)
    except ApiError as error:
        if error.error_code == _NAME_IN_USE:
            raise SetupError(
                f"{what}, and the stream {name} exists with other subjects: add them to it "
                f"(nats stream edit {name} --subjects …), or change {setting}"
            ) from None
        raise SetupError(f"{what}, and {name} cannot be created: {error.description}") from None
    log.info("nats: created the stream %s for %s", name, wanted)
    return [*found.values(), answer["config"]]


async def stream_with(session: NatsSession, subject: str) -> dict[str, Any] | None:
    try:
        answer = await session.api("STREAM.NAMES", {"subject": subject})
        for name in answer.get("streams") or ():
            config: dict[str, Any] = (await session.api(f"STREAM.INFO.{name}"))["config"]
            if any(_covers(stored, subject) for stored in config.get("subjects") or ()):
                return config
    except ApiError as error:
        raise SetupError(f'nats: cannot find the stream of "{subject}": {error.description}') from None
    return None


def _covers(stored: str, subject: str) -> bool:
    """Is each subject that matches `subject`, which may have wildcards, also one of `stored`?"""
    if subject.endswith(">") and not stored.endswith(">"):
        return False
    return is_allowed((stored,), subject, "")


def check_consumer(consumer: Mapping[str, Any], config: Nats, subject: str) -> None:
    """`consumer` is the configuration of the durable consumer of the commands. Errors: SetupError if commands cannot be
    received with it as they should be."""
    place = f"{config.stream} {config.consumer}"
    filters = consumer.get("filter_subjects") or [consumer.get("filter_subject", "")]
    problem: str | None = None
    if consumer.get("deliver_subject"):
        problem = "is a push consumer"
    elif consumer.get("ack_policy") != "explicit":
        problem = f"has the acknowledgement policy {consumer.get('ack_policy')!r} instead of 'explicit'"
    elif consumer.get("max_deliver", -1) > 0:
        problem = "delivers a command only a limited number of times (max_deliver), and then loses it"
    elif filters != [subject]:
        problem = f"has another filter than nats.command_subject ({subject}): {', '.join(filters) or 'none'}"
    elif consumer.get("headers_only"):
        problem = "delivers headers only"
    if problem is not None:
        raise SetupError(
            f"nats: the consumer {config.consumer} of {config.stream} {problem}: remove it (nats consumer rm {place}), "
            "or set nats.consumer to another name"
        )
    wait_ns = consumer.get("ack_wait", 0)
    if wait_ns != config.ack_wait.ms * _MS_IN_NS or consumer.get("backoff"):
        raise SetupError(
            f"nats: the consumer {config.consumer} of {config.stream} has an ack wait of {wait_ns / 1e9:g} s or a "
            f"backoff, and nats.ack_wait is {config.ack_wait.ms / 1_000:g} s: set nats.ack_wait to it, or change the "
            f"consumer (nats consumer edit {place} --wait {config.ack_wait.ms / 1_000:g}s)"
        )
