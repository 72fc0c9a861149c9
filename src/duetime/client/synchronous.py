"""Client: the methods of AsyncClient for code without an event loop.

A typed wrapper makes each method from the async one, so that nothing is implemented twice. Calls run on a private
event loop in a thread, which is started at the first call. Threads may share a Client. After a fork, the child process
gets its own thread and connections.
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


class _SyncFacade(Protocol[A]):
    """A synchronous object that runs the methods of an asynchronous one."""

    def _async_object(self) -> A: ...
    def _run(self, call: Coroutine[Any, Any, R]) -> R: ...


def _sync(method: Callable[Concatenate[B, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[_SyncFacade[B], P], R]:
    @functools.wraps(method)
    def call(self: _SyncFacade[B], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._run(method(self._async_object(), *args, **kwargs))

    return call


def _sync_items(
    pages: Callable[Concatenate[B, P], AsyncIterator[list[R]]],
) -> Callable[Concatenate[_SyncFacade[B], P], Iterator[R]]:
    """Iterates over the items of all pages. The event loop is called once for each page."""

    @functools.wraps(pages)
    def call(self: _SyncFacade[B], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        iterator = pages(self._async_object(), *args, **kwargs)
        while (page := self._run(_next(iterator))) is not None:
            yield from page

    return call


async def _next(pages: AsyncIterator[list[R]]) -> list[R] | None:
    return await anext(pages, None)


class _LoopThread:
    """An event loop in a thread, and the AsyncClient that uses this loop."""

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
            future.cancel()  # after Ctrl-C the call must not continue in the background
            raise

    def stop(self) -> None:
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        if threading.current_thread() is self._thread:  # garbage collection ran on the loop thread
            self.loop.stop()
            return
        with contextlib.suppress(Exception):
            self.run(self.client.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


# Loop threads of a parent process, as seen by a forked child. Both processes share their selectors. A reference is
# kept, so that no destructor closes in the child what the parent still uses.
_parent_threads: list[_LoopThread] = []


class Client:
    """AsyncClient for synchronous code: the same arguments and methods, but they return results, not awaitables.

    Use it as a context manager, or call close(). At the end of the process it is closed automatically.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        token: str | None = None,
        *,
        namespace: str = "default",
        timeout: float = 15.0,  # longer than the server takes to answer that nothing was applied
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
        self.urls = self._make().urls  # raises SetupError for a malformed URL or token
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
    pause = _sync(AsyncClient.pause)
    resume = _sync(AsyncClient.resume)
    preview_schedule = _sync(AsyncClient.preview_schedule)
    list_flows = _sync_items(AsyncClient.flow_pages)
    list_flows_page = _sync(AsyncClient.list_flows_page)
    get_flow = _sync(AsyncClient.get_flow)
    update_flow = _sync(AsyncClient.update_flow)
    pause_flow = _sync(AsyncClient.pause_flow)
    resume_flow = _sync(AsyncClient.resume_flow)
    pause_namespace = _sync(AsyncClient.pause_namespace)
    resume_namespace = _sync(AsyncClient.resume_namespace)
    cluster_status = _sync(AsyncClient.cluster_status)
    ready = _sync(AsyncClient.ready)

    def _async_object(self) -> AsyncClient:
        return self._loop_thread().client

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._loop_thread().run(call)

    def _loop_thread(self) -> _LoopThread:
        thread = self._thread
        if thread is not None and thread.pid == os.getpid():
            return thread
        if thread is not None and thread.pid != os.getpid():
            self._lock = threading.Lock()  # a thread of the parent may have held it during the fork
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            thread = self._thread
            if thread is not None and thread.pid == os.getpid():
                return thread
            if thread is not None:
                _parent_threads.append(thread)
            self._thread = thread = _LoopThread(self._make)
            weakref.finalize(self, thread.stop)  # also at exit
            return thread


class Namespaces:
    """`client.namespaces`: namespaces of timers, and the defaults of their timers."""

    def __init__(self, client: Client) -> None:
        self._client = client

    create = _sync(AsyncNamespaces.create)
    get = _sync(AsyncNamespaces.get)
    list = _sync(AsyncNamespaces.list)
    update = _sync(AsyncNamespaces.update)
    pause = _sync(AsyncNamespaces.pause)
    resume = _sync(AsyncNamespaces.resume)
    delete = _sync(AsyncNamespaces.delete)

    def _async_object(self) -> AsyncNamespaces:
        return self._client._async_object().namespaces

    def _run(self, call: Coroutine[Any, Any, R]) -> R:
        return self._client._run(call)
