"""Each known way to be wrong is caught within the number of seeds it states, all other rules in place.

A seed counts only if the same story ends well without the mutant.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from duetime.testing.mutants import MUTANTS, Mutant
from duetime.testing.sim import Livelock, simulate


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# The nonce matters only after a failover that lost commits: test_failover.py has its story.
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name != "no-nonce"], ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    for seed in range(mutant.seeds):
        with mutant.applied():
            wrong = _goes_wrong(seed)
        if wrong and not _goes_wrong(seed):
            return
    pytest.fail(f"{mutant.name} survives {mutant.seeds} seeds: {mutant.wrong}")


def _goes_wrong(seed: int) -> bool:
    try:
        return bool(simulate(seed).violations)
    except Livelock:
        return True
