"""Prints the overview of `duetime` without a command, and the help of a group of commands without a command."""

from __future__ import annotations

from argparse import Namespace as Arguments

from duetime.printable import printable_lines

__all__ = ["overview"]


def overview(arguments: Arguments) -> int:
    if arguments.overview is None:
        arguments.parser.print_help()
        return 2
    print(printable_lines(arguments.overview))
    return 0
