"""For tests, of Duetime and of its users: example timers, and `duetime.testing.conformance` for store adapters.

This module needs nothing but Duetime; the conformance suite needs pytest, pytest-asyncio and hypothesis.
"""

from __future__ import annotations

from typing import Any

from duetime.domain.timer import Outcome, Reached, Timer, uuid_of

__all__ = ["make_reached", "make_timer"]


def make_timer(timer_id: str = "timer", execute_at_ms: int = 1_800_000_000_000, **changes: Any) -> Timer:
    """A timer as the service stores it; `changes` are fields of Timer."""
    namespace = changes.pop("namespace", "test")
    uuid_high, uuid_low = uuid_of(namespace, timer_id)
    fields: dict[str, Any] = {
        "uuid_high": uuid_high,
        "uuid_low": uuid_low,
        "generation": 1,
        "scheduled_at_ms": execute_at_ms,
        "created_at_ms": 1_700_000_000_000,
        "callback_url": "https://receiver.example/hook",
    }
    return Timer(namespace=namespace, timer_id=timer_id, execute_at_ms=execute_at_ms, **(fields | changes))


def make_reached(timer: Timer, outcome: Outcome = Outcome.DELIVERED, **changes: Any) -> Reached:
    """A reached timer, reached when it was due, to be purged a day later."""
    fields: dict[str, Any] = {
        "reached_at_ms": timer.execute_at_ms,
        "purge_at_ms": timer.execute_at_ms + 86_400_000,
    }
    return Reached(timer=timer, outcome=outcome, **(fields | changes))
