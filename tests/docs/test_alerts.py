"""Our alerts name only metrics and labels that exist. tests/e2e/test_prometheus.py has promtool run them."""

from __future__ import annotations

import re

from documents import ROOT, check_each

from duetime.telemetry import Counter, Histogram, LabelledGauge, Telemetry

RULES = re.sub(r"^ *#.*\n", "", (ROOT / "docs/operating/duetime-alerts.yml").read_text("utf-8"), flags=re.MULTILINE)
METRICS = {metric.name: metric for metric in vars(Telemetry()).values()}
_ADDED_BY_PROMETHEUS = {"instance"}


def metric_of(name: str) -> Counter | Histogram | LabelledGauge | None:
    whole = re.sub("_(bucket|sum|count)$", "", name)
    return METRICS.get(whole if isinstance(METRICS.get(whole), Histogram) else name)


def test_every_metric_of_the_alerts_exists() -> None:
    def check(name: str) -> None:
        assert metric_of(name) is not None, "no such metric"

    check_each(sorted(set(re.findall(r"duetime_\w+", RULES))), check)


def test_every_label_that_an_alert_asks_for_is_one_of_its_metric() -> None:
    def check(selected: tuple[str, str]) -> None:
        name, label = selected
        assert getattr(metric_of(name), "label", None) == label, "no such label"

    check_each(re.findall(r"(duetime_\w+)\{(\w+)", RULES), check)


def test_every_label_that_an_alert_removes_or_shows_is_one_of_our_metrics() -> None:
    known = _ADDED_BY_PROMETHEUS | {getattr(metric, "label", None) for metric in METRICS.values()}

    def check(label: str) -> None:
        assert label in known, "no such label"

    removed = [label for labels in re.findall(r"without \(([\w, ]+)\)", RULES) for label in labels.split(", ")]
    check_each(removed + re.findall(r"\$labels\.(\w+)", RULES), check)


def test_the_document_lists_every_alert_with_its_severity() -> None:
    listed = re.findall(r"^\| `(Duetime\w+)` \| (\w+) \|", (ROOT / "docs/operating/running.md").read_text(), re.M)
    assert listed == re.findall(r"- alert: (\w+)\n.*?severity: (\w+)\n", RULES, re.DOTALL)
