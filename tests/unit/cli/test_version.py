"""`duetime version`."""

from __future__ import annotations

import json

from command_line import Run


def test_version_prints_the_versions(run: Run) -> None:
    assert run("version")[1].startswith("duetime ")
    assert "python" in json.loads(run("version", "--json")[1])
