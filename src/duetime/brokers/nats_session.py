"""One connection to NATS: requests, messages, and JetStream's answers.

Every connection is a new client of the driver, which is not allowed to reconnect by itself: it would keep what was not
sent yet and publish it after the reconnect, when the timer may be deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct

from duetime.errors import BrokerAway, SetupError
from duetime.telemetry import log

try:
    import nats.errors
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.protocol import parser
except ImportError:
    raise SetupError('nats.url: NATS needs its driver: pip install "duetime[nats]"', field="nats.url") from None

__all__ = ["CONNECT_SECONDS", "ApiError", "Msg", "NatsSession", "not_stored", "status_of", "text_of"]

CONNECT_SECONDS: Final = 3
_API_SECONDS: Final = 5.0
_CLOSE_SECONDS: Final = 1.0
# A server that is frozen is noticed by pings without an answer, after three times this long.
_PING_SECONDS: Final = 2
# Of the messages of the server itself, which alone have headers that are read here.
_HEADER_BYTES_MAX: Final = 4_096
_DENIALS_MAX: Final = 1_000
_DENIAL_LOG_PAUSE_SECONDS: Final = 60.0

# The driver makes the text of the server's error lower case.
_DENIED = re.compile(r'permissions violation for (publish|subscription) to "([^"]*)"')
_NO_JETSTREAM: Final = frozenset({10035, 10039, 10076})  # error codes: for the account, on the server
_NO_RESPONDERS: Final = 503

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode


class ApiError(Exception):
    """JetStream refused a request of its API."""

    def __init__(self, code: int, error_code: int, description: str) -> None:
        super().__init__(description)
        self.code = code
        self.error_code = error_code
        self.description = description


def status_of(message: Msg) -> int:
    """The status of a message of the server itself, such as 503 if nobody receives the subject. 0: it has none."""
    status = message.headers.get("Status", "") if message.headers else ""
    return int(status) if status.isascii() and status.isdigit() else 0


class _PublishError(Struct):
    description: str = ""


class _PublishAck(Struct):
    stream: str = ""
    seq: int = 0
    error: _PublishError | None = None


_decode_ack = msgspec.json.Decoder(_PublishAck).decode


def not_stored(reply: Msg) -> str | None:
    """Why a stream has not stored what was published, from the reply to it. None: it has."""
    if status_of(reply) == _NO_RESPONDERS:
        return "no stream of NATS stores this subject"
    try:
        ack = _decode_ack(reply.data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        ack = _PublishAck()
    if ack.error is not None:
        return f"the stream refused the message: {ack.error.description}"
    if not ack.stream or ack.seq <= 0:
        return "something else than a stream has answered; does a stream store this subject?"
    return None


# --- one connection ------------------------------------------------------------------------------


# The driver takes more characters for spaces than the server, which allows them in subjects. See `_Client`.
parser.MSG_RE = re.compile(rb"\AMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)\r\n")
parser.HMSG_RE = re.compile(rb"\AHMSG[ \t]+([^ \t\r\n]+)[ \t]+(\d+)[ \t]+(([^ \t\r\n]+)[ \t]+)?(\d+)[ \t]+(\d+)\r\n")


class _Client(Client):
    """The driver ends the connection, or reads nothing more, at a message that it cannot parse. Publishers may send any
    bytes as headers and almost any as subject, and JetStream delivers the message again and again: so one command would
    keep all instances from NATS."""

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Msg:
        readable = subject.decode(errors="replace").encode()
        message: Msg = super()._build_message(sid, readable, reply, data, headers)
        return message

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        if headers is None or len(headers) > _HEADER_BYTES_MAX:
            return None
        try:
            return await super()._process_headers(headers)
        except (IndexError, UnicodeDecodeError):
            return None


class _OnlyTls(_Client):
    """The driver goes on without TLS if the server offers none. The login must not be sent then."""

    def _connect_command(self) -> bytes:
        if not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()


class NatsSession:
    """One connection, from its login until it is lost. Its reply subjects cannot be guessed."""

    def __init__(self, *, only_tls: bool) -> None:
        self.inbox = f"_INBOX.{secrets.token_hex(16)}"
        self._client = _OnlyTls() if only_tls else _Client()
        self._connecting = True
        self._replies = f"{self.inbox}.r."
        self._waiting: dict[str, tuple[str, asyncio.Future[Msg]]] = {}
        self._requests = 0
        self._denied: dict[str, str] = {}  # by subject in lower case: the error
        self._denial_log_at = 0.0

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def reason(self) -> str:
        """Why the connection was lost, as far as it is known."""
        error = self._client.last_error
        return "the connection was closed" if error is None else text_of(error)

    @property
    def payload_max(self) -> int:
        """Bytes of the largest message that the server takes, headers included."""
        return self._client.max_payload

    async def connect(self, server: str, options: Mapping[str, Any]) -> None:
        await self._client.connect(
            server,
            name="duetime",
            error_cb=self._on_error,
            disconnected_cb=self._on_lost,
            allow_reconnect=False,
            connect_timeout=CONNECT_SECONDS,
            ping_interval=_PING_SECONDS,
            max_outstanding_pings=2,
            no_echo=True,
            inbox_prefix=self.inbox,
            # No limit: at a limit, the driver waits for any time and ignores a cancel. Callers limit what they send.
            pending_size=0,
            **options,
        )
        self._connecting = False
        if not self._client.is_connected:
            raise ConnectionResetError("the server closed the connection during the login")
        await self._client.subscribe(f"{self._replies}*", cb=self._on_reply)

    async def request(
        self, subject: str, body: bytes = b"", *, headers: dict[str, str] | None = None, timeout: float
    ) -> Msg:
        """Publish a message, and return the reply to it. Errors: TimeoutError; BrokerAway if the connection is lost
        meanwhile; SetupError if there is no permission."""
        self._requests += 1
        token = f"{self._requests:x}"
        future: asyncio.Future[Msg] = asyncio.get_running_loop().create_future()
        self._waiting[token] = (subject, future)
        try:
            await self.publish(subject, body, reply=self._replies + token, headers=headers)
            async with asyncio.timeout(timeout):
                return await future
        finally:
            del self._waiting[token]

    async def publish(
        self, subject: str, body: bytes = b"", *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Errors: BrokerAway."""
        if not self._client.is_connected:
            raise BrokerAway(f"nats: {self.reason}")
        try:
            await self._client.publish(subject, body, reply=reply, headers=headers)
        except nats.errors.Error as error:
            raise BrokerAway(f"nats: {text_of(error)}") from None

    async def subscribe(self, subject: str, receive: Callable[[Msg], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        """Returns what ends the subscription."""
        try:
            return (await self._client.subscribe(subject, cb=receive)).unsubscribe
        except nats.errors.Error as error:
            raise BrokerAway(f"nats: {text_of(error)}") from None

    async def api(self, operation: str, request: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call the API of JetStream. Errors: ApiError, BrokerAway, SetupError."""
        body = b"" if request is None else _encode(request)
        try:
            reply = await self.request(f"$JS.API.{operation}", body, timeout=_API_SECONDS)
        except TimeoutError:
            raise BrokerAway(f"nats: no answer of JetStream to {operation} within {_API_SECONDS:g} s") from None
        if status_of(reply) == _NO_RESPONDERS:
            raise SetupError("nats: JetStream is not enabled on the server: add `jetstream {}` to its configuration")
        try:
            answer = _decode(reply.data)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise BrokerAway(f"nats: the answer of JetStream to {operation} is not JSON") from None
        error = answer.get("error")
        if error is None:
            return answer
        code, error_code = int(error.get("code", 0)), int(error.get("err_code", 0))
        description = str(error.get("description", ""))
        if error_code in _NO_JETSTREAM:
            raise SetupError(f"nats: JetStream is not enabled for this login: {description}")
        if code == 503:
            raise BrokerAway(f"nats: {description}")
        raise ApiError(code, error_code, description)

    def denial(self, subject: str) -> str | None:
        """The error, if the server has said that this login may not use this subject."""
        return self._denied.get(subject.lower())

    async def close(self) -> None:
        self._connecting = False
        with contextlib.suppress(TimeoutError, OSError, nats.errors.Error):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._client.close()
        # The driver waits until everything is sent, with a frozen server for ever.
        writer = getattr(getattr(self._client, "_transport", None), "_io_writer", None)
        if writer is not None:
            writer.transport.abort()
        await self._on_lost()

    # callbacks of the driver

    async def _on_reply(self, message: Msg) -> None:
        waiting = self._waiting.get(message.subject[len(self._replies) :])
        if waiting is not None and not waiting[1].done():
            waiting[1].set_result(message)

    async def _on_error(self, error: Exception) -> None:
        if self._connecting:
            raise error  # ends the attempt; otherwise the driver would try again for ever
        denied = _DENIED.search(str(error).lower())
        if denied is None:
            return  # the driver keeps it as the last error
        action, subject = denied.groups()
        verb = "publish" if action == "publish" else "subscribe"
        text = f"nats: this login has no permission to {verb} to {subject!r}"
        of_replies = action == "subscription" and subject.startswith(self.inbox.lower())
        if of_replies:
            text = 'nats: this login has no permission to subscribe to "_INBOX.>", where answers arrive'
        if len(self._denied) >= _DENIALS_MAX:
            self._denied.clear()
        self._denied[subject] = text
        for target, future in self._waiting.values():
            if (of_replies or target.lower() == subject) and not future.done():
                future.set_exception(SetupError(text))
        now = asyncio.get_running_loop().time()
        if now >= self._denial_log_at:
            self._denial_log_at = now + _DENIAL_LOG_PAUSE_SECONDS
            log.error("%s", text)

    async def _on_lost(self) -> None:
        for _, future in self._waiting.values():
            if not future.done():
                future.set_exception(BrokerAway(f"nats: {self.reason}"))


def text_of(error: Exception) -> str:
    return str(error).removeprefix("nats: ").strip() or type(error).__name__
