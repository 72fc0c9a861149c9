"""The conformance suite on a real server of tests/servers.py: one database for all tests of a class."""

from __future__ import annotations

import importlib

import pytest
from spoiling import Spoiling

from duetime.store import Store, open_store
from duetime.testing.conformance import StoreConformance
from servers import fresh_database, require


class OnServer(Spoiling, StoreConformance):
    SERVER = ""
    OPTIONS = ""  # to the URL
    url = ""
    straight_url = ""

    @pytest.fixture(autouse=True)
    def _on(self, request: pytest.FixtureRequest) -> None:
        kind = type(self)
        if not kind.url:
            kind.straight_url = fresh_database(require(self.SERVER))
            kind.url = self.way_to(kind.straight_url, request) + self.OPTIONS

    def way_to(self, url: str, request: pytest.FixtureRequest) -> str:
        return url

    def new_store(self) -> Store:
        return open_store(self.url)

    async def wipe(self) -> None:
        await importlib.import_module(type(self.new_store()).__module__).wipe(self.straight_url)
