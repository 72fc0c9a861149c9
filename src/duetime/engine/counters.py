"""What an instance counts over all its shards."""

from __future__ import annotations

from duetime.domain.shares import SHARE

__all__ = ["Counters"]


class Counters:
    """The shards of an instance change these numbers; the engine limits work by them."""

    __slots__ = (
        "bytes_of",
        "unsettled",
        "weight",
        "write_bytes_waiting",
        "write_bytes_waiting_max",
        "writes_of",
        "writes_waiting",
        "writes_waiting_max",
    )

    def __init__(self, writes_waiting_max: int, write_bytes_waiting_max: int = 2**62) -> None:
        self.writes_waiting = 0  # pending writes, those of the commits in flight included
        self.writes_waiting_max = writes_waiting_max  # with so many waiting, no further command is accepted
        self.writes_of: dict[str, int] = {}  # the same writes by namespace; namespaces without any are not in it
        self.write_bytes_waiting = 0  # what those writes hold in memory
        self.write_bytes_waiting_max = write_bytes_waiting_max  # with so many, no further command is accepted
        self.bytes_of: dict[str, int] = {}  # the same bytes by namespace
        self.unsettled = 0  # settlements among the pending writes
        self.weight = 0  # of the timers in memory, in bytes; `LookAhead.add_weight` changes it

    def has_room(self) -> bool:
        """Is so much free that no namespace is over its share? The usual case: nothing else has to be asked then."""
        writes, size = self.writes_waiting, self.write_bytes_waiting
        return writes < SHARE * (self.writes_waiting_max - writes) and size < SHARE * (
            self.write_bytes_waiting_max - size
        )

    @property
    def is_full(self) -> bool:
        """Are there so many writes waiting that no further one is accepted?"""
        return (
            self.writes_waiting >= self.writes_waiting_max or self.write_bytes_waiting >= self.write_bytes_waiting_max
        )

    def is_over_share(self, namespace: str) -> bool:
        """Has this namespace so many writes waiting that it must leave the remaining space to others?"""
        free = self.writes_waiting_max - self.writes_waiting
        bytes_free = self.write_bytes_waiting_max - self.write_bytes_waiting
        return self.writes_of.get(namespace, 0) >= SHARE * free or self.bytes_of.get(namespace, 0) >= SHARE * bytes_free

    def add_write(self, namespace: str, weight: int) -> None:
        self.writes_waiting += 1
        self.write_bytes_waiting += weight
        if namespace in self.writes_of:
            self.writes_of[namespace] += 1
            self.bytes_of[namespace] += weight
        else:
            self.writes_of[namespace] = 1
            self.bytes_of[namespace] = weight

    def remove_write(self, namespace: str, weight: int, count: int = 1) -> None:
        """`count`: so many writes, which weigh so much together."""
        self.writes_waiting -= count
        self.write_bytes_waiting -= weight
        remaining = self.writes_of[namespace] - count
        if remaining:
            self.writes_of[namespace] = remaining
            self.bytes_of[namespace] -= weight
        else:
            del self.writes_of[namespace], self.bytes_of[namespace]

    def add_bytes(self, namespace: str, weight: int) -> None:
        """A write that waits became heavier by so much, or lighter."""
        self.write_bytes_waiting += weight
        self.bytes_of[namespace] += weight
