"""What databases share that write each shard by itself."""

from __future__ import annotations

import pytest

from duetime.errors import OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.stores.fencing import as_a_whole, each_by_itself

LOST, AWAY, UNKNOWN = ShardLost("lost"), StoreUnavailable("away"), OutcomeUnknown("who knows")


async def test_the_error_of_one_is_its_answer_and_stops_what_comes_after_it_in_its_shard() -> None:
    done: list[str] = []

    async def act(wish: str) -> str:
        done.append(wish)
        if wish == "b1":
            raise AWAY
        return wish.upper()

    answers = await each_by_itself(["a1", "b1", "a2", "b2", "c1"], [1, 2, 1, 2, 3], act)
    assert answers == ["A1", AWAY, "A2", AWAY, "C1"]
    assert done == ["a1", "b1", "c1", "a2"]


async def test_an_error_that_nobody_foresaw_is_raised_when_all_have_ended() -> None:
    done: list[int] = []

    async def act(wish: int) -> int:
        if wish == 0:
            raise ZeroDivisionError
        done.append(wish)
        return wish

    with pytest.raises(ZeroDivisionError):
        await each_by_itself([0, 1, 2], [0, 1, 2], act)
    assert done == [1, 2]


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ([1, None, LOST], [1, None, LOST]),
        ([AWAY, AWAY], StoreUnavailable),
        ([AWAY, LOST], StoreUnavailable),
        ([AWAY, None], OutcomeUnknown),
        ([AWAY, UNKNOWN], OutcomeUnknown),
        ([LOST, UNKNOWN], OutcomeUnknown),
    ],
)
def test_a_call_as_a_whole_is_certain_only_if_each_part_is(
    answers: list[int | StoreError | None], outcome: list[object] | type[StoreError]
) -> None:
    if isinstance(outcome, list):
        assert as_a_whole(answers) == outcome
    else:
        with pytest.raises(outcome):
            as_a_whole(answers)
