"""The connections of a simulated instance to the database and to the destinations, with faults of every kind. (Those to
other instances: testing/simulation/peers.py.)"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.instants import format_instant
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import TimerKey
from duetime.errors import DuetimeError, OutcomeUnknown, StoreError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed
from duetime.testing.checker import Callback, Fault, Violation

if TYPE_CHECKING:
    from duetime.testing.simulation.world import World

__all__ = ["FORBIDDEN_HEADERS", "FORBIDDEN_URL", "Cut", "SimDeliverer", "SimStore", "name_in_history", "value_of"]

FORBIDDEN_URL = "http://forbidden"
FORBIDDEN_HEADERS = {"host": "another"}

_WRITES = frozenset({"commit", "claim", "release", "purge_reached", "join", "heartbeat", "mark_dead", "put_namespace"})


def name_in_history(key: TimerKey) -> str:
    """What the checker calls a timer."""
    return key.timer_id if key.namespace == "default" else f"{key.namespace}/{key.timer_id}"


def value_of(payload: str | None) -> str:
    """The value a payload carries: what follows the bar only makes it large."""
    return (payload or "").strip('"').partition("|")[0]


# --- the store behind a network ------------------------------------------------------------------


class Cut(Struct, frozen=True):
    """An outage of a link to the database."""

    until: float  # loop time
    hangs: bool  # calls wait for a time-out; otherwise they are refused at once
    methods: frozenset[str] = frozenset()  # empty: all


class SimStore:
    """The memory store as one instance sees it: calls take time, fail, or are applied without an answer."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self.cut: Cut | None = None
        self.odd_errors: dict[str, int] = {}  # method -> how many of the next calls raise an unexpected error

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
        if self._is_cut(name):
            await self._cut_off(name, answer)
            return
        if self.odd_errors.get(name):
            await self._fail_oddly(name, inner, args, answer)
            return
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
        if dice < scenario.torn_answer and name in ("load", "purge_reached"):
            world.fault(f"{name} failed for some shards")
            results = await self.perform(name, inner, args)
            _answer(answer, [StoreThrottled("simulated") if rng.random() < 0.5 else result for result in results])
            return
        dice -= scenario.torn_answer
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

    # outages and errors that no adapter should raise

    def _is_cut(self, name: str) -> bool:
        cut = self.cut
        return cut is not None and cut.until > self._world.loop.now and (not cut.methods or name in cut.methods)

    async def _cut_off(self, name: str, answer: asyncio.Future[Any]) -> None:
        cut = self.cut
        assert cut is not None
        if not cut.hangs:
            _answer(answer, StoreUnavailable("simulated: no connection"))
            return
        limit = self._world.rng.uniform(2.0, 8.0)  # the driver's time limit
        await asyncio.sleep(min(limit, cut.until - self._world.loop.now))
        # Some were never sent: they waited for a connection.
        is_unknown = name in _WRITES and self._world.rng.random() < 0.7
        error = OutcomeUnknown if is_unknown else StoreUnavailable
        _answer(answer, error("simulated: no answer in time"))

    async def _fail_oddly(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        self.odd_errors[name] -= 1
        applied = self._world.rng.random() < 0.5
        self._world.fault(f"unforeseen error from {name}")
        if applied:
            await _quietly(lambda: inner(*args))
        _answer(answer, ZeroDivisionError("simulated"))


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
    """An instance's way out. Destinations are named by their host: ok, slow, dead, flapping, busy, again."""

    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name

    def check(self, url: str) -> None:
        if url == FORBIDDEN_URL:
            raise ValueError("is forbidden")

    async def close(self) -> None: ...

    def destination(self, url: str) -> str:
        world = self._world
        if world.stormy and world.rng.random() < world.scenario.broken_deliveries:
            world.fault("destination not known")
            raise ValueError("simulated")
        return url

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        world, rng, scenario = self._world, self._world.rng, self._world.scenario
        # Connecting takes a moment, and now and then much longer: the time in which everything may change.
        slow = world.stormy and rng.random() < scenario.slow_connects
        await asyncio.sleep(rng.uniform(0.0001, 3.0 if slow else 0.003))
        if world.stormy and rng.random() < scenario.broken_deliveries * (10 if slow else 1):
            world.fault("delivery broke before it began")
            raise ValueError("simulated")
        if attempt.begin() is None:
            return AttemptResult(Contact.NOT_SENT)
        self._check_namespace(attempt)
        begun_at_ms = 0
        if world.stormy and rng.random() < scenario.dead_connections:
            # As the HTTP client does it: a kept-alive connection turns out dead, and the request goes on a new one.
            if rng.random() < 0.5:
                self._explains(attempt, "request taken by a connection that then broke")
                world.outside(self._receive(attempt, world.now_ms(), None))
            else:
                world.fault("request lost on a dead connection")
            begun_at_ms = world.now_ms()
            await asyncio.sleep(rng.uniform(0.0001, 1.5))
            if attempt.begin() is None:
                return AttemptResult(Contact.BROKEN, error="connection closed before the answer")
        answer: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        world.outside(self._receive(attempt, world.now_ms(), answer, begun_at_ms))
        result = await answer
        if world.stormy and rng.random() < scenario.broken_deliveries:
            self._explains(attempt, "delivery broke after it was answered")
            raise ValueError("simulated")
        return result

    def _check_namespace(self, attempt: Attempt) -> None:
        """Each attempt must be made with settings that the namespace had: its secrets, its retry policy."""
        world, namespace = self._world, attempt.namespace
        stored = world.database.stored_namespaces.get(attempt.timer.namespace, [])
        if namespace not in stored:
            what = f"{self._name} fired under settings of namespace {namespace.name!r} that nobody has stored"
            world.violations.append(Violation("N", name_in_history(attempt.timer.key), what, f"    {namespace}"))

    def _explains(self, attempt: Attempt, kind: str) -> None:
        """A fault after which this delivery may be repeated, and no other."""
        world = self._world
        world.fault(kind)
        world.explain(Fault(kind, world.now_ms(), world.now_ms(), self._name, attempt.timer.delivery_id))

    async def _receive(
        self, attempt: Attempt, started_at_ms: int, answer: asyncio.Future[AttemptResult] | None, begun_at_ms: int = 0
    ) -> None:
        """The receiver. Without an `answer` its response is lost."""
        world, rng, timer = self._world, self._world.rng, attempt.timer
        call = Callback(
            timer=name_in_history(timer.key),
            value=value_of(timer.payload),
            attempt=timer.attempts + 1,
            started_at_ms=started_at_ms,
            seen_at_ms=world.now_ms(),
            fence=attempt.fence,
            owner=self._name,
            delivery=timer.delivery_id,
            begun_at_ms=begun_at_ms,
        )
        number = world.saw(call)
        result, seconds = self._decide(timer.callback_url, timer.extras.occurrence)
        await asyncio.sleep(seconds)
        if result.status == 200:
            world.callbacks[number] = replace(call, accepted_at_ms=world.now_ms())
            world.tell(f"accepted {number}")
            if result.body:
                self._explains(attempt, "destination asked for another call")
            if answer is not None and world.stormy and rng.random() < world.scenario.lost_callback_answers:
                self._explains(attempt, "answer of a destination lost")
                result = AttemptResult(Contact.BROKEN, error="connection reset")
        if answer is not None:
            _answer(answer, result)

    def _decide(self, url: str, occurrence: int) -> tuple[AttemptResult, float]:
        """What the receiver answers, and how long it takes."""
        world, rng = self._world, self._world.rng
        if world.stormy and url == "http://dead":
            return AttemptResult(Contact.BROKEN, error="timeout"), 5.0
        if world.stormy and url == "http://flapping" and rng.random() < 0.5:
            return AttemptResult(Contact.ANSWERED, 500), 0.0
        if world.stormy and url == "http://busy" and rng.random() < 0.4:
            return AttemptResult(Contact.ANSWERED, 503, retry_after_ms=rng.choice((0, 500, 3_000))), 0.0
        seconds = rng.uniform(0.5, 3.0) if url == "http://slow" else rng.uniform(0.0005, 0.01)
        body = b""
        if url == "http://again" and occurrence < 2:
            at_ms = world.now_ms() + rng.randint(100, 3_000)
            body = b'{"ok": true, "nextExecuteAt": "%s"}' % format_instant(at_ms).encode()
        return AttemptResult(Contact.ANSWERED, 200, body), seconds
