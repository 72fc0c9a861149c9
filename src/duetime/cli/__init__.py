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

from duetime.cli.arguments import build_parser
from duetime.errors import DuetimeError, NotFound, OutcomeUnknown, Rejected, SetupError

__all__ = ["main"]

OK, FAILED, USAGE, NOT_FOUND, REFUSED, UNREACHABLE, UNKNOWN = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ gets "?", not a traceback
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as stop:  # argparse ends the process by itself: --help, wrong usage
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code = run(arguments)
        sys.stdout.flush()
    except DuetimeError as error:
        print(f"duetime: {said(error)}", file=sys.stderr)
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


def exit_code(error: DuetimeError) -> int:
    if isinstance(error, NotFound):
        return NOT_FOUND
    if isinstance(error, Rejected):
        return REFUSED
    if isinstance(error, OutcomeUnknown):
        return UNKNOWN
    if isinstance(error, SetupError):
        return USAGE
    return UNREACHABLE if error.status in (0, 429, 503) else FAILED


def said(error: DuetimeError) -> str:
    text = error.detail
    if error.field and error.field not in text:
        text = f"{error.field}: {text}"
    if error.status == 0:
        text += "\nIs the server running? `duetime serve` starts one; --url or DUETIME_URL point to one."
    elif error.status == 401:
        text += "\nGive a token with --token or DUETIME_TOKEN."
    return text
