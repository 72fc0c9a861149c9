"""Figures of databases in documents are those of the run on record."""

from __future__ import annotations

import json
from typing import Any

import pytest
from benchmarks.stores import said_of, table
from documents import ROOT, check_each

PAGES = {
    "mysql": ("mysql", "mariadb"),
    "tidb": ("tidb",),
    "mongodb": ("mongodb",),
    "cassandra": ("cassandra",),
    "dynamodb": ("ministack",),
}


@pytest.fixture
def on_record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results/stores.json").read_text("utf-8"))
    return found


def figures_in(page: str) -> str:
    text = (ROOT / f"docs/operating/{page}.md").read_text("utf-8")
    return text.partition("<!-- figures -->\n")[2].partition("\n<!-- /figures -->")[0]


def test_the_table_of_databases_is_that_of_the_run_on_record(on_record: dict[str, Any]) -> None:
    assert figures_in("databases") == table(on_record)


def test_the_figures_of_every_page_are_those_of_the_run_on_record(on_record: dict[str, Any]) -> None:
    def check(page: str) -> None:
        expected = said_of(on_record, *PAGES[page])
        assert expected in figures_in(page), f"docs/operating/{page}.md must contain: {expected}"

    check_each(list(PAGES), check)
