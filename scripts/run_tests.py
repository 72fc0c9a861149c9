"""`make test`: every folder of tests with pytest, the simulator beside the others.

Most tests wait for servers and processes, the simulator only computes: at the lowest priority it takes what the others
leave of the processors. Its output is kept and printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

_LOWEST_PRIORITY = 19


def main(folders: list[str]) -> int:
    beside = [folder for folder in folders if Path(folder).name == "sim"]
    others = [folder for folder in folders if folder not in beside]
    if not (beside and others):
        return subprocess.run(_pytest(folders), check=False).returncode  # noqa: S603
    with tempfile.TemporaryFile() as output:
        simulator = subprocess.Popen(  # noqa: S603
            _pytest(beside),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(_LOWEST_PRIORITY),
        )
        try:
            code = subprocess.run(_pytest(others), check=False).returncode  # noqa: S603
            print(f"\nwaiting for the simulator ({', '.join(beside)}), which has run beside the others", flush=True)
            beside_code = simulator.wait()
        finally:
            simulator.terminate()
            simulator.wait()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
        sys.stdout.flush()
    return code or beside_code


def _pytest(folders: list[str]) -> list[str]:
    return [sys.executable, "-m", "pytest", *folders]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
