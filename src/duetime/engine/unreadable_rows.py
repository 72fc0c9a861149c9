"""Stored rows of a shard that cannot be decoded: they do not fire. Only the first ones are kept."""

from __future__ import annotations

from typing import Final

from duetime.domain.timer import Position, TimerKey
from duetime.store import Unreadable
from duetime.telemetry import log

__all__ = ["UnreadableRows"]

_ROWS_MAX: Final = 1_000


class UnreadableRows:
    def __init__(self, shard_id: int) -> None:
        self.rows: dict[Position, Unreadable] = {}
        self.truncated = False  # there are more than are kept
        self._shard_id = shard_id
        self._keys: set[tuple[str, str]] = set()

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: Unreadable) -> None:
        if row.position in self.rows:
            return
        if len(self.rows) >= _ROWS_MAX:
            self.truncated = True
            return
        self.rows[row.position] = row
        self._keys.add((row.namespace, row.timer_id))
        log.error(
            "timer %r of namespace %r (shard %d) cannot be decoded and does not fire; create it again or delete it: %s",
            row.timer_id,
            row.namespace,
            self._shard_id,
            row.error,
        )

    def discard(self, key: TimerKey) -> None:
        """This timer was written again, or deleted."""
        if self._keys and key in self._keys:
            self._keys.discard(key)
            self.rows = {at: row for at, row in self.rows.items() if (row.namespace, row.timer_id) != key}
