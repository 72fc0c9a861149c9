"""What every fenced write has in common: turns, losses, answers, and steps of which only the first may be done."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, ParamSpec, TypeVar, cast

from duetime.errors import DuetimeError, OutcomeUnknown, ShardLost, StoreError, StoreUnavailable
from duetime.store import Batch, Committed, Fence

__all__ = [
    "NOTHING_REPLACED",
    "all_or_error",
    "committed",
    "each_shard_separately",
    "in_steps",
    "lost",
    "reading",
    "shard_rounds",
    "writing",
]

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

NOTHING_REPLACED: Final = Committed()
ERROR_CHARS_MAX: Final = 200


def reading(call: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """For store calls that change nothing. An unexpected error, while an answer is decoded for instance, is raised as
    StoreUnavailable: the engine handles only StoreErrors."""
    return _mapped(call, StoreUnavailable)


def writing(call: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """For store calls that change something: after an unexpected error the outcome is unknown."""
    return _mapped(call, OutcomeUnknown)


def _mapped(call: Callable[P, Awaitable[T]], kind: type[StoreError]) -> Callable[P, Coroutine[Any, Any, T]]:
    @functools.wraps(call)
    async def mapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await call(*args, **kwargs)
        except DuetimeError:
            raise
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS_MAX]
            raise kind(f"unexpected error in a call to the database ({text})") from error

    return mapped


def lost(fence: Fence) -> ShardLost:
    return ShardLost(f"shard {fence.shard_id} is no longer held at version {fence.version}")


def shard_rounds(shard_ids: Sequence[int]) -> list[list[int]]:
    """Indexes in groups to be done one after the other, so that no group names a shard twice. Normally one.

    Each in the order of shards, which is the order in which everybody locks.
    """
    found: list[list[int]] = []
    times: dict[int, int] = {}
    for index in sorted(range(len(shard_ids)), key=shard_ids.__getitem__):
        shard_id = shard_ids[index]
        turn = times[shard_id] = times.get(shard_id, -1) + 1
        if turn == len(found):
            found.append([])
        found[turn].append(index)
    return found


def committed(batches: Sequence[Batch], replaced: Iterable[int]) -> list[Committed | ShardLost]:
    """The answers, where `replaced` counts through the puts of all batches, from 0."""
    found = set(replaced)
    if not found:
        return [NOTHING_REPLACED] * len(batches)
    results: list[Committed | ShardLost] = []
    first = 0
    for batch in batches:
        results.append(Committed(frozenset(i for i in range(len(batch.puts)) if first + i in found)))
        first += len(batch.puts)
    return results


def in_steps(run: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """For what may take more than one statement: once one was applied, a failure of the next is not "not applied"."""
    begun = False

    async def step(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal begun
        try:
            answer = await run(*args, **kwargs)
        except StoreUnavailable as error:
            if begun:
                raise OutcomeUnknown(error.detail) from error
            raise
        begun = True
        return answer

    return step


async def each_shard_separately(
    wishes: Sequence[T], shard_ids: Sequence[int], act: Callable[[T], Awaitable[R]]
) -> list[R | StoreError]:
    """Where each shard is written by itself: a shard's wishes one after the other, those of different shards at once.

    In the order of the wishes; the error of one is its answer. After one that failed, none of the same shard is tried:
    who knows what stands there.
    """
    answers: dict[int, R | StoreError] = {}
    failed: dict[int, StoreError] = {}

    async def one(index: int) -> None:
        shard_id = shard_ids[index]
        try:
            if shard_id in failed:
                raise failed[shard_id]
            answers[index] = await act(wishes[index])
        except StoreError as error:
            answers[index] = failed[shard_id] = error

    for turn in shard_rounds(shard_ids):
        for unforeseen in await asyncio.gather(*map(one, turn), return_exceptions=True):
            if unforeseen is not None:
                raise unforeseen
    return [answers[index] for index in range(len(wishes))]


def all_or_error(answers: Sequence[R | StoreError]) -> list[R]:
    """For a call that succeeds or fails as a whole; a ShardLost is an answer like any other. If one failed and another
    was applied, it is no longer true that nothing was."""
    failures = [answer for answer in answers if isinstance(answer, StoreError) and not isinstance(answer, ShardLost)]
    certain = [failure for failure in failures if isinstance(failure, StoreUnavailable)]
    if len(certain) < len(failures):
        raise next(failure for failure in failures if not isinstance(failure, StoreUnavailable))
    if certain and any(not isinstance(answer, StoreError) for answer in answers):
        raise OutcomeUnknown(certain[0].detail) from certain[0]
    if certain:
        raise certain[0]
    return cast("list[R]", list(answers))
