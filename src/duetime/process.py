"""A process that runs one instance: signals, the event loop, the garbage collector, and what it says of itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import Struct

from duetime.app import App
from duetime.clock import SystemClock
from duetime.config import Config
from duetime.descriptors import Sizes, fitted, lowered_text, raised_limit, size
from duetime.engine.namespaces import Namespaces
from duetime.errors import SetupError
from duetime.printable import redacted_url
from duetime.service.namespaces import pause_all
from duetime.store import open_store
from duetime.telemetry import log, set_up_logging

__all__ = ["READY", "Worker", "log_warnings", "pause_namespaces", "run", "store_name"]

READY: Final = b"R"  # what a worker sends to its parent process when it serves


class Worker(Struct, frozen=True):
    """A process of the supervisor: its number, from 1, and its end of the socket pair to the parent process."""

    number: int
    channel: socket.socket


def run(config: Config, worker: Worker | None = None) -> int:
    """Serves until it has to stop, then drains. Returns the exit code.

    A process without workers stops at SIGTERM or SIGINT; a second signal ends it at once. A worker stops at SIGTERM or
    when its channel is closed.
    """
    set_up_logging(config.log.level, config.log.format, worker=None if worker is None else worker.number)
    sizes = size(raised_limit(), config)
    if worker is None:  # otherwise the parent process has logged them, once for all workers
        log_warnings(config, sizes)
    config = fitted(config, sizes)
    # The default is 5 ms: so long the writer thread would wait for the event loop to release the interpreter lock
    # after each statement.
    sys.setswitchinterval(0.0005)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, sizes, worker))


def log_warnings(config: Config, sizes: Sizes) -> None:
    """Log the warnings that were found while the configuration was loaded, before logging was set up; and the limits
    that had to be lowered."""
    for warning in config.warnings:
        log.warning("%s", warning)
    if sizes.lowered:
        log.warning("%s", lowered_text(config, sizes))


async def _serve(config: Config, sizes: Sizes, worker: Worker | None) -> int:
    app = App(config, worker=None if worker is None else worker.number, sizes=sizes)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if worker is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop_or_exit, stop)
    else:
        # Only the parent counts signals: a worker may get the same one several times, which must not end it at once.
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        worker.channel.setblocking(False)
        loop.add_reader(worker.channel, _parent_closed, loop, worker.channel, stop)
    await app.start()
    if config.server.tls_certificate:
        loop.add_signal_handler(signal.SIGHUP, app.reload_certificate)
    # These objects live until the end: the garbage collector need not visit them in each run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    if worker is not None:
        with contextlib.suppress(OSError):  # the parent has ended: the closed channel stops this worker too
            worker.channel.send(READY)
    scheme = "https" if config.server.tls_certificate else "http"
    log.info("serving on %s://%s:%d%s", scheme, *app.address, _serving_details(app))
    code = await _until_stop(app, stop)
    ended = await app.stop()
    log.info("stopped")
    return code if ended else 1


async def _until_stop(app: App, stop: asyncio.Event) -> int:
    """Waits until the process has to stop or an internal error ends a part of it, because a process that fires nothing
    must not keep running. Returns the exit code."""
    stopped, failed = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(app.parts.until_failed())
    done, _ = await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    failed.cancel()
    if failed in done:
        log.critical("stopping after an internal error in %s", failed.result())
        return 1
    log.info("stopping: waiting for deliveries in flight")
    return 0


def _serving_details(app: App) -> str:
    """The store, and the advertised address if it is a different one, for the log line."""
    no_other_address = not app.is_shared or app.advertised == "{}:{}".format(*app.address)
    elsewhere = "" if no_other_address else f"; other instances reach it at {app.advertised}"
    return f", store {store_name(app.config)}{elsewhere}"


def store_name(config: Config) -> str:
    """The URL of the store without user, password and options."""
    return redacted_url(config.store.url).partition("?")[0].rpartition("@")[2]


def _stop_or_exit(stop: asyncio.Event) -> None:
    if stop.is_set():
        log.warning("second signal: ending at once")
        raise SystemExit(1)
    stop.set()


def _parent_closed(loop: asyncio.AbstractEventLoop, channel: socket.socket, stop: asyncio.Event) -> None:
    """The parent closed the channel: it has ended, or this worker has to stop."""
    loop.remove_reader(channel)
    stop.set()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # Windows
        return None
    return uvloop.new_event_loop


# --- before it: a start with everything paused ---------------------------------------------------


async def pause_namespaces(config: Config) -> None:
    """Pause all namespaces in the database, before any instance that starts after this fires a timer. The pause is
    stored: it holds for instances that are started later, without this, and a worker that is started again does not
    undo what was resumed meanwhile (docs/adr/0032)."""
    store = open_store(config.store.url)
    try:
        if not store.capabilities.durable:
            raise SetupError(
                "--paused pauses the namespaces in the database; store.url is memory://, which starts empty"
            )
        set_up_logging(config.log.level, config.log.format)
        await store.migrate()
        await store.open()
        clock = SystemClock()
        names = await pause_all(Namespaces(store, clock), clock, config.namespaces.default_num_shards)
    finally:
        await store.close()
    log.warning("--paused: no timer of %s fires until `duetime namespace resume`", _some(names))


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{len(names)} namespace{'s' * (len(names) != 1)} ({', '.join(map(repr, names[:10]))}{more})"
