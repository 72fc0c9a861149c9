"""What timers weigh in memory, in bytes, and who gives memory back first when there is too little."""

from __future__ import annotations

from collections.abc import Mapping
from sys import getsizeof
from typing import Final, TypeVar

from duetime.domain.timer import NO_EXTRAS, Extras, Timer
from duetime.domain.wall_clock import ScheduleState

__all__ = ["UNIT_BYTES", "cuts", "timer_bytes"]

K = TypeVar("K")

UNIT_BYTES: Final = 1024  # `engine.timers_in_memory_max` counts in these

# Measured on CPython 3.11 (`test_the_account_agrees_with_the_memory_of_the_process`): the objects of a timer without
# optional fields, its entry, and its places in the dictionaries and queues of the engine.
_TIMER_BYTES: Final = 830
_HEADER_BYTES: Final = 170
_TAG_BYTES: Final = 60
_TEXT_BYTES: Final = 50
_ASCII_TEXT_BYTES: Final = getsizeof("")
_EXTRAS_BYTES: Final = 250
_COMMAND_BYTES: Final = 200
_SCHEDULE_BYTES: Final = 900


def timer_bytes(timer: Timer) -> int:
    """The bytes that a timer takes in memory while the engine holds it."""
    total = _TIMER_BYTES + len(timer.callback_url) + len(timer.timer_id)
    payload = timer.payload
    if payload is not None:
        # Others have two or four bytes for a character, or one. `getsizeof` is much slower than `len`.
        total += _ASCII_TEXT_BYTES + len(payload) if payload.isascii() else getsizeof(payload)
    if timer.correlation_id is not None:
        total += _TEXT_BYTES + len(timer.correlation_id)
    if timer.extras is not NO_EXTRAS:
        total += _extras_bytes(timer.extras)
    return total


def _extras_bytes(extras: Extras) -> int:
    total = _EXTRAS_BYTES
    if extras.headers:
        total += sum(_HEADER_BYTES + len(name) + len(value) for name, value in extras.headers.items())
    total += sum(_TAG_BYTES + len(tag) for tag in extras.tags)
    if extras.command is not None:
        total += _COMMAND_BYTES
    if isinstance(extras.later, ScheduleState):
        total += _SCHEDULE_BYTES
        if extras.later.schedule is not None:
            total += extras.later.schedule.chars + _TEXT_BYTES * len(extras.later.schedule.exclude)
    for text in (extras.last_error, extras.flow_key):
        if text is not None:
            total += _TEXT_BYTES + len(text)
    return total


def cuts(weights: Mapping[K, int], surplus: int) -> dict[K, int]:
    """How much each holder gives back so that together they give `surplus`: the largest ones give until they are as
    small as the next ones. Holders that give nothing are left out."""
    ordered = sorted(weights.items(), key=lambda item: -item[1])
    total = 0
    for count, (_, weight) in enumerate(ordered, start=1):
        total += weight
        following = ordered[count][1] if count < len(ordered) else 0
        if total - count * following >= surplus:
            level = max(0, total - surplus) // count
            return {holder: weight - level for holder, weight in ordered[:count] if weight > level}
    return dict(ordered)
