"""Client: the methods of AsyncClient for code without an event loop.

Nothing is written twice: each method is made from the async one by a typed wrapper, and runs on a private
event loop in a thread, started when first needed. May be shared by threads. After a fork the child gets a
thread and connections of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, Self, TypeVar

from duetime.client.asynchronous import RETRIES, AsyncClient, AsyncNamespaces
from duetime.client.routing import Direct

__all__ = ["Client", "Namespaces"]

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A", covariant=True)
B = TypeVar("B")


class _Facade(Protocol[A]):
    """Something sync in front of something async."""

    def _behind(self) -> A: ...
    def _run(self, call: Coroutine[Any, Any, R]) -> R: ...


def _sync(method: Callable[Concatenate[B, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[_Facade[B], P], R]:
    @functools.wraps(method)
    def call(self: _Facade[B], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(method(self._behind(), *args, **kwargs))

    return call


def _sync_items(
    pages: Callable[Concatenate[B, P], AsyncIterator[list[R]]],
) -> Callable[Concatenate[_Facade[B], P], Iterator[R]]:
    """All items of all pages; a page costs one trip to the loop, an item none."""

    @functools.wraps(pages)
    def call(self: _Facade[B], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        iterator = pages(self._behind(), *args, **kwargs)
        while (page := self._run(_next(iterator))) is not None:
            yield from page

    return call


async def _next(pages: AsyncIterator[list[R]]) -> list[R] | None:
    return await anext(pages, None)


class _LoopThread:
    """An event loop in a thread, with the AsyncClient that lives on it."""

    def __init__(self, make: Callable[[], AsyncClient]) -> None:
        self.pid = os.getpid()
        self.client = make()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="duetime-client", daemon=True)
        self._thread.start()

    def run(self, call: Coroutine[Any, Any, R]) -> R:
        future = asyncio.run_coroutine_threadsafe(call, self.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C while waiting: the call must not go on behind our back
            raise

    def stop(self) -> None:
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        if threading.current_thread() is self._thread:  # collected as garbage on the loop itself
            self.loop.stop()
            return
        with contextlib.suppress(Exception):
            self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


# Loops of a parent process. Their selectors are shared with it: they are kept, untouched, so that no
# destructor closes what the parent still uses.
_left_behind: list[_LoopThread] = []


class Client:
    """AsyncClient's twin for ordinary code: the same arguments, the same methods, results instead of awaitables.

    Use it as a context manager, or close() it; at the end of the process it closes itself.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = 15.0,  # more than the server takes to say that nothing was applied
        retries: int = RETRIES,
        coalesce: bool = False,
        direct: Direct = False,
    ) -> None:
        self._make = functools.partial(
            AsyncClient,
            url,
            token,
            namespace=namespace,
            timeout=timeout,
            retries=retries,
            coalesce=coalesce,
            direct=direct,
        )
        self._thread: _LoopThread | None = None
        self._closed = False
        self._lock = threading.Lock()
        self.urls = self._make().urls  # a malformed URL or token is noticed here
        self.url = self.urls[0]
        self.namespace = namespace
        self.namespaces = Namespaces(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()

    create = _sync(AsyncClient.create)
    create_many = _sync(AsyncClient.create_many)
    get = _sync(AsyncClient.get)
    update = _sync(AsyncClient.update)
    delete = _sync(AsyncClient.delete)
    delete_many = _sync(AsyncClient.delete_many)
    list = _sync_items(AsyncClient.pages)
    list_page = _sync(AsyncClient.list_page)
    fire_now = _sync(AsyncClient.fire_now)
    replay = _sync(AsyncClient.replay)
    cluster_status = _sync(AsyncClient.cluster_status)
    ready = _sync(AsyncClient.ready)

    def _behind(self) -> AsyncClient:
        return self._on_thread().client

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._on_thread().run(call)

    def _on_thread(self) -> _LoopThread:
        thread = self._thread
        if thread is not None and thread.pid == os.getpid():
            return thread
        if thread is not None and thread.pid != os.getpid():
            self._lock = threading.Lock()  # the parent may have held it at the moment of the fork
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            thread = self._thread
            if thread is not None and thread.pid == os.getpid():
                return thread
            if thread is not None:
                _left_behind.append(thread)
            self._thread = thread = _LoopThread(self._make)
            weakref.finalize(self, thread.stop)  # also at exit
            return thread


class Namespaces:
    """`client.namespaces`: the scopes of timers, and their defaults."""

    def __init__(self, client: Client) -> None:
        self._client = client

    create = _sync(AsyncNamespaces.create)
    get = _sync(AsyncNamespaces.get)
    list = _sync(AsyncNamespaces.list)
    update = _sync(AsyncNamespaces.update)
    delete = _sync(AsyncNamespaces.delete)

    def _behind(self) -> AsyncNamespaces:
        return self._client._behind().namespaces

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._client._run(call)
