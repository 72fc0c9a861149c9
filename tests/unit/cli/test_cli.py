"""The command line: what it says, what it exits with. Talks to a real server on a store in memory."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from duetime.app import App
from duetime.cli import main
from duetime.cli.arguments import build_parser
from duetime.cli.listen import read_request
from duetime.cli.output import format_duration, format_lateness, format_relative_ms, now_ms, print_table, shorten
from duetime.client import Client
from duetime.config import load_config
from duetime.http.server import Request
from duetime.signing import check_secret, new_secret, sign

HOOK = "http://127.0.0.1:9/hook"
FAR = ["--in", "1h", "--to", HOOK]
CALLBACK = (
    b'{"namespace":"n","timerId":"t","attempt":1,"executeAt":"2027-01-01T09:00:00Z","firedAt":"2027-01-01T09:00:00Z"}'
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(port: int, **flags: Any) -> Iterator[str]:
    """An instance in a thread, because main() has an event loop of its own. `store_url` is store.url."""
    settings = {name.replace("_", ".", 1): value for name, value in flags.items()}
    config = load_config(environ={}, flags={"store.url": "memory://", "server.listen": f"127.0.0.1:{port}", **settings})
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        app = App(config)
        await app.start()
        started.set()
        await stop.wait()
        await app.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=run)
    thread.start()
    assert started.wait(10)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(free_port()) as url:
        yield url


Run = Callable[..., tuple[int, str, str]]


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


# --- help ----------------------------------------------------------------------------------------


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


def test_without_a_command_it_prints_an_overview(run: Run) -> None:
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("duetime demo", "duetime serve", "duetime timer create"))


def test_a_group_without_a_command_prints_its_help(run: Run) -> None:
    code, out, _ = run("timer")
    assert code == 2
    assert "fire-now" in out


def test_the_help_names_the_exit_codes(run: Run) -> None:
    assert "exit codes:" in run("--help")[1]


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
        (["timer", "create", "x", "--to", HOOK], "--in --at"),
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


# --- timers --------------------------------------------------------------------------------------


def test_texts_of_other_users_send_no_control_sequences_to_the_terminal(at: Run) -> None:
    evil = "a\x1b]0;owned\x07\x1b[2J\u202e"
    for command in (
        ("create", evil, *FAR, "--tag", evil, "--correlation-id", evil),
        ("get", evil),
        ("list", "--prefix", evil),
        ("fire-now", evil),
    ):
        code, out, _ = at("timer", *command)
        assert code == 0
        assert "a\\x1b]0;owned\\x07\\x1b[2J\\u202e" in out
        assert not set(out) & {"\x1b", "\x07", "\u202e"}


def test_a_timer_is_created_shown_changed_and_cancelled(at: Run) -> None:
    code, out, _ = at("timer", "create", "order-17", *FAR, "--payload", '{"a":1}', "--tag", "eu", "--header", "x-a: b")
    assert code == 0
    assert out.startswith("created order-17, due in 1 h (")
    code, out, _ = at("timer", "get", "order-17")
    assert code == 0
    assert all(text in out for text in ("scheduled", '{"a":1}', "eu", HOOK, "x-a: b"))
    code, out, _ = at("timer", "update", "order-17", "--in", "2h", "--max-retries", "3")
    assert code == 0
    assert out.startswith("updated order-17, due in 2 h (")
    assert "up to 3, pauses from 1s up to 10m" in at("timer", "get", "order-17")[1]
    code, out, _ = at("timer", "get", "order-17", "--json")
    found = json.loads(out)
    assert (found["timerId"], found["payload"], found["retryPolicy"]["maxRetries"]) == ("order-17", {"a": 1}, 3)
    assert at("timer", "create", "order-17", *FAR)[1].startswith("replaced order-17")
    assert at("timer", "delete", "order-17")[:2] == (0, "cancelled: it will not fire\n")
    assert at("timer", "delete", "order-17")[:2] == (0, "already over: nothing to cancel\n")


def test_if_absent_reports_an_existing_timer(at: Run) -> None:
    once = ["timer", "create", "once", *FAR, "--if-absent"]
    assert at(*once)[1].startswith("created once")
    assert at(*once)[:2] == (0, "once already exists (scheduled); not changed\n")
    assert json.loads(at(*once, "--json")[1])["existed"] is True
    assert at(*once, "--tag", "different")[0] == 4


def test_json_writes_instants_as_the_server_does(at: Run) -> None:
    at("timer", "create", "timed", "--at", "2099-01-01T09:00:00Z", "--to", HOOK)
    assert json.loads(at("timer", "get", "timed", "--json")[1])["executeAt"] == "2099-01-01T09:00:00.000Z"


def test_a_list_distinguishes_scheduled_timers_from_those_that_are_over(at: Run) -> None:
    for _ in range(2):
        at("timer", "create", "reused", *FAR)
        at("timer", "delete", "reused")
    at("timer", "create", "reused", *FAR)
    scheduled, *over = at("timer", "list", "--prefix", "reused")[1].splitlines()[1:]
    assert scheduled.split()[1:5] == ["scheduled", "in", "1", "h"]
    assert len(over) == 2
    for line in over:
        assert "cancelled" in line
        assert "in 1 h" not in line
        assert f"{time.localtime().tm_year}-" in line


def test_lists_are_tables_for_people_and_lines_for_programs(at: Run) -> None:
    for number in range(3):
        at("timer", "create", f"listed-{number}", *FAR, "--tag", "listing")
    code, out, _ = at("timer", "list", "--tag", "listing")
    assert code == 0
    assert out.splitlines()[0].split() == ["id", "state", "due", "ended", "attempts", "late", "by", "to"]
    assert "listed-1" in out
    assert "in 1 h" in out
    _, out, _ = at("timer", "list", "--prefix", "listed-", "--json", "--limit", "0")
    assert sorted(json.loads(line)["timerId"] for line in out.splitlines()) == ["listed-0", "listed-1", "listed-2"]
    _, out, _ = at("timer", "list", "--tag", "listing", "--limit", "2")
    assert "there are more" in out
    assert at("timer", "list", "--tag", "no-such-tag")[1] == "no timers\n"


def test_a_payload_is_read_from_a_file_or_from_standard_input(
    at: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "body.json").write_text('{"from":"file"}')
    at("timer", "create", "p", *FAR, "--payload", f"@{tmp_path / 'body.json'}")
    assert json.loads(at("timer", "get", "p", "--json")[1])["payload"] == {"from": "file"}
    monkeypatch.setattr("sys.stdin", io.StringIO('["from","stdin"]'))
    at("timer", "create", "p", *FAR, "--payload", "-")
    assert json.loads(at("timer", "get", "p", "--json")[1])["payload"] == ["from", "stdin"]


def test_watch_ends_when_the_timer_is_over_and_its_exit_code_shows_success(at: Run, server: str) -> None:
    at("timer", "create", "doomed", "--in", "50ms", "--to", HOOK, "--max-retries", "0")
    code, out, _ = at("timer", "watch", "doomed")
    assert code == 1
    assert "failed" in out.splitlines()[-1]
    assert "refused" in out
    assert at("timer", "replay", "doomed")[:2] == (0, "fires again: doomed\n")


def test_fire_now_does_not_wait_for_the_due_time(at: Run) -> None:
    at("timer", "create", "soon", *FAR, "--max-retries", "0")
    assert at("timer", "fire-now", "soon")[:2] == (0, "due now: soon\n")
    assert (
        at("timer", "watch", "soon")[0] == 1
    )  # no server listens at that address: the callback failed, but the timer fired


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


def test_listen_suggests_another_port_only_if_the_port_is_in_use(run: Run, server: str) -> None:
    port = server.rpartition(":")[2]
    assert run("listen", "--port", port)[::2] == (
        2,
        f"duetime: cannot listen on 127.0.0.1:{port}: the port is in use; --port 0 chooses a free port\n",
    )
    assert "--port" not in run("listen", "--host", "256.1.1.1")[2]


# --- namespaces, cluster, tokens, configuration --------------------------------------------------


def test_namespaces_are_created_changed_and_their_secrets_rotated(at: Run) -> None:
    assert at("namespace", "create", "orders", "--shards", "4", "--to", HOOK)[0] == 0
    assert at("namespace", "create", "orders")[0] == 4
    assert at("namespace", "update", "orders", "--callback-timeout", "30", "--require-ok")[0] == 0
    found = json.loads(at("namespace", "get", "orders", "--json")[1])
    assert (found["numShards"], found["callbackTimeoutSeconds"], found["requireOk"]) == (4, 30, True)
    assert at("namespace", "update", "orders", "--max-retries", "2", "--retry-for", "1h")[0] == 0
    assert "up to 2, pauses from 1s up to 10m, for 1h" in at("namespace", "get", "orders")[1]
    first = json.loads(at("namespace", "rotate-secret", "orders", "--json")[1])
    second = json.loads(at("namespace", "rotate-secret", "orders", "--json")[1])
    assert (first["kept"], second["kept"]) == (0, 1)
    assert first["secret"] != second["secret"]
    assert len(json.loads(at("namespace", "get", "orders", "--json")[1])["signingSecrets"]) == 2
    _, out, _ = at("namespace", "list")
    assert "orders" in out
    assert "default" in out
    assert at("namespace", "delete", "orders")[:2] == (0, "deleted orders\n")


def test_the_cluster_shows_its_members_and_shards(at: Run) -> None:
    code, out, _ = at("cluster", "status", "--shards")
    assert code == 0
    assert all(text in out for text in ("1 alive, on memory", "(this one)", "ready", "late p99", "loaded up to"))
    assert "✗" not in out
    code, out, _ = at("cluster", "status", "--json")
    assert code == 0
    status = json.loads(out)
    assert status["members"][0]["ready"]
    assert status["shardCounts"]["owned"] == status["shardCounts"]["total"]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_the_cluster_is_watched_until_ctrl_c(server: str) -> None:
    with start("cluster", "status", "--watch", "--json", "--url", server) as watcher:
        assert watcher.stdout is not None
        assert [json.loads(watcher.stdout.readline())["ready"] for _ in range(2)] == [True, True]
        watcher.send_signal(signal.SIGINT)
        _, err = watcher.communicate(timeout=20)
    assert (watcher.returncode, err) == (0, "")


def test_a_new_token_is_printed_with_the_configuration_that_accepts_it(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("token", "new", "--name", "shop", "--namespace", "orders", "--verb", "read")
    assert code == 0
    token = next(line.strip() for line in out.splitlines() if line.startswith("  dt_"))
    file = tmp_path / "duetime.toml"
    file.write_text("[auth]\n" + out[out.index("[[auth.tokens]]") :])
    (accepted,) = load_config(file, environ={}).auth.tokens
    assert accepted.sha256 == sha256(token.encode()).hexdigest()
    assert (accepted.name, accepted.namespaces, accepted.verbs) == ("shop", ("orders",), ("read",))
    assert token not in file.read_text()


def test_the_configuration_in_force_is_shown_without_secrets(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETIME_LOG_LEVEL", "debug")
    code, out, _ = run("config", "show", "--store", "postgresql://me:hush@db/x", "--set", "limits.json_depth_max=7")
    assert code == 0
    assert 'level = "debug"' in out
    assert "json_depth_max = 7" in out
    assert "hush" not in out
    assert json.loads(run("config", "show", "--json")[1])["log"]["level"] == "debug"
    assert "DUETIME_STORE_URL" in run("config", "show", "--env")[1]


def test_config_show_and_doctor_warn_about_an_unknown_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUETIME_STROE_URL", "hush")
    monkeypatch.setenv("DUETIME_PORT", "tcp://10.0.0.11:8463")
    warning = "unknown environment variable DUETIME_STROE_URL is ignored: did you mean DUETIME_STORE_URL?"
    code, out, err = run("config", "show", "--json")
    assert (code, err) == (0, f"warning: {warning}\n")
    assert "warnings" not in json.loads(out)
    findings = [json.loads(line) for line in run("doctor", "--store", "memory://", "--json")[1].splitlines()]
    configuration = {finding["says"]: finding["verdict"] for finding in findings if finding["check"] == "configuration"}
    assert configuration.pop(warning) == "note"
    assert set(configuration.values()) == {"good"}


def test_the_doctor_finds_nothing_wrong_with_a_good_server(at: Run, tmp_path: Path) -> None:
    code, out, _ = at("doctor", "--store", f"sqlite:///{tmp_path / 'x.db'}")
    assert code == 0, out
    assert "✓ server" in out
    assert "does not exist yet" in out
    assert "nothing is wrong; 1 warning" in out


def test_the_doctor_asks_the_server_at_the_configured_address(run: Run, server: str) -> None:
    code, out, _ = run("doctor", "--store", "memory://", "--listen", server.removeprefix("http://"))
    assert code == 0, out
    assert f"✓ server        {server}" in out


def test_the_doctor_says_how_to_give_a_token(run: Run) -> None:
    tokens = [{"name": "shop", "sha256": sha256(b"secret").hexdigest()}]
    with serving(free_port(), auth_tokens=tokens) as url:
        code, out, _ = run("doctor", "--store", "memory://", "--url", url)
        assert code == 1
        assert "--token or DUETIME_TOKEN" in out
        assert run("doctor", "--store", "memory://", "--url", url, "--token", "secret")[0] == 0


def test_the_doctor_names_what_is_wrong(run: Run, tmp_path: Path) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path / 'no-such-folder' / 'x.db'}"
    code, out, _ = run("doctor", "--store", store, "--url", nowhere, "--json")
    assert code == 1
    wrong = {line["check"] for line in map(json.loads, out.splitlines()) if line["verdict"] == "wrong"}
    assert {"disk", "server"} <= wrong
    assert run("doctor", "--set", "log.level=loud")[0] == 1


def test_version_prints_the_versions(run: Run) -> None:
    assert run("version")[1].startswith("duetime ")
    assert "python" in json.loads(run("version", "--json")[1])


# --- a process of its own: listen, demo, serve, pipes --------------------------------------------


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DUETIME_")} | variables
    return subprocess.Popen(
        [sys.executable, "-m", "duetime", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment,
    )


def test_listen_prints_callbacks_with_their_signature_and_exits_after_the_given_number(at: Run, server: str) -> None:
    secret = new_secret()
    port = free_port()
    at("namespace", "create", "listened", "--secret", secret)
    with start("listen", "--port", str(port), "--secret", secret, "--once", "1", "--json") as listener:
        # A first try may come before the listener listens: the retry policy is there for that.
        to = f"http://127.0.0.1:{port}/"
        at(
            "timer",
            "create",
            "x",
            "-n",
            "listened",
            "--in",
            "0s",
            "--to",
            to,
            "--payload",
            "[1]",
            "--retry-up-to",
            "1s",
        )
        assert at("timer", "watch", "x", "-n", "listened")[0] == 0
        out, err = listener.communicate(timeout=20)
    assert listener.returncode == 0, err
    what = json.loads(out)
    assert (what["callback"]["timerId"], what["callback"]["payload"], what["signature"]) == ("x", [1], "ok")


def test_listen_with_a_secret_refuses_callbacks_not_signed_with_it() -> None:
    with start("listen", "--port", "0", "--secret", new_secret()) as listener:
        assert listener.stdout is not None
        url = listener.stdout.readline().split()[2]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, data=CALLBACK))
        refused.value.close()
        said = listener.stdout.readline()
        listener.terminate()
        listener.communicate(timeout=20)
    assert refused.value.code == 401
    assert "signature none, refused" in said


def test_watch_waits_for_a_server_that_restarts(tmp_path: Path) -> None:
    port, store = free_port(), f"sqlite:///{tmp_path / 'x.db'}"
    with serving(port, store_url=store) as url, Client(url) as client:
        client.create("x", delay="1h", callback_url=HOOK, retry_policy={"maxRetries": 0})
        watcher = start("timer", "watch", "x", "--url", url)
        assert watcher.stdout is not None
        assert watcher.stderr is not None
        assert "scheduled" in watcher.stdout.readline()
    with watcher:
        assert "trying again for 1 min" in watcher.stderr.readline()
        with serving(port, store_url=store) as url, Client(url) as client:
            client.fire_now("x")
            out, err = watcher.communicate(timeout=20)
    assert watcher.returncode == 1, err
    assert err == "the server answers again\n"
    assert "failed" in out


def test_serve_prints_one_error_if_it_cannot_start(server: str, tmp_path: Path) -> None:
    taken = ["--listen", server.removeprefix("http://"), "--store", "memory://"]
    for arguments in (["--set", "log.level=loud"], taken, ["--store", f"sqlite:///{tmp_path}/nowhere/x.db"]):
        with start("serve", *arguments) as process:
            out, err = process.communicate(timeout=20)
        assert (process.returncode, out) == (2, "")
        assert err.startswith("duetime: ")
        assert len(err.splitlines()) == 1


def test_the_demo_runs_its_timers_and_exits_with_0() -> None:
    with start("demo", "--exit", "--port", "0") as demo:
        out, err = demo.communicate(timeout=30)
    assert demo.returncode == 0, out + err
    lines = [line.split()[2:4] for line in out.splitlines() if " s  " in line]
    assert ["fired", "tea"] in lines
    assert lines.count(["fired", "invoice"]) == 2
    assert ["fired", "alarm"] not in lines
    assert "signature ok" in out
    assert "\033" not in out


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(
    ("number", "line"),
    [("SIGTERM", "receiver"), ("SIGTERM", "The server runs until"), ("SIGHUP", "receiver"), ("SIGINT", "receiver")],
)
def test_a_signal_ends_the_demo_and_deletes_its_temporary_folder(number: str, line: str, tmp_path: Path) -> None:
    with start("demo", "--port", "0", TMPDIR=str(tmp_path), PYTHONUNBUFFERED="1") as demo:
        assert demo.stdout is not None
        while line not in (said := demo.stdout.readline()):
            assert said, "the demo ended before the signal"
        assert [path.name.startswith("duetime-demo-") for path in tmp_path.iterdir()] == [True]
        demo.send_signal(signal.Signals[number])
        out, err = demo.communicate(timeout=30)
    assert (demo.returncode, err) == (0, ""), out
    assert "The temporary store was deleted" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_demo_under_nohup_continues_after_sighup(tmp_path: Path) -> None:
    program = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); from duetime.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--port", "0", "--exit"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}
    ) as demo:
        assert demo.stdout is not None
        demo.stdout.readline()
        demo.send_signal(signal.SIGHUP)
        assert "not fired" in demo.communicate(timeout=30)[0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_listen_without_output() -> None:
    with start("listen", "--port", "0") as listener:
        assert listener.stdout is not None
        assert "listening on" in listener.stdout.readline()
        listener.send_signal(signal.SIGINT)
        _, err = listener.communicate(timeout=20)
    assert (listener.returncode, err) == (0, "")


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_serve_runs_until_a_signal(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = ["--store", f"sqlite:///{tmp_path / 'x.db'}", "--listen", f"127.0.0.1:{port}"]
    with start("serve", *arguments) as server, Client(url, retries=50, timeout=20) as client:
        assert client.create("x", delay=timedelta(hours=1), callback_url=HOOK).timer.timer_id == "x"
        assert client.ready()
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=20)
    assert server.returncode == 0, err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes")
def test_a_closed_pipe_is_not_a_traceback() -> None:
    with start("config", "show", "--env") as writer:
        assert writer.stdout is not None
        writer.stdout.close()
        assert writer.stderr is not None
        err = writer.stderr.read()
        writer.wait(timeout=20)
    assert err == ""
    assert writer.returncode in (0, 141)


# --- formatting ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("milliseconds", "said"),
    [
        (0, "0 ms"),
        (3, "3 ms"),
        (1_000, "1 s"),
        (1_234, "1.2 s"),
        (29_400, "29 s"),
        (1_799_980, "30 min"),
        (3_600_000, "1 h"),
        (7_500_000, "2 h 5 min"),
        (86_400_000, "1 d"),
        (273_600_000, "3 d 4 h"),
        (40 * 86_400_000 + 1, "40 d"),
    ],
)
def test_durations_are_formatted_in_the_unit_that_suits_them(milliseconds: int, said: str) -> None:
    assert format_duration(milliseconds) == said


def test_times_are_relative_to_now() -> None:
    assert format_relative_ms(now_ms() + 1_800_000) == "in 30 min"
    assert format_relative_ms(now_ms() - 3_600_000) == "1 h ago"
    assert (format_lateness(2), format_lateness(0), format_lateness(None)) == ("2 ms late", "on time", "")
    assert shorten("a" * 10, 5) == "aaaa…"


def test_styled_cells_do_not_shift_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["a", "b"], [("\033[31mred\033[0m", "x"), ("plain", "y")])
    assert capsys.readouterr().out.splitlines() == ["a      b", "\033[31mred\033[0m    x", "plain  y"]


def test_a_forged_callback_has_a_bad_signature() -> None:
    body = CALLBACK
    secret, at_s = new_secret(), now_ms() // 1_000

    def request(key: str) -> Request:
        signature = sign("i", at_s, body, [check_secret(key)])
        headers = {
            b"webhook-id": b"i",
            b"webhook-timestamp": str(at_s).encode(),
            b"webhook-signature": signature.encode(),
        }
        return Request("POST", "/", headers=headers, body=body)

    unsigned = Request("POST", "/", headers={}, body=body)
    assert read_request(request(secret), [secret]).signature == "ok"
    forged = read_request(request(new_secret()), [secret])
    assert (forged.signature[:5], forged.refused) == ("bad: ", True)
    assert (read_request(request(secret), []).signature, read_request(unsigned, []).signature) == (
        "not checked",
        "none",
    )
    assert (read_request(request(secret), []).refused, read_request(unsigned, [secret]).refused) == (False, True)
