"""What the result of an attempt makes of its timer, row by row; retries, missed fires, and properties of them all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from duetime.domain.instants import format_instant
from duetime.domain.settle import (
    ERROR_CHARS_MAX,
    RETRY_AFTER_MAX_MS,
    AttemptResult,
    Contact,
    Settlement,
    armed_at,
    attempted,
    backoff_ms,
    cancelled,
    missed,
    read_answer,
    settle,
)
from duetime.domain.timer import (
    DAY_MS,
    HOUR_MS,
    Extras,
    Missed,
    Namespace,
    Outcome,
    RetryPolicy,
    Timer,
)

NOW_MS = 1_800_000_000_000
STARTED_MS = NOW_MS - 20
DUE_MS = NOW_MS - 50
LATER_MS = NOW_MS + 90_000
LATER = format_instant(LATER_MS)

NAMESPACE = Namespace(name="orders", num_shards=16, created_at_ms=0)
STRICT = replace(NAMESPACE, require_ok=True)
TIMER = Timer(
    namespace="orders",
    timer_id="order-17",
    uuid_high=1,
    uuid_low=2,
    generation=5,
    execute_at_ms=DUE_MS,
    scheduled_at_ms=DUE_MS,
    created_at_ms=DUE_MS - 1_000,
    callback_url="http://shop.test/hook",
    extras=Extras(headers={"x-a": "1"}, tags=("red",), flow_key="shop"),
)


def answered(
    status: int, body: str | bytes = b"", retry_after_ms: int | None = None, *, truncated: bool = False
) -> AttemptResult:
    raw = body.encode() if isinstance(body, str) else body
    return AttemptResult(Contact.ANSWERED, status, raw, retry_after_ms=retry_after_ms, truncated=truncated)


def settled(
    outcome: AttemptResult,
    timer: Timer = TIMER,
    namespace: Namespace = NAMESPACE,
    jitter: float = 0.5,
    now_ms: int = NOW_MS,
    rearm_interval_min_ms: int = 0,
) -> Settlement:
    return settle(
        timer,
        outcome,
        namespace,
        started_at_ms=STARTED_MS,
        now_ms=now_ms,
        jitter=lambda: jitter,
        rearm_interval_min_ms=rearm_interval_min_ms,
    )


RETRIES = [
    ('{"ok": false} is retried', answered(200, '{"ok":false}')),
    ("500 is retried", answered(500)),
    ("502 is retried", answered(502, "<html>")),
    ("503 is retried", answered(503)),
    ("599 is retried", answered(599)),
    ("408 is retried", answered(408)),
    ("425 is retried", answered(425)),
    ("429 is retried", answered(429)),
    ("a network error or timeout is retried", AttemptResult(Contact.BROKEN, error="timed out")),
    ("an ok that is neither true nor false is retried", answered(200, '{"ok":"yes"}')),
    ("an ok of null is retried", answered(200, '{"ok":null}')),
    ("a next time that is not a string is retried", answered(200, '{"ok":true,"nextExecuteAt":5}')),
    ("an object that was cut is retried", answered(200, '{"filler":"' + "x" * 100, truncated=True)),
    ("an object that was cut after its ok is retried", answered(200, '{"ok":true,"filler":"x', truncated=True)),
    ("an object cut right after its end is retried", answered(200, '\n {"ok":true}', truncated=True)),
    ("blanks that were cut are retried", answered(200, " \r\n" * 10, truncated=True)),
    ("an answer cut before its first byte is retried", answered(200, truncated=True)),
    ("a next time without an offset is retried", answered(200, '{"ok":true,"nextExecuteAt":"2027-01-01"}')),
]
DELIVERED = [
    ("200 without a body is delivered", answered(200)),
    ("204 is delivered", answered(204)),
    ("299 is delivered", answered(299)),
    ("a body that is not JSON is delivered", answered(200, "thanks")),
    ("a body that is broken JSON is delivered", answered(200, '{"ok":')),
    ("a page of HTML that was cut is delivered", answered(200, "<html>" + "x" * 100, truncated=True)),
    ("JSON that is not an object and was cut is delivered", answered(200, "[1, 2", truncated=True)),
    ("a body that is not UTF-8 is delivered", answered(200, b'{"a":"\xff"}')),
    ("JSON that is not an object is delivered", answered(200, "[false]")),
    ("JSON without ok is delivered", answered(200, '{"status":"fine"}')),
    ('{"ok": true} is delivered', answered(200, ' {"ok" : true , "more":[1]}')),
    ("a next time of null is none", answered(200, '{"ok":true,"nextExecuteAt":null}')),
]
FAILED = [
    *[(f"{status} fails at once", answered(status)) for status in (300, 301, 302, 304, 307, 308)],
    *[(f"{status} fails at once", answered(status)) for status in (400, 401, 403, 404, 409, 410, 422, 451)],
    ("a target that may not be called fails at once", AttemptResult(Contact.REFUSED, error="private address")),
]


def rows(table: list[tuple[str, AttemptResult]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("outcome", [row[1] for row in table], ids=[row[0] for row in table])


class TestSettleTable:
    @rows(DELIVERED)
    def test_delivered(self, outcome: AttemptResult) -> None:
        settlement = settled(outcome)
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.DELIVERED
        assert settlement.reached.timer.attempts == 1
        assert settlement.reached.timer.extras.last_error is None
        assert settlement.rearmed is None
        assert settlement.succeeded

    @rows(RETRIES)
    def test_retried(self, outcome: AttemptResult) -> None:
        settlement = settled(outcome, jitter=0.5)
        assert settlement.reached is None
        assert settlement.rearmed is not None
        assert settlement.rearmed.execute_at_ms == NOW_MS + 500  # half of the first second
        assert settlement.rearmed.scheduled_at_ms == DUE_MS
        assert settlement.rearmed.attempts == 1
        assert settlement.rearmed.extras.last_error
        assert not settlement.succeeded

    @rows(FAILED)
    def test_failed(self, outcome: AttemptResult) -> None:
        settlement = settled(outcome)
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert settlement.reached.timer.attempts == 1
        assert settlement.reached.timer.extras.last_error
        assert settlement.rearmed is None
        assert not settlement.succeeded

    @pytest.mark.parametrize("ok", ['"ok":true,', ""], ids=["with ok", "without ok"])
    def test_ok_with_a_next_time_is_delivered_and_armed_again_from_zero(self, ok: str) -> None:
        settlement = settled(answered(200, f'{{{ok}"nextExecuteAt":"{LATER}"}}'), replace(TIMER, attempts=3))
        assert settlement.succeeded
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.DELIVERED
        assert settlement.reached.timer.attempts == 4
        again = settlement.rearmed
        assert again is not None
        assert (again.execute_at_ms, again.scheduled_at_ms, again.attempts) == (LATER_MS, LATER_MS, 0)
        assert again.extras == Extras(headers={"x-a": "1"}, tags=("red",), flow_key="shop", occurrence=1)
        assert again.generation == TIMER.generation

    def test_not_ok_with_a_next_time_is_armed_again_with_its_attempts_kept(self) -> None:
        settlement = settled(answered(200, f'{{"ok":false,"nextExecuteAt":"{LATER}"}}'), replace(TIMER, attempts=3))
        assert settlement.reached is None
        again = settlement.rearmed
        assert again is not None
        assert (again.execute_at_ms, again.scheduled_at_ms, again.attempts) == (LATER_MS, DUE_MS, 4)
        assert again.extras.occurrence == 0
        assert again.extras.first_attempt_at_ms == STARTED_MS

    @pytest.mark.parametrize(
        "policy",
        [
            RetryPolicy(max_retries=3),
            RetryPolicy(max_duration_ms=20),  # over: the first attempt was 20 ms ago
            RetryPolicy(max_duration_ms=LATER_MS - STARTED_MS - 1),  # ends a millisecond before the time asked for
        ],
        ids=["retries exhausted", "duration exhausted", "after the end of the duration"],
    )
    def test_not_ok_with_a_next_time_is_a_retry_within_the_limits_of_the_policy(self, policy: RetryPolicy) -> None:
        timer = replace(TIMER, retry_policy=policy, attempts=3, extras=Extras(first_attempt_at_ms=STARTED_MS))
        settlement = settled(answered(200, f'{{"ok":false,"nextExecuteAt":"{LATER}"}}'), timer)
        assert settlement.rearmed is None
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert settlement.reached.timer.extras.last_error == "asked to be called again"

    def test_the_last_retry_of_a_policy_may_be_at_the_time_asked_for(self) -> None:
        policy = RetryPolicy(max_retries=4, max_duration_ms=LATER_MS - STARTED_MS)
        timer = replace(TIMER, retry_policy=policy, attempts=3, extras=Extras(first_attempt_at_ms=STARTED_MS))
        again = settled(answered(200, f'{{"ok":false,"nextExecuteAt":"{LATER}"}}'), timer).rearmed
        assert again is not None
        assert again.execute_at_ms == LATER_MS

    @pytest.mark.parametrize("ok", ["true", "false"])
    @pytest.mark.parametrize(
        ("next_at_ms", "interval_ms", "expected_ms"),
        [
            (0, 0, NOW_MS),
            (0, 5, NOW_MS),  # the call took longer than the interval
            (0, 1_000, STARTED_MS + 1_000),
            (STARTED_MS + 999, 1_000, STARTED_MS + 1_000),
            (STARTED_MS + 1_001, 1_000, STARTED_MS + 1_001),
        ],
    )
    def test_a_next_time_is_not_sooner_than_the_least_interval_after_the_start_of_the_call(
        self, ok: str, next_at_ms: int, interval_ms: int, expected_ms: int
    ) -> None:
        body = f'{{"ok":{ok},"nextExecuteAt":"{format_instant(next_at_ms)}"}}'
        rearmed = settled(answered(200, body), rearm_interval_min_ms=interval_ms).rearmed
        assert rearmed is not None
        assert rearmed.execute_at_ms == expected_ms

    def test_the_least_interval_concerns_next_times_only(self) -> None:
        rearmed = settled(answered(500), rearm_interval_min_ms=DAY_MS).rearmed
        assert rearmed is not None
        assert rearmed.execute_at_ms == NOW_MS + 500

    def test_what_was_not_sent_is_no_attempt(self) -> None:
        settlement = settled(AttemptResult(Contact.NOT_SENT))
        assert settlement.reached is None
        assert settlement.rearmed == replace(TIMER, execute_at_ms=NOW_MS)

    @pytest.mark.parametrize("body", ["", "thanks", "{}", '{"status":"fine"}', f'{{"nextExecuteAt":"{LATER}"}}'])
    def test_a_namespace_may_require_an_explicit_ok(self, body: str) -> None:
        settlement = settled(answered(200, body), namespace=STRICT)
        assert settlement.reached is None
        assert settlement.rearmed is not None
        assert settlement.rearmed.attempts == 1
        assert "requires" in str(settlement.rearmed.extras.last_error)

    def test_a_namespace_that_requires_ok_does_not_accept_a_truncated_answer(self) -> None:
        for body in ("<html>", '{"ok":true}'):
            settlement = settled(answered(200, body, truncated=True), namespace=STRICT)
            assert (settlement.reached, settlement.succeeded) == (None, False)
            assert settlement.rearmed is not None

    def test_an_answer_not_read_to_the_end_is_retried_by_the_policy_and_names_the_limit(self) -> None:
        outcome = answered(200, '{"ok":true,"filler":"x', retry_after_ms=7_000, truncated=True)
        retried = settled(outcome).rearmed
        assert retried is not None
        assert retried.execute_at_ms == NOW_MS + 7_000
        assert retried.extras.last_error == "the answer is larger than 65536 bytes and was not read to the end"
        ended = settled(outcome, replace(TIMER, retry_policy=RetryPolicy(max_retries=0))).reached
        assert ended is not None
        assert ended.outcome is Outcome.FAILED

    @pytest.mark.parametrize(("status", "outcome"), [(404, Outcome.FAILED), (500, None)])
    def test_a_cut_answer_of_another_status_is_judged_by_the_status(self, status: int, outcome: Outcome | None) -> None:
        reached = settled(answered(status, '{"ok":true,"fil', truncated=True)).reached
        assert (reached and reached.outcome) is outcome

    def test_a_namespace_that_requires_ok_accepts_it(self) -> None:
        assert settled(answered(200, '{"ok":true}'), namespace=STRICT).succeeded

    def test_the_end_says_how_late_the_first_attempt_was_and_when_the_last(self) -> None:
        first = settled(answered(500)).rearmed
        assert first is not None
        end = settle(
            first, answered(200), NAMESPACE, started_at_ms=NOW_MS + 700, now_ms=NOW_MS + 710, jitter=lambda: 0.0
        ).reached
        assert end is not None
        extras = end.timer.extras
        assert (extras.first_attempt_at_ms, extras.last_attempt_at_ms, extras.late_by_ms) == (
            STARTED_MS,
            NOW_MS + 700,
            STARTED_MS - DUE_MS,
        )
        assert end.timer.attempts == 2
        assert end.reached_at_ms == NOW_MS + 710

    def test_delivered_and_failed_have_retentions_of_their_own(self) -> None:
        delivered, failed = settled(answered(200)).reached, settled(answered(404)).reached
        assert delivered is not None
        assert failed is not None
        assert delivered.purge_at_ms == NOW_MS + DAY_MS
        assert failed.purge_at_ms == NOW_MS + 30 * DAY_MS

    def test_the_flow_key_survives_a_retry_and_the_end(self) -> None:
        retried = settled(answered(500)).rearmed
        assert retried is not None
        assert retried.flow_key == "shop"
        ended = settled(answered(404)).reached
        assert ended is not None
        assert ended.timer.extras.flow_key == "shop"

    def test_a_long_error_is_cut(self) -> None:
        rearmed = settled(AttemptResult(Contact.BROKEN, error="x" * 10_000)).rearmed
        assert rearmed is not None
        assert rearmed.extras.last_error == "x" * ERROR_CHARS_MAX


class TestRetryPolicy:
    def test_the_pause_doubles_up_to_the_cap(self) -> None:
        pauses = [backoff_ms(RetryPolicy(), retries, 1.0) for retries in range(1, 13)]
        assert pauses == [1_000 * 2**n for n in range(10)] + [600_000, 600_000]

    def test_case_20_jitter_is_full_from_nothing_to_the_whole_pause(self) -> None:
        policy = RetryPolicy(initial_interval_ms=8_000)
        assert [backoff_ms(policy, 1, jitter) for jitter in (0.0, 0.25, 0.5, 1.0)] == [0, 2_000, 4_000, 8_000]

    def test_a_thousandth_retry_of_the_steepest_policy_is_still_capped(self) -> None:
        assert backoff_ms(RetryPolicy(backoff_multiplier=1e6), 1_000, 1.0) == 600_000

    def test_a_gentle_policy_reaches_its_cap_too(self) -> None:
        assert backoff_ms(RetryPolicy(backoff_multiplier=1.01), 1_000, 1.0) == 600_000

    def test_a_multiplier_of_one_is_a_steady_pace(self) -> None:
        assert backoff_ms(RetryPolicy(backoff_multiplier=1.0), 500, 1.0) == 1_000

    @given(
        st.builds(
            RetryPolicy,
            initial_interval_ms=st.integers(1, DAY_MS),
            backoff_multiplier=st.floats(1, 1e300),
            max_interval_ms=st.integers(1, 400 * DAY_MS),
        ),
        st.integers(1, 10_000),
        st.floats(0, 1, exclude_max=True),
    )
    def test_a_pause_is_never_negative_and_never_over_the_cap(
        self, policy: RetryPolicy, retries: int, jitter: float
    ) -> None:
        assert 0 <= backoff_ms(policy, retries, jitter) <= policy.max_interval_ms

    @pytest.mark.parametrize("max_retries", [0, 1, 3])
    def test_max_retries_counts_retries_not_attempts(self, max_retries: int) -> None:
        timer: Timer | None = replace(TIMER, retry_policy=RetryPolicy(max_retries=max_retries))
        attempts = 0
        while timer is not None:
            settlement = settled(answered(500), timer)
            timer, attempts = settlement.rearmed, attempts + 1
        assert attempts == max_retries + 1
        assert settlement.reached is not None
        assert settlement.reached.outcome is Outcome.FAILED
        assert settlement.reached.timer.attempts == max_retries + 1
        assert settlement.reached.timer.extras.last_error == "HTTP 500"

    def test_the_last_retry_starts_at_max_duration_after_the_first_attempt_at_the_latest(self) -> None:
        policy = RetryPolicy(max_duration_ms=10_000)
        timer = replace(attempted(TIMER, NOW_MS - 9_500), retry_policy=policy)
        for jitter, pause_ms in ((0.1, 200), (0.25, 500), (0.9, 500)):
            last = settled(answered(500), timer, jitter=jitter).rearmed
            assert last is not None
            assert last.execute_at_ms == NOW_MS + pause_ms
        over = replace(attempted(TIMER, NOW_MS - 10_000), retry_policy=policy)
        assert settled(answered(500), over, jitter=0.0).reached is not None

    def test_a_retry_after_beyond_max_duration_ends_it(self) -> None:
        policy = RetryPolicy(max_duration_ms=10_000)
        timer = replace(attempted(TIMER, NOW_MS - 9_500), retry_policy=policy)
        overloaded = AttemptResult(Contact.ANSWERED, 503, retry_after_ms=600)
        assert settled(overloaded, timer, jitter=0.0).reached is not None

    def test_a_retry_after_that_ends_just_at_max_duration_is_waited_for(self) -> None:
        policy = RetryPolicy(max_duration_ms=10_000)
        timer = replace(attempted(TIMER, NOW_MS - 9_500), retry_policy=policy)
        assert rearmed_after(answered(503, retry_after_ms=500), timer, jitter=0.0) == 500

    def test_without_a_retry_after_the_shortest_pause_is_none(self) -> None:
        assert rearmed_after(answered(503), jitter=0.0) == 0

    def test_a_new_occurrence_has_its_whole_duration_again(self) -> None:
        old = replace(attempted(TIMER, 0), retry_policy=RetryPolicy(max_duration_ms=10_000))
        assert settled(answered(500), armed_at(old, NOW_MS, occurrence_done=True)).rearmed is not None

    def test_the_timers_policy_wins_over_the_namespaces(self) -> None:
        strict = replace(NAMESPACE, retry_policy=RetryPolicy(max_retries=0))
        assert settled(answered(500), namespace=strict).reached is not None
        assert settled(answered(500), replace(TIMER, retry_policy=RetryPolicy()), strict).rearmed is not None

    @pytest.mark.parametrize("outcome", [answered(503), answered(429), answered(200, '{"ok":false}')])
    def test_retry_after_is_a_lower_bound(self, outcome: AttemptResult) -> None:
        asked = replace(outcome, retry_after_ms=30_000)
        assert rearmed_after(asked, jitter=0.0) == 30_000
        patient = replace(TIMER, retry_policy=RetryPolicy(initial_interval_ms=60_000, max_interval_ms=60_000))
        assert rearmed_after(asked, patient, jitter=0.75) == 45_000

    def test_retry_after_is_capped(self) -> None:
        assert rearmed_after(answered(503, retry_after_ms=7 * DAY_MS)) == RETRY_AFTER_MAX_MS == HOUR_MS

    def test_a_retry_after_of_zero_or_less_changes_nothing(self) -> None:
        assert rearmed_after(answered(503, retry_after_ms=0)) == 500
        assert rearmed_after(answered(503, retry_after_ms=-5)) == 500


def rearmed_after(outcome: AttemptResult, timer: Timer = TIMER, jitter: float = 0.5) -> int:
    rearmed = settled(outcome, timer, jitter=jitter).rearmed
    assert rearmed is not None
    return rearmed.execute_at_ms - NOW_MS


class TestMissed:
    @staticmethod
    def late(policy: Missed | None, late_by_ms: int, attempts: int = 0) -> Outcome | None:
        timer = replace(TIMER, attempts=attempts, extras=Extras(missed=policy))
        settlement = missed(timer, NAMESPACE, DUE_MS + late_by_ms)
        if settlement is None:
            return None
        assert settlement.reached is not None
        assert settlement.rearmed is None
        assert settlement.reached.timer.attempts == attempts
        assert settlement.reached.timer.extras.last_error == f"late by {late_by_ms} ms"
        return settlement.reached.outcome

    def test_without_a_policy_it_fires_however_late(self) -> None:
        assert self.late(None, 400 * DAY_MS) is None
        assert self.late(Missed(), 400 * DAY_MS) is None

    def test_skip_if_late_by(self) -> None:
        assert self.late(Missed(skip_if_late_by_ms=1_000), 1_000) is None
        assert self.late(Missed(skip_if_late_by_ms=1_000), 1_001) is Outcome.SKIPPED

    def test_fail_if_late_by(self) -> None:
        assert self.late(Missed(fail_if_late_by_ms=1_000), 1_000) is None
        assert self.late(Missed(fail_if_late_by_ms=1_000), 1_001) is Outcome.FAILED

    def test_a_limit_of_zero_allows_no_lateness_at_all(self) -> None:
        assert self.late(Missed(skip_if_late_by_ms=0), 0) is None
        assert self.late(Missed(skip_if_late_by_ms=0), 1) is Outcome.SKIPPED

    def test_it_is_about_the_first_attempt_only(self) -> None:
        assert self.late(Missed(skip_if_late_by_ms=0), DAY_MS, attempts=1) is None


class TestReached:
    def test_every_occurrence_has_a_position_of_its_own(self) -> None:
        timer, positions = TIMER, set()
        for _ in range(50):  # all of them in one and the same millisecond
            settlement = settled(answered(200, f'{{"ok":true,"nextExecuteAt":"{format_instant(NOW_MS)}"}}'), timer)
            assert settlement.reached is not None
            assert settlement.rearmed is not None
            positions.add(settlement.reached.position)
            timer = settlement.rearmed
        assert len(positions) == 50

    def test_so_has_every_generation_and_every_timer(self) -> None:
        timers = [TIMER, replace(TIMER, generation=6), replace(TIMER, timer_id="b"), replace(TIMER, namespace="b")]
        assert len({cancelled(timer, NAMESPACE, NOW_MS).position for timer in timers}) == len(timers)

    def test_the_same_end_written_twice_is_one_row(self) -> None:
        assert cancelled(TIMER, NAMESPACE, NOW_MS).position == cancelled(TIMER, NAMESPACE, NOW_MS).position

    def test_rows_are_ordered_by_when_they_may_go(self) -> None:
        assert cancelled(TIMER, NAMESPACE, NOW_MS).position.execute_at_ms == NOW_MS + DAY_MS


class TestErrors:
    """What a timer says of its last attempt."""

    def error_of(self, outcome: AttemptResult, namespace: Namespace = NAMESPACE) -> tuple[bool, str | None]:
        """(whether it ended, its error)"""
        settlement = settled(outcome, namespace=namespace)
        if settlement.reached is not None:
            assert settlement.reached.outcome is Outcome.FAILED
            return True, settlement.reached.timer.extras.last_error
        assert settlement.rearmed is not None
        return False, settlement.rearmed.extras.last_error

    def test_a_refused_target_ends_it_with_the_reason(self) -> None:
        assert self.error_of(AttemptResult(Contact.REFUSED, error="a private address")) == (True, "a private address")
        assert self.error_of(AttemptResult(Contact.REFUSED)) == (True, "refused")

    def test_a_broken_connection_is_retried_with_the_reason(self) -> None:
        assert self.error_of(AttemptResult(Contact.BROKEN, error="reset")) == (False, "reset")
        assert self.error_of(AttemptResult(Contact.BROKEN)) == (False, "connection failed")

    @pytest.mark.parametrize(("status", "ends"), [(150, True), (199, True), (300, True), (404, True), (503, False)])
    def test_a_status_that_is_no_success_is_named(self, status: int, ends: bool) -> None:
        assert self.error_of(answered(status)) == (ends, f"HTTP {status}")

    def test_an_ok_that_is_neither_true_nor_false_is_named_also_where_ok_is_required(self) -> None:
        error = 'the answer\'s "ok" is neither true nor false'
        assert self.error_of(answered(200, '{"ok": 1}')) == (False, error)
        assert self.error_of(answered(200, '{"ok": 1}'), STRICT) == (False, error)
        assert read_answer(f'{{"ok": 1, "nextExecuteAt": "{LATER}"}}'.encode()) == (None, None, error)


answer_bodies = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda tail: b"{" + tail),
    st.builds(
        lambda ok, at: f'{{"ok":{ok},"nextExecuteAt":{at}}}'.encode(),
        st.sampled_from(["true", "false", "null", "1", '"true"', "[]", "{}"]),
        st.one_of(
            st.sampled_from(["null", "5", '"soon"', '"1970-01-01T00:00:00Z"', '"9998-01-01T00:00:00Z"']),
            st.integers(0, 2 * NOW_MS).map(lambda at: f'"{format_instant(at)}"'),
        ),
    ),
)
outcomes = st.builds(
    AttemptResult,
    st.sampled_from(Contact),
    st.integers(0, 999),
    answer_bodies,
    st.none() | st.integers(-1_000, 10 * DAY_MS),
    st.none() | st.text(),
)
timers = st.builds(
    lambda attempts, policy, first, occurrence: replace(
        TIMER,
        attempts=attempts,
        retry_policy=policy,
        extras=Extras(first_attempt_at_ms=first if attempts else None, occurrence=occurrence),
    ),
    st.integers(0, 2_000),
    st.none()
    | st.builds(
        RetryPolicy,
        max_retries=st.none() | st.integers(0, 2_000),
        initial_interval_ms=st.integers(1, DAY_MS),
        backoff_multiplier=st.floats(1, 10),
        max_interval_ms=st.integers(1, 366 * DAY_MS),
        max_duration_ms=st.integers(1, 366 * DAY_MS),
    ),
    st.integers(0, NOW_MS),
    st.integers(0, 10),
)
jitters = st.floats(0, 1, exclude_max=True)


class TestProperties:
    @given(timers, outcomes, jitters, st.booleans())
    def test_an_attempt_always_ends_the_timer_or_schedules_it_and_never_in_the_past(
        self, timer: Timer, outcome: AttemptResult, jitter: float, require_ok: bool
    ) -> None:
        settlement = settled(outcome, timer, STRICT if require_ok else NAMESPACE, jitter)
        reached, rearmed = settlement.reached, settlement.rearmed
        assert reached is not None or rearmed is not None
        assert settlement.succeeded == (reached is not None and reached.outcome is Outcome.DELIVERED)
        if reached is not None:
            assert reached.timer.attempts == timer.attempts + 1
            assert rearmed is None or settlement.succeeded
        if rearmed is not None:
            assert rearmed.execute_at_ms >= NOW_MS
            assert rearmed.generation == timer.generation
            if rearmed.extras.occurrence == timer.extras.occurrence:
                assert rearmed.attempts == timer.attempts + (
                    outcome.contact not in (Contact.NOT_SENT, Contact.SHORTAGE, Contact.AWAY)
                )
                assert rearmed.scheduled_at_ms == timer.scheduled_at_ms
            else:
                assert rearmed.extras.occurrence == timer.extras.occurrence + 1
                assert rearmed.attempts == 0

    @given(answer_bodies)
    def test_every_answer_can_be_read(self, body: bytes) -> None:
        ok, next_at_ms, problem = read_answer(body)
        assert problem is None or (ok is None and next_at_ms is None)

    @pytest.mark.parametrize(
        "body",
        [
            b"{" * 100_000,
            b'{"ok":' + b"[" * 100_000,
            b'{"nextExecuteAt":5,"a":' + b"9" * 10_000 + b"}",
            b'{"nextExecuteAt":"\\ud800"}',
            b'{"a":1e400}',
            b"\xef\xbb\xbf{}",
        ],
    )
    def test_hostile_answers_can_be_read(self, body: bytes) -> None:
        read_answer(body)
