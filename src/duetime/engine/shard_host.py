"""What a shard and its engine know of each other: what the shard needs, and how far its release has gone."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Protocol

from duetime.engine.counters import Counters
from duetime.engine.entry import Entry

if TYPE_CHECKING:
    from duetime.engine.shard import Shard

__all__ = ["ShardHost", "ShardState"]


class ShardState(enum.IntEnum):
    """How far the release of a shard has gone. It only moves forward, and may skip states.

    A recovery is independent of it (`Shard.recovering`): a shard that drains may have to recover as well.
    """

    OPEN = 0  # accepts writes and fires
    DRAINING = 1  # starts no delivery, still accepts writes
    CLOSING = 2  # accepts no writes either
    DROPPED = 3  # owned by another instance, or free: nothing of it is in memory


class ShardHost(Protocol):
    """What a shard needs of its engine: the counters, the heap, the memory limit and the group commit."""

    counters: Counters

    def arm(self, entry: Entry) -> None: ...
    def disarm(self, entry: Entry) -> None: ...
    def discard(self, entry: Entry) -> None:
        """The timer was QUEUED, and will not be called with: it need not wait any more."""
        ...

    def add_weight(self, weight: int) -> None:
        """Count a timer that enters memory, or with a negative weight one that leaves it."""
        ...

    def enqueue(self, shard: Shard) -> None:
        """The shard has pending writes to commit."""
        ...

    def boot_ms(self) -> int: ...
