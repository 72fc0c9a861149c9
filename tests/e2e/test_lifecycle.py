"""A real server through its life: started, stopped, killed, started on what it cannot use; and firing on time."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sqlite3
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from contract import FAR, URL, Asker, ended
from real_server import RealReceiver, RealServer, free_port, serve_in_vain, until, wall_ms

from duetime.app import App
from duetime.config import load_config
from duetime.domain.instants import format_instant, parse_instant
from duetime.errors import SetupError
from duetime.http.client import HttpError
from duetime.http.messages import Response

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def own(tmp_path: Path) -> AsyncIterator[RealServer]:
    """A server of the test's own, to stop and start as it likes."""
    server = RealServer(tmp_path)
    await server.start()
    yield server
    await server.close()


async def says(server: RealServer, text: str) -> None:
    async def is_said() -> bool:
        return text in server.log.read_text()

    await until(is_said, f"the log says {text!r}")


async def count_listed(api: Asker, **filter: Any) -> int:
    count, cursor = 0, None
    while True:
        page = await api.ok("timers/list", **filter, limit=1_000, cursor=cursor)
        count, cursor = count + len(page["timers"]), page["nextCursor"]
        if cursor is None:
            return count


# --- stopping ------------------------------------------------------------------------------------


async def test_sigterm_lets_what_is_in_flight_land_and_a_restart_does_not_fire_it_again(
    own: RealServer, receiver: RealReceiver
) -> None:
    api = Asker(own)
    receiver.may_answer.clear()
    for number in range(5):
        await api.ok("timers/create", timerId=f"flying {number}", delay="0s", callbackUrl=receiver.url)
    await receiver.received(5)
    own.signal(signal.SIGTERM)
    await says(own, "waiting for deliveries in flight")
    # A thing that takes longer than a stop without anything in flight: another server's whole life.
    (own.folder / "other").mkdir()
    other = RealServer(own.folder / "other")
    try:
        await other.start()
        assert await other.stop() == 0
    finally:
        await other.close()
    assert own.is_running
    receiver.may_answer.set()
    assert await own.wait() == 0

    await own.start()
    for number in range(5):
        timer = await api.timer(timerId=f"flying {number}")
        assert (timer["state"], timer["attempts"]) == ("delivered", 1)
    await api.ok("timers/create", timerId="later", delay="0s", callbackUrl=receiver.url)
    await ended(api, timerId="later")
    assert len(receiver.bodies) == 6


async def test_sigterm_waits_no_longer_than_it_may_and_what_did_not_land_fires_again(
    tmp_path: Path, receiver: RealReceiver
) -> None:
    server = RealServer(tmp_path, DUETIME_SERVER_DRAIN_TIMEOUT="200ms")
    try:
        await server.start()
        receiver.may_answer.clear()
        await server.call("timers/create", {"timerId": "a", "delay": "0s", "callbackUrl": receiver.url})
        await receiver.received(1)
        started = time.monotonic()
        assert await server.stop() == 0
        assert time.monotonic() - started < 5
        receiver.may_answer.set()
        await server.start()
        await receiver.received(2)
        first, second = (request.header(b"webhook-id") for request in receiver.requests)
        assert first == second
    finally:
        await server.close()


async def test_sigterm_twice_ends_at_once(own: RealServer, receiver: RealReceiver) -> None:
    receiver.may_answer.clear()
    await own.call("timers/create", {"timerId": "a", "delay": "0s", "callbackUrl": receiver.url})
    await receiver.received(1)
    own.signal(signal.SIGTERM)
    await says(own, "waiting for deliveries in flight")
    own.signal(signal.SIGTERM)
    assert await own.wait() == 1
    assert "Traceback" not in own.log.read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_case_21_every_create_acknowledged_before_the_end_is_there_after_a_restart(
    own: RealServer, number: signal.Signals
) -> None:
    acknowledged: list[str] = []

    async def client(name: str) -> None:
        for n in range(100_000):
            body = {"timerId": f"{name}-{n}", "executeAt": FAR, "callbackUrl": URL}
            try:
                status, answer = await own.call("timers/create", body)
            except HttpError:
                return
            if status != 200:
                assert (status, answer["code"]) == (503, "not_applied")
                return
            acknowledged.append(body["timerId"])

    clients = [asyncio.create_task(client(f"c{n}")) for n in range(16)]
    while len(acknowledged) < 500:
        await asyncio.sleep(0.01)
    own.signal(number)
    await asyncio.gather(*clients)
    assert await own.wait() == (0 if number is signal.SIGTERM else -number)
    started = time.monotonic()
    await own.start()
    assert time.monotonic() - started < 10

    api = Asker(own)
    found: set[str] = set()
    cursor = None
    while not found or cursor is not None:
        page = await api.ok("timers/list", state="scheduled", limit=1_000, cursor=cursor)
        found |= {timer["timerId"] for timer in page["timers"]}
        cursor = page["nextCursor"]
    assert set(acknowledged) <= found


async def test_after_kill_9_it_starts_within_seconds_and_fires_what_came_due(
    own: RealServer, receiver: RealReceiver
) -> None:
    api = Asker(own)
    far = [{"timerId": f"far {n}", "executeAt": FAR, "callbackUrl": URL, "payload": "x" * 100} for n in range(1_000)]
    for start in range(5):
        items = [{**timer, "timerId": f"{timer['timerId']} {start}"} for timer in far]
        await api.ok("timers/createMany", timers=items)
    due_ms = wall_ms() + 1_000
    soon = [
        {"timerId": f"soon {n}", "executeAt": format_instant(due_ms), "callbackUrl": receiver.url} for n in range(100)
    ]
    await api.ok("timers/createMany", timers=soon)
    await own.kill()
    while wall_ms() < due_ms:  # they come due while nobody is there
        await asyncio.sleep(0.05)
    started = time.monotonic()
    await own.start()
    await receiver.received(100)
    assert time.monotonic() - started < 5
    assert await count_listed(api, state="scheduled", idPrefix="far") == 5_000
    assert {body["timerId"] for body in receiver.bodies} == {timer["timerId"] for timer in soon}


# --- starting on what cannot be used -------------------------------------------------------------


def refusal(file: Path, **settings: str) -> str:
    """What `duetime serve` on this file says when it refuses to start."""
    listen = f"127.0.0.1:{free_port()}"
    code, said = serve_in_vain("--store", f"sqlite:///{file}", "--listen", listen, **settings)
    assert code == 2, said
    assert "Traceback" not in said
    return said


async def test_case_55_a_second_process_on_one_file_refuses_naming_the_first(own: RealServer) -> None:
    said = await asyncio.to_thread(refusal, own.file)
    assert f"{own.file} is in use by process {own.pid} on {socket.gethostname()}" in said
    assert (await own.call("timers/create", {"timerId": "a", "executeAt": FAR, "callbackUrl": URL}))[0] == 200
    await own.kill()
    await own.start()  # the lock of a dead process does not hold


async def test_case_52_another_number_of_shards_in_the_configuration_refuses_to_start(own: RealServer) -> None:
    await own.call("timers/create", {"timerId": "a", "executeAt": FAR, "callbackUrl": URL})
    assert await own.stop() == 0
    said = refusal(own.file, DUETIME_NAMESPACES_DEFAULT_NUM_SHARDS="32")
    assert "namespaces.default_num_shards is 32, but the store was created with 16" in said
    await own.start()
    assert (await own.call("timers/get", {"timerId": "a"}))[0] == 200


async def test_a_file_of_another_program_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "theirs.db"
    with sqlite3.connect(file) as db:
        db.execute("CREATE TABLE recipes (name TEXT)")
    db.close()
    before = file.read_bytes()
    assert f"{file} is a SQLite database of another program" in refusal(file)
    assert file.read_bytes() == before
    text = tmp_path / "notes.txt"
    text.write_text("Dear diary, " * 1_000)
    assert f"{text} is not a SQLite database" in refusal(text)
    assert text.read_text() == "Dear diary, " * 1_000
    assert "cannot be opened" in refusal(tmp_path)
    assert "cannot write in the directory" in refusal(tmp_path / "nowhere" / "timers.db")


async def test_a_damaged_file_is_refused_and_left_alone(own: RealServer) -> None:
    assert await own.stop() == 0
    content = bytearray(own.file.read_bytes())
    content[4_096:] = b"\xa5" * (len(content) - 4_096)
    own.file.write_bytes(content)
    assert f"{own.file} is damaged" in refusal(own.file)
    assert own.file.read_bytes() == content


async def test_a_start_that_failed_holds_nothing(tmp_path: Path) -> None:
    file = tmp_path / "timers.db"
    file.write_text("not a database " * 100)
    config = load_config(environ={}, flags={"store.url": f"sqlite:///{file}", "server.listen": "127.0.0.1:0"})
    with pytest.raises(SetupError, match="is not a SQLite database"):
        await App(config).start()
    file.unlink()
    app = App(config)
    await app.start()
    await app.stop()


async def test_a_port_that_is_taken_is_said(own: RealServer) -> None:
    code, said = serve_in_vain("--store", "memory://", "--listen", f"127.0.0.1:{own.port}")
    assert code == 2
    assert f"cannot listen on 127.0.0.1:{own.port}" in said
    assert "Traceback" not in said


# --- configuration -------------------------------------------------------------------------------


async def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "duetime.toml"
    file.write_text(
        f'[server]\nlisten = "127.0.0.1:1"\n[store]\nurl = "sqlite:///{tmp_path}/of-the-file.db"\n'
        "[limits]\njson_depth_max = 5\nbatch_timers_max = 5\npage_timers_max = 5\n"
    )
    server = RealServer(tmp_path, DUETIME_LIMITS_BATCH_TIMERS_MAX="6", DUETIME_LIMITS_PAGE_TIMERS_MAX="6")
    server.settings["DUETIME_SERVER_LISTEN"] = "127.0.0.1:2"
    flags = ("--listen", f"127.0.0.1:{server.port}", "--set", "limits.page_timers_max=7")
    server.arguments = ("--config", str(file), *flags)
    try:
        await server.start()
        assert server.file.exists()
        assert not (tmp_path / "of-the-file.db").exists()
        timer: dict[str, Any] = {"timerId": "a", "executeAt": FAR, "callbackUrl": URL}
        for path, body, limit in (
            ("timers/create", {**timer, "payload": [[[[[[1]]]]]]}, 5),
            ("timers/createMany", {"timers": [timer] * 10}, 6),
            ("timers/list", {"limit": 10}, 7),
        ):
            status, problem = await server.call(path, body)
            assert status == 400
            assert f" {limit}" in problem["detail"], problem
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[server]\nlisen = 1\n", "unknown key server.lisen"),
        ("[servers]\n", "unknown section [servers]"),
        ('[engine]\nlease = "soon"\n', "engine.lease"),
        ('[engine]\nlease = "1s"\n', "engine.lease must be more than two heartbeat_intervals"),
        ("[server\n", "duetime.toml"),
    ],
)
async def test_a_configuration_at_fault_refuses_to_start_naming_the_path(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "duetime.toml"
    file.write_text(text)
    code, output = serve_in_vain("--config", str(file), "--store", f"sqlite:///{tmp_path}/timers.db")
    assert code == 2
    assert said in output
    assert "Traceback" not in output
    assert not (tmp_path / "timers.db").exists()


async def test_an_unknown_variable_is_a_warning_in_the_log_and_those_of_kubernetes_are_none(tmp_path: Path) -> None:
    server = RealServer(tmp_path, DUETIME_SERVER_LISEN="hush")
    server.settings |= {"DUETIME_SERVICE_HOST": "10.0.0.11", "DUETIME_PORT": "tcp://10.0.0.11:8463"}
    try:
        await server.start()
        log = server.log.read_text()
    finally:
        await server.close()
    warning = "unknown environment variable DUETIME_SERVER_LISEN is ignored: did you mean DUETIME_SERVER_LISTEN?"
    assert [line.partition(" WARNING ")[2] for line in log.splitlines() if " WARNING " in line] == [warning]
    assert "hush" not in log


# --- firing --------------------------------------------------------------------------------------


async def test_a_retry_waits_as_long_as_the_receiver_asks(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    receiver.answers += [Response(429, headers=(("retry-after", "1"),)), Response(503, headers=(("Retry-After", "1"),))]
    policy = {"initialInterval": "1ms", "maxInterval": "1ms"}
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, retryPolicy=policy)
    await receiver.received(3)
    fired = [parse_instant(body["firedAt"]) for body in receiver.bodies]
    assert all(1_000 <= later - earlier < 5_000 for earlier, later in pairwise(fired))
    assert [body["attempt"] for body in receiver.bodies] == [1, 2, 3]
    assert len({request.header(b"webhook-id") for request in receiver.requests}) == 1
    assert (await ended(api, **key))["attempts"] == 3


async def test_a_callback_that_asks_for_another_time_is_called_again_then(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    again_ms = wall_ms() + 1_400  # more than a second after each call: sooner than that it is not called again
    once_more_ms = again_ms + 1_300
    receiver.answers += [
        Response(200, json.dumps({"ok": True, "nextExecuteAt": format_instant(again_ms)}).encode()),
        Response(200, json.dumps({"ok": False, "nextExecuteAt": format_instant(once_more_ms)}).encode()),
    ]
    key = {"namespace": namespace, "timerId": "a"}
    await api.ok("timers/create", **key, delay="0s", callbackUrl=receiver.url, payload=17)
    await receiver.received(3)
    first, second, third = receiver.bodies
    assert [body["attempt"] for body in receiver.bodies] == [1, 1, 2]
    assert second["scheduledAt"] == third["scheduledAt"] == second["executeAt"] == format_instant(again_ms)
    assert third["executeAt"] == format_instant(once_more_ms)
    assert parse_instant(second["firedAt"]) >= again_ms
    assert parse_instant(third["firedAt"]) >= once_more_ms
    ids = [request.header(b"webhook-id") for request in receiver.requests]
    assert ids[0] != ids[1] == ids[2]
    assert first["payload"] == second["payload"] == third["payload"] == 17
    over = await ended(api, **key)
    assert (over["state"], over["attempts"], over["scheduledAt"]) == ("delivered", 2, format_instant(again_ms))
    assert await count_listed(api, namespace=namespace, state="delivered") == 2  # both occurrences are kept


async def test_dead_destinations_do_not_delay_the_others_and_burn_no_attempts(
    own: RealServer, receiver: RealReceiver
) -> None:
    api = Asker(own)
    hanging = socket.create_server(("127.0.0.1", 0), backlog=512)  # the kernel accepts, nobody reads
    dead = {
        "nobody": f"http://127.0.0.1:{free_port()}/",
        "hangs": f"http://127.0.0.1:{hanging.getsockname()[1]}/",
    }
    due_ms = wall_ms() + 500
    timers = [
        {"timerId": f"{name} {n}", "executeAt": format_instant(due_ms), "callbackUrl": url, "callbackTimeoutSeconds": 2}
        for n in range(300)
        for name, url in dead.items()
    ]
    healthy = [
        {"timerId": f"healthy {n}", "executeAt": format_instant(due_ms + n * 10), "callbackUrl": receiver.url}
        for n in range(300)
    ]
    await api.ok("timers/createMany", timers=timers)
    await api.ok("timers/createMany", timers=healthy)
    try:
        await receiver.received(300)
        late_ms = [parse_instant(body["firedAt"]) - parse_instant(body["executeAt"]) for body in receiver.bodies]
        assert min(late_ms) >= 0
        assert max(late_ms) < 1_000, sorted(late_ms)[-10:]
        assert max(call.seen_at_ms - call.started_at_ms for call in receiver.callbacks) < 1_000
        # The breakers are open by now: most of the dead ones' timers wait, and have not been tried at all.
        assert (await api.ok("cluster/status"))["held"] > 100
        for name in dead:
            page = await api.ok("timers/list", idPrefix=name, limit=1_000)
            assert len(page["timers"]) == 300
            assert sum(timer["attempts"] == 0 for timer in page["timers"]) > 150, name
    finally:
        hanging.close()


async def test_what_was_held_for_a_dead_destination_fires_when_it_is_back(own: RealServer) -> None:
    api = Asker(own)
    receiver = RealReceiver()
    await receiver.start()
    url = receiver.url
    await receiver.close()
    timers = [{"timerId": f"t{n}", "delay": "0s", "callbackUrl": url} for n in range(100)]
    policy = {"initialInterval": "10ms", "maxInterval": "10ms"}
    await api.ok("timers/createMany", timers=[{**timer, "retryPolicy": policy} for timer in timers])

    async def are_held() -> bool:
        return bool((await api.ok("cluster/status"))["held"] > 50)

    await until(are_held, "the breaker is open")
    await receiver.start(int(url.split(":")[2].partition("/")[0]))
    try:
        await receiver.received(100)
        assert {body["timerId"] for body in receiver.bodies} == {timer["timerId"] for timer in timers}
    finally:
        await receiver.close()


# --- what can be seen of it ----------------------------------------------------------------------


async def metrics(server: RealServer) -> dict[str, float]:
    text = (await server.read("/metrics")).body.decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_the_metrics_count_what_happened(own: RealServer, receiver: RealReceiver) -> None:
    api = Asker(own)
    receiver.answers += [Response(500), Response(404)]
    quick = {"initialInterval": "1ms", "maxInterval": "1ms"}
    due = {"delay": "0s", "callbackUrl": receiver.url}
    await api.ok("timers/create", timerId="retried", **due, retryPolicy=quick)
    await ended(api, timerId="retried")
    await api.ok("timers/create", timerId="fine", **due)
    await ended(api, timerId="fine")
    await api.ok("timers/create", timerId="far", executeAt=FAR, callbackUrl=URL)
    await api.ok("timers/create", timerId="far", executeAt=FAR, callbackUrl=URL)
    await api.ok("timers/update", timerId="far", payload=1)
    await api.ok("timers/delete", timerId="far")
    await api.ok(
        "timers/createMany", timers=[{"timerId": f"m{n}", "executeAt": FAR, "callbackUrl": URL} for n in (1, 2)]
    )
    await api.refused("timers/create", timerId="", executeAt=FAR, callbackUrl=URL)
    counted = await metrics(own)
    expected = {
        "duetime_timers_created_total": 6,
        "duetime_timers_updated_total": 1,
        "duetime_timers_deleted_total": 1,
        "duetime_attempts_total": 3,
        'duetime_outcomes_total{outcome="answered"}': 3,
        'duetime_timers_reached_total{outcome="delivered"}': 1,
        'duetime_timers_reached_total{outcome="failed"}': 1,
        'duetime_timers_reached_total{outcome="cancelled"}': 1,
        "duetime_late_by_seconds_count": 2,
        'duetime_http_requests_total{status="400"}': 1,
        "duetime_deliveries_in_flight": 0,
        "duetime_timers_held": 0,
        "duetime_writes_waiting": 0,
        "duetime_shards_owned": 16,
        "duetime_stale_outcomes_total": 0,
        "duetime_shards_lost_total": 0,
        "duetime_reclaims_total": 0,
    }
    assert {name: counted.get(name) for name in expected} == expected
    assert counted['duetime_commits_total{result="applied"}'] >= 5
    assert counted['duetime_heartbeats_total{result="ok"}'] >= 1
    assert 0 < counted["duetime_lease_seconds"] <= 3


async def test_the_view_timer_schedules_can_be_read_beside_the_server(own: RealServer, receiver: RealReceiver) -> None:
    api = Asker(own)
    await api.ok("namespaces/create", namespace="tenant", numShards=4)
    made = {}
    for timer_id, due in {"waiting": FAR, "fired": format_instant(wall_ms()), "cancelled": FAR}.items():
        key = {"namespace": "tenant", "timerId": timer_id}
        made[timer_id] = await api.timer(
            "timers/create", **key, executeAt=due, callbackUrl=receiver.url, correlationId=f"c-{timer_id}"
        )
    over = await ended(api, namespace="tenant", timerId="fired")
    await api.ok("timers/delete", namespace="tenant", timerId="cancelled")
    # One that fired, and waits again.
    await api.ok("timers/create", namespace="tenant", timerId="again", delay="0s", callbackUrl=receiver.url)
    await ended(api, namespace="tenant", timerId="again")
    again = await api.timer("timers/create", namespace="tenant", timerId="again", executeAt=FAR, callbackUrl=URL)

    db = sqlite3.connect(f"file:{own.file}?mode=ro", uri=True)
    try:
        cursor = db.execute("SELECT * FROM timer_schedules ORDER BY service_call_id")
        columns = [column[0] for column in cursor.description]
        rows = cursor.fetchall()
    finally:
        db.close()
    assert columns == [
        "tenant_id",
        "service_call_id",
        "correlation_id",
        "due_at",
        "registered_at",
        "reached_at",
        "state",
    ]
    assert rows == [
        ("tenant", "again", None, FAR, again["createdAt"], None, "Scheduled"),
        (
            "tenant",
            "fired",
            "c-fired",
            over["scheduledAt"],
            made["fired"]["createdAt"],
            over["reachedAt"],
            "Reached",
        ),
        ("tenant", "waiting", "c-waiting", FAR, made["waiting"]["createdAt"], None, "Scheduled"),
    ]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", row[3]) for row in rows)
