"""`make unit` and `make test`: tests with pytest in several processes, and the simulator beside them.

    python -m scripts.run_tests tests/unit tests/docs --seeds 200    these tests, and 200 seeds of the simulator
    python -m scripts.run_tests tests/unit tests/sim                 the tests of the simulator (tests/sim) instead

Most tests wait for servers and processes, so more of them run at the same time than there are processors. The tests of
one class, or of one file without classes, run in one process, in their order. tests/unit and tests/docs come first; if
one of them fails, the others do not run. The simulator only computes: it runs at the lowest priority on what the other
tests leave of the processors. Its output is kept and printed at the end.

A second look: up to five failures of tests on real servers and processes run once more after all else has ended, alone,
with the same seeds. What passes then is unstable: it is named at the end, kept in a ledger (`python -m
scripts.gate.ledger`), and does not fail the run. A failure that the load of the machine cannot have made is final: a
violation that the checker found, a traceback in the log of a server, an error while collecting or tearing down, a test
process that ended, and everything in the simulator, tests/unit, tests/docs and conformance on memory and SQLite.

A test that does not end within its time ends its process (scripts/gate/time_limit.py). When the time of the whole is
over, the tests that were running are named, and everything that was started is ended.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from .gate import ledger
from .gate.processes import adopt_orphans, end_all
from .gate.record import Entry, entries_of
from .gate.second_look import Result, by_module, judged_again, results_of, running, why_no_second_look
from .servers.server import WATCH_NAME

__all__ = ["OutOfTime", "Run", "commands", "main"]

_LOWEST_PRIORITY = 19
_PROCESSES = 3
_MINUTES = 50.0
_LOOK_SECONDS = 0.2
_LEAVE_SECONDS = 15.0  # for servers that end when the process that started them has ended
_PYTEST = [sys.executable, "-m", "pytest"]
_IN_PARALLEL = ["--dist=loadscope", "--no-loadscope-reorder"]
_CHEAP = ("unit", "docs")  # folders of tests that find a broken tree in two minutes
_SLOWEST = ["--durations=40", "--durations-min=5"]
_FIXED_SEED = 8463  # of hypothesis, with CI=true
_TESTS_FAILED, _NOT_FINISHED = 1, 2  # exit codes
_THE_TESTS, _THE_SIMULATOR = "the tests", "the simulator"


class OutOfTime(Exception):
    """The time of the whole is over."""


def commands(
    paths: list[str], seeds: int | None = None, processes: int = _PROCESSES
) -> tuple[list[list[str]], list[str] | None]:
    """The commands of the tests, one after the other, and the command of the simulator, if there is anything to run."""
    of_simulator = [path for path in paths if Path(path).name == "sim"]
    cheap = [path for path in paths if Path(path).name in _CHEAP]
    others = [path for path in paths if path not in of_simulator and path not in cheap]
    simulator = None
    if of_simulator:
        simulator = [*_PYTEST, *of_simulator]
    elif seeds:
        simulator = [sys.executable, "-m", "duetime.testing.simulate", "--seeds", str(seeds)]
    pytest = [*_PYTEST, f"--numprocesses={processes}", *_IN_PARALLEL, *_SLOWEST]
    return [[*pytest, *stage] for stage in (cheap, others) if stage], simulator


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files and folders of tests")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="run N seeds of the simulator (unless tests/sim is given)"
    )
    parser.add_argument(
        "--minutes", type=float, default=_MINUTES, help=f"the time of the whole (default {_MINUTES:.0f})"
    )
    parser.add_argument("--processes", type=int, default=_PROCESSES, help=f"that run tests (default {_PROCESSES})")
    options = parser.parse_args(arguments)
    tests, simulator = commands(options.paths, options.seeds, options.processes)
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    with tempfile.TemporaryDirectory(prefix="duetime-run-") as folder:
        run = Run(Path(folder), options.minutes)
        try:
            return run.all(tests, simulator)
        except KeyboardInterrupt:
            print("\ninterrupted", flush=True)
            return 128 + signal.SIGINT
        finally:
            run.end()


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


class Run:
    """One run of tests: what it has started, and what is known of its tests."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self._folder = folder
        self._began = time.monotonic()
        self.ends_at = self._began + minutes * 60
        self._minutes = minutes
        self._processes: list[subprocess.Popen[bytes]] = []
        self._first, self._again = folder / "first.jsonl", folder / "again.jsonl"
        self._of_simulator = folder / "simulator.jsonl"
        fixed = os.environ.get("CI") == "true"
        self._hypothesis = f"--hypothesis-seed={_FIXED_SEED if fixed else int.from_bytes(os.urandom(4))}"

    def all(self, tests: list[list[str]], simulator: list[str] | None) -> int:
        try:
            codes = self._run(tests, simulator)
            self._end_leftovers()
            return self._judged(codes)
        except OutOfTime:
            return self._out_of_time()

    # --- the first pass --------------------------------------------------------------------------

    def _run(self, tests: list[list[str]], simulator: list[str] | None) -> dict[str, int]:
        """The exit codes of the tests and of the simulator. The simulator's output comes last."""
        codes: dict[str, int] = {}
        with tempfile.TemporaryFile() as output:
            beside = None
            if simulator:
                recorded = self._recorded(simulator, self._of_simulator) if "pytest" in simulator else simulator
                beside = self._start(recorded, output if tests else None)
                if tests:
                    os.setpriority(os.PRIO_PROCESS, beside.pid, _LOWEST_PRIORITY)
            for stage in tests:
                if codes.get(_THE_TESTS):
                    print("\nTests that need no servers have failed: the others do not run.", flush=True)
                    end_all(0)
                    self._of_simulator.unlink(missing_ok=True)
                    return codes
                codes[_THE_TESTS] = self._wait(self._start(self._recorded(stage, self._first)))
            if beside:
                if tests:
                    print("\nwaiting for the simulator, which runs beside the tests", flush=True)
                codes[_THE_SIMULATOR] = self._wait(beside)
            output.seek(0)
            sys.stdout.buffer.write(output.read())
            sys.stdout.flush()
        return codes

    def _recorded(self, command: list[str], record: Path) -> list[str]:
        return [*command, f"--record={record}", self._hypothesis]

    def _start(self, command: list[str], output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT if output else None
        )
        self._processes.append(process)
        return process

    def _wait(self, process: subprocess.Popen[bytes]) -> int:
        while time.monotonic() < self.ends_at:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_LOOK_SECONDS)
        raise OutOfTime

    # --- the second look -------------------------------------------------------------------------

    def _judged(self, codes: dict[str, int]) -> int:
        results = results_of(self._entries())
        failures = [result for result in results.values() if result.failed]
        others = [what for what, code in codes.items() if code and not self._is_explained(what, code)]
        unstable: list[Result] = []
        if failures and not others:
            if why := why_no_second_look(failures):
                print(f"\nNo second look at the failures:\n{why}", flush=True)
            else:
                unstable, failures = judged_again(failures, self._look_again([failure.test for failure in failures]))
        for result in unstable:
            _show_unstable(result)
        for result in failures:
            print(f"FAILED {result.test}{f' ({result.final})' if result.final else ''}")
        for what in others:
            print(f"FAILED {what} ended with exit code {codes[what]}")
        self._last_line(results, len(failures), len(unstable))
        return _TESTS_FAILED if failures or others else 0

    def _is_explained(self, what: str, code: int) -> bool:
        """The exit code says that tests failed, and they are on record."""
        record = self._of_simulator if what == _THE_SIMULATOR else self._first
        return code == _TESTS_FAILED and any(result.failed for result in results_of(entries_of(record)).values())

    def _look_again(self, tests: list[str]) -> dict[str, Result]:
        print(f"\nA second look, alone: {len(tests)} of the failed tests run once more", flush=True)
        for of_module in by_module(tests):
            again = [*_PYTEST, *of_module, f"--seeds-of={self._first}"]
            self._wait(self._start(self._recorded(again, self._again)))
            self._end_leftovers()
        return results_of(entries_of(self._again))

    # --- the end ---------------------------------------------------------------------------------

    def _entries(self) -> list[Entry]:
        return entries_of(self._first) + entries_of(self._of_simulator)

    def _last_line(self, results: dict[str, Result], failed: int, unstable: int) -> None:
        outcomes = Counter(result.outcome for result in results.values())
        minutes = (time.monotonic() - self._began) / 60
        print(
            f"\n{outcomes['passed']} passed, {failed} failed, {unstable} unstable, {outcomes['skipped']} skipped,"
            f" {minutes:.1f} minutes",
            flush=True,
        )

    def _out_of_time(self) -> int:
        print(f"\nNOT FINISHED within {self._minutes:g} minutes. These tests were running:", flush=True)
        for test in running([*self._entries(), *entries_of(self._again)]):
            print(f"  {test}")
        print("Where the test processes are:", flush=True)
        for file in self._folder.glob("*.pid"):
            with suppress(ProcessLookupError):
                os.kill(int(file.stem), signal.SIGUSR1)
        time.sleep(2)  # they write in a signal handler and tell nobody when they have
        self.end()
        results = results_of(self._entries())
        self._last_line(results, sum(result.failed for result in results.values()), 0)
        return _NOT_FINISHED

    def _end_leftovers(self) -> None:
        for command in end_all(_LEAVE_SECONDS):
            print(f"killed, because it had not ended with the tests: {command[:300]}", flush=True)

    def end(self) -> None:
        """Everything that was started."""
        # Those that remove the folders of database servers end by themselves.
        end_all(_LEAVE_SECONDS, spared=WATCH_NAME)
        for process in self._processes:
            process.wait()


def _show_unstable(result: Result) -> None:
    print(f"\n{'=' * 72}\nUNSTABLE: failed beside other tests, passed alone: {result.test}")
    print("Find out whether the test or the product is wrong, and mend it. The first failure:\n")
    print(result.text)
    file = ledger.ledger_file()
    ledger.add(file, result.test, list(result.seeds), result.text)
    print(f"noted in {file}\n{'=' * 72}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
