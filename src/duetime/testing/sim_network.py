"""What an instance of the simulated cluster sees of the world, by a network on which everything may go wrong: the
database and the destinations (the other instances: sim_peers.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from duetime.delivery import Attempt
from duetime.errors import DuetimeError, OutcomeUnknown, StoreError, StoreThrottled, StoreUnavailable
from duetime.model import Contact, Outcome
from duetime.store import Batch, Committed
from duetime.testing.checker import Callback

if TYPE_CHECKING:
    from duetime.testing.sim import World

__all__ = ["SimDeliverer", "SimStore"]

_WRITES = frozenset({"commit", "claim", "release", "purge_reached", "join", "heartbeat", "mark_dead", "put_namespace"})


# --- the store behind a network ------------------------------------------------------------------


class SimStore:
    """The memory store as one instance sees it: calls take time, fail, or are applied without an answer."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._world.database, name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any) -> Any:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            # What is on the wire goes on, whatever becomes of the instance that sent it.
            self._world.outside(self._travel(name, inner, args, answer))
            return await answer

        return call

    async def _travel(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        world, rng, scenario = self._world, self._world.rng, self._world.scenario
        await asyncio.sleep(rng.uniform(0.0002, 0.002))
        dice = rng.random() if world.stormy else 1.0
        if dice < scenario.failed_store:
            world.fault("store call failed")
            failure = StoreThrottled if rng.random() < 0.3 else StoreUnavailable
            _answer(answer, failure("simulated"))
            return
        dice -= scenario.failed_store
        if dice < scenario.unknown_store and name in _WRITES:
            await self._lose_answer(inner, args, answer)
            return
        dice -= scenario.unknown_store
        if dice < scenario.torn_commit and name == "commit":
            world.fault("commit torn between shards")
            _answer(answer, [await self._one_of_many(inner, batch) for batch in args[0]])
            return
        dice -= scenario.torn_commit
        slow = dice < scenario.slow_store
        late = slow and rng.random() < 0.5
        if slow:
            world.fault("store answer slow" if late else "store call slow")
        if slow and not late:
            await asyncio.sleep(rng.uniform(0.1, 2.0))
        try:
            result: Any = await self.perform(name, inner, args)
        except DuetimeError as error:
            result = error
        if late:
            await asyncio.sleep(rng.uniform(0.1, 2.0))  # what it says is old by now
        elif rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0002, 0.002))
        _answer(answer, result)

    async def _one_of_many(self, inner: Callable[..., Awaitable[Any]], batch: Batch) -> Committed | StoreError:
        """What becomes of one batch when its neighbours do not matter."""
        how = self._world.rng.choice(("applied", "applied", "refused", "applied, unknown", "lost, unknown"))
        if how == "refused":
            return StoreThrottled("simulated")
        [result] = await self.perform("commit", inner, ([batch],)) if how.startswith("applied") else [None]
        return OutcomeUnknown("simulated") if how.endswith("unknown") else cast("Committed | StoreError", result)

    async def perform(self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        """The call at the database. (A seam: mutants take its atomicity away.)"""
        return await inner(*args)

    async def _lose_answer(
        self, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        """The caller is told after a time-out that nobody knows; the call is applied before, after, or never."""
        world, rng = self._world, self._world.rng
        kind = rng.choice(("never", "before", "after"))
        world.fault(f"store answer lost, applied {kind}")
        if kind == "before":
            await _quietly(lambda: inner(*args))
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        _answer(answer, OutcomeUnknown("simulated"))
        if kind == "after":
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            await _quietly(lambda: inner(*args))


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


async def _quietly(call: Callable[[], Awaitable[Any]]) -> None:
    with contextlib.suppress(DuetimeError):  # nobody is listening
        await call()


# --- destinations --------------------------------------------------------------------------------


class SimDeliverer:
    """An instance's way out. Destinations are named by their host: ok, slow, dead, flapping, again."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def check(self, url: str) -> None: ...
    def check_headers(self, headers: Mapping[str, str]) -> None: ...
    async def close(self) -> None: ...
    def destination(self, url: str) -> str:
        return url

    async def deliver(self, attempt: Attempt) -> Outcome:
        world = self._world
        # Connecting takes a moment, and now and then much longer: the time in which everything may change.
        slow = world.stormy and world.rng.random() < world.scenario.slow_connects
        await asyncio.sleep(world.rng.uniform(0.0001, 3.0 if slow else 0.003))
        if attempt.begin() is None:
            return Outcome(Contact.NOT_SENT)
        answer: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        world.outside(self._receive(attempt, world.now_ms(), answer))
        return await answer

    async def _receive(self, attempt: Attempt, started_at_ms: int, answer: asyncio.Future[Outcome]) -> None:
        world, rng, timer = self._world, self._world.rng, attempt.timer
        world.saw(
            Callback(
                timer=timer.timer_id,
                value=timer.payload or "",
                attempt=timer.attempts + 1,
                started_at_ms=started_at_ms,
                seen_at_ms=world.now_ms(),
                fence=attempt.fence,
                owner=self._name,
            )
        )
        host = timer.callback_url
        if world.stormy and host == "http://dead":
            await asyncio.sleep(5)
            _answer(answer, Outcome(Contact.BROKEN, error="timeout"))
            return
        if world.stormy and host == "http://flapping" and rng.random() < 0.5:
            _answer(answer, Outcome(Contact.ANSWERED, 500))
            return
        await asyncio.sleep(rng.uniform(0.5, 3.0) if host == "http://slow" else rng.uniform(0.0005, 0.01))
        _answer(answer, Outcome(Contact.ANSWERED, 200))
