"""Readings of the store that many ask for at once."""

from __future__ import annotations

import asyncio
import gc

import pytest

from duetime.single_flight import SingleFlight
from duetime.testing.virtual import VirtualClock, run_virtual


class Reading:
    def __init__(self, pause_s: float = 0.0) -> None:
        self.began: list[float] = []
        self.error: Exception | None = None
        self.ask = SingleFlight(self._read, pause_s=pause_s)

    async def _read(self) -> None:
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        if self.error is not None:
            raise self.error


def test_all_who_ask_before_it_begins_share_one_call_and_who_asks_later_needs_a_newer_one() -> None:
    async def story(clock: VirtualClock) -> None:
        reading = Reading()
        first = [asyncio.ensure_future(reading.ask()) for _ in range(5)]
        await asyncio.sleep(0.5)
        assert reading.began == [0]
        later = [asyncio.ensure_future(reading.ask()) for _ in range(5)]
        await asyncio.gather(*first)
        assert not any(future.done() for future in later)
        await asyncio.gather(*later)
        assert reading.began == [0, 1], "one at a time"

    run_virtual(story)


def test_so_much_lies_between_two_beginnings_and_the_first_does_not_wait() -> None:
    async def story(clock: VirtualClock) -> None:
        reading = Reading(pause_s=1.5)
        for _ in range(3):
            await reading.ask()
        assert reading.began == [0, 1.5, 3]
        await asyncio.sleep(10)
        await reading.ask()
        assert reading.began[3] == 14, "no pause is left"

    run_virtual(story)


def test_one_who_gives_up_does_not_stop_it_for_the_others() -> None:
    async def story(clock: VirtualClock) -> None:
        reading = Reading()
        first, second = asyncio.ensure_future(reading.ask()), asyncio.ensure_future(reading.ask())
        await asyncio.sleep(0.5)
        first.cancel()
        await second
        assert first.cancelled()

    run_virtual(story)


def test_an_error_is_for_those_who_asked_and_if_they_have_gone_for_nobody() -> None:
    async def story(clock: VirtualClock) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        reading = Reading()
        reading.error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            await reading.ask()
        asked = asyncio.ensure_future(reading.ask())
        await asyncio.sleep(0.5)
        asked.cancel()
        await asyncio.sleep(5)
        reading.ask._next = None
        del asked
        gc.collect()
        assert complaints == []
        reading.error = None
        await reading.ask()

    run_virtual(story)


def test_one_that_is_cancelled_itself_is_no_error_either() -> None:
    async def story(clock: VirtualClock) -> None:
        complaints: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        reading = Reading()
        asked = asyncio.ensure_future(reading.ask())
        await asyncio.sleep(0)
        assert reading.ask._next is not None
        reading.ask._next.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert complaints == []

    run_virtual(story)
