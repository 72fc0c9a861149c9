"""Migration files of a database package, and the checks of the schema version that all adapters share.

Migrations are numbered from 1. A migration cannot be undone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import Self

from msgspec import Struct

from duetime.errors import SchemaMismatch
from duetime.telemetry import log

__all__ = ["Migrations"]


class Migrations(Struct, frozen=True):
    """The migrations of one database, in order. The schema version is the number of the last one."""

    texts: Sequence[str]

    @classmethod
    def of_package(cls, package: str) -> Self:
        """Reads the files migrations/001_….sql and so on of a package."""
        folder = resources.files(package).joinpath("migrations")
        files = sorted((entry for entry in folder.iterdir() if ".sql" in entry.name), key=lambda entry: entry.name)
        return cls([entry.read_text("utf-8") for entry in files])

    @property
    def version(self) -> int:
        return len(self.texts)

    def missing(self, found: int) -> Iterator[tuple[int, str]]:
        """Number and text of each migration that a schema of version `found` still needs."""
        return zip(range(found + 1, self.version + 1), self.texts[found:], strict=True)

    def check_not_newer(self, label: str, found: int) -> int:
        if found > self.version:
            raise SchemaMismatch(
                f"{label} has schema {found}, this version knows {self.version}: it was used by a newer Duetime"
            )
        return found

    def check_complete(self, label: str, found: int) -> None:
        if found < self.version:
            what = f"has schema {found}, this version needs {self.version}" if found else "has no tables yet"
            raise SchemaMismatch(f"{label} {what}; `duetime serve` creates or updates them")

    def log_applied(self, label: str) -> None:
        log.info("%s: created the tables of schema %d", label, self.version)

    def fact(self, found: int) -> str:
        """For a diagnosis."""
        return f"schema version {found or 'none yet'}, this Duetime knows {self.version}"
