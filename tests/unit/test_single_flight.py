"""Calls that many callers ask for at the same time."""

from __future__ import annotations

import asyncio
import gc

import pytest

from duetime.single_flight import SingleFlight
from duetime.testing.virtual import VirtualClock, run_virtual


class CountedCall:
    def __init__(self, pause_s: float = 0.0) -> None:
        self.began: list[float] = []
        self.error: Exception | None = None
        self.ask = SingleFlight(self._read, pause_s=pause_s)

    async def _read(self) -> None:
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error


def test_callers_that_ask_before_a_call_begins_share_it_and_later_ones_get_the_next() -> None:
    async def scenario(clock: VirtualClock) -> None:
        call = CountedCall()
        first = [asyncio.ensure_future(call.ask()) for _ in range(5)]
        await asyncio.sleep(0.5)
        assert call.began == [0]
        later = [asyncio.ensure_future(call.ask()) for _ in range(5)]
        await asyncio.gather(*first)
        assert not any(future.done() for future in later)
        await asyncio.gather(*later)
        assert call.began == [0, 1], "one at a time"

    run_virtual(scenario)


def test_calls_begin_at_least_the_pause_apart_and_the_first_does_not_wait() -> None:
    async def scenario(clock: VirtualClock) -> None:
        call = CountedCall(pause_s=1.5)
        for _ in range(3):
            await call.ask()
        assert call.began == [0, 1.5, 3]
        await asyncio.sleep(10)
        await call.ask()
        assert call.began[3] == 14, "no pause is left"

    run_virtual(scenario)


def test_a_cancelled_caller_does_not_cancel_the_call_for_the_others() -> None:
    async def scenario(clock: VirtualClock) -> None:
        call = CountedCall()
        first, second = asyncio.ensure_future(call.ask()), asyncio.ensure_future(call.ask())
        await asyncio.sleep(0.5)
        first.cancel()
        await second
        assert first.cancelled()

    run_virtual(scenario)


def test_an_error_is_given_to_the_callers_and_not_logged_if_all_were_cancelled() -> None:
    async def scenario(clock: VirtualClock) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        call = CountedCall()
        call.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await call.ask()
        asked = asyncio.ensure_future(call.ask())
        await asyncio.sleep(0.5)
        asked.cancel()
        await asyncio.sleep(5)
        call.ask._next = None
        del asked
        gc.collect()
        assert complaints == []
        call.error = None
        await call.ask()

    run_virtual(scenario)


def test_a_call_that_is_cancelled_is_not_logged_as_error() -> None:
    async def scenario(clock: VirtualClock) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        call = CountedCall()
        asked = asyncio.ensure_future(call.ask())
        await asyncio.sleep(0)
        assert call.ask._next is not None
        call.ask._next.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert complaints == []

    run_virtual(scenario)
