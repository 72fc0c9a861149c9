"""scripts/mutate.py on a module of a few lines: what tests notice is killed, what they do not is reported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts.mutations import mutants_of

ROOT = Path(__file__).parents[3]

TINY = '''\
"""A module."""

LIMIT = 3


def admit(count: int) -> bool:
    """Whether one more is allowed."""
    return count < LIMIT


def forgotten(count: int) -> int:
    return max(count, 1)
'''

TESTS = """\
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import tiny


def test_the_limit():
    assert tiny.admit(2) and not tiny.admit(3)
"""


class Mutated:
    """The tiny module and its test in a folder, and the command run on them."""

    def __init__(self, folder: Path) -> None:
        self.module, self.tests = folder / "tiny.py", folder / "test_tiny.py"
        self.survivors = folder / "survivors.toml"
        self.module.write_text(TINY)
        self.tests.write_text(TESTS)

    def run(self, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scripts.mutate", str(self.module), "--tests", str(self.tests)]
        command += ["--seeds", "0", "--survivors", str(self.survivors), *options]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def tiny(tmp_path: Path) -> Mutated:
    return Mutated(tmp_path)


def test_what_a_test_notices_is_killed_and_what_none_notices_is_shown_as_a_diff(tiny: Mutated) -> None:
    ended = tiny.run()
    assert ended.returncode == 1, ended.stderr
    assert "admit" not in ended.stdout
    assert "LIMIT" not in ended.stdout  # a constant is changed by importing the module again
    assert f"SURVIVED {tiny.module}:12: max(count, 1): max -> min" in ended.stdout
    assert "-     return max(count, 1)\n  +     return min(count, 1)" in ended.stdout
    assert "tiny: 7 mutants, 3 killed by tests (0 by time or memory), 0 killed by the simulator, 0 judged, 4 open" in (
        ended.stdout
    )
    assert tiny.module.read_text() == TINY


def test_a_judged_survivor_is_not_reported_and_a_judgement_of_nothing_is_stale(tiny: Mutated) -> None:
    line = "return max(count, 1)"
    changes = ["return max(count, 1) -> return None", "max(count, 1): max -> min", "1 -> 2", "1 -> 0", "gone -> None"]
    entries = [f'[[survivor]]\nmodule = "tiny"\nline = "{line}"\nchange = "{c}"\nreason = "unused"\n' for c in changes]
    tiny.survivors.write_text("\n".join(entries))
    ended = tiny.run()
    assert ended.returncode == 0, ended.stdout
    assert ended.stdout.count("stale judgement") == 1
    assert f"{line}: gone -> None" in ended.stdout
    assert "4 judged, 0 open" in ended.stdout


def test_a_mutant_that_never_ends_is_killed_by_time(tiny: Mutated) -> None:
    tiny.module.write_text("def admit(count):\n    while count == 2:\n        count = 1\n    return count == 1\n")
    ended = tiny.run("--patience", "0.5", "--lines", "3")
    assert "3 killed by tests" in ended.stdout, ended.stdout
    assert "(0 by time or memory)" not in ended.stdout


def test_tests_that_fail_without_a_mutant_stop_the_run(tiny: Mutated) -> None:
    tiny.tests.write_text(TESTS.replace("not tiny", "tiny"))
    ended = tiny.run()
    assert ended.returncode == 2
    assert "the tests fail without a mutant" in ended.stderr
    assert "test_the_limit" in ended.stderr


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("if a:\n    b()", {"a -> (not (a))", "a -> (True)", "a -> (False)", "delete the statement"}),
        ("x = a <= b", {"delete the statement", "a <= b: <= -> <"}),
        ("return a not in b", {"return a not in b -> return None", "a not in b: not in -> in"}),
        ("return a and b", {"return a and b -> return None", "a and b -> ((a))", "a and b -> ((b))"}),
        ("try:\n    pass\nexcept E:\n    f()", {"except body -> raise", "delete the statement"}),
        ("while True:\n    break", {"break -> pass", "True -> False"}),
        ("return [c for c in d if not c]", {"not c -> (c)", "not c -> (True)", "not c -> (False)"}),
        ("f(5_000, False)", {"delete the statement", "5_000 -> 2500", "False -> True"}),
        ("return 'WHERE a = 1 AND b < 2'", {"SQL 'WHERE a = 1 AND: = -> <>", "SQL = 1 AND b <: AND -> OR"}),
    ],
)
def test_each_kind_of_mutant_is_made(source: str, changes: set[str]) -> None:
    body = "\n".join(f"    {line}" for line in source.splitlines())
    mutants = list(mutants_of(f"def it():\n{body}\n"))
    assert changes <= {mutant.change for mutant in mutants}
    for mutant in mutants:
        assert mutant.source.count("\n") == body.count("\n") + 2  # lines keep their numbers


@pytest.mark.parametrize(
    "source",
    [
        "log.info('%d', 5)",
        "self._telemetry.commits.add('applied')",
        "self.telemetry.parked.value += 1",
        "'a docstring'",
        "import a",
        "__slots__ = ()",
    ],
)
def test_logs_metrics_docstrings_and_imports_are_left_alone(source: str) -> None:
    assert list(mutants_of(f"def it():\n    {source}\n")) == []
