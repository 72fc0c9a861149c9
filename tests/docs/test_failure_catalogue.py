"""The failure catalogue (docs/concepts/failures.md) and the tests named after its cases agree."""

from __future__ import annotations

import re
from pathlib import Path

from documents import ROOT, check_each
from scripts.prove import CASES, Case, read_catalogue


def named_after_cases() -> list[tuple[int, str]]:
    return [
        (int(number), f"{path.relative_to(ROOT).as_posix()}::test_case_{number}_{rest}")
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for number, rest in re.findall(r"^ *(?:async )?def test_case_(\d+)_(\w+)\(", path.read_text("utf-8"), re.M)
    ]


def test_every_case_has_one_row() -> None:
    assert [case.number for case in read_catalogue()] == list(range(1, CASES + 1))


def test_every_row_has_a_scenario_invariants_and_behaviour() -> None:
    def check(case: Case) -> None:
        assert case.scenario, "no scenario"
        assert re.fullmatch(r"[A-GS](, [A-GS])*", case.invariants), "the invariants are not letters like `A, B`"
        assert case.behaviour, "no behaviour"

    check_each(read_catalogue(), check)


def test_every_row_has_a_test_named_after_it_or_says_that_it_is_missing() -> None:
    def check(case: Case) -> None:
        if case.missing:
            assert not case.tests, "it is marked as not yet covered, but has tests"
        else:
            assert any(f"::test_case_{case.number}_" in name for name in case.tests), "no test is named after it"

    check_each(read_catalogue(), check)


def test_every_test_in_a_row_exists() -> None:
    def check(name: str) -> None:
        path, _, function = name.partition("::")
        assert re.search(rf"def {function}\(", Path(ROOT, path).read_text("utf-8")), "no such test"

    check_each(sorted({name for case in read_catalogue() for name in case.tests}), check)


def test_every_test_named_after_a_case_is_in_the_row_of_the_case() -> None:
    rows = {case.number: case for case in read_catalogue()}

    def check(test: tuple[int, str]) -> None:
        number, name = test
        assert name in rows[number].tests, f"add `{name}` to row {number} of docs/concepts/failures.md"

    check_each(named_after_cases(), check)
