"""PORT: how a timer is delivered. The scheme of its URL selects the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Namespace, Timer

__all__ = ["Attempt", "Deliverer", "Router"]


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
    def check(self, url: str) -> None:
        """Refuse a URL that can never be called, with a ValueError whose text continues after the name of the field."""
        ...

    def destination(self, url: str) -> str:
        """The unit of limits and breakers: URLs with the same destination share them."""
        ...

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        """Make one attempt, in bounded time. Never raises."""
        ...

    async def close(self) -> None: ...


class Router:
    """Selects the deliverer by the scheme of the URL."""

    def __init__(self, by_scheme: Mapping[str, Deliverer]) -> None:
        self._by_scheme = dict(by_scheme)

    def _of(self, url: str) -> Deliverer | None:
        return self._by_scheme.get(url.partition(":")[0].lower())

    def check(self, url: str) -> None:
        deliverer = self._of(url)
        if deliverer is None:
            raise ValueError(f"must be a URL with one of the schemes {', '.join(sorted(self._by_scheme))}")
        deliverer.check(url)

    def destination(self, url: str) -> str:
        deliverer = self._of(url)
        return url if deliverer is None else deliverer.destination(url)

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        deliverer = self._of(attempt.timer.callback_url)
        if deliverer is None:
            return AttemptResult(Contact.REFUSED, error="callbackUrl has a scheme that this server cannot deliver to")
        return await deliverer.deliver(attempt)

    async def close(self) -> None:
        for deliverer in set(self._by_scheme.values()):
            await deliverer.close()
