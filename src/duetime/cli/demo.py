"""demo: a server on a temporary store and a receiver of its own; three timers, each step as it happens."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import shutil
import signal
import socket
import sys
import tempfile
from argparse import Namespace as Arguments
from pathlib import Path
from urllib.parse import quote

from duetime import __version__
from duetime.cli.listen import Heard, heard, receive_on
from duetime.cli.screen import json_line, lateness, painted, shortened
from duetime.client import AsyncClient, DuetimeError, RetryPolicy, ok
from duetime.config import Config, load_config
from duetime.http.server import HttpServer, Request, Response
from duetime.signing import new_secret

__all__ = ["demo"]

PORT = 8463
SHOW_TIMEOUT_S = 15.0
QUICK_RETRY = RetryPolicy(max_retries=5, initial_interval="600ms", backoff_multiplier=1.0, max_interval="600ms")


async def demo(arguments: Arguments) -> int:
    _cancel_on_signals()  # before the folder is made: a signal would otherwise end the process and leave it
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-demo-", ignore_cleanup_errors=True) as folder:
            return await _serve(Path(folder), arguments)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
            print("\n  Stopped; the temporary store is gone.", flush=True)
        return 0


def _cancel_on_signals() -> None:
    """SIGTERM and SIGHUP end the demonstration as Ctrl-C does. Only the first one has an effect."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP, so that it goes on
            with contextlib.suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())


async def _serve(folder: Path, arguments: Arguments) -> int:
    from duetime.app import App

    app = App(_config(folder, arguments.port))
    await app.start()
    try:
        stage = Stage()
        receiver = await receive_on("127.0.0.1", 0, stage.handle)
        try:
            host, port = app.address[0], app.address[1]
            return await _perform(stage, f"http://{host}:{port}", receiver, ends=arguments.exit)
        finally:
            await receiver.close()
    finally:
        await app.stop()


async def _perform(stage: Stage, url: str, receiver: HttpServer, *, ends: bool) -> int:
    hook = f"http://127.0.0.1:{receiver.port}/"
    print(f"\n  {painted(f'Duetime {__version__}', 'bold')}: a server, a receiver, and three timers\n")
    print(f"  server    {url}, on a temporary SQLite file")
    print(f"  receiver  {hook}\n")
    async with AsyncClient(url) as client:
        await client.namespaces.update("default", signing_secrets=[stage.secret])
        went_well = await _show(stage, client, hook)
    print()
    if not went_well:
        print(f"  {painted('Not everything came as it should have.', 'red')}\n")
    if ends:
        return 0 if went_well else 1
    _say_where_to_go(url, hook)
    stage.is_over = True
    await asyncio.Event().wait()
    return 0


async def _show(stage: Stage, client: AsyncClient, hook: str) -> bool:
    """One timer that is on time, one whose first try fails, one that is cancelled before it is due."""
    try:
        async with asyncio.timeout(SHOW_TIMEOUT_S):
            await client.create("tea", delay="1s", callback_url=hook, payload={"minutes": 3})
            stage.say("created", "tea", "due in 1 s")
            await client.create("invoice", delay="2s", callback_url=hook, retry_policy=QUICK_RETRY)
            stage.say("created", "invoice", "due in 2 s; the receiver will refuse its first try")
            await client.create("alarm", delay="1500ms", callback_url=hook)
            stage.say("created", "alarm", "due in 1.5 s")
            await client.delete("alarm")
            stage.say("cancelled", "alarm", "acknowledged: it will not fire")
            await stage.done.wait()
            tea = await _settled(client, "tea")
            invoice = await _settled(client, "invoice")
    except TimeoutError:
        return False
    except DuetimeError as error:
        print(f"  {error.detail}")
        return False
    stage.say("silence", "alarm", "its time has passed and nothing came")
    return tea and invoice and "alarm" not in stage.calls


async def _settled(client: AsyncClient, timer_id: str) -> bool:
    """The answer of the receiver is on its way into the store: wait until it is there."""
    while not (timer := await client.get(timer_id)).is_over:  # noqa: ASYNC110 - it is on the other side of HTTP
        await asyncio.sleep(0.02)
    return timer.state == "delivered"


class Stage:
    """What the receiver of the demo does and says."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.calls: dict[str, int] = {}
        self.done = asyncio.Event()
        self.is_over = False
        self._started_s = asyncio.get_running_loop().time()

    async def handle(self, request: Request) -> Response:
        try:
            what = heard(request, [self.secret])
        except DuetimeError:
            return Response(400)
        timer_id = what.callback.timer_id
        self.calls[timer_id] = self.calls.get(timer_id, 0) + 1
        if timer_id == "invoice" and self.calls[timer_id] == 1 and not self.is_over:
            self.say("fired", timer_id, f"{_how(what)}; answered 500: try again", style="yellow")
            return Response(500)
        payload = f"; {shortened(json_line(what.callback.payload), 50)}" if what.callback.payload is not None else ""
        self.say("fired", timer_id, _how(what) + payload, style="green")
        if "tea" in self.calls and self.calls.get("invoice", 0) > 1:
            self.done.set()
        return Response(200, ok())

    def say(self, what: str, timer_id: str, how: str, style: str | None = None) -> None:
        elapsed_s = asyncio.get_running_loop().time() - self._started_s
        at = painted(f"{elapsed_s:5.2f} s", "dim")
        print(f"  {at}  {painted(what.ljust(9), style)}  {timer_id.ljust(8)} {how}", flush=True)


def _how(what: Heard) -> str:
    """A retry is not late: it has a time of its own. Its body says when it was due."""
    callback = what.callback
    first = f"attempt {callback.attempt}" if callback.attempt > 1 else lateness(callback.late_by.total_seconds() * 1e3)
    return f"{first}, signature {what.signature}"


def _say_where_to_go(url: str, hook: str) -> None:
    body = json_line({"timerId": "mine", "delay": "5s", "callbackUrl": hook, "payload": {"hello": "world"}})
    print(f"  {painted('Yours to try', 'bold')}, in another terminal; the receiver above prints what comes:\n")
    print(f"    curl {url}/api/v1/timers/create -H content-type:application/json -d {shlex.quote(body)}\n")
    duetime = "duetime" if shutil.which("duetime") else sys.argv[0]
    print(f"    {duetime} timer create mine --in 5s --to {hook}{'' if url.endswith(f':{PORT}') else f' --url {url}'}")
    print(f"    {duetime} listen                    a receiver in a terminal of its own\n")
    print(f"  Reference   {url}/docs")
    print(f"  For real    {duetime} serve\n")
    print(painted("  Serving until Ctrl-C.\n", "dim"), flush=True)


def _config(folder: Path, port: int | None) -> Config:
    # Nothing from the environment: the demonstration is the same everywhere.
    return load_config(
        environ={},
        flags={
            "store.url": f"sqlite:///{quote(str(folder / 'demo.db'))}",
            "server.listen": f"127.0.0.1:{_usual_port() if port is None else port}",
            "log.level": "error",
        },
    )


def _usual_port() -> int:
    """The usual port if it is free, else any."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT
