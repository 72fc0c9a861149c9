"""What an instance counts over all its shards."""

from __future__ import annotations

__all__ = ["Counters"]


class Counters:
    """The shards of an instance change these numbers; the engine limits work by them."""

    __slots__ = ("unsettled", "weight", "writes_waiting", "writes_waiting_max")

    def __init__(self, writes_waiting_max: int) -> None:
        self.writes_waiting = 0  # pending writes, those of the commits in flight included
        self.writes_waiting_max = writes_waiting_max  # with so many waiting, no further command is accepted
        self.unsettled = 0  # settlements among the pending writes
        self.weight = 0  # of the timers in memory; `LookAhead.add_weight` changes it
