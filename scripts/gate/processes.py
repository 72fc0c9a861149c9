"""The processes that a run has started, however deep, and their end. Linux only: elsewhere there are none to see."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

__all__ = ["adopt_orphans", "command_line", "descendants", "end_all", "kill"]

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")


def adopt_orphans() -> None:
    """From now on a process whose parent has ended becomes a child of this one, so that `descendants` finds it."""
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """All processes below this one that run, parents before children."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit():
            with suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    children[int(parent)].append(int(entry.name))
    found = []
    left = [pid]
    while left:
        below = children[left.pop()]
        found += below
        left += below
    return found


def command_line(pid: int) -> str:
    """Empty: it has ended."""
    with suppress(OSError):
        return (_PROC / str(pid) / "cmdline").read_text(errors="replace").replace("\0", " ").strip()
    return ""


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_all(within_seconds: float, *, spared: str = "") -> list[str]:
    """Waits until all processes below this one have ended by themselves, then kills those that have not. Answers the
    commands of those killed. With `spared`, only processes with this in their command line are waited for, and all
    others are killed at once."""
    deadline = time.monotonic() + within_seconds
    if spared:
        for pid in descendants(os.getpid()):
            if spared not in command_line(pid):
                kill(pid)
    while descendants(os.getpid()) and time.monotonic() < deadline:
        _collect_ended()
        time.sleep(0.05)
    killed = []
    while left := descendants(os.getpid()):
        killed += [command_line(pid) for pid in left]
        for pid in left:
            kill(pid)
        time.sleep(0.05)
        _collect_ended()
    return list(dict.fromkeys(command for command in killed if command))


def _collect_ended() -> None:
    """Takes the exit codes of adopted processes, which nobody else asks for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
