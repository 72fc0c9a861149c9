"""Commands from NATS JetStream: a durable pull consumer, which all instances share.

Messages are asked for in requests that end soon, and the next one is made when the one before has ended: so this
instance never holds more messages than it has asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from duetime.brokers.by_hand import add_consumer, edit_consumer_pending, pending_wanted
from duetime.brokers.names import filled, is_token, tenant_of
from duetime.brokers.nats import NatsConnection, check_consumer, ensure_stream, subject_of
from duetime.brokers.nats_session import ApiError, Msg, NatsSession, not_stored, status_of
from duetime.config import Nats
from duetime.domain.timer import CommandPosition
from duetime.errors import BrokerAway, SetupError
from duetime.ingress.source import Backlog, Message, Refusal, dead_letter
from duetime.telemetry import FailureLog, log

__all__ = ["NatsCommands"]

_WAIT_SECONDS: Final = 1.0
_ANSWER_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 1.0
_LOOK_SECONDS: Final = 0.25  # how often a request checks whether the connection is lost, or permission is missing
_NO_SUCH_CONSUMER: Final = 10014
_CONSUMER_EXISTS: Final = frozenset({10105, 10148})
_MS_IN_NS: Final = 1_000_000
_ROOM_FOR_HEADERS: Final = 1_024
_HEARTBEAT: Final = 100
_NO_TENANT: Final = "_"  # in the subject of a dead letter, if the subject of the command names no tenant

_encode = msgspec.json.Encoder().encode


class NatsCommands:
    """CommandSource for NATS."""

    name = "nats"

    def __init__(self, config: Nats, connection: NatsConnection) -> None:
        self._config = config
        self._connection = connection
        self._subject = subject_of(config.command_subject)
        self._has_tenant = "*" in self._subject.split(".")
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{config.stream}.{config.consumer}"
        self._session: NatsSession | None = None  # the one with the subscription
        self._inbox = ""
        self._unsubscribe: Callable[[], Awaitable[None]] | None = None
        self._arrived: deque[tuple[float, Msg]] = deque()
        self._news = asyncio.Event()
        self._pulls = 0
        self._end: Msg | None = None  # the status with which the present request ended
        self._is_idle = False
        self._has_warned = False
        self._dead_letters = FailureLog(
            "nats: a dead letter was not stored, and is tried again", "nats: dead letters are stored again"
        )

    async def open(self) -> None:
        await self._connection.open()
        session = self._connected()
        config = self._config
        stream = [
            found["name"]
            for found in await ensure_stream(
                session,
                config.stream,
                [self._subject],
                "nats.command_subject",
                # An acknowledged command is deleted, so that the stream does not grow for ever.
                create={"retention": "workqueue"},
                is_created=config.create_streams,
            )
        ]
        if config.stream not in stream:
            raise SetupError(
                f"nats: the subject {self._subject} is stored by the stream {', '.join(stream)}: set nats.stream to it"
            )
        consumer = await self._consumer(session)
        check_consumer(consumer, config, self._subject)
        pending_max = consumer.get("max_ack_pending", -1)
        if 0 < pending_max < pending_wanted(config) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "nats: the consumer %s of %s delivers at most %d commands that are not acknowledged, to all instances "
                "together and including those that wait for a retry (max_ack_pending): those of one tenant beyond its "
                "quota can keep the commands of all others from being delivered. Raise it: %s",
                config.consumer,
                config.stream,
                pending_max,
                edit_consumer_pending(config),
            )
        if session is self._session:
            return
        if self._unsubscribe is not None:
            with contextlib.suppress(Exception):  # it may be of a connection that is closed
                await self._unsubscribe()
        self._arrived.clear()
        self._inbox = f"{session.inbox}.p"
        self._unsubscribe = await session.subscribe(f"{self._inbox}.*", self._on_message)
        # Checks whether this login may receive. A message that arrives is kept for the first `receive`.
        answered = await self._pull(session, {"batch": 1, "no_wait": True}, 1)
        denial = session.denial(self._next) or session.denial(f"{self._inbox}.*")
        if denial is not None:
            raise SetupError(denial)
        if not answered:
            raise BrokerAway(f"nats: no answer from the consumer {config.consumer}")
        self._session = session

    async def _consumer(self, session: NatsSession) -> dict[str, Any]:
        config = self._config
        place = f"{config.stream}.{config.consumer}"
        wanted: dict[str, Any] = {
            "durable_name": config.consumer,
            "name": config.consumer,
            "description": "Duetime: commands for timers",
            "deliver_policy": "all",
            "ack_policy": "explicit",
            "ack_wait": config.ack_wait.ms * _MS_IN_NS,
            "max_deliver": -1,
            "filter_subject": self._subject,
            "replay_policy": "instant",
            "max_ack_pending": pending_wanted(config),
        }
        try:
            try:
                return await self._info(session)
            except ApiError as error:
                if error.error_code != _NO_SUCH_CONSUMER:
                    raise
            if not config.create_streams:
                raise SetupError(
                    f"nats: the stream {config.stream} has no consumer {config.consumer}: create it "
                    f"({add_consumer(config, self._subject)}), or set nats.create_streams = true"
                )
            request = {"stream_name": config.stream, "config": wanted, "action": "create"}
            try:
                answer = await session.api(f"CONSUMER.CREATE.{place}.{self._subject}", request)
            except ApiError as error:
                if error.error_code not in _CONSUMER_EXISTS:  # else another instance has just made it
                    raise
                return await self._info(session)
        except ApiError as error:
            raise SetupError(f"nats: cannot use the consumer {place}: {error.description}") from None
        consumer: dict[str, Any] = answer["config"]
        return consumer

    async def _info(self, session: NatsSession) -> dict[str, Any]:
        answer = await session.api(f"CONSUMER.INFO.{self._config.stream}.{self._config.consumer}")
        consumer: dict[str, Any] = answer["config"]
        return consumer

    def _connected(self) -> NatsSession:
        session = self._connection.session
        if session is None:
            raise BrokerAway(f"nats: {self._connection.away_reason}")
        return session

    # --- receive ----------------------------------------------------------------------------------

    async def receive(self, limit: int, bytes_max: int) -> Sequence[Message]:
        session = self._connected()
        if session is not self._session:
            raise BrokerAway("nats: connected again")
        if not self._arrived and not self._is_idle:
            await self._checked_pull(session, {"batch": limit, "no_wait": True, "max_bytes": bytes_max}, limit)
        if not self._arrived:
            # Without max_bytes: a message that is larger would never be received.
            await self._checked_pull(session, {"batch": 1, "expires": int(_WAIT_SECONDS * 1e9)}, 1)
        self._is_idle = not self._arrived
        return self._taken(limit)

    async def _checked_pull(self, session: NatsSession, request: dict[str, Any], batch: int) -> None:
        answered = await self._pull(session, request, batch)
        if self._arrived:
            return
        if not answered:
            self._connected()
            raise BrokerAway(session.denial(self._next) or "nats: no answer from the consumer of commands")
        status = 0 if self._end is None else status_of(self._end)
        description = "" if self._end is None or not self._end.headers else self._end.headers.get("Description", "")
        if status == 503 or (status == 409 and "MaxBytes" not in description):
            await asyncio.sleep(_PAUSE_SECONDS)  # the caller opens this again at once
            raise BrokerAway(
                f"nats: the consumer {self._config.consumer} delivers no commands: {description or 'it does not exist'}"
            )

    async def _pull(self, session: NatsSession, request: dict[str, Any], batch: int) -> bool:
        """Until `batch` messages have arrived, or the server has said that there are no more. False: neither."""
        self._pulls += 1
        self._end = None
        before = len(self._arrived)
        await session.publish(self._next, _encode(request), reply=f"{self._inbox}.{self._pulls}")
        loop = asyncio.get_running_loop()
        until = loop.time() + _WAIT_SECONDS + _ANSWER_SECONDS
        while self._end is None and len(self._arrived) - before < batch:
            if loop.time() > until or not session.is_connected or session.denial(self._next) is not None:
                return False
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_SECONDS):
                    await self._news.wait()
        return True

    async def _on_message(self, message: Msg) -> None:
        if message.subject.startswith(self._inbox):  # a status: messages have the subject where they were published
            if message.subject == f"{self._inbox}.{self._pulls}" and status_of(message) > _HEARTBEAT:
                self._end = message
        else:
            self._arrived.append((asyncio.get_running_loop().time(), message))
        self._news.set()

    def _taken(self, limit: int) -> list[Message]:
        # What is older may have been delivered to another instance.
        oldest = asyncio.get_running_loop().time() - self._config.ack_wait.ms / 1_000 / 2
        messages: list[Message] = []
        while self._arrived and len(messages) < limit:
            arrived_at, message = self._arrived.popleft()
            read = _metadata(message.reply)
            if read is None or arrived_at < oldest:
                continue
            sequence, at_ms, deliveries = read
            tenant = tenant_of(self._config.command_subject, message.subject)
            if tenant is None and self._has_tenant:
                tenant = ""  # no tenant: the command is refused
            position = CommandPosition(f"nats:{self._config.stream}", sequence, at_ms)
            messages.append(Message(message.subject, tenant, message.data, position, deliveries, message.reply))
        return messages

    # --- what becomes of the messages -------------------------------------------------------------

    async def acknowledge(self, messages: Sequence[Message]) -> None:
        if not messages:
            return
        session = self._connected()
        *others, last = messages
        for message in others:
            await session.publish(message.handle, b"+ACK")
        # The server handles acknowledgements in their order: its reply to the last one is for all of them.
        await self._request(session, last.handle, b"+ACK")

    async def retry(self, message: Message, delay_ms: int) -> None:
        delay = b' {"delay":%d}' % (delay_ms * _MS_IN_NS) if delay_ms > 0 else b""
        await self._connected().publish(message.handle, b"-NAK" + delay)

    def holds_others_up(self, message: Message) -> bool:
        """The stream delivers what comes after it."""
        return False

    async def refuse(self, message: Message, refusal: Refusal) -> None:
        session, position = self._connected(), message.position
        tenant = message.tenant or ""
        subject = filled(self._config.dead_letter_subject, tenant if is_token(tenant) else _NO_TENANT)
        unique = f"{position.stream}.{position.sequence}.{position.at_ms}"
        letter = dead_letter(message, refusal, max(session.payload_max - _ROOM_FOR_HEADERS, 0))
        try:
            problem = not_stored(await self._request(session, subject, letter, {"Nats-Msg-Id": unique}))
            if problem is not None:
                raise BrokerAway(f"{subject!r}: {problem}")
        except BrokerAway as error:
            self._dead_letters.failed(error, int(asyncio.get_running_loop().time() * 1_000))
            raise
        self._dead_letters.recovered()
        await session.publish(message.handle, b"+TERM")

    async def extend(self, messages: Sequence[Message]) -> None:
        session = self._connected()
        for message in messages:
            await session.publish(message.handle, b"+WPI")

    async def backlog(self) -> Backlog | None:
        try:
            place = f"{self._config.stream}.{self._config.consumer}"
            info = await self._connected().api(f"CONSUMER.INFO.{place}")
        except (ApiError, SetupError):
            return None
        return Backlog(int(info.get("num_pending", 0)), int(info.get("num_ack_pending", 0)))

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is None or not session.is_connected:
            return
        with contextlib.suppress(Exception):
            if self._unsubscribe is not None:
                await self._unsubscribe()
            for _, message in self._arrived:
                if _metadata(message.reply) is not None:
                    await session.publish(message.reply, b"-NAK")
        self._arrived.clear()

    async def _request(
        self, session: NatsSession, subject: str, body: bytes, headers: dict[str, str] | None = None
    ) -> Msg:
        try:
            return await session.request(subject, body, headers=headers, timeout=_ANSWER_SECONDS)
        except TimeoutError:
            raise BrokerAway(f"nats: no answer within {_ANSWER_SECONDS:g} s") from None
        except SetupError as error:
            raise BrokerAway(error.detail) from None


def _metadata(reply: str) -> tuple[int, int, int] | None:
    """(sequence in the stream, time in milliseconds, deliveries) of a message of JetStream, from its reply subject."""
    tokens = reply.split(".")
    if tokens[:2] != ["$JS", "ACK"]:
        return None
    if len(tokens) == 9:
        fields = tokens[4:8]
    elif len(tokens) >= 11:  # with the domain and a hash of the account
        fields = tokens[6:10]
    else:
        return None
    try:
        deliveries, sequence, _, at_ns = map(int, fields)
    except ValueError:
        return None
    return sequence, at_ns // _MS_IN_NS, deliveries
