"""Rounds of shards, results of commits, and errors of writes of which a part was applied."""

from __future__ import annotations

import asyncio

import pytest

from duetime.domain.timer import Timer, uuid_of
from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import Batch, Committed, Fence
from duetime.stores.fencing import (
    NOTHING_REPLACED,
    all_or_error,
    committed,
    each_shard_separately,
    in_steps,
    lost,
    shard_rounds,
)

LOST, AWAY, UNKNOWN = ShardLost("lost"), StoreUnavailable("away"), OutcomeUnknown("who knows")


def put(timer_id: str) -> Timer:
    high, low = uuid_of("default", timer_id)
    return Timer(
        namespace="default",
        timer_id=timer_id,
        uuid_high=high,
        uuid_low=low,
        generation=1,
        execute_at_ms=1,
        scheduled_at_ms=1,
        created_at_ms=1,
        callback_url="http://shop.test",
    )


@pytest.mark.parametrize(
    ("shard_ids", "expected"),
    [
        ([], []),
        ([3, 1, 2], [[1, 2, 0]]),
        ([1, 1], [[0], [1]]),
        ([2, 1, 2, 2, 1], [[1, 0], [4, 2], [3]]),
    ],
)
def test_a_round_has_no_shard_twice_and_is_ordered_by_shard(shard_ids: list[int], expected: list[list[int]]) -> None:
    assert shard_rounds(shard_ids) == expected


def test_replaced_puts_are_reported_for_each_batch_by_their_index() -> None:
    batches = [
        Batch(Fence(1, 1, 1), [put("a"), put("b")]),
        Batch(Fence(2, 1, 1), []),
        Batch(Fence(3, 1, 1), [put("c"), put("d"), put("e")]),
    ]
    assert committed(batches, []) == [NOTHING_REPLACED] * 3
    assert committed(batches, [1, 2, 4]) == [
        Committed(frozenset({1})),
        Committed(frozenset()),
        Committed(frozenset({0, 2})),
    ]


def test_a_lost_shard_is_reported_with_the_version_of_the_fence() -> None:
    assert lost(Fence(7, 3, 99)).detail == "shard 7 is no longer owned at version 3"


async def test_a_step_that_fails_after_another_was_applied_has_an_unknown_outcome() -> None:
    answers: list[str | StoreError] = []

    async def run(answer: str | StoreError) -> str:
        if isinstance(answer, StoreError):
            raise answer
        answers.append(answer)
        return answer

    step = in_steps(run)
    with pytest.raises(StoreUnavailable):  # nothing was applied yet
        await step(AWAY)
    assert await step("first") == "first"
    with pytest.raises(OutcomeUnknown, match="away"):
        await step(AWAY)
    with pytest.raises(ShardLost):
        await step(LOST)
    with pytest.raises(StoreUnavailable):  # another call counts its own steps
        await in_steps(run)(AWAY)


async def test_the_error_of_a_request_is_its_result_and_fails_later_requests_of_its_shard() -> None:
    done: list[str] = []

    async def act(value: str) -> str:
        done.append(value)
        if value == "b1":
            raise AWAY
        return value.upper()

    answers = await each_shard_separately(["a1", "b1", "a2", "b2", "c1"], [1, 2, 1, 2, 3], act)
    assert answers == ["A1", AWAY, "A2", AWAY, "C1"]
    assert done == ["a1", "b1", "c1", "a2"]


async def test_an_unexpected_error_is_raised_when_all_requests_have_ended() -> None:
    done: list[int] = []

    async def act(value: int) -> int:
        if value == 0:
            raise ZeroDivisionError
        await asyncio.sleep(0.001)
        done.append(value)
        return value

    with pytest.raises(ZeroDivisionError):
        await each_shard_separately([0, 1, 2], [0, 1, 2], act)
    assert done == [1, 2]


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([1, None, LOST], [1, None, LOST]),
        ([AWAY, AWAY], StoreUnavailable),
        ([AWAY, LOST], StoreUnavailable),
        ([AWAY, None], OutcomeUnknown),
        ([AWAY, UNKNOWN], OutcomeUnknown),
        ([UNKNOWN, AWAY], OutcomeUnknown),
        ([UNKNOWN, 1], OutcomeUnknown),
        ([1, 2], [1, 2]),
        ([LOST, UNKNOWN], OutcomeUnknown),
    ],
)
def test_a_call_is_certainly_not_applied_only_if_no_part_was_applied(
    answers: list[int | StoreError | None], outcome: list[object] | type[StoreError]
) -> None:
    if isinstance(outcome, list):
        assert all_or_error(answers) == outcome
    else:
        with pytest.raises(outcome):
            all_or_error(answers)
