"""Callbacks over HTTP: the request, its signature, and the attempt result for each answer.

http/client.py has the connections, egress.py the addresses, signing.py the signatures. What depends only on the URL or
the namespace is computed once and cached, because millions of timers share a few of them.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from datetime import UTC
from email.utils import parsedate_to_datetime
from hashlib import blake2b
from typing import TypeVar

import msgspec
from msgspec import Struct

from duetime import __version__, signing
from duetime.clock import Clock
from duetime.config import Config
from duetime.deliveries import egress
from duetime.delivery import Attempt
from duetime.domain.headers import check_headers, is_header_value
from duetime.domain.instants import format_instant
from duetime.domain.settle import ANSWER_BYTES_MAX, AttemptResult, Contact
from duetime.domain.timer import Namespace, Timer
from duetime.errors import AddressRefused, HttpError, SetupError
from duetime.http.client import Answer, HttpClient
from duetime.http.urls import Target, parse_target, request_head
from duetime.telemetry import log

__all__ = ["Webhook"]

# Entries of each of the caches below. A full cache is cleared, which costs less than keeping an order.
_CACHED_MAX = 4_096

_NOT_SENT = AttemptResult(Contact.NOT_SENT)

K = TypeVar("K")
V = TypeVar("V")

# --- the deliverer -------------------------------------------------------------------------------


class _ParsedUrl(Struct, frozen=True):
    """A URL that may be called, and the part of the request that depends only on the URL."""

    target: Target
    head: str


class Webhook:
    """Deliverer for http and https. `loopback_allowed`: this server itself listens on loopback only."""

    def __init__(
        self, config: Config, clock: Clock, *, loopback_allowed: bool, resolver: egress.Resolver | None = None
    ):
        delivery = config.delivery
        self._clock = clock
        self._http_allowed = delivery.allow_http
        self._allowed = _allowed_networks(delivery.allow_networks, loopback_allowed)
        self._resolver = resolver or egress.Resolver(self._allowed)
        self._client = HttpClient(
            resolve=self._resolver,
            ssl_context=_tls_context(delivery.ca_file) if delivery.ca_file else None,
            connect_timeout_ms=delivery.connect_timeout.ms,
            body_bytes_max=ANSWER_BYTES_MAX,
            connections_max=delivery.concurrency_max,
        )
        self._our_headers = {
            "content-type": "application/json",
            "user-agent": f"{delivery.user_agent}/{__version__}",
        }
        if not is_header_value(self._our_headers["user-agent"]):
            raise SetupError("configuration: delivery.user_agent must be visible ASCII")
        self._parsed: dict[str, _ParsedUrl | str] = {}
        self._keys: dict[tuple[str, ...], tuple[bytes, ...]] = {}
        self._bugs_logged: set[type[Exception]] = set()

    def check(self, url: str) -> None:
        parsed = self._parsed.get(url) or self._parse(url)
        if isinstance(parsed, str):
            raise ValueError(parsed)

    def destination(self, url: str) -> str:
        parsed = self._parsed.get(url) or self._parse(url)
        return url if isinstance(parsed, str) else parsed.target.origin

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        timer = attempt.timer
        parsed = self._parsed.get(timer.callback_url) or self._parse(timer.callback_url)
        if isinstance(parsed, str):
            return AttemptResult(Contact.REFUSED, error=f"callbackUrl {parsed}")
        began = False

        def begin() -> bytes | None:
            nonlocal began
            fired_at_ms = attempt.begin()
            if fired_at_ms is None:
                return None
            began = True
            return self._request(parsed.head, attempt, fired_at_ms)

        timeout_s = timer.callback_timeout_seconds or attempt.namespace.callback_timeout_seconds
        try:
            answer = await self._client.send(parsed.target, begin, timeout_ms=timeout_s * 1_000)
        except Exception as error:  # `deliver` never raises (delivery.py)
            return self._failure(error)
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

    def _failure(self, error: Exception) -> AttemptResult:
        if isinstance(error, HttpError):
            return AttemptResult(Contact.BROKEN, error=error.reason)
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

    # the request

    def _request(self, head: str, attempt: Attempt, fired_at_ms: int) -> bytes:
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
            f"{head}webhook-id: {delivery_id}\r\nwebhook-timestamp: {timestamp_s}\r\nidempotency-key: {delivery_id}\r\n"
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

    def _parse(self, url: str) -> _ParsedUrl | str:
        """The parsed URL, or what is wrong with it."""
        try:
            target = parse_target(url)
            self._check_policy(target)
            parsed: _ParsedUrl | str = _ParsedUrl(
                target, request_head("POST", target, self._our_headers).decode("ascii")
            )
        except ValueError as error:
            parsed = str(error)
        _keep(self._parsed, url, parsed)
        return parsed

    def _check_policy(self, target: Target) -> None:
        if not target.tls and not self._http_allowed:
            raise ValueError("must start with https://: this server does not allow plain http (delivery.allow_http)")
        address = egress.literal_address(target.host)
        if address is None and target.host.removesuffix(".").split(".")[-1] == "localhost":
            address = egress.LOOPBACK[0].network_address
        if address is not None and (reason := egress.refusal(address, self._allowed)):
            raise ValueError(f"must not point at {address}, {reason} (delivery.allow_networks)")


def _keep(cache: dict[K, V], key: K, value: V) -> None:
    if len(cache) >= _CACHED_MAX:
        cache.clear()
    cache[key] = value


def _header_lines(headers: Mapping[str, str]) -> str:
    """Headers were checked when the timer was created. Rows may be older than a rule: then all are left out."""
    try:
        check_headers(headers)
    except ValueError:
        return ""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _body(timer: Timer, fired_at_ms: int) -> bytes:
    """The payload is inserted byte for byte as it was received: the create has checked that it is JSON."""
    correlation = "null" if timer.correlation_id is None else _json(timer.correlation_id)
    return (
        f'{{"namespace":{_json(timer.namespace)},"timerId":{_json(timer.timer_id)},'
        f'"executeAt":"{format_instant(timer.scheduled_at_ms)}","firedAt":"{format_instant(fired_at_ms)}",'
        f'"attempt":{timer.attempts + 1},"payload":{timer.payload or "null"},"correlationId":{correlation}}}'
    ).encode()


def _json(text: str) -> str:
    return msgspec.json.encode(text).decode()


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
