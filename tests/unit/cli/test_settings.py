"""The configuration of commands, and `duetime config show`."""

from __future__ import annotations

import json

import pytest
from command_line import Run


def test_a_new_token_without_a_scope_is_refused_unless_it_is_asked_for(run: Run) -> None:
    code, out, err = run("token", "new", "--name", "shop")
    assert (code, out) == (2, "")
    assert "--namespace NAME" in err
    assert "--all for everything" in err
    code, out, _ = run("token", "new", "--name", "shop", "--all", "--json")
    assert code == 0
    made = json.loads(out)["config"]
    assert (made["namespaces"], made["verbs"]) == ([], [])
    for scope in (("--namespace", "orders"), ("--verb", "read")):
        assert run("token", "new", "--name", "shop", *scope)[0] == 0
        assert run("token", "new", "--name", "shop", "--all", *scope)[0] == 2


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


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("delivery.concurrency_per_destination=1", "is now named delivery.concurrency_per_flow"),
        ("delivery.rate_per_destination=1", "is now named delivery.rate_per_flow"),
        ("delivery.concurency_per_flow=1", "no such setting; did you mean delivery.concurrency_per_flow?"),
        ("x.y=1", "no such setting; `duetime config show` lists all settings"),
    ],
)
def test_a_setting_with_an_old_or_misspelt_name_is_refused_with_the_right_one(
    run: Run, setting: str, said: str
) -> None:
    code, _, err = run("config", "show", "--set", setting)
    assert code == 2
    assert err == f"duetime: --set {setting.partition('=')[0]}: {said}\n"
