"""version: prints the versions of Duetime, of Python and of the packages that Duetime needs."""

from __future__ import annotations

import platform
from argparse import Namespace as Arguments
from importlib import metadata

from duetime import __version__
from duetime.cli.output import print_line, to_json

__all__ = ["installed_versions", "version"]

PACKAGES = ("apsw", "cronsim", "httptools", "msgspec", "tzdata", "uvloop")


def version(arguments: Arguments) -> int:
    versions = {"duetime": __version__, "python": platform.python_version(), **installed_versions()}
    if arguments.json:
        print_line(to_json(versions))
    else:
        print_line(f"duetime {__version__}")
        print_line(", ".join(f"{name} {number or 'absent'}" for name, number in versions.items() if name != "duetime"))
    return 0


def installed_versions() -> dict[str, str | None]:
    """Versions of the packages that Duetime needs. None: not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
