"""The conformance suite on the database that DUETIME_TEST_STORE names. See the package's first lines."""

from __future__ import annotations

import importlib
import os
from urllib.parse import urlsplit

import pytest

from duetime.store import Store, open_store
from duetime.testing.conformance import StoreConformance

URL = os.environ.get("DUETIME_TEST_STORE", "")


@pytest.mark.skipif(not URL, reason="DUETIME_TEST_STORE is not set")
class TestNamedStore(StoreConformance):
    def new_store(self) -> Store:
        return open_store(URL)

    async def wipe(self) -> None:
        adapter = importlib.import_module(type(self.new_store()).__module__)
        # Only the name of the database counts: a password, a host or an option may contain the word by accident.
        place_of = getattr(adapter, "place_of", lambda url: urlsplit(url).path)
        if "test" not in place_of(URL):
            pytest.fail('the database is wiped before every test, so its name must contain the word "test"')
        # The module of every adapter that ships with Duetime has a function `wipe`.
        await adapter.wipe(URL)
