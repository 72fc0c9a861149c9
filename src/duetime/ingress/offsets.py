"""What has been done of one partition of Kafka. A consumer commits one offset, which means that all before it is done.
Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["Progress"]


class Progress:
    """Of one partition, from when it was assigned to this instance until it is revoked. Records are received in order
    and done in any order."""

    def __init__(self) -> None:
        self.is_revoked = False
        self.is_held = False  # at a record that cannot be read now: nothing after it is received
        self.committed: int | None = None  # by this instance
        self._open: deque[int] = deque()  # received, and not all done up to here
        self._done: set[int] = set()  # of those
        self._next: int | None = None  # the offset after the last record that was received

    def receive(self, offset: int) -> bool:
        """False: it must not be worked on, for a record before it is held, or it was received before."""
        if self.is_held or (self._next is not None and offset < self._next):
            return False
        self._open.append(offset)
        self._next = offset + 1
        return True

    def is_done(self, offset: int) -> bool:
        """Of an offset that was received."""
        return offset in self._done or not self._open or offset < self._open[0]

    def finish(self, offset: int) -> None:
        if self._open and offset >= self._open[0]:  # else: a repeated acknowledgement
            self._done.add(offset)
        while self._open and self._open[0] in self._done:
            self._done.remove(self._open.popleft())

    @property
    def next_offset(self) -> int | None:
        """The offset after the last record that was received. None: none was."""
        return self._next

    @property
    def uncommitted(self) -> int | None:
        """The offset of the first record that is not done, if it is to be committed: it has not been yet."""
        first = self._open[0] if self._open else self._next
        return None if first == self.committed else first

    @property
    def distance(self) -> int:
        """How many records, done or not, another instance would receive again if this one failed."""
        return len(self._open)
