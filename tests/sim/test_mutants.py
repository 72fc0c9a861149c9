"""Each mutant is caught within its number of seeds.

A seed counts only if it passes without the mutant.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from duetime.testing.mutants import MUTANTS, Mutant
from duetime.testing.simulate import caught_by


@pytest.fixture(autouse=True)
def _silence() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# The nonce matters only after a failover that lost commits: test_failover.py tests it.
@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name != "no-nonce"], ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    assert caught_by(mutant.name) is not None, f"survives {mutant.seeds} seeds: {mutant.wrong}"
