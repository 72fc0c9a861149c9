"""`duetime serve` for benchmarks/hostile.py, on a system that an attack needs: with few open files, or with names whose
servers do not answer.

    python -m benchmarks.hostile_server [--open-files N] [--names]

Settings come from the environment. Another DNS server than that of the system cannot be had without the rights of root.
So with `--names` the function of the standard library that looks up names is replaced: a name below `.hanging.test`
blocks its thread for half a minute and then has no answer, a name below `.good.test` is loopback. The look-ups of
uvloop do not use that function: a server that uses them finds neither.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from typing import Any

HANGING, GOOD = ".hanging.test", ".good.test"
_HANGS_S = 30


def hang_for_some_names() -> None:
    look_up = socket.getaddrinfo

    def replaced(host: Any, port: Any, *arguments: Any, **more: Any) -> Any:
        if str(host).endswith(HANGING):
            time.sleep(_HANGS_S)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return look_up("127.0.0.1" if str(host).endswith(GOOD) else host, port, *arguments, **more)

    socket.getaddrinfo = replaced


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--open-files", type=int, help="soft and hard limit of open files")
    parser.add_argument("--names", action="store_true", help="some names hang, some are loopback")
    arguments = parser.parse_args()
    if arguments.open_files is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (arguments.open_files, arguments.open_files))
    if arguments.names:
        hang_for_some_names()
    from duetime.cli import main as duetime

    return duetime(["serve"])


if __name__ == "__main__":
    sys.exit(main())
