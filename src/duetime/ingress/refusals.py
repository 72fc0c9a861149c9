"""Commands that became dead letters: how many, the last reason, and their log lines.

Lines are limited for each tenant by itself, so that one with many wrong commands neither fills the log nor hides the
lines of another. What was not logged is counted, and the count is logged when the pause ends.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from duetime.telemetry import log

__all__ = ["Refusals"]

_PAUSE_SECONDS: Final = 10.0
_LINES_MAX: Final = 3  # of a tenant, within the pause
_TENANTS_MAX: Final = 50  # with lines of their own; publishers may invent tenants
_REASON_CHARS_MAX: Final = 500


class _Tenant(Struct):
    until: float
    subject: str
    lines: int = 0
    unlogged: int = 0
    reason: str = ""


class Refusals:
    def __init__(self, name: str) -> None:
        self.count = 0  # since the start
        self.reason: str | None = None  # the last one
        self._last_at = 0.0
        self._name = name  # of the broker
        self._tenants: dict[str | None, _Tenant] = {}

    def add(self, tenant: str | None, subject: str, reason: str, now: float) -> None:
        """`tenant`: the one of the subject, which only its publishers may use. None: all share one subject."""
        self.count += 1
        self.reason, self._last_at = reason[:_REASON_CHARS_MAX], now
        if tenant not in self._tenants and len(self._tenants) >= _TENANTS_MAX:
            tenant, subject = None, "several tenants"
        of = self._tenants.get(tenant)
        if of is None:
            of = self._tenants[tenant] = _Tenant(now + _PAUSE_SECONDS, subject)
        if of.lines < _LINES_MAX:
            of.lines += 1
            log.warning("%s: a command of %r became a dead letter: %s", self._name, subject, self.reason)
        else:
            of.unlogged += 1
            of.reason = self.reason

    def age_ms(self, now: float) -> int | None:
        """Of the last one."""
        return None if self.reason is None else int((now - self._last_at) * 1_000)

    def report(self, now: float, *, is_end: bool = False) -> None:
        """Log the count of what was not logged in a pause that has ended. `is_end`: all of it."""
        for tenant, of in [*self._tenants.items()]:
            if of.until > now and not is_end:
                continue
            del self._tenants[tenant]
            if of.unlogged:
                log.warning(
                    "%s: %d more commands of %r became dead letters, the last: %s",
                    self._name,
                    of.unlogged,
                    of.subject,
                    of.reason,
                )
