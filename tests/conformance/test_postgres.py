"""PostgreSQL passes the conformance suite: 15 and 18, and behind pgbouncer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from on_server import OnServer

from servers import own, require


class TestPostgres15(OnServer):
    SERVER = "postgres15"


class TestPostgres18(OnServer):
    SERVER = "postgres18"


class TestPostgres18BehindPgbouncer(OnServer):
    SERVER = "postgres18"
    OPTIONS = "?pooler=transaction"
    HISTORIES = 8  # the statements are those of TestPostgres18

    def way_to(self, url: str, request: pytest.FixtureRequest) -> str:
        stack = ExitStack()
        request.config.add_cleanup(stack.close)
        bouncer = stack.enter_context(own("pgbouncer", upstream_port=require(self.SERVER).port))
        return str(bouncer.url(url.rpartition("/")[2]))
