"""The single-point mutants of a Python source text: each one small change that a test should notice.

    for mutant in mutants_of(path.read_text("utf-8")):
        print(mutant.line, mutant.change)
        compile(mutant.source, str(path), "exec")

A mutant keeps the number of lines of the source, so that a line number means the same in both. Not mutated:
docstrings, log calls, metrics, `__all__`, `__slots__`, annotations, imports and `if TYPE_CHECKING`. `with_notes` finds
out which lines a test executes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from msgspec import Struct

__all__ = ["Mutant", "changes_of", "mutants_of", "with_notes"]

_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: (r"is\s+not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: (r"not\s+in", "in"),
}
_NEGATED_BY_COMPARISON = (ast.Eq, ast.NotEq, ast.Is, ast.IsNot, ast.In, ast.NotIn)
_DELETED = (ast.Expr, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Raise, ast.Delete)
_METRIC = re.compile(r"\btelemetry\.\w+\.|_telemetry\.\w+\.")
_NAMES_LEFT_ALONE = {"__all__", "__slots__"}
_HALVED_FROM = 100  # a limit of 4096 or 4097 is rarely told apart: large numbers are halved

_SQL = re.compile(r"\b(SELECT|UPDATE|DELETE|INSERT|WHERE|ORDER BY|AND)\b")
_SQL_CHANGES = [
    (re.compile(r"(?<=\s)<(?=\s)"), "<="),
    (re.compile(r"(?<=\s)<=(?=\s)"), "<"),
    (re.compile(r"(?<=\s)>(?=\s)"), ">="),
    (re.compile(r"(?<=\s)>=(?=\s)"), ">"),
    (re.compile(r"(?<=\s)=(?=\s)"), "<>"),
    (re.compile(r"\bIS NOT NULL\b"), "IS NULL"),
    (re.compile(r"\bIS NULL\b"), "IS NOT NULL"),
    (re.compile(r"\bNOT (?=EXISTS|IN\b)"), ""),
    (re.compile(r"\bAND\b"), "OR"),
    (re.compile(r"\bAND\b"), "AND 1 = 1 OR 1 = 0 AND"),  # what follows no longer counts
    (re.compile(r"\bOR\b(?! (ROLLBACK|REPLACE|IGNORE))"), "AND"),
    (re.compile(r"\bDESC\b"), "ASC"),
    (re.compile(r"\bMAX\("), "MIN("),
    (re.compile(r"\bMIN\("), "MAX("),
    (re.compile(r" \+ 1\b"), " + 0"),
]


class Mutant(Struct, frozen=True):
    line: int
    last_line: int  # of what is changed: tests that run none of these lines cannot notice
    text: str  # the first line as it is, stripped
    change: str  # "old -> new", on one line
    source: str
    in_function: bool  # false: it takes effect when the module is imported
    used_on: frozenset[int] | None = None  # of a private constant: the lines of functions that use it. None: unknown


def mutants_of(source: str) -> Iterator[Mutant]:
    """In the order of their lines. All of them compile."""
    tree = ast.parse(source)
    uses = _Uses(tree)
    maker = _Maker(source, uses)
    maker.visit(tree)
    seen: set[str] = set()
    for mutant in sorted(maker.mutants, key=lambda mutant: mutant.line):
        if mutant.source not in seen and _compiles(mutant.source):
            seen.add(mutant.source)
            yield mutant


def changes_of(source: str) -> set[tuple[str, str]]:
    """Line (stripped) and change of every mutant. Does not check that a mutant compiles, so it is fast."""
    tree = ast.parse(source)
    maker = _Maker(source, _Uses(tree))
    maker.visit(tree)
    return {(mutant.text, mutant.change) for mutant in maker.mutants}


def _compiles(source: str) -> bool:
    try:
        compile(source, "<mutant>", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Uses:
    """Which functions of a module depend on what is done when it is imported."""

    def __init__(self, tree: ast.Module) -> None:
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self._assigned: list[tuple[ast.stmt, set[str], set[str]]] = []
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                self._assigned.append((node, {name for each in targets for name in _names(each)}, _names(node.value)))
        called = {name for _, _, names in self._assigned for name in names}
        self._run_by_import = [node for node in functions if node.name in called]
        self._loads = [
            (name.id, name.lineno)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node not in self._run_by_import
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
        ]

    def is_run_by_import(self, line: int) -> bool:
        return any(_spans(node, line) for node in self._run_by_import)

    def lines_using(self, line: int) -> frozenset[int] | None:
        """Where functions use what is computed on this line. None: others may use it too, or nobody knows."""
        names = {node.name for node in self._run_by_import if _spans(node, line)}
        names |= {name for node, stored, _ in self._assigned if _spans(node, line) for name in stored}
        if not names:
            return None
        count = 0
        while count < len(names):
            count = len(names)
            names |= {name for _, stored, loaded in self._assigned if loaded & names for name in stored}
        if any(not name.startswith("_") for name in names):
            return None
        return frozenset(at for name, at in self._loads if name in names) or None


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


class _Maker(ast.NodeVisitor):
    def __init__(self, source: str, uses: _Uses) -> None:
        self.mutants: list[Mutant] = []
        self._uses = uses
        self._source = source.encode()
        self._lines = source.splitlines()
        self._starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._functions = 0

    # --- text --------------------------------------------------------------------------------------

    def _span(self, first: ast.AST, last: ast.AST | None = None) -> tuple[int, int]:
        last = last or first
        assert isinstance(first, ast.expr | ast.stmt | ast.ExceptHandler)
        assert isinstance(last, ast.expr | ast.stmt | ast.ExceptHandler)
        end_line, end_column = last.end_lineno or last.lineno, last.end_col_offset or 0
        return self._starts[first.lineno - 1] + first.col_offset, self._starts[end_line - 1] + end_column

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replace(self, start: int, end: int, new: str, change: str = "") -> None:
        old = self._source[start:end].decode()
        line = self._source.count(b"\n", 0, start) + 1
        missing = "\n" * (old.count("\n") - new.count("\n"))
        # A statement ends with its line; an expression may go on over several lines inside parentheses.
        new_text = new[:-1] + missing + ")" if new.endswith(")") else new + missing
        self.mutants.append(
            Mutant(
                line,
                line + old.count("\n"),
                self._lines[line - 1].strip(),
                change or f"{_on_one_line(old)} -> {_on_one_line(new)}",
                (self._source[:start] + new_text.encode() + self._source[end:]).decode(),
                self._functions > 0 and not self._uses.is_run_by_import(line),
                self._uses.lines_using(line),
            )
        )

    def _replace_between(self, left: ast.AST, right: ast.AST, pattern: str, new: str) -> None:
        """An operator has no position of its own: it stands between its operands."""
        start, end = self._span(left)[1], self._span(right)[0]
        found = re.search(pattern.encode(), self._source[start:end])
        if found:
            old = found.group().decode()
            change = f"{_on_one_line(self._text(left))} {old} {_on_one_line(self._text(right))}: {old} -> {new}"
            self._replace(start + found.start(), start + found.end(), new, change)

    # --- what is left alone ------------------------------------------------------------------------

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import | ast.ImportFrom) or self._is_left_alone(node):
            return
        if isinstance(node, _DELETED) and self._functions:
            self._replace(*self._span(node), "pass", "delete the statement")
        super().visit(node)

    def _is_left_alone(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Constant):
                return True
            return self._text(node).startswith("log.") or bool(_METRIC.search(self._text(node).split("(")[0]))
        if isinstance(node, ast.If):
            return self._text(node.test) == "TYPE_CHECKING"
        if isinstance(node, ast.Assign | ast.AugAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            return self._text(target) in _NAMES_LEFT_ALONE or bool(_METRIC.search(self._text(target)))
        return False

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_arg(self, node: ast.arg) -> None:
        pass

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            self.visit(decorator)
        self.visit(node.args)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # not its keywords: `frozen=True` is for the reader and the type checker
            self.visit(statement)

    # --- statements --------------------------------------------------------------------------------

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and self._text(node.value) != "None":
            self._replace(*self._span(node), "return None")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue | ast.Break) -> None:
        self._replace(*self._span(node), "pass")

    visit_Break = visit_Continue  # noqa: N815

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if not isinstance(node.body[0], ast.Raise):
            self._replace(*self._span(node.body[0], node.body[-1]), "raise", "except body -> raise")
        self.generic_visit(node)

    # --- conditions --------------------------------------------------------------------------------

    def _condition(self, node: ast.expr) -> None:
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        compared = isinstance(node, ast.Compare) and isinstance(node.ops[0], _NEGATED_BY_COMPARISON)
        if not negated and not compared and not isinstance(node, ast.Constant):
            self._replace(*self._span(node), f"(not ({self._text(node)}))")
        for value in ("True", "False"):
            if not isinstance(node, ast.Constant):
                self._replace(*self._span(node), f"({value})")

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    visit_While = visit_If  # noqa: N815
    visit_IfExp = visit_If  # noqa: N815

    def visit_Assert(self, node: ast.Assert) -> None:
        self._replace(*self._span(node.test), f"(not ({self._text(node.test)}))")

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._condition(condition)
        self.generic_visit(node)

    def visit_match_case(self, node: ast.match_case) -> None:
        if node.guard is not None:
            self._condition(node.guard)
        self.generic_visit(node)

    # --- operators ---------------------------------------------------------------------------------

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        joined, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
        texts = [f"({self._text(value)})" for value in node.values]
        for index in range(len(texts)):
            self._replace(*self._span(node), f"({joined.join(texts[:index] + texts[index + 1 :])})")
        self._replace(*self._span(node), f"({other.join(texts)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._replace(*self._span(node), f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(node.ops, operands, operands[1:], strict=False):
            pattern, new = _COMPARISONS[type(operator)]
            self._replace_between(left, right, pattern, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Add):
            self._replace_between(node.left, node.right, r"\+", "-")
        elif isinstance(node.op, ast.Sub):
            self._replace_between(node.left, node.right, "-", "+")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add):
            self._replace_between(node.target, node.value, r"\+=", "-=")
        elif isinstance(node.op, ast.Sub):
            self._replace_between(node.target, node.value, "-=", "+=")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
            other = "max" if node.func.id == "min" else "min"
            self._replace(*self._span(node.func), other, f"{_on_one_line(self._text(node))}: {node.func.id} -> {other}")
        self.generic_visit(node)

    # --- constants ---------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> None:
        span, value = self._span(node), node.value
        if isinstance(value, bool):
            self._replace(*span, str(not value))
        elif isinstance(value, int):
            others = [value // 2] if value >= _HALVED_FROM else [value + 1, value - 1] if value == 1 else [value + 1]
            for other in others:
                self._replace(*span, str(other))
        elif isinstance(value, str):
            self._sql(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._sql(node)

    def _sql(self, node: ast.expr) -> None:
        start, end = self._span(node)
        text = self._source[start:end].decode()
        if not _SQL.search(text):
            return
        for pattern, new in _SQL_CHANGES:
            for found in pattern.finditer(text):
                before, after = text[: found.start()], text[found.end() :]
                context = " ".join([*before.split()[-2:], found.group(), *after.split()[:2]])
                offset = start + len(before.encode())
                self._replace(
                    offset, offset + len(found.group().encode()), new, f"SQL {context}: {found.group()} -> {new}"
                )


def _on_one_line(text: str) -> str:
    return " ".join(text.split())


# --- which lines are executed --------------------------------------------------------------------


def with_notes(source: str, note: str) -> ast.Module:
    """The module with a call `note(first line, last line)` before every statement of a function: much cheaper than a
    trace function, which Python calls for all code there is."""
    tree = ast.parse(source)
    _Noter(note).visit(tree)
    return ast.fix_missing_locations(tree)


class _Noter(ast.NodeTransformer):
    def __init__(self, note: str) -> None:
        self._note = note
        self._functions = 0

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if self._functions and isinstance(statements, list):
                setattr(node, name, [each for statement in statements for each in (self._call(statement), statement)])
        return node

    def _call(self, statement: ast.stmt) -> ast.stmt:
        """Of a compound statement, only its head: what is in its body has calls of its own."""
        last = statement.end_lineno or statement.lineno
        body = getattr(statement, "body", None)
        if body:
            last = max(statement.lineno, body[0].lineno - 1)
        arguments: list[ast.expr] = [ast.Constant(statement.lineno), ast.Constant(last)]
        call = ast.Call(func=ast.Name(self._note, ast.Load()), args=arguments, keywords=[])
        return ast.copy_location(ast.Expr(call), statement)
