"""Which servers of MySQL's kind are tested: TiDB only if it was asked for, or is there already."""

from __future__ import annotations

import os

import pytest
from scripts.servers import TiDb

needs_tidb = pytest.mark.skipif(
    os.environ.get("DUETIME_TEST_TIDB") != "1" and not TiDb.is_built(),
    reason="TiDB takes a quarter of an hour to build; `make test-tidb` does it",
)

on_all = pytest.mark.parametrize("server_name", ["mariadb", "mysql", pytest.param("tidb", marks=needs_tidb)])
on_innodb = pytest.mark.parametrize("server_name", ["mariadb", "mysql"])
