"""What Duetime is, and which one this is."""

from __future__ import annotations

import platform
from argparse import Namespace as Arguments
from importlib import metadata

from duetime import __version__
from duetime.cli.screen import json_line

__all__ = ["installed", "overview", "version"]

PACKAGES = ("apsw", "httptools", "msgspec", "uvloop")


def overview(arguments: Arguments) -> int:
    if arguments.overview is None:
        arguments.parser.print_help()
        return 2
    print(arguments.overview)
    return 0


def version(arguments: Arguments) -> int:
    versions = {"duetime": __version__, "python": platform.python_version(), **installed()}
    if arguments.json:
        print(json_line(versions))
    else:
        print(f"duetime {__version__}")
        print(", ".join(f"{name} {number or 'absent'}" for name, number in versions.items() if name != "duetime"))
    return 0


def installed() -> dict[str, str | None]:
    """Versions of the packages Duetime stands on; None: not there."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
