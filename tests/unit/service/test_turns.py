"""Turns between namespaces."""

from __future__ import annotations

import asyncio

from duetime.service.turns import Turns


async def take(turns: Turns, namespace: str, name: str, order: list[str]) -> None:
    async with turns.turn(namespace):
        order.append(name)
        await asyncio.sleep(0)


async def test_namespaces_get_turns_and_callers_of_one_namespace_keep_their_order() -> None:
    turns, order = Turns(), list[str]()
    calls = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("a", "a4"), ("b", "b1"), ("b", "b2"), ("c", "c1")]
    await asyncio.gather(*(take(turns, namespace, name, order) for namespace, name in calls))
    assert order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]


async def test_a_free_turn_is_taken_without_waiting() -> None:
    turns, order = Turns(), list[str]()
    for name in ("a1", "a2"):
        await take(turns, "a", name, order)
    assert order == ["a1", "a2"]


async def test_a_cancelled_caller_takes_no_turn_and_blocks_nobody() -> None:
    turns, order = Turns(), list[str]()
    async with turns.turn("a"):
        waiting = asyncio.ensure_future(take(turns, "a", "a2", order))
        last = asyncio.ensure_future(take(turns, "b", "b1", order))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
    await last
    assert order == ["b1"]


async def test_a_caller_that_is_cancelled_as_it_gets_its_turn_passes_it_on() -> None:
    turns, order = Turns(), list[str]()
    async with turns.turn("a"):
        waiting = asyncio.ensure_future(take(turns, "a", "a2", order))
        last = asyncio.ensure_future(take(turns, "b", "b1", order))
        await asyncio.sleep(0)
    waiting.cancel()  # it has got the turn, and has not run since
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    await last
    assert order == ["b1"]
