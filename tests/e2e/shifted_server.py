"""`duetime serve` with clocks that a test can set: `python shifted_server.py FOLDER`, settings by environment.

FOLDER/duetime and FOLDER/store hold, in milliseconds, how far the wall clock of the process and that of its store
are off this machine's. Boot time is the machine's: nothing that sets a wall clock touches it. Everything else is
the real server: only the two places that reach for the machine's clock get another.
"""

from __future__ import annotations

import sys
from pathlib import Path

import duetime.app
import duetime.process
import duetime.stores.sqlite.store
from duetime.clock import SystemClock
from duetime.config import load_config


class ShiftedClock(SystemClock):
    def __init__(self, offset_file: Path) -> None:
        self._offset_file = offset_file

    def wall_ms(self) -> int:
        return super().wall_ms() + int(self._offset_file.read_text())


def main(folder: Path) -> int:
    setattr(duetime.app, "SystemClock", lambda: ShiftedClock(folder / "duetime"))  # noqa: B010 - mypy sees a class
    setattr(duetime.stores.sqlite.store, "SystemClock", lambda: ShiftedClock(folder / "store"))  # noqa: B010
    return duetime.process.run(load_config())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
