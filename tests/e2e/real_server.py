"""A real `duetime serve` in a process of its own, and a real receiver, for end-to-end tests."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from scripts.gate.record import server_log

from duetime.domain.instants import parse_instant
from duetime.http.client import Answer, HttpClient, HttpError
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer, serve_http
from duetime.testing.checker import Callback

_given: set[int] = set()


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection sits on it; by chance, so that two runs of the tests
    rarely meet; never the same one twice."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _given:
            _given.add(port)
            return port


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def clean_environment() -> dict[str, str]:
    """This process's environment without settings of Duetime."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")}


def serve_in_vain(*arguments: str, **settings: str) -> tuple[int, str]:
    """A `duetime serve` that must refuse to start: its exit code, and what it said."""
    ended = subprocess.run(
        [sys.executable, "-m", "duetime", "serve", *arguments],
        env=clean_environment() | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=30,
        check=False,
    )
    return ended.returncode, ended.stdout.decode()


async def until(condition: Callable[[], Awaitable[bool]], what: str, within_seconds: float = 20) -> None:
    """Looks again and again; what is not so within the bound is a failure, not a race."""
    deadline = time.monotonic() + within_seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not within {within_seconds} s: {what}"
        await asyncio.sleep(0.01)


class RealServer:
    """`duetime serve` on a SQLite file, or on another store. May be killed and started again, on the same port."""

    def __init__(
        self,
        folder: Path,
        *,
        arguments: tuple[str, ...] = (),
        token: str | None = None,
        program: tuple[str, ...] = ("-m", "duetime", "serve"),
        file: Path | None = None,
        store_url: str | None = None,
        **settings: str,
    ):
        self.folder = folder
        self.file = file or folder / "timers.db"
        self.store_url = store_url or f"sqlite:///{self.file}"
        self.program = program
        self.arguments = arguments
        self.token = token
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self.settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.http = HttpClient(body_bytes_max=16 * 1024 * 1024)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> None:
        """Begin to start, without waiting for what comes of it."""
        settings = {
            "DUETIME_SERVER_LISTEN": f"127.0.0.1:{self.port}",
            "DUETIME_STORE_URL": self.store_url,
            **self.settings,
        }
        command = [sys.executable, *self.program, *self.arguments]
        server_log(self.log)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(command, env=clean_environment() | settings, stdout=log, stderr=log)

    async def start(self) -> None:
        self.launch()
        await self.ready()

    async def ready(self, within_seconds: float = 30) -> None:
        """Waits until it says that it is ready (again)."""
        deadline = time.monotonic() + within_seconds
        while await self.not_ready() is not None:
            if not self.is_running or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready:\n{self.log.read_text()[-2_000:]}")
            await asyncio.sleep(0.02)

    async def not_ready(self) -> str | None:
        """Why it is not ready; None: it is."""
        try:
            answer = await self.http.request("GET", f"{self.url}/readyz", timeout_ms=1_000)
        except HttpError as error:
            return str(error)
        return None if answer.status == 200 else answer.body.decode()

    async def metric(self, name: str) -> float:
        """The value of one line of /metrics, named with its labels."""
        text = (await self.read("/metrics")).body.decode()
        return next((float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(name + " ")), 0.0)

    async def call(self, path: str, body: dict[str, Any], timeout_ms: int = 30_000) -> tuple[int, dict[str, Any]]:
        answer = await self.post(path, json.dumps(body).encode(), timeout_ms=timeout_ms)
        return answer.status, json.loads(answer.body)

    async def post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None, timeout_ms: int = 30_000
    ) -> Answer:
        sent = {"content-type": "application/json"} | ({} if headers is None else headers)
        if self.token is not None:
            sent.setdefault("authorization", f"Bearer {self.token}")
        return await self.http.request("POST", f"{self.url}/api/v1/{path}", sent, body, timeout_ms=timeout_ms)

    async def read(self, path: str) -> Answer:
        """GET."""
        headers = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        return await self.http.request("GET", self.url + path, headers, timeout_ms=10_000)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def wait(self) -> int:
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait, 60)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait()

    async def stop(self) -> int:
        """SIGTERM, and the exit code."""
        self.signal(signal.SIGTERM)
        return await self.wait()

    async def close(self) -> None:
        await self.http.close()
        if self._process is not None and self._process.poll() is None:
            await self.kill()


class RealReceiver:
    """Keeps every callback as evidence, and answers it: with the next of `answers`, else with 200 and ok.

    While `may_answer` is cleared, it holds its answers back: the callbacks are in flight.
    """

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.bodies: list[dict[str, Any]] = []
        self.requests: list[Request] = []
        self.answers: deque[Response] = deque()
        self.arrived = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._server: HttpServer | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await serve_http(
            self._receive, "127.0.0.1", port, body_bytes_max=1 << 20, connections_max=1_000, idle_timeout_ms=60_000
        )
        self.url = f"http://127.0.0.1:{self._server.port}/hook"

    async def _receive(self, request: Request) -> Response:
        seen_at_ms = wall_ms()
        body = json.loads(request.body)
        self.requests.append(request)
        self.bodies.append(body)
        self.callbacks.append(
            Callback(
                timer=body["timerId"],
                value=str(body["payload"]),
                attempt=body["attempt"],
                started_at_ms=parse_instant(body["firedAt"]),
                seen_at_ms=seen_at_ms,
                fence=request.header(b"duetime-fence") or "",
            )
        )
        answer = self.answers.popleft() if self.answers else Response(200, body=b'{"ok": true}')
        self.arrived.set()
        await self.may_answer.wait()
        return answer

    async def received(self, count: int, within_seconds: float = 20) -> None:
        """Waits until there were so many callbacks."""
        async with asyncio.timeout(within_seconds):
            while len(self.bodies) < count:
                self.arrived.clear()
                await self.arrived.wait()

    async def close(self) -> None:
        self.may_answer.set()
        if self._server is not None:
            await self._server.close()
