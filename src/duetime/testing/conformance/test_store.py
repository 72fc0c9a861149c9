"""The conformance suite on the database that DUETIME_TEST_STORE names. See the package's first lines."""

from __future__ import annotations

import importlib
import os

import pytest

from duetime.store import Store, open_store
from duetime.testing.conformance import StoreConformance

URL = os.environ.get("DUETIME_TEST_STORE", "")


@pytest.mark.skipif(not URL, reason="DUETIME_TEST_STORE names no store")
class TestNamedStore(StoreConformance):
    def new_store(self) -> Store:
        return open_store(URL)

    async def wipe(self) -> None:
        if "test" not in URL:
            pytest.fail(f'{URL} is wiped before every test, so its URL must contain the word "test"')
        # Every adapter that ships with Duetime has one beside it.
        await importlib.import_module(type(self.new_store()).__module__).wipe(URL)
