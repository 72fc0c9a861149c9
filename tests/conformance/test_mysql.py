"""MySQL, MariaDB and TiDB pass the conformance suite, by one adapter."""

from __future__ import annotations

from on_mysql import needs_tidb
from on_server import OnServer


class TestMariaDb(OnServer):
    SERVER = "mariadb"


class TestMySql(OnServer):
    SERVER = "mysql"


@needs_tidb
class TestTiDb(OnServer):
    SERVER = "tidb"
