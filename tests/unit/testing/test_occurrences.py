"""The checker of occurrences on small histories. The mutants (tests/sim) test that it finds real defects."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from duetime.domain.timer import Outcome
from duetime.testing.checker import Callback
from duetime.testing.occurrences import (
    EndedOccurrence,
    Pause,
    PauseRequest,
    Series,
    find_occurrence_violations,
    paused_in_flight,
)

SERIES = Series("s", first_ms=10_000, period_ms=1_000, last_ms=13_000, catch_up="one", created_ms=9_000)


def row(number: int, **changes: Any) -> EndedOccurrence:
    at_ms = 10_000 + number * 1_000
    return replace(EndedOccurrence("s", f"d{number}", at_ms, False, Outcome.DELIVERED, 1, at_ms + 20), **changes)


def call(number: int, **changes: Any) -> Callback:
    at_ms = 10_000 + number * 1_000
    known = Callback("s", "v", 1, at_ms + 5, at_ms + 6, delivery=f"d{number}", accepted_at_ms=at_ms + 7)
    return replace(known, **{"scheduled_ms": at_ms, **changes})


ROWS = [row(number) for number in range(4)]
CALLS = [call(number) for number in range(4)]


def found(
    rows: list[EndedOccurrence] = ROWS, calls: list[Callback] = CALLS, series: Series = SERIES, **others: Any
) -> str:
    pauses = others.pop("pauses", [])
    violations = find_occurrence_violations([series], rows, pauses, calls, clock_error_ms=10)
    assert all(violation.invariant == "T" for violation in violations)
    return "; ".join(violation.what for violation in violations)


def test_a_series_that_is_complete_is_right() -> None:
    assert found() == ""


@pytest.mark.parametrize(
    ("rows", "calls", "said"),
    [
        (ROWS[:3], CALLS, "no occurrence is recorded after that of 00:00:12.000"),
        ([], [], "it was created, and no occurrence is recorded"),
        (ROWS[1:], CALLS, "the first occurrence is 00:00:11.000"),
        ([ROWS[0], *ROWS[2:]], CALLS, "the occurrence of 00:00:12.000 followed that of 00:00:10.000"),
        ([*ROWS, ROWS[3]], CALLS, "the occurrence of 00:00:13.000 has two reached rows"),
        (ROWS, CALLS[1:], "recorded as delivered, and no receiver accepted it"),
        ([row(0, outcome=Outcome.FAILED, attempts=0), *ROWS[1:]], CALLS, "failed without an attempt"),
        (ROWS, [call(0, seen_at_ms=9_980), *CALLS[1:]], "was called at 00:00:09.980"),
        (ROWS, [*CALLS, call(1, delivery="other")], "was called under 2 ids"),
        ([row(0, scheduled_ms=10_500), *ROWS[1:]], CALLS, "00:00:10.500 is no occurrence"),
    ],
)
def test_what_is_wrong_is_found(rows: list[EndedOccurrence], calls: list[Callback], said: str) -> None:
    assert said in found(rows, calls)


def test_occurrences_that_had_passed_are_left_out_only_if_the_schedule_says_so() -> None:
    late = [row(0, reached_ms=12_500), *ROWS[2:]]
    assert found(late) == ""
    assert "followed" in found(late, series=replace(SERIES, catch_up="all"))
    skipped = [row(0, outcome=Outcome.SKIPPED, attempts=0, reached_ms=12_500), *ROWS[2:]]
    assert found(skipped) == ""
    assert "was skipped" in found(skipped, series=replace(SERIES, catch_up="all"))


def test_with_skip_all_that_is_too_late_is_left_out() -> None:
    skip = replace(SERIES, catch_up="skip")
    assert found([row(0, reached_ms=73_020)], CALLS, skip) == ""
    assert "no occurrence is recorded after" in found([row(0, reached_ms=72_000)], CALLS, skip)
    long = replace(skip, last_ms=100_000)
    rest = [row(number) for number in range(64, 91)]
    calls = [CALLS[0], *(call(number) for number in range(64, 91))]
    assert found([row(0, reached_ms=73_500), *rest], calls, long) == ""
    assert "followed" in found([row(0, reached_ms=73_500), *rest[2:]], calls, long)


def test_calls_in_addition_are_no_occurrences() -> None:
    extra = row(0, delivery="x", scheduled_ms=10_400, is_extra=True, reached_ms=10_450)
    added = call(0, delivery="x", scheduled_ms=10_400, seen_at_ms=10_400)
    assert found([ROWS[0], extra, *ROWS[1:]], [*CALLS, added]) == ""


def test_a_create_of_unknown_outcome_may_have_made_nothing() -> None:
    unknown = replace(SERIES, created_ms=0)
    assert found([], [], unknown) == ""
    assert found(ROWS[1:], CALLS, unknown) == ""


def test_nothing_is_called_while_it_is_paused() -> None:
    assert "paused at 00:00:10.500" in found(pauses=[Pause("s", 10_500, 11_500)])
    assert found(pauses=[Pause("s", 10_500, 10_900)]) == ""


def test_a_pause_of_a_call_in_flight_explains_its_repetition() -> None:
    [fault] = paused_in_flight([PauseRequest("s", 10_003, 10_900)], CALLS)
    assert fault.delivery == "d0"
    assert paused_in_flight([PauseRequest("other", 10_003, 10_900)], CALLS) == []
    assert paused_in_flight([PauseRequest("s", 10_003, 10_004)], CALLS) == []
