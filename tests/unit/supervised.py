"""A program with two workers that do next to nothing: `python supervised.py MANNER FOLDER`. What they do is printed.

serve      ready at once; ends when its line does
together   like serve, but ends only when the other has been told to end too
deaf       ready at once; never ends by itself
crash      ends with exit code 3, at once
break      raises what nobody expects
refuse     cannot start: worker 2 says why, worker 1 serves
refuse-all cannot start, both
late       the first start of each goes well; the next ones cannot start
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from duetime.app import READY, Worker
from duetime.errors import SetupError
from duetime.supervisor import Supervisor
from duetime.telemetry import set_up_logging

MANNER, FOLDER = sys.argv[1], Path(sys.argv[2])


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def work(worker: Worker) -> int:
    say(f"worker {worker.number} is {os.getpid()}")
    started_before = (FOLDER / f"started-{worker.number}").exists()
    (FOLDER / f"started-{worker.number}").touch()
    if MANNER == "crash":
        return 3
    if MANNER == "break":
        raise RuntimeError("a bug")
    if MANNER == "refuse-all" or (MANNER == "refuse" and worker.number == 2) or (MANNER == "late" and started_before):
        raise SetupError("the moon is in the wrong place", field="store.url")
    say(f"worker {worker.number} is ready")
    with contextlib.suppress(ConnectionError):  # of a parent who was killed
        worker.line.send(READY)
    while MANNER == "deaf":
        signal.pause()
    with contextlib.suppress(ConnectionError):  # it had not read all that we said
        assert worker.line.recv(1) == b""
    (FOLDER / f"ending-{worker.number}").touch()
    while MANNER == "together" and not (FOLDER / f"ending-{3 - worker.number}").exists():
        time.sleep(0.005)
    say(f"worker {worker.number} drained")
    return 0


if __name__ == "__main__":
    set_up_logging("info", "text")
    try:
        code = Supervisor(2, work, lambda pids: say("all ready")).run()
    except SetupError as error:
        say(f"refused: {error.detail} ({error.field})")
        code = 2
    sys.exit(code)
