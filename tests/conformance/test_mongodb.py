"""MongoDB passes the conformance suite, with small commits in one command and with all of them in several."""

from __future__ import annotations

import pytest
from on_server import OnServer

from duetime.stores.mongodb import statements as mongodb_statements


class TestMongoDb(OnServer):
    SERVER = "mongodb"


class TestMongoDbInSeveralCommands(OnServer):
    """All commits are written like large ones: read which documents exist, then insert."""

    SERVER = "mongodb"

    @pytest.fixture(autouse=True)
    def _always_large_commits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mongodb_statements, "SMALL_COMMIT_MAX", -1)
