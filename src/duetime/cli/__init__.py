"""The command line: parses the arguments, runs one command, turns errors into one or two lines and an exit code.

Every command is a function `(arguments) -> exit code`, plain or async, in a module of this package. Only the module
of that command is imported, so that `duetime --help` is fast.
"""

from __future__ import annotations

import importlib
import inspect
import io
import os
import sys
from argparse import Namespace as Arguments
from collections.abc import Sequence

from duetime.cli.arguments import ParseError, build_parser
from duetime.cli.errors import BROKEN_PIPE, INTERRUPTED, USAGE, UsageError, exit_code, print_error
from duetime.errors import DuetimeError
from duetime.printable import printable

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show ✓ gets "?", not a traceback
    as_json = "--json" in (sys.argv[1:] if argv is None else argv)
    try:
        arguments = build_parser().parse_args(argv)
    except ParseError as wrong:
        print_error(UsageError(wrong.detail), as_json=as_json)
        if not as_json:
            print(printable(wrong.usage), file=sys.stderr)
        return USAGE
    except SystemExit as stop:  # raised by argparse for --help and --version
        return stop.code if isinstance(stop.code, int) else USAGE
    try:
        code = run(arguments)
        sys.stdout.flush()
    except DuetimeError as error:
        print_error(error, as_json=as_json)
        return exit_code(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the output has closed the pipe. Python flushes again at exit: send that to /dev/null.
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
