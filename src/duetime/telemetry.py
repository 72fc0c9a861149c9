"""All metrics, and the set-up of logging. Counting is an addition to an attribute, cheap enough for hot paths.

Metrics are created only here; `render` writes all of them in the Prometheus text format.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Mapping, Sequence

import msgspec

from duetime.printable import printable, printable_json, printable_lines

__all__ = ["Counter", "FailureLog", "Gauge", "Histogram", "LabelledGauge", "Telemetry", "set_up_logging"]

log = logging.getLogger("duetime")

LATENESS_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 600.0)
DURATION_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LOG_EVERY_MS = 60_000
BATCH_SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


class Counter:
    """A number that only grows, or one such number for each value of a label."""

    kind = "counter"

    def __init__(self, name: str, help: str, label: str | None = None) -> None:
        self.name, self.help, self.label = name, help, label
        self.value = 0
        self.by_label: dict[str, int] = {}

    def add(self, label_value: str, amount: int = 1) -> None:
        self.by_label[label_value] = self.by_label.get(label_value, 0) + amount

    def lines(self) -> list[str]:
        if self.label is None:
            return [f"{self.name} {self.value}"]
        return [f'{self.name}{{{self.label}="{_escaped(v)}"}} {n}' for v, n in sorted(self.by_label.items())]


class Gauge:
    """A number that is read when the metrics are rendered."""

    kind = "gauge"

    def __init__(self, name: str, help: str) -> None:
        self.name, self.help = name, help
        self.read: Callable[[], float] = lambda: 0

    def lines(self) -> list[str]:
        return [f"{self.name} {self.read()!r}"]


class LabelledGauge:
    """One number for each value of a label, read when the metrics are rendered."""

    kind = "gauge"

    def __init__(self, name: str, help: str, label: str) -> None:
        self.name, self.help, self.label = name, help, label
        self.read: Callable[[], Mapping[str, float]] = dict

    def lines(self) -> list[str]:
        return [f'{self.name}{{{self.label}="{_escaped(v)}"}} {n!r}' for v, n in sorted(self.read().items())]


class Histogram:
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, q: float) -> float | None:
        """The upper bound of the bucket the quantile falls into (beyond all: the last bound); None without
        observations."""
        total = self.count
        if not total:
            return None
        below = 0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            if below and below >= q * total:
                return bound
        return self.bounds[-1]

    def lines(self) -> list[str]:
        below, lines = 0, []
        for bound, count in zip(self.bounds, self.counts, strict=False):
            below += count
            lines.append(f'{self.name}_bucket{{le="{bound:g}"}} {below}')
        total = self.count
        lines.append(f'{self.name}_bucket{{le="+Inf"}} {total}')
        lines.append(f"{self.name}_sum {self.sum!r}")  # all digits, because rates are computed from it
        lines.append(f"{self.name}_count {total}")
        return lines


class Telemetry:
    """All metrics of one instance."""

    def __init__(self) -> None:
        self.requests = Counter("duetime_http_requests_total", "HTTP requests by status.", "status")
        self.created = Counter("duetime_timers_created_total", "Creates that were acknowledged.")
        self.updated = Counter("duetime_timers_updated_total", "Updates that were acknowledged.")
        self.deleted = Counter("duetime_timers_deleted_total", "Deletes that were acknowledged.")
        self.attempts = Counter("duetime_attempts_total", "Delivery attempts that were started.")
        self.attempt_results = Counter("duetime_outcomes_total", "Attempts by their result.", "outcome")
        self.outcomes = Counter("duetime_timers_reached_total", "Timers that were reached, by outcome.", "outcome")
        self.stale_outcomes = Counter(
            "duetime_stale_outcomes_total", "Results of attempts whose timer was replaced or deleted in the meantime."
        )
        self.parked = Counter(
            "duetime_timers_parked_total", "Due timers that were put back to the store because memory was full."
        )
        self.commits = Counter("duetime_commits_total", "Commits by result.", "result")
        self.shards_lost = Counter("duetime_shards_lost_total", "Shards lost to another instance (a fence failed).")
        self.reclaims = Counter("duetime_reclaims_total", "Shards claimed again after a write with an unknown outcome.")
        self.heartbeats = Counter("duetime_heartbeats_total", "Heartbeats by result.", "result")
        self.forwards = Counter(
            "duetime_forwards_total", "Commands forwarded to the instance that owns their shard, by result.", "result"
        )
        self.refused_by_quota = Counter(
            "duetime_quota_refusals_total",
            "Creates and requests refused with 429, by the quota of their namespace.",
            "quota",
        )
        self.commands_received = Counter(
            "duetime_commands_received_total",
            "Commands received from message brokers, repeated ones included.",
            "broker",
        )
        self.commands_repeated = Counter(
            "duetime_commands_repeated_total",
            "Commands received from message brokers that had been delivered before, such as those that waited for a "
            "quota. They are also in duetime_commands_received_total.",
            "broker",
        )
        self.commands = Counter(
            "duetime_commands_total",
            "Commands of message brokers by result: scheduled, cancelled, ignored, refused, retried.",
            "result",
        )
        self.events_published = Counter(
            "duetime_events_published_total", "Events that a message broker has stored.", "broker"
        )
        self.event_failures = Counter(
            "duetime_event_failures_total",
            "Attempts to publish an event that the broker did not acknowledge.",
            "broker",
        )
        self.event_delay_seconds = Histogram(
            "duetime_event_delay_seconds",
            "Acknowledgement of an event by the message broker minus the scheduled time of its timer, or its creation "
            "if that was later.",
            LATENESS_SECONDS,
        )
        self.lateness = Histogram(
            "duetime_late_by_seconds",
            "Start of the first attempt minus the scheduled time, or the creation of the timer if that was later.",
            LATENESS_SECONDS,
        )
        self.commit_seconds = Histogram("duetime_commit_seconds", "Duration of store commits.", DURATION_SECONDS)
        self.commit_operations = Histogram("duetime_commit_operations", "Pending writes in one commit.", BATCH_SIZES)
        self.loop_lag_seconds = Histogram(
            "duetime_loop_lag_seconds", "How late the event loop runs its timers.", DURATION_SECONDS
        )
        self.in_memory = Gauge("duetime_timers_in_memory", "Timers in memory.")
        self.in_flight = Gauge("duetime_deliveries_in_flight", "Deliveries in flight.")
        self.held = Gauge("duetime_timers_held", "Due timers that are held for their flow, origin or namespace.")
        self.writes_waiting = Gauge("duetime_writes_waiting", "Writes that wait for a commit.")
        self.shards_owned = Gauge("duetime_shards_owned", "Shards owned by this instance.")
        self.lease_seconds = Gauge("duetime_lease_seconds", "Seconds for which this instance may still fire timers.")
        self.clock_skew_seconds = Gauge("duetime_clock_skew_seconds", "This machine's clock minus the database's.")
        self.clock_error_seconds = Gauge("duetime_clock_error_seconds", "Possible error of the measured clock skew.")
        self.commands_waiting = LabelledGauge(
            "duetime_commands_waiting",
            "Commands that the message broker has for this server and that no instance has received yet.",
            "broker",
        )
        self.commands_retrying = LabelledGauge(
            "duetime_commands_retrying",
            "Commands that this instance has handed back to the message broker and that wait for a retry, for example "
            "because their namespace is beyond its quota.",
            "broker",
        )
        self.intake_consuming = LabelledGauge(
            "duetime_intake_consuming",
            "1 while this instance receives commands from the message broker, 0 while it does not.",
            "broker",
        )
        self.unreadable = Gauge(
            "duetime_timers_unreadable",
            "Stored timers that were read, but cannot be decoded and do not fire.",
        )
        self.backlogs = Gauge("duetime_backlog_shards", "Shards with overdue timers that may not be in memory.")
        self.oldest_due_seconds = Gauge(
            "duetime_oldest_due_seconds", "Age of the oldest due timer that was not fired yet."
        )

    def render(self) -> str:
        lines: list[str] = []
        for metric in vars(self).values():
            lines.append(f"# HELP {metric.name} {metric.help}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines.extend(metric.lines())
        return "\n".join(lines) + "\n"


class FailureLog:
    """Logs the failures of work that is repeated: when they begin, when the reason changes, once a minute while they
    last, and when they end. Thus a long failure, such as a full disk, does not fill the log.
    """

    def __init__(self, failure: str, recovery: str) -> None:
        self.reason = ""
        self._failure = failure
        self._recovery = recovery
        self._logged_at_ms = 0

    def failed(self, error: Exception, now_ms: int) -> None:
        reason = str(error)
        if reason != self.reason or now_ms - self._logged_at_ms >= _LOG_EVERY_MS:
            log.warning("%s: %s", self._failure, reason)
            self._logged_at_ms = now_ms
        self.reason = reason

    def recovered(self) -> None:
        if self.reason:
            self.reason = ""
            log.info("%s", self._recovery)


class _TextLines(logging.Formatter):
    """Each message is one line, and has no control sequences: parts of it may come from other users."""

    def format(self, record: logging.LogRecord) -> str:
        told = logging.makeLogRecord({**vars(record), "msg": printable(record.getMessage()), "args": None})
        return printable_lines(super().format(told))


class _JsonLines(logging.Formatter):
    def __init__(self, worker: int | None) -> None:
        super().__init__()
        self._of_worker = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, str | int] = {
            "at": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._of_worker,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return printable_json(msgspec.json.encode(entry).decode())


def set_up_logging(level: str, format: str, *, worker: int | None = None) -> None:
    """`worker`: a number in every line, for several processes that write to the same log."""
    handler = logging.StreamHandler()
    of_worker = "" if worker is None else f"worker {worker}: "
    text = _TextLines(f"%(asctime)s %(levelname)-7s {of_worker}%(message)s")
    handler.setFormatter(_JsonLines(worker) if format == "json" else text)
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
