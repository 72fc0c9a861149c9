"""Arguments of commands: wrong usage is named, and every command has a help text."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator

import pytest
from command_line import HOOK, Run

from duetime.cli.arguments import build_parser


def every_command(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, below in action.choices.items():
                yield from every_command(below, (*path, name))


@pytest.mark.parametrize("path", list(every_command(build_parser())), ids=" ".join)
def test_the_help_of_every_command_shows_how_it_is_used(path: tuple[str, ...], run: Run) -> None:
    code, out, _ = run(*path, "--help")
    assert code == 0
    assert "example" in out
    assert f"  {' '.join(('duetime', *path))}" in out


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["timer", "create"], ["timer", "create", "a", "--in", "1s", "--at", "x"]]
)
def test_wrong_usage_ends_with_2(run: Run, arguments: list[str]) -> None:
    code, _, err = run(*arguments)
    assert code == 2
    assert "usage:" in err
    assert len(err.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["timer", "list", "--sate", "failed"], "did you mean --state?\nusage: duetime timer list [options]"),
        (["timer", "list", "--state", "faild"], "did you mean failed?"),
        (["timer", "craete", "x"], "did you mean create?\nusage: duetime timer COMMAND"),
        (["timer", "create", "x", "--to", HOOK], "one of --in, --at and --timezone is required"),
        (["timer", "list", "--limit", "-1"], "--limit: must be a whole number of at least 0"),
        (["timer", "get", "x", "--timeout", "-1"], "--timeout: must be a number of seconds"),
        (["listen", "--port", "99999"], "--port: must be a whole number between 0 and 65535"),
        (["listen", "--status", "50"], "--status: must be a whole number between 200 and 599"),
        (["listen", "--once", "0"], "--once: must be a whole number of at least 1"),
        (["demo", "--port", "-1"], "--port: must be a whole number between 0 and 65535"),
        (["serve", "--listen", "127.0.0.1:99999"], "--listen: the port must be a whole number between 0 and 65535"),
        (["serve", "--listen", "8463"], "--listen: must be HOST:PORT"),
        (["serve", "--store", "foo.db"], "sqlite:///foo.db"),
    ],
)
def test_a_wrong_argument_is_named_with_a_suggestion(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("duetime: ")
    assert said in err


def test_the_help_needs_neither_server_nor_event_loop() -> None:
    program = (
        "import sys; from duetime.cli import main; main(['timer', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"asyncio", "apsw", "httptools", "duetime.client", "duetime.app"}
