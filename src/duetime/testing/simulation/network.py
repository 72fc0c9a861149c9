"""The connections of a simulated instance to the database and to the receivers, with faults of every kind.
(Connections to other instances: testing/simulation/peers.py.)"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from duetime.delivery import Attempt
from duetime.domain.headers import check_http_headers
from duetime.domain.instants import format_instant
from duetime.domain.settle import AttemptResult, Contact
from duetime.domain.timer import TimerKey
from duetime.errors import DuetimeError, OutcomeUnknown, StoreError, StoreThrottled, StoreUnavailable
from duetime.store import Batch, Committed
from duetime.testing.checker import Callback, Fault, Violation

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import SimulatedCluster

__all__ = [
    "FORBIDDEN_HEADERS",
    "FORBIDDEN_URL",
    "HOSTILE",
    "Outage",
    "SimDeliverer",
    "SimStore",
    "name_in_history",
    "value_of",
]

FORBIDDEN_URL = "http://forbidden"
FORBIDDEN_HEADERS = {"host": "another"}

HOSTILE = "hostile"  # a namespace whose receivers never answer as they should
_HANGS_SECONDS = 15.0
_WRITES = frozenset({"commit", "claim", "release", "purge_reached", "join", "heartbeat", "mark_dead", "put_namespace"})


def name_in_history(key: TimerKey) -> str:
    """The name of a timer in the history."""
    return key.timer_id if key.namespace == "default" else f"{key.namespace}/{key.timer_id}"


def value_of(payload: str | None) -> str:
    """The value in a payload. The text after the `|` only makes the payload large."""
    return (payload or "").strip('"').partition("|")[0]


# --- the store behind a network ------------------------------------------------------------------


class Outage(Struct, frozen=True):
    """An outage of a connection to the database."""

    until: float  # loop time
    hangs: bool  # calls wait for a time-out; otherwise they are refused at once
    methods: frozenset[str] = frozenset()  # empty: all


class SimStore:
    """The memory store as one instance sees it: calls take time, fail, or are applied although the answer is lost."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name
        self.outage: Outage | None = None
        self.unexpected_errors: dict[str, int] = {}  # method -> how many of the next calls raise an unexpected error

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self._cluster.database, name)
        if not asyncio.iscoroutinefunction(inner):
            return inner

        async def call(*args: Any) -> Any:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            # A call that was sent continues even if the instance that sent it crashes or freezes.
            self._cluster.create_task(self._call(name, inner, args, answer))
            return await answer

        return call

    async def _call(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        cluster, rng, scenario = self._cluster, self._cluster.rng, self._cluster.scenario
        await asyncio.sleep(rng.uniform(0.0002, 0.002))
        if self._in_outage(name):
            await self._fail_in_outage(name, answer)
            return
        if self.unexpected_errors.get(name):
            await self._fail_unexpectedly(name, inner, args, answer)
            return
        dice = rng.random() if cluster.faults_on else 1.0
        if dice < scenario.failed_store:
            cluster.fault("store call failed")
            failure = StoreThrottled if rng.random() < 0.3 else StoreUnavailable
            _answer(answer, failure("simulated"))
            return
        dice -= scenario.failed_store
        if dice < scenario.unknown_store and name in _WRITES:
            await self._lose_answer(inner, args, answer)
            return
        dice -= scenario.unknown_store
        if dice < scenario.torn_commit and name == "commit":
            cluster.fault("commit torn between shards")
            _answer(answer, [await self._commit_one(inner, batch) for batch in args[0]])
            return
        dice -= scenario.torn_commit
        if dice < scenario.torn_answer and name in ("load", "purge_reached"):
            cluster.fault(f"{name} failed for some shards")
            results = await self.perform(name, inner, args)
            _answer(answer, [StoreThrottled("simulated") if rng.random() < 0.5 else result for result in results])
            return
        dice -= scenario.torn_answer
        slow = dice < scenario.slow_store
        late = slow and rng.random() < 0.5
        if slow:
            cluster.fault("store answer slow" if late else "store call slow")
        if slow and not late:
            await asyncio.sleep(rng.uniform(0.1, 2.0))
            if self._is_gone:
                return
        try:
            result: Any = await self.perform(name, inner, args)
        except DuetimeError as error:
            result = error
        if late:
            await asyncio.sleep(rng.uniform(0.1, 2.0))  # the answer is out of date by now
        elif rng.random() < 0.5:
            await asyncio.sleep(rng.uniform(0.0002, 0.002))
        _answer(answer, result)

    async def _commit_one(self, inner: Callable[..., Awaitable[Any]], batch: Batch) -> Committed | StoreError:
        """Commit one batch, independently of the other batches of the call."""
        how = self._cluster.rng.choice(("applied", "applied", "refused", "applied, unknown", "lost, unknown"))
        if how == "refused":
            return StoreThrottled("simulated")
        [result] = await self.perform("commit", inner, ([batch],)) if how.startswith("applied") else [None]
        return OutcomeUnknown("simulated") if how.endswith("unknown") else cast("Committed | StoreError", result)

    async def perform(self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...]) -> Any:
        """The call at the database. Mutants replace this method to make it non-atomic."""
        return await inner(*args)

    async def _lose_answer(
        self, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        """The caller gets `OutcomeUnknown` after a time-out; the call is applied before that, after it, or never."""
        cluster, rng = self._cluster, self._cluster.rng
        kind = rng.choice(("never", "before", "after"))
        cluster.fault(f"store answer lost, applied {kind}")
        if kind == "before":
            await _ignore_errors(lambda: inner(*args))
        await asyncio.sleep(rng.uniform(0.05, 1.0))
        _answer(answer, OutcomeUnknown("simulated"))
        if kind == "after":
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            if not self._is_gone:
                await _ignore_errors(lambda: inner(*args))

    @property
    def _is_gone(self) -> bool:
        """An exclusive store is in the process: what it has not applied when the process ends is never applied."""
        return self._cluster.settings.exclusive and not self._cluster.is_running(self._name)

    # Outages, and errors that no adapter should raise.

    def _in_outage(self, name: str) -> bool:
        outage = self.outage
        return (
            outage is not None
            and outage.until > self._cluster.loop.now
            and (not outage.methods or name in outage.methods)
        )

    async def _fail_in_outage(self, name: str, answer: asyncio.Future[Any]) -> None:
        outage = self.outage
        assert outage is not None
        if not outage.hangs:
            _answer(answer, StoreUnavailable("simulated: no connection"))
            return
        limit = self._cluster.rng.uniform(2.0, 8.0)  # the driver's time limit
        await asyncio.sleep(min(limit, outage.until - self._cluster.loop.now))
        # Some calls were never sent: they waited for a connection.
        is_unknown = name in _WRITES and self._cluster.rng.random() < 0.7
        error = OutcomeUnknown if is_unknown else StoreUnavailable
        _answer(answer, error("simulated: no answer in time"))

    async def _fail_unexpectedly(
        self, name: str, inner: Callable[..., Awaitable[Any]], args: tuple[Any, ...], answer: asyncio.Future[Any]
    ) -> None:
        self.unexpected_errors[name] -= 1
        applied = self._cluster.rng.random() < 0.5
        self._cluster.fault(f"unexpected error from {name}")
        if applied:
            await _ignore_errors(lambda: inner(*args))
        _answer(answer, ZeroDivisionError("simulated"))


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


async def _ignore_errors(call: Callable[[], Awaitable[Any]]) -> None:
    with contextlib.suppress(DuetimeError):  # the answer is lost anyway
        await call()


# --- receivers -----------------------------------------------------------------------------------


class SimDeliverer:
    """The deliverer of one instance. The host names the kind of receiver: ok, slow, dead, flapping, busy, again; the
    path of a URL that always fails how it does: hang, 500, 503."""

    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self._cluster = cluster
        self._name = name

    def check(self, url: str, namespace: str) -> None:
        if url == FORBIDDEN_URL:
            raise ValueError("is forbidden")

    def check_headers(self, url: str, headers: Mapping[str, str]) -> None:
        check_http_headers(headers)

    async def close(self) -> None: ...

    def origin(self, url: str) -> str:
        cluster = self._cluster
        if cluster.faults_on and cluster.rng.random() < cluster.scenario.broken_deliveries:
            cluster.fault("origin unknown")
            raise ValueError("simulated")
        return "/".join(url.split("/")[:3])

    async def deliver(self, attempt: Attempt) -> AttemptResult:
        timer, watch = attempt.timer, self._cluster.limit_watch
        call = watch.started(self._name, timer.namespace, timer.flow_key)
        try:
            return await self._deliver(attempt)
        finally:
            if call is not None:
                watch.ended(timer.flow_key, call)

    async def _deliver(self, attempt: Attempt) -> AttemptResult:
        cluster, rng, scenario = self._cluster, self._cluster.rng, self._cluster.scenario
        # Connecting takes a short time, and sometimes much longer. The timer may change in that time.
        slow = cluster.faults_on and rng.random() < scenario.slow_connects
        await asyncio.sleep(rng.uniform(0.0001, 3.0 if slow else 0.003))
        if cluster.faults_on and rng.random() < scenario.broken_deliveries * (10 if slow else 1):
            cluster.fault("delivery failed before it began")
            raise ValueError("simulated")
        if cluster.faults_on and attempt.timer.callback_url == "http://dead" and (dice := rng.random()) < 0.5:
            if dice < 0.15:
                cluster.fault("no connection to a message broker")
                return AttemptResult(Contact.AWAY, error="no connection")
            return AttemptResult(Contact.UNREACHABLE, error="connection refused")
        if cluster.faults_on and rng.random() < scenario.shortages:
            cluster.fault("shortage of sockets")
            return AttemptResult(Contact.SHORTAGE, error="no socket to spare")
        if attempt.begin() is None:
            return AttemptResult(Contact.NOT_SENT)
        kind = attempt.timer.callback_url.split("/")[3:4]
        if kind:
            return await self._answer_badly(kind[0])
        self._check_namespace(attempt)
        begun_at_ms = 0
        if cluster.faults_on and rng.random() < scenario.broken_connections:
            # As in the HTTP client: a kept-alive connection is found broken, and the request is sent on a new one.
            if rng.random() < 0.5:
                self._allow_repetition(attempt, "request received on a connection that then broke")
                cluster.create_task(self._receive(attempt, cluster.now_ms(), None))
            else:
                cluster.fault("request lost on a broken connection")
            begun_at_ms = cluster.now_ms()
            await asyncio.sleep(rng.uniform(0.0001, 1.5))
            if attempt.begin() is None:
                return AttemptResult(Contact.BROKEN, error="connection closed before the answer")
        answer: asyncio.Future[AttemptResult] = asyncio.get_running_loop().create_future()
        cluster.create_task(self._receive(attempt, cluster.now_ms(), answer, begun_at_ms))
        result = await answer
        if cluster.faults_on and rng.random() < scenario.broken_deliveries:
            self._allow_repetition(attempt, "delivery failed after it was answered")
            raise ValueError("simulated")
        return result

    async def _answer_badly(self, kind: str) -> AttemptResult:
        """The URLs of `HostileClient`: they do not recover, and the checker does not watch their timers."""
        if kind == "hang":
            await asyncio.sleep(_HANGS_SECONDS)
            return AttemptResult(Contact.BROKEN, error="no answer in time")
        return AttemptResult(Contact.ANSWERED, int(kind), retry_after_ms=3_600_000 if kind == "503" else None)

    def _check_namespace(self, attempt: Attempt) -> None:
        """Each attempt must be made with settings that the namespace had: its secrets, its retry policy."""
        cluster, namespace = self._cluster, attempt.namespace
        stored = cluster.database.stored_namespaces.get(attempt.timer.namespace, [])
        if namespace not in stored:
            what = f"{self._name} fired with settings of namespace {namespace.name!r} that were never stored"
            cluster.violations.append(Violation("N", name_in_history(attempt.timer.key), what, f"    {namespace}"))

    def _allow_repetition(self, attempt: Attempt, kind: str) -> None:
        """A fault after which this delivery may be repeated, and no other."""
        cluster = self._cluster
        cluster.fault(kind)
        cluster.allow_repetition(Fault(kind, cluster.now_ms(), cluster.now_ms(), self._name, attempt.timer.delivery_id))

    async def _receive(
        self, attempt: Attempt, started_at_ms: int, answer: asyncio.Future[AttemptResult] | None, begun_at_ms: int = 0
    ) -> None:
        """The receiver. Without an `answer` its response is lost."""
        cluster, rng, timer = self._cluster, self._cluster.rng, attempt.timer
        call = Callback(
            timer=name_in_history(timer.key),
            value=value_of(timer.payload),
            attempt=timer.attempts + 1,
            started_at_ms=started_at_ms,
            seen_at_ms=cluster.now_ms(),
            fence=attempt.fence,
            owner=self._name,
            delivery=timer.delivery_id,
            scheduled_ms=timer.scheduled_at_ms,
            begun_at_ms=begun_at_ms,
        )
        number = cluster.record_callback(call)
        result, seconds = self._decide(timer.callback_url, timer.extras.occurrence)
        await asyncio.sleep(seconds)
        if result.status == 200:
            cluster.callbacks[number] = replace(call, accepted_at_ms=cluster.now_ms())
            cluster.record(f"accepted {number}")
            if result.body:
                self._allow_repetition(attempt, "receiver asked for another call")
            if answer is not None and cluster.faults_on and rng.random() < cluster.scenario.lost_callback_answers:
                self._allow_repetition(attempt, "answer of a receiver lost")
                result = AttemptResult(Contact.BROKEN, error="connection reset")
        if answer is not None:
            _answer(answer, result)

    def _decide(self, url: str, occurrence: int) -> tuple[AttemptResult, float]:
        """What the receiver answers, and how long it takes."""
        cluster, rng = self._cluster, self._cluster.rng
        if cluster.faults_on and url == "http://dead":
            return AttemptResult(Contact.BROKEN, error="timeout"), 5.0
        if cluster.faults_on and url == "http://flapping" and rng.random() < 0.5:
            return AttemptResult(Contact.ANSWERED, 500), 0.0
        if cluster.faults_on and url == "http://busy" and rng.random() < 0.4:
            return AttemptResult(Contact.ANSWERED, 503, retry_after_ms=rng.choice((0, 500, 3_000))), 0.0
        seconds = rng.uniform(0.5, 3.0) if url == "http://slow" else rng.uniform(0.0005, 0.01)
        if url == "http://single":
            seconds = rng.uniform(0.05, 0.5)
        body = b""
        if url == "http://again" and occurrence < 2:
            at_ms = cluster.now_ms() + rng.randint(-1_000, 3_000)  # one in the past means as soon as possible
            body = b'{"ok": true, "nextExecuteAt": "%s"}' % format_instant(at_ms).encode()
        return AttemptResult(Contact.ANSWERED, 200, body), seconds
