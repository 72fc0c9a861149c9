"""`make unit` and `make test`: tests with pytest in several processes, and the simulator beside them.

    python -m scripts.run_tests tests/unit tests/docs --seeds 200    these tests, and 200 seeds of the simulator
    python -m scripts.run_tests tests/unit tests/sim                 the tests of the simulator (tests/sim) instead

Most tests wait for servers and processes, so more of them run at the same time than there are processors. The tests of
one class, or of one file without classes, run in one process, in their order. The simulator only computes: it runs at
the lowest priority on what the other tests leave of the processors. Its output is kept and printed at the end.

A few failures of tests on real servers may be due to the load of all the others: at the end these run once more, alone.
If they pass then, the whole has passed, and the last lines name them. Tests without servers get no second attempt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["commands", "failures_to_run_again", "main"]

_LOWEST_PRIORITY = 19
_PROCESSES = 3
_ON_SERVERS = ("tests/conformance/", "tests/e2e/")
_AGAIN_MAX = 3  # with more failures something is wrong that is not the load
_LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")
_PYTEST = [sys.executable, "-m", "pytest"]
_IN_PARALLEL = [f"--numprocesses={_PROCESSES}", "--dist=loadscope", "--no-loadscope-reorder"]


def commands(paths: list[str], seeds: int | None = None) -> tuple[list[str] | None, list[str] | None]:
    """The command of the tests, and the command of the simulator. None: there is nothing to run."""
    of_simulator = [path for path in paths if Path(path).name == "sim"]
    others = [path for path in paths if path not in of_simulator]
    simulator = None
    if of_simulator:
        simulator = [*_PYTEST, *of_simulator]
    elif seeds:
        simulator = [sys.executable, "-m", "duetime.testing.simulate", "--seeds", str(seeds)]
    # Without --cache-clear the tests that failed in an earlier run would be among those that failed in this one.
    return [*_PYTEST, *_IN_PARALLEL, "--cache-clear", *others] if others else None, simulator


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files and folders of tests")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="run N seeds of the simulator (unless tests/sim is given)"
    )
    options = parser.parse_args(arguments)
    tests, simulator = commands(options.paths, options.seeds)
    if tests is None or simulator is None:
        command = tests or simulator
        assert command is not None
        code = subprocess.run(command, check=False).returncode  # noqa: S603
    else:
        code = _run_both(tests, simulator)
    return _run_again(code) if tests and code == 1 else code


def _run_both(tests: list[str], simulator: list[str]) -> int:
    """The exit code of the tests, or, if they passed, that of the simulator."""
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(  # noqa: S603
            simulator,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(_LOWEST_PRIORITY),
        )
        try:
            code = subprocess.run(tests, check=False).returncode  # noqa: S603
            print("\nwaiting for the simulator, which runs beside the tests", flush=True)
            simulator_code = beside.wait()
        finally:
            beside.terminate()
            beside.wait()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return code or simulator_code


def failures_to_run_again(last_failed: Path) -> list[str]:
    """The tests that failed, by pytest's own list, if they are few and all of them need real servers. Else none."""
    failed = sorted(json.loads(last_failed.read_text())) if last_failed.exists() else []
    on_servers = [test for test in failed if test.startswith(_ON_SERVERS) and "test_stores.py" not in test]
    return failed if len(failed) == len(on_servers) <= _AGAIN_MAX else []


def _run_again(code: int) -> int:
    failed = failures_to_run_again(_LAST_FAILED)
    if not failed:
        return code
    print(f"\nrunning {len(failed)} of the failed tests once more, alone", flush=True)
    if subprocess.run([*_PYTEST, *failed], check=False).returncode:  # noqa: S603
        return code
    print("\nFAILED BESIDE OTHER TESTS AND PASSED ALONE. Find out why: such a test hides what it should show.")
    print("\n".join(failed), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
