"""A store that fails on demand: wraps any Store and injects faults into chosen calls.

store = FaultyStore(MemoryStore())
store.fail("commit", Fault.APPLIED_THEN_UNKNOWN)      # the next commit only
store.hold("commit")                                   # commits wait until released
"""

from __future__ import annotations

import asyncio
import enum
from collections import defaultdict, deque
from typing import Any, cast

from duetime.errors import OutcomeUnknown, StoreThrottled, StoreUnavailable
from duetime.store import Store

__all__ = ["Fault", "FaultyStore"]


class Fault(enum.Enum):
    UNAVAILABLE = "not applied, and the caller knows"
    THROTTLED = "not applied, the store is overloaded"
    LOST_THEN_UNKNOWN = "not applied, unknown to the caller"
    APPLIED_THEN_UNKNOWN = "applied, but the answer was lost"
    BROKEN = "an error that the adapter does not handle"


class FaultyStore:
    """Has the methods of the store it wraps; `as_store` tells that to a type checker."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._faults: dict[str, deque[Fault]] = defaultdict(deque)
        self._held: dict[str, asyncio.Event] = {}
        self.calls: dict[str, int] = defaultdict(int)

    @property
    def as_store(self) -> Store:
        return cast(Store, self)

    def fail(self, method: str, *faults: Fault) -> None:
        """The next calls of `method` fail, one with each of these faults."""
        self._faults[method].extend(faults)

    def heal(self) -> None:
        self._faults.clear()

    def hold(self, method: str) -> asyncio.Event:
        """Calls of `method` wait until the returned event is set."""
        self._held[method] = asyncio.Event()
        return self._held[method]

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._store, name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if name in self._held:
                await self._held[name].wait()
            faults = self._faults.get(name)
            fault = faults.popleft() if faults else None
            if fault is Fault.UNAVAILABLE:
                raise StoreUnavailable("injected")
            if fault is Fault.THROTTLED:
                raise StoreThrottled("injected")
            if fault is Fault.LOST_THEN_UNKNOWN:
                raise OutcomeUnknown("injected")
            if fault is Fault.BROKEN:
                raise ZeroDivisionError("injected")
            answer = await inner(*args, **kwargs)
            if fault is Fault.APPLIED_THEN_UNKNOWN:
                raise OutcomeUnknown("injected")
            return answer

        return call
