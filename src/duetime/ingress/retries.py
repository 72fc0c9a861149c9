"""What this instance has handed back to the broker for a retry: how many commands wait, and why. For status and log.

It is counted by the second in which a command comes again, so that it needs little memory however many wait.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from duetime.telemetry import log

__all__ = ["Retries"]

_LOG_EVERY_SECONDS: Final = 60.0
# Commands of a short burst come again within seconds: that is no news.
_LOG_AFTER_SECONDS: Final = 5.0
_REASON_CHARS_MAX: Final = 500


class Retries:
    def __init__(self, name: str) -> None:
        self._name = name  # of the broker
        self._ends: dict[int, Counter[str | None]] = {}  # by second: how many, by tenant beyond its quota; None: others
        self._reasons: dict[bool, str] = {}  # the last one, by whether it was a quota
        self._reason = ""
        self._wait_since: float | None = None
        self._log_at = 0.0

    def add(self, tenant: str | None, reason: str, seconds: float, now: float) -> None:
        """`tenant`: the one that is beyond its quota. None: another reason."""
        self._ends.setdefault(int(now + seconds) + 1, Counter())[tenant] += 1
        self._reason = self._reasons[tenant is not None] = reason[:_REASON_CHARS_MAX]

    def count(self, now: float) -> int:
        self._remove_ended(now)
        return sum(counts.total() for counts in self._ends.values())

    def reason(self, now: float) -> str | None:
        """The last one. None: nothing waits."""
        self._remove_ended(now)
        return self._reason if self._ends else None

    def _remove_ended(self, now: float) -> None:
        for end in [end for end in self._ends if end <= now]:
            del self._ends[end]

    def report(self, now: float) -> None:
        """Log what waits, if it has waited for some seconds and was not logged for a minute."""
        self._remove_ended(now)
        if not self._ends:
            self._wait_since = None
            return
        if self._wait_since is None:
            self._wait_since = now
        if now - self._wait_since < _LOG_AFTER_SECONDS or now < self._log_at:
            return
        self._log_at = now + _LOG_EVERY_SECONDS
        waiting: Counter[str | None] = Counter()
        for counts in self._ends.values():
            waiting.update(counts)
        others = waiting.pop(None, 0)
        if waiting:
            tenant, most = waiting.most_common(1)[0]
            log.warning(
                "%s: %d commands of %d tenant%s wait for their quota, the most (%d) of %r",
                self._name,
                waiting.total(),
                len(waiting),
                "s" * (len(waiting) != 1),
                most,
                tenant,
            )
        if others:
            log.warning("%s: %d commands wait for a retry: %s", self._name, others, self._reasons[False])
