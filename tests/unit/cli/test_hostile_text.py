"""Text that other users choose never reaches a terminal as it is, through every command."""

from __future__ import annotations

import argparse
import ast
import asyncio
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from threaded_server import free_port, serving

import duetime.cli
from duetime.cli import main, output
from duetime.cli.arguments import build_parser
from duetime.cli.demo import DemoReceiver
from duetime.cli.diagnosis import WRONG, Finding, with_mark
from duetime.cli.doctor import _report
from duetime.cli.errors import print_error
from duetime.cli.listen import _print, _print_other, read_request
from duetime.cli.output import print_line
from duetime.client import Client
from duetime.errors import Conflict, InvalidField
from duetime.http.messages import Request

Run = Callable[..., tuple[int, str, str]]

# Every control, bidi and format character that a terminal may obey.
OBEYED = [c for c in map(chr, range(1, 0x1_0000)) if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")]
IDS = [f"<{''.join(OBEYED[start : start + 60])}>" for start in range(0, len(OBEYED), 60)]
ERROR = f"boom {''.join(OBEYED)} end"
BY_ID = ("get", "update", "delete", "watch", "fire-now", "replay", "pause", "resume", "create")


@pytest.fixture
def at(server: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the server: its exit code, and what it printed."""
    monkeypatch.setenv("DUETIME_URL", server)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def assert_harmless(*texts: str) -> None:
    for line in "".join(texts).split("\n"):
        assert line.isprintable(), ascii(line)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A server with timers, a namespace and errors whose text is hostile."""
    with serving(free_port()) as url:
        with Client(url) as client:
            for timer_id in IDS:
                client.create(
                    timer_id,
                    delay="1h",
                    callback_url="http://127.0.0.1:9/hook",
                    payload={"text": timer_id},
                    tags=[timer_id[:16]],
                    correlation_id=timer_id,
                )
        yield url


@pytest.fixture(params=[False, True], ids=["plain", "colours"])
def _colours(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_use_colours", lambda: request.param)


def without_styles(text: str) -> str:
    """What is left when the sequences are removed that `styled` may add: none of them is of another user."""
    for code in ("0", "1", "2", "31", "32", "33", "36"):
        text = text.replace(f"\033[{code}m", "")
    return text


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize("command", BY_ID)
def test_no_command_about_a_timer_prints_its_id_as_it_is(at: Run, command: str) -> None:
    options = {
        "update": ["--correlation-id", "x"],
        "create": ["--in", "1h", "--to", "http://127.0.0.1:9/hook"],
        "watch": ["--timeout", "5"],
    }
    for timer_id in [] if command == "watch" else IDS:  # watch would wait for an hour
        for extra in ([], ["--json"]):
            shown = at("timer", command, *options.get(command, []), *extra, "--", timer_id)
            assert_harmless(*map(without_styles, shown[1:]))
            missing = at("timer", command, *options.get(command, []), *extra, "--", timer_id + "no")
            assert_harmless(*map(without_styles, missing[1:]))


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize(
    "arguments",
    [
        ("timer", "list", "--limit", "0"),
        ("timer", "list", "--tag", IDS[0][:16]),
        ("timer", "list", "--tag", "x" * 300 + ERROR),
        ("namespace", "list"),
        ("namespace", "get", ERROR),
        ("namespace", "create", ERROR),
        ("namespace", "delete", ERROR),
        ("namespace", "rotate-secret", ERROR),
        ("namespace", "pause", ERROR),
        ("namespace", "resume", ERROR),
        ("flow", "pause", IDS[0]),
        ("flow", "get", IDS[0]),
        ("flow", "list"),
        ("flow", "update", IDS[1], "--rate", "5"),
        ("flow", "resume", IDS[0]),
        ("flow", "get", ERROR, "--namespace", ERROR),
        ("cluster", "status", "--shards"),
        ("doctor", "--store", f"memory://{IDS[1]}"),
        ("doctor", "--store", "memory://"),
        ("config", "show", "--set", f"delivery.user_agent={ERROR}"),
        ("config", "show", "--env", "--set", f"delivery.user_agent={ERROR}"),
        ("config", "show", "--config", f"/nowhere/{ERROR.replace(chr(0), '')}"),
        ("serve", "--set", ERROR),
        ("serve", "--store", ERROR),
        ("listen", "--answer", ERROR),
        ("listen", "--secret", ERROR),
        ("timer", ERROR),
        (ERROR,),
        ("token", "new", "--all", "--name", ERROR),
    ],
    ids=lambda arguments: " ".join(part for part in arguments if part.isascii() and len(part) < 30),
)
def test_no_other_command_prints_hostile_text_as_it_is(at: Run, arguments: Sequence[str]) -> None:
    for extra in ([], ["--json"]):
        code, out, err = at(*arguments, *extra)
        assert_harmless(without_styles(out), without_styles(err))
        if "--json" in extra and code == 0:
            assert [json.loads(line) for line in out.splitlines()] or True


def test_json_output_has_the_hostile_id_as_it_was(at: Run) -> None:
    _, out, _ = at("timer", "list", "--limit", "0", "--json")
    assert {json.loads(line)["timerId"] for line in out.splitlines()} >= set(IDS)


def test_every_command_is_in_these_tests_or_prints_only_its_own_text() -> None:
    """A new command has to be added here."""
    known = {
        "demo",
        "help",
        "version",
        "timer",
        "namespace",
        "cluster",
        "config",
        "doctor",
        "serve",
        "listen",
        "token",
        "flow",
        "schedule",
    }
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    assert set(commands.choices) <= known
    (of_timers,) = (a for a in commands.choices["timer"]._actions if isinstance(a, argparse._SubParsersAction))
    assert set(of_timers.choices) == {*BY_ID, "list"}


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize("as_json", [False, True])
def test_errors_of_a_server_are_escaped(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    for error in (Conflict(ERROR), InvalidField(ERROR, ERROR), Conflict(f"the namespace '{ERROR}'")):
        error.code = "namespace_not_found"
        print_error(error, as_json=as_json)
        assert_harmless(*capsys.readouterr())


def callback(**fields: Any) -> Request:
    body = {
        "namespace": IDS[0],
        "timerId": ERROR,
        "attempt": 1,
        "scheduledAt": "2027-01-01T09:00:00Z",
        "executeAt": "2027-01-01T09:00:00Z",
        "firedAt": "2027-01-01T09:00:00Z",
        "correlationId": ERROR,
        "payload": {ERROR: ERROR},
    }
    return Request("POST", f"/{ERROR}", body=json.dumps(body | fields).encode())


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize("as_json", [False, True])
def test_listen_escapes_callbacks_and_other_requests(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    _print(read_request(callback(), []), as_json=as_json)
    _print_other(callback(), Conflict(ERROR), as_json=as_json)
    assert_harmless(*map(without_styles, capsys.readouterr()))


@pytest.mark.usefixtures("_colours")
def test_the_demo_escapes_callbacks(capsys: pytest.CaptureFixture[str]) -> None:
    async def receive() -> None:
        await DemoReceiver().handle(callback())

    asyncio.run(receive())
    out = capsys.readouterr().out
    assert "fired" in out
    assert_harmless(without_styles(out))


@pytest.mark.usefixtures("_colours")
@pytest.mark.parametrize("as_json", [False, True])
def test_doctor_and_status_escape_their_findings(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    finding = Finding("members", WRONG, ERROR, ERROR, ERROR)
    _report([finding], as_json=as_json)
    print_line(with_mark(finding, ERROR))
    assert_harmless(*map(without_styles, capsys.readouterr()))


@pytest.mark.usefixtures("_colours")
def test_tables_fields_and_lines_escape_what_is_not_styled(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table([ERROR, "b"], [(ERROR, output.styled(ERROR, "bold"))])
    output.print_fields([("a", ERROR), ("b", output.styled(ERROR, "red"))])
    print_line(ERROR, output.styled_state(ERROR))
    output.print_json({"a": ERROR})
    out = without_styles(capsys.readouterr().out)
    assert_harmless(out)
    assert "x1b[" not in out  # none of our own styles was escaped


def test_commands_print_only_by_the_functions_that_escape() -> None:
    """`print` of anything but fixed text is found in `output.py`, and where the text was escaped by `printable`."""
    for file in Path(duetime.cli.__file__).parent.glob("*.py"):
        if file.name == "output.py":
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                assert all(map(_is_fixed, node.args)), f"{file.name}:{node.lineno}: use print_line"


def _is_fixed(node: ast.expr) -> bool:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("printable", "printable_lines")
    return isinstance(node, ast.Constant)
