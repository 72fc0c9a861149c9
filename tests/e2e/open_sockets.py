"""Which sockets of this process a failed login leaves open; and, run as a program, a server that breaks logins off."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
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
    gc.freeze()  # what there is now is not looked at again, which makes the next collections fast
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
    """The port of a server that, after so many answers of the server behind it, sends nothing more or hangs up.

    Without a server behind it, it answers the first message with `says`, and nothing more. It runs in another
    process, which is started once for all tests, so its sockets are not sockets of this process. All its connections
    are closed at the end of the block.
    """
    program = _program()
    port = program.ask("listen", then, str(behind_port), str(answers), says.hex() or "-")
    try:
        yield int(port)
    finally:
        program.ask("close", port)


class _Program:
    """This file, run as a program: it answers each line of commands with one line."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        atexit.register(self._end)

    def ask(self, *words: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{'|'.join(words)}\n")
        answer = self._process.stdout.readline().strip()
        assert answer, "the server that breaks logins off has ended"
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


@functools.cache
def _program() -> _Program:
    return _Program()


# --- the program ---------------------------------------------------------------------------------


class _Listener:
    """Serves one port until it is closed, each connection in a thread."""

    def __init__(self, then: str, behind_port: int, answers: int, says: bytes) -> None:
        self._then, self._behind_port, self._answers, self._says = then, behind_port, answers, says
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=100)
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._closed = threading.Event()
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for each in (self._listening, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for it
                each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._keep(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if self._closed.is_set():
                connection.close()
            else:
                self._sockets.append(connection)

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._says and client.recv(65_536):
                client.sendall(self._says)
            if self._answers:
                behind = socket.create_connection(("127.0.0.1", self._behind_port))
                self._keep(behind)
                threading.Thread(target=_copy, args=(client, behind), daemon=True).start()
                for _ in range(self._answers):
                    client.sendall(behind.recv(65_536))
            if self._then == "hangs up":
                client.shutdown(socket.SHUT_RDWR)
            else:
                self._closed.wait()  # until then the connection stays open


def _copy(client: socket.socket, behind: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := client.recv(65_536):
            behind.sendall(data)


def _main() -> None:
    listeners: dict[str, _Listener] = {}
    for line in sys.stdin:
        action, *words = line.strip().split("|")
        if action == "listen":
            then, behind_port, answers, says = words
            listener = _Listener(then, int(behind_port), int(answers), bytes.fromhex(says.strip("-")))
            listeners[str(listener.port)] = listener
            print(listener.port, flush=True)
        else:
            listeners.pop(words[0]).close()
            print("closed", flush=True)


if __name__ == "__main__":
    _main()
