"""Figures in documents are those on record."""

from __future__ import annotations

import json

from documents import ROOT

from benchmarks.stores import table


def test_the_table_of_databases_is_that_of_the_run_on_record() -> None:
    page = (ROOT / "docs/operating/databases.md").read_text("utf-8")
    between = page.partition("<!-- figures -->\n")[2].partition("\n<!-- /figures -->")[0]
    assert between == table(json.loads((ROOT / "benchmarks/results/stores.json").read_text("utf-8")))
