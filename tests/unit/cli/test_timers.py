"""Commands about timers, at a real server on a store in memory."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import FAR, HOOK, Run, start
from threaded_server import free_port, serving

from duetime.client import AsyncClient, Client


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


DAILY = ("--at", "2099-03-15T09:00", "--timezone", "Europe/Berlin", "--repeat", "daily")


def test_a_timer_with_a_schedule_is_created_shown_paused_and_changed(at: Run) -> None:
    options = ("--exclude", "2099-12-25", "--until", "2100-01-01", "--catch-up", "all")
    code, out, _ = at("timer", "create", "report", *DAILY, *options, "--to", HOOK)
    assert code == 0
    assert out.startswith("created report, due in ")
    found = json.loads(at("timer", "get", "report", "--json")[1])
    assert found["executeAt"] == "2099-03-15T08:00:00.000Z"
    assert found["schedule"] == {
        "timezone": "Europe/Berlin",
        "at": "2099-03-15T09:00",
        "repeat": "daily",
        "exclude": ["2099-12-25"],
        "until": "2100-01-01",
        "catchUp": "all",
    }
    shown = at("timer", "get", "report")[1]
    assert "2099-03-15T09:00:00+01:00" in shown
    assert "daily from 2099-03-15T09:00 until 2100-01-01 in Europe/Berlin" in shown
    assert at("timer", "pause", "report")[:2] == (0, "paused: report\n")
    assert "until it is resumed" in at("timer", "get", "report")[1]
    assert at("timer", "fire-now", "report")[0] == 4
    assert json.loads(at("timer", "resume", "report", "--json")[1])["occurrence"] == 1
    assert at("timer", "resume", "report")[1].startswith("resumed: report, due in ")
    assert json.loads(at("timer", "pause", "report", "--json")[1])["paused"] is True
    at("timer", "resume", "report")
    assert at("timer", "update", "report", "--timezone", "UTC", "--at", "2099-06-01T12:00")[0] == 0
    assert json.loads(at("timer", "get", "report", "--json")[1])["executeAt"] == "2099-06-01T12:00:00.000Z"
    assert "once from 2099-06-01T12:00 in UTC" in at("timer", "get", "report")[1]
    assert at("timer", "update", "report", "--no-schedule")[0] == 0
    assert "schedule" not in json.loads(at("timer", "get", "report", "--json")[1])


@pytest.mark.parametrize(
    ("options", "expected", "said"),
    [
        (("--repeat", "daily", "--in", "1h"), 2, "--repeat needs --timezone"),
        (("--catch-up", "all", "--at", "2099-01-01T00:00:00Z"), 2, "--catch-up needs --timezone"),
        (("--timezone", "UTC", "--in", "1h"), 2, "--in and --timezone exclude each other"),
        (("--timezone", "Europe/Berlinn", "--at", "2099-01-01T00:00"), 4, "did you mean Europe/Berlin?"),
        (("--timezone", "UTC", "--at", "2099-01-01T00:00:00Z"), 4, "must be a local time without offset"),
    ],
)
def test_a_wrong_schedule_is_refused(at: Run, options: tuple[str, ...], expected: int, said: str) -> None:
    code, _, error = at("timer", "create", "wrong", *options, "--to", HOOK)
    assert code == expected
    assert said in error


def test_a_schedule_is_not_ended_and_changed_at_once(at: Run) -> None:
    code, _, error = at("timer", "update", "x", "--no-schedule", "--timezone", "UTC", "--repeat", "cron:0 9 * * *")
    assert code == 2
    assert "--no-schedule and --timezone exclude each other" in error


def test_if_absent_reports_an_existing_timer(at: Run) -> None:
    once = ["timer", "create", "once", *FAR, "--if-absent"]
    assert at(*once)[1].startswith("created once")
    assert at(*once)[:2] == (0, "once already exists (scheduled); not changed\n")
    assert json.loads(at(*once, "--json")[1])["existed"] is True
    assert at(*once, "--tag", "different")[0] == 4


def test_if_reached_ignore_shows_a_timer_that_is_over_and_creates_nothing(at: Run) -> None:
    again = ["timer", "create", "ended", *FAR, "--if-reached", "ignore"]
    assert at(*again)[1].startswith("created ended")
    assert at(*again)[1].startswith("replaced ended")
    assert at("timer", "delete", "ended")[0] == 0
    assert at(*again)[:2] == (0, "ended already exists (cancelled); not changed\n")
    assert json.loads(at(*again, "--json")[1])["existed"] is True
    assert at(*again[:-1], "replace")[1].startswith("created ended")
    assert at(*again[:-1], "never")[0] == 2


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


def test_a_correlation_id_is_looked_up_in_one_namespace_or_in_all(at: Run) -> None:
    at("namespace", "create", "traced")
    for namespace in ("default", "traced"):
        at("timer", "create", "step", *FAR, "-n", namespace, "--correlation-id", "request-9f3")
    at("timer", "create", "untraced", *FAR, "-n", "traced")
    search = ("timer", "list", "--correlation-id", "request-9f3")
    assert [line.split()[0] for line in at(*search)[1].splitlines()[1:]] == ["step"]
    assert [line.split()[0] for line in at(*search, "--all-namespaces")[1].splitlines()[1:]] == ["step", "traced/step"]
    lines = at(*search, "--all-namespaces", "--json")[1].splitlines()
    assert [json.loads(line)["namespace"] for line in lines] == ["default", "traced"]
    code, _, err = at("timer", "list", "--all-namespaces")
    assert code == 4
    assert "--all-namespaces needs a --correlation-id" in err
    assert at(*search, "--all-namespaces", "-n", "traced")[0] == 2


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


def test_a_table_of_timers_reads_no_payloads_and_json_has_them(at: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    whole = AsyncClient.list_page

    async def recorded(client: AsyncClient, **wanted: Any) -> Any:
        asked.append(wanted.get("payloads"))
        return await whole(client, **wanted)

    monkeypatch.setattr(AsyncClient, "list_page", recorded)
    at("timer", "create", "with-payload", *FAR, "--payload", '{"a":1}')
    assert "with-payload" in at("timer", "list", "--prefix", "with-")[1]
    [line] = at("timer", "list", "--prefix", "with-", "--json")[1].splitlines()
    assert json.loads(line)["payload"] == {"a": 1}
    assert asked == [False, False, None, None], "each time the scheduled timers, then the reached ones"


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


def test_watch_stops_after_its_timeout_and_says_how_the_timer_is(at: Run) -> None:
    at("timer", "create", "far", *FAR)
    started = time.monotonic()
    code, out, err = at("timer", "watch", "far", "--timeout", "0.3")
    assert time.monotonic() - started < 60  # the timer is due in hours
    assert code == 1
    assert "scheduled" in out
    assert err.startswith("duetime: stopped after 0.3 s: far is scheduled, due in ")
    error = json.loads(at("timer", "watch", "far", "--timeout", "0.3", "--json")[2])
    assert error["code"] == "timeout"


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
