"""Run many seeds of the simulator on all cores: `make sim`, or `python -m duetime.testing.simulate --seeds 2000`.

Prints a progress bar, what was covered, and for every failing seed its first violation and the command that runs the
seed again.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext

from msgspec import Struct

from duetime.testing.mutants import MUTANTS
from duetime.testing.simulation.cluster import Run, simulate
from duetime.testing.simulation.loop import Livelock
from duetime.testing.statement_coverage import Place, Tracer

__all__ = ["Totals", "caught_by", "report", "run_seeds"]

_SHOWN_MAX = 3
_SEEDS_AT_A_TIME = 100


class Totals(Struct):
    """The results of a number of seeds."""

    seeds: int = 0
    failed: list[int] = []
    failures: list[str] = []
    requests: int = 0
    callbacks: int = 0
    virtual_seconds: float = 0.0
    faults: Counter[str] = Counter()
    executed: set[Place] = set()  # statements of engine, cluster and service

    def add(self, run: Run) -> None:
        self.seeds += 1
        self.requests += run.requests
        self.callbacks += run.callbacks
        self.virtual_seconds += run.virtual_seconds
        self.faults.update(run.faults)
        if run.violations:
            self.failed.append(run.seed)
            if len(self.failures) < _SHOWN_MAX:
                self.failures.append(f"seed {run.seed}: {run.violations[0]}")


def run_seeds(
    first: int,
    count: int,
    *,
    jobs: int | None = None,
    progress: bool = False,
    minutes_max: float = math.inf,
    at_least: int = 0,
) -> Totals:
    """Seeds first … first+count-1, in parallel. After `minutes_max` it ends early, if `at_least` so many have run."""
    totals = Totals(failed=[], failures=[], faults=Counter(), executed=set())
    started = time.monotonic()
    seeds = range(first, first + count)
    with ProcessPoolExecutor(jobs or os.cpu_count(), initializer=_prepare) as pool:
        while totals.seeds < count:
            if totals.seeds >= at_least and time.monotonic() - started > minutes_max * 60:
                break
            some = seeds[totals.seeds : totals.seeds + _SEEDS_AT_A_TIME]
            for run, executed in pool.map(_run_one, some, chunksize=4):
                totals.add(run)
                totals.executed |= executed
                if progress:
                    _draw_progress(totals, count, time.monotonic() - started)
    if progress:
        print(file=sys.stderr)
    return totals


_tracer: Tracer | None = None
_reported: set[Place] = set()  # statements already reported to the parent process


def _prepare() -> None:
    global _tracer
    logging.disable(logging.CRITICAL)
    _tracer = Tracer()
    _tracer.__enter__()  # never exited: the process does nothing else


def _run_one(seed: int) -> tuple[Run, set[Place]]:
    assert _tracer is not None
    run = simulate(seed)
    run.history = []  # long, and the parent process does not need it
    executed = _tracer.executed - _reported
    _reported.update(executed)
    return run, executed


def caught_by(name: str) -> int | None:
    """The first seed that fails with this mutant and passes without it, of as many seeds as the mutant states."""
    logging.disable(logging.CRITICAL)
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    for seed in range(mutant.seeds):
        with mutant.applied():
            failed = _fails(seed)
        if failed and not _fails(seed):
            return seed
    return None


def _fails(seed: int) -> bool:
    try:
        return bool(simulate(seed).violations)
    except Livelock:
        return True


def _draw_progress(totals: Totals, count: int, seconds: float) -> None:
    filled = totals.seeds * 30 // count
    bar = "█" * filled + "░" * (30 - filled)
    rate = totals.seeds / max(seconds, 0.001)
    failed = f", {len(totals.failed)} FAILED" if totals.failed else ""
    print(f"\r  {bar} {totals.seeds}/{count} seeds, {rate:.1f}/s{failed}", end="", file=sys.stderr, flush=True)


def report(totals: Totals, seconds: float) -> None:
    for failure in totals.failures:
        print(failure, "\n")
    print(
        f"{totals.seeds} seeds in {seconds:.0f} s ({totals.seeds / seconds:.1f}/s): "
        f"{totals.virtual_seconds / 3600:.1f} hours of virtual time, "
        f"{totals.requests:,} requests, {totals.callbacks:,} callbacks"
    )
    print("faults: " + ", ".join(f"{count:,} {kind}" for kind, count in totals.faults.most_common()))
    for seed in totals.failed:
        print(f"FAILED seed {seed}: run it again with `python -m duetime.testing.simulate --seed {seed} --history`")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=200, help="number of seeds (default 200)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, help="number of processes (default: one for each core)")
    parser.add_argument("--seed", type=int, help="run only this seed, in this process")
    parser.add_argument("--history", "--story", action="store_true", help="with --seed: print every event of the run")
    parser.add_argument(
        "--mutant", choices=[mutant.name for mutant in MUTANTS], help="with --seed: apply this known defect"
    )
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        mutants = {mutant.name: mutant for mutant in MUTANTS}
        with mutants[options.mutant].applied() if options.mutant else nullcontext():
            run = simulate(options.seed)
        if options.history:
            print("\n".join(run.history))
        for violation in run.violations:
            print(violation)
        print(f"seed {run.seed}: {len(run.violations)} violations, history {run.digest}")
        return bool(run.violations)
    started = time.monotonic()
    totals = run_seeds(options.first, options.seeds, jobs=options.jobs, progress=sys.stderr.isatty())
    report(totals, time.monotonic() - started)
    return bool(totals.failed)


if __name__ == "__main__":
    sys.exit(main())
