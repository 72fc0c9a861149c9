"""Callbacks over HTTP: the request, its signature, and the attempt result for each answer.

http/client.py has the connections, egress.py the addresses, signing.py the signatures. What depends only on the origin
of the URL (scheme, host and port) or on the namespace is computed once and cached, because millions of timers share a
few of them. The rest of the URL is different for each timer: it is only checked and copied.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import lru_cache
from hashlib import blake2b
from typing import TypeVar

import msgspec
from msgspec import Struct

from duetime import __version__, signing
from duetime.clock import Clock
from duetime.config import Config
from duetime.deliveries import egress
from duetime.deliveries.lookups import LOOKUPS_MAX
from duetime.delivery import Attempt
from duetime.domain.headers import check_http_headers, is_header_value
from duetime.domain.instants import format_instant
from duetime.domain.settle import ANSWER_BYTES_MAX, AttemptResult, Contact
from duetime.domain.timer import Namespace, Timer
from duetime.errors import AddressRefused, DeadlineTooShort, HttpError, SetupError, Shortage, Unreachable
from duetime.http.client import Answer, HttpClient
from duetime.http.urls import Target, is_path, parse_target, request_head
from duetime.telemetry import log
from duetime.wire import URL_BYTES_MAX

__all__ = ["Webhook"]

# Entries of each of the caches below. A full cache is cleared, which costs less than keeping an order.
_CACHED_MAX = 4_096
# A URL has its first slash after the scheme at this position or later.
_HOST_AT = len("http://x")
_SHORTAGE_LOG_PAUSE_MS = 60_000

_NOT_SENT = AttemptResult(Contact.NOT_SENT)

K = TypeVar("K")
V = TypeVar("V")

# --- the deliverer -------------------------------------------------------------------------------


class _Origin(Struct, frozen=True):
    """What all URLs of one scheme, host and port share. The path of `target` is "/"."""

    target: Target
    head_after_path: str  # of the request, with the headers that are always the same
    refused: str | None  # why it must not be called


class Webhook:
    """Deliverer for http and https. `loopback_allowed`: this server itself listens on loopback only."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        loopback_allowed: bool,
        resolver: egress.Resolver | None = None,
        sockets_max: int | None = None,
        lookups_max: int = LOOKUPS_MAX,
    ):
        delivery = config.delivery
        self._clock = clock
        self._http_allowed = delivery.allow_http
        self._allowed = _allowed_networks(delivery.allow_networks, loopback_allowed)
        self._resolver = resolver or egress.Resolver(
            self._allowed, timeout_ms=delivery.connect_timeout.ms, lookups_max=lookups_max
        )
        self._client = HttpClient(
            resolve=self._resolver,
            ssl_context=_tls_context(delivery.ca_file) if delivery.ca_file else None,
            connect_timeout_ms=delivery.connect_timeout.ms,
            body_bytes_max=ANSWER_BYTES_MAX,
            connections_max=delivery.concurrency_max,
            sockets_max=sockets_max,
        )
        self._our_headers = {
            "content-type": "application/json",
            "user-agent": f"{delivery.user_agent}/{__version__}",
        }
        if not is_header_value(self._our_headers["user-agent"]):
            raise SetupError("configuration: delivery.user_agent must be visible ASCII")
        # By the part of a URL before its path. When the first is full it becomes the second, which is then dropped: an
        # origin that is in use stays known, however many others are called once.
        self._origins: dict[str, _Origin] = {}
        self._older_origins: dict[str, _Origin] = {}
        self._keys: dict[tuple[str, ...], tuple[bytes, ...]] = {}
        self._bugs_logged: set[type[Exception]] = set()
        self._shortage_log_at_ms = 0

    def check(self, url: str, namespace: str) -> None:
        self._known(url)

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        check_http_headers(headers)

    def origin(self, url: str) -> str:
        slash = url.find("/", _HOST_AT)
        origin = self._origins.get(url if slash < 0 else url[:slash])
        if origin is None:
            try:
                origin, _ = self._split(url)
            except ValueError:
                return url
        return origin.target.origin

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        timer = attempt.timer
        try:
            origin, path = self._known(timer.callback_url)  # again: the row may be older than a rule
        except ValueError as error:
            return AttemptResult(Contact.REFUSED, error=f"callbackUrl {error}")
        began = False

        def begin() -> bytes | None:
            nonlocal began
            fired_at_ms = attempt.begin()
            if fired_at_ms is None:
                return None
            began = True
            return self._request(origin, path, attempt, fired_at_ms)

        timeout_s = timer.callback_timeout_seconds or attempt.namespace.callback_timeout_seconds
        try:
            answer = await self._client.send(
                origin.target, begin, timeout_ms=timeout_s * 1_000, owner=attempt.namespace.name
            )
        except Exception as error:  # `deliver` never raises (delivery.py)
            return self._failure(error, began)
        if answer is not None:
            retry_after_ms = self._retry_after_ms(answer)
            return AttemptResult(
                Contact.ANSWERED, answer.status, answer.body, retry_after_ms, truncated=answer.truncated
            )
        if began:  # it was sent on a connection that closed, and must not be sent again: that was an attempt
            return AttemptResult(Contact.BROKEN, error="connection closed before the answer")
        return _NOT_SENT

    async def close(self) -> None:
        await self._client.close()
        await self._resolver.close()

    def _failure(self, error: Exception, began: bool) -> AttemptResult:
        """After `begin` the callback may have arrived, whatever happened then: that is always an attempt."""
        if isinstance(error, HttpError):
            if began:
                return AttemptResult(Contact.BROKEN, error=error.reason)
            if isinstance(error, Shortage):
                self._log_shortage(error.reason)
                return AttemptResult(Contact.SHORTAGE, error=error.reason)
            if isinstance(error, DeadlineTooShort):
                return AttemptResult(Contact.TIMED_OUT, error=error.reason)
            if isinstance(error, Unreachable):
                return AttemptResult(Contact.UNREACHABLE, error=error.reason)
            return _NOT_SENT  # the client was closed
        if isinstance(error, AddressRefused):
            return AttemptResult(Contact.REFUSED, error=str(error))
        # A bug. It must not stop other timers from being fired, nor write a log line for every attempt.
        if type(error) not in self._bugs_logged:
            self._bugs_logged.add(type(error))
            log.error(
                "unexpected error during delivery; it counts as a failed attempt",
                exc_info=error,
            )
        return AttemptResult(Contact.BROKEN, error=f"internal error: {type(error).__name__}")

    def _log_shortage(self, reason: str) -> None:
        now_ms = self._clock.boot_ms()
        if now_ms >= self._shortage_log_at_ms:
            self._shortage_log_at_ms = now_ms + _SHORTAGE_LOG_PAUSE_MS
            log.warning("callbacks have to wait: %s; this does not count as an attempt", reason)

    # the request

    def _request(self, origin: _Origin, path: str, attempt: Attempt, fired_at_ms: int) -> bytes:
        timer, namespace = attempt.timer, attempt.namespace
        delivery_id = timer.delivery_id
        body = _body(timer, fired_at_ms)
        timestamp_s = fired_at_ms // 1_000
        optional = ""
        if namespace.signing_secrets:
            signature = signing.sign(delivery_id, timestamp_s, body, self._signing_keys(namespace))
            optional = f"webhook-signature: {signature}\r\n"
        if timer.extras.headers:
            optional += _header_lines(timer.extras.headers)
        text = (
            f"POST {path}{origin.head_after_path}webhook-id: {delivery_id}\r\n"
            f"webhook-timestamp: {timestamp_s}\r\nidempotency-key: {delivery_id}\r\n"
            f"traceparent: {_traceparent(delivery_id, timer.attempts + 1)}\r\nduetime-fence: {attempt.fence}\r\n"
            f"{optional}content-length: {len(body)}\r\n\r\n"
        )
        return text.encode("ascii") + body

    def _signing_keys(self, namespace: Namespace) -> tuple[bytes, ...]:
        keys = self._keys.get(namespace.signing_secrets)
        if keys is None:
            keys = tuple(signing.check_secret(secret) for secret in namespace.signing_secrets)
            _keep(self._keys, namespace.signing_secrets, keys)
        return keys

    # the answer

    def _retry_after_ms(self, answer: Answer) -> int | None:
        for name, value in answer.raw_headers.items():
            if len(name) == 11 and name.lower() == b"retry-after":
                return _parse_retry_after(value.decode("latin-1").strip(), self._clock)
        return None

    # URLs

    def _known(self, url: str) -> tuple[_Origin, str]:
        """The origin and the path of a URL that may be called. A ValueError says why it may not."""
        slash = url.find("/", _HOST_AT)
        if slash > 0 and (known := self._origins.get(url[:slash])) is not None:
            origin, path = known, url[slash:]
        else:
            try:
                origin, path = self._split(url)
            except ValueError:
                parse_target(url)  # the whole URL: its error says more
                raise
        if not is_path(path) or len(url) > URL_BYTES_MAX:
            parse_target(url)  # raises
        if origin.refused is not None:
            raise ValueError(origin.refused)
        return origin, path

    def _split(self, url: str) -> tuple[_Origin, str]:
        """What is known of its origin, and the path with the query, which is not checked. A ValueError says what is
        wrong with the part before the path."""
        slash = url.find("/", _HOST_AT)
        before_path, path = (url, "/") if slash < 0 else (url[:slash], url[slash:])
        origin = self._origins.get(before_path)
        if origin is None:
            if "?" in before_path:  # a query without a path
                before_path = url[: url.index("?")]
                path = "/" + url[len(before_path) :]
            origin = self._find_origin(before_path)
        return origin, path

    def _find_origin(self, before_path: str) -> _Origin:
        origin = self._origins.get(before_path) or self._older_origins.get(before_path)
        if origin is None:
            target = parse_target(before_path)
            head = request_head("POST", target, self._our_headers).decode("ascii")
            origin = _Origin(target, head.removeprefix("POST /"), self._refusal(target))
        if len(self._origins) >= _CACHED_MAX:
            self._older_origins, self._origins = self._origins, {}
        self._origins[before_path] = origin
        return origin

    def _refusal(self, target: Target) -> str | None:
        """Why the policy does not allow this origin."""
        if not target.tls and not self._http_allowed:
            return "must start with https://: this server does not allow plain http (delivery.allow_http)"
        address = egress.literal_address(target.host)
        if address is None and target.host.removesuffix(".").split(".")[-1] == "localhost":
            address = egress.LOOPBACK[0].network_address
        if address is not None and (reason := egress.refusal(address, self._allowed)):
            return f"must not point at {address}, {reason} (delivery.allow_networks)"
        return None


def _keep(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= _CACHED_MAX:
        cache.clear()
    cache[key] = value


def _header_lines(headers: Mapping[str, str]) -> str:
    """Headers were checked when the timer was created. Rows may be older than a rule: then all are left out."""
    try:
        check_http_headers(headers)
    except ValueError:
        return ""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _body(timer: Timer, fired_at_ms: int) -> bytes:
    """The payload is inserted byte for byte as it was received: the create has checked that it is JSON."""
    correlation = "null" if timer.correlation_id is None else _json(timer.correlation_id)
    scheduled_at = execute_at = format_instant(timer.scheduled_at_ms)
    if timer.execute_at_ms != timer.scheduled_at_ms:  # a retry
        execute_at = format_instant(timer.execute_at_ms)
    return (
        f"{_body_start(timer.namespace)}{_json(timer.timer_id)},"
        f'"scheduledAt":"{scheduled_at}","executeAt":"{execute_at}","firedAt":"{_format_now(fired_at_ms)}",'
        f'"attempt":{timer.attempts + 1},"payload":{timer.payload or "null"},"correlationId":{correlation}}}'
    ).encode()


@lru_cache(1_024)
def _body_start(namespace: str) -> str:
    return f'{{"namespace":{_json(namespace)},"timerId":'


_format_now = lru_cache(2)(format_instant)  # many callbacks are sent in the same millisecond
_encode_json = msgspec.json.Encoder().encode


def _json(text: str) -> str:
    return _encode_json(text).decode()


def _traceparent(delivery_id: str, attempt: int) -> str:
    """W3C trace context, computed from the delivery id: all attempts of one delivery are spans of one trace."""
    digest = blake2b(delivery_id.encode("ascii"), digest_size=22).hexdigest()
    return f"00-{digest[:32]}-{digest[32:]}{attempt & 0xFFFF:04x}-01"


def _parse_retry_after(text: str, clock: Clock) -> int | None:
    if text.isascii() and text.isdigit():
        return int(text[:12]) * 1_000
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    if at.tzinfo is None:  # "-0000": UTC, from a sender that does not know its time zone
        at = at.replace(tzinfo=UTC)
    return max(0, round(at.timestamp() * 1_000) - clock.wall_ms())


def _allowed_networks(texts: tuple[str, ...], loopback_allowed: bool) -> tuple[egress.Network, ...]:
    try:
        networks = egress.parse_networks(texts)
    except ValueError as error:
        raise SetupError(f"configuration: delivery.allow_networks: {error}") from None
    return networks + (egress.LOOPBACK if loopback_allowed else ())


def _tls_context(ca_file: str) -> ssl.SSLContext:
    context = ssl.create_default_context()
    try:
        context.load_verify_locations(ca_file)
    except OSError as error:  # SSLError is one
        raise SetupError(f"configuration: delivery.ca_file: {error}") from None
    return context
