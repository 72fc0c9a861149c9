"""Workers and addresses: what an instance says where it is, and a parent that keeps its processes running."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from duetime.addresses import split_advertise
from duetime.config import Config, load_config
from duetime.errors import SetupError
from duetime.http.listeners import bind_sockets
from duetime.supervisor import pause_before_start_ms, run_workers

POSTGRES = "postgresql://nobody@127.0.0.1:1/nothing"


def configured(**flags: Any) -> Config:
    return load_config(environ={}, flags={path.replace("__", "."): value for path, value in flags.items()})


def refusal(**flags: Any) -> str:
    with pytest.raises(SetupError) as caught:
        configured(**flags)
    return str(caught.value)


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "advertise",
    [
        *("http://shop.example:80", "shop.example:", ":80", "shop.example:0", "shop.example:65536", "a b:80", "-:80"),
        *("0.0.0.0:80", "[::]:80", "::", "[fd00::5:80", "[shop.example]:80", "shop/:80", "fd00::5::1"),
    ],
)
def test_an_unusable_advertise_address_is_refused(advertise: str) -> None:
    assert "cluster.advertise must be host:port or host that other instances can reach" in refusal(
        cluster__advertise=advertise
    )
    with pytest.raises(ValueError):
        split_advertise(advertise)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"server__workers": 0}, "server.workers"),
        ({"cluster__worker_ports": 65_536}, "cluster.worker_ports"),
        ({"cluster__worker_ports": -1}, "cluster.worker_ports"),
        (
            {"server__workers": 2, "cluster__worker_ports": 65_535},
            "cluster.worker_ports must be at most 65534 for 2 workers",
        ),
        (
            {"server__workers": 4, "cluster__worker_ports": 8460},
            "cluster.worker_ports must not include the port of server.listen",
        ),
        ({"server__workers": 2, "cluster__advertise": "a:80"}, "cluster.advertise must be a host without a port"),
        (
            {"server__workers": 2, "cluster__worker_ports": 7000, "cluster__advertise": "a:65535"},
            "cluster.advertise must have a port of at most 65534 for 2 workers",
        ),
    ],
)
def test_invalid_cluster_settings_are_refused_by_name(flags: dict[str, Any], says: str) -> None:
    assert says in refusal(**flags)


def test_worker_ports_are_ignored_without_workers() -> None:
    assert configured(cluster__worker_ports=65_535, cluster__advertise="a:80").server.workers == 1


@pytest.mark.parametrize(("url", "name"), [("sqlite:///timers.db", "sqlite"), ("memory://", "memory")])
def test_several_workers_on_a_store_for_one_process_are_refused(url: str, name: str) -> None:
    with pytest.raises(
        SetupError, match=f"server.workers is 2, but only one process can use a {name} store.* Use a database"
    ):
        run_workers(configured(server__workers=2, store__url=url, server__listen="127.0.0.1:0"))


def test_several_workers_on_a_system_that_cannot_share_an_address_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "SO_REUSEPORT")
    with pytest.raises(SetupError, match=r"server.workers is 2, but on this system .*SO_REUSEPORT"):
        run_workers(configured(server__workers=2, store__url=POSTGRES, server__listen="127.0.0.1:0"))


@pytest.fixture
def never_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a worker was started"))


@pytest.mark.usefixtures("never_forks")
@pytest.mark.parametrize("shares", [False, True])
def test_an_address_in_use_is_reported_before_a_worker_is_started(shares: bool) -> None:
    """Also if its holder would share it: another Duetime with workers does."""
    (taken,) = bind_sockets("127.0.0.1", 0, reuse_port=shares)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            run_workers(configured(server__workers=2, store__url=POSTGRES, server__listen=f"127.0.0.1:{port}"))


@pytest.mark.usefixtures("never_forks")
def test_a_worker_port_in_use_is_reported_before_a_worker_is_started() -> None:
    (taken,) = bind_sockets("127.0.0.1", 0)
    with taken:
        taken.listen()
        port = taken.getsockname()[1]
        ports = {"server__listen": "127.0.0.1:0", "cluster__worker_ports": port}
        with pytest.raises(SetupError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            run_workers(configured(server__workers=2, store__url=POSTGRES, **ports))


# --- the parent ----------------------------------------------------------------------------------


class Supervised:
    """supervised.py, running; all that it and its workers print."""

    def __init__(self, manner: str, folder: Path) -> None:
        program = Path(__file__).with_name("supervised.py")
        self.process = subprocess.Popen(
            [sys.executable, program, manner, folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.said = ""

    def says(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits until the output contains the pattern `count` times."""
        assert self.process.stdout is not None
        while len(found := list(re.finditer(pattern, self.said))) < count:
            line = self.process.stdout.readline()
            assert line, f"it ended without the output {pattern!r}:\n{self.said}"
            self.said += line
        return found

    def pids(self) -> dict[int, int]:
        """Of the first start of each worker."""
        return {int(found[1]): int(found[2]) for found in self.says(r"worker (\d) is (\d+)", 2)[:2]}

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> int:
        """The exit code; waits until no process is left that could print something."""
        assert self.process.stdout is not None
        self.said += self.process.stdout.read()
        return self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Supervised] = []

    def begin(manner: str) -> Supervised:
        started.append(Supervised(manner, tmp_path))
        # A test that waits in vain is to fail, not to hang.
        watchdog = threading.Timer(30, started[-1].kill_all)
        watchdog.daemon = True
        watchdog.start()
        watchdogs.append(watchdog)
        return started[-1]

    watchdogs: list[threading.Timer] = []
    yield begin
    for watchdog in watchdogs:
        watchdog.cancel()
        watchdog.join()
    for program in started:
        program.kill_all()
        program.process.wait()
        assert program.process.stdout is not None
        program.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_drains_all_workers_at_the_same_time(start: Any, number: signal.Signals) -> None:
    program = start("together")
    program.says("all ready")
    program.signal(number)
    assert program.end() == 0
    assert program.said.count("drained") == 2
    assert program.said.count("all ready") == 1


def test_a_signal_to_load_the_certificate_reaches_every_worker_and_ends_none(start: Any) -> None:
    program = start("reload")
    program.says("all ready")
    for turn in (1, 2):
        program.signal(signal.SIGHUP)
        assert {found[1] for found in program.says(r"worker (\d) loads", 2 * turn)[2 * (turn - 1) :]} == {"1", "2"}
    program.signal(signal.SIGTERM)
    assert program.end() == 0
    assert program.said.count("drained") == 2
    assert "second signal" not in program.said


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_counts_as_one_signal(start: Any) -> None:
    program = start("together")
    program.says("all ready")
    os.killpg(program.process.pid, signal.SIGINT)
    assert program.end() == 0
    assert program.said.count("drained") == 2


def test_a_second_signal_kills_the_workers(start: Any) -> None:
    program = start("deaf")
    program.says("all ready")
    program.signal(signal.SIGTERM)
    program.says("stopping the workers")
    while program.process.poll() is None:  # as people do it
        program.signal(signal.SIGINT)
        time.sleep(0.01)
    assert program.end() == 1
    assert "second signal: killing the workers" in program.said


def test_the_same_signal_sent_twice_at_once_counts_as_one(start: Any) -> None:
    program = start("together")
    program.says("all ready")
    program.signal(signal.SIGTERM)
    program.signal(signal.SIGINT)
    assert program.end() == 0
    assert program.said.count("drained") == 2


def test_a_killed_worker_is_restarted_and_the_other_is_not(start: Any) -> None:
    program = start("serve")
    program.says("all ready")
    pids = program.pids()
    os.kill(pids[2], signal.SIGKILL)
    program.says(rf"worker 2 \(pid {pids[2]}\) was killed by SIGKILL; restarting it in 0.2 s")
    program.says("worker 2 is ready", 2)
    program.signal(signal.SIGTERM)
    assert program.end() == 0
    assert [program.said.count(f"worker {number} is ready") for number in (1, 2)] == [1, 2]


def test_the_pause_before_a_restart_grows_if_a_worker_ends_repeatedly(start: Any) -> None:
    program = start("crash")
    for pause in ("0.2", "0.4", "0.8"):
        program.says(rf"worker 1 \(pid \d+\) ended with exit code 3; restarting it in {pause} s")
    program.signal(signal.SIGTERM)
    program.end()


def test_pauses_grow_up_to_a_limit_and_are_reset_after_a_recovery() -> None:
    pauses, pause_ms = [], 0
    for _ in range(7):
        pause_ms = pause_before_start_ms(pause_ms, served_ms=9_999)
        pauses.append(pause_ms)
    assert pauses == [200, 400, 800, 1_600, 3_200, 5_000, 5_000]
    assert pause_before_start_ms(5_000, served_ms=10_000) == 200


def test_a_worker_with_an_unexpected_error_logs_it_and_is_restarted(start: Any) -> None:
    program = start("break")
    program.says("RuntimeError: a bug")
    program.says("ended with exit code 1; restarting it in 0.4 s")
    program.signal(signal.SIGTERM)
    program.end()


@pytest.mark.parametrize("manner", ["refuse", "refuse-all"])
def test_a_worker_that_cannot_start_ends_all_and_its_error_is_reported_once(start: Any, manner: str) -> None:
    program = start(manner)
    assert program.end() == 2
    assert program.said.count("the database has the wrong version") == 1
    assert "refused: the database has the wrong version (store.url)" in program.said
    assert program.said.count("drained") == (1 if manner == "refuse" else 0)


def test_a_worker_that_has_served_before_is_restarted_after_any_error(start: Any) -> None:
    program = start("late")
    program.says("all ready")
    os.kill(program.pids()[1], signal.SIGKILL)
    program.says(r"worker 1 \(pid \d+\) ended: the database has the wrong version; restarting it in 0.4 s")
    program.signal(signal.SIGTERM)
    program.end()
    assert program.said.count("drained") == 1


def test_workers_drain_and_end_when_their_parent_is_killed(start: Any) -> None:
    program = start("together")
    program.says("all ready")
    program.signal(signal.SIGKILL)
    assert program.end() == -signal.SIGKILL
    assert program.said.count("drained") == 2


def test_workers_drain_if_the_parent_is_killed_after_a_restart(start: Any) -> None:
    """The restarted worker must not keep the channel of the other worker open."""
    program = start("together")
    program.says("all ready")
    os.kill(program.pids()[1], signal.SIGKILL)
    program.says("worker 1 is ready", 2)
    program.signal(signal.SIGKILL)
    assert program.end() == -signal.SIGKILL
    assert program.said.count("drained") == 2
