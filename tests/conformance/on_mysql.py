"""Which servers of the MySQL family are tested. Tests marked `tidb` run only if TiDB was requested or is installed
(tests/servers.py)."""

from __future__ import annotations

import pytest

on_all = pytest.mark.parametrize("server_name", ["mariadb", "mysql", pytest.param("tidb", marks=pytest.mark.tidb)])
on_innodb = pytest.mark.parametrize("server_name", ["mariadb", "mysql"])
