"""pytest plugin: a test that runs for too long ends with its process, and shows where it was.

    @pytest.mark.time_limit(300, "random faults for 60 s, and each waits until all instances serve again")

The limit is for a test with its setup and teardown, and has to hold on a machine that is three times slower than ours.
What it waits for while a server is installed (`not_counted`) does not count. When the time is over, a thread prints
the stacks of all threads and tasks and the ends of the logs that were written since the test began, and ends the
process with all that it started. pytest-xdist then reports the test as the one in which its process ended, and goes on
with the others in a new process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import tempfile
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pytest

from scripts.servers.server import WATCH_NAME

from .processes import command_line, descendants, kill

__all__ = ["LIMIT_SECONDS", "not_counted"]

LIMIT_SECONDS = 120.0
_INSTALLING_SECONDS = 1_500.0
_GRACE_SECONDS = 20  # for the report; after that the interpreter itself ends the process
_LOG_LINES = 30
_LOGS_MAX = 12
_EXIT_CODE = 70


class Watchdog:
    """A thread that waits for the end of the time of the test that runs now."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output
        self._changed = threading.Condition()
        self._deadline: float | None = None
        self._what = ""
        self._limit_seconds = 0.0
        self._began = 0.0
        threading.Thread(target=self._run, name="time limit", daemon=True).start()

    @contextmanager
    def watch(self, what: str, limit_seconds: float) -> Iterator[None]:
        self._what, self._limit_seconds, self._began = what, limit_seconds, time.time()
        self._end_at(time.monotonic() + limit_seconds)
        try:
            yield
        finally:
            self._end_at(None)

    @contextmanager
    def not_counted(self) -> Iterator[None]:
        before, deadline = time.monotonic(), self._deadline
        if deadline is None:
            yield
            return
        self._end_at(before + _INSTALLING_SECONDS)
        try:
            yield
        finally:
            self._end_at(deadline + time.monotonic() - before)

    def _end_at(self, deadline: float | None) -> None:
        with self._changed:
            self._deadline = deadline
            self._changed.notify()
        if deadline is None:
            faulthandler.cancel_dump_traceback_later()
        else:  # for code that never gives this thread a turn
            seconds = deadline - time.monotonic() + _GRACE_SECONDS
            faulthandler.dump_traceback_later(seconds, exit=True, file=self._output)

    def _run(self) -> None:
        with self._changed:
            while True:
                left = None if self._deadline is None else self._deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        with suppress(Exception):
            self._report()
        # Of a database server, the process that removes its folder ends by itself when we are gone.
        for pid in descendants(os.getpid()):
            if WATCH_NAME not in command_line(pid):
                kill(pid)
        os._exit(_EXIT_CODE)

    def _report(self) -> None:
        self._say(f"\n{'=' * 30} TIME LIMIT {'=' * 30}")
        self._say(f"{self._what} has not ended within {self._limit_seconds:g} s. Now this process ends. Where it is:")
        faulthandler.dump_traceback(self._output, all_threads=True)
        for task in _tasks():
            self._say(f"\n{task!r}"[:500])
            for line in _where(task):
                self._say(f"  {line}")
        for log in _logs_since(self._began):
            self._say(f"\n--- the end of {log}")
            self._say("\n".join(log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:]))
        self._say("=" * 72)

    def _say(self, text: str) -> None:
        print(text, file=self._output, flush=True)


def _tasks() -> list[asyncio.Task[Any]]:
    """Of all event loops, whichever thread they run in."""
    known: Any = getattr(asyncio.tasks, "_scheduled_tasks", None) or getattr(asyncio.tasks, "_all_tasks", ())
    for _ in range(100):
        with suppress(RuntimeError):  # it changed meanwhile
            return [task for task in list(known) if not task.done()]
    return []


def _where(task: asyncio.Task[Any]) -> list[str]:
    """The chain of coroutines that wait for each other, the outermost first."""
    found = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = _first_of(waits, "cr_frame", "gi_frame", "ag_frame")
        if isinstance(frame, types.FrameType):
            found.append(f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}")
        waits = _first_of(waits, "cr_await", "gi_yieldfrom", "ag_await")
    return found


def _first_of(waits: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(waits, name, None)) is not None), None)


def _logs_since(began: float) -> list[Path]:
    """Of servers: tests keep them in folders of their own below the temporary folder."""
    found: set[tuple[float, Path]] = set()
    for folder in ("pytest-of-*/pytest-*/**/*.log", "duetime-*/*.log"):
        for log in Path(tempfile.gettempdir()).glob(folder):
            with suppress(OSError):
                changed = log.stat().st_mtime
                if changed >= began:
                    found.add((changed, log.resolve()))  # pytest makes links to its newest folders
    return [log for _, log in sorted(found)[-_LOGS_MAX:]]


# --- the plugin ----------------------------------------------------------------------------------

_watchdog: Watchdog | None = None


@contextmanager
def not_counted() -> Iterator[None]:
    """What is done here does not count as time of the test: programs of servers are installed."""
    if _watchdog is None:
        yield
    else:
        with _watchdog.not_counted():
            yield


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds, why): this test may take longer than others, and why")
    global _watchdog
    if _watchdog is None:
        output = os.fdopen(os.dup(2), "w")  # not what pytest captures
        _watchdog = Watchdog(output)
        faulthandler.register(signal.SIGUSR1, file=output, all_threads=True)  # the runner asks for it


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    assert _watchdog is not None
    with _watchdog.watch(item.nodeid, limit_of(item)):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """Servers are stopped here."""
    assert _watchdog is not None
    if hasattr(session.config, "workerinput") or not getattr(session.config.option, "numprocesses", None):
        with _watchdog.watch("the end of the session", LIMIT_SECONDS):
            return (yield)
    return (yield)


def limit_of(item: pytest.Item) -> float:
    """The longest that a mark of the test, its class or its module says; else the usual."""
    marks = list(item.iter_markers("time_limit"))
    return max((float(mark.args[0]) for mark in marks), default=LIMIT_SECONDS)
