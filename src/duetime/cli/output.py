"""Output of the commands: tables, relative times, colours (on a terminal only), and JSON as the HTTP API encodes it.

Commands print only with the functions of this module. They escape what a terminal would not show but obey
(`duetime.printable`), because ids, payloads and errors come from other users.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from duetime.clock import SystemClock
from duetime.domain.instants import format_instant
from duetime.printable import printable, printable_json

if TYPE_CHECKING:
    from duetime.client import RetryPolicy

__all__ = [
    "Safe",
    "clear_screen",
    "format_duration",
    "format_lateness",
    "format_relative",
    "format_relative_ms",
    "format_retries",
    "local_time",
    "now_ms",
    "print_fields",
    "print_json",
    "print_line",
    "print_table",
    "printable",
    "shorten",
    "styled",
    "styled_state",
    "to_json",
]

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_STATE_STYLES = {"delivered": "green", "failed": "red", "inFlight": "yellow", "cancelled": "dim", "skipped": "dim"}

now_ms = SystemClock().wall_ms


class Safe(str):
    """Text that is escaped already, and may have the escape sequences of a style. Everything else is escaped when it is
    printed."""

    __slots__ = ()


def _safe(text: str) -> Safe:
    return text if isinstance(text, Safe) else Safe(printable(text))


def styled(text: str, style: str | None) -> Safe:
    text = _safe(text)
    if style is None or not _use_colours():
        return text
    return Safe(f"\033[{_STYLES[style]}m{text}\033[0m")


def styled_state(name: str, width: int = 0) -> Safe:
    return styled(name.ljust(width), _STATE_STYLES.get(name))


def print_line(*parts: str, sep: str = "  ", file: TextIO | None = None) -> None:
    """Print the parts on one line, at once: the reader of a pipe need not wait for the next."""
    print(sep.join(_safe(part) for part in parts), file=file or sys.stdout, flush=True)


def clear_screen() -> None:
    """Before a new page: an empty line, if the output is not a terminal."""
    print("\033[H\033[2J" if sys.stdout.isatty() else "\n", end="")


def _use_colours() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def format_duration(milliseconds: float) -> str:
    """A duration in the unit that suits it: "3 ms", "1.2 s", "29 min", "2 h 5 min", "3 d 4 h"."""
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


def format_relative_ms(at_ms: float) -> str:
    """ "in 29 min" or "3 s ago"."""
    distance = at_ms - now_ms()
    return f"in {format_duration(distance)}" if distance > 0 else f"{format_duration(-distance)} ago"


def format_relative(at: datetime) -> str:
    return format_relative_ms(at.timestamp() * 1_000)


def local_time() -> str:
    return f"{datetime.fromtimestamp(now_ms() / 1_000, UTC).astimezone():%H:%M:%S}"


def format_lateness(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{format_duration(milliseconds)} late" if milliseconds > 0 else "on time"


def format_retries(policy: RetryPolicy) -> str:
    times = "any number" if policy.max_retries is None else f"up to {policy.max_retries}"
    up_to = f" up to {policy.max_interval}" if policy.max_interval else ""
    return f"{times}, pauses from {policy.initial_interval}{up_to}, for {policy.max_duration}"


def shorten(text: str, width: int) -> str:
    text = printable(" ".join(text.split()))
    return text if len(text) <= width else text[: width - 1] + "…"


def to_json(value: Any) -> str:
    return printable_json(msgspec.json.encode(value).decode())


def print_json(value: Any, *, file: TextIO | None = None, flush: bool = False) -> None:
    plain = _as_served(msgspec.to_builtins(value, builtin_types=(datetime,)))
    print(to_json(plain), file=file or sys.stdout, flush=flush)


def _as_served(value: Any) -> Any:
    """As the server encodes it: instants in milliseconds, fields without a value left out. Payloads are not changed."""
    if isinstance(value, dict):
        return {k: v if k == "payload" else _as_served(v) for k, v in value.items() if v is not None}
    if isinstance(value, list | tuple):
        return [_as_served(item) for item in value]
    if isinstance(value, datetime):
        return format_instant(round(value.timestamp() * 1_000))
    return value


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Each column is as wide as its widest cell. Escape sequences of styled cells do not count."""
    rows = [[_safe(cell) for cell in row] for row in rows]
    widths = [max([len(heading), *(_width(row[i]) for row in rows)]) for i, heading in enumerate(headings)]
    print("  ".join(styled(h.ljust(w), "dim") for h, w in zip(headings, widths, strict=True)).rstrip())
    for row in rows:
        print("  ".join(cell + " " * (w - _width(cell)) for cell, w in zip(row, widths, strict=True)).rstrip())


def print_fields(fields: Iterable[tuple[str, str]]) -> None:
    listed = [(name, value) for name, value in fields if value]
    width = max(len(name) for name, _ in listed)
    for name, value in listed:
        print(f"{styled(name.ljust(width), 'dim')}  {_safe(value)}")


def _width(cell: str) -> int:
    if "\033" not in cell:
        return len(cell)
    return len(cell) - sum(len(part.partition("m")[0]) + 2 for part in cell.split("\033")[1:])
