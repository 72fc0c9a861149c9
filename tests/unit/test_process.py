"""A process that serves: when it ends, and with which exit code."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from duetime.app import App
from duetime.config import Config, load_config
from duetime.descriptors import size
from duetime.engine.engine import Engine
from duetime.process import _serve, _until_stop
from duetime.telemetry import log


def configured(**flags: Any) -> Config:
    return load_config(environ={}, flags={path.replace("__", "."): value for path, value in flags.items()})


async def test_an_internal_error_in_the_engine_ends_the_process_with_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_break = asyncio.Event()

    async def bug(_: Engine) -> None:
        await may_break.wait()
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Engine, "_sweeps", bug)
    monkeypatch.setattr(log, "propagate", True)
    app = App(configured(server__listen="127.0.0.1:0", store__url="memory://"))
    await app.start()
    serving = asyncio.ensure_future(_until_stop(app, asyncio.Event()))
    await asyncio.sleep(0)
    assert not serving.done()
    may_break.set()
    assert await serving == 1
    assert "stopping after an internal error in the engine" in caplog.text
    assert app.parts.not_ready() == "ended by an internal error: the log says which; restart this instance"
    await app.stop()


async def test_a_process_of_which_a_part_cannot_end_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever restarts it must not take it for one that has drained."""

    async def bug(_: Engine) -> None:
        raise ZeroDivisionError("a bug")

    async def at_once(*_: object) -> int:
        return 0

    config = configured(server__listen="127.0.0.1:0", store__url="memory://")
    monkeypatch.setattr("duetime.process._until_stop", at_once)
    assert await _serve(config, size(None, config), None) == 0
    monkeypatch.setattr(Engine, "stop", bug)
    assert await _serve(config, size(None, config), None) == 1


async def test_a_stopped_process_ends_without_an_error() -> None:
    app = App(configured(server__listen="127.0.0.1:0", store__url="memory://"))
    await app.start()
    stop = asyncio.Event()
    stop.set()
    assert await _until_stop(app, stop) == 0
    await app.stop()
