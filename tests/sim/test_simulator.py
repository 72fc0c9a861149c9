"""The simulated cluster keeps all invariants, every kind of fault happens, and runs are reproducible."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from scripts.prove import not_reached

from duetime.testing.simulate import Totals, run_seeds
from duetime.testing.simulation.cluster import UNEXPECTED_ERROR_METHODS, simulate

SEEDS = int(os.environ.get("SEEDS") or (2_000 if os.environ.get("CI") == "true" else 300))


@pytest.fixture(scope="module")
def totals() -> Totals:
    return run_seeds(0, SEEDS)


def test_no_seed_breaks_an_invariant(totals: Totals) -> None:
    print(f"{totals.seeds} seeds, {totals.virtual_seconds / 3600:.1f} h, {dict(totals.faults)}")
    assert not totals.failed, "\n".join(totals.failures)
    assert totals.seeds == SEEDS
    assert totals.callbacks > SEEDS * 20


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
