"""`make prove`: how far the proof of correctness reaches. Prints the seeds that were run and the faults in them,
the mutants with the seed that caught each, and how many cases of the failure catalogue have tests.

Ends with 1 if a seed broke an invariant, a mutant was not caught, or the catalogue is not whole.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from msgspec import Struct

from duetime.testing.mutants import MUTANTS
from duetime.testing.simulate import caught_by, report, run_seeds

__all__ = ["CASES", "Case", "read_catalogue"]

ROOT = Path(__file__).parents[1]
CASES = 55
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


def prove_seeds(count: int) -> bool:
    started = time.monotonic()
    totals = run_seeds(0, count, progress=sys.stderr.isatty())
    report(totals, time.monotonic() - started)
    return not totals.failed


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
    options = parser.parse_args()
    proofs = [prove_seeds(options.seeds), prove_mutants(), prove_cases()]
    return 0 if all(proofs) else 1


if __name__ == "__main__":
    sys.exit(main())
