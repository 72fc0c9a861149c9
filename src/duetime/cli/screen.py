"""How things look on a terminal: relative times, tables, marks. Colours only where they are welcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from duetime.clock import SystemClock

if TYPE_CHECKING:
    from duetime.client import RetryPolicy

__all__ = [
    "ago",
    "json_line",
    "lateness",
    "now_ms",
    "painted",
    "relative",
    "retries",
    "shortened",
    "show_fields",
    "show_table",
    "spoken",
    "state",
    "time_of_day",
]

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_STATE_STYLES = {"delivered": "green", "failed": "red", "inFlight": "yellow", "cancelled": "dim", "skipped": "dim"}

now_ms = SystemClock().wall_ms


def painted(text: str, style: str | None) -> str:
    if style is None or not _colours_wanted():
        return text
    return f"\033[{_STYLES[style]}m{text}\033[0m"


def state(name: str) -> str:
    return painted(name, _STATE_STYLES.get(name))


def _colours_wanted() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def spoken(milliseconds: float) -> str:
    """A length of time as one says it: "3 ms", "1.2 s", "29 min", "2 h 5 min", "3 d 4 h"."""
    if milliseconds < 999.5:
        return f"{milliseconds:.0f} ms"
    seconds = milliseconds / 1_000
    if seconds < 9.95:
        return f"{seconds:.1f} s".replace(".0 ", " ")
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 24 * 60:
        return _with_rest(*divmod(minutes, 60), "h", "min")
    days, hours = divmod(round(seconds / 3_600), 24)
    return _with_rest(days, hours if days < 10 else 0, "d", "h")


def _with_rest(count: int, rest: int, unit: str, smaller: str) -> str:
    return f"{count} {unit} {rest} {smaller}" if rest else f"{count} {unit}"


def relative(at_ms: float) -> str:
    """ "in 29 min" or "3 s ago"."""
    distance = at_ms - now_ms()
    return f"in {spoken(distance)}" if distance > 0 else f"{spoken(-distance)} ago"


def ago(at: datetime) -> str:
    return relative(at.timestamp() * 1_000)


def time_of_day() -> str:
    return f"{datetime.fromtimestamp(now_ms() / 1_000, UTC).astimezone():%H:%M:%S}"


def lateness(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{spoken(milliseconds)} late" if milliseconds > 0 else "on time"


def retries(policy: RetryPolicy) -> str:
    times = "any number" if policy.max_retries is None else f"up to {policy.max_retries}"
    up_to = f" up to {policy.max_interval}" if policy.max_interval else ""
    return f"{times}, pauses from {policy.initial_interval}{up_to}, for {policy.max_duration}"


def shortened(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def json_line(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def show_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as their widest cell. Cells may be painted: the paint has no width."""
    rows = [[*row] for row in rows]
    widths = [max([len(heading), *(_width(row[i]) for row in rows)]) for i, heading in enumerate(headings)]
    print("  ".join(painted(h.ljust(w), "dim") for h, w in zip(headings, widths, strict=True)).rstrip())
    for row in rows:
        print("  ".join(cell + " " * (w - _width(cell)) for cell, w in zip(row, widths, strict=True)).rstrip())


def show_fields(fields: Iterable[tuple[str, str]]) -> None:
    listed = [(name, value) for name, value in fields if value]
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        print(f"{painted(name.ljust(width), 'dim')}  {value}")


def _width(cell: str) -> int:
    if "\033" not in cell:
        return len(cell)
    return len(cell) - sum(len(part.partition("m")[0]) + 2 for part in cell.split("\033")[1:])
