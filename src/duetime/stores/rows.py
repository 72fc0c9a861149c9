"""Timers as rows: the same columns, in the same order, for every database that has columns.

The first three columns are the key of the row. A reached timer has another key than its timer (when it may be purged,
and the uuid of that occurrence), so the key of its timer comes after the columns that both kinds have in common. Times
are milliseconds here; an adapter converts them to the types of its database.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from duetime.domain.instants import LATEST_MS
from duetime.domain.timer import NO_EXTRAS, Extras, Namespace, Outcome, Position, Reached, RetryPolicy, Timer
from duetime.store import Found, Page, Unreadable
from duetime.telemetry import log

__all__ = [
    "DEFAULT_ROW_READER",
    "FIRST_MS",
    "INLINE_CHARS_MIN",
    "KEY_COLUMNS",
    "LARGEST",
    "LAST_MS",
    "REACHED_COLUMNS",
    "REACHED_ROWS_MAX",
    "TIMER_COLUMNS",
    "TIMES",
    "Row",
    "RowReader",
    "StoredRows",
    "as_json",
    "bound_ms",
    "check_types",
    "decode_or_unreadable",
    "found_by_key",
    "found_of",
    "log_unreadable_namespace",
    "namespaces_of",
    "page_of",
    "page_of_items",
    "payload_chars",
    "position_before",
    "position_of",
    "reached_of",
    "reached_values",
    "rows_of_page",
    "timer_of",
    "timer_values",
    "without_payload",
]

K = TypeVar("K")
T = TypeVar("T")

Row = Sequence[Any]

KEY_COLUMNS: Final = ("timer_execute_at", "timer_uuid_high", "timer_uuid_low")
TIMER_COLUMNS: Final = (
    *KEY_COLUMNS,
    "timer_namespace",
    "timer_id",
    "timer_generation",
    "timer_scheduled_at",
    "timer_created_at",
    "timer_attempts",
    "timer_callback_url",
    "timer_payload",
    "timer_retry_policy",
    "timer_callback_timeout_seconds",
    "timer_correlation_id",
    "timer_options",
)
REACHED_COLUMNS: Final = (
    *TIMER_COLUMNS,
    "timer_own_execute_at",
    "timer_own_uuid_high",
    "timer_own_uuid_low",
    "timer_outcome",
    "timer_reached_at",
)
TIMES: Final = frozenset(name for name in REACHED_COLUMNS if name.endswith("_at"))
_OWN_KEY: Final = len(TIMER_COLUMNS)

LARGEST: Final = (1 << 63) - 1  # of one half of a uuid
FIRST_MS: Final = -1
LAST_MS: Final = LATEST_MS + 1  # no timer is stored at or after this time

_encode = msgspec.json.Encoder().encode
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode
_decode_extras = msgspec.json.Decoder(Extras).decode
_decode_namespace = msgspec.json.Decoder(Namespace).decode


def as_json(value: object) -> str:
    return _encode(value).decode()


def bound_ms(at_ms: int) -> int:
    """Limits a bound of a search to the range of timestamps. No timer is stored outside of it."""
    return min(max(at_ms, FIRST_MS), LAST_MS)


def timer_values(timer: Timer) -> tuple[Any, ...]:
    return (timer.execute_at_ms, timer.uuid_high, timer.uuid_low, *_common_values(timer))


def reached_values(reached: Reached) -> tuple[Any, ...]:
    timer = reached.timer
    own = (timer.execute_at_ms, timer.uuid_high, timer.uuid_low)
    return (*reached.position, *_common_values(timer), *own, reached.outcome.value, reached.reached_at_ms)


def _common_values(timer: Timer) -> tuple[Any, ...]:
    return (
        timer.namespace,
        timer.timer_id,
        timer.generation,
        timer.scheduled_at_ms,
        timer.created_at_ms,
        timer.attempts,
        timer.callback_url,
        timer.payload,
        None if timer.retry_policy is None else as_json(timer.retry_policy),
        timer.callback_timeout_seconds,
        timer.correlation_id,
        None if timer.extras is NO_EXTRAS else as_json(timer.extras),
    )


_TYPES: Final[tuple[tuple[str, tuple[type, ...]], ...]] = (
    ("timer_namespace", (str,)),
    ("timer_id", (str,)),
    ("timer_generation", (int,)),
    ("timer_scheduled_at", (int,)),
    ("timer_created_at", (int,)),
    ("timer_attempts", (int,)),
    ("timer_callback_url", (str,)),
    ("timer_payload", (str, NoneType)),
    ("timer_retry_policy", (str, bytes, NoneType)),
    ("timer_callback_timeout_seconds", (int, NoneType)),
    ("timer_correlation_id", (str, NoneType)),
    ("timer_options", (str, bytes, NoneType)),
)
_FIRST_TYPED: Final = len(KEY_COLUMNS)


def check_types(row: Row) -> None:
    """For databases that store any type in any column. Without this check, a wrong type would cause an error much
    later, when the timer is used."""
    for index, (name, types) in enumerate(_TYPES, _FIRST_TYPED):
        if not isinstance(row[index], types):
            raise TypeError(f"{name} is of type {type(row[index]).__name__}")


def timer_of(row: Row, own: int = 0) -> Timer:
    """Decodes a row that begins with TIMER_COLUMNS. `own`: index of the key of the timer in it."""
    namespace, timer_id, generation, callback_url = row[3], row[4], row[5], row[9]
    scheduled_at_ms, created_at_ms, attempts = row[6], row[7], row[8]
    if (
        namespace is None
        or timer_id is None
        or generation is None
        or scheduled_at_ms is None
        or created_at_ms is None
        or attempts is None
        or callback_url is None
    ):
        check_types(row)
    return Timer(
        namespace=namespace,
        timer_id=timer_id,
        uuid_high=row[own + 1],
        uuid_low=row[own + 2],
        generation=generation,
        execute_at_ms=row[own],
        scheduled_at_ms=scheduled_at_ms,
        created_at_ms=created_at_ms,
        callback_url=callback_url,
        attempts=attempts,
        payload=row[10],
        retry_policy=None if row[11] is None else _decode_policy(row[11]),
        callback_timeout_seconds=row[12],
        correlation_id=row[13],
        extras=NO_EXTRAS if row[14] is None else _decode_extras(row[14]),
    )


def reached_of(row: Row) -> Reached:
    """Decodes a row that begins with REACHED_COLUMNS."""
    if None in row[_OWN_KEY : len(REACHED_COLUMNS)]:
        raise TypeError("a column of the reached timer is NULL")
    return Reached(timer=timer_of(row, _OWN_KEY), outcome=Outcome(row[18]), reached_at_ms=row[19], purge_at_ms=row[0])


# --- limits of pages in characters ---------------------------------------------------------------

INLINE_CHARS_MIN: Final = 4_096  # payloads up to this length are always read together with their row

I = TypeVar("I", bound=Timer | Reached)  # noqa: E741


def rows_of_page(chars: Iterable[int], chars_max: int) -> int:
    """How many of these rows, given by the characters of their payloads, belong to a page: up to and with the one with
    which they exceed the limit."""
    count = 0
    for some in chars:
        count += 1
        chars_max -= some
        if chars_max < 0:
            break
    return count


def payload_chars(item: Timer | Reached) -> int:
    timer = item if isinstance(item, Timer) else item.timer
    return 0 if timer.payload is None else len(timer.payload)


def without_payload(item: I) -> I:
    if isinstance(item, Timer):
        return replace(item, payload=None)
    timer = replace(cast(Reached, item).timer, payload=None)
    return cast(I, replace(cast(Reached, item), timer=timer))


def position_before(position: Position) -> Position:
    """The position right before this one. A search after it finds this one first."""
    at_ms, high, low = position
    if low > -LARGEST - 1:
        return Position(at_ms, high, low - 1)
    return Position(at_ms, high - 1, LARGEST) if high > -LARGEST - 1 else Position(at_ms - 1, LARGEST, LARGEST)


# --- rows that cannot be decoded -----------------------------------------------------------------
#
# A row may be damaged by a person, a restore or a disk, or written by a version that must not use this database. Such a
# row must not prevent other rows from being read.

REACHED_ROWS_MAX: Final = 100  # reached rows of one timer that are read if the newest cannot be decoded
ERROR_CHARS_MAX: Final = 200


def position_of(row: Row) -> Position:
    return Position(row[0], row[1], row[2])


def key_of(row: Row) -> tuple[Any, Any]:
    """Namespace and id of a row that may be unreadable."""
    return row[3], row[4]


class RowReader(Struct, frozen=True):
    """How the rows of a database are decoded."""

    timer: Callable[[Any], Timer] = timer_of
    reached: Callable[[Any], Reached] = reached_of
    position: Callable[[Any], Position] = position_of
    key: Callable[[Any], tuple[Any, Any]] = key_of


DEFAULT_ROW_READER: Final = RowReader()


def page_of(rows: Sequence[Any], after: Position | None, reader: RowReader = DEFAULT_ROW_READER) -> Page:
    """Decodes timers. Errors are handled row by row only if there is one: that is slower."""
    read = reader.timer
    try:
        return Page([read(row) for row in rows], after)
    except Exception:
        return page_of_items([decode_or_unreadable(row, read, reader) for row in rows], after)


def page_of_items(items: Iterable[Timer | Unreadable], after: Position | None) -> Page:
    timers: list[Timer] = []
    unreadable: list[Unreadable] = []
    for item in items:
        if isinstance(item, Unreadable):
            unreadable.append(item)
        else:
            timers.append(item)
    return Page(timers, after, unreadable)


def decode_or_unreadable(row: Any, read: Callable[[Any], T], reader: RowReader = DEFAULT_ROW_READER) -> T | Unreadable:
    try:
        return read(row)
    except Exception as error:
        namespace, timer_id = reader.key(row)
        return Unreadable(reader.position(row), _text(namespace), _text(timer_id), in_one_line(error))


StoredRows = tuple[Mapping[K, Any], Mapping[K, Sequence[Any]]]
"""The rows that are stored under some keys: those of timers, and the reached rows."""


async def found_by_key(
    keys: Sequence[K],
    fetch: Callable[[Sequence[K], int], Awaitable[StoredRows[K]]],
    reader: RowReader = DEFAULT_ROW_READER,
) -> dict[K, Found]:
    """`keys` has no duplicates. `fetch(keys, n)` returns the newest n reached rows of each key. More than one is
    fetched only if the newest cannot be decoded."""
    timers, reached_rows = await fetch(keys, 1)
    found = {key: found_of(timers.get(key), reached_rows.get(key, ()), reader) for key in keys}
    undecoded = [key for key, item in found.items() if item.reached is None and key in reached_rows]
    if undecoded:
        timers, reached_rows = await fetch(undecoded, REACHED_ROWS_MAX)
        found |= {key: found_of(timers.get(key), reached_rows.get(key, ()), reader) for key in undecoded}
    return found


def found_of(timer: Any | None, reached_rows: Sequence[Any], reader: RowReader = DEFAULT_ROW_READER) -> Found:
    """Decodes the row of a timer and some of its reached rows."""
    try:
        if len(reached_rows) <= 1:
            return Found(
                None if timer is None else reader.timer(timer),
                reader.reached(reached_rows[0]) if reached_rows else None,
            )
    except Exception:  # noqa: S110 - then each row separately
        pass
    item, error = (None, None) if timer is None else _item_or_error(timer, reader.timer)
    reached = [_item_or_error(row, reader.reached)[0] for row in reached_rows]
    newest = max((r for r in reached if r is not None), key=_age, default=None)
    return Found(item, newest, error)


def _age(reached: Reached) -> tuple[int, int, Position]:
    return reached.timer.generation, reached.reached_at_ms, reached.position


def _item_or_error(row: Any, read: Callable[[Any], T]) -> tuple[T | None, str | None]:
    try:
        return read(row), None
    except Exception as error:
        return None, in_one_line(error)


def in_one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:ERROR_CHARS_MAX]


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def namespaces_of(rows: Iterable[Row]) -> list[Namespace]:
    """Decodes pairs of name and document; sorted by name. One that cannot be decoded is left out and logged."""
    found: list[Namespace] = []
    for name, document in rows:
        try:
            found.append(_decode_namespace(document))
        except Exception as error:
            log_unreadable_namespace(name, in_one_line(error))
    return sorted(found, key=lambda namespace: namespace.name)


_logged_namespaces: set[str] = set()


def log_unreadable_namespace(name: str, error: str) -> None:
    """Logs a namespace once per process, because namespaces are read every few seconds."""
    if name not in _logged_namespaces:
        _logged_namespaces.add(name)
        log.error("namespace %r cannot be decoded and is treated as if it did not exist: %s", name, error)
