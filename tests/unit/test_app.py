"""An instance: how it starts, and what it answers meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from duetime.app import App
from duetime.config import Config, load_config
from duetime.errors import SetupError
from duetime.http.client import HttpClient
from duetime.http.listeners import bind_sockets
from duetime.stores.memory import MemoryStore
from duetime.testing.faulty import FaultyStore


def configured(**flags: Any) -> Config:
    return load_config(environ={}, flags={path.replace("__", "."): value for path, value in flags.items()})


@contextlib.asynccontextmanager
async def starting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instance whose store opens only after the returned event is set."""
    store = FaultyStore(MemoryStore())
    may_go_on = store.hold("migrate")
    monkeypatch.setattr("duetime.app.open_store", lambda url: store)
    app = App(configured(server__listen="127.0.0.1:0"))
    start = asyncio.ensure_future(app.start())
    while not store.calls["migrate"]:
        await asyncio.sleep(0)
    http = HttpClient()
    try:
        yield app, http, may_go_on, start
    finally:
        may_go_on.set()
        await start
        await http.close()
        await app.stop()


async def test_requests_get_503_until_the_engine_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async with starting(monkeypatch) as (app, http, may_go_on, start):
        url = f"http://127.0.0.1:{app.address[1]}"
        alive = await http.request("GET", f"{url}/healthz", timeout_ms=5_000)
        ready = await http.request("GET", f"{url}/readyz", timeout_ms=5_000)
        created = await http.request("POST", f"{url}/api/v1/timers/create", {}, b"{}", timeout_ms=5_000)
        assert (alive.status, ready.status, ready.body) == (200, 503, b"not ready: starting\n")
        assert created.status == 503
        assert b'"not_applied"' in created.body
        may_go_on.set()
        await start
        ready = await http.request("GET", f"{url}/readyz", timeout_ms=5_000)
        assert ready.status == 200


async def test_two_instances_that_start_at_once_on_an_empty_store_both_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find no namespace `default`, and both set out to make it."""
    store = FaultyStore(MemoryStore())
    may_go_on = store.hold("put_namespace")
    monkeypatch.setattr("duetime.app.open_store", lambda url: store)
    apps = [App(configured(server__listen="127.0.0.1:0", engine__heartbeat_interval="50ms")) for _ in range(2)]
    starts = [asyncio.ensure_future(app.start()) for app in apps]
    while store.calls["put_namespace"] < 2:
        await asyncio.sleep(0)
    may_go_on.set()
    await asyncio.gather(*starts)
    for app in apps:
        await app.stop()


async def test_the_member_row_has_the_port_that_was_bound() -> None:
    app = App(configured(server__listen="127.0.0.1:0", store__url="memory://"))
    await app.start()
    try:
        assert app.advertised == f"127.0.0.1:{app.address[1]}"
        assert app.address[1] != 0
        http = HttpClient()
        url = f"http://127.0.0.1:{app.address[1]}/api/v1/cluster/status"
        status = await http.request("POST", url, {"content-type": "application/json"}, b"{}", timeout_ms=5_000)
        await http.close()
        assert f'"{app.advertised}"'.encode() in status.body
    finally:
        await app.stop()


async def test_a_port_in_use_is_reported_before_the_store_is_opened(tmp_path: Path) -> None:
    (taken,) = bind_sockets("127.0.0.1", 0)
    with taken:
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SetupError, match=f"cannot listen on {listen}: Address already in use"):
            await App(configured(server__listen=listen, store__url=f"sqlite:///{tmp_path}/timers.db")).start()
    assert list(tmp_path.iterdir()) == []


def test_every_address_of_a_host_is_bound_at_one_port() -> None:
    sockets = bind_sockets("localhost", 0)
    assert len({sock.getsockname()[1] for sock in sockets}) == 1
    for sock in sockets:
        sock.close()
