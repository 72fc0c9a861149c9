"""What tests of commands share: how a command is run, as a process of its own or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

HOOK = "http://127.0.0.1:9/hook"


FAR = ["--in", "1h", "--to", HOOK]


Run = Callable[..., tuple[int, str, str]]


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "duetime", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    )
