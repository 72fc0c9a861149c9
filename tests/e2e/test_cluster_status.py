"""A real cluster on a real PostgreSQL, seen from outside: `cluster status` and `doctor` as an operator runs them."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

from real_server import RealServer, clean_environment, free_port, until

from servers import fresh_database, own, postgres

SHIFTED = Path(__file__).with_name("shifted_server.py")


def _run(arguments: tuple[str, ...]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "duetime", *arguments],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.decode()


async def run(*arguments: str) -> tuple[int, str]:
    """A command, and what it said."""
    return await asyncio.to_thread(_run, arguments)


async def examined(*arguments: str) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """doctor, as (verdict, what it says) by check."""
    code, out = await run("doctor", "--json", *arguments)
    findings: dict[str, list[tuple[str, str]]] = {}
    for line in map(json.loads, out.splitlines()):
        findings.setdefault(line["check"], []).append((line["verdict"], line["says"]))
    return code, findings


async def status_of(server: RealServer) -> dict[str, Any]:
    code, status = await server.call("cluster/status", {})
    assert code == 200, status
    return status


@asynccontextmanager
async def cluster(url: str, folder: Path, count: int, dead_after: str = "3.5s") -> AsyncIterator[list[RealServer]]:
    """So many instances, with the shards where they belong."""
    instances = []
    try:
        for number in range(count):
            (folder / str(number)).mkdir()
            instance = RealServer(folder / str(number), store_url=url, DUETIME_ENGINE_DEAD_AFTER=dead_after)
            instances.append(instance)
            await instance.start()

        async def have_settled() -> bool:
            members = (await status_of(instances[0]))["members"]
            shares = sorted(member["shards"] for member in members)
            return len(shares) == count and sum(shares) == 16 and shares[-1] - shares[0] <= 1

        await until(have_settled, "every instance has its share")
        yield instances
    finally:
        for instance in instances:
            await instance.close()


async def other_than(asked: RealServer) -> dict[str, Any]:
    [other] = [member for member in (await status_of(asked))["members"] if not member["self"]]
    return cast("dict[str, Any]", other)


async def test_every_instance_tells_of_all_and_a_killed_one_is_unreachable_then_dead(tmp_path: Path) -> None:
    url = fresh_database(postgres(18))
    # Time enough to be seen between its end and its death.
    async with cluster(url, tmp_path, 2, dead_after="6s") as (a, b):
        for asked in (a, b):
            members = (await status_of(asked))["members"]
            assert {member["address"] for member in members} == {f"127.0.0.1:{a.port}", f"127.0.0.1:{b.port}"}
            assert all(member["ready"] and member["leaseMs"] > 0 for member in members)
            assert [member["address"] for member in members if member["self"]] == [f"127.0.0.1:{asked.port}"]
        code, out = await run("cluster", "status", "--url", b.url)
        assert code == 0, out
        assert "2 alive, on postgresql" in out
        code, findings = await examined("--store", url, "--url", a.url)
        assert code == 0, findings
        assert findings["members"] == [("good", "2 alive")]
        assert "PostgreSQL 18" in findings["database"][0][1]

        await b.kill()
        killed = await other_than(a)
        assert killed["alive"]
        assert "connection refused by 127.0.0.1" in killed["unreachable"]
        code, out = await run("cluster", "status", "--url", a.url)
        assert code == 1, out
        assert f"✗ members: 127.0.0.1:{b.port} is alive, but" in out
        # The doctor waits until what is only passing has passed.
        code, findings = await examined("--store", url, "--url", a.url)
        assert code == 0, findings
        assert findings["members"] == [("note", f"1 alive, 1 dead; no new instance at 127.0.0.1:{b.port}")]
        assert findings["shards"] == [("good", "all 16 have an owner")]
        members = (await status_of(a))["members"]
        assert [(member["alive"], member["shards"]) for member in members] == [(True, 16), (False, 0)]

        await a.kill()
        code, findings = await examined("--store", url, "--url", a.url)
        assert code == 1
        assert findings["server"][0][0] == "wrong"
        (members_found,) = findings["members"]
        assert members_found[0] == "wrong"
        assert f"no heartbeat in 2 s from 127.0.0.1:{a.port}" in members_found[1]


async def test_a_frozen_instance_is_one_that_does_not_answer(tmp_path: Path) -> None:
    async with cluster(fresh_database(postgres(18)), tmp_path, 2) as (a, b):
        b.signal(signal.SIGSTOP)
        try:
            frozen = await other_than(a)
            assert "no answer within 1 s" in frozen["unreachable"]
        finally:
            b.signal(signal.SIGCONT)


async def test_an_instance_whose_clock_is_off_is_named_with_its_skew(tmp_path: Path) -> None:
    url = fresh_database(postgres(18))
    shifted = RealServer(tmp_path, store_url=url, program=(str(SHIFTED),), arguments=(str(tmp_path),))
    (tmp_path / "duetime").write_text("-900")
    async with cluster(url, tmp_path, 1) as (a,):
        try:
            shifted.launch()

            async def others() -> list[dict[str, Any]]:
                return [member for member in (await status_of(a))["members"] if not member["self"]]

            async def speaks() -> bool:
                return any("clockSkewMs" in member for member in await others())

            await until(speaks, "it has joined")
            (skewed,) = await others()
            assert -950 < skewed["clockSkewMs"] <= -850
            assert (skewed["ready"], skewed["shards"]) == (False, 0)
            code, findings = await examined("--store", url, "--url", a.url)
            assert code == 1
            assert any(
                verdict == "wrong" and f"the clock of 127.0.0.1:{shifted.port} is" in says
                for verdict, says in findings["clock skew"]
            )
        finally:
            await shifted.close()


async def test_an_instance_that_was_killed_and_started_again_at_once_is_told_from_its_former_self(
    tmp_path: Path,
) -> None:
    async with cluster(fresh_database(postgres(18)), tmp_path, 2) as (a, b):
        await b.kill()
        await b.start()
        there = [member for member in (await status_of(a))["members"] if member["address"] == f"127.0.0.1:{b.port}"]
        assert sorted(member.get("ready", False) for member in there) == [False, True]
        former = next(member for member in there if "ready" not in member)
        refusal = f"the request is for instance {former['instanceId']}, this is instance"
        assert refusal in former.get("unreachable", refusal)  # without the field it is declared dead already


async def test_a_database_that_cannot_be_used_is_explained(tmp_path: Path) -> None:
    server = postgres(18)
    nowhere = ("--url", f"http://127.0.0.1:{free_port()}")

    async def store_of(url: str) -> str:
        code, findings = await examined("--store", url, *nowhere)
        assert code == 1
        ((verdict, says),) = findings["store"]
        assert verdict == "wrong"
        return says

    empty = fresh_database(server)
    assert "has no tables yet" in await store_of(empty)
    assert "has no tables yet" in await store_of(empty)  # looking has made none
    assert "does not exist" in await store_of(server.url("no_such_database"))
    assert "cannot be reached" in await store_of(f"postgresql://postgres@127.0.0.1:{free_port()}/x")


async def test_a_database_that_may_lose_what_it_acknowledged_is_called_wrong(tmp_path: Path) -> None:
    with own("postgres18", settings={"fsync": "off", "synchronous_commit": "off"}) as server:
        code, findings = await examined("--store", server.url("postgres"), "--url", f"http://127.0.0.1:{free_port()}")
    assert code == 1
    wrong = {says for verdict, says in findings["database"] if verdict == "wrong"}
    assert wrong == {"fsync is off", "synchronous_commit is off"}
