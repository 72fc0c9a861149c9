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
from duetime.http.server import Request, Response
from duetime.testing.simulation.loop import INSTANCE

if TYPE_CHECKING:
    from duetime.testing.simulation.world import Instance, World

__all__ = ["NEVER", "SimHttp", "SimPeers"]

LOST: Final = "forward lost"
ANSWER_LOST: Final = "answer to a forward lost"
REPEATED: Final = "forward repeated"
NOT_CONNECTED: Final = "connection to a peer refused"
KEPT_BROKEN: Final = "kept connection to a peer broken"
UNREADABLE: Final = "answer of a peer unreadable"
ERROR_500: Final = "HTTP 500 from a peer"
# No faults of the network but of the protocol: a run in which one of these is counted has failed.
REPLAY_ACCEPTED: Final = "a request was accepted twice"
NEW_REFUSED: Final = "a new request was refused as a replay"
NEVER: Final = (REPLAY_ACCEPTED, NEW_REFUSED)

# The second column counts in shares of `Scenario.lost_forwards`, per request.
_FAULTS: Final = (
    (LOST, 1.0),
    (ANSWER_LOST, 1.0),
    (NOT_CONNECTED, 0.3),
    (KEPT_BROKEN, 0.3),
    (UNREADABLE, 0.3),
    (ERROR_500, 0.3),
)

# Who can be reached: by name, everything that was launched in a world. Names are addresses, and never used again.
# Weak both ways: an instance refers to its world, which is gone with its run.
_NETWORKS: Final[WeakKeyDictionary[World, WeakValueDictionary[str, SimPeers]]] = WeakKeyDictionary()


class SimPeers(PeerClient):
    """One instance's connection to the others, both ways."""

    def __init__(self, world: World, instance: Instance) -> None:
        self.http = SimHttp(world)
        super().__init__(lambda: instance.service.as_peer().instance_id, self.http)
        self._instance = instance
        self._api: Api | None = None
        _NETWORKS.setdefault(world, WeakValueDictionary())[instance.name] = self

    def receive(self, data: bytes) -> asyncio.Task[Response]:
        """A request has arrived: handle it as part of this instance."""
        instance = self._instance
        if self._api is None:
            self._api = Api(instance.service, instance.world.config, instance.engine.telemetry)
            # Slow commits are common here, and most requests would ask about the same orders again and again.
            self._api._peers.answer_within_s = 0.1
        return instance.inside(self._api.handle(_parsed(data)))


class _Trip:
    """What the network will do to one request. Drawn when it starts: what happens on the way does not change it."""

    __slots__ = ("accepted", "back_s", "broken_after_s", "fault", "handled", "refused", "repeated_after_s", "there_s")

    def __init__(self, world: World) -> None:
        rng, scenario = world.rng, world.scenario
        self.there_s = rng.uniform(0.0001, 0.0015)
        self.back_s = rng.uniform(0.0001, 0.0015)
        # Of the request and its copies: being handled, accepted, refused as replays.
        self.handled = self.accepted = self.refused = 0
        self.fault: str | None = None
        self.repeated_after_s: float | None = None
        # The sender learns that its connection is broken, or not before its own deadline.
        self.broken_after_s: float | None = None
        if not world.stormy:
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
    """Sends as HttpClient does, a kept connection that turns out to be broken included."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: set[str] = set()  # where a connection is open
        self._outside: Context = copy_context()
        self._outside.run(INSTANCE.set, "")

    async def close(self) -> None: ...

    async def send(self, target: Target, begin: Callable[[], bytes | None], *, timeout_ms: int) -> Answer | None:
        loop, name, trip = self._world.loop, target.host, _Trip(self._world)
        answer: asyncio.Future[Answer] = loop.create_future()
        deadline = loop.call_later(timeout_ms / 1_000, _fail, answer, f"no answer within {timeout_ms} ms")
        kept = name in self._kept
        try:
            if not kept:
                await self._connect(name, trip)
            data = begin()
            if kept and data is not None and (trip.fault == KEPT_BROKEN or not self._is_up(name)):
                await self._find_broken(name, data, trip)
                data = begin()
            if data is None:
                return None
            self._leave(name, data, trip, answer)
            received = await answer
        except HttpError:
            self._kept.discard(name)
            raise
        finally:
            deadline.cancel()
        self._kept.add(name)
        return received

    def _is_up(self, name: str) -> bool:
        return name in _NETWORKS[self._world] and name not in self._world.loop.dead

    async def _connect(self, name: str, trip: _Trip) -> None:
        await asyncio.sleep(trip.there_s)
        if trip.fault == NOT_CONNECTED:
            self._world.fault(NOT_CONNECTED)
        if trip.fault == NOT_CONNECTED or not self._is_up(name):
            raise HttpError(f"connection refused by {name}", sent=False)

    async def _find_broken(self, name: str, data: bytes, trip: _Trip) -> None:
        """No answer on a kept connection: the request has arrived or not, and a new connection is made or not."""
        self._world.fault(KEPT_BROKEN)
        self._kept.discard(name)
        if trip.broken_after_s is not None and self._is_up(name):
            self._later(trip.there_s, partial(self._arrive, name, data, trip, self._world.loop.create_future()))
        await asyncio.sleep(trip.there_s + trip.back_s)
        if not self._is_up(name):
            raise HttpError(f"connection refused by {name}", sent=True)

    # --- on the wire: goes on, whatever becomes of the instance that sent it ----------------------

    def _later(self, seconds: float, act: Callable[[], object]) -> None:
        self._world.loop.call_later(seconds, act, context=self._outside)

    def _leave(self, name: str, data: bytes, trip: _Trip, answer: asyncio.Future[Answer]) -> None:
        if trip.fault in (LOST, ANSWER_LOST, UNREADABLE, ERROR_500):
            self._world.fault(trip.fault)
        if trip.fault == LOST:
            self._break(trip, answer)
        else:
            self._later(trip.there_s, partial(self._arrive, name, data, trip, answer))

    def _arrive(self, name: str, data: bytes, trip: _Trip, answer: asyncio.Future[Answer]) -> None:
        world = self._world
        if not self._is_up(name):
            self._break(trip, answer)
            return
        self._receive(name, data, trip).add_done_callback(partial(self._answered, trip, answer), context=self._outside)
        if trip.repeated_after_s is not None:
            world.fault(REPEATED)
            self._later(trip.repeated_after_s, partial(self._replay, name, data, trip))

    def _answered(self, trip: _Trip, answer: asyncio.Future[Answer], handled: asyncio.Task[Response]) -> None:
        if handled.cancelled():  # the play is over
            return
        self._judge(trip, handled)
        response = handled.result()
        received = Answer(response.status, _raw_headers(response), response.body)
        if trip.fault == ANSWER_LOST:
            self._break(trip, answer)
            return
        if trip.fault == UNREADABLE:
            received = Answer(200, {}, received.body[: len(received.body) // 2] + b"\xc1")
        elif trip.fault == ERROR_500:
            received = Answer(500, {}, b"Internal Server Error")
        self._later(trip.back_s, partial(_succeed, answer, received))

    def _break(self, trip: _Trip, answer: asyncio.Future[Answer]) -> None:
        if trip.broken_after_s is not None:
            self._later(trip.broken_after_s, partial(_fail, answer, "connection closed before the answer"))

    def _replay(self, name: str, data: bytes, trip: _Trip) -> None:
        """Somebody on the network sends the same bytes once more."""
        if self._is_up(name):
            self._receive(name, data, trip).add_done_callback(partial(self._judge, trip), context=self._outside)

    def _receive(self, name: str, data: bytes, trip: _Trip) -> asyncio.Task[Response]:
        trip.handled += 1
        return _NETWORKS[self._world][name].receive(data)

    def _judge(self, trip: _Trip, handled: asyncio.Task[Response]) -> None:
        """Of a request and its copies one is accepted, whichever came first, or all are refused for another reason."""
        if handled.cancelled():
            return
        status = handled.result().status
        trip.handled -= 1
        trip.accepted += status == 200
        trip.refused += status == Conflict.status
        if trip.accepted > 1:
            self._world.fault(REPLAY_ACCEPTED)
        if trip.refused and not trip.accepted and not trip.handled:
            self._world.fault(NEW_REFUSED)


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
