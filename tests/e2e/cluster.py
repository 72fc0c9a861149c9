"""A real cluster for tests: `duetime serve` processes on one database, and a witness of what they send.

Each instance reaches the database by a way of its own (`Way`), which a test can cut, slow down or make deaf, and
names itself in its User-Agent, so that the witness knows who called. Witness and ways live on an event loop in a
thread of their own: what a test does meanwhile does not change what they see.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import uvloop
from load_clients import Load
from real_server import RealServer, free_port, until, wall_ms
from scripts.servers import Toxiproxy

from duetime.domain.instants import LATEST_MS, parse_instant
from duetime.domain.timer import BEFORE_ALL, shard_of
from duetime.http.messages import Request, Response
from duetime.http.server import HttpServer, serve_http
from duetime.store import PageRequest, Store, open_store
from duetime.stores.fencing import all_or_error
from duetime.testing.checker import Callback
from servers import at_port, port_of

__all__ = ["SERVE", "Cluster", "Instance", "Sideline", "ToxicWay", "Way", "Witness", "name_in", "staged"]

T = TypeVar("T")
SERVE = ("-m", "duetime", "serve")
SHARDS = 16
_CHUNK_BYTES = 65_536


class Sideline:
    """An event loop in a thread of its own."""

    def __enter__(self) -> Self:
        self.loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="sideline", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    async def do(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))


class Witness:
    """Keeps every callback as evidence. `kindly` answers all at once; otherwise some wait, and some are asked to retry.

    What it does with a callback hangs on the callback alone, so that repetitions are treated alike. While `may_answer`
    is cleared it holds its answers back.
    """

    def __init__(self, sideline: Sideline, *, kindly: bool = False) -> None:
        self.callbacks: list[Callback] = []
        self.kindly = kindly
        self._sideline = sideline
        self._server: HttpServer | None = None
        self._may_answer = asyncio.Event()
        self._may_answer.set()

    async def start(self) -> None:
        await self._sideline.do(self._start())

    async def _start(self) -> None:
        self._server = server = await serve_http(
            self._receive, "127.0.0.1", 0, body_bytes_max=1 << 20, connections_max=4_000, idle_timeout_ms=600_000
        )
        self.url = f"http://127.0.0.1:{server.port}/hook"

    async def _receive(self, request: Request) -> Response:
        seen_at_ms = wall_ms()
        body = json.loads(request.body)
        call = Callback(
            timer=body["timerId"],
            value=str(body["payload"]),
            attempt=body["attempt"],
            started_at_ms=parse_instant(body["firedAt"]),
            seen_at_ms=seen_at_ms,
            fence=request.header(b"duetime-fence") or "",
            owner=(request.header(b"user-agent") or "").partition("/")[0],
            delivery=request.header(b"webhook-id") or "",
        )
        place = len(self.callbacks)
        self.callbacks.append(call)
        whim = 0 if self.kindly else zlib.crc32(call.delivery.encode()) % 100
        if whim >= 90:
            await asyncio.sleep((whim - 89) / 20)
        await self._may_answer.wait()
        if whim in (1, 2, 3, 90) and call.attempt == 1:
            return Response(500)
        self.callbacks[place] = msgspec.structs.replace(call, accepted_at_ms=wall_ms())
        return Response(200, body=b'{"ok": true}')

    async def called(self, count: int, within_seconds: float = 30) -> None:
        """Waits until there were so many callbacks."""

        async def were() -> bool:
            return len(self.callbacks) >= count

        await until(were, f"{count} callbacks", within_seconds)

    def hold(self) -> None:
        self._sideline.loop.call_soon_threadsafe(self._may_answer.clear)

    def let_go(self) -> None:
        self._sideline.loop.call_soon_threadsafe(self._may_answer.set)

    async def close(self) -> None:
        self.let_go()
        if self._server is not None:
            await self._sideline.do(self._server.close())


class Way:
    """A TCP way to a port. Its faults hold for the connections that are open and for those to come."""

    def __init__(self, sideline: Sideline, to_port: int) -> None:
        self.port = free_port()
        self._to_port = to_port
        self._sideline = sideline
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._delay_seconds = 0.0
        self._swallows_questions = self._swallows_answers = False

    async def open(self) -> None:
        await self._sideline.do(self._open())

    async def cut(self) -> None:
        """Connections break, and new ones are refused."""
        await self._sideline.do(self._close())

    async def reset(self) -> None:
        """Whatever is open is broken off in the middle; new ones work."""
        await self._sideline.do(self._close())
        await self._sideline.do(self._open())

    async def slow_down(self, delay_seconds: float) -> None:
        self._delay_seconds = delay_seconds

    async def swallow(self, *, questions: bool, answers: bool) -> None:
        """What is sent vanishes, and nobody is told. Deaf for `answers` only: everything asked for still happens."""
        self._swallows_questions, self._swallows_answers = questions, answers

    async def mend(self) -> None:
        """Connections on which something vanished are broken off: their two ends do not agree any more."""
        lossy = self._swallows_questions or self._swallows_answers
        self._delay_seconds, self._swallows_questions, self._swallows_answers = 0.0, False, False
        if lossy:
            await self._sideline.do(self._close())
        await self._sideline.do(self._open())

    async def close(self) -> None:
        await self._sideline.do(self._close())

    async def _open(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    async def _close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        onward: asyncio.StreamWriter | None = None
        try:
            answers, onward = await asyncio.open_connection("127.0.0.1", self._to_port)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass_on(reader, onward, questions=True))
                both.create_task(self._pass_on(answers, writer, questions=False))
        except* (OSError, RuntimeError, asyncio.CancelledError):  # uvloop's word for a closed end is RuntimeError
            pass
        finally:
            self._connections.discard(task)
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, questions: bool) -> None:
        while data := await source.read(_CHUNK_BYTES):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            if self._swallows_questions if questions else self._swallows_answers:
                continue
            target.write(data)
            await target.drain()
        raise ConnectionResetError  # one side has ended: so does the other


class ToxicWay:
    """The same by Toxiproxy."""

    def __init__(self, proxy: Toxiproxy, to_port: int) -> None:
        self._link = proxy.link(to_port)
        self.port = self._link.port
        self._toxics: list[str] = []

    async def open(self) -> None: ...

    async def cut(self) -> None:
        await asyncio.to_thread(self._link.cut)

    async def reset(self) -> None:
        """Whatever is open is broken off in the middle, by a reset."""
        await self._add("reset_peer", timeout=0)

    async def slow_down(self, delay_seconds: float) -> None:
        await self._add("latency", latency=int(delay_seconds * 1000))

    async def swallow(self, *, questions: bool, answers: bool) -> None:
        if questions:
            await self._add("timeout", upstream=True, timeout=0)
        if answers:
            await self._add("timeout", timeout=0)

    async def mend(self) -> None:
        while self._toxics:
            await asyncio.to_thread(self._link.remove, self._toxics.pop())
        await asyncio.to_thread(self._link.mend)

    async def close(self) -> None:
        await asyncio.to_thread(self._link.close)

    async def _add(self, kind: str, *, upstream: bool = False, **attributes: int) -> None:
        self._toxics.append(await asyncio.to_thread(lambda: self._link.add(kind, upstream=upstream, **attributes)))


class Instance(RealServer):
    """One of a cluster. `who` names this run of it, and changes with every start."""

    def __init__(
        self, name: str, folder: Path, database_url: str, way: Way | ToxicWay, program: tuple[str, ...] = SERVE
    ) -> None:
        folder.mkdir(exist_ok=True)
        super().__init__(folder, program=program, store_url=at_port(database_url, way.port))
        self.name = name
        self.way = way
        self.starts = 0
        self.struck = False  # a fault is under way
        self.leaving = False

    @property
    def who(self) -> str:
        return f"{self.name}.{self.starts}"

    def launch(self) -> None:
        self.starts += 1
        self.settings["DUETIME_DELIVERY_USER_AGENT"] = self.who
        super().launch()

    def _move(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    async def start_whatever_it_takes(self, within_seconds: float = 60) -> None:
        """As a supervisor does: one that ends because the database is away is started again."""

        async def is_ready() -> bool:
            if not self.is_running:
                if self.log.exists() and self.log.read_text().endswith("Address already in use\n"):
                    self._move()  # another program has taken it meanwhile
                self.launch()
            return await self.not_ready() is None and self.is_running

        await until(is_ready, f"{self.name} is ready; its log: {self.log}", within_seconds)


class Cluster:
    """Instances on one database. `call` is what a load balancer does: any instance that is not on its way out."""

    def __init__(
        self, folder: Path, database_url: str, rng: random.Random, new_way: Callable[[int], Way | ToxicWay]
    ) -> None:
        self.instances: list[Instance] = []
        self.gone: list[Instance] = []
        self._folder = folder
        self._database_url = database_url
        self._new_way = new_way
        self._rng = rng
        self._count = 0
        self._looking: Store | None = None

    async def new(self, program: tuple[str, ...] = SERVE, settings: Mapping[str, str] | None = None) -> Instance:
        """One more, not started yet."""
        self._count += 1
        name = f"n{self._count}"
        way = self._new_way(port_of(self._database_url))
        await way.open()
        instance = Instance(name, self._folder / name, self._database_url, way, program)
        instance.settings.update(settings or {})
        return instance

    async def join(self, program: tuple[str, ...] = SERVE, settings: Mapping[str, str] | None = None) -> Instance:
        """One more, serving."""
        instance = await self.new(program, settings)
        self.instances.append(instance)
        instance.leaving = True  # nobody is sent to it before it is ready
        await instance.start_whatever_it_takes()
        instance.leaving = False
        return instance

    async def leave(self, instance: Instance) -> int:
        """SIGTERM; answers its exit code. Nobody is sent to it from now on."""
        instance.leaving = True
        code = await instance.stop()
        self.instances.remove(instance)
        self.gone.append(instance)
        await instance.close()
        await instance.way.close()
        return code

    async def call(self, path: str, body: dict[str, Any], timeout_ms: int = 30_000) -> tuple[int, dict[str, Any]]:
        doors = [instance for instance in self.instances if not instance.leaving]
        return await self._rng.choice(doors).call(path, body, timeout_ms)

    async def looking(self) -> Store:
        """The database itself, by no way of an instance."""
        if self._looking is None:
            store = open_store(self._database_url)
            await store.open()
            self._looking = store
        return self._looking

    async def owners(self) -> dict[int, str]:
        """Shard by shard, the address of its owner; empty: nobody."""
        return {row.shard_id: row.owner_address or "" for row in await (await self.looking()).shards()}

    async def until_even(self, within_seconds: float = 60) -> None:
        """Every shard is owned by one of those that are here, and nobody has two more than another."""
        here = {f"127.0.0.1:{instance.port}" for instance in self.instances}

        async def is_even() -> bool:
            shares = Counter((await self.owners()).values())
            return shares.keys() == here and max(shares.values()) - min(shares.values()) <= 1

        await until(is_even, "the shards are spread evenly", within_seconds)

    async def until_all_have_fired(self, within_seconds: float = 120) -> None:
        """Invariant F, by the database itself: no timer is left in it."""

        store = await self.looking()
        requests = [PageRequest(row.shard_id, BEFORE_ALL, LATEST_MS, 1) for row in await store.shards()]

        async def is_empty() -> bool:
            return not any(page.timers for page in all_or_error(await store.load(requests)))

        await until(is_empty, "everything has fired", within_seconds)

    @property
    def logs(self) -> str:
        """Of all who are and were here."""
        return "".join(i.log.read_text() for i in (*self.gone, *self.instances) if i.log.exists())

    async def close(self) -> None:
        if self._looking is not None:
            await self._looking.close()
        for instance in self.instances:
            if instance.is_running:
                with suppress(ProcessLookupError):
                    os.kill(instance.pid, signal.SIGCONT)
            await instance.close()
            await instance.way.close()


def name_in(shard: int, text: str) -> str:
    """A timer id that belongs to the shard, in a namespace with the default number of them."""
    return next(name for n in range(10_000) if shard_of(name := f"{text} {n}", SHARDS) == shard)


@asynccontextmanager
async def staged(
    folder: Path,
    database_url: str,
    rng: random.Random,
    *,
    clients: int = 24,
    kindly: bool = False,
    proxy: Toxiproxy | None = None,
) -> AsyncIterator[tuple[Cluster, Load, Witness]]:
    """A cluster without instances yet, load for it, and the witness. Slow enough for two cores."""
    with Sideline() as sideline:
        witness = Witness(sideline, kindly=kindly)
        await witness.start()

        def new_way(to_port: int) -> Way | ToxicWay:
            return Way(sideline, to_port) if proxy is None else ToxicWay(proxy, to_port)

        cluster = Cluster(folder, database_url, random.Random(rng.random()), new_way)
        load = Load(cluster, witness, rng, clients)
        for client in load.clients:
            client.pace_seconds = 0.04
            client.leaves_unknown = True
        try:
            yield cluster, load, witness
        finally:
            await cluster.close()
            await witness.close()
