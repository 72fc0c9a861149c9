"""The tickets of timers that are not due yet: a heap for each namespace, and a heap of their first tickets.

Namespaces with due timers take turns, a few timers at a time. A ticket that was removed stays in its heap and is
skipped when it is popped.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["COUNTER_BITS", "DueHeaps"]

T = TypeVar("T")

COUNTER_BITS = 32  # of a ticket: the lower bits; the others are the due time
_POPPED_PER_TURN = 16
_REMOVED_MAX = 1_000  # removed tickets that may stay in a heap, besides as many as there are others


class _NamespaceHeap:
    __slots__ = ("armed", "first_listed", "is_due", "name", "tickets")

    def __init__(self, name: str) -> None:
        self.name = name
        self.tickets: list[int] = []
        self.armed = 0  # tickets that were not removed
        self.first_listed = -1  # the ticket with which it is in the heap of heads; -1: it is not
        self.is_due = False  # it is among those that take turns

    def __lt__(self, other: _NamespaceHeap) -> bool:  # heads with the same ticket: any order
        return self.name < other.name


class DueHeaps(Generic[T]):
    def __init__(self) -> None:
        self._armed: dict[int, T] = {}
        self._heaps: dict[str, _NamespaceHeap] = {}
        self._heads: list[tuple[int, _NamespaceHeap]] = []  # also out of date ones: `first_listed` says which
        self._turns: deque[_NamespaceHeap] = deque()  # heaps that had due tickets when they were last looked at

    def add(self, ticket: int, namespace: str, item: T) -> bool:
        """True: it is the first one of its namespace."""
        self._armed[ticket] = item
        heap = self._heaps.get(namespace)
        if heap is None:
            heap = self._heaps[namespace] = _NamespaceHeap(namespace)
        heapq.heappush(heap.tickets, ticket)
        heap.armed += 1
        if heap.tickets[0] != ticket:
            return False
        if not heap.is_due:
            self._list_head(heap)
        return True

    def remove(self, ticket: int, namespace: str) -> bool:
        """False: there is no such ticket."""
        if self._armed.pop(ticket, None) is None:
            return False
        heap = self._heaps[namespace]
        heap.armed -= 1
        if not heap.armed:
            heap.tickets = []
        elif len(heap.tickets) > 2 * heap.armed + _REMOVED_MAX:
            heap.tickets = [ticket for ticket in heap.tickets if ticket in self._armed]
            heapq.heapify(heap.tickets)
        return True

    def tickets(self) -> list[int]:
        return list(self._armed)

    def next_ticket(self) -> int | None:
        """The ticket to wake up for; 0: there are due ones left of those that `pop_due` has looked at."""
        if self._turns:
            return 0
        self._clean_heads()
        return self._heads[0][0] if self._heads else None

    def first(self) -> int | None:
        """The lowest ticket of all."""
        lowest: int | None = None
        for heap in self._turns:
            if self._drop_removed(heap) and (lowest is None or heap.tickets[0] < lowest):
                lowest = heap.tickets[0]
        self._clean_heads()
        if self._heads and (lowest is None or self._heads[0][0] < lowest):
            lowest = self._heads[0][0]
        return lowest

    def pop_due(self, due_before: int, count: int) -> Iterator[T]:
        """Up to `count` items with tickets below this. The caller may add and remove others between two of them."""
        self._clean_heads()
        while self._heads and self._heads[0][0] < due_before:
            heap = heapq.heappop(self._heads)[1]
            heap.first_listed = -1
            heap.is_due = True
            self._turns.append(heap)
            self._clean_heads()
        while self._turns and count:
            heap = self._turns[0]
            for _ in range(min(count, _POPPED_PER_TURN)):
                if not self._drop_removed(heap) or heap.tickets[0] >= due_before:
                    break
                count -= 1
                heap.armed -= 1
                yield self._armed.pop(heapq.heappop(heap.tickets))
            self._turns.popleft()
            if self._drop_removed(heap) and heap.tickets[0] < due_before:
                self._turns.append(heap)
            else:
                heap.is_due = False
                self._list_head(heap)

    def _drop_removed(self, heap: _NamespaceHeap) -> bool:
        """Remove tickets from its top that are no longer there. False: it has no others."""
        tickets, armed = heap.tickets, self._armed
        while tickets and tickets[0] not in armed:
            heapq.heappop(tickets)
        return bool(tickets)

    def _list_head(self, heap: _NamespaceHeap) -> None:
        """Put it into the heap of heads with its first ticket, or forget it if it has none."""
        if not self._drop_removed(heap):
            if self._heaps.get(heap.name) is heap:
                del self._heaps[heap.name]
            return
        if heap.first_listed != heap.tickets[0]:
            heap.first_listed = heap.tickets[0]
            heapq.heappush(self._heads, (heap.first_listed, heap))
            if len(self._heads) > 2 * len(self._heaps) + _REMOVED_MAX:
                self._heads = [(other.first_listed, other) for other in self._heaps.values() if other.first_listed >= 0]
                heapq.heapify(self._heads)

    def _clean_heads(self) -> None:
        """Remove heads from the top that are out of date."""
        while self._heads:
            ticket, heap = self._heads[0]
            if ticket == heap.first_listed and ticket in self._armed:
                return
            heapq.heappop(self._heads)
            if ticket == heap.first_listed:  # it was removed: the next one is the head
                heap.first_listed = -1
                self._list_head(heap)
