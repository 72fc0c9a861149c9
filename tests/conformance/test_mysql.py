"""MySQL, MariaDB and TiDB pass the conformance suite, by one adapter."""

from __future__ import annotations

import pytest
from on_server import OnServer


class TestMariaDb(OnServer):
    SERVER = "mariadb"


class TestMySql(OnServer):
    SERVER = "mysql"


@pytest.mark.tidb
class TestTiDb(OnServer):
    SERVER = "tidb"
