"""Which failures of a run are looked at again, alone, and what counts then.

Pure: it reads records (`record.Entry`) and decides. `scripts/run_tests.py` runs the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec

from .record import DIED, FAILED_TO_COLLECT, FINISHED, STARTED, Entry

__all__ = ["FAILURES_MAX", "Result", "by_module", "judged_again", "results_of", "running", "why_no_second_look"]

FAILURES_MAX = 5  # with more, something is wrong that is no noise


class Result(msgspec.Struct, frozen=True):
    """What became of one test."""

    test: str
    outcome: str  # passed, failed or skipped; missing: it has not ended
    seconds: float = 0.0
    text: str = ""
    final: str = ""
    seeds: tuple[int, ...] = ()

    @property
    def failed(self) -> bool:
        return self.outcome in ("failed", "missing")


def results_of(entries: Iterable[Entry]) -> dict[str, Result]:
    """By test. One of which a phase failed has failed; the reasons of all its failures are kept."""
    phases: dict[str, list[Entry]] = {}
    for entry in entries:
        phases.setdefault(entry.test, []).append(entry)
    return {test: _result(test, of_test) for test, of_test in phases.items()}


def _result(test: str, entries: list[Entry]) -> Result:
    phases = [entry for entry in entries if entry.outcome]
    failures = [entry for entry in phases if entry.outcome == "failed"]
    if failures:
        outcome = "failed"
    elif not phases or not any(entry.phase in (FINISHED, FAILED_TO_COLLECT) for entry in entries):
        outcome = "missing"
    else:
        outcome = "skipped" if any(entry.outcome == "skipped" for entry in phases) else "passed"
    return Result(
        test,
        outcome,
        sum(entry.seconds for entry in phases),
        "\n".join(entry.text for entry in failures),
        "; ".join(dict.fromkeys(entry.final for entry in failures if entry.final)),
        tuple(next((entry.seeds for entry in reversed(phases) if entry.seeds), [])),
    )


def running(entries: Iterable[Entry]) -> list[str]:
    """Tests that have started and not finished."""
    left: dict[str, None] = {}
    for entry in entries:
        if entry.phase == STARTED:
            left[entry.test] = None
        elif entry.phase in (FINISHED, DIED):
            left.pop(entry.test, None)
    return list(left)


def why_no_second_look(failures: Sequence[Result]) -> str:
    """Empty: these failures may be noise, and are run again."""
    if len(failures) > FAILURES_MAX:
        return f"{len(failures)} failures are more than {FAILURES_MAX}: something is wrong that is no noise"
    final = [failure for failure in failures if failure.final or failure.outcome == "missing"]
    return "\n".join(f"{failure.test}: {failure.final or 'it has not ended'}" for failure in final)


def by_module(tests: Iterable[str]) -> list[list[str]]:
    """The tests of each file together: each file gets a process of its own."""
    return [list(group) for _, group in groupby(sorted(tests), key=lambda test: test.partition("::")[0])]


def judged_again(failures: Sequence[Result], again: dict[str, Result]) -> tuple[list[Result], list[Result]]:
    """The failures that passed the second time (unstable), and those that did not: they failed, were skipped, or are
    missing."""
    passed = [failure for failure in failures if failure.test in again and again[failure.test].outcome == "passed"]
    return passed, [failure for failure in failures if failure not in passed]
