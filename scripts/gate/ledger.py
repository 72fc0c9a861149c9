"""The ledger of unstable tests: those that failed beside other tests and passed alone, and those that failed in `make
steady`. It is in the cache folder, so it outlives the checkout.

    python -m scripts.gate.ledger            how often each test was unstable, and when last
    python -m scripts.gate.ledger PART       the failures in full of tests whose name has this part
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import msgspec

from scripts.servers.install import cache_folder

__all__ = ["Instability", "add", "head", "ledger_file", "read"]


class Instability(msgspec.Struct):
    """One failure of a test."""

    test: str
    at: str
    commit: str
    load: float  # of the machine, when it was written
    seeds: list[int]
    failure: str


def ledger_file() -> Path:
    return cache_folder() / "unstable-tests.jsonl"


def add(file: Path, test: str, seeds: list[int], failure: str) -> None:
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    entry = Instability(test, at, head(), round(os.getloadavg()[0], 1), seeds, failure)
    with file.open("ab") as ledger:
        ledger.write(msgspec.json.encode(entry) + b"\n")


def head() -> str:
    """The commit, for short. Empty: this is not a checkout of git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()  # noqa: S603


def read(file: Path) -> list[Instability]:
    lines = file.read_bytes().splitlines() if file.exists() else []
    return [msgspec.json.decode(line, type=Instability) for line in lines]


def main(arguments: list[str]) -> int:
    entries = read(ledger_file())
    if arguments:
        for entry in entries:
            if arguments[0] in entry.test:
                print(f"{'=' * 20} {entry.test}\n{entry.at} at {entry.commit}, load {entry.load}, seeds {entry.seeds}")
                print(entry.failure)
        return 0
    times: dict[str, list[str]] = defaultdict(list)
    for entry in entries:
        times[entry.test].append(entry.at)
    for test, when in sorted(times.items(), key=lambda item: -len(item[1])):
        print(f"{len(when):4} times, last {when[-1]}: {test}")
    if not times:
        print(f"no unstable tests in {ledger_file()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
