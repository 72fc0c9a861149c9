"""scripts/run_tests.py: which commands it runs, and that a failure of either of them is a failure of the whole."""

from __future__ import annotations

import sys

import pytest
from scripts.run_tests import _run_both, commands


def test_the_tests_of_the_simulator_run_beside_the_others() -> None:
    tests, simulator = commands(["tests/unit", "tests/sim", "tests/e2e"], seeds=200)
    assert tests is not None
    assert simulator is not None
    assert tests[-2:] == ["tests/unit", "tests/e2e"]
    assert "--dist=loadscope" in tests
    assert simulator[1:] == ["-m", "pytest", "tests/sim"]


def test_seeds_of_the_simulator_run_beside_the_tests() -> None:
    _, simulator = commands(["tests/unit"], seeds=200)
    assert simulator is not None
    assert simulator[1:] == ["-m", "duetime.testing.simulate", "--seeds", "200"]


def test_tests_can_run_without_the_simulator_and_the_simulator_without_other_tests() -> None:
    assert commands(["tests/unit"])[1] is None
    assert commands(["tests/sim"])[0] is None


@pytest.mark.parametrize(
    ("tests", "simulator", "code"), [(0, 0, 0), (3, 0, 3), (0, 4, 4), (3, 4, 3)], ids=["none", "tests", "seeds", "both"]
)
def test_a_failure_of_either_is_a_failure_and_both_outputs_are_shown(
    tests: int, simulator: int, code: int, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    programs = [(tests, "tests end"), (simulator, "seeds end")]
    assert _run_both(*([sys.executable, "-c", f"print({text!r}); exit({end})"] for end, text in programs)) == code
    shown = capfdbinary.readouterr().out
    assert b"tests end" in shown
    assert b"seeds end" in shown
