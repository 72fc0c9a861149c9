"""`duetime serve --workers N`: a parent process that runs N instances on one address and restarts those that end.

Each worker is a full instance with its own member row. The kernel distributes the connections to the shared address
over the workers that listen on it (SO_REUSEPORT). A worker listens on it only while it can serve. Each worker also has
its own listener; that address is in its member row.

The parent is small: one thread, no event loop, no store. It forks, because that starts a worker quickly, shares the
memory of the code, and gives all workers the same code and configuration, even a worker that is restarted after the
files were upgraded. The channel between the parent and a worker is a pair of sockets:

    worker -> parent    READY when it serves, or the error why it cannot start; closed when the worker has ended
    parent -> worker    nothing; closed when the worker has to drain, and also if the parent is killed
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

from duetime.addresses import worker_listen
from duetime.api.auth import check_binding
from duetime.clock import SystemClock
from duetime.cluster.peer_protocol import Reply, encode, read_reply, reply_of
from duetime.config import Config
from duetime.descriptors import raised_limit, size
from duetime.errors import DuetimeError, SetupError
from duetime.listener import bind_listener
from duetime.process import READY, Worker, log_warnings, run, store_name
from duetime.store import open_store
from duetime.telemetry import log, set_up_logging

__all__ = ["Supervisor", "pause_before_start_ms", "run_workers"]

_PAUSE_FIRST_MS: Final = 200
_PAUSE_MAX_MS: Final = 5_000
_RECOVERED_MS: Final = 10_000  # a worker that served for so long has recovered: the next pause is the first one again
_SAME_SIGNAL_MS: Final = 100  # a terminal, `timeout` or a wrapper may send a signal to the process and to its group
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)

Work = Callable[[Worker], int]


def run_workers(config: Config) -> int:
    """Serves with `server.workers` processes until SIGTERM or SIGINT, then drains. A second signal kills them."""
    count = config.server.workers
    check_binding(config)
    _check_system(count)
    _check_store(config)
    sizes = size(raised_limit(), config)  # the workers inherit the limit; each of them divides its own descriptors
    shared_sockets = _bind_ports(config)
    set_up_logging(config.log.level, config.log.format)
    log_warnings(config, sizes)
    host = config.server.listen.rpartition(":")[0]
    listen = f"{host}:{shared_sockets[0].getsockname()[1]}"
    config = msgspec.structs.replace(config, server=msgspec.structs.replace(config.server, listen=listen))

    def work(worker: Worker) -> int:
        for sock in shared_sockets:
            sock.close()
        return run(config, worker)

    def all_ready(pids: Sequence[int]) -> None:
        listed = ", ".join(map(str, pids))
        scheme = "https" if config.server.tls_certificate else "http"
        log.info("%d workers (pids %s) serve on %s://%s, store %s", count, listed, scheme, listen, store_name(config))

    # To load the certificate again. Without one SIGHUP ends the process, as usual when a terminal is closed.
    forwarded = (signal.SIGHUP,) if config.server.tls_certificate else ()
    return Supervisor(count, work, all_ready, forwarded).run()


def _check_system(count: int) -> None:
    if not hasattr(socket, "SO_REUSEPORT") or not hasattr(os, "fork"):
        raise SetupError(
            f"server.workers is {count}, but on this system ({sys.platform}) processes cannot share an address "
            "(SO_REUSEPORT). Set it to 1, and start several `duetime serve`, each on its own address",
            field="server.workers",
        )


def _check_store(config: Config) -> None:
    store = open_store(config.store.url).capabilities
    if store.exclusive or not store.durable:  # a store that is not durable is in the memory of one process
        raise SetupError(
            f"server.workers is {config.server.workers}, but only one process can use a {store.name} store. "
            "Use a database (store.url: postgresql, mysql, …), or set server.workers to 1",
            field="server.workers",
        )


def _bind_ports(config: Config) -> list[socket.socket]:
    """Checks that all ports are free, before a worker is started, and binds the shared address. It stays bound as long
    as the parent runs, so that no other program gets it while a worker is restarted."""
    workers = range(1, config.server.workers + 1) if config.cluster.worker_ports else ()
    host = config.server.listen.rpartition(":")[0]
    with ExitStack() as probes:
        ports = []
        for listen in (
            config.server.listen,
            *(worker_listen(config.server.listen, config.cluster.worker_ports, number) for number in workers),
        ):
            # Without SO_REUSEPORT: with it, the address of another Duetime server would seem free.
            for sock in bind_listener(listen):
                probes.enter_context(sock)
                ports.append(sock.getsockname()[1])
    return bind_listener(f"{host}:{ports[0]}", reuse_port=True)


# --- the parent ----------------------------------------------------------------------------------


class _Child:
    """The parent's record of a worker: it runs (`channel`), or waits to be restarted (`start_at_ms`)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pid = 0
        self.channel: socket.socket | None = None
        self.received = b""
        self.was_ready = False  # at least once
        self.ready_at_ms: int | None = None
        self.start_at_ms: int | None = None
        self.pause_ms = 0  # before its last start


class Supervisor:
    """Runs `work` in `count` processes until SIGTERM or SIGINT. `all_ready` is called once with their pids, when all
    serve. The signals in `forwarded` are sent on to the workers that serve."""

    def __init__(
        self,
        count: int,
        work: Work,
        all_ready: Callable[[Sequence[int]], None],
        forwarded: Sequence[signal.Signals] = (),
    ) -> None:
        self._forwarded = forwarded
        self._work = work
        self._all_ready = all_ready
        self._children = [_Child(number) for number in range(1, count + 1)]
        self._clock = SystemClock()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._signal_at_ms = 0
        self._failure: DuetimeError | None = None
        self._code = 0

    def run(self) -> int:
        """Returns the exit code: 0 after a clean drain. Raises the error because of which a worker cannot start."""
        with _signals_as_bytes((*_STOP_SIGNALS, *self._forwarded)) as signal_socket:
            self._signal_socket = signal_socket
            self._selector.register(signal_socket, selectors.EVENT_READ)
            gc.collect()
            # Otherwise the garbage collector of a worker would write to this memory, and it would no longer be shared.
            gc.freeze()
            for child in self._children:
                self._start(child)
            while self._running or not self._stopping:
                self._wait()
        self._selector.close()
        if self._failure is not None:
            raise self._failure
        return self._code

    @property
    def _running(self) -> list[_Child]:
        return [child for child in self._children if child.channel is not None]

    def _wait(self) -> None:
        """Waits for a signal, data from a worker, or the time of a restart, and handles it."""
        waiting = [child.start_at_ms for child in self._children if child.start_at_ms is not None]
        timeout_s = max(0, min(waiting) - self._clock.boot_ms()) / 1_000 if waiting else None
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, _Child):
                self._read_channel(key.data)
            else:
                received = set(self._signal_socket.recv(64))
                for number in received & set(self._forwarded):
                    self._forward(number)
                if received - set(self._forwarded):
                    self._on_signal()
        for child in self._children:
            if child.start_at_ms is not None and child.start_at_ms <= self._clock.boot_ms():
                self._start(child)

    # -- starting

    def _start(self, child: _Child) -> None:
        child.start_at_ms = child.ready_at_ms = None
        child.received = b""
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        # The new process inherits the signal handling of the parent. Until it has its own, a signal to it must wait, or
        # the parent would take it for its own.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
        try:
            child.pid = os.fork()
            if child.pid == 0:
                self._run_worker(Worker(child.number, theirs), ours)
        except OSError as error:
            ours.close()
            self._restart_later(child, f"cannot be started: {error.strerror}")
            return
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        child.channel = ours
        self._selector.register(ours, selectors.EVENT_READ, child)

    def _run_worker(self, worker: Worker, ours: socket.socket) -> NoReturn:
        """Runs in the new process. Never returns to the code of the parent."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Ctrl-C goes to all processes of a terminal. Only the parent reacts to it.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            for number in self._forwarded:
                signal.signal(number, signal.SIG_IGN)  # until the worker handles it
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
            # A copy of the parent's end of a channel would keep it open after the parent has ended.
            for sock in (ours, *(child.channel for child in self._children)):
                if sock is not None:
                    sock.close()
            self._signal_socket.close()
            self._selector.close()
            code = self._work(worker)
        except DuetimeError as error:
            worker.channel.setblocking(True)
            worker.channel.sendall(encode(reply_of(error)))
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            log.critical("unexpected error: this worker ends", exc_info=True)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    # -- data from workers, and their end

    def _read_channel(self, child: _Child) -> None:
        assert child.channel is not None
        try:
            received = child.channel.recv(65_536)
        except ConnectionError:
            received = b""
        child.received += received
        if not received:
            self._worker_ended(child)
        elif child.received == READY:
            if child.was_ready:
                log.info("worker %d (pid %d) is serving again", child.number, child.pid)
            was_complete = all(each.was_ready for each in self._children)
            child.was_ready = True
            child.ready_at_ms = self._clock.boot_ms()
            if not was_complete and all(each.was_ready for each in self._children):
                self._all_ready([each.pid for each in self._children])

    def _worker_ended(self, child: _Child) -> None:
        assert child.channel is not None
        self._selector.unregister(child.channel)
        child.channel.close()
        child.channel = None
        _, status = os.waitpid(child.pid, 0)
        error = _decode_error(child.received)
        if self._stopping:
            if status != 0 and self._failure is None:
                self._code = 1
                log.warning("worker %d (pid %d) %s", child.number, child.pid, _end_text(status, error))
        elif error is not None and not child.was_ready:
            # A restart would fail again, and so would the other workers.
            self._failure = error
            self._stop()
        else:
            self._restart_later(child, _end_text(status, error))

    def _restart_later(self, child: _Child, why: str) -> None:
        now_ms = self._clock.boot_ms()
        served_ms = 0 if child.ready_at_ms is None else now_ms - child.ready_at_ms
        child.pause_ms = pause_before_start_ms(child.pause_ms, served_ms)
        child.start_at_ms = now_ms + child.pause_ms
        pause_s = child.pause_ms / 1_000
        log.warning("worker %d (pid %d) %s; restarting it in %g s", child.number, child.pid, why, pause_s)

    # -- stopping

    def _forward(self, number: int) -> None:
        for child in self._running:
            if child.ready_at_ms is not None:
                os.kill(child.pid, number)  # no waitpid() yet, so the pid cannot belong to another process

    def _on_signal(self) -> None:
        if not self._stopping:
            log.info("stopping the workers")
            self._signal_at_ms = self._clock.boot_ms()
            self._stop()
        if self._clock.boot_ms() - self._signal_at_ms < _SAME_SIGNAL_MS:
            return
        log.warning("second signal: killing the workers")
        self._code = 1
        for child in self._running:
            os.kill(child.pid, signal.SIGKILL)  # no waitpid() yet, so the pid cannot belong to another process

    def _stop(self) -> None:
        self._stopping = True
        for child in self._children:
            child.start_at_ms = None
            if child.channel is not None:
                with suppress(OSError):  # the worker has just ended
                    child.channel.shutdown(socket.SHUT_WR)


def pause_before_start_ms(last_pause_ms: int, served_ms: int) -> int:
    """The pause before a worker is restarted that served for `served_ms`: twice the last pause, or the first pause if
    it had recovered."""
    if served_ms >= _RECOVERED_MS:
        return _PAUSE_FIRST_MS
    return min(max(last_pause_ms * 2, _PAUSE_FIRST_MS), _PAUSE_MAX_MS)


@contextmanager
def _signals_as_bytes(numbers: Sequence[signal.Signals]) -> Iterator[socket.socket]:
    """Signals as bytes on a socket. Afterwards they are ignored until the process has ended."""
    signal_socket, written = socket.socketpair()
    written.setblocking(False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(written.fileno())
    try:
        yield signal_socket
    finally:
        signal.set_wakeup_fd(-1)
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)  # a further signal would only change the exit code
        signal_socket.close()
        written.close()


_decode_reply = msgspec.msgpack.Decoder(Reply).decode


def _decode_error(received: bytes) -> DuetimeError | None:
    """The error that a worker sent before it ended, if it did."""
    try:
        read_reply(_decode_reply(received.removeprefix(READY)))
    except DuetimeError as error:
        return error
    except msgspec.MsgspecError:  # it is incomplete
        return None
    return None


def _end_text(status: int, error: DuetimeError | None) -> str:
    if error is not None:
        return f"ended: {error.detail}"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
