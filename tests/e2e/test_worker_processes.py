"""`duetime serve --workers 2` on a real PostgreSQL: one address, two instances; killed, stopped, started again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from contract import FAR, URL
from real_server import RealReceiver, RealServer, free_port, serve_in_vain, until, wall_ms

from duetime.domain.instants import format_instant
from duetime.http.client import HttpClient, HttpError
from servers import fresh_database, postgres

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = ("--workers", "2")


class Workers(RealServer):
    """Two of them, and their parent, which is the process."""

    @property
    def pids(self) -> list[int]:
        found = re.findall(r"2 workers \(pids (\d+), (\d+)\) serve", self.log.read_text())
        return [int(pid) for pid in found[-1]]

    async def start(self) -> None:
        before = self.log.read_text().count("2 workers (") if self.log.exists() else 0
        self.launch()
        await self.says("2 workers (", before + 1)

    async def says(self, text: str, count: int = 1) -> None:
        async def is_said() -> bool:
            assert self.is_running, self.log.read_text()
            return self.log.read_text().count(text) >= count

        await until(is_said, f"the log says {text!r}")

    async def query(self, sql: str) -> list[Any]:
        connection: asyncpg.Connection[Any] = await asyncpg.connect(self.store_url)
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()

    async def shards(self) -> dict[str | None, int]:
        """How many each address owns; None: they are free."""
        owned = "SELECT shard_owner_address, count(*) FROM shards GROUP BY 1"
        return dict(await self.query(owned))

    async def members_alive(self) -> set[str]:
        return {address for (address,) in await self.query("SELECT address FROM members WHERE alive")}

    async def shared_out(self, within_seconds: float = 20) -> None:
        """Waits until both own shards, as many, and nobody else does."""

        async def is_so() -> bool:
            shards = await self.shards()
            return sorted(shards.values()) == [8, 8] and shards.keys() == await self.members_alive()

        await until(is_so, "both have eight shards", within_seconds)

    async def create(self, timer_id: str, execute_at: str, callback_url: str = URL) -> None:
        body = {"timerId": timer_id, "executeAt": execute_at, "callbackUrl": callback_url}
        status, answer = await self.call("timers/create", body)
        assert status == 200, answer


@pytest_asyncio.fixture(loop_scope="module")
async def workers(tmp_path: Path) -> AsyncIterator[Workers]:
    url = await asyncio.to_thread(lambda: fresh_database(postgres(15)))
    server = Workers(tmp_path, arguments=WORKERS, store_url=url)
    try:
        await server.start()
        await server.shared_out()
        yield server
    finally:
        await server.close()
    assert "Traceback" not in server.log.read_text()


async def test_creates_through_the_shared_address_land_and_fire_exactly_once(
    workers: Workers, receiver: RealReceiver
) -> None:
    due = format_instant(wall_ms() + 1_500)
    await asyncio.gather(*(workers.create(f"t{n}", due, receiver.url) for n in range(200)))
    await receiver.received(200)

    async def all_settled() -> bool:
        return await workers.query("SELECT count(*) FROM timers WHERE row_type = 2") == [(0,)]

    await until(all_settled, "every delivery is on record")
    assert Counter(body["timerId"] for body in receiver.bodies) == {f"t{n}": 1 for n in range(200)}
    # Each says at its own address what it did: both were asked, both have fired.
    for address in await workers.members_alive():
        answer = await workers.http.request("GET", f"http://{address}/metrics", timeout_ms=5_000)
        counted = dict(line.rsplit(" ", 1) for line in answer.body.decode().splitlines())
        assert int(counted['duetime_http_requests_total{status="200"}']) > 0
        assert 0 < int(counted["duetime_attempts_total"]) < 200


async def test_a_worker_that_is_killed_is_started_again_and_nothing_is_lost(
    workers: Workers, receiver: RealReceiver
) -> None:
    due = format_instant(wall_ms() + 2_000)
    await asyncio.gather(*(workers.create(f"soon {n}", due, receiver.url) for n in range(50)))
    await asyncio.gather(*(workers.create(f"far {n}", FAR) for n in range(50)))
    killed, left = workers.pids
    os.kill(killed, signal.SIGKILL)
    await workers.says(f"worker 1 (pid {killed}) was killed by SIGKILL; restarting it in 0.2 s")
    await workers.says(") is serving again")
    await workers.shared_out()

    async def all_settled() -> bool:
        return await workers.query("SELECT count(*) FROM timers WHERE row_type = 2") == [(50,)]

    await until(all_settled, "the 50 that are due are on record, and the 50 that are not are left")
    # What was in flight in the killed worker may have been sent again.
    assert {body["timerId"] for body in receiver.bodies} == {f"soon {n}" for n in range(50)}
    os.kill(left, 0)  # it has never ended


async def test_sigterm_drains_and_every_member_signs_off(workers: Workers, receiver: RealReceiver) -> None:
    """As systemd sends it: to the parent and to the workers, all at once."""
    receiver.may_answer.clear()
    for n in range(20):
        await workers.create(f"t{n}", format_instant(wall_ms()), receiver.url)
    await receiver.received(20)
    for pid in (*workers.pids, workers.pid):
        os.kill(pid, signal.SIGTERM)
    await workers.says("waiting for deliveries in flight", 2)
    receiver.may_answer.set()
    assert await workers.wait() == 0
    assert await workers.members_alive() == set()
    assert await workers.shards() == {None: 16}
    assert await workers.query("SELECT count(*) FROM timers WHERE row_type = 2") == [(0,)]
    assert len(receiver.bodies) == 20
    assert "restarting it" not in workers.log.read_text()


async def test_a_worker_that_is_told_to_stop_leaves_the_shared_address_to_the_other_and_comes_back(
    workers: Workers, receiver: RealReceiver
) -> None:
    receiver.may_answer.clear()
    for n in range(20):
        await workers.create(f"t{n}", format_instant(wall_ms()), receiver.url)
    await receiver.received(20)
    stopped, other = workers.pids
    os.kill(stopped, signal.SIGTERM)
    await workers.says("worker 1: stopping: waiting for deliveries in flight")

    async def only_the_other_answers() -> bool:
        statuses = await asyncio.gather(*(fresh_readyz(workers.port) for _ in range(32)))
        return set(statuses) == {200}

    await until(only_the_other_answers, "new connections reach the other worker only")
    os.kill(stopped, 0)  # it is still there, and waits for its deliveries
    receiver.may_answer.set()
    await workers.says(f"worker 1 (pid {stopped}) ended with exit code 0; restarting it")
    await workers.says(") is serving again")
    await workers.shared_out()
    os.kill(other, 0)
    assert len(receiver.bodies) == 20


async def fresh_readyz(port: int) -> int:
    """The status of /readyz on a connection of its own; 0: it broke."""
    http = HttpClient()
    try:
        return (await http.request("GET", f"http://127.0.0.1:{port}/readyz", timeout_ms=5_000)).status
    except HttpError:
        return 0
    finally:
        await http.close()


async def test_a_second_signal_ends_at_once(workers: Workers, receiver: RealReceiver) -> None:
    receiver.may_answer.clear()
    await workers.create("a", format_instant(wall_ms()), receiver.url)
    await receiver.received(1)
    pids = workers.pids
    workers.signal(signal.SIGTERM)
    await workers.says("waiting for deliveries in flight", 2)
    while workers.is_running:  # as people do it
        workers.signal(signal.SIGTERM)
        await asyncio.sleep(0.01)
    assert await workers.wait() == 1
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    receiver.may_answer.set()


async def test_workers_sign_off_when_their_parent_is_killed_and_the_next_one_finds_the_address_free(
    workers: Workers,
) -> None:
    await workers.create("a", FAR)
    await workers.kill()

    async def have_left() -> bool:
        return await workers.members_alive() == set() and await workers.shards() == {None: 16}

    await until(have_left, "both have signed off")
    await workers.start()
    status, _ = await workers.call("timers/get", {"timerId": "a"})
    assert status == 200


async def test_each_worker_listens_on_a_port_of_its_own_that_can_be_chosen(tmp_path: Path) -> None:
    url = await asyncio.to_thread(lambda: fresh_database(postgres(15)))
    first, second = two_free_ports()
    server = Workers(tmp_path, arguments=WORKERS, store_url=url, DUETIME_CLUSTER_WORKER_PORTS=str(first))
    try:
        await server.start()
        await server.shared_out()
        assert await server.members_alive() == {f"127.0.0.1:{first}", f"127.0.0.1:{second}"}
        for port in (first, second):
            body = {"timerId": f"by {port}", "executeAt": FAR, "callbackUrl": URL}
            api = f"http://127.0.0.1:{port}/api/v1/timers/create"
            headers = {"content-type": "application/json"}
            answer = await server.http.request("POST", api, headers, json.dumps(body).encode(), timeout_ms=5_000)
            assert answer.status == 200, answer.body
    finally:
        await server.close()


def two_free_ports() -> tuple[int, int]:
    """One after the other."""
    while True:
        first = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first + 1))
            except OSError:
                continue
            return first, first + 1


async def test_what_is_wrong_with_the_configuration_is_said_once_for_all_workers(tmp_path: Path) -> None:
    url = await asyncio.to_thread(lambda: fresh_database(postgres(15)))
    server = Workers(tmp_path, arguments=WORKERS, store_url=url, DUETIME_SERVER_LISEN="x")
    try:
        await server.start()
        assert await server.stop() == 0
    finally:
        await server.close()
    assert server.log.read_text().count("unknown environment variable DUETIME_SERVER_LISEN") == 1
    arguments = ("--workers", "2", "--store", url, "--listen", f"127.0.0.1:{free_port()}")
    wrong = {"DUETIME_NAMESPACES_DEFAULT_NUM_SHARDS": "7"}
    code, said = await asyncio.to_thread(lambda: serve_in_vain(*arguments, **wrong))
    assert (code, said.count("namespaces.default_num_shards is 7")) == (2, 1), said
    assert "Traceback" not in said
