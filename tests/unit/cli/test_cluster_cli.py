"""`cluster status` and `doctor` on the terminal, of clusters that the test makes up."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from duetime.cli import main
from duetime.http.server import Request, Response, serve_http

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("DUETIME_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def cluster_of(*members: dict[str, Any], **changes: Any) -> bytes:
    """What a server answers to cluster/status."""
    status = {
        "instanceId": "i0",
        "version": "0.1.0",
        "store": "postgresql",
        "ready": True,
        "clockSkewMaxMs": 500,
        "deadAfterMs": 200,
        "members": members,
        "shardCounts": {"total": 16, "owned": 16, "free": 0, "ofDead": 0},
        "unownedShards": [],
        "inMemory": 7,
        "inFlight": 1,
        "held": 0,
        "writesWaiting": 0,
        "clockSkewMs": 0,
    }
    return json.dumps(status | changes).encode()


def cluster_member(number: int, **changes: Any) -> dict[str, Any]:
    known = {"instanceId": f"i{number}", "address": f"10.0.0.{number}:8463", "alive": True, "self": number == 0}
    figures = {"version": "0.1.0", "ready": True, "clockSkewMs": 2, "inMemory": 3, "inFlight": 1, "held": 0}
    return {**known, "shards": 8, "joinedAt": "2027-01-01T09:00:00Z", **figures, **changes}


def gone_member(number: int, **changes: Any) -> dict[str, Any]:
    """One that is dead or cannot be asked: it says nothing of itself."""
    member = cluster_member(number, **changes)
    return {name: value for name, value in member.items() if name not in ("version", "ready", "clockSkewMs", "held")}


@contextmanager
def answering(*bodies: bytes) -> Iterator[str]:
    """A server whose cluster is as the test says: first so, then so, and so it stays."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    stop, ports, left = asyncio.Event(), [0], [*bodies]

    async def serve() -> None:
        async def handle(request: Request) -> Response:
            return Response(200, left.pop(0) if len(left) > 1 else left[0])

        server = await serve_http(
            handle, "127.0.0.1", 0, body_bytes_max=9_999, connections_max=9, idle_timeout_ms=9_999
        )
        ports[0] = server.port
        started.set()
        await stop.wait()
        await server.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


def test_a_large_cluster_is_one_line_for_each_member(run: Run) -> None:
    members = [cluster_member(n) for n in range(50)] + [gone_member(99 + n, alive=False) for n in range(12)]
    with answering(cluster_of(*members)) as url:
        code, out, _ = run("cluster", "status", "--url", url)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "cluster     50 alive, 12 dead, on postgresql"
    assert sum(line.startswith("i") and " ready " in line for line in lines) == 50
    assert sum(" dead" in line for line in lines if line.startswith("i")) == 10
    assert "and 2 more dead members" in out
    assert max(map(len, lines)) < 140


def test_each_problem_of_the_cluster_is_one_line_and_sets_the_exit_code(run: Run) -> None:
    members = [
        cluster_member(0),
        gone_member(1, unreachable="connection refused by 10.0.0.1:8463"),
        cluster_member(2, version="0.2.0"),
    ]
    unowned = {"shardCounts": {"total": 16, "owned": 14, "free": 2, "ofDead": 0}, "unownedShards": [3, 4]}
    with answering(cluster_of(*members, **unowned)) as url:
        code, out, _ = run("cluster", "status", "--url", url)
        assert code == 1
        assert "✗ members: 10.0.0.1:8463 is alive, but" in out
        assert "✗ shards: of 16, 2 without an owner: 3, 4" in out
        assert "! versions: 1 of 0.1.0, 1 of 0.2.0" in out
        assert "unreachable" in out
        assert run("cluster", "status", "--url", url, "--json")[0] == 1
        code, out, _ = run("doctor", "--store", "memory://", "--url", url)
    assert code == 1
    assert out.startswith("✗ members       10.0.0.1:8463 is alive, but")
    assert "cluster.advertise" in out
    marks = "".join(line[0] for line in out.splitlines() if line.startswith(("✗", "!", "✓")))
    assert marks == "✗" * marks.count("✗") + "!" * marks.count("!") + "✓" * marks.count("✓")
    assert len(set(marks)) == 3


def test_the_doctor_waits_for_transient_problems_to_end(run: Run) -> None:
    passing = cluster_of(cluster_member(0), gone_member(1, unreachable="connection refused by 10.0.0.1:8463"))
    settled = cluster_of(cluster_member(0), gone_member(1, alive=False))
    with answering(passing, settled) as url:
        code, out, _ = run("doctor", "--store", "memory://", "--url", url)
    assert code == 0, out
    assert "! members       1 alive, 1 dead; no new instance at 10.0.0.1:8463" in out
