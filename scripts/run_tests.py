"""`make unit` and `make test`: tests with pytest in several processes, and the simulator beside them.

    python -m scripts.run_tests tests/unit tests/docs --seeds 200    these tests, and 200 seeds of the simulator
    python -m scripts.run_tests tests/unit tests/sim                 the tests of the simulator (tests/sim) instead

Most tests wait for servers and processes, so more of them run at the same time than there are processors. The tests of
one class, or of one file without classes, run in one process, in their order. The simulator only computes: it runs at
the lowest priority on what the other tests leave of the processors. Its output is kept and printed at the end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["commands", "main"]

_LOWEST_PRIORITY = 19
_PROCESSES = 3
_IN_PARALLEL = [f"--numprocesses={_PROCESSES}", "--dist=loadscope", "--no-loadscope-reorder"]


def commands(paths: list[str], seeds: int | None = None) -> tuple[list[str] | None, list[str] | None]:
    """The command of the tests, and the command of the simulator. None: there is nothing to run."""
    of_simulator = [path for path in paths if Path(path).name == "sim"]
    others = [path for path in paths if path not in of_simulator]
    simulator = None
    if of_simulator:
        simulator = [sys.executable, "-m", "pytest", *of_simulator]
    elif seeds:
        simulator = [sys.executable, "-m", "duetime.testing.simulate", "--seeds", str(seeds)]
    return [sys.executable, "-m", "pytest", *_IN_PARALLEL, *others] if others else None, simulator


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
        return subprocess.run(command, check=False).returncode  # noqa: S603
    return _run_both(tests, simulator)


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
