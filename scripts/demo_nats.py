"""`make demo-nats`: Duetime with NATS in both directions, in about ten seconds.

Starts a temporary NATS server and `duetime serve` on a temporary SQLite file. A publisher sends commands, a subscriber
receives the events; both use nothing but the driver of NATS. Then everything is stopped and deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import nats
from nats.aio.msg import Msg
from nats.js.client import JetStreamContext

from duetime.client import AsyncClient, NotFound

from .servers import CannotInstall, free_port, running

__all__ = ["main"]

_TENANT = "demo"
_START_SECONDS = 20.0
_DEMO_SECONDS = 20.0


class _Demo:
    def __init__(self, js: JetStreamContext) -> None:
        self.js = js
        self.received: list[str] = []
        self._started = time.monotonic()
        self._due: dict[str, datetime] = {}
        self.has_all = asyncio.Event()

    def say(self, what: str, message: str, timer: str, how: str) -> None:
        print(f"  {time.monotonic() - self._started:5.2f} s  {what:<10} {message:<15} {timer:<9} {how}", flush=True)

    # --- the publisher ----------------------------------------------------------------------------

    async def schedule(self, timer: str, seconds: float, how: str) -> None:
        self._due[timer] = datetime.now(UTC) + timedelta(seconds=seconds)
        await self._publish("ScheduleTimer", timer, {"dueAt": self._due[timer].isoformat(timespec="milliseconds")})
        self.say("published", "ScheduleTimer", timer, how)

    async def cancel(self, timer: str) -> None:
        await self._publish("CancelTimer", timer, {})
        self.say("published", "CancelTimer", timer, "")

    async def _publish(self, kind: str, timer: str, payload: dict[str, str]) -> None:
        command = {
            "id": str(uuid.uuid4()),
            "type": kind,
            "tenantId": _TENANT,
            "timestampMs": time.time_ns() // 1_000_000,
            "payload": {"tenantId": _TENANT, "serviceCallId": timer, **payload},
        }
        # JetStream has stored it when this returns; a repeat with the same message id is dropped.
        body, headers = json.dumps(command).encode(), {"Nats-Msg-Id": str(command["id"])}
        await self.js.publish(f"timers.commands.{_TENANT}", body, headers=headers)

    # --- the subscriber ---------------------------------------------------------------------------

    async def subscribe(self) -> None:
        await self.js.subscribe(f"timers.events.{_TENANT}", durable="subscriber", cb=self._receive, manual_ack=True)

    async def _receive(self, message: Msg) -> None:
        event = json.loads(message.data)
        timer = event["payload"]["serviceCallId"]
        self.received.append(timer)
        due = self._due.get(timer)
        late = "" if due is None else f"{(datetime.now(UTC) - due).total_seconds() * 1_000:.1f} ms after its time"
        data = event["payload"].get("data")
        self.say("received", event["type"], timer, late if data is None else f"with its payload: {json.dumps(data)}")
        await message.ack()
        if {"tea", "invoice", "parcel"} <= set(self.received):
            self.has_all.set()


async def _run(nats_url: str, duetime_url: str) -> bool:
    client = await nats.connect(nats_url)
    try:
        demo = _Demo(client.jetstream())
        await demo.subscribe()
        async with AsyncClient(duetime_url) as duetime:
            await demo.schedule("tea", 1, "due in 1 s")
            await demo.schedule("invoice", 3_600, "due in 1 h")
            await demo.schedule("alarm", 3, "due in 3 s")
            await demo.schedule("invoice", 2, "due in 2 s: replaces the timer")
            await demo.cancel("alarm")
            await _is_there(duetime, "tea")
            target = f"nats:timers.events.{_TENANT}"
            await duetime.create("parcel", delay="3s", callback_url=target, payload={"parcel": 9}, namespace=_TENANT)
            demo.say("created", "over HTTP", "parcel", f"due in 3 s, for {target}")
            await demo.has_all.wait()
            await demo.schedule("tea", 0, "again: it is over, so the command is ignored")
            await _all_are_carried_out(demo.js)
            alarm = await duetime.get("alarm", namespace=_TENANT)
            demo.say("is", alarm.state, "alarm", "its time has passed, and no event came")
        return alarm.state == "cancelled" and demo.received == ["tea", "invoice", "parcel"]
    finally:
        await client.close()


async def _is_there(duetime: AsyncClient, timer: str) -> None:
    """The first command has been carried out, so the namespace of the tenant exists."""
    while True:
        with contextlib.suppress(NotFound):
            await duetime.get(timer, namespace=_TENANT)
            return
        await asyncio.sleep(0.02)


async def _all_are_carried_out(js: JetStreamContext) -> None:
    """Duetime's consumer has acknowledged every command."""
    while True:
        consumer = await js.consumer_info("TIMER_COMMANDS", "duetime")
        if not consumer.num_pending and not consumer.num_ack_pending:
            return
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def _serving(folder: Path, nats_url: str) -> Iterator[str]:
    """A `duetime serve` with the address of NATS as its only setting for NATS. Yields its URL."""
    listen = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "duetime", "serve", "--listen", listen, "--store", f"sqlite:///{folder}/demo.db"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")}
    settings = {"DUETIME_NATS_URL": nats_url, "DUETIME_LOG_LEVEL": "warning"}
    with subprocess.Popen(command, env=environment | settings) as server:  # noqa: S603
        try:
            _wait_until_ready(server, f"http://{listen}")
            yield f"http://{listen}"
        finally:
            server.send_signal(signal.SIGTERM)


def _wait_until_ready(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/readyz", timeout=1):  # noqa: S310
                return
        except (urllib.error.URLError, OSError):
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("duetime serve did not start") from None
        time.sleep(0.05)


def main() -> int:
    try:
        with running("nats") as server, tempfile.TemporaryDirectory(prefix="duetime-demo-") as folder:
            with _serving(Path(folder), server.url()) as url:
                print("\n  Duetime with NATS: commands in, events out\n")
                print(f"  NATS      {server.url()}, a temporary server with JetStream")
                print(f"  Duetime   {url}, on a temporary SQLite file\n", flush=True)
                succeeded = asyncio.run(asyncio.wait_for(_run(server.url(), url), _DEMO_SECONDS))
            if not succeeded:
                print("\n  Not all timers did what they should.")
            print("\n  Both servers are stopped, and their data are deleted. More: docs/howto/nats.md\n")
            return 0 if succeeded else 1
    except CannotInstall as error:
        print(f"NATS cannot be installed: {error}", file=sys.stderr)
        return 1
    except TimeoutError:
        print("\n  Not all timers did what they should in time.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
