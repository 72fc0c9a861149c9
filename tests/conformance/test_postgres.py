"""PostgreSQL passes the conformance suite: 15 and 18, straight and behind pgbouncer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from duetime.store import Store, open_store
from duetime.stores import postgres_schema
from duetime.stores.postgres_link import address_of
from duetime.testing.conformance import StoreConformance
from servers import fresh_database, own, postgres


class OnPostgres(StoreConformance):
    VERSION = 0
    OPTIONS = ""
    url = ""
    admin_url = ""

    @pytest.fixture(autouse=True)
    def _on(self, request: pytest.FixtureRequest) -> None:
        kind = type(self)
        if not kind.url:
            kind.admin_url = fresh_database(postgres(self.VERSION))
            kind.url = self.way_to(kind.admin_url, request) + self.OPTIONS

    def way_to(self, url: str, request: pytest.FixtureRequest) -> str:
        return url

    def new_store(self) -> Store:
        return open_store(self.url)

    async def wipe(self) -> None:
        await postgres_schema.wipe(address_of(self.admin_url))


class TestPostgres15(OnPostgres):
    VERSION = 15


class TestPostgres18(OnPostgres):
    VERSION = 18


class BehindPgbouncer(OnPostgres):
    OPTIONS = "?pooler=transaction"

    def way_to(self, url: str, request: pytest.FixtureRequest) -> str:
        stack = ExitStack()
        request.config.add_cleanup(stack.close)
        bouncer = stack.enter_context(own("pgbouncer", upstream_port=postgres(self.VERSION).port))
        return str(bouncer.url(url.rpartition("/")[2]))


class TestPostgres15BehindPgbouncer(BehindPgbouncer):
    VERSION = 15


class TestPostgres18BehindPgbouncer(BehindPgbouncer):
    VERSION = 18
