"""scripts/run_tests.py on small projects of its own: what fails a run, what is looked at again, what is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.gate import ledger
from scripts.gate.processes import command_line
from scripts.run_tests import commands

ROOT = Path(__file__).parents[3]
CONFTEST = 'pytest_plugins = ["scripts.gate.record", "scripts.gate.seeds", "scripts.gate.time_limit"]'
ONLY_THE_FIRST_TIME = """
    def fails_only_the_first_time(name):
        mark = pathlib.Path(name)
        first = not mark.exists()
        mark.touch()
        return first
"""


def test_the_tests_of_the_simulator_run_beside_the_others() -> None:
    [tests], simulator = commands(["tests/e2e", "tests/sim", "tests/conformance"], seeds=200)
    assert simulator is not None
    assert tests[-2:] == ["tests/e2e", "tests/conformance"]
    assert "--dist=loadscope" in tests
    assert simulator[1:] == ["-m", "pytest", "tests/sim"]


def test_seeds_of_the_simulator_run_beside_the_tests() -> None:
    _, simulator = commands(["tests/unit"], seeds=200)
    assert simulator is not None
    assert simulator[1:] == ["-m", "duetime.testing.simulate", "--seeds", "200"]


def test_tests_can_run_without_the_simulator_and_the_simulator_without_other_tests() -> None:
    assert commands(["tests/unit"])[1] is None
    assert commands(["tests/sim"])[0] == []


class Project:
    """A checkout with a few tests."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.folder = folder
        self.cache = cache
        (folder / "pytest.ini").write_text(
            "[pytest]\naddopts = --strict-markers -p no:cacheprovider -p no:schemathesis -p no:asyncio\n"
        )

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        (self.folder / "conftest.py").write_text(CONFTEST)
        path.write_text("import pathlib, subprocess, sys, time, pytest\n" + textwrap.dedent(text))

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "scripts.run_tests", *arguments, "--processes=1")

    def python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "DUETIME_SERVERS_CACHE": str(self.cache)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=100,
            check=False,
        )


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with tempfile.TemporaryDirectory() as cache:
        Path(cache).chmod(0o755)  # as scripts.servers wants it
        yield Project(tmp_path, Path(cache))


def last_line(run: subprocess.CompletedProcess[str]) -> str:
    return run.stdout.strip().rpartition("\n")[2].rpartition(",")[0]


def test_what_passes_alone_is_named_and_noted_and_draws_the_same_seed(project: Project) -> None:
    project.write(
        "tests/e2e/test_a.py",
        """
        from scripts.gate.seeds import new_seed

        def test_fails_once():
            seed = new_seed()
            with open("seeds", "a") as seeds:
                print(seed, file=seeds)
            assert len(open("seeds").readlines()) == 2, "it was beside others"

        def test_passes(): pass
        def test_is_skipped(): pytest.skip("no need")
        """,
    )
    run = project.run("tests/e2e")
    assert (run.returncode, last_line(run)) == (0, "1 passed, 0 failed, 1 unstable, 1 skipped")
    assert "UNSTABLE: failed beside other tests, passed alone: tests/e2e/test_a.py::test_fails_once" in run.stdout
    assert run.stdout.count("AssertionError: it was beside others") > 1  # as pytest shows it, and at the end
    first, second = (project.folder / "seeds").read_text().split()
    assert first == second
    (noted,) = ledger.read(project.cache / "unstable-tests.jsonl")
    assert (noted.test, noted.seeds) == ("tests/e2e/test_a.py::test_fails_once", [int(first)])
    assert "it was beside others" in noted.failure


def test_what_fails_again_or_is_skipped_or_missing_the_second_time_has_failed(project: Project) -> None:
    project.write(
        "tests/e2e/test_a.py",
        ONLY_THE_FIRST_TIME
        + """
    def test_fails(): assert False

    def test_is_skipped_then():
        assert not fails_only_the_first_time("skip")
        pytest.skip("not this time")

    if not pathlib.Path("gone").exists():
        def test_is_gone_then():
            assert not fails_only_the_first_time("gone")
    """,
    )
    run = project.run("tests/e2e")
    assert (run.returncode, last_line(run)) == (1, "0 passed, 3 failed, 0 unstable, 0 skipped")
    for name in ("test_fails", "test_is_skipped_then", "test_is_gone_then"):
        assert f"FAILED tests/e2e/test_a.py::{name}\n" in run.stdout


def test_what_noise_cannot_make_is_not_looked_at_again(project: Project) -> None:
    project.write(
        "tests/e2e/test_a.py",
        """
        from scripts.gate.record import FinalFailure, server_log

        def test_judges(): raise FinalFailure("lost")
        def test_judges_in_a_group(): raise ExceptionGroup("", [FinalFailure("lost")])

        def test_finds_a_traceback():
            server_log(pathlib.Path("log"))
            pathlib.Path("log").write_text("Traceback (most recent call last)")
            assert False
        """,
    )
    for file in ("tests/unit/test_b.py", "tests/conformance/test_stores.py"):
        project.write(file, "def test_computes(): assert False")
    run = project.run("tests/e2e", "tests/conformance", "tests/unit/test_b.py")
    assert (run.returncode, last_line(run)) == (1, "0 passed, 5 failed, 0 unstable, 0 skipped")
    for test, why in {
        "e2e/test_a.py::test_judges": "a verdict of the checker",
        "e2e/test_a.py::test_judges_in_a_group": "a verdict of the checker",
        "e2e/test_a.py::test_finds_a_traceback": "a traceback in log",
        "unit/test_b.py::test_computes": "a test without servers",
        "conformance/test_stores.py::test_computes": "a test without servers",
    }.items():
        assert f"FAILED tests/{test} ({why})" in run.stdout
    assert "A second look" not in run.stdout


def test_a_failure_while_tearing_down_is_final_and_so_are_more_than_five(project: Project) -> None:
    project.write(
        "tests/e2e/test_a.py",
        """
        @pytest.fixture
        def left():
            yield
            assert not pathlib.Path("mark").exists()

        def test_leaves_something(left): pathlib.Path("mark").touch()
        """,
    )
    run = project.run("tests/e2e")
    assert (run.returncode, last_line(run)) == (1, "0 passed, 1 failed, 0 unstable, 0 skipped")
    assert "test_leaves_something: failed while tearing down" in run.stdout
    project.write("tests/e2e/test_a.py", "\n".join(f"def test_{n}(): assert False" for n in range(6)))
    run = project.run("tests/e2e")
    assert (run.returncode, last_line(run)) == (1, "0 passed, 6 failed, 0 unstable, 0 skipped")
    assert "6 failures are more than 5" in run.stdout


def test_the_simulator_is_not_looked_at_again_and_its_failure_fails_the_whole(project: Project) -> None:
    project.write("tests/e2e/test_a.py", "def test_passes(): pass")
    project.write("tests/sim/test_s.py", "def test_seeds(): print('the seeds'); assert False")
    run = project.run("tests/e2e", "tests/sim")
    assert (run.returncode, last_line(run)) == (1, "1 passed, 1 failed, 0 unstable, 0 skipped")
    assert "the seeds" in run.stdout
    assert "FAILED tests/sim/test_s.py::test_seeds (a test without servers)" in run.stdout


def test_if_a_cheap_test_fails_those_with_servers_and_the_simulator_do_not_run(project: Project) -> None:
    project.write("tests/unit/test_a.py", "def test_computes(): assert False")
    project.write("tests/e2e/test_b.py", "def test_asks(): pathlib.Path('asked').touch()")
    project.write("tests/sim/test_s.py", "def test_seeds(): time.sleep(1_000)")
    run = project.run("tests/e2e", "tests/sim", "tests/unit")
    assert (run.returncode, last_line(run)) == (1, "0 passed, 1 failed, 0 unstable, 0 skipped")
    assert not (project.folder / "asked").exists()


def test_a_file_that_cannot_be_imported_fails_the_run(project: Project) -> None:
    project.write("tests/e2e/test_a.py", "def test_passes(): pass")
    project.write("tests/e2e/test_b.py", "import nothing_of_this_name")
    run = project.run("tests/e2e")
    assert run.returncode == 1
    assert "tests/e2e/test_b.py: failed while collecting" in run.stdout or "ended with exit code 2" in run.stdout


def test_a_test_that_does_not_end_is_shown_and_ended_with_what_it_started_and_the_others_run(project: Project) -> None:
    project.write(
        "tests/e2e/test_a.py",
        """
        import asyncio

        async def waits_for_ever():
            await asyncio.sleep(1_000)

        @pytest.mark.time_limit(1.5, "to see it end")
        def test_hangs(tmp_path):
            (tmp_path / "server.log").write_text("the server has said this")
            process = subprocess.Popen(["sleep", "1234"])
            pathlib.Path("pid").write_text(str(process.pid))
            asyncio.run(waits_for_ever())

        def test_comes_after_it(): pass
        """,
    )
    run = project.run("tests/e2e")
    assert (run.returncode, last_line(run)) == (1, "1 passed, 1 failed, 0 unstable, 0 skipped")
    assert "tests/e2e/test_a.py::test_hangs has not ended within 1.5 s" in run.stdout
    assert "test_a.py:6 waits_for_ever" in run.stdout
    assert "the server has said this" in run.stdout
    assert "FAILED tests/e2e/test_a.py::test_hangs (its process ended)" in run.stdout
    assert "sleep 1234" not in command_line(int((project.folder / "pid").read_text()))


TIME_IS_OVER_ONCE_IT_HANGS = """
import pathlib, sys, threading, time
from scripts import run_tests

class Run(run_tests.Run):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        threading.Thread(target=self.end_it, daemon=True).start()

    def end_it(self):
        while not pathlib.Path("hangs").exists():
            time.sleep(0.01)
        self.ends_at = time.monotonic()

run_tests.Run = Run
sys.exit(run_tests.main(["tests/e2e", "--processes=1"]))
"""


def test_when_the_time_of_the_whole_is_over_the_running_tests_are_named_and_everything_is_ended(
    project: Project,
) -> None:
    project.write(
        "tests/e2e/test_a.py",
        """
        def test_hangs():
            process = subprocess.Popen(["sleep", "1235"], start_new_session=True)
            pathlib.Path("pid").write_text(str(process.pid))
            pathlib.Path("hangs").touch()
            time.sleep(1_000)
        """,
    )
    run = project.python("-c", TIME_IS_OVER_ONCE_IT_HANGS)
    assert run.returncode == 2
    assert "NOT FINISHED within 50 minutes. These tests were running:\n  tests/e2e/test_a.py::test_hangs" in run.stdout
    assert "in test_hangs" in run.stdout  # the stacks
    assert "sleep 1235" not in command_line(int((project.folder / "pid").read_text()))
