"""scripts/run_tests.py: which commands it runs, and that a failure of either of them is a failure of the whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.run_tests import _run_both, commands, failures_to_run_again


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


ON_SERVER = "tests/e2e/test_kill.py::test_a"


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        ([ON_SERVER], [ON_SERVER]),
        ([], []),
        ([ON_SERVER, "tests/unit/test_errors.py::test_b"], []),
        (["tests/conformance/test_stores.py::test_c"], []),
        ([f"{ON_SERVER}[{n}]" for n in range(4)], []),
    ],
    ids=["of a server", "none", "one without a server", "stores in memory", "too many"],
)
def test_only_a_few_failures_on_real_servers_get_a_second_attempt(
    failed: list[str], again: list[str], tmp_path: Path
) -> None:
    (tmp_path / "lastfailed").write_text(json.dumps(dict.fromkeys(failed, True)))
    assert failures_to_run_again(tmp_path / "lastfailed") == again


@pytest.mark.parametrize("second", ["passes", "fails"])
def test_a_test_that_passes_alone_is_named_and_one_that_fails_again_fails_the_whole(
    second: str, tmp_path: Path
) -> None:
    test = tmp_path / "tests" / "e2e" / "test_x.py"
    test.parent.mkdir(parents=True)
    (tmp_path / "pytest.ini").touch()
    test.write_text(
        "from pathlib import Path\n"
        "def test_x():\n"
        "    runs = Path('runs')\n"
        "    runs.write_text(runs.read_text() + 'x' if runs.exists() else 'x')\n"
        f"    assert len(runs.read_text()) > {1 if second == 'passes' else 2}\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-m", "scripts.run_tests", "tests/e2e"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == (0 if second == "passes" else 1), run.stdout + run.stderr
    assert ("PASSED ALONE" in run.stdout) is (second == "passes")
    assert (tmp_path / "runs").read_text() == "xx"
