"""The failure catalogue (docs/concepts/failures.md) and the tests named after its cases say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documents import ROOT
from scripts.prove import CASES, Case, read_catalogue

ROWS = {case.number: case for case in read_catalogue()}


def named_after_cases() -> list[tuple[int, str]]:
    return [
        (int(number), f"{path.relative_to(ROOT).as_posix()}::test_case_{number}_{rest}")
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, rest in re.findall(r"^ *(?:async )?def test_case_(\d+)_(\w+)\(", path.read_text("utf-8"), re.M)
    ]


def test_every_case_has_one_row() -> None:
    assert [case.number for case in read_catalogue()] == list(range(1, CASES + 1))


@pytest.mark.parametrize("case", ROWS.values(), ids=lambda case: f"case {case.number}")
def test_a_row_says_what_happens_which_promise_it_is_about_and_what_is_done(case: Case) -> None:
    assert case.scenario
    assert re.fullmatch(r"[A-GS](, [A-GS])*", case.invariants)
    assert case.behaviour


@pytest.mark.parametrize("case", ROWS.values(), ids=lambda case: f"case {case.number}")
def test_a_row_has_a_test_named_after_it_or_says_what_brings_it(case: Case) -> None:
    if case.missing:
        assert not case.tests, "it has tests: it is there"
        return
    assert any(f"::test_case_{case.number}_" in name for name in case.tests)


@pytest.mark.parametrize(
    "name", sorted({name for case in ROWS.values() for name in case.tests}), ids=lambda name: name.partition("::")[2]
)
def test_a_test_of_a_row_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.search(rf"def {function}\(", Path(ROOT, path).read_text("utf-8"))


@pytest.mark.parametrize(("number", "name"), named_after_cases(), ids=lambda value: str(value).partition("::")[2])
def test_a_test_named_after_a_case_is_in_its_row(number: int, name: str) -> None:
    assert name in ROWS[number].tests, f"add `{name}` to row {number} of docs/concepts/failures.md"
