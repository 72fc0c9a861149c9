"""Events over NATS JetStream: targets `nats:SUBJECT`. The acknowledgement of the stream is the whole answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from duetime.brokers.envelopes import encode_event
from duetime.brokers.names import is_allowed, message_id
from duetime.brokers.nats import NatsConnection, subject_of
from duetime.brokers.nats_session import NatsSession, not_stored
from duetime.clock import Clock
from duetime.config import Nats
from duetime.delivery import Attempt
from duetime.domain.headers import check_header_form
from duetime.domain.settle import AttemptResult, Contact
from duetime.errors import BrokerAway, SetupError
from duetime.telemetry import Telemetry, log

__all__ = ["NatsDeliverer"]

_SUBJECT_BYTES_MAX = 255
# Tokens of visible ASCII without wildcards.
_SUBJECT = re.compile(r"[!-)+\-/-=?-~]+(?:\.[!-)+\-/-=?-~]+)*")
# NATS acts on headers with the first prefix: one of them, for example, removes all messages of a subject.
_RESERVED_PREFIXES = ("nats-", "duetime-")
# With it nats-py takes an event for a message of the server itself, and its readers never see it.
_RESERVED = frozenset({"status"})

_NOT_SENT = AttemptResult(Contact.NOT_SENT)


class NatsDeliverer:
    """Deliverer for `nats:`."""

    def __init__(self, config: Nats, connection: NatsConnection, clock: Clock, telemetry: Telemetry) -> None:
        self._allowed = config.allow_subjects
        own = (config.command_subject, config.dead_letter_subject) if config.command_subject else ()
        self._own = tuple(subject_of(pattern) for pattern in own)
        self._connection = connection
        self._clock = clock
        self._telemetry = telemetry
        self._bugs_logged: set[type[Exception]] = set()
        telemetry.events_published.add("nats", 0)
        telemetry.event_failures.add("nats", 0)

    def check(self, url: str, namespace: str) -> None:
        subject = _subject(url)
        if len(subject) > _SUBJECT_BYTES_MAX:
            raise ValueError(f'must have a subject of at most {_SUBJECT_BYTES_MAX} bytes after "nats:"')
        if _SUBJECT.fullmatch(subject) is None:
            raise ValueError(
                'must be "nats:" and a subject: tokens of visible ASCII with dots between them, without * and >'
            )
        if subject[0] in "$_":
            raise ValueError("must not be a subject that begins with $ or _: these are reserved for NATS")
        if is_allowed(self._own, subject, ""):
            raise ValueError("must not be a subject of commands or dead letters")
        if not is_allowed(self._allowed, subject, namespace):
            raise ValueError("must be a subject that nats.allow_subjects allows for this namespace")

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        check_header_form(headers)
        for name in headers:
            if name.lower() in _RESERVED or name.lower().startswith(_RESERVED_PREFIXES):
                raise ValueError(f'must not have "{name}", which is reserved for NATS or Duetime')

    def origin(self, url: str) -> str:
        return "nats:"

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        timer = attempt.timer
        try:  # again: the row may be older than a rule
            self.check(timer.callback_url, attempt.namespace.name)
        except ValueError as error:
            return AttemptResult(Contact.REFUSED, error=f"callbackUrl {error}")
        headers = timer.extras.headers or {}
        if headers:
            try:
                self.check_headers(timer.callback_url, headers)
            except ValueError as error:
                return AttemptResult(Contact.REFUSED, error=f"headers {error}")
        session = self._connection.session
        if session is None:
            return AttemptResult(Contact.AWAY, error=f"no connection to NATS: {self._connection.away_reason}")
        reached_at_ms = attempt.begin()
        if reached_at_ms is None:
            return _NOT_SENT
        try:
            result = await self._publish(session, attempt, headers, reached_at_ms)
        except (BrokerAway, SetupError) as error:
            result = AttemptResult(Contact.BROKEN, error=error.detail)
        except Exception as error:  # a bug must not stop other timers from being fired
            if type(error) not in self._bugs_logged:
                self._bugs_logged.add(type(error))
                log.error("unexpected error during delivery; it counts as a failed attempt", exc_info=error)
            result = AttemptResult(Contact.BROKEN, error=f"internal error: {type(error).__name__}")
        if result.contact is Contact.ACCEPTED:
            self._telemetry.events_published.add("nats")
            delay_ms = self._clock.wall_ms() - timer.late_from_ms
            self._telemetry.event_delay_seconds.observe(max(delay_ms, 0) / 1_000)
        else:
            self._telemetry.event_failures.add("nats")
        return result

    async def close(self) -> None:
        """The connection is shared; who made it closes it."""

    async def _publish(
        self, session: NatsSession, attempt: Attempt, timer_headers: Mapping[str, str], reached_at_ms: int
    ) -> AttemptResult:
        timer, namespace = attempt.timer, attempt.namespace
        subject, unique = _subject(timer.callback_url), message_id(timer, namespace)
        body = encode_event(timer, unique, reached_at_ms)
        headers = {
            **timer_headers,
            "Nats-Msg-Id": unique,
            "Duetime-Attempt": str(timer.attempts + 1),
            "Duetime-Fence": attempt.fence,
        }
        # Checked here, because the server closes the connection, which all timers share, if a message is too large.
        # Headers are sent as "NATS/1.0" and a line each.
        size = len(body) + 12 + sum(len(name) + len(value) + 4 for name, value in headers.items())
        if size > session.payload_max:
            return AttemptResult(
                Contact.REFUSED,
                error=f"the event has {size} bytes, and NATS takes {session.payload_max} (its setting max_payload)",
            )
        timeout_s = timer.callback_timeout_seconds or namespace.callback_timeout_seconds
        try:
            reply = await session.request(subject, body, headers=headers, timeout=timeout_s)
        except TimeoutError:
            return AttemptResult(Contact.BROKEN, error=f"no acknowledgement of NATS within {timeout_s:g} s")
        problem = not_stored(reply)
        if problem is not None:
            return AttemptResult(Contact.BROKEN, error=f"{subject}: {problem}")
        return AttemptResult(Contact.ACCEPTED)


def _subject(url: str) -> str:
    return url.partition(":")[2]
