"""Timers with a schedule at a real server that is killed: no occurrence is lost or fired under two ids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract import Asker
from real_server import RealReceiver, RealServer, until, wall_ms

from duetime.domain.instants import format_instant, parse_instant

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def own(tmp_path: Path) -> AsyncIterator[RealServer]:
    server = RealServer(tmp_path)
    await server.start()
    yield server
    await server.close()


async def rows(api: Asker, timer_id: str) -> list[dict[str, Any]]:
    page = await api.ok("timers/list", idPrefix=timer_id, state="delivered", limit=1_000)
    return sorted((t for t in page["timers"]), key=lambda timer: timer["scheduledAt"])


async def test_kill_9_loses_no_occurrence_and_repeats_none_under_another_id(
    own: RealServer, receiver: RealReceiver
) -> None:
    api = Asker(own)
    first_ms = (wall_ms() // 1_000 + 3) * 1_000
    last_ms = first_ms + 11_000
    schedule = {
        "timezone": "UTC",
        "at": format_instant(first_ms)[:19],
        "until": format_instant(last_ms)[:19],
        "repeat": "rrule:FREQ=SECONDLY",
        "catchUp": "all",
    }
    answer = await api.ok("timers/create", timerId="tick", schedule=schedule, callbackUrl=receiver.url)
    assert answer["timer"]["schedule"] == schedule
    assert answer["timer"]["executeAt"] == format_instant(first_ms)
    for _ in range(3):
        await asyncio.sleep(2.3)
        await own.kill()
        await asyncio.sleep(0.7)
        await own.start()

    async def is_over() -> bool:
        return bool((await api.ok("timers/get", timerId="tick"))["timer"]["state"] == "delivered")

    await until(is_over, "the last occurrence is delivered", within_seconds=40)
    expected = [format_instant(at_ms) for at_ms in range(first_ms, last_ms + 1, 1_000)]
    assert [row["scheduledAt"] for row in await rows(api, "tick")] == expected
    assert [row["occurrence"] for row in await rows(api, "tick")] == list(range(1, 13))
    ids: dict[str, set[str]] = {}
    for request, body in zip(receiver.requests, receiver.bodies, strict=True):
        ids.setdefault(body["scheduledAt"], set()).add(request.header(b"webhook-id") or "")
        assert parse_instant(body["firedAt"]) >= parse_instant(body["executeAt"])
    assert sorted(ids) == expected
    assert all(len(of_occurrence) == 1 for of_occurrence in ids.values())
    assert len({next(iter(of_occurrence)) for of_occurrence in ids.values()}) == len(expected)


async def test_a_pause_holds_over_a_restart(own: RealServer, receiver: RealReceiver) -> None:
    api = Asker(own)
    every_second = {"timezone": "Europe/Berlin", "repeat": "cron:* * * * * *"}
    await api.ok("timers/create", timerId="held", schedule=every_second, callbackUrl=receiver.url)
    await receiver.received(1)
    paused = (await api.ok("timers/pause", timerId="held"))["timer"]
    assert paused["paused"] is True
    await own.kill()
    await own.start()
    count = len(receiver.bodies)
    await asyncio.sleep(2.5)
    assert len(receiver.bodies) == count
    resumed = (await api.ok("timers/resume", timerId="held"))["timer"]
    assert "paused" not in resumed
    assert parse_instant(resumed["executeAt"]) > parse_instant(paused["executeAt"]), "the latest that passed"
    await receiver.received(count + 1)
    await api.ok("timers/delete", timerId="held")
