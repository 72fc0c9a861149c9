"""The command line: reads the arguments, runs one command, turns errors into two lines and an exit code.

Every command is a function `(arguments) -> exit code`, plain or async, in one of the files beside this
one; only the file that is needed gets imported, so that `duetime --help` is quick.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import sys
from argparse import Namespace as Arguments
from collections.abc import Sequence

from duetime.cli.arguments import Misuse, build_parser
from duetime.cli.faults import BROKEN_PIPE, INTERRUPTED, USAGE, UsageError, exit_code, tell
from duetime.errors import DuetimeError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets "?", not a traceback
    as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    try:
        arguments = build_parser().parse_args(argv)
    except Misuse as misuse:
        tell(UsageError(misuse.detail if as_json else f"{misuse.detail}\n{misuse.usage}"), as_json=as_json)
        return USAGE
    except SystemExit as stop:  # argparse ends the process by itself: --help, --version
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code = run(arguments)
        sys.stdout.flush()
    except DuetimeError as error:
        tell(error, as_json=as_json)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone. Python flushes once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return code


def run(arguments: Arguments) -> int:
    module, _, name = arguments.run.partition(":")
    command = getattr(importlib.import_module(f"duetime.cli.{module}"), name)
    result = command(arguments)
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    return int(result)
