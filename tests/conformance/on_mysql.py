"""Which servers of MySQL's kind are tested. Tests marked `tidb` run only if TiDB was asked for, or is there already
(tests/servers.py)."""

from __future__ import annotations

import pytest

on_all = pytest.mark.parametrize("server_name", ["mariadb", "mysql", pytest.param("tidb", marks=pytest.mark.tidb)])
on_innodb = pytest.mark.parametrize("server_name", ["mariadb", "mysql"])
