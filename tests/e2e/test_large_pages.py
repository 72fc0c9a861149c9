"""A list of many large timers is answered in pages of limited size, and the server's memory does not grow with it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from real_server import RealServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

MIB = 1_048_576
COUNT = 1_000
PAYLOAD = json.dumps("x" * (262_144 - 2))
PER_REQUEST = 50
FIELDS = {"executeAt": "2127-01-01T09:00:00Z", "callbackUrl": "http://127.0.0.1:9/hooks"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealServer]:
    """A server with 1,000 timers of 256 KiB. It was started again after they were stored: it is as small as can be."""
    server = RealServer(tmp_path_factory.mktemp("large"))
    await server.start()
    try:
        for first in range(0, COUNT, PER_REQUEST):
            timers = [
                json.dumps({**FIELDS, "timerId": f"t{number:04}"})[:-1] + f',"payload":{PAYLOAD}}}'
                for number in range(first, first + PER_REQUEST)
            ]
            answer = await server.post("timers/createMany", f'{{"timers":[{",".join(timers)}]}}'.encode())
            assert answer.status == 200
            assert not any("error" in result for result in json.loads(answer.body)["results"])
        await server.stop()
        await server.start()
        yield server
    finally:
        await server.close()


async def listed(server: RealServer, **fields: Any) -> tuple[list[list[str]], list[int]]:
    """The ids of all pages, and the sizes of the answers."""
    pages: list[list[str]] = []
    sizes: list[int] = []
    cursor: str | None = None
    while True:
        body = {"limit": COUNT, "cursor": cursor, **fields}
        answer = await server.post("timers/list", json.dumps(body).encode())
        assert answer.status == 200
        page = json.loads(answer.body)
        has_payloads = fields.get("payloads", True)
        assert all(has_payloads == ("payload" in timer) for timer in page["timers"])
        pages.append([timer["timerId"] for timer in page["timers"]])
        sizes.append(len(answer.body))
        cursor = page["nextCursor"]
        if cursor is None:
            return pages, sizes


async def test_a_thousand_timers_of_256_kib_are_listed_in_pages_of_at_most_8_mib_and_one_timer(
    large: RealServer,
) -> None:
    await listed(large, limit=1, idPrefix="t0000")  # everything that the first list loads
    before = memory_bytes(large.pid, "VmRSS")
    pages, sizes = await listed(large)
    assert sorted(name for page in pages for name in page) == [f"t{number:04}" for number in range(COUNT)]
    assert max(sizes) <= 8 * MIB + 263 * 1024
    assert min(sizes[:-3]) > 8 * MIB, "a page of one timer would be too careful"
    grown = memory_bytes(large.pid, "VmHWM") - before
    assert grown < 6 * 8 * MIB, f"{grown / MIB:.0f} MiB"


async def test_without_payloads_they_are_one_small_page(large: RealServer) -> None:
    pages, sizes = await listed(large, payloads=False, state="scheduled")
    assert [len(page) for page in pages] == [COUNT]
    assert max(sizes) < MIB


def memory_bytes(pid: int, name: str) -> int:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1_024
