"""Which sockets of this process a failed login leaves open; and, run as a program, a server that breaks logins off."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import AsyncIterator, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Literal

__all__ = ["breaks_off", "cancelled_at", "none_left", "open_sockets"]


def open_sockets() -> set[int]:
    """The inodes of all sockets of this process."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


@contextlib.asynccontextmanager
async def none_left(within_seconds: float = 0.0) -> AsyncIterator[None]:
    """Fails if what runs inside leaves a socket open, or leaves closing one to the garbage collector.

    A driver on the event loop gets a few turns of the loop and no more, so that a server that closes its end cannot
    hide a socket that nobody closed here. A driver with threads gets `within_seconds`.
    """
    gc.collect()
    before = open_sockets()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gc.disable()
        try:
            yield
            left = await _left(before, within_seconds)
        finally:
            gc.enable()
        gc.collect()
    assert not left, f"{len(left)} sockets are still open: {described(left)}"
    leaks = [str(warning.message) for warning in caught if issubclass(warning.category, ResourceWarning)]
    assert not leaks, leaks


def described(inodes: set[int]) -> list[str]:
    """Where they lead to and their state, as far as they are TCP."""
    found = []
    for file in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            (
                _,
                local,
                remote,
                state,
                *_,
            ) = parts = line.split()
            if int(parts[9]) in inodes:
                found.append(f"{local} to {remote}, state {state}")
    return found


async def _left(before: set[int], within_seconds: float) -> set[int]:
    loop = asyncio.get_running_loop()
    until = loop.time() + within_seconds
    turns = 5
    while (left := open_sockets() - before) and (turns or loop.time() < until):
        await asyncio.sleep(0 if turns else 0.01)
        turns = max(0, turns - 1)
    return left


@types.coroutine
def cancelled_at(step: int, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, bool]:
    """Runs the work in this task and cancels it when it waits for the `step`th time. False: it ended before that."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    waits = 0
    send: Any = work.send
    value: Any = None
    try:
        while True:
            awaited = send(value)
            waits += 1
            if waits == step:
                loop.call_soon(task.cancel)
            try:
                send, value = work.send, (yield awaited)
            except BaseException as error:
                send, value = work.throw, error
    except StopIteration:
        return False
    except asyncio.CancelledError:
        assert waits >= step
        task.uncancel()
        return True


@contextlib.contextmanager
def breaks_off(
    then: Literal["stalls", "hangs up"], behind_port: int = 0, answers: int = 0, says: bytes = b""
) -> Iterator[int]:
    """The port of a server that, after so many answers of the one behind it, says nothing more or hangs up.

    Without a server behind it, it answers the first message with what it `says`, and nothing more. It is a
    process of its own: its sockets are not ours.
    """
    command = [sys.executable, __file__, then, str(behind_port), str(answers), says.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _serve(client: socket.socket, then: str, behind_port: int, answers: int, says: bytes) -> None:
    with contextlib.suppress(OSError):
        if says and client.recv(65_536):
            client.sendall(says)
        if answers:
            behind = socket.create_connection(("127.0.0.1", behind_port))
            threading.Thread(target=_pass_on, args=(client, behind), daemon=True).start()
            for _ in range(answers):
                client.sendall(behind.recv(65_536))
        if then == "hangs up":
            client.shutdown(socket.SHUT_RDWR)
        else:
            threading.Event().wait()  # the connection stays open until this process ends


def _pass_on(client: socket.socket, behind: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while said := client.recv(65_536):
            behind.sendall(said)


def _main(then: str, behind_port: str, answers: str, says: str) -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=100)
    print(listening.getsockname()[1], flush=True)
    while True:
        client, _ = listening.accept()
        how = (client, then, int(behind_port), int(answers), bytes.fromhex(says))
        threading.Thread(target=_serve, args=how, daemon=True).start()


if __name__ == "__main__":
    _main(*sys.argv[1:])
