"""Which statements of the server the simulated cluster reaches.

A tracer of its own, because it has to be cheap: functions of other files are not traced, nor those of which every line
was reached. Only statements in functions count: modules and classes are executed when they are imported.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from msgspec import Struct

__all__ = ["MODULES", "Place", "Statement", "Tracer", "statements_of"]

# Engine, cluster and service.
MODULES = (
    "duetime.engine",
    "duetime.firing",
    "duetime.flow",
    "duetime.horizon",
    "duetime.lane",
    "duetime.membership",
    "duetime.namespaces",
    "duetime.owner",
    "duetime.placement",
    "duetime.service",
    "duetime.shard",
    "duetime.sharing",
)


class Statement(Struct, frozen=True):
    """A statement in a function. `line` to `last_line` are those that belong to it and to no statement within it."""

    module: str
    function: str
    text: str
    line: int
    last_line: int

    @property
    def place(self) -> Place:
        return self.module, self.line


Place = tuple[str, int]
"""Module and first line of a statement."""


def _path_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return spec.origin


def statements_of(module: str) -> list[Statement]:
    source = Path(_path_of(module)).read_text("utf-8")
    lines = source.splitlines()

    def walk(node: ast.AST, name: str, in_function: bool) -> Iterator[Statement]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if in_function:
                    yield Statement(module, name, lines[child.lineno - 1].strip(), child.lineno, child.lineno)
                is_class = isinstance(child, ast.ClassDef)
                yield from walk(child, f"{name}.{child.name}".lstrip("."), not is_class)
                continue
            if isinstance(child, ast.stmt) and in_function and not _says_nothing(child):
                inner = [body[0].lineno for body in _bodies(child)]
                last_line = min([line - 1 for line in inner] or [child.end_lineno or child.lineno])
                text = lines[child.lineno - 1].strip()
                yield Statement(module, name, text, child.lineno, max(child.lineno, last_line))
            yield from walk(child, name, in_function)

    return list(walk(ast.parse(source), "", False))


def _says_nothing(statement: ast.stmt) -> bool:
    """Docstrings, `...`, and what has no code of its own."""
    if isinstance(statement, ast.Global | ast.Nonlocal) or (
        isinstance(statement, ast.AnnAssign) and statement.value is None
    ):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _bodies(statement: ast.stmt) -> list[list[Any]]:
    if isinstance(statement, ast.Match):
        return [case.body for case in statement.cases]
    return [body for body in (getattr(statement, "body", []), getattr(statement, "orelse", [])) if body]


class Tracer:
    """Collects the statements of these modules that are reached while it is entered.

    A function that is left with nothing but `unreachable` statements costs no more time.
    """

    def __init__(self, unreachable: Iterable[Place] = (), modules: tuple[str, ...] = MODULES) -> None:
        self._unreachable = frozenset(unreachable)
        self._places: dict[str, dict[int, Place]] = {}  # path -> line -> statement
        for module in modules:
            of_line = self._places[_path_of(module)] = {}
            for statement in statements_of(module):
                for line in range(statement.line, statement.last_line + 1):
                    of_line[line] = statement.place
        self._left: dict[CodeType, set[Place]] = {}  # statements of a function that were not reached yet
        self.reached: set[Place] = set()

    def __enter__(self) -> Tracer:
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        code = frame.f_code
        left = self._left.get(code)
        if left is None:
            of_line = self._places.get(code.co_filename, {})
            places = {of_line[line] for *_, line in code.co_lines() if line in of_line}
            left = self._left[code] = places - self._unreachable
        return self._ran if left else None

    def _ran(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            code = frame.f_code
            place = self._places[code.co_filename].get(frame.f_lineno)
            if place is not None:
                self._left[code].discard(place)
                self.reached.add(place)
        return self._ran
