"""`duetime demo`, as a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import start


def test_the_demo_runs_its_timers_and_exits_with_0() -> None:
    with start("demo", "--exit", "--port", "0") as demo:
        out, err = demo.communicate(timeout=30)
    assert demo.returncode == 0, out + err
    lines = [line.split()[2:4] for line in out.splitlines() if " s  " in line]
    assert ["fired", "tea"] in lines
    assert lines.count(["fired", "invoice"]) == 2
    assert ["fired", "alarm"] not in lines
    assert "signature ok" in out
    assert "\033" not in out


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("number", "line"),
    [("SIGTERM", "receiver"), ("SIGTERM", "The server runs until"), ("SIGHUP", "receiver"), ("SIGINT", "receiver")],
)
def test_a_signal_ends_the_demo_and_deletes_its_temporary_folder(number: str, line: str, tmp_path: Path) -> None:
    with start("demo", "--port", "0", TMPDIR=str(tmp_path), PYTHONUNBUFFERED="1") as demo:
        assert demo.stdout is not None
        while line not in (said := demo.stdout.readline()):
            assert said, "the demo ended before the signal"
        assert [path.name.startswith("duetime-demo-") for path in tmp_path.iterdir()] == [True]
        demo.send_signal(signal.Signals[number])
        out, err = demo.communicate(timeout=30)
    assert (demo.returncode, err) == (0, ""), out
    assert "The temporary store was deleted" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_demo_under_nohup_continues_after_sighup(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from duetime.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--port", "0", "--exit"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        demo.send_signal(signal.SIGHUP)
        assert "not fired" in demo.communicate(timeout=30)[0]
    assert list(tmp_path.iterdir()) == []
