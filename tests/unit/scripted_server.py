"""A server that answers what a test told it to answer, and records what it was asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

HOOK = "http://127.0.0.1:9000/hook"


NEW_YEAR = datetime(2027, 1, 1, 9, tzinfo=UTC)


def timer_json(timer_id: str = "a", **fields: Any) -> dict[str, Any]:
    at = "2027-01-01T09:00:00.000Z"
    return {
        "namespace": "default",
        "timerId": timer_id,
        "state": "scheduled",
        "executeAt": at,
        "scheduledAt": at,
        "createdAt": at,
        "attempts": 0,
        "callbackUrl": HOOK,
        **fields,
    }


def created(timer_id: str = "a", **fields: Any) -> dict[str, Any]:
    return {"timer": timer_json(timer_id, **fields), "replaced": False}


def problem(status: int, code: str, **more: Any) -> dict[str, Any]:
    return {"type": f"urn:{code}", "title": code, "status": status, "detail": f"{code}!", "code": code, **more}


class Answer(msgspec.Struct):
    """One scripted answer of the server: a response, or closing the connection."""

    body: Any = None
    status: int = 200
    headers: str = ""
    lost: bool = False


LOST = Answer(lost=True)


Rule = Callable[[str, Any], Answer]


class Peer:
    """A server in its own thread, so that sync and async clients can call it."""

    def __init__(self) -> None:
        self.script: list[Answer] = []
        self.rule: Rule = lambda path, body: Answer(problem(500, "unscripted"), 500)
        self.requests: list[tuple[str, Any]] = []
        self.heads: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._listening.wait()

    @property
    def paths(self) -> list[str]:
        return [path.removeprefix("/api/v1/") for path, _ in self.requests]

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._stopped = asyncio.Event()
        connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._connection(reader, writer))
            connections[task] = writer
            task.add_done_callback(connections.pop)

        server = await asyncio.start_server(accept, "127.0.0.1", 0, limit=2**26)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._listening.set()
        await self._stopped.wait()
        server.close()
        # A task that is cancelled before its first step never gets to its `finally`: the writers are closed here.
        for writer in connections.values():
            writer.close()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
                body = await reader.readexactly(length)
                path = head.split(" ")[1]
                value = msgspec.json.decode(body) if body else None
                self.heads.append(head)
                self.requests.append((path, value))
                answer = self.script.pop(0) if self.script else self.rule(path, value)
                if answer.lost:
                    return
                data = msgspec.json.encode(answer.body)
                writer.write(
                    f"HTTP/1.1 {answer.status} X\r\n{answer.headers}content-length: {len(data)}\r\n\r\n".encode()
                )
                writer.write(data)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


def batch_rule(path: str, body: Any) -> Answer:
    if path.endswith("createMany"):
        return Answer({"results": [created(item["timerId"]) for item in body["timers"]]})
    return Answer({"results": [{"verdict": "cancelled"} for _ in body["timers"]]})
