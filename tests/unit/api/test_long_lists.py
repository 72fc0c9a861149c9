"""Long and hostile lists: the event loop is never blocked for long. Work is counted in bytes, not in time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetime.api import decode, dispatch
from duetime.api.decode_json import STEP_BYTES, Body
from duetime.api.long_lists import ItemFinder
from duetime.config import Limits, load_config
from duetime.errors import InvalidField

LIMITS = load_config(environ={}).limits
LONG = decode.WHOLE_LIST_BYTES_MAX + 1


def split(body: bytes, limits: Limits = LIMITS) -> tuple[list[bytes], list[int]]:
    """The items, and the bytes that were handled in each step."""
    work, steps = decode.decode_timers(body, limits), []
    while True:
        try:
            steps.append(next(work))
        except StopIteration as stop:
            return [bytes(item) for item in cast(list[Body], stop.value)], steps


def long_body(items: list[bytes]) -> bytes:
    """So long that it is decoded in steps; spaces are valid between items."""
    return b'{"timers":[' + b" " * LONG + b",".join(items) + b"]}"


def test_a_long_list_is_split_in_steps_of_bounded_size() -> None:
    items = [json.dumps({"timerId": f"t{i}", "payload": 'a"]},\\' * 2_000}).encode() for i in range(1_000)]
    found, steps = split(b'{"timers":[' + b",".join(items) + b"]}")
    assert found == items
    assert max(steps) <= STEP_BYTES
    assert sum(steps) > 15_000_000


def test_the_items_of_a_long_list_end_after_the_limit_was_passed_not_after_eight_million() -> None:
    body = b'{"timers":[' + b"1," * 2_000_000 + b"1]}"
    work = decode.decode_timers(body, LIMITS)
    with pytest.raises(InvalidField, match="at most 1000 items"):
        next(work)  # the first slice has more than 1000 items


def test_of_a_slice_with_thousands_of_items_only_one_more_than_allowed_is_found() -> None:
    finder = ItemFinder(0, count_max=1_000)
    assert len(finder.find(b"1," * (STEP_BYTES // 2), 0)) == 1_001


def test_one_item_longer_than_a_step_is_a_step_of_its_own() -> None:
    item = b'"' + b"x" * 5 * STEP_BYTES + b'"'
    found, steps = split(long_body([b"1", item, b"2"]))
    assert found == [b"1", item, b"2"]
    assert max(steps) == len(item)


async def test_other_tasks_run_between_the_steps_of_a_long_list() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    items = await dispatch._in_steps(decode.decode_timers(long_body([b'"%s"' % (b"x" * 10_000)] * 100), LIMITS))
    turns_to_split = turns
    await dispatch._in_steps(dispatch._each(items, len))
    task.cancel()
    assert turns_to_split >= LONG // STEP_BYTES
    assert turns - turns_to_split >= 100 * 10_000 // STEP_BYTES - 1


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a"\\[]{},: é'),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\]}', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.lists(_JSON, max_size=6), st.integers(1, 9), st.booleans())
def test_any_list_is_split_as_a_decoder_splits_it(values: list[Any], step: int, spaces: bool) -> None:
    body = json.dumps(
        {"timers": values}, ensure_ascii=False, separators=(", ", ": ") if spaces else (",", ":")
    ).encode()
    finder = ItemFinder(body.index(b"[") + 1, count_max=6)
    found: list[bytes] = []
    for offset in range(body.index(b"[") + 1, len(body), step):
        if not finder.at_end:
            found += [body[a:b].strip() for a, b in finder.find(body[offset : offset + step], offset)]
    expected = msgspec.json.decode(body, type=dict[str, list[msgspec.Raw]])["timers"]
    assert [item for item in found if item] == [bytes(item) for item in expected]
    assert finder.at_end
    assert body[finder.item_start :] == b"}"


def test_an_empty_long_list_has_no_items() -> None:
    assert split(long_body([]))[0] == []


@pytest.mark.parametrize(
    "body",
    [
        b'{"timers":[' + b" " * LONG,
        b'{"timers":[' + b" " * LONG + b'"',
        b'{"timers":[' + b" " * LONG + b"1",
        b'{"timers":[' + b" " * LONG + b"[1,2}]}",
        b'{"timers":[' + b" " * LONG + b"1,]}",
        b'{"timers":[' + b" " * LONG + b",1]}",
        b'{"timers":[' + b" " * LONG + b"1}}",
        b'{"timers":[' + b" " * LONG + b"1]",
        b'{"timers":[' + b" " * LONG + b'1],"more":1}',
        b'{"timers":[' + b" " * LONG + b"1]}" + b" " * LONG + b"}",
        b'{"timers":[' + b" " * LONG + b'"\\ud800"]}',
        b'{"timers":1' + b" " * LONG + b"}",
        b'{"more":1,"timers":[' + b" " * LONG + b"]}",
        b" " * LONG,
    ],
)
def test_a_long_list_that_is_malformed_is_refused_as_a_whole(body: bytes) -> None:
    with pytest.raises(InvalidField):
        split(body)
