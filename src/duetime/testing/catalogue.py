"""The failure catalogue as data: the rows of docs/concepts/failures.md."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

__all__ = ["CASES", "Case", "read_catalogue"]

CASES = 55
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
_NOT_YET = "not yet: "


class Case(Struct, frozen=True):
    number: int
    scenario: str
    invariants: str
    behaviour: str
    tests: tuple[str, ...]  # path::name

    @property
    def missing(self) -> str:
        """Which part will bring it; empty if it is covered."""
        return self.behaviour.removeprefix(_NOT_YET) if self.behaviour.startswith(_NOT_YET) else ""


def read_catalogue(root: Path) -> list[Case]:
    """All rows, in their order, from the documents of a working copy."""
    text = (root / "docs" / "concepts" / "failures.md").read_text("utf-8")
    return [
        Case(int(number), scenario, invariants, behaviour, tuple(re.findall(r"`([^`]+::[^`]+)`", tests)))
        for number, scenario, invariants, behaviour, tests in _ROW.findall(text)
    ]
