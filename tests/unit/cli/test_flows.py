"""The commands for flows and pauses. They talk to a real server on a store in memory."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import Run
from threaded_server import free_port, serving

from duetime.cli.diagnosis import GOOD, NOTE, check_pauses
from duetime.client import Client, Flow, FlowState

HOOK = "http://127.0.0.1:9/hook"


@pytest.fixture
def at(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Run a command against a server of its own."""
    with serving(free_port()) as url:
        monkeypatch.setenv("DUETIME_URL", url)
        yield run


def test_a_flow_is_limited_paused_resumed_and_listed(at: Run) -> None:
    code, out, _ = at("flow", "update", HOOK, "--rate", "5", "--concurrency", "2")
    assert code == 0
    assert "5 calls per second" in out
    assert "2 calls" in out
    assert "until you resume it; 0 due timers wait" in at("flow", "pause", HOOK)[1]
    code, out, _ = at("flow", "list")
    assert code == 0
    heading, row = out.splitlines()
    assert heading.split()[:3] == ["namespace", "flow", "state"]
    assert row.split() == ["default", HOOK, "paused", "0", "0", "5/s", "2"]
    assert "fire again within its limits; 0 due timers wait, 0 calls" in at("flow", "resume", HOOK)[1]
    assert at("flow", "list", "--state", "paused")[1] == "no flows\n"
    assert "no limit of its own" in at("flow", "update", HOOK, "--rate", "none", "--concurrency", "none")[1]
    assert at("flow", "list")[1] == "no flows\n"


def test_a_resume_of_a_flow_that_is_not_paused_tells_of_its_breaker(at: Run) -> None:
    for number in range(12):
        at("timer", "create", f"t{number}", "--in", "0s", "--to", HOOK)  # nobody listens there
    with Client() as duetime:
        deadline = time.monotonic() + 20
        while duetime.get_flow(HOOK).state is FlowState.CLOSED:
            assert time.monotonic() < deadline
    assert f"{HOOK} is not paused, but its breaker is open (" in at("flow", "resume", HOOK)[1]
    assert "connection refused" in at("flow", "list")[1]


def test_flows_are_json_for_programs_and_a_list_can_be_limited(at: Run) -> None:
    for key in ("a", "b", "c"):
        assert at("flow", "pause", key, "--json")[0] == 0
    flow = json.loads(at("flow", "get", "a", "--json")[1])
    assert (flow["flowKey"], flow["state"], flow["waiting"]) == ("a", "paused", 0)
    assert [json.loads(line)["flowKey"] for line in at("flow", "list", "--json")[1].splitlines()] == ["a", "b", "c"]
    out = at("flow", "list", "--limit", "2")[1]
    assert "the first 2; there are more" in out
    assert len(out.splitlines()) == 4
    assert "there are more" not in at("flow", "list", "--limit", "3")[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("flow", "update", HOOK), 2, "nothing to change"),
        (("flow", "update", HOOK, "--rate", "fast"), 2, "--rate: must be a number or none, not fast"),
        (("flow", "update", HOOK, "--rate", "nan"), 2, "--rate: must be a number or none, not nan"),
        (("flow", "update", HOOK, "--concurrency", "0"), 2, "between 1 and 10000, not 0, or none; for no calls, pause"),
        (("namespace", "update", "default", "--creates-per-second", "0"), 2, "must be a whole number of at least 1"),
        (("flow", "update", HOOK, "--rate", "0"), 4, "--rate must be between 0.001 and 100,000"),
        (("flow", "pause", f"{HOOK}?order=17"), 4, f"the flow of this URL is '{HOOK}'"),
        (("flow", "pause", HOOK, "--namespace", "nowhere"), 3, "no namespace 'nowhere'"),
        (("namespace", "pause", "nowhere"), 3, "no namespace 'nowhere'"),
        (("namespace", "resume"), 2, "NAME"),
    ],
)
def test_an_error_names_what_is_wrong(at: Run, arguments: tuple[str, ...], code: int, said: str) -> None:
    found, _, err = at(*arguments)
    assert (found, said in err) == (code, True), err


def test_a_namespace_is_paused_shown_as_paused_and_resumed(at: Run) -> None:
    at("namespace", "create", "orders")
    assert "duetime namespace resume orders" in at("namespace", "pause", "orders")[1]
    assert "paused: none of its timers fires" in at("namespace", "get", "orders")[1]
    assert "paused" in at("namespace", "list")[1]
    assert "1 namespace;" in at("cluster", "status")[1]
    at("flow", "pause", "a", "--namespace", "orders")
    assert "its namespace is paused" in at("flow", "resume", "a", "--namespace", "orders")[1]
    at("namespace", "pause", "default")
    assert at("namespace", "resume", "--all")[1].splitlines() == [
        "resumed default: its timers fire again",
        "resumed orders: its timers fire again",
    ]
    assert at("namespace", "resume", "--all")[1] == "no namespace is paused\n"
    assert json.loads(at("namespace", "resume", "orders", "--json")[1])["paused"] is False


def test_a_quota_is_set_and_cleared(at: Run) -> None:
    assert "creates per second  5" in at("namespace", "update", "default", "--creates-per-second", "5")[1]
    code, out, _ = at("namespace", "update", "default", "--creates-per-second", "none")
    assert (code, "creates per second" in out) == (0, False)


def test_the_doctor_names_what_is_paused(at: Run, tmp_path: Path) -> None:
    store = ("--store", f"sqlite:///{tmp_path / 'x.db'}")
    assert "no namespace and no flow is paused" in at("doctor", *store)[1]
    at("namespace", "create", "orders")
    at("namespace", "pause", "orders")
    at("flow", "pause", "of a paused namespace", "--namespace", "orders")
    at("flow", "pause", HOOK)
    code, out, _ = at("doctor", *store)
    assert code == 0
    assert "namespace orders is paused" in out
    assert f"flow {HOOK} of namespace default is paused, 0 due timers waiting" in out
    assert f"duetime flow resume {HOOK} --namespace default" in out
    assert "of a paused namespace" not in out


def test_many_pauses_are_counted_after_the_first_few() -> None:
    flow = Flow(namespace="default", flow_key="a\x1b[2J", origin="", state=FlowState.PAUSED, waiting=1, in_flight=0)
    findings = list(check_pauses(["n"] * 7, [flow] * 6))
    assert [finding.verdict for finding in findings] == [NOTE] * 12
    assert [finding.says for finding in findings[-2:]] == ["2 more namespaces are paused", "1 more flows are paused"]
    assert findings[5].says == "flow a\x1b[2J of namespace default is paused, 1 due timer waiting"
    assert findings[5].advice.endswith("duetime flow resume 'a\x1b[2J' --namespace default"), "it can be copied"
    assert [finding.verdict for finding in check_pauses([], [])] == [GOOD]


def test_a_timer_shows_its_flow(at: Run) -> None:
    at("timer", "create", "x", "--in", "1h", "--to", HOOK, "--flow-key", "shop")
    assert "shop" in at("timer", "get", "x")[1]
    at("timer", "update", "x", "--flow-key", "bank")
    assert json.loads(at("timer", "get", "x", "--json")[1])["flowKey"] == "bank"


def test_the_client_without_an_event_loop_has_the_same_calls(at: Run) -> None:
    with Client() as duetime:
        assert duetime.create("x", delay=3_600, callback_url=HOOK, flow_key="shop").timer.flow_key == "shop"
        assert duetime.update("x", flow_key=None).timer.flow_key is None
        assert duetime.update_flow("shop", rate=5, concurrency=None).rate == 5.0
        assert duetime.pause_flow("shop").state is FlowState.PAUSED
        assert [flow.flow_key for flow in duetime.list_flows(state="paused", page_size=1)] == ["shop"]
        assert duetime.list_flows_page(namespace="default").unanswered == ()
        assert duetime.resume_flow("shop").state is FlowState.CLOSED
        assert duetime.get_flow("shop").rate == 5.0
        assert duetime.pause_namespace("default").paused
        assert not duetime.resume_namespace("default").paused


def test_serve_paused_needs_a_store_that_keeps_it(at: Run) -> None:
    code, _, err = at("serve", "--paused", "--store", "memory://", "--listen", "127.0.0.1:0")
    assert code == 2
    assert "store.url is memory://" in err


def test_a_pause_of_a_flow_that_nobody_knows_names_the_nearest_one(at: Run) -> None:
    out = at("flow", "pause", "partner")[1]
    assert "no timers of this flow are waiting or known; the pause holds for timers to come; `duetime flow list`" in out
    assert at("flow", "pause", "partnr")[1].endswith("to come; did you mean partner?\n")


def test_a_paused_flow_says_whether_its_namespace_is_paused(at: Run) -> None:
    at("flow", "pause", "a")
    assert "by namespace" not in at("flow", "get", "a")[1] + at("flow", "list")[1]
    at("namespace", "pause", "default")
    assert "paused by namespace" in at("flow", "get", "a")[1]
    assert "paused by namespace" in at("flow", "list")[1]
    at("namespace", "resume", "default")
    assert "by namespace" not in at("flow", "get", "a")[1]


@pytest.mark.parametrize("command", [("flow", "pause"), ("flow", "get"), ("namespace", "pause")])
def test_the_help_of_a_pause_fits_a_terminal(run: Run, command: tuple[str, str]) -> None:
    out = run(*command, "--help")[1]
    assert max(map(len, out.splitlines())) <= 82
