"""PORT: how a timer is delivered. The scheme of its target URL picks the adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import Namespace, Timer

__all__ = ["Attempt", "Deliverer", "Router"]


class Attempt(Struct, frozen=True, gc=False):
    """One try at delivering a timer.

    `begin` is called right before the first byte leaves. It answers the wall time to stamp on the
    request, or None if the attempt must not be made any more (lease over, shard lost, timer changed):
    then nothing is sent and the outcome is NOT_SENT. From a `begin` that answered a time on, the timer
    counts as in flight.
    """

    timer: Timer
    namespace: Namespace
    fence: str  # "shard.version": grows with every change of owner, so that receivers can spot a zombie
    begin: Callable[[], int | None]


class Deliverer(Protocol):
    def check(self, url: str) -> None:
        """Refuse a target that can never be called, with a ValueError that reads on after the field's name."""
        ...

    def destination(self, url: str) -> str:
        """What caps and breakers count by: targets with the same destination share its fate."""
        ...

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        """Make one attempt, in bounded time. Never raises."""
        ...

    async def close(self) -> None: ...


class Router:
    """The Deliverer of Deliverers: picks by the scheme of the URL."""

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
            return AttemptResult(Contact.REFUSED, error="no deliverer for this target's scheme")
        return await deliverer.deliver(attempt)

    async def close(self) -> None:
        for deliverer in set(self._by_scheme.values()):
            await deliverer.close()
