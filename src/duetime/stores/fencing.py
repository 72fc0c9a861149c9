"""What the fenced writes of all adapters share: the order of locks, results, and the mapping of errors."""

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
    """Decorator for store calls that change nothing. An unexpected error, for instance while a result is decoded, is
    raised as StoreUnavailable: the engine handles only StoreErrors."""
    return _mapped(call, StoreUnavailable)


def writing(call: Callable[P, Awaitable[T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Decorator for store calls that change something. An unexpected error is raised as OutcomeUnknown."""
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
    return ShardLost(f"shard {fence.shard_id} is no longer owned at version {fence.version}")


def shard_rounds(shard_ids: Sequence[int]) -> list[list[int]]:
    """Divides the indexes of `shard_ids` into rounds that are executed one after the other. No round has a shard twice.
    Normally there is one round.

    Each round is ordered by shard, because all writers lock in that order: this prevents deadlocks.
    """
    rounds: list[list[int]] = []
    last_round: dict[int, int] = {}
    for index in sorted(range(len(shard_ids)), key=shard_ids.__getitem__):
        shard_id = shard_ids[index]
        number = last_round[shard_id] = last_round.get(shard_id, -1) + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def committed(batches: Sequence[Batch], replaced: Iterable[int]) -> list[Committed | ShardLost]:
    """The results of batches. `replaced` are indexes into the puts of all batches, counted from 0."""
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
    """For a write of several statements. After the first was applied, StoreUnavailable of a later one is raised as
    OutcomeUnknown, because a part was applied."""
    applied = False

    async def step(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal applied
        try:
            result = await run(*args, **kwargs)
        except StoreUnavailable as error:
            if applied:
                raise OutcomeUnknown(error.detail) from error
            raise
        applied = True
        return result

    return step


async def each_shard_separately(
    requests: Sequence[T], shard_ids: Sequence[int], act: Callable[[T], Awaitable[R]]
) -> list[R | StoreError]:
    """For databases that write each shard separately: requests of one shard run one after the other, those of different
    shards at the same time.

    Returns the results in the order of the requests; the error of a request is its result. After a request failed,
    later ones of the same shard fail with the same error, because the state of the shard is unknown.
    """
    results: dict[int, R | StoreError] = {}
    failed: dict[int, StoreError] = {}

    async def one(index: int) -> None:
        shard_id = shard_ids[index]
        try:
            if shard_id in failed:
                raise failed[shard_id]
            results[index] = await act(requests[index])
        except StoreError as error:
            results[index] = failed[shard_id] = error

    for indexes in shard_rounds(shard_ids):
        for unexpected in await asyncio.gather(*map(one, indexes), return_exceptions=True):
            if unexpected is not None:
                raise unexpected
    return [results[index] for index in range(len(requests))]


def all_or_error(results: Sequence[R | StoreError]) -> list[R]:
    """Returns the results, or raises if there is an error among them. ShardLost is a result and not an error here. If
    one request was not applied and another one was, OutcomeUnknown is raised."""
    failures = [result for result in results if isinstance(result, StoreError) and not isinstance(result, ShardLost)]
    not_applied = [failure for failure in failures if isinstance(failure, StoreUnavailable)]
    if len(not_applied) < len(failures):
        raise next(failure for failure in failures if not isinstance(failure, StoreUnavailable))
    if not_applied and any(not isinstance(result, StoreError) for result in results):
        raise OutcomeUnknown(not_applied[0].detail) from not_applied[0]
    if not_applied:
        raise not_applied[0]
    return cast("list[R]", list(results))
