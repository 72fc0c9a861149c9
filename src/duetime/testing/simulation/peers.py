"""Requests between the instances of the simulated cluster: the real protocol over a network with faults.

Each instance has a real `PeerClient` (batching, numbering, signatures) and answers with the real `Api` (checks,
refusals, replies). Only the sockets between them are simulated: `SimHttp` stands for the HTTP client of the sender and
for the HTTP server of the receiver. A request carries real bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary, WeakValueDictionary

from duetime.api.dispatch import Api
from duetime.cluster.peer_client import PeerClient
from duetime.errors import Conflict
from duetime.http.client import Answer, HttpError, Target
from duetime.http.messages import Request, Response
from duetime.testing.simulation.loop import INSTANCE

if TYPE_CHECKING:
    from duetime.testing.simulation.cluster import Instance, SimulatedCluster

__all__ = ["PROTOCOL_ERRORS", "SimHttp", "SimPeers"]

LOST: Final = "forward lost"
ANSWER_LOST: Final = "answer to a forward lost"
REPEATED: Final = "forward repeated"
NOT_CONNECTED: Final = "connection to a peer refused"
CUT_OFF: Final = "request to or from an instance that is cut off from the others"
KEPT_BROKEN: Final = "kept connection to a peer broken"
UNREADABLE: Final = "answer of a peer unreadable"
ERROR_500: Final = "HTTP 500 from a peer"
# These are not faults of the network but errors of the protocol: a run in which one of them is counted has failed.
REPLAY_ACCEPTED: Final = "a request was accepted twice"
NEW_REFUSED: Final = "a new request was refused as a replay"
PROTOCOL_ERRORS: Final = (REPLAY_ACCEPTED, NEW_REFUSED)

# The second column is a factor of `Scenario.lost_forwards`, per request.
_FAULTS: Final = (
    (LOST, 1.0),
    (ANSWER_LOST, 1.0),
    (NOT_CONNECTED, 0.3),
    (KEPT_BROKEN, 0.3),
    (UNREADABLE, 0.3),
    (ERROR_500, 0.3),
)

# All instances that were launched in a cluster, by name. Names are addresses, and are never used again.
# Weak references both ways: an instance refers to its cluster, which is freed after its run.
_NETWORKS: Final[WeakKeyDictionary[SimulatedCluster, WeakValueDictionary[str, SimPeers]]] = WeakKeyDictionary()


class SimPeers(PeerClient):
    """The connection of one instance to the others, in both directions."""

    def __init__(self, cluster: SimulatedCluster, instance: Instance) -> None:
        self.http = SimHttp(cluster)
        super().__init__(lambda: instance.service.as_peer().instance_id, self.http)
        self._instance = instance
        self._api: Api | None = None
        _NETWORKS.setdefault(cluster, WeakValueDictionary())[instance.name] = self

    def receive(self, data: bytes) -> asyncio.Task[Response]:
        """A request has arrived: handle it as part of this instance."""
        instance = self._instance
        if self._api is None:
            self._api = Api(instance.service, instance.cluster.config, instance.engine.telemetry)
            # Slow commits are common here, and most requests would ask about the same commands again and again.
            self._api._peers.answer_within_s = 0.1
        return instance.create_task(self._api.handle(_parsed(data)))


class _RequestPlan:
    """What the network will do to one request. Chosen when the request starts, and not changed later."""

    __slots__ = ("accepted", "back_s", "broken_after_s", "fault", "handled", "refused", "repeated_after_s", "there_s")

    def __init__(self, cluster: SimulatedCluster) -> None:
        rng, scenario = cluster.rng, cluster.scenario
        self.there_s = rng.uniform(0.0001, 0.0015)
        self.back_s = rng.uniform(0.0001, 0.0015)
        # Of the request and its copies: being handled, accepted, refused as replays.
        self.handled = self.accepted = self.refused = 0
        self.fault: str | None = None
        self.repeated_after_s: float | None = None
        # When the sender learns that its connection is broken. None: only at its own deadline.
        self.broken_after_s: float | None = None
        if not cluster.faults_on:
            return
        if rng.random() < 0.75:
            self.broken_after_s = rng.uniform(0.0, 0.5)
        if rng.random() < scenario.repeated_forwards:
            self.repeated_after_s = rng.choice((0.0, rng.uniform(0.0, 6.0)))
        dice = rng.random()
        for kind, shares in _FAULTS:
            dice -= shares * scenario.lost_forwards
            if dice < 0:
                self.fault = kind
                break


class SimHttp:
    """Sends as HttpClient does, including the retry when a kept connection is found to be broken."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._kept: set[str] = set()  # where a connection is open
        self._outside: Context = copy_context()
        self._outside.run(INSTANCE.set, "")

    async def close(self) -> None: ...

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
        loop, name, plan = self._cluster.loop, target.host, _RequestPlan(self._cluster)
        answer: asyncio.Future[Answer] = loop.create_future()
        deadline = loop.call_later(timeout_ms / 1_000, _fail, answer, f"no answer within {timeout_ms} ms")
        kept = name in self._kept
        try:
            if self._cluster.cut_off & {name, INSTANCE.get()}:
                await self._meet_cut(timeout_ms)
            if not kept:
                await self._connect(name, plan)
            data = begin()
            if kept and data is not None and (plan.fault == KEPT_BROKEN or not self._is_up(name)):
                await self._meet_broken_connection(name, data, plan)
                data = begin()
            if data is None:
                return None
            self._send_bytes(name, data, plan, answer)
            received = await answer
        except HttpError:
            self._kept.discard(name)
            raise
        finally:
            deadline.cancel()
        self._kept.add(name)
        return received

    def _is_up(self, name: str) -> bool:
        return name in _NETWORKS[self._cluster] and name not in self._cluster.loop.killed

    async def _meet_cut(self, timeout_ms: int) -> None:
        self._cluster.fault(CUT_OFF)
        if self._cluster.rng.random() < 0.5:
            await asyncio.sleep(timeout_ms / 1_000)
        raise HttpError("no connection", sent=False)

    async def _connect(self, name: str, plan: _RequestPlan) -> None:
        await asyncio.sleep(plan.there_s)
        if plan.fault == NOT_CONNECTED:
            self._cluster.fault(NOT_CONNECTED)
        if plan.fault == NOT_CONNECTED or not self._is_up(name):
            raise HttpError(f"connection refused by {name}", sent=False)

    async def _meet_broken_connection(self, name: str, data: bytes, plan: _RequestPlan) -> None:
        """No answer on a kept connection. The request may have arrived, and a new connection may fail."""
        self._cluster.fault(KEPT_BROKEN)
        self._kept.discard(name)
        if plan.broken_after_s is not None and self._is_up(name):
            self._later(plan.there_s, partial(self._arrive, name, data, plan, self._cluster.loop.create_future()))
        await asyncio.sleep(plan.there_s + plan.back_s)
        if not self._is_up(name):
            raise HttpError(f"connection refused by {name}", sent=True)

    # --- on the wire: continues even if the instance that sent it crashes -------------------------

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        self._cluster.loop.call_later(seconds, action, context=self._outside)

    def _send_bytes(self, name: str, data: bytes, plan: _RequestPlan, answer: asyncio.Future[Answer]) -> None:
        if plan.fault in (LOST, ANSWER_LOST, UNREADABLE, ERROR_500):
            self._cluster.fault(plan.fault)
        if plan.fault == LOST:
            self._break(plan, answer)
        else:
            self._later(plan.there_s, partial(self._arrive, name, data, plan, answer))

    def _arrive(self, name: str, data: bytes, plan: _RequestPlan, answer: asyncio.Future[Answer]) -> None:
        cluster = self._cluster
        if not self._is_up(name):
            self._break(plan, answer)
            return
        self._receive(name, data, plan).add_done_callback(partial(self._answered, plan, answer), context=self._outside)
        if plan.repeated_after_s is not None:
            cluster.fault(REPEATED)
            self._later(plan.repeated_after_s, partial(self._replay, name, data, plan))

    def _answered(self, plan: _RequestPlan, answer: asyncio.Future[Answer], handled: asyncio.Task[Response]) -> None:
        if handled.cancelled():  # the run has ended
            return
        self._count_answer(plan, handled)
        response = handled.result()
        received = Answer(response.status, _raw_headers(response), response.body)
        if plan.fault == ANSWER_LOST:
            self._break(plan, answer)
            return
        if plan.fault == UNREADABLE:
            received = Answer(200, {}, received.body[: len(received.body) // 2] + b"\xc1")
        elif plan.fault == ERROR_500:
            received = Answer(500, {}, b"Internal Server Error")
        self._later(plan.back_s, partial(_succeed, answer, received))

    def _break(self, plan: _RequestPlan, answer: asyncio.Future[Answer]) -> None:
        if plan.broken_after_s is not None:
            self._later(plan.broken_after_s, partial(_fail, answer, "connection closed before the answer"))

    def _replay(self, name: str, data: bytes, plan: _RequestPlan) -> None:
        """The network sends the same bytes once more."""
        if self._is_up(name):
            self._receive(name, data, plan).add_done_callback(partial(self._count_answer, plan), context=self._outside)

    def _receive(self, name: str, data: bytes, plan: _RequestPlan) -> asyncio.Task[Response]:
        plan.handled += 1
        return _NETWORKS[self._cluster][name].receive(data)

    def _count_answer(self, plan: _RequestPlan, handled: asyncio.Task[Response]) -> None:
        """Of a request and its copies, the first to arrive is accepted, or all are refused for another reason."""
        if handled.cancelled():
            return
        status = handled.result().status
        plan.handled -= 1
        plan.accepted += status == 200
        plan.refused += status == Conflict.status
        if plan.accepted > 1:
            self._cluster.fault(REPLAY_ACCEPTED)
        if plan.refused and not plan.accepted and not plan.handled:
            self._cluster.fault(NEW_REFUSED)


def _succeed(answer: asyncio.Future[Answer], received: Answer) -> None:
    if not answer.done():
        answer.set_result(received)


def _fail(answer: asyncio.Future[Answer], reason: str) -> None:
    if not answer.done():
        answer.set_exception(HttpError(reason, sent=True))


def _parsed(data: bytes) -> Request:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    method, path, _ = first.decode("latin-1").split(" ")
    headers = dict(line.split(b": ", 1) for line in lines)
    return Request(method, path, headers=headers, body=body)


def _raw_headers(response: Response) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in response.headers}
