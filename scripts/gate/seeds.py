"""The seeds that tests draw. pytest plugin: they are noted with the result of the test, and `--seeds-of FILE` draws the
seeds again that are noted in that record.

    seed = new_seed()          # another one each time; the same one in a second look
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from .record import entries_of

__all__ = ["new_seed"]

_drawn: list[int] = []  # by the test that runs now
_to_draw: dict[str, list[int]] = defaultdict(list)  # by test


def new_seed(given: str | None = None) -> int:
    """Another one each time, unless one is given or this is a second look. It is printed with a failure."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    if given is not None:
        seed = int(given)
    elif _to_draw[test]:
        seed = _to_draw[test].pop(0)
    else:
        seed = random.randrange(2**32)
    _drawn.append(seed)
    print(f"seed {seed}")
    return seed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seeds-of", type=Path, metavar="FILE", help="draw the seeds that this record has, test by test")


def pytest_configure(config: pytest.Config) -> None:
    record: Path | None = config.getoption("--seeds-of")
    if record is not None:
        for entry in entries_of(record):
            _to_draw[entry.test] = entry.seeds or _to_draw[entry.test]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _drawn.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    report.seeds = list(_drawn)  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]
