"""`duetime cluster status` and `duetime doctor`, at a real server and of clusters that the test makes up."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from command_line import Run, start
from threaded_server import in_thread

from duetime.http.messages import Request, Response
from duetime.http.server import serve_http


def test_the_cluster_shows_its_members_and_shards(at: Run) -> None:
    code, out, _ = at("cluster", "status", "--shards")
    assert code == 0
    assert all(text in out for text in ("1 alive, on memory", "(this one)", "ready", "late p99", "loaded up to"))
    assert "✗" not in out
    code, out, _ = at("cluster", "status", "--json")
    assert code == 0
    status = json.loads(out)
    assert status["members"][0]["ready"]
    assert status["shardCounts"]["owned"] == status["shardCounts"]["total"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_cluster_is_watched_until_ctrl_c(server: str) -> None:
    with start("cluster", "status", "--watch", "--json", "--url", server) as watcher:
        assert watcher.stdout is not None
        assert [json.loads(watcher.stdout.readline())["ready"] for _ in range(2)] == [True, True]
        watcher.send_signal(signal.SIGINT)
        _, err = watcher.communicate(timeout=20)
    assert (watcher.returncode, err) == (0, "")


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
    ports, left = [0], [*bodies]

    async def serve(started: Callable[[], None], stop: asyncio.Event) -> None:
        async def handle(request: Request) -> Response:
            return Response(200, left.pop(0) if len(left) > 1 else left[0])

        server = await serve_http(
            handle, "127.0.0.1", 0, body_bytes_max=9_999, connections_max=9, idle_timeout_ms=9_999
        )
        ports[0] = server.port
        started()
        await stop.wait()
        await server.close()

    with in_thread(serve):
        yield f"http://127.0.0.1:{ports[0]}"


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


def test_brokers_are_shown_for_each_member_and_why_one_is_away(run: Run) -> None:
    nats = {
        "name": "nats",
        "connected": True,
        "consuming": True,
        "waiting": 70,
        "inFlight": 3,
        "retrying": 5,
        "refused": 12,
    }
    away = {
        "name": "nats",
        "connected": False,
        "awayReason": "no route",
        "consuming": False,
        "inFlight": 0,
        "retrying": 0,
        "refused": 0,
    }
    events_only = {"name": "kafka", "connected": True, "inFlight": 0, "retrying": 0, "refused": 0}
    members = [cluster_member(0, brokers=[nats, events_only]), cluster_member(1, brokers=[away, events_only])]
    with answering(cluster_of(*members)) as url:
        code, out, _ = run("cluster", "status", "--url", url)
        _, as_json, _ = run("cluster", "status", "--url", url, "--json")
    assert code == 1
    assert [member["brokers"] for member in json.loads(as_json)["members"]] == [
        [nats, events_only],
        [away, events_only],
    ]
    assert [line.split() for line in out.splitlines() if line.startswith(("broker", "nats", "kafka"))] == [
        ["broker", "address", "connection", "commands", "waiting", "in", "flight", "to", "retry", "refused"],
        ["nats", "10.0.0.0:8463", "connected", "received", "70", "3", "5", "12"],
        ["kafka", "10.0.0.0:8463", "connected", "not", "read"],
        ["nats", "10.0.0.1:8463", "away", "not", "received", "0", "0", "0"],
        ["kafka", "10.0.0.1:8463", "connected", "not", "read"],
    ]
    assert "✗ brokers: 10.0.0.1:8463 is not connected to nats: no route" in out


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
