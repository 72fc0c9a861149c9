"""The documents as data: their text, fenced blocks, inline code and links."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple, TypeVar

ROOT = Path(__file__).parents[2]
PATHS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")

Thing = TypeVar("Thing")


def check_each(things: Collection[Thing], check: Callable[[Thing], None]) -> None:
    """Calls `check` with each of them, and fails once, with a line for each of those for which it failed."""
    assert things, "nothing to check: does the pattern still match the documents?"
    failures = []
    for thing in things:
        try:
            check(thing)
        except Exception as error:
            reason = str(error).partition("\nassert ")[0]  # without what pytest adds to a message
            failures.append(f"{thing}: {reason or type(error).__name__}")
    assert not failures, f"{len(failures)} of {len(things)} fail:\n" + "\n".join(failures)


class Block(NamedTuple):
    document: str
    number: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}#{self.number}"


class Mention(NamedTuple):
    document: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}: {self.text}"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(language: str, *documents: str) -> list[Block]:
    found = []
    for path in PATHS:
        for number, match in enumerate(_FENCED.finditer(path.read_text("utf-8"))):
            if match[1] == language and (not documents or name_of(path) in documents):
                found.append(Block(name_of(path), number, language, match[2]))
    return found


def inline_code() -> list[Mention]:
    return [Mention(name_of(path), text) for path in PATHS for text in _INLINE.findall(_prose(path))]


def links() -> list[Mention]:
    return [Mention(name_of(path), target) for path in PATHS for target in _LINK.findall(_prose(path))]


def shell_commands() -> list[Mention]:
    """Each command of each bash block, continued lines joined."""
    found = []
    for block in blocks("bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                found.append(Mention(block.document, line.strip()))
    return found


def _prose(path: Path) -> str:
    return _FENCED.sub("", path.read_text("utf-8"))
