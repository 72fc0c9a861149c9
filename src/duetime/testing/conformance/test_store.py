"""The conformance suite on the database that DUETIME_TEST_STORE names. See the package's first lines."""

from __future__ import annotations

import asyncio
import os
from urllib.parse import urlsplit

import pytest

from duetime.store import Store, open_store
from duetime.stores.sqlite_file import path_of
from duetime.testing.conformance import StoreConformance

URL = os.environ.get("DUETIME_TEST_STORE", "")


def _wipe_sqlite(url: str) -> None:
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(path_of(url) + suffix):
            os.unlink(path_of(url) + suffix)


def _wipe_postgres(url: str) -> None:
    from duetime.stores import postgres_schema
    from duetime.stores.postgres_link import address_of

    asyncio.run(postgres_schema.wipe(address_of(url)))


_WIPES = {"sqlite": _wipe_sqlite, "postgresql": _wipe_postgres, "postgres": _wipe_postgres}


@pytest.mark.skipif(not URL, reason="DUETIME_TEST_STORE names no store")
class TestNamedStore(StoreConformance):
    def new_store(self) -> Store:
        return open_store(URL)

    async def wipe(self) -> None:
        if "test" not in URL:
            pytest.fail(f'{URL} is wiped before every test, so its URL must contain the word "test"')
        scheme = urlsplit(URL).scheme
        if scheme not in _WIPES:
            pytest.fail(f"the suite does not know how to wipe a {scheme} store: subclass StoreConformance instead")
        await asyncio.to_thread(_WIPES[scheme], URL)
