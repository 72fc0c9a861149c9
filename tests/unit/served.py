"""An HTTP server for a test, and what is needed to speak to it over real sockets."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from duetime.http.messages import Request, Response, problem_response
from duetime.http.server import HttpServer, serve_http

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Scenario = Callable[[], Coroutine[Any, Any, None]]
MIB = 1 << 20


async def echo(request: Request) -> Response:
    head = f"{request.method} {request.path} ".encode()
    return Response(200, head + request.body, b"text/plain")


@asynccontextmanager
async def serving(
    handler: Callable[[Request], Awaitable[Response]] = echo,
    *,
    body_bytes_max: int = 100_000,
    connections_max: int = 100,
    idle_timeout_ms: int = 60_000,
    **options: Any,
) -> AsyncIterator[HttpServer]:
    server = await serve_http(
        handler,
        "127.0.0.1",
        0,
        body_bytes_max=body_bytes_max,
        connections_max=connections_max,
        idle_timeout_ms=idle_timeout_ms,
        **options,
    )
    try:
        yield server
    finally:
        await server.close(0)


@asynccontextmanager
async def connected(server: HttpServer) -> AsyncIterator[tuple[Reader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def read_answer(reader: Reader, *, head_only: bool = False) -> tuple[int, dict[str, str], bytes]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)).decode("latin-1")
    status_line, *lines = head.strip().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    size = 0 if head_only else int(headers.get("content-length", "0"))
    return int(status_line.split()[1]), headers, await asyncio.wait_for(reader.readexactly(size), 10)


async def ask(server: HttpServer, data: bytes) -> tuple[int, dict[str, str], bytes]:
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await read_answer(reader)


def post(body: bytes = b"", path: str = "/p", *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: h", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def by_token(request: Request) -> int | Response:
    """Admits requests with a token, which is the name of the tenant, with bodies up to 16 MiB."""
    if request.path == "/healthz":
        return 0
    token = request.header(b"authorization")
    if token is None:
        return problem_response(401, "unauthenticated", "no token")
    request.tenant = token
    request.admitted = token
    return 16 * MIB


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that the server does after it has received what was sent."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def head(size: int, *headers: str) -> bytes:
    return post(b"", "/p", *headers).replace(b"content-length: 0", b"content-length: %d" % size)


def on_uvloop_too(module: dict[str, Any]) -> pytest.MarkDecorator:
    """For a test that runs on uvloop those tests of its module that need no fixture: the transports of uvloop differ
    from asyncio's in small ways."""
    tests = [
        test
        for name, test in module.items()
        if name.startswith("test_") and inspect.iscoroutinefunction(test) and not inspect.signature(test).parameters
    ]
    if sys.platform == "win32":
        return pytest.mark.skip(reason="there is no uvloop on Windows")
    return pytest.mark.parametrize("scenario", tests, ids=lambda test: test.__name__)


def run_on_uvloop(scenario: Scenario) -> None:
    import uvloop

    uvloop.run(scenario())
