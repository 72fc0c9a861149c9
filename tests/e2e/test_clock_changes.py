"""Wall clocks that are set forwards and back under a real server: cases 7 and 8.

What case 7 can mean on one machine. A jump of the clock is not believed until the database's clock agrees. Where
the database is on another machine, a clock that jumped alone is found out, and nothing fires early. With SQLite the
"database's clock" is this machine's own: if that is set, both agree, and what the machine now says is the time *is*
the time; no program on it could know better. So both are tested: `duetime` moves the server's clock alone while its
store keeps the true time, as a database elsewhere would; `machine` moves both, as setting the clock here does.

The clock is injected into the real process by shifted_server.py. Receiver and clients keep the true time.
"""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from contract import Asker, ended, exists
from load_clients import Load
from real_server import RealReceiver, RealServer, until, wall_ms
from scripts.gate.seeds import new_seed

from duetime.domain.instants import format_instant, parse_instant
from duetime.testing.checker import Result

HOUR_MS = 3_600_000
STEPS = 12
PROGRAM = str(Path(__file__).with_name("shifted_server.py"))
# Long enough between heartbeats to look at what happens before the database's clock was asked.
SLOW_HEARTBEAT = {
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "2500ms",
    "DUETIME_ENGINE_LEASE": "6s",
    "DUETIME_ENGINE_DEAD_AFTER": "7s",
}
QUICK_HEARTBEAT = {
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "100ms",
    "DUETIME_ENGINE_LEASE": "600ms",
    "DUETIME_ENGINE_DEAD_AFTER": "800ms",
}
HEARTBEATS = 'duetime_heartbeats_total{result="ok"}'


class ShiftedServer(RealServer):
    """A real server whose clocks can be set."""

    def __init__(self, folder: Path, settings: dict[str, str]) -> None:
        super().__init__(folder, program=(PROGRAM, str(folder)))
        self.settings.update(settings)
        self.set_machine(0)

    def set_machine(self, offset_ms: int) -> None:
        """Both clocks at once, as far as two files can be."""
        self._set("store", offset_ms)
        self._set("duetime", offset_ms)

    def set_duetime(self, offset_ms: int) -> None:
        self._set("duetime", offset_ms)

    def set_either(self, which: str, offset_ms: int) -> None:
        self.set_machine(offset_ms) if which == "machine" else self.set_duetime(offset_ms)

    def _set(self, name: str, offset_ms: int) -> None:
        new = self.folder / f"{name}.new"
        new.write_text(str(offset_ms))
        os.replace(new, self.folder / name)

    async def heartbeats_pass(self, count: int = 2) -> None:
        """Of two, the second began after the call."""
        enough = await self.metric(HEARTBEATS) + count

        async def have_passed() -> bool:
            return await self.metric(HEARTBEATS) >= enough

        await until(have_passed, f"{count} heartbeats")


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest_asyncio.fixture
async def server(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ShiftedServer]:
    server = ShiftedServer(tmp_path, getattr(request, "param", QUICK_HEARTBEAT))
    await server.start()
    yield server
    assert await server.stop() == 0
    assert "Traceback" not in server.log.read_text()
    await server.close()


async def create(server: RealServer, timer_id: str, due_ms: int, url: str) -> None:
    body = {"timerId": timer_id, "executeAt": format_instant(due_ms), "callbackUrl": url}
    status, answer = await server.call("timers/create", body)
    assert status == 200, answer


@pytest.mark.parametrize("server", [SLOW_HEARTBEAT], indirect=True)
async def test_case_7_a_clock_that_jumps_ahead_of_the_databases_fires_nothing_early(
    server: ShiftedServer, receiver: RealReceiver
) -> None:
    # Within the horizon, so in memory and a matter of the clock alone.
    for n in range(3):
        await create(server, f"before {n}", wall_ms() + 40_000, receiver.url)
    await server.heartbeats_pass(1)
    server.set_duetime(3 * HOUR_MS)

    # Until the next heartbeat it goes on by the time it knew, and neither fires early nor stands still.
    soon_ms = wall_ms() + 200
    await create(server, "soon", soon_ms, receiver.url)
    for n in range(3):
        await create(server, f"after {n}", wall_ms() + 40_000, receiver.url)
    await receiver.received(1)
    assert [call.timer for call in receiver.callbacks] == ["soon"]
    assert receiver.callbacks[0].seen_at_ms >= soon_ms

    # Then the database has told, and it fires nothing at all.
    async def is_found_out() -> bool:
        return "ms off the database's" in (await server.not_ready() or "")

    await until(is_found_out, "the jump is found out")
    overdue_ms = wall_ms()
    await create(server, "overdue", overdue_ms, receiver.url)
    await server.heartbeats_pass()
    assert len(receiver.bodies) == 1

    # And when the clock is right again, it goes on.
    server.set_duetime(0)
    await server.ready()
    await receiver.received(2)
    assert [call.timer for call in receiver.callbacks] == ["soon", "overdue"]
    assert receiver.callbacks[1].seen_at_ms >= overdue_ms

    async def the_others_are_left() -> bool:  # once the outcome of the last one is on record
        status, page = await server.call("timers/list", {"state": "scheduled"})
        return status == 200 and len(page["timers"]) == 6

    await until(the_others_are_left, "all but the two that fired are scheduled")


async def test_case_7_a_machine_whose_clock_is_set_ahead_fires_what_is_due_by_it_and_nothing_else(
    server: ShiftedServer, receiver: RealReceiver
) -> None:
    start_ms = wall_ms()
    for name, due_ms in (
        ("in memory", start_ms + 40_000),
        ("on disk", start_ms + HOUR_MS // 2),
        ("later", start_ms + 2 * HOUR_MS),
    ):
        await create(server, name, due_ms, receiver.url)
    server.set_machine(HOUR_MS)
    await receiver.received(2)
    await server.heartbeats_pass()
    assert [body["timerId"] for body in receiver.bodies] == ["in memory", "on disk"]
    for body in receiver.bodies:
        assert parse_instant(body["firedAt"]) >= start_ms + HOUR_MS, "by the clock as it is now"
    assert (await Asker(server).timer(timerId="later"))["state"] == "scheduled"
    assert await server.not_ready() is None


async def test_case_8_a_machine_whose_clock_is_set_back_lets_timers_wait_and_loses_none(
    server: ShiftedServer, receiver: RealReceiver
) -> None:
    api = Asker(server)
    due_ms = wall_ms() + 500
    await create(server, "in memory", due_ms, receiver.url)
    server.set_machine(-HOUR_MS)
    await create(server, "on disk", due_ms + 1, receiver.url)  # an hour ahead, by the clock as it is now
    await create(server, "now", wall_ms() - HOUR_MS, receiver.url)
    await create(server, "due in the time that comes twice", due_ms - HOUR_MS + 500, receiver.url)
    await receiver.received(2)  # the second of them after what would have been the time of the others
    assert [body["timerId"] for body in receiver.bodies] == ["now", "due in the time that comes twice"]
    assert await server.not_ready() is None
    for name in ("in memory", "on disk"):
        assert await exists(api, timerId=name)
        assert (await api.timer(timerId=name))["state"] == "scheduled"
    server.set_machine(0)
    await receiver.received(4)
    assert [body["timerId"] for body in receiver.bodies[2:]] == ["in memory", "on disk"]
    for name in ("in memory", "on disk", "now"):
        assert (await ended(api, timerId=name))["state"] == "delivered"


@pytest.mark.parametrize("which", ["machine", "duetime"])
async def test_case_8_a_clock_that_is_set_again_and_again_under_load_loses_nothing_and_fires_nothing_early(
    server: ShiftedServer, receiver: RealReceiver, which: str
) -> None:
    """Small steps, as a time server makes them, and now and then an hour and back.

    Never ahead of the true time, by which clients and receiver judge: so every jump forwards only goes back to
    what is right, and nothing at all may be early.
    """
    seed = new_seed()
    rng = random.Random(seed)
    load = Load(server, receiver, rng)
    async with load.running():
        for step in range(STEPS):
            server.set_either(which, -HOUR_MS if step % 4 == 3 else -rng.randint(0, 400))
            await server.heartbeats_pass()
            await load.acknowledged(rng.randint(1, 100))
        server.set_either(which, 0)
        await server.ready()
        await load.acknowledged(50)
    await load.until_nothing_is_scheduled()
    # A clock that differs from the database's is corrected by it, which docs/concepts/guarantees.md limits to 5 ms.
    load.judge(seed, clock_error_ms=5 if which == "duetime" else 0)
    assert load.results[Result.INFO] == 0
    assert len(receiver.callbacks) > STEPS * 20
