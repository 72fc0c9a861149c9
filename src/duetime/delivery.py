"""PORT: how a timer is delivered. The scheme of its URL selects the adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, Protocol

from msgspec import Struct

from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Namespace, Timer
from duetime.telemetry import log

__all__ = ["Attempt", "Deliverer", "Router"]

_LOG_PAUSE_SECONDS: Final = 60.0
_SCHEME_CHARS_MAX: Final = 30


class Attempt(Struct, frozen=True, gc=False):
    """One attempt to deliver a timer.

    `begin` is called right before the first byte is sent. It returns the wall time for the request, or None if the
    attempt must not be made any more (the lease has ended, the shard was lost, the timer has changed): then nothing is
    sent and the result is NOT_SENT. From the time that `begin` returned a time, the timer is in flight.
    """

    timer: Timer
    namespace: Namespace
    fence: str  # "shard.version": grows with every change of owner, so that receivers can detect a former owner
    begin: Callable[[], int | None]


class Deliverer(Protocol):
    def check(self, url: str, namespace: str) -> None:
        """Refuse a URL that timers of this namespace may never have as target, with a ValueError whose text continues
        after the name of the field."""
        ...

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        """Refuse headers that a timer with this URL must not have, as `check`."""
        ...

    def origin(self, url: str) -> str:
        """The origin of the URL: URLs of one origin share its limit of calls and what is known of whether it can be
        reached."""
        ...

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        """Make one attempt, in bounded time. Never raises."""
        ...

    async def close(self) -> None: ...


class Router:
    """Selects the deliverer by the scheme of the URL."""

    def __init__(self, by_scheme: Mapping[str, Deliverer]) -> None:
        self._by_scheme = dict(by_scheme)
        self._unserved = _UnservedLog()

    def _of(self, url: str) -> Deliverer | None:
        scheme = url.partition(":")[0]
        return self._by_scheme.get(scheme) or self._by_scheme.get(scheme.lower())

    def check(self, url: str, namespace: str) -> None:
        deliverer = self._of(url)
        if deliverer is None:
            raise ValueError(f"must be a URL with one of the schemes {', '.join(sorted(self._by_scheme))}")
        deliverer.check(url, namespace)

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        deliverer = self._of(url)
        if deliverer is not None:
            deliverer.check_headers(url, headers)

    def origin(self, url: str) -> str:
        deliverer = self._of(url)
        return url if deliverer is None else deliverer.origin(url)

    def deliver(self, attempt: Attempt) -> Coroutine[Any, Any, AttemptResult]:
        """Not a coroutine of its own, which would cost more than what it does."""
        deliverer = self._of(attempt.timer.callback_url)
        return self._refused(attempt) if deliverer is None else deliverer.deliver(attempt)

    async def _refused(self, attempt: Attempt) -> AttemptResult:
        scheme = attempt.timer.callback_url.partition(":")[0]
        self._unserved.refused(attempt.timer, scheme)
        return AttemptResult(
            Contact.REFUSED, error=f"callbackUrl: no section of the configuration serves targets {scheme}:…"
        )

    async def close(self) -> None:
        for deliverer in set(self._by_scheme.values()):
            await deliverer.close()


class _UnservedLog:
    """At most a line each minute, with a timer as an example: thousands may fail for the same reason."""

    def __init__(self) -> None:
        self._log_at = 0.0
        self._more = 0

    def refused(self, timer: Timer, scheme: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._log_at:
            self._more += 1
            return
        more = f" ({self._more} more timers since the last such line)" if self._more else ""
        self._log_at, self._more = now + _LOG_PAUSE_SECONDS, 0
        log.error(
            "timer %r of namespace %r fails: no section of the configuration serves its target %s:…%s",
            timer.timer_id,
            timer.namespace,
            scheme[:_SCHEME_CHARS_MAX],
            more,
        )
