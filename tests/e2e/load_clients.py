"""Load for tests that break real servers: clients that keep what they were told, and the judgement of it.

Every put carries a value of its own, so that duetime.testing.checker can tell from the receiver's log which
request a callback serves.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
from real_server import until, wall_ms
from scripts.gate.record import FinalFailure

from duetime.domain.instants import format_instant
from duetime.http.client import HttpError
from duetime.testing.checker import Callback, ClientRequest, Fault, Kind, Result, find_violations, repetitions

__all__ = ["Client", "Door", "Load", "Receiver"]


class Door(Protocol):
    """Where requests go: a RealServer, or a Cluster of them."""

    async def call(self, path: str, body: dict[str, Any], timeout_ms: int = 30_000) -> tuple[int, dict[str, Any]]: ...


class Receiver(Protocol):
    """Who is called, and keeps what it saw."""

    url: str
    callbacks: list[Callback]


class Client:
    """Creates, replaces, updates and deletes timers of its own, one request at a time, and keeps the answers.

    `pace_seconds` is the pause between two requests, on average. `leaves_unknown`: a timer about which a request has an
    unknown outcome is left alone from then on. Needed wherever such a request may still be carried out later, by an
    instance that is frozen or cut off: the checker takes requests about one timer to come one after the other.
    """

    pace_seconds = 0.0
    timeout_ms = 30_000
    leaves_unknown = False

    def __init__(self, name: str, server: Door, receiver: Receiver, rng: random.Random) -> None:
        self.name = name
        self.server = server
        self.receiver = receiver
        self.rng = rng
        self.due_in_ms = (-100, 2_500)
        self.number = 0
        self.values = 0
        self.stopping = False
        self.requests: list[ClientRequest] = []
        self.left: set[str] = set()
        self.refusals: list[tuple[str, str]] = []  # answers that were neither yes nor no: what kind, and why

    async def work(self) -> None:
        while not self.stopping:
            await self.one_command()
            if self.pace_seconds:
                await asyncio.sleep(self.rng.uniform(0, 2 * self.pace_seconds))

    async def one_command(self) -> None:
        old = self.number and self.rng.random() < 0.4
        number = self.rng.randint(max(1, self.number - 20), self.number) if old else self._next()
        timer = f"{self.name}-{number}"
        if timer in self.left:
            return
        dice = self.rng.random()
        if old and dice < 0.4:
            await self._delete(timer)
        else:
            await self._put(timer, "timers/update" if old and dice < 0.7 else "timers/create")

    def _next(self) -> int:
        self.number += 1
        return self.number

    async def _put(self, timer: str, path: str) -> None:
        self.values += 1
        value = f"{self.name}v{self.values}"
        asked_at_ms = wall_ms()
        due_ms = asked_at_ms + self.rng.randint(*self.due_in_ms)
        body: dict[str, Any] = {"timerId": timer, "executeAt": format_instant(due_ms), "payload": value}
        if path.endswith("create"):
            body["callbackUrl"] = self.receiver.url
        result = await self._ask(path, body)
        self._keep(ClientRequest(timer, Kind.PUT, asked_at_ms, wall_ms(), result, value, due_ms))

    async def _delete(self, timer: str) -> None:
        asked_at_ms = wall_ms()
        result = await self._ask("timers/delete", {"timerId": timer})
        self._keep(ClientRequest(timer, Kind.DELETE, asked_at_ms, wall_ms(), result))

    def _keep(self, request: ClientRequest) -> None:
        self.requests.append(request)
        if request.result is Result.INFO and self.leaves_unknown:
            self.left.add(request.timer)

    async def _ask(self, path: str, body: dict[str, Any]) -> Result:
        try:
            status, answer = await self.server.call(path, body, self.timeout_ms)
        except HttpError as error:
            self.refusals.append(("broken off" if error.sent else "not reached", error.reason))
            if not error.sent:
                await asyncio.sleep(0.05)  # the server is down
                return Result.FAIL
            return Result.INFO
        if answer.get("verdict") == "alreadyReached" or status in (404, 409):
            return Result.FAIL
        assert status in (200, 429, 503), answer
        if status == 200:
            return Result.OK
        self.refusals.append((answer["code"], answer["detail"]))
        return Result.INFO if answer["code"] == "outcome_unknown" else Result.FAIL


class Load:
    """Several clients at once, and everything they and the receiver have seen."""

    def __init__(self, server: Door, receiver: Receiver, rng: random.Random, clients: int = 8) -> None:
        self.server = server
        self.receiver = receiver
        self.clients = [Client(f"c{n}", server, receiver, random.Random(rng.random())) for n in range(clients)]

    @property
    def requests(self) -> list[ClientRequest]:
        return [request for client in self.clients for request in client.requests]

    @property
    def results(self) -> Counter[Result]:
        return Counter(request.result for request in self.requests)

    @property
    def refusals(self) -> list[tuple[str, str]]:
        """Answers that were neither yes nor no."""
        return [refusal for client in self.clients for refusal in client.refusals]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Load for as long as the block takes; a client that breaks is a failure, too."""
        workers = [asyncio.create_task(client.work()) for client in self.clients]
        try:
            yield
        finally:
            for client in self.clients:
                client.stopping = True
            await asyncio.gather(*workers)

    async def acknowledged(self, more: int, within_seconds: float = 20) -> None:
        """Waits until so many more requests are acknowledged: it works (again)."""
        enough = self.results[Result.OK] + more

        async def is_enough() -> bool:
            return self.results[Result.OK] >= enough

        await until(is_enough, f"{more} more requests are acknowledged", within_seconds)

    async def until_nothing_is_scheduled(self) -> None:
        """Everything left is due within seconds; a bound of a minute is a failure, not a race."""

        async def is_empty() -> bool:
            status, page = await self.server.call("timers/list", {"state": "scheduled", "limit": 1})
            assert status == 200, page
            return not page["timers"] and page["nextCursor"] is None

        await until(is_empty, "nothing is scheduled any more", 60)

    def judge(
        self,
        seed: int,
        faults: Sequence[Fault] | None = None,
        history: Path | None = None,
        *,
        clock_error_ms: int = 0,
    ) -> None:
        """Nothing lost, nothing more than `clock_error_ms` early, nothing after an acknowledged delete or replacement;
        with `faults`, nothing repeated without one. If there is, everything that was seen is written to `history`."""
        callbacks = self.receiver.callbacks
        violations = find_violations(self.requests, callbacks, faults=faults, clock_error_ms=clock_error_ms)
        told = ", ".join(f"{count} {result}" for result, count in sorted(self.results.items()))
        print(f"requests: {told}; {len(callbacks)} callbacks, {len(repetitions(callbacks))} of them repeated", end="; ")
        print("no answer:", dict(Counter(kind for kind, _ in self.refusals)))
        if violations and history is not None:
            seen = {"faults": faults, "requests": self.requests, "callbacks": callbacks}
            history.write_bytes(msgspec.json.encode(seen))
            print(f"history: {history}")
        listed = "\n".join(str(violation) for violation in violations[:5])
        if violations:
            raise FinalFailure(f"seed {seed}: {len(violations)} violations, the first:\n{listed}")
