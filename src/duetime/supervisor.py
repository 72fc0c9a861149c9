"""`duetime serve --workers N`: a parent that runs N instances on one address, and starts again what dies.

Each worker is a full instance with a member row of its own. The kernel spreads the connections of the shared
address over those that listen on it (SO_REUSEPORT); beside it each has a listener of its own, whose address the
other instances are told. It listens on the shared one only while it can serve.

The parent is small: one thread, no event loop, no store. It forks, which starts a worker in no time, shares the
memory of the code, and gives all of them the same code and configuration, also the one that is started again after
an upgrade of the files. Between the parent and a worker there is a line, a pair of sockets:

    worker -> parent    READY once it serves; or why it cannot start; then the end, when it has ended
    parent -> worker    nothing but the end: drain. It comes also if the parent is killed, on any system.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final, NoReturn

import msgspec

from duetime.api.auth import check_binding
from duetime.app import READY, Worker, bind_listener, log_warnings, run, shown_store, worker_listen
from duetime.clock import SystemClock
from duetime.cluster.peer_protocol import Reply, encode, read_reply, reply_of
from duetime.config import Config
from duetime.errors import DuetimeError, SetupError
from duetime.store import open_store
from duetime.telemetry import log, set_up_logging

__all__ = ["Supervisor", "pause_before_start_ms", "run_workers"]

_PAUSE_FIRST_MS: Final = 200
_PAUSE_MAX_MS: Final = 5_000
_STEADY_MS: Final = 10_000  # a worker that served for so long has nothing to do with its last death
_SAME_SIGNAL_MS: Final = 100  # a terminal, `timeout` or a wrapper may send one to the process and to its group
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Work = Callable[[Worker], int]


def run_workers(config: Config) -> int:
    """Serve with `server.workers` processes until SIGTERM or SIGINT, then drain; a second signal kills them."""
    count = config.server.workers
    check_binding(config)
    _check_system(count)
    _check_store(config)
    held = _hold_ports(config)
    set_up_logging(config.log.level, config.log.format)
    log_warnings(config)
    host = config.server.listen.rpartition(":")[0]
    listen = f"{host}:{held[0].getsockname()[1]}"
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, listen=listen))

    def work(worker: Worker) -> int:
        for sock in held:
            sock.close()
        return run(config, worker)

    def all_ready(pids: Sequence[int]) -> None:
        listed = ", ".join(map(str, pids))
        log.info("%d workers (pids %s) serve on http://%s, store %s", count, listed, listen, shown_store(config))

    return Supervisor(count, work, all_ready).run()


def _check_system(count: int) -> None:
    if not hasattr(socket, "SO_REUSEPORT") or not hasattr(os, "fork"):
        raise SetupError(
            f"server.workers is {count}, but on this system ({sys.platform}) processes cannot share an address "
            "(SO_REUSEPORT). Set it to 1, and start several `duetime serve`, each on an address of its own",
            field="server.workers",
        )


def _check_store(config: Config) -> None:
    store = open_store(config.store.url).capabilities
    if store.exclusive or not store.durable:  # what does not outlive its process is in its process
        raise SetupError(
            f"server.workers is {config.server.workers}, but a {store.name} store serves one process alone. "
            "Use a database (store.url: postgresql, mysql, …), or set server.workers to 1",
            field="server.workers",
        )


def _hold_ports(config: Config) -> list[socket.socket]:
    """The shared address, bound as long as the parent lives, so that no other program gets it while a worker is
    started again; and proof that all ports are free, before anything is started."""
    workers = range(1, config.server.workers + 1) if config.cluster.worker_ports else ()
    host = config.server.listen.rpartition(":")[0]
    with ExitStack() as until_all_were_free:
        ports = []
        for listen in (config.server.listen, *(worker_listen(config, number) for number in workers)):
            # Without SO_REUSEPORT: with it, another Duetime's address would count as free.
            for sock in bind_listener(listen):
                until_all_were_free.enter_context(sock)
                ports.append(sock.getsockname()[1])
    return bind_listener(f"{host}:{ports[0]}", reuse_port=True)


# --- the parent ----------------------------------------------------------------------------------


class _Child:
    """A worker as the parent sees it: running (`line`), or waiting to be started again (`start_at_ms`)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.line: socket.socket | None = None
        self.said = b""
        self.was_ready = False  # ever
        self.ready_at_ms: int | None = None
        self.start_at_ms: int | None = None
        self.pause_ms = 0  # before its last start


class Supervisor:
    """Runs `work` in `count` processes until SIGTERM or SIGINT. `all_ready`: told their pids, once, when all serve."""

    def __init__(self, count: int, work: Work, all_ready: Callable[[Sequence[int]], None]) -> None:
        self._work = work
        self._all_ready = all_ready
        self._children = [_Child(number) for number in range(1, count + 1)]
        self._clock = SystemClock()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._asked_at_ms = 0
        self._failure: DuetimeError | None = None
        self._code = 0

    def run(self) -> int:
        """The exit code: 0 after a clean drain. Raises the error for which a worker cannot start."""
        with _signals_noted() as noted:
            self._noted = noted
            self._selector.register(noted, selectors.EVENT_READ)
            gc.collect()
            gc.freeze()  # the collector of a worker would write to all of it, and make it its own
            for child in self._children:
                self._start(child)
            while self._running or not self._stopping:
                self._look()
        self._selector.close()
        if self._failure is not None:
            raise self._failure
        return self._code

    @property
    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.line is not None]

    def _look(self) -> None:
        """Wait for the next thing to happen, and see to it."""
        waiting = [child.start_at_ms for child in self._children if child.start_at_ms is not None]
        timeout_s = max(0, min(waiting) - self._clock.boot_ms()) / 1_000 if waiting else None
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _Child):
                self._hear(key.data)
            else:
                self._noted.recv(64)
                self._signalled()
        for child in self._children:
            if child.start_at_ms is not None and child.start_at_ms <= self._clock.boot_ms():
                self._start(child)

    # -- starting

    def _start(self, child: _Child) -> None:
        child.start_at_ms = child.ready_at_ms = None
        child.said = b""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # A signal to the new process, before it has its own way of hearing it, must not be heard by this one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            child.pid = os.fork()
            if child.pid == 0:
                self._be(Worker(child.number, theirs), ours)
        except OSError as error:
            ours.close()
            self._start_again(child, f"cannot be started: {error.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        child.line = ours
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _be(self, worker: Worker, ours: socket.socket) -> NoReturn:
        """The life of the new process. It never gets back to what the parent was doing."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Ctrl-C goes to all processes of a terminal; it is the parent who decides.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            # A copy of the parent's end of a line would keep it open when the parent is gone.
            for sock in (ours, *(child.line for child in self._children)):
                if sock is not None:
                    sock.close()
            self._noted.close()
            self._selector.close()
            code = self._work(worker)
        except DuetimeError as error:
            worker.line.setblocking(True)
            worker.line.sendall(encode(reply_of(error)))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            log.critical("this worker broke", exc_info=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # -- what workers say, and their end

    def _hear(self, child: _Child) -> None:
        assert child.line is not None
        try:
            said = child.line.recv(65_536)
        except ConnectionError:
            said = b""
        child.said += said
        if not said:
            self._ended(child)
        elif child.said == READY:
            if child.was_ready:
                log.info("worker %d (pid %d) serves again", child.number, child.pid)
            was_complete = all(each.was_ready for each in self._children)
            child.was_ready = True
            child.ready_at_ms = self._clock.boot_ms()
            if not was_complete and all(each.was_ready for each in self._children):
                self._all_ready([each.pid for each in self._children])

    def _ended(self, child: _Child) -> None:
        assert child.line is not None
        self._selector.unregister(child.line)
        child.line.close()
        child.line = None
        _, status = os.waitpid(child.pid, 0)
        error = _error_in(child.said)
        if self._stopping:
            if status != 0 and self._failure is None:
                self._code = 1
                log.warning("worker %d (pid %d) %s", child.number, child.pid, _how(status, error))
        elif error is not None and not child.was_ready:
            # Nothing that trying again would mend, and nothing that would not befall the others.
            self._failure = error
            self._stop()
        else:
            self._start_again(child, _how(status, error))

    def _start_again(self, child: _Child, why: str) -> None:
        now_ms = self._clock.boot_ms()
        served_ms = 0 if child.ready_at_ms is None else now_ms - child.ready_at_ms
        child.pause_ms = pause_before_start_ms(child.pause_ms, served_ms)
        child.start_at_ms = now_ms + child.pause_ms
        pause_s = child.pause_ms / 1_000
        log.warning("worker %d (pid %d) %s; starting it again in %g s", child.number, child.pid, why, pause_s)

    # -- stopping

    def _signalled(self) -> None:
        if not self._stopping:
            log.info("stopping the workers")
            self._asked_at_ms = self._clock.boot_ms()
            self._stop()
        if self._clock.boot_ms() - self._asked_at_ms < _SAME_SIGNAL_MS:
            return
        log.warning("asked twice: ending at once")
        self._code = 1
        for child in self._running:
            os.kill(child.pid, signal.SIGKILL)  # not waited for yet, so the pid is still its own

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children:
            child.start_at_ms = None
            if child.line is not None:
                with suppress(OSError):  # it has just ended by itself
                    child.line.shutdown(socket.SHUT_WR)


def pause_before_start_ms(last_pause_ms: int, served_ms: int) -> int:
    """Before a worker is started again that served for so long: twice the last pause, unless it had recovered."""
    if served_ms >= _STEADY_MS:
        return _PAUSE_FIRST_MS
    return min(max(last_pause_ms * 2, _PAUSE_FIRST_MS), _PAUSE_MAX_MS)


@contextmanager
def _signals_noted() -> Iterator[socket.socket]:
    """SIGTERM and SIGINT, as bytes on a socket; afterwards, for the little that is left of the process, ignored."""
    noted, written = socket.socketpair()
    written.setblocking(False)
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(written.fileno())
    try:
        yield noted
    finally:
        signal.set_wakeup_fd(-1)
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # one more would only spoil the exit code
        noted.close()
        written.close()


_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def _error_in(said: bytes) -> DuetimeError | None:
    """Why a worker could not start, or ended, if it said so."""
    try:
        read_reply(_decode_reply(said.removeprefix(READY)))
    except DuetimeError as error:
        return error
    except msgspec.MsgspecError:  # it was cut short
        return None
    return None


def _how(status: int, error: DuetimeError | None) -> str:
    if error is not None:
        return f"ended: {error.detail}"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
