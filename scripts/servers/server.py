"""What every real server has in common: a folder and a port of its own, start, ready, stop, kill -9, restart.

A kind of server is a small subclass: how it is installed, what is prepared in a fresh folder, the command that runs it,
and how to see that it is ready. All methods block; from a coroutine, call them by `asyncio.to_thread`.
"""

from __future__ import annotations

import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Self

__all__ = ["WATCH_NAME", "Server", "ServerError", "free_port", "listens", "open_to_all"]

# Servers refuse to run as root, and need none of its rights.
STEP_DOWN_TO = "nobody"

WATCH_NAME = "duetime-server-watch"  # in the command line of the processes that run this script

# Reads the pid of the running server (0: none) line by line; the end of its input is the end of us.
_WATCH = """
pid=0
while read -r told; do pid=$told; done
if [ "$pid" -gt 0 ]; then
  kill -s "$1" "$pid"
  left=50
  while kill -0 "$pid" && [ "$left" -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
  kill -s KILL "$pid"
fi
[ -z "$2" ] || rm -rf -- "$2" || { sleep 1; rm -rf -- "$2"; }
"""


class ServerError(Exception):
    """A server does not do what it was asked to. The text has the end of its log where there is one."""


class Server:
    """One server process. `stop` removes its data, unless the folder was given; `halt` and `kill` leave them."""

    name: str = ""
    """What it is asked for by."""
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    stop_seconds: ClassVar[float] = 30
    ready_seconds: ClassVar[float] = 90
    passing_troubles: ClassVar[tuple[str, ...]] = ()
    """Texts in its log that say: the same command may well work in a moment."""
    stands_before: ClassVar[tuple[str, ...]] = ()
    """Servers of which it needs one behind it; its constructor then takes `upstream_port`."""

    def __init__(
        self, *, folder: Path | None = None, port: int | None = None, settings: Mapping[str, str] | None = None
    ):
        self.settings = dict(settings or {})
        self.port = port or 0
        self._given_folder = folder
        self._given_port = port is not None
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: subprocess.Popen[bytes] | None = None
        self._followers: list[Server] = []

    # --- what a kind of server says about itself -------------------------------------------------

    def install(self) -> None:
        """Gets its programs if they are missing. Called at every start, so quick if they are there."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Fills a fresh folder. It is in `self.folder`, and belongs to the user that the server runs as."""

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Asked again and again after a start."""
        return answers(self.port)

    def url(self, database: str = "") -> str:
        raise NotImplementedError

    def make_database(self, name: str) -> None:
        """An empty one, by that name. For a server that knows no such thing: nothing, `url` tells them apart."""

    # --- its life --------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        assert self._folder is not None, f"{self.name} has not been started"
        return self._folder

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self.name} does not run"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def owns_folder(self) -> bool:
        return self._given_folder is None

    def start(self, *, outlives_us: bool = False) -> Self:
        """Starts it, on the data it had if it ran before, and waits until it is ready.

        It ends with this process, even if this process is killed, unless `outlives_us`.
        """
        assert not self.is_running, f"{self.name} runs already"
        self.install()
        is_first = self._folder is None
        if self._folder is None:
            self._folder = self._make_folder()
        try:
            if not outlives_us and self._watch is None:
                self._watch = self._start_watch()
            if not self.log.exists():
                self.prepare()
            self._start_until_ready()
        except BaseException:
            if is_first:
                self.stop()
            raise
        return self

    def halt(self) -> None:
        """Ends it in an orderly way and keeps its data: `start` goes on from there."""
        if self._process is not None:
            self.thaw()
            self._process.send_signal(self.stop_signal)
            self._wait(self.stop_seconds)

    def kill(self) -> None:
        """kill -9 of its main process. Data are kept."""
        if self._process is not None:
            self._process.kill()
            self._wait(self.stop_seconds)

    def freeze(self) -> None:
        """Its main process does nothing any more, and its connections stay open."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        """In an orderly way, on the same data and port. After `kill`, `start` does it."""
        self.halt()
        self.start(outlives_us=self._watch is None)

    def stop(self) -> None:
        """Ends it for good, and what depends on it; removes its data, unless the folder was given."""
        while self._followers:
            self._followers.pop().stop()
        self.halt()
        if self._watch is not None:
            assert self._watch.stdin is not None
            self._watch.stdin.close()  # it removes the folder
            self._watch.wait()
            self._watch = None
        elif self._folder is not None and self.owns_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # --- programs of the server ------------------------------------------------------------------

    def run(self, command: list[str], *, within_seconds: float = 120) -> str:
        """Runs a program to its end as the server's user, and answers what it printed."""
        try:
            ended = subprocess.run(
                self._stepped_down(command),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=within_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"{self.name}: {command[0]} did not end within {within_seconds} s") from error
        if ended.returncode != 0:
            said = (ended.stderr or ended.stdout).decode(errors="replace").strip()
            raise ServerError(f"{self.name}: {Path(command[0]).name} ended with {ended.returncode}: {said[-2_000:]}")
        return ended.stdout.decode()

    def _stepped_down(self, command: list[str]) -> list[str]:
        if os.geteuid() != 0:
            return command
        user = pwd.getpwnam(STEP_DOWN_TO)
        # setpriv execs: the pid we get is the server's.
        return ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups", *command]

    def environment(self) -> dict[str, str]:
        """Nothing of ours: a PGPORT or a PYTHONPATH of the shell would change what is tested."""
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
        }

    # --- how it is done --------------------------------------------------------------------------

    def _make_folder(self) -> Path:
        if self._given_folder is None:
            folder = Path(tempfile.mkdtemp(prefix=f"duetime-{self.name}-"))
        else:
            folder = self._given_folder.absolute()
            folder.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            if not open_to_all(folder.parent):
                raise ServerError(
                    f"{self.name} runs as {STEP_DOWN_TO!r}, who cannot enter {folder.parent}:"
                    " choose another folder (or TMPDIR) that is open to all"
                )
            user = pwd.getpwnam(STEP_DOWN_TO)
            os.chown(folder, user.pw_uid, user.pw_gid)
        return folder

    def _start_watch(self) -> subprocess.Popen[bytes]:
        """Ends the server and removes its folder when we are gone, however we went.

        It is a process at the other end of a pipe and not prctl(PR_SET_PDEATHSIG), which fires when the *thread* that
        started the server ends: a server restarted by `asyncio.to_thread` would die with its test's event loop.
        """
        doomed = str(self.folder) if self.owns_folder else ""
        return subprocess.Popen(
            ["sh", "-c", _WATCH, WATCH_NAME, self.stop_signal.name.removeprefix("SIG"), doomed],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def _tell_watch(self, pid: int) -> None:
        if self._watch is not None:
            assert self._watch.stdin is not None
            self._watch.stdin.write(b"%d\n" % pid)
            self._watch.stdin.flush()

    def _start_until_ready(self) -> None:
        deadline = time.monotonic() + self.ready_seconds
        while True:
            if not self._given_port and (not self.port or not can_bind(self.port)):
                self.port = free_port()
            # Who answers there before we start it would be taken for it.
            said = "already in use" if answers(self.port) else self._start_once(deadline)
            if said is None:
                self._given_port = True  # from now on it keeps its port: clients know it
                return
            passes = any(text in said.lower() for text in ("already in use", *self.passing_troubles))
            if not passes or time.monotonic() > deadline:
                raise ServerError(f"{self.name} does not start on port {self.port}:\n{said[-3_000:]}")
            time.sleep(0.2)

    def _start_once(self, deadline: float) -> str | None:
        """None: it is ready. Else what its log says, and it has ended."""
        with self.log.open("ab") as log:
            begins_at = log.seek(0, os.SEEK_END)
            self._process = subprocess.Popen(
                self._stepped_down(self.command()),
                env=self.environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C in the terminal is for the tests, which then stop it
            )
        self._tell_watch(self._process.pid)
        while self._process.poll() is None:
            if self.is_ready():
                return None
            if time.monotonic() > deadline:
                self.kill()
                return f"not ready within {self.ready_seconds:.0f} s\n" + self._log_from(begins_at)
            time.sleep(0.02)
        self._ended()
        return self._log_from(begins_at)

    def _log_from(self, begins_at: int) -> str:
        return self.log.read_bytes()[begins_at:].decode(errors="replace")

    def _wait(self, seconds: float) -> None:
        assert self._process is not None
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._ended()

    def _ended(self) -> None:
        self._process = None
        self._tell_watch(0)


def can_bind(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection sits on it; by chance, so that two runs rarely meet."""
    for _ in range(1_000):
        port = random.randrange(10_000, 32_000)
        if can_bind(port):
            return port
    raise ServerError("no free port between 10000 and 32000")


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def listens(pid: int, port: int) -> bool:
    """Whether it is this process that listens there, by Linux."""
    try:
        listeners = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
        ours = {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    except (FileNotFoundError, ProcessLookupError):  # it has just ended, or closed a file
        return False
    listening = "0A"
    return any(
        fields[1].endswith(f":{port:04X}") and fields[3] == listening and f"socket:[{fields[9]}]" in ours
        for fields in listeners
    )


def open_to_all(folder: Path) -> bool:
    """Whether any user may enter it."""
    folder = folder.absolute()
    return all(place.stat().st_mode & 0o001 for place in (folder, *folder.parents) if place.exists())
