"""Limits of a flow divided among instances: never more than the limit, all of it to those who want it, in turns."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duetime.domain.flow_shares import (
    ALLOWANCE_MS,
    UNSEEN_CALLS_MS,
    FlowAllowance,
    FlowReport,
    FlowShare,
    divided,
    divided_rate,
)

ROUND_MS = 200


def report(waiting: int = 0, in_flight: int = 0, rate: float = 0.0, concurrency: int = 0) -> FlowReport:
    return FlowReport("n", "k", waiting, in_flight, rate, concurrency)


class Model:
    """One instance as it may behave: it starts whatever its allowance allows, as soon as it may."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.allowance = FlowAllowance()
        self.sent_ms = -ALLOWANCE_MS
        self.waiting = 0
        self.in_flight = 0
        self.next_start_ms = 0.0
        self.started: list[int] = []

    def is_valid(self, now_ms: int) -> bool:
        return now_ms - self.sent_ms < ALLOWANCE_MS

    def report(self, now_ms: int) -> FlowReport:
        if not self.is_valid(now_ms):
            self.allowance = FlowAllowance()
        return report(self.waiting, self.in_flight, self.allowance.rate or 0.0, self.allowance.concurrency or 0)

    def apply(self, allowance: FlowAllowance, sent_ms: int, now_ms: int) -> None:
        rate = allowance.rate
        if rate and rate != self.allowance.rate:
            self.next_start_ms = min(self.next_start_ms, now_ms + 1_000 / rate)
        self.allowance, self.sent_ms = allowance, sent_ms

    def work(self, now_ms: int) -> None:
        """Starts calls; each takes its rate until the next one may start."""
        while self.waiting and self.is_valid(now_ms):
            rate, concurrency = self.allowance.rate, self.allowance.concurrency
            if concurrency is not None and self.in_flight >= concurrency:
                return
            if rate is not None:
                if rate <= 0 or now_ms < self.next_start_ms:
                    return
                self.next_start_ms = now_ms + 1_000 / rate
            self.waiting -= 1
            self.in_flight += 1
            self.started.append(now_ms)


class Cluster:
    """Instances and the home of one flow. Time advances by 20 ms; reports and answers take time or get lost."""

    def __init__(self, rng: random.Random, instances: int, rate: float | None, concurrency: int | None) -> None:
        self.rng = rng
        self.rate, self.concurrency = rate, concurrency
        self.share = FlowShare()
        self.instances = [Model(f"i{number}") for number in range(instances)]
        self.now_ms = 0
        self.loss = 0.0
        self.call_ms = 500.0
        self.cut: set[str] = set()  # instances that do not reach the home
        self.most_in_flight = 0
        self._next_report_ms = {model.name: rng.randrange(ROUND_MS) for model in self.instances}
        self._on_the_way: dict[str, tuple[int, int, FlowAllowance | None]] = {}  # arrival, sent, answer

    def run(self, seconds: float) -> None:
        until_ms = self.now_ms + int(seconds * 1_000)
        while self.now_ms < until_ms:
            self.now_ms += 20
            for model in self.rng.sample(self.instances, len(self.instances)):
                self._step(model)
            self.most_in_flight = max(self.most_in_flight, sum(model.in_flight for model in self.instances))

    def _step(self, model: Model) -> None:
        name = model.name
        for _ in range(model.in_flight):
            if self.rng.random() < 20 / self.call_ms:
                model.in_flight -= 1
        if name in self._on_the_way:
            arrives_ms, sent_ms, answer = self._on_the_way[name]
            if self.now_ms >= arrives_ms:
                del self._on_the_way[name]
                if answer is not None:
                    model.apply(answer, sent_ms, self.now_ms)
        elif self.now_ms >= self._next_report_ms[name]:
            self._next_report_ms[name] = self.now_ms + ROUND_MS
            self._send(model)
        model.work(self.now_ms)

    def _send(self, model: Model) -> None:
        sent = model.report(self.now_ms)
        if model.name in self.cut or self.rng.random() < self.loss:
            self._on_the_way[model.name] = (self.now_ms + 1_000, self.now_ms, None)
            return
        answer = self.share.report(model.name, sent, self.rate, self.concurrency, self.now_ms)
        lost = self.rng.random() < self.loss
        taken_ms = self.rng.choice((0, 20, 300, 900))
        self._on_the_way[model.name] = (self.now_ms + taken_ms, self.now_ms, None if lost else answer)


# --- never more than the limit -------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.integers(1, 5), st.integers(1, 12), st.floats(0, 0.5))
def test_never_more_calls_in_flight_than_the_limit_whatever_gets_lost(
    seed: int, instances: int, limit: int, loss: float
) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng, instances, None, limit)
    cluster.loss, cluster.call_ms = loss, rng.choice((30, 300, 2_000))
    for _ in range(20):
        for model in cluster.instances:
            model.waiting = rng.choice((0, 0, 1, 5, 200))
        cluster.run(rng.uniform(0.1, 2.0))
        assert cluster.most_in_flight <= limit


@settings(max_examples=60, deadline=None)
@given(st.integers(), st.integers(1, 5), st.sampled_from((0.5, 2.0, 5.0, 20.0)), st.floats(0, 0.5))
def test_in_every_period_at_most_the_rate_and_one_call_for_each_instance(
    seed: int, instances: int, rate: float, loss: float
) -> None:
    rng = random.Random(seed)
    cluster = Cluster(rng, instances, rate, None)
    cluster.loss = loss
    for _ in range(20):
        for model in cluster.instances:
            model.waiting = rng.choice((0, 0, 1, 3, 200))
        cluster.run(rng.uniform(0.1, 3.0))
    started = sorted(at_ms for model in cluster.instances for at_ms in model.started)
    for first in range(len(started)):
        for last in range(first, len(started)):
            seconds = (started[last] - started[first] + 20) / 1_000
            assert last - first + 1 <= rate * seconds + instances


def test_calls_of_an_instance_that_does_not_report_are_counted_for_a_while() -> None:
    share = FlowShare()
    assert share.report("a", report(waiting=9), None, 4, 0).concurrency == 4
    assert share.report("b", report(waiting=9), None, 4, ALLOWANCE_MS + 1).concurrency == 0
    assert share.report("b", report(waiting=9), None, 4, UNSEEN_CALLS_MS + 1).concurrency == 4


def test_members_that_are_dead_are_forgotten_at_once() -> None:
    share = FlowShare()
    share.report("a", report(waiting=9), None, 4, 0)
    share.keep_only(["b"], 10)
    assert share.report("b", report(waiting=9), None, 4, 10).concurrency == 4


def test_the_rate_of_an_instance_that_does_not_report_is_free_after_its_last_call() -> None:
    share = FlowShare()
    assert share.report("a", report(waiting=9), 0.5, None, 0).rate == 0.5
    assert share.report("b", report(waiting=9), 0.5, None, ALLOWANCE_MS).rate == 0
    assert share.report("b", report(waiting=9), 0.5, None, ALLOWANCE_MS + 100).rate == 0
    assert share.report("b", report(waiting=9), 0.5, None, ALLOWANCE_MS + 2_101).rate == 0.5


def test_a_limit_that_was_lowered_holds_when_the_calls_above_it_have_ended() -> None:
    share = FlowShare()
    share.report("a", report(waiting=9), None, 10, 0)
    assert share.report("a", report(9, 10, concurrency=10), None, 2, 200).concurrency == 2
    assert share.report("b", report(waiting=9), None, 2, 210).concurrency == 0
    assert share.report("a", report(9, 1, concurrency=1), None, 2, 400).concurrency == 1
    assert share.report("b", report(waiting=9), None, 2, 410).concurrency == 1


def test_without_leave_to_raise_an_allowance_stays_what_it_was() -> None:
    share = FlowShare()
    answer = share.report("a", report(waiting=9, rate=1.0, concurrency=1), 8.0, 4, 0, may_raise=False)
    assert (answer.rate, answer.concurrency) == (1.0, 1)
    assert share.report("b", report(waiting=9), 8.0, 4, 0, may_raise=False) == FlowAllowance(0.0, 0)
    answer = share.report("a", report(waiting=9, rate=9.0, concurrency=9), 8.0, 4, 0, may_raise=False)
    assert (answer.rate, answer.concurrency) == (8.0, 4)


# --- all of it to those who want it --------------------------------------------------------------


@given(st.integers(), st.integers(1, 12))
def test_an_instance_that_alone_has_timers_gets_the_whole_limit_in_one_round(seed: int, limit: int) -> None:
    rng = random.Random(seed)
    share = FlowShare()
    answer = share.report("a", report(waiting=rng.randint(1, 50)), 5.0, limit, 0)
    assert (answer.rate, answer.concurrency) == (5.0, limit)
    given_back = share.report("a", report(), 5.0, limit, 200)
    assert (given_back.rate, given_back.concurrency) == (0, 0)
    answer = share.report("b", report(waiting=1), 5.0, limit, 400)
    assert (answer.rate, answer.concurrency) == (5.0, limit)


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_whoever_has_timers_waiting_gets_a_turn(limit: int) -> None:
    cluster = Cluster(random.Random(limit), 4, None, limit)
    for model in cluster.instances:
        model.waiting = 100_000
    for _ in range(5):
        before = [len(model.started) for model in cluster.instances]
        cluster.run(4 * (1.0 + 2 * (2 * ROUND_MS + 2_000) / 1_000))
        assert all(len(model.started) > count for model, count in zip(cluster.instances, before, strict=True))


def test_a_limit_of_one_is_used_most_of_the_time_although_it_moves() -> None:
    cluster = Cluster(random.Random(1), 3, None, 1)
    cluster.call_ms = 100.0
    for model in cluster.instances:
        model.waiting = 100_000
    cluster.run(120)
    assert sum(len(model.started) for model in cluster.instances) > 0.35 * 120_000 / 100


def test_most_of_a_rate_is_used_when_all_have_timers() -> None:
    cluster = Cluster(random.Random(2), 3, 10.0, None)
    for model in cluster.instances:
        model.waiting = 100_000
    cluster.run(60)
    counts = [len(model.started) for model in cluster.instances]
    assert 0.9 * 600 < sum(counts) <= 603
    assert min(counts) > 0.8 * max(counts)


def test_an_idle_instance_keeps_nothing_that_others_want() -> None:
    share = FlowShare()
    share.report("a", report(waiting=1), None, 4, 0)
    assert share.report("a", report(0, 0, concurrency=4), None, 4, 200).concurrency == 4, "nobody else wants it"
    share.report("b", report(waiting=9), None, 4, 210)
    assert share.report("a", report(0, 0, concurrency=4), None, 4, 400).concurrency == 0
    assert share.report("a", report(0, 0, concurrency=0), None, 4, 600) == FlowAllowance()
    assert share.report("b", report(waiting=9), None, 4, 610).concurrency == 4


@given(st.integers(0, 50), st.lists(st.integers(0, 60), max_size=6))
def test_a_limit_is_divided_without_a_rest_and_nobody_gets_less_than_one_who_wants_less(
    limit: int, wanted: list[int]
) -> None:
    parts = divided(limit, wanted)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == (limit if wanted and (any(wanted) or limit) else 0)
    for part, want in zip(parts, wanted, strict=True):
        fair = limit // len(wanted)
        assert part >= min(want, fair)
        if part < want:
            assert part >= max(parts) - 1 or part >= fair


@given(st.floats(0.1, 100), st.lists(st.floats(0, 200), min_size=1, max_size=6))
def test_a_rate_is_divided_without_a_rest(limit: float, wanted: list[float]) -> None:
    parts = divided_rate(limit, wanted)
    assert sum(parts) == pytest.approx(limit)
    for part, want in zip(parts, wanted, strict=True):
        assert part >= min(want, limit / len(wanted)) - 1e-9


def test_nothing_is_kept_of_a_flow_that_is_over() -> None:
    share = FlowShare()
    share.report("a", report(waiting=1), 10.0, 1, 0)
    assert not share.is_over(0)
    share.report("a", report(), 10.0, 1, 200)
    assert not share.is_over(200), "a call may just have been started"
    assert share.is_over(300)
    share.report("b", report(waiting=1), 10.0, 1, 300)
    assert share.is_over(300 + UNSEEN_CALLS_MS + 1), "of an instance that is silent for good"
