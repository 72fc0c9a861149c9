"""demo: starts a server on a temporary store and a receiver, creates three timers, and prints each step."""

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
from duetime.cli.listen import ReceivedCallback, read_request, start_receiver
from duetime.cli.output import format_lateness, print_line, shorten, styled, to_json
from duetime.client import AsyncClient, DuetimeError, RetryPolicy, ok
from duetime.config import Config, load_config
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer
from duetime.signing import new_secret

__all__ = ["demo"]

PORT = 8463
TIMEOUT_S = 15.0
QUICK_RETRY = RetryPolicy(max_retries=5, initial_interval="600ms", backoff_multiplier=1.0, max_interval="600ms")


async def demo(arguments: Arguments) -> int:
    _cancel_on_signals()  # first: otherwise a signal could end the process and leave the folder
    try:
        with tempfile.TemporaryDirectory(prefix="duetime-demo-", ignore_cleanup_errors=True) as folder:
            return await _serve(Path(folder), arguments)
    except asyncio.CancelledError:
        with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
            print("\n  Stopped. The temporary store was deleted.", flush=True)
        return 0


def _cancel_on_signals() -> None:
    """SIGTERM and SIGHUP end the demo, as Ctrl-C does. Only the first signal has an effect."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) is not signal.SIG_IGN:  # under nohup SIGHUP is ignored, and stays ignored
            with contextlib.suppress(NotImplementedError):  # Windows
                loop.add_signal_handler(number, lambda: task.cancelling() or task.cancel())


async def _serve(folder: Path, arguments: Arguments) -> int:
    from duetime.app import App

    app = App(_config(folder, arguments.port))
    await app.start()
    try:
        receiver = DemoReceiver()
        http_server = await start_receiver("127.0.0.1", 0, receiver.handle)
        try:
            host, port = app.address[0], app.address[1]
            return await _run(receiver, f"http://{host}:{port}", http_server, exits=arguments.exit)
        finally:
            await http_server.close()
    finally:
        await app.stop()


async def _run(receiver: DemoReceiver, url: str, http_server: HttpServer, *, exits: bool) -> int:
    callback_url = f"http://127.0.0.1:{http_server.port}/"
    print_line()
    print_line("  ", styled(f"Duetime {__version__}", "bold"), ": a server, a receiver, and three timers", sep="")
    print_line()
    print_line(f"  server    {url}, on a temporary SQLite file")
    print_line(f"  receiver  {callback_url}")
    print_line()
    async with AsyncClient(url) as client:
        await client.namespaces.update("default", signing_secrets=[receiver.secret])
        succeeded = await _run_timers(receiver, client, callback_url)
    print_line()
    if not succeeded:
        print_line("", styled("Not all timers did what they should.", "red"))
        print_line()
    if exits:
        return 0 if succeeded else 1
    _print_next_steps(url, callback_url)
    receiver.finished = True
    await asyncio.Event().wait()
    return 0


async def _run_timers(receiver: DemoReceiver, client: AsyncClient, callback_url: str) -> bool:
    """One timer that is delivered at once, one whose first attempt fails, one that is cancelled before it is due."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await client.create("tea", delay="1s", callback_url=callback_url, payload={"minutes": 3})
            receiver.print_step("created", "tea", "due in 1 s")
            await client.create("invoice", delay="2s", callback_url=callback_url, retry_policy=QUICK_RETRY)
            receiver.print_step("created", "invoice", "due in 2 s; the receiver will answer its first attempt with 500")
            await client.create("alarm", delay="1500ms", callback_url=callback_url)
            receiver.print_step("created", "alarm", "due in 1.5 s")
            await client.delete("alarm")
            receiver.print_step("cancelled", "alarm", "acknowledged: it will not fire")
            await receiver.done.wait()
            tea = await _is_delivered(client, "tea")
            invoice = await _is_delivered(client, "invoice")
    except TimeoutError:
        return False
    except DuetimeError as error:
        print_line(f"  {error.detail}")
        return False
    receiver.print_step("not fired", "alarm", "its due time has passed, and no callback came")
    return tea and invoice and "alarm" not in receiver.calls


async def _is_delivered(client: AsyncClient, timer_id: str) -> bool:
    """Waits until the server has recorded the response of the receiver."""
    while not (timer := await client.get(timer_id)).is_over:  # noqa: ASYNC110 - the state is in another process
        await asyncio.sleep(0.02)
    return timer.state == "delivered"


class DemoReceiver:
    """Answers the callbacks of the demo and prints each step."""

    def __init__(self) -> None:
        self.secret = new_secret()
        self.calls: dict[str, int] = {}
        self.done = asyncio.Event()
        self.finished = False
        self._started_s = asyncio.get_running_loop().time()

    async def handle(self, request: Request) -> Response:
        try:
            what = read_request(request, [self.secret])
        except DuetimeError:
            return Response(400)
        timer_id = what.callback.timer_id
        self.calls[timer_id] = self.calls.get(timer_id, 0) + 1
        if timer_id == "invoice" and self.calls[timer_id] == 1 and not self.finished:
            self.print_step("fired", timer_id, f"{_attempt_text(what)}; answered 500, to be retried", style="yellow")
            return Response(500)
        payload = f"; {shorten(to_json(what.callback.payload), 50)}" if what.callback.payload is not None else ""
        self.print_step("fired", timer_id, _attempt_text(what) + payload, style="green")
        if "tea" in self.calls and self.calls.get("invoice", 0) > 1:
            self.done.set()
        return Response(200, ok())

    def print_step(self, what: str, timer_id: str, how: str, style: str | None = None) -> None:
        elapsed_s = asyncio.get_running_loop().time() - self._started_s
        at = styled(f"{elapsed_s:5.2f} s", "dim")
        print_line("", at, styled(what.ljust(9), style), f"{timer_id.ljust(8)} {how}")


def _attempt_text(what: ReceivedCallback) -> str:
    """The lateness of a first attempt; the number of a retry, which has a due time of its own."""
    callback = what.callback
    first = (
        f"attempt {callback.attempt}"
        if callback.attempt > 1
        else format_lateness(callback.late_by.total_seconds() * 1e3)
    )
    return f"{first}, signature {what.signature}"


def _print_next_steps(url: str, callback_url: str) -> None:
    body = to_json({"timerId": "mine", "delay": "5s", "callbackUrl": callback_url, "payload": {"hello": "world"}})
    print_line("  ", styled("Try it", "bold"), " in another terminal. The receiver above prints each callback:", sep="")
    print_line()
    print_line(f"    curl {url}/api/v1/timers/create -H content-type:application/json -d {shlex.quote(body)}")
    print_line()
    duetime = "duetime" if shutil.which("duetime") else sys.argv[0]
    server = "" if url.endswith(f":{PORT}") else f" --url {url}"
    print_line(f"    {duetime} timer create mine --in 5s --to {callback_url}{server}")
    print_line(f"    {duetime} listen                    starts another receiver")
    print_line()
    print_line(f"  Reference   {url}/docs")
    print_line(f"  Server      {duetime} serve")
    print_line()
    print_line(styled("  The server runs until Ctrl-C.", "dim"))
    print_line()


def _config(folder: Path, port: int | None) -> Config:
    # The environment is ignored, so that the demo is the same everywhere.
    return load_config(
        environ={},
        flags={
            "store.url": f"sqlite:///{quote(str(folder / 'demo.db'))}",
            "server.listen": f"127.0.0.1:{_default_port() if port is None else port}",
            "log.level": "error",
        },
    )


def _default_port() -> int:
    """The default port if it is free, otherwise any free port (0)."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", PORT))
        except OSError:
            return 0
    return PORT
