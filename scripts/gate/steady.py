"""Runs tests on real servers again and again beside two busy loops, to find those that depend on luck: `make steady`.

    python -m scripts.gate.steady --runs 3 tests/e2e tests/conformance

A piece is a few files of tests, run as `make test` runs them, without a second look. Each failure is shown, added to
the ledger (`python -m scripts.gate.ledger`), and counted. Stopped with Ctrl-C, it continues with the piece in which it
was stopped, as long as the commit, the files and the number of runs are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from ..servers.install import cache_folder
from . import ledger
from .processes import adopt_orphans, end_all, kill
from .record import entries_of
from .second_look import results_of, running

__all__ = ["Progress", "main", "pieces_of"]

_BUSY_LOOPS = 2
_FILES_OF_A_PIECE = 6
_PROCESSES = 3
_PIECE_MINUTES = 45.0
_LEAVE_SECONDS = 15.0
_BUSY = "while True: pass"
_TESTS_FAILED, _NO_TESTS = 1, 5  # exit codes of pytest; none: all of a piece are deselected


class Progress(msgspec.Struct):
    """What has been done, as it is kept in a file."""

    what: str
    done: list[tuple[int, int]] = []  # run and piece
    failed: dict[str, int] = {}  # by test: how often
    tests: int = 0  # that ended

    @classmethod
    def read(cls, file: Path, what: str) -> Progress:
        found = msgspec.json.decode(file.read_bytes(), type=cls) if file.exists() else cls(what)
        return found if found.what == what else cls(what)

    def write(self, file: Path) -> None:
        draft = file.with_suffix(".new")
        draft.write_bytes(msgspec.json.encode(self))
        draft.rename(file)


def pieces_of(paths: Sequence[str]) -> list[list[str]]:
    """The files of tests below the paths, a few at a time, in an order that does not change."""
    files: dict[str, None] = {}
    for path in paths:
        files.update(dict.fromkeys([path] if Path(path).is_file() else map(str, sorted(Path(path).rglob("test_*.py")))))
    listed = list(files)
    return [listed[start : start + _FILES_OF_A_PIECE] for start in range(0, len(listed), _FILES_OF_A_PIECE)]


@contextmanager
def _busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(count)]  # noqa: S603
    try:
        yield
    finally:
        for loop in loops:
            kill(loop.pid)
            loop.wait()


def _run_piece(files: Sequence[str], progress: Progress, *, processes: int, busy_loops: int) -> None:
    """Adds to the progress only when the piece has ended."""
    with tempfile.TemporaryDirectory(prefix="duetime-steady-") as folder:
        record = Path(folder) / "record.jsonl"
        command = [sys.executable, "-m", "pytest", f"--numprocesses={processes}", "--dist=loadscope", *files]
        with _busy(busy_loops):
            try:
                code = subprocess.run(  # noqa: S603
                    [*command, "--no-loadscope-reorder", "-q", "--tb=no", f"--record={record}"],
                    stdin=subprocess.DEVNULL,
                    timeout=_PIECE_MINUTES * 60,
                    check=False,
                ).returncode
            except subprocess.TimeoutExpired:
                code = 1
                print(f"not finished within {_PIECE_MINUTES:g} minutes; these were running:")
                print("\n".join(running(entries_of(record))), flush=True)
        for left in end_all(_LEAVE_SECONDS):
            print(f"killed, because it had not ended with the tests: {left[:300]}", flush=True)
        results = results_of(entries_of(record))
        failures = [result for result in results.values() if result.failed]
        for result in failures:
            progress.failed[result.test] = progress.failed.get(result.test, 0) + 1
            text = result.text or "it did not end"
            ledger.add(ledger.ledger_file(), result.test, list(result.seeds), f"in make steady: {result.final}\n{text}")
            print(f"\nFAILED {result.test}\n{text}", flush=True)
        if code not in (0, _TESTS_FAILED, _NO_TESTS) or (code == _TESTS_FAILED and not failures):
            raise SystemExit(f"pytest ended with exit code {code}")
        progress.tests += len(results)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files and folders of tests")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="how often each test runs (default 3)")
    parser.add_argument("--processes", type=int, default=_PROCESSES, help=f"that run tests (default {_PROCESSES})")
    parser.add_argument("--busy-loops", type=int, default=_BUSY_LOOPS, help=f"beside them (default {_BUSY_LOOPS})")
    parser.add_argument("--again", action="store_true", help="begin anew, also if an earlier run was stopped")
    options = parser.parse_args(arguments)
    adopt_orphans()
    pieces = pieces_of(options.paths)
    what = f"{ledger.head()} {options.runs} {' '.join(options.paths)}"
    file = cache_folder() / f"steady-{hashlib.sha256(what.encode()).hexdigest()[:16]}.json"
    if options.again:
        file.unlink(missing_ok=True)
    progress = Progress.read(file, what)
    began = time.monotonic()
    try:
        for run in range(options.runs):
            for number, files in enumerate(pieces):
                if (run, number) not in progress.done:
                    ended, of = len(progress.done), options.runs * len(pieces)
                    minutes = (time.monotonic() - began) / 60
                    print(
                        f"\nrun {run + 1} of {options.runs}, piece {ended + 1} of {of}, {minutes:.0f} minutes so far:"
                    )
                    print(" ".join(files), flush=True)
                    _run_piece(files, progress, processes=options.processes, busy_loops=options.busy_loops)
                    progress.done.append((run, number))
                    progress.write(file)
    except KeyboardInterrupt:
        end_all(_LEAVE_SECONDS)
        print(f"\nstopped: the same command continues with piece {len(progress.done) + 1}")
        return 130
    _report(progress, options.runs, options.busy_loops)
    return 1 if progress.failed else 0


def _report(progress: Progress, runs: int, busy_loops: int) -> None:
    print(f"\n{progress.tests} tests in {runs} runs beside {busy_loops} busy loops (load {os.getloadavg()[0]:.1f})")
    for test, count in Counter(progress.failed).most_common():
        print(f"FAILED {count} of {runs} times: {test}")
    print(f"{len(progress.failed)} tests failed at least once", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
