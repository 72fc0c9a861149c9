"""What the HTTP server holds in memory of answers that clients do not read. Over real sockets."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest
from served import MIB, Scenario, by_token, connected, on_uvloop_too, post, read_answer, run_on_uvloop, serving, until

from duetime.http import server as http_server
from duetime.http.messages import Request, Response


async def large(request: Request) -> Response:
    return Response(200, b"x" * int(request.path[1:]))


async def test_answers_that_nobody_reads_are_bounded() -> None:
    """A hundred clients ask for 8 MiB ten times each and read nothing."""
    async with (
        serving(large, admit=by_token, connections_max=200, buffered_bytes_max=32 * MIB) as server,
        connected(server) as (reader, writer),
        AsyncExitStack() as stack,
    ):
        most = 0
        for _ in range(100):
            _, unread = await stack.enter_async_context(connected(server))
            unread.transport.pause_reading()  # type: ignore[attr-defined]
            before = set(server.unread.connections)
            unread.write(post(b"", f"/{8 * MIB}", "authorization: mean") * 10)
            await until(lambda before=before: bool(set(server.unread.connections) - before))  # type: ignore[misc]
            held = sum(each.unsent_bytes() for each in server.unread.connections)
            most = max(most, held)
            assert server.unread.bytes <= 32 * MIB
        assert most <= 32 * MIB
        writer.write(post(b"", f"/{MIB}", "authorization: other"))
        assert len((await read_answer(reader))[2]) == MIB
    assert server.unread.bytes == 0


async def test_the_slowest_connection_of_the_tenant_with_most_unread_answers_is_closed() -> None:
    async with serving(large, admit=by_token, buffered_bytes_max=20 * MIB) as server, AsyncExitStack() as stack:
        clients = []
        for tenant in ("good", "mean", "mean", "mean"):
            reader, writer = await stack.enter_async_context(connected(server))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            before = set(server.unread.connections)
            writer.write(post(b"", f"/{8 * MIB}", f"authorization: {tenant}"))
            await until(lambda before=before: bool(set(server.unread.connections) - before))  # type: ignore[misc]
            clients.append((reader, writer))
        assert {each.tenant for each in server.unread.connections} == {"good", "mean"}
        reader, writer = clients[0]
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await read_answer(reader))[2]) == 8 * MIB


async def test_a_client_that_does_not_read_its_last_answer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SWEEP_SECONDS", 0.001)
    async with serving(large, idle_timeout_ms=10) as server, connected(server) as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post(b"", f"/{16 * MIB}", "connection: close"))
        await until(lambda: server.unread.bytes > 0)
        await until(lambda: not server.connections)
        assert server.unread.bytes == 0


@on_uvloop_too(globals())
def test_the_same_holds_on_uvloop(scenario: Scenario) -> None:
    run_on_uvloop(scenario)
