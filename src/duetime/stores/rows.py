"""How timers are rows: the same columns, in the same order, for every database that has columns.

The first three are the row's key. A reached timer is stored under a key of its own (when it may be purged, and the
uuid of that occurrence), so its timer's key comes after what both kinds have in common. Times are milliseconds here;
what a database makes of them is for its adapter to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from duetime.model import NO_EXTRAS, Ending, Extras, Namespace, Reached, RetryPolicy, Timer
from duetime.timetext import LATEST_MS

__all__ = [
    "FIRST_MS",
    "KEY_COLUMNS",
    "LARGEST",
    "LAST_MS",
    "REACHED_COLUMNS",
    "TIMER_COLUMNS",
    "TIMES",
    "Row",
    "as_json",
    "bound_ms",
    "decode_namespace",
    "reached_of",
    "reached_values",
    "timer_of",
    "timer_values",
]

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

LARGEST: Final = (1 << 63) - 1  # of the halves of a uuid
FIRST_MS: Final = -1
LAST_MS: Final = LATEST_MS + 1  # no timer is stored at or after it

_encode = msgspec.json.Encoder().encode
_decode_policy = msgspec.json.Decoder(RetryPolicy).decode
_decode_extras = msgspec.json.Decoder(Extras).decode
decode_namespace = msgspec.json.Decoder(Namespace).decode


def as_json(value: object) -> str:
    return _encode(value).decode()


def bound_ms(at_ms: int) -> int:
    """A bound of a search, brought to where a timestamp can be; beyond that nothing is stored anyway."""
    return min(max(at_ms, FIRST_MS), LAST_MS)


def timer_values(timer: Timer) -> tuple[Any, ...]:
    return (timer.execute_at_ms, timer.uuid_high, timer.uuid_low, *_common_values(timer))


def reached_values(reached: Reached) -> tuple[Any, ...]:
    timer = reached.timer
    own = (timer.execute_at_ms, timer.uuid_high, timer.uuid_low)
    return (*reached.position, *_common_values(timer), *own, reached.ending.value, reached.reached_at_ms)


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


def timer_of(row: Row, own: int = 0) -> Timer:
    """Of a row that begins with TIMER_COLUMNS. `own`: where in it the timer's own key stands."""
    return Timer(
        namespace=row[3],
        timer_id=row[4],
        uuid_high=row[own + 1],
        uuid_low=row[own + 2],
        generation=row[5],
        execute_at_ms=row[own],
        scheduled_at_ms=row[6],
        created_at_ms=row[7],
        callback_url=row[9],
        attempts=row[8],
        payload=row[10],
        retry_policy=None if row[11] is None else _decode_policy(row[11]),
        callback_timeout_seconds=row[12],
        correlation_id=row[13],
        extras=NO_EXTRAS if row[14] is None else _decode_extras(row[14]),
    )


def reached_of(row: Row) -> Reached:
    """Of a row that begins with REACHED_COLUMNS."""
    return Reached(timer=timer_of(row, _OWN_KEY), ending=Ending(row[18]), reached_at_ms=row[19], purge_at_ms=row[0])
