"""Which statements of the server the simulated cluster executes.

Only statements in functions count: modules and classes are executed when they are imported.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, TracebackType

from msgspec import Struct

__all__ = ["MODULES", "Place", "Statement", "Tracer", "statements_of"]

# Engine, cluster and service.
MODULES = (
    "duetime.api.peer_server",
    "duetime.engine.counters",
    "duetime.engine.engine",
    "duetime.engine.fire_loop",
    "duetime.engine.breaker",
    "duetime.engine.due_heaps",
    "duetime.engine.flow",
    "duetime.engine.flow_allowances",
    "duetime.engine.flow_homes",
    "duetime.engine.flow_limits",
    "duetime.engine.flow_queues",
    "duetime.engine.flow_report",
    "duetime.engine.flow_slots",
    "duetime.engine.look_ahead",
    "duetime.engine.group_commit",
    "duetime.engine.ownership",
    "duetime.engine.pending_write",
    "duetime.cluster.membership",
    "duetime.engine.namespaces",
    "duetime.service.asking",
    "duetime.service.commands",
    "duetime.cluster.peer_client",
    "duetime.cluster.peer_protocol",
    "duetime.cluster.placement",
    "duetime.service.flows",
    "duetime.service.forwarded",
    "duetime.service.namespaces",
    "duetime.service.service",
    "duetime.engine.entry",
    "duetime.engine.shard",
    "duetime.engine.unreadable_rows",
    "duetime.engine.weight",
    "duetime.engine.window",
    "duetime.single_flight",
)


_NEEDS_CONTEXT = frozenset({"return", "continue", "break", "raise", "pass"})


class Statement(Struct, frozen=True):
    """A statement in a function."""

    module: str
    function: str
    text: str
    line: int

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

    def text_of(statement: ast.stmt, parent: ast.AST) -> str:
        """The first line of a statement; for `return`, `continue` and so on, with the statement around it."""
        text = lines[statement.lineno - 1].strip()
        above = getattr(parent, "lineno", 0)
        return f"{lines[above - 1].strip()} {text}" if above and text.partition(" ")[0] in _NEEDS_CONTEXT else text

    def walk(node: ast.AST, name: str, in_function: bool) -> Iterator[Statement]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if in_function:
                    yield Statement(module, name, lines[child.lineno - 1].strip(), child.lineno)
                is_class = isinstance(child, ast.ClassDef)
                yield from walk(child, f"{name}.{child.name}".lstrip("."), not is_class)
                continue
            if isinstance(child, ast.stmt) and in_function and not _has_no_code(child):
                yield Statement(module, name, text_of(child, node), child.lineno)
            yield from walk(child, name, in_function)

    return list(walk(ast.parse(source), "", False))


def _has_no_code(statement: ast.stmt) -> bool:
    """Is it a docstring, `...`, or a statement without code of its own?"""
    if isinstance(statement, ast.Global | ast.Nonlocal) or (
        isinstance(statement, ast.AnnAssign) and statement.value is None
    ):
        return True
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class Tracer:
    """Collects the statements of these modules that are executed inside the `with` block.

    Their functions get code that records each statement, which costs far less than `sys.settrace`.
    """

    def __init__(self, modules: tuple[str, ...] = MODULES) -> None:
        self._lines: dict[str, set[int]] = {module: set() for module in modules}
        self._instrumented: dict[_CodeName, CodeType] = {}
        for module in modules:
            path = _path_of(module)
            tree = _Instrumenter().visit(ast.parse(Path(path).read_text("utf-8")))
            code = compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)
            self._instrumented.update((_name_of(inner), inner) for inner in _codes_in(code))
        self._before: list[tuple[FunctionType, CodeType]] = []

    @property
    def executed(self) -> set[Place]:
        return {(module, line) for module, lines in self._lines.items() for line in lines}

    def __enter__(self) -> Tracer:
        for module, lines in self._lines.items():
            vars(importlib.import_module(module))[_RECORD] = lines.add
        for thing in gc.get_objects():
            if (
                isinstance(thing, FunctionType)
                and (code := self._instrumented.get(_name_of(thing.__code__))) is not None
            ):
                self._before.append((thing, thing.__code__))
                thing.__code__ = code
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # The name stays in the modules: running tasks may still use it.
        for function, code in self._before:
            function.__code__ = code
        self._before = []


_RECORD = "__executed__"
_CodeName = tuple[str, str, int]


def _name_of(code: CodeType) -> _CodeName:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)


class _Instrumenter(ast.NodeTransformer):
    """Puts `__executed__(line)` before every statement in a function."""

    def __init__(self) -> None:
        self._in_function = False

    def generic_visit(self, node: ast.AST) -> ast.AST:
        before = self._in_function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            self._in_function = not isinstance(node, ast.ClassDef)
        super().generic_visit(node)
        if self._in_function and not isinstance(node, ast.Lambda):
            for field in ("body", "orelse", "finalbody"):
                if isinstance(body := getattr(node, field, None), list):
                    setattr(node, field, [each for statement in body for each in self._with_record(statement)])
        self._in_function = before
        return node

    def _with_record(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if not _has_no_code(statement):
            call = ast.Call(ast.Name(_RECORD, ast.Load()), [ast.Constant(statement.lineno)], [])
            yield ast.copy_location(ast.Expr(ast.copy_location(call, statement)), statement)
        yield statement
