"""What has to be so for a figure to mean anything: the server that answers is ours, and its data are on a disk."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from scripts.servers import listens

from duetime.cli.doctor import _file_system

__all__ = ["NotMeasurable", "check_disk", "check_own", "get", "until_answers"]

IN_MEMORY = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


class NotMeasurable(RuntimeError):
    """The figures would be of something else. The text says of what, and what would help."""


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def check_disk(folder: Path) -> None:
    """In a file system that is in memory, fsync costs nothing, and with it most of what a commit costs."""
    kind = _file_system(folder.resolve())
    if kind in IN_MEMORY:
        raise NotMeasurable(f"{folder} is in memory ({kind}), where fsync is free: set TMPDIR to a folder on a disk")


def check_own(server: subprocess.Popen[bytes], port: int) -> None:
    """Whoever answers on the port is the process that was started for it, or a child of it."""
    if server.poll() is not None:
        raise NotMeasurable(
            f"what was started for port {port} has ended with {server.returncode}: is there another server on it?"
        )
    if not any(listens(pid, port) for pid in _family(server.pid)):
        raise NotMeasurable(f"another server answers on port {port}: stop it first")


def until_answers(url: str, server: subprocess.Popen[bytes], within_seconds: float = 30) -> None:
    """Waits until the URL answers, and makes sure that it is the server that does."""
    port = int(url.split("/")[2].rpartition(":")[2])
    deadline = time.monotonic() + within_seconds
    while server.poll() is None:
        try:
            get(url)
        except OSError:
            if time.monotonic() > deadline:
                raise NotMeasurable(f"{url} does not answer within {within_seconds:g} s") from None
            time.sleep(0.01)
        else:
            break
    check_own(server, port)


def _family(pid: int) -> Iterator[int]:
    """The process and its descendants, by Linux."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))
