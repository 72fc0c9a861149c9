"""What is committed of a partition of Kafka: all before the first record that is not done, never less than before."""

from __future__ import annotations

import random

import pytest

from duetime.ingress.offsets import Progress


def received(*offsets: int) -> Progress:
    progress = Progress()
    for offset in offsets:
        assert progress.receive(offset)
    return progress


def finished(progress: Progress, *offsets: int) -> Progress:
    for offset in offsets:
        progress.finish(offset)
    return progress


def test_before_the_first_record_nothing_is_committed() -> None:
    assert Progress().uncommitted is None
    assert Progress().next_offset is None


def test_what_is_received_and_not_done_is_where_another_instance_begins() -> None:
    assert received(7, 8).uncommitted == 7


@pytest.mark.parametrize(
    ("done", "committed"),
    [((), 5), ((5,), 6), ((6, 7), 5), ((5, 7), 6), ((7, 5, 6), 8), ((5, 6, 7, 8), 9)],
)
def test_only_what_is_done_without_a_gap_is_committed(done: tuple[int, ...], committed: int) -> None:
    assert finished(received(5, 6, 7, 8), *done).uncommitted == committed


def test_numbers_that_the_log_does_not_have_are_passed_over() -> None:
    """Of a compacted topic, or of the end of a transaction."""
    progress = received(5, 9, 20)
    assert finished(progress, 5).uncommitted == 9
    assert finished(progress, 9, 20).uncommitted == 21


def test_what_is_committed_is_not_committed_again() -> None:
    progress = finished(received(5, 6), 5)
    progress.committed = 6
    assert progress.uncommitted is None
    assert finished(progress, 6).uncommitted == 7


def test_what_was_done_during_a_commit_is_left_for_the_next_one() -> None:
    progress = finished(received(5, 6), 5)
    sent = progress.uncommitted
    progress.finish(6)
    progress.committed = sent
    assert progress.uncommitted == 7


def test_a_record_that_is_done_twice_counts_once() -> None:
    progress = finished(received(5, 6, 7), 5, 5, 6, 6)
    assert (progress.uncommitted, progress.distance) == (7, 1)
    assert finished(progress, 7, 5).uncommitted == 8


def test_a_record_is_done_from_when_it_was_finished() -> None:
    progress = finished(received(5, 6, 7), 6)
    assert [progress.is_done(offset) for offset in (5, 6, 7)] == [False, True, False]
    finished(progress, 5, 7)
    assert all(progress.is_done(offset) for offset in (5, 6, 7))


def test_a_record_that_is_received_twice_is_worked_on_once() -> None:
    progress = received(5, 6)
    assert not progress.receive(6)
    assert progress.receive(7)
    assert progress.distance == 3


def test_the_distance_is_what_would_be_received_again() -> None:
    progress = received(*range(100))
    finished(progress, *range(1, 100))
    assert progress.distance == 100
    assert finished(progress, 0).distance == 0


def test_after_a_record_that_is_held_nothing_is_received_or_committed() -> None:
    progress = received(5)
    progress.is_held = True
    assert not progress.receive(7)
    assert finished(progress, 5, 7).uncommitted == 6


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_order_an_offset_never_goes_back_and_never_passes_what_is_not_done(seed: int) -> None:
    rng = random.Random(seed)
    progress, not_done, last, following = Progress(), set[int](), 0, 0
    for _ in range(500):
        if not not_done or rng.random() < 0.5:
            following += rng.choice((1, 1, 1, 4))  # some numbers are missing
            assert progress.receive(following)
            not_done.add(following)
        else:
            offset = rng.choice(sorted(not_done))
            not_done.discard(offset)
            progress.finish(offset)
        wanted = min(not_done, default=following + 1)
        offset_now = progress.uncommitted
        if offset_now is None:
            assert last == wanted
        else:
            assert last < offset_now == wanted
            if rng.random() < 0.7:  # else the commit has failed
                progress.committed = last = offset_now
