"""The disk fills up under a real server, and has room again: case 23.

The SQLite file lives on a file system of 32 MiB in memory, which a filler file fills to the last byte. That
needs root, or sudo without a password; where there is neither the tests are skipped, but not in CI.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from contract import FAR
from load_clients import Load
from real_server import RealReceiver, RealServer, free_port, serve_in_vain, until
from scripts.gate.seeds import new_seed

ROUNDS = 3
DISK_BYTES = 32 * 1024 * 1024
PAGE_BYTES = 4_096  # of a tmpfs, and of the database
# Frames of the log that its index has room for before the index has to grow: 4,096 less what its header takes.
FIRST_FRAMES = 4_062
FRAME_BYTES = PAGE_BYTES + 24
QUICK = {
    "DUETIME_ENGINE_LEASE": "600ms",
    "DUETIME_ENGINE_HEARTBEAT_INTERVAL": "150ms",
    "DUETIME_ENGINE_DEAD_AFTER": "800ms",
    "DUETIME_ENGINE_WRITE_TIMEOUT": "500ms",
    "DUETIME_SERVER_DRAIN_TIMEOUT": "500ms",
}


class SmallDisk:
    """A directory with a file system of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    @property
    def file(self) -> Path:
        return self.folder / "timers.db"

    @property
    def log_bytes(self) -> int:
        return Path(f"{self.file}-wal").stat().st_size

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Until the file system itself says that there is no room: the server may be writing at the same time."""
        with self._filler.open("ab", buffering=0) as filler:
            if leave_bytes:
                room = os.statvfs(self.folder)
                os.posix_fallocate(filler.fileno(), filler.tell(), room.f_bavail * room.f_frsize - leave_bytes)
                return
            for chunk_bytes in (1 << 20, PAGE_BYTES, 1):
                with contextlib.suppress(OSError):
                    while True:
                        filler.write(bytes(chunk_bytes))

    def free(self) -> None:
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    sudo = [] if os.geteuid() == 0 else ["sudo", "--non-interactive"]
    options = f"size={DISK_BYTES},mode=0777"
    try:
        subprocess.run([*sudo, "mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"CASE 23 IS NOT TESTED: mounting a small file system needs root ({error})")
    yield SmallDisk(folder)
    subprocess.run([*sudo, "umount", folder], check=True)


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[RealReceiver]:
    receiver = RealReceiver()
    await receiver.start()
    yield receiver
    await receiver.close()


@pytest_asyncio.fixture
async def server(tmp_path: Path, disk: SmallDisk) -> AsyncIterator[RealServer]:
    """Its log is not on the small disk."""
    server = RealServer(tmp_path, file=disk.file)
    server.settings.update(QUICK)
    await server.start()
    yield server
    await server.close()


async def _stops_firing(server: RealServer, receiver: RealReceiver) -> None:
    """The lease has run out and what was in flight has landed; then nothing more comes."""

    async def is_at_rest() -> bool:
        reason = await server.not_ready() or ""
        return ("disk is full" in reason or "disk reports an error" in reason) and await server.metric(
            "duetime_deliveries_in_flight"
        ) == 0

    await until(is_at_rest, "no lease, nothing in flight")
    count = len(receiver.callbacks)
    # Some more heartbeats and commits that fail: by how often the server tries, not by how long we wait.
    failed = await server.metric('duetime_heartbeats_total{result="failed"}')

    async def has_tried_again() -> bool:
        return await server.metric('duetime_heartbeats_total{result="failed"}') >= failed + 5

    await until(has_tried_again, "five more heartbeats have failed")
    assert len(receiver.callbacks) == count


async def test_case_23_a_full_disk_refuses_clearly_stops_firing_and_recovers_when_space_returns(
    server: RealServer, receiver: RealReceiver, disk: SmallDisk
) -> None:
    seed = new_seed()
    load = Load(server, receiver, random.Random(seed))
    async with load.running():
        for _ in range(ROUNDS):
            await load.acknowledged(150)
            disk.fill()
            await _stops_firing(server, receiver)
            body = {"timerId": "refused", "delay": "0s", "callbackUrl": receiver.url}
            status, problem = await server.call("timers/create", body)
            assert (status, problem["code"]) == (503, "not_applied")
            assert "the disk is full" in problem["detail"]
            assert (await server.call("timers/list", {"limit": 1}))[0] == 200, "reads go on"
            disk.free()
            await server.ready()
            await load.acknowledged(150)
    await load.until_nothing_is_scheduled()
    assert (await server.call("timers/get", {"timerId": "refused"}))[0] == 404
    assert await server.stop() == 0
    load.judge(seed)
    # The process lived on, so it knew what it had delivered.
    [(value, times)] = Counter(call.value for call in receiver.callbacks).most_common(1)
    assert times == 1, f"{value} was delivered {times} times"
    said = server.log.read_text()
    assert "Traceback" not in said
    assert said.count("the disk is full") <= ROUNDS * 3, "a trouble that lasts is not said with every try"
    assert said.count("commits are applied again") == said.count("heartbeats succeed again") == ROUNDS


@pytest.mark.parametrize("end", ["kill", "stop"])
async def test_case_23_a_server_that_ends_on_a_full_disk_starts_again_once_there_is_room(
    server: RealServer, receiver: RealReceiver, disk: SmallDisk, end: str
) -> None:
    seed = new_seed()
    load = Load(server, receiver, random.Random(seed))
    listen = ("--listen", f"127.0.0.1:{free_port()}")
    async with load.running():
        await load.acknowledged(200)
        disk.fill()
        await _stops_firing(server, receiver)
        if end == "kill":
            await server.kill()
        else:
            assert await server.stop() == 0
        disk.fill()  # what the end has freed
        count = len(receiver.callbacks)
        for _ in range(3):  # a supervisor that starts it again and again
            code, said = await asyncio.to_thread(serve_in_vain, "--store", f"sqlite:///{disk.file}", *listen)
            assert (code, "the disk is full" in said, "Traceback" in said) == (1, True, False), said
        assert len(receiver.callbacks) == count, "what cannot be recorded is not delivered once for each start"
        disk.free()
        await server.start()
        await load.acknowledged(100)
    await load.until_nothing_is_scheduled()
    assert await server.stop() == 0
    load.judge(seed)


async def test_case_23_a_new_store_on_a_full_disk_says_so(disk: SmallDisk) -> None:
    disk.fill()
    code, said = serve_in_vain("--store", f"sqlite:///{disk.file}", "--listen", f"127.0.0.1:{free_port()}")
    assert code == 2
    assert "the disk is full" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("end", ["room", "kill"])
async def test_case_23_a_commit_that_is_written_but_cannot_be_indexed_is_of_unknown_outcome(
    server: RealServer, receiver: RealReceiver, disk: SmallDisk, end: str
) -> None:
    """The one way in which a full disk leaves a commit in doubt: its frames fit, but the log's index cannot grow.

    A recovery of the log, after a crash, would find such a commit: nobody may be told `not_applied` before a claim
    has gone over it. Where even the claim cannot be made, the answer is `outcome_unknown`.
    """
    assert (await server.call("namespaces/create", {"namespace": "bulk", "numShards": 1}))[0] == 200
    far = {"namespace": "bulk", "executeAt": FAR, "callbackUrl": receiver.url, "payload": "x" * 1_000}
    number = 0
    while disk.log_bytes < (FIRST_FRAMES - 60) * FRAME_BYTES:
        number += 1
        timers = [{**far, "timerId": f"{number}-{n}"} for n in range(4)]
        status, answer = await server.call("timers/createMany", {"timers": timers})
        assert status == 200, answer
    # Room for some frames beyond the last that is indexed, but not for the eight pages the index grows by.
    disk.fill(leave_bytes=FIRST_FRAMES * FRAME_BYTES - disk.log_bytes + 7 * PAGE_BYTES)
    seed = new_seed()
    # One small commit at a time: nothing comes due before the disk is full, and no outcomes gather in the batch.
    load = Load(server, receiver, random.Random(seed), clients=1)
    load.clients[0].due_in_ms = (4_000, 5_000)
    async with load.running():

        async def is_unknown() -> bool:
            return await server.metric("duetime_reclaims_total") > 0

        await until(is_unknown, "a commit is of unknown outcome")
        await _stops_firing(server, receiver)
        if end == "kill":
            await server.kill()
        disk.free()
        if end == "kill":
            await server.start()
        await server.ready()
        await load.acknowledged(100)
    await load.until_nothing_is_scheduled()
    assert await server.stop() == 0
    load.judge(seed)
