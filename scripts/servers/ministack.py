"""Ministack: a Python program that imitates DynamoDB, in memory. Not Amazon's, and not durable."""

from __future__ import annotations

import http.client
from contextlib import closing
from pathlib import Path

from .install import once, python_environment
from .server import Server

__all__ = ["Ministack"]


class Ministack(Server):
    """DynamoDB's API, for any credentials. An orderly end keeps the data for the next start, kill -9 does not.

    `settings` are environment variables of it: `AUTH=true` lets it refuse wrong credentials.
    """

    name = "ministack"

    def install(self) -> None:
        self._python = once("ministack-1.5.33", _install) / "bin" / "python"

    def command(self) -> list[str]:
        return [str(self._python), "-m", "ministack"]

    def environment(self) -> dict[str, str]:
        return (
            super().environment()
            | {
                "BIND_HOST": "127.0.0.1",  # else every interface
                "GATEWAY_PORT": str(self.port),
                "SERVICES": "dynamodb",  # of the many that it imitates
                "PERSIST_STATE": "1",
                "STATE_DIR": str(self.folder / "state"),
                "TMPDIR": str(self.folder),
                "LOG_LEVEL": "WARNING",
            }
            | self.settings
        )

    def is_ready(self) -> bool:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)) as connection:
            try:
                connection.request("GET", "/_ministack/health")
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False

    def url(self, database: str = "") -> str:
        """DynamoDB knows no databases: the name is what the names of the tables begin with."""
        return f"dynamodb://test:test@us-east-1/{database or 'duetime'}?endpoint=http://127.0.0.1:{self.port}/"


def _install(folder: Path) -> None:
    python_environment("ministack==1.5.33", folder)
