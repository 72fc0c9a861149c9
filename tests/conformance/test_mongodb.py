"""MongoDB passes the conformance suite, with small commits in one command and with all of them in several."""

from __future__ import annotations

import pytest
from on_server import OnServer

from duetime.stores.mongodb import statements as mongodb_statements


class TestMongoDb(OnServer):
    SERVER = "mongodb"


class TestMongoDbInSeveralCommands(OnServer):
    """As large commits are made: look first, then insert."""

    SERVER = "mongodb"

    @pytest.fixture(autouse=True)
    def _none_are_few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(mongodb_statements, "FEW", -1)
