"""pytest plugin: `--record FILE` writes what became of every test, a JSON object per line, as soon as it is known.

With pytest-xdist the process that distributes the tests writes. A failure is *final* if the load of the machine cannot
have made it; `Entry.final` says why. Then there is no second look.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

__all__ = ["Entry", "FinalFailure", "entries_of", "server_log"]

STARTED, FINISHED, FAILED_TO_COLLECT = "started", "finished", "collection"
DIED = "???"  # the phase in pytest-xdist's report of a test whose process ended


class FinalFailure(AssertionError):
    """A failure that the load of the machine cannot have made, such as a violation that the checker found."""


class Entry(msgspec.Struct):
    """One line: a test has started, a phase of it (setup, call, teardown) has ended, or it has finished."""

    test: str
    phase: str
    outcome: str = ""  # passed, failed or skipped
    seconds: float = 0.0
    text: str = ""  # of a failure, with what the test printed
    final: str = ""  # why a failure is no noise; empty: it may be
    seeds: list[int] = []


def entries_of(record: Path) -> list[Entry]:
    """What was written so far. The last line may be incomplete if the process was killed."""
    lines = record.read_bytes().splitlines() if record.exists() else []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Entry))
        except msgspec.DecodeError:
            assert line is lines[-1], f"{record} is damaged"
    return found


# --- what makes a failure final ------------------------------------------------------------------

# Tests without servers and processes of their own, by the beginning of their names.
_DETERMINISTIC = ("tests/unit/", "tests/docs/", "tests/sim/", "tests/conformance/test_stores.py")
_TRACEBACK = "Traceback (most recent call last)"

_logs: dict[Path, int] = {}  # of Duetime servers that this process has started, and their length when the test began


def server_log(log: Path) -> None:
    """Notes the log of a Duetime server: a traceback in it makes the failure of a test final."""
    _logs.setdefault(log, _length_of(log))


def why_final(test: str, phase: str, error: BaseException | None, logs: Sequence[tuple[Path, int]] = ()) -> str:
    """Empty: a second look may show that it was noise."""
    if test.startswith(_DETERMINISTIC):
        return "a test without servers"
    if phase == "teardown":
        return "failed while tearing down"
    if phase == DIED:
        return "its process ended"
    if _holds_final(error):
        return "a verdict of the checker"
    with_traceback = [log for log, begins_at in logs if _TRACEBACK in _text_of(log, begins_at)]
    return f"a traceback in {with_traceback[0]}" if with_traceback else ""


def _holds_final(error: BaseException | None) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return any(_holds_final(one) for one in error.exceptions)
    return isinstance(error, FinalFailure)


def _length_of(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _text_of(log: Path, begins_at: int) -> str:
    return log.read_bytes()[begins_at:].decode(errors="replace") if log.exists() else ""


# --- the plugin ----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, metavar="FILE", help="write what becomes of every test to this file")


def pytest_configure(config: pytest.Config) -> None:
    record: Path | None = config.getoption("--record")
    if record is None:
        return
    (record.parent / f"{os.getpid()}.pid").touch()  # whom to ask where it is
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(record), "duetime-record")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    for log in _logs:
        _logs[log] = _length_of(log)
    begun = _begun(item)
    _ended_here.clear()
    if begun is not None and begun.exists():
        _ended_here.add(item.nodeid)
    elif begun is not None:
        begun.touch()
    result = yield
    if begun is not None:
        begun.unlink(missing_ok=True)
    return result


_ended_here: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest-xdist gives the tests of a process that ended to a new one, and among them the one in which it ended."""
    if item.nodeid in _ended_here:
        pytest.fail("a process of the tests ended in this test: it is not started again", pytrace=False)


def _begun(item: pytest.Item) -> Path | None:
    """Exists while the test runs, and if its process ended in it."""
    record: Path | None = item.config.getoption("--record")
    if record is None or not hasattr(item.config, "workerinput"):
        return None
    return record.parent / f"{hashlib.sha256(item.nodeid.encode()).hexdigest()[:24]}.begun"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        error = None if call.excinfo is None else call.excinfo.value
        report.final = why_final(report.nodeid, report.when, error, list(_logs.items()))  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


class Recorder:
    def __init__(self, record: Path) -> None:
        self._file = record.open("ab")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write(Entry(nodeid, STARTED))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = Entry(report.nodeid, str(report.when), report.outcome, report.duration)
        entry.seeds = getattr(report, "seeds", [])
        if report.failed:
            entry.text = _shown(report)
            entry.final = getattr(report, "final", "") or why_final(report.nodeid, str(report.when), None)
        self._write(entry)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(Entry(nodeid, FINISHED))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = _shown(report)
            self._write(Entry(report.nodeid, FAILED_TO_COLLECT, "failed", 0.0, text, "failed while collecting"))

    def _write(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")
        self._file.flush()


def _shown(report: Any) -> str:
    """The failure as pytest shows it, with what the test printed."""
    text = io.StringIO()
    write: Callable[[str], int] = text.write
    write(report.longreprtext + "\n")
    for title, content in report.sections:
        write(f"--- {title} ---\n{content}\n")
    return text.getvalue()
