"""The router: the scheme of a target selects its deliverer, and one that the configuration does not serve fails."""

from __future__ import annotations

import asyncio

import pytest

from duetime.delivery import Attempt, Router
from duetime.domain.settle import Contact
from duetime.domain.timer import Namespace
from duetime.testing import make_timer
from duetime.testing.virtual import VirtualClock, run_virtual

NAMESPACE = Namespace(name="shop", num_shards=1, created_at_ms=0)


def attempt(timer_id: str, url: str) -> Attempt:
    return Attempt(make_timer(timer_id, 0, namespace="shop", callback_url=url), NAMESPACE, "1.1", lambda: 0)


def test_a_target_that_no_section_serves_is_refused_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(_: VirtualClock) -> None:
        router = Router({})
        for number in range(5):
            result = await router.deliver(attempt(f"t{number}", "nats:timers.events.shop"))
            assert (result.contact, result.error) == (
                Contact.REFUSED,
                "callbackUrl: no section of the configuration serves targets nats:…",
            )
        assert lines() == [
            "timer 't0' of namespace 'shop' fails: no section of the configuration serves its target nats:…"
        ]
        await asyncio.sleep(61)
        await router.deliver(attempt("later", "kafka:events"))
        assert lines()[1:] == [
            "timer 'later' of namespace 'shop' fails: no section of the configuration serves its target kafka:… (4 "
            "more timers since the last such line)"
        ]

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    run_virtual(scenario)
