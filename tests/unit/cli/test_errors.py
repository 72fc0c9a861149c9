"""Errors of commands: their text, their hint and the exit code."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from command_line import FAR, HOOK, Run
from threaded_server import free_port

from duetime.cli.errors import print_error
from duetime.client import ConnectionFailed, Forbidden, OutcomeUnknown
from duetime.client.asynchronous import _unknown_create_text


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["timer", "get", "no-such"], 3, "duetime: There is no timer 'no-such'"),
        (["timer", "get", "x", "-n", "nix"], 3, "`duetime namespace create nix` creates it"),
        (["timer", "create", "x", "--at", "2027-01-01", "--to", HOOK], 4, "--at needs a time"),
        (["timer", "create", "x", "--in", "soon", "--to", HOOK], 4, "--in must be a duration"),
        (["timer", "create", "x", "--in", "-5s", "--to", HOOK], 4, "--in must be a duration"),
        (["timer", "create", "x", "--in", "1h"], 4, "--to is required: the namespace has"),
        (["timer", "create", "x", *FAR, "--max-retries", "-1"], 4, "duetime: --max-retries must be"),
        (["timer", "create", "x", *FAR, "--retry-from", "1h", "--retry-up-to", "1s"], 4, "less than --retry-from"),
        (["timer", "create", "x", *FAR, "--skip-if-late-by", "x"], 4, "duetime: --skip-if-late-by must be"),
        (["timer", "create", "x", *FAR, "--payload", "{oops"], 2, "--payload"),
        (["timer", "create", "x", *FAR, "--payload", "@/no/such/file"], 2, "--payload"),
        (["timer", "create", "x", *FAR, "--header", "no-colon"], 2, "NAME:VALUE"),
        (["timer", "update", "x"], 2, "nothing to change"),
        (["namespace", "get", "no-such"], 3, "no-such"),
        (["namespace", "create", "default"], 4, "duetime: Namespace 'default' exists"),
        (["namespace", "create", "x", "--keep-failed", "x"], 4, "duetime: --keep-failed must be"),
        (["listen", "--answer", "perhaps"], 2, "--answer"),
        (["listen", "--delay", "xx"], 2, "--delay"),
        (["listen", "--secret", "oops"], 2, "--secret"),
        (["timer", "get", "x", "--url", "nonsense"], 2, "the server's URL must be an absolute URL"),
        (["serve", "--set", "log.level"], 2, "SECTION.KEY=VALUE"),
        (["serve", "--set", "no.such=1"], 2, "no.such"),
        (["serve", "--set", "limits.json_depth_max=deep"], 2, "limits.json_depth_max"),
    ],
)
def test_an_error_is_one_or_two_lines_and_names_the_flag(at: Run, arguments: list[str], code: int, said: str) -> None:
    found, out, err = at(*arguments)
    assert found == code
    assert err.startswith("duetime: ")
    assert said in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err
    assert out == ""


def test_without_a_server_the_exit_code_is_5_and_the_error_says_how_to_start_one(run: Run) -> None:
    code, _, err = run("timer", "get", "x", "--url", f"http://127.0.0.1:{free_port()}")
    assert code == 5
    assert "cannot reach" in err
    assert "duetime serve" in err


def test_a_url_with_a_path_is_not_reported_as_a_missing_timer(at: Run, server: str) -> None:
    code, _, err = at("timer", "get", "x", "--url", f"{server}/wrong")
    assert code == 5
    assert "--url" in err


def test_errors_are_json_too(at: Run) -> None:
    code, out, err = at("timer", "get", "no-such", "--json")
    assert (code, out) == (3, "")
    problem = json.loads(err)
    assert (problem["code"], problem["status"], problem["field"]) == ("timer_not_found", 404, "timerId")
    assert json.loads(at("timer", "update", "x", "--json")[2])["code"] == "usage"
    assert json.loads(at("timer", "lst", "--json")[2])["detail"].endswith("did you mean list?")


@pytest.mark.parametrize(
    ("detail", "hint"),
    [
        ("cannot reach x: TLS: certificate of x not accepted: self-signed certificate", "SSL_CERT_FILE"),
        ("cannot reach x: connection closed before the answer", "https://"),
        ("cannot reach x: connection refused by x", "`duetime serve` starts one"),
    ],
)
def test_a_failed_connection_has_the_hint_for_its_cause(
    capsys: pytest.CaptureFixture[str], detail: str, hint: str
) -> None:
    print_error(ConnectionFailed(detail), as_json=False)
    assert hint in capsys.readouterr().err


def test_an_error_about_the_namespace_has_one_article(capsys: pytest.CaptureFixture[str]) -> None:
    print_error(Forbidden("the token 'x' does not allow the namespace 'bank'", field="namespace"), as_json=False)
    assert capsys.readouterr().err == "duetime: the token 'x' does not allow the namespace 'bank'\n"


@pytest.mark.parametrize("if_absent", [False, True])
def test_an_unknown_create_names_commands_and_not_functions(
    capsys: pytest.CaptureFixture[str], if_absent: bool
) -> None:
    text = _unknown_create_text("x", OutcomeUnknown("no answer"), if_absent)
    print_error(OutcomeUnknown(text), as_json=False)
    err = capsys.readouterr().err
    assert "--if-absent" in err
    assert "if_absent" not in err
    assert "get()" not in err
    assert if_absent or "`duetime timer get`" in err


@pytest.mark.parametrize(
    ("status", "body"), [(200, b"ok"), (200, b'{"ok": true}'), (404, b"not found"), (401, b"who?"), (405, b"<p>no</p>")]
)
def test_the_url_of_a_receiver_instead_of_the_servers_is_explained(run: Run, status: int, body: bytes) -> None:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            """Nothing: standard error is that of the command."""

    with HTTPServer(("127.0.0.1", 0), Receiver) as receiver:
        serving = threading.Thread(target=receiver.serve_forever)
        serving.start()
        try:
            code, _, err = run(
                "timer", "create", "x", "--in", "1h", "--url", f"http://127.0.0.1:{receiver.server_port}"
            )
        finally:
            receiver.shutdown()
            serving.join()
    assert code in (4, 5, 6)
    assert err.endswith(
        "--url and DUETIME_URL are the URL of the Duetime server; --to is that of the receiver of callbacks.\n"
    )
