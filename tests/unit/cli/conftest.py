"""Runs a command in this process, with or without a real server on a store in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from command_line import Run
from threaded_server import free_port, serving

from duetime.cli import main


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(free_port()) as url:
        yield url


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    for name in [name for name in os.environ if name.startswith("DUETIME_")]:
        monkeypatch.delenv(name)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


@pytest.fixture
def at(run: Run, server: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the server."""
    monkeypatch.setenv("DUETIME_URL", server)
    return run
