"""A program with two minimal workers: `python supervised.py MANNER FOLDER`. They print what they do.

serve      ready at once; ends when its channel is closed
together   like serve, but ends only after the other one has to end too
deaf       ready at once; ignores the closed channel
crash      ends at once with exit code 3
break      raises an unexpected error
refuse     worker 2 cannot start and sends the error, worker 1 serves
refuse-all both cannot start
reload     like serve; SIGHUP is sent on to the workers, which say so
late       each starts once without an error; after that it cannot start
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from duetime.errors import SetupError
from duetime.process import READY, Worker
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
        raise SetupError("the database has the wrong version", field="store.url")
    if MANNER == "reload":
        signal.signal(signal.SIGHUP, lambda *_: say(f"worker {worker.number} loads"))
    say(f"worker {worker.number} is ready")
    with contextlib.suppress(ConnectionError):  # of a parent who was killed
        worker.channel.send(READY)
    while MANNER == "deaf":
        signal.pause()
    with contextlib.suppress(ConnectionError):  # the parent closed it before it had read everything
        assert worker.channel.recv(1) == b""
    (FOLDER / f"ending-{worker.number}").touch()
    while MANNER == "together" and not (FOLDER / f"ending-{3 - worker.number}").exists():
        time.sleep(0.005)
    say(f"worker {worker.number} drained")
    return 0


if __name__ == "__main__":
    set_up_logging("info", "text")
    try:
        code = Supervisor(2, work, lambda pids: say("all ready"), (signal.SIGHUP,) if MANNER == "reload" else ()).run()
    except SetupError as error:
        say(f"refused: {error.detail} ({error.field})")
        code = 2
    sys.exit(code)
