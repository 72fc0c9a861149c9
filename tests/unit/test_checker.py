"""The checker on small histories. That it catches real defects is the mutants' business (tests/sim)."""

from __future__ import annotations

import pytest

from duetime.testing.checker import Callback, Fault, Kind, Result, Violation, Wish, judge, repetitions

PUT = Wish("t", Kind.PUT, 0, 10, Result.OK, "v", 100)


def call(started_at_ms: int, owner: str, fence: str, *, accepted: bool = True, attempt: int = 1) -> Callback:
    return Callback(
        timer="t",
        value="v",
        attempt=attempt,
        started_at_ms=started_at_ms,
        seen_at_ms=started_at_ms,
        fence=fence,
        owner=owner,
        delivery="d",
        accepted_at_ms=started_at_ms + 5 if accepted else 0,
    )


TWICE = [call(200, "a", "3.1"), call(4_000, "b", "3.2")]


def judged(callbacks: list[Callback], faults: list[Fault] | None) -> list[str]:
    return [violation.invariant for violation in judge([PUT], callbacks, faults=faults)]


def test_what_was_accepted_and_came_again_is_a_repetition() -> None:
    assert repetitions(TWICE) == [(TWICE[0], TWICE[1])]
    assert judged(TWICE, []) == ["R"]


def test_nothing_is_said_about_repetitions_if_the_faults_are_not_known() -> None:
    assert judged(TWICE, None) == []


@pytest.mark.parametrize(
    ("fault", "is_excused"),
    [
        (Fault("kill", 201, 210, "a"), True),
        (Fault("database kill", 201, 900), True),
        (Fault("freeze", 150, 6_000, "a"), True),
        (Fault("kill", 201, 210, "b"), False),  # another was struck
        (Fault("kill", 100, 199, "a"), False),  # over before it was delivered
        (Fault("kill", 9_000, 9_010, "a"), False),  # on record long before
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else str(value),
)
def test_a_repetition_is_excused_by_a_fault_that_struck_its_sender_before_it_could_be_on_record(
    fault: Fault, is_excused: bool
) -> None:
    assert judged(TWICE, [fault]) == ([] if is_excused else ["R"])


def test_a_retry_that_the_receiver_asked_for_is_no_repetition() -> None:
    assert judged([call(200, "a", "3.1", accepted=False), call(1_200, "a", "3.1", attempt=2)], []) == []


def test_two_owners_under_one_version_are_found_whatever_faults_there_were() -> None:
    both = [call(200, "a", "3.1"), call(300, "b", "3.1")]
    assert judged(both, [Fault("database kill", 0, 9_000)]) == ["E"]


def test_a_violation_reads_as_a_story() -> None:
    violation: Violation = judge([PUT], TWICE, faults=[])[0]
    assert "'v' was accepted from a" in str(violation)
    assert str(violation).count("fired v attempt 1") == 2
