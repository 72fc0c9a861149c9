"""`duetime serve` with one safety rule taken away: `python broken_server.py MUTANT`, settings by environment.

The mutants are those that keep the simulator honest (duetime.testing.mutants); here they keep the tests of real
clusters honest.
"""

from __future__ import annotations

import sys

import duetime.process
from duetime.config import load_config
from duetime.testing.mutants import MUTANTS


def main(name: str) -> int:
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    with mutant.applied():
        return duetime.process.run(load_config())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
