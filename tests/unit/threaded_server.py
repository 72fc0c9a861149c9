"""An instance in a thread, for tests of commands, which have an event loop of their own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from duetime.app import App
from duetime.config import load_config

__all__ = ["free_port", "in_thread", "serving"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(port: int, **flags: Any) -> Iterator[str]:
    """An instance in a thread, because main() has an event loop of its own. `store_url` is store.url."""
    settings = {name.replace("_", ".", 1): value for name, value in flags.items()}
    config = load_config(environ={}, flags={"store.url": "memory://", "server.listen": f"127.0.0.1:{port}", **settings})

    async def serve(started: Callable[[], None], stop: asyncio.Event) -> None:
        app = App(config)
        await app.start()
        started()
        await stop.wait()
        await app.stop()

    with in_thread(serve):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def in_thread(serve: Callable[[Callable[[], None], asyncio.Event], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Run a server in an event loop of its own. It calls its first argument when it has started, and ends when the
    event is set."""
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve(started.set, stop))

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
