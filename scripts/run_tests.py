"""`make test`: every folder of tests with pytest, the simulator beside the others.

Most tests wait for servers and processes: several run at the same time, the tests of one class or file in one process.
The simulator only computes: at the lowest priority it takes what the others leave of the processors. Its output is kept
and printed at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["main"]

_LOWEST_PRIORITY = 19
_PROCESSES = 3
_IN_PARALLEL = [f"--numprocesses={_PROCESSES}", "--dist=loadscope", "--no-loadscope-reorder"]


def main(folders: list[str]) -> int:
    beside = [folder for folder in folders if Path(folder).name == "sim"]
    others = [folder for folder in folders if folder not in beside]
    if not (beside and others):
        return subprocess.run(_pytest(folders, *([] if beside else _IN_PARALLEL)), check=False).returncode  # noqa: S603
    with tempfile.TemporaryFile() as output:
        simulator = subprocess.Popen(  # noqa: S603
            _pytest(beside),
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.nice(_LOWEST_PRIORITY),
        )
        try:
            code = subprocess.run(_pytest(others, *_IN_PARALLEL), check=False).returncode  # noqa: S603
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


def _pytest(folders: list[str], *options: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *options, *folders]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
