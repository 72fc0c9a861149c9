"""make steady: every test runs several times, failures are counted, and a stopped run continues."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.gate import ledger
from scripts.gate.steady import Progress, pieces_of

ROOT = Path(__file__).parents[3]


def test_pieces_have_a_few_files_each_and_name_each_file_once(tmp_path: Path) -> None:
    for number in range(8):
        (tmp_path / f"test_{number}.py").touch()
    first = str(tmp_path / "test_3.py")
    pieces = pieces_of([first, str(tmp_path)])
    assert [len(piece) for piece in pieces] == [6, 2]
    listed = [file for piece in pieces for file in piece]
    assert listed[0] == first
    assert sorted(listed) == [str(tmp_path / f"test_{number}.py") for number in range(8)]


def test_progress_of_another_commit_or_other_tests_does_not_count(tmp_path: Path) -> None:
    file = tmp_path / "progress.json"
    Progress("this", [(0, 0)], {"test": 1}, 7).write(file)
    assert Progress.read(file, "this") == Progress("this", [(0, 0)], {"test": 1}, 7)
    assert Progress.read(file, "other") == Progress("other")


@pytest.fixture
def cache() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # as scripts.servers wants it
        yield Path(folder)


def test_a_test_that_fails_at_times_is_named_with_how_often(tmp_path: Path, cache: Path) -> None:
    plugins = ["scripts.gate.record", "scripts.gate.seeds", "scripts.gate.time_limit"]
    (tmp_path / "conftest.py").write_text(f"pytest_plugins = {plugins}")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider -p no:schemathesis -p no:asyncio\n")
    (tmp_path / "test_a.py").write_text(
        "import pathlib\n"
        "def test_fails_every_second_time():\n"
        "    with open('runs', 'a') as runs: runs.write('x')\n"
        "    assert len(pathlib.Path('runs').read_text()) % 2 == 0\n"
        "def test_is_steady(): pass\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "scripts.gate.steady", "--runs=3", "--processes=1", "--busy-loops=1", "test_a.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "DUETIME_SERVERS_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1
    assert "FAILED 2 of 3 times: test_a.py::test_fails_every_second_time\n1 tests failed at least once" in run.stdout
    assert "6 tests in 3 runs beside 1 busy loops" in run.stdout
    noted = ledger.read(cache / "unstable-tests.jsonl")
    assert [entry.test for entry in noted] == ["test_a.py::test_fails_every_second_time"] * 2
