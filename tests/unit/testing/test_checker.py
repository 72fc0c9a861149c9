"""The checker on small histories. The mutants (tests/sim) test that it finds real defects."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from duetime.testing.checker import (
    Callback,
    ClientRequest,
    Fault,
    Kind,
    Result,
    Violation,
    find_violations,
    repetitions,
)

PUT = ClientRequest("t", Kind.PUT, 0, 10, Result.OK, "v", 100)


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
    return [violation.invariant for violation in find_violations([PUT], callbacks, faults=faults)]


def test_an_accepted_callback_that_comes_again_is_a_repetition() -> None:
    assert repetitions(TWICE) == [(TWICE[0], TWICE[1])]
    assert judged(TWICE, []) == ["R"]


def test_repetitions_are_not_checked_if_the_faults_are_not_given() -> None:
    assert judged(TWICE, None) == []


@pytest.mark.parametrize(
    ("fault", "is_allowed"),
    [
        (Fault("kill", 201, 210, "a"), True),
        (Fault("database kill", 201, 900), True),
        (Fault("freeze", 150, 6_000, "a"), True),
        (Fault("kill", 201, 210, "b"), False),  # the fault struck another instance
        (Fault("kill", 100, 199, "a"), False),  # over before it was delivered
        (Fault("kill", 9_000, 9_010, "a"), False),  # the result was recorded long before
    ],
    ids=lambda value: value.kind if isinstance(value, Fault) else str(value),
)
def test_a_repetition_is_allowed_after_a_fault_of_its_sender_before_the_result_was_recorded(
    fault: Fault, is_allowed: bool
) -> None:
    assert judged(TWICE, [fault]) == ([] if is_allowed else ["R"])


def test_a_repeat_on_a_new_connection_is_allowed_after_a_fault_since_the_attempt_began() -> None:
    drain = Fault("drain timed out", 3_000, 100, "a")  # may repeat what began before 100 and is not recorded at 3,000
    assert judged(TWICE, [drain]) == ["R"]
    assert judged([replace(TWICE[0], begun_at_ms=90), TWICE[1]], [drain]) == []


def test_a_retry_that_the_receiver_asked_for_is_no_repetition() -> None:
    assert judged([call(200, "a", "3.1", accepted=False), call(1_200, "a", "3.1", attempt=2)], []) == []


def test_two_owners_under_one_version_are_found_whatever_the_faults() -> None:
    both = [call(200, "a", "3.1"), call(300, "b", "3.1")]
    assert judged(both, [Fault("database kill", 0, 9_000)]) == ["E"]


def test_a_violation_prints_the_history_of_its_timer() -> None:
    violation: Violation = find_violations([PUT], TWICE, faults=[])[0]
    assert "'v' was accepted from a" in str(violation)
    assert str(violation).count("fired v attempt 1") == 2


def fired(value: str, started_at_ms: int, delivery: str = "d", *, accepted: bool = True, **fields: int) -> Callback:
    return Callback(
        timer="t",
        value=value,
        attempt=1,
        started_at_ms=started_at_ms,
        seen_at_ms=started_at_ms,
        fence="3.1",
        owner="a",
        delivery=delivery,
        accepted_at_ms=started_at_ms + 5 if accepted else 0,
        **fields,
    )


def request(
    kind: Kind,
    sent_at_ms: int,
    result: Result = Result.OK,
    value: str = "",
    due_ms: int = 0,
    *,
    keeps_due: bool = False,
    skip_late_ms: int = 0,
    ignores_reached: bool = False,
) -> ClientRequest:
    return ClientRequest(
        "t", kind, sent_at_ms, sent_at_ms + 10, result, value, due_ms, keeps_due, skip_late_ms, ignores_reached
    )


LATER = request(Kind.PUT, 0, value="v", due_ms=5_000)
LATER_AGAIN = request(Kind.PUT, 500, value="x", due_ms=5_000)
IGNORES = request(Kind.PUT, 1_000, value="w", due_ms=5_000, ignores_reached=True)
SOON = request(Kind.PUT, 0, Result.INFO, value="u", due_ms=100)
KEPT = request(Kind.PUT, 1_000, value="w", keeps_due=True)


@pytest.mark.parametrize(
    ("requests", "calls", "broken"),
    [
        ([LATER, request(Kind.FIRE_NOW, 1_000)], [fired("v", 1_100)], []),
        ([LATER, request(Kind.FIRE_NOW, 1_000, Result.FAIL)], [fired("v", 1_100)], ["B"]),
        ([LATER, request(Kind.FIRE_NOW, 1_000)], [fired("v", 900)], ["B"]),
        # An update that leaves the time alone.
        ([LATER, request(Kind.PUT, 1_000, value="w", keeps_due=True)], [fired("w", 5_001)], []),
        ([LATER, request(Kind.PUT, 1_000, value="w", keeps_due=True)], [fired("w", 4_000)], ["B"]),
        # The put before it was sent at the same time as another one, which may have been applied after it; or later.
        ([SOON, LATER, KEPT], [fired("w", 1_100)], []),
        ([SOON, request(Kind.PUT, 11, value="v", due_ms=5_000), KEPT], [fired("w", 1_100)], ["B"]),
        # A replay schedules a reached timer once more, also a cancelled one.
        ([LATER, request(Kind.DELETE, 1_000), request(Kind.REPLAY, 2_000)], [fired("v", 2_100)], []),
        ([LATER, request(Kind.DELETE, 1_000), request(Kind.REPLAY, 2_000)], [], ["A"]),
        ([LATER, request(Kind.DELETE, 1_000), request(Kind.REPLAY, 2_000)], [fired("v", 1_500)], ["B", "C", "A"]),
        ([LATER, request(Kind.REPLAY, 6_000)], [fired("v", 5_000), fired("v", 6_100, "e")], []),
        ([LATER], [fired("v", 5_000), fired("v", 6_100, "e")], ["R"]),
        ([LATER, request(Kind.FIRE_NOW, 6_000)], [fired("v", 5_000), fired("v", 6_100, "e")], ["R"]),
        # ifAbsent: a put was applied if the server answers that its value exists.
        ([request(Kind.PUT, 0, Result.INFO, "v", 9), request(Kind.ENSURE, 20, value="v")], [], ["A"]),
        ([request(Kind.PUT, 0, Result.INFO, "v", 9)], [], []),
        # The same value is sent again after it was reported to exist: it may have been replaced before.
        (
            [
                request(Kind.PUT, 0, Result.INFO, "v", 99),
                request(Kind.ENSURE, 20, value="v"),
                request(Kind.PUT, 40, Result.INFO, "w"),
                request(Kind.PUT, 60, Result.INFO, "v", 99),
            ],
            [fired("w", 55)],
            [],
        ),
        ([request(Kind.ENSURE, 20, value="v")], [], ["D"]),
        # ifReached=ignore: what is answered to be over does not fire any more, nor does what was ignored.
        ([LATER, request(Kind.OVER, 6_000, value="w")], [fired("v", 5_000)], []),
        ([LATER, request(Kind.OVER, 4_000, value="w")], [fired("v", 5_000)], ["C"]),
        ([LATER, request(Kind.OVER, 6_000, value="w")], [fired("v", 5_000), fired("w", 6_100)], ["D", "R"]),
        ([LATER, request(Kind.OVER, 4_000, value="w"), request(Kind.REPLAY, 4_500)], [fired("v", 5_000)], []),
        ([LATER, request(Kind.DELETE, 100), IGNORES], [fired("w", 5_000)], ["I"]),
        ([LATER, request(Kind.OVER, 100, value="u"), IGNORES], [fired("w", 5_000)], ["I"]),
        ([LATER, request(Kind.DELETE, 100), LATER_AGAIN, IGNORES], [fired("w", 5_000)], []),
        ([LATER, IGNORES], [fired("w", 5_000)], []),
        # Cancelled before it was created: a later command may create it.
        ([request(Kind.DELETE, 100), IGNORES], [fired("w", 5_000)], []),
        # Two requests at the same time: either may be the last.
        ([LATER, request(Kind.PUT, 5, value="w", due_ms=100)], [fired("v", 5_000)], []),
        ([LATER, request(Kind.PUT, 5, value="w", due_ms=100)], [], ["A"]),
        ([LATER, request(Kind.DELETE, 5)], [], []),
        ([LATER], [fired("v", 5_000, accepted=False)], ["A"]),
        # The end of the delivery was recorded, and it was called again.
        ([LATER], [fired("v", 5_000, over_at_ms=5_010), fired("v", 5_020, over_at_ms=5_010)], ["R", "R"]),
    ],
)
def test_invariants_on_small_histories(requests: list[ClientRequest], calls: list[Callback], broken: list[str]) -> None:
    assert [
        violation.invariant for violation in find_violations(requests, calls, faults=[], all_accepted=True)
    ] == broken


SKIPS = request(Kind.PUT, 0, value="v", due_ms=1_000, skip_late_ms=500)


@pytest.mark.parametrize(
    ("calls", "broken"),
    [
        ([], []),  # late, and therefore skipped
        ([fired("v", 1_100, accepted=False, recorded_at_ms=1_200)], ["A"]),  # attempted in time: retries continue
        ([fired("v", 1_100, accepted=False)], []),  # the attempt was not recorded
        ([fired("v", 1_600, accepted=False, recorded_at_ms=1_700)], []),
    ],
)
def test_a_missed_fire_policy_allows_only_timers_without_an_attempt_in_time_not_to_fire(
    calls: list[Callback], broken: list[str]
) -> None:
    for last in ([], [request(Kind.PUT, 2_000, value="w", keeps_due=True, skip_late_ms=500)]):
        assert [
            violation.invariant for violation in find_violations([SKIPS, *last], calls, all_accepted=True)
        ] == broken


def test_a_further_call_that_the_receiver_asked_for_may_be_skipped_too() -> None:
    update = request(Kind.PUT, 2_000, value="w", keeps_due=True, skip_late_ms=500)
    asked = fired("v", 1_100, recorded_at_ms=1_200)
    assert find_violations([SKIPS, update], [asked], faults=[], all_accepted=True) == []


def test_a_replay_may_find_an_older_timer_only_where_rows_are_purged_soon() -> None:
    requests = [LATER, request(Kind.PUT, 5_500, value="w", due_ms=6_000), request(Kind.REPLAY, 9_000)]
    calls = [fired("v", 5_000), fired("w", 6_000, "e"), fired("v", 9_100, "f")]
    assert [each.invariant for each in find_violations(requests, calls, faults=[], all_accepted=True)] == ["C"]
    requests = [replace(each, timer="n/t") for each in requests]
    calls = [replace(each, timer="n/t") for each in calls]
    assert find_violations(requests, calls, faults=[], all_accepted=True) == []


def test_a_fault_of_one_delivery_allows_no_repetition_of_another() -> None:
    lost = Fault("answer lost", 205, 205, "a", delivery="d")
    assert judged(TWICE, [lost]) == []
    assert judged(TWICE, [Fault("answer lost", 205, 205, "a", delivery="e")]) == ["R"]
