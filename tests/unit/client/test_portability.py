"""What is imported by a program that only calls a server or receives callbacks: it runs on Windows and macOS too."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

# Runs before the import. Python on Windows has none of these modules and names, and a client needs no database driver
# and no uvloop. Names that the standard library itself uses on this system are not removed.
ANOTHER_SYSTEM = """
import os, signal, socket, sys, time
import asyncio, multiprocessing, ssl, subprocess, tempfile  # first: they choose their code by the real system
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"apsw", "fcntl", "grp", "pwd", "resource", "termios", "uvloop"}:
            raise ImportError(f"{name} is absent in this test")
sys.meta_path.insert(0, Absent())
for name in ("apsw", "fcntl", "grp", "pwd", "resource", "termios", "uvloop"):
    sys.modules.pop(name, None)
for module, names in {
    time: ("CLOCK_BOOTTIME", "CLOCK_MONOTONIC", "CLOCK_REALTIME", "clock_gettime", "clock_gettime_ns"),
    socket: ("SO_REUSEPORT",),
    signal: ("SIGHUP", "pthread_sigmask"),
    os: ("fork", "register_at_fork", "sched_getaffinity"),
}.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", ANOTHER_SYSTEM + program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["duetime.client", "duetime.receiver", "duetime.errors"])
def test_a_client_can_be_imported_without_posix_apsw_and_uvloop(module: str) -> None:
    run(f"import {module}")


def test_a_client_reaches_a_server_and_a_receiver_verifies_a_callback_without_posix() -> None:
    out = run("""
import duetime
from duetime.clock import SystemClock
from duetime.client import ConnectionFailed, SignatureError, verify
SystemClock().boot_ms()
with socket.socket() as unused:
    unused.bind(("127.0.0.1", 0))
    with duetime.Client(f"http://127.0.0.1:{unused.getsockname()[1]}", retries=0) as client:
        try:
            client.get("x")
        except ConnectionFailed:
            print("no server")
try:
    verify(b"{}", {}, "whsec_" + "A" * 43 + "=")
except SignatureError:
    print("no signature")
""")
    assert out.splitlines() == ["no server", "no signature"]


def test_the_client_does_not_import_the_server() -> None:
    loaded = run("import duetime.client, duetime.receiver\nprint(*sys.modules)").split()
    server = {"duetime.app", "duetime.api", "duetime.engine", "duetime.service", "duetime.stores", "duetime.cluster"}
    assert server.isdisjoint(loaded)


def test_type_checkers_use_the_types_of_the_package() -> None:
    assert files("duetime").joinpath("py.typed").is_file()
