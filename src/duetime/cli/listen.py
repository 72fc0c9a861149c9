"""listen: a local receiver that prints each callback on one line, checks signatures, and answers as the options say."""

from __future__ import annotations

import asyncio
import errno
from argparse import Namespace as Arguments
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from duetime.cli.errors import UsageError
from duetime.cli.output import format_lateness, local_time, now_ms, print_json, print_line, shorten, styled, to_json
from duetime.client import Callback, DuetimeError, again_at, ok, read_callback, retry
from duetime.domain.instants import parse_duration
from duetime.errors import SetupError
from duetime.http.messages import Handler, Request, Response
from duetime.http.server import HttpServer, serve_http
from duetime.signing import SignatureError, check_secret
from duetime.signing import verify as verify_signature

__all__ = ["ReceivedCallback", "listen", "read_request", "start_receiver"]


class ReceivedCallback(Struct, frozen=True):
    """A callback, and the result of checking its signature: "ok", "none", "not checked", or "bad: …"."""

    callback: Callback
    signature: str
    refused: bool = False  # secrets were given, and it was not signed with any of them


def read_request(request: Request, secrets: Sequence[str]) -> ReceivedCallback:
    callback = read_callback(request.body, request.headers)
    if request.header(b"webhook-signature") is None:
        return ReceivedCallback(callback, "none", refused=bool(secrets))
    if not secrets:
        return ReceivedCallback(callback, "not checked")
    try:
        verify_signature(request.body, request.headers, secrets, now_s=now_ms() / 1_000)
    except SignatureError as error:
        return ReceivedCallback(callback, f"bad: {error}", refused=True)
    return ReceivedCallback(callback, "ok")


async def start_receiver(host: str, port: int, handler: Handler) -> HttpServer:
    try:
        return await serve_http(
            handler, host, port, body_bytes_max=16 * 1024 * 1024, connections_max=1_024, idle_timeout_ms=75_000
        )
    except OSError as error:
        in_use = "the port is in use; --port 0 chooses a free port" if error.errno == errno.EADDRINUSE else ""
        raise SetupError(f"cannot listen on {host}:{port}: {in_use or error.strerror or error}") from None


async def listen(arguments: Arguments) -> int:
    answer_of = _answer(arguments.answer)
    delay_s = _milliseconds("--delay", arguments.delay) / 1_000
    for secret in arguments.secret:
        _check_secret(secret)
    enough = asyncio.Event()
    count = 0

    async def handle(request: Request) -> Response:
        nonlocal count
        try:
            what = read_request(request, arguments.secret)
        except DuetimeError as error:
            _print_other(request, error, as_json=arguments.json)
            return Response(400, b"")
        _print(what, as_json=arguments.json)
        if what.refused:
            return Response(401, b"")
        count += 1
        if delay_s:
            await asyncio.sleep(delay_s)
        if arguments.once and count >= arguments.once:
            enough.set()
        return Response(arguments.status, answer_of())

    server = await start_receiver(arguments.host, arguments.port, handle)
    if not arguments.json:
        print_line(f"listening on http://{arguments.host}:{server.port}/ (Ctrl-C ends)")
        if not arguments.secret:
            print_line(styled("signatures are not checked: give --secret to check them", "dim"))
    try:
        await enough.wait()
    except asyncio.CancelledError:
        return 0  # Ctrl-C is the normal end
    finally:
        await server.close(drain_ms=1_000)
    return 0


def _answer(text: str) -> Callable[[], bytes]:
    kind, _, value = text.partition("=")
    if text == "ok":
        return ok
    if text == "fail":
        return retry
    if kind == "again":
        after = timedelta(milliseconds=_milliseconds("--answer again", value))
        return lambda: again_at(datetime.fromtimestamp(now_ms() / 1_000, UTC) + after)
    raise UsageError(f"--answer {text}: must be ok, fail, or again=DURATION as in again=10s")


def _milliseconds(option: str, text: str) -> int:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise UsageError(f"{option} {error}") from None


def _check_secret(secret: str) -> None:
    try:
        check_secret(secret)
    except ValueError as error:
        raise UsageError(f"--secret {error}") from None


def _print(what: ReceivedCallback, *, as_json: bool) -> None:
    callback = what.callback
    late_by_ms = callback.late_by.total_seconds() * 1_000
    if as_json:
        print_json({"callback": callback, "lateByMs": round(late_by_ms), "signature": what.signature}, flush=True)
    else:
        style = "red" if what.refused else "green" if what.signature == "ok" else "dim"
        correlation = [] if callback.correlation_id is None else [f"correlation id {callback.correlation_id}"]
        payload = "" if callback.payload is None else shorten(to_json(callback.payload), 60)
        print_line(
            local_time(),
            styled(f"{callback.namespace}/{callback.timer_id}", "bold"),
            f"attempt {callback.attempt}",
            format_lateness(late_by_ms),
            *correlation,
            styled(f"signature {what.signature}{', refused' * what.refused}", style),
            payload,
        )


def _print_other(request: Request, error: DuetimeError, *, as_json: bool) -> None:
    """Prints a request that is not a callback."""
    if as_json:
        print_json({"method": request.method, "path": request.path, "error": error.detail}, flush=True)
    else:
        print_line(local_time(), f"{request.method} {request.path}", error.detail)
