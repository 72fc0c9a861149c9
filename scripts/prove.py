"""`make prove`: how far the proof of correctness reaches. Prints the seeds that were run and the faults in them,
the mutants with the seed that caught each, how many statements of engine, cluster and service the seeds reach, and
how many cases of the failure catalogue have tests.

The exit code is 1 if a seed broke an invariant, a mutant was not caught, a statement was neither reached nor listed
with a reason (prove_unreached.toml), or the catalogue is incomplete.

After a change of the engine: `python scripts/prove.py --write-unreached --seeds 200` rewrites the list. It keeps the
reasons of statements that still exist and are still not reached; write a reason for each new one.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
from msgspec import Struct

from duetime.testing.mutants import MUTANTS
from duetime.testing.simulate import caught_by, report, run_seeds
from duetime.testing.statement_coverage import MODULES, Place, Statement, statements_of

__all__ = ["CASES", "Case", "Unreached", "not_reached", "read_catalogue", "read_unreached"]

ROOT = Path(__file__).parents[1]
CASES = 55
UNREACHED = Path(__file__).with_name("prove_unreached.toml")
# The nonce matters only after a failover that lost commits, which seeds do not play: it has a story of its own.
STORIES = {"no-nonce": "tests/sim/test_failover.py"}

_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+?) \| (.*?) ?\|$", re.MULTILINE)
_NOT_YET = "not yet: "


class Case(Struct, frozen=True):
    """A row of docs/concepts/failures.md."""

    number: int
    scenario: str
    invariants: str
    behaviour: str
    tests: tuple[str, ...]  # path::name

    @property
    def missing(self) -> str:
        """Which part will bring it; empty if it is covered."""
        return self.behaviour.removeprefix(_NOT_YET) if self.behaviour.startswith(_NOT_YET) else ""


def read_catalogue() -> list[Case]:
    """All rows, in their order."""
    text = (ROOT / "docs" / "concepts" / "failures.md").read_text("utf-8")
    return [
        Case(int(number), scenario, invariants, behaviour, tuple(re.findall(r"`([^`]+::[^`]+)`", tests)))
        for number, scenario, invariants, behaviour, tests in _ROW.findall(text)
    ]


def prove_seeds(count: int) -> tuple[bool, set[Place]]:
    started = time.monotonic()
    totals = run_seeds(0, count, progress=sys.stderr.isatty())
    report(totals, time.monotonic() - started)
    return not totals.failed, totals.executed


def prove_mutants() -> bool:
    played = [mutant.name for mutant in MUTANTS if mutant.name not in STORIES]
    caught = 0
    with ProcessPoolExecutor() as pool:
        for name, seed in zip(played, pool.map(caught_by, played), strict=True):
            print(f"  {name}: " + ("NOT CAUGHT" if seed is None else f"caught by seed {seed}"), flush=True)
            caught += seed is not None
    for name, story in STORIES.items():
        told = subprocess.run([sys.executable, "-m", "pytest", "-q", story], cwd=ROOT, capture_output=True, check=False)  # noqa: S603
        print(f"  {name}: " + ("NOT CAUGHT" if told.returncode else f"caught by {story}"))
        caught += not told.returncode
    print(f"mutants: {caught} of {len(MUTANTS)} caught")
    return caught == len(MUTANTS)


class Unreached(Struct, frozen=True):
    """Statements of one function that the seeds do not reach, and why."""

    module: str
    function: str
    reason: str
    statements: tuple[str, ...]

    def names(self, statement: Statement) -> bool:
        where = (self.module, self.function)
        return (statement.module, statement.function) == where and statement.text in self.statements


def read_unreached() -> list[Unreached]:
    return msgspec.toml.decode(UNREACHED.read_bytes(), type=dict[str, list[Unreached]]).get("unreached", [])


def not_reached(reached: set[Place]) -> list[str]:
    """What is wrong with the statements that were reached and those that are listed: one line for each."""
    statements = [statement for module in MODULES for statement in statements_of(module)]
    listed = read_unreached()
    excused = {s.place for s in statements if any(entry.names(s) for entry in listed)}
    wrong = [
        f"not reached: {s.module}:{s.line} {s.function}: {s.text}"
        for s in statements
        if s.place not in reached | excused
    ]
    for entry in listed:
        texts = {s.text for s in statements if entry.names(s)}
        wrong += [f"listed, but not there: {entry.function}: {text}" for text in entry.statements if text not in texts]
        if not entry.reason:
            wrong.append(f"listed without a reason: {entry.function}")
    return wrong


def prove_statements(reached: set[Place]) -> bool:
    wrong = not_reached(reached)
    for line in wrong:
        print(f"  {line}")
    for module in MODULES:
        statements = statements_of(module)
        print(f"  {module}: {sum(s.place in reached for s in statements)} of {len(statements)} statements reached")
    every = [statement for module in MODULES for statement in statements_of(module)]
    print(f"statements: {sum(s.place in reached for s in every)} of {len(every)} reached")
    return not wrong


def write_unreached(count: int) -> None:
    """Rewrites the list: the statements that this many seeds do not reach."""
    known = {(e.module, e.function, text): e.reason for e in read_unreached() for text in e.statements}
    reached = run_seeds(0, count).executed
    found: dict[tuple[str, str, str], list[str]] = {}
    for statement in (statement for module in MODULES for statement in statements_of(module)):
        if statement.place not in reached:
            texts = found.setdefault((statement.module, statement.function, known.get(_key(statement), "")), [])
            if statement.text not in texts:
                texts.append(statement.text)
    lines = ["# Statements of engine, cluster and service that the seeds of the simulator do not reach, and why."]
    lines.append("# Written by `python scripts/prove.py --write-unreached`; the reasons are added by hand.")
    for (module, function, reason), texts in found.items():
        lines += ["", "[[unreached]]", f"module = {_text(module)}", f"function = {_text(function)}"]
        lines += [f"reason = {_text(reason)}", "statements = [", *(f"    {_text(text)}," for text in texts), "]"]
    UNREACHED.write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{len(found)} entries, {sum(not reason for *_, reason in found)} of them without a reason")


def _key(statement: Statement) -> tuple[str, str, str]:
    return statement.module, statement.function, statement.text


def _text(text: str) -> str:
    return msgspec.json.encode(text).decode()


def prove_cases() -> bool:
    cases = read_catalogue()
    covered = [case for case in cases if case.tests and not case.missing]
    for part in sorted({case.missing for case in cases if case.missing}):
        numbers = ", ".join(str(case.number) for case in cases if case.missing == part)
        print(f"  not yet: {numbers} ({part})")
    tests = sum(len(case.tests) for case in covered)
    print(f"cases: {len(covered)} of {CASES} covered, by {tests} tests")
    return len(cases) == CASES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="how many (default 200)")
    parser.add_argument("--write-unreached", action="store_true", help="only write the list of statements not reached")
    options = parser.parse_args()
    if options.write_unreached:
        write_unreached(options.seeds)
        return 0
    seeds_hold, reached = prove_seeds(options.seeds)
    proofs = [seeds_hold, prove_mutants(), prove_statements(reached), prove_cases()]
    return 0 if all(proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
