"""A real `duetime serve` in a process of its own, and a real receiver, for end-to-end tests."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from duetime.http_client import HttpClient, HttpError
from duetime.http_server import HttpServer, Request, Response, serve_http
from duetime.testing.checker import Callback
from duetime.timetext import parse_instant


def free_port() -> int:
    """Below the ephemeral range, so that no outgoing connection sits on it."""
    for port in range(20_000 + os.getpid() % 5_000, 32_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class RealServer:
    """`duetime serve` on a SQLite file. May be killed and started again, on the same file and port."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / "server.log"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self.http = HttpClient(body_bytes_max=16 * 1024 * 1024)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        settings = {
            "DUETIME_SERVER_LISTEN": f"127.0.0.1:{self.port}",
            "DUETIME_STORE_URL": f"sqlite:///{self.folder}/timers.db",
            **self._settings,
        }
        environment = {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "duetime", "serve"], env=environment | settings, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(HttpError):
                if (await self.http.request("GET", f"{self.url}/readyz", timeout_ms=1_000)).status == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-2_000:]}")
            await asyncio.sleep(0.02)

    async def call(self, path: str, body: dict[str, Any], timeout_ms: int = 30_000) -> tuple[int, dict[str, Any]]:
        answer = await self.http.request(
            "POST",
            f"{self.url}/api/v1/{path}",
            {"content-type": "application/json"},
            json.dumps(body).encode(),
            timeout_ms=timeout_ms,
        )
        return answer.status, json.loads(answer.body)

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
    """Answers every callback with 200 and keeps it as evidence."""

    def __init__(self) -> None:
        self.callbacks: list[Callback] = []
        self.bodies: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()
        self._server: HttpServer | None = None

    async def start(self) -> None:
        self._server = await serve_http(
            self._receive, "127.0.0.1", 0, body_bytes_max=1 << 20, connections_max=1_000, idle_timeout_ms=60_000
        )
        self.url = f"http://127.0.0.1:{self._server.port}/hook"

    async def _receive(self, request: Request) -> Response:
        seen_at_ms = wall_ms()
        body = json.loads(request.body)
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
        self.arrived.set()
        return Response(200, body=b'{"ok": true}')

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
