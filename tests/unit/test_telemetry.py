"""Metrics: the Prometheus text format, the names, and the quantiles; log lines as JSON."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator

import pytest

from duetime.telemetry import Counter, Gauge, Histogram, LabelledGauge, Telemetry, log, set_up_logging

SAMPLE = re.compile(r'([a-z_]+)(?:\{([a-z]+)="((?:[^"\\\n]|\\[\\"n])*)"\})? (-?[0-9.e+-]+|inf|nan)')


def samples(text: str) -> list[tuple[str, str | None, str | None, float]]:
    """What a scraper reads; every line must be one it understands."""
    found = []
    for line in text.splitlines():
        if not line.startswith("# "):
            match = SAMPLE.fullmatch(line)
            assert match is not None, line
            found.append((match[1], match[2], match[3], float(match[4])))
    return found


class TestFormat:
    def test_a_counter_is_one_line(self) -> None:
        counter = Counter("duetime_x_total", "X.")
        counter.value += 12_345_678
        assert counter.lines() == ["duetime_x_total 12345678"]

    def test_a_counter_with_a_label_is_a_line_for_each_value_in_order(self) -> None:
        counter = Counter("duetime_x_total", "X.", "status")
        counter.add("500")
        counter.add("200", 3)
        counter.add("200")
        assert counter.lines() == ['duetime_x_total{status="200"} 4', 'duetime_x_total{status="500"} 1']

    def test_label_values_are_escaped(self) -> None:
        counter = Counter("duetime_x_total", "X.", "name")
        counter.add('a"b\\c\nd')
        assert counter.lines() == ['duetime_x_total{name="a\\"b\\\\c\\nd"} 1']

    @pytest.mark.parametrize("value", [0, 1_234_567, 0.25, 1_800_000_000.125, -3])
    def test_a_gauge_is_read_when_asked_for_and_in_full(self, value: float) -> None:
        gauge = Gauge("duetime_x", "X.")
        assert gauge.lines() == ["duetime_x 0"]
        gauge.read = lambda: value
        assert samples("\n".join(gauge.lines())) == [("duetime_x", None, None, value)]

    def test_a_gauge_with_a_label_is_read_when_asked_for_and_is_a_line_for_each_value_in_order(self) -> None:
        gauge = LabelledGauge("duetime_x", "X.", "broker")
        assert gauge.lines() == []
        values: dict[str, float] = {"nats": 1_234_567}
        gauge.read = lambda: values
        values['a"b'] = 0.25
        assert gauge.lines() == ['duetime_x{broker="a\\"b"} 0.25', 'duetime_x{broker="nats"} 1234567']

    def test_buckets_are_cumulative_and_a_bound_belongs_to_its_bucket(self) -> None:
        histogram = Histogram("duetime_x", "X.", (0.5, 1, 2_000))
        for value in (0.1, 0.5, 0.6, 1_999.0, 2_001.0, 5_000.0):
            histogram.observe(value)
        assert histogram.lines() == [
            'duetime_x_bucket{le="0.5"} 2',
            'duetime_x_bucket{le="1"} 3',
            'duetime_x_bucket{le="2000"} 4',
            'duetime_x_bucket{le="+Inf"} 6',
            "duetime_x_sum 9001.2",
            "duetime_x_count 6",
        ]

    def test_the_sum_still_moves_when_it_is_large(self) -> None:
        histogram = Histogram("duetime_x", "X.", (1.0,))
        histogram.observe(10_000_000.0)
        before = histogram.lines()
        histogram.observe(0.001)
        assert "duetime_x_sum 10000000.001" in histogram.lines()
        assert histogram.lines() != before


class TestAllMetrics:
    def test_every_line_can_be_scraped_and_every_metric_has_help_and_type(self) -> None:
        telemetry = Telemetry()
        telemetry.requests.add("200")
        telemetry.lateness.observe(0.003)
        text = telemetry.render()
        assert text.endswith("\n")
        assert samples(text)
        for metric in vars(telemetry).values():
            assert re.search(rf"^# HELP {metric.name} [^\\\n]+\.\n# TYPE {metric.name} {metric.kind}$", text, re.M)

    def test_names_are_unique_ours_and_in_the_right_form(self) -> None:
        metrics = list(vars(Telemetry()).values())
        names = [metric.name for metric in metrics]
        assert len(names) == len(set(names))
        for metric in metrics:
            assert re.fullmatch(r"duetime_[a-z_]+", metric.name)
            assert metric.name.endswith("_total") == (metric.kind == "counter")

    def test_the_last_bucket_of_every_histogram_is_its_count(self) -> None:
        telemetry = Telemetry()
        histograms = [metric for metric in vars(telemetry).values() if isinstance(metric, Histogram)]
        for histogram in histograms:
            for value in (0.0, 0.003, 7.0, 1e9):
                histogram.observe(value)
        found = {(name, value): n for name, _, value, n in samples(telemetry.render())}
        for histogram in histograms:
            assert found[f"{histogram.name}_bucket", "+Inf"] == found[f"{histogram.name}_count", None] == 4

    def test_bounds_are_in_order(self) -> None:
        for metric in vars(Telemetry()).values():
            if isinstance(metric, Histogram):
                assert sorted(set(metric.bounds)) == list(metric.bounds)


class TestQuantile:
    def test_without_observations_there_is_none(self) -> None:
        assert Histogram("duetime_x", "X.", (1, 2)).quantile(0.5) is None

    def test_it_is_the_upper_bound_of_the_bucket_it_falls_into(self) -> None:
        histogram = Histogram("duetime_x", "X.", (1, 2, 5, 10))
        for value in [0.5] * 50 + [1.5] * 48 + [4.0, 9.0]:
            histogram.observe(value)
        assert [histogram.quantile(q) for q in (0.5, 0.51, 0.98, 0.99, 1.0)] == [1, 2, 2, 5, 10]

    def test_the_smallest_quantile_is_in_a_bucket_with_observations(self) -> None:
        histogram = Histogram("duetime_x", "X.", (1, 2, 5))
        histogram.observe(4)
        assert histogram.quantile(0.0) == 5

    def test_beyond_all_bounds_it_is_the_last_one(self) -> None:
        histogram = Histogram("duetime_x", "X.", (1, 2))
        histogram.observe(100)
        assert histogram.quantile(0.99) == 2


class TestLogging:
    @pytest.fixture(autouse=True)
    def _logger_as_it_was(self) -> Iterator[None]:
        handlers, level, propagate = log.handlers[:], log.level, log.propagate
        yield
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)

    def test_json_lines_carry_the_message_and_the_exception(self, capsys: pytest.CaptureFixture[str]) -> None:
        set_up_logging("info", "json")
        log.debug("not shown")
        try:
            raise KeyError("x")
        except KeyError:
            log.exception("two\nlines %d", 5)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        entry = json.loads(lines[0])
        assert (entry["level"], entry["logger"], entry["message"]) == ("error", "duetime", "two\nlines 5")
        assert "KeyError: 'x'" in entry["exception"]

    def test_text_of_other_users_cannot_control_the_terminal_or_add_lines(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        hostile = "a\x1b[2J\x9b31m\x07\u202e\u2066\r\n2027-01-01 00:00:00 INFO all is well"
        for form in ("text", "json"):
            set_up_logging("info", form)
            log.warning("timer %s", hostile)
            (line,) = capsys.readouterr().err.splitlines()
            assert line.isprintable()
            assert "x1b[2J" in line or json.loads(line)["message"] == f"timer {hostile}"
            try:
                raise ValueError(hostile)
            except ValueError:
                log.exception("failed")
            assert all(line.isprintable() for line in capsys.readouterr().err.split("\n"))

    def test_setting_up_twice_does_not_say_things_twice(self, capsys: pytest.CaptureFixture[str]) -> None:
        set_up_logging("info", "text")
        set_up_logging("warning", "text")
        log.info("not shown")
        log.warning("once")
        assert capsys.readouterr().err.count("once") == 1
        assert logging.getLogger("duetime").level == logging.WARNING
