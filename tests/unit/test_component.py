"""The parts of an instance: they begin in order and end in two passes, whatever one of them does."""

from __future__ import annotations

import asyncio

import pytest

from duetime.component import Components, Part, Step
from duetime.telemetry import log


def noted(story: list[str], name: str) -> Part:
    def step(verb: str) -> Step:
        async def run() -> None:
            story.append(f"{verb} {name}")

        return run

    return Part(name, start=step("start"), drain=step("drain"), stop=step("stop"))


async def test_parts_begin_in_order_and_all_drain_before_the_first_stops() -> None:
    story: list[str] = []
    parts = Components(seconds_to_end=10)
    for name in ("store", "engine", "listener"):
        await parts.begin(noted(story, name))
    assert await parts.end()
    assert story == [
        *("start store", "start engine", "start listener"),
        *("drain listener", "drain engine", "drain store"),
        *("stop listener", "stop engine", "stop store"),
    ]
    await parts.end()
    assert len(story) == 9  # once


async def test_a_part_whose_start_fails_is_ended_and_those_after_it_never_began() -> None:
    story: list[str] = []
    parts = Components(seconds_to_end=10)

    async def fail() -> None:
        raise ZeroDivisionError

    async def stop() -> None:
        story.append("stop engine")

    await parts.begin(noted(story, "store"))
    with pytest.raises(ZeroDivisionError):
        await parts.begin(Part("engine", start=fail, stop=stop))
    await parts.end()
    assert story == ["start store", "drain store", "stop engine", "stop store"]


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), TimeoutError("of its own")])
async def test_an_error_of_one_part_does_not_keep_the_others_from_ending(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    story: list[str] = []
    parts = Components(seconds_to_end=10)

    async def fail() -> None:
        raise error

    await parts.begin(noted(story, "store"))
    await parts.begin(Part("engine", drain=fail, stop=fail))
    assert not await parts.end()
    assert story == ["start store", "drain store", "stop store"]
    assert "cannot drain engine: the others go on" in caplog.text
    assert "cannot stop engine: the others go on" in caplog.text


async def test_a_part_that_does_not_end_is_cancelled_at_its_deadline(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "propagate", True)
    story: list[str] = []
    parts = Components(seconds_to_end=0.01)

    async def hang() -> None:
        await asyncio.Event().wait()

    await parts.begin(noted(story, "store"))
    await parts.begin(Part("engine", drain=hang))
    assert not await parts.end()
    assert story == ["start store", "drain store", "stop store"]
    assert "engine did not drain within 0 s: the others go on" in caplog.text


async def test_the_first_reason_why_the_instance_cannot_serve_is_told() -> None:
    parts = Components(seconds_to_end=10)
    reasons: dict[str, str | None] = {"store": None, "engine": None}
    for name in reasons:
        await parts.begin(Part(name, not_ready=lambda name=name: reasons[name]))  # type: ignore[misc]
    assert parts.not_ready() is None
    reasons["engine"] = "the lease has run out"
    assert parts.not_ready() == "the lease has run out"
    reasons["store"] = "away"
    assert parts.not_ready() == "away"


async def test_while_the_parts_end_their_reasons_are_still_told() -> None:
    parts = Components(seconds_to_end=10)
    told: list[str | None] = []

    async def drain() -> None:
        told.append(parts.not_ready())

    await parts.begin(Part("engine", drain=drain, not_ready=lambda: "stopping"))
    await parts.end()
    assert told == ["stopping"]


async def test_the_part_that_failed_is_named() -> None:
    parts = Components(seconds_to_end=10)
    store, engine = asyncio.Event(), asyncio.Event()
    await parts.begin(Part("nothing that fails"))
    await parts.begin(Part("store", failed=store))
    await parts.begin(Part("engine", failed=engine))
    waiting = asyncio.ensure_future(parts.until_failed())
    await asyncio.sleep(0)
    assert not waiting.done()
    engine.set()
    assert await waiting == "engine"
