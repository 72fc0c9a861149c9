"""Each known way to be wrong is caught within the number of seeds it states, all other rules in place."""

from __future__ import annotations

import logging

import pytest

from duetime.testing.mutants import MUTANTS, Mutant
from duetime.testing.sim import Livelock, simulate


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    logging.disable(logging.CRITICAL)
    try:
        with mutant.applied():
            assert any(_is_caught(seed) for seed in range(mutant.seeds)), f"{mutant.name} survives: {mutant.wrong}"
    finally:
        logging.disable(logging.NOTSET)


def _is_caught(seed: int) -> bool:
    try:
        return bool(simulate(seed).violations)
    except Livelock:
        return True
