"""The tests of the simulator only compute, at the lowest priority beside all others: they may take long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_said: list[str] = []


@pytest.fixture(scope="session")
def say() -> Callable[[str], None]:
    """Prints a line at the end of the run, also if all tests pass."""
    return _said.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for line in _said:
        terminalreporter.write_line(line)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.time_limit(900, "at the lowest priority beside the other tests"))
