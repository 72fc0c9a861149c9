"""The simulated cluster keeps all invariants, every kind of fault happens, and runs are reproducible."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from scripts.prove import not_reached

from duetime.testing.simulate import Totals, run_seeds
from duetime.testing.simulation.cluster import UNEXPECTED_ERROR_METHODS, simulate

pytestmark = pytest.mark.time_limit(2700, "all seeds run in one fixture, at the lowest priority beside the other tests")

IN_CI = os.environ.get("CI") == "true"
SEEDS = int(os.environ.get("SEEDS") or (2_000 if IN_CI else 300))
# With CI=true, as many as the time is there for.
AT_LEAST, MINUTES_MAX = (500, 10) if IN_CI and "SEEDS" not in os.environ else (SEEDS, math.inf)


@pytest.fixture(scope="module")
def totals(say: Callable[[str], None]) -> Totals:
    totals = run_seeds(0, SEEDS, minutes_max=MINUTES_MAX, at_least=AT_LEAST)
    say(f"{totals.seeds} seeds, {totals.virtual_seconds / 3600:.1f} h of virtual time, {dict(totals.faults)}")
    return totals


def test_no_seed_breaks_an_invariant(totals: Totals) -> None:
    assert not totals.failed, "\n".join(totals.failures)
    assert totals.seeds >= AT_LEAST
    assert totals.callbacks > totals.seeds * 20


def test_every_statement_of_the_engine_is_reached_or_listed_with_a_reason(totals: Totals) -> None:
    wrong = not_reached(totals.executed)
    assert not wrong, "\n".join(wrong)


def test_every_kind_of_fault_happens(totals: Totals) -> None:
    kinds = set(totals.faults)
    assert kinds >= {
        "crash",
        "freeze",
        "jump",
        "departure",
        "request lost",
        "answer lost",
        "store call failed",
        "forward lost",
        "forward repeated",
        "answer to a forward lost",
        "store call slow",
        "store answer slow",
        "store answer lost, applied before",
        "store answer lost, applied after",
        "store answer lost, applied never",
        "outage",
        "drain timed out",
        "client disconnected",
        "load failed for some shards",
        "purge_reached failed for some shards",
        "delivery failed before it began",
        "delivery failed after it was answered",
        "origin unknown",
        "request lost on a broken connection",
        "request received on a connection that then broke",
        "answer of a receiver lost",
        "receiver asked for another call",
        *(f"unexpected error from {method}" for method in UNEXPECTED_ERROR_METHODS),
    }


def test_the_same_seed_gives_the_same_history_byte_for_byte_in_any_process() -> None:
    here = simulate(11)
    assert here.history
    for hash_seed in ("1", "2"):
        program = (
            "import sys; from duetime.testing.simulation.cluster import simulate; sys.stdout.write(simulate(11).digest)"
        )
        there = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            text=True,
        )
        assert there.stdout == here.digest


def test_different_seeds_give_different_histories() -> None:
    assert simulate(1).digest != simulate(2).digest
