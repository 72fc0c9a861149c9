"""The alerts that we ship, and the metrics, as Prometheus itself reads them: its promtool judges both."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from duetime.telemetry import LabelledGauge, Telemetry
from servers import promtool

RULES = Path(__file__).parents[2] / "docs" / "operating" / "duetime-alerts.yml"
CASES = Path(__file__).parent / "alerts.test.yml"
ALERTS = re.findall(r"- alert: (\w+)", RULES.read_text("utf-8"))


def run(*arguments: str, input: str = "") -> tuple[int, str]:
    ran = subprocess.run(
        [promtool(), *arguments], input=input, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    return ran.returncode, ran.stdout


def test_the_rules_are_valid() -> None:
    code, said = run("check", "rules", str(RULES))
    assert code == 0, said
    assert f"SUCCESS: {len(ALERTS)} rules found" in said


def test_each_alert_fires_when_it_should_and_none_does_otherwise() -> None:
    code, said = run("test", "rules", str(CASES))
    assert code == 0, said


@pytest.mark.parametrize("alert", ALERTS)
def test_the_cases_notice_an_alert_that_does_not_fire(alert: str, tmp_path: Path) -> None:
    rules, name, rest = RULES.read_text("utf-8").partition(f"- alert: {alert}\n")
    (tmp_path / RULES.name).write_text(rules + name + re.sub(r"for: \w+", "for: 10h", rest, count=1))
    cases = tmp_path / CASES.name
    cases.write_text(CASES.read_text("utf-8").replace(f"../../docs/operating/{RULES.name}", RULES.name))
    code, said = run("test", "rules", str(cases))
    assert code != 0
    assert f'alertname="{alert}"' in said


def test_the_metrics_are_what_prometheus_reads() -> None:
    telemetry = Telemetry()
    for metric in vars(telemetry).values():
        if isinstance(metric, LabelledGauge):
            metric.read = lambda: {'a"b': 1}
        elif getattr(metric, "label", None) is not None:
            metric.add('a"b')
    code, said = run("check", "metrics", input=telemetry.render())
    assert (code, said) == (0, "")
