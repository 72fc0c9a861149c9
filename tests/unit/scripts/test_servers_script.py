"""What every server of scripts/servers has in common, and what happens when one cannot be installed.

Needs no database. The servers themselves: tests/e2e/test_real_servers.py.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts.servers import Server, ServerError

ROOT = Path(__file__).parents[3]
PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


def until(condition: Callable[[], bool], what: str, within_seconds: float = 20) -> None:
    deadline = time.monotonic() + within_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Sleeper(Server):
    """The least of all servers."""

    name = "sleeper"

    def install(self) -> None:
        pass

    def command(self) -> list[str]:
        return ["sleep", "1000"]

    def is_ready(self) -> bool:
        return self.is_running


class Refuser(Sleeper):
    name = "refuser"

    def command(self) -> list[str]:
        return ["sh", "-c", "echo no such luck; exit 3"]

    def is_ready(self) -> bool:
        return False


class Latecomer(Sleeper):
    """Refuses its first start for a reason that passes."""

    name = "latecomer"
    passing_troubles = ("come back later",)

    def command(self) -> list[str]:
        return [
            "sh",
            "-c",
            "test -e been || { touch been; echo come back later; exit 1; }; touch ready; exec sleep 1000",
        ]

    def is_ready(self) -> bool:
        return (self.folder / "ready").exists()


# --- the life of any server ----------------------------------------------------------------------


def test_a_stopped_server_leaves_nothing() -> None:
    with Sleeper() as server:
        pid, folder = server.pid, server.folder
        assert is_alive(pid)
        assert folder.is_dir()
    assert not is_alive(pid)
    assert not folder.exists()


def test_a_given_folder_is_kept() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        with Sleeper(folder=Path(folder) / "kept") as server:
            (server.folder / "data").touch()
        assert (Path(folder) / "kept" / "data").exists()


def test_data_and_port_outlive_a_kill_and_a_restart() -> None:
    with Sleeper() as server:
        (server.folder / "data").touch()
        port, first = server.port, server.pid
        assert 10_000 <= port < 32_768
        server.kill()
        assert not is_alive(first)
        server.start()
        server.restart()
        assert server.pid != first
        assert server.port == port
        assert (server.folder / "data").exists()


def test_a_server_that_does_not_start_says_why_and_leaves_nothing() -> None:
    before = set(Path(tempfile.gettempdir()).glob("duetime-refuser-*"))
    with pytest.raises(ServerError, match="no such luck"):
        Refuser().start()
    assert set(Path(tempfile.gettempdir()).glob("duetime-refuser-*")) == before


def test_a_trouble_that_passes_is_waited_for() -> None:
    with Latecomer() as server:
        assert server.is_running


def test_a_server_dies_with_the_process_that_started_it() -> None:
    program = (
        "import sys, test_servers_script as here\n"
        "server = here.Sleeper().start()\n"
        "print(server.pid, server.folder, flush=True)\n"
        "sys.stdin.read()\n"
    )
    paths = {"PYTHONPATH": os.pathsep.join([PATHS["PYTHONPATH"], str(Path(__file__).parent)])}
    with subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | paths, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        pid, folder = process.stdout.readline().decode().split()
        assert is_alive(int(pid))
        process.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(int(pid)), "the server is gone")
    until(lambda: not Path(folder).exists(), "its folder is gone")


def test_a_server_outlives_the_thread_that_started_it() -> None:
    server = Sleeper()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        server.restart()
        assert server.is_running
    finally:
        server.stop()


# --- the command --------------------------------------------------------------------------------


def command(*arguments: str, **environment: str) -> tuple[int, str]:
    return command_in(ROOT, *arguments, **environment)


def command_in(checkout: Path, *arguments: str, **environment: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "CI"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout.decode()


def test_help_names_the_servers_and_shows_how() -> None:
    code, said = command("scripts.servers", "--help")
    assert code == 0
    assert "python -m scripts.servers up postgres18" in said


# --- a server that cannot be had -----------------------------------------------------------------

ASKS_FOR_WHAT_IS_NOT_THERE = """
from scripts.servers import SERVERS, CannotInstall, Server
from servers import require

class Unobtainable(Server):
    name = "unobtainable"
    def install(self):
        raise CannotInstall("it is out of print")

SERVERS["unobtainable"] = Unobtainable

def test_needs_it():
    require("unobtainable")

def test_does_not():
    pass
"""


@pytest.mark.parametrize(
    ("environment", "ends_with", "outcome"),
    [({}, 0, "1 passed, 1 skipped"), ({"CI": "true"}, 1, "1 failed, 1 passed")],
    ids=["skipped, at home", "failed, in CI"],
)
def test_what_cannot_be_had_is(tmp_path: Path, environment: dict[str, str], ends_with: int, outcome: str) -> None:
    (tmp_path / "test_asks.py").write_text(ASKS_FOR_WHAT_IS_NOT_THERE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    asked = ("pytest", "-p", "servers", "--rootdir", str(tmp_path), "-c", str(tmp_path / "pytest.ini"), str(tmp_path))
    code, said = command(*asked, **PATHS, **environment, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert code == ends_with, said
    assert outcome in said
    assert "SERVERS THAT WERE NOT TESTED" in said
    assert "unobtainable: it is out of print" in said
