"""The API as a plain ASGI 3 application, so that any server can run it in place of ours."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from duetime.http.server import Handler, Request, Response, problem_response

__all__ = ["asgi_app"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def asgi_app(handler: Handler, *, body_bytes_max: int) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _answer(handler, body_bytes_max, scope, receive, send)
        else:
            raise NotImplementedError(f"Duetime does not speak {scope['type']}")

    return app


async def _answer(handler: Handler, body_bytes_max: int, scope: Scope, receive: Receive, send: Send) -> None:
    parts: list[bytes] = []
    size = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        more = message.get("more_body", False)
        if size > body_bytes_max:
            detail = f"the body is larger than {body_bytes_max} bytes"
            await _send(send, problem_response(413, "too_large", detail, (("connection", "close"),)))
            return
    await _send(send, await handler(_request(scope, b"".join(parts))))


async def _live(receive: Receive, send: Send) -> None:
    """Nothing is started or stopped with the server: whoever built the handler does that."""
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _request(scope: Scope, body: bytes) -> Request:
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        headers[name] = headers[name] + b", " + value if name in headers else value
    client = scope.get("client")
    return Request(
        scope["method"],
        scope["path"],
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=headers,
        body=body,
        client=client[0] if client else "",
    )


async def _send(send: Send, response: Response) -> None:
    headers = [
        (b"content-type", response.content_type),
        (b"content-length", b"%d" % len(response.body)),
        *((name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers),
    ]
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send({"type": "http.response.body", "body": response.body})
