"""`duetime serve`, as a process of its own."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from command_line import HOOK, start
from threaded_server import free_port

from duetime.client import Client


def test_serve_prints_one_error_if_it_cannot_start(server: str, tmp_path: Path) -> None:
    taken = ["--listen", server.removeprefix("http://"), "--store", "memory://"]
    for arguments in (["--set", "log.level=loud"], taken, ["--store", f"sqlite:///{tmp_path}/nowhere/x.db"]):
        with start("serve", *arguments) as process:
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, "")
        assert err.startswith("duetime: ")
        assert len(err.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_serve_runs_until_a_signal(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ["--store", f"sqlite:///{tmp_path / 'x.db'}", "--listen", f"127.0.0.1:{port}"]
    with start("serve", *arguments) as server, Client(url, retries=50, timeout=20) as client:
        assert client.create("x", delay=timedelta(hours=1), callback_url=HOOK).timer.timer_id == "x"
        assert client.ready()
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=20)
    assert server.returncode == 0, err
